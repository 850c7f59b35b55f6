# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of operands with formats. The library launches them inside the passes of a layer
(`native.grouped_step`); tests and benches, alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_quant.ops.native import Operand, gemms


def grouped_operand_code(o: Operand) -> int:
    """`native.operand_code`, also of 16-bit values with one scale per group."""
    return gemms.operand_code(o.fmt) or (o.scale is not None) << 3


def _grouped_arguments(a: Operand, b: Operand, offsets: Tensor) -> tuple:
    codes = grouped_operand_code(a), grouped_operand_code(b)
    return a.data, b.data, a.scale, b.scale, offsets, *codes


def grouped_gemm(
    a: Operand,
    b: Operand,
    offsets: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    flag: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute out[rows of e] = a[rows of e] b[e]^T (+ bias[e]). Group e owns the rows from
    offsets[e] to offsets[e + 1].

    a:        [rows, K] codes; scales per tensor ([1] or [E]), per row or of 1x128 blocks, as for
              one operand of all rows. Or bf16 values without scales or with scales per tensor; b is
              then the same.
    b:        [E, N, K] codes; stacked scales per tensor or per row (one set for all groups, or one
              per group), or of 1x128 or 128x128 blocks (one set per group).
    offsets:  int32 [E + 1] on the device, E at most 1024; the host never reads it.
    out:      [rows, N] bf16 or fp32. The kernel does not write rows outside all groups; in a new
              tensor they are uninitialized.
    flag:     int32 [1], set to 1 if offsets decrease or leave [0, rows]; they are clamped.
    bias:     bf16 or fp32 [E, N], added to fp32 sums.

    sm_90. Raises ValueError for shapes, dtypes and alignments, NotImplementedError for pairs that
    no kernel multiplies.
    """
    if out is None:
        out = a.data.new_empty((a.data.shape[0], b.data.shape[1]), dtype=out_dtype)
    gemms._ops.grouped_gemm(out, *_grouped_arguments(a, b, offsets), flag, bias=bias)
    return out


def grouped_gemm_wgrad(
    a: Operand,
    b: Operand,
    offsets: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    flag: Tensor | None = None,
) -> Tensor:
    """Compute out[e] (+)= a[:, tokens of e] b[:, tokens of e]^T. Group e owns the tokens from
    offsets[e] to offsets[e + 1].

    a, b:     [M, tokens], [N, tokens] codes; scales of 1x128 blocks (128x128 for b) over all
              tokens, or per tensor or per row (one set for all groups, or one per group, stacked).
    offsets:  int32 [E + 1] on the device, E at most 1024, multiples of 128 (the last may be the
              number of tokens).
    out:      [E, M, N] bf16 or fp32; with `accumulate`, fp32. A group without tokens writes zeros;
              with `accumulate` it adds nothing.
    flag:     int32 [1], set to 1 if offsets decrease, leave [0, tokens] or are not multiples of
              128; they are clamped.

    sm_90. Raises ValueError for shapes, dtypes and alignments, NotImplementedError for pairs that
    no kernel multiplies.
    """
    if out is None:
        if accumulate:
            raise ValueError("grouped_gemm_wgrad(accumulate=True) adds to `out`, got out=None")
        out = a.data.new_empty(
            (offsets.shape[0] - 1, a.data.shape[0], b.data.shape[0]), dtype=out_dtype
        )
    gemms._ops.grouped_gemm_wgrad(out, *_grouped_arguments(a, b, offsets), accumulate, flag)
    return out

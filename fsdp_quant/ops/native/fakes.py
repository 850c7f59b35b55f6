# SPDX-License-Identifier: Apache-2.0
"""Register shapes of results for torch.compile, and FLOPs for `torch.utils.flop_counter`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...formats import ceil_div, round_up
from .. import extension
from ..capability import ELEMENTS
from ..layout import SPREAD_BLOCKS
from .encoding import TILE, encoding_shapes
from .layouts import OF_TENSOR, anchor_shape
from .norms import amaxes_like

_ops = torch.ops.fsdp_quant


def _floats(x: Tensor, size: int | Sequence[int]) -> Tensor:
    return x.new_empty(size, dtype=torch.float32)


def _sides(row: int, col: int):
    return [(side, bool(d)) for d, side in enumerate((row, col)) if side]


# The dispatcher omits trailing arguments that equal their default, so fakes receive fewer.
def _fake_quantize(x, row, col, row_eps, col_eps, row0, round_to_bf16, *known):
    results = []
    for side, columnwise in _sides(row, col):
        of = encoding_shapes(side, columnwise, x.shape, row0)
        amax, tensor_amax = (*known, *[None] * 8)[4 * columnwise : 4 * columnwise + 2]
        results += [
            x.new_empty(of.data, dtype=torch.uint8),
            x.new_empty(of.scale, dtype=of.scale_dtype),
        ]
        results += [_floats(x, 1)] if of.has_tensor_amax and tensor_amax is None else []
        results += [_floats(x, of.amax)] if of.has_amax and amax is None else []
    return results


def _fake_anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, round_to_bf16):
    results = []
    for (side, columnwise), run in zip(((row, False), (col, True)), (row_run, col_run)):
        if side:
            of = encoding_shapes(side, columnwise, x.shape, run=run)
            results += [x.new_empty(of.data, dtype=torch.uint8), _floats(x, of.scale)]
    return results


def _fake_statistics(x, row, col, row0, round_to_bf16):
    results = []
    for side, columnwise in _sides(row, col):
        of = encoding_shapes(side, columnwise, x.shape, row0)
        results += [_floats(x, of.amax)] + ([_floats(x, 1)] if of.has_tensor_amax else [])
    return results


def _fake_statistics_group(x, side, columnwise, row0, round_to_bf16):
    sides = (0, side) if columnwise else (side, 0)
    return [
        t
        for one, start in zip(x, row0)
        for t in _fake_statistics(one, *sides, start, round_to_bf16)
    ]


def _fake_anchor_codes(data, scale, tensor_amax, side, columnwise, transposed, whole, cols, run=0):
    *matrices, rows, _ = data.shape
    run = OF_TENSOR if whole else run
    sizes = (cols, rows) if transposed else (rows, cols)
    return data.new_empty((*matrices, *sizes)), _floats(
        data, (*matrices, *anchor_shape(rows, cols, columnwise, run))
    )


def _fake_swizzle(scale, outer, outer_block, transposed):
    blocks = scale.shape[0 if transposed else 1]
    of_32 = SPREAD_BLOCKS * blocks if scale.dtype is torch.float32 else round_up(blocks, 4)
    return scale.new_empty(round_up(outer, TILE) * of_32, dtype=torch.uint8)


FAKES = {
    "quantize": _fake_quantize,
    "quantize_anchored": _fake_anchored,
    "statistics": _fake_statistics,
    "column_sums": lambda x: x.new_empty(x.shape[1]),
    "quantize_group": lambda *args: None,
    "quantize_group_out": lambda *args: None,
    "statistics_group": _fake_statistics_group,
    "cast_pieces": lambda *args: None,
    "cast_scales": lambda *args: None,
    "dequantize": lambda data, scale, tensor_amax, side, columnwise, cols, row0, dtype: (
        data.new_empty((data.shape[0], cols), dtype=dtype)
    ),
    "random_key": lambda step, ids, slot, rows: step.new_empty(5),
    "random_key.after": lambda step, ids, slot, rows, after: step.new_empty(5),
    "record_amax": lambda amaxes, amax: None,
    "tensor_decode_scale": lambda tensor_amax, side: _floats(tensor_amax, tensor_amax.numel()),
    "transpose_codes": lambda data, rows, cols, bits: data.new_empty(
        (cols, ceil_div(rows, 2) if bits == 4 else rows)
    ),
    "swizzle_scales": _fake_swizzle,
    "anchor_group": lambda *args: None,
    "anchor_codes": _fake_anchor_codes,
    "relayout_group": lambda *args: None,
    "activation": lambda g, u, kind: (g.new_empty(g.shape), amaxes_like(g, 1)),
    "activation_backward": lambda dh, g, u, kind: (
        g.new_empty(g.shape),
        g.new_empty(0 if u is None else g.shape),
        amaxes_like(g, 1 + (u is not None)),
    ),
    "norm": lambda x, weight, bias, eps, centred, *rest: (
        x.new_empty(x.shape),
        _floats(x, 1),
        _floats(x, x.numel() // x.shape[-1]),
        _floats(x, x.numel() // x.shape[-1] if centred else 0),
    ),
    # flags: zero_centered, rounds_first, has_bias
    "norm_backward": lambda dy, x, weight, residual, rstd, mean, *flags: (
        x.new_empty(x.shape),
        _floats(x, 1),
        x.new_empty(x.shape[-1]),
        x.new_empty(x.shape[-1] if flags[2] else 0),
    ),
    "adam": lambda *args: None,
    "adam_group": lambda *args: None,
    "adam_count": lambda step, *args: step[0].new_empty((len(step), 8)),
    "gemm": lambda a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, *rest, **options: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=out_dtype
    ),
    "gemm_out": lambda *args, **options: None,
    "product_error": lambda *args: None,
    "grouped_gemm": lambda *args, **options: None,
    "grouped_gemm_wgrad": lambda *args, **options: None,
}


def _flops(a: Sequence[int], b: Sequence[int], kind: int = 0) -> int:
    """Count 2 M N K for a [M, K] and b [N, K]. kind: `operand_code` of a; 4-bit codes have two
    elements per byte of K."""
    return 2 * a[0] * prod(b) * (2 if kind & 7 == ELEMENTS["e2m1"] else 1)


# Under `activation_memory_budget` a partitioner that is set to include library operators may
# recompute them, by these counts. Then the forward GEMM of a gathered weight may run again, so the
# backward gathers both directions.
FLOPS = {
    "gemm": lambda a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    "gemm_out": lambda out, a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    # each row of a times its group's [N, K]
    "grouped_gemm": lambda out, a, b, *rest, **options: _flops(a, b[1:]),
    "grouped_gemm_wgrad": lambda out, a, b, *rest, **options: _flops(a, b),
}
if extension.is_loaded():
    for _name, _fake in FAKES.items():
        torch.library.register_fake(f"fsdp_quant::{_name}", _fake)
    for _name, _formula in FLOPS.items():
        register_flop_formula(getattr(_ops, _name))(_formula)

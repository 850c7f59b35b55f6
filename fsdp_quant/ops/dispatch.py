"""Where an operation runs: the compiled kernel when there is one for the device and format, else the reference.

Both give the same bytes. Callers pass every direction they want of one tensor together, so that a kernel
reads the tensor once. `dtype` is what the encoder sees: values are rounded to it first (None: they are not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counters import counters
from ..formats import Direction, Encoding, Format
from . import layout, native, reference


class Statistics(NamedTuple):
    """amax: fp32 [block rows, block cols] or None; tensor_amax: fp32 [1] or None."""

    amax: Tensor | None
    tensor_amax: Tensor | None


class Encoded(NamedTuple):
    """The buffers of one storage (see `Storage`), and the amax they were made from, where one scale spans a row or more."""

    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    amax: Tensor | None


def _split(
    x: Tensor, encodings: Sequence[Encoding], dtype: torch.dtype | None, row0: int
) -> tuple[list[int], list[int], Tensor, bool]:
    """(indices that a kernel makes, indices that the reference makes, x as the kernel reads it, rounded to bf16 there)."""
    through_bf16 = x.dtype is torch.float32 and dtype is torch.bfloat16
    values = x if through_bf16 else _as(x, dtype)
    taken = [i for i, e in enumerate(encodings) if native.encodes(values, e, row0)]
    if len({encodings[i].direction for i in taken}) < len(taken):
        taken = taken[:1]  # a kernel makes one of each direction
    return taken, [i for i in range(len(encodings)) if i not in taken], values, through_bf16


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def statistics(
    x: Tensor, encodings: Sequence[Encoding], row0: int = 0, dtype: torch.dtype | None = None
) -> list[Statistics]:
    """Block and tensor amaxes of x [rows, cols] for each encoding; `row0` places x in the global tensor."""
    taken, rest, values, through_bf16 = _split(x, encodings, dtype, row0)
    results: dict[int, Statistics] = {}
    if taken:
        made = native.statistics(values, [encodings[i] for i in taken], row0, through_bf16)
        results = {i: Statistics(*m) for i, m in zip(taken, made)}
    for i in rest:
        results[i] = Statistics(*reference.statistics(reference.prepared(_as(x, dtype), encodings[i]), encodings[i], row0))
    return [results[i] for i in range(len(encodings))]


def encode(
    x: Tensor,
    encodings: Sequence[Encoding],
    stats: Sequence[Statistics] | None,
    row0: int = 0,
    keys: Sequence[Tensor | None] | None = None,
    encs: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Encoded]:
    """Codes and scales of x [rows, cols]; one result an encoding.

    stats:  shared by every rank that holds a part of the tensor; None: x is the whole tensor.
    keys:   int64 [5] an encoding (`rng.KEY_FIELDS`), for stochastic rounding.
    encs:   fp32 [1] an encoding, for delayed scaling: the factor of a history, 0 while there is none.
    """
    taken, rest, values, through_bf16 = _split(x, encodings, dtype, row0)
    results: dict[int, Encoded] = {}
    if taken:
        chosen = [[of[i] for i in taken] if of is not None else None for of in (stats, keys, encs)]
        made = native.quantize(values, [encodings[i] for i in taken], row0, through_bf16, *chosen)
        results = {i: Encoded(*m) for i, m in zip(taken, made)}
    for i in rest:
        e, prepared = encodings[i], reference.prepared(_as(x, dtype), encodings[i])
        amax, tensor_amax = stats[i] if stats is not None else reference.statistics(prepared, e, row0)
        enc = encs[i] if encs is not None else None
        if enc is not None:
            enc = reference.delayed_factor(enc, amax, e)
        data, scale = reference.encode(prepared, amax, tensor_amax, e, row0, keys[i] if keys else None, enc)
        results[i] = Encoded(data, scale, tensor_amax, amax)
    for i, e in enumerate(encodings):
        if e.fmt.is_quantized:
            counters.add("quantize", (e.fmt.name, e.direction.value, "native" if i in taken else "reference"))
    return [results[i] for i in range(len(encodings))]


def decode(
    data: Tensor, scale: Tensor | None, tensor_amax: Tensor | None, fmt: Format, direction: Direction,
    cols: int, row0: int = 0, dtype: torch.dtype | None = None,
) -> Tensor:
    """element * scale (* tensor scale) in fp32 [rows, cols], rounded once to `dtype`; scale None leaves that factor out.

    Identity keeps its own dtype where `dtype` is None.
    """
    if native.runs(data) and native.why_not(fmt) is None:
        return native.dequantize(data, scale, tensor_amax, fmt, direction, cols, row0, dtype or torch.float32)
    return _as(reference.decode(data, scale, tensor_amax, fmt, direction, cols, row0), dtype)


# GEMM layouts #

def transpose_codes(data: Tensor, rows: int, cols: int, fmt: Format) -> Tensor:
    """Codes of [rows, cols] as those of its transpose, packed along dim 1 again; contiguous."""
    if fmt.is_quantized and native.runs(data):
        return native.transpose_codes(data, rows, cols, fmt.element.bits)
    return layout.repack_nibbles(data, rows, cols) if fmt.element.bits == 4 else data.t().contiguous()


def swizzle_scales(scale: Tensor, outer: int, outer_block: int, transposed: bool) -> Tensor:
    """One-byte block scales, one a row of the operand, in 128 x 4 tiles (`layout.swizzle_128x4`), padding zero.

    scale:        uint8 [outer blocks, contraction blocks]; transposed: [contraction blocks, outer blocks].
    outer:        rows of the operand.
    outer_block:  rows that share a scale.
    """
    if native.runs(scale):
        return native.swizzle_scales(scale, outer, outer_block, transposed)
    rows = (scale.t() if transposed else scale).repeat_interleave(outer_block, 0)[:outer]
    return layout.swizzle_128x4(rows)

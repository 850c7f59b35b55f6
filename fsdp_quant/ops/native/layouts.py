# SPDX-License-Identifier: Apache-2.0
"""Dequantize codes, and convert them to the layouts that GEMMs read. Mirrors csrc/api/layout.cpp
and operands.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import ROWWISE, Direction, Encoding, Format, ceil_div, round_up
from ..layout import ANCHOR_RUNS, ANCHORED_TENSOR
from .encoding import TILE, TRANSPOSE_BYTES, TRANSPOSE_NIBBLES, pack_codes, pack_encoding

_ops = torch.ops.fsdp_quant


def dequantize(
    data: Tensor,
    scale: Tensor | None,
    tensor_amax: Tensor | None,
    fmt: Format,
    direction: Direction,
    cols: int,
    row0: int,
    dtype: torch.dtype,
) -> Tensor:
    """Decode codes to [rows, cols]: element * scale (* tensor scale) in fp32, rounded once to
    `dtype`."""
    packed, columnwise = pack_codes(fmt, direction)
    return _ops.dequantize(data, scale, tensor_amax, packed, columnwise, cols, row0, dtype)


def tensor_decode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    return _ops.tensor_decode_scale(tensor_amax, pack_encoding(Encoding(fmt, ROWWISE)))


def transpose_codes(data: Tensor, rows: int, cols: int, bits: int) -> Tensor:
    return _ops.transpose_codes(data, rows, cols, bits)


class RecordedLaunch(NamedTuple):
    """An operator call that writes `out`. Calling the object launches it again into the same
    memory."""

    operator: Callable[..., object]
    arguments: tuple
    out: list[Tensor]

    def __call__(self) -> None:
        self.operator(*self.arguments)


def _called(call: RecordedLaunch, calls: list[RecordedLaunch] | None) -> list[Tensor]:
    """Launch `call`, append it to `calls`, and return the tensors that it wrote."""
    call()
    if calls is not None:
        calls.append(call)
    return call.out


def multi_tensor_transpose(
    data: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    bits: int,
    calls: list[RecordedLaunch] | None = None,
) -> list[Tensor]:
    """Transpose codes [rows, cols] of each tensor (`transpose_codes`), in one launch, which is
    appended to `calls` for replay."""
    rows, cols = ([s[i] for s in shapes] for i in range(2))
    sizes = [(c, ceil_div(r, 2) if bits == 4 else r) for r, c in zip(rows, cols)]
    out = [d.new_empty(size) for d, size in zip(data, sizes)]
    return _called(_transposing(data, out, rows, cols, bits), calls)


def _transposing(
    data: Sequence[Tensor], out: list[Tensor], rows: list[int], cols: list[int], bits: int
) -> RecordedLaunch:
    n, kind = len(data), TRANSPOSE_NIBBLES if bits == 4 else TRANSPOSE_BYTES
    arguments = list(data), out, [kind] * n, rows, cols, [0] * n, [1] * n
    return RecordedLaunch(_ops.relayout_group, arguments, out)


def transpose_stack(data: Sequence[Tensor], shape: Sequence[int], bits: int) -> Tensor:
    """Transpose codes of E matrices of one shape [rows, cols] into one buffer, [E, cols, bytes of
    rows]."""
    n, (rows, cols) = len(data), shape
    out = data[0].new_empty(n, cols, ceil_div(rows, 2) if bits == 4 else rows)
    _transposing(data, list(out.unbind()), [rows] * n, [cols] * n, bits)()
    return out


def swizzle_scales(scale: Tensor, outer: int, outer_block: int, transposed: bool) -> Tensor:
    return _ops.swizzle_scales(scale, outer, outer_block, transposed)


OF_TENSOR, OF_TILE = -2, -3  # values of `run`: an anchor per tensor, and per 128 x 128 tile


def anchor_run(layout: str) -> int:
    """Return the `run` that operators accept for this layout: elements of the contraction that
    share an anchor, 0 for all, or OF_TENSOR or OF_TILE."""
    if layout in ANCHOR_RUNS:
        return ANCHOR_RUNS[layout] or 0
    return OF_TENSOR if layout == ANCHORED_TENSOR else OF_TILE


def anchor_shape(rows: int, cols: int, columnwise: bool, run: int) -> tuple[int, ...]:
    """Return the shape of the fp32 scales of anchored codes [rows, cols], one per `run`."""
    lines, length = (cols, rows) if columnwise else (rows, cols)
    if run == OF_TILE:
        return ceil_div(lines, TILE), round_up(ceil_div(length, TILE), 4)
    if run in (OF_TENSOR, 0):
        return (1,) if run == OF_TENSOR else (lines,)
    return ceil_div(length, run), round_up(lines, 4)


def anchor_codes(
    data: Tensor,
    scale: Tensor,
    tensor_amax: Tensor | None,
    cols: int,
    fmt: Format,
    direction: Direction,
    transposed: bool,
    run: int = 0,
) -> tuple[Tensor, Tensor]:
    """Anchor codes to one exponent per `run` (`anchor_run`), as `dispatch.anchor_codes`.

    data:        [rows, row bytes]; with e8m0 scales also matrices [E, rows, row bytes], if `run` is
                 a line, a tile or a tensor.
    transposed:  store the codes as [cols, rows].
    """
    packed, columnwise = pack_codes(fmt, direction)
    of_tensor = run == OF_TENSOR
    run = 0 if of_tensor else run
    return _ops.anchor_codes(
        data, scale, tensor_amax, packed, columnwise, transposed, of_tensor, cols, run
    )


def multi_tensor_anchor(
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    tensor_amax: Sequence[Tensor | None],
    cols: Sequence[int],
    fmt: Format,
    direction: Direction,
    transposed: bool,
    run: int = 0,
    calls: list[RecordedLaunch] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Anchor the codes of each tensor (`anchor_codes`), in one call, which is appended to `calls`
    for replay."""
    packed, columnwise = pack_codes(fmt, direction)
    shapes = [(len(d), c) for d, c in zip(data, cols)]
    codes = [d.new_empty(shape[::-1] if transposed else shape) for d, shape in zip(data, shapes)]
    lines = [
        d.new_empty(anchor_shape(*shape, columnwise, run), dtype=torch.float32)
        for d, shape in zip(data, shapes)
    ]
    arguments = (
        list(data),
        list(scale),
        [] if tensor_amax[0] is None else list(tensor_amax),
        packed,
        columnwise,
        transposed,
        run == OF_TENSOR,
        list(cols),
        codes,
        lines,
        0 if run == OF_TENSOR else run,
    )
    _called(RecordedLaunch(_ops.anchor_group, arguments, codes + lines), calls)
    return list(zip(codes, lines))

# SPDX-License-Identifier: Apache-2.0
"""Arguments of kernels: encodings packed into integers, shapes of their buffers, and devices that
run the kernels. Mirrors csrc/api/encoding.cpp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import COLUMNWISE, ROWWISE, Direction, Encoding, Format
from .. import extension, opaque
from ..capability import ARCHITECTURES, Place, is_compiled, unsupported_reason

COMPACT, OPERAND = 0, 3  # layouts of csrc/quantize/quantize.h, as HOPPER and BLACKWELL
TRANSPOSE_BYTES, TRANSPOSE_NIBBLES, SWIZZLE, SWIZZLE_TRANSPOSED = range(4)
TRANSPOSED_BITS = (4, 8)  # bits of the codes that a kernel transposes
TILE = 128
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
SCALE_SIDES = 8  # most encodings of one call of cast_scales
PIECE_VALUES = (torch.float32, torch.bfloat16)  # dtypes of masters and of values that are sent
_ops = torch.ops.fsdp_quant


@functools.cache
def pack_encoding(encoding: Encoding, transposed: bool = False, layout: int = COMPACT) -> int:
    """Pack an encoding into the integer that operators accept. csrc/api/encoding.cpp alone writes
    and reads its bits.

    transposed:  store columnwise codes as [cols, rows].
    layout:      layout of the scales: COMPACT, HOPPER or BLACKWELL. OPERAND: e4m3 codes with one
                 fp32 scale per tensor, for a format that `decodes_exactly_to_e4m3`.
    """
    fmt = encoding.fmt
    outer, contraction = fmt.block
    return _pack(
        fmt.element.name,
        fmt.scale,
        fmt.pow2,
        fmt.scale_rounding,
        fmt.scale_rule,
        outer or 0,
        contraction or 0,
        encoding.stochastic,
        fmt.rotated,
        transposed,
        layout,
        fmt.four_over_six,
        fmt.scale_per,
    )


def written_as(encoding: Encoding) -> Encoding:
    """Return the encoding that wrote codes: of a turned format, that of the other direction."""
    if not encoding.fmt.is_turned:
        return encoding
    other = COLUMNWISE if encoding.direction is ROWWISE else ROWWISE
    return Encoding(encoding.fmt.turned, other, encoding.stochastic, encoding.eps)


def pack_codes(fmt: Format, direction: Direction) -> tuple[int, bool]:
    """Return the packed encoding of existing codes, and whether its blocks lie along columns."""
    encoding = written_as(Encoding(fmt, direction))
    return pack_encoding(encoding), encoding.direction is not ROWWISE


def _pack(*fields: str | int | bool) -> int:
    if not hasattr(_ops, "pack_encoding"):
        return 0  # of a plan for another machine, which is not run here
    return _ops.pack_encoding(*fields)


# Dynamo calls `_pack` while it traces and keeps the number as a constant.
# torch.compiler.assume_constant_result does the same, but imports dynamo.
_pack._dynamo_marked_constant = True


class EncodingShapes(NamedTuple):
    """Buffers that `quantize` returns for one direction of a tensor.

    data, scale:      sizes, in the layouts that the packed integer names.
    amax:             [block rows, block cols], in every layout of the scales.
    byte_scales:      scales are uint8, else fp32.
    tensor_amax:      [1], or [lines] of a scale per row, of the tensor amax of a two-level format,
                      fp32; () of others.
    has_amax:         returns amaxes, because the scales span the contraction.
    """

    data: tuple[int, ...]
    scale: tuple[int, ...]
    amax: tuple[int, ...]
    byte_scales: bool
    tensor_amax: tuple[int, ...]
    has_amax: bool

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.byte_scales else torch.float32


def encoding_shapes(
    packed: int, columnwise: bool, shape: Sequence[int], row0: int = 0, run: int | None = None
) -> EncodingShapes:
    """Return the shapes of the buffers that operators allocate for one direction of a tensor [rows,
    cols].

    packed:  from `pack_encoding`.
    shape:   (rows, cols); lengths may be symbolic.
    run:     elements that share an anchor, 0: the whole contraction. Then `scale` is the scales of
             `quantize_anchored`. None: no anchors.
    """
    rows, cols = shape
    # not cached with symbols, which belong to one trace
    known = isinstance(rows, int) and isinstance(cols, int) and isinstance(row0, int)
    return (_known_shapes if known else _known_shapes.__wrapped__)(
        packed, columnwise, rows, cols, row0, run
    )


@functools.cache
def _known_shapes(
    packed: int, columnwise: bool, rows: int, cols: int, row0: int, run: int | None
) -> EncodingShapes:
    data, scale, amax, *has = _ops.encoding_shapes(packed, columnwise, rows, cols, row0, run)
    byte_scales, tensor_amax, has_amax = has
    sizes = tuple(data), tuple(scale), tuple(amax)
    return EncodingShapes(*sizes, byte_scales, tuple(tensor_amax), has_amax)


def is_available_on(device: Place) -> bool:
    """Return whether kernels run on this device."""
    if isinstance(device, str):
        return is_compiled(device)
    return device.type == "cuda" and extension.runs_on(device) is None


@opaque.compiled_as(lambda x: is_available_on(x.device))  # dynamo traces no warning
def is_available_for(x: Tensor) -> bool:
    """Return whether kernels run on the device of x. Warns once if they are off there."""
    return x.is_cuda and extension.runs_on(x.device, warn=True) is None


def encodes(encoding: Encoding, dtype: torch.dtype, whole_tiles: bool = True) -> bool:
    """Return whether a kernel encodes values of `dtype` so, on devices that run kernels. The
    reference encodes the rest.

    whole_tiles:  the first row begins a tile of the global tensor, so that this rank holds all rows
                  that a rotation mixes.
    """
    fmt = encoding.fmt
    if dtype not in FLOATING or fmt.is_turned or unsupported_reason(fmt) is not None:
        return False
    return whole_tiles or not (fmt.rotated and encoding.direction is not ROWWISE)


def supported(fmt: Format, device: Place) -> dict[str, str | None]:
    """Return operation -> the reason that no kernel runs it for this format on this device, None if
    one does."""
    reason = None if isinstance(device, str) else extension.runs_on(device)
    reason = reason or unsupported_reason(fmt)
    blackwell = (
        "swizzled scales are for one-byte scales" if fmt.scale not in ("e8m0", "e4m3") else None
    )
    of_codes = dict.fromkeys(("quantize", "statistics", "dequantize", "transpose"), reason)
    return of_codes | {"swizzle": reason or blackwell}


def scale_layout_of(arch: str) -> int:
    """Return the layout in which the tensor cores of `arch` read scales."""
    return ARCHITECTURES[arch].scale_layout if arch in ARCHITECTURES else COMPACT

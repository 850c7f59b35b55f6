# SPDX-License-Identifier: Apache-2.0
"""GEMM layouts: the padding, swizzle and transposes that tensor cores require, of compact buffers.

Functions come in inverse pairs on plain tensors. Padding is zero and never reaches a result.

Sources: cuBLAS 13 documentation, "Narrow precision data types usage" (128x4 scale tiles, fp32 block
scales).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import E4M3, PACKINGS, Format, anchored_format, ceil_div, spread_format

TILE_ROWS, TILE_COLS = 128, 4
SPREAD_BLOCKS = 4  # of 32 elements, in one of 128

# Layouts of the buffers of a matrix:
#   compact   see `Storage`
# and of operands [outer, contraction] as tensor cores read them:
#   native    with the scales of the format
#   spread    fp32 power-of-two scales of 128 elements as e8m0 scales of (1, 32): each repeated for
#             four blocks (of 128 x 128 also for 128 rows), in tiles (`swizzle_128x4`)
#   anchored  block scales folded into the codes, with one fp32 power-of-two scale per tensor [1],
#             per line [outer], per run of a line [contraction / run, outer], or per tile
#             [outer / 128, contraction / 128]
COMPACT: Final = "compact"
NATIVE, SPREAD = "native", "spread"
ANCHORED_TENSOR, ANCHORED = "anchored tensor", "anchored"
ANCHORED_512, ANCHORED_128 = "anchored 512", "anchored 128"
# Of operand b in grouped GEMMs, whose operand a is anchored by runs of 128.
ANCHORED_TILE = "anchored 128x128"
# elements that share a scale; None: a whole line
ANCHOR_RUNS = {ANCHORED: None, ANCHORED_512: 512, ANCHORED_128: 128}
ANCHORS_OF_BOTH = (ANCHORED_TENSOR, *ANCHOR_RUNS)  # coarsest first, which are multiplied fastest
ANCHORS = (*ANCHORS_OF_BOTH, ANCHORED_TILE)
LAID_OUT = (NATIVE, SPREAD)  # exact: the compact storage can be restored
LAYOUTS = (COMPACT, *LAID_OUT, *ANCHORS)

# For contractions over tokens that ranks or groups share, where no scale spans all tokens: with one
# scale per line, one token much larger than the others would cost them their last bits. GEMMs of
# runs of 512 are faster than of 128 (H200, geometric means over bf16: 1.34 and 1.21, fp32 += 1.28
# and 1.14). cuBLASLt has no such scales: these GEMMs run in our kernel (k1x512,
# csrc/gemm/sm90_gemm_kernel.cuh). Stochastically rounded codes are anchored per line afterwards,
# because kernels that anchor while they quantize round to nearest.
OVER_TOKENS = ANCHORED_512


def is_exact_operand(fmt: Format, layout: str) -> bool:
    """Quantizers write codes of this format in this layout, one scale per tensor, without losing
    bits."""
    return layout == ANCHORED_TENSOR and fmt.decodes_exactly_to_e4m3 and not fmt.is_turned


def is_anchored_of_codes(fmt: Format, layout: str) -> bool:
    """No kernel quantizes values into this anchored layout: compact codes are encoded first."""
    by_kernel = fmt.block[0] == 1 and fmt.element.operand == fmt.element
    return layout in ANCHORS and not by_kernel and not is_exact_operand(fmt, layout)


def is_anchored_as_encoded(fmt: Format, layout: str) -> bool:
    """A kernel quantizes values into this layout with the bytes that anchoring their compact codes
    gives: e4m3, in blocks of (1, 32)."""
    return layout == ANCHORED_TENSOR and (
        fmt.element,
        fmt.block,
        fmt.scale,
        fmt.scale_rounding,
    ) == (E4M3, (1, 32), "e8m0", "up")


def is_encoded_as(fmt: Format, layout: str) -> bool:
    """Quantizers write codes of this format in this layout, with the bytes that converting compact
    codes gives."""
    if fmt.is_turned:
        return False
    return (
        layout in (COMPACT, *LAID_OUT)
        or is_exact_operand(fmt, layout)
        or is_anchored_as_encoded(fmt, layout)
    )


def operand_format(fmt: Format, layout: str) -> Format:
    """The format by which a GEMM decodes codes and scales of `fmt` in this layout: anchored ones
    have scales per tensor, line or run."""
    if layout == SPREAD:
        return spread_format(fmt)
    if layout == ANCHORED_TENSOR:
        return anchored_format(fmt, None, whole=True)
    if layout == ANCHORED_TILE:
        return anchored_format(fmt, TILE_ROWS, outer=TILE_ROWS)
    return anchored_format(fmt, ANCHOR_RUNS[layout]) if layout in ANCHOR_RUNS else fmt


def flat_bytes(t: Tensor) -> Tensor:
    """uint8 [nbytes] of a tensor's elements in their order; a view if it is contiguous."""
    t = t.contiguous()  # which tensors of no or of one element are, with any strides
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def row_bytes(t: Tensor) -> int:
    return t.itemsize * prod(t.shape[1:])


def rows_of_bytes(t: Tensor) -> Tensor:
    """Rows [M, ..] as uint8 [M, bytes]; a view if they are contiguous."""
    if t.dtype is torch.uint8 and t.dim() == 2 and t.is_contiguous():
        return t
    return flat_bytes(t).view(len(t), row_bytes(t))


def adjoining(tensors: Sequence[Tensor]) -> Tensor | None:
    """torch.cat of tensors [n, ..] as a view, if each begins in memory where the one before ends;
    else None."""
    first, end = tensors[0], tensors[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for t in tensors:
        if (
            not t.is_contiguous()
            or t.storage_offset() != end
            or t.untyped_storage().data_ptr() != memory
        ):
            return None
        end += t.numel()
    flat = first.as_strided((end - first.storage_offset(),), (1,))  # one row has any strides
    return flat.view(sum(map(len, tensors)), *first.shape[1:])


def pad_to(x: Tensor, rows: int, cols: int) -> Tensor:
    """x [m, n] zero-padded to multiples of `rows` and `cols`; x itself if they are."""
    missing = -x.shape[1] % cols, -x.shape[0] % rows
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def swizzle_128x4(scale: Tensor) -> Tensor:
    """Block scales [outer, blocks] in 128x4 tiles of 512 bytes, tiles row-major: flat uint8.

    Inside a tile, (i, j) is at (i % 32) * 16 + (i // 32) * 4 + j.
    """
    padded = pad_to(scale, TILE_ROWS, TILE_COLS)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, TILE_COLS))  # [R, 4, 32, C, 4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def spread_scales(scale: Tensor, outer: int, outer_block: int) -> Tensor:
    """fp32 powers of two [outer blocks, contraction blocks] as e8m0 scales [outer, 4 * contraction
    blocks]."""
    # 2^-127 is subnormal, and 0
    codes = (scale.contiguous().view(torch.int32) >> 23).bitwise_and_(0xFF).to(torch.uint8)
    return codes.repeat_interleave(outer_block, 0)[:outer].repeat_interleave(SPREAD_BLOCKS, 1)


def scales_before_spread(flat: Tensor, fmt: Format, outer: int, contraction: int) -> Tensor:
    """Exponents, uint8 [outer blocks, contraction blocks], of the swizzled `spread_scales` of a
    format's codes [outer, contraction]."""
    outer_block, block = fmt.block
    blocks = SPREAD_BLOCKS * ceil_div(contraction, block or contraction)
    return unswizzle_128x4(flat, outer, blocks)[::outer_block, ::SPREAD_BLOCKS]


def unswizzle_128x4(flat: Tensor, outer: int, blocks: int) -> Tensor:
    """The logical [outer, blocks] scales of `swizzle_128x4`'s result."""
    tiles = flat.reshape(ceil_div(outer, TILE_ROWS), ceil_div(blocks, TILE_COLS), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)[:outer, :blocks]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, one per byte, packed along the last dim into whole containers (`formats.PACKINGS`),
    the first in the lowest bits."""
    count, size = PACKINGS[bits]
    if count == 1:
        return codes
    codes = F.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    word = _word(codes if size == 1 else codes.int(), bits)
    return word if size == 1 else _split_word(word, 8, size)


def unpack(data: Tensor, bits: int) -> Tensor:
    """The codes of `pack`, uint8, those of the padding too."""
    count, size = PACKINGS[bits]
    if count == 1:
        return data
    word = _word((data if size == 1 else data.int()).unflatten(-1, (-1, size)), 8)
    return _split_word(word, bits, count)


def _word(parts: Tensor, bits: int) -> Tensor:
    """Parts of so many bits along the last dim as one number, the first in the lowest bits."""
    shifted = (part << (bits * i) for i, part in enumerate(parts.unbind(-1)))
    return functools.reduce(torch.bitwise_or, shifted)


def _split_word(word: Tensor, bits: int, count: int) -> Tensor:
    parts = [word >> (bits * i) & ((1 << bits) - 1) for i in range(count)]
    return torch.stack(parts, -1).flatten(-2).to(torch.uint8)


def repack(data: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    """Codes packed along dim 1 of [rows, cols], as codes packed along dim 1 of the transpose; of
    whole values the transpose."""
    if bits >= 8:
        return data.t().contiguous()
    return pack(unpack(data, bits)[:, :cols].t(), bits).contiguous()

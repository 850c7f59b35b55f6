# SPDX-License-Identifier: Apache-2.0
"""GEMM layouts: padding, swizzle and transposes that a tensor core asks for, derived from compact
buffers.

All functions are inverse pairs on plain tensors; padding is zero and never reaches a result.

Sources: cuBLAS 13 documentation, "Narrow precision data types usage" (128x4 scale tiles, fp32 block
scales).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import E4M3, PACKINGS, Format, anchored_format, ceil_div, spread_format

TILE_ROWS, TILE_COLS = 128, 4
SPREAD_BLOCKS = 4  # of 32 elements, in one of 128

# How the buffers of a storage lie. compact: see `Storage`. The others are operands [outer,
# contraction] as tensor cores read them: native with the format's own scales; spread: fp32 scales
# of 128 that are powers of two as e8m0 scales of (1, 32), each for four blocks (of 128 x 128 also
# for 128 rows), in tiles (`swizzle_128x4`); anchored (block scales that are powers of two) with one
# fp32 scale for the tensor, [1], for a line, [outer], for each run of its elements, [contraction /
# run, outer], or for each tile, [outer / 128, contraction / 128].
COMPACT: Final = "compact"
NATIVE, SPREAD = "native", "spread"
ANCHORED_TENSOR, ANCHORED = "anchored tensor", "anchored"
ANCHORED_512, ANCHORED_128 = "anchored 512", "anchored 128"
# Of weights of a product of groups, whose tokens are anchored by runs of 128.
ANCHORED_TILE = "anchored 128x128"
# elements that share a scale; None: a line's
ANCHOR_RUNS = {ANCHORED: None, ANCHORED_512: 512, ANCHORED_128: 128}
ANCHORS_OF_BOTH = (ANCHORED_TENSOR, *ANCHOR_RUNS)  # coarsest first, which are multiplied fastest
ANCHORS = (*ANCHORS_OF_BOTH, ANCHORED_TILE)
LAID_OUT = (NATIVE, SPREAD)  # the numbers of the compact storage, which can be had back
LAYOUTS = (COMPACT, *LAID_OUT, *ANCHORS)

# Where ranks or groups share the tokens that a product contracts, and no scale is of all of them:
# one token that is far larger than the others would cost them their last bits. 512 is multiplied
# faster than 128 (H200, geometric means over bf16: 1.34 and 1.21, fp32 += 1.28 and 1.14).
# cuBLASLt has no such scales: these GEMMs are our own kernel's (k1x512,
# csrc/gemm/sm90_gemm_kernel.cuh).
# Codes that were rounded stochastically are anchored by line afterwards: kernels that anchor as
# they quantize round to nearest.
OVER_TOKENS = ANCHORED_512


def is_exact_operand(fmt: Format, layout: str) -> bool:
    """Codes of this format lose no bits in this layout, an operand of one scale per tensor, and
    quantizers write it."""
    return layout == ANCHORED_TENSOR and fmt.decodes_exactly_to_e4m3


def is_anchored_of_codes(fmt: Format, layout: str) -> bool:
    """No kernel quantizes values into this layout of anchors: their compact codes are made
    first."""
    by_kernel = fmt.block[0] == 1 and fmt.element.operand == fmt.element
    return layout in ANCHORS and not by_kernel and not is_exact_operand(fmt, layout)


def is_anchored_as_encoded(fmt: Format, layout: str) -> bool:
    """A kernel quantizes values into this layout as if it brought their compact codes into it:
    e4m3, in blocks of (1, 32)."""
    return layout == ANCHORED_TENSOR and (
        fmt.element,
        fmt.block,
        fmt.scale,
        fmt.scale_rounding,
    ) == (E4M3, (1, 32), "e8m0", "up")


def is_encoded_as(fmt: Format, layout: str) -> bool:
    """Quantizers write codes of this format in this layout, and compact ones that are brought into
    it are the same."""
    return (
        layout in (COMPACT, *LAID_OUT)
        or is_exact_operand(fmt, layout)
        or is_anchored_as_encoded(fmt, layout)
    )


def operand_format(fmt: Format, layout: str) -> Format:
    """What codes and scales of `fmt` mean as the operand of a product: anchored ones have scales of
    tensors, lines or runs."""
    if layout == SPREAD:
        return spread_format(fmt)
    if layout == ANCHORED_TENSOR:
        return anchored_format(fmt, None, whole=True)
    if layout == ANCHORED_TILE:
        return anchored_format(fmt, TILE_ROWS, outer=TILE_ROWS)
    return anchored_format(fmt, ANCHOR_RUNS[layout]) if layout in ANCHOR_RUNS else fmt


def adjoining(tensors: Sequence[Tensor]) -> Tensor | None:
    """torch.cat of tensors [n, ..] as a view of their memory, where each begins at the end of the
    one before; else None."""
    first, at = tensors[0], tensors[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for t in tensors:
        if (
            not t.is_contiguous()
            or t.storage_offset() != at
            or t.untyped_storage().data_ptr() != memory
        ):
            return None
        at += t.numel()
    return first.as_strided((sum(len(t) for t in tensors), *first.shape[1:]), first.stride())


def pad_to(x: Tensor, rows: int, cols: int) -> Tensor:
    """x [m, n] zero-padded so that m is a multiple of `rows` and n of `cols`; x where they are."""
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

# SPDX-License-Identifier: Apache-2.0
"""Convert compact scales to the layouts that GEMMs read, and back.

[Note: GEMM layouts]
Codes are [outer, contraction] for both operands (K-major), 4- and 6-bit codes packed along the
contraction: columnwise codes are transposed. Scales depend on layout, format and architecture:

    native, fp32       1x128 blocks: [contraction blocks, outer rounded up to 4]; 128x128 blocks:
                       [outer blocks, contraction blocks rounded up to 4]; scales that span the
                       whole contraction: [outer], or [1] per tensor
    native, one byte   sm_90a: [outer, blocks]; sm_100f, sm_120f: one per row of the operand (square
                       blocks expanded), in swizzled 128x4 tiles
    spread             e8m0 scales of 32 elements, in swizzled 128x4 tiles
    anchored           fp32: per tensor [1]; per line [outer]; per run [contraction / run, outer
                       rounded up to 4]; per tile [outer / 128, contraction / 128 rounded up to 4]

Padding is zero.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..formats import ROWWISE, Direction, Format, round_up
from . import dispatch, native
from .capability import ARCHITECTURES, BLACKWELL
from .layout import (
    ANCHORS,
    NATIVE,
    SPREAD,
    SPREAD_BLOCKS,
    TILE_COLS,
    TILE_ROWS,
    pad_to,
    unswizzle_128x4,
)


def has_scales_by_row(fmt: Format, layout: str) -> bool:
    """Return whether native scales are [contraction blocks, outer]."""
    return layout == NATIVE and fmt.has_fp32_scales and fmt.block[0] == 1


def native_scale(scale: Tensor, fmt: Format, direction: Direction, outer: int, arch: str) -> Tensor:
    """Convert compact scales [block rows, block cols] to the NATIVE layout of `arch`.

    Raises NotImplementedError for an unknown architecture.
    """
    if arch not in ARCHITECTURES:
        raise NotImplementedError(
            f"no GEMM layout for {arch!r}; layouts exist for {', '.join(ARCHITECTURES)}"
        )
    if fmt.scale_leaves_contraction:
        return scale.reshape(-1).contiguous()
    if _is_swizzled(fmt, arch):
        return swizzled_scale(scale, fmt, direction, outer)
    scale = in_native_order(scale, fmt, direction)
    return (pad_to(scale, 1, 4) if fmt.has_fp32_scales else scale).contiguous()


def swizzled_scale(scale: Tensor, fmt: Format, direction: Direction, outer: int) -> Tensor:
    return dispatch.swizzle_scales(scale, outer, fmt.block[0] or outer, direction is not ROWWISE)


def in_native_order(scale: Tensor, fmt: Format, direction: Direction) -> Tensor:
    """Return a view of compact scales as [outer blocks, contraction blocks]; for fp32 scales of
    1x128 blocks as [contraction blocks, outer]."""
    return scale.t() if (direction is not ROWWISE) != has_scales_by_row(fmt, NATIVE) else scale


def compact_scale(scale: Tensor, fmt: Format, outer: int, contraction: int, arch: str) -> Tensor:
    """Invert `native_scale`. Returns scales [outer blocks, contraction blocks]."""
    outer_blocks, blocks = fmt.scale_shape((outer, contraction), ROWWISE) or (1, 1)
    if fmt.scale_leaves_contraction:
        return scale.reshape(-1, 1)
    if has_scales_by_row(fmt, NATIVE):
        return scale.reshape(blocks, round_up(outer, 4))[:, :outer].t()
    if fmt.has_fp32_scales:
        return scale.reshape(outer_blocks, round_up(blocks, 4))[:, :blocks]
    if _is_swizzled(fmt, arch):
        return unswizzle_128x4(scale, outer, blocks)[:: fmt.block[0]]
    return scale.reshape(outer_blocks, blocks)


def scale_counts(fmt: Format, layout: str, outer: int, contraction: int) -> set[int]:
    """Return the numbers of scales that an operand may have, on any architecture."""
    if layout in ANCHORS:
        return {prod(native.anchor_shape(outer, contraction, False, native.anchor_run(layout)))}
    outer_blocks, blocks = fmt.scale_shape((outer, contraction), ROWWISE) or (1, 1)
    if fmt.scale_leaves_contraction:
        return {outer_blocks}
    if layout == SPREAD:
        return {round_up(outer, TILE_ROWS) * SPREAD_BLOCKS * blocks}
    if has_scales_by_row(fmt, layout):
        return {blocks * round_up(outer, 4)}
    if fmt.has_fp32_scales:
        return {outer_blocks * round_up(blocks, 4)}
    return {outer_blocks * blocks, round_up(outer, TILE_ROWS) * round_up(blocks, TILE_COLS)}


def _is_swizzled(fmt: Format, arch: str) -> bool:
    return not fmt.has_fp32_scales and ARCHITECTURES[arch].scale_layout == BLACKWELL

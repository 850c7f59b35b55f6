# SPDX-License-Identifier: Apache-2.0
"""Define anchored operands, in PyTorch: 8-bit codes whose blocks share one scale per tensor, line
or run of the contraction. Every kernel equals this definition bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import E4M3, FP8_EXACT_OPERAND, Direction, Encoding, Format, ceil_div
from .reference import (
    blocked,
    cast_codes,
    decode,
    decode_codes,
    e8m0_code,
    inverse_exponent,
    known,
    power_of_two,
    scaled_by_block,
    statistics,
    tensor_decode_scale,
)

_TILE = 128


def e4m3_operand(
    data: Tensor,
    scale: Tensor,
    tensor_amax: Tensor | None,
    fmt: Format,
    direction: Direction,
    cols: int,
) -> tuple[Tensor, Tensor]:
    """Convert codes of a format that `becomes_e4m3` to e4m3 codes with one scale per tensor.

    data:     compact codes [rows, row bytes] of cols columns.
    scale:    uint8 [block rows, block cols].
    returns:  (uint8 [rows, cols], fp32 [1]).

    A code becomes e4m3(element * scale * 2^-3), and the tensor's scale 8 D, with D the tensor's
    decode scale. With `fp8_exact` scales, blocks whose scale is 2^-3 or more are exact, and smaller
    ones lose bits below 2^-9. Others are rounded from six significant bits to four.
    """
    codes = cast_codes(decode(data, scale, None, fmt, direction, cols) * FP8_EXACT_OPERAND, E4M3)
    decode_scale = tensor_decode_scale(known(tensor_amax, "the tensor amax"), fmt)
    return codes.contiguous(), decode_scale / FP8_EXACT_OPERAND


def anchored(x: Tensor, encoding: Encoding, anchor_block: int | None) -> tuple[Tensor, Tensor]:
    """Quantize x to codes of e8m0 blocks that share one scale per run of the contraction.

    x:             [rows, cols], floating; scales rounded up.
    anchor_block:  contraction elements per run; None: all of them.
    returns:       (codes uint8 [rows, cols], fp32 scales of (1, anchor_block) blocks).

    e8m0 scales are powers of two and elements are floating point. So with E = max(e) over the run,
    an element is the same number against 2^E as against 2^e, except for elements that become
    subnormal, 2^-14 below the run's largest magnitude. The GEMM of two such operands scales its
    rows and columns once, outside the contraction.
    """
    fmt = encoding.fmt
    run = Format(fmt.name, fmt.element, (1, anchor_block), fmt.scale)
    amax, _ = statistics(x, Encoding(run, encoding.direction))
    anchor = e8m0_code(known(amax, "the amax"), run)
    codes = cast_codes(
        scaled_by_block(x, power_of_two(inverse_exponent(anchor)), run, encoding.direction, 0),
        fmt.element,
    )
    return codes.contiguous(), power_of_two(anchor)


def anchored_codes(
    data: Tensor,
    scale: Tensor,
    fmt: Format,
    direction: Direction,
    whole: bool = False,
    cols: int | None = None,
    run: int | None = None,
    tiles: bool = False,
) -> tuple[Tensor, Tensor]:
    """Re-express existing block codes against one exponent per line, per run of a line, per tile of
    128 x 128, or per tensor.

    data:     uint8 [rows, row bytes], compact.
    scale:    compact, powers of two: e8m0, or for whole tensors also fp32.
    whole:    one exponent per tensor.
    cols:     codes per row; None: one per byte.
    run:      elements of the contraction that share an exponent, a multiple of the block; None: all
              of a line.
    tiles:    one exponent per tile; excludes `run`.
    returns:  (codes uint8 [rows, cols] of the format's `Element.operand`, fp32 scales).
              Scales are [lines]; whole: [1]; with runs: [runs, lines rounded up to 4], zero after
              the lines; with tiles: [lines / 128, contraction / 128 rounded up to 4], zero after
              the contraction.

    An element q of a block with exponent e becomes q * 2^(e - E). 2^(E + n) is the largest block
    scale of its run, line, tile or tensor, and 2^n the ratio of the operand's range to the
    element's (`operand_shift`). The element is rounded a second time if that is subnormal, else it
    is the same number. A NaN block sets its whole run, line, tile or tensor to NaN. E is 0 or more,
    and 0 without blocks. The fp32 scale of a block of zeros is 1 (`fp32_encode_scale`), which is no
    information: it counts as e = 0.
    """
    dim, (outer_block, block) = direction.contraction_dim, fmt.block
    run, across = (_TILE, _TILE // (outer_block or _TILE)) if tiles else (run, 1)
    values = decode_codes(data, fmt, data.shape[1] if cols is None else cols)
    if fmt.has_fp32_scales:
        exponents = (scale.view(torch.int32) >> 23).clamp(max=255)
        is_zero = blocked(values, fmt, direction, 0).abs().sum((1, 3)) == 0
        scale = torch.where((scale == 1) & is_zero, 0, exponents).to(torch.uint8)
    if whole:
        highest = scale.max().view(1, 1) if scale.numel() else scale.new_zeros(1, 1)
    else:
        blocks = max(scale.shape[dim], 1) if run is None else run // (block or run)
        runs = 1 if run is None else ceil_div(scale.shape[dim], blocks)
        missing = [runs * blocks - scale.shape[dim], -scale.shape[1 - dim] % across]
        last, first = missing if dim else missing[::-1]
        highest = (
            F.pad(scale, (0, last, 0, first))  # E of no blocks is 0
            .unflatten(dim, (runs, blocks))
            .amax(dim + 1)
            .unflatten(1 - dim, (-1, across))
            .amax(2 - dim)
        )
    shift = fmt.element.operand_shift
    exponent = torch.where(highest == 255, 255, (highest.to(torch.int32) - shift).clamp(min=0))
    of_block = (
        exponent
        if whole or run is None
        else exponent.repeat_interleave(blocks, dim).repeat_interleave(across, 1 - dim)
    )[: scale.shape[0], : scale.shape[1]]
    # clamping changes no code: any element times 2^-127 rounds to zero
    factor = power_of_two((127 + scale.to(torch.int32) - of_block).clamp(min=0))
    codes = cast_codes(scaled_by_block(values, factor, fmt, direction, 0), fmt.element.operand)
    if whole:
        return codes.contiguous(), power_of_two(exponent).flatten()
    if tiles:
        of_tiles = power_of_two(exponent).movedim(dim, 1)
        return codes.contiguous(), F.pad(of_tiles, (0, -of_tiles.shape[1] % 4))
    lines = power_of_two(exponent).movedim(dim, 0)  # [runs, line blocks]
    lines = lines.repeat_interleave(outer_block or 1, 1)[:, : values.shape[1 - dim]]
    return codes.contiguous(), lines.flatten() if run is None else F.pad(
        lines, (0, -lines.shape[1] % 4)
    )

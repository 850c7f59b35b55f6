# SPDX-License-Identifier: Apache-2.0
"""Operands of grouped GEMMs that are tokens [M, cols], in groups whose sizes the device knows.

Rowwise codes are stored in the order of the tokens. Columnwise scales serve 128 tokens or all
tokens of a group, so in columnwise codes each group begins at a multiple of 128 and is padded with
zeros. Bits are those of each group quantized by itself, also for scales per tensor and per column
(one set per group) and for their histories.

Values that `torch._grouped_mm` multiplies have no scale, and are [M, cols] in both directions;
those of columnwise codes are padded too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..encoded_matrix import EncodedMatrix, has_tensor_amax
from ..formats import COLUMNWISE, FP8_EXACT_OPERAND, IDENTITY, Direction
from ..ops import native
from ..ops.layout import COMPACT, operand_format, pad_to
from ..ops.native import Operand, TokenGroups
from ..storage import Storage
from ..tensor.quantized_tensor import QuantizedTensor
from .operands import buffers_of, given_storage
from .plan import GemmPlan
from .stacked_weights import concatenated, read_as, two_level_operand


def group_of(groups: TokenGroups, x: Tensor) -> Tensor:
    """Return the group of each token of x, int64 [M]."""
    tokens = torch.arange(len(x), device=x.device, dtype=torch.int32)
    return torch.searchsorted(groups.offsets[1:], tokens, right=True)


def spread(x: Tensor, groups: TokenGroups) -> Tensor:
    """Copy x [M, cols] to [128 * tiles, cols], in which each group begins at a multiple of 128 and
    is padded with zeros."""
    shift = (groups.padded - groups.offsets)[group_of(groups, x)]
    rows = torch.arange(len(x), dtype=torch.int64, device=x.device) + shift
    padded = x.new_zeros(len(groups.sources) * native.TILE, x.shape[1])
    return padded.index_copy_(0, rows, x)


# Codes that are decoded, because no kernel multiplies codes of groups #


def decoded_tokens(
    plan: GemmPlan, slot: str, x: Tensor, direction: Direction, groups: TokenGroups
) -> Tensor:
    """Return the values that the codes of x decode to."""
    is_spread = direction is COLUMNWISE and plan.operand(slot, direction).is_quantized
    if isinstance(x, QuantizedTensor):
        parts = _given_storages(plan, slot, x, direction)
        values = torch.cat([part.dequantize(x.dtype) for part in parts])
        return spread(values, groups) if is_spread else values
    if not plan.operand(slot, direction).is_quantized:
        return native.rows_of(x)
    return encoded_tokens(plan, slot, native.rows_of(x), direction, groups).dequantize()


def encoded_tokens(
    plan: GemmPlan, slot: str, x: Tensor, direction: Direction, groups: TokenGroups
) -> EncodedMatrix:
    x = spread(x, groups) if direction is COLUMNWISE else x
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else {}
    matrices, _ = plan.hybrid(slot).operands(x, [direction], layouts=layouts)
    return matrices[direction]


def saved_codes_of_decoded(plan: GemmPlan, x: Tensor, groups: TokenGroups) -> list[Tensor]:
    """Return the columnwise codes of the input that the backward decodes; for given codes, their
    values."""
    if isinstance(x, QuantizedTensor):
        return [decoded_tokens(plan, "input", x, COLUMNWISE, groups)]
    return buffers_of(encoded_tokens(plan, "input", x, COLUMNWISE, groups))


# Codes that a kernel multiplies #


def operand_over(
    plan: GemmPlan, slot: str, direction: Direction, buffers: Sequence[Tensor], dtype: torch.dtype
) -> Operand:
    """Return the operand for codes from `native.linear_tokens`."""
    data, scale, *tensor_amaxes = buffers
    layouts, fmt = plan.resolved(dtype, data.device).layouts, plan.operand(slot, direction)
    if not has_tensor_amax(fmt, layouts[slot][direction]):
        return Operand(data, scale, read_as(plan, slot, direction, layouts))
    shape = len(data), 2 * data.shape[1]
    scale = scale.view(len(data), -1)
    return two_level_operand(data, scale, *tensor_amaxes, fmt=fmt, view=(shape, (shape[1], 1)))


# Tokens that arrive as codes #


def _given_storages(
    plan: GemmPlan, slot: str, x: QuantizedTensor, direction: Direction
) -> list[Storage]:
    parts = [QuantizedTensor(pair=pair) for pair in x._pair.groups]
    return [given_storage(plan, slot, part, direction) for part in parts]


def given_operand(
    plan: GemmPlan, slot: str, x: QuantizedTensor, direction: Direction, groups: TokenGroups
) -> Operand:
    """Return the operand for x, which has one storage of codes per group. Its bits are those of
    each group's own operand."""
    storages = _given_storages(plan, slot, x, direction)
    layout = plan.resolved(x.dtype, x.device).layouts[slot][direction]
    fmt, scales = storages[0].fmt, [s.scale for s in storages if s.scale is not None]
    if fmt.tensor_scale:
        return _two_level_tokens(storages, scales, groups, layout)
    data, transposed = concatenated([s.data for s in storages]), None
    if fmt.is_quantized and direction is COLUMNWISE:
        transposed = native.transpose_tokens(data, groups)
    if fmt.scale_leaves_contraction and (direction is COLUMNWISE or fmt.block[0] is None):
        scale = torch.cat([s.reshape(-1) for s in scales])  # one set per group
        return Operand(
            data if transposed is None else transposed, scale, operand_format(fmt, layout)
        )
    tokens, cols = x.shape
    matrix = Storage(fmt, direction, (tokens, cols), data, None, None, x.dtype)
    if transposed is not None:  # no scale spans two groups, because each begins at a tile
        block = fmt.block[1] or native.TILE
        rows = native.TILE // block
        scale = concatenated([pad_to(s, rows, 1) if len(s) % rows else s for s in scales])
        padded = scale.new_zeros(transposed.shape[1] // block, scale.shape[1])
        padded[: len(scale)] = scale
        matrix = matrix.with_buffers({"scale": padded}, shape=(transposed.shape[1], cols))
    elif scales:
        matrix = matrix.with_buffers({"scale": concatenated(scales)})
    if layout == COMPACT or not fmt.is_quantized:
        return Operand(matrix.data, matrix.scale, fmt)
    operand = matrix.to_gemm_operand(layout, transposed)
    return Operand(operand.data, operand.scale, operand.operand_format)


def _two_level_tokens(
    storages: Sequence[Storage], scales: Sequence[Tensor], groups: TokenGroups, layout: str
) -> Operand:
    """Decode two-level codes to values, or convert them to e4m3 codes, with one scale per group's
    tensor."""
    first, data = storages[0], concatenated([s.data for s in storages])
    fmt, direction, cols = first.fmt, first.direction, first.padded_shape[1]
    amaxes = torch.cat([s.tensor_amax for s in storages if s.tensor_amax is not None])
    scale, factors = concatenated(scales), native.tensor_decode_scale(amaxes, fmt)
    if layout == COMPACT:
        values = native.dequantize(data, scale, None, fmt, direction, cols, 0, torch.bfloat16)
        operand_fmt = IDENTITY
    else:
        values, _ = native.anchor_codes(
            data, scale, amaxes[:1], cols, fmt, direction, False, native.OF_TENSOR
        )
        factors, operand_fmt = factors / FP8_EXACT_OPERAND, operand_format(fmt, layout)
    if direction is COLUMNWISE:
        values = spread(values, groups).t().contiguous()
    return Operand(values, factors, operand_fmt)

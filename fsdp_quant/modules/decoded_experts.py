# SPDX-License-Identifier: Apache-2.0
"""Grouped products of codes on GPUs whose codes no grouped kernel multiplies: `native.grouped_step`
and its backward, decoded.

    forward   y  = grouped(x.rowwise, w.rowwise)
    backward  dx = grouped(dy.rowwise, w.columnwise)
              dw = grouped over tokens(dy.columnwise, x.columnwise)

Operands are the codes of a loop over the experts, and `torch._grouped_mm` multiplies their values,
which are bf16 numbers (`ops.capability.decodes_groups`). Columnwise codes are made of tokens whose
groups begin at multiples of 128, so that no block of them has tokens of two experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import native
from ..ops.native import TokenGroups
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from .bad_splits import bad_splits_flag
from .operands import buffers_of, given_storage, refuse_codes, slot_operands
from .plan import PRODUCTS, GemmPlan


def group_of(groups: TokenGroups, x: Tensor) -> Tensor:
    """int64 [tokens]: the group of each token of x."""
    tokens = torch.arange(len(x), device=x.device, dtype=torch.int32)
    return torch.searchsorted(groups.offsets[1:], tokens, right=True)


def spread(x: Tensor, groups: TokenGroups) -> Tensor:
    """Rows of x [tokens, cols] where groups begin at multiples of 128, zeros behind each: [128 *
    tiles, cols]."""
    moved = (groups.padded - groups.offsets)[group_of(groups, x)]
    places = torch.arange(len(x), dtype=torch.int64, device=x.device) + moved
    filled = x.new_zeros(len(groups.sources) * native.TILE, x.shape[1])
    return filled.index_copy_(0, places, x)


def count_product(plan: GemmPlan, name: str, x: Tensor, groups: TokenGroups) -> None:
    domains = plan.resolved(x.dtype, x.device).domains
    product, domain = next((p, d) for p, d in zip(PRODUCTS, domains) if p.name == name)
    counters.add("gemm", (domain, *map(repr, plan.pair(product))), groups.groups)


def forward(
    x: Tensor, ends: Tensor, weight: Tensor, plan: GemmPlan, save: bool, tag: int
) -> tuple[Tensor, TokenGroups, list[Tensor]]:
    """y [tokens, N] of x [tokens, K] and the values of the weights [E, N, K], the groups, and what
    the backward reads of x beside x: its columnwise codes, or their values."""
    refuse_codes(x, plan, save)
    groups = native.token_groups(ends, len(x), bad_splits_flag(), tag)
    rows = _values(plan, "input", x, ROWWISE, groups)
    y = torch_compat.grouped_mm(rows, weight.mT, groups.offsets[1:])
    count_product(plan, "fprop", x, groups)
    if not save or plan.saves == "input":
        return y, groups, []
    if isinstance(x, QuantizedTensor):
        return y, groups, [_values(plan, "input", x, COLUMNWISE, groups)]
    return y, groups, buffers_of(_encoded(plan, "input", x, COLUMNWISE, groups))


def backward(
    dy: Tensor,
    groups: TokenGroups,
    weight: Tensor | None,
    saved: Sequence[Tensor],
    plan: GemmPlan,
    turned: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dx [tokens, K], of the values of the weights [E, N, K]; dw [E, N, K] (turned: [E, K, N]) of
    what was saved of x. None without those."""
    dx = dw = None
    if len(saved):
        a = _values(plan, "grad_output", dy, COLUMNWISE, groups)
        fmt, first = plan.operand("input", COLUMNWISE), saved[0]
        if len(saved) > 1:
            shape = len(first), saved[1].shape[1]  # scales of runs of columns
            b = Storage.over(saved, fmt, COLUMNWISE, shape, dy.dtype).dequantize()
        elif plan.saves == "input":
            b = _values(plan, "input", first.reshape(-1, first.shape[-1]), COLUMNWISE, groups)
        else:
            b = first
        a, b = (b, a) if turned else (a, b)
        ends = groups.padded if fmt.is_quantized else groups.offsets
        dw = torch_compat.grouped_mm(a.t(), b, ends[1:])
        count_product(plan, "wgrad", dy, groups)
    if weight is not None:
        rows = _values(plan, "grad_output", dy, ROWWISE, groups)
        dx = torch_compat.grouped_mm(rows, weight, groups.offsets[1:])
        count_product(plan, "dgrad", dy, groups)
    return dx, dw


def _encoded(
    plan: GemmPlan, slot: str, x: Tensor, direction: Direction, groups: TokenGroups
) -> EncodedMatrix:
    x = spread(x, groups) if direction is COLUMNWISE else x
    return slot_operands(plan, slot, x, [direction], None, {}).take(direction)


def _values(
    plan: GemmPlan, slot: str, x: Tensor, direction: Direction, groups: TokenGroups
) -> Tensor:
    """What the product of this direction multiplies: [tokens, cols]; of columnwise codes spread."""
    is_quantized = plan.operand(slot, direction).is_quantized
    if not isinstance(x, QuantizedTensor):
        if not is_quantized:
            return native.rows_of(x)
        return _encoded(plan, slot, native.rows_of(x), direction, groups).dequantize()
    parts = [given_storage(plan, slot, QuantizedTensor(pair=p), direction) for p in x._pair.groups]
    values = torch.cat([part.dequantize(x.dtype) for part in parts])
    return spread(values, groups) if is_quantized and direction is COLUMNWISE else values

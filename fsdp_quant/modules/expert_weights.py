# SPDX-License-Identifier: Apache-2.0
"""Convert the weights of all experts to the operand of one grouped GEMM."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import BUFFERS, EncodedMatrix, has_tensor_amax
from ..formats import COLUMNWISE, IDENTITY, ROWWISE, Direction, Format, round_up
from ..ops import native
from ..ops.capability import arch_of
from ..ops.layout import ANCHORS, COMPACT, operand_format
from ..ops.native import Operand
from ..storage import Storage, to_gemm_operands, to_storage
from ..tensor import code_check
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState, held, values_of
from .operands import (
    codes_of_transposed,
    gathered_storage,
    lies_transposed,
    weight_storages,
)
from .plan import GemmPlan


def read_as(plan: GemmPlan, slot: str, direction: Direction, layouts: dict) -> Format:
    return operand_format(plan.operand(slot, direction), layouts[slot][direction])


class TwoLevelCodes(NamedTuple):
    """Two-level codes of all experts, decoded in each pass.

    data:  rowwise 4-bit codes of one matrix [outer, contraction], packed to [outer, contraction /
           2].
    view:  (shape, strides) of the decoded values as [E, outer, contraction].
    """

    data: Tensor
    scale: Tensor
    tensor_amax: Tensor
    fmt: Format
    view: tuple[tuple[int, ...], tuple[int, ...]]

    def values(self) -> Operand:
        values = native.dequantize(
            self.data,
            self.scale,
            None,
            self.fmt,
            ROWWISE,
            2 * self.data.shape[1],
            0,
            torch.bfloat16,
        )
        return Operand(
            values.as_strided(*self.view),
            native.tensor_decode_scale(self.tensor_amax, self.fmt),
            IDENTITY,
        )


class BlockCodes(NamedTuple):
    """Compact codes of all experts with scales of blocks, [E, ..] each, which are decoded for each
    pass: of matrices of this shape, [N, K]."""

    data: Tensor
    scale: Tensor
    fmt: Format
    direction: Direction
    shape: tuple[int, int]

    def values(self) -> Operand:
        (n, k), rows = self.shape, self.fmt.dims(self.direction)[0] or 0
        buffers, count = (self.data, self.scale), len(self.data)
        if rows and n % rows == 0:  # no block has rows of two
            buffers, count, n = [t.flatten(0, 1)[None] for t in buffers], 1, count * n
        made = [
            Storage.over(own, self.fmt, self.direction, (n, k), torch.bfloat16).dequantize()
            for own in zip(*(t.unbind() for t in buffers))
        ]
        return Operand(stacked(made).view(len(self.data), *self.shape), None, IDENTITY)


class ExpertWeights(NamedTuple):
    """Weights of all experts, and the state of each matrix.

    tensors:  E tensors [N, K], or one [E, N, K].
    records:  record amaxes in the histories of the weights.
    """

    tensors: Sequence[Tensor]
    states: Sequence[WeightState]
    records: bool = True

    @property
    def are_gathered(self) -> bool:
        return isinstance(self.tensors[0], QuantizedTensor)

    def operands(
        self, directions: Sequence[Direction], plan: GemmPlan, dtype: torch.dtype
    ) -> dict[Direction, Operand | TwoLevelCodes | BlockCodes]:
        """Return, per direction, codes [E, N, K] (columnwise: [E, K, N]) of all experts with their
        scales, or values. Uses gathered codes if they exist, else quantizes the values."""
        first = self.tensors[0]
        decodes = plan.decodes_groups(arch_of(first.device))
        if first.dim() == 3 and not (self.are_gathered or decodes) and self._is_one_call(plan):
            return self._packed(directions, plan, dtype)
        if first.dim() == 3 and isinstance(first, QuantizedTensor):
            return {d: _of_gathered(first, d, plan, dtype) for d in directions}
        parts = first.unbind() if first.dim() == 3 else self.tensors
        of = [
            weight_storages(w, directions, plan, state, dtype, self.records)
            for w, state in zip(parts, self.states or [None] * len(parts))
        ]
        return {d: _stacked_operand([storages[d] for storages in of]) for d in directions}

    def _is_one_call(self, plan: GemmPlan) -> bool:
        """Return whether one call quantizes all matrices. For two-level codes, only from bf16."""
        two_level = any(plan.operand("weight", d).tensor_scale for d in Direction)
        return not two_level or (plan.compute_dtype or self.tensors[0].dtype) is torch.bfloat16

    def _packed(
        self, directions: Sequence[Direction], plan: GemmPlan, dtype: torch.dtype
    ) -> dict[Direction, Operand | TwoLevelCodes | BlockCodes]:
        """Return the operands of an unsharded [E, N, K]: those that `fq.hold` keeps, else new
        ones."""
        values, key = values_of(self.tensors[0]).detach(), (plan.key, dtype, self.records)
        state = next(iter(self.states), None)  # None in a graph, which holds no codes
        made = functools.cache(
            lambda: _of_packed(values, self.states, list(directions), plan, dtype, self.records)
        )
        return {
            d: held(state, ("experts", d, *key), values, lambda d=d: made()[d]) for d in directions
        }


def _stacked_operand(storages: Sequence[EncodedMatrix]) -> Operand | TwoLevelCodes | BlockCodes:
    first = storages[0]
    if first.tensor_amax is not None:
        return _decodable(storages)
    if first.layout == COMPACT and first.fmt.is_quantized:
        buffers = stacked([s.data for s in storages]), stacked([s.scales for s in storages])
        return BlockCodes(*buffers, first.fmt, first.direction, first.shape)
    scales = [s.scale.reshape(-1) for s in storages if s.scale is not None]
    scale = torch.cat(scales) if scales else None
    return Operand(stacked([s.data for s in storages]), scale, first.operand_format)


# Two-level codes are decoded K-major and multiplied by our own kernel (`Grain::kValues`).
# torch._grouped_mm writes bf16 only, so applying a tensor's scale to its result would round twice.
def grouped_operand(operand: Operand | TwoLevelCodes | BlockCodes) -> Operand:
    """Return the operand that a grouped GEMM reads: decoded values in place of codes that are
    decoded, those of two-level codes with the tensors' decode scales [E]."""
    return operand if isinstance(operand, Operand) else operand.values()


def _decodable(storages: Sequence[EncodedMatrix]) -> TwoLevelCodes:
    """Combine one compact storage per expert to the two-level codes of all."""
    first, experts = storages[0], len(storages)
    rows, cols = first.shape
    data, scale = [s.data for s in storages], [s.scale for s in storages if s.scale is not None]
    if first.direction is COLUMNWISE:
        data = native.multi_tensor_transpose(
            data, [first.shape] * experts, first.fmt.bits, stacked=True
        )
        scale, rows, cols = [s.t() for s in scale], cols, rows
    data, scale = (
        stacked(data).view(-1, data[0].shape[1]),
        torch.stack(scale).view(-1, scale[0].shape[1]),
    )
    amaxes = torch.cat([s.tensor_amax for s in storages if s.tensor_amax is not None])
    return TwoLevelCodes(
        data, scale, amaxes, first.fmt, ((experts, rows, cols), (rows * cols, cols, 1))
    )


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors. Returns a view if they are equally spaced in one storage."""
    first = tensors[0]
    step = (
        tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else first.numel()
    )
    memory = first.untyped_storage().data_ptr()
    lie = step >= first.numel() and all(
        t.is_contiguous()
        and t.shape == first.shape
        and t.storage_offset() == first.storage_offset() + i * step
        and t.untyped_storage().data_ptr() == memory
        for i, t in enumerate(tensors)
    )
    return (
        first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
        if lie
        else torch.stack(list(tensors))
    )


def _of_packed(
    values: Tensor,
    parts: Sequence[WeightState],
    directions: list[Direction],
    plan: GemmPlan,
    dtype: torch.dtype,
    records: bool,
) -> dict[Direction, Operand | TwoLevelCodes | BlockCodes]:
    """Quantize an unsharded weight [E, N, K] in one call."""
    resolved = plan.resolved(dtype, values.device)
    coded = [d for d in directions if plan.operand("weight", d).is_quantized]
    lies = lies_transposed(values)
    values, turned = (
        (values, plan.turned(dtype, values.device)) if lies else (native.rows_of(values), None)
    )
    made: dict[Direction, Operand | TwoLevelCodes | BlockCodes] = {}
    if len(coded) < len(directions):
        made |= dict.fromkeys(directions, Operand(values.to(dtype), None, IDENTITY))
    if not coded:
        return made
    if resolved.call is None:
        raise ValueError("the plan of packed experts has no compiled step")
    seen = plan.compute_dtype or values.dtype
    round_to_bf16 = values.dtype is torch.float32 and seen is torch.bfloat16
    if any(plan.operand("weight", d).tensor_scale for d in coded):
        round_to_bf16 = False
    found = (
        part.delayed_history(d, values.device, plan.weight)
        for d in plan.weight.delayed_directions
        for part in parts
    )
    histories = [history for history in found if history is not None]
    given = values if round_to_bf16 else values.to(seen)
    if turned is None:
        buffers = iter(
            native.linear_weight(
                given,
                resolved.call,
                ROWWISE in coded,
                COLUMNWISE in coded,
                round_to_bf16,
                [h.encode_scale for h in histories],
                [h.amaxes for h in histories] if records else [],
            )
        )
    else:
        by_direction = codes_of_transposed(given, turned, coded, round_to_bf16)
        buffers = (buffer for d in coded for buffer in by_direction[d])
    for part in parts:
        for d in coded:
            counters.add("weight encode", (part.name, d.value))
    experts, n, k = values.shape
    for d in coded:
        data, scale, fmt = next(buffers), next(buffers), plan.operand("weight", d)
        is_decoded = has_tensor_amax(fmt, resolved.layouts["weight"][d])
        if not fmt.tensor_scale:
            made[d] = Operand(data, scale.flatten(), read_as(plan, "weight", d, resolved.layouts))
            continue
        width = data.shape[1] * (2 if is_decoded else 1)
        if d is ROWWISE:
            shape, strides = (experts, n, k), (n * k, k, 1)
        else:  # matrices are concatenated along the columns, each from a multiple of 128
            shape, strides = (experts, k, n), (round_up(n, native.TILE), width, 1)
        if is_decoded:
            scale = scale.view(-1, width // (fmt.block[1] or width))
            made[d] = TwoLevelCodes(data, scale, next(buffers), fmt, (shape, strides))
        else:
            data = data.as_strided(shape, strides)
            made[d] = Operand(data, scale.flatten(), read_as(plan, "weight", d, resolved.layouts))
    return made


def _of_gathered(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, dtype: torch.dtype
) -> Operand | TwoLevelCodes | BlockCodes:
    """Return the operand of a weight [E, N, K] that `fully_shard` gathered."""
    slots, layout = weight._pair, plan.resolved(dtype, weight.device).layouts["weight"][direction]
    in_one = not (
        slots.shown is None
        or plan.operand("weight", direction).tensor_scale
        or plan.weight.is_derived
    )
    in_one = in_one and not code_check.checking
    parts = [QuantizedTensor(pair=part) for part in slots.groups[: 1 if in_one else None]]
    # `gathered_storage` raises for freed codes and for other formats
    compact = [to_storage(gathered_storage(part, direction, plan, COMPACT)) for part in parts]
    if in_one:
        return operand_of_codes(
            shown_codes(weight, direction), direction, weight.shape, plan, dtype
        )
    if layout == COMPACT or not compact[0].fmt.is_quantized:
        return _stacked_operand(compact)
    return _stacked_operand(to_gemm_operands([(storage, layout) for storage in compact]))


def shown_codes(weight: QuantizedTensor, direction: Direction) -> list[Tensor]:
    """Return the buffers of a gathered weight [E, N, K] with the codes of a direction. Each buffer
    holds all matrices."""
    shown = weight._pair.shown or {}
    source = direction if f"{direction.value}_data" in shown else ROWWISE
    return [
        shown[name] for name in (f"{source.value}_{field}" for field in BUFFERS) if name in shown
    ]


def operand_of_codes(
    codes: Sequence[Tensor],
    direction: Direction,
    shape: Sequence[int],
    plan: GemmPlan,
    dtype: torch.dtype,
) -> Operand:
    """Return the grouped GEMM's operand for codes (`shown_codes`) of a weight [E, N, K] with one
    level of scales."""
    fmt = plan.operand("weight", direction)
    layout = plan.resolved(dtype, codes[0].device).layouts["weight"][direction]
    data, *scales = (t.unflatten(0, (shape[0], -1)) for t in codes)
    turned = direction is COLUMNWISE
    if layout in ANCHORS:
        run = native.anchor_run(layout)
        data, scale = native.anchor_codes(
            data, scales[0], None, data.shape[-1], fmt, direction, turned, run
        )
        return Operand(data, scale.flatten(), operand_format(fmt, layout))
    if not fmt.is_quantized:
        return Operand(data, None, fmt)
    scale = scales[0]
    if layout == COMPACT:
        own = direction if direction in plan.weight.encodings else ROWWISE
        return BlockCodes(data, scale, fmt, own, (shape[1], shape[2])).values()
    # GEMMs read scales of 1 x 128 blocks by column, and of 128 x 128 blocks in rows padded to 4
    if not fmt.scale_leaves_contraction:
        scale = scale.mT if turned != (fmt.block[0] == 1) else scale
        scale = F.pad(scale, (0, -scale.shape[-1] % 4))
    return Operand(native.transpose_stack(data) if turned else data, scale.flatten(), fmt)


def packed_operand(
    weight: Tensor, direction: Direction, plan: GemmPlan, dtype: torch.dtype
) -> Operand:
    """Return the grouped GEMM's operand for the values of a weight [E, N, K] without histories."""
    return grouped_operand(
        ExpertWeights([weight], [], False).operands([direction], plan, dtype)[direction]
    )

# SPDX-License-Identifier: Apache-2.0
"""Operands of a linear layer's GEMMs: codes of activations, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops import dispatch, native
from ..ops.layout import ANCHORS, COMPACT
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer
from ..roles import QUANTIZED_TYPES
from ..scaling import AmaxHistory, RowCuts
from ..storage import Storage, matrix_over, to_layout, to_storage
from ..tensor import code_check
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import (
    Piece,
    Shard,
    WeightState,
    encode_shards,
    held,
    share_over_tensor_group,
    storage_of,
    values_of,
)
from .plan import GemmPlan

SLOTS = QUANTIZED_TYPES


class SlotOperands(NamedTuple):
    """Operands of an activation or gradient [rows, cols], quantized here.

    own:     by direction, of this rank's rows.
    amaxes:  of delayed sides, by direction.
    """

    own: dict[Direction, EncodedMatrix]
    amaxes: dict[Direction, Tensor]

    def take(self, direction: Direction) -> EncodedMatrix:
        return self.own[direction]


def record_amaxes(
    histories: Sequence[Tensor], hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor]
) -> None:
    """Record amaxes of delayed sides. histories: of `hybrid.delayed_directions`, or empty."""
    for direction, history in zip(hybrid.delayed_directions, histories):
        if direction in amaxes:
            AmaxHistory.record_in(history, amaxes[direction])


def slot_ids(name: str) -> Tensor:
    """int64 [3]: ids of a module's slots, which key their random bits."""
    ids = [tensor_id(f"{name}.{slot}") for slot in SLOTS]
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def slot_key(
    plan: GemmPlan, slot: str, step: Tensor, ids: Tensor, rows: int, after: Tensor | None = None
) -> Tensor | None:
    """Random key of a slot, int64 [5] (`ops.rng.KEY_FIELDS`); None: no stochastic rounding.

    after:  as in `dispatch.random_key`.
    """
    if not plan.hybrid(slot).is_stochastic:
        return None
    return dispatch.random_key(step, ids, SLOTS.index(slot), rows, after)


def slot_storages(
    plan: GemmPlan,
    slot: str,
    x: Tensor,
    directions: Sequence[Direction],
    key: Tensor | None,
    factors: Sequence[Tensor],
    statistics: dict[Direction, dispatch.Statistics] | None = None,
) -> SlotOperands:
    """Operands of x [rows, cols], or of the codes that it holds.

    key:         of its rows (`slot_key`).
    factors:     of its delayed sides, rowwise first.
    statistics:  as in `HybridQuantizer.storages`.
    """
    hybrid = plan.hybrid(slot)
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else {}
    if isinstance(x, QuantizedTensor):
        own = {d: given_storage(plan, slot, x, d) for d in directions}
        own = {d: to_layout(s, layouts[d]) if layouts else s for d, s in own.items()}
        return SlotOperands(own, {})
    by_direction = dict(zip(hybrid.delayed_directions, factors))
    own, amaxes = hybrid.operands(
        x, directions, key=key, factors=by_direction, layouts=layouts, statistics=statistics
    )
    return SlotOperands(own, amaxes)


def given_storage(plan: GemmPlan, slot: str, x: QuantizedTensor, direction: Direction) -> Storage:
    """The given storage of a direction. Raises ValueError if the plan would encode another."""
    hybrid = plan.hybrid(slot)
    is_encoded = direction in hybrid.encodings
    storage = x.storage_for(direction if is_encoded else ROWWISE)
    storage = storage if is_encoded else hybrid.columnwise_of(storage)
    if storage.fmt != hybrid.side(direction).fmt or hybrid.delayed_directions:
        raise ValueError(
            f"the {slot} came as {storage.describe()}, and the plan multiplies {hybrid}; quantize "
            "it as the layer would (delayed scaling: leave it in high precision)"
        )
    return storage


def gathered_storage(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, layout: str
) -> EncodedMatrix:
    """The codes of a gathered or frozen weight, or of a quantized parameter, for a GEMM."""
    storage = weight.rowwise if direction is ROWWISE else weight.columnwise
    if storage is None and direction is COLUMNWISE and plan.weight.is_derived:
        return to_layout(decoded_columnwise(weight.matrix_for(ROWWISE), plan), layout)
    if storage is not None and storage.fmt != plan.weight.side(direction).fmt:
        raise StaleWeightError(
            f"the gathered weight is {storage.fmt} {direction.value} and the plan multiplies "
            f"{plan.weight.side(direction).fmt}; change formats with fq.set_recipe, at a step "
            "boundary"
        )
    _lay_out_frozen(weight, direction, plan, layout)
    operand = weight.operand_for(direction, layout)
    if code_check.checking:
        code_check.check_gathered(weight, direction)
    return operand


def decoded_columnwise(rowwise: EncodedMatrix, plan: GemmPlan) -> Storage:
    """The columnwise storage that is derived from the rowwise codes of a weight."""
    return plan.weight.derive_columnwise(rowwise, plan.compute_dtype)


@torch.no_grad()
def _lay_out_frozen(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, layout: str
) -> None:
    """Replace a frozen weight's anchored codes, which hold no block scales, by codes of their
    values where a GEMM moved, or activations have another dtype."""
    storage = weight._pair.get(direction)
    if storage is None or storage.layout not in ANCHORS or storage.layout == layout:
        return
    values = weight.matrix_for(direction).dequantize(weight.dtype)
    again = plan.weight.side(direction).storage(values, direction)
    weight._pair.put(direction, to_layout(again, layout))


def lay_out_frozen(weight: QuantizedTensor, plan: GemmPlan) -> None:
    """Encode a frozen weight again where the plan reads another layout than its anchored codes
    have; before a graph is traced, which cannot."""
    of = weight.dtype, weight.device
    for direction, layout in plan.on(*of).resolved(*of).layouts["weight"].items():
        _lay_out_frozen(weight, direction, plan, layout)


def record_activations(weight: QuantizedTensor, dtype: torch.dtype) -> None:
    """Let the next gather of the weight convert its codes for activations of this dtype."""
    if weight._pair.owner is not None:
        weight._pair.owner.activation_dtype = dtype


def weight_storages(
    weight: Tensor,
    directions: Sequence[Direction],
    plan: GemmPlan,
    state: WeightState | None,
    dtype: torch.dtype,
    records: bool = True,
) -> dict[Direction, EncodedMatrix]:
    """The codes of a weight [N, K] for GEMMs of `dtype` activations: gathered or encoded here."""
    layouts = plan.resolved(dtype, weight.device).layouts["weight"]
    if isinstance(weight, QuantizedTensor):
        record_activations(weight, dtype)
        return {d: gathered_storage(weight, d, plan, layouts[d]) for d in directions}
    values = values_of(weight).detach()
    state = _state_of(state, plan, values)
    encoded: dict[Direction, Storage] = {}
    encoded_by, delayed = (plan.weight, plan.compute_dtype), plan.weight.delayed_directions

    def encode(direction: Direction) -> Storage:
        if direction not in encoded:
            encoded[direction] = _encode(values, direction, state, dtype, records)
        return encoded[direction]

    with torch.no_grad():
        return {
            d: held(
                state,
                (d, dtype, layouts[d], *encoded_by, records and bool(delayed)),
                values,
                lambda d=d: to_layout(
                    storage_of(plan.weight, d, plan.compute_dtype, encode), layouts[d]
                ),
            )
            for d in directions
        }


def _state_of(state: WeightState | None, plan: GemmPlan, values: Tensor) -> WeightState:
    """The weight's state, or one of these formats (no state, or a context's recipe)."""
    if state is not None and state.quantizer == plan.weight:
        return state
    name = "weight" if state is None else state.name
    return WeightState(name, plan.weight, tuple(values.shape), plan.compute_dtype)


def _encode(
    values: Tensor, direction: Direction, state: WeightState, dtype: torch.dtype, records: bool
) -> Storage:
    encoding, statistics = state.quantizer.encodings[direction], None
    if state.tensor_group is not None and state.spans_parts and encoding.fmt.spans_tensor:
        (own,) = dispatch.statistics(values, [encoding], dtype=state.encoded_dtype(encoding, dtype))
        (statistics,) = share_over_tensor_group([(encoding, own)], state.tensor_group)
    piece = Piece(state, values, RowCuts((0, values.shape[0])), 0)
    (encoded,) = encode_shards(
        [Shard(piece, direction, dtype, statistics, None, records)], values.device
    )
    return Storage.of(encoded, encoding, values.shape, dtype)


def buffers_of(storage: EncodedMatrix) -> list[Tensor]:
    return list(storage.buffers().values())


def lies_transposed(weight: Tensor) -> bool:
    """It is a transposed view of contiguous matrices."""
    return weight.stride(-1) != 1 and weight.mT.is_contiguous()


def codes_of_transposed(
    weight: Tensor, call: int, directions: Sequence[Direction], round_to_bf16: bool
) -> dict[Direction, list[Tensor]]:
    """(data, scale) per direction of a weight that `lies_transposed`.

    call:  `GemmPlan.turned`.
    """
    buffers = native.linear_weight(
        weight.mT, call, COLUMNWISE in directions, ROWWISE in directions, round_to_bf16, [], []
    )
    of = {COLUMNWISE: buffers[:2], ROWWISE: buffers[-2:]}
    return {d: of[d] for d in directions}


def refuse_codes(x: Tensor, plan: GemmPlan, save: bool) -> None:
    """Raise ValueError for an input that came as codes, where the backward reads its values."""
    if save and plan.saves == "input" and isinstance(x, QuantizedTensor):
        raise ValueError(
            "the backward reads the input in high precision, and it came as codes; give it in high "
            "precision"
        )


def columnwise_of_saved(
    plan: GemmPlan, saved: list[Tensor], shape, dy: Tensor, key: Callable[[], Tensor | None]
) -> EncodedMatrix:
    """The columnwise storage of the input [M, K], from saved codes. key: of the input's rows."""
    hybrid, dtype, resolved = plan.input, dy.dtype, plan.resolved(dy.dtype, dy.device)
    direction = resolved.saved
    fmt, laid_out = hybrid.side(direction).fmt, resolved.layouts["input"][direction]
    storage = matrix_over(saved, fmt, direction, shape, dtype, laid_out if shape[0] else COMPACT)
    if direction is COLUMNWISE:
        return storage
    return hybrid.columnwise_of(to_storage(storage), None if hybrid.shares_storage else key())


def bias_gradient(plan: GemmPlan, dy: Tensor, directions: list[Direction]) -> Tensor:
    """Sum over the tokens of dy [M, N], in the order of the kernels that quantize dy too."""
    quantized = any(plan.grad_output.side(d).fmt.is_quantized for d in directions)
    if quantized and not isinstance(dy, QuantizedTensor):
        return dispatch.column_sums(dy)
    return dy.sum(0)


def weight_state(weight: Tensor) -> WeightState | None:
    """The `WeightState` behind a sharded or gathered weight, or None for a plain tensor."""
    if isinstance(weight, QuantizedTensor):
        return getattr(weight, "state", weight._pair.owner)
    return getattr(weight, "state", None)

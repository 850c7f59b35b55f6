# SPDX-License-Identifier: Apache-2.0
"""Operands of a linear layer's GEMMs: codes of activations, gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops import dispatch, native, opaque
from ..ops.dispatch import Statistics
from ..ops.layout import ANCHORED_TENSOR, ANCHORS, COMPACT, is_anchored_as_encoded, is_encoded_as
from ..ops.reference import known
from ..quantizer import HybridQuantizer
from ..roles import QUANTIZED_TYPES as SLOTS
from ..scaling import AmaxHistory
from ..storage import Storage, matrix_type, to_layout, to_storage
from ..tensor import code_check
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState, held, values_of
from .plan import GemmPlan
from .transport import of_tensor, statistics_of


class LocalOperands(NamedTuple):
    """Operands of an activation or gradient [rows, cols], quantized here. A `Gather` has the same
    fields and methods.

    matrices:  by direction, in the layouts that products read.
    amaxes:    of delayed directions.
    """

    matrices: dict[Direction, EncodedMatrix]
    amaxes: dict[Direction, Tensor]

    def take(self, direction: Direction, layout: str | None = None) -> EncodedMatrix:
        """Return the operand of a direction, in the layout that the plan gives."""
        return self.matrices[direction]


def record_amaxes(
    histories: Sequence[Tensor], hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor]
) -> None:
    """Record amaxes of delayed sides. histories: of `hybrid.delayed_directions`, or empty."""
    for direction, history in zip(hybrid.delayed_directions, histories):
        if direction in amaxes:
            dispatch.record_amax(history, amaxes[direction])


def slot_key(
    plan: GemmPlan, slot: str, step: Tensor, ids: Tensor, rows: int, after: Tensor | None = None
) -> Tensor | None:
    """Random key of a slot, int64 [5] (`ops.rng.KEY_FIELDS`); None: no stochastic rounding.

    after:  as in `dispatch.random_key`.
    """
    if not plan.hybrid(slot).is_stochastic:
        return None
    return dispatch.random_key(step, ids, SLOTS.index(slot), rows, after)


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


def check_codes(weight: QuantizedTensor, plan: GemmPlan) -> None:
    """Raise ValueError for codes of another quantizer than the plan's. The operators of graphs have
    codes without a state, which was checked when they were traced."""
    state, wanted = weight_state(weight), plan.weight
    codes = (ROWWISE, weight.rowwise), (COLUMNWISE, weight.columnwise)
    stored = [(of.fmt, wanted.side(d).fmt) for d, of in codes if of is not None]
    fits = all(fmt is of or fmt == of for fmt, of in stored)
    if fits and (state is None or state.quantizer == wanted):
        return
    found = state.quantizer if state and fits else " / ".join(repr(fmt) for fmt, _ in stored)
    raise ValueError(
        f"{'a weight' if state is None else state.name} holds codes of {found} and the plan "
        f"multiplies {wanted}: its codes exist before the forward (a quantized parameter, a frozen "
        "weight, or one that fully_shard gathered for a context outside); use fq.set_recipe at a "
        "step boundary, or enter fq.autocast around the forward of the whole fully_shard model"
    )


def _traced_storage(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, layout: str
) -> EncodedMatrix:
    check_codes(weight, plan)
    return weight.operand_for(direction, layout, plan.weight)


@opaque.traced_as(_traced_storage)
def gathered_storage(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, layout: str
) -> EncodedMatrix:
    """Return the codes of a gathered, frozen or held weight, or of a quantized parameter, for a
    GEMM."""
    check_codes(weight, plan)
    follows = plan.weight.is_derived or plan.weight.shares_storage
    if direction is COLUMNWISE and follows and weight.columnwise is None:
        rowwise, dtype = weight.matrix_for(ROWWISE), plan.compute_dtype
        return to_layout(plan.weight.columnwise_of(rowwise, compute_dtype=dtype), layout)
    _lay_out_frozen(weight, direction, plan, layout)
    operand = weight.operand_for(direction, layout)
    if code_check.checking:
        code_check.check_gathered(weight, direction)
    return operand


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
    layouts: Mapping[Direction, str] | None = None,
) -> dict[Direction, EncodedMatrix]:
    """Return `weight_operands` with the histories of the weight's state."""
    if isinstance(weight, QuantizedTensor):
        return weight_operands(weight, directions, plan, dtype, layouts=layouts)
    state = state_for(state, plan, values_of(weight))
    histories = weight_histories(state, plan, weight.device)
    factors, amaxes = [h.encode_scale for h in histories], [h.amaxes for h in histories]
    group = state.tensor_group if state.spans_parts else None
    return weight_operands(
        weight, directions, plan, dtype, state, factors, amaxes, group, layouts=layouts
    )


def weight_operands(
    weight: Tensor,
    directions: Sequence[Direction],
    plan: GemmPlan,
    dtype: torch.dtype,
    state: WeightState | None = None,
    factors: Sequence[Tensor] = (),
    histories: Sequence[Tensor] = (),
    group: dist.ProcessGroup | None = None,
    statistics: dict[Direction, Statistics] | None = None,
    layouts: Mapping[Direction, str] | None = None,
) -> dict[Direction, EncodedMatrix]:
    """Return the operands of a weight [N, K] for GEMMs of `dtype` activations: of the codes that it
    holds, or encoded here; inside `fq.hold` those of the first use.

    state:       with the held codes; None: nothing is held.
    factors:     encode scales of its delayed directions.
    histories:   tensors in which their amaxes are recorded; empty: nowhere.
    group:       ranks that share the amax of the whole weight; None: they do not.
    statistics:  of the whole weight, which are added, for a direction that is encoded later.
    layouts:     None: those in which the GEMMs read them.
    """
    layouts = layouts or plan.resolved(dtype, weight.device).layouts["weight"]
    if isinstance(weight, QuantizedTensor):
        record_activations(weight, dtype)
        return {d: gathered_storage(weight, d, plan, layouts[d]) for d in directions}
    hybrid, values = plan.weight, values_of(weight).detach()
    statistics = {} if statistics is None else statistics
    scales = dict(zip(hybrid.delayed_directions, factors))
    matrices: dict[Direction, EncodedMatrix] = {}

    def encoded(direction: Direction, layout: str) -> EncodedMatrix:
        """The codes of a direction in `hybrid.encodings`, or of the same codes' other layout."""
        source = direction if direction in hybrid.encodings else ROWWISE
        if group is not None and not statistics:
            statistics.update(
                statistics_of(
                    hybrid, values, Direction, group, dtype=plan.compute_dtype, tensors="weights"
                )
            )
        encoding = hybrid.side(direction).encoding(direction)
        matrix, amax = _encoded_weight(
            values, encoding, source, plan, dtype, layout, scales.get(source), statistics
        )
        if source in scales and histories and direction is source:
            record_amaxes(histories, hybrid, {source: known(amax, "the amax")})
        if state is not None and encoding.fmt.is_quantized:
            counters.add("weight encode", (state.name, direction.value))
        return matrix

    def operand(direction: Direction) -> EncodedMatrix:
        layout = layouts[direction]
        is_laid_out = layout != COMPACT and is_encoded_as(hybrid.side(direction).fmt, layout)
        rowwise = matrices.get(ROWWISE)
        rowwise = None if rowwise is None or rowwise.layout in ANCHORS else rowwise
        is_encoded = hybrid.shares_storage and is_laid_out and rowwise is None
        if is_encoded or direction in hybrid.encodings:
            written = layout if is_laid_out and not (hybrid.is_derived or hybrid.turns) else COMPACT
            matrices[direction] = encoded(direction, written)
            return to_layout(matrices[direction], layout)
        if rowwise is None:
            rowwise = encoded(ROWWISE, COMPACT)
        return to_layout(hybrid.columnwise_of(rowwise, compute_dtype=plan.compute_dtype), layout)

    records = bool(histories) and bool(hybrid.delayed_directions)
    with torch.no_grad():
        return {
            d: held(
                state,
                (d, dtype, layouts[d], hybrid, plan.compute_dtype, records),
                values,
                lambda d=d: operand(d),
            )
            for d in directions
        }


def _encoded_weight(
    values: Tensor,
    encoding: Encoding,
    source: Direction,
    plan: GemmPlan,
    dtype: torch.dtype,
    layout: str,
    factor: Tensor | None,
    statistics: dict[Direction, Statistics],
) -> tuple[EncodedMatrix, Tensor | None]:
    """Return the codes of a weight in `layout`, and its amax.

    source:      the direction whose statistics and history scale the codes.
    statistics:  those of the whole weight are added, for its other direction.
    """
    hybrid, fmt = plan.weight, encoding.fmt
    (codes,) = dispatch.encode(
        values,
        [encoding],
        [statistics[source]] if source in statistics else None,
        encode_scales=[factor],
        dtype=plan.compute_dtype if fmt.is_quantized else dtype,
        layouts=[layout],
    )
    amax = codes.tensor_amax if fmt.tensor_scale else codes.amax
    if amax is not None and codes.layout == ANCHORED_TENSOR:
        layouts = plan.resolved(dtype, values.device).layouts["weight"]
        anchored = [
            d for d, e in hybrid.encodings.items() if is_anchored_as_encoded(e.fmt, layouts[d])
        ]
        statistics |= dict.fromkeys(anchored, Statistics(None, amax))
    elif amax is not None and source not in statistics and factor is None:
        spanning = [
            d for d, e in hybrid.encodings.items() if e.fmt.spans_tensor and not e.fmt.rotated
        ]
        if source in spanning:
            statistics |= {
                d: of_tensor(hybrid.encodings[d].fmt.tensor_scale, amax)
                for d in spanning
                if not hybrid.side(d).is_delayed
            }
    return matrix_type(codes.layout).of(codes, encoding, values.shape, dtype), codes.amax


def state_for(state: WeightState | None, plan: GemmPlan, values: Tensor) -> WeightState:
    """Return the weight's state; without one, or for a context's recipe, one of the plan's."""
    if state is not None and state.quantizer == plan.weight:
        return state
    name = "weight" if state is None else state.name
    return WeightState(name, plan.weight, tuple(values.shape), plan.compute_dtype)


def weight_histories(state: WeightState, plan: GemmPlan, device: torch.device) -> list[AmaxHistory]:
    """Return the amax histories of the weight's delayed directions."""
    histories = [
        state.delayed_history(d, device, plan.weight) for d in plan.weight.delayed_directions
    ]
    return [history for history in histories if history is not None]


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
    plan: GemmPlan, saved: list[Tensor], shape: tuple[int, int], dy: Tensor
) -> EncodedMatrix:
    """Return the columnwise operand of the input [M, K] from saved codes.

    saved:  their buffers; then the random key of the input's rows (`keeps_key`).
    """
    hybrid, dtype, resolved = plan.input, dy.dtype, plan.resolved(dy.dtype, dy.device)
    direction, key = resolved.saved, None
    if keeps_key(hybrid, direction is COLUMNWISE):
        *saved, key = saved
    fmt = hybrid.side(direction).fmt
    layout = resolved.layouts["input"][direction] if shape[0] else COMPACT
    storage = matrix_type(layout).over(saved, fmt, direction, shape, dtype, layout)
    return storage if direction is COLUMNWISE else hybrid.columnwise_of(to_storage(storage), key)


def keeps_key(hybrid: HybridQuantizer, has_columnwise: bool) -> bool:
    """Return whether the backward rounds the columnwise codes of an input with the key of its
    forward. has_columnwise: the forward saves them."""
    is_quantized = not has_columnwise and not hybrid.shares_storage
    return is_quantized and hybrid.side(COLUMNWISE).is_stochastic


def bias_gradient(plan: GemmPlan, dy: Tensor, directions: list[Direction]) -> Tensor:
    """Sum over the tokens of dy [M, N], in the order of the kernels that quantize dy too."""
    quantized = any(plan.grad_output.side(d).fmt.is_quantized for d in directions)
    return dispatch.column_sums(dy) if quantized else dy.sum(0)


def weight_state(weight: Tensor) -> WeightState | None:
    """The `WeightState` behind a sharded or gathered weight, or None for a plain tensor."""
    if isinstance(weight, QuantizedTensor):
        return getattr(weight, "state", weight._pair.owner)
    return getattr(weight, "state", None)

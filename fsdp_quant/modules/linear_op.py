"""The one operator behind every linear layer: linear(x, w, ...) -> (y, saved buffers, amaxes), with its autograd.

    forward   x.rowwise, x.columnwise = quantize(x)         y  = gemm(x.rowwise, w.rowwise) + bias
    backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = gemm(dy.rowwise, w.columnwise)
                                                            dw = gemm(dy.columnwise, x.columnwise)

x [.., K], w [N, K], y [.., N]. What the backward needs of x are *outputs* of the operator: plain tensors, which is
all that users' saved-tensor hooks (offload, checkpointing) ever see. The weight stays on ctx: under FSDP2 its codes
are freed and gathered again in between, in the direction that the backward multiplies.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ..formats import COLUMNWISE, ROWWISE, Direction, Format
from ..gemm import StaleWeightError, gemm
from ..ops import dispatch, native
from ..ops.layout import COMPACT
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer
from ..recipe import QUANTIZED_TYPES
from ..scaling import AmaxHistory
from ..storage import BUFFERS, Storage
from ..tensor import torch_compat, writers
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.master_weight import MasterWeight, WeightState, inner_of
from ..tensor.quantized_tensor import OPERATORS, QuantizedTensor
from .plan import GemmPlan, Resolved, plan_of

_library = torch.library.Library("fsdp_quant", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str plan, bool save, Tensor step, Tensor ids, Tensor? guard, "
    "Tensor[] factors, Tensor[] grad_factors, Tensor[] grad_amaxes) -> (Tensor, Tensor[], Tensor[])"
)
_library.define(
    "linear_backward(Tensor dy, Tensor weight, Tensor[] saved, str plan, bool[] needs, Tensor step, Tensor ids, "
    "Tensor? guard, Tensor[] factors, Tensor[] grad_factors) -> (Tensor, Tensor, Tensor, Tensor[])"
)
_library.define(
    "weight_operand(Tensor weight, str plan, bool columnwise, int version, ScalarType dtype) -> Tensor[]"
)

SLOTS = QUANTIZED_TYPES


class Source(NamedTuple):
    """What an input is made of: act(gate) * up; kind: `ops.norm.KINDS`."""

    gate: Tensor
    up: Tensor
    kind: int


def slot_ids(name: str) -> Tensor:
    """int64 [3]: ids of a module's slots, which key their random bits."""
    return torch.tensor([tensor_id(f"{name}.{slot}") for slot in SLOTS], device="cpu")


def slot_key(plan: GemmPlan, slot: str, step: Tensor, ids: Tensor, rows: int) -> Tensor | None:
    """Random key of a slot, int64 [5] (`ops.rng.KEY_FIELDS`), or None where nothing is rounded stochastically."""
    return dispatch.random_key(step, ids, SLOTS.index(slot), rows) if plan.hybrid(slot).is_stochastic else None


def quantize_slot(
    plan: GemmPlan, slot: str, x: Tensor, directions: list[Direction], step: Tensor, ids: Tensor, guard: Tensor | None,
    factors: list[Tensor], statistics: dict[Direction, dispatch.Statistics] | None = None,
) -> tuple[dict[Direction, Storage], list[Tensor]]:
    """Storages of an activation or gradient [rows, cols] as its products read them, and the amaxes of its delayed sides,
    rowwise first; statistics: as in `HybridQuantizer.storages`."""
    if isinstance(x, QuantizedTensor):
        return _given(plan, slot, x, directions), []
    hybrid = plan.hybrid(slot)
    sides = dict(zip(hybrid.delayed_directions, factors))
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else None
    made, amaxes = hybrid.storages(
        x, directions, key=slot_key(plan, slot, step, ids, x.shape[0]), factors=sides, layouts=layouts,
        guard=None if guard is None else guard[SLOTS.index(slot)], statistics=statistics,
    )
    return made, recorded_amaxes(hybrid, amaxes, x)


def _given(plan: GemmPlan, slot: str, x: QuantizedTensor, directions: list[Direction]) -> dict[Direction, Storage]:
    """Storages of an activation or gradient that came as codes, as its products read them."""
    layouts = plan.resolved(x.dtype, x.device).layouts[slot]
    made = {d: given_storage(plan, slot, x, d) for d in directions}
    return {d: s.in_layout(layouts[d]) if x.numel() else s for d, s in made.items()}


def given_storage(plan: GemmPlan, slot: str, x: QuantizedTensor, direction: Direction) -> Storage:
    """The storage of a direction, as it came. Raises ValueError where it is not what the plan would have made."""
    hybrid = plan.hybrid(slot)
    is_encoded = direction in hybrid.encodings
    storage = x.storage_for(direction if is_encoded else ROWWISE)
    storage = storage if is_encoded else hybrid.columnwise_of(storage)
    if storage.fmt != hybrid.side(direction).fmt or hybrid.delayed_directions:
        raise ValueError(
            f"the {slot} came as {storage.describe()}, and the plan multiplies {hybrid}; quantize it as the layer would "
            "(delayed scaling: leave it in high precision)"
        )
    return storage


def recorded_amaxes(hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor], x: Tensor) -> list[Tensor]:
    """The amaxes of the delayed sides of x; a direction that was not needed this time has none: zero."""
    return [amaxes[d] if d in amaxes else x.new_zeros(1, dtype=torch.float32) for d in hybrid.delayed_directions]


def weight_storage(weight: Tensor, direction: Direction, plan: GemmPlan, dtype, both: bool = False) -> Storage:
    """The weight's codes for one direction, as its product reads them: gathered, cached, or made here from a plain tensor.

    both:  the other direction follows, so that one read may make both.
    """
    hybrid, resolved = plan.weight, plan.resolved(dtype, weight.device)
    layouts = resolved.layouts["weight"]
    if isinstance(weight, QuantizedTensor):
        storage = weight.rowwise if direction is ROWWISE else weight.columnwise
        if storage is not None and storage.fmt != hybrid.side(direction).fmt:
            raise StaleWeightError(
                f"the gathered weight is {storage.fmt} {direction.value} and the plan multiplies "
                f"{hybrid.side(direction).fmt}; change formats with fq.set_recipe, at a step boundary"
            )
        operand, state = weight.operand_for(direction, layouts), weight_state(weight)
        if writers.checking and state is not None:
            state.check_codes(weight, direction, operand)
        return operand
    if not _is_cached(weight, plan):
        state = WeightState("weight", hybrid, tuple(weight.shape), plan.compute_dtype)
        weight = MasterWeight(inner_of(weight).detach(), state)
    operand = weight.state.whole_storage(weight, direction, dtype, layouts, resolved.call, both)
    if writers.checking:
        weight.state.check_codes(weight, direction, operand)
    return operand


def dgrad_weight(weight: Tensor, plan: GemmPlan, dtype) -> Storage:
    """The weight's codes for dgrad, the last product that reads it."""
    storage = weight_storage(weight, COLUMNWISE, plan, dtype)
    if isinstance(weight, MasterWeight):
        weight.state.let_go()
    return storage


class LastRead:
    """What was made of the tensor that was read last: layers that share an input (gate and up; q, k and v) make it once.

    Kept while the tensor lives, is the last one, and what was `seen` of it (its version, for whom, on which stream) is the same.
    """

    def __init__(self):
        self._entry = None

    def get(self, x: Tensor, seen: tuple) -> tuple | None:
        entry = self._entry
        return entry[2] if entry is not None and entry[0]() is x and entry[1] == seen else None

    def keep(self, x: Tensor, seen: tuple, made: tuple) -> None:
        self._entry = (weakref.ref(x, self._drop), seen, made)

    def _drop(self, ref: weakref.ref) -> None:
        if self._entry is not None and self._entry[0] is ref:
            self._entry = None


# (codes, the guard that counted them) of an input; only of results of other operators: what writes a buffer of its own (a
# receive, a copy into `.data`) tells no version.
_LAST_INPUT = LastRead()
# Guard of a layer that took another's codes -> the guard that counted them.
COUNTED_BY: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()


def _is_one_call(resolved: Resolved, x: Tensor, n: int, bias: Tensor | None = None) -> bool:
    """The compiled step takes x [.., cols] and the other operand's n rows as they are."""
    if resolved.call is None or type(x) not in (Tensor, Parameter) or not (bias is None or bias.dtype is x.dtype):
        return False
    size, cols = x.numel(), x.shape[-1]
    return size != 0 and not (cols % 16 or n % 16 or size // cols % 16)


def takes_source(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """`linear` may be given a source instead of x: it is one call, which neither multiplies nor keeps x itself."""
    return (
        not torch_compat.dispatch_is_watched() and plan.saves != "input" and plan.input.rowwise.fmt.is_quantized
        and _is_one_call(plan.resolved(x.dtype, x.device), x, weight.shape[0], bias)
    )


def _step(
    x, weight, bias, plan, resolved, save, step, ids, guard, factors, grad_factors, histories, grad_histories, edge, source=None
):
    """(y, the codes that the backward keeps), in one call; with `edge`, the parameter, y has its autograd node."""
    kept = codes = seen = None
    if resolved.shared is not None and source is None and x.grad_fn is not None:
        of_delayed = tuple((id(f), f._version) for f in factors)  # codes are shared by layers that have one history
        seen = x._version, resolved.shared, save, of_delayed, bool(histories), torch_compat.stream_of(x.device)
        found = _LAST_INPUT.get(x, seen)
        if found is not None:
            codes, counted_by, _ = found
            kept = codes
            if guard is not None and counted_by is not guard:
                COUNTED_BY[guard] = counted_by
    if writers.checking:
        codes = None  # made again, and compared
    if source is not None:  # x is let go before codes of the weight are made
        codes = native.linear_gated(*source, resolved.call, save, step, ids, guard, factors, histories)
    is_held = save and edge is not None and not writers.checking and _is_cached(weight, plan)
    if is_held and not torch_compat.backward_is_running():
        weight.state.note_forward(weight.version)
    operand = list(weight_storage(weight, ROWWISE, plan, x.dtype, save).buffers().values())
    columnwise, stamps = _held_operand(weight, resolved, x.dtype) if is_held else ([], [])
    if columnwise:
        weight.state.let_go()
    y, *made = native.linear_step(
        x, edge, bias, operand, resolved.call, weight_version(weight), save, step, ids, guard, factors, grad_factors,
        histories, grad_histories, codes or [], columnwise, stamps,
    )
    if codes is None and kept is not None and any(map(writers.bytes_apart, kept, made)):
        raise StaleWeightError(
            f"the input of {weight_state(weight).name} was written after an earlier layer quantized it, and the write moved "
            "no version counter: layers that share an input share its codes; give the written values a tensor of their own"
        )
    if codes is None and seen is not None:
        _LAST_INPUT.keep(x, seen, (made, guard, factors))  # whose ids `seen` holds
    return y, made


def _is_cached(weight: Tensor, plan: GemmPlan) -> bool:
    """The weight's state keeps its codes; else it is gathered, plain, or overridden."""
    return isinstance(weight, MasterWeight) and weight.state.quantizer == plan.weight


def _held_operand(weight: MasterWeight, resolved: Resolved, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(columnwise operand, stamps) of a weight whose codes are here already: good while no stamp has moved."""
    storage = weight.state.made(weight, COLUMNWISE, dtype, resolved.layouts["weight"][COLUMNWISE])
    stamps = weight.stamps
    return (list(storage.buffers().values()), stamps) if storage is not None and stamps else ([], [])


def weight_version(weight: Tensor) -> int:
    """Of a weight that is not gathered: a number that is equal as long as its values are; 0 for other tensors."""
    return hash(weight.version) if isinstance(weight, FSDPHooks) else 0


def check_weight_version(weight: Tensor, version: int) -> None:
    """Raise StaleWeightError for a master weight that was written since its forward."""
    if weight_version(weight) != version:
        raise StaleWeightError(
            f"{weight.state.name} was modified between the forward and the backward that needs it; step the optimizer "
            f"after backward(){weight.last_writer}"
        )


def _weight_operand(weight: Tensor, plan: str, columnwise: bool, version: int, dtype: torch.dtype) -> list[Tensor]:
    """The buffers of the weight's operand, for the compiled step; version: of the weight in the forward."""
    check_weight_version(weight, version)
    plan = plan_of(plan)
    made = dgrad_weight(weight, plan, dtype) if columnwise else weight_storage(weight, ROWWISE, plan, dtype)
    return list(made.buffers().values())


def _forward(x, weight, bias, plan, save, step, ids, guard, factors, grad_factors, grad_amaxes, histories=None):
    """histories: where amaxes may go instead of into the result (an operator writes to no argument)."""
    plan = plan_of(plan)
    x2 = x.reshape(-1, x.shape[-1])
    resolved = plan.resolved(x.dtype, x.device)
    saved = resolved.saved if save and plan.saves != "input" else None
    if (histories is not None or not plan.is_delayed) and _is_one_call(resolved, x, weight.shape[0], bias):
        y, made = _step(x, weight, bias, plan, resolved, save, step, ids, guard, factors, [], histories or [], [], None)
        return y, made[-len(buffer_names(plan.operand("input", saved))) :] if saved is not None else [], []
    refuse_codes(x, plan, save)
    directions = [ROWWISE, COLUMNWISE] if saved is COLUMNWISE else [ROWWISE]
    made, amaxes = quantize_slot(plan, "input", x2, directions, step, ids, guard, factors)
    w = weight_storage(weight, ROWWISE, plan, x.dtype, save)
    y = gemm(made[ROWWISE], w, out_dtype=x.dtype, bias=bias, domain=resolved.domains[0])
    buffers = list(made[saved].buffers().values()) if saved is not None else []
    return y.view(*x.shape[:-1], y.shape[-1]), buffers, amaxes


def refuse_codes(x: Tensor, plan: GemmPlan, save: bool) -> None:
    """Raise ValueError for an input that came as codes, where the backward reads its values."""
    if save and plan.saves == "input" and isinstance(x, QuantizedTensor):
        raise ValueError("the backward reads the input in high precision, and it came as codes; give it in high precision")


def buffer_names(fmt: Format) -> list[str]:
    """The buffers of a storage of this format."""
    has = {"data": True, "scale": fmt.scale != "none", "tensor_amax": fmt.tensor_scale}
    return [b for b in BUFFERS if has[b]]


def saved_columnwise(plan: GemmPlan, saved: list[Tensor], shape, dy: Tensor, step, ids, guard, factors) -> Storage:
    """The columnwise storage of the input [M, K], from what the plan saved."""
    hybrid, dtype = plan.input, dy.dtype
    if plan.saves == "input":
        x = saved[0].reshape(shape)
        return quantize_slot(plan, "input", x, [COLUMNWISE], step, ids, guard, factors)[0][COLUMNWISE]
    resolved = plan.resolved(dtype, dy.device)
    direction = resolved.saved
    fmt, laid_out = hybrid.side(direction).fmt, resolved.layouts["input"][direction]
    fields = {b: None for b in BUFFERS} | dict(zip(buffer_names(fmt), saved))
    storage = Storage(fmt, direction, shape, **fields, dtype=dtype, layout=laid_out if shape[0] else COMPACT)
    if direction is COLUMNWISE:
        return storage
    storage = storage.in_layout(COMPACT)
    if hybrid.one_storage:
        return storage.as_direction(COLUMNWISE)
    return hybrid.derive_columnwise(storage, key=slot_key(plan, "input", step, ids, shape[0]))


def bias_gradient(plan: GemmPlan, dy: Tensor, directions: list[Direction]) -> Tensor:
    """Sum over the tokens of dy [M, N]; where dy is quantized too, in the order of the kernels that do both in one read."""
    quantized = any(plan.grad_output.side(d).fmt.is_quantized for d in directions)
    return dispatch.column_sums(dy) if quantized and not isinstance(dy, QuantizedTensor) else dy.sum(0)


def product_backward(dy, weight, saved, plan, needs, step, ids, guard, factors, grad_factors, histories=None):
    """needs: of x, weight, bias. A gradient that is not needed is an empty tensor. histories: as in `_forward`, of dy."""
    plan = plan_of(plan)
    need_x, need_w, need_b = needs
    dy2 = dy.reshape(-1, dy.shape[-1])
    n, k = weight.shape
    none = dy.new_empty(0)
    dx = dw = none
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    resolved = plan.resolved(dy.dtype, dy.device)
    made, amaxes, domains = {}, [], resolved.domains
    if directions and (histories is not None or not plan.is_delayed) and _is_one_call(resolved, dy, k):
        operand = list(dgrad_weight(weight, plan, dy.dtype).buffers().values()) if need_x else []
        dx, dw, db = native.linear_step_backward(
            dy, operand, saved, need_x, need_w, need_b, resolved.call, step, ids, guard, factors, grad_factors, histories or [],
        )
        return dx.view(*dy.shape[:-1], k) if need_x else none, dw, db, []
    db = bias_gradient(plan, dy2, directions) if need_b else none
    if directions:
        made, amaxes = quantize_slot(plan, "grad_output", dy2, directions, step, ids, guard, grad_factors)
    if need_x:
        w = dgrad_weight(weight, plan, dy.dtype)
        dx = gemm(made[ROWWISE], w, out_dtype=dy.dtype, domain=domains[1]).view(*dy.shape[:-1], k)
    if need_w:
        x = saved_columnwise(plan, saved, (dy2.shape[0], k), dy, step, ids, guard, factors)
        dw = gemm(made[COLUMNWISE], x, out_dtype=dy.dtype, domain=domains[2])
    return dx, dw, db, amaxes


_library.impl("linear", _forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", product_backward, "CompositeExplicitAutograd")
_library.impl("weight_operand", _weight_operand, "CompositeExplicitAutograd")
OPERATORS[torch.ops.fsdp_quant.linear.default] = _forward
OPERATORS[torch.ops.fsdp_quant.linear_backward.default] = product_backward
OPERATORS[torch.ops.fsdp_quant.weight_operand.default] = _weight_operand


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, plan, save, step, ids, guard, factors, grad_factors, grad_amaxes = inputs
    _, buffers, _ = output
    ctx.weight, ctx.plan, ctx.step, ctx.ids, ctx.guard = weight, plan, step, ids, guard
    ctx.factors, ctx.grad_factors, ctx.grad_amaxes = factors, grad_factors, grad_amaxes
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.version = weight_version(weight)
    ctx.save_for_backward(*([x] if save and plan_of(plan).saves == "input" else buffers))


def _autograd_backward(ctx, dy, _buffers, _amaxes):
    weight = ctx.weight
    check_weight_version(weight, ctx.version)
    needs = list(ctx.needs_input_grad[:3])
    watched = (
        torch.is_grad_enabled() or torch_compat.dispatch_is_watched() or torch.is_autocast_enabled(dy.device.type)
    )
    dx, dw, db, amaxes = (torch.ops.fsdp_quant.linear_backward if watched else product_backward)(
        dy, weight, list(ctx.saved_tensors), ctx.plan, needs, ctx.step, ctx.ids, ctx.guard, ctx.factors,
        ctx.grad_factors,
    )
    for history, amax in zip(ctx.grad_amaxes, amaxes):
        AmaxHistory.record_in(history, amax)
    lists = [[None] * len(tensors) for tensors in (ctx.factors, ctx.grad_factors, ctx.grad_amaxes)]
    return (
        dx if needs[0] else None, dw.to(weight.dtype) if needs[1] else None,
        db.to(ctx.bias_dtype) if needs[2] else None, None, None, None, None, None, *lists,
    )


def _below_autocast(x: Tensor, *inputs):
    """`_forward`, whose products are in the dtypes that it chose."""
    if not torch.is_autocast_enabled(x.device.type):
        return _forward(x, *inputs)
    with torch.autocast(x.device.type, enabled=False):
        return _forward(x, *inputs)


class _Eager(torch.autograd.Function):
    """The operator without its way through the dispatcher, for what the compiled step does not do."""

    @staticmethod
    def forward(ctx, *inputs):
        output = y, _, amaxes = _below_autocast(*inputs)
        _setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*amaxes)
        return y, *amaxes

    @staticmethod
    def backward(ctx, dy, *_):
        return *_autograd_backward(ctx, dy, None, None)[:8], None, None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, save: bool, step: Tensor, ids: Tensor,
    guard: Tensor | None, factors: list[Tensor], grad_factors: list[Tensor], histories: list[Tensor],
    grad_histories: list[Tensor], source: Source | None = None,
) -> Tensor:
    """y; the operator itself only where something looks at operators.

    factors, grad_factors:      of the delayed sides of the input, and of the gradient.
    histories, grad_histories:  where their amaxes go; empty: nowhere.
    source:                     of x, which has a shape and a node of autograd, but no values; see `takes_source`.
    """
    watched = torch_compat.dispatch_is_watched()
    if not watched:
        resolved = plan.resolved(x.dtype, x.device)
        if _is_one_call(resolved, x, weight.shape[0], bias):
            return _step(
                x, weight, bias, plan, resolved, save, step, ids, guard, factors, grad_factors, histories,
                grad_histories, weight, source,
            )[0]
    if source is not None:
        raise ValueError("the input of this layer was not made, as one call was to make it; see takes_source")
    inputs = (x, weight, bias, plan.key, save, step, ids, guard, factors, grad_factors, grad_histories)
    if watched:
        y, _, amaxes = torch.ops.fsdp_quant.linear(*inputs)
    elif torch.is_grad_enabled():
        y, *amaxes = _Eager.apply(*inputs)
    else:
        y, _, amaxes = _below_autocast(*inputs)
    for history, amax in zip(histories, amaxes):
        AmaxHistory.record_in(history, amax)
    return y


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, save: bool, step: Tensor, ids: Tensor,
    guard: Tensor | None, factors: list[Tensor], grad_factors: list[Tensor], histories: list[Tensor],
    grad_histories: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """(y, what the backward keeps of x) without autograd; see `linear`."""
    inputs = (x, weight, bias, plan.key, save, step, ids, guard, factors, grad_factors, grad_histories, histories)
    y, buffers, amaxes = _below_autocast(*inputs)
    for history, amax in zip(histories, amaxes):
        AmaxHistory.record_in(history, amax)
    return y, buffers


def refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the layers of a gradient "
        "penalty out of fq.convert"
    )


def weight_state(weight: Tensor):
    """The `WeightState` behind a MasterWeight or a gathered weight, or None for a plain tensor."""
    if isinstance(weight, MasterWeight):
        return weight.state
    return weight._slots.owner if isinstance(weight, QuantizedTensor) else None


torch.library.register_autograd("fsdp_quant::linear", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("fsdp_quant::linear_backward", refuse_second_derivative, lib=_library)

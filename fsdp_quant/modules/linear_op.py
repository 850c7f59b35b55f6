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

import torch
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError, gemm
from ..ops import native
from ..ops.layout import COMPACT, operand_format
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer
from ..recipe import QUANTIZED_TYPES
from ..scaling import AmaxHistory
from ..storage import BUFFERS, Storage
from ..tensor import torch_compat
from ..tensor.master_weight import MasterWeight, WeightState, inner_of
from ..tensor.quantized_tensor import OPERATORS, QuantizedTensor
from .plan import PRODUCTS, GemmPlan, plan_of

_library = torch.library.Library("fsdp_quant", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str plan, bool save, Tensor step, Tensor ids, Tensor? guard, "
    "Tensor[] factors, Tensor[] grad_factors, Tensor[] grad_amaxes) -> (Tensor, Tensor[], Tensor[])"
)
_library.define(
    "linear_backward(Tensor dy, Tensor weight, Tensor[] saved, str plan, bool[] needs, Tensor step, Tensor ids, "
    "Tensor? guard, Tensor[] factors, Tensor[] grad_factors) -> (Tensor, Tensor, Tensor, Tensor[])"
)

SLOTS = QUANTIZED_TYPES


def slot_ids(name: str) -> Tensor:
    """int64 [3]: ids of a module's slots, which key their random bits."""
    return torch.tensor([tensor_id(f"{name}.{slot}") for slot in SLOTS], device="cpu")


def _key(plan: GemmPlan, slot: str, step: Tensor, ids: Tensor, rows: int) -> Tensor | None:
    """Random key of a slot, int64 [5] (`ops.rng.KEY_FIELDS`), or None where nothing is rounded stochastically."""
    if not plan.hybrid(slot).is_stochastic:
        return None
    seed, number, micro_batch, offset, rank = step.unbind()
    row0 = torch.where(offset < 0, rank * rows, offset)
    return torch.stack((seed, number, ids[SLOTS.index(slot)], micro_batch, row0))


def _quantize(
    plan: GemmPlan, slot: str, x: Tensor, directions: list[Direction], step: Tensor, ids: Tensor, guard: Tensor | None,
    factors: list[Tensor],
) -> tuple[dict[Direction, Storage], list[Tensor]]:
    """Storages of an activation or gradient [rows, cols] as its products read them, and the amaxes of its delayed sides,
    rowwise first."""
    hybrid = plan.hybrid(slot)
    sides = dict(zip(hybrid.delayed_directions, factors))
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else None
    made, amaxes = hybrid.storages(
        x, directions, key=_key(plan, slot, step, ids, x.shape[0]), factors=sides, layouts=layouts,
        guard=None if guard is None else guard[SLOTS.index(slot)],
    )
    return made, _recorded(hybrid, amaxes, x)


def _recorded(hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor], x: Tensor) -> list[Tensor]:
    """The amaxes of the delayed sides of x; a direction that was not needed this time has none: zero."""
    return [amaxes[d] if d in amaxes else x.new_zeros(1, dtype=torch.float32) for d in hybrid.delayed_directions]


def _weight_storage(weight: Tensor, direction: Direction, plan: GemmPlan, dtype, both: bool = False) -> Storage:
    """The weight's codes for one direction, as its product reads them: gathered, cached, or made here from a plain tensor.

    both:  the other direction follows, so that one read may make both.
    """
    hybrid, layouts = plan.weight, plan.resolved(dtype, weight.device).layouts["weight"]
    if isinstance(weight, QuantizedTensor):
        storage = weight.storage_for(direction)
        if storage.fmt != hybrid.side(direction).fmt:
            raise StaleWeightError(
                f"the gathered weight is {storage.fmt} {direction.value} and the plan multiplies "
                f"{hybrid.side(direction).fmt}; change formats with fq.set_recipe, at a step boundary"
            )
        return storage.in_layout(layouts[direction])
    if not isinstance(weight, MasterWeight) or weight.state.quantizer != hybrid:  # plain, or overridden: not cached
        state = WeightState("weight", hybrid, tuple(weight.shape), plan.compute_dtype)
        weight = MasterWeight(inner_of(weight).detach(), state)
    return weight.state.whole_storage(weight, direction, dtype, layouts, both)


class _LastInput:
    """Codes of the input that was quantized last: layers that share one (gate and up; q, k and v) quantize it once.

    Kept while the tensor lives, is the last one, and is not written; never across streams or into a captured graph. Only
    of results of other operators: what writes a buffer of its own (a receive, a copy into `.data`) tells no version.
    """

    def __init__(self):
        self._entry = None

    def codes(self, x: Tensor, key: object) -> dict[Direction, list[Tensor]] | None:
        entry = self._entry
        if entry is None or entry[0]() is not x:
            return None
        return entry[2] if entry[1] == (x._version, key, torch_compat.stream_of(x.device)) else None

    def keep(self, x: Tensor, key: object, made: dict[Direction, list[Tensor]]) -> None:
        if x.grad_fn is not None:
            self._entry = (weakref.ref(x, self._drop), (x._version, key, torch_compat.stream_of(x.device)), made)

    def _drop(self, ref: weakref.ref) -> None:
        if self._entry is not None and self._entry[0] is ref:
            self._entry = None


_LAST_INPUT = _LastInput()


def _is_one_call(step: native.Step | None, x: Tensor, n: int) -> bool:
    """The tensor cores take x [rows, cols] and the other operand's n rows as they are, and no one looks at operators."""
    if step is None or x.numel() == 0 or not x.shape[0] % 16 == x.shape[1] % 16 == n % 16 == 0:
        return False
    return native.runs(x) and not torch_compat.dispatch_is_watched()


def _operand(storage: Storage) -> native.Operand:
    return native.Operand(storage.data, storage.scale, storage.operand_format)


def _step(plan, resolved, slot, x, row_b, col_b, bias, guard, factors, makes_row, makes_col):
    """Quantize x and multiply its codes in one call: (products, direction -> [data, scale], amaxes of delayed sides)."""
    hybrid, call = plan.hybrid(slot), resolved.steps[slot]
    sides = dict(zip(hybrid.delayed_directions, factors))
    row_enc = sides.get(ROWWISE)
    col_enc = row_enc if hybrid.one_storage else sides.get(COLUMNWISE)
    results = native.quantize_multiply(
        x, call, (row_enc if makes_row else None, col_enc if makes_col else None),
        None if guard is None else guard[SLOTS.index(slot)], row_b, col_b, bias, makes_row, makes_col,
    )
    count = (row_b is not None) + (col_b is not None)
    products, rest, made, amaxes = results[:count], results[count:], {}, {}
    for direction, wanted in ((ROWWISE, makes_row), (COLUMNWISE, makes_col)):
        if wanted:
            quantizer = hybrid.side(direction)
            made[direction], rest = rest[:2], rest[2:]
            if quantizer.fmt.scale_leaves_contraction:
                amaxes[direction], rest = rest[0], rest[1:]
            counters.add("quantize", (quantizer.fmt.name, direction.value, "native"))
    for product, counted in zip(PRODUCTS, resolved.counted):
        if product.a[0] == slot and (row_b if product.a[1] is ROWWISE else col_b) is not None:
            counters.add("gemm", counted)
    if hybrid.one_storage and hybrid.delayed_directions and not makes_row:
        amaxes[ROWWISE] = amaxes[COLUMNWISE]
    return products, made, _recorded(hybrid, amaxes, x)


def _forward(x, weight, bias, plan, save, step, ids, guard, factors, grad_factors, grad_amaxes):
    plan = plan_of(plan)
    x2 = x.reshape(-1, x.shape[-1])
    resolved = plan.resolved(x.dtype, x.device)
    saved = resolved.saved if save and plan.saves != "input" else None
    adds_bias = bias is None or bias.dtype is x.dtype is torch.bfloat16
    if adds_bias and _is_one_call(resolved.steps["input"], x2, weight.shape[0]):
        w = _operand(_weight_storage(weight, ROWWISE, plan, x.dtype, save))
        key = (resolved.steps["input"], saved)
        made, amaxes = _LAST_INPUT.codes(x, key), []
        if made is None:
            makes_col = saved is COLUMNWISE
            (y,), made, amaxes = _step(plan, resolved, "input", x2, w, None, bias, guard, factors, True, makes_col)
            if not amaxes:
                _LAST_INPUT.keep(x, key, made)
        else:
            fmt = operand_format(plan.operand("input", ROWWISE), resolved.layouts["input"][ROWWISE])
            y = native.gemm(native.Operand(*made[ROWWISE], fmt), w, x.dtype, None, False, bias, None)
            counters.add("gemm", resolved.counted[0])
        return y.view(*x.shape[:-1], y.shape[-1]), made.get(saved, []), amaxes
    directions = [ROWWISE, COLUMNWISE] if saved is COLUMNWISE else [ROWWISE]
    made, amaxes = _quantize(plan, "input", x2, directions, step, ids, guard, factors)
    w = _weight_storage(weight, ROWWISE, plan, x.dtype, save)
    y = gemm(made[ROWWISE], w, out_dtype=x.dtype, bias=bias, domain=resolved.domains[0])
    buffers = list(made[saved].buffers().values()) if saved is not None else []
    return y.view(*x.shape[:-1], y.shape[-1]), buffers, amaxes


def _saved_columnwise(plan: GemmPlan, saved: list[Tensor], shape, dy: Tensor, step, ids, guard, factors) -> Storage:
    """The columnwise storage of the input [M, K], from what the plan saved."""
    hybrid, dtype = plan.input, dy.dtype
    if plan.saves == "input":
        x = saved[0].reshape(shape)
        return _quantize(plan, "input", x, [COLUMNWISE], step, ids, guard, factors)[0][COLUMNWISE]
    resolved = plan.resolved(dtype, dy.device)
    direction = resolved.saved
    fmt, laid_out = hybrid.side(direction).fmt, resolved.layouts["input"][direction]
    names = [b for b in BUFFERS if b == "data" or (b == "scale" and fmt.scale != "none") or
             (b == "tensor_amax" and fmt.tensor_scale)]
    fields = {b: None for b in BUFFERS} | dict(zip(names, saved))
    storage = Storage(fmt, direction, shape, **fields, dtype=dtype, layout=laid_out if shape[0] else COMPACT)
    if direction is COLUMNWISE:
        return storage
    storage = storage.in_layout(COMPACT)
    if hybrid.one_storage:
        return storage.as_direction(COLUMNWISE)
    return hybrid.derive_columnwise(storage, key=_key(plan, "input", step, ids, shape[0]))


def _backward(dy, weight, saved, plan, needs, step, ids, guard, factors, grad_factors):
    """needs: of x, weight, bias. A gradient that is not needed is an empty tensor."""
    plan = plan_of(plan)
    need_x, need_w, need_b = needs
    dy2 = dy.reshape(-1, dy.shape[-1])
    n, k = weight.shape
    none = dy.new_empty(0)
    dx, dw, db = none, none, dy2.sum(0) if need_b else none
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    resolved = plan.resolved(dy.dtype, dy.device)
    made, amaxes, domains = {}, [], resolved.domains
    if directions and _is_one_call(resolved.steps["grad_output"], dy2, k):
        w = _operand(_weight_storage(weight, COLUMNWISE, plan, dy.dtype)) if need_x else None
        x = None
        if need_w:
            x = _saved_columnwise(plan, saved, (dy2.shape[0], k), dy, step, ids, guard, factors)
            x = _operand(x.in_layout(resolved.layouts["input"][COLUMNWISE]))
        products, _, amaxes = _step(plan, resolved, "grad_output", dy2, w, x, None, guard, grad_factors, need_x, need_w)
        products = iter(products)
        dx = next(products).view(*dy.shape[:-1], k) if need_x else none
        return dx, next(products) if need_w else none, db, amaxes
    if directions:
        made, amaxes = _quantize(plan, "grad_output", dy2, directions, step, ids, guard, grad_factors)
    if need_x:
        w = _weight_storage(weight, COLUMNWISE, plan, dy.dtype)
        dx = gemm(made[ROWWISE], w, out_dtype=dy.dtype, domain=domains[1]).view(*dy.shape[:-1], k)
    if need_w:
        x = _saved_columnwise(plan, saved, (dy2.shape[0], k), dy, step, ids, guard, factors)
        dw = gemm(made[COLUMNWISE], x, out_dtype=dy.dtype, domain=domains[2])
    return dx, dw, db, amaxes


_library.impl("linear", _forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", _backward, "CompositeExplicitAutograd")
OPERATORS[torch.ops.fsdp_quant.linear.default] = _forward
OPERATORS[torch.ops.fsdp_quant.linear_backward.default] = _backward


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, plan, save, step, ids, guard, factors, grad_factors, grad_amaxes = inputs
    _, buffers, _ = output
    ctx.weight, ctx.plan, ctx.step, ctx.ids, ctx.guard = weight, plan, step, ids, guard
    ctx.factors, ctx.grad_factors, ctx.grad_amaxes = factors, grad_factors, grad_amaxes
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.version = weight.version if isinstance(weight, MasterWeight) else None
    ctx.save_for_backward(*([x] if save and plan_of(plan).saves == "input" else buffers))


def _autograd_backward(ctx, dy, _buffers, _amaxes):
    weight = ctx.weight
    if ctx.version is not None and weight.version != ctx.version:
        raise StaleWeightError(
            f"{weight.state.name} was modified between the forward and the backward that needs it; step the optimizer "
            "after backward()"
        )
    needs = list(ctx.needs_input_grad[:3])
    watched = (
        torch.is_grad_enabled() or torch_compat.dispatch_is_watched() or torch.is_autocast_enabled(dy.device.type)
    )
    dx, dw, db, amaxes = (torch.ops.fsdp_quant.linear_backward if watched else _backward)(
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
    """The operator without its way through the dispatcher, which takes longer than all of its own host work."""

    @staticmethod
    def forward(ctx, *inputs):
        output = y, _, amaxes = _below_autocast(*inputs)
        _setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*amaxes)
        return y, *amaxes

    @staticmethod
    def backward(ctx, dy, *_):
        return *_autograd_backward(ctx, dy, None, None)[:8], None, None, None


def linear(*inputs) -> tuple[Tensor, list[Tensor]]:
    """(y, amaxes) of the operator's inputs; the operator itself only where something looks at operators."""
    if torch_compat.dispatch_is_watched():
        y, _, amaxes = torch.ops.fsdp_quant.linear(*inputs)
    elif torch.is_grad_enabled():
        y, *amaxes = _Eager.apply(*inputs)
    else:
        y, _, amaxes = _below_autocast(*inputs)
    return y, amaxes


def _refuse_second_derivative(ctx, *grads):
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
torch.library.register_autograd("fsdp_quant::linear_backward", _refuse_second_derivative, lib=_library)

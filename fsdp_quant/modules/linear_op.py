"""The one operator behind every linear layer: linear(x, w, ...) -> (y, saved buffers, amaxes), with its autograd.

    forward   x.rowwise, x.columnwise = quantize(x)         y  = gemm(x.rowwise, w.rowwise) + bias
    backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = gemm(dy.rowwise, w.columnwise)
                                                            dw = gemm(dy.columnwise, x.columnwise)

x [.., K], w [N, K], y [.., N]. What the backward needs of x are *outputs* of the operator: plain tensors, which is
all that users' saved-tensor hooks (offload, checkpointing) ever see. The weight stays on ctx: under FSDP2 its codes
are freed and gathered again in between, in the direction that the backward multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError, gemm
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer
from ..scaling import AmaxHistory
from ..storage import BUFFERS, Storage
from ..tensor.master_weight import MasterWeight, WeightState, inner_of
from ..tensor.quantized_tensor import OPERATORS, QuantizedTensor
from .plan import GemmPlan, plan_of

_library = torch.library.Library("fsdp_quant", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str plan, bool save, Tensor step, Tensor ids, Tensor[] factors, "
    "Tensor[] grad_factors, Tensor[] grad_amaxes) -> (Tensor, Tensor[], Tensor[])"
)
_library.define(
    "linear_backward(Tensor dy, Tensor weight, Tensor[] saved, str plan, bool[] needs, Tensor step, Tensor ids, "
    "Tensor[] factors, Tensor[] grad_factors) -> (Tensor, Tensor, Tensor, Tensor[])"
)

SLOTS = ("input", "weight", "grad_output")


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
    plan: GemmPlan, slot: str, x: Tensor, directions: list[Direction], step: Tensor, ids: Tensor, factors: list[Tensor]
) -> tuple[dict[Direction, Storage], list[Tensor]]:
    """Storages of an activation or gradient [rows, cols], and the amaxes of its delayed sides, rowwise first."""
    hybrid = plan.hybrid(slot)
    sides = dict(zip(hybrid.delayed_directions, factors))
    made, amaxes = hybrid.storages(x, directions, key=_key(plan, slot, step, ids, x.shape[0]), factors=sides)
    # a direction that was not needed this time has no amax to record
    return made, [amaxes.get(d, x.new_zeros(1, dtype=torch.float32)) for d in hybrid.delayed_directions]


def _weight_storage(weight: Tensor, hybrid: HybridQuantizer, direction: Direction, plan: GemmPlan, dtype) -> Storage:
    """The weight's codes for one direction: gathered, cached, or made here from a plain tensor."""
    if isinstance(weight, QuantizedTensor):
        storage = weight.storage_for(direction)
        if storage.fmt != hybrid.side(direction).fmt:
            raise StaleWeightError(
                f"the gathered weight is {storage.fmt} {direction.value} and the plan multiplies "
                f"{hybrid.side(direction).fmt}; change formats with fq.set_recipe, at a step boundary"
            )
        return storage
    if not isinstance(weight, MasterWeight) or weight.state.quantizer != hybrid:  # plain, or overridden: not cached
        state = WeightState("weight", hybrid, tuple(weight.shape), plan.compute_dtype)
        weight = MasterWeight(inner_of(weight).detach(), state)
    return weight.state.whole_storage(weight, direction, dtype)


def _forward(x, weight, bias, plan, save, step, ids, factors, grad_factors, grad_amaxes):
    plan = plan_of(plan)
    x2 = x.reshape(-1, x.shape[-1])
    quantize_columns = save and plan.saves == "columnwise"
    directions = [ROWWISE, COLUMNWISE] if quantize_columns else [ROWWISE]
    made, amaxes = _quantize(plan, "input", x2, directions, step, ids, factors)
    w = _weight_storage(weight, plan.weight, ROWWISE, plan, x.dtype)
    y = gemm(made[ROWWISE], w, out_dtype=x.dtype, bias=bias)
    saved = made[COLUMNWISE if plan.saves == "columnwise" else ROWWISE] if save and plan.saves != "input" else None
    buffers = list(saved.buffers().values()) if saved is not None else []
    return y.view(*x.shape[:-1], y.shape[-1]), buffers, amaxes


def _saved_columnwise(plan: GemmPlan, saved: list[Tensor], shape, dtype, step, ids, factors: list[Tensor]) -> Storage:
    """The columnwise storage of the input [M, K], from what the plan saved."""
    hybrid = plan.input
    if plan.saves == "input":
        x = saved[0].reshape(shape)
        return _quantize(plan, "input", x, [COLUMNWISE], step, ids, factors)[0][COLUMNWISE]
    direction = COLUMNWISE if plan.saves == "columnwise" else ROWWISE
    fmt = hybrid.side(direction).fmt
    names = [b for b in BUFFERS if b == "data" or (b == "scale" and fmt.scale != "none") or
             (b == "tensor_amax" and fmt.tensor_scale)]
    fields = {b: None for b in BUFFERS} | dict(zip(names, saved))
    storage = Storage(fmt, direction, shape, **fields, dtype=dtype)
    if direction is COLUMNWISE:
        return storage
    if hybrid.one_storage:
        return storage.as_direction(COLUMNWISE)
    return hybrid.derive_columnwise(storage, key=_key(plan, "input", step, ids, shape[0]))


def _backward(dy, weight, saved, plan, needs, step, ids, factors, grad_factors):
    """needs: of x, weight, bias. A gradient that is not needed is an empty tensor."""
    plan = plan_of(plan)
    need_x, need_w, need_b = needs
    dy2 = dy.reshape(-1, dy.shape[-1])
    n, k = weight.shape
    none = dy.new_empty(0)
    dx, dw, db = none, none, dy2.sum(0) if need_b else none
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    made, amaxes = _quantize(plan, "grad_output", dy2, directions, step, ids, grad_factors) if directions else ({}, [])
    if need_x:
        w = _weight_storage(weight, plan.weight, COLUMNWISE, plan, dy.dtype)
        dx = gemm(made[ROWWISE], w, out_dtype=dy.dtype).view(*dy.shape[:-1], k)
    if need_w:
        x = _saved_columnwise(plan, saved, (dy2.shape[0], k), dy.dtype, step, ids, factors)
        dw = gemm(made[COLUMNWISE], x, out_dtype=dy.dtype)
    return dx, dw, db, amaxes


_library.impl("linear", _forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", _backward, "CompositeExplicitAutograd")
OPERATORS[torch.ops.fsdp_quant.linear.default] = _forward
OPERATORS[torch.ops.fsdp_quant.linear_backward.default] = _backward


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, plan, save, step, ids, factors, grad_factors, grad_amaxes = inputs
    _, buffers, _ = output
    ctx.weight, ctx.plan, ctx.step, ctx.ids = weight, plan, step, ids
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
    dx, dw, db, amaxes = torch.ops.fsdp_quant.linear_backward(
        dy, weight, list(ctx.saved_tensors), ctx.plan, needs, ctx.step, ctx.ids, ctx.factors, ctx.grad_factors
    )
    for history, amax in zip(ctx.grad_amaxes, amaxes):
        AmaxHistory.record_in(history, amax)
    lists = [[None] * len(tensors) for tensors in (ctx.factors, ctx.grad_factors, ctx.grad_amaxes)]
    return (
        dx if needs[0] else None, dw.to(weight.dtype) if needs[1] else None,
        db.to(ctx.bias_dtype) if needs[2] else None, None, None, None, None, *lists,
    )


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

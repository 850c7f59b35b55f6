# SPDX-License-Identifier: Apache-2.0
"""The one operator behind every linear layer, with its autograd.

    forward   x.rowwise, x.columnwise = quantize(x)         y  = gemm(x.rowwise, w.rowwise) + bias
              w.rowwise, w.columnwise = quantize(w)
    backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = gemm(dy.rowwise, w.columnwise)
                                                            dw = gemm(dy.columnwise, x.columnwise)

x [.., K], w [N, K], y [.., N]. A forward quantizes the weight that it multiplies, in both
directions where a backward follows; the autograd node owns the codes that the backward reads. Under
FSDP2 the weight is a `QuantizedTensor` of gathered codes, whose columnwise buffers are freed after
the forward and filled again before the backward.

Three executors give the same bytes: the definition here (`Definition`), one compiled call per pass
(`native.linear_step`), and the functional operators of a traced graph (`traced_linear`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError, Watch, gemm
from ..ops import native
from ..storage import matrix_over
from ..tensor import code_check, torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.weight_state import (
    WeightState,
    values_of,
)
from .operands import (
    _state_of,
    bias_gradient,
    buffers_of,
    codes_of_transposed,
    gathered_storage,
    lies_transposed,
    quantize_slot,
    record,
    refuse_codes,
    saved_columnwise,
    weight_storages,
)
from .plan import GemmPlan, Resolved


class GatedInput(NamedTuple):
    """What an input is made of: act(gate) * up; kind: `ops.norm.KINDS`."""

    gate: Tensor
    up: Tensor
    kind: int


@dataclass(eq=False)
class Handed:
    """What the module that computed an input hands over with it; it lives as long as that module's
    forward.

    amaxes:  fp32, as the kernel that wrote x left them (`native.amaxes_like`); None: not known.
    grad_amaxes:  memory for the amaxes of the gradient of y, into which the node that makes that
                  gradient writes them.
    source:  where x has a shape and an autograd node, but no values; see `can_fuse_activation`.
    codes:   key -> codes of x, made by the first layer that multiplies it, for the others.
    """

    amaxes: Tensor | None = None
    source: GatedInput | None = None
    codes: dict[tuple, list[Tensor]] = field(default_factory=dict)
    grad_amaxes: Tensor | None = None


class HandedByInput:
    """`Handed` of a tensor that several layers of one module read, for the time of that module's
    forward."""

    def __init__(self):
        self._x: Tensor | None = None
        self._version, self._handed = 0, Handed()

    def of(self, x: Tensor) -> Handed:
        version = 0 if x.is_inference() else x._version
        if self._x is not x or self._version != version:
            self._x, self._version, self._handed = x, version, Handed()
        return self._handed


class LinearCall(NamedTuple):
    """What a call of a layer has besides its tensors: values, and memory in which amaxes are
    recorded.

    state:            the weight's: its name, tensor-parallel group, histories; None: of a plain
                      tensor.
    save:             the backward needs x.
    records:          amaxes are recorded: in training, and not in a recomputation.
    step, ids:        int64 [5] (`context.STEP_FIELDS`) and [3] (`slot_ids`), which key random bits.
    guard:            fp32 [3, 2], to which products add what they lost to anchors
                      (`modules.guard`); None: nobody asks.
    factors, grad_factors:      encode factors fp32 [1] of the delayed sides of the input, and of
                                the gradient.
    histories, grad_histories:  where their amaxes are recorded; empty: nowhere.
    """

    plan: GemmPlan
    state: WeightState | None
    save: bool
    records: bool
    step: Tensor
    ids: Tensor
    guard: Tensor | None = None
    factors: Sequence[Tensor] = ()
    grad_factors: Sequence[Tensor] = ()
    histories: Sequence[Tensor] = ()
    grad_histories: Sequence[Tensor] = ()

    def quantize(
        self, slot: str, x: Tensor, directions, statistics=None
    ) -> tuple[dict[Direction, EncodedMatrix], list[Tensor]]:
        """`quantize_slot` with this call's values."""
        factors = self.factors if slot == "input" else self.grad_factors
        return quantize_slot(
            self.plan, slot, x, list(directions), self.step, self.ids, factors, statistics
        )

    def watch(self, resolved: Resolved, product: int) -> Watch | None:
        return (
            None
            if self.guard is None
            else Watch(resolved.watched[product], self.step, self.guard, product)
        )


# The weight #


# One compiled call per pass #


class _Operands(NamedTuple):
    """A weight as the compiled call takes it.

    values:      to be quantized inside; else `rowwise` and `columnwise` are the buffers of its
                 codes.
    factors, histories: of the delayed sides of `values`.
    """

    values: Tensor | None
    round_to_bf16: bool = False
    factors: Sequence[Tensor] = ()
    histories: Sequence[Tensor] = ()
    rowwise: Sequence[Tensor] = ()
    columnwise: Sequence[Tensor] = ()


def _operands(
    weight: Tensor, call: LinearCall, resolved: Resolved, dtype: torch.dtype, backward: bool
) -> _Operands | None:
    """None where the compiled call cannot be handed what the backward reads.

    backward:  dgrad follows.
    """
    plan = call.plan
    if isinstance(weight, QuantizedTensor):
        layouts = resolved.layouts["weight"]
        rowwise = gathered_storage(weight, ROWWISE, plan, layouts[ROWWISE])
        columnwise = _columnwise_buffers(weight, plan, layouts[COLUMNWISE]) if backward else []
        return (
            None
            if columnwise is None
            else _Operands(None, rowwise=buffers_of(rowwise), columnwise=columnwise)
        )
    values = values_of(weight).detach()
    state = _state_of(call.state, plan, values)
    is_cast = values.dtype is not dtype and not all(
        plan.weight.side(d).fmt.is_quantized for d in Direction
    )
    if state.spans_parts or state.held is not None or code_check.checking or is_cast:
        wanted = [ROWWISE, *([COLUMNWISE] if backward else [])]
        made = weight_storages(weight, wanted, plan, call.state, dtype, call.records)
        return _Operands(
            None,
            rowwise=buffers_of(made[ROWWISE]),
            columnwise=buffers_of(made[COLUMNWISE]) if backward else (),
        )
    seen = plan.compute_dtype or values.dtype
    round_to_bf16 = values.dtype is torch.float32 and seen is torch.bfloat16
    found = (
        state.delayed_history(d, values.device, plan.weight) for d in plan.weight.delayed_directions
    )
    histories = [history for history in found if history is not None]
    coded = [
        d
        for d in ((ROWWISE, COLUMNWISE) if backward else (ROWWISE,))
        if plan.operand("weight", d).is_quantized
    ]
    for d in coded:
        if d in plan.weight.encodings:
            counters.add("weight encode", (state.name, d.value))
    turned = plan.turned(dtype, values.device) if coded and lies_transposed(values) else None
    if turned is not None:
        made = codes_of_transposed(
            values if round_to_bf16 else values.to(seen), turned, coded, round_to_bf16
        )
        return _Operands(
            None,
            rowwise=made.get(ROWWISE, [values]),
            columnwise=made.get(COLUMNWISE, [values]) if backward else (),
        )
    return _Operands(
        values if round_to_bf16 else values.to(seen),
        round_to_bf16,
        [h.enc for h in histories],
        [h.amaxes for h in histories] if call.records else [],
    )


def _columnwise_buffers(
    weight: QuantizedTensor, plan: GemmPlan, layout: str
) -> list[Tensor] | None:
    """The memory in which the backward will find the codes that dgrad reads; FSDP2 may have freed
    it until then."""
    slots = weight._slots
    kept = slots.laid_out.get((COLUMNWISE, layout)) or slots.columnwise
    if kept is not None and (kept.layout == layout or not kept.fmt.is_quantized):
        return buffers_of(kept)
    if kept is None or kept.is_freed:
        return None
    return buffers_of(gathered_storage(weight, COLUMNWISE, plan, layout))


def _is_one_call(resolved: Resolved, x: Tensor, n: int, bias: Tensor | None = None) -> bool:
    """The compiled call takes x [.., cols] and the other operand's n rows as they are."""
    if (
        resolved.call is None
        or type(x) not in (Tensor, Parameter)
        or not (bias is None or bias.dtype is x.dtype)
    ):
        return False
    size, cols = x.numel(), x.shape[-1]
    return size != 0 and not any(length % resolved.multiple for length in (cols, n, size // cols))


def can_fuse_activation(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """`linear` may be handed a source instead of x: it is one call, which neither multiplies nor
    keeps x itself."""
    return (
        not torch_compat.dispatch_is_watched()
        and plan.saves != "input"
        and plan.input.side(ROWWISE).fmt.is_quantized
        and _is_one_call(plan.resolved(x.dtype, x.device), x, weight.shape[0], bias)
    )


def _compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: LinearCall,
    resolved: Resolved,
    operands: _Operands,
    handed: Handed,
) -> Tensor:
    """y with its autograd node, in one call."""
    key, codes = None, None
    if resolved.shared is not None:  # codes of one history serve its layers alone
        key = (resolved.shared, call.save, bool(call.histories), *map(id, call.factors))
        codes = handed.codes.get(key)
    # x is freed before codes of the weight are made
    if codes is None and handed.source is not None:
        codes = native.linear_gated(
            *handed.source,
            resolved.call,
            call.save,
            call.step,
            call.ids,
            call.guard,
            call.factors,
            call.histories,
        )
    y, *made = native.linear_step(
        x,
        weight,
        bias,
        operands.values,
        operands.rowwise,
        operands.columnwise,
        resolved.call,
        operands.round_to_bf16,
        call.save,
        call.step,
        call.ids,
        call.guard,
        call.factors,
        call.grad_factors,
        operands.factors,
        call.histories,
        call.grad_histories,
        operands.histories,
        codes or [],
        handed.amaxes,
        handed.grad_amaxes,
    )
    if key is not None and codes is None:
        handed.codes[key] = made
    return y


# The definition #


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, backward: bool
) -> tuple[Tensor, list[Tensor], EncodedMatrix | None]:
    """(y, what the backward keeps of x, the codes of w that it reads) without autograd.

    backward:  dgrad follows. A gathered weight's codes are not kept: they are filled again.
    """
    plan, x2 = call.plan, x.reshape(-1, x.shape[-1])
    refuse_codes(x, plan, call.save)
    resolved = plan.resolved(x.dtype, x.device)
    saved = resolved.saved if call.save and plan.saves != "input" else None
    made, amaxes = call.quantize(
        "input", x2, [ROWWISE, *([COLUMNWISE] if saved is COLUMNWISE else [])]
    )
    both = backward and not isinstance(weight, QuantizedTensor)
    w = weight_storages(
        weight, [ROWWISE, *([COLUMNWISE] if both else [])], plan, call.state, x.dtype, call.records
    )
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    gemm(
        made[ROWWISE],
        w[ROWWISE],
        out=y.view(-1, y.shape[-1]),
        bias=bias,
        domain=resolved.domains[0],
        watch=call.watch(resolved, 0),
    )
    record(call.histories, amaxes)  # nothing can be refused any more
    return y, [] if saved is None else buffers_of(made[saved]), w.get(COLUMNWISE)


def multiply_backward(
    dy: Tensor,
    weight: Tensor,
    columnwise: EncodedMatrix | None,
    saved: list[Tensor],
    call: LinearCall,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db; None where `needs` (of x, weight, bias) says so.

    columnwise:  codes of the weight; None: it is gathered.
    """
    plan, dy2 = call.plan, dy.reshape(-1, dy.shape[-1])
    (need_x, need_w, need_b), k = needs, weight.shape[1]
    dx = dw = None
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    resolved = plan.resolved(dy.dtype, dy.device)
    db = bias_gradient(plan, dy2, directions) if need_b else None
    made, amaxes = call.quantize("grad_output", dy2, directions) if directions else ({}, [])
    if need_x:
        w = (
            columnwise
            or weight_storages(weight, [COLUMNWISE], plan, call.state, dy.dtype)[COLUMNWISE]
        )
        dx = dy.new_empty(*dy.shape[:-1], k)
        gemm(
            made[ROWWISE],
            w,
            out=dx.view(-1, k),
            domain=resolved.domains[1],
            watch=call.watch(resolved, 1),
        )
    if need_w:
        x = saved_columnwise(plan, saved, (dy2.shape[0], k), dy, call.step, call.ids, call.factors)
        dw = gemm(
            made[COLUMNWISE],
            x,
            out_dtype=dy.dtype,
            domain=resolved.domains[2],
            watch=call.watch(resolved, 2),
        )
    record(call.grad_histories, amaxes)
    return dx, dw, db


class _Kept:
    """What the definition's forward leaves for its backward (an object, which torch.func passes on
    as it is).

    saved: of x. columnwise: codes of the weight; None: it is gathered.
    """

    saved: list[Tensor]
    columnwise: EncodedMatrix | None


class Definition(torch.autograd.Function):
    """The operator in Python: what the compiled call and traced graphs are compared with, and what
    they do not take."""

    @staticmethod
    def forward(x, weight, bias, call, backward, kept):
        """backward: dgrad follows. kept: `_Kept`, which is set."""
        with torch.autocast(x.device.type, enabled=False):
            y, kept.saved, kept.columnwise = multiply(x, weight, bias, call, backward)
        return y

    @staticmethod
    def setup_context(ctx, inputs, y):
        x, weight, bias, call, _, kept = inputs
        columnwise = kept.columnwise
        ctx.weight, ctx.call, ctx.bias_dtype = weight, call, None if bias is None else bias.dtype
        ctx.layout = None if columnwise is None else columnwise.layout
        saved = [x] if call.save and call.plan.saves == "input" else kept.saved
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *([] if columnwise is None else buffers_of(columnwise)))

    @staticmethod
    def backward(ctx, dy):
        run = _Gradients.apply if torch.is_grad_enabled() else _Gradients.forward
        rest = (
            ctx.weight,
            ctx.call,
            ctx.layout,
            ctx.count,
            ctx.bias_dtype,
            tuple(ctx.needs_input_grad[:3]),
        )
        return *run(dy, *rest, *ctx.saved_tensors), None, None, None


class _Gradients(torch.autograd.Function):
    """dx, dw and db of the definition; an operator of its own under create_graph and torch.func,
    without a derivative."""

    @staticmethod
    def forward(dy, weight, call, layout, count, bias_dtype, needs, *tensors):
        columnwise = None
        if layout is not None:
            fmt = call.plan.operand("weight", COLUMNWISE)
            columnwise = matrix_over(
                tensors[count:], fmt, COLUMNWISE, tuple(weight.shape), dy.dtype, layout
            )
        with torch.autocast(dy.device.type, enabled=False):
            dx, dw, db = multiply_backward(
                dy, weight, columnwise, list(tensors[:count]), call, needs
            )
        return (
            dx,
            None if dw is None else dw.to(weight.dtype),
            None if db is None else db.to(bias_dtype),
        )

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        pass

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative(ctx)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, handed: Handed | None = None
) -> Tensor:
    """y = x w^T + b, in one compiled call where it takes the operands.

    The backward of a quantized parameter raises StaleWeightError where it was written since: its
    codes are written in place.
    """
    backward = torch.is_grad_enabled() and x.requires_grad
    y = _product(x, weight, bias, call, backward, handed or Handed())
    if isinstance(weight, QuantizedWeight) and backward and y.grad_fn is not None:
        y.grad_fn.register_prehook(_RefuseWritten(weight))
    return y


class _RefuseWritten:
    """A hook of the node that will read the codes of a quantized parameter: they must be those of
    the forward."""

    def __init__(self, weight: QuantizedWeight):
        self._weight, self._version = weight, weight.version

    def __call__(self, grads) -> None:
        if self._weight.version != self._version:
            raise StaleWeightError(
                f"{self._weight.state.name}, a quantized parameter, was written between the "
                "forward and the backward, so its codes are others than those that the forward "
                "multiplied; step the optimizer after the backward"
            )


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, backward: bool, handed: Handed
) -> Tensor:
    """`linear`; backward: dgrad may follow."""
    resolved = call.plan.resolved(x.dtype, x.device)
    if not torch_compat.dispatch_is_watched() and _is_one_call(resolved, x, weight.shape[0], bias):
        operands = _operands(weight, call, resolved, x.dtype, backward)
        if operands is not None:
            return _compiled(x, weight, bias, call, resolved, operands, handed)
    if handed.source is not None:
        raise ValueError(
            "the input of this layer was not made, as one call was to make it; see takes_source"
        )
    return Definition.apply(x, weight, bias, call, backward, _Kept())


def refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the "
        "layers of a gradient penalty out of fq.convert"
    )

# SPDX-License-Identifier: Apache-2.0
"""`linear`: y = x w^T + b of a linear layer that no ranks share, by one of its executors.

Three give the same bytes: the definition (`linear_definition`, which says the equations), one
compiled call per pass (`native.linear_step`), and the functional operators of a traced graph
(`traced_linear`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops import native
from ..tensor import code_check, torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.weight_state import values_of
from .linear_definition import defined_linear
from .linear_products import LinearCall
from .operands import (
    _state_of,
    buffers_of,
    codes_of_transposed,
    gathered_storage,
    lies_transposed,
    record_activations,
    weight_storages,
)
from .plan import PRODUCTS, GemmPlan, Resolved


class GatedInput(NamedTuple):
    """The parts of an input act(gate) * up; kind: `ops.norm.KINDS`."""

    gate: Tensor
    up: Tensor
    kind: int


@dataclass(eq=False)
class Handed:
    """What the module that computed an input hands over with it, until its forward ends.

    amaxes:  fp32, as the kernel that wrote x left them (`native.amaxes_like`); None: not known.
    grad_amaxes:  where the node of the gradient of y writes its amaxes.
    source:  where x has a shape and an autograd node, but no values; see `can_fuse_activation`.
    codes:   key -> codes of x, which the first layer that multiplies it leaves for the others.
    """

    amaxes: Tensor | None = None
    source: GatedInput | None = None
    codes: dict[tuple, list[Tensor]] = field(default_factory=dict)
    grad_amaxes: Tensor | None = None


class HandedByInput:
    """`Handed` of a tensor that several layers of one module read, during its forward."""

    def __init__(self):
        self._x: Tensor | None = None
        self._version, self._handed = 0, Handed()

    def of(self, x: Tensor) -> Handed:
        version = 0 if x.is_inference() else x._version
        if self._x is not x or self._version != version:
            self._x, self._version, self._handed = x, version, Handed()
        return self._handed


# One compiled call per pass #


class _Operands(NamedTuple):
    """A weight as the compiled call accepts it.

    values:      to be quantized inside; else `rowwise` and `columnwise` are buffers of codes.
    factors, histories: of the delayed sides of `values`.
    """

    values: Tensor | None
    rowwise: Sequence[Tensor] = ()
    columnwise: Sequence[Tensor] = ()
    round_to_bf16: bool = False
    factors: Sequence[Tensor] = ()
    histories: Sequence[Tensor] = ()


def _operands(
    weight: Tensor, call: LinearCall, resolved: Resolved, dtype: torch.dtype, backward: bool
) -> _Operands | None:
    """None where the compiled call cannot be handed what the backward reads.

    backward:  dgrad follows.
    """
    plan = call.plan
    if isinstance(weight, QuantizedTensor):
        layouts = resolved.layouts["weight"]
        record_activations(weight, dtype)
        rowwise = gathered_storage(weight, ROWWISE, plan, layouts[ROWWISE])
        columnwise = _columnwise_buffers(weight, plan, layouts[COLUMNWISE]) if backward else []
        if columnwise is None:
            return None
        return _Operands(None, buffers_of(rowwise), columnwise)
    values = values_of(weight).detach()
    state = _state_of(call.state, plan, values)
    is_cast = values.dtype is not dtype and not all(
        plan.weight.side(d).fmt.is_quantized for d in Direction
    )
    if state.spans_parts or state.held is not None or code_check.checking or is_cast:
        wanted = [ROWWISE, *([COLUMNWISE] if backward else [])]
        codes = weight_storages(weight, wanted, plan, call.state, dtype, call.records)
        columnwise = buffers_of(codes[COLUMNWISE]) if backward else ()
        return _Operands(None, buffers_of(codes[ROWWISE]), columnwise)
    seen = plan.compute_dtype or values.dtype
    round_to_bf16 = values.dtype is torch.float32 and seen is torch.bfloat16
    seen_values = values if round_to_bf16 else values.to(seen)
    delayed = plan.weight.delayed_directions
    found = (state.delayed_history(d, values.device, plan.weight) for d in delayed)
    histories = [history for history in found if history is not None]
    read = (ROWWISE, COLUMNWISE) if backward else (ROWWISE,)
    coded = [d for d in read if plan.operand("weight", d).is_quantized]
    for d in coded:
        if d in plan.weight.encodings:
            counters.add("weight encode", (state.name, d.value))
    transposed = plan.turned(dtype, values.device) if coded and lies_transposed(values) else None
    if transposed is not None:
        codes = codes_of_transposed(seen_values, transposed, coded, round_to_bf16)
        columnwise = codes.get(COLUMNWISE, [values]) if backward else ()
        return _Operands(None, codes.get(ROWWISE, [values]), columnwise)
    return _Operands(
        seen_values,
        round_to_bf16=round_to_bf16,
        factors=[h.encode_scale for h in histories],
        histories=[h.amaxes for h in histories] if call.records else [],
    )


def _columnwise_buffers(
    weight: QuantizedTensor, plan: GemmPlan, layout: str
) -> list[Tensor] | None:
    """The buffers from which dgrad reads codes; FSDP2 may free and fill them until then."""
    slots = weight._pair
    kept = slots.operands.get((COLUMNWISE, layout)) or slots.columnwise
    if kept is not None and (kept.layout == layout or not kept.fmt.is_quantized):
        return buffers_of(kept)
    if kept is None or kept.is_freed:
        return None
    return buffers_of(gathered_storage(weight, COLUMNWISE, plan, layout))


def _lacks_columnwise(weight: Tensor, plan: GemmPlan, x: Tensor) -> bool:
    """The gather that the backward reads has no memory for the codes as it reads them: a GEMM moved
    since the weight was gathered."""
    if not isinstance(weight, QuantizedTensor) or not torch.is_grad_enabled():
        return False
    layout = plan.resolved(x.dtype, x.device).layouts["weight"][COLUMNWISE]
    return _columnwise_buffers(weight, plan, layout) is None


def _is_one_call(resolved: Resolved, x: Tensor, n: int, bias: Tensor | None = None) -> bool:
    """The compiled call accepts x [.., cols] and the other operand's n rows as they are."""
    if resolved.call is None or type(x) not in (Tensor, Parameter):
        return False
    if bias is not None and bias.dtype is not x.dtype:
        return False
    size, cols = x.numel(), x.shape[-1]
    return size != 0 and not any(length % resolved.multiple for length in (cols, n, size // cols))


def can_fuse_activation(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """`linear` accepts a source instead of x: one call, which neither multiplies nor keeps x."""
    return (
        not torch_compat.dispatch_is_watched()
        and plan.saves != "input"
        and plan.input.side(ROWWISE).fmt.is_quantized
        and not _lacks_columnwise(weight, plan, x)
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
    # x is freed before codes of the weight are allocated
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
    y, *kept = native.linear_step(
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
        handed.codes[key] = kept
    return y


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, handed: Handed | None = None
) -> Tensor:
    """y = x w^T + b, in one compiled call where it accepts the operands.

    The backward raises StaleWeightError if a quantized parameter was written since.
    """
    handed, backward = handed or Handed(), torch.is_grad_enabled() and x.requires_grad
    resolved, operands = call.plan.resolved(x.dtype, x.device), None
    if not torch_compat.dispatch_is_watched() and _is_one_call(resolved, x, weight.shape[0], bias):
        operands = _operands(weight, call, resolved, x.dtype, backward)
    if operands is not None:
        y = _compiled(x, weight, bias, call, resolved, operands, handed)
    elif handed.source is not None:
        raise ValueError(
            "the input of this layer has no values, and no compiled call computes them; see "
            "can_fuse_activation"
        )
    elif _is_torchs(x, weight, bias, call.plan):
        y = _torchs_linear(x, weight, bias, call.plan, resolved)
    else:
        y = defined_linear(x, weight, bias, call, backward)
    if isinstance(weight, QuantizedWeight) and backward and y.grad_fn is not None:
        y.grad_fn.register_prehook(functools.partial(_refuse_written, weight, weight.version))
    return y


def _is_torchs(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """Nothing is quantized, and operands have strides on which the rounding of torch's linear
    depends: it flattens contiguous ones alone, as the definition does all."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    if all(t.is_contiguous() for t in tensors):
        return False
    if any(plan.operand(*side).is_quantized for p in PRODUCTS for side in (p.a, p.b)):
        return False
    return all(
        not isinstance(t, (QuantizedTensor, FSDPHooks)) and t.dtype is x.dtype for t in tensors
    )


def _torchs_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, resolved: Resolved
) -> Tensor:
    """torch's linear, whose products are counted as those of the definition."""

    def count(*products: int) -> None:
        for product in products:
            pair = map(repr, plan.pair(PRODUCTS[product]))
            counters.add("gemm", (resolved.domains[product], *pair))

    y = torch.nn.functional.linear(x, weight, bias)
    count(0)
    if y.requires_grad:
        needed = [i for i, t in ((1, x), (2, weight)) if t.requires_grad]
        y.register_hook(lambda dy: count(*needed))
    return y


def _refuse_written(weight: QuantizedWeight, version: object, grads: object) -> None:
    """Refuse a backward that would read other codes than those of the forward."""
    if weight.version != version:
        raise StaleWeightError(
            f"{weight.state.name}, a quantized parameter, was written between the forward and the "
            "backward, so its codes are others than those that the forward multiplied; step the "
            "optimizer after the backward"
        )

# SPDX-License-Identifier: Apache-2.0
"""One compiled call per pass (`native.linear_step`), with the bytes of the program, for a layer
that no ranks share, or whose ranks exchange codes and sums alone (`Call.ranks`)."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops import native
from ..ops.layout import COMPACT
from ..ops.native import RecordedLaunch, WeightOperand
from ..ops.reference import known
from ..storage import Storage, to_gemm_operands, to_storage
from ..tensor import code_check, torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.storage_pair import StoragePair
from ..tensor.weight_state import values_of
from . import program
from .call import Call
from .operands import (
    buffers_of,
    codes_of_transposed,
    gathered_storage,
    lies_transposed,
    record_activations,
)
from .plan import PRODUCTS, GemmPlan, Resolved
from .shared_input import Handed, reader_of, shared_input
from .weight_gradient import AddsTo, WeightGradient


class LateCodes:
    """The columnwise operand of a frozen weight, whose memory holds codes only during a backward.

    operand:   of `source`, compact codes, in a layout.
    can_fill:  its launches can be replayed.
    """

    def __init__(self, source: Storage, layout: str):
        self.source, self._launches = source, list[RecordedLaunch]()
        (self.operand,) = to_gemm_operands([(source, layout)], self._launches)
        written = [t.data_ptr() for launch in self._launches for t in launch.out]
        self.can_fill = self.operand.data.data_ptr() in written
        self.free()

    def serve(self, y: Tensor) -> None:
        """Fill the memory before the node of y runs, and free it behind it."""
        node = known(y.grad_fn, "the node of y")
        node.register_prehook(self.fill)
        node.register_hook(self.free)

    def fill(self, *gradients: object) -> None:
        torch_compat.alloc_storage(self.operand.data)
        for launch in self._launches:
            launch()

    def free(self, *gradients: object) -> None:
        torch_compat.free_storage(self.operand.data)


_LATE: weakref.WeakKeyDictionary[StoragePair, dict[str, LateCodes]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _late_codes(weight: Tensor, plan: GemmPlan, resolved: Resolved) -> LateCodes | None:
    """Return the columnwise operand of a weight whose compact codes `fq.freeze` kept, if its GEMM
    reads them in another layout; None for others."""
    layout = resolved.layouts["weight"][COLUMNWISE]
    is_coded = plan.operand("weight", COLUMNWISE).is_quantized and resolved.call is not None
    if type(weight) is not QuantizedTensor or not weight.is_frozen:
        return None
    pair = weight._pair
    frozen = pair.rowwise if pair.columnwise is None else pair.columnwise
    if frozen is None or frozen.layout != COMPACT or layout == COMPACT or not is_coded:
        return None
    late = _LATE.setdefault(pair, {}).get(layout)
    if late is None or late.source.data is not frozen.data:
        source = to_storage(gathered_storage(weight, COLUMNWISE, plan, COMPACT))
        late = _LATE[pair][layout] = LateCodes(source, layout)
    return late if late.can_fill else None


def _weight_operand(
    weight: Tensor,
    call: Call,
    resolved: Resolved,
    dtype: torch.dtype,
    dgrad: bool,
    late: LateCodes | None,
) -> WeightOperand | None:
    """Return None if the compiled call cannot be handed what the backward reads.

    dgrad:  the backward computes dx. late: what it reads of the weight.
    """
    plan = call.plan
    directions = [ROWWISE, *([COLUMNWISE] if dgrad else [])]
    if isinstance(weight, QuantizedTensor):
        record_activations(weight, dtype)
        layouts = resolved.layouts["weight"]
        read = _columnwise_buffers(weight, plan, layouts[COLUMNWISE], late) if dgrad else []
        if read is None:
            return None
        rowwise = gathered_storage(weight, ROWWISE, plan, layouts[ROWWISE])
        return WeightOperand(None, False, buffers_of(rowwise), read)
    values, state = values_of(weight).detach(), call.state
    is_shared, formats = call.weight_group is not None, [plan.weight.side(d).fmt for d in Direction]
    is_cast = values.dtype is not dtype and not all(fmt.is_quantized for fmt in formats)
    is_held = state is not None and state.held is not None
    is_outside_step = is_held or code_check.checking or is_cast or plan.weight.turns
    if is_shared and (is_outside_step or any(fmt.tensor_scale for fmt in formats)):
        return None  # ranks would share its amax before that of x, and the program shares it after
    if is_outside_step:
        codes = call.weight_operands(weight, directions, dtype, {})
        columnwise = buffers_of(codes[COLUMNWISE]) if dgrad else []
        return WeightOperand(None, False, buffers_of(codes[ROWWISE]), columnwise)
    compute_dtype = plan.compute_dtype or values.dtype
    round_to_bf16 = values.dtype is torch.float32 and compute_dtype is torch.bfloat16
    quantized_values = values if round_to_bf16 else values.to(compute_dtype)
    coded = [d for d in directions if plan.operand("weight", d).is_quantized]
    for d in coded:
        if d in plan.weight.encodings:
            counters.add("weight encode", ("weight" if state is None else state.name, d.value))
    is_turned = bool(coded) and not is_shared and lies_transposed(values)
    transposed = plan.turned(dtype, values.device) if is_turned else None
    if transposed is None:
        return WeightOperand(quantized_values, round_to_bf16)
    codes = codes_of_transposed(quantized_values, transposed, coded, round_to_bf16)
    columnwise = codes.get(COLUMNWISE, [values]) if dgrad else ()
    return WeightOperand(None, False, codes.get(ROWWISE, [values]), columnwise)


def _columnwise_buffers(
    weight: QuantizedTensor, plan: GemmPlan, layout: str, late: LateCodes | None
) -> list[Tensor] | None:
    """The buffers from which dgrad reads codes; FSDP2, or `late`, may free and fill them until
    then."""
    if late is not None:
        return buffers_of(late.operand)
    pair = weight._pair
    stored = pair.operands.get((COLUMNWISE, layout)) or pair.columnwise
    if stored is not None and (stored.layout == layout or not stored.fmt.is_quantized):
        return buffers_of(stored)
    is_shared = stored is None and layout == COMPACT and plan.weight.shares_storage
    if not is_shared and (stored is None or stored.is_freed):
        return None
    return buffers_of(gathered_storage(weight, COLUMNWISE, plan, layout))


def _is_one_call(resolved: Resolved, x: Tensor, n: int, bias: Tensor | None = None) -> bool:
    """The compiled call accepts x [.., cols] and the other operand's n rows as they are."""
    has_type = type(x) in (Tensor, Parameter) and (bias is None or bias.dtype is x.dtype)
    if resolved.call is None or not has_type:
        return False
    size, cols = x.numel(), x.shape[-1]
    return size != 0 and not any(length % resolved.multiple for length in (cols, n, size // cols))


def can_fuse_activation(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """`linear` accepts a source instead of x: one call, which neither multiplies nor keeps x."""
    resolved = plan.resolved(x.dtype, x.device)
    if isinstance(weight, QuantizedTensor) and torch.is_grad_enabled():
        layout, late = resolved.layouts["weight"][COLUMNWISE], _late_codes(weight, plan, resolved)
        if _columnwise_buffers(weight, plan, layout, late) is None:
            return False  # a GEMM moved since the weight was gathered: no memory for such codes
    return (
        not torch_compat.dispatch_is_watched()
        and not plan.batch_invariant
        and plan.saves != "input"
        and plan.input.side(ROWWISE).fmt.is_quantized
        and _is_one_call(resolved, x, weight.shape[0], bias)
    )


def _compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    resolved: Resolved,
    operand: WeightOperand,
    handed: Handed,
    adds_to: AddsTo | None,
) -> Tensor:
    """Return y with its autograd node, in one call."""
    key = codes = reader = None
    step, layouts = known(resolved.call, "the compiled step"), resolved.layouts["input"]
    if handed.shares_input(call):
        shared = known(shared_input(x, handed.owner, call), "the shared input")
        codes = [*buffers_of(shared.operands.take(ROWWISE, layouts[ROWWISE])), *shared.saved]
        x, reader = shared.x, reader_of(shared, layouts[COLUMNWISE], call)
        call = call._replace(ranks=(*call.ranks[:-1], id(reader)))
    elif resolved.shared is not None:  # codes of one history serve its layers alone
        key = (resolved.shared, call.save, bool(call.histories[0]), *map(id, call.factors[0]))
        codes = handed.codes.get(key)
    # x is freed before codes of the weight are allocated
    if codes is None and handed.source is not None:
        codes = native.linear_gated(handed.source, step, call)
    adds = (None, 0) if adds_to is None else adds_to[:2]
    state = codes or [], adds, handed.amaxes, handed.grad_amaxes
    y, *input_codes = native.linear_step(x, weight, bias, operand, step, call, *state)
    if key is not None and codes is None:
        handed.codes[key] = input_codes
    if reader is not None and y.grad_fn is not None:
        y.grad_fn.metadata["shared input"] = reader  # pyright: ignore[reportIndexIssue]
    return y


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, handed: Handed | None = None
) -> Tensor:
    """Return y = x w^T + b, in one compiled call where it accepts the operands.

    The backward raises StaleWeightError if a quantized parameter was written since.
    """
    handed, dgrad = handed or Handed(), torch.is_grad_enabled() and x.requires_grad
    plan, operand, late = call.plan, None, None
    resolved = plan.resolved(x.dtype, x.device)
    adds_to, in_any_order = None, not plan.batch_invariant
    if isinstance(call.wgrad, WeightGradient) and can_add(plan, resolved, 2):
        adds_to = call.wgrad.in_step()  # where the compiled call adds dw itself
    takes_wgrad = call.wgrad is None or adds_to is not None
    can_step = in_any_order and takes_wgrad and not torch_compat.dispatch_is_watched()
    if can_step and _is_one_call(resolved, x, weight.shape[0], bias):
        late = _late_codes(weight, plan, resolved) if dgrad else None
        operand = _weight_operand(weight, call, resolved, x.dtype, dgrad, late)
    if operand is not None:
        y = _compiled(x, weight, bias, call, resolved, operand, handed, adds_to)
        if late is not None:
            late.serve(y)
        if adds_to is not None and y.grad_fn is not None:
            y.grad_fn.register_prehook(adds_to.before)
            y.grad_fn.register_hook(adds_to.behind)
    elif handed.source is not None:
        raise ValueError(
            "the input of this layer has no values, and no compiled call computes them; see "
            "can_fuse_activation"
        )
    elif in_any_order and call.wgrad is call.axis is None and _is_torchs(x, weight, bias, plan):
        y = _torchs_linear(x, weight, bias, plan, resolved)
    else:
        y = program.linear(x, weight, bias, call, handed.owner)
    return with_write_check(y, weight, dgrad)


def with_write_check(y: Tensor, weight: Tensor, dgrad: bool) -> Tensor:
    """Return y, whose backward refuses codes of a quantized parameter that was written since."""
    if isinstance(weight, QuantizedWeight) and dgrad and y.grad_fn is not None:
        y.grad_fn.register_prehook(functools.partial(_refuse_written, weight, weight.version))
    return y


def can_add(plan: GemmPlan, resolved: Resolved, product: int) -> bool:
    """A compiled step adds this product to a tensor that exists: it is one of codes."""
    of_codes = all(fmt.is_quantized for fmt in plan.pair(PRODUCTS[product]))
    return of_codes and resolved.domains[product] in ("native", "anchored")


def _is_torchs(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> bool:
    """Nothing is quantized, and operands have strides on which the rounding of torch's linear
    depends: it flattens contiguous ones alone, as the program does all."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    is_coded = any(fmt.is_quantized for p in PRODUCTS for fmt in plan.pair(p))
    if is_coded or all(t.is_contiguous() for t in tensors):
        return False
    return all(type(t) in (Tensor, Parameter) and t.dtype is x.dtype for t in tensors)


def _torchs_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, resolved: Resolved
) -> Tensor:
    """torch's linear, whose products are counted as those of the program."""

    def count(*products: int) -> None:
        for i in products:
            counters.add("gemm", (resolved.domains[i], *map(repr, plan.pair(PRODUCTS[i]))))

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
            "backward, so the backward would read different codes than the forward did; step the "
            "optimizer after the backward"
        )

# SPDX-License-Identifier: Apache-2.0
"""Experts in compiled graphs: two operators, into which no compiler looks, run `GroupedCall`; on a
GPU one native call each (csrc/step/grouped.cpp), which quantizes values of packed weights besides.

So graphs have the bits of eager mode. State comes in as tensors. Guards are written, which schemas
do not say, since operators that return lists are not functionalized; amaxes are results, which
functional operators of the graph record. The backward quantizes values of weights again, which no
one writes until then; of weights that `fully_shard` gathers both passes read what it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..counters import counters
from ..encoded_matrix import has_tensor_amax
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import dispatch, native, opaque
from ..ops.capability import arch_of
from ..ops.layout import COMPACT
from ..ops.reference import known
from ..roles import QUANTIZED_TYPES as SLOTS
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from .call import NOTHING, Call
from .grouped import GroupedCall, reads_routes, unsupported_reason
from .grouped_autograd import run_experts
from .operands import check_codes
from .plan import GemmPlan, plan_of
from .program import by_slot, check_histories
from .routes import Around, Routes, tokens_of
from .routes import dispatch as dispatch_tokens
from .stacked_weights import (
    Coding,
    StackedWeight,
    are_read_together,
    gathered_codes,
    read_as,
    stack_of_codes,
    weight_of_codes,
)


class _Spec(NamedTuple):
    """Integers of a call, as operators accept them.

    experts, n, k:  shape of the weights.
    in_one:         a grouped GEMM computes the plan.
    transposed:     a packed weight is stored [E, K, N].
    is_gathered:    a packed weight is codes.
    save:           the backward needs x.
    step, of_weight, rounds, turns:  of native calls: number of the compiled step, `Coding` of the
                    weights, and `GemmPlan.turns_wgrad`; -1: Python functions run.
    """

    experts: int
    n: int
    k: int
    in_one: int
    transposed: int
    is_gathered: int
    save: int
    step: int = -1
    of_weight: int = -1
    rounds: int = 0
    turns: int = 0

    def with_step(self, plan: GemmPlan, dtype: torch.dtype, weight: Tensor) -> _Spec:
        """Return this of a weight that a native call reads as it is stored: values, or gathered
        codes."""
        if plan.weight.turns:  # it reads each direction's own codes
            return self
        resolved, of_weight = plan.resolved(dtype, weight.device), (-1, 0)
        if self.is_gathered:
            is_read = all(are_read_together(plan, d) for d in Direction)
            is_read &= COMPACT not in resolved.layouts["weight"].values()
        else:
            stored, transposed = weight.dtype, bool(self.transposed)
            coding = Coding.of(plan, dtype, stored, weight.device, transposed)
            of_weight = coding.call, int(coding.rounds)
            formats = [plan.operand("weight", d) for d in Direction]
            is_read = coding.dtype is stored and coding.is_turned is transposed
            is_read &= stored is dtype or all(
                f.is_quantized and not f.tensor_scale for f in formats
            )
        if not is_read:
            return self
        step = known(resolved.call, "the compiled step")
        return _Spec(*self[:7], step, *of_weight, int(plan.turns_wgrad))

    def weights(
        self,
        tensors: Sequence[Tensor],
        direction: Direction,
        plan: GemmPlan,
        dtype: torch.dtype,
        multiplied: bool = True,
    ) -> tuple[Sequence[Tensor], StackedWeight | None]:
        """Return weights [E, N, K], or one [N, K] per expert, of what an operator was given; and
        their operand, if they are `multiplied` and are codes that are converted together."""
        if not self.is_gathered:
            return [t.mT for t in tensors] if self.transposed else tensors, None
        codes = tensors, direction, (self.experts, self.n, self.k)
        together = multiplied and self.in_one and are_read_together(plan, direction)
        stack = stack_of_codes(*codes, plan, dtype) if together else None
        return (tensors, stack) if stack else ([weight_of_codes(*codes, plan, dtype)], None)


class TracedCall(NamedTuple):
    """`GroupedCall` in a graph that is traced: its passes are the operators below.

    plan:        of one product for all experts, or of each expert.
    records:     amaxes are recorded.
    step, ids:   of random bits: int64 [5], and [3] per expert; None and []: not read.
    guards:      [guard, backward_guard] of `Call`; []: products are not watched.
    factors, histories:  of the delayed sides of input, weight and grad_output, of all experts each.
    tokens:      as of `GroupedCall`.
    """

    plan: GemmPlan
    spec: _Spec
    records: bool
    step: Tensor | None
    ids: list[Tensor]
    guards: list[Tensor]
    factors: list[Tensor]
    histories: list[Tensor]
    tokens: Tensor | None

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        keeps_weight: bool,
        shares: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], None]:
        """`GroupedCall.forward`, which keeps no weight."""
        written = [t for t in (self.step, *self.factors) if t is not None]
        gathered = weights if self.spec.is_gathered else ()
        read = [*written, *self.ids, *self.histories, *self.guards, *gathered]
        torch_compat.save_inputs(read, written, self.plan.weight if gathered else None)
        operands, biases = self._operands(weights, ROWWISE), list(biases)
        state = self.plan.key, self.spec, self.guards[:1], self.step, self.ids, self.factors
        y, *saved = _experts(x, self.tokens, ends, operands, biases, shares, *state)
        self._record(saved, ("input", "weight"))
        saved = saved if self.spec.in_one else [ends]
        if self.spec.save and (self.plan.saves == "input" or not self.spec.in_one):
            saved.append(x)
        return y, saved, None

    def backward(
        self,
        dy: Tensor,
        saved: Sequence[Tensor],
        weights: Sequence[Tensor],
        weight: None,
        needs: tuple[bool, bool, bool],
        tokens: Tensor | None = None,
        swiglu: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        with torch_compat.keep_in_backward():  # FSDP2 fills gathered codes then
            operands = self._operands(weights, COLUMNWISE)
        of_call = self.plan.key, self.spec, list(needs)
        state = *of_call, self.guards[1:], self.step, self.ids, self.factors
        results = _experts_backward(dy, tokens, list(saved), operands, list(swiglu), *state)
        self._record(results, ("grad_output",))
        gradients = iter(results)
        dx, dw, db = (next(gradients) if need else None for need in needs)
        return dx, dw, db

    def _operands(self, weights: Sequence[Any], direction: Direction) -> list[Tensor]:
        """Return what operators are given of the weights."""
        return gathered_codes(weights[0], direction) if self.spec.is_gathered else list(weights)

    def _record(self, results: list[Tensor], slots: Sequence[str]) -> None:
        """Record the amaxes that an operator returned, and remove them from its results."""
        if not self.factors:
            return
        tensors = self.histories, results.pop().unbind()
        of_slots = (by_slot(self.plan, of, self.spec.experts) for of in tensors)
        for slot, histories, amaxes in zip(SLOTS, *of_slots):
            if slot in slots and self.records:
                for history, amax in zip(histories, amaxes):
                    dispatch.record_amax_by_torch(history, amax)


@torch.compiler.allow_in_graph
def traced_experts(
    x: Tensor,
    ends: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    plan: str,
    require_native: bool,
    transposed: bool,
    save: bool,
    records: bool,
    step: Tensor | None,
    ids: list[Tensor],
    guards: list[Tensor],
    factors: list[Tensor],
    histories: list[Tensor],
    routes: Routes = (),
    *around: Any,
) -> Any:
    """Return y [M, N] of x [M, K] in a graph that is traced; arguments as of `TracedCall`.

    ends:            the row after the last of each expert.
    weights, biases: one of all experts, or one each. A weight of all may be gathered codes.
    plan:            key of the plan of all experts.
    require_native:  no product of decoded codes.
    transposed:      a packed weight is stored [E, K, N].
    routes:          of x [T, K] (linear/routes.py).
    around:          fields of `routes.Around`.
    """
    counters.has_graphs = True
    first, of_expert = weights[0], plan_of(plan)
    of_groups = of_expert.of_groups
    is_gathered = isinstance(first, QuantizedTensor)
    shape = (first.mT if transposed else first).shape
    shape = [len(weights), *shape] if first.dim() == 2 else shape
    if is_gathered:
        of_first: Any = first.unbind()[0]
        check_codes(of_first, of_expert)
    check_histories(of_expert, factors, shape[0])
    reason = unsupported_reason(of_groups, x.dtype, x.device, shape, bool(biases))
    decodes = of_groups.decodes_groups(arch_of(x.device))
    in_one = reason is None and x.shape[0] > 0 and not (require_native and decodes)
    if routes and not (in_one and reads_routes(of_groups, x)):
        x, routes = dispatch_tokens(x, *routes), ()
    of_one = of_groups if in_one else None
    plan_of_call = of_one or of_expert
    guards = guards if plan_of_call.resolved(x.dtype, x.device).is_watched else []
    spec = _Spec(*shape, *map(int, (in_one, transposed, is_gathered, save)))
    if in_one and first.dim() == 3 and not decodes:
        spec = spec.with_step(of_groups, x.dtype, first)
    tokens = tokens_of(*routes) if routes else None
    call = TracedCall(plan_of_call, spec, records, step, ids, guards, factors, histories, tokens)
    return run_experts(call, of_one, x, ends, weights, biases, routes, Around(*around))


# The operators #


def _call_of(
    x: Tensor,
    plan: GemmPlan,
    spec: _Spec,
    guards: Sequence[Tensor],
    step: Tensor | None,
    ids: Sequence[Tensor],
    factors: Sequence[Tensor],
    tokens: Tensor | None = None,
) -> tuple[GroupedCall, list[Tensor]]:
    """Return the call, and the result that it writes: amaxes [histories, 1], if there are any."""
    written, guard, scales, amaxes = [], guards[0] if guards else None, NOTHING, NOTHING
    if factors:
        written.append(x.new_zeros((len(factors), 1), dtype=torch.float32))
        scales = by_slot(plan, factors, spec.experts)
        amaxes = by_slot(plan, written[0].unbind(), spec.experts)
    call = Call(plan, bool(spec.save), step, None, None, guard, guard, scales, amaxes)
    return GroupedCall(call, ids, (), spec.experts, bool(spec.in_one), 0, tokens), written


def _run_forward(x, tokens, ends, weights, biases, shares, plan, spec, guards, step, ids, factors):
    plan, spec = plan_of(plan), _Spec(*spec)
    call, written = _call_of(x, plan, spec, guards, step, ids, factors, tokens)
    weights, weight = spec.weights(weights, ROWWISE, plan, x.dtype)
    call = call._replace(ahead={ROWWISE: weight}) if weight else call
    y, saved, _ = call.forward(x, ends, weights, biases, False, shares)
    saved = saved[: 1 if plan.saves == "input" else None] if spec.in_one else []
    if len(saved) > 1:
        shapes = _saved_shapes(plan, x, y.shape[0], spec)
        saved[1:] = [t if t.shape == s else t.view(s) for t, (s, _) in zip(saved[1:], shapes)]
    return [y, *saved, *written]


def _fake_forward(x, tokens, ends, weights, biases, shares, plan, spec, guards, step, ids, factors):
    plan, spec = plan_of(plan), _Spec(*spec)
    rows = (x if tokens is None else tokens).shape[0]
    outputs = [x.new_empty(rows, spec.n)]
    if spec.in_one:
        size = 4 * _tiles(rows, spec.experts) + 2 * (spec.experts + 1)
        outputs.append(ends.new_empty(size, dtype=torch.int32))
        if spec.save and plan.saves != "input":
            shapes = _saved_shapes(plan, x, rows, spec)
            outputs += [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return [*outputs, *_fake_amaxes(x, factors)]


def _run_backward(dy, tokens, saved, weights, swiglu, plan, spec, needs, guards, *state):
    plan, spec, dy = plan_of(plan), _Spec(*spec), dy.contiguous()
    call, written = _call_of(dy, plan, spec, guards, *state)
    weights, weight = spec.weights(weights, COLUMNWISE, plan, dy.dtype, needs[0])
    dx, dw, db = call.backward(dy, saved, weights, weight, needs, tokens, swiglu)
    dw = dw.mT.contiguous() if dw is not None and spec.transposed else dw
    return [*(t for t in (dx, dw, db) if t is not None), *written]


def _fake_backward(dy, tokens, saved, weights, swiglu, plan, spec, needs, guards, *state):
    spec = _Spec(*spec)
    matrix = (spec.k, spec.n) if spec.transposed else (spec.n, spec.k)
    rows = (dy if tokens is None else tokens).shape[0]
    last = torch.empty_like(swiglu[1]) if swiglu else dy.new_empty(spec.experts, spec.n)
    outputs = dy.new_empty(rows, spec.k), dy.new_empty(spec.experts, *matrix), last
    return [*(t for t, need in zip(outputs, needs) if need), *_fake_amaxes(dy, state[-1])]


def _fake_amaxes(x: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty((len(factors), 1), dtype=torch.float32)] if factors else []


def _tiles(tokens: int, experts: int) -> int:
    """`native.token_groups` makes tables of so many tiles, however many tokens the groups have."""
    return (tokens + 127 * min(experts, tokens)) // native.TILE


def _saved_shapes(
    plan: GemmPlan, x: Tensor, rows: int, spec: _Spec
) -> list[tuple[tuple, torch.dtype]]:
    """Return shapes and dtypes of what one grouped GEMM saves of rows of x: codes of groups that
    begin at multiples of 128, their scales and tensor amaxes."""
    tokens = native.TILE * _tiles(rows, spec.experts)
    key = x.dtype, x.device, tokens, spec.k, spec.experts
    if isinstance(tokens, int):
        return plan.once(_shapes_of_codes, *key)
    return _shapes_of_codes(plan, *key)  # symbols belong to one trace


def _shapes_of_codes(
    plan: GemmPlan, dtype: torch.dtype, device: torch.device, tokens: int, cols: int, experts: int
) -> list[tuple[tuple, torch.dtype]]:
    resolved, fmt = plan.resolved(dtype, device), plan.operand("input", COLUMNWISE)
    layout, of_experts = resolved.layouts["input"][COLUMNWISE], ((experts,), torch.float32)
    if fmt.tensor_scale and has_tensor_amax(fmt, layout):
        scales = cols, tokens // (fmt.block[1] or 1)
        return [((cols, tokens // 2), torch.uint8), (scales, torch.uint8), of_experts]
    if fmt.tensor_scale:
        return [((cols, tokens), torch.uint8), of_experts]
    encoding, arch = plan.input.side(COLUMNWISE).encoding(COLUMNWISE), arch_of(device)
    reading = native.operand_spec_of(encoding, layout, resolved.domains[2], arch, False, None)
    if reading is None:
        raise ValueError(f"the compiled step makes no {encoding} of the input")
    run = None if reading.run == -1 else reading.run
    buffers = native.encoding_shapes(reading.side, True, (tokens, cols), run=run)
    scale = tuple(buffers.scale)
    if run is not None:
        return [(buffers.data, torch.uint8), (scale, torch.float32)]
    if read_as(plan, "input", COLUMNWISE, resolved.layouts).block[1] is None:
        scale = experts * scale[0], *scale[1:]  # one set per group
    return [(buffers.data, torch.uint8), (scale, buffers.scale_dtype)]


_STATE = (
    "str plan, int[] spec, {}Tensor[] guards, Tensor? step, Tensor[] ids, Tensor[] factors) "
    "-> Tensor[]"
)
_experts = opaque.define(
    "experts(Tensor x, Tensor? tokens, Tensor ends, Tensor[] weights, Tensor[] biases, "
    "Tensor? shares, " + _STATE.format(""),
    _run_forward,
    _fake_forward,
)
_experts_backward = opaque.define(
    "experts_backward(Tensor dy, Tensor? tokens, Tensor[] saved, Tensor[] weights, "
    "Tensor[] swiglu, " + _STATE.format("bool[] needs, "),
    _run_backward,
    _fake_backward,
)


def _flops(x: Sequence[int], spec: Sequence[int], products: int = 1) -> int:
    return 2 * products * x[0] * spec[1] * spec[2]


register_flop_formula(torch.ops.fsdp_quant.experts)(
    lambda x, tokens, *rest, **options: _flops(tokens or x, rest[5])
)
register_flop_formula(torch.ops.fsdp_quant.experts_backward)(
    lambda dy, tokens, *rest, **options: _flops(tokens or dy, rest[4], sum(rest[5][:2]))
)

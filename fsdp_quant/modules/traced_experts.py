# SPDX-License-Identifier: Apache-2.0
"""`traced_experts`: the products of a list of experts in compiled graphs, as two operators that a
compiler does not look into.

Each runs what eager mode runs, in Python: one product for all where a kernel makes it
(`grouped_op`), else a loop that reads the splits on the host. So graphs have the bits of eager
mode. The backward makes the other codes of the weights of their values, which no one writes until
then; of weights that `fully_shard` gathers both read the buffers that it fills. As in eager mode,
the codes of x that wgrad reads are saved.

Not in graphs, but between them (`runs_in_graphs`): formats that histories or random bits go into,
one of each an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..context import STEP
from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import native, opaque
from ..ops.capability import arch_of
from ..ops.native import Operand, TokenGroups
from ..roles import QUANTIZED_TYPES as SLOTS
from ..roles import slot_ids
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.gather_group import RECOMPUTED_IN_GRAPHS
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from . import decoded_experts, program
from .bad_splits import bad_splits_flag
from .call import Call
from .decoded_experts import group_of
from .expert_weights import operand_of_codes, packed_operand, read_as, shown_codes
from .grouped_op import bias_gradients, unsupported_reason
from .operands import buffers_of
from .plan import GemmPlan, plan_of

_NO_MODULE = 0  # the tag of wrong splits: one graph serves several layers


def runs_in_graphs(plan: GemmPlan | None) -> bool:
    """Experts that all have this plan are multiplied inside a graph."""
    if plan is None or plan.boundary is not None:
        return False
    sides = [plan.hybrid(slot).side(d) for slot in SLOTS for d in Direction]
    rounded = plan.input.is_stochastic or plan.grad_output.is_stochastic
    derived = plan.input.is_derived or plan.weight.is_derived
    return not (rounded or derived or any(s.is_delayed or s.fmt.tensor_scale for s in sides))


@torch.compiler.allow_in_graph
def traced_experts(
    x: Tensor,
    ends: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: str,
    save: bool,
    turned: bool,
    guards: list[Tensor],
) -> Tensor:
    """y [tokens, N] of x [tokens, K], whose rows of expert e end at ends[e], weights [E, N, K] and
    biases [E, N].

    weight:  values, or what `fully_shard` gathered.
    plan:    key of the plan of all experts. save: the backward needs x. turned: the weights are [E,
             K, N].
    guards:  what products of the forward and of the backward lose is added to these (`guard`); []:
             nothing is watched.
    """
    counters.has_graphs = True
    return _TracedExperts.apply(x, ends, weight, bias, plan, save, turned, guards)


class _TracedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends, weight, bias, plan, save, turned, guards):
        shape = list((weight.mT if turned else weight).shape)
        values = None if isinstance(weight, QuantizedTensor) else weight
        if values is None:
            torch_compat.save_by_reference([weight])
            if torch_compat.is_recomputed_in_graph():
                RECOMPUTED_IN_GRAPHS.add(plan_of(plan).weight)
        ctx.gathered = weight if values is None else None
        codes = _codes_in(ctx.gathered, ROWWISE)
        of = x, ends, values, codes, shape, bias, plan, save, turned
        y, *made = _experts(*of, bool(guards))
        if guards:
            guards[0].add_(made.pop())
        ctx.plan, ctx.turned, ctx.guards, ctx.shape = plan, turned, guards, shape
        ctx.dtype = weight.dtype
        groups, *codes = made or [ends]
        ctx.save_for_backward(values, groups, *((codes or [x]) if save else []))
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        weight, groups, *saved = ctx.saved_tensors
        need_x, _, need_w, need_b, *_ = ctx.needs_input_grad
        codes = _codes_in(ctx.gathered, COLUMNWISE)
        of = dy, groups, weight, codes, ctx.shape, saved, ctx.plan, need_x, need_w, need_b
        made = iter(_experts_backward(*of, ctx.turned, bool(ctx.guards)))
        dx = next(made) if need_x else None
        dw = next(made).to(ctx.dtype) if need_w else None
        db = next(made).to(ctx.bias_dtype) if need_b else None
        if ctx.guards:
            ctx.guards[1].add_(next(made))
        return dx, None, dw, db, *[None] * 4


# Weights that were gathered #


def _codes_in(weight: QuantizedTensor | None, direction: Direction) -> list[Tensor]:
    return [] if weight is None else shown_codes(weight, direction)


class _Weights(NamedTuple):
    """Weights [E, N, K] as the operators are given them: values, or codes of one direction.

    turned:  the values are [E, K, N].
    shape:   [E, N, K].
    """

    values: Tensor | None
    turned: bool
    codes: list[Tensor]
    shape: list[int]

    def whole(self, plan: GemmPlan, direction: Direction, dtype: torch.dtype) -> Tensor:
        """As products of one expert each read it."""
        if self.values is not None:
            return self.values.mT if self.turned else self.values
        experts, n, k = self.shape
        source = direction if direction in plan.weight.encodings else ROWWISE
        fmt = plan.weight.side(source).fmt
        fields = [t.unflatten(0, (experts, -1)) for t in self.codes]
        parts = []
        for e in range(experts):
            storage = Storage.over([t[e] for t in fields], fmt, source, (n, k), dtype)
            own = storage if source is direction else storage.as_direction(direction)
            parts.append(StoragePair(own) if direction is ROWWISE else StoragePair(None, own))
        return QuantizedTensor(pair=StoragePair(groups=parts), shape=tuple(self.shape))

    def operand(self, plan: GemmPlan, direction: Direction, dtype: torch.dtype) -> Operand:
        """As products of groups read it."""
        if self.values is None:
            return operand_of_codes(self.codes, direction, self.shape, plan, dtype)
        return packed_operand(self.whole(plan, direction, dtype), direction, plan, dtype)


# One product for all #


def _in_one(x: Tensor, shape: list[int], bias: bool, plan: GemmPlan) -> int | None:
    """The compiled step of one product for all experts; None where there is none.

    plan:  of groups.
    """
    key, (experts, n, k) = (x.dtype, x.device, tuple(shape), bias), shape
    if key not in plan.one_product:
        reason = unsupported_reason(plan, x.dtype, x.device, experts, n, k, bias)
        plan.one_product[key] = plan.resolved(x.dtype, x.device).call if reason is None else None
    call = plan.one_product[key]
    return call if call is not None and x.shape[0] > 0 else None


def _kept_shapes(plan: GemmPlan, x: Tensor, experts: int) -> tuple[tuple, tuple, torch.dtype]:
    """(codes, scales, their dtype) that the backward reads of x: of groups that begin at multiples
    of 128."""
    resolved = plan.resolved(x.dtype, x.device)
    encoding = plan.input.side(COLUMNWISE).encoding(COLUMNWISE)
    layout, domain = resolved.layouts["input"][COLUMNWISE], resolved.domains[2]
    reading = native.operand_spec_of(encoding, layout, domain, arch_of(x.device), False, None)
    if reading is None:
        raise ValueError(f"the compiled step makes no {encoding} of the input")
    run = None if reading.run == -1 else reading.run
    shape = native.TILE * _tiles(x.shape[0], experts), x.shape[1]
    of = native.encoding_shapes(reading.side, True, shape, run=run)
    if run is not None:
        return of.data, of.scale, torch.float32
    # a set of scales a group
    if read_as(plan, "input", COLUMNWISE, resolved.layouts).block[1] is None:
        return of.data, (experts * of.scale[0], *of.scale[1:]), of.scale_dtype
    return of.data, of.scale, of.scale_dtype


def _counts(x: Tensor, wanted: bool) -> list[Tensor]:
    """What products lose, as the guard of a layer has it."""
    return [x.new_zeros((3, 2), dtype=torch.float32)] if wanted else []


def _step(x: Tensor, wanted: list[Tensor]) -> Tensor | None:
    return STEP.on(x.device) if wanted else None


def _tiles(tokens: int, experts: int) -> int:
    """`native.token_groups` makes tables of so many tiles, however many tokens the groups have."""
    return (tokens + 127 * min(experts, tokens)) // native.TILE


def _run_forward(x, ends, values, codes, shape, bias, plan, save, turned, counts):
    plan, seen, weights = plan_of(plan), _counts(x, counts), _Weights(values, turned, codes, shape)
    compiled = _in_one(x, shape, bias is not None, plan.of_groups)
    if compiled is None:
        matrices = weights.whole(plan, ROWWISE, x.dtype).unbind()
        call = _call(plan, x.device, save, seen)
        biases = [None] * len(matrices) if bias is None else bias
        parts = zip(_parts(x, ends), matrices, biases)
        outputs = [program.forward(call, part, w, b, None, False)[0] for part, w, b in parts]
        return [torch.cat(outputs), *seen]
    plan = plan.of_groups
    weight = weights.operand(plan, ROWWISE, x.dtype)
    if plan.decodes_groups(arch_of(x.device)):
        of = x, ends, weight.data, plan, save, _NO_MODULE
        y, groups, kept = decoded_experts.forward(*of)
    else:
        y, groups, kept = native.grouped_step(
            x,
            ends,
            weight,
            compiled,
            save,
            next(iter(seen), None),
            x.dtype if bias is None else torch.float32,
            bad_splits_flag(),
            _NO_MODULE,
            step=_step(x, seen),
        )
    if bias is not None:
        y = y.add_(bias.float().index_select(0, group_of(groups, x))).to(x.dtype)
    if kept:
        data, scale, _ = _kept_shapes(plan, x, shape[0])
        kept = [kept[0].view(data), kept[1].view(scale)]
    return [y, groups.tables, *kept, *seen]


def _fake_forward(x, ends, values, codes, shape, bias, plan, save, turned, counts):
    experts, n, _ = shape
    made, plan = [x.new_empty(x.shape[0], n)], plan_of(plan).of_groups
    if _in_one(x, shape, bias is not None, plan) is not None:
        made.append(
            ends.new_empty(4 * _tiles(x.shape[0], experts) + 2 * (experts + 1), dtype=torch.int32)
        )
        if save and plan.saves != "input":
            data, scale, dtype = _kept_shapes(plan, x, experts)
            made += [x.new_empty(data, dtype=torch.uint8), x.new_empty(scale, dtype=dtype)]
    return made + ([x.new_empty((3, 2), dtype=torch.float32)] if counts else [])


def _run_backward(
    dy, groups, values, codes, shape, saved, plan, need_x, need_w, need_b, turned, counts
):
    plan, seen, dy = plan_of(plan), _counts(dy, counts), dy.contiguous()
    weights, needs = _Weights(values, turned, codes, shape), (need_x, need_w, need_b)
    compiled = _in_one(dy, shape, need_b, plan.of_groups)
    if compiled is None:
        matrices = weights.whole(plan, COLUMNWISE, dy.dtype).unbind()
        call = _call(plan, dy.device, need_w, seen)
        inputs = _parts(saved[0], groups) if need_w else [None] * shape[0]
        made = [
            program.backward(
                call, part, x if plan.saves == "input" else None, w, _saved(call, x), needs, None
            )
            for part, w, x in zip(_parts(dy, groups), matrices, inputs)
        ]
        dx, dw, db = zip(*made)
        dw = [w.t() for w in dw] if turned and need_w else dw
        grads = zip((torch.cat, torch.stack, torch.stack), (dx, dw, db), needs)
        return [*(join(of) for join, of, needed in grads if needed), *seen]
    plan, groups, made = plan.of_groups, TokenGroups(groups, shape[0]), []
    if need_x or need_w:
        weight = weights.operand(plan, COLUMNWISE, dy.dtype) if need_x else None
        kept, turns = saved if need_w else [], turned and plan.turns_wgrad
        if plan.decodes_groups(arch_of(dy.device)):
            values = None if weight is None else weight.data
            dx, dw = decoded_experts.backward(dy, groups, values, kept, plan, turns)
        else:
            dx, dw = native.grouped_step_backward(
                dy,
                groups,
                weight,
                kept,
                compiled,
                next(iter(seen), None),
                step=_step(dy, seen),
                turned=turns,
            )
        dw = dw.mT.contiguous() if dw is not None and turned and need_w and not turns else dw
        made = [dx] * need_x + [dw] * need_w
    return [*made, *([bias_gradients(groups, dy)] if need_b else []), *seen]


def _fake_backward(
    dy, groups, values, codes, shape, saved, plan, need_x, need_w, need_b, turned, counts
):
    experts, n, k = shape
    shapes = [(dy.shape[0], k)] * need_x
    shapes += [(experts, k, n) if turned else (experts, n, k)] * need_w
    shapes += [(experts, n)] * need_b
    counted = [dy.new_empty((3, 2), dtype=torch.float32)] if counts else []
    return [dy.new_empty(s) for s in shapes] + counted


# One after the other #


def _parts(x: Tensor, ends: Tensor) -> Sequence[Tensor]:
    of = [0, *ends.tolist()]
    return x.split([end - start for start, end in zip(of, of[1:])])


def _call(plan: GemmPlan, device: torch.device, save: bool, guard: list[Tensor]) -> Call:
    ids, counts = slot_ids("").to(device), next(iter(guard), None)
    return Call(plan, save, STEP.on(device), ids, guard=counts, backward_guard=counts)


def _saved(call: Call, x: Tensor | None) -> program.Saved:
    """What the backward of one expert reads besides its input."""
    buffers = []
    if x is not None and call.plan.saves != "input":
        saved = call.plan.resolved(x.dtype, x.device).saved
        buffers = buffers_of(call.quantize("input", x, [saved]).take(saved))
    return program.Saved(buffers, None, {"input": {}, "weight": {}})


_experts = opaque.define(
    "experts(Tensor x, Tensor ends, Tensor? values, Tensor[] codes, int[] shape, Tensor? bias, str "
    "plan, bool save, bool turned, bool counts) -> Tensor[]",
    _run_forward,
    _fake_forward,
)
_experts_backward = opaque.define(
    "experts_backward(Tensor dy, Tensor groups, Tensor? values, Tensor[] codes, int[] shape, "
    "Tensor[] saved, str plan, bool need_x, bool need_w, bool need_b, bool turned, bool counts) -> "
    "Tensor[]",
    _run_backward,
    _fake_backward,
)
register_flop_formula(torch.ops.fsdp_quant.experts)(
    lambda x, ends, values, codes, shape, *rest, **options: 2 * x[0] * shape[1] * shape[2]
)
register_flop_formula(torch.ops.fsdp_quant.experts_backward)(
    lambda dy, groups, values, codes, shape, saved, plan, need_x, need_w, *rest, **options: (
        2 * dy[0] * shape[1] * shape[2] * (need_x + need_w)
    )
)

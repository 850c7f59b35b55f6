# SPDX-License-Identifier: Apache-2.0
"""`traced_linear`: the executor of linear layers in compiled graphs.

dynamo calls `traced_linear` without tracing into it (`allow_in_graph`). AOTAutograd runs
this Python with fake tensors, and records the functional operators of `quantize` and `gemm`:

    forward    amax(x), quantize(x, both), quantize(w, rowwise), gemm
    backward   amax(dy), quantize(dy, both), quantize(w, columnwise, amax), gemm, gemm

Nothing of ours runs when the graph runs. State comes in as tensors (`GraphCall`); amax histories
and counts of the guard are written by functionalized in-place operators.

[Note: layers that ranks share]
Functional collectives stand around the same operators (`linear_definition` has the equations):

    column, cut   forward    all_reduce(amax(x)), quantize(x, rowwise), all_gather(codes, scales),
                             gemm
                  backward   all_reduce(amax(dy)), all_gather(quantize(x, columnwise)), gemm, gemm,
                             reduce_scatter(dx)
    row, cut      forward    all_reduce(amax(x)), gemm, reduce_scatter(y)
                  backward   all_reduce(amax(dy)), all_gather(quantize(dy, both)), gemm, gemm,
                             all_reduce(db)

A column layer whose x is whole all-reduces dx, a row layer whose y is whole all-reduces y. A scale
of a whole weight takes one all-reduce of its amax in the forward. A rank's place in the group is a
tensor, so that graphs are alike on all ranks.
Layers that are given one tensor share a `_SharedInput` while they are traced: one gather each way
and one reduce-scatter of the sum of their dx, in graphs without gradients too, which fx_graph_cse
does not see. The sum rounds each layer's dx to its dtype, where eager layers with kernels add to it
in fp32; layers whose codes are their own (delayed scaling) scatter alone in eager mode, so sums
over ranks and layers swap. All else has the bits of eager mode.

[Note: what the backward saves]
The codes of x that wgrad reads, computed with those of the forward in one read of x: one byte an
element, as in eager mode. A partitioner that may choose computes them in the forward too, by a
second read of x. And w, which is a parameter: the backward computes its other codes. Layers that
share x (q, k, v; gate, up) quantize it once: the calls are equal, and fx_graph_cse merges them.
Where ranks share x, the backward gathers what it quantizes of the x that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import opaque
from ..ops.dispatch import Statistics
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.gather_group import RECOMPUTED_IN_GRAPHS
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import values_of
from .exchange import Scattering, SequenceCut, TensorParallel
from .linear_products import gradients, product
from .operands import SLOTS, SlotOperands, buffers_of, columnwise_of_saved
from .plan import GemmPlan, plan_of
from .traced_operands import GatheredOperands, GraphCall, shared_amaxes, weight_operand

Operands = SlotOperands | GatheredOperands

# Values and codes #


def _saved_codes(plan: GemmPlan, saved: Direction, cut: SequenceCut | None) -> Direction | None:
    """Codes of the input that are saved; None: x is. Of a cut one only those that the backward
    derives others from, and gathers these. saved: `Resolved.saved`."""
    if plan.saves == "input":
        return None
    if cut is None:
        return saved
    derives = plan.saves == "rowwise" and not plan.input.shares_storage
    return ROWWISE if derives and cut.all_travel(plan.input, [ROWWISE]) else None


def _start_input(ctx, dy: Tensor) -> Callable[[], EncodedMatrix]:
    """Start the gather of a cut input; return what returns the columnwise operand [M, K]."""
    call, shape, cut, saved = ctx.call, ctx.rows, ctx.cut, list(ctx.saved_tensors)
    plan, key = call.plan, saved.pop() if ctx.keeps_key else None
    if ctx.saved_codes is not None and cut is None:
        return lambda: columnwise_of_saved(plan, saved, shape, dy, lambda: key)
    if ctx.saved_codes is None:
        x = saved[0].reshape(shape)
    else:
        x = Storage.over(saved, plan.input.rowwise.fmt, ROWWISE, shape, dy.dtype)

    def operands():
        return call.operands("input", x, [COLUMNWISE], key, ctx.of_input, cut, "backward")

    if cut is None:
        return lambda: operands().take(COLUMNWISE)
    shared = ctx.shared.backward if ctx.shared is not None and _shares_codes(plan) else {}
    if (plan.input, plan.saves) not in shared:
        shared[plan.input, plan.saves] = operands()
    gathered = shared[plan.input, plan.saves]
    return lambda: gathered.take(COLUMNWISE)


def _shares_codes(plan: GemmPlan) -> bool:
    """Layers of one input have the same codes of it: no histories and random keys of their own."""
    return not (plan.input.is_stochastic or plan.input.delayed_directions)


class _SharedGradient(torch.autograd.Function):
    """A tensor of the shape of all ranks' rows of x, without values. Layers leave their dx as its
    gradient, which autograd adds up and this scatters: one reduce-scatter for all."""

    @staticmethod
    def forward(ctx, x, cut):
        ctx.cut = cut
        return x.new_zeros(()).expand(cut.whole_shape)

    @staticmethod
    def backward(ctx, dx):
        with opaque.tracing():
            rows = Scattering(dx.reshape(-1, dx.shape[-1]), ctx.cut).wait()
            return rows.view(ctx.cut.shape), None


# AOTAutograd calls `traced_linear` of layers that read one tensor with one object, so they find
# what the first of them left with it. dynamo's variables would do too, but attributes set on an
# input of a graph stay with the user's tensor.
class _SharedInput:
    """What layers of one cut x share in a trace: each of it is in the graph once.

    gradient:  `_SharedGradient` of x; None: x needs no gradient.
    forward:   by what decides codes, statistics of x and its rowwise operands.
    backward:  likewise, its columnwise operands.
    """

    def __init__(self, x: Tensor, cut: SequenceCut):
        trains = torch.is_grad_enabled() and x.requires_grad
        self.gradient = _SharedGradient.apply(x, cut) if trains else None
        self.forward: dict[tuple, tuple[dict[Direction, Statistics], Operands]] = {}
        self.backward: dict[tuple, Operands] = {}


def _shared_input(owner: Tensor, x: Tensor, axis: TensorParallel) -> _SharedInput:
    """The `_SharedInput` of x, which the first layer leaves with the traced tensor.

    owner:  that layers are given: x in its own dtype, or the DTensor over it.
    """
    version = 0 if x.is_inference() else owner._version
    grad, group = torch.is_grad_enabled(), axis.group.group_name
    seen = version, owner.grad_fn, grad, x.dtype, group, axis.sequence_dim
    before, shared = owner.__dict__.get("_fq_traced_input", (None, None))
    if before != seen:
        shared = _SharedInput(x, SequenceCut.of_local(tuple(x.shape), axis.cut_dim, axis.group))
        # not with a tensor of a user's
        if torch_compat.dispatch_is_watched() and not x.is_inference():
            vars(owner)["_fq_traced_input"] = seen, shared
    return shared


# The partitioner (min-cut) never recomputes an operator that is not in its list, nor a value that
# such an operator reads. Nodes that follow from inputs and that the forward does not need go where
# the cut is least. inductor drops each copy of x that would tell the partitioner to recompute x,
# before it cuts. Equal calls are one node (fx_graph_cse) if no argument is a NaN (it equals
# nothing) and if no argument is a layer's own: so counts of the guard are results, added to the
# guard outside. Statistics of a fused producer's unrounded values are rounded through their bits.
# Results have the strides of their fakes: codes of padded rows decode to views of wider rows.
# AOTAutograd's disk cache is bypassed by functions that it does not know; inductor's is not.
class _TracedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gradient, weight, bias, save, call, shared, group_of_weight):
        """gradient: where the gradient of x goes, of `shared` (`_SharedInput`); None: to x.
        group_of_weight: whose ranks share the amax of the whole weight."""
        with opaque.tracing(), torch_compat.without_autocast(x.device):
            plan, axis, rows = call.plan, call.axis, x.reshape(-1, x.shape[-1])
            resolved = plan.resolved(x.dtype, x.device)
            cut = None if axis is None else axis.cut_of("input", x)
            ctx.weight, ctx.call, ctx.shared, ctx.cut = weight, call, shared, cut
            ctx.rows = tuple(rows.shape)
            ctx.bias_dtype = None if bias is None else bias.dtype
            torch_compat.save_by_reference(call.tensors())
            torch_compat.save_current_values(
                [t for t in (call.step, *(f for of in call.factors for f in of)) if t is not None]
            )
            if isinstance(weight, QuantizedTensor):
                torch_compat.save_by_reference([weight])
                if torch_compat.is_recomputed_in_graph():
                    RECOMPUTED_IN_GRAPHS.add(plan.weight)
            key = call.key("input", rows, cut)
            saved = _saved_codes(plan, resolved.saved, cut) if save else None
            read = shared.forward if shared is not None and _shares_codes(plan) else {}
            if (plan.input, save) not in read:
                passes = [[ROWWISE], [COLUMNWISE]] if save else [[ROWWISE]]
                found = call.statistics("input", rows, passes, cut)
                directions = [ROWWISE, COLUMNWISE] if saved is COLUMNWISE else [ROWWISE]
                operands = call.operands("input", rows, directions, key, found, cut, "forward")
                read[plan.input, save] = found, operands
            ctx.of_input, operands = read[plan.input, save]
            ctx.of_weight = {}
            if group_of_weight is not None and not isinstance(weight, QuantizedTensor):
                values, seen = values_of(weight), plan.compute_dtype
                ctx.of_weight = shared_amaxes(
                    plan.weight, values, Direction, group_of_weight, dtype=seen
                )
            w, of_weight = weight_operand(
                plan, weight, ROWWISE, x.dtype, ctx.of_weight, call.factors[1]
            )
            shape = (*(x.shape if cut is None else cut.whole_shape)[:-1], weight.shape[0])
            of_output = None if axis is None else axis.output_cut(shape)
            y = product(call, operands.take(ROWWISE), w, bias, x.dtype, shape, of_output)
            amaxes = operands.amaxes
            gathers_columnwise = save and plan.saves == "columnwise" and cut is not None
            if gathers_columnwise and COLUMNWISE in plan.input.delayed_directions:
                known = ctx.of_input.get(COLUMNWISE)
                amaxes = amaxes | {COLUMNWISE: rows.abs().amax() if known is None else known.amax}
            call.record("input", amaxes)
            call.record("weight", of_weight)
            if save:
                ctx.saved_codes, ctx.keeps_key = saved, key is not None and saved is not COLUMNWISE
                kept = [x]
                if saved is not None:
                    kept = buffers_of(operands.own[saved])
                ctx.save_for_backward(*kept, *([key] if ctx.keeps_key else []))
            return y

    @staticmethod
    def backward(ctx, dy):
        with opaque.tracing(), torch_compat.without_autocast(dy.device):
            call, weight = ctx.call, ctx.weight
            to_x, to_shared, need_w, need_b = ctx.needs_input_grad[:4]

            def read_weight() -> EncodedMatrix:
                return weight_operand(
                    call.plan, weight, COLUMNWISE, dy.dtype, ctx.of_weight, call.factors[1]
                )[0]

            dx, dw, db = gradients(
                call,
                dy,
                weight,
                (to_x or to_shared, need_w, need_b),
                read_weight,
                lambda _: _start_input(ctx, dy),
            )
            dw = None if dw is None else dw.to(weight.dtype)
            db = None if db is None else db.to(ctx.bias_dtype)
            return *((None, dx) if to_shared else (dx, None)), dw, db, *[None] * 4


@torch.compiler.allow_in_graph
def traced_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: str,
    save: bool,
    training: bool,
    step: Tensor | None,
    ids: Tensor | None,
    guards: list[Tensor],
    factors: list[Tensor],
    histories: list[Tensor],
    rank: Tensor | None = None,
    ranks: tuple | None = None,
) -> Tensor:
    """y [.., N] of x [.., K], in a graph that is being traced.

    plan:       key of the plan. save: the backward needs x. training: amaxes are recorded.
    guards:     those of `GraphCall`, or [].
    factors, histories:  of the delayed sides of input, weight and grad_output, one after the other.
    rank:       of `GraphCall`.
    ranks:      where ranks share the layer, in constants that dynamo records: group name, column,
                sequence_dim and reduces of `TensorParallel`; whether scales of the whole weight are
                those of all ranks' parts; dtype in which x is multiplied. x may then be a DTensor
                that is cut along the sequence.
    """
    counters.has_graphs = True
    its = plan_of(plan) if ranks is not None else plan_of(plan).on(x.dtype, x.device)
    counts = [len(its.hybrid(slot).delayed_directions) for slot in SLOTS]
    if len(factors) < sum(counts):
        raise ValueError(
            "a compiled region entered fq.autocast with delayed scaling, whose histories cannot be "
            "made while a graph is traced; run it once in eager mode first"
        )

    def by_slot(flat: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        ends = list(accumulate(counts))
        return [flat[end - count : end] for end, count in zip(ends, counts)]

    axis = shared = group_of_weight = None
    if ranks is not None:
        group, *shared_as, spans_weight, dtype = ranks
        axis, owner = TensorParallel(torch_compat.group_of_name(group), *shared_as), x
        group_of_weight = axis.group if spans_weight else None
        x = (x.to_local() if isinstance(x, DTensor) else x).to(dtype)
        if axis.gathered_slot == "input":
            shared = _shared_input(owner, x, axis)
    step, ids = (None if t is None else t.to(x.device) for t in (step, ids))
    call = GraphCall(
        its,
        axis,
        step,
        ids,
        rank,
        *(guards or (None, None)),
        factors=by_slot(factors),
        histories=by_slot(histories if training else []),
    )
    gradient = None if shared is None else shared.gradient
    return _TracedLinear.apply(x, gradient, weight, bias, save, call, shared, group_of_weight)

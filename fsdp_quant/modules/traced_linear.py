# SPDX-License-Identifier: Apache-2.0
"""`traced_linear`: the executor of linear layers in compiled graphs.

dynamo calls `traced_linear` without tracing into it (`allow_in_graph`). AOTAutograd traces it: it
runs this Python with fake tensors and records the functional operators that `quantize` and `gemm`
call:

    forward    amax(x), quantize(x, both), quantize(w, rowwise), gemm
    backward   amax(dy), quantize(dy, both), quantize(w, columnwise, amax), gemm, gemm

Nothing of ours runs when the graph runs. State comes in as tensors (`Beside`); amax histories and
counts of the guard are written by functionalized in-place operators.

[Note: layers that ranks share]
Functional collectives stand around the same operators (`exchange`; `parallel.linear` has the
equations):

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
The codes of x that wgrad reads, made with those of the forward in one read of x: one byte an
element, as in eager mode. A partitioner that may choose makes them in the forward too, by a second
read of x. And w, which is a parameter: its other codes are made in the backward. Layers that share
x (q, k, v; gate, up) quantize it once: the calls are equal, and fx_graph_cse merges them. Where
ranks share x, the backward gathers what it quantizes of the x that was saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding, Format
from ..gemm import Watch, gemm
from ..ops import dispatch, native, opaque
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT, is_anchored_as_encoded, is_encoded_as, operand_format
from ..quantizer import HybridQuantizer
from ..scaling import AmaxHistory
from ..storage import Storage, encoded_matrix, to_layout, to_storage
from ..tensor import torch_compat
from ..tensor.gather_group import RECOMPUTED_IN_GRAPHS
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import values_of
from .exchange import Gather, Scattering, SequenceCut, TensorParallel, shared_statistics
from .linear_op import (
    SLOTS,
    bias_gradient,
    buffers_of,
    columnwise_of_saved,
    slot_key,
    slot_storages,
)
from .plan import GemmPlan, Resolved, plan_of


class Beside(NamedTuple):
    """What a layer's products read and write beside their operands, on their device. The same
    tensors in every step.

    step:       int64 [5] (`context.STEP_FIELDS`); ids: int64 [3] (`slot_ids`); None: no byte
                depends on them.
    rank:       int64 [2] (`GraphTensors`); None: ranks do not share the layer.
    guard, backward_guard:  fp32 [3, 2], what products of the forward and of the backward lost;
                            None: nothing is watched.
    factors:    of input, weight and grad_output, fp32 [1] of the history of each delayed side; []
                without delayed scaling.
    histories:  likewise, where their amaxes go.
    """

    step: Tensor | None
    ids: Tensor | None
    rank: Tensor | None
    guard: Tensor | None
    backward_guard: Tensor | None
    factors: tuple[list[Tensor], list[Tensor], list[Tensor]]
    histories: tuple[list[Tensor], list[Tensor], list[Tensor]]

    def tensors(self) -> list[Tensor]:
        flat = [t for of in (*self.factors, *self.histories) for t in of]
        return [t for t in (*self[:5], *flat) if t is not None]

    def watch(self, resolved: Resolved, product: int) -> Watch | None:
        guard = self.backward_guard if product else self.guard
        return (
            None if guard is None else Watch(resolved.watched[product], self.step, guard, product)
        )

    def key(
        self, plan: GemmPlan, slot: str, rows: int, after: Tensor | None = None
    ) -> Tensor | None:
        """`slot_key` of this call."""
        if not plan.hybrid(slot).is_stochastic:
            return None
        step = self.step if self.rank is None else torch.cat((self.step[:-1], self.rank[:1]))
        return slot_key(plan, slot, step, self.ids, rows, after)


# Values and codes #


def whole_amaxes(
    hybrid: HybridQuantizer, x: Tensor, dtype: torch.dtype | None = None, shared: bool = False
) -> dict[Direction, Statistics]:
    """Amaxes of all of x [rows, cols], by encoded direction that is scaled by them.

    They are torch operators, which a compiler fuses with what writes x: by rows, since inductor
    splits a reduction of all values where it likes, and fuses it with no loop over rows and
    columns. `quantize` takes the largest: a launch from C++, where a kernel of inductor's is one
    from Python.

    dtype:   that encoders see; None: x's.
    shared:  with other ranks: one amax, and also of directions that histories scale, whose encoders
             take them else.
    """
    spans = _whole_formats(hybrid, shared)
    if not spans or x.numel() == 0:
        return {}
    amax = (x if dtype is None else x.to(dtype)).abs().amax(-1, keepdim=True)
    if shared or any(fmt.tensor_scale for fmt in spans.values()):
        amax = amax.amax().view(1, 1)
    # through its bits: a compiler that took the amax of unrounded values must round now
    if amax.dtype is torch.bfloat16:
        amax = (amax.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    return _of_whole(spans, amax.float())


def _whole_formats(hybrid: HybridQuantizer, delayed: bool = False) -> dict[Direction, Format]:
    """Encoded directions that are scaled by the amax of all values. delayed: also those that
    histories scale."""
    spans = {
        d: e.fmt for d, e in hybrid.encodings.items() if e.fmt.spans_tensor and not e.fmt.rotated
    }
    return {d: fmt for d, fmt in spans.items() if delayed or not hybrid.side(d).is_delayed}


def _of_whole(spans: dict[Direction, Format], amax: Tensor) -> dict[Direction, Statistics]:
    return {
        d: Statistics(None, amax.view(1)) if fmt.tensor_scale else Statistics(amax, None)
        for d, fmt in spans.items()
    }


def _shared_amaxes(
    hybrid: HybridQuantizer,
    x: Tensor,
    directions,
    group: dist.ProcessGroup | None,
    rows_are_cut: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[Direction, Statistics]:
    """`whole_amaxes`, and those that span the ranks of `group`; None: x is whole."""
    shares = group is not None and group.size() > 1
    own = whole_amaxes(hybrid, x, dtype, shares)
    if not shares or x.numel() == 0:
        return own
    return own | shared_statistics(
        x, hybrid, directions, group, rows_are_cut, dtype=dtype, known=own
    )


def _slot_statistics(
    plan: GemmPlan,
    slot: str,
    x: Tensor,
    passes: list[list[Direction]],
    axis: TensorParallel | None,
    cut: SequenceCut | None,
) -> dict[Direction, Statistics]:
    """Take statistics of an activation or gradient [rows, cols], over the ranks that have other
    rows or columns of it.

    passes:  directions that are gathered together, where x is cut along the sequence.
    """
    hybrid, group = plan.hybrid(slot), None
    if cut is not None:
        passes, group = [of for of in passes if cut.all_travel(hybrid, of)], axis.group
    elif axis is not None and slot == axis.cut_slot:
        group = axis.group
    return _shared_amaxes(hybrid, x, [d for of in passes for d in of], group, cut is not None)


class _Operands:
    """What products read of an activation or gradient [rows, cols]: quantized here, or of every
    rank's rows, whose gathers start when this is made and are waited for a direction at a time.

    beside:  `Beside`.
    phase:   "forward" or "backward".
    amaxes:  of delayed sides; known once an operand was taken.
    """

    def __init__(
        self,
        plan: GemmPlan,
        slot: str,
        x: Tensor | Storage,
        directions: list[Direction],
        key: Tensor | None,
        beside: Beside,
        statistics: dict[Direction, Statistics],
        cut: SequenceCut | None,
        dtype: torch.dtype,
        device: torch.device,
        phase: str = "backward",
    ):
        hybrid, factors, self._gather = plan.hybrid(slot), beside.factors[SLOTS.index(slot)], None
        self._layouts = plan.resolved(dtype, device).layouts[slot]
        if cut is None:
            self._made, self.amaxes = slot_storages(
                plan, slot, x, directions, key, factors, statistics
            )
            return
        self._gather = Gather(
            x,
            hybrid,
            directions,
            cut,
            phase,
            key=key,
            factors=dict(zip(hybrid.delayed_directions, factors)),
            statistics=statistics,
            rank=None if beside.rank is None else beside.rank[1],
        )

    def take(self, direction: Direction) -> EncodedMatrix:
        if self._gather is None:
            return self._made[direction]
        storage = self._gather.take(direction)
        self.amaxes = self._gather.amaxes
        return to_layout(storage, self._layouts[direction]) if storage.data.numel() else storage

    @property
    def own_rowwise(self) -> EncodedMatrix:
        """Codes of this rank's rows."""
        return self._made[ROWWISE] if self._gather is None else self._gather.sent[ROWWISE]


def _weight_storage(
    plan: GemmPlan,
    weight: Tensor,
    direction: Direction,
    dtype: torch.dtype,
    statistics: dict[Direction, Statistics],
    factors: list[Tensor],
) -> tuple[EncodedMatrix, dict[Direction, Tensor]]:
    """The weight as a product reads it, and the amaxes of its delayed side: of a gathered weight
    its codes.

    statistics:  known ones; takes those of the whole weight, for its other direction.
    """
    hybrid, layouts = plan.weight, plan.resolved(dtype, weight.device).layouts["weight"]
    wanted = layouts[direction]
    if isinstance(weight, QuantizedTensor):
        return weight.operand_in_graph(direction, wanted, hybrid), {}
    values = values_of(weight)
    # an expression of its own, for the partitioner: else it would keep codes of the forward
    if direction is COLUMNWISE:
        values = values.clone()
    source = direction if direction in hybrid.encodings else ROWWISE
    encoding = hybrid.encodings[source]
    if hybrid.shares_storage and direction is COLUMNWISE:
        encoding = (
            hybrid.columnwise.encoding(COLUMNWISE)
            if wanted != COMPACT and is_encoded_as(encoding.fmt, wanted)
            else encoding
        )
    seen = plan.compute_dtype if encoding.fmt.is_quantized else dtype
    delayed = hybrid.delayed_directions
    factor = factors[delayed.index(source)] if source in delayed else None
    laid_out = wanted if is_encoded_as(encoding.fmt, wanted) and not hybrid.is_derived else COMPACT
    if (
        source not in statistics
        and is_anchored_as_encoded(encoding.fmt, laid_out)
        and native.runs(values)
    ):
        whole = Encoding(operand_format(encoding.fmt, laid_out), source)
        (found,) = dispatch.statistics(values, [whole], dtype=seen)
        alike = [
            d for d, e in hybrid.encodings.items() if is_anchored_as_encoded(e.fmt, layouts[d])
        ]
        statistics |= dict.fromkeys(alike, Statistics(None, found.amax.view(1)))
    (encoded,) = dispatch.encode(
        values,
        [encoding],
        [statistics.get(source)] if source in statistics else None,
        encode_scales=[factor],
        dtype=seen,
        layouts=[laid_out],
    )
    if source in (spans := _whole_formats(hybrid)) and source not in statistics:
        statistics |= _of_whole(
            spans, encoded.tensor_amax if encoding.fmt.tensor_scale else encoded.amax
        )
    made = encoded_matrix(encoded, encoding, weight.shape, dtype)
    amaxes = {source: encoded.amax} if factor is not None else {}
    if made.direction is not direction:
        made = (
            to_storage(made).as_direction(direction)
            if hybrid.shares_storage
            else hybrid.derive_columnwise(made, plan.compute_dtype)
        )
    return to_layout(made, wanted), amaxes


def _saved_codes(plan: GemmPlan, saved: Direction, cut: SequenceCut | None) -> Direction | None:
    """Codes of the input that are saved; None: x is. Of a cut one only those that the backward
    derives others from, and gathers these. saved: `Resolved.saved`."""
    if plan.saves == "input":
        return None
    if cut is None:
        return saved
    derives = plan.saves == "rowwise" and not plan.input.shares_storage
    return ROWWISE if derives and cut.all_travel(plan.input, [ROWWISE]) else None


def _saved_input(ctx, dy: Tensor) -> Callable[[], EncodedMatrix]:
    """What gives the columnwise storage of the input [M, K], whose gather, of a cut one, starts
    now."""
    plan, shape, cut, saved = ctx.plan, ctx.rows, ctx.cut, list(ctx.saved_tensors)
    key = saved.pop() if ctx.keeps_key else None
    if ctx.saved_codes is not None and cut is None:
        return lambda: columnwise_of_saved(plan, saved, shape, dy, lambda: key)
    gathered, made = {} if ctx.shared is None else ctx.shared.backward, None
    if (alike := _shares_codes(plan)) and (
        made := gathered.get((plan.input, plan.saves))
    ) is not None:
        return lambda: made.take(COLUMNWISE)
    if ctx.saved_codes is None:
        x = saved[0].reshape(shape)
    else:
        x = Storage.over(saved, plan.input.rowwise.fmt, ROWWISE, shape, dy.dtype)
    made = _Operands(
        plan, "input", x, [COLUMNWISE], key, ctx.beside, ctx.of_input, cut, dy.dtype, dy.device
    )
    if alike:
        gathered[plan.input, plan.saves] = made
    return lambda: made.take(COLUMNWISE)


def _shares_codes(plan: GemmPlan) -> bool:
    """Layers that are given one input have the same codes of it: no history and no random key is a
    layer's own."""
    return not (plan.input.is_stochastic or plan.input.delayed_directions)


def _record(
    histories: list[Tensor], hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor]
) -> None:
    for direction, history in zip(hybrid.delayed_directions, histories):
        if direction in amaxes:
            AmaxHistory.record_in(history, amaxes[direction])


class _SharedGradient(torch.autograd.Function):
    """A tensor of the shape of all ranks' rows of x, without values. Layers that read x leave their
    dx as its gradient, which autograd adds up and this scatters: one reduce-scatter for all of
    them."""

    @staticmethod
    def forward(ctx, x, cut):
        ctx.cut = cut
        return x.new_zeros(()).expand(cut.whole_shape)

    @staticmethod
    def backward(ctx, dx):
        with opaque.tracing():
            return Scattering(dx.reshape(-1, dx.shape[-1]), ctx.cut).wait().view(
                ctx.cut.shape
            ), None


# AOTAutograd calls `traced_linear` of layers that read one tensor with one object, so they find
# what the first of them left with it. dynamo's variables would do too, but attributes set on an
# input of a graph stay with the user's tensor.
class _SharedInput:
    """What layers that are given one cut x share while they are traced: each of it is in the graph
    once.

    gradient:  `_SharedGradient` of x; None: x needs no gradient.
    forward:   by what decides codes, statistics of x and its rowwise operands.
    backward:  likewise, its columnwise operands.
    """

    def __init__(self, x: Tensor, cut: SequenceCut):
        self.gradient = (
            _SharedGradient.apply(x, cut) if torch.is_grad_enabled() and x.requires_grad else None
        )
        self.forward: dict[tuple, tuple[dict[Direction, Statistics], _Operands]] = {}
        self.backward: dict[tuple, _Operands] = {}


def _shared_input(owner: Tensor, x: Tensor, axis: TensorParallel) -> _SharedInput:
    """The `_SharedInput` of x, left with the tensor that is traced for the other layers that are
    given it.

    owner:  that layers are given: x in its own dtype, or the DTensor over it.
    """
    version = 0 if x.is_inference() else owner._version
    seen = (
        version,
        owner.grad_fn,
        torch.is_grad_enabled(),
        x.dtype,
        axis.group.group_name,
        axis.sequence_dim,
    )
    before, shared = owner.__dict__.get("_fq_traced_input", (None, None))
    if before != seen:
        shared = _SharedInput(x, axis.cut_of("input", x))
        # not with a tensor of a user's
        if torch_compat.dispatch_is_watched() and not x.is_inference():
            owner.__dict__["_fq_traced_input"] = seen, shared
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
    def forward(
        ctx, x, gradient, weight, bias, plan, save, training, beside, axis, shared, group_of_weight
    ):
        """gradient: where the gradient of x goes, of `shared` (`_SharedInput`); None: to x.
        group_of_weight: whose ranks share the amax of the whole weight."""
        with opaque.tracing(), torch.autocast(x.device.type, enabled=False):
            rows, resolved = x.reshape(-1, x.shape[-1]), plan.resolved(x.dtype, x.device)
            cut = None if axis is None else axis.cut_of("input", x)
            ctx.plan, ctx.weight, ctx.training, ctx.beside = plan, weight, training, beside
            ctx.axis, ctx.shared, ctx.cut = axis, shared, cut
            ctx.rows, ctx.shape = (
                tuple(rows.shape),
                tuple(x.shape) if cut is None else cut.whole_shape,
            )
            ctx.bias_dtype = None if bias is None else bias.dtype
            torch_compat.save_by_reference(beside.tensors())
            torch_compat.save_what_is_made(
                [
                    t
                    for t in (beside.step, *(f for of in beside.factors for f in of))
                    if t is not None
                ]
            )
            if isinstance(weight, QuantizedTensor):
                torch_compat.save_by_reference([weight])
                if torch_compat.is_recomputed_in_graph():
                    RECOMPUTED_IN_GRAPHS.add(plan.weight)
            key = beside.key(plan, "input", rows.shape[0] if cut is None else cut.rows * cut.ranks)
            saved = _saved_codes(plan, resolved.saved, cut) if save else None
            read = shared.forward if shared is not None and _shares_codes(plan) else {}
            if (plan.input, save) not in read:
                passes = [[ROWWISE], [COLUMNWISE]] if save else [[ROWWISE]]
                found = _slot_statistics(plan, "input", rows, passes, axis, cut)
                directions = [ROWWISE, COLUMNWISE] if saved is COLUMNWISE else [ROWWISE]
                read[plan.input, save] = (
                    found,
                    _Operands(
                        plan,
                        "input",
                        rows,
                        directions,
                        key,
                        beside,
                        found,
                        cut,
                        x.dtype,
                        x.device,
                        "forward",
                    ),
                )
            ctx.of_input, operands = read[plan.input, save]
            ctx.of_weight = {}
            if group_of_weight is not None and not isinstance(weight, QuantizedTensor):
                ctx.of_weight = _shared_amaxes(
                    plan.weight,
                    values_of(weight),
                    Direction,
                    group_of_weight,
                    dtype=plan.compute_dtype,
                )
            w, of_weight = _weight_storage(
                plan, weight, ROWWISE, x.dtype, ctx.of_weight, beside.factors[1]
            )
            adds_bias = axis is not None and not axis.column  # to the sum over ranks
            y = gemm(
                operands.take(ROWWISE),
                w,
                out_dtype=x.dtype,
                bias=None if adds_bias else bias,
                domain=resolved.domains[0],
                watch=beside.watch(resolved, 0),
            )
            amaxes = operands.amaxes
            if (
                COLUMNWISE in plan.input.delayed_directions
                and save
                and plan.saves == "columnwise"
                and cut is not None
            ):
                known = ctx.of_input.get(COLUMNWISE)
                amaxes = amaxes | {COLUMNWISE: rows.abs().amax() if known is None else known.amax}
            if training:
                _record(beside.histories[0], plan.input, amaxes)
                _record(beside.histories[1], plan.weight, of_weight)
            if save:
                ctx.saved_codes, ctx.keeps_key = saved, key is not None and saved is not COLUMNWISE
                kept = [x]
                if saved is not None:
                    kept = buffers_of(
                        operands.own_rowwise if saved is ROWWISE else operands.take(COLUMNWISE)
                    )
                ctx.save_for_backward(*kept, *([key] if ctx.keeps_key else []))
            y = torch_compat.reshaped(y, (*ctx.shape[:-1], y.shape[-1]))
            y = _summed_output(y, axis) if adds_bias else y
            return y + bias.to(y.dtype) if adds_bias and bias is not None else y

    @staticmethod
    def backward(ctx, dy):
        with opaque.tracing(), torch.autocast(dy.device.type, enabled=False):
            dx, dw, db = _gradients(ctx, dy)
            dx = (dx, None) if not ctx.needs_input_grad[1] else (None, dx)
            return *dx, dw, db, None, None, None, None, None, None, None


def _summed_output(y: Tensor, axis: TensorParallel) -> Tensor:
    """The sum of y over ranks, or this rank's rows of it."""
    if axis.sequence_dim is None:
        return axis.sum(y) if axis.reduces else y
    cut = SequenceCut.of_whole(tuple(y.shape), axis.sequence_dim, axis.group)
    return torch_compat.reshaped(Scattering(y.reshape(-1, y.shape[-1]), cut).wait(), cut.shape)


def _gradients(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    plan, weight, beside, axis = ctx.plan, ctx.weight, ctx.beside, ctx.axis
    (to_x, to_shared, need_w, need_b), n = ctx.needs_input_grad[:4], weight.shape[0]
    need_x = to_x or to_shared
    rows, cut = dy.reshape(-1, n), None if axis is None else axis.cut_of("grad_output", dy)
    resolved = plan.resolved(dy.dtype, dy.device)
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    dx = dw = db = None
    if need_b:
        db = bias_gradient(plan, rows, directions)
        db = (db if cut is None else axis.sum(db)).to(ctx.bias_dtype)
    if not directions:
        return None, None, db
    key = beside.key(
        plan, "grad_output", rows.shape[0] if cut is None else cut.rows * cut.ranks, dy
    )
    statistics = _slot_statistics(plan, "grad_output", rows, [directions], axis, cut)
    operands = _Operands(
        plan, "grad_output", rows, directions, key, beside, statistics, cut, dy.dtype, dy.device
    )
    if need_w and ctx.cut is not None:
        x = _saved_input(ctx, dy)
    if need_x:
        d = operands.take(ROWWISE)
        # FSDP2 fills its codes then
        with torch_compat.kept_in_backward(isinstance(weight, QuantizedTensor)):
            w, _ = _weight_storage(
                plan, weight, COLUMNWISE, dy.dtype, ctx.of_weight, beside.factors[1]
            )
            dx = gemm(
                d,
                w,
                out_dtype=dy.dtype,
                domain=resolved.domains[1],
                watch=beside.watch(resolved, 1),
            ).view(ctx.shape)
        if axis is not None and axis.column and axis.sequence_dim is None and axis.reduces:
            dx = axis.sum(dx)
    if need_w:
        if ctx.cut is None:
            x = _saved_input(ctx, dy)
        watch = beside.watch(resolved, 2)
        dw = gemm(
            operands.take(COLUMNWISE),
            x(),
            out_dtype=dy.dtype,
            domain=resolved.domains[2],
            watch=watch,
        ).to(weight.dtype)
    if ctx.training:
        _record(beside.histories[2], plan.grad_output, operands.amaxes)
    return dx, dw, db


class Ranks(NamedTuple):
    """How ranks share a layer, in constants that dynamo records: fields of
    `exchange.TensorParallel`.

    spans_weight:  scales of a whole weight are those of all ranks' parts of it.
    dtype:         in which x is multiplied.
    """

    group_name: str
    column: bool
    sequence_dim: int | None
    reduces: bool
    spans_weight: bool
    dtype: torch.dtype


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
    guards:     those of `Beside`, or [].
    factors, histories:  of the delayed sides of input, weight and grad_output, one after the other.
    rank:       of `Beside`.
    ranks:      `Ranks`, where ranks share the layer; x may then be a DTensor that is cut along the
                sequence.
    """
    plan = plan_of(plan) if ranks is not None else plan_of(plan).on(x.dtype, x.device)
    counts = [len(plan.hybrid(slot).delayed_directions) for slot in SLOTS]
    of = ([], [], []), ([], [], [])
    for flat, by_slot in zip((list(factors), list(histories)), of):
        for here, count in zip(by_slot, counts):
            here.extend(flat[:count])
            del flat[:count]
    if len(factors) < sum(counts):
        raise ValueError(
            "a compiled region entered fq.autocast with delayed scaling, whose histories cannot be "
            "made while a graph is traced; run it once in eager mode first"
        )
    axis = shared = group_of_weight = None
    if ranks is not None:
        of_layer, owner = Ranks(*ranks), x
        axis = TensorParallel(torch_compat.group_of_name(of_layer.group_name), *of_layer[1:4])
        group_of_weight = axis.group if of_layer.spans_weight else None
        x = (x.to_local() if isinstance(x, DTensor) else x).to(of_layer.dtype)
        if axis.gathered_slot == "input":
            shared = _shared_input(owner, x, axis)
    step, ids = (None if t is None else t.to(x.device) for t in (step, ids))
    beside = Beside(step, ids, rank, *(guards or (None, None)), *of)
    gradient = None if shared is None else shared.gradient
    return _TracedLinear.apply(
        x, gradient, weight, bias, plan, save, training, beside, axis, shared, group_of_weight
    )

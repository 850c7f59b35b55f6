# SPDX-License-Identifier: Apache-2.0
"""The linear operator among ranks: a gather before it, a reduce-scatter behind it, or both in its
backward.

[Note: who holds what]
    column  W [N / R, K], x whole or cut along the sequence, y [.., S, N / R]; dx is a sum over
            ranks
    row     W [N, K / R], x [.., S, K / R]; y is a sum over ranks, whole or cut along the sequence

    column, cut   y = gemm(gather(Q(x).row), w.row)        dx = reduce_scatter(gemm(Q(dy).row,
                                                           w.col)) dw = gemm(Q(dy).col,
                                                           gather(Q(x).col))
    row, cut      y = reduce_scatter(gemm(Q(x).row, w.row))   dx = gemm(gather(Q(dy).row), w.col)
                                                              dw = gemm(gather(Q(dy).col), Q(x).col)
Columnwise gathers run beside dgrad, the scatter of dx beside the wgrad of the last layer that reads
x. Scales of a whole tensor are shared over the ranks, of weights too. Layers that read one x (q, k
and v; gate and up) share its codes, in both directions, and the scatter of their gradients. This is
eager mode's executor; in compiled graphs `modules.traced_linear` does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import gemm
from ..ops.layout import COMPACT
from ..quantizer import HybridQuantizer
from ..storage import Storage, matrix_over, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from .exchange import (
    Gather,
    Scattering,
    SequenceCut,
    TensorParallel,
    encoded_rows,
    scattered_product,
    shared_statistics,
)
from .layer_runtime import LayerRuntime
from .linear_op import LinearCall
from .operands import (
    bias_gradient,
    buffers_of,
    record,
    recorded_amaxes,
    refuse_codes,
    saved_columnwise,
    slot_key,
    weight_storages,
)
from .plan import GemmPlan


@dataclass(eq=False)
class SharedCall:
    """A `LinearCall`, and how ranks share the layer."""

    linear: LinearCall
    name: str
    axis: TensorParallel
    grad: bool
    require_native: bool

    @property
    def plan(self) -> GemmPlan:
        return self.linear.plan

    @property
    def save(self) -> bool:
        return self.linear.save

    def quantize_own(
        self, slot: str, x: Tensor, directions
    ) -> tuple[dict[Direction, EncodedMatrix], list[Tensor]]:
        """`quantize` of a tensor of which other ranks have other columns, or that is the same on
        every rank."""
        statistics = {}
        if slot == self.axis.cut_slot:
            statistics = shared_statistics(
                x, self.plan.hybrid(slot), directions, self.axis.group, rows_are_cut=False
            )
        return self.linear.quantize(slot, x, directions, statistics)

    def gather(
        self, slot: str, x: Tensor | Storage, directions, cut: SequenceCut, phase: str
    ) -> Gather:
        """Of a tensor of which other ranks have other rows."""
        return Gather(
            x,
            self.plan.hybrid(slot),
            directions,
            cut,
            phase,
            key=self.key(slot, cut),
            factors=self.by_direction(slot),
        )

    def key(self, slot: str, cut: SequenceCut) -> Tensor | None:
        return slot_key(self.plan, slot, self.linear.step, self.linear.ids, cut.rows * cut.ranks)

    def by_direction(self, slot: str) -> dict[Direction, Tensor]:
        delayed = self.plan.hybrid(slot).delayed_directions
        return dict(
            zip(delayed, self.linear.factors if slot == "input" else self.linear.grad_factors)
        )

    def layout(self, slot: str, direction: Direction, x: Tensor) -> str:
        """How the product of activations like x reads a slot."""
        return (
            self.plan.resolved(x.dtype, x.device).layouts[slot][direction] if x.numel() else COMPACT
        )

    def check_travels(self, slot: str, directions, cut: SequenceCut) -> None:
        if self.require_native:
            check_travels(self, self.plan.hybrid(slot), slot, directions, cut)


def check_travels(
    of: SharedCall | LayerRuntime, hybrid: HybridQuantizer, slot: str, directions, cut: SequenceCut
) -> None:
    """Raise ValueError, on every rank, for a gather in high precision.

    of:  names the layer. A graph does not depend on the name, so it is read in the error alone.
    """
    crossing = [
        d
        for d in gathered_directions(hybrid, frozenset(directions))
        if not cut.travels(hybrid.encodings[d])
    ]
    if not crossing:
        return
    name, fmt, d = (
        of.name,
        hybrid.encodings[crossing[0]].fmt,
        crossing[0],
    )
    raise ValueError(
        f"{name}: {slot}.{d.value} ({fmt}) has blocks of {fmt.row_alignment(d)} rows, and a rank's "
        f"piece of the sequence is {cut.outer} x {cut.chunk} rows, so {slot} would be gathered in "
        "high precision, and require_native=True; make the rows a rank has a multiple of "
        f"{fmt.row_alignment(d)} (sequence first, or one sequence, where it is rounded "
        "stochastically), or drop require_native"
    )


class LaidOut:
    """A whole compact storage, in the layouts in which products have read it.

    The guard may have moved a product of one layer, on one rank: what it reads is laid out for it,
    never gathered again.
    """

    def __init__(self, compact: Storage):
        self.compact = compact
        self._made: dict[str, EncodedMatrix] = {}

    def to_layout(self, layout: str) -> EncodedMatrix:
        if layout not in self._made:
            self._made[layout] = to_layout(self.compact, layout)
        return self._made[layout]


class SharedInput:
    """A cut input of column layers: what crosses ranks once for all of them.

    saves:  what the backward gathers its columnwise codes from: "columnwise" or "rowwise" codes of
            this rank's rows, or its rows in high precision ("input").
    """

    def __init__(self, call: SharedCall, cut: SequenceCut):
        hybrid = call.plan.input
        call.check_travels("input", Direction if call.save else [ROWWISE], cut)
        self.cut = cut
        source = COLUMNWISE if call.plan.saves == "columnwise" else ROWWISE
        travels = call.plan.saves == "input" or cut.travels(hybrid.encodings[source])
        self.saves = call.plan.saves if travels else "input"
        self._readers = self._read = self._summands = self._summed = 0
        self._columnwise: Gather | LaidOut | None = None
        self._backward = -1  # that the following belong to
        self._dx: Tensor | None = None
        self._scattering: Scattering | None = None

    def encode(self, call: SharedCall, x: Tensor) -> tuple[LaidOut, list[Tensor], list[Tensor]]:
        """(rowwise codes of the whole x, what the backward keeps, amaxes of delayed sides); x: this
        rank's rows."""
        hybrid, cut, local, amaxes = call.plan.input, self.cut, {}, {}
        keeps_columnwise = call.save and self.saves == "columnwise"
        row_travels = cut.all_travel(hybrid, [ROWWISE])
        own = [
            d for d, wanted in ((ROWWISE, row_travels), (COLUMNWISE, keeps_columnwise)) if wanted
        ]
        if own:
            local, amaxes = encoded_rows(
                x, hybrid, own, cut, call.key("input", cut), call.by_direction("input")
            )
        gather = call.gather(
            "input", local[ROWWISE] if row_travels else x, [ROWWISE], cut, "forward"
        )
        rowwise = LaidOut(gather.take(ROWWISE))
        kept = {
            "input": lambda: [x],
            "columnwise": lambda: list(local[COLUMNWISE].buffers().values()),
            "rowwise": lambda: list(local[ROWWISE].buffers().values()),
        }
        saved = kept[self.saves]() if call.save else []
        return rowwise, saved, recorded_amaxes(hybrid, gather.amaxes | amaxes, x)

    def is_read(self, wgrad: bool, dgrad: bool) -> None:
        """A layer multiplied it, and its backward will make these."""
        self._readers += wgrad
        self._summands += dgrad

    def start_columnwise(self, call: SharedCall, saved: list[Tensor], dtype: torch.dtype) -> None:
        """Start gathering the columnwise codes, unless another layer has."""
        if self._columnwise is None:
            x = saved[0] if self.saves == "input" else self._saved_storage(call.plan, saved, dtype)
            self._columnwise = call.gather("input", x, [COLUMNWISE], self.cut, "backward")

    def _saved_storage(self, plan: GemmPlan, saved: list[Tensor], dtype: torch.dtype) -> Storage:
        direction = COLUMNWISE if self.saves == "columnwise" else ROWWISE
        fmt, shape = plan.input.side(direction).fmt, (self.cut.rows, self.cut.shape[-1])
        return Storage.over(saved, fmt, direction, shape, dtype)

    def columnwise(self, layout: str) -> EncodedMatrix:
        self._read += 1
        codes = self._columnwise
        if codes is None:
            raise ValueError("the columnwise codes of the shared input were not gathered")
        if isinstance(codes, Gather):
            codes = self._columnwise = LaidOut(codes.take(COLUMNWISE))
        if self._read >= self._readers:  # the last one
            self._columnwise, self._read = None, 0
        return codes.to_layout(layout)

    def add(self, multiply: Callable[..., Tensor]) -> None:
        """Add a layer's dx, which `multiply(out=, accumulate=)` makes; the last one starts the
        scatter."""
        self._enter()
        self._dx = multiply(out=self._dx, accumulate=self._dx is not None)
        self._summed += 1
        if self._summed == self._summands:
            self._scatter(self._dx)

    def _enter(self) -> None:
        """Forget what an earlier backward left, which wanted gradients of weights alone."""
        if self._backward != (now := torch_compat.backward_number()):
            self._backward, self._dx, self._summed, self._scattering = now, None, 0, None

    def _scatter(self, dx: Tensor) -> None:
        self._scattering, self._dx, self._summed = Scattering(dx, self.cut), None, 0

    def gradient(self) -> Tensor | None:
        """The sum over layers and ranks, of this rank's rows; None where no layer took part."""
        self._enter()
        if self._dx is not None:  # not every layer took part in this backward
            self._scatter(self._dx)
        if self._scattering is None:
            return None
        scattering, self._scattering = self._scattering, None
        return scattering.wait().view(self.cut.shape)


class _GatherInput(torch.autograd.Function):
    """x of this rank as the layers read it; its gradient is what they leave with the
    `SharedInput`."""

    @staticmethod
    def forward(ctx, x, shared):
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx, _):
        return ctx.shared.gradient(), None


def _shared_input(
    x: Tensor, owner: Tensor, call: SharedCall
) -> tuple[SharedInput, Tensor, LaidOut, list[Tensor]]:
    """(what layers share of x, x at the boundary, its rowwise codes, what the backward keeps).

    The first of several layers that are given one tensor leaves it with the tensor, for the others.
    What decides whether it is made again is the same on every rank, so not which products the guard
    has moved.

    owner:  the tensor that several layers are given: x, or the DTensor over it.
    """
    plan, values = call.plan, torch_compat.local_of(owner)
    seen = (
        0 if values.is_inference() else values._version,
        x.dtype,
        plan.input,
        plan.saves,
        call.axis.sequence_dim,
        call.save,
        call.grad,
    )
    alone = plan.input.is_stochastic or plan.input.delayed_directions or values.is_inference()
    before, made = owner.__dict__.get("_fq_shared_input", (None, None))
    if alone or before != seen:
        make = SequenceCut.of_whole if isinstance(owner, DTensor) else SequenceCut.of_local
        cut = make(tuple(owner.shape), call.axis.cut_dim, call.axis.group, f"{call.name} input")
        shared = SharedInput(call, cut)
        with torch.no_grad():
            rowwise, saved, amaxes = shared.encode(call, x.detach().reshape(-1, x.shape[-1]))
        record(call.linear.histories, amaxes)
        made = shared, _GatherInput.apply(x, shared), rowwise, saved
        if not alone:
            vars(owner)["_fq_shared_input"] = seen, made
    return made


class _Linear(torch.autograd.Function):
    """y of a layer that ranks share; `shared` and what belongs to it are of a cut x."""

    @staticmethod
    def forward(ctx, x, weight, bias, call, shared, rowwise, saved):
        plan, axis = call.plan, call.axis
        ctx.weight, ctx.call, ctx.shared, ctx.layout = weight, call, shared, None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_shape = tuple(x.shape) if shared is None else shared.cut.whole_shape
        own_bias, cut = bias if axis.column else None, None
        if not axis.column and axis.sequence_dim is not None:
            y_shape = *x.shape[:-1], weight.shape[0]
            cut = SequenceCut.of_whole(y_shape, axis.cut_dim, axis.group, f"{call.name} output")
            call.check_travels("grad_output", Direction if call.grad else (), cut)
        keeps = ctx.needs_input_grad[0] and not isinstance(weight, QuantizedTensor)
        w = weight_storages(
            weight,
            [ROWWISE, *([COLUMNWISE] if keeps else [])],
            plan,
            call.linear.state,
            x.dtype,
            call.linear.records,
        )
        if shared is None:
            y, saved = _multiply_own(call, x, w[ROWWISE], own_bias, cut)
        else:
            shared.is_read(ctx.needs_input_grad[1], ctx.needs_input_grad[0])
            codes = rowwise.to_layout(call.layout("input", ROWWISE, x))
            resolved = plan.resolved(x.dtype, x.device)
            watch = call.linear.watch(resolved, 0)
            y = gemm(
                codes,
                w[ROWWISE],
                out_dtype=x.dtype,
                bias=own_bias,
                domain=resolved.domains[0],
                watch=watch,
            )
        shape = (*(ctx.x_shape if cut is None else cut.shape)[:-1], y.shape[-1])
        y = torch_compat.reshaped(y, shape)
        kept = [x] if call.save and shared is None and plan.saves == "input" else saved
        ctx.count = len(kept)
        if keeps:
            ctx.layout = w[COLUMNWISE].layout
        ctx.save_for_backward(*kept, *(buffers_of(w[COLUMNWISE]) if keeps else []))
        if not axis.column:
            if cut is None and axis.reduces:
                y = axis.sum(y)
            y = y if bias is None else y + bias.to(y.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        with torch.autocast(dy.device.type, enabled=False):
            return *_backward(ctx, dy), None, None, None, None


def _multiply_own(
    call: SharedCall, x: Tensor, w: EncodedMatrix, bias: Tensor | None, cut: SequenceCut | None
) -> tuple[Tensor, list[Tensor]]:
    """(y, what the backward keeps) of an x that no one else has rows of; with `cut`, this rank's
    rows of the sum of y."""
    plan, resolved = call.plan, call.plan.resolved(x.dtype, x.device)
    refuse_codes(x, plan, call.save)
    keeps = resolved.saved if call.save and plan.saves != "input" else None
    made, amaxes = call.quantize_own(
        "input", x.reshape(-1, x.shape[-1]), [ROWWISE, *([keeps] if keeps is COLUMNWISE else [])]
    )
    record(call.linear.histories, amaxes)
    multiply = functools.partial(
        gemm,
        b=w,
        out_dtype=x.dtype,
        bias=bias,
        domain=resolved.domains[0],
        watch=call.linear.watch(resolved, 0),
    )
    pieces = 1 if cut is None else _pieces(cut, w.shape)
    y = (
        multiply(made[ROWWISE])
        if cut is None
        else scattered_product(multiply, made[ROWWISE], cut, pieces)
    )
    return y, [] if keeps is None else buffers_of(made[keeps])


# Sums are scattered in two pieces, one beside the product of the other, where the products of a
# rank's rows stay large. Over one after the other, 8192 tokens on two H200s: .95 of the time
# ([14336] -> [8192]) and .89 ([4096] -> [8192]); four pieces 1.04 and .97; an all-gather beside the
# product of this rank's own rows 1.01 ([8192] -> [14336] and [5120]), which is left out.
PIECES, LEAST_ROWS, LEAST_WEIGHT = 2, 2048, 2**24


def _pieces(cut: SequenceCut, weight: tuple[int, int]) -> int:
    """In how many pieces a sum is scattered; the same on every rank."""
    worth = cut.chunk >= PIECES * LEAST_ROWS and prod(weight) >= LEAST_WEIGHT
    return PIECES if worth and cut.ranks > 1 and cut.outer == 1 and cut.chunk % PIECES == 0 else 1


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    call, weight, shared, axis, plan = (
        ctx.call,
        ctx.weight,
        ctx.shared,
        ctx.call.axis,
        ctx.call.plan,
    )
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    n, k = weight.shape
    dy2 = dy.reshape(-1, n)
    resolved = plan.resolved(dy.dtype, dy.device)
    domains, watches = (
        resolved.domains,
        [call.linear.watch(resolved, product) for product in range(3)],
    )
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    dx = dw = db = bias_sum = None
    cut_dy = not axis.column and axis.sequence_dim is not None
    gather, amaxes, take = None, [], dict[Direction, EncodedMatrix]().__getitem__
    if cut_dy and directions:
        cut = SequenceCut.of_local(tuple(dy.shape), axis.cut_dim, axis.group, call.name)
        gather = call.gather("grad_output", dy2, directions, cut, "backward")
        take = gather.take
    elif directions:
        made, amaxes = call.quantize_own("grad_output", dy2, directions)
        take = made.__getitem__
    saved = list(ctx.saved_tensors)
    if need_w and shared is not None:
        shared.start_columnwise(call, saved[: ctx.count], dy.dtype)
    if need_b:
        db = bias_gradient(plan, dy2, directions)
        if cut_dy and axis.group.size() > 1:
            bias_sum = dist.all_reduce(db, group=axis.group, async_op=True)
    if need_x:
        if ctx.layout is None:
            w = weight_storages(weight, [COLUMNWISE], plan, call.linear.state, dy.dtype)[COLUMNWISE]
        else:
            w = matrix_over(
                saved[ctx.count :],
                plan.operand("weight", COLUMNWISE),
                COLUMNWISE,
                (n, k),
                dy.dtype,
                ctx.layout,
            )
        multiply = functools.partial(
            gemm, take(ROWWISE), w, out_dtype=dy.dtype, domain=domains[1], watch=watches[1]
        )
        if shared is not None:
            shared.add(multiply)
        else:
            dx = multiply().view(ctx.x_shape)
            if axis.column and axis.reduces:
                dx = axis.sum(dx)
    if need_w:
        x = (
            shared.columnwise(call.layout("input", COLUMNWISE, dy))
            if shared is not None
            else _own_columnwise(ctx, saved[: ctx.count], dy)
        )
        dw = gemm(take(COLUMNWISE), x, out_dtype=dy.dtype, domain=domains[2], watch=watches[2]).to(
            weight.dtype
        )
    if gather is not None:
        amaxes = recorded_amaxes(plan.grad_output, gather.amaxes, dy)
    if directions:
        record(call.linear.grad_histories, amaxes)
    if bias_sum is not None:
        bias_sum.wait()
    return dx, dw, None if db is None else db.to(ctx.bias_dtype)


def _own_columnwise(ctx, saved: list[Tensor], dy: Tensor) -> EncodedMatrix:
    """The columnwise storage of an x that no one else has rows of, from what the plan saved."""
    call = ctx.call
    x_shape = (torch.Size(ctx.x_shape[:-1]).numel(), ctx.x_shape[-1])
    if call.plan.saves == "input":
        return call.quantize_own("input", saved[0].reshape(x_shape), [COLUMNWISE])[0][COLUMNWISE]
    of = call.linear
    return saved_columnwise(call.plan, saved, x_shape, dy, of.step, of.ids, of.factors)


def multiply_in_eager_mode(
    call: SharedCall, owner: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """y. owner: as in `_shared_input`."""
    shared = rowwise = saved = None
    with torch.autocast(x.device.type, enabled=False):
        if call.axis.column and call.axis.sequence_dim is not None:
            shared, x, rowwise, saved = _shared_input(x, owner, call)
        return _Linear.apply(x, weight, bias, call, shared, rowwise, saved)

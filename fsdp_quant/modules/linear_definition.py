# SPDX-License-Identifier: Apache-2.0
"""The operator behind every linear layer, and its autograd, in Python: what the compiled call
(`linear_op`) and traced graphs (`traced_linear`) are compared with, and what they do not take.

    forward   x.rowwise, x.columnwise = quantize(x)         y  = gemm(x.rowwise, w.rowwise) + bias
              w.rowwise, w.columnwise = quantize(w)
    backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = gemm(dy.rowwise, w.columnwise)
                                                            dw = gemm(dy.columnwise, x.columnwise)

x [.., K], w [N, K], y [.., N]. A forward quantizes the weight that it multiplies, in both
directions where a backward follows; the autograd node owns the codes that the backward reads. Under
FSDP2 the weight is a `QuantizedTensor` of gathered codes, whose columnwise buffers are freed after
the forward and filled again before the backward.

[Note: who holds what]
Ranks that share a layer gather before it, reduce-scatter behind it, or both in its backward.

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
and v; gate and up) share its codes, in both directions, and the scatter of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import Watch, gemm
from ..ops.layout import COMPACT
from ..quantizer import HybridQuantizer
from ..storage import Storage, matrix_over, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .exchange import (
    Gather,
    Scattering,
    SequenceCut,
    TensorParallel,
    encoded_rows,
    scattered_product,
    shared_statistics,
)
from .guard import GuardedLayer
from .operands import (
    bias_gradient,
    buffers_of,
    columnwise_of_saved,
    quantize_slot,
    record,
    recorded_amaxes,
    refuse_codes,
    slot_key,
    weight_storages,
)
from .plan import GemmPlan, Resolved


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
    axis:             how ranks share the layer; None: they do not.
    name, grad, require_native:  of a layer that ranks share: its name, a backward may follow, and
                      codes that cannot be gathered are refused.
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
    axis: TensorParallel | None = None
    name: str = ""
    grad: bool = False
    require_native: bool = False

    def factors_of(self, slot: str) -> Sequence[Tensor]:
        return self.factors if slot == "input" else self.grad_factors

    def quantize(
        self, slot: str, x: Tensor, directions
    ) -> tuple[dict[Direction, EncodedMatrix], list[Tensor]]:
        """`quantize_slot` of x [rows, cols], of which other ranks may have other columns."""
        statistics, axis = None, self.axis
        if axis is not None and slot == axis.cut_slot:
            hybrid = self.plan.hybrid(slot)
            statistics = shared_statistics(x, hybrid, directions, axis.group, rows_are_cut=False)
        factors = self.factors_of(slot)
        return quantize_slot(
            self.plan, slot, x, list(directions), self.step, self.ids, factors, statistics
        )

    def gather(
        self, slot: str, x: Tensor | Storage, directions, cut: SequenceCut, phase: str
    ) -> Gather:
        """Of a tensor of which other ranks have other rows."""
        hybrid, key, factors = self.plan.hybrid(slot), self.key(slot, cut), self.by_direction(slot)
        return Gather(x, hybrid, directions, cut, phase, key=key, factors=factors)

    def key(self, slot: str, cut: SequenceCut) -> Tensor | None:
        return slot_key(self.plan, slot, self.step, self.ids, cut.rows * cut.ranks)

    def by_direction(self, slot: str) -> dict[Direction, Tensor]:
        return dict(zip(self.plan.hybrid(slot).delayed_directions, self.factors_of(slot)))

    def layout(self, slot: str, direction: Direction, x: Tensor) -> str:
        """How the product of activations like x reads a slot."""
        layouts = self.plan.resolved(x.dtype, x.device).layouts
        return layouts[slot][direction] if x.numel() else COMPACT

    def input_columnwise(self, saved: list[Tensor], shape, dy: Tensor) -> EncodedMatrix:
        """The columnwise storage of the input [M, K], from what the plan saved."""
        if self.plan.saves == "input":
            x = saved[0].reshape(shape)
            return self.quantize("input", x, [COLUMNWISE])[0][COLUMNWISE]
        return columnwise_of_saved(
            self.plan,
            saved,
            shape,
            dy,
            lambda: slot_key(self.plan, "input", self.step, self.ids, shape[0]),
        )

    def check_travels(self, slot: str, directions, cut: SequenceCut) -> None:
        if self.require_native:
            check_travels(self, self.plan.hybrid(slot), slot, directions, cut)

    def watch(self, resolved: Resolved, product: int) -> Watch | None:
        if self.guard is None:
            return None
        return Watch(resolved.watched[product], self.step, self.guard, product)


def check_travels(
    of: LinearCall | GuardedLayer,
    hybrid: HybridQuantizer,
    slot: str,
    directions,
    cut: SequenceCut,
) -> None:
    """Raise ValueError, on every rank, for a gather in high precision.

    of:  names the layer. A graph does not depend on the name, so it is read in the error alone.
    """
    encodings = [hybrid.encodings[d] for d in gathered_directions(hybrid, frozenset(directions))]
    crossing = next((e for e in encodings if not cut.travels(e)), None)
    if crossing is None:
        return
    fmt, rows = crossing.fmt, crossing.fmt.row_alignment(crossing.direction)
    raise ValueError(
        f"{of.name}: {slot}.{crossing.direction.value} ({fmt}) has blocks of {rows} rows, and a "
        f"rank's piece of the sequence is {cut.outer} x {cut.chunk} rows, so {slot} would be "
        "gathered in high precision, and require_native=True; make the rows a rank has a multiple "
        f"of {rows} (sequence first, or one sequence, where it is rounded stochastically), or drop "
        "require_native"
    )


# An input that is cut along the sequence #


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

    def __init__(self, call: LinearCall, cut: SequenceCut):
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

    def encode(self, call: LinearCall, x: Tensor) -> tuple[LaidOut, list[Tensor], list[Tensor]]:
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

    def start_columnwise(self, call: LinearCall, saved: list[Tensor], dtype: torch.dtype) -> None:
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
    x: Tensor, owner: Tensor, call: LinearCall, axis: TensorParallel
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
        axis.sequence_dim,
        call.save,
        call.grad,
    )
    alone = plan.input.is_stochastic or plan.input.delayed_directions or values.is_inference()
    before, made = owner.__dict__.get("_fq_shared_input", (None, None))
    if alone or before != seen:
        make = SequenceCut.of_whole if isinstance(owner, DTensor) else SequenceCut.of_local
        cut = make(tuple(owner.shape), axis.cut_dim, axis.group, f"{call.name} input")
        shared = SharedInput(call, cut)
        with torch.no_grad():
            rowwise, saved, amaxes = shared.encode(call, x.detach().reshape(-1, x.shape[-1]))
        record(call.histories, amaxes)
        made = shared, _GatherInput.apply(x, shared), rowwise, saved
        if not alone:
            vars(owner)["_fq_shared_input"] = seen, made
    return made


# The definition #

# Sums are scattered in two pieces, one beside the product of the other, where the products of a
# rank's rows stay large. Over one after the other, 8192 tokens on two H200s: .95 of the time
# ([14336] -> [8192]) and .89 ([4096] -> [8192]); four pieces 1.04 and .97; an all-gather beside the
# product of this rank's own rows 1.01 ([8192] -> [14336] and [5120]), which is left out.
PIECES, LEAST_ROWS, LEAST_WEIGHT = 2, 2048, 2**24


def _pieces(cut: SequenceCut, weight: tuple[int, int]) -> int:
    """In how many pieces a sum is scattered; the same on every rank."""
    worth = cut.chunk >= PIECES * LEAST_ROWS and prod(weight) >= LEAST_WEIGHT
    return PIECES if worth and cut.ranks > 1 and cut.outer == 1 and cut.chunk % PIECES == 0 else 1


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: LinearCall,
    backward: bool,
    shared: SharedInput | None = None,
    rowwise: LaidOut | None = None,
) -> tuple[Tensor, list[Tensor], EncodedMatrix | None]:
    """(y, what the backward keeps of x, the codes of w that it reads) without autograd.

    backward:         dgrad follows. A gathered weight's codes are not kept: they are filled again.
    shared, rowwise:  of an x that is cut along the sequence, with the codes of all its rows; what
                      the backward keeps of x was made with them.
    """
    plan, axis, resolved = call.plan, call.axis, call.plan.resolved(x.dtype, x.device)
    shape = (*(x.shape if shared is None else shared.cut.whole_shape)[:-1], weight.shape[0])
    cut = None  # of y
    if axis is not None and axis.gathered_slot == "grad_output":
        cut = SequenceCut.of_whole(shape, axis.cut_dim, axis.group, f"{call.name} output")
        call.check_travels("grad_output", Direction if call.grad else (), cut)
    kept, amaxes = [], []
    if shared is None or rowwise is None:
        refuse_codes(x, plan, call.save)
        saved = resolved.saved if call.save and plan.saves != "input" else None
        wanted = [ROWWISE, *([COLUMNWISE] if saved is COLUMNWISE else [])]
        made, amaxes = call.quantize("input", x.reshape(-1, x.shape[-1]), wanted)
        codes, kept = made[ROWWISE], [] if saved is None else buffers_of(made[saved])
    else:
        shared.is_read(call.save, backward)
        codes = rowwise.to_layout(call.layout("input", ROWWISE, x))
    both = backward and not isinstance(weight, QuantizedTensor)
    wanted = [ROWWISE, *([COLUMNWISE] if both else [])]
    w = weight_storages(weight, wanted, plan, call.state, x.dtype, call.records)
    adds_bias = axis is not None and not axis.column  # to the sum over ranks
    product = functools.partial(
        gemm,
        b=w[ROWWISE],
        out_dtype=x.dtype,
        bias=None if adds_bias else bias,
        domain=resolved.domains[0],
        watch=call.watch(resolved, 0),
    )
    if cut is None:
        y = torch_compat.reshaped(product(codes), shape)
    else:
        y = scattered_product(product, codes, cut, _pieces(cut, w[ROWWISE].shape))
        y = torch_compat.reshaped(y, cut.shape)
    record(call.histories, amaxes)  # nothing can be refused any more
    if axis is not None and adds_bias:
        y = axis.sum(y) if cut is None and axis.reduces else y
        y = y if bias is None else y + bias.to(y.dtype)
    return y, kept, w.get(COLUMNWISE)


def multiply_backward(
    dy: Tensor,
    weight: Tensor,
    columnwise: EncodedMatrix | None,
    saved: list[Tensor],
    call: LinearCall,
    needs: Sequence[bool],
    shared: SharedInput | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db; None where `needs` (of x, weight, bias) says so.

    columnwise:  codes of the weight; None: it is gathered.
    shared:      of an x that is cut along the sequence, which takes dx.
    """
    plan, axis, dy2 = call.plan, call.axis, dy.reshape(-1, dy.shape[-1])
    need_x, need_w, need_b = needs
    resolved = plan.resolved(dy.dtype, dy.device)
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    cut = None if axis is None else axis.cut_of("grad_output", dy)
    x_shape = (*(dy.shape if cut is None else cut.whole_shape)[:-1], weight.shape[1])
    dx = dw = db = gather = bias_sum = None
    made, amaxes = {}, []
    if cut is not None and directions:
        gather = call.gather("grad_output", dy2, directions, cut, "backward")
    elif directions:
        made, amaxes = call.quantize("grad_output", dy2, directions)
    take = made.__getitem__ if gather is None else gather.take
    if need_w and shared is not None:
        shared.start_columnwise(call, saved, dy.dtype)
    if need_b:
        db = bias_gradient(plan, dy2, directions)
        if cut is not None and cut.ranks > 1:
            bias_sum = dist.all_reduce(db, group=cut.group, async_op=True)
    if need_x:
        w = columnwise
        if w is None:
            w = weight_storages(weight, [COLUMNWISE], plan, call.state, dy.dtype)[COLUMNWISE]
        product = functools.partial(
            gemm,
            take(ROWWISE),
            w,
            out_dtype=dy.dtype,
            domain=resolved.domains[1],
            watch=call.watch(resolved, 1),
        )
        if shared is not None:
            shared.add(product)
        else:
            dx = torch_compat.reshaped(product(), x_shape)
            dx = axis.sum(dx) if axis is not None and axis.column and axis.reduces else dx
    if need_w:
        if shared is not None:
            x = shared.columnwise(call.layout("input", COLUMNWISE, dy))
        else:
            x = call.input_columnwise(saved, (prod(x_shape[:-1]), x_shape[-1]), dy)
        dw = gemm(
            take(COLUMNWISE),
            x,
            out_dtype=dy.dtype,
            domain=resolved.domains[2],
            watch=call.watch(resolved, 2),
        )
    if gather is not None:
        amaxes = recorded_amaxes(plan.grad_output, gather.amaxes, dy)
    record(call.grad_histories, amaxes)
    if bias_sum is not None:
        bias_sum.wait()
    return dx, dw, db


class _Kept:
    """What a forward leaves for its backward (an object, which torch.func passes on as it is).

    saved: of x. columnwise: codes of the weight; None: it is gathered.
    """

    saved: list[Tensor]
    columnwise: EncodedMatrix | None


class _Definition(torch.autograd.Function):
    """backward: dgrad follows. kept: `_Kept`, which is set. Others: as of `multiply`."""

    @staticmethod
    def forward(x, weight, bias, call, backward, kept, shared, rowwise):
        with torch.autocast(x.device.type, enabled=False):
            y, saved, kept.columnwise = multiply(x, weight, bias, call, backward, shared, rowwise)
            if shared is None:
                kept.saved = saved
        return y

    @staticmethod
    def setup_context(ctx, inputs, y):
        x, weight, bias, call, _, kept, shared, _ = inputs
        columnwise = kept.columnwise
        ctx.weight, ctx.call, ctx.shared = weight, call, shared
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.layout = None if columnwise is None else columnwise.layout
        is_x = call.save and shared is None and call.plan.saves == "input"
        saved = [x] if is_x else kept.saved
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *([] if columnwise is None else buffers_of(columnwise)))

    @staticmethod
    def backward(ctx, dy):
        run = _Gradients.apply if torch.is_grad_enabled() else _Gradients.forward
        of = ctx.weight, ctx.call, ctx.shared, ctx.layout, ctx.count, ctx.bias_dtype
        grads = run(dy, *of, tuple(ctx.needs_input_grad[:3]), *ctx.saved_tensors)
        return *grads, *[None] * 5


class _Gradients(torch.autograd.Function):
    """dx, dw and db of the definition; an operator of its own under create_graph and torch.func,
    without a derivative."""

    @staticmethod
    def forward(dy, weight, call, shared, layout, count, bias_dtype, needs, *tensors):
        columnwise = None
        if layout is not None:
            fmt, shape = call.plan.operand("weight", COLUMNWISE), tuple(weight.shape)
            columnwise = matrix_over(tensors[count:], fmt, COLUMNWISE, shape, dy.dtype, layout)
        with torch.autocast(dy.device.type, enabled=False):
            saved = list(tensors[:count])
            dx, dw, db = multiply_backward(dy, weight, columnwise, saved, call, needs, shared)
        dw = None if dw is None else dw.to(weight.dtype)
        return dx, dw, None if db is None else db.to(bias_dtype)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        pass

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative(ctx)


def defined_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: LinearCall,
    backward: bool,
    owner: Tensor | None = None,
) -> Tensor:
    """y = x w^T + b in Python, of this rank's part where ranks share the layer.

    backward:  dgrad may follow.
    owner:     as in `_shared_input`; None: x.
    """
    kept, shared, rowwise = _Kept(), None, None
    if (axis := call.axis) is not None and axis.gathered_slot == "input":
        with torch.autocast(x.device.type, enabled=False):
            made = _shared_input(x, x if owner is None else owner, call, axis)
        shared, x, rowwise, kept.saved = made
    return _Definition.apply(x, weight, bias, call, backward, kept, shared, rowwise)


def refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the "
        "layers of a gradient penalty out of fq.convert"
    )

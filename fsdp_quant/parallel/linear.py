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
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Layout

from ..context import STEP, STEP_FIELDS, current_autocast
from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import gemm
from ..modules.exchange import (
    Gather,
    Scattering,
    SequenceCut,
    TensorParallel,
    encoded_rows,
    shared_statistics,
)
from ..modules.linear import Linear, attach_tensor_group
from ..modules.linear_op import (
    LinearCall,
    bias_gradient,
    buffers_of,
    record,
    recorded_amaxes,
    refuse_codes,
    saved_columnwise,
    slot_key,
    weight_storages,
)
from ..modules.plan import GemmPlan
from ..ops.layout import COMPACT
from ..quantizer import HybridQuantizer
from ..storage import Storage, matrix_over, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from .sequence import scattered_product, travelling_bytes


@dataclass(eq=False)
class Call:
    """What one call of a layer has beside its tensors, and how ranks share it."""

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
    of: Call | Linear, hybrid: HybridQuantizer, slot: str, directions, cut: SequenceCut
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
        of.name if isinstance(of, Call) else of._name,
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

    def __init__(self, call: Call, cut: SequenceCut):
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

    def encode(self, call: Call, x: Tensor) -> tuple[LaidOut, list[Tensor], list[Tensor]]:
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

    def start_columnwise(self, call: Call, saved: list[Tensor], dtype: torch.dtype) -> None:
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
        if isinstance(self._columnwise, Gather):
            self._columnwise = LaidOut(self._columnwise.take(COLUMNWISE))
        storage = self._columnwise.to_layout(layout)
        if self._read >= self._readers:  # the last one
            self._columnwise, self._read = None, 0
        return storage

    def add(self, multiply) -> None:
        """Add a layer's dx, which `multiply(out=, accumulate=)` makes; the last one starts the
        scatter."""
        self._enter()
        self._dx = multiply(out=self._dx, accumulate=self._dx is not None)
        self._summed += 1
        if self._summed == self._summands:
            self._scatter()

    def _enter(self) -> None:
        """Forget what an earlier backward left, which wanted gradients of weights alone."""
        if self._backward != (now := torch_compat.backward_number()):
            self._backward, self._dx, self._summed, self._scattering = now, None, 0, None

    def _scatter(self) -> None:
        self._scattering, self._dx, self._summed = Scattering(self._dx, self.cut), None, 0

    def gradient(self) -> Tensor | None:
        """The sum over layers and ranks, of this rank's rows; None where no layer took part."""
        self._enter()
        if self._dx is not None:  # not every layer took part in this backward
            self._scatter()
        if self._scattering is None:
            return None
        scattering, self._scattering = self._scattering, None
        return scattering.wait().view(self.cut.shape)


class _Boundary(torch.autograd.Function):
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
    x: Tensor, owner: Tensor, call: Call
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
        cut = make(
            tuple(owner.shape), call.axis.sequence_dim, call.axis.group, f"{call.name} input"
        )
        shared = SharedInput(call, cut)
        with torch.no_grad():
            rowwise, saved, amaxes = shared.encode(call, x.detach().reshape(-1, x.shape[-1]))
        record(call.linear.histories, amaxes)
        made = shared, _Boundary.apply(x, shared), rowwise, saved
        if not alone:
            owner.__dict__["_fq_shared_input"] = seen, made
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
            cut = SequenceCut.of_whole(
                y_shape, axis.sequence_dim, axis.group, f"{call.name} output"
            )
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
    call: Call, x: Tensor, w: EncodedMatrix, bias: Tensor | None, cut: SequenceCut | None
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
_PIECES, _LEAST_ROWS, _LEAST_WEIGHT = 2, 2048, 2**24


def _pieces(cut: SequenceCut, weight: tuple[int, int]) -> int:
    """In how many pieces a sum is scattered; the same on every rank."""
    worth = cut.chunk >= _PIECES * _LEAST_ROWS and prod(weight) >= _LEAST_WEIGHT
    return _PIECES if worth and cut.ranks > 1 and cut.outer == 1 and cut.chunk % _PIECES == 0 else 1


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
    if cut_dy:
        cut = SequenceCut.of_local(tuple(dy.shape), axis.sequence_dim, axis.group, call.name)
        gather = (
            call.gather("grad_output", dy2, directions, cut, "backward") if directions else None
        )
        take = gather.take if directions else None
    else:
        made, amaxes = call.quantize_own("grad_output", dy2, directions) if directions else ({}, [])
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
    if cut_dy and directions:
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


# The plan #


def planned_gathers(
    layer: Linear, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[tuple, int]:
    """What a layer gathers along the sequence in a forward and backward: (pass, direction, format)
    -> bytes, as `receipt` counts.

    shape, dim:  of this rank's part of the tensor that is cut: x of a column layer, y of a row
                 layer.
    Layers that share an input gather once together.
    """
    axis = _axis_of(layer, dim)
    cut, planned = SequenceCut.of_local(tuple(shape), dim, axis.group, layer._name), {}
    hybrid = layer.plan.input if axis.column else layer.plan.grad_output
    passes = (
        [("forward", [ROWWISE]), ("backward", [COLUMNWISE])]
        if axis.column
        else [("backward", list(Direction))]
    )
    for phase, directions in passes:
        if not cut.all_travel(hybrid, directions):
            planned[phase, "both", "high precision"] = (
                cut.ranks * cut.rows * shape[-1] * dtype.itemsize
            )
            continue
        for d in gathered_directions(hybrid, frozenset(directions)):
            size = travelling_bytes(hybrid.encodings[d], cut.rows, shape[-1], dtype, cut.chunk)
            planned[phase, d.value, hybrid.side(d).fmt.name] = cut.ranks * size
    return planned


def _axis_of(layer: Linear, dim: int | None) -> TensorParallel | None:
    if isinstance(layer.parallel, TensorParallel):
        return layer.parallel
    state = layer._weight_state
    return (
        None
        if state.tensor_group is None
        else TensorParallel(state.tensor_group, state.tensor_dim == 0, dim)
    )


def describe(layer: Linear) -> str | None:
    """A line of `fq.plan` about what ranks exchange for a layer; None where it is not shared."""
    axis = _axis_of(layer, None)
    if axis is None:
        return None
    hybrid, slot = (
        (layer.plan.input, "input") if axis.column else (layer.plan.grad_output, "grad_output")
    )
    said = []
    for d, encoding in hybrid.encodings.items():
        rows = encoding.fmt.row_alignment(d)
        unless = (
            f" (in high precision unless a rank has a multiple of {rows} rows)" if rows > 1 else ""
        )
        said.append(f"{d.value} {encoding.fmt}{unless}")
    kind, pieces = "column" if axis.column else "row", ""
    if not axis.column and prod(layer._weight_state.shape) >= _LEAST_WEIGHT:
        pieces = f"; sums of {_PIECES * _LEAST_ROWS} or more rows a rank are scattered in {_PIECES} pieces beside their products"
    return f"tensor parallel over {axis.group.size()} ranks, {kind} layers: {slot} is gathered as {', '.join(said)}{pieces}"


# A layer's forward #


@dataclass(frozen=True)
class Layouts:
    """What a style says of a layer whose weight is a DTensor: how plain inputs lie, and how the
    output is wanted."""

    input: Layout
    output: Layout
    use_local_output: bool


def _step_of(axis: TensorParallel, step: Tensor) -> Tensor:
    """The step's tensor of ranks that hold one batch together."""
    if STEP.token_offset < 0:  # else it says where this rank's rows are
        step = step.clone()
        # a launch that graphs capture
        step[STEP_FIELDS.index("data_parallel_rank")].fill_(axis.data_parallel_rank)
    return step


def forward(layer: Linear, x: Tensor) -> Tensor:
    """y of a layer that ranks share: a DTensor where its weight is one, unless the style asks for
    local outputs."""
    if not x.dtype.is_floating_point:
        raise ValueError(
            f"{layer._name}: input is {x.dtype}; a linear layer multiplies floating tensors"
        )
    if not isinstance(layer.weight, DTensor):
        return multiply_shared(layer, x, x, layer.weight, layer.bias, layer.parallel)
    weight, bias, layouts = layer.weight, layer.bias, layer.parallel
    state = layer._weight_state
    if state.tensor_group is None and weight.device_mesh.ndim == 1:
        attach_tensor_group(layer)
    if state.tensor_group is None or weight.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"{layer._name}: the weight is a DTensor {weight.placements} that is gathered by no "
            "fully_shard and cut by no parallelize_module; use one of them, or leave the module "
            "out of fq.convert"
        )
    mesh, column = weight.device_mesh, weight.placements[0].is_shard(0)
    wanted = layouts.input if layouts is not None else Replicate() if column else Shard(-1)
    local, sequence_dim, reduces = _local_input(x, mesh, column, wanted)
    if column:
        axis, placement = (
            TensorParallel(state.tensor_group, True, sequence_dim, reduces),
            Shard(x.dim() - 1),
        )
    else:
        placement = (
            layouts.output
            if layouts is not None and _cuts_sequence(layouts.output, x.dim())
            else Replicate()
        )
        cut = None if placement.is_replicate() else placement.dim % x.dim()
        axis = TensorParallel(state.tensor_group, False, cut)
    y = multiply_shared(
        layer, x, local, weight.to_local(), None if bias is None else bias.to_local(), axis
    )
    if (
        layouts is not None
        and layouts.use_local_output
        and _same(layouts.output, placement, x.dim())
    ):
        return y
    return DTensor.from_local(y, mesh, [placement], run_check=False)


def _local_input(x: Tensor, mesh, column: bool, layout: Layout) -> tuple[Tensor, int | None, bool]:
    """(this rank's part of x as the layer multiplies it, the dim it is cut along, its gradient is
    to be summed here)."""
    if isinstance(x, DTensor):
        layout = x.placements[0]
    dims = x.dim()
    if column and _cuts_sequence(layout, dims):
        return (x.to_local() if isinstance(x, DTensor) else x), layout.dim % dims, False
    wanted = Replicate() if column else Shard(dims - 1)
    if not _same(layout, wanted, dims):
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)
        if not layout.is_replicate() and not torch.compiler.is_compiling():
            counters.add("sequence gather", ("forward", "both", "high precision"), x.nbytes)
        x = x.redistribute(placements=[wanted])
    if not isinstance(x, DTensor):
        return x, None, True
    return x.to_local(grad_placements=[Partial()] if column else None), None, False


def _cuts_sequence(layout: Layout, dims: int) -> bool:
    return layout.is_shard() and layout.dim % dims != dims - 1


def _same(a: Layout, b: Layout, dims: int) -> bool:
    return a == b or (a.is_shard() and b.is_shard() and a.dim % dims == b.dim % dims)


def multiply_shared(
    layer: Linear,
    owner: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: TensorParallel,
) -> Tensor:
    """y of a layer that ranks share as `axis` says; owner: as in `_shared_input`."""
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{layer._name}: this rank's input is {list(x.shape)}, wanted [.., {weight.shape[1]}] "
            f"of at least two dims, for a weight of which it holds {list(weight.shape)}"
        )
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    override = current_autocast()
    plan = layer.plan if override is None else layer._overriding_plan(override)
    if plan.boundary is not None:
        raise NotImplementedError(
            f"{layer._name}: layers that ranks share have no boundary slots; put fq.Quantize "
            "between modules"
        )
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        owner = owner if axis.gathered_slot == "input" else x
        _check(layer, owner, weight, plan, axis, grad)
        ranks = (
            axis.group.group_name,
            axis.column,
            axis.sequence_dim,
            axis.reduces,
            override is None,
            dtype,
        )
        return layer.traced(owner, weight, bias, plan, weight.requires_grad and grad, ranks)
    return _multiply(layer, owner, x.to(dtype), weight, bias, plan, axis, grad)


@torch.compiler.disable  # what runs where a graph broke; a graph holds `traced_linear`
def _multiply(
    layer: Linear,
    owner: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemmPlan,
    axis: TensorParallel,
    grad: bool,
) -> Tensor:
    """Run the eager operator."""
    of = layer.call(x, weight, plan, weight.requires_grad and grad, grad)
    if axis.group.size() > 1 and (plan.input.is_stochastic or plan.grad_output.is_stochastic):
        of = of._replace(
            step=_step_of(axis, of.step), ids=axis.slot_ids(layer._name, weight.shape, x.device)
        )
    call, shared, rowwise, saved = (
        Call(of, layer._name, axis, grad, layer._recipe.require_native),
        None,
        None,
        None,
    )
    with torch.autocast(x.device.type, enabled=False):
        if axis.column and axis.sequence_dim is not None:
            shared, x, rowwise, saved = _shared_input(x, owner, call)
        return _Linear.apply(x, weight, bias, call, shared, rowwise, saved)


def _check(
    layer: Linear, owner: Tensor, weight: Tensor, plan: GemmPlan, axis: TensorParallel, grad: bool
) -> None:
    """Raise what the eager layer raises of a cut before its first collective, while a graph is
    traced.

    owner:  x, or the DTensor over it.
    """
    slot, dim = axis.gathered_slot, axis.sequence_dim
    if slot is None:
        return
    shape = tuple(owner.shape) if axis.column else (*owner.shape[:-1], weight.shape[0])
    is_whole, of_weight = (
        not axis.column or isinstance(owner, DTensor),
        weight.requires_grad and grad,
    )
    make, last = SequenceCut.of_whole if is_whole else SequenceCut.of_local, len(shape) - 1
    if (
        not -len(shape) <= dim < len(shape)
        or dim % len(shape) == last
        or (is_whole and shape[dim] % axis.group.size())
    ):
        make(shape, dim, axis.group, f"{layer._name} {'input' if axis.column else 'output'}")
    if layer._recipe.require_native:
        read = (
            (tuple(Direction) if of_weight else (ROWWISE,))
            if axis.column
            else tuple(Direction)
            if grad
            else ()
        )
        check_travels(layer, plan.hybrid(slot), slot, read, make(shape, dim, axis.group))


Linear.parallel_forward = forward

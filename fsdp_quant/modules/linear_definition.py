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

    column, cut   y = gemm(gather(Q(x).row), w.row)
                  dx = reduce_scatter(gemm(Q(dy).row, w.col))
                  dw = gemm(Q(dy).col, gather(Q(x).col))
    row, cut      y = reduce_scatter(gemm(Q(x).row, w.row))
                  dx = gemm(gather(Q(dy).row), w.col)
                  dw = gemm(gather(Q(dy).col), Q(x).col)

Columnwise gathers overlap dgrad, the scatter of dx overlaps the wgrad of the last layer that reads
x. Scales of a whole tensor are shared over the ranks, of weights too. Layers that read one x (q, k
and v; gate and up) share its codes, in both directions, and the scatter of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops.reference import known
from ..storage import Storage, matrix_over, to_layout
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from .exchange import Gather, Scattering, SequenceCut, TensorParallel, encoded_rows
from .linear_products import LinearCall, gradients, product
from .operands import (
    buffers_of,
    columnwise_of_saved,
    decoded_columnwise,
    refuse_codes,
    slot_key,
    weight_storages,
)
from .plan import GemmPlan

# An input that is cut along the sequence #


class LaidOut:
    """A whole compact storage, in the layouts in which products have read it.

    The guard may have moved a product of one layer, on one rank: it reads another layout.
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

    def encode(self, call: LinearCall, x: Tensor) -> tuple[LaidOut, list[Tensor]]:
        """(rowwise codes of the whole x, what the backward keeps), and record amaxes."""
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
        call.record("input", gather.amaxes | amaxes)
        if not call.save:
            return rowwise, []
        return rowwise, [x] if self.saves == "input" else buffers_of(local[self._saved_direction])

    def is_read(self, wgrad: bool, dgrad: bool) -> None:
        """A layer multiplied it, and its backward will make these."""
        self._readers += wgrad
        self._summands += dgrad

    def start_columnwise(self, call: LinearCall, saved: list[Tensor], dtype: torch.dtype) -> None:
        """Start gathering the columnwise codes, unless another layer has."""
        if self._columnwise is None:
            x, direction = saved[0], self._saved_direction
            if self.saves != "input":
                fmt, cols = call.plan.input.side(direction).fmt, self.cut.shape[-1]
                x = Storage.over(saved, fmt, direction, (self.cut.rows, cols), dtype)
            self._columnwise = call.gather("input", x, [COLUMNWISE], self.cut, "backward")

    @property
    def _saved_direction(self) -> Direction:
        return COLUMNWISE if self.saves == "columnwise" else ROWWISE

    def columnwise(self, layout: str) -> EncodedMatrix:
        self._read += 1
        codes = known(self._columnwise, "the gather of the shared input")
        if isinstance(codes, Gather):
            codes = self._columnwise = LaidOut(codes.take(COLUMNWISE))
        if self._read >= self._readers:  # the last one
            self._columnwise, self._read = None, 0
        return codes.to_layout(layout)

    def add(self, multiply: Callable[..., Tensor]) -> None:
        """Add a layer's dx, `multiply(out=, accumulate=)`; the last one starts the scatter."""
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
    """x of this rank, whose gradient is what the layers leave with the `SharedInput`."""

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

    The first of several layers that are given one tensor leaves it with the tensor, for the others,
    if what all ranks know is the same: not which products the guard moved.

    owner:  the tensor that several layers are given: x, or the DTensor over it.
    """
    plan, values = call.plan, torch_compat.local_of(owner)
    version = 0 if values.is_inference() else values._version
    seen = version, x.dtype, plan.input, plan.saves, axis.sequence_dim, call.save, call.grad
    alone = plan.input.is_stochastic or plan.input.delayed_directions or values.is_inference()
    before, shared_with = owner.__dict__.get("_fq_shared_input", (None, None))
    if alone or before != seen:
        make = SequenceCut.of_whole if isinstance(owner, DTensor) else SequenceCut.of_local
        cut = make(tuple(owner.shape), axis.cut_dim, axis.group, f"{call.name} input")
        shared = SharedInput(call, cut)
        with torch.no_grad():
            rowwise, saved = shared.encode(call, x.detach().reshape(-1, x.shape[-1]))
        shared_with = shared, _GatherInput.apply(x, shared), rowwise, saved
        if not alone:
            vars(owner)["_fq_shared_input"] = seen, shared_with
    return shared_with


# The definition #


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: LinearCall,
    backward: bool,
    shared: SharedInput | None = None,
    rowwise: LaidOut | None = None,
) -> tuple[Tensor, list[Tensor], EncodedMatrix | None]:
    """(y, what the backward keeps of x, the codes of w from which it multiplies) without autograd.

    backward:         dgrad follows. A gathered weight's codes are not kept: they are filled again.
    shared, rowwise:  of an x that is cut along the sequence, with the codes of all its rows.
    """
    plan, axis, resolved = call.plan, call.axis, call.plan.resolved(x.dtype, x.device)
    shape = (*(x.shape if shared is None else shared.cut.whole_shape)[:-1], weight.shape[0])
    cut = None if axis is None else axis.output_cut(shape, f"{call.name} output")
    if cut is not None:
        call.check_travels("grad_output", Direction if call.grad else (), cut)
    kept, amaxes = [], {}
    if shared is None or rowwise is None:
        refuse_codes(x, plan, call.save)
        saved = resolved.saved if call.save and plan.saves != "input" else None
        wanted = [ROWWISE, *([COLUMNWISE] if saved is COLUMNWISE else [])]
        operands = call.quantize("input", x.reshape(-1, x.shape[-1]), wanted)
        codes, amaxes = operands.take(ROWWISE), operands.amaxes
        kept = [] if saved is None else buffers_of(operands.take(saved))
    else:
        shared.is_read(call.save, backward)
        codes = rowwise.to_layout(call.input_layout(ROWWISE, x))
    both = backward and not isinstance(weight, QuantizedTensor)
    source = _kept_direction(plan) if both else ROWWISE
    wanted = [ROWWISE] if source is ROWWISE else [ROWWISE, COLUMNWISE]
    w = weight_storages(weight, wanted, plan, call.state, x.dtype, call.records)
    y = product(call, codes, w[ROWWISE], bias, x.dtype, shape, cut)
    call.record("input", amaxes)  # nothing can be refused any more
    return y, kept, w[source] if both else None


def _kept_direction(plan: GemmPlan) -> Direction:
    """The direction of the weight's codes that a node keeps for dgrad."""
    return ROWWISE if plan.weight.decodes_columnwise else COLUMNWISE


def multiply_backward(
    dy: Tensor,
    weight: Tensor,
    codes: EncodedMatrix | None,
    saved: list[Tensor],
    call: LinearCall,
    needs: Sequence[bool],
    shared: SharedInput | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`gradients` without autograd.

    codes:   of the weight, from `multiply`; None: it is gathered.
    shared:  of an x that is cut along the sequence, which accumulates dx.
    """

    def read_weight() -> EncodedMatrix:
        if codes is not None:
            return codes if codes.direction is COLUMNWISE else decoded_columnwise(codes, call.plan)
        return weight_storages(weight, [COLUMNWISE], call.plan, call.state, dy.dtype)[COLUMNWISE]

    def start_input(rows: int) -> Callable[[], EncodedMatrix]:
        plan, shape = call.plan, (rows, weight.shape[1])
        if shared is not None:
            shared.start_columnwise(call, saved, dy.dtype)
            return functools.partial(shared.columnwise, call.input_layout(COLUMNWISE, dy))
        if plan.saves == "input":
            x = saved[0].reshape(shape)
            return lambda: call.quantize("input", x, [COLUMNWISE]).take(COLUMNWISE)
        key = functools.partial(slot_key, plan, "input", call.step, call.ids, rows)
        return lambda: columnwise_of_saved(plan, saved, shape, dy, key)

    add = None if shared is None else shared.add
    return gradients(call, dy, weight, needs, read_weight, start_input, add)


class _Kept:
    """What a forward leaves for its backward (an object, which torch.func passes on as it is).

    saved: of x. codes: of the weight; None: it is gathered.
    """

    saved: list[Tensor]
    codes: EncodedMatrix | None


class _Definition(torch.autograd.Function):
    """backward: dgrad follows. kept: `_Kept`, which is set. Others: as of `multiply`."""

    @staticmethod
    def forward(x, weight, bias, call, backward, kept, shared, rowwise):
        with torch_compat.without_autocast(x.device):
            y, saved, kept.codes = multiply(x, weight, bias, call, backward, shared, rowwise)
            if shared is None:
                kept.saved = saved
        return y

    @staticmethod
    def setup_context(ctx, inputs, y):
        x, weight, bias, call, _, kept, shared, _ = inputs
        codes = kept.codes
        ctx.weight, ctx.call, ctx.shared = weight, call, shared
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.layout = None if codes is None else codes.layout
        is_x = call.save and shared is None and call.plan.saves == "input"
        saved = [x] if is_x else kept.saved
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *([] if codes is None else buffers_of(codes)))

    @staticmethod
    def backward(ctx, dy):
        run = _Gradients.apply if torch.is_grad_enabled() else _Gradients.forward
        of = ctx.weight, ctx.call, ctx.shared, ctx.layout, ctx.count, ctx.bias_dtype
        grads = run(dy, *of, tuple(ctx.needs_input_grad[:3]), *ctx.saved_tensors)
        return *grads, *[None] * 5


class _Gradients(torch.autograd.Function):
    """dx, dw and db; under create_graph and torch.func an operator without a derivative."""

    @staticmethod
    def forward(dy, weight, call, shared, layout, count, bias_dtype, needs, *tensors):
        codes = None
        if layout is not None:
            direction, shape = _kept_direction(call.plan), tuple(weight.shape)
            fmt = call.plan.operand("weight", direction)
            codes = matrix_over(tensors[count:], fmt, direction, shape, dy.dtype, layout)
        with torch_compat.without_autocast(dy.device):
            saved = list(tensors[:count])
            dx, dw, db = multiply_backward(dy, weight, codes, saved, call, needs, shared)
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
        with torch_compat.without_autocast(x.device):
            shared, x, rowwise, kept.saved = _shared_input(
                x, x if owner is None else owner, call, axis
            )
    return _Definition.apply(x, weight, bias, call, backward, kept, shared, rowwise)


def refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the "
        "layers of a gradient penalty out of fq.convert"
    )

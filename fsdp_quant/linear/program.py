# SPDX-License-Identifier: Apache-2.0
"""The program of every linear layer: three GEMMs, and their autograd.

    forward   x.rowwise, x.columnwise = quantize(x)         y  = gemm(x.rowwise, w.rowwise) + bias
              w.rowwise, w.columnwise = quantize(w)
    backward  dy.rowwise, dy.columnwise = quantize(dy)      dx = gemm(dy.rowwise, w.columnwise)
                                                            dw = gemm(dy.columnwise, x.columnwise)

x [.., K], w [N, K], y [.., N]. Eager mode runs it as Python, torch.compile records it as functional
operators (`in_graph`), ranks wrap it (`among_ranks`), and on CUDA one compiled call per pass gives
the same bytes (`fused`).

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

[Note: what the backward reads]
The forward saves x or its codes, one byte an element for 8 bits. In eager mode the node also owns
the weight's codes, so a write of the weight changes no gradient. A gathered weight is filled again
for the backward, and a graph quantizes the weight again: there nothing of it is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import gemm
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT
from ..storage import matrix_type
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from .autograd import Differentiable, Gradients, differentiated
from .call import BySlot, Call
from .cut import SequenceCut, TensorParallel
from .operands import (
    SLOTS,
    LocalOperands,
    bias_gradient,
    buffers_of,
    columnwise_of_saved,
    keeps_key,
    refuse_codes,
)
from .plan import GemmPlan, Resolved, plan_of
from .shared_input import Shared, SharedInput, shared_input
from .transport import Gather, scattered_product, start_sum
from .weight_gradient import add_in_graph

# Sums are scattered in two pieces, one during the product of the other, where the products of a
# rank's rows stay large. Over one after the other, 8192 tokens on two H200s: .95 of the time
# ([14336] -> [8192]) and .89 ([4096] -> [8192]); four pieces 1.04 and .97; an all-gather during
# the product of this rank's own rows 1.01 ([8192] -> [14336] and [5120]), which is left out.
PIECES, LEAST_ROWS, LEAST_WEIGHT = 2, 2048, 2**24


@dataclass(eq=False)
class Saved:
    """What a forward leaves for its backward, besides x itself.

    input:       codes of x, or its rows on this rank, and a random key, as far as they are read.
    weight:      operand from which dgrad reads the weight; None: it is read again.
    statistics:  of the slots that the backward quantizes from the same values again.
    """

    input: list[Tensor]
    weight: EncodedMatrix | None
    statistics: dict[str, dict[Direction, Statistics]]


def forward(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, shared: Shared | None, dgrad: bool
) -> tuple[Tensor, Saved]:
    """Return y = x w^T + b of this rank, and what its backward reads.

    shared:  of an x that is cut along the sequence. dgrad: the backward computes dx.
    """
    plan, axis, resolved = call.plan, call.axis, call.plan.resolved(x.dtype, x.device)
    x_shape = x.shape if shared is None else shared.input.cut.whole_shape
    shape = (*x_shape[:-1], weight.shape[0])
    cut = None if axis is None else axis.output_cut(shape, call.described("output"))
    if cut is not None:
        call.check_travels("grad_output", Direction if call.grad else (), cut)
    statistics: dict[Direction, Statistics] = {}
    if shared is None:
        operands, saved, statistics = quantized_input(call, x, resolved)
    else:
        shared.input.add_reader(call.save, dgrad)
        operands, saved = shared.operands, shared.saved
    # a gathered weight is filled again for the backward, and a graph quantizes again
    keeps_weight = dgrad and not call.traced and not isinstance(weight, QuantizedTensor)
    kept_direction = ROWWISE if plan.weight.decodes_columnwise else COLUMNWISE
    reads_both = keeps_weight and kept_direction is COLUMNWISE
    of_weight: dict[Direction, Statistics] = {}
    directions = [ROWWISE, COLUMNWISE] if reads_both else [ROWWISE]
    weights = call.weight_operands(weight, directions, x.dtype, of_weight)
    layout = resolved.layouts["input"][ROWWISE] if prod(x_shape) else COMPACT
    codes = operands.take(ROWWISE, layout)
    y = _product(call, resolved, codes, weights[ROWWISE], bias, x.dtype, shape, cut)
    call.record("input", operands.amaxes)
    if keeps_weight:
        return y, Saved(saved, weights[kept_direction], {"input": statistics})
    return y, Saved(saved, None, {"input": statistics, "weight": of_weight})


def quantized_input(
    call: Call, x: Tensor, resolved: Resolved
) -> tuple[LocalOperands, list[Tensor], dict[Direction, Statistics]]:
    """Return the operands of x [.., K], what the backward saves of it besides x, and statistics."""
    plan = call.plan
    refuse_codes(x, plan, call.save)
    saves_codes = call.save and plan.saves != "input"
    saves_columnwise = saves_codes and resolved.saved is COLUMNWISE
    directions = [ROWWISE, COLUMNWISE] if saves_columnwise else [ROWWISE]
    rows, statistics = x.reshape(-1, x.shape[-1]), {}
    key = call.key("input", rows.shape[0])
    if not isinstance(x, QuantizedTensor):
        statistics = call.statistics("input", rows, [list(Direction)] if call.save else [[ROWWISE]])
    operands = call.operands("input", rows, directions, key, statistics)
    if not call.save:
        return operands, [], {}
    saved = buffers_of(operands.take(resolved.saved)) if saves_codes else []
    if key is not None and keeps_key(plan.input, saves_columnwise):
        saved = [*saved, key]
    return operands, saved, {} if saves_codes else statistics


def backward(
    call: Call,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: Saved,
    needs: Sequence[bool],
    shared: SharedInput | None,
) -> Gradients:
    """Return dx, dw, db; None where `needs` (of x, weight, bias) says so.

    x:       if the forward saved it. shared: accumulates dx, and gathers the codes of x.
    """
    plan, axis, rows = call.plan, call.axis, dy.reshape(-1, dy.shape[-1])
    need_x, need_w, need_b = needs
    resolved = plan.resolved(dy.dtype, dy.device)
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    cut = None if axis is None else axis.cut_of("grad_output", dy)
    x_shape = (*(dy.shape if cut is None else cut.whole_shape)[:-1], weight.shape[1])
    dx = dw = db = None
    operands: LocalOperands | Gather = LocalOperands({}, {})
    if directions:
        operands = call.quantize("grad_output", rows, directions, cut)
    if need_w:
        shape = prod(x_shape[:-1]), x_shape[-1]
        read_input = _start_input(call, resolved, dy, x, saved, shape, shared)
    bias_sum = None
    if need_b:
        db = bias_gradient(plan, rows, directions)
        if axis is not None and cut is not None:
            bias_sum = start_sum(db, axis.group)
    if need_x:
        a = operands.take(ROWWISE)
        # FSDP2 fills a gathered weight's codes in the backward of a graph; others would be saved
        with torch_compat.keep_in_backward():
            b = _columnwise_weight(call, weight, saved, dy.dtype)
            multiply = functools.partial(_gemm(call, resolved, 1, dy.dtype), a, b)
            if shared is not None:
                shared.add(multiply)
            else:
                dx = torch_compat.reshaped(multiply(), x_shape)
                if axis is not None and axis.column and axis.reduces and axis.sequence_dim is None:
                    dx = start_sum(dx, axis.group)()
    if need_w:
        a, b = operands.take(COLUMNWISE), read_input()
        product = functools.partial(_gemm(call, resolved, 2, dy.dtype), a, b)
        dw = product() if call.wgrad is None else call.wgrad(product)
    call.record("grad_output", operands.amaxes)
    return dx, dw, db if bias_sum is None else bias_sum()


def _columnwise_weight(
    call: Call, weight: Tensor, saved: Saved, dtype: torch.dtype
) -> EncodedMatrix:
    """Return the weight's columnwise operand: saved, or read now."""
    if saved.weight is None:
        statistics = saved.statistics["weight"]
        return call.weight_operands(weight, [COLUMNWISE], dtype, statistics)[COLUMNWISE]
    if saved.weight.direction is COLUMNWISE:
        return saved.weight
    return call.plan.weight.derive_columnwise(saved.weight, call.plan.compute_dtype)


def _start_input(
    call: Call,
    resolved: Resolved,
    dy: Tensor,
    x: Tensor | None,
    saved: Saved,
    shape: tuple[int, int],
    shared: SharedInput | None,
) -> Callable[[], EncodedMatrix]:
    """Start the gather of the input [rows, K], if it needs one; return the function that returns
    its columnwise operand."""
    plan = call.plan
    if shared is not None:
        shared.start_columnwise(saved.input)
        layout = resolved.layouts["input"][COLUMNWISE] if prod(shape) else COMPACT
        return functools.partial(shared.columnwise, layout)
    if x is None:
        return lambda: columnwise_of_saved(plan, saved.input, shape, dy)
    key = saved.input[0] if saved.input else None
    rows, statistics = torch_compat.made_again(x.reshape(shape)), saved.statistics["input"]
    return lambda: call.operands("input", rows, [COLUMNWISE], key, statistics).take(COLUMNWISE)


def pieces(rows: int, weight: Sequence[int]) -> int:
    """Return in how many pieces a sum is scattered, the same on every rank. rows: of a rank."""
    is_large = rows >= PIECES * LEAST_ROWS and prod(weight) >= LEAST_WEIGHT
    return PIECES if is_large and rows % PIECES == 0 else 1


def _gemm(
    call: Call, resolved: Resolved, product: int, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Return `gemm` as the plan runs one of its products."""
    return functools.partial(
        gemm,
        out_dtype=dtype,
        domain=resolved.domains[product],
        watch=call.watch(resolved, product),
        batch_invariant=call.plan.batch_invariant and product == 0,
    )


def _product(
    call: Call,
    resolved: Resolved,
    codes: EncodedMatrix,
    weight: EncodedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    cut: SequenceCut | None,
) -> Tensor:
    """Return y of `shape`, summed over ranks that hold other columns of x. cut: of y."""
    axis = call.axis
    is_sum = axis is not None and not axis.column
    multiply = functools.partial(
        _gemm(call, resolved, 0, dtype), b=weight, bias=None if is_sum else bias
    )
    if cut is None:
        y = torch_compat.reshaped(multiply(codes), shape)
    else:
        in_one = cut.ranks == 1 or cut.outer > 1 or call.traced
        count = 1 if in_one else pieces(cut.chunk, weight.shape)
        y = scattered_product(multiply, codes, cut, count)
        y = torch_compat.reshaped(y, cut.shape)
    if axis is None or axis.column:
        return y
    y = start_sum(y, axis.group)() if cut is None and axis.reduces else y
    return y if bias is None else y + bias.to(y.dtype)


def _flattened(saved: Saved) -> tuple[list[Tensor], Callable[[list[Tensor]], Saved]]:
    """Return the buffers that the autograd node saves, and the function that restores `saved` from
    them."""
    count, statistics = len(saved.input), saved.statistics
    if saved.weight is None:
        return saved.input, lambda buffers: Saved(buffers, None, statistics)
    fmt, direction, shape, _, layout, dtype = saved.weight.geometry

    def restored(buffers: list[Tensor]) -> Saved:
        weight = matrix_type(layout).over(buffers[count:], fmt, direction, shape, dtype, layout)
        return Saved(buffers[:count], weight, statistics)

    return [*saved.input, *buffers_of(saved.weight)], restored


def _dense(
    call: Call,
    shared: Shared | None,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dgrad: bool,
) -> Differentiable:
    """The program of one layer. shared: of an x that is cut along the sequence."""
    with call.running(x.device):
        if call.traced:
            _save_inputs(call, weights[0])
        y, saved = forward(call, x, weights[0], next(iter(biases), None), shared, dgrad)
    # A recomputation ends with the last tensor that is saved. So among ranks a frozen layer saves
    # none, as in a compiled step, which other ranks may run: all exchange the same again.
    buffers, restored = _flattened(saved) if call.save or not call.axis else ([], lambda _: saved)
    # the codes of a shared x are freed with the layers' forwards
    shared_input = None if shared is None else shared.input

    def gradients(dy, x, buffers, weights, needs) -> Gradients:
        with call.running(dy.device):
            return backward(call, dy, x, weights[0], restored(buffers), needs, shared_input)

    return y, call.save and shared is None and call.plan.saves == "input", buffers, gradients


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, owner: Tensor | None = None
) -> Tensor:
    """Return y = x w^T + b, or this rank's part of it. owner: as in `shared_input`."""
    shared = shared_input(x, owner, call)
    x = x if shared is None else shared.x
    parameters = (weight,) if bias is None else (weight, bias)
    return differentiated(functools.partial(_dense, call, shared), x, 1, parameters)[0]


# In graphs #

# Nothing of ours runs when a graph runs. dynamo calls `in_graph` without tracing into it;
# AOTAutograd runs the program with fake tensors, and records its functional operators. State comes
# in as tensors. Functionalized in-place operators write amax histories, products write guards.
#
# The partitioner (min-cut) never recomputes an operator that is not in its list, nor a value that
# such an operator reads: so the codes of x that wgrad reads are computed with those of the forward
# in one read of x. Where the backward quantizes x again (`saves` is "input"), it reads an
# expression of its own (`torch_compat.made_again`): the output of a norm or an activation is
# computed again from what their backward reads anyway. Nodes that follow from inputs and that the
# forward does not need go where the cut is least. Equal calls are one node (fx_graph_cse) if no
# argument is a NaN and none is of a layer alone, as a guard is that a product writes. AOTAutograd's
# disk cache is bypassed by functions that it does not know; inductor's is not.


def _save_inputs(call: Call, weight: Tensor) -> None:
    """Tell the partitioner which inputs the backward reads as they are then, and of which it reads
    the values of the forward."""
    written = [t for t in (call.step, *(f for slot in call.factors for f in slot)) if t is not None]
    is_gathered = isinstance(weight, QuantizedTensor)
    read = [*call.tensors(), *([weight] if is_gathered else [])]
    torch_compat.save_inputs(read, written, call.plan.weight if is_gathered else None)


@torch.compiler.allow_in_graph
def in_graph(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: str,
    save: bool,
    records: bool,
    step: Tensor | None,
    ids: Tensor | None,
    guards: list[Tensor],
    factors: list[Tensor],
    histories: list[Tensor],
    rank: Tensor | None = None,
    ranks: tuple | None = None,
    codes: Tensor | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return y [.., N] of x [.., K], in a graph that is being traced. dynamo records constants and
    tensors alone.

    plan:       key of the plan. save: the backward needs x. records: amaxes are recorded.
    guards:     [guard, backward_guard] of `Call`, or [].
    factors, histories:  of the delayed directions of input, weight and grad_output, one after the
                other.
    rank, codes:  of `Call`.
    ranks:      where ranks share the layer: group name, column, sequence_dim and reduces of
                `TensorParallel`; whether the ranks share scales of the whole weight; dtype in which
                x is multiplied. x may then be a DTensor that is cut along the sequence.
    main_grad:  to which the backward adds dw; None: autograd is given it.
    """
    counters.has_graphs = True
    gemm_plan = plan_of(plan)
    check_histories(gemm_plan, factors)
    axis, weight_group, owner = None, None, x
    if ranks is None:
        gemm_plan = gemm_plan.on(x.dtype, x.device)
    else:
        group, column, sequence_dim, reduces, spans_weight, dtype = ranks
        process_group = torch_compat.group_of_name(group)
        axis = TensorParallel(process_group, column, sequence_dim, reduces)
        weight_group = process_group if spans_weight else None
        x = (x.to_local() if isinstance(x, DTensor) else x).to(dtype)
    call = Call(
        gemm_plan,
        save,
        None if step is None else step.to(x.device),
        None if ids is None else ids.to(x.device),
        None,
        *(guards or (None, None)),
        factors=by_slot(gemm_plan, factors),
        histories=by_slot(gemm_plan, histories if records else []),
        axis=axis,
        rank=rank,
        weight_group=weight_group,
        codes=codes if isinstance(codes, QuantizedTensor) else None,
        traced=True,
        grad=torch.is_grad_enabled(),
        wgrad=None if main_grad is None else functools.partial(add_in_graph, main_grad),
    )
    if main_grad is not None:
        torch_compat.save_inputs([main_grad])  # other backwards write it before this one
    return linear(x, weight, bias, call, owner)


def by_slot(plan: GemmPlan, tensors: Sequence[Tensor], layers: int = 1) -> BySlot:
    """Return the tensors of each slot: of its first delayed direction, of all layers, then of the
    next."""
    counts = [layers * len(plan.hybrid(slot).delayed_directions) for slot in SLOTS]
    ends = list(accumulate(counts))
    of_input, of_weight, of_grad = (tensors[e - n : e] for e, n in zip(ends, counts))
    return of_input, of_weight, of_grad


def check_histories(plan: GemmPlan, factors: Sequence[Tensor], layers: int = 1) -> None:
    """Raise ValueError unless a graph is given the encode factor of every delayed direction."""
    if len(factors) < layers * sum(len(plan.hybrid(slot).delayed_directions) for slot in SLOTS):
        raise ValueError(
            "a compiled region entered fq.autocast with delayed scaling, whose histories cannot be "
            "made while a graph is traced; run it in eager mode, or use fq.set_recipe"
        )

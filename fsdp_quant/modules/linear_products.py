# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer's forward and backward, in eager mode (`LinearCall`) and in graphs
that are being traced (`GraphCall`). `linear_definition` has the equations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import Watch, gemm
from ..ops import opaque
from ..ops.layout import COMPACT
from ..quantizer import HybridQuantizer
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .exchange import Gather, SequenceCut, TensorParallel, scattered_product, shared_statistics
from .guard import GuardedLayer
from .operands import SlotOperands, bias_gradient, record_amaxes, slot_key, slot_storages
from .plan import GemmPlan, Resolved
from .traced_operands import GraphCall


class LinearCall(NamedTuple):
    """What a call of a layer has besides its tensors: values, and where amaxes are recorded.

    state:            the weight's; None: of a plain tensor.
    save:             the backward needs x.
    records:          amaxes are recorded: in training, and not in a recomputation.
    step, ids:        int64 [5] (`context.STEP_FIELDS`) and [3] (`slot_ids`), which key random bits.
    guard:            fp32 [3, 2], to which products add what they lost (`modules.guard`).
    factors, grad_factors:      encode scales fp32 [1] of the delayed sides of each.
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
        self, slot: str, x: Tensor, directions: Sequence[Direction], cut: SequenceCut | None = None
    ) -> SlotOperands | Gather:
        """Operands of x [rows, cols], of which ranks may have other columns, or rows (`cut`)."""
        if cut is not None:
            return self.gather(slot, x, directions, cut, "backward")
        plan, statistics, axis = self.plan, None, self.axis
        if axis is not None and slot == axis.cut_slot:
            hybrid = plan.hybrid(slot)
            statistics = shared_statistics(x, hybrid, directions, axis.group, rows_are_cut=False)
        key = slot_key(plan, slot, self.step, self.ids, x.shape[0])
        return slot_storages(plan, slot, x, directions, key, self.factors_of(slot), statistics)

    def record(self, slot: str, amaxes: dict[Direction, Tensor]) -> None:
        histories = self.histories if slot == "input" else self.grad_histories
        if histories:
            record_amaxes(histories, self.plan.hybrid(slot), amaxes)

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

    def input_layout(self, direction: Direction, x: Tensor) -> str:
        """How the product of activations like x reads the input."""
        layouts = self.plan.resolved(x.dtype, x.device).layouts["input"]
        return layouts[direction] if x.numel() else COMPACT

    def check_travels(self, slot: str, directions, cut: SequenceCut) -> None:
        if self.require_native:
            check_travels(self, self.plan.hybrid(slot), slot, directions, cut)

    def watch(self, resolved: Resolved, product: int) -> Watch | None:
        if self.guard is None:
            return None
        return Watch(resolved.watched[product], self.step, self.guard, product)


def check_travels(
    of: LinearCall | GuardedLayer, hybrid: HybridQuantizer, slot: str, directions, cut: SequenceCut
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


# Sums are scattered in two pieces, one during the product of the other, where the products of a
# rank's rows stay large. Over one after the other, 8192 tokens on two H200s: .95 of the time
# ([14336] -> [8192]) and .89 ([4096] -> [8192]); four pieces 1.04 and .97; an all-gather during
# the product of this rank's own rows 1.01 ([8192] -> [14336] and [5120]), which is left out.
PIECES, LEAST_ROWS, LEAST_WEIGHT = 2, 2048, 2**24


def _pieces(cut: SequenceCut, weight: tuple[int, int]) -> int:
    """In how many pieces a sum is scattered; the same on every rank, and one in graphs."""
    worth = (
        not opaque.is_tracing()
        and cut.chunk >= PIECES * LEAST_ROWS
        and prod(weight) >= LEAST_WEIGHT
    )
    return PIECES if worth and cut.ranks > 1 and cut.outer == 1 and cut.chunk % PIECES == 0 else 1


def _gemm(
    call: LinearCall | GraphCall, resolved: Resolved, product: int, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """`gemm` as the plan runs one of its products."""
    domain, watch = resolved.domains[product], call.watch(resolved, product)
    return functools.partial(gemm, out_dtype=dtype, domain=domain, watch=watch)


def product(
    call: LinearCall | GraphCall,
    codes: EncodedMatrix,
    w: EncodedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    cut: SequenceCut | None,
) -> Tensor:
    """y of `shape`, summed over ranks that hold other columns of x. cut: of y."""
    axis, resolved = call.axis, call.plan.resolved(dtype, codes.data.device)
    sums = axis is not None and not axis.column
    multiply = functools.partial(_gemm(call, resolved, 0, dtype), b=w, bias=None if sums else bias)
    if cut is None:
        y = torch_compat.reshaped(multiply(codes), shape)
    else:
        y = scattered_product(multiply, codes, cut, _pieces(cut, w.shape))
        y = torch_compat.reshaped(y, cut.shape)
    if axis is None or axis.column:
        return y
    y = axis.sum(y) if cut is None and axis.reduces else y
    return y if bias is None else y + bias.to(y.dtype)


def gradients(
    call: LinearCall | GraphCall,
    dy: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    read_weight: Callable[[], EncodedMatrix],
    start_input: Callable[[int], Callable[[], EncodedMatrix]],
    add: Callable[[Callable[..., Tensor]], None] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db; None where `needs` (of x, weight, bias) says so.

    read_weight:  returns the columnwise operand of the weight.
    start_input:  starts the gather of the input of so many rows, if it needs one, and returns the
                  function that returns its columnwise operand.
    add:          accumulates dx, which `multiply(out=, accumulate=)` computes; None: return it.
    """
    plan, axis, rows = call.plan, call.axis, dy.reshape(-1, dy.shape[-1])
    need_x, need_w, need_b = needs
    resolved = plan.resolved(dy.dtype, dy.device)
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    cut = None if axis is None else axis.cut_of("grad_output", dy)
    x_shape = (*(dy.shape if cut is None else cut.whole_shape)[:-1], weight.shape[1])
    dx = dw = db = bias_sum = None
    operands = SlotOperands({}, {})
    if directions:
        operands = call.quantize("grad_output", rows, directions, cut)
    read_input = start_input(prod(x_shape[:-1])) if need_w else None
    if need_b:
        db = bias_gradient(plan, rows, directions)
        if axis is not None and cut is not None:
            db, bias_sum = axis.start_sum(db)
    if need_x:
        a = operands.take(ROWWISE)
        # FSDP2 fills a gathered weight's codes in the backward of a graph
        is_filled = isinstance(call, GraphCall) and isinstance(weight, QuantizedTensor)
        with torch_compat.keep_in_backward() if is_filled else contextlib.nullcontext():
            multiply = functools.partial(_gemm(call, resolved, 1, dy.dtype), a, read_weight())
            if add is not None:
                add(multiply)
            else:
                dx = torch_compat.reshaped(multiply(), x_shape)
                if axis is not None and axis.column and axis.reduces and axis.sequence_dim is None:
                    dx = axis.sum(dx)
    if read_input is not None:
        multiply = _gemm(call, resolved, 2, dy.dtype)
        dw = multiply(operands.take(COLUMNWISE), read_input())
    call.record("grad_output", operands.amaxes)
    if bias_sum is not None:
        bias_sum.wait()
    return dx, dw, db

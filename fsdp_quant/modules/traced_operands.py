# SPDX-License-Identifier: Apache-2.0
"""Operands of GEMMs in traces: statistics, codes and gathers as functional operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding, Format
from ..gemm import Watch
from ..ops import dispatch, native
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT, is_anchored_as_encoded, is_encoded_as, operand_format
from ..ops.reference import known
from ..quantizer import HybridQuantizer
from ..storage import Storage, encoded_matrix, to_layout
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import values_of
from .exchange import Gather, SequenceCut, TensorParallel, shared_statistics
from .operands import SLOTS, SlotOperands, record_amaxes, slot_key, slot_storages
from .plan import GemmPlan, Resolved


class GraphCall(NamedTuple):
    """What a layer's products read and write besides operands: the same tensors in every step.

    axis:       how ranks share the layer; None: they do not.
    step:       int64 [5] (`context.STEP_FIELDS`); ids: int64 [3] (`slot_ids`); None: not read.
    rank:       int64 [2] (`GraphTensors`); None: ranks do not share the layer.
    guard, backward_guard:  fp32 [3, 2], what products lost, of each pass; None: not watched.
    factors:    of input, weight and grad_output, fp32 [1] of the history of each delayed side.
    histories:  likewise, where their amaxes are recorded; [] where they are not.
    """

    plan: GemmPlan
    axis: TensorParallel | None
    step: Tensor | None
    ids: Tensor | None
    rank: Tensor | None
    guard: Tensor | None
    backward_guard: Tensor | None
    factors: Sequence[Sequence[Tensor]]
    histories: Sequence[Sequence[Tensor]]

    def tensors(self) -> list[Tensor]:
        flat = [t for of in (*self.factors, *self.histories) for t in of]
        own = self.step, self.ids, self.rank, self.guard, self.backward_guard
        return [t for t in (*own, *flat) if t is not None]

    def watch(self, resolved: Resolved, product: int) -> Watch | None:
        guard = self.backward_guard if product else self.guard
        if guard is None:
            return None
        return Watch(resolved.watched[product], known(self.step, "the step"), guard, product)

    def key(
        self, slot: str, x: Tensor, cut: SequenceCut | None, after: Tensor | None = None
    ) -> Tensor | None:
        """`slot_key` of all ranks' rows of x."""
        if not self.plan.hybrid(slot).is_stochastic:
            return None
        step = self.step
        if step is None or self.ids is None:
            raise ValueError("a graph that rounds stochastically reads no step")
        if self.rank is not None:
            step = torch.cat((step[:-1], self.rank[:1]))
        rows = x.shape[0] if cut is None else cut.rows * cut.ranks
        return slot_key(self.plan, slot, step, self.ids, rows, after)

    def record(self, slot: str, amaxes: dict[Direction, Tensor]) -> None:
        record_amaxes(self.histories[SLOTS.index(slot)], self.plan.hybrid(slot), amaxes)

    def statistics(
        self, slot: str, x: Tensor, passes: Sequence[Sequence[Direction]], cut: SequenceCut | None
    ) -> dict[Direction, Statistics]:
        """Compute statistics of x [rows, cols], over the ranks that have other rows or columns.

        passes:  directions that are gathered together, where x is cut along the sequence.
        """
        hybrid, axis, group = self.plan.hybrid(slot), self.axis, None
        if cut is not None:
            passes, group = [of for of in passes if cut.all_travel(hybrid, of)], cut.group
        elif axis is not None and slot == axis.cut_slot:
            group = axis.group
        return shared_amaxes(hybrid, x, [d for of in passes for d in of], group, cut is not None)

    def operands(
        self,
        slot: str,
        x: Tensor | Storage,
        directions: Sequence[Direction],
        key: Tensor | None,
        statistics: dict[Direction, Statistics],
        cut: SequenceCut | None,
        phase: str,
    ) -> SlotOperands | GatheredOperands:
        """Operands of x [rows, cols]: quantized here, or gathered from every rank, from now on."""
        factors, hybrid = self.factors[SLOTS.index(slot)], self.plan.hybrid(slot)
        if not isinstance(x, Storage) and cut is None:
            return slot_storages(self.plan, slot, x, directions, key, factors, statistics)
        gather = Gather(
            x,
            hybrid,
            directions,
            known(cut, "the cut"),
            phase,
            key=key,
            factors=dict(zip(hybrid.delayed_directions, factors)),
            statistics=statistics,
            rank=None if self.rank is None else self.rank[1],
        )
        device = (x.data if isinstance(x, Storage) else x).device
        return GatheredOperands(gather, self.plan.resolved(x.dtype, device).layouts[slot])

    def quantize(
        self, slot: str, x: Tensor, directions: Sequence[Direction], cut: SequenceCut | None
    ) -> SlotOperands | GatheredOperands:
        """`operands` of a gradient."""
        statistics = self.statistics(slot, x, [directions], cut)
        key = self.key(slot, x, cut, after=x)
        return self.operands(slot, x, directions, key, statistics, cut, "backward")


class GatheredOperands:
    """Operands of a `Gather`, in the layouts that products read. own, amaxes: the gather's."""

    def __init__(self, gather: Gather, layouts: dict[Direction, str]):
        self._gather, self._layouts = gather, layouts

    @property
    def own(self) -> dict[Direction, Storage]:
        return self._gather.own

    @property
    def amaxes(self) -> dict[Direction, Tensor]:
        return self._gather.amaxes

    def take(self, direction: Direction) -> EncodedMatrix:
        storage = self._gather.take(direction)
        return to_layout(storage, self._layouts[direction]) if storage.data.numel() else storage


def _whole_formats(hybrid: HybridQuantizer, delayed: bool = False) -> dict[Direction, Format]:
    """Encoded directions scaled by the amax of all values. delayed: or by histories."""
    spans = {
        d: e.fmt for d, e in hybrid.encodings.items() if e.fmt.spans_tensor and not e.fmt.rotated
    }
    return {d: fmt for d, fmt in spans.items() if delayed or not hybrid.side(d).is_delayed}


def _of_whole(spans: dict[Direction, Format], amax: Tensor) -> dict[Direction, Statistics]:
    return {
        d: Statistics(None, amax.view(1)) if fmt.tensor_scale else Statistics(amax, None)
        for d, fmt in spans.items()
    }


def shared_amaxes(
    hybrid: HybridQuantizer,
    x: Tensor,
    directions,
    group: dist.ProcessGroup | None,
    rows_are_cut: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[Direction, Statistics]:
    """Amaxes of all of x [rows, cols], by encoded direction that is scaled by them; and those that
    span the ranks of `group` (None: x is whole), also of directions that histories scale.

    They are torch operators, which a compiler fuses with what writes x: by rows, since inductor
    splits a reduction of all values where it likes, and fuses it with no loop over rows and
    columns. `quantize` computes the largest: its launch from C++ is cheaper than inductor's.

    dtype:   that encoders see; None: x's.
    """
    shares = group is not None and group.size() > 1
    spans = _whole_formats(hybrid, shares)
    if x.numel() == 0 or not (spans or shares):
        return {}
    own = {}
    if spans:
        amax = (x if dtype is None else x.to(dtype)).abs().amax(-1, keepdim=True)
        if shares or any(fmt.tensor_scale for fmt in spans.values()):
            amax = amax.amax().view(1, 1)
        # through its bits: a compiler that read the amax of unrounded values must round now
        if amax.dtype is torch.bfloat16:
            amax = (amax.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
        own = _of_whole(spans, amax.float())
    if group is None or not shares:
        return own
    return own | shared_statistics(
        x, hybrid, directions, group, rows_are_cut, dtype=dtype, known=own
    )


def weight_operand(
    plan: GemmPlan,
    weight: Tensor,
    direction: Direction,
    dtype: torch.dtype,
    statistics: dict[Direction, Statistics],
    factors: list[Tensor],
) -> tuple[EncodedMatrix, dict[Direction, Tensor]]:
    """The weight as a product reads it, and the amaxes of its delayed side.

    statistics:  known ones; those of the whole weight are added, for its other direction.
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
    is_laid_out = wanted != COMPACT and is_encoded_as(encoding.fmt, wanted)
    if hybrid.shares_storage and direction is COLUMNWISE and is_laid_out:
        encoding = hybrid.side(COLUMNWISE).encoding(COLUMNWISE)
    seen = plan.compute_dtype if encoding.fmt.is_quantized else dtype
    delayed = hybrid.delayed_directions
    factor = factors[delayed.index(source)] if source in delayed else None
    laid_out = wanted if is_encoded_as(encoding.fmt, wanted) and not hybrid.is_derived else COMPACT
    is_anchored = is_anchored_as_encoded(encoding.fmt, laid_out)
    if source not in statistics and is_anchored and native.is_available_for(values):
        whole = Encoding(operand_format(encoding.fmt, laid_out), source)
        (found,) = dispatch.statistics(values, [whole], dtype=seen)
        alike = [
            d for d, e in hybrid.encodings.items() if is_anchored_as_encoded(e.fmt, layouts[d])
        ]
        if found.amax is not None:
            statistics |= dict.fromkeys(alike, Statistics(None, found.amax.view(1)))
    (encoded,) = dispatch.encode(
        values,
        [encoding],
        [statistics.get(source)] if source in statistics else None,
        encode_scales=[factor],
        dtype=seen,
        layouts=[laid_out],
    )
    amax = encoded.tensor_amax if encoding.fmt.tensor_scale else encoded.amax
    spans = _whole_formats(hybrid)
    if source in spans and source not in statistics and amax is not None:
        statistics |= _of_whole(spans, amax)
    matrix = encoded_matrix(encoded, encoding, weight.shape, dtype)
    recorded = None if factor is None else encoded.amax
    amaxes = {} if recorded is None else {source: recorded}
    if matrix.direction is not direction:
        matrix = hybrid.columnwise_of(matrix, compute_dtype=plan.compute_dtype)
    return to_layout(matrix, wanted), amaxes

# SPDX-License-Identifier: Apache-2.0
"""Share amaxes between ranks, and record their histories for delayed scaling.

[Note: sharded statistics]
Blocks are on the grid of the global tensor. A rank computes the amaxes of the blocks that its rows
overlap. Ranks differ only in the amaxes of blocks that a cut divides and of whole tensors. The cuts
determine these slots, so every rank packs the same slots, one MAX all-reduce serves all tensors,
and each rank derives the same scales. Amaxes are reduced as int32 bits: non-negative floats have
the order of their bits, and a NaN is larger than infinity, so it survives from any rank. Scales are
never reduced.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .formats import Encoding, ceil_div, value_class
from .migration import answers_keywords
from .ops import dispatch, reference
from .ops.dispatch import Statistics
from .ops.reference import known
from .options import check, choice, integer


def reduce_amaxes(amaxes: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Reduce fp32 tensors by MAX over the ranks of `group`, in one collective. Every rank of the
    group must call it.

    amaxes:   non-negative or NaN; the same shapes on every rank.
    returns:  new tensors of those shapes, NaN where any rank has one.
    """
    return _Reduction(amaxes, group).result


class _Reduction:
    """Reduces amaxes (`reduce_amaxes`) into persistent memory; `run` writes it again. With one rank
    `result` is the amaxes themselves."""

    def __init__(self, amaxes: Sequence[Tensor], group: dist.ProcessGroup | None):
        self.result = list(amaxes)
        self._group = group if amaxes and group is not None and group.size() > 1 else None
        if self._group is None:
            return
        self._rows = [a.reshape(-1) for a in amaxes]
        self._flat = amaxes[0].new_empty(sum(row.numel() for row in self._rows))
        pieces = self._flat.split([row.numel() for row in self._rows])
        self.result = [
            piece if a.dim() == 1 else piece.view(a.shape) for piece, a in zip(pieces, amaxes)
        ]
        self.run()

    def run(self) -> None:
        """Reduce the amaxes again. Every rank must call it; the amaxes must be contiguous."""
        if self._group is not None:
            torch.cat(self._rows, out=self._flat)
            dist.all_reduce(self._flat.view(torch.int32), op=dist.ReduceOp.MAX, group=self._group)


@value_class
class Cuts:
    """Ownership of one [rows, cols] tensor in row-major order: rank r owns the units [bounds[r],
    bounds[r + 1]), possibly none.

    row_units:  units per row: cols if any element may begin a fragment, 1 if only whole rows do
                (`RowCuts`).
    """

    bounds: tuple[int, ...]
    row_units: int = 1

    @property
    def rows(self) -> int:
        return self.bounds[-1] // self.row_units

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks need the statistics, even if one of them owns all rows."""
        return len(self.bounds) > 2 and self.rows > 0

    @functools.cache
    def cut_block_rows(self, encoding: Encoding) -> tuple[int, ...]:
        """Return the block rows whose amaxes several ranks need: those that a cut divides, or the
        single one if blocks span all rows."""
        b0 = encoding.fmt.dims(encoding.direction)[0]
        if not encoding.fmt.has_scales or not self.is_sharded:
            return ()
        if b0 is None:
            return (0,)
        units = b0 * self.row_units
        return tuple(sorted({b // units for b in self.bounds if b % units and b < self.bounds[-1]}))

    @functools.cache
    def shares_statistics(self, encoding: Encoding, parts: int = 1) -> bool:
        """Return whether a statistic of this encoding depends on elements of several ranks, or of
        `parts` tensor-parallel parts."""
        if self.cut_block_rows(encoding) or (parts > 1 and encoding.fmt.spans_tensor):
            return True
        return encoding.fmt.tensor_scale and self.is_sharded


class RowCuts(Cuts):
    """Cuts between rows."""

    @staticmethod
    @functools.cache
    def chunked(rows: int, world_size: int) -> RowCuts:
        """Return the cuts of FSDP2."""
        chunk = -(-rows // world_size)
        return RowCuts(tuple(min(r * chunk, rows) for r in range(world_size)) + (rows,))


@dataclass(eq=False)
class Fragment:
    """One rank's elements of one master weight, and the encodings to derive statistics for.

    values:     [local rows, cols]; [elements] if cuts divide rows.
    encodings:  one per direction, each with its own statistics.
    dtype:      dtype to which values are rounded before encoding (None: their own).
    known_amaxes:  known statistics of these rows, one per encoding or None.
    part:       (rank, size) of tensor parallelism. Each tensor-parallel part has its own blocks;
                `cuts` are those of the part.
    """

    values: Tensor
    encodings: tuple[Encoding, ...]
    cuts: Cuts
    rank: int
    dtype: torch.dtype | None = None
    known_amaxes: tuple[Statistics | None, ...] | None = None
    part: tuple[int, int] = (0, 1)

    @property
    def start(self) -> int:
        return self.cuts.bounds[self.rank]

    @property
    def row0(self) -> int:
        return self.start // self.cuts.row_units

    @property
    def rows(self) -> Tensor:
        """[rows, cols]: the rows that the elements cover, with zeros for elements of other ranks. A
        view if the fragment is whole rows."""
        return self.values if self.values.dim() == 2 else self._covering_rows

    @functools.cached_property
    def _covering_rows(self) -> Tensor:
        count, cols = self.values.numel(), self.cuts.row_units
        before, after = self.start % cols, -(self.start + count) % cols
        values = F.pad(self.values, (before, after)) if count and before + after else self.values
        return values.view(-1, cols)

    def block_rows(self, encoding: Encoding) -> slice:
        """Return the block rows of the whole tensor that `rows` overlaps."""
        b0 = encoding.fmt.dims(encoding.direction)[0]
        if b0 is None:
            return slice(0, 1)
        first = self.row0 // b0
        return slice(first, first + ceil_div(self.row0 % b0 + self.rows.shape[0], b0))

    def shares_statistics(self, encoding: Encoding) -> bool:
        """Return whether a statistic of this encoding depends on other rows or tensor-parallel
        parts."""
        return self.cuts.shares_statistics(encoding, self.part[1])

    def shared_block_rows(self, encoding: Encoding) -> tuple[int, ...]:
        """Return the block rows whose amaxes depend on other rows or tensor-parallel parts."""
        one_block = self.part[1] > 1 and encoding.fmt.spans_tensor and not encoding.fmt.tensor_scale
        return (0,) if one_block else self.cuts.cut_block_rows(encoding)

    def has_own_blocks(self, encoding: Encoding) -> bool:
        """Return whether tensor-parallel parts have separate blocks of this encoding."""
        return self.part[1] > 1 and encoding.fmt.dims(encoding.direction) != (None, None)


def share_statistics(
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup | None,
    all_blocks: bool = False,
    parts: dist.ProcessGroup | None = None,
) -> list[list[Statistics | None]]:
    """Compute statistics of every (fragment, encoding) over the whole tensor, with at most one MAX
    all-reduce per group.

    fragments:   the same tensors, encodings and cuts in the same order on every rank of `group`.
    group:       process group of all ranks that hold rows of a tensor, or copies of them, in all of
                 its tensor-parallel parts; with `parts`, in one part.
    all_blocks:  return the amax of every block on every rank, not only of the blocks that a rank
                 overlaps. For tensors of one part only.
    parts:       process group of the ranks that hold the same rows of the other parts.
    returns:     for each fragment, for each encoding, the amaxes of the blocks that its rows
                 overlap; None if no statistic depends on other ranks.

    Every rank of the group must call it, also with empty fragments. There is no collective if no
    statistic crosses a cut. One launch reads all tensors of equal encodings.
    """
    results = SharedStatistics(fragments, group, all_blocks, own_slots=parts is None).results
    if parts is not None:
        spanning = [
            (f, e, encoding, statistics)
            for f, fragment in enumerate(fragments)
            if fragment.part[1] > 1
            for e, encoding in enumerate(fragment.encodings)
            if encoding.fmt.spans_tensor and (statistics := results[f][e]) is not None
        ]
        shared = share_amaxes([(encoding, stats) for _, _, encoding, stats in spanning], parts)
        for (f, e, *_), statistics in zip(spanning, shared):
            results[f][e] = statistics
    return results


class _Slot(NamedTuple):
    """An amax to reduce, and the statistic that it becomes.

    local:      block row or rows of the fragment that the slot holds; None: rows of other ranks.
    block_row:  block row of the tensor; None: the amax of the tensor.
    part:       of an amax with one row per tensor-parallel part: the row of this part.
    """

    fragment: int
    encoding: int
    amax: Tensor
    local: int | slice | None = None
    block_row: int | None = None
    part: int | None = None


class SharedStatistics:
    """Shares statistics (`share_statistics`) in persistent memory; `replay` writes it again.

    results:    for each fragment, for each encoding.
    own_slots:  reduce one slot per tensor-parallel part.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        group: dist.ProcessGroup | None,
        all_blocks: bool = False,
        own_slots: bool = True,
    ):
        self.results: list[list[Statistics | None]] = [[None] * len(f.encodings) for f in fragments]
        self._indices = [
            (f, e)
            for f, fragment in enumerate(fragments)
            for e, encoding in enumerate(fragment.encodings)
            if fragment.shares_statistics(encoding) or (all_blocks and encoding.fmt.has_scales)
        ]
        self._launches: dict[tuple, list[tuple[int, int]]] = {}
        for f, e in self._indices:
            fragment = fragments[f]
            key = fragment.encodings[e], fragment.dtype, fragment.values.dtype
            self._launches.setdefault(key, []).append((f, e))
        self._local = self._local_statistics(fragments)
        self._padded: list[tuple[Tensor, Tensor]] = []  # (row of a slot, its source)
        slots: list[_Slot] = []
        for (f, e), statistics in zip(self._indices, self._local):
            self.results[f][e] = statistics
            if statistics.tensor_amax is not None:
                slots.append(_Slot(f, e, statistics.tensor_amax))
            if all_blocks:
                slots.append(self._slot_of_all_blocks(fragments[f], f, e, statistics))
            else:
                slots += self._slots_of_rows(fragments[f], f, e, statistics, own_slots)
        for row, source in self._padded:
            row.copy_(source)
        self._reduction = _Reduction([slot.amax for slot in slots], group)
        self._rows: list[tuple[Tensor, Tensor]] = []  # (row of a result, its reduced amaxes)
        for slot, reduced in zip(slots, self._reduction.result):
            self._store(slot, reduced if slot.part is None else reduced[slot.part])
        for row, reduced in self._rows:
            row.copy_(reduced)

    def _slot_of_all_blocks(
        self, fragment: Fragment, f: int, e: int, statistics: Statistics
    ) -> _Slot:
        encoding, amax = fragment.encodings[e], known(statistics.amax, "the amax")
        shape = (fragment.cuts.rows, fragment.rows.shape[1])
        blocks = amax.new_zeros(encoding.fmt.scale_shape(shape, encoding.direction) or (0, 0))
        held = fragment.block_rows(encoding)
        blocks[held] = amax[: held.stop - held.start]
        self.results[f][e] = Statistics(blocks, statistics.tensor_amax)
        return _Slot(f, e, blocks, slice(None), 0)

    def _slots_of_rows(
        self, fragment: Fragment, f: int, e: int, statistics: Statistics, own_slots: bool
    ) -> Iterator[_Slot]:
        """One slot per block row that ranks share, zeros for rows of other ranks."""
        encoding = fragment.encodings[e]
        has_parts = own_slots and fragment.has_own_blocks(encoding)
        for block_row in fragment.shared_block_rows(encoding):
            amax = known(statistics.amax, "the amax")
            local = block_row - fragment.block_rows(encoding).start
            is_held, part = 0 <= local < amax.shape[0], None
            row = amax[local] if is_held else amax.new_zeros(amax.shape[1])
            if has_parts:
                part, count = fragment.part
                row_per_part = amax.new_zeros(count, len(row))
                self._padded.append((row_per_part[part], row))
                row = row_per_part
            yield _Slot(f, e, row, local if is_held else None, block_row, part)

    def _store(self, slot: _Slot, reduced: Tensor) -> None:
        results = self.results[slot.fragment]
        amax, tensor_amax = results[slot.encoding] or (None, None)
        if slot.block_row is None:
            results[slot.encoding] = Statistics(amax, reduced)
        elif slot.local is not None and amax is not None and len(amax) == 1:
            results[slot.encoding] = Statistics(reduced.view(1, -1), tensor_amax)
        elif slot.local is not None and amax is not None:
            self._rows.append((amax[slot.local], reduced))

    def replay(
        self, fragments: Sequence[Fragment], copy_all: Callable[[list[tuple[Tensor, Tensor]]], None]
    ) -> bool:
        """Recompute in place for new values of the same fragments. Returns False, before any
        collective, if a different set of amaxes is already known; then build a new object. Every
        rank must call it.

        copy_all:  copies a list of (target, source).
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for before, after in zip(self._local, self._local_statistics(fragments)):
            for old, new in zip(before, after):
                if old is None or new is None:
                    if old is not new:
                        return False
                elif old is not new:
                    pairs.append((old, new))
        copy_all(pairs + self._padded)
        self._reduction.run()
        copy_all(self._rows)
        return True

    def _local_statistics(self, fragments: Sequence[Fragment]) -> list[Statistics]:
        """Return the statistics of each (fragment, encoding) that is shared: known ones, else
        computed in one launch per encoding."""
        computed: dict[tuple[int, int], Statistics] = {}
        for (encoding, dtype, _), indices in self._launches.items():
            for f, e in indices:
                amaxes = fragments[f].known_amaxes
                if amaxes and (statistics := amaxes[e]) is not None:
                    computed[f, e] = statistics
            missing = [index for index in indices if index not in computed]
            if missing:
                shards = [fragments[f] for f, _ in missing]
                amaxes = dispatch.multi_tensor_amax(
                    [s.rows for s in shards], encoding, [s.row0 for s in shards], dtype
                )
                computed.update(zip(missing, amaxes))
        return [computed[index] for index in self._indices]


def share_amaxes(
    statistics: Sequence[tuple[Encoding, Statistics]],
    group: dist.ProcessGroup | None,
    reduce: Callable[[list[Tensor], dist.ProcessGroup | None], Iterable[Tensor]] = reduce_amaxes,
) -> list[Statistics]:
    """Share statistics whose scales span the ranks of `group`, in one MAX all-reduce. Every rank of
    the group must call it.

    statistics:  of this rank's elements of each tensor. Two-level formats share the tensor's amax,
                 other formats all amaxes.
    reduce:      `reduce_amaxes`, or a function that records it in a graph.
    """
    amaxes = [
        known(s.tensor_amax if e.fmt.tensor_scale else s.amax, "the shared amax")
        for e, s in statistics
    ]
    return [with_amax(e, s, amax) for (e, s), amax in zip(statistics, reduce(amaxes, group))]


def with_amax(encoding: Encoding, statistics: Statistics, amax: Tensor) -> Statistics:
    """Return the statistics with `amax` in place of the amax that spans the tensor."""
    if encoding.fmt.tensor_scale:
        return Statistics(statistics.amax, amax)
    return Statistics(amax, statistics.tensor_amax)


# Delayed scaling #


# A margin of 17 binades shifts every e4m3 element below the smallest one.
_DELAYED_OPTIONS = {"length": integer(1), "margin": integer(0, 16), "use": choice("max", "newest")}


@answers_keywords
@dataclass(frozen=True)
class DelayedScaling:
    """Derive per-tensor scales from a history of amaxes.

    length:    number of steps in the history.
    margin:    headroom of the scale: 2^margin, 0 to 16.
    use:       "max": the largest amax of the history; "newest": its newest amax.

    >>> fq.recipes.fp8_delayed().hybrid(fq.Role("linear", "input")).rowwise.scaling
    DelayedScaling(length=1024, margin=0, use='max')
    """

    length: int = 1024
    margin: int = 0
    use: str = "max"

    def __post_init__(self):
        check(self, _DELAYED_OPTIONS)

    def __str__(self) -> str:
        return f"{self.use} of {self.length}" + (f", margin {self.margin}" if self.margin else "")


class AmaxHistory:
    """Amaxes of one (tensor role, direction) and the encode scale that follows from them, on the
    tensor's device.

    amaxes:             fp32 [length]; slot 0 collects the current step.
    encode_scale:       fp32 [1]; 0 until a finite positive amax was rolled in. At 0, quantizers use
                        current scaling.
    keep_when_skipped:  a skipped step keeps its amax. For weights, whose values a skipped step does
                        not change.

    The scale of a step depends on earlier steps only, so micro-batches and recomputation use one
    scale. `roll` does nothing if the current step recorded no amax.
    """

    # all histories of the process, as long as their owners live
    live: ClassVar[weakref.WeakSet[AmaxHistory]] = weakref.WeakSet()

    def __init__(
        self, scaling: DelayedScaling, element_max: float, keep_when_skipped: bool = False
    ):
        self.live.add(self)
        self.scaling, self.element_max = scaling, element_max
        self.keep_when_skipped = keep_when_skipped
        # steps outside inference mode write them in place
        with torch.inference_mode(False):
            self.amaxes = torch.zeros(scaling.length, dtype=torch.float32, device="cpu")
            self.encode_scale = torch.zeros(1, dtype=torch.float32, device="cpu")

    def to(self, device: torch.device) -> AmaxHistory:
        """Move the history to a device. Does nothing for the meta device, so the values survive."""
        if self.amaxes.device != device and device.type != "meta":
            with torch.inference_mode(False):
                self.amaxes = self.amaxes.to(device)
                self.encode_scale = self.encode_scale.to(device)
        return self

    def on(self, device: torch.device) -> AmaxHistory:
        """The history that a forward on `device` reads and records in: itself, moved there; on the
        meta device one without values."""
        if device.type != "meta":
            return self.to(device)
        history = object.__new__(AmaxHistory)
        vars(history).update(vars(self), amaxes=self.amaxes.to(device))
        history.encode_scale = self.encode_scale.to(device)
        return history

    @torch.no_grad()
    def record(self, amax: Tensor) -> None:
        """Record an amax of the current step; ignore a non-finite one."""
        dispatch.record_amax(self.amaxes, amax)

    @torch.no_grad()
    def continued(self, scaling: DelayedScaling, element_max: float) -> AmaxHistory:
        """Return a history of the same tensor for another scaling: the newest amaxes of this one,
        and the scale that it would have if it had recorded them itself.

        A history that is longer has the amaxes that there are. Its scale covers those of the scale
        of this history, whose oldest amax is stored no more.
        """
        history = AmaxHistory(scaling, element_max, self.keep_when_skipped).to(self.amaxes.device)
        count = min(scaling.length, self.scaling.length)
        history.amaxes[:count].copy_(self.amaxes[:count])
        num_scaled = scaling.length if scaling.use == "max" else 1
        rolled = self.amaxes[1 : 1 + num_scaled]  # slot 0 collects the current step
        if len(rolled) < num_scaled and (self.scaling.use == "max" or not len(rolled)):
            margins = 2.0 ** (self.scaling.margin - scaling.margin)
            scale = self.encode_scale * (element_max / self.element_max * margins)
            history.encode_scale.copy_(scale.clamp(max=reference.FLT_MAX))
        else:
            amax = rolled.amax(0, keepdim=True)
            history.encode_scale.copy_(history._scale_of(amax) * (amax > 0))
        return history

    def _scale_of(self, amax: Tensor) -> Tensor:
        scale = reference.divide(self.element_max, amax) / 2.0**self.scaling.margin
        return scale.clamp(max=reference.FLT_MAX)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.live.add(self)

    def roll(self) -> None:
        """End a step that was applied: derive the next encode scale, and open a new slot 0."""
        for target, values in self.advanced([self]):
            target.copy_(values)

    @staticmethod
    def by_scaling(histories: Iterable[AmaxHistory]) -> list[list[AmaxHistory]]:
        """Group histories into lists that the same launches roll, each on one device."""
        groups: dict[tuple, list[AmaxHistory]] = {}
        for h in histories:
            key = h.scaling, h.element_max, h.keep_when_skipped, h.amaxes.device
            groups.setdefault(key, []).append(h)
        return list(groups.values())

    @staticmethod
    @torch.no_grad()
    def advanced(
        histories: Iterable[AmaxHistory], skipped: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute (tensor, its values after `roll`) of each history, in a few launches for all
        histories with equal scaling.

        skipped:  bool [], on a device; true: values after `discard_step`.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        for group in AmaxHistory.by_scaling(histories):
            writes += AmaxHistory.advanced_group(group, skipped)
        return writes

    @staticmethod
    def advanced_group(
        histories: list[AmaxHistory], skipped: Tensor | None = None, unchanged: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute `advanced` of histories with equal scaling. torch.compile traces it.

        unchanged:  bool [], on their device; true: nothing changes.
        """
        first = histories[0]
        scaling, amaxes = first.scaling, torch.stack([h.amaxes for h in histories])
        encode_scale = torch.stack([h.encode_scale for h in histories])
        current = amaxes[:, :1]
        fresh = first._scale_of(amaxes.amax(1, keepdim=True) if scaling.use == "max" else current)
        is_same = current == 0 if unchanged is None else (current == 0) | unchanged
        opened = torch.cat([torch.zeros_like(current), amaxes[:, :-1]], dim=1)
        new_amaxes = torch.where(is_same, amaxes, opened)
        new_scale = torch.where(is_same, encode_scale, fresh)
        if skipped is not None:
            skip = skipped.to(amaxes.device, non_blocking=True)
            discarded = torch.cat([current * first.keep_when_skipped, amaxes[:, 1:]], dim=1)
            new_amaxes = torch.where(skip, discarded, new_amaxes)
            new_scale = torch.where(skip, encode_scale, new_scale)
        return [
            *zip([h.amaxes for h in histories], new_amaxes.unbind()),
            *zip([h.encode_scale for h in histories], new_scale.unbind()),
        ]

    def discard_step(self) -> None:
        """Discard the amax of the current step, which was skipped, unless `keep_when_skipped`."""
        self.amaxes[0] *= self.keep_when_skipped

    def state_dict(self) -> dict[str, Tensor]:
        return {"amaxes": self.amaxes.clone(), "enc": self.encode_scale.clone()}

    def check_state(self, name: str, state: object) -> None:
        """Raise ValueError unless `state` is what `state_dict` of such a history returns."""
        for part, tensor in (("amaxes", self.amaxes), ("enc", self.encode_scale)):
            saved = state.get(part) if isinstance(state, dict) else None
            is_tensor = isinstance(saved, Tensor)
            if not is_tensor or saved.dtype is not torch.float32 or saved.shape != tensor.shape:
                actual = type(saved).__name__
                actual = f"{saved.dtype} {list(saved.shape)}" if is_tensor else actual
                raise ValueError(
                    f"{part} of the amax history of {name} is {actual} in the saved state; wanted "
                    f"float32 {list(tensor.shape)}, of the DelayedScaling(length=) of this recipe"
                )
            if not (saved.isfinite() & (saved >= 0)).all():
                raise ValueError(
                    f"{part} of the amax history of {name} holds values that are negative or not "
                    "finite in the saved state, which no step writes: the file is damaged; load "
                    "another checkpoint"
                )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state from `state_dict`. Raises ValueError as `check_state` does, and then changes
        nothing."""
        self.check_state("this slot", state)
        self.amaxes.copy_(state["amaxes"])
        self.encode_scale.copy_(state["enc"])

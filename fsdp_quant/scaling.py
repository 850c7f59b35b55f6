# SPDX-License-Identifier: Apache-2.0
"""Statistics before scales: sharing amaxes between ranks, and histories of them for delayed
scaling.

[Note: sharded statistics]
Blocks lie on the grid of the global tensor. A rank computes the amaxes of the blocks its rows
overlap; only blocks that a cut divides, and amaxes of a whole tensor, differ between ranks. Which
ones those are follows from the cuts alone, so every rank packs the same slots, one MAX all-reduce
serves all tensors, and each rank then derives the same scales. Amaxes are reduced as the int32 bits
of |amax|: non-negative floats order like their bits, and a NaN, larger than infinity as bits,
survives wherever it sits. Scales are never reduced.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .formats import Encoding, ceil_div, value_class
from .ops import dispatch, reference, runs
from .ops.dispatch import Statistics


def reduce_amaxes(amaxes: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """MAX over the ranks of `group` of fp32 tensors, in one collective; every rank of the group
    must call it.

    amaxes:   non-negative or NaN; the same shapes on every rank.
    returns:  new tensors of those shapes, NaN where any rank has one.
    """
    return _Reduction(amaxes, group).result


class _Reduction:
    """What `reduce_amaxes` gives; `run` writes what the amaxes have become over it. Of one rank,
    the amaxes themselves."""

    def __init__(self, amaxes: Sequence[Tensor], group: dist.ProcessGroup | None):
        self.result, self._group = (
            list(amaxes),
            group if amaxes and group is not None and group.size() > 1 else None,
        )
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
        """Every rank must call it; the amaxes must be contiguous."""
        if self._group is not None:
            torch.cat(self._rows, out=self._flat)
            dist.all_reduce(self._flat.view(torch.int32), op=dist.ReduceOp.MAX, group=self._group)


@value_class
class Cuts:
    """Ownership of one [rows, cols] tensor in row-major order: rank r holds the units [bounds[r],
    bounds[r + 1]).

    row_units:  units in a row: cols where any element may begin a piece, 1 where only whole rows do
                (`RowCuts`).

    Empty pieces are legal.
    """

    bounds: tuple[int, ...]
    row_units: int = 1

    @property
    def rows(self) -> int:
        return self.bounds[-1] // self.row_units

    @property
    def is_sharded(self) -> bool:
        """More than one rank wants the statistics, also when all rows lie with one of them."""
        return len(self.bounds) > 2 and self.rows > 0

    @functools.cache
    def cut_block_rows(self, encoding: Encoding) -> tuple[int, ...]:
        """Block rows whose amaxes more than one rank wants: those a cut divides, or the one of the
        whole extent."""
        b0 = encoding.fmt.dims(encoding.direction)[0]
        if not encoding.fmt.has_scales or not self.is_sharded:
            return ()
        units = (b0 or 0) * self.row_units
        return (
            (0,)
            if b0 is None
            else tuple(
                sorted({b // units for b in self.bounds if b % units and b < self.bounds[-1]})
            )
        )

    @functools.cache
    def shares_statistics(self, encoding: Encoding) -> bool:
        """Some statistic of this encoding needs more than one rank's elements."""
        return bool(self.cut_block_rows(encoding)) or (
            encoding.fmt.tensor_scale and self.is_sharded
        )


class RowCuts(Cuts):
    """Cuts between rows. Ceil-chunking (`RowCuts.chunked`) is how FSDP2 cuts."""

    @staticmethod
    @functools.cache
    def chunked(rows: int, world_size: int) -> RowCuts:
        chunk = -(-rows // world_size)
        return RowCuts(tuple(min(r * chunk, rows) for r in range(world_size)) + (rows,))


@dataclass(eq=False)
class Fragment:
    """What one rank holds of one master weight, and the encodings wanted of it.

    values:     [local rows, cols]; [elements] where cuts divide rows.
    encodings:  one a direction; each is its own tensor to the statistics.
    dtype:      that is encoded (None: of the values).
    found:      statistics of these rows that are known, one an encoding or None.
    part:       (which, of how many): of a tensor that tensor parallelism cuts into parts, each with
                blocks of its own, this is one; `cuts` are of the part.
    """

    values: Tensor
    encodings: tuple[Encoding, ...]
    cuts: Cuts
    rank: int
    dtype: torch.dtype | None = None
    found: tuple[Statistics | None, ...] | None = None
    part: tuple[int, int] = (0, 1)

    @property
    def start(self) -> int:
        return self.cuts.bounds[self.rank]

    @property
    def row0(self) -> int:
        return self.start // self.cuts.row_units

    @property
    def rows(self) -> Tensor:
        """[rows, cols]: every row of which the rank holds a part, zeros where another one does. A
        view of whole rows."""
        return self.values if self.values.dim() == 2 else self._covering_rows

    @functools.cached_property
    def _covering_rows(self) -> Tensor:
        return runs.rows_covering(
            self.values, self.start % self.cuts.row_units, self.cuts.row_units
        )

    def block_rows(self, encoding: Encoding) -> slice:
        """Rows of the whole tensor's blocks that `rows` overlaps."""
        b0 = encoding.fmt.dims(encoding.direction)[0]
        if b0 is None:
            return slice(0, 1)
        first = self.row0 // b0
        return slice(first, first + ceil_div(self.row0 % b0 + self.rows.shape[0], b0))

    def shares_statistics(self, encoding: Encoding) -> bool:
        """Some statistic of this encoding needs other rows or parts of the tensor."""
        return self.cuts.shares_statistics(encoding) or (
            self.part[1] > 1 and encoding.fmt.spans_tensor
        )

    def shared_block_rows(self, encoding: Encoding) -> tuple[int, ...]:
        """Block rows whose amaxes need them."""
        whole = self.part[1] > 1 and encoding.fmt.spans_tensor and not encoding.fmt.tensor_scale
        return (0,) if whole else self.cuts.cut_block_rows(encoding)

    def has_own_blocks(self, encoding: Encoding) -> bool:
        """Blocks of this encoding are of one part of several."""
        return self.part[1] > 1 and encoding.fmt.dims(encoding.direction) != (None, None)


def share_statistics(
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup | None,
    whole: bool = False,
    parts: dist.ProcessGroup | None = None,
) -> list[list[Statistics | None]]:
    """Statistics of every (fragment, encoding) as if each tensor were whole; at most one MAX
    all-reduce a group.

    fragments:  the same tensors, encodings and cuts in the same order on every rank of `group`.
    group:      of all ranks that hold rows of a tensor, or copies of them; of all of its parts, if
                it has some. Or one for the rows of a part, and another one, with what the first
                gave as `found`, for the parts of them.
    whole:      every block's amax on every rank, not only those of the blocks that a rank overlaps;
                of tensors of one part.
    parts:      of the ranks that hold the other parts of tensors, where `group` is of those that
                hold rows of one.
    returns:    for each fragment, for each encoding, the amaxes of the blocks that its rows
                overlap; None where no statistic crosses a cut, so that each rank finds what it
                needs in its own rows.

    Every rank of the group must call it, those with empty fragments too. When nothing crosses a
    cut, there is no collective. Equal encodings are read in one launch.
    """
    results = SharedStatistics(fragments, group, whole, own_slots=parts is None).results
    if parts is not None:
        cut = [(f, one) for f, one in enumerate(fragments) if one.part[1] > 1]
        spanning = [
            (f, e, encoding)
            for f, one in cut
            for e, encoding in enumerate(one.encodings)
            if encoding.fmt.spans_tensor
        ]
        shared = share_amaxes([(encoding, results[f][e]) for f, e, encoding in spanning], parts)
        for (f, e, _), one in zip(spanning, shared):
            results[f][e] = one
    return results


class SharedStatistics:
    """What `share_statistics` gives; `replay` writes the statistics of other values over it.

    results:    for each fragment, for each encoding.
    own_slots:  tensors that are cut into parts have a slot for each part of them.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        group: dist.ProcessGroup | None,
        whole: bool = False,
        own_slots: bool = True,
    ):
        self._places: list[tuple[int, int]] = []
        self.results: list[list[Statistics | None]] = [[None] * len(f.encodings) for f in fragments]
        for f, fragment in enumerate(fragments):
            for e, encoding in enumerate(fragment.encodings):
                if fragment.shares_statistics(encoding) or (whole and encoding.fmt.has_scales):
                    self._places.append((f, e))
        self._alike: dict[tuple, list[tuple[int, int]]] = {}
        for f, e in self._places:
            one = fragments[f]
            self._alike.setdefault((one.encodings[e], one.dtype, one.values.dtype), []).append(
                (f, e)
            )
        self._own = self._of_own_rows(fragments)
        self._padded: list[tuple[Tensor, Tensor]] = []  # (row of a slot, where it comes from)
        slots, into = [], []  # what is reduced, and what becomes of it
        for (f, e), (amax, tensor_amax) in zip(self._places, self._own):
            fragment, encoding = fragments[f], fragments[f].encodings[e]
            self.results[f][e] = Statistics(amax, tensor_amax)
            if tensor_amax is not None:
                slots.append(tensor_amax)
                into.append((f, e, None, None, False))
            if whole:
                shape = (fragment.cuts.rows, fragment.rows.shape[1])
                slots.append(amax.new_zeros(encoding.fmt.scale_shape(shape, encoding.direction)))
                mine = fragment.block_rows(encoding)
                slots[-1][mine] = amax[: mine.stop - mine.start]
                into.append((f, e, slice(None), 0, False))
                self.results[f][e] = Statistics(slots[-1], tensor_amax)
                continue
            first, own = (
                fragment.block_rows(encoding).start,
                own_slots and fragment.has_own_blocks(encoding),
            )
            for block_row in fragment.shared_block_rows(encoding):
                local = block_row - first
                mine = 0 <= local < amax.shape[0]
                slot = amax[local] if mine else amax.new_zeros(amax.shape[1])
                if own:
                    part, count = fragment.part
                    of_parts = amax.new_zeros(count, len(slot))
                    self._padded.append((of_parts[part], slot))
                    slot = of_parts
                slots.append(slot)
                into.append((f, e, local if mine else None, block_row, own))
        for slot, amax in self._padded:
            slot.copy_(amax)
        self._reduction = _Reduction(slots, group)
        # (row of a result, what it is to be), beside rows of its own rank
        self._rows: list[tuple[Tensor, Tensor]] = []
        for (f, e, local, block_row, own), reduced in zip(into, self._reduction.result):
            amax, tensor_amax = self.results[f][e]
            reduced = reduced[fragments[f].part[0]] if own else reduced
            if block_row is None:
                self.results[f][e] = Statistics(amax, reduced)
            elif local is not None and len(amax) == 1:
                self.results[f][e] = Statistics(reduced.view(1, -1), tensor_amax)
            elif local is not None:
                self._rows.append((amax[local], reduced))
        for row, amax in self._rows:
            row.copy_(amax)

    def replay(
        self, fragments: Sequence[Fragment], copy_all: Callable[[list[tuple[Tensor, Tensor]]], None]
    ) -> bool:
        """Recompute in place for new values of the same fragments. Returns False, before any
        collective, if a different set of amaxes is already known; then build a new object. Every
        rank must call it.

        copy_all:  writes (target, source) of each.
        """
        made = self._of_own_rows(fragments)
        pairs = [
            (old, new) for of in zip(self._own, made) for old, new in zip(*of) if old is not new
        ]
        if any([old is None or new is None for old, new in pairs]):
            return False
        copy_all(pairs + self._padded)
        self._reduction.run()
        copy_all(self._rows)
        return True

    def _of_own_rows(self, fragments: Sequence[Fragment]) -> list[Statistics]:
        """At each of the places: what is known, else what a launch an encoding finds."""
        made: dict[tuple[int, int], Statistics] = {}
        for (encoding, dtype, _), at in self._alike.items():
            for f, e in at:
                found = fragments[f].found
                if found and found[e] is not None:
                    made[f, e] = found[e]
            missing = [place for place in at if place not in made] if made else at
            if missing:
                of = [fragments[f] for f, _ in missing]
                found = dispatch.multi_tensor_amax(
                    [f.rows for f in of], encoding, [f.row0 for f in of], dtype
                )
                made.update(zip(missing, found))
        return [made[place] for place in self._places]


def share_amaxes(
    found: Sequence[tuple[Encoding, Statistics]],
    group: dist.ProcessGroup | None,
    reduce: Callable = reduce_amaxes,
) -> list[Statistics]:
    """Statistics whose scales span the ranks of `group`, in one MAX all-reduce; every rank of the
    group must call it.

    found:   of what this rank holds of each tensor: the tensor's amax of two-level formats, else
             all amaxes, are shared.
    reduce:  `reduce_amaxes`, or what records it in a graph.
    """
    own = [s.tensor_amax if e.fmt.tensor_scale else s.amax for e, s in found]
    return [with_amax(e, s, one) for (e, s), one in zip(found, reduce(own, group))]


def with_amax(encoding: Encoding, statistics: Statistics, amax: Tensor) -> Statistics:
    """Statistics whose part that spans a tensor is `amax`."""
    return (
        Statistics(statistics.amax, amax)
        if encoding.fmt.tensor_scale
        else Statistics(amax, statistics.tensor_amax)
    )


# Delayed scaling #


@dataclass(frozen=True)
class DelayedScaling:
    """Per-tensor scales from a history of amaxes.

    length:    steps the history holds.
    margin:    the scale leaves 2^margin of headroom.
    use:       "max" of the history, or its "newest" amax.

    >>> fq.recipes.fp8_delayed().hybrid(fq.Role("linear", "input")).rowwise.scaling
    DelayedScaling(length=1024, margin=0, use='max')
    """

    length: int = 1024
    margin: int = 0
    use: str = "max"

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"the history must hold at least one step, got length={self.length}")
        if self.use not in ("max", "newest"):
            raise ValueError(f"use must be 'max' or 'newest', got {self.use!r}")

    def __str__(self) -> str:
        return f"{self.use} of {self.length}" + (f", margin {self.margin}" if self.margin else "")


class AmaxHistory:
    """Amaxes of one (tensor role, direction), and the encode factor they give; all on the tensor's
    device.

    amaxes:  fp32 [length]; slot 0 collects the current step.
    enc:     fp32 [1]; 0 until a finite positive amax has been rolled in: the first use is current
             scaling.
    stays:   of a weight, which is the same in the step that follows a skipped one.

    The scale of a step depends on earlier steps only, so micro-batches and recomputation see one
    scale. A step in which nothing was recorded is none: a history that is rolled twice, or not
    used, stays as it is.
    """

    # every history of the process; ends with its owner
    live: ClassVar[weakref.WeakSet[AmaxHistory]] = weakref.WeakSet()

    def __init__(self, scaling: DelayedScaling, element_max: float, stays: bool = False):
        self.live.add(self)
        self.scaling, self.element_max, self.stays = scaling, element_max, stays
        # written in place later, also by steps outside inference mode
        with torch.inference_mode(False):
            self.amaxes = torch.zeros(scaling.length, device="cpu")
            self.enc = torch.zeros(1, device="cpu")

    def to(self, device: torch.device) -> AmaxHistory:
        """Move it to the device of its tensor; a tensor on the meta device has none yet, and the
        history keeps its values."""
        if self.amaxes.device != device and device.type != "meta":
            with torch.inference_mode(False):
                self.amaxes, self.enc = self.amaxes.to(device), self.enc.to(device)
        return self

    @staticmethod
    @torch.no_grad()
    def record_in(amaxes: Tensor, amax: Tensor) -> None:
        """Collect an amax of the current step in a history's tensor; a non-finite one is
        dropped."""
        dispatch.record_amax(amaxes, amax)

    def record(self, amax: Tensor) -> None:
        self.record_in(self.amaxes, amax)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.live.add(self)

    def roll(self) -> None:
        """End a step that was applied: derive the next factor, open a slot."""
        for target, values in self.rolled([self]):
            target.copy_(values)

    @staticmethod
    def alike(histories: Iterable[AmaxHistory]) -> list[list[AmaxHistory]]:
        """Those that the same launches roll, each list on one device."""
        found: dict[tuple, list[AmaxHistory]] = {}
        for h in histories:
            found.setdefault((h.scaling, h.element_max, h.stays, h.amaxes.device), []).append(h)
        return list(found.values())

    @staticmethod
    @torch.no_grad()
    def rolled(
        histories: Iterable[AmaxHistory], skipped: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """What `roll` of each writes, (tensor, values), from a few launches for all that scale
        alike.

        skipped:  bool [], on a device: where true, what `drop` of each writes.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        for of in AmaxHistory.alike(histories):
            writes += AmaxHistory.rolled_alike(of, skipped)
        return writes

    @staticmethod
    def rolled_alike(
        of: list[AmaxHistory], skipped: Tensor | None = None, kept: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`rolled` of histories that scale alike; torch.compile traces it.

        kept:  bool [], on their device: where true, nothing changes.
        """
        scaling, element_max, stays = of[0].scaling, of[0].element_max, of[0].stays
        amaxes, enc = torch.stack([h.amaxes for h in of]), torch.stack([h.enc for h in of])
        current = amaxes[:, :1]
        amax = amaxes.amax(1, keepdim=True) if scaling.use == "max" else current
        fresh = (reference.divide(element_max, amax) / 2.0**scaling.margin).clamp(
            max=torch.finfo(torch.float32).max
        )
        stay = current == 0 if kept is None else (current == 0) | kept
        opened = torch.cat([torch.zeros_like(current), amaxes[:, :-1]], dim=1)
        rolled, factors = torch.where(stay, amaxes, opened), torch.where(stay, enc, fresh)
        if skipped is not None:
            skip = skipped.to(amaxes.device, non_blocking=True)
            dropped = torch.cat([current * stays, amaxes[:, 1:]], dim=1)
            rolled, factors = torch.where(skip, dropped, rolled), torch.where(skip, enc, factors)
        return [
            *zip([h.amaxes for h in of], rolled.unbind()),
            *zip([h.enc for h in of], factors.unbind()),
        ]

    def drop(self) -> None:
        """Forget the current step's amaxes (a skipped step), but for a weight's."""
        self.amaxes[0] *= self.stays

    def state_dict(self) -> dict[str, Tensor]:
        return {"amaxes": self.amaxes.clone(), "enc": self.enc.clone()}

    def check_state(self, name: str, state: object) -> None:
        """Raise ValueError unless `state` is what `state_dict` of such a history returns."""
        for part, own in (("amaxes", self.amaxes), ("enc", self.enc)):
            saved = state.get(part) if isinstance(state, dict) else None
            if (
                not isinstance(saved, Tensor)
                or saved.dtype is not torch.float32
                or saved.shape != own.shape
            ):
                got = (
                    f"{saved.dtype} {list(saved.shape)}"
                    if isinstance(saved, Tensor)
                    else type(saved).__name__
                )
                raise ValueError(
                    f"{part} of the amax history of {name} is {got} in the saved state; wanted "
                    f"float32 {list(own.shape)}, of the DelayedScaling(length=) of this recipe"
                )
            if not (saved.isfinite() & (saved >= 0)).all():
                raise ValueError(
                    f"{part} of the amax history of {name} holds values that are negative or not "
                    "finite in the saved state, which no step writes: the file is damaged; load "
                    "another checkpoint"
                )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError, and changes nothing, for what no such history wrote
        (`check_state`)."""
        self.check_state("this slot", state)
        self.amaxes.copy_(state["amaxes"])
        self.enc.copy_(state["enc"])

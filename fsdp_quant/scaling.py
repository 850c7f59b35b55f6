"""Statistics before scales: sharing amaxes between ranks, and histories of them for delayed scaling.

[Note: sharded statistics]
Blocks lie on the grid of the global tensor. A rank computes the amaxes of the blocks its rows overlap; only
blocks that a cut divides, and amaxes of a whole tensor, differ between ranks. Which ones those are follows
from the cuts alone, so every rank packs the same slots, one MAX all-reduce serves all tensors, and each rank
then derives the same scales. Amaxes are reduced as the int32 bits of |amax|: non-negative floats order like
their bits, and a NaN, larger than infinity as bits, survives wherever it sits. Scales are never reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .formats import Encoding, value_class
from .ops import dispatch, reference
from .ops.dispatch import Statistics


def reduce_amaxes(amaxes: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """MAX over the ranks of `group` of fp32 tensors, in one collective; every rank of the group must call it.

    amaxes:   non-negative or NaN; the same shapes on every rank.
    returns:  new tensors of those shapes, NaN where any rank has one.
    """
    if not amaxes or group is None or group.size() == 1:
        return list(amaxes)
    flat = torch.cat([a.reshape(-1) for a in amaxes])
    dist.all_reduce(flat.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    pieces = flat.split([a.numel() for a in amaxes])
    return [piece if a.dim() == 1 else piece.view(a.shape) for piece, a in zip(pieces, amaxes)]


@value_class
class RowCuts:
    """Ownership of the rows of one [rows, cols] tensor: rank r holds [bounds[r], bounds[r + 1]).

    Empty pieces are legal. Ceil-chunking (`RowCuts.chunked`) is how FSDP2 cuts.
    """

    bounds: tuple[int, ...]

    @staticmethod
    @functools.cache
    def chunked(rows: int, world_size: int) -> RowCuts:
        chunk = -(-rows // world_size)
        return RowCuts(tuple(min(r * chunk, rows) for r in range(world_size)) + (rows,))

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    @property
    def is_sharded(self) -> bool:
        """More than one rank wants the statistics, also when all rows lie with one of them."""
        return len(self.bounds) > 2 and self.rows > 0

    @functools.cache
    def cut_block_rows(self, encoding: Encoding) -> tuple[int, ...]:
        """Block rows whose amax more than one rank wants: those a cut divides, or the one of the whole extent."""
        b0 = encoding.fmt.dims(encoding.direction)[0]
        if encoding.fmt.scale == "none" or not self.is_sharded:
            return ()
        return (0,) if b0 is None else tuple(sorted({b // b0 for b in self.bounds if b % b0 and b < self.rows}))

    @functools.cache
    def shares_statistics(self, encoding: Encoding) -> bool:
        """Some statistic of this encoding needs more than one rank's rows."""
        return bool(self.cut_block_rows(encoding)) or (encoding.fmt.tensor_scale and self.is_sharded)


@dataclass(frozen=True)
class Fragment:
    """This rank's rows of one master weight, and the encodings wanted of it.

    values:     [local rows, cols].
    encodings:  one a direction; each is its own tensor to the statistics.
    dtype:      that is encoded (None: of the values).
    found:      statistics of these rows that are known, one an encoding or None.
    """

    values: Tensor
    encodings: tuple[Encoding, ...]
    cuts: RowCuts
    rank: int
    dtype: torch.dtype | None = None
    found: tuple[Statistics | None, ...] | None = None

    @property
    def row0(self) -> int:
        return self.cuts.bounds[self.rank]


def share_statistics(fragments: Sequence[Fragment], group: dist.ProcessGroup | None) -> list[list[Statistics | None]]:
    """Statistics of every (fragment, encoding) as if each tensor were whole; at most one MAX all-reduce.

    fragments:  the same tensors, encodings and cuts in the same order on every rank of `group`.
    returns:    for each fragment, for each encoding, the amaxes of the blocks that its rows overlap; None where no
                statistic crosses a cut, so that each rank finds what it needs in its own rows.

    Every rank of the group must call it, those with empty fragments too. When nothing crosses a cut, there is no
    collective. Equal encodings are read in one launch.
    """
    results: list[list[Statistics | None]] = [[None] * len(f.encodings) for f in fragments]
    alike: dict[tuple, list[tuple[int, int]]] = {}
    for f, fragment in enumerate(fragments):
        for e, encoding in enumerate(fragment.encodings):
            if not fragment.cuts.shares_statistics(encoding):
                continue
            results[f][e] = fragment.found[e] if fragment.found else None
            if results[f][e] is None:
                alike.setdefault((encoding, fragment.dtype), []).append((f, e))
    for (encoding, dtype), at in alike.items():
        of = [fragments[f] for f, _ in at]
        found = dispatch.statistics_group([f.values for f in of], encoding, [f.row0 for f in of], dtype)
        for (f, e), one in zip(at, found):
            results[f][e] = one
    slots, places = [], []
    for f, fragment in enumerate(fragments):
        for e, encoding in enumerate(fragment.encodings):
            if results[f][e] is None:
                continue
            amax, tensor_amax = results[f][e]
            if tensor_amax is not None:
                slots.append(tensor_amax)
                places.append((f, e, None, None))
            b0 = encoding.fmt.dims(encoding.direction)[0]
            first = fragment.row0 // b0 if b0 else 0
            for block_row in fragment.cuts.cut_block_rows(encoding):
                local = block_row - first
                mine = 0 <= local < amax.shape[0]
                if len(amax) == 1 and mine:
                    slots.append(amax.view(-1))
                else:
                    slots.append(amax[local] if mine else amax.new_zeros(amax.shape[1]))
                places.append((f, e, local if mine else None, block_row))
    for (f, e, local, block_row), reduced in zip(places, reduce_amaxes(slots, group)):
        amax, tensor_amax = results[f][e]
        if block_row is None:
            results[f][e] = Statistics(amax, reduced)
        elif local is not None and len(amax) == 1:
            results[f][e] = Statistics(reduced.view(1, -1), tensor_amax)
        elif local is not None:
            amax[local] = reduced
    return results


# Delayed scaling #

@dataclass(frozen=True)
class DelayedScaling:
    """Per-tensor scales from a history of amaxes.

    length:    steps the history holds.
    margin:    the scale leaves 2^margin of headroom.
    use:       "max" of the history, or its "newest" amax.
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
    """Amaxes of one (tensor role, direction), and the encode factor they give; all on the tensor's device.

    amaxes:  fp32 [length]; slot 0 collects the current step.
    enc:     fp32 [1]; 0 until a finite positive amax has been rolled in: the first use is current scaling.
    stays:   of a weight, which is the same in the step that follows a skipped one.

    The scale of a step depends on earlier steps only, so micro-batches and recomputation see one scale.
    """

    def __init__(self, scaling: DelayedScaling, element_max: float, stays: bool = False):
        self.scaling, self.element_max, self.stays = scaling, element_max, stays
        with torch.inference_mode(False):  # written in place later, also by steps outside inference mode
            self.amaxes = torch.zeros(scaling.length, device="cpu")
            self.enc = torch.zeros(1, device="cpu")

    def to(self, device: torch.device) -> AmaxHistory:
        if self.amaxes.device != device:
            with torch.inference_mode(False):
                self.amaxes, self.enc = self.amaxes.to(device), self.enc.to(device)
        return self

    @staticmethod
    @torch.no_grad()
    def record_in(amaxes: Tensor, amax: Tensor) -> None:
        """Collect an amax of the current step in a history's tensor; a non-finite one is dropped."""
        dispatch.record_amax(amaxes, amax)

    def record(self, amax: Tensor) -> None:
        self.record_in(self.amaxes, amax)

    def roll(self) -> None:
        """End a step that was applied: derive the next factor, open a slot."""
        for target, values in self.rolled([self]):
            target.copy_(values)

    @staticmethod
    @torch.no_grad()
    def rolled(histories: Sequence[AmaxHistory], skipped: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """What `roll` of each writes, (tensor, values), from a few launches for all that scale alike.

        skipped:  bool [], on a device: where true, what `drop` of each writes.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        alike: dict[tuple, list[AmaxHistory]] = {}
        for history in histories:
            alike.setdefault((history.scaling, history.element_max, history.stays, history.amaxes.device), []).append(history)
        for (scaling, element_max, stays, device), of in alike.items():
            amaxes, enc = torch.stack([h.amaxes for h in of]), torch.stack([h.enc for h in of])
            amax = (amaxes.amax(1) if scaling.use == "max" else amaxes[:, 0])[:, None]
            fresh = (reference.divide(element_max, amax) / 2.0**scaling.margin).clamp(max=torch.finfo(torch.float32).max)
            dropped, kept = amaxes, enc
            enc, amaxes = torch.where(amax > 0, fresh, enc), amaxes.roll(1, 1)
            amaxes[:, 0] = 0.0
            if skipped is not None:
                skip = skipped.to(device, non_blocking=True)
                dropped[:, 0] *= stays
                enc, amaxes = torch.where(skip, kept, enc), torch.where(skip, dropped, amaxes)
            writes += [*zip((h.amaxes for h in of), amaxes), *zip((h.enc for h in of), enc)]
        return writes

    def drop(self) -> None:
        """Forget the current step's amaxes (a skipped step), but for a weight's."""
        self.amaxes[0] *= self.stays

    def state_dict(self) -> dict[str, Tensor]:
        return {"amaxes": self.amaxes.clone(), "enc": self.enc.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state["amaxes"].shape != self.amaxes.shape:
            raise ValueError(
                f"the saved amax history holds {len(state['amaxes'])} steps and this one {len(self.amaxes)}; "
                "load it with the DelayedScaling(length=) it was saved with"
            )
        self.amaxes.copy_(state["amaxes"])
        self.enc.copy_(state["enc"])

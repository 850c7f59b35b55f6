# SPDX-License-Identifier: Apache-2.0
"""Ownership of elements, codes and scales of weights that are cut at any element: integers only.

[Note: wire tensors]
A weight is sent as wire tensors: codes, or high-precision values, and scales. A wire tensor is flat
and row-major in either direction, because pieces of a flat buffer are contiguous in no other order.
The owner of an element sends its code; the owner of a block's first element sends the scale. So
each rank sends one run per wire tensor, in rank order. Two ranks share a byte only if a cut divides
a byte of packed codes; each leaves the other's bits zero.

A rank concatenates its runs of all wire tensors to one segment; segments have equal size on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..formats import Encoding, ceil_div, round_up

# Bytes. A run has the same offset modulo this in its segment and in its wire tensor, so that rows
# stay aligned.
ALIGNMENT = 16
# Bytes. Alignment of wire tensors that GEMMs read in the gathered buffer.
PLACE = 256


@dataclass(frozen=True)
class ShardMap:
    """Ownership of the elements of one tensor, in row-major order: rank r owns [cuts[r], cuts[r +
    1]).

    cuts:  ranks + 1 ascending integers from 0 to the number of elements; pieces may be empty.

    Raises ValueError for cuts that do not give each element one owner.
    """

    cuts: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "cuts", tuple(map(int, self.cuts)))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or list(self.cuts) != sorted(self.cuts):
            raise ValueError(
                "cuts must be ranks + 1 integers that start at 0 and never fall, so that every "
                f"element has one owner; got {list(self.cuts)}"
            )

    @property
    def numel(self) -> int:
        return self.cuts[-1]

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    def run(self, rank: int) -> tuple[int, int]:
        """[first, end) elements of a rank."""
        return self.cuts[rank], self.cuts[rank + 1]

    def of_scales(self, encoding: Encoding, shape: tuple[int, int]) -> ShardMap:
        """Ownership of the scales [block rows, block cols] of a [rows, cols] tensor: each belongs
        to the owner of its block's first element."""
        rows, cols = shape
        b0, b1 = (
            block or extent for block, extent in zip(encoding.fmt.dims(encoding.direction), shape)
        )
        across = ceil_div(cols, b1)

        def before(cut: int) -> int:
            """Number of blocks whose first element is before the cut."""
            row, col = divmod(min(cut, rows * cols - 1), cols)
            block_row, inside = divmod(row, b0)
            in_row = across if inside or cut == rows * cols else ceil_div(col, b1)
            return block_row * across + in_row

        return ShardMap(tuple(map(before, self.cuts)))


@dataclass(frozen=True)
class WireTensor:
    """A flat array of which every rank sends its run. name: for messages; bits: per element."""

    name: str
    bits: int
    map: ShardMap

    @property
    def nbytes(self) -> int:
        return ceil_div(self.map.numel * self.bits, 8)

    def span(self, rank: int) -> tuple[int, int]:
        """[first, end) bytes that hold a rank's run."""
        start, end = self.map.run(rank)
        return (start * self.bits // 8, ceil_div(end * self.bits, 8)) if start < end else (0, 0)


@dataclass(frozen=True)
class Segments:
    """Byte offsets of the runs of wire tensors in the equal-sized segments that ranks all-gather.

    If ranks share a flat buffer evenly and wire tensors are sorted by `in_order`, the concatenated
    segments may contain the wire tensors contiguously (`in_place_offsets`).
    """

    wire_tensors: tuple[WireTensor, ...]
    ranks: int

    @staticmethod
    def in_order(wire: WireTensor) -> list[float]:
        """Sort key: the order of a flat buffer, from its first rank to its last."""
        return [-cut / wire.map.numel for cut in wire.map.cuts]

    def _offsets(self, places: Sequence[int] | None) -> list[list[int]]:
        """`offsets` of runs whose wire tensors begin at `places` in the concatenated segments;
        None: of concatenated runs."""
        per_rank = []
        for rank in range(self.ranks):
            offsets, used = [], 0
            for p, wire in enumerate(self.wire_tensors):
                first, end = wire.span(rank)
                if places is None:
                    used += (first - used) % ALIGNMENT
                elif first < end:
                    used = places[p] + first - rank * self.size
                offsets.append(used)
                used += end - first
            per_rank.append([*offsets, used])
        return per_rank

    @cached_property
    def size(self) -> int:
        """Bytes of a segment."""
        return round_up(max(offsets[-1] for offsets in self._offsets(None)), ALIGNMENT)

    @cached_property
    def in_place_offsets(self) -> list[int] | None:
        """Byte offset of each wire tensor in the concatenated segments; None if one is not
        contiguous.

        Only a rank's last wire tensor may continue in the next segment, where it must come first.
        """
        places, used = [], 0
        for wire in self.wire_tensors:
            spans = [(rank * self.size, *wire.span(rank)) for rank in range(self.ranks)]
            runs = [(segment, first, end) for segment, first, end in spans if first < end]
            if self.ranks == 1 or any((end - first) % PLACE for _, first, end in runs):
                return None
            segment, _, cut = runs[0]
            place = max(used, segment) if len(runs) == 1 else segment + self.size - cut
            if place < used or any(
                not start <= place + first <= place + end <= start + self.size
                for start, first, end in runs
            ):
                return None
            places.append(place)
            used = place + wire.nbytes
        return places

    @cached_property
    def offsets(self) -> list[list[int]]:
        """Per rank: the offset of each wire tensor's run in the segment, then the number of used
        bytes."""
        return self._offsets(self.in_place_offsets)


def scale_count(encoding: Encoding, shape: tuple[int, int]) -> int:
    """Number of scales of a [rows, cols] tensor."""
    return prod(encoding.fmt.scale_shape(shape, encoding.direction) or (0,))

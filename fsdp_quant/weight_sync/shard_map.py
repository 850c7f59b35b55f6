# SPDX-License-Identifier: Apache-2.0
"""Who owns, and who publishes, which elements of a tensor whose masters lie in pieces: integers, no
tensors.

[Note: planes]
What a weight publishes are planes: its codes, or its values in high precision, and its scales. A
plane lies flat and row-major, whatever its direction, because a piece of a flat buffer is
contiguous in no other order. Who publishes what follows from the cuts of the elements alone: codes
are published by the owner of their element, a scale by the owner of its block's first one. So every
plane is a run a rank, in rank order, and its bytes are derived from elements, never cut or padded
on their own. Two ranks share a byte only where a cut divides a container of codes: each leaves the
other's bits zero.

A rank sends its runs of all planes one behind the other, as one segment of a size that all ranks
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..formats import Encoding, ceil_div, round_up

# bytes: a run lies in a segment as in its plane, modulo this, so that rows are aligned whatever the
#        cut
ALIGNMENT = 16
# bytes: where a plane may begin that products read where it was gathered, as in memory of its own
PLACE = 256


@dataclass(frozen=True)
class ShardMap:
    """Ownership of the elements of one tensor, in row-major order: rank r owns [cuts[r], cuts[r +
    1]).

    cuts:  ranks + 1 integers from 0 to the number of elements, never falling. Any element, empty
           pieces too.

    Raises ValueError for cuts that leave elements without an owner, or with two.
    """

    cuts: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "cuts", tuple(map(int, self.cuts)))
        if (
            len(self.cuts) < 2
            or self.cuts[0] != 0
            or any(a > b for a, b in zip(self.cuts, self.cuts[1:]))
        ):
            raise ValueError(
                "cuts must be ranks + 1 integers that start at 0 and never fall, so that every "
                f"element has one owner; got {list(self.cuts)}"
            )

    @staticmethod
    def of_ranges(ranges: list[tuple[int, int]], numel: int) -> ShardMap:
        """The map of what each rank owns, (start, end) by rank; empty where start == end, wherever
        that is.

        Raises ValueError for ranges that overlap, leave a gap, or do not lie in rank order.
        """
        cuts = [0]
        for rank, (start, end) in enumerate(ranges):
            if start != end and start != cuts[-1]:
                what = "overlap" if start < cuts[-1] else "leave a gap"
                raise ValueError(
                    f"the ranges {what} at rank {rank}, which owns [{start}, {end}) after "
                    f"{cuts[-1]} of {numel}"
                )
            cuts.append(cuts[-1] if start == end else end)
        if cuts[-1] != numel:
            raise ValueError(f"the ranges end at element {cuts[-1]} of {numel}")
        return ShardMap(tuple(cuts))

    @property
    def numel(self) -> int:
        return self.cuts[-1]

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    def run(self, rank: int) -> tuple[int, int]:
        """(first element of a rank, one behind its last)."""
        return self.cuts[rank], self.cuts[rank + 1]

    def of_scales(self, encoding: Encoding, shape: tuple[int, int]) -> ShardMap:
        """Who publishes the scales [block rows, block cols] of a [rows, cols] tensor: the owner of
        a block's first element."""
        rows, cols = shape
        b0, b1 = (
            block or extent for block, extent in zip(encoding.fmt.dims(encoding.direction), shape)
        )
        across = ceil_div(cols, b1)

        def before(cut: int) -> int:
            """Blocks whose first element lies before the cut."""
            row, col = divmod(min(cut, rows * cols - 1), cols)
            block_row, inside = divmod(row, b0)
            own = across if inside or cut == rows * cols else ceil_div(col, b1)
            return block_row * across + own

        return ShardMap(tuple(map(before, self.cuts)))


@dataclass(frozen=True)
class WireTensor:
    """A flat array of which every rank publishes its run.

    name:  for messages.
    bits:  of one element.
    """

    name: str
    bits: int
    map: ShardMap

    @property
    def nbytes(self) -> int:
        return ceil_div(self.map.numel * self.bits, 8)

    def span(self, rank: int) -> tuple[int, int]:
        """(first byte, one behind the last) of the bytes that hold a rank's run."""
        start, end = self.map.run(rank)
        return (start * self.bits // 8, ceil_div(end * self.bits, 8)) if start < end else (0, 0)

    def shares_first_byte(self, rank: int) -> bool:
        """The run begins in the middle of a byte, whose other part the rank before publishes."""
        start, end = self.map.run(rank)
        return start < end and start * self.bits % 8 != 0


@dataclass(frozen=True)
class Segments:
    """Where the runs of some planes lie in the segments that ranks send: of one size, one behind
    the other.

    Of planes of a flat buffer that ranks share evenly (`in_order`), all segments together may be
    the planes themselves.
    """

    planes: tuple[WireTensor, ...]
    ranks: int

    @staticmethod
    def in_order(plane: WireTensor) -> list[float]:
        """Sorts planes as a flat buffer has them, from its first rank to its last."""
        return [-cut / plane.map.numel for cut in plane.map.cuts]

    @cached_property
    def _packed(self) -> list[list[int]]:
        """`offsets`, where runs lie one behind the other."""
        made = []
        for rank in range(self.ranks):
            offsets, used = [], 0
            for plane in self.planes:
                first, end = plane.span(rank)
                offsets.append(used + (first - used) % ALIGNMENT)
                used = offsets[-1] + end - first
            made.append([*offsets, used])
        return made

    @cached_property
    def size(self) -> int:
        """Bytes of a segment."""
        return round_up(max(at[-1] for at in self._packed), ALIGNMENT)

    @cached_property
    def places(self) -> list[int] | None:
        """The first byte of each plane in the segments of all ranks, where none is torn apart;
        None.

        Of one rank's planes the last one alone may go on in the next segment, whose first one it
        is.
        """
        spans = [[plane.span(rank) for rank in range(self.ranks)] for plane in self.planes]
        if self.ranks == 1 or any((end - first) % PLACE for of in spans for first, end in of):
            return None
        places, used = [], 0
        for plane, of in zip(self.planes, spans):
            runs = [
                (rank * self.size, first, end)
                for rank, (first, end) in enumerate(of)
                if first < end
            ]
            segment, _, cut = runs[0]
            place = max(used, segment) if len(runs) == 1 else segment + self.size - cut
            if place < used or any(
                not at <= place + first <= place + end <= at + self.size for at, first, end in runs
            ):
                return None
            places.append(place)
            used = place + plane.nbytes
        return places

    @cached_property
    def offsets(self) -> list[list[int]]:
        """Of each rank, for each plane: the first byte of its run in the segment, and last the
        bytes that are used."""
        if self.places is None:
            return self._packed
        made = []
        for rank in range(self.ranks):
            offsets, used = [], 0
            for plane, place in zip(self.planes, self.places):
                first, end = plane.span(rank)
                offsets.append(place + first - rank * self.size if first < end else used)
                used = offsets[-1] + end - first
            made.append([*offsets, used])
        return made

    def validate(self) -> None:
        """Raise ValueError unless a receiver finds every element once, where its owner put it.

        Element by run, from the byte ranges alone: what a rank puts at them, and what a receiver
        takes from them.
        """
        for p, plane in enumerate(self.planes):
            found = 0  # bits of the plane that were found, in order
            for rank in range(self.ranks):
                start, end = plane.map.run(rank)
                first, last = plane.span(rank)
                at = self.offsets[rank][p]
                if start == end:
                    continue
                inside = (at - first) % ALIGNMENT == 0 and at + last - first <= self.offsets[rank][
                    p + 1
                ] <= self.size
                whole = (
                    8 * first <= start * plane.bits < 8 * (first + 1)
                    and 8 * (last - 1) < end * plane.bits <= 8 * last
                )
                if found != start * plane.bits or not inside or not whole:
                    raise ValueError(
                        f"{plane.name}: rank {rank} owns elements [{start}, {end}), and publishes "
                        "others"
                    )
                found = end * plane.bits
            if found != plane.map.numel * plane.bits:
                raise ValueError(
                    f"{plane.name}: elements from {found // plane.bits} on have no owner, of "
                    f"{plane.map.numel}"
                )


def scale_count(encoding: Encoding, shape: tuple[int, int]) -> int:
    """Scales of a [rows, cols] tensor."""
    return prod(encoding.fmt.scale_shape(shape, encoding.direction) or (0,))

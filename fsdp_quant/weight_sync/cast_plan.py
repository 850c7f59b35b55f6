# SPDX-License-Identifier: Apache-2.0
"""`CastPlan`: cast the masters of a sync with kernels that read tables in device memory.

[Note: three launches]
    first       per 128 x 128 tile of each whole tensor: collect amaxes that ranks share or that
                span several tiles; encode blocks that no cut divides and one tile contains
    all-reduce  of the shared amaxes, in one buffer with the same order on every rank; those of
                whole tensors come first and are also reduced over tensor-parallel parts
    second      encode the remaining blocks
    scales      of collected amaxes; cast masters that are gathered as values

Codes and scales are written into the segments that are gathered. One launch serves all weights with
equal encodings, and only changed pointers are copied to the device. Bytes equal those of
`cast_master_weights`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding, ceil_div
from ..ops import native
from ..tensor import torch_compat
from .synced_weight import GatherBuffer, SyncedWeight

TILE, CHUNK = native.TILE, 2048  # CHUNK: scales or values per thread block
COLLECT, ENCODE = 1, 2  # a tile's work; of the columnwise side, shifted by two
# who shares an amax: ranks of all parts of a weight, ranks of this part, nobody
PARTS, RANKS, OWN = range(3)
FP32 = 4


def _packed(*ints: int) -> list[int]:
    """int32 in pairs, as int64."""
    words = [a & 0xFFFFFFFF | (b & 0xFFFFFFFF) << 32 for a, b in zip(ints[::2], ints[1::2])]
    return [w - (1 << 64) if w >> 63 else w for w in words]


class _Side:
    """One encoding of a weight: the blocks that only this piece holds, and the arena offsets of the
    other blocks' amaxes.

    rows:         [first, end) that the piece overlaps.
    undivided:    [first, end) rows of blocks that no cut divides; early: those that the first
                  launch encodes.
    cut:          block row that a cut divides -> first element of its amaxes.
    amaxes:       offset of block row 0, if amaxes of whole rows, or all, are collected; else None.
    tensor_amax:  offset of a two-level format's tensor amax, or None.
    """

    amaxes: int | None
    tensor_amax: int | None

    def __init__(self, weight: SyncedWeight, encoding: Encoding, rank: int, dense: bool):
        fmt, direction = encoding.fmt, encoding.direction
        self.weight, self.encoding, self.cuts = weight, encoding, weight.cuts
        self.start, self.end = weight.shards.run(rank)
        rows, cols = weight.shape
        self.block_rows, self.across = fmt.scale_shape(weight.shape, direction) or (0, 0)
        self.rows = self.start // cols, ceil_div(self.end, cols)
        self.height = fmt.dims(direction)[0] or rows
        self.spans = fmt.block[1] is None  # a scale needs more than a tile
        self.in_one_launch = not self.spans and not fmt.tensor_scale
        self.all_shared = dense and self.cuts.is_sharded
        cut = self.cuts.cut_block_rows(encoding)
        self.cut_rows = [
            r for r in cut if self.rows[0] // self.height <= r < ceil_div(self.rows[1], self.height)
        ]
        unit = self.height * cols
        lo = ceil_div(self.start, unit)
        hi = ceil_div(self.end, unit) if self.end == rows * cols else self.end // unit
        self.undivided = (
            (0, 0)
            if fmt.dims(direction)[0] is None and cut
            else (lo * self.height, min(max(hi, lo) * self.height, rows))
        )
        self.early = self.undivided if self.in_one_launch else (0, 0)

    def collect(self, reserve: Callable[[int, int], int]) -> None:
        """Lay out the collected amaxes; reserve(elements, among) returns the same offset on every
        rank that shares them."""
        fmt, across, blocks = self.encoding.fmt, self.across, RANKS if self.cuts.is_sharded else OWN
        tensor = PARTS if self.weight.spans_parts(self.encoding) else blocks
        self.tensor_amax = reserve(1, tensor) if fmt.tensor_scale else None
        blocks = blocks if fmt.tensor_scale else tensor
        if self.all_shared:
            self.amaxes = reserve(self.block_rows * across, blocks)
            self.cut = {r: self.amaxes + r * across for r in self.cut_rows}
            return
        shared = {r: reserve(across, blocks) for r in self.cuts.cut_block_rows(self.encoding)}
        self.amaxes, self.cut = None, {r: shared[r] for r in self.cut_rows}
        if self.spans and self.block_rows == 1 and shared:
            self.amaxes, self.cut = shared[0], {}
        elif self.spans and self.start < self.end:
            first, end = self.rows[0] // self.height, ceil_div(self.rows[1], self.height)
            self.amaxes = (
                reserve((end - first) * across, PARTS if blocks == PARTS else OWN) - first * across
            )

    def work(self, second: bool) -> list[int]:
        """Work of a launch per tile row of the piece, for this side."""
        works = []
        for tile_row in range(self.rows[0] // TILE, ceil_div(self.rows[1], TILE)):
            first = max(tile_row * TILE, self.rows[0])
            end = min((tile_row + 1) * TILE, self.rows[1])
            if second:
                is_early = self.early[0] <= first and end <= self.early[1]
                works.append(0 if is_early or self.weight.gathers_values else ENCODE)
                continue
            is_undivided = self.undivided[0] <= first and end <= self.undivided[1]
            collects = not self.in_one_launch or self.all_shared or not is_undivided
            encodes = first < self.early[1] and end > self.early[0]
            works.append(COLLECT * collects | ENCODE * encodes)
        return works

    def scale_runs(self, synced: tuple[int, int]) -> list[tuple[int, int, int]]:
        """(first element in the arena, first scale, scales) of scales from collected amaxes.

        synced:     [first, end) of the scales to write.
        """
        if self.amaxes is not None and (self.all_shared or (self.spans and self.block_rows == 1)):
            runs = [(self.amaxes, 0, self.block_rows * self.across)]
        else:
            runs = [(a, r * self.across, (r + 1) * self.across) for r, a in self.cut.items()]
            if self.spans and self.amaxes is not None:
                first, end = (ceil_div(row, self.height) * self.across for row in self.undivided)
                runs.append((self.amaxes + first, first, end))
        clipped = [
            (amax - first, max(first, synced[0]), min(end, synced[1])) for amax, first, end in runs
        ]
        return [(amax + lo, lo, hi - lo) for amax, lo, hi in clipped if lo < hi]


class _Group:
    """Weights with equal encodings, which share a launch.

    masters:  index of the weight, per row of the table.
    """

    def __init__(self, row: Encoding | None, col: Encoding | None):
        self.encodings = row, col
        self.masters: list[int] = []
        self.sides: list[tuple[_Side | None, _Side | None]] = []
        self.tiles: list[Tensor] = []  # int32 [tiles, 4], of both launches
        # int64 [masters, ..], on the host, and on the device
        self.rows = self.table = torch.empty(0, dtype=torch.int64, device="cpu")
        # None: the launch skips that side
        self.works: list[list[Encoding | None]] = [[row, col], [row, col]]

    def lay_tiles(self, device: torch.device) -> None:
        """int32 [tiles, 4] per launch: index, tile row, tile column, work; in strips of four
        rows."""
        for second in (False, True):
            parts = [torch.empty(0, 4, dtype=torch.int32, device="cpu")]
            for index, sides in enumerate(self.sides):
                side = next(s for s in sides if s is not None)
                if side.start == side.end:
                    continue
                row, col = ([] if s is None else s.work(second) for s in sides)
                works = [r | c << 2 for r, c in itertools.zip_longest(row, col, fillvalue=0)]
                work = torch.tensor(works, dtype=torch.int32, device="cpu")
                rows, cols = _in_order(len(work), ceil_div(side.weight.shape[1], TILE))
                tiles = torch.stack(
                    (torch.full_like(rows, index), rows + side.rows[0] // TILE, cols, work[rows]), 1
                )
                parts.append(tiles[tiles[:, 3] != 0])
            tiles = torch.cat(parts)
            self.works[second] = [
                e if (tiles[:, 3] >> 2 * d & 3).any() else None
                for d, e in enumerate(self.encodings)
            ]
            # the second launch starts with what is in L2
            self.tiles.append((tiles.flip(0) if second else tiles).contiguous().to(device))


@functools.lru_cache(maxsize=64)
@torch_compat.outside_modes()
def _in_order(down: int, right: int) -> tuple[Tensor, Tensor]:
    """int32 (row, column) of every tile; consecutive tiles write adjacent memory."""
    tiles = torch.arange(down * right, dtype=torch.int64, device="cpu")
    rows, cols = tiles % down, tiles // down
    order = ((rows // 4) * (4 * right) + cols * 4 + rows % 4).argsort()
    return rows[order].int(), cols[order].int()


@dataclass
class _Runs:
    """Scales, and values: rows of the table (`ScaleSegment` in csrc/quantize/pieces.h).

    encodings:  of the scales.
    masters:    row -> index of the weight whose master it reads.
    """

    encodings: list[Encoding]
    rows: list[list[int]] = field(default_factory=list)
    masters: dict[int, int] = field(default_factory=dict)
    table: Tensor = field(init=False)
    chunks: Tensor = field(init=False)

    def add(
        self,
        source: int,
        out: int,
        count: int,
        encoding: Encoding | None = None,
        tensor_amax: int = 0,
        enc: int = 0,
        record: int = 0,
        narrow: int = 0,
        master: int | None = None,
    ) -> None:
        """Scales of an encoding, or (None) values."""
        if count:
            if master is not None:
                self.masters[len(self.rows)] = master
            side = -1 if encoding is None else self.encodings.index(encoding)
            self.rows.append([source, out, tensor_amax, enc, record, count, *_packed(narrow, side)])

    def lay(self, device: torch.device) -> None:
        counts = [ceil_div(row[5], CHUNK) for row in self.rows]
        chunks = [(run, chunk) for run, n in enumerate(counts) for chunk in range(n)]
        self.chunks = torch.tensor(chunks, dtype=torch.int32, device=device).view(-1, 2)


class CastPlan:
    """Casts the masters of `weights` into the segments of a sync, on all ranks of the group or
    none.

    weights:  the weights of the sync, in its order.
    address:  (weight's name, direction, part) -> address of this rank's run of a wire tensor.
    channels: whose segments hold these runs.
    """

    def __init__(
        self,
        weights: Sequence[SyncedWeight],
        rank: int,
        dense: bool,
        device: torch.device,
        address: Callable[[str, Direction | None, str], int],
        channels: Sequence[GatherBuffer],
    ):
        self._weights, self._rank, self._device = weights, rank, device
        self._address, self._channels = address, channels
        self._groups: dict[tuple, _Group] = {}
        self._sides: list[_Side] = []
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        for index, weight in enumerate(weights):
            sides: dict[Direction, _Side] = {}
            for fragment in weight.fragments(nothing, rank):
                for encoding in fragment.encodings:
                    if encoding.fmt.is_quantized:
                        sides[encoding.direction] = _Side(weight, encoding, rank, dense)
            if sides:
                row, col = sides.get(ROWWISE), sides.get(COLUMNWISE)
                key = None if row is None else row.encoding, None if col is None else col.encoding
                group = self._groups.setdefault(key, _Group(*key))
                group.masters.append(index)
                group.sides.append((row, col))
                self._sides += sides.values()
        used = [0, 0, 0]

        def reserve(elements: int, among: int) -> int:
            used[among] += elements
            return used[among] - elements

        # The second pass knows the sizes of the shared parts, and places the rest behind them.
        for start in (0, 1):
            used = [0, start * used[PARTS], start * (used[PARTS] + used[RANKS])]
            for side in self._sides:
                side.collect(reserve)
        self._of_parts, self._shared, size = used
        self._arena = torch.zeros(size, dtype=torch.float32, device=device)
        self._delayed = [s.weight for s in self._sides if s.weight.quantizer.delayed_directions]
        for group in self._groups.values():
            group.lay_tiles(device)
        self._runs: list[_Runs] = []
        self._laid: object = None
        self._masters: list[weakref.ref] = []
        self._pointers: list[int] = []

    @staticmethod
    def unsupported_reason(weights: Sequence[SyncedWeight], device: torch.device) -> str | None:
        """Why kernels cannot cast these weights, in one clause equal on all ranks, or None."""
        if not native.is_available_on(device):
            return f"no kernels run on this {device.type}"
        for weight in weights:
            for direction, encoding in weight.quantizer.encodings.items():
                reason = native.unsupported_pieces_reason(
                    encoding, weight.encoded_dtypes[direction], weight.shape[1]
                )
                if weight.gathers_values and weight.wire_dtype not in native.PIECE_VALUES:
                    reason = f"values travel in {weight.wire_dtype}"
                if reason is not None:
                    return f"{weight.name}.{direction.value}: {reason}"
        return None

    # Tables #

    def knows(self, masters: Sequence[Tensor]) -> bool:
        """These are the masters of the last cast, at the same addresses."""
        return (
            len(masters) == len(self._masters)
            and all(ref() is m for ref, m in zip(self._masters, masters))
            and [m.data_ptr() for m in masters] == self._pointers
        )

    def _amax_address(self, index: int | None) -> int:
        return 0 if index is None else self._arena.data_ptr() + FP32 * index

    def _scale_base(self, side: _Side) -> tuple[int, tuple[int, int]]:
        """(address of scale 0 of the whole tensor, [first, end) of the scales to write)."""
        weight, direction = side.weight, side.encoding.direction
        if weight.gathers_values:
            return 0, (0, 0)
        scale = weight.staged[direction].get("scale")
        if scale is not None:
            return scale.data_ptr(), (0, side.block_rows * side.across)
        first, end = weight.wire_tensors[direction, "scale"].map.run(self._rank)
        size = side.encoding.fmt.scale_bytes
        return self._address(weight.name, direction, "scale") - first * size, (first, end)

    def _side_row(self, side: _Side | None) -> list[int]:
        if side is None:
            return [0] * 16
        weight, e = side.weight, side.encoding
        data, bits = 0, e.fmt.bits
        if not weight.gathers_values:
            data = self._address(weight.name, e.direction, "codes") - side.start * bits // 8
        scale = 0 if side.spans or side.all_shared else self._scale_base(side)[0]
        (rows, cols), cut = weight.shape, [*side.cut.items(), (-1, None), (-1, None)][:2]
        history = weight.history(e.direction)
        pointers = [
            data,
            scale,
            self._amax_address(side.amaxes),
            *(self._amax_address(offset) for _, offset in cut),
            self._amax_address(side.tensor_amax),
            0 if history is None else history.encode_scale.data_ptr(),
            side.start,
            side.end,
        ]
        lines, length = (rows, cols) if e.direction is ROWWISE else (cols, rows)
        vectors = cols % 8 == 0 and data % (bits if bits == 8 else 4) == 0
        return pointers + _packed(
            lines,
            length,
            side.across,
            *(r for r, _ in cut),
            *side.undivided,
            *side.early,
            *side.rows,
            side.all_shared,
            vectors,
            0,
        )

    def _lay(self) -> None:
        """Build the tables, without masters."""
        encodings = list(dict.fromkeys(s.encoding for s in self._sides))
        starts = range(0, max(len(encodings), 1), native.SCALE_SIDES)
        self._runs = [_Runs(encodings[i : i + native.SCALE_SIDES]) for i in starts]
        for group in self._groups.values():
            rows = []
            for index, (row, col) in zip(group.masters, group.sides):
                weight = self._weights[index]
                head = [0, *weight.shards.run(self._rank), *_packed(*weight.shape, 0, 0)]
                rows.append(head + self._side_row(row) + self._side_row(col))
            group.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        for side in self._sides:
            self._lay_scales(side)
        for index, weight in enumerate(self._weights):
            for (direction, part), wire in weight.wire_tensors.items():
                dtype = weight.wire_dtype if direction is None else weight.encoded_dtypes[direction]
                if direction is None or (
                    part == "codes" and not weight.quantizer.encodings[direction].fmt.is_quantized
                ):
                    start, end = wire.map.run(self._rank)
                    narrow = 2 * (dtype is torch.bfloat16)
                    out = self._address(weight.name, direction, part)
                    self._runs[0].add(0, out, end - start, narrow=narrow, master=index)
        self._runs = [runs for runs in self._runs if runs.rows]
        for runs in self._runs:
            runs.lay(self._device)

    def _lay_scales(self, side: _Side) -> None:
        weight, fmt, direction = side.weight, side.encoding.fmt, side.encoding.direction
        history, (base, synced) = weight.history(direction), self._scale_base(side)
        runs = next(r for r in self._runs if side.encoding in r.encodings)
        delayed = {}
        if history is not None:
            delayed["enc"] = history.encode_scale.data_ptr()
            delayed["record"] = history.amaxes.data_ptr()
        scale_runs = side.scale_runs(synced)
        tensor_amax = self._amax_address(side.tensor_amax)
        for amax, first, count in scale_runs:
            out = base + first * fmt.scale_bytes
            runs.add(self._amax_address(amax), out, count, side.encoding, tensor_amax, **delayed)
        # another rank writes the scale; every rank keeps the history
        if delayed and not scale_runs:
            runs.add(self._amax_address(side.amaxes), 0, 1, side.encoding, **delayed)
        staged = weight.amaxes.get(direction)
        if not weight.gathers_values:
            staged = weight.staged[direction].get("tensor_amax")
        if staged is not None:
            source = side.amaxes if side.tensor_amax is None else side.tensor_amax
            runs.add(self._amax_address(source), staged.data_ptr(), 1)

    def _point_at(self, masters: Sequence[Tensor]) -> None:
        """Write the masters' addresses into the tables, and copy the tables to the device."""
        for group in self._groups.values():
            for row, index in enumerate(group.masters):
                weight, size = self._weights[index], masters[index].element_size()
                first = masters[index].data_ptr() - weight.shards.run(self._rank)[0] * size
                vectors = first % 16 == 0 and weight.shape[1] * size % 16 == 0
                group.rows[row, 0] = first
                group.rows[row, 4] = _packed(size == 2, vectors)[0]
            group.table = group.rows.to(self._device)
        for runs in self._runs:
            for row, index in runs.masters.items():
                runs.rows[row][0] = masters[index].data_ptr()
                runs.rows[row][6] = runs.rows[row][6] & ~1 | (masters[index].element_size() == 2)
            runs.table = torch.tensor(runs.rows, dtype=torch.int64, device=self._device)

    def _update(self, masters: Sequence[Tensor]) -> None:
        histories = [
            h.encode_scale.data_ptr()
            for w in self._delayed
            for d in w.quantizer.delayed_directions
            if (h := w.history(d))
        ]
        laid = [channel.segment.data_ptr() for channel in self._channels], histories
        if laid != self._laid:
            self._lay()
            self._laid, self._masters = laid, []
        if not self._masters or not self.knows(masters):
            self._point_at(masters)
            self._masters = [weakref.ref(m) for m in masters]
            self._pointers = [m.data_ptr() for m in masters]

    # A cast #

    def cast_(
        self,
        masters: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        parts: dist.ProcessGroup | None,
        skip: Tensor | None,
    ) -> None:
        """Write this rank's segments and the staged scales.

        masters:  flat, contiguous, of the planned lengths; fp32 or bf16.
        parts:    group of the other tensor-parallel parts, or None.
        skip:     bool [1] on the device; if true, nothing is written.
        """
        self._update(masters)
        self._arena.zero_()
        for second in (False, True):
            for ranks, shared in ((group, self._shared), (parts, self._of_parts)) if second else ():
                if shared and ranks is not None and ranks.size() > 1:
                    counters.add("amax all-reduce", "sync")
                    dist.all_reduce(
                        self._arena[:shared].view(torch.int32), op=dist.ReduceOp.MAX, group=ranks
                    )
            for weights in self._groups.values():
                if len(weights.tiles[second]):
                    row, col = weights.works[second]
                    native.cast_pieces(weights.table, weights.tiles[second], row, col, second, skip)
        for runs in self._runs:
            native.cast_scales(runs.table, runs.chunks, runs.encodings, skip)
        for weights in self._groups.values():
            for encoding in filter(None, weights.encodings):
                detail = encoding.fmt.name, encoding.direction.value, "native"
                counters.add("quantize", detail, len(weights.masters))

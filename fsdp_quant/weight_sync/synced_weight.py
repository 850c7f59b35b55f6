# SPDX-License-Identifier: Apache-2.0
"""A weight whose masters lie in pieces: the planes that it publishes, and the channels that planes
travel in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops import dispatch, runs
from ..scaling import AmaxHistory, Cuts, Fragment, with_amax
from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeight
from .shard_map import Segments, ShardMap, WireTensor, scale_count

BOTH = frozenset(Direction)
# A ring sends every amax twice, in fp32.
AMAX_BYTES = 8


class SyncItem(NamedTuple):
    """One weight: a parameter of `fq.quantized_model_init`, [N, K], and who owns which of its
    elements.

    is_part:  of a weight that the ranks of the sync's `tensor_group` hold, if it has one.
    """

    name: str
    param: Tensor
    shards: ShardMap
    is_part: bool = True


def bits_of(encoding: Encoding, dtype: torch.dtype) -> int:
    return encoding.fmt.bits if encoding.fmt.is_quantized else 8 * dtype.itemsize


class Side:
    """One encoding of a weight: what is staged until `finish`.

    scale:        of the whole tensor, where statistics are dense.
    tensor_amax:  fp32 [1] of a two-level format.
    """

    def __init__(
        self, encoding: Encoding, shape: tuple[int, int], device: torch.device, dense: bool
    ):
        fmt, self.encoding = encoding.fmt, encoding
        self.scale = self.tensor_amax = None
        if dense and fmt.has_scales:
            scale_shape = fmt.scale_shape(shape, encoding.direction)
            self.scale = torch.zeros(scale_shape, dtype=fmt.scale_dtype, device=device)
        if fmt.tensor_scale:
            self.tensor_amax = torch.zeros(1, device=device)


class SyncedWeight:
    """One weight of a sync: its planes, and how they become storages.

    part:     (which, of how many) parts of a weight that tensor parallelism cuts this is.
    amaxes:   of the whole tensor, where values of a part are gathered and scales span all of them.
    """

    def __init__(self, item: SyncItem, transport: str, dense: bool, part: tuple[int, int]):
        self.name, self.shards, self.weight = item.name, item.shards, item.param
        self.state, self.shape, self.device = (
            self.weight.state,
            tuple(self.weight.shape),
            self.weight.device,
        )
        self.quantizer, self.dense, self.part = self.state.quantizer, dense, part
        self.cuts = Cuts(item.shards.cuts, self.shape[1])
        self.seen = {
            d: self.state.encoded_dtype(e, self.weight.dtype)
            for d, e in self.quantizer.encodings.items()
        }
        dtypes = {dtype or torch.float32 for dtype in self.seen.values()}
        self.wire_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.planes = self._code_planes()
        if transport == "highprec" or (transport == "auto" and self._values_are_fewer()):
            values = WireTensor(f"{self.name}.values", 8 * self.wire_dtype.itemsize, self.shards)
            self.planes = {(None, "values"): (BOTH, values)}
        self.sides = {d: Side(e, self.shape, self.device, dense) for d, e in self.encoded.items()}
        others = [
            (d, e.fmt)
            for d, e in self.quantizer.encodings.items()
            if self.gathers_values and self.spans_parts(e)
        ]
        self.amaxes = {
            d: torch.zeros((1,) if fmt.tensor_scale else (1, 1), device=self.device)
            for d, fmt in others
        }

    @property
    def gathers_values(self) -> bool:
        return (None, "values") in self.planes

    @property
    def encoded(self) -> dict[Direction, Encoding]:
        """What a cast encodes: nothing where values are gathered."""
        return {} if self.gathers_values else self.quantizer.encodings

    def spans_parts(self, encoding: Encoding) -> bool:
        """Some scale is of all parts together."""
        return self.part[1] > 1 and encoding.fmt.spans_tensor

    def serves(self, direction: Direction) -> frozenset[Direction]:
        """The directions whose storages come from what is encoded of this one."""
        return (
            BOTH
            if direction is ROWWISE and COLUMNWISE not in self.quantizer.encodings
            else frozenset({direction})
        )

    def shares(self, direction: Direction) -> frozenset[Direction]:
        """The directions that read the same storage."""
        return BOTH if self.quantizer.shares_storage else frozenset({direction})

    def _code_planes(
        self,
    ) -> dict[tuple[Direction | None, str], tuple[frozenset[Direction], WireTensor]]:
        """(direction, part) -> (directions that it serves, plane)."""
        planes = {}
        for d, encoding in self.quantizer.encodings.items():
            name = f"{self.name}.{d.value}"
            planes[d, "codes"] = (
                self.serves(d),
                WireTensor(f"{name}.codes", bits_of(encoding, self.weight.dtype), self.shards),
            )
            if not self.dense and encoding.fmt.has_scales:
                owners = self.shards.of_scales(encoding, self.shape)
                planes[d, "scale"] = (
                    self.serves(d),
                    WireTensor(f"{name}.scale", 8 * encoding.fmt.scale_bytes, owners),
                )
        return planes

    def _values_are_fewer(self) -> bool:
        codes = sum(plane.nbytes for _, plane in self.planes.values())
        for encoding in self.quantizer.encodings.values():
            across = scale_count(encoding, (1, self.shape[1]))
            reduced = (
                scale_count(encoding, self.shape)
                if self.dense
                else len(self.cuts.cut_block_rows(encoding)) * across
            )
            codes += AMAX_BYTES * reduced if self.shards.ranks > 1 else 0
        return self.shards.numel * self.wire_dtype.itemsize < codes

    def fragments(self, values: Tensor, rank: int) -> list[Fragment]:
        """What a cast reads, one for each dtype that encoders see."""
        wanted = self.encoded
        if self.gathers_values:  # then histories, and other parts, ask for amaxes
            asking = *self.quantizer.delayed_directions, *self.amaxes
            wanted = {d: e for d, e in self.quantizer.encodings.items() if d in asking}
        by_dtype: dict[torch.dtype | None, list[Encoding]] = {}
        for d, encoding in wanted.items():
            by_dtype.setdefault(self.seen[d], []).append(encoding)
        return [
            Fragment(values, tuple(of), self.cuts, rank, dtype, part=self.part)
            for dtype, of in by_dtype.items()
        ]

    def history(self, direction: Direction) -> AmaxHistory | None:
        """Of a delayed side, on the weight's device."""
        side = self.quantizer.side(direction)
        if not side.is_delayed:
            return None
        return self.state.history(self.state.name, "weight", direction, side).to(self.device)

    def factor(self, direction: Direction) -> Tensor | None:
        history = self.history(direction)
        return None if history is None else history.enc

    def writes(
        self, directions: list[Direction], pieces: dict[tuple[Direction | None, str], Pieces]
    ) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of what makes the storages of these directions from gathered planes;
        sources need no other order."""
        made, encodings = [], self.quantizer.encodings
        for source in dict.fromkeys(d if d in encodings else ROWWISE for d in directions):
            room, fmt = self.weight.allocate_codes(source).buffers(), encodings[source].fmt
            if self.gathers_values:
                values, encoding, seen = (
                    pieces[None, "values"].joined(),
                    encodings[source],
                    self.seen[source],
                )
                values, stats = values.view(self.wire_dtype).view(self.shape), None
                if source in self.amaxes:
                    (own,) = dispatch.statistics(values, (encoding,), 0, seen)
                    stats = [with_amax(encoding, own, self.amaxes[source])]
                (whole,) = dispatch.encode(
                    values, [encoding], stats, encs=[self.factor(source)], dtype=seen
                )
                made += [(into, getattr(whole, name)) for name, into in room.items()]
                continue
            side, codes = self.sides[source], pieces.get((source, "codes"))
            if codes is None:
                pass  # they were gathered where they are read
            elif (
                self.shape[1] % fmt.element.packing[0]
            ):  # rows begin in the middle of containers of the wire
                made.append(
                    (room["data"], runs.rows_of_codes(codes.joined(), fmt.bits, *self.shape))
                )
            else:
                made += codes.writes(room["data"])
            for name, staged in (("scale", side.scale), ("tensor_amax", side.tensor_amax)):
                if (source, name) in pieces:
                    made += pieces[source, name].writes(room[name])
                elif name in room:
                    made.append((room[name], staged.view_as(room[name])))
        return made

    def derive(self, directions: list[Direction]) -> None:
        """What follows from storages that are written."""
        if self.quantizer.is_derived and COLUMNWISE in directions:
            derived = self.quantizer.derive_columnwise(
                self.weight.allocate_codes(ROWWISE), self.state.compute_dtype
            )
            room = self.weight.allocate_codes(COLUMNWISE)
            torch_compat.copy_all(
                [(into, derived.buffers()[name]) for name, into in room.buffers().items()]
            )


@dataclass(eq=False)
class GatherBuffer:
    """What is gathered together: the planes that serve the same directions, and their bytes.

    keys:      (weight's name, direction, part) of each plane.
    own:       uint8 [segment], which `cast_` writes.
    buffer:    uint8 [ranks * segment], there from a gather until all that it serves is finished;
               or, for good, the trainer's.
    is_bound:  the buffer is the trainer's, and `own` is a slice of it.
    codes:     uint8 [ranks * segment]: the planes as products read them, and where they are
               gathered unless it is bound; None where a plane is not whole there, and is copied to
               memory of its own.
    """

    serves: frozenset[Direction]
    keys: list[tuple[str, Direction | None, str]]
    segments: Segments
    own: Tensor
    buffer: Tensor | None = None
    is_bound: bool = False
    gathered: int = 0
    work: object = None
    codes: Tensor | None = None

    @property
    def served(self) -> str:
        return "+".join(d.value for d in Direction if d in self.serves)

    @property
    def nbytes(self) -> int:
        """Of the gathered buffer."""
        return self.segments.ranks * self.segments.size

    def wait(self) -> None:
        """For a gather under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def hold(self, weights: dict[str, QuantizedWeight]) -> None:
        """Let codes that are whole in the gathered segments be read there."""
        places, planes = self.segments.places, self.segments.planes
        if places is None or any(part != "codes" for *_, part in self.keys):
            return
        if any(
            weights[n].allocate_codes(d).data.nbytes != plane.nbytes
            for (n, d, _), plane in zip(self.keys, planes)
        ):
            return  # rows are padded
        self.codes = self.own.new_zeros(self.nbytes)
        for (name, direction, _), place in zip(self.keys, places):
            weights[name].alias_codes_into(self.codes, place, direction)

    @property
    def is_in_place(self) -> bool:
        """What was gathered is where products read it."""
        return self.codes is not None and self.buffer is self.codes

    def allocate_codes(self) -> None:
        if self.codes is not None:
            torch_compat.alloc_storage(self.codes)

    def free(self) -> None:
        if self.codes is not None:
            torch_compat.free_storage(self.codes)

    def bind(self, buffer: Tensor, rank: int) -> None:
        self.wait()
        own = buffer[rank * self.segments.size :][: self.segments.size].copy_(self.own)
        self.own, self.buffer, self.is_bound, self.gathered = own, buffer[: self.nbytes], True, 0

    def gather(self, group: dist.ProcessGroup | None) -> None:
        self.wait()
        if self.buffer is None and self.codes is not None:
            self.allocate_codes()
            self.buffer = self.codes
        elif self.buffer is None:
            self.buffer = self.own if self.segments.ranks == 1 else self.own.new_empty(self.nbytes)
        if self.segments.ranks > 1:
            self.work = torch_compat.all_gather(self.buffer, self.own, group, async_op=True)

    def drop(self) -> None:
        """The gathered bytes have served."""
        if not self.is_bound:
            self.buffer = None

    def pieces(self, p: int) -> Pieces:
        """What ranks have published of a plane."""
        plane, found = self.segments.planes[p], []
        for rank in range(plane.map.ranks):
            first, end = plane.span(rank)
            offset = rank * self.segments.size + self.segments.offsets[rank][p]
            if first < end:
                found.append(
                    (
                        first,
                        self.buffer[offset : offset + end - first],
                        plane.shares_first_byte(rank),
                    )
                )
        return Pieces(found, plane.nbytes)


class Pieces(NamedTuple):
    """A plane as it was gathered.

    of:  (first byte, uint8 bytes, the first one belongs to the piece before too) of each, in order.
    """

    of: list[tuple[int, Tensor, bool]]
    nbytes: int

    def writes(self, into: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of a plane that lies in `into` byte for byte; a byte that two pieces
        share is put together here."""
        flat, made = into.reshape(-1).view(torch.uint8), []
        for first, piece, shares in self.of:
            if shares:
                target, before = made.pop()
                end = target.numel() - 1
                made += [(target[:end], before[:end]), (target[end:], before[end:] | piece[:1])]
                first, piece = first + 1, piece[1:]
            made.append((flat[first : first + piece.numel()], piece))
        return [(target, source) for target, source in made if target.numel()]

    def joined(self) -> Tensor:
        """The whole bytes."""
        if len(self.of) == 1:
            return self.of[0][1]
        whole = self.of[0][1].new_empty(self.nbytes)
        torch_compat.copy_all(self.writes(whole))
        return whole

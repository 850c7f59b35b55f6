# SPDX-License-Identifier: Apache-2.0
"""One weight of a sync, and the buffers that gather the codes of all weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops import dispatch
from ..ops.dispatch import Encoded
from ..scaling import AmaxHistory, Cuts, Fragment, with_amax
from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeight
from .cast import rows_of_codes
from .shard_map import Segments, ShardMap, WireTensor, scale_count

# (encoded direction, "codes" or "scale") of a weight's wire tensor, or (None, "values").
WireKey = tuple[Direction | None, str]
BOTH = frozenset(Direction)
# A ring sends every amax twice, in fp32.
AMAX_BYTES = 8


class SyncItem(NamedTuple):
    """One weight: a parameter of `fq.quantized_model_init`, [N, K], and who owns which of its
    elements.

    is_part:  the sync's `tensor_group`, if it has one, holds the other parts of this weight.
    """

    name: str
    param: Tensor
    shards: ShardMap
    is_part: bool = True


def bits_of(encoding: Encoding, dtype: torch.dtype) -> int:
    return encoding.fmt.bits if encoding.fmt.is_quantized else 8 * dtype.itemsize


class SyncedWeight:
    """One weight of a sync: its wire tensors, and how they become storages.

    part:     (tensor-parallel rank, size).
    staged:   buffers of each encoding that every rank computes, until `finish`: with dense
              statistics the scale of the whole tensor, and of two-level formats the tensor amax.
    amaxes:   of the whole tensor, if values of a part are gathered and scales span all parts.
    """

    def __init__(
        self,
        item: SyncItem,
        weight: QuantizedWeight,
        transport: str,
        dense: bool,
        part: tuple[int, int],
    ):
        self.name, self.shards, self.weight = item.name, item.shards, weight
        rows, cols = weight.shape
        self.state, self.shape, self.device = weight.state, (rows, cols), weight.device
        self.quantizer, self.dense, self.part = self.state.quantizer, dense, part
        self.cuts = Cuts(item.shards.cuts, self.shape[1])
        self.encoded_dtypes = {
            d: self.state.encoded_dtype(e, self.weight.dtype)
            for d, e in self.quantizer.encodings.items()
        }
        dtypes = {dtype or torch.float32 for dtype in self.encoded_dtypes.values()}
        self.wire_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.wire_tensors: dict[WireKey, WireTensor] = self._code_tensors()
        if transport == "highprec" or (transport == "auto" and self._values_are_fewer()):
            values = WireTensor(f"{self.name}.values", 8 * self.wire_dtype.itemsize, self.shards)
            self.wire_tensors = {(None, "values"): values}
        self.staged = {d: self._staged_buffers(e) for d, e in self.encoded.items()}
        self.amaxes = {
            d: torch.zeros(
                (1,) if e.fmt.tensor_scale else (1, 1), dtype=torch.float32, device=self.device
            )
            for d, e in self.quantizer.encodings.items()
            if self.gathers_values and self.spans_parts(e)
        }

    def _staged_buffers(self, encoding: Encoding) -> dict[str, Tensor]:
        fmt, buffers = encoding.fmt, {}
        scale_shape = fmt.scale_shape(self.shape, encoding.direction)
        if self.dense and scale_shape is not None:
            buffers["scale"] = torch.zeros(scale_shape, dtype=fmt.scale_dtype, device=self.device)
        if fmt.tensor_scale:
            buffers["tensor_amax"] = torch.zeros(1, dtype=torch.float32, device=self.device)
        return buffers

    @property
    def gathers_values(self) -> bool:
        return (None, "values") in self.wire_tensors

    @property
    def encoded(self) -> dict[Direction, Encoding]:
        """Encodings that a cast writes: none if values are gathered."""
        return {} if self.gathers_values else self.quantizer.encodings

    def spans_parts(self, encoding: Encoding) -> bool:
        """Some scale spans all tensor-parallel parts."""
        return self.part[1] > 1 and encoding.fmt.spans_tensor

    def serves(self, direction: Direction | None) -> frozenset[Direction]:
        """The directions whose storages come from the encoding of this one; all from values
        (None)."""
        if direction is None:
            return BOTH
        is_source = direction is ROWWISE and COLUMNWISE not in self.quantizer.encodings
        return BOTH if is_source else frozenset({direction})

    def shares(self, direction: Direction) -> frozenset[Direction]:
        """The directions that read the same storage."""
        return BOTH if self.quantizer.shares_storage else frozenset({direction})

    def _code_tensors(self) -> dict[WireKey, WireTensor]:
        """The codes of each encoding, and the scales that are not computed on every rank."""
        wire_tensors: dict[WireKey, WireTensor] = {}
        for d, encoding in self.quantizer.encodings.items():
            name, bits = f"{self.name}.{d.value}", bits_of(encoding, self.weight.dtype)
            wire_tensors[d, "codes"] = WireTensor(f"{name}.codes", bits, self.shards)
            if not self.dense and encoding.fmt.has_scales:
                owners = self.shards.of_scales(encoding, self.shape)
                bits = 8 * encoding.fmt.scale_bytes
                wire_tensors[d, "scale"] = WireTensor(f"{name}.scale", bits, owners)
        return wire_tensors

    def _values_are_fewer(self) -> bool:
        codes = sum(wire.nbytes for wire in self.wire_tensors.values())
        for encoding in self.quantizer.encodings.values():
            if self.dense:
                reduced = scale_count(encoding, self.shape)
            else:
                across = scale_count(encoding, (1, self.shape[1]))
                reduced = len(self.cuts.cut_block_rows(encoding)) * across
            codes += AMAX_BYTES * reduced if self.shards.ranks > 1 else 0
        return self.shards.numel * self.wire_dtype.itemsize < codes

    def fragments(self, values: Tensor, rank: int) -> list[Fragment]:
        """The values that a cast reads, one fragment per dtype that encoders see."""
        # of gathered values: amaxes of histories and of other parts
        measured = self.encoded or (*self.quantizer.delayed_directions, *self.amaxes)
        by_dtype: dict[torch.dtype | None, list[Encoding]] = {}
        for d, encoding in self.quantizer.encodings.items():
            if d in measured:
                by_dtype.setdefault(self.encoded_dtypes[d], []).append(encoding)
        return [
            Fragment(values, tuple(encodings), self.cuts, rank, dtype, part=self.part)
            for dtype, encodings in by_dtype.items()
        ]

    def history(self, direction: Direction) -> AmaxHistory | None:
        """The history of a delayed side, on the weight's device."""
        return self.state.delayed_history(direction, self.device)

    def factor(self, direction: Direction) -> Tensor | None:
        history = self.history(direction)
        return None if history is None else history.encode_scale

    def writes(
        self, directions: list[Direction], pieces: dict[tuple[str, Direction | None, str], Pieces]
    ) -> list[tuple[Tensor, Tensor]]:
        """(target, source) copies that build the storages of these directions from gathered
        wire tensors, in any order.

        pieces:  by (weight's name, direction, part); without those that are gathered in place.
        """
        copies, encodings = [], self.quantizer.encodings
        for source in dict.fromkeys(d if d in encodings else ROWWISE for d in directions):
            buffers, encoding = self.weight.allocate_codes(source).buffers(), encodings[source]
            if self.gathers_values:
                encoded = self._encoded(pieces[self.name, None, "values"].joined(), encoding)
                copies += [(into, getattr(encoded, name)) for name, into in buffers.items()]
                continue
            codes = pieces.get((self.name, source, "codes"))
            if codes is not None and self.shape[1] % encoding.fmt.element.packing[0]:
                # rows begin inside packed bytes
                rows = rows_of_codes(codes.joined(), encoding.fmt.bits, *self.shape)
                copies.append((buffers["data"], rows))
            elif codes is not None:
                copies += codes.writes(buffers["data"])
            if (self.name, source, "scale") in pieces:
                copies += pieces[self.name, source, "scale"].writes(buffers["scale"])
            for name, staged in self.staged[source].items():
                copies.append((buffers[name], staged.view_as(buffers[name])))
        return copies

    def _encoded(self, gathered: Tensor, encoding: Encoding) -> Encoded:
        """Codes of the weight from its gathered values, uint8."""
        direction, dtype = encoding.direction, self.encoded_dtypes[encoding.direction]
        values, stats = gathered.view(self.wire_dtype).view(self.shape), None
        if direction in self.amaxes:
            (of_part,) = dispatch.statistics(values, (encoding,), 0, dtype)
            stats = [with_amax(encoding, of_part, self.amaxes[direction])]
        factors = [self.factor(direction)]
        return dispatch.encode(values, [encoding], stats, encode_scales=factors, dtype=dtype)[0]

    def derive(self, directions: list[Direction]) -> None:
        """Encode a derived columnwise storage from the rowwise one."""
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
    """The wire tensors that serve the same directions, gathered as one buffer.

    keys:      per wire tensor: (weight's name, direction, part), or a key of the caller's.
    segment:   uint8 [segment], which `cast_` writes.
    buffer:    uint8 [ranks * segment], from a gather until all directions that it serves are
               finished; permanent if bound.
    is_bound:  the buffer belongs to the trainer, and `segment` is a slice of it.
    codes:     uint8 [ranks * segment] that GEMMs read in place, and that gathers fill unless a
               buffer is bound; None if some wire tensor is not contiguous there and must be copied.
    """

    serves: frozenset[Direction]
    keys: Sequence[tuple[str, Direction | None, str]]
    segments: Segments
    segment: Tensor
    buffer: Tensor | None = None
    is_bound: bool = False
    gathered: int = 0
    work: dist.Work | None = None
    codes: Tensor | None = None

    @property
    def served(self) -> str:
        return "+".join(d.value for d in Direction if d in self.serves)

    @property
    def nbytes(self) -> int:
        """Of the gathered buffer."""
        return self.segments.ranks * self.segments.size

    def wait(self) -> None:
        """Wait for the gather in flight, if any."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def hold(self, weights: dict[str, QuantizedWeight]) -> None:
        """Alias the weights' codes into the gathered segments, if all are contiguous there."""
        places, wire_tensors = self.segments.in_place_offsets, self.segments.wire_tensors
        codes = [(weights[n], d) for n, d, part in self.keys if part == "codes" and d is not None]
        if places is None or len(codes) < len(wire_tensors):
            return
        if any(
            w.allocate_codes(d).data.nbytes != p.nbytes for (w, d), p in zip(codes, wire_tensors)
        ):
            return  # rows are padded
        self.codes = self.segment.new_zeros(self.nbytes)
        for (weight, direction), place in zip(codes, places):
            weight.alias_codes_into(self.codes, place, direction)

    @property
    def is_in_place(self) -> bool:
        """GEMMs read the gathered buffer itself."""
        return self.codes is not None and self.buffer is self.codes

    def allocate_codes(self) -> None:
        if self.codes is not None:
            torch_compat.alloc_storage(self.codes)

    def free(self) -> None:
        if self.codes is not None:
            torch_compat.free_storage(self.codes)

    def bind(self, buffer: Tensor, rank: int) -> None:
        self.wait()
        self.segment = buffer[rank * self.segments.size :][: self.segments.size].copy_(self.segment)
        self.buffer, self.is_bound, self.gathered = buffer[: self.nbytes], True, 0

    def gather(self, group: dist.ProcessGroup | None) -> None:
        self.wait()
        if self.buffer is None and self.codes is not None:
            self.allocate_codes()
            self.buffer = self.codes
        elif self.buffer is None:
            self.buffer = (
                self.segment if self.segments.ranks == 1 else self.segment.new_empty(self.nbytes)
            )
        if self.segments.ranks > 1:
            self.work = torch_compat.all_gather(self.buffer, self.segment, group, async_op=True)

    def drop(self) -> None:
        """Release the gathered bytes."""
        if not self.is_bound:
            self.buffer = None

    def pieces(self, p: int) -> Pieces:
        """The ranks' pieces of wire tensor p. Raises RuntimeError before a gather."""
        if self.buffer is None:
            raise RuntimeError("nothing was gathered")
        wire, pieces = self.segments.wire_tensors[p], []
        for rank in range(wire.map.ranks):
            first, end = wire.span(rank)
            offset = rank * self.segments.size + self.segments.offsets[rank][p]
            if first < end:
                piece = self.buffer[offset : offset + end - first]
                pieces.append((first, piece, wire.map.cuts[rank] * wire.bits % 8 != 0))
        return Pieces(pieces, wire.nbytes)


class Pieces(NamedTuple):
    """A gathered wire tensor.

    ranges:  per piece, in order: (first byte, uint8 bytes, whether the piece before also has bits
             of that byte).
    """

    ranges: list[tuple[int, Tensor, bool]]
    nbytes: int

    def writes(self, into: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(target, source) copies of the wire tensor into `into`. Merges a byte that two pieces
        share."""
        flat, copies = into.reshape(-1).view(torch.uint8), []
        for first, piece, shares in self.ranges:
            if shares:
                target, before = copies.pop()
                end = target.numel() - 1
                copies += [(target[:end], before[:end]), (target[end:], before[end:] | piece[:1])]
                first, piece = first + 1, piece[1:]
            copies.append((flat[first : first + piece.numel()], piece))
        return [(target, source) for target, source in copies if target.numel()]

    def joined(self) -> Tensor:
        """The wire tensor's bytes."""
        first = self.ranges[0][1]
        if len(self.ranges) == 1:
            return first
        joined = first.new_empty(self.nbytes)
        torch_compat.copy_all(self.writes(joined))
        return joined

# SPDX-License-Identifier: Apache-2.0
"""The unsharded side of a weight under FSDP2: which buffers travel, and where they lie when they
have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops.dispatch import Encoded
from ..ops.layout import adjoining
from ..scaling import RowCuts
from ..storage import Placement, Storage, scale_placement
from . import torch_compat
from .storage_pair import StoragePair
from .torch_compat import ManagedParam
from .weight_state import Piece, Shard, values_of


@dataclass(frozen=True)
class WireBuffer:
    """One buffer of one direction as it is gathered.

    name:       field of `Storage`.
    rows:       per rank, the most that any rank holds; shorter ranks pad with zero rows.
    row_bytes:  bytes of a row.
    halo_index: gathered row of each logical row, where ranks on both sides of a cut send a block's
                row.
    """

    name: str
    rows: int
    row_bytes: int
    halo_index: tuple[int, ...] | None = None


def wire_buffers(
    encoding: Encoding, cuts: RowCuts, shape: tuple[int, ...], high_precision: torch.dtype
) -> list[WireBuffer]:
    """The buffers of one encoding that travel; a pure function of facts that all ranks share.

    cuts:   of dim 0 of the weight.
    shape:  of the weight, [rows, cols] or [matrices, rows, cols].

    Raises ValueError for an encoding that a cut would change: a rotation that mixes rows of two
    shards.
    """
    fmt, direction, cols = encoding.fmt, encoding.direction, shape[-1]
    if len(shape) == 3:
        of_one = _matrix_buffers(encoding, shape[1:], high_precision)
        return [
            WireBuffer(name, cuts.bounds[1] * rows, row_bytes) for name, rows, row_bytes in of_one
        ]
    chunk = cuts.bounds[1] if len(cuts.bounds) > 2 else None
    padded_cols = fmt.padded_shape((cuts.rows, cols), direction)[1]
    buffers = [WireBuffer("data", cuts.bounds[1], fmt.row_bytes(padded_cols, high_precision))]
    placement = None if not fmt.has_scales else scale_placement(fmt, direction, chunk)
    if placement in (Placement.SHARD, Placement.HALO):
        b0 = fmt.dims(direction)[0]
        spans = [
            (a // b0, -(-b // b0) if b > a else a // b0)
            for a, b in zip(cuts.bounds, cuts.bounds[1:])
        ]
        rows = max(last - first for first, last in spans)
        index = None
        if placement is Placement.HALO:
            owner = {}
            for rank, (first, last) in enumerate(spans):
                for block in range(first, last):
                    owner.setdefault(block, rank * rows + block - first)
            index = tuple(owner[block] for block in sorted(owner))
        row_bytes = fmt.scale_shape((cuts.rows, cols), direction)[1] * fmt.scale_bytes
        buffers.append(WireBuffer("scale", rows, row_bytes, index))
    return buffers


def _matrix_buffers(
    encoding: Encoding, shape: tuple[int, int], high_precision: torch.dtype
) -> Iterator[tuple[str, int, int]]:
    """(field of `Storage`, rows, bytes of a row) of every buffer of one matrix."""
    fmt, direction = encoding.fmt, encoding.direction
    rows, cols = fmt.padded_shape(shape, direction)
    yield "data", rows, fmt.row_bytes(cols, high_precision)
    if fmt.has_scales:
        rows, cols = fmt.scale_shape(shape, direction)
        yield "scale", rows, cols * fmt.scale_bytes
    if fmt.tensor_scale:
        yield "tensor_amax", 1, 4


@dataclass(eq=False)
class DirectionBuffers:
    """Persistent buffers of one direction of one gathered weight.

    outputs:    uint8 [world * rows * row_bytes], one a wire buffer that NCCL fills.
    filled:     buffers that post fills, by field of `Storage`: re-indexed or derived ones.
    replicated: buffers that every rank makes whole and pre fills, on the stream of whoever made
                them, which may be freed before the stream of post has come so far; small, and never
                freed.
    halo:       those that post re-indexes: (gathered rows, index of each logical row), the index
                never freed.
    storages:   of each matrix, viewing all.
    whole:      what they view, by field of `Storage`: of all matrices, one behind the other.
    """

    outputs: list[Tensor]
    filled: dict[str, Tensor]
    replicated: dict[str, Tensor]
    halo: dict[str, tuple[Tensor, Tensor]]
    storages: list[Storage]
    whole: dict[str, Tensor]

    def alloc(self) -> None:
        for tensor in (*self.outputs, *self.filled.values()):
            torch_compat.alloc_storage(tensor)

    def free(self) -> None:
        for tensor in (*self.outputs, *self.filled.values()):
            torch_compat.free_storage(tensor)


class Pass(NamedTuple):
    """What a gather for some directions moves.

    needs:       directions that the pass multiplies.
    directions:  those that are encoded and sent.
    outputs:     the buffers that NCCL fills, in the order of the inputs.
    filled:      the other buffers of the storages that are freed with them.
    sizes:       (direction, format, bytes) of each direction that is sent, to be counted.
    """

    needs: frozenset[Direction]
    directions: tuple[Direction, ...]
    outputs: list[Tensor]
    filled: list[Tensor]
    sizes: list[tuple[str, str, int]]


def gathered_size(buffers: list[WireBuffer], world_size: int) -> int:
    """Bytes of the gathered output of one direction's buffers, on every rank."""
    return sum(world_size * b.rows * b.row_bytes for b in buffers)


def gathered_directions(quantizer, needs: frozenset[Direction]) -> tuple[Direction, ...]:
    """Encodings to gather for the directions a pass multiplies: one that is not encoded comes from
    the rowwise one."""
    return tuple(
        d
        for d in quantizer.encodings
        if d in needs or (d is ROWWISE and not needs <= quantizer.encodings.keys())
    )


class GatheredWeight:
    """The unsharded side of one weight under FSDP2: geometry, persistent buffers, and the tensor
    over them."""

    def __init__(self, state, managed: ManagedParam):
        self.state, self.managed = state, managed
        self.matrices = state.matrices
        self.quantizer = self.matrices[0].quantizer
        self.rows, self.cols = managed.global_shape[-2:]  # of a matrix
        self.cuts = cuts_of(managed)
        self.dtype = managed.param_dtype
        self.wire = {
            d: wire_buffers(e, self.cuts, managed.global_shape, self.dtype)
            for d, e in self.quantizer.encodings.items()
        }
        self.buffers = {d: self._allocate(d) for d in self.quantizer.encodings}
        self.derived = None
        if self.quantizer.is_derived:
            self.derived = self._allocate_derived()
        self.passes = self._passes()
        self.group = None  # of the weights that are gathered together (gather_group.GatherGroup)
        self.all_gather_inputs: tuple[tuple[Tensor, ...], object] | None = (
            None  # all-gather inputs that FSDP2 has not asked for yet
        )
        self.slots_of = [StoragePair(owner=matrix) for matrix in self.matrices]
        for direction in Direction:
            for i, slots in enumerate(self.slots_of):
                if direction in self.buffers:
                    storage = self.buffers[direction].storages[i]
                elif self.derived is not None:
                    storage = self.derived.storages[i]
                else:
                    storage = self.buffers[ROWWISE].storages[i].as_direction(direction)
                slots.put(direction, storage)
        for matrix in state.parts:
            matrix.managed, matrix.gathered = managed, self
        shown = {
            f"{d.value}_{name}": t for d, of in self.buffers.items() for name, t in of.whole.items()
        }
        self.slots = (
            StoragePair(owner=state, parts=self.slots_of, shown=shown)
            if state.parts
            else self.slots_of[0]
        )

    @property
    def is_first(self) -> bool:
        """FSDP2 asks for its all-gather inputs before those of the other weights that are gathered
        with it."""
        return self.group is not None and self.group.members[0] is self

    # Buffers #

    def _allocate(self, direction: Direction) -> DirectionBuffers:
        encoding = self.quantizer.encodings[direction]
        fmt, shape, device = encoding.fmt, (self.rows, self.cols), self.managed.device
        world, matrices = self.managed.world_size, len(self.matrices)
        outputs, filled, replicated, halo, fields = [], {}, {}, {}, {}
        scale_shape = fmt.scale_shape(shape, direction)
        if scale_shape is not None:
            rows, cols = scale_shape
            replicated["scale"] = torch.empty(
                matrices * rows, cols, dtype=fmt.scale_dtype, device=device
            )
        if fmt.tensor_scale:
            replicated["tensor_amax"] = torch.empty(matrices, dtype=torch.float32, device=device)
        for i, buffer in enumerate(self.wire[direction]):
            # FSDP2 keeps only the first input of a world of one: the rest rides as metadata
            if world == 1 and i > 0:
                filled[buffer.name] = replicated.pop(buffer.name)
                continue
            output = torch.empty(
                world * buffer.rows * buffer.row_bytes, dtype=torch.uint8, device=device
            )
            outputs.append(output)
            if buffer.halo_index is not None:
                halo[buffer.name] = (
                    output.view(-1, buffer.row_bytes),
                    torch.tensor(buffer.halo_index, device=device),
                )
                filled[buffer.name] = replicated.pop(buffer.name)
            else:
                fields[buffer.name] = self._view(output, buffer, fmt, direction)
                replicated.pop(buffer.name, None)
        whole = {"scale": None, "tensor_amax": None} | filled | replicated | fields
        storages = [
            Storage(
                fmt,
                direction,
                shape,
                dtype=self.dtype,
                **{
                    name: t if t is None or matrices == 1 else t.unflatten(0, (matrices, -1))[i]
                    for name, t in whole.items()
                },
            )
            for i in range(matrices)
        ]
        buffers = DirectionBuffers(
            outputs,
            filled,
            replicated,
            halo,
            storages,
            {n: t for n, t in whole.items() if t is not None},
        )
        buffers.free()
        return buffers

    def _view(self, output: Tensor, buffer: WireBuffer, fmt, direction: Direction) -> Tensor:
        """The logical buffer over its gathered bytes: padding rows all lie behind the last one."""
        rows, shape, matrices = (
            output.view(-1, buffer.row_bytes),
            (self.rows, self.cols),
            len(self.matrices),
        )
        if buffer.name == "data":
            count = fmt.padded_shape(shape, direction)[0] if self.state.parts else self.rows
            return (rows if fmt.is_quantized else rows.view(self.dtype))[: matrices * count]
        if buffer.name == "tensor_amax":
            return rows.view(torch.float32).flatten()[:matrices]
        return rows.view(fmt.scale_dtype)[: matrices * fmt.scale_shape(shape, direction)[0]]

    def _allocate_derived(self) -> DirectionBuffers:
        with torch.no_grad():
            like = torch.zeros(
                len(self.matrices),
                self.rows,
                self.cols,
                dtype=self.dtype,
                device=self.managed.device,
            )
            # identity keeps it
            storages = [self.quantizer.columnwise.storage(one.clone(), COLUMNWISE) for one in like]
        filled = {
            f"{name} {i}": t for i, s in enumerate(storages) for name, t in s.buffers().items()
        }
        buffers = DirectionBuffers([], filled, {}, {}, storages, {})
        buffers.free()
        return buffers

    def _passes(self) -> dict[frozenset[Direction], Pass]:
        """What a pass that multiplies these directions gathers, fills and frees."""
        passes = {}
        for needs in (frozenset({ROWWISE}), frozenset({COLUMNWISE}), frozenset(Direction)):
            directions = gathered_directions(self.quantizer, needs)
            chosen = [self.buffers[d] for d in directions]
            if self.derived is not None and COLUMNWISE in needs:
                chosen.append(self.derived)
            sizes = [
                (
                    d.value,
                    self.quantizer.encodings[d].fmt.name,
                    gathered_size(self.wire[d], self.managed.world_size),
                )
                for d in directions
            ]
            outputs, filled = (
                [t for b in chosen for t in b.outputs],
                [t for b in chosen for t in b.filled.values()],
            )
            passes[needs] = Pass(needs, directions, outputs, filled, sizes)
        return passes

    # The two halves of a gather #

    @property
    def all_buffers(self) -> list[DirectionBuffers]:
        return [*self.buffers.values(), *([] if self.derived is None else [self.derived])]

    @property
    def records(self) -> bool:
        """Amaxes are recorded in histories: in training."""
        return any(module.training for module, _ in self.managed.owners)

    @property
    def leaves_amaxes_out(self) -> bool:
        """In evaluation, of delayed scales: a training forward records amaxes, and scales by what
        was recorded since."""
        return not self.records and any(m.quantizer.delayed_directions for m in self.state.matrices)

    def pieces(self, values: Tensor) -> list[Piece]:
        """What this rank holds of each matrix of the weight."""
        return self.state.pieces(values, self.cuts, self.managed.rank)

    def shards(self, local: Tensor, direction: Direction) -> list[Shard]:
        """What the gather of a direction encodes; local: the sharded local tensor."""
        is_codes = self.state.holds_codes and self.quantizer.encodings[direction].fmt.is_quantized
        shared = self.state.statistics or {}
        return [
            Shard(
                piece,
                direction,
                self.dtype,
                shared.get((piece.state.name, direction)),
                None,
                self.records,
            )
            for piece in self.pieces(local if is_codes else values_of(local))
        ]

    def rows_sent(self, direction: Direction, made: Sequence[Encoded]) -> list[Tensor]:
        """uint8 [rows, bytes] of every wire buffer; made: the codes of each matrix that this rank
        holds rows of."""
        device = self.managed.device
        return [
            _as_bytes([getattr(e, b.name) for e in made], b, device) for b in self.wire[direction]
        ]

    def copies_of_rows(
        self, buffer: WireBuffer, fields: list[Tensor], rows: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """(part of `rows`, what it is to hold) of each matrix; rows: of `rows_sent`, where they are
        copies of the fields."""
        of = WireBuffer(buffer.name, 0, buffer.row_bytes)
        each = [_as_bytes([field], of, self.managed.device) for field in fields]
        return list(zip(rows[: sum(map(len, each))].split(list(map(len, each))), each))

    def replicated(
        self, direction: Direction, made: Sequence[Encoded]
    ) -> list[tuple[Tensor, Tensor]]:
        """(buffer, what it is to hold) of all that every rank makes whole."""
        buffers = self.buffers[direction].replicated.items()
        return [(target, _seen_as(target, getattr(made[0], name))) for name, target in buffers]

    def unpack(
        self, chosen: Pass, filled: dict[tuple[Direction, str], Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """(buffer, what it is to hold) of all that NCCL and pre did not fill: rows of cut blocks in
        order, and `filled`, what rode as metadata."""
        copies = []
        for direction in chosen.directions:
            buffers = self.buffers[direction]
            for name, target in buffers.filled.items():
                if name in buffers.halo:
                    rows, index = buffers.halo[name]
                    source = rows.index_select(0, index)
                else:
                    source = filled[direction, name]
                copies.append((target, _seen_as(target, source)))
            if (direction, "data") in filled:  # a world of one: the second direction's codes
                torch_compat.alloc_storage(buffers.outputs[0])
                copies.append((buffers.outputs[0], filled[direction, "data"].view(-1)))
        return copies

    def derive(self) -> None:
        """Make the columnwise storage from the rowwise one that arrived, as the quantizer says."""
        for slots in self.slots_of:
            fresh = self.quantizer.derive_columnwise(slots.rowwise, self.state.compute_dtype)
            for name, target in slots.columnwise.buffers().items():
                target.copy_(getattr(fresh, name))


def cuts_of(managed: ManagedParam) -> RowCuts:
    """How FSDP2 cuts dim 0 of a weight."""
    return RowCuts.chunked(managed.global_shape[0], managed.world_size)


def _seen_as(target: Tensor, source: Tensor) -> Tensor:
    return source.view(target.dtype).view(target.shape) if source.dtype is torch.uint8 else source


def _as_bytes(tensors: list[Tensor], buffer: WireBuffer, device: torch.device) -> Tensor:
    """A rank's rows of each matrix as uint8 [buffer.rows, buffer.row_bytes], zero rows behind
    them."""
    if len(tensors) > 1 and tensors[0].dim() == 2 and (whole := adjoining(tensors)) is not None:
        rows = whole.view(torch.uint8).view(-1, buffer.row_bytes)
    elif len(tensors) != 1:
        each = [
            _as_bytes([t], WireBuffer(buffer.name, 0, buffer.row_bytes), device) for t in tensors
        ]
        rows = torch.cat(
            [torch.empty(0, buffer.row_bytes, dtype=torch.uint8, device=device), *each]
        )
    elif (
        (rows := tensors[0]).dtype is not torch.uint8 or rows.dim() != 2 or not rows.is_contiguous()
    ):
        rows = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], buffer.row_bytes)
    return (
        F.pad(rows, (0, 0, 0, buffer.rows - rows.shape[0])) if rows.shape[0] < buffer.rows else rows
    )

# SPDX-License-Identifier: Apache-2.0
"""The unsharded side of a weight under FSDP2: the buffers that are gathered, and the storages over
the all-gather outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..encoded_matrix import BUFFERS
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops.dispatch import Encoded
from ..ops.layout import adjoining, rows_of_bytes
from ..scaling import RowCuts
from ..storage import Placement, Storage, scale_placement
from . import torch_compat
from .storage_pair import StoragePair
from .torch_compat import ManagedParam
from .weight_state import Shard, WeightQuantizer, WeightState, values_of


@dataclass(frozen=True)
class WireBuffer:
    """One buffer of one direction as it is gathered.

    name:       field of `Storage`.
    rows:       per rank, the maximum over ranks; others pad with zero rows.
    row_bytes:  bytes per row.
    halo_index: gathered row of each logical row, if ranks on both sides of a cut send the row of a
                block.
    """

    name: str
    rows: int
    row_bytes: int
    halo_index: tuple[int, ...] | None = None


def wire_buffers(
    encoding: Encoding, cuts: RowCuts, shape: tuple[int, ...], high_precision: torch.dtype
) -> list[WireBuffer]:
    """The gathered buffers of one encoding; a pure function of facts that all ranks share.

    cuts:   of dim 0 of the weight.
    shape:  of the weight, [rows, cols] or [matrices, rows, cols].
    """
    fmt, direction, (*matrices, rows, cols) = encoding.fmt, encoding.direction, shape
    most = cuts.bounds[1]  # rows, or matrices, of a rank
    padded_rows, padded_cols = fmt.padded_shape((rows, cols), direction)
    row_bytes = fmt.row_bytes(padded_cols, high_precision)
    if matrices:
        buffers = [WireBuffer("data", most * padded_rows, row_bytes)]
        if (scales := fmt.scale_shape((rows, cols), direction)) is not None:
            buffers.append(WireBuffer("scale", most * scales[0], scales[1] * fmt.scale_bytes))
        return buffers + ([WireBuffer("tensor_amax", most, 4)] if fmt.tensor_scale else [])
    buffers = [WireBuffer("data", most, row_bytes)]
    scale_shape, b0 = fmt.scale_shape((cuts.rows, cols), direction), fmt.dims(direction)[0]
    placement = scale_placement(fmt, direction, most if len(cuts.bounds) > 2 else None)
    if scale_shape is not None and b0 is not None:
        spans = [
            (a // b0, -(-b // b0) if b > a else a // b0)
            for a, b in zip(cuts.bounds, cuts.bounds[1:])
        ]
        rows = max(last - first for first, last in spans)
        index = None
        if placement is Placement.HALO:
            owner: dict[int, int] = {}
            for rank, (first, last) in enumerate(spans):
                for block in range(first, last):
                    owner.setdefault(block, rank * rows + block - first)
            index = tuple(owner[block] for block in sorted(owner))
        buffers.append(WireBuffer("scale", rows, scale_shape[1] * fmt.scale_bytes, index))
    return buffers


@dataclass(eq=False)
class DirectionBuffers:
    """Persistent buffers of one direction of one gathered weight.

    outputs:    all-gather outputs, uint8 [world * rows * row_bytes], one per wire buffer.
    inner_tensors: buffers that the post hook fills, by field of `Storage`: re-indexed or derived
                ones, which FSDP2 frees as its inner tensors.
    replicated: small buffers that every rank computes whole and the pre hook fills, on its stream;
                never freed, because the stream of the post hook may be behind.
    halo:       (gathered rows, index of each logical row) of buffers that the post hook re-indexes;
                the index is never freed.
    storages:   of each matrix, over all of these.
    concatenated: the buffers of all matrices that they view, by field of `Storage`.
    """

    outputs: list[Tensor]
    inner_tensors: dict[str, Tensor]
    replicated: dict[str, Tensor]
    halo: dict[str, tuple[Tensor, Tensor]]
    storages: list[Storage]
    concatenated: dict[str, Tensor]

    def alloc(self) -> None:
        for tensor in (*self.outputs, *self.inner_tensors.values()):
            torch_compat.alloc_storage(tensor)

    def free(self) -> None:
        for tensor in (*self.outputs, *self.inner_tensors.values()):
            torch_compat.free_storage(tensor)


def gathered_size(buffers: list[WireBuffer], world_size: int) -> int:
    """Bytes of the gathered output of one direction's buffers, on every rank."""
    return sum(world_size * b.rows * b.row_bytes for b in buffers)


def gathered_directions(
    quantizer: WeightQuantizer, needs: frozenset[Direction]
) -> tuple[Direction, ...]:
    """Encodings to gather for the directions that a pass multiplies; the rowwise one if a direction
    is not encoded itself."""
    return tuple(
        d
        for d in quantizer.encodings
        if d in needs or (d is ROWWISE and not needs <= quantizer.encodings.keys())
    )


class GatheredWeight:
    """The unsharded side of one weight under FSDP2: geometry, persistent buffers, and the tensor
    over them."""

    def __init__(self, state: WeightState, managed: ManagedParam):
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
        by_direction, self.derived = dict(self.buffers), None
        if self.quantizer.is_derived and not self.quantizer.decodes_columnwise:
            self.derived = by_direction[COLUMNWISE] = self._allocate_derived()
        self.records = True  # amaxes: a backward may follow the forward that gathers
        self.group: Any = None  # gather_group.GatherGroup
        self.operand_layouts: dict[Direction, str] = {}  # `layouts` of the group's operands
        # set by the group's gather until FSDP2 asks for them
        self.all_gather_inputs: tuple[tuple[Tensor, ...], object] | None = None
        self.pairs = [StoragePair(owner=matrix) for matrix in self.matrices]
        for i, pair in enumerate(self.pairs):
            for direction, buffers in by_direction.items():
                pair.put(direction, buffers.storages[i])
            if self.quantizer.shares_storage:
                pair.share_rowwise()
        for matrix in state.packed:
            matrix.managed, matrix.gathered = managed, self
        self.pair = self.pairs[0]
        if state.packed:
            shown = {
                f"{d.value}_{name}": t
                for d, buffers in self.buffers.items()
                for name, t in buffers.concatenated.items()
            }
            self.pair = StoragePair(owner=state, groups=self.pairs, shown=shown)

    @property
    def knows_activation_dtype(self) -> bool:
        """An eager forward has multiplied activations, or autocast leaves the parameter's dtype as
        it is."""
        return self.state.activation_dtype is not None or self.dtype is not torch.float32

    @property
    def layouts(self) -> dict[Direction, str]:
        """The layouts in which GEMMs read it; a direction that is left out: compact."""
        return self.state.layouts(self.dtype, self.managed.device) or {}

    # Buffers #

    def _allocate(self, direction: Direction) -> DirectionBuffers:
        encoding = self.quantizer.encodings[direction]
        fmt, shape, device = encoding.fmt, (self.rows, self.cols), self.managed.device
        world, matrices = self.managed.world_size, len(self.matrices)
        outputs: list[Tensor] = []
        inner, replicated, fields = {}, {}, {}
        halo: dict[str, tuple[Tensor, Tensor]] = {}
        scale_shape = fmt.scale_shape(shape, direction)
        if scale_shape is not None:
            rows, cols = scale_shape
            replicated["scale"] = torch.empty(
                matrices * rows, cols, dtype=fmt.scale_dtype, device=device
            )
        if fmt.tensor_scale:
            replicated["tensor_amax"] = torch.empty(matrices, dtype=torch.float32, device=device)
        for i, buffer in enumerate(self.wire[direction]):
            # at world size 1 FSDP2 keeps only the first input: the others travel as metadata
            if world == 1 and i > 0:
                inner[buffer.name] = replicated.pop(buffer.name)
                continue
            output = torch.empty(
                world * buffer.rows * buffer.row_bytes, dtype=torch.uint8, device=device
            )
            outputs.append(output)
            if buffer.halo_index is not None:
                halo[buffer.name] = (
                    output.view(-1, buffer.row_bytes),
                    torch.tensor(buffer.halo_index, dtype=torch.int64, device=device),
                )
                inner[buffer.name] = replicated.pop(buffer.name)
            else:
                fields[buffer.name] = self._view(output, buffer, fmt, direction)
                replicated.pop(buffer.name, None)
        fields |= inner | replicated
        concatenated: dict[str, Tensor] = {name: fields[name] for name in BUFFERS if name in fields}
        of_matrices = zip(
            *(
                (t,) if matrices == 1 else t.unflatten(0, (matrices, -1)).unbind()
                for t in concatenated.values()
            )
        )
        storages = [Storage.over(b, fmt, direction, shape, self.dtype) for b in of_matrices]
        buffers = DirectionBuffers(outputs, inner, replicated, halo, storages, concatenated)
        buffers.free()
        return buffers

    def _view(self, output: Tensor, buffer: WireBuffer, fmt, direction: Direction) -> Tensor:
        """The logical buffer over its gathered bytes; padding rows are last."""
        rows, shape = output.view(-1, buffer.row_bytes), (self.rows, self.cols)
        matrices = len(self.matrices)
        if buffer.name == "data":
            count = fmt.padded_shape(shape, direction)[0] if self.state.packed else self.rows
            return (rows if fmt.is_quantized else rows.view(self.dtype))[: matrices * count]
        if buffer.name == "tensor_amax":
            return rows.view(torch.float32).flatten()[:matrices]
        block_rows, _ = fmt.scale_shape(shape, direction) or (0, 0)
        return rows.view(fmt.scale_dtype)[: matrices * block_rows]

    def _allocate_derived(self) -> DirectionBuffers:
        with torch.no_grad():
            shape = len(self.matrices), self.rows, self.cols
            like = torch.zeros(shape, dtype=self.dtype, device=self.managed.device)
            # an identity storage is a view
            side = self.quantizer.side(COLUMNWISE)
            storages = [side.storage(matrix.clone(), COLUMNWISE) for matrix in like]
        inner = {
            f"{name} {i}": t for i, s in enumerate(storages) for name, t in s.buffers().items()
        }
        buffers = DirectionBuffers([], inner, {}, {}, storages, {})
        buffers.free()
        return buffers

    def gathered_sizes(self, directions: tuple[Direction, ...]) -> dict[tuple[str, str], int]:
        """(direction, format) -> gathered bytes."""
        world, encodings = self.managed.world_size, self.quantizer.encodings
        return {
            (d.value, encodings[d].fmt.name): gathered_size(self.wire[d], world) for d in directions
        }

    def filled_buffers(self, needs: frozenset[Direction]) -> list[DirectionBuffers]:
        """The buffers that a gather for these directions fills."""
        buffers = [self.buffers[d] for d in gathered_directions(self.quantizer, needs)]
        if self.derived is not None and COLUMNWISE in needs:
            buffers.append(self.derived)
        return buffers

    # The two halves of a gather #

    @property
    def forward_reads_both(self) -> bool:
        """A module of it says that its forward reads both directions (`BaseLinear`)."""
        owners = self.managed.owners
        return any(getattr(module, "recomputes_forward", None) is True for module, _ in owners)

    @property
    def leaves_amaxes_out(self) -> bool:
        """Evaluation with delayed scales: a forward that trains has to record amaxes again."""
        return not self.records and any(m.quantizer.delayed_directions for m in self.state.matrices)

    def shards(self, local: Tensor, direction: Direction) -> list[Shard]:
        """The shards that the gather of a direction encodes; local: the sharded local tensor."""
        is_codes = self.state.holds_codes and self.quantizer.encodings[direction].fmt.is_quantized
        values = local if is_codes else values_of(local)
        shared = (self.state.statistics or {}).get
        return [
            Shard(p, direction, self.dtype, shared((p.state.name, direction)), None, self.records)
            for p in self.state.pieces(values, self.cuts, self.managed.rank)
        ]

    def rows_sent(
        self, buffer: WireBuffer, encoded: Sequence[Encoded]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """uint8 [rows, bytes] of a wire buffer, a view of the codes where their memory allows it;
        and the (target, source) copies that fill it otherwise.

        encoded:  codes of each matrix with rows on this rank.
        """
        fields = [rows_of_bytes(getattr(e, buffer.name)) for e in encoded]
        rows = adjoining(fields) if fields else None
        if rows is not None and len(rows) == buffer.rows:
            return rows, []
        shape, device = (buffer.rows, buffer.row_bytes), self.managed.device
        rows, sizes = torch.zeros(shape, dtype=torch.uint8, device=device), list(map(len, fields))
        return rows, list(zip(rows[: sum(sizes)].split(sizes), fields))

    def replicated(
        self, direction: Direction, encoded: Sequence[Encoded]
    ) -> list[tuple[Tensor, Tensor]]:
        """(buffer, source) of the replicated buffers."""
        buffers = self.buffers[direction].replicated.items()
        return [(target, viewed_as(target, getattr(encoded[0], name))) for name, target in buffers]

    def buffer(self, direction: Direction, name: str) -> Tensor:
        """The buffer behind a field of the storages."""
        buffers = self.buffers[direction]
        return buffers.outputs[0] if name == "data" else buffers.inner_tensors[name]

    def derive(self) -> None:
        """Quantize the columnwise storage from the gathered rowwise one, if it is derived."""
        if self.derived is None:
            return
        for pair in self.pairs:
            rowwise, columnwise = pair.storage(ROWWISE), pair.storage(COLUMNWISE)
            fresh = self.quantizer.derive_columnwise(rowwise, self.state.compute_dtype)
            for name, target in columnwise.buffers().items():
                target.copy_(getattr(fresh, name))


def cuts_of(managed: ManagedParam) -> RowCuts:
    """How FSDP2 cuts dim 0 of a weight."""
    return RowCuts.chunked(managed.global_shape[0], managed.world_size)


def cuts_and_rank(managed: ManagedParam | None, rows: int) -> tuple[RowCuts, int]:
    """How ranks cut dim 0 of a weight, and this rank among them. rows: of a whole weight (None)."""
    return (RowCuts((0, rows)), 0) if managed is None else (cuts_of(managed), managed.rank)


def viewed_as(target: Tensor, source: Tensor) -> Tensor:
    """Bytes in the dtype and shape of a buffer; values as they are."""
    return source.view(target.dtype).view(target.shape) if source.dtype is torch.uint8 else source

# SPDX-License-Identifier: Apache-2.0
"""The rows that this rank holds of the tensors of an export, encoded without gathering a weight.

One MAX all-reduce shares the amaxes of blocks and tensors that shards divide (`prepared`). Each
rank then encodes its own rows to the bytes that the whole weight has there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..checkpoint import LocalWeight, prepared
from ..formats import ROWWISE, ceil_div
from ..linear.has_weight import saved_plain
from ..ops.dispatch import Statistics
from ..storage import Storage
from ..tensor.weight_state import WeightState
from . import layouts
from .export import Exported, Part
from .weights import Slice, Source, statistics_of


class Piece(NamedTuple):
    """A rectangle of a tensor of the export: it begins at `offsets` of a tensor of `shape`.

    Pieces of block scales overlap where shards divide a block; their bytes agree there.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class LocalTensors:
    """What this rank holds of the model's tensors."""

    def __init__(self, model: nn.Module):
        self._model = model

    @functools.cached_property
    def _weights(self) -> dict[WeightState, LocalWeight]:
        """Collective: every rank must call it."""
        weights = (weight for weight in prepared(self._model) if not weight.transposed)
        return {weight.piece.state: weight for weight in weights}

    def check(self, checkpoint: Exported) -> None:
        """Raise NotImplementedError, on every rank, unless `fully_shard` alone cuts the weights."""
        for source in checkpoint.parts:
            weights = [self._weights.get(layer._weight_state) for layer in source.layers]
            if any(w is None or w.piece.state.tensor_group or w.experts for w in weights):
                raise NotImplementedError(
                    f"{source.name} is transposed or cut by tensor parallelism; sharded=True "
                    "streams weights that fully_shard alone cuts: use sharded=False"
                )
            if isinstance(source.tensor, DTensor) and len(_sharded_axes(source.tensor)) > 1:
                raise NotImplementedError(
                    f"{source.name} is cut along several mesh axes; sharded=True streams tensors "
                    "that are cut along one: use sharded=False"
                )

    def tensor_amax(self, source: Source, matrix: int | None) -> Tensor | None:
        """fp32 [1]. Every rank must call it."""
        weight = self._weight(source, matrix)
        amax, managed = weight.storage(ROWWISE).tensor_amax, weight.managed
        group = None if managed is None else managed.process_group
        if amax is not None and group is not None and source.tensor.dim() == 3:
            amax = amax.clone()  # of the rank that holds the matrix
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        return amax

    @torch.no_grad()
    def pieces(self, checkpoint: Exported) -> Iterator[list[Piece]]:
        """The pieces of one weight of the checkpoint at a time, none where this rank has none."""
        shapes = {t.name: t.shape for planned in checkpoint.planned for t in planned}
        for source, parts in checkpoint.parts.items():
            storages: dict[int, Storage] = {}  # of the matrix of the part before
            for part in parts:
                if not source.layers:
                    yield _plain(source, part)
                elif part.slice.matrix is None and source.tensor.dim() == 3:
                    yield self._packed(source, part)
                else:
                    matrix = part.slice.matrix or 0
                    if matrix not in storages:
                        storages = {matrix: self._storage(source, part.slice.matrix, checkpoint)}
                    aliases = self._weight(source, matrix).codes is not None
                    yield [
                        p._replace(tensor=p.tensor.clone() if aliases else p.tensor.contiguous())
                        for p in _quantized(storages[matrix], part, checkpoint.format, shapes)
                    ]

    def _packed(self, source: Source, part: Part) -> list[Piece]:
        """Decoded matrices of a tensor [E, N, K]."""
        storages = (self._weight(source, e).storage(ROWWISE) for e in range(len(source.layers)))
        return [
            Piece(part.slice.name, s.dequantize(part.dtype)[None], part.shape, (e, s.row0, 0))
            for e, s in enumerate(storages)
            if s.shape[0]
        ]

    def _weight(self, source: Source, matrix: int | None) -> LocalWeight:
        return self._weights[source.layers[matrix or 0]._weight_state]

    def _storage(self, source: Source, matrix: int | None, checkpoint: Exported) -> Storage:
        weight, amax = self._weight(source, matrix), checkpoint.shared.get((source, matrix))
        if amax is not None:
            key, values = (weight.piece.state.name, ROWWISE), weight.piece.values
            layer = source.layers[matrix or 0]
            blocks = (weight.statistics.get(key) or statistics_of(values, layer)).amax
            weight = replace(weight, statistics={key: Statistics(blocks, amax.to(values.device))})
        return weight.storage(ROWWISE)


def _quantized(
    storage: Storage, part: Part, format: str, shapes: dict[str, tuple[int, ...]]
) -> Iterator[Piece]:
    """The rows of one matrix that a part of the checkpoint and this rank's storage share."""
    first, end = part.slice.rows or (0, part.shape[0])
    start, stop = max(first, storage.row0), min(end, storage.row0 + storage.shape[0])
    if start >= stop:
        return
    storage = storage.narrow(start - storage.row0, stop - start)
    for name, tensor in part.tensors_of(storage, format).items():
        shape, is_scale = shapes[name], name.rpartition(".")[2] not in layouts.CODES
        block = part.kind.format.block[0] or 1 if part.kind is not None and is_scale else 1
        row = 0 if tuple(tensor.shape) == shape else (start - first) // block
        yield Piece(name, tensor, shape, (row, 0, 0, 0)[: len(shape)])


def _plain(source: Source, part: Part) -> list[Piece]:
    """What this rank holds of a high-precision tensor; the whole of one that is not sharded."""
    tensor = saved_plain(source.tensor, source.tensor.detach()).detach()
    offsets = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, dim in _sharded_axes(tensor):
            rows = tensor.shape[dim]
            offsets[dim] = min(ceil_div(rows, mesh.size(axis)) * mesh.get_local_rank(axis), rows)
        tensor = tensor.to_local()
    cut = _cut(tensor, offsets, part.slice)
    if cut is None or not (cut[0].numel() or 0 in part.shape):
        return []
    values = cut[0].to(part.dtype, copy=True, memory_format=torch.contiguous_format)
    return [Piece(part.slice.name, values, part.shape, tuple(cut[1]))]


def _cut(tensor: Tensor, offsets: list[int], piece: Slice) -> tuple[Tensor, list[int]] | None:
    """The intersection of a slice with the rectangle of `tensor` at `offsets`, relative to it."""
    if piece.matrix is not None:
        index = piece.matrix - offsets[0]
        if not 0 <= index < tensor.shape[0]:
            return None
        tensor, offsets = tensor[index], offsets[1:]
    if piece.rows is not None:
        first, end = (min(max(row - offsets[0], 0), tensor.shape[0]) for row in piece.rows)
        if first >= end:
            return None
        tensor, offsets = tensor[first:end], [offsets[0] + first - piece.rows[0], *offsets[1:]]
    return tensor, offsets


def _sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of each cut."""
    return [
        (axis, placement.dim)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard) and tensor.device_mesh.size(axis) > 1
    ]

# SPDX-License-Identifier: Apache-2.0
"""Weights under `fully_shard` that are codes alone: shards in high precision become codes of a
quantized parameter, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import ROWWISE, Direction
from ..ops.layout import flat_bytes
from ..scaling import RowCuts
from ..storage import Storage
from .gathered_weight import cuts_of, wire_buffers
from .quantized_tensor import QuantizedTensor
from .quantized_weight import QuantizedWeight, QuantizedWeightState, frozen_shard, take_codes
from .refresh import refresh_codes
from .storage_pair import StoragePair
from .torch_compat import ManagedParam
from .weight_shard import WeightShard
from .weight_state import Shard, WeightState, encode_shards, values_of


def freeze_shards(weights: Sequence[ManagedParam]) -> None:
    """Keep this rank's rows of the weights as codes, and free their values.

    Every rank must call it with the same weights: their statistics are reduced.
    """
    frozen: list[QuantizedWeight] = []
    for managed in weights:
        managed.reset_gather_buffers()
        local = _local(managed)
        state: WeightState = getattr(local, "state")
        if state.packed and not isinstance(local, QuantizedWeight):
            directions = list(state.matrices[0].quantizer.encodings)
            part = cuts_of(managed), managed.rank
            codes = packed_codes(values_of(local).detach(), state, directions, *part)
            _replace(managed, take_codes(frozen_shard(local, state, local.shape), codes))
            continue
        if not isinstance(local, QuantizedWeight):
            state = state.as_kind(QuantizedWeightState)
            _replace(managed, state.wrapped(values_of(local).detach()))
        local = managed.local  # FSDP2 moves short shards into padded memory
        if isinstance(local, QuantizedWeight):
            frozen.append(local)
    refresh_codes(frozen)
    for weight in frozen:
        weight.drop_values()


def freeze_shard(managed: ManagedParam, codes: QuantizedTensor) -> None:
    """Keep this rank's part of the codes of a whole weight, in place of its values."""
    local, bounds = _local(managed), cuts_of(managed).bounds
    first, last = bounds[managed.rank], bounds[managed.rank + 1]
    state: WeightState = getattr(local, "state")
    part = StoragePair()
    if first < last or not state.packed:
        part = codes._narrow(0, first, last - first)._pair.map(lambda s: s.map(torch.clone))
    part = part.joined() if state.packed else part
    _replace(managed, take_codes(frozen_shard(local, state, local.shape), part))


def gathered_codes(managed: ManagedParam) -> QuantizedTensor:
    """All matrices of a packed weight with their rowwise codes. Every rank must call it."""
    local, (experts, rows, cols) = _local(managed), managed.global_shape
    encoding = getattr(local, "state").matrices[0].quantizer.encodings[ROWWISE]
    shown = local._pair.shown or {} if isinstance(local, QuantizedWeight) else {}
    zeros = Storage.zeros(encoding.fmt, ROWWISE, (rows, cols), local.dtype, local.device)
    whole = StoragePair(groups=[StoragePair(zeros) for _ in range(experts)])
    gathered: dict[str, Tensor] = {}
    for buffer in wire_buffers(encoding, cuts_of(managed), (experts, rows, cols), local.dtype):
        name, like = f"rowwise_{buffer.name}", zeros.buffers()[buffer.name]
        sent = torch.zeros(buffer.rows * buffer.row_bytes, dtype=torch.uint8, device=local.device)
        if name in shown:
            mine = flat_bytes(shown[name])
            sent[: len(mine)] = mine
        parts = [torch.empty_like(sent) for _ in range(managed.world_size)]
        dist.all_gather(parts, sent, group=managed.process_group)
        codes = torch.cat(parts)[: experts * like.nbytes].view(like.dtype)
        gathered[name] = codes.view(experts * like.shape[0], *like.shape[1:])
    return QuantizedTensor(pair=whole.over(gathered), shape=(experts, rows, cols))


def unfreeze_shards(weights: Sequence[ManagedParam]) -> None:
    """Keep the values of the codes of this rank's rows, in high precision."""
    for managed in weights:
        local = _local(managed)
        state = getattr(local, "state").as_kind(WeightState)
        _replace(managed, WeightShard(local.dequantize(), state))


def packed_codes(
    values: Tensor,
    state: WeightState,
    directions: Sequence[Direction],
    cuts: RowCuts | None = None,
    rank: int = 0,
) -> StoragePair:
    """The codes of each of a rank's matrices.

    values:      [matrices, N, K]. cuts: between matrices; None: this rank has all.
    directions:  that are encoded from values.
    """
    pieces = state.pieces(values, cuts or RowCuts((0, len(values))), rank)
    pairs = [StoragePair(owner=piece.state) for piece in pieces]
    for direction in directions:
        encoding = state.matrices[0].quantizer.encodings[direction]
        shards = [Shard(piece, direction, values.dtype) for piece in pieces]
        for pair, piece, codes in zip(pairs, pieces, encode_shards(shards, values.device)):
            pair.put(direction, Storage.of(codes, encoding, piece.values.shape, values.dtype))
    return StoragePair(owner=state, groups=pairs).joined()


def _local(managed: ManagedParam) -> Tensor:
    if managed.local is None:
        raise RuntimeError("the model of this weight was freed")
    return managed.local


def _replace(managed: ManagedParam, local: QuantizedWeight | WeightShard) -> None:
    managed.reset_gather_buffers()
    managed.replace_local(local)
    for module, _ in managed.owners:
        set_state = getattr(module, "set_weight_state", None)
        if set_state is not None:
            set_state(local.state)

# SPDX-License-Identifier: Apache-2.0
"""Encoding the masters of quantized parameters: after writes, and fused into an optimizer's
kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..gemm import StaleWeightError
from ..ops import native
from ..ops.dispatch import Encoded
from .fsdp_hooks import managed_of
from .gathered_weight import cuts_and_rank
from .root_statistics import Sharded, reduce_statistics
from .torch_compat import ManagedParam
from .weight_codes import WeightCodes
from .weight_state import Piece, Shard, encode_shards


def refresh_codes(weights: Sequence[WeightCodes]) -> None:
    """Encode quantized parameters whose values were written, from statistics that one collective
    per shard group reduces.

    Runs after each step of their optimizer, and at the first gather after another event. Every rank
    that takes part in the event must call it with the same weights.
    """
    managed = [(w, managed_of(w.state)) for w in weights if w.has_values]
    crossing = [(w, m) for w, m in managed if m is not None or w.state.spans_parts]
    if crossing:
        reduce_statistics(
            [Sharded(w, w.state, m, w.state.statistics_at(w.version)) for w, m in crossing],
            crossing[0][0].state.collectives,
        )
        for w, _ in crossing:
            w.state.statistics_version = w.version
    for w, _ in managed:
        w.state.pending = False
    encode_stale(managed)


def _shards(weight: WeightCodes, managed: ManagedParam | None) -> list[Shard]:
    """This rank's rows of a quantized parameter, to be encoded in each direction.

    Raises StaleWeightError if statistics that cross ranks are those of other values.
    """
    state, version = weight.state, weight.version
    cuts, rank = cuts_and_rank(managed, weight.shape[0])
    shards = []
    for direction, encoding in state.quantizer.encodings.items():
        if not encoding.fmt.is_quantized and managed is not None:
            continue
        if cuts.shares_statistics(encoding, state.part[1]):
            if state.statistics is None or state.statistics_version != version:
                raise StaleWeightError(
                    f"{state.name}, a quantized parameter, changed without an event that every "
                    "rank shares (a step of its optimizer, load_state_dict, set_recipe), and its "
                    "scales span ranks; load the values on every rank"
                )
            known = state.statistics.get((state.name, direction))
        else:
            known = (state.statistics_at(version) or {}).get(direction)
        piece = Piece(state, weight.inner, cuts, rank)
        shards.append(
            Shard(piece, direction, weight.dtype, known, weight.output_buffers(direction))
        )
    return shards


@torch.no_grad()
def encode_stale(weights: Sequence[tuple[WeightCodes, ManagedParam | None]]) -> None:
    """Encode this rank's rows of the weights whose codes are stale; one launch per encoding."""
    by_device: dict[torch.device, list[tuple[WeightCodes, Shard]]] = {}
    changed = []
    for weight, managed in weights:
        if weight.state.weight_sync is not None or all(
            map(weight.is_current, weight.state.quantizer.encodings)
        ):
            continue
        changed.append((weight, managed))
        stale = [s for s in _shards(weight, managed) if not weight.is_current(s.direction)]
        by_device.setdefault(weight.device if managed is None else managed.device, []).extend(
            (weight, s) for s in stale
        )
    for device, stale in by_device.items():
        for (weight, shard), encoded in zip(stale, encode_shards([s for _, s in stale], device)):
            weight.store(shard.direction, encoded, shard.piece.row0)
    for weight, managed in changed:
        quantizer = weight.state.quantizer
        if quantizer.is_derived and not quantizer.decodes_columnwise and managed is None:
            rowwise = weight._pair.storage(ROWWISE)
            derived = quantizer.derive_columnwise(rowwise, weight.state.compute_dtype)
            weight.store(
                COLUMNWISE, Encoded(derived.data, derived.scale, derived.tensor_amax, None), 0
            )


class FusedOutputs(NamedTuple):
    """What a kernel that writes the master of a quantized parameter computes of the new values.

    shards:     (direction, first row) of each output, rowwise first. encodings: of each.
    blocks:     per output, whether it has block amaxes. None: the outputs are codes; else they are
                statistics for a later encode.
    """

    shards: list[tuple[Direction, int]]
    encodings: tuple[Encoding, ...]
    blocks: tuple[bool, ...] | None


def fused_outputs(weight: WeightCodes) -> FusedOutputs | None:
    """Codes, if every scale follows from a tile of this rank's rows; else statistics of the others.

    None if no kernel computes either: the values are not rounded to bf16, or are no matrix.
    """
    state, managed = weight.state, managed_of(weight.state)
    if state.compute_dtype is not torch.bfloat16 or weight.dim() != 2:
        return None
    cuts, rank = cuts_and_rank(managed, weight.shape[0])

    def crosses(e: Encoding) -> bool:
        return e.fmt.scale_leaves_contraction or e.fmt.tensor_scale or cuts.shares_statistics(e)

    fusable = {
        d: e
        for d, e in state.quantizer.encodings.items()
        if e.fmt.is_quantized
        and native.encodes_group(e, torch.float32, True)
        and (e.fmt.bits == 8 or crosses(e))
    }
    crossing = {d: e for d, e in fusable.items() if crosses(e)}
    chosen = crossing or fusable
    if not chosen:
        return None
    encodings, blocks = tuple(chosen.values()), None
    if crossing:
        blocks = tuple(not e.fmt.tensor_scale or bool(cuts.cut_block_rows(e)) for e in encodings)
    return FusedOutputs([(d, cuts.bounds[rank]) for d in chosen], encodings, blocks)

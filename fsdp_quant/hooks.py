# SPDX-License-Identifier: Apache-2.0
"""`fq.hooks`: for trainers that own flat buffers and cut them at any element; formats, statistics,
codes and validity are ours.

[Note: the life of a step]
    masters of the pieces --cast_--> this rank's segments --gather--> segments of all ranks
    --finish--> the weights' storages
    INIT                             CAST (generation)                GATHERED
    READY

The trainer decides who owns which elements (`ShardMap`), where the bytes are stored (`bind`) and
when they move. A weight is a `QuantizedTensor` parameter of `fq.quantized_model_init`; a product
that reads a direction which is not READY at the newest generation raises StaleWeightError.

What travels is flat uint8, one buffer a channel: what serves the rowwise storages, the columnwise
ones, or both. Two transports give the same bytes: "codes", and "highprec", which gathers rounded
masters and quantizes whole weights on every rank. So do two kinds of statistics: "dense" reduces
every amax and derives every scale on each rank; "halo" reduces the amaxes of blocks that a cut
divides, and gathers scales. Codes that are whole in the gathered segments are read there; others,
and what a trainer's memory (`bind`) has received, are copied to memory of the weights.

A weight that tensor parallelism cuts is a part of one. Blocks are its own, scales of a whole tensor
those of all parts (`tensor_group`), as under fully_shard: then parts put together are the codes of
the whole weight.

>>> with fq.quantized_model_init("mxfp8"):
...     layer = fq.Linear(64, 32, bias=False)
>>> shards = fq.hooks.ShardMap((0, 64 * 32))              # one rank owns all elements
>>> sync = fq.hooks.plan_weight_sync([("w", layer.weight, shards)], None)
>>> masters = sync.init_masters()
>>> sync.refresh(masters)
>>> sync.generation
1
"""

from .weight_sync.plan import describe, plan_weight_sync, token_alignment
from .weight_sync.shard_map import ShardMap
from .weight_sync.sync import WeightSync
from .weight_sync.synced_weight import SyncItem

__all__ = ["ShardMap", "SyncItem", "WeightSync", "describe", "plan_weight_sync", "token_alignment"]

# SPDX-License-Identifier: Apache-2.0
"""`fq.hooks`: synchronize quantized weights whose fp32 masters a trainer keeps in flat buffers,
cut at any element.

[Note: the life of a step]
    masters of the pieces --cast_--> this rank's segments --gather--> segments of all ranks
    --finish--> the weights' storages
    INIT                             CAST (generation)                GATHERED
    READY

The trainer decides which rank owns which elements (`ShardMap`), where the bytes are stored (`bind`)
and when they move; the sync computes formats, statistics and codes, and checks that they are valid.
A weight is a `QuantizedTensor` parameter of `fq.quantized_model_init`. A GEMM that reads a
direction which is not READY at the newest generation raises StaleWeightError.

Ranks exchange flat uint8, one buffer per channel: the bytes of the rowwise storages, of the
columnwise storages, or of both. Two transports give the same bytes: "codes", and "highprec", which
gathers rounded masters and quantizes every weight on every rank. Two kinds of statistics do too:
"dense" reduces every amax and derives every scale on each rank; "halo" reduces the amaxes of blocks
that a cut divides, and gathers scales. GEMMs read codes in the gathered segments if these hold them
without a gap; other codes, and bytes that the trainer's memory (`bind`) received, are copied to the
weights' memory.

Under tensor parallelism a rank's weight is a part of a larger one: it has its own blocks, and all
parts share the scale of the tensor (`tensor_group`), as under fully_shard. So the parts put
together are the codes of the larger weight.

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

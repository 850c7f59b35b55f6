# SPDX-License-Identifier: Apache-2.0
"""FSDP_QUANT_CHECK=1 in the environment: compare gathered codes with those of the shard before each
GEMM that reads them.

Finds overwritten codes, and gathers that sent old ones. It is slow and waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..formats import ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops.layout import flat_bytes
from .quantized_tensor import QuantizedTensor
from .weight_state import WeightState, WeightTensor, encode_piece

CHECK_VARIABLE = "FSDP_QUANT_CHECK"


def read_setting(environ: Mapping[str, str] = os.environ) -> bool:
    """FSDP_QUANT_CHECK as a truth value. Raises ValueError unless it is "1", "0" or not set."""
    value = environ.get(CHECK_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(
            f"FSDP_QUANT_CHECK is {value!r}; give 1 (check gathered codes before each product) or 0"
        )
    return value == "1"


checking = read_setting()


def check_gathered(weight: QuantizedTensor, direction: Direction) -> None:
    """Raise StaleWeightError unless the gathered codes of this rank's rows are those of the shard
    as it is now."""
    pair = weight._pair
    state = pair.owner
    if not isinstance(state, WeightState) or state.managed is None:
        return
    managed, local = state.managed, state.managed.local
    if not isinstance(local, WeightTensor):  # the model was freed
        return
    source = direction if direction in state.quantizer.encodings else ROWWISE
    gathered = pair.storage(source)
    if gathered.is_freed:  # its GEMM reads a copy in another layout
        return
    for shard in state.gathered.shards(local, source):
        rows = shard.piece.values.shape[0]
        if shard.piece.state is not state or not rows:
            continue
        expected = local.state.own_codes(local, source) or encode_piece(
            shard.piece, source, shard.high_precision, shard.statistics, managed.device
        )
        for field, buffer in gathered.narrow(shard.piece.row0, rows).buffers().items():
            a, b = (flat_bytes(t) for t in (buffer, getattr(expected, field)))
            if apart := int((a != b).sum()):
                raise StaleWeightError(
                    f"{state.name}: {apart} of {a.nbytes} bytes of {source.value}.{field}, which a "
                    "product is about to read, are not those of the shard as it is now: the weight "
                    "was written after it was gathered, or its codes were"
                )

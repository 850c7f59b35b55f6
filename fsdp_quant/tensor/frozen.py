# SPDX-License-Identifier: Apache-2.0
"""Weights under `fully_shard` that are codes alone: shards in high precision become codes of a
quantized parameter, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .quantized_weight import QuantizedWeight, QuantizedWeightState
from .refresh import refresh_codes
from .torch_compat import ManagedParam
from .weight_shard import WeightShard
from .weight_state import WeightState, values_of


def freeze_shards(weights: Sequence[ManagedParam]) -> None:
    """Keep this rank's rows of the weights as codes, and free their values.

    Every rank must call it with the same weights: their statistics are reduced.
    """
    frozen: list[QuantizedWeight] = []
    for managed in weights:
        local = _local(managed)
        if not isinstance(local, QuantizedWeight):
            state = getattr(local, "state").as_kind(QuantizedWeightState)
            _replace(managed, state.wrapped(values_of(local).detach()), state)
        frozen.append(_local(managed))  # FSDP2 moves short shards into padded memory
    refresh_codes(frozen)
    for weight in frozen:
        weight.drop_values()


def unfreeze_shards(weights: Sequence[ManagedParam]) -> None:
    """Keep the values of the codes of this rank's rows, in high precision."""
    for managed in weights:
        local = _local(managed)
        state = getattr(local, "state").as_kind(WeightState)
        _replace(managed, WeightShard(local.dequantize(), state), state)


def _local(managed: ManagedParam) -> Tensor:
    if managed.local is None:
        raise RuntimeError("the model of this weight was freed")
    return managed.local


def _replace(managed: ManagedParam, local: Tensor, state: WeightState) -> None:
    managed.reset_gather_buffers()
    managed.replace_local(local)
    for module, _ in managed.owners:
        set_state = getattr(module, "set_weight_state", None)
        if set_state is not None:
            set_state(state)

# SPDX-License-Identifier: Apache-2.0
"""`fq.state_dict` of all ranks as one object, for tools whose checkpoints are written by one
rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..training.training_state import load_state_dict, state_dict

_OF_RANKS = ("histories", "moved")  # their values may differ between ranks


def gather_state(model: nn.Module) -> dict:
    """Return `fq.state_dict(model)`, with the histories and moved products of every rank under
    "ranks". Every rank must call it."""
    state = state_dict(model)
    local = {key: state.pop(key) for key in _OF_RANKS}
    ranks = [local]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, local)
    return state | {"ranks": ranks}


def load_gathered_state(model: nn.Module, state: dict) -> None:
    """Load what `gather_state` returned, after the parameters. Every rank must call it.

    Rank r loads the histories of rank r % W of a run with W ranks.
    """
    rank, ranks = dist.get_rank() if dist.is_initialized() else 0, state["ranks"]
    load_state_dict(model, state | ranks[rank % len(ranks)])

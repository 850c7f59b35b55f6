# SPDX-License-Identifier: Apache-2.0
"""Collectives in which a call of all ranks begins: a rank that waits alone says for what."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_compat import default_store, device_of

# (what, ranks) -> how often `agree_apart` was called
_AGREEMENTS: Counter[tuple[str, tuple[int, ...]]] = Counter()
PATIENCE = 30.0  # seconds until a rank that waits says so; the group's own limit ends the wait


def reduce_together(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
    """All-reduce x in place. Every rank of the group must call it, and waits for it.

    Warns once if other ranks keep this one waiting. Raises RuntimeError, naming the public function
    that this rank called, when the group's time limit ends (gloo; NCCL's watchdog ends the
    process).
    """
    if group.__class__ is not dist.ProcessGroup:  # a trainer's own
        dist.all_reduce(x, op, group=group)
        return
    start = time.monotonic()
    try:
        work = dist.all_reduce(x, op, group=group, async_op=True)
        while work is not None and not work.is_completed():
            waited = time.monotonic() - start
            if waited > PATIENCE:
                warnings.warn(f"waited {waited:.0f} s so far: {_sentence(group)}", stacklevel=2)
                break
            time.sleep(min(1e-3, waited / 8))
        if work is not None:
            work.wait()
    except RuntimeError as error:
        waited = time.monotonic() - start
        raise RuntimeError(f"waited {waited:.0f} s in vain: {_sentence(group)}") from error


def meet(groups: list[tuple[dist.ProcessGroup, ...]]) -> None:
    """Wait for all ranks of these meshes before the first collective of a call of all ranks."""
    for group in dict.fromkeys(group for axes in groups for group in axes):
        if group.size() > 1:
            flag = torch.zeros(1, dtype=torch.int32, device=device_of(group))
            reduce_together(flag, group, dist.ReduceOp.MAX)


def agree_apart(what: str, fact: str, ranks: Sequence[int], remedy: str) -> None:
    """Raise ValueError unless all of these ranks call this with the same fact.

    Asks the store and issues no collective, because a rank that does not call this may be in one.
    Every rank that calls it raises the same sentence. Waits up to `PATIENCE` for each.
    """
    store, count = default_store(), _AGREEMENTS[what, tuple(ranks)]
    _AGREEMENTS[what, tuple(ranks)] += 1
    keys = {rank: f"fsdp_quant {what} {list(ranks)} {count} {rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], fact)
    facts = {}
    for rank, key in keys.items():
        try:
            store.wait([key], timedelta(seconds=PATIENCE))
            facts[rank] = store.get(key).decode()
        except dist.DistError:
            facts[rank] = f"nothing new after {PATIENCE:.0f} s"
    first, *others = facts
    for rank in others:
        if facts[rank] != facts[first]:
            raise ValueError(
                f"ranks disagree: {what} is {facts[first]} on rank {first} and {facts[rank]} on "
                f"rank {rank}; {remedy}"
            )


def _sentence(group: dist.ProcessGroup) -> str:
    name, frame = "a function of fsdp_quant", sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(f"{__name__.split('.')[0]}."):
            name = f"fsdp_quant's {frame.f_code.co_name}"
        frame = frame.f_back
    return (
        f"{name} was called on rank {dist.get_rank()}, and not on all {group.size()} ranks that "
        "share these weights. Every rank must call it (a rank may drop what it returns); take it, "
        "or fq.convert, out of `if rank == 0:`"
    )

"""Ranks as threads of one process: collectives of `torch.distributed` in memory, for laws over many worlds and cuts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_quant.tensor import torch_compat


class VirtualGroup:
    """What one rank holds of a group: `rank()`, `size()`, and a record of its collectives, (name, bytes)."""

    def __init__(self, ranks: VirtualRanks, rank: int):
        self.ranks, self.index, self.calls = ranks, rank, []

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.ranks.world

    def exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        """What every rank has sent, by rank."""
        ranks = self.ranks
        self.calls.append((name, tensor.nbytes))
        ranks.slots[self.index] = (name, tensor.clone())
        ranks.barrier.wait(30)
        sent = list(ranks.slots)
        ranks.barrier.wait(30)
        assert len({(n, t.shape, t.dtype) for n, t in sent}) == 1, f"ranks made different collectives: {sent}"
        return [t for _, t in sent]


class LoneRank(NamedTuple):
    """A rank of a group whose others are not there: under `alone()` an all-reduce leaves what it has."""

    index: int
    world: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.world


def alone():
    return mock.patch.object(dist, "all_reduce", lambda *args, **options: None)


class Done:
    def wait(self) -> None:
        pass


def _all_reduce(tensor: Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False):
    sent = torch.stack(group.exchange("all_reduce", tensor))
    tensor.copy_(sent.amax(0) if op == dist.ReduceOp.MAX else sent.sum(0))


def _all_gather(out: Tensor, tensor: Tensor, group=None, async_op: bool = False):
    out.copy_(torch.cat(group.exchange("all_gather", tensor)))
    return Done()


class VirtualRanks:
    """`run(fn)` calls fn(group) of every rank in a thread of its own; results by rank, or the first error of its own."""

    def __init__(self, world: int):
        self.world, self.slots, self.barrier = world, [None] * world, threading.Barrier(world)
        self.groups = [VirtualGroup(self, rank) for rank in range(world)]

    def run(self, fn: Callable[[VirtualGroup], object]) -> list:
        results, errors = [None] * self.world, [None] * self.world

        def entry(rank: int) -> None:
            try:
                results[rank] = fn(self.groups[rank])
            except BaseException as error:
                errors[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=entry, args=(rank,)) for rank in range(self.world)]
        with mock.patch.object(dist, "all_reduce", _all_reduce), mock.patch.object(torch_compat, "all_gather", _all_gather):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.errors = errors
        own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
        if own or any(errors):
            self.barrier.reset()
            raise own[0] if own else next(e for e in errors if e is not None)
        return results

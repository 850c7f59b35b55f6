# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks (`examples.mini_megatron.ordered`) that record their collectives, for laws over
many worlds and cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from examples.mini_megatron import ordered


class VirtualGroup(ordered.VirtualGroup):
    """All ranks, as one of them sees them; calls: (name, bytes) of each collective."""

    def __init__(self, world: VirtualRanks, rank: int):
        super().__init__(world, tuple(range(world.ranks)), rank, "all")
        self.calls: list[tuple[str, int]] = []

    def exchange(self, sent: Tensor) -> list[Tensor]:
        received = super().exchange(sent)
        assert len({(t.shape, t.dtype) for t in received}) == 1, (
            f"ranks made different collectives: {received}"
        )
        return received

    def allreduce(self, tensors: list[Tensor], opts) -> ordered.Done:
        self.calls.append(("all_reduce", tensors[0].nbytes))
        return super().allreduce(tensors, opts)

    def all_gather_single(self, out: Tensor, sent: Tensor, opts) -> ordered.Done:
        self.calls.append(("all_gather", sent.nbytes))
        return super().all_gather_single(out, sent, opts)


class VirtualRanks(ordered.VirtualRanks):
    """`run(fn)` calls fn(group) of every rank; results by rank, or the first error."""

    def run(self, fn: Callable[[VirtualGroup], object]) -> list:
        return super().run(lambda rank: fn(VirtualGroup(self, rank)))


class LoneRank(NamedTuple):
    """A rank of a group whose others are not there: under `alone()` an all-reduce leaves what it
    has."""

    index: int
    world: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.world


def alone():
    return mock.patch.object(dist, "all_reduce", lambda *args, **options: None)

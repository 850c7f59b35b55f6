# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks: pipeline x data x tensor; experts divide the ranks of a stage differently.

rank = (stage * data + d) * tensor + t      a stage: data * tensor ranks, with the same layers

tensor        ranks that hold parts of the same linear layers and sequences
data          ranks with the same part of dense layers: same t
experts       consecutive ranks of a stage that hold all experts between them
expert_data   ranks with the same experts: every `experts`-th rank of a stage
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

import fsdp_quant as fq

from .ordered import OrderedGroup, VirtualGroup, VirtualRanks


@dataclass(frozen=True)
class Sizes:
    """Ranks per dim. Raises ValueError if experts do not divide a stage."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    experts: int = 1

    def __post_init__(self):
        if (
            min(self.pipeline, self.data, self.tensor, self.experts) < 1
            or self.stage % self.experts
        ):
            raise ValueError(
                f"sizes must be at least 1, and experts divide the {self.stage} ranks of a stage, "
                f"got {self}"
            )

    @property
    def stage(self) -> int:
        return self.data * self.tensor

    @property
    def world(self) -> int:
        return self.pipeline * self.stage

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """The ranks of every group of this name."""
        stages = [range(p * self.stage, (p + 1) * self.stage) for p in range(self.pipeline)]
        t, e = self.tensor, self.experts
        return {
            "world": lambda: [tuple(range(self.world))],
            "stage": lambda: [tuple(s) for s in stages],
            "tensor": lambda: [
                tuple(s[i : i + t]) for s in stages for i in range(0, self.stage, t)
            ],
            "data": lambda: [tuple(s[i::t]) for s in stages for i in range(t)],
            "experts": lambda: [
                tuple(s[i : i + e]) for s in stages for i in range(0, self.stage, e)
            ],
            "expert_data": lambda: [tuple(s[i::e]) for s in stages for i in range(e)],
            "forward": lambda: list(zip(*stages)),
            "backward": lambda: list(
                zip(*stages)
            ),  # one per way: sends one way never wait for those the other way
        }[name]()


class Ranks:
    """One rank's place in the grid, and its groups: `world`, `stage`, `tensor`, `data`, ..
    (`Sizes.groups`).

    make:  (name, ranks) -> the group of these ranks, or None on a rank outside it; every
           rank makes the same calls.
    """

    world: dist.ProcessGroup
    stage: dist.ProcessGroup
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    experts: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup

    def __init__(
        self, sizes: Sizes, rank: int, make: Callable, virtual: VirtualRanks | None = None
    ):
        self.sizes, self.rank, self._virtual = sizes, rank, virtual
        for name in Ranks.__annotations__:
            made = [make(name, ranks) for ranks in sizes.groups(name)]
            setattr(self, name, next(group for group in made if group is not None))

    @property
    def is_first(self) -> bool:
        """Of the pipeline."""
        return self.forward.rank() == 0

    @property
    def is_last(self) -> bool:
        return self.forward.rank() == self.sizes.pipeline - 1

    def begin(self, step: int, micro_batch: int) -> None:
        """Set the key of random bits, before each forward and backward and when a virtual rank
        resumes."""
        fq.begin_step(step, micro_batch)
        if self._virtual is not None:
            self._virtual.of_thread.resume = lambda: fq.begin_step(step, micro_batch)


def on_processes(sizes: Sizes, fn: Callable[[Ranks], object], ordered: bool) -> object:
    """Run fn(ranks) on this process of torch.distributed's world."""
    if dist.get_world_size() != sizes.world:
        raise ValueError(
            f"{sizes} are {sizes.world} ranks, and {dist.get_world_size()} processes run"
        )

    def make(name: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        group = dist.new_group(members)
        if dist.get_rank() not in members:
            return None
        return OrderedGroup(group) if ordered and name not in ("forward", "backward") else group

    with fq.steps.token_offset(0):  # micro-batches are numbered over all data-parallel ranks
        return fn(Ranks(sizes, dist.get_rank(), make))


def on_virtual_ranks(sizes: Sizes, fn: Callable[[Ranks], object]) -> list:
    """Run fn(ranks) for every rank in this process: the reference for ordered sums."""
    world = VirtualRanks(sizes.world)

    def of(rank: int) -> object:
        def make(name: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
            return VirtualGroup(world, members, rank, name) if rank in members else None

        with fq.steps.token_offset(0):  # a rank is a thread, and contexts belong to threads
            return fn(Ranks(sizes, rank, make, world))

    return world.run(of)

# SPDX-License-Identifier: Apache-2.0
"""Process groups that sum in rank order, for processes and for ranks as threads of one process.

All backends add two summands equally. For more, the order and so the bits depend on backend,
topology and size. With these groups a run has the same bits on gloo, on NCCL, and in one process,
which is the reference for the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Their names before torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Done:
    """The work handle of a finished collective."""

    def wait(self) -> None:
        pass


class OrderedGroup(dist.ProcessGroup):
    """The ranks of `group`; sums add gathered summands in rank order."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.rank(), group.size())
        self.group = group

    @property
    def _device_types(self) -> list[torch.device]:
        return self.group._device_types

    def exchange(self, sent: Tensor) -> list[Tensor]:
        """Data that every rank sent, by rank."""
        received = sent.new_empty(self.size(), *sent.shape)
        all_gather(received.view(-1), sent.contiguous().view(-1), group=self.group)
        return list(received)

    def _reduced(self, sent: Tensor, op: dist.ReduceOp, pick: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [pick(part) for part in self.exchange(sent)]
        if op == dist.ReduceOp.MAX:
            return torch.stack(parts).amax(0)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def allreduce(self, tensors: list[Tensor], opts) -> Done:
        (tensor,) = tensors
        tensor.copy_(self._reduced(tensor, opts.reduceOp, lambda part: part))
        return Done()

    def reduce_scatter_single(self, out: Tensor, sent: Tensor, opts) -> Done:
        rank, ranks = self.rank(), self.size()
        out.copy_(self._reduced(sent, opts.reduceOp, lambda part: part.chunk(ranks)[rank]))
        return Done()

    def all_gather_single(self, out: Tensor, sent: Tensor, opts) -> dist.Work:
        return all_gather(out, sent, group=self.group, async_op=True)

    def all_to_all_single(self, out: Tensor, sent: Tensor, out_splits, splits, opts) -> dist.Work:
        return dist.all_to_all_single(
            out, sent, out_splits, splits, group=self.group, async_op=True
        )

    # What torch.distributed calls before 2.13.
    def _reduce_scatter_base(self, *args) -> Done:
        return self.reduce_scatter_single(*args)

    def _allgather_base(self, *args) -> dist.Work:
        return self.all_gather_single(*args)

    def alltoall_base(self, *args) -> dist.Work:
        return self.all_to_all_single(*args)


# Ranks that are threads #


class VirtualRanks:
    """Ranks as threads of one process. One runs at a time, until it waits for data of others."""

    def __init__(self, ranks: int):
        self.ranks, self.turn, self.failed = ranks, threading.Condition(), False
        self.sent: dict[tuple, dict[int, Tensor]] = {}
        self.posted: dict[tuple, deque[Tensor]] = {}
        self.of_thread = threading.local()  # .resume: called when a rank runs again

    def wait_for(self, ready: Callable[[], bool]) -> None:
        if ready():
            return
        if not self.turn.wait_for(lambda: self.failed or ready(), timeout=300) or self.failed:
            raise threading.BrokenBarrierError(
                "another rank failed, or never sent what this one waits for"
            )
        getattr(self.of_thread, "resume", lambda: None)()

    def run(self, fn: Callable[[int], object]) -> list:
        """Run fn(rank) on every rank; returns results by rank, or raises the first error."""
        results, errors = [None] * self.ranks, []

        def entry(rank: int) -> None:
            # a backward runs in its rank's thread
            with self.turn, torch.autograd.set_multithreading_enabled(False):
                try:
                    results[rank] = fn(rank)
                except BaseException as error:
                    errors.append(error)
                    self.failed = True
                self.turn.notify_all()

        threads = [threading.Thread(target=entry, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class VirtualGroup(OrderedGroup):
    """A group of virtual ranks as one of them sees it.

    members:  ranks of `world`, in order.
    name:     distinguishes groups of the same members.
    """

    def __init__(self, world: VirtualRanks, members: tuple[int, ...], rank: int, name: str):
        dist.ProcessGroup.__init__(self, members.index(rank), len(members))
        self.world, self.key, self._exchanges = world, (name, members), 0

    @property
    def _device_types(self) -> list[torch.device]:
        return []  # any, of tensors that may lie on others where they come from

    def exchange(self, sent: Tensor) -> list[Tensor]:
        """Like `OrderedGroup.exchange`; sizes may differ."""
        self._exchanges += 1
        key, ranks = (*self.key, self._exchanges), self.size()
        slots = self.world.sent.setdefault(key, {})
        slots[self.rank()] = sent.clone()
        self.world.turn.notify_all()
        self.world.wait_for(lambda: len(slots) == ranks)
        self.world.sent.pop(key, None)
        return [slots[r].to(sent.device) for r in range(ranks)]

    def all_gather_single(self, out: Tensor, sent: Tensor, opts) -> Done:
        out.copy_(torch.cat(self.exchange(sent)))
        return Done()

    def all_to_all_single(self, out: Tensor, sent: Tensor, out_splits, splits, opts) -> Done:
        rank, ranks = self.rank(), self.size()
        counts = self.exchange(torch.tensor(splits or [len(sent) // ranks] * ranks))
        parts = zip(self.exchange(sent), counts)
        out.copy_(torch.cat([part.split(count.tolist())[rank] for part, count in parts]))
        return Done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Done:
        self.world.posted.setdefault((*self.key, self.rank(), to), deque()).append(
            tensors[0].clone()
        )
        self.world.turn.notify_all()
        return Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Done:
        posted = self.world.posted.setdefault((*self.key, source, self.rank()), deque())
        self.world.wait_for(lambda: len(posted) > 0)
        tensors[0].copy_(posted.popleft())
        return Done()

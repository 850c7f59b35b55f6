"""The data-parallel group as a process sees it: one rank of it, or all of them one after another.

The second is the reference: the same micro-batches, and sums over ranks in the same order, in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Their names before torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class DataParallel:
    """ranks: of the group. group: None: this process plays all of them, and owns everything."""

    ranks: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """Of the owner of masters that this process is."""
        return 0 if self.group is None else self.group.rank()

    @property
    def owners(self) -> int:
        return 1 if self.group is None else self.ranks

    @property
    def played(self) -> list[int]:
        """Data-parallel ranks whose micro-batches this process runs."""
        return list(range(self.ranks)) if self.group is None else [self.rank]

    def gathered(self, mine: list[Tensor]) -> list[Tensor]:
        """A tensor of every data-parallel rank, by rank, from those of the ranks that are played."""
        if self.group is None:
            return mine
        flat = torch.empty(self.ranks * mine[0].numel(), dtype=mine[0].dtype, device=mine[0].device)
        all_gather(flat, mine[0].reshape(-1), group=self.group)
        return [piece.view(mine[0].shape) for piece in flat.chunk(self.ranks)]

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

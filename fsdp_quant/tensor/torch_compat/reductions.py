# SPDX-License-Identifier: Apache-2.0
"""How FSDP2 reduces gradients: what it asks of a `ReduceScatter`, and the operators it runs."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from .fsdp2 import managed_params_of


class Reduction(NamedTuple):
    """A reduction that FSDP2 runs now.

    names:     of the parameters whose gradients are reduced, in order.
    numels:    elements of a rank's piece of each, padded.
    shards:    ranks that reduce-scatter; None: there is one.
    replicas:  ranks that then all-reduce the pieces; None: there is one.
    replica_op:  their operator.
    has_input:  the input of the reduce-scatter is allocated, so the output is next.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    replica_op: object
    has_input: bool

    @property
    def sender(self) -> int:
        """This rank in the mesh of copies and shards. Ranks of tensor parallelism have the same, so
        that their equal gradients stay equal."""
        copy = 0 if self.replicas is None else self.replicas.rank()
        return copy if self.shards is None else copy * self.shards.size() + self.shards.rank()


_REDUCE = inspect.unwrap(foreach_reduce).__code__


def running_reduction() -> Reduction:
    """The reduction that asks for memory: FSDP2 tells a `ReduceScatter` the size alone. Raises
    RuntimeError outside of one."""
    frame = sys._getframe()
    while frame.f_code is not _REDUCE:
        frame = frame.f_back
        if frame is None:
            raise RuntimeError("FSDP2 allocates memory of gradients in foreach_reduce alone")
    known = frame.f_locals
    shards = known["reduce_scatter_group"]
    pieces = 1 if shards is None else shards.size()
    return Reduction(
        tuple(p._param_fqn or p._module_info.param_name for p in known["fsdp_params"]),
        tuple(size.numel() // pieces for size in known["padded_unsharded_sizes"]),
        shards,
        known["all_reduce_group"],
        known["all_reduce_op"],
        "reduce_scatter_input" in known,
    )


def fsdp_groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups of the `fully_shard` calls on `model` and its submodules."""
    return list(dict.fromkeys(m.group for m in managed_params_of(model)))


def reduce_scatter_of(group: FSDPParamGroup) -> ReduceScatter | None:
    """What reduces the gradients of a group; None: torch's own."""
    comm = group._reduce_scatter_comm
    return None if type(comm) is DefaultReduceScatter else comm


def set_reduce_scatter(group: FSDPParamGroup, comm: ReduceScatter | None) -> None:
    """As `FSDPModule.set_custom_reduce_scatter`, which refuses modules of several groups; None:
    torch's own."""
    group._reduce_scatter_comm = DefaultReduceScatter() if comm is None else comm


def factor_of(op: Any, ranks: int) -> float:
    """What an operator multiplies the sum over the ranks by: SUM, AVG, PREMUL_SUM. Raises
    ValueError for others."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    # the state that pickles store is the only place that tells the factor
    factor = op.__getstate__()[1] if op == dist.ReduceOp.PREMUL_SUM else None
    if not isinstance(factor, float):
        raise ValueError(f"gradients are reduced by {op}; wanted SUM, AVG or PREMUL_SUM(factor)")
    return factor

# SPDX-License-Identifier: Apache-2.0
"""Collectives of ranks that share a GPU: through the host.

NCCL wants a GPU a rank, and gloo reads memory of GPUs in few of its collectives. `"shared_gpu"` of
`dist.init_process_group` copies to the host, runs gloo there, and copies back; each call waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only


def _done(result: Any = None) -> dist.Work:
    future = Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


class SharedGPU(dist.ProcessGroup):
    """gloo's collectives, of tensors on any device."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: Any):
        super().__init__(rank, world)
        self._gloo = dist.ProcessGroupGloo(store, rank, world, timeout)

    def getBackendName(self) -> str:
        return "shared_gpu"

    @property
    def group_name(self) -> str:  # which C++ keeps in a backend of its own
        return dist.distributed_c10d._world.pg_names[self]

    @torch.no_grad()
    def _run(self, collective: Callable[..., dist.Work], outputs: Any, *rest: Any) -> dist.Work:
        """Run collective(outputs, *rest) on copies, and write those of outputs back."""
        on_host = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), (outputs, *rest))
        collective(*on_host).wait()
        for there, here in zip(tree_leaves(outputs), tree_leaves(on_host[0]), strict=True):
            there.detach().copy_(here)
        return _done(outputs)

    def _reduced(self, collective: Callable, outputs: Any, options: Any) -> dist.Work:
        """`_run`, of a mean as a sum that is divided, which gloo lacks."""
        mean = options.reduceOp == dist.ReduceOp.AVG
        if mean:
            options.reduceOp = dist.ReduceOp.SUM
        self._run(collective, outputs, options)
        if mean:
            options.reduceOp = dist.ReduceOp.AVG
            for output in tree_leaves(outputs):
                output.detach().div_(self.size())
        return _done(outputs)

    def broadcast(self, tensors, opts=None):
        return self._run(self._gloo.broadcast, tensors, opts or c10d.BroadcastOptions())

    def allreduce(self, tensors, opts=None):
        return self._reduced(self._gloo.allreduce, tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors, opts):
        for tensor in tensors:
            plain = c10d.AllreduceOptions()
            plain.reduceOp = opts.reduceOp
            self.allreduce([tensor], plain)
        return _done(tensors)

    def reduce(self, tensors, opts):
        return self._reduced(self._gloo.reduce, tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        return self._run(self._gloo.allgather, outputs, inputs, opts or c10d.AllgatherOptions())

    def all_gather_single(self, output, own, opts=None):
        return self.allgather([list(output.view(self.size(), *own.shape).unbind())], [own])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def gather(self, outputs, inputs, opts):
        return self._run(self._gloo.gather, outputs, inputs, opts)

    def scatter(self, outputs, inputs, opts):
        return self._run(self._gloo.scatter, outputs, inputs, opts)

    def reduce_scatter(self, outputs, inputs, opts):
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.stack(parts), opts)
        return _done(outputs)

    def reduce_scatter_single(self, output, whole, opts=None):
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        total = whole.detach().clone()
        self.allreduce([total], options)
        output.detach().copy_(total.view(self.size(), *output.shape)[self.rank()])
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return _done(outputs)

    def all_to_all_single(self, output, own, output_splits, input_splits, opts=None):
        gloo = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        return self._run(gloo, output, own, output_splits, input_splits, c10d.AllToAllOptions())

    def alltoall(self, outputs, inputs, opts=None):
        sizes = [[t.numel() for t in tensors] for tensors in (outputs, inputs)]
        flat = torch.cat([t.reshape(-1) for t in inputs])
        received = flat.new_empty(sum(sizes[0]))
        self.all_to_all_single(received, flat, *sizes)
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            output.detach().copy_(part.view_as(output))
        return _done(outputs)

    def barrier(self, opts=None):
        return self._gloo.barrier(opts or c10d.BarrierOptions())

    def _start_coalescing(self, device) -> None:
        """Each collective is complete when it returns."""

    def _end_coalescing(self, device) -> dist.Work:
        return _done()

    # names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


dist.Backend.register_backend("shared_gpu", SharedGPU, devices=["cpu", "cuda"])

# SPDX-License-Identifier: Apache-2.0
"""Collectives of eager code, and those that a graph holds as functional operators."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import utils as _utils


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors the group's collectives take: the CPU, if it is one of them."""
    types = [device.type for device in getattr(group, "_device_types", ())]
    return torch.device("cpu" if not types or "cpu" in types else types[0])


def all_gather(
    out: Tensor, segment: Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Fill out [ranks * n] with the segments [n] of all ranks. Returns the work if async_op."""
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, segment, group=group, async_op=async_op)


# Whether NCCL runs a group's collectives of a type of devices: asking takes as long as a launch.
_IS_NCCL: MutableMapping[dist.ProcessGroup, dict[str, bool]] = weakref.WeakKeyDictionary()


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """NCCL runs collectives of the device's tensors in torch's own group."""
    by_type = _IS_NCCL.setdefault(group, {})
    if device.type not in by_type:
        is_torchs = group.__class__ is dist.ProcessGroup
        by_type[device.type] = is_torchs and group._get_backend(device).name() == "nccl"
    return by_type[device.type]


def all_gather_rows(
    buffers: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start all-gathers of (received, sent) pairs: `received` gets `sent` of every rank in order.
    One launch under NCCL."""
    if len(buffers) > 1 and is_nccl(group, buffers[0][0].device):
        options = AllgatherOptions()
        options.asyncOp = True
        single = getattr(group, "all_gather_single_coalesced", None)
        gather: Any = single or group.allgather_into_tensor_coalesced
        return [gather(*map(list, zip(*buffers)), options)]
    return [all_gather(received, sent, group, async_op=True) for received, sent in buffers]


def reduce_scatter_rows(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter: `received` gets this rank's piece of the sum of `sent`."""
    # its name before torch 2.13
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(received, sent, group=group, async_op=True)


# Functional operators, for graphs #


def is_named(group: dist.ProcessGroup | None) -> bool:
    """Graphs can find the group by name: torch created it, not a trainer."""
    return group is not None and group in dist.distributed_c10d._world.pg_group_ranks


def default_store() -> Any:
    """The store through which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group that has this `group_name`."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """op ("sum", "max") of x over the ranks."""
    return wait(torch.ops._c10d_functional.all_reduce(x, op, group.group_name))


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [n] of every rank, [ranks * n]; not to be read before `wait`."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece [n] of the sum of x [ranks * n] over the ranks; not to be read before
    `wait`."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(
        x, "sum", group.size(), group.group_name
    )


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


# The end of a process group #


_CAPTURES: weakref.WeakSet[Any] = weakref.WeakSet()


def reset_before_groups_end(capture: Any) -> None:
    """Call `capture.reset()` before torch destroys or aborts a process group.

    NCCL destroys a communicator only after every CUDA graph that captured its collectives, and
    waits for ever for one that is alive: torch has no hook there, so its functions are wrapped.
    """
    _CAPTURES.add(capture)
    wrap_ends_of_groups()


@functools.cache
def wrap_ends_of_groups() -> None:
    def wrapped(end: Callable) -> Callable:
        @functools.wraps(end)
        def reset_captures(*args, **kwargs):
            for capture in list(_CAPTURES):
                capture.reset()
            return end(*args, **kwargs)

        return reset_captures

    for name in ("destroy_process_group", "_abort_process_group"):
        end = wrapped(getattr(dist.distributed_c10d, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, end)


# The start of DDP #


@functools.cache
def let_ddp_send(buffers: Callable[[Tensor], list[Tensor] | None]) -> None:
    """Let DDP send rank 0's `buffers(parameter)` in place of a parameter, unless they are None.

    DDP flattens what it sends in C++, which a parameter of codes has no view for.
    """
    send = _utils._sync_params_and_buffers

    @functools.wraps(send)
    def send_buffers(process_group, module_states, *args, **kwargs):
        states = []
        for state in module_states:
            parts = buffers(state)
            states += [state] if parts is None else parts
        return send(process_group, states, *args, **kwargs)

    setattr(_utils, "_sync_params_and_buffers", send_buffers)

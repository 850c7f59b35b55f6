# SPDX-License-Identifier: Apache-2.0
"""`shared_gpu`, over which contracts run more ranks than there are GPUs: what gloo exchanges."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dist_tests.contract.shared_gpu  # noqa: F401 - a backend
import fsdp_quant as fq
from dist_tests.multi.harness import DEVICE, run_ranks

RANKS = 2


def _exchanged(group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """What each collective returns to a rank."""
    x = torch.arange(12.0, device=DEVICE) + 100 * rank
    results = [x.clone() for _ in range(4)]
    dist.all_reduce(results[0], group=group)
    dist.all_reduce(results[1], dist.ReduceOp.MAX, group=group)
    dist.broadcast(results[2], 1, group=group)
    dist.reduce(results[3], 0, group=group)
    if rank:
        results.pop()  # others than the destination have anything
    listed = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(listed, x, group=group)
    whole, part = x.new_empty(RANKS * 12), x.new_empty(6)
    dist.all_gather_into_tensor(whole, x, group=group)
    dist.reduce_scatter_tensor(part, x, group=group)
    sizes, exchanged = ([3, 9], [9, 3])[rank], torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, sizes, sizes, group)
    gathered = functional.all_gather_tensor(x, 0, group) + 0
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, group) + 0
    return [*results, *listed, whole, part, exchanged, gathered, scattered]


def _trained(group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    net = fq.convert(net.to(DEVICE), "mxfp8")
    fully_shard(net, mesh=DeviceMesh.from_group(group, DEVICE))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(RANKS * step + rank)
        net(torch.randn(32, 64, generator=generator).to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in net.parameters()]


def compared(rank: int, world: int) -> None:
    shared = dist.new_group(backend="shared_gpu")
    for run in (_exchanged, _trained):
        for got, want in zip(run(shared, rank), run(dist.group.WORLD, rank), strict=True):
            assert torch.equal(got, want), run.__name__
    mean = torch.full((4,), float(rank), device=DEVICE)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=shared)
    assert mean.tolist() == [0.5] * 4


def test_ranks_that_share_a_gpu_exchange_what_gloo_does():
    """If false, a contract compares another program with one rank's."""
    run_ranks(RANKS, compared)

# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: converted models in buckets, with unused layers, static graphs and
accumulation, as nn.Linear's."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE, run_ranks
from dist_tests.multi.nets import Block

OPTIONS = {
    "one bucket": {},
    "small buckets": {"bucket_cap_mb": 0.004},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.004},
    "static graph": {"static_graph": True},
    "quantized parameters": {},
}
RECIPES = {
    name: fq.recipes.by_name(name) for name in ("fp8_delayed", "mxfp8", "nvfp4", "fp8_current")
}


class Net(nn.Module):
    """Two blocks, and one that odd steps leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.sometimes = Block(48), Block(48), Block(48)

    def forward(self, x, skips):
        x = self.second(self.first(x))
        return x if skips else self.sometimes(x)


def _delays(rank: int, world: int) -> None:
    net = fq.convert(Net(), "mxfp8")
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    net.first.up.delay_wgrad_compute = True
    x = laws.values(8, 32, seed=rank, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="first.up: delay_wgrad_compute.*main_grad"):
        wrapped(x, True)
    net.first.up.fuse_wgrad_accumulation = True
    net.first.up.weight.main_grad = torch.zeros_like(net.first.up.weight)
    wrapped(x, True).sum().backward()
    net.first.up.backward_dw()
    assert net.first.up.weight.main_grad.any()


def test_a_gradient_that_ddp_would_not_reduce_is_refused():
    """If false, ranks add their own gradients behind DDP's reduction, and train apart."""
    run_ranks(2, _delays)


def _made(recipe: fq.Recipe, label: str) -> nn.Module:
    is_quantized = label == "quantized parameters"
    with fq.quantized_model_init(recipe) if is_quantized else contextlib.nullcontext():
        return fq.convert(Net(), recipe)


def _trains(rank: int, world: int, label: str) -> None:
    """Three steps, of two batches where DDP may wait for the second, against a model of this rank
    alone whose gradients are averaged."""
    batches = 1 if label == "static graph" else 2
    for name, recipe in RECIPES.items():
        twin, net = _made(recipe, label), _made(recipe, label)
        with torch.no_grad():  # DDP sends the values of rank 0
            for p in net.parameters():
                p.add_(0.1 * rank)
        wrapped = DistributedDataParallel(net, **OPTIONS[label])
        adam = fq.optim.FusedAdam if label == "quantized parameters" else torch.optim.AdamW
        optimizers = [adam(m.parameters(), lr=1e-2) for m in (twin, wrapped)]
        for step in range(3):
            skips = label == "unused" and step == 1
            fq.begin_step(step)
            with fq.token_offset(0):
                for batch in range(batches):
                    x = laws.values(8, 32, seed=100 * step + 10 * batch + rank, dtype=torch.float32)
                    twin(x, skips).square().mean().backward()
                    with wrapped.no_sync() if batch + 1 < batches else contextlib.nullcontext():
                        wrapped(x, skips).square().mean().backward()
            for (what, got), want in zip(wrapped.module.named_parameters(), twin.parameters()):
                if want.grad is not None:
                    dist.all_reduce(want.grad)
                    want.grad /= world
                    laws.assert_same_bytes(
                        got.grad, want.grad, f"{label}, {name}: gradient of {what} in step {step}"
                    )
                else:
                    assert got.grad is None, what
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        saved = fq.state_dict(wrapped)
        assert saved["codes"] == fq.state_dict(twin)["codes"]
        assert saved["fingerprint"] == fq.state_dict(twin)["fingerprint"]


@pytest.mark.skipif(DEVICE != "cpu", reason="sums of NCCL have another order")
@pytest.mark.parametrize("label", OPTIONS)
def test_ddp_trains_as_the_average_of_ranks(label: str):
    """If false, DDP reduces other gradients than the layers made, waits for one that never comes,
    or keeps a stale bucket."""
    run_ranks(2, _trains, label)


def _frozen(rank: int, world: int) -> None:
    for name in ("mxfp8", "nvfp4", "fp8_current"):
        net = fq.convert(Net(), name)
        for block in (net.first, net.second):
            for p in block.requires_grad_(False).parameters():
                p.data += 0.1 * rank
        fq.freeze(net)
        x = laws.values(8, 32, seed=1, dtype=torch.float32)
        before = net(x, False).detach()  # operands of these codes are cached
        wrapped = DistributedDataParallel(net)
        y = wrapped(x, False)
        outputs = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(outputs, y.detach())
        laws.assert_same_bytes(outputs[rank], outputs[0], f"{name}: codes are rank 0's")
        if rank == 0:
            laws.assert_same_bytes(y.detach(), before, name)
        y.square().mean().backward()
        assert net.sometimes.up.weight.grad is not None and net.first.up.weight.grad is None


def test_ddp_sends_the_codes_of_a_frozen_base():
    """If false, adapters over a frozen base cannot train in DDP, which is what trainers wrap around
    them on several GPUs, or ranks multiply codes of their own."""
    run_ranks(2, _frozen)

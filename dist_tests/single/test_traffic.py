# SPDX-License-Identifier: Apache-2.0
"""`fq.plan(bandwidth=...)`: what collectives take, of as many ranks as a group that talks to nobody
has."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_quant as fq
from dist_tests.multi.nets import Net
from fsdp_quant.inspection.plan import ModelPlan


def on_paper(recipe: fq.Recipe, shards: int, copies: int = 1) -> tuple[Net, dict]:
    """A sharded model without memory, in a world of shards * copies."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards * copies)
    with torch.device("meta"):
        net = Net(hidden=(256, 384), k=128)
    fq.convert(net, recipe, skip=["head"])
    mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copies", "shards"))
    options = {
        "mesh": mesh if copies > 1 else mesh["shards"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


@pytest.fixture(autouse=True)
def _world():
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shards, copies", [(1, 1), (64, 1), (1024, 1), (8, 128)])
def test_seconds_are_bytes_over_the_link(shards: int, copies: int):
    """If false, a plan on paper promises a step that the network does not carry."""
    net = on_paper(fq.recipes.hybrid("mxfp8", "nvfp4"), shards, copies)
    inside, between, latency = 300e9, 25e9, 20e-6
    planned = fq.plan(net, bandwidth=(inside, between), latency=latency)
    traffic, ring = planned.traffic, (shards - 1) / shards
    for direction, groups in ((0, 3), (1, 2)):  # two blocks and the root, which stays gathered
        size = planned.bytes_per_step(forward=not direction, backward=bool(direction))
        assert traffic.gather[direction] == pytest.approx(
            size * ring / inside + groups * latency, rel=1e-12
        )
        other = sum(
            _padded(p, shards) * 2
            for name, p in net.named_parameters()
            if direction == 0 or name.startswith("blocks")
        )
        assert traffic.in_16_bit[direction] == pytest.approx(
            other * ring / inside + groups * latency, rel=1e-12
        )
    gradients = sum(_padded(p, shards) * 4 for p in net.parameters())
    summed = 2 * gradients / shards * (copies - 1) / copies / between
    assert traffic.reduce == pytest.approx(
        gradients * ring / inside + summed + 3 * (1 + (copies > 1)) * latency, rel=1e-12
    )
    assert ModelPlan.of_facts(planned.facts()) == planned
    assert f"{traffic.gather[0] * 1e3:.2f} ms forward" in str(planned) and (
        "between copies" in str(planned)
    )
    assert fq.plan(net).traffic is None and "ms forward" not in str(fq.plan(net))


def test_a_root_without_parameters_leaves_its_blocks_to_be_gathered_twice():
    """If false, a plan before the first forward takes the first block for the root, and promises a
    gather too few."""
    net = on_paper(fq.recipes.bf16(), 2)
    blocks = [block for block in net.blocks]
    alone = torch.nn.Sequential(*blocks)
    fully_shard(alone, mesh=init_device_mesh("cpu", (2,)))
    planned = fq.plan(alone)
    assert planned.bytes_per_step(backward=False) == planned.bytes_per_step(forward=False) > 0


def _padded(p: torch.Tensor, shards: int) -> int:
    return math.ceil(p.shape[0] / shards) * shards * p.shape[1:].numel()


@pytest.mark.parametrize(
    "given", [{"bandwidth": 0.0}, {"bandwidth": (1e9, -1.0)}, {"bandwidth": 1e9, "latency": -1.0}]
)
def test_links_that_carry_nothing_are_refused(given: dict):
    """If false, a plan divides by zero, or promises negative seconds."""
    with pytest.raises(ValueError, match="give bytes per second"):
        fq.plan(on_paper(fq.recipes.mxfp8(), 2), **given)

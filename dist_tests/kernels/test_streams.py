# SPDX-License-Identifier: Apache-2.0
"""Gathers of FSDP2 on streams of their own: the stream that multiplies may come late, on one GPU
with a stand-in for its peer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_quant as fq
from dist_tests.kernels import expected
from dist_tests.laws import assert_same_bytes, kept_step
from dist_tests.multi import nets
from fsdp_quant.tensor.gather_group import GatherGroup, GatherPlan

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")
RECIPES = {
    "fp8_current/fp8_row": fq.recipes.hybrid("fp8_current", "fp8_row"),
    "fp8_tensor/nvfp4": nets.pair_recipe("fp8_tensor", "nvfp4"),
    "fp8_delayed": fq.recipes.fp8_delayed(length=2),
}


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch):
    """Rank 0 of two, the other of which always sends the same."""

    def gather(out: Tensor, own: Tensor, group=None, async_op=False):
        out.view(2, -1).copy_(own.reshape(1, -1).expand(2, -1))

    def scatter(output: Tensor, input: Tensor, group=None, op=None, async_op=False):
        output.copy_(input.view(2, -1)[0].view_as(output))

    for name in ("all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(dist, name, gather, raising=False)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        monkeypatch.setattr(dist, name, scatter, raising=False)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: None)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with kept_step(), torch.device("cuda"):
            yield
    finally:
        dist.destroy_process_group()


def _trained(recipe: fq.Recipe, before_a_layer, **options) -> list[Tensor]:
    """Outputs of five steps; `before_a_layer` is called before each layer of the forward."""
    net = nets.shard(fq.convert(nets.build(), recipe), **options)
    for module in net.modules():
        if isinstance(module, (torch.nn.LayerNorm, fq.Linear)):
            module.register_forward_pre_hook(lambda *_: before_a_layer())
    optimizer = nets.adam(net)
    return [nets.train_step(net, optimizer, step) for step in range(5)]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_late_stream_multiplies_what_was_gathered(name: str, reshard: bool, monkeypatch):
    """If false, scales are overwritten by the codes of the next gather before the products have
    read them."""
    late = _trained(
        RECIPES[name], lambda: torch.cuda._sleep(2_000_000), reshard_after_forward=reshard
    )

    def in_step(run):
        def waited(*args):
            torch.cuda.synchronize()
            run(*args)
            torch.cuda.synchronize()

        return waited

    monkeypatch.setattr(GatherGroup, "send", in_step(GatherGroup.send))
    monkeypatch.setattr(GatherPlan, "receive", in_step(GatherPlan.receive))
    for step, (got, want) in enumerate(
        zip(late, _trained(RECIPES[name], torch.cuda.synchronize, reshard_after_forward=reshard))
    ):
        assert_same_bytes(
            got.cpu(), want.cpu(), f"{name}, reshard_after_forward={reshard}: output of step {step}"
        )

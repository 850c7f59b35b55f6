"""Ranks that gather each other's weights run one recipe, or every one of them says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.multi.harness import run_ranks
from fsdp_quant.tensor import torch_compat
from fsdp_quant.tensor.agreement import check_same_recipes

MX = fq.recipes.mxfp8()
OTHERS = {
    "another format": fq.recipes.nvfp4(), "of the backward alone": fq.recipes.mxfp8(backward_override="dequantized"),
    "by layer": fq.recipes.per_layer(MX, {"0": fq.recipes.fp8_row()}),
    "by step": fq.recipes.schedule(MX, (5, None, fq.recipes.fp8_row())),
}


def sharded(recipe, rows: int = 64) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, rows, bias=False), nn.Linear(rows, 64, bias=False))
    if recipe is not None:
        fq.convert(net, recipe)
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def what_each_says(call) -> list[str | None]:
    try:
        call()
        said = None
    except ValueError as error:
        said = str(error)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, said)
    return gathered


def others_are_refused(rank: int, world: int) -> None:
    net = sharded(MX)
    for what, other in OTHERS.items():
        mine = other if rank == world - 1 else MX
        before = [layer.recipe for layer in net]
        for said in (
            what_each_says(lambda mine=mine: fq.set_recipe(net, mine)),
            what_each_says(lambda mine=mine: fq.convert(sharded(None), mine)),
        ):
            assert all(s is not None and "run different recipes" in s for s in said), what
            assert "rank 0 has mxfp8(" in said[0] and said[0] != said[-1], said
        assert [layer.recipe for layer in net] == before, "nothing changed"
    for recipe in OTHERS.values():
        assert what_each_says(lambda recipe=recipe: fq.set_recipe(net, recipe)) == [None] * world


def gathers_compare(rank: int, world: int, rows: int) -> None:
    for what, other in OTHERS.items():
        for is_mixed in (False, True):
            net = sharded(other if is_mixed and rank == 0 else MX, rows)
            params = torch_compat.managed_params_of(net)
            said = what_each_says(lambda params=params: check_same_recipes(params, params[0].process_group))
            mixes = is_mixed and what != "by step"  # which runs the same now
            assert all((s is not None) == mixes for s in said), (what, said)


@pytest.mark.parametrize("world", [2, 3])
def test_recipes_that_differ_are_refused_on_every_rank(world: int):
    """If false, ranks train different models in silence, or abort in the transport."""
    run_ranks(world, others_are_refused)


@pytest.mark.parametrize("world, rows", [(2, 64), (3, 2)], ids=["even", "empty shards"])
def test_layers_of_a_gather_are_compared(world: int, rows: int):
    """If false, a model that was converted before `fully_shard` with a recipe per node trains on."""
    run_ranks(world, gathers_compare, rows)

# SPDX-License-Identifier: Apache-2.0
"""Ranks that gather each other's weights hold one model in one recipe, or every one of them says so
in the same words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests.multi.harness import DEVICE, run_ranks
from fsdp_quant.tensor import agreement

MX = fq.recipes.mxfp8()
OTHERS = {
    "another format": fq.recipes.nvfp4(),
    "of the backward alone": fq.recipes.mxfp8(backward_override="dequantized"),
    "by layer": fq.recipes.per_layer(MX, {"1": fq.recipes.fp8_row()}),
    "by step": fq.recipes.schedule(MX, (5, None, fq.recipes.fp8_row())),
}


def built(
    recipe=MX, rows: int = 64, layers: int = 2, skip=(), mesh=None, frozen: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(
            nn.Linear(64, rows, bias=False) if i == 0 else nn.Linear(rows, rows, bias=False)
            for i in range(layers)
        )
    )
    if recipe is not None:
        fq.convert(net, recipe, skip=skip)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    net[-1].weight.requires_grad_(not frozen)
    return fully_shard(net, mesh=mesh)


def what_each_says(call: Callable) -> list[str | None]:
    try:
        call()
        said = None
    except ValueError as error:
        said = str(error)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, said)
    return gathered


def others_are_refused(rank: int, world: int) -> None:
    net = built()
    for what, other in OTHERS.items():
        mine = other if rank == world - 1 else MX
        before = [layer.recipe for layer in net]
        for said in (
            what_each_says(lambda mine=mine: fq.set_recipe(net, mine)),
            what_each_says(lambda mine=mine: fq.convert(built(None), mine)),
        ):
            name = {"by layer": "1", "by step": "the recipe"}.get(what, "0")
            assert said[0].startswith(f"ranks disagree: {name} is mxfp8("), said
            assert f" on rank {world - 1}; ranks that share" in said[0], said
            assert said == [said[0]] * world, said
        assert [layer.recipe for layer in net] == before, "nothing changed"
    for recipe in OTHERS.values():
        assert what_each_says(lambda recipe=recipe: fq.set_recipe(net, recipe)) == [None] * world


# What one rank has -> the fact that every rank is told.
MODELS: dict[str, tuple[dict, str]] = {
    "another format": (
        {"recipe": OTHERS["another format"]},
        "0.weight is [{rows}, 64] torch.float32 of ",
    ),
    "of the backward alone": (
        {"recipe": OTHERS["of the backward alone"]},
        "backward_override='dequantized') (",
    ),
    "by layer": ({"recipe": OTHERS["by layer"]}, "1.weight is ["),
    "the first layer is skipped": (
        {"skip": ["0"]},
        "[{rows}, 64] torch.float32 of no recipe on rank",
    ),
    "rows": ({"rows": 96}, "[96, 64] torch.float32 of mxfp8("),
    "frozen": ({"frozen": True}, "frozen [{rows}, {rows}] torch.float32 of mxfp8("),
    "a layer more": ({"layers": 3}, "2.weight, [{rows}, {rows}] torch.float32 of mxfp8("),
    "another build": ({}, "of another day on rank"),
    "by step": ({"recipe": OTHERS["by step"]}, " of schedule("),  # which runs the same now
}


def first_forwards_compare(rank: int, world: int, rows: int, axes: tuple[int, ...]) -> None:
    mesh = init_device_mesh(DEVICE, axes, mesh_dim_names=("copies", "shards")[-len(axes) :])
    for what, (options, fact) in MODELS.items():
        for odd in (0, world - 1):
            other = mock.patch.object(agreement, "build", lambda: "of another day")
            with other if what == "another build" and rank == odd else contextlib.nullcontext():
                net = built(**{"rows": rows} | (options if rank == odd else {}), mesh=mesh)
                said = what_each_says(lambda net=net: net(torch.ones(2, 64)))
            assert (said[0] is None) == (not fact) and said == [said[0]] * world, (what, said)
            if fact:
                where = f"rank {odd}" in said[0] and fact.format(rows=rows) in said[0]
                assert where, (what, odd, said)


def styles_compare(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ranks",))
    for style in (fq.parallel.RowwiseParallel(), fq.parallel.ExpertParallel()):
        for odd in (0, world - 1):
            is_dense = isinstance(style, fq.parallel.RowwiseParallel)
            layer = nn.Linear(64, 64, bias=False) if is_dense else nn.Module()
            values = torch.zeros(64, 64) if is_dense else torch.zeros(2, 64, 64)
            layer.weight = nn.Parameter(values, requires_grad=rank != odd)
            said = what_each_says(lambda: parallelize_module(layer, mesh, style))  # noqa: B023
            assert said == [said[0]] * world, (style, odd, said)
            assert said[0] is not None and "frozen [" in said[0], (style, odd, said)


@pytest.mark.parametrize("world", [2, 3])
def test_recipes_that_differ_are_refused_on_every_rank(world: int):
    """If false, ranks train different models in silence, or abort in the transport."""
    run_ranks(world, others_are_refused)


@pytest.mark.parametrize(
    "rows, axes", [(64, (2,)), (2, (3,)), (64, (2, 2))], ids=["even", "empty shards", "copies"]
)
def test_models_that_differ_are_refused_before_any_gather(rows: int, axes: tuple[int, ...]):
    """If false, a rank with another model waits for gathers that no other rank makes, or trains on
    wrong weights; of copies, ranks that agree among themselves wait for those that do not."""
    run_ranks(torch.Size(axes).numel(), first_forwards_compare, rows, axes)


def test_styles_refuse_a_weight_that_one_rank_froze():
    """If false, the ranks that train a cut layer wait for codes of which its backward sends none
    where the weight is frozen."""
    run_ranks(2, styles_compare)

# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism beside shards and copies of them: meshes of axes "replicate", "shard" and
"tp", some of one rank."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import most_ranks, run_ranks
from dist_tests.multi.test_tensor_parallel import D, build, cut, mesh_of, recipe_of, whole
from fsdp_quant.formats import Direction
from fsdp_quant.ops import dispatch
from fsdp_quant.recipe import Role
from fsdp_quant.scaling import RowCuts
from fsdp_quant.storage import Storage
from fsdp_quant.tensor import root_statistics
from fsdp_quant.tensor.torch_compat import local_of

AXES = ("replicate", "shard", "tp")
SHAPES = (
    (2, 1, 2),
    (1, 2, 2),
    (1, 1, 4),
    (2, 2, 1),
    (1, 4, 1),
    (1, 1, 2),
    (1, 2, 1),
    (2, 1, 1),
    (1, 1, 1),
)
KINDS = ("high-precision", "quantized")  # parameters
ROLE = Role("linear", "weight", "")


def meshes(world: int) -> dict[tuple[int, int, int], DeviceMesh]:
    return {shape: mesh_of(**dict(zip(AXES, shape))) for shape in SHAPES if prod(shape) == world}


def converted(net: nn.Module, recipe: fq.Recipe, kind: str) -> nn.Module:
    if kind == KINDS[0]:
        return fq.convert(net, recipe)
    with fq.quantized_model_init(recipe):
        return fq.convert(net, recipe)


def sharded(net: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in net:
        fully_shard(block, mesh=mesh["replicate", "shard"])
    return fully_shard(net, mesh=mesh["replicate", "shard"])


# Codes #


def pair_of_layers() -> nn.Sequential:
    """132 and 37 rows: a shard of a part cuts blocks, and holds other numbers of rows than its
    neighbour."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(40, 132, bias=False), nn.Linear(132, 37, bias=False))
    with torch.no_grad():
        net[0].weight[100:] *= 50  # scales of the parts differ
        net[1].weight[:, :20] *= 50
    return net


def expected(
    recipe: fq.Recipe, weight: torch.Tensor, part: torch.Tensor, direction: Direction
) -> Storage:
    """The codes of one part of a weight: blocks of its own, scales of the whole tensor."""
    hybrid, statistics = recipe.hybrid(ROLE), {}
    side = hybrid.side(direction).fmt.is_quantized
    weight, part = (t.to(recipe.compute_dtype) if side else t for t in (weight, part))
    for d, encoding in hybrid.encodings.items():
        if encoding.fmt.spans_tensor:
            of_all, own = (dispatch.statistics(t, [encoding])[0] for t in (weight, part))
            statistics[d] = (
                own._replace(tensor_amax=of_all.tensor_amax)
                if encoding.fmt.tensor_scale
                else of_all
            )
    return hybrid.storages(part, [direction], statistics=statistics)[0][direction]


def one_axis_at_a_time(weight) -> tuple:
    """`root_statistics._groups` where no group holds both axes."""
    groups = weight.managed.process_group, weight.state.tensor_group
    return groups[: 2 if weight.state.spans_parts else 1]


def codes(rank: int, world: int) -> list:
    """What a gather brings, in meshes, formats and kinds of parameters; returns the sums and maxima
    that it took."""
    seen, pairs = [], laws.diagonals(3)
    of_world = meshes(world)
    # tensor amaxes and cut blocks in one
    both = [(pair, (1, 2, 2)) for pair in pairs if "nvfp4_16x16" in pair and world == 4]
    sample = [*zip(pairs, itertools.cycle(of_world)), *both]
    for pair, shape in itertools.product(pairs, of_world) if laws.EVERYTHING else sample:
        mesh, recipe, (_, shards, ranks) = of_world[shape], nets.pair_recipe(*pair), shape
        mine = mesh["tp"].get_local_rank()
        weights = [layer.weight.detach().clone() for layer in pair_of_layers()]
        parts = [weights[0].chunk(ranks)[mine], weights[1].chunk(ranks, 1)[mine]]
        encodings = recipe.hybrid(ROLE).encodings.values()
        spans = ranks > 1 and any(e.fmt.spans_tensor for e in encodings)
        crosses = spans or any(
            RowCuts.chunked(len(p), shards).shares_statistics(e) for p in parts for e in encodings
        )
        for kind in KINDS:
            net = converted(pair_of_layers(), recipe, kind)
            parallelize_module(
                net,
                mesh["tp"],
                {"0": fq.parallel.ColwiseParallel(), "1": fq.parallel.RowwiseParallel()},
            )
            fully_shard(net, mesh=mesh["replicate", "shard"])
            for what in ("initial values", "after a step", "an axis at a time"):
                apart = what == "an axis at a time"
                with pytest.MonkeyPatch.context() as patched, nets.recorded_collectives() as wire:
                    fq.reset_receipt()
                    if apart:
                        if shards > 1:
                            patched.setattr(root_statistics, "_groups", one_axis_at_a_time)
                        fq.sync(net)
                    elif what == "after a step":
                        optimizer = fq.optim.FusedAdam(net.parameters(), lr=0.0, weight_decay=0.0)
                        optimizer.step()
                    net.unshard()
                label = f"{shape}, {pair}, {kind}, {what}"
                for layer, weight, part in zip(net, weights, parts):
                    got = local_of(layer.weight)
                    for d in Direction:
                        laws.assert_same_storage(
                            getattr(got, d.value),
                            expected(recipe, weight, part, d),
                            f"{label}, {d}",
                        )
                net.reshard()
                count = fq.receipt().collectives.get("weights", 0)
                assert count == crosses + (apart and spans and shards > 1), (
                    f"{label}: {count} collectives"
                )
                seen.append([one for one in wire if one[0] == "all_reduce"])
                # the first gather compares recipes, once an axis
                agreed = mesh.ndim if what == "initial values" else 0
                assert len(seen[-1]) == count + agreed, f"{label}: {seen[-1]}"
    return seen


def test_parts_of_parts_are_quantized_as_the_whole():
    """Otherwise weights depend on the mesh, on the kind of parameter, or ranks wait for collectives
    that others do not make."""
    results = run_ranks(most_ranks(4), codes)
    assert all(seen == results[0] for seen in results)


# Checkpoints #

RECIPES = ("fp8_current", "mxfp8", "nvfp4", "fp8_delayed")


def made(
    name: str, kind: str, mesh: DeviceMesh, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = sharded(cut(converted(build(seed=seed), recipe_of(name), kind), mesh["tp"]), mesh)
    return net, fq.optim.FusedAdam(net.parameters(), lr=1e-2)


def stepped(
    net: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> torch.Tensor:
    ranks, mine = mesh["tp"].size(), mesh["tp"].get_local_rank()
    x = laws.values(1, 128 * 4, D, seed=step, dtype=torch.float32)
    with fq.token_offset(0):
        fq.begin_step(step)
        y = net(x.chunk(ranks, 1)[mine])
        y.square().mean().div(ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def flat(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    model, state = get_state_dict(net, optimizer)
    found = model | {
        f"{name}.{key}": t for name, of in state["state"].items() for key, t in of.items()
    }
    return {name: whole(t).clone() for name, t in found.items()}


def saved(rank: int, world: int, folder: str) -> dict:
    """Each recipe from another mesh and kind of parameters; what was saved."""
    states = {}
    for name, mesh, kind in zip(
        RECIPES, itertools.cycle(meshes(world).values()), itertools.cycle(KINDS)
    ):
        net, optimizer = made(name, kind, mesh, seed=0)
        stepped(net, optimizer, mesh, 0)
        model, state = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        torch.save(fq.state_dict(net), f"{folder}/{name}_{rank}")  # histories are each rank's own
        states[name] = flat(net, optimizer)
    return states


def loaded(rank: int, world: int, folder: str, states: dict) -> None:
    of_world = itertools.cycle(meshes(world).items())
    next(of_world), next(of_world)  # other ones than they were saved in
    mine = laws.every_second(list(states.items()), world // 2)
    for (name, want), (shape, mesh), kind in zip(mine, of_world, itertools.cycle(KINDS[::-1])):
        net, optimizer = made(name, kind, mesh, seed=1)
        model, state = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        rest = torch.load(f"{folder}/{name}_{rank}")
        fq.load_state_dict(net, rest)  # raises where fingerprints of codes differ
        assert fq.state_dict(net)["codes"] == rest["codes"], f"{name}, {shape}"
        for key, value in flat(net, optimizer).items():
            laws.assert_same_bytes(value, want[key], f"{name}, {shape}: {key}")
        stepped(net, optimizer, mesh, 1)


def test_checkpoints_load_in_other_meshes(tmp_path):
    """Otherwise a run cannot go on with another number of ranks an axis, or goes on with other
    weights, moments or codes."""
    world = most_ranks(4)
    states = run_ranks(world, saved, str(tmp_path))[0]
    for others in (world, world // 2):
        run_ranks(others, loaded, str(tmp_path), states)

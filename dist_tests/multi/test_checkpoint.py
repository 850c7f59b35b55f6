# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: resume, other world sizes, other recipes, plain models, in-place loads,
exact codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, run_ranks
from fsdp_quant import checkpoint
from fsdp_quant.context import STEP
from fsdp_quant.formats import ROWWISE, Direction
from fsdp_quant.storage import rebuild_storage
from fsdp_quant.tensor import code_check

# Stochastic rounding; histories, also of weights, that a step count alone does not give back;
# shared and cut statistics.
RESUMED = {
    "nvfp4": fq.recipes.nvfp4(),
    "fp8_delayed": fq.recipes.fp8_delayed(length=3, margin=1),
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
}
STEPS = 5


def restart() -> None:
    """Random bits as in a new process."""
    STEP.step, STEP.counted_by_hand = 0, False
    fq.begin_step(seed=11)


def build(recipe: fq.Recipe, seed: int = 0, **sharding):
    net = nets.build(seed)
    fq.convert(net, recipe)
    nets.shard(net, **sharding)
    return net, nets.adam(net)


def train(net, optimizer, steps: range, rank: int) -> list[torch.Tensor]:
    """Losses of steps that the library counts; each rank has its own data, so histories differ by
    rank."""
    seen = []
    for step in steps:
        loss = net(nets.batch(step, rank=rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def whole_state(net, optimizer, **options) -> dict:
    """What a trainer saves."""
    model, moments = get_state_dict(net, optimizer)
    state = fq.steps.TrainingState(net, **options)
    return {"model": model, "optimizer": moments, "train_state": state}


def load(folder: Path, net, optimizer, **options) -> None:
    state = whole_state(net, optimizer, **options)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def flat(tree: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors of a nested state by dotted name; every rank must call it."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = (
                value.full_tensor() if isinstance(value, DTensor) else value
            ).clone()
    return found


def gathered_codes(net) -> dict[str, torch.Tensor]:
    """The codes and scales that a gather gives, by weight, direction and buffer."""
    found = {}
    for module in (*net.blocks, net):
        module.unshard()
        for name, linear in module.named_modules():
            if isinstance(linear, fq.Linear) and isinstance(linear.weight, fq.QuantizedTensor):
                for direction in Direction:
                    storage = linear.weight.storage_for(direction)
                    found |= {
                        f"{linear.runtime.name}.{direction.value}.{n}": b.clone()
                        for n, b in storage.buffers().items()
                    }
        module.reshard()
    return found


def expected_codes(
    net, recipe: fq.Recipe, masters: dict, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """What `gathered_codes` must find: each whole master, quantized in one process."""
    return {
        f"{name}.{direction.value}.{buffer}": tensor
        for name, module in net.named_modules()
        if isinstance(module, fq.Linear)
        for direction, storage in nets.expected_storages(
            recipe, name, masters[f"{prefix}{name}.weight"]
        ).items()
        for buffer, tensor in storage.buffers().items()
    }


def assert_same(got: dict, want: dict, what: str) -> None:
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()}"
    for name, value in want.items():
        laws.assert_same_bytes(got[name], value, f"{what}: {name}")


def _save(rank: int, world: int, folder: Path) -> None:
    beside = dist.new_group(backend="gloo")  # whose collectives do not meet those of training
    for label, recipe in RESUMED.items():
        path = folder / label.replace("/", "_")
        restart()
        net, optimizer = build(recipe)
        train(net, optimizer, range(STEPS), rank)
        state = whole_state(net, optimizer)
        facts = {
            "flat": flat({k: state[k] for k in ("model", "optimizer")}),
            "fingerprints": fq.state_dict(net)["codes"],
        }
        if label == "nvfp4":
            dcp.save(state, checkpoint_id=path)
            rest = train(net, optimizer, range(STEPS, 2 * STEPS), rank)
        else:  # training goes on while the file is written
            saving = dcp.async_save(state, checkpoint_id=path, process_group=beside)
            rest = train(net, optimizer, range(STEPS, 2 * STEPS), rank)
            saving.result()
        facts |= {"rest": rest, "final": nets.full_state(net)}
        torch.save(facts, folder / f"{path.name}.{rank}")
        dist.barrier()


def _resume(rank: int, world: int, folder: Path) -> None:
    for label, recipe in RESUMED.items():
        path = folder / label.replace("/", "_")
        want = torch.load(folder / f"{path.name}.{rank}")
        net, optimizer = build(recipe, seed=1)
        load(path, net, optimizer)
        assert (STEP.step, STEP.seed) == (STEPS, 11)
        got = train(net, optimizer, range(STEPS, 2 * STEPS), rank)
        for step, (a, b) in enumerate(zip(got, want["rest"])):
            laws.assert_same_bytes(a, b, f"{label}: loss {step} steps after resuming")
        assert_same(nets.full_state(net), want["final"], f"{label}: resumed")


def _load_elsewhere(rank: int, world: int, folder: Path) -> None:
    shapes = [(2, 2), (1, 4)] if world == 4 else []
    meshes = [
        init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")) for shape in shapes
    ]
    for i, (label, recipe) in enumerate(RESUMED.items()):
        path = folder / label.replace("/", "_")
        want = torch.load(folder / f"{path.name}.0")
        each = [None, *meshes]
        for mesh in each if laws.EVERYTHING else [each[2 * i % len(each)]]:
            what = f"{label} at world {world}, mesh {mesh}"
            net, optimizer = build(recipe, seed=1, **({} if mesh is None else {"mesh": mesh}))
            load(path, net, optimizer)
            assert_same(
                flat(dict(zip(("model", "optimizer"), get_state_dict(net, optimizer)))),
                want["flat"],
                what,
            )
            assert fq.state_dict(net)["codes"] == want["fingerprints"], what
            # whose codes follow a history: the fingerprint stands for them
            if label != "fp8_delayed":
                assert_same(
                    gathered_codes(net), expected_codes(net, recipe, want["flat"], "model."), what
                )
            # and back from copies of shards
            if mesh is not None and mesh.shape == (2, 2) and label == "mxfp8/nvfp4":
                dcp.save(whole_state(net, optimizer), checkpoint_id=folder / "copies")
                other, moments = build(recipe, seed=2)
                load(folder / "copies", other, moments)
                assert_same(
                    nets.full_state(other), nets.full_state(net), "saved by copies of shards"
                )
            train(net, optimizer, range(1), rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of world 2 after STEPS steps, and what the uninterrupted run did then."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, _save, folder)
    return folder


def test_training_resumes_bit_for_bit_in_fresh_processes(saved):
    """If false, a run that was interrupted is another run: random bits, histories, moments or codes
    were lost."""
    run_ranks(2, _resume, saved)


@pytest.mark.parametrize("world", [1, 4])
def test_checkpoints_load_at_another_world_size(world, saved):
    """If false, masters, moments or codes depend on how many ranks, or which mesh, wrote and read
    them, or more ranks than saved miss a key."""
    run_ranks(world, _load_elsewhere, saved)


def _refusals(rank: int, world: int, folder: Path) -> list[str]:
    errors = []
    net, optimizer = build(fq.recipes.mxfp8(), seed=1)
    path = folder / "nvfp4"
    try:
        load(path, net, optimizer)
    except ValueError as error:
        errors.append(str(error))
    load(path, net, optimizer, allow_recipe_change=True)
    want = expected_codes(net, fq.recipes.mxfp8(), nets.full_state(net))
    assert_same(gathered_codes(net), want, "loaded under another recipe")
    own = fq.state_dict(net)
    with torch.no_grad():
        for module in (net.head, net.blocks[1].down):
            local = module.weight._local_tensor
            if local.shape[0] and rank == 0:
                local.mul_(1.25)
    fq.sync(net)
    try:
        fq.load_state_dict(net, own)
    except ValueError as error:
        errors.append(str(error))
    return errors


def test_other_recipes_and_other_weights_are_refused_alike_on_every_rank(saved):
    """If false, one rank goes on alone, or a checkpoint of another format is loaded in silence."""
    results = run_ranks(3, _refusals, saved)
    assert all(r == results[0] for r in results), results
    recipe, weights = results[0]
    assert "allow_recipe_change=True" in recipe and "nvfp4" in recipe
    assert re.search(
        r"codes of blocks\.1\.down\.weight, head\.weight are not those that were saved", weights
    ), weights


def _in_place(rank: int, world: int, folder: Path) -> None:
    other, _ = build(fq.recipes.identity(), seed=5)
    dcp.save({"model": other.state_dict()}, checkpoint_id=folder / "in_place")
    want = nets.full_state(other)
    for label, recipe in {
        "mxfp8/nvfp4": RESUMED["mxfp8/nvfp4"],
        "fp8_current": fq.recipes.fp8_current(),
    }.items():
        net, optimizer = build(recipe)
        train(net, optimizer, range(1), rank)
        state = net.state_dict()
        fq.state_dict(net)
        dcp.load({"model": state}, checkpoint_id=folder / "in_place")
        assert_same(nets.full_state(net), want, f"{label}: masters after an in-place load")
        assert_same(
            gathered_codes(net),
            expected_codes(net, recipe, want),
            f"{label}: codes after an in-place load",
        )
        train(net, optimizer, range(1, 2), rank)


def _plain(rank: int, world: int, folder: Path) -> None:
    plain, converted = nets.build(2).bfloat16(), nets.build(3).bfloat16()
    fq.convert(converted, RESUMED["mxfp8/nvfp4"])
    for net in (plain, converted):
        nets.shard(net)
    dcp.save(get_model_state_dict(plain), checkpoint_id=folder / "plain")
    state = get_model_state_dict(converted)
    dcp.load(state, checkpoint_id=folder / "plain")
    set_model_state_dict(converted, state)
    want = nets.full_state(plain)
    assert_same(nets.full_state(converted), want, "plain into converted")
    dcp.save(get_model_state_dict(converted), checkpoint_id=folder / "converted")
    back = nets.shard(nets.build(4).bfloat16())
    state = get_model_state_dict(back)
    dcp.load(state, checkpoint_id=folder / "converted")
    set_model_state_dict(back, state)
    assert_same(nets.full_state(back), want, "converted into plain")


def _exact_codes(rank: int, world: int, folder: Path) -> None:
    for label in ("mxfp8/nvfp4", "fp8_delayed", "fp8_block"):
        recipe = RESUMED.get(label) or fq.recipes.fp8_block()
        net, optimizer = build(recipe)
        train(net, optimizer, range(2), rank)
        with nets.recorded_weights() as seen, torch.no_grad():
            net(nets.batch())
        tensors, path = checkpoint.code_tensors(net), folder / f"codes_{label.replace('/', '_')}"
        gathered = gathered_codes(net)
        whole = {n: t.full_tensor() for n, t in tensors.items()}
        names = {n.replace(".weight.", "."): n for n in whole}
        assert_same(
            {n: whole[m] for n, m in names.items()},
            {n: gathered[n] for n in names},
            f"{label}: codes as DTensors",
        )
        dcp.save(tensors, checkpoint_id=path / "dcp")
        fresh = checkpoint.code_tensors(build(recipe, seed=8)[0])
        dcp.load(fresh, checkpoint_id=path / "dcp")
        assert_same(
            {n: t.full_tensor() for n, t in fresh.items()}, whole, f"{label}: codes through DCP"
        )
        checkpoint.export_safetensors(net, path / "file", codes=True)
        dist.barrier()
        loaded, state = checkpoint.load_safetensors(path / "file"), nets.full_state(net)
        assert loaded.keys() == state.keys()
        linears = [f"{n}.weight" for n, m in net.named_modules() if isinstance(m, fq.Linear)]
        forward = [storage for direction, storage, _ in seen if direction is ROWWISE]
        for name, storage in zip(linears, forward, strict=True):
            exported = loaded[name].rowwise.map(lambda t: t.to(storage.data.device))
            laws.assert_same_storage(storage, exported, f"{label}: exported {name}")
            again = rebuild_storage(exported.facts(), exported.buffers())
            laws.assert_same_storage(again, exported, f"{label}: facts of {name}")
        rest = state.keys() - set(linears)
        assert_same({n: loaded[n] for n in rest}, {n: state[n] for n in rest}, label)


def _clean_and_stale(rank: int, world: int) -> None:
    code_check.checking = True
    for label, recipe in (
        RESUMED | {"dequantized": fq.recipes.nvfp4(backward_override="dequantized")}
    ).items():
        for reshard in (True, False) if label == "mxfp8/nvfp4" else (True,):
            results = []
            for code_check.checking in (True, False):
                restart()
                net, optimizer = build(recipe, reshard_after_forward=reshard)
                results.append(
                    [*train(net, optimizer, range(2), rank), *nets.full_state(net).values()]
                )
            for got, want in zip(*results):
                laws.assert_same_bytes(got, want, f"{label}: with and without the check")
    code_check.checking = True
    found = []
    for event in ("past versions", "codes", "operator"):
        net, optimizer = build(fq.recipes.mxfp8(), reshard_after_forward=False)
        train(net, optimizer, range(1), rank)
        loss = net(nets.batch(rank=rank)).square().mean()
        shard = net.blocks[0].down._weight_state.managed.local
        with torch.no_grad():
            if event == "past versions":
                torch.from_dlpack(shard.inner.detach()).mul_(2)
            elif event == "codes":
                net.blocks[0].down.weight.columnwise.data.bitwise_xor_(1)
            else:
                shard.mul_(2)
        try:
            loss.backward()
            found.append("nothing")
        except fq.StaleWeightError as error:
            found.append(str(error))
    for what in found:
        assert re.search(
            r"blocks\.0\.down\.weight: \d+ of \d+ bytes of columnwise\.(data|scale)", what
        ), found


def _at_three(rank: int, world: int, folder: Path) -> None:
    _in_place(rank, world, folder)
    _plain(rank, world, folder)
    _exact_codes(rank, world, folder)


def test_in_place_loads_plain_checkpoints_and_exact_codes(tmp_path):
    """If false, `dcp.load` into a state dict leaves stale codes (also with empty shards), a
    converted model and nn.Linear do not exchange checkpoints, or exported codes are not those of
    the forward."""
    pytest.importorskip("safetensors")
    run_ranks(3, _at_three, tmp_path)


def test_the_staleness_check_finds_stale_shards_and_passes_clean_runs():
    """If false, FSDP_QUANT_CHECK=1 stops correct training, or lets codes of an earlier master
    through."""
    run_ranks(2, _clean_and_stale)

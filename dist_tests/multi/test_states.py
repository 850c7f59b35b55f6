# SPDX-License-Identifier: Apache-2.0
"""What is read, planned and saved of sharded models: values of quantized parameters, plans, states
of ranks and of wrappers."""

from __future__ import annotations

import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.single.test_hold import held_bytes
from fsdp_quant import checkpoint
from fsdp_quant.tensor import rendezvous
from fsdp_quant.tensor.torch_compat import local_of


def _quantized(
    rows: int = 64, k: int = 64, recipe: fq.Recipe | None = None, dtype=torch.bfloat16
) -> nn.Module:
    recipe = recipe or fq.recipes.mxfp8()
    with fq.quantized_model_init(recipe):
        torch.manual_seed(0)
        return fq.convert(nn.Sequential(nn.Linear(k, rows, bias=False)).to(dtype), recipe)


def _reads(rank: int, world: int) -> None:
    for rows in (64, 33, 1):  # 33: uneven shards; 1: a rank without rows
        for state in ("values", "master", "codes"):
            model = _quantized(rows)
            want = model[0].weight.inner.detach().clone()
            decoded = model[0].weight.dequantize()
            weight = fully_shard(model)[0].weight
            optimizer = None if state == "values" else fq.optim.FusedAdam(model.parameters())
            model(values(4, 64))  # makes codes
            del optimizer
            what = f"{rows} rows, {state}"
            want = decoded if state != "values" else want
            full = weight.full_tensor()
            assert type(full) is torch.Tensor
            assert_same_bytes(full, want, what)
            assert_same_bytes(
                torch.cat(_gathered(weight.to_local().dequantize(), rows, world)),
                decoded,
                f"{what}: decoded",
            )
            norm = want.float().norm()
            for got in (
                weight.norm(),
                torch.linalg.vector_norm(weight),
                torch.nn.utils.get_total_norm([weight]),
                torch._foreach_norm([weight])[0],
            ):
                torch.testing.assert_close(got.full_tensor().float(), norm, rtol=1e-2, atol=0.0)
            saved = model.state_dict()["0.weight"].full_tensor()
            assert_same_bytes(saved.bfloat16(), want, f"{what}: saved")
            assert fq.state_dict(model)["codes"].keys() == {"0.weight"}
            try:
                weight * 2
            except NotImplementedError as error:
                assert "full_tensor() or to_local().dequantize()" in str(error)
            else:
                raise AssertionError("a product decoded silently")


def _gathered(local: torch.Tensor, rows: int, world: int) -> list[torch.Tensor]:
    chunk = -(-rows // world)
    padded = torch.cat([local, local.new_zeros(chunk - len(local), local.shape[1])])
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [part[: max(0, min(chunk, rows - r * chunk))] for r, part in enumerate(parts)]


def test_sharded_quantized_parameters_are_read_as_values():
    """If false, whoever logs, gathers, clips by or saves a parameter meets an operator that codes
    refuse."""
    run_ranks(2, _reads)


def _frozen(rank: int, world: int) -> None:
    for recipe in (fq.recipes.mxfp8(), fq.recipes.fp8_current()):
        model = fully_shard(_quantized(96, recipe=recipe)).requires_grad_(False)
        x = values(8, 64).requires_grad_()
        want = model(x)
        (gradient,) = torch.autograd.grad(want.float().sum(), [x])
        codes = fq.state_dict(model)["codes"]
        assert fq.freeze(model, keep="operands") == 1  # the codes of both directions
        assert held_bytes(local_of(model[0].weight)) < 2.1 * 96 * 64 / world, (
            "values are held beside codes"
        )
        for _ in range(2):
            got = model(x)
            assert_same_bytes(got, want, "output")
            assert_same_bytes(torch.autograd.grad(got.float().sum(), [x])[0], gradient, "gradient")
        assert fq.state_dict(model)["codes"] == codes


def test_frozen_sharded_parameters_hold_codes_alone():
    """If false, a frozen base under fully_shard costs values and codes of it, or gathers others."""
    run_ranks(2, _frozen)


def _plans(rank: int, world: int) -> None:
    """Blocks that were converted one by one have layers of equal names."""
    blocks = [
        fq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), fq.recipes.mxfp8())
        for _ in range(4)
    ]
    model = fully_shard(nn.Sequential(*blocks))
    planned = fq.plan(model)
    one = 64 * 64 + 128  # of codes and scales; a root keeps both directions
    assert planned.weight_bytes == {f"{i}.0.weight": (2 * one, 0) for i in range(4)}, (
        planned.weight_bytes
    )
    fq.reset_receipt()
    model(torch.randn(8, 64)).sum().backward()
    assert planned.bytes_per_step() == fq.receipt().gathered_bytes == 4 * 2 * one


def test_layers_of_equal_names_are_planned_each():
    """If false, fq.plan counts the bytes of one of them for all."""
    run_ranks(2, _plans)


def _shared_key(rank: int, world: int, folder: Path) -> list[str]:
    """Under one key DCP keeps what one rank wrote; under a key per rank all of it."""
    said = []
    for recipe in (fq.recipes.fp8_delayed(length=2), fq.recipes.mxfp8()):
        for sharded in (True, False):
            torch.manual_seed(0)
            model = fq.convert(nn.Sequential(nn.Linear(64, 64)), recipe)
            model = fully_shard(model) if sharded else model
            model(values(4, 64, seed=rank, dtype=torch.float32) * (1 + rank)).sum().backward()
            own, shared = {f"rank_{rank}": fq.state_dict(model)}, {"fq": fq.state_dict(model)}
            path = folder / f"{recipe.name}-{sharded}"
            dcp.save({**own, **shared, "all": fq.steps.TrainingState(model)}, checkpoint_id=path)
            dcp.load({**own, **shared}, checkpoint_id=path)
            fq.load_state_dict(model, own[f"rank_{rank}"])
            before = {k: v["amaxes"].clone() for k, v in fq.state_dict(model)["histories"].items()}
            dcp.load({"all": fq.steps.TrainingState(model)}, checkpoint_id=path)
            try:
                fq.load_state_dict(model, shared["fq"])
                said.append("loaded")
            except ValueError as error:
                said.append(str(error))
            for key, history in fq.state_dict(model)["histories"].items():
                assert_same_bytes(history["amaxes"], before[key], f"{key} after a refused load")
    verified = checkpoint.verify(folder / "fp8_delayed-True")
    assert not verified.problems, str(verified)
    assert sum("all: step 1" in line for line in verified.lines) == 2, "each rank's is verified"
    return said


def test_histories_that_ranks_saved_under_one_key_are_missed(tmp_path):
    """If false, every rank but one resumes with scales of another rank's activations, and nobody is
    told."""
    first, second = run_ranks(2, _shared_key, tmp_path)
    assert "fq.steps.TrainingState(model)" in first[0] and second[0] == first[0]
    assert sorted(["loaded" == first[1], "loaded" == second[1]]) == [False, True], (
        "of DDP the rank that was saved goes on"
    )
    assert first[2:] == second[2:] == ["loaded", "loaded"], (
        "what all ranks share may lie under one key"
    )


def _damaged(rank: int, world: int) -> list[str]:
    """One rank's file is damaged, or its part of one file."""
    model = fully_shard(
        fq.convert(nn.Sequential(nn.Linear(64, 64)), fq.recipes.fp8_delayed(length=2))
    )
    model(values(4, 64, dtype=torch.float32)).sum().backward()
    state, shared = fq.state_dict(model), fq.steps.TrainingState(model).state_dict()
    state["step"], before = (state["step"] + 5 if rank else -1), fq.state_dict(model)["step"]
    shared["ranks"][0] = shared["ranks"][0][:-9]
    said = ["loaded", "loaded"]
    for i, damaged in enumerate((state, shared)):
        try:
            fq.load_state_dict(model, damaged)
        except ValueError as error:
            assert fq.state_dict(model)["step"] == before
            said[i] = str(error)
    return said


def test_a_state_that_one_rank_refuses_is_refused_by_all():
    """If false, one rank raises while the others wait for its fingerprints, or go on from another
    step."""
    mine, other = run_ranks(2, _damaged)
    assert "rank 0 cannot go on, so no rank does: step of the saved state is -1" in mine[0]
    assert "the saved state of rank 0 is damaged" in mine[1] and other == mine


# Calls of every rank #

ALONE = {  # calls that one rank may make, as it may call `model.state_dict()`
    "plan": lambda model, _: fq.plan(model),
    "receipt": lambda *_: fq.receipt(),
    "convert": lambda *_: fq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8"),
    "begin_step": lambda *_: fq.begin_step(3),
    "sync": lambda model, _: fq.sync(model),
    "hold": lambda model, _: fq.hold(model).__enter__(),
    "inspect": lambda model, _: fq.inspect(model),
}
TOGETHER = {  # calls that wait for all ranks
    "state_dict": lambda model, _: fq.state_dict(model),
    "load_state_dict": fq.load_state_dict,
    "set_recipe": lambda model, _: fq.set_recipe(model, "fp8_current"),
    "export": lambda model, _: fq.export(model, tempfile.mkdtemp()),
    "refit": lambda model, _: fq.refit(model),
    "share_amaxes": lambda model, _: fq.share_amaxes(model),
    "fingerprints": lambda model, _: checkpoint.fingerprints(model),
}


def _called_by_one_rank(rank: int, world: int, folder: str) -> dict[str, tuple[float, str, int]]:
    """Seconds until a call ended, what it raised, and its warnings that it waits; by name."""
    outcomes, rendezvous.PATIENCE = {}, 0.2

    def fresh_group(name: str) -> None:
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{name}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    for calls in ({"all": None}, *({name: call} for name, call in TOGETHER.items())):
        fresh_group(next(iter(calls)))
        model = fq.convert(nn.Sequential(nn.Linear(64, 64)), "nvfp4")
        fully_shard(model)(torch.ones(4, 64)).sum().backward()
        state = fq.state_dict(model)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
        for group in model[0].weight.device_mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
        for name, call in (ALONE if "all" in calls else calls).items() if rank == 0 else ():
            begin, raised = time.monotonic(), ""
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    call(model, state)
                except RuntimeError as error:
                    raised = str(error)
            waits = ["s so far" in str(w.message) for w in warned]
            outcomes[name] = time.monotonic() - begin, raised, sum(waits)
        done = Path(folder) / f"{next(iter(calls))} done"
        if rank == 0:
            done.touch()
        while not done.exists():
            time.sleep(0.01)
    fresh_group("end")
    return outcomes


@on_cpu
def test_a_call_of_one_rank_returns_or_says_who_must_call_it(tmp_path):
    """If false, `if rank == 0:` around a collective hangs without a word, as a full state dict of
    one rank does not.
    """
    outcomes, _ = run_ranks(2, _called_by_one_rank, str(tmp_path))
    assert outcomes.keys() == ALONE.keys() | TOGETHER.keys()
    for name, (took, raised, warned) in outcomes.items():
        assert took < 5.0, (name, took)
        if name in ALONE:
            assert not raised and not warned, (name, raised)
            continue
        assert f"fsdp_quant's {name} was called on rank 0" in raised, (name, raised)
        assert "Every rank must call it" in raised and warned == 1, (name, warned)
        assert "take it, or fq.convert, out of `if rank == 0:`" in raised
        document = getattr(fq, name, None) or getattr(checkpoint, name)
        assert "Every rank must call it" in " ".join(document.__doc__.split()), name

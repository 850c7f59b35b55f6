# SPDX-License-Identifier: Apache-2.0
"""`fq.inspect` under `fully_shard`: bits of training, shards that add up to the weight, a file per
rank."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.multi import nets
from dist_tests.multi.harness import on_cpu, run_ranks
from fsdp_quant import recipes

WORLD = 2


class Experts(nets.Net):
    def __init__(self, recipe):
        super().__init__(recompute=True)
        self.experts = fq.GroupedLinear(3, 5, 32, packed=True, recipe=recipe, name="experts")
        fq.convert(self, recipe)

    def forward(self, x):
        return self.experts(super().forward(x), [7, 0, len(x) - 7])


def _trained(recipe: fq.Recipe, rank: int, path: str | None, sharded: bool):
    with kept_step():
        torch.manual_seed(0)
        net = Experts(recipe)
        if sharded:
            fully_shard(net.experts)
            nets.shard(net)
        optimizer, losses, grads = torch.optim.SGD(net.parameters(), lr=0.1), [], {}
        log = None
        if path is not None:
            dump = Path(path).with_suffix("")
            log = fq.inspect(net, every=2, path=Path(path), what_if="mxfp8", dump=dump).start()
        for step in range(3):
            loss = (
                net(
                    values(
                        16, nets.K, seed=step + (10 * rank if sharded else 0), dtype=torch.float32
                    )
                )
                .square()
                .mean()
            )
            loss.backward()
            losses.append(loss.detach())
            if step == 2:
                grads = {
                    n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    for n, p in net.named_parameters()
                }
            optimizer.step()
            optimizer.zero_grad()
        whole = [
            p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()
        ]
        if log is None:
            return losses, whole, None, grads
        log.stop()
        return losses, whole, log.latest[1], grads


def _inspected(rank: int, world: int, recipe: fq.Recipe, folder: str):
    plain, looked = (_trained(recipe, rank, path, True) for path in (None, f"{folder}/run.jsonl"))
    for i, (got, want) in enumerate(
        zip([*looked[0], *looked[1]], [*plain[0], *plain[1]], strict=True)
    ):
        assert_same_bytes(got, want, f"tensor {i}")
    grads = {n: g.double().norm().item() for n, g in looked[3].items()}
    return looked[2], grads


@on_cpu
@pytest.mark.parametrize(
    "recipe",
    [recipes.fp8_delayed(length=3), recipes.nvfp4(), recipes.hybrid("fp8_block", "mxfp8")],
    ids=str,
)
def test_ranks_measure_their_shards_and_train_as_before(recipe: fq.Recipe, tmp_path):
    """If false, inspecting a sharded run changes it, hangs it, or measures blocks that no gather
    sends."""
    first, second = run_ranks(WORLD, _inspected, recipe, str(tmp_path))
    grads, of_ranks = first[1], [first[0], second[0]]
    alone = _trained(recipe, 0, str(tmp_path / "alone.jsonl"), False)[2]
    names = {key.split("/")[0] for key in alone}
    assert names == {
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
        "head",
        "experts",
    }
    for name in names:
        found = [of for of in of_ranks if f"{name}/weight/norm" in of]
        norm = math.hypot(*(of[f"{name}/weight/norm"] for of in found))
        assert norm == pytest.approx(alone[f"{name}/weight/norm"], rel=0.1)  # after other data
        norm = math.hypot(
            *(of[f"{name}/weight/grad_norm"] for of in of_ranks if f"{name}/weight/grad_norm" in of)
        )
        assert norm == pytest.approx(grads[f"{name}.weight"], rel=1e-6)
        assert of_ranks[0][f"{name}/input/norm"] != of_ranks[1][f"{name}/input/norm"]
        assert {k for of in of_ranks for k in of if k.startswith(name)} == {
            k for k in alone if k.startswith(name)
        }
    files = [tmp_path / "run.jsonl", tmp_path / "run.rank1.jsonl"]
    for path, of in zip(files, of_ranks):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        rank = files.index(path)
        dumped = tmp_path / "run" / "step2" / f"blocks.0.up.rank{rank}.safetensors"
        tensors = fq.checkpoint.load_safetensors(dumped)
        assert tensors["input"].norm().item() == pytest.approx(of["blocks.0.up/input/norm"])
        assert tensors["weight"].shape[0] == (17, 16)[rank]  # a shard of 33 rows
        assert [line["kind"] for line in lines] == ["plan", "numbers", "numbers", "receipt"]
        assert lines[2]["values"] == {k: v for k, v in of.items()} and lines[2]["step"] == 2


def _weights(rank: int, world: int, recipe: fq.Recipe) -> dict[str, float]:
    with kept_step():
        torch.manual_seed(0)
        net = nets.shard(fq.convert(nets.build(), recipe))
        with fq.inspect(net, every=1) as log:
            net(values(16, nets.K, seed=rank, dtype=torch.float32)).sum().backward()
        return log.latest[1]


@on_cpu
@pytest.mark.parametrize(
    "recipe", [recipes.fp8_current(), recipes.nvfp4(), recipes.fp8_block()], ids=str
)
def test_shards_have_the_scales_of_the_whole_weight(recipe: fq.Recipe):
    """If false, a scale that spans ranks, or a block that a cut divides, is measured as another
    than the one that is gathered."""
    of_ranks = run_ranks(WORLD, _weights, recipe)
    with kept_step():
        net = fq.convert(nets.build(), recipe)
        with fq.inspect(net, every=1) as log:
            net(values(16, nets.K, seed=0, dtype=torch.float32)).sum().backward()
    for key, want in log.latest[1].items():
        if "/weight" not in key or "grad_norm" in key:
            continue
        got = [of[key] for of in of_ranks if key in of]
        how = {
            "amax": max,
            "scale_max": max,
            "scale_min": min,
            "norm": lambda of: math.hypot(*of),
        }.get(key.rpartition("/")[2])
        if how is not None:
            assert how(got) == pytest.approx(want, rel=1e-7), key

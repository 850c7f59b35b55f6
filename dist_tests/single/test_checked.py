# SPDX-License-Identifier: Apache-2.0
"""FSDP_QUANT_CHECK=1: gathered codes that are not those of the shard are found; a clean run is what
it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.tensor import code_check

RECIPES = {
    "identity": recipes.identity(),
    "fp8_delayed": recipes.fp8_delayed(length=2, margin=1),
    "mxfp8": recipes.mxfp8(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "dequantized": recipes.nvfp4(backward_override="dequantized"),
}
X = values(32, 48, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _checking(monkeypatch):
    with kept_step():
        monkeypatch.setattr(code_check, "checking", True)
        yield


def net(recipe: fq.Recipe, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return fq.convert(
        nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32)).to(dtype), recipe
    )


def run(m: nn.Module, x: Tensor = X) -> Tensor:
    y = m(x.to(m[0].bias.dtype))
    y.float().square().mean().backward()
    return y.detach()


def train(recipe: fq.Recipe, freeze: bool) -> list[Tensor]:
    fq.begin_step(0)
    STEP.counted_by_hand = False
    m = net(recipe)
    m[2].weight.requires_grad_(not freeze)
    optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for step in range(3):
        seen += [run(m, X + step), run(m, X - step)]
        with torch.no_grad():
            seen.append(m.eval()(X))
        m.train()
        optimizer.step()
        optimizer.zero_grad()
    return seen + [v for v in m.state_dict().values()]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_clean_training_passes_the_check_unchanged(name: str, freeze: bool, monkeypatch):
    """Otherwise the check cries wolf, or its own work reaches codes, histories or random bits."""
    got = train(RECIPES[name], freeze)
    monkeypatch.setattr(code_check, "checking", False)
    for a, b in zip(got, train(RECIPES[name], freeze)):
        assert_same_bytes(a, b, name)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_write_that_moves_no_counter_is_multiplied(name: str, on_gpu: bool):
    """Otherwise numpy or a kernel of another library writes a weight, and products go on with the
    codes before it."""
    with hopper.emulated() if on_gpu else contextlib.nullcontext():
        dtype = torch.bfloat16 if on_gpu else torch.float32
        m, fresh = net(RECIPES[name], dtype), net(RECIPES[name], dtype)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=True)
        run(m)
        optimizer.step()
        with torch.no_grad():
            before = m(X.to(dtype))
            version = m[0].weight._version
            of_numpy = m[0].weight.detach().view(torch.int16 if on_gpu else torch.int32).numpy()
            of_numpy[:] ^= 64 if on_gpu else 1 << 22
            assert m[0].weight._version == version
            got = m(X.to(dtype))
            assert not torch.equal(got, before)
            if "delayed" not in name:
                fresh.load_state_dict(m.state_dict())
                assert_same_bytes(got, fresh(X.to(dtype)), name)


@pytest.fixture
def world_of_one():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8/nvfp4"])
def test_gathered_codes_that_were_written_are_found(
    name: str, direction, world_of_one, monkeypatch
):
    """Otherwise a stray write into gathered codes is multiplied in one of the passes."""
    m = net(RECIPES[name])
    fully_shard(m, mesh=world_of_one, reshard_after_forward=False)
    of = ROWWISE if m[2].plan.weight.shares_storage else direction
    if direction is ROWWISE:

        def stray(module, args):
            getattr(module.weight, of.value).data[3, 5] ^= 1

        run(m)
        m[2].register_forward_pre_hook(stray)
        with pytest.raises(
            fq.StaleWeightError, match=rf"2\.weight: 1 of \d+ bytes of {of.value}\.data"
        ):
            m(X)
        monkeypatch.setattr(code_check, "checking", False)
        m(X)
        return
    y = m(X.clone().requires_grad_())
    getattr(m[2].weight, of.value).data[3, 5] ^= 1
    with pytest.raises(
        fq.StaleWeightError, match=rf"2\.weight: 1 of \d+ bytes of {of.value}\.data"
    ):
        y.sum().backward()


def test_a_shard_that_is_written_after_its_gather_is_found(world_of_one):
    """Otherwise a product reads codes of what the weight was, and nobody says so."""
    m = net(RECIPES["mxfp8"])
    fully_shard(m, mesh=world_of_one)

    shard = m[0].weight.to_local().detach().numpy()

    def write(module, args):
        shard[:] *= 2

    run(m)
    m[0].register_forward_pre_hook(write)
    with pytest.raises(
        fq.StaleWeightError,
        match=r"0\.weight: \d+ of \d+ bytes of rowwise\..* was written after it was gathered",
    ):
        m(X)


def test_the_setting_is_read_or_refused():
    """Otherwise FSDP_QUANT_CHECK=yes checks nothing."""
    assert not code_check.read_setting({}) and not code_check.read_setting(
        {"FSDP_QUANT_CHECK": "0"}
    )
    assert code_check.read_setting({"FSDP_QUANT_CHECK": "1"})
    with pytest.raises(ValueError, match="FSDP_QUANT_CHECK is 'yes'; give 1"):
        code_check.read_setting({"FSDP_QUANT_CHECK": "yes"})

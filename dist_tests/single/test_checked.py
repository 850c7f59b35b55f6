"""FSDP_QUANT_CHECK=1: stale codes made on purpose are found and their writer is named; a clean run is what it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.tensor import writers
from fsdp_quant.tensor.master_weight import MasterWeight

RECIPES = {
    "identity": recipes.identity(), "fp8_delayed": recipes.fp8_delayed(length=2, margin=1), "mxfp8": recipes.mxfp8(),
    "fp8_block": recipes.fp8_block(), "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "dequantized": recipes.nvfp4(backward_override="dequantized"),
}
X = values(32, 48, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _checking(monkeypatch):
    with kept_step():
        monkeypatch.setattr(writers, "checking", True)
        yield


def net(recipe: fq.Recipe, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return fq.convert(nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32)).to(dtype), recipe)


def run(m: nn.Module, x: Tensor = X) -> Tensor:
    y = m(x.to(m[0].bias.dtype))
    y.float().square().mean().backward()
    return y.detach()


def write_unseen(weight: MasterWeight) -> None:
    """Double the master through memory that numpy shares: no counter moves."""
    weight.inner.detach().numpy()[:] *= 2


def cached(weight: MasterWeight, direction) -> Tensor:
    """The codes that the next product reads."""
    return weight.state.whole_storage(weight, direction, torch.float32).data


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
    monkeypatch.setattr(writers, "checking", False)
    for a, b in zip(got, train(RECIPES[name], freeze)):
        assert_same_bytes(a, b, name)


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "identity"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_write_that_moves_no_counter_is_found(name: str, on_gpu: bool, monkeypatch):
    """Otherwise numpy or a kernel of another library writes a weight, and products go on with the codes before it.

    Layouts of tensor cores are checked as well, in the emulation of a GPU.
    """
    with hopper.emulated() if on_gpu else contextlib.nullcontext():
        m = net(RECIPES[name], torch.bfloat16 if on_gpu else torch.float32)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=True)
        run(m)
        optimizer.step()
        with torch.no_grad():
            before = m(X.to(m[0].bias.dtype))
            weight = m[0].weight
            if on_gpu:
                weight.inner.detach().view(torch.int16).numpy()[:] ^= 64
            else:
                write_unseen(weight)
            monkeypatch.setattr(writers, "checking", False)
            assert_same_bytes(m(X.to(m[0].bias.dtype)), before, "stale codes go unseen without the check")
            monkeypatch.setattr(writers, "checking", True)
            named = r"0\.weight: \d+ of .*aten\._foreach_add_\.List \(SGD\.step, .*test_checked"
            with pytest.raises(fq.StaleWeightError, match=named):
                m(X.to(m[0].bias.dtype))
            fq.sync(m)
            assert not torch.equal(m(X.to(m[0].bias.dtype)), before)


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
def test_written_codes_are_found(direction):
    """Otherwise a stray write into cached codes is multiplied in one of the passes."""
    m = net(recipes.hybrid("mxfp8", "nvfp4"))
    y = m(X.clone().requires_grad_())
    cached(m[0].weight, direction)[3, 5] ^= 1
    with pytest.raises(fq.StaleWeightError, match=rf"0\.weight: 1 of \d+ bytes of {direction.value}\.data.*nobody since"):
        m(X) if direction is ROWWISE else y.sum().backward()


def test_an_input_that_changes_between_the_layers_that_share_it_is_found(monkeypatch):
    """Otherwise the second of gate and up multiplies the codes of an activation that is no more."""
    monkeypatch.setattr(writers, "checking", False)
    with hopper.emulated():
        for checking in (False, True):
            m = net(recipes.mxfp8(), torch.bfloat16)
            x = X.bfloat16().requires_grad_() * 1
            first = m[0](x)
            monkeypatch.setattr(writers, "checking", checking)
            assert_same_bytes(m[0](x), first, "a second layer of the same input")
            x.detach().view(torch.int16).numpy()[:] ^= 64
            found = pytest.raises(fq.StaleWeightError, match=r"input of 0\.weight was written")
            with found if checking else contextlib.nullcontext():
                assert_same_bytes(m[0](x), first, "codes of the input as it was")


def _by_copy(m):
    m[0].weight.copy_(m[0].weight * 2)


def _by_load(m):
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})


def _by_data(m):
    m[0].weight.data = m[0].weight.data * 2


def _by_exported_state(m):
    m.state_dict()["0.weight"].mul_(2)


@pytest.mark.parametrize(
    "write, writer",
    [(_by_copy, r"aten\.copy_\.default \(.*test_checked"), (_by_load, r"aten\.copy_\.default \(load_state_dict, "),
     (_by_data, r"assignment of \.data \("), (_by_exported_state, "a write past the weight, into memory it shares")],
)
def test_a_write_between_the_passes_names_its_writer(write, writer: str, monkeypatch):
    """Otherwise the message says that a weight changed, and who did it has to be searched for."""
    m = net(recipes.mxfp8())
    y = m(X.clone().requires_grad_())
    with torch.no_grad():
        write(m)
    with pytest.raises(fq.StaleWeightError, match=rf"[02]\.weight was modified between.*Last writer: {writer}"):
        y.sum().backward()
    monkeypatch.setattr(writers, "checking", False)
    y = m(X.clone().requires_grad_())
    with torch.no_grad():
        write(m)
    with pytest.raises(fq.StaleWeightError, match="FSDP_QUANT_CHECK=1 names the last writer"):
        y.sum().backward()


def test_the_setting_is_read_or_refused():
    """Otherwise FSDP_QUANT_CHECK=yes checks nothing."""
    assert not writers.read_setting({}) and not writers.read_setting({"FSDP_QUANT_CHECK": "0"})
    assert writers.read_setting({"FSDP_QUANT_CHECK": "1"})
    with pytest.raises(ValueError, match="FSDP_QUANT_CHECK is 'yes'; give 1"):
        writers.read_setting({"FSDP_QUANT_CHECK": "yes"})

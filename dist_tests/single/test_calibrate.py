# SPDX-License-Identifier: Apache-2.0
"""`fq.calibrate`: amaxes that a hand-written hook finds, under names that `fq.export` takes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import recipes
from fsdp_quant.models.steps import converted_modules, histories_by_side

WIDTH = 128


class Net(nn.Module):
    """Layers in nvfp4 and in mxfp8, experts of both kinds of which one gets no token, dropout."""

    def __init__(self, recipe: fq.Recipe):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = fq.LayerNormMLP(WIDTH, WIDTH, recipe=recipe, name="mlp")
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.ReLU())
        self.other = fq.Linear(WIDTH, WIDTH, recipe="mxfp8")
        self.packed = fq.GroupedLinear(3, WIDTH, WIDTH, packed=True, recipe=recipe, name="packed")
        self.listed = fq.GroupedLinear(3, WIDTH, WIDTH, recipe=recipe, name="listed")
        fq.convert(self.block, recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.block(self.mlp(x)))
        sizes = [len(x) - 4, 0, 4]
        return self.listed(self.packed(x, sizes), torch.tensor(sizes).cumsum(0))


def batches() -> list[Tensor]:
    return [values(16, WIDTH, seed=s, dtype=torch.float32) * (s + 1) for s in (1, 0)]


def expected(net: Net) -> dict[str, float]:
    """The largest input per layer, from hooks that know how `Net` cuts its tokens."""
    amaxes: dict[str, float] = {}
    grouped = {"packed": "packed", "listed": "listed.experts"}

    def hook(name):
        def see(module, args):
            x, sizes = args[0], [len(args[0]) - 4, 0, 4]
            parts = {name: x}
            if name in grouped:
                parts = {f"{grouped[name]}.{e}": p for e, p in enumerate(x.split(sizes))}
            for key, part in parts.items():
                if len(part):
                    amaxes[key] = max(amaxes.get(key, 0.0), part.abs().max().item())

        return see

    hooks = [m.register_forward_pre_hook(hook(n)) for n, m in net.named_modules() if n]
    with torch.no_grad():
        for x in batches():
            net.eval()(x)
    for h in hooks:
        h.remove()
    for name in grouped.values():
        amaxes[f"{name}.1"] = max(amaxes[f"{name}.{e}"] for e in (0, 2))
    return amaxes


@pytest.mark.parametrize("name", ["nvfp4", "fp8_delayed"])
def test_amaxes_are_those_of_the_inputs_and_a_training_does_not_notice(name: str, tmp_path):
    """If false, servers clip inputs, or calibrating in the middle of a run changes it."""
    with kept_step():
        net = Net(getattr(recipes, name)())
        net(batches()[0]).sum().backward()
        net.block.eval()  # a mode of its own
        histories = [
            h
            for layer in converted_modules(net).values()
            for h in histories_by_side(layer).values()
        ]
        before = [h.amaxes.clone() for h in histories] + [torch.get_rng_state()]
        got = fq.calibrate(net, [batches()[0], {"x": batches()[1]}])
        assert net.training and net.mlp.training and not net.block.training
        for tensor, want in zip([h.amaxes for h in histories] + [torch.get_rng_state()], before):
            assert_same_bytes(tensor, want, "state of training")
        assert not any(m._forward_hooks for m in net.modules() if isinstance(m, fq.Linear))
        want = expected(net)
    layers = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "block.0"]
    layers += [f"{kind}.{e}" for kind in ("packed", "listed.experts") for e in range(3)]
    assert set(got) == set(layers)
    for layer in layers:
        assert got[layer] == pytest.approx(want[layer], rel=1e-6), layer
    del net.other  # a folder holds one format only, where servers merge no layers
    fq.export(net, tmp_path / "served", input_amax=got)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["dynamic"] in (False, "local")


def test_what_was_not_measured_is_said():
    """If false, an export scales inputs by an amax that nobody measured."""
    with pytest.raises(ValueError, match="no layer whose input a server scales per tensor"):
        fq.calibrate(fq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8"), [])
    net = fq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "nvfp4")
    with pytest.raises(ValueError, match="no batch reached 0, 1"):
        fq.calibrate(net, [])
    with pytest.raises(ValueError, match="the input of 0 is inf"):
        fq.calibrate(net, [torch.full((4, 32), math.inf)])
    first = lambda model, x: model[0](x)  # noqa: E731
    with pytest.warns(UserWarning, match="no batch reached 1 "):
        assert fq.calibrate(net, [torch.full((4, 32), 2.0)], first) == {"0": 2.0}

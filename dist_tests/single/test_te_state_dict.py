# SPDX-License-Identifier: Apache-2.0
"""`fq.load_te_state_dict`: modules here compute what TransformerEngine computes from its names."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values

D, HIDDEN, EXPERTS = 32, 48, 3
FP32 = torch.float32


def tensor(*shape: int, seed: int) -> Tensor:
    return values(*shape, seed=seed, dtype=FP32) / 8


def te_state(gated: bool = True, normalization: str = "LayerNorm") -> dict[str, object]:
    """What te saves of LayerNormLinear "qkv", LayerNormMLP "mlp", GroupedLinear "moe" and Linear
    "out"."""
    state: dict[str, object] = {}
    shapes = {
        "qkv.weight": (D, D),
        "qkv.bias": (D,),
        "mlp.fc1_weight": (2 * HIDDEN if gated else HIDDEN, D),
        "mlp.fc1_bias": (2 * HIDDEN if gated else HIDDEN,),
        "mlp.fc2_weight": (D, HIDDEN),
        "mlp.fc2_bias": (D,),
        "out.weight": (7, D),
        "out.bias": (7,),
    }
    for name in ("qkv", "mlp"):
        shapes[f"{name}.layer_norm_weight"] = (D,)
        if normalization == "LayerNorm":
            shapes[f"{name}.layer_norm_bias"] = (D,)
    for e in range(EXPERTS):
        shapes[f"moe.weight{e}"], shapes[f"moe.bias{e}"] = (D, D), (D,)
    for seed, (key, shape) in enumerate(shapes.items()):
        state[key] = tensor(*shape, seed=seed)
    return state | {f"{name}._extra_state": torch.zeros(3) for name in ("qkv", "mlp", "moe", "out")}


class Net(nn.Module):
    def __init__(
        self,
        activation: str = "swiglu",
        normalization: str = "LayerNorm",
        packed: bool = True,
        recipe: str | None = None,
    ):
        super().__init__()
        options = {"bias": True, "normalization": normalization, "recipe": recipe}
        self.qkv = fq.LayerNormLinear(D, D, **options)
        self.mlp = fq.LayerNormMLP(D, HIDDEN, activation, **options)
        self.moe = fq.GroupedLinear(EXPERTS, D, D, packed=packed, recipe=recipe)
        self.out = fq.Linear(D, 7, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.moe(self.mlp(self.qkv(x)), SPLITS))


SPLITS = [5, 0, 11]
ACTIVATIONS = {
    "swiglu": lambda h: F.silu(h[..., :HIDDEN]) * h[..., HIDDEN:],
    "geglu": lambda h: F.gelu(h[..., :HIDDEN]) * h[..., HIDDEN:],
    "gelu": F.gelu,
}


def te_forward(state: dict, x: Tensor, activation: str, normalization: str) -> Tensor:
    """What te's modules compute, from their documentation."""

    def normed(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.layer_norm_weight"]
        if normalization == "RMSNorm":
            return F.rms_norm(x, (D,), weight, 1e-5)
        return F.layer_norm(x, (D,), weight, state[f"{name}.layer_norm_bias"], 1e-5)

    def linear(x: Tensor, name: str, number: object = "") -> Tensor:
        weight, bias = (f"{name}{kind}{number}" for kind in ("weight", "bias"))
        return F.linear(x, state[weight], state[bias])

    x = linear(normed(x, "qkv"), "qkv.")
    h = F.linear(normed(x, "mlp"), state["mlp.fc1_weight"], state["mlp.fc1_bias"])
    x = F.linear(ACTIVATIONS[activation](h), state["mlp.fc2_weight"], state["mlp.fc2_bias"])
    return linear(torch.cat([linear(t, "moe.", e) for e, t in enumerate(x.split(SPLITS))]), "out.")


@pytest.mark.parametrize(
    ("activation", "normalization", "packed"),
    [("swiglu", "LayerNorm", True), ("geglu", "RMSNorm", False), ("gelu", "LayerNorm", False)],
)
def test_a_te_checkpoint_computes_what_it_computed(activation, normalization, packed):
    """If false, gate and up change places, experts change numbers, or a tensor keeps its initial
    values."""
    state = te_state(activation != "gelu", normalization)
    net = Net(activation, normalization, packed)
    fq.load_te_state_dict(net, state)
    x = tensor(16, D, seed=99)
    torch.testing.assert_close(net(x), te_forward(state, x, activation, normalization))


def test_codes_follow_a_te_checkpoint():
    """If false, quantized parameters multiply codes of their initial values, or wrappers of a
    module hide it."""
    with fq.quantized_model_init("mxfp8"):
        codes = Net(recipe="mxfp8")
    plain, x = Net(recipe="mxfp8"), tensor(16, D, seed=99)
    for net in (codes, torch.compile(plain, backend="eager")):
        fq.load_te_state_dict(net, te_state())
    assert_same_bytes(codes(x), plain(x), "quantized parameters")


def changed(**entries: object) -> dict[str, object]:
    """te's state with other entries; None: without one. `__` is a dot."""
    new = te_state() | {key.replace("__", "."): value for key, value in entries.items()}
    return {key: value for key, value in new.items() if value is not None}


REFUSED = {
    "missing": (changed(moe__weight1=None), "missing: moe.weight1"),
    "unexpected": (changed(qkv__query_weight=torch.ones(2)), "unexpected: qkv.query_weight"),
    "our names": (changed(mlp__up_proj__bias=torch.ones(2)), "unexpected: mlp.up_proj.bias"),
    "no gate": (
        changed(mlp__fc1_weight=torch.ones(HIDDEN, D)),
        r"mlp.fc1_weight is \[48, 32\], wanted \[96, 32\]",
    ),
    "expert": (changed(moe__bias2=torch.ones(5)), r"moe.bias2 is \[5\], wanted \[32\]"),
    "no tensor": (changed(out__bias=None) | {"out.bias": 3}, "out.bias is a int, wanted a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_fit_writes_nothing(name: str):
    """If false, a model is half of one checkpoint, or silently keeps initial values."""
    net, (state, says) = Net(), REFUSED[name]
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=f"wrote nothing: .*{says}.*Wanted: the names and shapes"):
        fq.load_te_state_dict(net, state)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_path_and_a_model_on_meta_are_refused():
    """If false, a load ends without an error and without values, or on one rank alone."""
    with pytest.raises(ValueError, match="the state is a str; wanted the dict"):
        fq.load_te_state_dict(Net(), "te.pt")
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match=r"on the meta device: model.to_empty\(device="):
        fq.load_te_state_dict(net, te_state())

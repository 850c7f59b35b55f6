# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention: `fq.Linear` of its packed weight, in torch's encoder and decoder and under
`fully_shard`."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.multi.harness import run_ranks
from dist_tests.multi.test_packed_experts import assert_same
from dist_tests.single import hopper
from fsdp_quant import recipes

WIDTH, HEADS, TOKENS = 64, 4, 32
NAMED = [name for name in recipes.names() if name != "hybrid"]


class FromLayers(nn.Module):
    """Self-attention of two linear layers."""

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner.out_proj = nn.Linear(WIDTH, WIDTH)  # random bits are of names
        self.bfloat16()
        with torch.no_grad():
            self.inner.weight.copy_(attention.in_proj_weight)
            self.inner.bias.copy_(attention.in_proj_bias)
            self.inner.out_proj.load_state_dict(attention.out_proj.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        n, b, _ = x.shape
        q, k, v = self.inner(x).chunk(3, -1)
        q, k, v = (
            t.reshape(n, b * HEADS, -1).transpose(0, 1).view(b, HEADS, n, -1) for t in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(b * n, WIDTH)
        return self.inner.out_proj(y).view(n, b, WIDTH)


def attention(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, HEADS, **options).bfloat16()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "bias" in name:
                p.uniform_()
    return made


def gradients(net: nn.Module, *given: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    net.zero_grad()
    given = [x.detach().requires_grad_() for x in given]
    y = net(*given)
    y = y[0] if isinstance(y, tuple) else y
    y.float().square().mean().mul(1e3).backward()
    found = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"y": y.detach()} | {f"input {i}": x.grad for i, x in enumerate(given)} | found


@pytest.mark.parametrize(
    "name, on_hopper, compiled", laws.crossed(NAMED, (False, True), (False, True))
)
def test_products_are_those_of_linear_layers(name: str, on_hopper: bool, compiled: bool):
    """If false, the packed weight is multiplied in high precision, in parts, or with another
    input's scales."""
    x = values(TOKENS, 2, WIDTH, seed=3)
    with kept_step(), hopper.emulated() if on_hopper else contextlib.nullcontext():
        theirs = attention()
        layers = fq.convert(FromLayers(theirs), recipes.by_name(name))
        net = fq.convert(nn.ModuleDict({"inner": theirs}), recipes.by_name(name))["inner"]
        torch._dynamo.reset()
        run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        got = run(x, x, x, need_weights=False)[0]
        want = layers(x)
        assert_same_bytes(got, want, "y")
        for y in (got, want):
            y.backward(values(TOKENS, 2, WIDTH, seed=4))
        pairs = [
            (net.in_proj_weight, layers.inner.weight),
            (net.in_proj_bias, layers.inner.bias),
            (net.out_proj.weight, layers.inner.out_proj.weight),
            (net.out_proj.bias, layers.inner.out_proj.bias),
        ]
        for i, (a, b) in enumerate(pairs):
            assert_same_bytes(a.grad, b.grad, f"gradient {i}")


@pytest.mark.parametrize(
    "options, masks",
    [
        ({}, {}),
        (
            {},
            {
                "need_weights": False,
                "is_causal": True,
                "attn_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS).bfloat16(),
            },
        ),
        (
            {},
            {
                "key_padding_mask": torch.arange(2 * TOKENS).view(2, TOKENS) % 9 == 8,
                "average_attn_weights": False,
            },
        ),
        ({"bias": False}, {}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    ],
)
@pytest.mark.parametrize("of", ["itself", "another", "two others"])
def test_it_attends_as_torchs(of: str, options: dict, masks: dict):
    """If false, a mask, an option or attention to another sequence is computed otherwise."""
    plain = attention(**options)
    net = fq.convert(nn.Sequential(copy.deepcopy(plain)), recipes.identity())[0]
    x, key, value = (values(TOKENS, 2, WIDTH, seed=i) for i in range(3))

    def call(net: nn.Module, *given: Tensor) -> Tensor:
        given = {
            "itself": given[:1] * 3,
            "another": (given[0], given[1], given[1]),
            "two others": given,
        }[of]
        y, weights = net(*given, **masks)
        assert (weights is None) == (masks.get("need_weights") is False)
        return y if weights is None else torch.cat([y.flatten(), weights.flatten()])

    given = {"itself": [x], "another": [x, key], "two others": [x, key, value]}[of]
    results = []
    for one in (net, plain):
        leaves = [t.detach().requires_grad_() for t in given]
        y = call(one, *leaves, *[None] * (3 - len(given)))
        y.float().square().mean().mul(1e3).backward()
        results.append(
            {"y": y.detach()}
            | {f"input {i}": t.grad for i, t in enumerate(leaves)}
            | {n: p.grad for n, p in one.named_parameters()}
        )
    assert_same(*results, of)


def test_a_graph_serves_every_step():
    """If false, a compiled model is traced again for each batch, as where a guard holds the tensor
    itself."""
    torch._dynamo.reset()
    net = torch.compile(
        fq.convert(nn.Sequential(attention()), recipes.mxfp8())[0], backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(3):
            x = values(TOKENS, 2, WIDTH, seed=i)
            net(x, x, x)[0].float().sum().backward()


def test_shapes_of_a_call():
    """If false, an unbatched call or one of sequences first differs from torch's."""
    for options, shape in (
        ({}, (TOKENS, WIDTH)),
        ({}, (TOKENS, 2, WIDTH)),
        ({"batch_first": True}, (2, TOKENS, WIDTH)),
    ):
        plain = nn.MultiheadAttention(WIDTH, HEADS, **options)
        net, x = (
            fq.convert(nn.Sequential(copy.deepcopy(plain)), recipes.identity())[0],
            values(*shape, dtype=torch.float32),
        )
        for a, b in zip(net(x, x, x), plain(x, x, x)):
            assert_same_bytes(a, b, str(shape))


def stack(kind: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    if kind == "encoder":
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 128, **options), 2, enable_nested_tensor=False
        ).bfloat16()
    return nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, HEADS, 128, **options), 2
    ).bfloat16()


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_stacks_of_torch_keep_what_is_seen_of_them(kind: str):
    """If false, a checkpoint, a copy, evaluation or a change of recipe meets another model."""
    plain, net = stack(kind), fq.convert(stack(kind), recipes.identity())
    given = [values(2, TOKENS, WIDTH, seed=i) for i in range(1 if kind == "encoder" else 2)]
    want = gradients(plain, *given)
    assert_same(gradients(net, *given), want, "identity")
    assert {n: p.shape for n, p in net.state_dict().items()} == {
        n: p.shape for n, p in plain.state_dict().items()
    }
    memory = io.BytesIO()
    torch.save(net, memory)
    memory.seek(0)
    for what, other in {
        "copied": copy.deepcopy(net),
        "pickled": torch.load(memory, weights_only=False),
    }.items():
        assert_same(gradients(other.double().bfloat16(), *given), want, what)
        assert all(isinstance(layer.self_attn, nn.MultiheadAttention) for layer in other.layers)
    net.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(net, recipes.mxfp8())
    fq.set_recipe(net, recipes.mxfp8())
    fresh = fq.convert(stack(kind), recipes.mxfp8())
    want = gradients(fresh, *given)
    assert_same(gradients(net, *given), want, "set_recipe")
    said = str(fq.plan(net))
    assert (
        f"[{2 if kind == 'encoder' else 4} x layers.0.self_attn]: q, k and v of one tensor are one "
        "product" in said
    )
    assert "in high precision: " not in said, said
    with torch.no_grad():
        assert_same_bytes(net.eval()(*given), want["y"], "evaluation multiplies other codes")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_an_encoder_evaluates_with_masks_as_torchs(batch_first: bool, nested: bool):
    """If false, evaluation of a converted encoder with torch's defaults raises, or reads weights
    without their layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, batch_first=batch_first)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    net = fq.convert(copy.deepcopy(plain), recipes.identity())
    x, padding = values(3, 5, WIDTH, dtype=torch.float32), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, 2:] = True
    valid = ~padding if batch_first else ~padding.t()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    given = {"src_key_padding_mask": padding}
    for grad in (False, True):
        for options in (given, {"mask": causal, "is_causal": True}, given | {"mask": causal < 0}):
            with torch.set_grad_enabled(grad):
                x = x if batch_first else x.reshape(5, 3, WIDTH)
                got, want = net(x, **options)[valid], plain(x, **options)[valid]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    attention, nested_x = net.layers[0].self_attn, torch.nested.nested_tensor([x[0, :3], x[1]])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="self_attn: query is a nested"):
        attention(nested_x, x, x)


def test_weights_of_several_widths_and_skipped_layers_stay():
    """If false, a name that was skipped is converted, or a weight of another layout is, and the
    plan does not say what stayed."""
    net = nn.ModuleDict({"a": attention(), "b": attention(kdim=32, vdim=32), "c": attention()})
    fq.convert(net, recipes.mxfp8(), skip=["c"])
    assert (
        isinstance(net["a"].out_proj, fq.Linear)
        and type(net["b"]) is type(net["c"]) is nn.MultiheadAttention
    )
    assert not isinstance(net["c"].out_proj, fq.Linear)
    said = str(fq.plan(net))
    assert (
        "b.q_proj_weight" in said and "c.in_proj_weight" in said and "a.in_proj_weight" not in said
    ), said


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed"])
def test_shards_train_as_one_process(name: str):
    """If false, a shard of the packed weight is multiplied as the whole, or its statistics are of a
    part."""
    run_ranks(2, _trained, recipes.by_name(name))


def _trained(rank: int, world: int, recipe: fq.Recipe) -> None:
    alone, net = fq.convert(stack("encoder"), recipe), fq.convert(stack("encoder"), recipe)
    for module in (*net.layers, net):
        fully_shard(module)
    x, losses = values(2, TOKENS, WIDTH), []
    for one in (alone, net):
        optimizer, seen = torch.optim.SGD(one.parameters(), lr=0.5), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = one(x).float().square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        losses.append(seen)
    for i, (want, got) in enumerate(zip(*losses)):
        assert_same_bytes(got, want, f"{recipe.name}: loss {i}")

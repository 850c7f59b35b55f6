# SPDX-License-Identifier: Apache-2.0
"""Weights [in, out], as of transformers' Conv1D: `fq.Linear` of the transposed weight, in GPT-2 and
under `fully_shard`."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.multi.harness import run_ranks
from dist_tests.multi.test_packed_experts import assert_same, step, train
from dist_tests.single import hopper
from dist_tests.single.test_fuse import tiny
from fsdp_quant import recipes

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D
K, N = 64, 192
NAMED = [name for name in recipes.names() if name != "hybrid"]


def pair(recipe: fq.Recipe) -> list[nn.Module]:
    """A Conv1D and an nn.Linear of equal values, converted."""
    torch.manual_seed(0)
    conv, linear = Conv1D(N, K).bfloat16(), nn.Linear(K, N).bfloat16()
    with torch.no_grad():
        conv.bias.uniform_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return [fq.convert(nn.Sequential(module), recipe)[0] for module in (conv, linear)]


@pytest.mark.parametrize(
    "name, on_hopper, compiled", laws.crossed(NAMED, (False, True), (False, True))
)
def test_products_are_those_of_a_linear_layer(name: str, on_hopper: bool, compiled: bool):
    """If false, a transposed weight is quantized along the other dim, or its gradient lies
    wrongly."""
    with kept_step(), hopper.emulated() if on_hopper else contextlib.nullcontext():
        results = []
        for module in pair(recipes.by_name(name)):
            torch._dynamo.reset()
            net, x = nn.Sequential(module), values(2, 32, K, seed=3).requires_grad_()
            y = (torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net)(x)
            y.backward(values(2, 32, N, seed=4))
            weight = module.weight.grad if isinstance(module, nn.Linear) else module.weight.grad.t()
            results.append([y.detach(), x.grad, weight, module.bias.grad])
            assert module.weight.grad.stride() == module.weight.stride()
    for what, a, b in zip(("y", "dx", "dw", "db"), *results):
        assert_same_bytes(a, b, what)


def gpt2(recipe: fq.Recipe | None) -> nn.Module:
    return tiny("gpt2") if recipe is None else fq.convert(tiny("gpt2"), recipe, "lm_head")


def test_gpt2_keeps_what_is_seen_of_it():
    """If false, a checkpoint, a copy, a move, or code that looks for Conv1D meets another model."""
    plain, net = gpt2(None), gpt2(recipes.identity())
    want = step(plain)
    assert_same(step(net), want, "identity")
    assert {n: p.shape for n, p in net.state_dict().items()} == {
        n: p.shape for n, p in plain.state_dict().items()
    }
    assert sum(isinstance(m, Conv1D) for m in net.modules()) == 8
    memory = io.BytesIO()
    torch.save(net, memory)
    memory.seek(0)
    for what, other in {
        "copied": copy.deepcopy(net),
        "pickled": torch.load(memory, weights_only=False),
    }.items():
        assert_same(step(other.double().bfloat16()), want, what)
        assert isinstance(other.transformer.h[0].mlp.c_fc, Conv1D)
    net.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(net, recipes.mxfp8(), "lm_head")
    fq.set_recipe(net, recipes.mxfp8())
    assert_same(step(net), step(gpt2(recipes.mxfp8())), "set_recipe")
    said = str(fq.plan(net))
    assert "[8 x transformer.h.0.attn.c_attn]" in said and "Conv1D" not in said
    with fq.hold(net):
        assert_same(step(net), step(net), "held")
    frozen = copy.deepcopy(net)
    assert fq.freeze(frozen.requires_grad_(False)) == fq.unfreeze(frozen) == 8
    assert [p.shape for p in frozen.parameters()] == [p.shape for p in net.parameters()]
    with fq.quantized_model_init(recipes.mxfp8()):
        assert_same(
            step(gpt2(recipes.mxfp8())), step(gpt2(recipes.mxfp8())), "quantized_model_init"
        )


def test_adapters_wrap_converted_layers():
    """If false, LoRA on GPT-2 takes them for nn.Linear, and merges its transposed product into the
    weight."""
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(
        gpt2(recipes.mxfp8()),
        peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False),
    ).eval()
    ids = torch.arange(32).view(1, 32)
    with torch.no_grad():
        want, size = (
            net(input_ids=ids).logits.float(),
            gpt2(recipes.mxfp8()).eval()(input_ids=ids).logits.float(),
        )
        got = net.merge_and_unload()(input_ids=ids).logits.float()
    assert (got - want).norm() < 0.3 * (want - size).norm()


@pytest.mark.parametrize("name", laws.every_second(["mxfp8", "fp8_delayed"], 1))
def test_shards_train_as_one_process(name: str):
    """If false, a weight that is cut along the contraction is multiplied as a part, or its
    statistics are of a part."""
    run_ranks(2, _trained, recipes.by_name(name))


def _trained(rank: int, world: int, recipe: fq.Recipe) -> None:
    alone, net = gpt2(recipe), gpt2(recipe)
    for module in (*net.transformer.h, net):
        fully_shard(module)
    for i, (got, want) in enumerate(zip(train(net), train(alone))):
        assert_same_bytes(got, want, f"{recipe.name}: loss {i}")
    assert not fq.plan(net).weight_bytes, "they are gathered in high precision"

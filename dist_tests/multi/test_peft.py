# SPDX-License-Identifier: Apache-2.0
"""PEFT: LoRA and DoRA over a converted base, and over one that is codes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import kinds
from dist_tests.laws import assert_same_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import batch, llama, whole
from fsdp_quant.models.steps import converted_modules

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytestmark = on_cpu

FROZEN = {  # recipe, bytes per element of a weight that is codes
    "nvfp4": (fq.recipes.nvfp4(), 0.5 + 1 / 256),
    "mxfp8": (fq.recipes.mxfp8(), 2 * (1 + 1 / 32)),
    "mxfp8, dequantized": (fq.recipes.mxfp8(backward_override="dequantized"), 1 + 1 / 32),
}


def _with_adapters(model: nn.Module, dora: bool) -> nn.Module:
    """LoRA of random factors, so that they change outputs."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        use_dora=dora,
    )
    return peft.get_peft_model(model, config)


def _net(dora: bool, recipe: fq.Recipe | None = None, convert_first: bool = True) -> nn.Module:
    recipe = recipe or fq.recipes.mxfp8()
    if convert_first:
        return _with_adapters(fq.convert(llama(), recipe, skip=["lm_head"]), dora)
    return fq.convert(_with_adapters(llama(), dora), recipe, skip=["lm_head"])


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batch(0)).logits


def _train(model: nn.Module, indices: Iterable[int], average: bool = False) -> None:
    """SGD over micro-batches, one per step; average: gradients over the ranks, by hand."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for index in indices:
        model(input_ids=batch(index), labels=batch(index)).loss.backward()
        for p in trained if average else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    trained = [n for n, p in reference.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    got, wanted = (whole(m, lambda name, p: p.requires_grad) for m in (model, reference))
    for name in trained:
        assert_same_bytes(got[name], wanted[name], name)


@pytest.mark.parametrize("dora", [False, True])
def test_order_of_conversion_does_not_matter(dora: bool):
    """If false, adapters are quantized where they are put in first, or the base is not."""
    first, second = _net(dora), _net(dora, convert_first=False)
    assert (
        set(converted_modules(first)) == set(converted_modules(second))
        and len(converted_modules(first)) == 14
    )
    assert not any("lora_" in name for name in converted_modules(first))
    for model in (first, second):
        _train(model, range(2))
    _assert_same(second, first)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_base_is_its_codes(name: str):
    """If false, a base that is frozen takes more memory than its codes in the directions that are
    read, or trains other adapters."""
    recipe, size = FROZEN[name]
    model, reference = (_net(False, recipe) for _ in range(2))
    assert fq.integrations.peft.freeze(model, keep="operands") == 14
    for layer in converted_modules(model).values():
        sides = [s for s in (layer.weight.rowwise, layer.weight.columnwise) if s is not None]
        storages = {
            b.untyped_storage().data_ptr(): b.untyped_storage().nbytes()
            for s in sides
            for b in s.buffers().values()
        }
        # and scales of whole tensors
        assert sum(storages.values()) == pytest.approx(size * layer.weight.numel(), abs=8)
    for net in (model, reference):
        _train(net, range(3))
    _assert_same(model, reference)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_merge_into_a_frozen_base(dora: bool):
    """If false, what is merged is not the base that adapters were trained on, or DoRA's norms are
    those of other values."""
    model = _net(dora)
    fq.integrations.peft.freeze(model)
    plain = _with_adapters(llama(), dora)
    with torch.no_grad():
        for name, layer in converted_modules(model).items():
            plain.get_submodule(name).weight.copy_(layer.weight.dequantize())
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if "lora_" in name:
                q.copy_(p)
    # codes of decoded codes are the same
    requantized = fq.convert(copy.deepcopy(plain), fq.recipes.mxfp8(), skip=["lm_head"])
    _train(model, range(2))
    _train(requantized, range(2))
    _assert_same(model, requantized)
    for net in (model, plain):
        for (name, p), q in zip(net.named_parameters(), requantized.parameters(), strict=True):
            if "lora_" in name:
                p.data.copy_(q)
    assert fq.unfreeze(model) == 14
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    for (name, got), wanted in zip(
        merged.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert_same_bytes(got, wanted, name)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_a_transposed_base_are_made_before_or_after_it_is_frozen(dora: bool):
    """If false, adapters of GPT-2's frozen layers have the sizes of [out, in], or DoRA scales by
    norms of the other dim."""
    x, outputs = kinds.batch().bfloat16(), []
    for first in (False, True):
        net = kinds.converted("Conv1D", "mxfp8").bfloat16().requires_grad_(False)
        if first:
            fq.integrations.peft.freeze(net)
            net = copy.deepcopy(net).to(torch.bfloat16)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            target_modules=["0", "2"], fan_in_fan_out=True, init_lora_weights=False, use_dora=dora
        )
        model = peft.get_peft_model(net, config)
        if not first:
            fq.integrations.peft.freeze(model)
        outputs.append(model(x))
        fq.unfreeze(model)
        assert_same_bytes(outputs[-1], model(x), "with the values of the codes")
    assert dora or torch.equal(*outputs)  # magnitudes are norms of the base of then


def _of_experts(kind: str, frozen: str) -> nn.Module:
    """Adapters of packed experts, whose activations are not quantized.

    frozen:  "before" or "after" the adapters are made, or "no": the base is values of codes.
    """
    recipe = fq.recipes.qat("mxfp4", activations="identity", gradients="identity")
    net = kinds.converted(kind, recipe).requires_grad_(False)
    assert fq.integrations.peft.freeze(net) == 2
    if frozen == "no":
        fq.unfreeze(net)
        net = fq.unconvert(net)
    elif frozen == "after":
        fq.unfreeze(net)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(net, config)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    assert frozen == "no" or fq.integrations.peft.freeze(model) == 2
    return model


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_adapters_of_packed_experts_train_over_their_codes(kind: str):
    """If false, `target_parameters` over frozen experts is refused, or trains other adapters than
    over the values of the codes, eager, compiled, or merged."""
    want, before, after = (_of_experts(kind, frozen) for frozen in ("no", "before", "after"))
    steps = [kinds.step(m) for m in (want, before, after, torch.compile(after, backend="eager"))]
    for results in steps[1:]:
        for got, reference in zip(results, steps[0], strict=True):
            torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-6)
    with after.disable_adapter(), want.disable_adapter():
        torch.testing.assert_close(after(kinds.batch()), want(kinds.batch()))
    with pytest.raises(NotImplementedError, match=r"would write .*call fq.unfreeze\(model\)"):
        before.merge_adapter()
    fq.unfreeze(after)
    merged, plain = fq.unconvert(after.merge_and_unload()), want.merge_and_unload()
    torch.testing.assert_close(merged(kinds.batch()), plain(kinds.batch()), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_adapters_of_sharded_experts_train_over_their_codes(compiles: bool):
    """If false, compiled layers with adapters of experts end in an error of dynamo under
    fully_shard."""
    torch._dynamo.reset()
    want, model = (_of_experts("mixtral", "after") for _ in range(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if compiles:
            model.base_model.model.compile(backend="aot_eager")
        fully_shard(model.base_model.model)
        results = [kinds.step(m) for m in (want, model)]
    finally:
        dist.destroy_process_group()
    for reference, got in zip(*results, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("first", [False, True])
def test_dora_is_added_to_a_frozen_base(first: bool, tmp_path: Path):
    """If false, a second adapter needs the base in high precision again, or has other norms than
    those of the codes' values."""
    model, reference = (_net(first) for _ in range(2))
    fq.integrations.peft.freeze(model)
    fq.integrations.peft.freeze(reference)
    fq.unfreeze(reference)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    for net in (model, reference):
        torch.manual_seed(2)
        net.add_adapter("second", config)
        net.set_adapter("second")
        net.save_pretrained(tmp_path)
        net.load_adapter(tmp_path / "second", "third")
    fq.integrations.peft.freeze(reference)
    for name in ("second", "third"):
        for net in (model, reference):
            net.set_adapter(name)
        assert_same_bytes(_logits(model), _logits(reference), name)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_saved_and_loaded(dora: bool, tmp_path: Path):
    """If false, adapters that were trained on a converted base do not load beside a plain or a
    frozen one."""
    model = _net(dora)
    fq.integrations.peft.freeze(model)
    _train(model, range(2))
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(
        fq.convert(llama(), fq.recipes.mxfp8(), skip=["lm_head"]), tmp_path / "adapters"
    )
    fq.integrations.peft.freeze(loaded)
    assert_same_bytes(_logits(loaded), _logits(model), "logits")
    peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters").save_pretrained(
        tmp_path / "again"
    )
    saved, again = (
        safetensors.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("adapters", "again")
    )
    assert saved.keys() == again.keys()
    for name, value in saved.items():
        assert_same_bytes(again[name], value, name)


def _sharded(rank: int, world: int) -> None:
    for dora, frozen in ((False, False), (False, True), (True, True), (True, False)):
        model, reference = (_net(dora, fq.recipes.nvfp4()) for _ in range(2))
        ignored = set()
        if frozen:
            for net in (model, reference):
                fq.integrations.peft.freeze(net)
        if frozen and not dora:  # DoRA below: shards of codes
            ignored = {layer.weight for layer in converted_modules(model).values()}
        for part in (*model.base_model.model.model.layers, model):
            fully_shard(part, ignored_params=ignored)
        if dora and not frozen:
            with pytest.raises(
                NotImplementedError, match=r"_proj.weight, a Quant.* will not decode .* \(skip=\)"
            ):
                _train(model, [0])
            continue
        for net in (model, reference):
            _train(net, range(rank, 3 * world, world), average=net is reference)
        _assert_same(model, reference)


def test_adapters_train_under_fully_shard():
    """If false, adapters train otherwise where their base is sharded, or is whole codes on every
    rank.

    DoRA needs values of the base, of which `fully_shard` gathers codes: a base that trains, or may,
    is refused.
    """
    run_ranks(2, _sharded)

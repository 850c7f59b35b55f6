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


def test_norms_of_dora_are_those_of_a_transposed_base():
    """If false, DoRA over GPT-2's frozen layers fails, or scales by norms of the other dim."""
    net = fq.convert(kinds.PLAIN["Conv1D"]().bfloat16(), fq.recipes.mxfp8()).requires_grad_(False)
    config = peft.LoraConfig(
        target_modules=["0", "2"], fan_in_fan_out=True, init_lora_weights=False, use_dora=True
    )
    model = peft.get_peft_model(net, config)
    fq.integrations.peft.freeze(model)
    x = kinds.batch().bfloat16()
    frozen = model(x)
    fq.unfreeze(model)
    assert_same_bytes(frozen, model(x), "with the values of the codes")


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

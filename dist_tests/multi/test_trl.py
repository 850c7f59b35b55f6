# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer and GRPOTrainer with `fq.integrations.transformers.Callback`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import EVERYTHING, assert_same_bytes, every_second
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import (
    BATCH,
    MICRO_BATCHES,
    RECIPES,
    STEPS,
    VOCABULARY,
    examples,
    llama,
    loop,
    shard_by_hand,
    take_fsdp_path_on_cpu,
    whole,
)
from fsdp_quant.models.steps import converted_modules

datasets, trl, tokenizers = map(pytest.importorskip, ("datasets", "trl", "tokenizers"))
peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
pytestmark = on_cpu


def _tokenizer():
    """A word per token: "3 4 5"."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {str(i): i for i in range(3, VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _arguments(folder, sharded: bool, **arguments) -> dict:
    config = dict(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_layer_cls_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    return (
        dict(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        | (dict(fsdp=True, fsdp_config=config) if sharded else {})
        | arguments
    )


def _sft(folder, recipe: str, sharded: bool = False, **arguments) -> nn.Module:
    data = datasets.Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()} for row in examples()]
    )
    callback = fq.integrations.transformers.Callback(RECIPES[recipe](), skip=["lm_head"])
    trainer = trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**_arguments(folder, sharded, train_sampling_strategy="sequential")),
        train_dataset=data,
        processing_class=_tokenizer(),
        callbacks=[callback],
        **arguments,
    )
    trainer.train()
    return trainer.model


def _reward(completions: list[str], **kwargs) -> list[float]:
    return [float(sum(map(int, text.split())) % 7) for text in completions]


def _grpo(folder, model: nn.Module, callback=None, sharded: bool = False, **arguments) -> nn.Module:
    rows = [" ".join(map(str, row["input_ids"].tolist()[:6])) for row in examples(32)]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=_reward,
        processing_class=_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": rows}),
        args=trl.GRPOConfig(
            **_arguments(folder, sharded, num_generations=2, max_completion_length=6, beta=0.0)
        ),
        callbacks=[] if callback is None else [callback],
        **arguments,
    )
    trainer.train()
    return trainer.model


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, got), wanted in zip(whole(model).items(), whole(reference).values(), strict=True):
        assert_same_bytes(got, wanted, name)


def _with_fused_head(recipe: str) -> nn.Module:
    """TRL multiplies `lm_head.weight` itself, for losses of tokens without logits."""
    from trl.trainer.utils import add_fused_lm_head

    model = fq.convert(llama(), RECIPES[recipe](), skip=["lm_head"])
    add_fused_lm_head(model)
    return model


def _fused_loss(model: nn.Module, ids: Tensor, num_items: Tensor) -> Tensor:
    return -model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum() / num_items


@pytest.mark.parametrize("recipe", every_second(list(RECIPES), 0))
def test_sft_is_a_loop(recipe: str, tmp_path: Path):
    """If false, SFTTrainer trains other weights than a loop with the same recipe."""
    reference = _with_fused_head(recipe)
    loop(reference, loss_of=_fused_loss)
    _assert_same(_sft(tmp_path, recipe), reference)


def _callback(recipe: str = "mxfp8", **options):
    return fq.integrations.transformers.Callback(RECIPES[recipe](), skip=["lm_head"], **options)


def test_grpo_trains_what_it_generates_with(tmp_path: Path):
    """If false, codes that rollouts and training share, held over a step, are not those of the
    weights."""
    expected = _grpo(tmp_path, fq.convert(llama(), fq.recipes.mxfp8(), skip=["lm_head"]))
    assert not torch.equal(expected.lm_head.weight, llama().lm_head.weight)
    for hold in (True, False) if EVERYTHING else (True,):
        _assert_same(_grpo(tmp_path, llama(), _callback(hold=hold)), expected)


@pytest.mark.parametrize("kind", every_second(["sft", "grpo"], 1))
def test_lora_over_codes(kind: str, tmp_path: Path):
    """If false, TRL's `peft_config` quantizes adapters, or trains the base."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"])
    if kind == "sft":
        model = _sft(tmp_path, "nvfp4", peft_config=config)
    else:
        model = _grpo(tmp_path, llama(), _callback("nvfp4"), peft_config=config)
    assert len(converted_modules(model)) == 14 and not any(
        "lora_" in name for name in converted_modules(model)
    )
    trained, before = (
        whole(model),
        {n.replace(".weight", ""): p for n, p in llama().named_parameters()},
    )
    for name, value in trained.items():
        if "lora_B" in name:
            assert value.any(), name
        elif "lora_" not in name:
            base = before[
                name.removeprefix("base_model.model.")
                .replace(".base_layer", "")
                .replace(".weight", "")
            ]
            assert_same_bytes(value, base.to(value.dtype), name)


def _sharded(rank: int, world: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    take_fsdp_path_on_cpu()
    reference = shard_by_hand(_with_fused_head("mxfp8"))
    loop(reference, rank, world, loss_of=_fused_loss)
    _assert_same(_sft(folder, "mxfp8", sharded=True), reference)
    first = _grpo(folder, llama(), _callback(), sharded=True)
    assert all(
        not torch.equal(p, q)
        for p, q in zip(whole(first).values(), whole(llama()).values())
        if p.dim() == 2
    )
    _assert_same(_grpo(folder, llama(), _callback(hold=False), sharded=True), first)


@pytest.mark.skipif(not EVERYTHING, reason="22 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
def test_trl_trains_under_fully_shard(tmp_path: Path):
    """If false, SFTTrainer or GRPOTrainer, which generates inside its training, trains other
    weights under `fully_shard`."""
    run_ranks(2, _sharded, str(tmp_path))

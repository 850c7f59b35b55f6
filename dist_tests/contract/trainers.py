# SPDX-License-Identifier: Apache-2.0
"""Trainers that save in the middle of a training, and are started anew from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_quant as fq
from dist_tests.contract.on_ranks import Curve, Run, tokens
from dist_tests.trainers import llama, take_fsdp_path_on_cpu

BATCH, VOCABULARY = 4, 256
# of FSDP2 in transformers' and accelerate's words
SHARDS = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "cpu_ram_efficient_loading": False,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def _length(run: Run) -> int:
    return run.choose({"length": 64}, {"length": 512}, {"length": 4096})["length"]


def _model(run: Run) -> nn.Module:
    sizes = run.choose(
        dict(hidden_size=128, intermediate_size=256),
        dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4),
        dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32),
    )
    model = llama(vocab_size=VOCABULARY, max_position_embeddings=_length(run), **sizes)
    return model.to(run.device)


def _rows(run: Run) -> list[dict[str, list[int]]]:
    rows = tokens(0, BATCH * run.world * run.steps, _length(run), VOCABULARY)
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def _arms(run: Run, train: Callable[[str, str, str | None], list[float]]) -> dict[str, Curve]:
    """The curves of train(arm, folder, resumes from here) -> losses. It saves after half of the
    steps, in folder/"half"."""
    curves = {}
    for arm in ("bf16", run.recipe):
        folder = f"{run.folder}/{arm.replace('/', '_')}"
        losses = train(arm, folder, None)
        curves[arm] = Curve(losses, resumed=train(arm, folder, f"{folder}/half"))
    return curves


def _arguments(run: Run, folder: str) -> dict[str, Any]:
    """Of a TrainingArguments under FSDP2."""
    os.environ["LOCAL_WORLD_SIZE"] = str(run.world)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if not run.on_gpu:
        take_fsdp_path_on_cpu()
    return dict(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=run.steps,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=run.steps // 2,
        bf16=True,
        report_to=[],
        use_cpu=not run.on_gpu,
        disable_tqdm=True,
        seed=0,
        train_sampling_strategy="sequential",
        fsdp=True,
        fsdp_config={"version": 2, **SHARDS},
    )


def _losses(trainer: Any, resumes: bool) -> list[float]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-trainer.args.save_steps :] if resumes else losses


def _callbacks(arm: str) -> list:
    if arm == "bf16":
        return []
    return [fq.integrations.transformers.Callback(arm, skip=["lm_head"])]


def _checkpoint(run: Run, folder: str) -> str:
    return f"{folder}/checkpoint-{run.steps // 2}"


def trainer(run: Run) -> dict[str, Curve]:
    """transformers' Trainer under FSDP2."""
    import transformers

    def train(arm: str, folder: str, resume: str | None) -> list[float]:
        made = transformers.Trainer(
            model=_model(run),
            args=transformers.TrainingArguments(**_arguments(run, folder)),
            train_dataset=_rows(run),
            callbacks=_callbacks(arm),
            data_collator=transformers.default_data_collator,
        )
        made.train(resume_from_checkpoint=resume and _checkpoint(run, folder))
        assert isinstance(made.model, FSDPModule)
        return _losses(made, resume is not None)

    return _arms(run, train)


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {str(i): i for i in range(3, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sft(run: Run) -> dict[str, Curve]:
    """TRL's SFTTrainer under FSDP2."""
    import datasets
    import trl

    rows = [{"input_ids": row["input_ids"]} for row in _rows(run)]

    def train(arm: str, folder: str, resume: str | None) -> list[float]:
        made = trl.SFTTrainer(
            model=_model(run),
            args=trl.SFTConfig(**_arguments(run, folder), max_length=_length(run)),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=_tokenizer(),
            callbacks=_callbacks(arm),
        )
        made.train(resume_from_checkpoint=resume and _checkpoint(run, folder))
        assert isinstance(made.model, FSDPModule)
        return _losses(made, resume is not None)

    return _arms(run, train)


def lora(run: Run) -> dict[str, Curve]:
    """PEFT's LoRA in transformers' Trainer, a copy of the base a rank; ours: over codes."""
    import peft
    import transformers

    def train(arm: str, folder: str, resume: str | None) -> list[float]:
        model = _model(run).requires_grad_(False)
        if arm != "bf16":
            fq.freeze(fq.convert(model, arm, skip=["lm_head"]))
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        arguments = _arguments(run, folder) | dict(fsdp=False, fsdp_config=None)
        callback = [] if arm == "bf16" else [fq.integrations.transformers.Callback()]
        made = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            train_dataset=_rows(run),
            callbacks=callback,
            data_collator=transformers.default_data_collator,
        )
        made.train(resume_from_checkpoint=resume and _checkpoint(run, folder))
        return _losses(made, resume is not None)

    return _arms(run, train)


def _half(run: Run, resume: str | None) -> range:
    return range(run.steps // 2 if resume else 0, run.steps)


def _own_rows(run: Run, i: int) -> Tensor:
    rows = tokens(i, BATCH * run.world, _length(run), VOCABULARY, run.device)
    return rows.chunk(run.world)[run.rank]


def accelerate(run: Run) -> dict[str, Curve]:
    """accelerate's FSDP2 in a loop of its user."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    if not run.on_gpu:
        take_fsdp_path_on_cpu()
    names = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
    shards = {names.get(key, key): value for key, value in SHARDS.items()}
    shards["auto_wrap_policy"] = shards["auto_wrap_policy"].lower()

    def train(arm: str, folder: str, resume: str | None) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(
            cpu=not run.on_gpu,
            mixed_precision="bf16",
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **shards),
        )
        model = _model(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        if arm == "bf16":
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            prepare = fq.integrations.accelerate.prepare
            model, optimizer = prepare(accelerator, model, optimizer, arm, skip=["lm_head"])
        assert isinstance(model, FSDPModule)
        if resume:
            accelerator.load_state(resume)
        losses = []
        for i in _half(run, resume):
            if i == run.steps // 2 and not resume:
                accelerator.save_state(f"{folder}/half")
            fq.begin_step(i)
            ids = _own_rows(run, i)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(run.mean(float(loss)))
        return losses

    return _arms(run, train)


def lightning(run: Run) -> dict[str, Curve]:
    """Lightning's Trainer with FSDP2 (ModelParallelStrategy)."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self, saves: str):
            super().__init__()
            self.model, self.losses, self.saves = _model(run), [], saves

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=mesh, mp_policy=policy)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            ids = _own_rows(run, self.trainer.global_step)
            loss = self.model(input_ids=ids, labels=ids).loss
            self.losses.append(run.mean(float(loss)))
            return loss

        def on_train_batch_end(self, *_) -> None:
            if self.trainer.global_step == run.steps // 2 and self.saves:
                self.trainer.save_checkpoint(self.saves)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    def train(arm: str, folder: str, resume: str | None) -> list[float]:
        module = Module("" if resume else f"{folder}/half")
        precision = fq.integrations.lightning.Precision
        made = Trainer(
            accelerator="gpu" if run.on_gpu else "cpu",
            devices=run.world,
            strategy=ModelParallelStrategy(data_parallel_size=run.world, tensor_parallel_size=1),
            max_steps=run.steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            plugins=[] if arm == "bf16" else [precision(arm, skip=["model.lm_head"])],
        )
        made.fit(module, DataLoader(list(torch.zeros(run.steps, 1)), 1), ckpt_path=resume)
        return module.losses

    return _arms(run, train)

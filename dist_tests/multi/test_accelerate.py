# SPDX-License-Identifier: Apache-2.0
"""accelerate: its FSDP2 path, which matches an optimizer's parameters by their memory before and
after it shards them, its checkpoints, its autocast and its launcher, held to loops that are written
by hand."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import EVERYTHING, assert_same_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import (
    BATCH,
    MICRO_BATCHES,
    RECIPES,
    STEPS,
    TOKENS,
    batch,
    llama,
    loop,
    overflow_once,
    shard_by_hand,
    take_fsdp_path_on_cpu,
    whole,
)
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = on_cpu
ROOT = Path(fq.__file__).parent.parent


def _accelerator(world: int, mixed_precision: str = "no", fsdp: dict | None = None):
    """fsdp: beside the defaults of its FSDP2 path; None: no FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    defaults = dict(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
    )
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**defaults | fsdp)
    return Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0, fused=True
    )


def _train(
    accelerator,
    model: nn.Module,
    optimizer,
    rank: int,
    world: int,
    steps: Iterable[int] = range(STEPS),
) -> None:
    """`trainers.loop`, as a user of accelerate writes it."""
    num_items = torch.tensor(world * MICRO_BATCHES * BATCH * (TOKENS - 1))
    model.train()
    for step in steps:
        for i in range(MICRO_BATCHES):
            fq.begin_step(step, micro_batch=i)
            is_last = i == MICRO_BATCHES - 1
            ids = batch(step * MICRO_BATCHES + i, rank, world)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                accelerator.backward(
                    model(input_ids=ids, labels=ids, num_items_in_batch=num_items).loss * world
                )
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        scaler = accelerator.scaler
        scale = scaler.get_scale() if scaler else 1.0
        optimizer.step()
        if scaler and scaler.get_scale() < scale:
            fq.skip_step()
        optimizer.zero_grad()


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, got), wanted in zip(whole(model).items(), whole(reference).values(), strict=True):
        assert_same_bytes(got, wanted, name)


# recipe, is_tied, mixed precision, is_converted_before, the plugin's settings
SHARDED = {
    "mxfp8": ("mxfp8", False, "no", False, {}),
    "of rank 0, tied": ("nvfp4", True, "no", False, dict(cpu_ram_efficient_loading=True)),
    "of rank 0, delayed, checkpointed": (
        "fp8_delayed",
        False,
        "no",
        True,
        dict(cpu_ram_efficient_loading=True, activation_checkpointing=True),
    ),
    "tied, delayed": ("fp8_delayed", True, "no", True, {}),
    "bf16": ("mxfp8", False, "bf16", False, {}),
}


# The others differ from these in one setting; test_transformers.py has bf16.
IN_CI = ("of rank 0, tied", "of rank 0, delayed, checkpointed")


def _sharded(rank: int, world: int, folder: str) -> None:
    take_fsdp_path_on_cpu()
    for name in SHARDED if EVERYTHING else IN_CI:
        recipe, is_tied, mixed_precision, converted_before, fsdp = SHARDED[name]
        skip = [] if is_tied else ["lm_head"]
        of_rank_0 = "cpu_ram_efficient_loading" in fsdp

        def prepared(seed: int):
            accelerator = _accelerator(world, mixed_precision, fsdp)
            model = llama(seed, tie_word_embeddings=is_tied)
            optimizer, made = _adamw(model), RECIPES[recipe]()
            if converted_before:
                fq.convert(model, made, skip=skip)
                return accelerator, *fq.integrations.accelerate.prepare(
                    accelerator, model, optimizer
                )
            return accelerator, *fq.integrations.accelerate.prepare(
                accelerator, model, optimizer, made, skip=skip
            )

        accelerator, model, optimizer = prepared(seed=rank if of_rank_0 else 0)
        reference = fq.convert(llama(tie_word_embeddings=is_tied), RECIPES[recipe](), skip=skip)
        loop(
            shard_by_hand(reference, accelerator.state.fsdp_plugin.mixed_precision_policy),
            rank,
            world,
        )
        _train(accelerator, model, optimizer, rank, world, range(1))
        accelerator.save_state(f"{folder}/{name}")
        _train(accelerator, model, optimizer, rank, world, range(1, STEPS))
        _assert_same(model, reference)

        accelerator, model, optimizer = prepared(seed=5)
        accelerator.load_state(f"{folder}/{name}")
        _train(accelerator, model, optimizer, rank, world, range(1, STEPS))
        _assert_same(model, reference)


def test_accelerate_shards_and_resumes_as_a_loop(tmp_path: Path):
    """If false, accelerate's optimizer steps parameters that the model does not have, other ranks'
    weights, or it resumes with other scales."""
    run_ranks(2, _sharded, str(tmp_path))


def _with_adapters(rank: int, world: int) -> None:
    """A base that is codes, whole on every rank, under LoRA that is sharded."""
    peft = pytest.importorskip("peft")
    take_fsdp_path_on_cpu()

    def net() -> nn.Module:
        torch.manual_seed(1)
        model = fq.convert(llama(), fq.recipes.nvfp4(), skip=["lm_head"])
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
        fq.integrations.peft.freeze(model)
        return model

    model, reference = net(), net()
    frozen = [m for m in converted_modules(model).values() if type(m.weight) is QuantizedTensor]
    accelerator = _accelerator(world, fsdp=dict(ignored_modules=frozen))
    model, optimizer = fq.integrations.accelerate.prepare(accelerator, model, _adamw(model))
    _train(accelerator, model, optimizer, rank, world)
    _train_by_hand(reference, rank, world)
    got, wanted = (whole(m, lambda name, p: "lora_" in name) for m in (model, reference))
    for name in wanted:
        assert_same_bytes(got[name], wanted[name], name)


def _train_by_hand(model: nn.Module, rank: int, world: int) -> None:
    """`_train` with gradients that are averaged by hand, and a norm over whole gradients."""
    optimizer, num_items = _adamw(model), torch.tensor(world * MICRO_BATCHES * BATCH * (TOKENS - 1))
    trained = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            fq.begin_step(step, micro_batch=i)
            ids = batch(step * MICRO_BATCHES + i, rank, world)
            (model(input_ids=ids, labels=ids, num_items_in_batch=num_items).loss * world).backward()
        for p in trained:
            dist.all_reduce(p.grad)
            p.grad /= world
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_frozen_codes_train_under_accelerate():
    """If false, accelerate shards or casts the codes of a frozen base."""
    run_ranks(2, _with_adapters)


def _replicated(rank: int, world: int, folder: str) -> None:
    for mixed_precision in ("no", "bf16") if EVERYTHING else ("bf16",):
        accelerator, model = _accelerator(world, mixed_precision), llama()
        optimizer = _adamw(model)
        model, optimizer = fq.integrations.accelerate.prepare(
            accelerator, model, optimizer, fq.recipes.fp8_delayed(), skip=["lm_head"]
        )
        reference = fq.convert(llama(), fq.recipes.fp8_delayed(), skip=["lm_head"])
        if mixed_precision == "bf16":
            reference.forward = torch.autocast("cpu", torch.bfloat16)(reference.forward)
        _train_by_hand(reference, rank, world)
        _train(accelerator, model, optimizer, rank, world, range(1))
        accelerator.save_state(f"{folder}/{mixed_precision}")
        _train(accelerator, model, optimizer, rank, world, range(1, STEPS))
        _assert_same(model, reference)
        accelerator.load_state(f"{folder}/{mixed_precision}")
        _train(accelerator, model, optimizer, rank, world, range(1, STEPS))
        _assert_same(model, reference)


def test_accelerate_replicates_as_a_loop(tmp_path: Path):
    """If false, DDP or autocast of accelerate change what a converted model multiplies, or
    histories are those of one rank."""
    run_ranks(2, _replicated, str(tmp_path))


def test_skipped_step_leaves_nothing():
    """If false, gradients under a loss scale that overflowed scale what later steps quantize."""
    reference, model = (
        fq.convert(llama(), fq.recipes.fp8_delayed(), skip=["lm_head"]) for _ in range(2)
    )
    loop(reference, scaler=overflow_once(reference))
    accelerator = _accelerator(1)
    accelerator.scaler = overflow_once(model)  # as it makes one on a GPU, where it accepts "fp16"
    model, optimizer = fq.integrations.accelerate.prepare(accelerator, model, _adamw(model))
    _train(accelerator, model, optimizer, 0, 1)
    _assert_same(model, reference)


def test_prepare_refuses_what_it_would_not_do():
    """If false, a recipe or an option is dropped in silence."""
    accelerator, model = _accelerator(1), nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="give prepare the recipe"):
        fq.integrations.accelerate.prepare(accelerator, model, _adamw(model))
    converted = fq.convert(copy.deepcopy(model), fq.recipes.mxfp8())
    with pytest.raises(ValueError, match="give prepare the recipe"):
        fq.integrations.accelerate.prepare(
            accelerator, converted, _adamw(converted), fq.recipes.mxfp8()
        )


class _Own:
    """A state of the user's."""

    def __init__(self):
        self.values: dict = {}

    def state_dict(self) -> dict:
        return {"of": "the user"}

    def load_state_dict(self, state: dict) -> None:
        self.values = state


def test_a_folder_of_another_recipe_or_of_none_loads_on_request(tmp_path: Path):
    """If false, a run in bf16 cannot go on in FP8 under accelerate, or the user's states are read
    from each other's files."""

    def prepared(recipe, own: _Own, **options):
        accelerator, model = _accelerator(1), nn.Sequential(nn.Linear(32, 32))
        optimizer = _adamw(model)
        if recipe is None:
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            model, optimizer = fq.integrations.accelerate.prepare(
                accelerator, model, optimizer, recipe, **options
            )
        accelerator.register_for_checkpointing(own)
        return accelerator

    for recipe in (None, "nvfp4"):
        folder = str(tmp_path / f"of {recipe}")
        prepared(recipe, _Own()).save_state(folder)
        with pytest.raises((ValueError, RuntimeError), match="Number of|allow_recipe_change=True"):
            prepared("mxfp8", _Own()).load_state(folder)
        own = _Own()
        accelerator = prepared("mxfp8", own, allow_recipe_change=True)
        accelerator.load_state(folder)
        assert own.values == {"of": "the user"}
        accelerator.save_state(str(tmp_path / f"after {recipe}"))
        own.values = {}
        prepared("mxfp8", own).load_state(str(tmp_path / f"after {recipe}"))
        assert own.values == {"of": "the user"}


_SCRIPT = """
import torch
import fsdp_quant as fq
from accelerate import Accelerator
from dist_tests.trainers import batch, llama, take_fsdp_path_on_cpu

take_fsdp_path_on_cpu()
accelerator, model = Accelerator(cpu=True), llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fq.integrations.accelerate.prepare(
    accelerator, model, optimizer, fq.recipes.mxfp8(), skip=["lm_head"]
)
ids, losses = batch(0, accelerator.process_index, 2), []
for step in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
formats = {fmt for when, _, fmt in fq.receipt().gathers if when == "forward"}
falls = losses[2] < losses[1] < losses[0]
accelerator.print(accelerator.is_fsdp2, accelerator.num_processes, falls, formats)
accelerator.end_training()
"""
LAUNCH = [
    "--use_fsdp",
    "--fsdp_version",
    "2",
    "--fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
    "--fsdp_transformer_layer_cls_to_wrap",
    "LlamaDecoderLayer",
    "--fsdp_cpu_ram_efficient_loading",
    "false",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


@pytest.mark.skipif(not EVERYTHING, reason="18 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
def test_accelerate_launch_trains(tmp_path: Path):
    """If false, a script that `accelerate launch` starts does not train converted layers under
    `fully_shard`."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ran = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "True 2 True {'mxfp8'}" in ran.stdout, f"{ran.stdout}\n{ran.stderr}"

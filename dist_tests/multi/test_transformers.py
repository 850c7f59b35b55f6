# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with `fq.integrations.transformers.Callback`, held to loops that are
written by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_quant as fq
from dist_tests.laws import EVERYTHING, assert_same_bytes, every_second
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import (
    BATCH,
    MICRO_BATCHES,
    RECIPES,
    STEPS,
    examples,
    llama,
    loop,
    overflow_once,
    shard_by_hand,
    take_fsdp_path_on_cpu,
    whole,
)
from fsdp_quant.counters import counters
from fsdp_quant.models.steps import converted_modules

pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytestmark = on_cpu


def _trainer(
    out, recipe: str, model=None, callbacks=(), resume=None, scaler=None, options={}, **arguments
):
    """A Trainer that has trained. options: of its Callback; recipe "": of a converted model."""
    own = (RECIPES[recipe](),) if recipe else ()
    options = options | ({"skip": ["lm_head"]} if recipe else {})
    defaults = dict(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        train_sampling_strategy="sequential",
    )
    trainer = transformers.Trainer(
        model=model or llama(),
        args=transformers.TrainingArguments(**defaults | arguments),
        train_dataset=examples(),
        eval_dataset=examples(4),
        callbacks=[
            fq.integrations.transformers.Callback(*own, **options),
            *callbacks,
        ],
    )
    trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _converted(recipe: str):
    return fq.convert(llama(), RECIPES[recipe](), skip=["lm_head"])


def _assert_same(model, reference) -> None:
    for (name, got), wanted in zip(whole(model).items(), whole(reference).values(), strict=True):
        assert_same_bytes(got, wanted, name)


class _Generate(transformers.TrainerCallback):
    """Generates with the weights of each step before its first micro-batch, inside `fq.hold`.

    inference:  in inference mode, in which FSDP2, plain too, must not run first.
    """

    def __init__(self, inference: bool):
        self.inference = inference

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.eval()
        with torch.inference_mode(self.inference):
            tokens = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
        assert tokens.shape[1] > 3


class _Stops(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("callbacks", [(), (_Stops(),)], ids=["ends", "raises"])
def test_other_loops_count_their_steps_after_a_trainer(callbacks, tmp_path: Path):
    """If false, one run of a Trainer stops the random bits and scales of all other models."""
    model = llama()
    with contextlib.suppress(KeyboardInterrupt):
        _trainer(tmp_path, "nvfp4", model, callbacks=callbacks)
    other = fq.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "nvfp4")
    for _ in range(3):
        other(torch.ones(4, 64)).sum().backward()
    assert fq.state_dict(other)["step"] == 3
    if not callbacks:
        model(torch.arange(8)[None]).logits.sum().backward()
        assert fq.state_dict(model)["step"] == STEPS + 1


@pytest.mark.parametrize("recipe", every_second(list(RECIPES), 0))
def test_trainer_is_a_loop(recipe: str, tmp_path: Path):
    """If false, generation, evaluation or held codes change what the Trainer trains, or
    micro-batches do not share codes."""
    reference = _converted(recipe)
    expected = loop(reference)
    counters.reset()
    trainer = _trainer(tmp_path, recipe, callbacks=[_Generate(True)])
    # of the generation, and of the training, per step
    assert max(counters.of("weight encode").values()) <= 2 * STEPS
    assert _losses(trainer) == expected
    _assert_same(trainer.model, reference)
    compiled = dict(torch_compile_backend="aot_eager") if recipe == "mxfp8" else {}
    trainer = _trainer(tmp_path, recipe, eval_strategy="steps", eval_steps=1, **compiled)
    assert _losses(trainer) == expected
    _assert_same(trainer.model, reference)


class _Ends(transformers.TrainerCallback):
    """Ends a training in its first step, after some micro-batches."""

    def __init__(self, how: str):
        self.how = how

    def watch(self, model) -> None:
        if self.how == "out of memory":
            model.register_forward_hook(self._raise)

    def _raise(self, *args) -> None:
        raise torch.OutOfMemoryError("of a micro-batch")

    def on_substep_end(self, args, state, control, **kwargs):
        if self.how == "interrupt":
            raise KeyboardInterrupt
        control.should_training_stop = self.how == "early stop"


@pytest.mark.parametrize("how", ["interrupt", "out of memory", "early stop"])
def test_whatever_ends_a_training_ends_its_hold(how: str, tmp_path: Path):
    """If false, the model cannot be written or held after an exception, a stop, or Ctrl-C."""
    model, ends = llama(), _Ends(how)
    callback = fq.integrations.transformers.Callback(RECIPES["mxfp8"](), skip=["lm_head"])
    ends.watch(model)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        gradient_accumulation_steps=3,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=examples())
    trainer.add_callback(callback)  # which no event of the Trainer's making reaches
    trainer.add_callback(ends)
    with contextlib.suppress(KeyboardInterrupt, torch.OutOfMemoryError):
        trainer.train()
    assert trainer.state.global_step == 0
    for layer in converted_modules(model).values():
        assert layer.runtime.weight_state.held is None
    model.load_state_dict({name: t * 0.9 for name, t in model.state_dict().items()})
    with fq.hold(model):
        pass


@pytest.mark.parametrize("recipe", every_second(["nvfp4", "fp8_delayed"], 1))
def test_resume_goes_on(recipe: str, tmp_path: Path):
    """If false, a resumed training has other random bits, histories of amaxes or moved products
    than an undisturbed one."""
    reference = _converted(recipe)
    loop(reference)
    for step in (1, 2) if EVERYTHING else (2,):
        out = tmp_path / str(step)
        _trainer(out, recipe, max_steps=step, save_strategy="steps", save_steps=step)
        resumed = _trainer(out, recipe, resume=True)
        _assert_same(resumed.model, reference)
    moved = tmp_path / "moved"
    shutil.move(out, moved)
    with pytest.raises(ValueError, match="resume_from"):
        _trainer(out, recipe, resume=str(moved / "checkpoint-2"))


def test_a_training_resumes_under_another_recipe_on_request(tmp_path: Path):
    """If false, what the error of a resume advises cannot be done by who uses a Trainer, and a run
    in bf16 cannot go on in FP8."""
    _trainer(tmp_path, "fp8_delayed", max_steps=1, save_strategy="steps", save_steps=1)
    for case in ("another recipe", "no state"):
        with pytest.raises(ValueError, match="allow_recipe_change=True"):
            _trainer(tmp_path, "mxfp8", resume=True)
        trainer = _trainer(tmp_path, "mxfp8", resume=True, options={"allow_recipe_change": True})
        assert trainer.state.global_step == STEPS and len(_losses(trainer)) == STEPS, case
        assert fq.state_dict(trainer.model)["step"] == STEPS
        (tmp_path / "checkpoint-1" / "fsdp_quant.pt").unlink(missing_ok=True)


class _Board(transformers.TrainerCallback):
    """What a reporter of the Trainer (W&B, TensorBoard) is given."""

    def __init__(self):
        self.given: list[tuple[int, dict]] = []

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        self.given.append((state.global_step, logs))


def test_inspected_numbers_go_to_the_reporters_of_the_trainer(tmp_path: Path, capsys, monkeypatch):
    """If false, errors of codes are in a file and not on the dashboard, under other steps, fill the
    console, each checkpoint's history or the memory, or are measured for nobody."""
    board, made = _Board(), []
    keep = functools.wraps(fq.inspect)(lambda *a, **o: made.append(fq.inspect(*a, **o)) or made[-1])
    monkeypatch.setattr(fq.integrations.transformers, "inspect", keep)
    options = {"inspect": {"every": 2, "layers": "*.down_proj"}}
    with pytest.raises(ValueError, match="nobody reads .* report_to=\\[\\]"):
        _trainer(tmp_path, "mxfp8", options=options)
    trainer = _trainer(tmp_path, "mxfp8", callbacks=[board], options=options, disable_tqdm=False)
    sampled = {step: logs for step, logs in board.given if any("/sqnr_db" in name for name in logs)}
    assert list(sampled) == [1 + s for s in range(0, STEPS, 2)]
    assert all(name.startswith("fsdp_quant/model.layers.") for name in sampled[1])
    assert sampled[1]["fsdp_quant/model.layers.0.mlp.down_proj/input.rowwise/sqnr_db"] > 20
    assert not any("fsdp_quant" in name for entry in trainer.state.log_history for name in entry)
    assert "sqnr_db" not in capsys.readouterr().out
    assert len(_losses(trainer)) == STEPS and len(board.given) > STEPS
    assert len(made) == 1 and made[0].latest and not made[0].records


def test_a_report_of_a_trainer_has_its_loss(tmp_path: Path):
    """If false, `fsdp_quant report` of a Trainer's run draws no loss next to the layers' errors."""
    path = tmp_path / "run.jsonl"
    trainer = _trainer(tmp_path, "mxfp8", options={"inspect": {"every": 2, "path": path}})
    written = [json.loads(line) for line in path.read_text().splitlines()]
    scalars = [(entry["step"], entry["values"]) for entry in written if entry["kind"] == "scalars"]
    assert scalars == [(s, {"loss": loss}) for s, loss in enumerate(_losses(trainer))]


def test_adapters_over_codes_resume_as_the_page_writes(tmp_path: Path):
    """If false, LoRA of docs/finetuning.md resumes with the random bits of its first steps."""
    peft = pytest.importorskip("peft")

    def model():
        base = fq.convert(llama(), "nvfp4", skip=["lm_head"]).requires_grad_(False)
        fq.freeze(base)
        torch.manual_seed(0)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))

    want = _trainer(tmp_path / "whole", "", model()).model
    _trainer(tmp_path, "", model(), max_steps=2, save_strategy="steps", save_steps=2)
    got = _trainer(tmp_path, "", model(), resume=True).model
    for (name, a), b in zip(got.named_parameters(), want.parameters(), strict=True):
        if b.requires_grad:
            assert_same_bytes(a, b, name)
    page = (Path(fq.__file__).parents[1] / "docs/finetuning.md").read_text()
    assert "Callback()" in page.partition("## In full")[0]


def test_skipped_step_leaves_nothing(tmp_path: Path):
    """If false, gradients under a loss scale that overflowed scale what later steps quantize."""
    reference, model = _converted("fp8_delayed"), llama()
    expected = loop(reference, scaler=overflow_once(reference))
    trainer = _trainer(tmp_path, "fp8_delayed", model, scaler=overflow_once(model))
    assert _losses(trainer) == expected
    _assert_same(trainer.model, reference)


KINDS = {
    "llama": llama,
    "bf16": lambda: llama().bfloat16(),
    "tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_is_plain(kind: str, tmp_path: Path):
    """If false, what was trained does not load without this library, or loads with other values."""
    plain = KINDS[kind]()
    converted = fq.convert(copy.deepcopy(plain), fq.recipes.mxfp8())
    for model, folder in ((plain, tmp_path / "plain"), (converted, tmp_path / "converted")):
        model.save_pretrained(folder)
    before, after = (
        safetensors.load_file(tmp_path / name / "model.safetensors")
        for name in ("plain", "converted")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert_same_bytes(after[name], value, name)
    loaded, info = type(plain).from_pretrained(tmp_path / "converted", output_loading_info=True)
    assert not any(info.values()) and not converted_modules(loaded)
    _assert_same(loaded, plain)


# What the Trainer is told beside the defaults; each trains as `fully_shard` by hand. "rank 0": the
# others begin with other weights, which they are sent.
SHARDED = {
    "generates and evaluates": dict(
        callbacks=[_Generate(False)], eval_strategy="steps", eval_steps=1
    ),
    "checkpointed": dict(gradient_checkpointing=True),
    "checkpointed, reentrant": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "checkpointed by accelerate": dict(fsdp=dict(activation_checkpointing=True)),
    "rank 0": dict(fsdp=dict(cpu_ram_efficient_loading=True)),
    "bf16": dict(bf16=True),
}


# CI runs those whose path through FSDP2 no other one shares, and one kind of state a recipe.
IN_CI = ["checkpointed, reentrant", "rank 0", "bf16"]  # fp8_delayed generates and evaluates
STATES = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]


def _sharded(
    rank: int, world: int, recipe: str, cases: list[str], states: list[str], folder: str
) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    take_fsdp_path_on_cpu()

    def train(
        case: str,
        seed: int = 0,
        fsdp: dict | None = None,
        state_dict_type: str = "FULL_STATE_DICT",
        **arguments,
    ):
        config = dict(
            fsdp_version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_layer_cls_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            state_dict_type=state_dict_type,
        ) | (fsdp or {})
        return _trainer(
            Path(folder) / case, recipe, llama(seed), fsdp=True, fsdp_config=config, **arguments
        )

    reference = shard_by_hand(_converted(recipe))
    loop(reference, rank, world)
    for case in cases:
        arguments = SHARDED[case]
        trainer = train(case, seed=rank if case == "rank 0" else 0, **arguments)
        if case == "bf16":
            by_hand = shard_by_hand(
                _converted(recipe), trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
            )
            loop(by_hand, rank, world)
            _assert_same(trainer.model, by_hand)
        else:
            _assert_same(trainer.model, reference)
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    _assert_same(trainer.model, transformers.LlamaForCausalLM.from_pretrained(f"{folder}/saved"))
    for kind in states:
        train(kind, state_dict_type=kind, max_steps=2, save_strategy="steps", save_steps=2)
        resumed = train(kind, state_dict_type=kind, resume=True)
        _assert_same(resumed.model, reference)


@pytest.mark.parametrize(
    "recipe, cases, states",
    [
        ("mxfp8", list(SHARDED) if EVERYTHING else IN_CI, STATES if EVERYTHING else STATES[1:]),
        ("fp8_delayed", ["generates and evaluates"], STATES if EVERYTHING else STATES[:1]),
    ],
    ids=["mxfp8", "fp8_delayed"],
)
def test_sharded_trainer_is_a_loop(
    recipe: str, cases: list[str], states: list[str], tmp_path: Path
):
    """If false, the Trainer trains other weights under `fully_shard` than a loop, saves others, or
    resumes with others."""
    run_ranks(2, _sharded, recipe, cases, states, str(tmp_path))

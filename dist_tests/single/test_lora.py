# SPDX-License-Identifier: Apache-2.0
"""LoRA over codes: docs/finetune_quantized.md runs, and `dist_tests.bench.lora` measures what it
says: a smoke test of its arms at toy sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fsdp_quant as fq

pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

from dist_tests.bench import llama, lora  # noqa: E402
from dist_tests.laws import assert_same_bytes  # noqa: E402
from dist_tests.single.test_export_transformers import llama as small_llama  # noqa: E402

TINY = ["--size", "tiny", "--layers", "1", "--eager", "--steps", "1"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(llama, "HOST_STEPS", 1)
    monkeypatch.setattr(llama, "CUDA", False)
    monkeypatch.setattr(lora, "CUDA", False)


def test_arms_train_adapters_and_count_the_bytes_of_the_base(monkeypatch):
    """If false, the bench divides the memory of another base by its weights, keeps something else
    than an arm says, trains another model, or one arm that fails costs the others."""
    args = lora.parsed([*TINY, "--arms", "mxfp8,torchao"])
    arms = lora.chosen_arms(args)
    assert arms == ["bf16", "mxfp8, codes", "mxfp8, operands", "torchao"]
    rows = [lora.measure(name, args) for name in arms[:3]]
    for row, size in zip(rows, (2.0, 1.031, 2.062)):
        assert row["bytes_per_weight"] == pytest.approx(size, rel=0.01)
        assert abs(row["loss"] - rows[0]["loss"]) < 0.02
    monkeypatch.setattr(llama, "NO_TORCHAO", "ImportError: there is none")
    rows.append(lora.measure("torchao", args))
    *_, failed = lora.table(rows)
    assert failed.split() == "torchao failed: ImportError: ImportError: there is none".split()


def test_all_weights_train_in_quantization_aware_arms():
    """If false, --qat compares training of adapters, or of weights that are frozen."""
    args = lora.parsed([*TINY, "--qat", "--arms", "qat(mxfp4)"])
    assert lora.chosen_arms(args) == ["bf16", "qat(mxfp4)"]
    row = lora.measure("qat(mxfp4)", args)
    assert row["bytes_per_weight"] == pytest.approx(2.0, rel=0.01)
    net, optimizer = lora.build(llama.Arm("qat(mxfp4)", "qat(mxfp4)"), args, torch.device("cpu"))
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    assert trained == {*net.parameters()} and row["loss"] == pytest.approx(5.5, abs=0.5)


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    """If false, the lines that a user copies to train over a checkpoint of codes fail, or the base
    has other codes than the file."""
    page = Path(__file__).parents[2] / "docs" / "finetune_quantized.md"
    model = small_llama()
    monkeypatch.chdir(tmp_path)  # in it a file as DeepSeek's, whose scales are no powers of two
    fq.convert(model, fq.recipes.fp8_block(pow2=False), skip=["lm_head"])
    fq.export(model, "checkpoint", "fp8")
    scope: dict = {"__name__": "page"}
    load, train = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(load, page.name, "exec"), scope)
    fq.unfreeze(scope["model"])
    base = scope["model"].base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    file = safetensors.load_file("checkpoint/model.safetensors")
    codes, scales = (
        file[f"model.layers.0.mlp.up_proj.{n}"] for n in ("weight", "weight_scale_inv")
    )
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert_same_bytes(base.detach(), (codes.float() * scales).bfloat16())
    exec(compile(load, page.name, "exec"), scope)
    exec(compile(train, page.name, "exec"), scope)
    assert (tmp_path / "merged" / "model.safetensors").exists()

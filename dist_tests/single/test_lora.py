# SPDX-License-Identifier: Apache-2.0
"""`dist_tests.bench.lora` measures what it says: a smoke test of its arms at toy sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from dist_tests.bench import llama, lora  # noqa: E402

TINY = ["--size", "tiny", "--layers", "1", "--eager", "--steps", "1"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(llama, "HOST_STEPS", 1)
    monkeypatch.setattr(llama, "CUDA", False)
    monkeypatch.setattr(lora, "CUDA", False)


def test_arms_train_adapters_and_count_the_bytes_of_the_base(monkeypatch):
    """If false, the bench divides the memory of another base by its weights, an arm trains the
    base or another model, or one that fails costs the others."""
    args = lora.parsed([*TINY, "--arms", "nvfp4,torchao"])
    rows = [lora.measure("bf16", args), lora.measure("nvfp4, operands", args)]
    assert lora.chosen_arms(args) == ["bf16", "nvfp4, codes", "nvfp4, operands", "torchao"]
    for row, size in zip(rows, (2.0, 0.504)):
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

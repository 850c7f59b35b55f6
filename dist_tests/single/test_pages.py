# SPDX-License-Identifier: Apache-2.0
"""Every program of every page runs, with the output that the page gives; what a page supposes ("a
model, and its optimizer") is in `GIVEN`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import fsdp_quant as fq
from dist_tests import trainers
from dist_tests.pages import DOCS, ROOT, blocks, run_page
from fsdp_quant.__main__ import main
from fsdp_quant.context import STEP

# Pages that other tests run.
ELSEWHERE = {
    "checkpoints.md": "single/test_files.py",
    "coming_from_megatron.md": "single/test_documents.py",
    "coming_from_torchao.md": "single/test_documents.py",
    "coming_from_transformer_engine.md": "single/test_documents.py",
    "diverging_run.md": "single/test_advise.py",
    "export.md": "single/test_export_transformers.py",
    "finetune_quantized.md": "single/test_lora.py",
    "first_training.md": "single/test_documents.py",
    "flat_buffers.md": "single/test_hooks.py",
    "megatron.md": "single/test_documents.py",
    "qat.md": "single/test_qat.py",
    "tensor_parallelism.md": "multi/test_documents.py",
}
# Blocks ```py, which do not run, and why.
EXCERPTS = {
    "architecture.md": "what linear/program.py does, in short",
    "captured_steps.md": "torch.cuda.graph needs a GPU; kernels/test_cuda_graphs.py captures steps",
    "coming_from_torchao.md": "a program of torchao",
    "coming_from_transformer_engine.md": "a program of TransformerEngine",
    "megatron.md": "needs Megatron-LM; contract/megatron.py builds such a spec",
    "torchtitan.md": "needs torchtitan; multi/test_torchtitan.py trains with these calls",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and a head, as pages suppose."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def a_rank() -> dict:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"torch": torch, "nn": nn, "dist": dist, "fq": fq, "fully_shard": fully_shard}


def a_sharded_net() -> dict:
    return a_rank() | {"model": Net(), "build": Net, "recipe": fq.recipes.mxfp8()}


def a_net_in_training() -> dict:
    model = fq.convert(Net(), "mxfp8")
    optimizer = torch.optim.AdamW(model.parameters())
    return {"torch": torch, "model": model, "optimizer": optimizer, "batch": torch.randn(8, 64)}


def a_language_model() -> dict:
    pytest.importorskip("transformers")
    model = trainers.llama()
    batch = {"input_ids": trainers.batch(0), "labels": trainers.batch(0)}
    return {
        "torch": torch,
        "fq": fq,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [batch, batch],
        "data": [(trainers.batch(0), trainers.batch(0))] * 2,
        "rows": trainers.examples(8),
    }


def a_converted_model() -> dict:
    given = a_language_model()
    fq.convert(given["model"], "mxfp8")
    return given


def a_sharded_language_model() -> dict:
    return a_rank() | a_language_model()


def short(arguments: type) -> Callable:
    """TrainingArguments of a run that a test has time for, on a CPU."""
    few = {"max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return lambda *args, **options: arguments(*args, **options | few)


def a_trainer() -> dict:
    """What the pages on trainers suppose: a model, its data, and what they import."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    accelerate = pytest.importorskip("accelerate")
    given = a_language_model()
    names = {n: getattr(peft, n) for n in ("LoraConfig", "get_peft_model")}
    names |= {"Accelerator": accelerate.Accelerator, "Trainer": transformers.Trainer}
    return given | names | {"arguments": transformers.TrainingArguments("out")}


def a_lightning_module() -> dict:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, x):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters())

    rows = [torch.randn(64) for _ in range(8)]
    return {"lightning": lightning, "module": Module(), "batches": DataLoader(rows, batch_size=4)}


def a_model_to_hold() -> dict:
    given = a_trainer()
    base, prompt = a_language_model()["model"], torch.tensor([[3, 4, 5]])
    given["model"].generation_config.max_new_tokens = 3
    fq.convert(given["model"], "mxfp8")
    return given | {"base": base, "prompt": prompt}


def an_engine() -> dict:
    class Engine:
        def load_weights(self, bucket: list) -> None:
            assert all(isinstance(name, str) for name, _ in bucket)

    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, vocab_size=64)
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    return {"model": transformers.LlamaForCausalLM(config), "engine": Engine()}


def experts() -> dict:
    given, sizes = a_rank(), {"num_experts": 2, "hidden_size": 64, "ffn_size": 32}
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
    chosen, weights = torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.rand(3, 2)
    tokens = {"x": torch.randn(3, 64), "splits": [3, 3], "chosen": chosen, "weights": weights}
    return given | sizes | tokens | {"mesh": mesh, "shared_experts": nn.Linear(64, 64)}


def operands() -> dict:
    w = fq.numerics.Quantizer("mxfp8").quantize(torch.randn(32, 64))
    return {"x": torch.randn(16, 64), "w": w}


# Page -> what it supposes.
GIVEN: dict[str, Callable[[], dict]] = {
    "README.md": a_sharded_language_model,
    "add_a_format.md": dict,
    "captured_steps.md": a_converted_model,
    "experts.md": dict,
    "faults.md": a_net_in_training,
    "finetuning.md": a_trainer,
    "fsdp2.md": a_sharded_net,
    "holding_codes.md": a_model_to_hold,
    "index.md": dict,
    "numerics.md": dict,
    "optimizers.md": a_sharded_net,
    "parallelism.md": experts,
    "reinforcement_learning.md": an_engine,
    "reference/checks.md": dict,
    "several_nodes.md": a_converted_model,
    "steps.md": dict,
    "three_gemms.md": operands,
    "trainers.md": lambda: a_trainer() | a_lightning_module(),
}
# Pages whose programs each begin with what the page supposes, and do not follow one another.
APART = {"finetuning.md", "holding_codes.md", "trainers.md"}
ON_TWO_RANKS = "fsdp=True"  # the program of trainers.md that multi/test_documents.py runs


def path_of(page: str) -> Path:
    return ROOT / page if page == "README.md" else DOCS / page


@pytest.fixture
def restored(tmp_path, monkeypatch):
    """A page writes into a folder of its own, and leaves no process group, no count of steps and no
    setting."""
    from torch._functorch.config import patch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)  # bits are those of eager mode
    before = STEP.counted_by_hand
    fq.inspection.reset_receipt()
    with patch(activation_memory_budget=1.0, is_non_builtin_to_include=False):
        yield
    STEP.counted_by_hand = before
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", GIVEN)
@pytest.mark.filterwarnings("ignore")
def test_the_programs_of_a_page_run(page: str, restored, monkeypatch):
    """If false, a page shows a program that fails, or that prints something else."""
    if page not in APART:
        run_page(path_of(page), GIVEN[page]())
        return
    transformers = pytest.importorskip("transformers")
    few = short(transformers.TrainingArguments)
    monkeypatch.setattr(transformers, "TrainingArguments", few)
    for i, (kind, text, _) in enumerate(blocks(path_of(page))):
        if kind == "python" and ON_TWO_RANKS not in text:
            run_page(path_of(page), GIVEN[page](), slice(i, i + 1))


def test_every_program_of_every_page_is_run():
    """If false, a page shows programs that no test runs, and nobody said so."""
    pages = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
    kinds = {
        name: {kind for kind, *_ in blocks(path)}
        for name, path in {**pages, "README.md": ROOT / "README.md"}.items()
    }
    programs = {name for name, found in kinds.items() if "python" in found}
    assert programs == {*GIVEN, *ELSEWHERE}
    assert {name for name, found in kinds.items() if "py" in found} == set(EXCERPTS)
    for name, test in ELSEWHERE.items():
        subject = name.removesuffix(".md").removeprefix("coming_from_")
        assert subject in (ROOT / "dist_tests" / test).read_text(), name


def commands() -> list[str]:
    """Commands of the pages that need neither a GPU nor time."""
    shells = [t for page in DOCS.rglob("*.md") for kind, t, _ in blocks(page) if kind == "bash"]
    lines = {line.partition("#")[0].strip() for text in shells for line in text.splitlines()}
    return sorted(line for line in lines if re.match(r"python -m fsdp_quant (doctor|plan)\b", line))


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_runs(command: str, capsys):
    """If false, a page gives a command with arguments that it does not have."""
    assert main(shlex.split(command)[3:]) == 0
    assert capsys.readouterr().out

# SPDX-License-Identifier: Apache-2.0
"""Documents about several ranks run as they are written."""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import fsdp_quant as fq
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from dist_tests.pages import DOCS, ROOT, blocks, run_page
from dist_tests.single import test_pages
from dist_tests.trainers import take_fsdp_path_on_cpu


def _page(rank: int, world: int) -> int:
    # the harness did, and will
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    scope = run_page(DOCS / "tensor_parallelism.md", {})
    return sum(scope["fq"].receipt().sequence.values())


@on_cpu
def test_tensor_parallelism_in_ten_lines():
    """If false, the tutorial fails, or gathers no codes."""
    assert all(sent > 0 for sent in run_ranks(2, _page))


def _trainer(rank: int, world: int, folder: str) -> int:
    import transformers

    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    take_fsdp_path_on_cpu()
    transformers.TrainingArguments = test_pages.short(transformers.TrainingArguments)
    page = DOCS / "trainers.md"
    (index,) = (i for i, (_, t, _) in enumerate(blocks(page)) if test_pages.ON_TWO_RANKS in t)
    scope = run_page(page, test_pages.a_trainer(), slice(index, index + 1))
    layer = scope["model"].model.layers[0]
    weight = layer.mlp.up_proj.weight
    assert isinstance(layer, FSDPModule) and weight.to_local().shape[0] * world == weight.shape[0]
    return sum(fq.receipt().gathers.values())


@on_cpu
def test_a_trainer_under_fsdp2_gathers_codes(tmp_path):
    """If false, the page launches a Trainer that fails, shards nothing, or gathers bf16."""
    assert all(sent > 0 for sent in run_ranks(2, _trainer, str(tmp_path)))


def _example(rank: int, world: int) -> list[float]:
    spec = importlib.util.spec_from_file_location(
        "fully_shard_example", ROOT / "examples/fully_shard.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    dist.init_process_group = lambda *_: None
    if DEVICE == "cpu":
        torch.cuda.is_available = lambda: False  # its ranks are on gloo
    return example.main(["--steps", "4"])


def test_the_example_of_fully_shard_learns():
    """If false, an example of README fails, or trains nothing."""
    for losses in run_ranks(2, _example):
        assert losses[-1] < losses[0]

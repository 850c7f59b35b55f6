# SPDX-License-Identifier: Apache-2.0
"""Documents about several ranks run as they are written."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch
import torch.distributed as dist

from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks

ROOT = Path(__file__).parents[2]


def _page(rank: int, world: int) -> int:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tensor_parallelism.md").read_text(), re.S
    )
    # the harness did, and will
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    scope: dict = {"__name__": "page"}
    exec(compile(block, "docs/tensor_parallelism.md", "exec"), scope)
    return sum(scope["fq"].receipt().sequence.values())


@on_cpu
def test_tensor_parallelism_in_ten_lines():
    """If false, the tutorial fails, or gathers no codes."""
    assert all(sent > 0 for sent in run_ranks(2, _page))


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

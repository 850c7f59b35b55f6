# SPDX-License-Identifier: Apache-2.0
"""What benches of several GPUs share: their start, steps as CUDA graphs, a row that may fail on one
rank, and their end."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def start(backend: str = "nccl") -> tuple[torch.device, Callable[[str], None]]:
    """(this rank's device, what rank 0 prints with) under torchrun: a GPU, or with "gloo" a CPU."""
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise SystemExit("error: there is no GPU; the times of this bench are a GPU's")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    return device, say


def gather_ahead(layers: Sequence, count: int = 1) -> None:
    """Let the forward of each layer under `fully_shard` gather the next ones before it runs."""
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[i + 1 : i + 1 + count]))


def captured(step: Callable[[], object], aside: torch.cuda.Stream) -> Callable[[], None]:
    """The step as one CUDA graph, collectives included; it must have run on `aside` before, the
    current stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        step()
    return graph.replay


def table(
    arms: Sequence[str],
    base: str,
    measure: Callable[[str], dict],
    line: Callable[[dict, Callable[[str], float]], str],
    device: torch.device,
    say: Callable[[str], None],
    **facts,
) -> list[dict]:
    """A row an arm, said as it is known; an arm that fails on some rank does not cost the others.
    Every rank calls it, or one process without a process group.

    measure:  arm -> what was measured, "ms" among it. facts: of rows that fail.
    line:     (row, over) -> what is said of it; over(key) is what `base` has of a number over what
              the row has, NaN before `base` was measured.
    """
    rows: list[dict] = []
    for arm in arms:
        row, error = attempt({"arm": arm} | facts, lambda: measure(arm), device)
        rows.append(row)
        if error is not None:
            say(f"{arm:21} failed: {error[:300]}")
            continue
        of_base = next((r for r in rows if r["arm"] == base and "ms" in r), {})
        say(line(row, lambda key: of_base.get(key, math.nan) / row[key]))
    return rows


def attempt(row: dict, measure: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
    """(what was measured, why some rank failed or None); `row` and the error where this one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    failed, reason = torch.zeros(1, device=device), None
    try:
        row = measure()
    except Exception as error:  # of any kind: one arm does not cost the others
        reason = f"{type(error).__name__}: {error}"
        row, failed = row | {"error": reason}, failed + 1
    if dist.is_initialized():
        dist.all_reduce(failed)
    return row, (reason or "on another rank") if failed else None


def finish(rows: list[dict], path: str | None) -> None:
    """Rank 0, or the only process, writes the rows to `path`, if there is one."""
    several = dist.is_initialized()
    if path and not (several and dist.get_rank()):
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)
    if several:
        dist.destroy_process_group()

"""What benches of several GPUs share: their start, steps as CUDA graphs, a row that may fail on one rank, and their end."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable

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


def captured(step: Callable[[], object], aside: torch.cuda.Stream) -> Callable[[], None]:
    """The step as one CUDA graph, collectives included; it must have run on `aside` before, the current stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        step()
    return graph.replay


def attempt(row: dict, measure: Callable[[], dict], device: torch.device) -> tuple[dict, str | None]:
    """(what was measured, why some rank failed or None); `row` and the error where this one did. Every rank calls it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    failed = torch.zeros(1, device=device)
    try:
        row = measure()
    except Exception as error:  # of any kind: one arm does not cost the others
        row, failed = row | {"error": f"{type(error).__name__}: {error}"}, failed + 1
    dist.all_reduce(failed)
    return row, row.get("error", "on another rank") if failed else None


def finish(rows: list[dict], path: str | None) -> None:
    """Rank 0 writes the rows to `path`, if there is one."""
    if path and dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)
    dist.destroy_process_group()

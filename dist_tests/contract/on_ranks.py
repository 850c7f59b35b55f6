# SPDX-License-Identifier: Apache-2.0
"""What a rank of a contract does: meet the others, run the program, write its curves.

python -m torch.distributed.run ... -m dist_tests.contract.on_ranks MODULE.FUNCTION FOLDER
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pkgutil
import statistics
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import dist_tests.contract.shared_gpu  # noqa: F401 - a backend
import fsdp_quant as fq
from fsdp_quant.counters import counters

CHANGE = 1e-4  # of initial weights, with --changed


@dataclass
class Curve:
    """Losses by step, the median step in ms, and the losses of the last steps, resumed."""

    losses: list[float]
    ms: float | None = None
    resumed: list[float] = field(default_factory=list)


@dataclass
class Run:
    """Where a program runs, and how long.

    folder:  the same on every rank, empty.
    size:    "small", or "wide": 8B-shaped layers.
    change:  of the initial weights, of their size, in the mean.
    """

    device: torch.device
    rank: int
    world: int
    folder: str
    steps: int
    recipe: str
    size: str
    change: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, cpu: dict, gpu: dict, wide: dict | None = None) -> dict:
        """Sizes of a model and its batch: where it runs, and as long as the user wants it."""
        if self.size == "wide":
            return gpu | (wide or {})
        return gpu if self.on_gpu else cpu

    def changed(self, name: str, values: Tensor) -> Tensor:
        """Initial values of a parameter, changed."""
        if not self.change:
            return values
        generator = torch.Generator().manual_seed(zlib.crc32(f"change of {name}".encode()))
        noise = torch.randn(values.shape, generator=generator).to(values.device)
        return values * (1 + self.change * noise)

    def values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The initial values of a parameter, the same however ranks cut it: N(0, .02^2) of
        matrices, 1 of other weights, 0 of biases; changed."""
        if len(shape) < 2:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return self.changed(name, torch.randn(shape, generator=generator) * 0.02)

    def curve(self, step: Callable[[int], Tensor | float]) -> Curve:
        """The losses that step(i) returns, summed over the ranks that have one, over their
        number."""
        losses, times = [], []
        for i in range(self.steps):
            start = time.perf_counter()
            loss = float(step(i))
            if self.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            losses.append(self.mean(loss))
        return Curve(losses, median_ms(times))

    def mean(self, loss: float) -> float:
        """Over the ranks on which it is no nan."""
        known = loss == loss
        both = torch.tensor([loss if known else 0.0, float(known)], device=self.device)
        dist.all_reduce(both)
        return float(both[0] / both[1])


def median_ms(seconds: list[float]) -> float:
    """Of the second half of the steps."""
    return 1e3 * statistics.median(seconds[len(seconds) // 2 :])


def tokens(step: int, rows: int, length: int, vocabulary: int, device=None) -> Tensor:
    """Rows [rows, length] of a step that can be learned: each counts by a stride of its own."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocabulary, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    return ((first + stride * torch.arange(length)) % vocabulary).to(device)


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--recipe", default="mxfp8", help="of fq.recipes, for our arm")
    parser.add_argument("--size", choices=("small", "wide"), default="small")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("--changed", action="store_true", help="start from other weights")
    add_settings(parser)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    faulthandler.enable()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        os.environ |= {"FSDP_QUANT_TEST_DEVICE": "cuda", "LOCAL_RANK": str(device.index)}
        if world > torch.cuda.device_count():
            dist.init_process_group("shared_gpu")
        else:
            dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    code = 0
    try:
        module, _, function = args.program.partition(".")
        program = pkgutil.resolve_name(f"dist_tests.contract.{module}:{function}")
        change = CHANGE if args.changed else 0.0
        run = Run(device, rank, world, args.folder, args.steps, args.recipe, args.size, change)
        curves = program(run)
        if not counters.total("quantize"):
            raise AssertionError(f"{args.program} quantized nothing: its arm {run.recipe} is bf16")
        if rank == 0:
            arms = {arm: asdict(curve) for arm, curve in curves.items()}
            result = {"arms": arms, "receipt": str(fq.receipt())}
            Path(args.folder, "result.json").write_text(json.dumps(result))
        dist.barrier()
    except BaseException:
        Path(args.folder, f"failed_{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        code = 1
    os._exit(code)  # gloo workers sometimes abort in their destructors


if __name__ == "__main__":
    main()

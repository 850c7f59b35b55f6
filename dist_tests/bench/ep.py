# SPDX-License-Identifier: Apache-2.0
"""SwiGLU experts over the ranks of expert parallelism, over bf16 experts (`torch._grouped_mm`)
under the same style.

    torchrun --nproc-per-node 2 -m dist_tests.bench.ep [--arms bf16 fp8_current ...] [--experts 32]
    [--json FILE]

Forward, backward and an SGD step of bf16 parameters (so that weights are quantized in each step);
each rank has `tokens` rows in unequal groups. Printed: ms, ms of the forward alone without
gradients, MiB that a rank's tokens take to their experts and back. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests.bench import ranks
from fsdp_quant import recipes

BASE = "bf16"
ARMS = {  # recipe, options of the style
    "fp8_current": (recipes.fp8_current, {"gradients": "auto"}),
    "fp8_current, bf16 sent": (recipes.fp8_current, {"transport": "high_precision"}),
    "mxfp8": (recipes.mxfp8, {}),
    "mxfp8 dequantized": (lambda: recipes.mxfp8(backward_override="dequantized"), {}),
    "fp8_block": (recipes.fp8_block, {}),
    "hybrid mxfp8 nvfp4": (lambda: recipes.hybrid("mxfp8", "nvfp4"), {"pad": True}),
}


class Packed(nn.Module):
    """One projection of every expert, [E, N, K]."""

    def __init__(self, experts: int, n: int, k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, n, k) * k**-0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.to_local().transpose(1, 2), offs=ends)


class Experts(nn.Module):
    def __init__(self, experts: int, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = Packed(experts, hidden, dim), Packed(experts, hidden, dim)
        self.down = Packed(experts, dim, hidden)

    def forward(self, x: Tensor, splits) -> Tensor:
        return self.down(F.silu(self.gate(x, splits)) * self.up(x, splits), splits)


def build(arm: str, args, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        net = Experts(args.experts, args.dim, args.hidden).bfloat16()
    recipe, options = ARMS.get(arm, (None, {}))
    if recipe is not None:
        fq.convert(net, recipe(), grouped=["gate", "up", "down"])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    return parallelize_module(
        net, mesh, fq.parallel.ExpertParallel(reads=["gate", "up"], writes="down", **options)
    )


def measure(arm: str, args, device: torch.device) -> dict:
    net = build(arm, args, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, foreach=False)
    weights = (
        torch.rand(args.experts, generator=torch.Generator().manual_seed(dist.get_rank())) + 0.5
    )
    ends = (weights.cumsum(0) / weights.sum() * args.tokens).int()
    ends[-1] = args.tokens
    splits = (
        ends.to(device) if arm == BASE else torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    )
    x = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16)

    def step() -> None:
        net(x, splits).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    def forward() -> None:
        with torch.no_grad():
            net(x, splits)

    for _ in range(3):
        step()
        forward()
    fq.reset_receipt()
    step()
    sent = {" ".join(key): size for key, size in fq.receipt().dispatch.items()}
    return {
        "arm": arm,
        "ms": timed(step, args.steps),
        "forward_ms": timed(forward, args.steps),
        "sent": sent,
    }


def timed(call, steps: int) -> float:
    """Median ms of a call on the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--arms", nargs="+", default=[BASE, *ARMS], choices=[BASE, *ARMS])
    for name, value in {
        "tokens": 16384,
        "dim": 4096,
        "hidden": 2048,
        "experts": 32,
        "steps": 20,
    }.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--json", help="write all numbers to this file")
    args = made.parse_args()
    device, say = ranks.start()
    say(
        f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}; "
        f"{args.experts} experts {args.dim} -> {args.hidden}, {args.tokens} tokens a rank, medians "
        f"of {args.steps} steps"
    )
    say(f"{'arm':24} {'ms':>8} {'x bf16':>7} {'forward':>8} {'x bf16':>7}  MiB sent")

    def line(row: dict, over) -> str:
        moved = ", ".join(
            f"{kind} {size / 2**20:.1f}" for kind, size in sorted(row["sent"].items())
        )
        times = (
            f"{row['ms']:8.2f} {over('ms'):7.3f} {row['forward_ms']:8.2f} {over('forward_ms'):7.3f}"
        )
        return f"{row['arm']:24} {times}  {moved}"

    ranks.finish(
        ranks.table(args.arms, BASE, lambda arm: measure(arm, args, device), line, device, say),
        args.json,
    )


if __name__ == "__main__":
    main()

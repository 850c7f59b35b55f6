# SPDX-License-Identifier: Apache-2.0
"""A layer of experts over the ranks of expert parallelism: tokens to their experts, SwiGLU, and the
weighted sum of what comes back; over the same layer of torch alone in bf16.

    torchrun --nproc-per-node 4 -m dist_tests.bench.ep [--arms bf16 mxfp8 ...] [--experts 32]
    [--copies 8] [--load even] [--json FILE]

    torchrun --nproc-per-node 2 -m dist_tests.bench.ep --backend gloo --tokens 64 --dim 256
    --hidden 128 --experts 4 --copies 2 --steps 2 --rounds 2          (on a CPU: times say nothing)

Each rank has `tokens / copies` tokens, each of which goes to `copies` experts. bf16: a gather, an
all-to-all of counts that the host reads, one of tokens, `torch._grouped_mm`, one of results, and a
weighted sum; backwards of gathers are gathers. Ours: `fq.GroupedMLP` under
`fq.parallel.ExpertParallel`, called with routes and weights. Both multiply gate and up as one
weight, run eagerly, and share a compiled sort; SwiGLU and the weighted sum of bf16 are compiled too
(`--eager`: nothing is).

A step is forward, backward and SGD of bf16 parameters, so that weights are quantized in each.
Printed: ms of a step, of its forward and backward alone, of a forward without gradients, where arms
take turns; a step's all-to-alls, and MiB that a rank gives them. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

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
    "mxfp8": (recipes.mxfp8, {"gradients": "codes"}),
    "fp8_block": (recipes.fp8_block, {"gradients": "codes"}),
    "mxfp8, bf16 sent": (recipes.mxfp8, {"transport": "high_precision"}),
    "fp8_block, bf16 sent": (recipes.fp8_block, {"transport": "high_precision"}),
    "fp8_current": (recipes.fp8_current, {}),
    "hybrid mxfp8 nvfp4": (lambda: recipes.hybrid("mxfp8", "nvfp4"), {}),
}


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, back, the row behind each expert's last) of [T, k] experts."""
    chosen_of_rows, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(chosen_of_rows, numbers, right=True).int()
    places = torch.arange(len(order), device=chosen.device)
    return order, torch.empty_like(order).index_copy(0, order, places).view_as(chosen), ends


# bf16, of torch alone #


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, arriving, sent):
        ctx.sizes = sent, arriving
        y = x.new_empty(sum(arriving), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), arriving, sent)
        return y

    @staticmethod
    def backward(ctx, dy):
        return _AllToAll.apply(dy, *ctx.sizes), None, None


class _Gather(torch.autograd.Function):
    """Rows of x by index; `back` [len(x), k] are the rows of each row's k copies."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, dy):
        (back,) = ctx.saved_tensors
        dx = dy.index_select(0, back.flatten())
        return dx if back.shape[1] == 1 else dx.view(*back.shape, -1).sum(1), None, None


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Sums of rows [T, k, N]."""
    return (rows.float() * weights[..., None]).sum(1).to(rows.dtype)


class Plain(nn.Module):
    def __init__(self, args):
        super().__init__()
        held = args.experts // dist.get_world_size()
        self.gate_up = nn.Parameter(torch.randn(held, 2 * args.hidden, args.dim) * args.dim**-0.5)
        self.down = nn.Parameter(torch.randn(held, args.dim, args.hidden) * args.hidden**-0.5)
        self.swiglu, self.weighted = swiglu, weighted

    def forward(self, x: Tensor, order: Tensor, back: Tensor, ends: Tensor, weights) -> Tensor:
        world, copies = dist.get_world_size(), back.shape[1]
        counts = ends.diff(prepend=ends.new_zeros(1)).view(world, -1)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        sent, arriving = torch.stack([counts.sum(1), came.sum(1)]).tolist()
        rows = _AllToAll.apply(_Gather.apply(x, order // copies, back), arriving, sent)
        # by rank, then by expert -> by expert, then by rank
        sizes = came.T.flatten()
        starts = (came.flatten().cumsum(0) - came.flatten()).view_as(came).T.flatten()
        shifts = starts - (sizes.cumsum(0) - sizes)
        places = torch.arange(len(rows), device=x.device)
        by_expert = places + shifts.repeat_interleave(sizes, output_size=len(rows))
        by_rank = torch.empty_like(by_expert).index_copy(0, by_expert, places)
        held_ends = came.sum(0).cumsum(0, dtype=torch.int32)
        rows = _Gather.apply(rows, by_expert, by_rank[:, None])
        hidden = self.swiglu(torch._grouped_mm(rows, self.gate_up.mT, offs=held_ends))
        y = torch._grouped_mm(hidden, self.down.mT, offs=held_ends)
        y = _AllToAll.apply(_Gather.apply(y, by_rank, by_expert[:, None]), sent, arriving)
        y = _Gather.apply(y, back.flatten(), order[:, None])
        return self.weighted(y.view(*back.shape, -1), weights)


# Ours #


class Ours(nn.Module):
    def __init__(self, args, recipe, options: dict, device: torch.device):
        super().__init__()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
        style = fq.parallel.ExpertParallel(**options)
        shape = args.experts, args.dim, args.hidden
        experts = fq.GroupedMLP(*shape, dtype=torch.bfloat16, recipe=recipe())
        self.experts = parallelize_module(experts, mesh, style)

    def forward(self, x: Tensor, order: Tensor, back: Tensor, ends: Tensor, weights) -> Tensor:
        return self.experts(x, ends, routes=(order, back), weights=weights)


def sent_by(step: Callable[[], None]) -> list[int]:
    """Bytes that a rank gives each all-to-all of a step."""
    sizes, original = [], dist.all_to_all_single

    def counted(output: Tensor, rows: Tensor, *args, **options):
        sizes.append(rows.nbytes)
        return original(output, rows, *args, **options)

    dist.all_to_all_single = counted
    try:
        step()
    finally:
        dist.all_to_all_single = original
    return sizes


def prepared(arm: str, args, device: torch.device) -> tuple[dict, dict[str, Callable[[], None]]]:
    """Return what an arm sends, and its calls that are timed."""
    torch.manual_seed(0)
    with torch.device(device):
        net = Plain(args).bfloat16() if arm == BASE else Ours(args, *ARMS[arm], device)
    sorted_by, rank = sort, dist.get_rank()
    if not args.eager:
        sorted_by = torch.compile(sort)
        if arm == BASE:
            net.swiglu = torch.compile(swiglu, dynamic=True)
            net.weighted = torch.compile(weighted)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, foreach=False)
    g, tokens = torch.Generator().manual_seed(rank), args.tokens // args.copies
    favour = torch.rand(args.experts, generator=g) if args.load == "uneven" else 0
    scores = torch.rand(tokens, args.experts, generator=g) + favour
    weights, chosen = scores.to(device).topk(args.copies)
    weights = weights.bfloat16().requires_grad_()
    x = torch.randn(tokens, args.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, args.dim, device=device, dtype=torch.bfloat16)

    def forward_backward() -> None:
        net(x, *sorted_by(chosen, args.experts), weights).backward(dy)
        x.grad = weights.grad = None

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    def passes() -> None:
        forward_backward()
        optimizer.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            net(x, *sorted_by(chosen, args.experts), weights)

    for _ in range(3):
        step()
        forward()
    sent = sent_by(step)
    row = {"arm": arm, "all_to_alls": len(sent), "sent": sum(sent)}
    return row, {"ms": step, "passes_ms": passes, "forward_ms": forward}


def measured(args, device: torch.device) -> Callable[[str], dict]:
    """Return what was measured of each arm. Arms are timed in turns, since hosts change from minute
    to minute: the median of rounds of a round's median."""
    prepare = functools.partial(prepared, args=args, device=device)
    tried = {arm: ranks.attempt({}, functools.partial(prepare, arm), device) for arm in args.arms}
    arms = {arm: result for arm, (result, error) in tried.items() if error is None}
    rounds = [
        {
            arm: {name: timed(call, args.steps, device) for name, call in calls.items()}
            for arm, (_, calls) in arms.items()
        }
        for _ in range(args.rounds)
    ]

    def row_of(arm: str) -> dict:
        if arm not in arms:
            raise RuntimeError(tried[arm][1])
        row, calls = arms[arm]
        of_rounds = {name: [times[arm][name] for times in rounds] for name in calls}
        return row | {name: statistics.median(times) for name, times in of_rounds.items()}

    return row_of


def timed(call, steps: int, device: torch.device) -> float:
    """Median ms of a call on the device."""
    dist.barrier()
    if device.type == "cpu":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
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
    sizes = {"tokens": 16384, "dim": 4096, "hidden": 2048, "experts": 32, "copies": 8}
    sizes |= {"steps": 20, "rounds": 5}
    for name, value in sizes.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--load", default="uneven", choices=["even", "uneven"])
    made.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    made.add_argument("--eager", action="store_true", help="compile nothing")
    made.add_argument("--json", help="write all numbers to this file")
    args = made.parse_args()
    device, say = ranks.start(args.backend)
    args.eager |= device.type == "cpu"
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name()
    say(
        f"{dist.get_world_size()} x {where}, torch {torch.__version__}; {args.experts} experts "
        f"{args.dim} -> {args.hidden}, {args.tokens // args.copies} tokens a rank to {args.copies} "
        f"experts each, {args.load}, medians of {args.rounds} rounds of {args.steps} steps"
    )
    names = "ms", "passes_ms", "forward_ms"
    head = "".join(f"{name.removesuffix('_ms'):>9} {'x bf16':>7}" for name in names)
    say(f"{'arm':22}{head}  all-to-alls, MiB")

    def line(row: dict, over) -> str:
        times = "".join(f"{row[name]:9.2f} {over(name):7.3f}" for name in names)
        return f"{row['arm']:22}{times}  {row['all_to_alls']}, {row['sent'] / 2**20:.3g}"

    row_of = measured(args, device)
    ranks.finish(ranks.table(args.arms, BASE, row_of, line, device, say), args.json)


if __name__ == "__main__":
    main()

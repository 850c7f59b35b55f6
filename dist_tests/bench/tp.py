"""One Llama-70B-shaped layer under tensor and sequence parallelism, over compiled bf16 with the same styles.

    torchrun --nproc-per-node 4 -m dist_tests.bench.tp [--arms bf16 fp8_current mxfp8 ...] [--json FILE]

Forward, backward and an SGD step of bf16 parameters (so that weights are quantized in each step); the input and output are cut
along the sequence. Printed: ms, bytes a rank receives in all-gathers and reduce-scatters (codes and high precision), the time
in which only collectives ran ("exposed"), host ms, peak GiB. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests.bench import ranks
from dist_tests.bench.fsdp2 import MLP, RECIPES, Attention

BASE, EAGER = "bf16", "bf16 eager"
ARMS = RECIPES | {"fp8_row": fq.recipes.fp8_row, "identity": fq.recipes.identity}
FLOORS, AIMS = {"fp8_current": 1.15, "mxfp8": 1.1}, {"fp8_current": 1.3, "mxfp8": 1.25}
ITEMSIZE = {"Byte": 1, "Char": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8}
GIB = 2**30


class Layer(nn.Module):
    """Attention and SwiGLU, each behind its norm."""

    def __init__(self, args):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(args.dim), Attention(args.dim, args.heads, args.key_heads)
        self.mlp = MLP(args.dim, args.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


def build(arm: str, args, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device(device):
        net = Layer(args).bfloat16()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    ours = arm in ARMS
    styles = fq.parallel if ours else torch_styles
    if ours:
        fq.convert(net, ARMS[arm]())
    norm, column = functools.partial(styles.SequenceParallel, use_local_output=True), styles.ColwiseParallel
    row = functools.partial(styles.RowwiseParallel, output_layouts=Shard(1))
    prepare = styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    net.attention.heads //= mesh.size()
    net.attention.key_heads //= mesh.size()
    plan = {
        "norm": norm(), "attention": prepare, "attention.q": column(), "attention.k": column(), "attention.v": column(),
        "attention.out": row(), "mlp.norm": styles.SequenceParallel(), "mlp.down": row(),
    }
    # The norm's output is read by gate and up: torch gathers it once where both are given one whole tensor.
    gathered = column(input_layouts=Shard(1)) if ours else column()
    plan |= {"mlp.gate": gathered, "mlp.up": gathered}
    if not ours:
        plan["mlp.norm"] = Gathered()
    parallelize_module(net, mesh, plan)
    if arm == BASE:
        net.compile()
    return net


class Gathered(torch_styles.SequenceParallel):
    """A norm of pieces of the sequence whose output is gathered, once for all that read it."""

    @staticmethod
    def _prepare_output_fn(use_local_output, mod, outputs, device_mesh):
        return outputs.redistribute(placements=[Replicate()])


def traced(step) -> tuple[float, dict[str, int]]:
    """(ms in which only collectives ran, operation -> bytes received) of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as text:
            events = json.load(text)["traceEvents"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    received: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "kernel":
            name, of = event["name"].lower(), event.get("args", {})
            spans["nccl" in name].append((event["ts"], event["ts"] + event["dur"]))
            if "nccl" in name and "Out msg nelems" in of:
                kind = f"{of['Collective name'].strip('_')} {of.get('dtype')}"
                received[kind] = received.get(kind, 0) + of["Out msg nelems"] * ITEMSIZE.get(of.get("dtype"), 0)
    return exposed(*(sorted(spans[nccl]) for nccl in (True, False))) / 1e3, received


def exposed(collectives: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length of the union of the first spans outside the union of the second."""
    marks = sorted(
        (at, which, change) for which, spans in enumerate((collectives, others)) for a, b in spans
        for at, change in ((a, 1), (b, -1))
    )
    open_, last, total = [0, 0], 0.0, 0.0
    for at, which, change in marks:
        if open_[0] and not open_[1]:
            total += at - last
        open_[which] += change
        last = at
    return total


def measure(arm: str, args, device: torch.device) -> dict:
    net = build(arm, args, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    shape = (1, args.tokens // dist.get_world_size(), args.dim)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        net(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    for _ in range(3):
        step()
    fq.reset_receipt()
    step()
    planned = dict(fq.receipt().sequence)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks, host = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)], []
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        mark.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    alone, received = traced(step)
    return {
        "arm": arm, "ms": statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])),
        "host_ms": statistics.median(host) * 1e3, "peak_bytes": peak, "exposed_ms": alone, "received": received,
        "gathered": {" ".join(key): size for key, size in planned.items()},
    }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--arms", nargs="+", default=[BASE, *ARMS], choices=[BASE, EAGER, *ARMS])
    for name, value in {"tokens": 8192, "dim": 8192, "hidden": 28672, "heads": 64, "key_heads": 8, "steps": 20}.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    made.add_argument("--json", help="write all numbers to this file")
    args = made.parse_args()
    device, say = ranks.start()
    say(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}; {args.dim} -> {args.hidden}, "
        f"{args.tokens} tokens, medians of {args.steps} steps")
    say(f"{'arm':14} {'ms':>8} {'x bf16':>7} {'floor':>6} {'aim':>5} {'exposed':>8} {'host ms':>8} {'peak GiB':>9}  MiB received")
    rows: list[dict] = []
    for arm in args.arms:
        row, error = ranks.attempt({"arm": arm}, lambda: measure(arm, args, device), device)
        rows.append(row)
        if error is not None:
            say(f"{arm:14} failed: {error[:300]}")
            continue
        base = next((r["ms"] for r in rows if r["arm"] == BASE and "ms" in r), float("nan"))
        row["ratio"] = base / row["ms"]
        moved = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(row["received"].items()))
        say(f"{arm:14} {row['ms']:8.2f} {row['ratio']:7.3f} {FLOORS.get(arm, '-'):>6} {AIMS.get(arm, '-'):>5} "
            f"{row['exposed_ms']:8.2f} {row['host_ms']:8.2f} {row['peak_bytes'] / GIB:9.2f}  {moved}")
    ranks.finish(rows, args.json)


if __name__ == "__main__":
    main()

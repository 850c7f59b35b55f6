# SPDX-License-Identifier: Apache-2.0
"""One Llama-70B-shaped layer under tensor and sequence parallelism, over compiled bf16 with the
same styles.

    torchrun --nproc-per-node 4 -m dist_tests.bench.tp [--arms bf16 fp8_current mxfp8 ...] [--json
    FILE] [--profile]

Forward, backward and an SGD step of bf16 parameters (so that weights are quantized in each step);
the input and output are cut along the sequence. "... captured" arms replay their whole step,
collectives included, as one CUDA graph. Printed as it is known: ms, ratio, the time in which only
collectives ran ("exposed") and in which nothing did ("idle"), host ms, peak GiB, bytes a rank
receives in all-gathers over those that the plans name, and in all collectives. Rank 0 prints. With
--cpu a small layer runs on CPUs (gloo), for its bytes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests.bench import ranks
from dist_tests.bench.fsdp2 import BASE, CAPTURED, RECIPES, Attention

EAGER = "bf16 eager"
NAMED = RECIPES | {"fp8_row": fq.recipes.fp8_row, "identity": fq.recipes.identity}
ARMS = {name + captured: made for name, made in NAMED.items() for captured in ("", CAPTURED)}
FLOORS, AIMS = {"fp8_current": 1.15, "mxfp8": 1.1}, {"fp8_current": 1.3, "mxfp8": 1.25}
ITEMSIZE = {"Byte": 1, "Char": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8}
GIB = 2**30


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and SwiGLU, each behind its norm."""

    def __init__(self, args):
        super().__init__()
        self.norm, self.attention = (
            nn.RMSNorm(args.dim),
            Attention(args.dim, args.heads, args.key_heads),
        )
        self.mlp_norm, self.mlp = nn.RMSNorm(args.dim), MLP(args.dim, args.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


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
        fq.convert(net, ARMS[arm](), fuse=fq.MLPPattern("mlp", gate="gate", up="up", down="down"))
    norm, column = (
        functools.partial(styles.SequenceParallel, use_local_output=True),
        styles.ColwiseParallel,
    )
    row = functools.partial(styles.RowwiseParallel, output_layouts=Shard(1))
    prepare = styles.PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    net.attention.heads //= mesh.size()
    net.attention.key_heads //= mesh.size()
    parallelize_module(
        net,
        mesh,
        {
            "norm": norm(),
            "attention": prepare,
            "attention.q": column(),
            "attention.k": column(),
            "attention.v": column(),
            "attention.out": row(),
            "mlp_norm": norm(),
            "mlp": prepare,
            "mlp.gate": column(),
            "mlp.up": column(),
            "mlp.down": row(),
        },
    )
    if arm.startswith(BASE) and arm != EAGER:
        net.compile()
    return net


def traced(step, device: torch.device) -> dict:
    """Of one step: ms in which only collectives ran and in which nothing did, bytes received by
    operation, ms by kernel."""
    with torch.profiler.profile() as profile:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as text:
            events = json.load(text)["traceEvents"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    received, kernels = collections.Counter(), collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name, of = event["name"], event.get("args", {})
        nccl = "nccl" in name.lower()
        spans[nccl].append((event["ts"], event["ts"] + event["dur"]))
        if nccl and "Out msg nelems" in of:
            received[f"{of['Collective name'].strip('_')} {of.get('dtype')}"] += of[
                "Out msg nelems"
            ] * ITEMSIZE.get(of.get("dtype"), 0)
        kernels[name][0] += 1
        kernels[name][1] += event["dur"] / 1e3
    both = sorted(spans[True] + spans[False])
    whole = [(both[0][0], max(end for _, end in both))] if both else []
    return {
        "exposed_ms": exposed(spans[True], spans[False]) / 1e3,
        "idle_ms": exposed(whole, both) / 1e3,
        "received": dict(received),
        "kernels": dict(kernels),
    }


def exposed(collectives: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length of the union of the first spans outside the union of the second."""
    marks = sorted(
        (at, which, change)
        for which, spans in enumerate((collectives, others))
        for a, b in spans
        for at, change in ((a, 1), (b, -1))
    )
    open_, last, total = [0, 0], 0.0, 0.0
    for at, which, change in marks:
        if open_[0] and not open_[1]:
            total += at - last
        open_[which] += change
        last = at
    return total


def planned(net: nn.Module, shape: tuple[int, ...], delayed: bool) -> int:
    """Bytes that the plans of a layer's linear layers say are gathered; those that share an input
    gather once."""
    attention, mlp = net.attention, net.mlp
    alone = [attention.k, attention.v, mlp.up] if delayed else []
    layers = [attention.q, attention.out, mlp.gate, mlp.down, *alone]
    return sum(sum(fq.parallel.planned_gathers(layer, shape, 1).values()) for layer in layers)


def measure(arm: str, args, device: torch.device) -> dict:
    began = time.perf_counter()
    net = build(arm, args, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    shape = (1, args.tokens // dist.get_world_size(), args.dim)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else dist.barrier

    def step() -> None:
        net(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    captured = arm.endswith(CAPTURED)
    aside = contextlib.nullcontext()
    if on_gpu:
        aside = torch.cuda.stream(torch.cuda.Stream() if captured else torch.cuda.current_stream())
        aside.stream.wait_stream(torch.cuda.current_stream())
    with aside:
        step()
        synchronize()
        first = time.perf_counter() - began
        step()
        fq.reset_receipt()
        step()
        gathered = sum(fq.receipt().sequence.values())
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if captured:
            step = ranks.captured(step, aside.stream)
    dist.barrier()
    marks, host = (
        [torch.cuda.Event(enable_timing=True) for _ in range(on_gpu * (args.steps + 1))],
        [],
    )
    for i in range(args.steps + 1):
        if on_gpu:
            marks[i].record()
        if i < args.steps:
            start = time.perf_counter()
            step()
            host.append((time.perf_counter() - start) * 1e3)
    synchronize()
    spans = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])] if on_gpu else host
    return {
        "arm": arm,
        "ms": statistics.median(spans),
        "host_ms": statistics.median(host),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "first_step_s": first,
        "gathered": gathered,
        "planned": planned(net, shape, arm.startswith("fp8_delayed")) if arm in ARMS else 0,
        **traced(step, device),
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--arms",
        nargs="+",
        default=[BASE, "fp8_current", "mxfp8", "fp8_delayed"],
        choices=[BASE, BASE + CAPTURED, EAGER, *ARMS],
    )
    for name, value in {
        "tokens": 8192,
        "dim": 8192,
        "hidden": 28672,
        "heads": 64,
        "key_heads": 8,
        "steps": 15,
    }.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    made.add_argument("--json", help="write all numbers to this file")
    made.add_argument("--cpu", action="store_true", help="gloo on CPUs")
    made.add_argument(
        "--profile", action="store_true", help="print the kernels of a step that take longest"
    )
    args = made.parse_args()
    device, say = ranks.start("gloo" if args.cpu else "nccl")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU process"
    say(
        f"{dist.get_world_size()} x {name}, torch {torch.__version__}; {args.dim} -> "
        f"{args.hidden}, {args.tokens} tokens, medians of {args.steps} steps"
    )
    say(
        f"{'arm':21} {'ms':>8} {'x bf16':>7} {'floor':>6} {'aim':>5} {'exposed':>8} {'idle':>6} "
        f"{'host ms':>8} {'peak GiB':>9} {'first s':>8}  gathered (planned) MiB; MiB received"
    )

    def line(row: dict, over) -> str:
        arm, row["ratio"] = row["arm"], over("ms")
        moved = ", ".join(
            f"{kind} {size / 2**20:.1f}" for kind, size in sorted(row["received"].items())
        )
        longest = sorted(row["kernels"].items(), key=lambda k: -k[1][1])[: 24 * args.profile]
        return (
            f"{arm:21} {row['ms']:8.2f} {row['ratio']:7.3f} {FLOORS.get(arm, '-'):>6} "
            f"{AIMS.get(arm, '-'):>5} {row['exposed_ms']:8.2f} {row['idle_ms']:6.2f} "
            f"{row['host_ms']:8.2f} {row['peak_bytes'] / GIB:9.2f} {row['first_step_s']:8.1f}  "
            f"{row['gathered'] / 2**20:.2f} ({row['planned'] / 2**20:.2f}); {moved}"
            + "".join(
                f"\n    {ms:8.3f} ms {count:4}  {kernel[:110]}" for kernel, (count, ms) in longest
            )
        )

    ranks.finish(
        ranks.table(args.arms, BASE, lambda arm: measure(arm, args, device), line, device, say),
        args.json,
    )


if __name__ == "__main__":
    main()

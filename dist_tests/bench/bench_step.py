# SPDX-License-Identifier: Apache-2.0
"""Where a training step spends its time: encoding, decoding and products, gathers, the rest.

    torchrun --nproc-per-node 2 -m dist_tests.bench.bench_step [--forward mxfp8 --backward nvfp4
    --dim 256]

One process works too. Prints the share of each part of an fsdp_quant step, and the step over the
identity step.
"""

from __future__ import annotations

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.multi.nets import Net
from fsdp_quant.modules import program
from fsdp_quant.ops import dispatch
from fsdp_quant.tensor import gather_group, root_statistics

_SPENT: dict[str, float] = {}


def _timed(label: str, fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            _SPENT[label] = _SPENT.get(label, 0.0) + time.perf_counter() - start

    return wrapper


def _instrument() -> None:
    dispatch.statistics = _timed("amax", dispatch.statistics)
    dispatch.encode = _timed("encode", dispatch.encode)
    root_statistics.reduce_statistics = _timed(
        "statistics of weights, shared", root_statistics.reduce_statistics
    )
    program.gemm = _timed("decode + product", program.gemm)
    gather_group.GatherPlan.receive = _timed("re-assemble", gather_group.GatherPlan.receive)
    for name in (
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    ):
        if hasattr(dist, name):
            setattr(dist, name, _timed("collectives", getattr(dist, name)))


def _step_seconds(recipe: fq.Recipe, args, device: torch.device) -> float:
    torch.manual_seed(0)
    net = Net(hidden=(4 * args.dim,) * args.layers, k=args.dim, out=64).to(device)
    fq.convert(net, recipe)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(args.tokens, args.dim, device=device)
    for step in range(args.steps + 1):
        if step == 1:
            _SPENT.clear()
            start = time.perf_counter()
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / args.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward", default="mxfp8")
    parser.add_argument("--backward", default="nvfp4")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    plain = _step_seconds(fq.recipes.identity(), args, device)
    _instrument()
    recipe = fq.recipes.hybrid(args.forward, args.backward)
    seconds = _step_seconds(recipe, args, device)
    if rank == 0:
        print(
            f"{world} x {device.type}, {args.layers} blocks of {args.dim} x {4 * args.dim}, "
            f"{args.tokens} tokens, {recipe}"
        )
        print(
            f"step {seconds * 1e3:.1f} ms, {seconds / plain:.2f} x identity ({plain * 1e3:.1f} ms)"
        )
        spent = {label: t / args.steps for label, t in _SPENT.items()}
        spent["everything else"] = seconds - sum(spent.values())
        for label, t in sorted(spent.items(), key=lambda item: -item[1]):
            print(f"  {label:18} {t * 1e3:8.1f} ms  {t / seconds:5.0%}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

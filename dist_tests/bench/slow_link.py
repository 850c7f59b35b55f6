# SPDX-License-Identifier: Apache-2.0
"""Steps over a slow link against `fq.plan(bandwidth=...)`: two nodes as network namespaces of this
machine, one rank each.

    python -m dist_tests.bench.slow_link [--mbit 100] [--steps 3]         as root; no GPU

A step is a forward and a backward of few tokens: 4 blocks of 512 x 2048, fp32 parameters gathered
in bf16 or as codes, gradients in fp32, or as `fq.set_gradient_reduction` sends them.
rate: bytes per second that a rank receives in an all-gather of 8 MiB per rank, which is what the
      plan is given.
measured: seconds per step with the link at `--mbit` less those with a link without a limit.
x bf16: seconds of bf16's step, link at `--mbit`, over those of the arm; more is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_quant as fq
from dist_tests.multi import nets
from dist_tests.multi.nodes import Nodes, ip, unsupported_reason

# recipe, and format of the gradients
ARMS = {
    "bf16": (fq.recipes.bf16(), "fp32"),
    "fp8_current": (fq.recipes.fp8_current(), "fp32"),
    "mxfp8": (fq.recipes.mxfp8(), "fp32"),
    "hybrid(mxfp8, nvfp4)": (fq.recipes.hybrid("mxfp8", "nvfp4"), "fp32"),
    "nvfp4": (fq.recipes.nvfp4(), "fp32"),
    "fp8_current, bf16": (fq.recipes.fp8_current(), "bf16"),
    "fp8_current, fp8_1x128": (fq.recipes.fp8_current(), "fp8_1x128"),
    "nvfp4, nvfp4": (fq.recipes.nvfp4(), "nvfp4"),
}
WIDTH = 512


def rank(index: int, steps: int) -> None:
    """What each node runs; the first prints a row per arm as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://node0:29600", rank=index, world_size=2)
    bandwidth = rate()
    for arm, (recipe, gradients) in ARMS.items():
        net = fq.convert(nets.build(hidden=(4 * WIDTH,) * 4, k=WIDTH), recipe)
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        fq.set_gradient_reduction(nets.shard(net, mp_policy=policy), gradients)
        traffic = fq.plan(net, bandwidth=bandwidth).traffic
        seconds = []
        for step in range(steps + 1):
            dist.barrier()
            began = time.perf_counter()
            net(nets.batch(step, 8, k=WIDTH)).square().mean().backward()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        if index == 0:
            planned = sum(traffic.gather) + traffic.reduce
            row = {
                "arm": arm,
                "planned": planned,
                "gathers": sum(traffic.gather),
                "s": statistics.median(seconds[1:]),
                "rate": bandwidth,
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)


def rate(size: int = 2**23) -> float:
    """Bytes per second of an all-gather, the same on both ranks."""
    own, whole, seconds = (
        torch.zeros(size, dtype=torch.uint8),
        torch.zeros(2 * size, dtype=torch.uint8),
        [],
    )
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, own)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor([statistics.median(seconds[1:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return size / slowest.item()


def measured(mbit: int, steps: int) -> dict[str, dict]:
    """Rows by arm, over a link of `mbit` (0: no limit)."""
    with Nodes(2, delay=0.0005, loss=0.0) as nodes:
        for name in nodes.names if mbit else ():
            ip(
                "netns",
                "exec",
                name,
                "tc",
                "qdisc",
                "add",
                "dev",
                name,
                "root",
                "tbf",
                "rate",
                f"{mbit}mbit",
                "burst",
                "128kb",
                "latency",
                "500ms",
            )
        command = [sys.executable, "-m", "dist_tests.bench.slow_link", "--steps", str(steps)]
        ranks = [
            nodes.run(i, [*command, "--rank", str(i)], stdout=subprocess.PIPE, text=True)
            for i in range(2)
        ]
        said = [r.communicate()[0] for r in ranks]
    if any(r.returncode for r in ranks):
        raise RuntimeError(f"a rank failed: {said}")
    return {row["arm"]: row for row in map(json.loads, said[0].splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.steps)
    if (reason := unsupported_reason()) is not None:
        raise SystemExit(f"error: {reason}")
    fast, slow = measured(0, args.steps), measured(args.mbit, args.steps)
    received = next(iter(slow.values()))["rate"]
    print(
        f"{args.mbit} Mbit/s, 2 ranks that receive {received / 1e6:.2f} MB/s, seconds per "
        f"step\n{'':22} {'planned':>8} {'of gathers':>10} {'measured':>8} {'ratio':>6} "
        f"{'step':>6} {'x bf16':>6}"
    )
    for arm, row in slow.items():
        taken = row["s"] - fast[arm]["s"]
        print(
            f"{arm:22} {row['planned']:8.2f} {row['gathers']:10.2f} {taken:8.2f} "
            f"{taken / row['planned']:6.2f} {row['s']:6.2f} {slow['bf16']['s'] / row['s']:6.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

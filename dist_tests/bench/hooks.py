# SPDX-License-Identifier: Apache-2.0
"""What the hooks of FSDP2 cost the host: microseconds a weight and pass.

    python -m dist_tests.bench.hooks [--arms fp8_current mxfp8 ...] [--layers 8] [--cpu]

Training steps of `bench.fsdp2`'s layers on one GPU, of two ranks of which the other one does not
exist (a process group that exchanges nothing). Timed are all calls of the hooks, launches included.
With --cpu kernels do not run, and the reference's time is in it.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_quant as fq
from dist_tests.bench import fsdp2
from fsdp_quant.tensor.fsdp_hooks import FSDPHooks, PreHook

HOOKS = {"send": (PreHook, "__call__"), "receive": (FSDPHooks, "fsdp_post_all_gather")}
STEPS = 6


def timed(spent: dict[str, float], what: str, owner: type, name: str) -> None:
    """Add the time of each call of a method to spent[what], and count it in spent["calls"]."""
    original = getattr(owner, name)

    def call(*args, **options):
        start = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            spent[what] = spent.get(what, 0.0) + time.perf_counter() - start
            spent["calls"] = spent.get("calls", 0) + 1

    setattr(owner, name, call)


def step_of(arm: str, args, device: torch.device):
    """A training step of the arm."""
    net = fsdp2.build(arm, args, device)
    quantized = fsdp2.QUANTIZED in arm
    optimizer = (fq.optim.FusedAdam if quantized else torch.optim.AdamW)(net.parameters(), lr=1e-4)
    x = torch.randn(1, args.tokens[0], args.dim, device=device, dtype=torch.bfloat16)

    def step() -> None:
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--arms",
        nargs="+",
        default=["fp8_current", "fp8_current quantized", "fp8_delayed", "fp8_block", "mxfp8"],
        choices=list(fsdp2.OURS),
    )
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--cpu", action="store_true", help="small layers on the CPU")
    args = made.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit(
            "error: there is no GPU; the times of this bench are of the host beside one (--cpu "
            "tries it without)"
        )
    small = (
        ["--dim", "128", "--hidden", "256", "--heads", "4", "--key-heads", "2", "--tokens", "128"]
        if args.cpu
        else ["--tokens", "2048"]
    )
    of_model = fsdp2.parser().parse_args(["--layers", str(args.layers), *small])
    device = torch.device("cpu" if args.cpu else "cuda:0")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    spent: dict[str, float] = {}
    for what, (owner, name) in HOOKS.items():
        timed(spent, what, owner, name)
    print(
        f"{args.layers} layers, {of_model.tokens[0]} tokens, "
        f"{'CPU' if args.cpu else torch.cuda.get_device_name()}; us a weight and pass"
    )
    print(f"{'arm':24} {'send':>8} {'receive':>8} {'both':>8}")
    for arm in args.arms:
        step = step_of(arm, of_model, device)
        for _ in range(4):  # the first ones find out what the next will do
            step()
        spent.clear()
        for _ in range(STEPS):
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()  # a full queue would let the host wait
        us = {what: spent[what] / spent["calls"] * 2e6 for what in HOOKS}
        print(
            f"{arm:24} {us['send']:8.1f} {us['receive']:8.1f} {sum(us.values()):8.1f}", flush=True
        )
        del step
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

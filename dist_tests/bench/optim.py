# SPDX-License-Identifier: Apache-2.0
"""Device time of FusedAdam's kernel over a copy of the same bytes, and of the whole step of
quantized parameters.

    python -m dist_tests.bench.optim [--tensors 32] [--shape 4096x4096] [--json out.json]

Bytes an element: masters and moments read and written, gradients read (28 B in fp32), each once;
the floor is of the rate of a copy. "write-back" rows also write the codes of both directions of
every master, which no bytes are counted for; "host" is the Python time of a whole step().
Exit status 1: a row failed; 2: there is no GPU that runs the operators.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import fsdp_quant as fq
from dist_tests.bench.clock import (
    DeviceClock,
    count,
    extents,
    facts,
    finish,
    first_line,
    measurable,
    recover,
)
from fsdp_quant.ops import native
from fsdp_quant.optim import compact

BF16, FP32 = torch.bfloat16, torch.float32
FLOOR = 0.80
# name -> (gradients, moments, whether parameters are their masters rounded)
ROWS = {
    "adam, fp32": (FP32, FP32, False),
    "adam, bf16 gradients": (BF16, FP32, False),
    "adam, bf16 gradients and moments": (BF16, BF16, False),
    "adam, bf16 parameters and gradients": (BF16, FP32, True),
}
WRITE_BACK = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")


class Bench:
    """One table; `report` holds the numbers."""

    def __init__(self, device: torch.device, args):
        self.device, self.args = device, args
        self.clock = DeviceClock(device, args.repeats)
        self.report: dict = {**facts(device), "rows": []}
        self.failed = 0

    def run(self) -> None:
        self.clock.wake()
        shapes = [self.args.shape] * self.args.tensors
        self.numel = sum(a * b for a, b in shapes)
        self.copy = self.copy_rate(4 * self.numel)
        print(f"{self.args.tensors} x {list(self.args.shape)}: copy {self.copy:.0f} GB/s")
        masters = [torch.randn(s, device=self.device) for s in shapes]
        scalars = torch.tensor(
            [[0.9999, 0, 0.1, 0.999, 1e-3, 0.5, -1e-3, 1e-8]], device=self.device
        )
        for name, (of_grad, of_moments, rounded) in ROWS.items():
            grads = [torch.randn_like(p).to(of_grad) for p in masters]
            first, second = ([torch.rand_like(p).to(of_moments) for p in masters] for _ in range(2))
            low = [p.to(BF16) for p in masters] if rounded else ()
            size = 8 + of_grad.itemsize + 4 * of_moments.itemsize + 4 * rounded
            step = native.AdamStep(
                masters, grads, first, second, [0] * len(masters), scalars, None, None
            )
            self.row(name, size, FLOOR, lambda step=step, low=low: native.adam(step, low))
        self.compact(masters, scalars)
        params = [nn.Parameter(p) for p in masters]
        for p in params:
            p.grad = torch.randn_like(p)
        peer = torch.optim.AdamW(
            params, lr=torch.tensor(1e-3, device=self.device), fused=True, capturable=True
        )
        self.row("torch.optim.AdamW(fused=True)", 28, None, peer.step)
        ours = fq.optim.FusedAdam(
            params, lr=torch.tensor(1e-3, device=self.device), capturable=True
        )
        self.row("FusedAdam.step()", 28, None, ours.step)
        print(
            f"{'host':40} {self.clock.host(ours.step, 5):8.0f} us a step; torch "
            f"{self.clock.host(peer.step, 5):.0f} us"
        )
        del params, peer, ours, masters, grads, first, second, low, step
        for name in WRITE_BACK:
            self.quantized(name)

    def compact(self, masters: list[torch.Tensor], scalars: torch.Tensor) -> None:
        """Moments in codes, and masters that are remainders of bf16 parameters."""
        for remainder in (False, True):
            grads = [torch.randn_like(p).to(BF16 if remainder else FP32) for p in masters]
            (first, scale), (second, other) = (
                map(list, zip(*(compact.encode(torch.rand_like(p), is_root) for p in masters)))
                for is_root in (False, True)
            )
            low, of = (map(list, zip(*map(compact.split, masters)))) if remainder else ((), masters)
            step = native.AdamStep(
                of, grads, first, second, [0] * len(masters), scalars, None, None
            )
            size = (2 * (2 + 2) + 2 if remainder else 2 * 4 + 4) + 2 * (2 + 8 / compact.BLOCK)
            name = "adam, 8-bit moments" + (", bf16 parameters and remainders" if remainder else "")
            self.row(
                name, size, FLOOR, lambda step=step, low=low: native.adam(step, low, scale, other)
            )

    def quantized(self, recipe: str) -> None:
        """The whole step of quantized parameters: Adam, and the codes of both directions."""
        n, k = self.args.shape
        with torch.device(self.device), fq.quantized_model_init(getattr(fq.recipes, recipe)()):
            net = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(self.args.tensors))
            fq.convert(net, getattr(fq.recipes, recipe)())
        optimizer = fq.optim.FusedAdam(
            net.parameters(), lr=torch.tensor(1e-3, device=self.device), capturable=True
        )
        for p in net.parameters():
            p.grad = torch.randn(p.shape, device=self.device)
        self.row(f"Adam and write-back, {recipe}", 28, FLOOR, optimizer.step)
        print(f"{'host':40} {self.clock.host(optimizer.step, 5):8.0f} us a step")

    def copy_rate(self, size: int) -> float:
        """GB/s of a copy of this many bytes, read and written."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        copied = torch.empty_like(source)
        return 2 * size / self.clock.time([lambda: copied.copy_(source)], "flush").us / 1e3

    def row(self, name: str, size: float, floor: float | None, work) -> None:
        result = {"name": name, "bytes": size * self.numel, "floor": floor}
        self.report["rows"].append(result)
        try:
            us = self.clock.time([work], "flush").us
        except Exception as error:  # of any kind: one row does not cost the others
            self.failed += 1
            result["error"] = first_line(error)
            print(f"{name:40} failed: {result['error']}", flush=True)
            recover()
            return
        rate = result["bytes"] / us / 1e3
        result |= {
            "us": us,
            "gbs": rate,
            "ratio": rate / self.copy,
            "under": floor is not None and rate / self.copy < floor,
        }
        mark = f"floor {floor}" + (" under" if result["under"] else "") if floor else ""
        print(
            f"{name:40} {us:8.0f} us {rate:6.0f} GB/s {rate / self.copy:5.2f} x copy  {mark}",
            flush=True,
        )

    def summary(self) -> str:
        under = sum(bool(r.get("under")) for r in self.report["rows"])
        return f"{len(self.report['rows'])} rows, {under} under their floor, {self.failed} failed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=count, default=32)
    parser.add_argument("--shape", type=extents("4096x4096"), default=(4096, 4096))
    parser.add_argument("--repeats", type=count, default=25)
    parser.add_argument("--json", help="write all numbers to this file")
    args = parser.parse_args()
    device = measurable()
    if device is None:
        return 2
    bench = Bench(device, args)
    return finish(bench, bench.run, args.json)


if __name__ == "__main__":
    sys.exit(main())

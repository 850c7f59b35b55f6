# SPDX-License-Identifier: Apache-2.0
"""A step of `fq.GroupedLinear` over torch._grouped_mm in bf16: python -m dist_tests.bench.grouped
[--experts 8 64].

Forward and backward, 1024 tokens an expert in unequal groups, weights [N, K] = [4096, 2048];
weights are quantized in every step; "held" quantizes them once (`fq.hold`), as for micro-batches
that share a version of them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests.bench.clock import DeviceClock, measurable
from dist_tests.bench.linear import RECIPES as OF_LINEAR
from fsdp_quant import recipes

N, K, TOKENS = 4096, 2048, 1024
RECIPES = OF_LINEAR | {"identity": recipes.identity}


def bf16(x: Tensor, w: Tensor, ends: Tensor, dy: Tensor):
    def step() -> None:
        torch._grouped_mm(x, w.transpose(1, 2), offs=ends).backward(dy)
        x.grad = w.grad = None

    return step


def ours(module: fq.GroupedLinear, x: Tensor, splits, dy: Tensor):
    def step() -> None:
        module(x, splits).backward(dy)
        x.grad = module.weight.grad = None

    return step


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    args = parser.parse_args()
    device = measurable()
    if device is None:
        return 2
    clock = DeviceClock(device, 15)
    for experts in args.experts:
        weights = torch.rand(experts, device=device) + 0.5
        ends = (weights.cumsum(0) / weights.sum() * experts * TOKENS).int()
        ends[-1] = experts * TOKENS
        x = torch.randn(
            experts * TOKENS, K, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        w = (
            torch.randn(experts, N, K, device=device, dtype=torch.bfloat16)
            .mul_(K**-0.5)
            .requires_grad_()
        )
        dy = torch.randn(experts * TOKENS, N, device=device, dtype=torch.bfloat16)
        base = clock.sustained([bf16(x, w, ends, dy)]).us
        print(f"{experts} experts: bf16 torch._grouped_mm {base:.0f} us")
        for name in args.recipes:
            recipe = RECIPES[name]
            module = fq.GroupedLinear(
                experts, K, N, False, device, torch.bfloat16, packed=True, recipe=recipe()
            )
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            for what, splits in (("device splits", ends), ("host splits", sizes)):
                if splits is ends and module.unsupported_reason(torch.bfloat16, device):
                    continue  # it would wait for the device
                times = []
                for holds in (contextlib.nullcontext, lambda: fq.hold(module)):  # noqa: F821
                    with holds():
                        times.append(clock.sustained([ours(module, x, splits, dy)]).us)
                print(
                    f"  {name:12} {what:14}"
                    + "  ".join(f"{t:8.0f} us ({base / t:.2f})" for t in times)
                    + "  held: 2nd"
                )
            del module
    return 0


if __name__ == "__main__":
    sys.exit(main())

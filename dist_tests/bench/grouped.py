# SPDX-License-Identifier: Apache-2.0
"""A step of `fq.GroupedLinear` over torch._grouped_mm in bf16: python -m dist_tests.bench.grouped
[--experts 8 64] [--products].

Forward and backward, 1024 tokens an expert in unequal groups, weights [N, K] = [4096, 2048];
weights are quantized in every step; "held" quantizes them once (`fq.hold`), as for micro-batches
that share a version of them. --products: the GEMMs alone, of random codes, beside cuBLASLt's of as
many rows and one weight; each runs for half a second first, since power sets the clock.
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
from dist_tests.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from fsdp_quant import recipes
from fsdp_quant.formats import E4M3, Format
from fsdp_quant.ops.native import Operand

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


def products(clock: DeviceClock, ends: Tensor) -> None:
    device, experts, rows = ends.device, len(ends), int(ends[-1])

    def codes(*shape: int) -> Tensor:
        values = torch.randn(shape, device=device, dtype=torch.bfloat16) * 100
        return values.clamp_(-448, 448).to(torch.float8_e4m3fn)

    def operand(*shape: int, block: tuple = (1, 128)) -> Operand:
        *groups, outer, k = shape
        of_scale = (k // 128, outer) if block == (1, 128) else (outer // 128, k // 128)
        scale = torch.randint(-3, 3, (*groups, *of_scale), device=device).float().exp2()
        fmt = Format("operand", E4M3, block, "fp32", pow2=True)
        return Operand(codes(*shape).view(torch.uint8), scale.flatten(), fmt)

    tile, start = (128, 128), ends.new_zeros(1)
    of_rows = torch.cat([start, ends])
    of_tokens = torch.cat([start, ends[:-1] // 128 * 128, ends[-1:]])
    x, dy = operand(rows, K), operand(rows, N)
    w, turned = operand(experts, N, K, block=tile), operand(experts, K, N, block=tile)
    of_dy, of_x, tiles_of_x = operand(N, rows), operand(K, rows), operand(K, rows, block=tile)
    one, plain = torch.ones((), device=device), (codes(rows, K), codes(N, K).t())
    summed = torch.zeros(experts, N, K, device=device)
    calls = {
        "fprop": lambda: grouped_gemm(x, w, of_rows),
        "dgrad": lambda: grouped_gemm(dy, turned, of_rows),
        "wgrad": lambda: grouped_gemm_wgrad(of_dy, tiles_of_x, of_tokens),
        "wgrad of 1x128": lambda: grouped_gemm_wgrad(of_dy, of_x, of_tokens),
        "wgrad, added to fp32": lambda: grouped_gemm_wgrad(
            of_dy, tiles_of_x, of_tokens, summed, accumulate=True
        ),
        "cuBLASLt": lambda: torch._scaled_mm(*plain, one, one, out_dtype=torch.bfloat16),
    }
    for name, call in calls.items():
        us = clock.sustained([call], settle_ms=500.0).us
        print(f"  {name:27}{us:8.0f} us, {2e-6 * rows * N * K / us:.0f} TFLOP/s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES)
    parser.add_argument("--products", action="store_true")
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
        if args.products:
            products(clock, ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())

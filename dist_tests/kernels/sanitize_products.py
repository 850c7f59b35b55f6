# SPDX-License-Identifier: Apache-2.0
"""Every product, and what only products of groups and optimizers call, for the sanitizers."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, grouped_operand_code
from dist_tests.kernels.entries import on_device, run
from dist_tests.kernels.expected import BF16, FP32, MADE, encoded
from dist_tests.single.hopper import Operators, replaced_operators
from fsdp_quant.formats import E4M3, E5M2, IDENTITY, Direction, Element, Format, ceil_div, round_up
from fsdp_quant.ops import native, reference
from fsdp_quant.optim import fused_adam

WHOLE, ROW, BY_128, BY_128X128, BY_512 = (None, None), (1, None), (1, 128), (128, 128), (1, 512)
# Blocks of a and b: one kernel each (cuBLASLt's, and those of csrc/gemm/sm90_*).
PAIRS = (
    (WHOLE, WHOLE),
    (ROW, ROW),
    (BY_128, BY_128X128),
    (BY_128X128, BY_128),
    (BY_128, BY_128),
    (BY_512, BY_512),
)
GROUPED = (
    (BY_128, BY_128X128),
    (BY_128X128, BY_128),  # groups of K
    (BY_128, BY_128),
    (ROW, ROW),
    (WHOLE, WHOLE),
    (ROW, WHOLE),
    (WHOLE, ROW),
)
SIZES = ((200, 272, 656), (33, 48, 144))  # M, N, K
ENDS = torch.tensor([0, 128, 128, 256, 640], dtype=torch.int32)
BOUND = 2.0**-7  # of the norm: bf16 rounds by 2^-9, and sums of 128 products have 13 bits


def operand(
    lines: int, k: int, block: tuple, seed: int, element: Element = E4M3, groups: int = 1
) -> native.Operand:
    """Random codes and powers of two as scales, as products read them; of groups: the codes
    [groups, lines, K]."""
    g = torch.Generator().manual_seed(seed)
    data = (
        torch.randint(0, 100, (groups, lines, k), dtype=torch.uint8, generator=g)
        | (128 * torch.randint(0, 2, (groups, lines, k), generator=g)).byte()
    )
    shape = {
        WHOLE: (1,),
        ROW: (lines,),
        BY_128: (ceil_div(k, 128), round_up(lines, 4)),
        BY_512: (ceil_div(k, 512), round_up(lines, 4)),
        BY_128X128: (ceil_div(lines, 128), round_up(ceil_div(k, 128), 4)),
    }[block]
    scale = 2.0 ** torch.randint(-4, 3, (groups, *shape), generator=g).float()
    fmt = Format("operand", element, block, "fp32", pow2=True)
    return (
        native.Operand(data, scale.flatten(), fmt)
        if groups > 1
        else native.Operand(data[0], scale[0], fmt)
    )


def moved(o: native.Operand) -> native.Operand:
    return o._replace(data=on_device(o.data), scale=on_device(o.scale))


def arguments(*operands: native.Operand) -> tuple:
    a, b = operands
    return a.data, b.data, a.scale, b.scale


def product(what: str, a: native.Operand, b: native.Operand, emulation: Operators) -> None:
    """Into new memory in both dtypes, with a bias and a factor, and added to fp32."""
    m, n = len(a.data), len(b.data)
    bias, alpha, before = laws.values(1, n)[0], torch.tensor([0.5]), laws.values(m, n, dtype=FP32)

    def want(dtype: torch.dtype, *more: Tensor) -> list[Tensor]:
        with replaced_operators(emulation):
            return [native.gemm(a, b, dtype, None, False, *(more or (None, None)))]

    for dtype in (BF16, FP32):
        made = native.gemm(moved(a), moved(b), dtype, None, False, None, None)
        run(f"gemm {what} to {dtype}", [made], lambda dtype=dtype: want(dtype), BOUND)
    made = native.gemm(moved(a), moved(b), BF16, None, False, on_device(bias), on_device(alpha))
    run(f"gemm {what}, bias and alpha", [made], lambda: want(BF16, bias, alpha), BOUND)
    out = native.gemm(moved(a), moved(b), FP32, on_device(before.clone()), True, None, None)
    run(f"gemm_out {what}, added", [out], lambda: [before + want(FP32)[0]], BOUND)


def grouped(blocks: tuple, element: Element, emulation: Operators) -> None:
    """Rows in groups, and the contraction in groups; one group is empty."""
    (_, n, k), groups = SIZES[0], len(ENDS) - 1
    tokens, what = int(ENDS[-1]), f"{blocks} {element.name}"
    if blocks[0] != BY_128X128:
        a, b = operand(tokens, k, blocks[0], 1, element), operand(n, k, blocks[1], 2, groups=groups)
        kinds = [grouped_operand_code(o) for o in (a, b)]
        for bias in (None, laws.values(groups, n), laws.values(groups, n, dtype=FP32)):
            made = grouped_gemm(moved(a), moved(b), on_device(ENDS), bias=on_device(bias))

            def rows(bias=bias) -> list[Tensor]:
                out = torch.empty(tokens, n, dtype=BF16)
                emulation.grouped_gemm(out, *arguments(a, b), ENDS, *kinds, bias=bias)
                return [out]

            name = "" if bias is None else f", {bias.dtype} biases"
            run(f"grouped_gemm {what}{name}", [made], rows, BOUND)
    x, w = operand(40, tokens, blocks[0], 3, element), operand(n, tokens, blocks[1], 4)
    kinds_of_depth = [grouped_operand_code(o) for o in (x, w)]
    before = laws.values(groups * 40, n, dtype=FP32).view(groups, 40, n)
    for accumulate in (False, True):
        out = on_device(before.clone())
        grouped_gemm_wgrad(moved(x), moved(w), on_device(ENDS), out, accumulate)

        def depth(accumulate=accumulate) -> list[Tensor]:
            out = before.clone()
            emulation.grouped_gemm_wgrad(out, *arguments(x, w), ENDS, *kinds_of_depth, accumulate)
            return [out]

        run(f"grouped_gemm_wgrad {what}, accumulate {accumulate}", [out], depth, BOUND)


def group_into_buffers(name: str) -> None:
    """Codes of a group, into memory that is the caller's."""
    for direction in Direction:
        e, x = (
            MADE[name].encoding(direction),
            [laws.values(rows, 256, seed=rows) for rows in (64, 129)],
        )
        wanted = [encoded(one, e, stats=reference.statistics(one, e)) for one in x]
        into = [
            (torch.zeros_like(on_device(w.data)), torch.zeros_like(on_device(w.scale)))
            for w in wanted
        ]
        native.multi_tensor_quantize([on_device(one) for one in x], e, [0, 0], False, None, into)
        run(
            f"quantize_group_out {name} {direction}",
            [t for of in into for t in of],
            lambda of=wanted: [t for w in of for t in (w.data, w.scale)],
        )


def adam_scalars() -> None:
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    }
    for found_inf, lr in itertools.product((None, 0.0, 1.0), (1e-3, torch.tensor(2e-3))):
        steps, flag = (
            [torch.tensor(3.0), torch.tensor(8.0)],
            None if found_inf is None else torch.tensor([found_inf]),
        )
        given = [on_device(s.clone()) for s in steps]
        rate = on_device(lr) if isinstance(lr, Tensor) else lr
        made = native.adam_count(given, on_device(flag), rate, *group["betas"], 1e-8, 0.1, True)

        def want(steps=steps, flag=flag, lr=lr) -> list[Tensor]:
            counted = [s.clone() for s in steps]
            rows = fused_adam.scalars_on_device(group | {"lr": lr}, counted, flag)
            return [rows, *counted]

        run(f"adam_count {found_inf} {lr}", [made, *given], want, 1e-6)


def every_product() -> None:
    emulation = Operators()
    for (m, n, k), blocks in itertools.product(SIZES, PAIRS):
        for element in (E4M3, E5M2) if blocks[0] != BY_512 else (E4M3,):
            a, b = operand(m, k, blocks[0], 1, element), operand(n, k, blocks[1], 2)
            product(f"{blocks} {element.name} [{m}, {n}] K {k}", a, b, emulation)
        halves = [
            native.Operand(laws.values(lines, k, seed=lines), None, IDENTITY) for lines in (m, n)
        ]
        product(f"bf16 [{m}, {n}] K {k}", *halves, emulation)
    with mock.patch.dict(os.environ, FSDP_QUANT_SCALED_EPILOGUE="1"):
        for (m, n, k), blocks in itertools.product(SIZES, ((ROW, ROW), (ROW, WHOLE), (WHOLE, ROW))):
            a, b = operand(m, k, blocks[0], 1), operand(n, k, blocks[1], 2)
            product(f"{blocks}, scaled by an epilogue, [{m}, {n}] K {k}", a, b, emulation)
    for blocks, element in itertools.product(GROUPED, (E4M3, E5M2)):
        if blocks[0] != BY_128X128 or element == E4M3:
            grouped(blocks, element, emulation)
    for name in ("mxfp8", "nvfp4", "fp8_row"):
        group_into_buffers(name)
    adam_scalars()

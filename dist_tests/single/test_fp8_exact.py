# SPDX-License-Identifier: Apache-2.0
"""The scale rule `fp8_exact`: legal 4-bit codes that are multiplied as e4m3 operands, without an
error of their own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests.laws import assert_lost_rows_are_counted, assert_same_bytes, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.formats import (
    COLUMNWISE,
    E4M3,
    FP8_EXACT_OPERAND,
    FP8_EXACT_SCALES,
    ROWWISE,
    Direction,
    format_of,
)
from fsdp_quant.gemm import gemm
from fsdp_quant.linear.plan import PRODUCTS, build_plan
from fsdp_quant.ops.layout import ANCHORED_TENSOR
from fsdp_quant.ops.product_error import COUNTED_E2M1
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.storage import to_layout

BF16 = torch.bfloat16
NAMES = ("nvfp4", "nvfp4_16x16")
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KEY = torch.tensor([7, 3, 1, 0, 0])


def quantizer(name: str = "nvfp4", **options) -> Quantizer:
    return Quantizer(format_of(name, scale_rule="fp8_exact"), **options)


def is_e4m3(x: Tensor) -> Tensor:
    return x.to(E4M3.dtype).float() == x


def test_these_scales_and_no_others_make_e4m3_numbers_of_elements():
    """If false, an operand is rounded, or the rule leaves out a scale that would serve."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3.dtype).float()
    codes = codes[codes >= 2**-3]
    significands = codes / torch.exp2(codes.log2().floor())
    taken = sum(significands == s for _, s in FP8_EXACT_SCALES).bool() & (codes <= 384)
    exact = is_e4m3(codes[:, None] * MAGNITUDES * FP8_EXACT_OPERAND).all(1)
    assert torch.equal(taken, exact)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_legal_and_scales_are_of_the_rule(name: str, rounding: str):
    """If false, another implementation of the format reads other values."""
    x = values(256, 512, kind="heavy", dtype=torch.float32)
    made = quantizer(name, rounding=rounding).storage(x, ROWWISE, KEY)
    scale = made.scale.view(E4M3.dtype).float()
    assert set((scale / torch.exp2(scale.log2().floor())).flatten().tolist()) <= {1.0, 1.25, 1.5}
    amax = (
        x.abs().view(256, -1, 16).amax(-1)
        if name == "nvfp4"
        else x.abs().view(16, 16, -1, 16).amax((1, 3))
    )
    target = amax / x.abs().max() * 384
    if rounding == "stochastic":
        assert (scale >= target * (1 - 1e-6)).all() and (scale < target * 4 / 3).all(), (
            "saturated, or coarser than the rule"
        )
    else:
        assert (scale >= target / 1.21).all() and (scale <= target * 1.12).all()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", NAMES)
def test_an_operand_is_the_decoded_codes(name: str, direction: Direction):
    """If false, Hopper multiplies other values than those that were quantized."""
    for seed, shape in enumerate([(64, 96), (33, 47), (128, 256), (1, 16)]):
        for rotation in (False, True)[: 2 if name == "nvfp4" else 1]:
            made = quantizer(name, rotation=rotation).storage(values(*shape, seed=seed), direction)
            operand = made.to_gemm_operand(ANCHORED_TENSOR)
            assert operand.tensor_amax is None and operand.scale.numel() == 1
            codes = (
                operand.data.view(E4M3.dtype).double()
                if direction is ROWWISE
                else operand.data.view(E4M3.dtype).double().t()
            )
            assert_same_bytes(
                (codes * operand.scale.double()).float(),
                made.decode(),
                f"{name} {shape} {rotation}",
            )


def test_small_blocks_lose_what_is_below_the_grid():
    """If false, exactness is promised where e4m3 has no exponents left."""
    x = values(2, 512).float()
    for power in range(0, -16, -1):
        y = torch.cat([x, x * 2.0**power])
        made = quantizer().storage(y, ROWWISE)
        lost = (
            made.to_gemm_operand(ANCHORED_TENSOR).decode() - made.decode()
        ).abs().max().item() / made.decode().abs().max().item()
        assert (lost == 0) if power >= -9 else lost <= 2**-9 / 288 * 1.01, power


def test_products_of_operands_are_exact():
    """If false, the rate of fp8 costs bits of the product."""
    x, w = values(64, 256, kind="heavy"), values(48, 256, seed=1)
    a, b = quantizer().storage(x, ROWWISE), quantizer("nvfp4_16x16").storage(w, ROWWISE)
    with hopper.emulated() as operators:
        got = gemm(a, b, out_dtype=torch.float32)
        assert operators.count("anchor_codes") == 2 and operators.count("gemm") == 1
    want = (a.decode().double() @ b.decode().double().t()).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_noise_beside_the_nearest_scales():
    """If false, the rule costs more than docs/reference/recipes.md says: a tenth for vectors (1.05
    to 1.2), nothing for square blocks."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(3, 1024, 1024, generator=g)
    samples = {
        "gauss": normal[0],
        "gated": torch.nn.functional.silu(normal[1]) * normal[2],
        "heavy": values(1024, 1024, kind="heavy", dtype=torch.float32),
    }
    for (kind, x), name in itertools.product(samples.items(), NAMES):
        of = [
            (q.storage(x, ROWWISE).decode() - x).norm() for q in (quantizer(name), Quantizer(name))
        ]
        ratio = (of[0] / of[1]).item()
        assert ratio <= (1.2 if name == "nvfp4" else 1.02), (kind, name, ratio)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_products_of_nearest_scales_adds_a_thirtieth(name: str):
    """If false, a weight of 4 bits that is multiplied in 8 has a larger error than its format."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(3, 512, 512, generator=g)
    for x in (
        normal[0],
        torch.nn.functional.silu(normal[1]) * normal[2],
        values(512, 512, kind="heavy", dtype=torch.float32),
        normal[0] * torch.logspace(-2, 2, 512)[:, None],
    ):
        made = Quantizer(name).storage(x, ROWWISE)
        own, rounded = made.decode(), made.to_gemm_operand(ANCHORED_TENSOR).decode()
        assert (own - x).norm() < (rounded - x).norm() <= 1.035 * (own - x).norm()


def _of(fmt: str):
    def factory(role):
        weight = HybridQuantizer(fmt, None, "rowwise")
        return weight if role.tensor_type == "weight" else HybridQuantizer("mxfp8", "mxfp8")

    factory.__qualname__ = factory.__name__ = f"factory_{fmt}"
    return globals().setdefault(factory.__name__, factory)  # recipes name them


SHARED = ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4_16x16", "fp8_128x128", "fp8_tensor")
FACTORIES = {fmt: _of(fmt) for fmt in SHARED}


@pytest.mark.parametrize("fmt", SHARED)
def test_codes_of_the_forward_are_the_backwards_operand(fmt: str):
    """If false, dx is of another weight than the forward multiplied, or a GEMM of 4-bit codes
    beside 8-bit activations decodes them to bf16."""
    weight = HybridQuantizer(fmt, None, "rowwise")
    assert weight.shares_storage and weight == HybridQuantizer(fmt, fmt, "rowwise")
    w = values(96, 160, seed=3).to(BF16)
    codes = weight.quantize(w)
    turned = codes.storage_for(COLUMNWISE)
    assert_same_bytes(turned.decode(), codes.storage_for(ROWWISE).decode(), "values")
    for t, of in zip(turned.buffers().values(), codes.rowwise.buffers().values()):
        assert t is of or t.data_ptr() == of.data_ptr()
    recipe = fq.CustomRecipe(FACTORIES[fmt])
    with hopper.emulated():
        plan = build_plan(recipe, "m").on(BF16, torch.device("cpu"))
        resolved = plan.resolved(BF16, torch.device("cpu"))
        assert set(resolved.domains) <= {"native", "anchored"}, resolved.domains
        layer = fq.convert(torch.nn.Linear(160, 96, bias=False, dtype=BF16), recipe)
        layer.weight.data.copy_(w)
        x = values(64, 160, seed=4).to(BF16).requires_grad_()
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        layouts = resolved.layouts["weight"]
        forward = to_layout(codes.storage_for(ROWWISE), layouts[ROWWISE])
        backward = to_layout(turned, layouts[COLUMNWISE])
        assert_same_bytes(backward.data, forward.data.t().contiguous(), "codes")
        assert_same_bytes(backward.scale.flatten(), forward.scale.flatten(), "scale")
    decoded = codes.dequantize(torch.float64)
    for got, want in ((y, x.double() @ decoded.t()), (dx, decoded.sum(0).expand(64, -1))):
        assert (got.double() - want).norm() <= 0.04 * want.norm()


def test_every_product_of_a_recipe_runs_in_8_bits_on_hopper():
    """If false, a product that could run at fp8's rate decodes to bf16."""
    for recipe in (
        recipes.nvfp4(scale_rule="fp8_exact"),
        recipes.hybrid("mxfp8", "nvfp4", scale_rule="fp8_exact"),
        recipes.hybrid("nvfp4", "fp8_current", scale_rule="fp8_exact"),
        recipes.hybrid("nvfp4", "fp8_row", scale_rule="fp8_exact"),
    ):
        plan = build_plan(recipe, "m")
        with hopper.emulated():
            on = plan.on(BF16, torch.device("cpu"))
            resolved = on.resolved(BF16, torch.device("cpu"))
            assert resolved.call is not None, recipe
            assert set(resolved.domains) <= {"native", "anchored"}, (recipe, resolved.domains)
            assert (
                "bf16"
                in build_plan(recipes.nvfp4(), "m").resolved(BF16, torch.device("cpu")).domains
            )
    with pytest.raises(
        ValueError, match="nvfp4: scale_rule must be 'nearest' or 'fp8_exact', got 'fp8'"
    ):
        recipes.nvfp4(scale_rule="fp8")
    with pytest.raises(ValueError, match="'mxfp8', 'fp8_row'.* needs a 4-bit format"):
        recipes.hybrid("mxfp8", "fp8_row", scale_rule="fp8_exact")
    with pytest.raises(ValueError, match="scale_rule='fp8_exact' is defined for e2m1"):
        format_of("mxfp8", scale_rule="fp8_exact")


def test_the_guard_counts_rows_that_e4m3_does_not_hold():
    """If false, rows far below the tensor's largest lose their bits in silence, or gaussian ones
    are moved."""
    plan = build_plan(recipes.nvfp4(scale_rule="fp8_exact"), "m")
    for product in PRODUCTS:
        assert plan._watched(product, "anchored") == (COUNTED_E2M1, COUNTED_E2M1)
        assert plan.next_rung(product, False) == plan.next_rung(product, True) == "exact"
    assert_lost_rows_are_counted(quantizer(), COUNTED_E2M1, (256, 1024))

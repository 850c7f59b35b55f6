# SPDX-License-Identifier: Apache-2.0
"""mxfp4 and mxfp6 on Hopper: codes of fewer than 8 bits that are multiplied as e4m3, by plans,
steps and the guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dist_tests.laws import assert_lost_rows_are_counted, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Format, format_of
from fsdp_quant.gemm import gemm
from fsdp_quant.linear import grouped
from fsdp_quant.linear.plan import GemmPlan, build_plan
from fsdp_quant.linear.products import LADDER, LADDER_OVER_TOKENS, PRODUCTS
from fsdp_quant.ops import layout
from fsdp_quant.ops.product_error import NOT_COUNTED, counted_as
from fsdp_quant.quantizer import Quantizer

BF16, CPU = torch.bfloat16, torch.device("cpu")
RECIPES = {
    "mxfp4": recipes.mxfp4(),
    "mxfp6": recipes.mxfp6(),
    "mxfp6/e3m2": recipes.mxfp6(grad_element="e3m2"),
    "mxfp4/mxfp8": recipes.hybrid("mxfp4", "mxfp8"),
    "mxfp8/mxfp6": recipes.hybrid("mxfp8", "mxfp6"),
}
FORMATS = [format_of("mxfp4"), format_of("mxfp6"), format_of("mxfp6", element="e3m2")]
# Blocks are exact so many binades below the largest: its numbers may be twice those of a block with
# the same largest code.
BINADES = {"e2m1": 14, "e2m3": 11, "e3m2": 9}


def layouts(plan: GemmPlan) -> set[str]:
    return {of for slot in plan.resolved(BF16, CPU).layouts.values() for of in slot.values()}


@pytest.mark.parametrize("name", RECIPES)
def test_every_product_multiplies_8_bits_with_scales_of_tensors(name: str):
    """If false, a product that could run at the fp8 rate decodes to bf16, or is a call per
    operator."""
    plan = build_plan(RECIPES[name], "m")
    with hopper.emulated():
        on = plan.on(BF16, CPU)
        resolved = on.resolved(BF16, CPU)
        assert set(resolved.domains) <= {"native", "anchored"} and "anchored" in resolved.domains
        assert resolved.call is not None and layouts(on) <= {layout.ANCHORED_TENSOR, layout.NATIVE}
        assert all(NOT_COUNTED not in of for of in resolved.watched)
        # ranks or groups share tensors: none has a scale of its own
        shared = plan.resolved(BF16, CPU)
        assert shared.call is not None and layouts(plan) <= {
            layout.ANCHORED,
            layout.ANCHORED_512,
            layout.NATIVE,
        }
        exact = build_plan(replace(RECIPES[name], accuracy="exact"), "m")
        assert exact.on(BF16, CPU) == exact and set(exact.resolved(BF16, CPU).domains) <= {
            "native",
            "bf16",
        }


def test_products_go_down_the_ladder_to_bf16():
    """If false, rows that one exponent does not serve have none of their own to go to."""
    plan = build_plan(recipes.mxfp6(), "m")
    with hopper.emulated():
        for product in PRODUCTS:
            moved, seen = plan, []
            while (rung := moved.next_rung(product, False)) is not None:
                moved = moved.moved_to({product.name: rung})
                on, (slot, direction) = moved.on(BF16, CPU), product.a
                seen.append(on.resolved(BF16, CPU).layouts[slot][direction])
            want = list(LADDER_OVER_TOKENS if product.name == "wgrad" else LADDER)[1:-1]
            assert seen == [*want, layout.COMPACT], product
            assert on.resolved(BF16, CPU).domains[PRODUCTS.index(product)] == "bf16"


def test_experts_are_multiplied_one_by_one():
    """If false, codes of several experts meet one exponent, or a kernel that knows no tokens of
    them."""
    with hopper.emulated():
        for name in ("mxfp4", "mxfp6"):
            plan = replace(build_plan(RECIPES[name], "m"), alone=False).of_groups
            reason = grouped.unsupported_reason(plan, BF16, CPU, (4, 64, 64))
            assert reason is not None and "is anchored after it was encoded" in reason
        plan = replace(build_plan(recipes.mxfp8(), "m"), alone=False).of_groups
        assert grouped.unsupported_reason(plan, BF16, CPU, (4, 64, 64)) is None


def test_operands_of_experts_are_anchored_in_tiles():
    """If false, quantizing tokens or weights of experts takes a pass for the exponents, or a layer
    of one matrix multiplies with slower scales."""
    with hopper.emulated():
        alone = build_plan(recipes.mxfp8(), "m")
        plan = replace(alone, alone=False).of_groups
        resolved = plan.resolved(BF16, CPU)
        of = resolved.layouts
        assert resolved.call is not None
        for product in PRODUCTS:
            (slot, direction), (other, across) = product.a, product.b
            assert of[slot][direction] == layout.ANCHORED_128, product
            assert of[other][across] == layout.ANCHORED_TILE, product
        assert [plan.next_rung(p, True) for p in PRODUCTS] == ["exact", "exact", "anchored 128"]
        moved = plan.moved_to({"wgrad": layout.ANCHORED_128})
        of = moved.resolved(BF16, CPU).layouts
        assert of["input"][COLUMNWISE] == of["grad_output"][COLUMNWISE] == layout.ANCHORED_128
        assert of["weight"][ROWWISE] == layout.ANCHORED_TILE
        assert moved.next_rung(PRODUCTS[2], True) == "exact"
        assert not {layout.ANCHORED_128, layout.ANCHORED_TILE} & layouts(alone)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_products_of_operands_are_exact(fmt: Format):
    """If false, the rate of fp8 costs bits of the product, on some rung."""
    x, w = values(64, 544, seed=3), values(48, 544, seed=1)
    with hopper.emulated():
        for direction in Direction:
            a, b = (
                Quantizer(fmt).storage(t if direction is ROWWISE else t.t().contiguous(), direction)
                for t in (x, w)
            )
            want = (a.operand().double() @ b.operand().double().t()).float()
            for rung in layout.ANCHORS_OF_BOTH:
                of = [s.to_gemm_operand(rung) for s in (a, b)]
                got = gemm(*of, out_dtype=torch.float32, domain="anchored")
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_the_guard_counts_rows_that_e4m3_does_not_hold(fmt: Format):
    """If false, rows far below the tensor's largest lose their bits in silence, or rows that lose
    none are moved."""
    exact = BINADES[fmt.element.name] - 2
    assert_lost_rows_are_counted(Quantizer(fmt), counted_as(fmt), (64, 512), exact)

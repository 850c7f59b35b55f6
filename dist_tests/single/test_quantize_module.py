# SPDX-License-Identifier: Apache-2.0
"""Boundary slots of a recipe, forward and backward: `fq.Quantize`, and linear layers that are asked
for them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters as dynamo_counters

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import DelayedScaling


def both_boundaries(role):
    """mxfp8 forward, row scales backward; only of this module type."""
    if role.module_type != "quantize":
        return "identity"
    return {"output": "mxfp8", "grad_input": "fp8_row"}[role.tensor_type]


def linear_boundaries(role):
    """mxfp8 products between other boundaries."""
    return {"output": "fp8_1x128", "grad_input": "fp8_row"}.get(role.tensor_type, "mxfp8")


def linear_output(role):
    return None if role.tensor_type == "grad_input" else linear_boundaries(role)


def output_only(role):
    return "fp8_1x128" if role.tensor_type == "output" else None


def rounded_gradient(role):
    return Quantizer("mxfp8", rounding="stochastic") if role.tensor_type == "grad_input" else None


def delayed(role):
    return Quantizer("fp8_tensor", scaling=DelayedScaling())


def rotated(role):
    return Quantizer("nvfp4", rotation=True)


def run(module, shape=(2, 12, 40), dtype=torch.float32):
    x, dy = values(*shape, dtype=dtype).requires_grad_(), values(*shape, seed=1, dtype=dtype)
    y = module(x)
    y.backward(dy)
    return x.detach(), dy, y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boundaries_take_the_values_of_their_slots(dtype: torch.dtype):
    """If false, a boundary is quantized in another format, direction or pass than the recipe
    says."""
    x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(both_boundaries)), dtype=dtype)
    assert_same_bytes(y, Quantizer("mxfp8").quantize(x).dequantize(), "output")
    assert_same_bytes(dx, Quantizer("fp8_row").quantize(dy).dequantize(), "grad_input")
    x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(output_only)), dtype=dtype)
    assert_same_bytes(y, Quantizer("fp8_1x128").quantize(x).dequantize(), "output")
    assert_same_bytes(dx, dy, "the gradient of a slot that is empty")


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_boundary_leaves_the_gradient_of_an_overridden_backward(override: str):
    """If false, a backward that was asked for in high precision rounds gradients at boundaries."""
    x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(both_boundaries, backward_override=override)))
    assert_same_bytes(y, Quantizer("mxfp8").quantize(x).dequantize(), "output")
    assert_same_bytes(dx, dy, "grad_input")
    of_layer = [
        run(layer(fq.CustomRecipe(f, backward_override=override, boundary_slots=True)))[3]
        for f in (linear_boundaries, linear_output)
    ]
    assert_same_bytes(*of_layer, "grad_input of a linear layer")


def test_random_bits_of_a_boundary_are_those_of_step_and_name():
    """If false, a rounded gradient repeats its draws, or is not reproducible."""
    kept = STEP.step
    try:
        drawn = []
        for step, name in ((0, "a"), (1, "a"), (0, "b"), (0, "a")):
            fq.begin_step(step)
            x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(rounded_gradient), name))
            assert_same_bytes(y, x, "output")
            drawn.append(dx)
        assert_same_bytes(drawn[3], drawn[0], "the same step")
        assert not torch.equal(drawn[1], drawn[0])
        assert not torch.equal(drawn[2], drawn[0])
    finally:
        STEP.counted_by_hand = False
        STEP.step = kept
        STEP.publish()


def two_sides(role):
    return HybridQuantizer("mxfp8", "nvfp4") if role.tensor_type == "output" else "mxfp8"


def derived_side(role):
    if role.tensor_type != "grad_input":
        return None
    return HybridQuantizer("mxfp8", "mxfp8", columnwise_source="rowwise_dequantized")


@pytest.mark.parametrize(
    "recipe, message",
    [
        (recipes.mxfp8(), "edge: mxfp8.* has neither an output nor a grad_input"),
        (fq.CustomRecipe(delayed), "edge: output is .*delayed.*; wanted rowwise current scaling"),
        (fq.CustomRecipe(rotated), "edge: output is nvfp4.*without a rotation"),
        (fq.CustomRecipe(two_sides), "edge: output is mxfp8 / nvfp4.*rowwise codes alone"),
        (fq.CustomRecipe(derived_side), "edge: grad_input is .*rowwise codes alone"),
    ],
)
def test_slots_that_a_boundary_cannot_honour_are_refused(recipe: fq.Recipe, message: str):
    """If false, a recipe that asks for something at a boundary gets something else."""
    with pytest.raises(ValueError, match=message):
        fq.Quantize(recipe, "edge")


# Of linear layers #

ASKED, NOT_ASKED = (
    fq.CustomRecipe(linear_boundaries, boundary_slots=asked) for asked in (True, False)
)


def layer(recipe: fq.Recipe, module: type = fq.Linear, *sizes: int, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return module(*sizes, 40, 40, recipe=recipe, name="fc", **options)


def test_boundaries_of_a_linear_layer_are_those_of_its_recipe():
    """If false, a recipe that answers boundary slots is not heard, or is where it was not to be
    asked."""
    x, dy, plain, plain_dx = run(layer(NOT_ASKED))
    fp8_rows, blocks = Quantizer("fp8_row"), Quantizer("fp8_1x128")
    assert_same_bytes(plain, run(layer(recipes.mxfp8()))[2], "a recipe that is not asked")
    *_, y, dx = run(layer(ASKED))
    assert_same_bytes(y, blocks.quantize(plain).dequantize(), "output")
    assert_same_bytes(dx, fp8_rows.quantize(plain_dx).dequantize(), "grad_input")
    module = layer(ASKED)
    *_, y, dx = run(lambda x: module(x, residual=x, scale=2.0))
    assert_same_bytes(
        y, blocks.quantize(torch.add(x, plain, alpha=2.0)).dequantize(), "output of a sum"
    )
    module = layer(recipes.mxfp8())
    with fq.autocast(ASKED):
        assert_same_bytes(
            run(module)[2], blocks.quantize(plain).dequantize(), "output under autocast"
        )
    fq.set_recipe(module, ASKED)
    assert_same_bytes(
        run(module)[2], blocks.quantize(plain).dequantize(), "output after set_recipe"
    )
    assert f"output {blocks}, grad_input {fp8_rows}: 1 modules" in str(fq.plan(module))
    with pytest.raises(
        ValueError, match=r"residual is \[40\] and the output \[2, 40\]; wanted one shape"
    ):
        module(torch.zeros(2, 40), residual=torch.zeros(40))


def test_boundaries_of_experts_are_their_own():
    """If false, one product for all experts leaves out the boundaries, or scales tokens of two
    experts together."""
    sizes, x = [10, 0, 14], values(24, 40, dtype=torch.float32)
    module = layer(ASKED, fq.GroupedLinear, 3)
    parts = layer(NOT_ASKED, fq.GroupedLinear, 3)(x, sizes).split(sizes)
    want = torch.cat([Quantizer("fp8_1x128").quantize(part).dequantize() for part in parts])
    assert_same_bytes(module(x, sizes), want, "output")
    with hopper.emulated():
        module = fq.GroupedLinear(3, 64, 48, dtype=torch.bfloat16, recipe=ASKED)
        assert (
            module.unsupported_reason(torch.bfloat16, x.device) == "the recipe has boundary slots"
        )


def test_boundaries_that_cannot_be_honoured_are_refused_by_name():
    """If false, a recipe asks for what no boundary does, and nobody is told."""
    with pytest.raises(
        ValueError, match="fc: output is .*delayed.*; wanted rowwise current scaling"
    ):
        layer(fq.CustomRecipe(delayed, boundary_slots=True))
    with pytest.raises(ValueError, match="fc: output is mxfp8 / nvfp4.*rowwise codes alone"):
        layer(fq.CustomRecipe(two_sides, boundary_slots=True))
    with pytest.raises(ValueError, match="mxfp8 has no such slots"):
        recipes.mxfp8(boundary_slots=True)


def rounded_boundaries(role):
    """An output in blocks, an input's gradient rounded at random, products in high precision; of
    both module types."""
    return {"output": "fp8_1x128", "grad_input": Quantizer("mxfp8", rounding="stochastic")}.get(
        role.tensor_type, "identity"
    )


def test_boundaries_in_compiled_graphs_are_the_eager_ones():
    """If false, a graph leaves boundaries out, repeats the random bits of the step it was traced
    in, or is one a layer."""
    recipe = fq.CustomRecipe(rounded_boundaries, boundary_slots=True)

    def block(i: int) -> nn.Module:
        torch.manual_seed(i)
        return nn.Sequential(
            fq.Linear(40, 40, recipe=recipe, name=f"{i}.fc"), fq.Quantize(recipe, f"{i}.edge")
        )

    torch.manual_seed(0)
    experts = fq.GroupedLinear(2, 40, 40, packed=True, recipe=recipe, name="experts")
    models = [
        nn.Sequential(block(0), block(1)),
        lambda x: experts(x.view(24, 40), [10, 14]).view(x.shape),
    ]
    torch._dynamo.reset()
    dynamo_counters.clear()
    with kept_step(), dynamo_config.patch(fail_on_recompile_limit_hit=True):
        for model, count in zip(models, (1, 2)):
            parts = [
                torch.compile(part, fullgraph=True, backend="aot_eager")
                for part in (model if count == 1 else [model])
            ]
            for step in range(2):
                fq.begin_step(step)
                want, got = (
                    run(model),
                    run(lambda x: functools.reduce(lambda y, part: part(y), parts, x)),
                )
                assert_same_bytes(got[2], want[2], f"output of step {step}")
                assert_same_bytes(got[3], want[3], f"gradient of step {step}")
            assert dynamo_counters["stats"]["unique_graphs"] == count

"""`fq.Quantize`: boundary slots of a recipe, forward and backward."""

from __future__ import annotations

import pytest
import torch

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.scaling import DelayedScaling


def both_boundaries(role):
    """mxfp8 forward, row scales backward; only of this module type."""
    if role.module_type != "quantize":
        return "identity"
    return {"output": "mxfp8", "grad_input": "fp8_row"}[role.tensor_type]


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
    """If false, a boundary is quantized in another format, direction or pass than the recipe says."""
    x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(both_boundaries)), dtype=dtype)
    assert_same_bytes(y, Quantizer("mxfp8").quantize(x).dequantize(), "output")
    assert_same_bytes(dx, Quantizer("fp8_row").quantize(dy).dequantize(), "grad_input")
    x, dy, y, dx = run(fq.Quantize(fq.CustomRecipe(output_only)), dtype=dtype)
    assert_same_bytes(y, Quantizer("fp8_1x128").quantize(x).dequantize(), "output")
    assert_same_bytes(dx, dy, "the gradient of a slot that is empty")


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


@pytest.mark.parametrize("recipe, message", [
    (recipes.mxfp8(), "edge: mxfp8.* has neither an output nor a grad_input"),
    (fq.CustomRecipe(delayed), "edge: output is .*delayed.*; wanted rowwise current scaling"),
    (fq.CustomRecipe(rotated), "edge: output is nvfp4.*without a rotation"),
])
def test_slots_that_a_boundary_cannot_honour_are_refused(recipe: fq.Recipe, message: str):
    """If false, a recipe that asks for something at a boundary gets something else."""
    with pytest.raises(ValueError, match=message):
        fq.Quantize(recipe, "edge")

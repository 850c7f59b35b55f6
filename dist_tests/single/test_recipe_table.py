# SPDX-License-Identifier: Apache-2.0
"""Recipe x module x backward mode: a test behind each cell of docs/reference/recipes.md, on the CPU
and as a Hopper GPU runs it."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, recorded_saves, sample, values
from dist_tests.single import hopper
from dist_tests.single.recipe_table import (
    CPU,
    CUSTOM,
    EXACT,
    GPU,
    HYBRIDS,
    MODES,
    MODULES,
    NAMED,
    SWITCHED,
    Module,
    check_cell,
    check_token_local,
    table,
    take,
)
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.linear.operands import weight_storages
from fsdp_quant.linear.plan import build_plan
from fsdp_quant.linear.products import PRODUCTS
from fsdp_quant.models.steps import converted_modules

CELLS = list(itertools.product([*NAMED, *CUSTOM], MODULES, MODES))
OF_RULES = list(itertools.product(EXACT, MODULES, MODES))
OF_SWITCHES = [(name, module, None) for name in SWITCHED for module in MODULES]
OF_PAIRS = list(itertools.product(HYBRIDS, MODULES, MODES))
ON_HOPPER = list(itertools.product(CUSTOM, MODULES, MODES)) + list(
    itertools.product([*NAMED, *HYBRIDS], MODULES, MODES)
)


@pytest.mark.parametrize(
    "recipe, module, mode",
    CELLS + sample(OF_RULES, 5) + sample(OF_SWITCHES, 3) + sample(OF_PAIRS, 11),
)
def test_a_cell_is_its_definition(recipe: str, module: str, mode: str | None):
    """If false, a module multiplies, keeps or quantizes something else than its recipe and backward
    mode say."""
    check_cell(recipe, module, mode)


@pytest.mark.parametrize(
    "recipe, module, mode", OF_RULES + sample(OF_SWITCHES, 3) + sample(ON_HOPPER, 23)
)
def test_a_cell_is_its_definition_in_compiled_steps(recipe: str, module: str, mode: str | None):
    """If false, a recipe is another one on a GPU alone: rounded, anchored or decoded otherwise."""
    with hopper.emulated():
        check_cell(recipe, module, mode, GPU._replace(device="cpu"))


def test_the_reference_has_the_table():
    """If false, docs/reference/recipes.md promises a cell that no test is behind, or hides one."""
    page = (Path(__file__).parents[2] / "docs/reference/recipes.md").read_text()
    assert table() in page, f"docs/reference/recipes.md wants this table of recipes:\n{table()}"


def trained(
    kind: Module, recipe: fq.Recipe, quantized: bool, evaluates: bool, built_in: str = "train"
) -> list[Tensor]:
    """Output, input gradient and weights of every step; quantized: parameters that are codes."""
    STEP.seed, STEP.step, STEP.counted_by_hand = 0, 0, False
    STEP.publish()
    torch.manual_seed(0)
    with torch.no_grad() if built_in == "no_grad" else contextlib.nullcontext():
        with fq.quantized_model_init(recipe) if quantized else contextlib.nullcontext():
            model = kind.built(recipe, CPU)
    optimizer, seen = fq.optim.FusedAdam(model.parameters(), lr=1e-2), []
    shape = (*kind.lead, CPU.m // math.prod(kind.lead), CPU.k)
    for step in range(2):
        if evaluates:
            model.eval()
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    kind.call(model, values(*shape, seed=90, dtype=torch.float32) * 50, CPU)
            model.train()
        x = values(*shape, seed=step, dtype=torch.float32).requires_grad_()
        y = kind.call(model, x, CPU)
        y = y if isinstance(y, tuple) else (y,)
        torch.autograd.backward(y, [values(*t.shape, seed=5, dtype=torch.float32) for t in y])
        optimizer.step()
        optimizer.zero_grad()
        seen += [
            *(t.detach() for t in y),
            x.grad,
            *(t.clone() for t in model.state_dict().values()),
        ]
    return seen


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "recipe", [recipes.fp8_delayed(length=4), recipes.nvfp4()], ids=["fp8_delayed", "nvfp4"]
)
def test_evaluation_and_where_a_module_was_built_change_nothing(recipe: fq.Recipe, module: str):
    """If false, codes, histories or directions that evaluation made or dropped are those that
    training multiplies."""
    for kind in MODULES[module]:
        want = trained(kind, recipe, False, False)
        for quantized, evaluates, built_in in ((False, True, "train"), (True, True, "no_grad")):
            for i, (a, b) in enumerate(
                zip(trained(kind, recipe, quantized, evaluates, built_in), want)
            ):
                assert_same_bytes(
                    a,
                    b,
                    f"{module} {i}, quantized parameters {quantized}, evaluates {evaluates}, "
                    f"{built_in}",
                )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_made_for_frozen_weights(mode: str | None):
    """If false, LoRA pays for operands of a wgrad that nobody computes: codes, memory, or the input
    itself. What is kept is what dgrad multiplies, or the codes that it decodes."""
    for kind in itertools.chain(*MODULES.values()):
        model = kind.built(recipes.mxfp8(backward_override=mode), CPU).requires_grad_(False)
        x = values(
            *kind.lead, CPU.m // math.prod(kind.lead), CPU.k, dtype=torch.float32
        ).requires_grad_()
        counters.reset()
        with recorded_saves() as saved:
            y = kind.call(model, x, CPU)
        y = y if isinstance(y, tuple) else (y,)
        torch.autograd.backward(y, [torch.ones_like(t) for t in y])
        layers = len(converted_modules(model))
        rows, columns = ("mxfp8", "rowwise", "reference"), ("mxfp8", "columnwise", "reference")
        # Rows of x and w, and of dy where it is quantized; columns of w, which dgrad multiplies,
        # where they are.
        wanted = {rows: 3 * layers, columns: layers} if mode is None else {rows: 2 * layers}
        assert counters.of("quantize") == wanted
        assert counters.total("gemm") == 2 * layers
        for layer in (
            converted_modules(model).values()
            if not getattr(model, "packed", False)
            else model.layers
        ):
            side = ROWWISE if layer.plan.weight.decodes_columnwise else COLUMNWISE
            kept = weight_storages(layer.weight, [side], layer.plan, None, x.dtype)[side]
            for buffer in kept.buffers().values():
                take(saved, buffer, "codes of the weight")
        assert not [t for t in saved if t.dtype is torch.uint8], "codes of the input"


@pytest.mark.parametrize("accuracy", ["fast", "token"])
@pytest.mark.parametrize("recipe", [*NAMED, *HYBRIDS])
def test_tokens_depend_on_each_other_where_the_table_says(recipe: str, accuracy: str):
    """If false, a packed sequence, a policy or a batch of an evaluation changes with its neighbours
    under a recipe that `fq.recipes.table()` calls token-local."""
    check_token_local(recipe, accuracy)


def test_the_first_rung_of_a_token_local_plan_is_one_exponent_per_token():
    """If false, accuracy="token" begins with an exponent of the tensor, or the check moves a GEMM
    to the rung that it is on."""
    fast, local = (build_plan(recipes.mxfp8(accuracy=a), "fc") for a in ("fast", "token"))
    of_ranks = [fast.next_rung(product, True) for product in PRODUCTS]
    assert [local.next_rung(p, False) for p in PRODUCTS[:2]] == of_ranks[:2]
    assert local.next_rung(PRODUCTS[2], False) == fast.next_rung(PRODUCTS[2], False) != of_ranks[2]
    on_hopper = [plan._with_tensor_scales.by_tensor for plan in (fast, local)]
    assert on_hopper == [(True, True, True), (False, False, True)]

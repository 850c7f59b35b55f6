# SPDX-License-Identifier: Apache-2.0
"""`fq.numerics.batch_invariant`: a token has the same bits in every batch, on the CPU and in what
Python chooses on GPUs."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from dist_tests.single import hopper
from dist_tests.single.recipe_table import HYBRIDS, NAMED, RECIPES
from fsdp_quant import recipes
from fsdp_quant.linear import among_ranks
from fsdp_quant.linear.cut import TensorParallel
from fsdp_quant.quantizer import HybridQuantizer, Quantizer

FP32, BF16 = torch.float32, torch.bfloat16
TOKENS = 144  # a multiple of 16, which compiled steps accept
# Batches of 1, 3, 8 and 130 tokens: (first, last) of each.
BATCHES = ((0, 1), (77, 78), (129, 130), (5, 8), (64, 72), (120, 128), (0, 130))
LOCAL = {
    name: make
    for name in [*NAMED, *(h for h in HYBRIDS if h.endswith((", fp8_tensor)", ", nvfp4)")))]
    if recipes.is_token_local((make := lambda n=name: RECIPES[n](accuracy="token"))())
} | {
    "nvfp4(row)": lambda: recipes.nvfp4(scale_per="row"),
    "nvfp4(row, fp8_exact)": lambda: recipes.nvfp4(scale_per="row", scale_rule="fp8_exact"),
    "mxfp8(exact)": lambda: recipes.mxfp8(accuracy="exact"),
    "fp8_block(vectors)": lambda: recipes.fp8_block(accuracy="token", square_blocks=False),
}
MADE = [name for name in LOCAL if not name.startswith("hybrid")]
TOKEN = LOCAL["mxfp8"]


def net(recipe: fq.Recipe, dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    # not SiLU, of which torch's kernels for CPUs compute the last elements of a tensor otherwise
    layers = nn.Linear(96, 80, dtype=dtype), nn.ReLU(), nn.Linear(80, 40, dtype=dtype)
    return fq.convert(nn.Sequential(*layers), recipe)


def tokens(dtype: torch.dtype = FP32) -> Tensor:
    return values(TOKENS, 96, dtype=dtype)


def differing(run: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[int, int]]:
    """The batches whose rows have other bits than in the batch of all tokens."""
    whole = run(x)
    return [(a, b) for a, b in BATCHES if not torch.equal(run(x[a:b]), whole[a:b])]


@pytest.fixture(autouse=True)
def _sums_of_few_rows_are_ordered_otherwise(monkeypatch):
    """The fault, planted: a GEMM of fewer than 64 rows rounds as if it added in another order."""
    gemm = importlib.import_module("fsdp_quant.gemm")  # the name in fq is the function
    product = gemm._fp32_product

    def planted(a: Tensor, b: Tensor) -> Tensor:
        y = product(a, b)
        return y * (1 + 2**-7) if len(a) < 64 else y

    monkeypatch.setattr(gemm, "_fp32_product", planted)


@pytest.mark.parametrize("recipe", LOCAL)
def test_a_token_has_its_bits_in_every_batch(recipe: str):
    """If false, a policy that is evaluated token by token is another one than that which was
    trained on whole sequences."""
    model, x = net(LOCAL[recipe]()), tokens()
    with torch.no_grad():
        with fq.numerics.batch_invariant():
            assert not differing(model, x)
        if recipe != "identity" and not recipe.startswith("hybrid(identity"):
            assert differing(model, x) == [(a, b) for a, b in BATCHES if b - a < 64], "control"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("recipe", MADE)
def test_hopper_multiplies_by_its_own_kernels(recipe: str, dtype: torch.dtype):
    """If false, cuBLASLt chooses the order of sums by the number of rows, or operands of few rows
    do not fit the kernels that replace it."""
    with hopper.emulated() as operators, torch.no_grad():
        model, x = net(LOCAL[recipe](), dtype), tokens(dtype)
        operators.calls.clear()
        with fq.numerics.batch_invariant():
            assert not differing(model, x)
        own, others = operators.count("grouped_gemm"), operators.count("gemm")
        is_own = dtype is BF16 or recipe != "identity"
        assert (own, others) == ((len(BATCHES) + 1) * 2 * is_own, 0)
        assert not operators.steps(), "a compiled step multiplies by cuBLASLt"
        outside = model(x)
        with fq.numerics.batch_invariant():
            torch.testing.assert_close(model(x), outside)


@pytest.mark.parametrize("arch", ["sm_89", "sm_100f"])
def test_codes_are_decoded_where_no_kernel_is_our_own(arch: str):
    """If false, cuBLASLt multiplies their codes, in an order of its own."""
    with hopper.emulated(arch) as operators, torch.no_grad():
        model, x = net(TOKEN(), BF16), tokens(BF16)
        with fq.numerics.batch_invariant():
            assert not differing(model, x)
        assert operators.count("gemm") == operators.count("grouped_gemm") == 0
        if arch == "sm_100f":  # which multiplies the codes outside
            fq.set_recipe(model, recipes.mxfp8(accuracy="token", require_native=True))
            refused = pytest.raises(ValueError, match="0: fprop .* bf16 domain .*require_native")
            with fq.numerics.batch_invariant(), refused:
                model(x)


@pytest.mark.parametrize("on_hopper", [False, True])
def test_compiled_layers_have_the_bits_of_the_context(on_hopper: bool):
    """If false, a layer that was compiled outside ignores the context, or keeps it behind it."""
    torch.compiler.reset()
    with hopper.emulated() if on_hopper else contextlib.nullcontext(), torch.no_grad():
        model, x = net(TOKEN())[:1], tokens()
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        for inside in (False, True, False):
            context = fq.numerics.batch_invariant if inside else contextlib.nullcontext
            with context():
                for rows in (x, x[:1]):
                    assert_same_bytes(run(rows), model(rows), f"{inside}")
                assert on_hopper or torch.equal(run(x[:1]), run(x)[:1]) is inside

        def entered(x: Tensor) -> Tensor:
            with fq.numerics.batch_invariant():
                return model(x)

        if on_hopper:
            return
        inner = torch.compile(entered, fullgraph=True, backend="aot_eager")
        assert_same_bytes(inner(x[:3]), entered(x[:3]), "entered in the region")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("on_hopper", [False, True])
def test_experts_and_fused_modules_are_invariant(on_hopper: bool, compiled: bool):
    """If false, a mixture of experts, or a norm and an MLP in fused kernels, take another path than
    single layers."""
    torch.compiler.reset()
    dtype = BF16 if on_hopper else FP32
    around = hopper.emulated() if on_hopper else contextlib.nullcontext()
    with around as operators, torch.no_grad():
        torch.manual_seed(0)
        experts = fq.GroupedLinear(3, 96, 80, dtype=dtype, recipe=TOKEN(), bias=False)
        mlp = fq.LayerNormMLP(96, 64, dtype=dtype, recipe=TOKEN())
        run = torch.compile(experts, backend="aot_eager") if compiled else experts
        x = tokens(dtype)
        with fq.numerics.batch_invariant():
            whole = run(x, torch.tensor([10, 110, TOKENS]))
            few = run(torch.cat([x[3:4], x[50:58]]), torch.tensor([1, 9, 9]))
            assert torch.equal(few, torch.cat([whole[3:4], whole[50:58]]))
            mlp(x)
            fq.set_recipe(experts, recipes.mxfp8())
            with pytest.raises(ValueError, match="wants a token-local"):
                experts(x, torch.tensor([10, 110, TOKENS]))
        assert not on_hopper or not (operators.count("gemm") or operators.steps())


def test_backwards_are_those_outside():
    """If false, the context changes gradients, or a checkpoint recomputes outside of it."""
    seen = []
    for inside, recomputes in ((False, False), (True, False), (True, True)):
        model, x = net(TOKEN()), tokens().requires_grad_()
        with fq.numerics.batch_invariant() if inside else contextlib.nullcontext():
            y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        y.backward(values(TOKENS, 40, seed=1, dtype=FP32))
        seen.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, *others in zip(*seen):
        for other in others:
            assert_same_bytes(other, plain, "gradients")


def _stochastic(role: fq.Role):
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("mxfp8", rounding="stochastic")


def _of_a_tensor_at_the_boundary(role: fq.Role):
    boundary = {"output": HybridQuantizer("fp8_tensor", None), "grad_input": None}
    return boundary.get(role.tensor_type, "fp8_row")


REFUSED = {
    "fp8_current": recipes.fp8_current,
    "fp8_delayed": recipes.fp8_delayed,
    "nvfp4": recipes.nvfp4,
    "mxfp8": recipes.mxfp8,
    "stochastic": lambda: fq.CustomRecipe(_stochastic, accuracy="token"),
    "boundary": lambda: fq.CustomRecipe(_of_a_tensor_at_the_boundary, boundary_slots=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", REFUSED)
def test_recipes_of_whole_tensors_are_refused(recipe: str, compiled: bool):
    """If false, the context is entered, and a token changes with its neighbours."""
    model = net(REFUSED[recipe]())
    run = torch.compile(model, backend="eager") if compiled else model
    wanted = r"0: got .*wants a token-local recipe.*leave the context"
    with fq.numerics.batch_invariant(), pytest.raises(ValueError, match=wanted):
        run(tokens())
    with fq.autocast(TOKEN()), fq.numerics.batch_invariant():
        model(tokens())  # the recipe that multiplies counts


def test_a_sum_over_ranks_is_refused():
    """If false, a batch chooses the order in which ranks are added."""
    layer, x = net(TOKEN())[0], tokens()
    for ranks, column, raises in ((3, False, True), (2, False, False), (8, True, False)):
        group = SimpleNamespace(size=lambda ranks=ranks: ranks)
        axis = TensorParallel(group, column)  # type: ignore[arg-type]
        done = pytest.raises(NotImplementedError, match=f"0: its output sums over {ranks}")
        with fq.numerics.batch_invariant(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(among_ranks, "_multiply", lambda *args: args[5])
            with done if raises else contextlib.nullcontext():
                plan = among_ranks.multiply_shared(layer, x, x, layer.weight, None, axis)
                assert plan.batch_invariant


def test_the_context_is_of_its_thread():
    """If false, a server's context changes the trainer's bits, or the other way round."""
    model, x, seen = net(TOKEN()), tokens(), []
    with fq.numerics.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(differing(model, x)))
        thread.start()
        thread.join()
        assert not differing(model, x)
    assert seen[0] and differing(model, x)

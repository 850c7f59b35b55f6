# SPDX-License-Identifier: Apache-2.0
"""One `fq.Linear`: its three products, what its backward keeps, and what may change between its
steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, recorded_saves, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, IDENTITY, ROWWISE, format_of
from fsdp_quant.linear.operands import weight_operands
from fsdp_quant.linear.plan import PRODUCTS
from fsdp_quant.ops import rng
from fsdp_quant.ops.rng import tensor_id
from fsdp_quant.quantizer import HybridQuantizer, Quantizer

# Recipes of this file #


def three_formats(role):
    """fprop in fp8, dgrad in mxfp8, wgrad in nvfp4."""
    return {
        "input": HybridQuantizer("fp8_tensor", "nvfp4"),
        "weight": HybridQuantizer("fp8_tensor", "mxfp8"),
        "grad_output": HybridQuantizer("mxfp8", "nvfp4"),
    }.get(role.tensor_type)


def element_per_direction(role):
    """e4m3 in the forward, e5m2 in the backward."""
    backward = format_of("fp8_tensor", element="e5m2")
    return HybridQuantizer(
        backward if role.tensor_type == "grad_output" else "fp8_tensor", backward
    )


def delayed_and_current(role):
    """Delayed scaling in the forward, current in the backward."""
    delayed = Quantizer("fp8_tensor", scaling=fq.DelayedScaling(length=4))
    return HybridQuantizer(
        Quantizer("fp8_tensor") if role.tensor_type == "grad_output" else delayed, "fp8_tensor"
    )


def rounds_everything_but_weights(role):
    """Stochastic rounding of inputs and gradients, in both directions."""
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("mxfp8", rounding="stochastic")


def rounds_gradients(role):
    return (
        Quantizer("mxfp8", rounding="stochastic") if role.tensor_type == "grad_output" else "mxfp8"
    )


def derived_columns(role):
    """The backward multiplies what the forward decoded, in its own format."""
    if role.tensor_type == "grad_output":
        return "mxfp8"
    return HybridQuantizer("mxfp8", "fp8_row", "rowwise_dequantized")


NAMED = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_current_e5m2": recipes.fp8_current(grad_element="e5m2"),
    "fp8_delayed": recipes.fp8_delayed(),
    "fp8_row": recipes.fp8_row(),
    "fp8_block": recipes.fp8_block(),
    "fp8_block_fp32_scales": recipes.fp8_block(pow2=False),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
}
HYBRIDS = {
    "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4_mxfp8": recipes.hybrid("nvfp4", "mxfp8"),
    "fp8_block_identity": recipes.hybrid("fp8_block", "identity"),
    "identity_fp8_row": recipes.hybrid("identity", "fp8_row"),
}
CUSTOM = {
    f.__name__: fq.CustomRecipe(f)
    for f in (
        three_formats,
        element_per_direction,
        delayed_and_current,
        rounds_everything_but_weights,
        derived_columns,
    )
}
ALL = NAMED | HYBRIDS | CUSTOM
BY_FAMILY = {
    "identity": recipes.identity,
    "fp8_tensor": recipes.fp8_current,
    "fp8_row": recipes.fp8_row,
    "fp8_block": recipes.fp8_block,
    "mxfp8": recipes.mxfp8,
    "nvfp4": recipes.nvfp4,
}
SHAPES = {"2d": (24, 40), "3d": (2, 12, 40)}
FEATURES = (40, 56)  # in, out: no multiple of 16 or 32


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, counted by training forwards, with empty counters."""
    with kept_step():
        STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 0, 0, 0, False
        STEP.publish()
        counters.reset()
        yield


def restart() -> None:
    """Random bits as in a new process."""
    STEP.step, STEP.micro_batch, STEP.counted_by_hand = 0, 0, False
    STEP.publish()


def plain_linear(
    bias: bool = True, dtype: torch.dtype = torch.float32, features=FEATURES, seed: int = 0
) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(*features, bias=bias, dtype=dtype)


def linear(
    recipe: fq.Recipe, bias: bool = True, dtype: torch.dtype = torch.float32, features=FEATURES
) -> fq.Linear:
    return fq.convert(nn.ModuleDict({"fc": plain_linear(bias, dtype, features)}), recipe)["fc"]


def plain_net(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 56, bias, dtype=dtype),
        nn.GELU(),
        nn.Linear(56, 48, bias, dtype=dtype),
        nn.GELU(),
        nn.Linear(48, 24, bias, dtype=dtype),
    )


def net(recipe: fq.Recipe, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    return fq.convert(plain_net(dtype, bias), recipe)


def run(module: nn.Module, x: Tensor, dy: Tensor, **autocast) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", **autocast) if autocast else contextlib.nullcontext():
        y = module(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad} | {
        f"d {n}": p.grad for n, p in module.named_parameters()
    }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what} {name}")


def train(
    model: nn.Module, steps: int = 5, batches: int = 1, seed: int = 7, lr: float = 1e-2
) -> list[dict[str, Tensor]]:
    """Outputs, gradients and weights of every AdamW step on seeded data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    seen = []
    for step in range(steps):
        for batch in range(batches):
            x, dy = (
                values(24, n, seed=seed + 17 * step + batch + k, dtype=torch.float32)
                for n, k in ((40, 0), (24, 5))
            )
            y = model(x)
            y.backward(dy)
        seen.append(
            {"y": y.detach()} | {f"d {n}": p.grad.clone() for n, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] |= {n: p.clone() for n, p in model.state_dict().items()}
    return seen


def expected_storages(module: fq.Linear, slot: str, x: Tensor):
    """The QuantizedTensor of one slot, from its quantizer alone."""
    key = torch.tensor(
        [STEP.seed, STEP.step, tensor_id(f"{module.runtime.name}.{slot}"), STEP.micro_batch, 0]
    )
    return module.plan.hybrid(slot).quantize(x, key=key)


def histories(model: nn.Module) -> dict[str, Tensor]:
    """Amaxes of every delayed side, the open slot first, by "module.slot.direction"."""
    return {key: h["amaxes"].clone() for key, h in fq.state_dict(model)["histories"].items()}


# The three products #


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CUSTOM)  # others: test_recipe_table.py
def test_linear_products_are_those_of_the_decoded_operands(name: str, shape: str):
    """Otherwise some GEMM multiplies another format, direction or random draw than the recipe
    names.

    Oracle: the quantizers alone, their storages decoded, fp64 products. fp32 accumulation of n
    terms is off by at most (n + 1) 2^-24 |a| |b|; turning a rotation back adds four fp32 additions
    and a product on either operand.
    """
    module = linear(ALL[name])
    x, dy = (
        values(*SHAPES[shape], dtype=torch.float32),
        values(*SHAPES[shape][:-1], 56, seed=1, dtype=torch.float32),
    )
    got = run(module, x, dy)
    weight = module.state_dict()["weight"]
    quantized = any(module.plan.weight.side(d).fmt.is_quantized for d in (ROWWISE, COLUMNWISE))
    xq = expected_storages(module, "input", x.reshape(-1, 40))
    dyq = expected_storages(module, "grad_output", dy.reshape(-1, 56))
    wq = module.plan.weight.quantize(weight.bfloat16() if quantized else weight)
    # identity sides keep the compute dtype, here the input's fp32
    whole = module.plan.weight.quantize(weight)

    def w(direction):
        quantizer = module.plan.weight.side(direction)
        return getattr(wq if quantizer.fmt.is_quantized else whole, direction.value).dequantize(
            torch.float32
        )

    def check(what: str, got: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        a, b = a.double(), b.double()
        want = a @ b.t() + (0 if bias is None else bias.double())
        bound = (
            (a.shape[1] + 12) * 2.0**-24 * a.norm(dim=1)[:, None] * b.norm(dim=1)
            + 2.0**-22 * want.abs()
            + 1e-30
        )
        worst = ((got.reshape(want.shape).double() - want).abs() / bound).max()
        assert worst <= 1, f"{name} {what}: error {worst:.3g} times its bound"

    def decoded(t, direction):
        return getattr(t, direction.value).dequantize(torch.float32)

    check("fprop", got["y"], decoded(xq, ROWWISE), w(ROWWISE), module.bias.detach())
    check("dgrad", got["dx"], decoded(dyq, ROWWISE), w(COLUMNWISE).t())
    check("wgrad", got["d weight"], decoded(dyq, COLUMNWISE).t(), decoded(xq, COLUMNWISE).t())
    assert_same_bytes(got["d bias"], dy.reshape(-1, 56).sum(0), "bias gradient")


@pytest.mark.parametrize("family", BY_FAMILY)
def test_hybrid_of_one_family_equals_the_named_recipe(family: str):
    """Otherwise equal formats are not the special case of unequal ones: outputs, gradients, five
    AdamW steps."""
    want = train(net(BY_FAMILY[family]()))
    restart()
    for i, (a, b) in enumerate(zip(train(net(recipes.hybrid(family, family))), want)):
        assert_same(a, b, f"step {i}")


def test_one_side_of_a_hybrid_does_not_change_the_other():
    """Otherwise the forward depends on the backward's format, or the backward's on the forward's
    weight codes."""
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    forward = {
        b: run(linear(recipes.hybrid("mxfp8", b)), x, dy)["y"]
        for b in ("identity", "fp8_row", "fp8_block", "nvfp4")
    }
    for backward, y in forward.items():
        assert_same_bytes(y, forward["identity"], f"forward with {backward} backward")
    backward = {
        f: run(linear(recipes.hybrid(f, "mxfp8")), x, dy)
        for f in ("identity", "fp8_row", "fp8_block", "nvfp4")
    }
    for name, got in backward.items():
        for grad in ("dx", "d weight", "d bias"):
            assert_same_bytes(got[grad], backward["identity"][grad], f"{grad} with {name} forward")


# Identity #


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (2, 1, 3, 16), (16,), (0, 16)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_identity_equals_the_plain_module(dtype: torch.dtype, bias: bool, shape):
    """Otherwise converting alone, without any quantization, changes a run."""
    x, dy = values(*shape, dtype=dtype), values(*shape[:-1], 24, seed=1, dtype=dtype)
    want = run(plain_linear(bias, dtype, (16, 24)), x, dy)
    assert_same(run(linear(recipes.identity(), bias, dtype, (16, 24)), x, dy), want)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identity_equals_the_plain_module_under_torch_autocast(
    dtype: torch.dtype, bias: bool, shape
):
    """Otherwise autocast casts something else, or keeps another gradient dtype, than for
    nn.Linear."""
    x, dy = values(*shape, dtype=dtype), values(*shape[:-1], 24, seed=1)
    for options in (
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "enabled": False},
    ):
        want = run(plain_linear(bias, dtype, (16, 24)), x, dy, **options)
        assert_same(
            run(linear(recipes.identity(), bias, dtype, (16, 24)), x, dy, **options),
            want,
            str(options),
        )


def test_identity_equals_the_plain_module_on_strided_tensors():
    """Otherwise a transposed input or an expanded gradient is read in the wrong order."""
    for make in (plain_linear, lambda: linear(recipes.identity())):
        x = values(40, 24, dtype=torch.float32).t().requires_grad_()
        y = make()(x)
        y.sum().backward()  # the gradient is an expanded scalar
        results = (y.detach(), x.grad) if make is plain_linear else results + (y.detach(), x.grad)  # noqa: F821
    assert_same_bytes(results[2], results[0], "output")
    assert_same_bytes(results[3], results[1], "input gradient")


def test_identity_training_equals_plain_training():
    """Otherwise something between the steps (version, hook, cast) changes the weights."""
    for i, (a, b) in enumerate(zip(train(net(recipes.identity())), train(plain_net()))):
        assert_same(a, b, f"step {i}")


def test_quantized_linear_takes_strided_inputs():
    """Otherwise codes follow memory order instead of logical order."""
    x = values(40, 24, dtype=torch.float32)
    dy = values(56, 24, seed=1, dtype=torch.float32)
    for name in ("mxfp8", "nvfp4", "fp8_block"):
        strided = run(linear(ALL[name], bias=False), x.t(), dy.t())
        assert_same(
            strided,
            run(linear(ALL[name], bias=False), x.t().contiguous(), dy.t().contiguous()),
            name,
        )


@pytest.mark.parametrize(
    "name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "mxfp8_nvfp4"]
)
def test_linear_takes_no_rows(name: str):
    """Otherwise an expert without tokens, or an empty last batch, crashes or leaves NaNs in the
    weight's gradient."""
    got = run(linear(ALL[name]), torch.zeros(0, 40), torch.zeros(0, 56))
    assert got["y"].shape == (0, 56)
    assert got["dx"].shape == (0, 40)
    assert got["d weight"].count_nonzero() == 0
    assert got["d bias"].count_nonzero() == 0


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block"])
def test_linear_result_dtype_is_that_of_the_input_or_of_autocast(name: str):
    """Otherwise a converted layer changes the dtype that flows through a model; gradients keep the
    parameters' dtype."""
    for inside in (torch.float32, torch.bfloat16, torch.float16):
        module = linear(ALL[name])
        x, dy = values(4, 40, dtype=inside), values(4, 56, dtype=inside)
        got = run(module, x, dy)
        assert (got["y"].dtype, got["dx"].dtype) == (inside, inside)
        assert (got["d weight"].dtype, got["d bias"].dtype) == (torch.float32, torch.float32)
        # The weight's codes are of the master in compute_dtype: fp32 inputs of the same values give
        # the same product.
        wide = run(linear(ALL[name]), x.float(), dy.float())["y"]
        assert_same_bytes(got["y"], wide.to(inside), f"output of {inside} inputs")
    cast = run(
        linear(ALL[name]), values(4, 40, dtype=torch.float32), values(4, 56), dtype=torch.bfloat16
    )
    assert (cast["y"].dtype, cast["dx"].dtype, cast["d weight"].dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert_same_bytes(
        cast["y"],
        run(linear(ALL[name]), values(4, 40), values(4, 56))["y"],
        "autocast casts the input",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_modules_run_every_product(dtype: torch.dtype):
    """Otherwise bf16 or fp16 parameters give something else than the same values in fp32."""
    for name in ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp8_nvfp4"):
        narrow = linear(ALL[name], dtype=dtype, features=(32, 48))
        wide = linear(ALL[name], features=(32, 48))
        wide.load_state_dict(narrow.state_dict())
        x, dy = values(16, 32, dtype=dtype), values(16, 48, seed=1, dtype=dtype)
        got, want = run(narrow, x, dy), run(wide, x.float(), dy.float())
        for key in ("y", "dx", "d weight"):
            assert_same_bytes(got[key], want[key].to(dtype), f"{name} {key}")


# backward_override #


def test_dequantized_override_follows_a_delayed_scale():
    """Otherwise the backward decodes the input with another scale than the forward's: the
    history's, not the amax's."""
    module = linear(recipes.fp8_delayed(backward_override="dequantized"), bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module(values(24, 40, dtype=torch.float32) * 4).sum().backward()
    optimizer.step()
    x, dy = values(24, 40, seed=2, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    got = run(module, x, dy)["d weight"]
    enc = fq.state_dict(module)["histories"][".input.rowwise"]["enc"]
    assert float(enc) == pytest.approx(
        448 / float((values(24, 40, dtype=torch.float32) * 4).abs().max())
    )
    decoded = (x * enc).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / enc)
    assert_same_bytes(got, dy.t().mm(decoded), "weight gradient")


# What the backward keeps #


def test_nothing_is_saved_without_a_graph():
    """Otherwise evaluation quantizes columns and keeps buffers that no backward reads."""
    module = linear(recipes.nvfp4())
    with torch.no_grad(), recorded_saves() as saved:
        module(values(24, 40, dtype=torch.float32))
    assert saved == []
    assert {d for (_, d, _) in counters.of("quantize")} == {"rowwise"}


@pytest.mark.parametrize("name", [n for n in ALL if n != "derived_columns"])
def test_saving_the_original_input_gives_the_same_gradients(name: str):
    """Otherwise trading memory for a second quantization changes the run: scales or random bits
    were drawn anew."""
    kept = copy.copy(ALL[name])
    object.__setattr__(kept, "save_original_input", True)
    assert linear(kept).plan.saves == "input"
    want = train(net(ALL[name]), steps=3)
    restart()
    for i, (a, b) in enumerate(zip(train(net(kept), steps=3), want)):
        assert_same(a, b, f"step {i}")


def test_saving_the_original_input_is_never_of_decoded_operands():
    """Otherwise the backward multiplies other values than the forward did, or recipes that both
    options share are refused."""
    asked, plain = (
        linear(recipes.mxfp8(backward_override="dequantized", save_original_input=s))
        for s in (True, None)
    )
    assert asked.plan == plain.plan and asked.plan.saves == "rowwise"


# Frozen weights and inputs without gradients #


def test_first_layer_computes_no_input_gradient():
    """Otherwise the layer that reads the data pays a dgrad that nobody reads, and quantizes rows
    for it."""
    module = linear(recipes.mxfp8())
    y = module(values(24, 40, dtype=torch.float32))
    counters.reset()
    y.sum().backward()
    assert counters.of("quantize") == {("mxfp8", "columnwise", "reference"): 1}
    assert counters.total("gemm") == 1
    assert counters.of("weight encode") == {}


# Evaluation #


def test_amaxes_are_recorded_where_a_backward_may_follow():
    """Otherwise an evaluation sets the scales of training, or a training in evaluation mode (frozen
    norms) has the scales of its first step for ever."""
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, dtype=torch.float32)
    for is_training in (False, True):
        module = linear(recipes.fp8_delayed(length=4)).train(is_training)
        with torch.no_grad():
            module(x)
        with torch.inference_mode():
            module(x)
        module.requires_grad_(False)(x)
        assert not any(h.any() for key, h in histories(module).items() if "weight" not in key)
        module.requires_grad_()(x).backward(dy)
        for slot in ("input", "grad_output"):
            assert histories(module)[f".{slot}.rowwise"].count_nonzero() == 1, slot


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8_nvfp4"])
def test_a_quantized_parameter_keeps_the_directions_that_it_has(name: str):
    """Otherwise an evaluation drops codes that training made, and the next backward makes them
    again, or has none."""
    with fq.quantized_model_init(ALL[name]), torch.no_grad():
        model = net(ALL[name]).eval()
    optimizer, x = (
        fq.optim.FusedAdam(model.parameters(), lr=1e-2),
        values(24, 40, dtype=torch.float32),
    )
    layer, stages = (
        model[2],
        [(torch.no_grad, False), (torch.enable_grad, True), (torch.inference_mode, False)],
    )
    for _ in range(2):
        held = set()
        for context, trains in stages * 2:
            with context():
                y = model.train(trains)(x)
                if trains:
                    y.sum().backward()
            codes = vars(layer.weight._pair)
            now = {d for d in layer.plan.weight.encodings if codes.get(d.value) is not None}
            assert held <= now, f"{context.__name__} dropped {held - now}"
            held = now
        assert held == set(layer.plan.weight.encodings)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8_nvfp4"])
def test_nothing_of_a_weight_outlives_its_backward(name: str):
    """Otherwise codes stay beside the weights between steps, and something has to know when they
    are stale."""
    module, x = linear(ALL[name]), values(24, 40, dtype=torch.float32).requires_grad_()

    def codes() -> list[Tensor]:
        gc.collect()
        # by type: `isinstance` imports what lazy modules stand for
        return [t for t in gc.get_objects() if type(t) is Tensor and t.dtype is torch.uint8]

    others = codes()  # of other tests, alive while this one looks
    known = set(map(id, others))
    y = module(x)
    assert [t for t in codes() if id(t) not in known]
    y.sum().backward()
    del y
    left = [t.shape for t in codes() if id(t) not in known]
    assert not left, left


def test_the_amax_of_a_weight_serves_both_directions():
    """If false, the backward reads a weight again for an amax that the forward has taken."""
    layer, statistics = linear(recipes.hybrid("fp8_current", "nvfp4")), {}
    plan = layer.plan.on(torch.float32, layer.weight.device)
    weight_operands(layer.weight, [ROWWISE], plan, torch.float32, statistics=statistics)
    assert set(plan.weight.encodings) == set(statistics) == {ROWWISE, COLUMNWISE}


def test_training_starts_after_a_first_forward_in_inference_mode(monkeypatch):
    """Otherwise the step's tensor is an inference tensor, and the first optimizer step of the
    process fails."""
    monkeypatch.setattr(STEP, "_copies", {})
    monkeypatch.setattr(STEP, "_kept", {})
    module = linear(recipes.fp8_delayed(length=4))
    with torch.inference_mode():
        module(values(24, 40, dtype=torch.float32))
    module(values(24, 40, dtype=torch.float32)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    fq.begin_step(5)
    assert STEP.on(torch.device("cpu"))[1] == 5
    module(values(24, 40, dtype=torch.float32))
    assert histories(module)[".grad_output.rowwise"][1] > 0


# Gradient accumulation #


@pytest.mark.parametrize("batches", [1, 2, 8])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "mxfp8_nvfp4"])
def test_weights_are_encoded_once_a_forward(name: str, batches: int):
    """Otherwise a backward quantizes the weight again, or a forward multiplies codes of another
    one."""
    model = net(ALL[name])
    train(model, steps=3, batches=batches)
    wanted = {}
    for layer in ("0", "2", "4"):
        directions = model[int(layer)].plan.weight.encodings
        for direction in directions:
            # The first layer has no dgrad: its columnwise codes are never asked for.
            if direction is ROWWISE or layer != "0":
                wanted[f"{layer}.weight", direction.value] = 3 * batches
    assert counters.of("weight encode") == wanted


@pytest.mark.parametrize("batches", [2, 8])
def test_gradients_accumulate_in_the_masters_dtype(batches: int):
    """Otherwise small gradients are lost in bf16 sums: the total is the fp32 sum of each batch's
    gradient."""

    def gradients(model, seeds):
        for seed in seeds:
            x, dy = values(24, 40, seed=seed), values(24, 56, seed=seed + 50, kind="tiny")
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            y.backward(dy)
        return model.weight.grad

    total = gradients(linear(recipes.mxfp8()), range(batches))
    assert total.dtype is torch.float32
    want = torch.zeros_like(total)
    for seed in range(batches):
        want += gradients(linear(recipes.mxfp8()), [seed])
    assert_same_bytes(total, want, "accumulated gradient")


# Recomputation #


@pytest.mark.parametrize("name", [*NAMED, *HYBRIDS, *CUSTOM])
def test_checkpointing_changes_no_bit(name: str):
    """Otherwise recomputed activations differ from the forward's: scales, random bits or histories
    moved in between."""

    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            x = self.model[1](self.model[0](x))
            x = checkpoint(self.model[2:4], x, use_reentrant=False)
            return checkpoint(self.model[4], x, use_reentrant=False)

    want_model, model = net(ALL[name]), net(ALL[name])
    want = train(want_model, steps=3)
    restart()
    got = train(Checkpointed(model), steps=3)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same({k.replace("model.", ""): v for k, v in a.items()}, b, f"step {i}")
    recorded = histories(model)
    for key, amaxes in histories(want_model).items():
        assert_same_bytes(recorded[key], amaxes, f"history of {key}")


def test_recomputation_records_no_amax():
    """Otherwise a history sees an activation twice, and another batch's amax after the optimizer
    step.

    A recomputation must not record: here it runs on an input that was made larger in place of the
    recorded one.
    """
    module = linear(recipes.fp8_delayed(length=4))
    scale = [1.0]
    x = values(24, 40, dtype=torch.float32).requires_grad_()

    def block(x):
        # square's operand: the recomputation ends after the whole layer
        return module(x * scale[0]).square()

    y = checkpoint(block, x, use_reentrant=False)
    recorded = histories(module)[".input.rowwise"]
    assert recorded[0] == x.abs().max()
    scale[0] = 100.0
    y.sum().backward()
    assert_same_bytes(histories(module)[".input.rowwise"], recorded, "input history")


# Random bits #


def gradient_of(module: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    return run(module, x, dy)["dx"]


def test_random_bits_repeat_within_a_step_and_change_between_steps():
    """Otherwise stochastic rounding is not reproducible, or rounds every step alike and is
    biased."""
    module = linear(fq.CustomRecipe(rounds_gradients))
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    drawn = {}
    for seed in (0, 1):
        for step in (0, 1):
            for micro_batch in (0, 1):
                fq.begin_step(step, micro_batch, seed)
                drawn[seed, step, micro_batch] = gradient_of(module, x, dy)
                assert_same_bytes(
                    gradient_of(module, x, dy), drawn[seed, step, micro_batch], "same step"
                )
    kinds = {tuple(t.flatten().tolist()) for t in drawn.values()}
    assert len(kinds) == 8


def test_random_bits_differ_by_layer():
    """Otherwise equal layers round alike, and their errors add up instead of averaging out."""
    model = fq.convert(
        nn.Sequential(plain_linear(), plain_linear()), fq.CustomRecipe(rounds_gradients)
    )
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    assert not torch.equal(gradient_of(model[0], x, dy), gradient_of(model[1], x, dy))


def test_layers_without_names_share_no_random_bits():
    """Otherwise two layers of a model that was built by hand round alike, and their errors add
    up."""
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    fq.begin_step(0)

    def gradients() -> list[Tensor]:
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(
                gradient_of(fq.Linear(40, 56, recipe=fq.CustomRecipe(rounds_gradients)), x, dy)
            )
        return made

    first, second = gradients()
    assert not torch.equal(first, second)
    rng._MADE.clear()
    for again, before in zip(gradients(), (first, second)):
        assert_same_bytes(again, before, "built again in the same order by a new process")
    names = [
        m.runtime.name
        for m in (
            fq.Linear(16, 16),
            fq.LayerNormLinear(16, 16).linear,
            fq.LayerNormLinear(16, 16).linear,
            fq.Linear(16, 16, name="mine"),
            fq.Linear(16, 16, name="mine"),
        )
    ]
    assert names == [
        "linear_2",
        "layernorm_linear.linear",
        "layernorm_linear_1.linear",
        "mine",
        "mine",
    ]


def test_token_offset_places_rows_in_the_global_batch():
    """Otherwise gradients depend on how a batch is divided over ranks."""
    fq.begin_step(0)
    module = linear(fq.CustomRecipe(rounds_gradients))
    x, dy = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)
    whole = gradient_of(module, x, dy)
    pieces = []
    for first, last in ((0, 7), (7, 24)):
        with fq.token_offset(first):
            pieces.append(gradient_of(module, x[first:last], dy[first:last]))
    assert_same_bytes(torch.cat(pieces), whole, "rounded by global row")
    assert not torch.equal(gradient_of(module, x[7:], dy[7:]), pieces[1])


def test_stochastic_gradients_are_unbiased():
    """Otherwise rounding has a direction, and training follows it.

    Each element of the mean of n draws is within 6 standard errors: one draw is off by less than a
    step, e4m3's largest step within a block is 2^-3 of the block's scale, and 256 thresholds leave
    a bias under step / 512.
    """
    module = linear(fq.CustomRecipe(rounds_gradients), bias=False)
    x, dy = values(8, 40, dtype=torch.float32), values(8, 56, seed=1, dtype=torch.float32)
    total, n = torch.zeros(8, 40, dtype=torch.float64), 256
    for step in range(n):
        fq.begin_step(step)
        total += gradient_of(module, x, dy).double()
    weight = module.plan.weight.quantize(
        module.state_dict()["weight"].bfloat16()
    ).columnwise.dequantize(torch.float64)
    exact = dy.double() @ weight
    # |error of dy_ij| < 2^-3 |dy_ij| in e4m3's normal range; blocks here span less than its 2^15.
    step_size = (dy.double().abs() * 2.0**-3).square() @ weight.square()
    bound = 6 * (step_size / (4 * n)).sqrt() + (dy.double().abs() * 2.0**-3) @ weight.abs() / 512
    nearest = run(linear(recipes.mxfp8(), bias=False), x, dy)["dx"].double()
    assert ((total / n - exact).abs() <= bound).all()
    # the bound would notice a rounding that does not average out
    assert ((nearest - exact).abs() > bound).any()


# What ran #


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_what_runs_is_what_the_plan_names(name: str, dtype: torch.dtype):
    """Otherwise the printed plan and the receipt disagree: other formats multiplied, or in another
    domain."""
    module = linear(ALL[name], dtype=dtype, features=(16, 24))
    run(module, values(8, 16, dtype=dtype), values(8, 24, seed=1, dtype=dtype))
    planned: dict = {}
    for product in PRODUCTS:
        a, b = module.plan.pair(product)
        key = (module.plan.domain(product, dtype, "cpu")[0], repr(a), repr(b))
        planned[key] = planned.get(key, 0) + 1
    assert counters.of("gemm") == planned


# Errors #


def test_wrong_inputs_are_refused_with_the_modules_name():
    """Otherwise a shape or dtype mistake surfaces deep in a kernel, or an integer tensor is
    quantized."""
    module = linear(recipes.mxfp8())
    with pytest.raises(ValueError, match=r"fc: input is \[2, 39\], its last dim must be 40"):
        module(torch.zeros(2, 39))
    with pytest.raises(ValueError, match="fc: input is torch.int64"):
        module(torch.zeros(2, 40, dtype=torch.int64))
    with (
        pytest.raises(ValueError, match="fc: input is torch.int64"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        module(torch.zeros(2, 40, dtype=torch.int64))


def test_a_second_derivative_is_exact_or_refused():
    """Otherwise gradient penalties and meta-learning silently train on a wrong gradient."""
    for recipe in (recipes.identity(), recipes.mxfp8()):
        module, plain = linear(recipe), plain_linear()

        def penalty(m):
            x = values(4, 40, dtype=torch.float32).requires_grad_()
            (g,) = torch.autograd.grad(m(x).pow(3).sum(), x, create_graph=True)
            g.square().sum().backward()
            return m.weight.grad

        try:
            got = penalty(module)
        except (RuntimeError, NotImplementedError):
            continue
        torch.testing.assert_close(got, penalty(plain))


# Copies #


def test_a_pickled_module_continues_as_the_original():
    """Otherwise a module saved whole trains differently after loading."""
    for name in ("fp8_delayed", "nvfp4", "three_formats"):
        model = net(ALL[name])
        train(model, steps=2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        at = STEP.step
        want = train(model, steps=2, seed=31)
        STEP.step = at
        STEP.publish()
        for i, (a, b) in enumerate(zip(train(loaded, steps=2, seed=31), want)):
            assert_same(a, b, f"{name} step {i}")


def test_a_pickled_plan_is_its_fields():
    """If false, a model that was saved whole runs the compiled step whose number its plan had in
    another process, or fails in its first forward."""
    for name in ("fp8_current", "nvfp4"):
        layer = fq.Linear(8, 16, recipe=ALL[name])
        layer(torch.ones(2, 8))
        plan = layer.plan
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan and again.needs_steps is plan.needs_steps is (name == "nvfp4")
        assert "_known" in vars(plan) and "_known" not in vars(again)


def test_the_weight_of_a_module_is_the_parameter_of_nn_linear():
    """Otherwise an optimizer or a library that looks at parameters does not find the weight."""
    for recipe in (recipes.mxfp8(), recipes.identity()):
        module = fq.Linear(8, 16, recipe=recipe)
        assert type(module.weight) is nn.Parameter
        assert module.weight.is_leaf
        assert dict(module.named_parameters()).keys() == {"weight", "bias"}
        assert module.recipe == recipe
    assert fq.Linear(8, 16).plan.input.rowwise.fmt == IDENTITY


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_multiplied_as_their_values(layout: torch.layout):
    """If false, sequences of several lengths need padding in a converted model alone."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48))
    parts = [values(n, 32, dtype=torch.float32, seed=n) for n in (3, 5, 2)]
    outcomes = []
    for net in (plain, fq.convert(copy.deepcopy(plain), recipes.identity())):
        given = [part.clone().requires_grad_() for part in parts]
        y = net(torch.nested.as_nested_tensor(given, layout=layout))
        assert y.is_nested and y.layout is layout
        sum(part.square().sum() for part in y.unbind()).backward()
        outcomes.append([*y.unbind(), *(g.grad for g in given), net[0].weight.grad])
    for got, want in zip(*reversed(outcomes)):
        assert_same_bytes(got.detach(), want.detach(), str(layout))
    if layout is torch.jagged:
        x = torch.nested.as_nested_tensor(parts, layout=layout)
        square = fq.convert(nn.Sequential(nn.Linear(32, 32)), recipes.mxfp8())
        assert (square(x) + x).shape == x.shape, "of other lengths"
        with pytest.raises(ValueError, match="with holes or transposed"):
            square(x.transpose(1, 2))


def test_torch_fx_takes_converted_modules_for_leaves():
    """If false, symbolic_trace fails on a converted model, or flattens its layers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act_fn = nn.Linear(32, 32), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act_fn(self.layer(x)) + x

    net = pickle.loads(pickle.dumps(fq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8")))
    nets = [net, fq.convert(Net(), "mxfp8")]
    x = values(4, 32, dtype=torch.float32)
    for net in nets:
        graph = torch.fx.symbolic_trace(net)
        called = {n.target for n in graph.graph.nodes if n.op == "call_module"}
        assert {n for n, m in net.named_modules() if isinstance(m, fq.Linear)} <= called
        assert_same_bytes(graph(x), net(x), "traced")


def with_other_strides(dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs [.., 64] that are views."""
    shapes = {
        "batch of sequences": ((6, 4, 64), lambda x: x.transpose(0, 1)),
        "features first": ((4, 64, 6), lambda x: x.transpose(1, 2)),
        "half of the features": ((4, 6, 128), lambda x: x[..., ::2]),
        "expanded": ((1, 6, 64), lambda x: x.expand(4, 6, 64)),
        "channels last": ((2, 64, 3, 5), lambda x: x.permute(0, 2, 3, 1)),
        "a transposed matrix": ((64, 6), lambda x: x.t()),
        "no rows": ((6, 0, 64), lambda x: x.transpose(0, 1)),
        "contiguous": ((4, 6, 64), lambda x: x),
    }
    return {
        name: view(torch.linspace(-2, 2, math.prod(shape)).sin().to(dtype).view(shape))
        for name, (shape, view) in shapes.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_identity_is_torchs_linear_whatever_the_strides(dtype: torch.dtype, bias: bool):
    """If false, identity differs from plain torch where a program passes a view (attention that is
    batch first, channels last), a program that reads strides meets others, or the receipt misses
    products."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 40, bias=bias, dtype=dtype)
    net = fq.convert(nn.Sequential(copy.deepcopy(plain)), "identity")[0]
    for name, view in with_other_strides(dtype).items():
        results = []
        counters.reset()
        for layer in (net, plain):
            x = view.detach().requires_grad_()
            y = layer(x)
            rows = torch.linspace(-1, 1, y.numel()).cos().to(dtype)
            dy = rows.view(y.shape[::-1]).permute(*range(y.dim() - 1, -1, -1))
            results.append([y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
        assert list(counters.of("gemm").values()) == [3], name
        for got, want in zip(*results):
            assert_same_bytes(got, want, name)
            assert got.stride() == want.stride(), name

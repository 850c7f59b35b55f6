# SPDX-License-Identifier: Apache-2.0
"""What Python chooses on a Hopper GPU, run on the CPU with the compiled operators emulated by the
reference."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import (
    KERNEL_QUANTIZERS,
    QUANTIZERS,
    assert_same_bytes,
    assert_same_storage,
    kept_step,
    recorded_saves,
    values,
)
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.gemm import gemm
from fsdp_quant.linear import fused, guard, shared_input
from fsdp_quant.linear import plan as plans
from fsdp_quant.linear.products import EXACT, LADDER, PRODUCTS, Product, ladder_of
from fsdp_quant.ops import layout, native
from fsdp_quant.ops.capability import anchors
from fsdp_quant.ops.product_error import PROBED_STEPS, SETTLED_STEPS
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.storage import Storage, to_layout, to_storage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = {
    "identity": recipes.identity,
    "fp8_current": recipes.fp8_current,
    "fp8_delayed": recipes.fp8_delayed,
    "fp8_row": recipes.fp8_row,
    "fp8_block": recipes.fp8_block,
    "mxfp8": recipes.mxfp8,
    "nvfp4": recipes.nvfp4,
    "nvfp4 4over6": lambda **o: recipes.nvfp4(four_over_six="mse", **o),
    "mxfp8/nvfp4": lambda **o: recipes.hybrid("mxfp8", "nvfp4", **o),
    "nvfp4/mxfp8": lambda **o: recipes.hybrid("nvfp4", "mxfp8", **o),
    "fp8_tensor/identity": lambda **o: recipes.hybrid("fp8_tensor", "identity", **o),
    "mxfp6": recipes.mxfp6,
    "mxfp6/e3m2": lambda **o: recipes.mxfp6(grad_element="e3m2", **o),
    "mxfp4": recipes.mxfp4,
    "mxfp8/mxfp4": lambda **o: recipes.hybrid("mxfp8", "mxfp4", **o),
}
ONE_CALL = tuple(RECIPES)
# M, N, K; the second takes the path of parts
SHAPES = ((64, 48, 32), (33, 40, 100), (144, 48, 160))
# Relative Frobenius error against the CPU, which multiplies in fp32; an anchored product of fp32
# values is within 1e-3.
BOUNDS = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}
QUANTIZED = list(KERNEL_QUANTIZERS)
E8M0 = [
    name
    for name in QUANTIZED
    if QUANTIZERS[name].fmt.scale == "e8m0" and QUANTIZERS[name].fmt.element.bits == 8
]
SMALL = ["mxfp4", "mxfp6", "mxfp6/e3m2"]  # recipes whose codes are multiplied as e4m3


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, with empty counters."""
    with kept_step():
        STEP.seed, STEP.counted_by_hand = 0, False
        restart()
        counters.reset()
        yield


def restart() -> None:
    """Random bits as in a new process."""
    STEP.step, STEP.micro_batch = 0, 0
    STEP.publish()


@pytest.fixture
def gpu():
    """CPU tensors as if on a Hopper GPU; the operators, with the calls that they saw."""
    with hopper.emulated() as operators:
        yield operators


def linear(
    recipe: fq.Recipe,
    shape=SHAPES[0],
    bias: bool = True,
    dtype=BF16,
    name: str = "fc",
    **rungs: str,
) -> fq.Linear:
    """rungs: of its products; others on the first."""
    torch.manual_seed(0)
    plain = nn.Linear(shape[2], shape[1], bias=bias, dtype=dtype)
    module = fq.convert(nn.ModuleDict({name: plain}), recipe)[name]
    on_rungs(module, **rungs)
    return module


def on_rungs(module: fq.Linear, **rungs: str) -> None:
    module.runtime.set_plan(module.plan.moved_to(rungs))


def inputs(shape=SHAPES[0], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """x and dy."""
    return values(shape[0], shape[2], seed=4, dtype=dtype), values(
        shape[0], shape[1], seed=5, dtype=dtype
    )


def step(module: nn.Module, x: Tensor, dy: Tensor, **autocast) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", **autocast) if autocast else contextlib.nullcontext():
        y = module(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad} | {
        n: p.grad.clone() for n, p in module.named_parameters()
    }


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what} {name}")


def planned(module: fq.Linear, dtype: torch.dtype, arch: str = hopper.ARCH) -> dict:
    """The products of one step, as they count."""
    counted: dict = {}
    plan = module.plan_on(dtype, module.weight.device)
    for product in PRODUCTS:
        key = (plan.domain(product, dtype, arch)[0], *map(repr, plan.pair(product)))
        counted[key] = counted.get(key, 0) + 1
    return counted


def domains() -> set[str]:
    return {domain for domain, *_ in counters.of("gemm")}


# One step #


def check_step(
    name: str,
    dtype: torch.dtype,
    bias: bool,
    shapes=SHAPES,
    rungs=(),
    arch: str = hopper.ARCH,
    **options,
) -> set[str]:
    """The domains of its products."""
    for shape in shapes:
        x, dy = inputs(shape, dtype)
        restart()
        want = step(linear(RECIPES[name](**options), shape, bias, dtype), x, dy)
        restart()
        with hopper.emulated(arch):
            module = linear(RECIPES[name](**options), shape, bias, dtype, **dict(rungs))
            counters.reset()
            got = step(module, x, dy)
            assert counters.of("gemm") == planned(module, dtype, arch), shape
            ran = domains()
        for key, tensor in want.items():
            assert got[key].dtype is tensor.dtype, (shape, key)
            bound = max(BOUNDS[dtype], 1e-3 if "anchored" in ran else 0)
            assert error(got[key], tensor) <= bound, (
                f"{shape} {key}: {error(got[key], tensor):.2g}, in {ran}"
            )
    return ran


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_that_of_the_cpu(name: str, bias: bool):
    """If false, a recipe is another one where tensor cores multiply, or runs in another domain than
    the plan says."""
    check_step(name, BF16, bias)


# Of recipes whose tensors are all codes, where products are of codes: others decode to bf16.
NATIVE_ON = {
    "sm_80": (),
    "sm_89": ("fp8_current", "fp8_delayed", "fp8_row"),
    "sm_100f": ("fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4"),
}


@pytest.mark.parametrize("arch", NATIVE_ON)
@pytest.mark.parametrize(
    "name", ["fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
)
def test_a_step_on_other_architectures_is_that_of_the_cpu(name: str, arch: str):
    """If false, a GPU that the kernels are compiled for, and were not run on, refuses its first
    step or reads scales of another layout; or its tensor cores idle."""
    ran = check_step(name, BF16, True, ((64, 48, 32), (33, 40, 300)), arch=arch)
    assert ran == {"native" if name in NATIVE_ON[arch] else "bf16"}


def test_a_step_over_runs_of_tokens_is_that_of_the_cpu():
    """If false, tokens behind the first run of anchors meet its scales."""
    for rung in (layout.ANCHORED_512, layout.ANCHORED_128):
        check_step("mxfp8", BF16, False, ((1040, 48, 32), (519, 40, 20)), {"wgrad": rung})


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "mxfp8/nvfp4", "mxfp4", "mxfp6/e3m2"])
def test_a_step_on_every_rung_is_that_of_the_cpu(name: str):
    """If false, a product that its guard moved is another one."""
    for shape in ((1040, 48, 32), (40, 528, 1056)):
        for rung in LADDER:
            rungs = {p.name: rung for p in PRODUCTS if rung in ladder_of(p)}
            check_step(name, BF16, True, (shape,), rungs)


@pytest.mark.parametrize("name, dtype", laws.crossed(RECIPES, (FP32, FP16), stride=3), ids=str)
def test_a_step_of_other_dtypes_is_that_of_the_cpu(name: str, dtype: torch.dtype):
    """If false, only bf16 models train where tensor cores multiply."""
    for bias in (True, False):
        check_step(name, dtype, bias, SHAPES[:2])


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_with_a_backward_override_is_that_of_the_cpu(name: str, override: str):
    """If false, what the backward multiplies in high precision is read in the layout of codes."""
    check_step(name, BF16, True, SHAPES[:2], backward_override=override)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_three_steps_of_a_model_are_those_of_the_cpu(name: str):
    """If false, what one step leaves (histories, codes of the old weight) is not what the next one
    needs."""

    def train() -> list[dict[str, Tensor]]:
        restart()
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(32, 64, dtype=BF16), nn.GELU(), nn.Linear(64, 48, dtype=BF16)
        )
        fq.convert(model, RECIPES[name]())
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
        for i in range(3):
            x, dy = values(64, 32, seed=i), values(64, 48, seed=10 + i)
            seen.append(step(model, x, dy))
            optimizer.step()
        return seen

    want = train()
    with hopper.emulated():
        got = train()
    for i, (a, b) in enumerate(zip(got, want)):
        for key in b:
            # a last bit of the first layer's output moves 4-bit codes
            bound = 0.1 if name == "nvfp4" else 3e-2
            assert error(a[key], b[key]) <= bound, f"step {i} {key}: {error(a[key], b[key])}"


@pytest.mark.parametrize("name", list(RECIPES))
def test_no_rows_are_multiplied(gpu, name: str):
    """If false, an expert without tokens fails where others run."""
    module = linear(RECIPES[name]())
    got = step(module, torch.zeros(0, 32, dtype=BF16), torch.zeros(0, 48, dtype=BF16))
    assert got["y"].shape == (0, 48) and got["dx"].shape == (0, 32)
    assert got["weight"].count_nonzero() == 0 and got["bias"].count_nonzero() == 0


@pytest.mark.parametrize("name", laws.sample(list(QUANTIZED), 3))
def test_fakes_have_the_shapes_of_what_is_made(gpu, name: str):
    """If false, a graph plans for other buffers than its operators make, or is made for one number
    of tokens."""
    q, through = QUANTIZERS[name], (False,)
    for (rows, cols), transposed, row0 in itertools.product(
        ((33, 48), (130, 272)), (False, True), (0, 33)
    ):
        if row0 and (transposed or q.fmt.rotated):
            continue
        scale_layout = native.HOPPER if transposed else native.COMPACT
        sides = (
            native.pack_encoding(q.encoding(ROWWISE), False, scale_layout),
            native.pack_encoding(q.encoding(COLUMNWISE), transposed, scale_layout),
        )
        x, key = values(rows, cols).to(BF16), torch.tensor([1, 2, 3, 4, 0])
        calls = {"statistics": (*sides, row0, *through)}
        for some in (sides, (sides[0], 0), (0, sides[1])):
            calls[f"quantize {some}"] = (
                *some,
                0.0,
                0.0,
                row0,
                *through,
                None,
                None,
                None,
                key,
                None,
                None,
                None,
                key,
            )
        if anchors(q.fmt) and not layout.is_anchored_of_codes(q.fmt, layout.ANCHORED) and not row0:
            calls["quantize_anchored"] = (*sides, 0, 128, None, None, *through)
            if q.fmt.element.name == "e4m3":
                calls["quantize_anchored by tensor"] = (
                    *sides,
                    native.OF_TENSOR,
                    native.OF_TENSOR,
                    None,
                    None,
                    *through,
                )
        for call, arguments in calls.items():
            operator = getattr(gpu, call.split()[0])
            made = getattr(operator, "default", operator)(x, *arguments)
            for symbolic in (
                (False, True)
                if call.startswith("quantize_anchored") or arguments[:2] == sides
                else (False,)
            ):
                with FakeTensorMode(shape_env=ShapeEnv()) as mode:
                    fakes = native.FAKES[call.split()[0]](
                        mode.from_tensor(x, static_shapes=not symbolic), *arguments
                    )
                    if symbolic and call.startswith("q"):
                        assert any(isinstance(n, torch.SymInt) for n in fakes[0].shape)
                    got = [([int(n) for n in t.shape], t.dtype) for t in fakes]
                assert got == [(list(t.shape), t.dtype) for t in made], (
                    f"{call} of {rows, cols} from {row0}"
                )


def test_encodings_of_the_emulation_stay_in_it():
    """If false, an integer of the emulated operators reaches the compiled ones on a machine that
    has both."""
    e = QUANTIZERS["mxfp8"].encoding(ROWWISE)
    before, known = native.pack_encoding, native.pack_encoding.cache_info()
    with hopper.emulated():
        packed = native.pack_encoding(e)
        assert packed >> 31 and packed == native.pack_encoding(e) != native.pack_encoding(
            e, False, native.HOPPER
        )
    assert native.pack_encoding is before and before.cache_info() == known


def test_the_emulation_leaves_nothing_behind():
    """If false, the tests after this file's run with layouts of another device."""
    before = dict(plans._PLANS), guard._UNDERWAY[:], torch.cuda.Event
    with hopper.emulated():
        model = nn.Sequential(linear(recipes.mxfp8()))
        step(model, *inputs())
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert (dict(plans._PLANS), guard._UNDERWAY[:], torch.cuda.Event) == before
    assert not [m for m in guard._GUARDED if m is model[0].runtime]
    module = linear(recipes.mxfp8())
    counters.reset()
    step(module, *inputs())
    assert domains() == {"reference"}


# One call, and the path of parts #


@pytest.mark.parametrize("name, autocast", laws.crossed(ONE_CALL, (False, True), stride=3))
def test_one_call_gives_the_bytes_of_its_parts(gpu, name: str, autocast: bool, monkeypatch):
    """If false, a layer's result depends on whether someone looks at its operators."""
    options, dtype = ({"dtype": BF16}, FP32) if autocast else ({}, BF16)
    for shape in (SHAPES[0], SHAPES[2]):
        for bias in (True, False):
            x, dy = inputs(shape, dtype)
            gpu.calls.clear()
            one = step(linear(RECIPES[name](), shape, bias, dtype), x, dy, **options)
            wanted = 0 if autocast and bias else 2  # a bias of another dtype is added by the parts
            assert len(gpu.steps()) == wanted, (shape, bias)
            with monkeypatch.context() as patch:
                patch.setattr(fused, "_is_one_call", lambda *args: False)
                gpu.calls.clear()
                parts = step(linear(RECIPES[name](), shape, bias, dtype), x, dy, **options)
                assert not gpu.steps()
            assert_same(one, parts, f"{shape} bias {bias}")


def test_a_bias_gradient_is_added_up_where_its_codes_are_made(gpu, monkeypatch):
    """If false, one call reads a gradient once more for the bias; or its parts add up in another
    order than one call."""
    x, dy = inputs()
    for recipe, is_quantized in (
        (fq.recipes.mxfp8(), True),
        (fq.recipes.fp8_delayed(), True),
        (fq.recipes.identity(), False),
        (fq.recipes.mxfp8(backward_override="high_precision"), False),
    ):
        for one_call in (True, False):
            with monkeypatch.context() as patch:
                if not one_call:
                    patch.setattr(fused, "_is_one_call", lambda *args: False)
                gpu.calls.clear()
                assert_same_bytes(step(linear(recipe), x, dy)["bias"], dy.sum(0), f"{recipe}")
                assert gpu.count("column_sums") == (is_quantized and not one_call), (
                    recipe,
                    one_call,
                )


def test_one_call_counts_and_records_what_its_parts_do(gpu, monkeypatch):
    """If false, the receipt, the guard or a history of delayed scaling depends on the path."""
    seen = []
    for one_call in (True, False):
        with monkeypatch.context() as patch:
            if not one_call:
                patch.setattr(fused, "_is_one_call", lambda *args: False)
            counters.reset()
            found: dict = {}
            for name in ONE_CALL:
                module = linear(RECIPES[name](), SHAPES[2])
                x, dy = inputs(SHAPES[2])
                x[:, :32] *= 1e5
                step(module, x, dy)
                found[name] = (
                    None if module.runtime.guard is None else module.runtime.guard.tolist()
                )
                histories = module._weight_state.histories.items()
                found[f"{name} histories"] = {
                    str(k): (h.amaxes[0].item(), h.encode_scale.item()) for k, h in histories
                }
            found |= {what: counters.of(what) for what in ("gemm", "quantize", "weight encode")}
            seen.append(found)
    # The parts transpose the one storage of both directions, which one call quantizes in both as it
    # reads the weight.
    for fmt, names in (("fp8_tensor", 2), ("fp8_128x128", 1)):
        assert seen[0]["quantize"].pop((fmt, "columnwise", "native")) - names == (
            seen[1]["quantize"].pop((fmt, "columnwise", "native"), 0)
        )
    assert seen[0] == seen[1]
    extra, own = seen[0]["mxfp8"][0]
    assert 0 < extra and 0 < own
    assert len(seen[0]["fp8_delayed histories"]) == 3


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8"])
def test_one_call_makes_only_the_sides_that_are_read(gpu, name: str):
    """If false, a frozen weight, or the first layer, pays for codes that nobody reads."""
    for frozen in (True, False):
        module = linear(RECIPES[name]())
        module.weight.requires_grad_(not frozen)
        x, dy = inputs()
        x.requires_grad_(frozen)
        gpu.calls.clear()
        y = module(x)
        assert [c[2:] for c in gpu.steps()] == [(True, not frozen)], frozen
        gpu.calls.clear()
        y.backward(dy)
        assert [c[2:] for c in gpu.steps()] == [(frozen, not frozen)], frozen
        whole = step(linear(RECIPES[name]()), x, dy)
        got, want = (x.grad, whole["dx"]) if frozen else (module.weight.grad, whole["weight"])
        assert_same_bytes(got, want, f"frozen {frozen}")


# An input that layers share #


def shared(gate: fq.Linear, up: fq.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of two layers to which one module hands x."""
    handed = shared_input.Handed()
    return gate(x, handed), up(x, handed)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_row", "fp8_block", "mxfp8"])
def test_layers_that_are_handed_one_input_quantize_it_once(gpu, name: str):
    """If false, gate and up each quantize what they share, or one multiplies other codes than
    alone."""
    gate, up = linear(RECIPES[name](), bias=False), linear(RECIPES[name](), name="up")
    x, dy = inputs()
    x = x.requires_grad_() * 1
    want = gate(x.clone()).detach(), up(x.clone()).detach()
    gpu.calls.clear()
    got = shared(gate, up, x)
    assert [c[2:] for c in gpu.steps()] == [(True, True), (False, False)]
    for y, wanted, layer in zip(got, want, ("gate", "up")):
        assert_same_bytes(y.detach(), wanted, layer)
    sum(got).backward(dy)
    alone = step(linear(RECIPES[name](), name="up"), x, dy)
    assert_same_bytes(up.weight.grad, alone["weight"], "the gradient from shared codes")


@pytest.mark.parametrize("name", ["fp8_current", "fp8_row", "fp8_block", "mxfp8"])
def test_an_input_is_quantized_as_it_is(gpu, name: str):
    """If false, a layer multiplies codes of what was in an input's memory at an earlier call."""
    module, other = linear(RECIPES[name]()), values(64, 32, seed=8)
    buffer = inputs()[0]
    module(buffer)
    buffer.data.copy_(other)  # no version tells
    assert_same_bytes(module(buffer).detach(), module(other).detach(), "written through .data")
    with torch.inference_mode():
        assert_same_bytes(module(buffer), module(other), "inference")
    gpu.calls.clear()
    module(buffer), module(buffer)
    assert [c.row for c in gpu.steps()] == [True, True], "nothing is remembered of an input"


def test_handed_codes_are_taken_only_where_they_are_the_layers_own(gpu):
    """If false, a layer reads codes of another format, of another history, or without the direction
    that it saves."""
    x = inputs()[0].requires_grad_() * 1
    for first, second in (
        (linear(recipes.fp8_current()), linear(recipes.mxfp8())),
        (linear(recipes.fp8_current()), linear(recipes.fp8_current(pow2=True))),
    ):
        want = second(x).detach()
        gpu.calls.clear()
        got = shared(first, second, x)[1]
        assert [c.row for c in gpu.steps()] == [True, True], second.recipe
        assert_same_bytes(got.detach(), want, str(second.recipe))
    module, frozen = linear(recipes.fp8_block()), linear(recipes.fp8_block())
    frozen.requires_grad_(False)
    gpu.calls.clear()
    shared(frozen, module, x)
    assert [c[2:] for c in gpu.steps()] == [(True, False), (True, True)], (
        "the columnwise codes were not needed before"
    )


# Weights #


def weight_reads(gpu, module: fq.Linear) -> list[tuple[bool, bool]]:
    return [(c.row, c.col) for c in gpu.reads(module.weight)]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8"])
def test_weights_that_train_are_encoded_in_one_read_a_forward(gpu, name: str, dtype: torch.dtype):
    """If false, a forward reads the weight once a direction, transposes its codes, or a backward
    quantizes it again; or a forward multiplies codes of an earlier one."""
    module = linear(RECIPES[name](), bias=False, dtype=dtype)
    x, dy = inputs()
    options = {"dtype": BF16} if dtype is FP32 else {}
    for forwards in (1, 2, 3):
        got = step(module, x, dy, **options)
        if name != "fp8_delayed":
            fresh = linear(RECIPES[name](), bias=False, dtype=dtype)
            fresh.load_state_dict(module.state_dict())
            assert_same(got, step(fresh, x, dy, **options), f"forward {forwards}")
        assert weight_reads(gpu, module) == [(True, True)] * forwards
        module.weight.data.mul_(2)  # no version tells
    assert gpu.count("transpose_codes") == 0


@pytest.mark.parametrize(
    "name", ["fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "mxfp8/nvfp4", "nvfp4/mxfp8"]
)
def test_held_weights_are_encoded_once(gpu, name: str):
    """If false, micro-batches inside fq.hold quantize the weight again, or multiply other bytes
    than outside it."""
    module = linear(RECIPES[name]())
    want = step(module, *inputs())
    gpu.calls.clear()
    counters.reset()
    reads = []
    with fq.hold(module):
        for micro_batch in range(3):
            restart()
            assert_same(step(module, *inputs()), want, f"micro-batch {micro_batch}")
            reads.append(len(weight_reads(gpu, module)))
    assert set(counters.of("weight encode").values()) == {1}
    assert set(reads) == {reads[0]} and reads[0] <= 3  # an amax of the tensor, two directions


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "mxfp8", "nvfp4"])
def test_frozen_weights_are_encoded_in_the_direction_that_is_read(gpu, name: str):
    """If false, inference quantizes base weights in a direction that nobody multiplies."""
    module = linear(RECIPES[name]())
    module.requires_grad_(False)
    x, dy = inputs()
    for forwards in (1, 2):
        module(x)
        assert weight_reads(gpu, module) == [(True, False)] * forwards
    x.requires_grad_()
    gpu.calls.clear()
    module(x).backward(dy)
    # one storage of 16 x 16 blocks serves both
    assert weight_reads(gpu, module) == [(True, name != "nvfp4")]
    restart()
    trained = step(linear(RECIPES[name]()), x, dy)
    x.grad = None
    restart()
    module(x).backward(dy)
    assert_same_bytes(x.grad, trained["dx"], "input gradient")


# Storages in a layout #


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", QUANTIZED)
def test_storages_return_from_their_layouts(gpu, name: str, direction: Direction):
    """If false, what leaves a layout is not what entered it, or decodes to something else."""
    for shape in ((128, 256), (33, 47), (1, 130), (130, 1)):
        x = values(*shape)
        compact = QUANTIZERS[name].storage(x, direction)
        assert to_layout(compact, layout.COMPACT) is compact
        laid = compact.to_gemm_operand(layout.NATIVE)
        assert laid.layout == layout.NATIVE and to_layout(laid, layout.NATIVE) is laid
        outer, contraction = shape if direction is ROWWISE else shape[::-1]
        assert (
            laid.data.shape == (outer, laid.fmt.row_bytes(contraction, x.dtype))
            and laid.data.is_contiguous()
        )
        assert_same_storage(to_storage(laid), compact, f"{shape}")
        assert_same_bytes(laid.decode(), compact.decode(), f"{shape} decoded")
        both = HybridQuantizer(QUANTIZERS[name], QUANTIZERS[name])
        made = both.operands(x, layouts=dict.fromkeys(Direction, layout.NATIVE))[0][direction]
        assert made.layout == layout.NATIVE
        assert_same_bytes(made.data, laid.data, f"{shape} made so: data")
        assert_same_bytes(made.scale.flatten(), laid.scale.flatten(), f"{shape} made so: scale")


def test_values_are_anchored_as_their_codes_in_any_mix_of_layouts(gpu):
    """If false, a weight that one process quantizes differs from one that ranks gather as codes, or
    its two layouts are refused."""
    x, q = values(96, 160, kind="heavy"), QUANTIZERS["mxfp8"]
    kinds = (layout.COMPACT, layout.ANCHORED_TENSOR, layout.ANCHORED)
    for row, col in itertools.product(kinds, kinds):
        wanted = {ROWWISE: row, COLUMNWISE: col}
        made = HybridQuantizer(q, q).operands(x, layouts=wanted)[0]
        for d, storage in made.items():
            assert storage.layout == wanted[d]
            if wanted[d] != layout.ANCHORED:  # which are rounded once
                assert_same_storage(
                    storage, to_layout(q.storage(x, d), wanted[d]), f"{row} {col} {d}"
                )
    assert gpu.count("quantize_anchored") == 8  # of all but two compact ones


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", E8M0)
def test_anchored_storages_decode_to_nearly_the_same(gpu, name: str, direction: Direction):
    """If false, one exponent a line stands for other values than the blocks'."""
    for shape in ((128, 256), (33, 47), (200, 288), (600, 32)):
        compact = QUANTIZERS[name].storage(values(*shape), direction)
        laid = compact.to_gemm_operand(layout.ANCHORED)
        outer, contraction = shape if direction is ROWWISE else shape[::-1]
        assert laid.data.shape == (outer, contraction) and laid.scale.shape == (outer,)
        assert laid.decode().shape == shape and error(laid.decode(), compact.decode()) <= 1e-3
        assert laid.operand_format.block == (1, None)
        assert_same_bytes(
            laid.operand(), laid.decode() if direction is ROWWISE else laid.decode().t(), "operand"
        )
        if (
            direction is COLUMNWISE
            and compact.fmt.scale_rounding == "up"
            and compact.fmt.block[0] == 1
        ):
            both = HybridQuantizer(QUANTIZERS[name], QUANTIZERS[name])
            for wanted, run in ((layout.ANCHORED_128, 128), (layout.ANCHORED_512, 512)):
                runs = both.operands(values(*shape), layouts={COLUMNWISE: wanted})[0][COLUMNWISE]
                assert runs.layout == wanted and runs.operand_format.block == (1, run)
                assert runs.scale.shape == (-(-shape[0] // run), -(-shape[1] // 4) * 4)
                assert error(runs.decode(), compact.decode()) <= 1e-3


def test_products_over_tokens_are_anchored_in_runs(gpu):
    """If false, one token that is far larger than the others costs them their bits, or out in some
    dtype is refused."""
    both, exact = HybridQuantizer("mxfp8", "mxfp8"), Quantizer("mxfp8")
    for tokens in (1000, 1024, 33):
        x, dy = values(tokens, 40, seed=1, dtype=BF16), values(tokens, 36, seed=2, dtype=BF16)
        x[:2] *= 300  # of a run that stays apart
        want = gemm(
            *(exact.storage(t, COLUMNWISE) for t in (dy, x)), out_dtype=FP32, domain="reference"
        )
        for wanted in (layout.ANCHORED_128, layout.ANCHORED_512):
            a, b = (
                both.operands(t, [COLUMNWISE], layouts={COLUMNWISE: wanted})[0][COLUMNWISE]
                for t in (dy, x)
            )
            assert a.layout == b.layout == wanted
            for dtype in (FP32, BF16, FP16):
                near = BOUNDS[dtype] + 4e-4
                assert error(gemm(a, b, out_dtype=dtype), want) <= near, (
                    f"{tokens} {wanted} {dtype}"
                )
                out = torch.ones_like(want, dtype=dtype)
                assert gemm(a, b, out=out, accumulate=True) is out
                assert error(out, want + 1) <= near, f"{tokens} {wanted} {dtype} accumulated"
        # compact, as ranks send it: anchored to the runs of the other operand
        arrived = exact.storage(x, COLUMNWISE)
        assert error(gemm(a, arrived, out_dtype=FP32), want) <= BOUNDS[FP32] + 4e-4
        line = arrived.to_gemm_operand(layout.ANCHORED)
        with pytest.raises(ValueError, match="in anchored layout has no anchored 512 layout"):
            gemm(a, line)


def test_units_of_sums_keep_every_run():
    """If false, a run that is far below or above another overflows, loses its neighbours or hides a
    NaN."""
    g = torch.Generator().manual_seed(0)
    m, n, k = 12, 160, 512 * 9 + 144
    a, b = (torch.randint(-16, 17, (rows, k), generator=g).double() for rows in (m, n))
    for spread in (0, 8, 30, 60, 100):

        def powers(rows: int, spread: int) -> Tensor:
            return 2.0 ** torch.randint(-8 - spread, -3, (10, rows), generator=g).float()

        row, col = powers(m, spread // 3), powers(n, spread)
        col[torch.rand(10, n, generator=g) < 0.2] = 2.0**-127  # of codes that are all 0
        col[:, 3] = torch.tensor([2.0**-126, 2.0**40, 2.0**-60]).repeat(4)[:10]
        col[:4, 5] = 0
        zero = (col == 0) | (col == 2.0**-127)
        codes = torch.where(zero.repeat_interleave(512, 0)[:k].t(), 0.0, b)
        scaled = [t.double().repeat_interleave(512, 0)[:k].t() for t in (row, col)]
        want, size = (
            x @ y.t()
            for x, y in (
                ((a * scaled[0]), (codes * scaled[1])),
                ((a * scaled[0]).abs(), (codes * scaled[1]).abs()),
            )
        )
        got = hopper.sums_in_units(a, codes, row, col)
        # 38 additions; a change of units, or a part that is far below, loses what is below 2^-149
        # (1 + |sum|) units.
        sums = (a * scaled[0]).abs() @ codes.abs().t()
        bound = 38 * 2.0**-24 * size + 40 * 2.0**-149 * col.double().amax(0) * (1 + sums)
        assert bool((got.isfinite() & ((got.double() - want).abs() <= bound)).all()), (
            f"spread {spread}"
        )
        col[4, 6], row[5, 7] = torch.nan, torch.nan
        poisoned = hopper.sums_in_units(a, codes, row, col).isnan()
        assert bool(poisoned[7].all() and poisoned[:, 6].all()) and int(poisoned.sum()) == m + n - 1


def test_layouts_that_cannot_be_made_are_refused(gpu):
    """If false, a product silently reads codes in a layout that they are not in."""
    x = values(128, 256)
    compact = Quantizer("mxfp8").storage(x, COLUMNWISE)
    for wanted in (layout.COMPACT, layout.NATIVE, layout.ANCHORED_128):
        with pytest.raises(ValueError, match=f"in anchored layout has no {wanted} layout"):
            to_layout(compact.to_gemm_operand(layout.ANCHORED), wanted)
    with pytest.raises(ValueError, match="is a shard from row 16"):
        Quantizer("fp8_row").storage(x, ROWWISE).narrow(16, 48).to_gemm_operand(layout.NATIVE)
    identity = Quantizer("identity").storage(x, ROWWISE)
    assert to_layout(identity, layout.NATIVE) is identity
    with pytest.raises(ValueError, match="no compiled kernel multiplies"):
        gemm(compact, Quantizer("fp8_1x128").storage(x, COLUMNWISE), domain="anchored")
    with pytest.raises(ValueError, match="no compiled kernel multiplies"):
        gemm(compact, compact, domain="native")


def test_anchoring_a_shard_is_refused(gpu):
    """If false, rows cut out of a columnwise MXFP8 storage are multiplied with the scales of other
    rows."""
    shard = Quantizer("mxfp8").storage(values(128, 64), COLUMNWISE).narrow(16, 48)
    with pytest.raises(ValueError, match="is a shard from row 16"):
        shard.to_gemm_operand(layout.ANCHORED)


@pytest.mark.parametrize(
    "pair",
    [
        ("fp8_tensor", "fp8_row"),
        ("fp8_1x128", "fp8_128x128"),
        ("mxfp8", "mxfp8"),
        ("mxfp8", "fp8_row"),
        ("fp8_tensor", "mxfp8_32x32"),
        ("mxfp8", "nvfp4"),
        ("nvfp4", "nvfp4_16x16"),
        ("mxfp8_floor", "mxfp8"),
    ],
)
def test_products_of_storages_are_those_of_their_operands(gpu, pair: tuple[str, str]):
    """If false, padding, a layout, alpha, a bias or accumulation is lost on the way to the tensor
    cores."""
    exact = 0.03 if pair == ("mxfp8", "nvfp4") else 1e-3  # the products of nvfp4 are rounded
    for m, n, k in ((64, 48, 32), (33, 40, 100), (1, 17, 300)):
        for a_side, b_side in ((ROWWISE, ROWWISE), (ROWWISE, COLUMNWISE), (COLUMNWISE, COLUMNWISE)):
            made: list[Storage] = []
            for i, (name, outer, d) in enumerate(((pair[0], m, a_side), (pair[1], n, b_side))):
                x = values(*((outer, k) if d is ROWWISE else (k, outer)), seed=i)
                made.append(QUANTIZERS[name].storage(x, d))
            bias, alpha = values(n, seed=9), torch.tensor([-0.375])
            want = made[0].operand().double() @ made[1].operand().double().t()
            what = f"{m} x {n} over {k} {a_side} {b_side}"
            assert error(gemm(*made, out_dtype=FP32), want) <= exact, what
            got = gemm(*made, out_dtype=FP32, bias=bias, alpha=alpha)
            assert error(got, want * alpha + bias.double()) <= exact, what
            into = torch.full((m, n), 3.0)
            assert (
                gemm(*made, out=into, accumulate=True) is into and error(into, want + 3) <= exact
            ), what
            rounded = gemm(*made, bias=bias)
            assert rounded.dtype is BF16 and error(rounded, want + bias.double()) <= max(
                exact, 1e-2
            ), what


# The guard #


def sent(module: fq.Linear, ratios: dict[Product, float]) -> None:
    """Judge sums that say anchors add these shares of the formats' error."""
    sums = guard.guard_of(module.runtime, module.weight.device)
    sums[:, 1] = 1.0
    for product, ratio in ratios.items():
        sums[PRODUCTS.index(product), 0] = ratio**2
    guard.apply_underflow_policy()
    assert sums.count_nonzero() == 0, "the sums go on from zero"
    guard.apply_underflow_policy()


FPROP = PRODUCTS[0]


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
def test_the_guard_moves_the_product_down_its_ladder(gpu, product):
    """If false, a layer goes on losing bits, or loses speed where nothing was wrong."""
    module, (x, dy) = linear(recipes.mxfp8()), inputs()
    before = step(module, x, dy)
    assert domains() == {"anchored", "native"} and module.plan.moved == {}
    for rung in ladder_of(product)[1:]:
        counters.reset()
        sent(module, {product: 0.5})
        assert module.plan.moved == {product.name: rung}
        ((name, moved, why),) = counters.of("moved")
        assert (name, moved) == (
            "fc",
            product.name,
        ) and why == f"to {rung}: its anchors add 50% of its formats' error"
        counters.reset()
        after = step(module, x, dy)
        assert counters.of("gemm") == planned(module, BF16)
        result = {"fprop": "y", "dgrad": "dx", "wgrad": "weight"}[product.name]
        for key in before:
            if key == result:
                assert error(after[key], before[key]) <= 1e-2, key
            else:
                assert_same_bytes(after[key], before[key], key)
    assert "bf16" in domains()
    counters.reset()
    sent(module, {product: 0.5})
    assert module.plan.moved == {product.name: EXACT} and counters.of("moved") == {}


def test_formats_with_fewer_rungs_go_to_their_own_product(gpu):
    """If false, fp8 blocks are anchored to runs that no kernel makes of them."""
    module = linear(recipes.fp8_block(), SHAPES[2])
    step(module, *inputs(SHAPES[2]))
    sent(module, dict.fromkeys(PRODUCTS, 0.5))
    assert module.plan.moved == dict.fromkeys(("fprop", "dgrad", "wgrad"), EXACT)
    counters.reset()
    step(module, *inputs(SHAPES[2]))
    assert domains() == {"native"} and counters.of("gemm") == planned(module, BF16)


def test_the_guard_sees_what_products_lose(gpu):
    """If false, a layer is judged by something else than its operands, or only on one path."""
    for shape in (SHAPES[2], (40, 48, 160)):  # one call, and parts
        model = nn.Sequential(linear(recipes.mxfp8(), shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, dy = inputs(shape)
        x[:, :32] *= 1e5  # the other blocks of every row lie far below its exponent
        with torch.no_grad():
            model[0].weight[:, :32] /= 1e5  # and count as much
        for _ in range(5 * PROBED_STEPS):
            step(model, x, dy)
            optimizer.step()
        wanted = {"fprop": EXACT, "dgrad": layout.ANCHORED, "wgrad": layout.ANCHORED_512}
        assert model[0].plan.moved == wanted, shape


def test_the_guard_moves_nothing_that_loses_nothing(gpu):
    """If false, products go to bf16 whose operands only have wide ranges."""
    for shape in (SHAPES[2], (40, 48, 160)):
        model = nn.Sequential(linear(recipes.mxfp8(), shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, dy = inputs(shape)
        for _ in range(3):
            step(model, x, dy)
            optimizer.step()
        assert model[0].plan.moved == {} and model[0].runtime.guard is not None, shape


def test_the_guard_sees_the_layers_of_a_shared_input_apart(gpu):
    """If false, up goes on losing the bits that gate, whose weights do not ask for them, need not
    have."""
    gate, up = (
        linear(recipes.mxfp8(), SHAPES[2], bias=False),
        linear(recipes.mxfp8(), SHAPES[2], name="up"),
    )
    up.runtime.share_input_of(gate.runtime)
    x, dy = inputs(SHAPES[2])
    with torch.no_grad():
        x[:, :32] *= 1e5
        up.weight[:, :32] /= 1e5
    x = x.requires_grad_() * 1
    sum(shared(gate, up, x)).backward(dy)
    assert [c[2:] for c in gpu.steps()][:2] == [(True, True), (False, False)]
    guard.apply_underflow_policy()
    guard.apply_underflow_policy()
    assert "fprop" not in gate.plan.moved and "fprop" in up.plan.moved


def test_the_guard_decides_once_for_layers_alike(gpu):
    """If false, each layer of a compiled model is traced anew as its own sums arrive, up to the
    recompile limit."""
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=BF16) for _ in range(4)))
    fq.convert(
        model, recipes.per_layer(recipes.mxfp8(), {"3": recipes.mxfp8(anchor_tolerance=0.6)})
    )
    other = fq.convert(nn.Sequential(nn.Linear(64, 64, dtype=BF16)), recipes.mxfp8())
    for m in (model, other):
        m(values(64, 64)).sum().backward()
    # which asks for the same
    guard.guard_of(model[2].runtime, model[2].weight.device)[0] = torch.tensor([1.0, 1.0])
    sent(model[1], {FPROP: 0.5})
    assert [layer.plan.moved for layer in (*model, *other)] == [{"fprop": layout.ANCHORED}] * 3 + [
        {},
        {},
    ]
    assert len({layer.plan.key for layer in model}) == 2
    asked = {name for name, _, why in counters.of("moved") if why.startswith("to anchored")}
    assert len(counters.of("moved")) == 3 and len(asked) == 1 and asked <= {"1", "2"}


def test_the_guard_moves_one_kind_of_module(gpu):
    """If false, the keys of an attention make the GEMMs of every MLP slower, or blocks differ."""
    model = nn.Sequential()
    for i, name in itertools.product(range(2), ("attn", "mlp")):
        model.add_module(f"{name}{i}", nn.Sequential(nn.Linear(64, 64, dtype=BF16)))
    fq.convert(model, recipes.mxfp8())
    model(values(64, 64)).sum().backward()
    sent(model.attn1[0], {FPROP: 0.5})
    assert [module[0].plan.moved for module in model] == [{"fprop": layout.ANCHORED}, {}] * 2


def test_the_guards_moves_leave_graphs_of_the_users_own(gpu):
    """If false, a model that is evaluated while it trains runs eagerly after its fourth move, or
    after as many recipes of a schedule."""
    torch.compiler.reset()
    model = nn.Sequential(linear(recipes.mxfp8(), SHAPES[2]))
    compiled = torch.compile(model, backend="aot_eager")
    x, _ = inputs(SHAPES[2])

    def train_and_evaluate() -> None:
        compiled(x).sum().backward()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                compiled(x)

    moves = [(product, rung) for product in PRODUCTS for rung in ladder_of(product)[1:3]]
    limits = {"recompile_limit": 3, "accumulated_recompile_limit": 4}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, **limits):
        train_and_evaluate()
        for product, rung in moves:
            sent(model[0], {product: 0.5})
            assert model[0].plan.moved[product.name] == rung
            train_and_evaluate()
        for recipe in ("fp8_block", "fp8_row"):
            fq.set_recipe(model, recipe)
            train_and_evaluate()
    assert len(moves) == 6


def test_the_guard_keeps_to_the_recipes_tolerance(gpu):
    """If false, anchor_tolerance means nothing."""
    for tolerance, moved in ((0.02, {"fprop"}), (0.04, {"fprop"}), (0.06, set()), (1.0, set())):
        module = linear(recipes.mxfp8(anchor_tolerance=tolerance))
        step(module, *inputs())
        sent(module, {FPROP: 0.05})
        assert set(module.plan.moved) == moved, tolerance


def test_the_guard_looks_at_one_of_its_steps(gpu):
    """If false, every step pays for what one in 16 tells."""
    model = nn.Sequential(linear(recipes.mxfp8(), SHAPES[2]))
    x, dy = inputs(SHAPES[2])
    looked = []
    for _ in range(PROBED_STEPS + 1):
        before = gpu.count("product_error")
        step(model, x, dy)
        looked.append(gpu.count("product_error") - before)
    assert looked == [3, *[0] * (PROBED_STEPS - 1), 3]
    looked = []
    for start in (SETTLED_STEPS, SETTLED_STEPS + PROBED_STEPS, 384):
        fq.begin_step(start)
        before = gpu.count("product_error")
        step(model, x, dy)
        looked.append(gpu.count("product_error") - before)
    assert looked == [3, 0, 3], "later one in 128"


def test_the_guard_waits_for_no_device(gpu, monkeypatch):
    """If false, an optimizer step waits for the sums of the last one, or judges them before they
    have arrived."""
    module = linear(recipes.mxfp8())
    sums = guard.guard_of(module.runtime, module.weight.device)
    sums[0] = torch.tensor([1.0, 1.0])
    with monkeypatch.context() as patch:
        patch.setattr(hopper.Arrived, "query", lambda self: False)
        for _ in range(3):
            guard.apply_underflow_policy()
        assert module.plan.moved == {} and len(guard._UNDERWAY) == 1
    guard.apply_underflow_policy()
    assert set(module.plan.moved) == {"fprop"}


def test_exact_recipes_never_anchor(gpu):
    """If false, accuracy='exact' multiplies changed operands."""
    module, (x, dy) = linear(recipes.mxfp8(accuracy="exact")), inputs()
    step(module, x, dy)
    assert domains() == {"bf16"} and module.runtime.guard is None
    assert gpu.count("quantize_anchored") == gpu.count("anchor_codes") == 0
    counters.reset()
    step(linear(recipes.fp8_block(accuracy="exact")), x, dy)
    assert domains() == {"native"}


# What autograd keeps #


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8"])
def test_the_backward_keeps_the_codes_of_its_product(gpu, name: str, monkeypatch):
    """If false, the backward transposes or anchors what it kept, or activations take more than a
    byte an element."""
    m, _, k = shape = SHAPES[2]
    for one_call in (True, False):
        if not one_call:
            monkeypatch.setattr(fused, "_is_one_call", lambda *args: False)
        module, (x, dy) = linear(RECIPES[name](), shape), inputs(shape)
        with recorded_saves() as saved:
            y = module(x)
        assert [type(t) for t in saved] == [Tensor, Tensor]
        data, scale = saved
        assert data.dtype is torch.uint8 and data.shape == (k, m) and data.is_contiguous()
        assert scale.dtype is FP32 and scale.numel() == (k if name == "fp8_row" else 1)
        assert sum(t.numel() * t.element_size() for t in saved) <= 1.06 * x.numel()
        made, _ = module.plan_on(BF16, x.device).input.operands(
            x, layouts=dict.fromkeys(Direction, layout.NATIVE)
        )
        assert_same_bytes(data, made[COLUMNWISE].data, "codes")
        assert_same_bytes(scale.flatten(), made[COLUMNWISE].scale.flatten(), "scales")
        gpu.calls.clear()
        y.backward(dy)
        assert gpu.count("transpose_codes") == 0 and len(gpu.reads(dy)) == 1


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_overridden_backwards_keep_what_they_do_on_the_cpu(gpu, name: str, override: str):
    """If false, a backward in high precision decodes anchored values, or keeps more than the plan
    says."""
    module, (x, dy) = linear(RECIPES[name](backward_override=override)), inputs()
    with recorded_saves() as saved:
        y = module(x)
    if override == "high_precision":
        assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    else:
        want = module.plan.input.rowwise.storage(x, ROWWISE).buffers()
        assert len(saved) == len(want)
        for got, (buffer, tensor) in zip(saved, want.items()):
            assert_same_bytes(got, tensor, buffer)
    y.backward(dy)


def test_nothing_is_kept_for_a_frozen_weight(gpu):
    """If false, LoRA pays the base model's activation memory for gradients that nobody wants."""
    for name in RECIPES:
        module = linear(RECIPES[name]())
        module.requires_grad_(False)
        with recorded_saves() as saved:
            module(inputs()[0].requires_grad_())
        assert saved == [], name


# Autocast and checkpointing #


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_is_that_of_the_cpu(name: str):
    """If false, autocast changes the dtype of a product's operand, or a backward without it
    fails."""
    for shape in SHAPES[:2]:
        x, dy = inputs(shape, FP32)
        restart()
        want = step(linear(RECIPES[name](), shape, dtype=FP32), x, dy, dtype=BF16)
        restart()
        with hopper.emulated():
            module = linear(RECIPES[name](), shape, dtype=FP32)
            counters.reset()
            got = step(module, x, dy, dtype=BF16)
            assert counters.of("gemm") == planned(module, BF16), shape
            restart()
            with torch.autocast("cpu", BF16):  # the backward too
                inside = step(module, x, dy)
        for key, tensor in want.items():
            assert got[key].dtype is tensor.dtype and error(got[key], tensor) <= 1e-2, (
                f"{shape} {key}"
            )
            assert error(inside[key], tensor) <= 1e-2, f"{shape} {key} inside"


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_changes_no_bit(gpu, name: str):
    """If false, a recomputed activation differs from the forward's, or takes the codes of another
    input."""

    class Net(nn.Module):
        def __init__(self, checkpointed: bool):
            super().__init__()
            torch.manual_seed(0)
            self.gate, self.up, self.down = (
                nn.Linear(*f, dtype=BF16) for f in ((32, 64), (32, 64), (64, 32))
            )
            self.checkpointed = checkpointed

        def block(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = (
                    checkpoint(self.block, x, use_reentrant=False)
                    if self.checkpointed
                    else self.block(x)
                )
            return x

    x, dy = values(64, 32, seed=4), values(64, 32, seed=5)
    results = []
    for checkpointed in (False, True):
        restart()
        model = fq.convert(Net(checkpointed), RECIPES[name]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(2):
            seen.append(step(model, x, dy))
            optimizer.step()
        results.append(seen)
    for i, (got, want) in enumerate(zip(*reversed(results))):
        assert_same(got, want, f"step {i}")

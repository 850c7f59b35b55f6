# SPDX-License-Identifier: Apache-2.0
"""Products of storages on a GPU: exact within the bound of their domain, for every pair, layout and
odd shape."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, FP32, MADE, inputs, key_of
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.gemm import gemm
from fsdp_quant.linear import guard, shared_input
from fsdp_quant.ops import layout
from fsdp_quant.ops.capability import arch_of, gemm_domain, operand_layout
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.storage import Storage, to_layout, to_storage

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

DEVICE = expected.DEVICE
# (M, N, K) of fprop; N and K that no unit takes as they are among them.
SHAPES = (
    (16, 16, 16),
    (200, 272, 144),
    (33, 40, 100),
    (1, 48, 136),
    (129, 257, 384),
    (256, 512, 1024),
)
# Relative Frobenius error of a product with fp32 output. Promoted accumulation: the tensor core
# adds 128 terms with 13 fraction bits (1.3e-4 on gaussian data). Anchoring loses bits of elements
# 2^-14 below their line's largest: 4e-4 with outliers. bf16: fp32 accumulation of at most 1024
# terms.
BOUNDS = {"native": 2e-4, "anchored": 4e-4, "bf16": 1e-5, "reference": 1e-5}
PRODUCTS = {
    "fprop": (ROWWISE, ROWWISE),
    "dgrad": (ROWWISE, COLUMNWISE),
    "wgrad": (COLUMNWISE, COLUMNWISE),
}
NAMES = (
    "identity",
    "fp8_tensor",
    "fp8_row",
    "fp8_1x128",
    "fp8_128x128",
    "mxfp8",
    "mxfp8_32x32",
    "mxfp6",
    "mxfp6_e3m2",
    "mxfp4",
    "nvfp4",
    "nvfp4_16x16",
)


def quantizer(name: str) -> Quantizer:
    return MADE.get(name) or Quantizer(name)


def operands(
    a: str, b: str, product: str, shape: tuple[int, int, int], kind: str = "gauss"
) -> tuple[Storage, Storage]:
    """Storages whose product is [M, N] over K."""
    m, n, k = shape
    made = []
    for name, outer, direction, seed in (
        (a, m, PRODUCTS[product][0], 1),
        (b, n, PRODUCTS[product][1], 2),
    ):
        size = (outer, k) if direction is ROWWISE else (k, outer)
        made.append(quantizer(name).storage(inputs(*size, kind, BF16, seed), direction, key_of()))
    return tuple(made)


def exact(a: Storage, b: Storage) -> Tensor:
    """The product of the decoded operands; of nvfp4 as it is rounded to e4m3 beside 8-bit codes."""
    arch = arch_of(DEVICE)
    domain, _ = gemm_domain(a.fmt, b.fmt, BF16, arch)

    def values(s: Storage, other: Storage) -> Tensor:
        rounds = s.fmt.becomes_e4m3 and not s.fmt.decodes_exactly_to_e4m3
        if domain == "anchored" and rounds:
            s = to_layout(s, operand_layout(s.fmt, other.fmt, domain, arch))
        return s.operand().double()

    return values(a, b) @ values(b, a).t()


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("product", list(PRODUCTS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_every_pair_are_those_of_the_decoded_operands(
    product: str, shape: tuple[int, int, int]
):
    """If false, a layer multiplies by another block's scale, or by padding."""
    for a in NAMES:
        for b in NAMES:
            x, w = operands(a, b, product, shape)
            domain = gemm_domain(x.fmt, w.fmt, BF16, arch_of(DEVICE))[0]
            counters.reset()
            got = gemm(x, w, out_dtype=FP32)
            assert list(counters.of("gemm")) == [(domain, repr(x.fmt), repr(w.fmt))]
            if a == b == "identity":
                continue  # torch's own product, in bf16
            assert error(got, exact(x, w)) <= BOUNDS[domain], (
                f"{a} x {b} {product} {shape} {domain}"
            )
            rounded = gemm(x, w)
            assert (
                rounded.dtype is BF16 and error(rounded, exact(x, w)) <= BOUNDS[domain] + 2.0**-8
            ), f"{a} x {b} in bf16"


@pytest.mark.parametrize("kind", ["gauss", "heavy", "outliers", "tiny"])
def test_anchored_products_are_within_their_bound(kind: str):
    """If false, anchoring costs more than the note on it says."""
    for product in PRODUCTS:
        x, w = operands("mxfp8", "mxfp8", product, (256, 512, 4096), kind)
        assert error(gemm(x, w, out_dtype=FP32, domain="anchored"), exact(x, w)) <= 4e-4, product
        assert error(gemm(x, w, out_dtype=FP32, domain="bf16"), exact(x, w)) <= 2e-5, product


@pytest.mark.parametrize("name", ["mxfp6", "mxfp6_e3m2", "mxfp4"])
def test_small_codes_multiply_as_e4m3_on_every_rung(name: str):
    """If false, a scale of a run, a line or a tensor is another one than its codes were divided
    by."""
    for product, rung in itertools.product(PRODUCTS, layout.ANCHORS_OF_BOTH):
        for shape in ((256, 512, 4096), (208, 272, 1040)):
            x, w = operands(name, name, product, shape)
            got = gemm(to_layout(x, rung), to_layout(w, rung), out_dtype=FP32, domain="anchored")
            assert error(got, exact(x, w)) <= BOUNDS["anchored"], f"{product} {rung} {shape}"


@pytest.mark.parametrize(
    "pair",
    [("nvfp4", "nvfp4_16x16"), ("mxfp8", "nvfp4"), ("mxfp8", "identity"), ("fp8_128x128", "mxfp8")],
)
def test_the_bf16_domain_is_cublas_on_the_decoded_operands(pair: tuple[str, str]):
    """If false, what the exact domain multiplies is not what the codes mean."""
    for product in PRODUCTS:
        x, w = operands(*pair, product, (200, 272, 144))
        (p, scale_p), (q, scale_q) = x.factored_operand(), w.factored_operand()
        if scale_p is None and scale_q is None:
            laws.assert_same_bytes(
                gemm(x, w, domain="bf16").cpu(),
                torch.nn.functional.linear(p, q).cpu(),
                f"{pair} {product}",
            )
        scale = (1 if scale_p is None else scale_p.double()) * (
            1 if scale_q is None else scale_q.double()
        )
        want = p.double() @ q.double().t() * scale
        assert error(gemm(x, w, domain="bf16", out_dtype=FP32), want) <= 1e-5, f"{pair} {product}"


def test_bias_alpha_and_accumulation():
    """If false, an epilogue is left out in one of the domains."""
    g = torch.Generator(DEVICE).manual_seed(0)
    for pair in (
        ("fp8_tensor", "fp8_tensor"),
        ("fp8_row", "fp8_row"),
        ("fp8_1x128", "fp8_128x128"),
        ("mxfp8", "mxfp8"),
        ("mxfp8", "nvfp4"),
    ):
        for shape in ((200, 272, 144), (33, 40, 100)):
            x, w = operands(*pair, "fprop", shape)
            bias = torch.randn(shape[1], device=DEVICE, dtype=BF16, generator=g)
            alpha = torch.tensor([-0.375], device=DEVICE)
            want = exact(x, w) * -0.375 + bias.double()
            for out_dtype in (FP32, BF16):
                got = gemm(x, w, out_dtype=out_dtype, bias=bias, alpha=alpha)
                assert error(got, want) <= 4e-4 + (2.0**-8 if out_dtype is BF16 else 0), (
                    f"{pair} {shape} {out_dtype}"
                )
            into = torch.full(shape[:2], 3.0, device=DEVICE)
            gemm(x, w, out=into, accumulate=True)
            assert error(into, exact(x, w) + 3) <= 4e-4, f"{pair} {shape} accumulated"
            amax = torch.zeros(1, device=DEVICE)
            y = gemm(x, w, out=torch.full(shape[:2], float("nan"), device=DEVICE), out_amax=amax)
            assert amax.item() == y.abs().max().item(), f"{pair} {shape} amax"


@pytest.mark.parametrize(
    "name", ["fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "nvfp4"]
)
def test_storages_are_made_in_the_layout_of_their_product(name: str):
    """If false, a storage that never travels is not what laying out the compact one gives."""
    wanted = {d: layout.NATIVE for d in Direction}
    for shape in ((128, 256), (200, 272), (33, 47)):
        x = inputs(*shape)
        direct, _ = HybridQuantizer(name, name).operands(x, layouts=wanted)
        for d in Direction:
            compact = Quantizer(name).storage(x, d)
            laid = to_layout(compact, layout.NATIVE)
            expected.assert_same(direct[d].data, laid.data, f"{name} {shape} {d}: data")
            expected.assert_same(
                direct[d].scale.flatten(), laid.scale.flatten(), f"{name} {shape} {d}: scale"
            )
            back = to_storage(direct[d])
            expected.assert_same(back.data, compact.data, f"{name} {shape} {d}: back")
            expected.assert_same(back.scale, compact.scale, f"{name} {shape} {d}: scale back")
            expected.assert_same(
                direct[d].decode(), compact.decode(), f"{name} {shape} {d}: decoded"
            )


@pytest.mark.parametrize("run", [layout.ANCHORED_128, layout.ANCHORED_512])
def test_wgrad_is_anchored_over_runs_of_tokens(run: str):
    """If false, one token that is far larger than the others costs them their bits."""
    quantizers = HybridQuantizer("mxfp8", "mxfp8")
    for m, n, k in ((64, 48, 1000), (256, 512, 2048), (40, 33, 100), (33, 40, 513)):
        x, dy = inputs(k, n, "gauss"), inputs(k, m, "gauss", seed=3)
        x[:2] *= 30000  # two tokens of a block that stays apart
        wanted = {COLUMNWISE: run}
        (a, b) = (
            quantizers.operands(t, [COLUMNWISE], layouts=wanted)[0][COLUMNWISE] for t in (dy, x)
        )
        assert a.layout == b.layout == run
        exactly = exact(*(Quantizer("mxfp8").storage(t, COLUMNWISE) for t in (dy, x)))
        assert error(gemm(a, b, out_dtype=FP32), exactly) <= 4e-4, f"{m} x {n} over {k}"
        assert (
            error(a.decode(), Quantizer("mxfp8").storage(dy, COLUMNWISE).decode().double()) <= 1e-5
        )


RECIPES = {
    "identity": fq.recipes.identity,
    "fp8_current": fq.recipes.fp8_current,
    "fp8_delayed": fq.recipes.fp8_delayed,
    "fp8_row": fq.recipes.fp8_row,
    "fp8_block": fq.recipes.fp8_block,
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
    "nvfp4 4over6": lambda **o: fq.recipes.nvfp4(four_over_six="mse", **o),
    "nvfp4 row": lambda **o: fq.recipes.nvfp4(scale_per="row", four_over_six="mae", **o),
    "mxfp8/nvfp4": lambda **o: fq.recipes.hybrid("mxfp8", "nvfp4", **o),
    "nvfp4/mxfp8": lambda **o: fq.recipes.hybrid("nvfp4", "mxfp8", **o),
    "fp8_tensor/identity": lambda **o: fq.recipes.hybrid("fp8_tensor", "identity", **o),
    "mxfp6": fq.recipes.mxfp6,
    "mxfp6/e3m2": lambda **o: fq.recipes.mxfp6(grad_element="e3m2", **o),
    "mxfp4": fq.recipes.mxfp4,
    "mxfp8/mxfp4": lambda **o: fq.recipes.hybrid("mxfp8", "mxfp4", **o),
}


def linear_step(
    recipe: fq.Recipe, device: str, shape=(200, 272, 144), bias: bool = True, dtype=BF16
) -> list[Tensor]:
    """y, dx, dW, db of one step of one layer, on a device."""
    m, n, k = shape
    torch.manual_seed(0)
    module = torch.nn.Linear(k, n, bias=bias, dtype=dtype)
    x, dy = laws.values(m, k, seed=4, dtype=dtype), laws.values(m, n, seed=5, dtype=dtype)
    module, x, dy = module.to(device), x.to(device).requires_grad_(), dy.to(device)
    fq.convert(torch.nn.Sequential(module), recipe)
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, module.weight.grad, *([module.bias.grad] if bias else [])]


@pytest.mark.parametrize("name", list(RECIPES))
def test_layers_train_as_on_the_cpu(name: str):
    """If false, a recipe is another one where tensor cores multiply."""
    for shape in ((200, 272, 144), (33, 40, 100), (512, 256, 1024)):
        for bias in (True, False):
            for got, want in zip(
                linear_step(RECIPES[name](), "cuda", shape, bias),
                linear_step(RECIPES[name](), "cpu", shape, bias),
            ):
                assert error(got.cpu(), want.double()) <= 1e-2, f"{name} {shape} bias {bias}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layers_of_other_dtypes_train(dtype: torch.dtype):
    """If false, only bf16 models train where tensor cores multiply."""
    for name in ("fp8_current", "fp8_block", "mxfp8", "nvfp4"):
        for shape in ((200, 272, 144), (208, 272, 144)):
            on_gpu, on_cpu = (
                linear_step(RECIPES[name](), d, shape, dtype=dtype) for d in ("cuda", "cpu")
            )
            for got, want in zip(on_gpu, on_cpu):
                assert got.dtype is dtype and error(got.cpu(), want.double()) <= 1e-2, (
                    f"{name} {shape}"
                )


def test_accuracy_exact_leaves_anchoring():
    """If false, accuracy='exact' multiplies changed operands."""
    counters.reset()
    linear_step(fq.recipes.mxfp8(accuracy="exact"), "cuda")
    assert {domain for domain, *_ in counters.of("gemm")} == {"bf16"}
    counters.reset()
    linear_step(fq.recipes.mxfp8(), "cuda")
    assert {domain for domain, *_ in counters.of("gemm")} == {"anchored", "native"}


def test_the_guard_moves_products_at_a_step_boundary():
    """If false, a layer whose operands anchoring does not serve goes on losing their bits."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False, dtype=BF16)).to("cuda")
    fq.convert(model, fq.recipes.mxfp8())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = inputs(256, 256)
    x[:, :32] *= 1e5  # the other blocks of every row lie far below its exponent
    x.requires_grad_()
    with torch.no_grad():
        model[0].weight[:, :32] /= 1e5  # and count as much
    for _ in range(100):
        model(x).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    guard.apply_underflow_policy()
    assert model[0].plan.moved == {
        "fprop": "exact",
        "dgrad": "anchored",
        "wgrad": "anchored 512",
    }, model[0].plan.moved
    counters.reset()
    model(x).sum().backward()
    domains = {domain for domain, *_ in counters.of("gemm")}
    assert domains == {"bf16", "anchored"}


def test_weights_are_quantized_once_a_forward():
    """If false, a backward quantizes the weight again, or a forward multiplies codes of another
    one."""
    for name in ("fp8_current", "fp8_block", "mxfp8", "nvfp4"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 128, dtype=BF16)).to("cuda")
        fq.convert(model, RECIPES[name]())
        x = inputs(64, 256).requires_grad_()
        counters.reset()
        for forwards in (1, 2, 3):
            y = model(x)
            y.sum().backward()
            assert set(counters.of("weight encode").values()) == {forwards}, name
            fresh = torch.nn.Sequential(torch.nn.Linear(256, 128, dtype=BF16)).to("cuda")
            fresh.load_state_dict(model.state_dict())
            fq.convert(fresh, RECIPES[name]())
            with counters.uncounted():
                laws.assert_same_bytes(
                    y.detach().cpu(), fresh(x).detach().cpu(), f"{name}, forward {forwards}"
                )
            model[0].weight.data.mul_(2)  # no version tells


def test_layers_that_are_handed_one_input_quantize_it_once():
    """If false, gate and up each quantize what they share; or an input that nobody hands over is
    not read anew."""
    for name in ("fp8_current", "fp8_block", "mxfp8"):
        gate, up = (
            torch.nn.Linear(128, 256, bias=b, dtype=BF16, device="cuda") for b in (False, True)
        )
        fq.convert(torch.nn.Sequential(gate, up), RECIPES[name]())
        x = inputs(64, 128).requires_grad_() * 1
        want, handed = up(x.clone()), shared_input.Handed()
        counters.reset()
        first, second = gate(x, handed), up(x, handed)
        rows = [n for key, n in counters.of("quantize").items() if key[1] == "rowwise"]
        assert counters.total("gemm") == 2 and sum(rows) == 3, (name, rows)  # x, and each weight
        laws.assert_same_bytes(
            second.detach().cpu(), want.detach().cpu(), f"{name}: the second layer"
        )
        (first.sum() + second.sum()).backward()
        with torch.no_grad():
            x.mul_(2)
        changed, fresh = up(x), up(x.detach().clone())
        laws.assert_same_bytes(
            changed.detach().cpu(), fresh.detach().cpu(), f"{name}: after a write"
        )


def test_a_captured_step_reads_its_own_input():
    """If false, a replay multiplies the codes that were made before the graph was captured."""
    layer = torch.nn.Sequential(torch.nn.Linear(128, 256, dtype=BF16, device="cuda"))
    fq.convert(layer, RECIPES["fp8_current"]())
    x, graph = inputs(64, 128), torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            y = layer(x)
        for seed in (7, 8):
            x.copy_(inputs(64, 128, seed=seed))
            graph.replay()
            laws.assert_same_bytes(y.cpu(), layer(x.clone()).cpu(), f"seed {seed}")


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_compiled_layers_are_the_eager_ones(name: str):
    """If false, torch.compile changes what a layer computes."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256, dtype=BF16),
        torch.nn.GELU(),
        torch.nn.Linear(256, 128, dtype=BF16),
    ).to("cuda")
    fq.convert(model, RECIPES[name]())
    x = inputs(256, 128)
    results, again = [], copy.deepcopy(model)  # which counts its own steps
    for net, run in ((model, model), (again, torch.compile(again))):
        y = run(x.clone().requires_grad_())
        y.float().square().mean().backward()
        results.append([y.detach(), *(p.grad for p in net.parameters())])
    for eager, compiled in zip(*results):
        assert error(compiled, eager.double()) <= 1e-2, name

# SPDX-License-Identifier: Apache-2.0
"""Products of two storages: every pair and domain, the rotation that cancels, the error that
operands predict."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fsdp_quant as fq
from dist_tests.laws import FORMAT_NAMES, OTHER, PAIRS, QUANTIZERS, assert_same_bytes, values
from dist_tests.single.hopper import emulated
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, FORMATS, ROWWISE, Direction, format_of
from fsdp_quant.gemm import StaleWeightError, gemm
from fsdp_quant.linear.plan import build_plan
from fsdp_quant.ops import extension, reference
from fsdp_quant.ops.capability import (
    DOMAINS,
    arch_of,
    arch_of_capability,
    gemm_domain,
    may_be_anchored,
    unsupported_reason,
)
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage

WITH_RHT = {**QUANTIZERS, "nvfp4_rht": Quantizer("nvfp4", rotation=True)}
BF16_DOMAIN = [
    n for n, q in WITH_RHT.items() if not q.fmt.is_quantized or q.fmt.decodes_exactly_to_bf16
]
# One product of a linear layer: directions of a and b, shapes of both with M = 33, N = 17, K = 48.
PRODUCTS = {
    "fprop": (ROWWISE, ROWWISE, (33, 48), (17, 48)),
    "dgrad": (ROWWISE, COLUMNWISE, (33, 17), (17, 48)),
    "wgrad": (COLUMNWISE, COLUMNWISE, (33, 17), (33, 48)),
}
ULP = 2.0**-24  # relative error of one fp32 rounding

each_product = pytest.mark.parametrize("product", sorted(PRODUCTS))


def operands(a: str, b: str, product: str, kind: str = "gauss") -> tuple[Storage, Storage]:
    direction_a, direction_b, shape_a, shape_b = PRODUCTS[product]
    return (
        WITH_RHT[a].storage(values(*shape_a, seed=1, kind=kind), direction_a),
        WITH_RHT[b].storage(values(*shape_b, seed=2, kind=kind), direction_b),
    )


def exact_product(a: Storage, b: Storage) -> tuple[Tensor, Tensor]:
    """(a b^T, |a| |b|^T) of the decoded values in fp64."""
    x, w = a.operand().double(), b.operand().double()
    return x @ w.t(), x.abs() @ w.abs().t()


# Domains #


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identity_product_in_fp32_is_rounded_once(dtype: torch.dtype):
    """If false, fp32 gradients of high-precision products hold 8 bits: they were rounded to the
    operands' dtype on the way."""
    q = Quantizer("identity")
    x, w = (
        q.storage(values(*shape, seed=i, dtype=dtype), ROWWISE)
        for i, shape in enumerate([(33, 48), (17, 48)])
    )
    (want, size), got, bias = (
        exact_product(x, w),
        gemm(x, w, out_dtype=torch.float32),
        values(17, dtype=torch.float32),
    )
    assert ((got - want).abs() <= 49 * ULP * size).all()
    assert_same_bytes(gemm(x, w, out=torch.ones(33, 17), accumulate=True), 1 + got, "added to fp32")
    got = gemm(x, w, out_dtype=torch.float32, bias=bias)
    assert ((got - want - bias).abs() <= 50 * ULP * (size + bias.abs())).all()


@each_product
def test_reference_domain_is_the_product_of_decoded_values(product: str):
    """The definition, for every pair of formats: fp32 accumulation of k terms errs by at most (k +
    1) ulp of sum |a| |b| in any order, and nothing else may differ."""
    for a, b in PAIRS:
        x, w = operands(a, b, product, "heavy")
        want, size = exact_product(x, w)
        got = gemm(x, w, out_dtype=torch.float32, domain="reference")
        k = x.operand().shape[1]
        assert got.shape == want.shape, f"{a} x {b} {product}"
        assert ((got.double() - want).abs() <= (k + 1) * ULP * size).all(), f"{a} x {b} {product}"


@each_product
@pytest.mark.parametrize("a", BF16_DOMAIN)
def test_bf16_domain_decodes_exactly(a: str, product: str):
    """Otherwise the bf16 domain is another product than the definition.

    Its operands are exact, its sums are fp32: (k + 1) ulp of sum |a| |b|. Its epilogue rounds at
    most twice for the scales. The reference decodes each operand with one rounding, then sums: (k +
    3) ulp. Hence (2 k + 8) in all; one operand element rounded to bf16 errs by 2^-9, which is 2^15
    ulp of its term.
    """
    for b in BF16_DOMAIN:
        if WITH_RHT[a].fmt.rotated != WITH_RHT[b].fmt.rotated:
            continue
        x, w = operands(a, b, product, "heavy")
        _, size = exact_product(x, w)
        got = gemm(x, w, out_dtype=torch.float32, domain="bf16")
        want = gemm(x, w, out_dtype=torch.float32, domain="reference")
        k = x.operand().shape[1]
        assert ((got - want).abs() <= (2 * k + 8) * ULP * size).all(), f"{a} x {b} {product}"
        inner, outside = x.factored_operand()
        assert inner.dtype is torch.bfloat16
        again = (
            inner.double() if outside is None else inner.double() * outside.double().reshape(-1, 1)
        )
        assert ((again - x.operand().double()).abs() <= ULP * x.operand().double().abs()).all(), a


def test_bf16_domain_refuses_what_it_would_round():
    """Otherwise operands are rounded to bf16 without a word: fp32 block scales, and high-precision
    dtypes but bf16."""
    good = Quantizer("mxfp8").storage(values(17, 48), ROWWISE)
    bad = {
        "fp8_1x128": QUANTIZERS["fp8_1x128_fp32"].storage(values(33, 48), ROWWISE),
        "fp8_128x128": QUANTIZERS["fp8_128x128_fp32"].storage(values(33, 48), ROWWISE),
        "float32": Quantizer("identity").storage(values(33, 48, dtype=torch.float32), ROWWISE),
        "float16": Quantizer("identity").storage(values(33, 48, dtype=torch.float16), ROWWISE),
    }
    for word, storage in bad.items():
        with pytest.raises(ValueError, match=f"operand a .*{word}.*reference domain"):
            gemm(storage, good, domain="bf16")
        with pytest.raises(ValueError, match=f"operand b .*{word}.*reference domain"):
            gemm(good, storage, domain="bf16")
        assert gemm(storage, good, domain="reference").shape == (33, 17)


def test_native_domain_refuses_what_no_kernel_multiplies():
    """Otherwise a pair without a kernel silently takes another path."""
    x, w = operands("mxfp8", "nvfp4", "fprop")
    with pytest.raises(ValueError, match="no compiled kernel multiplies mxfp8 by nvfp4"):
        gemm(x, w, domain="native")
    with pytest.raises(ValueError, match="unknown GEMM domain 'fast'") as error:
        gemm(x, w, domain="fast")
    assert all(d in str(error.value) for d in DOMAINS)


def test_domain_is_a_function_of_shared_facts():
    """Otherwise two ranks, or the plan and the run, choose differently; fp32 block scales never
    decode to bf16."""
    cases = [
        ("identity", "identity", torch.float32, "cpu", "native"),
        ("mxfp8", "mxfp8", torch.bfloat16, "cpu", "reference"),
        ("mxfp8", "nvfp4", torch.bfloat16, "sm_80", "bf16"),
        ("mxfp8", "nvfp4", torch.float32, "sm_80", "bf16"),
        ("identity", "nvfp4", torch.float32, "sm_80", "reference"),
        ("identity", "mxfp8", torch.bfloat16, "sm_80", "bf16"),
        ("fp8_row", "mxfp8", torch.float16, "sm_80", "bf16"),
        ("fp8_row", "mxfp8", torch.float16, "cpu", "reference"),
    ]
    for a, b, dtype, arch, want in cases:
        domain, reason = gemm_domain(FORMATS[a], FORMATS[b], dtype, arch)
        assert domain == want and reason, (a, b, dtype, arch, reason)
    plain = format_of("fp8_1x128", pow2=False)
    domain, reason = gemm_domain(plain, FORMATS["mxfp8"], torch.bfloat16, "sm_80")
    assert domain == "reference" and "fp8_1x128" in reason
    assert arch_of(torch.device("cpu")) == "cpu"


def test_tensor_cores_multiply_the_pairs_that_they_can():
    """Otherwise a product is planned for a unit that refuses it in step 1, or runs slower than it
    could."""
    cases = {
        "sm_90a": {
            "native": [
                ("fp8_tensor", "fp8_tensor"),
                ("fp8_row", "fp8_tensor"),
                ("fp8_row", "fp8_row"),
                ("fp8_1x128", "fp8_128x128"),
                ("fp8_1x128", "fp8_1x128"),
            ],
            "anchored": [
                ("mxfp8", "mxfp8"),
                ("mxfp8", "mxfp8_32x32"),
                ("mxfp8", "fp8_row"),
                ("fp8_tensor", "mxfp8"),
                ("mxfp4", "mxfp4"),
                ("mxfp6", "mxfp6"),
                ("mxfp4", "mxfp8"),
                ("mxfp6", "fp8_tensor"),
                ("fp8_row", "mxfp4"),
                ("mxfp8", "nvfp4"),
            ],
            "bf16": [
                ("fp8_128x128", "fp8_128x128"),
                ("mxfp8", "fp8_1x128"),
                ("nvfp4", "nvfp4_16x16"),
                ("fp8_row", "identity"),
                ("mxfp4", "nvfp4"),
                ("mxfp6", "fp8_1x128"),
            ],
        },
        "sm_100f": {
            "native": [
                ("fp8_tensor", "fp8_tensor"),
                ("fp8_row", "fp8_row"),
                ("fp8_row", "fp8_tensor"),
                ("mxfp8", "mxfp8"),
                ("mxfp8", "mxfp8_32x32"),
                ("nvfp4", "nvfp4_16x16"),
                ("fp8_1x128", "fp8_1x128"),
                ("fp8_1x128", "fp8_128x128"),
                ("mxfp8", "fp8_1x128"),
            ],
            "bf16": [("fp8_row", "mxfp8"), ("mxfp8", "nvfp4"), ("fp8_1x128", "fp8_tensor")],
        },
        "sm_89": {
            "native": [
                ("fp8_tensor", "fp8_tensor"),
                ("fp8_row", "fp8_row"),
                ("fp8_row", "fp8_tensor"),
            ],
            "bf16": [
                ("fp8_row", "fp8_1x128"),
                ("mxfp8", "mxfp8"),
                ("fp8_1x128", "fp8_128x128"),
                ("nvfp4", "nvfp4"),
            ],
        },
        "sm_80": {
            "bf16": [
                ("fp8_tensor", "fp8_tensor"),
                ("fp8_row", "fp8_row"),
                ("mxfp8", "mxfp8"),
                ("fp8_1x128", "fp8_128x128"),
            ]
        },
    }
    for arch, domains in cases.items():
        for want, pairs in domains.items():
            for pair in pairs:
                for a, b in (pair, pair[::-1]):
                    formats = FORMATS[a], FORMATS[b]
                    assert gemm_domain(*formats, torch.bfloat16, arch, compiled=True)[0] == want, (
                        arch,
                        a,
                        b,
                    )
                    exact = gemm_domain(*formats, torch.bfloat16, arch, exact=True, compiled=True)[
                        0
                    ]
                    assert exact == ("bf16" if want == "anchored" else want), (arch, a, b)
    of_any_scale = format_of("fp8_1x128", pow2=False)
    assert (
        gemm_domain(of_any_scale, of_any_scale, torch.bfloat16, "sm_100f", compiled=True)[0]
        == "reference"
    )
    e5m2 = format_of("fp8_tensor", element="e5m2")
    assert (
        gemm_domain(e5m2, FORMATS["fp8_tensor"], torch.bfloat16, "sm_90a", compiled=True)[0]
        == "native"
    )
    assert gemm_domain(e5m2, e5m2, torch.bfloat16, "sm_90a", compiled=True)[0] == "bf16"
    floor = format_of("mxfp8", scale_rounding="floor")
    assert gemm_domain(floor, floor, torch.bfloat16, "sm_90a", compiled=True)[0] == "bf16"


def test_every_gpu_of_a_family_is_planned_alike():
    """If false, a B300 or an RTX 5090 trains in pure Python while its neighbour multiplies
    codes."""
    rows = {
        (8, 0): "sm_80",
        (8, 6): "sm_80",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100f",
        (10, 3): "sm_100f",
        (12, 0): "sm_120f",
        (12, 1): "sm_120f",
        (11, 0): "sm_110",
    }
    assert {c: arch_of_capability(c) for c in rows} == rows
    for arch in ("sm_100f", "sm_120f"):
        for fmt in ("mxfp8", "nvfp4", "fp8_tensor"):
            assert (
                gemm_domain(FORMATS[fmt], FORMATS[fmt], torch.bfloat16, arch, compiled=True)[0]
                == "native"
            ), (arch, fmt)
    assert (
        gemm_domain(FORMATS["mxfp8"], FORMATS["mxfp8"], torch.bfloat16, "sm_89", compiled=True)[0]
        == "bf16"
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100f"])
def test_a_recipe_is_native_where_require_native_accepts_it(arch: str, monkeypatch):
    """If false, someone rents GPUs on which a recipe runs in bf16, or is refused one that runs."""
    native = {
        "sm_80": {"bf16"},
        "sm_89": {"bf16", "fp8_current", "fp8_delayed", "fp8_row"},
        "sm_90a": {"bf16", "fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "mxfp6"},
        "sm_100f": {"bf16", "fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4"},
    }
    monkeypatch.setattr(extension, "runs_on", lambda device, warn=False: None)
    with emulated(arch):
        for name in recipes.names():
            recipe, accepted = recipes.by_name(name), True
            support = fq.is_native(name, "cpu")
            try:
                build_plan(dataclasses.replace(recipe, require_native=True), "up", arch)
            except ValueError as error:
                accepted = False
                assert str(support.reasons[0]).split(" multiplies")[0] in str(error)
            assert bool(support) == accepted == (not support.reasons), (name, str(support))
            if name in native["sm_90a"] | native["sm_100f"]:
                assert accepted == (name in native[arch]), (name, str(support))
        mixed = (
            recipes.per_layer("bf16", {"up": "mxfp8"}),
            recipes.schedule("bf16", (5, None, "mxfp8")),
        )
        for recipe in mixed:
            assert bool(fq.is_native(recipe, "cpu")) == bool(fq.is_native("mxfp8", "cpu"))
    monkeypatch.undo()
    assert "the device is cpu" in str(fq.is_native("mxfp8", "cpu")) and fq.is_native("bf16", "cpu")
    assert "no CUDA device" in str(fq.is_native("bf16", "cuda")) or torch.cuda.is_available()
    with pytest.raises(ValueError, match="is_native wants a recipe"):
        fq.is_native(3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100f"])
def test_formats_that_no_kernel_encodes_are_planned_without_one(arch: str):
    """If false, `require_native` accepts a product that dies of its shapes in step 1."""
    fmts = [q.fmt for q in (QUANTIZERS | OTHER).values() if q.fmt.is_quantized]
    without = [fmt for fmt in fmts if unsupported_reason(fmt)]
    assert {"mxfp6_16x16", "mxfp8_1x64", "fp4_1x128"} <= {fmt.name for fmt in without}
    for a, b in itertools.product(without, fmts):
        for pair in ((a, b), (b, a)):
            domain, reason = gemm_domain(*pair, torch.bfloat16, arch, compiled=True)
            exact = all(fmt.decodes_exactly_to_bf16 for fmt in pair)
            assert domain == ("bf16" if exact else "reference") and reason, (pair, domain)
            assert not may_be_anchored(*pair)


def test_rows_that_are_in_no_table_multiply():
    """If false, a format needs a product of its own."""
    x, w = values(33, 130, kind="heavy"), values(48, 130, seed=1)
    for a, b in itertools.product(
        OTHER.values(), [*OTHER.values(), QUANTIZERS["mxfp8"], QUANTIZERS["nvfp4"]]
    ):
        left, right = a.storage(x, ROWWISE), b.storage(w, ROWWISE)
        want = left.decode().double() @ right.decode().double().t()
        torch.testing.assert_close(
            gemm(left, right, out_dtype=torch.float32).double(), want, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_identity_product_is_torch_linear(dtype: torch.dtype):
    """Otherwise the identity recipe is not the plain module, bit for bit."""
    x, w, bias = (
        values(33, 48, seed=1, dtype=dtype),
        values(17, 48, seed=2, dtype=dtype),
        values(1, 17, dtype=dtype)[0],
    )
    a, b = Quantizer("identity").storage(x, ROWWISE), Quantizer("identity").storage(w, ROWWISE)
    assert_same_bytes(gemm(a, b), F.linear(x, w))
    assert_same_bytes(gemm(a, b, bias=bias), F.linear(x, w, bias))
    dy = values(33, 17, seed=3, dtype=dtype)
    rows, cols = (Quantizer("identity").storage(dy, d) for d in Direction)
    assert_same_bytes(gemm(rows, Quantizer("identity").storage(w, COLUMNWISE)), dy @ w)
    assert_same_bytes(gemm(cols, Quantizer("identity").storage(x, COLUMNWISE)), dy.t() @ x)


# The epilogue #


@pytest.mark.parametrize("domain", ["bf16", "reference"])
def test_epilogue_rounds_once(domain: str):
    """alpha * product + bias in fp32, then one rounding to the result's dtype."""
    x, w = operands("fp8_row", "nvfp4", "fprop")
    bias, alpha = values(1, 17, seed=4)[0], torch.tensor(0.37)
    plain = gemm(x, w, out_dtype=torch.float32, domain=domain)
    want = plain * alpha + bias.float()
    assert_same_bytes(
        gemm(x, w, out_dtype=torch.float32, bias=bias, alpha=alpha, domain=domain), want
    )
    assert_same_bytes(gemm(x, w, bias=bias, alpha=alpha, domain=domain), want.bfloat16())
    assert gemm(x, w, domain=domain).dtype is x.dtype
    out = torch.full((33, 17), 7.0)
    assert gemm(x, w, out=out, domain=domain) is out
    assert_same_bytes(out, plain)
    assert gemm(x, w, out=out, accumulate=True, domain=domain) is out
    assert_same_bytes(out, plain + plain)  # in fp32, the dtype of `out`


def test_out_amax_keeps_the_largest():
    """Otherwise delayed scaling of a result sees another step's range; it is raised, never lowered,
    and NaN stays."""
    x, w = operands("mxfp8", "mxfp8", "fprop")
    largest = gemm(x, w).abs().max().float()
    for before, want in ((0.0, largest), (1e6, torch.tensor(1e6))):
        seen = torch.tensor([before])
        gemm(x, w, out_amax=seen)
        assert_same_bytes(seen, want.reshape(1))
    seen = torch.zeros(1)
    gemm(x.with_buffers({"data": torch.full_like(x.data, 0x7F)}), w, out_amax=seen)
    assert seen.isnan().all()


def test_out_amax_of_zero_tokens_stays():
    """Otherwise an expert without tokens raises while recording the range of its result."""
    q, seen = Quantizer("mxfp8"), torch.tensor([2.0])
    empty = q.storage(torch.zeros(0, 48, dtype=torch.bfloat16), ROWWISE)
    gemm(empty, q.storage(values(17, 48), ROWWISE), out_amax=seen)
    assert seen.item() == 2.0


def test_products_are_counted_by_domain_and_pair():
    """Otherwise the receipt cannot say what ran."""
    x, w = operands("mxfp8", "nvfp4", "fprop")
    key = ("reference", "mxfp8", "nvfp4")
    before = counters.of("gemm").get(key, 0)
    gemm(x, w, domain="reference")
    assert counters.of("gemm")[key] == before + 1


# Errors #


def test_different_contractions_are_refused():
    """Otherwise a product of unrelated operands is computed, or the error names no operand."""
    x = Quantizer("mxfp8").storage(values(33, 48), ROWWISE)
    with pytest.raises(ValueError, match="48 elements of a .*with 32 of b"):
        gemm(x, Quantizer("nvfp4").storage(values(17, 32), ROWWISE))
    with pytest.raises(ValueError, match="48 elements of a .*with 17 of b"):
        gemm(x, Quantizer("nvfp4").storage(values(17, 48), COLUMNWISE))
    # 33 and 40 tokens both pad to 48 rotated rows; they are different batches all the same.
    dy, tokens = (WITH_RHT["nvfp4_rht"].storage(values(m, 16), COLUMNWISE) for m in (33, 40))
    with pytest.raises(ValueError, match="33 elements of a .*with 40 of b"):
        gemm(dy, tokens)


def test_rotation_on_one_operand_is_refused_by_the_product():
    """Otherwise a rotated gradient times plain activations trains on noise."""
    turned, plain = (
        WITH_RHT[n].storage(values(48, 16), COLUMNWISE) for n in ("nvfp4_rht", "nvfp4")
    )
    for a, b in ((turned, plain), (plain, turned)):
        with pytest.raises(ValueError, match="the rotation does not cancel"):
            gemm(a, b)


def test_accumulate_needs_an_output():
    """Otherwise a gradient is silently not accumulated."""
    x, w = operands("mxfp8", "mxfp8", "fprop")
    with pytest.raises(ValueError, match="out=None"):
        gemm(x, w, accumulate=True)


def test_freed_operands_are_refused():
    """Otherwise the GEMM of a resharded weight reads memory that another tensor owns now."""
    for position in (0, 1):
        pair = list(operands("mxfp8", "nvfp4", "fprop"))
        pair[position].data.untyped_storage().resize_(0)
        with pytest.raises(StaleWeightError, match=f"operand {'ab'[position]}: .*were freed"):
            gemm(*pair)


# Shapes #


@pytest.mark.parametrize("domain", ["bf16", "reference", None])
@pytest.mark.parametrize("name", sorted(BF16_DOMAIN))
def test_zero_tokens(name: str, domain: str | None):
    """No token: the outputs are empty and the weight's gradient is zero, in every domain."""
    q = WITH_RHT[name]
    none, w = torch.zeros(0, 48, dtype=torch.bfloat16), values(17, 48)
    y = gemm(q.storage(none, ROWWISE), q.storage(w, ROWWISE), domain=domain)
    assert tuple(y.shape) == (0, 17)
    dw = gemm(q.storage(none[:, :17], COLUMNWISE), q.storage(none, COLUMNWISE), domain=domain)
    assert_same_bytes(dw, torch.zeros(17, 48, dtype=torch.bfloat16))


def test_products_of_odd_shapes():
    """Otherwise the half-filled last byte or block of an odd extent reaches the product."""
    for m, n, k in [(1, 1, 1), (7, 15, 17), (31, 33, 1), (1, 96, 33), (17, 1, 31)]:
        x, w = values(m, k, seed=1), values(n, k, seed=2)
        for name, q in WITH_RHT.items():
            a, b = q.storage(x, ROWWISE), q.storage(w, ROWWISE)
            got = gemm(a, b, out_dtype=torch.float32, domain="reference")
            want, size = exact_product(a, b)
            assert tuple(got.shape) == (m, n)
            # The rotation pads the contraction to 16 and fills the padding.
            assert ((got - want).abs() <= (a.operand().shape[1] + 1) * ULP * size).all(), (
                f"{name} {m} {n} {k}"
            )


# Quality #


def noise(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@each_product
def test_error_is_what_the_operands_predict(product: str):
    """Otherwise a product loses more than its formats do: a scale applied twice or not at all, a
    wrong block.

    For independent operands the relative errors add in squares: e^2 = ea^2 + eb^2 + ea^2 eb^2. 160
    x 192 outputs leave about 1% of sampling error; a block of 16 with its neighbour's scale shows
    as tens of percents.
    """
    directions = PRODUCTS[product][:2]
    x = values(160, 256, seed=1, dtype=torch.float32)
    w = values(192, 256, seed=2, dtype=torch.float32)
    want = x.double() @ w.double().t()
    sides = []
    for tensor, direction in zip((x, w), directions):
        source = tensor if direction is ROWWISE else tensor.t()
        made = {n: Quantizer(n).storage(source.contiguous(), direction) for n in FORMAT_NAMES}
        sides.append({n: (s, noise(s.operand(), tensor)) for n, s in made.items()})
    for a, b in PAIRS:
        (storage_a, error_a), (storage_b, error_b) = sides[0][a], sides[1][b]
        got = noise(gemm(storage_a, storage_b, out_dtype=torch.float32, domain="reference"), want)
        predicted = math.sqrt(error_a**2 + error_b**2 + (error_a * error_b) ** 2)
        assert got == pytest.approx(predicted, rel=0.05, abs=1e-6), f"{a} x {b}"


# The rotation #


def rotation_matrix(direction: Direction) -> Tensor:
    """fp64 [16, 16]: row i is where input i goes."""
    eye = torch.eye(16, dtype=torch.bfloat16)
    turned = reference.rotate(eye, direction).double()
    return turned if direction is ROWWISE else turned.t()


def test_rotation_is_one_orthogonal_matrix():
    """One sign vector for both operands, in Sylvester order: entries +-1/4, exact in bf16, rows
    orthonormal."""
    want = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        want = torch.cat([torch.cat([want, want], 1), torch.cat([want, -want], 1)])
    signs = torch.tensor(
        [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float64
    )
    for direction in Direction:
        h = rotation_matrix(direction)
        assert_same_bytes(h, signs[:, None] * want / 4, direction.value)
        assert_same_bytes(h @ h.t(), torch.eye(16, dtype=torch.float64), direction.value)


@pytest.mark.parametrize("tokens", [1, 16, 33, 160])
def test_rotation_leaves_an_fp64_wgrad_unchanged(tokens: int):
    """Both operands turned by the same orthogonal blocks: the product is the same to fp64
    rounding."""
    h = rotation_matrix(COLUMNWISE)
    dy, x = values(tokens, 24, seed=1).double(), values(tokens, 40, seed=2).double()

    def turned(t: Tensor) -> Tensor:
        blocks = F.pad(t, (0, 0, 0, -tokens % 16)).unflatten(0, (-1, 16))
        return torch.einsum("bic,io->boc", blocks, h).flatten(0, 1)

    want = dy.t() @ x
    # Two products of 16 terms and one of `tokens`: 2^-53 each.
    bound = (tokens + 40) * 2.0**-53 * 16 * (dy.abs().t() @ x.abs()).max()
    assert (turned(dy).t() @ turned(x) - want).abs().max() <= bound
    # What is encoded is that rotation of the same values, three fp32 roundings and one to bf16
    # away.
    for t in (dy, x):
        got = reference.rotate(t.bfloat16(), COLUMNWISE).double()
        assert (
            (got - turned(t)).abs() <= 2.0**-8 * turned(t).abs() + 2.0**-20 * t.abs().max()
        ).all()


@pytest.mark.parametrize("tokens", [16, 33, 256])
def test_rotated_product_has_the_error_of_its_operands(tokens: int):
    """Otherwise the rotation does not cancel between dy.columnwise and x.columnwise, or its padding
    reaches dW."""
    q = WITH_RHT["nvfp4_rht"]
    dy, x = (
        values(tokens, 160, seed=1, kind="outliers"),
        values(tokens, 192, seed=2, kind="outliers"),
    )
    a, b = q.storage(dy, COLUMNWISE), q.storage(x, COLUMNWISE)
    errors = [noise(s.dequantize(torch.float32), t) for s, t in ((a, dy), (b, x))]
    for domain in ("bf16", "reference"):
        got = noise(
            gemm(a, b, out_dtype=torch.float32, domain=domain), dy.double().t() @ x.double()
        )
        # Few tokens and outlier columns leave few independent terms: a third; a rotation that stays
        # is an error of 1.
        assert got == pytest.approx(math.hypot(*errors), rel=1 / 3), domain


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_dequantize_turns_the_rotation_back(direction: Direction):
    """Otherwise a rotated storage decodes to values that mean nothing; the padding is cut off
    again."""
    q = WITH_RHT["nvfp4_rht"]
    for shape in [(1, 1), (33, 48), (48, 33), (16, 16)]:
        x = values(*shape, kind="heavy")
        storage = q.storage(x, direction)
        assert tuple(storage.dequantize().shape) == shape
        # An orthogonal matrix keeps the norm of the error.
        turned = reference.rotate(x, direction).double()
        in_blocks = noise(storage.decode(), turned)
        assert noise(storage.dequantize(torch.float32), x) <= in_blocks + 2.0**-8
        assert in_blocks < 0.2
    exact = reference.rotate(
        reference.rotate(torch.eye(48).bfloat16(), direction), direction, inverse=True
    )
    assert torch.equal(exact, torch.eye(48))  # but for the sign of zeros

# SPDX-License-Identifier: Apache-2.0
"""The format table: geometry, sizes, exactness claims, errors, and quality computed from the
element grids."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_tests.golden import oracle
from dist_tests.laws import QUANTIZERS, values
from fsdp_quant.families import FAMILIES, family_of
from fsdp_quant.formats import (
    ALIASES,
    COLUMNWISE,
    E4M3,
    ELEMENTS,
    FORMATS,
    FP8_EXACT_LARGEST,
    FP8_EXACT_OPERAND,
    FP8_EXACT_SCALES,
    ROWWISE,
    Direction,
    Element,
    Format,
    anchored_format,
    check_pair,
    format_of,
    known_formats,
)
from fsdp_quant.quantizer import Quantizer

QUANTIZED = {name: q for name, q in QUANTIZERS.items() if q.fmt.is_quantized}


# Elements #

# Source: OCP Microscaling Formats v1.0, tables 3 and 5: the largest number, explicit mantissa bits,
# the smallest normal number.
OF_THE_SPECIFICATION = {"e3m2": (28.0, 2, 0.25), "e2m3": (7.5, 3, 1.0), "e2m1": (6.0, 1, 1.0)}


@pytest.mark.parametrize(
    "element", [e for e in ELEMENTS.values() if e.is_quantized], ids=lambda e: e.name
)
def test_elements_are_those_of_their_specifications(element: Element):
    """Otherwise a scale targets another largest number than the element has, or its error is taken
    for another."""
    if element.dtype is None:
        want = OF_THE_SPECIFICATION[element.name]
    else:
        facts = torch.finfo(element.dtype)
        want = facts.max, round(-math.log2(facts.eps)), facts.smallest_normal
    assert (element.max, element.mantissa, 2.0**element.emin) == want


def test_the_largest_exact_scale_is_the_largest_of_its_rule():
    """Otherwise an amax is divided by a scale that an e4m3 byte does not hold, or large blocks
    saturate."""
    significands = {scale for _, scale in FP8_EXACT_SCALES}
    held = [s * 2.0**e for s in significands for e in range(-9, 10) if s * 2.0**e <= E4M3.max]
    assert max(held) == FP8_EXACT_LARGEST
    assert ELEMENTS["e2m1"].max * FP8_EXACT_LARGEST * FP8_EXACT_OPERAND <= E4M3.max


def test_facts_of_scales_are_values():
    """Otherwise `if fmt.has_scales` is true of every format."""
    for name, fmt in FORMATS.items():
        assert fmt.has_scales is (fmt.scale != "none"), name
        assert fmt.has_fp32_scales is (fmt.scale == "fp32"), name
        assert not fmt.is_quantized or fmt.overflow > fmt.element.max, name
    assert "floor" in repr(format_of("mxfp8", scale_rounding="floor")) and "floor" not in repr(
        FORMATS["mxfp8"]
    )


def test_texts_of_formats_tell_options():
    """If false, an error or a plan names a format without the option that makes it another one."""
    for fmt, text in (
        (FORMATS["nvfp4"], "nvfp4"),
        (format_of("nvfp4", scale_rule="fp8_exact"), "nvfp4(fp8_exact)"),
        (FORMATS["mxfp8"], "mxfp8"),
        (format_of("mxfp8", scale_rounding="floor"), "mxfp8(floor)"),
    ):
        assert str(fmt) == text


def test_anchored_formats_have_the_blocks_of_their_anchors():
    """Otherwise a product reads one scale of a tensor as one per line, or the other way round."""
    mxfp8, exact = FORMATS["mxfp8"], format_of("nvfp4", scale_rule="fp8_exact")
    assert anchored_format(mxfp8, None).block == (1, None) and anchored_format(
        mxfp8, 512
    ).block == (1, 512)
    assert anchored_format(mxfp8, None, whole=True).block == (None, None)
    assert (
        anchored_format(exact, None).block == (None, None)
        and anchored_format(exact, None).element is E4M3
    )
    for fmt in (anchored_format(mxfp8, 512), anchored_format(mxfp8, None, whole=True)):
        assert (fmt.element, fmt.scale, fmt.pow2) == (mxfp8.element, "fp32", True)
    assert [ELEMENTS[name].operand.name for name in ("e2m1", "e5m2")] == ["e4m3", "e5m2"]


# Geometry and sizes #


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_storage_has_the_shapes_the_format_says(name: str):
    """Otherwise buffers planned from a format alone (gathers, optimizer fragments) do not fit the
    bytes made."""
    quantizer = QUANTIZERS[name]
    for q in {quantizer, replace(quantizer, rotation=quantizer.fmt.name == "nvfp4")}:
        for shape in [(1, 1), (7, 33), (33, 31), (17, 15), (130, 260), (0, 48)]:
            for direction in Direction:
                made = q.storage(values(*shape), direction)
                rows, cols = q.fmt.padded_shape(shape, direction)
                dtype = torch.uint8 if q.fmt.is_quantized else torch.bfloat16
                assert made.data.dtype is dtype
                assert made.data.shape[0] == rows
                assert made.data.shape[1] * made.data.element_size() == q.fmt.row_bytes(
                    cols, torch.bfloat16
                )
                scale = q.fmt.scale_shape(shape, direction)
                assert (None if made.scale is None else tuple(made.scale.shape)) == scale, (
                    name,
                    shape,
                    direction,
                )
                assert (made.tensor_amax is not None) == q.fmt.tensor_scale


def test_bytes_per_element():
    """Otherwise planned memory and traffic are wrong; the numbers are those of the published
    layouts."""
    want = {
        "identity": 2,
        "fp8_tensor": 1,
        "fp8_row": 1,
        "fp8_1x128": 1 + 4 / 128,
        "fp8_128x128": 1 + 4 / 128**2,
        "mxfp8": 1 + 1 / 32,
        "mxfp8_32x32": 1 + 1 / 1024,
        "mxfp6": 0.75 + 1 / 32,
        "mxfp4": 0.5 + 1 / 32,
        "nvfp4": 0.5 + 1 / 16,
        "nvfp4_16x16": 0.5 + 1 / 256,
    }
    assert {name: fmt.bytes_per_element() for name, fmt in FORMATS.items()} == want
    assert FORMATS["identity"].bytes_per_element(torch.float32) == 4
    for name, fmt in FORMATS.items():
        made = Quantizer(fmt).storage(values(256, 384), COLUMNWISE)
        per_line = 0 if fmt.scale == "none" or fmt.block[1] is not None else made.scale.numel() * 4
        whole = 4 if fmt.tensor_scale else 0
        assert made.nbytes == fmt.bytes_per_element() * 256 * 384 + per_line + whole, name


def test_a_width_that_nothing_packs_is_refused():
    """If false, codes of 5 bits are stored as some other width."""
    with pytest.raises(
        ValueError, match="e2m2 has codes of 5 bits; widths that are packed: 4, 6, 8, 16"
    ):
        Element("e2m2", 5, 7.0, 2, 0, None)
    with pytest.raises(ValueError, match="e3m4 has codes of 8 bits, and no torch dtype"):
        Element("e3m4", 8, 15.5, 4, -2, None)


def test_formats_are_values():
    """Otherwise recipes and plans cannot compare formats, key caches with them, or send them to
    another process."""
    for name, fmt in FORMATS.items():
        assert format_of(name) is fmt and format_of(fmt) is fmt
        again = pickle.loads(pickle.dumps(fmt))
        assert again == fmt and hash(again) == hash(fmt)
    assert {format_of(alias) for alias in ALIASES} <= set(FORMATS.values())
    assert format_of("fp8_tensor", element="e5m2") != FORMATS["fp8_tensor"]
    assert format_of("mxfp8", scale_rounding="floor") != FORMATS["mxfp8"]
    texts = [repr(q.fmt) for q in QUANTIZERS.values()] + [
        repr(replace(FORMATS["nvfp4"], rotated=True))
    ]
    assert len(set(texts)) == len(texts), "two formats print alike"


def test_families_use_square_blocks_for_weights_only():
    """Otherwise one outlier token ruins its neighbours' values in activations and gradients."""
    for name, family in FAMILIES.items():
        assert family.vector.block[0] in (1, None), name
        assert family.weight.element == family.vector.element, name


@pytest.mark.parametrize(
    "name", sorted(n for n, q in QUANTIZED.items() if q.fmt.decodes_exactly_to_bf16)
)
def test_products_of_code_and_scale_fit_bf16(name: str):
    """Otherwise the bf16 domain rounds operands: every code times every scale is tried."""
    fmt = QUANTIZED[name].fmt
    codes = oracle.value_of(np.arange(256 if fmt.element.bits == 8 else 16), fmt.element.name)
    codes = codes[np.isfinite(codes)]
    if fmt.scale_leaves_contraction:
        scales = np.ones(1)
    elif fmt.scale == "e4m3":
        scales = oracle.grid("e4m3")
    else:  # powers of two, where the product is a normal bf16 number
        low, high = (0x0A, 0xF4) if fmt.element.name == "e4m3" else (0x11, 0xEF)
        scales = 2.0 ** (np.arange(low, high + 1) - 127.0)
    products = torch.from_numpy(np.outer(codes, scales))
    assert torch.equal(products.to(torch.bfloat16).double(), products)


def test_scales_that_are_not_powers_of_two_stay_out_of_bf16():
    """Otherwise 1x128 and 128x128 with fp32 scales would be multiplied in bf16 with rounded
    operands."""
    for name in ("fp8_1x128_fp32", "fp8_128x128_fp32"):
        assert not QUANTIZED[name].fmt.decodes_exactly_to_bf16
    assert not FORMATS["identity"].decodes_exactly_to_bf16  # it depends on the tensor's dtype
    for dtype, exact in ((torch.bfloat16, True), (torch.float16, False), (torch.float32, False)):
        assert (
            Quantizer("identity")
            .storage(values(4, 4, dtype=dtype), ROWWISE)
            .decodes_exactly_to_bf16
            is exact
        )


# Errors #


def test_unknown_names_list_the_known_ones():
    """Otherwise a typo in a recipe costs a search through the sources."""
    with pytest.raises(ValueError, match="unknown format 'mxfp9'") as error:
        format_of("mxfp9")
    assert all(name in str(error.value) for name in [*FORMATS, *ALIASES])
    assert known_formats() == sorted([*FORMATS, *ALIASES])
    with pytest.raises(ValueError, match="unknown format 'mxfp9'"):
        Quantizer("mxfp9")
    with pytest.raises(ValueError, match="unknown element 'e3m4'") as error:
        format_of("mxfp8", element="e3m4")
    assert all(name in str(error.value) for name in ELEMENTS)
    with pytest.raises(ValueError, match="unknown format family 'fp7'") as error:
        family_of("fp7")
    assert all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"scale_rounding": "down"}, ["'up' or 'floor'", "'down'"]),
        ({"scale": "fp16"}, ["e8m0", "'fp16'"]),
        ({"pow2": True}, ["pow2", "mxfp8", "e8m0"]),
    ],
)
def test_meaningless_formats_are_refused(changes: dict, words: list[str]):
    """Otherwise an option without effect is accepted and the user believes that it works."""
    with pytest.raises(ValueError) as error:
        format_of("mxfp8", **changes)
    assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(ValueError, match="floor.*fp8_row"):
        format_of("fp8_row", scale_rounding="floor")
    with pytest.raises(ValueError):
        Format("mine", E4M3, (1, 32), "e5m3")
    with pytest.raises(ValueError, match="pow2 is defined for fp32 scales; identity has none"):
        format_of("identity", pow2=True)


def test_rotation_on_one_operand_is_refused():
    """Otherwise a product of rotated and plain values is computed, and it is noise."""
    plain, turned = FORMATS["nvfp4"], replace(FORMATS["nvfp4"], rotated=True)
    check_pair("wgrad", turned, turned, "dy", "x")
    check_pair("fprop", plain, FORMATS["mxfp8"], "x", "w")
    for a, b in ((turned, plain), (FORMATS["identity"], turned)):
        with pytest.raises(ValueError, match="wgrad.*rotat") as error:
            check_pair("wgrad", a, b, "dy.columnwise", "x.columnwise")
        assert "dy.columnwise" in str(error.value) and "x.columnwise" in str(error.value)


# Quality #


def normal(rows: int, cols: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, cols, generator=g)


def laplace(rows: int, cols: int, g: torch.Generator) -> Tensor:
    u = torch.rand(rows, cols, generator=g, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def student_t5(rows: int, cols: int, g: torch.Generator) -> Tensor:
    chi2 = torch.randn(5, rows, cols, generator=g).square().sum(0)
    return torch.randn(rows, cols, generator=g) / (chi2 / 5).sqrt()


DENSITIES = {  # up to a factor
    "normal": (normal, lambda x: np.exp(-x * x / 2)),
    "laplace": (laplace, lambda x: np.exp(-x)),
    "student_t5": (student_t5, lambda x: (1 + x * x / 5) ** -3),
}


def expected_power(
    spec: oracle.Spec, amax: float, count: int, density, tensor_amax: float
) -> tuple[float, float]:
    """(signal, noise) of `count` values of which the largest is amax: the others lie below it with
    this density."""
    if spec.scale == "fp32":
        enc, decode = oracle.fp32_scale(amax, spec)
    elif spec.scale == "e8m0":
        decode = oracle.power_of_two(oracle.e8m0_code(amax, spec))
        enc = 1 / decode
    else:
        code, enc = oracle.two_level_scale(amax, oracle.tensor_factor(tensor_amax, spec), spec)
        decode = oracle.grid("e4m3")[code] * oracle.tensor_scale(tensor_amax, spec)
    x = np.append((np.arange(8192) + 0.5) / 8192 * amax, amax)
    error = oracle.value_of(oracle.cast(x * enc, spec.element), spec.element) * decode - x
    weight = density(x[:-1])
    weight = np.append((count - 1) * weight / weight.sum(), 1.0)
    return float((weight * x * x).sum()), float((weight * error * error).sum())


@pytest.mark.parametrize("distribution", sorted(DENSITIES))
@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_quality_is_that_of_the_element_grid(name: str, distribution: str):
    """Otherwise a scale or a cast loses accuracy that the format has.

    The expected noise integrates the distance to the element grid over the density, block amaxes
    given. The tolerance of 0.15 dB (3.5%) covers the sampling of 2^18 values, whose fourth moment
    is finite; one mantissa bit is 6 dB.
    """
    sample, density = DENSITIES[distribution]
    rows, cols = 512, 512
    x = sample(rows, cols, torch.Generator().manual_seed(5))
    spec = oracle.SPECS[name]
    outer, contraction = spec.block[0] or rows, spec.block[1] or cols
    blocks = (
        x.abs()
        .view(rows // outer, outer, cols // contraction, contraction)
        .amax((1, 3))
        .flatten()
        .sort()
        .values
    )
    chosen = blocks[
        len(blocks) // 2 % max(len(blocks) // 256, 1) :: max(len(blocks) // 256, 1)
    ].tolist()
    powers = [
        expected_power(spec, a, outer * contraction, density, blocks[-1].item()) for a in chosen
    ]
    signal, noise = (sum(p) for p in zip(*powers))
    error = QUANTIZED[name].storage(x, ROWWISE).decode().double() - x.double()
    got = 10 * math.log10(x.double().square().sum() / error.square().sum())
    assert got == pytest.approx(10 * math.log10(signal / noise), abs=0.15)


def test_quality_orders_the_formats():
    """Otherwise the choice of a scale rule or an element would not matter: rounding e8m0 down
    saturates, and costs."""
    x = normal(256, 512, torch.Generator().manual_seed(1))

    def db(name: str) -> float:
        error = QUANTIZED[name].storage(x, ROWWISE).decode() - x
        return float(10 * torch.log10(x.square().sum() / error.square().sum()))

    assert db("mxfp8") > db("mxfp8_floor") + 0.5
    assert db("mxfp8") > db("mxfp8_e5m2") + 5
    assert db("mxfp8_e5m2") > db("nvfp4") > db("nvfp4_16x16") + 0.5

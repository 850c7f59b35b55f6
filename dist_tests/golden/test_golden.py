# SPDX-License-Identifier: Apache-2.0
"""Codes and scales, byte for byte, against an independent oracle and against vectors derived by
hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_tests.golden import oracle
from dist_tests.laws import OTHER, QUANTIZERS, assert_same_bytes, values
from fsdp_quant.formats import (
    COLUMNWISE,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FORMATS,
    ROWWISE,
    Direction,
    Encoding,
    format_of,
)
from fsdp_quant.ops import dispatch, rng
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage

QUANTIZED = {name: q for name, q in QUANTIZERS.items() if q.fmt.is_quantized}
QUANTIZED |= {f"{name}_rht": Quantizer(name, rotation=True) for name in ("nvfp4", "mxfp4")}
QUANTIZED["nvfp4_rht_exact"] = Quantizer(format_of("nvfp4", scale_rule="fp8_exact"), rotation=True)
KEY = {
    "seed": (0x12345678 << 32) + 0x9ABCDEF0,
    "step": 3,
    "tensor_id": 0xDEADBEEF,
    "micro_batch": 2,
    "row0": 5,
}
SHAPES = [
    (1, 1),
    (1, 96),
    (7, 33),
    (15, 17),
    (17, 15),
    (31, 7),
    (33, 31),
    (33, 1),
    (96, 1),
    (96, 96),
    (7, 130),
    (160, 48),
    (0, 16),
]
FLT_MAX = oracle.FLT_MAX

each_quantizer = pytest.mark.parametrize("name", sorted(QUANTIZED))
each_direction = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)


def key_tensor(key: dict[str, int] = KEY) -> Tensor:
    return torch.tensor([key[field] for field in rng.KEY_FIELDS])


def oracle_of(x: Tensor, name: str, direction: Direction, **changes) -> oracle.Made:
    spec = replace(oracle.SPECS[name], **changes)
    return oracle.quantize(x.float().numpy(), spec, direction is COLUMNWISE, KEY)


def assert_same_numbers(got: Tensor, want: Tensor, what: str) -> None:
    """Same bits, whatever the payload of a NaN."""
    assert_same_bytes(got.isnan(), want.isnan(), f"{what} is NaN")
    assert_same_bytes(got.masked_fill(got.isnan(), 0), want.masked_fill(want.isnan(), 0), what)


def assert_storage_equals(got: Storage, want: oracle.Made, what: str) -> None:
    assert_same_bytes(got.data, torch.from_numpy(want.data), f"{what} codes")
    assert_same_bytes(got.scale, torch.from_numpy(want.scale), f"{what} scales")
    assert (got.tensor_amax is None) == (want.tensor_amax is None), what
    if want.tensor_amax is not None:
        tensor_amax = torch.tensor([want.tensor_amax], dtype=torch.float32)
        assert_same_numbers(got.tensor_amax, tensor_amax, f"{what} tensor amax")
    assert_same_numbers(got.decode(), torch.from_numpy(want.decoded), f"{what} decoded")


# The oracle and the library, law by law #


@each_direction
def test_gradients_of_any_recipe_in_e5m2_are_those_of_the_oracle(direction: Direction):
    """If false, `grad_element="e5m2"` scales or rounds gradients for another element."""
    for name in ("fp8_row", "fp8_1x128"):
        for x in (values(33, 130), values(33, 130, seed=1, dtype=torch.float32) * 2.0**40):
            got = Quantizer(format_of(name, element="e5m2")).storage(x, direction)
            assert_storage_equals(got, oracle_of(x, name, direction, element="e5m2"), name)


def test_oracle_covers_every_quantizer():
    """A row of the format table without an independent definition would go unchecked."""
    assert set(oracle.SPECS) == set(QUANTIZED)
    for name, spec in oracle.SPECS.items():
        fmt = QUANTIZED[name].fmt
        assert (
            spec.element,
            spec.block,
            spec.scale,
            spec.pow2,
            spec.floor,
            spec.rotated,
            spec.exact,
        ) == (
            fmt.element.name,
            fmt.block,
            fmt.scale,
            fmt.pow2,
            fmt.scale_rounding == "floor",
            fmt.rotated,
            fmt.scale_rule == "fp8_exact",
        ), name


@each_quantizer
@each_direction
@pytest.mark.parametrize("kind", ["gauss", "outliers", "tiny", "heavy"])
def test_quantize_equals_the_oracle(name: str, direction: Direction, kind: str):
    """Otherwise the bytes are not those of the definition, and no other implementation can read or
    check them."""
    for seed, shape in enumerate(SHAPES):
        if kind != "gauss" and seed % 2:
            continue
        x = values(*shape, seed=seed, kind=kind)
        got = QUANTIZED[name].storage(x, direction)
        assert_storage_equals(
            got, oracle_of(x, name, direction), f"{name} {direction.value} {shape} {kind}"
        )


@each_quantizer
@each_direction
def test_stochastic_quantize_equals_the_oracle(name: str, direction: Direction):
    """Otherwise random bits are not keyed as defined, and two backends or two world sizes round
    differently."""
    quantizer = replace(QUANTIZED[name], rounding="stochastic")
    for seed, shape in enumerate([(1, 1), (7, 33), (17, 15), (33, 31), (40, 96)]):
        x = values(*shape, seed=seed, kind="heavy")
        got = quantizer.storage(x, direction, key_tensor())
        assert_storage_equals(
            got, oracle_of(x, name, direction, stochastic=True), f"{name} {direction.value} {shape}"
        )


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_row_of_data_is_a_format(name: str):
    """If false, a format needs code of its own where its row says everything."""
    fmt = OTHER[name].fmt
    spec = oracle.Spec(fmt.element.name, fmt.block, fmt.scale, fmt.pow2)
    for (seed, shape), direction in itertools.product(
        enumerate([(1, 1), (33, 31), (70, 130)]), Direction
    ):
        for stochastic in (False, True):
            x = values(*shape, seed=seed, kind="heavy")
            got = replace(OTHER[name], rounding="stochastic" if stochastic else "nearest").storage(
                x, direction, key_tensor()
            )
            want = oracle.quantize(
                x.float().numpy(),
                replace(spec, stochastic=stochastic),
                direction is COLUMNWISE,
                KEY,
            )
            assert_storage_equals(got, want, f"{name} {direction.value} {shape} {stochastic}")


@each_quantizer
@pytest.mark.parametrize("shape", [(0, 16), (0, 33)])
def test_stochastic_quantize_of_zero_tokens_equals_the_oracle(name: str, shape: tuple[int, int]):
    """Otherwise an expert without tokens breaks a recipe with stochastic gradients."""
    quantizer = replace(QUANTIZED[name], rounding="stochastic")
    for direction in Direction:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        got = quantizer.storage(x, direction, key_tensor())
        assert_storage_equals(
            got, oracle_of(x, name, direction, stochastic=True), f"{name} {direction.value} {shape}"
        )


@each_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_quantize_of_other_dtypes_equals_the_oracle(name: str, dtype: torch.dtype):
    """Otherwise masters in fp32 pass through bf16 on the way to their codes."""
    x = values(33, 48, dtype=dtype, kind="heavy")
    for direction in Direction:
        got = QUANTIZED[name].storage(x, direction)
        assert_storage_equals(
            got, oracle_of(x, name, direction), f"{name} {direction.value} {dtype}"
        )


@pytest.mark.parametrize("name", [n for n, q in sorted(QUANTIZED.items()) if q.fmt.scale == "fp32"])
def test_eps_equals_the_oracle(name: str):
    """Otherwise an amax below eps still blows noise up to the full range, or one above it is
    changed."""
    x = values(40, 160, kind="gauss") * torch.logspace(-6, 0, 40)[:, None].bfloat16()
    for eps in (1e-3, 0.5, 10.0):
        quantizer = replace(QUANTIZED[name], eps=eps)
        for direction in Direction:
            got = quantizer.storage(x, direction)
            assert_storage_equals(
                got, oracle_of(x, name, direction, eps=eps), f"{name} {direction.value} eps={eps}"
            )


def test_identity_keeps_every_bit():
    """Otherwise the identity format is not high precision."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = values(7, 33, dtype=dtype)
        for direction in Direction:
            got = Quantizer("identity").storage(x, direction)
            assert_same_bytes(got.data, x, "codes")
            assert_same_bytes(got.dequantize(), x, "decoded")
            assert got.buffers().keys() == {"data"}


def test_columnwise_is_the_transpose_of_rowwise():
    """Otherwise the backward multiplies a weight quantized by another rule than the forward's."""
    for name, quantizer in QUANTIZED.items():
        for shape in [(1, 1), (7, 33), (33, 31), (96, 160)]:
            x = values(*shape, kind="heavy")
            col, row = quantizer.storage(x, COLUMNWISE), quantizer.storage(x.t(), ROWWISE)
            what = f"{name} {shape}"
            assert_same_bytes(unpacked(col), unpacked(row).t(), f"{what} codes")
            assert_same_bytes(col.scale, row.scale.t(), f"{what} scales")
            assert_same_bytes(col.decode(), row.decode().t(), f"{what} decoded")
            assert_same_bytes(col.dequantize(), row.dequantize().t(), f"{what} values")
            if row.tensor_amax is not None:
                assert_same_bytes(col.tensor_amax, row.tensor_amax, f"{what} tensor amax")


def unpacked(storage: Storage) -> Tensor:
    """One code a byte, [rows, cols]."""
    return torch.from_numpy(
        oracle.unpack(storage.data.numpy(), storage.fmt.element.bits, storage.padded_shape[1])
    )


def test_square_blocks_decode_alike_in_both_directions():
    """Otherwise one storage cannot serve the forward and the backward."""
    for name, quantizer in QUANTIZED.items():
        if quantizer.fmt.block[0] != quantizer.fmt.block[1]:
            assert not quantizer.fmt.shares_storage, name
            continue
        assert quantizer.fmt.shares_storage, name
        for shape in [(1, 1), (7, 33), (33, 31), (130, 160)]:
            x = values(*shape, kind="outliers")
            row, col = quantizer.storage(x, ROWWISE), quantizer.storage(x, COLUMNWISE)
            for buffer, want in row.buffers().items():
                assert_same_bytes(col.buffers()[buffer], want, f"{name} {shape} {buffer}")
            assert_same_bytes(
                row.as_direction(COLUMNWISE).dequantize(), col.dequantize(), f"{name} {shape}"
            )


# Elements #


def encoded_at_scale_one(x: Tensor, element: str) -> Tensor:
    """Codes of x [rows, cols] when the encode factor is exactly 1, one a byte."""
    bits, tensor_amax, enc = oracle.BITS[element], None, None
    if element == "e2m1":  # S = 2688 / 2688, t = 6 / 6
        encoding = Encoding(FORMATS["nvfp4"], ROWWISE)
        amax, tensor_amax = (
            torch.full((x.shape[0], -(-x.shape[1] // 16)), 6.0),
            torch.tensor([2688.0]),
        )
    elif bits == 6:
        encoding = Encoding(format_of("mxfp6", element=element), ROWWISE)
        amax = torch.full((x.shape[0], -(-x.shape[1] // 32)), oracle.MAX[element])
    else:
        encoding = Encoding(format_of("fp8_tensor", element=element), ROWWISE)
        amax, enc = torch.ones(1, 1), torch.ones(1)
    (made,) = dispatch.encode(
        x, [encoding], [dispatch.Statistics(amax, tensor_amax)], encode_scales=[enc]
    )
    return torch.from_numpy(oracle.unpack(made.data.numpy(), bits, x.shape[1]))


@pytest.mark.parametrize("element", sorted(oracle.MAX))
def test_cast_takes_the_nearest_grid_point(element: str):
    """Otherwise a tie, a subnormal, a NaN or an overflow is rounded by another rule: every bf16
    value is tried."""
    x = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).reshape(256, 256)
    assert_same_bytes(
        encoded_at_scale_one(x, element),
        torch.from_numpy(oracle.cast(x.double().numpy(), element)),
        element,
    )


@pytest.mark.parametrize("element", sorted(oracle.MAX))
def test_cast_rounds_ties_to_the_even_code(element: str):
    """Otherwise rounding has a bias: each midpoint goes to the even code, one ulp beside it to the
    nearer one."""
    points = oracle.grid(element)
    middle = torch.from_numpy((points[1:] + points[:-1]) / 2).float()
    inf = torch.full_like(middle, torch.inf)
    x = torch.stack([torch.nextafter(middle, -inf), middle, torch.nextafter(middle, inf)])
    low = torch.arange(len(points) - 1)
    want = torch.stack([low, low + low % 2, low + 1]).to(torch.uint8)
    cols = len(middle)
    assert_same_bytes(encoded_at_scale_one(x, element)[:, :cols], want, f"{element} positive")
    assert_same_bytes(
        encoded_at_scale_one(-x, element)[:, :cols],
        want | 2 ** (oracle.BITS[element] - 1),
        f"{element} negative",
    )


def test_elements_have_the_published_ranges():
    """Otherwise the oracle itself enumerates another element than the OCP and PTX documents."""
    for element, largest, normal, subnormal, count in (
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 127),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 124),
        (E2M1, 6.0, 1.0, 0.5, 8),
        (E3M2, 28.0, 0.25, 0.0625, 32),
        (E2M3, 7.5, 1.0, 0.125, 32),
    ):
        points = oracle.grid(element.name)
        assert (points[-1], points[1], len(points)) == (largest, subnormal, count)
        assert points[2**element.mantissa] == normal
        assert (element.max, 2.0**element.emin) == (largest, normal)
    assert list(oracle.grid("e2m1")) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e2m1_ties():
    """Otherwise 4-bit rounding is not to the even code."""
    x = torch.tensor(
        [
            [
                0.25,
                0.75,
                1.25,
                1.75,
                2.5,
                3.5,
                5.0,
                5.5,
                7.0,
                -0.25,
                -0.75,
                -5.0,
                -0.0,
                0.0,
                0.26,
                4.99,
            ]
        ]
    )
    want = [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 10, 14, 8, 0, 1, 6]
    assert encoded_at_scale_one(x, "e2m1").tolist() == [want]


# Scales by hand #

E8M0_UP = [  # (amax, code): the smallest power of two not below amax / 448
    (0.0, 0),
    (2.0**-149, 0),
    (1e-40, 0),
    (2.0**-126, 0),
    (1.3e-36, 0),
    (448 * 2.0**-127, 0),
    (448 * 2.0**-126, 1),
    (448 * 2.0**-125, 2),
    (448 * 2.0**-3, 124),
    (1.0, 119),
    (448.0, 127),
    (896.0, 128),
    (449.0, 128),
    (447.0, 127),
    (256.0, 127),
    (224.0, 126),
    (225.0, 127),
    (448 * 2.0**119, 246),
    (FLT_MAX, 247),
    (float("inf"), 254),
    (float("nan"), 255),
]
E8M0_FLOOR = [  # (amax, code): 2^(floor(log2 amax) - 8)
    (0.0, 0),
    (2.0**-149, 0),
    (1.3e-36, 0),
    (2.0**-119, 0),
    (2.0**-118, 1),
    (2.0**-117, 2),
    (1.0, 119),
    (1.99, 119),
    (255.0, 126),
    (256.0, 127),
    (448.0, 127),
    (511.0, 127),
    (512.0, 128),
    (FLT_MAX, 246),
    (float("inf"), 254),
    (float("nan"), 255),
]


def in_blocks(amaxes: list[float], width: int = 32) -> Tensor:
    """fp32 [len, width]: row i holds amaxes[i], with the sign alternating and smaller values beside
    it."""
    x = torch.zeros(len(amaxes), width)
    x[:, 5] = torch.tensor(amaxes)
    x[1::2] *= -1
    x[:, 20] = torch.where(x[:, 5].isfinite(), x[:, 5] / 3, 1.0)
    return x


@pytest.mark.parametrize("name,table", [("mxfp8", E8M0_UP), ("mxfp8_floor", E8M0_FLOOR)])
def test_e8m0_codes_by_hand(name: str, table: list):
    """Otherwise zero, subnormal, exact and non-finite amaxes get scales that saturate or flush the
    block."""
    amaxes, codes = zip(*table)
    got = QUANTIZED[name].storage(in_blocks(list(amaxes)), ROWWISE)
    assert dict(zip(amaxes, got.scale.flatten().tolist())) == dict(zip(amaxes, codes))
    assert_storage_equals(got, oracle_of(in_blocks(list(amaxes)), name, ROWWISE), name)


@pytest.mark.parametrize("k", [-125, -120, -100, -9, -1, 0, 1, 9, 100, 119])
def test_e8m0_one_ulp_around_448(k: int):
    """amax = 448 * 2^k is the largest block of exponent k; an ulp more needs k + 1, or the maximum
    saturates."""
    exact = torch.tensor(448.0 * 2.0**k)
    around = [
        torch.nextafter(exact, torch.tensor(0.0)),
        exact,
        torch.nextafter(exact, torch.tensor(torch.inf)),
    ]
    x = torch.zeros(3, 32)
    x[:, 0] = torch.stack(around)
    got = QUANTIZED["mxfp8"].storage(x, ROWWISE)
    assert got.scale.flatten().tolist() == [127 + k, 127 + k, 128 + k]
    # 448, 448, 224 on the grid of the exponent
    assert got.data[:, 0].tolist() == [0x7E, 0x7E, 0x76]
    floor = QUANTIZED["mxfp8_floor"].storage(x, ROWWISE)
    assert floor.scale.flatten().tolist() == [127 + k] * 3


def test_e8m0_codes_decode_to_powers_of_two():
    """Codes 0, 1, 254 and 255 are 2^-127, 2^-126, 2^127 and NaN; the first is a subnormal fp32
    number."""
    storage = Quantizer("mxfp8").storage(torch.ones(5, 32), ROWWISE)
    ones = torch.full_like(storage.data, 0x38)  # e4m3 1.0
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)[:, None]
    decoded = storage.with_buffers({"data": ones, "scale": codes}).decode()[:, 0]
    assert decoded[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert decoded[4].isnan()


def test_rounding_up_never_saturates_a_finite_block():
    """Otherwise the largest value of a block, which carries most of a product, is cut."""
    amaxes = torch.logspace(-37, 38.5, 4000, dtype=torch.float64).float()
    x = torch.zeros(4000, 32)
    x[:, 0] = amaxes
    got = QUANTIZED["mxfp8"].storage(x, ROWWISE)
    scale = torch.exp2(got.scale.flatten().double() - 127)
    ratio = amaxes.double() / scale
    # One ulp above 448 * 2^-127, where v is a subnormal with fewer bits, still gives code 0; it
    # rounds to 448.
    assert ratio.max() <= 448 * (1 + 2**-22)
    assert ratio[got.scale.flatten() > 0].min() > 224 * (1 - 2**-22)
    floor = QUANTIZED["mxfp8_floor"].storage(x, ROWWISE)
    assert (amaxes.double() / torch.exp2(floor.scale.flatten().double() - 127)).max() > 500


FP8_BY_HAND = [  # (amax, fp32 scale and code of the maximum, power-of-two scale and code) in e4m3
    (0.0, 1.0, 0x00, 1.0, 0x00),
    (448.0, 1.0, 0x7E, 1.0, 0x7E),
    (896.0, 2.0, 0x7E, 2.0, 0x7E),
    (1.75, 2.0**-8, 0x7E, 2.0**-8, 0x7E),
    (3.5 * 2.0**-20, 2.0**-27, 0x7E, 2.0**-27, 0x7E),
    (
        512.0,
        float(np.float32(1) / np.float32(0.875)),
        0x7E,
        2.0,
        0x78,
    ),  # enc 0.875, cleared to 0.5: 256
    (1.0, float(np.float32(1) / np.float32(448)), 0x7E, 2.0**-8, 0x78),
]


def test_fp8_scales_by_hand():
    """Otherwise an fp32 scale is not 1 / (448 / amax), or a power-of-two scale rounds the wrong
    way."""
    for amax, plain, plain_code, pow2, pow2_code in FP8_BY_HAND:
        x = torch.tensor([[amax, -amax / 2, 0.0]])
        for name in ("fp8_tensor", "fp8_row", "fp8_1x128_fp32", "fp8_128x128_fp32"):
            got = QUANTIZED[name].storage(x, ROWWISE)
            assert (got.scale.item(), got.data[0, 0].item()) == (plain, plain_code), (name, amax)
        for name in ("fp8_tensor_pow2", "fp8_row_pow2", "fp8_1x128", "fp8_128x128"):
            got = QUANTIZED[name].storage(x, ROWWISE)
            assert (got.scale.item(), got.data[0, 0].item()) == (pow2, pow2_code), (name, amax)


def test_encode_factor_is_one_division():
    """enc = max /rn amax. A reciprocal times max is off by an ulp for every third amax, and so are
    codes and scales."""
    amaxes = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    got = Quantizer("fp8_row").storage(amaxes[:, None], ROWWISE).scale.flatten()
    want = torch.from_numpy(np.float32(1) / (np.float32(448) / amaxes.numpy()))
    assert_same_bytes(got, want, "scales")


def test_tensor_factor_is_one_division():
    """S = 2688 /rn A and D = 1 /rn S: an ulp moves every block scale and the decoded tensor."""
    for amax in (torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5).tolist():
        x = torch.zeros(1, 16)
        x[0, 3] = amax
        got = Quantizer("nvfp4").storage(x, ROWWISE)
        d = np.float32(1) / (np.float32(2688) / np.float32(amax))
        assert got.decode()[0, 3].item() == np.float32(6 * 448) * d, amax


def test_fp8_extreme_amaxes():
    """Subnormal amaxes: enc stops at FLT_MAX, and pow2 at 2^127; FLT_MAX itself has a normal
    scale."""
    for amax in (2.0**-149, 1e-40, 1.3e-36, FLT_MAX):
        x = torch.tensor([[amax, -amax]])
        for name in (
            "fp8_tensor",
            "fp8_tensor_pow2",
            "fp8_tensor_e5m2",
            "fp8_row",
            "fp8_1x128_fp32",
        ):
            got = QUANTIZED[name].storage(x, ROWWISE)
            assert_storage_equals(got, oracle_of(x, name, ROWWISE), f"{name} {amax}")
            assert got.scale.isfinite().all() and (got.scale > 0).all(), (name, amax)
    tiny = QUANTIZED["fp8_tensor"].storage(torch.tensor([[1e-40]]), ROWWISE)
    assert tiny.scale.item() == float(np.float32(1) / np.float32(FLT_MAX))
    assert (
        QUANTIZED["fp8_tensor_pow2"].storage(torch.tensor([[1e-40]]), ROWWISE).scale.item()
        == 2.0**-127
    )


def test_nvfp4_blocks_that_underflow():
    """A block 2^-10 below the tensor's largest scale has scale 0: nonzero elements keep their sign,
    and decode to 0."""
    x = torch.zeros(4, 16)
    x[0, 0] = 2688.0  # S = D = 1, so that t = amax / 6
    x[1, 0], x[1, 1] = 6 * 2.0**-10, -1e-9  # a tie between 0 and 2^-9: even, 0
    x[2, 0] = 6 * 2.0**-10 * 1.001
    got = Quantizer("nvfp4").storage(x, ROWWISE)
    assert got.scale.flatten().tolist() == [0x7E, 0x00, 0x01, 0x00]
    assert unpacked(got)[1, :3].tolist() == [0x7, 0xF, 0x0]
    assert got.decode()[1].abs().max() == 0
    assert unpacked(got)[2, 0] == 5  # 6.006 * 2^-10 over 2^-9 is 3.003: 3.0, whose code is 5
    assert_storage_equals(got, oracle_of(x, "nvfp4", ROWWISE), "nvfp4")
    up = replace(Quantizer("nvfp4"), rounding="stochastic").storage(x, ROWWISE, key_tensor())
    # never 0 for a block that is not
    assert up.scale.flatten().tolist() == [0x7E, 0x01, 0x01, 0x00]


@each_quantizer
@each_direction
def test_zero_blocks_have_zero_codes(name: str, direction: Direction):
    """Otherwise an all-zero gradient is divided by zero."""
    x = torch.zeros(33, 48)
    x[:, 40:] = 1.0
    for case in (torch.zeros(33, 48), x):
        for rounding in ("nearest", "stochastic"):
            got = replace(QUANTIZED[name], rounding=rounding).storage(case, direction, key_tensor())
            want = oracle_of(case, name, direction, stochastic=rounding == "stochastic")
            assert_storage_equals(got, want, f"{name} {direction.value} {rounding}")
            assert got.dequantize()[:, :16].abs().max() == 0


# Non-finite values #

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
PLACES = [(0, 0), (16, 20), (39, 0), (32, 47)]


@each_quantizer
@each_direction
@pytest.mark.parametrize("bad", sorted(BAD))
def test_non_finite_values_equal_the_oracle(name: str, direction: Direction, bad: str):
    """Otherwise an overflow has one outcome in the middle of a tensor and another at its edge or on
    another backend."""
    for place in PLACES:
        x = values(40, 48)
        x[place] = BAD[bad]
        got = QUANTIZED[name].storage(x, direction)
        assert_storage_equals(
            got, oracle_of(x, name, direction), f"{name} {direction.value} {bad} at {place}"
        )
        assert not got.dequantize(torch.float32)[place].isfinite(), "an overflow was hidden"
    got = replace(QUANTIZED[name], rounding="stochastic").storage(x, direction, key_tensor())
    assert_storage_equals(
        got, oracle_of(x, name, direction, stochastic=True), f"{name} stochastic {bad} at {place}"
    )


@pytest.mark.parametrize(
    "name", sorted(n for n, q in QUANTIZED.items() if not (q.fmt.tensor_scale or q.fmt.rotated))
)
@each_direction
def test_non_finite_values_stay_in_their_block(name: str, direction: Direction):
    """Otherwise one bad token spoils values that share no scale with it; the documented outcome is
    NaN in its block (e8m0 scales: an infinite element saturates under the largest scale, and the
    block's small values flush to 0)."""
    fmt = QUANTIZED[name].fmt
    rows, cols = 160, 144
    b0, b1 = (b or n for b, n in zip(fmt.dims(direction), (rows, cols)))
    clean = values(rows, cols)
    for bad, value in BAD.items():
        for place in [(0, 0), (130, 40), (rows - 1, cols - 1)]:
            x = clean.clone()
            x[place] = value
            inside = torch.zeros(rows, cols, dtype=torch.bool)
            r, c = place[0] // b0 * b0, place[1] // b1 * b1
            inside[r : r + b0, c : c + b1] = True
            got = QUANTIZED[name].storage(x, direction).decode()
            want = QUANTIZED[name].storage(clean, direction).decode()
            assert_same_bytes(got[~inside], want[~inside], f"{name} {bad} at {place}, other blocks")
            if fmt.scale == "fp32" or bad == "nan":
                assert got[inside].isnan().all(), f"{name} {bad} at {place}"
            else:
                assert got[place] == value and not got.isnan().any(), f"{name} {bad} at {place}"


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_exact", "nvfp4_16x16_exact"])
@each_direction
def test_non_finite_values_make_a_two_level_tensor_nan(name: str, direction: Direction):
    """The tensor's scale comes from every value: an overflow anywhere is visible everywhere, never
    a number."""
    for bad, value in BAD.items():
        for place in PLACES:
            x = values(40, 48)
            x[place] = value
            got = QUANTIZED[name].storage(x, direction)
            assert got.decode().isnan().all(), f"{name} {bad} at {place}"
            b0, b1 = got.fmt.dims(direction)
            block = got.scale[place[0] // b0, place[1] // b1]
            largest = 0x7C if got.fmt.scale_rule == "fp8_exact" else 0x7E  # 384, 448
            assert block == (0x7F if bad == "nan" else largest), f"{name} {bad} at {place}"


def test_nan_codes_are_canonical():
    """Otherwise the sign of a NaN, which platforms choose differently, makes bytes differ."""
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    x.view(torch.uint16)[0, 3], x.view(torch.uint16)[1, 3] = 0x7FC0, 0xFFC1
    codes = {
        "fp8_row": 0x7F,
        "fp8_tensor_e5m2": 0x7F,
        "mxfp8": 0x7F,
        "mxfp8_e5m2": 0x7F,
        "nvfp4": 7,
    }
    for name, nan in codes.items():
        for rounding in ("nearest", "stochastic"):
            got = replace(QUANTIZED[name], rounding=rounding).storage(x, ROWWISE, key_tensor())
            assert unpacked(got)[:, 3].tolist() == [nan, nan], (name, rounding)


# Random bits and rotation #

PHILOX = [  # published known answers: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter,key,want", PHILOX)
def test_philox_known_answers(counter, key, want):
    """Otherwise the generator is not Philox4x32-10, and its statistical quality is unknown."""
    assert oracle.philox(counter, key) == want
    got = rng.philox4x32(
        tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    )
    assert tuple(int(g) for g in got) == want


@each_direction
def test_random_bytes_equal_the_oracle(direction: Direction):
    """Otherwise the counter is laid out differently; row0 may start anywhere in a block of 16."""
    for row0, col0 in ((0, 0), (1, 0), (15, 16), (16, 4096), (37, 0), (2**31 + 5, 2**20)):
        key = {**KEY, "row0": row0 + (col0 << 40)}
        rows, cols = range(row0, row0 + 23), range(col0, col0 + 37)
        if direction is ROWWISE:
            want = oracle.random_bytes(rows, cols, key, False)
        else:
            want = oracle.random_bytes(cols, rows, key, True).T
        got = rng.random_bytes((23, 37), direction, key_tensor(key))
        assert_same_bytes(
            got, torch.from_numpy(want.copy()), f"{direction.value} row0={row0} col0={col0}"
        )


@each_direction
def test_rotation_equals_the_oracle(direction: Direction):
    """Otherwise the two wgrad operands of two backends are turned differently, and the rotation
    does not cancel."""
    quantizer = Quantizer("nvfp4", rotation=True)
    for shape in [(1, 1), (15, 33), (33, 15), (48, 64)]:
        for kind in ("gauss", "outliers", "heavy"):
            x = values(*shape, kind=kind)
            got = dispatch.reference.prepared(x, quantizer.encoding(direction)).float()
            operand = x.double().numpy() if direction is ROWWISE else x.double().numpy().T
            want = oracle.rotate(operand).astype(np.float32)
            want = want if direction is ROWWISE else want.T
            assert_same_bytes(
                got, torch.from_numpy(want.copy()), f"{direction.value} {shape} {kind}"
            )

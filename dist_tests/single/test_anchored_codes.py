# SPDX-License-Identifier: Apache-2.0
"""Codes that exist, against one exponent for each line, run or tensor: what they change, and what
they leave."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dist_tests import laws
from fsdp_quant.formats import (
    COLUMNWISE,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    ROWWISE,
    Direction,
    Encoding,
    Format,
    format_of,
)
from fsdp_quant.ops import anchoring, dispatch, reference
from fsdp_quant.ops.layout import ANCHOR_RUNS, ANCHORED_512, ANCHORED_TILE, ANCHORS, pack
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage

BF16 = torch.bfloat16
FORMATS = [
    format_of(name, element=element)
    for name in ("mxfp8", "mxfp8_32x32")
    for element in ("e4m3", "e5m2")
]
SMALL = [format_of("mxfp4"), format_of("mxfp6"), format_of("mxfp6", element="e3m2")]
CASES = [
    pytest.param(f, d, id=f"{f.name} {f.element.name} {d}")
    for f in FORMATS + SMALL
    for d in Direction
]
OF_8_BITS = CASES[: 2 * len(FORMATS)]
# (smallest normal element, distance of those below it)
SUBNORMAL = {"e4m3": (2.0**-6, 2.0**-9), "e5m2": (2.0**-14, 2.0**-16)}


def encoded(x: Tensor, fmt: Format, direction: Direction) -> tuple[Tensor, Tensor]:
    """Codes and e8m0 scales of x."""
    e = Encoding(fmt, direction)
    return reference.encode(x, *reference.statistics(x, e), e)


def decoded(codes: Tensor, lines: Tensor, fmt: Format, direction: Direction) -> Tensor:
    """What the result stands for, fp64 [rows, cols]."""
    along = lines.double().unsqueeze(direction.contraction_dim)
    return codes.view(fmt.element.operand.dtype).double() * along


def wide(rows: int, cols: int) -> Tensor:
    """Blocks up to 2^40 apart in both directions."""
    g = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-20, 21, (-(-rows // 16), -(-cols // 16)), generator=g)
    exponents = exponents.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :cols]
    return (laws.values(rows, cols, seed=cols).double() * 2.0**exponents).to(BF16)


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_only_elements_far_below_their_line_change(fmt: Format, direction: Direction):
    """If false, a product against one exponent loses more than the elements that the guard
    counts."""
    normal, step = SUBNORMAL[fmt.element.operand.name]
    for shape in ((1, 32), (33, 47), (129, 257)):
        for x in (
            *(laws.values(*shape, kind=kind) for kind in ("gauss", "outliers", "heavy")),
            wide(*shape),
        ):
            data, scale = encoded(x, fmt, direction)
            codes, lines = anchoring.anchored_codes(data, scale, fmt, direction, cols=shape[1])
            dim = direction.contraction_dim
            assert (
                codes.shape == shape
                and lines.shape == (shape[1 - dim],)
                and lines.dtype is torch.float32
            )
            want = reference.decode(data, scale, None, fmt, direction, shape[1]).double()
            got, unit = decoded(codes, lines, fmt, direction), lines.double().unsqueeze(dim)
            small = want.abs() < normal * unit
            assert torch.equal(got[~small], want[~small]), (
                f"{shape}: an element that stays normal changed"
            )
            assert bool(((got - want).abs() <= step / 2 * unit).all()), (
                f"{shape}: {(got - want).abs().max()}"
            )


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_scales_are_the_largest_of_their_line(fmt: Format, direction: Direction):
    """If false, the largest block of a line saturates, or bits are lost for nothing: it fills the
    operand's range."""
    data, scale = encoded(wide(129, 257), fmt, direction)
    codes, lines = anchoring.anchored_codes(data, scale, fmt, direction, cols=257)
    most = fmt.element.operand.max / (fmt.element.max * 2.0**fmt.element.operand_shift)
    assert (
        1 <= most < 2
        and codes.view(fmt.element.operand.dtype).float().abs().max()
        <= fmt.element.operand.max / most
    )
    dim = direction.contraction_dim
    blocks = reference.decode_scale(scale, fmt).repeat_interleave(fmt.block[0], 1 - dim)
    assert torch.equal(
        lines, blocks.narrow(1 - dim, 0, lines.shape[0]).amax(dim) * 2.0**-fmt.element.operand_shift
    )


@pytest.mark.parametrize(("fmt", "direction"), OF_8_BITS)
def test_lines_of_one_exponent_keep_their_codes(fmt: Format, direction: Direction):
    """If false, lines that differ by powers of two alone, as after a rescaling, are rounded
    again."""
    dim, g = direction.contraction_dim, torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (128, 256), generator=g, dtype=torch.uint8)
    data[~reference.decode_codes(data, fmt, 256).isfinite()] = 0
    grid = fmt.scale_shape((128, 256), direction)
    scale = torch.randint(
        0, 255, (grid[0], 1) if dim else (1, grid[1]), generator=g, dtype=torch.uint8
    ).expand(grid)
    codes, lines = anchoring.anchored_codes(data, scale.contiguous(), fmt, direction)
    laws.assert_same_bytes(codes, data, "codes")
    want = reference.power_of_two(scale.select(dim, 0)).repeat_interleave(fmt.block[0])
    laws.assert_same_bytes(lines, want, "scales")


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_every_code_at_every_distance_is_rounded_once(fmt: Format, direction: Direction):
    """If false, some code is not the nearest element to its value, or a NaN becomes a number."""
    dim = direction.contraction_dim
    for distance in (0, 1, 5, 9, 14, 15, 17, 24, 31, 32, 33, 60, 254):
        codes = torch.zeros(32, 288, dtype=torch.uint8)
        codes[:, 32:] = torch.arange(256) % 2**fmt.bits
        scale = torch.full((32 // fmt.block[0], 9), 254 - distance, dtype=torch.uint8)
        scale[:, 0] = 254
        if dim == 0:
            codes, scale = codes.t(), scale.t().contiguous()
        data, cols, element = (
            pack(codes, fmt.bits).contiguous(),
            codes.shape[1],
            fmt.element.operand,
        )
        codes, _ = anchoring.anchored_codes(data, scale, fmt, direction, cols=cols)
        exact = reference.decode_codes(data, fmt, cols).double() * 2.0 ** (
            fmt.element.operand_shift - distance
        )
        rounded = exact.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
        want = torch.where(exact.isnan(), 0x7F, rounded)
        laws.assert_same_bytes(codes, want, f"2^-{distance}")


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_zero_lines_are_zero(fmt: Format, direction: Direction):
    """If false, a row of padding, or of a token that nobody routed here, becomes NaN."""
    x = laws.values(96, 96)
    (x.t() if direction is COLUMNWISE else x)[32:64] = 0
    data, scale = encoded(x, fmt, direction)
    codes, lines = anchoring.anchored_codes(data, scale, fmt, direction, cols=96)
    got = decoded(codes, lines, fmt, direction)
    assert bool(((got.t() if direction is COLUMNWISE else got)[32:64] == 0).all())
    assert bool((lines[32:64] == 2.0**-127).all()) and bool(got.isfinite().all())


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_a_nan_block_makes_its_line_nan(fmt: Format, direction: Direction):
    """If false, an overflow is hidden by the scale of its neighbours."""
    x = laws.values(96, 160)
    (x.t() if direction is COLUMNWISE else x)[40, 50] = math.nan
    data, scale = encoded(x, fmt, direction)
    codes, lines = anchoring.anchored_codes(data, scale, fmt, direction, cols=160)
    poisoned = torch.zeros_like(lines, dtype=torch.bool)
    poisoned[slice(32, 64) if fmt.block[0] == 32 else slice(40, 41)] = True
    assert torch.equal(lines.isnan(), poisoned)
    dim = direction.contraction_dim
    assert torch.equal(
        decoded(codes, lines, fmt, direction).isnan(), poisoned.unsqueeze(dim).expand(codes.shape)
    )


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_empty_tensors_have_empty_codes(fmt: Format, direction: Direction):
    """If false, a rank without rows of a parameter fails where others go on."""
    for shape in ((0, 64), (64, 0), (0, 0)):
        data = torch.empty(shape[0], fmt.row_bytes(shape[1], BF16), dtype=torch.uint8)
        scale = torch.empty(fmt.scale_shape(shape, direction), dtype=torch.uint8)
        codes, lines = anchoring.anchored_codes(data, scale, fmt, direction, cols=shape[1])
        assert codes.shape == shape and lines.shape == (shape[1 - direction.contraction_dim],)
        assert bool((lines == 2.0**-127).all())


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_runs_are_lines_of_their_own(fmt: Format, direction: Direction):
    """If false, a wgrad of codes that were gathered is anchored otherwise than one of values, or to
    another run's exponent."""
    lines, length = 72, 1100
    x = wide(length, lines) if direction is COLUMNWISE else wide(lines, length)
    e = Encoding(fmt, direction)
    compact = Storage.of(dispatch.encode(x, [e], None)[0], e, x.shape, x.dtype)
    made, dim = compact.to_gemm_operand(ANCHORED_512), direction.contraction_dim
    assert (
        made.data.shape == (lines, length)
        and made.scale.shape == (3, lines)
        and made.layout == ANCHORED_512
    )
    for i, start in enumerate(range(0, length, 512)):
        size, block = min(512, length - start), fmt.block[1]
        of_run = Storage.of(
            dispatch.encode(x.narrow(dim, start, size), [e], None)[0],
            e,
            x.narrow(dim, start, size).shape,
            x.dtype,
        )
        scale = compact.scale.narrow(dim, start // block, -(-size // block))
        assert torch.equal(of_run.scale, scale)
        codes, scales = anchoring.anchored_codes(
            of_run.data, scale, fmt, direction, cols=of_run.shape[1]
        )
        codes = codes if dim else codes.t().contiguous()
        laws.assert_same_bytes(
            made.data[:, start : start + size].contiguous(), codes, f"codes of run {i}"
        )
        laws.assert_same_bytes(made.scale[i].contiguous(), scales, f"scales of run {i}")


@pytest.mark.parametrize(("fmt", "direction"), CASES)
def test_tiles_are_tensors_of_their_own(fmt: Format, direction: Direction):
    """If false, a weight of an expert is anchored to another tile's exponent, or its scales lie
    where no product reads them."""
    lines, length = 328, 720
    x = wide(length, lines) if direction is COLUMNWISE else wide(lines, length)
    e = Encoding(fmt, direction)
    compact = Storage.of(dispatch.encode(x, [e], None)[0], e, x.shape, x.dtype)
    made = compact.to_gemm_operand(ANCHORED_TILE)
    assert made.data.shape == (lines, length) and made.scale.shape == (3, 8)
    assert not made.scale[:, 6:].any()
    for row in range(0, x.shape[0], 128):
        for col in range(0, x.shape[1], 128):
            tile = x[row : row + 128, col : col + 128].contiguous()
            (of_tile,) = dispatch.encode(tile, [e], None)
            codes, scale = anchoring.anchored_codes(
                of_tile.data, of_tile.scale, fmt, direction, whole=True, cols=tile.shape[1]
            )
            codes, at = (codes, (row, col)) if direction is ROWWISE else (codes.t(), (col, row))
            there = made.data[at[0] : at[0] + 128, at[1] : at[1] + 128]
            laws.assert_same_bytes(there.contiguous(), codes.contiguous(), f"codes from {at}")
            assert made.scale[at[0] // 128, at[1] // 128] == scale, at


def test_every_number_of_a_small_element_is_one_of_its_operand():
    """If false, products of 8 bits round what was quantized, or saturate it."""
    for element in (E2M1, E2M3, E3M2):
        numbers = torch.tensor(reference._values(element))
        for power in (element.operand_shift, 0, element.mantissa - element.emin - 9):
            scaled = numbers * 2.0**power
            assert torch.equal(scaled.to(E4M3.dtype).float(), scaled), (element, power)
        assert (
            element.operand == E4M3 and element.max * 2.0 ** (element.operand_shift + 1) > E4M3.max
        )


@pytest.mark.parametrize("wanted", ANCHORS)
@pytest.mark.parametrize("fmt", SMALL, ids=repr)
def test_small_codes_are_anchored_without_a_loss(fmt: Format, wanted: str):
    """If false, mxfp4 and mxfp6 are other formats where tensor cores multiply them, or scales
    behind the last line are read."""
    for rotation in (False, True)[: 2 if fmt.bits == 4 else 1]:
        for direction in Direction:
            made = Quantizer(fmt, rotation=rotation).storage(laws.values(530, 70), direction)
            operand = made.to_gemm_operand(wanted)
            assert (
                torch.equal(operand.decode(), made.decode())
                and operand.operand_format.element == E4M3
            )
            operand.check()
            if ANCHOR_RUNS.get(wanted):
                rows, cols = made.padded_shape
                lines = rows if direction is ROWWISE else cols
                assert (
                    not operand.scale[:, lines:].any()
                    and operand.scale.shape[1] == lines + -lines % 4
                )

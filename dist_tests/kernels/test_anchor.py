# SPDX-License-Identifier: Apache-2.0
"""Codes against one exponent per line, run or tensor, and counts that are given, on the GPU: the
bytes of the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dist_tests import product_error
from dist_tests.kernels import expected
from dist_tests.kernels.expected import MADE, encoded, inputs
from fsdp_quant.formats import (
    COLUMNWISE,
    ROWWISE,
    Direction,
    Encoding,
    Format,
    format_of,
)
from fsdp_quant.formats import ELEMENTS as ELEMENT_OF
from fsdp_quant.ops import anchoring, native
from fsdp_quant.ops.dispatch import Encoded
from fsdp_quant.ops.layout import pack
from fsdp_quant.ops.product_error import PROBED_STEPS, SETTLED_STEPS, is_probed

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

on_cuda = pytest.mark.skipif(expected.DEVICE.type != "cuda", reason="needs two kinds of device")
SHAPES = ((1, 32), (33, 47), (128, 128), (200, 328), (129, 257), (512, 640))
KINDS = ("gauss", "outliers", "wide range", "nan", "inf", "zeros")
NAMES = ("mxfp8", "mxfp8_32x32")
ELEMENTS = ("e4m3", "e5m2")
SMALL = [
    pytest.param(format_of(n, element=e), id=f"{n} {e}")
    for n, e in (("mxfp4", "e2m1"), ("mxfp6", "e2m3"), ("mxfp6", "e3m2"))
]
FORMATS = [
    pytest.param(format_of(n, element=e), id=f"{n} {e}") for n in NAMES for e in ELEMENTS
] + SMALL


def runs_of(fmt: Format) -> tuple[int, ...]:
    every = native.OF_TENSOR, native.OF_TILE, 0, 128, 512
    return (native.OF_TENSOR,) if fmt.pow2 else every


def assert_anchors(
    data: Tensor,
    scale: Tensor,
    fmt: Format,
    direction: Direction,
    what: str,
    cols: int | None = None,
) -> None:
    """Codes and scales of both orders are the reference's; the bits of a NaN too. cols: None: as
    many as bytes in a row hold."""
    cols = cols or data.shape[1] * 8 // fmt.bits
    for transposed, run in itertools.product((False, True), runs_of(fmt)):
        of = run == native.OF_TENSOR, cols, run if run > 0 else None, run == native.OF_TILE
        want, want_scale = anchoring.anchored_codes(data, scale, fmt, direction, *of)
        codes, lines = native.anchor_codes(data, scale, None, cols, fmt, direction, transposed, run)
        text = f"{what}, {direction} {fmt}, transposed {transposed}, run {run}"
        expected.assert_same(lines, want_scale, f"{text}: scale")
        expected.assert_same(codes, want.t().contiguous() if transposed else want, f"{text}: codes")


def assert_group_anchors(
    of: list[tuple[Tensor, Tensor, int]], fmt: Format, direction: Direction
) -> None:
    """One call for all gives what a call each gives, also when it is made again of other codes. of:
    codes, scales, columns."""
    data, scale, cols = map(list, zip(*of))
    for transposed, run in itertools.product((False, True), runs_of(fmt)):
        calls: list[native.RecordedLaunch] = []
        made = native.multi_tensor_anchor(
            data, scale, [None] * len(data), cols, fmt, direction, transposed, run, calls
        )
        for again in (False, True):
            if again:
                for t in data:
                    t.copy_(t.roll(1, 0))
                for t in calls[0].out:
                    t.fill_(7)
                calls[0]()
            for (codes, lines), one, n in zip(made, zip(data, scale), cols):
                want, want_lines = native.anchor_codes(
                    *one, None, n, fmt, direction, transposed, run
                )
                text = f"{direction} {fmt}, transposed {transposed}, again {again}"
                expected.assert_same(codes, want, f"{text}: codes")
                expected.assert_same(lines, want_lines, f"{text}: scale")


def random_bytes(shape: tuple[int, int], low: int = 0, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, 256, shape, generator=g, dtype=torch.uint8).to(expected.DEVICE)


def random_codes(fmt: Format, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Packed; those that fill the last container are zero."""
    codes = random_bytes(shape, seed=seed) >> (8 - fmt.bits)
    return pack(codes, fmt.bits).contiguous()


def shifted(t: Tensor, offset: int) -> Tensor:
    """The same bytes at another address."""
    flat = torch.zeros(t.numel() + offset, dtype=t.dtype, device=t.device)[offset:]
    return flat.copy_(t.reshape(-1)).view(t.shape)


# Codes that exist #


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("kind", KINDS)
def test_anchored_codes_are_the_references(fmt: Format, direction: Direction, kind: str):
    """If false, the product of a stored weight is that of another weight."""
    for shape in SHAPES:
        w = encoded(inputs(*shape, kind, seed=shape[0]), Encoding(fmt, direction))
        assert_anchors(w.data, w.scale, fmt, direction, f"{kind} {shape}", shape[1])


@pytest.mark.parametrize("direction", Direction)
def test_codes_of_fp32_powers_are_the_references(direction: Direction):
    """If false, a block of zeros, whose scale is 1, takes the bits of a weight."""
    fmt = format_of("fp8_128x128")
    for shape in ((1, 32), (128, 128), (300, 520), (1030, 257)):
        for kind in KINDS:
            x = inputs(*shape, kind, seed=shape[0]) * 1e-3
            x[:130] = 0
            w = encoded(x, Encoding(fmt, direction))
            assert_anchors(w.data, w.scale, fmt, direction, f"{kind} {shape}")
            assert_anchors(
                w.data, torch.ones_like(w.scale), fmt, direction, f"{kind} {shape} of scale 1"
            )
            assert_group_anchors(
                [(w.data, w.scale, shape[1]), (w.data.flip(0), w.scale.flip(0), shape[1])],
                fmt,
                direction,
            )


def test_what_products_lose_is_the_references():
    """If false, the guard moves other products on a GPU, or none."""

    def operand(
        lines: int, k: int, block: tuple, element: str, seed: int
    ) -> tuple[Tensor, Tensor, Format]:
        g = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 120, (lines, k), generator=g, dtype=torch.uint8)
        data[: lines // 2] %= 12  # mostly without an exponent
        data[:3] = 0
        of_runs = -(-k // (block[1] or k)), -(-lines // 4) * 4
        of_tiles = -(-lines // 128), -(-k // 128 // 4) * 4
        grid = of_tiles if block[0] == 128 else of_runs
        scales = 1 if block[0] is None else lines if block[1] is None else math.prod(grid)
        scale = torch.exp2(torch.randint(-6, 7, (scales,), generator=g).float())
        fmt = Format("operand", ELEMENT_OF[element], block, "fp32", pow2=True)
        shape = grid if block[1] is not None else (-1,)
        return data.to(expected.DEVICE), scale.view(shape).to(expected.DEVICE), fmt

    blocks = (None, None), (1, None), (1, 512), (1, 128)
    for i, (m, n, k) in enumerate(
        (
            (1, 1, 16),
            (33, 47, 144),
            (64, 500, 1040),
            (1000, 129, 4096),
            (300, 300, 17040),
            (70, 90, 40000),
        )
    ):
        for of_a, of_b in itertools.product(blocks, (*blocks, (128, 128))):
            for elements in (("e4m3", "e4m3"), ("e5m2", "e4m3")):
                a, b = (
                    operand(lines, k, block, element, seed=i)
                    for lines, block, element in zip((m, n), (of_a, of_b), elements)
                )
                for counted, probe, product in (
                    ((1, 1), 0, 1),
                    ((1, 0), 1, 1),
                    ((0, 1), 5, 2),
                    ((2, 2), 0, 1),
                    ((1, 2), 3, 2),
                    ((3, 4), 0, 1),
                    ((5, 3), 2, 2),
                ):
                    step = torch.tensor([3, probe * PROBED_STEPS, 0, -1, 0], device=expected.DEVICE)
                    guard = torch.ones(3, 2, device=expected.DEVICE)
                    expected.look(
                        native.Operand(*a), native.Operand(*b), counted, step, guard, product
                    )
                    of_lines = b[1]
                    if of_b[0] == 128:  # a scale for each of its lines
                        of_lines = b[1].t().repeat_interleave(128, 1)[:, :n]
                    want = product_error.product_error(
                        a, (b[0], of_lines, b[2]), counted, probe, product < 2
                    )
                    what = f"{m} {n} {k} {of_a} {of_b} {elements} {counted} {probe}"
                    torch.testing.assert_close(
                        guard[product] - 1,
                        want,
                        rtol=1e-4,
                        atol=1e-6,
                        msg=lambda m, what=what: f"{what}: {m}",
                    )
                    assert guard[0].tolist() == guard[3 - product].tolist() == [1, 1], what
                    step[1] += 1
                    before = guard.clone()
                    expected.look(
                        native.Operand(*a), native.Operand(*b), counted, step, guard, product
                    )
                    assert torch.equal(guard, before), "a step that is not looked at"
    a, b = (operand(64, 512, (1, None), "e4m3", seed=i) for i in range(2))
    looked = []
    for at in range(0, 2 * SETTLED_STEPS + 1, PROBED_STEPS // 2):
        guard = torch.zeros(3, 2, device=expected.DEVICE)
        step = torch.tensor([3, at, 0, -1, 0], device=expected.DEVICE)
        expected.look(native.Operand(*a), native.Operand(*b), (1, 1), step, guard, 0)
        assert bool(guard.any()) is is_probed(at), at
        looked += [at] * is_probed(at)
    assert looked == [*range(0, 256, 16), 256, 384, 512]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_every_code_at_every_distance_is_the_references(fmt: Format, direction: Direction):
    """If false, products of fp16 round some element twice, or to another one, or lose a NaN."""
    for rows, cols in ((256, 8192), (257, 600)):
        shape = (rows, cols) if direction is ROWWISE else (cols, rows)
        grid = fmt.scale_shape(shape, direction)
        for low in (0, 200, 250):  # of the exponents: up to 255, 55 and 5 apart
            data, scale = random_codes(fmt, shape, seed=low), random_bytes(grid, low, seed=rows)
            assert_anchors(data, scale, fmt, direction, f"{shape} from {low}", shape[1])
            assert_anchors(
                data, scale.clamp(max=254), fmt, direction, f"{shape} from {low}, no NaN", shape[1]
            )
            assert_anchors(
                data, scale - low, fmt, direction, f"{shape} up to {255 - low}", shape[1]
            )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_buffers_in_no_alignment_are_anchored_as_the_reference(fmt: Format, direction: Direction):
    """If false, a storage whose bytes lie at an odd address of a gather buffer is torn."""
    for shape in ((33, 47), (128, 256), (512, 640)):
        data, scale = random_codes(fmt, shape), random_bytes(fmt.scale_shape(shape, direction), 220)
        for offset in (1, 2, 4, 8):
            what = f"{shape} at {offset}"
            assert_anchors(
                shifted(data, offset), scale, fmt, direction, f"data of {what}", shape[1]
            )
            assert_anchors(
                data, shifted(scale, offset), fmt, direction, f"scale of {what}", shape[1]
            )


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
def test_long_and_narrow_tensors_are_anchored_as_the_reference(name: str):
    """If false, a line's exponent misses some of its blocks, or a grid some of its lines."""
    fmt = MADE[name].fmt
    for shape in ((1, 70000), (70000, 1), (3, 40000), (40000, 9), (4096, 2048)):
        for direction in Direction:
            data, scale = (
                random_codes(fmt, shape),
                random_bytes(fmt.scale_shape(shape, direction), 230),
            )
            assert_anchors(data, scale, fmt, direction, f"{shape}", shape[1])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
def test_empty_tensors_are_anchored_to_empty_ones(name: str):
    """If false, a rank without rows of a parameter fails in a launch of no blocks."""
    fmt = MADE[name].fmt
    for shape in ((0, 64), (64, 0), (0, 0)):
        for direction in Direction:
            data = random_codes(fmt, shape)
            scale = torch.empty(
                fmt.scale_shape(shape, direction), dtype=torch.uint8, device=expected.DEVICE
            )
            for transposed, run in itertools.product((False, True), runs_of(fmt)):
                codes, lines = native.anchor_codes(
                    data, scale, None, shape[1], fmt, direction, transposed, run
                )
                assert codes.shape == (shape[::-1] if transposed else shape)
                assert run > 0 or bool((lines == 2.0**-127).all()), "without blocks"


@pytest.mark.parametrize("fmt", FORMATS)
def test_matrices_are_anchored_as_each_alone(fmt: Format):
    """If false, an expert's weight is read from where another's lies."""
    for direction, transposed, run in itertools.product(
        Direction, (False, True), (native.OF_TENSOR, 0)
    ):
        data, scale = (
            random_codes(fmt, (3 * 128, 200)).view(3, 128, -1),
            random_bytes((3, *fmt.scale_shape((128, 200), direction)), 225),
        )
        made = native.anchor_codes(data, scale, None, 200, fmt, direction, transposed, run)
        for i in range(3):
            for got, want in zip(
                made,
                native.anchor_codes(
                    data[i].clone(), scale[i].clone(), None, 200, fmt, direction, transposed, run
                ),
            ):
                expected.assert_same(
                    got[i], want, f"matrix {i}, {direction}, transposed {transposed}, run {run}"
                )


@on_cuda
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_a_group_is_anchored_as_each_alone(fmt: Format, direction: Direction):
    """If false, weights that FSDP2 gathers together are multiplied as others than they are, in the
    first step or the next."""
    made = [
        encoded(inputs(*shape, "outliers", seed=shape[0]), Encoding(fmt, direction))
        for shape in SHAPES
    ]
    assert_group_anchors(
        [(w.data, w.scale, shape[1]) for w, shape in zip(made, SHAPES)], fmt, direction
    )


@on_cuda
@pytest.mark.parametrize("name", ["mxfp8", "fp8_128x128"])
@pytest.mark.parametrize("direction", Direction)
def test_exponents_of_many_and_of_large_tensors_are_the_references(name: str, direction: Direction):
    """If false, a weight takes the exponent of its neighbour in the group, of a part of itself, or
    what memory held before."""
    fmt = MADE[name].fmt
    encoding, run = Encoding(fmt, direction), native.OF_TENSOR
    shapes = [(1 + 37 * i % 200, 32 * (1 + i % 5)) for i in range(70)]  # of three launches
    shapes += [(16392, 2080)]  # more scales than one read of all threads
    kinds = ("outliers", "gauss", "nan", "zeros", "wide range")
    made = [
        encoded(inputs(*s, kinds[i % 5], seed=i) * 2.0 ** (i % 9 - 4), encoding)
        for i, s in enumerate(shapes)
    ]
    empty = torch.empty(0, 64, dtype=torch.uint8, device=expected.DEVICE)
    scales = fmt.scale_shape(empty.shape, direction)
    made.insert(7, Encoded(empty, empty.new_empty(scales, dtype=fmt.scale_dtype), None, None))
    shapes.insert(7, tuple(empty.shape))
    if name == "mxfp8":
        made[-1].scale.flatten()[-1] = 200  # the last block is the largest
    data, scale = [w.data for w in made], [w.scale for w in made]
    for transposed in (False, True):
        calls: list[native.RecordedLaunch] = []
        cols = [s[1] for s in shapes]
        out = native.multi_tensor_anchor(
            data, scale, [None] * len(data), cols, fmt, direction, transposed, run, calls
        )
        for t in calls[0].out:
            t.fill_(0x7F)
        assert expected.launches(calls[0]) == 2 * 3 + 1  # exponents and codes; of nothing: a fill
        for one, (codes, line), shape in zip(made, out, shapes):
            want, want_line = anchoring.anchored_codes(
                one.data, one.scale, fmt, direction, True, shape[1]
            )
            what = f"{name} {direction} {shape}, transposed {transposed}"
            expected.assert_same(line, want_line, f"{what}: scale")
            want = want.t().contiguous() if transposed else want
            expected.assert_same(codes, want, f"{what}: codes")


@pytest.mark.parametrize("direction", Direction)
def test_tiles_of_a_stack_are_those_of_each_matrix(direction: Direction):
    """If false, an expert's weight is anchored to another's exponents."""
    fmt, shape = MADE["mxfp8"].fmt, (272, 400)
    grid = fmt.scale_shape(shape, direction)
    data = torch.stack([random_bytes(shape, seed=i) for i in range(3)])
    scale = torch.stack([random_bytes(grid, 100, seed=i) for i in range(3)])
    for transposed in (False, True):
        run = native.OF_TILE
        of = shape[1], fmt, direction, transposed, run
        codes, scales = native.anchor_codes(data, scale, None, *of)
        for i, (one, one_scale) in enumerate(zip(data, scale)):
            want, want_scale = native.anchor_codes(one, one_scale, None, *of)
            expected.assert_same(codes[i], want, f"{direction} {transposed} {i}: codes")
            expected.assert_same(scales[i], want_scale, f"{direction} {transposed} {i}: scales")


def test_the_current_stream_anchors():
    """If false, codes are read before another stream has written them."""
    fmt, data, scale = MADE["mxfp8"].fmt, random_bytes((512, 640)), random_bytes((512, 20), 220)
    want, _ = anchoring.anchored_codes(data, scale, fmt, ROWWISE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(data)
        torch.cuda._sleep(2_000_000)  # the codes are written late
        late.copy_(data)
        codes, _ = native.anchor_codes(late, scale, None, 640, fmt, ROWWISE, False)
    torch.cuda.synchronize()
    expected.assert_same(codes, want, "on a stream of its own")


def test_errors_say_what_was_got_and_wanted():
    """If false, a wrong argument reaches a kernel, or the caller cannot tell which one it was."""
    mx, fp8, nvfp4 = (MADE[name].fmt for name in ("mxfp8", "fp8_1x128", "nvfp4"))
    data, scale = random_bytes((64, 96)), random_bytes((64, 3))

    def anchor(data=data, scale=scale, fmt=mx, direction=ROWWISE):
        return lambda: native.anchor_codes(data, scale, None, 96, fmt, direction, False)

    refused = {
        r"wanted e8m0 scales of \(1, 32\) or \(32, 32\) blocks": anchor(fmt=fp8),
        r"side is \d+; wanted e8m0 scales": anchor(fmt=nvfp4),
        r"data has shape \[6144\]; wanted \[rows, row bytes\]": anchor(data.flatten()),
        r"data is contiguous Char": anchor(data.view(torch.int8)),
        r"data is not contiguous": anchor(data.t()),
        r"scale is contiguous Byte \[64, 2\].*wanted 192 ": anchor(scale=scale[:, :2].contiguous()),
        r"scale is contiguous Byte \[63, 3\].*wanted 192 ": anchor(
            scale=scale[:63], direction=COLUMNWISE
        ),
        r"scale is contiguous Float": anchor(scale=scale.float()),
        r"anchor run is 96; wanted 0": lambda: native.anchor_codes(
            data, scale, None, 96, mx, ROWWISE, False, 96
        ),
        r"matrices are anchored by lines, tiles or tensors; got runs of 128": lambda: (
            native.anchor_codes(data[None], scale[None], None, 96, mx, ROWWISE, False, 128)
        ),
        r"data is contiguous Byte \[64, 96\].*wanted 3072 ": anchor(fmt=MADE["mxfp4"].fmt),
    }
    group = torch.ops.fsdp_quant.anchor_group
    side, codes, lines = (
        native.pack_encoding(Encoding(mx, ROWWISE)),
        torch.empty_like(data),
        torch.empty(64, device=data.device),
    )
    refused |= {
        "lists of different lengths": lambda: group(
            [data], [scale, scale], [], side, False, False, False, [96], [codes], [lines]
        ),
        r"out is contiguous Byte \[32, 96\].*wanted 6144 ": lambda: group(
            [data], [scale], [], side, False, False, False, [96], [codes[:32]], [lines]
        ),
        r"line_scale is contiguous Float \[63\].*wanted 64 ": lambda: group(
            [data], [scale], [], side, False, False, False, [96], [codes], [lines[1:]]
        ),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()


# Operands of 4-bit codes #

TWO_LEVEL = [name for name, q in MADE.items() if q.fmt.becomes_e4m3 and not q.is_stochastic]


@pytest.mark.parametrize("name", TWO_LEVEL)
@pytest.mark.parametrize("direction", Direction)
def test_operands_of_two_level_codes_are_the_references(name: str, direction: Direction):
    """If false, the product of a gathered 4-bit weight is that of another weight."""
    fmt, of = MADE[name].fmt, []
    for shape in (*SHAPES, (1, 1), (7, 15), (1030, 257)):
        for kind in KINDS:
            x = inputs(*shape, kind, seed=shape[0])
            w, cols = (
                encoded(x, MADE[name].encoding(direction)),
                fmt.padded_shape(shape, direction)[1],
            )
            of.append((w.data, w.scale, w.tensor_amax, cols))
            want, want_scale = anchoring.e4m3_operand(*of[-1][:3], fmt, direction, cols)
            for transposed in (False, True):
                codes, scale = native.anchor_codes(
                    *of[-1], fmt, direction, transposed, native.OF_TENSOR
                )
                what = f"{name} {direction} {shape} {kind}, transposed {transposed}"
                expected.assert_same_values(scale, want_scale, f"{what}: scale")
                expected.assert_same(
                    codes, want.t().contiguous() if transposed else want, f"{what}: codes"
                )
    for transposed in (False, True):
        calls: list[native.RecordedLaunch] = []
        made = native.multi_tensor_anchor(
            *map(list, zip(*of)), fmt, direction, transposed, native.OF_TENSOR, calls
        )
        for t in calls[0].out:
            t.fill_(7)
        calls[0]()
        for got, one in zip(made, of):
            for t, want in zip(
                got, native.anchor_codes(*one, fmt, direction, transposed, native.OF_TENSOR)
            ):
                expected.assert_same(
                    t.nan_to_num() if t.is_floating_point() else t,
                    want.nan_to_num() if t.is_floating_point() else want,
                    name,
                )


@pytest.mark.parametrize("direction", Direction)
def test_every_code_under_every_scale_is_the_references(direction: Direction):
    """If false, a table of magnitudes has a wrong byte."""
    for name in ("nvfp4_exact", "nvfp4_16x16_exact"):
        fmt, shape = MADE[name].fmt, (256, 512)
        data, amax = random_bytes((256, 256)), torch.full((1,), 3.0, device=expected.DEVICE)
        grid = fmt.scale_shape(shape, direction)
        scale = (
            (torch.arange(grid[0] * grid[1], device=expected.DEVICE) % 128)
            .to(torch.uint8)
            .view(grid)
        )
        want, _ = anchoring.e4m3_operand(data, scale, amax, fmt, direction, shape[1])
        codes, _ = native.anchor_codes(
            data, scale, amax, shape[1], fmt, direction, False, native.OF_TENSOR
        )
        is_nan = want & 0x7F == 0x7F  # of scales that are no quantizer's
        expected.assert_same(
            codes & 0x7F | (codes & 0x80).masked_fill(is_nan, 0),
            want.masked_fill(is_nan, 0x7F),
            name,
        )


@on_cuda
def test_codes_of_another_device_are_refused():
    """If false, a kernel reads an address of the CPU."""
    fmt, data, scale = MADE["mxfp8"].fmt, random_bytes((64, 96)), random_bytes((64, 3))
    with pytest.raises(NotImplementedError, match="CPU"):
        native.anchor_codes(data.cpu(), scale.cpu(), None, 96, fmt, ROWWISE, False)
    with pytest.raises(ValueError, match="scale is contiguous Byte .* on cpu; wanted .* on cuda"):
        native.anchor_codes(data, scale.cpu(), None, 96, fmt, ROWWISE, False)


# What products lose #


def test_a_guard_of_another_kind_is_refused():
    """If false, the guard writes beyond a buffer that is too small."""
    data, scale = random_bytes((64, 96)), torch.ones(64, device=expected.DEVICE)
    a = native.Operand(data, scale, Format("operand", ELEMENT_OF["e4m3"], (1, None), "fp32"))
    step, guard = (
        torch.zeros(5, dtype=torch.int64, device=expected.DEVICE),
        torch.zeros(3, 2, device=expected.DEVICE),
    )
    refused = {
        r"guard is contiguous Int \[3, 2\]": (a, a, (True, True), step, guard.int(), 0),
        r"guard is contiguous Float \[2, 2\].*wanted 6 ": (a, a, (True, True), step, guard[:2], 0),
        r"product is 3; wanted 0 to 2": (a, a, (True, True), step, guard, 3),
        r"step is contiguous Int \[5\]": (a, a, (True, True), step.int(), guard, 0),
        r"wanted the same K": (a, a._replace(data=data[:, :64]), (True, True), step, guard, 0),
        r"b is Byte .* of strides .*wanted codes": (
            a,
            a._replace(data=data.t()),
            (True, True),
            step,
            guard,
            0,
        ),
    }
    for text, arguments in refused.items():
        with pytest.raises(ValueError, match=text):
            expected.look(*arguments)
    assert guard.count_nonzero() == 0


def test_a_watched_product_is_the_product_and_what_it_loses():
    """If false, a compiled model multiplies or counts otherwise than an eager one."""
    fmt = Format("operand", ELEMENT_OF["e4m3"], (1, None), "fp32")
    of_lines = [torch.rand(64, device=expected.DEVICE) + 0.5 for _ in range(2)]
    a, b = (native.Operand(random_bytes((64, 96)) & 0x77, scale, fmt) for scale in of_lines)
    step = torch.zeros(5, dtype=torch.int64, device=expected.DEVICE)
    apart, together = (torch.zeros(3, 2, device=expected.DEVICE) for _ in range(2))
    for product in range(3):
        expected.look(a, b, (1, 1), step, apart, product)
        plain = native.gemm(a, b, torch.bfloat16, None, False, None, None)
        watch = native.Watch(native.packed_counts((1, 1)), step, together, product)
        y = native.gemm(a, b, torch.bfloat16, None, False, None, None, watch)
        expected.assert_same(y, plain, f"product {product}")
    assert torch.equal(together, apart) and together.all()


def test_steps_that_the_host_knows_not_to_be_probed_launch_nothing():
    """If false, the host launches kernels that return at once, or a capture looks at no step."""
    data = torch.ones(64, 96, dtype=torch.uint8, device=expected.DEVICE)  # subnormal
    fmt = Format("operand", ELEMENT_OF["e4m3"], (1, None), "fp32")
    a = native.Operand(data, torch.ones(64, device=expected.DEVICE), fmt)
    step = torch.zeros(5, dtype=torch.int64, device=expected.DEVICE)
    guard, graph = torch.zeros(3, 2, device=expected.DEVICE), torch.cuda.CUDAGraph()

    def counted() -> bool:
        expected.look(a, a, (1, 1), step, guard.zero_(), 0)
        return bool(guard.any())

    assert counted()
    native.set_probed(False)
    try:
        assert not counted()
        with torch.cuda.graph(graph):
            expected.look(a, a, (1, 1), step, guard, 0)
    finally:
        native.set_probed(True)
    assert not guard.any()
    graph.replay()
    assert guard.any() and counted()

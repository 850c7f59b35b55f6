"""MXFP8 codes against one exponent a line, and counts that are given, on the GPU: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, MADE, encoded, inputs
from fsdp_quant.formats import (
    COLUMNWISE,
    ROWWISE,
    Direction,
    Encoding,
    Format,
    format_of,
)
from fsdp_quant.ops import native, reference

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

on_cuda = pytest.mark.skipif(expected.DEVICE.type != "cuda", reason="needs two kinds of device")
SHAPES = ((1, 32), (33, 47), (128, 128), (200, 328), (129, 257), (512, 640))
KINDS = ("gauss", "outliers", "wide range", "nan", "inf", "zeros")
NAMES = ("mxfp8", "mxfp8_32x32")
ELEMENTS = ("e4m3", "e5m2")
FORMATS = [pytest.param(format_of(n, element=e), id=f"{n} {e}") for n in NAMES for e in ELEMENTS]


def assert_anchors(data: Tensor, scale: Tensor, fmt: Format, direction: Direction, what: str) -> None:
    """Codes and scales of both orders are the reference's; the bits of a NaN too."""
    want, want_scale = reference.anchored_codes(data, scale, fmt, direction)
    for transposed in (False, True):
        codes, lines = native.anchor_codes(data, scale, fmt, direction, transposed)
        text = f"{what}, {direction} {fmt}, transposed {transposed}"
        expected.assert_same(lines, want_scale, f"{text}: scale")
        expected.assert_same(codes, want.t().contiguous() if transposed else want, f"{text}: codes")


def assert_group_anchors(of: list[tuple[Tensor, Tensor]], fmt: Format, direction: Direction) -> None:
    """One call for all gives what a call each gives, also when it is made again of other codes."""
    data, scale = map(list, zip(*of))
    for transposed in (False, True):
        calls: list[native.GroupCall] = []
        made = native.anchor_group(data, scale, fmt, direction, transposed, calls)
        for again in (False, True):
            if again:
                for t in data:
                    t.copy_(t.roll(1, 0))
                for t in calls[0].out:
                    t.fill_(7)
                calls[0]()
            for (codes, lines), one in zip(made, zip(data, scale)):
                want, want_lines = native.anchor_codes(*one, fmt, direction, transposed)
                text = f"{direction} {fmt}, transposed {transposed}, again {again}"
                expected.assert_same(codes, want, f"{text}: codes")
                expected.assert_same(lines, want_lines, f"{text}: scale")


def random_bytes(shape: tuple[int, int], low: int = 0, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, 256, shape, generator=g, dtype=torch.uint8).to(expected.DEVICE)


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
        assert_anchors(w.data, w.scale, fmt, direction, f"{kind} {shape}")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_every_code_at_every_distance_is_the_references(fmt: Format, direction: Direction):
    """If false, products of fp16 round some element twice, or to another one, or lose a NaN."""
    for rows, cols in ((256, 8192), (257, 600)):
        shape = (rows, cols) if direction is ROWWISE else (cols, rows)
        grid = fmt.scale_shape(shape, direction)
        for low in (0, 200, 250):  # of the exponents: up to 255, 55 and 5 apart
            data, scale = random_bytes(shape, seed=low), random_bytes(grid, low, seed=rows)
            assert_anchors(data, scale, fmt, direction, f"{shape} from {low}")
            assert_anchors(data, scale.clamp(max=254), fmt, direction, f"{shape} from {low}, no NaN")
            assert_anchors(data, scale - low, fmt, direction, f"{shape} up to {255 - low}")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_buffers_in_no_alignment_are_anchored_as_the_reference(fmt: Format, direction: Direction):
    """If false, a storage whose bytes lie at an odd address of a gather buffer is torn."""
    for shape in ((33, 47), (128, 256), (512, 640)):
        data, scale = random_bytes(shape), random_bytes(fmt.scale_shape(shape, direction), 220)
        for offset in (1, 4, 8):
            what = f"{shape} at {offset}"
            assert_anchors(shifted(data, offset), scale, fmt, direction, f"data of {what}")
            assert_anchors(data, shifted(scale, offset), fmt, direction, f"scale of {what}")


def test_long_and_narrow_tensors_are_anchored_as_the_reference():
    """If false, a line's exponent misses some of its blocks, or a grid some of its lines."""
    fmt = MADE["mxfp8"].fmt
    for shape in ((1, 70000), (70000, 1), (3, 40000), (40000, 9), (4096, 2048)):
        for direction in Direction:
            data, scale = random_bytes(shape), random_bytes(fmt.scale_shape(shape, direction), 230)
            assert_anchors(data, scale, fmt, direction, f"{shape}")


def test_empty_tensors_are_anchored_to_empty_ones():
    """If false, a rank without rows of a parameter fails in a launch of no blocks."""
    fmt = MADE["mxfp8"].fmt
    for shape in ((0, 64), (64, 0), (0, 0)):
        for direction in Direction:
            data = torch.empty(shape, dtype=torch.uint8, device=expected.DEVICE)
            scale = torch.empty(fmt.scale_shape(shape, direction), dtype=torch.uint8, device=expected.DEVICE)
            assert_anchors(data, scale, fmt, direction, f"{shape}")


@on_cuda
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", Direction)
def test_a_group_is_anchored_as_each_alone(fmt: Format, direction: Direction):
    """If false, weights that FSDP2 gathers together are multiplied as others than they are, in the first step or the next."""
    made = [encoded(inputs(*shape, "outliers", seed=shape[0]), Encoding(fmt, direction)) for shape in SHAPES]
    assert_group_anchors([(w.data, w.scale) for w in made], fmt, direction)


def test_the_current_stream_anchors():
    """If false, codes are read before another stream has written them."""
    fmt, data, scale = MADE["mxfp8"].fmt, random_bytes((512, 640)), random_bytes((512, 20), 220)
    want, _ = reference.anchored_codes(data, scale, fmt, ROWWISE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(data)
        torch.cuda._sleep(2_000_000)  # the codes are written late
        late.copy_(data)
        codes, _ = native.anchor_codes(late, scale, fmt, ROWWISE, False)
    torch.cuda.synchronize()
    expected.assert_same(codes, want, "on a stream of its own")


def test_errors_say_what_was_got_and_wanted():
    """If false, a wrong argument reaches a kernel, or the caller cannot tell which one it was."""
    mx, fp8, nvfp4 = (MADE[name].fmt for name in ("mxfp8", "fp8_1x128", "nvfp4"))
    data, scale = random_bytes((64, 96)), random_bytes((64, 3))

    def anchor(data=data, scale=scale, fmt=mx, direction=ROWWISE):
        return lambda: native.anchor_codes(data, scale, fmt, direction, False)

    refused = {
        r"wanted e8m0 scales of \(1, 32\) or \(32, 32\) blocks": anchor(fmt=fp8),
        r"side is \d+; wanted e8m0 scales": anchor(fmt=nvfp4),
        r"data has shape \[6144\]; wanted \[rows, cols\]": anchor(data.flatten()),
        r"data is contiguous Char": anchor(data.view(torch.int8)),
        r"data is not contiguous": anchor(data.t()),
        r"scale is contiguous Byte \[64, 2\].*wanted 192 ": anchor(scale=scale[:, :2].contiguous()),
        r"scale is contiguous Byte \[63, 3\].*wanted 192 ": anchor(scale=scale[:63], direction=COLUMNWISE),
        r"scale is contiguous Float": anchor(scale=scale.float()),
    }
    group = torch.ops.fsdp_quant.anchor_group
    side, codes, lines = native.pack_encoding(Encoding(mx, ROWWISE)), torch.empty_like(data), torch.empty(64, device=data.device)
    refused |= {
        "lists of different lengths": lambda: group([data], [scale, scale], side, False, False, [codes], [lines]),
        r"out is contiguous Byte \[32, 96\].*wanted 6144 ": lambda: group([data], [scale], side, False, False, [codes[:32]], [lines]),
        r"line_scale is contiguous Float \[63\].*wanted 64 ": lambda: group([data], [scale], side, False, False, [codes], [lines[1:]]),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()


@on_cuda
def test_codes_of_another_device_are_refused():
    """If false, a kernel reads an address of the CPU."""
    fmt, data, scale = MADE["mxfp8"].fmt, random_bytes((64, 96)), random_bytes((64, 3))
    with pytest.raises(NotImplementedError, match="CPU"):
        native.anchor_codes(data.cpu(), scale.cpu(), fmt, ROWWISE, False)
    with pytest.raises(ValueError, match="scale is contiguous Byte .* on cpu; wanted .* on cuda"):
        native.anchor_codes(data, scale.cpu(), fmt, ROWWISE, False)


# Counts #

CALLS = ([ROWWISE], [COLUMNWISE], [ROWWISE, COLUMNWISE], [COLUMNWISE, ROWWISE])


@pytest.mark.parametrize("directions", CALLS)
@pytest.mark.parametrize("transposed", [False, True])
def test_counts_that_are_given_accumulate(directions: list, transposed: bool):
    """If false, the guard of a step counts the last of its tensors alone, or codes depend on who counts."""
    encodings = [MADE["mxfp8"].encoding(d) for d in directions]
    runs, turned = [None] * len(encodings), [transposed and d is COLUMNWISE for d in directions]
    counts = torch.full((2, 2), 1000, dtype=torch.int64, device=expected.DEVICE)
    wanted = counts.tolist()
    for shape in ((129, 257), (512, 640)):
        x = inputs(*shape, "wide range")
        made, returned = native.quantize_anchored(x, encodings, runs, transposed=turned, counts=counts)
        assert returned is counts
        fresh, own = native.quantize_anchored(x, encodings, runs, transposed=turned)
        for e, t, mine, other in zip(encodings, turned, made, fresh):
            codes, scale, counted = reference.anchored(x, e, None)
            for data, lines in (mine, other):
                expected.assert_same(data, codes.t().contiguous() if t else codes, f"{shape} {e.direction}: codes")
                expected.assert_same(lines, scale, f"{shape} {e.direction}: scale")
            side = int(e.direction is COLUMNWISE)
            wanted[side] = [before + more for before, more in zip(wanted[side], counted.tolist())]
            assert own[side].tolist() == counted.tolist(), f"{shape} {e.direction}: new counts"
    assert counts.tolist() == wanted


def test_counts_of_another_kind_are_refused():
    """If false, the guard writes beyond a buffer that is too small."""
    x, encodings = inputs(64, 96), [MADE["mxfp8"].encoding(ROWWISE)]
    good = torch.zeros(2, 2, dtype=torch.int64, device=expected.DEVICE)
    refused = {
        r"counts is contiguous Int \[2, 2\]": good.int(),
        r"counts is contiguous Long \[1, 2\].*wanted 4 ": good[:1],
        r"counts is not contiguous": good.t(),
        r"counts has shape \[4\]; wanted \[2, 2\]": good.flatten(),
    }
    for text, counts in refused.items():
        with pytest.raises(ValueError, match=text):
            native.quantize_anchored(x, encodings, [None], counts=counts)
    assert good.tolist() == [[0, 0], [0, 0]]


def test_compiled_calls_count_and_anchor():
    """If false, torch.compile cannot take a layer whose guard counts, or counts a step twice."""
    e, x = MADE["mxfp8"].encoding(ROWWISE), inputs(129, 257, "wide range", BF16)
    counts = torch.zeros(2, 2, dtype=torch.int64, device=expected.DEVICE)
    sides = expected.packed(e), 0

    def step(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.ops.fsdp_quant.quantize_anchored.counted(x, *sides, 0, 0, None, None, False, counts)
        return *made[:2], torch.ops.fsdp_quant.quantize_anchored(x, *sides, 0, 0, None, None, False)[-1]

    codes, scale, own = torch.compile(step, backend="aot_eager", fullgraph=True)(x, counts)
    want = reference.anchored(x, e, None)
    expected.assert_same(codes, want[0], "codes")
    expected.assert_same(scale, want[1], "scale")
    assert counts[0].tolist() == own[0].tolist() == want[2].tolist()

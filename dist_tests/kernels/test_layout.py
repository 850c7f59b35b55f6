# SPDX-License-Identifier: Apache-2.0
"""Decoding, transposes and swizzles on the GPU give the bytes of the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, FP16, FP32, LARGE, MADE, encoded, inputs
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding, ceil_div
from fsdp_quant.ops import dispatch, layout, native, reference
from fsdp_quant.storage import Storage, to_storage

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

ON_CUDA = expected.DEVICE.type == "cuda"
DTYPES = (FP32, BF16, FP16)
SHAPES = (
    (1, 1),
    (7, 15),
    (33, 47),
    (129, 257),
    (1, 130),
    (130, 1),
    (200, 1000),
    (256, 4096),
    (1000, 72),
    (5, 16),
    (66, 1024),
)
# One of each that decodes in its own way: rounding and eps change nothing here.
DECODED = tuple(
    dict.fromkeys(
        {(q.fmt, q.rotation): name for name, q in MADE.items() if not q.is_stochastic}.values()
    )
)


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    ).to(expected.DEVICE)


# Decoding #


def assert_decodes(data, scale, tensor_amax, e: Encoding, cols: int, row0: int, what: str) -> None:
    """Every factor, and every dtype: equal values, zeros with their sign; a NaN may have other
    bits."""
    for s, t in dict.fromkeys(
        [(scale, tensor_amax), (scale, None), (None, tensor_amax), (None, None)]
    ):
        want = reference.decode(data, s, t, e.fmt, e.direction, cols, row0)
        for dtype in DTYPES:
            got = native.dequantize(data, s, t, e.fmt, e.direction, cols, row0, dtype)
            text = f"{what}, {e.direction} {e.fmt} to {dtype}"
            text += f", scale {s is not None}, tensor_amax {t is not None}"
            expected.assert_same_values(got, want.to(dtype), text)


@pytest.mark.parametrize("name", DECODED)
def test_decoded_values_are_the_references(name: str):
    """If false, a product, a checkpoint or an optimizer sees other weights than were stored."""
    for i, shape in enumerate(SHAPES):
        x = inputs(*shape, expected.KINDS[i % 4], (BF16, FP32)[i % 2], seed=i)
        for e in expected.both(name):
            made = encoded(x, e)
            cols = e.fmt.padded_shape(shape, e.direction)[1]
            assert_decodes(made.data, made.scale, made.tensor_amax, e, cols, 0, f"{name} {shape}")


@pytest.mark.parametrize("name", DECODED)
def test_decoded_special_values_are_the_references(name: str):
    """If false, an overflow that is stored as NaN decodes to a number, or a zero loses its sign."""
    for what, x, dtype in expected.special_cases(dtypes=((BF16, None), (FP32, None))):
        for e in expected.both(name):
            made = encoded(x, e, dtype=dtype)
            cols = e.fmt.padded_shape(tuple(x.shape), e.direction)[1]
            assert_decodes(made.data, made.scale, made.tensor_amax, e, cols, 0, f"{name} {what}")


@pytest.mark.parametrize("name", DECODED)
def test_every_code_and_scale_decodes_as_the_reference(name: str):
    """If false, some code or scale, of 256 each, stands for another number on the GPU."""
    for rows, cols in ((64, 256), (33, 48), (130, 257)):
        for e in expected.both(name):
            shape = e.fmt.padded_shape((rows, cols), e.direction)
            data = random_bytes(shape[0], e.fmt.row_bytes(shape[1], BF16), seed=rows)
            if e.fmt.element.bits == 4 and shape[1] % 2:
                data[:, -1] &= 0xF  # what pads a row is zero
            grid = e.fmt.scale_shape((rows, cols), e.direction)
            if e.fmt.scale == "fp32":
                scale = random_bytes(*grid, 4, seed=cols).view(FP32).squeeze(-1).abs()
                scale = torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))
            else:
                scale = random_bytes(*grid, seed=cols)
            for amax in (
                (448.0, 3e-39, 3.4e38, 0.0, torch.inf, torch.nan) if e.fmt.tensor_scale else (None,)
            ):
                lines = e.fmt.tensor_scale_shape((rows, cols), e.direction)
                tensor_amax = (
                    None if amax is None else torch.full(lines, amax, device=expected.DEVICE)
                )
                assert_decodes(
                    data,
                    scale,
                    tensor_amax,
                    e,
                    shape[1],
                    0,
                    f"{name} [{rows}, {cols}], tensor amax {amax}",
                )


@pytest.mark.parametrize("name", DECODED)
def test_decoded_shards_are_the_references(name: str):
    """If false, a shard whose cut divides a block decodes with its neighbour's scale."""
    for row0 in (0, 1, 16, 31, 33, 100, 128, 160, 2**33 + 5):
        for rows in (1, 40, 150):
            x = inputs(rows, 200, "heavy", seed=row0 % 1000)
            for e in expected.both(name):
                if e.fmt.rotated and e.direction is COLUMNWISE or not expected.encodable(e, row0):
                    continue  # is never cut
                made = encoded(x, e, row0=row0)
                cols = e.fmt.padded_shape((rows, 200), e.direction)[1]
                assert_decodes(
                    made.data,
                    made.scale,
                    made.tensor_amax,
                    e,
                    cols,
                    row0,
                    f"{name} {rows} rows from {row0}",
                )


@pytest.mark.parametrize(
    "name", ["fp8_row", "fp8_128x128", "mxfp8", "nvfp4", "nvfp4_16x16", "nvfp4_row"]
)
def test_narrowed_storages_decode_as_their_rows(name: str):
    """If false, slicing a quantized weight and decoding it give another tensor than decoding and
    slicing."""
    x = inputs(300, 200, "heavy")
    for e in expected.both(name):
        storage = Storage.of(dispatch.encode(x, [e], None)[0], e, x.shape, BF16)
        whole = storage.dequantize()
        for start, length in ((0, 1), (1, 31), (17, 100), (128, 160), (299, 1), (5, 0)):
            got = storage.narrow(start, length).dequantize()
            expected.assert_same_values(
                got, whole[start : start + length], f"{name} {e.direction} rows {start}, {length}"
            )


def test_large_storages_decode_as_the_reference():
    """If false, a tensor of many blocks decodes with scales of other rows."""
    x = inputs(*LARGE, "heavy")
    for name in ("fp8_row", "mxfp8", "nvfp4", "fp8_128x128"):
        for e in expected.both(name):
            made = encoded(x, e)
            assert_decodes(
                made.data, made.scale, made.tensor_amax, e, LARGE[1], 0, f"{name} {LARGE}"
            )


def test_buffers_in_no_alignment_decode_as_the_reference():
    """If false, a storage whose bytes lie at an odd address of a gather buffer is torn."""
    for name in ("fp8_row", "mxfp8", "nvfp4", "nvfp4_16x16"):
        for shape in ((33, 47), (64, 256)):
            for e in expected.both(name):
                made = encoded(inputs(*shape), e)
                for offset in (1, 4, 8):
                    flat = torch.zeros(
                        made.data.numel() + 32, dtype=torch.uint8, device=expected.DEVICE
                    )
                    data = flat[offset : offset + made.data.numel()].view(made.data.shape)
                    data.copy_(made.data)
                    flat = torch.zeros(
                        made.scale.numel() + 32, dtype=made.scale.dtype, device=expected.DEVICE
                    )
                    scale = flat[offset : offset + made.scale.numel()].view(made.scale.shape)
                    scale.copy_(made.scale)
                    assert_decodes(
                        data, scale, made.tensor_amax, e, shape[1], 0, f"{name} {shape} at {offset}"
                    )


def test_empty_storages_decode_to_empty_tensors():
    """If false, a rank without rows of a parameter cannot read its shard."""
    for name in ("fp8_tensor", "mxfp8", "nvfp4"):
        for e in expected.both(name):
            data = torch.empty(
                0, e.fmt.row_bytes(96, BF16), dtype=torch.uint8, device=expected.DEVICE
            )
            got = native.dequantize(data, None, None, e.fmt, e.direction, 96, 7, BF16)
            assert got.shape == (0, 96) and got.dtype is BF16


def test_tensor_scales_are_the_references():
    """If false, a two-level format decodes to values that differ by a factor, or hides an
    overflow."""
    amaxes = 0.0, 1e-38, 1e-36, 0.3, 448.0, 2688.0, 2e35, 3.4e38, float("inf"), float("nan")
    for amax in (*((amax,) for amax in amaxes), amaxes):
        value = torch.tensor(amax, device=expected.DEVICE)
        for name in ("nvfp4", "nvfp4_exact"):
            fmt = MADE[name].fmt
            want = reference.tensor_decode_scale(value, fmt)
            expected.assert_same_values(
                native.tensor_decode_scale(value, fmt), want, f"{name}, amax {amax}"
            )


# Transposes #

TRANSPOSED = (
    (1, 1),
    (1, 2),
    (2, 1),
    (7, 15),
    (33, 47),
    (128, 128),
    (129, 257),
    (1, 1000),
    (1000, 1),
    (256, 512),
    (130, 264),
    LARGE,
)


@pytest.mark.parametrize("bits", [8, 4])
def test_transposed_codes_are_those_of_the_transpose(bits: int):
    """If false, the columnwise operand of a product is another matrix."""
    for rows, cols in TRANSPOSED:
        data = random_bytes(rows, ceil_div(cols * bits, 8), seed=rows + cols)
        if bits == 4 and cols % 2:
            data[:, -1] &= 0xF
        want = layout.repack(data, bits, rows, cols)
        got = native.transpose_codes(data, rows, cols, bits)
        expected.assert_same(got, want, f"{bits} bits [{rows}, {cols}]")
        expected.assert_same(
            native.transpose_codes(got, cols, rows, bits),
            data,
            f"{bits} bits [{rows}, {cols}], back",
        )


def test_transposed_nibbles_of_an_odd_row_ignore_what_pads_it():
    """If false, the padding of a row of codes becomes a row of codes."""
    data = random_bytes(33, 24)
    got = native.transpose_codes(data, 33, 47, 4)
    data[:, -1] &= 0xF
    expected.assert_same(got, layout.repack(data, 4, 33, 47), "47 columns")


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_in_no_alignment_are_transposed(bits: int):
    """If false, codes that lie at an odd address of a larger buffer are torn."""
    for rows, cols in ((33, 47), (128, 256), (264, 136)):
        width = ceil_div(cols * bits, 8)
        for offset in (1, 2, 4, 8):
            data = random_bytes(rows * width + 16)[offset : offset + rows * width].view(rows, width)
            if bits == 4 and cols % 2:
                data = data.clone()
                data[:, -1] &= 0xF
            want = layout.repack(data, bits, rows, cols)
            expected.assert_same(
                native.transpose_codes(data, rows, cols, bits),
                want,
                f"[{rows}, {cols}] at {offset}",
            )


def test_no_codes_are_transposed_to_none():
    """If false, a rank without rows of a parameter fails in a launch of no blocks."""
    for bits in (8, 4):
        empty = torch.empty(0, 48, dtype=torch.uint8, device=expected.DEVICE)
        assert native.transpose_codes(empty, 0, 48 * 8 // bits, bits).numel() == 0


# Swizzles #


@pytest.mark.parametrize("outer_block", [1, 16, 32])
@pytest.mark.parametrize("transposed", [False, True])
def test_swizzled_scales_are_those_of_the_layout(outer_block: int, transposed: bool):
    """If false, a tensor core multiplies a block by another block's scale."""
    for outer in (1, 31, 128, 129, 300, 1000, 2048):
        for blocks in (1, 3, 4, 5, 32, 130, 256):
            lines = ceil_div(outer, outer_block)
            scale = random_bytes(
                *((blocks, lines) if transposed else (lines, blocks)), seed=outer + blocks
            )
            rows = (scale.t() if transposed else scale).repeat_interleave(outer_block, 0)[:outer]
            got = native.swizzle_scales(scale, outer, outer_block, transposed)
            expected.assert_same(got, layout.swizzle_128x4(rows), f"{outer} rows, {blocks} blocks")
            expected.assert_same(
                layout.unswizzle_128x4(got, outer, blocks),
                rows,
                f"{outer} rows, {blocks} blocks, back",
            )


@pytest.mark.parametrize("outer_block", [1, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_spread_scales_are_those_of_the_layout(outer_block: int, transposed: bool):
    """If false, a product of Blackwell multiplies 128 elements by another block's scale."""
    for outer, blocks in itertools.product((1, 31, 128, 129, 300, 1000), (1, 3, 5, 130)):
        lines = ceil_div(outer, outer_block)
        scale = reference.power_of_two(random_bytes(lines, blocks, seed=outer + blocks))
        given = scale.t().contiguous() if transposed else scale
        got = native.swizzle_scales(given, outer, outer_block, transposed)
        want = layout.swizzle_128x4(layout.spread_scales(scale, outer, outer_block))
        expected.assert_same(got, want, f"{outer} rows, {blocks} blocks")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "nvfp4", "nvfp4_16x16"])
def test_storages_of_the_gpu_have_the_gemm_layouts_of_the_cpu(name: str):
    """If false, a plan that was tried on the CPU multiplies other operands on the GPU."""
    for arch in ("sm_90a", "sm_100f"):
        for shape in ((33, 47), (129, 257), (200, 328)):
            for e in expected.both(name):
                storage = Storage.of(encoded(inputs(*shape), e), e, shape, BF16)
                got, want = (
                    storage.to_gemm_operand(layout.NATIVE, arch=arch),
                    expected.gemm_operand(inputs(*shape), e, arch, None),
                )
                for field in ("data", "scale", "tensor_amax"):
                    if getattr(want, field) is not None:
                        text = f"{name} {e.direction} {shape} {arch} {field}"
                        expected.assert_same(getattr(got, field).cpu(), getattr(want, field), text)
                back = to_storage(got, arch=arch)
                expected.assert_same(
                    back.data, storage.data, f"{name} {e.direction} {shape} {arch} data, back"
                )
                expected.assert_same(
                    back.scale, storage.scale, f"{name} {e.direction} {shape} {arch} scale, back"
                )


# Groups #


def relayouts(count: int) -> list[tuple[int, Tensor, int, int, int, int, Tensor]]:
    """(kind, source, rows, cols, outer, outer block, wanted) of mixed shapes and kinds."""
    made = []
    shapes = ((33, 47), (128, 128), (1, 130), (130, 1), (200, 72), (7, 15), (129, 257))
    for i in range(count):
        kind, (rows, cols), outer_block = i % 4, shapes[i % 7], (1, 16, 32)[i % 3]
        if kind == native.TRANSPOSE_BYTES:
            source = random_bytes(rows, cols, seed=i)
            made.append((kind, source, rows, cols, 0, 1, source.t().contiguous()))
        elif kind == native.TRANSPOSE_NIBBLES:
            source = random_bytes(rows, ceil_div(cols, 2), seed=i)
            if cols % 2:
                source[:, -1] &= 0xF
            made.append((kind, source, rows, cols, 0, 1, layout.repack(source, 4, rows, cols)))
        else:
            turned = kind == native.SWIZZLE_TRANSPOSED
            source, lines = random_bytes(rows, cols, seed=i), cols if turned else rows
            outer = lines * outer_block - i % outer_block
            wanted = (source.t() if turned else source).repeat_interleave(outer_block, 0)[:outer]
            made.append(
                (kind, source, rows, cols, outer, outer_block, layout.swizzle_128x4(wanted))
            )
    return made


@pytest.mark.parametrize("count", [1, 5, 256, 257, 300])
def test_relayouts_of_a_group_are_those_of_its_tensors(count: int):
    """If false, one launch for all parameters of a layer writes some of them over others."""
    items, gap = relayouts(count), 48
    sizes = [-(-w.numel() // 16) * 16 for *_, w in items]
    flat = torch.full(
        (gap + sum(s + gap for s in sizes),), 0xA5, dtype=torch.uint8, device=expected.DEVICE
    )
    want, out, at = flat.clone(), [], gap
    for (*_, wanted), size in zip(items, sizes):
        out.append(flat[at : at + wanted.numel()])
        want[at : at + wanted.numel()] = wanted.reshape(-1)
        at += size + gap
    kinds, sources, rows, cols, outer, outer_block, _ = (list(of) for of in zip(*items))
    torch.ops.fsdp_quant.relayout_group(sources, out, kinds, rows, cols, outer, outer_block)
    for i, (o, (kind, *_, wanted)) in enumerate(zip(out, items)):
        expected.assert_same(o, wanted.reshape(-1), f"{count} items: item {i} of kind {kind}")
    expected.assert_same(flat, want, f"{count} items: bytes between them")


def test_relayouts_of_a_group_skip_empty_tensors():
    """If false, a rank without rows of one parameter cannot lay out the others."""
    source, empty = random_bytes(33, 48), torch.empty(0, dtype=torch.uint8, device=expected.DEVICE)
    out = torch.zeros(48 * 33, dtype=torch.uint8, device=expected.DEVICE)
    torch.ops.fsdp_quant.relayout_group(
        [empty, source, empty],
        [empty, out, empty],
        [0, 0, 1],
        [0, 33, 0],
        [48, 48, 48],
        [0, 0, 0],
        [1, 1, 1],
    )
    expected.assert_same(out.view(48, 33), source.t().contiguous(), "the one that is not empty")


# Errors, tracing #


def test_errors_of_layouts_say_what_was_got():
    """If false, a wrong argument reaches a kernel, or the caller cannot tell which one it was."""
    e, ops = MADE["mxfp8"].encoding(ROWWISE), torch.ops.fsdp_quant
    made = encoded(inputs(64, 96), e)

    def decode(data=made.data, scale=made.scale, tensor_amax=None, cols=96, dtype=BF16):
        return native.dequantize(data, scale, tensor_amax, e.fmt, ROWWISE, cols, 0, dtype)

    def group(kind=0, rows=64, cols=96, outer=0, outer_block=1, out=None):
        out = (
            torch.empty(64 * 96, dtype=torch.uint8, device=expected.DEVICE) if out is None else out
        )
        ops.relayout_group([made.data], [out], [kind], [rows], [cols], [outer], [outer_block])

    refused = {
        r"dtype is Double; wanted float32, bfloat16 or float16": lambda: decode(
            dtype=torch.float64
        ),
        r"data is contiguous Byte \[64, 96\].*wanted 6080 ": lambda: decode(cols=95),
        r"data is contiguous Char": lambda: decode(made.data.view(torch.int8)),
        r"data has shape \[6144\]; wanted \[rows, row bytes\]": lambda: decode(made.data.flatten()),
        r"data is not contiguous": lambda: decode(made.data[:, :48], cols=48),
        r"scale is contiguous Byte \[64, 2\].*wanted 192 ": lambda: decode(
            scale=made.scale[:, :2].contiguous()
        ),
        r"scale is contiguous Float": lambda: decode(scale=made.scale.float()),
        r"tensor_amax is contiguous Float \[2\].*wanted 1 ": lambda: decode(
            tensor_amax=torch.ones(2, device=made.data.device)
        ),
        r"bits is 6; codes have 8 or 4": lambda: native.transpose_codes(made.data, 64, 96, 6),
        r"source is contiguous Byte \[64, 96\].*wanted 6048 ": lambda: native.transpose_codes(
            made.data, 63, 96, 8
        ),
        r"source is contiguous Byte \[64, 96\].*wanted 3072 ": lambda: native.transpose_codes(
            made.data, 64, 96, 4
        ),
        r"scale has shape \[192\]; wanted \[block rows, block cols\]": lambda: (
            native.swizzle_scales(made.scale.flatten(), 64, 1, False)
        ),
        r"scales of 64 lines, 1 operand rows each, do not make 65 rows": lambda: (
            native.swizzle_scales(made.scale, 65, 1, False)
        ),
        r"scales of 3 lines, 32 operand rows each, do not make 64 rows": lambda: (
            native.swizzle_scales(made.scale, 64, 32, True)
        ),
        r"scales of 64 lines, 0 operand rows each": lambda: native.swizzle_scales(
            made.scale, 64, 0, False
        ),
        r"lists of different lengths": lambda: ops.relayout_group(
            [made.data], [], [0], [64], [96], [0], [1]
        ),
        r"kind is 4; wanted 0 to 3": lambda: group(4),
        r"source is contiguous Byte \[64, 96\].*wanted 6080 ": lambda: group(cols=95),
        r"out is contiguous Byte \[6144\].*wanted 12288 ": lambda: group(2, outer=64),
        r"out is contiguous Byte \[5\].*wanted 6144 ": lambda: group(
            out=torch.empty(5, dtype=torch.uint8, device=expected.DEVICE)
        ),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()
    expected.assert_same(
        native.transpose_codes(made.data, 64, 96, 8), made.data.t().contiguous(), "after the errors"
    )


@pytest.mark.skipif(not ON_CUDA, reason="needs two kinds of device")
def test_layouts_of_another_device_are_refused():
    """If false, a kernel reads an address of the CPU."""
    data, e = torch.zeros(64, 96, dtype=torch.uint8), MADE["mxfp8"].encoding(ROWWISE)
    with pytest.raises(NotImplementedError, match="CPU"):
        native.dequantize(data, None, None, e.fmt, ROWWISE, 96, 0, BF16)
    with pytest.raises(NotImplementedError, match="CPU"):
        native.transpose_codes(data, 64, 96, 8)
    with pytest.raises(NotImplementedError, match="CPU"):
        native.swizzle_scales(data, 64, 1, False)
    with pytest.raises(ValueError, match="scale is contiguous Byte .* on cpu; wanted .* on cuda"):
        native.dequantize(
            data.to(expected.DEVICE),
            torch.zeros(64, 3, dtype=torch.uint8),
            None,
            e.fmt,
            ROWWISE,
            96,
            0,
            BF16,
        )


def test_opcheck_finds_nothing_in_layouts():
    """If false, a schema or a fake does not say what an operator does."""
    ops, utils = torch.ops.fsdp_quant, ("test_schema", "test_faketensor")
    for name in ("fp8_row", "mxfp8", "nvfp4"):
        for d in Direction:
            e = MADE[name].encoding(d)
            made = encoded(inputs(33, 47), e)
            for row0, dtype in ((0, BF16), (0, FP32), (33, FP16)):
                cut = encoded(inputs(33, 47), e, row0=row0)
                args = (
                    cut.data,
                    cut.scale,
                    cut.tensor_amax,
                    native.pack_encoding(e),
                    d is COLUMNWISE,
                    47,
                    row0,
                    dtype,
                )
                torch.library.opcheck(ops.dequantize.default, args, test_utils=utils)
            bits = e.fmt.element.bits
            torch.library.opcheck(
                ops.transpose_codes.default, (made.data, 33, 47, bits), test_utils=utils
            )
    for outer, outer_block, turned in (
        (33, 1, False),
        (100, 16, False),
        (47, 1, True),
        (500, 16, True),
    ):
        lines = ceil_div(outer, outer_block)
        scale = random_bytes(*((3, lines) if turned else (lines, 3)))
        torch.library.opcheck(
            ops.swizzle_scales.default, (scale, outer, outer_block, turned), test_utils=utils
        )
    data = random_bytes(33, 47)
    args = ([data], [torch.empty_like(data)], [0], [33], [47], [0], [1])
    torch.library.opcheck(ops.relayout_group.default, args, test_utils=utils)

# SPDX-License-Identifier: Apache-2.0
"""The quantization operators as operators: given buffers, views, errors, streams, graphs, tracing,
repeated runs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, LARGE, MADE, encode, encoded, inputs, key_of
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding, format_of
from fsdp_quant.ops import dispatch, native, reference

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

ON_CUDA = expected.DEVICE.type == "cuda"

# Strides and sizes #


def views(rows: int, cols: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The shapes of memory that a tensor [rows, cols] may come in."""
    flat = inputs(1, rows * cols + 64, "heavy", dtype)[0]
    wide = inputs(rows, cols + 24, "heavy", dtype)
    return {
        "at an odd element": flat[1 : 1 + rows * cols].view(rows, cols),
        "at an even element": flat[2 : 2 + rows * cols].view(rows, cols),
        "columns from 3": wide[:, 3 : 3 + cols],
        "columns from 8": wide[:, 8 : 8 + cols],
        "every other row": inputs(2 * rows, cols, "heavy", dtype)[::2],
        "one row, repeated": inputs(1, cols, "heavy", dtype).expand(rows, cols),
        "one value, repeated": inputs(1, 1, "heavy", dtype).expand(rows, cols),
        "transposed": inputs(cols, rows, "heavy", dtype).t(),
        "every other column": inputs(rows, 2 * cols, "heavy", dtype)[:, ::2],
    }


@pytest.mark.parametrize(
    "name", ["fp8_tensor", "fp8_row", "fp8_128x128", "mxfp8", "mxfp8_sr", "nvfp4", "nvfp4_rht_sr"]
)
def test_views_are_quantized_as_their_values(name: str):
    """If false, a slice of a tensor is read from the wrong place, or cannot be read at all."""
    for dtype, seen in expected.INPUTS:
        for rows, cols in ((33, 47), (130, 256), (64, 264)):
            for what, x in views(rows, cols, dtype).items():
                what = f"{name} [{rows}, {cols}] {dtype} as {seen}, {what}"
                for e, got in zip(
                    expected.both(name), encode(x, expected.both(name), key=key_of(), dtype=seen)
                ):
                    want = encoded(
                        x.clone(memory_format=torch.contiguous_format), e, key=key_of(), dtype=seen
                    )
                    expected.assert_encoded(got, want, e, what)


HUGE = (66000, 33000)  # more than 2^31 elements


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU's memory")
def test_more_elements_than_32_bits_count():
    """If false, the end of a very large tensor is written over its beginning."""
    rows, cols = HUGE
    if torch.cuda.mem_get_info()[0] < 12 * rows * cols:
        pytest.skip(f"needs {12 * rows * cols >> 30} GiB of free GPU memory")
    x = torch.empty(rows, cols, dtype=BF16, device=expected.DEVICE)
    for start in range(0, rows, 3000):  # in pieces: a generator counts in 32 bits too
        x[start : start + 3000].normal_()
    x[-200:] *= 3
    row, col = expected.both("mxfp8")
    # The first, some in the middle, those that the 2^31st element is among, the last.
    row_starts = (0, rows // 2, min(2**31 // cols, rows) - 32, rows - 64)
    col_starts = (0, cols // 2, min(2**31 // rows, cols) - 32, cols - 64)
    row_slices, col_slices = (
        [slice(start, start + 64) for start in starts] for starts in (row_starts, col_starts)
    )

    ((data, scale, _, _),) = native.quantize(x, [row], 0, False, None, None, None)
    for some in row_slices:
        want = encoded(x[some], row)
        expected.assert_same(data[some], want.data, f"rowwise data {some}")
        expected.assert_same(scale[some], want.scale, f"rowwise scale {some}")
    values = native.dequantize(data, scale, None, row.fmt, ROWWISE, cols, 0, BF16)
    for some in row_slices:
        want = encoded(x[some], row)
        expected.assert_same_values(
            values[some],
            reference.decode(want.data, want.scale, None, row.fmt, ROWWISE, cols).to(BF16),
            f"decoded {some}",
        )
    del values
    turned = native.transpose_codes(data, rows, cols, 8)
    for some in col_slices:
        expected.assert_same(turned[some], data[:, some].t(), f"transposed {some}")
    del turned, data, scale
    ((turned, turned_scale, _, _),) = native.quantize(
        x, [col], 0, False, None, None, None, [True], native.HOPPER
    )
    ((data, scale, _, _),) = native.quantize(x, [col], 0, False, None, None, None)
    for some in col_slices:
        want = encoded(x[:, some], col)
        expected.assert_same(turned[some], want.data.t(), f"columnwise transposed data {some}")
        expected.assert_same(
            turned_scale.view(cols, -1)[some], want.scale.t(), f"columnwise transposed scale {some}"
        )
        expected.assert_same(data[:, some], want.data, f"columnwise data {some}")
        expected.assert_same(scale[:, some], want.scale, f"columnwise scale {some}")
    del turned, turned_scale, data, scale
    (stats,) = native.statistics(x, [MADE["fp8_row"].encoding(ROWWISE)], 0, False)
    for some in row_slices:
        expected.assert_same(
            stats[0][some], x[some].abs().amax(1, keepdim=True).float(), f"row amaxes {some}"
        )
    del x, stats
    gc.collect()
    torch.cuda.empty_cache()


# Determinism #


def poison() -> None:
    """Leave 0xFF in the memory that the next tensors are made of."""
    made = [
        torch.full((1 << bits,), 0xFF, dtype=torch.uint8, device=expected.DEVICE)
        for bits in (10, 15, 17, 19, 19, 22, 24)
    ]
    del made


@pytest.mark.parametrize("name", ["fp8_tensor", "mxfp8", "nvfp4_rht_sr"])
def test_the_same_input_gives_the_same_bytes(name: str):
    """If false, a kernel races, or reads memory that nobody wrote."""
    x = inputs(384, 512, "heavy")
    encodings = expected.both(name)
    want = [encoded(x, e, key=key_of()) for e in encodings]
    for i in range(200):
        poison()
        for e, got, w in zip(encodings, encode(x, encodings, key=key_of()), want):
            expected.assert_encoded(got, w, e, f"{name}, run {i}")


@pytest.mark.parametrize(
    "name", ["fp8_row", "nvfp4_16x16", "mxfp8_32x32", "fp8_128x128", "fp8_tensor_sr"]
)
def test_outputs_do_not_depend_on_the_memory_they_are_made_of(name: str):
    """If false, some byte of a result is never written."""
    for shape in ((33, 47), (129, 257), (384, 512)):
        x = inputs(*shape, "heavy")
        for e in expected.both(name):
            want = encoded(x, e, key=key_of())
            for _ in range(10):
                poison()
                (got,) = encode(x, [e], key=key_of())
                expected.assert_encoded(got, want, e, f"{name} {shape}")


def test_small_tensors_in_turn_share_a_barrier():
    """If false, the grid barrier of one launch lets another pass before its statistics are
    whole."""
    made = [
        (inputs(*shape, "heavy", seed=i), e)
        for i, shape in enumerate(((1, 1), (129, 257), (384, 512), (33, 1000)))
        for name in ("fp8_tensor", "nvfp4", "fp8_row")
        for e in expected.both(name)
    ]
    want = [encoded(x, e) for x, e in made]
    for _ in range(5):
        got = [encode(x, [e])[0] for x, e in made]  # enqueued one behind the other
        for (x, e), g, w in zip(made, got, want):
            expected.assert_encoded(g, w, e, f"{list(x.shape)}")


# Errors #


def encoding_of(name: str, direction: Direction = ROWWISE, **changes) -> Encoding:
    return Encoding(format_of(name, **changes), direction)


def run(x: Tensor, e: Encoding, row0: int = 0, stats=None, key=None, enc=None, **options):
    return native.quantize(x, [e], row0, False, stats, [key], [enc], **options)


def test_errors_of_quantize_say_what_was_got():
    """If false, a wrong argument reaches a kernel, or the caller cannot tell which one it was."""
    x, row = inputs(64, 96), encoding_of("mxfp8")
    one = torch.ones(1, device=expected.DEVICE)
    refused = {
        r"x is Double; quantize takes bfloat16, float16 and float32": lambda: run(x.double(), row),
        r"x is Int; quantize takes": lambda: run(x.int(), row),
        r"x has shape \[64\]; quantize takes \[rows, cols\]": lambda: run(
            x[:, 0].contiguous(), row
        ),
        r"x has shape \[1, 64, 96\]": lambda: run(x[None], row),
        r"x is empty: \[0, 96\]": lambda: run(x[:0], row),
        r"row0 is -1": lambda: run(x, row, -1),
        r"amax is contiguous Float \[5\].*wanted 192 contiguous elements of Float": lambda: run(
            x, row, stats=[(torch.ones(5, device=x.device), None)]
        ),
        r"amax is contiguous BFloat16 \[64, 3\].*wanted 192": lambda: run(
            x, row, stats=[(torch.ones(64, 3, dtype=BF16, device=x.device), None)]
        ),
        r"amax is not contiguous Float \[64, 3\]": lambda: run(
            x, row, stats=[(torch.ones(3, 64, device=x.device).t(), None)]
        ),
        r"tensor_amax is contiguous Float \[2\].*wanted 1 ": lambda: run(
            x, encoding_of("nvfp4"), stats=[(None, torch.ones(2, device=x.device))]
        ),
        r"enc is contiguous Float \[3\].*wanted 1 ": lambda: run(
            x, encoding_of("fp8_tensor"), enc=torch.ones(3, device=x.device)
        ),
        r"enc \(delayed scaling\) goes with one scale a tensor": lambda: run(x, row, enc=one),
        r"key is contiguous Long \[4\].*wanted 5 ": lambda: run(
            x,
            MADE["mxfp8_sr"].encoding(ROWWISE),
            key=torch.zeros(4, dtype=torch.int64, device=x.device),
        ),
        r"key is contiguous Int \[5\]": lambda: run(
            x,
            MADE["mxfp8_sr"].encoding(ROWWISE),
            key=torch.zeros(5, dtype=torch.int32, device=x.device),
        ),
        r"stochastic rounding needs a random key, got None": lambda: run(
            x, MADE["mxfp8_sr"].encoding(ROWWISE)
        ),
        r"row has blocks of \(1, 64\) with scale kind 2: no kernel": lambda: run(
            x, encoding_of("mxfp8", block=(1, 64))
        ),
        r"col has blocks of \(2, 32\) with scale kind 2: no kernel": lambda: run(
            x, encoding_of("mxfp8", COLUMNWISE, block=(2, 32))
        ),
        r"row has blocks of \(1, 32\) with scale kind 0: no kernel": lambda: run(
            x, encoding_of("fp8_row", block=(1, 32))
        ),
        r"row: 4-bit elements go with two-level scales": lambda: run(
            x, encoding_of("nvfp4", scale="e8m0", tensor_scale=False)
        ),
        r"row: rotation is for 4-bit blocks of one line": lambda: run(
            x, encoding_of("mxfp8", rotated=True)
        ),
        r"a shard from row 5 has compact storages": lambda: run(
            x, encoding_of("mxfp8", COLUMNWISE), 5, transposed=[True]
        ),
        r"a shard from row 16 has compact storages": lambda: run(
            x, MADE["nvfp4_rht"].encoding(COLUMNWISE), 16
        ),
        r"rowwise codes are not transposed": lambda: run(x, row, transposed=[True]),
    }
    if ON_CUDA:
        refused[
            r"amax is contiguous Float \[64, 3\] on cpu; "
            "wanted 192 contiguous elements of Float on cuda"
        ] = lambda: run(x, row, stats=[(torch.ones(64, 3), None)])
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()
    expected.assert_encoded(run(x, row)[0], encoded(x, row), row, "after the errors")


@pytest.mark.skipif(not ON_CUDA, reason="needs two kinds of device")
def test_a_tensor_of_another_device_is_refused():
    """If false, a kernel reads an address of the CPU."""
    x, row = inputs(64, 96).cpu(), encoding_of("mxfp8")
    with pytest.raises(NotImplementedError, match="CPU"):
        run(x, row)
    with pytest.raises(NotImplementedError, match="CPU"):
        native.statistics(x, [row], 0, False)
    assert not native.is_available_for(x)


def test_errors_of_statistics_and_of_anchors_say_what_was_got():
    """If false, a wrong argument reaches a kernel, or the caller cannot tell which one it was."""
    x, row = inputs(64, 96), encoding_of("mxfp8")
    refused = {
        r"x is Double; quantize takes": lambda: native.statistics(x.double(), [row], 0, False),
        r"x has shape \[64\]": lambda: native.statistics(x[:, 0].contiguous(), [row], 0, False),
        r"row has blocks of \(1, 64\)": lambda: native.statistics(
            x, [encoding_of("mxfp8", block=(1, 64))], 0, False
        ),
        r"x has shape \[96\]; quantize takes": lambda: native.quantize_anchored(
            x[0], [row], [None]
        ),
        r"x is Long; quantize takes": lambda: native.quantize_anchored(x.long(), [row], [None]),
        r"x is Half; anchored codes are made of bfloat16": lambda: native.quantize_anchored(
            x.half(), [row], [None]
        ),
        r"x is Float; anchored codes are made of bfloat16": lambda: native.quantize_anchored(
            x.float(), [row], [None]
        ),
        r"anchors take the place of e8m0 scales that are rounded up": lambda: (
            native.quantize_anchored(x, [encoding_of("fp8_row")], [None])
        ),
        r"e8m0 scales that are rounded up": lambda: native.quantize_anchored(
            x, [encoding_of("mxfp8", scale_rounding="floor")], [None]
        ),
        r"anchors are of \(1, 32\) blocks; got \(32, 32\)": lambda: native.quantize_anchored(
            x, [encoding_of("mxfp8_32x32")], [None]
        ),
        r"is 100; wanted 0 \(the whole contraction\)": lambda: native.quantize_anchored(
            x, [row], [100]
        ),
        r"make them in two calls": lambda: native.quantize_anchored(
            x, expected.both("mxfp8"), [native.OF_TENSOR, None]
        ),
        r"is 384; wanted 0 \(the whole contraction\), a power of two": lambda: (
            native.quantize_anchored(x, [row], [384])
        ),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()


# Streams, graphs, tracing #

CAPTURED = ("mxfp8", "fp8_tensor", "fp8_row", "nvfp4", "nvfp4_rht_sr", "fp8_tensor_sr")


@pytest.mark.skipif(not ON_CUDA, reason="needs CUDA graphs")
@pytest.mark.parametrize("shape", [(129, 257), (384, 512), LARGE], ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_encoding_sees_new_values(name: str, shape: tuple[int, int]):
    """If false, a CUDA graph replays the statistics, or the random bits, of the step it was
    captured in."""
    x, key, encodings = inputs(*shape), key_of(), expected.both(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        encode(x, encodings, key=key)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = encode(x, encodings, key=key)
    for step in range(3):
        x.copy_(inputs(*shape, ("heavy", "tiny", "inf")[step], seed=step))
        key.copy_(key_of(seed=step + 11))
        graph.replay()
        torch.cuda.synchronize()
        for e, got in zip(encodings, made):
            expected.assert_encoded(
                got, encoded(x, e, key=key), e, f"{name} {shape}, replay {step}"
            )


@pytest.mark.skipif(not ON_CUDA, reason="needs CUDA graphs")
def test_a_captured_history_sees_new_factors():
    """If false, a CUDA graph scales every step by the factor of the one it was captured in."""
    x, enc = inputs(384, 512), torch.zeros(1, device=expected.DEVICE)
    encodings = expected.both("fp8_tensor")
    encode(x, encodings, encs=[enc, enc])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = encode(x, encodings, encs=[enc, enc])
    for step, factor in enumerate((0.0, 2.5, 0.25, 0.0)):
        x.copy_(inputs(384, 512, "heavy", seed=step))
        enc.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        for e, got in zip(encodings, made):
            expected.assert_encoded(
                got, encoded(x, e, enc=enc), e, f"replay {step} with factor {factor}"
            )


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
def test_no_operator_waits_for_the_device():
    """If false, every quantization stalls the host, and training with it."""
    x, key, enc = inputs(384, 512), key_of(), torch.ones(1, device=expected.DEVICE)
    big = inputs(*LARGE)
    made = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name in MADE:
            for values in (x, big):
                made += encode(values, expected.both(name), key=key)
                dispatch.statistics(values, expected.both(name))
        made += encode(x, expected.both("fp8_tensor"), encs=[enc, enc])
        for e, m in zip(expected.both("mxfp8"), encode(x, expected.both("mxfp8"))):
            native.dequantize(m.data, m.scale, None, e.fmt, e.direction, 512, 0, BF16)
            native.transpose_codes(m.data, 384, 512, 8)
            native.swizzle_scales(
                m.scale, 384 if e.direction is ROWWISE else 512, 1, e.direction is COLUMNWISE
            )
        native.quantize_anchored(x, expected.both("mxfp8"), [None, 512])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.skipif(not ON_CUDA, reason="needs CUDA streams")
@pytest.mark.parametrize("name", ["mxfp8", "fp8_tensor", "nvfp4_rht_sr"])
def test_the_current_stream_is_used(name: str):
    """If false, a kernel on another stream reads its input before it was written."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    encodings = expected.both(name)
    for shape in ((384, 512), LARGE):
        sources = [inputs(*shape, "heavy", seed=i) for i in range(3)]
        torch.cuda.synchronize()
        made = []
        for source, stream in zip(sources, streams):
            with torch.cuda.stream(stream):
                x = torch.full_like(source, 1e4)
                torch.cuda._sleep(2_000_000)  # the input is written late
                x.copy_(source)
                made.append(encode(x, encodings, key=key_of()))
        torch.cuda.synchronize()
        for source, got in zip(sources, made):
            for e, g in zip(encodings, got):
                expected.assert_encoded(
                    g, encoded(source, e, key=key_of()), e, f"{name} {shape} on a stream of its own"
                )


def check_fake(op, args: tuple, kwargs: dict | None = None) -> None:
    """The schema holds, results have memory of their own, and fakes have their shapes, dtypes and
    strides."""
    kwargs = kwargs or {}
    torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    real = op(*args, **kwargs)
    mode = FakeTensorMode()
    as_fake = [tree_map_only(Tensor, mode.from_tensor, part) for part in (args, kwargs)]
    with mode:
        fake = op(*as_fake[0], **as_fake[1])
    real, fake = ([made] if isinstance(made, Tensor) else list(made or ()) for made in (real, fake))
    assert len(fake) == len(real), f"{op}: {len(fake)} fake results, {len(real)} real ones"
    for i, (f, r) in enumerate(zip(fake, real)):
        got, want = [(list(t.shape), t.stride(), t.dtype, t.device) for t in (f, r)]
        assert got == want, f"{op}: result {i} is {want}, its fake {got}"
    memory = [t.untyped_storage().data_ptr() for t in real if t.numel()]
    assert len(set(memory)) == len(memory), f"{op}: results share memory"


@pytest.mark.parametrize("name", list(MADE))
def test_fake_results_have_the_shapes_of_real_ones(name: str):
    """If false, torch.compile plans for other buffers than the operators make."""
    x, (row, col), ops = inputs(33, 47), expected.both(name), torch.ops.fsdp_quant
    keys = {"row_key": key_of(), "col_key": key_of()}
    for row_side, col_side in ((row, None), (None, col), (row, col)):
        sides = expected.packed(row_side), expected.packed(col_side)
        check_fake(ops.quantize.default, (x, *sides, 0.0, 0.0, 0, False), keys)
        check_fake(ops.statistics.default, (x, *sides, 0, False))
        if all(e is None or expected.encodable(e, 33) for e in (row_side, col_side)):
            check_fake(ops.statistics.default, (x, *sides, 33, False))
            check_fake(ops.quantize.default, (x, *sides, 0.0, 0.0, 33, False), keys)
    packed_in_six = 6 in (row.fmt.bits, col.fmt.bits)  # compact alone
    for layout in () if packed_in_six else (native.HOPPER, native.BLACKWELL):
        for shape in ((33, 47), (129, 257)):
            sides = expected.packed(row, False, layout), expected.packed(col, True, layout)
            check_fake(ops.quantize.default, (inputs(*shape), *sides, 0.0, 0.0, 0, False), keys)


def test_fake_results_of_the_other_operators_have_the_shapes_of_real_ones():
    """If false, torch.compile plans for other buffers than the operators make."""
    x, (row, col), ops = inputs(200, 328), expected.both("mxfp8"), torch.ops.fsdp_quant
    sides = expected.packed(row), expected.packed(col)
    for runs in ((0, 0), (128, 512)):
        check_fake(ops.quantize_anchored.default, (x, *sides, *runs, None, None, False))
    check_fake(ops.quantize_anchored.default, (x, sides[0], 0, 128, 0, None, None, False))
    check_fake(
        ops.quantize_anchored.default,
        (x, *sides, native.OF_TENSOR, native.OF_TENSOR, None, None, False),
    )
    check_fake(ops.column_sums.default, (x,))


def test_opcheck_finds_nothing_where_results_share_no_memory():
    """If false, a schema or a fake does not say what an operator does."""
    x, ops, utils = inputs(33, 47), torch.ops.fsdp_quant, ("test_schema", "test_faketensor")
    for name in ("fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4"):
        for e in expected.both(name):
            sides = [expected.packed(e if e.direction is d else None) for d in Direction]
            torch.library.opcheck(
                ops.quantize.default, (x, *sides, 0.0, 0.0, 0, False), test_utils=utils
            )
            torch.library.opcheck(ops.statistics.default, (x, *sides, 0, False), test_utils=utils)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "nvfp4"])
def test_results_do_not_alias_given_statistics(name: str):
    """If false, an operator returns its own input, which torch.compile takes for a new tensor."""
    x, row = inputs(33, 47), MADE[name].encoding(ROWWISE)
    amax, tensor_amax = expected.statistics(x, row)
    args, given = (
        (x, expected.packed(row), 0, 0.0, 0.0, 0, False),
        {"row_amax": amax, "row_tensor_amax": tensor_amax},
    )
    torch.library.opcheck(
        torch.ops.fsdp_quant.quantize.default, args, given, test_utils=("test_schema",)
    )

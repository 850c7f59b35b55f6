# SPDX-License-Identifier: Apache-2.0
"""The quantization kernels give the bytes of the reference: codes, scales, statistics, layouts,
anchored operands."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels.expected import (
    BF16,
    FP32,
    LARGE,
    MADE,
    QUANTIZED,
    SHAPES,
    encode,
    encoded,
    inputs,
    key_of,
)
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding, ceil_div, format_of
from fsdp_quant.ops import anchoring, dispatch, native, reference

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

ON_CUDA = expected.DEVICE.type == "cuda"
ARCHS = {"sm_90a": native.HOPPER, "sm_100f": native.BLACKWELL}


def assert_encodes(x: Tensor, encodings: list[Encoding], what: str, **options) -> None:
    """Every encoding alone, and all of them in one call, are the reference's."""
    want = [encoded(x, e, **options) for e in encodings]
    key, dtype = options.get("key"), options.get("dtype")
    for e, w in zip(encodings, want):
        expected.assert_encoded(encode(x, [e], key=key, dtype=dtype)[0], w, e, f"{what}, alone")
    for e, g, w in zip(encodings, encode(x, encodings, key=key, dtype=dtype), want):
        expected.assert_encoded(g, w, e, f"{what}, both directions")


# Codes and scales #


@pytest.mark.parametrize("name", list(MADE))
def test_codes_and_scales_are_the_references(name: str):
    """If false, a model quantizes to other bytes with the kernels than without them."""
    for what, x, dtype in expected.cases():
        assert_encodes(x, expected.both(name), f"{name} {what}", key=key_of(), dtype=dtype)


@pytest.mark.parametrize("name", list(MADE))
def test_codes_and_scales_of_special_values_are_the_references(name: str):
    """If false, a zero, a subnormal or an overflow is another number, or hidden, where the kernels
    run."""
    for what, x, dtype in expected.special_cases():
        assert_encodes(x, expected.both(name), f"{name} {what}", key=key_of(), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_formats_in_one_call_are_the_references(shape: tuple[int, int]):
    """If false, a hybrid quantizer's one read of a tensor mixes its two directions up."""
    for i, (dtype, seen) in enumerate(expected.INPUTS):
        x = inputs(*shape, expected.KINDS[i % 4], dtype, seed=i)
        encodings = {(n, d): MADE[n].encoding(d) for n in QUANTIZED for d in Direction}
        want = {at: encoded(x, e, dtype=seen) for at, e in encodings.items()}
        for row in QUANTIZED:
            for col in QUANTIZED:
                pair = [(row, ROWWISE), (col, COLUMNWISE)]
                got = encode(x, [encodings[at] for at in pair], dtype=seen)
                for at, g in zip(pair, got):
                    expected.assert_encoded(
                        g, want[at], encodings[at], f"{row} / {col} {shape} {dtype} as {seen}"
                    )


@pytest.mark.parametrize(
    "row", ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "nvfp4_sr", "nvfp4_rht", "nvfp4_rht_sr"]
)
def test_rounding_and_rotation_of_one_direction_leave_the_other_alone(row: str):
    """If false, a hybrid of a rounded or rotated direction and a plain one gives other bytes than
    the two alone."""
    for shape in ((33, 47), (200, 328)):
        for dtype, seen in ((BF16, None), (FP32, None), (FP32, BF16)):
            x = inputs(*shape, "outliers", dtype, seed=shape[0])
            for col in (
                "fp8_tensor_sr",
                "mxfp8_sr",
                "mxfp8",
                "nvfp4_sr",
                "nvfp4_rht",
                "nvfp4_rht_sr",
                "nvfp4_16x16_sr",
            ):
                what = f"{row} / {col} {shape} {dtype} as {seen}"
                pair = [MADE[row].encoding(ROWWISE), MADE[col].encoding(COLUMNWISE)]
                assert_encodes(x, pair, what, key=key_of(), dtype=seen)
                assert_encodes(
                    x,
                    [MADE[col].encoding(ROWWISE), MADE[row].encoding(COLUMNWISE)],
                    what,
                    key=key_of(),
                    dtype=seen,
                )


@pytest.mark.parametrize("dtype", expected.INPUTS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "fp8_tensor",
        "fp8_row",
        "nvfp4",
        "nvfp4_16x16",
        "nvfp4_rht",
        "nvfp4_rht_sr",
        "fp8_tensor_sr",
        "mxfp8",
    ],
)
def test_statistics_in_a_launch_of_their_own_give_the_same_bytes(name: str, dtype: tuple):
    """If false, a tensor of more tiles than the GPU has multiprocessors is quantized from other
    statistics."""
    for kind in ("heavy", "both"):
        x = inputs(*LARGE, kind, dtype[0])
        assert_encodes(
            x, expected.both(name), f"{name} {kind} {LARGE} {dtype}", key=key_of(), dtype=dtype[1]
        )


@pytest.mark.parametrize(
    "pair",
    [("fp8_tensor", "nvfp4"), ("nvfp4", "fp8_row"), ("fp8_row", "nvfp4_rht"), ("mxfp8", "nvfp4")],
)
def test_statistics_of_two_widths_give_the_same_bytes(pair: tuple[str, str]):
    """If false, a large hybrid of 8 and 4 bits takes its statistics from the wrong direction."""
    x = inputs(*LARGE, "outliers")
    encodings = [MADE[name].encoding(d) for name, d in zip(pair, Direction)]
    for e, g in zip(encodings, encode(x, encodings)):
        expected.assert_encoded(g, encoded(x, e), e, f"{pair} {LARGE}")


def check_blocks_of_other_sizes() -> None:
    """Blocks that no row of the format table has, but a kernel says it takes."""
    for name, block in (
        ("mxfp8", (1, 16)),
        ("mxfp8", (16, 16)),
        ("nvfp4", (1, 32)),
        ("nvfp4", (32, 32)),
    ):
        fmt = format_of(name, block=block)
        if native.unsupported_reason(fmt) is not None:
            continue
        for shape in ((33, 47), (129, 257), (512, 640)):
            for dtype in (BF16, FP32):
                x, sides = inputs(*shape, "heavy", dtype), [Encoding(fmt, d) for d in Direction]
                assert_encodes(x, sides, f"{name} {block} {shape} {dtype}")
                for other in ("mxfp8", "nvfp4", "fp8_row", "fp8_1x128"):
                    assert_encodes(
                        x,
                        [sides[0], MADE[other].encoding(COLUMNWISE)],
                        f"{name} {block} / {other} {shape} {dtype}",
                    )
                    assert_encodes(
                        x,
                        [MADE[other].encoding(ROWWISE), sides[1]],
                        f"{other} / {name} {block} {shape} {dtype}",
                    )


def test_blocks_of_other_sizes_are_the_references():
    """If false, a format of one's own is quantized by the kernel of another element, or over memory
    that is not its own.

    In a process of its own: an access out of bounds would leave no GPU to the tests that follow.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_blocks_of_other_sizes).result(timeout=300)


def test_an_encoding_of_a_tensor_is_counted_as_native():
    """If false, the report of what really ran says that the reference stood in, or hides it."""
    counters.reset()
    encode(inputs(33, 47), expected.both("mxfp8"))
    assert counters.of("quantize") == {("mxfp8", d.value, "native"): 1 for d in Direction}


# Statistics #

ROW0 = (0, 1, 16, 31, 33, 100, 128, 160)


@pytest.mark.parametrize("name", list(MADE))
def test_statistics_are_the_references(name: str):
    """If false, the ranks that share statistics agree on scales that no whole tensor would have."""
    for row0 in ROW0:
        for i, (rows, cols) in enumerate(((150, 200), (1, 33), (129, 257))):
            dtype, seen = expected.INPUTS[(row0 + i) % 4]
            x = inputs(rows, cols, ("gauss", "both", "outliers")[i], dtype, seed=row0)
            encodings = [e for e in expected.both(name) if expected.encodable(e, row0)]
            for some in [[e] for e in encodings] + [encodings]:
                for e, got in zip(some, dispatch.statistics(x, some, row0, seen)):
                    what = f"{name} {e.direction} [{rows}, {cols}] row0 {row0} {dtype} as {seen}"
                    what += f", {len(some)} directions"
                    expected.assert_statistics(got, expected.statistics(x, e, row0, seen), what)


@pytest.mark.parametrize(
    "pair", [("fp8_row", "nvfp4"), ("nvfp4_16x16", "mxfp8"), ("fp8_tensor", "fp8_1x128")]
)
def test_statistics_of_two_formats_are_the_references(pair: tuple[str, str]):
    """If false, one read of a weight for two formats gives one of them the other's amaxes."""
    for row0 in ROW0:
        x = inputs(150, 200, "heavy", seed=row0)
        encodings = [MADE[name].encoding(d) for name, d in zip(pair, Direction)]
        for e, got in zip(encodings, dispatch.statistics(x, encodings, row0)):
            expected.assert_statistics(
                got, expected.statistics(x, e, row0), f"{pair} {e.direction} row0 {row0}"
            )


@pytest.mark.parametrize("name", list(MADE))
def test_codes_from_given_statistics_are_the_references(name: str):
    """If false, a rank's shard is scaled by its own amaxes instead of those that it shares."""
    for row0 in ROW0:
        for i, (rows, cols) in enumerate(((150, 200), (1, 33), (129, 257))):
            dtype, seen = expected.INPUTS[(row0 + i) % 4]
            x = inputs(rows, cols, ("gauss", "nan", "outliers")[i], dtype, seed=row0)
            encodings = [e for e in expected.both(name) if expected.encodable(e, row0)]
            own = [expected.statistics(x, e, row0, seen) for e in encodings]
            # as of a larger tensor
            stats = [dispatch.Statistics(a * 1.7, None if t is None else t * 2.3) for a, t in own]
            key = key_of(row0)
            want = [
                encoded(x, e, row0=row0, stats=s, key=key, dtype=seen)
                for e, s in zip(encodings, stats)
            ]
            for which in [[j] for j in range(len(encodings))] + [list(range(len(encodings)))]:
                some = [encodings[j] for j in which]
                got = encode(
                    x, some, row0=row0, stats=[stats[j] for j in which], key=key, dtype=seen
                )
                for j, g in zip(which, got):
                    what = f"{name} [{rows}, {cols}] row0 {row0} {dtype} as {seen}"
                    what += f", {len(some)} directions"
                    expected.assert_encoded(g, want[j], encodings[j], what)


@pytest.mark.parametrize("rows", [1, 33, 1024, 5000])
def test_amaxes_of_rows_serve_a_scale_of_the_whole(rows: int):
    """If false, a compiled graph scales by another amax than the largest, or hides a NaN."""
    encodings = expected.both("fp8_tensor")
    for kind in ("gauss", "nan", "outliers"):
        x = inputs(rows, 48, kind, BF16, seed=rows)
        of_rows = dispatch.Statistics(x.abs().amax(1, keepdim=True).float(), None)
        alike = of_rows, dispatch.Statistics(of_rows.amax.clone(), None)
        for stats in ([of_rows, of_rows], alike):  # one tensor, or two
            for e, g in zip(encodings, encode(x, encodings, stats=stats)):
                got = g._replace(amax=reference.of_all_parts(g.amax, e.fmt))
                expected.assert_encoded(got, encoded(x, e), e, f"{kind} [{rows}, 48] {e.direction}")


PARTS_WITH = (
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_tensor", None),
    (None, "fp8_tensor_e5m2_sr"),
    ("fp8_tensor_e5m2_sr", "fp8_tensor"),
    ("fp8_tensor", "mxfp8"),
    ("nvfp4", "fp8_tensor"),
)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("names", PARTS_WITH, ids=str)
def test_blocks_that_wait_for_the_amax_of_parts_read_it(names: tuple, dtype: torch.dtype):
    """If false, blocks scale by what memory held before: more of them than run at once, in a graph
    that is replayed on other values, or in a launch of one direction after that of the other."""
    encodings = [MADE[n].encoding(d) for n, d in zip(names, Direction) if n is not None]
    rows, cols = 4001, 2056
    x = torch.empty(rows, cols, dtype=dtype, device=expected.DEVICE)
    parts, key = torch.empty(rows, 1, device=expected.DEVICE), key_of()

    def run() -> list:
        given = [
            dispatch.Statistics(parts, None) if e.fmt.block == (None, None) else None
            for e in encodings
        ]
        return encode(x, encodings, stats=given, key=key)

    def check(made: list, kind: str, what: str) -> None:
        for e, got in zip(encodings, made):
            got = got._replace(amax=parts.amax().view(1, 1)) if e.fmt.block[0] is None else got
            expected.assert_encoded(got, encoded(x, e, key=key), e, f"{kind}, {what}")

    def fill(kind: str) -> None:
        x.copy_(inputs(rows, cols, kind, dtype, seed=len(kind)))
        parts.copy_(x.abs().amax(1, keepdim=True))

    fill("gauss")
    # nvfp4 has statistics and an encoding of its own
    assert expected.launches(run) == (3 if "nvfp4" in names else 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for kind in ("gauss", "outliers", "nan", "zeros", "inf", "tiny"):
        fill(kind)
        for _ in range(3):  # workspaces that hold other bits
            torch.full((1 << 16,), -1, device=expected.DEVICE)
            check(run(), kind, "alone")
        graph.replay()
        graph.replay()
        check(captured, kind, "captured")


def shard_statistics(
    whole: dispatch.Statistics, e: Encoding, start: int, stop: int
) -> dispatch.Statistics:
    """The amaxes of the blocks that rows [start, stop) overlap."""
    b0 = e.fmt.dims(e.direction)[0]
    amax = whole.amax if b0 is None else whole.amax[start // b0 : ceil_div(stop, b0)].contiguous()
    of_rows = e.fmt.has_row_scales and e.direction is ROWWISE
    return dispatch.Statistics(
        amax, whole.tensor_amax[start:stop] if of_rows else whole.tensor_amax
    )


@pytest.mark.parametrize("name", list(MADE))
def test_shards_with_shared_statistics_are_the_whole(name: str):
    """If false, sharded and unsharded training differ in bytes."""
    rows, cols = 421, 136
    for dtype, seen in ((BF16, None), (FP32, BF16), (FP32, None)):
        whole = inputs(rows, cols, "heavy", dtype)
        for e in expected.both(name):
            stats = expected.statistics(whole, e, dtype=seen)
            want = encoded(whole, e, stats=stats, key=key_of(), dtype=seen)
            mixes = e.fmt.rotated and e.direction is COLUMNWISE
            bounds = (0, 128, 256) if mixes else (0, 1, 17, 33, 100, 128, 160, 291)
            bounds = (*sorted({expected.cut(e, b) for b in bounds}), rows)
            pieces = []
            for start, stop in zip(bounds, bounds[1:]):
                x, given = whole[start:stop], shard_statistics(stats, e, start, stop)
                what = f"{name} rows [{start}, {stop}) of {rows}, {dtype} as {seen}"
                (got,) = encode(x, [e], row0=start, stats=[given], key=key_of(start), dtype=seen)
                expected.assert_encoded(
                    got,
                    encoded(x, e, row0=start, stats=given, key=key_of(start), dtype=seen),
                    e,
                    what,
                )
                pieces.append(got.data)
            expected.assert_same(
                torch.cat(pieces), want.data, f"{name} {e.direction} {dtype} as {seen}, all shards"
            )


# Stochastic rounding #


@pytest.mark.parametrize("name", [n for n, q in MADE.items() if q.is_stochastic])
def test_random_bits_are_those_of_the_global_element(name: str):
    """If false, what is rounded up depends on how a tensor was cut, and recomputation changes
    gradients."""
    for row0 in (0, 5, 8, 16, 123, 2**31 + 7):
        for shape in ((33, 47), (200, 136), (128, 128)):
            for dtype, seen in ((BF16, None), (FP32, None)):
                key = key_of(row0 + (row0 % 1000 * 16 << 40), seed=row0 + 1)
                x = inputs(*shape, "heavy", dtype, seed=shape[0])
                assert_encodes(
                    x,
                    expected.both(name),
                    f"{name} {shape} {dtype} key of {key[4]}",
                    key=key,
                    dtype=seen,
                )


def test_random_bits_depend_on_every_field_of_the_key():
    """If false, two tensors, steps or micro-batches share their rounding errors."""
    x, base = inputs(96, 96, "heavy"), [2**40 + 3, 7, 11, 13, 17]
    for e in expected.both("nvfp4_sr"):
        made = []
        for field in range(6):
            values = [
                v + (i == field) * (16 if i == 4 else 2**31 if i == 0 else 1)
                for i, v in enumerate(base)
            ]
            key = torch.tensor(values, device=expected.DEVICE)
            (got,) = encode(x, [e], key=key)
            expected.assert_encoded(got, encoded(x, e, key=key), e, f"key {values}")
            made.append(got.data)
        for field, data in enumerate(made[:5]):
            assert not torch.equal(data, made[5]), (
                f"{e.direction}: field {field} of the key changes nothing"
            )


# Delayed scaling #

DELAYED = ("fp8_tensor", "fp8_tensor_e5m2", "fp8_tensor_pow2", "fp8_tensor_eps", "fp8_tensor_sr")
FACTORS = ((0.0, 0.0), (3.7, 0.0), (0.0, 1e-3), (0.37, 120.0))


@pytest.mark.parametrize("name", DELAYED)
def test_codes_with_a_history_are_the_references(name: str):
    """If false, delayed scaling scales by another step's amax, or does not see an overflow."""
    for i, (shape, kind) in enumerate(
        (s, k) for s in ((1, 1), (33, 47), (129, 257), LARGE) for k in ("gauss", "inf", "nan")
    ):
        dtype, seen = expected.INPUTS[i % 4]
        x = inputs(*shape, kind, dtype, seed=i)
        encodings = expected.both(name)
        for factors in FACTORS:
            encs = [torch.tensor([f], device=expected.DEVICE) for f in factors]
            what = f"{name} {shape} {kind} {dtype} as {seen}, factors {factors}"
            want = [
                encoded(x, e, key=key_of(), enc=enc, dtype=seen) for e, enc in zip(encodings, encs)
            ]
            for e, g, w in zip(
                encodings, encode(x, encodings, key=key_of(), encs=encs, dtype=seen), want
            ):
                expected.assert_encoded(g, w, e, f"{what}, both directions")
            for e, enc, w in zip(encodings, encs, want):
                (got,) = encode(x, [e], key=key_of(), encs=[enc], dtype=seen)
                expected.assert_encoded(got, w, e, f"{what}, alone")


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2", "fp8_tensor_pow2"])
def test_one_read_with_a_history_serves_both_directions(name: str):
    """If false, codes of delayed scaling are not those of its two directions, or their amax is of a
    part of the tensor."""
    row, col = expected.both(name)
    for i, (shape, kind) in enumerate(
        (s, k) for s in ((33, 47), (1000, 72), LARGE) for k in ("gauss", "inf", "nan")
    ):
        dtype, seen = expected.INPUTS[i % 4]
        x = inputs(*shape, kind, dtype, seed=i)
        for factor in (0.0, 3.7):
            enc = torch.tensor([factor], device=expected.DEVICE)
            amax = reference.statistics(reference.prepared(expected.seen(x, seen), row), row)[0]
            for given in (None, (amax, None)):
                made = native.quantize(
                    x,
                    [row, col],
                    0,
                    seen is BF16,
                    given and [given] * 2,
                    None,
                    [enc] * 2,
                    [False, True],
                )
                for e, (data, scale, _, found), turned in zip((row, col), made, (False, True)):
                    got = dispatch.Encoded(
                        data.t().contiguous() if turned else data, scale, None, found
                    )
                    what = f"{name} {e.direction} {shape} {kind} {dtype} as {seen}"
                    what += f", factor {factor}, amax given {given is not None}"
                    expected.assert_encoded(got, encoded(x, e, enc=enc, dtype=seen), e, what)


@pytest.mark.parametrize(
    "other", ["fp8_row", "mxfp8", "mxfp8_sr", "nvfp4", "nvfp4_rht_sr", "fp8_128x128"]
)
def test_a_history_of_one_direction_leaves_the_other_alone(other: str):
    """If false, a hybrid of delayed and current scaling scales one direction by the other's
    factor."""
    for shape in ((129, 257), LARGE):
        x = inputs(*shape, "outliers")
        for factor in (0.0, 0.37):
            enc = torch.tensor([factor], device=expected.DEVICE)
            for d, o in (Direction, reversed(Direction)):
                encodings, encs = (
                    [MADE["fp8_tensor"].encoding(d), MADE[other].encoding(o)],
                    [enc, None],
                )
                for e, c, g in zip(encodings, encs, encode(x, encodings, key=key_of(), encs=encs)):
                    what = f"fp8_tensor {d} with factor {factor} and {other}, {shape}"
                    expected.assert_encoded(g, encoded(x, e, key=key_of(), enc=c), e, what)


@pytest.mark.parametrize("factor", [0.0, 0.37])
def test_a_history_with_given_statistics_is_the_references(factor: float):
    """If false, a sharded weight with delayed scaling is quantized by its local amax."""
    x, enc = inputs(150, 200, dtype=FP32), torch.tensor([factor], device=expected.DEVICE)
    for e in expected.both("fp8_tensor"):
        for value in (17.0, math.inf, math.nan):
            given = dispatch.Statistics(torch.full((1, 1), value, device=expected.DEVICE), None)
            (got,) = encode(x, [e], row0=33, stats=[given], encs=[enc], dtype=BF16)
            want = encoded(x, e, row0=33, stats=given, enc=enc, dtype=BF16)
            expected.assert_encoded(got, want, e, f"{e.direction}, factor {factor}, amax {value}")
            expected.assert_same_values(
                given.amax, torch.full_like(given.amax, value), "the given amax"
            )


# GEMM layouts #

LAYOUT_SHAPES = (
    (128, 128),
    (200, 136),
    (96, 96),
    (33, 47),
    (1, 130),
    (130, 1),
    (256, 640),
    (1000, 72),
    (1, 1),
)


@pytest.mark.parametrize("arch", list(ARCHS))
@pytest.mark.parametrize("name", [name for name in MADE if expected.both(name)[0].fmt.bits != 6])
def test_gemm_layouts_are_those_of_the_storage(name: str, arch: str):
    """If false, a tensor core multiplies by another block's scale, or reads padding that is not
    zero."""
    row, col = expected.both(name)
    for i, shape in enumerate(LAYOUT_SHAPES):
        x = inputs(*shape, ("gauss", "nan", "outliers")[i % 3], (BF16, FP32)[i % 2], seed=i)
        want = {e: expected.gemm_operand(x, e, arch, key_of()) for e in (row, col)}
        for some in ([row], [col], [row, col]):
            turned = [e is col for e in some]
            made = native.quantize(
                x, some, 0, False, None, [key_of()] * len(some), None, turned, ARCHS[arch]
            )
            for e, (data, scale, _, _) in zip(some, made):
                what = f"{name} {e.direction} {shape} {arch}, {len(some)} directions"
                assert list(data.shape) == list(want[e].data.shape), (
                    f"{what}: {data.shape} {want[e].data.shape}"
                )
                expected.assert_same(scale.cpu(), want[e].scale.flatten(), f"{what}: scale")
                expected.assert_same(data.cpu(), want[e].data, f"{what}: data")


@pytest.mark.parametrize("name", [n for n, q in MADE.items() if q.fmt.shares_storage])
def test_square_blocks_in_both_directions_read_given_statistics(name: str):
    """If false, a weight whose two directions are one encoding is scaled by its own amaxes instead
    of the shared ones."""
    row, col = expected.both(name)
    for shape in ((33, 47), (200, 328)):
        for dtype, round_to_bf16 in ((BF16, False), (FP32, True), (FP32, False)):
            x, values = (
                inputs(*shape, "heavy", dtype),
                inputs(*shape, "heavy", dtype).to(BF16 if round_to_bf16 else dtype),
            )
            own = expected.statistics(values, row)
            shared = [
                dispatch.Statistics(
                    own.amax * f, None if own.tensor_amax is None else own.tensor_amax * f
                )
                for f in (2, 5)
            ]
            amax_alone = dispatch.Statistics(shared[0].amax, None)
            for some in (
                [shared[0]] * 2,
                shared,
                [shared[0], (None, None)],
                [amax_alone] * 2,
                [(None, None), shared[1]],
            ):
                made = native.quantize(
                    x, [row, col], 0, round_to_bf16, some, [key_of()] * 2, None, [False, True]
                )
                for e, given, (data, scale, _, _) in zip((row, col), some, made):
                    full = [o if g is None else g for o, g in zip(own, given)]
                    want, what = (
                        encoded(values, e, stats=full, key=key_of()),
                        f"{name} {e.direction} {shape} {dtype}",
                    )
                    turned = (
                        dispatch.transpose_codes(want.data.cpu(), *shape, e.fmt)
                        if e is col
                        else want.data.cpu()
                    )
                    expected.assert_same(scale, want.scale, f"{what}: scale")
                    expected.assert_same(data.cpu(), turned, f"{what}: data")


@pytest.mark.parametrize("name", [n for n, q in MADE.items() if q.fmt.tensor_scale])
def test_a_given_tensor_amax_leaves_the_blocks_their_own(name: str):
    """If false, a tensor whose amax is known before (shared, or of an earlier step) gets other
    block scales or codes."""
    shapes = ((1, 1), (7, 15), (33, 47), (129, 257), (1, 130), (200, 1000), (512, 640))
    for i, shape in enumerate(shapes):
        for kind in ("outliers", "both", "subnormals", "nan row"):
            for factor, key in ((1.0, key_of(32)), (0.3, key_of(9)), (2.0, key_of())):
                x = inputs(*shape, kind, (BF16, FP32)[i % 2], seed=i)
                values, round_to_bf16 = x.to(BF16), x.dtype is FP32
                own = [expected.statistics(values, e) for e in expected.both(name)]
                shared = (own[0].tensor_amax * factor, own[1].tensor_amax * factor)
                if expected.both(name)[0].fmt.shares_storage:
                    shared = (shared[0], shared[0])
                for turned in (False, True):
                    made = native.quantize(
                        x,
                        expected.both(name),
                        0,
                        round_to_bf16,
                        [(None, t) for t in shared],
                        [key] * 2,
                        None,
                        [False, turned],
                    )
                    for e, stats, t, (data, scale, _, _) in zip(
                        expected.both(name), own, shared, made
                    ):
                        want = encoded(values, e, stats=(stats.amax, t), key=key)
                        what = (
                            f"{name} {e.direction} {shape} {kind} x {factor}, transposed {turned}"
                        )
                        padded = e.fmt.padded_shape(shape, e.direction)
                        codes = (
                            want.data
                            if e.direction is ROWWISE or not turned
                            else dispatch.transpose_codes(want.data, *padded, e.fmt)
                        )
                        expected.assert_same(scale, want.scale, f"{what}: scale")
                        expected.assert_same(data, codes, f"{what}: data")


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "nvfp4_sr"])
def test_transposed_codes_go_with_compact_scales(name: str):
    """If false, transposed codes change the scales that travel with them."""
    for shape in ((33, 47), (129, 257), (200, 328)):
        x, e = inputs(*shape), MADE[name].encoding(COLUMNWISE)
        want = encoded(x, e, key=key_of())
        ((data, scale, _, _),) = native.quantize(x, [e], 0, False, None, [key_of()], None, [True])
        turned = dispatch.transpose_codes(want.data.cpu(), *shape, e.fmt)
        expected.assert_same(data.cpu(), turned, f"{name} {shape}: data")
        expected.assert_same(scale, want.scale, f"{name} {shape}: scale")


# Anchored operands #

ANCHORED = ("mxfp8", "mxfp8_e5m2")
# of the rowwise and of the columnwise side
RUNS = ([None, None], [128, None], [None, 512], [1024, 128])


def assert_anchored(
    x: Tensor,
    encodings: list[Encoding],
    runs: list[int | None],
    what: str,
    round_to_bf16: bool = False,
) -> None:
    """Codes and scales of every side are the reference's."""
    made = native.quantize_anchored(x, encodings, runs, round_to_bf16)
    for e, run_length, (codes, scale) in zip(encodings, runs, made):
        want = anchoring.anchored(x.to(BF16) if round_to_bf16 else x, e, run_length)
        expected.assert_same(scale, want[1], f"{what}, {e.direction} runs of {run_length}: scale")
        expected.assert_same(codes, want[0], f"{what}, {e.direction} runs of {run_length}: codes")


@pytest.mark.parametrize("name", ANCHORED)
def test_anchored_operands_are_the_references(name: str):
    """If false, the products whose scales leave the main loop are of other operands than the plan
    says."""
    row, col = expected.both(name)
    for i, shape in enumerate(
        ((1, 1), (33, 47), (129, 257), (512, 1100), (1300, 200), (1, 130), (130, 1), (1100, 72))
    ):
        for kind in ("gauss", "outliers", "heavy", "wide range", "zeros", "subnormals"):
            x = inputs(*shape, kind, seed=i)
            if kind == "heavy":
                x[::3] = 0
            what = f"{name} {shape} {kind}"
            for row_run, col_run in RUNS:
                assert_anchored(x, [row], [row_run], what)
                assert_anchored(x, [col], [col_run], what)
                assert_anchored(x, [row, col], [row_run, col_run], what)


@pytest.mark.parametrize("name", ANCHORED)
def test_anchored_operands_of_masters_are_those_of_bf16(name: str):
    """If false, a weight is anchored to values that its codes are not made of."""
    for shape in ((33, 47), (200, 600), LARGE):
        for kind in ("outliers", "wide range", "huge"):
            x = inputs(*shape, kind, FP32)
            assert_anchored(
                x,
                expected.both(name),
                [None, 512],
                f"{name} {shape} {kind} fp32 as bf16",
                round_to_bf16=True,
            )


@pytest.mark.parametrize("kind", ["inf", "-inf", "nan", "both", "huge", "nan row"])
def test_anchored_operands_of_special_values_are_the_references(kind: str):
    """If false, an overflow is hidden by the anchor that it sets."""
    for name in ANCHORED:
        for shape in ((33, 47), (129, 257), (600, 200)):
            for runs in RUNS:
                assert_anchored(
                    inputs(*shape, kind), expected.both(name), runs, f"{name} {shape} {kind}"
                )


def test_anchors_that_are_given_take_the_place_of_the_tensors_own():
    """If false, a shard is anchored to its own largest values instead of those that the ranks
    share."""
    x = inputs(200, 600, "outliers")
    for e, run_length in zip(expected.both("mxfp8"), (128, 512)):
        line = Encoding(format_of(e.fmt, block=(1, run_length)), e.direction)
        amax, _ = reference.statistics(x, line)
        given = [amax * 4 if e.direction is d else None for d in Direction]
        sides = [expected.packed(e if e.direction is d else None) for d in Direction]
        codes, scale = torch.ops.fsdp_quant.quantize_anchored(
            x, *sides, run_length, run_length, *given, False
        )
        own, own_scale = anchoring.anchored(x * 4, e, run_length)  # of values four times as large
        expected.assert_same(scale, own_scale, f"{e.direction}: scale")
        quarter = reference.decode_codes(codes, e.fmt, 600)
        want = reference.decode_codes(own, e.fmt, 600) / 4
        normal = want.abs() >= 2.0**-6
        assert torch.equal(quarter[normal], want[normal]), f"{e.direction}: codes"


def assert_anchored_by_tensor(x: Tensor, what: str, round_to_bf16: bool = False) -> None:
    """Each direction, and both at once, are what `anchored_codes` makes of the codes of blocks."""
    seen = x.to(BF16)
    encodings, want = expected.both("mxfp8"), {}
    amax = seen.abs().amax().float().view(1)
    for e in encodings:
        made = reference.encode(seen, reference.statistics(seen, e)[0], None, e)
        codes, scale = anchoring.anchored_codes(*made, e.fmt, e.direction, whole=True)
        want[e] = codes.t().contiguous() if e.direction is COLUMNWISE else codes, scale
    for sides in ([encodings[0]], [encodings[1]], encodings):
        for known in (None, [amax] * len(sides)):
            turned = [e.direction is COLUMNWISE for e in sides]
            runs = [native.OF_TENSOR] * len(sides)
            for e, (codes, scale, *measured) in zip(
                sides, native.quantize_anchored(x, sides, runs, round_to_bf16, turned, known)
            ):
                assert len(measured) == (known is None), f"{what}: the amax"
                for of_x in measured:
                    expected.assert_same_values(of_x, amax, f"{what} {e.direction}: amax")
                expected.assert_same(
                    scale.view(1), want[e][1], f"{what} {e.direction} of {len(sides)}: scale"
                )
                expected.assert_same(
                    codes, want[e][0], f"{what} {e.direction} of {len(sides)}: codes"
                )


def test_tensors_are_anchored_as_their_codes_are():
    """If false, a weight that one process quantizes differs from one that ranks gather as codes."""
    for i, shape in enumerate(
        ((1, 1), (33, 47), (129, 257), (512, 1100), (1300, 200), (1, 130), (130, 1), (256, 4096))
    ):
        for kind in (
            "gauss",
            "outliers",
            "heavy",
            "wide range",
            "zeros",
            "subnormals",
            "inf",
            "nan",
            "both",
            "huge",
        ):
            assert_anchored_by_tensor(inputs(*shape, kind, seed=i), f"{shape} {kind}")
            assert_anchored_by_tensor(
                inputs(*shape, kind, FP32, seed=i), f"{shape} {kind} fp32 as bf16", True
            )


# Operands of 4-bit codes #

EXACT_PAIRS = (
    ("nvfp4_exact", None),
    (None, "nvfp4_exact"),
    ("nvfp4_exact", "nvfp4_exact"),
    ("nvfp4_exact", "nvfp4_exact_rht"),
    ("nvfp4_exact_sr", "nvfp4_exact_rht_sr"),
    (None, "nvfp4_exact_rht"),
    ("nvfp4_16x16_exact", None),
    (None, "nvfp4_16x16_exact"),
    ("nvfp4_16x16_exact", "nvfp4_16x16_exact"),
    ("mxfp8", "nvfp4_exact_rht"),
    ("nvfp4_exact", "fp8_tensor"),
    ("nvfp4_exact", "nvfp4"),
    ("nvfp4_exact_mse", "nvfp4_exact_rht"),
    ("nvfp4_16x16_exact_mae", "nvfp4_16x16_exact_mae"),
)


@pytest.mark.parametrize("pair", EXACT_PAIRS, ids=lambda p: "/".join(map(str, p)))
def test_operands_are_those_of_compact_codes(pair: tuple[str | None, str | None]):
    """If false, an activation that is quantized into its operand is multiplied as another one."""
    encodings = [MADE[n].encoding(d) for n, d in zip(pair, Direction) if n is not None]
    shapes = (*LAYOUT_SHAPES, (7, 15), (129, 257), (512, 640), (2048, 4096))
    for i, shape in enumerate(shapes):
        for kind in ("gauss", "wide range", "nan", "inf", "signed zeros", "outliers")[
            : 2 if i == len(shapes) - 1 else 6
        ]:
            for dtype, round_to_bf16 in ((BF16, False), (FP32, True)):
                x, key = inputs(*shape, kind, dtype, seed=i), key_of()
                for given in (None, torch.full((1,), 3.5, device=expected.DEVICE)):
                    operands = [e.fmt.decodes_exactly_to_e4m3 for e in encodings]
                    stats = [(None, given if e.fmt.tensor_scale else None) for e in encodings]
                    made = native.quantize(
                        x,
                        encodings,
                        0,
                        round_to_bf16,
                        stats,
                        [key] * len(encodings),
                        None,
                        [o and e.direction is COLUMNWISE for o, e in zip(operands, encodings)],
                        [native.OPERAND if o else native.COMPACT for o in operands],
                    )
                    for e, o, got in zip(encodings, operands, made):
                        what = f"{pair} {e.direction} {shape} {kind} {dtype} {given is not None}"
                        of = expected.statistics(x, e, dtype=BF16)
                        want = encoded(
                            x,
                            e,
                            stats=(of.amax, of.tensor_amax if given is None else given)
                            if e.fmt.tensor_scale
                            else None,
                            key=key,
                            dtype=BF16,
                        )
                        if not o:
                            expected.assert_same(got[0], want[0], f"{what}: data")
                            expected.assert_same(got[1], want[1], f"{what}: scale")
                            continue
                        cols = e.fmt.padded_shape(shape, e.direction)[1]
                        codes, scale = anchoring.e4m3_operand(*want[:3], e.fmt, e.direction, cols)
                        expected.assert_same(
                            got[0],
                            codes.t().contiguous() if e.direction is COLUMNWISE else codes,
                            f"{what}: codes",
                        )
                        expected.assert_same_values(got[1], scale, f"{what}: scale")


def test_operands_that_nothing_writes_are_refused():
    """If false, an operand of fp16 values, or of given amaxes, is memory that nothing wrote."""
    e, x = MADE["nvfp4_exact"].encoding(ROWWISE), inputs(64, 64)
    amax = expected.statistics(x, e).amax
    for call in (
        lambda: native.quantize(x.half(), [e], 0, False, None, None, None, None, native.OPERAND),
        lambda: native.quantize(x.float(), [e], 0, False, None, None, None, None, native.OPERAND),
        lambda: native.quantize(x, [e], 0, False, [(amax, None)], None, None, None, native.OPERAND),
    ):
        with pytest.raises(ValueError, match="operands are made of bfloat16"):
            call()
    with pytest.raises(ValueError, match="fp8_exact"):
        native.quantize(
            x, [MADE["nvfp4"].encoding(ROWWISE)], 0, False, None, None, None, None, native.OPERAND
        )

# SPDX-License-Identifier: Apache-2.0
"""One launch for all shards of a parameter group gives the bytes of one launch each, and writes
nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, FP32, MADE, NEAREST, encoded, inputs
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding
from fsdp_quant.ops import dispatch, native

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

SHAPES = (
    (33, 47),
    (128, 128),
    (1, 130),
    (130, 1),
    (200, 72),
    (7, 15),
    (129, 257),
    (64, 256),
    (0, 96),
    (31, 512),
)
ROW0 = (0, 1, 16, 31, 33, 100, 128, 160)
POISON, GAP = 0xA5, 32


def shards(
    count: int, dtype: torch.dtype, kinds: tuple[str, ...] = ("gauss", "outliers")
) -> tuple[list[Tensor], list[int]]:
    """(tensors of mixed shapes, some of them empty, one with a stride of its own; global index of
    each one's first row)."""
    made = [
        inputs(*SHAPES[i % len(SHAPES)], kinds[i % len(kinds)], dtype, seed=i) for i in range(count)
    ]
    if count > 4:
        made[4] = inputs(200, 80, "heavy", dtype)[:, 3:75]
    return made, [ROW0[i % len(ROW0)] for i in range(count)]


def multi_tensor_amax(
    x: list[Tensor], e: Encoding, row0: list[int], round_to_bf16: bool
) -> list[dispatch.Statistics]:
    """The operator's results, an entry a tensor."""
    made = iter(
        torch.ops.fsdp_quant.statistics_group(
            x, native.pack_encoding(e), e.direction is COLUMNWISE, row0, round_to_bf16
        )
    )
    results = [
        dispatch.Statistics(next(made), next(made) if e.fmt.tensor_scale else None) for _ in row0
    ]
    assert next(made, None) is None, "statistics_group returned more than it was asked for"
    return results


def multi_tensor_quantize(
    x: list[Tensor],
    e: Encoding,
    row0: list[int],
    stats: list,
    staging: Tensor,
    data_at: list[int],
    scale_at: list[int],
    round_to_bf16: bool,
    enc: list[Tensor] = (),
    record: list[Tensor] = (),
) -> None:
    amax, tensor_amax = [s[0] for s in stats], [s[1] for s in stats]
    torch.ops.fsdp_quant.quantize_group(
        x,
        native.pack_encoding(e),
        e.direction is COLUMNWISE,
        e.eps,
        row0,
        amax,
        tensor_amax,
        enc,
        record,
        staging,
        data_at,
        scale_at,
        round_to_bf16,
    )


def flat_bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def assert_group(
    x: list[Tensor],
    e: Encoding,
    row0: list[int],
    stats: list,
    round_to_bf16: bool,
    what: str,
    data_alignment: int = 16,
    stacks: list[Tensor] | None = None,
) -> None:
    """Every slice of a poisoned staging buffer is the reference's, and every byte between them is
    still poison.

    stats:  that the operator is given; those of an entry that is None are the reference's of that
            tensor.
    stacks:  x as the operator is given it, where several tensors are one [E, rows, cols].

    What becomes of the scale of an empty tensor is asked by a test of its own.
    """
    seen = BF16 if round_to_bf16 else None
    want = []
    for one, start, s in zip(x, row0, stats):
        known = expected.statistics(one, e, start, seen)
        known = [k if g is None else g for k, g in zip(known, s)]
        want.append(encoded(one, e, row0=start, stats=known, dtype=seen))
    data_at, scale_at, at = [], [], GAP
    for i, w in enumerate(want):
        for places, buffer in ((data_at, w.data), (scale_at, w.scale)):
            alignment = 16 if places is scale_at else data_alignment
            at = -(-at // 16) * 16 + i % 16 // alignment * alignment
            places.append(at)
            at += buffer.numel() * buffer.element_size() + GAP
    staging = torch.full((at,), POISON, dtype=torch.uint8, device=expected.DEVICE)
    whole = staging.clone()
    for w, d, s in zip(want, data_at, scale_at):
        whole[d : d + w.data.numel()] = flat_bytes(w.data)
        whole[s : s + w.scale.numel() * w.scale.element_size()] = flat_bytes(w.scale)
    multi_tensor_quantize(stacks or x, e, row0, stats, staging, data_at, scale_at, round_to_bf16)
    for i, (w, d, s) in enumerate(zip(want, data_at, scale_at)):
        text = f"{what}: tensor {i} {list(x[i].shape)} from row {row0[i]}"
        got = staging[s : s + w.scale.numel() * w.scale.element_size()]
        if x[i].numel() == 0:
            whole[s : s + got.numel()] = got
            continue
        expected.assert_same(got, flat_bytes(w.scale), f"{text}, scale")
        expected.assert_same(staging[d : d + w.data.numel()], flat_bytes(w.data), f"{text}, data")
    expected.assert_same(staging, whole, f"{what}: bytes between the slices")


def needed(e: Encoding, stats: list) -> list[tuple]:
    """What the operator must be told: amaxes that leave a tile."""
    return [(s[0] if e.fmt.scale_leaves_contraction else None, s[1]) for s in stats]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NEAREST)
def test_statistics_of_a_group_are_those_of_its_tensors(name: str, dtype: torch.dtype):
    """If false, the scales of one parameter are made from another's values."""
    x, row0 = shards(24, dtype, ("gauss", "both", "outliers"))
    for e in expected.both(name):
        for i, got in enumerate(multi_tensor_amax(x, e, row0, dtype is FP32)):
            want = expected.statistics(x[i], e, row0[i], BF16)
            expected.assert_statistics(
                got,
                want,
                f"{name} {e.direction} {dtype}: tensor {i} {list(x[i].shape)} from {row0[i]}",
            )


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NEAREST)
def test_codes_of_a_group_are_those_of_its_tensors(name: str, dtype: torch.dtype):
    """If false, the gathered weights of a layer are not what each of its shards holds."""
    x, rows = shards(24, dtype, ("gauss", "nan", "outliers"))
    for e in expected.both(name):
        row0 = [expected.cut(e, row) for row in rows]
        stats = multi_tensor_amax(x, e, row0, dtype is FP32)
        what = f"{name} {e.direction} {dtype}"
        assert_group(x, e, row0, stats, dtype is FP32, f"{what}, all statistics given")
        assert_group(
            x, e, row0, needed(e, stats), dtype is FP32, f"{what}, those given that leave a tile"
        )
        larger = [(s[0] * 1.7, None if s[1] is None else s[1] * 2.3) for s in stats]
        assert_group(
            x, e, row0, larger, dtype is FP32, f"{what}, statistics shared with larger shards"
        )


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NEAREST)
def test_a_stack_in_a_group_is_its_matrices(name: str, dtype: torch.dtype):
    """If false, an expert is encoded from its neighbour's rows."""
    stack = torch.stack([inputs(33, 64, "gauss", dtype, seed=i) for i in range(5)])
    of_columns = torch.stack([inputs(40, 80, "heavy", dtype, seed=i) for i in range(3)])[..., 8:72]
    stacks = [inputs(7, 15, "gauss", dtype), stack, stack[:0], of_columns]
    x = [stacks[0], *stack.unbind(), *of_columns.unbind()]
    for e in expected.both(name):
        row0, what = [0] * len(x), f"{name} {e.direction} {dtype}"
        stats = multi_tensor_amax(stacks, e, row0, dtype is FP32)
        for got, want in zip(stats, multi_tensor_amax(x, e, row0, dtype is FP32), strict=True):
            expected.assert_statistics(got, want, what)
        assert_group(x, e, row0, needed(e, stats), dtype is FP32, what, stacks=stacks)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_codes_of_a_group_follow_their_histories(dtype: torch.dtype):
    """If false, delayed scaling of gathered weights takes a launch a weight, or another factor than
    its history's."""
    x, row0 = shards(24, dtype, ("gauss", "nan", "outliers"))
    factors = [None, 0.0, 3.5, 448.0]
    enc = [
        None if f is None else torch.tensor([f], device=expected.DEVICE)
        for f in (factors[i % 4] for i in range(len(x)))
    ]
    for e in expected.both("fp8_tensor"):
        stats = multi_tensor_amax(x, e, row0, dtype is FP32)
        records = [
            torch.full((3 if i % 3 else 0,), 0.25, device=expected.DEVICE) for i in range(len(x))
        ]
        made = native.multi_tensor_quantize(
            x, e, row0, dtype is FP32, stats, encode_scales=enc, records=records
        )
        for i, (got, s) in enumerate(zip(made, stats)):
            if x[i].numel() == 0:
                continue
            what = f"{e.direction} {dtype}: tensor {i} {list(x[i].shape)}, factor {factors[i % 4]}"
            want = encoded(x[i], e, row0=row0[i], stats=s, dtype=BF16, enc=enc[i])
            expected.assert_same(got[1], want.scale, f"{what}: scale")
            expected.assert_same(got[0], want.data, f"{what}: data")
            amax = s[0].item() if enc[i] is not None and s[0].isfinite().all() else 0.0
            assert records[i].tolist() == [max(0.25, amax), 0.25, 0.25][: len(records[i])], what


@pytest.mark.parametrize("count", [1, 2, 96, 97, 128, 129, 270])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_row", "nvfp4"])
def test_groups_of_any_number_of_tensors_are_quantized(name: str, count: int):
    """If false, the parameters beyond one launch's table are lost, or written over the first
    ones."""
    x, row0 = shards(count, FP32 if count % 2 else BF16)
    for e in expected.both(name):
        stats = multi_tensor_amax(x, e, row0, True)
        for i, got in enumerate(stats):
            expected.assert_statistics(
                got,
                expected.statistics(x[i], e, row0[i], BF16),
                f"{name} {e.direction}: {i} of {count}",
            )
        assert_group(x, e, row0, needed(e, stats), True, f"{name} {e.direction}, {count} tensors")


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4_16x16"])
def test_codes_of_a_group_may_lie_at_any_byte(name: str):
    """If false, codes that do not begin on a vector are torn."""
    x, row0 = shards(24, BF16)
    for e in expected.both(name):
        stats = multi_tensor_amax(x, e, row0, False)
        assert_group(x, e, row0, stats, False, f"{name} {e.direction}", data_alignment=1)


def test_shards_of_one_tensor_in_a_group_are_the_whole():
    """If false, the ranks' slices of a gathered weight do not make the weight."""
    whole = inputs(421, 136, "heavy", FP32)
    for name in NEAREST:
        for e in expected.both(name):
            row0 = [expected.cut(e, row) for row in (0, 1, 17, 33, 100, 128, 128, 160, 291)]
            bounds = (*row0, 421)
            x = [whole[a:b] for a, b in zip(bounds, bounds[1:])]
            b0 = e.fmt.dims(e.direction)[0]
            stats = expected.statistics(whole, e, dtype=BF16)
            given = [
                (
                    stats.amax if b0 is None else stats.amax[a // b0 : -(-b // b0)].contiguous(),
                    stats.tensor_amax,
                )
                for a, b in zip(bounds, bounds[1:])
            ]
            want = encoded(whole, e, stats=stats, dtype=BF16)
            width = want.data.shape[1]
            staging = torch.full(
                (want.data.numel() + 65536,), POISON, dtype=torch.uint8, device=expected.DEVICE
            )
            scale_at = [want.data.numel() // 16 * 16 + 16 + 4096 * i for i in range(len(x))]
            multi_tensor_quantize(
                x, e, row0, given, staging, [a * width for a in row0], scale_at, True
            )
            expected.assert_same(
                staging[: want.data.numel()].view(want.data.shape),
                want.data,
                f"{name} {e.direction}",
            )


def test_a_group_of_empty_shards_is_no_error():
    """If false, a rank that holds no row of a small layer fails where the others do not."""
    x = [inputs(0, 96), inputs(0, 200)]
    for name in ("fp8_tensor", "fp8_row", "mxfp8", "fp8_128x128", "nvfp4"):
        for e in expected.both(name):
            for row0 in ([0, 0], [128, 33]):
                stats = multi_tensor_amax(x, e, row0, False)
                for i, got in enumerate(stats):
                    expected.assert_statistics(
                        got,
                        expected.statistics(x[i], e, row0[i]),
                        f"{name} {e.direction} {row0}: {i}",
                    )
                staging = torch.full((8192,), POISON, dtype=torch.uint8, device=expected.DEVICE)
                multi_tensor_quantize(x, e, row0, stats, staging, [0, 16], [4096, 6144], False)
                assert bool((staging[:4096] == POISON).all()), (
                    f"{name} {e.direction} {row0}: codes were written"
                )


def test_an_empty_shard_of_a_group_has_the_scale_of_the_whole_tensor():
    """If false, a rank without rows of a weight decodes what it gathers with a scale that nobody
    wrote."""
    x = [inputs(64, 96), inputs(0, 96)]
    for name in ("fp8_tensor", "fp8_row"):
        e = MADE[name].encoding(COLUMNWISE)  # one block of all rows: every rank holds its scale
        stats = [expected.statistics(x[0], e)] * 2
        staging = torch.full((8192,), POISON, dtype=torch.uint8, device=expected.DEVICE)
        multi_tensor_quantize(x, e, [0, 64], stats, staging, [0, 6144], [6144, 7168], False)
        want = encoded(x[1], e, row0=64, stats=stats[1]).scale
        assert want.numel() == stats[1].amax.numel()
        expected.assert_same(staging[7168 : 7168 + 4 * want.numel()], flat_bytes(want), name)


def test_a_group_is_the_same_every_time():
    """If false, a kernel races, or reads memory that nobody wrote."""
    x, row0 = shards(24, FP32)
    for name in ("mxfp8", "fp8_row", "nvfp4"):
        for e in expected.both(name):
            first = None
            for _ in range(20):
                poison = [
                    torch.full((1 << bits,), 0xFF, dtype=torch.uint8, device=expected.DEVICE)
                    for bits in (12, 16, 19)
                ]
                del poison
                stats = multi_tensor_amax(x, e, row0, True)
                staging = torch.full((1 << 20,), POISON, dtype=torch.uint8, device=expected.DEVICE)
                multi_tensor_quantize(
                    x,
                    e,
                    row0,
                    stats,
                    staging,
                    [i * 36864 for i in range(24)],
                    [900000 // 16 * 16 + 4096 * i for i in range(24)],
                    True,
                )
                first = staging if first is None else first
                expected.assert_same(staging, first, f"{name} {e.direction}")


# Errors, tracing #


def test_errors_of_groups_say_what_was_got():
    """If false, a wrong argument reaches a kernel, or a slice is written over another parameter."""
    x, e = [inputs(64, 96), inputs(33, 47)], MADE["mxfp8"].encoding(ROWWISE)
    staging = torch.full((8192,), POISON, dtype=torch.uint8, device=expected.DEVICE)

    def run(
        x=x,
        e=e,
        row0=(0, 0),
        stats=((None, None), (None, None)),
        staging=staging,
        data_at=(0, 6144),
        scale_at=(7712, 7904),
    ):
        multi_tensor_quantize(
            list(x), e, list(row0), list(stats), staging, list(data_at), list(scale_at), False
        )

    refused = {
        r"the group has no tensor": lambda: run(x=()),
        r"got 2 tensors and 1 row0": lambda: run(row0=(0,)),
        r"a group is bfloat16, or float32 through bfloat16; got Half": lambda: run(
            x=[t.half() for t in x]
        ),
        r"a group is bfloat16, or float32 through bfloat16; got Float": lambda: run(
            x=[t.float() for t in x]
        ),
        r"a group has one dtype and device; got Float": lambda: run(x=[x[0], x[1].float()]),
        r"x has shape \[33\] and strides \[1\]": lambda: run(x=[x[0], x[1][:, 0].contiguous()]),
        r"x has shape \[47, 33\] and strides \[1, 47\]": lambda: run(x=[x[0], x[1].t()]),
        r"a group is rounded to nearest, not rotated, and compact": lambda: run(
            e=MADE["mxfp8_sr"].encoding(ROWWISE)
        ),
        r"amax, tensor_amax and offsets need an entry for each tensor": lambda: run(data_at=(0,)),
        r"tensor 1 writes 1551 bytes at 7000 and 66 at 7904; staging has 8192 bytes": lambda: run(
            data_at=(0, 7000)
        ),
        r"tensor 0 writes 6144 bytes at -16 ": lambda: run(data_at=(-16, 6144)),
        r"tensor 1 writes 1551 bytes at 6144 and 66 at 8128; staging has": lambda: run(
            scale_at=(7712, 8128)
        ),
        r"tensor 0 writes 6144 bytes at 0 and 192 at 7713; staging has": lambda: run(
            scale_at=(7713, 7908)
        ),
        r"staging is contiguous Char": lambda: run(staging=staging.view(torch.int8)),
        r"staging is not contiguous": lambda: run(staging=staging[::2]),
        r"amax is contiguous Float \[5\].*wanted 192 ": lambda: run(
            stats=((torch.ones(5, device=staging.device), None), (None, None))
        ),
        r"tensor 0 has a scale that spans more than a tile; pass its amax": lambda: run(
            e=MADE["fp8_row"].encoding(ROWWISE)
        ),
        r"tensor 0 has a scale that spans more": lambda: run(e=MADE["nvfp4"].encoding(ROWWISE)),
        r"side has blocks of \(1, 64\)": lambda: torch.ops.fsdp_quant.statistics_group(
            x,
            native.pack_encoding(Encoding(expected.format_of("mxfp8", block=(1, 64)), ROWWISE)),
            False,
            [0, 0],
            False,
        ),
        r"a group is not rotated": lambda: multi_tensor_amax(
            x, MADE["nvfp4_rht"].encoding(ROWWISE), [0, 0], False
        ),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()
    assert bool((staging == POISON).all()), "a refused call wrote"
    run()
    expected.assert_same(staging[:6144], encoded(x[0], e).data.flatten(), "after the errors")


def test_opcheck_finds_nothing_in_groups():
    """If false, a schema or a fake does not say what an operator does."""
    x, row0, ops = [inputs(64, 96), inputs(33, 47)], [0, 33], torch.ops.fsdp_quant
    for name in ("fp8_1x128", "mxfp8"):
        for d in Direction:
            side, columnwise = native.pack_encoding(MADE[name].encoding(d)), d is COLUMNWISE
            staging = torch.zeros(16384, dtype=torch.uint8, device=expected.DEVICE)
            args = (
                x,
                side,
                columnwise,
                0.0,
                row0,
                [None] * 2,
                [None] * 2,
                [],
                [],
                staging,
                [0, 6144],
                [8192, 12288],
                False,
            )
            torch.library.opcheck(
                ops.quantize_group.default, args, test_utils=("test_schema", "test_faketensor")
            )
            # Statistics of several tensors are views of one workspace, which test_faketensor takes
            # for a difference.
            torch.library.opcheck(
                ops.statistics_group.default,
                (x, side, columnwise, row0, False),
                test_utils=("test_schema",),
            )
            torch.library.opcheck(
                ops.statistics_group.default,
                (x[:1], side, columnwise, row0[:1], False),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.skipif(expected.DEVICE.type != "cuda", reason="needs a GPU")
def test_groups_do_not_wait_for_the_device():
    """If false, every gather of a layer stalls the host."""
    x, row0 = shards(100, FP32)
    staging = torch.zeros(1 << 23, dtype=torch.uint8, device=expected.DEVICE)
    places = [i * 40960 for i in range(100)], [(1 << 22) + i * 36864 for i in range(100)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name in ("mxfp8", "fp8_row", "nvfp4"):
            for e in expected.both(name):
                multi_tensor_quantize(
                    x, e, row0, multi_tensor_amax(x, e, row0, True), staging, *places, True
                )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

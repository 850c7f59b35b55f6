# SPDX-License-Identifier: Apache-2.0
"""Products by our own kernels for sm_90 are those of the decoded operands: whole, in groups.

Bounds, as relative Frobenius errors against the product of the decoded operands in fp64: CODES, as
the tensor core sums 128 products with 13 fraction bits (1.3e-4 on gaussian data, 2.2e-4 on uniform
codes) before they are added in fp32; in bf16, 2^-8 more. One wrong element of a million is 1e-3.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dist_tests.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from dist_tests.kernels import expected
from dist_tests.kernels import test_gemm_operator as plain
from dist_tests.kernels.expected import BF16, DEVICE, FP16, FP32
from dist_tests.kernels.test_gemm_operator import (
    BY_128,
    BY_128X128,
    BY_512,
    E8M0,
    FLOAT8,
    NONE,
    ROW,
    TENSOR,
    Operand,
    args,
    assert_close,
    generator,
    operand,
    poisoned,
    product,
)
from dist_tests.single import hopper
from dist_tests.single.test_products_on_cpu import ENDS, TILES
from fsdp_quant.formats import FORMATS, ceil_div
from fsdp_quant.ops import native

WHY_NOT = plain.WHY_NOT or (None if plain.MAJOR == 9 else "these kernels are for sm_90")
on_gpu = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

CODES = 3e-4
BLOCK, VECTOR, RUN = (BY_128, BY_128X128), (BY_128, BY_128), (BY_512, BY_512)
TURNED = (BY_128X128, BY_128)
ROWS, TENSORS, PLAIN = (ROW, ROW), (TENSOR, TENSOR), (NONE, NONE)
NAMES = {
    BLOCK: "block",
    VECTOR: "vector",
    TURNED: "turned block",
    RUN: "run",
    ROWS: "row",
    TENSORS: "tensor",
    PLAIN: "none",
    (ROW, TENSOR): "row tensor",
    (TENSOR, ROW): "tensor row",
}
GROUPED = (BLOCK, VECTOR, ROWS, TENSORS, PLAIN, (ROW, TENSOR), (TENSOR, ROW))
ops = torch.ops.fsdp_quant


def modes(*which: tuple[int, int]):
    return pytest.mark.parametrize("scalings", which, ids=[NAMES[w] for w in which])


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def stacked(count: int, outer: int, k: int, element, scaling: int, seed: int) -> Operand:
    """Operands [outer, K], one a group, as one: data and values are [count, outer, K], scales are
    stacked."""
    made = [operand(outer, k, element, scaling, seed=seed + 10 * i) for i in range(count)]
    scale = None if scaling == NONE else torch.cat([o.scale.reshape(-1) for o in made])
    return Operand(
        torch.stack([o.data for o in made]),
        scale,
        made[0].kind,
        torch.stack([o.values for o in made]),
    )


def same_bits(call, what: str, runs: int = 20) -> Tensor:
    """The result of each of several runs, which is one (`sleeps` looks for races)."""
    want = call()
    for i in range(runs - 1):
        torch.full((1 << 24,), 0xFF, dtype=torch.uint8, device=DEVICE)
        expected.assert_same(call(), want, f"{what}, run {i}")
    return want


# Whole products #


def whole(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate=False,
    bias=None,
    alpha=None,
) -> Tensor:
    """By our kernels: runs of 512 as they are, others as one group of rows."""
    out = poisoned(a.data.shape[0], b.data.shape[0], dtype) if out is None else out
    if a.kind >> 3 == BY_512:
        ops.gemm_out(out, *args(a, b), accumulate, bias, alpha)
    else:
        ops.grouped_gemm(
            out, a.data, b.data[None], a.scale, b.scale, ends(0, len(a.data)), a.kind, b.kind
        )
    return out


@on_gpu
@modes(*GROUPED, RUN)
@pytest.mark.parametrize(
    "elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=" ".join
)
def test_our_products_are_those_of_the_decoded_operands(scalings: tuple, elements: tuple):
    """If false, a scale meets the wrong row or block, a tail is dropped, or sums are not
    promoted."""
    if elements[1] == "e5m2" and scalings != RUN:
        return  # b of groups is e4m3
    shapes = [
        *itertools.product((1, 17, 200), (16, 48, 272), (16, 144, 4112)),
        (1100, 1040, 400),
        (2051, 2064, 640),
    ]
    for m, n, k in shapes:
        a, b = (
            operand(o, k, e, s, seed=i)
            for i, (o, e, s) in enumerate(zip((m, n), elements, scalings))
        )
        for dtype in (FP32, BF16):
            assert_close(
                whole(a, b, dtype), product(a, b), CODES, f"{scalings} {elements} [{m}, {n}] K {k}"
            )


@on_gpu
def test_sums_of_runs_are_in_units_of_their_columns():
    """If false, a run that is far below or above another overflows, meets another's unit or hides a
    NaN."""
    g = torch.Generator().manual_seed(1)
    for m, n, k in ((300, 272, 4608), (256, 1040, 8192), (130, 144, 3728), (1, 16, 512)):
        # whose sums of 128 are exact
        a, b = (torch.randint(-2, 3, (rows, k), generator=g).double() for rows in (m, n))
        for spread in (0, 8, 30, 60, 100):
            row, col = (
                2.0 ** torch.randint(-8 - s, -3, (ceil_div(k, 512), rows), generator=g).float()
                for rows, s in ((m, spread // 3), (n, spread))
            )
            col[:, 3] = torch.tensor([2.0**-126, 2.0**40, 2.0**-60]).repeat(6)[: len(col)]
            col[0, 64:70] = 2.0**-127
            col[len(col) // 2, 6] = row[len(row) // 2, 7 % m] = torch.nan
            # Halves of a tile where only one is far below.
            col[1:2, n // 2 : n // 2 + 3] *= 2.0**-40
            sides = [
                Operand(
                    x.to(FLOAT8["e4m3"]).view(torch.uint8).to(DEVICE),
                    padded_scale(s).to(DEVICE),
                    1 | BY_512 << 3,
                    x,
                )
                for x, s in ((a, row), (b, col))
            ]
            got = same_bits(
                lambda sides=sides: whole(*sides, FP32), f"[{m}, {n}] K {k} spread {spread}", 3
            ).cpu()
            want = hopper.sums_in_units(a, b, row, col)
            same = (got == want) | (got.isnan() & want.isnan())
            assert bool(same.all()), (
                f"[{m}, {n}] K {k} spread {spread}: {int((~same).sum())} elements differ"
            )
            assert int(want.isnan().sum()) == m + n - 1


def padded_scale(scale: Tensor) -> Tensor:
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


@on_gpu
@modes(RUN)
def test_epilogues_of_our_products(scalings: tuple):
    """If false, a gradient of several micro-batches is that of the last, or a bias or a
    second-level scale is lost."""
    m, n, k = 1100, 1040, 400
    a, b = operand(m, k, "e4m3", scalings[0], seed=1), operand(n, k, "e4m3", scalings[1], seed=2)
    alpha, want = torch.tensor([-0.375], device=DEVICE), product(a, b)
    before = torch.randn(m, n, generator=generator(3), device=DEVICE)
    got = same_bits(
        lambda: whole(a, b, FP32, before.clone(), accumulate=True, alpha=alpha), "accumulated"
    )
    assert_close(got, before.double() - 0.375 * want, CODES, "accumulated")
    bias = torch.randn(n, generator=generator(4), device=DEVICE).to(BF16)
    got = same_bits(lambda: whole(a, b, BF16, bias=bias, alpha=alpha), "bias and alpha")
    assert_close(got, -0.375 * want + bias.double(), CODES, "a bias and alpha")
    wide = torch.full((m + 2, n + 32), 7.0, device=DEVICE)
    out = wide[1 : m + 1, 16 : n + 16]
    whole(a, b, FP32, out)
    assert_close(out, want, CODES, "a part of a larger out")
    out.fill_(7.0)
    assert bool((wide == 7.0).all()), "written beyond out"


# Groups of rows #


def rows_of(values: Tensor, weights: Tensor, offsets: Sequence[int], out: Tensor) -> Tensor:
    """What a grouped product leaves in `out`, fp64."""
    want = out.double()
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        want[start:end] = values[start:end] @ weights[e].t()
    return want


def assert_rows(got: Tensor, want: Tensor, bound: float, what: str) -> None:
    """The rows of groups within a bound, the others as they were: NaN."""
    outside = want.isnan().all(1)
    assert bool(got[outside].isnan().all()), f"{what}: written outside the groups"
    if not bool(outside.all()):
        assert_close(got[~outside], want[~outside], bound, what)


ROW_GROUPS = (
    (0, 300, 300, 301, 900, 1500),
    (0, 0, 0, 128, 256, 1400),
    (5, 77, 500, 500),
    (700, 700, 700),
    (0, 1023),
    (3, 4),
    tuple(itertools.accumulate((7 * i % 61 for i in range(64)), initial=2)),
)


@on_gpu
@modes(*GROUPED)
@pytest.mark.parametrize("offsets", ROW_GROUPS, ids=lambda o: f"{len(o) - 1} groups to {o[-1]}")
def test_groups_of_rows_multiply_their_own_operand(scalings: tuple, offsets: tuple[int, ...]):
    """If false, a token meets another expert's weight or scale, or an expert without tokens shifts
    those behind it."""
    groups, total = len(offsets) - 1, offsets[-1] + 3
    for n, k, element in ((272, 656, "e4m3"), (136, 128, "e5m2")):
        a = operand(total, k, element, scalings[0], seed=1)
        b = stacked(groups, n, k, "e4m3", scalings[1], seed=2)
        for dtype in (FP32, BF16):

            def run(dtype=dtype) -> Tensor:
                out = poisoned(total, n, dtype)
                ops.grouped_gemm(
                    out, a.data, b.data, a.scale, b.scale, ends(*offsets), a.kind, b.kind
                )
                return out

            got = same_bits(run, f"{scalings} {offsets}", 3)
            want = rows_of(a.values, b.values, offsets, poisoned(total, n))
            assert_rows(got, want, CODES, f"{scalings} {offsets} N {n} K {k}")


@on_gpu
@modes(*GROUPED)
def test_groups_of_rows_end_anywhere_in_a_tile(scalings: tuple):
    """If false, rows at the end of an expert are of no wave, or of the next expert, in either
    tile."""
    a = operand(ENDS[-1] + 3, 272, "e4m3", scalings[0], seed=1)
    b = stacked(len(ENDS) - 1, 240, 272, "e4m3", scalings[1], seed=2)
    call = (a.data, b.data, a.scale, b.scale, ends(*ENDS), a.kind, b.kind)
    want = rows_of(a.values, b.values, ENDS, poisoned(len(a.data), 240))
    for count, dtype in itertools.product(TILES, (FP32, BF16)):
        out = poisoned(len(a.data), 240, dtype)
        ops.grouped_gemm(out, *call, sm_count=count)
        assert_rows(out, want, CODES, f"{scalings}, {count} multiprocessors, {dtype}")


@on_gpu
@modes(*GROUPED)
def test_biases_of_groups_are_added_to_sums_in_fp32(scalings: tuple):
    """If false, a token has the bias of another expert or column, or its sum is rounded before the
    bias is added, or in one operation with a scale."""
    shapes = itertools.product((*ROW_GROUPS[:3], ROW_GROUPS[-1]), ((272, 656), (136, 128)))
    for offsets, (n, k) in shapes:
        groups, rows = len(offsets) - 1, slice(offsets[0], offsets[-1])
        a = operand(offsets[-1] + 3, k, "e4m3", scalings[0], seed=1)
        b = stacked(groups, n, k, "e4m3", scalings[1], seed=2)
        pairs = [(a, b)]
        if scalings == TENSORS:  # values too
            halves = [o._replace(data=o.values.to(BF16), kind=TENSOR << 3) for o in (a, b)]
            pairs.append((halves[0]._replace(scale=a.scale.expand(groups).contiguous()), halves[1]))
        sizes = torch.tensor(offsets, device=DEVICE).diff()
        for (x, w), of_bias in itertools.product(pairs, (BF16, FP32)):
            call = (x.data, w.data, x.scale, w.scale, ends(*offsets), x.kind, w.kind)
            bias = torch.randn(groups, n, generator=generator(4), device=DEVICE).to(of_bias)
            sums = poisoned(len(x.data), n)
            ops.grouped_gemm(sums, *call)
            want = sums[rows] + bias.float().repeat_interleave(sizes, 0)
            for dtype in (FP32, BF16):
                out = poisoned(len(x.data), n, dtype)
                ops.grouped_gemm(out, *call, bias=bias)
                what = f"{scalings} {x.data.dtype} {offsets} N {n}, {of_bias} to {dtype}"
                expected.assert_same(out[rows], want.to(dtype), what)


@on_gpu
def test_many_groups_of_few_rows():
    """If false, groups beyond some number are not found."""
    g = torch.Generator().manual_seed(1)
    for groups, most in ((1024, 8), (1023, 3), (200, 40)):
        sizes = torch.randint(0, most + 1, (groups,), generator=g).tolist()
        offsets = list(itertools.accumulate(sizes, initial=0))
        a = operand(offsets[-1], 256, "e4m3", BY_128, seed=1)
        # whose scales are those of groups, stacked
        b = operand(groups * 128, 256, "e4m3", BY_128X128, seed=2)
        out = poisoned(offsets[-1], 128)
        codes = b.data.view(groups, 128, 256)
        ops.grouped_gemm(out, a.data, codes, a.scale, b.scale, ends(*offsets), a.kind, b.kind)
        assert_close(
            out,
            rows_of(a.values, b.values.view(groups, 128, 256), offsets, out),
            CODES,
            f"{groups} groups",
        )


@on_gpu
def test_tensor_scales_of_groups():
    """If false, experts that were quantized apart share the scale of the first."""
    offsets, n, k = (0, 100, 100, 350, 600), 144, 272
    b = stacked(4, n, k, "e4m3", TENSOR, seed=2)
    a = operand(600, k, "e4m3", NONE, seed=1)
    each = torch.tensor([0.5, 3.0, 0.25, 1.5], device=DEVICE)
    factors = torch.repeat_interleave(each.double(), ends(100, 0, 250, 250).long())
    for scale, values in ((each, a.values * factors[:, None]), (each[:1].clone(), a.values * 0.5)):
        out = poisoned(600, n)
        ops.grouped_gemm(
            out, a.data, b.data, scale, b.scale, ends(*offsets), 1 | TENSOR << 3, b.kind
        )
        assert_close(
            out, rows_of(values, b.values, offsets, out), CODES, f"{scale.numel()} scales of a"
        )
    out, one = poisoned(600, n), b.scale[:1].clone()
    ops.grouped_gemm(out, a.data, b.data, each, one, ends(*offsets), 1 | TENSOR << 3, b.kind)
    shared = b.values / b.scale.double()[:, None, None] * one.double()
    assert_close(
        out, rows_of(a.values * factors[:, None], shared, offsets, out), CODES, "one scale of b"
    )


@on_gpu
def test_views_of_groups_are_multiplied_as_their_values():
    """If false, experts that lie in a larger buffer are read from the wrong place."""
    offsets, n, k = (2, 130, 400), 144, 272
    a, b = operand(410, k, "e4m3", ROW, seed=1), stacked(2, n, k, "e4m3", ROW, seed=2)
    codes = torch.full((2, n + 5, k + 48), 0x7F, dtype=torch.uint8, device=DEVICE)
    codes[:, :n, 16 : 16 + k] = b.data
    wide = torch.full((410, n + 24), torch.nan, device=DEVICE)
    ops.grouped_gemm(
        wide[:, 8 : 8 + n],
        a.data,
        codes[:, :n, 16 : 16 + k],
        a.scale,
        b.scale,
        ends(*offsets),
        a.kind,
        b.kind,
    )
    assert_rows(
        wide[:, 8 : 8 + n], rows_of(a.values, b.values, offsets, poisoned(410, n)), CODES, "views"
    )
    assert bool(wide[:, :8].isnan().all()) and bool(wide[:, 8 + n :].isnan().all()), (
        "written beyond out"
    )


# Groups of the contraction #

DEPTH_GROUPS = (
    (0, 256, 256, 384, 1280, 2560),
    (0, 0, 0, 128, 1152, 2176),
    (128, 256, 5120, 5120),
    (384, 384, 384),
    (0, 128),
    (0, 256, 256, 688),
    tuple(itertools.accumulate((7 * i % 5 * 128 for i in range(40)), initial=0)),
)


def depth_of(a: Tensor, b: Tensor, offsets: Sequence[int]) -> Tensor:
    return torch.stack([a[:, s:t] @ b[:, s:t].t() for s, t in itertools.pairwise(offsets)])


@on_gpu
@modes(*GROUPED, TURNED)
@pytest.mark.parametrize("offsets", DEPTH_GROUPS, ids=lambda o: f"{len(o) - 1} groups to {o[-1]}")
def test_groups_of_the_contraction_make_gradients_of_their_own(
    scalings: tuple, offsets: tuple[int, ...]
):
    """If false, an expert's gradient holds tokens of another, or that of no token is not zero."""
    groups, total = len(offsets) - 1, offsets[-1] + (0 if offsets[-1] % 128 else 256)
    for m, n, element in ((300, 272, "e4m3"), (40, 136, "e5m2")):
        element = "e4m3" if scalings == TURNED else element
        a, b = (
            operand(m, total, element, scalings[0], seed=1),
            operand(n, total, "e4m3", scalings[1], seed=2),
        )
        want = depth_of(a.values, b.values, offsets)
        call = (a.data, b.data, a.scale, b.scale, ends(*offsets), a.kind, b.kind)
        what = f"{scalings} {offsets} M {m} N {n}"
        for dtype in (FP32, BF16):

            def run(dtype=dtype) -> Tensor:
                out = poisoned(groups * m, n, dtype).view(groups, m, n)
                ops.grouped_gemm_wgrad(out, *call)
                return out

            got = same_bits(run, what, 3)
            for e, (start, end) in enumerate(itertools.pairwise(offsets)):
                if start == end:
                    assert bool((got[e] == 0).all()), f"{what}: group {e} is of no token"
                else:
                    assert_close(got[e], want[e], CODES, f"{what}, group {e}")
        before = torch.randn(groups, m, n, generator=generator(3), device=DEVICE)

        def add() -> Tensor:
            out = before.clone()
            ops.grouped_gemm_wgrad(out, *call, accumulate=True)
            return out

        got = same_bits(add, f"{what}, accumulated", 3)
        for e, (start, end) in enumerate(itertools.pairwise(offsets)):
            if start == end:
                expected.assert_same(
                    got[e], before[e], f"{what}: group {e} is of no token, accumulated"
                )
        assert_close(got, before.double() + want, CODES, f"{what}, accumulated")


@on_gpu
def test_gradients_of_groups_that_were_quantized_apart():
    """If false, experts with scales of their own share those of the first, or a scale of nothing
    makes NaN."""
    offsets, m, n = (0, 256, 256, 640), 72, 144
    a, b = operand(m, 640, "e4m3", NONE, seed=1), operand(n, 640, "e4m3", NONE, seed=2)
    for scaling in (ROW, TENSOR):
        shapes = ((3, m), (3, n)) if scaling == ROW else ((3, 1), (3, 1))
        x, y = (
            torch.rand(s, generator=generator(i), device=DEVICE) + 0.5 for i, s in enumerate(shapes)
        )
        x[1], y[1] = torch.nan, torch.inf  # of the group without tokens
        out = poisoned(3 * m, n).view(3, m, n)
        kind = 1 | scaling << 3
        ops.grouped_gemm_wgrad(
            out, a.data, b.data, x.view(-1), y.view(-1), ends(*offsets), kind, kind
        )
        want = depth_of(a.values, b.values, offsets)
        assert bool((out[1] == 0).all()), "a group without tokens"
        for e in (0, 2):
            assert_close(
                out[e],
                x[e].double()[:, None] * want[e] * y[e].double(),
                CODES,
                f"scaling {scaling}, group {e}",
            )


# Offsets #


@on_gpu
def test_wrong_offsets_are_clamped_and_told():
    """If false, a wrong count of tokens writes over another tensor, or nobody learns of it."""
    a, b = operand(600, 256, "e4m3", ROW, seed=1), stacked(4, 144, 256, "e4m3", ROW, seed=2)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    cases = {
        (0, 100, 100, 350, 600): (0, (0, 100, 100, 350, 600)),
        (10, 300, 200, 9999, -5): (1, (10, 300, 300, 600, 600)),
        (-7, 0, 1, 1, 2): (1, (0, 0, 1, 1, 2)),
        (700, 0, 0, 0, 0): (1, (600,) * 5),
    }
    for given, (told, clean) in cases.items():
        out = poisoned(602, 144)
        flag.zero_()
        ops.grouped_gemm(
            out[1:601], a.data, b.data, a.scale, b.scale, ends(*given), a.kind, b.kind, flag
        )
        assert flag.item() == told, given
        assert_rows(
            out[1:601], rows_of(a.values, b.values, clean, poisoned(600, 144)), CODES, f"{given}"
        )
        assert bool(out[[0, 601]].isnan().all()), f"{given}: written beyond out"
    x, y = operand(72, 640, "e4m3", BY_128, seed=1), operand(144, 640, "e4m3", BY_128, seed=2)
    cases = {
        (0, 128, 640): (0, (0, 128, 640)),
        (0, 130, 640): (1, (0, 128, 640)),
        (0, 512, 128): (1, (0, 512, 512)),
        (-128, 128, 1280): (1, (0, 128, 640)),
    }
    for given, (told, clean) in cases.items():
        out = poisoned(4 * 72, 144).view(4, 72, 144)
        flag.zero_()
        ops.grouped_gemm_wgrad(
            out[1:3], x.data, y.data, x.scale, y.scale, ends(*given), x.kind, y.kind, False, flag
        )
        assert flag.item() == told, given
        for e, (start, end) in enumerate(itertools.pairwise(clean)):
            if start == end:
                assert bool((out[1 + e] == 0).all()), f"{given}, group {e}"
            else:
                assert_close(
                    out[1 + e],
                    depth_of(x.values, y.values, (start, end))[0],
                    CODES,
                    f"{given}, group {e}",
                )
        assert bool(out[[0, 3]].isnan().all()), f"{given}: written beyond out"


@on_gpu
def test_a_captured_grouped_product_follows_its_offsets():
    """If false, a CUDA graph routes the tokens of the step it was captured in."""
    a, b = (
        operand(640, 256, "e4m3", BY_128, seed=1),
        stacked(3, 144, 256, "e4m3", BY_128X128, seed=2),
    )
    x, y = operand(72, 640, "e4m3", BY_128, seed=3), operand(144, 640, "e4m3", BY_128, seed=4)
    offsets = ends(0, 128, 256, 640)
    out, gradient = poisoned(640, 144), poisoned(3 * 72, 144).view(3, 72, 144)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.grouped_gemm(out, a.data, b.data, a.scale, b.scale, offsets, a.kind, b.kind)
        ops.grouped_gemm_wgrad(gradient, x.data, y.data, x.scale, y.scale, offsets, x.kind, y.kind)
    for now in ((0, 128, 256, 640), (0, 0, 512, 640), (128, 640, 640, 640)):
        offsets.copy_(ends(*now))
        out.fill_(torch.nan), gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_rows(out, rows_of(a.values, b.values, now, poisoned(640, 144)), CODES, f"{now}")
        assert_close(gradient, depth_of(x.values, y.values, now), CODES, f"{now}")


@on_gpu
def test_no_grouped_product_waits_for_the_device():
    """If false, routing stalls the host, and training with it."""
    a, b = (
        operand(640, 256, "e4m3", BY_128, seed=1),
        stacked(3, 144, 256, "e4m3", BY_128X128, seed=2),
    )
    x, y = operand(72, 640, "e4m3", BY_128, seed=3), operand(144, 640, "e4m3", BY_128, seed=4)
    offsets, out, gradient = (
        ends(0, 128, 256, 640),
        poisoned(640, 144),
        poisoned(3 * 72, 144).view(3, 72, 144),
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.grouped_gemm(out, a.data, b.data, a.scale, b.scale, offsets, a.kind, b.kind)
        ops.grouped_gemm_wgrad(gradient, x.data, y.data, x.scale, y.scale, offsets, x.kind, y.kind)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# What Python calls #


@on_gpu
def test_operands_with_formats_are_multiplied():
    """If false, what Python calls is another product than what the operators make."""
    vector, block = FORMATS["fp8_1x128"], FORMATS["fp8_128x128"]
    offsets = ends(0, 128, 256, 640)
    a, b = (
        operand(640, 512, "e4m3", BY_128, seed=1),
        stacked(3, 144, 512, "e4m3", BY_128X128, seed=2),
    )
    got = grouped_gemm(
        native.Operand(a.data, a.scale, vector), native.Operand(b.data, b.scale, block), offsets
    )
    assert_close(got, rows_of(a.values, b.values, (0, 128, 256, 640), got), CODES, "groups of rows")
    x, y = operand(72, 640, "e4m3", BY_128, seed=3), operand(144, 640, "e4m3", BY_128, seed=4)
    sides = native.Operand(x.data, x.scale, vector), native.Operand(y.data, y.scale, vector)
    got = grouped_gemm_wgrad(*sides, offsets, out_dtype=FP32)
    want = depth_of(x.values, y.values, (0, 128, 256, 640))
    assert_close(got, want, CODES, "groups of the contraction")
    assert grouped_gemm_wgrad(*sides, offsets, got, accumulate=True) is got
    assert_close(got, 2 * want, CODES, "twice")
    with pytest.raises(ValueError, match="adds to `out`, got out=None"):
        grouped_gemm_wgrad(*sides, offsets, accumulate=True)


# Refusals #


@on_gpu
def test_errors_say_what_was_got_and_wanted():
    """If false, wrong input is found by an illegal memory access, or not at all."""
    a, b = (
        operand(640, 256, "e4m3", BY_128, seed=1),
        stacked(3, 144, 256, "e4m3", BY_128X128, seed=2),
    )
    x, y = operand(72, 640, "e4m3", BY_128, seed=3), operand(144, 640, "e4m3", BY_128, seed=4)
    w = operand(144, 256, "e4m3", BY_128X128, seed=5)
    good = ends(0, 128, 256, 640)
    e5m2, mx = stacked(3, 144, 256, "e5m2", BY_128X128, seed=2), operand(640, 256, "e4m3", E8M0)
    runs = stacked(3, 144, 256, "e4m3", BY_512, seed=2)
    half = operand(640, 256, BF16, NONE)
    value, gap = ValueError, NotImplementedError

    def rows(out=None, a=a, b=b, offsets=good, b_scale=None, b_kind=None, **options):
        out = poisoned(640, 144) if out is None else out
        scales = a.scale, b.scale if b_scale is None else b_scale
        kinds = a.kind, b.kind if b_kind is None else b_kind
        return ops.grouped_gemm, (out, a.data, b.data, *scales, offsets, *kinds), options

    def depth(out=None, a=x, b=y, offsets=good, **options):
        out = poisoned(3 * 72, 144).view(3, 72, 144) if out is None else out
        return (
            ops.grouped_gemm_wgrad,
            (out, a.data, b.data, a.scale, b.scale, offsets, a.kind, b.kind),
            options,
        )

    refused = {
        "offsets is contiguous Int [3] on cuda:0; wanted 4": (value, rows(offsets=good[:3])),
        "offsets is contiguous Long [4]": (value, rows(offsets=good.long())),
        "offsets is contiguous Int [4] on cpu": (value, rows(offsets=good.cpu())),
        "out is [640, 136] on cuda:0; wanted [640, 144]": (value, rows(poisoned(640, 136))),
        "scaling 4: out is neither bfloat16 nor float32": (gap, rows(poisoned(640, 144, FP16))),
        "out has strides [1, 640]; wanted rows of 144": (value, rows(poisoned(144, 640).t())),
        "out has rows 580 bytes apart": (value, rows(poisoned(640, 145)[:, :144])),
        "a is [640, 256] and b [3, 144, 128]": (value, rows(b=b._replace(data=b.data[:, :, :128]))),
        "b has shape [144, 256]; wanted [groups, N, K]": (value, rows(b=w)),
        "b has 140 rows (N); these products take multiples of 8": (
            value,
            rows(poisoned(640, 140), b=b._replace(data=b.data[:, :140])),
        ),
        "b_scale is contiguous Float [20]": (
            value,
            rows(b_scale=b.scale[:20].clone()),
        ),  # of 24, 8 a group
        "b_scale has the scales of one group; wanted 3 times": (
            value,
            rows(b_scale=b.scale[:8].clone()),
        ),
        "with scaling 4: one operand is of codes, and the other of values": (gap, rows(a=half)),
        "a is Half of kind 0": (gap, rows(a=half._replace(data=half.data.half()))),
        "grouped_gemm of a [640, 256] with scaling 3 and b [3, 144, 256] with scaling 4: b is "
        "e5m2": (
            gap,
            rows(b=e5m2),
        ),
        "grouped_gemm of a [640, 256] with scaling 5": (gap, rows(a=mx)),
        "products of 1x512 scales are whole, others in groups": (
            gap,
            rows(a=operand(640, 256, "e4m3", BY_512), b=runs),
        ),
        "b_scale is given, and the scaling in its kind is 0": (value, rows(b_kind=1)),
        "flag is contiguous Int [2]": (value, rows(flag=ends(0, 0))),
        "sm_count is -1": (value, rows(sm_count=-1)),
        "offsets has shape [1]; wanted [groups + 1]": (value, depth(offsets=good[:1])),
        "out is [2, 72, 144] on cuda:0; wanted [3, 72, 144]": (
            value,
            depth(poisoned(144, 144).view(2, 72, 144)),
        ),
        "a is [72, 640] and b [144, 512]": (value, depth(b=operand(144, 512, "e4m3", BY_128))),
        "out is BFloat16; gradients accumulate in float32": (
            value,
            depth(poisoned(3 * 72, 144, BF16).view(3, 72, 144), accumulate=True),
        ),
        "out has strides [0, 144, 1]; wanted groups": (
            value,
            depth(poisoned(72, 144).expand(3, 72, 144)),
        ),
        "grouped_gemm_wgrad of a [72, 640] with scaling 4": (
            gap,
            depth(a=operand(72, 640, "e4m3", BY_128X128), b=operand(144, 640, "e4m3", BY_128X128)),
        ),
    }
    for text, (error, (op, arguments, options)) in refused.items():
        with pytest.raises(error, match=re.escape(text)):
            op(*arguments, **options)
        assert arguments[0].is_floating_point() and bool(arguments[0].isnan().all()), (
            f"a refused call wrote: {text}"
        )
    with pytest.raises(NotImplementedError):
        op, arguments, _ = rows()
        op(*(t.cpu() if isinstance(t, Tensor) else t for t in arguments))


@on_gpu
def test_nothing_is_summed_where_an_extent_is_zero():
    """If false, a step without tokens crashes."""
    b = stacked(2, 144, 256, "e4m3", ROW, seed=2)
    none = torch.empty(0, dtype=torch.float32, device=DEVICE)
    codes = torch.empty(0, 256, dtype=torch.uint8, device=DEVICE)
    ops.grouped_gemm(poisoned(0, 144), codes, b.data, none, b.scale, ends(0, 0, 0), b.kind, b.kind)
    x, y = (torch.empty(o, 0, dtype=torch.uint8, device=DEVICE) for o in (72, 144))
    for accumulate, want in ((False, 0.0), (True, 1.0)):
        out = torch.ones(2, 72, 144, device=DEVICE)
        ops.grouped_gemm_wgrad(out, x, y, none, none, ends(0, 0, 0), 25, 25, accumulate)
        assert bool((out == want).all()), accumulate


@on_gpu
def test_schemas_say_what_the_operators_do():
    """If false, torch.compile moves a product across a write to its out."""
    a, b = (
        operand(640, 256, "e4m3", BY_128, seed=1),
        stacked(3, 144, 256, "e4m3", BY_128X128, seed=2),
    )
    x, y = operand(72, 640, "e4m3", BY_128, seed=3), operand(144, 640, "e4m3", BY_128, seed=4)
    offsets, flag = ends(0, 128, 256, 640), ends(0)
    calls = (
        (
            ops.grouped_gemm,
            (
                torch.zeros(640, 144, device=DEVICE),
                a.data,
                b.data,
                a.scale,
                b.scale,
                offsets,
                25,
                33,
                flag,
            ),
        ),
        (
            ops.grouped_gemm_wgrad,
            (
                torch.zeros(3, 72, 144, device=DEVICE),
                x.data,
                y.data,
                x.scale,
                y.scale,
                offsets,
                25,
                25,
                True,
                flag,
            ),
        ),
    )
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))

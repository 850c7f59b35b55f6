# SPDX-License-Identifier: Apache-2.0
"""Products by cuBLASLt are those of the decoded operands: every pair, order, dtype, epilogue and
refusal.

Bounds, as relative Frobenius errors against the product of the decoded operands in fp64:
    8-bit operands    2e-4: sums have 13 bits, promoted to fp32 every 128 elements (1.3e-4 on
                      gaussian data)
    16-bit operands   1e-5: fp32 sums of exact products
    out               2^-8 more in bf16, 2^-11 in fp16: one rounding of each element
"""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, DEVICE, FP16, FP32
from fsdp_quant.formats import ceil_div, round_up

WHY_NOT = expected.WHY_NOT or (
    None if DEVICE.type == "cuda" else f"the device is {DEVICE.type}, not CUDA"
)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

MAJOR = torch.cuda.get_device_capability()[0] if WHY_NOT is None else 0
ELEMENTS = {BF16: 0, FP16: 0, "e4m3": 1, "e5m2": 2, "e2m1": 3}
NONE, TENSOR, ROW, BY_128, BY_128X128, E8M0, E4M3, BY_512 = range(8)
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

ROUNDING = {FP32: 0.0, BF16: 2.0**-8, FP16: 2.0**-11}
CODES, HALVES = 2e-4, 1e-5
SHAPES = tuple(itertools.product((1, 17, 200), (16, 48, 272), (16, 144, 4112)))
BLOCK_SHAPES = tuple(itertools.product((8, 40, 200), (16, 48, 272), (16, 144, 4112)))  # M % 4 == 0


def _gemm(*args, **kwargs) -> Tensor:
    return torch.ops.fsdp_quant.gemm(*args, **kwargs)


def _gemm_out(*args, **kwargs) -> None:
    torch.ops.fsdp_quant.gemm_out(*args, **kwargs)


class Operand(NamedTuple):
    """What the operator takes, and what it stands for."""

    data: Tensor
    scale: Tensor | None
    kind: int
    values: Tensor  # fp64 [outer, K]


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def operand(
    outer: int, k: int, element="e4m3", scaling: int = TENSOR, k_major: bool = True, seed: int = 0
) -> Operand:
    """Gaussian values about 1; scaled codes are 16 times that."""
    g = generator(1000 * seed + outer + k)
    x = torch.randn(outer, k, generator=g, device=DEVICE)
    kind = ELEMENTS[element] | scaling << 3
    if isinstance(element, torch.dtype):
        data = x.to(element)
        return Operand(data if k_major else data.t().contiguous().t(), None, kind, data.double())
    if element == "e2m1":
        data = torch.randint(0, 256, (outer, k // 2), generator=g, device=DEVICE, dtype=torch.uint8)
        table = torch.tensor(
            [*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device=DEVICE
        )
        values = table[torch.stack((data & 15, data >> 4), -1).long()].reshape(outer, k)
    else:
        codes = (x * (1 if scaling == NONE else 16)).to(FLOAT8[element])
        data, values = codes.view(torch.uint8), codes.double()
    scale, factors = scale_of(outer, k, scaling, g)
    return Operand(data, scale, kind, values * factors)


def scale_of(outer: int, k: int, scaling: int, g: torch.Generator) -> tuple[Tensor | None, Tensor]:
    """A scale in its layout, zeros where it pads, and the factor of each element, fp64 [outer,
    K]."""
    blocks = {
        ROW: (1, k),
        BY_128: (1, 128),
        BY_128X128: (128, 128),
        E8M0: (1, 32),
        E4M3: (1, 16),
        BY_512: (1, 512),
    }
    block = blocks.get(scaling, (outer, k))
    rows, cols = (1 if size == b else ceil_div(size, b) for size, b in zip((outer, k), block))
    if scaling == NONE:
        return None, torch.ones(outer, k, dtype=torch.float64, device=DEVICE)
    grid = (torch.rand(rows, cols, generator=g, device=DEVICE) + 0.5) / 16
    if scaling == BY_512:
        grid = 2.0 ** torch.randint(-8, -3, (rows, cols), generator=g, device=DEVICE)
    if scaling == E8M0:
        grid = torch.randint(120, 126, (rows, cols), generator=g, device=DEVICE, dtype=torch.uint8)
        factors = 2.0 ** (grid.double() - 127)
    elif scaling == E4M3:
        codes = grid.to(torch.float8_e4m3fn)
        grid, factors = codes.view(torch.uint8), codes.double()
    else:
        factors = grid.double()
    factors = factors.repeat_interleave(block[0], 0)[:outer].repeat_interleave(block[1], 1)[:, :k]
    if scaling in (BY_128, BY_512):
        return torch.nn.functional.pad(
            grid.t(), (0, round_up(rows, 4) - rows)
        ).contiguous(), factors
    if scaling == BY_128X128:
        return torch.nn.functional.pad(grid, (0, round_up(cols, 4) - cols)).contiguous(), factors
    if scaling in (E8M0, E4M3):
        return torch.ops.fsdp_quant.swizzle_scales(grid, outer, 1, False), factors
    return grid.reshape(-1), factors


def args(a: Operand, b: Operand) -> tuple:
    return a.data, b.data, a.scale, b.scale, a.kind, b.kind


def poisoned(m: int, n: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full((m, n), torch.nan, dtype=dtype, device=DEVICE)


def product(a: Operand, b: Operand) -> Tensor:
    return a.values @ b.values.t()


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def assert_close(got: Tensor, want: Tensor, bound: float, what: str) -> None:
    """Relative Frobenius error at most `bound`, and what the dtype of `got` rounds."""
    error, bound = error_of(got, want), bound + ROUNDING[got.dtype]
    assert error <= bound, (
        f"{what}: relative error {error:.3g}, wanted at most {bound:.3g} in {got.dtype}"
    )


def check(
    a: Operand, b: Operand, bound: float, what: str, dtypes=(FP32, BF16, FP16), **kwargs
) -> None:
    """Both operators, into memory that holds NaN."""
    want = product(a, b)
    for dtype in dtypes:
        out = poisoned(*want.shape, dtype)
        _gemm_out(out, *args(a, b), **kwargs)
        assert_close(out, want, bound, f"{what} {list(want.shape)} K {a.values.shape[1]}")
        expected.assert_same(_gemm(*args(a, b), dtype, **kwargs), out, f"{what}, new or given out")


# Pairs #

hopper = pytest.mark.skipif(MAJOR != 9, reason="these scales are for sm_90")
blackwell = pytest.mark.skipif(MAJOR < 10, reason="these scales are for sm_100")
PAIRS = [
    pytest.param(("e4m3", TENSOR), ("e4m3", TENSOR), id="tensor"),
    pytest.param(("e4m3", TENSOR), ("e5m2", TENSOR), id="tensor e4m3 e5m2"),
    pytest.param(("e5m2", TENSOR), ("e4m3", TENSOR), id="tensor e5m2 e4m3"),
    pytest.param(("e4m3", NONE), ("e4m3", NONE), id="none"),
    pytest.param(("e4m3", NONE), ("e4m3", TENSOR), id="none tensor"),
    pytest.param(("e4m3", ROW), ("e4m3", ROW), id="row"),
    pytest.param(("e5m2", ROW), ("e4m3", ROW), id="row e5m2 e4m3"),
    pytest.param(("e4m3", TENSOR), ("e4m3", ROW), id="tensor row"),
    pytest.param(("e4m3", ROW), ("e4m3", TENSOR), id="row tensor"),
    pytest.param(("e4m3", BY_128), ("e4m3", BY_128), id="1x128", marks=hopper),
    pytest.param(("e4m3", BY_128), ("e4m3", BY_128X128), id="1x128 128x128", marks=hopper),
    pytest.param(("e4m3", BY_128X128), ("e4m3", BY_128), id="128x128 1x128", marks=hopper),
    pytest.param(("e4m3", E8M0), ("e4m3", E8M0), id="e8m0", marks=blackwell),
    pytest.param(("e5m2", E8M0), ("e4m3", E8M0), id="e8m0 e5m2 e4m3", marks=blackwell),
    pytest.param(("e2m1", E4M3), ("e2m1", E4M3), id="e2m1", marks=blackwell),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_products_of_codes_are_those_of_the_decoded_operands(left: tuple, right: tuple):
    """If false, a scale meets the wrong row or block, a tail is dropped, or sums are not
    promoted."""
    blocks = {left[1], right[1]} & {BY_128, BY_128X128}
    for m, n, k in BLOCK_SHAPES if blocks else SHAPES:
        if left[0] == "e2m1":
            k = round_up(k, 32)
        a, b = operand(m, k, *left, seed=1), operand(n, k, *right, seed=2)
        check(a, b, CODES, f"{left} x {right}")


@hopper
@pytest.mark.parametrize("right", [BY_128, BY_128X128])
def test_block_scales_of_few_rows_are_right_or_refused(right: int):
    """If false, scales of a number of rows that cuBLASLt does not document are read from other
    rows."""
    for m in (4, 12, 20, 132):
        a, b = operand(m, 144, "e4m3", BY_128, seed=1), operand(48, 144, "e4m3", right, seed=2)
        try:
            check(a, b, CODES, "1x128")
        except NotImplementedError as error:
            assert "no algorithm for" in str(error), error


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("a_major", [True, False])
@pytest.mark.parametrize("b_major", [True, False])
def test_16_bit_products_in_every_order(dtype: torch.dtype, a_major: bool, b_major: bool):
    """If false, a transposed view multiplies as another matrix, or parts of a sum are rounded to 16
    bits."""
    for m, n, k in (*SHAPES, (1, 1, 1), (1, 33, 65), (17, 1, 65), (33, 65, 1), (65, 129, 257)):
        a, b = (
            operand(m, k, dtype, NONE, a_major, seed=1),
            operand(n, k, dtype, NONE, b_major, seed=2),
        )
        check(a, b, HALVES, f"{dtype}, K-major {a_major}, {b_major}", (FP32, dtype))


def test_bf16_products_are_torchs_within_rounding():
    """If false, the exact domain is another product than torch's."""
    for m, n, k in (*SHAPES, (512, 1024, 2048)):
        a, b = operand(m, k, BF16, NONE, seed=1), operand(n, k, BF16, NONE, seed=2)
        want = torch.mm(a.data, b.data.t())
        assert_close(
            _gemm(*args(a, b), BF16), want.double(), 2.0**-8, f"[{m}, {n}] K {k} and torch.mm"
        )


def test_views_are_multiplied_as_their_values():
    """If false, a slice of a storage is read from the wrong place."""
    for element, scaling in (("e4m3", TENSOR), (BF16, NONE)):
        whole = [operand(300, 4112 + 32, element, scaling, seed=seed) for seed in (1, 2)]
        slices = (
            (slice(17, 217), slice(16, 4128)),
            (slice(0, 64, 2), slice(0, 128)),
            (slice(5, 6), slice(32, 48)),
        )
        for rows, cols in slices:
            a = Operand(
                whole[0].data[rows, cols],
                whole[0].scale,
                whole[0].kind,
                whole[0].values[rows, cols],
            )
            b = Operand(
                whole[1].data[16:64, cols],
                whole[1].scale,
                whole[1].kind,
                whole[1].values[16:64, cols],
            )
            check(a, b, CODES, f"{element} {rows} {cols}", (FP32, BF16))


def test_more_elements_than_32_bits_count():
    """If false, the end of a very large product is written over its beginning."""
    m, n, k = 70000, 32768, 32
    if torch.cuda.mem_get_info()[0] < 3 * m * n:
        pytest.skip(f"needs {3 * m * n >> 30} GiB of free GPU memory")
    for element, scaling in (("e4m3", TENSOR), (BF16, NONE)):
        a, b = operand(m, k, element, scaling, seed=1), operand(n, k, element, scaling, seed=2)
        out = _gemm(*args(a, b), BF16)
        for rows in (slice(0, 64), slice(2**31 // n - 32, 2**31 // n + 32), slice(m - 64, m)):
            assert_close(out[rows], a.values[rows] @ b.values.t(), CODES, f"{element}, {rows}")
        del out
    torch.cuda.empty_cache()


# Out, bias, alpha #

PLAIN = [
    pytest.param(("e4m3", TENSOR), id="tensor"),
    pytest.param(("e4m3", ROW), id="row"),
    pytest.param(("e4m3", BY_128), id="1x128", marks=hopper),
    pytest.param((BF16, NONE), id="bf16"),
    pytest.param((FP16, NONE), id="fp16"),
]


def pair(which: tuple, m: int = 200, n: int = 272, k: int = 144) -> tuple[Operand, Operand, float]:
    return (
        operand(m, k, *which, seed=1),
        operand(n, k, *which, seed=2),
        HALVES if which[0] in (BF16, FP16) else CODES,
    )


@pytest.mark.parametrize("which", PLAIN)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products_accumulate(which: tuple, dtype: torch.dtype):
    """If false, a gradient of several micro-batches is that of the last."""
    if which[0] is FP16 and dtype is BF16:
        pytest.skip("cuBLASLt makes no bfloat16 of float16")
    for k in (16, 144, 4112):
        a, b, bound = pair(which, k=k)
        out = torch.randn(200, 272, generator=generator(3), device=DEVICE).to(dtype)
        want = out.double() + product(a, b)
        _gemm_out(out, *args(a, b), accumulate=True)
        assert_close(out, want, bound, f"{which} K {k}")


@pytest.mark.parametrize("which", PLAIN)
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_of_a_larger_out_are_written_and_no_more(which: tuple, accumulate: bool):
    """If false, a product into a slice writes over its neighbours."""
    a, b, bound = pair(which)
    wide = torch.full((202, 304), 7.0, device=DEVICE)
    out = wide[1:201, 16:288]
    _gemm_out(out, *args(a, b), accumulate=accumulate)
    assert_close(out, product(a, b) + 7.0 * accumulate, bound, f"{which}")
    rest = torch.ones_like(wide, dtype=torch.bool)
    rest[1:201, 16:288] = False
    assert bool((wide[rest] == 7.0).all()), f"{which}: written beyond out"


@pytest.mark.parametrize("which", PLAIN)
def test_a_bias_is_added_or_refused(which: tuple):
    """If false, a bias is added in the wrong place, read in the wrong dtype, or lost."""
    a, b, bound = pair(which)
    half = which[0] in (BF16, FP16)
    for out_dtype in (FP32, BF16, FP16):
        if half and out_dtype not in (FP32, which[0]):
            continue
        taken = None if out_dtype is FP32 and not half else out_dtype
        for dtype in (FP32, BF16, FP16):
            bias = torch.randn(272, generator=generator(4), device=DEVICE).to(dtype)
            what = f"{which} to {out_dtype} with a bias in {dtype}"
            if dtype is not taken:
                text = r"bias is \w+; to a \w+ product "
                text += r"(of codes cuBLASLt adds none|cuBLASLt adds a bias in \w+), "
                with pytest.raises(NotImplementedError, match=text):
                    _gemm(*args(a, b), out_dtype, bias)
                continue
            want = product(a, b) + bias.double()
            out = poisoned(200, 272, out_dtype)
            _gemm_out(out, *args(a, b), bias=bias)
            assert_close(out, want, bound, what)
            if out_dtype is FP32:
                out = torch.ones_like(out)
                _gemm_out(out, *args(a, b), accumulate=True, bias=bias)
                assert_close(out, want + 1, bound, f"{what}, accumulated")
            # at an odd element: right, or there is no algorithm
            shifted = torch.cat((bias[:1], bias))[1:]
            try:
                assert_close(
                    _gemm(*args(a, b), out_dtype, shifted), want, bound, f"{what} at an odd element"
                )
            except NotImplementedError as error:
                assert "no algorithm" in str(error), what


@pytest.mark.parametrize("which", PLAIN)
def test_alpha_is_read_on_the_device(which: tuple):
    """If false, a second-level scale is lost, or y that is not accumulated is read where alpha is
    given."""
    a, b, bound = pair(which)
    for value in (1.0, -0.375, 3e-5, 0.0):
        alpha, want = (
            torch.tensor([value], device=DEVICE),
            product(a, b) * torch.tensor(value).item(),
        )
        out, added = poisoned(200, 272), torch.ones(200, 272, device=DEVICE)
        _gemm_out(out, *args(a, b), alpha=alpha)
        _gemm_out(added, *args(a, b), accumulate=True, alpha=alpha)
        assert_close(added, want + 1, bound, f"{which} alpha {value}, accumulated")
        if value == 0.0:
            assert bool((out == 0).all()), f"{which}: alpha 0 leaves {out}"
            continue
        assert_close(out, want, bound, f"{which} alpha {value}")
    bias = torch.randn(272, generator=generator(4), device=DEVICE).to(
        BF16 if which[0] is not FP16 else FP16
    )
    alpha = torch.tensor([-0.375], device=DEVICE)
    got = _gemm(*args(a, b), bias.dtype, bias, alpha)
    assert_close(got, product(a, b) * -0.375 + bias.double(), bound, f"{which}, alpha and bias")


@pytest.mark.parametrize("which", PLAIN)
def test_nothing_is_summed_where_an_extent_is_zero(which: tuple):
    """If false, a token batch without tokens crashes a step."""
    for m, n, k in ((0, 272, 144), (200, 0, 144), (200, 272, 0), (0, 0, 0)):
        a, b, _ = pair(which, m, n, k)
        dtype = which[0] if which[0] is FP16 else BF16
        out = _gemm(*args(a, b), dtype)
        assert out.shape == (m, n) and bool((out == 0).all()), f"{which} {m}, {n}, {k}: {out}"
        bias, out = torch.arange(n, device=DEVICE).to(dtype), poisoned(m, n, dtype)
        _gemm_out(out, *args(a, b), bias=bias)
        assert bool((out == bias).all()), f"{which} {m}, {n}, {k} with a bias: {out}"
        out = torch.ones(m, n, dtype=dtype, device=DEVICE)
        _gemm_out(out, *args(a, b), accumulate=True)
        assert bool((out == 1).all()), f"{which} {m}, {n}, {k}, accumulated: {out}"


# Choices #


@pytest.mark.parametrize("which", PLAIN)
def test_fewer_multiprocessors_make_the_product(which: tuple):
    """If false, a product that leaves room for a collective is another one."""
    for shape in ((200, 272, 4112), (1024, 2048, 512)):
        a, b, bound = pair(which, *shape)
        for count in (1, 16, 100, 131):
            check(a, b, bound, f"{which} on {count}", (FP32,), sm_count=count)


# Streams, graphs, threads, repeated runs #


@pytest.mark.parametrize("which", PLAIN)
def test_the_same_operands_give_the_same_bits(which: tuple):
    """If false, a product depends on the order in which parts of a sum arrive, or on memory that
    nobody wrote."""
    for m, n, k in ((200, 272, 144), (200, 272, 4112), (8, 16, 16384)):
        a, b, _ = pair(which, m, n, k)
        want = _gemm(*args(a, b), FP32)
        for i in range(50):
            # workspaces start as something else
            torch.full((1 << 25,), 0xFF, dtype=torch.uint8, device=DEVICE)
            expected.assert_same(
                _gemm(*args(a, b), FP32), want, f"{which} [{m}, {n}] K {k}, run {i}"
            )


@pytest.mark.parametrize("which", PLAIN)
@pytest.mark.parametrize("warm", [True, False])
def test_a_captured_product_sees_new_values(which: tuple, warm: bool):
    """If false, a CUDA graph multiplies the operands of the step it was captured in, or cannot be
    captured."""
    m, n, k = (200, 272, 144) if warm else (208, 288, 4128)  # shapes that no other test has planned
    a, b, _ = pair(which, m, n, k)
    alpha = torch.ones(1, device=DEVICE)
    if warm:
        _gemm(*args(a, b), FP32, alpha=alpha)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out = poisoned(m, n)
    with torch.cuda.graph(graph):
        made = _gemm(*args(a, b), FP32, alpha=alpha)
        _gemm_out(out, *args(a, b))
    for step in range(3):
        other = operand(m, k, *which, seed=10 + step)
        a.data.copy_(other.data)
        if a.scale is not None:
            a.scale.copy_(other.scale)
        alpha.fill_(step + 0.5)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected.assert_same(made, _gemm(*args(a, b), FP32, alpha=alpha), f"{which}, replay {step}")
        expected.assert_same(out, _gemm(*args(a, b), FP32), f"{which}, replay {step}, given out")


def test_no_product_waits_for_the_device():
    """If false, every product stalls the host, and training with it."""
    made = [pair(p.values[0]) for p in PLAIN if MAJOR == 9 or p.values[0][1] <= ROW]
    alpha = torch.ones(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for a, b, _ in made:
            _gemm(*args(a, b), FP32, alpha=alpha)
            _gemm(*args(a, b), FP32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_the_current_stream_is_used():
    """If false, a product on another stream reads its operands before they were written."""
    streams, late = [torch.cuda.Stream() for _ in range(3)], []
    source, b, bound = pair(("e4m3", TENSOR), k=4112)
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            data = torch.zeros_like(source.data)
            torch.cuda._sleep(2_000_000)  # the operand is written late
            data.copy_(source.data)
            late.append(_gemm(data, b.data, source.scale, b.scale, source.kind, b.kind, FP32))
    torch.cuda.synchronize()
    for got in late:
        assert_close(got, product(source, b), bound, "on a stream of its own")


def test_threads_make_the_same_products():
    """If false, a plan of one thread has the scales of another."""
    cases = [pair(("e4m3", TENSOR), k=k)[:2] for k in (16, 144, 4112)]
    want = [_gemm(*args(a, b), FP32) for a, b in cases]
    torch.cuda.synchronize()

    def work(index: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            scaled = [(a._replace(scale=a.scale * 2.0**index), b) for a, b in cases]
            made = [_gemm(*args(a, b), FP32) for _ in range(50) for a, b in scaled]
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(4) as pool:
        for index, made in enumerate(pool.map(work, range(8))):
            for i, got in enumerate(made):
                expected.assert_same(
                    got, want[i % len(want)] * 2.0**index, f"product {i} of thread {index}"
                )


def test_schemas_say_what_the_operators_do():
    """If false, torch.compile moves a product across a write to its out."""
    a, b, _ = pair(("e4m3", TENSOR))
    ops = torch.ops.fsdp_quant
    torch.library.opcheck(ops.gemm.default, (*args(a, b), BF16), test_utils=("test_schema",))
    out = torch.zeros(200, 272, device=DEVICE)
    torch.library.opcheck(
        ops.gemm_out.default, (out, *args(a, b), True), test_utils=("test_schema",)
    )


# Refusals #


def refusals() -> dict[str, tuple[type[Exception], tuple, dict]]:
    """Start of the message -> (error, arguments of gemm, keywords)."""
    a, b, _ = pair(("e4m3", TENSOR))
    x, y, _ = pair((BF16, NONE))
    half = operand(272, 144, FP16, NONE)
    wide = operand(272, 160, "e4m3", TENSOR)
    e5m2 = operand(272, 144, "e5m2", TENSOR)
    odd = a.data.new_zeros(200 * 144 + 8)[8:].view(200, 144)

    def call(a=a, b=b, a_scale=None, a_kind=None, dtype=FP32, **kwargs):
        return (
            a.data,
            b.data,
            a.scale if a_scale is None else a_scale,
            b.scale,
            a.kind if a_kind is None else a_kind,
            b.kind,
            dtype,
        ), kwargs

    def codes(data: Tensor, scale: Tensor | None = a.scale) -> Operand:
        return Operand(data, scale, a.kind, a.values)

    def halves(data: Tensor) -> Operand:
        return Operand(data, None, 0, x.values)

    def flipped(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    value, gap = ValueError, NotImplementedError
    made = {
        "a is [200, 144] and b [272, 160]; wanted the same K": (value, *call(b=wide)),
        "a is Float; wanted bfloat16, float16, or uint8 codes": (
            value,
            *call(halves(x.data.float()), y),
        ),
        "a is Char; codes are uint8": (value, *call(codes(a.data.view(torch.int8)))),
        "a is Double; wanted bfloat16, float16 or float32": (
            value,
            *call(halves(x.data.double()), y),
        ),
        "out is Double; wanted bfloat16, float16 or float32": (value, *call(dtype=torch.float64)),
        "a has shape [28800]; wanted [rows, K]": (value, *call(codes(a.data.view(-1)))),
        "a_kind is 4; wanted element (0 to 3) | scaling (0 to 7) << 3": (value, *call(a_kind=4)),
        "a_kind is 65; wanted element": (value, *call(a_kind=65)),
        "a_kind is -1; wanted element": (value, *call(a_kind=-1)),
        "a has shape [200, 144] and strides [1, 200]; codes are K-major": (
            value,
            *call(codes(flipped(a.data))),
        ),
        "a has shape [200, 144] and strides [0, 1]": (
            value,
            *call(halves(x.data[:1].expand(200, 144)), y),
        ),
        "a has rows of 136 bytes, 144 bytes apart": (
            value,
            *call(codes(a.data[:, :136]), codes(b.data[:, :136])),
        ),
        "a has rows of 144 bytes, 144 bytes apart, from address 8 modulo 16": (
            value,
            *call(codes(odd)),
        ),
        "b has 264 rows (N); codes take multiples of 16": (value, *call(b=codes(b.data[:264]))),
        "a_scale is None, and the scaling in its kind is 1": (value, *call(codes(a.data, None))),
        "a_scale is given, and the scaling in its kind is 0": (value, *call(a_kind=1)),
        "a_scale is contiguous Float [2] on cuda:0; wanted 1 contiguous": (
            value,
            *call(a_scale=a.scale.repeat(2)),
        ),
        "a_scale is contiguous BFloat16 [1]": (value, *call(a_scale=a.scale.bfloat16())),
        "a_scale is contiguous Float [1] on cpu": (value, *call(a_scale=a.scale.cpu())),
        "a is Byte of kind 9 and b BFloat16 of kind 0": (gap, *call(b=y)),
        "a is BFloat16 of kind 0 and b Half of kind 0": (gap, *call(x, half)),
        "a is Byte of kind 10 and b Byte of kind 10": (
            gap,
            *call(operand(200, 144, "e5m2", TENSOR), e5m2),
        ),
        "out is Half; of BFloat16 operands cuBLASLt makes that and float32": (
            gap,
            *call(x, y, dtype=FP16),
        ),
        "bias is contiguous BFloat16 [16]": (
            value,
            *call(dtype=BF16, bias=torch.zeros(16, dtype=BF16, device=DEVICE)),
        ),
        "alpha is contiguous Float [2]": (value, *call(alpha=torch.zeros(2, device=DEVICE))),
        "alpha is contiguous Double [1]": (
            value,
            *call(alpha=torch.zeros(1, dtype=torch.float64, device=DEVICE)),
        ),
        "sm_count is -1; wanted 0 (all)": (value, *call(sm_count=-1)),
    }
    row, block, square = (operand(272, 144, "e4m3", s) for s in (ROW, BY_128, BY_128X128))
    mx = operand(272, 144, "e4m3", E8M0)
    fp4 = operand(272, 160, "e2m1", E4M3)
    made |= {
        "a_scale is contiguous Float [1] on cuda:0; wanted 272 contiguous": (
            value,
            *call(row, row, a_scale=a.scale),
        ),
        "a_scale is contiguous Float [271] on cuda:0; wanted 272": (
            value,
            *call(row, row, a_scale=row.scale[1:]),
        ),
        "a_scale is contiguous Float [2, 271]": (
            value,
            *call(block, block, a_scale=block.scale[:, 1:].contiguous()),
        ),
        "a_scale is not contiguous Float [2, 272]": (
            value,
            *call(block, block, a_scale=flipped(block.scale)),
        ),
        "a_scale is contiguous Float [3, 2]": (
            value,
            *call(square, block, a_scale=square.scale[:, :2].contiguous()),
        ),
        "a is Byte of kind 33 and b Byte of kind 33": (gap, *call(square, square)),
        "a is Byte of kind 17 and b Byte of kind 25": (gap, *call(row, block)),
        "a is Byte of kind 9 and b Byte of kind 25": (gap, *call(b=block)),
        "a is Byte of kind 57 and b Byte of kind 25": (
            gap,
            *call(operand(272, 144, "e4m3", BY_512), block),
        ),
        "a is Byte of kind 51 and b Byte of kind 41": (
            gap,
            *call(fp4, operand(272, 160, "e4m3", E8M0)),
        ),
    }
    if MAJOR == 9:
        made |= {
            "a has 17 rows (M); 1x128": (value, *call(operand(17, 144, "e4m3", BY_128), block)),
            "scaling 5 needs sm_100 or sm_120; the device is sm_90": (gap, *call(mx, mx)),
            "scaling 6 needs sm_100 or sm_120; the device is sm_90": (gap, *call(fp4, fp4)),
        }
    else:
        made |= {
            "scaling 3 needs sm_90": (gap, *call(block, block)),
            "scaling 4 needs sm_90": (gap, *call(block, square)),
        }
    return made


def test_errors_say_what_was_got_and_wanted():
    """If false, wrong input is found by an illegal memory access, or not at all."""
    for text, (error, arguments, kwargs) in refusals().items():
        with pytest.raises(error, match=re.escape(text)):
            _gemm(*arguments, **kwargs)
    with pytest.raises(NotImplementedError):
        _gemm(
            *(t.cpu() if isinstance(t, Tensor) else t for t in args(*pair(("e4m3", TENSOR))[:2])),
            FP32,
        )


def test_errors_of_a_given_out_say_what_was_got_and_wanted():
    """If false, a product writes beyond its out."""
    a, b, _ = pair(("e4m3", TENSOR))
    wide = torch.zeros(200, 280, device=DEVICE)
    refused = {
        "out is [200, 271] on cuda:0; wanted [200, 272]": wide[:, :271],
        "out is [200, 272] on cpu": torch.zeros(200, 272),
        "out has strides [1, 200]; wanted rows of 272": torch.zeros(272, 200, device=DEVICE).t(),
        "out has strides [0, 1]; wanted rows of 272": wide[:1, :272].expand(200, 272),
        "out has rows 1120 bytes apart, from address 4 modulo 16": wide[:, 1:273],
        "out has rows 1092 bytes apart, from address 0": torch.zeros(200, 273, device=DEVICE)[
            :, :272
        ],
        "out is Long; wanted bfloat16, float16 or float32": torch.zeros(
            200, 272, dtype=torch.long, device=DEVICE
        ),
    }
    for text, out in refused.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            _gemm_out(out, *args(a, b))
    assert int(wide.count_nonzero()) == 0, "a refused call wrote"


def shifted(o: Operand, offset: int) -> Operand:
    """The same operand, its scale at another address."""
    return o._replace(scale=torch.cat((o.scale.new_zeros(offset), o.scale))[offset:])


def test_row_scales_of_no_alignment_are_refused():
    """If false, a slice of the scales of rows makes a product fail on the device, and costs the
    process its GPU."""
    a, b = operand(200, 144, "e4m3", ROW, seed=1), operand(272, 144, "e4m3", ROW, seed=2)
    for offset in (1, 2, 3, 5):
        for name, operands in (("a", (shifted(a, offset), b)), ("b", (a, shifted(b, offset)))):
            text = f"{name}_scale is at address {4 * offset % 16} modulo 16; "
            text += "scales of rows and blocks are aligned"
            with pytest.raises(ValueError, match=text):
                _gemm(*args(*operands), FP32)
    check(shifted(a, 4), shifted(b, 8), CODES, "scales from elements 4 and 8")


def test_a_tensor_scale_of_no_alignment_goes_with_row_scales():
    """If false, the one scale of a single row is read where row scales may not lie."""
    for m in (1, 200):
        a, b = operand(m, 144, "e4m3", TENSOR, seed=1), operand(272, 144, "e4m3", ROW, seed=2)
        for offset in (1, 2, 3):
            check(shifted(a, offset), b, CODES, f"{m} rows, scale from element {offset}")


def test_products_have_their_flops():
    """If false, torch's memory budget makes products again before codes, or no graph compiles under
    one."""
    from torch.utils.flop_counter import FlopCounterMode

    a, b = operand(64, 128), operand(48, 128)
    with FlopCounterMode(display=False) as counter:
        _gemm(*args(a, b), BF16)
    assert counter.get_total_flops() == 2 * 64 * 48 * 128

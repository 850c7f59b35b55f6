# SPDX-License-Identifier: Apache-2.0
"""The products of Hopper on a CPU: csrc's own schedules, kernels and barriers (dist_tests/on_cpu).
Threads are fibers in random order; copies and products happen at any time that they may. Fences do
nothing here: what a missing one allows is not seen (`kernels/sleeps.py` looks for it, on a GPU).

Operands are small integers and scales powers of two: sums are exact in any order, and rounded once.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_tests.kernels.test_gemm_operator import (
    BY_128,
    BY_128X128,
    BY_512,
    NONE,
    ROW,
    TENSOR,
)
from dist_tests.laws import assert_same_bytes
from dist_tests.single.test_targets import CSRC
from fsdp_quant.formats import ceil_div, round_up
from fsdp_quant.ops import build

HERE = Path(__file__).parents[1] / "on_cpu"
pytestmark = pytest.mark.skipif(not build.cxx(), reason="there is no C++ compiler")

WHOLE, OF_ROWS, OF_DEPTH = range(3)  # GroupedDim
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
TYPES = [E4M3, E5M2, BF16, FP32]
GROUPED = [(BY_128, BY_128X128), (BY_128, BY_128), (ROW, ROW), (TENSOR, TENSOR), (NONE, NONE)]
TILES = {2: 256, 3: 128}  # of so many multiprocessors, at the sizes below
# Around the ends of tiles, waves and shares of the operand that the blocks of a cluster load.
SIZES = (1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320)
ENDS = [0, *itertools.accumulate(SIZES)]
UNWRITTEN = -(2.0**100)
GUARD = 1 << 16  # elements before and after out
DEPTH_ENDS = [0, 1280, 1280, 1408, 2000]


def library(csrc: Path, into: Path, kernels: str = "sm90_*_gemm*.cu") -> Callable[..., int]:
    """`product` of dist_tests/on_cpu/product.cpp with those kernels of `csrc`."""
    sources = [
        *(csrc / "gemm").glob(kernels),
        csrc / "gemm" / "sm90_gemm.cpp",
        HERE / "product.cpp",
    ]
    command = [*build.cxx(), "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-w"]
    command += [f"-I{HERE}", f"-I{csrc}", "-xc++", "-c"]
    started = [
        subprocess.Popen([*command, str(s), "-o", str(into / f"{s.name}.o")]) for s in sources
    ]
    assert not any([process.wait() for process in started])
    objects = [str(into / f"{s.name}.o") for s in sources]
    made = str(into / "product.so")
    subprocess.run([*build.cxx(), "-shared", "-o", made, *objects], check=True)
    return ctypes.CDLL(made, os.RTLD_LAZY).product


@pytest.fixture(scope="module")
def product(tmp_path_factory) -> Callable[..., int]:
    return library(CSRC, tmp_path_factory.mktemp("on_cpu"))


def scales(scaling: int, outer: int, k: int, groups: int, g) -> tuple[Tensor | None, Tensor]:
    """Scales as kernels read them, and the factor [groups, outer, k] of each code."""

    def powers(*shape: int) -> Tensor:
        return 2.0 ** torch.randint(-3, 4, (groups, *shape), generator=g).float()

    if scaling == NONE:
        return None, torch.ones(groups, outer, k)
    if scaling in (TENSOR, ROW):
        made = powers(outer if scaling == ROW else 1)
        return made, made[..., None].expand(groups, outer, k)
    if scaling == BY_128X128:
        made = powers(ceil_div(outer, 128), round_up(ceil_div(k, 128), 4))
        factors = made.repeat_interleave(128, 1)[:, :outer].repeat_interleave(128, 2)
        return made, factors[:, :, :k]
    run = 128 if scaling == BY_128 else 512
    made = powers(ceil_div(k, run), round_up(outer, 4))
    return made, made[:, :, :outer].repeat_interleave(run, 1)[:, :k].mT


def check(
    product: Callable[..., int],
    dim: int,
    scalings: tuple[int, int],
    ends: Sequence[int],
    sizes: tuple[int, int, int],
    processors: int = 2,
    types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    dtype: torch.dtype = BF16,
    accumulate: bool = False,
    bias_dtype: torch.dtype | None = None,
    seed: int = 0,
    alpha: float | None = None,
    far: bool = False,
) -> int:
    """Rows of the tile that a product took, whose result has the bits of the definition, and which
    wrote nothing else."""
    g, (m, n, k), groups = torch.Generator().manual_seed(seed), sizes, len(ends) - 1
    last = m if dim == OF_ROWS else k
    clamped = [*itertools.accumulate((min(end, last) for end in ends), max)]
    is_outer = scalings[0] <= ROW
    each = (
        dim == OF_DEPTH and is_outer or dim == OF_ROWS and scalings[0] == TENSOR,
        dim == OF_ROWS or dim == OF_DEPTH and is_outer,
    )
    a, b = (
        torch.randint(-2, 3, s, generator=g).double()
        for s in ((m, k), (groups, n, k) if dim == OF_ROWS else (n, k))
    )
    if far:  # columns whose first 512 are zeros of a large scale
        b[70:90, :512] = 0
    codes = [x.to(of) for x, of in zip((a, b), types)]
    (a_scale, of_a), (b_scale, of_b) = (
        scales(s, outer, k, groups if e else 1, g) for s, outer, e in zip(scalings, (m, n), each)
    )
    if far:  # one view of scales serves the kernel and the definition
        b_scale[0, 1:, 70:80] *= 2.0**-45
        of_b[0, 70:80, 512:] *= 2.0**-45
        b_scale[0, 2:, 80:90] *= 2.0**-45
        of_b[0, 80:90, 1024:] *= 2.0**-45
        b[80:90, 512:1024] = 0
        codes[1] = b.to(types[1])
    for e in range(groups if dim == OF_DEPTH and is_outer and scalings[0] else 0):
        if clamped[e] == clamped[e + 1]:
            a_scale[e] = torch.inf  # of no columns
    bias = torch.randint(-5, 6, (groups, n), generator=g).to(bias_dtype) if bias_dtype else None
    shape = (groups, m, n) if dim == OF_DEPTH else (m, n)
    whole = torch.full((math.prod(shape) + 2 * GUARD,), UNWRITTEN, dtype=dtype)
    out = whole[GUARD:-GUARD].view(shape)
    if accumulate:
        out.copy_(torch.randint(-9, 10, shape, generator=g))
    want = out.double()
    for e, (start, end) in enumerate(itertools.pairwise(clamped)):
        x, y = of_a[e * each[0]].double(), of_b[e * each[1]].double()
        if dim == OF_DEPTH:
            part = (a * x)[:, start:end] @ (b * y)[:, start:end].mT
            want[e] = part + want[e] if accumulate else part
        else:
            part = (a * x)[start:end] @ ((b[e] if dim == OF_ROWS else b) * y).mT
            part = part * alpha if alpha else part
            part = part + bias[e].double() if bias_dtype else part
            want[start:end] = part + want[start:end] if accumulate else part
    offsets, flag = torch.tensor(ends, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    of_alpha = torch.tensor([alpha]) if alpha else None
    numbers = [dim, groups, *sizes, TYPES.index(types[0]), scalings[0], TYPES.index(types[1])]
    numbers += [scalings[1], TYPES.index(dtype), accumulate, processors, *each]
    numbers.append(TYPES.index(bias_dtype or BF16))
    tensors = [codes[0], a_scale, codes[1], b_scale, out, bias, of_alpha, offsets, flag]
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    tile = product(
        (ctypes.c_int64 * len(numbers))(*numbers),
        (ctypes.c_void_p * len(pointers))(*pointers),
        seed,
    )
    said = {0: "no kernel", -1: "threads wait for ever", -2: "a fault, printed above"}
    assert tile > 0, said[tile]
    assert_same_bytes(out, want.to(dtype), f"{scalings} {types} to {dtype}, seed {seed}")
    assert (whole[:GUARD] == UNWRITTEN).all() and (whole[-GUARD:] == UNWRITTEN).all(), "beyond out"
    assert flag.item() == (dim != WHOLE and clamped != list(ends)), "the flag of offsets"
    return tile


@pytest.mark.parametrize("processors", TILES)
@pytest.mark.parametrize("scalings", GROUPED, ids=str)
def test_groups_of_rows_end_anywhere_in_a_tile(product, scalings, processors):
    """If false, rows at the end of an expert are multiplied by the next one's weight, or by
    none."""
    shape = ENDS[-1] + 3, 240, 272
    for seed, types in enumerate(((E4M3, E4M3), (E5M2, E4M3))):
        assert TILES[processors] == check(
            product, OF_ROWS, scalings, ENDS, shape, processors, types, seed=seed
        )
    check(product, OF_ROWS, scalings, ENDS, shape, processors, dtype=FP32, bias_dtype=BF16, seed=2)


@pytest.mark.parametrize("processors", TILES)
@pytest.mark.parametrize("scalings", [*GROUPED, (BY_128X128, BY_128)], ids=str)
def test_groups_of_the_contraction(product, scalings, processors):
    """If false, an expert's gradient has tokens of another, or one without tokens is not zero."""
    shape = 450, 240, DEPTH_ENDS[-1]
    assert TILES[processors] == check(
        product, OF_DEPTH, scalings, DEPTH_ENDS, shape, processors, seed=1
    )
    for seed in (2, 3):
        options = {"dtype": FP32, "accumulate": True, "seed": seed}
        check(product, OF_DEPTH, scalings, DEPTH_ENDS, shape, processors, **options)


@pytest.mark.parametrize("processors", TILES)
def test_groups_of_values_and_runs_of_512(product, processors):
    """If false, experts in bf16 or the gradient of a dense MXFP8 weight are of other numbers."""
    values = {"types": (BF16, BF16), "processors": processors}
    check(product, OF_ROWS, (TENSOR, TENSOR), ENDS, (ENDS[-1], 240, 272), **values)
    check(product, OF_DEPTH, (TENSOR, TENSOR), DEPTH_ENDS, (450, 240, DEPTH_ENDS[-1]), **values)
    for seed, types in enumerate(((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))):
        given = WHOLE, (BY_512, BY_512), [0, 450], (450, 240, 2000), processors, types
        check(product, *given, seed=seed)


@pytest.mark.parametrize("processors", TILES)
@pytest.mark.parametrize("scalings", GROUPED, ids=str)
def test_offsets_of_any_order_and_number(product, scalings, processors):
    """If false, tokens before the first expert are written, or a 33rd expert has others' tokens."""
    sizes = itertools.islice(itertools.cycle((3, 0, 1, 130, 0, 2, 5)), 70)
    ends = [*itertools.accumulate(sizes, initial=5)]
    ends[40], ends[-1] = 7, ends[-1] + 1000
    shape = max(ends[:-1]) + 9, 136, 16
    added = {"dtype": FP32, "accumulate": True, "bias_dtype": FP32, "alpha": 0.5, "seed": 1}
    check(product, OF_ROWS, scalings, ends, shape, processors)
    check(product, OF_ROWS, scalings, ends[:8], shape, processors, **added)


@pytest.mark.parametrize("processors, n, tile", [(4, 512, 256), (3, 264, 128)])
@pytest.mark.parametrize("scalings", GROUPED[:2], ids=str)
def test_bands_of_one_group(product, scalings, processors, n, tile):
    """If false, a large expert's rows from 2048 on are of other tiles."""
    assert tile == check(product, OF_ROWS, scalings, [1, 2302], (2304, n, 144), processors)


@pytest.mark.parametrize("processors", TILES)
def test_scales_beyond_the_first_32_of_a_line(product, processors):
    """If false, codes beyond 4096 of K have the scales of others."""
    check(product, OF_ROWS, GROUPED[0], [0, 1, 66], (66, 136, 4240), processors)
    ends = [0, 0, 4224, 4240]
    check(product, OF_DEPTH, (BY_128X128, BY_128), ends, (66, 136, 4240), processors)


@pytest.mark.parametrize("processors", TILES)
def test_runs_of_512_far_below_another(product, processors):
    """If false, a column's small runs after a large one are lost or scaled twice."""
    check(product, WHOLE, (BY_512, BY_512), [0, 200], (200, 240, 2000), processors, far=True)


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("      release(last);\n", "", "wait for ever"),
        (
            "if (w == 0 && kb > 0) release(last);",
            "if (w == 0 && kb + 1 < at.k_blocks) release(stage);",
            "elements differ",
        ),
    ],
    ids=["a stage is never released", "a stage is released before it is multiplied"],
)
def test_faults_of_barriers_are_found(tmp_path, before, after, said):
    """If false, the tests above pass whatever a kernel waits for."""
    csrc = Path(shutil.copytree(CSRC, tmp_path / "csrc"))
    kernel = csrc / "gemm" / "sm90_gemm_kernel.cuh"
    text = kernel.read_text()
    assert before in text
    kernel.write_text(text.replace(before, after))
    with pytest.raises(AssertionError, match=said):
        faulty = library(csrc, tmp_path, "sm90_fp8_grouped_gemm_1x128_128x128.cu")
        check(faulty, OF_ROWS, GROUPED[0], ENDS, (ENDS[-1], 240, 656))

# SPDX-License-Identifier: Apache-2.0
"""Row scales that an epilogue of our own applies, as on GPUs whose cuBLASLt has none: forced on
every GPU, held to fp64 and, on Hopper, to cuBLASLt's outer-vector scaling."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected
from dist_tests.kernels import test_gemm_operator as operators
from dist_tests.kernels.expected import BF16, DEVICE, FP16, FP32
from dist_tests.kernels.test_gemm_operator import ROW, TENSOR, Operand, args, generator

pytestmark = pytest.mark.skipif(operators.WHY_NOT is not None, reason=operators.WHY_NOT or "")
FORCED = "FSDP_QUANT_SCALED_EPILOGUE"
ROWS = ("e4m3", ROW)
PAIRS = (
    (ROWS, ROWS),
    (("e5m2", ROW), ROWS),
    (ROWS, ("e5m2", ROW)),
    (ROWS, ("e4m3", TENSOR)),
    (("e4m3", TENSOR), ROWS),
)


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setenv(FORCED, "1")


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_products_are_those_of_the_decoded_operands(forced, left: tuple, right: tuple):
    """If false, a scale meets the wrong row, or a tail is dropped, where cuBLASLt has no row
    scales."""
    operators.test_products_of_codes_are_those_of_the_decoded_operands(left, right)


def test_out_bias_and_alpha(forced):
    """If false, an argument of the operator is lost where cuBLASLt has no row scales."""
    for dtype in (FP32, BF16):
        operators.test_products_accumulate(ROWS, dtype)
    for accumulate in (False, True):
        operators.test_rows_of_a_larger_out_are_written_and_no_more(ROWS, accumulate)
    operators.test_a_bias_is_added_or_refused(ROWS)
    operators.test_alpha_is_read_on_the_device(ROWS)
    operators.test_nothing_is_summed_where_an_extent_is_zero(ROWS)
    operators.test_a_tensor_scale_of_no_alignment_goes_with_row_scales()


def test_runs_graphs_and_the_host(forced):
    """If false, runs differ in bits, a captured product multiplies old operands, or the host
    waits."""
    operators.test_the_same_operands_give_the_same_bits(ROWS)
    for warm in (True, False):
        operators.test_a_captured_product_sees_new_values(ROWS, warm)
    operators.test_no_product_waits_for_the_device()


def exact(outer: int, k: int, scaling: int, seed: int) -> Operand:
    """Codes of -1, 0 and 1, and powers of two as scales: sums have 8 bits."""
    g = generator(seed)
    values = torch.randint(-1, 2, (outer, k), generator=g, device=DEVICE).double()
    exponents = torch.randint(-4, 4, (outer if scaling == ROW else 1,), generator=g, device=DEVICE)
    scale = 2.0 ** exponents.float()
    data = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return Operand(data, scale, 1 | scaling << 3, values * scale.double()[:, None])


def bits(a: Operand, b: Operand, dtype: torch.dtype, before: Tensor, alpha: Tensor) -> Tensor:
    out = before.to(dtype, copy=True)
    torch.ops.fsdp_quant.gemm_out(out, *args(a, b), accumulate=True, alpha=alpha)
    return out


def test_exact_sums_have_the_bits_of_outer_vector_scaling(monkeypatch):
    """If false, the epilogue rounds more than once, or applies its factors to other elements than
    cuBLASLt does."""
    alpha = torch.tensor([-0.5], device=DEVICE)
    shapes = ((1, 16, 16), (33, 272, 144), (200, 528, 160), (517, 1040, 128))
    for (m, n, k), (left, right), dtype in itertools.product(
        shapes, ((ROW, ROW), (ROW, TENSOR), (TENSOR, ROW)), (FP32, BF16, FP16)
    ):
        a, b = exact(m, k, left, 1), exact(n, k, right, 2)
        what = f"scalings {left} and {right}, [{m}, {n}] K {k}"
        before = torch.randint(-8, 8, (m, n), generator=generator(3), device=DEVICE).float()
        monkeypatch.setenv(FORCED, "1")
        made = torch.ops.fsdp_quant.gemm(*args(a, b), dtype)
        added = bits(a, b, dtype, before, alpha)
        want = operators.product(a, b)
        expected.assert_same(made, want.to(dtype), what)
        expected.assert_same(added, (before.double() - want / 2).to(dtype), f"{what}, added")
        monkeypatch.delenv(FORCED)
        expected.assert_same(made, torch.ops.fsdp_quant.gemm(*args(a, b), dtype), f"{what}, native")
        expected.assert_same(added, bits(a, b, dtype, before, alpha), f"{what}, added, native")

# SPDX-License-Identifier: Apache-2.0
"""One quantizer, two quantizers, derived columns, updates, shapes, and the statistics of random
rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_tests.golden import oracle
from dist_tests.laws import PAIRS, QUANTIZERS, assert_same_bytes, assert_same_storage, values
from fsdp_quant.formats import (
    COLUMNWISE,
    E2M1,
    FLT_MAX,
    FORMATS,
    ROWWISE,
    Direction,
    ceil_div,
    format_of,
)
from fsdp_quant.ops import reference, rng
from fsdp_quant.quantizer import HybridQuantizer, Quantizer, hybrid_of
from fsdp_quant.scaling import DelayedScaling

WITH_OPTIONS = {
    **QUANTIZERS,
    "nvfp4_rht": Quantizer("nvfp4", rotation=True),
    "nvfp4_sr": Quantizer("nvfp4", rounding="stochastic"),
    "nvfp4_rht_sr": Quantizer("nvfp4", rotation=True, rounding="stochastic"),
    "nvfp4_16x16_sr": Quantizer("nvfp4_16x16", rounding="stochastic"),
    "mxfp8_sr": Quantizer("mxfp8", rounding="stochastic"),
    "fp8_row_eps": Quantizer("fp8_row", eps=1e-2),
}

each_quantizer = pytest.mark.parametrize("name", sorted(WITH_OPTIONS))
each_direction = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)


def key(
    step: int = 0, *, seed: int = 11, ident: int = 7, micro_batch: int = 0, row0: int = 0
) -> Tensor:
    return torch.tensor([seed, step, ident, micro_batch, row0])


# Hybrids #


@each_quantizer
def test_hybrid_of_one_quantizer_is_that_quantizer(name: str):
    """Otherwise hybrid(F, F) trains another model than F."""
    q = WITH_OPTIONS[name]
    x = values(33, 48)
    hybrid, alone = HybridQuantizer(q, q).quantize(x, key=key()), q.quantize(x, key=key())
    assert_same_storage(hybrid.rowwise, q.storage(x, ROWWISE, key()), "rowwise")
    columnwise = q.storage(x, COLUMNWISE, key())
    if q.fmt.shares_storage:  # one storage: its random bits are those of the rows
        columnwise = hybrid.rowwise.as_direction(COLUMNWISE)
        assert hybrid.columnwise.data.data_ptr() == hybrid.rowwise.data.data_ptr()
    assert_same_storage(hybrid.columnwise, columnwise, "columnwise")
    assert_same_storage(alone.rowwise, hybrid.rowwise)
    assert_same_storage(alone.columnwise, hybrid.columnwise)
    assert_same_bytes(alone.dequantize(), hybrid.rowwise.dequantize())


@pytest.mark.parametrize("row", sorted(FORMATS))
def test_hybrid_sides_equal_their_own_quantizer(row: str):
    """Otherwise the format of one direction changes the bytes of the other. All pairs, and each
    side alone."""
    x = values(33, 48, kind="outliers")
    want_row = Quantizer(row).storage(x, ROWWISE)
    assert_same_storage(HybridQuantizer(row, None).quantize(x).rowwise, want_row, "rowwise alone")
    assert HybridQuantizer(row, None).quantize(x).columnwise is None
    for col in (c for r, c in PAIRS if r == row):
        got = HybridQuantizer(row, col).quantize(x)
        assert_same_storage(got.rowwise, want_row, f"{row} / {col} rowwise")
        want_col = Quantizer(col).storage(x, COLUMNWISE)
        assert_same_storage(got.columnwise, want_col, f"{row} / {col} columnwise")
        alone = HybridQuantizer(None, col).quantize(x)
        assert alone.rowwise is None
        assert_same_storage(alone.columnwise, want_col, f"{col} columnwise alone")
        assert tuple(got.shape) == tuple(alone.shape) == (33, 48)


def test_hybrid_sides_with_options_equal_their_own_quantizer():
    """Otherwise rounding, rotation or an element chosen for one direction leaks into the other."""
    x = values(33, 48, kind="heavy")
    names = [
        "fp8_tensor",
        "fp8_tensor_e5m2",
        "mxfp8_sr",
        "nvfp4",
        "nvfp4_sr",
        "nvfp4_rht",
        "nvfp4_rht_sr",
    ]
    for row in names:
        for col in names:
            a, b = WITH_OPTIONS[row], WITH_OPTIONS[col]
            got = HybridQuantizer(a, b).quantize(x, key=key(3))
            assert_same_storage(
                got.rowwise, a.storage(x, ROWWISE, key(3)), f"{row} / {col} rowwise"
            )
            assert_same_storage(
                got.columnwise, b.storage(x, COLUMNWISE, key(3)), f"{row} / {col} columnwise"
            )


def test_one_direction_at_a_time_gives_the_same_bytes():
    """Otherwise a forward that skips the columnwise storage sees another rowwise one."""
    x = values(33, 48)
    for row, col in PAIRS:
        for source in ("original", "rowwise_dequantized"):
            hybrid = HybridQuantizer(row, col, source)
            both, _ = hybrid.storages(x)
            for direction in Direction:
                one, _ = hybrid.storages(x, [direction])
                assert one.keys() == {direction}
                assert_same_storage(one[direction], both[direction], f"{hybrid} {direction.value}")


# Columns derived from rows #


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_derived_columns_are_made_from_the_decoded_rows(dtype: torch.dtype):
    """Otherwise the backward multiplies other values than the forward did, or values rounded once
    more."""
    x = values(33, 48, kind="heavy", dtype=dtype)
    for row, col in PAIRS:
        got = HybridQuantizer(row, col, "rowwise_dequantized").quantize(x)
        want_row = Quantizer(row).storage(x, ROWWISE)
        assert_same_storage(got.rowwise, want_row, f"{row} / {col} rowwise")
        decoded = want_row.dequantize(torch.float32).to(x.dtype)
        want_col = Quantizer(col).storage(decoded, COLUMNWISE)
        if row == col and FORMATS[row].shares_storage:
            want_col = want_row.as_direction(COLUMNWISE)
        assert_same_storage(got.columnwise, want_col, f"{row} / {col} columnwise")
        if row in ("fp8_tensor", "fp8_row", "nvfp4", "nvfp4_16x16") and col in (
            "identity",
            "mxfp8",
            "nvfp4",
        ):
            original = HybridQuantizer(row, col).quantize(x).columnwise
            assert not torch.equal(got.columnwise.dequantize(), original.dequantize()), (
                f"{row} / {col}"
            )


def test_derived_identity_columns_are_what_the_forward_multiplied():
    """Otherwise backward_override="dequantized" breaks the chain rule on the forward's own
    operands."""
    x = values(33, 48)
    for name in FORMATS:
        got = HybridQuantizer(name, "identity", "rowwise_dequantized").quantize(x)
        assert_same_bytes(got.columnwise.dequantize(), got.rowwise.dequantize(), name)


def test_derived_columns_with_random_rounding():
    """Otherwise a derived columnwise side cannot round stochastically: its random bits are keyed
    like any other."""
    x = values(33, 48)
    for row in ("mxfp8", "identity"):
        hybrid = HybridQuantizer(row, WITH_OPTIONS["nvfp4_sr"], "rowwise_dequantized")
        got = hybrid.quantize(x, key=key(5)).columnwise
        decoded = Quantizer(row).storage(x, ROWWISE).dequantize(torch.float32).to(x.dtype)
        assert_same_storage(got, WITH_OPTIONS["nvfp4_sr"].storage(decoded, COLUMNWISE, key(5)), row)
        assert hybrid.quantize(x).columnwise is not None  # with a key drawn from torch's generator


def test_derived_columns_see_the_compute_dtype():
    """Decoded in fp32 and rounded once: an fp32 master's columns are made from bf16 values when
    asked."""
    x = values(33, 48, dtype=torch.float32)
    hybrid = HybridQuantizer("fp8_row", "mxfp8", "rowwise_dequantized")
    row = hybrid.rowwise.storage(x, ROWWISE)
    got = hybrid.derive_columnwise(row, torch.bfloat16)
    want = Quantizer("mxfp8").storage(row.dequantize(torch.float32).to(torch.bfloat16), COLUMNWISE)
    assert got.dtype is torch.float32
    assert_same_bytes(got.data, want.data)
    assert_same_bytes(got.scale, want.scale)


def test_quantizing_twice_costs_nothing_with_powers_of_two():
    """Rows then columns: with powers of two the second rounding is free, with fp32 scales it
    doubles the noise."""
    x = values(256, 256, dtype=torch.float32)

    def loss_db(fmt) -> float:
        """How much worse the twice quantized values are than the once quantized ones."""
        got = HybridQuantizer(fmt, fmt, "rowwise_dequantized").quantize(x)
        once, twice = ((s.dequantize() - x).square().sum() for s in (got.rowwise, got.columnwise))
        return float(10 * torch.log10(twice / once))

    assert loss_db(format_of("fp8_1x128")) == pytest.approx(0.0, abs=0.05)
    assert loss_db(format_of("mxfp8")) == pytest.approx(0.0, abs=0.05)
    # Independent noise of equal power doubles it: 3.0 dB.
    assert loss_db(format_of("fp8_1x128", pow2=False)) == pytest.approx(3.0, abs=0.3)


# Updates #


@each_quantizer
def test_update_equals_a_fresh_quantize(name: str):
    """Otherwise persistent buffers keep stale codes or scales."""
    q = WITH_OPTIONS[name]
    for row, col in ((q, q), (q, "mxfp8"), (None, q), (q, None)):
        hybrid = HybridQuantizer(row, col)
        out = hybrid.quantize(values(33, 48, seed=1), key=key(1))
        alias = out.detach()
        pointers = [
            b.data_ptr()
            for s in (out.rowwise, out.columnwise)
            if s is not None
            for b in s.buffers().values()
        ]
        x = values(33, 48, seed=2, kind="outliers")
        assert hybrid.update(out, x, key=key(2)) is out
        fresh = hybrid.quantize(x, key=key(2))
        for got in (out, alias):
            assert_same_storage(got.rowwise, fresh.rowwise, f"{hybrid} rowwise")
            assert_same_storage(got.columnwise, fresh.columnwise, f"{hybrid} columnwise")
        after = [
            b.data_ptr()
            for s in (out.rowwise, out.columnwise)
            if s is not None
            for b in s.buffers().values()
        ]
        assert after == pointers


def test_update_leaves_what_was_quantized_alone():
    """Otherwise updating an identity storage writes into the tensor that it was once made from."""
    for name in FORMATS:
        x = values(33, 48)
        before = x.clone()
        hybrid = hybrid_of(name)
        hybrid.update(hybrid.quantize(x), values(33, 48, seed=9))
        assert_same_bytes(x, before, name)


def test_update_of_a_dropped_direction_raises_and_changes_nothing():
    """Otherwise half of a tensor is updated before the error."""
    for row, col in (("mxfp8", "nvfp4"), ("fp8_tensor", "fp8_tensor"), ("identity", "mxfp8")):
        out = HybridQuantizer(row, None).quantize(values(33, 48))
        want = out.clone()
        with pytest.raises(ValueError, match="columnwise storage was dropped"):
            HybridQuantizer(row, col).update(out, values(33, 48, seed=3))
        assert_same_storage(out.rowwise, want.rowwise)
        assert out.columnwise is None
        with pytest.raises(ValueError, match="no columnwise storage"):
            out.storage_for(COLUMNWISE)


@pytest.mark.parametrize(
    "x,quantizer,words",
    [
        (values(33, 32), HybridQuantizer("mxfp8", "nvfp4"), "shape and dtype must agree"),
        (
            values(33, 48, dtype=torch.float32),
            HybridQuantizer("mxfp8", "nvfp4"),
            "shape and dtype must agree",
        ),
        (values(33, 48), HybridQuantizer("mxfp8", "mxfp8"), "formats differ"),
        (
            values(33, 48),
            HybridQuantizer(format_of("mxfp8", element="e5m2"), "nvfp4"),
            "formats differ",
        ),
        (
            values(33, 48),
            HybridQuantizer("mxfp8", Quantizer("nvfp4", rotation=True)),
            "formats differ",
        ),
    ],
)
def test_update_of_another_kind_raises_and_changes_nothing(
    x: Tensor, quantizer: HybridQuantizer, words: str
):
    """Otherwise codes of one format are written over the scales of another."""
    out = HybridQuantizer("mxfp8", "nvfp4").quantize(values(33, 48))
    want = out.clone()
    with pytest.raises(ValueError, match=words):
        quantizer.update(out, x)
    assert_same_storage(out.rowwise, want.rowwise)
    assert_same_storage(out.columnwise, want.columnwise)


def test_update_of_one_storage_by_two_quantizers_raises_or_is_right():
    """Otherwise the columnwise bytes overwrite the rowwise ones that share their memory."""
    out = hybrid_of("fp8_tensor").quantize(values(33, 48))
    other = HybridQuantizer(Quantizer("fp8_tensor"), Quantizer("fp8_tensor", eps=100.0))
    x = values(33, 48, seed=4)
    try:
        other.update(out, x)
    except ValueError:
        return
    assert_same_storage(out.rowwise, other.quantize(x).rowwise)
    assert_same_storage(out.columnwise, other.quantize(x).columnwise)


# Shapes and inputs #


@each_quantizer
def test_leading_dims_count_as_rows(name: str):
    """Otherwise a 3-D activation has other blocks than the [tokens, features] matrix that the GEMM
    multiplies."""
    q = WITH_OPTIONS[name]
    flat = values(24, 40)
    want = q.quantize(flat, key=key())
    for shape in [(2, 12, 40), (2, 3, 4, 40), (24, 1, 40), (1, 24, 40)]:
        got = q.quantize(flat.view(shape), key=key())
        assert tuple(got.shape) == shape
        assert tuple(got.dequantize().shape) == shape
        assert_same_storage(got.rowwise, want.rowwise, f"{shape} rowwise")
        assert_same_storage(got.columnwise, want.columnwise, f"{shape} columnwise")
        assert_same_bytes(got.dequantize(), want.dequantize().view(shape))
    vector = q.quantize(flat[0], key=key())
    assert tuple(vector.shape) == (40,)
    assert_same_storage(vector.rowwise, q.quantize(flat[:1], key=key()).rowwise)


def strided_views(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory: between NaNs, transposed, every other row, reversed strides
    of a 3-D tensor."""
    rows, cols = x.shape
    padded = x.new_full((rows + 5, cols + 9), math.nan)
    padded[2 : 2 + rows, 3 : 3 + cols] = x
    doubled = x.new_full((2 * rows, 2 * cols), math.nan)
    doubled[::2, ::2] = x
    return {
        "inside a NaN frame": padded[2 : 2 + rows, 3 : 3 + cols],
        "transposed": x.t().contiguous().t(),
        "every other": doubled[::2, ::2],
        "swapped dims": x.reshape(3, rows // 3, cols)
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
        .reshape(rows, cols),
    }


@each_quantizer
def test_strides_do_not_matter(name: str):
    """Otherwise a slice quantizes memory beside it, or makes buffers that are not compact."""
    q = WITH_OPTIONS[name]
    x = values(33, 47, kind="heavy")
    want = q.quantize(x, key=key())
    for what, view in strided_views(x).items():
        got = q.quantize(view, key=key())
        for direction in Direction:
            mine = got.storage_for(direction)
            assert_same_storage(mine, want.storage_for(direction), f"{what} {direction.value}")
            for buffer, tensor in mine.buffers().items():
                assert tensor.is_contiguous(), (
                    f"{name} {what} {direction.value} {buffer} {tensor.stride()}"
                )
    expanded = q.quantize(x[:1].expand(33, 47), key=key())
    assert_same_storage(
        expanded.columnwise, q.quantize(x[:1].expand(33, 47).contiguous(), key=key()).columnwise
    )


@each_quantizer
def test_padding_never_reaches_a_statistic(name: str):
    """A block that the edge cuts counts the elements that exist: the same values inside a larger
    tensor of zeros, whose blocks are whole, have the same codes and scales."""
    q = WITH_OPTIONS[name]
    for shape in [(1, 1), (7, 15), (17, 33), (31, 96), (33, 31)]:
        x = values(*shape, kind="outliers")
        whole = x.new_zeros(256, 256)
        whole[: shape[0], : shape[1]] = x
        for direction in Direction:
            small, large = q.storage(x, direction, key()), q.storage(whole, direction, key())
            what = f"{name} {shape} {direction.value}"
            rows, cols = small.padded_shape
            assert_same_bytes(small.decode(), large.decode()[:rows, :cols], what)
            if small.scale is not None:
                r, c = small.scale.shape
                assert_same_bytes(small.scale, large.scale[:r, :c], f"{what} scales")
            if small.tensor_amax is not None:
                assert_same_bytes(small.tensor_amax, large.tensor_amax, f"{what} tensor amax")
            if q.fmt.element is E2M1 and cols % 2:
                assert (small.data[:, -1] >> 4).max() == 0, (
                    "the last nibble of an odd row is padding"
                )


@each_quantizer
@pytest.mark.parametrize("shape", [(0, 48), (0, 33), (2, 0, 48)])
def test_zero_rows(name: str, shape: tuple[int, ...]):
    """Otherwise an expert or a rank without tokens breaks the step."""
    x = torch.zeros(shape, dtype=torch.bfloat16)
    got = WITH_OPTIONS[name].quantize(x, key=key())
    assert tuple(got.shape) == shape
    for direction in Direction:
        storage = got.storage_for(direction)
        assert tuple(storage.dequantize().shape) == (0, shape[-1])
        assert storage.data.numel() == 0
    assert_same_bytes(got.dequantize(), x)
    hybrid_of(WITH_OPTIONS[name]).update(got, x, key=key())


def test_quantize_keeps_no_graph():
    """Otherwise scales of a parameter hold its autograd graph, and refilling their buffers
    raises."""
    for name, q in WITH_OPTIONS.items():
        x = values(33, 48, dtype=torch.float32).requires_grad_()
        out = q.quantize(x, key=key())
        for direction in Direction:
            for buffer, tensor in out.storage_for(direction).buffers().items():
                assert not tensor.requires_grad, f"{name} {direction.value} {buffer}"
        assert not out.dequantize().requires_grad


def test_quantize_does_not_change_its_input():
    """Otherwise the activation that autograd saved is no longer what the layer multiplied."""
    for name, q in WITH_OPTIONS.items():
        x = values(33, 48, kind="outliers")
        before = x.clone()
        q.quantize(x, key=key())
        assert_same_bytes(x, before, name)


# Errors #


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn]
)
def test_other_dtypes_are_refused(dtype: torch.dtype):
    """Otherwise token ids or codes are quantized as if they were values."""
    with pytest.raises(ValueError, match=f"bf16, fp16 and fp32 tensors, got {dtype}"):
        Quantizer("mxfp8").quantize(torch.zeros(4, 32).to(dtype))


def test_scalars_are_refused():
    """Otherwise the error comes from inside a kernel."""
    with pytest.raises(ValueError, match="at least one dim, got a scalar"):
        Quantizer("mxfp8").quantize(torch.tensor(1.0))


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Quantizer("mxfp8", rounding="up"), ["nearest", "stochastic", "'up'"]),
        (
            lambda: Quantizer("mxfp8", scaling="delayed"),
            ["'current'", "DelayedScaling", "'delayed'"],
        ),
        (lambda: Quantizer("mxfp8", scaling=DelayedScaling()), ["one scale a tensor", "mxfp8"]),
        (lambda: Quantizer("fp8_row", scaling=DelayedScaling()), ["one scale a tensor", "fp8_row"]),
        (lambda: Quantizer("identity", rounding="stochastic"), ["identity", "not rounded"]),
        (lambda: Quantizer("nvfp4", eps=1e-6), ["eps", "fp32", "nvfp4"]),
        (lambda: Quantizer("mxfp8", rotation=True), ["rotation", "4-bit", "mxfp8"]),
        (lambda: Quantizer("nvfp4_16x16", rotation=True), ["rotation", "nvfp4_16x16"]),
        (lambda: HybridQuantizer(None, None), ["rowwise or a columnwise"]),
        (
            lambda: HybridQuantizer("mxfp8", "mxfp8", "rows"),
            ["original", "rowwise_dequantized", "'rows'"],
        ),
        (lambda: HybridQuantizer("mxfp8", None, "rowwise_dequantized"), ["both directions"]),
        (
            lambda: HybridQuantizer(
                Quantizer("nvfp4", rotation=True), "mxfp8", "rowwise_dequantized"
            ),
            ["rotated"],
        ),
        (lambda: HybridQuantizer("mxfp8", "mxfp5"), ["unknown format 'mxfp5'", "nvfp4_16x16"]),
    ],
)
def test_options_that_mean_nothing_are_refused(make: Callable, words: list[str]):
    """Otherwise an option is accepted and has no effect."""
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


def test_stochastic_storage_needs_a_key():
    """Otherwise random bits come from nowhere, and recomputation rounds differently."""
    with pytest.raises(ValueError, match="nvfp4 needs a random key"):
        WITH_OPTIONS["nvfp4_sr"].storage(values(16, 16), ROWWISE)


def test_quantizers_are_values():
    """Otherwise compiled graphs and plans are made again for equal recipes."""
    assert Quantizer("mxfp8") == Quantizer(FORMATS["mxfp8"])
    assert hash(Quantizer("mxfp8")) == hash(Quantizer(FORMATS["mxfp8"]))
    assert Quantizer("nvfp4", rotation=True).fmt.rotated
    assert Quantizer(replace(FORMATS["nvfp4"], rotated=True)) == Quantizer("nvfp4", rotation=True)
    assert HybridQuantizer("mxfp8", "nvfp4") == HybridQuantizer(
        Quantizer("mxfp8"), FORMATS["nvfp4"]
    )
    assert hybrid_of("mxfp8") == hybrid_of(FORMATS["mxfp8"]) == hybrid_of(Quantizer("mxfp8"))
    texts = [repr(hybrid_of(q)) for name, q in WITH_OPTIONS.items() if name != "fp8_row_eps"]
    assert len(set(texts)) == len(texts), "two quantizers print alike"
    with pytest.raises(AttributeError):
        Quantizer("mxfp8").eps = 1.0


# Random rounding #

SR_NAMES = ["nvfp4", "nvfp4_16x16", "nvfp4_rht", "mxfp8", "fp8_tensor", "fp8_tensor_e5m2"]


def stochastic(name: str) -> Quantizer:
    return replace(WITH_OPTIONS[name], rounding="stochastic")


def neighbours(q: Quantizer, x: Tensor, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """(exact, low, high) in fp64: the values that are rounded, and the representable magnitudes
    around them."""
    exact = reference.prepared(x, q.encoding(direction)).double()
    storage = q.storage(x, direction, key())
    largest = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x77}[q.fmt.element.name]
    unit = (
        storage.with_buffers({"data": torch.full_like(storage.data, largest)}).decode().double()
        / q.fmt.element.max
    )
    grid = torch.from_numpy(oracle.grid(q.fmt.element.name))
    at = torch.searchsorted(grid, (exact.abs() / unit).contiguous(), right=True) - 1
    return exact, grid[at] * unit, grid[(at + 1).clamp(max=len(grid) - 1)] * unit


@pytest.mark.parametrize("name", SR_NAMES)
@each_direction
def test_stochastic_rounding_gives_a_neighbour(name: str, direction: Direction):
    """Otherwise rounding jumps over a code, or moves a value that the format holds."""
    q = stochastic(name)
    x = values(48, 64, kind="heavy")
    exact, low, high = neighbours(q, x, direction)
    went_up = went_down = 0
    for draw in range(6):
        got = q.storage(x, direction, key(draw)).decode().double()
        assert (got * exact >= 0).all()
        # The exact product code * scale * D against its fp32 value: two roundings.
        is_low, is_high = ((got.abs() - side).abs() <= side * 2.0**-22 for side in (low, high))
        assert (is_low | is_high).all()
        went_up, went_down = went_up + is_high.sum(), went_down + is_low.sum()
    assert went_up > exact.numel() and went_down > exact.numel()


def check_unbiased(
    draw: Callable[[int], np.ndarray], x: np.ndarray, variance: np.ndarray, n: int = 256
) -> None:
    """Raise AssertionError unless n draws average to x as independent unbiased rounding with this
    variance does.

    Three statistics, each with its own standard error: the gain sum(x error) / sum(x x), where a
    scale that saturates block maxima shows; the mean of error * sign(x); and the mean square of the
    averaged error, variance / n.
    """
    checkpoints = {n // 16, n // 4, n}
    total = np.zeros_like(x)
    for i in range(n):
        total += draw(i)
        if i + 1 in checkpoints:
            error = total / (i + 1) - x
            fall = (error**2).mean() / (variance.mean() / (i + 1))
            # A chi-square of x.size terms of unequal weight: 5 standard errors of the weighted mean
            # of squares.
            width = 5 * math.sqrt(2 * (variance**2).sum()) / variance.sum()
            assert abs(fall - 1) < width + 0.02, (
                f"after {i + 1} draws the error is {fall:.3f} of variance / n"
            )
    gain = (x * error).sum() / (x * x).sum()
    gain_error = math.sqrt((x * x * variance).sum() / n) / (x * x).sum()
    assert abs(gain) < 5 * gain_error, f"gain error {gain:.2e}, standard error {gain_error:.1e}"
    drift, drift_error = (error * np.sign(x)).sum(), math.sqrt(variance.sum() / n)
    assert abs(drift) < 5 * drift_error, f"drift {drift / drift_error:.1f} standard errors"


def rounding_variance(exact: Tensor, low: Tensor, high: Tensor) -> np.ndarray:
    """(high - x)(x - low) of each element: what unbiased rounding to two neighbours has."""
    return ((high - exact.abs()) * (exact.abs() - low)).clamp(min=0).numpy()


@pytest.mark.parametrize("name", SR_NAMES)
@each_direction
def test_stochastic_rounding_is_unbiased(name: str, direction: Direction):
    """Otherwise gradients drift: the mean of n draws must approach the value as 1 / n, with no gain
    error."""
    q = stochastic(name)
    x = values(64, 128)
    exact, low, high = neighbours(q, x, direction)
    check_unbiased(
        lambda step: q.storage(x, direction, key(step)).decode().double().numpy(),
        exact.numpy(),
        rounding_variance(exact, low, high),
    )


def nvfp4_draw(x: Tensor, scale: Tensor, up_always: bool) -> Callable[[int], np.ndarray]:
    """nvfp4 rows of x, rounded on the same bits under block scales of our choice."""
    d = oracle.tensor_scale(float(x.abs().max()), oracle.SPECS["nvfp4"])
    decode = oracle.fl(np.repeat(oracle.value_of(scale.numpy(), "e4m3"), 16, axis=1) * d)
    enc = oracle.fl(1 / decode)
    scaled = oracle.fl(x.double().numpy() * enc)

    def draw(step: int) -> np.ndarray:
        bits = rng.random_bytes(tuple(x.shape), ROWWISE, key(step)).numpy()
        return (
            oracle.value_of(
                oracle.cast(scaled, "e2m1", np.zeros_like(bits) if up_always else bits), "e2m1"
            )
            * decode
        )

    return draw


def test_biased_rounding_is_caught():
    """Negative control: the check above must fail for rounding always up, and for block scales
    rounded to nearest, which saturate block maxima; and pass for the same draws under the scales
    that stochastic rounding uses."""
    x = values(64, 128)
    q = stochastic("nvfp4")
    variance, exact = rounding_variance(*neighbours(q, x, ROWWISE)), x.double().numpy()
    rounded_up, nearest = (
        q.storage(x, ROWWISE, key()).scale,
        Quantizer("nvfp4").storage(x, ROWWISE).scale,
    )
    assert (nearest < rounded_up).any()
    check_unbiased(nvfp4_draw(x, rounded_up, False), exact, variance)
    for scale, up_always in ((nearest, False), (rounded_up, True)):
        with pytest.raises(AssertionError, match="gain error|drift|of variance"):
            check_unbiased(nvfp4_draw(x, scale, up_always), exact, variance)
    # The saturation alone, as a gain: plain scales lose about 3e-3.
    draw = nvfp4_draw(x, nearest, False)
    mean = np.mean([draw(i) for i in range(64)], axis=0)
    assert -1e-2 < (exact * (mean - exact)).sum() / (exact**2).sum() < -1e-3


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
@each_direction
def test_small_values_survive_stochastic_rounding(name: str, direction: Direction):
    """Otherwise small gradients are flushed for good: blocks far below the tensor's amax, and
    values far below their block's, are zero in most draws but right on average."""
    x = torch.zeros(32, 32)
    x[0, 0] = 2688.0  # S = D = 1
    x[16:, 16:] = 6 * 2.0**-12  # a block whose target is an eighth of the smallest scale
    beside = (0, 1) if direction is ROWWISE else (1, 0)
    x[beside] = (
        6.0  # 6 / 448 = 0.0134 under the first block's scale, where the smallest step is 0.5
    )
    nearest = Quantizer(name).storage(x, direction).decode()
    assert nearest[16:, 16:].abs().max() == 0
    n = 512
    draws = torch.stack([stochastic(name).storage(x, direction, key(i)).decode() for i in range(n)])
    block = draws[:, 16:, 16:]
    assert all((d != 0).any() for d in block), "a draw lost the whole block"
    # q = 6 * 2^-12 / 2^-9 = 0.75: 0.5 or 1, half each; 256 values of n draws.
    assert block.mean() == pytest.approx(6 * 2.0**-12, rel=5 / 3 / math.sqrt(256 * n))
    assert ((block == 2.0**-10) | (block == 2.0**-9)).all()
    first = draws[:, beside[0], beside[1]]
    up = round(6 / 448 / 0.5 * 256) / 256  # of 256 random bytes
    assert float((first != 0).float().mean()) == pytest.approx(up, abs=5 * math.sqrt(up / n))
    assert set(first.tolist()) <= {0.0, 224.0}


def test_random_bits_are_uniform_and_independent():
    """Otherwise directions, tensors, steps and micro-batches share rounding errors, which then add
    up."""
    shape = (128, 256)
    base = rng.random_bytes(shape, ROWWISE, key(4)).double()
    counts = torch.bincount(base.long().flatten(), minlength=256).double()
    expected = base.numel() / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    others = {
        "direction": rng.random_bytes(shape, COLUMNWISE, key(4)),
        "step": rng.random_bytes(shape, ROWWISE, key(5)),
        "tensor": rng.random_bytes(shape, ROWWISE, key(4, ident=8)),
        "seed": rng.random_bytes(shape, ROWWISE, key(4, seed=12)),
        "high seed": rng.random_bytes(shape, ROWWISE, key(4, seed=11 + 2**32)),
        "micro-batch": rng.random_bytes(shape, ROWWISE, key(4, micro_batch=1)),
        "next row": rng.random_bytes(shape, ROWWISE, key(4, row0=1)),
        "transposed": rng.random_bytes(shape[::-1], COLUMNWISE, key(4)).t(),
    }
    others["neighbour"] = base.roll(1, 1)
    for what, bits in others.items():
        a, b = base - base.mean(), bits.double() - bits.double().mean()
        correlation = float((a * b).mean() / (a.std() * b.std()))
        assert abs(correlation) < 5 / math.sqrt(base.numel()), f"{what}: {correlation}"
    assert rng.tensor_id("layers.0.q.weight") != rng.tensor_id("layers.1.q.weight")


@each_direction
def test_random_bits_are_keyed_by_the_global_element(direction: Direction):
    """Otherwise a shard, a cut batch or a recomputation rounds differently from the whole."""
    whole = rng.random_bytes((97, 40), direction, key(2))
    for start, stop in [(0, 97), (0, 1), (1, 2), (15, 17), (16, 48), (31, 97), (96, 97), (50, 50)]:
        cut = rng.random_bytes((stop - start, 40), direction, key(2, row0=start))
        assert_same_bytes(cut, whole[start:stop], f"rows [{start}, {stop})")
    # of the same seed, step and token offset as the keys below
    step = torch.tensor([11, 2, 0, 5, 3])
    for part, cols in [(0, 40), (1, 16), (2, 16), (1, 32), (4, 7)]:
        placed = rng.key_of(step, rng.placed_id(torch.tensor(7), part, cols), 92)
        start = part * ceil_div(cols, 16) * 16
        wider = rng.random_bytes((92, start + 3), direction, key(2, row0=5))
        assert_same_bytes(
            rng.random_bytes((92, 3), direction, placed),
            wider[:, start:],
            f"part {part} of {cols} columns",
        )


def test_recomputation_rounds_alike():
    """Otherwise activation checkpointing changes gradients: the key alone decides."""
    for name in SR_NAMES:
        q, x = stochastic(name), values(33, 48)
        for direction in Direction:
            assert_same_storage(
                q.storage(x, direction, key(1)), q.storage(x, direction, key(1)), name
            )
            other = q.storage(x, direction, key(2))
            assert not torch.equal(other.data, q.storage(x, direction, key(1)).data), name
    torch.manual_seed(3)
    a = stochastic("nvfp4").quantize(values(33, 48))
    torch.manual_seed(3)
    assert_same_storage(
        a.rowwise, stochastic("nvfp4").quantize(values(33, 48)).rowwise, "a drawn key"
    )


def test_block_ratio_above_448_by_an_ulp():
    """fl(A * fl(S * fl(1/6))) exceeds 448 for many A; rounding that up would give the NaN code
    0x7F."""
    amaxes = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 0.5
    above = 0
    for amax in amaxes.tolist():
        t = float(
            oracle.fl(
                amax
                * float(
                    oracle.fl(
                        oracle.tensor_factor(amax, oracle.SPECS["nvfp4"]) * float(oracle.fl(1 / 6))
                    )
                )
            )
        )
        assert t < 448 * (1 + 2**-21)  # three roundings
        if t > 448 and above < 100:
            above += 1
            x = torch.zeros(2, 16)
            x[0, 3], x[1, 0] = amax, amax / 2
            for q in (Quantizer("nvfp4"), stochastic("nvfp4"), stochastic("nvfp4_16x16")):
                got = q.storage(x, ROWWISE, key())
                assert got.scale[0, 0] == 0x7E, amax
                assert got.decode()[0, 3] == pytest.approx(amax, rel=1e-6)
    assert above == 100


@pytest.mark.parametrize("amax", [1e-36, 2e35, FLT_MAX])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_extreme_tensor_amaxes_round_trip(name: str, amax: float, rounding: str):
    """Otherwise S, D or their product overflows or flushes, and a finite tensor decodes to 0, inf
    or NaN."""
    q = replace(Quantizer(name), rounding=rounding)
    unit = values(32, 64, dtype=torch.float32)
    unit /= unit.abs().max()

    def noise(scale: float) -> float:
        x = unit * scale
        got = q.storage(x, ROWWISE, key()).decode()
        assert got.isfinite().all()
        assert (got * x >= 0).all()
        return float((got.double() / scale - unit.double()).norm() / unit.double().norm())

    # Block scales round differently from amax to amax; the noise of 2048 values stays within a
    # tenth.
    assert noise(amax) == pytest.approx(noise(1.0), rel=0.1)


def test_smallest_tensor_amaxes_stay_finite_and_ordered():
    """A tensor amax below 6 / FLT_MAX cannot reach code 6 with one fp32 factor: enc stops at
    FLT_MAX while the decode scale goes on, so values shrink by the block scale. They must not
    flush, grow, or become infinite."""
    unit = values(32, 64, dtype=torch.float32)
    unit /= unit.abs().max()
    for q in (Quantizer("nvfp4"), stochastic("nvfp4"), Quantizer("nvfp4_16x16")):
        x = unit * 1e-38
        got = q.storage(x, ROWWISE, key()).decode()
        assert got.isfinite().all() and (got != 0).any()
        assert (got.double() * x.double() >= 0).all()
        assert got.double().abs().max() <= 1e-38
        assert 0.25 < got.double().abs().max() / 1e-38

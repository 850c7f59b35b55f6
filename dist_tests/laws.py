# SPDX-License-Identifier: Apache-2.0
"""What every test compares with: bytes, and the lists of formats that laws run over."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dist_tests.product_error import product_error
from fsdp_quant.context import STEP
from fsdp_quant.formats import E2M1, E2M3, E3M2, E4M3, FORMATS, ROWWISE, Format, format_of
from fsdp_quant.linear.passes import LOOSE, TrainingSteps
from fsdp_quant.ops import native, rng
from fsdp_quant.ops.capability import (
    arch_of_capability,
    gemm_domain,
    operand_layout,
    spreads,
    unsupported_reason,
)
from fsdp_quant.ops.layout import ANCHORED_TENSOR, ANCHORS_OF_BOTH, NATIVE, SPREAD, operand_format
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage, to_layout


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [.., itemsize]."""
    # contiguous() keeps strides of dims of 1
    whole = t.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole.reshape(*t.shape, 1).view(torch.uint8)


def assert_same_bytes(got: Tensor, want: Tensor, what: str = "tensor") -> None:
    """Fail with the first coordinate that differs, and both values."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(
            f"{what}: got {list(got.shape)} {got.dtype}, want {list(want.shape)} {want.dtype}"
        )
    a, b = as_bytes(got), as_bytes(want)
    if torch.equal(a, b):
        return
    differs = (a != b).any(-1)
    at = tuple(differs.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at {list(at)}: "
        f"got {got[at].item()!r}, want {want[at].item()!r}"
    )


def assert_same_storage(got: Storage | None, want: Storage | None, what: str = "storage") -> None:
    """Fail unless format, shape and every buffer agree bit for bit, `want` in the layout that `got`
    has."""
    if got is None or want is None:
        assert got is want, f"{what}: got {got}, want {want}"
        return
    assert (got.fmt, got.direction, tuple(got.shape)) == (
        want.fmt,
        want.direction,
        tuple(want.shape),
    ), f"{what}: got {got.describe()}, want {want.describe()}"
    want = to_layout(want, got.layout)
    assert got.buffers().keys() == want.buffers().keys(), (
        f"{what}: {got.buffers().keys()} {want.buffers().keys()}"
    )
    for name, buffer in got.buffers().items():
        assert_same_bytes(buffer, want.buffers()[name], f"{what}.{name}")


def quantizers() -> dict[str, Quantizer]:
    """Every row of the format table, and the options that change bytes."""
    made = {name: Quantizer(fmt) for name, fmt in FORMATS.items()}
    made["fp8_tensor_e5m2"] = Quantizer(format_of("fp8_tensor", element="e5m2"))
    made["fp8_tensor_pow2"] = Quantizer(format_of("fp8_tensor", pow2=True))
    made["fp8_row_pow2"] = Quantizer(format_of("fp8_row", pow2=True))
    made["fp8_1x128_fp32"] = Quantizer(format_of("fp8_1x128", pow2=False))
    made["fp8_128x128_fp32"] = Quantizer(format_of("fp8_128x128", pow2=False))
    made["mxfp8_e5m2"] = Quantizer(format_of("mxfp8", element="e5m2"))
    made["mxfp8_floor"] = Quantizer(format_of("mxfp8", scale_rounding="floor"))
    made["mxfp6_e3m2"] = Quantizer(format_of("mxfp6", element="e3m2"))
    for name in ("mxfp6", "mxfp4"):
        made[f"{name}_floor"] = Quantizer(format_of(name, scale_rounding="floor"))
    for name in ("nvfp4", "nvfp4_16x16"):
        made[f"{name}_exact"] = Quantizer(format_of(name, scale_rule="fp8_exact"))
    return made


QUANTIZERS = quantizers()
FORMAT_NAMES = tuple(FORMATS)
PAIRS = [(row, col) for row in FORMAT_NAMES for col in FORMAT_NAMES]
# Rows that are in no table: other blocks, elements and scales of the same kinds.
OTHER = {
    fmt.name: Quantizer(fmt)
    for fmt in (
        Format("mxfp8_1x64", E4M3, (1, 64), "e8m0"),
        Format("mxfp6_16x16", E3M2, (16, 16), "e8m0"),
        Format("nvfp4_1x32", E2M1, (1, 32), "e4m3", tensor_scale=True),
        Format("fp6_row", E2M3, (1, None), "fp32"),
        Format("fp4_1x128", E2M1, (1, 128), "fp32", pow2=True),
    )
}
# Of these kernels encode every format that is quantized.
KERNEL_QUANTIZERS = {name: q for name, q in QUANTIZERS.items() if unsupported_reason(q.fmt) is None}
# And of these they cast pieces of flat buffers.
PIECE_QUANTIZERS = {name: q for name, q in KERNEL_QUANTIZERS.items() if q.fmt.bits != 6}
PIECE_PAIRS = [
    pair for pair in PAIRS if all(name == "identity" or name in PIECE_QUANTIZERS for name in pair)
]


CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


def assert_planned_as_taken(takes: Callable[[int, int, int, int], bool]) -> None:
    """Products of codes are planned on every capability exactly where `takes` (operand of a, of b,
    major, minor) says so."""
    fmts = {}
    for q in (KERNEL_QUANTIZERS | OTHER).values():
        if unsupported_reason(q.fmt) is None:
            block_of_bytes = {"fp32": q.fmt.block[1], "e8m0": 32, "e4m3": 16}[q.fmt.scale]
            # an operand only where it is anchored, if at all
            none = q.fmt.bits == 6 or q.fmt.block[1] != block_of_bytes
            fmts[q.fmt] = () if none else (NATIVE, SPREAD) if spreads(q.fmt) else (NATIVE,)

    def code(fmt: Format, layout: str) -> int:
        return native.operand_code(operand_format(fmt, layout))

    for capability in CAPABILITIES:
        arch = arch_of_capability(capability)
        for (a, of_a), (b, of_b) in itertools.product(fmts.items(), fmts.items()):
            domain, exact = (
                gemm_domain(a, b, torch.bfloat16, arch, exact, compiled=True)[0]
                for exact in (False, True)
            )
            taken = a.rotated == b.rotated and any(
                takes(code(a, i), code(b, j), *capability) for i, j in itertools.product(of_a, of_b)
            )
            assert (exact == "native") == taken and (domain == "native") == taken, (
                capability,
                a,
                b,
                domain,
                exact,
            )
            if domain not in ("native", "anchored"):
                continue
            for anchored in ANCHORS_OF_BOTH:
                layouts = (
                    operand_layout(a, b, domain, arch, anchored),
                    operand_layout(b, a, domain, arch, anchored),
                )
                assert takes(code(a, layouts[0]), code(b, layouts[1]), *capability), (
                    capability,
                    a,
                    b,
                    layouts,
                )


EVERYTHING = os.environ.get("FSDP_QUANT_ALL_PAIRS") == "1"  # whole laws, not the samples of CI


def sample(pairs: list, stride: int = 7) -> list:
    """Every `stride`-th pair, or all of them."""
    return pairs if EVERYTHING else pairs[::stride]


def crossed(*axes: Iterable, stride: int = 5) -> list[tuple]:
    """Every `stride`-th combination of the axes' values, or all: with a stride that is prime to the
    lengths of the last axes, each value in turn."""
    return sample(list(itertools.product(*axes)), stride)


def diagonals(*shifts: int) -> list:
    """The pairs (format i, format i + shift), or all: every format once a direction, other pairs
    for other shifts."""
    count = len(FORMAT_NAMES)
    picked = [
        (FORMAT_NAMES[i], FORMAT_NAMES[(i + shift) % count])
        for shift in shifts
        for i in range(count)
    ]
    return PAIRS if EVERYTHING else picked


def every_second(items: list, which: int) -> list:
    """Items 0, 2, 4, .. if `which` is even, 1, 3, 5, .. if it is odd; or all."""
    return items if EVERYTHING else items[which % 2 :: 2]


def values(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, kind: str = "gauss"
) -> Tensor:
    """Test inputs: "gauss", "outliers" (a few channels x1000), "tiny" (gradient-like), "heavy"
    (student t, 3)."""
    # the same on every device
    random = {"generator": torch.Generator("cpu").manual_seed(seed), "device": "cpu"}
    x = torch.randn(*shape, **random)
    if kind == "outliers":
        x = x * torch.where(torch.rand(shape[-1], **random) < 0.05, 1000.0, 1.0)
    elif kind == "tiny":
        x = x * 1e-6
    elif kind == "heavy":
        x = x / (torch.randn(3, *shape, **random).square().mean(0).sqrt() + 1e-3)
    return x.to(torch.get_default_device(), dtype)


@contextlib.contextmanager
def recorded_saves():
    """Collect the tensors that autograd saves."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


@contextlib.contextmanager
def kept_step():
    """Leave the step, and who counts it, as they are; layers without names are named, and those
    without a model counted, as in a new process."""
    loose, LOOSE.steps = LOOSE.steps, TrainingSteps()
    kept = {k: v for k, v in STEP.__dict__.items() if k not in ("_copies", "_kept", "restarted")}
    named = dict(rng._MADE)
    rng._MADE.clear()
    try:
        yield
    finally:
        rng._MADE.clear()
        rng._MADE.update(named)
        LOOSE.steps = loose
        STEP.__dict__.update(kept)
        STEP.publish()


def assert_lost_rows_are_counted(
    quantizer: Quantizer, counted: int, shape: tuple[int, int], exact: int = 0
) -> None:
    """`product_error` fires on products by one exponent per tensor whose rows lost a
    tenth of their formats' error, and on none that lost a hundredth.

    Half of the rows of x [shape] are 2^-power of the others, for powers to 15; w has x's shape.
    exact:  powers below it, at which nothing is lost and nothing estimated.
    """
    x, w = values(*shape), values(*shape, seed=1)
    of_w, below, judged = quantizer.storage(w, ROWWISE), torch.arange(len(x)) >= len(x) // 2, set()
    for power in range(16):  # some rows are zero beyond
        rows = x * torch.where(below, 2.0**-power, 1.0)[:, None].to(x.dtype)
        of = [quantizer.storage(rows, ROWWISE), of_w]
        operands = [to_layout(s, ANCHORED_TENSOR) for s in of]
        given = ((s.data, None, s.operand_format) for s in operands)
        extra, own = product_error(*given, (counted,) * 2).tolist()
        want, formats, made = (
            a.double() @ b.double().t()
            for a, b in ((rows, w), [s.decode() for s in of], [s.decode() for s in operands])
        )
        lost = ((made - formats).norm(dim=1) / (formats - want).norm(dim=1)).max().item()
        estimate = (extra / own) ** 0.5
        said = f"at {lost:.2g} ({estimate:.2g}), 2^-{power}"
        assert power >= exact or (lost == 0 and estimate == 0), f"2^-{power} is exact"
        assert estimate > 0.02 or lost <= 0.1, f"silent {said}"
        assert estimate <= 0.02 or lost >= 0.01, f"fires {said}"
        judged.add(estimate > 0.02)
    assert judged == {False, True}

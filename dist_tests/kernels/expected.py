# SPDX-License-Identifier: Apache-2.0
"""What the reference makes of a case, and how the results of the operators are held to it, byte for
byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_tests import laws
from fsdp_quant.formats import COLUMNWISE, FORMATS, ROWWISE, Encoding, format_of
from fsdp_quant.ops import dispatch, extension, native, reference
from fsdp_quant.ops.capability import ARCHITECTURES, spreads
from fsdp_quant.ops.layout import NATIVE, SPREAD
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage

DEVICE = torch.device("cuda")
# None where the tests run
WHY_NOT = extension.runs_on(DEVICE) if torch.cuda.is_available() else "needs a GPU"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (dtype of x, dtype that the encoder sees or None: that of x).
INPUTS = ((BF16, None), (FP16, None), (FP32, None), (FP32, BF16))
SHAPES = (
    (1, 1),
    (7, 15),
    (17, 31),
    (33, 47),
    (96, 96),
    (128, 128),
    (129, 257),
    (1, 130),
    (130, 1),
    (200, 1000),
    (256, 4096),
    (1000, 72),
)
# 512 tiles, more than a GPU has multiprocessors: statistics take a launch of their own
LARGE = (2048, 4096)
KINDS = ("gauss", "outliers", "tiny", "heavy")
SPECIALS = (
    "zeros",
    "signed zeros",
    "subnormals",
    "inf",
    "-inf",
    "nan",
    "both",
    "huge",
    "nan row",
    "wide range",
)

QUANTIZED = tuple(name for name in FORMATS if name in laws.KERNEL_QUANTIZERS)


def quantizers() -> dict[str, Quantizer]:
    """Every quantized row of the format table, the options that change bytes, and their pairs that
    share a kernel."""
    made = dict(laws.KERNEL_QUANTIZERS)
    made |= {f"{name}_sr": Quantizer(name, rounding="stochastic") for name in QUANTIZED}
    made["nvfp4_rht"] = Quantizer("nvfp4", rotation=True)
    made["nvfp4_rht_sr"] = Quantizer("nvfp4", rotation=True, rounding="stochastic")
    exact = format_of("nvfp4", scale_rule="fp8_exact")
    made["nvfp4_exact_sr"] = Quantizer(exact, rounding="stochastic")
    made["nvfp4_exact_rht"] = Quantizer(exact, rotation=True)
    made["nvfp4_exact_rht_sr"] = Quantizer(exact, rotation=True, rounding="stochastic")
    for name, rule, error in (
        ("nvfp4", "nearest", "mse"),
        ("nvfp4", "nearest", "mae"),
        ("nvfp4", "fp8_exact", "mse"),
        ("nvfp4_16x16", "nearest", "mse"),
        ("nvfp4_16x16", "fp8_exact", "mae"),
    ):
        fmt = format_of(name, scale_rule=rule, four_over_six=error)
        made[f"{name}_{'exact_' * (rule == 'fp8_exact')}{error}"] = Quantizer(fmt)
    made["nvfp4_mse_rht"] = Quantizer(format_of("nvfp4", four_over_six="mse"), rotation=True)
    row, exact_row = (
        format_of("nvfp4", scale_per="row", scale_rule=rule) for rule in ("nearest", "fp8_exact")
    )
    made["nvfp4_row"], made["nvfp4_row_sr"] = Quantizer(row), Quantizer(row, rounding="stochastic")
    made["nvfp4_row_exact_mse"] = Quantizer(format_of(exact_row, four_over_six="mse"))
    made["nvfp4_row_rht"] = Quantizer(row, rotation=True)
    made["nvfp4_row_exact_rht_sr"] = Quantizer(exact_row, rotation=True, rounding="stochastic")
    made["fp8_tensor_eps"] = Quantizer("fp8_tensor", eps=0.5)
    made["fp8_row_eps"] = Quantizer("fp8_row", eps=2.0)
    made["fp8_1x128_eps"] = Quantizer("fp8_1x128", eps=2.0)
    for name in ("fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8_32x32"):
        made[f"{name}_e5m2"] = Quantizer(format_of(name, element="e5m2"))
    made["fp8_tensor_e5m2_sr"] = Quantizer(
        format_of("fp8_tensor", element="e5m2"), rounding="stochastic"
    )
    made["mxfp8_e5m2_sr"] = Quantizer(format_of("mxfp8", element="e5m2"), rounding="stochastic")
    made["mxfp8_e5m2_floor"] = Quantizer(format_of("mxfp8", element="e5m2", scale_rounding="floor"))
    made["mxfp8_32x32_floor"] = Quantizer(format_of("mxfp8_32x32", scale_rounding="floor"))
    return made


MADE = quantizers()
# What weights may have.
NEAREST = tuple(
    name
    for name, q in MADE.items()
    if not q.is_stochastic and not q.rotation and not q.fmt.has_row_scales
)


def key_of(row0: int = 0, seed: int = 5) -> Tensor:
    """A random key on the device; the seed fills both of its words."""
    return torch.tensor([seed % 1000 * 0x100000007, 3, 0xDEADBEEF, 1, row0], device=DEVICE)


# Inputs #


def inputs(
    rows: int, cols: int, kind: str = "gauss", dtype: torch.dtype = BF16, seed: int = 0
) -> Tensor:
    """Values of `laws.values`, or of one of SPECIALS, on the device."""
    return _inputs(rows, cols, kind, dtype, seed).clone()


@functools.lru_cache(maxsize=512)
def _inputs(rows: int, cols: int, kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    if kind in KINDS:
        return laws.values(rows, cols, seed=seed, dtype=dtype, kind=kind).to(DEVICE)
    g = torch.Generator().manual_seed(seed)
    x = laws.values(rows, cols, seed=seed, dtype=dtype)
    negative, where = torch.rand(rows, cols, generator=g) < 0.5, torch.rand(rows, cols, generator=g)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "signed zeros":
        x = torch.where(where < 0.02, x, torch.where(negative, -0.0, 0.0).to(dtype))
    elif kind == "subnormals":
        mantissa = {BF16: 7, FP16: 10, FP32: 23}[dtype]
        bits = torch.randint(0, 1 << mantissa, (rows, cols), generator=g)
        small = bits.to(torch.int32 if dtype is FP32 else torch.int16).view(dtype)
        x = torch.where(negative, -small, small)
    elif kind == "huge":
        x = (x.double().clamp(-1, 1) * torch.finfo(dtype).max).to(dtype)
    elif kind == "nan row":
        x[rows // 2] = math.nan
    elif kind == "wide range":  # blocks far below and far above each other
        x = (
            x.double()
            * 2.0
            ** torch.randint(-18, 14, (rows, -(-cols // 16)), generator=g).repeat_interleave(16, 1)[
                :, :cols
            ]
        )
        x = x.to(dtype)
    else:
        values = {
            "inf": (math.inf,),
            "-inf": (-math.inf,),
            "nan": (math.nan,),
            "both": (math.inf, math.nan),
        }[kind]
        for i, value in enumerate(values):
            x.view(-1)[7 * i :: 1009] = value
    return x.to(DEVICE)


def cases(seed: int = 0) -> list[tuple[str, Tensor, torch.dtype | None]]:
    """(name, x, dtype that the encoder sees): every shape in every dtype, the kinds taking
    turns."""
    made = []
    for i, (rows, cols) in enumerate(SHAPES):
        for j, (dtype, seen) in enumerate(INPUTS):
            kind = KINDS[(i + j) % len(KINDS)]
            name = f"[{rows}, {cols}] {kind} {dtype} seen as {seen or dtype}"
            made.append((name, inputs(rows, cols, kind, dtype, seed + i), seen))
    return made


def special_cases(
    shapes=((33, 47), (129, 257)), dtypes=INPUTS
) -> list[tuple[str, Tensor, torch.dtype | None]]:
    made = []
    for rows, cols in shapes:
        for dtype, seen in dtypes:
            for kind in SPECIALS:
                name = f"[{rows}, {cols}] {kind} {dtype} seen as {seen or dtype}"
                made.append((name, inputs(rows, cols, kind, dtype, seed=rows), seen))
    return made


# What is compared #


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Fail unless shape, dtype and bytes agree; only a difference is copied to the CPU to be
    described."""
    if (
        got.shape == want.shape
        and got.dtype == want.dtype
        and torch.equal(_bytes(got), _bytes(want))
    ):
        return
    laws.assert_same_bytes(got.cpu(), want.cpu(), what)
    raise AssertionError(f"{what}: differs on {got.device} alone")


def assert_same_values(got: Tensor, want: Tensor, what: str) -> None:
    """The bytes agree, but for the bits of a NaN."""
    assert_same(
        got.masked_fill(got.isnan(), math.nan), want.masked_fill(want.isnan(), math.nan), what
    )


def assert_encoded(got, want, encoding: Encoding, what: str) -> None:
    """Fail unless (data, scale, tensor_amax, amax) of an operator are the reference's; NaN amaxes
    may differ in bits."""
    what = f"{what}, {encoding.direction} {encoding.fmt}{' SR' if encoding.stochastic else ''}"
    data, scale, tensor_amax, amax = got[:4]
    assert_same(scale, want[1], f"{what}: scale")
    assert_same(data, want[0], f"{what}: data")
    if encoding.fmt.tensor_scale:
        assert_same_values(tensor_amax, want[2], f"{what}: tensor_amax")
    else:
        assert tensor_amax is None, f"{what}: tensor_amax is {tensor_amax}, want None"
    if encoding.fmt.scale_leaves_contraction:
        assert_same_values(amax, want[3], f"{what}: amax")
    else:
        assert amax is None, f"{what}: amax is {amax}, want None"


def assert_statistics(got, want, what: str) -> None:
    """Fail unless (amax, tensor_amax or None) agree, but for the bits of a NaN."""
    assert_same_values(got[0], want[0], f"{what}: amax")
    assert (got[1] is None) == (want[1] is None), f"{what}: tensor_amax is {got[1]}, want {want[1]}"
    if want[1] is not None:
        assert_same_values(got[1], want[1], f"{what}: tensor_amax")


# The reference, and the operators #


def seen(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def statistics(
    x: Tensor, encoding: Encoding, row0: int = 0, dtype: torch.dtype | None = None
) -> dispatch.Statistics:
    """The reference's amaxes of x."""
    return dispatch.Statistics(
        *reference.statistics(reference.prepared(seen(x, dtype), encoding), encoding, row0)
    )


def encoded(
    x: Tensor,
    encoding: Encoding,
    *,
    row0: int = 0,
    stats: Sequence | None = None,
    key: Tensor | None = None,
    enc: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> dispatch.Encoded:
    """The reference's codes and scales of x."""
    values = reference.prepared(seen(x, dtype), encoding)
    amax, tensor_amax = stats if stats is not None else reference.statistics(values, encoding, row0)
    factor = None if enc is None else reference.delayed_encode_scale(enc, amax, encoding)
    data, scale = reference.encode(values, amax, tensor_amax, encoding, row0, key, factor)
    return dispatch.Encoded(data.contiguous(), scale, tensor_amax, amax)


def encode(
    x: Tensor,
    encodings: Sequence[Encoding],
    *,
    row0: int = 0,
    stats=None,
    key: Tensor | None = None,
    encs=None,
    dtype: torch.dtype | None = None,
) -> list[dispatch.Encoded]:
    """`dispatch.encode`, and a failure where the reference would stand in for a kernel."""
    for e in encodings:
        assert native.is_available_for(x) and native.encodes(e, x.dtype, row0 % native.TILE == 0), (
            f"no kernel encodes {e} of {list(x.shape)} {x.dtype} from row {row0}"
        )
    return dispatch.encode(x, encodings, stats, row0, [key] * len(encodings), encs, dtype)


def launches(run: Callable[[], object]) -> int:
    """How many kernels a call launches, ours and torch's, after a first one."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in profile.key_averages() if "fsdp_quant::" in e.key or "at::" in e.key]
    return sum(e.count for e in kernels)


def both(name: str) -> list[Encoding]:
    """The encodings of a quantizer, one a direction."""
    return [MADE[name].encoding(ROWWISE), MADE[name].encoding(COLUMNWISE)]


def gemm_operand(x: Tensor, encoding: Encoding, arch: str, key: Tensor | None):
    """The `EncodedMatrix` of the reference's storage for `arch`, made on the CPU."""
    on_cpu = dispatch.Encoded(
        *(None if t is None else t.cpu() for t in encoded(x, encoding, key=key)[:4])
    )
    storage = Storage.of(on_cpu, encoding, x.shape, x.dtype)
    is_spread = spreads(encoding.fmt) and ARCHITECTURES[arch].byte_scales
    return storage.to_gemm_operand(SPREAD if is_spread else NATIVE, arch=arch)


def packed(encoding: Encoding | None, transposed: bool = False, layout: int = native.COMPACT):
    """An encoding as the operators take it; a direction that is not there."""
    return 0 if encoding is None else native.pack_encoding(encoding, transposed, layout)


def encodable(e: Encoding, row0: int) -> bool:
    """A rotation along the rows is of whole tiles, and a choice by error of whole blocks."""
    mixes = e.fmt.rotated and e.direction is COLUMNWISE
    return not (mixes and row0 % native.TILE) and cut(e, row0) == row0


def cut(e: Encoding, row: int) -> int:
    """The last row up to `row` between whose blocks a tensor may be cut."""
    return row - row % (e.fmt.row_alignment(e.direction) if e.fmt.chooses_by_error else 1)


def look(
    a: native.Operand,
    b: native.Operand,
    counted: tuple[int, int],
    step: Tensor,
    guard: Tensor,
    product: int,
) -> None:
    """Add what a product of a and b loses to the guard, if the step is probed."""
    native.product_error(a, b, native.Watch(native.packed_counts(counted), step, guard, product))

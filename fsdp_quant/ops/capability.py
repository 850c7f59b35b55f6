# SPDX-License-Identifier: Apache-2.0
"""Decide how a device multiplies a pair of formats: its architecture and the GEMM domain."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..formats import Format
from . import extension
from .layout import ANCHORED, ANCHORED_TENSOR, COMPACT, NATIVE, SPREAD

# Fastest first.
#   native     the tensor cores multiply the pair as it is
#   anchored   blocks with power-of-two scales are re-expressed against one exponent per tensor,
#              line or run, and multiplied as 8-bit operands with one scale each
#   bf16       both operands decode exactly to bf16, and a bf16 GEMM multiplies them
#   reference  decoded to fp32: the definition
DOMAINS = ("native", "anchored", "bf16", "reference")

# Blocks of fp32 scales.
_TENSOR, _LINE, _1X128, _128X128 = (None, None), (1, None), (1, 128), (128, 128)


class Architecture(NamedTuple):
    """A kind of GPU that runs the kernels. C++ declares the same GEMMs: `kArchitectures`,
    csrc/gemm/capability.h.

    name:          name of the code that it runs; "a": for this capability alone, "f": for its
                   family.
    least, most:   its first and last capability.
    scale_layout:  layout in which GEMMs read block scales (`ops.native`, csrc/quantize/quantize.h).
    fp32_pairs:    pairs of blocks whose fp32 scales it multiplies: those of cuBLASLt, "narrow
                   precision data types". If cuBLASLt has no row scales, our own epilogue applies
                   them.
    byte_scales:   it multiplies blocks with one-byte scales. Power-of-two scales of 128 elements
                   are multiplied as such (`ops.layout.SPREAD`).
    anchors:       8-bit GEMMs with one exponent per tensor, line or run replace GEMMs with
                   one-byte scales.
    groups:        kernels multiply the codes of groups of tokens, one weight per group.
    """

    name: str
    least: tuple[int, int]
    most: tuple[int, int]
    scale_layout: int
    fp32_pairs: frozenset[frozenset]
    byte_scales: bool = False
    anchors: bool = False
    groups: bool = False


# A device of this machine, or a row of ARCHITECTURES: a GPU that need not be here.
Place = torch.device | str
HOPPER, BLACKWELL = 1, 2
_OF_ROWS = frozenset({frozenset({_TENSOR}), frozenset({_LINE}), frozenset({_TENSOR, _LINE})})
ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("sm_80", (8, 0), (8, 8), HOPPER, frozenset()),
        Architecture("sm_89", (8, 9), (8, 9), HOPPER, _OF_ROWS),
        Architecture(
            "sm_90a",
            (9, 0),
            (9, 0),
            HOPPER,
            anchors=True,
            groups=True,
            fp32_pairs=_OF_ROWS | {frozenset({_1X128}), frozenset({_1X128, _128X128})},
        ),
        Architecture("sm_100f", (10, 0), (10, 9), BLACKWELL, _OF_ROWS, byte_scales=True),
        Architecture("sm_120f", (12, 0), (12, 9), BLACKWELL, _OF_ROWS, byte_scales=True),
    )
}


def arch_of_capability(capability: tuple[int, int]) -> str:
    """Return the name of its row of ARCHITECTURES; without a row, a name such as "sm_110", whose
    GEMMs run in bf16."""
    row = next((a for a in ARCHITECTURES.values() if a.least <= capability <= a.most), None)
    return row.name if row is not None else "sm_{}{}".format(*capability)


# the numbers of element types in operators
ELEMENTS = {"e4m3": 1, "e5m2": 2, "e2m1": 3, "e2m3": 4, "e3m2": 5}


@functools.cache
def unsupported_reason(fmt: Format) -> str | None:
    """Return the reason that no kernel encodes this format, in one clause; None if one does."""
    if not fmt.is_quantized:
        return "not quantized"
    if fmt.is_turned:
        return unsupported_reason(fmt.turned)
    blocks = (None, 128) if fmt.has_fp32_scales else (16, 32)
    outer, contraction = fmt.block
    if contraction not in blocks or outer not in (1, contraction):
        return f"no kernel for {fmt.scale} scales of {fmt.block} blocks"
    is_mx = fmt.scale == "e8m0" and fmt.block == (1, 32) and fmt.scale_rounding == "up"
    encodes = {4: fmt.tensor_scale or is_mx, 6: is_mx, 8: not fmt.tensor_scale}
    if fmt.element.name not in ELEMENTS or not encodes[fmt.bits]:
        return f"no kernel for {fmt.element.name} with {fmt.scale} scales"
    if fmt.decodes_exactly_to_e4m3 and contraction != 16:
        return f"no kernel for {fmt.scale_rule} scales of {fmt.block} blocks"
    if fmt.chooses_by_error and contraction != 16:
        return f"no kernel for four_over_six={fmt.four_over_six!r} in {fmt.block} blocks"
    return None


@functools.cache
def _cuda_arch(index: int) -> str:
    return arch_of_capability(torch.cuda.get_device_capability(index))


def place_of(on: Place | int) -> Place:
    """Return the device, or the row of ARCHITECTURES, that a text names. Raises ValueError for
    another text."""
    try:
        return on if on in ARCHITECTURES else torch.device(on)
    except (RuntimeError, TypeError):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{on!r} is no GPU of ours: wanted one of {known}, or a device") from None


def has_own_kernels(arch: str) -> bool:
    """Return whether GEMMs of our own, whose order of sums is fixed, run on `arch`."""
    return arch in ARCHITECTURES and ARCHITECTURES[arch].groups


def is_compiled(arch: str) -> bool:
    """Return whether the operators are loaded, or the architecture is of another machine, where
    they are taken to be."""
    return extension.is_loaded() or arch not in map(_cuda_arch, range(torch.cuda.device_count()))


def arch_of(device: Place) -> str:
    """Return "cpu", the name of a row of ARCHITECTURES, or another CUDA architecture name."""
    if isinstance(device, str):
        return device
    if device.type != "cuda":
        return "cpu"
    return _cuda_arch(device.index if device.index is not None else torch.cuda.current_device())


def _are_encoded(a: Format, b: Format) -> bool:
    return unsupported_reason(a) is None and unsupported_reason(b) is None


def _multiplies(a: Format, b: Format, arch: str) -> bool:
    """Return whether the tensor cores of `arch` multiply a and b as they are."""
    if (
        a.rotated != b.rotated
        or a.has_row_scales
        or b.has_row_scales
        or a.element.bits != b.element.bits
        or a.element.name == b.element.name == "e5m2"
    ):
        return False
    row = ARCHITECTURES.get(arch)
    if row is None or not _are_encoded(a, b):
        return False
    if a.scale == b.scale == "fp32" and frozenset({a.block, b.block}) in row.fp32_pairs:
        return True
    if a.bits == 4:
        return row.byte_scales and a.scale == b.scale == "e4m3" and a.block[1] == b.block[1] == 16
    return (
        row.byte_scales
        and a.bits == 8
        and all(spreads(f) or (f.scale == "e8m0" and f.block[1] == 32) for f in (a, b))
    )


def spreads(fmt: Format) -> bool:
    """Return whether each scale of the format equals four e8m0 scales of 32 elements
    (`ops.layout.SPREAD`): it is a power of two and serves 128 elements."""
    return fmt.has_fp32_scales and fmt.pow2 and fmt.block[1] == 128 and fmt.bits == 8


def anchors(fmt: Format) -> bool:
    """One exponent a line, or a tensor, can take the place of this format's block scales."""
    of_blocks = (
        fmt.scale == "e8m0"
        and fmt.block[1] == 32
        and fmt.scale_rounding == "up"
        and fmt.element.operand.bits == 8
    )
    return of_blocks and unsupported_reason(fmt) is None


def anchors_tensor(fmt: Format) -> bool:
    """Return whether existing codes can be re-expressed against one exponent per tensor."""
    in_blocks = anchors(fmt.turned if fmt.is_turned else fmt)
    return in_blocks or (fmt.pow2 and fmt.block == _128X128) or fmt.becomes_e4m3


def scales_tensor(fmt: Format) -> bool:
    """Return whether the format has one fp32 scale per tensor."""
    return fmt.has_fp32_scales and fmt.block == _TENSOR


# Beside 8-bit codes, nvfp4's products may be rounded to e4m3: their error, .1, becomes .102.
def _converts(fmt: Format, other: Format) -> bool:
    """Return whether codes become an operand with one exponent a tensor, line or run, beside
    operands of `other`."""
    if fmt.becomes_e4m3 and not fmt.decodes_exactly_to_e4m3:
        return other.bits == 8
    return anchors(fmt) or fmt.decodes_exactly_to_e4m3 or (fmt.is_turned and anchors_tensor(fmt))


def _is_anchored(a: Format, b: Format, arch: str) -> bool:
    anchors_here = arch in ARCHITECTURES and ARCHITECTURES[arch].anchors
    if not anchors_here or a.element.name == b.element.name == "e5m2" or not _are_encoded(a, b):
        return False
    in_blocks = [_converts(a, b), _converts(b, a)]
    lines = [
        block or (f.scale == "fp32" and f.block in (_TENSOR, _LINE))
        for f, block in zip((a, b), in_blocks)
    ]
    of_tensors = any(scales_tensor(f) and anchors_tensor(g) for f, g in ((a, b), (b, a)))
    return of_tensors or (all(lines) and any(in_blocks))


def may_be_anchored(a: Format, b: Format) -> bool:
    """Return whether some device multiplies the pair in the anchored domain."""
    return any(_is_anchored(a, b, arch) for arch in ARCHITECTURES)


@functools.cache
def gemm_domain(
    a: Format,
    b: Format,
    dtype: torch.dtype,
    arch: str,
    exact: bool = False,
    batch_invariant: bool = False,
    compiled: bool | None = None,
) -> tuple[str, str]:
    """Return (domain, reason) of a GEMM of `dtype` tensors on `arch`.

    exact:     exclude domains that change operands.
    batch_invariant:  exclude kernels of codes whose order of sums depends on the number of rows.
    compiled:  the compiled operators are loaded; None: see `is_compiled`.

    The result depends only on facts that every rank shares, so all ranks plan alike.
    """
    if not a.is_quantized and not b.is_quantized:
        return "native", f"{str(dtype).removeprefix('torch.')} operands"
    compiled = is_compiled(arch) if compiled is None else compiled
    # our own kernels take no second operand of e5m2
    is_excluded = batch_invariant and not (has_own_kernels(arch) and b.element.name != "e5m2")
    if a.is_quantized and b.is_quantized and compiled and not is_excluded:
        if _multiplies(a, b, arch):
            return "native", f"{arch} multiplies them, accumulated in fp32"
        if _is_anchored(a, b, arch) and not exact:
            return "anchored", f"one exponent a tensor, a line or a run: 8-bit operands on {arch}"
    for fmt in (a, b):
        if fmt.is_quantized and not fmt.decodes_exactly_to_bf16:
            return "reference", f"{fmt} does not decode exactly to bf16"
    if dtype is not torch.bfloat16 and (arch == "cpu" or not (a.is_quantized and b.is_quantized)):
        return "reference", f"the result is {str(dtype).removeprefix('torch.')}"
    if arch == "cpu":
        return "reference", "no low-precision matrix unit on a CPU"
    if exact and compiled and _is_anchored(a, b, arch):
        return "bf16", "anchoring is off: accuracy='exact', or its guard moved this product"
    missing = "" if compiled else ": the compiled operators are off"
    if compiled and is_excluded:
        missing = " with sums that the batch does not order"
    return "bf16", f"no compiled kernel multiplies {a} by {b} on {arch}{missing}"


def decodes_groups(pairs: Iterable[tuple[Format, Format]], arch: str) -> bool:
    """torch._grouped_mm multiplies groups of these operands on `arch`, decoded: no kernel
    multiplies their codes, and each is in bf16 all that its code and scale say."""
    row = ARCHITECTURES.get(arch)
    if row is None or row.groups:
        return False
    coded = [pair for pair in pairs if pair[0].is_quantized or pair[1].is_quantized]
    exact = all(_are_encoded(*pair) and all(map(is_exact_in_bf16, pair)) for pair in coded)
    return bool(coded) and exact


def is_exact_in_bf16(fmt: Format) -> bool:
    """Values that codes decode to are exact in bf16: nothing stays outside a product of them."""
    outside = fmt.scale_leaves_contraction or fmt.tensor_scale or fmt.rotated
    return fmt.decodes_exactly_to_bf16 and not outside


def operand_layout(a: Format, b: Format, domain: str, arch: str, anchored: str = ANCHORED) -> str:
    """Return the layout (`ops.layout`) in which a GEMM of this domain reads operand a of the pair
    (a, b).

    anchored:  layout of a pair of e8m0 formats. If b has other scales, a is anchored per tensor or
               per line.
    """
    if not a.is_quantized or domain not in ("native", "anchored"):
        return COMPACT
    if domain == "native" or not anchors_tensor(a):
        return SPREAD if spreads(a) and ARCHITECTURES[arch].byte_scales else NATIVE
    if not anchors(a):
        return ANCHORED_TENSOR
    return anchored if anchors(b) or anchored == ANCHORED_TENSOR else ANCHORED

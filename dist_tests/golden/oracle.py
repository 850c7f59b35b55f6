# SPDX-License-Identifier: Apache-2.0
"""An independent definition of every format, in plain numpy, that the library must equal byte for
byte.

It shares no code and no structure with the library: a cast looks the value up in an enumerated
grid, a block is a Python loop, a columnwise storage is the transpose of a rowwise one, an exponent
comes from `frexp`, and Philox runs on Python integers.

fl() rounds once to fp32. Operands are fp32, so computing in fp64 first is safe: products are exact
there, and for sums, differences and quotients 53 bits >= 2 * 24 + 2 make the second rounding
harmless.

What the definition leaves open is settled here: with an infinite or NaN tensor amax a two-level
format makes its codes with S = 1 and decodes to NaN; NaN codes are 0x7F whatever the input's sign;
an e8m0 scale of NaN makes every code of its block NaN, and an infinite block has the code 0xFE
under both rounding rules; a whole extent is one block also when it is empty.

Sources: OCP Microscaling Formats (MX) v1.0; OCP 8-bit Floating Point v1.0; Salmon et al., SC 2011
(Philox).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

FLT_MAX = float(np.finfo(np.float32).max)
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0}
BITS = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
# of the largest value: 448 = 1.75 * 2^8
FLOOR_EXPONENT = {"e4m3": 8, "e5m2": 15, "e3m2": 4, "e2m3": 2, "e2m1": 2}
SIGNS = "+++-+------+-+--"


@dataclass(frozen=True)
class Spec:
    """What a storage holds. block: (outer, contraction), None for the whole extent."""

    element: str
    block: tuple[int | None, int | None]
    scale: str
    pow2: bool = False
    floor: bool = False
    rotated: bool = False
    exact: bool = False
    stochastic: bool = False
    eps: float = 0.0


SPECS = {
    "fp8_tensor": Spec("e4m3", (None, None), "fp32"),
    "fp8_tensor_e5m2": Spec("e5m2", (None, None), "fp32"),
    "fp8_tensor_pow2": Spec("e4m3", (None, None), "fp32", pow2=True),
    "fp8_row": Spec("e4m3", (1, None), "fp32"),
    "fp8_row_pow2": Spec("e4m3", (1, None), "fp32", pow2=True),
    "fp8_1x128": Spec("e4m3", (1, 128), "fp32", pow2=True),
    "fp8_1x128_fp32": Spec("e4m3", (1, 128), "fp32"),
    "fp8_128x128": Spec("e4m3", (128, 128), "fp32", pow2=True),
    "fp8_128x128_fp32": Spec("e4m3", (128, 128), "fp32"),
    "mxfp8": Spec("e4m3", (1, 32), "e8m0"),
    "mxfp8_e5m2": Spec("e5m2", (1, 32), "e8m0"),
    "mxfp8_floor": Spec("e4m3", (1, 32), "e8m0", floor=True),
    "mxfp8_32x32": Spec("e4m3", (32, 32), "e8m0"),
    "mxfp6": Spec("e2m3", (1, 32), "e8m0"),
    "mxfp6_e3m2": Spec("e3m2", (1, 32), "e8m0"),
    "mxfp6_floor": Spec("e2m3", (1, 32), "e8m0", floor=True),
    "mxfp4": Spec("e2m1", (1, 32), "e8m0"),
    "mxfp4_floor": Spec("e2m1", (1, 32), "e8m0", floor=True),
    "nvfp4": Spec("e2m1", (1, 16), "e4m3"),
    "nvfp4_16x16": Spec("e2m1", (16, 16), "e4m3"),
}
SPECS["nvfp4_rht"] = replace(SPECS["nvfp4"], rotated=True)
SPECS["mxfp4_rht"] = replace(SPECS["mxfp4"], rotated=True)
SPECS |= {
    f"{name}_exact": replace(SPECS[name], exact=True)
    for name in ("nvfp4", "nvfp4_16x16", "nvfp4_rht")
}


def fl(value):
    """One rounding to fp32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value, dtype=np.float64).astype(np.float32).astype(np.float64)


# Elements #


@functools.cache
def grid(element: str) -> np.ndarray:
    """Non-negative finite values in the order of their codes."""
    exponent_bits, mantissa_bits = map(int, (element[1], element[3]))
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = (
                2.0 ** (1 - bias) * fraction
                if exponent == 0
                else 2.0 ** (exponent - bias) * (1 + fraction)
            )
            if value <= MAX[element]:
                values.append(value)
    return np.array(values)


def cast(values: np.ndarray, element: str, random: np.ndarray | None = None) -> np.ndarray:
    """Codes of fp32 values: the nearest grid point, ties to the even code, saturating; or
    stochastic.

    random:  uint8 of the same shape: up where (r + 0.5) / 256 is below the fraction between the two
             neighbours.
    """
    points = grid(element)
    magnitude = np.minimum(np.abs(values), points[-1])
    nan = np.isnan(values)
    magnitude = np.where(nan, 0.0, magnitude)
    low = np.searchsorted(points, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(points) - 1)
    below, above = magnitude - points[low], points[high] - magnitude
    if random is None:
        up = (above < below) | ((above == below) & (low % 2 == 1))
    else:
        gap = points[high] - points[low]
        up = (random + 0.5) / 256 * gap < below
    sign_bit = 2 ** (BITS[element] - 1)
    codes = np.where(up, high, low) + np.where(np.signbit(values), sign_bit, 0)
    # 8 bits: NaN; fewer: the largest value
    return np.where(nan, sign_bit - 1, codes).astype(np.uint8)


def value_of(codes: np.ndarray, element: str) -> np.ndarray:
    """The numbers that codes stand for."""
    sign_bit = 2 ** (BITS[element] - 1)
    points = grid(element)
    table = np.full(sign_bit, np.nan)
    table[: len(points)] = points
    if element == "e5m2":
        table[len(points)] = np.inf
    return np.concatenate([table, -table])[codes]


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """8 significant bits, ties to even, subnormals below 2^-126."""
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(values), values, 1.0))
        quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        rounded = np.rint(values / quantum) * quantum
        return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, values), rounded)


# Random bits #


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return x0, x1, x2, x3


def stream(tensor_id: int, columnwise: bool, micro_batch: int) -> int:
    """murmur3's finalizer of tensor id xor (micro-batch * 0x9E3779B1 + the direction's
    constant)."""
    h = (tensor_id ^ (micro_batch * 0x9E3779B1 + 0x85EBCA77 * columnwise)) % (1 << 32)
    h = (h ^ h >> 16) * 0x85EBCA6B % (1 << 32)
    h = (h ^ h >> 13) * 0xC2B2AE35 % (1 << 32)
    return h ^ h >> 16


def random_bytes(
    outer: range, contraction: range, key: dict[str, int], columnwise: bool
) -> np.ndarray:
    """uint8 [outer, contraction] of the global indices: byte i of the 16 serves element i of 16."""
    seed = (key["seed"] % (1 << 32), (key["seed"] >> 32) % (1 << 32))
    hashed = stream(key["tensor_id"], columnwise, key["micro_batch"])
    bits = np.zeros((len(outer), len(contraction)), np.uint8)
    for i, o in enumerate(outer):
        made: dict[int, bytes] = {}
        for j, c in enumerate(contraction):
            if c // 16 not in made:
                words = philox((c // 16, o, key["step"], hashed), seed)
                made[c // 16] = b"".join(w.to_bytes(4, "little") for w in words)
            bits[i, j] = made[c // 16][c % 16]
    return bits


# Rotation #


def rotate(x: np.ndarray) -> np.ndarray:
    """Rows in blocks of 16: signs, butterflies of stride 1, 2, 4, 8 in fp32, a quarter, bf16."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // 16) * 16))
    padded[:, :cols] = x
    for start in range(0, padded.shape[1], 16):
        y = [padded[:, start + i] * (1.0 if SIGNS[i] == "+" else -1.0) for i in range(16)]
        with np.errstate(invalid="ignore", over="ignore"):
            for stride in (1, 2, 4, 8):
                for i in range(16):
                    if not i & stride:
                        y[i], y[i + stride] = fl(y[i] + y[i + stride]), fl(y[i] - y[i + stride])
            for i in range(16):
                padded[:, start + i] = round_to_bf16(fl(y[i] * 0.25))
    return padded


# Scales #


def largest(block: np.ndarray) -> float:
    """Largest magnitude; NaN if there is one, 0 of nothing."""
    if block.size == 0:
        return 0.0
    return math.nan if np.isnan(block).any() else float(np.abs(block).max())


def fp32_scale(amax: float, spec: Spec) -> tuple[float, float]:
    """(encode factor, decode scale)."""
    overflowed = not math.isfinite(amax)
    if amax < spec.eps:
        amax = float(fl(spec.eps))
    enc = 1.0 if overflowed or amax == 0 else float(fl(MAX[spec.element] / amax))
    enc = min(enc, FLT_MAX)
    if spec.pow2:
        enc = 2.0 ** (math.frexp(enc)[1] - 1)
    return enc, math.nan if overflowed else float(fl(1.0 / enc))


def e8m0_code(amax: float, spec: Spec) -> int:
    """Biased exponent: the smallest power of two not below v, or the OCP floor rule."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    if spec.floor:
        exponent = math.frexp(amax)[1] - 1 - FLOOR_EXPONENT[spec.element]
    else:
        v = float(fl(amax * float(fl(1.0 / MAX[spec.element]))))
        if v == 0:
            return 0
        mantissa, exponent = math.frexp(v)  # v = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent -= mantissa == 0.5
    return min(max(exponent + 127, 0), 254)


def power_of_two(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def tensor_factor(tensor_amax: float, spec: Spec) -> float:
    if tensor_amax == 0 or not math.isfinite(tensor_amax):
        return 1.0
    return min(float(fl((2304.0 if spec.exact else 2688.0) / tensor_amax)), FLT_MAX)


def tensor_scale(tensor_amax: float, spec: Spec) -> float:
    """D: what decoding multiplies by."""
    return (
        float(fl(1.0 / tensor_factor(tensor_amax, spec)))
        if math.isfinite(tensor_amax)
        else math.nan
    )


@functools.cache
def exact_scales() -> list[tuple[float, int]]:
    """(value, e4m3 code) of the scales under which every e2m1 number is an e4m3 one, over some
    power of two."""
    return [
        (v, code)
        for code, v in enumerate(grid("e4m3"))
        if v and 16 * v / 2 ** math.floor(math.log2(v)) in (16, 20, 24)
    ]


def exact_code(target: float, stochastic: bool) -> int:
    """Of the exact scales the least that is not below; or by the target's place between two powers
    of two."""
    if stochastic:
        return next(code for value, code in [(0.0, 0), *exact_scales()] if value >= target)
    if target == 0:
        return 0
    power = 2.0 ** (math.frexp(target)[1] - 1)
    chosen = next(
        s
        for s, bound in ((2.0, 1.8), (1.5, 1.4), (1.25, 1.15), (1.0, 1.0))
        if target / power >= float(fl(bound))
    )
    return int(cast(np.array(chosen * power), "e4m3"))


def two_level_scale(amax: float, factor: float, spec: Spec) -> tuple[int, float]:
    """(e4m3 code, encode factor)."""
    if math.isnan(amax):
        return 0x7F, math.nan
    target = min(
        float(fl(amax * float(fl(factor * float(fl(1 / 6)))))), 384.0 if spec.exact else 448.0
    )
    if spec.exact:
        code = exact_code(target, spec.stochastic)
    elif spec.stochastic:
        code = int(np.searchsorted(grid("e4m3"), target, side="left"))
    else:
        code = int(cast(np.array(target), "e4m3"))
    product = float(fl(grid("e4m3")[code] * float(fl(1.0 / factor))))
    return code, FLT_MAX if product == 0 else min(float(fl(1.0 / product)), FLT_MAX)


# Storages #


@dataclass
class Made:
    """Buffers in the layout of a compact storage, and the decoded values.

    decoded:  fp32 [rows, cols] (rotated: still rotated, contraction padded to 16).
    """

    data: np.ndarray
    scale: np.ndarray
    tensor_amax: float | None
    decoded: np.ndarray


def spans(extent: int, block: int | None) -> list[slice]:
    if block is None:
        return [slice(0, extent)]
    return [slice(start, min(start + block, extent)) for start in range(0, extent, block)]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along a row, the first in the lowest bits of the first byte; a row ends where a code
    ends with a byte."""
    rows, cols = codes.shape
    cols += -cols % (8 // math.gcd(8, bits))
    packed = np.zeros((rows, cols * bits // 8), np.uint8)
    for j in range(codes.shape[1]):
        for bit in range(bits):
            at = j * bits + bit
            packed[:, at // 8] |= (codes[:, j] >> bit & 1) << at % 8
    return packed


def unpack(packed: np.ndarray, bits: int, cols: int) -> np.ndarray:
    """The codes that `pack` packed."""
    codes = np.zeros((packed.shape[0], cols), np.uint8)
    for j in range(cols):
        for bit in range(bits):
            at = j * bits + bit
            codes[:, j] |= (packed[:, at // 8] >> at % 8 & 1) << bit
    return codes


def quantize(
    x: np.ndarray, spec: Spec, columnwise: bool, key: dict[str, int] | None = None
) -> Made:
    """One direction of x [rows, cols], any floating values that fp32 holds.

    key:  seed, step, tensor_id, micro_batch, row0 (the global index of x's first row), for
          stochastic rounding.
    """
    x = np.asarray(x, dtype=np.float64)
    operand = x.T if columnwise else x  # [outer, contraction]
    if spec.rotated:
        operand = rotate(operand)
    outer, contraction = operand.shape
    random = None
    if spec.stochastic:
        first = (0, key["row0"]) if columnwise else (key["row0"], 0)
        random = random_bytes(
            range(first[0], first[0] + outer),
            range(first[1], first[1] + contraction),
            key,
            columnwise,
        )
    outer_spans, inner_spans = spans(outer, spec.block[0]), spans(contraction, spec.block[1])
    codes = np.zeros((outer, contraction), np.uint8)
    decoded = np.zeros((outer, contraction))
    scale = np.zeros(
        (len(outer_spans), len(inner_spans)), np.float32 if spec.scale == "fp32" else np.uint8
    )
    tensor_amax = largest(operand) if spec.scale == "e4m3" else None
    for i, rows in enumerate(outer_spans):
        for j, cols in enumerate(inner_spans):
            block = operand[rows, cols]
            amax = largest(block)
            if spec.scale == "fp32":
                enc, stored = fp32_scale(amax, spec)
                decode = stored
            elif spec.scale == "e8m0":
                stored = e8m0_code(amax, spec)
                enc, decode = 1.0 / power_of_two(stored), power_of_two(stored)
            else:
                stored, enc = two_level_scale(amax, tensor_factor(tensor_amax, spec), spec)
                decode = math.nan if stored == 0x7F else grid("e4m3")[stored]
            scale[i, j] = stored
            with np.errstate(invalid="ignore"):
                scaled = fl(block * enc)
            codes[rows, cols] = cast(
                scaled, spec.element, None if random is None else random[rows, cols]
            )
            with np.errstate(invalid="ignore"):
                decoded[rows, cols] = fl(value_of(codes[rows, cols], spec.element) * decode)
    if tensor_amax is not None:
        decoded = fl(decoded * tensor_scale(tensor_amax, spec))
    if columnwise:
        codes, scale, decoded = codes.T, scale.T, decoded.T
    data = pack(codes, BITS[spec.element])
    return Made(
        np.ascontiguousarray(data),
        np.ascontiguousarray(scale),
        tensor_amax,
        decoded.astype(np.float32),
    )

# SPDX-License-Identifier: Apache-2.0
"""The definition of every format, in PyTorch: statistics, encode, decode. Every kernel equals it
bit for bit.

[Note: one encoder]
Encoding has two steps, so that a statistic may be shared between ranks in between:

    amax, tensor_amax = statistics(x)            largest magnitude of each block, and of the tensor
    codes, scale      = encode(x, amax, tensor_amax)

with, for the fp32 operations fl() and the IEEE division /rn (no fast-math anywhere),

    fp32 scales   enc = max /rn amax, mantissa cleared for pow2;  scale = 1 /rn enc
    e8m0          scale = 2^(e - 127), e from v = fl(amax * fl(1 / max)), rounded up (or the OCP
                  floor rule)
    e4m3          scale = e4m3(min(t, 448)), t = fl(amax * fl(S * fl(1 / 6))), S = 2688 /rn
                  tensor_amax
      fp8_exact   scale = e4m3(r(min(t, 384))), S = 2304 /rn tensor_amax; r: to 1, 1.25 or 1.5 times
                  a power of two
      4over6      the scale of t or that of fl(1.5 t), whose codes have the smaller error
    code = saturating round-to-nearest-even of fl(x * enc)

tensor_amax is that of the tensor or, with scale_per="row", of each row of the GEMM operand.

Blocks are on the grid of the *global* tensor: `row0` is the global index of the first row of x, and
a block that the shard cuts is a block of fewer rows here. The codes of a shard are then the codes
of the full tensor as soon as the amaxes are.

Non-finite values are never hidden: a block whose amax is not finite decodes to NaN, or, with e8m0
scales, an infinite block to the largest value its scale can hold.

Sources: OCP Microscaling Formats v1.0, sections 5 and 6; OCP 8-bit Floating Point v1.0; NVIDIA PTX
ISA, cvt.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import (
    E2M1,
    FLT_MAX,
    FP8_EXACT_SCALES,
    ROTATION_BLOCK,
    Direction,
    Element,
    Encoding,
    Format,
)
from .layout import pack, unpack
from .rng import random_bytes

Value = TypeVar("Value")

RHT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def known(value: Value | None, name: str) -> Value:
    """The value. Raises ValueError if it is missing."""
    if value is None:
        raise ValueError(f"{name} is needed, got None")
    return value


# Geometry #


def blocked(x: Tensor, fmt: Format, direction: Direction, row0: int) -> Tensor:
    """x [rows, cols] as [block rows, block, block cols, block], zero-padded to whole blocks of the
    global grid."""
    rows, cols = x.shape
    b0, b1 = fmt.dims(direction)
    b0, b1 = b0 or max(rows, 1), b1 or max(cols, 1)
    front = row0 % b0 if fmt.dims(direction)[0] else 0
    back, right = -(front + rows) % b0, -cols % b1
    if front or back or right:
        x = F.pad(x, (0, right, front, back))
    return x.reshape(x.shape[0] // b0, b0, x.shape[1] // b1, b1)


def scaled_by_block(
    x: Tensor, factor: Tensor, fmt: Format, direction: Direction, row0: int
) -> Tensor:
    """Every element of x times the factor [block rows, block cols] of its block, in fp32."""
    (rows, cols), b0 = x.shape, fmt.dims(direction)[0]
    scaled = blocked(x, fmt, direction, row0).float() * factor[:, None, :, None]
    front = row0 % b0 if b0 else 0
    return scaled.flatten(2).flatten(0, 1)[front : front + rows, :cols]


# Rotation #


def rotate(x: Tensor, direction: Direction, inverse: bool = False) -> Tensor:
    """Random Hadamard transform of blocks of 16 along the contraction, zero-padded: rounded to bf16
    once.

    x:        [rows, cols].
    inverse:  turn back, in fp32 and without rounding; the padding stays.
    """
    dim = direction.contraction_dim
    padding = (0, -x.shape[1] % ROTATION_BLOCK) if dim else (0, 0, 0, -x.shape[0] % ROTATION_BLOCK)
    blocks = F.pad(x, padding).unflatten(dim, (-1, ROTATION_BLOCK)).movedim(dim + 1, 0)
    signs = torch.tensor(RHT_SIGNS, dtype=torch.float32, device=x.device).view(-1, 1, 1)
    # [16, rows or blocks, blocks or cols]
    y = blocks.float().contiguous() if inverse else blocks * signs
    for stride in (1, 2, 4, 8):
        a, b = y.unflatten(0, (ROTATION_BLOCK // (2 * stride), 2, stride)).unbind(1)
        y = torch.stack((a + b, a - b), 1).view(y.shape)
    y = y * (0.25 * signs) if inverse else (y * 0.25).to(torch.bfloat16)
    return y.movedim(0, dim + 1).flatten(dim, dim + 1)


# Statistics #


def prepared(x: Tensor, encoding: Encoding) -> Tensor:
    """The values that are encoded: x, or x rotated."""
    return rotate(x, encoding.direction) if encoding.fmt.rotated else x


def of_all_parts(amax: Tensor | None, fmt: Format) -> Tensor | None:
    """The amax of a tensor with one scale, [1, 1], of those of its parts, [parts, 1]; of other
    formats amax as it is."""
    return amax.amax().view(1, 1) if amax is not None and fmt.block == (None, None) else amax


def statistics(x: Tensor, encoding: Encoding, row0: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """Largest magnitude of every block and, for two-level formats, of the tensor.

    x:        [rows, cols], floating; already `prepared`.
    returns:  (fp32 [block rows, block cols] or None without scales, fp32 [1] or None). NaN
              propagates.

    A block that the edge of x cuts counts only the elements that exist.
    """
    fmt = encoding.fmt
    if not fmt.has_scales:
        return None, None
    x4 = blocked(x.abs(), fmt, encoding.direction, row0)
    if x4.numel() == 0:
        whole_rows, whole_cols = (block is None for block in fmt.dims(encoding.direction))
        amax = x4.new_zeros(
            1 if whole_rows else x4.shape[0], 1 if whole_cols else x4.shape[2]
        ).float()
    else:
        amax = x4.amax(3).amax(1).float() if x4.shape[3] > 1 else x4.squeeze(3).amax(1).float()
    if not fmt.tensor_scale:
        return amax, None
    if fmt.has_row_scales:
        dim = encoding.direction.contraction_dim
        tensor_amax = amax.amax(dim) if amax.numel() else amax.new_zeros(amax.shape[1 - dim])
    else:
        tensor_amax = (amax.amax() if amax.numel() else amax.new_zeros(())).reshape(1)
    # one NaN, whatever bits the device's max gave
    return amax, torch.where(tensor_amax.isnan(), math.nan, tensor_amax)


def of_each_line(per_line: Tensor, fmt: Format, direction: Direction) -> Tensor:
    """A second-level quantity so that it multiplies blocks or elements [rows, cols]: [1] as it is;
    with scale_per="row" as [rows, 1], of a columnwise storage [1, cols]."""
    return per_line.unsqueeze(direction.contraction_dim) if fmt.has_row_scales else per_line


# Scales #


def divide(a: float, b: Tensor) -> Tensor:
    """a /rn b in fp32: one rounding, where a Python number over a tensor would be reciprocal and
    product."""
    return torch.full_like(b, a) / b


def fp32_encode_scale(amax: Tensor, fmt: Format, eps: float = 0.0) -> Tensor:
    """Encode scales: max /rn amax, at most FLT_MAX; 1 where amax is 0 or not finite."""
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    encode_scale = torch.where(
        (amax == 0) | ~amax.isfinite(), torch.ones_like(amax), divide(fmt.element.max, amax)
    )
    encode_scale = encode_scale.clamp(max=FLT_MAX)
    return _power_of_two_below(encode_scale) if fmt.pow2 else encode_scale


def _power_of_two_below(x: Tensor) -> Tensor:
    """Positive fp32 numbers without their mantissas."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def delayed_encode_scale(encode_scale: Tensor, amax: Tensor, encoding: Encoding) -> Tensor:
    """fp32 [1]: a history's factor, or that of the current `amax` [1, 1] while it is 0."""
    encode_scale = torch.where(
        encode_scale > 0,
        encode_scale,
        fp32_encode_scale(amax.reshape(1), encoding.fmt, encoding.eps),
    )
    return _power_of_two_below(encode_scale) if encoding.fmt.pow2 else encode_scale


def e8m0_code(amax: Tensor, fmt: Format) -> Tensor:
    """Biased exponents (uint8) of the blocks: amax 0 -> 0x00, inf -> 0xFE, NaN -> 0xFF."""
    if fmt.scale_rounding == "floor":
        code = ((amax.view(torch.int32) >> 23) - int(math.log2(fmt.element.max))).clamp(min=0)
    else:
        bits = (
            amax * torch.tensor(1.0 / fmt.element.max, dtype=torch.float32, device=amax.device)
        ).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        code = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    code = torch.where(amax.isinf(), 0xFE, code)
    return torch.where(amax.isnan(), 0xFF, code).to(torch.uint8)


def inverse_exponent(code: Tensor) -> Tensor:
    """Biased exponent of the encode factor of a biased e8m0 exponent."""
    return torch.where(code == 255, 255, 254 - code.to(torch.int32))


def power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) in fp32 for biased exponents 0 (the subnormal 2^-127) to 254; 255 is
    NaN."""
    bits = exponent.to(torch.int32) << 23
    bits = torch.where(exponent == 0, 0x00400000, bits)
    return torch.where(exponent == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def tensor_encode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """S of a two-level format: 2688 (fp8_exact: 2304) /rn tensor_amax; 1 where it is 0 or not
    finite; FLT_MAX at most."""
    ones = torch.ones_like(tensor_amax)
    factor = divide(fmt.largest_scaled, tensor_amax)
    return torch.where(
        (tensor_amax == 0) | ~tensor_amax.isfinite(), ones, factor.clamp(max=FLT_MAX)
    )


def tensor_decode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """D = 1 /rn S, NaN where the tensor's amax is not finite: an overflow decodes to NaN, never to
    a number."""
    scale = divide(1.0, tensor_encode_scale(tensor_amax, fmt))
    return torch.where(tensor_amax.isfinite(), scale, torch.full_like(scale, math.nan))


def _exact_target(target: Tensor, round_up: bool) -> Tensor:
    """The target of a block scale as 1, 1.25, 1.5 or 2 times its power of two (`FP8_EXACT_SCALES`);
    round_up: not below it."""
    bits = target.view(torch.int32)
    significand = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32)
    chosen = torch.ones_like(target)
    for (_, below), (bound, scale) in itertools.pairwise(FP8_EXACT_SCALES):
        chosen = torch.where(
            significand > below if round_up else significand >= bound, scale, chosen
        )
    return torch.where(target.isfinite(), chosen * (bits & 0x7F800000).view(torch.float32), target)


def _two_level_scale(
    amax: Tensor, tensor_amax: Tensor, encoding: Encoding, room: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(e4m3 codes uint8, encode scales fp32) of the blocks of a two-level format.

    room:  1.5 maps a block's amax to 4, where 1 maps it to 6.

    Stochastic rounding gets the smallest scale of the format's rule not below the target: a scale
    rounded down would saturate the block's largest elements and bias their mean.
    """
    fmt, round_up = encoding.fmt, encoding.stochastic
    factor = of_each_line(tensor_encode_scale(tensor_amax, fmt), fmt, encoding.direction)
    target = amax * (factor * torch.tensor(1.0 / E2M1.max, dtype=torch.float32, device=amax.device))
    target = (target * room).clamp(max=fmt.largest_scaled / E2M1.max)
    chosen = _exact_target(target, round_up) if fmt.scale_rule == "fp8_exact" else target
    code = chosen.to(torch.float8_e4m3fn).view(torch.uint8)
    if round_up:
        code = code + (code.view(torch.float8_e4m3fn).float() < target)
    code = torch.where(amax.isnan(), 0x7F, code.to(torch.int32)).to(torch.uint8)
    encode_scale = divide(1.0, code.view(torch.float8_e4m3fn).float() * divide(1.0, factor))
    return code, encode_scale.clamp(max=FLT_MAX)


def scales(
    amax: Tensor, tensor_amax: Tensor | None, encoding: Encoding, encode_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(decode scales in storage form, fp32 encode factors) of the blocks, from their amaxes;
    `encode` says of what."""
    fmt = encoding.fmt
    if fmt.scale == "e8m0":
        scale = e8m0_code(amax, fmt)
        return scale, power_of_two(inverse_exponent(scale))
    if fmt.tensor_scale:
        tensor_amax = known(tensor_amax, "the tensor amax")
        return _two_level_scale(amax, tensor_amax, encoding)
    factor = (
        fp32_encode_scale(amax, fmt, encoding.eps)
        if encode_scale is None
        else encode_scale.expand_as(amax)
    )
    return torch.where(
        amax.isfinite(), divide(1.0, factor), torch.full_like(amax, math.nan)
    ), factor


# A difference of scaled values is measured in units of 2^-20, so that errors of a block add up to
# the same integer in any order, and within 53 bits.
_ERROR_UNITS, _MOST_ERROR = 2.0**20, 4.0


def four_over_six(
    x: Tensor, amax: Tensor, tensor_amax: Tensor, encoding: Encoding, row0: int
) -> tuple[Tensor, Tensor]:
    """`scales` of blocks whose amax becomes 6, or 4 where that has the smaller error.

    The error of a scale s is s^2 N, with N the sum over the block of n^2 (mae: s N of n), and n the
    difference of fl(x * enc) and its code in units of 2^-20, at most 4. A scale of 0 always loses;
    blocks whose amax is not finite, and equal errors, keep 6.
    """
    fmt, direction, is_mse = encoding.fmt, encoding.direction, encoding.fmt.four_over_six == "mse"
    if row0 % (fmt.dims(direction)[0] or 1):
        raise ValueError(
            f"rows from {row0} begin inside a block of {fmt}, whose scale follows from all values "
            "of a block; cut between blocks"
        )
    choices = [_two_level_scale(amax, tensor_amax, encoding, room) for room in (1.0, 1.5)]
    errors = []
    for code, factor in choices:
        values = scaled_by_block(x, factor, fmt, direction, row0)
        rounded = decode_codes(pack(cast_codes(values, fmt.element), fmt.bits), fmt, x.shape[1])
        units = ((values - rounded).abs().clamp(max=_MOST_ERROR) * _ERROR_UNITS).round().double()
        scale = decode_scale(code, fmt).double()
        total = blocked(units * units if is_mse else units, fmt, direction, row0).sum((1, 3))
        total = total * (scale * scale if is_mse else scale)
        errors.append(torch.where(scale == 0, math.inf, total))
    is_four = (errors[1] < errors[0]) & amax.isfinite()
    code, factor = (torch.where(is_four, of_4, of_6) for of_6, of_4 in zip(*choices))
    return code, factor


# Elements #


def _in_steps(magnitude: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """(magnitudes over the step between the numbers of their binade, that step, binades above the
    least): the first is exact."""
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=(element.emin + 127) << 23)
    step = (exponent - (element.mantissa << 23)).view(torch.float32)
    return magnitude / step, step, (exponent >> 23) - (element.emin + 127)


def round_stochastically(v: Tensor, element: Element, bits: Tensor) -> Tensor:
    """v, within the element's range, rounded to one of its two neighbours: up iff (bits + 0.5) /
    256 < fraction."""
    ratio, step, _ = _in_steps(v.abs(), element)
    low = ratio.floor()
    up = bits.float() + 0.5 < (ratio - low) * 256
    return torch.copysign((low + up) * step, v)


def cast_codes(v: Tensor, element: Element) -> Tensor:
    """Saturating round-to-nearest-even codes, one a byte (uint8); a NaN stays NaN (without one in
    the element: +max)."""
    if element.dtype is not None:
        codes = v.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
        return codes.masked_fill_(v.isnan(), 0x7F)
    ratio, _, binades = _in_steps(
        v.abs().nan_to_num(nan=element.max).clamp(max=element.max), element
    )
    # a carry is the next binade's first code
    code = ratio.round().to(torch.int32) + (binades << element.mantissa)
    return (code | (v.signbit() & ~v.isnan()).to(torch.int32) << (element.bits - 1)).to(torch.uint8)


# Encode and decode #


def encode(
    x: Tensor,
    amax: Tensor | None,
    tensor_amax: Tensor | None,
    encoding: Encoding,
    row0: int = 0,
    key: Tensor | None = None,
    encode_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Codes and decode scales of x, its statistics known.

    x:            [rows, cols], floating; already `prepared`.
    amax:         fp32 [block rows, block cols] of the blocks x overlaps, shared by all ranks that
                  hold a part.
    tensor_amax:  fp32 [1] of the whole tensor, for two-level formats.
    key:          int64 [5] random key (`rng.KEY_FIELDS`), for stochastic rounding.
    encode_scale: fp32 [1], for delayed scaling: the factor from the history; amax then only reveals
                  overflow.
    returns:      (uint8 [rows, row bytes], or x itself for identity; scales in storage form, or
                  None).
    """
    fmt, direction = encoding.fmt, encoding.direction
    if not fmt.is_quantized:
        return x.contiguous(), None
    amax = known(amax, "the amax")
    if fmt.chooses_by_error:
        tensor_amax = known(tensor_amax, "the tensor amax")
        scale, factor = four_over_six(x, amax, tensor_amax, encoding, row0)
    else:
        scale, factor = scales(amax, tensor_amax, encoding, encode_scale)
    values = scaled_by_block(x, factor, fmt, direction, row0)
    if encoding.stochastic:
        if key is None:
            raise ValueError(f"stochastic rounding to {fmt} needs a random key, got None")
        limit = fmt.element.max
        values = round_stochastically(
            values.clamp(-limit, limit), fmt.element, random_bytes(x.shape, direction, key)
        )
    return pack(cast_codes(values, fmt.element), fmt.bits).contiguous(), scale


def decode_codes(data: Tensor, fmt: Format, cols: int) -> Tensor:
    """The elements alone, without any scale: fp32 [rows, cols] (identity: its own dtype)."""
    if not fmt.is_quantized:
        return data
    element = fmt.element
    if element.dtype is not None:
        return data.view(element.dtype).float()
    table = torch.tensor(_values(element), dtype=torch.float32, device=data.device)
    return table[unpack(data, element.bits)[:, :cols].int()]


@functools.cache
def _values(element: Element) -> tuple[float, ...]:
    """The numbers of an element's codes, in order; of those without infinity and NaN."""
    codes = [divmod(code, 1 << element.mantissa) for code in range(1 << (element.bits - 1))]
    positive = [
        (fraction + (exponent > 0) * 2.0**element.mantissa)
        * 2.0 ** (max(exponent - 1, 0) + element.emin - element.mantissa)
        for exponent, fraction in codes
    ]
    return (*positive, *(-v for v in positive))


def decode_scale(scale: Tensor, fmt: Format) -> Tensor:
    """Stored scales as fp32 numbers."""
    if fmt.scale == "e8m0":
        return power_of_two(scale)
    return scale.view(torch.float8_e4m3fn).float() if fmt.scale == "e4m3" else scale


def decode(
    data: Tensor,
    scale: Tensor | None,
    tensor_amax: Tensor | None,
    fmt: Format,
    direction: Direction,
    cols: int,
    row0: int = 0,
) -> Tensor:
    """element * scale (* D) in fp32, [rows, cols]; a rotated storage stays rotated. Identity: its
    own dtype."""
    values = decode_codes(data, fmt, cols)
    if scale is not None:
        values = scaled_by_block(values, decode_scale(scale, fmt), fmt, direction, row0)
    if tensor_amax is None:
        return values
    return values * of_each_line(tensor_decode_scale(tensor_amax, fmt), fmt, direction)


def has_scales_of(scale: Tensor, fmt: Format) -> bool:
    """Every stored scale is one that the options of `fmt` allow: a power of two (`pow2`), one of
    `FP8_EXACT_SCALES`."""
    if fmt.pow2:
        allowed = [1.0]
    elif fmt.scale_rule == "fp8_exact":
        allowed = [s for _, s in FP8_EXACT_SCALES]
    else:
        return True
    values = decode_scale(scale, fmt)
    significand = torch.frexp(values).mantissa * 2.0
    steps = torch.tensor(allowed, dtype=torch.float32, device=scale.device)
    return bool(torch.isin(significand[values != 0], steps).all())

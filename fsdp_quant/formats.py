# SPDX-License-Identifier: Apache-2.0
"""The meaning of quantized bytes: elements, formats, directions, block geometry.

[Note: formats]
A `Format` is a row of data, never a class of its own. It says which element the codes hold, how
many elements share one scale, and what the scale is. Everything above `ops/` reads these fields;
nothing compares names.

- value = element * scale, or (element * scale) * tensor scale for a two-level format. `scale`
  always means the decode scale.
- A block is written (outer, contraction): along the axis the GEMM keeps, and along the axis it
  sums. None is the whole extent. For a [rows, cols] tensor a rowwise storage contracts cols and a
  columnwise storage contracts rows, so (1, 32) is 32 adjacent columns rowwise and 32 adjacent rows
  columnwise.
- A format whose block is the same both ways (128 x 128, a whole tensor, or no block) gives the same
  bytes in both directions: one storage serves both.

Sources: OCP Microscaling Formats (MX) v1.0; OCP 8-bit Floating Point v1.0; PTX ISA, cvt.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, TypeVar

import torch
from typing_extensions import dataclass_transform

from .options import Option, check, choice, flag, integer

_T = TypeVar("_T")
FLT_MAX = torch.finfo(torch.float32).max


@dataclass_transform(frozen_default=True)
def value_class(cls: type[_T]) -> type[_T]:
    """A frozen dataclass that computes its hash and canonical text once: every call looks values up
    in caches.

    Fields alone are pickled: text hashes differently in another process, and a compiled step of
    this process has another number there, or none.
    """
    cls = dataclass(frozen=True)(cls)

    def once(name: str, compute: Callable) -> Callable:
        def cached(self: object):
            value = self.__dict__.get(name)
            if value is None:
                value = self.__dict__[name] = compute(self)
            return value

        return cached

    def state(self: Any) -> dict:
        return {f.name: getattr(self, f.name) for f in fields_of(self)}

    setattr(cls, "__hash__", once("_hash", cls.__hash__))
    setattr(cls, "_canonical_text", once("_canonical", lambda self: _text_of_fields(self)))
    setattr(cls, "__getstate__", state)
    return cls


class Direction(enum.Enum):
    """Which axis of a [rows, cols] tensor the GEMM contracts: cols (ROWWISE) or rows (COLUMNWISE).

    >>> fq.format_of("mxfp8").scale_shape((64, 96), fq.COLUMNWISE)
    (2, 96)
    """

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"

    @property
    def contraction_dim(self) -> int:
        return 1 if self is Direction.ROWWISE else 0

    def __repr__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # members are single objects, and keys of every call


ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE


@value_class
class Element:
    """One code's encoding.

    bits:        bits per code, packed as `packing` says; 16 stands for "the tensor's own floating
                 dtype" (identity).
    max:         largest finite magnitude; inf for the identity element.
    mantissa:    explicit mantissa bits.
    emin:        exponent of the smallest normal number.
    dtype:       the torch dtype that decodes the code, or None (identity, and fewer than 8 bits: a
                 sign, an exponent and a mantissa, without infinity or NaN).

    Raises ValueError for a width that no container holds.
    """

    name: str
    bits: int
    max: float
    mantissa: int
    emin: int
    dtype: torch.dtype | None

    def __post_init__(self):
        if self.bits not in PACKINGS:
            raise ValueError(
                f"{self.name} has codes of {self.bits} bits; widths that are packed: "
                f"{', '.join(map(str, PACKINGS))}"
            )
        if self.bits == 8 and self.dtype is None:
            raise ValueError(
                f"{self.name} has codes of 8 bits, and no torch dtype that decodes them"
            )

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16

    @property
    def packing(self) -> tuple[int, int]:
        """(codes, bytes) of one container."""
        return PACKINGS[self.bits]

    @property
    def operand(self) -> Element:
        """The 8-bit element of anchored codes: e4m3 for smaller ones, whose numbers it contains;
        else itself."""
        return E4M3 if self.bits < 8 and self.mantissa <= E4M3.mantissa else self

    @property
    def operand_shift(self) -> int:
        """The largest power of two by which all numbers may be scaled within `operand`: room for
        blocks below the largest."""
        return 0 if self.operand is self else math.floor(math.log2(self.operand.max / self.max))


# (codes, bytes) of a container, by bits per code: the fewest whole bytes that whole codes fill, the
# first in the lowest bits.
PACKINGS = {4: (2, 1), 6: (4, 3), 8: (1, 1), 16: (1, 2)}

E4M3 = Element("e4m3", 8, 448.0, 3, -6, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 8, 57344.0, 2, -14, torch.float8_e5m2)
E3M2 = Element("e3m2", 6, 28.0, 2, -2, None)
E2M3 = Element("e2m3", 6, 7.5, 3, 0, None)
E2M1 = Element("e2m1", 4, 6.0, 1, 0, None)
OWN_DTYPE = Element("own dtype", 16, math.inf, 0, 0, None)
ELEMENTS = {e.name: e for e in (E4M3, E5M2, E3M2, E2M3, E2M1, OWN_DTYPE)}

# Bytes per scale, by kind. "none" is for the identity element.
SCALE_BYTES = {"none": 0, "fp32": 4, "e8m0": 1, "e4m3": 1}
SCALE_DTYPE = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}

ROTATION_BLOCK = 16

# Rules for the e4m3 scale of an e2m1 block, given the target that maps the block's amax to 6.
# fp8_exact: (bound, s): a significand of the target in [bound, next bound) gives s times its power
#            of two; at most 1.5 * 2^8.
# The bounds minimize the mean square error of gaussian, Laplace, t3 and silu(a) * b blocks.
# Choosing among three scales by a block's mean square error took the noise of gaussian vectors from
# .101 to .091 and of silu(a) * b from .104 to .097, and changed nothing in training
# (`bench.learning`, gaps of two seeds .0393, .0365; by the amax .0391, .0393). So the amax alone
# decides: one rule for activations, shards, pieces and blocks that a cut divides.
SCALE_RULES = ("nearest", "fp8_exact")
FP8_EXACT_SCALES = ((1.0, 1.0), (1.15, 1.25), (1.4, 1.5), (1.8, 2.0))
FP8_EXACT_LARGEST = 384.0
# 6 * 384 * 2^-3 is in e4m3's range: operands are element * scale * 2^-3.
FP8_EXACT_OPERAND = 0.125
# What the second-level scale of a two-level format spans.
SECOND_LEVELS = ("tensor", "row")
# Errors by which a block chooses whether its amax becomes 6 or 4.
FOUR_OVER_SIX = ("off", "mse", "mae")


def _is_block(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(size is None or integer(1).accepts(size) for size in value)
    )


_FORMAT_OPTIONS = {
    "element": Option(
        "an Element, such as fq.format_of('mxfp8').element", lambda v: isinstance(v, Element)
    ),
    "block": Option("two sizes >= 1, each an integer or None", _is_block),
    "scale": choice(*SCALE_BYTES),
    "pow2": flag(),
    "scale_rounding": choice("up", "floor"),
    "tensor_scale": flag(),
    "rotated": flag(),
    "scale_rule": choice(*SCALE_RULES),
    "scale_per": choice(*SECOND_LEVELS),
    "four_over_six": choice(*FOUR_OVER_SIX),
}


@value_class
class Format:
    """The meaning of the bytes of one storage; hashable, compared by value.

    element:         codes (see `Element`).
    block:           (outer, contraction) elements that share a scale; None is the whole extent.
    scale:           "none", "fp32", "e8m0" or "e4m3" (the stored decode scale).
    pow2:            an fp32 scale restricted to powers of two.
    scale_rounding:  e8m0 only: "up" (a finite block never saturates) or "floor" (the OCP rule).
    tensor_scale:    a second-level fp32 scale, derived from the amax of the whole tensor.
    scale_per:       second level only: "tensor", or "row": one for each row of the GEMM operand (a
                     token of a rowwise storage, a column of a columnwise one).
    four_over_six:   e2m1 with a second level only: "off", or each block's scale maps its amax to 6
                     or to 4, whichever has the smaller error: mean square ("mse") or absolute
                     ("mae").
    scale_rule:      e4m3 only: "nearest" e4m3, or "fp8_exact": a power of two times 1, 1.25 or 1.5,
                     so that an e2m1 element times its scale is an e4m3 number (`FP8_EXACT_SCALES`).
    rotated:         values are multiplied by a 16-wide random Hadamard matrix along the
    contraction.

    >>> fq.Format("mxfp8_1x64", fq.format_of("mxfp8").element, (1, 64), "e8m0").block
    (1, 64)
    """

    name: str
    element: Element
    block: tuple[int | None, int | None]
    scale: str
    pow2: bool = False
    scale_rounding: str = "up"
    tensor_scale: bool = False
    rotated: bool = False
    scale_rule: str = "nearest"
    scale_per: str = "tensor"
    four_over_six: str = "off"

    def __post_init__(self):
        check(self, _FORMAT_OPTIONS, f"{self.name}: ")
        if self.scale_rounding == "floor" and self.scale != "e8m0":
            raise ValueError(
                f"scale_rounding='floor' is defined for e8m0 scales; {self.name} has {self.scale}"
            )
        for field, default in (("scale_rule", "nearest"), ("four_over_six", "off")):
            value = getattr(self, field)
            if value != default and not (self.tensor_scale and self.element == E2M1):
                raise ValueError(
                    f"{field}={value!r} is defined for e2m1 with e4m3 scales and a tensor scale; "
                    f"{self.name} is {self.element.name} with {self.scale} scales"
                )
        if self.scale_per == "row" and not (self.tensor_scale and self.block[0] == 1):
            raise ValueError(
                "scale_per='row' is defined for a second-level scale over blocks of one row; "
                f"{self.name} has {self.scale} scales of {self.block} blocks"
                + (" and a tensor scale" if self.tensor_scale else "")
            )
        if self.pow2 and self.scale != "fp32":
            raise ValueError(f"pow2 is defined for fp32 scales; {self.name} has {self.scale}")

    def facts(self) -> dict:
        """The fields by name, in JSON's types. Raises ValueError for an element that no reader of
        them knows."""
        if ELEMENTS.get(self.element.name) != self.element:
            raise ValueError(
                f"{self.name}: element {self.element.name} is not in fsdp_quant.formats.ELEMENTS, "
                f"so its codes cannot be read back; known elements: {', '.join(ELEMENTS)}"
            )
        fields = {f.name: getattr(self, f.name) for f in fields_of(self)}
        return fields | {"element": self.element.name, "block": list(self.block)}

    @property
    def is_quantized(self) -> bool:
        return self.element.is_quantized

    @property
    def decoding(self) -> tuple:
        """The fields that decoding needs; not those that choose scales (pow2, scale_rounding,
        scale_rule, four_over_six)."""
        tensor_scale = self.tensor_scale, self.scale_per
        return self.element, self.block, self.scale, tensor_scale, self.rotated

    @property
    def bits(self) -> int:
        return self.element.bits

    @property
    def has_scales(self) -> bool:
        return self.scale != "none"

    @property
    def has_fp32_scales(self) -> bool:
        return self.scale == "fp32"

    @property
    def overflow(self) -> float:
        """Scaled magnitude from which a value would round above the largest element."""
        return self.element.max + 2.0 ** (
            math.floor(math.log2(self.element.max)) - self.element.mantissa - 1
        )

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPE[self.scale]

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES[self.scale]

    @property
    def shares_storage(self) -> bool:
        """One storage is both the rowwise and the columnwise operand (a byte transpose apart)."""
        return self.block[0] == self.block[1] and not self.rotated

    @functools.cached_property
    def turned(self) -> Format:
        """The format of the same codes as the other operand: the sides of its blocks swapped."""
        return replace(self, block=self.block[::-1])

    @property
    def is_turned(self) -> bool:
        """Blocks span more rows of the operand than of its contraction: no quantizer writes such
        codes, which are those of the other direction."""
        outer, contraction = (math.inf if length is None else length for length in self.block)
        return outer > contraction

    @property
    def decodes_exactly_to_bf16(self) -> bool:
        """Code times in-block scale fits bf16's 8 significant bits; fp32 scales of a whole row or
        tensor, and second-level scales, stay outside the product."""
        if not self.is_quantized:
            return False  # depends on the tensor's dtype: see Storage.decodes_exactly_to_bf16
        return self.scale != "fp32" or self.pow2 or self.scale_leaves_contraction

    @property
    def decodes_exactly_to_e4m3(self) -> bool:
        """Element times block scale is an e4m3 number of one exponent per tensor, down to 2^-11 of
        the largest block."""
        return self.becomes_e4m3 and self.scale_rule == "fp8_exact"

    @property
    def becomes_e4m3(self) -> bool:
        """Element times block scale is rounded to e4m3, with one scale per tensor, where a GEMM has
        no scales of 16 elements: from six significant bits, or from four (`fp8_exact`)."""
        return self.tensor_scale and self.element == E2M1 and not self.has_row_scales

    @property
    def is_two_level(self) -> bool:
        """A second-level scale multiplies the block scales."""
        return self.tensor_scale

    @property
    def has_row_scales(self) -> bool:
        """The second-level scale is one for each row of the operand."""
        return self.scale_per == "row"

    @property
    def chooses_by_error(self) -> bool:
        """A block's scale follows from all its values, so no cut may divide a block."""
        return self.four_over_six != "off"

    @property
    def largest_scaled(self) -> float:
        """Largest element times largest block scale of a two-level format, to which the tensor's
        amax is encoded."""
        return self.element.max * (
            FP8_EXACT_LARGEST if self.scale_rule == "fp8_exact" else E4M3.max
        )

    @property
    def scale_leaves_contraction(self) -> bool:
        """The scale spans the contraction, so it may multiply the product, not the operand."""
        return self.is_quantized and self.block[1] is None

    @property
    def spans_tensor(self) -> bool:
        """Some scale follows from the amax of the whole tensor."""
        two_level = self.tensor_scale and not self.has_row_scales
        return two_level or (self.scale != "none" and self.block == (None, None))

    def spans_rows(self, direction: Direction) -> bool:
        """Some scale follows from amaxes of all rows of the [rows, cols] tensor."""
        spans = self.tensor_scale and not (self.has_row_scales and direction is ROWWISE)
        return self.has_scales and (spans or self.dims(direction)[0] is None)

    @property
    def keeps_rows_apart(self) -> bool:
        """No scale of a rowwise storage serves two rows."""
        return self.row_alignment(ROWWISE) == 1 and not self.spans_rows(ROWWISE)

    def tensor_scale_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int]:
        """[1] of the second-level amax of a [rows, cols] tensor; with scale_per="row" [rows], of a
        columnwise storage [cols]."""
        return (shape[1 - direction.contraction_dim] if self.has_row_scales else 1,)

    def row_alignment(self, direction: Direction) -> int:
        """Cuts between rows at multiples of this divide no block and no rotation."""
        rotation = ROTATION_BLOCK if self.rotated and direction is not Direction.ROWWISE else 1
        return math.lcm(self.dims(direction)[0] or 1, rotation)

    def dims(self, direction: Direction) -> tuple[int | None, int | None]:
        """The block as (along dim 0, along dim 1) of the [rows, cols] tensor."""
        outer, contraction = self.block
        return (outer, contraction) if direction is ROWWISE else (contraction, outer)

    def padded_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int]:
        """[rows, cols] of the stored codes: rotation pads the contraction to a multiple of 16."""
        rows, cols = shape
        if not self.rotated:
            return rows, cols
        if direction is ROWWISE:
            return rows, round_up(cols, ROTATION_BLOCK)
        return round_up(rows, ROTATION_BLOCK), cols

    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        """Bytes of one compact row of `cols` codes; the identity element alone reads `dtype`."""
        if not self.is_quantized:
            return cols * dtype.itemsize
        codes, size = self.element.packing
        return ceil_div(cols, codes) * size

    def scale_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int] | None:
        """[block rows, block cols] of the scales of a [rows, cols] tensor; None: it has none."""
        if self.scale == "none":
            return None
        (rows, cols), (b0, b1) = self.padded_shape(shape, direction), self.dims(direction)
        return 1 if b0 is None else ceil_div(rows, b0), 1 if b1 is None else ceil_div(cols, b1)

    def bytes_per_element(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Stored bytes per element of a large tensor, scales included."""
        if not self.is_quantized:
            return float(dtype.itemsize)
        outer, contraction = self.block
        if contraction is None:
            return self.element.bits / 8
        shared = SCALE_BYTES[self.scale] / ((outer or math.inf) * contraction)
        return self.element.bits / 8 + shared

    def __repr__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        is_open = self.name.startswith("fp8") or self.element in (E5M2, E3M2)
        marks = [self.element.name] if is_open else []
        marks += ["pow2"] if self.pow2 else []
        marks += ["floor"] if self.scale_rounding == "floor" else []
        marks += [self.scale_rule] if self.scale_rule != "nearest" else []
        marks += ["scale per row"] if self.has_row_scales else []
        marks += [f"4over6 {self.four_over_six}"] if self.chooses_by_error else []
        marks += ["RHT"] if self.rotated else []
        marks += ["turned"] if self.is_turned else []
        return self.name + (f"({', '.join(marks)})" if marks else "")


def canonical_text(value: object) -> str:
    """A text that is equal for equal values and differs for different ones, in any process
    (dataclasses by field)."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(canonical_text, value))})"
    if not is_dataclass(value):
        return repr(value)
    of_value = getattr(value, "_canonical_text", None)
    return _text_of_fields(value) if of_value is None else of_value()


def digest(value: object) -> str:
    """Return 32 hex digits in place of `canonical_text`: short, as arguments of operators are
    copied and hashed in each call."""
    return hashlib.sha256(canonical_text(value).encode()).hexdigest()[:32]


def _text_of_fields(value: Any) -> str:
    fields = (f"{f.name}={canonical_text(getattr(value, f.name))}" for f in fields_of(value))
    return f"{type(value).__name__}({', '.join(fields)})"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("identity", OWN_DTYPE, (None, None), "none"),
        Format("fp8_tensor", E4M3, (None, None), "fp32"),
        Format("fp8_row", E4M3, (1, None), "fp32"),
        Format("fp8_1x128", E4M3, (1, 128), "fp32", pow2=True),
        Format("fp8_128x128", E4M3, (128, 128), "fp32", pow2=True),
        Format("mxfp8", E4M3, (1, 32), "e8m0"),
        Format("mxfp8_32x32", E4M3, (32, 32), "e8m0"),
        Format("mxfp6", E2M3, (1, 32), "e8m0"),
        Format("mxfp4", E2M1, (1, 32), "e8m0"),
        Format("nvfp4", E2M1, (1, 16), "e4m3", tensor_scale=True),
        Format("nvfp4_16x16", E2M1, (16, 16), "e4m3", tensor_scale=True),
    )
}
ALIASES = {"bf16": "identity", "fp8": "fp8_tensor", "fp8_current": "fp8_tensor"}
IDENTITY = FORMATS["identity"]


def known_formats() -> list[str]:
    """Names that `format_of` accepts, aliases included."""
    return sorted([*FORMATS, *ALIASES])


def format_of(name: str | Format, **changes) -> Format:
    """The format of that name, with fields changed (`element="e5m2"`, `pow2=True`, ...).

    Raises ValueError with the list of known names.

    >>> fq.format_of("fp8_1x128", pow2=False).pow2
    False
    >>> list(fq.FORMATS)[:3]
    ['identity', 'fp8_tensor', 'fp8_row']
    """
    fmt = FORMATS.get(ALIASES.get(name, name)) if isinstance(name, str) else name
    if not isinstance(fmt, Format):
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(known_formats())}")
    if isinstance(changes.get("element"), str):
        if changes["element"] not in ELEMENTS:
            raise ValueError(
                f"unknown element {changes['element']!r}; known elements: {', '.join(ELEMENTS)}"
            )
        changes["element"] = ELEMENTS[changes["element"]]
    return replace(fmt, **changes) if changes else fmt


def format_of_facts(facts: dict) -> Format:
    """The format of these `Format.facts`; facts that an older file lacks are those of its name."""
    fields: dict[str, Any] = facts | {"block": tuple(facts["block"])}
    name = fields.pop("name")
    if not isinstance(name, str) or name in known_formats():
        return format_of(name, **fields)
    fields["element"] = ELEMENTS[fields["element"]]
    return Format(name, **fields)


@functools.cache
def anchored_format(fmt: Format, run: int | None, whole: bool = False, outer: int = 1) -> Format:
    """The format of codes of `fmt` with one fp32 scale per `run` elements of the contraction (None:
    all) of `outer` lines, or, whole=True, for the tensor.

    Scales stay powers of two; codes smaller than 8 bits become those of `Element.operand`.
    """
    if fmt.becomes_e4m3:
        return Format(f"{fmt.name} anchored", E4M3, (None, None), "fp32")
    block = (None if whole else outer, run)
    return Format(f"{fmt.name} anchored", fmt.element.operand, block, "fp32", pow2=True)


def spread_format(fmt: Format) -> Format:
    """The format of codes of `fmt` with each power-of-two scale of 128 elements as four e8m0 scales
    of 32."""
    return Format(f"{fmt.name} spread", fmt.element, (1, 32), "e8m0")


@value_class
class Encoding:
    """How high-precision values are encoded in one direction.

    stochastic:  round up with probability equal to the fraction, on bits keyed by the global
                 element.
    eps:         least block amax (fp32 scales only).
    """

    fmt: Format
    direction: Direction
    stochastic: bool = False
    eps: float = 0.0


def check_pair(gemm: str, a: Format, b: Format, a_name: str, b_name: str) -> None:
    """Raise ValueError unless the GEMM of these two formats is defined: a rotation must be on both
    operands, where it cancels. Every pair of scales and elements multiplies."""
    if a.rotated != b.rotated:
        rotated, plain = (a_name, b_name) if a.rotated else (b_name, a_name)
        raise ValueError(
            f"{gemm} multiplies {a_name} ({a}) by {b_name} ({b}): {rotated} is rotated and {plain} "
            "is not, so the rotation does not cancel; rotate both or neither"
        )

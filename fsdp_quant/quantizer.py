# SPDX-License-Identifier: Apache-2.0
"""`Quantizer` encodes one direction of a tensor, `HybridQuantizer` both; both are immutable values.

A quantizer has no tensor and no state: weights hold the histories of delayed scaling, the step
holds random keys. Any number of tensors, and both sides of a hybrid, may share a quantizer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .encoded_matrix import EncodedMatrix
from .formats import COLUMNWISE, ROWWISE, Direction, Encoding, Format, format_of, value_class
from .migration import answers_keywords
from .ops import dispatch
from .ops.capability import anchors_tensor
from .ops.dispatch import Statistics
from .ops.layout import COMPACT
from .options import check, choice, flag, number
from .scaling import DelayedScaling
from .storage import Storage, matrix_type, to_layout, to_storage
from .tensor.quantized_tensor import QuantizedTensor

FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_COLUMNWISE_SOURCE = choice("original", "rowwise_dequantized", "rowwise")


_encoding = cache(Encoding)  # one object per value, so that caches find it without a comparison
_OPTIONS = {
    "rounding": choice("nearest", "stochastic"),
    "rotation": flag(),
    "eps": number(0.0, 3.4e38),
}


@value_class
class Quantizer:
    """Format, scaling and rounding of one direction.

    fmt:       `Format` or its name.
    scaling:   "current", or `DelayedScaling(...)` (formats with one fp32 scale per tensor).
    rounding:  "nearest" (even) or "stochastic".
    rotation:  random Hadamard transform of 16 values along the contraction before encoding.
    eps:       least block amax (fp32 scales).

    Raises ValueError for combinations without a meaning.

    >>> fq.Quantizer("fp8_row").quantize(torch.randn(32, 64)).rowwise.scale.shape
    torch.Size([32, 1])
    """

    fmt: Format
    scaling: str | DelayedScaling = "current"
    rounding: str = "nearest"
    rotation: bool = False
    eps: float = 0.0

    if TYPE_CHECKING:  # names are converted

        def __init__(self, fmt: Format | str, *fields: Any, **options: Any): ...

    def __post_init__(self):
        fmt = format_of(self.fmt)
        check(self, _OPTIONS)
        if self.scaling != "current" and not isinstance(self.scaling, DelayedScaling):
            raise ValueError(
                f"scaling must be 'current' or DelayedScaling(...), got {self.scaling!r}"
            )
        if self.is_delayed and (not fmt.has_fp32_scales or fmt.block != (None, None)):
            raise ValueError(
                f"delayed scaling keeps one scale a tensor; {fmt} has blocks of {fmt.block}"
            )
        if self.rounding == "stochastic" and not fmt.is_quantized:
            raise ValueError(
                f"{fmt} is not rounded; rounding='stochastic' needs a quantized format"
            )
        if self.rounding == "stochastic" and fmt.chooses_by_error:
            raise ValueError(
                f"{fmt} chooses block scales by the error of rounding to nearest; rounding="
                "'stochastic' needs four_over_six='off'"
            )
        if self.eps and not fmt.has_fp32_scales:
            raise ValueError(f"eps bounds fp32 scales; {fmt} has {fmt.scale} scales")
        if self.rotation or fmt.rotated:
            if fmt.bits != 4:
                raise ValueError(f"rotation is defined for 4-bit formats; got {fmt}")
            if fmt.block[0] != 1:
                raise ValueError(
                    f"rotation along the contraction needs blocks of one row; {fmt} has {fmt.block}"
                )
            fmt = replace(fmt, rotated=True)
        object.__setattr__(self, "fmt", fmt)
        object.__setattr__(self, "rotation", fmt.rotated)

    @property
    def is_delayed(self) -> bool:
        return isinstance(self.scaling, DelayedScaling)

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def encoding(self, direction: Direction) -> Encoding:
        return self._encodings[direction]

    @cached_property
    def _encodings(self) -> dict[Direction, Encoding]:
        return {d: _encoding(self.fmt, d, self.is_stochastic, self.eps) for d in Direction}

    def storage(self, x: Tensor, direction: Direction, key: Tensor | None = None) -> Storage:
        """One direction of x [rows, cols]."""
        encoding = self.encoding(direction)
        (encoded,) = dispatch.encode(x, [encoding], None, keys=[key])
        return Storage.of(encoded, encoding, x.shape, x.dtype)

    def quantize(self, x: Tensor, *, key: Tensor | None = None) -> QuantizedTensor:
        """Both directions of x with this quantizer; see `HybridQuantizer.quantize`."""
        return HybridQuantizer(self, self).quantize(x, key=key)

    def __repr__(self) -> str:
        marks = [repr(self.fmt)]
        marks += ["SR"] if self.is_stochastic else []
        marks += [f"delayed({self.scaling})"] if self.is_delayed else []
        marks += [f"eps={self.eps}"] if self.eps else []
        return "+".join(marks)


_Side = Quantizer | Format | str | None


@answers_keywords
@value_class
class HybridQuantizer:
    """One quantizer per direction; the two may have different formats.

    rowwise, columnwise:  `Quantizer`, `Format`, a format's name, or None (no such direction).
    columnwise_source:    "original": quantize the columnwise storage from the same values as the
                          rowwise one; "rowwise_dequantized": from the decoded rowwise storage;
                          "rowwise": the rowwise codes serve both directions (columnwise: None, or
                          as rowwise), so that the backward multiplies the values of the forward.

    >>> t = fq.HybridQuantizer("mxfp8", "nvfp4").quantize(torch.randn(32, 64))
    >>> t.rowwise.fmt.name, t.columnwise.fmt.name
    ('mxfp8', 'nvfp4')
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None
    columnwise_source: str = "original"

    if TYPE_CHECKING:  # names are converted

        def __init__(self, rowwise: _Side, columnwise: _Side, columnwise_source: str = ""): ...

    def __post_init__(self):
        for name in ("rowwise", "columnwise"):
            side = getattr(self, name)
            if side is not None and not isinstance(side, Quantizer):
                object.__setattr__(self, name, Quantizer(format_of(side)))
        if self.rowwise is None and self.columnwise is None:
            raise ValueError(
                "a HybridQuantizer needs a rowwise or a columnwise quantizer, got neither"
            )
        _COLUMNWISE_SOURCE.read("columnwise_source", self.columnwise_source)
        source = f"columnwise_source={self.columnwise_source!r}"
        if self.columnwise_source == "original":
            return
        if self.rowwise is None or (self.columnwise is None and not self.turns):
            raise ValueError(f"{source} needs both directions")
        if self.rowwise.rotation:
            raise ValueError(f"{source} needs a rowwise side that is not rotated")
        if self.turns:
            self._turn(source)

    def _turn(self, source: str) -> None:
        """Let the columnwise side be the rowwise codes as the other operand."""
        rowwise = self.rowwise
        if rowwise is None or rowwise.fmt.has_row_scales:
            raise ValueError(f"{source} needs scales of blocks, got {rowwise}")
        turned = rowwise if rowwise.fmt.shares_storage else replace(rowwise, fmt=rowwise.fmt.turned)
        if self.columnwise not in (None, rowwise, turned):
            raise ValueError(
                f"{source} multiplies the codes of {rowwise} in the backward too, got "
                f"columnwise={self.columnwise}; leave it out"
            )
        object.__setattr__(self, "columnwise", turned)
        if turned is rowwise:
            object.__setattr__(self, "columnwise_source", "original")

    @cached_property
    def sides(self) -> dict[Direction, Quantizer]:
        """The quantizers of the directions that are quantized."""
        sides = (ROWWISE, self.rowwise), (COLUMNWISE, self.columnwise)
        return {d: q for d, q in sides if q is not None}

    def side(self, direction: Direction) -> Quantizer:
        """The quantizer of a direction. Raises ValueError if there is none."""
        if direction not in self.sides:
            raise ValueError(f"{self} has no {direction.value} quantizer")
        return self.sides[direction]

    @cached_property
    def is_stochastic(self) -> bool:
        """Some side needs a random key."""
        return any(q.is_stochastic for q in self.sides.values())

    @cached_property
    def shares_storage(self) -> bool:
        """The rowwise storage serves both directions."""
        is_one = self.rowwise == self.columnwise and self.side(ROWWISE).fmt.shares_storage
        return is_one or self.turns

    @property
    def turns(self) -> bool:
        """The columnwise operand is the rowwise codes, whose blocks lie along its other side."""
        return self.columnwise_source == "rowwise"

    @cached_property
    def over_rowwise(self) -> HybridQuantizer:
        """The quantizer of a weight that keeps its rowwise codes alone (`fq.freeze`): the backward
        multiplies their values. Itself where no GEMM would read them as codes: they are rotated, or
        have scales per row or fp32 scales of 1 x 128, or the other operand is rotated."""
        rowwise, columnwise = self.side(ROWWISE), self.side(COLUMNWISE)
        serves = rowwise.fmt.is_quantized and not rowwise.rotation and not columnwise.rotation
        if self.shares_storage or self.is_derived or not serves:
            return self
        if not columnwise.fmt.is_quantized:
            return HybridQuantizer(rowwise, columnwise, "rowwise_dequantized")
        return HybridQuantizer(rowwise, None, "rowwise") if anchors_tensor(rowwise.fmt) else self

    @property
    def is_derived(self) -> bool:
        """The columnwise storage is quantized from the rowwise one."""
        return self.columnwise_source == "rowwise_dequantized" and not self.shares_storage

    @property
    def decodes_columnwise(self) -> bool:
        """The columnwise operand is the values of the rowwise codes: GEMMs decode them, and nothing
        stores the values."""
        return self.is_derived and not self.side(COLUMNWISE).fmt.is_quantized

    @cached_property
    def encodings(self) -> dict[Direction, Encoding]:
        """The encodings of the original values, by direction."""
        encodings = {d: q.encoding(d) for d, q in self.sides.items()}
        if self.shares_storage or self.is_derived:
            del encodings[COLUMNWISE]
        return encodings

    @cached_property
    def delayed_directions(self) -> tuple[Direction, ...]:
        """Directions with delayed scaling; each has a history of its own."""
        return tuple(d for d in self.encodings if self.sides[d].is_delayed)

    def derive_columnwise(
        self,
        rowwise: EncodedMatrix,
        compute_dtype: torch.dtype | None = None,
        key: Tensor | None = None,
    ) -> Storage:
        """The columnwise storage of the decoded rowwise one (decoded in fp32, rounded once).

        compute_dtype:  dtype that a quantized columnwise format sees (None: the storage's);
                        identity keeps the storage's.
        """
        columnwise, dtype = self.side(COLUMNWISE), rowwise.dtype
        source = compute_dtype or dtype if columnwise.fmt.is_quantized else dtype
        values = rowwise.dequantize(torch.float32).to(source)
        return replace(columnwise.storage(values, COLUMNWISE, key), dtype=dtype)

    def columnwise_of(
        self,
        rowwise: EncodedMatrix,
        key: Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Storage:
        """The columnwise storage if it is not encoded from the values: the rowwise one itself, or
        `derive_columnwise` of it."""
        if self.shares_storage:
            return to_storage(rowwise).as_direction(COLUMNWISE)
        return self.derive_columnwise(rowwise, compute_dtype, key)

    def storages(
        self,
        x: Tensor,
        directions: Collection[Direction] = tuple(Direction),
        *,
        key: Tensor | None = None,
        factors: dict[Direction, Tensor] | None = None,
        statistics: dict[Direction, Statistics] | None = None,
    ) -> tuple[dict[Direction, Storage], dict[Direction, Tensor]]:
        """`operands` of x [rows, cols] as compact storages."""
        matrices, amaxes = self.operands(
            x, directions, layouts={}, key=key, factors=factors, statistics=statistics
        )
        return {d: to_storage(matrix) for d, matrix in matrices.items()}, amaxes

    def operands(
        self,
        x: Tensor,
        directions: Collection[Direction] = tuple(Direction),
        *,
        layouts: dict[Direction, str],
        key: Tensor | None = None,
        factors: dict[Direction, Tensor] | None = None,
        statistics: dict[Direction, Statistics] | None = None,
    ) -> tuple[dict[Direction, EncodedMatrix], dict[Direction, Tensor]]:
        """Quantize x [rows, cols] for these directions, in one operation over x.

        layouts:     in which GEMMs read each direction (`ops.layout`); others are compact.
        key:         int64 [5] (`ops.rng.KEY_FIELDS`), for stochastic rounding.
        factors:     fp32 [1] per direction from the history of a delayed side (0: no history yet).
        statistics:  of the tensor that x is a part of, by encoded direction, where they differ from
                     x's.
        returns:     (direction -> matrix, direction of a delayed side -> fp32 [1, 1] amax).
        """
        encodings = self._encodings_for(directions, layouts)
        written = {} if self.is_derived or self.turns else layouts
        # the direction whose statistics and history scale each one
        source = {d: d if d in self.encodings else ROWWISE for d in encodings}
        encoded = dispatch.encode(
            x,
            list(encodings.values()),
            [statistics.get(source[d]) for d in encodings] if statistics else None,
            keys=[key] * len(encodings),
            encode_scales=[factors.get(source[d]) for d in encodings] if factors else None,
            layouts=[written.get(d, COMPACT) for d in encodings] if written else None,
        )
        amaxes = {
            source[d]: codes.amax
            for d, codes in zip(encodings, encoded)
            if codes.amax is not None and source[d] in self.delayed_directions
        }
        matrices = {
            d: matrix_type(codes.layout).of(codes, encodings[d], x.shape, x.dtype)
            for d, codes in zip(encodings, encoded)
        }
        operands = {}
        for d in (d for d in self.sides if d in directions):
            matrix = matrices.get(d) or self.columnwise_of(matrices[ROWWISE], key)
            operands[d] = to_layout(matrix, layouts.get(d, COMPACT))
        return operands, amaxes

    def _encodings_for(
        self, directions: Collection[Direction], layouts: dict[Direction, str]
    ) -> dict[Direction, Encoding]:
        """The encodings of the values from which operands of these directions follow."""
        encodings = {d: e for d, e in self.encodings.items() if d in directions}
        if COLUMNWISE not in directions or COLUMNWISE not in self.sides or COLUMNWISE in encodings:
            return encodings
        is_laid_out = layouts.get(COLUMNWISE, COMPACT) != COMPACT
        if is_laid_out and self.shares_storage and not (self.is_stochastic or self.turns):
            # the same codes in another layout; random bits would differ
            return encodings | {COLUMNWISE: self.side(COLUMNWISE).encoding(COLUMNWISE)}
        return {ROWWISE: self.encodings[ROWWISE]} | encodings

    def quantize(self, x: Tensor, *, key: Tensor | None = None) -> QuantizedTensor:
        """Quantize a tensor that no other rank shares.

        x:        [.., cols], bf16, fp16 or fp32; leading dims count as rows. Any strides.
        key:      int64 [5] random key for stochastic rounding (default: drawn from torch's
                  generator).
        returns:  QuantizedTensor of x's shape and dtype, with the directions that the quantizer
                  has.

        Raises ValueError for integer tensors and scalars.
        """
        rows = as_rows(x.detach())
        if any(not e.fmt.is_quantized for e in self.encodings.values()):
            # an identity storage is a view of its input, and `update` writes into it
            rows = rows.clone()
        if key is None and self.is_stochastic:
            key = torch.zeros(5, dtype=torch.int64, device="cpu")
            key[0] = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
            key = key.to(x.device)
        storages, _ = self.storages(rows, key=key)
        return QuantizedTensor(storages.get(ROWWISE), storages.get(COLUMNWISE), shape=x.shape)

    def update(
        self, out: QuantizedTensor, x: Tensor, *, key: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize x into the buffers of `out`; the bytes of a fresh `quantize(x)`.

        Raises ValueError, and leaves `out` as it was, if it lacks a direction, or differs in
        format, shape or dtype.
        """
        if x.shape != out.shape or x.dtype != out.dtype:
            raise ValueError(
                f"cannot update {out!r} from {list(x.shape)} {x.dtype}: shape and dtype must agree"
            )
        for direction, quantizer in self.sides.items():
            storage = getattr(out, direction.value)
            if storage is None:
                raise ValueError(
                    f"cannot update {out!r}: its {direction.value} storage was dropped"
                )
            if storage.fmt != quantizer.fmt:
                raise ValueError(
                    f"cannot update {out!r} {direction.value} with {quantizer}: the formats differ"
                )
        if out._pair.shares_data and not self.shares_storage:
            raise ValueError(
                f"cannot update {out!r} with {self}: one storage serves both of its directions"
            )
        fresh = self.quantize(x, key=key)
        for direction in self.sides:
            new = fresh.storage_for(direction).buffers()
            for name, buffer in getattr(out, direction.value).buffers().items():
                buffer.copy_(new[name])
        return out

    def __repr__(self) -> str:
        if self.rowwise == self.columnwise:
            return repr(self.rowwise)
        derived = " from rowwise" if self.columnwise_source != "original" else ""
        return f"{self.rowwise} / {self.columnwise}{derived}"


def as_rows(x: Tensor) -> Tensor:
    """x [.., cols] as [rows, cols]. Raises ValueError for integer tensors and scalars."""
    if x.dtype not in FLOATING:
        raise ValueError(
            f"quantizers take bf16, fp16 and fp32 tensors, got {x.dtype}; cast it first"
        )
    if x.dim() == 0:
        raise ValueError("quantizers take tensors of at least one dim, got a scalar")
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def hybrid_of(value: HybridQuantizer | Quantizer | Format | str) -> HybridQuantizer:
    """Return a `HybridQuantizer`; of a `Quantizer`, a `Format` or its name, with it on both sides.

    Raises ValueError for subclasses of these: kernels, gathers and GEMMs read the fields of a
    quantizer, and call no method of it.
    """
    if not isinstance(value, HybridQuantizer):
        side = value if isinstance(value, Quantizer) else Quantizer(format_of(value))
        value = HybridQuantizer(side, side)
    _check_class(HybridQuantizer, value)
    for side in value.sides.values():
        _check_class(Quantizer, side)
        _check_class(Format, side.fmt)
        if side.is_delayed:
            _check_class(DelayedScaling, side.scaling)
    return value


def _check_class(kind: type, value: object) -> None:
    if type(value) is not kind:
        raise ValueError(
            f"got {type(value).__qualname__}, a subclass of {kind.__name__}; wanted a "
            f"{kind.__name__} itself, whose fields kernels, gathers and GEMMs read: methods of a "
            "subclass would not be called. Describe codes as data, fq.numerics.Format(name, "
            "element, block, scale); for arithmetic of your own quantize values in your module, "
            "and return 'identity' for this tensor"
        )

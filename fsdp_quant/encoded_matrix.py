# SPDX-License-Identifier: Apache-2.0
"""`EncodedMatrix`: codes and scales of one direction of a [rows, cols] matrix, in a layout that
tensor cores read ([Note: GEMM layouts], `ops/gemm_layout.py`), or compact: a `Storage`, which is
sharded, gathered and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .formats import ROWWISE, Direction, Encoding, Format, ceil_div, round_up
from .ops import dispatch, layout, opaque, reference
from .ops.capability import arch_of
from .ops.dispatch import Encoded
from .ops.gemm_layout import compact_scale, has_scales_by_row, scale_counts
from .ops.layout import (
    ANCHORED,
    ANCHORED_TENSOR,
    ANCHORED_TILE,
    ANCHORS,
    COMPACT,
    LAID_OUT,
    NATIVE,
    SPREAD,
    TILE_ROWS,
    operand_format,
)

BUFFERS = ("data", "scale", "tensor_amax")
_Matrix = TypeVar("_Matrix", bound="EncodedMatrix")


class StaleWeightError(RuntimeError):
    """A GEMM would read codes that were freed, or encoded from a master that has changed since.

    >>> model, x = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8"), torch.ones(2, 64)
    >>> with fq.hold(model), torch.no_grad():
    ...     y = model(x)
    ...     model[0].weight.add_(1.0)
    ...     y = model(x)
    Traceback (most recent call last):
    fsdp_quant.encoded_matrix.StaleWeightError: ...
    """


@dataclass(frozen=True, eq=False)
class EncodedMatrix:
    """Codes and scales of one direction of a [rows, cols] matrix. FSDP2 frees and fills the memory
    of gathered ones: code that reads it calls `readable` first.

    data, scale:  in the order of `layout`; `Storage` gives the shapes of compact ones.
    tensor_amax:  fp32 [1], of the whole tensor, for two-level formats; with scale_per="row"
                  [outer], of each row of the operand.
    dtype:        what `dequantize()` returns by default.
    row0:         global index of the first row: the block grid is the global tensor's.
    layout:       `ops.layout.NATIVE`, SPREAD, or one of ANCHORS, whose codes were rounded a second
                  time; "compact" of a `Storage`.
    """

    fmt: Format
    direction: Direction
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    dtype: torch.dtype
    row0: int = 0
    layout: str = COMPACT

    @classmethod
    def of(
        cls: type[_Matrix],
        encoded: Encoded,
        encoding: Encoding,
        shape: Sequence[int],
        dtype: torch.dtype,
        row0: int = 0,
    ) -> _Matrix:
        """The matrix over freshly encoded buffers."""
        fmt, (rows, cols), (data, scale, tensor_amax, _, layout) = encoding.fmt, shape, encoded
        tensor_amax = tensor_amax if has_tensor_amax(fmt, layout) else None
        direction = encoding.direction
        return cls(fmt, direction, (rows, cols), data, scale, tensor_amax, dtype, row0, layout)

    @classmethod
    def over(
        cls: type[_Matrix],
        buffers: Sequence[Tensor],
        fmt: Format,
        direction: Direction,
        shape: tuple[int, int],
        dtype: torch.dtype,
        layout: str = COMPACT,
    ) -> _Matrix:
        """The matrix whose `buffers()` have these values."""
        data, *rest = buffers
        tensor_amax = rest.pop() if has_tensor_amax(fmt, layout) else None
        scale = rest[0] if rest else None
        return cls(fmt, direction, shape, data, scale, tensor_amax, dtype, 0, layout)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that exist, by field name."""
        return {name: t for name in BUFFERS if (t := getattr(self, name)) is not None}

    def with_buffers(
        self: _Matrix, buffers: Mapping[str, Tensor | None], **changes: object
    ) -> _Matrix:
        """The same matrix over other buffers (views are kept, nothing is copied)."""
        return replace(self, **buffers, **changes)

    def map(self: _Matrix, fn: Callable[[Tensor], Tensor]) -> _Matrix:
        """The same matrix with fn applied to every buffer."""
        return self.with_buffers({name: fn(t) for name, t in self.readable().buffers().items()})

    @property
    def scales(self) -> Tensor:
        """`scale`. Raises ValueError for a matrix without scales."""
        if self.scale is None:
            raise ValueError(f"{self.describe()} has no scales")
        return self.scale

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.fmt.padded_shape(self.shape, self.direction)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers().values())

    @property
    def geometry(self) -> tuple:
        """Two matrices of equal geometry have equal dtypes and shapes of all buffers."""
        return self.fmt, self.direction, self.shape, self.row0, self.layout, self.dtype

    @property
    def is_freed(self) -> bool:
        """The memory of the codes was freed (FSDP resharded) and must not be read."""
        return self.data.untyped_storage().size() == 0 and self.data.numel() > 0

    @opaque.traced_as(lambda matrix, name="": matrix)
    def readable(self: _Matrix, name: str = "") -> _Matrix:
        """The matrix, for whoever reads its memory now; a graph reads it when it runs.

        Raises StaleWeightError if the memory was freed. name: of the weight.
        """
        if self.is_freed:
            raise StaleWeightError(
                f"{name or self.describe()}: the {self.direction.value} codes were freed: FSDP "
                "resharded the weight or gathered the other direction only; if this block is "
                "recomputed in a way that hooks cannot see, or reads the other direction in its "
                "forward, set recomputes_forward=True on its fq.Linear; and let no forward in "
                "another fq.autocast begin before the backward"
            )
        return self

    @property
    def operand_format(self) -> Format:
        """The meaning of codes and scales as the operand of a GEMM."""
        return operand_format(self.fmt, self.layout)

    @property
    def decodes_exactly_to_bf16(self) -> bool:
        if self.fmt.is_quantized:
            return self.fmt.decodes_exactly_to_bf16
        return self.dtype is torch.bfloat16

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Element times every scale [rows, cols] in fp32 (identity: its own dtype), rounded once to
        `dtype`.

        A rotated matrix stays rotated.
        """
        if self.layout not in ANCHORS:
            return self._decoded(*self.compact_buffers(), self.tensor_amax, dtype)
        (outer, cols), scale = self.readable().data.shape, self.scales
        if self.layout in (ANCHORED_TENSOR, ANCHORED):
            scale = scale.view(-1, 1)
        elif self.layout == ANCHORED_TILE:
            tiles = ceil_div(cols, TILE_ROWS)
            scale = scale.view(-1, round_up(tiles, 4))[:, :tiles].contiguous()
        else:
            scale = scale.view(-1, round_up(outer, 4))[:, :outer].t().contiguous()
        values = dispatch.decode(
            self.data, scale, self.tensor_amax, self.operand_format, ROWWISE, cols, 0, dtype
        )
        return values if self.direction is ROWWISE else values.t()

    def _decoded(
        self,
        data: Tensor,
        scale: Tensor | None,
        tensor_amax: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Values of compact codes of this matrix, with the scales that are not None."""
        fmt, (_, cols) = self.readable().fmt, self.padded_shape
        return dispatch.decode(
            data, scale, tensor_amax, fmt, self.direction, cols, self.row0, dtype
        )

    def compact_buffers(self, arch: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Compact codes and scales; of an exact GEMM layout, those that it was derived from.

        arch: of the GPU whose layout this is; None: the device of the codes.
        """
        data, scale, fmt, (rows, cols) = self.data, self.scale, self.fmt, self.padded_shape
        if self.layout == COMPACT:
            return data, scale
        is_rowwise, data = self.direction is ROWWISE, self.readable().data
        if not is_rowwise:
            data = dispatch.transpose_codes(data, cols, rows, fmt)
        if scale is None:
            return data, None
        outer, contraction = (rows, cols) if is_rowwise else (cols, rows)
        if self.layout == SPREAD:
            exponents = layout.scales_before_spread(scale, fmt, outer, contraction)
            scale = reference.power_of_two(exponents)
        else:
            scale = compact_scale(scale, fmt, outer, contraction, arch or arch_of(data.device))
        scale = scale if is_rowwise else scale.t()
        return data, scale.clone(memory_format=torch.contiguous_format)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The logical values [rows, cols] in `dtype` (default: the matrix's), rotated back if they
        were rotated."""
        dtype = dtype or self.dtype
        if not self.fmt.rotated:
            return self.decode(dtype)
        values = reference.rotate(self.decode(), self.direction, inverse=True)
        return values[: self.shape[0], : self.shape[1]].to(dtype)

    def operand(self) -> Tensor:
        """Decoded values [outer, contraction] as a GEMM reads them: fp32 (identity: its dtype)."""
        values = self.decode()
        return values if self.direction is ROWWISE else values.t()

    def operand_rows(self: _Matrix, start: int, length: int) -> _Matrix | None:
        """Rows [start, start + length) of a rowwise operand; None if others share a scale."""
        scale, dim = self.scale, 0
        if self.direction is not ROWWISE or (self.fmt.block[0] or 1) > 1:
            return None
        if self.layout in LAID_OUT and not self.fmt.scale_leaves_contraction:
            if not has_scales_by_row(self.fmt, self.layout) or length % 4:
                return None
            scale, dim = self.scales.view(-1, round_up(self.shape[0], 4)), 1
        if scale is not None and scale.numel() > 1:
            scale = scale.narrow(dim, start, length).contiguous()
        shape, data = (length, self.shape[1]), self.data.narrow(0, start, length)
        rows = replace(self, shape=shape, data=data, scale=scale)
        if self.tensor_amax is None or not self.has_scale_per_row:
            return rows
        return replace(rows, tensor_amax=self.tensor_amax.narrow(0, start, length))

    @property
    def has_scale_per_row(self) -> bool:
        """`tensor_amax` has one amax for each row of the [rows, cols] matrix."""
        return self.fmt.has_row_scales and self.direction is ROWWISE

    def check(self) -> None:
        """Raise ValueError for buffers that do not fit format, shape and layout."""
        expected, buffers = self.expected_buffers(), self.buffers()
        if has_tensor_amax(self.fmt, self.layout):
            shape = self.fmt.tensor_scale_shape(self.shape, self.direction)
            expected["tensor_amax"] = {torch.float32}, {shape}
        for name in {**expected, **buffers}:
            dtypes, shapes = expected.get(name, ((), ()))
            buffer, shape = buffers.get(name), None
            if buffer is not None:
                is_flat = name == "scale" and self.layout != COMPACT
                shape = (buffer.numel(),) if is_flat else tuple(buffer.shape)
            if buffer is None or buffer.dtype not in dtypes or shape not in shapes:
                actual = "missing" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
                want = " or ".join(f"{d} {list(s)}" for d in dtypes for s in shapes) or "none"
                raise ValueError(
                    f"{name} of {self.describe()} is {actual}, wanted {want}: the file is damaged, "
                    "or of other facts"
                )

    def expected_buffers(self) -> dict[str, tuple[set[torch.dtype], set[tuple[int, ...]]]]:
        """Dtypes and shapes that codes and scales may have; of a GEMM layout, scales are
        counted."""
        outer, contraction = (
            self.padded_shape if self.direction is ROWWISE else self.padded_shape[::-1]
        )
        stored = self.operand_format if self.layout != NATIVE else self.fmt
        expected: dict[str, tuple[set, set]] = {
            "data": ({torch.uint8}, {(outer, stored.row_bytes(contraction, self.dtype))})
        }
        if stored.has_scales:
            counts = {(n,) for n in scale_counts(self.fmt, self.layout, outer, contraction)}
            expected["scale"] = {stored.scale_dtype}, counts
        return expected

    def describe(self) -> str:
        return f"{self.direction.value} {self.fmt} {list(self.shape)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()}, {self.nbytes} bytes)"

    def facts(self) -> dict:
        """The meaning of the buffers in JSON's types, which `rebuild_storage` accepts."""
        fields = self.fmt.facts()
        return {
            "format": fields.pop("name"),
            **fields,
            "direction": self.direction.value,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def has_tensor_amax(fmt: Format, layout: str) -> bool:
    """A matrix of this format and layout has a tensor amax; the scale of an anchored tensor
    contains it."""
    return fmt.tensor_scale and layout != ANCHORED_TENSOR

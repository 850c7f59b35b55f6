# SPDX-License-Identifier: Apache-2.0
"""`GemmOperand`: codes and scales in a layout that tensor cores read ([Note: GEMM layouts],
`ops/gemm_layout.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .encoded_matrix import EncodedMatrix, has_tensor_amax
from .formats import ROWWISE, ceil_div, round_up
from .ops import dispatch, layout, reference
from .ops.capability import arch_of
from .ops.gemm_layout import compact_scale, has_scales_by_row, scale_counts
from .ops.layout import (
    ANCHORED,
    ANCHORED_TENSOR,
    ANCHORED_TILE,
    LAID_OUT,
    NATIVE,
    SPREAD,
    TILE_ROWS,
)


@dataclass(frozen=True, eq=False, repr=False)
class GemmOperand(EncodedMatrix):
    """Codes and scales of one direction of a whole matrix, as a GEMM reads them.

    layout:  `ops.layout.NATIVE`, SPREAD, or one of ANCHORS, whose codes were rounded a second time.
    """

    layout: str = NATIVE

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        if self.layout in LAID_OUT:
            return self._decoded(*self.compact_buffers(), self.tensor_amax, dtype)
        outer, scale = self.readable().data.shape[0], self.scales
        if self.layout in (ANCHORED_TENSOR, ANCHORED):
            scale = scale.view(-1, 1)
        elif self.layout == ANCHORED_TILE:
            tiles = ceil_div(self.data.shape[1], TILE_ROWS)
            scale = scale.view(-1, round_up(tiles, 4))[:, :tiles].contiguous()
        else:
            scale = scale.view(-1, round_up(outer, 4))[:, :outer].t().contiguous()
        fmt, cols = self.operand_format, self.data.shape[1]
        values = dispatch.decode(self.data, scale, self.tensor_amax, fmt, ROWWISE, cols, 0, dtype)
        return values if self.direction is ROWWISE else values.t()

    def operand_rows(self, start: int, length: int) -> GemmOperand | None:
        if self.layout not in LAID_OUT or self.fmt.scale_leaves_contraction:
            return super().operand_rows(start, length)
        is_1x128 = has_scales_by_row(self.fmt, self.layout)
        if self.direction is not ROWWISE or not is_1x128 or length % 4:
            return None
        scale = self.scales.view(-1, round_up(self.shape[0], 4))
        return self._operand_rows(start, length, scale, dim=1)

    def compact_buffers(self, arch: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of the compact storage that a NATIVE or SPREAD operand was derived from.

        arch: of the GPU whose layout this is; None: the device of the codes.
        """
        fmt, rowwise, (rows, cols) = self.fmt, self.direction is ROWWISE, self.padded_shape
        data, scale = self.readable().data, self.scale
        if not rowwise:
            data = dispatch.transpose_codes(data, cols, rows, fmt)
        if scale is None:
            return data, None
        outer, contraction = (rows, cols) if rowwise else (cols, rows)
        if self.layout == SPREAD:
            exponents = layout.scales_before_spread(scale, fmt, outer, contraction)
            scale = reference.power_of_two(exponents)
        else:
            scale = compact_scale(scale, fmt, outer, contraction, arch or arch_of(data.device))
        return data, (scale if rowwise else scale.t()).clone(memory_format=torch.contiguous_format)

    def expected_buffers(self) -> dict[str, tuple[set[torch.dtype], set[tuple[int, ...]]]]:
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
        if has_tensor_amax(self.fmt, self.layout):
            expected["tensor_amax"] = {torch.float32}, {(1,)}
        return expected

    def compared_shape(self, name: str, buffer: Tensor) -> tuple[int, ...]:
        return (prod(buffer.shape),) if name == "scale" else tuple(buffer.shape)

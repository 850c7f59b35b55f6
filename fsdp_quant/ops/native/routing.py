# SPDX-License-Identifier: Apache-2.0
"""Launch the kernels of `ops.routing`. Mirrors csrc/api/combine.cpp and rows.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .norms import contiguous_aligned

_ops = torch.ops.fsdp_quant


def combine(rows: Tensor, back: Tensor, weights: Tensor | None) -> Tensor:
    return _ops.combine(*map(contiguous_aligned, (rows, back, weights)))


def combine_backward(
    dout: Tensor, rows: Tensor | None, back: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return drows, and dweights, which is None without rows."""
    drows, dweights = _ops.combine_backward(*map(contiguous_aligned, (dout, rows, back, weights)))
    return drows, None if rows is None else dweights


def pack_rows(buffers: Sequence[Tensor], index: Tensor | None) -> Tensor:
    return _ops.pack_rows(buffers, index)


def unpack_rows(packed: Tensor, index: Tensor | None, like: Sequence[Tensor]) -> list[Tensor]:
    return _ops.unpack_rows(packed, index, like)


def piece_orders(ends: Tensor, shifts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return _ops.piece_orders(ends, shifts, rows)

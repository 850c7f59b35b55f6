# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens on their way to experts and back, and what experts made of the copies of each
token: the definition in PyTorch, or the compiled kernel if there is one for the tensors.

    combine            out[t] = sum over j of weights[t, j] * rows[back[t, j]]
    combine_backward   drows[back[t, j]] = weights[t, j] * dout[t]
                       dweights[t, j]    = sum over columns of rows[back[t, j]] * dout[t]

    rows, drows        [T * k, N], sorted by expert
    back               int64 [T, k]: each row once
    weights, dweights  [T, k], or None for 1

Both compute in fp32 (in fp64 of fp64) and round once. `combine` adds in the order of j, on every
device: bits do not depend on where a row is. Sums over columns are those of torch, or of a kernel
in an order of its own, which is the same in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import native, opaque
from .layout import row_bytes, rows_of_bytes


def _has_kernel(values: Tensor, weights: Tensor | None) -> bool:
    fits = values.dtype is torch.bfloat16 and values.shape[-1] % 8 == 0 and values.numel() > 0
    fits &= weights is None or weights.dtype in (torch.bfloat16, torch.float32)
    return fits and native.is_available_for(values)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def combine(rows: Tensor, back: Tensor, weights: Tensor | None) -> Tensor:
    """[T, N], in the dtype of the rows."""
    if _has_kernel(rows, weights):
        return native.combine(rows, back, weights)
    return reference_combine(rows, back, weights)


@opaque.operator(
    "reference_combine(Tensor rows, Tensor back, Tensor? weights) -> Tensor",
    lambda rows, back, weights: rows.new_empty(back.shape[0], rows.shape[1]),
)
def reference_combine(rows: Tensor, back: Tensor, weights: Tensor | None) -> Tensor:
    def term(j: int) -> Tensor:
        values = _wide(rows.index_select(0, back[:, j]))
        return values if weights is None else values * weights[:, j, None].to(values.dtype)

    return functools.reduce(torch.add, map(term, range(back.shape[1]))).to(rows.dtype)


def combine_backward(
    dout: Tensor, rows: Tensor | None, back: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(drows in the dtype of dout; dweights in that of the weights, None without rows)."""
    if _has_kernel(dout, weights):
        return native.combine_backward(dout, rows, back, weights)
    return reference_combine_backward(dout, rows, back, weights)


@opaque.operator(
    "reference_combine_backward(Tensor dout, Tensor? rows, Tensor back, Tensor? weights) -> "
    "Tensor[]",
    lambda dout, rows, back, weights: [
        dout.new_empty(back.numel(), dout.shape[1]),
        *([] if rows is None else [weights.new_empty(back.shape)]),
    ],
    results=2,
)
def reference_combine_backward(
    dout: Tensor, rows: Tensor | None, back: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    d, drows = _wide(dout), dout.new_empty(back.numel(), dout.shape[1])
    for j, places in enumerate(back.unbind(1)):
        values = d if weights is None else d * weights[:, j, None].to(d.dtype)
        drows.index_copy_(0, places, values.to(drows.dtype))
    if rows is None or weights is None:
        return drows, None
    dots = [(rows.index_select(0, places).to(d.dtype) * d).sum(1) for places in back.unbind(1)]
    return drows, torch.stack(dots, 1).to(weights.dtype)


# Rows between ranks #


def pack_rows(buffers: Sequence[Tensor], index: Tensor | None = None) -> Tensor:
    """Return rows of buffers [M, ..] side by side, uint8 [rows, bytes]; index: which, int64 [rows];
    None: all, of one buffer as a view."""
    is_one = len(buffers) == 1
    if native.is_available_for(buffers[0]) and not (is_one and index is None):
        return native.pack_rows(buffers, index)
    packed = rows_of_bytes(buffers[0]) if is_one else torch.cat([*map(rows_of_bytes, buffers)], 1)
    return packed if index is None else packed.index_select(0, index)


def unpack_rows(packed: Tensor, index: Tensor | None, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the buffers of packed rows, or of those of `index`; like: of the same rows' bytes."""
    is_one = len(like) == 1
    if native.is_available_for(packed) and not (is_one and index is None):
        return native.unpack_rows(packed, index, like)
    packed = packed if index is None else packed.index_select(0, index)
    parts = [packed]
    if not is_one:  # a slice of one row is contiguous, and begins at any byte
        slices = packed.split([*map(row_bytes, like)], 1)
        parts = [t.clone(memory_format=torch.contiguous_format) for t in slices]
    return [t.view(b.dtype).view(-1, *b.shape[1:]) for t, b in zip(parts, like)]


def piece_orders(ends: Tensor, shifts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return where rows go that move in pieces, int64 [rows], and the order back: row r of the
    piece before `ends` [pieces], which do not decrease, is row r + `shifts` of it."""
    if native.is_available_for(ends):
        return native.piece_orders(ends, shifts, rows)
    places = torch.arange(rows, dtype=torch.int64, device=ends.device)
    order = places + shifts.index_select(0, torch.searchsorted(ends, places, right=True))
    return order, torch.empty_like(order).index_copy_(0, order, places)

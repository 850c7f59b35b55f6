# SPDX-License-Identifier: Apache-2.0
"""Launch norms and activations (`ops.norm`). Mirrors csrc/api/norm.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import ceil_div, round_up
from .. import opaque

_ops = torch.ops.fsdp_quant


WIDEST_NORM = 16384


@opaque.traced_as(lambda x: x.storage_offset() * x.element_size())
def _begins_at(x: Tensor) -> int | torch.SymInt:
    """Return the address of the first byte. While a graph is traced, return the offset in the
    storage, which allocators align."""
    return x.data_ptr()


def _aligned(x: Tensor | None) -> Tensor | None:
    """Return x [.., cols] with rows at equal strides, each aligned to 16 bytes; a copy if needed.

    Operators return tensors of x's shape. They are no views, so callers can write them in place.
    """
    if x is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1 or rows.stride(0) * rows.element_size() % 16 or _begins_at(rows) % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows if x.dim() == 2 else rows.view(x.shape)


def contiguous_aligned(x: Tensor | None) -> Tensor | None:
    """Return x [cols], contiguous and aligned to 16 bytes; a copy if needed. x may be a slice of a
    larger buffer."""
    if x is None or (x.is_contiguous() and _begins_at(x) % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def new_amaxes(like: Tensor, rows: int, cols: int, count: int) -> Tensor:
    """Allocate fp32 [count, n] for the amaxes of `count` tensors [rows, cols]: of the tensor, of
    each row, and of each column per 512 rows.

    These three begin at 0, 4, and 4 + rows rounded up to 4 (`AmaxLayout` of csrc/norm/norm.h).
    """
    return like.new_empty(
        (count, 4 + round_up(rows, 4) + ceil_div(rows, 512) * cols), dtype=torch.float32
    )


def amaxes_like(x: Tensor, count: int) -> Tensor:
    return new_amaxes(x, x.numel() // x.shape[-1], x.shape[-1], count)


def activation(g: Tensor, u: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """Return h, and its amaxes (`amaxes_like`)."""
    h, amaxes = _ops.activation(_aligned(g), _aligned(u), kind)
    return h, amaxes[0]


def activate(
    g: Tensor,
    u: Tensor | None,
    kind: int,
    grad_amaxes: Tensor | None = None,
    unmaterialized: bool = False,
    packed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return h with its autograd node, and its amaxes (`amaxes_like`, of one tensor). For eager
    mode only.

    grad_amaxes:     buffer into which the backward writes the amaxes of the gradients.
    unmaterialized:  return h with a shape but without values or amaxes.
    packed:          g [.., 2 F] holds g and u, and its gradient holds dg and du; u is None.
    """
    h, amaxes = _ops.activate(g, u, kind, grad_amaxes, unmaterialized, packed)
    return h, None if unmaterialized else amaxes


def activation_backward(
    dh: Tensor, g: Tensor, u: Tensor | None, kind: int
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return dg, du, and the amaxes of each."""
    dg, du, amaxes = _ops.activation_backward(_aligned(dh), _aligned(g), _aligned(u), kind)
    return dg, None if u is None else du, amaxes.unbind()


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *spec: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, rstd, mean, and the amax of y. spec: the fields of `ops.norm.NormSpec`."""
    y, amax, rstd, mean = _ops.norm(
        _aligned(x.contiguous()), contiguous_aligned(weight), contiguous_aligned(bias), *spec
    )
    return y, rstd, mean, amax


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    zero_centered: bool,
    rounds_first: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return dx, dweight, dbias, and the amax of dx."""
    dy_rows, x_rows, residual_rows = (
        None if t is None else _aligned(t.contiguous()) for t in (dy, x, residual)
    )
    dx, amax, dweight, dbias = _ops.norm_backward(
        dy_rows,
        x_rows,
        contiguous_aligned(weight),
        residual_rows,
        rstd,
        mean,
        zero_centered,
        rounds_first,
        has_bias,
    )
    return dx, dweight, dbias if has_bias else None, amax

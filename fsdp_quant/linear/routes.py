# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back, with their autograd: one kernel each where one runs.

    dispatch   rows[r] = x[tokens_of(order, back)[r]]             saves `back`
    combine    y[t] = sum over j of weights[t, j] * rows[back[t, j]]
               saves `back`, weights, and the rows where the weights have a gradient

Routes are a pair of int64 tensors: `order` [T * k] sorts the copies of all tokens by expert, and
`back` [T, k] says where each copy is. The backward of `dispatch` is the sum of `combine`, without
weights. A product that reads tokens by their routes (`grouped.reads_routes`) needs no `dispatch`,
and one that reads gradients by them (`grouped.reads_combined`) no `combine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import routing
from ..tensor import torch_compat
from .autograd import REFUSED

Routes = Sequence[Tensor]  # empty: x has the rows


class Around(NamedTuple):
    """What packed experts compute around a product.

    swiglu:    True: the rows that the next product multiplies, h = silu(g) * u of [g, u] = y, come
               with y. A tensor: [g, u], of which x is h, without values.
    combined:  (order, back, weights): y is `combine` of the rows; empty: y is the rows.
    """

    swiglu: Tensor | bool = False
    combined: Sequence[Tensor] = ()


ALONE = Around()


def tokens_of(order: Tensor, back: Tensor) -> Tensor:
    """Return the token of each row."""
    return order // back.shape[1]


def sum_of_copies(rows: Tensor, back: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [T, N], the sum of each token's rows, times weights."""
    with torch_compat.tracing_if_watched():
        return routing.combine(rows, back, weights)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back)
        return x.index_select(0, tokens_of(order, back))

    @staticmethod
    def backward(ctx, drows):
        tensors = drows, *ctx.saved_tensors
        return torch_compat.once_differentiable(sum_of_copies, REFUSED, *tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, back, weights):
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, back, weights)
        return sum_of_copies(rows, back, weights)

    @staticmethod
    def backward(ctx, dy):
        def of_each(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch_compat.tracing_if_watched():
                return routing.combine_backward(*tensors)

        tensors = dy, *ctx.saved_tensors
        drows, dweights = torch_compat.once_differentiable(of_each, REFUSED, *tensors)
        return drows, None, dweights


@torch.compiler.allow_in_graph
def dispatch(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows [T * k, N] of x [T, N], sorted by expert."""
    return _Dispatch.apply(x, order, back)


@torch.compiler.allow_in_graph
def combine(rows: Tensor, back: Tensor, weights: Tensor) -> Tensor:
    """y [T, N] of rows [T * k, N], in their dtype; weights: [T, k]."""
    return _Combine.apply(rows, back, weights)

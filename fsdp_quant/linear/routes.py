# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back, with their autograd: one kernel each where one runs.

    dispatch   rows[r] = x[tokens_of(order, back)[r]]             saves `back`
    combine    y[t] = sum over j of weights[t, j] * rows[back[t, j]], weights: None for 1
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

from ..ops import opaque, routing
from ..tensor import torch_compat
from .autograd import REFUSED

Routes = Sequence[Tensor]  # empty: x has the rows


class Around(NamedTuple):
    """What packed experts compute around a product.

    swiglu:   True: the rows that the next product multiplies come with y: h = silu(g) * u of
              [g, u] = y, times the weights of their routes. Tensors: [g, u] and these weights,
              fp32 [M], of which x is h, without values.
    routes:   `order` and `back` of the rows of y. Without swiglu=True y is `combine` of the rows.
              Empty: y is the rows.
    weights:  of the routes [T, k]; None: 1.
    """

    swiglu: Sequence[Tensor] | bool = False
    routes: Routes = ()
    weights: Tensor | None = None


ALONE = Around()


def sorted_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Routes]:
    """Return the row after the last of each expert, int32 [E], and the routes, of the experts of
    each token [T, k]. Indices that no expert has sort last."""
    # 16 bits take a quarter of the passes of 64
    most, keys = torch.iinfo(chosen.dtype).max, torch.int16 if experts < 2**15 else torch.int32
    numbers = chosen.reshape(-1).bitwise_and(most).clamp_max(min(experts, most))
    numbers, order = numbers.to(keys).sort(stable=True)
    each = torch.arange(experts, dtype=keys, device=numbers.device)
    ends = torch.searchsorted(numbers, each, right=True).int()
    places = torch.arange(len(order), dtype=torch.int64, device=order.device)
    back = torch.empty_like(order).index_copy(0, order, places).view(-1, chosen.shape[-1])
    return ends, (order, back)


def tokens_of(order: Tensor, back: Tensor) -> Tensor:
    """Return the token of each row."""
    return order // back.shape[1]


def wrong_routes(tokens: int, routes: Routes, weights: Tensor | None = None) -> str | None:
    """Return what is wrong with routes of so many tokens or their weights; None: nothing."""
    if not len(routes):
        return None if weights is None else "weights= of no routes; give routes=(order, back) too"
    return _wrong_shapes(tokens, routes, weights)


@opaque.eager_only  # graphs may have sizes that nobody knows
def _wrong_shapes(tokens: int, routes: Routes, weights: Tensor | None) -> str | None:
    routes = [routes] if isinstance(routes, Tensor) else [*routes]
    operands = [*routes, *([] if weights is None else [weights])]
    shapes, last = [[*t.shape] for t in operands], operands[-1]
    k = last.shape[1] if last.dim() == 2 else 0
    fits = shapes == [[tokens * k], [tokens, k], [tokens, k]][: len(operands)]
    if len(routes) == 2 and fits and all(t.dtype is torch.int64 for t in routes):
        return None
    return (
        f"routes are {[t.dtype for t in routes]} {shapes[: len(routes)]}, weights "
        f"{shapes[len(routes) :]}, of {tokens} tokens; wanted order [T * k] and back [T, k], both "
        "int64, and weights [T, k] or None"
    )


def check_routes(name: str, tokens: int, routes: Routes, weights: Tensor | None = None) -> None:
    """Raise ValueError for routes of other tokens, or weights of other routes."""
    wrong = wrong_routes(tokens, routes, weights)
    if wrong is not None:
        raise ValueError(f"{name}: {wrong}")


def shares_of(weights: Tensor, order: Tensor) -> Tensor:
    """Return the weight of each row, fp32 [T * k], of the weights of routes [T, k]."""
    return weights.reshape(-1).index_select(0, order).float()


def sum_of_copies(rows: Tensor, back: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [T, N], the sum of each token's rows, times weights."""
    with torch_compat.tracing_if_watched():
        return routing.combine(rows, back, weights)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(x, order, back):
        return x.index_select(0, tokens_of(order, back))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, drows):
        tensors = drows, *ctx.saved_tensors
        return torch_compat.once_differentiable(sum_of_copies, REFUSED, *tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(rows, back, weights):
        return sum_of_copies(rows, back, weights)

    @staticmethod
    def setup_context(ctx, inputs, output):
        rows, back, weights = inputs
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, back, weights)

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
    return torch_compat.applied(_Dispatch, x, order, back)


@torch.compiler.allow_in_graph
def combine(rows: Tensor, back: Tensor, weights: Tensor | None) -> Tensor:
    """y [T, N] of rows [T * k, N], in their dtype; weights: [T, k]."""
    return torch_compat.applied(_Combine, rows, back, weights)

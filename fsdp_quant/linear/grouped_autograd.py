# SPDX-License-Identifier: Apache-2.0
"""The autograd of all experts, and of what packed experts compute around a product
(`routes.Around`).

SwiGLU between two layers, h = silu(g) * u with [g, u] = y of the first, times the weight of each
row's route, is computed where it is quantized (`fuses_swiglu`): h, between their nodes, has a shape
and a gradient but no values. The first layer's node returns the gradient of the weights.

The sum over a token's experts is part of the last layer's node (`reads_combined`), whose backward
quantizes rows of the tokens' gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import norm
from ..tensor import torch_compat
from .autograd import Differentiable, Gradients, Program, differentiated
from .grouped import fuses_swiglu, reads_combined
from .plan import GemmPlan
from .routes import Around, Routes, combine, shares_of, sum_of_copies, tokens_of
from .stacked_weights import StackedWeight


def experts(
    forward: Callable[..., tuple[Tensor, list[Tensor], StackedWeight | None]],
    backward: Callable[..., Gradients],
    ends: Tensor,
    routes: Routes = (),
    swiglu: Sequence[Tensor] | bool = False,
) -> Callable[..., Any]:
    """Return the program of all experts, whose backward takes arguments of `backward` besides.

    forward, backward:  of `GroupedCall`, or of `grouped_ops.TracedCall`, in a graph being traced.
    ends:    the row after the last of each.
    routes:  by which `forward` reads x; empty: x has the rows that are multiplied.
    swiglu:  [g, u] and weights of the rows, if x is h (`routes.Around`).
    """
    places = list(routes[1:])
    rows, shares = (None, None) if isinstance(swiglu, bool) else swiglu

    def program(x, weights, biases, dgrad) -> Differentiable:
        given = ends, weights, biases, dgrad, shares
        y, saved, weight = forward(x if rows is None else rows, *given)
        is_x, read = [t is x for t in saved], None if weight is None else weight.read
        buffers = [t for t in saved if t is not x]

        def gradients(dy, x, buffers, weights, needs, *others) -> Gradients:
            back, remaining = buffers[: len(places)], iter(buffers[len(places) :])
            read_by_wgrad = [x if from_input else next(remaining) for from_input in is_x]
            stacked = None if read is None else StackedWeight([*remaining], read)
            dx, dw, db = backward(dy, read_by_wgrad, weights, stacked, needs, *others)
            return dx if dx is None or not back else sum_of_copies(dx, *back), dw, db

        buffers = [*places, *buffers, *([] if weight is None else weight.buffers)]
        return y, any(is_x), buffers, gradients

    return program


def gated(program: Callable[..., Any], routes: Routes) -> Program:
    """Return the program of `experts` that returns h in place of y, of the weights of routes in
    place of biases (none: 1); its node keeps [g, u] and the rows' weights last."""

    def of_h(x, weights, of_routes, dgrad) -> Differentiable:
        y, saves_x, buffers, of_y = program(x, weights, (), dgrad)
        if of_routes:
            shares, back = shares_of(of_routes[0], routes[0]), routes[1]
        else:
            shares, back = y.new_ones(y.shape[:1], dtype=torch.float32), None

        def gradients(dh, x, buffers, weights, needs) -> Gradients:
            # a node that refers to [g, u] would keep it while hooks offload it
            *buffers, back, gate_and_up, shares = buffers
            dx, dw, dshares = of_y(dh, x, buffers, weights, needs, None, (gate_and_up, shares))
            if dshares is not None:
                dshares = dshares.index_select(0, back.reshape(-1)).view(back.shape)
            return dx, dw, dshares

        # what is added to -0.0 stays as it is
        h = y.new_full((), -0.0).expand(y.shape[0], y.shape[1] // 2)
        return h, saves_x, [*buffers, back, y, shares], gradients

    return of_h


def summed(program: Callable[..., Any], order: Tensor, back: Tensor) -> Program:
    """Return the program of `experts` that returns the sum of each token's rows."""

    def of_tokens(*operands: Any) -> Differentiable:
        rows, saves_x, buffers, of_rows = program(*operands)

        def gradients(dy, x, buffers, weights, needs) -> Gradients:
            *buffers, order, back = buffers
            return of_rows(dy, x, buffers, weights, needs, tokens_of(order, back))

        return sum_of_copies(rows, back), saves_x, [*buffers, order, back], gradients

    return of_tokens


def run_experts(
    call: Any,
    plan: GemmPlan | None,
    x: Tensor,
    ends: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    routes: Routes,
    around: Around,
) -> Any:
    """Return y of `experts` with its node; with swiglu=True ([g, u] and the rows' weights, without
    gradients; h), or (y, None) where the caller computes h of y.

    call:    `GroupedCall`, or `grouped_ops.TracedCall`.
    plan:    of one product for all experts; None: there is none.
    """
    swiglu, of_rows, of_routes = around
    returns_h, slot = swiglu is True, "grad_output" if swiglu is True else "input"
    fuses = swiglu is not False and plan is not None and fuses_swiglu(plan, slot, x)
    if not (fuses or isinstance(swiglu, bool)):
        x, swiglu = with_values(x, *swiglu), False
    program = experts(call.forward, call.backward, ends, routes, swiglu)
    if returns_h and fuses and not biases:
        program, operands = gated(program, of_rows), [*weights]
        operands += [] if of_routes is None else [of_routes]
        h, *_, gate_and_up, shares = differentiated(program, x, len(weights), operands)
        return (gate_and_up, shares), h
    sums = bool(of_rows) and not returns_h
    if sums and of_routes is None and not biases and plan is not None and reads_combined(plan, x):
        program, sums = summed(program, *of_rows), False
    y = differentiated(program, x, len(weights), (*weights, *biases))[0]
    y = combine(y, of_rows[1], of_routes) if sums else y
    return (y, None) if returns_h else y


def with_values(h: Tensor, gate_and_up: Tensor, shares: Tensor) -> Tensor:
    """Return h, which is -0.0, with values and its gradient."""
    g, u = gate_and_up.chunk(2, -1)
    with torch_compat.tracing_if_watched():
        values = norm.activation(g, u, norm.ACTIVATIONS["swiglu"].kind)[0]
        return h + (values * shares[:, None]).to(h.dtype)

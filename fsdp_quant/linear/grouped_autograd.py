# SPDX-License-Identifier: Apache-2.0
"""The autograd of all experts, and of what packed experts compute around a product
(`routes.Around`).

SwiGLU between two layers, h = silu(g) * u with [g, u] = y of the first, is computed where it is
quantized (`fuses_swiglu`): h, between their nodes, has a shape and a gradient but no values.

The sum over a token's experts is part of the last layer's node (`reads_combined`), whose backward
quantizes rows of the tokens' gradient times their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import norm, routing
from ..tensor import torch_compat
from .autograd import Differentiable, Gradients, Program, differentiated
from .grouped import fuses_swiglu, reads_combined
from .plan import GemmPlan
from .routes import Around, Routes, combine, sum_of_copies, tokens_of
from .stacked_weights import StackedWeight


def experts(
    forward: Callable[..., tuple[Tensor, list[Tensor], StackedWeight | None]],
    backward: Callable[..., Gradients],
    ends: Tensor,
    routes: Routes = (),
    swiglu: Tensor | bool = False,
) -> Program:
    """Return the program of all experts.

    forward, backward:  of `GroupedCall`, or of `grouped_ops.TracedCall`, in a graph being traced.
    ends:    the row after the last of each.
    routes:  by which `forward` reads x; empty: x has the rows that are multiplied.
    swiglu:  True: the program returns h in place of y, which its node keeps last. A tensor:
             [g, u], of which x is h.
    """
    places = list(routes[1:])
    # a node that refers to [g, u] would keep it while hooks offload it, or a checkpoint drops it
    is_gated, returns_h = isinstance(swiglu, Tensor), swiglu is True

    def program(x, weights, biases, dgrad) -> Differentiable:
        rows = swiglu if is_gated else x
        y, saved, weight = forward(rows, ends, weights, biases, dgrad, is_gated)
        is_x, read = [t is x for t in saved], None if weight is None else weight.read
        buffers = [t for t in saved if t is not x]

        def gradients(dy, x, buffers, weights, needs, routed=()) -> Gradients:
            gate_and_up = buffers.pop() if returns_h else None
            back, remaining = buffers[: len(places)], iter(buffers[len(places) :])
            read_by_wgrad = [x if from_input else next(remaining) for from_input in is_x]
            stacked = None if read is None else StackedWeight([*remaining], read)
            state = stacked, needs, gate_and_up, routed
            dx, dw, db = backward(dy, read_by_wgrad, weights, *state)
            return dx if dx is None or not back else sum_of_copies(dx, *back), dw, db

        buffers = [*places, *buffers, *([] if weight is None else weight.buffers)]
        if returns_h:  # what is added to -0.0 stays as it is
            buffers, y = [*buffers, y], y.new_full((), -0.0).expand(y.shape[0], y.shape[1] // 2)
        return y, any(is_x), buffers, gradients

    return program


def summed(program: Callable[..., Any], order: Tensor, back: Tensor, keeps: list[bool]) -> Program:
    """Return the program of `experts` whose y is summed over each token's rows, of the weights of
    routes in place of biases. keeps: for gradients of the rows, and of these."""

    def of_tokens(x, weights, of_routes, dgrad) -> Differentiable:
        rows, saves_x, buffers, of_rows = program(x, weights, (), dgrad)
        tokens = tokens_of(order, back) if keeps[0] else None
        factors = of_routes[0].reshape(-1).index_select(0, order).float() if keeps[0] else None

        def gradients(dy, x, buffers, weights, needs) -> Gradients:
            *buffers, tokens, factors, back, rows = buffers
            dx = dw = d_routes = None
            if needs[2]:
                with torch_compat.tracing_if_watched():
                    d_routes = routing.weights_backward(dy, rows, back)
            if needs[0] or needs[1]:
                dx, dw, _ = of_rows(dy, x, buffers, weights, (*needs[:2], False), (tokens, factors))
            return dx, dw, d_routes

        kept = tokens, factors, back, rows if keeps[1] else None
        return sum_of_copies(rows, back, of_routes[0]), saves_x, [*buffers, *kept], gradients

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
    """Return y of `experts` with its node; with swiglu=True (y without a gradient, h), or (y, None)
    where the caller computes h of y.

    call:    `GroupedCall`, or `grouped_ops.TracedCall`.
    plan:    of one product for all experts; None: there is none.
    """
    swiglu, combined = around
    returns_h, slot = swiglu is True, "input" if isinstance(swiglu, Tensor) else "grad_output"
    fuses = swiglu is not False and plan is not None and fuses_swiglu(plan, slot, x)
    if isinstance(swiglu, Tensor) and not fuses:
        x, swiglu = with_values(x, swiglu), False
    elif returns_h and (biases or not fuses):
        swiglu = False
    program = experts(call.forward, call.backward, ends, routes, swiglu)
    if combined and not biases and plan is not None and reads_combined(plan, x, combined[2]):
        leaves = ((x, *weights), combined[2:]) if torch.is_grad_enabled() else ((), ())
        need = [any(t.requires_grad for t in of_one) for of_one in leaves]
        program = summed(program, combined[0], combined[1], need)
        biases, combined = combined[2:], ()
    y, *_, last = differentiated(program, x, len(weights), (*weights, *biases))
    y = combine(y, *combined[1:]) if combined else y
    return (last, y) if swiglu is True else (y, None) if returns_h else y


def with_values(h: Tensor, gate_and_up: Tensor) -> Tensor:
    """Return h, which is -0.0, with values and its gradient."""
    g, u = gate_and_up.chunk(2, -1)
    with torch_compat.tracing_if_watched():
        return h + norm.activation(g, u, norm.ACTIVATIONS["swiglu"].kind)[0]

# SPDX-License-Identifier: Apache-2.0
"""The one autograd function of linear layers, dense and of experts, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor import torch_compat

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# (dy, x if it was saved, buffers, weights, needs) -> dx, dw and db, stacked for several weights;
# None where `needs` (of x, weights, biases) says so. What it refers to lives as long as the node.
Backward = Callable[[Tensor, Tensor | None, list[Any], Sequence[Tensor], Sequence[bool]], Gradients]
# y; whether the backward reads x; the buffers that it reads besides; the backward
Differentiable = tuple[Tensor, bool, Sequence[Tensor | None], Backward]
# (x, weights, biases (none: empty), whether the backward computes dx)
Program = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], bool], Differentiable]

REFUSED = (
    "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the "
    "layers of a gradient penalty out of fq.convert"
)


class LinearFunction(torch.autograd.Function):
    """The autograd of a `Program`, of x, `count` weights, and biases."""

    @staticmethod
    def forward(x, program, count, dgrad, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        y, saves_x, buffers, backward = program(x, weights, biases, dgrad)
        return y, (saves_x, backward), *buffers

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        x, _, ctx.count, _, *parameters = inputs
        _, (saves_x, ctx.gradients), *buffers = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(b for b in buffers if b is not None))
        ctx.weights = parameters[: ctx.count]
        ctx.described = [(p.dtype, p.dim()) for p in parameters]
        ctx.save_for_backward(x if saves_x else None, *buffers)

    @staticmethod
    def backward(ctx, dy, *_):
        gradients, count, described = ctx.gradients, ctx.count, ctx.described
        need_x, _, _, _, *needs = ctx.needs_input_grad

        def of_each(dy: Tensor, x: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            needed = need_x, any(needs[:count]), any(needs[count:])
            dx, dw, db = gradients(dy, x, list(tensors[count:]), tensors[:count], needed)
            results = [dx]
            for i, (need, (dtype, dims)) in enumerate(zip(needs, described)):
                stacked, expert = (dw, i) if i < count else (db, i - count)
                if not need or stacked is None:  # not needed, or `Call.wgrad` took it
                    results.append(None)
                    continue
                stacked = stacked if stacked.dim() == dims else stacked[expert]
                results.append(stacked.to(dtype))
            return tuple(results)

        x, *buffers = ctx.saved_tensors
        tensors = dy, x, *ctx.weights, *buffers
        dx, *rest = torch_compat.once_differentiable(of_each, REFUSED, *tensors)
        return dx, None, None, None, *rest


def differentiated(program: Program, x: Tensor, count: int, parameters: Sequence) -> Sequence:
    """Return y of a program of x, `count` weights and biases, with its autograd node; then what the
    node keeps."""
    dgrad = torch.is_grad_enabled() and x.requires_grad
    return torch_compat.applied(LinearFunction, x, program, count, dgrad, *parameters)

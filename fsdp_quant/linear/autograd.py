# SPDX-License-Identifier: Apache-2.0
"""The one autograd function of linear layers, dense and of experts, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tensor import torch_compat

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# y; whether the backward reads x; the buffers that it reads besides; and the function that restores
# `saved` of `Program.backward` from x and them
Differentiable = tuple[Tensor, bool, list[Tensor], Callable[[Tensor | None, list[Tensor]], Any]]

REFUSED = (
    "fq.Linear has no second derivative: the backward multiplies quantized operands; leave the "
    "layers of a gradient penalty out of fq.convert"
)


class Program(Protocol):
    """What `LinearFunction` differentiates: `Dense`, or `grouped.Experts`."""

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dgrad: bool
    ) -> Differentiable:
        """Compute y. biases: empty: none. dgrad: the backward computes dx."""
        ...

    def backward(
        self, dy: Tensor, weights: Sequence[Tensor], saved: Any, needs: Sequence[bool]
    ) -> Gradients:
        """Return dx, dw and db, stacked for several weights; None where `needs` says so."""
        ...


class LinearFunction(torch.autograd.Function):
    """The autograd of a `Program`, of x, `count` weights, and biases."""

    @staticmethod
    def forward(x, program, count, dgrad, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        y, saves_x, buffers, restored = program.forward(x, weights, biases, dgrad)
        return y, (saves_x, restored), *buffers

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        x, ctx.program, ctx.count, _, *parameters = inputs
        _, (saves_x, ctx.restored), *buffers = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(b for b in buffers if b is not None))
        ctx.weights = parameters[: ctx.count]
        ctx.described = [(p.dtype, p.dim()) for p in parameters]
        ctx.save_for_backward(x if saves_x else None, *buffers)

    @staticmethod
    def backward(ctx, dy, *_):
        program, count, restored, described = ctx.program, ctx.count, ctx.restored, ctx.described
        need_x, _, _, _, *needs = ctx.needs_input_grad

        def gradients(dy: Tensor, x: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            saved = restored(x, list(tensors[count:]))
            needed = need_x, any(needs[:count]), any(needs[count:])
            dx, dw, db = program.backward(dy, tensors[:count], saved, needed)
            results = [dx]
            for i, (need, (dtype, dims)) in enumerate(zip(needs, described)):
                stacked, expert = (dw, i) if i < count else (db, i - count)
                if need and stacked.dim() != dims:
                    stacked = stacked[expert]
                results.append(stacked.to(dtype) if need else None)
            return tuple(results)

        x, *buffers = ctx.saved_tensors
        tensors = dy, x, *ctx.weights, *buffers
        dx, *rest = torch_compat.once_differentiable(gradients, REFUSED, *tensors)
        return dx, None, None, None, *rest


def differentiated(program: Program, x: Tensor, count: int, parameters: Sequence[Tensor]) -> Tensor:
    """Return y of a program of x, `count` weights and biases, with its autograd node."""
    dgrad = torch.is_grad_enabled() and x.requires_grad
    return LinearFunction.apply(x, program, count, dgrad, *parameters)[0]

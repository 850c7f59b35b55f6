# SPDX-License-Identifier: Apache-2.0
"""Norms and activations with their autograd, between the linear operators of a module.

    normalize   y = norm(x) * gamma + beta      saves x, gamma, rstd (and mean)
    activate    h = act(g), or act(g) * u       saves g and u, or the tensor whose halves they are;
                                                act(g) and h are computed again

Where kernels run, `native.activate` is the node of both: its backward writes the gradients of g and
u over them, where the graph is not kept and nobody else has their memory.

A kernel that writes a tensor that is quantized next gives its amaxes too: as a result, which a
fused module hands to the layer behind, or in the backward into memory that the module has handed to
both nodes. Compiled graphs get the operators that these nodes call while they are traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ops import native, norm, opaque
from ..ops.norm import NormSpec
from ..tensor import torch_compat


class _Normalize(torch.autograd.Function):
    """(y, x, amax of y or None): the second is x, whose gradient is added in the same pass."""

    @staticmethod
    def forward(ctx, x, weight, bias, spec):
        with torch_compat.tracing_if_watched():
            y, rstd, mean, amax = norm.norm(x, weight, bias, spec)
        ctx.save_for_backward(x, weight, bias, rstd, mean)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        if amax is not None:
            ctx.mark_non_differentiable(amax)
        return y, x, amax

    @staticmethod
    def backward(ctx, dy, residual, _):
        if dy is None:
            return residual, None, None, None
        x, weight, bias, rstd, mean = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this is wanted: that of the definition
            y, needs = norm.reference_norm(x, weight, bias, ctx.spec)[0], ctx.needs_input_grad[:3]
            inputs = [t for t, needed in zip((x, weight, bias), needs) if needed]
            grads = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
            dx, dweight, dbias = (next(grads) if needed else None for needed in needs)
            return dx if residual is None else residual + dx, dweight, dbias, None
        with torch_compat.tracing_if_watched():
            dx, dweight, dbias, _ = norm.norm_backward(
                dy, x, weight, bias, residual, rstd, mean, ctx.spec
            )
        return dx, dweight, dbias, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, u, kind, grad_amaxes):
        ctx.save_for_backward(g, u)
        ctx.kind, ctx.grad_amaxes = kind, grad_amaxes
        with torch_compat.tracing_if_watched():
            return norm.activation(g, u, kind)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        with torch_compat.tracing_if_watched():
            g, u = ctx.saved_tensors
            dg, du, amaxes = norm.activation_backward(dh, g, u, ctx.kind)
        # else no layer reads them either: see `activate`
        if ctx.grad_amaxes is not None and amaxes is not None:
            ctx.grad_amaxes.copy_(torch.stack(amaxes))
        return dg, du, None, None


@torch.compiler.allow_in_graph
def _traced_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *spec: Any) -> Tensor:
    return _Normalize.apply(x, weight, bias, NormSpec(*spec))[0]


@opaque.compiled_as(lambda x, weight, bias, spec: (_traced_norm(x, weight, bias, *spec), x, None))
def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, x, amax of y or None): use the second for x where both are used, as in x + f(y)."""
    if torch_compat.is_transformed():
        return norm.reference_norm(x, weight, bias, spec)[0], x, None
    return _Normalize.apply(x, weight, bias, spec)


def activate(
    g: Tensor, u: Tensor | None, kind: int, grad_amaxes: Tensor | None = None, packed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(act(g), or act(g) * u; its amaxes, or None where no kernel computes them).

    grad_amaxes:  fp32 [1 or 2, n] (`native.new_amaxes`): the backward writes the amaxes of the
                  gradients of g and u there, only if g comes from a compiled call.
    packed:       g [.., 2 F] is g and u, which is None; its gradient is one tensor, of which the
                  kernel writes both halves.
    """
    if packed and (
        g.shape[-1] % 16 or torch_compat.dispatch_is_watched() or not norm.runs_whole(kind, g)
    ):
        gate, up = g.chunk(2, -1)
        return _activation(gate, up, kind, None, False)
    return _activation(g, u, kind, grad_amaxes, packed)


@torch.compiler.allow_in_graph
def _traced_activation(g: Tensor, u: Tensor | None, kind: int) -> Tensor:
    return _Activate.apply(g, u, kind, None)


@opaque.compiled_as(lambda g, u, kind, *_: (_traced_activation(g, u, kind), None))
def _activation(
    g: Tensor, u: Tensor | None, kind: int, grad_amaxes: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor | None]:
    # torch's operators know placements, and what torch.func makes of them
    if isinstance(g, DTensor) or torch_compat.is_transformed():
        return norm.reference_activation(g, u, kind), None
    if not torch_compat.dispatch_is_watched() and norm.runs_whole(kind, g, u):
        return native.activate(g, u, kind, grad_amaxes, packed=packed)
    return _Activate.apply(g, u, kind, grad_amaxes), None

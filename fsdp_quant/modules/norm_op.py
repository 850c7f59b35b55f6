"""Norms and activations with their autograd: what stands between the linear operators of a fused module.

    normalize   y = norm(x) * gamma + beta      saves x, gamma, rstd (and mean)
    activate    h = act(g), or act(g) * u       saves g and u; act(g) and h are made again
    deferred    the same, without values: whoever reads h makes them

Where kernels run, `native.activate` is the node of both: its backward writes the gradients of g and u over them, where the
graph is not kept and nobody else has their memory.

A kernel that writes a tensor that is quantized next leaves the tensor's amaxes with it. Compiled graphs, and whatever looks
at operators, get the same as `graph_norm` and `graph_activation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import native, norm
from ..ops.norm import NormSpec
from ..tensor import torch_compat


def _leave_amax(x: Tensor, amax: Tensor | None) -> None:
    if amax is not None and not torch_compat.dispatch_is_watched():
        native.remember_amax(x, amax)


class _Normalize(torch.autograd.Function):
    """(y, x): the second output is x itself, whose gradient is added to that of y's in one pass."""

    @staticmethod
    def forward(ctx, x, weight, bias, spec):
        y, rstd, mean, amax = norm.norm(x, weight, bias, spec)
        _leave_amax(y, amax)
        ctx.save_for_backward(x, weight, bias, rstd, mean)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, residual):
        if dy is None:
            return residual, None, None, None
        x, weight, bias, rstd, mean = ctx.saved_tensors
        dx, dweight, dbias, amax = norm.norm_backward(dy, x, weight, bias, residual, rstd, mean, ctx.spec)
        _leave_amax(dx, amax)
        return dx, dweight, dbias, None


class _Activate(torch.autograd.Function):

    @staticmethod
    def forward(ctx, g, u, kind):
        ctx.save_for_backward(g, u)
        ctx.kind = kind
        return norm.activation(g, u, kind)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        return *norm.activation_backward(dh, *ctx.saved_tensors, ctx.kind)[:2], None


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """(y, x): use the second in the place of x where both are used, as in x + f(y)."""
    if torch.compiler.is_compiling() or torch_compat.dispatch_is_watched():
        return torch.ops.fsdp_quant.graph_norm(x, weight, bias, *spec)[0], x
    return _Normalize.apply(x, weight, bias, spec)


def activate(g: Tensor, u: Tensor | None, kind: int) -> Tensor:
    """act(g), or act(g) * u."""
    if torch.compiler.is_compiling() or torch_compat.dispatch_is_watched():
        return torch.ops.fsdp_quant.graph_activation(g, u, kind)
    return native.activate(g, u, kind) if norm.runs_whole(g, u) else _Activate.apply(g, u, kind)


def deferred(g: Tensor, u: Tensor, kind: int) -> Tensor:
    """`activate` of which only the shape and the gradient are wanted (`norm.runs_whole`): the values are made where they are
    quantized."""
    return native.activate(g, u, kind, deferred=True)


# What graphs hold #

_library = torch.library.Library("fsdp_quant", "FRAGMENT")


def _define(schema: str, run, fake) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_quant::{name}", fake, lib=_library)


def _graph_norm(x, weight, bias, *spec):
    return tuple(norm.norm(x, weight, bias, NormSpec(*spec))[:3])


def _fake_norm(x, weight, bias, eps, centred, zero_centered):
    rows = x.numel() // x.shape[-1]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *(
        x.new_empty(n, dtype=torch.float32) for n in (rows, rows if centred else 0)
    )


def _graph_norm_backward(dy, x, weight, bias, rstd, mean, *spec):
    dx, dweight, dbias, _ = norm.norm_backward(dy, x, weight, bias, None, rstd, mean, NormSpec(*spec))
    return dx, dweight, dweight.new_empty(0) if dbias is None else dbias


def _fake_norm_backward(dy, x, weight, bias, *rest):
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight), dbias


def _graph_activation_backward(dh, g, u, kind):
    dg, du, _ = norm.activation_backward(dh, g, u, kind)
    return dg, dg.new_empty(0) if du is None else du


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_define(
    "graph_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred, bool zero_centered) -> "
    "(Tensor, Tensor, Tensor)", _graph_norm, _fake_norm,
)
_define(
    "graph_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor rstd, Tensor mean, float eps, "
    "bool centred, bool zero_centered) -> (Tensor, Tensor, Tensor)", _graph_norm_backward, _fake_norm_backward,
)
_define(
    "graph_activation(Tensor g, Tensor? u, int kind) -> Tensor",
    lambda g, u, kind: norm.activation(g, u, kind)[0], lambda g, u, kind: _like(g),
)
_define(
    "graph_activation_backward(Tensor dh, Tensor g, Tensor? u, int kind) -> (Tensor, Tensor)",
    _graph_activation_backward, lambda dh, g, u, kind: (_like(g), g.new_empty(0) if u is None else _like(u)),
)


def _save_norm(ctx, inputs, output) -> None:
    x, weight, bias, *ctx.spec = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _norm_autograd(ctx, dy, _rstd, _mean):
    x, weight, bias, rstd, mean = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.fsdp_quant.graph_norm_backward(dy, x, weight, bias, rstd, mean, *ctx.spec)
    return dx, dweight, None if bias is None else dbias, None, None, None


def _save_activation(ctx, inputs, output) -> None:
    g, u, ctx.kind = inputs
    ctx.save_for_backward(g, u)


def _activation_autograd(ctx, dh):
    g, u = ctx.saved_tensors
    dg, du = torch.ops.fsdp_quant.graph_activation_backward(dh, g, u, ctx.kind)
    return dg, None if u is None else du, None


torch.library.register_autograd("fsdp_quant::graph_norm", _norm_autograd, setup_context=_save_norm, lib=_library)
torch.library.register_autograd(
    "fsdp_quant::graph_activation", _activation_autograd, setup_context=_save_activation, lib=_library
)

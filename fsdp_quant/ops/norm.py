# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, LayerNorm and activations: the definition in PyTorch, or the compiled kernel if there is
one for the tensors.

    norm         y = (x - mean) * rstd * gamma + beta     gamma = weight, or 1 + weight; no mean in
                                                          RMSNorm
    activation   h = act(g), or act(g) * u; of clamped_swiglu (gpt-oss) act(g) * (clamp(u) + 1)

Both compute in fp32 and round to the dtype where separate torch operations round: `act(g)` before
the product with u, and in the backward `dh * u` before the product with the slope. The reference
equals torch's autograd bit for bit. A kernel differs from it in the last bits of exp, erf and tanh,
and in the order of sums over a row or over rows. Kernels also return the amax of each result; those
of activations also the amaxes of lines (`native.amaxes_like`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, opaque

_aten = torch.ops.aten


class NormSpec(NamedTuple):
    """The kind of a norm.

    centred:       LayerNorm; else RMSNorm.
    zero_centered: gamma is 1 + weight.
    rounds_first:  round the normalized x to the dtype of x before the product with gamma, as
                   transformers' Llama does. For an RMSNorm whose gamma is the weight.
    """

    eps: float
    centred: bool
    zero_centered: bool
    rounds_first: bool = False


class Activation(NamedTuple):
    """kind: index in `KINDS`. gated: multiply the result by a second operand."""

    kind: int
    gated: bool

    @property
    def has_kernel(self) -> bool:
        return _KINDS[self.kind].has_kernel


class _Kind(NamedTuple):
    """value: x -> act(x). backward: (gradient of act(x), x) -> gradient of x. factor: of the second
    operand u, whose value multiplies act(g); None: u itself."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    factor: _Kind | None = None
    has_kernel: bool = False


QUICK = 1.702  # x * sigmoid(QUICK * x) approximates GELU
LIMIT = 7.0  # of gpt-oss' gate from above, and of its up from both sides


def _quick_gelu(x: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.sigmoid(QUICK * values)).to(x.dtype)


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    d, values = dy.float(), x.float()
    s = torch.sigmoid(QUICK * values)
    return (d * s + _aten.sigmoid_backward(d * values, s) * QUICK).to(x.dtype)


_CLAMPED_UP = _Kind(
    lambda u: u.clamp(-LIMIT, LIMIT) + 1, lambda dy, u: torch.where(u.abs() <= LIMIT, dy, 0.0)
)
KINDS = {  # those that have kernels first, in the order of csrc/norm/norm.h
    "gelu": _Kind(F.gelu, _aten.gelu_backward, has_kernel=True),
    "gelu_tanh": _Kind(
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(_aten.gelu_backward, approximate="tanh"),
        has_kernel=True,
    ),
    "silu": _Kind(F.silu, _aten.silu_backward, has_kernel=True),
    "relu": _Kind(
        F.relu, lambda dy, x: _aten.threshold_backward(dy, F.relu(x), 0), has_kernel=True
    ),
    "relu_squared": _Kind(
        lambda x: F.relu(x).square(),
        lambda dy, x: _aten.threshold_backward(dy * (2 * F.relu(x)), x, 0),
        has_kernel=True,
    ),
    "sigmoid": _Kind(torch.sigmoid, lambda dy, x: _aten.sigmoid_backward(dy, torch.sigmoid(x))),
    "qgelu": _Kind(_quick_gelu, _quick_gelu_backward),
    "clamped_silu": _Kind(
        lambda g: _quick_gelu(g.clamp(max=LIMIT)),
        lambda dy, g: torch.where(g <= LIMIT, _quick_gelu_backward(dy, g.clamp(max=LIMIT)), 0.0),
        factor=_CLAMPED_UP,
    ),
}
_KINDS = tuple(KINDS.values())
GATED = {
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "swiglu": "silu",
    "reglu": "relu",
    "sreglu": "relu_squared",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "clamped_swiglu": "clamped_silu",
}
ACTIVATIONS = {name: Activation(i, False) for i, name in enumerate(KINDS)} | {
    name: Activation(list(KINDS).index(kind), True) for name, kind in GATED.items()
}


def _has_kernel(x: Tensor, *others: Tensor | None, widest: int | None = None) -> bool:
    """A kernel accepts these tensors. widest: most columns that it accepts."""
    cols = x.shape[-1]
    if not (
        native.is_available_for(x) and x.dtype in native.FLOATING and x.numel() and cols % 8 == 0
    ):
        return False
    return (widest is None or cols <= widest) and all(
        t is None or t.dtype is x.dtype for t in others
    )


def runs_whole(kind: int, *tensors: Tensor | None) -> bool:
    """A kernel of this activation accepts these tensors without a copy: plain, contiguous, of one
    shape and aligned to 16 bytes."""
    g, *others = [t for t in tensors if t is not None]
    return (
        _KINDS[kind].has_kernel
        and all(t.shape == g.shape for t in others)
        and _has_kernel(g, *others)
        and all(
            type(t) is Tensor and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (g, *others)
        )
    )


def activation(g: Tensor, u: Tensor | None, kind: int) -> tuple[Tensor, Tensor | None]:
    """(act(g), or act(g) * u; its amaxes if a kernel ran)."""
    if _KINDS[kind].has_kernel and _has_kernel(g, u):
        return native.activation(g, u, kind)
    return _activation(g, u, kind), None


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def reference_activation(g: Tensor, u: Tensor | None, kind: int) -> Tensor:
    value, _, factor, _ = _KINDS[kind]
    return value(g) if u is None else value(g) * (u if factor is None else factor.value(u))


_activation = opaque.operator(
    "reference_activation(Tensor g, Tensor? u, int kind) -> Tensor", lambda g, u, kind: _like(g)
)(reference_activation)


def activation_backward(
    dh: Tensor, g: Tensor, u: Tensor | None, kind: int
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]:
    """(dg, du or None, their amaxes if a kernel ran)."""
    if _KINDS[kind].has_kernel and _has_kernel(g, u, dh):
        return native.activation_backward(dh, g, u, kind)
    return *_activation_backward(dh, g, u, kind), None


def reference_activation_backward(
    dh: Tensor, g: Tensor, u: Tensor | None, kind: int
) -> tuple[Tensor, Tensor | None]:
    value, backward, factor, _ = _KINDS[kind]
    if u is None:
        return backward(dh, g), None
    if factor is None:
        return backward(dh * u, g), dh * value(g)
    return backward(dh * factor.value(u), g), factor.backward(dh * value(g), u)


_activation_backward = opaque.operator(
    "reference_activation_backward(Tensor dh, Tensor g, Tensor? u, int kind) -> Tensor[]",
    lambda dh, g, u, kind: [_like(t) for t in (g, u) if t is not None],
    results=2,
)(reference_activation_backward)


class Normal(NamedTuple):
    """y [.., cols]; rstd and mean fp32 [rows] (mean of RMSNorm: empty); amax of y fp32 [1] if a
    kernel ran."""

    y: Tensor
    rstd: Tensor
    mean: Tensor
    amax: Tensor | None


def _gamma(weight: Tensor, spec: NormSpec) -> Tensor:
    return weight.float() + 1 if spec.zero_centered else weight


def _layer_norm_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, gamma, bias) for torch's LayerNorm, in the dtype of gamma."""
    gamma = _gamma(weight, spec)
    return x.to(gamma.dtype), gamma, None if bias is None else bias.to(gamma.dtype)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> Normal:
    """x [.., cols], weight and bias [cols]."""
    if _has_kernel(x, weight, bias, widest=native.WIDEST_NORM):
        return Normal(*native.norm(x, weight, bias, *spec))
    return Normal(*_norm(x, weight, bias, *spec), None)


def reference_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """y, rstd, mean."""
    if spec.centred:
        values, gamma, beta = _layer_norm_inputs(x, weight, bias, spec)
        y, mean, rstd = _aten.native_layer_norm(values, x.shape[-1:], gamma, beta, spec.eps)
        return y.to(x.dtype), rstd.float().flatten(), mean.float().flatten()
    values = x.float()
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + spec.eps)
    normal = values * rstd
    y = (
        weight * normal.to(x.dtype)
        if spec.rounds_first
        else (normal * _gamma(weight, spec)).to(x.dtype)
    )
    return y, rstd.flatten(), rstd.new_empty(0)


def _fake_norm(x, weight, bias, eps, centred, *spec):
    rows = x.numel() // x.shape[-1]
    return _like(x), *(x.new_empty(n, dtype=torch.float32) for n in (rows, rows if centred else 0))


@opaque.operator(
    "reference_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred, bool "
    "zero_centered, bool rounds_first) -> (Tensor, Tensor, Tensor)",
    _fake_norm,
)
def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, *spec) -> tuple[Tensor, Tensor, Tensor]:
    return reference_norm(x, weight, bias, NormSpec(*spec))


class NormGradients(NamedTuple):
    """dx (with the gradient of the residual), dweight, dbias or None; amax of dx if a kernel
    ran."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None
    amax: Tensor | None


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    spec: NormSpec,
) -> NormGradients:
    """The gradients of `norm`.

    residual: another gradient of x, added to the rounded dx, as autograd adds two gradients.
    """
    if _has_kernel(x, weight, bias, dy, residual, widest=native.WIDEST_NORM):
        return NormGradients(
            *native.norm_backward(dy, x, weight, residual, rstd, mean, *spec[2:], bias is not None)
        )
    return NormGradients(*_norm_backward(dy, x, weight, bias, residual, rstd, mean, *spec), None)


def reference_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    spec: NormSpec,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias."""
    rows = (*x.shape[:-1], 1)
    if spec.centred:
        values, gamma, beta = _layer_norm_inputs(x, weight, bias, spec)
        dtype = torch.float32 if x.is_cuda else gamma.dtype  # of torch's statistics
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            dy.to(values.dtype),
            values,
            x.shape[-1:],
            mean.view(rows).to(dtype),
            rstd.view(rows).to(dtype),
            gamma,
            beta,
            [True, True, bias is not None],
        )
    else:  # the derivative of x * rsqrt(mean(x^2) + eps) * gamma, step by step
        values, d, r = x.float(), dy if spec.rounds_first else dy.float(), rstd.view(rows)
        normal = (values * r).to(x.dtype if spec.rounds_first else torch.float32)
        dweight = (d * normal).reshape(-1, x.shape[-1]).sum(0)
        d = (d * weight).float() if spec.rounds_first else d * _gamma(weight, spec)
        dr = (d * values).sum(-1, keepdim=True)
        dx = d * r
        # nothing rounds in between: autograd adds three terms
        if residual is not None and x.dtype is torch.float32:
            dx, residual = residual + dx, None
        dx = dx + (-0.5 * dr * r.pow(3)) / x.shape[-1] * (2 * values)
    dx = dx.to(x.dtype)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dx if residual is None else dx + residual, dweight.to(weight.dtype), dbias


@opaque.operator(
    "reference_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    "Tensor rstd, Tensor mean, float eps, bool centred, bool zero_centered, bool rounds_first) -> "
    "Tensor[]",
    lambda dy, x, weight, bias, *others: [_like(t) for t in (x, weight, bias) if t is not None],
    results=3,
)
def _norm_backward(
    dy, x, weight, bias, residual, rstd, mean, *spec
) -> tuple[Tensor, Tensor, Tensor | None]:
    return reference_norm_backward(dy, x, weight, bias, residual, rstd, mean, NormSpec(*spec))

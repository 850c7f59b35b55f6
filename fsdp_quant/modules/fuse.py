"""`MLPPattern`, `NormPattern`: modules of a user's own classes on the fused kernels, proven exact first.

    MLPPattern   an activation and a product become one kernel
    NormPattern  a norm becomes one kernel, which leaves the linear layer behind it the amax of what it writes

The module keeps its submodules, parameters, hooks and state_dict keys; its class becomes one that only has another forward.
The proof: its own forward and the fused one give the same bits, of output and of gradients, on random data of its dtype and
of fp32, in training and in evaluation; with small linear layers in the places of an MLP's own.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.norm import ACTIVATIONS, GATED, NormSpec
from ..recipe import matches
from .norm import takes
from .layernorm_mlp import mlp_hidden
from .linear import handed_to
from .linear_op import Handed
from .norm_op import normalize


class MLPPattern(NamedTuple):
    """Modules that compute down(act(gate(x)) * up(x)), or down(act(up(x))) where gate is None.

    modules:     qualified names, last components ("mlp") or a glob ("layers.*.mlp").
    activation:  as of `LayerNormMLP`: "swiglu", "geglu", "geglu_tanh", "reglu"; without gate "gelu", "gelu_tanh", ...
    gate, up, down:  attributes that hold the linear layers.
    """

    modules: str
    activation: str = "swiglu"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def parts(self) -> list[str]:
        return [part for part in (self.gate, self.up, self.down) if part is not None]

    @property
    def formula(self) -> str:
        if self.gate is None:
            return f"{self.down}({self.activation}({self.up}(x)))"
        return f"{self.down}({GATED[self.activation]}({self.gate}(x)) * {self.up}(x))"

    def check(self) -> None:
        """Raise ValueError for a pattern that means nothing."""
        if self.activation not in ACTIVATIONS or ACTIVATIONS[self.activation].gated != (self.gate is not None):
            kinds = [name for name, kind in ACTIVATIONS.items() if kind.gated == (self.gate is not None)]
            raise ValueError(f"{self}: activation must be one of {', '.join(kinds)}")

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        gate = None if self.gate is None else getattr(module, self.gate)
        up, down = getattr(module, self.up), getattr(module, self.down)
        h, handed = mlp_hidden(x, gate, up, down, ACTIVATIONS[self.activation].kind, Handed())
        return down(h, **handed_to(down, handed))

    def takes(self, module: nn.Module, x: Tensor) -> bool:
        """The fused forward runs; else the module's own."""
        return True

    def probe(self, name: str, module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, int, list[Tensor]]:
        """(the module with other parameters, width of its input, those parameters). Raises ValueError for another structure."""
        layers = [getattr(module, part, None) for part in self.parts]
        for part, layer in zip(self.parts, layers):
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"{name}.{part} is {type(layer).__name__}; {self} wants an nn.Linear there")
        shapes = [(_WIDTH, _HIDDEN)] * (len(layers) - 1) + [(_HIDDEN, _WIDTH)]
        small = [nn.Linear(*shape, layer.bias is not None, dtype=dtype) for shape, layer in zip(shapes, layers)]
        probe = copy.copy(module)
        probe.__dict__["_modules"] = module._modules | dict(zip(self.parts, small))
        return probe, _WIDTH, [p for layer in small for p in layer.parameters()]

    def dtype(self, module: nn.Module) -> torch.dtype | None:
        return getattr(getattr(getattr(module, self.up, None), "weight", None), "dtype", None)


class NormPattern(NamedTuple):
    """Norms over the last dim: (x - mean) * rstd * gamma + beta, in fp32, rounded once (`fq.Norm`).

    modules:              qualified names, last components ("input_layernorm") or a glob ("*norm").
    normalization:        "RMSNorm" or "LayerNorm".
    zero_centered_gamma:  gamma is 1 + weight.
    weight, bias, eps:    attributes that hold them; bias of LayerNorm only. eps may be a number.
    """

    modules: str
    normalization: str = "RMSNorm"
    zero_centered_gamma: bool = False
    weight: str = "weight"
    bias: str = "bias"
    eps: str | float = "eps"

    @property
    def formula(self) -> str:
        return f"{self.normalization} with gamma = {'1 + ' * self.zero_centered_gamma}{self.weight}"

    def check(self) -> None:
        """Raise ValueError for a pattern that means nothing."""
        if self.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"{self}: normalization must be 'RMSNorm' or 'LayerNorm'")

    def parameters(self, module: nn.Module) -> list[Tensor | None]:
        """gamma's parameter and beta, or None."""
        bias = getattr(module, self.bias, None) if self.normalization == "LayerNorm" else None
        return [getattr(module, self.weight, None), bias]

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        spec = NormSpec(float(eps), self.normalization == "LayerNorm", self.zero_centered_gamma)
        return normalize(x, *self.parameters(module), spec)[0]

    def takes(self, module: nn.Module, x: Tensor) -> bool:
        """The fused forward runs; else the module's own: under autocast, or where x has another dtype or width."""
        return takes(x, self.parameters(module))

    def probe(self, name: str, module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, int, list[Tensor]]:
        """As of `MLPPattern`."""
        weight, bias = self.parameters(module)
        eps = getattr(module, self.eps, None) if isinstance(self.eps, str) else self.eps
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            raise ValueError(f"{name} is {type(module).__name__}; {self} wants a weight [dim] and a number eps there")
        names = [self.weight] if bias is None else [self.weight, self.bias]
        small = {n: nn.Parameter(torch.randn(weight.shape[0]).to(dtype)) for n in names}
        probe = copy.copy(module)
        probe.__dict__["_parameters"] = module._parameters | small
        return probe, weight.shape[0], list(small.values())

    def dtype(self, module: nn.Module) -> torch.dtype | None:
        return getattr(getattr(module, self.weight, None), "dtype", None)


Pattern = MLPPattern | NormPattern


def fused_modules(model: nn.Module, patterns: Iterable[Pattern]) -> dict[str, Pattern]:
    """The modules that the patterns name, each proven to compute what its pattern says; nothing is changed.

    Raises ValueError for a pattern that names no module or an unknown activation, and for a module, by name, that two
    patterns name, that lacks a part, or that computes something else.
    """
    modules, found = dict(model.named_modules()), {}
    for pattern in patterns:
        pattern.check()
        names = [n for n in modules if matches(pattern.modules, n)]
        if not names:
            raise ValueError(f"fuse: {pattern.modules!r} matches no module of {type(model).__name__}")
        for name in names:
            if name in found:
                raise ValueError(f"{name or 'the model'}: {found[name]} and {pattern} both name it")
            _prove(name or type(model).__name__, modules[name], pattern)
            found[name] = pattern
    return found


def fuse_forward(module: nn.Module, pattern: Pattern) -> None:
    module.__class__ = _fused_class(type(module), pattern)


@functools.cache
def _fused_class(cls: type, pattern: Pattern) -> type:
    """cls with the fused forward; its instances are pickled as cls and pattern."""
    def forward(self, *args, **kwargs):
        x, *rest = *args, *kwargs.values()
        if rest:
            raise TypeError(f"{cls.__name__} was fused as {pattern.formula}, of one argument; got {1 + len(rest)}")
        return pattern.run(self, x) if pattern.takes(self, x) else cls.forward(self, x)

    def reduce(self, protocol):
        _, _, *state = cls.__reduce_ex__(self, protocol)
        return _blank, (cls, pattern), *state

    return type(f"Fused{cls.__name__}", (cls,), {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__})


def _blank(cls: type, pattern: Pattern) -> nn.Module:
    return cls.__new__(_fused_class(cls, pattern))


# The proof #

_WIDTH, _HIDDEN = 16, 24


def _prove(name: str, module: nn.Module, pattern: Pattern) -> None:
    for dtype, training in itertools.product({torch.float32, pattern.dtype(module) or torch.float32}, (True, False)):
        modes = {m: m.training for m in module.modules()}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(0)
            probe, width, parameters = pattern.probe(name, module, dtype)
            try:
                for m in (*modes, probe):
                    m.training = training
                same = _is_exact(probe, pattern, width, parameters, dtype)
            except Exception as error:  # of the user's forward
                raise ValueError(f"{name}: {type(module).__name__}.forward fails on a small {dtype} input: {error}") from error
            finally:
                for m, mode in modes.items():
                    m.training = mode
        if not same:
            raise ValueError(
                f"{name}: {type(module).__name__}.forward gives other bits than {pattern.formula} in {dtype}; name what it "
                f"computes in an fq.{type(pattern).__name__}, or leave it out of fuse"
            )


def _is_exact(probe: nn.Module, pattern: Pattern, width: int, parameters: list[Tensor], dtype: torch.dtype) -> bool:
    spread = torch.tensor([2.0**-6, 1.0, 4.0, 16.0]).view(4, 1, 1)  # slopes and tails of an activation; eps of a norm
    x, dy = ((torch.randn(4, 8, width) * spread).to(dtype) for _ in range(2))
    leaves = [x.requires_grad_(), *parameters]
    outputs = (probe.forward(x), pattern.run(probe, x))
    made = [[y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)] for y in outputs]
    return all(type(a) is type(b) and a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*made))

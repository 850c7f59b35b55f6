"""`MLPPattern`: MLPs of a user's own classes whose activation and product become one kernel, proven exact first.

The module keeps its submodules, parameters, hooks and state_dict keys; its class becomes one that only has another forward.
The proof: its own forward and the fused one give the same bits, of output and of gradients, with small linear layers in
the places of its own, on random data of its dtype and of fp32, in training and in evaluation.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.norm import ACTIVATIONS, GATED
from ..recipe import matches
from .norm_op import activate


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


def fused_modules(model: nn.Module, patterns: Iterable[MLPPattern]) -> dict[str, MLPPattern]:
    """The modules that the patterns name, each proven to compute what its pattern says; nothing is changed.

    Raises ValueError for a pattern that names no module or an unknown activation, and for a module, by name, that two
    patterns name, that lacks a part, or that computes something else.
    """
    modules, found = dict(model.named_modules()), {}
    for pattern in patterns:
        if pattern.activation not in ACTIVATIONS or ACTIVATIONS[pattern.activation].gated != (pattern.gate is not None):
            kinds = [name for name, kind in ACTIVATIONS.items() if kind.gated == (pattern.gate is not None)]
            raise ValueError(f"{pattern}: activation must be one of {', '.join(kinds)}")
        names = [n for n in modules if matches(pattern.modules, n)]
        if not names:
            raise ValueError(f"fuse: {pattern.modules!r} matches no module of {type(model).__name__}")
        for name in names:
            if name in found:
                raise ValueError(f"{name or 'the model'}: {found[name]} and {pattern} both name it")
            _prove(name or type(model).__name__, modules[name], pattern)
            found[name] = pattern
    return found


def fuse_forward(module: nn.Module, pattern: MLPPattern) -> None:
    module.__class__ = _fused_class(type(module), pattern)


def _forward(module: nn.Module, pattern: MLPPattern, x: Tensor) -> Tensor:
    up, kind = getattr(module, pattern.up)(x), ACTIVATIONS[pattern.activation].kind
    h = activate(up, None, kind) if pattern.gate is None else activate(getattr(module, pattern.gate)(x), up, kind)
    return getattr(module, pattern.down)(h)


@functools.cache
def _fused_class(cls: type, pattern: MLPPattern) -> type:
    """cls with the fused forward; its instances are pickled as cls and pattern."""
    def forward(self, *args, **kwargs):
        x, *rest = *args, *kwargs.values()
        if rest:
            raise TypeError(f"{cls.__name__} was fused as {pattern.formula}, of one argument; got {1 + len(rest)}")
        return _forward(self, pattern, x)

    def reduce(self, protocol):
        _, _, *state = cls.__reduce_ex__(self, protocol)
        return _blank, (cls, pattern), *state

    return type(f"Fused{cls.__name__}", (cls,), {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__})


def _blank(cls: type, pattern: MLPPattern) -> nn.Module:
    return cls.__new__(_fused_class(cls, pattern))


# The proof #

_WIDTH, _HIDDEN = 16, 24


def _prove(name: str, module: nn.Module, pattern: MLPPattern) -> None:
    layers = [getattr(module, part, None) for part in pattern.parts]
    for part, layer in zip(pattern.parts, layers):
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name}.{part} is {type(layer).__name__}; {pattern} wants an nn.Linear there")
    for dtype, training in itertools.product({torch.float32, layers[0].weight.dtype}, (True, False)):
        modes = {m: m.training for m in module.modules()}
        try:
            for m in modes:
                m.training = training
            same = _is_exact(module, pattern, layers, dtype)
        except Exception as error:  # of the user's forward
            raise ValueError(f"{name}: {type(module).__name__}.forward fails on a small {dtype} input: {error}") from error
        finally:
            for m, mode in modes.items():
                m.training = mode
        if not same:
            raise ValueError(
                f"{name}: {type(module).__name__}.forward gives other bits than {pattern.formula} in {dtype}; name what it "
                "computes in an fq.MLPPattern, or leave it out of fuse"
            )


def _is_exact(module: nn.Module, pattern: MLPPattern, layers: list[nn.Linear], dtype: torch.dtype) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        shapes = [(_WIDTH, _HIDDEN)] * (len(layers) - 1) + [(_HIDDEN, _WIDTH)]
        small = [nn.Linear(*shape, layer.bias is not None, dtype=dtype) for shape, layer in zip(shapes, layers)]
        spread = torch.tensor([2.0**-6, 1.0, 4.0, 16.0]).view(4, 1, 1)  # slopes and tails of an activation
        x, dy = ((torch.randn(4, 8, _WIDTH) * spread).to(dtype) for _ in range(2))
        probe = copy.copy(module)
        probe.__dict__["_modules"] = module._modules | dict(zip(pattern.parts, small))
        leaves = [x.requires_grad_(), *(p for layer in small for p in layer.parameters())]
        outputs = (probe.forward(x), _forward(probe, pattern, x))
        made = [[y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)] for y in outputs]
    return all(type(a) is type(b) and a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*made))

# SPDX-License-Identifier: Apache-2.0
"""`MLPPattern`, `NormPattern`: a user's own modules on the fused kernels, proven exact first.

    MLPPattern    an activation and a product become one kernel
    NormPattern   a norm becomes one kernel
    InputPattern  layers that read one tensor quantize it once; of attention that is recognized

`recognized` finds them in models of transformers, torchtitan and timm. In a graph that is being
traced, and where someone looks at operators (torch.func, dispatch modes), a module runs its own
forward: inductor fuses it, and computes again in the backward what kernels of ours would save.

The module keeps its submodules, parameters, hooks and state_dict keys; its class becomes one that
only has another forward. The proof, of each instance: operator by operator its own forward is the
pattern's (`Symbols`), in training and in evaluation, with gradients and without. What its code read
meanwhile (`reads`) is looked up again in each forward; if anything is otherwise, the module's own
forward runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear.linear import Linear, handed_to
from ..linear.shared_input import Handed, HandedByInput
from ..ops.norm import ACTIVATIONS, GATED, NormSpec, reference_activation, reference_norm
from ..roles import matches
from ..tensor import torch_compat
from .layernorm_mlp import RECOMPUTE, mlp_hidden, recomputed
from .norm import NORMALIZATION, is_supported
from .norm_op import normalize
from .proof import HIDDEN, WIDTH, Proof, prove, read_by
from .reads import Held, held, is_defined_by


class MLPPattern(NamedTuple):
    """Modules that compute down(act(gate(x)) * up(x)), or down(act(up(x))) where gate is None, or
    down(act(g) * u) of the halves g, u = up(x).chunk(2, -1) where the activation is gated.

    modules:     qualified names, last components ("mlp") or a glob ("layers.*.mlp").
    activation:  as of `LayerNormMLP`: "swiglu", "geglu", "geglu_tanh", "reglu"; without gate
                 "gelu", "gelu_tanh", ... too.
    gate, up, down:  attributes that hold the linear layers.
    recompute:   "gate_up": the backward makes gate(x) and up(x) again from x (in a compiled graph
                 the operand of down's wgrad too), as `LayerNormMLP`.

    >>> pattern = fq.MLPPattern("*.feed_forward", up="w3", gate="w1", down="w2")
    """

    modules: str
    activation: str = "swiglu"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    recompute: str | None = None

    @property
    def parts(self) -> list[str]:
        return [part for part in (self.gate, self.up, self.down) if part is not None]

    @property
    def is_packed(self) -> bool:
        return self.gate is None and self.activation in GATED

    @property
    def formula(self) -> str:
        again = ", made again in the backward up to there" * bool(self.recompute)
        if self.is_packed:
            return f"{self.down}({GATED[self.activation]}(g) * u{again}), g and u of {self.up}(x)"
        if self.gate is None:
            return f"{self.down}({self.activation}({self.up}(x)){again})"
        return f"{self.down}({GATED[self.activation]}({self.gate}(x)) * {self.up}(x){again})"

    def check(self) -> None:
        """Raise ValueError for a pattern that means nothing."""
        RECOMPUTE.read("recompute", self.recompute)
        kinds = ACTIVATIONS if self.gate is None else GATED
        if self.activation not in kinds:
            raise ValueError(f"{self}: activation must be one of {', '.join(kinds)}")

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        gate = None if self.gate is None else getattr(module, self.gate)
        up, down = getattr(module, self.up), getattr(module, self.down)

        def hidden(x: Tensor) -> tuple[Tensor, Handed]:
            return mlp_hidden(x, gate, up, down, ACTIVATIONS[self.activation], Handed())

        h, handed = recomputed(hidden, x) if self.recompute else hidden(x)
        return down(h, **handed_to(down, handed))

    def defined(self, module: nn.Module, x: Tensor) -> list[Tensor]:
        """What `run` computes, by torch's operators; each way to write it."""
        up, kind = getattr(module, self.up)(x), ACTIVATIONS[self.activation].kind
        g = up if self.gate is None else getattr(module, self.gate)(x)
        u = None if self.gate is None else up
        if self.is_packed:
            g, u = up.chunk(2, -1)
        return [getattr(module, self.down)(reference_activation(g, u, kind))]

    def is_supported(self, module: nn.Module, x: Tensor, proof: Proof) -> bool:
        """The fused forward runs on x: it is proven for its dtype, and under autocast."""
        if torch_compat.autocast_dtype(x.device) is not None:
            return proof.autocast
        return x.dtype in proof.dtypes

    def probe(
        self, name: str, module: nn.Module, dtype: torch.dtype, kind: type[nn.Linear]
    ) -> tuple[nn.Module, int, list[Tensor]]:
        """(small module, its width, its parameters). Raises ValueError for another structure.

        kind:  of its linear layers.
        """
        into_hidden = WIDTH, HIDDEN * (1 + self.is_packed)
        small: list[nn.Linear] = []
        for part in self.parts:
            layer = getattr(module, part, None)
            if not isinstance(layer, nn.Linear):
                raise ValueError(
                    f"{name}.{part} is {type(layer).__name__}; {self} wants an nn.Linear there"
                )
            shape = (HIDDEN, WIDTH) if part == self.down else into_hidden
            small.append(kind(*shape, layer.bias is not None, dtype=dtype))
        probe = copy.copy(module)
        probe.__dict__["_modules"] = module._modules | dict(zip(self.parts, small))
        return probe, WIDTH, [p for layer in small for p in layer.parameters()]


class NormPattern(NamedTuple):
    """Norms over the last dim: (x - mean) * rstd * gamma + beta, in fp32, rounded once (`fq.Norm`).

    modules:              qualified names, last components ("input_layernorm") or a glob ("*norm").
    normalization:        "RMSNorm" or "LayerNorm".
    zero_centered_gamma:  gamma is 1 + weight.
    rounds_first:         the normalized x is rounded to its dtype before gamma multiplies it:
                          Llama, Qwen, Mistral, Phi 3. Of RMSNorm without zero_centered_gamma.
    weight, bias, eps:    attributes that hold them; bias of LayerNorm only. eps may be a number.

    >>> model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32))
    >>> model = fq.convert(model, "mxfp8", fuse=[fq.NormPattern("0", "LayerNorm")])
    """

    modules: str
    normalization: str = "RMSNorm"
    zero_centered_gamma: bool = False
    weight: str = "weight"
    bias: str = "bias"
    eps: str | float = "eps"
    rounds_first: bool = False

    parts = ()  # no linear layers

    @property
    def formula(self) -> str:
        rounded = ", rounded first" * self.rounds_first
        return (
            f"{self.normalization}{rounded} with gamma = "
            f"{'1 + ' * self.zero_centered_gamma}{self.weight}"
        )

    def check(self) -> None:
        """Raise ValueError for a pattern that means nothing."""
        NORMALIZATION.read(f"{self}: normalization", self.normalization)
        if self.rounds_first and (self.normalization != "RMSNorm" or self.zero_centered_gamma):
            raise ValueError(f"{self}: rounds_first is of an RMSNorm whose gamma is its weight")

    def parameters(self, module: nn.Module) -> tuple[Any, Tensor | None]:
        """gamma's parameter and beta, or None."""
        bias = getattr(module, self.bias, None) if self.normalization == "LayerNorm" else None
        return getattr(module, self.weight, None), bias

    def spec(self, module: nn.Module) -> NormSpec:
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        layer_norm = self.normalization == "LayerNorm"
        return NormSpec(float(eps), layer_norm, self.zero_centered_gamma, self.rounds_first)

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = self.parameters(module)
        return normalize(x, weight, bias, self.spec(module))[0]

    def defined(self, module: nn.Module, x: Tensor) -> list[Tensor]:
        """As of `MLPPattern`."""
        (weight, bias), spec = self.parameters(module), self.spec(module)
        ways = [reference_norm(x, weight, bias, spec)[0]]
        if not (spec.centred or spec.zero_centered or spec.rounds_first):
            ways.append(F.rms_norm(x, weight.shape, weight, spec.eps))
        return ways

    def is_supported(self, module: nn.Module, x: Tensor, proof: Proof) -> bool:
        """The fused forward runs; else the module's own: under autocast, where x has another dtype
        or width, and in fp32, where autograd adds both gradients of x to others in turn."""
        if x.dtype is torch.float32 or x.dtype not in proof.dtypes:
            return False
        return is_supported(x, self.parameters(module))

    def probe(
        self, name: str, module: nn.Module, dtype: torch.dtype, kind: type[nn.Linear]
    ) -> tuple[nn.Module, int, list[Tensor]]:
        """As of `MLPPattern`."""
        weight, bias = self.parameters(module)
        eps = getattr(module, self.eps, None) if isinstance(self.eps, str) else self.eps
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            raise ValueError(
                f"{name} is {type(module).__name__}; {self} wants a weight [dim] and a number eps "
                "there"
            )
        names = [self.weight] if bias is None else [self.weight, self.bias]
        small = {
            n: nn.Parameter(torch.randn(weight.shape, dtype=torch.float32, device="cpu").to(dtype))
            for n in names
        }
        probe = copy.copy(module)
        probe.__dict__["_parameters"] = module._parameters | small
        return probe, weight.shape[0], list(small.values())


class InputPattern(NamedTuple):
    """Modules whose layers `parts` read one tensor, which is quantized once per forward.

    modules:  as of `MLPPattern`.
    """

    modules: str
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    @property
    def formula(self) -> str:
        return f"{', '.join(self.parts)} read codes of one input"

    @contextlib.contextmanager
    def shared(self, module: nn.Module) -> Iterator[None]:
        parts = (getattr(module, part) for part in self.parts)
        parts = (getattr(part, "base_layer", part) for part in parts)  # LoRA's own
        layers, handed = [part for part in parts if isinstance(part, Linear)], HandedByInput()
        for layer in layers:
            layer.runtime.handed_by_input = handed
        try:
            yield
        finally:
            for layer in layers:
                layer.runtime.handed_by_input = None


Pattern = MLPPattern | NormPattern  # that users name; each is proven


def fused_modules(model: nn.Module, patterns: Iterable[Pattern]) -> dict[str, Pattern]:
    """The modules that the patterns name, each proven to compute what its pattern says.

    Raises ValueError for a pattern that names no module or an unknown activation, and for a module,
    by name, that two patterns name, that lacks a part, or that computes something else.
    """
    modules = dict(model.named_modules())
    fused: dict[str, Pattern] = {}
    for pattern in patterns:
        pattern.check()
        names = [n for n in modules if matches(pattern.modules, n)]
        if not names:
            raise ValueError(
                f"fuse: {pattern.modules!r} matches no module of {type(model).__name__}; name one "
                "of its modules, or pass fuse=True"
            )
        for name in names:
            if name in fused:
                raise ValueError(f"{name or 'the model'}: {fused[name]} and {pattern} both name it")
            prove(name or type(model).__name__, modules[name], pattern)
            fused[name] = pattern
    return fused


def fuse_forward(module: nn.Module, pattern: Pattern | InputPattern) -> None:
    """Give a module the class whose forward is fused; one class per pattern and user's class."""
    module.__class__ = _fused_class(type(module), pattern._replace(modules=""))
    torch_compat.make_fx_leaf(module)
    if not isinstance(pattern, InputPattern):
        _proof_of(module)


# Blocks that are recognized #

# (gate, up, down). By rows: Llama, Mistral, Qwen, Gemma, OLMo 2 and DeepSeek; torchtitan; ours; ViT
# and timm; GPT-NeoX and Falcon; Phi 3 and GLM-4.
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    (None, "fc1", "fc2"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
    (None, "gate_up_proj", "down_proj"),
)
# Llama, Mistral, Qwen, Phi 3 and DeepSeek; OLMo 2; Gemma.
_NORMS: tuple[dict[str, Any], ...] = ({"rounds_first": True}, {}, {"zero_centered_gamma": True})
_EPS = "variance_epsilon", "eps"
# Attention of transformers and torchtitan, whose code is known: nothing writes an input between its
# projections. The last two rows are DeepSeek's.
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
)
_KNOWN = "transformers.", "torchtitan."


def recognized(model: nn.Module) -> tuple[dict[str, Pattern | InputPattern], dict[str, str]]:
    """(the pattern of each attention, MLP and norm; why another MLP or norm is not proven exact).

    MLPs of linear layers named as in `_MLPS`, and classes of norms that torch does not have.
    """
    patterns: dict[str, Pattern | InputPattern] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        cls, linears = type(module), _linears(module)
        if "forward" in module.__dict__ or hasattr(cls, "fused_as"):
            continue
        projections = next((row for row in _ATTENTION if linears.keys() >= set(row)), None)
        is_listed = is_defined_by(cls.forward, _KNOWN) and cls.__module__.startswith(_KNOWN)
        if projections is not None and is_listed:
            patterns[name] = InputPattern(name, projections)
            continue
        for pattern in _candidates(name, module):
            _, *others = inspect.signature(module.forward).parameters.values()
            others = [p.name for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            if others:  # as of a gated norm; defaults hide them from the proof
                taken = f"takes {', '.join(others)} besides its input"
                reasons[name] = f"{name}: {cls.__name__}.forward {taken}"
                break
            try:
                prove(name, module, pattern)
            except ValueError as error:
                reasons[name] = str(error)
            else:
                patterns[name] = pattern
                reasons.pop(name, None)
                break
    return patterns, reasons


def _candidates(name: str, module: nn.Module) -> Iterator[Pattern]:
    """Yield the patterns that the names and shapes of a module's layers allow."""
    cls, linears = type(module), _linears(module)
    if cls.__module__.startswith(("torch.", "fsdp_quant.")):
        return
    for gate, up, down in _MLPS:
        if {gate or up, up, down} <= linears.keys():
            gated = gate is not None or (linears[up].out_features == 2 * linears[down].in_features)
            for activation, kind in ACTIVATIONS.items():
                if kind.gated == gated and kind.has_kernel:
                    yield MLPPattern(name, activation, gate, up, down)
            return
    weight = module._parameters.get("weight")
    eps = next((e for e in _EPS if isinstance(getattr(module, e, None), float)), None)
    is_norm = "Norm" in cls.__name__ and module._parameters.keys() == {"weight"}
    if is_norm and not module._modules and weight is not None and weight.dim() == 1 and eps:
        for kind in _NORMS:
            yield NormPattern(name, eps=eps, **kind)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in module._modules.items() if isinstance(m, nn.Linear)}


def fused_notes(model: nn.Module) -> list[str]:
    """Return a line per kind of module that was fused, that has changed since, and that looks as if
    it could be fused, with the reason why it is not."""
    fused, changed = Counter(), Counter()
    for module in model.modules():
        cls = type(module)
        changed_in, pattern = (getattr(cls, name, None) for name in ("_fq_changed", "fused_as"))
        if changed_in is None:
            continue
        fact = "forward" if "forward" in module.__dict__ else changed_in(module)
        if fact is not None:
            changed[cls.__name__, fact] += 1
        elif pattern is not None:
            fused[pattern.formula] += 1
    reasons = recognized(model)[1].items()
    missed = Counter((type(model.get_submodule(name)).__name__, why) for name, why in reasons)
    return [
        *(f"fused: {formula}  [{count} modules]" for formula, count in fused.items()),
        *(
            f"{cls}: {fact} has changed since fq.convert, so the module's own forward runs  "
            f"[{count} modules]"
            for (cls, fact), count in changed.items()
        ),
        *(f"not fused: {why}  [{n} modules of {cls}]" for (cls, why), n in missed.items()),
    ]


@functools.cache
def _fused_class(cls: type[nn.Module], pattern: Pattern | InputPattern) -> type[nn.Module]:
    """cls with the fused forward; its instances are pickled as cls and pattern. Calls with other
    arguments than x run the forward of cls: the proof is of x alone."""
    recomputes, code = getattr(pattern, "recompute", None) is not None, cls.forward

    def changed(self) -> str | None:
        if isinstance(pattern, InputPattern):
            return None if cls.forward is code else "forward"
        return _proof_of(self).changed(self)

    def forward(self, *args, **kwargs):
        inputs = (*args, *kwargs.values())
        x = inputs[0] if len(inputs) == 1 else None
        is_watched = torch_compat.dispatch_is_watched()
        if is_watched and recomputes and x is not None:
            return recomputed(functools.partial(cls.forward, self), x)
        if is_watched or changed(self) is not None:
            return cls.forward(self, *args, **kwargs)
        if isinstance(pattern, InputPattern):
            with pattern.shared(self):
                return cls.forward(self, *args, **kwargs)
        if x is None or x.is_nested or not pattern.is_supported(self, x, _proof_of(self).outcome):
            return cls.forward(self, *args, **kwargs)
        return pattern.run(self, x)

    def reduce(self, protocol):
        _, _, *state = cls.__reduce_ex__(self, protocol)
        return (_blank, (cls, pattern), *state)

    return type(
        f"Fused{cls.__name__}",
        (cls,),
        {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__module__": cls.__module__,
            "fused_as": pattern,
            "fused_from": cls,
            "_fq_changed": changed,
        },
    )


def _blank(cls: type[nn.Module], pattern: Pattern) -> nn.Module:
    return cls.__new__(_fused_class(cls, pattern))


def _proof_of(module: nn.Module) -> Held:
    """The proof of a fused module."""
    cls, pattern = (getattr(type(module), name) for name in ("fused_from", "fused_as"))

    return held(
        module,
        lambda: read_by(module, pattern, cls),
        lambda reads: prove(cls.__name__, module, pattern, cls, reads),
    )

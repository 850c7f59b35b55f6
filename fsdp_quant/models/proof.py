# SPDX-License-Identifier: Apache-2.0
"""`prove`: a module's forward is what a pattern says, operator by operator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .reads import Reads, probe_of, proven
from .symbols import Symbols, Unobserved, Unproven

WIDTH, HIDDEN = 16, 24  # of the small modules that are looked at
_DTYPES = torch.bfloat16, torch.float16
_STATELESS = "torch.nn.", "transformers.activations"  # whose SiLU has no settings


class Provable(Protocol):
    """A pattern: `MLPPattern`, `NormPattern`."""

    @property
    def parts(self) -> Sequence[str]: ...
    @property
    def formula(self) -> str: ...
    def probe(
        self, name: str, module: nn.Module, dtype: torch.dtype, kind: type[nn.Linear]
    ) -> tuple[nn.Module, int, list[Tensor]]: ...
    def defined(self, module: nn.Module, x: Tensor) -> list[Tensor]: ...
    def _replace(self, **options: Any) -> Any: ...


class Proof(NamedTuple):
    """A module computes what a pattern says, while the facts of `read_by` are true.

    dtypes:    of x and of the parameters; all but those of the module and fp32 are optional.
    autocast:  also under torch.autocast.
    """

    dtypes: frozenset[torch.dtype]
    autocast: bool


class _Leaf(nn.Linear):
    """A linear layer that, closed, may be called and not be looked at."""

    is_closed = False

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["is_closed"] = False
        y = super().forward(x)
        self.__dict__["is_closed"] = True
        return y

    def __getattribute__(self, name: str) -> Any:
        if name in ("weight", "bias", "in_features", "out_features") and self.is_closed:
            raise Unproven(f"reads {name} of a linear layer")
        return super().__getattribute__(name)


def prove(
    name: str,
    module: nn.Module,
    pattern: Provable,
    cls: type[nn.Module] | None = None,
    reads: Reads | None = None,
) -> Proof:
    """The proof of a module: its own, or that of one of which the same facts are true.

    cls:    whose forward it is; default: the module's.
    reads:  its facts, if the caller has them.

    Raises ValueError if there is none.
    """
    cls = cls or type(module)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        parameters = pattern.probe(name, module, torch.float32, nn.Linear)[2]
    shapes = *(p.shape for p in parameters), *(p.dtype for p in module.parameters())
    try:
        reads = reads or read_by(module, pattern, cls)
    except Unproven as error:
        raise ValueError(f"{name}: {cls.__name__}.forward {error}") from None
    key = cls, pattern._replace(modules=""), shapes
    outcome = proven(key, reads, lambda: _first_proof(module, pattern, cls))
    if isinstance(outcome, str):
        raise ValueError(f"{name}: {outcome}")
    return outcome


def read_by(module: nn.Module, pattern: Provable, cls: type[nn.Module]) -> Reads:
    """The facts under which a proof is true. Raises Unproven for code that has none."""
    return Reads(module, cls, pattern.parts, [cls.forward])


def _first_proof(module: nn.Module, pattern: Provable, cls: type[nn.Module]) -> Proof | str:
    """A proof, or why there is none."""
    dtypes = {torch.float32, *(p.dtype for p in module.parameters())}
    modes = list(itertools.product((True, False), (True, False)))

    def is_proven(dtype: torch.dtype, autocast: bool = False) -> bool:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.device("cpu"),
            torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=False),
        ):
            torch.manual_seed(0)
            return all(_is_same(module, pattern, cls, dtype, *mode) for mode in modes)

    dtype = torch.float32
    try:
        for dtype in dtypes:
            if not is_proven(dtype):
                return (
                    f"{cls.__name__}.forward gives other bits than {pattern.formula} in {dtype}; "
                    f"name what it computes in an fq.{type(pattern).__name__}, or leave it out of "
                    "fuse"
                )
    except Unproven as error:
        return f"{cls.__name__}.forward {error}"
    except Exception as error:  # of the user's forward
        return f"{cls.__name__}.forward fails on a small {dtype} input: {error}"
    others, autocast = set(), False
    with contextlib.suppress(Exception):
        others = {d for d in _DTYPES if d in dtypes or is_proven(d)}
        autocast = is_proven(torch.float32, autocast=True)
    return Proof(frozenset(dtypes | others), autocast)


def _is_same(
    module: nn.Module,
    pattern: Provable,
    cls: type[nn.Module],
    dtype: torch.dtype,
    training: bool,
    grad: bool,
) -> bool:
    """The operators of the module's forward are the pattern's, on the same elements."""
    probe, width, parameters = pattern.probe("", module, dtype, _Leaf)
    for part in pattern.parts:
        getattr(probe, part).is_closed = True
    symbols = Symbols(exact=True)
    for index, parameter in enumerate(parameters):
        symbols.name(parameter, f"parameter {index}")
    x = torch.randn(2, 2, width, dtype=torch.float32, device="cpu").to(dtype).requires_grad_(grad)
    symbols.name(x, "x")
    before = symbols.numbers_of(x).clone()
    with torch.set_grad_enabled(grad), symbols:
        symbols.gradients = grad
        with Unobserved():
            y = cls.forward(probe_of(probe, cls, training, pattern.parts), x)
        symbols.gradients = False
        ways = pattern.defined(probe, x)
    if not isinstance(y, Tensor) or not torch.equal(symbols.numbers_of(x), before):
        return False
    return any(
        y.dtype is z.dtype and torch.equal(symbols.numbers_of(y), symbols.numbers_of(z))
        for z in ways
    )


def gate_of(experts: nn.Module) -> tuple[type, Callable | None]:
    """The class of `act_fn` and the function `_apply_gate` of packed experts of transformers."""
    is_own = "_apply_gate" in experts.__dict__  # of this instance
    gate = None if is_own else getattr(type(experts), "_apply_gate", None)
    return type(getattr(experts, "act_fn", None)), gate


def swiglu_of(experts: nn.Module) -> tuple[type, Callable | None] | None:
    """`gate_of`, if it is silu(g) * u of the halves g, u by its operators; else None."""
    activation, gate = gate_of(experts)
    if gate is None or not activation.__module__.startswith(_STATELESS):
        return None
    symbols, x = Symbols(exact=True), torch.ones(2, 16, dtype=torch.bfloat16, device="cpu")
    symbols.name(x, "x")
    with contextlib.suppress(Exception), torch.inference_mode(False), torch.no_grad(), symbols:
        g, u = x.chunk(2, -1)
        y = torch.nn.functional.silu(g) * u
        probes: Any = [probe_of(experts, type(experts), mode) for mode in (True, False)]
        with Unobserved():
            results = [probe._apply_gate(x) for probe in probes]
        if all(torch.equal(*map(symbols.numbers_of, (y, z))) for z in results):
            return activation, gate
    return None

# SPDX-License-Identifier: Apache-2.0
"""`Reads`: what a module's forward depends on besides tensors, as facts that are checked cheaply.

    watched     a copy of a module that notes each attribute that its code reads
    facts       where each was found and what it was: of the module, its children, their classes,
                and of the functions that they call, whose globals count too
    hold        the same facts are those of another module, or of this one later

A fact is (path of the child, where, name, value). Code that reads what can change unseen (a list, a
config, a buffer) has no facts: `Unproven`.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensor import torch_compat
from .symbols import Unproven

_NOTES, _PATH = "_fq_notes", "_fq_path"  # in the __dict__ of a watched module
_MISSING = object()
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = types.FunctionType, types.BuiltinFunctionType, type, enum.Enum, property
_KNOWN = "torch", "fsdp_quant", "math", "typing", "warnings"  # packages whose code does not change
# Bookkeeping of nn.Module: hooks are looked at by themselves.
_CHILDREN = frozenset({"_modules", "_parameters", "_buffers"})
_OF_MODULES = frozenset(nn.Module().__dict__) - _CHILDREN - {"training"} | {"_compiled_call_impl"}


class Fact(NamedTuple):
    """path: of a child, by names. where: its "__dict__", "_modules", "_parameters", "__class__" or
    "training", or a class or `_Space` that has the name."""

    path: tuple[str, ...]
    where: Any
    name: str
    value: Any


class Bound(NamedTuple):
    """Facts at the objects of one module.

    looked_up:  (namespace, name, value).
    children:   (child, its class): also without hooks.
    modes:      children whose code reads `training`, which must be the module's.
    """

    looked_up: list[tuple[Mapping, str, Any]]
    children: list[tuple[nn.Module, type]]
    modes: list[nn.Module]

    def changed(self, module: nn.Module) -> str | None:
        """The name of a fact that is no longer true; None: the forward computes what it did."""
        for space, name, value in self.looked_up:
            current = space.get(name, _MISSING)
            if current is not value and not _is_equal(current, value):
                return name
        for child, cls in self.children:
            if type(child) is not cls:
                return type(child).__name__
            if torch_compat.has_hooks(child):
                return f"hooks of {cls.__name__}"
        for child in self.modes:
            if child.training is not module.training:
                return f"{type(child).__name__}.training"
        return None


def _is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (*_VALUES, tuple)) and a == b


def watched(
    module: nn.Module, cls: type[nn.Module], leaves: Collection[str], notes: set, training: bool
) -> nn.Module:
    """A copy of a module, as of class `cls`, that adds to `notes` what its code reads.

    leaves:  children that are called and not looked into.
    """
    return _watched(module, cls, (), leaves, notes, training)


def _watched(
    module: nn.Module, cls: type[nn.Module], path: tuple, leaves, notes: set, training: bool
) -> nn.Module:
    children = {
        name: child
        if child is None or name in leaves
        else _watched(child, type(child), (*path, name), (), notes, training)
        for name, child in module._modules.items()
    }
    probe = copy.copy(module)
    probe.__dict__ |= {"_modules": children, "training": training, _PATH: path, _NOTES: notes}
    probe.__class__ = _watching(cls)
    return probe


def forward_of(cls: type[nn.Module]) -> Fact:
    """That the class has the forward that it has."""
    base = next(base for base in cls.__mro__ if "forward" in base.__dict__)
    return Fact((), base, "forward", base.__dict__["forward"])


def is_defined_by(function: Callable, packages: tuple[str, ...]) -> bool:
    """The code of a function, and what it wraps, is of one of these packages: "transformers."."""
    wrapped = getattr(function, "__wrapped__", None)
    is_own = getattr(function, "__globals__", {}).get("__name__", "").startswith(packages)
    return is_own and (wrapped is None or is_defined_by(wrapped, packages))


@functools.cache
def _watching(cls: type[nn.Module]) -> type[nn.Module]:
    def __getattribute__(self, name: str) -> Any:
        state = object.__getattribute__(self, "__dict__")
        if (notes := state.get(_NOTES)) is not None:
            notes.add((state[_PATH], name))
        return cls.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:  # of nn.Module, which reads its own __dict__
        state = object.__getattribute__(self, "__dict__")
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in state[kind]:
                return state[kind][name]
        if cls.__getattr__ is not nn.Module.__getattr__:
            raise Unproven("has a __getattr__ of its own")
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unproven(f"sets self.{name}")

    members: dict[str, Any] = {"__getattribute__": __getattribute__, "__getattr__": __getattr__}
    members["__setattr__"] = __setattr__
    return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(members))


def facts_of(
    module: nn.Module,
    cls: type[nn.Module],
    notes: set,
    leaves: Collection[str] = (),
    code: Callable | None = None,
) -> list[Fact]:
    """What watched copies have read, of this module. Raises Unproven for what is no fact.

    cls, leaves:  as of `watched`. code: the forward that ran; default: that of cls.
    """
    facts: dict[tuple, Fact] = {}
    code = code or cls.forward
    _check(code, "forward")
    for path, name in sorted(notes):
        child = _child(module, path)
        for fact in _located(child, type(child) if path else cls, path, name, leaves):
            facts[fact[:3]] = fact
    functions, seen = [((), code), *((f.path, f.value) for f in facts.values())], set()
    facts[()] = forward_of(cls)
    for path, value in functions:
        value = getattr(value, "fget", getattr(value, "__func__", value))
        function = value.func if isinstance(value, functools.partial) else value
        if not isinstance(function, types.FunctionType) or (path, function) in seen:
            continue
        seen.add((path, function))
        if function.__globals__["__name__"].partition(".")[0] not in _KNOWN:
            for fact in _read_by(function, path, type(_child(module, path)) if path else cls):
                facts.setdefault(fact[:3], fact)
                functions.append((path, fact.value))
            cells = (cell.cell_contents for cell in function.__closure__ or ())
            functions += [(path, content) for content in cells]
    return list(facts.values())


def _child(module: nn.Module, path: Iterable[str]) -> nn.Module:
    return module.get_submodule(".".join(path))


def _located(
    module: nn.Module, cls: type, path: tuple[str, ...], name: str, leaves: Collection[str]
) -> Iterator[Fact]:
    """Where an attribute is, and that it is nowhere before."""
    if name in _OF_MODULES or (not path and name in (*leaves, *_CHILDREN, "forward")):
        return
    if name == "__dict__" or (name in _CHILDREN and path):
        raise Unproven(f"reads all attributes of {cls.__name__}, by {name}")
    if name == "training":
        yield Fact(path, name, name, None)
        return
    of_class = next((base for base in cls.__mro__ if name in base.__dict__), None)
    if of_class in (nn.Module, object):
        return
    value = None if of_class is None else of_class.__dict__[name]
    if not isinstance(value, property):
        current = module.__dict__.get(name, _MISSING)
        yield Fact(path, "__dict__", name, current)
        if current is not _MISSING:
            _check(current, name)
            return
    if of_class is not None:
        _check(value, name)
        yield Fact(path, of_class, name, value)
    elif name in module._buffers:
        raise Unproven(f"reads the buffer {name}")
    elif (child := module._modules.get(name)) is not None:
        yield Fact((*path, name), "__class__", "", type(child))
    elif module._parameters.get(name) is None:
        for space in _CHILDREN:
            yield Fact(path, space, name, vars(module)[space].get(name, _MISSING))
        yield Fact(path, cls, name, _MISSING)


def _check(value: Any, name: str) -> None:
    """Raise Unproven for what may change while it stays the same object."""
    if isinstance(value, (tuple, frozenset)):
        for item in value:
            _check(item, name)
    elif isinstance(value, functools.partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            _check(item, name)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            _check(cell.cell_contents, name)
    elif not isinstance(value, (*_VALUES, *_CODE, staticmethod, classmethod)):
        raise Unproven(f"reads {name} ({type(value).__name__}), which may change unseen")


def _read_by(function: types.FunctionType, path: tuple, cls: type) -> Iterator[Fact]:
    """Globals of a function, those of other modules that it names, and attributes of classes."""
    names, attributes, codes = set(), set(), [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        attributes.update(code.co_names)
        names |= {
            i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    if any("autocast" in name for name in attributes):
        raise Unproven("decides about autocast")
    for base in cls.__mro__:  # of super() too
        if not base.__module__.startswith(("torch.", "builtins")):
            for name in attributes & set(base.__dict__):
                if isinstance(base.__dict__[name], types.FunctionType):
                    yield Fact(path, base, name, base.__dict__[name])
    spaces = [(function.__globals__, names)]
    for space, wanted in spaces:
        for name in sorted(wanted & space.keys()):
            value = space[name]
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in _KNOWN:
                    spaces.append((value.__dict__, attributes))
            elif not isinstance(value, logging.Logger):
                if not callable(value) or isinstance(value, nn.Module):
                    _check(value, name)
                yield Fact((), _Space(space), name, value)


class _Space:
    """A namespace of globals, equal by identity."""

    def __init__(self, names: dict):
        self.__dict__ = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Space) and vars(self) is vars(other)

    def __hash__(self) -> int:
        return id(vars(self))


def bound(facts: Iterable[Fact], module: nn.Module) -> Bound | None:
    """The facts at the module's objects; None if it has no such child."""
    result = Bound([], [], [])
    for path, where, name, value in facts:
        try:
            child = _child(module, path)
        except AttributeError:
            return None
        if where == "__class__":
            result.looked_up.append((_child(module, path[:-1])._modules, path[-1], child))
            result.children.append((child, value))
        elif where == "training":
            result.modes.append(child)
        else:
            if where == "__dict__":
                space = vars(child)
            else:
                space = vars(child)[where] if isinstance(where, str) else vars(where)
            result.looked_up.append((space, name, value))
    return result


_PROVEN: dict[tuple, list[tuple[list[Fact], Any]]] = {}


def proven(
    key: tuple, module: nn.Module, prove: Callable[[], tuple[list[Fact] | None, Any]]
) -> Any:
    """What `prove` found out of this module, or of one of which the same facts are true.

    key:    what the outcome depends on besides: class, pattern, shapes.
    prove:  (facts, outcome); without facts it is asked again.
    """
    outcomes = _PROVEN.setdefault(key, [])
    for facts, outcome in outcomes:
        known = bound(facts, module)
        if known is not None and known.changed(module) is None:
            return outcome
    facts, outcome = prove()
    if facts is not None:
        outcomes.append((facts, outcome))
    return outcome


_HELD = "_fq_proof"  # in the __dict__ of a module


class Held:
    """What was proven of a module, and its facts at the objects of now: `known`, or None.

    A copy of the module looks the same facts up at its own objects; a pickle is proven again.
    """

    def __init__(self, outcome: Any = None, facts: Iterable[Fact] | None = None):
        self.outcome, self.facts = outcome, facts
        self.space: dict | None = None  # the __dict__ of the module
        self.known: Bound | None = None

    def __deepcopy__(self, memo: dict) -> Held:
        return Held(self.outcome, self.facts)

    def __reduce__(self) -> tuple:
        return Held, ()

    def changed(self, module: nn.Module) -> str | None:
        """As of `Bound`."""
        return "forward" if self.known is None else self.known.changed(module)


def held(module: nn.Module, prove: Callable[[], tuple[Any, Iterable[Fact]]]) -> Held:
    """What `prove` says of a module when this is first asked.

    prove:  (outcome, facts). Raises ValueError or Unproven if the module is another by then.
    """
    current = module.__dict__.get(_HELD)
    if current is not None and current.space is module.__dict__:
        return current
    result = Held() if current is None else Held(current.outcome, current.facts)
    if result.facts is None:
        with contextlib.suppress(ValueError, Unproven):
            result.outcome, result.facts = prove()
    result.space = module.__dict__
    result.known = None if result.facts is None else bound(result.facts, module)
    module.__dict__[_HELD] = result
    return result

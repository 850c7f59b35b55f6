# SPDX-License-Identifier: Apache-2.0
"""`Reads`: what a module's forward depends on besides tensors, as facts that are checked cheaply.

The names in the code of a forward, and in the code that it reaches, say what it may read:
attributes of the module, of its children and of their classes, functions and their globals. Each is
looked up where it is, and must stay as it was. Code that may read what changes unseen (a list, a
config, a buffer) has no facts: `Unproven`.

    Reads     the facts of one module
    proven    an outcome for all modules of which the same facts are true
    held      the outcome and the facts of one module, which are looked up again in each forward
"""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensor import torch_compat
from .symbols import Unproven

_MISSING = object()
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = types.FunctionType, types.BuiltinFunctionType, type, enum.Enum, property
# Packages whose code does not change; the last two annotate tensors, and change no value.
_STABLE = "torch", "fsdp_quant", "math", "typing", "warnings"
_STABLE += "spmd_types", "torchtitan.distributed.spmd_types"
_SPACES = "__dict__", "_modules", "_parameters", "_buffers"  # of a module, that have its attributes
# Bookkeeping of nn.Module: hooks are looked at by themselves.
_OF_MODULES = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
# Names in code that reads more attributes than it names.
_UNNAMED = frozenset(
    "__dict__ vars _modules children modules named_children named_modules "
    "_buffers buffers named_buffers".split()
)


def is_defined_by(function: Callable, packages: tuple[str, ...]) -> bool:
    """The code of a function, and what it wraps, is of one of these packages: "transformers."."""
    wrapped = getattr(function, "__wrapped__", None)
    is_inside = getattr(function, "__globals__", {}).get("__name__", "").startswith(packages)
    return is_inside and (wrapped is None or is_defined_by(wrapped, packages))


def _is_stable(function: Callable) -> bool:
    """Its code is of a package whose code does not change."""
    return _is_in_stable(getattr(function, "__globals__", {}).get("__name__", "torch"))


def _is_in_stable(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{package}." for package in _STABLE))


class _Code(NamedTuple):
    """Names in the code of a function.

    globals:  those of its globals. strings: what may be names of attributes (`getattr`).
    """

    names: set[str]
    globals: set[str]
    strings: set[str]


@functools.cache
def _code_of(code: types.CodeType) -> _Code:
    """Raise Unproven for code that sets attributes, imports, or decides about autocast."""
    result, parts = _Code(set(), set(), set()), [code]
    for part in parts:
        parts += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        result.names.update(part.co_names)
        if not {"getattr", "hasattr"}.isdisjoint(part.co_names):
            strings = (c for c in part.co_consts if isinstance(c, str) and c.isidentifier())
            result.strings.update(strings)
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL"):
                raise Unproven(f"sets {instruction.argval}")
            if instruction.opname == "IMPORT_NAME":
                raise Unproven(f"imports {instruction.argval}")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                result.globals.add(instruction.argval)
    if any("autocast" in name for name in result.names):
        raise Unproven("decides about autocast")
    return result


class Reads:
    """Facts of one module, at its objects. Any code may read its names of any module it reaches.

    cls:     of the module, whose forward it is.
    leaves:  attributes that are not looked at, as layers that are called.
    code:    functions that run, the class's forward or what it calls, of whatever package.
    key:     (path of a child, what has the name, the name) -> (type, value); equal for modules of
             which the same facts are true.

    Raises Unproven for what is no fact.
    """

    def __init__(
        self,
        module: nn.Module,
        cls: type[nn.Module],
        leaves: Collection[str] = (),
        code: Iterable[Callable] = (),
    ):
        self.key: dict[tuple, tuple[type, Any]] = {}
        self.space = module.__dict__
        self._leaves = leaves
        self._looked_up: list[tuple[Mapping, str, Any]] = []
        self._modules: dict[tuple[str, ...], tuple[nn.Module, type]] = {(): (module, cls)}
        self._names, self._strings = {"forward"}, set()
        self._functions: set[Callable] = set()
        self._computes_names = False
        base = next(base for base in cls.__mro__ if "forward" in base.__dict__)
        self._record(((), base, "forward"), base.__dict__)
        for function in code:
            _check(function, "forward")
            self._add_function(function)
        size = 0
        while size != (size := len(self._names) + len(self.key)):
            for path, (child, kind) in list(self._modules.items()):
                self._look_at(path, child, kind)
        del self._modules[()]

    def changed(self, module: nn.Module) -> str | None:
        """The name of a fact that is no longer true; None: the forward computes what it did."""
        for space, name, value in self._looked_up:
            current = space.get(name, _MISSING)
            is_value = type(current) is type(value) and isinstance(value, (*_VALUES, tuple))
            if current is not value and not (is_value and current == value):
                return name
        for child, cls in self._modules.values():
            if type(child) is not cls:
                return type(child).__name__
            if torch_compat.has_hooks(child):
                return f"hooks of {cls.__name__}"
            if "training" in self._names and child.training is not module.training:
                return f"{cls.__name__}.training"
        return None

    def _look_at(self, path: tuple[str, ...], module: nn.Module, cls: type[nn.Module]) -> None:
        """Add the facts of the names that a module has."""
        if cls.__getattr__ is not nn.Module.__getattr__:
            raise Unproven("has a __getattr__ of its own")
        is_stable = _is_stable(cls.forward)
        if is_stable:
            self._names.update(getattr(cls.forward, "__code__").co_names)
        if is_stable or self._computes_names:
            attributes = (name for name in module.__dict__ if not name.startswith("_"))
            self._names.update(attributes, module._modules, module._buffers)
        for name in sorted(self._names - _OF_MODULES):
            if path or name not in self._leaves:
                self._look_up(path, module, cls, name)

    def _look_up(self, path: tuple[str, ...], module: nn.Module, cls: type, name: str) -> None:
        """Add where an attribute is, and that it is nowhere before."""
        bases = [b for b in cls.__mro__ if name in b.__dict__ and b not in (nn.Module, object)]
        for base in bases:  # super() too
            self._add((path, base, name), base.__dict__)
        for space in ("_modules", "_parameters"):
            if getattr(module, space).get(name, _MISSING) is None:
                self._add((path, space, name), getattr(module, space))
        child = module._modules.get(name)
        if name in module._buffers:
            raise Unproven(f"reads the buffer {name}")
        if child is not None:
            if (*path, name) not in self._modules:
                self._modules[(*path, name)] = child, type(child)
                self._looked_up.append((module._modules, name, child))
                self.key[path, "_modules", name] = type, type(child)
        elif name in self._strings and not hasattr(nn.Module, name):
            for space in _SPACES:
                self._add((path, space, name), getattr(module, space))
            self._add((path, cls, name), cls.__dict__)
        elif (bases or name in module.__dict__) and (path or name != "forward"):
            self._add((path, "__dict__", name), module.__dict__)  # a forward is called before ours

    def _record(self, fact: tuple, space: Mapping) -> Any:
        """Add a fact without a look at its value, which is returned."""
        value = space.get(fact[2], _MISSING)
        self.key[fact] = type(value), value
        self._looked_up.append((space, fact[2], value))
        return value

    def _add(self, fact: tuple[tuple[str, ...], Any, str], space: Mapping) -> None:
        """Add the fact that a namespace has its value of a name, or has not the name."""
        if fact in self.key:
            return
        value = self._record(fact, space)
        is_global_code = isinstance(value, _CODE) and fact[1] == id(space)
        if value is not _MISSING and not is_global_code:
            _check(value, fact[2])
        value = getattr(value, "fget", getattr(value, "__func__", value))
        function = value.func if isinstance(value, functools.partial) else value
        if isinstance(function, types.FunctionType) and not _is_stable(function):
            self._add_function(function)

    def _add_function(self, function: Callable) -> None:
        """Look at the code of a function: its names, its globals, and those of modules it names."""
        if function in self._functions:
            return
        self._functions.add(function)
        code = _code_of(getattr(function, "__code__"))
        self._names |= code.names | code.strings
        self._strings |= code.strings
        if _is_stable(function):
            return
        if unnamed := _UNNAMED & code.names:
            raise Unproven(f"reads all attributes, by {min(unnamed)}")
        self._computes_names |= "getattr" in code.names
        spaces, names = [getattr(function, "__globals__")], code.globals
        for space in spaces:
            for name in sorted(names & space.keys()):
                value = space[name]
                if isinstance(value, types.ModuleType):
                    is_new = all(vars(value) is not s for s in spaces)
                    if is_new and not _is_in_stable(value.__name__):
                        spaces.append(vars(value))
                elif not isinstance(value, logging.Logger):
                    self._add(((), id(space), name), space)
                if isinstance(value, type):
                    self._add_methods(value, code.names)
            names = code.names
        for cell in getattr(function, "__closure__") or ():
            if isinstance(content := cell.cell_contents, types.FunctionType):
                self._add_function(content)

    def _add_methods(self, cls: type, names: Collection[str]) -> None:
        """Add the functions of a class that code names."""
        for base in cls.__mro__:
            for name in sorted(base.__dict__.keys() & names):
                value = base.__dict__[name]
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType) and not _is_stable(function):
                    self._add(((), base, name), base.__dict__)


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


def probe_of(
    module: nn.Module, cls: type[nn.Module], training: bool, leaves: Collection[str] = ()
) -> nn.Module:
    """Return a copy of a module, as of class `cls`, and of its children, in this mode.

    Tensors are not copied, and neither are `leaves`, by name.
    """
    children = {
        name: child if child is None or name in leaves else probe_of(child, type(child), training)
        for name, child in module._modules.items()
    }
    probe = copy.copy(module)
    probe.__dict__ |= {"_modules": children, "training": training}
    probe.__class__ = cls
    return probe


_PROVEN: dict[tuple, Any] = {}


def proven(key: tuple, reads: Reads, prove: Callable[[], Any]) -> Any:
    """What `prove` returned for a module of which the same facts are true.

    key:  what the outcome depends on besides: class, pattern, shapes.
    """
    key = *key, frozenset(reads.key.items())
    if key not in _PROVEN:
        _PROVEN[key] = prove()
    return _PROVEN[key]


_HELD = "_fq_proof"  # in the __dict__ of a module


class Held:
    """What was proven of a module, the key of the facts then, and its facts of now, or None.

    A copy of the module looks the same facts up at its own objects; a pickle is proven again.
    """

    def __init__(self, outcome: Any = None, key: dict | None = None):
        self.outcome, self.key = outcome, key
        self.reads: Reads | None = None
        self.difference = "forward"

    def __deepcopy__(self, memo: dict) -> Held:
        return Held(self.outcome, self.key)

    def __reduce__(self) -> tuple:
        return Held, ()

    def changed(self, module: nn.Module) -> str | None:
        """As of `Reads`."""
        return self.difference if self.reads is None else self.reads.changed(module)


def held(module: nn.Module, read: Callable[[], Reads], prove: Callable[[Reads], Any]) -> Held:
    """What `prove` says of a module when this is first asked.

    read:   returns its facts. Both raise ValueError or Unproven if the module is another by then.
    """
    current = module.__dict__.get(_HELD)
    if current is not None and getattr(current.reads, "space", None) is module.__dict__:
        return current
    result = Held() if current is None else Held(current.outcome, current.key)
    with contextlib.suppress(ValueError, Unproven):
        reads = read()
        if result.key is None:
            result.outcome, result.key = prove(reads), reads.key
        if different := reads.key.items() ^ result.key.items():
            result.difference = min(fact[2] for fact, _ in different)
        else:
            result.reads = reads
    module.__dict__[_HELD] = result
    return result

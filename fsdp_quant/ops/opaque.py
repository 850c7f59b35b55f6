# SPDX-License-Identifier: Apache-2.0
"""The one place that knows whether a graph is built. Functions decorated here do what eager mode or
the graph needs; their callers do not ask.

    operator     an operator of the reference in graphs, the Python function outside
    traced_as    another function while AOTAutograd traces (inside `tracing`)
    compiled_as  another function while dynamo traces

The reference consists of torch operators. A compiler would fuse them, and fused arithmetic differs
in the last bits. So graphs hold operators that run the reference in Python, opaque to compilers,
and compute the bits of eager mode. Outside graphs the functions are called directly, which takes
tens of microseconds less per call. Kernels are operators already.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..counters import counters
from ..formats import Direction, Encoding, Format, format_of

_THREAD = threading.local()
_Function = TypeVar("_Function", bound=Callable)


def is_tracing() -> bool:
    return getattr(_THREAD, "is_tracing", False)


@contextlib.contextmanager
def _set(value: bool) -> Iterator[None]:
    before, _THREAD.is_tracing = is_tracing(), value
    try:
        yield
    finally:
        _THREAD.is_tracing = before


@contextlib.contextmanager
def tracing(enabled: bool = True) -> Iterator[None]:
    """Build a graph on this thread, if `enabled`: functions decorated here do what graphs need.
    Calls are counted when the graph runs."""
    if not enabled:
        yield
        return
    with _set(True), counters.uncounted():
        yield


def traced_as(in_graph: Callable) -> Callable[[_Function], _Function]:
    """Decorate a function or a method: while a graph is built (`tracing`), `in_graph` is called in
    its place, with the same arguments."""
    return functools.partial(_chosen, in_graph, is_tracing)


def compiled_as(in_graph: Callable) -> Callable[[_Function], _Function]:
    """Decorate a function or a method: while dynamo traces, `in_graph` is called in its place, with
    the same arguments."""
    return functools.partial(_chosen, in_graph, torch.compiler.is_compiling)


def _chosen(in_graph: Callable, asks: Callable[[], bool], eager: _Function) -> _Function:
    @functools.wraps(eager)
    def call(*args, **kwargs):
        return in_graph(*args, **kwargs) if asks() else eager(*args, **kwargs)

    return call  # type: ignore[return-value]


# Formats as strings: operators accept no Python objects, and graphs cached on disk run in other
# processes #


@functools.cache
def format_text(fmt: Format) -> str:
    fields = {f: getattr(fmt, f) for f in fmt.__dataclass_fields__ if f != "element"}
    return json.dumps(fields | {"element": fmt.element.name, "name": fmt.name})


@functools.cache
def format_from(text: str) -> Format:
    fields = json.loads(text)
    base = format_of("identity", element=fields.pop("element"))
    fields["block"] = tuple(fields["block"])
    return Format(element=base.element, **fields)


@functools.cache
def encoding_text(e: Encoding) -> str:
    return json.dumps([format_text(e.fmt), e.direction.value, e.stochastic, e.eps])


@functools.cache
def encoding_from(text: str) -> Encoding:
    fmt, direction, stochastic, eps = json.loads(text)
    return Encoding(format_from(fmt), Direction(direction), stochastic, eps)


# Operators #

_library = torch.library.Library("fsdp_quant", "FRAGMENT")


def define(schema: str, run: Callable, fake: Callable) -> Callable:
    """Define an operator without a derivative. run: its Python function; fake: its shapes."""
    name = schema.split("(")[0]

    @functools.wraps(run)
    def run_for_real(*args):
        with _set(False):
            return run(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run_for_real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_quant::{name}", fake, lib=_library)
    return getattr(torch.ops.fsdp_quant, name)


def operator(
    schema: str, fake: Callable, results: int | Callable[..., tuple] | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a function of the reference: while a graph is built, calls record the operator
    `schema`, which runs the function when the graph runs; outside graphs they call the function.

    schema:   parameters in the order of the function's. An `Encoding` is a str.
    fake:     (the function's arguments) -> empty results.
    results:  of a schema that returns Tensor[], which lists the results that exist and are no
              arguments: the number of results, of which the last may be None; or a function
              (list, the function's arguments) -> results.
    """
    returns_list = schema.endswith("[]")

    def decorate(run: _Function) -> _Function:
        parameters = inspect.signature(run).parameters.values()
        encodings = [i for i, p in enumerate(parameters) if p.annotation == "Encoding"]

        def converted(convert: Callable, args: Sequence) -> list:
            return [convert(a) if i in encodings else a for i, a in enumerate(args)]

        def run_operator(*args) -> Any:
            values = run(*converted(encoding_from, args))
            if isinstance(values, Tensor):
                return values.contiguous()
            passed = {id(a) for a in args}
            tensors = [t.contiguous() for t in values if t is not None and id(t) not in passed]
            return tensors if returns_list else tuple(tensors)

        def fake_operator(*args) -> Any:
            return fake(*converted(encoding_from, args))

        recorded = define(schema, run_operator, fake_operator)

        def record(*args) -> Any:
            values = recorded(*converted(encoding_text, args))
            if callable(results):
                return results(values, *args)
            return values if results is None else (*values, *[None] * (results - len(values)))

        return _chosen(record, is_tracing, run)

    return decorate

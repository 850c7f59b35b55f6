# SPDX-License-Identifier: Apache-2.0
"""The one place that knows whether a graph is built. Functions decorated here do what eager mode or
the graph needs; their callers do not ask.

    operator     an operator of the reference in graphs, the Python function outside
    traced_as    another function while AOTAutograd traces (inside `tracing`)
    compiled_as  another function while dynamo traces
    eager_only   nothing (None) while dynamo traces

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
from ..formats import Direction, Encoding, Format, ceil_div, format_of_facts
from . import reference, rng

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


def tracing(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Build a graph on this thread, if `enabled`: functions decorated here do what graphs need.
    Calls are counted when the graph runs."""
    return _traced() if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _traced() -> Iterator[None]:
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


eager_only = compiled_as(lambda *args, **kwargs: None)


# Formats as strings: operators accept no Python objects, and graphs cached on disk run in other
# processes #


@functools.cache
def format_text(fmt: Format) -> str:
    return json.dumps(fmt.facts())


@functools.cache
def format_from(text: str) -> Format:
    return format_of_facts(json.loads(text))


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

        recorded = define(schema, run_operator, lambda *args: fake(*converted(encoding_from, args)))

        def record(*args) -> Any:
            values = recorded(*converted(encoding_text, args))
            if callable(results):
                return results(values, *args)
            return values if results is None else (*values, *[None] * (results - len(values)))

        return _chosen(record, is_tracing, run)

    return decorate


# The reference #


def _grid(x: Tensor, e: Encoding, row0: int) -> tuple[int, int]:
    """Return how many blocks of rows and of columns x [rows, cols] overlaps."""
    rows, cols = e.fmt.padded_shape(x.shape, e.direction)
    b0, b1 = e.fmt.dims(e.direction)
    return ceil_div(row0 % b0 + rows, b0) if b0 else 1, ceil_div(cols, b1) if b1 else 1


def _fake_statistics(x: Tensor, e: Encoding, row0: int) -> list[Tensor]:
    amax = x.new_empty(_grid(x, e, row0), dtype=torch.float32)
    return [amax, _fake_tensor_amax(x, e)] if e.fmt.tensor_scale else [amax]


def _fake_tensor_amax(x: Tensor, e: Encoding) -> Tensor:
    return x.new_empty(e.fmt.tensor_scale_shape(x.shape, e.direction), dtype=torch.float32)


@operator(
    "reference_statistics(Tensor x, str encoding, SymInt row0) -> Tensor[]",
    _fake_statistics,
    results=2,
)
def statistics(x: Tensor, encoding: Encoding, row0: int) -> tuple[Tensor | None, Tensor | None]:
    return reference.statistics(reference.prepared(x, encoding), encoding, row0)


def _fake_encode(x, amax, tensor_amax, key, encode_scale, e, row0) -> list[Tensor]:
    rows, cols = e.fmt.padded_shape(x.shape, e.direction)
    grid = _grid(x, e, row0)
    outputs = [x.new_empty((rows, e.fmt.row_bytes(cols, x.dtype)), dtype=torch.uint8)]
    outputs.append(x.new_empty(grid, dtype=e.fmt.scale_dtype))
    if e.fmt.tensor_scale and tensor_amax is None:
        outputs.append(_fake_tensor_amax(x, e))
    if e.fmt.scale_leaves_contraction and amax is None:
        outputs.append(x.new_empty(grid, dtype=torch.float32))
    return outputs


def _encoded_results(results, x, amax, tensor_amax, key, encode_scale, e, row0) -> tuple:
    data, scale, *computed = results
    if e.fmt.tensor_scale and tensor_amax is None:
        tensor_amax, *computed = computed
    return data, scale, tensor_amax, computed[0] if computed else amax


@operator(
    "reference_encode(Tensor x, Tensor? amax, Tensor? tensor_amax, Tensor? key, Tensor? enc, str "
    "encoding, SymInt row0) -> Tensor[]",
    _fake_encode,
    results=_encoded_results,
)
def encode(
    x: Tensor,
    amax: Tensor | None,
    tensor_amax: Tensor | None,
    key: Tensor | None,
    encode_scale: Tensor | None,
    encoding: Encoding,
    row0: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the fields of `dispatch.Encoded`, compact. Statistics that are None are computed from
    x."""
    x, fmt = reference.prepared(x, encoding), encoding.fmt
    block_amax, known_amax = reference.of_all_parts(amax, fmt), amax
    if amax is None or (fmt.tensor_scale and tensor_amax is None):
        computed, tensor_amax_of_x = reference.statistics(x, encoding, row0)
        tensor_amax = tensor_amax_of_x if tensor_amax is None else tensor_amax
        if amax is None:
            block_amax, known_amax = computed, computed if fmt.scale_leaves_contraction else None
    if encode_scale is not None:
        encode_scale = reference.delayed_encode_scale(
            encode_scale, reference.known(block_amax, "the amax"), encoding
        )
    codes = reference.encode(x, block_amax, tensor_amax, encoding, row0, key, encode_scale)
    counters.add("quantize", (fmt.name, encoding.direction.value, "reference"))
    return *codes, tensor_amax, known_amax


@operator(
    "reference_decode(Tensor data, Tensor? scale, Tensor? tensor_amax, str encoding, SymInt cols, "
    "SymInt row0, ScalarType dtype) -> Tensor",
    lambda data, scale, tensor_amax, e, cols, row0, dtype: data.new_empty(
        (data.shape[0], cols), dtype=dtype
    ),
)
def decode(
    data: Tensor,
    scale: Tensor | None,
    tensor_amax: Tensor | None,
    encoding: Encoding,
    cols: int,
    row0: int,
    dtype: torch.dtype,
) -> Tensor:
    fmt, direction = encoding.fmt, encoding.direction
    return reference.decode(data, scale, tensor_amax, fmt, direction, cols, row0).to(dtype)


@operator("reference_column_sums(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape[1]))
def column_sums(x: Tensor) -> Tensor:
    return x.sum(0)


@operator(
    "reference_random_key(Tensor step, Tensor ids, int slot, SymInt rows, Tensor? after) -> Tensor",
    lambda step, ids, slot, rows, after: step.new_empty(5),
)
def random_key(step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None) -> Tensor:
    return rng.key_of(step, ids[slot], rows)

# SPDX-License-Identifier: Apache-2.0
"""Operators that run the reference inside graphs, opaque to compilers, so that graphs compute the
bits of eager mode.

The reference consists of torch operators. A compiler would fuse them, and fused arithmetic differs
in the last bits. While `tracing`, callers of the reference call the operators below, which run the
same functions in Python. Kernels are operators already.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..counters import counters
from ..formats import Direction, Encoding, Format, ceil_div, format_of
from . import reference, rng

_THREAD = threading.local()


@contextlib.contextmanager
def _set(value: bool) -> Iterator[None]:
    before, _THREAD.is_tracing = is_tracing(), value
    try:
        yield
    finally:
        _THREAD.is_tracing = before


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Call the operators below in place of the reference, on this thread. Calls are counted when
    the graph runs."""
    with _set(True), counters.uncounted():
        yield


def is_tracing() -> bool:
    return getattr(_THREAD, "is_tracing", False)


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


# The operators #

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


def _encode(x, amax, tensor_amax, key, enc, encoding, row0):
    e = encoding_from(encoding)
    x, outputs = reference.prepared(x, e), []
    amax = reference.of_all_parts(amax, e.fmt)
    if amax is None or (e.fmt.tensor_scale and tensor_amax is None):
        found, of_tensor = reference.statistics(x, e, row0)
        if e.fmt.tensor_scale and tensor_amax is None:
            tensor_amax = of_tensor
            outputs.append(tensor_amax)
        if amax is None:
            amax = found
            outputs += [amax] if e.fmt.scale_leaves_contraction else []
    if enc is not None:
        enc = reference.delayed_encode_scale(enc, reference.known(amax, "the amax"), e)
    outputs = [*reference.encode(x, amax, tensor_amax, e, row0, key, enc), *outputs]
    counters.add("quantize", (e.fmt.name, e.direction.value, "reference"))
    return [t.contiguous() for t in outputs]


def _grid(x: Tensor, e: Encoding, row0: int) -> tuple[int, int]:
    """Blocks that x [rows, cols] overlaps."""
    rows, cols = e.fmt.padded_shape(x.shape, e.direction)
    b0, b1 = e.fmt.dims(e.direction)
    return ceil_div(row0 % b0 + rows, b0) if b0 else 1, ceil_div(cols, b1) if b1 else 1


def _fake_encode(x, amax, tensor_amax, key, enc, encoding, row0):
    e = encoding_from(encoding)
    rows, cols = e.fmt.padded_shape(x.shape, e.direction)
    grid = _grid(x, e, row0)
    outputs = [x.new_empty((rows, e.fmt.row_bytes(cols, x.dtype)), dtype=torch.uint8)]
    outputs.append(x.new_empty(grid, dtype=e.fmt.scale_dtype))
    if e.fmt.tensor_scale and tensor_amax is None:
        outputs.append(x.new_empty(1, dtype=torch.float32))
    if e.fmt.scale_leaves_contraction and amax is None:
        outputs.append(x.new_empty(grid, dtype=torch.float32))
    return outputs


_encode_op = define(
    "reference_encode(Tensor x, Tensor? amax, Tensor? tensor_amax, Tensor? key, Tensor? enc, str "
    "encoding, SymInt row0) -> Tensor[]",
    _encode,
    _fake_encode,
)


def encode(
    x: Tensor,
    e: Encoding,
    amax: Tensor | None,
    tensor_amax: Tensor | None,
    row0: int,
    key: Tensor | None,
    enc: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(data, scale, tensor_amax, amax if one scale spans the contraction) of a quantized format.
    Statistics that are None are computed from x."""
    data, scale, *rest = _encode_op(x, amax, tensor_amax, key, enc, encoding_text(e), row0)
    if e.fmt.tensor_scale and tensor_amax is None:
        tensor_amax, *rest = rest
    return data, scale, tensor_amax, rest[0] if rest else amax


def _statistics(x, encoding, row0):
    e = encoding_from(encoding)
    return [
        t.contiguous()
        for t in reference.statistics(reference.prepared(x, e), e, row0)
        if t is not None
    ]


def _fake_statistics(x, encoding, row0):
    e = encoding_from(encoding)
    outputs = [x.new_empty(_grid(x, e, row0), dtype=torch.float32)]
    return [*outputs, x.new_empty(1, dtype=torch.float32)] if e.fmt.tensor_scale else outputs


_statistics_op = define(
    "reference_statistics(Tensor x, str encoding, SymInt row0) -> Tensor[]",
    _statistics,
    _fake_statistics,
)


def statistics(x: Tensor, e: Encoding, row0: int) -> tuple[Tensor, Tensor | None]:
    """(amax, tensor_amax) of a quantized format."""
    amax, *rest = _statistics_op(x, encoding_text(e), row0)
    return amax, rest[0] if rest else None


def _decode(data, scale, tensor_amax, encoding, cols, row0, dtype):
    e = encoding_from(encoding)
    return (
        reference.decode(data, scale, tensor_amax, e.fmt, e.direction, cols, row0)
        .to(dtype)
        .contiguous()
    )


_decode_op = define(
    "reference_decode(Tensor data, Tensor? scale, Tensor? tensor_amax, str encoding, SymInt cols, "
    "SymInt row0, ScalarType dtype) -> Tensor",
    _decode,
    lambda data, scale, tensor_amax, encoding, cols, row0, dtype: data.new_empty(
        (data.shape[0], cols), dtype=dtype
    ),
)


def decode(
    data: Tensor,
    scale: Tensor | None,
    tensor_amax: Tensor | None,
    fmt: Format,
    direction: Direction,
    cols: int,
    row0: int,
    dtype: torch.dtype,
) -> Tensor:
    return _decode_op(
        data, scale, tensor_amax, encoding_text(Encoding(fmt, direction)), cols, row0, dtype
    )


column_sums = define(
    "reference_column_sums(Tensor x) -> Tensor",
    lambda x: x.sum(0),
    lambda x: x.new_empty(x.shape[1]),
)


def key_of(step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None) -> Tensor:
    """`dispatch.random_key`; after: of a backward, so that no compiler moves it into the
    forward."""
    return rng.key_of(step, ids[slot], rows)


random_key = define(
    "reference_random_key(Tensor step, Tensor ids, int slot, SymInt rows, Tensor? after) -> Tensor",
    key_of,
    lambda step, *rest: step.new_empty(5),
)

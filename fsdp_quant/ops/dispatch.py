"""Where an operation runs: the compiled kernel when there is one for the device and format, else the reference.

Both give the same bytes. Callers pass every direction they want of one tensor together, so that a kernel
can read the tensor once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..counters import counters
from ..formats import Direction, Encoding, Format
from . import reference


class Statistics(NamedTuple):
    """amax: fp32 [block rows, block cols] or None; tensor_amax: fp32 [1] or None."""

    amax: Tensor | None
    tensor_amax: Tensor | None


class Encoded(NamedTuple):
    """The buffers of one storage (see `Storage`), and the statistics they were made from."""

    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    amax: Tensor | None


def statistics(x: Tensor, encodings: Sequence[Encoding], row0: int = 0) -> list[Statistics]:
    """Block and tensor amaxes of x [rows, cols] for each encoding; `row0` places x in the global tensor."""
    return [Statistics(*reference.statistics(reference.prepared(x, e), e, row0)) for e in encodings]


def encode(
    x: Tensor,
    encodings: Sequence[Encoding],
    stats: Sequence[Statistics],
    row0: int = 0,
    keys: Sequence[Tensor | None] | None = None,
    encs: Sequence[Tensor | None] | None = None,
) -> list[Encoded]:
    """Codes and scales of x [rows, cols], statistics known; one result an encoding."""
    results = []
    for i, (encoding, (amax, tensor_amax)) in enumerate(zip(encodings, stats)):
        values = reference.prepared(x, encoding)
        key, enc = keys[i] if keys else None, encs[i] if encs else None
        data, scale = reference.encode(values, amax, tensor_amax, encoding, row0, key, enc)
        if encoding.fmt.is_quantized:
            counters.add("quantize", (encoding.fmt.name, encoding.direction.value, "reference"))
        results.append(Encoded(data, scale, tensor_amax, amax))
    return results


def quantize(
    x: Tensor,
    encodings: Sequence[Encoding],
    keys: Sequence[Tensor | None] | None = None,
    encs: Sequence[Tensor | None] | None = None,
) -> list[Encoded]:
    """Statistics and encoding of a tensor that no other rank shares."""
    return encode(x, encodings, statistics(x, encodings), keys=keys, encs=encs)


def decode(
    data: Tensor, scale: Tensor | None, tensor_amax: Tensor | None, fmt: Format, direction: Direction,
    cols: int, row0: int = 0,
) -> Tensor:
    """element * scale (* tensor scale) in fp32 [rows, cols]; scale None leaves that factor out."""
    return reference.decode(data, scale, tensor_amax, fmt, direction, cols, row0)

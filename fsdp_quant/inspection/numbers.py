# SPDX-License-Identifier: Apache-2.0
"""What a format does to one tensor: shares that underflow and saturate, noise, range of scales.

With v the values that are encoded (rotated, where the format rotates), d what their codes decode
to, s the decode scale of each one's block:

    underflow    #(v != 0 and d == 0) / #(v != 0)
    saturation   #(v != 0 and |v| >= s * overflow) / #(v finite): they would round to a number above
                 the format's largest, had it one
    sqnr_db      10 log10(sum v^2 / sum (d - v)^2); both turned back, where the format rotates
    scale_min, scale_max    of the blocks with a value other than 0

Sums are fp64 on the tensor's device; nothing here waits for it. Of a large tensor they are of
`MOST_ELEMENTS` values, in rows that follow the golden ratio; amax, norm and scales are of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import reference
from ..quantizer import HybridQuantizer
from ..storage import Storage

MOST_ELEMENTS = 1 << 22
_GOLDEN = 0.6180339887498949

# Sums of one tensor, and of one of its directions: how those of its parts are combined.
_WHOLE = {"amax": "max", "square": "sum"}
_SIDE = {
    "signal": "sum",
    "noise": "sum",
    "nonzero": "sum",
    "zeroed": "sum",
    "finite": "sum",
    "saturated": "sum",
    "scale_min": "min",
    "scale_max": "max",
}
_COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class Measured(NamedTuple):
    """Sums of one tensor: fp64 [_WHOLE], and [_SIDE] of each direction whose codes are not the
    values."""

    whole: Tensor
    sides: dict[Direction, Tensor]


def measure(x: Tensor, storages: dict[Direction, Storage], hybrid: HybridQuantizer) -> Measured:
    """Sums of x [rows, cols], and of its compact storages."""
    sides = {}
    for direction, storage in storages.items():
        if storage.fmt.is_quantized:
            shared = direction is COLUMNWISE and hybrid.shares_storage and ROWWISE in sides
            sides[direction] = (
                sides[ROWWISE]
                if shared
                else _side(_source(x, direction, storages, hybrid), x, storage, hybrid)
            )
    return Measured(_whole(x), sides)


def measure_codes(storages: dict[Direction, Storage]) -> Measured:
    """`measure` of a tensor that is its codes: it has no values to compare them with."""
    nothing = torch.zeros(len(_SIDE) - 2, dtype=torch.float64)
    sides, decoded = {}, {d: s.decode(torch.float32) for d, s in storages.items()}
    for direction, storage in storages.items():
        if storage.fmt.is_quantized:
            made = _scale_range(_scale_of_each(storage), decoded[direction] != 0)
            sides[direction] = torch.cat([nothing.to(made.device), made])
    return Measured(_whole(next(iter(decoded.values()))), sides)


def _whole(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) if x.numel() else norm
    return torch.stack([amax.double(), norm.square()])


def _source(
    x: Tensor, direction: Direction, storages: dict[Direction, Storage], hybrid: HybridQuantizer
) -> Tensor:
    """What the codes of a direction were made of."""
    derived = direction is COLUMNWISE and hybrid.is_derived and ROWWISE in storages
    return storages[ROWWISE].dequantize(x.dtype) if derived else x


def _side(source: Tensor, x: Tensor, storage: Storage, hybrid: HybridQuantizer) -> Tensor:
    encoding = hybrid.side(storage.direction).encoding(storage.direction)
    values, decoded = reference.prepared(source, encoding).float(), storage.decode(torch.float32)
    scale = _scale_of_each(storage)
    scale_range = _scale_range(scale, values != 0)
    turned_back = storage.dequantize(torch.float32) if storage.fmt.rotated else decoded
    values, decoded, scale = (_some_rows(t) for t in (values, decoded, scale))
    x, turned_back = _some_rows(x).float(), _some_rows(turned_back)
    nonzero, finite = values != 0, values.isfinite()
    signal, noise = (
        torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in (x, turned_back - x)
    )
    counts = [
        nonzero,
        nonzero & (decoded == 0),
        finite,
        nonzero & finite & (values.abs() >= scale * storage.fmt.overflow),
    ]
    return torch.cat(
        [torch.stack([signal, noise, *(c.sum(dtype=torch.float64) for c in counts)]), scale_range]
    )


def _scale_of_each(storage: Storage) -> Tensor:
    s = storage
    return reference.scale_of_each(
        s.scale, s.tensor_amax, s.fmt, s.direction, s.padded_shape, s.row0
    )


def _scale_range(scale: Tensor, counts: Tensor) -> Tensor:
    """fp64 [least, largest] scale of the elements that count; [inf, 0] of none."""
    if not scale.numel():
        return scale.new_tensor([math.inf, 0.0], dtype=torch.float64)
    return torch.stack(
        [torch.where(counts, scale, math.inf).amin(), torch.where(counts, scale, 0.0).amax()]
    ).double()


def _some_rows(x: Tensor) -> Tensor:
    """At most `MOST_ELEMENTS` values of x, whole rows."""
    rows, wanted = x.shape[0], max(MOST_ELEMENTS // max(x.shape[1], 1), 1)
    if rows <= wanted:
        return x
    places = (
        torch.arange(wanted, device=x.device, dtype=torch.float64) * _GOLDEN % 1.0 * rows
    ).long()
    return x.index_select(0, places)


def combined(parts: Sequence[Measured]) -> Measured:
    """Sums of one tensor from those of its parts."""
    if len(parts) == 1:
        return parts[0]

    def of(tensors: list[Tensor], fields: dict[str, str]) -> Tensor:
        stacked = torch.stack([t.to(tensors[0].device) for t in tensors])
        return torch.stack(
            [_COMBINE[how](stacked[:, i], 0) for i, how in enumerate(fields.values())]
        )

    directions = [d for d in Direction if any(d in p.sides for p in parts)]
    sides = {d: of([p.sides[d] for p in parts if d in p.sides], _SIDE) for d in directions}
    return Measured(of([p.whole for p in parts], _WHOLE), sides)


def on_host(measured: Sequence[Measured]) -> list[tuple[list[float], dict[Direction, list[float]]]]:
    """The sums of each, brought to the host in one copy, which waits for the device."""
    if not measured:
        return []
    device = measured[0].whole.device
    flat = torch.cat(
        [t.to(device) for of in measured for t in (of.whole, *of.sides.values())]
    ).tolist()
    taken = iter(flat)
    return [
        (
            list(itertools.islice(taken, len(_WHOLE))),
            {d: list(itertools.islice(taken, len(_SIDE))) for d in of.sides},
        )
        for of in measured
    ]


def quantities(
    slot: str, whole: Sequence[float], sides: dict[Direction, Sequence[float]]
) -> dict[str, float]:
    """ "slot/quantity" and "slot.direction/quantity" -> number, from sums on the host; none where
    it means nothing."""
    amax, square = whole
    found = {f"{slot}/amax": amax, f"{slot}/norm": math.sqrt(square)}
    for direction, sums in sides.items():
        of, name = dict(zip(_SIDE, sums)), f"{slot}.{direction.value}"
        if of["nonzero"]:
            found[f"{name}/underflow"] = of["zeroed"] / of["nonzero"]
        if of["finite"]:
            found[f"{name}/saturation"] = of["saturated"] / of["finite"]
        if of["signal"] and not math.isnan(of["noise"]):
            found[f"{name}/sqnr_db"] = (
                10 * math.log10(of["signal"] / of["noise"]) if of["noise"] else math.inf
            )
        if math.isfinite(of["scale_min"]):
            found |= {f"{name}/scale_min": of["scale_min"], f"{name}/scale_max": of["scale_max"]}
    return found

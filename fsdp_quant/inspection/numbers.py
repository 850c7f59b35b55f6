# SPDX-License-Identifier: Apache-2.0
"""Statistics of one quantized tensor: underflow, saturation, signal to noise, range of scales.

With v the values that are encoded (rotated, if the format rotates), d their decoded codes and s the
decode scale of each element:

    underflow    #(v != 0 and d == 0) / #(v != 0)
    saturation   #(v != 0 and |v| >= s * overflow) / #(v finite): v would round above the format's
                 largest number
    sqnr_db      10 log10(sum x^2 / sum (dequantized - x)^2), in the unrotated basis
    scale_min, scale_max    over elements with v != 0

amax and norm cover the whole tensor. The rest covers at most about `MOST_ELEMENTS` values: groups
of rows, spread by the golden ratio, that cut no block. Only those rows are decoded, so a large
tensor costs two reads. Results stay on the device; nothing here waits for it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import reference
from ..quantizer import HybridQuantizer
from ..storage import Storage

MOST_ELEMENTS = 1 << 22
_GOLDEN = 0.6180339887498949

# Fields of one tensor and of one of its directions, and how those of several parts combine.
_WHOLE = {"amax": "max", "norm": "norm"}
_DIRECTION = {
    "signal": "norm",
    "noise": "norm",
    "nonzero": "sum",
    "zeroed": "sum",
    "finite": "sum",
    "saturated": "sum",
    "scale_min": "min",
    "scale_max": "max",
}
_COMBINE = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
}


class Measured(NamedTuple):
    """Statistics of one tensor, fp64: [_WHOLE], and [_DIRECTION] per quantized direction."""

    whole: Tensor
    directions: dict[Direction, Tensor]


def measure(x: Tensor, storages: dict[Direction, Storage], hybrid: HybridQuantizer) -> Measured:
    """Statistics of x [rows, cols] and of its compact storages."""
    quantized = {d: s for d, s in storages.items() if s.fmt.is_quantized}
    whole = _whole(x)
    if not quantized:
        return Measured(whole, {})
    dtype = x.dtype
    x, storages = _sampled(x, storages)
    x = x.float()
    directions: dict[Direction, Tensor] = {}
    for direction in quantized:
        if direction is COLUMNWISE and hybrid.shares_storage and ROWWISE in directions:
            directions[direction] = directions[ROWWISE]
            continue
        derived = direction is COLUMNWISE and hybrid.is_derived and ROWWISE in storages
        source = storages[ROWWISE].dequantize(dtype) if derived else x
        directions[direction] = _of_direction(source, x, storages[direction], hybrid)
    return Measured(whole, directions)


def measure_codes(storages: dict[Direction, Storage]) -> Measured:
    """`measure` of a tensor that exists only as codes: amax, norm and the range of scales."""
    directions, decoded = {}, {d: s.decode(torch.float32) for d, s in storages.items()}
    for direction, storage in storages.items():
        if storage.fmt.is_quantized:
            scale_range = _scale_range(_scale_per_element(storage), decoded[direction] != 0)
            nothing = scale_range.new_zeros(len(_DIRECTION) - len(scale_range))
            directions[direction] = torch.cat([nothing, scale_range])
    return Measured(_whole(next(iter(decoded.values()))), directions)


def _whole(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) if x.numel() else norm
    return torch.stack([amax.double(), norm])


def _of_direction(source: Tensor, x: Tensor, storage: Storage, hybrid: HybridQuantizer) -> Tensor:
    """source: the values that were encoded; x: fp32, those that the codes stand for."""
    encoding = hybrid.side(storage.direction).encoding(storage.direction)
    values, decoded = reference.prepared(source, encoding).float(), storage.decode(torch.float32)
    dequantized = storage.dequantize(torch.float32) if storage.fmt.rotated else decoded
    scale = _scale_per_element(storage)
    magnitude, nonzero = values.abs(), values != 0
    finite = magnitude < math.inf
    saturated = nonzero & finite & (magnitude >= scale * storage.fmt.overflow)
    counted = torch.stack([nonzero, nonzero & (decoded == 0), finite, saturated])
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (x, dequantized - x)]
    return torch.cat(
        [
            torch.stack(norms),
            counted.sum((1, 2), dtype=torch.float64),
            _scale_range(scale, nonzero),
        ]
    )


def _scale_per_element(storage: Storage) -> Tensor:
    s = storage
    if s.scale is None:
        raise ValueError(f"{s.describe()} has no scales to measure")
    return reference.scale_of_each(
        s.scale, s.tensor_amax, s.fmt, s.direction, s.padded_shape, s.row0
    )


def _scale_range(scale: Tensor, counts: Tensor) -> Tensor:
    """fp64 [smallest, largest] scale where `counts`; [inf, 0] where nothing does."""
    if not scale.numel():
        return scale.new_tensor([math.inf, 0.0], dtype=torch.float64)
    smallest = torch.where(counts, scale, math.inf).amin()
    return torch.stack([smallest, torch.where(counts, scale, 0.0).amax()]).double()


def _sampled(
    x: Tensor, storages: dict[Direction, Storage]
) -> tuple[Tensor, dict[Direction, Storage]]:
    """The same groups of rows of x and of its storages: about `MOST_ELEMENTS` values, or all."""
    rows, cols = x.shape
    row0 = next(iter(storages.values())).row0
    group = math.lcm(*(s.fmt.row_alignment(d) for d, s in storages.items()))
    first = -row0 % group
    groups, wanted = (rows - first) // group, max(MOST_ELEMENTS // max(group * cols, 1), 1)
    if groups <= wanted:
        return x, storages

    def sampled(storage: Storage) -> Storage:
        scale, block = storage.scale, storage.fmt.dims(storage.direction)[0]
        if scale is not None and block is not None:
            first_block = (row0 + first) // block - row0 // block
            index = _row_index(groups, wanted, group // block, first_block, x.device)
            scale = scale.index_select(0, index)
        data = storage.data.index_select(0, rows_index)
        return replace(storage, shape=(len(rows_index), cols), data=data, scale=scale, row0=0)

    rows_index = _row_index(groups, wanted, group, first, x.device)
    return x.index_select(0, rows_index), {d: sampled(s) for d, s in storages.items()}


@functools.lru_cache(maxsize=256)
def _row_index(groups: int, wanted: int, size: int, first: int, device: torch.device) -> Tensor:
    """Rows of `wanted` of the groups of `size` rows that begin at row `first`."""
    chosen = (torch.arange(wanted, dtype=torch.float64) * _GOLDEN % 1.0 * groups).long()
    return (first + chosen[:, None] * size + torch.arange(size)).flatten().to(device)


def combined(parts: Sequence[Measured]) -> Measured:
    """Statistics of one tensor from those of its parts."""
    if len(parts) == 1:
        return parts[0]

    def of(tensors: list[Tensor], fields: dict[str, str]) -> Tensor:
        stacked = torch.stack([t.to(tensors[0].device) for t in tensors])
        return torch.stack(
            [_COMBINE[how](stacked[:, i], 0) for i, how in enumerate(fields.values())]
        )

    present = [d for d in Direction if any(d in p.directions for p in parts)]
    directions = {
        d: of([p.directions[d] for p in parts if d in p.directions], _DIRECTION) for d in present
    }
    return Measured(of([p.whole for p in parts], _WHOLE), directions)


def on_host(measured: Sequence[Measured]) -> list[tuple[list[float], dict[Direction, list[float]]]]:
    """The values of each, in one copy, which waits for the device."""
    tensors = [t for of in measured for t in (of.whole, *of.directions.values())]
    if not tensors:
        return []
    values = iter(torch.cat([t.to(tensors[0].device) for t in tensors]).tolist())

    def taken(tensor: Tensor) -> list[float]:
        return list(itertools.islice(values, len(tensor)))

    return [(taken(of.whole), {d: taken(t) for d, t in of.directions.items()}) for of in measured]


def quantities(
    slot: str, whole: Sequence[float], directions: Mapping[Direction, Sequence[float]]
) -> dict[str, float]:
    """ "slot/quantity" and "slot.direction/quantity" -> number; undefined ones are left out."""
    found = {f"{slot}/{field}": value for field, value in zip(_WHOLE, whole)}
    for direction, values in directions.items():
        of, name = dict(zip(_DIRECTION, values)), f"{slot}.{direction.value}"
        if of["nonzero"]:
            found[f"{name}/underflow"] = of["zeroed"] / of["nonzero"]
        if of["finite"]:
            found[f"{name}/saturation"] = of["saturated"] / of["finite"]
        if of["signal"] and not math.isnan(of["noise"]):
            found[f"{name}/sqnr_db"] = (
                20 * math.log10(of["signal"] / of["noise"]) if of["noise"] else math.inf
            )
        if math.isfinite(of["scale_min"]):
            found |= {f"{name}/scale_min": of["scale_min"], f"{name}/scale_max": of["scale_max"]}
    return found

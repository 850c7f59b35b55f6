# SPDX-License-Identifier: Apache-2.0
"""Compute statistics of one quantized tensor: underflow, saturation, signal to noise, range of
scales.

With v the values that are encoded (rotated, if the format rotates), d their decoded codes and s the
decode scale of each element:

    underflow    #(v != 0 and d == 0) / #(v != 0)
    saturation   #(v != 0 and |v| >= s * overflow) / #(v finite); such a v would round above the
                 format's largest number
    sqnr_db      10 log10(sum x^2 / sum (dequantized - x)^2), in the unrotated basis
    scale_min, scale_max    over elements with v != 0

amax and norm cover the whole tensor. The other statistics sample at most about `MOST_ELEMENTS`
values: groups of rows, spread by the golden ratio, that cut no block. Only those rows are decoded,
so a large tensor costs two reads. Results stay on the device, and only `on_host` and `to_host` wait
for it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import reference
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.weight_state import WeightQuantizer

MOST_ELEMENTS = 1 << 22
_GOLDEN = 0.6180339887498949

# Fields of one tensor and of one of its directions -> how the fields of several parts combine.
_COUNTS = ("nonzero", "zeroed", "finite", "saturated")
_WHOLE = {"amax": torch.amax, "norm": torch.linalg.vector_norm}
_DIRECTION = {
    "signal": torch.linalg.vector_norm,
    "noise": torch.linalg.vector_norm,
    **dict.fromkeys(_COUNTS, torch.sum),
    "scale_min": torch.amin,
    "scale_max": torch.amax,
}

Row = dict[str, float]  # field -> value on the host


class Measured(NamedTuple):
    """Statistics of one tensor, on its device and in the dtypes in which they were computed.

    whole:       one tensor per field of `_WHOLE`, each of one element.
    directions:  index of each quantized direction in the tensors of `fields`.
    fields:      names of fields of `_DIRECTION` -> [fields, directions]. Fields that a tensor of
                 codes lacks are omitted.
    """

    whole: tuple[Tensor, ...]
    directions: dict[Direction, int]
    fields: dict[tuple[str, ...], Tensor]


class OnHost(NamedTuple):
    """A `Measured` copied to the host."""

    whole: Row
    directions: dict[Direction, Row]


def measure(x: Tensor, storages: dict[Direction, Storage], hybrid: WeightQuantizer) -> Measured:
    """Compute statistics of x [rows, cols] and of its compact storages.

    Directions whose values have the same shape are measured by the same operators.
    """
    quantized = [d for d, s in storages.items() if s.fmt.is_quantized]
    whole = _whole(x)
    if not quantized:
        return Measured(whole, {}, {})
    dtype = x.dtype
    x, storages = _sampled(x, storages)
    values = x.float()
    shared = hybrid.shares_storage and len(quantized) == 2
    by_shape: dict[torch.Size, list[tuple[Direction, Tensor]]] = {}
    for direction in [ROWWISE] if shared else quantized:
        source = values
        if direction is COLUMNWISE and hybrid.is_derived and ROWWISE in storages:
            source = storages[ROWWISE].dequantize(dtype)
        encoding = hybrid.side(direction).encoding(direction)
        source = reference.prepared(source, encoding).float()
        by_shape.setdefault(source.shape, []).append((direction, source))
    per_shape = [
        _of_directions(values, [(source, storages[d]) for d, source in of])
        for of in by_shape.values()
    ]
    order = [direction for of in by_shape.values() for direction, _ in of]
    fields = per_shape[0]
    if len(per_shape) > 1:
        fields = {k: torch.cat([m[k] for m in per_shape], -1) for k in fields}
    return Measured(whole, {d: 0 if shared else order.index(d) for d in quantized}, fields)


def measure_codes(storages: dict[Direction, Storage]) -> Measured:
    """Compute statistics of a tensor that exists only as codes: amax, norm and range of scales."""
    quantized = [d for d, s in storages.items() if s.fmt.is_quantized]
    decoded = {d: s.decode(torch.float32) for d, s in storages.items()}
    ranges = [
        _scale_range(_scale_per_element(storages[d])[None], decoded[d] == 0) for d in quantized
    ]
    fields = {k: torch.cat([of[k] for of in ranges], -1) for k in ranges[0]} if ranges else {}
    whole = _whole(next(iter(decoded.values())))
    return Measured(whole, {d: i for i, d in enumerate(quantized)}, fields)


def _whole(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    if not x.numel():
        return norm, norm
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32), norm


def _of_directions(x: Tensor, of: list[tuple[Tensor, Storage]]) -> dict[tuple[str, ...], Tensor]:
    """Compute the fields of directions whose encoded values have the same shape.

    x:   fp32, the values that the codes represent.
    of:  per direction, the values that were encoded, fp32, and their storage.
    """
    storages = [storage for _, storage in of]
    decodes = [s.decode(torch.float32) for s in storages]
    decoded = _stacked(decodes)
    dequantized = decoded
    if any(s.fmt.rotated for s in storages):
        dequantized = _stacked(
            [s.dequantize(torch.float32) if s.fmt.rotated else d for s, d in zip(storages, decodes)]
        )
    values = of[0][0][None]
    if any(source is not of[0][0] for source, _ in of):
        values = _stacked([source for source, _ in of])
    scale = _stacked([_scale_per_element(s) for s in storages])
    zero, magnitude = values == 0, values.abs()
    nonzero, finite = ~zero, magnitude < math.inf
    overflow = {s.fmt.overflow for s in storages}
    if len(overflow) == 1:
        limit = scale * overflow.pop()
    else:
        limit = _stacked([part * s.fmt.overflow for part, s in zip(scale, storages)])
    saturated = (magnitude >= limit) & (finite & nonzero)
    zeroed = nonzero & (decoded == 0)
    counted = torch.stack(torch.broadcast_tensors(nonzero, zeroed, finite, saturated))
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    return {
        ("signal",): norm(x)[None, None].expand(1, len(of)),
        ("noise",): norm(dequantized - x, dim=(1, 2))[None],
        _COUNTS: counted.sum((2, 3), dtype=torch.float64),
        **_scale_range(scale, zero),
    }


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stack to [directions, rows, cols]; a view if there is one tensor."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _scale_per_element(storage: Storage) -> Tensor:
    s = storage
    if s.scale is None:
        raise ValueError(f"{s.describe()} has no scales to measure")
    if s.fmt.scale != "e8m0":
        return reference.scale_of_each(
            s.scale, s.tensor_amax, s.fmt, s.direction, s.padded_shape, s.row0
        )
    ones = torch.ones((), dtype=torch.float32, device=s.scale.device).expand(s.padded_shape)
    powers = _powers_of_two(s.scale.device)[s.scale.int()]
    return reference.scaled_by_block(ones, powers, s.fmt, s.direction, s.row0)


@functools.lru_cache(maxsize=16)
@torch_compat.outside_modes()
def _powers_of_two(device: torch.device) -> Tensor:
    """Return the values of the 256 e8m0 codes. Indexing this table is one operator per tensor;
    decoding is ten."""
    return reference.power_of_two(torch.arange(256, dtype=torch.uint8, device=device))


def _scale_range(scale: Tensor, zero: Tensor) -> dict[tuple[str, ...], Tensor]:
    """Compute the smallest and largest scale, each [1, directions], of the elements that are not
    `zero`; inf and 0 if all are.

    scale:  [directions, rows, cols].
    """
    if not scale.numel():
        empty = scale.new_zeros(1, len(scale))
        return {("scale_min",): empty + math.inf, ("scale_max",): empty}
    smallest = scale.masked_fill(zero, math.inf).amin((1, 2))
    largest = scale.masked_fill(zero, 0.0).amax((1, 2))
    return {("scale_min",): smallest[None], ("scale_max",): largest[None]}


def _sampled(
    x: Tensor, storages: dict[Direction, Storage]
) -> tuple[Tensor, dict[Direction, Storage]]:
    """Select the same groups of rows of x and of its storages: about `MOST_ELEMENTS` values, or
    all."""
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
@torch_compat.outside_modes()
def _row_index(groups: int, wanted: int, size: int, first: int, device: torch.device) -> Tensor:
    """Return the row indices of `wanted` groups, chosen from `groups` of `size` rows each from row
    `first` on."""
    chosen = (
        torch.arange(wanted, dtype=torch.float64, device="cpu") * _GOLDEN % 1.0 * groups
    ).long()
    return (
        (first + chosen[:, None] * size + torch.arange(size, dtype=torch.int64, device="cpu"))
        .flatten()
        .to(device)
    )


def on_host(measured: Sequence[Measured]) -> list[OnHost]:
    """Copy the values of each to the host, in one copy per dtype. Waits for the device."""
    values = iter(to_host([t for of in measured for t in (*of.whole, *of.fields.values())]))
    found = []
    for of in measured:
        whole = {name: value for name, (value,) in zip(_WHOLE, values)}
        fields: dict[str, list[float]] = {}
        for names, flat in zip(of.fields, values):
            size = len(flat) // len(names)
            fields |= {name: flat[i * size : (i + 1) * size] for i, name in enumerate(names)}
        rows = {
            d: {name: fields[name][i] if name in fields else 0.0 for name in _DIRECTION}
            for d, i in of.directions.items()
        }
        found.append(OnHost(whole, rows))
    return found


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Copy the elements of each tensor to the host, in one concatenation and one copy per device
    and dtype. Waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.device, t.dtype), []).append(i)
    found: list[list[float]] = [[] for _ in tensors]
    for indices in groups.values():
        values = iter(torch.cat([tensors[i].reshape(-1) for i in indices]).tolist())
        for i in indices:
            found[i] = list(itertools.islice(values, tensors[i].numel()))
    return found


def combined(parts: Sequence[OnHost]) -> OnHost:
    """Combine the statistics of the parts of one tensor."""
    if len(parts) == 1:
        return parts[0]

    def of(rows: list[Row], fields: Mapping[str, Callable[[Tensor], Tensor]]) -> Row:
        values = {name: [row[name] for row in rows] for name in fields}
        return {
            name: combine(torch.tensor(values[name], dtype=torch.float64, device="cpu")).item()
            for name, combine in fields.items()
        }

    present = [d for d in Direction if any(d in p.directions for p in parts)]
    directions = {
        d: of([p.directions[d] for p in parts if d in p.directions], _DIRECTION) for d in present
    }
    return OnHost(of([p.whole for p in parts], _WHOLE), directions)


def quantities(
    slot: str, whole: Mapping[str, float], directions: Mapping[Direction, Row]
) -> dict[str, float]:
    """Return "slot/quantity" and "slot.direction/quantity" -> number, without undefined ones."""
    found = {f"{slot}/{field}": value for field, value in whole.items()}
    for direction, of in directions.items():
        name = f"{slot}.{direction.value}"
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

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

# Fields of one tensor, and of one of its directions -> how the fields of several parts combine.
_COUNTS = ("nonzero", "zeroed", "finite", "saturated")
_TENSOR = {"amax": torch.amax, "norm": torch.linalg.vector_norm}
_DIRECTION = {
    "signal": torch.linalg.vector_norm,
    "noise": torch.linalg.vector_norm,
    **dict.fromkeys(_COUNTS, torch.sum),
    "scale_min": torch.amin,
    "scale_max": torch.amax,
}

Row = dict[str, float]  # field -> value on the host


class Measured(NamedTuple):
    """Statistics of one tensor, on its device.

    totals:   one element per field of `_TENSOR`.
    columns:  quantized direction -> its column of `fields`.
    fields:   fp64 [fields of `_DIRECTION`, columns]; zeros for those that a tensor of codes lacks.
    """

    totals: tuple[Tensor, Tensor]
    columns: dict[Direction, int]
    fields: Tensor


class OnHost(NamedTuple):
    """A `Measured` copied to the host."""

    totals: Row
    directions: dict[Direction, Row]


def measure(x: Tensor, storages: dict[Direction, Storage], hybrid: WeightQuantizer) -> Measured:
    """Compute statistics of x [rows, cols] and of its compact storages.

    Directions whose values have the same shape are measured by the same operators.
    """
    quantized = [d for d, s in storages.items() if s.fmt.is_quantized]
    totals = _totals(x)
    if not quantized:
        return Measured(totals, {}, totals[1].new_zeros(len(_DIRECTION), 0))
    dtype = x.dtype
    x, storages = _sampled(x, storages)
    values = x.float()
    is_shared = hybrid.shares_storage and len(quantized) == 2
    by_shape: dict[torch.Size, dict[Direction, Tensor]] = {}
    for direction in [ROWWISE] if is_shared else quantized:
        source = values
        if direction is COLUMNWISE and hybrid.is_derived and ROWWISE in storages:
            source = storages[ROWWISE].dequantize(dtype)
        source = reference.prepared(source, hybrid.side(direction).encoding(direction)).float()
        by_shape.setdefault(source.shape, {})[direction] = source
    fields = [
        _fields(values, list(sources.values()), [storages[d] for d in sources])
        for sources in by_shape.values()
    ]
    order = [direction for sources in by_shape.values() for direction in sources]
    columns = {d: 0 if is_shared else order.index(d) for d in quantized}
    return Measured(totals, columns, torch.cat(fields, -1) if len(fields) > 1 else fields[0])


def measure_codes(storages: dict[Direction, Storage]) -> Measured:
    """Compute statistics of a tensor that exists only as codes: amax, norm and range of scales."""
    decoded = {d: s.decode(torch.float32) for d, s in storages.items()}
    totals = _totals(next(iter(decoded.values())))
    quantized = [d for d, s in storages.items() if s.fmt.is_quantized]
    fields = totals[1].new_zeros(len(_DIRECTION), len(quantized))
    for i, d in enumerate(quantized):
        fields[-2:, i : i + 1] = torch.cat(
            _scale_range(_scale_per_element(storages[d])[None], decoded[d] == 0)
        )
    return Measured(totals, {d: i for i, d in enumerate(quantized)}, fields)


def _totals(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    if not x.numel():
        return norm, norm
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32), norm


def _fields(x: Tensor, sources: list[Tensor], storages: list[Storage]) -> Tensor:
    """Return [fields of `_DIRECTION`, directions] of directions whose encoded values have the same
    shape.

    x:        fp32, the values that the codes represent.
    sources:  per direction, the values that were encoded, fp32.
    """
    decodes = [s.decode(torch.float32) for s in storages]
    decoded = dequantized = _stacked(decodes)
    if any(s.fmt.rotated for s in storages):
        dequantized = _stacked(
            [s.dequantize(torch.float32) if s.fmt.rotated else d for s, d in zip(storages, decodes)]
        )
    values = sources[0][None]
    if any(source is not sources[0] for source in sources):
        values = _stacked(sources)
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
    return torch.cat(
        [
            norm(x).expand(1, len(storages)),
            norm(dequantized - x, dim=(1, 2))[None],
            counted.sum((2, 3), dtype=torch.float64).expand(-1, len(storages)),
            *_scale_range(scale, zero),
        ]
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stack to [directions, rows, cols]; a view if there is one tensor."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _scale_per_element(storage: Storage) -> Tensor:
    s, scales = storage, storage.scales
    if s.fmt.scale == "e8m0":
        factor = _powers_of_two(scales.device)[scales.int()]
    else:
        factor = reference.decode_scale(scales, s.fmt)
        if s.tensor_amax is not None:
            second = reference.tensor_decode_scale(s.tensor_amax, s.fmt)
            factor = factor * reference.of_each_line(second, s.fmt, s.direction)
    ones = torch.ones((), dtype=torch.float32, device=scales.device).expand(s.padded_shape)
    return reference.scaled_by_block(ones, factor, s.fmt, s.direction, s.row0)


@functools.lru_cache(maxsize=16)
@torch_compat.outside_modes()
def _powers_of_two(device: torch.device) -> Tensor:
    """Return the values of the 256 e8m0 codes. Indexing this table is one operator per tensor;
    decoding is ten."""
    return reference.power_of_two(torch.arange(256, dtype=torch.uint8, device=device))


def _scale_range(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest scale, each [1, directions], of the elements that are not
    `zero`; inf and 0 if all are.

    scale:  [directions, rows, cols].
    """
    if not scale.numel():
        empty = scale.new_zeros(1, len(scale))
        return empty + math.inf, empty
    smallest = scale.masked_fill(zero, math.inf).amin((1, 2))
    largest = scale.masked_fill(zero, 0.0).amax((1, 2))
    return smallest[None], largest[None]


def _sampled(
    x: Tensor, storages: dict[Direction, Storage]
) -> tuple[Tensor, dict[Direction, Storage]]:
    """Select the same groups of rows of x and its storages: all, or about `MOST_ELEMENTS`."""
    rows, cols = x.shape
    row0 = next(iter(storages.values())).row0
    group = math.lcm(*(s.fmt.row_alignment(d) for d, s in storages.items()))
    first = -row0 % group
    groups, selected = (rows - first) // group, max(MOST_ELEMENTS // max(group * cols, 1), 1)
    if groups <= selected:
        return x, storages

    def sampled(storage: Storage) -> Storage:
        scale, block = storage.scale, storage.fmt.dims(storage.direction)[0]
        if scale is not None and block is not None:
            first_block = (row0 + first) // block - row0 // block
            index = _row_index(groups, selected, group // block, first_block, x.device)
            scale = scale.index_select(0, index)
        data = storage.data.index_select(0, rows_index)
        return replace(storage, shape=(len(rows_index), cols), data=data, scale=scale, row0=0)

    rows_index = _row_index(groups, selected, group, first, x.device)
    return x.index_select(0, rows_index), {d: sampled(s) for d, s in storages.items()}


@functools.lru_cache(maxsize=256)
@torch_compat.outside_modes()
def _row_index(groups: int, selected: int, size: int, first: int, device: torch.device) -> Tensor:
    """Return the row indices of `selected` of `groups` groups of `size` rows each from row `first`
    on."""
    count = functools.partial(torch.arange, device="cpu")
    chosen = (count(selected, dtype=torch.float64) * _GOLDEN % 1.0 * groups).long()
    rows = first + chosen[:, None] * size + count(size, dtype=torch.int64)
    return rows.flatten().to(device)


def on_host(measured: Sequence[Measured]) -> list[OnHost]:
    """Copy the values of each to the host, in one copy per device. Waits for the device."""
    values = iter(to_host([t for m in measured for t in (*m.totals, m.fields)]))
    rows = []
    for m, (amax,), (norm,), fields in zip(measured, values, values, values):
        # rows of `fields` follow one another, so a column is every n-th value
        directions = {
            d: dict(zip(_DIRECTION, fields[i :: m.fields.shape[1]])) for d, i in m.columns.items()
        }
        rows.append(OnHost({"amax": amax, "norm": norm}, directions))
    return rows


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Copy the elements of each tensor to the host, in one concatenation and one copy per device.
    Waits for the device."""
    values: list[list[float]] = [[] for _ in tensors]
    for device in {t.device for t in tensors}:
        indices = [i for i, t in enumerate(tensors) if t.device == device]
        flat = iter(torch.cat([tensors[i].reshape(-1) for i in indices]).tolist())
        for i in indices:
            values[i] = list(itertools.islice(flat, tensors[i].numel()))
    return values


def combined(parts: Sequence[OnHost]) -> OnHost:
    """Combine the statistics of the parts of one tensor."""
    if len(parts) == 1:
        return parts[0]
    directions = {}
    for d in Direction:
        if rows := [p.directions[d] for p in parts if d in p.directions]:
            directions[d] = _combined_rows(rows, _DIRECTION)
    return OnHost(_combined_rows([p.totals for p in parts], _TENSOR), directions)


def _combined_rows(rows: list[Row], fields: Mapping[str, Callable[[Tensor], Tensor]]) -> Row:
    values = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float64, device="cpu")
        for name in fields
    }
    return {name: combine(values[name]).item() for name, combine in fields.items()}


def quantities(
    slot: str, totals: Mapping[str, float], directions: Mapping[Direction, Row]
) -> dict[str, float]:
    """Return "slot/quantity" and "slot.direction/quantity" -> number, without undefined ones."""
    numbers = {f"{slot}/{field}": value for field, value in totals.items()}
    for direction, row in directions.items():
        name = f"{slot}.{direction.value}"
        if row["nonzero"]:
            numbers[f"{name}/underflow"] = row["zeroed"] / row["nonzero"]
        if row["finite"]:
            numbers[f"{name}/saturation"] = row["saturated"] / row["finite"]
        if row["signal"] and not math.isnan(row["noise"]):
            numbers[f"{name}/sqnr_db"] = (
                20 * math.log10(row["signal"] / row["noise"]) if row["noise"] else math.inf
            )
        if math.isfinite(row["scale_min"]):
            numbers |= {f"{name}/{field}": row[field] for field in ("scale_min", "scale_max")}
    return numbers

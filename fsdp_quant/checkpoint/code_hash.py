# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of codes, which do not depend on how ranks shard them."""

from __future__ import annotations

import functools
import zlib
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..storage import Storage
from ..tensor.agreement import axes_of
from ..tensor.rendezvous import meet
from .weights import prepared

_CHUNK_WORDS = 1 << 22  # hashed at once


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, on int64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))  # signed
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _words(buffer: Tensor, packed: bool) -> Tensor:
    """int64 [rows, words]: one word per element, or per eight bytes if `packed`."""
    rows = buffer.contiguous().view(buffer.shape[0], prod(buffer.shape[1:]))
    if not packed:
        return rows.view(torch.int32).long() if rows.itemsize == 4 else rows.long()
    rows = rows.view(torch.uint8)
    return F.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)


def fingerprint(
    storage: Storage,
    parts: tuple[int, int] = (1, 1),
    part: tuple[int, int] = (0, 0),
    part_rows: int = 0,
) -> Tensor:
    """int64 []: hash of a storage's rows. Summed over the shards of a tensor, modulo 2^64, it is
    the hash of the whole.

    The sum over words (64 bits of codes, or a scale) of a hash of (buffer, global position, word).
    The shard with a block's first row counts its scales.

    parts, part:  number of parts that tensor parallelism cuts the tensor into (along rows, along
                  columns), and the one that this storage is of. If no block or word is cut, the
                  sum over all parts is the hash of the uncut tensor.
    part_rows:    rows per part.
    """
    total = storage.data.new_zeros((), dtype=torch.int64)
    if storage.shape[0] == 0:
        return total
    row0 = storage.row0 + part[0] * part_rows
    block_rows = storage.fmt.dims(storage.direction)[0]
    rows_per_entry = {"data": 1, "scale": block_rows, "tensor_amax": None}
    positions = functools.partial(torch.arange, dtype=torch.int64, device=storage.data.device)
    for name, buffer in storage.buffers().items():
        block = rows_per_entry[name]
        if block is None and (row0 or (part[1] and buffer.numel() == 1)):
            continue  # belongs to the whole tensor: counted with its first row
        first, cut = divmod(row0, block or 1)
        if cut:
            first, buffer = first + 1, buffer[1:]
        words = _words(buffer, packed=name == "data")
        salt = zlib.crc32(f"{storage.direction.value}.{name}".encode()) << 31
        column = part[1] * words.shape[1] + positions(words.shape[1])
        step = max(1, _CHUNK_WORDS // max(1, words.shape[1]))
        width = words.shape[1] * parts[1]
        for start in range(0, words.shape[0], step):
            piece = words[start : start + step]
            row = first + start + positions(piece.shape[0])
            total += _mixed(piece ^ _mixed(row[:, None] * width + column + salt)).sum()
    return total


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Weight name -> fingerprint of its codes in every direction, the same on every rank and for
    every world size.

    Every rank must call it: a SUM all-reduce per shard group and per group of tensor parallelism,
    an all-gather per group of experts.
    """
    sums: dict[str, Tensor] = {}
    shards: dict[dist.ProcessGroup, list[str]] = {}
    by_parts: dict[dist.ProcessGroup, list[str]] = {}
    meet(axes_of(model))
    experts: dict[dist.ProcessGroup, list[tuple[str, int]]] = {}
    for w in prepared(model):
        group, parts, part, part_rows = w.piece.state.tensor_group, (1, 1), (0, 0), 0
        if group is not None:
            if w.piece.state.tensor_dim == 1:
                parts, part = (1, group.size()), (0, group.rank())
            else:
                parts, part, part_rows = (group.size(), 1), (group.rank(), 0), w.rows
            by_parts.setdefault(group, []).append(w.name)
        total = torch.zeros((), dtype=torch.int64, device=w.device)
        for storage in w.storages() if w.piece.values.shape[0] else ():
            total = total + fingerprint(storage, parts, part, part_rows)
        sums[w.name] = total
        if w.managed is not None and (group := w.managed.process_group) is not None:
            shards.setdefault(group, []).append(w.name)
        if w.experts is not None:
            experts.setdefault(w.experts[0], []).append((w.name, w.experts[1]))
    for group, names in [*shards.items(), *by_parts.items()]:
        together = torch.stack([sums[n] for n in names])
        dist.all_reduce(together, group=group)
        sums.update(zip(names, together))
    for group, matrices in experts.items():
        together = torch.stack([sums[n] for n, _ in matrices])
        of_ranks = [torch.empty_like(together) for _ in range(group.size())]
        dist.all_gather(of_ranks, together, group=group)
        for r, values in enumerate(of_ranks):
            for (name, count), value in zip(matrices, values):
                weight, _, e = name.rpartition(".")
                sums[f"{weight}.{int(e) + (r - group.rank()) * count}"] = value
    return {name: int(value) for name, value in sums.items()}

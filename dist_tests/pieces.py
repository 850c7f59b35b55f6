# SPDX-License-Identifier: Apache-2.0
"""The operators that cast pieces, in PyTorch on the CPU: what kernels do with the tables of
`CastPlan`, through their pointers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.virtual import LoneRank, alone
from fsdp_quant.formats import SCALE_DTYPE, Encoding, ceil_div
from fsdp_quant.hooks import ShardMap, SyncItem, WeightSync, plan_weight_sync
from fsdp_quant.ops import native, reference
from fsdp_quant.ops.layout import unpack
from fsdp_quant.quantizer import HybridQuantizer
from fsdp_quant.tensor.quantized_weight import QuantizedWeightState

TILE, CHUNK = 128, 2048
_POINTER, _INT = ctypes.c_int64, ctypes.c_int32


class PieceBuffers(ctypes.Structure):
    _fields_ = [
        *(
            (name, _POINTER)
            for name in (
                "data",
                "scale",
                "amax",
                "cut_amax0",
                "cut_amax1",
                "tensor_amax",
                "enc",
                "first",
                "last",
            )
        ),
        *((name, _INT) for name in ("lines", "length", "across")),
        *((name, _INT * 2) for name in ("cut_row", "own", "early", "rows")),
        *((name, _INT) for name in ("all_amaxes", "vectors", "second")),
    ]

    def amaxes(self, block_row: int, count: int) -> Tensor:
        """fp32 [count]: the collected amaxes of a block row."""
        for cut, address in zip(self.cut_row, (self.cut_amax0, self.cut_amax1)):
            if block_row == cut:
                return memory(address, count, torch.float32)
        return memory(self.amax + 4 * block_row * self.across, count, torch.float32)


class Piece(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER),
        ("first", _POINTER),
        ("last", _POINTER),
        ("rows", _INT),
        ("cols", _INT),
        ("narrow", _INT),
        ("vectors", _INT),
        ("side", PieceBuffers * 2),
    ]

    def values(self) -> Tensor:
        """bf16 [rows, cols], zeros in place of what others hold."""
        dtype = torch.bfloat16 if self.narrow else torch.float32
        whole = torch.zeros(self.rows * self.cols, dtype=dtype)
        whole[self.first : self.last] = memory(
            self.x + self.first * dtype.itemsize, self.last - self.first, dtype
        )
        return whole.to(torch.bfloat16).view(self.rows, self.cols)


class ScaleSegment(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("source", "out", "tensor_amax", "enc", "record", "count")),
        ("narrow", _INT),
        ("side", _INT),
    ]


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    assert count == 0 or address > 0, "a table points nowhere"
    raw = (
        (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address) if count else bytearray()
    )
    return torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _rows(table: Tensor, of: type) -> list:
    size, raw = ctypes.sizeof(of), bytes(table.view(torch.uint8).flatten().tolist())
    assert table.shape[1] * table.element_size() == size
    return [of.from_buffer_copy(raw, size * i) for i in range(len(table))]


def _larger(into: Tensor, values: Tensor) -> None:
    into.view(torch.int32).copy_(torch.maximum(into.view(torch.int32), values.view(torch.int32)))


def _blocks(encoding: Encoding, shape: tuple[int, int]) -> tuple[int, int]:
    return tuple(
        block or extent for block, extent in zip(encoding.fmt.dims(encoding.direction), shape)
    )


def _collect(x: Tensor, rows: slice, cols: slice, side: PieceBuffers, encoding: Encoding) -> None:
    tile = torch.zeros_like(x)
    tile[rows, cols] = x[rows, cols]
    amax, tensor_amax = reference.statistics(tile, encoding, 0)
    b0, b1 = _blocks(encoding, x.shape)
    spans = encoding.fmt.scale_leaves_contraction
    for block_row in range(rows.start // b0, ceil_div(rows.stop, b0)):
        if spans and amax[block_row].count_nonzero():
            _larger(side.amaxes(block_row, side.across), amax[block_row])
        elif not spans and (side.all_amaxes or block_row in side.cut_row):
            at = slice(cols.start // b1, ceil_div(cols.stop, b1))
            side.amaxes(block_row, side.across)[at] = amax[block_row, at]
    if tensor_amax is not None:
        _larger(memory(side.tensor_amax, 1, torch.float32), tensor_amax)


def _encode(
    x: Tensor, rows: slice, cols: slice, side: PieceBuffers, encoding: Encoding, second: bool
) -> None:
    fmt, (b0, b1) = encoding.fmt, _blocks(encoding, x.shape)
    amax, _ = reference.statistics(x, encoding, 0)
    for block_row in range(side.rows[0] // b0, ceil_div(side.rows[1], b0)):
        if fmt.scale_leaves_contraction or block_row in side.cut_row:
            amax[block_row] = side.amaxes(block_row, side.across)
    tensor_amax = memory(side.tensor_amax, 1, torch.float32) if fmt.tensor_scale else None
    enc = (
        reference.delayed_encode_scale(memory(side.enc, 1, torch.float32), amax, encoding)
        if side.enc
        else None
    )
    data, scale = reference.encode(x, amax, tensor_amax, encoding, 0, None, enc)
    made = torch.zeros(x.shape, dtype=torch.bool)
    made[rows, cols] = True
    made[side.early[0] : side.early[1]] &= not second
    if not second:
        made[: side.early[0]] = made[side.early[1] :] = False
    made = made.flatten()
    made[: side.first], made[side.last :] = False, False
    if fmt.element.bits == 8:
        into = memory(side.data + side.first, side.last - side.first, torch.uint8)
        at = made[side.first : side.last]
        into[at] = data.view(torch.uint8).flatten()[side.first : side.last][at]
    else:
        codes = torch.where(made, unpack(data, 4)[:, : x.shape[1]].flatten(), 0).view(-1, 2)
        first, end = side.first // 2, ceil_div(side.last, 2)
        at = made.view(-1, 2).any(1)[first:end]
        memory(side.data + first, end - first, torch.uint8)[at] = (codes[:, 0] | codes[:, 1] << 4)[
            first:end
        ][at]
    for block_row in range(rows.start // b0, ceil_div(rows.stop, b0)) if side.scale else ():
        if side.own[0] <= block_row * b0 < side.own[1]:
            at = slice(cols.start // b1, ceil_div(cols.stop, b1))
            address = side.scale + (block_row * side.across + at.start) * scale.element_size()
            memory(address, at.stop - at.start, scale.dtype).copy_(scale[block_row, at])


def cast_pieces(pieces: Tensor, tiles: Tensor, row, col, second: bool, skip: Tensor | None) -> None:
    """See `native.cast_pieces`."""
    table = _rows(pieces, Piece)
    assert len({tuple(t[:3]) for t in tiles.tolist()}) == len(tiles), "a tile is made twice"
    for index, tile_row, tile_col, work in tiles.tolist() if skip is None or not skip else ():
        piece = table[index]
        x = piece.values()
        rows = slice(tile_row * TILE, min((tile_row + 1) * TILE, piece.rows))
        cols = slice(tile_col * TILE, min((tile_col + 1) * TILE, piece.cols))
        assert rows.start < rows.stop and cols.start < cols.stop, (
            "a tile lies outside of its tensor"
        )
        for d, encoding in enumerate((row, col)):
            assert encoding is not None or not work >> 2 * d & 3, (
                "a launch has work of a side that it does not make"
            )
            if work >> 2 * d & 1:
                _collect(x, rows, cols, piece.side[d], encoding)
        for d, encoding in enumerate((row, col)):
            if work >> 2 * d & 2:
                _encode(x, rows, cols, piece.side[d], encoding, second)


def cast_scales(
    runs: Tensor, chunks: Tensor, encodings: Sequence[Encoding], skip: Tensor | None
) -> None:
    """See `native.cast_scales`."""
    table = _rows(runs, ScaleSegment)
    assert len(encodings) <= native.SCALE_SIDES
    for index, chunk in chunks.tolist() if skip is None or not skip else ():
        run = table[index]
        at = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, run.count))
        assert at.start < at.stop
        source = memory(run.source, run.count, torch.bfloat16 if run.narrow & 1 else torch.float32)[
            at
        ]
        if run.side < 0:
            memory(run.out, run.count, torch.bfloat16 if run.narrow & 2 else torch.float32)[at] = (
                source
            )
            continue
        amax, enc, encoding = source.view(1, -1), None, encodings[run.side]
        if run.enc:
            enc = reference.delayed_encode_scale(memory(run.enc, 1, torch.float32), amax, encoding)
        tensor_amax = (
            memory(run.tensor_amax, 1, torch.float32) if encoding.fmt.tensor_scale else None
        )
        if run.out:
            made = reference.scales(amax, tensor_amax, encoding, enc)[0]
            memory(run.out, run.count, SCALE_DTYPE[encoding.fmt.scale])[at] = made.flatten()
        if run.record and source.isfinite():
            newest = memory(run.record, 1, torch.float32)
            newest.copy_(torch.maximum(newest, source))


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Casts of pieces take the kernels' way, on the CPU."""
    with mock.patch.multiple(
        native,
        is_available_on=lambda device: True,
        cast_pieces=cast_pieces,
        cast_scales=cast_scales,
    ):
        yield


def cast_of_one_rank(
    pair: tuple,
    shape: tuple[int, int],
    cuts: tuple[int, ...],
    stats: str,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """What a cast writes on the second rank of those that the cuts make, from its own amaxes
    alone."""
    hybrid = HybridQuantizer(*pair)
    master = laws.values(*shape, dtype=torch.float32, kind="outliers").to(device, dtype)
    values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    weight = QuantizedWeightState("w", hybrid, shape, torch.bfloat16).wrapped(values)
    shards, group = ShardMap(cuts), LoneRank(min(1, len(cuts) - 2), len(cuts) - 1)
    with alone():
        sync = plan_weight_sync([SyncItem("w", weight, shards)], group, "codes", stats)
        start, end = shards.run(group.rank())
        sync.cast_([master.reshape(-1)[start:end].clone()])
    return list(left_by(sync).values())


def left_by(sync: WeightSync) -> dict[str, Tensor]:
    """Everything that a cast writes."""
    found = {f"segment {c.served}": c.segment for c in sync._channels}
    for w in sync._weights:
        for d, side in w.staged.items():
            found |= {f"{w.name}.{d.value} {name}": t for name, t in side.items()}
        for d in w.quantizer.delayed_directions:
            found[f"{w.name}.{d.value} history"] = w.history(d).amaxes
    return found

# SPDX-License-Identifier: Apache-2.0
"""Quantize tensors, lists of tensors and pieces of flat buffers. Mirrors csrc/api/quantize*.cpp,
pieces.cpp and anchored.cpp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import traceback as fx_traceback

from ...formats import ROWWISE, Encoding, round_up
from ..capability import unsupported_reason
from .encoding import COMPACT, PIECE_VALUES, encodes, encoding_shapes, pack_encoding

_ops = torch.ops.fsdp_quant


def rows_of(x: Tensor) -> Tensor:
    """Return x if its last dim is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Call(NamedTuple):
    """Operator arguments for a list of encodings, one per direction. Cached per list."""

    row: int
    col: int
    row_eps: float
    col_eps: float
    # index in the list of the rowwise and of the columnwise encoding
    places: tuple[int | None, int | None]


@functools.cache
def call_of(
    encodings: tuple[Encoding, ...],
    transposed: tuple[bool, ...] | None = None,
    layouts: tuple[int, ...] | None = None,
) -> _Call:
    packed, eps = [0, 0], [0.0, 0.0]
    places: list[int | None] = [None, None]
    for i, e in enumerate(encodings):
        d, layout = int(e.direction is not ROWWISE), layouts[i] if layouts else COMPACT
        packed[d] = pack_encoding(e, transposed[i] if transposed else False, layout)
        eps[d], places[d] = e.eps, i
    (row, col), (row_eps, col_eps), (row_place, col_place) = packed, eps, places
    return _Call(row, col, row_eps, col_eps, (row_place, col_place))


def statistics(
    x: Tensor, encodings: Sequence[Encoding], row0: int, round_to_bf16: bool
) -> list[tuple]:
    """Compute (amax, tensor_amax or None) for each encoding (one per direction), in one read of
    x."""
    call = call_of(tuple(encodings))
    outputs = iter(_ops.statistics(rows_of(x), call.row, call.col, row0, round_to_bf16))
    results = {
        i: (next(outputs), next(outputs) if encodings[i].fmt.tensor_scale else None)
        for i in call.places
        if i is not None
    }
    return [results[i] for i in range(len(encodings))]


def column_sums(x: Tensor) -> Tensor:
    """Sum x [rows, cols], bf16, over its rows: [cols]."""
    return _ops.column_sums(rows_of(x))


def quantize(
    x: Tensor,
    encodings: Sequence[Encoding],
    row0: int,
    round_to_bf16: bool,
    stats: Sequence[tuple] | None,
    keys: Sequence[Tensor | None] | None,
    encode_scales: Sequence[Tensor | None] | None,
    transposed: Sequence[bool] | None = None,
    layout: int | Sequence[int] = COMPACT,
) -> list[tuple]:
    """Quantize x to (data, scale, tensor_amax or None, amax or None) for each encoding (one per
    direction), in one read of x.

    stats:          (amax, tensor_amax) per encoding; None: computed from x.
    encode_scales:  fp32 [1] per encoding, for delayed scaling; 0 if there is no history yet.
    transposed:     store columnwise codes as [cols, rows], which a Hopper tensor core reads.
    layout:         as in `pack_encoding`; one for all, or one per encoding.
    """
    layouts = (layout,) * len(encodings) if isinstance(layout, int) else tuple(layout)
    call = call_of(tuple(encodings), tuple(transposed) if transposed else None, layouts)
    known: list[Tensor | None] = [None] * 8
    for d, i in enumerate(call.places):
        if i is not None:
            known[4 * d : 4 * d + 4] = (
                *(stats[i] if stats else (None, None)),
                encode_scales[i] if encode_scales else None,
                keys[i] if keys else None,
            )
    eps = call.row_eps, call.col_eps
    if fx_traceback.current_meta.get("partitioner_tag") == "must_be_in_backward":
        eps = [1.0 if i is None else e for e, i in zip(eps, call.places)]  # no node of the forward
    outputs = iter(_ops.quantize(rows_of(x), *call[:2], *eps, row0, round_to_bf16, *known))
    results: dict[int, tuple] = {}
    for i in call.places:
        if i is not None:
            fmt, (amax, tensor_amax) = encodings[i].fmt, stats[i] if stats else (None, None)
            data, scale = next(outputs), next(outputs)
            if fmt.tensor_scale and tensor_amax is None:
                tensor_amax = next(outputs)
            if fmt.scale_leaves_contraction and amax is None:
                amax = next(outputs)
            results[i] = (data, scale, tensor_amax, amax if fmt.scale_leaves_contraction else None)
    return [results[i] for i in range(len(encodings))]


def encodes_group(encoding: Encoding, dtype: torch.dtype, round_to_bf16: bool) -> bool:
    """Return whether one launch encodes a list of tensors of `dtype` so."""
    plain = not (encoding.stochastic or encoding.fmt.rotated or encoding.fmt.has_row_scales)
    return plain and (round_to_bf16 or dtype is torch.bfloat16) and encodes(encoding, dtype)


def multi_tensor_amax(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], round_to_bf16: bool
) -> list[tuple]:
    """Compute (amax, tensor_amax or None) of each tensor, in one launch."""
    rows, columnwise = [rows_of(t) for t in x], encoding.direction is not ROWWISE
    outputs = iter(
        _ops.statistics_group(rows, pack_encoding(encoding), columnwise, row0, round_to_bf16)
    )
    return [(next(outputs), next(outputs) if encoding.fmt.tensor_scale else None) for _ in row0]


@functools.lru_cache(maxsize=1024)
def _staged(
    encoding: Encoding, shapes: tuple[tuple[int, int], ...], row0: tuple[int, ...]
) -> tuple:
    """Plan one buffer for the data of all tensors, then the scales of all, so that those of the
    matrices of a packed weight are adjacent.

    returns:  (size in bytes, byte offsets of the data and of the scales of each tensor, and per
              tensor ((shape, strides, offset) of its data, of its scales)).
    """
    packed, columnwise = pack_encoding(encoding), encoding.direction is not ROWWISE
    buffers = [encoding_shapes(packed, columnwise, s, start) for s, start in zip(shapes, row0)]
    sizes = [(b.data, 1) for b in buffers] + [(b.scale, b.scale_dtype.itemsize) for b in buffers]
    offsets = [0, *accumulate(round_up(prod(size) * item, 16) for size, item in sizes)]
    views = [(size, (size[1], 1), o // item) for (size, item), o in zip(sizes, offsets)]
    count = len(shapes)
    offsets, end = offsets[:-1], offsets[-1]
    return end, (offsets[:count], offsets[count:]), list(zip(views[:count], views[count:]))


class RecordedEncode:
    """One launch that encodes a list of tensors into slices of one buffer. Calling it again encodes
    other values into the same memory.

    results:  (data, scale, tensor_amax, amax) per tensor: views of the buffer, and the entries of
              `stats` that the launch read.

    Arguments are those of `multi_tensor_quantize`. stats: None: computed from the values in each
    call.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        encoding: Encoding,
        row0: Sequence[int],
        round_to_bf16: bool,
        stats: Sequence[tuple | None] | None,
        encode_scales: Sequence[Tensor | None] = (),
        records: Sequence[Tensor | None] = (),
    ):
        self._measured = None if stats is not None else (encoding, row0, round_to_bf16)
        if stats is None:
            stats = multi_tensor_amax(x, encoding, row0, round_to_bf16)
        self.encoding, self.device = encoding, x[0].device
        size, offsets, views = _staged(encoding, tuple(t.shape for t in x), tuple(row0))
        self._staging, self._size = x[0].new_empty(size, dtype=torch.uint8), size
        self._first, known = _group_arguments(x, encoding, row0, stats, encode_scales, records)
        self._last = self._staging, *offsets, round_to_bf16
        scales = self._staging.view(encoding.fmt.scale_dtype)
        self.results = [
            (self._staging.as_strided(*data), scales.as_strided(*scale), *amaxes)
            for (data, scale), amaxes in zip(views, known)
        ]
        self._write(x)

    def __call__(self, x: Sequence[Tensor]) -> None:
        if self._measured is not None:
            encoding, row0, _ = self._measured
            self._first, _ = _group_arguments(
                x, encoding, row0, multi_tensor_amax(x, *self._measured), (), ()
            )
        self._write(x)

    def _write(self, x: Sequence[Tensor]) -> None:
        storage = self._staging.untyped_storage()
        if storage.size() != self._size:
            storage.resize_(self._size)
        _ops.quantize_group([rows_of(t) for t in x], *self._first, *self._last)

    def free(self) -> None:
        """Free the buffer's memory; the next call allocates it again."""
        self._staging.untyped_storage().resize_(0)


def _group_arguments(
    x: Sequence[Tensor],
    encoding: Encoding,
    row0: Sequence[int],
    stats: Sequence[tuple | None],
    encode_scales: Sequence[Tensor | None],
    records: Sequence[Tensor | None],
) -> tuple[tuple, list[tuple]]:
    """Return (the operators' arguments after x, (tensor_amax, amax) to keep of each tensor)."""
    amaxes, tensor_amaxes = ([None if s is None else s[i] for s in stats] for i in range(2))
    saved = amaxes if encoding.fmt.scale_leaves_contraction else [None] * len(amaxes)
    histories = [], []
    if any(enc is not None for enc in encode_scales):
        histories = (
            encode_scales,
            [x[0].new_empty(0, dtype=torch.float32) if r is None else r for r in records],
        )
    columnwise = encoding.direction is not ROWWISE
    first = pack_encoding(encoding), columnwise, encoding.eps, row0, amaxes, tensor_amaxes
    return (*first, *histories), list(zip(tensor_amaxes, saved))


def multi_tensor_quantize(
    x: Sequence[Tensor],
    encoding: Encoding,
    row0: Sequence[int],
    round_to_bf16: bool,
    stats: Sequence[tuple | None] | None,
    into: Sequence[tuple[Tensor, Tensor]] | None = None,
    encode_scales: Sequence[Tensor | None] = (),
    records: Sequence[Tensor | None] = (),
    calls: list[RecordedEncode] | None = None,
) -> list[tuple]:
    """Quantize each tensor (`quantize`), in one launch, into slices of one buffer.

    stats:  (amax, tensor_amax) per tensor, or None for a tensor. If some scale spans more than a
            tile, no entry may be None. None for the list: see `RecordedEncode`.
    into:   (data, scale) of each tensor, to be written in place of a new buffer.
    encode_scales, records:  see `dispatch.multi_tensor_encode`.
    calls:  a list to which the launch is appended, unless `into` is given.
    """
    if into is not None:
        stats = multi_tensor_amax(x, encoding, row0, round_to_bf16) if stats is None else stats
        arguments, known = _group_arguments(x, encoding, row0, stats, encode_scales, records)
        _ops.quantize_group_out(
            [rows_of(t) for t in x], *arguments, *map(list, zip(*into)), round_to_bf16
        )
        return [(*buffers, *amaxes) for buffers, amaxes in zip(into, known)]
    call = RecordedEncode(x, encoding, row0, round_to_bf16, stats, encode_scales, records)
    if calls is not None:
        calls.append(call)
    return call.results


def unsupported_pieces_reason(
    encoding: Encoding, dtype: torch.dtype | None, cols: int
) -> str | None:
    """Return the reason that no kernel encodes pieces of a tensor of `cols` columns so, None if one
    does.

    dtype:  to which values are rounded before encoding, or in which values are sent.
    """
    if encoding.fmt.is_quantized and dtype is not torch.bfloat16:
        return f"quantizers see {dtype or 'the dtype of the masters'}, not bfloat16"
    if not encoding.fmt.is_quantized:
        return None if dtype in PIECE_VALUES else f"values travel in {dtype}"
    if encoding.stochastic or encoding.fmt.rotated:
        return "rounded stochastically, or rotated"
    if encoding.fmt.chooses_by_error or encoding.fmt.has_row_scales:
        return "scales that follow from a block's error, or from a row"
    if encoding.fmt.bits == 6:
        return "6-bit codes share containers between pieces"
    if encoding.fmt.bits == 4 and cols % 2:
        return f"4-bit codes of {cols} columns share bytes between rows"
    return unsupported_reason(encoding.fmt)


def cast_pieces(
    pieces: Tensor,
    tiles: Tensor,
    row: Encoding | None,
    col: Encoding | None,
    second: bool,
    skip: Tensor | None,
) -> None:
    """Compute amaxes and codes of the tiles of pieces.

    pieces, tiles:  tables that `weight_sync.cast_plan` builds.
    skip:           bool [1], read on the device.
    """
    sides = [0 if e is None else pack_encoding(e) for e in (row, col)]
    eps = [0.0 if e is None else e.eps for e in (row, col)]
    _ops.cast_pieces(pieces, tiles, *sides, *eps, second, skip)


def cast_scales(
    runs: Tensor, chunks: Tensor, encodings: Sequence[Encoding], skip: Tensor | None
) -> None:
    """Compute scales from collected amaxes, and cast values to another dtype, one run each.

    runs, chunks:  tables that `weight_sync.cast_plan` builds.
    encodings:     at most SCALE_SIDES; runs refer to them by index.
    skip:          bool [1], read on the device.
    """
    _ops.cast_scales(
        runs, chunks, [pack_encoding(e) for e in encodings], [e.eps for e in encodings], skip
    )


def quantize_anchored(
    x: Tensor,
    encodings: Sequence[Encoding],
    anchor_runs: Sequence[int | None],
    round_to_bf16: bool = False,
    transposed: Sequence[bool] | None = None,
    amaxes: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, ...]]:
    """Quantize x to (codes, fp32 scales) for each e8m0 encoding, as `anchoring.anchored` defines;
    for OF_TENSOR, as `anchoring.anchored_codes`, with the amax of x [1] as a third, if it was not
    given.

    anchor_runs:  `anchor_run` of each encoding; None: 0.
    transposed:   store columnwise codes as [cols, rows].
    amaxes:       fp32 amaxes of the runs of each encoding, known from other ranks or another
                  direction; None: computed from x.
    """
    call = call_of(tuple(encodings), tuple(transposed) if transposed else None)
    runs = [0 if i is None else anchor_runs[i] or 0 for i in call.places]
    known = [None if i is None or amaxes is None else amaxes[i] for i in call.places]
    outputs = iter(
        _ops.quantize_anchored(rows_of(x), call.row, call.col, *runs, *known, round_to_bf16)
    )
    results = {i: (next(outputs), next(outputs)) for i in call.places if i is not None}
    amax = tuple(outputs)  # of both directions
    return [
        (*results[i], *(() if amaxes is not None and amaxes[i] is not None else amax))
        for i in range(len(encodings))
    ]

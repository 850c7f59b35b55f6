"""The compiled operators: what they take, how a format is put into their terms, and their fake implementations.

Everything here is called by `dispatch` (and `supported` by `doctor`); the library itself is loaded by `extension`.
An `Encoding` is passed as one integer (`pack_encoding`), and the shapes of its buffers are asked for (`encoding_shapes`):
csrc/api/encoding.cpp alone knows the integer's bits, and what operators allocate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..formats import ROWWISE, Direction, Encoding, Format, ceil_div, round_up
from . import extension, opaque
from .capability import ARCHITECTURES, BLACKWELL, ELEMENTS, HOPPER, arch_of, unsupported_reason
from .layout import (
    ANCHOR_RUNS, ANCHORED_TENSOR, ANCHORS, LAID_OUT, SPREAD_BLOCKS, is_anchored_of_codes, is_exact_operand,
    operand_format,
)
from .layout import COMPACT as COMPACT_LAYOUT

COMPACT, OPERAND = 0, 3  # as HOPPER and BLACKWELL: of csrc/quantize/quantize.h
TRANSPOSE_BYTES, TRANSPOSE_NIBBLES, SWIZZLE, SWIZZLE_TRANSPOSED = range(4)
TRANSPOSED_BITS = (4, 8)  # codes that a kernel transposes
TILE = 128
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
SCALE_SIDES = 8  # encodings of one cast_scales
PIECE_VALUES = (torch.float32, torch.bfloat16)  # dtypes of masters, and of values that travel

_ops = torch.ops.fsdp_quant


# What there is a kernel for #

@functools.cache
def pack_encoding(encoding: Encoding, transposed: bool = False, layout: int = COMPACT) -> int:
    """An encoding as operators take it: an integer whose bits csrc/api/encoding.cpp alone writes and reads.

    transposed:  codes of a columnwise side as [cols, rows].
    layout:      of the scales: COMPACT, HOPPER or BLACKWELL. OPERAND: e4m3 codes with one fp32 scale per tensor, of what
                 `decodes_exactly_to_e4m3`.
    """
    fmt = encoding.fmt
    outer, contraction = fmt.block
    return _pack(
        fmt.element.name, fmt.scale, fmt.pow2, fmt.scale_rounding, fmt.scale_rule, outer or 0, contraction or 0,
        encoding.stochastic, fmt.rotated, transposed, layout,
    )


def _pack(*fields: str | int | bool) -> int:
    return _ops.pack_encoding(*fields)


# Dynamo calls it as it traces, and keeps the number: what torch.compiler.assume_constant_result does, which imports dynamo.
_pack._dynamo_marked_constant = True


class EncodingShapes(NamedTuple):
    """Buffers that `quantize` returns for one direction of a tensor.

    data, scale:     sizes, for the integer's layouts. byte_scales: scales are uint8, else fp32.
    amax:            [block rows, block cols], in every layout of the scales.
    has_tensor_amax: there is an fp32 [1] of a two-level format. has_amax: amaxes are returned, of scales that span the
                     contraction.
    """

    data: tuple[int, ...]
    scale: tuple[int, ...]
    amax: tuple[int, ...]
    byte_scales: bool
    has_tensor_amax: bool
    has_amax: bool

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.byte_scales else torch.float32


def encoding_shapes(
    packed: int, columnwise: bool, shape: Sequence[int], row0: int = 0, run: int | None = None
) -> EncodingShapes:
    """The buffers of one direction of a tensor [rows, cols], as the operators allocate them.

    packed:  of `pack_encoding`.
    shape:   lengths may be symbolic.
    run:     of anchors, 0 is the whole contraction: the scales of `quantize_anchored`.
    """
    rows, cols = shape
    known = isinstance(rows, int) and isinstance(cols, int) and isinstance(row0, int)  # a symbol belongs to one trace
    return (_known_shapes if known else _known_shapes.__wrapped__)(packed, columnwise, rows, cols, row0, run)


@functools.cache
def _known_shapes(packed: int, columnwise: bool, rows: int, cols: int, row0: int, run: int | None) -> EncodingShapes:
    *sizes, byte_scales, has_tensor_amax, has_amax = _ops.encoding_shapes(packed, columnwise, rows, cols, row0, run)
    return EncodingShapes(*map(tuple, sizes), byte_scales, has_tensor_amax, has_amax)


def runs_on(device: torch.device) -> bool:
    """Kernels run on this device."""
    return device.type == "cuda" and extension.runs_on(device) is None


def runs(x: Tensor) -> bool:
    """Kernels run where this tensor is; where they are off, a warning says so once."""
    return x.is_cuda and extension.runs_on(x.device, warn=True) is None


def encodes(encoding: Encoding, dtype: torch.dtype, whole_tiles: bool = True) -> bool:
    """A kernel makes this encoding of values of a dtype, where kernels run; the reference makes what is left.

    whole_tiles:  the first row begins a tile of the global tensor: rows that a rotation mixes are together.
    """
    if dtype not in FLOATING or unsupported_reason(encoding.fmt) is not None:
        return False
    return whole_tiles or not (encoding.fmt.rotated and encoding.direction is not ROWWISE)


def supported(fmt: Format, device: torch.device) -> dict[str, str | None]:
    """Operation -> why it does not run natively for this format on this device, None when it does."""
    reason = extension.runs_on(device) or unsupported_reason(fmt)
    blackwell = "swizzled scales are for one-byte scales" if fmt.scale not in ("e8m0", "e4m3") else None
    return {
        "quantize": reason, "statistics": reason, "dequantize": reason, "transpose": reason, "swizzle": reason or blackwell,
    }


def scale_layout(x: Tensor) -> int:
    """How the tensor cores where x is read scales."""
    return scale_layout_of(arch_of(x.device))


def scale_layout_of(arch: str) -> int:
    return ARCHITECTURES[arch].scale_layout if arch in ARCHITECTURES else COMPACT


# Quantize #

def rows_of(x: Tensor) -> Tensor:
    """x, or a copy where its last dim does not lie contiguously."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Call(NamedTuple):
    """What a list of encodings, one a direction, is to the operators; made once for each list."""

    row: int
    col: int
    row_eps: float
    col_eps: float
    places: tuple[int | None, int | None]  # index in the list of the rowwise and of the columnwise encoding


@functools.cache
def _call_of(
    encodings: tuple[Encoding, ...], transposed: tuple[bool, ...] | None = None, layouts: tuple[int, ...] | None = None
) -> _Call:
    row = col = 0
    eps, places = [0.0, 0.0], [None, None]
    for i, e in enumerate(encodings):
        side = pack_encoding(e, transposed[i] if transposed else False, layouts[i] if layouts else COMPACT)
        d = int(e.direction is not ROWWISE)
        row, col = (side, col) if d == 0 else (row, side)
        eps[d], places[d] = e.eps, i
    return _Call(row, col, *eps, tuple(places))


def statistics(x: Tensor, encodings: Sequence[Encoding], row0: int, through_bf16: bool) -> list[tuple]:
    """(amax, tensor_amax or None) of each encoding (one a direction), in one read of x."""
    call = _call_of(tuple(encodings))
    made = iter(_ops.statistics(rows_of(x), call.row, call.col, row0, through_bf16))
    results = [None] * len(encodings)
    for i in call.places:
        if i is not None:
            results[i] = (next(made), next(made) if encodings[i].fmt.tensor_scale else None)
    return results


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of x [rows, cols], bf16, [cols]."""
    return _ops.column_sums(rows_of(x))


def quantize(
    x: Tensor, encodings: Sequence[Encoding], row0: int, through_bf16: bool,
    stats: Sequence[tuple] | None, keys: Sequence[Tensor | None] | None, encs: Sequence[Tensor | None] | None,
    transposed: Sequence[bool] | None = None, layout: int | Sequence[int] = COMPACT,
) -> list[tuple]:
    """(data, scale, tensor_amax or None, amax or None) of each encoding (one a direction), in one read of x.

    stats:       (amax, tensor_amax) an encoding, or None: taken from x.
    encs:        fp32 [1], delayed scaling; 0 where there is no history yet.
    transposed:  codes of a columnwise side as [cols, rows], what a Hopper tensor core reads.
    layout:      as of `pack_encoding`; one for all, or one an encoding.
    """
    layouts = (layout,) * len(encodings) if isinstance(layout, int) else tuple(layout)
    call = _call_of(tuple(encodings), tuple(transposed) if transposed else None, layouts)
    known = [None] * 8
    for d, i in enumerate(call.places):
        if i is not None:
            known[4 * d : 4 * d + 4] = (
                *(stats[i] if stats else (None, None)), encs[i] if encs else None, keys[i] if keys else None
            )
    made = iter(_ops.quantize(rows_of(x), *call[:4], row0, through_bf16, *known))
    results = [None] * len(encodings)
    for i in call.places:
        if i is not None:
            fmt, (amax, tensor_amax) = encodings[i].fmt, stats[i] if stats else (None, None)
            data, scale = next(made), next(made)
            if fmt.tensor_scale and tensor_amax is None:
                tensor_amax = next(made)
            if fmt.scale_leaves_contraction and amax is None:
                amax = next(made)
            results[i] = (data, scale, tensor_amax, amax if fmt.scale_leaves_contraction else None)
    return results


def takes_group(encoding: Encoding, dtype: torch.dtype, through_bf16: bool) -> bool:
    """One launch encodes a group of tensors of a dtype so."""
    plain = not (encoding.stochastic or encoding.fmt.rotated)
    return plain and (through_bf16 or dtype is torch.bfloat16) and encodes(encoding, dtype)


def statistics_group(x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], through_bf16: bool) -> list[tuple]:
    """(amax, tensor_amax or None) of each tensor, in one launch."""
    rows = [rows_of(one) for one in x]
    made = iter(_ops.statistics_group(rows, pack_encoding(encoding), encoding.direction is not ROWWISE, row0, through_bf16))
    return [(next(made), next(made) if encoding.fmt.tensor_scale else None) for _ in x]


@functools.lru_cache(maxsize=1024)
def _staged(encoding: Encoding, shapes: tuple[tuple[int, int], ...], row0: tuple[int, ...]) -> tuple:
    """(bytes, where data and scales of each tensor begin, ((shape, strides, offset) of its data, of its scales)).

    Data of all tensors, then scales of all: those of the matrices of a packed weight lie one behind the other.
    """
    side, columnwise = pack_encoding(encoding), encoding.direction is not ROWWISE
    of = [encoding_shapes(side, columnwise, shape, start) for shape, start in zip(shapes, row0)]
    places, views, at = ([], []), ([], []), 0
    for which, (place, view) in enumerate(zip(places, views)):
        for one in of:
            size, item = one[which], (1, one.scale_dtype.itemsize)[which]
            place.append(at)
            view.append((size, (size[1], 1), at // item))
            at += round_up(prod(size) * item, 16)
    return at, places, list(zip(*views))


class GroupEncoding:
    """One launch that encodes each of a list of tensors into slices of one buffer, and may be made again of other values.

    made:     (data, scale, tensor_amax, amax) of each: views of the buffer, and what of `stats` went into them.

    Arguments as of `quantize_group`. stats: None: taken of the values, in each call.
    """

    def __init__(
        self, x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], through_bf16: bool,
        stats: Sequence[tuple | None] | None, encs: Sequence[Tensor | None] = (), records: Sequence[Tensor | None] = (),
    ):
        self._measured = None if stats is not None else (encoding, row0, through_bf16)
        if stats is None:
            stats = statistics_group(x, encoding, row0, through_bf16)
        self.encoding, self.dtype, self.device = encoding, x[0].dtype, x[0].device
        scale_dtype = encoding.fmt.scale_dtype
        size, places, views = _staged(encoding, tuple(one.shape for one in x), tuple(row0))
        self._staging, self._size = x[0].new_empty(size, dtype=torch.uint8), size
        self._first, known = _group_arguments(x, encoding, row0, stats, encs, records)
        self._last = self._staging, *places, through_bf16
        of_scales = self._staging.view(scale_dtype)
        self.made = [
            (self._staging.as_strided(*data), of_scales.as_strided(*scale), *of) for (data, scale), of in zip(views, known)
        ]
        self._write(x)

    def takes(self, x: Sequence[Tensor]) -> bool:
        """x are tensors as those before, of which they have the shapes."""
        return all([one.dtype is self.dtype and one.device == self.device for one in x])

    def __call__(self, x: Sequence[Tensor]) -> None:
        if self._measured is not None:
            encoding, row0, _ = self._measured
            self._first, _ = _group_arguments(x, encoding, row0, statistics_group(x, *self._measured), (), ())
        self._write(x)

    def _write(self, x: Sequence[Tensor]) -> None:
        storage = self._staging.untyped_storage()
        if storage.size() != self._size:
            storage.resize_(self._size)
        _ops.quantize_group([rows_of(one) for one in x], *self._first, *self._last)

    def free(self) -> None:
        """Give the buffer back, until it is written again."""
        self._staging.untyped_storage().resize_(0)


def _group_arguments(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], stats: Sequence[tuple | None], encs: Sequence[Tensor | None],
    records: Sequence[Tensor | None],
) -> tuple[tuple, list[tuple]]:
    """(arguments of the operators behind x, (tensor_amax, amax) of each as they are kept)."""
    amaxes, tensor_amaxes = ([None if s is None else s[i] for s in stats] for i in range(2))
    kept = amaxes if encoding.fmt.scale_leaves_contraction else [None] * len(amaxes)
    histories = [], []
    if any(enc is not None for enc in encs):
        histories = encs, [x[0].new_empty(0, dtype=torch.float32) if r is None else r for r in records]
    columnwise = encoding.direction is not ROWWISE
    return (pack_encoding(encoding), columnwise, encoding.eps, row0, amaxes, tensor_amaxes, *histories), list(zip(tensor_amaxes, kept))


def quantize_group(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], through_bf16: bool, stats: Sequence[tuple | None] | None,
    into: Sequence[tuple[Tensor, Tensor]] | None = None, encs: Sequence[Tensor | None] = (),
    records: Sequence[Tensor | None] = (), calls: list[GroupEncoding] | None = None,
) -> list[tuple]:
    """`quantize` of each tensor, in one launch, into slices of one buffer.

    stats:  (amax, tensor_amax) a tensor; where some scale spans more than a tile, None of them is None. None: see `GroupEncoding`.
    into:   (data, scale) of each, to be written instead.
    encs, records:  see `dispatch.encode_group`.
    calls:  takes the launch, where there is a buffer.
    """
    if into is not None:
        stats = statistics_group(x, encoding, row0, through_bf16) if stats is None else stats
        arguments, known = _group_arguments(x, encoding, row0, stats, encs, records)
        _ops.quantize_group_out([rows_of(one) for one in x], *arguments, *map(list, zip(*into)), through_bf16)
        return [(*one, *of) for one, of in zip(into, known)]
    call = GroupEncoding(x, encoding, row0, through_bf16, stats, encs, records)
    if calls is not None:
        calls.append(call)
    return call.made


def why_not_pieces(encoding: Encoding, dtype: torch.dtype | None, cols: int) -> str | None:
    """Why no kernel encodes pieces of a tensor of this many columns so, seen in a dtype; None when one does."""
    if encoding.fmt.is_quantized and dtype is not torch.bfloat16:
        return f"quantizers see {dtype or 'the dtype of the masters'}, not bfloat16"
    if not encoding.fmt.is_quantized:
        return None if dtype in PIECE_VALUES else f"values travel in {dtype}"
    if encoding.stochastic or encoding.fmt.rotated:
        return "rounded stochastically, or rotated"
    if encoding.fmt.bits == 6:
        return "6-bit codes share containers between pieces"
    if encoding.fmt.bits == 4 and cols % 2:
        return f"4-bit codes of {cols} columns share bytes between rows"
    return unsupported_reason(encoding.fmt)


def cast_pieces(
    pieces: Tensor, tiles: Tensor, row: Encoding | None, col: Encoding | None, second: bool, skip: Tensor | None
) -> None:
    """Amaxes and codes of tiles of pieces; `parallel.cast_plan` makes the tables. skip: bool [1], read on the device."""
    sides = [0 if e is None else pack_encoding(e) for e in (row, col)]
    eps = [0.0 if e is None else e.eps for e in (row, col)]
    _ops.cast_pieces(pieces, tiles, *sides, *eps, second, skip)


def cast_scales(runs: Tensor, chunks: Tensor, encodings: Sequence[Encoding], skip: Tensor | None) -> None:
    """Scales of collected amaxes, and values in another dtype, a run each; `parallel.cast_plan` makes the tables.

    encodings:  that runs name by their index, SCALE_SIDES at most.
    """
    _ops.cast_scales(runs, chunks, [pack_encoding(e) for e in encodings], [e.eps for e in encodings], skip)


def quantize_anchored(
    x: Tensor, encodings: Sequence[Encoding], anchor_runs: Sequence[int | None], through_bf16: bool = False,
    transposed: Sequence[bool] | None = None, amaxes: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(codes, fp32 scales) of each e8m0 encoding; see `reference.anchored`, and of OF_TENSOR `reference.anchored_codes`.

    anchor_runs: of each (`anchor_run`); None: 0.
    transposed:  codes of a columnwise side as [cols, rows].
    amaxes:      fp32, of the runs of each encoding, that other ranks or another direction have; None: of x.
    """
    call = _call_of(tuple(encodings), tuple(transposed) if transposed else None)
    runs = [0 if i is None else anchor_runs[i] or 0 for i in call.places]
    known = [None if i is None or amaxes is None else amaxes[i] for i in call.places]
    made = iter(_ops.quantize_anchored(rows_of(x), call.row, call.col, *runs, *known, through_bf16))
    results = {i: (next(made), next(made)) for i in call.places if i is not None}
    return [results[i] for i in range(len(encodings))]


def dequantize(
    data: Tensor, scale: Tensor | None, tensor_amax: Tensor | None, fmt: Format, direction: Direction, cols: int,
    row0: int, dtype: torch.dtype,
) -> Tensor:
    """element * scale (* tensor scale) in fp32, rounded once to `dtype`: [rows, cols]."""
    side = pack_encoding(Encoding(fmt, direction))
    return _ops.dequantize(data, scale, tensor_amax, side, direction is not ROWWISE, cols, row0, dtype)


def tensor_decode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    return _ops.tensor_decode_scale(tensor_amax, pack_encoding(Encoding(fmt, ROWWISE)))


def transpose_codes(data: Tensor, rows: int, cols: int, bits: int) -> Tensor:
    return _ops.transpose_codes(data, rows, cols, bits)


class GroupCall(NamedTuple):
    """A call of an operator that writes `out`, which may be made again."""

    operator: Callable[..., None]
    arguments: tuple
    out: list[Tensor]

    def __call__(self) -> None:
        self.operator(*self.arguments)


def _called(call: GroupCall, calls: list[GroupCall] | None) -> list[Tensor]:
    """Make a call, which `calls` takes; what it has written."""
    call()
    if calls is not None:
        calls.append(call)
    return call.out


def transpose_group(
    data: Sequence[Tensor], shapes: Sequence[tuple[int, int]], bits: int, stacked: bool = False,
    calls: list[GroupCall] | None = None,
) -> list[Tensor]:
    """`transpose_codes` of each [rows, cols], in one launch; stacked: all of one shape, into slices of one buffer.

    calls:  takes the launch, which may be made again.
    """
    rows, cols = ([s[i] for s in shapes] for i in range(2))
    sizes = [(c, ceil_div(r, 2) if bits == 4 else r) for r, c in zip(rows, cols)]
    if stacked:
        out = list(data[0].new_empty((len(data), *sizes[0])).unbind())
    else:
        out = [d.new_empty(size) for d, size in zip(data, sizes)]
    n, kind = len(data), TRANSPOSE_NIBBLES if bits == 4 else TRANSPOSE_BYTES
    return _called(GroupCall(_ops.relayout_group, (data, out, [kind] * n, rows, cols, [0] * n, [1] * n), out), calls)


def transpose_stack(data: Tensor) -> Tensor:
    """8-bit codes [E, rows, cols] as [E, cols, rows]."""
    n, rows, cols = data.shape
    out = data.new_empty(n, cols, rows)
    _ops.relayout_group(
        list(data.unbind()), list(out.unbind()), [TRANSPOSE_BYTES] * n, [rows] * n, [cols] * n, [0] * n, [1] * n
    )
    return out


def transpose_tokens(data: Tensor, groups: TokenGroups) -> Tensor:
    """Codes [tokens, cols] of 8 bits as [cols, rows of `groups.padded`]: zeros behind the tokens of a group; not set beyond."""
    return _ops.transpose_tokens(data, *groups)


def swizzle_scales(scale: Tensor, outer: int, outer_block: int, transposed: bool) -> Tensor:
    return _ops.swizzle_scales(scale, outer, outer_block, transposed)


OF_TENSOR = -2  # the run of anchors of tensors


def anchor_run(layout: str) -> int:
    """What shares an anchor in this layout, as operators take it: elements of the contraction, 0 for all, or OF_TENSOR."""
    return OF_TENSOR if layout == ANCHORED_TENSOR else ANCHOR_RUNS[layout] or 0


def _anchor_shape(rows: int, cols: int, columnwise: bool, run: int) -> tuple[int, ...]:
    """Of the scales of codes against anchors of a run."""
    lines, length = (cols, rows) if columnwise else (rows, cols)
    return (1,) if run == OF_TENSOR else (lines,) if run == 0 else (ceil_div(length, run), round_up(lines, 4))


def anchor_codes(
    data: Tensor, scale: Tensor, tensor_amax: Tensor | None, cols: int, fmt: Format, direction: Direction, transposed: bool,
    run: int = 0,
) -> tuple[Tensor, Tensor]:
    """`dispatch.anchor_codes` of a run (`anchor_run`); transposed: the codes as [cols, rows]. Against anchors of lines and
    tensors also of e8m0 matrices [E, rows, row bytes]."""
    packed = pack_encoding(Encoding(fmt, direction))
    return _ops.anchor_codes(
        data, scale, tensor_amax, packed, direction is not ROWWISE, transposed, run == OF_TENSOR, cols, max(run, 0)
    )


def anchor_group(
    data: Sequence[Tensor], scale: Sequence[Tensor], tensor_amax: Sequence[Tensor | None], cols: Sequence[int], fmt: Format,
    direction: Direction, transposed: bool, run: int = 0, calls: list[GroupCall] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """`anchor_codes` of each, in one call, which `calls` takes: it may be made again."""
    columnwise = direction is not ROWWISE
    shapes = [(len(d), c) for d, c in zip(data, cols)]
    codes = [d.new_empty(shape[::-1] if transposed else shape) for d, shape in zip(data, shapes)]
    lines = [d.new_empty(_anchor_shape(*shape, columnwise, run), dtype=torch.float32) for d, shape in zip(data, shapes)]
    amaxes = [] if tensor_amax[0] is None else list(tensor_amax)
    packed = pack_encoding(Encoding(fmt, direction))
    arguments = list(data), list(scale), amaxes, packed, columnwise, transposed, run == OF_TENSOR, list(cols), codes, lines, max(run, 0)
    _called(GroupCall(_ops.anchor_group, arguments, codes + lines), calls)
    return list(zip(codes, lines))


# Products #

_SCALINGS = {("fp32", (None, None)): 1, ("fp32", (1, None)): 2, ("fp32", (1, 128)): 3, ("fp32", (128, 128)): 4, ("fp32", (1, 512)): 7}
_BYTE_SCALINGS = {"e8m0": 5, "e4m3": 6}


@functools.cache
def operand_code(fmt: Format) -> int:
    """A format as the operand of a product: element | scaling << 3."""
    if not fmt.is_quantized:
        return 0
    return ELEMENTS[fmt.element.name] | (_BYTE_SCALINGS.get(fmt.scale) or _SCALINGS[fmt.scale, fmt.block]) << 3


class Operand(NamedTuple):
    """What a product reads of one side: [outer, contraction] codes or 16-bit values, their scales, the format of both.

    Values of a product of groups may have one fp32 scale a group.
    """

    data: Tensor
    scale: Tensor | None
    fmt: Format


def _fitting(o: Operand, outer_multiple: int) -> Operand:
    """Zeros behind the codes' rows and columns, where a product takes multiples; rows start at multiples of 16 bytes."""
    outer, width = o.data.shape
    pad_outer, pad_width = -outer % outer_multiple, -width % 16
    data, scale = o.data, o.scale
    if pad_outer or pad_width:
        data = F.pad(data, (0, pad_width, 0, pad_outer))
    elif data.stride(0) % 16 or data.storage_offset() % 16:
        data = data.clone(memory_format=torch.contiguous_format)
    if pad_outer and o.fmt.has_fp32_scales and o.fmt.block[0] == 1:
        if o.fmt.block[1] is None:
            scale = F.pad(scale, (0, pad_outer))
        else:
            scale = F.pad(scale.view(-1, round_up(outer, 4))[:, :outer], (0, pad_outer)).contiguous()
    if scale is not None and scale.storage_offset() * scale.element_size() % 16:
        scale = scale.clone()
    return Operand(data, scale, o.fmt)


def product_error(a: Operand, b: Operand, counted: tuple[int, int], step: Tensor, guard: Tensor, product: int) -> None:
    """Adds to guard[product], of fp32 [3, 2], the estimate of `reference.product_error`, in one of `PROBED_STEPS`.

    a, b:     codes of 8 bits, with fp32 scales of a tensor, of lines or of runs. counted: as of the reference.
    step:     int64 [5] (`context.STEP_FIELDS`).
    """
    codes = operand_code(a.fmt), operand_code(b.fmt)
    _ops.product_error(a.data, b.data, a.scale, b.scale, *codes, packed_counts(counted), step, guard, product)


def packed_counts(counted: tuple[int, int]) -> int:
    """How `product_error` counts both operands, as operators take it."""
    return counted[0] | counted[1] << 4


def gemm(
    a: Operand, b: Operand, out_dtype: torch.dtype, out: Tensor | None, accumulate: bool, bias: Tensor | None,
    alpha: Tensor | None,
) -> Tensor:
    """alpha * a b^T + bias, or that added to `out`; partial sums of 8-bit codes are promoted to fp32."""
    m, n, codes = a.data.shape[0], b.data.shape[0], a.fmt.is_quantized
    if codes:
        a, b = _fitting(a, 16 if a.fmt.block[1] == 128 else 1), _fitting(b, 16)
    fits = (a.data.shape[0], b.data.shape[0]) == (m, n)
    out_dtype = out.dtype if out is not None else out_dtype
    # Our kernels, which alone multiply scales of 512, write bf16 and fp32, and add to fp32.
    ours = codes and a.fmt.block[1] == 512
    wide = ours and (out_dtype is torch.float16 or (accumulate and out_dtype is not torch.float32))
    later = None  # a bias that the product cannot add
    if bias is not None and (not fits or wide or bias.dtype is not out_dtype or (codes and out_dtype is torch.float32)):
        bias, later = None, bias
    if bias is not None and bias.storage_offset() * bias.element_size() % 16:
        bias = bias.clone()
    operands = (a.data, b.data, a.scale, b.scale, operand_code(a.fmt), operand_code(b.fmt))
    if out is not None and fits and later is None and not wide:
        _ops.gemm_out(out, *operands, accumulate, bias, alpha)
        return out
    y = _ops.gemm(*operands, torch.float32 if wide or later is not None else out_dtype, bias, alpha)
    if not fits:
        y = y[:m, :n].contiguous()
    if later is not None:
        y = (y + later.float()).to(out_dtype)
    if out is None:
        return y.to(out_dtype)
    return out.add_(y) if accumulate else out.copy_(y)


def _grouped_operand_code(o: Operand) -> int:
    return operand_code(o.fmt) or (_SCALINGS["fp32", (None, None)] << 3 if o.scale is not None else 0)


def grouped_gemm(
    a: Operand, b: Operand, offsets: Tensor, out: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    flag: Tensor | None = None,
) -> Tensor:
    """out[rows of e] = a[rows of e] b[e]^T, where group e has the rows from offsets[e] to offsets[e + 1].

    a:        [rows, K] codes; scales of the tensor ([1] or [E]), of rows or of 1x128, as of one operand of all rows. Or bf16
              values, of none or of the tensor, as then are b's.
    b:        [E, N, K] codes; scales of the tensor or of rows (one set, or one a group), of 1x128 or 128x128 (one a
              group), stacked.
    offsets:  int32 [E + 1] on the device, E at most 1024; nothing on the host reads it.
    out:      [rows, N] bf16 or fp32. Rows outside all groups are left alone; of a new one they are not set.
    flag:     int32 [1], becomes 1 where offsets decrease or leave [0, rows] and were clamped.

    sm_90. Raises ValueError on shapes, dtypes and alignments, NotImplementedError on pairs that no kernel multiplies.
    """
    if out is None:
        out = a.data.new_empty((a.data.shape[0], b.data.shape[1]), dtype=out_dtype)
    _ops.grouped_gemm(out, a.data, b.data, a.scale, b.scale, offsets, _grouped_operand_code(a), _grouped_operand_code(b), flag)
    return out


def grouped_gemm_wgrad(
    a: Operand, b: Operand, offsets: Tensor, out: Tensor | None = None, accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, flag: Tensor | None = None,
) -> Tensor:
    """out[e] (+)= a[:, tokens of e] b[:, tokens of e]^T, where group e has the tokens from offsets[e] to offsets[e + 1].

    a, b:     [M, tokens], [N, tokens] codes; scales of 1x128 (or b's of 128x128) over all tokens, of the tensor or of
              rows (one set, or one a group, stacked).
    offsets:  int32 [E + 1] on the device, E at most 1024, multiples of 128 (the last may be the number of tokens).
    out:      [E, M, N] bf16 or fp32; accumulate: fp32. A group without tokens writes zeros, or adds nothing.
    flag:     int32 [1], becomes 1 where offsets decrease, leave [0, tokens] or cut a 128, and were clamped.

    sm_90. Raises ValueError on shapes, dtypes and alignments, NotImplementedError on pairs that no kernel multiplies.
    """
    if out is None:
        if accumulate:
            raise ValueError("grouped_gemm_wgrad(accumulate=True) adds to `out`, got out=None")
        out = a.data.new_empty((offsets.shape[0] - 1, a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    args = (a.data, b.data, a.scale, b.scale, offsets, _grouped_operand_code(a), _grouped_operand_code(b))
    _ops.grouped_gemm_wgrad(out, *args, accumulate, flag)
    return out


class TokenGroups(NamedTuple):
    """Where the tokens of each group lie: tables in one int32 buffer on the device."""

    tables: Tensor
    groups: int

    @property
    def sources(self) -> Tensor:
        """[tiles, 4], of every 128 rows of `padded`: the first token, how many there are, the group, the first of its rows."""
        return self.tables[: -2 * (self.groups + 1)].view(-1, 4)

    @property
    def offsets(self) -> Tensor:
        """[E + 1], first row of each group."""
        return self.tables[-2 * (self.groups + 1) : -(self.groups + 1)]

    @property
    def padded(self) -> Tensor:
        """[E + 1], its first row where groups begin at multiples of 128."""
        return self.tables[-(self.groups + 1) :]


MOST_GROUPS = 1024


def token_groups(ends: Tensor, tokens: int, wrong: Tensor | None = None, tag: int = 0) -> TokenGroups:
    """Groups of `tokens` rows; nothing waits for the device.

    ends:   int32 or int64 [E], the row behind each group's last: they do not decrease, and the last is `tokens`.
    wrong:  int64 [1], on the device or pinned; becomes tag << 32 | tokens where ends were wrong, and clamped.
    """
    return TokenGroups(_ops.token_groups(ends.contiguous(), tokens, wrong, tag), len(ends))


def linear_tokens(
    x: Tensor, plan: int, slot: int, row: bool, col: bool, guard: Tensor | None, groups: TokenGroups,
    factors: Sequence[Tensor] = (), step: Tensor | None = None, ids: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Codes and scales of x [tokens, cols] as a plan reads its input (slot 0) or gradient (2), each group quantized by itself.

    Columnwise codes are of groups that begin at multiples of 128, in rows that no group has not set. Scales that span tokens
    are one set a group, [E, lines] or [E], not set where it has no tokens. Two-level codes have tensor amaxes [E] too, and
    columnwise are [cols, tokens / 2], with scales [cols, tokens / 16]. The rest: as of `grouped_step`.
    """
    return _ops.linear_tokens(rows_of(x), plan, slot, row, col, guard, *groups, factors, step, ids)


def grouped_step(
    x: Tensor, ends: Tensor, weight: Operand, plan: int, save: bool, guard: Tensor | None, out_dtype: torch.dtype,
    wrong: Tensor | None, tag: int, factors: Sequence[Tensor] = (), histories: Sequence[Tensor] = (),
    step: Tensor | None = None, ids: Sequence[Tensor] = (),
) -> tuple[Tensor, TokenGroups, list[Tensor]]:
    """y of x [tokens, K], its groups (`token_groups`), and the codes that the backward keeps: see csrc/step/grouped.cpp.

    weight:              as a product of groups reads it; values of codes that are decoded, with one fp32 scale a group.
    factors, histories:  of the delayed sides: those of all groups for the first side, then for the next.
    step, ids:           int64 [5] and, of each group, int64 [3], where something is rounded stochastically (`random_key`).
    """
    ends = ends if ends.is_contiguous() else ends.contiguous()
    y, tables, *kept = _ops.grouped_step(
        rows_of(x), ends, weight.data, weight.scale, plan, save, guard, out_dtype, wrong, tag, factors, histories,
        step, ids,
    )
    return y, TokenGroups(tables, len(ends)), kept


def grouped_step_backward(
    dy: Tensor, groups: TokenGroups, weight: Operand | None, saved: Sequence[Tensor], plan: int, guard: Tensor | None,
    factors: Sequence[Tensor] = (), grad_factors: Sequence[Tensor] = (), grad_histories: Sequence[Tensor] = (),
    step: Tensor | None = None, ids: Sequence[Tensor] = (), turned: bool = False,
) -> tuple[Tensor, Tensor]:
    """dx [tokens, K] of the columnwise operand of the weights, dw [E, N, K] of what was saved of x; empty without those.

    turned:   dw is [E, K, N].
    factors:  of x, where x was saved; grad_factors, grad_histories: of dy.
    """
    data, scale = (None, None) if weight is None else weight[:2]
    return _ops.grouped_step_backward(
        rows_of(dy), *groups, data, scale, saved, plan, guard, factors, grad_factors, grad_histories, step, ids, turned
    )


# Norms and activations (`ops.norm`) #

WIDEST_NORM = 16384


def _begins_at(x: Tensor) -> int:
    """The first byte; in a graph that is being traced, from that of its memory, which allocators align."""
    return x.storage_offset() * x.element_size() if opaque.is_tracing() else x.data_ptr()


def _aligned(x: Tensor | None) -> Tensor | None:
    """x [.., cols], its rows at equal distances from multiples of 16 bytes: the operators' results are shaped like it, and
    no views, which nobody could write in place."""
    if x is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1 or rows.stride(0) * rows.element_size() % 16 or _begins_at(rows) % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows if x.dim() == 2 else rows.view(x.shape)


def _line(x: Tensor | None) -> Tensor | None:
    """x [cols], which may be a piece of a larger buffer, from a multiple of 16 bytes."""
    return x if x is None or (x.is_contiguous() and _begins_at(x) % 16 == 0) else x.clone(memory_format=torch.contiguous_format)


def new_amaxes(like: Tensor, rows: int, cols: int, count: int) -> Tensor:
    """fp32 [count, n], for `count` tensors [rows, cols]: the amax of all, of each row, and of each column over 512 rows.

    They begin at 0, 4, and 4 + rows rounded up to 4 (`AmaxesOf` of csrc/norm/norm.h).
    """
    return like.new_empty((count, 4 + round_up(rows, 4) + ceil_div(rows, 512) * cols), dtype=torch.float32)


def _amaxes(x: Tensor, count: int) -> Tensor:
    return new_amaxes(x, x.numel() // x.shape[-1], x.shape[-1], count)


def activation(g: Tensor, u: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """h, and its amaxes (`_amaxes`)."""
    h, amaxes = _ops.activation(_aligned(g), _aligned(u), kind)
    return h, amaxes[0]


def activate(
    g: Tensor, u: Tensor | None, kind: int, grad_amaxes: Tensor | None = None, deferred: bool = False, packed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Eager mode alone: h with its node of autograd, and its amaxes (`_amaxes`, of one tensor).

    grad_amaxes:  where the backward writes those of the gradients.
    deferred:     h has a shape, and no values, nor amaxes.
    packed:       g [.., 2 F] holds g and u, and its gradient theirs; u is None.
    """
    h, amaxes = _ops.activate(g, u, kind, grad_amaxes, deferred, packed)
    return h, None if deferred else amaxes


def activation_backward(
    dh: Tensor, g: Tensor, u: Tensor | None, kind: int
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """dg, du, and the amaxes of each."""
    dg, du, amaxes = _ops.activation_backward(_aligned(dh), _aligned(g), _aligned(u), kind)
    return dg, None if u is None else du, amaxes.unbind()


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, zero_centered: bool, rounds_first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, rstd, mean, amax."""
    given = _aligned(x.contiguous()), _line(weight), _line(bias)
    y, amax, rstd, mean = _ops.norm(*given, eps, centred, zero_centered, rounds_first)
    return y, rstd, mean, amax


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, rstd: Tensor, mean: Tensor, zero_centered: bool,
    rounds_first: bool, has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """dx, dweight, dbias, amax of dx."""
    dy, values, residual = (t if t is None else _aligned(t.contiguous()) for t in (dy, x, residual))
    dx, amax, dweight, dbias = _ops.norm_backward(
        dy, values, _line(weight), residual, rstd, mean, zero_centered, rounds_first, has_bias
    )
    return dx, dweight, dbias if has_bias else None, amax


# A linear layer's step #

class Reading(NamedTuple):
    """How one direction of a slot is quantized, and how its product reads it: see csrc/step/plan.h."""

    side: int = 0
    run: int = -1
    kind: int = 0
    same: bool = False
    factor: int = -1
    eps: float = 0.0


def reading_of(encoding: Encoding, layout: str, domain: str, arch: str, same: bool, factor: int | None) -> Reading | None:
    """None for what the compiled step does not do.

    domain:  of the product that reads it.
    same:    a columnwise side with the codes of the rowwise one.
    factor:  which of the slot's histories scales it, None without delayed scaling.
    """
    fmt, turned = encoding.fmt, encoding.direction is not ROWWISE
    if not fmt.is_quantized:
        return Reading()
    laid_out = layout in LAID_OUT
    factored = fmt.scale_leaves_contraction and fmt.block != (None, None)  # a scale a line, after the product
    operand = is_exact_operand(fmt, layout)
    if domain == "reference" or unsupported_reason(fmt) or (layout == COMPACT_LAYOUT and factored):
        return None
    scales = OPERAND if operand else scale_layout_of(arch) if laid_out else COMPACT
    return Reading(
        pack_encoding(encoding, turned and layout != COMPACT_LAYOUT and not is_anchored_of_codes(fmt, layout), scales),
        anchor_run(layout) if layout in ANCHORS and not operand else -1,
        operand_code(operand_format(fmt, layout)) if layout != COMPACT_LAYOUT else 0,
        same, -1 if factor is None else factor, encoding.eps,
    )


def linear_plan(readings: Sequence[Reading], saves_input: bool, watched: Sequence[tuple[int, int]], key: str) -> int:
    """The number of a plan: rowwise and columnwise readings of the input, the weight and the gradient of the output.

    watched:  of fprop, dgrad and wgrad, how `product_error` counts the operands.
    """
    fields = [f for r in readings for f in r[:5]] + [saves_input, *map(packed_counts, watched)]
    return _ops.linear_plan(fields, [r.eps for r in readings], key)


def linear_weight(
    weight: Tensor, plan: int, row: bool, col: bool, through_bf16: bool, factors: list[Tensor], amaxes: list[Tensor]
) -> list[Tensor]:
    """Buffers (`BUFFERS` that exist) of the operands of a weight [N, K] that are wanted, in one read of it; of matrices
    [E, N, K] those of each, stacked; of 4 bits as csrc/step/weight.cpp says (`stacked_runs`)."""
    return _ops.linear_weight(rows_of(weight), plan, row, col, through_bf16, factors, amaxes)


def linear_step(*args) -> list[Tensor]:
    """y, and the codes of x: see csrc/step/linear.cpp. With gradients enabled, y has the node that makes them."""
    return _ops.linear_step(*args)


def linear_gated(*args) -> list[Tensor]:
    """The codes of act(gate) * up, as `linear_step` takes codes of an x that has no values."""
    return _ops.linear_gated(*args)


def linear_counts() -> list[list[int]]:
    """By plan: quantizations of input, weight and gradient (rowwise, columnwise each) and products since the last call."""
    return _ops.linear_counts().tolist()


def random_key(step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None) -> Tensor:
    """int64 [5] (`rng.KEY_FIELDS`) of a slot's rows, from the step's fields (`context.STEP_FIELDS`).

    after:  a tensor that is made before; in a graph it keeps the key in the backward.
    """
    return _ops.random_key(step, ids, slot, rows) if after is None else _ops.random_key.after(step, ids, slot, rows, after)


def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    _ops.record_amax(amaxes, amax)


# Optimizers #

def adam_takes(*tensors: Tensor | None) -> bool:
    """`adam` can read and write these tensors of a parameter: fp32, bf16 and uint8 ones, contiguous, where kernels run."""
    kinds = torch.float32, torch.bfloat16, torch.uint8
    return all(t is None or (runs(t) and t.is_contiguous() and t.dtype in kinds) for t in tensors)


class AdamStep(NamedTuple):
    """A step of parameters of one device, and of one dtype of gradients and one of moments.

    master:         fp32, or remainders. first, second: moments, or their codes. row: of `scalars`, fp32 [rows, 8], for each parameter.
    grad_scale:     fp32 [1]; gradients are divided by it. found_inf: fp32 [1]; not 0: nothing is changed.
    """

    master: Sequence[Tensor]
    grad: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    row: Sequence[int]
    scalars: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def on_device(self) -> AdamStep:
        """What all parameters read, where they are."""
        device = self.master[0].device
        read = (None if t is None else t.to(device, torch.float32, non_blocking=True) for t in self[5:])
        return AdamStep(*self[:5], *read)


def adam(
    step: AdamStep, rounded: Sequence[Tensor] = (), first_scale: Sequence[Tensor] = (), second_scale: Sequence[Tensor] = (),
) -> None:
    """One step of many parameters in place, in one launch (csrc/optim/adam.cu).

    rounded:  bf16 parameters that are their masters rounded, or that masters (uint8 [.., 2]) are remainders of: of all, or
              of none.
    first_scale, second_scale:  fp32 [rows, blocks], of moments that are codes (`compact.encode`): of all, or of none.
    """
    master, grad, first, second, row, *read = step.on_device()
    _ops.adam(master, grad, first, second, rounded, first_scale, second_scale, row, *read)
    torch.autograd.graph.increment_version([*master, *first, *second, *rounded, *first_scale, *second_scale])


def _adam_group(
    step: AdamStep, encodings: Sequence[Encoding], row0: Sequence[int], statistics: bool, out: list[Tensor]
) -> None:
    call = _call_of(tuple(encodings))
    _ops.adam_group(*step.on_device(), *call[:4], row0, statistics, out)
    torch.autograd.graph.increment_version([*step.master, *step.first, *step.second])


def adam_codes(
    step: AdamStep, encodings: Sequence[Encoding], row0: Sequence[int], into: Sequence[Sequence[tuple | None]]
) -> list[list[tuple[Tensor, Tensor]]]:
    """`adam` of masters [rows, cols], and (data, scale) of the new ones, rounded to bf16, in one launch.

    encodings:  one a direction, rowwise first: of 8 bits, with scales that need no pass over the tensor before.
    into:       for each master and encoding the buffers to write; None: new ones.
    """
    made = []
    for x, start, given in zip(step.master, row0, into):
        made.append([])
        for e, buffers in zip(encodings, given):
            if buffers is None:
                of = encoding_shapes(pack_encoding(e), e.direction is not ROWWISE, x.shape, start)
                buffers = x.new_empty(of.data, dtype=torch.uint8), x.new_empty(of.scale, dtype=of.scale_dtype)
            made[-1].append(buffers)
    _adam_group(step, encodings, row0, False, [t for of in made for buffers in of for t in buffers])
    return made


def adam_statistics(
    step: AdamStep, encodings: Sequence[Encoding], row0: Sequence[int], blocks: Sequence[Sequence[bool]]
) -> list[list[tuple[Tensor | None, Tensor | None]]]:
    """`adam` of masters [rows, cols], and (amax, tensor_amax or None) of the new ones, rounded to bf16, in one launch.

    encodings:  one a direction, rowwise first.
    blocks:     for each master and encoding, whether its amax is wanted; else it is None.
    """
    places, at = [], 0
    for x, start, wanted in zip(step.master, row0, blocks):
        for e, is_wanted in zip(encodings, wanted):
            grid = encoding_shapes(pack_encoding(e), e.direction is not ROWWISE, x.shape, start).amax
            for shape in ((grid if is_wanted else (0, 0)), *([(1, 1)] if e.fmt.tensor_scale else [])):
                places.append((shape, at))
                at += round_up(prod(shape), 4)
    zeros = step.master[0].new_zeros(at)
    out = [zeros.as_strided(shape, (shape[1], 1), start) for shape, start in places]
    _adam_group(step, encodings, row0, True, out)
    made = iter(out)
    return [
        [
            (amax if is_wanted else None, next(made).view(1) if e.fmt.tensor_scale else None)
            for e, is_wanted, amax in ((e, w, next(made)) for e, w in zip(encodings, wanted))
        ]
        for wanted in blocks
    ]


def adam_count(
    steps: Sequence[Tensor], found_inf: Tensor | None, lr: float | Tensor, beta1: float, beta2: float, eps: float,
    decay: float, decoupled: bool,
) -> Tensor:
    """Add 1 - found_inf to every fp32 [] of `steps`, and give the scalars of each (`fused_adam.SCALARS`): fp32 [steps, 8]."""
    device = steps[0].device
    found_inf = None if found_inf is None else found_inf.to(device, torch.float32)
    on_device = lr.to(device, torch.float32) if isinstance(lr, Tensor) else None
    rows = _ops.adam_count(
        steps, found_inf, on_device, 0.0 if on_device is not None else lr, beta1, beta2, eps, decay, decoupled
    )
    torch.autograd.graph.increment_version(steps)
    return rows


# Fake implementations: shapes alone, for torch.compile #

def _floats(x: Tensor, size: int | Sequence[int]) -> Tensor:
    return x.new_empty(size, dtype=torch.float32)


def _sides(row: int, col: int):
    return [(side, bool(d)) for d, side in enumerate((row, col)) if side]


# The dispatcher leaves out arguments that equal their default: fakes take fewer.
def _fake_quantize(x, row, col, row_eps, col_eps, row0, through_bf16, *known):
    made = []
    for side, columnwise in _sides(row, col):
        of = encoding_shapes(side, columnwise, x.shape, row0)
        amax, tensor_amax = (*known, *[None] * 8)[4 * columnwise : 4 * columnwise + 2]
        made += [x.new_empty(of.data, dtype=torch.uint8), x.new_empty(of.scale, dtype=of.scale_dtype)]
        made += [_floats(x, 1)] if of.has_tensor_amax and tensor_amax is None else []
        made += [_floats(x, of.amax)] if of.has_amax and amax is None else []
    return made


def _fake_anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, through_bf16):
    made = []
    for (side, columnwise), run in zip(((row, False), (col, True)), (row_run, col_run)):
        if side:
            of = encoding_shapes(side, columnwise, x.shape, run=run)
            made += [x.new_empty(of.data, dtype=torch.uint8), _floats(x, of.scale)]
    return made


def _fake_statistics(x, row, col, row0, through_bf16):
    made = []
    for side, columnwise in _sides(row, col):
        of = encoding_shapes(side, columnwise, x.shape, row0)
        made += [_floats(x, of.amax)] + ([_floats(x, 1)] if of.has_tensor_amax else [])
    return made


def _fake_statistics_group(x, side, columnwise, row0, through_bf16):
    sides = (0, side) if columnwise else (side, 0)
    return [t for one, start in zip(x, row0) for t in _fake_statistics(one, *sides, start, through_bf16)]


def _fake_anchor_codes(data, scale, tensor_amax, side, columnwise, transposed, whole, cols, run=0):
    *matrices, rows, _ = data.shape
    run = OF_TENSOR if whole else run
    sizes = (cols, rows) if transposed else (rows, cols)
    return data.new_empty((*matrices, *sizes)), _floats(data, (*matrices, *_anchor_shape(rows, cols, columnwise, run)))


def _fake_swizzle(scale, outer, outer_block, transposed):
    blocks = scale.shape[0 if transposed else 1]
    of_32 = SPREAD_BLOCKS * blocks if scale.dtype is torch.float32 else round_up(blocks, 4)
    return scale.new_empty(round_up(outer, TILE) * of_32, dtype=torch.uint8)


FAKES = {
    "quantize": _fake_quantize,
    "quantize_anchored": _fake_anchored,
    "statistics": _fake_statistics,
    "column_sums": lambda x: x.new_empty(x.shape[1]),
    "quantize_group": lambda *args: None,
    "quantize_group_out": lambda *args: None,
    "statistics_group": _fake_statistics_group,
    "cast_pieces": lambda *args: None,
    "cast_scales": lambda *args: None,
    "dequantize": lambda data, scale, tensor_amax, side, columnwise, cols, row0, dtype: data.new_empty(
        (data.shape[0], cols), dtype=dtype),
    "random_key": lambda step, ids, slot, rows: step.new_empty(5),
    "random_key.after": lambda step, ids, slot, rows, after: step.new_empty(5),
    "record_amax": lambda amaxes, amax: None,
    "tensor_decode_scale": lambda tensor_amax, side: _floats(tensor_amax, tensor_amax.numel()),
    "transpose_codes": lambda data, rows, cols, bits: data.new_empty((cols, ceil_div(rows, 2) if bits == 4 else rows)),
    "swizzle_scales": _fake_swizzle,
    "anchor_group": lambda *args: None,
    "anchor_codes": _fake_anchor_codes,
    "relayout_group": lambda *args: None,
    "activation": lambda g, u, kind: (g.new_empty(g.shape), _amaxes(g, 1)),
    "activation_backward": lambda dh, g, u, kind: (
        g.new_empty(g.shape), g.new_empty(0 if u is None else g.shape), _amaxes(g, 1 + (u is not None))),
    "norm": lambda x, weight, bias, eps, centred, *rest: (
        x.new_empty(x.shape), _floats(x, 1), _floats(x, x.numel() // x.shape[-1]),
        _floats(x, x.numel() // x.shape[-1] if centred else 0)),
    "norm_backward": lambda dy, x, weight, residual, rstd, mean, zero_centered, rounds_first, has_bias: (
        x.new_empty(x.shape), _floats(x, 1), x.new_empty(x.shape[-1]), x.new_empty(x.shape[-1] if has_bias else 0)),
    "adam": lambda *args: None,
    "adam_group": lambda *args: None,
    "adam_count": lambda step, *args: step[0].new_empty((len(step), 8)),
    "gemm": lambda a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, *rest, **options: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=out_dtype),
    "gemm_out": lambda *args, **options: None,
    "product_error": lambda *args: None,
    "grouped_gemm": lambda *args, **options: None,
    "grouped_gemm_wgrad": lambda *args, **options: None,
}


# Twice the multiply-adds, as `torch.utils.flop_counter` counts: users ask, and partitioners that choose what to recompute #

def _flops(a: Sequence[int], b: Sequence[int], kind: int = 0) -> int:
    """Of rows a [M, K] by all of b's; kind: of 4-bit codes, K is twice the bytes."""
    return 2 * a[0] * prod(b) * (2 if kind & 7 == ELEMENTS["e2m1"] else 1)


# Under `activation_memory_budget` partitioners recompute operators of libraries too, by these
# counts, where they are told to include them: a gathered weight's GEMM may run again, so the
# backward then gathers both directions.
FLOPS = {
    "gemm": lambda a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    "gemm_out": lambda out, a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    "grouped_gemm": lambda out, a, b, *rest, **options: _flops(a, b[1:]),  # a row by the weight of its group
    "grouped_gemm_wgrad": lambda out, a, b, *rest, **options: _flops(a, b),
}
if extension.is_loaded():
    for _name, _fake in FAKES.items():
        torch.library.register_fake(f"fsdp_quant::{_name}", _fake)
    for _name, _formula in FLOPS.items():
        register_flop_formula(getattr(_ops, _name))(_formula)

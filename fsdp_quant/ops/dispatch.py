# SPDX-License-Identifier: Apache-2.0
"""Dispatch each operation to the compiled kernel, if there is one for the device and format, else
to the reference.

Both return the same bytes. Callers pass all directions of a tensor together, so that a kernel reads
the tensor once. `dtype`: values are rounded to it before they are encoded (None: they are not).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counters import counters
from ..formats import ROWWISE, Direction, Encoding, Format
from . import anchoring, layout, native, opaque, reference
from .layout import (
    ANCHOR_RUNS,
    ANCHORED,
    ANCHORED_TENSOR,
    ANCHORED_TILE,
    COMPACT,
    LAID_OUT,
    is_anchored_as_encoded,
    is_anchored_of_codes,
    is_exact_operand,
)
from .reference import known


class Statistics(NamedTuple):
    """amax: fp32 [block rows, block cols] or None; tensor_amax: fp32 [1] or None.

    In graphs amax of one scale may be [parts, 1], of parts of the tensor: the largest counts.
    """

    amax: Tensor | None
    tensor_amax: Tensor | None

    def to(self, device: torch.device) -> Statistics:
        amax, tensor_amax = (None if t is None else t.to(device) for t in self)
        return Statistics(amax, tensor_amax)


class Encoded(NamedTuple):
    """The buffers of one storage (see `Storage`), and the amax that scaled them if one scale spans
    a row or more."""

    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    amax: Tensor | None
    layout: str = COMPACT


class _Route(NamedTuple):
    """Indices of the encodings of one call that a kernel computes, and of the rest."""

    by_kernel: tuple[int, ...]
    rest: tuple[int, ...]


@functools.cache
def _route_of(
    encodings: tuple[Encoding, ...], dtype: torch.dtype | None, whole_tiles: bool
) -> _Route:
    """dtype: of values on a device with kernels; None: no kernels. whole_tiles: row0 begins a
    tile."""
    chosen = [
        i
        for i, e in enumerate(encodings)
        if dtype is not None and native.encodes(e, dtype, whole_tiles)
    ]
    if len({encodings[i].direction for i in chosen}) < len(chosen):
        chosen = chosen[:1]  # a kernel computes one encoding per direction
    return _Route(tuple(chosen), tuple(i for i in range(len(encodings)) if i not in chosen))


def _split(
    x: Tensor, encodings: tuple[Encoding, ...], dtype: torch.dtype | None, row0: int
) -> tuple[_Route, Tensor, bool]:
    """(route, x as the kernel reads it, whether the kernel rounds to bf16)."""
    round_to_bf16 = x.dtype is torch.float32 and dtype is torch.bfloat16
    values = x if round_to_bf16 else _as(x, dtype)
    runs = native.is_available_for(values) and values.numel() > 0
    return (
        _route_of(encodings, values.dtype if runs else None, row0 % native.TILE == 0),
        values,
        round_to_bf16,
    )


class _Calls(NamedTuple):
    """Kernel calls that write encodings in the requested layouts: indices, and arguments."""

    anchored: tuple[int, ...]
    anchored_encodings: tuple[Encoding, ...]
    anchor_runs: tuple[int, ...]
    anchored_transposed: tuple[bool, ...]
    plain: tuple[int, ...]
    plain_encodings: tuple[Encoding, ...]
    transposed: tuple[bool, ...]
    scale_layouts: tuple[int, ...]
    layouts: tuple[str, ...]


@functools.cache
def _calls_for(
    encodings: tuple[Encoding, ...],
    by_kernel: tuple[int, ...],
    layouts: tuple[str, ...] | None,
    can_anchor: tuple[bool, ...],
    whole: bool,
    native_scales: int,
) -> _Calls:
    layouts = layouts or (COMPACT,) * len(encodings)

    def is_columnwise(i: int) -> bool:
        return encodings[i].direction is not ROWWISE

    def anchors(i: int) -> bool:
        fmt = encodings[i].fmt
        fits = (
            layouts[i] in ANCHOR_RUNS
            and not is_anchored_of_codes(fmt, layouts[i])
            or is_anchored_as_encoded(fmt, layouts[i])
        )
        return can_anchor[i] and fits and not encodings[i].stochastic

    anchored = tuple(filter(anchors, by_kernel))
    # one launch writes one kind; the others are compact
    if len({layouts[i] == ANCHORED_TENSOR for i in anchored}) > 1:
        anchored = tuple(i for i in anchored if layouts[i] != ANCHORED_TENSOR)
    plain = tuple(i for i in by_kernel if i not in anchored)
    exact = [can_anchor[i] and is_exact_operand(encodings[i].fmt, layouts[i]) for i in plain]
    fits = [is_exact or (whole and layouts[i] in LAID_OUT) for i, is_exact in zip(plain, exact)]
    return _Calls(
        anchored,
        tuple(encodings[i] for i in anchored),
        tuple(native.anchor_run(layouts[i]) for i in anchored),
        tuple(map(is_columnwise, anchored)),
        plain,
        tuple(encodings[i] for i in plain),
        tuple(fit and is_columnwise(i) for i, fit in zip(plain, fits)),
        tuple(
            native.OPERAND if is_exact else native_scales if fit else native.COMPACT
            for fit, is_exact in zip(fits, exact)
        ),
        tuple(layouts[i] if fit else COMPACT for i, fit in zip(plain, fits)),
    )


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def statistics(
    x: Tensor, encodings: Sequence[Encoding], row0: int = 0, dtype: torch.dtype | None = None
) -> list[Statistics]:
    """Block and tensor amaxes of x [rows, cols] for each encoding; `row0` places x in the global
    tensor."""
    (by_kernel, rest), values, round_to_bf16 = _split(x, tuple(encodings), dtype, row0)
    results: dict[int, Statistics] = {}
    if by_kernel:
        made = native.statistics(values, [encodings[i] for i in by_kernel], row0, round_to_bf16)
        results = {i: Statistics(*m) for i, m in zip(by_kernel, made)}
    for i in rest:
        e = encodings[i]
        if opaque.is_tracing() and e.fmt.is_quantized:
            results[i] = Statistics(*opaque.statistics(_as(x, dtype), e, row0))
        else:
            results[i] = Statistics(
                *reference.statistics(reference.prepared(_as(x, dtype), e), e, row0)
            )
    return [results[i] for i in range(len(encodings))]


def encode(
    x: Tensor,
    encodings: Sequence[Encoding],
    stats: Sequence[Statistics | None] | None,
    row0: int = 0,
    keys: Sequence[Tensor | None] | None = None,
    encode_scales: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype | None = None,
    layouts: Sequence[str] | None = None,
) -> list[Encoded]:
    """Codes and scales of x [rows, cols]; one result per encoding.

    stats:    shared by every rank that holds a part of the tensor; None: compute them from x. For
              a layout that is anchored by the tensor, its amax.
    keys:     int64 [5] per encoding (`rng.KEY_FIELDS`), for stochastic rounding.
    encode_scales:  fp32 [1] per encoding, for delayed scaling: of a history, 0 while it is empty.
    layouts:  requested layout of each result (`ops.layout`); compact if no kernel writes it, as
              `Encoded.layout` tells.
    """
    encodings = tuple(encodings)
    (by_kernel, rest), values, round_to_bf16 = _split(x, encodings, dtype, row0)
    none = (None,) * len(encodings)
    stats, keys, encode_scales = stats or none, keys or none, encode_scales or none
    results: dict[int, Encoded] = {}
    if by_kernel:
        whole_bf16 = row0 == 0 and (round_to_bf16 or values.dtype is torch.bfloat16)
        can_anchor = tuple([whole_bf16 and (s is None or s.amax is None) for s in stats])
        requested = tuple(layouts) if layouts else None
        native_scales = native.scale_layout(values) if requested else 0
        calls = _calls_for(encodings, by_kernel, requested, can_anchor, row0 == 0, native_scales)
        if requested and calls.anchored:
            made = native.quantize_anchored(
                values,
                calls.anchored_encodings,
                calls.anchor_runs,
                round_to_bf16,
                calls.anchored_transposed,
                [None if (s := stats[i]) is None else s.tensor_amax for i in calls.anchored],
            )
            for i, (data, scale), transposed in zip(
                calls.anchored, made, calls.anchored_transposed
            ):
                scale = _anchored_scale(scale if transposed else scale.t(), requested[i])
                results[i] = Encoded(data, scale, None, None, requested[i])
        if calls.plain:
            made = native.quantize(
                values,
                calls.plain_encodings,
                row0,
                round_to_bf16,
                [stats[i] or (None, None) for i in calls.plain],
                [keys[i] for i in calls.plain],
                [encode_scales[i] for i in calls.plain],
                calls.transposed,
                calls.scale_layouts,
            )
            for i, (*buffers, amax), layout_of in zip(calls.plain, made, calls.layouts):
                data, scale, tensor_amax = buffers
                results[i] = Encoded(data, scale, tensor_amax, amax, layout_of)
    for i in rest:
        e, key, encode_scale = encodings[i], keys[i], encode_scales[i]
        if opaque.is_tracing() and e.fmt.is_quantized:
            amax, tensor_amax = stats[i] or (None, None)
            results[i] = Encoded(
                *opaque.encode(_as(x, dtype), e, amax, tensor_amax, row0, key, encode_scale)
            )
            continue
        prepared = reference.prepared(_as(x, dtype), e)
        amax, tensor_amax = stats[i] or (None, None)
        if amax is None:
            amax, whole = reference.statistics(prepared, e, row0)
            tensor_amax = whole if tensor_amax is None else tensor_amax
        if encode_scale is not None:
            encode_scale = reference.delayed_encode_scale(encode_scale, known(amax, "the amax"), e)
        data, scale = reference.encode(prepared, amax, tensor_amax, e, row0, key, encode_scale)
        results[i] = Encoded(data, scale, tensor_amax, amax)
    for i, e in enumerate(encodings):
        if e.fmt.is_quantized:
            by = "native" if i in by_kernel else "reference"
            counters.add("quantize", (e.fmt.name, e.direction.value, by))
    return [results[i] for i in range(len(encodings))]


def _encodes_group(
    x: Sequence[Tensor], encoding: Encoding, dtype: torch.dtype | None
) -> tuple[bool, bool]:
    """(one launch encodes all of x, the kernel rounds to bf16)."""
    first = x[0]
    round_to_bf16 = first.dtype is torch.float32 and dtype is torch.bfloat16
    as_they_are = round_to_bf16 or dtype in (None, first.dtype)
    encodes = (
        len(x) > 1
        and as_they_are
        and native.encodes_group(encoding, first.dtype, round_to_bf16)
        and any(map(native.is_available_for, x))
        and all(one.dtype is first.dtype for one in x)
    )
    return encodes, round_to_bf16


def multi_tensor_amax(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], dtype: torch.dtype | None = None
) -> list[Statistics]:
    """`statistics` of one encoding of each tensor."""
    in_one, round_to_bf16 = _encodes_group(x, encoding, dtype)
    if in_one:
        return [Statistics(*s) for s in native.multi_tensor_amax(x, encoding, row0, round_to_bf16)]
    return [statistics(one, (encoding,), start, dtype)[0] for one, start in zip(x, row0)]


def multi_tensor_encode(
    x: Sequence[Tensor],
    encoding: Encoding,
    stats: Sequence[Statistics | None],
    row0: Sequence[int],
    encode_scales: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
    into: Sequence[tuple[Tensor, Tensor] | None] | None = None,
    records: Sequence[Tensor | None] | None = None,
    calls: list[native.RecordedEncode] | None = None,
) -> list[Encoded]:
    """`encode` of one encoding of each tensor; stats, row0 and encode_scales have one entry per
    tensor.

    into:     (data, scale) of each, or None: buffers to write if one launch encodes all tensors.
    records:  per delayed tensor, the history in which to record its amax (`record_amax`), or None.
    calls:    receives the launch that encoded all tensors, if it can be replayed
              (`replay_encode`).
    """
    in_one, round_to_bf16 = _encodes_group(x, encoding, dtype)
    records = records or [None] * len(x)
    if not in_one:
        made = [
            encode(one, [encoding], [s], start, encode_scales=[scale], dtype=dtype)[0]
            for one, s, start, scale in zip(x, stats, row0, encode_scales)
        ]
        for one, record in zip(made, records):
            if record is not None:
                record_amax(record, known(one.amax, "the amax"))
        return made
    given: list[Statistics | None] | None = list(stats)
    if encoding.fmt.scale_leaves_contraction or encoding.fmt.tensor_scale:
        missing = [i for i, s in enumerate(given) if s is None]
        is_delayed = any(scale is not None for scale in encode_scales)
        if len(missing) == len(x) and not encoding.fmt.tensor_scale and not is_delayed:
            given = None  # each replay computes them again
        elif missing:
            found = native.multi_tensor_amax(
                [x[i] for i in missing], encoding, [row0[i] for i in missing], round_to_bf16
            )
            for i, (amax, tensor_amax) in zip(missing, found):
                given[i] = Statistics(amax, tensor_amax)
            calls = None
    targets = [pair for pair in into or () if pair is not None]
    targets = targets if len(targets) == len(x) else None
    made = native.multi_tensor_quantize(
        x, encoding, row0, round_to_bf16, given, targets, encode_scales, records, calls
    )
    counters.add("quantize", (encoding.fmt.name, encoding.direction.value, "native"), len(x))
    return [Encoded(*one) for one in made]


def replay_encode(call: native.RecordedEncode, x: Sequence[Tensor]) -> None:
    """Repeat a launch of `multi_tensor_encode` over other values."""
    call(x)
    counters.add(
        "quantize", (call.encoding.fmt.name, call.encoding.direction.value, "native"), len(x)
    )


def scales(stats: Statistics, encoding: Encoding, encode_scale: Tensor | None = None) -> Tensor:
    """Decode scales [block rows, block cols] of blocks with these amaxes; encode_scale: fp32 [1],
    of a history."""
    amax = known(stats.amax, "the amax")
    if encode_scale is not None:
        encode_scale = reference.delayed_encode_scale(encode_scale, amax, encoding)
    return reference.scales(amax, stats.tensor_amax, encoding, encode_scale)[0]


def _anchored_scale(scale: Tensor, wanted: str) -> Tensor:
    """fp32 scales [runs, lines] in a layout of ANCHORS: [1], [lines], or [runs, lines rounded up to
    4]."""
    return (
        scale.flatten()
        if wanted in (ANCHORED_TENSOR, ANCHORED)
        else layout.pad_to(scale, 1, 4).contiguous()
    )


def decode(
    data: Tensor,
    scale: Tensor | None,
    tensor_amax: Tensor | None,
    fmt: Format,
    direction: Direction,
    cols: int,
    row0: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """element * scale (* tensor scale) in fp32 [rows, cols], rounded once to `dtype`; without the
    scale if it is None.

    Identity keeps its own dtype where `dtype` is None.
    """
    if native.is_available_for(data) and native.unsupported_reason(fmt) is None:
        return native.dequantize(
            data, scale, tensor_amax, fmt, direction, cols, row0, dtype or torch.float32
        )
    if opaque.is_tracing() and fmt.is_quantized:
        return opaque.decode(
            data, scale, tensor_amax, fmt, direction, cols, row0, dtype or torch.float32
        )
    return _as(reference.decode(data, scale, tensor_amax, fmt, direction, cols, row0), dtype)


def tensor_decode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """fp32 [1]: the second-level decode scale of a two-level format
    (`reference.tensor_decode_scale`)."""
    return (native if native.is_available_for(tensor_amax) else reference).tensor_decode_scale(
        tensor_amax, fmt
    )


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of x [rows, cols], [cols]: added in fp32, rounded once.

    A kernel adds tiles of 128 rows, as the kernels that quantize x do, so its last bits may differ
    from torch's.
    """
    if x.dtype is torch.bfloat16 and x.numel() and native.is_available_for(x):
        return native.column_sums(x)
    return opaque.column_sums(x) if opaque.is_tracing() else x.sum(0)


# Scalars of a step #


def random_key(
    step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None
) -> Tensor:
    """int64 [5] (`rng.KEY_FIELDS`) of the `rows` rows of a slot.

    step:  int64 [5] (`context.STEP_FIELDS`); ids: int64 [slots]. Without a token offset, a rank's
           rows follow those of the rank before.
    after: a gradient, so that a graph reads the step in its backward, as eager mode does.
    """
    if native.is_available_for(step):
        return native.random_key(step, ids, slot, rows, after)
    return (opaque.random_key if opaque.is_tracing() else opaque.key_of)(
        step, ids, slot, rows, after
    )


def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    amax = amax.detach().reshape(())
    if (
        native.is_available_for(amaxes) and not opaque.is_tracing()
    ):  # a compiler fuses it into other work
        native.record_amax(amaxes, amax)
    else:
        amaxes[0].copy_(torch.maximum(amaxes[0], torch.where(amax.isfinite(), amax, 0.0)))


# GEMM layouts #


def transpose_codes(data: Tensor, rows: int, cols: int, fmt: Format) -> Tensor:
    """Codes of [rows, cols] as those of its transpose, packed along dim 1 again; contiguous."""
    if fmt.bits in native.TRANSPOSED_BITS and native.is_available_for(data):
        return native.transpose_codes(data, rows, cols, fmt.bits)
    return layout.repack(data, fmt.bits, rows, cols)


def multi_tensor_transpose(
    data: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    fmt: Format,
    calls: list[native.RecordedLaunch] | None = None,
) -> list[Tensor]:
    """`transpose_codes` of each; calls: receives the launch."""
    if (
        len(data) > 1
        and fmt.bits in native.TRANSPOSED_BITS
        and all(map(native.is_available_for, data))
    ):
        return native.multi_tensor_transpose(data, shapes, fmt.bits, calls=calls)
    return [transpose_codes(one, *shape, fmt) for one, shape in zip(data, shapes)]


def anchor_codes(
    data: Tensor,
    scale: Tensor,
    tensor_amax: Tensor | None,
    cols: int,
    fmt: Format,
    direction: Direction,
    wanted: str,
) -> tuple[Tensor, Tensor]:
    """Compact codes of cols columns as an operand [outer, contraction] in a layout of ANCHORS, and
    its fp32 scales: `anchoring.anchored_codes`; `anchoring.e4m3_operand` for codes that decode
    exactly to e4m3."""
    transposed = direction is not ROWWISE
    if native.is_available_for(data):
        return native.anchor_codes(
            data, scale, tensor_amax, cols, fmt, direction, transposed, native.anchor_run(wanted)
        )
    if fmt.decodes_exactly_to_e4m3:
        codes, made = anchoring.e4m3_operand(data, scale, tensor_amax, fmt, direction, cols)
    else:
        whole, run = wanted == ANCHORED_TENSOR, ANCHOR_RUNS.get(wanted)
        tiles = wanted == ANCHORED_TILE
        codes, made = anchoring.anchored_codes(data, scale, fmt, direction, whole, cols, run, tiles)
    return (codes.t().contiguous() if transposed else codes), made


def multi_tensor_anchor(
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    tensor_amax: Sequence[Tensor | None],
    cols: Sequence[int],
    fmt: Format,
    direction: Direction,
    wanted: str,
    calls: list[native.RecordedLaunch] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """`anchor_codes` of each; calls: receives the launch, if it can be replayed."""
    if all(map(native.is_available_for, data)):
        run = native.anchor_run(wanted)
        return native.multi_tensor_anchor(
            data, scale, tensor_amax, cols, fmt, direction, direction is not ROWWISE, run, calls
        )
    return [
        anchor_codes(*one, fmt, direction, wanted) for one in zip(data, scale, tensor_amax, cols)
    ]


def swizzle_scales(scale: Tensor, outer: int, outer_block: int, transposed: bool) -> Tensor:
    """One-byte block scales, one per row of the operand, in 128 x 4 tiles (`layout.swizzle_128x4`),
    padding zero.

    scale:        uint8 [outer blocks, contraction blocks]; transposed: [contraction blocks, outer
                  blocks]. Or fp32 powers of two, which become e8m0 scales of `layout.SPREAD_BLOCKS`
                  blocks each.
    outer:        rows of the operand.
    outer_block:  rows that share a scale.
    """
    if native.is_available_for(scale):
        return native.swizzle_scales(scale, outer, outer_block, transposed)
    scale = scale.t() if transposed else scale
    if scale.dtype is torch.float32:
        return layout.swizzle_128x4(layout.spread_scales(scale, outer, outer_block))
    return layout.swizzle_128x4(scale.repeat_interleave(outer_block, 0)[:outer])

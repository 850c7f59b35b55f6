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
from .capability import arch_of
from .layout import COMPACT
from .reference import known


class Statistics(NamedTuple):
    """amax: fp32 [block rows, block cols] or None; tensor_amax: fp32 [1] or None (with
    scale_per="row" one per row of the operand).

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


@functools.cache
def _by_kernel(
    encodings: tuple[Encoding, ...], dtype: torch.dtype, whole_tiles: bool
) -> tuple[int, ...]:
    """Indices of the encodings that a kernel computes, one per direction, of values of `dtype`.
    whole_tiles: row0 begins a tile."""
    chosen = [i for i, e in enumerate(encodings) if native.encodes(e, dtype, whole_tiles)]
    shares_direction = len({encodings[i].direction for i in chosen}) < len(chosen)
    return tuple(chosen[:1] if shares_direction else chosen)


def _kernel_input(
    x: Tensor, encodings: tuple[Encoding, ...], dtype: torch.dtype | None, row0: int
) -> tuple[tuple[int, ...], Tensor, bool]:
    """(indices of the encodings that a kernel computes, x as the kernel reads it, whether the
    kernel rounds to bf16)."""
    round_to_bf16 = x.dtype is torch.float32 and dtype is torch.bfloat16
    values = x if round_to_bf16 else _as(x, dtype)
    if not (native.is_available_for(values) and values.numel() > 0):
        return (), values, round_to_bf16
    return _by_kernel(encodings, values.dtype, row0 % native.TILE == 0), values, round_to_bf16


class _Calls(NamedTuple):
    """Kernel calls that write encodings in the requested layouts.

    anchored, plain:  indices of the encodings that one launch anchors, and that one quantizes.
    layouts:          that each encoding is written in, and with transposed codes;
    scale_layouts:    with the scales of `native.pack_encoding`.
    """

    anchored: tuple[int, ...]
    plain: tuple[int, ...]
    layouts: list[str]
    transposed: list[bool]
    scale_layouts: list[int]


def _is_anchored_by_kernel(e: Encoding, target: str) -> bool:
    anchors_values = target in layout.ANCHOR_RUNS and not layout.is_anchored_of_codes(e.fmt, target)
    return not e.stochastic and (anchors_values or layout.is_anchored_as_encoded(e.fmt, target))


@functools.cache
def _calls_for(
    encodings: tuple[Encoding, ...],
    by_kernel: tuple[int, ...],
    targets: tuple[str, ...],
    can_anchor: tuple[bool, ...],
    from_row_0: bool,
    native_scales: int,
) -> _Calls:
    anchored = tuple(
        i for i in by_kernel if can_anchor[i] and _is_anchored_by_kernel(encodings[i], targets[i])
    )
    # one launch writes one kind; the others are compact
    if len({targets[i] == layout.ANCHORED_TENSOR for i in anchored}) > 1:
        anchored = tuple(i for i in anchored if targets[i] != layout.ANCHORED_TENSOR)
    calls = _Calls(anchored, tuple(i for i in by_kernel if i not in anchored), [], [], [])
    for i, (e, target) in enumerate(zip(encodings, targets)):
        is_exact = can_anchor[i] and layout.is_exact_operand(e.fmt, target)
        fits = i in anchored or is_exact or (from_row_0 and target in layout.LAID_OUT)
        calls.layouts.append(target if fits else COMPACT)
        calls.transposed.append(fits and e.direction is not ROWWISE)
        layout_of_exact = native.OPERAND if is_exact else native_scales
        calls.scale_layouts.append(layout_of_exact if fits else native.COMPACT)
    return calls


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _count(encoding: Encoding, by: str, amount: int = 1) -> None:
    counters.add("quantize", (encoding.fmt.name, encoding.direction.value, by), amount)


def statistics(
    x: Tensor, encodings: Sequence[Encoding], row0: int = 0, dtype: torch.dtype | None = None
) -> list[Statistics]:
    """Block and tensor amaxes of x [rows, cols] for each encoding; `row0` places x in the global
    tensor."""
    by_kernel, values, round_to_bf16 = _kernel_input(x, tuple(encodings), dtype, row0)
    amaxes: dict[int, tuple] = {}
    if by_kernel:
        chosen = [encodings[i] for i in by_kernel]
        amaxes = dict(zip(by_kernel, native.statistics(values, chosen, row0, round_to_bf16)))
    for i, e in enumerate(encodings):
        if i not in amaxes:
            is_quantized, values = e.fmt.is_quantized, _as(x, dtype)
            amaxes[i] = opaque.statistics(values, e, row0) if is_quantized else (None, None)
    return [Statistics(*amaxes[i]) for i in range(len(encodings))]


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
    by_kernel, values, round_to_bf16 = _kernel_input(x, encodings, dtype, row0)
    none = (None,) * len(encodings)
    keys, encode_scales = keys or none, encode_scales or none
    amaxes = [s or Statistics(None, None) for s in stats or none]
    results: dict[int, Encoded] = {}
    if by_kernel:
        can_anchor = row0 == 0 and (round_to_bf16 or values.dtype is torch.bfloat16)
        calls = _calls_for(
            encodings,
            by_kernel,
            tuple(layouts or (COMPACT,) * len(encodings)),
            tuple([can_anchor and s.amax is None for s in amaxes]),
            row0 == 0,
            native.scale_layout_of(arch_of(values.device)) if layouts else native.COMPACT,
        )
        if calls.anchored:
            results |= _anchored_by_kernel(values, encodings, calls, amaxes, round_to_bf16)
        if calls.plain:

            def plain(per_encoding: Sequence) -> list:
                return [per_encoding[i] for i in calls.plain]

            codes = native.quantize(
                values,
                plain(encodings),
                row0,
                round_to_bf16,
                plain(amaxes),
                plain(keys),
                plain(encode_scales),
                plain(calls.transposed),
                plain(calls.scale_layouts),
            )
            for i, (data, scale, *amax) in zip(calls.plain, codes):
                results[i] = Encoded(data, scale, *amax, layout=calls.layouts[i])
    for i, e in enumerate(encodings):
        if i in results:
            _count(e, "native")
        elif e.fmt.is_quantized:
            amax, tensor_amax = amaxes[i]
            results[i] = Encoded(
                *opaque.encode(_as(x, dtype), amax, tensor_amax, keys[i], encode_scales[i], e, row0)
            )
        else:
            results[i] = Encoded(_as(x, dtype).contiguous(), None, None, None)
    return [results[i] for i in range(len(encodings))]


def _anchored_by_kernel(
    values: Tensor,
    encodings: tuple[Encoding, ...],
    calls: _Calls,
    amaxes: Sequence[Statistics],
    round_to_bf16: bool,
) -> dict[int, Encoded]:
    codes = native.quantize_anchored(
        values,
        [encodings[i] for i in calls.anchored],
        [native.anchor_run(calls.layouts[i]) for i in calls.anchored],
        round_to_bf16,
        [calls.transposed[i] for i in calls.anchored],
        [amaxes[i].tensor_amax for i in calls.anchored],
    )
    results = {}
    for i, (data, scale, *amax) in zip(calls.anchored, codes):
        scale, target = scale if calls.transposed[i] else scale.t(), calls.layouts[i]
        if target in (layout.ANCHORED_TENSOR, layout.ANCHORED):
            scale = scale.flatten()
        else:  # [runs, lines rounded up to 4]
            scale = layout.pad_to(scale, 1, 4).contiguous()
        results[i] = Encoded(data, scale, None, amax[0] if amax else None, target)
    return results


def _fits_one_launch(
    x: Sequence[Tensor], encoding: Encoding, dtype: torch.dtype | None
) -> tuple[bool, bool]:
    """(one launch encodes all of x, the kernel rounds to bf16)."""
    first = x[0]
    round_to_bf16 = first.dtype is torch.float32 and dtype is torch.bfloat16
    fits = (
        len(x) > 1
        and (round_to_bf16 or dtype in (None, first.dtype))
        and native.encodes_group(encoding, first.dtype, round_to_bf16)
        and any(map(native.is_available_for, x))
        and all(t.dtype is first.dtype for t in x)
    )
    return fits, round_to_bf16


def multi_tensor_amax(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], dtype: torch.dtype | None = None
) -> list[Statistics]:
    """`statistics` of one encoding of each tensor."""
    in_one_launch, round_to_bf16 = _fits_one_launch(x, encoding, dtype)
    if in_one_launch:
        return [Statistics(*s) for s in native.multi_tensor_amax(x, encoding, row0, round_to_bf16)]
    return [statistics(t, (encoding,), start, dtype)[0] for t, start in zip(x, row0)]


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
    in_one_launch, round_to_bf16 = _fits_one_launch(x, encoding, dtype)
    records = records or [None] * len(x)
    if not in_one_launch:
        results = [
            encode(t, [encoding], [s], start, encode_scales=[scale], dtype=dtype)[0]
            for t, s, start, scale in zip(x, stats, row0, encode_scales)
        ]
        for encoded, record in zip(results, records):
            if record is not None:
                record_amax(record, known(encoded.amax, "the amax"))
        return results
    known_stats: Sequence[Statistics | None] | None = stats
    # a kernel computes the amaxes as it encodes, if no scale spans more than a block
    spans_blocks = encoding.fmt.scale_leaves_contraction or encoding.fmt.tensor_scale
    if spans_blocks and any(s is None for s in stats):
        is_delayed = any(scale is not None for scale in encode_scales)
        if not any(stats) and not encoding.fmt.tensor_scale and not is_delayed:
            known_stats = None  # each replay computes them again
        else:
            known_stats, calls = _completed(stats, x, encoding, row0, round_to_bf16), None
    pairs = [pair for pair in into or () if pair is not None]
    targets = pairs if len(pairs) == len(x) else None
    codes = native.multi_tensor_quantize(
        x, encoding, row0, round_to_bf16, known_stats, targets, encode_scales, records, calls
    )
    _count(encoding, "native", len(x))
    return [Encoded(*buffers) for buffers in codes]


def _completed(
    stats: Sequence[Statistics | None],
    x: Sequence[Tensor],
    encoding: Encoding,
    row0: Sequence[int],
    round_to_bf16: bool,
) -> list[Statistics]:
    """`stats` with those that are None computed, in one launch."""
    missing = [i for i, s in enumerate(stats) if s is None]
    amaxes = iter(
        native.multi_tensor_amax(
            [x[i] for i in missing], encoding, [row0[i] for i in missing], round_to_bf16
        )
    )
    return [Statistics(*next(amaxes)) if s is None else s for s in stats]


def replay_encode(call: native.RecordedEncode, x: Sequence[Tensor]) -> None:
    """Repeat a launch of `multi_tensor_encode` over other values; [E, rows, cols] is E tensors."""
    call(x)
    _count(call.encoding, "native", len(call.results))


def scales(stats: Statistics, encoding: Encoding, encode_scale: Tensor | None = None) -> Tensor:
    """Decode scales [block rows, block cols] of blocks with these amaxes; encode_scale: fp32 [1],
    of a history."""
    amax = known(stats.amax, "the amax")
    if encode_scale is not None:
        encode_scale = reference.delayed_encode_scale(encode_scale, amax, encoding)
    return reference.scales(amax, stats.tensor_amax, encoding, encode_scale)[0]


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
    if not fmt.is_quantized:
        return _as(data, dtype)
    encoding = Encoding(fmt, direction)
    return opaque.decode(data, scale, tensor_amax, encoding, cols, row0, dtype or torch.float32)


def tensor_decode_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """The second-level decode scales of a two-level format, of the shape of its amaxes
    (`reference.tensor_decode_scale`)."""
    by_kernel = native.is_available_for(tensor_amax)
    return (native if by_kernel else reference).tensor_decode_scale(tensor_amax, fmt)


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of x [rows, cols], [cols]: added in fp32, rounded once.

    A kernel adds tiles of 128 rows, as the kernels that quantize x do, so its last bits may differ
    from torch's.
    """
    if x.dtype is torch.bfloat16 and x.numel() and native.is_available_for(x):
        return native.column_sums(x)
    return opaque.column_sums(x)


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
    return opaque.random_key(step, ids, slot, rows, after)


def record_amax_by_torch(amaxes: Tensor, amax: Tensor) -> None:
    amax = amax.detach().reshape(())
    amaxes[0].copy_(torch.maximum(amaxes[0], torch.where(amax.isfinite(), amax, 0.0)))


@opaque.traced_as(record_amax_by_torch)  # a compiler fuses it into other work
def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    if native.is_available_for(amaxes):
        native.record_amax(amaxes, amax.detach().reshape(()))
    else:
        record_amax_by_torch(amaxes, amax)


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
        (len(data) > 1 or calls is not None)
        and fmt.bits in native.TRANSPOSED_BITS
        and all(map(native.is_available_for, data))
    ):
        return native.multi_tensor_transpose(data, shapes, fmt.bits, calls=calls)
    return [transpose_codes(codes, *shape, fmt) for codes, shape in zip(data, shapes)]


def anchor_codes(
    data: Tensor,
    scale: Tensor,
    tensor_amax: Tensor | None,
    cols: int,
    fmt: Format,
    direction: Direction,
    target: str,
) -> tuple[Tensor, Tensor]:
    """Compact codes of cols columns as an operand [outer, contraction] in a layout of ANCHORS, and
    its fp32 scales: `anchoring.anchored_codes`; `anchoring.e4m3_operand` for two-level
    codes."""
    transposed = direction is not ROWWISE
    if native.is_available_for(data):
        return native.anchor_codes(
            data, scale, tensor_amax, cols, fmt, direction, transposed, native.anchor_run(target)
        )
    if fmt.becomes_e4m3:
        codes, scale = anchoring.e4m3_operand(data, scale, tensor_amax, fmt, direction, cols)
    else:
        of_tensor, run = target == layout.ANCHORED_TENSOR, layout.ANCHOR_RUNS.get(target)
        tiles = target == layout.ANCHORED_TILE
        codes, scale = anchoring.anchored_codes(
            data, scale, fmt, direction, of_tensor, cols, run, tiles
        )
    return (codes.t().contiguous() if transposed else codes), scale


def multi_tensor_anchor(
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    tensor_amax: Sequence[Tensor | None],
    cols: Sequence[int],
    fmt: Format,
    direction: Direction,
    target: str,
    calls: list[native.RecordedLaunch] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """`anchor_codes` of each; calls: receives the launch, if it can be replayed."""
    if all(map(native.is_available_for, data)):
        run = native.anchor_run(target)
        return native.multi_tensor_anchor(
            data, scale, tensor_amax, cols, fmt, direction, direction is not ROWWISE, run, calls
        )
    return [
        anchor_codes(*codes, fmt, direction, target)
        for codes in zip(data, scale, tensor_amax, cols)
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

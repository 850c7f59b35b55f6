# SPDX-License-Identifier: Apache-2.0
"""Where an operation runs: the compiled kernel when there is one for the device and format, else
the reference.

Both give the same bytes. Callers pass every direction they want of one tensor together, so that a
kernel reads the tensor once. `dtype` is what the encoder sees: values are rounded to it first
(None: they are not).
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
    COMPACT,
    LAID_OUT,
    is_anchored_as_encoded,
    is_anchored_of_codes,
    is_exact_operand,
)


class Statistics(NamedTuple):
    """amax: fp32 [block rows, block cols] or None; tensor_amax: fp32 [1] or None.

    In graphs amax of one scale may be those of parts of the tensor, [parts, 1], whose largest
    counts.
    """

    amax: Tensor | None
    tensor_amax: Tensor | None

    def to(self, device: torch.device) -> Statistics:
        own = self.tensor_amax if self.amax is None else self.amax
        return (
            self
            if own.device == device
            else Statistics(*(None if t is None else t.to(device) for t in self))
        )


class Encoded(NamedTuple):
    """The buffers of one storage (see `Storage`), and the amax they were made from, where one scale
    spans a row or more."""

    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    amax: Tensor | None
    layout: str = COMPACT


class _Route(NamedTuple):
    """Which encodings of one call a kernel makes: indices in its list."""

    taken: tuple[int, ...]
    rest: tuple[int, ...]


@functools.cache
def _route_of(
    encodings: tuple[Encoding, ...], dtype: torch.dtype | None, whole_tiles: bool
) -> _Route:
    """dtype: of values on a device where kernels run; None where none do. whole_tiles: row0 begins
    a tile."""
    taken = [
        i
        for i, e in enumerate(encodings)
        if dtype is not None and native.encodes(e, dtype, whole_tiles)
    ]
    if len({encodings[i].direction for i in taken}) < len(taken):
        taken = taken[:1]  # a kernel makes one of each direction
    return _Route(tuple(taken), tuple(i for i in range(len(encodings)) if i not in taken))


def _split(
    x: Tensor, encodings: tuple[Encoding, ...], dtype: torch.dtype | None, row0: int
) -> tuple[_Route, Tensor, bool]:
    """(who makes what, x as the kernel reads it, rounded to bf16 there)."""
    round_to_bf16 = x.dtype is torch.float32 and dtype is torch.bfloat16
    values = x if round_to_bf16 else _as(x, dtype)
    runs = native.runs(values) and values.numel() > 0
    return (
        _route_of(encodings, values.dtype if runs else None, row0 % native.TILE == 0),
        values,
        round_to_bf16,
    )


class _Laid(NamedTuple):
    """The calls that make what a kernel makes in the layouts that are wanted: indices, and what the
    calls are told."""

    anchored: tuple[int, ...]
    anchored_encodings: tuple[Encoding, ...]
    anchor_runs: tuple[int, ...]
    anchored_turned: tuple[bool, ...]
    plain: tuple[int, ...]
    plain_encodings: tuple[Encoding, ...]
    turned: tuple[bool, ...]
    scale_layouts: tuple[int, ...]
    layouts: tuple[str, ...]


@functools.cache
def _laid_of(
    encodings: tuple[Encoding, ...],
    taken: tuple[int, ...],
    layouts: tuple[str, ...] | None,
    can_anchor: tuple[bool, ...],
    whole: bool,
    native_scales: int,
) -> _Laid:
    layouts = layouts or (COMPACT,) * len(encodings)

    def anchors(i: int) -> bool:
        fmt = encodings[i].fmt
        fits = (
            layouts[i] in ANCHOR_RUNS
            and not is_anchored_of_codes(fmt, layouts[i])
            or is_anchored_as_encoded(fmt, layouts[i])
        )
        return can_anchor[i] and fits and not encodings[i].stochastic

    anchored = tuple(filter(anchors, taken))
    # one launch takes one kind; the others come compact
    if len({layouts[i] == ANCHORED_TENSOR for i in anchored}) > 1:
        anchored = tuple(i for i in anchored if layouts[i] != ANCHORED_TENSOR)
    plain = tuple(i for i in taken if i not in anchored)
    operands = [can_anchor[i] and is_exact_operand(encodings[i].fmt, layouts[i]) for i in plain]
    laid = [operand or (whole and layouts[i] in LAID_OUT) for i, operand in zip(plain, operands)]

    def turns(i: int) -> bool:
        return encodings[i].direction is not ROWWISE

    return _Laid(
        anchored,
        tuple(encodings[i] for i in anchored),
        tuple(native.anchor_run(layouts[i]) for i in anchored),
        tuple(map(turns, anchored)),
        plain,
        tuple(encodings[i] for i in plain),
        tuple(n and turns(i) for i, n in zip(plain, laid)),
        tuple(
            native.OPERAND if o else native_scales if n else native.COMPACT
            for n, o in zip(laid, operands)
        ),
        tuple(layouts[i] if n else COMPACT for i, n in zip(plain, laid)),
    )


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def statistics(
    x: Tensor, encodings: Sequence[Encoding], row0: int = 0, dtype: torch.dtype | None = None
) -> list[Statistics]:
    """Block and tensor amaxes of x [rows, cols] for each encoding; `row0` places x in the global
    tensor."""
    (taken, rest), values, round_to_bf16 = _split(x, tuple(encodings), dtype, row0)
    results: dict[int, Statistics] = {}
    if taken:
        made = native.statistics(values, [encodings[i] for i in taken], row0, round_to_bf16)
        results = {i: Statistics(*m) for i, m in zip(taken, made)}
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
    encs: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype | None = None,
    layouts: Sequence[str] | None = None,
) -> list[Encoded]:
    """Codes and scales of x [rows, cols]; one result an encoding.

    stats:    shared by every rank that holds a part of the tensor; None: taken from x. Of a layout
              that is anchored by the tensor, its amax.
    keys:     int64 [5] an encoding (`rng.KEY_FIELDS`), for stochastic rounding.
    encs:     fp32 [1] an encoding, for delayed scaling: the factor of a history, 0 while there is
              none.
    layouts:  how each result is wanted (`ops.layout`); where no kernel makes it so, it is compact,
              and says so.
    """
    encodings = tuple(encodings)
    (taken, rest), values, round_to_bf16 = _split(x, encodings, dtype, row0)
    results: dict[int, Encoded] = {}
    if taken:
        whole_bf16 = row0 == 0 and (round_to_bf16 or values.dtype is torch.bfloat16)
        can_anchor = tuple(
            whole_bf16 and (stats is None or stats[i] is None or stats[i].amax is None)
            for i in range(len(encodings))
        )
        wanted = tuple(layouts) if layouts else None
        calls = _laid_of(
            encodings,
            taken,
            wanted,
            can_anchor,
            row0 == 0,
            native.scale_layout(values) if wanted else 0,
        )
        if calls.anchored:
            made = native.quantize_anchored(
                values,
                calls.anchored_encodings,
                calls.anchor_runs,
                round_to_bf16,
                calls.anchored_turned,
                [stats[i] and stats[i].tensor_amax for i in calls.anchored]
                if stats is not None
                else None,
            )
            for i, (data, scale) in zip(calls.anchored, made):
                scale = scale if calls.anchored_turned[calls.anchored.index(i)] else scale.t()
                results[i] = Encoded(
                    data, _anchored_scale(scale, layouts[i]), None, None, layouts[i]
                )
        if calls.plain:
            known = None if stats is None else [s or Statistics(None, None) for s in stats]
            chosen = [
                [of[i] for i in calls.plain] if of is not None else None
                for of in (known, keys, encs)
            ]
            made = native.quantize(
                values,
                calls.plain_encodings,
                row0,
                round_to_bf16,
                *chosen,
                calls.turned,
                calls.scale_layouts,
            )
            for i, one, laid in zip(calls.plain, made, calls.layouts):
                results[i] = Encoded(*one, laid)
    for i in rest:
        e = encodings[i]
        if opaque.is_tracing() and e.fmt.is_quantized:
            known = (stats[i] if stats is not None else None) or Statistics(None, None)
            key, enc = (of[i] if of is not None else None for of in (keys, encs))
            results[i] = Encoded(*opaque.encode(_as(x, dtype), e, *known, row0, key, enc))
            continue
        prepared = reference.prepared(_as(x, dtype), e)
        amax, tensor_amax = (stats[i] if stats is not None else None) or reference.statistics(
            prepared, e, row0
        )
        enc = encs[i] if encs is not None else None
        if enc is not None:
            enc = reference.delayed_factor(enc, amax, e)
        data, scale = reference.encode(
            prepared, amax, tensor_amax, e, row0, keys[i] if keys else None, enc
        )
        results[i] = Encoded(data, scale, tensor_amax, amax)
    for i, e in enumerate(encodings):
        if e.fmt.is_quantized:
            counters.add(
                "quantize", (e.fmt.name, e.direction.value, "native" if i in taken else "reference")
            )
    return [results[i] for i in range(len(encodings))]


def _takes_group(
    x: Sequence[Tensor], encoding: Encoding, dtype: torch.dtype | None
) -> tuple[bool, bool]:
    """(one launch does all of x, rounded to bf16 there)."""
    first = x[0]
    round_to_bf16 = first.dtype is torch.float32 and dtype is torch.bfloat16
    as_they_are = round_to_bf16 or dtype in (None, first.dtype)
    takes = len(x) > 1 and as_they_are and native.takes_group(encoding, first.dtype, round_to_bf16)
    return takes and any(map(native.runs, x)) and all(
        one.dtype is first.dtype for one in x
    ), round_to_bf16


def multi_tensor_amax(
    x: Sequence[Tensor], encoding: Encoding, row0: Sequence[int], dtype: torch.dtype | None = None
) -> list[Statistics]:
    """`statistics` of one encoding of each tensor."""
    takes, round_to_bf16 = _takes_group(x, encoding, dtype)
    if takes:
        return [Statistics(*s) for s in native.multi_tensor_amax(x, encoding, row0, round_to_bf16)]
    return [statistics(one, (encoding,), start, dtype)[0] for one, start in zip(x, row0)]


def multi_tensor_encode(
    x: Sequence[Tensor],
    encoding: Encoding,
    stats: Sequence[Statistics | None],
    row0: Sequence[int],
    encs: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
    into: Sequence[tuple[Tensor, Tensor] | None] | None = None,
    records: Sequence[Tensor | None] | None = None,
    calls: list[native.RecordedEncode] | None = None,
) -> list[Encoded]:
    """`encode` of one encoding of each tensor: stats, row0 and encs have an entry for each.

    into:     (data, scale) of each, or None; written where one launch does all and all are given.
    records:  of each that enc scales, its history, in which the amax is recorded (`record_amax`);
              or None.
    calls:    takes the launch that made all, if there was one, which may be made again
              (`replay_encode`).
    """
    takes, round_to_bf16 = _takes_group(x, encoding, dtype)
    records = records or [None] * len(x)
    if not takes:
        made = [
            encode(one, [encoding], None if s is None else [s], start, encs=[enc], dtype=dtype)[0]
            for one, s, start, enc in zip(x, stats, row0, encs)
        ]
        for one, record in zip(made, records):
            if record is not None:
                record_amax(record, one.amax)
        return made
    if encoding.fmt.scale_leaves_contraction or encoding.fmt.tensor_scale:
        missing = [i for i, s in enumerate(stats) if s is None]
        if (
            len(missing) == len(x)
            and not encoding.fmt.tensor_scale
            and not any(enc is not None for enc in encs)
        ):
            stats = None  # taken again whenever the launch is made again
        elif missing:
            stats = list(stats)
            found = native.multi_tensor_amax(
                [x[i] for i in missing], encoding, [row0[i] for i in missing], round_to_bf16
            )
            for i, s in zip(missing, found):
                stats[i] = s
            calls = None
    into = None if into is None or None in into else into
    made = native.multi_tensor_quantize(
        x, encoding, row0, round_to_bf16, stats, into, encs, records, calls
    )
    counters.add("quantize", (encoding.fmt.name, encoding.direction.value, "native"), len(x))
    return [Encoded(*one) for one in made]


def replay_encode(call: native.RecordedEncode, x: Sequence[Tensor]) -> None:
    """What `multi_tensor_encode` made, of other values."""
    call(x)
    counters.add(
        "quantize", (call.encoding.fmt.name, call.encoding.direction.value, "native"), len(x)
    )


def scales(stats: Statistics, encoding: Encoding, enc: Tensor | None = None) -> Tensor:
    """Decode scales [block rows, block cols] of blocks whose amaxes are known; enc: fp32 [1], of a
    history."""
    if enc is not None:
        enc = reference.delayed_factor(enc, stats.amax, encoding)
    return reference.scales(stats.amax, stats.tensor_amax, encoding, enc)[0]


def _anchored_scale(scale: Tensor, wanted: str) -> Tensor:
    """fp32 scales [runs, lines] as a product reads them: [lines], or [runs, lines rounded up to 4];
    of a tensor [1]."""
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
    """element * scale (* tensor scale) in fp32 [rows, cols], rounded once to `dtype`; scale None
    leaves that factor out.

    Identity keeps its own dtype where `dtype` is None.
    """
    if native.runs(data) and native.unsupported_reason(fmt) is None:
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
    return (native if native.runs(tensor_amax) else reference).tensor_decode_scale(tensor_amax, fmt)


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of x [rows, cols], [cols]: added up in fp32, rounded once.

    A kernel adds up tiles of 128 rows, as those that quantize x do on the way; so its last bits may
    differ from torch's.
    """
    if x.dtype is torch.bfloat16 and x.numel() and native.runs(x):
        return native.column_sums(x)
    return opaque.column_sums(x) if opaque.is_tracing() else x.sum(0)


# Scalars of a step #


def random_key(
    step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None
) -> Tensor:
    """int64 [5] (`rng.KEY_FIELDS`) of the `rows` rows of a slot.

    step:  int64 [5] (`context.STEP_FIELDS`); ids: int64 [slots]. Without a token offset, a rank's
           rows follow those of the rank before.
    after: a gradient: a graph reads the step in its backward then, as eager mode does.
    """
    if native.runs(step):
        return native.random_key(step, ids, slot, rows, after)
    return (opaque.random_key if opaque.is_tracing() else opaque.key_of)(
        step, ids, slot, rows, after
    )


def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    amax = amax.detach().reshape(())
    if native.runs(amaxes) and not opaque.is_tracing():  # a compiler fuses it into other work
        native.record_amax(amaxes, amax)
    else:
        amaxes[0].copy_(torch.maximum(amaxes[0], torch.where(amax.isfinite(), amax, 0.0)))


# GEMM layouts #


def transpose_codes(data: Tensor, rows: int, cols: int, fmt: Format) -> Tensor:
    """Codes of [rows, cols] as those of its transpose, packed along dim 1 again; contiguous."""
    if fmt.bits in native.TRANSPOSED_BITS and native.runs(data):
        return native.transpose_codes(data, rows, cols, fmt.bits)
    return layout.repack(data, fmt.bits, rows, cols)


def multi_tensor_transpose(
    data: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    fmt: Format,
    calls: list[native.RecordedLaunch] | None = None,
) -> list[Tensor]:
    """`transpose_codes` of each; calls: takes the launch."""
    if len(data) > 1 and fmt.bits in native.TRANSPOSED_BITS and all(map(native.runs, data)):
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
    """Compact codes of cols columns as an operand [outer, contraction] in a layout of anchors, and
    its fp32 scales.

    `anchoring.anchored_codes`, and `anchoring.e4m3_operand` of what decodes exactly to e4m3.
    """
    turned = direction is not ROWWISE
    if native.runs(data):
        return native.anchor_codes(
            data, scale, tensor_amax, cols, fmt, direction, turned, native.anchor_run(wanted)
        )
    if fmt.decodes_exactly_to_e4m3:
        codes, made = anchoring.e4m3_operand(data, scale, tensor_amax, fmt, direction, cols)
    else:
        whole, run = wanted == ANCHORED_TENSOR, ANCHOR_RUNS.get(wanted)
        codes, made = anchoring.anchored_codes(data, scale, fmt, direction, whole, cols, run)
    return (codes.t().contiguous() if turned else codes), made


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
    """`anchor_codes` of each; calls: takes what made them, if that may be made again."""
    if all(map(native.runs, data)):
        run = native.anchor_run(wanted)
        return native.multi_tensor_anchor(
            data, scale, tensor_amax, cols, fmt, direction, direction is not ROWWISE, run, calls
        )
    return [
        anchor_codes(*one, fmt, direction, wanted) for one in zip(data, scale, tensor_amax, cols)
    ]


def swizzle_scales(scale: Tensor, outer: int, outer_block: int, transposed: bool) -> Tensor:
    """One-byte block scales, one a row of the operand, in 128 x 4 tiles (`layout.swizzle_128x4`),
    padding zero.

    scale:        uint8 [outer blocks, contraction blocks]; transposed: [contraction blocks, outer
                  blocks]. Or fp32 powers of two, which become e8m0 scales of `layout.SPREAD_BLOCKS`
                  blocks each.
    outer:        rows of the operand.
    outer_block:  rows that share a scale.
    """
    if native.runs(scale):
        return native.swizzle_scales(scale, outer, outer_block, transposed)
    scale = scale.t() if transposed else scale
    if scale.dtype is torch.float32:
        return layout.swizzle_128x4(layout.spread_scales(scale, outer, outer_block))
    return layout.swizzle_128x4(scale.repeat_interleave(outer_block, 0)[:outer])

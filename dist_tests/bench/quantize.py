# SPDX-License-Identifier: Apache-2.0
"""Device time of the compiled quantize operators, norms and activations, over a copy of the same
tensor.

    python -m dist_tests.bench.quantize [--shapes 8192x8192 16384x4096] [--rows mxfp8 group] [--json
    out.json]

With a GPU, a table a shape and one a parameter group: microseconds (median), GB/s, ratio to the
device copy of the same bf16 values, floor and aim of that ratio, and "under" where it is below the
floor. Bytes are counted once: every input read once, every code and scale written once, whatever
the kernel does. Then small tensors, as device and host microseconds a call, and a line of summary.
Exit status 1: a row failed; 2: there is a GPU, and the operators are off.

A call is timed by two events, queued behind a spinning kernel so that the host is ahead; the
allocation of its outputs is part of it. Between calls the L2 is made cold, in one or both of two
ways, the first of which decides about floors:

    rotate   inputs and outputs change from call to call. The L2 then holds what the last call of
             the row left in it: a row pays for the write-back of its own bytes, no more and no less
    flush    256 MB are zeroed before each call, outside its time. The L2 is then full of zeros that
             have yet to reach
             memory: a row that writes less than the L2 holds (amax) pays for their write-back too

Without a GPU: the PyTorch reference's time a format and direction, encoding and decoding, over a
copy.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.bench.clock import (
    DeviceClock,
    count,
    extents,
    facts,
    finish,
    first_line,
    measurable,
    recover,
    wanted,
    write,
)
from fsdp_quant.formats import (
    COLUMNWISE,
    FORMATS,
    ROWWISE,
    SCALE_BYTES,
    Direction,
    Encoding,
    Format,
    ceil_div,
    format_of,
    round_up,
)
from fsdp_quant.ops import anchoring, dispatch, layout, native, norm, reference, routing
from fsdp_quant.quantizer import Quantizer

SHAPES = ((8192, 8192), (16384, 4096), (4096, 14336))
CPU_SHAPES = ((4096, 4096),)
SMALL = (256, 512)
HOST_TARGET_US = 15.0
L2_MODES = ("rotate", "flush")


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# What is measured #


class Work(NamedTuple):
    """One input of a row: the call, which returns the buffers it wrote; what it reads; the
    reference of the same."""

    call: Callable[[], list[Tensor]]
    read: list[Tensor]
    reference: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """work: input -> Work. floor, aim: ratios to the copy rate."""

    name: str
    floor: float | None
    aim: float | None
    work: Callable[[object], Work]


def encoding(
    name: str | Format, direction: Direction, stochastic: bool = False, rotated: bool = False
) -> Encoding:
    return Encoding(
        format_of(name, rotated=True) if rotated else format_of(name), direction, stochastic
    )


def both(name: str | Format) -> tuple[Encoding, Encoding]:
    return encoding(name, ROWWISE), encoding(name, COLUMNWISE)


def _key(x: Tensor) -> Tensor:
    return torch.tensor([1, 2, 3, 0, 0], device=x.device)


def _reference_encode(
    x: Tensor,
    e: Encoding,
    stats: tuple | None,
    enc: Tensor | None,
    transposed: bool,
    row0: int = 0,
    operand: bool = False,
) -> list[Tensor]:
    values = reference.prepared(x, e)
    amax, tensor_amax = stats or (None, None)
    if amax is None:
        amax, own = reference.statistics(values, e, row0)
        tensor_amax = own if tensor_amax is None else tensor_amax
    codes, scale = reference.encode(
        values, amax, tensor_amax, e, row0, _key(x) if e.stochastic else None, enc
    )
    if operand:
        codes, scale = anchoring.e4m3_operand(
            codes, scale, tensor_amax, e.fmt, e.direction, values.shape[1]
        )
        return [codes.t().contiguous() if transposed else codes, scale]
    if not transposed:
        return [codes, scale]
    codes = layout.repack(codes, e.fmt.element.bits, *values.shape)
    return [codes, scale.t().contiguous()]


def quantizes(
    *encodings: Encoding,
    known: bool = False,
    transposed: bool = False,
    masters: bool = False,
    delayed: bool = False,
    operands: bool = False,
) -> Callable[[Tensor], Work]:
    """native.quantize of a bf16 x.

    known:       amaxes that leave a tile are given.
    transposed:  the columnwise side as [cols, rows], scales as a Hopper GEMM reads them.
    masters:     x as fp32, rounded to bf16 by the kernel.
    delayed:     the encode factor comes from a history.
    operands:    e4m3 codes of 4-bit ones.
    """
    flags = [(transposed or operands) and e.direction is COLUMNWISE for e in encodings]
    scale_layout = native.OPERAND if operands else native.HOPPER if transposed else native.COMPACT

    def work(x: Tensor) -> Work:
        values = x.float() if masters else x
        stats = encs = None
        if known:
            seen = native.statistics(values, encodings, 0, masters)
            if encodings[0].fmt.shares_storage:  # one scale for both, in one place
                seen = seen[:1] * len(encodings)
            stats = [
                (a if e.fmt.scale_leaves_contraction else None, t)
                for e, (a, t) in zip(encodings, seen)
            ]
        if delayed:
            encs = [torch.full((1,), 64.0, device=x.device)] * len(encodings)
        keys = [_key(x) if e.stochastic else None for e in encodings]

        def call() -> list[Tensor]:
            made = native.quantize(
                values, encodings, 0, masters, stats, keys, encs, flags, scale_layout
            )
            return [buffer for data, scale, *_ in made for buffer in (data, scale)]

        def plain() -> list:
            x = values.to(torch.bfloat16)
            return [
                _reference_encode(
                    x, e, stats and stats[i], encs and encs[i], flags[i], operand=operands
                )
                for i, e in enumerate(encodings)
            ]

        return Work(call, [values], plain)

    return work


def collects(*encodings: Encoding) -> Callable[[Tensor], Work]:
    """native.statistics."""
    return lambda x: Work(
        lambda: [
            t for pair in native.statistics(x, encodings, 0, False) for t in pair if t is not None
        ],
        [x],
        lambda: [reference.statistics(reference.prepared(x, e), e) for e in encodings],
    )


def decodes(e: Encoding) -> Callable[[Tensor], Work]:
    """native.dequantize to bf16 of what native.quantize made."""

    def work(x: Tensor) -> Work:
        ((data, scale, tensor_amax, _),) = native.quantize(x, [e], 0, False, None, None, None)
        args = (data, scale, tensor_amax, e.fmt, e.direction, x.shape[1], 0)
        return Work(
            lambda: [native.dequantize(*args, torch.bfloat16)],
            [data, scale],
            lambda: reference.decode(*args).to(torch.bfloat16),
        )

    return work


def transposes(e: Encoding) -> Callable[[Tensor], Work]:
    """native.transpose_codes of what native.quantize made."""

    def work(x: Tensor) -> Work:
        data = native.quantize(x, [e], 0, False, None, None, None)[0][0]
        rows, cols, bits = *x.shape, e.fmt.element.bits
        return Work(
            lambda: [native.transpose_codes(data, rows, cols, bits)],
            [data],
            lambda: layout.repack(data, bits, rows, cols),
        )

    return work


def anchors(row_run: int | None, col_run: int | None) -> Callable[[Tensor], Work]:
    """quantize_anchored of both mxfp8 directions, the columnwise one as [cols, rows]; a run of None
    is a whole line."""
    row, col = both("mxfp8")
    runs = row_run or 0, col_run or 0

    def work(x: Tensor) -> Work:
        def plain() -> list:
            rowwise, columnwise = (
                anchoring.anchored(x, e, run or None) for e, run in zip((row, col), runs)
            )
            return [rowwise[:2], columnwise[0].t().contiguous(), columnwise[1]]

        sides = native.pack_encoding(row), native.pack_encoding(col, True, native.HOPPER)
        anchored = torch.ops.fsdp_quant.quantize_anchored
        return Work(lambda: anchored(x, *sides, *runs, None, None, False)[:-1], [x], plain)

    return work


def activates(name: str, backward: bool = False) -> Callable[[Tensor], Work]:
    """native.activation of two halves of x's rows, as tensors of their own, or its backward."""
    kind = norm.ACTIVATIONS[name].kind

    def work(x: Tensor) -> Work:
        g, u = x.chunk(2)
        if not backward:
            return Work(
                lambda: [native.activation(g, u, kind)[0]],
                [g, u],
                lambda: norm.reference_activation(g, u, kind),
            )
        dh = g.roll(1, 0)
        return Work(
            lambda: list(native.activation_backward(dh, g, u, kind)[:2]),
            [dh, g, u],
            lambda: norm.reference_activation_backward(dh, g, u, kind),
        )

    return work


def normalizes(
    centred: bool, backward: bool = False, residual: bool = False
) -> Callable[[Tensor], Work]:
    """native.norm of x, or its backward."""
    spec = norm.NormSpec(1e-5, centred, False)

    def work(x: Tensor) -> Work:
        weight, bias = x[0].clone(), x[1].clone() if centred else None
        if not backward:
            return Work(
                lambda: [native.norm(x, weight, bias, *spec)[0]],
                [x],
                lambda: norm.reference_norm(x, weight, bias, spec),
            )
        _, rstd, mean, _ = native.norm(x, weight, bias, *spec)
        dy, rest = x.roll(1, 0), x.roll(2, 0) if residual else None
        return Work(
            lambda: [
                native.norm_backward(dy, x, weight, rest, rstd, mean, False, False, centred)[0]
            ],
            [dy, x, rest] if residual else [dy, x],
            lambda: norm.reference_norm_backward(dy, x, weight, bias, rest, rstd, mean, spec),
        )

    return work


def combines(backward: bool = False, copies: int = 8) -> Callable[[Tensor], Work]:
    """native.combine of x's rows, as those that `copies` experts made of each token, or its
    backward."""

    def work(x: Tensor) -> Work:
        tokens = len(x) // copies
        rows, dout = x[: tokens * copies], x[:tokens].clone()
        back = torch.randperm(tokens * copies, device=x.device).view(tokens, copies)
        weights = torch.rand(tokens, copies, device=x.device)
        if not backward:
            return Work(
                lambda: [native.combine(rows, back, weights)],
                [rows, back, weights],
                lambda: routing.reference_combine(rows, back, weights),
            )
        return Work(
            lambda: list(native.combine_backward(dout, rows, back, weights)),
            [dout, rows, back, weights],
            lambda: routing.reference_combine_backward(dout, rows, back, weights),
        )

    return work


TENSOR, ROW, MX, NV = "fp8_tensor", "fp8_row", "mxfp8", "nvfp4"
MX_ROW, MX_COL = both(MX)
NV_ROW, NV_ROW_SR = encoding(NV, ROWWISE), encoding(NV, ROWWISE, stochastic=True)
NV_COL_RHT = encoding(NV, COLUMNWISE, rotated=True)
NV_COL_RHT_SR = encoding(NV, COLUMNWISE, stochastic=True, rotated=True)
NV_MSE, NV_LINES = format_of(NV, four_over_six="mse"), format_of(NV, scale_per="row")
NV_SQUARE_MSE = format_of("nvfp4_16x16", four_over_six="mse")
EXACT, EX_16X16 = (
    format_of(NV, scale_rule="fp8_exact"),
    both(format_of("nvfp4_16x16", scale_rule="fp8_exact")),
)
EX_ROW, EX_ROW_SR = encoding(EXACT, ROWWISE), encoding(EXACT, ROWWISE, stochastic=True)
EX_COL_RHT = encoding(EXACT, COLUMNWISE, rotated=True)
EX_COL_RHT_SR = encoding(EXACT, COLUMNWISE, stochastic=True, rotated=True)

ROWS = (
    Row("amax", 0.85, 0.95, collects(encoding(TENSOR, ROWWISE))),
    Row("fp8_tensor row, known", 0.85, 0.92, quantizes(encoding(TENSOR, ROWWISE), known=True)),
    Row("decode fp8_tensor", 0.85, 0.92, decodes(encoding(TENSOR, ROWWISE))),
    Row("decode mxfp8", 0.85, 0.92, decodes(MX_ROW)),
    Row("decode mxfp8 columnwise", None, None, decodes(MX_COL)),
    Row("decode nvfp4", 0.85, 0.92, decodes(NV_ROW)),
    Row(
        "fp8_tensor row + transposed, known",
        0.70,
        0.85,
        quantizes(*both(TENSOR), known=True, transposed=True),
    ),
    Row(
        "fp8_tensor row + transposed, delayed",
        0.70,
        0.85,
        quantizes(*both(TENSOR), delayed=True, transposed=True),
    ),
    Row(
        "fp8_tensor row + transposed, current",
        0.50,
        0.60,
        quantizes(*both(TENSOR), transposed=True),
    ),
    Row("fp8_row row, current", None, None, quantizes(encoding(ROW, ROWWISE))),
    Row("fp8_row row + transposed, current", None, None, quantizes(*both(ROW), transposed=True)),
    Row("fp8_1x128 row + transposed", 0.70, 0.85, quantizes(*both("fp8_1x128"), transposed=True)),
    Row(
        "fp8_128x128 row + transposed", 0.70, 0.85, quantizes(*both("fp8_128x128"), transposed=True)
    ),
    Row("mxfp8 row", None, None, quantizes(MX_ROW)),
    Row("mxfp8 row, fp32 masters", None, None, quantizes(MX_ROW, masters=True)),
    Row("mxfp8 column", None, None, quantizes(MX_COL)),
    Row("mxfp8 row + column", 0.70, 0.85, quantizes(MX_ROW, MX_COL)),
    Row("mxfp8 row + transposed", 0.70, 0.85, quantizes(MX_ROW, MX_COL, transposed=True)),
    Row("mxfp8 row + transposed, anchored", 0.50, 0.60, anchors(None, 512)),
    Row("nvfp4 row, known", 0.65, 0.85, quantizes(NV_ROW, known=True)),
    Row("nvfp4 row, current", None, None, quantizes(NV_ROW)),
    Row(
        "nvfp4 row SR + column RHT SR, known",
        0.35,
        0.60,
        quantizes(NV_ROW_SR, NV_COL_RHT_SR, known=True),
    ),
    Row("nvfp4 row SR + column RHT SR, current", None, None, quantizes(NV_ROW_SR, NV_COL_RHT_SR)),
    Row("nvfp4 row + column, 4over6, known", None, None, quantizes(*both(NV_MSE), known=True)),
    Row("nvfp4 row + column, scale per row, current", None, None, quantizes(*both(NV_LINES))),
    Row(
        "nvfp4_16x16 row + transposed, 4over6, known",
        None,
        None,
        quantizes(*both(NV_SQUARE_MSE), known=True, transposed=True),
    ),
    Row(
        "nvfp4 exact row + column RHT, operands, known",
        None,
        None,
        quantizes(EX_ROW, EX_COL_RHT, known=True, operands=True),
    ),
    Row(
        "nvfp4 exact row SR + column RHT SR, operands, known",
        0.36,
        0.45,
        quantizes(EX_ROW_SR, EX_COL_RHT_SR, known=True, operands=True),
    ),
    Row(
        "nvfp4_16x16 exact, operands, known",
        None,
        None,
        quantizes(*EX_16X16, known=True, operands=True),
    ),
    Row(
        "nvfp4_16x16 row + transposed, known",
        0.60,
        0.85,
        quantizes(*both("nvfp4_16x16"), known=True, transposed=True),
    ),
    Row(
        "mxfp8 row + nvfp4 column RHT, known", None, None, quantizes(MX_ROW, NV_COL_RHT, known=True)
    ),
    Row("transpose bytes", None, 0.85, transposes(encoding(TENSOR, ROWWISE))),
    Row("transpose nibbles", None, 0.85, transposes(NV_ROW)),
    Row("RMSNorm, amax", 0.65, 0.80, normalizes(False)),
    Row("RMSNorm backward, amax", 0.65, 0.80, normalizes(False, backward=True)),
    Row(
        "RMSNorm backward + residual, amax",
        0.65,
        0.80,
        normalizes(False, backward=True, residual=True),
    ),
    Row("LayerNorm, amax", 0.65, 0.80, normalizes(True)),
    Row("LayerNorm backward, amax", 0.65, 0.80, normalizes(True, backward=True)),
    Row("SwiGLU, amaxes", 0.65, 0.80, activates("swiglu")),
    Row("SwiGLU backward, amaxes", 0.65, 0.80, activates("swiglu", backward=True)),
    Row("GeGLU, amaxes", 0.65, 0.80, activates("geglu")),
    Row("GeGLU backward, amaxes", 0.65, 0.80, activates("geglu", backward=True)),
    Row("combine of 8 experts", None, 0.85, combines()),
    Row("combine of 8 experts, backward", None, 0.85, combines(backward=True)),
)


# A parameter group #


class Group(NamedTuple):
    """Shards of many weights, views of one buffer; rows [row0, ..) of each weight."""

    flat: Tensor
    tensors: list[Tensor]
    row0: list[int]


LLAMA_LAYER = (
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
)
GROUP_TENSORS, GROUP_RANKS, GROUP_RANK = 100, (8, 32), 2


def group_shapes(ranks: int) -> list[tuple[int, int]]:
    """[rows of a rank, cols] of the weights of as many layers as it takes."""
    weights = LLAMA_LAYER * ceil_div(GROUP_TENSORS, len(LLAMA_LAYER))
    return [(rows // ranks, cols) for rows, cols in weights[:GROUP_TENSORS]]


def group_of(flat: Tensor, ranks: int) -> Group:
    shapes = group_shapes(ranks)
    pieces = flat.split([rows * cols for rows, cols in shapes])
    return Group(
        flat, [p.view(s) for p, s in zip(pieces, shapes)], [GROUP_RANK * rows for rows, _ in shapes]
    )


def quantizes_group(e: Encoding) -> Callable[[Group], Work]:
    """quantize_group into one staging buffer, amaxes that leave a tile given."""
    columnwise = e.direction is COLUMNWISE

    def work(g: Group) -> Work:
        n, ops, side = len(g.tensors), torch.ops.fsdp_quant, native.pack_encoding(e)
        amaxes = [None] * n
        if e.fmt.scale_leaves_contraction:
            amaxes = ops.statistics_group(g.tensors, side, columnwise, g.row0, False)
        offsets, end = [], 0
        for t in g.tensors:
            scales = math.prod(e.fmt.scale_shape(tuple(t.shape), e.direction))
            for size in (
                t.shape[0] * e.fmt.row_bytes(t.shape[1], t.dtype),
                scales * SCALE_BYTES[e.fmt.scale],
            ):
                offsets.append(end)
                end += round_up(size, 16)
        staging = torch.empty(end, dtype=torch.uint8, device=g.flat.device)

        def call() -> list[Tensor]:
            ops.quantize_group(
                g.tensors,
                side,
                columnwise,
                0.0,
                g.row0,
                amaxes,
                [None] * n,
                staging,
                offsets[::2],
                offsets[1::2],
                False,
            )
            return [staging]

        def plain() -> list:
            return [
                _reference_encode(t, e, None if a is None else (a, None), None, False, start)
                for t, a, start in zip(g.tensors, amaxes, g.row0)
            ]

        return Work(call, g.tensors, plain)

    return work


def collects_group(e: Encoding) -> Callable[[Group], Work]:
    def work(g: Group) -> Work:
        side, columnwise = native.pack_encoding(e), e.direction is COLUMNWISE
        return Work(
            lambda: torch.ops.fsdp_quant.statistics_group(
                g.tensors, side, columnwise, g.row0, False
            ),
            g.tensors,
            lambda: [reference.statistics(t, e, start) for t, start in zip(g.tensors, g.row0)],
        )

    return work


def transposes_group(g: Group) -> Work:
    """relayout_group: the bytes of every tensor's codes to their transpose."""
    # random bytes will do
    codes = [t.view(torch.uint8)[:, : t.shape[1]].contiguous() for t in g.tensors]
    out = [torch.empty(t.shape[1], t.shape[0], dtype=torch.uint8, device=t.device) for t in codes]
    rows, cols = [t.shape[0] for t in codes], [t.shape[1] for t in codes]
    kinds, zeros, ones = [native.TRANSPOSE_BYTES] * len(codes), [0] * len(codes), [1] * len(codes)

    def call() -> list[Tensor]:
        torch.ops.fsdp_quant.relayout_group(codes, out, kinds, rows, cols, zeros, ones)
        return out

    return Work(call, codes, lambda: [t.t().contiguous() for t in codes])


GROUP_ROWS = (
    Row("group: statistics fp8_tensor", None, None, collects_group(encoding(TENSOR, ROWWISE))),
    Row("group: fp8_tensor row, known", 0.65, 0.80, quantizes_group(encoding(TENSOR, ROWWISE))),
    Row("group: mxfp8 row", 0.65, 0.80, quantizes_group(MX_ROW)),
    Row("group: mxfp8 column", 0.65, 0.80, quantizes_group(MX_COL)),
    Row("group: transpose bytes", None, None, transposes_group),
)

# Name -> encodings, all with current scaling.
SMALL_ROWS = {
    "small: mxfp8 row + column": (MX_ROW, MX_COL),
    "small: fp8_tensor row, current": (encoding(TENSOR, ROWWISE),),
    "small: nvfp4 row, current": (NV_ROW,),
}


# Tables #


class Bench:
    """The clock, the options, and everything that was measured (`report`, plain data)."""

    def __init__(self, clock: DeviceClock, device: torch.device, args):
        self.clock, self.device = clock, device
        self.l2, self.filters, self.with_reference = list(args.l2), args.rows, args.reference
        self.report: dict = {"l2": self.l2, "repeats": clock.repeats, "tables": [], "small": []}

    def inputs(self, numel: int) -> list[Tensor]:
        """Random bf16 buffers, as many as let none of them stay in the L2 until its next turn."""
        l2 = (
            torch.cuda.get_device_properties(self.device).L2_cache_size
            if self.device.type == "cuda"
            else 1
        )
        generator = torch.Generator(self.device).manual_seed(0)
        return [
            torch.randn(numel, dtype=torch.bfloat16, device=self.device, generator=generator)
            for _ in range(1 + ceil_div(4 * l2, 2 * numel))
        ]

    def copy_rates(self, sources: list[Tensor]) -> dict[str, float]:
        """GB/s of torch's copy_, read and written bytes, by the state of the L2."""
        pairs = [(torch.empty_like(s), s) for s in sources]
        calls = [lambda p=p: p[0].copy_(p[1]) for p in pairs]
        return {
            l2: 2 * num_bytes(sources[:1]) / self.clock.time(calls, l2).us / 1e3 for l2 in self.l2
        }

    def table(self, title: str, sources: list[Tensor], inputs: list, rows: Sequence[Row]) -> None:
        """One table; sources are the bf16 buffers whose copy is the measure, inputs what rows work
        on."""
        chosen = [row for row in rows if wanted(row.name, self.filters)]
        if not chosen:
            return
        copy = self.copy_rates(sources)
        found = {"title": title, "copy_gbs": copy, "inputs": len(inputs), "rows": []}
        self.report["tables"].append(found)
        rates = ", ".join(f"{l2} {rate:.0f} GB/s" for l2, rate in copy.items())
        print(f"\n{title}: copy {rates}; {len(inputs)} inputs in turn")
        others = "".join(f" {f'us, {l2}':>10} {'x copy':>7}" for l2 in self.l2[1:])
        peer = f" {'reference us':>13}" if self.with_reference else ""
        print(
            f"{'row':40} {'us':>8} {'GB/s':>6} {'x copy':>7} {'floor':>6} {'aim':>5} "
            f"{'':5}{others}{peer}"
        )
        for row in chosen:
            result = {"name": row.name, "floor": row.floor, "aim": row.aim}
            found["rows"].append(result)
            try:
                self._measure(row, inputs, copy, result)
            except Exception as error:  # of any kind: one row does not cost the others
                result["error"] = first_line(error)
                print(f"{row.name:40} failed: {result['error']}", flush=True)
                recover()
        again = self.copy_rates(sources)
        found["copy_gbs_after"] = again
        print(
            "copy after the rows: "
            f"{', '.join(f'{l2} {rate:.0f} GB/s' for l2, rate in again.items())}",
            flush=True,
        )

    def _measure(self, row: Row, inputs: list, copy: dict[str, float], result: dict) -> None:
        works = [row.work(x) for x in inputs]
        moved = num_bytes(works[0].read) + num_bytes(works[0].call())
        result["bytes"] = moved
        for l2 in self.l2:
            sample = self.clock.time([w.call for w in works], l2)
            rate = moved / sample.us / 1e3
            result[l2] = {**sample._asdict(), "gbs": rate, "ratio": rate / copy[l2]}
        first = result[self.l2[0]]
        result["under"] = row.floor is not None and first["ratio"] < row.floor
        result["reached"] = row.aim is not None and first["ratio"] >= row.aim
        mark = "under" if result["under"] else ""
        shown = "".join(
            f" {result[l2]['us']:10.1f} {result[l2]['ratio']:7.3f}" for l2 in self.l2[1:]
        )
        if self.with_reference:
            result["reference_us"] = self.clock.once(works[0].reference)
            shown += f" {result['reference_us']:13.1f}"
        if not all(result[l2]["hidden"] for l2 in self.l2):
            shown += "  the device waited for the host"
        floor, aim = (f"{r:.2f}" if r is not None else "-" for r in (row.floor, row.aim))
        numbers = (
            f"{first['us']:8.1f} {first['gbs']:6.0f} {first['ratio']:7.3f} {floor:>6} {aim:>5}"
        )
        print(f"{row.name:40} {numbers} {mark:5}{shown}", flush=True)

    def small(self) -> None:
        """Device and host time a call of tensors that one launch cannot fill a device with."""
        chosen = {name: e for name, e in SMALL_ROWS.items() if wanted(name, self.filters)}
        if not chosen:
            return
        x = self.inputs(SMALL[0] * SMALL[1])[0].view(SMALL)
        print(
            f"\n{SMALL[0]}x{SMALL[1]} bf16, in the L2; host microseconds a call, target "
            f"{HOST_TARGET_US:.0f}"
        )
        print(f"{'row':40} {'device us':>10} {'operator us':>12} {'dispatch us':>12}")
        for name, encodings in chosen.items():
            result = {"name": name, "shape": list(SMALL)}
            self.report["small"].append(result)
            sides = {e.direction: native.pack_encoding(e) for e in encodings}
            row, col = (sides.get(d, 0) for d in Direction)
            nothing = [None] * len(encodings)
            calls = {
                "operator": lambda: torch.ops.fsdp_quant.quantize(x, row, col, 0.0, 0.0, 0, False),
                "dispatch": lambda: dispatch.encode(x, encodings, None, keys=nothing),
            }
            try:
                result["device_us"] = self.clock.time([calls["operator"]], None).us
                for level, call in calls.items():
                    result[f"{level}_host_us"] = self.clock.host(call)
            except Exception as error:  # of any kind: one row does not cost the others
                result["error"] = first_line(error)
                print(f"{name:40} failed: {result['error']}", flush=True)
                recover()
                continue
            over = "  over the target" if result["operator_host_us"] > HOST_TARGET_US else ""
            print(
                f"{name:40} {result['device_us']:10.1f} {result['operator_host_us']:12.1f} "
                f"{result['dispatch_host_us']:12.1f}{over}",
                flush=True,
            )

    def run(self, shapes: Sequence[tuple[int, int]]) -> None:
        for rows, cols in shapes:
            sources = (
                self.inputs(rows * cols) if any(wanted(r.name, self.filters) for r in ROWS) else []
            )
            self.table(f"{rows}x{cols} bf16", sources, [s.view(rows, cols) for s in sources], ROWS)
        for ranks in GROUP_RANKS if any(wanted(r.name, self.filters) for r in GROUP_ROWS) else ():
            numel = sum(rows * cols for rows, cols in group_shapes(ranks))
            sources = self.inputs(numel)
            title = f"{GROUP_TENSORS} shards of {ranks} ranks, {2 * numel / 2**20:.0f} MiB bf16"
            self.table(title, sources, [group_of(s, ranks) for s in sources], GROUP_ROWS)
        self.small()

    def summary(self) -> str:
        """The last line: how many rows are where, and the worst of those with a floor."""
        rows = [r for t in self.report["tables"] for r in t["rows"]]
        failed = [r for r in [*rows, *self.report["small"]] if "error" in r]
        judged = [r for r in rows if "error" not in r and r["floor"] is not None]
        under = [r for r in judged if r["under"]]
        line = f"{len(rows)} rows: {len(judged)} with a floor, {len(under)} under it"
        line += f", {sum(r['reached'] for r in rows if 'error' not in r)} at their aim"
        line += f", {len(failed)} failed"
        if judged:
            worst = min(judged, key=lambda r: r[self.l2[0]]["ratio"] / r["floor"])
            ratio = worst[self.l2[0]]["ratio"]
            line += f"; lowest over its floor: {worst['name']}, {ratio:.3f} of {worst['floor']:.2f}"
        return line

    @property
    def failed(self) -> bool:
        return any(
            "error" in r
            for t in [*self.report["tables"], {"rows": self.report["small"]}]
            for r in t["rows"]
        )


def on_device(args) -> int:
    device = measurable()
    if device is None:
        return 2
    properties = torch.cuda.get_device_properties(device)
    clock = DeviceClock(device, args.repeats or 25)
    bench = Bench(clock, device, args)
    clock.wake()
    empty = clock.time([lambda: None], None).us
    bench.report = {
        **facts(device),
        "shapes": args.shapes or SHAPES,
        "empty_us": empty,
        **bench.report,
    }
    print(
        f"{properties.name}, {properties.multi_processor_count} processors, L2 of "
        f"{properties.L2_cache_size >> 20} MiB ({' and '.join(args.l2)}), torch "
        f"{torch.__version__}; medians of {clock.repeats}; an empty interval: {empty:.1f} us"
    )
    return finish(bench, lambda: bench.run(args.shapes or SHAPES), args.json)


# Without a GPU #


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def on_cpu(args) -> int:
    """The reference's times."""
    repeats, key = args.repeats or 5, torch.tensor([1, 2, 3, 0, 0])
    made = {name: Quantizer(fmt) for name, fmt in FORMATS.items() if fmt.is_quantized}
    made["nvfp4+SR"] = Quantizer("nvfp4", rounding="stochastic")
    made["nvfp4+RHT"] = Quantizer("nvfp4", rotation=True)
    report = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shapes": args.shapes or CPU_SHAPES,
        "tables": [],
    }
    for rows, cols in args.shapes or CPU_SHAPES:
        x = laws.values(rows, cols)
        copy = _seconds(x.clone, repeats)
        found = {"title": f"{rows}x{cols} bf16", "copy_s": copy, "rows": []}
        report["tables"].append(found)
        print(
            f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, {rows}x{cols} "
            f"bf16, reference ops; copy {copy * 1e3:.2f} ms"
        )
        print(
            f"{'format':14} {'direction':11} {'encode s':>9} {'x copy':>7} {'decode s':>9} "
            f"{'x copy':>7}"
        )
        for label, quantizer in made.items():
            for direction in Direction:
                if not wanted(f"{label} {direction.value}", args.rows):
                    continue
                storage = quantizer.storage(x, direction, key)
                encode = _seconds(lambda q=quantizer, d=direction: q.storage(x, d, key), repeats)
                decode = _seconds(storage.decode, repeats)
                result = {
                    "name": label,
                    "direction": direction.value,
                    "encode_s": encode,
                    "decode_s": decode,
                }
                found["rows"].append(result)
                ratios = f"{encode:9.4f} {encode / copy:7.1f} {decode:9.4f} {decode / copy:7.1f}"
                print(f"{label:14} {direction.value:11} {ratios}", flush=True)
    write(args.json, report)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes_help = "rows x cols (default: 8192x8192 16384x4096 4096x14336)"
    made.add_argument("--shapes", type=extents("8192x8192"), nargs="+", help=shapes_help)
    made.add_argument(
        "--rows", nargs="+", default=[], help="only rows whose name contains one of these"
    )
    made.add_argument("--json", help="write all numbers to this file")
    made.add_argument("--repeats", type=count, help="timed calls a row (default: 25; CPU: 5)")
    made.add_argument(
        "--l2", nargs="+", choices=L2_MODES, default=L2_MODES, help="how the L2 is made cold"
    )
    made.add_argument(
        "--reference", action="store_true", help="time the PyTorch reference of each row as well"
    )
    return made


def main() -> int:
    args = parser().parse_args()
    return on_device(args) if torch.cuda.is_available() else on_cpu(args)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Hopper, or another architecture, on a CPU: the compiled operators emulated by the reference, and
the facts that choose domains and layouts.

`emulated()` replaces what `native` calls, so that its own Python (packing, padding, bias) runs as
it does on a GPU. The emulation refuses what the C++ of csrc/api refuses. Products are exact: fp64,
rounded to fp32 and then to the result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import register_flop_formula

from dist_tests import product_error
from fsdp_quant.formats import (
    COLUMNWISE,
    E2M1,
    E4M3,
    E5M2,
    ELEMENTS,
    ROWWISE,
    Direction,
    Encoding,
    Format,
    ceil_div,
    round_up,
)
from fsdp_quant.linear import base, guard, plan, shared_input
from fsdp_quant.ops import (
    anchoring,
    capability,
    dispatch,
    gradient_codes,
    layout,
    native,
    norm,
    opaque,
    reference,
    routing,
)
from fsdp_quant.ops import product_error as probing
from fsdp_quant.optim import fused_adam
from fsdp_quant.tensor import torch_compat

ARCH = "sm_90a"
_ELEMENTS = {1: E4M3, 2: E5M2, 3: E2M1}
_NONE, _TENSOR, _ROW, _1X128, _128X128, _E8M0, _E4M3, _1X512 = range(8)
_HALVES = (torch.bfloat16, torch.float16)


def refuse(condition: object, what: str, kind: type = ValueError) -> None:
    """The operator's own check: raises `kind` where the condition holds."""
    if condition:
        raise kind(what)


class Spec(NamedTuple):
    """What `native.pack_encoding` was told; a direction and an eps come with each call."""

    fmt: Format
    stochastic: bool
    transposed: bool
    layout: int


class Side(NamedTuple):
    """A packed encoding, unpacked for a direction."""

    encoding: Encoding
    transposed: bool
    layout: int


# An integer stands for a specification by its place here: no bits are known on this side. None is
# one of the C++.
_SPECS: list[Spec] = []
_FIRST = 1 << 40


def pack(spec: Spec) -> int:
    if spec not in _SPECS:
        _SPECS.append(spec)
    return _FIRST + _SPECS.index(spec)


def unpack(packed: int, direction: Direction, eps: float = 0.0) -> Side | None:
    if not packed:
        return None
    fmt, stochastic, transposed, scale_layout = _SPECS[packed - _FIRST]
    return Side(Encoding(fmt, direction, stochastic, eps), transposed, scale_layout)


def _scale_as_read(
    scale: Tensor, fmt: Format, direction: Direction, lines: int, scale_layout: int
) -> Tensor:
    """Compact scales as tensor cores read them, flat. lines: of the operand."""
    scale = scale if direction is ROWWISE else scale.t()  # [outer blocks, contraction blocks]
    if scale_layout == native.BLACKWELL and capability.spreads(fmt):
        return layout.swizzle_128x4(layout.spread_scales(scale, lines, fmt.block[0]))
    if scale_layout == native.BLACKWELL and fmt.scale != "fp32":
        return layout.swizzle_128x4(scale.repeat_interleave(fmt.block[0], 0)[:lines])
    if fmt.scale == "fp32" and fmt.block[1] is not None:
        scale = layout.pad_to(scale.t() if fmt.block[0] == 1 else scale, 1, 4)
    return scale.contiguous().flatten()


def _turned(data: Tensor, fmt: Format, shape: tuple[int, int], direction: Direction) -> Tensor:
    rows, cols = fmt.padded_shape(shape, direction)
    return layout.repack(data, fmt.element.bits, rows, cols)


class Call(NamedTuple):
    """One call of an operator: what it read, and which sides of that it made."""

    name: str
    read: int
    row: bool = False
    col: bool = False


class Overloads(SimpleNamespace):
    def __call__(self, *args, **kwargs):
        return self.default(*args, **kwargs)


def matrices_of(stacks: Sequence[Tensor]) -> list[Tensor]:
    """[rows, cols] of each; a stack [E, rows, cols] is E of them."""
    return [m for t in stacks for m in (t.unbind() if t.dim() == 3 else [t])]


class Operators:
    """`torch.ops.fsdp_quant`, as far as one process calls it."""

    def __init__(self, arch: str = ARCH):
        self.arch = arch
        self.calls: list[Call] = []
        self.plans: list[SimpleNamespace] = []
        self.counts: list[list[int]] = []
        self.probed = True
        self.random_key = Overloads(
            default=self._random_key, after=lambda *args: self._random_key(*args[:-1])
        )

    def count(self, name: str) -> int:
        return sum(c.name == name for c in self.calls)

    def reads(self, x: Tensor) -> list[Call]:
        """The calls that quantized this memory."""
        return [c for c in self.calls if c.read == x.data_ptr() and (c.row or c.col)]

    def steps(self) -> list[Call]:
        """The passes of layers that were one call."""
        return [c for c in self.calls if c.name.startswith("linear_step")]

    # Encodings #

    def pack_encoding(
        self,
        element,
        scale,
        pow2,
        scale_rounding,
        scale_rule,
        outer,
        contraction,
        stochastic,
        rotated,
        transposed,
        scale_layout,
        four_over_six="off",
        scale_per="tensor",
    ):
        fmt = Format(
            "emulated",
            ELEMENTS[element],
            (outer or None, contraction or None),
            scale,
            pow2,
            scale_rounding,
            tensor_scale=scale == "e4m3",
            rotated=rotated,
            scale_rule=scale_rule,
            four_over_six=four_over_six,
            scale_per=scale_per,
        )
        refuse(
            scale_layout == native.OPERAND and scale_rule != "fp8_exact",
            "operands are made of fp8_exact scales",
        )
        return pack(Spec(fmt, stochastic, transposed, scale_layout))

    def encoding_shapes(self, packed, columnwise, rows, cols, row0=0, run=None):
        """Of the shapes that formats state, in the layouts that Hopper reads."""
        direction = COLUMNWISE if columnwise else ROWWISE
        fmt, _, transposed, scale_layout = _SPECS[packed - _FIRST]
        row_block, col_block = fmt.dims(direction)
        padded = fmt.padded_shape((rows, cols), direction)
        first = row0 % row_block if row_block else 0
        data = padded[::-1] if transposed else padded
        data = (
            data
            if scale_layout == native.OPERAND
            else (data[0], fmt.row_bytes(data[1], torch.uint8))
        )
        grid = fmt.scale_shape((rows, cols), direction)
        if first:
            grid = ceil_div(first + padded[0], row_block), grid[1]
        if run == native.OF_TILE:
            grid = native.anchor_shape(rows, cols, columnwise, run)
            return data, grid, grid, False, (), False
        if run is not None:
            length, lines = (rows, cols) if columnwise else (cols, rows)
            runs = ceil_div(length, run) if run else 1
            scale = (
                (1, 1)
                if run == native.OF_TENSOR
                else (runs, lines)
                if columnwise
                else (lines, runs)
            )
            grid = scale
            if run > 0 and scale_layout == capability.HOPPER:  # as multiplied
                scale = runs, round_up(lines, 4)
            return data, scale, grid, False, (), False
        scale = grid
        second = fmt.tensor_scale_shape((rows, cols), direction) if fmt.tensor_scale else ()
        if scale_layout == native.OPERAND:
            return data, (1,), grid, False, (1,), False
        if scale_layout:
            refuse(
                scale_layout != native.scale_layout_of(self.arch),
                f"scales are not those of {self.arch}",
            )
            lines, blocks = grid[::-1] if columnwise else grid
            spread = capability.spreads(fmt)
            if scale_layout == native.BLACKWELL and (spread or fmt.scale != "fp32"):
                of_32 = layout.SPREAD_BLOCKS * blocks if spread else round_up(blocks, 4)
                of_operand = round_up(padded[columnwise], 128) * of_32
                return data, (of_operand,), grid, True, second, False
            is_fp32_block = fmt.scale == "fp32" and fmt.block[1] is not None
            if is_fp32_block and fmt.block[0] == 1:
                lines = round_up(lines, 4)
            elif is_fp32_block:
                blocks = round_up(blocks, 4)
            scale = (lines * blocks,)
        return (
            data,
            scale,
            grid,
            fmt.scale != "fp32",
            second,
            fmt.scale_leaves_contraction,
        )

    # Quantizers #

    def _input(self, name: str, x: Tensor, row: int, col: int) -> None:
        self.calls.append(Call(name, x.data_ptr(), bool(row), bool(col)))
        refuse(x.dim() != 2 or x.numel() == 0, f"x has shape {list(x.shape)}")
        refuse(
            x.stride(1) != 1 and x.shape[1] != 1,
            f"x has strides {x.stride()}; its rows must be contiguous",
        )
        refuse(x.dtype not in (*_HALVES, torch.float32), f"x is {x.dtype}")

    def statistics(self, x, row, col, row0, round_to_bf16):
        self._input("statistics", x, row, col)
        return self._statistics(x, row, col, row0, round_to_bf16)

    def _statistics(self, x, row, col, row0, round_to_bf16):
        x, made = _seen(x, round_to_bf16), []
        for side in _present(row, col):
            made += [
                s
                for s in reference.statistics(
                    reference.prepared(x, side.encoding), side.encoding, row0
                )
                if s is not None
            ]
        return made

    def column_sums(self, x):
        self._input("column_sums", x, 0, 0)
        refuse(x.dtype is not torch.bfloat16, f"x is {x.dtype}")
        return x.sum(0)

    def quantize(self, x, row, col, row_eps, col_eps, row0, round_to_bf16, *known):
        self._input("quantize", x, row, col)
        return self._quantized(x, _present(row, col, row_eps, col_eps), row0, round_to_bf16, known)

    def _quantized(self, x, sides, row0, round_to_bf16, known):
        x, made = _seen(x, round_to_bf16), []
        for side in sides:
            e = side.encoding
            at = 4 * (e.direction is not ROWWISE)
            given_amax, given_tensor_amax, enc, key = known[at : at + 4]
            values = reference.prepared(x, e)
            amax, tensor_amax = reference.statistics(values, e, row0)
            amax = amax if given_amax is None else reference.of_all_parts(given_amax, e.fmt)
            tensor_amax = tensor_amax if given_tensor_amax is None else given_tensor_amax
            factor = None if enc is None else reference.delayed_encode_scale(enc, amax, e)
            data, scale = reference.encode(values, amax, tensor_amax, e, row0, key, factor)
            refuse(row0 and side.layout, "operands are of whole tensors")
            if side.layout == native.OPERAND:
                refuse(
                    given_amax is not None or x.dtype is not torch.bfloat16,
                    "operands are made of bfloat16, of unknown amaxes",
                )
                refuse(side.transposed != (e.direction is COLUMNWISE), "operands are K-major")
                cols = e.fmt.padded_shape(x.shape, e.direction)[1]
                made += _operand_of_codes(
                    data, scale, tensor_amax, e.fmt, e.direction, cols, side.transposed
                )
                made += [tensor_amax] if given_tensor_amax is None else []
                continue
            made.append(_turned(data, e.fmt, x.shape, e.direction) if side.transposed else data)
            lines = e.fmt.padded_shape(x.shape, e.direction)[e.direction is not ROWWISE]
            made.append(
                _scale_as_read(scale, e.fmt, e.direction, lines, side.layout)
                if side.layout
                else scale
            )
            made += [tensor_amax] if e.fmt.tensor_scale and given_tensor_amax is None else []
            made += [amax] if e.fmt.block[1] is None and given_amax is None else []
        return made

    def statistics_group(self, x, packed, columnwise, row0, round_to_bf16):
        sides, made = (0, packed) if columnwise else (packed, 0), []
        for one, start in zip(matrices_of(x), row0):
            if one.numel():  # of a rank that has no rows of it, no tile is launched
                self._input("statistics", one, *sides)
            made += self._statistics(one, *sides, start, round_to_bf16)
        return made

    def quantize_group(
        self,
        x,
        packed,
        columnwise,
        eps,
        row0,
        amax,
        tensor_amax,
        enc,
        record,
        staging,
        data_at,
        scale_at,
        round_to_bf16,
    ):
        refuse(staging.dtype is not torch.uint8, "staging is of bytes")
        made = self._quantized_group(
            x, packed, columnwise, eps, row0, amax, tensor_amax, enc, record, round_to_bf16
        )
        for buffers, *at in zip(made, data_at, scale_at):
            refuse(at[1] % 4, f"scales at byte {at[1]}")
            for buffer, place in zip(buffers, at):
                flat = buffer.contiguous().view(-1).view(torch.uint8)
                staging[place : place + flat.numel()] = flat

    def quantize_group_out(
        self,
        x,
        packed,
        columnwise,
        eps,
        row0,
        amax,
        tensor_amax,
        enc,
        record,
        data,
        scale,
        round_to_bf16,
    ):
        made = self._quantized_group(
            x, packed, columnwise, eps, row0, amax, tensor_amax, enc, record, round_to_bf16
        )
        for buffers, *into in zip(made, data, scale):
            for buffer, target in zip(buffers, into):
                refuse(
                    target.dtype is not buffer.dtype or target.numel() != buffer.numel(),
                    "data or scale",
                )
                target.copy_(buffer.view(target.shape))

    def _quantized_group(
        self, x, packed, columnwise, eps, row0, amax, tensor_amax, enc, record, round_to_bf16
    ):
        sides = (0, packed, 0.0, eps) if columnwise else (packed, 0, eps, 0.0)
        e, made = unpack(packed, COLUMNWISE if columnwise else ROWWISE, eps).encoding, []
        x = matrices_of(x)
        refuse(e.stochastic or e.fmt.rotated, "a group is rounded to nearest, not rotated")
        refuse(
            len(enc) != len(record) or (enc and len(enc) != len(x)), "an enc and a record a tensor"
        )
        for one, start, *known, factor, history in zip(
            x, row0, amax, tensor_amax, enc or [None] * len(x), record or [None] * len(x)
        ):
            refuse(
                e.fmt.block[1] is None and known[0] is None,
                "pass the amax of a scale that spans more than a tile",
            )
            refuse(
                e.fmt.tensor_scale and known[1] is None,
                "pass the amax of a scale that spans more than a tile",
            )
            given = [None] * (4 * columnwise) + [*known, factor] + [None] * 5
            if one.numel():  # of a rank that has no rows of it, the scale alone is written
                self._input("quantize", one, *sides[:2])
            made.append(self._quantized(one, _present(*sides), start, round_to_bf16, given)[:2])
            if factor is not None and history.numel():
                dispatch.record_amax(history, known[0])
        self.calls.append(Call("quantize_group", x[0].data_ptr()))
        return made

    def quantize_anchored(
        self, x, row, col, row_run, col_run, row_anchor, col_anchor, round_to_bf16
    ):
        self._input("quantize_anchored", x, row, col)
        refuse(
            not (x.dtype is torch.bfloat16 or (round_to_bf16 and x.dtype is torch.float32)),
            f"x is {x.dtype}; anchored codes are made of bfloat16 (or float32 through bfloat16)",
        )
        x, made, anchor = _seen(x, round_to_bf16), [], None
        for side in _present(row, col):
            e = side.encoding
            is_up = e.fmt.scale == "e8m0" and e.fmt.scale_rounding == "up"
            refuse(not is_up, "anchors take the place of e8m0 scales that are rounded up")
            refuse(e.fmt.block != (1, 32), f"anchors are of (1, 32) blocks; got {e.fmt.block}")
            refuse(e.fmt.element.bits != 8, "anchors are of codes of 8 bits")
            run, given = (row_run, row_anchor) if e.direction is ROWWISE else (col_run, col_anchor)
            if run == native.OF_TENSOR:
                refuse(e.fmt.element.name != "e4m3", "anchors of tensors are of e4m3")
                refuse(
                    given is not None and not torch.equal(given, x.abs().amax().view(1).float()),
                    "an amax of other values",
                )
                if given is None and anchor is None:
                    self.calls.append(Call("statistics", x.data_ptr()))
                    anchor = x.abs().amax().view(1).float()
                amax, _ = reference.statistics(x, e)
                compact = reference.encode(x, amax, None, e)
                codes, scale = anchoring.anchored_codes(*compact, e.fmt, e.direction, whole=True)
                scale = scale.view(1, 1)
            else:
                refuse(given is not None, "anchors are taken from x here")
                refuse(run < 0 or run % 128 or run & (run - 1), f"anchor run is {run}")
                codes, scale = anchoring.anchored(x, e, run or None)
                if run and side.layout == capability.HOPPER:  # [runs, lines], as multiplied
                    scale = scale if e.direction is COLUMNWISE else scale.t()
                    scale = layout.pad_to(scale, 1, 4).contiguous()
            made += [
                _turned(codes, e.fmt, x.shape, e.direction) if side.transposed else codes,
                scale,
            ]
        return made if anchor is None else [*made, anchor]

    # Layouts #

    def dequantize(self, data, scale, tensor_amax, packed, columnwise, cols, row0, dtype):
        side = unpack(packed, COLUMNWISE if columnwise else ROWWISE)
        fmt, direction = side.encoding.fmt, side.encoding.direction
        refuse(
            data.dtype is not torch.uint8 or not data.is_contiguous(),
            "data is not contiguous uint8",
        )
        refuse(
            data.shape[1] != (ceil_div(cols, fmt.element.packing[0]) * fmt.element.packing[1]),
            f"data of {cols} columns",
        )
        refuse(scale is not None and not scale.is_contiguous(), "scale is not contiguous")
        return (
            reference.decode(data, scale, tensor_amax, fmt, direction, cols, row0)
            .to(dtype)
            .contiguous()
        )

    def tensor_decode_scale(self, tensor_amax, packed):
        return reference.tensor_decode_scale(tensor_amax, unpack(packed, ROWWISE).encoding.fmt)

    def transpose_codes(self, data, rows, cols, bits):
        self.calls.append(Call("transpose_codes", data.data_ptr()))
        refuse(
            not data.is_contiguous()
            or data.numel() != rows * (ceil_div(cols, 2) if bits == 4 else cols),
            "source",
        )
        return layout.repack(data.view(rows, -1), bits, rows, cols)

    def relayout_group(self, source, out, kind, rows, cols, outer, outer_block):
        for one, to, what, r, c, lines, block in zip(
            source, out, kind, rows, cols, outer, outer_block
        ):
            if what in (native.SWIZZLE, native.SWIZZLE_TRANSPOSED):
                to.copy_(self.swizzle_scales(one, lines, block, what == native.SWIZZLE_TRANSPOSED))
                continue
            refuse(
                what not in (native.TRANSPOSE_BYTES, native.TRANSPOSE_NIBBLES), f"kind is {what}"
            )
            to.copy_(self.transpose_codes(one, r, c, 4 if what == native.TRANSPOSE_NIBBLES else 8))
        self.calls.append(Call("relayout_group", source[0].data_ptr()))

    def swizzle_scales(self, scale, outer, outer_block, transposed):
        scale = scale.t() if transposed else scale
        if scale.dtype is torch.float32:
            return layout.swizzle_128x4(layout.spread_scales(scale, outer, outer_block))
        return layout.swizzle_128x4(scale.repeat_interleave(outer_block, 0)[:outer])

    def anchor_codes(
        self, data, scale, tensor_amax, packed, columnwise, transposed, whole, cols, run=0
    ):
        if data.dim() == 3:
            refuse(run > 0, "matrices are anchored by lines, tiles or tensors")
            made = [
                self.anchor_codes(*one, None, packed, columnwise, transposed, whole, cols, run)
                for one in zip(data, scale)
            ]
            return tuple(torch.stack(of) for of in zip(*made))
        tiles = run == native.OF_TILE
        refuse(
            run and (whole or not tiles and (run < 0 or run % 128 or run & (run - 1))),
            f"anchor run is {run}",
        )
        self.calls.append(Call("anchor_codes", data.data_ptr()))
        direction = COLUMNWISE if columnwise else ROWWISE
        fmt = unpack(packed, direction).encoding.fmt
        powers = whole and fmt.pow2 and fmt.block == (128, 128)
        if whole and fmt.becomes_e4m3:
            refuse(
                not (data.is_contiguous() and scale.is_contiguous()) or tensor_amax is None,
                "data, scale or tensor amax",
            )
            return _operand_of_codes(data, scale, tensor_amax, fmt, direction, cols, transposed)
        of_blocks = fmt.scale == "e8m0" and fmt.block[1] == 32
        refuse(not powers and not of_blocks, "wanted e8m0 scales of (1, 32) or (32, 32) blocks")
        refuse(
            not (data.is_contiguous() and scale.is_contiguous()), "data or scale is not contiguous"
        )
        refuse(fmt.row_bytes(cols, torch.uint8) != data.shape[1], f"data of {cols} columns")
        grid = tuple(ceil_div(n, b) for n, b in zip((len(data), cols), fmt.dims(direction)))
        refuse(
            scale.numel() != grid[0] * grid[1], f"scale has {scale.numel()} elements; wanted {grid}"
        )
        codes, lines = anchoring.anchored_codes(
            data, scale.view(grid), fmt, direction, whole, cols, run if run > 0 else None, tiles
        )
        return (codes.t().contiguous() if transposed else codes), lines.contiguous()

    def anchor_group(
        self,
        data,
        scale,
        tensor_amax,
        packed,
        columnwise,
        transposed,
        whole,
        cols,
        out,
        line_scale,
        run=0,
    ):
        for one, of, amax, n, *into in zip(
            data, scale, tensor_amax or [None] * len(data), cols, out, line_scale
        ):
            for target, made in zip(
                into,
                self.anchor_codes(one, of, amax, packed, columnwise, transposed, whole, n, run),
            ):
                target.copy_(made)

    def set_probed(self, probed):
        self.probed = probed

    def product_error(
        self,
        a,
        b,
        a_scale,
        b_scale,
        a_kind,
        b_kind,
        counted,
        step,
        guard,
        product,
        every=probing.PROBED_STEPS,
    ):
        refuse(tuple(guard.shape) != (3, 2) or guard.dtype is not torch.float32, "guard")
        refuse(a.shape[-1] != b.shape[-1], "wanted the same K")
        looks = probing.is_probed(int(step[1]), every)
        if not (self.probed or torch_compat.is_captured(a)):
            assert not looks, "the host hides a probed step of the device"
            return
        self.calls.append(Call("product_error", a.data_ptr()))
        if not looks:
            return
        operands = []
        for data, scale, kind in ((a, a_scale, a_kind), (b, b_scale, b_kind)):
            block = {1: (None, None), 2: (1, None), 3: (1, 128), 4: (128, 128), 7: (1, 512)}[
                kind >> 3
            ]
            element = next(e for e in ELEMENTS.values() if native.ELEMENTS.get(e.name) == kind & 7)
            if block[1] is None:
                runs = None
            elif block[0] == 1:
                runs = scale.view(ceil_div(data.shape[-1], block[1]), -1)
            else:  # of matrices one after the other
                matrices = 1 if data.dim() == 2 else len(data)
                tiles = scale.view(matrices, -1, round_up(ceil_div(data.shape[-1], 128), 4))
                lines = tiles.repeat_interleave(128, 1)[:, : data.shape[-2]]
                runs = lines.flatten(0, 1).t()
            operands.append((data.flatten(0, -2), runs, Format("operand", element, block, "fp32")))
        guard[product] += product_error.product_error(
            *operands,
            (counted & 15, counted >> 4),
            int(step[1]) // every,
            product < 2,
        )

    # Products #

    def gemm(
        self, a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, bias=None, alpha=None, sm_count=0
    ):
        self.calls.append(Call("gemm", a.data_ptr()))
        return _product(a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, bias, alpha).to(
            out_dtype
        )

    def watched_gemm(
        self,
        a,
        b,
        a_scale,
        b_scale,
        a_kind,
        b_kind,
        out_dtype,
        counted,
        step,
        guard,
        product,
        bias=None,
        alpha=None,
    ):
        pair = a, b, a_scale, b_scale, a_kind, b_kind
        self.product_error(*pair, counted, step, guard, product)
        return self.gemm(*pair, out_dtype, bias, alpha)

    def gemm_out(
        self,
        out,
        a,
        b,
        a_scale,
        b_scale,
        a_kind,
        b_kind,
        accumulate,
        bias=None,
        alpha=None,
        sm_count=0,
    ):
        self.calls.append(Call("gemm_out", a.data_ptr()))
        made = _product(a, b, a_scale, b_scale, a_kind, b_kind, out.dtype, bias, alpha)
        (rows, cols), step = made.shape, out.stride(0)
        refuse(out.shape != made.shape, f"out is {list(out.shape)}; wanted {list(made.shape)}")
        refuse(
            (cols > 1 and out.stride(1) != 1) or (rows > 1 and step < cols),
            f"out has strides {out.stride()}; wanted rows of {cols} contiguous elements",
        )
        row_bytes = (step if rows > 1 else cols) * out.element_size()
        refuse(
            a.dtype not in _HALVES and out.numel() and (row_bytes % 16 or out.data_ptr() % 16),
            f"out has rows {row_bytes} bytes apart, from address {out.data_ptr() % 16} modulo 16",
        )
        refuse(
            a_kind >> 3 == _1X512 and accumulate and out.dtype is not torch.float32,
            f"{out.dtype} +=",
            NotImplementedError,
        )
        out.copy_(made + out.double() if accumulate else made)

    def grouped_gemm(
        self, out, a, b, a_scale, b_scale, offsets, a_kind, b_kind, flag=None, sm_count=0, bias=None
    ):
        self.calls.append(Call("grouped_gemm", a.data_ptr()))
        refuse(offsets.dtype is not torch.int32 or offsets.shape != (len(b) + 1,), "offsets")
        refuse(
            out.shape != (a.shape[0], b.shape[1])
            or out.dtype not in (torch.bfloat16, torch.float32),
            "out",
        )
        refuse(b.shape[1] % 8, "b: multiples of 8 rows (N)")
        refuse(
            bias is not None
            and (
                bias.numel() != b.shape[0] * b.shape[1]
                or not bias.is_contiguous()
                or bias.data_ptr() % 16
                or bias.dtype not in (torch.bfloat16, torch.float32)
            ),
            "bias",
        )
        x = None if _is_each(a_scale, a_kind, len(a)) else _operand(a, a_scale, a_kind, "a")
        scales = [None] * len(b)
        if b_scale is not None:
            scales = b_scale.view(len(b), -1) if b_scale.numel() > 1 else b_scale.expand(len(b), 1)
        for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            rows = (
                _operand(a[start:end], a_scale[e : e + 1], a_kind, "a")
                if x is None
                else x[start:end]
            )
            made = rows @ _operand(b[e], scales[e], b_kind, "b").t()
            made = made * (a_scale[e] * b_scale[e]).double() if a_kind == 8 else made
            out[start:end] = made if bias is None else made.float() + bias.view(len(b), -1)[e]

    def grouped_gemm_wgrad(
        self,
        out,
        a,
        b,
        a_scale,
        b_scale,
        offsets,
        a_kind,
        b_kind,
        accumulate=False,
        flag=None,
        sm_count=0,
    ):
        self.calls.append(Call("grouped_gemm_wgrad", a.data_ptr()))
        refuse(
            offsets.dtype is not torch.int32
            or any(o % 128 and o != a.shape[1] for o in offsets.tolist()),
            "offsets: multiples of 128, or all tokens",
        )
        refuse(out.shape != (len(offsets) - 1, len(a), len(b)), "out")
        refuse(
            _ELEMENTS.get(b_kind & 7) == E5M2, "b is e5m2, and groups are cut", NotImplementedError
        )
        given = (a, a_scale, a_kind, "a"), (b, b_scale, b_kind, "b")
        whole = [
            None if _is_each(scale, kind, len(codes)) else _operand(codes, scale, kind, name)
            for codes, scale, kind, name in given
        ]
        for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            x, w = (
                _operand(codes[:, start:end], scale.view(len(offsets) - 1, -1)[e], kind, name)
                if values is None
                else values[:, start:end]
                for values, (codes, scale, kind, name) in zip(whole, given)
            )
            made = x @ w.t()
            made = made * (a_scale[e] * b_scale[e]).double() if a_kind == 8 else made
            out[e] = made + out[e] if accumulate else made

    # Optimizers #

    def adam(
        self,
        master,
        grad,
        first,
        second,
        rounded,
        first_scale,
        second_scale,
        row,
        scalars,
        grad_scale,
        found_inf,
    ):
        self.calls.append(Call("adam", master[0].data_ptr()))
        lists, none = (
            [master, first, second, rounded, first_scale, second_scale],
            [None] * len(master),
        )
        refuse(
            any(len(of or master) != len(master) for of in (*lists, grad, row)),
            "lists of different lengths",
        )
        refuse(
            any(t.dtype is not of[0].dtype for of in (*lists, grad) for t in of),
            "dtypes differ in a list",
        )
        refuse((first[0].dtype is torch.uint8) != bool(first_scale), "codes have scales")
        refuse(master[0].dtype is torch.uint8 and not rounded, "remainders have parameters")
        if found_inf is None or not found_inf.item():
            scale = None if grad_scale is None else grad_scale.reshape(())
            for i, tensors in enumerate(zip(*(of or none for of in lists))):
                of = fused_adam.Stored(*tensors)
                for target, value in zip(of, of.updated(grad[i], scalars[row[i]], scale)):
                    if target is not None:
                        target.data.copy_(value)  # as a kernel writes: no version is counted

    def adam_group(
        self,
        master,
        grad,
        first,
        second,
        row,
        scalars,
        grad_scale,
        found_inf,
        row_side,
        col_side,
        row_eps,
        col_eps,
        row0,
        statistics,
        out,
    ):
        self.adam(master, grad, first, second, (), (), (), row, scalars, grad_scale, found_inf)
        self.calls[-1] = Call("adam_group", master[0].data_ptr(), bool(row_side), bool(col_side))
        out = iter(out)
        for p, start in zip(master, row0):
            x = p.to(torch.bfloat16)
            for side in _present(row_side, col_side, row_eps, col_eps):
                e = side.encoding
                leaves_tile = e.fmt.block[1] is None or e.fmt.element.bits != 8
                refuse(
                    e.stochastic or e.fmt.rotated or (leaves_tile and not statistics),
                    "Adam's kernel makes plain codes",
                )
                amax, tensor_amax = reference.statistics(x, e, start)
                if statistics:
                    made, into = ([amax, tensor_amax] if e.fmt.tensor_scale else [amax]), next(out)
                    into = [into, next(out)] if e.fmt.tensor_scale else [into]
                    refuse(any(t.any() for t in into), "amaxes are zeros before")
                else:
                    made, into = (
                        reference.encode(x, amax, tensor_amax, e, start),
                        [next(out), next(out)],
                    )
                for target, value in zip(into, made):
                    if target.numel() or not statistics:
                        target.copy_(value)
        refuse(next(out, None) is not None, "too many buffers in out")

    def adam_count(self, steps, found_inf, lr, learning_rate, beta1, beta2, eps, decay, decoupled):
        self.calls.append(Call("adam_count", steps[0].data_ptr()))
        group = {
            "lr": learning_rate if lr is None else lr,
            "betas": (beta1, beta2),
            "eps": eps,
            "weight_decay": decay,
            "decoupled_weight_decay": decoupled,
        }
        return fused_adam.scalars_on_device(group, steps, found_inf)

    # Gradients #

    @staticmethod
    def _layout(shapes, world, encoding):
        named = (
            gradient_codes.GradientLayout(shapes, world, n) for n in gradient_codes.GRADIENT_FORMATS
        )
        packed = {native.packed_gradients(layout.encoding): layout for layout in named}
        return packed[encoding]

    def gradient_keys(self, step, idents, counted):
        self.calls.append(Call("gradient_keys", idents.data_ptr()))
        return gradient_codes.reference_keys(step, idents, counted)

    def encode_gradients(self, grads, encoding, keys, buffer):
        self.calls.append(Call("encode_gradients", grads[0].data_ptr()))
        layout = self._layout(tuple(tuple(g.shape) for g in grads), len(buffer), encoding)
        gradient_codes.reference_encode(grads, layout, keys, buffer)

    def decode_gradients(self, buffer, lengths, encoding, factor, sum):
        self.calls.append(Call("decode_gradients", sum.data_ptr()))
        layout = self._layout(tuple((n * len(buffer),) for n in lengths), len(buffer), encoding)
        gradient_codes.reference_decode(buffer, layout, sum, factor)

    # A layer's step #

    def linear_plan(self, fields, eps, key):
        refuse(
            len(fields) != 34 or len(eps) != 6,
            f"a linear plan has 34 fields and 6 eps; got {len(fields)}, {len(eps)}",
        )
        operand_specs = [
            native.OperandSpec(*fields[5 * i : 5 * i + 5], e) for i, e in enumerate(eps)
        ]
        for side in filter(None, (unpack(spec.side, ROWWISE) for spec in operand_specs)):
            refuse(
                side.encoding.fmt.bits == 6 and (side.transposed or side.layout != native.COMPACT),
                "6-bit elements go with e8m0 scales of (1, 32) blocks, as compact codes",
            )
        self.plans.append(
            SimpleNamespace(
                slots=[operand_specs[:2], operand_specs[2:4], operand_specs[4:]],
                saves_input=fields[30],
                watched=fields[31:],
                key=key,
            )
        )
        self.counts.append([0] * 15)
        return len(self.plans) - 1

    def linear_counts(self):
        counts = torch.tensor(self.counts, dtype=torch.int64).view(-1, 15)
        self.counts = [[0] * 15 for _ in self.plans]
        return counts

    def token_groups(self, ends, tokens, wrong=None, tag=0):
        given = ends.long()
        clean = given.clamp(0, tokens).cummax(0).values
        clean[-1] = tokens
        bounds, places, sources = [0, *clean.tolist()], [0], []
        for start, end in itertools.pairwise(bounds):
            sources += [
                (first, min(end - first, 128), len(places) - 1, places[-1])
                for first in range(start, end, 128)
            ]
            places.append(128 * len(sources))
        spare = (tokens + 127 * min(len(ends), tokens)) // 128 - len(sources)
        if wrong is not None and not torch.equal(clean, given):
            wrong.fill_(tag << 32 | tokens)
        return torch.tensor(
            sum([*sources, *[(0, 0, 0, 0)] * spare], ()) + (*bounds, *places), dtype=torch.int32
        )

    def grouped_step(
        self,
        x,
        ends,
        weight,
        weight_scale,
        plan,
        save,
        guard,
        bias,
        wrong,
        tag,
        factors,
        histories,
        step,
        ids,
        order,
        shares=None,
    ):
        if shares is not None:
            refuse(order is not None or not self.plans[plan].slots[0][0].side, "rows in order")
            refuse(shares.dtype is not torch.float32 or shares.shape != x.shape[:1], "shares")
            self.calls.append(Call("swiglu", x.data_ptr(), True, save))
            x = norm.reference_activation(*x.chunk(2, -1), norm.ACTIVATIONS["swiglu"].kind)
            x = (x * shares[:, None]).to(x.dtype)
        if order is not None:
            refuse(order.dtype is not torch.int64 or not order.is_contiguous(), "order")
            x = x.index_select(0, order)
        tables, operand_specs = self.token_groups(ends, len(x), wrong, tag), self.plans[plan].slots
        keeps = save and not self.plans[plan].saves_input
        made = self._tokens(
            x, plan, 0, True, keeps, guard, tables, len(ends), factors, step, ids, histories
        )
        fields = self._fields(operand_specs[0][0])
        a = self._multiplied(operand_specs[0][0], made[:fields] or [x])
        kind = 8 if self._decodes(operand_specs[1][0]) else operand_specs[1][0].kind
        if bias is not None and bias.dtype is not torch.bfloat16:
            bias = bias.float()
        y = self._rows_product(*a, weight, weight_scale, kind, tables, bias)
        self._watch(plan, 0, guard, step, a, (weight, weight_scale, kind), True)
        self.counts[plan][6] += len(ends)
        return [y, tables, *made[fields:]]

    def _watch(self, plan, product, guard, step, a, b, grouped: bool = False) -> None:
        counted, every = self.plans[plan].watched[product], probing.PROBED_STEPS
        if grouped:
            every = probing.PROBED_STEPS_OF_GROUPS
        if guard is not None and counted:
            self.product_error(
                a[0], b[0], a[1], b[1], a[2], b[2], counted, step, guard, product, every
            )

    def _decodes(self, reading) -> bool:
        return bool(reading.side) and reading.kind == 0

    def _fields(self, reading) -> int:
        return self._buffers(reading, ROWWISE) if reading.side else 0

    def _is_four_bit(self, reading) -> bool:
        return bool(reading.side) and unpack(reading.side, ROWWISE).encoding.fmt.tensor_scale

    def _buffers(self, reading, direction: Direction) -> int:
        """How many buffers the codes of a side are: the scale of an operand contains the tensor
        amax."""
        side = unpack(reading.side, direction)
        is_operand = side.layout == native.OPERAND or reading.run == native.OF_TENSOR
        return 2 + (side.encoding.fmt.tensor_scale and not is_operand)

    def _multiplied(self, reading, buffers) -> tuple:
        """(data, scale, kind): values of codes that are decoded, which lie along the
        contraction."""
        if not reading.side:
            return buffers[0], None, 0
        if not self._decodes(reading):
            return *buffers, reading.kind
        data, scale, tensor_amax = buffers
        scale, cols = scale.view(len(data), -1), 2 * data.shape[1]
        values = self.dequantize(data, scale, None, reading.side, False, cols, 0, torch.bfloat16)
        return values, self.tensor_decode_scale(tensor_amax, reading.side), 8

    def _rows_product(self, a, a_scale, a_kind, b, b_scale, b_kind, tables, bias=None):
        offsets = native.TokenGroups(tables, len(b)).offsets
        out = a.new_empty(len(a), b.shape[1], dtype=torch.bfloat16)
        if a_kind == 0:
            refuse(
                b_kind or bias is not None,
                "values are multiplied by values, without a bias",
                NotImplementedError,
            )
            self.calls.append(Call("_grouped_mm", a.data_ptr()))
            for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
                out[start:end] = torch.nn.functional.linear(a[start:end], b[e])
        else:
            self.grouped_gemm(out, a, b, a_scale, b_scale, offsets, a_kind, b_kind, bias=bias)
        return out

    def grouped_dgrad(
        self,
        dy,
        tables,
        groups,
        weight,
        weight_scale,
        keeps,
        plan,
        guard,
        factors,
        histories,
        step,
        ids,
        swiglu,
        order,
    ):
        if order is not None:
            spec = self.plans[plan]
            refuse(spec.saves_input or not all(s.side for s in spec.slots[2]), "order of gradients")
            refuse(order.dtype is not torch.int64, "order")
            self.calls.append(Call("routed", dy.data_ptr()))
            dy = dy.index_select(0, order)
        dx, dshares = dy.new_empty(0), dy.new_empty(0, dtype=torch.float32)
        if len(swiglu):
            swiglu, shares = swiglu
            refuse(shares.dtype is not torch.float32 or shares.shape != dy.shape[:1], "shares")
            refuse(not all(s.side for s in self.plans[plan].slots[2]), "gradients are quantized")
            self.calls.append(Call("swiglu_backward", dy.data_ptr(), weight is not None, keeps))
            kind, halves = norm.ACTIVATIONS["swiglu"].kind, swiglu.chunk(2, -1)
            dshares = (norm.reference_activation(*halves, kind).float() * dy).sum(1)
            dy = (dy * shares[:, None]).to(dy.dtype)
            dy = torch.cat(norm.reference_activation_backward(dy, *halves, kind), -1)
        of_rows, of_cols = self.plans[plan].slots[2]
        wanted, of_step = (weight is not None, keeps), (factors, step, ids, histories)
        made = self._tokens(dy, plan, 2, *wanted, guard, tables, groups, *of_step)
        if weight is not None:
            a = self._multiplied(of_rows, made[: self._fields(of_rows)] or [dy])
            weight = weight if of_rows.side else weight.transpose(1, 2)
            of_weight = self.plans[plan].slots[1][1]
            kind = 8 if self._decodes(of_weight) else of_weight.kind
            dx = self._rows_product(*a, weight, weight_scale, kind, tables)
            self._watch(plan, 1, guard, step, a, (weight, weight_scale, kind), True)
            self.counts[plan][7] += groups
        return [dx, dshares, *(made[-self._fields(of_cols) :] if keeps and of_cols.side else [])]

    def grouped_wgrad(
        self, dy, codes, tables, groups, saved, plan, guard, factors, step, ids, turned
    ):
        of_x, of_dy = self.plans[plan].slots[0][1], self.plans[plan].slots[2][1]
        at, of_step = native.TokenGroups(tables, groups), (factors, step, ids)
        self.counts[plan][8] += groups
        if self.plans[plan].saves_input and of_x.side:
            saved = self._tokens(saved[0], plan, 0, False, True, guard, tables, groups, *of_step)
        if not of_dy.side:
            self.calls.append(Call("_grouped_mm", dy.data_ptr()))
            parts = itertools.pairwise(at.offsets.tolist())
            a, b = (saved[0], dy) if turned else (dy, saved[0])
            return torch.stack(
                [torch.nn.functional.linear(a[i:j].t(), b[i:j].t()) for i, j in parts]
            )
        a, b = self._multiplied(of_dy, codes), self._multiplied(of_x, saved)
        a, b = (b, a) if turned else (a, b)
        dw = dy.new_empty(groups, len(a[0]), len(b[0]))
        self.grouped_gemm_wgrad(dw, a[0], b[0], a[1], b[1], at.padded, a[2], b[2])
        self._watch(plan, 2, guard, step, a, b, True)
        return dw

    def _gathered(self, x, sources):
        gathered = x.new_zeros(128 * len(sources), x.shape[1])
        for i, (first, count, *_) in enumerate(sources.tolist()):
            gathered[128 * i : 128 * i + count] = x[first : first + count]
        return gathered

    def _tokens(
        self, x, plan, slot, row, col, guard, tables, groups, factors, step, ids, histories=()
    ):
        """The columnwise side is that of x with its groups spread; of scales that span tokens, each
        group by itself."""
        call = SimpleNamespace(
            slots=self.plans[plan].slots,
            guard=guard,
            number=plan,
            factors=(factors,) * 2,
            histories=(histories,) * 2,
            step=step,
            ids=ids,
        )
        self.calls.append(Call("tokens", x.data_ptr(), row, col))
        sources = native.TokenGroups(tables, groups).sources
        made = []
        for d, values, *sides in (
            (ROWWISE, x, row, False),
            (COLUMNWISE, self._gathered(x, sources), False, col),
        ):
            side = unpack(call.slots[slot][d is COLUMNWISE].side, d)
            if side is None:
                continue
            fmt = side.encoding.fmt
            if any(sides) and (
                fmt.tensor_scale
                or (fmt.block[1] is None and (d is COLUMNWISE or fmt.block[0] is None))
            ):
                made += self._of_groups(call, slot, x, d, sources.tolist(), groups)
            else:
                made += [
                    t
                    for buffers in self._step_quantize(call, slot, values, *sides).values()
                    for t in buffers[:2]
                ]
        return made

    def _of_groups(self, call, slot, x, d, sources, groups):
        """Codes and scales of one direction, each group quantized by itself; scales of groups
        without tokens are not set.

        Two-level columnwise codes lie along the tokens, as do their scales; and there are tensor
        amaxes [groups].
        """
        decodes = self._buffers(call.slots[slot][d is COLUMNWISE], d) == 3
        per = 2 if decodes else 1
        rows, cols = (x.shape[1], 128 * len(sources)) if d is COLUMNWISE else x.shape
        codes = x.new_zeros(rows, cols // per, dtype=torch.uint8)
        blocks = x.new_zeros(rows, cols // 16, dtype=torch.uint8)
        scale, counted = None, list(self.counts[call.number])
        if decodes:
            scale = x.new_zeros(groups, dtype=torch.float32)
        for e in range(groups):
            tiles = [
                (first, count, start)
                for first, count, group, start in sources
                if group == e and count
            ]
            if not tiles:
                continue
            (first, _, start), end = tiles[0], tiles[-1][0] + tiles[-1][1]
            self.counts[call.number] = list(counted)  # once for all
            histories = {
                name: [list(of)[e::groups] for of in getattr(call, name)]
                for name in ("factors", "histories")
            }
            of_one = SimpleNamespace(
                **vars(call) | histories | {"ids": call.ids[e] if call.ids else None}
            )
            if decodes:
                data, of_block, scale[e] = self._step_quantize(
                    of_one, slot, x[first:end], d is ROWWISE, d is COLUMNWISE
                )[d]
                if d is COLUMNWISE:
                    data, of_block = layout.repack(data, 4, len(data), x.shape[1]), of_block.t()
                at = (
                    slice(start // 2, start // 2 + data.shape[1])
                    if d is COLUMNWISE
                    else slice(None)
                )
                lines = slice(None) if d is COLUMNWISE else slice(first, end)
                codes[lines, at] = data
                blocks[lines, start // 16 * (d is COLUMNWISE) :][:, : of_block.shape[1]] = of_block
                continue
            data, of_group = self._step_quantize(
                of_one, slot, x[first:end], d is ROWWISE, d is COLUMNWISE
            )[d][:2]
            (
                codes[:, start : start + data.shape[1]] if d is COLUMNWISE else codes[first:end]
            ).copy_(data)
            scale = (
                of_group.new_full((groups, of_group.numel()), torch.nan) if scale is None else scale
            )
            scale[e] = of_group.flatten()
        return (
            [codes, blocks.flatten() if d is COLUMNWISE else blocks, scale]
            if decodes
            else [codes, scale.flatten()]
        )

    def linear_weight(
        self, weight, plan, row, col, round_to_bf16, factors, histories, amaxes: dict | None = None
    ):
        if weight.dim() == 3:
            refuse(weight.stride(2) != 1, f"weight has strides {weight.stride()}")
            n, operand_specs = len(weight), self.plans[plan].slots[1]
            four = [
                self._is_four_bit(operand_specs[0]),
                self._is_four_bit(operand_specs[0] if operand_specs[1].same else operand_specs[1]),
            ]
            if (row and four[0]) or (col and four[1]):
                refuse(
                    weight.dtype is not torch.bfloat16 or not weight.is_contiguous(),
                    f"weight is {weight.dtype}",
                )
                args = round_to_bf16, factors, histories
                rest = [[], []]
                for d, wanted in enumerate((row, col)):
                    if wanted and not four[d]:
                        rest[d] = self.linear_weight(weight, plan, d == 0, d == 1, *args)
                    elif wanted:
                        reading = operand_specs[0] if operand_specs[d].same else operand_specs[d]
                        rest[d] = self._stacked_runs(weight, reading, COLUMNWISE if d else ROWWISE)
                        self.counts[plan][2 + (d and not operand_specs[d].same)] += n
                return rest[0] + rest[1]
            each = [
                self.linear_weight(w, plan, row, col, round_to_bf16, factors[e::n], histories[e::n])
                for e, w in enumerate(weight)
            ]
            return [torch.stack(list(buffers)) for buffers in zip(*each)]
        operand_specs = self.plans[plan].slots[1]
        wanted, result, recorded = self._wanted(operand_specs, row, col), [], set()
        self.calls.append(Call("linear_weight", weight.data_ptr(), *wanted))
        weight = _matrix(weight)
        for d, reading, there in zip(Direction, operand_specs, wanted):
            if not there:
                continue
            self.counts[plan][2 + (d is COLUMNWISE)] += 1
            side = unpack(reading.side, d, reading.eps)
            enc = None if reading.factor < 0 else factors[reading.factor]
            known, shared = [None] * 8, (amaxes or {}).get(d)
            known[2 + 4 * (d is COLUMNWISE)], known[4 * (d is COLUMNWISE)] = enc, shared
            compact = side if reading.run == -1 else side._replace(transposed=False)
            made = self._quantized(weight, [compact], 0, round_to_bf16, known)
            if side.encoding.fmt.block[1] is None:
                amax = made.pop() if shared is None else shared
                if (
                    enc is not None
                    and reading.factor < len(histories)
                    and reading.factor not in recorded
                ):
                    recorded.add(reading.factor)
                    self.record_amax(histories[reading.factor], amax)
            del made[self._buffers(reading._replace(run=-1), d) :]
            result += (
                made if reading.run == -1 else self._anchors_of(made, reading, d, weight.shape)
            )
        return result

    def _stacked_runs(self, weight, reading, d):
        e, _, scale_layout = unpack(reading.side, d, reading.eps)
        if scale_layout == native.OPERAND:
            made = [
                self._quantized(w, [Side(e, d is COLUMNWISE, scale_layout)], 0, False, [None] * 8)
                for w in weight
            ]
            codes, scales, _ = zip(*made)
            pad = -weight.shape[1] % 128 if d is COLUMNWISE else 0
            return [
                torch.cat(
                    [layout.pad_to(c, 1, c.shape[1] + pad) for c in codes], int(d is COLUMNWISE)
                ),
                torch.cat(scales),
            ]
        made = [
            self._quantized(w, [Side(e, False, native.COMPACT)], 0, False, [None] * 8)
            for w in weight
        ]
        codes, scales, amaxes = zip(*made)
        if d is COLUMNWISE:  # side by side, each from a multiple of 128 on
            pad = -weight.shape[1] % 128
            codes = [
                layout.pad_to(
                    layout.repack(c, 4, *weight.shape[1:]), 1, (weight.shape[1] + pad) // 2
                )
                for c in codes
            ]
            scales = [layout.pad_to(s.t(), 1, (weight.shape[1] + pad) // 16) for s in scales]
        dim = int(d is COLUMNWISE)
        return [
            torch.cat(list(codes), dim),
            torch.cat(list(scales), dim).contiguous(),
            torch.cat(amaxes),
        ]

    def _random_key(self, step, ids, slot, rows):
        seed, number, micro_batch, offset, rank = step.tolist()
        return torch.tensor(
            [seed, number, ids[slot].item(), micro_batch, rank * rows if offset < 0 else offset]
        )

    def record_amax(self, amaxes, amax):
        refuse(amax.numel() != 1, "amax is one float32")
        if amax.isfinite():
            amaxes[0] = max(amaxes[0], amax)

    # Norms and activations #

    def _rows(
        self, name: str, like: Tensor, *others: Tensor | None, contiguous: bool = False
    ) -> None:
        for t in (like, *others):
            if t is not None:
                refuse(
                    t.shape != like.shape or t.dtype is not like.dtype,
                    f"{name}: {list(t.shape)} {t.dtype}",
                )
                rows = t.view(-1, t.shape[-1])
                aligned = (
                    rows.stride(1) == 1
                    and rows.stride(0) * t.element_size() % 16 == 0
                    and t.data_ptr() % 16 == 0
                )
                refuse(
                    not aligned or (contiguous and not t.is_contiguous()),
                    f"{name}: strides {t.stride()}",
                )
        refuse(
            like.dim() == 0 or like.numel() == 0 or like.shape[-1] % 8,
            f"{name} has shape {list(like.shape)}",
        )
        self.calls.append(Call(name, like.data_ptr()))

    def activation(self, g, u, kind):
        self._rows("activation", g, u)
        h = norm.reference_activation(g, u, kind)
        return h, _amaxes(h)[None]

    def activation_backward(self, dh, g, u, kind):
        self._rows("activation_backward", g, u, dh)
        dg, du = norm.reference_activation_backward(dh, g, u, kind)
        return (
            dg,
            dg.new_empty(0) if du is None else du,
            torch.stack([_amaxes(t) for t in (dg, du) if t is not None]),
        )

    def activate(self, g, u, kind, grad_amaxes, deferred, packed):
        refuse(packed and u is not None, "packed, and u")
        return _Activate.apply(g, u, kind, grad_amaxes, deferred, packed, self)

    def norm(self, x, weight, bias, *spec):
        self._rows("norm", x, contiguous=True)
        y, rstd, mean = norm.reference_norm(x, weight, bias, norm.NormSpec(*spec))
        return y, y.abs().amax().float().view(1), rstd, mean

    def norm_backward(
        self, dy, x, weight, residual, rstd, mean, zero_centered, rounds_first, has_bias
    ):
        self._rows("norm_backward", x, dy, residual, contiguous=True)
        # rstd has eps in it
        spec = norm.NormSpec(0.0, bool(mean.numel()), zero_centered, rounds_first)
        bias = weight if has_bias else None
        dx, dweight, dbias = norm.reference_norm_backward(
            dy, x, weight, bias, residual, rstd, mean, spec
        )
        return (
            dx,
            dx.abs().amax().float().view(1),
            dweight,
            dweight.new_empty(0) if dbias is None else dbias,
        )

    # Tokens of experts #

    def _copies(self, name: str, values: Tensor, rows: int, back: Tensor, *weights) -> None:
        refuse(back.dim() != 2 or back.dtype is not torch.int64, f"{name}: back {list(back.shape)}")
        refuse(len(values) != rows, f"{name}: {list(values.shape)} of {list(back.shape)}")
        given = [t for t in (values, back, *weights) if t is not None]
        refuse(not all(t.is_contiguous() for t in given), f"{name}: not contiguous")
        refuse(values.dtype is not torch.bfloat16 or values.shape[1] % 8, f"{name}: {values.dtype}")
        kinds = torch.bfloat16, torch.float32
        refuse(any(w is not None and w.dtype not in kinds for w in weights), f"{name}: weights")
        self.calls.append(Call(name, values.data_ptr()))

    def combine(self, rows, back, weights):
        self._copies("combine", rows, back.numel(), back, weights)
        return routing.reference_combine(rows, back, weights)

    def combine_backward(self, dout, rows, back, weights):
        self._copies("combine_backward", dout, len(back), back, weights)
        drows, dweights = routing.reference_combine_backward(dout, rows, back, weights)
        return drows, dout.new_empty(0) if dweights is None else dweights

    def pack_rows(self, buffers, index):
        self.calls.append(Call("pack_rows", buffers[0].data_ptr()))
        refuse(not 1 <= len(buffers) <= 4, f"got {len(buffers)} buffers")
        refuse(any(len(b) != len(buffers[0]) for b in buffers), "rows")
        packed = torch.cat([layout.rows_of_bytes(b) for b in buffers], 1)
        return packed if index is None else packed[self._rows_index(index)]

    @staticmethod
    def _rows_index(index):
        refuse(index.dtype is not torch.int64 or not index.is_contiguous(), "index is")
        assert index.numel() == 0 or index.min() >= 0, "a kernel reads before the rows"
        return index.flatten()

    def unpack_rows(self, packed, index, like):
        self.calls.append(Call("unpack_rows", packed.data_ptr()))
        widths = [layout.row_bytes(b) for b in like]
        refuse(packed.dtype is not torch.uint8 or not packed.is_contiguous(), "packed")
        refuse(packed.shape[1:] != (sum(widths),), f"packed rows are {list(packed.shape)}")
        packed = packed if index is None else packed[self._rows_index(index)]
        parts = packed.split(widths, 1)
        shapes = [(len(parts[0]), *b.shape[1:]) for b in like]
        parts = [p.clone(memory_format=torch.contiguous_format) for p in parts]
        return [p.view(b.dtype).view(s) for p, b, s in zip(parts, like, shapes)]

    def piece_orders(self, ends, shifts, rows):
        self.calls.append(Call("piece_orders", ends.data_ptr()))
        for given in (ends, shifts):
            refuse(given.dtype is not torch.int64 or given.shape != ends.shape, "ends")
        order, inverse = torch.empty(2, rows, dtype=torch.int64)
        start = 0
        for end, shift in zip(ends.tolist(), shifts.tolist()):
            order[start:end] = torch.arange(start, end) + shift
            start = end
        inverse[order] = torch.arange(rows)
        return order, inverse

    def linear_step(
        self,
        x,
        edge,
        bias,
        values,
        rowwise,
        columnwise,
        plan,
        round_to_bf16,
        save,
        step,
        ids,
        guard,
        factors,
        grad_factors,
        weight_factors,
        histories,
        grad_histories,
        weight_histories,
        codes,
        amaxes,
        grad_amaxes,
        group,
        column,
        cut,
        sums,
        spans_weight,
        pieces,
        reader,
        main_grad,
        placeholder,
    ):
        """Checked as csrc/step/linear.cpp does; the node of autograd is a Python one."""
        call = SimpleNamespace(
            ranks=_Ranks(
                *(group, column, cut, sums, spans_weight, pieces, reader),
                math.prod(x.shape[: max(cut, 0)]),
            ),
            main_grad=main_grad,
            placeholder=placeholder,
            number=plan,
            save=save,
            step=step,
            ids=ids,
            guard=guard,
            factors=(factors, grad_factors),
            histories=(histories, grad_histories),
            columnwise=list(columnwise),
            grad_amaxes=grad_amaxes,
            **vars(self.plans[plan]),
        )
        refuse(x.dtype is not torch.bfloat16, f"x is {x.dtype}")
        weight = values, rowwise, round_to_bf16, weight_factors, weight_histories
        self._check_amaxes(x, amaxes)
        if not torch.is_grad_enabled():
            with torch.no_grad():
                return self._step_forward(call, x, bias, weight, False, codes)[0]
        made: list = []
        y = _Step.apply(x, edge, bias, self, call, weight, codes, made)
        return [y, *made]

    def _check_amaxes(self, x, amaxes):
        """Amaxes that came with a tensor are its own."""
        if amaxes is not None:
            whole = x.detach().reshape(-1, x.shape[-1])
            own = whole.abs().amax().float().view(1) if amaxes.numel() == 1 else _amaxes(whole)
            refuse(
                x.numel() > 0
                and x.untyped_storage().nbytes() >= x.nbytes
                and not torch.equal(_bits(amaxes), _bits(own)),
                "amaxes",
            )
            self.calls.append(Call("amaxes", x.data_ptr()))

    def _take_weight(self, call, weight, dgrad: bool) -> list[Tensor]:
        values, rowwise, round_to_bf16, factors, histories = weight
        if values is None:
            return list(rowwise)
        one, other = call.slots[1]
        amaxes = self._shared_amaxes(call, 1, _matrix(values), True, True, round_to_bf16)
        made = self.linear_weight(
            values, call.number, True, dgrad, round_to_bf16, factors, histories, amaxes
        )
        fields = 0 if not one.side else self._buffers(one, ROWWISE)
        row = made[:fields] if one.side else [values]
        if dgrad:
            call.columnwise = [values] if not other.side else row if other.same else made[fields:]
        return row

    def linear_gated(self, gate, up, activation, plan, save, step, ids, guard, factors, histories):
        call = SimpleNamespace(
            number=plan,
            step=step,
            ids=ids,
            guard=guard,
            factors=(factors, []),
            histories=(histories, []),
            **vars(self.plans[plan]),
        )
        refuse(gate.shape != up.shape or gate.dtype is not up.dtype, "up is like gate")
        refuse(
            not call.slots[0][0].side or (save and call.saves_input),
            "the layer multiplies or keeps the input itself",
        )
        with torch.no_grad():
            made = self._step_quantize(
                call, 0, _matrix(norm.reference_activation(gate, up, activation)), True, save
            )
        self.calls.append(
            Call("linear_gated", gate.data_ptr(), *self._wanted(call.slots[0], True, save))
        )
        return [t for buffers in made.values() for t in buffers]

    def _wanted(self, operand_specs, row: bool, col: bool) -> tuple[bool, bool]:
        one, other = operand_specs
        return (
            bool(one.side) and (row or (col and other.same)),
            bool(other.side) and col and not other.same,
        )

    def _shared_amaxes(
        self, call, slot: int, x: Tensor, row: bool, col: bool, round_to_bf16: bool = False
    ) -> dict[Direction, Tensor]:
        """Amaxes that scale x, of all ranks."""
        needs = [row, col]
        if _share_codes(call.slots[slot]):
            needs = [row or col, False]
        shared = {}
        for d, reading, needed in zip(Direction, call.slots[slot], needs):
            side = unpack(reading.side, d) if needed else None
            if side is not None and call.ranks.spans(slot, side.encoding):
                values = reference.prepared(_seen(x, round_to_bf16), side.encoding)
                shared[d], _ = reference.statistics(values, side.encoding, 0)
        if not shared:
            return {}
        self.counts[call.number][13 + (slot == 1)] += 1
        everything = torch.cat([amax.reshape(-1) for amax in shared.values()])
        dist.all_reduce(everything.view(torch.int32), dist.ReduceOp.MAX, call.ranks.process_group)
        pieces = everything.split([amax.numel() for amax in shared.values()])
        shared = {d: p.view(amax.shape) for (d, amax), p in zip(shared.items(), pieces)}
        if _share_codes(call.slots[slot]):
            shared[COLUMNWISE] = shared[ROWWISE]
        return shared

    def _step_quantize(
        self, call, slot: int, x: Tensor, row: bool, col: bool, amaxes: dict | None = None
    ) -> dict[Direction, list[Tensor]]:
        operand_specs, made, recorded = call.slots[slot], {}, set()
        group = slot // 2  # of the input, of the gradient
        for d, reading, wanted in zip(
            Direction, operand_specs, self._wanted(operand_specs, row, col)
        ):
            if not wanted:
                continue
            self.counts[call.number][2 * slot + (d is COLUMNWISE)] += 1
            sides = (reading.side, 0) if d is ROWWISE else (0, reading.side)
            side = unpack(reading.side, d, reading.eps)
            fmt = side.encoding.fmt
            of_codes = reading.run != -1 and (
                reading.run < 0 or side.encoding.stochastic or fmt.bits < 8 or fmt.block[0] != 1
            )
            if reading.run != -1 and not of_codes:
                runs = (reading.run, 0) if d is ROWWISE else (0, reading.run)
                made[d] = self.quantize_anchored(x, *sides, *runs, None, None, False)
                self.calls.pop()
                continue
            enc = None if reading.factor < 0 else call.factors[group][reading.factor]
            side = side._replace(transposed=False) if of_codes else side
            key = (
                self.random_key(call.step, call.ids, slot, x.shape[0])
                if side.encoding.stochastic
                else None
            )
            known = [None] * 8
            known[2 + 4 * (d is COLUMNWISE)], known[3 + 4 * (d is COLUMNWISE)] = enc, key
            known[4 * (d is COLUMNWISE)] = shared = (amaxes or {}).get(d)
            made[d] = self._quantized(x, [side], 0, False, known)
            # the tensor amax is in the scale of an operand
            del made[d][2 + (side.layout != native.OPERAND) :]
            if side.encoding.fmt.block[1] is None:
                amax = made[d].pop() if shared is None else shared
                if (
                    enc is not None
                    and reading.factor < len(call.histories[group])
                    and reading.factor not in recorded
                ):
                    recorded.add(reading.factor)
                    self.record_amax(call.histories[group][reading.factor], amax)
            if of_codes:
                made[d] = self._anchors_of(made[d], reading, d, x.shape)
                self.calls.pop()
        return made

    def _step_rows(self, call, slot: int, x: Tensor, row: bool, col: bool, amaxes: dict) -> dict:
        """Compact codes of this rank's rows, as they travel: one set, where it serves both."""
        made, needs = {}, [row, col]
        if _share_codes(call.slots[slot]):
            needs = [row or col, False]
        for d, reading, needed in zip(Direction, call.slots[slot], needs):
            if not (needed and reading.side):
                continue
            refuse(
                reading.run == -1 and unpack(reading.side, d).layout != native.HOPPER,
                "ranks exchange codes of blocks of lines, or of tensors",
            )
            self.counts[call.number][2 * slot + (d is COLUMNWISE)] += 1
            side = unpack(reading.side, d, reading.eps)
            side, known = side._replace(transposed=False, layout=native.COMPACT), [None] * 8
            known[4 * (d is COLUMNWISE)] = amaxes.get(d)
            if reading.factor >= 0:
                known[4 * (d is COLUMNWISE) + 2] = call.factors[slot // 2][reading.factor]
                for history in call.histories[slot // 2][reading.factor :][:1]:
                    self.record_amax(history, amaxes[d])
            made[d] = self._quantized(x, [side], 0, False, known)[:2]
        return made

    def _sent(self, call, slot: int, d: Direction, buffers: list[Tensor]) -> list[Tensor]:
        """Compact codes of all ranks' rows."""
        reading = call.slots[slot][d is COLUMNWISE]
        spans = call.ranks.spans(slot, unpack(reading.side, d).encoding)
        sent = buffers[:1] if spans else buffers  # all ranks have the scale
        whole = [call.ranks.gathered(b) for b in sent]
        self.counts[call.number][9 + slot + (d is COLUMNWISE)] += sum(b.nbytes for b in whole)
        return whole + buffers[len(sent) :]

    def _of_all_ranks(self, call, slot: int, d: Direction, whole: list[Tensor]) -> list[Tensor]:
        """The operand of all ranks' rows, of their codes."""
        reading = call.slots[slot][d is COLUMNWISE]
        if reading.run == -1:
            data, scale = whole
            if unpack(reading.side, d).encoding.fmt.scale_leaves_contraction:
                scale = scale.flatten()
            elif d is ROWWISE:
                scale = scale.t().contiguous()
            return [data if d is ROWWISE else data.t().contiguous(), scale]
        codes, size = unpack(reading.side, d).encoding.fmt.element.packing
        shape = len(whole[0]), whole[0].shape[1] // size * codes
        made = self._anchors_of(whole, reading, d, shape)
        self.calls.pop()
        return made

    def _anchors_of(self, made, reading, d, shape) -> list[Tensor]:
        """Compact codes as an operand against anchors."""
        turned, cols = (
            d is COLUMNWISE,
            unpack(reading.side, d).encoding.fmt.padded_shape(shape, d)[1],
        )
        data, scale, tensor_amax = (*made, None)[:3]
        return list(
            self.anchor_codes(
                data,
                scale,
                tensor_amax,
                reading.side,
                turned,
                turned,
                reading.run == native.OF_TENSOR,
                cols,
                0 if reading.run == native.OF_TENSOR else reading.run,
            )
        )

    def _step_operand(
        self, reading, d: Direction, buffers: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, int, Tensor | None]:
        """(data, scale, kind, factor of the product)."""
        data, scale, tensor_amax = (*buffers, None, None)[:3]
        if not reading.side:
            return (data if d is ROWWISE else data.t()), None, 0, None
        factor = (
            None if tensor_amax is None else self.tensor_decode_scale(tensor_amax, reading.side)
        )
        if reading.kind:
            return data, scale, reading.kind, factor
        side = unpack(reading.side, d)
        if side.encoding.fmt.scale_leaves_contraction:
            refuse(scale.numel() != 1, "a factor of a product is one float32")
            factor, scale = scale.flatten(), None
        codes, size = side.encoding.fmt.element.packing
        cols = data.shape[1] // size * codes
        values = self.dequantize(
            data, scale, None, reading.side, d is COLUMNWISE, cols, 0, torch.bfloat16
        )
        return (values if d is ROWWISE else values.t()), None, 0, factor

    def _step_product(self, call, product: int, a, b, bias=None, out=None) -> Tensor | None:
        self.counts[call.number][6 + product] += 1
        factors = [f for f in (a[3], b[3]) if f is not None]
        if not (factors or a[2] or b[2]):
            return torch.nn.functional.linear(a[0], b[0], bias)
        alpha = None if not factors else functools.reduce(torch.mul, factors)
        self._watch(call.number, product, call.guard, call.step, a, b)
        operands = a[0], b[0], a[1], b[1], a[2], b[2]
        if out is not None:
            refuse(not (a[2] and b[2]), "only a product of codes is added to a gradient")
            self.gemm_out(out, *operands, True, None, alpha)
            self.calls.pop()
            return None
        return _product(*operands, torch.bfloat16, bias, alpha).to(torch.bfloat16)

    def _step_forward(
        self, call, x, bias, weight, dgrad, codes
    ) -> tuple[list[Tensor], list[Tensor]]:
        """([y, codes of x], what the backward keeps)."""
        rows, ranks, gathers = _matrix(x), call.ranks, call.ranks.gathers(0)
        operand_specs, col = call.slots[0], call.save and not call.saves_input
        if gathers and _share_codes(operand_specs):
            col = False
        wanted = self._wanted(operand_specs, True, col and not ranks.reader)
        if codes:
            rest, made = list(codes), {}
            for d, reading, there in zip(Direction, operand_specs, wanted):
                if there:
                    fields = self._buffers(reading, d)
                    made[d], rest = rest[:fields], rest[fields:]
        else:
            encode = self._step_rows if gathers else self._step_quantize
            call.amaxes = self._shared_amaxes(call, 0, rows, True, call.save)
            made = encode(call, 0, rows, True, col, call.amaxes)
        self.calls.append(Call("linear_step", x.data_ptr(), *(w and not codes for w in wanted)))
        of_rows = made.get(ROWWISE, [rows])
        if gathers:
            sent = self._sent(call, 0, ROWWISE, of_rows)
            of_rows = self._of_all_ranks(call, 0, ROWWISE, sent)
        a = self._step_operand(operand_specs[0], ROWWISE, of_rows)
        w = self._step_operand(call.slots[1][0], ROWWISE, self._take_weight(call, weight, dgrad))
        y = self._step_product(call, 0, a, w, bias)
        if ranks.pieces > 1:
            self.counts[call.number][6] += ranks.pieces * ranks.count - 1
        y, sizes = y if ranks.column else ranks.sum(y), list(x.shape[:-1])
        if (dim := ranks.cut) >= 0:
            sizes[dim] = sizes[dim] * ranks.count if ranks.column else sizes[dim] // ranks.count
        y = y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), (*sizes, y.shape[-1]))
        if not call.save:
            kept = []
        elif ranks.reader:
            kept = rest
        else:
            kept = [x] if call.saves_input else list(made.values())[-1]
        return [y, *(t for buffers in made.values() for t in buffers)], kept

    def _step_backward(self, call, dy, weight, saved, needs_x, needs_w):
        operand_specs, dx, dw = call.slots[2], None, None
        ranks, gathers = call.ranks, call.ranks.gathers(2)
        encode = self._step_rows if gathers else self._step_quantize
        amaxes = self._shared_amaxes(call, 2, dy, needs_x, needs_w)
        made = encode(call, 2, dy, needs_x, needs_w, amaxes)
        if gathers:
            sent = {d: self._sent(call, 2, d, buffers) for d, buffers in made.items()}
            if _share_codes(operand_specs):
                sent[COLUMNWISE] = sent[ROWWISE]
            made = {d: self._of_all_ranks(call, 2, d, whole) for d, whole in sent.items()}
        of_x, shared = call.slots[0][1], []
        if ranks.reader:
            shared = shared_input.step_exchange(ranks.reader, False, list(saved))
        elif needs_w and call.saves_input:
            rows = _matrix(saved[0])
            encode = self._step_rows if ranks.gathers(0) else self._step_quantize
            again = encode(call, 0, rows, False, True, call.amaxes)
            saved = list(again.values())[0] if again else [rows]
        if needs_w and ranks.gathers(0):
            sent = self._sent(call, 0, COLUMNWISE, list(saved))
            saved = self._of_all_ranks(call, 0, COLUMNWISE, sent)
        self.calls.append(
            Call(
                "linear_step_backward",
                dy.data_ptr(),
                *self._wanted(operand_specs, needs_x, needs_w),
            )
        )
        if needs_x:
            a = self._step_operand(operand_specs[0], ROWWISE, made.get(ROWWISE, [dy]))
            w = self._step_operand(call.slots[1][1], COLUMNWISE, weight())
            if shared:
                self._step_product(call, 1, a, w, out=shared[0])
            dx = shared[0] if shared else self._step_product(call, 1, a, w)
            dx = ranks.sum(dx) if ranks.column and not ranks.reader else dx
        if ranks.reader:
            of_layers = [] if dx is None else [dx]
            saved, dx = shared_input.step_exchange(ranks.reader, True, of_layers), None
        if needs_w:
            source = ROWWISE if operand_specs[1].same else COLUMNWISE
            a = self._step_operand(operand_specs[1], COLUMNWISE, made.get(source, [dy]))
            b = self._step_operand(of_x, COLUMNWISE, list(saved))
            dw = self._step_product(call, 2, a, b, out=call.main_grad)
        return dx, dw


class _Ranks(NamedTuple):
    """How ranks share a layer: csrc/step/plan.h, csrc/step/ranks.cpp."""

    group: str
    column: bool
    cut: int
    sums: bool
    spans_weight: bool
    pieces: int
    reader: int
    outer: int

    @property
    def process_group(self):
        return torch_compat.group_of_name(self.group)

    @property
    def count(self) -> int:
        return self.process_group.size() if self.group else 1

    def spans(self, slot: int, encoding: Encoding) -> bool:
        """A scale follows from values of all ranks."""
        fmt, gathers = encoding.fmt, self.gathers(slot)
        if not self.group or not fmt.scale_leaves_contraction:
            return False
        if slot == 1:
            return self.spans_weight and fmt.block[0] is None
        if gathers and encoding.direction is COLUMNWISE:
            return True
        return fmt.block[0] is None and (gathers or slot == (2 if self.column else 0))

    def gathers(self, slot: int) -> bool:
        return self.cut >= 0 and not self.reader and slot == (0 if self.column else 2)

    def gathered(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.count * len(rows), *rows.shape[1:])
        sent = rows.contiguous().view(-1).view(torch.uint8)
        torch_compat.all_gather(whole.view(-1).view(torch.uint8), sent, self.process_group)
        whole = whole.view(self.count, self.outer, -1, *rows.shape[1:])
        return whole.transpose(0, 1).reshape(-1, *rows.shape[1:])

    def sum(self, y: Tensor) -> Tensor:
        """Over ranks: this rank's rows of it, if cut."""
        if not self.group or not (self.cut >= 0 or self.sums):
            return y
        if self.cut < 0:
            dist.all_reduce(y, group=self.process_group)
            return y
        y = y.view(self.outer, self.count, -1, y.shape[1]).transpose(0, 1)
        pieces = y.reshape(self.count, self.pieces, -1, y.shape[-1]).transpose(0, 1).contiguous()
        rows = y.new_empty(y.shape[1] * y.shape[2], y.shape[3])
        for piece, out in zip(pieces, rows.view(self.pieces, -1, y.shape[3])):
            torch_compat.reduce_scatter_rows(out, piece.flatten(0, 1), self.process_group).wait()
        return rows


def _share_codes(operand_specs) -> bool:
    """The rowwise codes are those of both directions, a transpose apart."""
    row, col = operand_specs
    if not (row.side and col.side) or (row.eps, row.factor) != (col.eps, col.factor):
        return False
    one, other = (unpack(spec.side, ROWWISE).encoding for spec in operand_specs)
    return one == other and one.fmt.block[0] == one.fmt.block[1]


def _is_computed(node) -> bool:
    """The backward that runs wants the gradient that this node takes."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad was given
        return True


class _Step(torch.autograd.Function):
    """The node that the compiled step makes."""

    @staticmethod
    def forward(ctx, x, edge, bias, operators, call, weight, codes, made):
        (y, *codes_of_x), kept = operators._step_forward(
            call, x, bias, weight, ctx.needs_input_grad[0], codes
        )
        made.extend(codes_of_x)
        ctx.save_for_backward(*kept)
        ctx.operators, ctx.call, ctx.dtype, ctx.shape = operators, call, edge.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        needs = ctx.needs_input_grad[:3]
        if not ctx.call.ranks.group:  # else whatever the backward wants, ranks exchange the same
            nodes = [node for node, _ in ctx.next_functions]
            needs = [need and _is_computed(node) for need, node in zip(needs, nodes + [None])]
        needs_x, needs_w, needs_b = needs
        if ctx.call.grad_amaxes is not None:
            ctx.operators._check_amaxes(dy, ctx.call.grad_amaxes)
        dy = _matrix(dy)
        if needs_x and any(
            t.numel() and not t.untyped_storage().nbytes() for t in ctx.call.columnwise
        ):
            raise RuntimeError(
                "StaleWeightError: the columnwise codes of a gathered weight were freed"
            )
        dx, dw = ctx.operators._step_backward(
            ctx.call, dy, lambda: ctx.call.columnwise, ctx.saved_tensors, needs_x, needs_w
        )
        if needs_w and ctx.call.main_grad is not None:  # nothing, anything, zeros
            values = None, torch.nan, 0.0
            value = values[ctx.call.placeholder]
            dw = None if value is None else torch.full_like(ctx.call.main_grad, value)
        return (
            None if dx is None else dx.view(ctx.shape),
            None if dw is None else dw.to(ctx.dtype),
            dy.sum(0).to(ctx.bias_dtype) if needs_b else None,
            None,
            None,
            None,
            None,
            None,
        )


class _Activate(torch.autograd.Function):
    """The node of the compiled `activate`; gradients have memory of their own here."""

    @staticmethod
    def forward(ctx, g, u, kind, grad_amaxes, deferred, packed, operators):
        ctx.save_for_backward(g, u)
        ctx.kind, ctx.operators, ctx.grad_amaxes, ctx.packed = kind, operators, grad_amaxes, packed
        g, u = g.chunk(2, -1) if packed else (g, u)
        if deferred:
            return g.new_empty(()).expand(g.shape), g.new_empty(0)
        h, amaxes = operators.activation(g, u, kind)
        ctx.mark_non_differentiable(amaxes)
        return h, amaxes[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, _):
        g, u = ctx.saved_tensors[0].chunk(2, -1) if ctx.packed else ctx.saved_tensors
        dg, du, amaxes = ctx.operators.activation_backward(dh.contiguous(), g, u, ctx.kind)
        if ctx.packed:  # one tensor, and its amaxes
            dg, du = torch.cat([dg, du], -1), None
            amaxes = _amaxes(dg)[None]
        if ctx.grad_amaxes is not None:
            ctx.grad_amaxes.copy_(amaxes)
        return dg, None if u is None else du, *[None] * 5


def _operand_of_codes(
    data, scale, tensor_amax, fmt: Format, direction: Direction, cols: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    codes, made = anchoring.e4m3_operand(data, scale, tensor_amax, fmt, direction, cols)
    return (codes.t().contiguous() if transposed else codes), made


def _matrix(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _amaxes(x: Tensor) -> Tensor:
    """As `AmaxLayout` of csrc/norm/norm.h lays them out."""
    magnitudes = x.abs().float().reshape(-1, x.shape[-1])
    return torch.cat(
        [
            layout.pad_to(magnitudes.amax().view(1, 1), 1, 4).flatten(),
            layout.pad_to(magnitudes.amax(1)[None], 1, 4).flatten(),
            layout.pad_to(magnitudes, 512, 1).view(-1, 512, x.shape[-1]).amax(1).flatten(),
        ]
    )


def _bits(amaxes: Tensor) -> Tensor:
    """So that a NaN equals itself."""
    return amaxes.flatten().view(torch.int32)


def _seen(x: Tensor, round_to_bf16: bool) -> Tensor:
    return x.to(torch.bfloat16) if round_to_bf16 else x


def _present(row: int, col: int, row_eps: float = 0.0, col_eps: float = 0.0) -> list[Side]:
    return [
        s
        for s in (unpack(row, ROWWISE, row_eps), unpack(col, COLUMNWISE, col_eps))
        if s is not None
    ]


def _operand(x: Tensor, scale: Tensor | None, kind: int, name: str) -> Tensor:
    """An operand's values, fp64 [outer, K]; refuses what cuBLASLt does not read."""
    element, scaling = kind & 7, kind >> 3
    refuse(x.dim() != 2, f"{name} has shape {list(x.shape)}")
    refuse(
        (scale is None) != (scaling == _NONE),
        f"{name} has {'no' if scale is None else 'a'} scale, and its scaling is {scaling}",
    )
    (outer, k), strides = x.shape, x.stride()
    k_major = (strides[1] == 1 or k <= 1) and (strides[0] >= k or outer <= 1)
    if element == 0 and scaling == _TENSOR:  # of a product of groups
        refuse(not k_major or x.dtype is not torch.bfloat16, f"{name} has strides {strides}")
        return x.double()  # the scale multiplies the sums
    if element == 0:
        outer_major = (strides[0] == 1 or outer <= 1) and (strides[1] >= outer or k <= 1)
        refuse(x.dtype not in _HALVES, f"{name} is {x.dtype}")
        refuse(not (k_major or outer_major), f"{name} has strides {strides}")
        return x.double()
    refuse(x.dtype is not torch.uint8, f"{name} is {x.dtype}; codes are uint8")
    refuse(not k_major, f"{name} has strides {strides}; codes are K-major")
    refuse(
        k % 16 or (outer > 1 and strides[0] % 16) or x.data_ptr() % 16,
        f"{name}: rows of {k} bytes, not aligned",
    )
    if scaling in (_E8M0, _E4M3):
        refuse(
            not capability.ARCHITECTURES[_CURRENT[-1].arch].byte_scales,
            "one-byte scales are for sm_100",
            NotImplementedError,
        )
        return _of_byte_scales(x, scale, element, scaling, name)
    refuse(element == 3, "4-bit codes have one-byte scales", NotImplementedError)
    values = x.view(_ELEMENTS[element].dtype).double()
    if scaling == _NONE:
        return values
    block = 512 if scaling == _1X512 else 128
    blocks = ceil_div(k, block)
    wanted = {
        _TENSOR: 1,
        _ROW: outer,
        _1X128: blocks * round_up(outer, 4),
        _1X512: blocks * round_up(outer, 4),
        _128X128: ceil_div(outer, 128) * round_up(blocks, 4),
    }[scaling]
    refuse(
        scale.dtype is not torch.float32 or scale.numel() != wanted or not scale.is_contiguous(),
        f"{name}_scale is {scale.dtype} {list(scale.shape)}; wanted {wanted} contiguous float32",
    )
    refuse(scaling != _TENSOR and scale.data_ptr() % 16, f"{name}_scale is not aligned")
    scale = scale.double().flatten()
    if scaling == _ROW:
        scale = scale[:, None]
    elif scaling in (_1X128, _1X512):
        scale = scale.view(blocks, -1)[:, :outer].t().repeat_interleave(block, 1)[:, :k]
    elif scaling == _128X128:
        scale = scale.view(ceil_div(outer, 128), -1)[:, :blocks]
        scale = scale.repeat_interleave(128, 0)[:outer].repeat_interleave(128, 1)[:, :k]
    return values * scale


def _of_byte_scales(x: Tensor, scale: Tensor, element: int, scaling: int, name: str) -> Tensor:
    block = 32 if scaling == _E8M0 else 16
    codes = layout.unpack(x, 4) if element == 3 else x
    fmt = Format(
        "operand",
        _ELEMENTS[element],
        (1, block),
        "e8m0" if scaling == _E8M0 else "e4m3",
        tensor_scale=scaling == _E4M3,
    )
    blocks = ceil_div(codes.shape[1], block)
    wanted = round_up(len(x), 128) * round_up(blocks, 4)
    refuse(
        scale.dtype is not torch.uint8
        or scale.numel() != wanted
        or not scale.is_contiguous()
        or scale.data_ptr() % 16,
        f"{name}_scale is {scale.dtype} {list(scale.shape)}; wanted {wanted} contiguous bytes",
    )
    of_blocks = layout.unswizzle_128x4(scale.flatten(), len(x), blocks).contiguous()
    # the tensor's scale is 1
    one = torch.full((1,), fmt.element.max * 448.0) if fmt.tensor_scale else None
    return reference.decode(x, of_blocks, one, fmt, ROWWISE, codes.shape[1], 0).double()


def _is_each(scale: Tensor, kind: int, lines: int) -> bool:
    """Scales of tensors or of lines are one set a group."""
    return _TENSOR <= kind >> 3 <= _ROW and scale.numel() > (1 if kind >> 3 == _TENSOR else lines)


def _product(a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, bias, alpha) -> Tensor:
    """alpha a b^T + bias in fp32."""
    x, w = _operand(a, a_scale, a_kind, "a"), _operand(b, b_scale, b_kind, "b")
    refuse(
        x.shape[1] != w.shape[1], f"a is {list(a.shape)} and b {list(b.shape)}; wanted the same K"
    )
    elements, scalings, codes = (
        (a_kind & 7, b_kind & 7),
        tuple(sorted((a_kind >> 3, b_kind >> 3))),
        bool(a_kind & 7),
    )
    least, most = scalings
    if codes and 3 in elements:
        taken = elements == (3, 3) and scalings == (_E4M3, _E4M3)
    elif codes:
        row = capability.ARCHITECTURES[_CURRENT[-1].arch]
        refuse(
            most <= _ROW and not row.fp32_pairs,
            f"{row.name} multiplies no codes",
            NotImplementedError,
        )
        refuse(
            most in (_1X128, _128X128, _1X512) and frozenset({(1, 128)}) not in row.fp32_pairs,
            f"fp32 scales of blocks on {row.name}",
            NotImplementedError,
        )
        taken = (
            all(elements)
            and elements != (2, 2)
            and (
                most <= _TENSOR
                or (least >= _TENSOR and most == _ROW)
                or (least == _1X128 and most <= _128X128)
                or (least == most and most in (_E8M0, _1X512))
            )
        )
    if codes:
        refuse(b.shape[0] % 16, f"b has {b.shape[0]} rows (N); codes take multiples of 16")
        refuse(
            _1X128 <= most <= _128X128 and a.shape[0] % 4,
            f"a has {a.shape[0]} rows (M); 1x128 scales take multiples of 4",
        )
        refuse(
            most == _1X512 and out_dtype is torch.float16,
            "1x512 scales: out is float16",
            NotImplementedError,
        )
    else:
        taken = elements == (0, 0) and a.dtype is b.dtype and out_dtype in (a.dtype, torch.float32)
    refuse(
        not taken, f"cuBLASLt does not multiply kinds {a_kind} and {b_kind}", NotImplementedError
    )
    y = x @ w.t()
    if alpha is not None:
        refuse(alpha.dtype is not torch.float32 or alpha.numel() != 1, "alpha is one float32")
        y = y * alpha.double()
    if bias is not None:
        refused = bias.dtype is not out_dtype or (codes and out_dtype is torch.float32)
        refuse(refused, f"bias is {bias.dtype}, of a {out_dtype} product", NotImplementedError)
        refuse(bias.numel() != b.shape[0] or bias.data_ptr() % 16, "bias: length or alignment")
        y = y + bias.double()
    return y.float()


def sums_in_units(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """The kernel's product of operands with scales of 1x512 (csrc/gemm/sm90_gemm_kernel.cuh), in
    its order of fp32 operations.

    a, b:              [M, K], [N, K], the codes' values.
    a_scale, b_scale:  fp32 [ceil(K / 512), M], [ceil(K / 512), N]: powers of two, 0 or NaN.
    returns:           fp32 [M, N]. Partial sums of 128 of K are exact here.
    """
    unit, largest = torch.zeros_like(b_scale[0]), torch.zeros_like(b_scale[0])
    total = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for run, (row, scale) in enumerate(zip(a_scale, b_scale)):
        there = scale > 0
        largest = torch.where(there, torch.maximum(largest, scale), largest)
        far = there & (scale < largest * 2.0**-32)
        near = there & ~far
        factor = torch.where(
            near & (unit > 0), unit / scale, torch.where(scale.isnan(), scale, 1.0)
        )
        of_part = torch.where(far, scale / unit, 1.0)
        unit = torch.where(near, scale, unit)
        total *= factor
        for k in range(512 * run, min(512 * run + 512, a.shape[1]), 128):
            part = (a[:, k : k + 128].double() @ b[:, k : k + 128].double().t()).float() * of_part
            # fma: the product is exact in fp64
            total = (row.double()[:, None] * part.double() + total.double()).float()
    return total * unit


def operator_schemas() -> dict[str, str]:
    """The operators as csrc declares them, by name."""
    text = "".join(
        path.read_text() for path in sorted((Path(__file__).parents[2] / "csrc").glob("*/*.cpp"))
    )
    declared = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)', text)
    schemas = ("".join(re.findall(r'"([^"]*)"', of)) for of in declared)
    return {schema.split("(")[0]: schema for schema in schemas}


_CURRENT = [Operators()]  # the last is in use
_library = torch.library.Library("fsdp_quant_emulated", "DEF")


@functools.cache
def _registered(name: str) -> Callable:
    """An operator of the emulation that torch knows, with the schema of csrc: what graphs hold."""
    schema = operator_schemas()[name]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    packet, _, overload = name.partition(".")
    arguments = torch._C.parse_schema(f"fsdp_quant_emulated::{schema}").arguments

    def run(*args, **kwargs):
        # torch leaves out what equals a default
        rest = [None for a in arguments[len(args) :] if a.default_value is None]
        return _run(packet, overload)(*args, *rest, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_quant_emulated::{name}", native.FAKES[name], lib=_library)
    if name in native.FLOPS:
        register_flop_formula(getattr(torch.ops.fsdp_quant_emulated, name))(native.FLOPS[name])
    operator = getattr(getattr(torch.ops.fsdp_quant_emulated, packet), overload or "default")
    if name == "product_error":
        SAC_IGNORED_OPS.add(operator)
    return operator


def _run(packet: str, overload: str) -> Callable:
    found = getattr(_CURRENT[-1], packet)
    return getattr(found, overload or "default") if isinstance(found, SimpleNamespace) else found


class Traced:
    """The operators as `torch.ops` calls them: those of a graph that is traced are recorded in
    it."""

    def __init__(self, operators: Operators):
        self._operators = operators

    def __getattr__(self, name: str) -> object:
        found = getattr(self._operators, name)
        if isinstance(found, SimpleNamespace):  # overloads
            packets = {
                k: self._traceable(name if k == "default" else f"{name}.{k}", f)
                for k, f in vars(found).items()
            }
            return Overloads(**packets)
        return self._traceable(name, found)

    @staticmethod
    def _traceable(name: str, run: Callable) -> Callable:
        recorded = name in native.FAKES
        return lambda *args, **kwargs: (
            _registered(name) if recorded and opaque.is_tracing() else run
        )(*args, **kwargs)


class Seen(Traced):
    """The operators as `torch.ops` calls them outside graphs too, where dispatch modes see them."""

    @staticmethod
    def _traceable(name: str, run: Callable) -> Callable:
        return _registered(name) if name in native.FAKES else run


class Arrived:
    """A CUDA event that has happened."""

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True


def native_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(native.__name__)]


def give_operators(patch: pytest.MonkeyPatch, operators: object) -> None:
    """Let all of `native` call these."""
    for module in native_modules():
        if "_ops" in vars(module):
            patch.setattr(module, "_ops", operators)


def replace_in_native(patch: pytest.MonkeyPatch, replaced: dict[int, object]) -> None:
    """Let all of `native` use these values for those of the ids, and begin with empty caches, which
    hold integers of other operators."""
    modules = native_modules()
    cached = {id(v): v for m in modules for v in vars(m).values() if hasattr(v, "cache_clear")}
    replaced = replaced | {i: functools.cache(v.__wrapped__) for i, v in cached.items()}
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                patch.setattr(module, name, replaced[id(value)])


@contextlib.contextmanager
def replaced_operators(operators: object) -> Iterator[None]:
    """`native` calls these inside."""
    with pytest.MonkeyPatch.context() as patch:
        replace_in_native(patch, {})
        give_operators(patch, operators)
        yield


@contextlib.contextmanager
def emulated(arch: str = ARCH) -> Iterator[Operators]:
    """CPU tensors as if on a GPU of this architecture. Plans made inside stay inside; modules made
    inside must not leave."""
    operators = Operators(arch)
    facts = {
        "arch_of": lambda device: arch,
        "gemm_domain": functools.partial(capability.gemm_domain, compiled=True),
    }
    originals = {name: getattr(capability, name) for name in facts}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "fsdp_quant":
                for fact, value in facts.items():
                    if vars(module).get(fact) is originals[fact]:
                        patch.setattr(module, fact, value)
        replaced = {
            id(native.is_available_for): lambda x: True,
            id(native.is_available_on): lambda device: True,
        }
        replace_in_native(patch, replaced)
        give_operators(patch, Traced(operators))
        patch.setattr(plan, "_PLANS", {})  # plans keep what they resolved for (dtype, device)
        patch.setattr(base, "_plan_of_key", functools.cache(base._plan_of_key.__wrapped__))
        patch.setattr(plan, "_CALLS", {})
        patch.setattr(guard, "_GUARDED", weakref.WeakSet())
        patch.setattr(guard, "_UNDERWAY", [])
        patch.setattr(torch.cuda, "Event", Arrived)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        _CURRENT.append(operators)
        yield operators
        _CURRENT.pop()

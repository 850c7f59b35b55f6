# SPDX-License-Identifier: Apache-2.0
"""Gradients of many parameters as one buffer of codes, a piece per owner, and back: their sum.

No process group is used here: `training.gradient_reduction` sends the buffers.

    keys   = gradient_keys(step, idents, counted)           # of stochastic rounding
    buffer = encode_gradients(grads, layout, keys)          # uint8 [owners, layout.nbytes]
    ...                                                     # piece w of the buffer goes to owner w
    decode_gradients(received, layout, out, factor)         # uint8 [senders, layout.nbytes] -> out

[Note: layout of a gradient buffer]
W owners share each gradient [d0, ..] as FSDP2 shards dim 0: with c = ceil(d0 / W) and
n = c * d1 * d2 .., the *piece* of owner w is elements [w * n, (w + 1) * n) of the contiguous
gradient, zero where they do not exist. A piece is a run of elements of its own: it is viewed as
r = ceil(n / row) rows of `row` elements, zero-padded behind, and blocks never leave a row. So the
bits of a gradient depend on its shape and on W, and not on the other gradients of the buffer.

    format      row     codes of a row      scales of a row             amax of a row
    bf16        8       16 B, bf16          -                           -
    fp8_1x128   128     128 B, e4m3         1 fp32 (4 B), power of 2    -
    mxfp8       128     128 B, e4m3         4 e8m0 (4 B), one per 32    -
    nvfp4       1024    512 B, e2m1         64 e4m3 (64 B), one per 16  1 fp32 (4 B)

The pieces of owner w of all gradients, in their order, are one matrix of R = sum of r rows. Owner
w's part of the buffer is, from byte 0 (sizes as in the table, row-major, little-endian),

    0              codes   [R, row bytes]
    scale_offset   scales  [R, scales of a row]         R * row bytes, which is a multiple of 16
    amax_offset    amaxes  [R] fp32                     after the scales, rounded up to 16
    nbytes         the end, rounded up to 16; bytes between the sections mean nothing

Codes and scales are those of `ops.reference` for the rowwise storage of that matrix (`nvfp4`: with
scale_per="row", whose second-level amax is stored as it is, not as a scale). e2m1 codes of elements
2i and 2i + 1 are the low and high half of byte i.

[Note: random bits of a gradient]
Codes are rounded stochastically (`Encoding.stochastic`), "bf16" to nearest even. Row i of owner w
is row w * r + i of its parameter's random bits (`rng.random_bytes`, rowwise, [W * r, row]) with
the key of the parameter. Keys are made of the step, of an id (of the name of the parameter and of
the rank that sends, in the mesh of shards and copies), and of how often its group was reduced since
this step began: `gradient_keys`.

[Note: sum of gradients]
Element j of a piece is fl(fl(.. fl(fl(x_0 + x_1) + x_2) .. + x_{W-1}) * factor) in fp32, x_i its
value that sender i decodes to and factor rounded to fp32, then rounded once to the dtype of `out`.
The product is left out if factor is 1. Pieces follow each other in `out` without padding: piece p
begins at the sum of n of the pieces before it, as FSDP2 reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import IDENTITY, ROWWISE, Encoding, Format, ceil_div, format_of, round_up
from . import dispatch, native

# Format of the codes, and elements of a row, by the name of a reduction.
_FORMATS: dict[str, tuple[Format, int]] = {
    "bf16": (IDENTITY, 8),
    "fp8_1x128": (format_of("fp8_1x128"), 128),
    "mxfp8": (format_of("mxfp8"), 128),
    "nvfp4": (format_of("nvfp4", scale_per="row"), 1024),
}
GRADIENT_FORMATS = tuple(_FORMATS)
_ALIGNMENT = 16


class Sections(NamedTuple):
    """Views of a buffer [pieces, nbytes], as the reference's storages.

    codes:  uint8 [pieces, R, row bytes]; "bf16": bf16 [pieces, R, row].
    scale:  fp32 or uint8 [pieces, R, scales of a row], None without scales.
    amax:   fp32 [pieces, R], None without a second level.
    """

    codes: Tensor
    scale: Tensor | None
    amax: Tensor | None


@dataclass(frozen=True)
class GradientLayout:
    """Where the codes of gradients lie in a buffer (see the note above); hashable.

    shapes:  of the gradients, each of one dim or more.
    world:   owners.
    name:    of `GRADIENT_FORMATS`.
    """

    shapes: tuple[tuple[int, ...], ...]
    world: int
    name: str

    @property
    def fmt(self) -> Format:
        return _FORMATS[self.name][0]

    @property
    def row(self) -> int:
        """Elements of a row."""
        return _FORMATS[self.name][1]

    @cached_property
    def encoding(self) -> Encoding:
        return Encoding(self.fmt, ROWWISE, stochastic=self.is_stochastic)

    @property
    def is_stochastic(self) -> bool:
        """Random keys are needed."""
        return self.fmt.is_quantized

    @cached_property
    def numels(self) -> list[int]:
        """Elements of a piece of each gradient, padding of dim 0 included."""
        return [ceil_div(s[0], self.world) * math.prod(s[1:]) for s in self.shapes]

    @cached_property
    def row_counts(self) -> list[int]:
        """Rows of a piece of each gradient."""
        return [ceil_div(n, self.row) for n in self.numels]

    @cached_property
    def rows(self) -> int:
        """R: rows of an owner's matrix."""
        return sum(self.row_counts)

    @property
    def row_bytes(self) -> int:
        return self.fmt.row_bytes(self.row, torch.bfloat16)

    @property
    def scales_of_row(self) -> int:
        shape = self.fmt.scale_shape((1, self.row), ROWWISE)
        return 0 if shape is None else shape[1]

    @cached_property
    def scale_offset(self) -> int:
        return round_up(self.rows * self.row_bytes, _ALIGNMENT)

    @cached_property
    def amax_offset(self) -> int:
        size = self.rows * self.scales_of_row * self.fmt.scale_bytes
        return round_up(self.scale_offset + size, _ALIGNMENT)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one owner."""
        amaxes = 4 * self.rows if self.fmt.is_two_level else 0
        return round_up(self.amax_offset + amaxes, _ALIGNMENT)

    def sections(self, buffer: Tensor) -> Sections:
        """The buffer uint8 [pieces, nbytes] as codes and scales."""
        pieces, rows = len(buffer), self.rows
        codes = buffer[:, : rows * self.row_bytes].view(pieces, rows, self.row_bytes)
        scale = amax = None
        if not self.fmt.is_quantized:
            codes = codes.view(torch.bfloat16)
        if self.fmt.has_scales:
            size = rows * self.scales_of_row * self.fmt.scale_bytes
            scale = buffer[:, self.scale_offset : self.scale_offset + size]
            scale = scale.view(self.fmt.scale_dtype).view(pieces, rows, self.scales_of_row)
        if self.fmt.is_two_level:
            amax = buffer[:, self.amax_offset : self.amax_offset + 4 * rows].view(torch.float32)
        return Sections(codes, scale, amax)


def gradient_keys(step: Tensor, idents: Tensor, counted: Tensor) -> Tensor:
    """Count a reduction, and return its random keys, int64 [parameters, 5] (`rng.KEY_FIELDS`).

    step:     int64 [5] (`context.STEP_FIELDS`): seed, step and micro-batch are read.
    idents:   int64 [parameters]: `rng.tensor_id` of parameter and sender.
    counted:  int64 [4], written: seed, step and micro-batch of the last reduction, and how many
              came before it with the same three.

    All that changes is on the device, so that a captured step rounds differently at each replay.
    """
    if native.is_available_for(step):
        return native.gradient_keys(step, idents, counted)
    return reference_keys(step, idents, counted)


def reference_keys(step: Tensor, idents: Tensor, counted: Tensor) -> Tensor:
    """Define `gradient_keys`."""
    now = step[:3]
    count = torch.where((counted[:3] == now).all(), counted[3:] + 1, 0)
    counted.copy_(torch.cat((now, count)))
    seed, number, micro_batch = now.unbind()
    shared = torch.stack((seed, number, micro_batch + (count[0] << 16)))
    seeds, numbers, micro_batches = shared[:, None].expand(3, len(idents))
    return torch.stack((seeds, numbers, idents, micro_batches, torch.zeros_like(idents)), 1)


def _rows_of(grad: Tensor, layout: GradientLayout, numel: int) -> Tensor:
    """The pieces of a gradient as rows, [W * r, row]; numel: of one piece."""
    flat = grad.reshape(-1)
    pieces = F.pad(flat, (0, layout.world * numel - flat.numel())).view(layout.world, numel)
    return F.pad(pieces, (0, -numel % layout.row)).view(-1, layout.row)


def encode_gradients(
    grads: Sequence[Tensor],
    layout: GradientLayout,
    keys: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The pieces of all owners: uint8 [world, nbytes].

    grads:  of `layout.shapes`, one floating dtype and device.
    keys:   int64 [len(grads), 5] (`gradient_keys`), if `layout.is_stochastic`.
    out:    a buffer to write, contiguous.

    A block (`nvfp4`: a row) with a NaN or an infinity decodes to NaN, of `mxfp8` to an infinity.
    """
    size, like = (layout.world, layout.nbytes), grads[0]
    if native.is_available_for(like) and like.dtype in native.FLOATING:
        out = like.new_empty(size, dtype=torch.uint8) if out is None else out
        native.encode_gradients(grads, layout.encoding, keys, out)
    else:
        out = like.new_zeros(size, dtype=torch.uint8) if out is None else out
        reference_encode(grads, layout, keys, out)
    return out


def reference_encode(
    grads: Sequence[Tensor], layout: GradientLayout, keys: Tensor | None, out: Tensor
) -> None:
    """Define `encode_gradients`."""
    sections, start = layout.sections(out), 0
    dtype = None if layout.fmt.is_quantized else torch.bfloat16
    for i, (grad, numel, rows) in enumerate(zip(grads, layout.numels, layout.row_counts)):
        if rows:
            values = _rows_of(grad.detach(), layout, numel)
            key = [None if keys is None else keys[i]]
            (encoded,) = dispatch.encode(values, [layout.encoding], None, keys=key, dtype=dtype)
            for section, part in zip(sections, encoded[:3]):
                if section is not None and part is not None:
                    target = section[:, start : start + rows]
                    target.copy_(part.view(target.shape))
        start += rows


def decode_gradients(
    buffer: Tensor, layout: GradientLayout, out: Tensor, factor: float = 1.0
) -> None:
    """Write the sum of the pieces that `world` senders encoded for this owner, in their order.

    buffer:  uint8 [world, nbytes].
    out:     [sum of layout.numels], contiguous; its dtype is that of the result.
    factor:  multiplies the fp32 sum.
    """
    if native.is_available_for(buffer) and out.dtype in native.FLOATING:
        native.decode_gradients(buffer, layout.numels, layout.encoding, factor, out)
    else:
        reference_decode(buffer, layout, out, factor)


def reference_decode(buffer: Tensor, layout: GradientLayout, out: Tensor, factor: float) -> None:
    """Define `decode_gradients`."""
    codes, scale, amax = layout.sections(buffer)

    def piece(sender: int) -> Tensor:
        """fp32 [rows, row]."""
        scales, amaxes = (None if part is None else part[sender] for part in (scale, amax))
        return dispatch.decode(
            codes[sender], scales, amaxes, layout.fmt, ROWWISE, layout.row, dtype=torch.float32
        )

    total = piece(0)
    for sender in range(1, layout.world):
        total = total + piece(sender)
    total = total if factor == 1 else total * factor
    start = end = 0
    for numel, rows in zip(layout.numels, layout.row_counts):
        out[end : end + numel].copy_(total[start : start + rows].reshape(-1)[:numel])
        start, end = start + rows, end + numel

# SPDX-License-Identifier: Apache-2.0
"""Random bits keyed by the global element and by the layer, so that no cut, world size or
recomputation changes them.

Philox4x32-10 with key = seed and counter = (contraction index // 16, outer index, step, stream);
byte i of the 128 output bits belongs to element i of the 16. `stream` hashes (tensor id, direction,
micro-batch). Indices are those of the whole tensor: a key says where the rows and columns of a part
begin (`placed_id`). Everything that changes between calls is a tensor on the device, never a Python
integer: a compiled graph or a captured one sees new bits without another trace or capture.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import ROWWISE, Direction, ceil_div

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

# Layout of a random key: int64 [5] on the device of the tensor that is rounded.
# The last field holds the global row and column of the first element, row0 + (col0 << 40).
KEY_FIELDS = ("seed", "step", "tensor_id", "micro_batch", "row0")
_COL0 = 40


def tensor_id(name: str) -> int:
    """32-bit id of a tensor from its module's qualified name and slot."""
    return zlib.crc32(name.encode())


_MADE: collections.Counter[str] = collections.Counter()


def own_name(name: str | None, kind: str) -> str:
    """A name that is given, or one that no layer built without a name has had in this process:
    `kind`, kind_1, ..

    Random bits are keyed by names. Ranks and runs that build the same layers in the same order give
    them the same names.
    """
    if name is not None:
        return name
    number, _MADE[kind] = _MADE[kind], _MADE[kind] + 1
    return f"{kind}_{number}" if number else kind


def placed_id(ident: int | Tensor, part: int, cols: int) -> int | Tensor:
    """The id of a tensor that is cut into parts of `cols` columns, of this part: kernels want
    multiples of 16."""
    return ident + (part * ceil_div(cols, 16) * 16 << 32)


def key_of(step: Tensor, ident: Tensor, rows: int) -> Tensor:
    """int64 [5] (`KEY_FIELDS`) of `rows` rows of a tensor.

    step:   int64 [5] (`context.STEP_FIELDS`). Without a token offset a rank's rows follow those of
            the rank before.
    ident:  int64 [], a `tensor_id` or `placed_id`.
    """
    seed, number, micro_batch, offset, rank = step.unbind()
    origin = torch.where(offset < 0, rank * rows, offset) + (ident >> 32 << _COL0)
    return torch.stack((seed, number, ident & _MASK, micro_batch, origin))


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words (broadcast against each
    other)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _ROUND[0], c2 * _ROUND[1]  # the wrapped int64 product has the right 64 bits
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def stream_of(tensor_id: Tensor, direction: Direction, micro_batch: Tensor) -> Tensor:
    """32-bit hash of (tensor id, direction, micro-batch): xor, then the murmur3 finalizer."""
    h = (
        tensor_id ^ (micro_batch * 0x9E3779B1 + (0 if direction is ROWWISE else 0x85EBCA77))
    ) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK
    return h ^ (h >> 16)


def random_bytes(shape: Sequence[int], direction: Direction, key: Tensor) -> Tensor:
    """One random byte an element: uint8 [rows, cols].

    key:  int64 [5] (`KEY_FIELDS`).
    """
    rows, cols = shape
    seed, step, ident, micro_batch, origin = key.unbind()
    row0, col0 = origin & ((1 << _COL0) - 1), origin >> _COL0
    row, col = (
        start + torch.arange(n, dtype=torch.int64, device=key.device)
        for start, n in ((row0, rows), (col0, cols))
    )
    outer, contraction, start = (row, col, col0) if direction is ROWWISE else (col, row, row0)
    # Blocks of 16 along the contraction that the elements fall in; one more than needed when the
    # start cuts a block.
    first = start // 16
    blocks = first + torch.arange(len(contraction) // 16 + 2, dtype=torch.int64, device=key.device)
    words = philox4x32(
        (blocks[None, :], outer[:, None], step & _MASK, stream_of(ident, direction, micro_batch)),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    words = [w.expand(len(outer), len(blocks)).to(torch.int32) for w in words]
    # little-endian: [outer, blocks * 16]
    bits = torch.stack(words, dim=-1).view(torch.uint8).flatten(1)
    bits = bits.index_select(1, contraction - first * 16)
    return bits if direction is ROWWISE else bits.t().contiguous()

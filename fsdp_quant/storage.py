# SPDX-License-Identifier: Apache-2.0
"""`Storage`: one direction's compact buffers of a quantized tensor, which are sharded, gathered and
saved.

[Note: compact and GEMM layout]
A storage is compact: row-major and unpadded, dim 0 of `data` is the logical rows and dim 0 of
`scale` the block rows, in both directions. A shard along dim 0 is therefore a slice of every
buffer. Padding, swizzles and physical transposes that tensor cores need are in an `EncodedMatrix`
of a GEMM layout, which is derived (`Storage.to_gemm_operand`) and never sharded, sent or saved to a
checkpoint.
"""

from __future__ import annotations

import copyreg
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from .encoded_matrix import BUFFERS, EncodedMatrix, has_tensor_amax
from .formats import ROWWISE, Direction, Encoding, Format, ceil_div, format_of_facts
from .ops import dispatch
from .ops.capability import arch_of
from .ops.gemm_layout import in_native_order, native_scale, swizzled_scale
from .ops.layout import ANCHORS, COMPACT, LAID_OUT, LAYOUTS, NATIVE
from .ops.native import RecordedLaunch


class Placement(enum.Enum):
    """How a buffer of a dim-0 sharded tensor relates to its shards.

    SHARD:      a slice of dim 0; gathering is concatenation.
    REPLICATE:  the same on every rank.
    HALO:       the rows of every block that the shard overlaps; a block that a cut divides is on
                both sides, and the rank that holds its first row owns it.
    """

    SHARD = "shard"
    REPLICATE = "replicate"
    HALO = "halo"


@dataclass(frozen=True, eq=False, repr=False)
class Storage(EncodedMatrix):
    """Codes and scales of one direction of a [rows, cols] tensor or of a slice of its rows.

    data:         uint8 [rows, fmt.row_bytes(cols)]; identity: [rows, cols] in its own dtype.
    scale:        decode scales [block rows, block cols] of the blocks the rows overlap (fp32, or
                  uint8 codes).
    layout:       always "compact" (see the note above).

    Other fields: as of `EncodedMatrix`.

    >>> storage = fq.Quantizer("nvfp4").quantize(torch.randn(32, 64)).rowwise
    >>> storage.data.shape, storage.scale.shape  # two codes per byte; a scale per 16 elements
    (torch.Size([32, 32]), torch.Size([32, 4]))
    """

    layout: Literal["compact"] = COMPACT

    @classmethod
    def zeros(
        cls,
        fmt: Format,
        direction: Direction,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Storage:
        """A storage of this geometry whose bytes are all zero."""
        zeros = functools.partial(torch.zeros, device=device)
        rows, cols = fmt.padded_shape(shape, direction)
        data = zeros(rows, fmt.row_bytes(cols, dtype), dtype=torch.uint8)
        sizes, lines = fmt.scale_shape(shape, direction), fmt.tensor_scale_shape(shape, direction)
        scale = None if sizes is None else zeros(sizes, dtype=fmt.scale_dtype)
        tensor_amax = zeros(lines, dtype=torch.float32) if fmt.tensor_scale else None
        data = data if fmt.is_quantized else data.view(dtype)
        return cls(fmt, direction, shape, data, scale, tensor_amax, dtype)

    # Shards #

    def placements(self, chunk: int | None = None) -> dict[str, Placement]:
        """How each buffer shards when dim 0 is cut every `chunk` rows (None: not cut)."""
        scale = scale_placement(self.fmt, self.direction, chunk)
        tensor_amax = Placement.SHARD if self.has_scale_per_row else Placement.REPLICATE
        kinds = {"data": Placement.SHARD, "scale": scale, "tensor_amax": tensor_amax}
        return {name: kinds[name] for name in self.buffers()}

    def narrow(self, start: int, length: int) -> Storage:
        """Rows [start, start + length): views of every buffer, also where the cut divides a block.

        Raises ValueError for a columnwise rotated storage, whose rows mix.
        """
        if (start, length) == (0, self.shape[0]):
            return self
        if self.fmt.rotated and self.direction is not ROWWISE:
            raise ValueError(
                f"rows [{start}, {start + length}) of {self.describe()} cannot be cut out: the "
                "rotation mixes rows; use dequantize(), or quantize the rows you want"
            )
        scale, b0 = self.scale, self.fmt.dims(self.direction)[0]
        tensor_amax = self.tensor_amax
        if tensor_amax is not None and self.has_scale_per_row:
            tensor_amax = tensor_amax.narrow(0, start, length)
        if scale is not None and b0 is not None:
            first = (self.row0 + start) // b0 - self.row0 // b0
            last = -(-(self.row0 + start + length) // b0) - self.row0 // b0
            scale = scale.narrow(0, first, max(last - first, 0) if length else 0)
        return replace(
            self,
            shape=(length, self.shape[1]),
            data=self.data.narrow(0, start, length),
            scale=scale,
            tensor_amax=tensor_amax,
            row0=self.row0 + start,
        )

    def as_direction(self, direction: Direction) -> Storage:
        """The same bytes as the other direction's operand.

        Raises ValueError for values that are rotated, or have a second-level scale per row.
        """
        if direction is self.direction:
            return self
        if self.fmt.rotated or self.fmt.has_row_scales:
            raise ValueError(
                f"{self.describe()} cannot serve as {direction.value}: "
                + ("its rows are rotated" if self.fmt.rotated else "each row has a scale")
            )
        return replace(self, direction=direction, fmt=self.fmt.turned)

    # Reading #

    def factored_operand(self) -> tuple[Tensor, Tensor | None]:
        """`operand` without the scales that span the contraction: (bf16 [outer, contraction], fp32
        [outer or 1]).

        The scales left out multiply the product, per row or for the whole tensor. Exact if
        `decodes_exactly_to_bf16` (e8m0 exponents beyond bf16's normal range excepted).
        """
        scale, outside = self.scale, None
        if self.fmt.scale_leaves_contraction:
            scale, outside = None, self.scales.flatten()
        elif self.tensor_amax is not None:
            outside = dispatch.tensor_decode_scale(self.tensor_amax, self.fmt)
        values = self._decoded(self.data, scale, None, torch.bfloat16)
        return (values if self.direction is ROWWISE else values.t()), outside

    # GEMM layout #

    def to_gemm_operand(
        self,
        layout: str,
        transposed: Tensor | None = None,
        anchored: tuple[Tensor, Tensor] | None = None,
        arch: str | None = None,
    ) -> EncodedMatrix:
        """Codes and scales in a GEMM layout (`ops.layout`). ANCHORS round subnormals a second time.

        transposed:  the codes of a columnwise storage, if they are transposed already.
        anchored:    codes and scales in the layout, if they are there already.
        arch:        of the GPU that multiplies; None: the device of the codes.

        Raises ValueError for a shard (gather it first) or an unknown layout, NotImplementedError
        for an unknown architecture.
        """
        if self.row0:
            raise ValueError(
                f"{self.describe()} is a shard from row {self.row0}; a GEMM layout is of a whole "
                "tensor"
            )
        rows, cols = self.readable().padded_shape
        rowwise, scale = self.direction is ROWWISE, self.scale
        if layout in ANCHORS:
            codes = self.data, self.scales, self.tensor_amax, cols, self.fmt, self.direction
            if transposed is not None:
                columns = self.scales.t().contiguous()
                codes = transposed, columns, self.tensor_amax, rows, self.fmt, ROWWISE
            data, scale = anchored or dispatch.anchor_codes(*codes, layout)
        elif layout in LAID_OUT:
            data, outer = (self.data, rows) if rowwise else (transposed, cols)
            if data is None:
                data = dispatch.transpose_codes(self.data, rows, cols, self.fmt)
            if layout == NATIVE and scale is not None:
                arch = arch or arch_of(data.device)
                scale = native_scale(scale, self.fmt, self.direction, outer, arch)
            elif scale is not None:
                scale = swizzled_scale(scale, self.fmt, self.direction, outer)
        else:
            raise ValueError(f"{self.describe()} has no {layout} layout; quantize it so")
        tensor_amax = self.tensor_amax if has_tensor_amax(self.fmt, layout) else None
        # replace() takes three times as long
        return EncodedMatrix(
            self.fmt, self.direction, self.shape, data, scale, tensor_amax, self.dtype, 0, layout
        )

    def expected_buffers(self) -> dict[str, tuple[set[torch.dtype], set[tuple[int, ...]]]]:
        fmt, (rows, cols) = self.fmt, self.padded_shape
        expected: dict[str, tuple[set, set]] = {
            "data": ({torch.uint8}, {(rows, fmt.row_bytes(cols, self.dtype))})
            if fmt.is_quantized
            else (set(_DTYPES.values()), {self.shape})
        }
        scale_shape, b0 = fmt.scale_shape(self.shape, self.direction), fmt.dims(self.direction)[0]
        if scale_shape is not None:
            block_rows = scale_shape[0]
            if b0:  # the blocks that these rows overlap
                block_rows = ceil_div(self.row0 % b0 + self.shape[0], b0) if self.shape[0] else 0
            expected["scale"] = {fmt.scale_dtype}, {(block_rows, scale_shape[1])}
        return expected


def scale_placement(fmt: Format, direction: Direction, chunk: int | None) -> Placement:
    """How the scales shard when dim 0 is cut every `chunk` rows (None: not cut)."""
    b0 = fmt.dims(direction)[0]
    if b0 is None:
        return Placement.REPLICATE
    return Placement.SHARD if chunk is None or chunk % b0 == 0 else Placement.HALO


def codes_travel(encoding: Encoding, multiple: int, in_one_piece: bool) -> bool:
    """Whether codes of pieces, each of a multiple of so many rows, are those of the gathered
    tensor: no block and no rotation reaches from one piece into the next.

    in_one_piece:  of a rank's rows, in the order of ranks: the gathered rows key random bits.
    """
    if not encoding.fmt.is_quantized:
        return True
    rows = encoding.fmt.row_alignment(encoding.direction)
    return (in_one_piece or not encoding.stochastic) and multiple % rows == 0


# Between layouts #


def matrix_type(layout: str) -> type[EncodedMatrix]:
    """The type of matrices in this layout."""
    return Storage if layout == COMPACT else EncodedMatrix


def to_layout(matrix: EncodedMatrix, layout: str) -> EncodedMatrix:
    """The matrix in `layout` (`ops.layout`); itself if it is there already, or is not quantized.

    Raises ValueError for a layout into which its buffers cannot be brought.
    """
    if layout == matrix.layout or not matrix.fmt.is_quantized:
        return matrix
    storage = to_storage(matrix, layout)
    return storage if layout == COMPACT else storage.to_gemm_operand(layout)


def to_storage(matrix: EncodedMatrix, layout: str = COMPACT, arch: str | None = None) -> Storage:
    """The compact storage.

    layout:  that an error names.
    arch:    of the GPU whose layout this is; None: the device of the codes.
    Raises ValueError for an operand of ANCHORS, whose block scales are lost.
    """
    if isinstance(matrix, Storage):
        return matrix
    if matrix.layout in ANCHORS:
        raise ValueError(
            f"{matrix.describe()} in {matrix.layout} layout has no {layout} layout; quantize it so"
        )
    data, scale = matrix.compact_buffers(arch)
    fmt, direction, shape = matrix.fmt, matrix.direction, matrix.shape
    return Storage(fmt, direction, shape, data, scale, matrix.tensor_amax, matrix.dtype)


def to_gemm_operands(
    targets: Sequence[tuple[Storage, str]], calls: list[RecordedLaunch] | None = None
) -> list[EncodedMatrix]:
    """`Storage.to_gemm_operand` of each (storage, layout), with one launch for all codes of a
    format that are transposed, or anchored alike.

    calls:    receives the launches that wrote the buffers of the results, if they can be replayed.
    """
    transposing: dict[Format, list[int]] = {}
    anchoring: dict[tuple[Format, Direction, str], list[int]] = {}
    for i, (storage, layout) in enumerate(targets):
        if layout in LAID_OUT and storage.direction is not ROWWISE and storage.fmt.is_quantized:
            transposing.setdefault(storage.fmt, []).append(i)
        elif layout in ANCHORS and storage.row0 == 0:
            anchoring.setdefault((storage.fmt, storage.direction, layout), []).append(i)
    transposed: dict[int, Tensor] = {}
    for fmt, places in transposing.items():
        storages = [targets[i][0] for i in places]
        results = dispatch.multi_tensor_transpose(
            [s.data for s in storages], [s.padded_shape for s in storages], fmt, calls
        )
        transposed.update(zip(places, results))
    anchored: dict[int, tuple[Tensor, Tensor]] = {}
    for key, places in anchoring.items():
        storages = [targets[i][0] for i in places]
        data, scales, amaxes, cols = zip(
            *((s.data, s.scales, s.tensor_amax, s.padded_shape[1]) for s in storages)
        )
        results = dispatch.multi_tensor_anchor(data, scales, amaxes, cols, *key, calls)
        anchored.update(zip(places, results))
    operands = [
        storage.to_gemm_operand(layout, transposed.get(i), anchored.get(i))
        for i, (storage, layout) in enumerate(targets)
    ]
    if calls is not None:
        for (storage, _), operand in zip(targets, operands):
            calls += _scale_copies(storage, operand)
    return operands


def _scale_copies(storage: Storage, operand: EncodedMatrix) -> list[RecordedLaunch]:
    """Launches that copy scales into those of `operand`, if these are a copy in another order,
    padded with zeros."""
    source, target = storage.scale, operand.scale
    # other scales are swizzled, or views
    if source is None or target is None or operand.layout != NATIVE or target.dim() != 2:
        return []
    if target.data_ptr() == source.data_ptr():
        return []
    read = in_native_order(source, storage.fmt, storage.direction)
    zeros = [] if read.shape == target.shape else [RecordedLaunch(target.zero_, (), [])]
    return [*zeros, RecordedLaunch(target[:, : read.shape[1]].copy_, (read,), [target])]


# Files #

# No tensor in a file is larger: sizes beyond are damage, and arithmetic on them would overflow.
_MOST_ELEMENTS = 1 << 48
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def rebuild_storage(
    facts: dict, buffers: dict[str, Tensor], row0: int = 0, layout: str = COMPACT
) -> EncodedMatrix:
    """The matrix that `EncodedMatrix.facts` describes, over `buffers` by field name.

    Files come from anywhere: raises ValueError for facts that no matrix has, and for buffers that
    are missing, too many, or of another dtype or shape than these facts give them.
    """
    try:
        matrix = _described(dict(facts), dict(buffers), row0, layout)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"no storage has these facts: {str(facts)[:200]} ({type(error).__name__}: {error})"
        ) from None
    matrix.check()
    return matrix


def _described(fields: dict, buffers: dict, row0: int, layout: str) -> EncodedMatrix:
    direction, shape = Direction(fields.pop("direction")), tuple(fields.pop("shape"))
    dtype = _DTYPES[fields.pop("dtype")]
    block = tuple(fields.pop("block"))
    if len(block) != 2 or any(b is not None and not _is_size(b, 1) for b in block):
        raise ValueError(f"block is {block}")
    for name in ("pow2", "tensor_scale", "rotated"):
        if not isinstance(fields.get(name, False), bool):
            raise TypeError(f"{name} is {fields[name]!r}")
    fmt = format_of_facts({"name": fields.pop("format"), **fields, "block": block})
    if (
        len(shape) != 2
        or not all(map(_is_size, shape))
        or prod(shape) > _MOST_ELEMENTS
        or not _is_size(row0)
    ):
        raise ValueError(f"shape is {shape}, from row {row0}")
    if layout not in LAYOUTS or (layout != COMPACT and row0):
        raise ValueError(f"layout is {layout!r}, from row {row0}")
    if set(buffers) - set(BUFFERS) or not all(isinstance(b, Tensor) for b in buffers.values()):
        raise TypeError(f"buffers are tensors, of {', '.join(BUFFERS)}")
    data, scale, tensor_amax = buffers["data"], buffers.get("scale"), buffers.get("tensor_amax")
    return matrix_type(layout)(fmt, direction, shape, data, scale, tensor_amax, dtype, row0, layout)


def _is_size(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 40


def _reduced(matrix: EncodedMatrix) -> tuple:
    buffers = matrix.readable().buffers()
    return rebuild_storage, (matrix.facts(), buffers, matrix.row0, matrix.layout)


copyreg.pickle(Storage, _reduced)
copyreg.pickle(EncodedMatrix, _reduced)
torch.serialization.add_safe_globals([rebuild_storage])

# SPDX-License-Identifier: Apache-2.0
"""`Storage`: one direction's buffers of a quantized tensor, and the protocol that everything moves
them by.

[Note: compact and GEMM layout]
A storage that travels or rests is compact: row-major and unpadded, dim 0 of `data` is the logical
rows and dim 0 of `scale` the block rows, in both directions. A shard along dim 0 is therefore a
slice of every buffer. What a tensor core wants beyond that (padding, swizzle, physical transposes)
is derived by `to_gemm_layout` and never sharded, sent or saved to a checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import ROWWISE, Direction, Encoding, Format, format_of, round_up
from .ops import dispatch, layout, reference
from .ops.capability import ARCHITECTURES, BLACKWELL, arch_of
from .ops.layout import (
    ANCHOR_RUNS,
    ANCHORED,
    ANCHORED_TENSOR,
    ANCHORS,
    COMPACT,
    LAID_OUT,
    LAYOUTS,
    NATIVE,
    SPREAD,
)
from .ops.native import RecordedLaunch


class Placement(enum.Enum):
    """How a compact buffer of a dim-0 sharded tensor relates to its shards.

    SHARD:      a slice of dim 0; gathering is concatenation.
    REPLICATE:  the same on every rank.
    HALO:       the rows of every block that the shard overlaps; a block that a cut divides is on
                both sides, and the rank that holds its first row owns it.
    """

    SHARD = "shard"
    REPLICATE = "replicate"
    HALO = "halo"


class GemmOperand(NamedTuple):
    """Buffers as a GEMM reads them; the meaning of each depends on (format, direction, arch)."""

    data: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None


BUFFERS = ("data", "scale", "tensor_amax")


@dataclass(frozen=True, eq=False)
class Storage:
    """Codes and scales of one direction of a [rows, cols] tensor or of a slice of its rows.

    data:         uint8 [rows, fmt.row_bytes(cols)]; identity: [rows, cols] in its own dtype.
    scale:        decode scales [block rows, block cols] of the blocks the rows overlap (fp32, or
                  uint8 codes).
    tensor_amax:  fp32 [1], of the whole tensor, for two-level formats.
    dtype:        what `dequantize()` returns by default.
    row0:         global index of the first row: the block grid is the global tensor's.
    layout:       how the buffers lie (`ops.layout`): compact (see the note above), or as a product
                  reads them.

    Invariant: a storage that travels or rests is compact, and nothing else is needed to decode.

    >>> storage = fq.Quantizer("nvfp4").quantize(torch.randn(32, 64)).rowwise
    >>> storage.data.shape, storage.scale.shape  # two codes per byte; a scale per 16 elements
    (torch.Size([32, 32]), torch.Size([32, 4]))
    """

    fmt: Format
    direction: Direction
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    dtype: torch.dtype
    row0: int = 0
    layout: str = COMPACT

    @classmethod
    def of(
        cls, encoded: dispatch.Encoded, encoding: Encoding, shape, dtype: torch.dtype, row0: int = 0
    ) -> Storage:
        """The storage over freshly encoded buffers."""
        tensor_amax = encoded.tensor_amax if has_tensor_amax(encoding.fmt, encoded.layout) else None
        return cls(
            encoding.fmt,
            encoding.direction,
            tuple(shape),
            encoded.data,
            encoded.scale,
            tensor_amax,
            dtype,
            row0,
            encoded.layout,
        )

    @classmethod
    def zeros(
        cls, fmt: Format, direction: Direction, shape: tuple[int, int], dtype: torch.dtype, device
    ) -> Storage:
        """A compact storage of this geometry whose bytes are all zero."""
        rows, cols = fmt.padded_shape(shape, direction)
        data = torch.zeros(rows, fmt.row_bytes(cols, dtype), dtype=torch.uint8, device=device)
        scale_shape = fmt.scale_shape(shape, direction)
        scale = (
            None
            if scale_shape is None
            else torch.zeros(scale_shape, dtype=fmt.scale_dtype, device=device)
        )
        tensor_amax = torch.zeros(1, device=device) if fmt.tensor_scale else None
        return cls(
            fmt,
            direction,
            tuple(shape),
            data if fmt.is_quantized else data.view(dtype),
            scale,
            tensor_amax,
            dtype,
        )

    # The buffer protocol #

    def buffers(self) -> dict[str, Tensor]:
        """The compact buffers that exist, by field name."""
        return {name: t for name in BUFFERS if (t := getattr(self, name)) is not None}

    def with_buffers(self, buffers: dict[str, Tensor], **changes) -> Storage:
        """The same storage over other buffers (views are kept, nothing is copied)."""
        return replace(self, **buffers, **changes)

    def placements(self, chunk: int | None = None) -> dict[str, Placement]:
        """How each buffer shards when dim 0 is cut every `chunk` rows (None: not cut)."""
        scale = scale_placement(self.fmt, self.direction, chunk)
        kinds = {"data": Placement.SHARD, "scale": scale, "tensor_amax": Placement.REPLICATE}
        return {name: kinds[name] for name in self.buffers()}

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.fmt.padded_shape(self.shape, self.direction)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers().values())

    @property
    def geometry(self) -> tuple:
        """What must be equal where buffers of one storage take the place of another's."""
        return self.fmt, self.direction, self.shape, self.row0, self.layout, self.dtype

    @property
    def is_freed(self) -> bool:
        """The codes were given back to the allocator (FSDP resharded) and must not be read."""
        return self.data.untyped_storage().size() == 0 and self.data.numel() > 0

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
        if scale is not None and b0 is not None:
            first = (self.row0 + start) // b0 - self.row0 // b0
            last = -(-(self.row0 + start + length) // b0) - self.row0 // b0
            scale = scale.narrow(0, first, max(last - first, 0) if length else 0)
        return replace(
            self,
            shape=(length, self.shape[1]),
            data=self.data.narrow(0, start, length),
            scale=scale,
            row0=self.row0 + start,
        )

    def operand_rows(self, start: int, length: int) -> Storage | None:
        """Rows [start, start + length) of a rowwise storage in any layout, as an operand; None
        where a scale serves others too."""
        scale, dim = self.scale, 0
        if self.direction is not ROWWISE or (self.fmt.block[0] or 1) > 1:
            return None
        if (
            self.layout in LAID_OUT
            and self.fmt.is_quantized
            and not self.fmt.scale_leaves_contraction
        ):
            if self.layout == SPREAD or not self.fmt.has_fp32_scales or length % 4:
                return None
            scale, dim = scale.view(-1, round_up(self.shape[0], 4)), 1
        if scale is not None and scale.numel() > 1:
            scale = scale.narrow(dim, start, length).contiguous()
        return replace(
            self,
            shape=(length, self.shape[1]),
            data=self.data.narrow(0, start, length),
            scale=scale,
        )

    def map(self, fn) -> Storage:
        """The same storage with fn applied to every buffer."""
        return self.with_buffers({name: fn(t) for name, t in self.buffers().items()})

    def as_direction(self, direction: Direction) -> Storage:
        """The same bytes as the other direction's operand.

        Raises ValueError for a format that quantizes the two directions differently.
        """
        if not self.fmt.shares_storage:
            raise ValueError(
                f"{self.describe()} cannot serve as {direction.value}: its blocks differ by "
                "direction"
            )
        return replace(self, direction=direction)

    # Reading #

    @property
    def decodes_exactly_to_bf16(self) -> bool:
        return (
            self.fmt.decodes_exactly_to_bf16
            if self.fmt.is_quantized
            else self.dtype is torch.bfloat16
        )

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Element times every scale [rows, cols] in fp32 (identity: its own dtype), rounded once to
        `dtype`.

        A rotated storage stays rotated.
        """
        if self.layout in ANCHORS:
            values = replace(
                self,
                fmt=self.operand_format,
                direction=ROWWISE,
                shape=tuple(self.data.shape),
                layout=COMPACT,
                scale=self._anchored_scales(),
                row0=0,
            ).decode(dtype)
            return values if self.direction is ROWWISE else values.t()
        if self.layout != COMPACT:
            return self.to_gemm_operand(COMPACT).decode(dtype)
        return dispatch.decode(
            self.data,
            self.scale,
            self.tensor_amax,
            self.fmt,
            self.direction,
            self.padded_shape[1],
            self.row0,
            dtype,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The logical values [rows, cols] in `dtype` (default: the storage's), turned back if they
        were rotated."""
        dtype = dtype or self.dtype
        if not self.fmt.rotated:
            return self.decode(dtype)
        values = reference.rotate(self.decode(), self.direction, inverse=True)[
            : self.shape[0], : self.shape[1]
        ]
        return values.to(dtype)

    def operand(self) -> Tensor:
        """What a GEMM multiplies: fp32 (identity: its own dtype) [outer, contraction]."""
        values = self.decode()
        return values if self.direction is ROWWISE else values.t()

    def factored_operand(self) -> tuple[Tensor, Tensor | None]:
        """`operand` without the scales that span the contraction: (bf16 [outer, contraction], fp32
        [outer or 1]).

        The scales left out multiply the product: row or column factors, or a tensor's. Exact where
        `decodes_exactly_to_bf16` (e8m0 exponents beyond bf16's normal range excepted).
        """
        outside = None
        scale = self.scale
        if self.fmt.scale_leaves_contraction:
            scale, outside = None, self.scale.flatten()
        elif self.tensor_amax is not None:
            outside = dispatch.tensor_decode_scale(self.tensor_amax, self.fmt)
        values = dispatch.decode(
            self.data,
            scale,
            None,
            self.fmt,
            self.direction,
            self.padded_shape[1],
            self.row0,
            torch.bfloat16,
        )
        return (values if self.direction is ROWWISE else values.t()), outside

    # GEMM layout #

    def to_gemm_operand(
        self,
        wanted: str,
        turned: Tensor | None = None,
        anchored: tuple[Tensor, Tensor] | None = None,
    ) -> Storage:
        """The same storage with its buffers as `wanted` (`ops.layout`) says; itself where they lie
        so, or are not quantized.

        turned:    the transposed codes, where a columnwise storage's are made already.
        anchored:  codes and scales against anchors, where they are.
        Anchors that are made of codes round subnormals a second time. Raises ValueError for a
        layout that the buffers cannot be brought into.
        """
        if wanted == self.layout or not self.fmt.is_quantized:
            return self
        if self.layout in LAID_OUT:
            operand, arch = GemmOperand(self.data, self.scale, None), arch_of(self.data.device)
            compact = (
                self.from_gemm_layout(operand, arch)
                if self.layout == NATIVE
                else self._from_spread()
            )
            return replace(compact, layout=COMPACT).to_gemm_operand(wanted)
        if self.layout != COMPACT or wanted not in LAYOUTS:
            raise ValueError(
                f"{self.describe()} in {self.layout} layout has no {wanted} layout; quantize it so"
            )
        self._check_whole()
        if wanted == NATIVE:
            data, scale, _ = self.to_gemm_layout(arch_of(self.data.device), turned)
        elif wanted == SPREAD:
            data, scale = self._outer_major(turned), self._swizzled(self.scale)
        elif anchored is not None:
            data, scale = anchored
        else:
            rows, cols = self.padded_shape
            codes = (self.data, self.scale, self.tensor_amax, cols, self.fmt, self.direction)
            if turned is not None:
                codes = (
                    turned,
                    self.scale.t().contiguous(),
                    self.tensor_amax,
                    rows,
                    self.fmt,
                    ROWWISE,
                )
            data, scale = dispatch.anchor_codes(*codes, wanted)
        tensor_amax = self.tensor_amax if has_tensor_amax(self.fmt, wanted) else None
        of = self.fmt, self.direction, self.shape
        # replace() takes three times as long
        return Storage(*of, data, scale, tensor_amax, self.dtype, self.row0, wanted)

    def turns(self, wanted: str) -> bool:
        """`in_layout(wanted)` transposes compact codes."""
        return (
            self.layout == COMPACT
            and wanted in LAID_OUT
            and self.direction is not ROWWISE
            and self.fmt.is_quantized
        )

    @property
    def operand_format(self) -> Format:
        """What the codes and scales mean as the operand of a product, in this layout."""
        return layout.operand_format(self.fmt, self.layout)

    def _anchored_scales(self) -> Tensor:
        """fp32 scales of an anchored operand as those of a rowwise storage [outer, contraction]."""
        lines = self.data.shape[0]
        if self.layout in (ANCHORED_TENSOR, ANCHORED):
            return self.scale.view(-1, 1)
        return self.scale.view(-1, round_up(lines, 4))[:, :lines].t().contiguous()

    def to_gemm_layout(self, arch: str, turned: Tensor | None = None) -> GemmOperand:
        """Buffers as the tensor cores of `arch` read them, padding zero.

        sm_90a:   data [outer, contraction], both operands K-major (a columnwise storage is
                  transposed); 1x128 scales [contraction blocks, outer rounded up to 4]; 128x128
                  scales [outer blocks, contraction blocks rounded up to 4]; whole-contraction
                  scales [outer]; e8m0 and e4m3 scales [outer, blocks].
        sm_100f, sm_120f:  the same data (4-bit codes packed along the contraction); e8m0 and e4m3
                           scales one a row of
                  the operand (square blocks expanded), in swizzled 128x4 tiles. fp32 scales as on
                  sm_90a.
        Raises NotImplementedError for another arch, ValueError for a shard (gather it first).
        """
        if arch not in ARCHITECTURES:
            raise NotImplementedError(
                f"no GEMM layout for {arch!r}; layouts exist for {', '.join(ARCHITECTURES)}"
            )
        self._check_whole()
        scale = None if self.scale is None else self._scale_to_gemm_layout(self.scale, arch)
        decode = (
            None
            if self.tensor_amax is None
            else dispatch.tensor_decode_scale(self.tensor_amax, self.fmt)
        )
        return GemmOperand(self._outer_major(turned), scale, decode)

    def _outer_major(self, turned: Tensor | None) -> Tensor:
        """Codes [outer, contraction] of compact ones; turned: where they are made already."""
        if self.direction is ROWWISE:
            return self.data
        return (
            dispatch.transpose_codes(self.data, *self.padded_shape, self.fmt)
            if turned is None
            else turned
        )

    def _swizzled(self, scale: Tensor) -> Tensor:
        outer = self.padded_shape[1 - self.direction.contraction_dim]
        return dispatch.swizzle_scales(
            scale, outer, self.fmt.block[0], self.direction is not ROWWISE
        )

    def _is_swizzled(self, arch: str) -> bool:
        return not self.fmt.has_fp32_scales and ARCHITECTURES[arch].scale_layout == BLACKWELL

    def _check_whole(self) -> None:
        if self.row0:
            raise ValueError(
                f"{self.describe()} is a shard from row {self.row0}; a GEMM layout is of a whole "
                "tensor"
            )

    def _scale_to_gemm_layout(self, scale: Tensor, arch: str) -> Tensor:
        """scale: compact [block rows, block cols]."""
        if self.fmt.scale_leaves_contraction:
            return scale.reshape(-1).contiguous()
        if self._is_swizzled(arch):
            return self._swizzled(scale)
        scale = self._scale_as_read(scale)
        return (layout.pad_to(scale, 1, 4) if self.fmt.has_fp32_scales else scale).contiguous()

    def scale_copies(self, made: Storage) -> list[RecordedLaunch]:
        """What writes the scales of this storage as they are in `made`, where those are a copy in
        another order, zeros behind it."""
        # swizzled, or views of them
        if made.layout != NATIVE or made.scale is None or made.scale.dim() != 2:
            return []
        if made.scale.data_ptr() == self.scale.data_ptr():
            return []
        read, zeros = self._scale_as_read(self.scale), []
        if read.shape != made.scale.shape:
            zeros = [RecordedLaunch(made.scale.zero_, (), [])]
        return [*zeros, RecordedLaunch(made.scale[:, : read.shape[1]].copy_, (read,), [made.scale])]

    def _scale_as_read(self, scale: Tensor) -> Tensor:
        """A view: [outer blocks, contraction blocks]; fp32 scales of runs [contraction blocks,
        outer]."""
        turned = (self.direction is not ROWWISE) != (
            self.fmt.has_fp32_scales and self.fmt.block[0] == 1
        )
        return scale.t() if turned else scale

    def from_gemm_layout(self, operand: GemmOperand, arch: str) -> Storage:
        """The compact storage of `to_gemm_layout(arch)`'s result; `self` gives format and shape."""
        rows, cols = self.padded_shape
        outer, contraction = (rows, cols) if self.direction is ROWWISE else (cols, rows)
        data, scale = operand.data, operand.scale
        if self.direction is not ROWWISE:
            data = dispatch.transpose_codes(data, cols, rows, self.fmt)
        if scale is not None:
            b0, b1 = self.fmt.block
            blocks = 1 if b1 is None else -(-contraction // b1)
            outer_blocks = 1 if b0 is None else -(-outer // b0)
            scale = scale.reshape(self._gemm_scale_shape(outer, outer_blocks, blocks, arch))
            if self.fmt.scale_leaves_contraction:
                scale = scale[:, None]
            elif self.fmt.has_fp32_scales:
                scale = scale[:, :outer].t() if b0 == 1 else scale[:, :blocks]
            elif self._is_swizzled(arch):
                scale = layout.unswizzle_128x4(scale, outer, blocks)[::b0]
            scale = scale[:outer_blocks]
            scale = (scale if self.direction is ROWWISE else scale.t()).clone(
                memory_format=torch.contiguous_format
            )
        return self.with_buffers({"data": data, **({} if scale is None else {"scale": scale})})

    def _from_spread(self) -> Storage:
        data, scale = (
            self.data,
            reference.power_of_two(
                layout.scales_before_spread(self.scale, self.fmt, *self.data.shape)
            ),
        )
        if self.direction is not ROWWISE:
            data, scale = dispatch.transpose_codes(data, *data.shape, self.fmt), scale.t()
        return self.with_buffers({"data": data, "scale": scale.contiguous()})

    def _gemm_scale_shape(
        self, outer: int, outer_blocks: int, blocks: int, arch: str
    ) -> tuple[int, ...]:
        if self.fmt.scale_leaves_contraction or self._is_swizzled(arch):
            return (-1,)
        if self.fmt.has_fp32_scales:
            return (
                (blocks, round_up(outer, 4))
                if self.fmt.block[0] == 1
                else (outer_blocks, round_up(blocks, 4))
            )
        return (outer_blocks, blocks)

    def check(self) -> None:
        """Raise ValueError unless its buffers are those that its format, shape and layout ask
        for."""
        fmt, rescaled = self.fmt, self.layout in (SPREAD, *ANCHORS)
        rows, cols = self.padded_shape
        if self.layout != COMPACT and self.direction is not ROWWISE:
            rows, cols = cols, rows
        stored = self.operand_format if rescaled else fmt
        data = (rows, stored.row_bytes(cols, self.dtype)) if fmt.is_quantized else tuple(self.shape)
        wanted: dict[str, tuple[set, set]] = {
            "data": ({torch.uint8} if fmt.is_quantized else set(_DTYPES.values()), {data})
        }
        if stored.has_scales:
            wanted["scale"] = {stored.scale_dtype}, self._scale_shapes(rows, cols)
        if has_tensor_amax(fmt, self.layout):
            wanted["tensor_amax"] = {torch.float32}, {(1,)}
        found = self.buffers()
        for name in {**wanted, **found}:
            dtypes, shapes = wanted.get(name, ((), ()))
            buffer = found.get(name)
            shape = None if buffer is None else tuple(buffer.shape)
            # of as many elements, in any shape
            flat = shape is not None and name == "scale" and self.layout != COMPACT
            if (
                buffer is None
                or buffer.dtype not in dtypes
                or ((prod(shape),) if flat else shape) not in shapes
            ):
                got = "missing" if buffer is None else f"{buffer.dtype} {list(shape)}"
                want = " or ".join(f"{d} {list(s)}" for d in dtypes for s in shapes) or "none"
                raise ValueError(
                    f"{name} of {self.describe()} is {got}, wanted {want}: the file is damaged, or "
                    "of other facts"
                )

    def _scale_shapes(self, rows: int, cols: int) -> set[tuple[int, ...]]:
        """Shapes that its scales may have; of GEMM layouts the number of their elements. rows,
        cols: of `data`."""
        if self.layout == COMPACT:
            blocks, b0 = (
                self.fmt.scale_shape(self.shape, self.direction),
                self.fmt.dims(self.direction)[0],
            )
            first = self.row0 % b0 if b0 else 0
            return {
                (
                    -(-(first + self.shape[0]) // b0)
                    if b0 and self.shape[0]
                    else blocks[0]
                    if not b0
                    else 0,
                    blocks[1],
                )
            }
        if self.layout in ANCHORS:
            run = ANCHOR_RUNS.get(self.layout)
            return {
                (1,)
                if self.layout == ANCHORED_TENSOR
                else (rows,)
                if run is None
                else (-(-cols // run) * round_up(rows, 4),)
            }
        b0, b1 = self.fmt.dims(ROWWISE)
        outer, blocks = 1 if b0 is None else -(-rows // b0), 1 if b1 is None else -(-cols // b1)
        if self.fmt.scale_leaves_contraction:
            return {(outer,)}
        if self.layout == SPREAD:
            return {(round_up(rows, layout.TILE_ROWS) * layout.SPREAD_BLOCKS * blocks,)}
        if self.fmt.has_fp32_scales:
            return {(blocks * round_up(rows, 4) if b0 == 1 else outer * round_up(blocks, 4),)}
        return {
            (outer * blocks,),
            (round_up(rows, layout.TILE_ROWS) * round_up(blocks, layout.TILE_COLS),),
        }

    # Text and pickling #

    def describe(self) -> str:
        return f"{self.direction.value} {self.fmt} {list(self.shape)}"

    def __repr__(self) -> str:
        return f"Storage({self.describe()}, {self.nbytes} bytes)"

    def facts(self) -> dict:
        """What the buffers mean, in JSON's types; `rebuild_storage` takes it."""
        fields = {
            f: getattr(self.fmt, f)
            for f in self.fmt.__dataclass_fields__
            if f not in ("element", "name")
        }
        return {
            "format": self.fmt.name,
            "element": self.fmt.element.name,
            **fields,
            "block": list(self.fmt.block),
            "direction": self.direction.value,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def __reduce__(self):
        return rebuild_storage, (self.facts(), self.buffers(), self.row0, self.layout)


# No tensor in a file is larger: sizes beyond are damage, and arithmetic on them would overflow.
_MOST_ELEMENTS = 1 << 48
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def rebuild_storage(
    facts: dict, buffers: dict[str, Tensor], row0: int = 0, layout: str = COMPACT
) -> Storage:
    """The storage that `Storage.facts` describes, over `buffers` by field name.

    Raises ValueError for facts that no storage has, and for buffers that are missing, too many, or
    of another dtype or shape than these facts give them. Files come from anywhere.
    """
    try:
        storage = _described(dict(facts), dict(buffers), row0, layout)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"no storage has these facts: {str(facts)[:200]} ({type(error).__name__}: {error})"
        ) from None
    storage.check()
    return storage


def _described(fields: dict, buffers: dict, row0: int, layout: str) -> Storage:
    direction, shape, dtype = (
        Direction(fields.pop("direction")),
        tuple(fields.pop("shape")),
        _DTYPES[fields.pop("dtype")],
    )
    block = tuple(fields.pop("block"))
    if len(block) != 2 or any(b is not None and not _is_size(b, 1) for b in block):
        raise ValueError(f"block is {block}")
    for name in ("pow2", "tensor_scale", "rotated"):
        if not isinstance(fields.get(name, False), bool):
            raise TypeError(f"{name} is {fields[name]!r}")
    fmt = format_of(fields.pop("format"), **fields, block=block)
    if (
        len(shape) != 2
        or not all(map(_is_size, shape))
        or prod(shape) > _MOST_ELEMENTS
        or not _is_size(row0)
    ):
        raise ValueError(f"shape is {shape}, from row {row0}")
    if layout not in LAYOUTS or (layout != COMPACT and row0):
        raise ValueError(f"layout is {layout!r}, from row {row0}")
    if not all(isinstance(buffer, Tensor) for buffer in buffers.values()):
        raise TypeError("a buffer is no tensor")
    whole = dict.fromkeys(BUFFERS) | buffers
    return Storage(fmt, direction, shape, **whole, dtype=dtype, row0=row0, layout=layout)


def _is_size(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 40


def to_gemm_operands(
    wanted: Sequence[tuple[Storage, str]], calls: list[RecordedLaunch] | None = None
) -> list[Storage]:
    """`to_gemm_operand` of each (storage, layout); codes of a format that are transposed, or
    anchored, are so in one call.

    calls:    takes what wrote the buffers of the results, as far as that may be done again.
    """
    alike: dict[tuple, list[int]] = {}
    for i, (storage, layout_) in enumerate(wanted):
        if storage.turns(layout_):
            alike.setdefault((storage.fmt, NATIVE), []).append(i)
        elif layout_ in ANCHORS and storage.layout == COMPACT and storage.row0 == 0:
            alike.setdefault((storage.fmt, (storage.direction, layout_)), []).append(i)
    turned: dict[int, Tensor] = {}
    anchored: dict[int, tuple[Tensor, Tensor]] = {}
    for (fmt, kind), places in alike.items():
        storages = [wanted[i][0] for i in places]
        data = [s.data for s in storages]
        if kind == NATIVE:
            turned.update(
                zip(
                    places,
                    dispatch.multi_tensor_transpose(
                        data, [s.padded_shape for s in storages], fmt, calls
                    ),
                )
            )
        else:
            scales, amaxes, cols = zip(
                *((s.scale, s.tensor_amax, s.padded_shape[1]) for s in storages)
            )
            anchored.update(
                zip(
                    places,
                    dispatch.multi_tensor_anchor(data, scales, amaxes, cols, fmt, *kind, calls),
                )
            )
    made = [
        storage.to_gemm_operand(layout_, turned.get(i), anchored.get(i))
        for i, (storage, layout_) in enumerate(wanted)
    ]
    if calls is not None:
        for (storage, _), one in zip(wanted, made):
            calls += storage.scale_copies(one)
    return made


def has_tensor_amax(fmt: Format, layout: str) -> bool:
    """A storage of this format in this layout has a tensor amax; the scale of an anchored tensor
    contains it."""
    return fmt.tensor_scale and layout != ANCHORED_TENSOR


def scale_placement(fmt: Format, direction: Direction, chunk: int | None) -> Placement:
    """How the scales shard when dim 0 is cut every `chunk` rows (None: not cut)."""
    b0 = fmt.dims(direction)[0]
    if b0 is None:
        return Placement.REPLICATE
    return Placement.SHARD if chunk is None or chunk % b0 == 0 else Placement.HALO


torch.serialization.add_safe_globals([rebuild_storage])

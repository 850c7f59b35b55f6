# SPDX-License-Identifier: Apache-2.0
"""What the ranks that share a linear layer exchange: statistics, rows and sums.

The same code runs in eager mode and while a graph is traced (`traced_linear`). There the transport
is functional collectives, which the graph holds.

[Note: one rule]
    x [.., S / R, .., K] on each rank  ->  the storages of Q(all_gather(x))
A direction travels as compact codes where no block of its codes (and no rotation) reaches over the
seam between two ranks' rows: rowwise blocks never do, columnwise blocks do not where a rank's rows
are a multiple of the block. Scales that span all rows follow from amaxes that the ranks share
first. Otherwise x is gathered in high precision, once, and quantized whole. Either way the bytes
are those of quantizing the gathered tensor. Sums stay in high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as Layout

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import ROWWISE, Direction, Encoding
from ..ops import dispatch, opaque
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT
from ..ops.reference import known
from ..ops.rng import placed_id
from ..quantizer import HybridQuantizer
from ..roles import QUANTIZED_TYPES as SLOTS
from ..roles import slot_ids
from ..scaling import reduce_amaxes, share_amaxes
from ..storage import Placement, Storage, codes_travel, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions

# Of a tensor, in errors; a function where a graph must not depend on it.
Name = str | Callable[[], str]


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How the ranks of `group` share a linear layer (`linear_definition`, note "who holds what").

    column:        the rows of the weight are cut; else its columns.
    sequence_dim:  that x (column) or y (row) is cut along; None: it is whole.
    reduces:       without sequence_dim, this layer sums dx or y over ranks; else the caller does.
    """

    group: dist.ProcessGroup
    column: bool
    sequence_dim: int | None = None
    reduces: bool = True

    @property
    def cut_slot(self) -> str:
        """The activation of which each rank has other columns."""
        return "grad_output" if self.column else "input"

    @property
    def gathered_slot(self) -> str | None:
        """The activation of which each rank has other rows."""
        return None if self.sequence_dim is None else "input" if self.column else "grad_output"

    @property
    def cut_dim(self) -> int:
        """`sequence_dim` of a layer that has one. Raises ValueError."""
        return known(self.sequence_dim, "the dim that is cut along the sequence")

    def cut_of(self, slot: str, x: Tensor) -> SequenceCut | None:
        """How an activation is cut along the sequence, of this rank's part x; None: it is not."""
        if slot != self.gathered_slot:
            return None
        return SequenceCut.of_local(tuple(x.shape), self.cut_dim, self.group)

    def output_cut(self, shape: tuple[int, ...], name: Name = "sequence") -> SequenceCut | None:
        """How the output of `shape` is cut along the sequence; None: a rank has all rows."""
        if self.gathered_slot != "grad_output":
            return None
        return SequenceCut.of_whole(shape, self.cut_dim, self.group, name)

    def sum(self, y: Tensor) -> Tensor:
        """The sum of y over the ranks; in eager mode it replaces y."""
        return self.start_sum(y)()

    def start_sum(self, y: Tensor) -> Callable[[], Tensor]:
        """Start `sum`; return the function that waits for it."""
        return transport().all_reduce(y, self.group) if self.group.size() > 1 else lambda: y

    def slot_ids(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """`operands.slot_ids` of a layer whose `cut_slot` has columns of this rank alone.

        shape:  [N, K] of this rank's part of the weight.
        """
        cols = shape[0 if self.column else 1]
        return _ids_of_part(name, self.cut_slot, self.group.rank(), cols, device)

    @property
    def data_parallel_rank(self) -> int:
        """Ranks of a group hold one batch: they count as one."""
        return min(dist.get_process_group_ranks(self.group)) // self.group.size()


@dataclass(frozen=True)
class Layouts:
    """Placements of the plain input and of the output of a layer whose weight is a DTensor."""

    input: Layout
    output: Layout
    use_local_output: bool


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """Equal pieces of one dim: rows [outer, R, chunk, cols], per rank [outer, chunk, cols].

    shape:  this rank's, [.., S / R, .., cols].
    dim:    that is cut; not the last.
    """

    group: dist.ProcessGroup
    shape: tuple[int, ...]
    dim: int

    @classmethod
    def of_whole(
        cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: Name = "sequence"
    ) -> SequenceCut:
        """The cut of a whole tensor. Raises ValueError where R does not divide its dim."""
        dim = _checked_dim(shape, dim, name)
        if shape[dim] % group.size():
            raise ValueError(
                f"{text_of(name)}: dim {dim} of {list(shape)} is {shape[dim]}, which the "
                f"{group.size()} "
                f"ranks of the group do not divide; pad it to a multiple of {group.size()}"
            )
        return cls(group, (*shape[:dim], shape[dim] // group.size(), *shape[dim + 1 :]), dim)

    @classmethod
    def of_local(
        cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: Name = "sequence"
    ) -> SequenceCut:
        """The cut of which each rank holds `shape`."""
        return cls(group, tuple(shape), _checked_dim(shape, dim, name))

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def outer(self) -> int:
        return prod(self.shape[: self.dim])

    @property
    def chunk(self) -> int:
        return prod(self.shape[self.dim : -1])

    @property
    def rows(self) -> int:
        """Of this rank."""
        return self.outer * self.chunk

    @property
    def whole_shape(self) -> tuple[int, ...]:
        before, (size, *behind) = self.shape[: self.dim], self.shape[self.dim :]
        return *before, size * self.ranks, *behind

    def travels(self, encoding: Encoding) -> bool:
        """Codes of the pieces are those of the whole (see the note)."""
        return self.ranks == 1 or codes_travel(encoding, self.chunk, self.outer == 1)

    def all_travel(self, hybrid: HybridQuantizer, directions) -> bool:
        return all(
            self.travels(hybrid.encodings[d])
            for d in gathered_directions(hybrid, frozenset(directions))
        )


def text_of(name: Name) -> str:
    return name if isinstance(name, str) else name()


def _checked_dim(shape: tuple[int, ...], dim: int, name: Name) -> int:
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{text_of(name)}: dim {dim} of {list(shape)} cannot be cut; give one before the last, "
            "which products contract"
        )
    return dim % len(shape)


# Transport: one way to start and to wait #


class _Works:
    """Collectives of eager mode. Each starts, and returns the function that waits."""

    @staticmethod
    def all_gather(
        buffers: Sequence[Tensor], group: dist.ProcessGroup, in_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """Gather each buffer from every rank: [ranks, *shape]. One launch under NCCL."""
        gathered = [b.new_empty(group.size(), *b.shape) for b in buffers]
        pairs = [(_bytes(g), _bytes(b)) for g, b in zip(gathered, buffers) if b.numel()]
        works = torch_compat.all_gather_rows(pairs, group) if pairs else []

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            return gathered

        return wait

    @staticmethod
    def reduce_scatter(
        y: Tensor, out: Tensor | None, group: dist.ProcessGroup
    ) -> Callable[[], Tensor]:
        """Sum y [ranks, ..] over the ranks, and return this rank's piece; out: where to."""
        scattered = torch.empty_like(y[0]) if out is None else out
        work = torch_compat.reduce_scatter_rows(scattered.view(-1), y.view(-1), group)

        def wait() -> Tensor:
            work.wait()
            return scattered

        return wait

    @staticmethod
    def all_reduce(y: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """Sum y over the ranks, in place."""
        work = dist.all_reduce(y, group=group, async_op=True)

        def wait() -> Tensor:
            known(work, "the work of an all-reduce").wait()
            return y

        return wait

    reduce_amaxes = staticmethod(reduce_amaxes)


class _Functional:
    """The same collectives as functional operators, which a graph holds."""

    @staticmethod
    def all_gather(
        buffers: Sequence[Tensor], group: dist.ProcessGroup, in_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """in_backward: torch's partitioner would move a gather that depends on no gradient into the
        forward, and gather again in the backward."""
        with torch_compat.keep_in_backward(in_backward):
            started = [
                torch_compat.start_all_gather(_bytes(b), group) if b.numel() else None
                for b in buffers
            ]

        def wait() -> list[Tensor]:
            shapes = [(group.size(), *b.shape) for b in buffers]
            return [
                b.new_empty(shape) if s is None else torch_compat.wait(s).view(b.dtype).view(shape)
                for s, b, shape in zip(started, buffers, shapes)
            ]

        return wait

    @staticmethod
    def reduce_scatter(
        y: Tensor, out: Tensor | None, group: dist.ProcessGroup
    ) -> Callable[[], Tensor]:
        started = torch_compat.start_reduce_scatter(y.view(-1), group)
        return lambda: torch_compat.wait(started).view(y.shape[1:])

    @staticmethod
    def all_reduce(y: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        total = torch_compat.all_reduce(y, "sum", group)
        return lambda: total

    @staticmethod
    def reduce_amaxes(amaxes: Sequence[Tensor], group: Any) -> list[Tensor]:
        """`scaling.reduce_amaxes`, each amax once."""
        distinct = list({id(a): a for a in amaxes}.values())
        bits = torch.cat([a.reshape(-1) for a in distinct]).view(torch.int32)
        reduced = torch_compat.all_reduce(bits, "max", group).view(torch.float32)
        parts = reduced.split([a.numel() for a in distinct])
        by_id = {id(a): part.view(a.shape) for a, part in zip(distinct, parts)}
        return [by_id[id(a)] for a in amaxes]


@opaque.traced_as(lambda: _Functional)
def transport() -> type[_Works | _Functional]:
    """Return the collectives of the code that runs: of eager mode, or of a graph."""
    return _Works


@opaque.eager_only
def count_high_precision_gather(nbytes: int) -> None:
    counters.add("sequence gather", ("forward", "both", "high precision"), nbytes)


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


# What ranks share before they encode #


@functools.cache
@torch_compat.outside_modes()
def _ids_of_part(name: str, cut_slot: str, part: int, cols: int, device: torch.device) -> Tensor:
    """Made on the device once, before graphs are captured."""
    ids, slot = slot_ids(name), SLOTS.index(cut_slot)
    ids[slot] = placed_id(ids[slot], part, cols)
    return ids.to(device)


def shared_statistics(
    x: Tensor,
    hybrid: HybridQuantizer,
    directions: Collection[Direction],
    group: dist.ProcessGroup,
    rows_are_cut: bool,
    *,
    dtype: torch.dtype | None = None,
    local: Mapping[Direction, Statistics] | None = None,
    tensors: str = "activations",
) -> dict[Direction, Statistics]:
    """Return statistics of x [rows, cols] whose scales span ranks, after at most one MAX
    all-reduce.

    rows_are_cut:  scales that span all rows are shared; else cols are, and only scales of the whole
                   tensor are shared (scales of a row are each rank's own).
    dtype:         that encoders see; None: x's.
    local:         of these rows, where they were taken already.
    tensors:       what x is, for the counts.
    """
    crossing = {}
    for d in gathered_directions(hybrid, frozenset(directions)) if group.size() > 1 else ():
        encoding = hybrid.encodings[d]
        spans_rows = encoding.fmt.has_scales and encoding.fmt.dims(d)[0] is None
        if encoding.fmt.spans_tensor or (rows_are_cut and spans_rows):
            crossing[d] = encoding
    if not crossing:
        return {}
    taken = dict(local or {})
    missing = {d: e for d, e in crossing.items() if d not in taken}
    if missing:
        taken |= zip(missing, dispatch.statistics(x, list(missing.values()), dtype=dtype))
    counters.add("amax all-reduce", tensors)
    by_rank = [(e, taken[d]) for d, e in crossing.items()]
    return dict(zip(crossing, share_amaxes(by_rank, group, transport().reduce_amaxes)))


# In graphs, amaxes are torch operators, which a compiler fuses with what writes x: by rows, since
# inductor splits a reduction of all values where it likes, and fuses it with no loop over rows and
# columns. `quantize` computes the largest: its launch from C++ is cheaper than inductor's.
def _fusible_statistics(
    hybrid: HybridQuantizer,
    x: Tensor,
    directions: Collection[Direction],
    shares: bool,
    dtype: torch.dtype | None,
) -> dict[Direction, Statistics]:
    """Return the amaxes of all of x, for directions that are scaled by them; of those that
    histories scale too, if ranks share them."""
    spans = {
        d: hybrid.encodings[d].fmt
        for d in gathered_directions(hybrid, frozenset(directions))
        if shares or not hybrid.side(d).is_delayed
    }
    spans = {d: fmt for d, fmt in spans.items() if fmt.spans_tensor and not fmt.rotated}
    if not spans or x.numel() == 0:
        return {}
    amax = (x if dtype is None else x.to(dtype)).abs().amax(-1, keepdim=True)
    if shares or any(fmt.tensor_scale for fmt in spans.values()):
        amax = amax.amax().view(1, 1)
    # through its bits: a compiler that read the amax of unrounded values must round now
    if amax.dtype is torch.bfloat16:
        amax = (amax.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    return {d: of_tensor(fmt.tensor_scale, amax.float()) for d, fmt in spans.items()}


@opaque.traced_as(_fusible_statistics)
def _statistics_in_graph(*args) -> dict[Direction, Statistics]:
    return {}


def of_tensor(is_two_level: bool, amax: Tensor) -> Statistics:
    return Statistics(None, amax.view(1)) if is_two_level else Statistics(amax, None)


def statistics_of(
    hybrid: HybridQuantizer,
    x: Tensor,
    directions: Collection[Direction],
    group: dist.ProcessGroup | None = None,
    rows_are_cut: bool = False,
    dtype: torch.dtype | None = None,
    tensors: str = "activations",
) -> dict[Direction, Statistics]:
    """Return the statistics of x [rows, cols] that encoders are given, by direction.

    group:  ranks that share x (None: they do not); other arguments are those of
            `shared_statistics`.
    """
    shares = group is not None and group.size() > 1
    local = _statistics_in_graph(hybrid, x, directions, shares, dtype)
    if group is None or not shares or x.numel() == 0:
        return local
    return local | shared_statistics(
        x, hybrid, directions, group, rows_are_cut, dtype=dtype, local=local, tensors=tensors
    )


# Moving rows #


class Arriving:
    """Buffers [outer * n, ..] of every rank, gathered to [outer * R * n, ..] in one launch.

    in_backward:  a graph sends in its backward.
    """

    def __init__(self, buffers: dict[str, Tensor], cut: SequenceCut, in_backward: bool = False):
        self._names, self._cut = list(buffers), cut
        sent = [b.contiguous() for b in buffers.values()]
        self.nbytes = cut.ranks * sum(b.nbytes for b in sent)
        if cut.ranks == 1:
            self._gathered = lambda: [b[None] for b in sent]
        else:
            self._gathered = transport().all_gather(sent, cut.group, in_backward)

    def wait(self) -> dict[str, Tensor]:
        """The rows in the order of the whole tensor; a copy unless the cut dim is the first."""
        return {name: self._in_order(b) for name, b in zip(self._names, self._gathered())}

    def _in_order(self, gathered: Tensor) -> Tensor:
        (_, _, *cols), outer = gathered.shape, self._cut.outer
        if outer > 1 and gathered.numel():
            gathered = gathered.view(self._cut.ranks, outer, -1, *cols).transpose(0, 1)
        return gathered.reshape(-1, *cols)


class Gather:
    """The storages of Q(all_gather(x)); the constructor starts, `take` waits for a direction.

    x:         this rank's rows [outer * chunk, K]; or a `Storage` of them that travels.
    phase:     "forward" or "backward", for the counts, and for what a graph sends in its backward.
    key:       int64 [5] random key of the whole tensor.
    factors:   of delayed sides; see `HybridQuantizer.storages`.
    statistics:  that ranks shared before (`shared_statistics`); None: they are shared here.
    rank:      int64 [], this rank's place in the group, so that graphs are alike; None: a number.
    layouts:   in which products read each direction (`ops.layout`); others are compact.

    own:       codes of this rank's rows, if they were encoded here.
    amaxes:    of delayed sides; of a gather in high precision known once it was waited for.
    """

    def __init__(
        self,
        x: Tensor | Storage,
        hybrid: HybridQuantizer,
        directions,
        cut: SequenceCut,
        phase: str,
        *,
        key: Tensor | None = None,
        factors: dict[Direction, Tensor] | None = None,
        statistics: dict[Direction, Statistics] | None = None,
        rank: Tensor | None = None,
        layouts: Mapping[Direction, str] | None = None,
    ):
        self.hybrid, self.directions, self.cut, self.phase = hybrid, tuple(directions), cut, phase
        self.layouts = layouts or {}
        self._operands: dict[tuple[Direction, str], EncodedMatrix] = {}
        self.key, self.factors, self._in_backward = key, factors, phase == "backward"
        self.amaxes: dict[Direction, Tensor] = {}
        self._storages: dict[Direction, Storage] = {}
        self._high_precision: Arriving | None = None
        self._moving: dict[Direction, tuple[Storage, Arriving]] = {}
        if isinstance(x, Storage):
            self._send(x)
        elif cut.all_travel(hybrid, directions):
            self.own, self.amaxes = encoded_rows(
                x, hybrid, directions, cut, key, factors, statistics, rank
            )
            for d in gathered_directions(hybrid, frozenset(directions)):
                self._send(self.own[d])
        else:
            self._high_precision = Arriving({"data": x}, cut, self._in_backward)
            self._count("both", "high precision", self._high_precision)

    def _send(self, storage: Storage) -> None:
        shards = {n for n, p in storage.placements(self.cut.chunk).items() if p is Placement.SHARD}
        moving = Arriving(
            {n: b for n, b in storage.buffers().items() if n in shards}, self.cut, self._in_backward
        )
        self._count(storage.direction.value, storage.fmt.name, moving)
        self._moving[storage.direction] = storage, moving

    def _count(self, direction: str, fmt: str, rows: Arriving) -> None:
        if self.cut.ranks > 1:
            counters.add("sequence gather", (self.phase, direction, fmt), rows.nbytes)

    def take(self, direction: Direction, layout: str | None = None) -> EncodedMatrix:
        """Return the whole operand of a direction; layout: default, that of `layouts`."""
        key = direction, layout or self.layouts.get(direction, COMPACT)
        if key not in self._operands:
            self._operands[key] = to_layout(self._whole_storage(direction), key[1])
        return self._operands[key]

    def _whole_storage(self, direction: Direction) -> Storage:
        if direction in self._storages:
            return self._storages[direction]
        if self._high_precision is not None:
            x, self._high_precision = self._high_precision.wait()["data"], None
            self._storages, self.amaxes = self.hybrid.storages(
                x, self.directions, key=self.key, factors=self.factors
            )
        elif direction in self._moving:
            local, moving = self._moving.pop(direction)
            shape = local.shape[0] * self.cut.ranks, local.shape[1]
            self._storages[direction] = replace(local, shape=shape, **moving.wait())
        else:
            rowwise = self._whole_storage(ROWWISE)
            self._storages[direction] = self.hybrid.columnwise_of(rowwise, self.key)
        return self._storages[direction]


def encoded_rows(
    x: Tensor,
    hybrid: HybridQuantizer,
    directions,
    cut: SequenceCut,
    key: Tensor | None = None,
    factors: dict[Direction, Tensor] | None = None,
    statistics: dict[Direction, Statistics] | None = None,
    rank: Tensor | None = None,
) -> tuple[dict[Direction, Storage], dict[Direction, Tensor]]:
    """(compact storages of this rank's rows with scales of the whole, amaxes of delayed sides)."""
    encoded = gathered_directions(hybrid, frozenset(directions))
    if key is not None and cut.ranks > 1:
        key = key.clone()
        key[4] += (cut.group.rank() if rank is None else rank) * cut.chunk
    if statistics is None:
        statistics = shared_statistics(x, hybrid, directions, cut.group, rows_are_cut=True)
    return hybrid.storages(x, encoded, key=key, factors=factors, statistics=statistics)


class Scattering:
    """Partial sums [outer * R * chunk, N], reduce-scattered to this rank's rows of the sum."""

    def __init__(self, y: Tensor, cut: SequenceCut, out: Tensor | None = None):
        shape = cut.rows, y.shape[1]
        if cut.ranks == 1 or not y.numel():
            whole = y if cut.ranks == 1 else y.new_empty(shape)
            self._scattered = lambda: whole
            return
        rows = y.view(cut.outer, cut.ranks, cut.chunk, -1).transpose(0, 1).contiguous()
        into = None if out is None else out.view(rows.shape[1:])
        scattered = transport().reduce_scatter(rows, into, cut.group)
        self._scattered = lambda: scattered().view(shape)

    def wait(self) -> Tensor:
        return self._scattered()


def scattered_product(
    multiply: Callable[..., Tensor], codes: EncodedMatrix, cut: SequenceCut, pieces: int
) -> Tensor:
    """This rank's rows of the sum over ranks of multiply(codes) [outer * R * chunk, N].

    multiply:  of a storage; with out=, into it.
    pieces:    of each rank's rows: one is scattered while the next is multiplied. Rows of a product
               are the product of rows, so the sums are the same ones. All at once where the codes
               do not come apart (`operand_rows`).
    """
    n = cut.chunk // pieces
    if pieces == 1 or codes.operand_rows(0, n) is None:
        return Scattering(multiply(codes), cut).wait()
    piece, cols = SequenceCut(cut.group, (n, cut.shape[-1]), 0), cut.shape[-1]
    result, moving = codes.data.new_empty(cut.chunk, cols, dtype=codes.dtype), []
    for start in range(0, cut.chunk, n):
        y = result.new_empty(cut.ranks, n, cols)
        for rank, out in enumerate(y):
            multiply(codes.operand_rows(rank * cut.chunk + start, n), out=out)
        moving.append(Scattering(y.view(-1, cols), piece, result.narrow(0, start, n)))
    for one in moving:
        one.wait()
    return result

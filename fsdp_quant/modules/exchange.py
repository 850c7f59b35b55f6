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
from collections.abc import Callable, Sequence
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
from ..ops.reference import known
from ..ops.rng import placed_id
from ..quantizer import HybridQuantizer
from ..scaling import reduce_amaxes, share_amaxes
from ..storage import Placement, Storage
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from .operands import SLOTS, slot_ids

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
        if self.group.size() > 1 and opaque.is_tracing():
            return torch_compat.all_reduce(y, "sum", self.group)
        if self.group.size() > 1:
            dist.all_reduce(y, group=self.group)
        return y

    def start_sum(self, y: Tensor) -> tuple[Tensor, dist.Work | None]:
        """`sum`, and what eager mode waits for before it reads the sum."""
        if self.group.size() == 1 or opaque.is_tracing():
            return self.sum(y), None
        return y, dist.all_reduce(y, group=self.group, async_op=True)

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
                f"{_said(name)}: dim {dim} of {list(shape)} is {shape[dim]}, which the "
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


def codes_travel(encoding: Encoding, multiple: int, in_one_piece: bool) -> bool:
    """Codes of pieces, each of a multiple of so many rows, are those of the whole (see the note).

    in_one_piece:  of a rank's rows, in the order of ranks: the whole's rows key random bits.
    """
    if not encoding.fmt.is_quantized:
        return True
    rows = encoding.fmt.row_alignment(encoding.direction)
    return (in_one_piece or not encoding.stochastic) and multiple % rows == 0


def _said(name: Name) -> str:
    return name if isinstance(name, str) else name()


def _checked_dim(shape: tuple[int, ...], dim: int, name: Name) -> int:
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{_said(name)}: dim {dim} of {list(shape)} cannot be cut; give one before the last, "
            "which products contract"
        )
    return dim % len(shape)


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
    directions,
    group: dist.ProcessGroup,
    rows_are_cut: bool,
    *,
    dtype: torch.dtype | None = None,
    known: dict[Direction, Statistics] | None = None,
) -> dict[Direction, Statistics]:
    """Statistics of x [rows, cols] whose scales span ranks, in at most one MAX all-reduce.

    rows_are_cut:  scales that span all rows are shared; else cols are, and only scales of the whole
                   tensor are shared (scales of a row are each rank's own).
    dtype:         that encoders see; None: x's.
    known:         of these rows, where they were taken already.
    """
    known = known or {}
    crossing = {}
    for d in gathered_directions(hybrid, frozenset(directions)) if group.size() > 1 else ():
        encoding = hybrid.encodings[d]
        spans_rows = encoding.fmt.has_scales and encoding.fmt.dims(d)[0] is None
        if encoding.fmt.spans_tensor or (rows_are_cut and spans_rows):
            crossing[d] = encoding
    if not crossing:
        return {}
    own, unknown = dict(known), {d: e for d, e in crossing.items() if d not in known}
    if unknown:
        own |= zip(unknown, dispatch.statistics(x, list(unknown.values()), dtype=dtype))
    counters.add("amax all-reduce", "activations")
    reduce = _reduce_amaxes_in_graph if opaque.is_tracing() else reduce_amaxes
    shared = share_amaxes([(e, own[d]) for d, e in crossing.items()], group, reduce)
    return dict(zip(crossing, shared))


def _reduce_amaxes_in_graph(amaxes: Sequence[Tensor], group: Any) -> list[Tensor]:
    """`scaling.reduce_amaxes` in functional operators, each amax once."""
    alike = list({id(a): a for a in amaxes}.values())
    bits = torch.cat([a.reshape(-1) for a in alike]).view(torch.int32)
    reduced = torch_compat.all_reduce(bits, "max", group).view(torch.float32)
    parts = reduced.split([a.numel() for a in alike])
    by_id = {id(a): part.view(a.shape) for a, part in zip(alike, parts)}
    return [by_id[id(a)] for a in amaxes]


# Moving rows #


class Arriving:
    """Buffers [outer * n, ..] of every rank, gathered to [outer * R * n, ..] in one launch.

    in_backward:  a graph sends in its backward. torch's partitioner would move a gather that
                  depends on no gradient into the forward, and gather again in the backward.
    """

    def __init__(self, buffers: dict[str, Tensor], cut: SequenceCut, in_backward: bool = False):
        self.cut, self.sent = cut, {name: b.contiguous() for name, b in buffers.items()}
        self.works: list[dist.Work] = []
        traced = opaque.is_tracing() and cut.ranks > 1
        empty = {name: b for name, b in self.sent.items() if not (traced and b.numel())}
        self.received = {name: b.new_empty(cut.ranks, *b.shape) for name, b in empty.items()}
        if cut.ranks == 1:
            self.received = {name: b[None] for name, b in self.sent.items()}
        elif traced:
            with torch_compat.keep_in_backward(in_backward):
                self.received |= {
                    n: torch_compat.start_all_gather(_bytes(b), cut.group)
                    for n, b in self.sent.items()
                    if b.numel()
                }
        elif moving := [(self.received[name], b) for name, b in self.sent.items() if b.numel()]:
            as_bytes = [(_bytes(received), _bytes(b)) for received, b in moving]
            self.works = torch_compat.all_gather_rows(as_bytes, cut.group)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.received.values())

    def wait(self) -> dict[str, Tensor]:
        """The rows in the order of the whole tensor; a copy unless the cut dim is the first."""
        for work in self.works:
            work.wait()
        if opaque.is_tracing() and self.cut.ranks > 1:
            self.received |= {
                n: torch_compat.wait(self.received[n]).view(b.dtype).view(self.cut.ranks, *b.shape)
                for n, b in self.sent.items()
                if b.numel()
            }
        self.works, self.sent = [], {}
        return {name: self._in_order(b) for name, b in self.received.items()}

    def _in_order(self, received: Tensor) -> Tensor:
        (_, _, *cols), outer = received.shape, self.cut.outer
        if outer > 1 and received.numel():
            received = received.view(self.cut.ranks, outer, -1, *cols).transpose(0, 1)
        return received.reshape(-1, *cols)


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


class Gather:
    """The storages of Q(all_gather(x)); the constructor starts, `take` waits for a direction.

    x:         this rank's rows [outer * chunk, K]; or a `Storage` of them that travels.
    phase:     "forward" or "backward", for the counts, and for what a graph sends in its backward.
    key:       int64 [5] random key of the whole tensor.
    factors:   of delayed sides; see `HybridQuantizer.storages`.
    statistics:  that ranks shared before (`shared_statistics`); None: they are shared here.
    rank:      int64 [], this rank's place in the group, so that graphs are alike; None: a number.

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
    ):
        self.hybrid, self.directions, self.cut, self.phase = hybrid, tuple(directions), cut, phase
        self.key, self.factors, self._in_backward = key, factors, phase == "backward"
        self.amaxes: dict[Direction, Tensor] = {}
        self._made: dict[Direction, Storage] = {}
        self._whole: Arriving | None = None
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
            self._whole = Arriving({"data": x}, cut, self._in_backward)
            self._count("both", "high precision", self._whole)

    def _send(self, storage: Storage) -> None:
        shards = {n for n, p in storage.placements(self.cut.chunk).items() if p is Placement.SHARD}
        moving = Arriving(
            {n: b for n, b in storage.buffers().items() if n in shards}, self.cut, self._in_backward
        )
        self._count(storage.direction.value, storage.fmt.name, moving)
        self._moving[storage.direction] = storage, moving

    def _count(self, direction: str, fmt: str, one: Arriving) -> None:
        if self.cut.ranks > 1 and not opaque.is_tracing():
            counters.add("sequence gather", (self.phase, direction, fmt), one.nbytes)

    def take(self, direction: Direction) -> Storage:
        """The whole storage of a direction, compact or as `quantize` makes it."""
        if direction not in self._made:
            if self._whole is not None:
                whole = self._whole.wait()["data"]
                self._made, self.amaxes = self.hybrid.storages(
                    whole, self.directions, key=self.key, factors=self.factors
                )
                self._whole = None
            elif direction in self._moving:
                local, moving = self._moving.pop(direction)
                whole = local.shape[0] * self.cut.ranks, local.shape[1]
                self._made[direction] = replace(local, shape=whole, **moving.wait())
            else:  # from the rowwise codes
                self._made[direction] = self.hybrid.columnwise_of(self.take(ROWWISE), self.key)
        return self._made[direction]


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
        self.work, self.result, self.cut = None, y, cut
        if cut.ranks > 1:
            rows = y.view(cut.outer, cut.ranks, -1) if y.numel() else y
            self.sent = (rows.transpose(0, 1) if cut.outer > 1 else rows).contiguous()
            if y.numel() and opaque.is_tracing():
                self.result = torch_compat.start_reduce_scatter(self.sent.view(-1), cut.group)
                return
            self.result = y.new_empty(cut.rows, y.shape[1]) if out is None else out
            if y.numel():
                self.work = torch_compat.reduce_scatter_rows(
                    self.result.view(-1), self.sent.view(-1), cut.group
                )

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        elif opaque.is_tracing() and self.cut.ranks > 1 and self.result.dim() == 1:
            self.result = torch_compat.wait(self.result).view(self.cut.rows, -1)
        return self.result


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

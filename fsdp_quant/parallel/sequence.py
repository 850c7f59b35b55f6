"""Sequence parallelism: activations gathered along the sequence as codes, partial sums scattered along it.

[Note: one rule]
    x [.., S / R, .., K] on each rank  ->  the storages of Q(all_gather(x))
A direction travels as compact codes where no block of its codes (and no rotation) reaches over the seam between two ranks'
rows: rowwise blocks never do, columnwise blocks do not where a rank's rows are a multiple of the block. Scales that span all
rows follow from amaxes that the ranks share first. Otherwise x is gathered in high precision, once, and quantized whole. Either
way the bytes are those of quantizing the gathered tensor. Sums stay in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, SCALE_BYTES, Direction, Encoding
from ..ops import dispatch
from ..ops.dispatch import Statistics
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..scaling import share_amaxes
from ..storage import Placement, Storage, scale_placement
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """A tensor whose ranks hold equal pieces of one dim: rows [outer, R, chunk, cols], of which a rank has [outer, chunk, cols].

    shape:  this rank's, [.., S / R, .., cols].
    dim:    that is cut; not the last.
    """

    group: dist.ProcessGroup
    shape: tuple[int, ...]
    dim: int

    @classmethod
    def of_whole(cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: str = "sequence") -> SequenceCut:
        """The cut of a tensor of `shape` that every rank holds a part of. Raises ValueError where R does not divide its dim."""
        dim = _checked_dim(shape, dim, name)
        if shape[dim] % group.size():
            raise ValueError(
                f"{name}: dim {dim} of {list(shape)} is {shape[dim]}, which the {group.size()} ranks of the group do not divide; "
                f"pad it to a multiple of {group.size()}"
            )
        return cls(group, (*shape[:dim], shape[dim] // group.size(), *shape[dim + 1 :]), dim)

    @classmethod
    def of_local(cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: str = "sequence") -> SequenceCut:
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
        return (*self.shape[: self.dim], self.shape[self.dim] * self.ranks, *self.shape[self.dim + 1 :])

    def travels(self, encoding: Encoding) -> bool:
        """Codes of the pieces are those of the whole (see the note)."""
        return self.ranks == 1 or codes_travel(encoding, self.chunk, self.outer == 1)

    def all_travel(self, hybrid: HybridQuantizer, directions) -> bool:
        return all(self.travels(hybrid.encodings[d]) for d in gathered_directions(hybrid, frozenset(directions)))


def codes_travel(encoding: Encoding, multiple: int, in_one_piece: bool) -> bool:
    """Codes of pieces, each of a multiple of so many rows, are those of the whole (see the note).

    in_one_piece:  of a rank's rows, in the order of ranks: random bits are keyed by the whole's rows.
    """
    if not encoding.fmt.is_quantized:
        return True
    return (in_one_piece or not encoding.stochastic) and multiple % encoding.fmt.row_alignment(encoding.direction) == 0


def travelling_bytes(encoding: Encoding, rows: int, cols: int, dtype: torch.dtype, chunk: int) -> int:
    """Bytes of the buffers of [rows, cols] that travel, where pieces have multiples of `chunk` rows."""
    fmt, d = encoding.fmt, encoding.direction
    size = rows * fmt.row_bytes(cols, dtype)
    if fmt.scale != "none" and scale_placement(fmt, d, chunk) is Placement.SHARD:
        size += prod(fmt.scale_shape((rows, cols), d)) * SCALE_BYTES[fmt.scale]
    return size


def _checked_dim(shape: tuple[int, ...], dim: int, name: str) -> int:
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(f"{name}: dim {dim} of {list(shape)} cannot be cut; give one before the last, which products contract")
    return dim % len(shape)


# What ranks share before they encode #

def shared_statistics(
    x: Tensor, hybrid: HybridQuantizer, directions, group: dist.ProcessGroup, rows_are_cut: bool
) -> dict[Direction, Statistics]:
    """Statistics of x [rows, cols] whose scales span ranks, in at most one MAX all-reduce.

    rows_are_cut:  scales that span all rows are shared; else cols are, and only scales of the whole tensor are shared (scales
                   of a row are each rank's own).
    """
    crossing = {}
    for d in gathered_directions(hybrid, frozenset(directions)) if group.size() > 1 else ():
        encoding = hybrid.encodings[d]
        spans_rows = encoding.fmt.scale != "none" and encoding.fmt.dims(d)[0] is None
        if encoding.fmt.spans_tensor or (rows_are_cut and spans_rows):
            crossing[d] = encoding
    if not crossing:
        return {}
    found = dispatch.statistics(x, list(crossing.values()))
    counters.add("amax all-reduce", "activations")
    return dict(zip(crossing, share_amaxes(list(zip(crossing.values(), found)), group)))


# Moving rows #

class Arriving:
    """Buffers [outer * n, ..] of every rank, on their way to [outer * R * n, ..] on all, in one launch."""

    def __init__(self, buffers: dict[str, Tensor], cut: SequenceCut):
        self.cut, self.sent = cut, {name: b.contiguous() for name, b in buffers.items()}
        self.received = {name: b.new_empty(cut.ranks, *b.shape) for name, b in self.sent.items()}
        self.works: list[dist.Work] = []
        if cut.ranks == 1:
            self.received = {name: b[None] for name, b in self.sent.items()}
        elif moving := [(self.received[name], b) for name, b in self.sent.items() if b.numel()]:
            as_bytes = [tuple(t.view(-1).view(torch.uint8) for t in pair) for pair in moving]
            self.works = torch_compat.all_gather_rows(as_bytes, cut.group)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.received.values())

    def wait(self) -> dict[str, Tensor]:
        """The rows in the order of the whole tensor; without a copy where the cut dim is the first."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], {}
        return {name: self._in_order(b) for name, b in self.received.items()}

    def _in_order(self, received: Tensor) -> Tensor:
        shape, outer = received.shape[1:], self.cut.outer
        rows = received.view(self.cut.ranks, outer, -1, *shape[1:]) if received.numel() else received
        return (rows.transpose(0, 1) if outer > 1 else rows).reshape(-1, *shape[1:])


class Gather:
    """The storages of Q(all_gather(x)) for some directions: started when made, waited for a direction at a time.

    x:         this rank's rows [outer * chunk, K]; or a `Storage` of them that travels.
    phase:     "forward" or "backward", for the counts.
    key:       int64 [5] random key of the whole tensor.
    factors:   of delayed sides; see `HybridQuantizer.storages`.

    amaxes:    of delayed sides, by direction; known once something arrived in high precision, else at once.
    """

    def __init__(
        self, x: Tensor | Storage, hybrid: HybridQuantizer, directions, cut: SequenceCut, phase: str, *,
        key: Tensor | None = None, factors: dict[Direction, Tensor] | None = None,
    ):
        self.hybrid, self.directions, self.cut, self.phase = hybrid, tuple(directions), cut, phase
        self.key, self.factors = key, factors
        self.amaxes: dict[Direction, Tensor] = {}
        self._made: dict[Direction, Storage] = {}
        self._whole: Arriving | None = None
        self._moving: dict[Direction, tuple[Storage, Arriving]] = {}
        if isinstance(x, Storage):
            self._send(x)
        elif cut.all_travel(hybrid, directions):
            self.sent, self.amaxes = encoded_rows(x, hybrid, directions, cut, key, factors)
            for d in gathered_directions(hybrid, frozenset(directions)):
                self._send(self.sent[d])
        else:
            self._whole = Arriving({"data": x}, cut)
            self._count("both", "high precision", self._whole)

    def _send(self, storage: Storage) -> None:
        shards = {n for n, p in storage.placements(self.cut.chunk).items() if p is Placement.SHARD}
        moving = Arriving({n: b for n, b in storage.buffers().items() if n in shards}, self.cut)
        self._count(storage.direction.value, storage.fmt.name, moving)
        self._moving[storage.direction] = storage, moving

    def _count(self, direction: str, fmt: str, one: Arriving) -> None:
        if self.cut.ranks > 1:
            counters.add("sequence gather", (self.phase, direction, fmt), one.nbytes)

    def take(self, direction: Direction) -> Storage:
        """The whole storage of a direction, compact or as `quantize` makes it."""
        if direction not in self._made:
            if self._whole is not None:
                whole = self._whole.wait()["data"]
                self._made, self.amaxes = self.hybrid.storages(whole, self.directions, key=self.key, factors=self.factors)
                self._whole = None
            elif direction in self._moving:
                local, moving = self._moving.pop(direction)
                whole = local.shape[0] * self.cut.ranks, local.shape[1]
                self._made[direction] = replace(local, shape=whole, **moving.wait())
            else:  # from the rowwise codes
                self._made[direction] = self.hybrid.columnwise_of(self.take(ROWWISE), self.key)
        return self._made[direction]


def encoded_rows(
    x: Tensor, hybrid: HybridQuantizer, directions, cut: SequenceCut, key: Tensor | None = None,
    factors: dict[Direction, Tensor] | None = None,
) -> tuple[dict[Direction, Storage], dict[Direction, Tensor]]:
    """(compact storages of this rank's rows, amaxes of delayed sides), with the scales that the whole tensor has."""
    encoded = gathered_directions(hybrid, frozenset(directions))
    if key is not None and cut.ranks > 1:
        key = key.clone()
        key[4] += cut.group.rank() * cut.chunk
    statistics = shared_statistics(x, hybrid, directions, cut.group, rows_are_cut=True)
    return hybrid.storages(x, encoded, key=key, factors=factors, statistics=statistics)


class Scattering:
    """Partial sums [outer * R * chunk, N] on their way to this rank's rows of the sum over ranks."""

    def __init__(self, y: Tensor, cut: SequenceCut, out: Tensor | None = None):
        self.work, self.result = None, y
        if cut.ranks > 1:
            rows = y.view(cut.outer, cut.ranks, -1) if y.numel() else y
            self.sent = (rows.transpose(0, 1) if cut.outer > 1 else rows).contiguous()
            self.result = y.new_empty(cut.rows, y.shape[1]) if out is None else out
            if y.numel():
                self.work = torch_compat.reduce_scatter_rows(self.result.view(-1), self.sent.view(-1), cut.group)

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        return self.result


def scattered_product(multiply: Callable[..., Tensor], codes: Storage, cut: SequenceCut, pieces: int) -> Tensor:
    """This rank's rows of the sum over ranks of multiply(codes), [outer * R * chunk, N] on every rank.

    multiply:  of a storage; with out=, into it.
    pieces:    of each rank's rows: one is scattered while the next is multiplied. Rows of a product are the product of rows,
               so the sums are the same ones. All at once where the codes do not come apart (`Storage.operand_rows`).
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


# Functions of their own #

class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hybrid, directions, cut, key):
        ctx.cut = cut
        gather = Gather(as_rows(x.detach()), hybrid, directions, cut, "forward", key=key)
        made = {d: gather.take(d) for d in directions}
        return QuantizedTensor(made.get(ROWWISE), made.get(COLUMNWISE), shape=cut.whole_shape)

    @staticmethod
    def backward(ctx, dy):
        return Scattering(dy.reshape(-1, dy.shape[-1]).contiguous(), ctx.cut).wait().view(ctx.cut.shape), None, None, None, None


def gather_sequence(
    x: Tensor, hybrid, group: dist.ProcessGroup, dim: int = 0, directions=tuple(Direction), *, key: Tensor | None = None
) -> QuantizedTensor:
    """The bytes of quantizing all_gather(x), moved as codes wherever no block reaches over the seam (see the note).

    x:           [.., S / R, .., K], the same shape on every rank of `group`, which must all call it.
    hybrid:      `HybridQuantizer`, `Quantizer`, `Format` or a format's name, current scaling.
    dim:         that is gathered.
    directions:  that are wanted; None of the others travels.
    key:         int64 [5] random key of the whole tensor, for stochastic rounding.
    returns:     `QuantizedTensor` [.., S, .., K]; its gradient is summed over the ranks and scattered along `dim`.

    Raises ValueError for a dim that is not there, and for stochastic rounding without a key: ranks would not agree.
    """
    hybrid = hybrid_of(hybrid)
    if key is None and hybrid.is_stochastic:
        raise ValueError(f"gather_sequence({hybrid}) rounds stochastically: give key=, so that every rank has the same bits")
    cut = SequenceCut.of_local(tuple(x.shape), dim, group, "gather_sequence")
    return _GatherSequence.apply(x, hybrid, tuple(directions), cut, key)


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, cut):
        ctx.cut = cut
        return Scattering(y.reshape(-1, y.shape[-1]).contiguous(), cut).wait().view(cut.shape)

    @staticmethod
    def backward(ctx, dy):
        whole = Arriving({"data": dy.reshape(-1, dy.shape[-1])}, ctx.cut)
        counters.add("sequence gather", ("backward", "both", "high precision"), whole.nbytes)
        return whole.wait()["data"].view(ctx.cut.whole_shape), None


def reduce_scatter_sequence(y: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The sum of y over the ranks of `group`, of which each keeps its piece of `dim`; in y's dtype.

    y:        [.., S, .., N] on every rank; all must call it.
    returns:  [.., S / R, .., N]; its gradient is gathered in high precision.

    Raises ValueError where R does not divide S.
    """
    return _ReduceScatterSequence.apply(y, SequenceCut.of_whole(tuple(y.shape), dim, group, "reduce_scatter_sequence"))

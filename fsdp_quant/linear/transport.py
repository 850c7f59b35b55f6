# SPDX-License-Identifier: Apache-2.0
"""What the ranks that share a linear layer exchange: statistics, rows and sums.

The same code runs in eager mode and while a graph is traced. There the transport is functional
collectives, which the graph holds.

[Note: one rule]
    x [.., S / R, .., K] on each rank  ->  the storages of Q(all_gather(x))
A direction travels as compact codes where no block of its codes (and no rotation) reaches over the
seam between two ranks' rows: rowwise blocks never do, columnwise blocks do not where a rank's rows
are a multiple of the block. Scales that span all rows follow from amaxes that the ranks share
first. Otherwise x is gathered in high precision, once, and quantized whole. Either way the bytes
are those of quantizing the gathered tensor. Sums stay in high precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import bytes_of, counters
from ..encoded_matrix import EncodedMatrix
from ..formats import ROWWISE, Direction
from ..ops import dispatch, opaque
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT, flat_bytes
from ..ops.reference import known
from ..quantizer import HybridQuantizer
from ..scaling import reduce_amaxes, share_amaxes
from ..storage import Placement, Storage, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from .cut import SequenceCut

Result = TypeVar("Result")

# Transport: one way to start and to wait #


class _Works:
    """Collectives of eager mode. Each starts, and returns the function that waits."""

    @staticmethod
    def all_gather(
        buffers: Sequence[Tensor], group: dist.ProcessGroup, in_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """Gather each buffer from every rank: [ranks, *shape]. One launch under NCCL."""
        gathered = [b.new_empty(group.size(), *b.shape) for b in buffers]
        pairs = [(flat_bytes(g), flat_bytes(b)) for g, b in zip(gathered, buffers) if b.numel()]
        return _after(torch_compat.all_gather_rows(pairs, group) if pairs else [], gathered)

    @staticmethod
    def reduce_scatter(
        y: Tensor, out: Tensor | None, group: dist.ProcessGroup
    ) -> Callable[[], Tensor]:
        """Sum y [ranks, ..] over the ranks, and return this rank's piece; out: where to."""
        scattered = torch.empty_like(y[0]) if out is None else out
        work = torch_compat.reduce_scatter_rows(scattered.view(-1), y.view(-1), group)
        return _after([work], scattered)

    @staticmethod
    def all_reduce(y: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """Sum y over the ranks, in place."""
        work = dist.all_reduce(y, group=group, async_op=True)
        return _after([known(work, "the work of an all-reduce")], y)

    reduce_amaxes = staticmethod(reduce_amaxes)


def _after(works: Sequence[dist.Work], result: Result) -> Callable[[], Result]:
    """Return the function that waits for collectives and returns their result."""

    def wait() -> Result:
        for work in works:
            work.wait()
        return result

    return wait


class _Functional:
    """The same collectives as functional operators, which a graph holds."""

    @staticmethod
    def all_gather(
        buffers: Sequence[Tensor], group: dist.ProcessGroup, in_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """in_backward: torch's partitioner would move a gather that depends on no gradient into the
        forward, and gather again in the backward. It sends [1, n], as fx_graph_cse would make it
        the forward's gather of the same codes, and a graph would keep the rows of all ranks."""
        with torch_compat.keep_in_backward(in_backward):
            flat = [b.view(-1).view(torch.uint8) for b in buffers]  # a graph has no strides of ours
            sent = [b[None] if in_backward else b for b in flat]
            started = [torch_compat.start_all_gather(b, group) if b.numel() else None for b in sent]

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


def start_sum(y: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to sum y over ranks; return the function that waits. Eager: the sum replaces y."""
    return transport().all_reduce(y, group) if group.size() > 1 else lambda: y


# What ranks share before they encode #


# In graphs, amaxes are torch operators, which a compiler fuses with what writes x: by rows, since
# inductor splits a reduction of all values where it likes, and fuses it with no loop over rows and
# columns. The kernel of `quantize` computes the largest, without a launch of its own.
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
    """Return the statistics of x [rows, cols] that encoders are given, by direction, after at most
    one MAX all-reduce of those whose scales span ranks.

    group:         ranks that share x; None: they do not.
    rows_are_cut:  scales that span all rows are shared; else cols are, and only scales of the whole
                   tensor are shared (scales of a row are each rank's own).
    dtype:         that encoders see; None: x's.
    tensors:       what x is, for the counts.
    """
    shares = group is not None and group.size() > 1
    statistics = _statistics_in_graph(hybrid, x, directions, shares, dtype)
    if not shares or x.numel() == 0:
        return statistics
    crossing = {}
    for d in gathered_directions(hybrid, frozenset(directions)):
        encoding = hybrid.encodings[d]
        if encoding.fmt.spans_tensor or (rows_are_cut and encoding.fmt.spans_rows(d)):
            crossing[d] = encoding
    if not crossing:
        return statistics
    if missing := {d: e for d, e in crossing.items() if d not in statistics}:
        statistics |= zip(missing, dispatch.statistics(x, list(missing.values()), dtype=dtype))
    counters.add("amax all-reduce", tensors)
    by_rank = [(e, statistics[d]) for d, e in crossing.items()]
    statistics |= zip(crossing, share_amaxes(by_rank, group, transport().reduce_amaxes))
    return statistics


# Moving rows #


class Arriving:
    """Buffers [outer * n, ..] of every rank, gathered to [outer * R * n, ..] in one launch.

    in_backward:  a graph sends in its backward.
    """

    def __init__(self, buffers: dict[str, Tensor], cut: SequenceCut, in_backward: bool = False):
        self._names, self._cut = list(buffers), cut
        sent = [b.contiguous() for b in buffers.values()]
        self.nbytes = cut.ranks * sum(map(bytes_of, sent))
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
    statistics:  that ranks shared before (`statistics_of`); None: they are shared here.
    rank:      int64 [], this rank's place in the group, so that graphs are alike; None: a number.
    layouts:   in which products read each direction (`ops.layout`); others are compact.
    kept:      directions of which `local` has codes too.

    local:     codes of this rank's rows with scales of the whole, if they were encoded here.
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
        kept: Sequence[Direction] = (),
    ):
        self.hybrid, self.directions, self.cut, self.phase = hybrid, tuple(directions), cut, phase
        self.layouts = layouts or {}
        self._operands: dict[tuple[Direction, str], EncodedMatrix] = {}
        self.key, self.factors, self._in_backward = key, factors, phase == "backward"
        self.local: dict[Direction, Storage] = {}
        self.amaxes: dict[Direction, Tensor] = {}
        self._storages: dict[Direction, Storage] = {}
        self._high_precision: Arriving | None = None
        self._moving: dict[Direction, tuple[Storage, Arriving]] = {}
        if isinstance(x, Storage):
            self._send(x)
            return
        travels = cut.all_travel(hybrid, directions)
        sent = gathered_directions(hybrid, frozenset(directions)) if travels else ()
        if encoded := gathered_directions(hybrid, frozenset([*sent, *kept])):
            self._encode(x, encoded, statistics, rank)
        for d in sent:
            self._send(self.local[d])
        if not travels:
            self._high_precision = Arriving({"data": x}, cut, self._in_backward)
            self._count("both", "high precision", self._high_precision)

    def _encode(
        self,
        x: Tensor,
        directions: Sequence[Direction],
        statistics: dict[Direction, Statistics] | None,
        rank: Tensor | None,
    ) -> None:
        cut, key = self.cut, self.key
        if key is not None and cut.ranks > 1:
            key = key.clone()
            key[4] += (cut.group.rank() if rank is None else rank) * cut.chunk
        if statistics is None:
            statistics = statistics_of(self.hybrid, x, directions, cut.group, rows_are_cut=True)
        self.local, self.amaxes = self.hybrid.storages(
            x, directions, key=key, factors=self.factors, statistics=statistics
        )

    def _send(self, storage: Storage) -> None:
        shards = {n for n, p in storage.placements(self.cut.chunk).items() if p is Placement.SHARD}
        buffers = {n: b for n, b in storage.buffers().items() if n in shards}
        moving = Arriving(buffers, self.cut, self._in_backward)
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
            self._storages, amaxes = self.hybrid.storages(
                x, self.directions, key=self.key, factors=self.factors
            )
            self.amaxes |= amaxes
        elif direction in self._moving:
            local, moving = self._moving.pop(direction)
            shape = local.shape[0] * self.cut.ranks, local.shape[1]
            self._storages[direction] = replace(local, shape=shape, **moving.wait())
        else:
            rowwise = self._whole_storage(ROWWISE)
            self._storages[direction] = self.hybrid.columnwise_of(rowwise, self.key)
        return self._storages[direction]


def start_scatter(y: Tensor, cut: SequenceCut, out: Tensor | None = None) -> Callable[[], Tensor]:
    """Start to reduce-scatter partial sums y [outer * R * chunk, N]; return the function that waits
    for this rank's rows of the sum. out: where to."""
    shape = cut.rows, y.shape[1]
    if cut.ranks == 1:
        return lambda: y
    if not y.numel():
        return lambda: y.new_empty(shape)
    rows = y.view(cut.outer, cut.ranks, cut.chunk, -1).transpose(0, 1).contiguous()
    target = None if out is None else out.view(rows.shape[1:])
    wait = transport().reduce_scatter(rows, target, cut.group)
    return lambda: wait().view(shape)


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
        return start_scatter(multiply(codes), cut)()
    piece, cols = SequenceCut(cut.group, (n, cut.shape[-1]), 0), cut.shape[-1]
    result, waits = codes.data.new_empty(cut.chunk, cols, dtype=codes.dtype), []
    for start in range(0, cut.chunk, n):
        y = result.new_empty(cut.ranks, n, cols)
        for rank, out in enumerate(y):
            multiply(codes.operand_rows(rank * cut.chunk + start, n), out=out)
        waits.append(start_scatter(y.view(-1, cols), piece, result.narrow(0, start, n)))
    for wait in waits:
        wait()
    return result

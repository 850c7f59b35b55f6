# SPDX-License-Identifier: Apache-2.0
"""Which rows each rank sends to each expert, and their all-to-all."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.reference import known
from ..tensor import torch_compat
from ..tensor.agreement import agree

_INT31 = 2**31 - 1


class Rows(NamedTuple):
    """Numbers of rows. counts: [E] that this rank sends, by expert. arriving: [R][E / R] that ranks
    send to the experts of this rank. sent, received: [R] to each rank, from each rank. of_rank,
    of_experts: of all tokens of this rank, and of its experts."""

    counts: list[int]
    arriving: list[list[int]]
    sent: list[int]
    received: list[int]
    of_rank: int
    of_experts: int


@dataclass(eq=False)
class TokenRoute:
    """Rows that each rank of `group` sends to each expert; ranks hold equal numbers of experts, in
    order. Its counts are on their way when it is made: the host waits for them once, where `rows`
    is read first, which raises what `route_tokens` says.
    """

    group: dist.ProcessGroup
    _device: torch.device
    _read: Callable[[], Rows]

    @functools.cached_property
    def rows(self) -> Rows:
        return self._read()

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def counts(self) -> list[int]:
        """[E] of this rank's tokens, by expert."""
        return self.rows.counts

    @property
    def arriving(self) -> list[list[int]]:
        """[R][E / R] what ranks send to the experts of this rank."""
        return self.rows.arriving

    @property
    def splits(self) -> list[int]:
        """[E / R] rows of each expert of this rank: the splits of `fq.GroupedLinear`."""
        return [*map(sum, zip(*self.arriving))]

    @property
    def ends(self) -> Tensor:
        """int64 [E / R] on the device, the row behind the last of each expert of this rank."""
        return self._pieces[2]

    def spread(
        self, buffers: Sequence[Tensor], tokens: Tensor | None = None
    ) -> Callable[[], list[Tensor]]:
        """Start one all-to-all. Return the function that waits for it, and returns what the ranks'
        buffers hold for the experts of this rank, by expert, then by rank.

        buffers:  [rows, ..], row-major.
        tokens:   int64, the row of the buffers of each row that is sent; None: they are in order.
        """
        parts = _as_words(buffers)
        packed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        packed = packed if tokens is None else packed.index_select(0, tokens)
        received = packed.new_empty(self.rows.of_experts, packed.shape[1])
        wait = self._exchange(received, packed, self.rows.received, self.rows.sent)
        widths = [part.shape[1] for part in parts]

        def arrived() -> list[Tensor]:
            wait()
            return [
                self._ordered(rows).view(buffer.dtype).view(-1, *buffer.shape[1:])
                for rows, buffer in zip(received.split(widths, 1), buffers)
            ]

        return arrived

    def returned(self, y: Tensor) -> Callable[[], Tensor]:
        """Start to send rows of y [sum of splits, N], sorted by expert, then by rank, back to the
        ranks of their tokens. Return the function that waits for those of this rank's, [M, N]."""
        # no view: users may write in place what FSDP2 hooks
        returned = y.new_empty(self.rows.of_rank, y.shape[1])
        rows, into = _as_words([y, returned])
        ordered = self._ordered(rows, back=True)
        wait = self._exchange(into, ordered, self.rows.sent, self.rows.received)

        def arrived() -> Tensor:
            wait()
            return returned

        return arrived

    @functools.cached_property
    def _pieces(self) -> Sequence[Tensor]:
        """Of the rows of each rank for each expert, by expert, on the device: where they end, how
        much later they end in the order of ranks, and `ends`. One copy of what the host has read,
        which waits for nothing."""
        by_rank = [*accumulate(itertools.chain(*self.rows.arriving))]
        by_expert = [*accumulate(itertools.chain(*zip(*self.rows.arriving)))]
        experts, is_cuda = len(self.rows.arriving[0]), self._device.type == "cuda"
        places = itertools.chain(*(by_rank[e::experts] for e in range(experts)))
        ends = by_expert[self.ranks - 1 :: self.ranks]
        numbers = [*by_expert, *map(operator.sub, places, by_expert), *ends]
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        sizes = len(by_expert), len(by_expert), experts
        return host.to(self._device, non_blocking=True).split(sizes)

    @functools.cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """The row in the order of ranks of each row by expert, and the other way: int64 [rows]."""
        ends, shifts, _ = self._pieces
        places = torch.arange(self.rows.of_experts, dtype=torch.int64, device=self._device)
        order = places + shifts.index_select(0, torch.searchsorted(ends, places, right=True))
        return order, torch.empty_like(order).index_copy_(0, order, places)

    def _ordered(self, rows: Tensor, back: bool = False) -> Tensor:
        """Sort rows, a piece of each rank for each expert, from the order of ranks by expert; back:
        the other way."""
        if 1 in (self.ranks, len(self.rows.arriving[0])):
            return rows.contiguous()
        return rows.index_select(0, self._orders[back])

    def _exchange(
        self, into: Tensor, rows: Tensor, arriving: list[int], sent: list[int]
    ) -> Callable[[], object]:
        """Start to send each rank so many rows, and to write what comes to `into`; return the
        function that waits for it."""
        if self.ranks == 1:
            return functools.partial(into.copy_, rows)
        work = dist.all_to_all_single(into, rows, arriving, sent, self.group, async_op=True)
        return known(work, "a rank of the group").wait


def row_bytes(t: Tensor) -> int:
    return t.itemsize * math.prod(t.shape[1:])


def _as_words(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Rows [M, ..] as rows of 8-byte words where they can be, which torch copies faster, else of
    bytes."""
    rows = [t.contiguous().view(t.shape[0], math.prod(t.shape[1:])) for t in buffers]
    fits = all((t.shape[1] | t.storage_offset()) * t.itemsize % 8 == 0 for t in rows)
    return [t.view(torch.int64 if fits else torch.uint8) for t in rows]


def route_tokens(
    splits: Sequence[int] | Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    travels: str = "",
    experts: int | None = None,
    name: str = "dispatch_tokens",
    routes: Sequence[Tensor] = (),
) -> TokenRoute:
    """Return the route of x [M, K], whose rows are sorted by expert; every rank of `group` must
    call it.

    splits:   as of `fq.GroupedLinear`, of the experts of all ranks: counts on the host, or int
              tensor [E], the row behind each expert's last. One small all-gather exchanges them,
              and the host reads all ranks': sizes of an uneven all-to-all are the host's.
    experts:  of all ranks; default: as many as splits has.
    travels:  text that must be the same on every rank, as must K and the dtype.
    routes:   of x [T, K], as of `fq.GroupedLinear`; empty: x has the rows.

    Raises ValueError on every rank, before any token moves: for experts that the ranks do not
    divide; where the route is read, for splits of one rank that are not of E experts or do not add
    up to its rows, routes of other tokens, ranks that would send different things. RuntimeError
    inside a capture of a CUDA graph.
    """
    experts, ranks = experts or len(splits), group.size()
    if not experts or experts % ranks:
        raise ValueError(
            f"{name}: {experts} experts over {ranks} ranks, which do not divide them; "
            f"choose a multiple of {ranks}"
        )
    if torch_compat.is_captured(x):
        raise RuntimeError(
            f"{name}: the host reads how many tokens ranks send each other, which no CUDA graph "
            "captures; run this step eagerly, or capture what is around it"
        )
    tokens = rows = x.shape[0]
    fits = True
    if routes:
        order, back = routes
        rows = order.numel()
        fits = back.dim() == 2 and back.shape[0] == tokens and back.numel() == rows
    text, checksum = _compared(experts, x.shape[1], x.dtype, travels)
    sent = _sent(checksum << 31 | rows, splits if fits else (), experts, x.device)
    received = sent
    if ranks > 1:
        received = sent.new_empty(ranks * (experts + 1))
        torch_compat.all_gather(received, sent, group)
    numbers = _on_host(received.view(ranks, -1))

    def read() -> Rows:
        ends, rank = numbers(), group.rank()  # the one read
        facts = [of_rank[0] for of_rank in ends]
        for of_rank in ends:
            of_rank[0] = 0
        is_wrong = [of[-1] != fact & _INT31 or of != sorted(of) for of, fact in zip(ends, facts)]
        if any(is_wrong):
            error = ValueError(
                f"{name}: the token splits {splits} of {rows} rows are not of {experts} experts, "
                "or do not add up to its rows; give counts, none negative, that add up to the "
                "input's rows, or a tensor of the row behind each expert's last"
                if fits
                else f"{name}: routes are {[list(t.shape) for t in routes]} of {tokens} "
                "tokens; wanted order [T * k] and back [T, k]"
            )
            agree({}, [group], error if is_wrong[rank] else None)
        if len({fact >> 31 for fact in facts}) > 1:
            remedy = "call it with the same experts, columns, dtype and quantizer on every rank"
            sentence = "ranks would send each other different tokens"
            agree({name: text}, [group], None, remedy, sentence)
        first, last = (experts * r // ranks for r in (rank, rank + 1))
        counts, arriving = _sizes(ends[rank]), [_sizes(of[first : last + 1]) for of in ends]
        come_from = [of[last] - of[first] for of in ends]
        sent_to = _sizes(ends[rank][:: experts // ranks])
        return Rows(counts, arriving, sent_to, come_from, rows, sum(come_from))

    return TokenRoute(group, x.device, read)


def _sizes(ends: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(ends)]


@functools.cache
def _compared(experts: int, columns: int, dtype: torch.dtype, travels: str) -> tuple[str, int]:
    """The text that ranks compare, and its checksum."""
    text = f"of {experts} experts, {columns} columns, {dtype} {travels}"
    return text, zlib.crc32(text.encode())


def _on_host(t: Tensor) -> Callable[[], list]:
    """Start to copy t to the host; return the function that waits for it."""
    host = t.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event() if t.device.type == "cuda" else None
    if arrived is not None:
        arrived.record(torch.cuda.current_stream(t.device))

    def wait() -> list:
        if arrived is not None:
            arrived.synchronize()
        return host.tolist()

    return wait


def _sent(fact: int, splits: Sequence[int] | Tensor, experts: int, device: torch.device) -> Tensor:
    """int64 [1 + E]: what the host knows, then the row behind each expert's last. Those of
    malformed splits are -1, which the check after the exchange rejects on every rank."""
    try:
        numbers = splits if isinstance(splits, Tensor) else torch.tensor([*splits], device="cpu")
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, dtype=torch.int64, device="cpu")
    sent = torch.full((1 + experts,), fact, dtype=torch.int64, device=device)
    if numbers.shape != (experts,) or numbers.is_floating_point() or numbers.dtype is torch.bool:
        sent[1:] = -1
    else:
        sent[1:].copy_(splits if isinstance(splits, Tensor) else numbers.cumsum(0))
    return sent

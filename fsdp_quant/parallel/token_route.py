# SPDX-License-Identifier: Apache-2.0
"""Which rows each rank sends to each expert, and their all-to-all."""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..linear.grouped import sizes_of
from ..linear.routes import wrong_routes
from ..ops.layout import rows_of_bytes
from ..ops.reference import known
from ..ops.routing import pack_rows, piece_orders, unpack_rows
from ..tensor import torch_compat
from ..tensor.agreement import agree


class Rows(NamedTuple):
    """Numbers of rows. sent, received: [R] in all, to and from each rank."""

    counts: list[int]
    arriving: list[list[int]]
    sent: list[int]
    received: list[int]

    @staticmethod
    def of_rank(rank: int, ends: Sequence[list[int]]) -> Rows:
        """ends: [R][1 + E] of all ranks, 0 and the row behind the last of each expert."""
        experts = (len(ends[0]) - 1) // len(ends)
        held, sent = slice(rank * experts, (rank + 1) * experts + 1), ends[rank][::experts]
        arriving = [sizes_of(row[held]) for row in ends]
        return Rows(sizes_of(ends[rank]), arriving, sizes_of(sent), [*map(sum, arriving)])


@dataclass(eq=False)
class TokenRoute:
    """Rows that each rank of `group` sends to each expert; ranks hold equal numbers of experts, in
    order. Its counts are on their way when it is made: the host waits for them once, where `rows`
    is read first, which raises what `route_tokens` says. It calls `meanwhile` before.
    """

    group: dist.ProcessGroup
    _device: torch.device
    _read: Callable[[], Rows]
    meanwhile: Callable[[], object] = bool

    @functools.cached_property
    def rows(self) -> Rows:
        meanwhile, self.meanwhile = self.meanwhile, bool  # nodes keep the route, it has tokens
        meanwhile()
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
        return self._index[0]

    def spread(
        self, buffers: Sequence[Tensor], tokens: Tensor | None = None
    ) -> Callable[[], list[Tensor]]:
        """Start one all-to-all. Return the function that waits for it, and returns what the ranks'
        buffers hold for the experts of this rank, by expert, then by rank.

        buffers:  [rows, ..], row-major.
        tokens:   int64, the row of the buffers of each row that is sent; None: they are in order.
        """
        packed = pack_rows(buffers, tokens)
        received = packed.new_empty(sum(self.rows.received), packed.shape[1])
        wait = self._exchange(received, packed, self.rows.received, self.rows.sent)
        order = self._index[1]  # while rows move

        def arrived() -> list[Tensor]:
            wait()
            return unpack_rows(received, order, buffers)

        return arrived

    def returned(self, y: Tensor) -> Callable[[], Tensor]:
        """Start to send rows of y [sum of splits, N], sorted by expert, then by rank, back to the
        ranks of their tokens. Return the function that waits for those of this rank's, [M, N]."""
        # no view: users may write in place what FSDP2 hooks
        returned = y.new_empty(sum(self.rows.sent), y.shape[1])
        rows = pack_rows([y], self._index[2])
        wait = self._exchange(rows_of_bytes(returned), rows, self.rows.sent, self.rows.received)

        def arrived() -> Tensor:
            wait()
            return returned

        return arrived

    @functools.cached_property
    def _index(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`ends`; the row in the order of ranks of each row by expert, and the other way, or None
        where these are one order. The host gives the device where pieces end, in one copy, and
        waits for nothing."""
        arriving, experts = self.rows.arriving, len(self.rows.arriving[0])
        by_rank = [*itertools.accumulate(itertools.chain(*arriving))]
        by_expert = [*itertools.accumulate(itertools.chain(*zip(*arriving)))]
        places = itertools.chain(*(by_rank[e::experts] for e in range(experts)))
        numbers = [*by_expert, *map(operator.sub, places, by_expert)]  # ends, and how far they move
        numbers += by_expert[self.ranks - 1 :: self.ranks]
        device, sizes = self._device, (len(by_expert), len(by_expert), experts)
        is_cuda = device.type == "cuda"
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        pieces, shifts, ends = host.to(device, non_blocking=True).split(sizes)
        if 1 in (self.ranks, experts):
            return ends, None, None
        return ends, *piece_orders(pieces, shifts, sum(self.rows.received))

    def _exchange(
        self, into: Tensor, rows: Tensor, arriving: list[int], sent: list[int]
    ) -> Callable[[], object]:
        """Start to send each rank so many rows into `into`; return the function that waits."""
        if self.ranks == 1:
            return functools.partial(into.copy_, rows)
        work = dist.all_to_all_single(into, rows, arriving, sent, self.group, async_op=True)
        return known(work, "a rank of the group").wait


def route_tokens(
    splits: Sequence[int] | Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    travels: str = "",
    experts: int | None = None,
    name: str = "dispatch_tokens",
    routes: Sequence[Tensor] = (),
    weights: Tensor | None = None,
) -> TokenRoute:
    """Return the route of x [M, K], whose rows are sorted by expert; every rank of `group` must
    call it.

    splits:   as of `fq.GroupedLinear`, of the experts of all ranks: counts on the host, or int
              tensor [E], the row behind each expert's last. One small all-gather exchanges them,
              and the host reads all ranks': sizes of an uneven all-to-all are the host's.
    experts:  of all ranks; default: as many as splits has.
    travels:  text that must be the same on every rank, as must K and the dtype.
    routes, weights:  of x [T, K], as of `fq.GroupedMLP`; empty: x has the rows.

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
    wrong = wrong_routes(x.shape[0], routes, weights)
    rows = routes[0].numel() if len(routes) and wrong is None else x.shape[0]
    text = f"of {experts} experts, {x.shape[1]} columns, {x.dtype} {travels}"
    fact = zlib.crc32(text.encode()) << 31 | rows
    sent = _sent(fact, splits if wrong is None else (), experts, x.device)
    received = sent
    if ranks > 1:
        received = sent.new_empty(ranks * (experts + 1))
        torch_compat.all_gather(received, sent, group)
    host, is_cuda = received.to("cpu", non_blocking=True), x.device.type == "cuda"
    arrived = torch.cuda.current_stream(x.device).record_event() if is_cuda else None

    def read() -> Rows:
        if arrived is not None:
            arrived.synchronize()
        table, rank = host.view(ranks, -1).tolist(), group.rank()  # the one read
        facts, ends = zip(*[(row[0], [0, *row[1:]]) for row in table])
        is_wrong = [(e[-1], e) != (fact % 2**31, sorted(e)) for fact, e in zip(facts, ends)]
        if any(is_wrong):
            error = ValueError(
                f"{name}: the token splits {splits} of {rows} rows are not of {experts} experts, "
                "or do not add up to its rows; give counts, none negative, that add up to the "
                "input's rows, or a tensor of the row behind each expert's last"
                if wrong is None
                else f"{name}: {wrong}"
            )
            agree({}, [group], error if is_wrong[rank] else None)
        if len({fact >> 31 for fact in facts}) > 1:
            remedy = "call it with the same experts, columns, dtype and quantizer on every rank"
            sentence = "ranks would send each other different tokens"
            agree({name: text}, [group], None, remedy, sentence)
        return Rows.of_rank(rank, ends)

    if wrong is not None:  # before it reads tokens by them
        read()
    return TokenRoute(group, x.device, read)


def _sent(fact: int, splits: Sequence[int] | Tensor, experts: int, device: torch.device) -> Tensor:
    """int64 [1 + E]: what the host knows, then the row behind each expert's last. Those of
    malformed splits are -1, which the check after the exchange rejects on every rank."""
    try:
        is_tensor = isinstance(splits, Tensor)
        numbers = splits if is_tensor else torch.tensor([*splits], dtype=None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, dtype=torch.float32, device="cpu")
    fits = not (numbers.is_floating_point() or numbers.dtype is torch.bool)
    ends = numbers if isinstance(splits, Tensor) else numbers.cumsum(0)
    sent = torch.full((1 + experts,), fact, dtype=torch.int64, device=device)
    sent[1:] = ends if fits and ends.shape == (experts,) else -1
    return sent

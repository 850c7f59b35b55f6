# SPDX-License-Identifier: Apache-2.0
"""Which rows each rank sends to each expert, and their all-to-all."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.reference import known
from ..tensor import torch_compat
from ..tensor.agreement import agree


@dataclass(eq=False)
class TokenRoute:
    """Rows that each rank of `group` sends to each expert; ranks hold equal numbers of experts, in
    order. Its counts are on their way when it is made: the host waits for them once, where they are
    read, which raises what `route_tokens` says.

    counts:    [E] of this rank's tokens, by expert.
    arriving:  [R][E / R] what ranks send to the experts of this rank.
    """

    group: dist.ProcessGroup
    _arriving: Tensor  # on the device
    _read: Callable[[], tuple[list[int], list[list[int]]]]
    _orders: dict[bool, Tensor] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        return self._read()[0]

    @property
    def arriving(self) -> list[list[int]]:
        return self._read()[1]

    @property
    def ranks(self) -> int:
        return self.group.size()

    @functools.cached_property
    def splits(self) -> list[int]:
        """[E / R] rows of each expert of this rank: the splits of `fq.GroupedLinear`."""
        return [sum(rows) for rows in zip(*self.arriving)]

    @property
    def ends(self) -> Tensor:
        """int64 [E / R] on the device, the row behind the last of each expert of this rank."""
        return self._arriving.sum(0).cumsum(0)

    def spread(
        self, buffers: Sequence[Tensor], tokens: Tensor | None = None
    ) -> Callable[[], list[Tensor]]:
        """Start one all-to-all. Return the function that waits for it, and returns what the ranks'
        buffers hold for the experts of this rank, by expert, then by rank.

        buffers:  [rows, ..], row-major.
        tokens:   int64, the row of the buffers of each row that is sent; None: they are in order.
        """
        parts = _wide([*map(_rows_of_bytes, buffers)])
        packed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        packed = packed if tokens is None else packed.index_select(0, tokens)
        arriving = [*map(sum, self.arriving)]
        received = packed.new_empty(sum(arriving), packed.shape[1])
        wait = self._exchange(received, packed, arriving, self._sent_to)
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
        (rows,) = _wide([_rows_of_bytes(y)])
        rows = self._ordered(rows, back=True)
        # no view: users may write in place what FSDP2 hooks
        returned, from_experts = y.new_empty(sum(self.counts), y.shape[1]), map(sum, self.arriving)
        into = _rows_of_bytes(returned)
        wait = self._exchange(into, rows, self._sent_to, [*from_experts])

        def arrived() -> Tensor:
            wait()
            return returned

        return arrived

    @property
    def _sent_to(self) -> list[int]:
        """[R] rows that each rank is sent."""
        experts = len(self.counts) // self.ranks
        return [sum(self.counts[r * experts : (r + 1) * experts]) for r in range(self.ranks)]

    def _ordered(self, rows: Tensor, back: bool = False) -> Tensor:
        """Sort rows, a piece of each rank for each expert, from the order of ranks by expert; back:
        the other way. The host builds no index and waits for none."""
        if 1 in self._arriving.shape:
            return rows.contiguous()
        if (order := self._orders.get(back)) is None:
            by_rank = self._arriving.T if back else self._arriving
            starts = (by_rank.flatten().cumsum(0) - by_rank.flatten()).view_as(by_rank).T.flatten()
            sizes = by_rank.T.flatten()
            # of pieces of these sizes, which begin at these rows
            shifts = starts - (sizes.cumsum(0) - sizes)
            order = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
            order = order + shifts.repeat_interleave(sizes, output_size=len(rows))
            self._orders[back] = order
        return rows.index_select(0, order)

    def _exchange(
        self, into: Tensor, rows: Tensor, arriving: list[int], sent: list[int]
    ) -> Callable[[], object]:
        """Start to send each rank so many rows, and to write what comes to `into`; return the
        function that waits for it."""
        into, rows = into.view(torch.uint8), rows.view(torch.uint8)
        if self.ranks == 1:
            return functools.partial(into.copy_, rows)
        work = dist.all_to_all_single(into, rows, arriving, sent, self.group, async_op=True)
        return known(work, "a rank of the group").wait


def row_bytes(t: Tensor) -> int:
    return t.itemsize * math.prod(t.shape[1:])


def _rows_of_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8).view(-1, row_bytes(t))


def _wide(parts: list[Tensor]) -> list[Tensor]:
    """Rows of bytes as those of words where they can be: torch copies rows element by element."""
    fits = all(n % 8 == 0 for part in parts for n in (part.shape[1], part.storage_offset()))
    return [part.view(torch.int64) for part in parts] if fits else parts


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
              tensor [E], the row behind each expert's last. One small all-to-all exchanges
              the counts, and the host reads them: sizes of an uneven all-to-all are the host's.
    experts:  of all ranks; default: as many as splits has.
    travels:  text that must be the same on every rank, as must K and the dtype.
    routes:   of x [T, K], as of `fq.GroupedLinear`; empty: x has the rows.

    Raises ValueError on every rank, before any token moves: for experts that the ranks do not
    divide; where the route is read, for splits of one rank that are not of E experts or do not add
    up to its rows, routes of other tokens, ranks that would send different things. RuntimeError
    inside a capture of a CUDA graph.
    """
    experts = experts or len(splits)
    if not experts or experts % group.size():
        raise ValueError(
            f"{name}: {experts} experts over {group.size()} ranks, which do not divide them; "
            f"choose a multiple of {group.size()}"
        )
    if torch_compat.is_captured(x):
        raise RuntimeError(
            f"{name}: the host reads how many tokens ranks send each other, which no CUDA graph "
            "captures; run this step eagerly, or capture what is around it"
        )
    rows, fits = x.shape[0], True
    if routes:
        order, back = routes
        rows = order.numel()
        fits = back.dim() == 2 and len(back) == len(x) and back.numel() == rows
    counts = _counts_of(splits if fits else (), experts).to(x.device, torch.int64)
    is_fine = (counts >= 0).all() & (counts.sum() == rows)
    text = f"of {experts} experts, {x.shape[1]} columns, {x.dtype} {travels}"
    checksum = torch.full_like(is_fine, zlib.crc32(text.encode()), dtype=torch.int64)
    facts = torch.stack([is_fine.long(), checksum])
    sent = torch.cat([counts.view(group.size(), -1), facts.expand(group.size(), 2)], 1)
    received = sent
    if group.size() > 1:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
    numbers, width = _on_host(torch.cat([counts, received.flatten()])), sent.shape[1]

    @functools.cache
    def read() -> tuple[list[int], list[list[int]]]:
        flat = numbers()  # the one read
        by_rank = [flat[i : i + width] for i in range(experts, len(flat), width)]
        is_wrong = [not is_fine for *_, is_fine, _ in by_rank]
        if any(is_wrong):
            error = ValueError(
                f"{name}: the token splits {splits} of {rows} rows are not of {experts} experts, "
                "or do not add up to its rows; give counts, none negative, that add up to the "
                "input's rows, or a tensor of the row behind each expert's last"
                if fits
                else f"{name}: routes are {[list(t.shape) for t in routes]} of {x.shape[0]} "
                "tokens; wanted order [T * k] and back [T, k]"
            )
            agree({}, [group], error if is_wrong[group.rank()] else None)
        if len({checksum for *_, checksum in by_rank}) > 1:
            remedy = "call it with the same experts, columns, dtype and quantizer on every rank"
            sentence = "ranks would send each other different tokens"
            agree({name: text}, [group], None, remedy, sentence)
        return flat[:experts], [rows for *rows, _, _ in by_rank]

    return TokenRoute(group, received[:, :-2], read)


def _on_host(t: Tensor) -> Callable[[], list]:
    """Start to copy t [n] to the host; return the function that waits for it."""
    host = t.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event() if t.device.type == "cuda" else None
    if arrived is not None:
        arrived.record(torch.cuda.current_stream(t.device))

    def wait() -> list:
        if arrived is not None:
            arrived.synchronize()
        return host.tolist()

    return wait


def _counts_of(splits: Sequence[int] | Tensor, experts: int) -> Tensor:
    """Token counts per expert, int [E]. Malformed splits become all -1, which the check after the
    exchange rejects on every rank."""
    try:
        is_tensor = isinstance(splits, Tensor)
        counts = splits if is_tensor else torch.tensor(list(splits), dtype=None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        counts = torch.empty(0, dtype=torch.int64, device="cpu")
    if counts.shape != (experts,) or counts.is_floating_point() or counts.dtype is torch.bool:
        return torch.full((experts,), -1, dtype=torch.int64, device="cpu")
    return counts.diff(prepend=counts.new_zeros(1)) if isinstance(splits, Tensor) else counts

# SPDX-License-Identifier: Apache-2.0
"""Which rows each rank sends to each expert, and their all-to-all."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor.agreement import agree


@dataclass(frozen=True, eq=False)
class TokenRoute:
    """Rows that each rank of `group` sends to each expert; ranks hold equal numbers of experts, in
    order.

    counts:    [E] of this rank's tokens, by expert.
    sent:      [E] the same, filled up to multiples of `alignment`.
    arriving:  [R][E / R] what ranks send to the experts of this rank.
    """

    group: dist.ProcessGroup
    alignment: int
    counts: list[int]
    arriving: list[list[int]]

    @functools.cached_property
    def sent(self) -> list[int]:
        return [-(-n // self.alignment) * self.alignment for n in self.counts]

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def splits(self) -> list[int]:
        """[E / R] rows of each expert of this rank: the splits of `fq.GroupedLinear`."""
        return [sum(rows) for rows in zip(*self.arriving)]

    def placed(self, x: Tensor) -> Tensor:
        """Return x [M, K] as [sum of sent, K]: zero rows fill up what each expert is sent."""
        if self.sent == self.counts:
            return x.contiguous()
        return x.new_zeros(sum(self.sent), x.shape[1]).index_copy_(0, self._places(x.device), x)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return the rows of tokens of x [sum of sent, K]."""
        return x if self.sent == self.counts else x.index_select(0, self._places(x.device))

    def _places(self, device: torch.device) -> Tensor:
        counts, sent = (
            torch.tensor(rows, dtype=torch.int64, device="cpu") for rows in (self.counts, self.sent)
        )
        filled = sent - counts
        shifts = (filled.cumsum(0) - filled).repeat_interleave(counts)
        places = torch.arange(len(shifts), dtype=torch.int64, device="cpu")
        return (shifts + places).to(device, non_blocking=True)

    def spread(self, buffers: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Return what the ranks' buffers hold for the experts of this rank, by expert, then by
        rank; in one all-to-all.

        buffers:  ([rows / n, ..], n): row-major, a row of which serves n of those that are sent.
        """
        experts, count = len(self.arriving[0]), len(buffers)
        row_bytes = [_row_bytes(buffer) for buffer, _ in buffers]
        by_rank = [
            _as_bytes(buffer).split([rows // n * size for rows in self._sent_to()])
            for (buffer, n), size in zip(buffers, row_bytes)
        ]
        sent = [sum(part.numel() for part in parts) for parts in zip(*by_rank)]
        packed = _as_bytes(buffers[0][0])
        if count > 1:
            packed = torch.cat([part for parts in zip(*by_rank) for part in parts])
        sizes = [
            [rows // n * size for (_, n), size in zip(buffers, row_bytes) for rows in pieces]
            for pieces in self.arriving
        ]
        received = self._exchange(packed, sent, packed.new_empty(sum(map(sum, sizes))), sizes)
        pieces = received.split([size for sizes_of_rank in sizes for size in sizes_of_rank])
        spread = []
        for i, (buffer, _) in enumerate(buffers):
            ordered = torch.cat(
                [
                    pieces[(rank * count + i) * experts + e]
                    for e in range(experts)
                    for rank in range(self.ranks)
                ]
            )
            spread.append(ordered.view(buffer.dtype).view(-1, *buffer.shape[1:]))
        return spread

    def returned(self, y: Tensor) -> Tensor:
        """Send rows of y [sum of splits, N], sorted by expert, then by rank, back to the ranks of
        their tokens: [sum of sent, N]."""
        experts, size = len(self.arriving[0]), _row_bytes(y)
        by_expert = [pieces[e] * size for e in range(experts) for pieces in self.arriving]
        pieces = _as_bytes(y).split(by_expert)
        packed = torch.cat(
            [pieces[e * self.ranks + r] for r in range(self.ranks) for e in range(experts)]
        )
        # no view: users may write in place what FSDP2 hooks
        rows = y.new_empty(sum(self.sent), y.shape[1])
        sent = [sum(pieces) * size for pieces in self.arriving]
        self._exchange(packed, sent, _as_bytes(rows), [[n * size] for n in self._sent_to()])
        return rows

    def _sent_to(self) -> list[int]:
        """[R] rows that each rank is sent."""
        experts = len(self.arriving[0])
        return [sum(self.sent[r * experts : (r + 1) * experts]) for r in range(self.ranks)]

    def _exchange(
        self, packed: Tensor, sent: list[int], received: Tensor, sizes: list[list[int]]
    ) -> Tensor:
        """Send `packed`, of which each rank is sent so many bytes, and return `received`."""
        if self.ranks == 1:
            return received.copy_(packed)
        dist.all_to_all_single(received, packed, list(map(sum, sizes)), sent, group=self.group)
        return received


def _row_bytes(t: Tensor) -> int:
    return t.itemsize * math.prod(t.shape[1:])


def _as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def route_tokens(
    splits: Sequence[int] | Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    alignment: int = 1,
    travels: str = "",
    experts: int | None = None,
    name: str = "dispatch_tokens",
) -> TokenRoute:
    """Return the route of x [M, K], whose rows are sorted by expert; every rank of `group` must
    call it.

    splits:   as of `fq.GroupedLinear`, of the experts of all ranks: counts on the host, or int
              tensor [E], the row behind each expert's last. One small all-to-all exchanges
              the counts, and the host reads them: sizes of an uneven all-to-all are the host's.
    experts:  of all ranks; default: as many as splits has.
    travels:  text that must be the same on every rank, as must K and the dtype.

    Raises ValueError on every rank, before any token moves: for experts that the ranks do not
    divide, splits of one rank that are not of E experts or do not add up to its rows, ranks that
    would send different things.
    """
    experts = experts or len(splits)
    if not experts or experts % group.size():
        raise ValueError(
            f"{name}: {experts} experts over {group.size()} ranks, which do not divide them; "
            f"choose a multiple of {group.size()}"
        )
    counts = _counts_of(splits, experts).to(x.device, torch.int64)
    is_fine = (counts >= 0).all() & (counts.sum() == x.shape[0])
    text = f"of {experts} experts, {x.shape[1]} columns, {x.dtype}, alignment {alignment}"
    text = f"{text} {travels}".strip()
    checksum = torch.full_like(is_fine, zlib.crc32(text.encode()), dtype=torch.int64)
    facts = torch.stack([is_fine.long(), checksum])
    sent = torch.cat([counts.view(group.size(), -1), facts.expand(group.size(), 2)], 1)
    received = sent
    if group.size() > 1:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
    flat, width = torch.cat([counts, received.flatten()]).tolist(), sent.shape[1]  # the one read
    by_rank = [flat[i : i + width] for i in range(experts, len(flat), width)]
    is_wrong = [not is_fine for *_, is_fine, _ in by_rank]
    if any(is_wrong):
        error = ValueError(
            f"{name}: the token splits {splits} of {x.shape[0]} rows are not of {experts} experts, "
            "or do not add up to its rows; give counts, none negative, that add up to the input's "
            "rows, or a tensor of the row behind each expert's last"
        )
        agree({}, [group], error if is_wrong[group.rank()] else None)
    if len({checksum for *_, checksum in by_rank}) > 1:
        remedy = (
            "call it with the same experts, columns, dtype, alignment and quantizer on every rank"
        )
        agree({name: text}, [group], None, remedy, "ranks would send each other different tokens")
    arriving = [[-(-n // alignment) * alignment for n in rows] for *rows, _, _ in by_rank]
    return TokenRoute(group, alignment, flat[:experts], arriving)


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

# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens go to the ranks that hold their experts as codes, and come back in
high precision.

[Note: what travels]
    tokens x [M, K] of each rank, sorted by expert  ->  x_e [M_e, K] of all ranks, one behind the
                                                        other, for each expert e held
    forward   x_e = dispatch(x)     y = combine(y_e)
    backward  dy_e = dispatch(dy)   dx = combine(dx_e)
A dispatch returns an operand of GEMMs: storages of Q(x_e), the bytes that an expert encodes of
tokens that arrive in high precision. The rule is that of gathers (`storage.codes_travel`), where a
piece is what one rank sends to one expert: codes travel where no block and no rotation reaches from
one piece into the next, which blocks along the tokens do unless pieces are filled up with zero rows
to a multiple of them. Scales of all tokens of an expert follow from amaxes that the ranks share
first, in one collective. What is not encoded from the values is derived from the rowwise codes,
where they arrive. Otherwise tokens travel in high precision, and are quantized where they arrive.
Results of a combine are added up: they stay in high precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import bytes_of, counters
from ..formats import Direction
from ..ops import dispatch
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..scaling import share_amaxes
from ..storage import Placement, Storage, codes_travel
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from .sequence import planned_bytes
from .token_route import TokenRoute, route_tokens

TRANSPORTS = ("auto", "codes", "high_precision")


# The rule #


def why_high_precision(
    hybrid: HybridQuantizer,
    directions,
    alignment: int,
    cols: int,
    dtype: torch.dtype,
    transport: str = "auto",
) -> str | None:
    """Return why tokens are not dispatched as codes, in one clause; None where they are (see the
    note).

    transport:  "auto": where codes are also fewer bytes; "codes": wherever they can be.
    """
    if transport == "high_precision":
        return "so it was asked"
    if hybrid.delayed_directions:
        return f"{hybrid} scales by histories of the experts"
    encoded = [hybrid.encodings[d] for d in gathered_directions(hybrid, frozenset(directions))]
    for e in encoded:
        if not codes_travel(e, alignment, in_one_piece=False):
            operand = f"{e.direction.value} {e.fmt}"
            if e.stochastic:
                return f"{operand} is rounded stochastically by an expert's rows"
            rows = e.fmt.row_alignment(e.direction)
            return f"{operand} has blocks of {rows} tokens, and ranks send multiples of {alignment}"
    shape = alignment, cols
    size = sum(planned_bytes("forward", hybrid, directions, shape, dtype, alignment).values())
    high = alignment * cols * dtype.itemsize
    if transport == "auto" and size >= high:
        return f"codes of {len(encoded)} directions are {size / high:.2f} of its bytes"
    return None


# Moving tokens #


def _dispatched(
    x: Tensor, route: TokenRoute, hybrid: HybridQuantizer | None, directions, phase: str
) -> Tensor | QuantizedTensor:
    """Return what the experts of this rank are sent of x [M, K]; hybrid: None where it travels in
    high precision."""
    placed = route.placed(x)
    if hybrid is None:
        _count(route, phase, "both", "high precision", placed)
        return route.spread([(placed, 1)])[0]
    encoded = _encoded(placed, route, hybrid, gathered_directions(hybrid, frozenset(directions)))
    keys, buffers = [], []
    for d, storages in encoded.items():
        fmt = storages[0].fmt
        for name, placement in storages[0].placements(route.alignment).items():
            if placement is Placement.SHARD:
                pieces = [getattr(storage, name) for storage in storages]
                buffer = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                buffers.append((buffer, fmt.dims(d)[0] if name == "scale" else 1))
                keys.append((d, name))
                _count(route, phase, d.value, fmt.name, buffer)
    received = {
        key: (buffer, n) for key, buffer, (_, n) in zip(keys, route.spread(buffers), buffers)
    }
    first, start, groups = route.group.rank() * len(route.splits), 0, []
    for e, rows in enumerate(route.splits, first):
        fields: dict[Direction, dict[str, Tensor]] = {d: {} for d in encoded}
        for (d, name), (buffer, n) in received.items():
            fields[d][name] = buffer[start // n : (start + rows) // n]
        sides: dict[str, Any] = {}
        for d, storages in encoded.items():
            storage, shape = storages[e % len(storages)], (rows, x.shape[1])
            sides[d.value] = replace(storage, shape=shape, **fields[d])
        groups.append(StoragePair(**sides))
        start += rows
    return QuantizedTensor(pair=StoragePair(groups=groups), shape=(start, x.shape[1]))


def _encoded(
    x: Tensor, route: TokenRoute, hybrid: HybridQuantizer, directions
) -> dict[Direction, list[Storage]]:
    """Compact storages of x [sum of sent, K]: of each expert's rows where some scale follows from
    all its tokens, else one."""
    spanning = {
        d: e for d, e in hybrid.encodings.items() if d in directions and e.fmt.spans_rows(d)
    }
    others = [d for d in directions if d not in spanning]
    storages = {d: [s] for d, s in hybrid.storages(x, others)[0].items()} if others else {}
    if not spanning:
        return storages
    pieces, zeros = x.split(route.sent), [0] * len(route.sent)
    statistics = []
    for e in spanning.values():
        statistics += [(e, amax) for amax in dispatch.multi_tensor_amax(pieces, e, zeros)]
    counters.add("amax all-reduce", "activations")
    shared = iter(share_amaxes(statistics, route.group))
    for d, e in spanning.items():
        known = [next(shared) for _ in pieces]
        encoded = dispatch.multi_tensor_encode(pieces, e, known, zeros, [None] * len(pieces))
        storages[d] = [
            Storage.of(codes, e, piece.shape, x.dtype) for codes, piece in zip(encoded, pieces)
        ]
    return storages


def _count(route: TokenRoute, phase: str, direction: str, fmt: str, sent: Tensor) -> None:
    if route.ranks > 1:
        counters.add("expert dispatch", (phase, direction, fmt), bytes_of(sent))


class ExchangeTokens(torch.autograd.Function):
    """dispatches: send tokens to the ranks of their experts; else results back, and sum. The
    backward is the other one. hybrid, directions: of what is dispatched."""

    @staticmethod
    def forward(ctx, x, route, hybrid, directions, dispatches):
        ctx.route, ctx.hybrid, ctx.directions, ctx.dispatches = (
            route,
            hybrid,
            directions,
            dispatches,
        )
        return _exchanged(x.detach(), route, hybrid, directions, dispatches, "forward")

    @staticmethod
    def backward(ctx, dy):
        dx = _exchanged(dy, ctx.route, ctx.hybrid, ctx.directions, not ctx.dispatches, "backward")
        return dx, None, None, None, None


def _exchanged(
    x: Tensor,
    route: TokenRoute,
    hybrid: HybridQuantizer | None,
    directions,
    dispatches: bool,
    phase: str,
) -> Tensor | QuantizedTensor:
    if dispatches:
        return _dispatched(x, route, hybrid, directions, phase)
    rows = route.returned(x)
    _count(route, phase, "sum", "high precision", rows)
    return route.of_tokens(rows)


def dispatch_tokens(
    x: Tensor,
    splits: Sequence[int] | Tensor,
    group: dist.ProcessGroup,
    quantizer=None,
    directions=tuple(Direction),
    *,
    alignment: int = 1,
    transport: str = "auto",
) -> tuple[Tensor, TokenRoute]:
    """(tokens of the experts that this rank holds, their route); every rank of `group` must call
    it.

    x:           [M, K], rows sorted by expert; M may be 0, and differ between ranks.
    splits:      of the experts of all ranks; see `route_tokens`, which reads the host once.
    quantizer:   `HybridQuantizer`, `Quantizer`, `Format` or a format's name: of the products that
                 read the tokens. None: they travel in high precision.
    directions:  that are wanted; None of the others travels.
    alignment:   zero rows fill what a rank sends to an expert up to a multiple of it.
    transport:   "auto": codes where they may travel and are fewer bytes; "codes"; "high_precision".
                 An expert has the same codes either way.
    returns:     [sum of route.splits, K] in high precision, or a `QuantizedTensor` of a storage an
                 expert and direction, by expert, then by rank; its gradient goes back, and is that
                 of x.

    Raises ValueError, on every rank, for transport="codes" where the rule does not hold (see the
    note), and as `route_tokens`.
    """
    if x.dim() != 2:
        raise ValueError(f"dispatch_tokens: x is {list(x.shape)}; wanted [tokens, columns]")
    hybrid = _quantizer_of_transport(
        quantizer, directions, alignment, x, transport, "dispatch_tokens"
    )
    route = route_tokens(splits, as_rows(x), group, alignment, f"{hybrid} {list(directions)}")
    return ExchangeTokens.apply(x, route, hybrid, tuple(directions), True), route


def combine_tokens(
    y: Tensor,
    route: TokenRoute,
    quantizer=None,
    directions=tuple(Direction),
    *,
    transport: str = "auto",
) -> Tensor:
    """Rows of the experts of this rank where their tokens came from, in high precision; every rank
    must call it.

    y:           [sum of route.splits, N].
    quantizer:   of the products that read the gradient of y, which is then dispatched as
                 `dispatch_tokens` does. None: it travels in high precision.
    returns:     [M, N].

    Raises ValueError for other rows than the route's, and as `dispatch_tokens`.
    """
    if y.dim() != 2 or y.shape[0] != sum(route.splits):
        raise ValueError(
            f"combine_tokens: y is {list(y.shape)}; wanted the {sum(route.splits)} rows of its "
            "route, [rows, columns]"
        )
    hybrid = _quantizer_of_transport(
        quantizer, directions, route.alignment, y, transport, "combine_tokens"
    )
    return ExchangeTokens.apply(y, route, hybrid, tuple(directions), False)


def _quantizer_of_transport(
    quantizer, directions, alignment: int, x: Tensor, transport: str, name: str
) -> HybridQuantizer | None:
    """What x is quantized with before it travels, or None."""
    if transport not in TRANSPORTS:
        raise ValueError(f"{name}: transports are {', '.join(TRANSPORTS)}, got {transport!r}")
    hybrid, reason = None, "there is no quantizer"
    if quantizer is not None:
        hybrid = hybrid_of(quantizer)
        reason = why_high_precision(hybrid, directions, alignment, x.shape[-1], x.dtype, transport)
    if reason is not None and transport == "codes":
        raise ValueError(
            f"{name}: transport='codes', and {reason}; fill what ranks send with alignment=, or "
            "pass transport='auto'"
        )
    return hybrid if reason is None else None

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

With transport="rowwise" the rowwise codes alone travel, and experts are given their values, which
are exact: scales are powers of two. Quantized again, rowwise codes have the same values; columnwise
ones too, except those below the smallest normal number of their block. An expert is then what it
is of tokens that were rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import ROWWISE, Direction
from ..linear.routes import sum_of_copies, tokens_of
from ..ops import dispatch
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..scaling import share_amaxes
from ..storage import Placement, Storage, codes_travel
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from .sequence import planned_bytes
from .token_route import TokenRoute, route_tokens, row_bytes

TRANSPORTS = ("auto", "codes", "rowwise", "high_precision")
FORCED = ("codes", "rowwise")


# The rule #


class Travel(NamedTuple):
    """How tokens travel: as codes of these directions, or (hybrid is None) in high precision.

    decodes:  experts are given the values of the codes.
    reason:   why not as codes, in one clause.
    """

    hybrid: HybridQuantizer | None
    directions: tuple[Direction, ...]
    decodes: bool = False
    reason: str | None = None

    @property
    def sent(self) -> tuple[Direction, ...]:
        """Directions whose codes travel."""
        if self.hybrid is None:
            return ()
        return gathered_directions(self.hybrid, frozenset(self.directions))

    @property
    def keeps_tokens_apart(self) -> bool:
        """What travels of a token depends on no other token."""
        return self.hybrid is None or (
            self.sent == (ROWWISE,) and self.hybrid.side(ROWWISE).fmt.keeps_rows_apart
        )

    def __str__(self) -> str:
        if self.hybrid is None:
            return f"in high precision ({self.reason})"
        sent = ", ".join(f"{d.value} {self.hybrid.encodings[d].fmt}" for d in self.sent)
        return f"as {sent}" + ", whose values experts are given" * self.decodes


def travel_of(
    hybrid: HybridQuantizer,
    directions,
    alignment: int,
    cols: int,
    dtype: torch.dtype,
    transport: str,
) -> Travel:
    """Return how tokens [.., cols] travel. Arguments as of `why_high_precision`."""
    decodes = transport == "rowwise"
    directions = (ROWWISE,) if decodes else tuple(directions)
    reason = why_high_precision(hybrid, directions, alignment, cols, dtype, transport)
    return Travel(None if reason else hybrid, directions, decodes and not reason, reason)


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

    transport:  "auto": where codes are also fewer bytes; "codes": wherever they can be; "rowwise":
                where, besides, rowwise codes have values of `dtype`.
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
    if transport == "rowwise":
        fmt = hybrid.side(ROWWISE).fmt
        rounds = fmt.scale_leaves_contraction or fmt.tensor_scale or fmt.rotated
        is_exact = fmt.decodes_exactly_to_bf16 and not rounds and dtype is not torch.float16
        return None if is_exact else f"values of rowwise {fmt} are not exact in {dtype}"
    shape = alignment, cols
    size = sum(planned_bytes("forward", hybrid, directions, shape, dtype, alignment).values())
    high = alignment * cols * dtype.itemsize
    if transport == "auto" and size >= high:
        return f"codes of {len(encoded)} directions are {size / high:.2f} of its bytes"
    return None


def remedy_of(transport: str, option: str) -> str:
    """What lets tokens travel as they were asked to. option: that fills what ranks send."""
    if transport == "rowwise":
        return "take a format whose scales serve one token and are powers of two (mxfp8, fp8_1x128)"
    return (
        f"fill what ranks send with {option}, take a columnwise side that follows from the rowwise "
        "codes, send these alone (rowwise)"
    )


# Moving tokens #


def _dispatched(
    x: Tensor, route: TokenRoute, travel: Travel, phase: str, tokens: Tensor | None
) -> Callable[[], Tensor | QuantizedTensor]:
    """Start to send x [M, K]; return the function that waits for what the experts of this rank are
    sent.

    tokens:  row of x of each row that is sent, before fill; None: x has them.
    """
    is_early = route.alignment == 1 and travel.keeps_tokens_apart
    if not is_early:
        x, tokens = route.placed(x if tokens is None else x.index_select(0, tokens)), None
    if travel.hybrid is None:
        arrived = route.spread([(x, 1)], tokens)
        _count(route, phase, "both", "high precision", x)
        return lambda: arrived()[0]
    # `is_early`: once, whatever number of experts a token has, while the counts are on their way
    encoded = _encoded(x.contiguous(), travel.hybrid, travel.sent, route)
    keys, buffers = [], []
    for d, storages in encoded.items():
        fmt = storages[0].fmt
        for name, placement in storages[0].placements(route.alignment).items():
            if placement is Placement.SHARD:
                pieces = [getattr(storage, name) for storage in storages]
                buffer = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                buffers.append((buffer, fmt.dims(d)[0] if name == "scale" else 1))
                keys.append((d, name))
    arrived = route.spread(buffers, tokens)
    for (d, _), buffer in zip(keys, buffers):
        _count(route, phase, d.value, encoded[d][0].fmt.name, *buffer)

    def values() -> Tensor:
        ((storage,),) = encoded.values()
        fields: dict[str, Any] = {name: buffer for (_, name), buffer in zip(keys, arrived())}
        shape = sum(route.splits), x.shape[1]
        return replace(storage, shape=shape, **fields).dequantize(x.dtype)

    def codes() -> QuantizedTensor:
        received = [(d, name, b, n) for (d, name), b, (_, n) in zip(keys, arrived(), buffers)]
        first, start, groups = route.group.rank() * len(route.splits), 0, []
        for e, rows in enumerate(route.splits, first):
            sides: dict[str, Any] = {}
            for d, storages in encoded.items():
                fields: dict[str, Any] = {
                    name: b[start // n : (start + rows) // n]
                    for of, name, b, n in received
                    if of is d
                }
                storage, shape = storages[e % len(storages)], (rows, x.shape[1])
                sides[d.value] = replace(storage, shape=shape, **fields)
            groups.append(StoragePair(**sides))
            start += rows
        return QuantizedTensor(pair=StoragePair(groups=groups), shape=(start, x.shape[1]))

    return values if travel.decodes else codes


def _encoded(
    x: Tensor, hybrid: HybridQuantizer, directions: Sequence[Direction], route: TokenRoute
) -> dict[Direction, list[Storage]]:
    """Compact storages of x [sum of sent, K]: of each expert's rows where some scale follows from
    all its tokens, else one."""
    encodings = {d: hybrid.encodings[d] for d in directions}
    spanning = {d: e for d, e in encodings.items() if e.fmt.spans_rows(d)}
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


def _count(
    route: TokenRoute, phase: str, direction: str, fmt: str, buffer: Tensor, n: int = 1
) -> None:
    """Count what this rank sends of a buffer, a row of which serves n rows."""
    if route.ranks > 1:
        size = sum(route.sent) // n * row_bytes(buffer)
        counters.add("expert dispatch", (phase, direction, fmt), size)


class _Exchange(NamedTuple):
    """dispatches: of tokens to the ranks of their experts; else of results back, which are summed.
    The backward is the other one. travel: of what is dispatched. begun: waits for the part that is
    under way."""

    route: TokenRoute
    travel: Travel
    dispatches: bool
    begun: list[Callable[[], Any]]

    def begin(self, x: Tensor, phase: str, tokens: Tensor | None = None) -> Tensor:
        """Start to send x; return what stands for it in autograd until it is there."""
        if self.dispatches is (phase == "forward"):
            wait = _dispatched(x, self.route, self.travel, phase, tokens)
        else:
            wait = self.route.returned(x)
            _count(self.route, phase, "sum", "high precision", x)
        self.begun[:] = [wait]
        return x.new_zeros(())

    def end(self) -> Any:
        return self.begun.pop()()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange, tokens, back):
        ctx.exchange = exchange
        ctx.save_for_backward(back)
        return exchange.begin(x.detach(), "forward", tokens)

    @staticmethod
    def backward(ctx, *_):
        dx, (back,) = ctx.exchange.end(), ctx.saved_tensors
        return dx if back is None else sum_of_copies(dx, back), None, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, begun, exchange):
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    def backward(ctx, dy):
        return ctx.exchange.begin(dy, "backward"), None


def exchanged(
    x: Tensor,
    route: TokenRoute,
    travel: Travel,
    dispatches: bool,
    routes: Sequence[Tensor] = (),
    meanwhile: Callable[[], Any] | None = None,
) -> tuple[Any, Any]:
    """Return (what the exchange of x makes of it, what `meanwhile` returns).

    routes:     of x, which are dispatched.
    meanwhile:  is called while x is on its way; its backward runs while the gradient is, since
                autograd runs first what was called last.
    """
    exchange = _Exchange(route, travel, dispatches, [])
    tokens, back = (tokens_of(*routes), routes[1]) if routes else (None, None)
    begun = _Begin.apply(x, exchange, tokens, back)
    result = None if meanwhile is None else meanwhile()
    return _End.apply(begun, exchange), result


def dispatch_tokens(
    x: Tensor,
    splits: Sequence[int] | Tensor,
    group: dist.ProcessGroup,
    quantizer=None,
    directions=tuple(Direction),
    *,
    alignment: int = 1,
    transport: str = "auto",
    routes: Sequence[Tensor] = (),
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
                 An expert has the same codes either way. "rowwise": rowwise codes alone, of which
                 experts are given the values (see the note).
    routes:      of x [T, K], as of `fq.GroupedLinear`, where a token goes to k experts: (`order`
                 [T * k], `back` [T, k]), and splits are of T * k rows. A token is encoded once
                 where its codes depend on no other.
    returns:     [sum of route.splits, K] in high precision, or a `QuantizedTensor` of a storage an
                 expert and direction, by expert, then by rank; its gradient goes back, and is that
                 of x.

    Raises ValueError, on every rank, for transport="codes" or "rowwise" where the rule does not
    hold (see the note), and as `route_tokens`.
    """
    if x.dim() != 2:
        raise ValueError(f"dispatch_tokens: x is {list(x.shape)}; wanted [tokens, columns]")
    travel = _travel(quantizer, directions, alignment, x, transport, "dispatch_tokens")
    route = route_tokens(splits, as_rows(x), group, alignment, f"{travel}", routes=routes)
    return exchanged(x, route, travel, True, routes)[0], route


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
    travel = _travel(quantizer, directions, route.alignment, y, transport, "combine_tokens")
    return exchanged(y, route, travel, False)[0]


def _travel(quantizer, directions, alignment: int, x: Tensor, transport: str, name: str) -> Travel:
    if transport not in TRANSPORTS:
        raise ValueError(f"{name}: transports are {', '.join(TRANSPORTS)}, got {transport!r}")
    travel = Travel(None, tuple(directions), reason="there is no quantizer")
    if quantizer is not None:
        facts = alignment, x.shape[-1], x.dtype, transport
        travel = travel_of(hybrid_of(quantizer), directions, *facts)
    if travel.reason is not None and transport in FORCED:
        raise ValueError(
            f"{name}: transport={transport!r}, and {travel.reason}; "
            f"{remedy_of(transport, 'alignment=')}, or pass transport='auto'"
        )
    return travel

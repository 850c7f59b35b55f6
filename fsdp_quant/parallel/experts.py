# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens go to the ranks that hold their experts as codes, and come back in
high precision.

[Note: what travels]
    tokens x [M, K] of each rank, sorted by expert  ->  x_e [M_e, K] of all ranks, one behind the
                                                        other, for each expert e held
    forward   x_e = dispatch(x)     y = combine(y_e)
    backward  dy_e = dispatch(dy)   dx = combine(dx_e)
A dispatch returns an operand of GEMMs: storages of Q(x_e), the bytes that an expert encodes of
tokens that arrive in high precision. The rule is that of gathers (`exchange.codes_travel`), where a
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

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import Direction
from ..modules.exchange import codes_travel
from ..ops import dispatch
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..scaling import share_amaxes
from ..storage import Placement, Storage
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from .sequence import travelling_bytes
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
    """Why tokens are not dispatched as codes, in one clause; None where they are (see the note).

    transport:  "auto": where codes are also fewer bytes; "codes": wherever they can be.
    """
    if transport == "high_precision":
        return "so it was asked"
    encoded = [hybrid.encodings[d] for d in gathered_directions(hybrid, frozenset(directions))]
    if hybrid.delayed_directions:
        return f"{hybrid} scales by histories of the experts"
    for e in encoded:
        if not codes_travel(e, alignment, in_one_piece=False):
            said = f"{e.direction.value} {e.fmt}"
            if e.stochastic:
                return f"{said} is rounded stochastically by an expert's rows"
            rows = e.fmt.row_alignment(e.direction)
            return f"{said} has blocks of {rows} tokens, and ranks send multiples of {alignment}"
    size = sum(travelling_bytes(e, alignment, cols, dtype, alignment) for e in encoded)
    high = alignment * cols * dtype.itemsize
    if transport == "auto" and size >= high:
        return f"codes of {len(encoded)} directions are {size / high:.2f} of its bytes"
    return None


# Moving tokens #


def _dispatched(
    x: Tensor, route: TokenRoute, hybrid: HybridQuantizer | None, directions, phase: str
) -> Tensor | QuantizedTensor:
    """What the experts of this rank are sent of x [M, K]; hybrid: None where it travels in high
    precision."""
    placed = route.placed(x)
    if hybrid is None:
        _count(route, phase, "both", "high precision", placed)
        return route.spread([(placed, 1)])[0]
    encoded = _encoded(placed, route, hybrid, gathered_directions(hybrid, frozenset(directions)))
    buffers, moving = [], []
    for d, storages in encoded.items():
        fmt = storages[0].fmt
        for name, placement in storages[0].placements(route.alignment).items():
            if placement is Placement.SHARD:
                of = [getattr(one, name) for one in storages]
                buffer = torch.cat(of) if len(of) > 1 else of[0]
                buffers.append((buffer, fmt.dims(d)[0] if name == "scale" else 1))
                moving.append((d, name))
                _count(route, phase, d.value, fmt.name, buffer)
    came = list(zip(moving, route.spread(buffers), (n for _, n in buffers)))
    parts, start = [], 0
    for e, rows in enumerate(route.splits, route.group.rank() * len(route.splits)):
        part = {}
        for d, storages in encoded.items():
            fields = {
                name: t[start // n : (start + rows) // n] for (of, name), t, n in came if of is d
            }
            part[d.value] = replace(storages[e % len(storages)], shape=(rows, x.shape[1]), **fields)
        parts.append(StoragePair(**part))
        start += rows
    return QuantizedTensor(pair=StoragePair(groups=parts), shape=(start, x.shape[1]))


def _encoded(
    x: Tensor, route: TokenRoute, hybrid: HybridQuantizer, directions
) -> dict[Direction, list[Storage]]:
    """Compact storages of x [sum of sent, K]: of each expert's rows where some scale follows from
    all its tokens, else one."""
    encodings = {d: hybrid.encodings[d] for d in directions}
    spanning = {
        d: e
        for d, e in encodings.items()
        if e.fmt.tensor_scale or (e.fmt.has_scales and e.fmt.dims(d)[0] is None)
    }
    rest = [d for d in directions if d not in spanning]
    result = {d: [storage] for d, storage in hybrid.storages(x, rest)[0].items()} if rest else {}
    if spanning:
        pieces, zeros = x.split(route.sent), [0] * len(route.sent)
        found = [
            (e, s) for e in spanning.values() for s in dispatch.multi_tensor_amax(pieces, e, zeros)
        ]
        counters.add("amax all-reduce", "activations")
        shared = share_amaxes(found, route.group)
        for i, (d, e) in enumerate(spanning.items()):
            stats = shared[i * len(pieces) : (i + 1) * len(pieces)]
            encoded = dispatch.multi_tensor_encode(pieces, e, stats, zeros, [None] * len(pieces))
            result[d] = [
                Storage.of(one, e, piece.shape, x.dtype) for one, piece in zip(encoded, pieces)
            ]
    return result


def _count(route: TokenRoute, phase: str, direction: str, fmt: str, sent: Tensor) -> None:
    if route.ranks > 1:
        counters.add("expert dispatch", (phase, direction, fmt), sent.nbytes)


def _combined(y: Tensor, route: TokenRoute, phase: str) -> Tensor:
    rows = route.returned(y)
    _count(route, phase, "sum", "high precision", rows)
    return route.of_tokens(rows)


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, route, hybrid, directions):
        ctx.route = route
        return _dispatched(x.detach(), route, hybrid, directions, "forward")

    @staticmethod
    def backward(ctx, dx):
        return _combined(dx, ctx.route, "backward"), None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, route, hybrid, directions):
        ctx.route, ctx.quantizer, ctx.directions = route, hybrid, directions
        return _combined(y, route, "forward")

    @staticmethod
    def backward(ctx, dy):
        dy_e = _dispatched(dy, ctx.route, ctx.quantizer, ctx.directions, "backward")
        return dy_e, None, None, None


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
    route = route_tokens(splits, as_rows(x), group, alignment, what=f"{hybrid} {list(directions)}")
    return Dispatch.apply(x, route, hybrid, tuple(directions)), route


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
    return Combine.apply(y, route, hybrid, tuple(directions))


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

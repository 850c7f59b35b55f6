# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens go to the ranks that hold their experts as codes, and come back in
high precision.

[Note: what travels]
    tokens x [M, K] of each rank, sorted by expert  ->  x_e [M_e, K] of all ranks, one behind the
                                                        other, for each expert e held
    forward   x_e = dispatch(x)     y = combine(y_e)
    backward  dy_e = dispatch(dy)   dx = combine(dx_e)
A dispatch encodes each token once, sends its rowwise codes, and returns their values. Codes travel
where the values are exact: every scale serves one token and is a power of two. Quantized again,
rowwise codes have the same values; columnwise ones too, except those below the smallest normal
number of their block. An expert is then what it is of tokens that were rounded once. Otherwise
tokens travel in high precision. Results of a combine are added up: they stay in high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE
from ..linear.routes import sum_of_copies, tokens_of
from ..ops.capability import is_exact_in_bf16
from ..ops.layout import row_bytes
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..tensor import torch_compat
from .sequence import planned_bytes
from .token_route import TokenRoute, route_tokens

TRANSPORTS = ("auto", "codes", "high_precision")
REMEDY = "take a format whose scales serve one token and are powers of two (mxfp8, fp8_1x128)"


# The rule #


class Travel(NamedTuple):
    """How tokens travel: as rowwise codes of `hybrid`, or (None) in high precision; reason: why, in
    one clause."""

    hybrid: HybridQuantizer | None
    reason: str | None = None

    def __str__(self) -> str:
        if self.hybrid is None:
            return f"in high precision ({self.reason})"
        return f"as rowwise {self.hybrid.side(ROWWISE).fmt}"


@functools.cache
def travel_of(hybrid: HybridQuantizer, cols: int, dtype: torch.dtype, transport: str) -> Travel:
    """Return how tokens [.., cols] travel: "codes" wherever they can (see the note), "auto" where
    they are also fewer bytes, and no product reads the tokens in high precision."""
    if transport == "high_precision":
        return Travel(None, "so it was asked")
    encoding = hybrid.side(ROWWISE).encoding(ROWWISE)
    fmt, high = encoding.fmt, cols * dtype.itemsize
    if not fmt.is_quantized:
        return Travel(None, "it is not quantized")
    if encoding.stochastic:
        return Travel(None, f"rowwise {fmt} is rounded stochastically by an expert's rows")
    if not fmt.keeps_rows_apart:
        return Travel(None, f"a scale of rowwise {fmt} serves several tokens")
    if not is_exact_in_bf16(fmt) or dtype is torch.float16:
        return Travel(None, f"values of rowwise {fmt} are not exact in {dtype}")
    columnwise = hybrid.encodings.get(COLUMNWISE, encoding)  # else the values of rowwise codes
    if transport == "auto" and not columnwise.fmt.is_quantized:
        return Travel(None, "wgrad reads it in high precision")
    size = sum(planned_bytes("forward", hybrid, (ROWWISE,), (1, cols), dtype, 1).values())
    if transport == "auto" and size >= high:
        return Travel(None, f"codes are {size / high:.2f} of its bytes")
    return Travel(hybrid)


# Moving tokens #


def _dispatched(
    x: Tensor, route: TokenRoute, travel: Travel, phase: str, tokens: Tensor | None
) -> Callable[[], Tensor]:
    """Start to send x [M, K]; return the function that waits for what the experts of this rank are
    sent.

    tokens:  row of x of each row that is sent; None: x has them.
    """
    if travel.hybrid is None:
        arrived = route.spread([x], tokens)
        _count(route, phase, "both", "high precision", x)
        return lambda: arrived()[0]
    # once, whatever number of experts a token has, while the counts are on their way
    storage = travel.hybrid.side(ROWWISE).storage(x.contiguous(), ROWWISE)
    buffers = storage.buffers()
    arrived = route.spread([*buffers.values()], tokens)
    for buffer in buffers.values():
        _count(route, phase, "rowwise", storage.fmt.name, buffer)

    def values() -> Tensor:
        shape = sum(route.rows.received), x.shape[1]
        return storage.with_buffers(dict(zip(buffers, arrived())), shape=shape).dequantize(x.dtype)

    return values


def _count(route: TokenRoute, phase: str, direction: str, fmt: str, buffer: Tensor) -> None:
    """Count what this rank sends of a buffer."""
    if route.ranks > 1:
        size = sum(route.rows.sent) * row_bytes(buffer)
        counters.add("expert dispatch", (phase, direction, fmt), size)


class _Exchange(NamedTuple):
    """dispatches: of tokens to their experts; else of results back, which are summed. The backward
    is the other one. travel: of what is dispatched. begun: waits for what is under way."""

    route: TokenRoute
    travel: Travel
    dispatches: bool
    begun: list[Callable[[], Any]]

    def begin(self, x: Tensor, phase: str, tokens: Tensor | None = None) -> None:
        """Start to send x."""
        if self.dispatches is (phase == "forward"):
            wait = _dispatched(x, self.route, self.travel, phase, tokens)
        else:
            wait = self.route.returned(x)
            _count(self.route, phase, "sum", "high precision", x)
        self.begun[:] = [wait]


class _Exchanged(torch.autograd.Function):
    """begins, ends: the forward starts the exchange of x, or waits for it: one of two nodes that
    are around what runs meanwhile. The first returns what stands for x until it is there."""

    @staticmethod
    def forward(x, exchange, begins, ends, tokens, back):
        if begins:
            exchange.begin(x.detach(), "forward", tokens)
        return exchange.begun.pop()() if ends else x.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *ctx.of_exchange, _, back = inputs
        ctx.save_for_backward(back)

    @staticmethod
    def backward(ctx, dy):
        exchange, begins, ends = ctx.of_exchange
        if ends:
            exchange.begin(dy, "backward")
        if not begins:
            return dy.new_zeros(()), None, None, None, None, None
        dx, (back,) = exchange.begun.pop()(), ctx.saved_tensors
        return dx if back is None else sum_of_copies(dx, back), None, None, None, None, None


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
    if meanwhile is None:
        return torch_compat.applied(_Exchanged, x, exchange, True, True, tokens, back), None
    begun = torch_compat.applied(_Exchanged, x, exchange, True, False, tokens, back)
    result = meanwhile()
    return torch_compat.applied(_Exchanged, begun, exchange, False, True, None, None), result


def dispatch_tokens(
    x: Tensor,
    splits: Sequence[int] | Tensor,
    group: dist.ProcessGroup,
    quantizer=None,
    *,
    transport: str = "auto",
    routes: Sequence[Tensor] = (),
) -> tuple[Tensor, TokenRoute]:
    """(tokens of the experts that this rank holds, their route); every rank of `group` must call
    it.

    x:           [M, K], rows sorted by expert; M may be 0, and differ between ranks.
    splits:      of the experts of all ranks; see `route_tokens`, which reads the host once.
    quantizer:   `HybridQuantizer`, `Quantizer`, `Format` or a format's name: of the products that
                 read the tokens. None: they travel in high precision.
    transport:   "auto": rowwise codes where their values are exact (see the note), they are fewer
                 bytes, and the columnwise side is quantized too; "codes"; "high_precision".
    routes:      of x [T, K], as of `fq.GroupedLinear`, where a token goes to k experts: (`order`
                 [T * k], `back` [T, k]), and splits are of T * k rows. A token is encoded once.
    returns:     [sum of route.splits, K], the tokens or the values of their codes, by expert, then
                 by rank; its gradient goes back, and is that of x.

    Raises ValueError, on every rank, for transport="codes" of values that are not exact, and as
    `route_tokens`.
    """
    if x.dim() != 2:
        raise ValueError(f"dispatch_tokens: x is {list(x.shape)}; wanted [tokens, columns]")
    travel = _travel(quantizer, x, transport, "dispatch_tokens")
    route = route_tokens(splits, as_rows(x), group, f"{travel}", routes=routes)
    return exchanged(x, route, travel, True, routes)[0], route


def combine_tokens(
    y: Tensor, route: TokenRoute, quantizer=None, *, transport: str = "auto"
) -> Tensor:
    """Rows of the experts of this rank where their tokens came from, in high precision; every rank
    must call it.

    y:           [sum of route.splits, N].
    quantizer:   of the products that read the gradient of y, which is then dispatched as
                 `dispatch_tokens` does. None: it travels in high precision.
    returns:     [M, N].

    Raises ValueError for other rows than the route's, and as `dispatch_tokens`.
    """
    held = sum(route.rows.received)
    if y.dim() != 2 or y.shape[0] != held:
        raise ValueError(
            f"combine_tokens: y is {list(y.shape)}; wanted the {held} rows of its "
            "route, [rows, columns]"
        )
    travel = _travel(quantizer, y, transport, "combine_tokens")
    return exchanged(y, route, travel, False)[0]


def _travel(quantizer, x: Tensor, transport: str, name: str) -> Travel:
    if transport not in TRANSPORTS:
        raise ValueError(f"{name}: transports are {', '.join(TRANSPORTS)}, got {transport!r}")
    travel = Travel(None, "there is no quantizer")
    if quantizer is not None:
        travel = travel_of(hybrid_of(quantizer), x.shape[-1], x.dtype, transport)
    if travel.hybrid is None and transport == "codes":
        raise ValueError(
            f"{name}: transport='codes', and {travel.reason}; {REMEDY}, or pass transport='auto'"
        )
    return travel

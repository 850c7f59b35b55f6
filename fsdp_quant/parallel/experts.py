# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens go to the ranks that hold their experts as codes, and come back in
high precision.

[Note: what travels]
    tokens x [M, K] of each rank, sorted by expert  ->  x_e [M_e, K] of all ranks, one behind the
                                                        other, for each expert e held
    forward   x_e = dispatch(x)     y = combine(y_e)
    backward  dy_e = dispatch(dy)   dx = combine(dx_e)
What a dispatch brings is an operand of products: storages of Q(x_e), the bytes that an expert makes
of tokens it is sent in high precision. The rule is that of gathers (`sequence.codes_travel`), where
a piece is what one rank sends to one expert: codes travel where no block and no rotation reaches
from one piece into the next, which blocks along the tokens do unless pieces are filled up with zero
rows to a multiple of them. Scales of all tokens of an expert follow from amaxes that the ranks
share first, in one collective. What is not encoded from the values is derived from the rowwise
codes, where they arrive. Otherwise tokens travel in high precision, and are quantized where they
arrive. What a combine brings is added up: it stays in high precision.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..context import current_autocast
from ..counters import counters
from ..formats import ROWWISE, Direction
from ..modules.exchange import codes_travel
from ..modules.grouped_linear import EXPERT, GroupedLinear
from ..modules.plan import GemmPlan, build_plan
from ..ops import dispatch
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..recipe import Recipe
from ..scaling import share_amaxes
from ..storage import Placement, Storage
from ..tensor.agreement import agree, recipe_text
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from ..tensor.weight_state import values_of
from .sequence import travelling_bytes

TRANSPORTS = ("auto", "codes", "high_precision")


# Who sends what to whom #


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
    def own_experts(self) -> slice:
        experts = len(self.counts) // self.ranks
        return slice(self.group.rank() * experts, (self.group.rank() + 1) * experts)

    @property
    def splits(self) -> list[int]:
        """[E / R] rows of each expert of this rank, which `fq.GroupedLinear` takes."""
        return [sum(of) for of in zip(*self.arriving)]

    def placed(self, x: Tensor) -> Tensor:
        """x [M, K] as [sum of sent, K]: zero rows fill up what each expert is sent."""
        if self.sent == self.counts:
            return x.contiguous()
        return x.new_zeros(sum(self.sent), x.shape[1]).index_copy_(0, self._places(x.device), x)

    def taken(self, x: Tensor) -> Tensor:
        """The rows of tokens of x [sum of sent, K]."""
        return x if self.sent == self.counts else x.index_select(0, self._places(x.device))

    def _places(self, device: torch.device) -> Tensor:
        shifts = itertools.accumulate(
            (full - n for full, n in zip(self.sent, self.counts)), initial=0
        )
        shift = torch.tensor(list(shifts)[:-1], device="cpu").repeat_interleave(
            torch.tensor(self.counts, device="cpu")
        )
        return (shift + torch.arange(len(shift), device="cpu")).to(device, non_blocking=True)

    def spread(self, buffers: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """What the ranks' buffers hold for the experts of this rank, by expert, then by rank; in
        one all-to-all.

        buffers:  ([rows / n, ..], n): row-major, a row of which serves n of those that are sent.
        """
        experts = len(self.arriving[0])
        to = [sum(self.sent[r * experts : (r + 1) * experts]) for r in range(self.ranks)]
        row_bytes = [
            b[:1].nbytes if len(b) else b.new_empty(1, *b.shape[1:]).nbytes for b, _ in buffers
        ]
        cut = [
            _as_bytes(b).split([rows // n * size for rows in to])
            for (b, n), size in zip(buffers, row_bytes)
        ]
        packed = (
            torch.cat([b[r] for r in range(self.ranks) for b in cut])
            if len(buffers) > 1
            else _as_bytes(buffers[0][0])
        )
        sizes = [
            [sum(of) // n * size for (_, n), size in zip(buffers, row_bytes)]
            for of in self.arriving
        ]
        came = packed.new_empty(sum(map(sum, sizes)))
        self._exchange(
            came,
            packed,
            list(map(sum, sizes)),
            [sum(b[r].numel() for b in cut) for r in range(self.ranks)],
        )
        came = came.split([size for of in sizes for size in of])
        result = []
        for i, ((buffer, n), size) in enumerate(zip(buffers, row_bytes)):
            pieces = [
                part.split([rows // n * size for rows in of])
                for part, of in zip(came[i :: len(buffers)], self.arriving)
            ]
            ordered = torch.cat([piece[e] for e in range(experts) for piece in pieces])
            result.append(ordered.view(buffer.dtype).view(-1, *buffer.shape[1:]))
        return result

    def returned(self, y: Tensor) -> Tensor:
        """Rows of y [sum of splits, N], which lie by expert, then by rank, where they came from:
        [sum of sent, N]."""
        experts = len(self.arriving[0])
        size = y[:1].nbytes if len(y) else y.new_empty(1, y.shape[1]).nbytes
        pieces = _as_bytes(y).split([of[e] * size for e in range(experts) for of in self.arriving])
        packed = torch.cat(
            [pieces[e * self.ranks + r] for r in range(self.ranks) for e in range(experts)]
        )
        back = [sum(self.sent[r * experts : (r + 1) * experts]) * size for r in range(self.ranks)]
        # no view: users may write in place what FSDP2 hooks
        rows = y.new_empty(sum(self.sent), y.shape[1])
        self._exchange(_as_bytes(rows), packed, back, [sum(of) * size for of in self.arriving])
        return rows

    def _exchange(
        self, came: Tensor, packed: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        if self.ranks == 1:
            came.copy_(packed)
        else:
            dist.all_to_all_single(came, packed, arriving, sizes, group=self.group)


def _as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def route_tokens(
    splits: Sequence[int] | Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    alignment: int = 1,
    *,
    what: str = "",
    experts: int | None = None,
    name: str = "dispatch_tokens",
) -> TokenRoute:
    """The route of x [M, K], whose rows lie sorted by expert; every rank of `group` must call it.

    splits:   as of `fq.GroupedLinear`, of the experts of all ranks: counts on the host, or int
              tensor [E], the row behind each expert's last. One small all-to-all tells the ranks
              what arrives, and the host reads it: sizes of an uneven all-to-all are the host's.
    experts:  of all ranks; default: as many as splits has.
    what:     text that must be the same on every rank, as must K and the dtype.

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
    fine = (counts >= 0).all() & (counts.sum() == x.shape[0])
    text = f"of {experts} experts, {x.shape[1]} columns, {x.dtype}, alignment {alignment} {what}".strip()
    facts = torch.stack(
        [fine.long(), torch.full_like(fine, zlib.crc32(text.encode()), dtype=torch.int64)]
    )
    told = torch.cat([counts.view(group.size(), -1), facts.expand(group.size(), 2)], 1)
    came = torch.empty_like(told)
    if group.size() > 1:
        dist.all_to_all_single(came, told, group=group)
    else:
        came = told
    flat = torch.cat([counts, came.flatten()]).tolist()  # the one read
    counts, width = flat[:experts], came.shape[1]
    rows = [flat[i : i + width] for i in range(experts, len(flat), width)]
    wrong, other = [not of[-2] for of in rows], [of[-1] != rows[0][-1] for of in rows]
    if any(wrong):
        why = ValueError(
            f"{name}: the token splits {splits} of {x.shape[0]} rows are not of {experts} experts, "
            "or do not add up to its rows; give counts, none negative, that add up to the input's "
            "rows, or a tensor of the row behind each expert's last"
        )
        agree({}, [group], why if wrong[group.rank()] else None)
    if any(other):
        remedy = (
            "call it with the same experts, columns, dtype, alignment and quantizer on every rank"
        )
        agree({name: text}, [group], None, remedy, "ranks would send each other different tokens")
    arriving = [[-(-n // alignment) * alignment for n in of[:-2]] for of in rows]
    return TokenRoute(group, alignment, counts, arriving)


def _counts_of(splits: Sequence[int] | Tensor, experts: int) -> Tensor:
    """Integers [E]; of what are no splits of E experts some that nobody takes, so that every rank
    is told."""
    try:
        counts = splits if isinstance(splits, Tensor) else torch.tensor(list(splits), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        counts = torch.empty(0)
    if counts.shape != (experts,) or counts.is_floating_point() or counts.dtype is torch.bool:
        return torch.full((experts,), -1, device="cpu")
    return counts.diff(prepend=counts.new_zeros(1)) if isinstance(splits, Tensor) else counts


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
            rows = e.fmt.row_alignment(e.direction)
            return (
                f"{e.direction.value} {e.fmt} is rounded stochastically by an expert's rows"
                if e.stochastic
                else f"{e.direction.value} {e.fmt} has blocks of {rows} tokens, and ranks send "
                f"multiples of {alignment}"
            )
    size, high = (
        sum(travelling_bytes(e, alignment, cols, dtype, alignment) for e in encoded),
        alignment * cols * dtype.itemsize,
    )
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
    made = _encoded(placed, route, hybrid, gathered_directions(hybrid, frozenset(directions)))
    buffers, moving = [], []
    for d, storages in made.items():
        for name, placement in storages[0].placements(route.alignment).items():
            if placement is Placement.SHARD:
                of = [getattr(one, name) for one in storages]
                buffers.append(
                    (
                        torch.cat(of) if len(of) > 1 else of[0],
                        storages[0].fmt.dims(d)[0] if name == "scale" else 1,
                    )
                )
                moving.append((d, name))
                _count(route, phase, d.value, storages[0].fmt.name, buffers[-1][0])
    came = list(zip(moving, route.spread(buffers), (n for _, n in buffers)))
    parts, start = [], 0
    for e, rows in enumerate(route.splits, route.own_experts.start):
        part = {}
        for d, storages in made.items():
            fields = {
                name: t[start // n : (start + rows) // n] for (of, name), t, n in came if of is d
            }
            part[d.value] = replace(storages[e % len(storages)], shape=(rows, x.shape[1]), **fields)
        parts.append(StoragePair(**part))
        start += rows
    return QuantizedTensor(slots=StoragePair(parts=parts), shape=(start, x.shape[1]))


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
    made = {d: [storage] for d, storage in hybrid.storages(x, rest)[0].items()} if rest else {}
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
            made[d] = [
                Storage.of(one, e, piece.shape, x.dtype) for one, piece in zip(encoded, pieces)
            ]
    return made


def _count(route: TokenRoute, phase: str, direction: str, fmt: str, sent: Tensor) -> None:
    if route.ranks > 1:
        counters.add("expert dispatch", (phase, direction, fmt), sent.nbytes)


def _combined(y: Tensor, route: TokenRoute, phase: str) -> Tensor:
    rows = route.returned(y)
    _count(route, phase, "sum", "high precision", rows)
    return route.taken(rows)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, route, hybrid, directions):
        ctx.route = route
        return _dispatched(x.detach(), route, hybrid, directions, "forward")

    @staticmethod
    def backward(ctx, dx):
        return _combined(dx, ctx.route, "backward"), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, route, hybrid, directions):
        ctx.route, ctx.quantizer, ctx.directions = route, hybrid, directions
        return _combined(y, route, "forward")

    @staticmethod
    def backward(ctx, dy):
        return (
            _dispatched(dy, ctx.route, ctx.quantizer, ctx.directions, "backward"),
            None,
            None,
            None,
        )


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
    return _Dispatch.apply(x, route, hybrid, tuple(directions)), route


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
    return _Combine.apply(y, route, hybrid, tuple(directions))


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


# A module of experts #


class _Operand:
    """How one dispatch of a module travels: None in high precision, with the reason, else as codes
    of these directions."""

    def __init__(
        self, hybrid: HybridQuantizer | None, directions: tuple[Direction, ...], reason: str | None
    ):
        self.hybrid, self.directions, self.reason = hybrid, directions, reason

    def __str__(self) -> str:
        if self.hybrid is None:
            return f"in high precision ({self.reason})"
        encodings = (
            self.hybrid.encodings[d]
            for d in gathered_directions(self.hybrid, frozenset(self.directions))
        )
        return "as " + ", ".join(f"{e.direction.value} {e.fmt}" for e in encodings)


class ExpertDispatch:
    """What `ExpertParallel` gave a module: dispatch before its forward, combine behind it."""

    def __init__(
        self,
        module: nn.Module,
        style: ExpertParallel,
        group: dist.ProcessGroup,
        experts: int,
        name: str,
    ):
        self.module, self.style, self.group, self.experts, self.name = (
            module,
            style,
            group,
            experts,
            name,
        )
        self._under_way: list[tuple] = []
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.behind)

    def _layers(self, slot: str) -> list[nn.Module]:
        names = self.style.reads if slot == "input" else self.style.writes
        return [self.module.get_submodule(n) for n in names]

    @property
    def alignment(self) -> int:
        """Of what a rank sends to an expert."""
        if not self.style.pad:
            return 1
        hybrids = [h for slot in ("input", "grad_output") for h, _ in self._quantizers(slot)]
        return math.lcm(
            1, *(e.fmt.row_alignment(d) for h in hybrids for d, e in h.encodings.items())
        )

    def _quantizers(self, slot: str) -> set[tuple[HybridQuantizer, str]]:
        """(hybrid, what the backward keeps) of this slot, of all experts of its layers, on
        whichever rank they are."""
        layers = [layer for layer in self._layers(slot) if isinstance(layer, GroupedLinear)]
        plans = [p for m in layers for p in _plans(m.first.recipe, m._name, self.experts)]
        return {(plan.hybrid(slot), plan.saves) for plan in plans}

    def operand(self, slot: str, dtype: torch.dtype) -> _Operand:
        """How the tokens ("input") travel, or the gradient of what comes back ("grad_output").

        Raises ValueError for codes that were asked for, or that require_native wants, where they
        cannot travel.
        """
        layers, found = self._layers(slot), self._quantizers(slot)
        transport = self.style.transport if slot == "input" else self.style.gradients
        grad = torch.is_grad_enabled()
        trains = grad and any(p.requires_grad for layer in layers for p in layer.parameters())
        directions = tuple(Direction) if trains else (ROWWISE,)
        hybrid, saves = next(iter(found), (None, None))
        if not layers or not all(isinstance(layer, GroupedLinear) for layer in layers):
            forced = f"{'reads' if slot == 'input' else 'writes'}={[*self.style.names(slot)]} names no converted experts"
        elif len(found) > 1:
            forced = "experts quantize it differently"
        elif current_autocast() is not None:
            forced = "fq.autocast overrides the recipe"
        elif not any(e.fmt.is_quantized for e in hybrid.encodings.values()):
            return _Operand(None, directions, "it is not quantized")
        elif any(layer.first.plan.boundary is not None for layer in layers):
            forced = "the recipe has boundary slots"
        elif slot == "input" and trains and saves == "input":
            forced = "the backward keeps it in high precision"
        elif slot == "grad_output" and any(
            layer.bias is not None and layer.bias.requires_grad for layer in layers
        ):
            forced = "the gradient of a bias is its sum in high precision"
        else:
            cols = layers[0].first.in_features if slot == "input" else layers[0].first.out_features
            rule = functools.partial(
                why_high_precision, hybrid, directions, self.alignment, cols, dtype
            )
            forced = rule(transport="codes")
            reason = forced or rule(transport=transport)
            if (
                reason is None
                and transport == "auto"
                and layers[0].unsupported_reason(dtype, layers[0].weight.device) is None
            ):
                reason = "one product serves all experts, and between GPUs of one machine making codes took longer than they save"
            if reason is None:
                return _Operand(hybrid, directions, None)
            if forced is None:
                return _Operand(None, directions, reason)
        required = transport == "auto" and any(
            isinstance(layer, GroupedLinear) and layer.first.recipe.require_native
            for layer in layers
        )
        if transport == "codes" or required:
            asked = "require_native=True" if required else "it was asked to travel as codes"
            raise ValueError(
                f"{self.name}: {slot} would be dispatched in high precision ({forced}), and "
                f"{asked}; let pad=True fill what ranks send, give the recipe a columnwise side "
                "that follows from the rowwise codes, or ask for high precision"
            )
        return _Operand(None, directions, forced)

    @torch.compiler.disable
    def before(self, module: nn.Module, args: tuple) -> tuple:
        """(tokens of own experts, their splits, ..) of (this rank's tokens, splits, ..)."""
        if len(args) < 2 or not isinstance(args[0], Tensor):
            raise ValueError(
                f"{self.name}: call it with (tokens sorted by expert, splits), got {len(args)} "
                "positional arguments"
            )
        x, splits, *rest = args
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        tokens, gradients = self.operand("input", x.dtype), self.operand("grad_output", x.dtype)
        rows = as_rows(x)
        route = route_tokens(
            splits,
            rows,
            self.group,
            self.alignment,
            what=f"{tokens}, {gradients}",
            experts=self.experts,
            name=self.name,
        )
        self._under_way.append((route, gradients, x.shape))
        sizes = route.splits
        if isinstance(splits, Tensor):
            sizes = torch.tensor(sizes, device="cpu").cumsum(0).to(splits.device, splits.dtype)
        return _Dispatch.apply(rows, route, tokens.hybrid, tokens.directions), sizes, *rest

    @torch.compiler.disable
    def behind(self, module: nn.Module, args: tuple, y: Tensor) -> Tensor:
        """Results of this rank's tokens, of those of own experts."""
        route, gradients, shape = self._under_way.pop()
        self._under_way.clear()  # of forwards that raised
        if y.shape[0] != sum(route.splits) or y.dim() != 2:
            raise ValueError(
                f"{self.name}: its forward gave {list(y.shape)}; wanted a row for each of "
                f"{sum(route.splits)} tokens"
            )
        y = _Combine.apply(y, route, gradients.hybrid, gradients.directions)
        return y if len(shape) == 2 else y.view(*shape[:-1], y.shape[-1])

    def __deepcopy__(self, memo) -> ExpertDispatch:
        copied = memo[id(self)] = copy.copy(self)  # of the same ranks
        copied.module, copied._under_way = copy.deepcopy(self.module, memo), []
        return copied


@functools.cache
def _plans(recipe: Recipe, name: str, experts: int) -> tuple[GemmPlan, ...]:
    """The plans that experts have, each once."""
    return tuple(
        dict.fromkeys(build_plan(recipe, f"{name}.{e}", module_type=EXPERT) for e in range(experts))
    )


class ExpertParallel(ParallelStyle):
    """Experts of a module over the ranks of one mesh axis; it is called with all of a rank's
    tokens, as without the style.

    reads, writes:  names of the `fq.GroupedLinear` submodules that multiply the tokens, and of the
                    one whose output the module returns ("": the module itself, which is the default
                    of one). They quantize what travels.
    transport:      of tokens: "auto": codes where they may travel and are fewer bytes; "codes";
                    "high_precision".
    gradients:      of the output: the same; default "high_precision". Gradients of tokens, and
                    outputs, are sums: always in high precision.
    pad:            fill what a rank sends to an expert with zero rows, so that blocks along the
                    tokens end with it: the tokens of an expert are then other rows, which its
                    columnwise codes depend on.

    Call: y [.., N] = module(x [.., K], splits): rows sorted by expert, splits as of
    `fq.GroupedLinear`, of all experts. Every rank calls it, also without tokens. The module's
    forward is given the tokens of the experts that the rank holds, by expert, then by rank: in high
    precision, or a `QuantizedTensor`, which only these layers read. The host waits once for the
    numbers of tokens.

    Every parameter of the module is cut along dim 0, between experts, and is a DTensor: checkpoints
    fit other numbers of ranks. Apply it before or after `fq.convert`, and before
    `fully_shard(module, mesh=)`, whose mesh is another axis of the same mesh. Gradients of an
    expert are sums over the ranks of its axis: where the loss is a mean over ranks, give the module
    `set_gradient_divide_factor(ranks of both axes)` (with gloo,
    `set_force_sum_reduction_for_comms(True)` too). It runs eagerly: under torch.compile it breaks
    the graph.

    Raises ValueError, on every rank, for a mesh of more axes, parameters that R does not divide or
    that disagree about the number of experts, experts under `fully_shard`, and names of no
    submodule.
    """

    def __init__(
        self,
        *,
        reads: str | Sequence[str] | None = None,
        writes: str | None = None,
        transport: str = "auto",
        gradients: str = "high_precision",
        pad: bool = False,
    ):
        super().__init__()
        self.reads = [reads] if isinstance(reads, str) else None if reads is None else list(reads)
        self.writes = None if writes is None else [writes]
        self.transport, self.gradients, self.pad = transport, gradients, pad
        for option in ("transport", "gradients"):
            if getattr(self, option) not in TRANSPORTS:
                raise ValueError(
                    f"ExpertParallel: {option} must be one of {', '.join(TRANSPORTS)}, got "
                    f"{getattr(self, option)!r}"
                )

    def names(self, slot: str) -> list[str]:
        return (self.reads if slot == "input" else self.writes) or []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = getattr(module, "_name", type(module).__name__)
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{name}: ExpertParallel takes a mesh of one axis, got {device_mesh.ndim} "
                f"({device_mesh.mesh_dim_names}); pass "
                'the axis of expert parallelism, such as mesh["ep"]'
            )
        style, parameters, error = copy.copy(self), dict(module.named_parameters()), None
        own = [""] if "weight" in module._parameters else []
        style.reads, style.writes = (
            own if self.reads is None else self.reads,
            own if self.writes is None else self.writes,
        )
        experts = next((p.shape[0] for p in parameters.values() if p.dim() == 3), 0)
        try:
            _check_experts(name, parameters, experts, device_mesh)
            for one in (*style.reads, *style.writes):
                module.get_submodule(one)
        except (ValueError, AttributeError) as caught:
            error = caught
        facts = {f"{name}.{key}": f"{list(p.shape)} {p.dtype}" for key, p in parameters.items()}
        facts |= {
            f"{name}.{key}, its recipe": recipe_text(m.layers[0])
            for key, m in module.named_modules()
            if isinstance(m, GroupedLinear)
        }
        agree(facts, device_mesh.get_all_groups(), error)
        module.expert_dispatch = ExpertDispatch(
            module, style, device_mesh.get_group(), experts, name
        )
        for child in module.modules():
            _cut(child, device_mesh)
        return module


def _check_experts(
    name: str, parameters: Mapping[str, Tensor], experts: int, mesh: DeviceMesh
) -> None:
    """Raise ValueError for parameters that are not packed experts, or that the ranks do not
    divide."""
    for key, p in parameters.items():
        is_packed = p.dim() == 3 or (p.dim() == 2 and key.rpartition(".")[2] == "bias")
        if (
            isinstance(p, DTensor)
            or not is_packed
            or p.shape[0] != experts
            or experts % mesh.size()
        ):
            raise ValueError(
                f"{name}: ExpertParallel cuts packed parameters [experts, ..] between {experts} "
                f"experts, over {mesh.size()} ranks, and {key} is "
                f"{'a DTensor' if isinstance(p, DTensor) else 'of shape'} {list(p.shape)}; give it "
                "packed experts alone, whose number the ranks divide, before fully_shard"
            )


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank's experts in the module's own parameters."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            cut = distribute_tensor(values_of(parameter).detach(), mesh, [Shard(0)])
            module._parameters[key] = nn.Parameter(cut, parameter.requires_grad)
    if isinstance(module, GroupedLinear):
        module.take_packed([layer.recipe for layer in module._linears], module._name)


def planned_dispatch(
    module: nn.Module, counts: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> dict[tuple, int]:
    """What this rank's tokens take on their ways in a forward and backward: (pass, direction,
    format) -> bytes, as `receipt` says.

    module:  with `ExpertParallel`, whose layers are converted.
    counts:  [E] of this rank's tokens.
    """
    its = module.expert_dispatch
    rows, planned = sum(-(-n // its.alignment) * its.alignment for n in counts), {}
    k, n = (its._layers(slot)[0].first for slot in ("input", "grad_output"))
    for phase, slot, cols in (
        ("forward", "input", k.in_features),
        ("backward", "grad_output", n.out_features),
    ):
        operand = its.operand(slot, dtype)
        if operand.hybrid is None:
            planned[phase, "both", "high precision"] = rows * cols * dtype.itemsize
        else:
            for d in gathered_directions(operand.hybrid, frozenset(operand.directions)):
                encoding = operand.hybrid.encodings[d]
                size = travelling_bytes(encoding, rows, cols, dtype, its.alignment)
                planned[phase, d.value, encoding.fmt.name] = size
    planned["forward", "sum", "high precision"] = rows * n.out_features * dtype.itemsize
    planned["backward", "sum", "high precision"] = rows * k.in_features * dtype.itemsize
    return planned


def describe_experts(module: nn.Module, dtype: torch.dtype) -> str | None:
    """A line of `fq.plan` about what ranks exchange for a module of experts; None where they do
    not."""
    its = getattr(module, "expert_dispatch", None)
    if its is None:
        return None
    filled = f", filled up to multiples of {its.alignment}" if its.alignment > 1 else ""
    with torch.enable_grad():
        tokens, gradients = its.operand("input", dtype), its.operand("grad_output", dtype)
    return (
        f"{its.experts} experts over {its.group.size()} ranks: tokens are dispatched {tokens}, "
        f"gradients of the output {gradients}{filled}"
    )

"""How FSDP2 gathers a `MasterWeight` or a `QuantizedWeight`: as the codes of the direction that this pass multiplies.

[Note: one gather]
    pre    shard of the master -> codes and scales of the needed direction -> uint8 [rows per rank, bytes]
    NCCL   [world * rows per rank, bytes] of every buffer that shards; replicated ones ride as metadata
    post   views of the gathered buffers (no copy) -> the storages of one `QuantizedTensor`

FSDP2 fixes number, dtype and size of a parameter's gather buffers at the first gather and frees and refills
their storages from then on. So there is one persistent set of buffers a direction, and pre, which runs while
the parameter is sharded and the buffers are free, chooses the set.

Shared statistics (amaxes of whole tensors, and of blocks that a shard boundary cuts) must be reduced before any
rank encodes. That takes one MAX all-reduce for all weights of a shard group. It is issued by the first gather
after an event that every rank shares marked the weights pending: creation, an optimizer step, a load, a state
dict handed out, a change of recipe, `fq.sync`. Nothing rank-local ever decides it. The step of a `QuantizedWeight`'s optimizer
issues it, and encodes, when it ends (`write_back`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, SCALE_BYTES, SCALE_DTYPE, Direction, Encoding
from ..ops.layout import COMPACT
from ..scaling import Fragment, RowCuts, share_statistics
from ..storage import Placement, Storage, laid_out, scale_placement
from . import torch_compat, writers
from .quantized_tensor import QuantizedTensor, Slots
from .torch_compat import ManagedParam


@dataclass(frozen=True)
class WireBuffer:
    """One buffer of one direction as it is gathered.

    name:       field of `Storage`.
    rows:       per rank, the most that any rank holds; shorter ranks pad with zero rows.
    row_bytes:  bytes of a row.
    halo_index: gathered row of each logical row, where ranks on both sides of a cut send a block's row.
    """

    name: str
    rows: int
    row_bytes: int
    halo_index: tuple[int, ...] | None = None


def wire_buffers(encoding: Encoding, cuts: RowCuts, cols: int, high_precision: torch.dtype) -> list[WireBuffer]:
    """The buffers of one encoding that travel; a pure function of facts that all ranks share.

    Raises ValueError for an encoding that a cut would change: a rotation that mixes rows of two shards.
    """
    fmt, direction = encoding.fmt, encoding.direction
    chunk = cuts.bounds[1] if len(cuts.bounds) > 2 else None
    padded_cols = fmt.padded_shape((cuts.rows, cols), direction)[1]
    buffers = [WireBuffer("data", cuts.bounds[1], fmt.row_bytes(padded_cols, high_precision))]
    placement = None if fmt.scale == "none" else scale_placement(fmt, direction, chunk)
    if placement in (Placement.SHARD, Placement.HALO):
        b0 = fmt.dims(direction)[0]
        spans = [(a // b0, -(-b // b0) if b > a else a // b0) for a, b in zip(cuts.bounds, cuts.bounds[1:])]
        rows = max(last - first for first, last in spans)
        index = None
        if placement is Placement.HALO:
            owner = {}
            for rank, (first, last) in enumerate(spans):
                for block in range(first, last):
                    owner.setdefault(block, rank * rows + block - first)
            index = tuple(owner[block] for block in sorted(owner))
        row_bytes = fmt.scale_shape((cuts.rows, cols), direction)[1] * SCALE_BYTES[fmt.scale]
        buffers.append(WireBuffer("scale", rows, row_bytes, index))
    return buffers


@dataclass(eq=False)
class DirectionBuffers:
    """Persistent buffers of one direction of one gathered weight.

    outputs:  uint8 [world * rows * row_bytes], one a wire buffer that NCCL fills.
    filled:   buffers that post fills, by field of `Storage`: replicated, re-indexed or derived ones.
    halo:     those that post re-indexes: (gathered rows, index of each logical row), the index never freed.
    storage:  the whole tensor's, viewing both.
    """

    outputs: list[Tensor]
    filled: dict[str, Tensor]
    halo: dict[str, tuple[Tensor, Tensor]]
    storage: Storage

    @property
    def refilled(self) -> list[Tensor]:
        """Of `filled`, what is freed and filled at each gather: scalars are not worth freeing."""
        return [t for t in self.filled.values() if t.numel() > 1]

    def free(self) -> None:
        for tensor in (*self.outputs, *self.refilled):
            torch_compat.free_storage(tensor)


class Pass(NamedTuple):
    """What a gather for some directions moves.

    needs:       directions that the pass multiplies.
    directions:  those that are encoded and sent.
    outputs:     the buffers that NCCL fills, in the order of the inputs.
    filled:      the other buffers of the storages that are freed with them.
    sizes:       (direction, format, bytes) of each direction that is sent, to be counted.
    is_kept:     the inputs are kept while the master does not change: all are codes.
    """

    needs: frozenset[Direction]
    directions: tuple[Direction, ...]
    outputs: list[Tensor]
    filled: list[Tensor]
    sizes: list[tuple[str, str, int]]
    is_kept: bool


class Sent(NamedTuple):
    """What a weight gives to a gather: uint8 [rows, bytes] of every wire buffer, and buffers that do not shard."""

    inputs: tuple[Tensor, ...]
    filled: dict[tuple[Direction, str], Tensor]


class Arrival(NamedTuple):
    """What a rank knows of a gather besides the bytes.

    version:   of the master.
    filled:    see `Sent`.
    together:  all weights of the gather, in the order of their hooks.
    """

    chosen: Pass
    version: object
    filled: dict[tuple[Direction, str], Tensor]
    together: list[GatheredWeight]


def gathered_size(buffers: list[WireBuffer], world_size: int) -> int:
    """Bytes of the gathered output of one direction's buffers, on every rank."""
    return sum(world_size * b.rows * b.row_bytes for b in buffers)


def gathered_directions(quantizer, needs: frozenset[Direction]) -> tuple[Direction, ...]:
    """Encodings to gather for the directions a pass multiplies: one that is not encoded comes from the rowwise one."""
    return tuple(d for d in quantizer.encodings if d in needs or (d is ROWWISE and not needs <= quantizer.encodings.keys()))


class GatheredWeight:
    """The unsharded side of one weight under FSDP2: geometry, persistent buffers, and the tensor over them."""

    def __init__(self, state, managed: ManagedParam):
        self.state, self.managed = state, managed
        self.quantizer = state.quantizer
        self.rows, self.cols = managed.global_shape
        self.cuts = RowCuts.chunked(self.rows, managed.world_size)
        self.dtype = managed.param_dtype
        self.wire = {
            d: wire_buffers(e, self.cuts, self.cols, self.dtype) for d, e in self.quantizer.encodings.items()
        }
        self.buffers = {d: self._allocate(d) for d in self.quantizer.encodings}
        self.derived = None
        if self.quantizer.is_derived:
            self.derived = self._allocate_derived()
        self.passes = self._passes()
        self.outgoing: tuple[tuple[Tensor, ...], Arrival] | None = None  # prepared, and not asked for yet
        self.arrival: Arrival | None = None  # sent, and not received yet
        self._sent: tuple[object, dict[tuple[Direction, ...], Sent]] = (None, {})  # of this version
        self._reductions = self._reductions_before = 0  # gathers of this version that served one, and of the one before
        self.slots = Slots(owner=state)
        for direction in Direction:
            if direction in self.buffers:
                storage = self.buffers[direction].storage
            elif self.derived is not None:
                storage = self.derived.storage
            else:
                storage = self.buffers[ROWWISE].storage.as_direction(direction)
            setattr(self.slots, direction.value, storage)

    # Buffers #

    def _allocate(self, direction: Direction) -> DirectionBuffers:
        encoding = self.quantizer.encodings[direction]
        fmt, shape, device = encoding.fmt, (self.rows, self.cols), self.managed.device
        world = self.managed.world_size
        outputs, filled, halo, fields = [], {}, {}, {}
        scale_shape = fmt.scale_shape(shape, direction)
        if scale_shape is not None:
            filled["scale"] = torch.empty(scale_shape, dtype=SCALE_DTYPE[fmt.scale], device=device)
        if fmt.tensor_scale:
            filled["tensor_amax"] = torch.empty(1, dtype=torch.float32, device=device)
        for i, buffer in enumerate(self.wire[direction]):
            if world == 1 and i > 0:
                break  # FSDP2 keeps only the first input of a world of one: the rest rides as metadata
            output = torch.empty(world * buffer.rows * buffer.row_bytes, dtype=torch.uint8, device=device)
            outputs.append(output)
            if buffer.halo_index is not None:
                halo[buffer.name] = (output.view(-1, buffer.row_bytes), torch.tensor(buffer.halo_index, device=device))
            else:
                fields[buffer.name] = self._view(output, buffer, fmt, direction)
                filled.pop(buffer.name, None)
        whole = {"scale": None, "tensor_amax": None} | filled | fields
        buffers = DirectionBuffers(outputs, filled, halo, Storage(fmt, direction, shape, dtype=self.dtype, **whole))
        buffers.free()
        return buffers

    def _view(self, output: Tensor, buffer: WireBuffer, fmt, direction: Direction) -> Tensor:
        """The logical buffer over its gathered bytes: padding rows all lie behind the last one."""
        rows = output.view(-1, buffer.row_bytes)
        if buffer.name == "data":
            return (rows if fmt.is_quantized else rows.view(self.dtype))[: self.rows]
        return rows.view(SCALE_DTYPE[fmt.scale])[: fmt.scale_shape((self.rows, self.cols), direction)[0]]

    def _allocate_derived(self) -> DirectionBuffers:
        with torch.no_grad():
            like = torch.zeros(self.rows, self.cols, dtype=self.dtype, device=self.managed.device)
            storage = self.quantizer.columnwise.storage(like, COLUMNWISE)
        buffers = DirectionBuffers([], storage.buffers(), {}, storage)
        buffers.free()
        return buffers

    def _passes(self) -> dict[frozenset[Direction], Pass]:
        """What a pass that multiplies these directions gathers, fills and frees."""
        passes = {}
        for needs in (frozenset({ROWWISE}), frozenset({COLUMNWISE}), frozenset(Direction)):
            directions = gathered_directions(self.quantizer, needs)
            chosen = [self.buffers[d] for d in directions]
            if self.derived is not None and COLUMNWISE in needs:
                chosen.append(self.derived)
            sizes = [
                (d.value, self.quantizer.encodings[d].fmt.name, gathered_size(self.wire[d], self.managed.world_size))
                for d in directions
            ]
            outputs, filled = [t for b in chosen for t in b.outputs], [t for b in chosen for t in b.refilled]
            kept = all(self.quantizer.encodings[d].fmt.is_quantized for d in directions)
            passes[needs] = Pass(needs, directions, outputs, filled, sizes, kept)
        return passes

    # The two halves of a gather #

    def sent(self, version: object, chosen: Pass) -> Sent | None:
        """What `pack` gave for these directions of this version."""
        if self._sent[0] != version:
            self._sent = (version, {})
            self._reductions, self._reductions_before = 0, max(self._reductions, 1)
        return self._sent[1].get(chosen.directions)

    def pack(self, chosen: Pass, encoded: list) -> Sent:
        """The buffers of each direction's codes, as they travel; kept while the master does not change."""
        inputs, filled = [], {}
        for direction, one in zip(chosen.directions, encoded):
            for i, buffer in enumerate(self.wire[direction]):
                own = _as_bytes(getattr(one, buffer.name), buffer)
                if self.managed.world_size == 1 and (i > 0 or inputs):
                    filled[direction, buffer.name] = own
                else:
                    inputs.append(own)
            for name in self.buffers[direction].filled:
                if (direction, name) not in filled:
                    filled[direction, name] = getattr(one, name)
        sent = Sent(tuple(inputs), filled)
        if chosen.is_kept:
            self._sent[1][chosen.directions] = sent
        return sent

    def shards(self, weight, directions: Sequence[Direction]) -> list:
        """What the gather of these directions asks of a weight."""
        return [self.state.shard(weight, d, self.cuts, self.managed.rank, self.dtype) for d in directions]

    def forget_sent(self) -> None:
        """Pack anew at the next gather."""
        self._sent = (None, {})

    def let_go(self) -> None:
        """The gather that is under way serves a backward that reduces gradients: if the version before had no more of them,
        an optimizer step follows, and no codes are kept until then."""
        self._reductions += 1
        if self._reductions == self._reductions_before:
            self._sent = (self._sent[0], {})
            self.state.let_go_of_shard()

    def unpack(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, what it is to hold) of all that NCCL did not fill: replicated buffers, rows of cut blocks in order."""
        filled, copies = self.arrival.filled, []
        for direction in self.arrival.chosen.directions:
            buffers = self.buffers[direction]
            for name, target in buffers.filled.items():
                if name in buffers.halo:
                    rows, index = buffers.halo[name]
                    source = rows.index_select(0, index)
                else:
                    source = filled[direction, name]
                copies.append((target, source.view(target.dtype) if source.dtype is torch.uint8 else source))
            if (direction, "data") in filled:  # a world of one: the second direction's codes
                torch_compat.alloc_storage(buffers.outputs[0])
                copies.append((buffers.outputs[0], filled[direction, "data"].view(-1)))
        return copies

    def derive(self) -> None:
        """Make the columnwise storage from the rowwise one that arrived, where the quantizer says so."""
        if self.derived is not None and COLUMNWISE in self.arrival.chosen.needs:
            fresh = self.quantizer.derive_columnwise(self.slots.rowwise, self.state.compute_dtype)
            for name, target in self.derived.filled.items():
                target.copy_(getattr(fresh, name))

    def lay_out(self) -> list[tuple[Direction, str]]:
        """The codes are there: how products will read them, as far as the passes before tell (`Slots.wanted`)."""
        slots, needs, version = self.slots, self.arrival.chosen.needs, self.arrival.version
        for key in [key for key in slots.laid_out if key not in slots.views]:
            del slots.laid_out[key]  # of the codes before
        wanted = [
            (d, layout) for d in needs for layout in slots.wanted[d]
            if layout != COMPACT and (d, layout) not in slots.views
        ]
        if ROWWISE in needs and slots.version.get(ROWWISE) != version:
            for layouts in slots.wanted.values():  # the passes over this version will tell anew
                layouts.clear()
        slots.version.update(dict.fromkeys(needs, version))
        return wanted

    def free_unread(self) -> None:
        """Free the codes of a backward that are laid out for all products of their forward."""
        if writers.checking:
            return  # which reads them
        slots = self.slots
        if self.arrival.chosen.needs == {COLUMNWISE} and slots.wanted[COLUMNWISE] and COMPACT not in slots.wanted[COLUMNWISE]:
            data = slots.columnwise.data
            if all(s.data.data_ptr() != data.data_ptr() for (d, _), s in slots.laid_out.items() if d is COLUMNWISE):
                torch_compat.free_storage(data)


@torch.no_grad()
def receive(group: list[GatheredWeight]) -> None:
    """Fill what NCCL did not, and lay codes out as products read them: all weights of a group at once."""
    torch_compat.copy_all([copy for gathered in group for copy in gathered.unpack()])
    for gathered in group:
        gathered.derive()
    wanted = [(gathered, d, layout) for gathered in group for d, layout in gathered.lay_out()]
    made = laid_out([(gathered.slots.get(d), layout) for gathered, d, layout in wanted])
    for (gathered, d, layout), storage in zip(wanted, made):
        gathered.slots.take(d, layout, storage)
    for gathered in group:
        gathered.free_unread()
        gathered.arrival = None


def _as_bytes(tensor: Tensor, buffer: WireBuffer) -> Tensor:
    """A rank's rows as uint8 [buffer.rows, buffer.row_bytes], zero rows behind them."""
    rows = tensor
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or not rows.is_contiguous():
        rows = tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], buffer.row_bytes)
    return F.pad(rows, (0, 0, 0, buffer.rows - rows.shape[0])) if rows.shape[0] < buffer.rows else rows


class PreHook:
    """What FSDP2 calls to learn what a weight sends; each gather asks for its signature, which is told here at once."""

    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    __slots__ = ("weight",)

    def __init__(self, weight: FSDPHooks):
        self.weight = weight

    def __call__(self, mesh):
        gathered = self.weight.state.gathered
        if gathered is None or gathered.outgoing is None:  # the first of its group
            gathered = prepare(self.weight)
        outgoing, gathered.outgoing = gathered.outgoing, None
        return outgoing


@torch.no_grad()
def prepare(weight) -> GatheredWeight:
    """Ready what the gather that asks `weight` first sends, of all weights of its group at once."""
    first = gathered_weight(weight)
    managed = first.managed
    local = [one for one in managed.group_locals() if isinstance(one, FSDPHooks)]
    together = [gathered_weight(one) for one in local]
    if weight.device != managed.local.device:  # offloaded: each comes to the device as it is asked
        asked = [(weight, first)]
    else:
        asked = list(zip(local, together))
    if any(one.state.pending for one, _ in asked):
        synchronize([managed])
    needs = [directions_needed(managed, recomputes) for recomputes in (False, True)]
    phase, reduces = managed.phase, managed.gathers_for_reduction
    missing, shards, ready = [], [], []
    for one, gathered in asked:
        chosen, version = gathered.passes[needs[one.state.recomputes]], one.version
        sent = gathered.sent(version, chosen)
        if sent is None:
            missing.append(len(ready))
            shards += gathered.shards(one, chosen.directions)
        ready.append((gathered, chosen, version, sent))
    encoded = iter(first.state.encode(shards))
    for i in missing:
        gathered, chosen, version, _ = ready[i]
        ready[i] = gathered, chosen, version, gathered.pack(chosen, list(itertools.islice(encoded, len(chosen.directions))))
    for gathered, chosen, version, sent in ready:
        gathered.managed.set_gather_buffers(chosen.outputs, list(chosen.filled))
        for direction, fmt, size in chosen.sizes:
            counters.add("gather", (phase, direction, fmt), size)
        gathered.outgoing = sent.inputs, Arrival(chosen, version, sent.filled, together)
        if reduces and gathered.managed.registered.requires_grad:
            gathered.let_go()
    return first


class FSDPHooks:
    """The extension points that FSDP2 looks up on a DTensor's local tensor.

    The one-parameter form of pre skips a check that only short ranks would fail (and hang the others).
    """

    @property
    def fsdp_pre_all_gather(self) -> PreHook:
        return PreHook(self)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        gathered = self.state.gathered
        gathered.arrival = metadata
        managed = gathered.managed
        if out is None:
            for tensor in managed.inner_buffers:  # torch has done so of a weight that was gathered before
                torch_compat.alloc_storage(tensor)
        if metadata.together[-1] is gathered:  # nothing is read before the last of a group
            receive([g for g in metadata.together if g.arrival is not None])
        if out is None:
            return QuantizedTensor(slots=gathered.slots), managed.inner_buffers


def directions_needed(managed: ManagedParam, recomputes: bool) -> frozenset[Direction]:
    """Which directions the pass that gathers now will multiply before it reshards.

    recomputes:  the backward recomputes the forward of the weight's module.
    """
    both = frozenset(Direction)
    if managed.in_pre_backward:
        return both if recomputes or managed.stays_unsharded_after_backward else frozenset({COLUMNWISE})
    if managed.in_forward and not managed.stays_unsharded_after_forward:
        return both if torch_compat.backward_is_running() else frozenset({ROWWISE})
    return both


def gathered_weight(weight) -> GatheredWeight:
    """The unsharded side of this weight, built at its first gather and after each change of recipe.

    Raises on every rank alike, from facts that all ranks share, for layouts that cannot be gathered.
    """
    state = weight.state
    managed = _managed_of(state)
    if managed is None:
        raise RuntimeError(f"{state.name} is gathered, but no fully_shard call of this process manages it")
    if managed is not state.managed:
        state.managed, state.gathered = managed, None
    gathered = state.gathered
    if gathered is None or gathered.dtype != managed.param_dtype:
        for other in torch_compat.managed_params_beside(managed):
            check_layout(other)
        state.gathered = gathered = GatheredWeight(state, managed)
        managed.reset_gather_buffers()
    return gathered


def check_layout(managed: ManagedParam) -> None:
    """Raise ValueError for a weight that FSDP2 cannot gather as codes, naming it, got, wanted and the remedy."""
    if not isinstance(managed.local, FSDPHooks):
        return
    state, name = managed.local.state, managed.local.state.name
    if len(managed.global_shape) != 2:
        raise ValueError(
            f"{name} is {list(managed.global_shape)}: FSDP2 gathers codes of weights of two dims; build fq.GroupedLinear with "
            "packed=False, so that each expert has its own"
        )
    if managed.reshards_to_smaller_world:
        raise ValueError(
            f"{name}: reshard_after_forward=<int> keeps a part of the unsharded weight, which codes with scales have no "
            "form for; pass True or False to fully_shard"
        )
    if managed.shard_dim != 0:
        raise ValueError(
            f"{name}: sharded along dim {managed.shard_dim}; codes and scales shard along dim 0 only: "
            "leave shard_placement_fn out, or return Shard(0) for this weight"
        )
    cuts = _cuts(managed)
    for encoding in state.quantizer.encodings.values():
        if encoding.fmt.rotated and encoding.direction is COLUMNWISE and len(set(cuts.bounds)) > 2:
            raise ValueError(
                f"{name}.columnwise is {encoding.fmt}: the rotation mixes rows of different ranks "
                f"({cuts.rows} rows over {managed.world_size}); rotate activations and gradients, not weights"
            )


def all_managed_weights() -> list[ManagedParam]:
    """Every weight that is gathered as codes under any `fully_shard` of the process."""
    return [m for m in torch_compat.all_managed_params() if isinstance(m.local, FSDPHooks)]


def synchronize(managed: list[ManagedParam]) -> None:
    """Share statistics of all pending weights of the same roots: one MAX all-reduce a shard group.

    Every rank must call it with the same weights pending; empty shards take part.
    """
    by_group: dict[object, list[ManagedParam]] = {}
    roots = {torch_compat.root_of(m): m for m in managed}
    beside = {id(m.param): m for one in roots.values() for m in torch_compat.managed_params_beside(one)}
    for m in beside.values():
        local = m.local
        if isinstance(local, FSDPHooks) and local.state.pending:
            if local.state.gathered is None:
                check_layout(m)
            by_group.setdefault(m.process_group, []).append(m)
    for group, weights in by_group.items():
        fragments = [(m.local, _fragment(m)) for m in weights]
        crossing = [(local, f) for local, f in fragments if local.state.shares_statistics(f.cuts)]
        shared = share_statistics([f for _, f in crossing], group)
        if shared:
            counters.add("amax all-reduce", "weights")
        for (local, _), stats in zip(crossing, shared):
            local.state.set_statistics(local.version, stats)
        for local, _ in fragments:
            local.state.pending = False


def write_back(weights: list) -> None:
    """Codes of quantized parameters after an optimizer's step, from statistics reduced at once for each shard group.

    Every rank that steps the optimizer must call it.
    """
    managed = {id(w.state): _managed_of(w.state) for w in weights}
    synchronize([m for m in managed.values() if m is not None])
    shards = []
    for weight in weights:
        m, state = managed[id(weight.state)], weight.state
        cuts, rank = (RowCuts((0, weight.shape[0])), 0) if m is None else (_cuts(m), m.rank)
        quantized = [d for d, e in state.quantizer.encodings.items() if e.fmt.is_quantized]
        shards += [state.shard(weight, d, cuts, rank, weight.dtype) for d in quantized]
    if shards:
        shards[0].weight.state.encode(shards)


def _managed_of(state) -> ManagedParam | None:
    """This weight under `fully_shard`, or None."""
    managed = state.managed
    if managed is not None and isinstance(managed.local, FSDPHooks) and managed.local.state is state:
        return managed
    return next((m for m in all_managed_weights() if m.local.state is state), None)


def _cuts(managed: ManagedParam) -> RowCuts:
    return RowCuts.chunked(managed.global_shape[0], managed.world_size)


def _fragment(managed: ManagedParam) -> Fragment:
    state = managed.local.state
    values = managed.local.inner.detach().to(managed.device)
    encodings = tuple(state.quantizer.encodings.values())
    return Fragment(values, encodings, _cuts(managed), managed.rank, state.compute_dtype)

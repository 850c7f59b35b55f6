"""How FSDP2 gathers a `MasterWeight` or a `QuantizedWeight`: as the codes of the direction that this pass multiplies.

[Note: one gather]
    pre    shard of the master -> codes and scales of the needed direction -> uint8 [rows per rank, bytes]
           a buffer that every rank makes whole -> the storage that it is of
    NCCL   [world * rows per rank, bytes] of every buffer that shards
    post   views of the gathered buffers (no copy) -> the storages of one `QuantizedTensor`

A packed weight [E, N, K] is E matrices, each with codes, statistics and storages of its own (`WeightState.matrices`). FSDP2
cuts it between matrices, so every buffer of a matrix lies with one rank, and a buffer of all is theirs one behind the other.

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
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, SCALE_BYTES, SCALE_DTYPE, Direction, Encoding
from ..ops import native
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


def wire_buffers(
    encoding: Encoding, cuts: RowCuts, shape: tuple[int, ...], high_precision: torch.dtype
) -> list[WireBuffer]:
    """The buffers of one encoding that travel; a pure function of facts that all ranks share.

    cuts:   of dim 0 of the weight.
    shape:  of the weight, [rows, cols] or [matrices, rows, cols].

    Raises ValueError for an encoding that a cut would change: a rotation that mixes rows of two shards.
    """
    fmt, direction, cols = encoding.fmt, encoding.direction, shape[-1]
    if len(shape) == 3:
        of_one = _matrix_buffers(encoding, shape[1:], high_precision)
        return [WireBuffer(name, cuts.bounds[1] * rows, row_bytes) for name, rows, row_bytes in of_one]
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


def _matrix_buffers(encoding: Encoding, shape: tuple[int, int], high_precision: torch.dtype) -> Iterator[tuple[str, int, int]]:
    """(field of `Storage`, rows, bytes of a row) of every buffer of one matrix."""
    fmt, direction = encoding.fmt, encoding.direction
    rows, cols = fmt.padded_shape(shape, direction)
    yield "data", rows, fmt.row_bytes(cols, high_precision)
    if fmt.scale != "none":
        rows, cols = fmt.scale_shape(shape, direction)
        yield "scale", rows, cols * SCALE_BYTES[fmt.scale]
    if fmt.tensor_scale:
        yield "tensor_amax", 1, 4


@dataclass(eq=False)
class DirectionBuffers:
    """Persistent buffers of one direction of one gathered weight.

    outputs:    uint8 [world * rows * row_bytes], one a wire buffer that NCCL fills.
    filled:     buffers that post fills, by field of `Storage`: re-indexed or derived ones.
    replicated: buffers that every rank makes whole and pre fills, on the stream of whoever made them, which may be freed
                before the stream of post has come so far; small, and never freed.
    halo:       those that post re-indexes: (gathered rows, index of each logical row), the index never freed.
    storages:   of each matrix, viewing all.
    """

    outputs: list[Tensor]
    filled: dict[str, Tensor]
    replicated: dict[str, Tensor]
    halo: dict[str, tuple[Tensor, Tensor]]
    storages: list[Storage]

    def free(self) -> None:
        for tensor in (*self.outputs, *self.filled.values()):
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
    """What a weight gives to a gather: uint8 [rows, bytes] of every wire buffer, and what rides as metadata."""

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
        self.matrices = state.matrices
        self.quantizer = self.matrices[0].quantizer
        self.rows, self.cols = managed.global_shape[-2:]  # of a matrix
        self.cuts = _cuts(managed)
        self.dtype = managed.param_dtype
        self.wire = {
            d: wire_buffers(e, self.cuts, managed.global_shape, self.dtype) for d, e in self.quantizer.encodings.items()
        }
        self.buffers = {d: self._allocate(d) for d in self.quantizer.encodings}
        self.derived = None
        if self.quantizer.is_derived:
            self.derived = self._allocate_derived()
        self.passes = self._passes()
        self.outgoing: tuple[tuple[Tensor, ...], Arrival] | None = None  # prepared, and not asked for yet
        self.arrival: Arrival | None = None  # sent, and not received yet
        self._sent: tuple[object, dict[tuple[Direction, ...], Sent]] = (None, {})  # of this version
        self._group: tuple[list[weakref.ref[Tensor]], list[GatheredWeight | None]] = ([], [])  # as `gathered_with` found it
        self._reductions = self._reductions_before = 0  # gathers of this version that served one, and of the one before
        self.slots_of = [Slots(owner=matrix) for matrix in self.matrices]
        for direction in Direction:
            for i, slots in enumerate(self.slots_of):
                if direction in self.buffers:
                    storage = self.buffers[direction].storages[i]
                elif self.derived is not None:
                    storage = self.derived.storages[i]
                else:
                    storage = self.buffers[ROWWISE].storages[i].as_direction(direction)
                setattr(slots, direction.value, storage)
        for matrix in state.parts:
            matrix.managed, matrix.gathered = managed, self
        self.slots = Slots(owner=state, parts=self.slots_of) if state.parts else self.slots_of[0]

    # Buffers #

    def _allocate(self, direction: Direction) -> DirectionBuffers:
        encoding = self.quantizer.encodings[direction]
        fmt, shape, device = encoding.fmt, (self.rows, self.cols), self.managed.device
        world, matrices = self.managed.world_size, len(self.matrices)
        outputs, filled, replicated, halo, fields = [], {}, {}, {}, {}
        scale_shape = fmt.scale_shape(shape, direction)
        if scale_shape is not None:
            rows, cols = scale_shape
            replicated["scale"] = torch.empty(matrices * rows, cols, dtype=SCALE_DTYPE[fmt.scale], device=device)
        if fmt.tensor_scale:
            replicated["tensor_amax"] = torch.empty(matrices, dtype=torch.float32, device=device)
        for i, buffer in enumerate(self.wire[direction]):
            if world == 1 and i > 0:  # FSDP2 keeps only the first input of a world of one: the rest rides as metadata
                filled[buffer.name] = replicated.pop(buffer.name)
                continue
            output = torch.empty(world * buffer.rows * buffer.row_bytes, dtype=torch.uint8, device=device)
            outputs.append(output)
            if buffer.halo_index is not None:
                halo[buffer.name] = (output.view(-1, buffer.row_bytes), torch.tensor(buffer.halo_index, device=device))
                filled[buffer.name] = replicated.pop(buffer.name)
            else:
                fields[buffer.name] = self._view(output, buffer, fmt, direction)
                replicated.pop(buffer.name, None)
        whole = {"scale": None, "tensor_amax": None} | filled | replicated | fields
        storages = [
            Storage(fmt, direction, shape, dtype=self.dtype, **{
                name: t if t is None or matrices == 1 else t.unflatten(0, (matrices, -1))[i] for name, t in whole.items()
            }) for i in range(matrices)
        ]
        buffers = DirectionBuffers(outputs, filled, replicated, halo, storages)
        buffers.free()
        return buffers

    def _view(self, output: Tensor, buffer: WireBuffer, fmt, direction: Direction) -> Tensor:
        """The logical buffer over its gathered bytes: padding rows all lie behind the last one."""
        rows, shape, matrices = output.view(-1, buffer.row_bytes), (self.rows, self.cols), len(self.matrices)
        if buffer.name == "data":
            count = fmt.padded_shape(shape, direction)[0] if self.state.parts else self.rows
            return (rows if fmt.is_quantized else rows.view(self.dtype))[: matrices * count]
        if buffer.name == "tensor_amax":
            return rows.view(torch.float32).flatten()[:matrices]
        return rows.view(SCALE_DTYPE[fmt.scale])[: matrices * fmt.scale_shape(shape, direction)[0]]

    def _allocate_derived(self) -> DirectionBuffers:
        with torch.no_grad():
            like = torch.zeros(len(self.matrices), self.rows, self.cols, dtype=self.dtype, device=self.managed.device)
            storages = [self.quantizer.columnwise.storage(one.clone(), COLUMNWISE) for one in like]  # identity keeps it
        filled = {f"{name} {i}": t for i, s in enumerate(storages) for name, t in s.buffers().items()}
        buffers = DirectionBuffers([], filled, {}, {}, storages)
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
            outputs, filled = [t for b in chosen for t in b.outputs], [t for b in chosen for t in b.filled.values()]
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

    def pack(self, chosen: Pass, made: list[tuple]) -> tuple[Sent, list[tuple[Tensor, Tensor]]]:
        """The buffers of each direction's codes, as they travel, kept while the master does not change; and (buffer, what it
        is to hold) of all that are replicated.

        made:  (shard, its codes) of each that `shards` asked for.
        """
        inputs, filled, copies = [], {}, []
        for direction in chosen.directions:
            of = [e for s, e in made if s.direction is direction and (s.weight.shape[0] or not self.state.parts)]
            for i, buffer in enumerate(self.wire[direction]):
                own = _as_bytes([getattr(e, buffer.name) for e in of], buffer, self.managed.device)
                if self.managed.world_size == 1 and (i > 0 or inputs):
                    filled[direction, buffer.name] = own
                else:
                    inputs.append(own)
            replicated = self.buffers[direction].replicated
            copies += [(target, _seen_as(target, getattr(of[0], name))) for name, target in replicated.items()]
        sent = Sent(tuple(inputs), filled)
        if chosen.is_kept:
            self._sent[1][chosen.directions] = sent
        return sent, copies

    def gathered_with(self) -> list[tuple[Tensor, GatheredWeight]]:
        """The weights of the group, this one included, in the order of their hooks: (local tensor, its unsharded side)."""
        locals_now, (locals_then, group) = self.managed.group_locals(), self._group
        before = [then() for then in locals_then]
        if len(before) != len(locals_now) or any(map(operator.is_not, before, locals_now)) or not all(map(_is_current, group)):
            group = [gathered_weight(one) if isinstance(one, FSDPHooks) else None for one in locals_now]
            self._group = list(map(weakref.ref, locals_now)), group
        return [(one, gathered) for one, gathered in zip(locals_now, group) if gathered is not None]

    def shards(self, weight, directions: Sequence[Direction]) -> list:
        """What the gather of these directions asks of a weight."""
        return self.state.shards(weight, directions, self.cuts, self.managed.rank, self.dtype)

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
        """(buffer, what it is to hold) of all that NCCL and pre did not fill: rows of cut blocks in order, metadata."""
        filled, copies = self.arrival.filled, []
        for direction in self.arrival.chosen.directions:
            buffers = self.buffers[direction]
            for name, target in buffers.filled.items():
                if name in buffers.halo:
                    rows, index = buffers.halo[name]
                    source = rows.index_select(0, index)
                else:
                    source = filled[direction, name]
                copies.append((target, _seen_as(target, source)))
            if (direction, "data") in filled:  # a world of one: the second direction's codes
                torch_compat.alloc_storage(buffers.outputs[0])
                copies.append((buffers.outputs[0], filled[direction, "data"].view(-1)))
        return copies

    def derive(self) -> None:
        """Make the columnwise storage from the rowwise one that arrived, where the quantizer says so."""
        if self.derived is not None and COLUMNWISE in self.arrival.chosen.needs:
            for slots in self.slots_of:
                fresh = self.quantizer.derive_columnwise(slots.rowwise, self.state.compute_dtype)
                for name, target in slots.columnwise.buffers().items():
                    target.copy_(getattr(fresh, name))

    def lay_out(self, slots: Slots) -> list[tuple[Direction, str]]:
        """The codes of a matrix are there: how products will read them, as far as the passes before tell (`Slots.wanted`)."""
        needs, version = self.arrival.chosen.needs, self.arrival.version
        if slots.laid_out:  # of the codes before
            slots.laid_out = {key: laid_out for key, laid_out in slots.laid_out.items() if key in slots.views}
        wanted = []
        for d in needs:
            wanted += [(d, layout) for layout in slots.wanted[d] if layout != COMPACT and (d, layout) not in slots.views]
        if ROWWISE in needs and slots.version.get(ROWWISE) != version:
            for layouts in slots.wanted.values():  # the passes over this version will tell anew
                layouts.clear()
        for d in needs:
            slots.version[d] = version
        return wanted

    def free_unread(self) -> None:
        """Free the codes of a backward that are laid out for all products of their forward."""
        if writers.checking:
            return  # which reads them
        if self.arrival.chosen.needs == {COLUMNWISE} and all(map(_is_served, self.slots_of)):
            torch_compat.free_storage(self.slots_of[0].columnwise.data)


def _is_current(gathered: GatheredWeight | None) -> bool:
    return gathered is None or gathered.state.gathered is gathered


def _is_served(slots: Slots) -> bool:
    """The products of this backward read copies of the codes."""
    wanted, data = slots.wanted[COLUMNWISE], slots.columnwise.data
    laid_out = (s for (d, _), s in slots.laid_out.items() if d is COLUMNWISE)
    return bool(wanted) and COMPACT not in wanted and all(s.data.data_ptr() != data.data_ptr() for s in laid_out)


@torch.no_grad()
def receive(group: list[GatheredWeight]) -> None:
    """Fill what NCCL did not, and lay codes out as products read them: all weights of a group at once."""
    torch_compat.copy_all([copy for gathered in group for copy in gathered.unpack()])
    for gathered in group:
        gathered.derive()
    wanted = [(g, slots, d, layout) for g in group for slots in g.slots_of for d, layout in g.lay_out(slots)]
    alike: dict[GatheredWeight | None, list[tuple]] = {}  # matrices of one weight stay together, for products of groups
    for one in wanted:
        alike.setdefault(one[0] if one[0].state.parts else None, []).append(one)
    for weight, of in alike.items():
        made = laid_out([(slots.get(d), layout) for _, slots, d, layout in of], stacked=weight is not None)
        for (_, slots, *key), storage in zip(of, made):
            slots.take(*key, storage)
    for gathered in group:
        gathered.free_unread()
        gathered.arrival = None


def _seen_as(target: Tensor, source: Tensor) -> Tensor:
    return source.view(target.dtype).view(target.shape) if source.dtype is torch.uint8 else source


def _as_bytes(tensors: list[Tensor], buffer: WireBuffer, device: torch.device) -> Tensor:
    """A rank's rows of each matrix as uint8 [buffer.rows, buffer.row_bytes], zero rows behind them."""
    if len(tensors) != 1:
        each = [_as_bytes([t], WireBuffer(buffer.name, 0, buffer.row_bytes), device) for t in tensors]
        rows = torch.cat([torch.empty(0, buffer.row_bytes, dtype=torch.uint8, device=device), *each])
    elif (rows := tensors[0]).dtype is not torch.uint8 or rows.dim() != 2 or not rows.is_contiguous():
        rows = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], buffer.row_bytes)
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
    asked = first.gathered_with()
    together = [gathered for _, gathered in asked]
    if weight.device != managed.local.device:  # offloaded: each comes to the device as it is asked
        asked = [(weight, first)]
    if any([gathered.state.pending for _, gathered in asked]):
        synchronize([managed])
    recomputed = [gathered.state.is_recomputed for _, gathered in asked]
    needs = {recomputes: directions_needed(managed, recomputes) for recomputes in set(recomputed)}
    phase, reduces = managed.phase, managed.gathers_for_reduction
    missing, shards, ready = [], [], []
    for (one, gathered), recomputes in zip(asked, recomputed):
        chosen, version = gathered.passes[needs[recomputes]], one.version
        sent = gathered.sent(version, chosen)
        if sent is None:
            missing.append((len(ready), gathered.shards(one, chosen.directions)))
            shards += missing[-1][1]
        ready.append((gathered, chosen, version, sent))
    encoded, copies = iter(first.state.encode(shards)), []
    for i, own in missing:
        gathered, chosen, version, _ = ready[i]
        sent, replicated = gathered.pack(chosen, list(zip(own, itertools.islice(encoded, len(own)))))
        ready[i] = gathered, chosen, version, sent
        copies += replicated
    torch_compat.copy_all(copies)
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
            shape = managed.global_shape if gathered.slots.parts else None
            return QuantizedTensor(slots=gathered.slots, shape=shape), managed.inner_buffers


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
    quantizers = list(dict.fromkeys(matrix.quantizer for matrix in state.matrices))
    if len(quantizers) > 1:
        raise ValueError(
            f"{name}: its matrices are {quantizers[0]} and {quantizers[1]}, and FSDP2 gathers one format for all; give the "
            "experts one recipe, or build fq.GroupedLinear with packed=False"
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
    for encoding in quantizers[0].encodings.values():
        if not state.parts and encoding.fmt.rotated and encoding.direction is COLUMNWISE and len(set(cuts.bounds)) > 2:
            raise ValueError(
                f"{name}.columnwise is {encoding.fmt}: the rotation mixes rows of different ranks "
                f"({cuts.rows} rows over {managed.world_size}); rotate activations and gradients, not weights"
            )


def all_managed_weights() -> list[ManagedParam]:
    """Every weight that is gathered as codes under any `fully_shard` of the process."""
    return [m for m in torch_compat.all_managed_params() if isinstance(m.local, FSDPHooks)]


def synchronize(managed: list[ManagedParam]) -> None:
    """Share statistics of all pending weights of the same roots: one MAX all-reduce a shard group, which serves the parts that
    tensor parallelism makes of a weight too where a group of all their ranks exists.

    Every rank must call it with the same weights pending; empty shards take part.
    """
    pending: dict[tuple, list[tuple[ManagedParam, FSDPHooks]]] = {}
    roots = {torch_compat.root_of(m): m for m in managed}
    beside = {id(m.param): m for one in roots.values() for m in torch_compat.managed_params_beside(one)}
    for m in beside.values():
        local = m.local
        if isinstance(local, FSDPHooks) and local.state.pending:
            if local.state.gathered is None:
                check_layout(m)
            pending.setdefault(_groups(m, local.state), []).append((m, local))
    for groups, weights in pending.items():
        found = []
        for m, local in weights:
            state, cuts = local.state, _cuts(m)
            if not state.parts or state.shares_statistics(cuts):
                found += [(piece.weight, _fragment(piece, m.device)) for piece in state.pieces(local, cuts, m.rank)]
        _share(found, groups)
        for _, local in weights:
            local.state.pending = False


def synchronize_whole(weights: list) -> None:
    """`synchronize` of those weights of which ranks of a tensor-parallel group have parts that no one shards further, nor
    publishes."""
    by_group: dict[tuple, list] = {}
    for weight in weights:
        state = weight.state
        if state.spans_parts and _managed_of(state) is None and state.publisher is None:
            state.pending = False
            piece = weight, RowCuts((0, weight.shape[0])), 0
            by_group.setdefault((state.tensor_group,), []).append((weight, _fragment(piece, weight.device)))
    for groups, found in by_group.items():
        before = [weight.state.statistics for weight, _ in found]
        _share(found, groups)
        torch_compat.copy_all([copy for (w, _), old in zip(found, before) for copy in w.state.statistics_over(old)])


def _groups(m: ManagedParam, state) -> tuple[dist.ProcessGroup, ...]:
    """What a weight's statistics are reduced over: one group of all ranks that hold any of it, or one for each axis.

    Copies (HSDP) hold the same values, so those of all copies do. No group is made here: ranks that hold other weights, such as
    another stage of a pipeline, are not there to take part.
    """
    shards, parts, world = m.process_group, state.tensor_group, dist.group.WORLD
    if not state.spans_parts:
        return (shards,)
    if shards.size() == 1:
        return (parts,)
    if m.registered.device_mesh.size() == world.size() and dist.get_backend(world) == dist.get_backend(shards):
        return (world,)
    return shards, parts


def _share(found: list[tuple[object, Fragment]], groups: tuple[dist.ProcessGroup, ...]) -> None:
    """Keep the statistics of (weight, its rows) that ranks of `groups` have other rows or parts of."""
    stats = [[None] * len(f.encodings) for _, f in found]
    for group in groups:
        crossing = [i for i, (_, f) in enumerate(found) if any(map(f.shares_statistics, f.encodings))]
        shared = share_statistics([found[i][1] for i in crossing], group)
        if shared:
            counters.add("amax all-reduce", "weights")
        for i, own in zip(crossing, shared):
            stats[i], f = own, found[i][1]
            f.found = tuple(s or t for s, t in zip(own, f.found))
    for (weight, _), own in zip(found, stats):
        if any(own):
            weight.state.set_statistics(weight.version, own)


def write_back(weights: list) -> None:
    """Codes of quantized parameters after an optimizer's step, from statistics reduced at once for each shard group.

    Every rank that steps the optimizer must call it.
    """
    managed = {id(w.state): _managed_of(w.state) for w in weights}
    synchronize([m for m in managed.values() if m is not None])
    shards = [
        shard for weight in weights if not all(map(weight.is_current, weight.state.quantizer.encodings))
        for shard in _own_shards(weight, managed[id(weight.state)])
    ]
    if shards:
        shards[0].weight.state.encode(shards)


def _own_shards(weight, m: ManagedParam | None) -> list:
    """The codes that a quantized parameter is."""
    state = weight.state
    cuts, rank = (RowCuts((0, weight.shape[0])), 0) if m is None else (_cuts(m), m.rank)
    quantized = [d for d, e in state.quantizer.encodings.items() if e.fmt.is_quantized]
    return state.shards(weight, quantized, cuts, rank, weight.dtype)


class Emission(NamedTuple):
    """What a kernel that writes the master of a quantized parameter makes of the new values on its way.

    shards:     the directions that it makes, rowwise first, and `encodings` of each.
    blocks:     of each, that its block amaxes are wanted. None: codes are made; else statistics, which codes follow from.
    """

    shards: list
    encodings: tuple[Encoding, ...]
    blocks: tuple[bool, ...] | None


def emission(weight) -> Emission | None:
    """Codes, where every scale follows from a tile of this rank's rows; else the statistics of scales that do not.

    None where no kernel makes either on its way: values that are not rounded to bf16.
    """
    state = weight.state
    if state.compute_dtype is not torch.bfloat16 or weight.dim() != 2:
        return None
    encodings = state.quantizer.encodings
    shards = [s for s in _own_shards(weight, _managed_of(state)) if native.takes_group(encodings[s.direction], torch.float32, True)]

    def crosses(s) -> bool:
        e = encodings[s.direction]
        return e.fmt.scale_leaves_contraction or e.fmt.tensor_scale or s.cuts.shares_statistics(e)

    later = [s for s in shards if crosses(s)]
    shards = later or shards
    of = tuple(encodings[s.direction] for s in shards)
    blocks = tuple(not e.fmt.tensor_scale or bool(s.cuts.cut_block_rows(e)) for s, e in zip(shards, of)) if later else None
    return Emission(shards, of, blocks) if shards else None


def _managed_of(state) -> ManagedParam | None:
    """This weight under `fully_shard`, or None."""
    managed = state.managed
    if managed is not None and isinstance(managed.local, FSDPHooks) and managed.local.state is state:
        return managed
    return next((m for m in all_managed_weights() if m.local.state is state), None)


def _cuts(managed: ManagedParam) -> RowCuts:
    return RowCuts.chunked(managed.global_shape[0], managed.world_size)


def _fragment(piece: tuple, device: torch.device) -> Fragment:
    weight, cuts, rank = piece
    encodings = weight.state.quantizer.encodings
    found = weight.state.found(weight.version)
    return Fragment(
        weight.inner.detach().to(device), tuple(encodings.values()), cuts, rank, weight.state.compute_dtype,
        tuple(map(found.get, encodings)), weight.state.part if weight.state.spans_parts else (0, 1),
    )

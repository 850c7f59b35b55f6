"""How FSDP2 gathers weights: as the codes of the direction that this pass multiplies, those of a group in a few launches.

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

[Note: again]
A step does to a group what the one before did, so that the host need not work it out anew. Codes are made, and laid out, by the
calls of the last time (`GroupCodes`, `GroupPass`), over memory that is given back between a backward and the next forward and
taken again. Whatever is found to be otherwise is worked out, and then kept for the next time.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, Direction
from ..ops import dispatch
from ..ops.layout import COMPACT
from ..ops.native import GroupCall, GroupEncoding
from ..storage import laid_out
from . import torch_compat, writers
from .gathered_weight import GatheredWeight
from .quantized_tensor import Slots


class GatheredGroup:
    """Weights that are gathered together.

    members:  their unsharded sides, in the order of their hooks.
    codes:    that this rank sends, of each direction.
    states:   of the weights.
    """

    def __init__(self, local: Sequence[Tensor], sides: Sequence[GatheredWeight | None]):
        """local: the tensors of all parameters that FSDP2 gathers together; sides: None of those that are not gathered as codes."""
        self.members, self._local = [side for side in sides if side is not None], list(map(weakref.ref, local))
        places = [i for i, side in enumerate(sides) if side is not None]
        self._ours = operator.itemgetter(*places) if len(places) > 1 else lambda every: [every[places[0]]]
        self.states = [member.state for member in self.members]
        self._packs = any(state.parts for state in self.states)
        self.codes = {d: GroupCodes(self.members, d) for d in Direction}
        self._passes: dict[tuple[frozenset[Direction], ...], GroupPass] = {}
        self._reductions, self._reductions_before, self._reduced = 0, 0, None
        self._sent_last: list[GroupEncoding] = []
        for member in self.members:
            member.group = self

    def is_of(self, local: Sequence[Tensor]) -> bool:
        """It is the group of these tensors, as they are gathered now."""
        before, now = [tensor() for tensor in self._local], [state.gathered for state in self.states]
        return len(before) == len(local) and all(map(operator.is_, before, local)) and all(map(operator.is_, now, self.members))

    @property
    def recomputed(self) -> list[bool]:
        """Of each weight: the backward recomputes the forward of its module."""
        return [state.is_recomputed if self._packs else state.recomputes for state in self.states]

    def send(
        self, values: Sequence[Tensor], params: Sequence, needs: tuple[frozenset[Direction], ...], phase: str, reduces: bool
    ) -> None:
        """Ready what a gather for the directions that each weight `needs` sends.

        values, params:  tensors, where FSDP2 computes, and parameters that it gathers together.
        reduces:         it serves a backward whose gradients are reduced.
        """
        self._free_sent()  # by a gather that nobody waited for
        weights, params = self._ours(values), self._ours(params)
        chosen = self._passes.get(needs)
        if chosen is None:
            chosen = self._passes[needs] = GroupPass(self.members, self.codes, needs)
        versions = [weight.version for weight in weights]
        sent = chosen.sent(weights, versions)
        torch_compat.set_gather_buffers(params, chosen.outputs, chosen.inner)
        for member, inputs in zip(self.members, sent):
            member.outgoing = inputs, chosen
        for (direction, fmt), size in chosen.sizes.items():
            counters.add("gather", (phase, direction, fmt), size)
        last = self._sent_for_the_last_time(versions, params) if reduces else []
        if last or chosen.is_made_each_time:
            self._let_go(last)

    def _sent_for_the_last_time(self, versions: list[object], params: Sequence) -> list[int]:
        """The gather that is under way serves a backward that reduces gradients: if the version before had no more of them,
        an optimizer step follows, and no codes are kept until then."""
        trained = [i for i, param in enumerate(params) if param.sharded_param.requires_grad]
        now = [versions[i] for i in trained]
        if now != self._reduced:
            self._reductions, self._reductions_before, self._reduced = 0, max(self._reductions, 1), now
        self._reductions += 1
        return trained if self._reductions == self._reductions_before else []

    def _let_go(self, places: Sequence[int]) -> None:
        """Keep no codes of these weights, nor any that are no work to make again."""
        for codes in self.codes.values():
            self._sent_last += codes.let_go(places)
        for chosen in self._passes.values():
            chosen.let_go()

    def forget(self, member: GatheredWeight) -> None:
        """Make the codes of a weight anew at the next gather."""
        for codes in self.codes.values():
            codes.versions[self.members.index(member)] = None

    def receive(self, chosen: GroupPass) -> None:
        """Fill what NCCL did not, and lay codes out as products read them: all weights at once."""
        chosen.receive()
        self._free_sent()

    def _free_sent(self) -> None:
        """Give back what was sent for the last time."""
        for encoding in self._sent_last:
            encoding.free()
        self._sent_last.clear()


class GroupCodes:
    """Codes of one direction of the weights of a group, as this rank sends them.

    versions:  of the masters that the codes of each are of, None: of none.
    rows:      of each, uint8 [rows, bytes] of every buffer that travels, or None.
    mark:      another object whenever some rows are.
    """

    def __init__(self, members: Sequence[GatheredWeight], direction: Direction):
        self.members, self.direction = members, direction
        self.versions: list[object] = [None] * len(members)
        self.rows: list[list[Tensor] | None] = [None] * len(members)
        self.mark = object()
        self._made: dict[tuple[int, ...], _Made] = {}
        self._lies: list[bool] = [False] * len(members)  # where it did: made again in one place

    def is_quantized(self, i: int) -> bool:
        return self.members[i].quantizer.encodings[self.direction].fmt.is_quantized

    def fill(self, weights: Sequence, versions: list[object], places: tuple[int, ...]) -> None:
        """Make the codes of these weights where they are not of these versions."""
        if self.versions == versions:
            return
        stale = tuple([i for i in places if self.versions[i] != versions[i]])
        if not stale:
            return
        made, of = self._made.get(stale), ([weights[i] for i in stale], [versions[i] for i in stale])
        if made is None or not made.again(*of):
            made = self._made[stale] = _Made([self.members[i] for i in stale], *of, self.direction)
        for targets, sources in made.copies:
            torch_compat.foreach_copy_(targets, sources)
        for i, rows in zip(stale, made.rows):
            self.versions[i], self._lies[i] = versions[i], made.repeats
            if self.rows[i] is not rows:
                self.rows[i], self.mark = rows, object()

    def let_go(self, places: Sequence[int]) -> list[GroupEncoding]:
        """Forget the codes of these weights, and values, which are no work to make again; what memory may be freed."""
        if len(places) == len(self.members) and all(self._lies):
            self.versions = [None] * len(places)
            return [call for made in self._made.values() for call in made.calls]
        freed = []
        for i, rows in enumerate(self.rows):
            if rows is None or (i not in places and self.is_quantized(i)):
                continue
            self.versions[i] = None
            if not self._lies[i]:
                self.rows[i], self.mark = None, object()
                self.members[i].state.let_go_of_shard()
        for stale, made in list(self._made.items()):
            if not made.repeats:
                del self._made[stale]
            elif all(self.versions[i] is None for i in stale):
                freed += made.calls
        return freed


class _Made:
    """Codes of some weights of a group, and how they are made again.

    rows:     of each, as `GroupCodes` has them.
    copies:   ([buffer], [what it is to hold]) of all that every rank makes whole.
    calls:    that make all of them.
    repeats:  `again` may be asked: all lies in memory of the calls, or of the parameters.
    """

    def __init__(self, members: Sequence[GatheredWeight], weights: Sequence, versions: Sequence, direction: Direction):
        self.direction, self.states = direction, [member.state for member in members]
        shards = [member.shards(weight, [direction]) for member, weight in zip(members, weights)]
        flat, kept = [shard for of in shards for shard in of], [state.keeps_shards for state in self.states]
        calls: list[tuple[GroupEncoding, list[int]]] = []
        encoded = iter(self.states[0].encode(flat, None if any(kept) else calls))
        self.rows, copies, self.repeats = [], [], all(kept) or sum(len(at) for _, at in calls) == len(flat)
        for member, of in zip(members, shards):
            made = [next(encoded) for _ in of]
            held = [e for shard, e in zip(of, made) if shard.weight.shape[0] or not member.state.parts]
            self.rows.append(member.rows_sent(direction, held))
            copies += member.replicated(direction, held)
            self.repeats &= not member.state.parts and all(
                e.data.numel() == 0 or _lie_together(row, getattr(e, buffer.name))
                for e in made for row, buffer in zip(self.rows[-1], member.wire[direction])
            )
        self.copies = torch_compat.by_dtype(copies)
        self.calls, self._at = [call for call, _ in calls], [at for _, at in calls]
        self._names = [(state.name, direction.value) for state in self.states] if calls else []
        if self.repeats:
            self._sources = [state.sources(weight, direction) for state, weight in zip(self.states, weights)]
            self.repeats = None not in self._sources

    def again(self, weights: Sequence, versions: Sequence) -> bool:
        """Make them of these values where they lie; False where more than values is another than it was."""
        if not self.repeats:
            return False
        for state, weight, version, before in zip(self.states, weights, versions, self._sources):
            if not state.has_sources(weight, self.direction, version, before):
                return False
        values = [[weights[i].inner for i in at] for at in self._at]
        if not all(map(GroupEncoding.takes, self.calls, values)):
            return False
        for call, of in zip(self.calls, values):
            dispatch.encode_again(call, of)
        counters.add_each("weight encode", self._names)
        return True


def _lie_together(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class GroupPass:
    """A gather for the directions that each weight of a group needs, as often as there is one.

    outputs, inner:      of each weight: what NCCL fills, and the other buffers that FSDP2 frees with them.
    sizes:               (direction, format) -> bytes that arrive.
    is_made_each_time:   some of it is values, which are not kept.
    """

    def __init__(
        self, members: Sequence[GatheredWeight], codes: dict[Direction, GroupCodes], needs: tuple[frozenset[Direction], ...]
    ):
        self.members, self._needs = members, needs
        self._chosen = [member.passes[n] for member, n in zip(members, needs)]
        of = {d: tuple(i for i, chosen in enumerate(self._chosen) if d in chosen.directions) for d in Direction}
        self._codes = {d: (codes[d], places) for d, places in of.items() if places}
        self.outputs, self.inner = [c.outputs for c in self._chosen], [c.filled for c in self._chosen]
        self.sizes: Counter[tuple[str, str]] = Counter()
        for chosen in self._chosen:
            for direction, fmt, size in chosen.sizes:
                self.sizes[direction, fmt] += size
        self.is_made_each_time = any(not of.is_quantized(i) for of, places in self._codes.values() for i in places)
        self._unpacked = [
            i for i, (m, c) in enumerate(zip(members, self._chosen))
            if m.managed.world_size == 1 or any(m.buffers[d].filled for d in c.directions)
        ]
        self._versions: list[object] = []
        self._marks: list[object] = []
        self._inputs: list[tuple[Tensor, ...]] = []
        self._filled: list[dict[tuple[Direction, str], Tensor]] = []
        self._laid_out: _LaidOut | None = None

    def sent(self, weights: Sequence, versions: list[object]) -> list[tuple[Tensor, ...]]:
        """uint8 [rows, bytes] of every wire buffer of each weight."""
        for codes, places in self._codes.values():
            codes.fill(weights, versions, places)
        marks = [codes.mark for codes, _ in self._codes.values()]
        if marks != self._marks:
            packed = [self._packed(i) for i in range(len(self.members))]
            self._marks, self._inputs, self._filled = marks, *map(list, zip(*packed))
        self._versions = versions
        return self._inputs

    def _packed(self, i: int) -> tuple[tuple[Tensor, ...], dict[tuple[Direction, str], Tensor]]:
        """(what a weight sends, what rides as metadata)."""
        member, inputs, filled = self.members[i], [], {}
        for direction in self._chosen[i].directions:
            for n, (buffer, rows) in enumerate(zip(member.wire[direction], self._codes[direction][0].rows[i])):
                if member.managed.world_size == 1 and (n > 0 or inputs):
                    filled[direction, buffer.name] = rows
                else:
                    inputs.append(rows)
        return tuple(inputs), filled

    def let_go(self) -> None:
        """Hold nothing that the codes do not; what rides as metadata is read once more."""
        if self._marks != [codes.mark for codes, _ in self._codes.values()]:
            self._marks, self._inputs = [], []

    @torch.no_grad()
    def receive(self) -> None:
        """Fill what NCCL did not, and lay codes out as products read them: all weights at once."""
        if self._unpacked:
            torch_compat.copy_all(
                [copy for i in self._unpacked for copy in self.members[i].unpack(self._chosen[i], self._filled[i])]
            )
        if not self._marks:
            self._filled = []
        wanted = []
        for member, needs, version in zip(self.members, self._needs, self._versions):
            if member.derived is not None:
                member.derive(needs)
            for slots in member.slots_of:
                wanted += slots.arrived(needs, version)
        if self._laid_out is None or not self._laid_out.again(wanted):
            self._laid_out = _LaidOut(self.members, self._needs, wanted)
            own = self._laid_out.own if self._laid_out.repeats else [()] * len(self.members)
            self.inner = [[*chosen.filled, *of] for chosen, of in zip(self._chosen, own)]
        if not writers.checking:  # which reads them
            for data in self._laid_out.unread:
                torch_compat.free_storage(data)


class _LaidOut:
    """Codes that arrived as products read them, and how they are laid out again.

    wanted:   (slots, direction, layout) of each; those that are views of the codes are nothing to do.
    own:      of each weight, the memory of them, which FSDP2 gives back with the codes.
    unread:   codes of a backward that all its products read laid out.
    repeats:  `again` may be asked.
    """

    def __init__(self, members: Sequence[GatheredWeight], needs: Sequence[frozenset[Direction]], wanted: list[tuple]):
        self.wanted, self.own, self._storages = wanted, [[] for _ in members], []
        self._calls: list[GroupCall] = []
        place = {slots: i for i, member in enumerate(members) for slots in member.slots_of}
        alike: dict[int | None, list[tuple]] = {}  # matrices of one weight stay together, for products of groups
        for slots, d, layout in wanted:
            if layout != COMPACT and (d, layout) not in slots.views:
                packed = place[slots] if members[place[slots]].state.parts else None
                alike.setdefault(packed, []).append((slots, d, layout))
        for packed, of in alike.items():
            made = laid_out([(slots.get(d), layout) for slots, d, layout in of], packed is not None, self._calls)
            for (slots, d, layout), storage in zip(of, made):
                own = slots.take(d, layout, storage)
                if own:
                    self.own[place[slots]] += own
                    self._storages.append((slots, (d, layout), storage))
        filled = {id(t) for call in self._calls for t in call.out}
        self.repeats = set(alike) <= {None} and all(id(t) in filled for of in self.own for t in of)
        self.unread = [
            member.slots_of[0].columnwise.data for member, of in zip(members, needs)
            if of == {COLUMNWISE} and all(map(_is_served, member.slots_of))
        ]

    def again(self, wanted: list[tuple]) -> bool:
        """Lay them out where they lay, in memory that has been taken again; False where other layouts are wanted."""
        if not self.repeats or self.wanted != wanted:
            return False
        for call in self._calls:
            call()
        for slots, key, storage in self._storages:
            slots.laid_out[key] = storage
        return True


def _is_served(slots: Slots) -> bool:
    """The products of this backward read copies of the codes."""
    wanted, data = slots.wanted[COLUMNWISE], slots.columnwise.data
    laid = (s for (d, _), s in slots.laid_out.items() if d is COLUMNWISE)
    return bool(wanted) and COMPACT not in wanted and all(s.data.data_ptr() != data.data_ptr() for s in laid)

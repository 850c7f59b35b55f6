# SPDX-License-Identifier: Apache-2.0
"""One all-gather of FSDP2: encode the shards of a parameter group, gather the codes, and convert
them to GEMM operands.

[Note: one gather]
    pre    shard -> codes and scales of the needed directions -> all-gather inputs, uint8 [rows per
           rank, bytes]; scales that every rank computes whole -> their replicated buffers
    NCCL   all-gather outputs, uint8 [world * rows per rank * bytes]
    post   views of the outputs (no copy) -> storages -> operands in GEMM layout: inner tensors,
           which FSDP2 frees

A packed weight [E, N, K] is E matrices, each with codes, statistics and storages of its own
(`WeightState.matrices`). FSDP2 cuts between matrices, so every buffer of a matrix is on one rank,
and gathered buffers concatenate those of the matrices.

FSDP2 fixes number, dtype and size of a parameter's all-gather outputs at the first gather, and from
then on frees and refills them. So there is one persistent set of buffers per direction, and the pre
hook, which runs while the buffers are free, chooses the set.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops.dispatch import Encoded, replay_encode
from ..ops.layout import COMPACT
from ..ops.native import RecordedEncode, RecordedLaunch
from ..storage import Storage, to_gemm_operands
from . import torch_compat
from .gathered_weight import GatheredWeight, gathered_directions, viewed_as
from .torch_compat import RECOMPUTED_IN_GRAPHS
from .weight_state import Shard, encode_shards, held, values_of

_T = TypeVar("_T")


class GatherGroup:
    """The weights of one FSDP parameter group, which are gathered together.

    members:  their unsharded sides, in the order of their hooks.
    """

    def __init__(self, local: Sequence[Tensor], members: Mapping[int, GatheredWeight]):
        """local: sharded local tensors of the group's parameters; members: of those that are
        gathered as codes, by place."""
        self._local = list(map(weakref.ref, local))
        self._places, self.members = list(members), list(members.values())
        self._plans: dict[tuple[frozenset[Direction], ...], GatherPlan] = {}
        self._operands = _Operands(self.members)
        self.is_checkpointed = False  # the last forward ran inside torch.utils.checkpoint
        for member in self.members:
            member.group = self

    def ours(self, entries: Sequence[_T]) -> list[_T]:
        """The entries of the members, of one per parameter of the group."""
        return [entries[i] for i in self._places]

    def is_of(self, local: Sequence[Tensor]) -> bool:
        """It gathers these tensors, in their present formats."""
        gathered = [member.state.gathered for member in self.members]
        return (
            len(self._local) == len(local)
            and all(before() is tensor for before, tensor in zip(self._local, local))
            and all(map(operator.is_, gathered, self.members))
        )

    def converts_as_read(self) -> bool:
        """The present GEMMs read the layouts of the operands: the guard moved none, and autocast is
        as it was."""
        return all(member.layouts == member.operand_layouts for member in self.members)

    @property
    def recomputed(self) -> list[bool]:
        """Per weight: the backward recomputes the forward of its module."""
        in_graphs = bool(RECOMPUTED_IN_GRAPHS)  # few do, and experts are many matrices
        return [
            self.is_checkpointed
            or bool(m.state.recomputed)
            or (in_graphs and any(s.quantizer in RECOMPUTED_IN_GRAPHS for s in m.matrices))
            for m in self.members
        ]

    def send(
        self,
        local: Sequence[Tensor],
        params: Sequence,
        needs: tuple[frozenset[Direction], ...],
        phase: str,
    ) -> None:
        """Encode the all-gather inputs of the directions that each weight `needs`.

        local, params: sharded local tensors, on the device that computes, and FSDP2's parameters of
                       the whole group.
        """
        plan = self._plans.get(needs)
        if plan is None:
            plan = self._plans[needs] = GatherPlan(self.members, self._operands, needs)
        plan.send(self.ours(local))
        torch_compat.set_gather_buffers(self.ours(params), plan.outputs, plan.inner)
        for (direction, fmt), size in plan.sizes.items():
            counters.add("gather", (phase, direction, fmt), size)


class _Asked(NamedTuple):
    """One direction of a matrix that a gather sends.

    member:  index of the weight; matrix: index of the matrix in its shard, None for a plain weight.
    """

    member: int
    matrix: int | None
    direction: Direction
    shard: Shard


class GatherPlan:
    """A gather for the directions that each weight of a group needs, and its buffers.

    outputs, inner: per weight: the all-gather outputs, and the inner tensors that FSDP2 frees with
                    them.
    sizes:          (direction, format) -> gathered bytes.
    """

    def __init__(
        self,
        members: Sequence[GatheredWeight],
        operands: _Operands,
        needs: tuple[frozenset[Direction], ...],
    ):
        self.members = members
        self._directions = [gathered_directions(m.quantizer, n) for m, n in zip(members, needs)]
        filled = [m.filled_buffers(n) for m, n in zip(members, needs)]
        self.outputs = [[t for b in buffers for t in b.outputs] for buffers in filled]
        self.inner = [[t for b in buffers for t in b.inner_tensors.values()] for buffers in filled]
        for inner, n, copies in zip(self.inner, needs, operands.copies):
            inner += (t for d in n for t in copies[d])
        self.sizes: Counter[tuple[str, str]] = Counter()
        for member, directions in zip(members, self._directions):
            self.sizes.update(member.gathered_sizes(directions))
        self._relayouts = operands.relayouts(needs)
        self._derives = [m for m, n in zip(members, needs) if COLUMNWISE in n]
        # columnwise codes that the backward reads only in another layout
        self._unread = [
            (m, t)
            for m, t, n in zip(members, operands.unread, needs)
            if t is not None and n == {COLUMNWISE}
        ]
        # (buffer, gathered rows, index of each logical row)
        self._halos = [
            (b.inner_tensors[name], *halo)
            for buffers in filled
            for b in buffers
            for name, halo in b.halo.items()
        ]
        self._not_gathered: list[tuple[Tensor, Tensor]] = []
        self._recorded: _Sent | None = None

    def send(self, local: Sequence[Tensor]) -> None:
        """Encode the shards, and set `all_gather_inputs` of each weight."""
        key = list(map(_facts, self.members, self._directions, local))
        if self._recorded is None or not self._recorded.is_of(key):
            self._recorded = self._record(local, key)
        else:
            self._recorded.repeat([values_of(shard) for shard in local])
        sent = self._recorded
        for member, inputs in zip(self.members, sent.inputs):
            member.all_gather_inputs = inputs, self
        self._not_gathered = sent.not_gathered
        for targets, sources in sent.copies:
            torch_compat.foreach_copy_(targets, sources)
        if not sent.is_repeatable:
            self._recorded = None

    def _record(self, local: Sequence[Tensor], key: list) -> _Sent:
        asked = [
            _Asked(i, matrix if member.state.packed else None, d, shard)
            for i, (member, directions) in enumerate(zip(self.members, self._directions))
            for d in directions
            for matrix, shard in enumerate(member.shards(local[i], d))
        ]
        launches: list[tuple[RecordedEncode, list[int]]] = []
        by_direction: dict[tuple[int, Direction], list[Encoded]] = {}
        # empty matrices of other ranks are encoded for their histories, and not sent
        is_repeatable = all(a.matrix is None or a.matrix < len(local[a.member]) for a in asked)
        for a, encoded in zip(asked, self._encoded(local, asked, launches)):
            if a.matrix is None or a.shard.piece.values.shape[0]:
                by_direction.setdefault((a.member, a.direction), []).append(encoded)
        copies, inputs, not_gathered = [], [], []
        launched = _members_of(launches, asked)
        is_repeatable &= launched is not None
        for i, (member, directions) in enumerate(zip(self.members, self._directions)):
            rows: dict[tuple[Direction, str], Tensor] = {}
            for d in directions:
                encoded = by_direction.get((i, d), [])
                copies += member.replicated(d, encoded)
                for buffer in member.wire[d]:
                    rows[d, buffer.name], pairs = member.rows_sent(buffer, encoded)
                    copies += pairs
                    # "data" that is copied would not be freed
                    is_repeatable &= not (pairs and buffer.name == "data")
            # FSDP2 gathers the first input only
            first = 1 if member.managed.world_size == 1 else len(rows)
            inputs.append(tuple(rows.values())[:first])
            unsent = list(rows.items())[first:]
            not_gathered += ((member.buffer(*name), values) for name, values in unsent)
        return _Sent(
            key,
            launched or [],
            tuple((a.shard.piece.state.name, a.direction.value) for a in asked),
            inputs,
            not_gathered,
            torch_compat.by_dtype(copies),
            is_repeatable,
        )

    def _encoded(
        self, local: Sequence[Tensor], asked: Sequence[_Asked], launches: list
    ) -> list[Encoded]:
        """Codes of the shards: of quantized parameters, cached by `fq.hold`, else encoded now."""
        results: dict[int, Encoded] = {}
        for n, a in enumerate(asked):
            codes = self.members[a.member].state.own_codes(local[a.member], a.direction, a.matrix)
            if codes is not None:
                results[n] = codes
        missing = [n for n in range(len(asked)) if n not in results]
        device = self.members[0].managed.device
        shards = [asked[n].shard for n in missing]
        states = [self.members[asked[n].member].state for n in missing]
        if all(state.held is None for state in states):
            recorded = launches if len(missing) == len(asked) else None
            results.update(zip(missing, encode_shards(shards, device, recorded)))
        else:
            for n, shard, state in zip(missing, shards, states):
                results[n] = held(
                    state,
                    _held_key(shard),
                    local[asked[n].member],
                    lambda shard=shard: encode_shards([shard], device)[0],
                )
        return [results[n] for n in range(len(asked))]

    @torch.no_grad()
    def receive(self) -> None:
        """Fill the buffers that NCCL did not, and convert codes to GEMM layouts, for all weights at
        once."""
        copies = [(target, rows.index_select(0, index)) for target, rows, index in self._halos]
        copies += self._not_gathered
        self._not_gathered = []
        for target, _ in copies:
            torch_compat.alloc_storage(target)
        torch_compat.copy_all([(target, viewed_as(target, source)) for target, source in copies])
        if self._recorded is not None:
            self._recorded.free()
        for member in self._derives:
            member.derive()
        for relayout in self._relayouts:
            relayout()
        for member, codes in self._unread:
            # else the dtype was a guess, or the guard moved a GEMM since the forward's gather
            if member.knows_activation_dtype and member.layouts == member.operand_layouts:
                torch_compat.free_storage(codes)


def _members_of(
    launches: list[tuple[RecordedEncode, list[int]]], asked: Sequence[_Asked]
) -> list[tuple[RecordedEncode, list[int]]] | None:
    """The members whose shards each launch encodes; None if a shard, or a part of it, is left."""
    members = [(launch, list({asked[n].member: None for n in on})) for launch, on in launches]
    directions = {(a.member, a.direction) for a in asked}
    is_whole = sum(len(each) for _, each in members) == len(directions)
    return members if is_whole and sum(len(on) for _, on in launches) == len(asked) else None


def _held_key(shard: Shard) -> tuple:
    """Key of codes in `fq.hold`. Training does not use those of an evaluation, which recorded no
    amax."""
    state = shard.piece.state
    records = shard.records and bool(state.quantizer.delayed_directions)
    encoded_by = state.quantizer, state.compute_dtype, shard.high_precision
    return state.name, shard.direction, *encoded_by, records


def _facts(
    member: GatheredWeight, directions: tuple[Direction, ...], shard: Tensor
) -> tuple[tuple, tuple[Tensor | None, ...]]:
    """Key of the launches of a weight's gather: values that must be equal, and tensors that must be
    identical."""
    state = member.state
    delayed = () if state.packed else state.quantizer.delayed_directions
    same: tuple[Tensor | None, ...] = ()
    for d in directions:
        same += (state.statistics or {}).get((state.name, d)) or ()
        if d in delayed:
            history = state.delayed_history(d, member.managed.device)
            same += () if history is None else (history.encode_scale, history.amaxes)
    records = delayed and member.records
    return (shard.shape, shard.dtype, shard.device, records, state.held is None), same


class _Sent(NamedTuple):
    """The launches and buffers of a gather, which can encode other values into the same memory.

    Key: `_facts` of all weights. Owner: the plan, until the key differs. The memory is freed when
    the gather has arrived.

    launches:      (launch, the members whose shards it encodes).
    inputs:        all-gather inputs of each weight.
    not_gathered:  (buffer, its bytes) of what FSDP2 does not gather at world size 1.
    copies:        ([buffer], [source]) of buffers that are not views of the codes.
    is_repeatable: launches write all codes.
    """

    key: list[tuple[tuple, tuple[Tensor | None, ...]]]
    launches: list[tuple[RecordedEncode, list[int]]]
    names: tuple[tuple[str, str], ...]
    inputs: list[tuple[Tensor, ...]]
    not_gathered: list[tuple[Tensor, Tensor]]
    copies: list[tuple[list[Tensor], list[Tensor]]]
    is_repeatable: bool

    def is_of(self, key: list) -> bool:
        return all(
            a == b and len(x) == len(y) and all(map(operator.is_, x, y))
            for (a, x), (b, y) in zip(self.key, key)
        )

    def repeat(self, values: Sequence[Tensor]) -> None:
        for launch, members in self.launches:
            replay_encode(launch, [values[i].to(launch.device) for i in members])
        counters.add_each("weight encode", self.names)

    def free(self) -> None:
        for launch, _ in self.launches:
            launch.free()


class _Operands:
    """GEMM operands of gathered weights; allocated once, freed and refilled by FSDP2.

    Packed weights have none: `linear.stacked_weights` converts the codes of all matrices in one
    call.

    copies:  per weight and direction, the buffers that are not views of the gathered codes: FSDP2's
             inner tensors.
    unread:  per weight, the gathered columnwise codes if all GEMMs read copies of them; else None.
    """

    def __init__(self, members: Sequence[GatheredWeight]):
        self.members = members
        self.copies: list[dict[Direction, list[Tensor]]] = [
            {d: [] for d in Direction} for _ in members
        ]
        self.unread: list[Tensor | None] = [None] * len(members)
        self._launches: dict[Direction, list[RecordedLaunch]] = {d: [] for d in Direction}
        self._rewrites: dict[Direction, dict[int, Callable[[], None]]] = {d: {} for d in Direction}
        self._is_recorded: dict[Direction, bool] = {}
        buffers = [b for m in members for b in (*m.buffers.values(), m.derived) if b is not None]
        for b in buffers:
            b.alloc()
        for member in members:
            member.operand_layouts = member.layouts
            if not member.state.packed:
                member.pair.drop_operands()  # in the layouts of other GEMMs
        for d in Direction:
            self._lay_out(d)
        for copies in self.copies:
            for t in (*copies[ROWWISE], *copies[COLUMNWISE]):
                torch_compat.free_storage(t)
        for b in buffers:
            b.free()

    def _lay_out(self, direction: Direction) -> None:
        """Build the operands of one direction, and record the launches that write them."""
        converted: dict[int, tuple[Storage, str]] = {}
        for i, member in enumerate(self.members):
            layout = member.operand_layouts.get(direction, COMPACT)
            storage = None if member.state.packed else member.pair.get(direction)
            if isinstance(storage, Storage) and layout != COMPACT and storage.fmt.is_quantized:
                converted[i] = storage, layout
        launches = self._launches[direction]
        operands = to_gemm_operands(list(converted.values()), calls=launches)
        for (i, (storage, layout)), operand in zip(converted.items(), operands):
            self.members[i].pair.cache_operand(direction, layout, operand)
            self._rewrites[direction][i] = functools.partial(_rewrite, storage, operand)
            shared = {t.data_ptr() for t in storage.buffers().values()}
            copies = [t for t in operand.buffers().values() if t.data_ptr() not in shared]
            self.copies[i][direction] = copies
            if direction is COLUMNWISE and any(t is operand.data for t in copies):
                self.unread[i] = storage.data
        written = {id(t) for launch in launches for t in launch.out}
        self._is_recorded[direction] = all(
            id(t) in written for copies in self.copies for t in copies[direction]
        )

    def relayouts(self, needs: tuple[frozenset[Direction], ...]) -> list[Callable[[], None]]:
        """Calls that write the operands of the directions that each weight needs."""
        calls: list[Callable[[], None]] = []
        for d in Direction:
            if self._is_recorded[d] and all(d in n for n in needs):
                calls += self._launches[d]
            else:
                calls += [rewrite for i, rewrite in self._rewrites[d].items() if d in needs[i]]
        return calls


def _rewrite(source: Storage, target: EncodedMatrix) -> None:
    """Convert a gathered storage into the buffers of its operand, without a recorded launch."""
    fresh = source.to_gemm_operand(target.layout).buffers()
    torch_compat.copy_all(
        [(t, fresh[n]) for n, t in target.buffers().items() if t.data_ptr() != fresh[n].data_ptr()]
    )

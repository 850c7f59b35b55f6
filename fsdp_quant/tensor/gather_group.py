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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm_operand import GemmOperand
from ..ops.dispatch import Encoded, replay_encode
from ..ops.layout import COMPACT
from ..ops.native import RecordedEncode, RecordedLaunch
from ..storage import Storage, to_gemm_operands
from . import torch_compat
from .gathered_weight import GatheredWeight, GatherPass, gathered_size
from .weight_state import Piece, Shard, encode_shards, held, values_of

# Quantizers of weights whose GEMMs some compiled graph recomputes in its backward; layers share the
# graph, so it cannot name them.
RECOMPUTED_IN_GRAPHS: set = set()


class GatherGroup:
    """The weights of one FSDP parameter group, which are gathered together.

    members:  their unsharded sides, in the order of their hooks.
    """

    def __init__(self, local: Sequence[Tensor], members: Sequence[GatheredWeight | None]):
        """local: sharded local tensors of the group's parameters; members: None where one is not
        gathered as codes."""
        self.members = [m for m in members if m is not None]
        self._local = list(map(weakref.ref, local))
        places = [i for i, m in enumerate(members) if m is not None]
        self.ours = (
            operator.itemgetter(*places) if len(places) > 1 else lambda every: [every[places[0]]]
        )
        self._plans: dict[tuple[frozenset[Direction], ...], GatherPlan] = {}
        self._layouts = [member.layouts for member in self.members]
        self._operands = _Operands(self.members, self._layouts)
        self.is_checkpointed = False  # the last forward ran inside torch.utils.checkpoint
        for member in self.members:
            member.group = self

    def is_of(self, local: Sequence[Tensor]) -> bool:
        """It gathers these tensors, in their present formats."""
        before = [tensor() for tensor in self._local]
        now = [member.state.gathered for member in self.members]
        return (
            len(before) == len(local)
            and all(map(operator.is_, before, local))
            and all(map(operator.is_, now, self.members))
        )

    def converts_as_read(self) -> bool:
        """The present GEMMs read the layouts of the operands: the guard moved none, and autocast is
        as it was."""
        changed = [member for member in self.members if member.reader != member.laid_out_for]
        if changed and self._layouts != [member.layouts for member in self.members]:
            return False
        for member in changed:
            member.laid_out_for = member.reader
        return True

    @property
    def recomputed(self) -> list[bool]:
        """Per weight: the backward recomputes the forward of its module."""
        return [
            self.is_checkpointed
            or m.state.is_recomputed
            or any(one.quantizer in RECOMPUTED_IN_GRAPHS for one in m.matrices)
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
        self._chosen = [member.passes[n] for member, n in zip(members, needs)]
        self.outputs = [chosen.outputs for chosen in self._chosen]
        self.inner = [
            chosen.inner_tensors + [t for d in n for t in operands.own[i][d]]
            for i, (chosen, n) in enumerate(zip(self._chosen, needs))
        ]
        self.sizes: Counter[tuple[str, str]] = Counter()
        for member, chosen in zip(members, self._chosen):
            for d in chosen.directions:
                size = gathered_size(member.wire[d], member.managed.world_size)
                self.sizes[d.value, member.quantizer.encodings[d].fmt.name] += size
        self._relayouts = operands.relayouts(needs)
        self._deriving = [
            m for m, n in zip(members, needs) if m.derived is not None and COLUMNWISE in n
        ]
        # columnwise codes that the backward reads only in another layout
        self._unread = [
            (m, t)
            for m, t, n in zip(members, operands.unread, needs)
            if t is not None and n == {COLUMNWISE}
        ]
        self._unpacked = [
            i
            for i, (m, c) in enumerate(zip(members, self._chosen))
            if m.managed.world_size == 1 or any(m.buffers[d].inner_tensors for d in c.directions)
        ]
        self._metadata: list[dict[tuple[Direction, str], Tensor]] = [{} for _ in members]
        self._recorded: _Sent | None = None

    def send(self, local: Sequence[Tensor]) -> None:
        """Encode the shards, and set `all_gather_inputs` of each weight."""
        key = list(map(_facts, self.members, self._chosen, local))
        if self._recorded is None or not self._recorded.is_of(key):
            self._recorded = self._record(local, key)
        else:
            self._recorded.repeat([values_of(shard) for shard in local])
        sent = self._recorded
        for member, inputs in zip(self.members, sent.inputs):
            member.all_gather_inputs = inputs, self
        self._metadata = sent.metadata
        for targets, sources in sent.copies:
            torch_compat.foreach_copy_(targets, sources)
        if not sent.is_repeatable:
            self._recorded = None

    def _record(self, local: Sequence[Tensor], key: list) -> _Sent:
        asked, whose = [], []
        for i, (member, shard, chosen) in enumerate(zip(self.members, local, self._chosen)):
            for d in chosen.directions:
                for matrix, s in enumerate(member.shards(shard, d)):
                    asked.append((i, d, s))
                    whose.append((i, matrix if member.state.packed else None))
        launches: list[tuple[RecordedEncode, list[int]]] = []
        by_direction: dict[tuple[int, Direction], list[tuple[Piece, Encoded]]] = {}
        for (i, d, shard), encoded in zip(asked, self._encoded(local, asked, launches)):
            by_direction.setdefault((i, d), []).append((shard.piece, encoded))
        copies, inputs, metadata = [], [], []
        is_repeatable = sum(len(places) for _, places in launches) == len(asked)
        for i, (member, chosen) in enumerate(zip(self.members, self._chosen)):
            own_inputs, own_metadata = [], {}
            for d in chosen.directions:
                of = by_direction.get((i, d), [])
                own = [e for piece, e in of if piece.values.shape[0] or not member.state.packed]
                copies += member.replicated(d, own)
                rows_sent = member.rows_sent(d, own)
                is_repeatable &= len(of) == (len(local[i]) if member.state.packed else 1)
                for buffer, rows in zip(member.wire[d], rows_sent):
                    fields = [getattr(e, buffer.name) for e in own]
                    if not all(_is_view(rows, field) for field in fields):
                        pairs = member.copies_of_rows(buffer, fields, rows)
                        copies += pairs
                        sources_stay = all(
                            _is_view(source, field) for (_, source), field in zip(pairs, fields)
                        )
                        # sources of "data" would not be freed
                        is_repeatable &= sources_stay and buffer.name != "data"
                for n, (buffer, rows) in enumerate(zip(member.wire[d], rows_sent)):
                    # FSDP2 gathers the first input only
                    if member.managed.world_size == 1 and (n > 0 or own_inputs):
                        own_metadata[d, buffer.name] = rows
                    else:
                        own_inputs.append(rows)
            inputs.append(tuple(own_inputs))
            metadata.append(own_metadata)
        places = [(launch, [whose[n] for n in at]) for launch, at in launches]
        names = [(s.piece.state.name, d.value) for _, d, s in asked]
        return _Sent(
            key, places, names, inputs, metadata, torch_compat.by_dtype(copies), is_repeatable
        )

    def _encoded(
        self, local: Sequence[Tensor], asked: Sequence[tuple[int, Direction, Shard]], launches: list
    ) -> list[Encoded]:
        """Codes of the shards: of quantized parameters, cached by `fq.hold`, else encoded now."""
        results: dict[int, Encoded] = {}
        for n, (i, d, _) in enumerate(asked):
            own = self.members[i].state.own_codes(local[i], d)
            if own is not None:
                results[n] = own
        missing = [n for n in range(len(asked)) if n not in results]
        device = self.members[0].managed.device
        shards = [asked[n][2] for n in missing]
        if all(self.members[asked[n][0]].state.held is None for n in missing):
            recorded = launches if len(missing) == len(asked) else None
            results.update(zip(missing, encode_shards(shards, device, recorded)))
        else:
            for n, shard in zip(missing, shards):
                i = asked[n][0]
                results[n] = held(
                    self.members[i].state,
                    _held_key(shard),
                    local[i],
                    lambda shard=shard: encode_shards([shard], device)[0],
                )
        return [results[n] for n in range(len(asked))]

    @torch.no_grad()
    def receive(self) -> None:
        """Fill the buffers that NCCL did not, and convert codes to GEMM layouts, for all weights at
        once."""
        if self._unpacked:
            torch_compat.copy_all(
                [
                    copy
                    for i in self._unpacked
                    for copy in self.members[i].unpack(self._chosen[i], self._metadata[i])
                ]
            )
            self._metadata = [{} for _ in self.members]
        if self._recorded is not None:
            self._recorded.free()
        for member in self._deriving:
            member.derive()
        for relayout in self._relayouts:
            relayout()
        for member, codes in self._unread:
            # else the dtype was a guess, or the guard moved a GEMM since the forward's gather
            if member.activation_dtype is not None and member.reader == member.laid_out_for:
                torch_compat.free_storage(codes)


def _held_key(shard: Shard) -> tuple:
    """Key of codes in `fq.hold`. Training does not use those of an evaluation, which recorded no
    amax."""
    state = shard.piece.state
    records = shard.records and bool(state.quantizer.delayed_directions)
    encoded_by = state.quantizer, state.compute_dtype, shard.high_precision
    return state.name, shard.direction, *encoded_by, records


def _facts(
    member: GatheredWeight, chosen: GatherPass, shard: Tensor
) -> tuple[tuple, tuple[Tensor | None, ...]]:
    """Key of the launches of a weight's gather: values that must be equal, and tensors that must be
    identical."""
    state = member.state
    delayed = () if state.packed else state.quantizer.delayed_directions
    same: tuple[Tensor | None, ...] = ()
    for d in chosen.directions:
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

    launches:      (launch, (member, matrix or None) of each shard that it encodes).
    inputs:        all-gather inputs of each weight; metadata: buffers that FSDP2 does not gather at
                   world size 1.
    copies:        ([buffer], [source]) of replicated buffers.
    is_repeatable: launches write all buffers.
    """

    key: list[tuple[tuple, tuple[Tensor | None, ...]]]
    launches: list[tuple[RecordedEncode, list[tuple[int, int | None]]]]
    names: list[tuple[str, str]]
    inputs: list[tuple[Tensor, ...]]
    metadata: list[dict[tuple[Direction, str], Tensor]]
    copies: list[tuple[list[Tensor], list[Tensor]]]
    is_repeatable: bool

    def is_of(self, key: list) -> bool:
        return all(
            a == b and len(x) == len(y) and all(map(operator.is_, x, y))
            for (a, x), (b, y) in zip(self.key, key)
        )

    def repeat(self, values: Sequence[Tensor]) -> None:
        matrices = {i: v.unbind() for i, v in enumerate(values) if v.dim() == 3}
        for launch, places in self.launches:
            shards = [values[i] if e is None else matrices[i][e] for i, e in places]
            replay_encode(launch, [shard.to(launch.device) for shard in shards])
        counters.add_each("weight encode", self.names)

    def free(self) -> None:
        for launch, _ in self.launches:
            launch.free()


def _is_view(rows: Tensor, buffer: Tensor) -> bool:
    return (
        buffer.numel() == 0
        or rows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    )


class _Operands:
    """GEMM operands of gathered weights; allocated once, freed and refilled by FSDP2.

    Packed weights have none: `expert_weights` converts the codes of all matrices in one
    call.

    own:     per weight and direction, the buffers that are not views of the gathered codes: FSDP2's
             inner tensors.
    unread:  per weight, the gathered columnwise codes if all GEMMs read copies of them; else None.
    """

    def __init__(self, members: Sequence[GatheredWeight], layouts: Sequence[dict[Direction, str]]):
        self.members, self.own = members, [{d: [] for d in Direction} for _ in members]
        self.unread: list[Tensor | None] = [None] * len(members)
        self._calls: dict[Direction, list[RecordedLaunch]] = {d: [] for d in Direction}
        self._derived: list[tuple[int, Direction, Storage, GemmOperand]] = []
        self._is_recorded = {d: True for d in Direction}
        every = (b for m in members for b in (*m.buffers.values(), m.derived))
        buffers = [b for b in every if b is not None]
        for b in buffers:
            b.alloc()
        for member in members:
            member.laid_out_for = member.reader
            if not member.state.packed:
                member.pair.drop_operands()  # in the layouts of other GEMMs
        for d in Direction:
            of: list[tuple[int, Storage, str]] = []
            for i, member in enumerate(members):
                if member.state.packed:
                    continue
                layout, storage = layouts[i].get(d, COMPACT), member.pair.get(d)
                if isinstance(storage, Storage) and layout != COMPACT and storage.fmt.is_quantized:
                    of.append((i, storage, layout))
            operands = to_gemm_operands(
                [(storage, layout) for _, storage, layout in of], calls=self._calls[d]
            )
            for (i, storage, layout), operand in zip(of, operands):
                members[i].pair.cache_operand(d, layout, operand)
                self._derived.append((i, d, storage, operand))
                self.own[i][d] += _own_buffers(operand, storage)
                if d is COLUMNWISE and any(t is operand.data for t in self.own[i][d]):
                    self.unread[i] = storage.data
        for d in Direction:
            written = {id(t) for call in self._calls[d] for t in call.out}
            self._is_recorded[d] = all(id(t) in written for own in self.own for t in own[d])
        for tensors in self.own:
            for t in (*tensors[ROWWISE], *tensors[COLUMNWISE]):
                torch_compat.free_storage(t)
        for b in buffers:
            b.free()

    def relayouts(self, needs: tuple[frozenset[Direction], ...]) -> list[Callable[[], None]]:
        """Calls that write the operands of the directions that each weight needs."""
        calls: list[Callable[[], None]] = []
        for d in Direction:
            if self._is_recorded[d] and all(d in n for n in needs):
                calls += self._calls[d]
            else:
                calls += [
                    functools.partial(_rewrite, storage, operand)
                    for i, of, storage, operand in self._derived
                    if of is d and d in needs[i]
                ]
        return calls


def _rewrite(source: Storage, target: GemmOperand) -> None:
    """Convert a gathered storage into the buffers of its operand, without a recorded launch."""
    fresh = source.to_gemm_operand(target.layout).buffers()
    torch_compat.copy_all(
        [(t, fresh[n]) for n, t in target.buffers().items() if t.data_ptr() != fresh[n].data_ptr()]
    )


def _own_buffers(operand: GemmOperand, codes: Storage) -> list[Tensor]:
    """Buffers of `operand` that are not the memory of `codes`."""
    shared = {t.data_ptr() for t in codes.buffers().values()}
    return [t for t in operand.buffers().values() if t.data_ptr() not in shared]

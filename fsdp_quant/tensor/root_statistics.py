# SPDX-License-Identifier: Apache-2.0
"""Statistics of sharded weights that depend on several ranks: one collective per shard group and
forward of the root, unconditionally.

[Note: which statistics a gather uses]
Amaxes of whole tensors, and of blocks that a shard boundary cuts, must be reduced before any rank
encodes. Only calls on all ranks issue collectives, never a flag of one rank:

    forward of the root     the first gather inside reduces those of all weights of the root, from
                            the shards as they are
    backward                its gathers use the statistics of their forward
    any other gather        (unshard() by hand, a nested module that is called by itself) reduces
                            those of its group

The root is FSDP2's outermost module. A forward begins where FSDP2 begins it: in a call, or in a
method that `register_fsdp_forward_method` was given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..counters import counters
from ..formats import Direction
from ..ops import opaque
from ..ops.dispatch import Statistics
from ..scaling import Fragment, SharedStatistics
from . import torch_compat
from .agreement import check_same_model
from .gathered_weight import GatheredWeight, cuts_and_rank
from .torch_compat import ManagedParam
from .weight_state import Piece, WeightState, WeightTensor, values_of


class Sharded(NamedTuple):
    """A rank's rows or part of a weight.

    local:    the local tensor.
    managed:  None without `fully_shard` (tensor parallelism alone).
    known:    statistics that a kernel computed of this rank's rows, by direction.
    """

    local: Tensor
    state: WeightState
    managed: ManagedParam | None
    known: dict[Direction, Statistics] | None = None

    @property
    def device(self) -> torch.device:
        return self.local.device if self.managed is None else self.managed.device

    @property
    def identity(self) -> object:
        return (
            (self.local.shape, self.local.device) if self.managed is None else self.managed.identity
        )

    def pieces(self) -> list[Piece]:
        cuts, rank = cuts_and_rank(self.managed, self.local.shape[0])
        if self.state.packed and not self.state.shares_statistics(cuts):
            return []
        return self.state.pieces(values_of(self.local), cuts, rank)


class _Root:
    """Statistics of one root of `fully_shard` in the last forward.

    is_reduced:  in this one.
    trains:      a backward may follow the forward that runs.
    unrecorded:  a weight of each group that an evaluation gathered, and may leave gathered.
    """

    def __init__(self, managed: ManagedParam):
        self.is_reduced, self.trains = False, True
        self.unrecorded: list[ManagedParam] = []
        self.collectives: dict[tuple, Collective] = {}
        local = (m.local for m in torch_compat.managed_params_of_root(managed))
        states = [s for t in local if isinstance(t, WeightTensor) for s in t.state.matrices]
        self._forward_begins = {s.forward_begins for s in states if s.forward_begins is not None}
        torch_compat.watch_forwards(managed, self.begin)

    def begin(self, module: nn.Module, is_root: bool, args: tuple) -> None:
        # a checkpoint of the whole root recomputes with the statistics of its forward
        if torch_compat.backward_is_running():
            return
        self.is_reduced = self.is_reduced and not is_root
        self.trains = torch_compat.backward_may_follow(module, args)
        while self.trains and self.unrecorded:
            self.unrecorded.pop().reshard()
        for begins in self._forward_begins:
            begins(module, self.trains, is_root)


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
# per FSDP2 state context
_ROOTS: weakref.WeakKeyDictionary[object, _Root] = weakref.WeakKeyDictionary()
_AGREED: weakref.WeakSet = weakref.WeakSet()  # contexts whose ranks have compared their models


def check_model(managed: ManagedParam) -> None:
    """Compare the model of all ranks that hold these weights, before the first gather under a root.
    Every rank must call it. Raises ValueError, on every rank, if they differ."""
    shared, root = torch_compat.root_of(managed), torch_compat.root_module(managed)
    if shared not in _AGREED:
        check_same_model(torch_compat.managed_params_of_root(managed))
        _AGREED.add(shared)
    if shared not in _ROOTS and root is not None:
        _ROOTS[shared] = _Root(managed)
        if torch_compat.begins_first_forward(managed):
            _ROOTS[shared].begin(root, True, ())


@opaque.eager_only
def check_model_of(module: nn.Module, attribute: str) -> None:
    """`check_model` in the first forward of a module whose weight FSDP2 gathers in high precision,
    so without a hook of ours."""
    if module.__dict__.get("_ranks_agree"):
        return
    every = torch_compat.all_managed_params()
    managed = next((m for m in every if (module, attribute) in m.owners), None)
    if managed is not None:
        check_model(managed)
        module.__dict__["_ranks_agree"] = True


def is_new_root() -> bool:
    """Some root has begun its first forward without a comparison of its model."""
    return any(root not in _AGREED for root in torch_compat.roots())


def before_gather(members: Sequence[GatheredWeight]) -> None:
    """Reduce the statistics for a gather of this group (see the note); in the same calls on every
    rank."""
    managed = members[0].managed
    root = _ROOTS.get(torch_compat.root_of(managed))
    if root is not None and managed.in_forward and not torch_compat.backward_is_running():
        for member in members:
            member.records = root.trains
    if managed.in_pre_backward or torch_compat.backward_is_running():
        if all(member.state.statistics is not None for member in members):
            return
    elif managed.in_forward_of_root:
        if root is not None and not root.is_reduced:
            root.is_reduced = True
            reduce_statistics(
                _ordinary_weights(torch_compat.managed_params_of_root(managed)), root.collectives
            )
        return
    reduce_statistics(_ordinary_weights([member.managed for member in members]), {})


def gather_again_in_training(members: Sequence[GatheredWeight]) -> None:
    """Reshard this group, which stays gathered, before the next forward that trains, if this one
    records no amaxes and that one has to."""
    root = _ROOTS.get(torch_compat.root_of(members[0].managed))
    if root is not None and any(member.leaves_amaxes_out for member in members):
        root.unrecorded.append(members[0].managed)


def _ordinary_weights(managed: Iterable[ManagedParam]) -> list[Sharded]:
    """Weights that gathers encode; quantized parameters have own statistics
    (`quantized_weight`)."""
    return [
        Sharded(t, t.state, m)
        for m in managed
        if isinstance(t := m.local, WeightTensor) and not t.state.holds_codes
    ]


@torch.no_grad()
def reduce_statistics(weights: Sequence[Sharded], collectives: dict[tuple, Collective]) -> None:
    """Share statistics of these weights over all ranks that hold them: one MAX all-reduce per shard
    group, also for the parts of tensor parallelism if one group contains all their ranks.

    collectives:  those of the last call, by their groups, whose memory is written again: captured
           steps read it.

    Every rank must call it with the same weights, also with empty shards.
    """
    by_groups: dict[tuple, list[Sharded]] = {}
    for weight in weights:
        by_groups.setdefault(_groups(weight), []).append(weight)
    for groups, sharded in by_groups.items():
        last = collectives.get(groups)
        if last is None or not last.replay(sharded):
            collectives[groups] = Collective(sharded, groups)


def _groups(weight: Sharded) -> tuple[dist.ProcessGroup, ...]:
    """The groups that reduce a weight's statistics: one of all ranks that hold any of it, or one
    per axis.

    Copies (HSDP) hold the same values, so a group may contain them. No group is created here: other
    stages of a pipeline could not take part.
    """
    m, parts, world = weight.managed, weight.state.tensor_group, dist.group.WORLD
    if m is None:
        return () if parts is None else (parts,)
    shards = m.process_group
    if parts is None or not weight.state.spans_parts:
        return () if shards is None else (shards,)
    if shards is None or shards.size() == 1:
        return (parts,)
    if world is not None and m.registered.device_mesh.size() == world.size():
        if dist.get_backend(world) == dist.get_backend(shards):
            return (world,)
    return shards, parts


class Collective:
    """Statistics that ranks share over some groups, in the same memory in every forward.

    Key: states, formats, shapes, known statistics. Owner: the root, or the caller of one gather.
    """

    def __init__(self, weights: Sequence[Sharded], groups: tuple[dist.ProcessGroup, ...]):
        self._weights, self._formats = _facts(weights), _formats(weights)
        self._formats_set = WeightState.formats_set
        pieces = [(piece, weight) for weight in weights for piece in weight.pieces()]
        fragments = [(_fragment(piece, weight), piece, weight) for piece, weight in pieces]
        crossing = [f for f in fragments if any(map(f[0].shares_statistics, f[0].encodings))]
        self._crossing = [fragment for fragment, *_ in crossing]
        # (weight, matrix) of each, without tensors
        self._states = [(weight.state, piece.state) for _, piece, weight in crossing]
        self._shared: list[SharedStatistics] = []
        for group in groups if crossing else ():
            self._shared.append(SharedStatistics(self._crossing, group))
            self._pass_on(self._shared[-1])
        self._hand_over(weights)

    def replay(self, weights: Sequence[Sharded]) -> bool:
        """Reduce the statistics of the same weights again. Returns False, before any collective, if
        more than values differs."""
        if self._weights != _facts(weights) or any(state.packed for state, _ in self._states):
            return False
        if self._formats_set != WeightState.formats_set:  # experts are many
            if self._formats != _formats(weights):
                return False
            self._formats_set = WeightState.formats_set
        by_state = {weight.state: weight for weight in weights}
        for fragment, (state, _) in zip(self._crossing, self._states):
            weight = by_state[state]
            fragment.values = values_of(weight.local).to(weight.device)
            fragment.known_amaxes = _known(weight)
        for shared in self._shared:
            if not shared.replay(self._crossing, torch_compat.copy_all):
                return False
            self._pass_on(shared)
        self._hand_over(weights)
        return True

    def _pass_on(self, shared: SharedStatistics) -> None:
        """Let the next group start from the results of this one."""
        counters.add("amax all-reduce", "weights")
        for fragment, results in zip(self._crossing, shared.results):
            known_amaxes = fragment.known_amaxes or results
            fragment.known_amaxes = tuple(s or t for s, t in zip(results, known_amaxes))

    def _hand_over(self, weights: Sequence[Sharded]) -> None:
        by_state: dict[WeightState, dict] = {weight.state: {} for weight in weights}
        results = self._shared[-1].results if self._shared else []
        for (state, matrix), fragment, shared in zip(self._states, self._crossing, results):
            directions = [(matrix.name, e.direction) for e in fragment.encodings]
            by_state[state].update(zip(directions, shared))
        for state, statistics in by_state.items():
            state.statistics = statistics
        for fragment in self._crossing:
            fragment.values = _NOTHING  # do not keep a replaced weight alive


def _facts(weights: Sequence[Sharded]) -> list[tuple]:
    return [(w.state, w.identity, w.local.dtype, not w.known) for w in weights]


def _formats(weights: Sequence[Sharded]) -> list[tuple]:
    return [(m.quantizer, m.compute_dtype) for w in weights for m in w.state.matrices]


def _fragment(piece: Piece, weight: Sharded) -> Fragment:
    state = piece.state
    return Fragment(
        piece.values.to(weight.device),
        tuple(state.quantizer.encodings.values()),
        piece.cuts,
        piece.rank,
        state.compute_dtype,
        _known(weight),
        state.part if state.spans_parts else (0, 1),
    )


def _known(weight: Sharded) -> tuple[Statistics | None, ...] | None:
    return tuple(map(weight.known.get, weight.state.quantizer.encodings)) if weight.known else None

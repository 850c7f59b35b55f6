# SPDX-License-Identifier: Apache-2.0
"""Statistics of sharded weights that cross ranks: one collective per shard group and forward of the
root, unconditionally.

[Note: which statistics a gather uses]
Amaxes of whole tensors, and of blocks that a shard boundary cuts, must be reduced before any rank
encodes. Collectives belong to calls that all ranks are in, never to a flag of one rank:

    forward of the root     the first gather inside takes those of all weights of the root, from the
                            shards as they are
    backward                its gathers use the statistics of their forward
    any other gather        unshard() by hand, a nested module that is called by itself: the group
                            takes its own

The root is the module that FSDP2 finds to be the outermost; a hook on it notes that another forward
begins.
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
from ..ops.dispatch import Statistics
from ..scaling import Fragment, RowCuts, SharedStatistics
from . import torch_compat
from .agreement import check_same_model
from .gathered_weight import GatheredWeight, cuts_of
from .torch_compat import ManagedParam
from .weight_state import Piece, WeightState, WeightTensor, values_of


class Sharded(NamedTuple):
    """A weight, or a shard of one, of which other ranks hold other rows or parts.

    local:    the local tensor.
    managed:  None where `fully_shard` does not manage it (tensor parallelism alone).
    found:    statistics of this rank's rows that are known, by direction.
    """

    local: Tensor
    state: WeightState
    managed: ManagedParam | None
    found: dict[Direction, Statistics] | None = None

    @property
    def device(self) -> torch.device:
        return self.local.device if self.managed is None else self.managed.device

    @property
    def identity(self) -> object:
        return (
            (self.local.shape, self.local.device) if self.managed is None else self.managed.identity
        )

    def pieces(self) -> list[Piece]:
        whole = self.managed is None
        cuts, rank = (
            (RowCuts((0, self.local.shape[0])), 0)
            if whole
            else (cuts_of(self.managed), self.managed.rank)
        )
        if self.state.parts and not self.state.shares_statistics(cuts):
            return []
        return self.state.pieces(values_of(self.local), cuts, rank)


class _Root:
    """What one root of `fully_shard` has: its statistics of the last forward, and whether this
    forward took them."""

    def __init__(self, module: nn.Module):
        self.taken = False
        self.collectives: dict[tuple, Collective] = {}
        module.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, module: nn.Module, args) -> None:
        # a checkpoint that recomputes all uses the statistics of its forward
        if not torch_compat.backward_is_running():
            self.taken = False
            torch_compat.end_failed_pass(module)


# per FSDP2 state context, dies with it
_ROOTS: weakref.WeakKeyDictionary[object, _Root] = weakref.WeakKeyDictionary()
_AGREED: weakref.WeakSet = weakref.WeakSet()  # contexts whose ranks have compared their models


def check_model(managed: ManagedParam) -> None:
    """Compare the model of all ranks that hold these weights, before the first gather under a root.
    Every rank must call it.

    Raises ValueError, on every rank, where they differ.
    """
    shared = torch_compat.root_of(managed)
    if shared not in _AGREED:
        check_same_model(torch_compat.managed_params_beside(managed))
        _AGREED.add(shared)


def is_new_root() -> bool:
    """Some root has begun its first forward, and its model was not compared."""
    return any(root not in _AGREED for root in torch_compat.roots())


def before_gather(members: Sequence[GatheredWeight]) -> None:
    """Take the statistics that a gather of this group uses (see the note); in the same calls on
    every rank."""
    managed = members[0].managed
    if managed.in_pre_backward or torch_compat.backward_is_running():
        if all(member.state.statistics is not None for member in members):
            return
    elif managed.in_forward_of_root:
        shared = torch_compat.root_of(managed)
        root = _ROOTS.get(shared)
        if root is None:
            root = _ROOTS[shared] = _Root(torch_compat.root_module(managed))
        if not root.taken:
            root.taken = True
            take(_ordinary_weights(torch_compat.managed_params_beside(managed)), root.collectives)
        return
    take(_ordinary_weights([member.managed for member in members]), {})


def _ordinary_weights(managed: Iterable[ManagedParam]) -> list[Sharded]:
    """Codes of quantized parameters have statistics of their own (`quantized_weight`)."""
    local = ((m, m.local) for m in managed)
    return [
        Sharded(t, t.state, m)
        for m, t in local
        if isinstance(t, WeightTensor) and not t.state.holds_codes
    ]


@torch.no_grad()
def take(weights: Sequence[Sharded], kept: dict[tuple, Collective]) -> None:
    """Share statistics of these weights over the ranks that hold any of them: one MAX all-reduce
    per shard group, which serves the parts that tensor parallelism makes of a weight too where a
    group of all their ranks exists.

    kept:  collectives of the last time, by their groups: their memory is written again, which
           captured steps read.

    Every rank must call it with the same weights; empty shards take part.
    """
    by_groups: dict[tuple, list[Sharded]] = {}
    for weight in weights:
        by_groups.setdefault(_groups(weight), []).append(weight)
    for groups, of in by_groups.items():
        last = kept.get(groups)
        if last is None or not last.replay(of):
            kept[groups] = Collective(of, groups)


def _groups(weight: Sharded) -> tuple[dist.ProcessGroup, ...]:
    """What a weight's statistics are reduced over: one group of all ranks that hold any of it, or
    one for each axis.

    Copies (HSDP) hold the same values, so those of all copies do. No group is made here: ranks that
    hold other weights, such as another stage of a pipeline, are not there to take part.
    """
    m, parts, world = weight.managed, weight.state.tensor_group, dist.group.WORLD
    if m is None:
        return (parts,)
    shards = m.process_group
    if parts is None or not weight.state.spans_parts:
        return (shards,)
    if shards.size() == 1:
        return (parts,)
    if m.registered.device_mesh.size() == world.size() and dist.get_backend(
        world
    ) == dist.get_backend(shards):
        return (world,)
    return shards, parts


class Collective:
    """Statistics of weights that ranks share over some groups, forward after forward in the same
    memory.

    Key: states, formats, shapes, what is known already. Owner: the root, or the caller of one
    gather. It ends with the root.
    """

    def __init__(self, weights: Sequence[Sharded], groups: tuple[dist.ProcessGroup, ...]):
        self._key, self._shared = _key(weights), []
        pieces = [(piece, weight) for weight in weights for piece in weight.pieces()]
        fragments = [_fragment(*of) for of in pieces]
        places = [i for i, f in enumerate(fragments) if any(map(f.shares_statistics, f.encodings))]
        self._crossing = [fragments[i] for i in places]
        # (weight, matrix) of each; no tensor is kept
        self._of = [(pieces[i][1].state, pieces[i][0].state) for i in places]
        self._groups = groups if places else ()
        for group in self._groups:
            self._shared.append(SharedStatistics(self._crossing, group))
            self._pass_on(self._shared[-1])
        self._hand_over(weights)

    def replay(self, weights: Sequence[Sharded]) -> bool:
        """Take those of the same weights as they are now; False, before any collective, where more
        than values differs."""
        if self._key != _key(weights) or any(state.parts for state, _ in self._of):
            return False
        by_state = {id(weight.state): weight for weight in weights}
        for fragment, (state, _) in zip(self._crossing, self._of):
            weight = by_state[id(state)]
            fragment.values, fragment.found = (
                values_of(weight.local).to(weight.device),
                _found(weight),
            )
        for shared in self._shared:
            if not shared.replay(self._crossing, torch_compat.copy_all):
                return False
            self._pass_on(shared)
        self._hand_over(weights)
        return True

    def _pass_on(self, shared: SharedStatistics) -> None:
        counters.add("amax all-reduce", "weights")
        # what ranks of one group have shared, those of the next start from
        if len(self._groups) > 1:
            for fragment, own in zip(self._crossing, shared.results):
                fragment.found = tuple(s or t for s, t in zip(own, fragment.found or own))

    def _hand_over(self, weights: Sequence[Sharded]) -> None:
        for weight in weights:
            weight.state.statistics = {}
        results = self._shared[-1].results if self._shared else []
        for (state, matrix), fragment, of in zip(self._of, self._crossing, results):
            state.statistics.update(
                ((matrix.name, e.direction), one) for e, one in zip(fragment.encodings, of)
            )
            fragment.values = None  # a weight that is replaced is not kept alive here


def _key(weights: Sequence[Sharded]) -> list:
    states = (weight.state for weight in weights)
    formats = [(m.quantizer, m.compute_dtype) for state in states for m in state.matrices]
    return [
        *formats,
        *(x for w in weights for x in (w.state, w.identity, w.local.dtype, _found(w) is None)),
    ]


def _fragment(piece: Piece, weight: Sharded) -> Fragment:
    state = piece.state
    return Fragment(
        piece.values.to(weight.device),
        tuple(state.quantizer.encodings.values()),
        piece.cuts,
        piece.rank,
        state.compute_dtype,
        _found(weight),
        state.part if state.spans_parts else (0, 1),
    )


def _found(weight: Sharded) -> tuple[Statistics | None, ...] | None:
    return tuple(map(weight.found.get, weight.state.quantizer.encodings)) if weight.found else None

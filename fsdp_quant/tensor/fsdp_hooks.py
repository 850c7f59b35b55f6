"""FSDP2's extension points on a `MasterWeight` or a `QuantizedWeight`, and the statistics that ranks share before any encodes.

[Note: shared statistics]
Shared statistics (amaxes of whole tensors, and of blocks that a shard boundary cuts) must be reduced before any
rank encodes. That takes one MAX all-reduce for all weights of a shard group. It is issued by the first gather
after an event that every rank shares marked the weights pending: creation, an optimizer step, a load, a state
dict handed out, a change of recipe, `fq.sync`. Nothing rank-local ever decides it. The step of a `QuantizedWeight`'s optimizer
issues it, and encodes, when it ends (`write_back`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..ops import native
from ..ops.dispatch import Statistics
from ..scaling import Fragment, RowCuts, SharedStatistics
from . import torch_compat
from .gathered_group import GatheredGroup
from .gathered_weight import GatheredWeight, cuts_of
from .quantized_tensor import QuantizedTensor
from .torch_compat import ManagedParam


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
    managed, group = first.managed, first.group
    params, local = managed.gathered_together()
    values = local
    if managed.is_offloaded and weight.device != managed.local.device:  # each comes to the device as it is asked
        params, local, values = [managed.param], [managed.local], [weight]
    if group is None or not group.is_of(local):
        group = GatheredGroup(local, [gathered_weight(t) if isinstance(t, FSDPHooks) else None for t in local])
    if any([state.pending for state in group.states]):
        synchronize([managed])
    recomputed = group.recomputed
    if any(recomputed):
        needs = tuple(directions_needed(managed, one) for one in recomputed)
    else:
        needs = (directions_needed(managed, False),) * len(recomputed)
    group.send(values, params, needs, managed.phase, managed.gathers_for_reduction)
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
        managed = gathered.managed
        if out is None:
            for tensor in managed.inner_buffers:  # torch has done so of a weight that was gathered before
                torch_compat.alloc_storage(tensor)
        if metadata.members[-1] is gathered:  # nothing is read before the last of a group
            gathered.group.receive(metadata)
        if out is None:
            shape = managed.global_shape if gathered.slots.parts else None
            return QuantizedTensor(slots=gathered.slots, shape=shape), managed.inner_buffers


def directions_needed(managed: ManagedParam, recomputes: bool) -> frozenset[Direction]:
    """Which directions the pass that gathers now will multiply before it reshards.

    recomputes:  the backward recomputes the forward of the weight's module.
    """
    if managed.in_pre_backward:
        return _BOTH if recomputes or managed.stays_unsharded_after_backward else _COLUMNWISE
    if managed.in_forward and not managed.stays_unsharded_after_forward:
        return _BOTH if torch_compat.backward_is_running() else _ROWWISE
    return _BOTH


_BOTH, _ROWWISE, _COLUMNWISE = frozenset(Direction), frozenset({ROWWISE}), frozenset({COLUMNWISE})


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
    cuts = cuts_of(managed)
    for encoding in quantizers[0].encodings.values():
        if not state.parts and encoding.fmt.rotated and encoding.direction is COLUMNWISE and len(set(cuts.bounds)) > 2:
            raise ValueError(
                f"{name}.columnwise is {encoding.fmt}: the rotation mixes rows of different ranks "
                f"({cuts.rows} rows over {managed.world_size}); rotate activations and gradients, not weights"
            )


def all_managed_weights() -> list[ManagedParam]:
    """Every weight that is gathered as codes under any `fully_shard` of the process."""
    return [m for m in torch_compat.all_managed_params() if isinstance(m.local, FSDPHooks)]


@torch.no_grad()
def synchronize(managed: list[ManagedParam]) -> None:
    """Share statistics of all pending weights of the same roots: one MAX all-reduce a shard group, which serves the parts that
    tensor parallelism makes of a weight too where a group of all their ranks exists.

    Every rank must call it with the same weights pending; empty shards take part.
    """
    pending: dict[tuple, list[tuple[FSDPHooks, ManagedParam]]] = {}
    roots = {torch_compat.root_of(m): m for m in managed}
    for m in itertools.chain(*map(torch_compat.managed_params_beside, roots.values())):
        local = m.local
        if isinstance(local, FSDPHooks) and local.state.pending:
            if local.state.gathered is None:
                check_layout(m)
            pending.setdefault(_groups(m, local.state), []).append((local, m))
    for groups, weights in pending.items():
        _share(weights, groups)


@torch.no_grad()
def synchronize_whole(weights: list) -> None:
    """`synchronize` of those weights of which ranks of a tensor-parallel group have parts that no one shards further, nor
    publishes."""
    by_group: dict[tuple, list] = {}
    for weight in weights:
        state = weight.state
        if state.spans_parts and _managed_of(state) is None and state.publisher is None:
            by_group.setdefault((state.tensor_group,), []).append((weight, None))
    for groups, of in by_group.items():
        _share(of, groups)


def _groups(m: ManagedParam, state) -> tuple[dist.ProcessGroup, ...]:
    """What a weight's statistics are reduced over: one group of all ranks that hold any of it, or one for each axis.

    Copies (HSDP) hold the same values, so those of all copies do. No group is made here: ranks that hold other weights, such as
    another stage of a pipeline, are not there to take part.
    """
    shards, parts, world = m.process_group, state.tensor_group, dist.group.WORLD
    if parts is None or not state.spans_parts:
        return (shards,)
    if shards.size() == 1:
        return (parts,)
    if m.registered.device_mesh.size() == world.size() and dist.get_backend(world) == dist.get_backend(shards):
        return (world,)
    return shards, parts


def _share(weights: list[tuple[FSDPHooks, ManagedParam | None]], groups: tuple[dist.ProcessGroup, ...]) -> None:
    """Keep the statistics of weights that ranks of `groups` have other rows or parts of, where those of the last time lie."""
    states = [weight.state for weight, _ in weights]
    lie = [(w.shape, w.device) if m is None else m.identity for w, m in weights]
    seen = [(state.quantizer, state.compute_dtype) for state in states]
    key, sharing = [*groups, *states, *seen, *lie], states[0].sharing
    if sharing is None or sharing.key != key or not sharing.again(weights):
        states[0].sharing = Sharing(key, weights, groups)
    for state in states:
        state.pending = False


class Sharing:
    """Statistics of weights that ranks share over some groups, step after step in the same memory, which captured steps read.

    key:  what it is of.
    """

    def __init__(self, key: list, weights: list[tuple[FSDPHooks, ManagedParam | None]], groups: tuple[dist.ProcessGroup, ...]):
        pieces, self.key, self._shared = list(_pieces(weights)), key, []
        fragments = [_fragment(*piece) for piece in pieces]
        places = [i for i, f in enumerate(fragments) if any(map(f.shares_statistics, f.encodings))]
        self._of_matrices = any(weight.state.parts for weight, _ in weights)  # which are other tensors each time
        self._places, self._devices = places, [pieces[i][-1] for i in places]
        self._crossing, self._groups = [fragments[i] for i in places], groups if places else ()
        for group in self._groups:
            self._shared.append(SharedStatistics(self._crossing, group))
            self._note(self._shared[-1])
        results = self._shared[-1].results if self._shared else []
        self._stats = [dict(zip((e.direction for e in f.encodings), of)) for f, of in zip(self._crossing, results)]
        self._tell([pieces[i][0] for i in places])

    def again(self, weights: list[tuple[FSDPHooks, ManagedParam | None]]) -> bool:
        """Share those of the same weights as they are now; False, before any collective, where they lie otherwise."""
        if self._of_matrices:
            return False
        own = [weights[i][0] for i in self._places]
        for fragment, weight, device in zip(self._crossing, own, self._devices):
            fragment.values, fragment.found = weight.inner.to(device), _found(weight)
        for shared in self._shared:
            if not shared.again(self._crossing, torch_compat.copy_all):
                return False
            self._note(shared)
        self._tell(own)
        return True

    def _note(self, shared: SharedStatistics) -> None:
        counters.add("amax all-reduce", "weights")
        if len(self._groups) > 1:  # what ranks of one have shared, those of the next one start from
            for fragment, own in zip(self._crossing, shared.results):
                fragment.found = tuple(s or t for s, t in zip(own, fragment.found or own))

    def _tell(self, weights: list[FSDPHooks]) -> None:
        for weight, fragment, stats in zip(weights, self._crossing, self._stats):
            weight.state.set_statistics(weight.version, stats)
            fragment.values = None  # a master that is replaced is not held here


def _pieces(weights: list[tuple[FSDPHooks, ManagedParam | None]]) -> Iterator[tuple[FSDPHooks, RowCuts, int, torch.device]]:
    """What this rank holds of each matrix that ranks share statistics of."""
    for weight, m in weights:
        state, device = weight.state, weight.device if m is None else m.device
        cuts, rank = (RowCuts((0, weight.shape[0])), 0) if m is None else (cuts_of(m), m.rank)
        if not state.parts:
            yield weight, cuts, rank, device
        elif state.shares_statistics(cuts):
            yield from ((*piece, device) for piece in state.pieces(weight, cuts, rank))


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
    cuts, rank = (RowCuts((0, weight.shape[0])), 0) if m is None else (cuts_of(m), m.rank)
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


def _fragment(weight, cuts: RowCuts, rank: int, device: torch.device) -> Fragment:
    state = weight.state
    return Fragment(
        weight.inner.to(device), tuple(state.quantizer.encodings.values()), cuts, rank, state.compute_dtype, _found(weight),
        state.part if state.spans_parts else (0, 1),
    )


def _found(weight) -> tuple[Statistics | None, ...] | None:
    """What whoever wrote the values found of this rank's rows on the way, in each encoding; None: nothing."""
    found = weight.state.found(weight)
    return tuple(map(found.get, weight.state.quantizer.encodings)) if found else None

# SPDX-License-Identifier: Apache-2.0
"""FSDP2's extension points on the local tensors of sharded weights, and which directions a gather
moves."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from . import root_statistics, torch_compat
from .gather_group import GatherGroup, GatherPlan
from .gathered_weight import GatheredWeight, cuts_of
from .quantized_tensor import QuantizedTensor
from .torch_compat import ManagedParam
from .weight_state import WeightState, WeightTensor


class PreHook:
    """Returns a weight's all-gather inputs. Every gather inspects its signature, which is cached
    here; the one-parameter form skips a check that only ranks with short shards would fail, which
    would hang the others."""

    __signature__ = inspect.Signature(
        [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    __slots__ = ("_weight",)

    def __init__(self, weight: FSDPHooks):
        self._weight = weakref.ref(weight)  # which may keep its hook

    def __call__(self, mesh: DeviceMesh):
        weight = torch_compat.alive(self._weight)
        gathered = weight.state.gathered
        # the first weight sends its whole group; a gather that failed may have left inputs
        if (
            gathered is None
            or gathered.all_gather_inputs is None
            or gathered.group.members[0] is gathered
        ):
            with torch_compat.outside_inference_mode():
                gathered = _send(weight)
        all_gather_inputs, gathered.all_gather_inputs = gathered.all_gather_inputs, None
        return all_gather_inputs


class PreHookOf:
    """The attribute `fsdp_pre_all_gather` of a weight, which keeps its hook once it is gathered."""

    def __get__(self, weight: FSDPHooks | None, owner: type) -> PreHook | PreHookOf:
        if weight is None:
            return self
        hook = PreHook(weight)
        if weight.state.gathered is not None:
            vars(weight)["fsdp_pre_all_gather"] = hook
        # FSDP2 looks up every weight's hook when its root's first forward begins, before any
        # gather.
        elif root_statistics.is_new_root() and (managed := managed_of(weight.state)) is not None:
            root_statistics.check_model(managed)
        return hook


class FSDPHooks(WeightTensor):
    """The extension points that FSDP2 looks up on a DTensor's local tensor."""

    fsdp_pre_all_gather = PreHookOf()

    def refresh_shard(self, managed: ManagedParam) -> None:
        """Encode codes that the shard holds, if its values were written since."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatherPlan,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedTensor, list[Tensor]] | None:
        gathered = self.state.gathered
        if gathered is None:
            raise RuntimeError(f"{self.state.name}: its recipe changed while FSDP2 gathered it")
        managed = gathered.managed
        if out is None:
            # torch allocates for a weight that was gathered before
            for tensor in managed.inner_buffers:
                torch_compat.alloc_storage(tensor)
        if metadata.members[-1] is gathered:  # nothing reads a group before its last weight
            with torch_compat.preserved_versions([t for inner in metadata.inner for t in inner]):
                metadata.receive()
        if out is None:
            shape = managed.global_shape if gathered.pair.groups else None
            return QuantizedTensor(pair=gathered.pair, shape=shape), managed.inner_buffers


@torch.no_grad()
def _send(weight: FSDPHooks) -> GatheredWeight:
    """Build the all-gather inputs of all weights of a group, when FSDP2 asks for the first
    one's."""
    if weight.state.gathered is None and (managed := managed_of(weight.state)) is not None:
        root_statistics.check_model(managed)
    first = gathered_weight(weight)
    managed, group = first.managed, first.group
    params, registered = managed.group_params()
    local, shard = registered, managed.local
    # FSDP2 copies each offloaded shard to the device when it asks for its inputs
    if managed.is_offloaded and shard is not None and weight.device != shard.device:
        params, registered, local = [managed.param], [shard], [weight]
    begins = managed.in_forward and not torch_compat.backward_is_running()
    # a backward reads the operands that its forward saw
    if group is None or not group.is_of(registered) or (begins and not group.converts_as_read()):
        coded = {i: t for i, t in enumerate(registered) if isinstance(t, FSDPHooks)}
        group = GatherGroup(registered, {i: gathered_weight(t) for i, t in coded.items()})
    root_statistics.before_gather(group.members)
    for member, tensor in zip(group.members, group.ours(registered)):
        if isinstance(tensor, FSDPHooks):
            tensor.refresh_shard(member.managed)
    if begins:
        group.is_checkpointed = torch_compat.checkpoint_hook() is not None
    reads = list(zip(group.recomputed, (begins and m.forward_reads_both for m in group.members)))
    needed = {both: directions_needed(managed, *both) for both in set(reads)}
    group.send(local, params, tuple(needed[both] for both in reads), managed.phase)
    if managed.in_forward and managed.stays_unsharded_after_forward:
        root_statistics.gather_again_in_training(group.members)
    return first


def directions_needed(
    managed: ManagedParam, recomputes: bool, forward_reads_both: bool = False
) -> frozenset[Direction]:
    """Directions that GEMMs read before FSDP2 reshards: both, unless the pass provably needs one.

    recomputes:  the backward recomputes the forward of the weight's module.
    forward_reads_both:  the forward takes gradients.
    """
    if managed.in_pre_backward:
        return _BOTH if recomputes or managed.stays_unsharded_after_backward else _COLUMNWISE
    if managed.in_forward and not managed.stays_unsharded_after_forward:
        needs_both = torch_compat.backward_is_running() or managed.prefetched_after_its_forward
        return _BOTH if needs_both or forward_reads_both else _ROWWISE
    return _BOTH


_BOTH, _ROWWISE, _COLUMNWISE = frozenset(Direction), frozenset({ROWWISE}), frozenset({COLUMNWISE})


def gathered_weight(weight: FSDPHooks) -> GatheredWeight:
    """The unsharded weight, built at its first gather and after each change of recipe.

    Raises ValueError, on every rank, for layouts that cannot be gathered.
    """
    state = weight.state
    managed = managed_of(state)
    if managed is None:
        raise RuntimeError(
            f"{state.name} is gathered, but no fully_shard call of this process manages it"
        )
    if managed is not state.managed:
        state.managed, state.gathered = managed, None
    gathered = state.gathered
    if gathered is None or gathered.dtype != managed.param_dtype:
        for other in torch_compat.managed_params_of_root(managed):
            check_layout(other)
        state.gathered = gathered = GatheredWeight(state, managed)
        managed.reset_gather_buffers()
    return gathered


def check_gathers_codes(
    name: str, weight: DTensor, managed: ManagedParam | None, call: str
) -> None:
    """Raise ValueError for a weight that no `fully_shard` gathers as codes.

    call:  what would leave the codes alone, in the words of an error.
    """
    if managed is None or not isinstance(managed.local, FSDPHooks):
        raise ValueError(
            f"{name} is a DTensor {weight.placements} of which fully_shard gathers no codes: it is "
            f"stored transposed ({call} before fully_shard), cut by tensor parallelism alone "
            f"({call} after fully_shard) or by ExpertParallel"
        )
    check_layout(managed)


def check_layout(managed: ManagedParam) -> None:
    """Raise ValueError for a weight that FSDP2 cannot gather as codes."""
    if not isinstance(managed.local, FSDPHooks):
        return
    state, name = managed.local.state, managed.local.state.name
    quantizers = list(dict.fromkeys(matrix.quantizer for matrix in state.matrices))
    if len(quantizers) > 1:
        raise ValueError(
            f"{name}: its matrices are {quantizers[0]} and {quantizers[1]}, and FSDP2 gathers one "
            "format for all; give the experts one recipe, or build fq.GroupedLinear with "
            "packed=False"
        )
    if managed.reshards_to_smaller_world:
        raise ValueError(
            f"{name}: reshard_after_forward=<int> keeps a part of the unsharded weight, which "
            "codes with scales have no form for; pass True or False to fully_shard"
        )
    if managed.shard_dim != 0:
        raise ValueError(
            f"{name}: sharded along dim {managed.shard_dim}; codes and scales shard along dim 0 "
            "only: leave shard_placement_fn out, or return Shard(0) for this weight"
        )
    cuts = cuts_of(managed)
    for encoding in () if state.packed else quantizers[0].encodings.values():
        if encoding.fmt.rotated and encoding.direction is COLUMNWISE and len(set(cuts.bounds)) > 2:
            raise ValueError(
                f"{name}.columnwise is {encoding.fmt}: the rotation mixes rows of different ranks "
                f"({cuts.rows} rows over {managed.world_size}); rotate activations and gradients, "
                "not weights"
            )
        if encoding.fmt.chooses_by_error and cuts.cut_block_rows(encoding):
            raise ValueError(
                f"{name}.{encoding.direction.value} is {encoding.fmt}, whose scales follow from "
                f"all values of a block, and {cuts.rows} rows over {managed.world_size} ranks cut "
                f"blocks of {encoding.fmt.row_alignment(encoding.direction)} rows; choose rows or "
                "ranks that do not, or four_over_six='off' for this layer"
            )


def managed_states() -> dict[int, tuple[ManagedParam, WeightState]]:
    """Return id of the state of a matrix -> (the weight that FSDP2 manages, the state of all its
    matrices)."""
    return {
        id(matrix): (m, local.state)
        for m in torch_compat.all_managed_params()
        if isinstance(local := m.local, FSDPHooks)
        for matrix in local.state.matrices
    }


def set_formats(
    state: WeightState, plan: Any, managed: Mapping[int, tuple[ManagedParam, WeightState]]
) -> None:
    """Encode a weight as a plan (`linear.plan.GemmPlan`) says from now on.

    managed:  of `managed_states`.
    """
    state.plan, state.compute_dtype = plan, plan.compute_dtype
    state.set_quantizer(plan.weight)
    if id(state) in managed:
        param, owner = managed[id(state)]
        if owner is not state:  # of all matrices
            owner.set_quantizer(None)  # pyright: ignore[reportArgumentType]
        param.reset_gather_buffers()


def managed_of(state: WeightState) -> ManagedParam | None:
    """This weight under `fully_shard`, or None."""

    def is_its(managed: ManagedParam) -> bool:
        local = managed.local
        return isinstance(local, FSDPHooks) and local.state is state

    if state.managed is not None and is_its(state.managed):
        return state.managed
    return next(filter(is_its, torch_compat.all_managed_params()), None)

# SPDX-License-Identifier: Apache-2.0
"""Parameters under `fully_shard`, and the states of FSDP2 that gather them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage as alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param import free_storage as free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from .autograd import backward_is_running, never_compiled

_T = TypeVar("_T")


def alive(reference: weakref.ref[_T]) -> _T:
    """What a weak reference refers to. Raises ReferenceError for a model that is freed."""
    target = reference()
    if target is None:
        raise ReferenceError("the model of this parameter is freed")
    return target


class ManagedParam:
    """One parameter under `fully_shard`, with the group that gathers it and the state that owns the
    group.

    Holds all three weakly: weights keep one of these, autograd and torch keep weights, and a model
    must be freed with its last user. Raises ReferenceError once they are freed.
    """

    def __init__(self, param: FSDPParam, group: FSDPParamGroup, state: FSDPState):
        self._param, self._group = weakref.ref(param), weakref.ref(group)
        self._state = weakref.ref(state)

    @property
    def identity(self) -> object:
        """Equal for the same parameter under the same `fully_shard`."""
        return self._param

    @property
    def param(self) -> FSDPParam:
        return alive(self._param)

    @property
    def group(self) -> FSDPParamGroup:
        return alive(self._group)

    @property
    def state(self) -> FSDPState:
        return alive(self._state)

    @property
    def local(self) -> Tensor | None:
        """The registered sharded local tensor; None once the model is freed, or if something else
        was put in its place."""
        param = self._param()
        return None if param is None else getattr(_sharded(param), "_local_tensor", None)

    @property
    def registered(self) -> DTensor:
        """The sharded parameter that modules register and optimizers hold."""
        return _sharded(self.param)

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """(module, attribute) of every registration; more than one if the parameter is tied."""
        info = self.param._module_info
        return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]

    @property
    def fqn(self) -> str:
        return self.param._param_fqn or self.param._module_info.param_name

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the unsharded parameter (TP-local under tensor parallelism)."""
        return self.param._orig_size

    @property
    def world_size(self) -> int:
        """Ranks that shard it: one under `replicate`."""
        return getattr(self.param.mesh_info, "shard_mesh_size", 1)

    @property
    def rank(self) -> int:
        return getattr(self.param.mesh_info, "shard_mesh_rank", 0)

    @property
    def copies(self) -> int:
        """How many ranks hold the same shard (HSDP, `replicate`)."""
        return getattr(self.param.mesh_info, "replicate_mesh_size", 1)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that shard it; None under `replicate`, where each holds all of it."""
        return getattr(self.param.mesh_info, "shard_process_group", None)

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The mesh of tensor parallelism, in addition to that of the shards; None without."""
        spec = getattr(self.param, "_unsharded_dtensor_spec", None) or getattr(
            self.param, "_tp_spec", None
        )
        return None if spec is None else spec.mesh

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def is_offloaded(self) -> bool:
        """FSDP2 keeps the shard on the CPU and copies it to the device of the gather."""
        return self.param.offload_to_cpu

    @property
    def shard_dim(self) -> int:
        return self.param.fsdp_placement.dim

    @property
    def reduced_shape(self) -> tuple[int, ...]:
        """Shape of the gradient whose dim 0 FSDP2 cuts: pieces of another dim lie one behind the
        other."""
        shape, dim = list(self.global_shape), self.shard_dim
        if dim:
            shape[dim] //= self.world_size
            shape[0] *= self.world_size
        return tuple(shape)

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of a plain gather."""
        return self.group.mp_policy.param_dtype or self.param.sharded_param.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which FSDP2 reduces the gradient."""
        return self.group.mp_policy.reduce_dtype or self.param_dtype

    @property
    def is_sharded(self) -> bool:
        return self.param.sharded_state.name == "SHARDED"

    @property
    def in_forward(self) -> bool:
        return self.group._training_state == TrainingState.FORWARD

    @property
    def in_pre_backward(self) -> bool:
        return self.group._training_state == TrainingState.PRE_BACKWARD

    @property
    def prefetched_after_its_forward(self) -> bool:
        """Another module's forward gathers the parameter, whose own forward has run and whose
        backward may still come. (FSDP2 asks for all-gather inputs under no_grad, which hides
        whether one will.)"""
        is_prefetched = self.state._training_state != TrainingState.FORWARD
        return is_prefetched and bool(self.group._post_forward_indices)

    @property
    def in_forward_of_root(self) -> bool:
        """A forward of the root gathers the parameter: every rank is in the same call and may read
        all weights."""
        shared = self.state._state_ctx
        return (
            self.in_forward
            and bool(shared.all_states)
            and shared.iter_forward_root is shared.all_states[0]
        )

    @property
    def phase(self) -> str:
        """The pass that gathers: "forward", "backward", or "manual" (an explicit unshard)."""
        return "forward" if self.in_forward else "backward" if self.in_pre_backward else "manual"

    @property
    def reshards_by_default(self) -> bool:
        """`reshard_after_forward` was not given: a root then stays unsharded after forward."""
        return bool(self.state._auto_reshard_after_forward)

    @property
    def stays_unsharded_after_forward(self) -> bool:
        return not self.group._reshard_after_forward

    @property
    def stays_unsharded_after_backward(self) -> bool:
        return not self.group.reshard_after_backward

    @property
    def reshards_to_smaller_world(self) -> bool:
        """`reshard_after_forward=<int>`."""
        return self.group._use_post_forward_mesh

    def pads(self, shape: torch.Size, size: torch.Size) -> bool:
        """FSDP2 moves a short shard of `shape` into memory of `size`."""
        return shape != size == self.param.padded_sharded_param_size

    def reshard(self) -> None:
        """Reshard the group between two forwards."""
        # FSDP2 does not reshard a group in its forward, where an exception leaves it.
        self.group._training_state = TrainingState.IDLE
        for module in self.group.modules:
            if isinstance(module, FSDPModule):
                module.reshard()

    def group_params(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """The parameters of the group in the order of their hooks, and their local tensors."""
        params = self.group.fsdp_params
        return params, [_sharded(p)._local_tensor for p in params]

    @property
    def inner_buffers(self) -> list[Tensor]:
        """Buffers, besides the all-gather outputs, that the next reshard frees."""
        return self.param._unsharded_inner_tensors

    def reset_gather_buffers(self) -> None:
        """Drop the unsharded parameter and its buffers, so that the next gather builds new ones.
        Call it in sharded state."""
        set_gather_buffers([self.param], [[]], [[]])
        if hasattr(self.param, "_unsharded_param"):
            del self.param._unsharded_param

    def replace_local(self, local: Tensor) -> None:
        """Replace the local tensor of the registered DTensor parameter by one with extension
        points, which FSDP2 looks up in its lazy init alone."""
        self.registered._local_tensor = local
        self.param._sharded_param_data = local.view(-1)
        self.param.reset_sharded_param()  # pads and pins
        self.param._init_extensions()


def set_gather_buffers(
    params: Sequence[FSDPParam], outputs: Sequence[list[Tensor]], inner: Sequence[list[Tensor]]
) -> None:
    """Set, per parameter, the buffers that the next gather fills and those that the next reshard
    frees besides."""
    for param, outs, others in zip(params, outputs, inner):
        param.all_gather_outputs, param._unsharded_inner_tensors = outs, others.copy()


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of a state: one in torch 2.11, a list since."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def _sharded(param: FSDPParam) -> DTensor:
    return param.sharded_param  # pyright: ignore[reportReturnType]  (torch says nn.Parameter)


def _params_of(states: Iterable[FSDPState]) -> Iterator[ManagedParam]:
    for state in states:
        for group in param_groups(state):
            for param in group.fsdp_params:
                yield ManagedParam(param, group, state)


def fsdp_states() -> list[FSDPState]:
    """Every live FSDP state of the process once, in the order of the `fully_shard` calls."""
    states = (ref() for ref in _module_state_mapping.values())
    return list(dict.fromkeys(s for s in states if isinstance(s, FSDPState)))


def all_managed_params() -> Iterator[ManagedParam]:
    """Every parameter under any `fully_shard` of the process."""
    return _params_of(fsdp_states())


def is_managed(parameter: Tensor) -> bool:
    """The tensor is the registered parameter, sharded or not, of any `fully_shard`."""
    return type(parameter) is not Tensor and any(
        parameter is m.registered or parameter is getattr(m.param, "_unsharded_param", None)
        for m in all_managed_params()
    )


def reshard(model: nn.Module) -> set[int]:
    """Reshard the parameters of a model, whose root an evaluation leaves gathered. Returns the ids
    of those that stay gathered, as an FSDP module around the model owns them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {id(m.param._unsharded_param) for m in all_managed_params() if not m.is_sharded}


def is_unsharded_parameter(t: Tensor) -> bool:
    """t is in memory that FSDP2 frees at the next reshard and fills again."""
    memory = t.untyped_storage().data_ptr()
    return any(
        memory == out.untyped_storage().data_ptr()
        for state in fsdp_states()
        for group in param_groups(state)
        if group.is_unsharded
        for param in group.fsdp_params
        for out in param.all_gather_outputs
    )


def root_of(managed: ManagedParam) -> object:
    """An object that all parameters of one root share."""
    return managed.state._state_ctx


def root_module(managed: ManagedParam) -> nn.Module | None:
    """The module that `fully_shard` found to be the root; None before its first forward."""
    states = managed.state._state_ctx.all_states
    return states[0]._modules[0] if states else None


def begins_first_forward(managed: ManagedParam) -> bool:
    """FSDP2 sets up its root, as the root's first forward begins."""
    shared = managed.state._state_ctx
    in_forward = shared.all_states[0]._training_state == TrainingState.FORWARD
    return in_forward and shared.iter_forward_root is None


def watch_forwards(managed: ManagedParam, begin: Callable[[nn.Module, bool, tuple], None]) -> None:
    """Call `begin` with (module, it is the root, arguments) before each forward of the root, and of
    a part of it that is called by itself: in calls and in methods of
    `register_fsdp_forward_method`. A pass that raised midway is ended first.

    FSDP2 looks both functions up on the state, but for a call's `_pre_forward`.
    """

    def watch(state: FSDPState, is_root: bool) -> None:
        reference = weakref.ref(state)  # so that a model is freed with its last user

        @never_compiled
        def _root_pre_forward(module: nn.Module, args: tuple, kwargs: dict):
            state = alive(reference)
            state._lazy_init()
            if state._state_ctx.iter_forward_root is None:
                begin(module, is_root, args)
            return type(state)._root_pre_forward(state, module, args, kwargs)

        @never_compiled
        def _pre_forward(module: nn.Module, args: tuple, kwargs: dict):
            end_failed_pass(module)
            return type(alive(reference))._pre_forward(alive(reference), module, args, kwargs)

        setattr(state, "_root_pre_forward", _root_pre_forward)
        setattr(state, "_pre_forward", _pre_forward)

    states = managed.state._state_ctx.all_states
    for state in states:
        watch(state, state is states[0])
    states[0]._modules[0].register_forward_pre_hook(
        lambda module, args: end_failed_pass(module), prepend=True
    )


# of calls of a module that FSDP2 manages
_CALLS = {
    nn.Module._call_impl.__code__,
    *(c for c in register_fsdp_forward_method.__code__.co_consts if isinstance(c, CodeType)),
}


def _is_called_inside_itself(module: nn.Module) -> bool:
    """A forward of the module calls another one, or a method."""
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code in _CALLS and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def end_failed_pass(root: nn.Module) -> None:
    """Reset FSDP2 for another forward of `root` if a pass before it raised midway.

    As `FSDPModule.reset_iter_state` (torch 2.13), but unreduced gradients of a failed backward are
    dropped, which torch adds to the next ones, and those of the micro-batches before a failed
    forward stay.
    """
    state = _get_module_state(root)
    if not isinstance(state, FSDPState):
        return
    shared, comm = state._state_ctx, state._comm_ctx
    is_backward = shared.post_backward_final_callback_queued
    is_forward = shared.iter_forward_root is state or (
        state._is_root and shared.iter_forward_root is not None
    )
    if backward_is_running() or not (is_backward or is_forward) or _is_called_inside_itself(root):
        return
    for member in shared.all_states:
        member._training_state = TrainingState.IDLE
        member._modules_to_run_forward.clear()
        for group in param_groups(member):
            group.finalize_backward()  # waits for its collectives
            group._training_state = TrainingState.IDLE
            for param in group.fsdp_params:
                param.to_sharded()  # also if an unshard was about to begin
                if is_backward:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
            group._sharded_state = ShardedState.SHARDED
            if is_backward:
                group._partial_reduce_output = None
            if comm.all_gather_state is not None:
                group._wait_all_gather_streams_on_event(comm.all_gather_state.event)
                comm.all_gather_state = None
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:  # torch 2.11
        setattr(comm, "reduce_scatter_state", None)
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False


def roots() -> Iterator[object]:
    """`root_of` of every root that has begun its first forward."""
    return (state._state_ctx for state in fsdp_states() if state._is_root)


def managed_params_of_root(managed: ManagedParam) -> list[ManagedParam]:
    """The parameters of the same root, in the root's module order: the same list on every rank.

    Before the root's first forward: those of the parameter's own state.
    """
    shared = managed.state._state_ctx
    if not shared.all_states:
        return list(_params_of([managed.state]))
    cached = _OF_ROOT.get(shared)
    if cached is None or cached[0] != len(shared.all_states):
        cached = _OF_ROOT[shared] = len(shared.all_states), list(_params_of(shared.all_states))
    return cached[1]


# Context of a root's states -> (their number, all their parameters). Both are final once the root
# has run.
_OF_ROOT: weakref.WeakKeyDictionary[object, tuple[int, list[ManagedParam]]] = (
    weakref.WeakKeyDictionary()
)


def managed_params_of(model: nn.Module) -> list[ManagedParam]:
    """The parameters of the `fully_shard` calls on `model` and its submodules, in module order."""
    return list(_params_of(_states_of(model)))


def _states_of(model: nn.Module) -> list[FSDPState]:
    states = (_get_module_state(module) for module in model.modules())
    return list(dict.fromkeys(s for s in states if isinstance(s, FSDPState)))


def parts_gathered_late(model: nn.Module) -> int:
    """How many parts `fully_shard` gathers, if no forward gathers another part ahead; else 0."""
    states = _states_of(model)
    return 0 if any(s._states_to_forward_prefetch for s in states) else len(states)


def outermost_states(model: nn.Module) -> Iterator[FSDPState]:
    """States of the outermost `fully_shard` calls in `model`: FSDP2's roots, once a forward has
    run."""
    state = _get_module_state(model)
    if isinstance(state, FSDPState):
        yield state
        return
    for child in model.children():
        yield from outermost_states(child)

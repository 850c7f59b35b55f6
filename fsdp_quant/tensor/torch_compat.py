# SPDX-License-Identifier: Apache-2.0
"""Every private torch name that the library uses, in one place, for torch 2.11 and later."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch import pyfunctorch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,
    ShardedState,
    alloc_storage,
    free_storage,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "alloc_storage",
    "foreach_add_",
    "foreach_copy_",
    "foreach_zero_",
    "free_storage",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
]

foreach_add_ = torch._foreach_add_
_proxies_of = getattr(proxy_tensor, "_get_proxies", lambda tensor: ())
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_


class ManagedParam:
    """One parameter under `fully_shard`, with the group it is gathered in and the state that owns
    the group.

    All held weakly: weights keep one, autograd and torch keep weights, and a model must go when its
    user lets it go.
    """

    def __init__(self, param: FSDPParam, group: FSDPParamGroup, state: FSDPState):
        self._param, self._group, self._state = map(weakref.ref, (param, group, state))

    @property
    def identity(self) -> object:
        """Equal for the same parameter under the same `fully_shard`."""
        return self._param

    @property
    def param(self) -> FSDPParam:
        return self._param()

    @property
    def group(self) -> FSDPParamGroup:
        return self._group()

    @property
    def state(self) -> FSDPState:
        return self._state()

    @property
    def local(self) -> Tensor | None:
        """The sharded local tensor that is registered now; None where the model is gone."""
        param = self._param()
        return None if param is None else param.sharded_param._local_tensor

    @property
    def registered(self) -> DTensor:
        """The sharded parameter that modules register and optimizers hold."""
        return self.param.sharded_param

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """(module, attribute) of every place that the parameter is registered at; more than one
        where it is tied."""
        info = self.param._module_info
        shared = zip(info.shared_modules, info.shared_param_names)
        return [(info.module, info.param_name), *shared]

    @property
    def fqn(self) -> str:
        return self.param._param_fqn or self.param._module_info.param_name

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the unsharded parameter (TP-local under tensor parallelism)."""
        return self.param._orig_size

    @property
    def world_size(self) -> int:
        return self.param.mesh_info.shard_mesh_size

    @property
    def rank(self) -> int:
        return self.param.mesh_info.shard_mesh_rank

    @property
    def copies(self) -> int:
        """How many ranks hold the same shard (HSDP)."""
        return getattr(self.param.mesh_info, "replicate_mesh_size", 1)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.param.mesh_info.shard_process_group

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """What tensor parallelism cuts the parameter over, beside the shards; None where it does
        not."""
        spec = getattr(self.param, "_unsharded_dtensor_spec", None) or getattr(
            self.param, "_tp_spec", None
        )
        return None if spec is None else spec.mesh

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def is_offloaded(self) -> bool:
        """The shard lies on a CPU, and is brought to where FSDP2 computes."""
        return self.param.offload_to_cpu

    @property
    def shard_dim(self) -> int:
        return self.param.fsdp_placement.dim

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype that a plain gather would send."""
        return self.group.mp_policy.param_dtype or self.param.sharded_param.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which FSDP2 reduces its gradient."""
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
        backward may be to come.

        FSDP2 asks for all-gather inputs under no_grad, so whether gradients are recorded cannot be
        seen here.
        """
        is_prefetched = self.state._training_state != TrainingState.FORWARD
        return is_prefetched and bool(self.group._post_forward_indices)

    @property
    def in_forward_of_root(self) -> bool:
        """A forward of the root gathers the parameter: every rank is in the same call, and all its
        weights may be read."""
        shared = self.state._state_ctx
        return (
            self.in_forward
            and bool(shared.all_states)
            and shared.iter_forward_root is shared.all_states[0]
        )

    @property
    def phase(self) -> str:
        """Which pass gathers now: "forward", "backward", or "manual" (an explicit unshard)."""
        return "forward" if self.in_forward else "backward" if self.in_pre_backward else "manual"

    @property
    def reshards_by_default(self) -> bool:
        """`fully_shard` was left to decide: a root then stays unsharded after forward."""
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

    def reshard_before_training(self) -> None:
        """Free what this forward leaves gathered, before the next forward of its FSDP module in
        training mode."""

        @torch.compiler.disable
        def reshard(module: nn.Module, args: tuple) -> None:
            if module.training:
                for handle in handles:
                    handle.remove()
                # FSDP2 reshards no group that is in its forward, as one that ended with an
                # exception is to it.
                self.group._training_state = TrainingState.IDLE
                module.reshard()

        handles = [
            module.register_forward_pre_hook(reshard, prepend=True) for module in self.group.modules
        ]

    def gathered_together(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """The parameters that are gathered together, in the order of their hooks, and their local
        tensors."""
        params = self.group.fsdp_params
        return params, [p.sharded_param._local_tensor for p in params]

    @property
    def inner_buffers(self) -> list[Tensor]:
        """The buffers besides NCCL's that the next reshard frees."""
        return self.param._unsharded_inner_tensors

    def reset_gather_buffers(self) -> None:
        """Forget the unsharded parameter and its buffers; the next gather builds them anew. Sharded
        state only."""
        set_gather_buffers([self.param], [[]], [[]])
        if hasattr(self.param, "_unsharded_param"):
            del self.param._unsharded_param

    def replace_local(self, local: Tensor) -> None:
        """Put another local tensor of the same shard under the registered DTensor parameter, hooks
        and all."""
        self.param.sharded_param._local_tensor = local
        padded = self.param.padded_sharded_param_size
        flat = local
        if local.shape != padded:
            flat = local.new_zeros(padded)
            if local.shape[0]:
                flat.narrow(0, 0, local.shape[0]).copy_(local)
            self.param.sharded_param._local_tensor = flat.narrow(0, 0, local.shape[0])
        self.param._sharded_param_data = flat.view(-1)
        self.param._init_extensions()
        self.reset_gather_buffers()


def preserved_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager:
    """Writes of these tensors inside are not counted: graphs save gathered buffers, which are freed
    and filled again."""
    counted = tuple(t for t in tensors if not t.is_inference())
    return (
        torch.autograd._unsafe_preserve_version_counter(counted)
        if counted
        else contextlib.nullcontext()
    )


def outside_inference_mode() -> contextlib.AbstractContextManager:
    """Tensors made inside have version counters, as views of parameters need; gradients are
    recorded as outside."""
    return (
        _out_of_inference_mode() if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    )


@contextlib.contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def set_gather_buffers(
    params: Sequence[FSDPParam], outputs: Sequence[list[Tensor]], inner: Sequence[list[Tensor]]
) -> None:
    """Which persistent buffers the next gather fills, of each parameter, and which others the next
    reshard frees."""
    for param, filled, others in zip(params, outputs, inner):
        param.all_gather_outputs, param._unsharded_inner_tensors = filled, others.copy()


def by_dtype(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(targets, sources) of (target, source) pairs that one launch copies."""
    alike: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = alike.setdefault((target.dtype, source.device), ([], []))
        targets.append(target)
        sources.append(source)
    return list(alike.values())


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """target.copy_(source) of every (target, source), in a launch for each dtype."""
    for targets, sources in by_dtype(pairs):
        foreach_copy_(targets, sources)


def numbered(device: torch.device | str) -> torch.device:
    """The device that a tensor is on that was made on `device`: "cuda" is one of several."""
    device = torch.device(device)
    return (
        device
        if device.type in ("cpu", "meta") or device.index is not None
        else torch.empty(0, device=device).device
    )


# What torch.compile, checkpoint_wrapper, FSDP1 and PEFT put into the path of a module that they
# wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_AROUND = (("module",), ("base_model", "model"))  # DDP, PEFT: before the path


def in_state_dict(name: str) -> str:
    """The name that `get_model_state_dict` gives what is called `name` inside wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Each name -> the module's in the model without wrappers around it or its parts; itself, where
    two would be one."""
    names, found = list(names), {}
    for name in names:
        parts = [part for part in in_state_dict(name).split(".") if part != "base_layer"]
        while around := next((a for a in _AROUND if tuple(parts[: len(a)]) == a), None):
            parts = parts[len(around) :]
        found[name] = ".".join(parts)
    return found if len(set(found.values())) == len(names) else {name: name for name in names}


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the collectives of a group take tensors from: the CPU, where it is one of several."""
    types = [device.type for device in getattr(group, "_device_types", ())]
    return torch.device("cpu" if not types or "cpu" in types else types[0])


def all_gather(
    out: Tensor, segment: Tensor, group: dist.ProcessGroup | None, async_op: bool = False
):
    """Fill out [ranks * n] with the segments [n] of all ranks; the work, if async_op."""
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, segment, group=group, async_op=async_op)


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of a state: one in torch 2.11, a list since."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def _params_of(states) -> Iterator[ManagedParam]:
    for state in states:
        for group in param_groups(state):
            for param in group.fsdp_params:
                yield ManagedParam(param, group, state)


def fsdp_states() -> list[FSDPState]:
    """Every live FSDP state of the process, each once, in the order of the `fully_shard` calls."""
    states = (ref() for ref in _module_state_mapping.values())
    return list(dict.fromkeys(s for s in states if isinstance(s, FSDPState)))


def all_managed_params() -> Iterator[ManagedParam]:
    """Every parameter under any `fully_shard` of the process."""
    return _params_of(fsdp_states())


def is_managed(parameter: Tensor) -> bool:
    """A parameter under any `fully_shard`, as modules register it now."""
    return any(
        parameter is m.registered or parameter is getattr(m.param, "_unsharded_param", None)
        for m in all_managed_params()
    )


def is_unsharded_parameter(t: Tensor) -> bool:
    """t lies in memory that FSDP2 frees at the next reshard and fills again."""
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
    """The same object for all parameters of one root."""
    return managed.state._state_ctx


def root_module(managed: ManagedParam) -> nn.Module | None:
    """The module that `fully_shard` found to be the root; None before its first forward."""
    states = managed.state._state_ctx.all_states
    return states[0]._modules[0] if states else None


def end_failed_pass(root: nn.Module) -> None:
    """Make FSDP2 ready for another forward of `root` where a pass before it raised, and left it in
    the middle.

    As `FSDPModule.reset_iter_state` (torch 2.13), but gradients of a failed backward that were not
    reduced are dropped, which torch keeps and adds to the next ones, and those of the micro-batches
    before a failed forward stay.
    """
    state = root._get_fsdp_state()
    shared, comm = state._state_ctx, state._comm_ctx
    is_backward = shared.post_backward_final_callback_queued
    if not is_backward and shared.iter_forward_root is None:
        return
    for one in shared.all_states:
        one._training_state = TrainingState.IDLE
        one._modules_to_run_forward.clear()
        for group in param_groups(one):
            group.finalize_backward()  # waits for what is under way
            group._training_state = TrainingState.IDLE
            for param in group.fsdp_params:
                param.to_sharded()  # also where the group was about to be unsharded
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
        comm.reduce_scatter_state = None
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False


def roots() -> Iterator[object]:
    """`root_of` the parameters of every root that has begun its first forward."""
    return (state._state_ctx for state in fsdp_states() if state._is_root)


def managed_params_beside(managed: ManagedParam) -> list[ManagedParam]:
    """The parameters of the same root, in the root's module order: the same list on every rank.

    Before the root's first forward there is no root yet, and the list is that of the parameter's
    own state.
    """
    shared = managed.state._state_ctx
    if not shared.all_states:
        return list(_params_of([managed.state]))
    found = _OF_ROOT.get(shared)
    if found is None or found[0] != len(shared.all_states):
        found = _OF_ROOT[shared] = len(shared.all_states), list(_params_of(shared.all_states))
    return found[1]


# What the states of a root share -> (how many they are, all their parameters): neither changes once
# a root has run.
_OF_ROOT: weakref.WeakKeyDictionary[object, tuple[int, list[ManagedParam]]] = (
    weakref.WeakKeyDictionary()
)


def managed_params_of(model: nn.Module) -> list[ManagedParam]:
    """The parameters of the `fully_shard` calls on `model` and its submodules, in module order."""
    by_module = {m: ref() for m, ref in list(_module_state_mapping.items())}
    states = [s for m in model.modules() if isinstance(s := by_module.get(m), FSDPState)]
    return list(_params_of(dict.fromkeys(states)))


def outermost_states(model: nn.Module) -> Iterator[FSDPState]:
    """States of the `fully_shard` calls in `model` that no other one of `model` contains: FSDP2's
    roots, once a forward has run."""
    state = next((ref() for m, ref in list(_module_state_mapping.items()) if m is model), None)
    if isinstance(state, FSDPState):
        yield state
        return
    for child in model.children():
        yield from outermost_states(child)


def backward_number() -> int:
    """Another one in each run of the autograd engine; -1 outside."""
    return torch._C._current_graph_task_id()


def backward_is_running() -> bool:
    """Inside the autograd engine: a forward here is an activation being recomputed."""
    return backward_number() != -1


def hand_down(name: str, value: object) -> None:
    """Let backwards that this thread calls read `value` in the threads of the autograd engine too
    (`inherited`)."""
    if _STASH_STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(f"fsdp_quant {name}", value)


def _stash_steals() -> bool:
    """torch up to 2.11 takes no reference to what it stashes, and gives one back when the value is
    replaced."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("fsdp_quant probe", probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


_STASH_STEALS = _stash_steals()


def inherited(name: str, default: object) -> object:
    """What the thread that called the running backward had handed down."""
    key = f"fsdp_quant {name}"
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else default


def stream_of(device: torch.device) -> tuple[int, bool]:
    """The current stream of a CUDA device, and whether it captures a graph."""
    return torch._C._cuda_getCurrentRawStream(
        device.index
    ), torch.cuda.is_current_stream_capturing()


def is_captured(x: Tensor) -> bool:
    """What is done to x now is recorded in a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """bf16 a[rows of e] b[e]; of matrices a[:, depth of e] b[depth of e]. Group e ends at
    ends[e]."""
    return torch._grouped_mm(a, b, offs=ends)


def dispatch_is_watched() -> bool:
    """Operators are seen by a dispatch mode (fake tensors, tracing, selective checkpointing, a
    counter) or by torch.func."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def save_by_reference(tensors: Sequence[Tensor]) -> None:
    """Of inputs of a graph that is being traced: where its backward needs one, it is the tensor
    itself, as a ctx attribute of an autograd.Function is. torch compares no version of it, and
    users' saved-tensor hooks do not see it.

    A torch without this compares versions, and its hooks may copy.
    """
    for tensor in tensors:
        for proxy in _proxies_of(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


# Recomputed from the input (the step it counts, factors it rolls) it would be the value of the next
# step. "recompute" in a node's meta is heeded for what is neither a view nor an item of a tuple.
def save_what_is_made(tensors: Sequence[Tensor]) -> None:
    """Of inputs of a graph that is being traced, which it writes at its end: what it has made of
    them up to here is saved for its backward, and never made again of the input."""
    for tensor in tensors:
        if isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)
        for proxy in _proxies_of(tensor):
            node = proxy.node
            # compilers drop copies, and save no item of a tuple
            while (source := _COPIED.get(node.target)) is not None:
                node = node.args[source]
            if node.op != "placeholder":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


# Operators whose result is as one of their arguments, and which.
_COPIED = {torch.ops.aten.copy.default: 1, torch.ops.aten.unbind.int: 0, operator.getitem: 0}


def keeps_its_address(tensors: Sequence[Tensor]) -> None:
    """What `torch._dynamo.mark_static_address(guard=False)` does, without importing dynamo: a CUDA
    graph of a compiled region reads and writes these where they are."""
    for tensor in tensors:
        tensor._dynamo_static_input_type = "unguarded"


def is_recomputed_in_graph() -> bool:
    """The backward of the graph that is being traced may run this again: inside
    torch.utils.checkpoint, and where the partitioner has a budget of memory."""
    if functorch_config.activation_memory_budget < 1:
        return True
    return (
        fx_traceback.has_preserved_node_meta()
        and fx_traceback.get_current_meta().get("recompute") is not None
    )


def is_fake() -> bool:
    """Operators run on shapes alone (`FakeTensorMode`)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def outside_transforms() -> contextlib.AbstractContextManager:
    """Operators run as they are, not as torch.func transforms them, which refuses writes to what
    the library keeps."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return (
        pyfunctorch.temporarily_clear_interpreter_stack()
        if is_transformed
        else contextlib.nullcontext()
    )


def has_hooks(module: nn.Module) -> bool:
    """Someone looks at the inputs, outputs or gradients of this module, or of all."""
    every = torch.nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


def around_calls(
    module: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call `before` and `after` around each call of a module, outside of what `module.compile()`
    made of it. Returns what ends that.

    `after` runs also where the call raises.
    """
    if (compiled := module._compiled_call_impl) is None:
        handles = [
            module.register_forward_pre_hook(lambda *_: before()),
            module.register_forward_hook(lambda *_: after(), always_call=True),
        ]
        return lambda: [handle.remove() for handle in handles]

    def call(*args, **kwargs):
        before()
        try:
            return compiled(*args, **kwargs)
        finally:
            after()

    module._compiled_call_impl = call
    return lambda: setattr(module, "_compiled_call_impl", compiled)


def multi_head_attention_over(linear: Callable[..., Tensor]) -> Callable:
    """torch.nn.functional.multi_head_attention_forward, whose projections are products by
    `linear(x, weight, bias)`."""
    own = {k: v for k, v in vars(F).items() if k != "__name__"} | {"linear": linear}
    for name in ("_in_projection_packed", "multi_head_attention_forward"):
        function = getattr(F, name)
        made = types.FunctionType(
            function.__code__, own, name, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        own[name] = made
    return made


def checkpoint_hook() -> object | None:
    """The saved-tensor hook of the non-reentrant `torch.utils.checkpoint` that will recompute what
    runs now, or None.

    It is on top of the stack; offloading and `save_on_cpu` put hooks of other modules there.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        hooks[0]
        if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        else None
    )


def plain_alias(tensor: Tensor) -> Tensor:
    """A plain tensor over the memory of a subclass, with its version counter."""
    with torch._C._DisableTorchDispatch():
        return torch._C.TensorBase.detach(tensor)


def alias_with_own_storage(tensor: Tensor) -> Tensor:
    """A plain tensor over the memory of another one, which keeps the memory, with another storage
    object."""
    alias = plain_alias(tensor)
    if alias.device.type == "meta":
        return alias
    memory = alias.untyped_storage()
    own = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), alias.device, memory.nbytes()
    )
    with torch._C._DisableTorchDispatch():  # a compiler asks under its fake tensors' mode
        return alias.new_empty(0).set_(own, alias.storage_offset(), alias.shape, alias.stride())


def dtensor_like(spec_of: DTensor, local: Tensor, shape: Sequence[int] | None = None) -> DTensor:
    """A DTensor with the mesh and placements of `spec_of` over another local tensor, in the dtype
    of that.

    shape:  of the whole tensor; None: that of `spec_of`.
    """
    spec, meta = spec_of._spec, spec_of._spec.tensor_meta
    if shape is not None:
        meta = TensorMeta(
            torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype
        )
    if meta.dtype is not local.dtype or shape is not None:
        spec = DTensorSpec(spec.mesh, spec.placements, meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def replace_local(tensor: DTensor, local: Tensor) -> None:
    """Put another local tensor of the same values under a DTensor, for everyone who holds it."""
    tensor._local_tensor = local


def swap_parameter(old: nn.Parameter, new: nn.Parameter) -> None:
    """Make `old` be `new` for everyone who holds it; gradient, attributes and hooks of `old` stay
    with it."""
    new.__dict__.update(old.__dict__)
    new.grad = old.grad
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    torch.utils.swap_tensors(old, new)


def all_gather_rows(
    buffers: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start filling each (received, sent) with `sent` of every rank, one after the other; in one
    launch where NCCL runs."""
    if (
        len(buffers) > 1
        and group.__class__ is dist.ProcessGroup
        and dist.get_backend(group) == "nccl"
    ):
        options = AllgatherOptions()
        options.asyncOp = True
        name = (
            "all_gather_single"
            if hasattr(group, "all_gather_single_coalesced")
            else "allgather_into_tensor"
        )
        return [getattr(group, f"{name}_coalesced")(*map(list, zip(*buffers)), options)]
    return [all_gather(received, sent, group, async_op=True) for received, sent in buffers]


def reduce_scatter_rows(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start filling `received` with this rank's piece of the sum of `sent` over the ranks."""
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    return getattr(dist, name)(received, sent, group=group, async_op=True)


# Collectives that a graph holds: functional operators #


def is_named(group: dist.ProcessGroup | None) -> bool:
    """Graphs find the group by its name: it is one of torch's, not a stand-in of a trainer's."""
    return group is not None and group in dist.distributed_c10d._world.pg_group_ranks


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group that has this `group_name`."""
    return dist.distributed_c10d._resolve_process_group(name)


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """op ("sum", "max") of x over the ranks."""
    return wait(torch.ops._c10d_functional.all_reduce(x, op, group.group_name))


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [n] of every rank, [ranks * n]; not to be read before `wait`."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece [n] of the sum of x [ranks * n] over the ranks; not to be read before
    `wait`."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(
        x, "sum", group.size(), group.group_name
    )


# The partitioner never recomputes a collective that the forward needs, but it moves one of the
# backward that depends on no gradient into the forward, saves what arrived, and cannot delete the
# collective that it left behind, since `wait_tensor` has side effects: two gathers. A cat with an
# empty slice of the gradient does not hold it, because inductor drops empty inputs. Where both
# sides of the cut are alike it took a gathered weight's decode scale in the forward, before FSDP2
# had gathered it.
@contextlib.contextmanager
def kept_in_backward(backward: bool = True) -> Iterator[None]:
    """Operators that are traced inside stay in the backward of the graph, also where they depend on
    no gradient."""
    if not (backward and fx_traceback.has_preserved_node_meta()):
        yield
        return
    meta, key = fx_traceback.current_meta, "partitioner_tag"
    before, meta[key] = meta.get(key), "must_be_in_backward"
    try:
        yield
    finally:
        meta[key] = before


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x in another shape, and no view of it: what a Function returns is written in place by
    users."""
    return torch.ops.aten._unsafe_view(x, list(shape))


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)

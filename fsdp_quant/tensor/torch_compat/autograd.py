# SPDX-License-Identifier: Apache-2.0
"""The autograd engine, dispatch modes and torch.func, as they are while the library's code runs."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch._functorch import pyfunctorch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from ...ops import opaque

_F = TypeVar("_F", bound=Callable)
_T = TypeVar("_T")


def never_compiled(fn: _F) -> _F:
    """`torch.compiler.disable` that keeps the function's type."""
    return torch.compiler.disable(fn)  # pyright: ignore[reportReturnType]  (torch has no types)


def preserved_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager:
    """Do not count writes of these tensors inside: graphs save gathered buffers, which FSDP2 frees
    and fills again."""
    counted = tuple(t for t in tensors if not t.is_inference())
    return _unsafe_preserve_version_counter(counted) if counted else contextlib.nullcontext()


def outside_inference_mode() -> contextlib.AbstractContextManager:
    """Leave inference mode, so that new tensors have version counters, as views of parameters need;
    grad mode is unchanged."""
    return (
        _out_of_inference_mode() if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    )


@contextlib.contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def backward_number() -> int:
    """A number per run of the autograd engine; -1 outside."""
    return torch._C._current_graph_task_id()


def hold_in_backward(value: object) -> None:
    """Keep `value` alive until the running backward ends or fails."""
    torch.autograd.Variable._execution_engine.queue_callback(lambda: value)  # pyright: ignore


def backward_is_running() -> bool:
    """Inside the autograd engine: a forward here is an activation being recomputed."""
    return backward_number() != -1


@opaque.eager_only
def set_for_backward(name: str, value: object) -> None:
    """Let the autograd engine's threads read `value` in backwards that this thread calls
    (`get_in_backward`)."""
    if _STASH_STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(f"fsdp_quant {name}", value)


def _stash_steals() -> bool:
    """torch up to 2.11 adds no reference to a stashed object but drops one when it is replaced."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("fsdp_quant probe", probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


_STASH_STEALS = _stash_steals()


def get_in_backward(name: str, default: _T) -> _T:
    """The value that the thread that called the running backward handed down."""
    key = f"fsdp_quant {name}"
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else default


@opaque.compiled_as(lambda: True)
def dispatch_is_watched() -> bool:
    """Dynamo, a dispatch mode (fake tensors, tracing, selective checkpointing, a counter) or
    torch.func sees operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or is_transformed()


def tracing_if_watched() -> contextlib.AbstractContextManager:
    """Give graphs, and modes that see operators, operators of the reference; a `DispatchMode` of
    ours sees what these consist of."""
    is_ours = isinstance(_get_current_dispatch_mode(), DispatchMode)
    return opaque.tracing(dispatch_is_watched() and not is_ours)


def is_transformed() -> bool:
    """A transform of torch.func runs."""
    return peek_interpreter_stack() is not None


class DispatchMode(TorchDispatchMode):
    """A mode that sees the operators below autograd, and does not import dynamo to be skipped."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_fake() -> bool:
    """Operators compute shapes alone (`FakeTensorMode`)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Leave transforms of torch.func, dispatch modes (fake tensors, tracing), function modes
    (default devices) and inference mode, to create or write what outlives a call."""
    with contextlib.ExitStack() as modes:
        if peek_interpreter_stack() is not None:
            modes.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack() > 0:
            modes.enter_context(_disable_current_modes())
        modes.enter_context(outside_inference_mode())
        modes.enter_context(torch._C.DisableTorchFunction())
        yield


def forward_transform(x: Tensor) -> str | None:
    """The transform that would push tangents, or batches, of x through an operator; None: none."""
    for interpreter in get_interpreter_stack() or ():
        if interpreter.key() in (TransformType.Jvp, TransformType.Vmap):
            return f"torch.func.{interpreter.key().name.lower()}"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "forward-mode differentiation"
    return None


@opaque.eager_only
def running_function() -> BackwardCFunction | None:
    """Return the context of the autograd.Function whose forward is running and whose backward may
    follow: of a reentrant checkpoint, or another that will compute the gradients of what runs in
    it."""
    if (
        torch.is_grad_enabled()
        or torch._C._is_fwd_grad_enabled()  # only a Function's forward disables it
        or torch.is_inference_mode_enabled()
    ):
        return None
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            # it has no edges if gradients are disabled around it
            if isinstance(ctx, BackwardCFunction) and ctx.next_functions:
                return ctx
        frame = frame.f_back
    return None


def backward_may_follow(module: nn.Module, args: tuple) -> bool:
    """A backward may follow the forward of `module` that begins with these arguments."""
    if not torch.is_grad_enabled():
        return running_function() is not None
    inputs = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    return inputs or any(p.requires_grad for p in module.parameters())


def checkpoint_hook() -> object | None:
    """The saved-tensor hook of the non-reentrant `torch.utils.checkpoint` that will recompute the
    running code, or None.

    It is on top of the stack, unless offloading or `save_on_cpu` put another there.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        return hooks[0]
    return None


def wrap_recomputed(wrap: Callable[[Callable], Callable]) -> None:
    """Let torch.utils.checkpoint, reentrant or not, run `wrap(fn)` in place of each fn that it
    recomputes; it calls `wrap` where the forward begins. torch offers no hook for it."""
    frame, reentrant = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    frame_init, forward = frame.__init__, reentrant.forward

    def wrapping_init(self, fn, *args, **kwargs):
        frame_init(self, wrap(fn), *args, **kwargs)

    def wrapping_forward(ctx, fn, *args):
        ctx.is_wrapped = True
        return forward(ctx, wrap(fn), *args)

    setattr(frame, "__init__", wrapping_init)
    setattr(reentrant, "forward", staticmethod(wrapping_forward))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of torch.autocast on a device; None outside of it, and on the meta device,
    which it does not know."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> torch.autocast:
    """Leave torch.autocast of a device."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


@opaque.compiled_as(lambda function, *args: function.apply(*args))
def applied(function: type[torch.autograd.Function], *args) -> Any:
    """`function.apply(*args)`, of one with `setup_context`. In each call torch binds the signature
    of the forward, which must have no defaults, and creates a node also without gradients."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return function.forward(*args)
    return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(args))  # pyright: ignore


class _OnceDifferentiable(torch.autograd.Function):
    """The results of a function without a derivative."""

    @staticmethod
    def forward(fn, refusal, *tensors):
        return fn(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.refusal = inputs[1]

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.refusal)


def once_differentiable(fn: Callable[..., _T], refusal: str, *tensors: Tensor | None) -> _T:
    """Return fn(*tensors) in a backward; its derivative, under create_graph or torch.func, raises
    NotImplementedError(refusal)."""
    if torch.is_grad_enabled():
        return _OnceDifferentiable.apply(fn, refusal, *tensors)
    return fn(*tensors)

# SPDX-License-Identifier: Apache-2.0
"""Modules: names without wrappers, compiled calls, and torch's attention."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_wrapper_subclass,  # noqa: F401
)

# Path components that torch.compile, checkpoint_wrapper and FSDP1 add.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_OF_PEFT = frozenset({"base_layer", "modules_to_save", "original_module"})
_PREFIXES = (("module",), ("base_model", "model"))  # of DDP, PEFT


def in_state_dict(name: str) -> str:
    """The name that `get_model_state_dict` gives to `name`, without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_wrappers(name: str) -> str:
    """The name that a layer had before it was wrapped: by torch, or by PEFT as the base of an
    adapter or as a module that it saves (`lm_head.modules_to_save.default`)."""
    parts, path = in_state_dict(name).split("."), []
    for before, part in zip(["", *parts], parts):
        if part not in _OF_PEFT and before != "modules_to_save":
            path.append(part)
    return ".".join(path)


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Name -> name in the model without wrappers; all unchanged if two would become one."""
    names, plain = list(names), {}
    for name in names:
        path = [part for part in in_state_dict(name).split(".") if part != "base_layer"]
        while prefix := next((p for p in _PREFIXES if tuple(path[: len(p)]) == p), None):
            path = path[len(prefix) :]
        plain[name] = ".".join(path)
    return plain if len(set(plain.values())) == len(names) else {name: name for name in names}


def is_reduced_by_ddp(parameter: Tensor) -> bool:
    """A DDP module's forward runs, whose backward reduces the gradient of the parameter."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and any(p is parameter for p in active._module_parameters)


def has_hooks(module: nn.Module) -> bool:
    """A hook sees the inputs, outputs or gradients of this module, or of all."""
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


def make_fx_leaf(module: nn.Module) -> None:
    """Let torch.fx record calls of a module, as it does of torch's: `Tracer.is_leaf_module`."""
    module.__dict__["__module__"] = "torch.nn"


def remove_state_hooks(module: nn.Module, functions: Collection[Callable]) -> None:
    """Remove these hooks on the saving and loading of a module's state dict."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_post_hooks):
        for key in [key for key, hook in hooks.items() if hook in functions]:
            del hooks[key]


def of_nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A nested tensor of function(all rows of x), whose components are as long as those of x."""
    if x.layout is torch.jagged:
        if not x.is_contiguous():
            raise ValueError("a jagged tensor with holes or transposed: call contiguous() first")
        return torch.nested.nested_tensor_from_jagged(function(x.values()), getattr(x, "offsets")())
    parts = x.unbind()
    values = function(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    pieces = values.split([part.shape[:-1].numel() for part in parts])
    shaped = [piece.view(*part.shape[:-1], -1) for piece, part in zip(pieces, parts)]
    return torch.nested.as_nested_tensor(shaped)


def multi_head_attention_over(linear: Callable[..., Tensor]) -> Callable:
    """torch.nn.functional.multi_head_attention_forward with projections by `linear(x, weight,
    bias)`."""
    names = {k: v for k, v in vars(F).items() if k != "__name__"} | {"linear": linear}
    for name in ("_in_projection_packed", "multi_head_attention_forward"):
        function = getattr(F, name)
        copied = types.FunctionType(
            function.__code__, names, name, function.__defaults__, function.__closure__
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        names[name] = copied
    return names["multi_head_attention_forward"]


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of the module run graphs: torch.compile returned it, or
    `module.compile()` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None

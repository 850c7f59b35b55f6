"""`convert`: nn.Linear -> fq.Linear in place, before or after `fully_shard`; `set_recipe`: another recipe later."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..ops.capability import arch_of
from ..recipe import Recipe, identity
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from .linear import Linear, adopt, apply_recipe
from .plan import build_plan


def convert(model: nn.Module, recipe: Recipe, skip: Iterable[str] = ()) -> nn.Module:
    """Give every nn.Linear of `model` quantized products, in place; returns `model`.

    skip:  modules that stay as they are: qualified names, last components ("lm_head") or globs ("*.gate").

    Parameters stay high precision and keep their names, so optimizers, clipping and checkpoints see what they saw.
    Works before and after `fully_shard` (while sharded). Subclasses of nn.Linear are left alone.

    Raises ValueError, before anything is changed, for a skip pattern that matches nothing, a model without linear
    layers, a weight that is shared with a module that is not linear (naming both), or a recipe that cannot be
    planned for a module.
    """
    targets = _targets(model, [skip] if isinstance(skip, str) else list(skip))
    recipes = dict(zip(targets, _recipes(len(targets), recipe)))
    _check_shared(model, targets)
    for name, module in targets.items():
        if module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name}.weight is {module.weight.dtype}; fq.convert takes fp32, bf16 and fp16 weights")
        build_plan(recipes[name], name, arch_of(module.weight.device))
    for name, module in targets.items():
        module.__class__ = _converted_class(type(module))
        adopt(module, recipes[name], name)
    return model


def set_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Change the recipe of every converted module of `model`, at a step boundary. Every rank must call it.

    Raises ValueError, before anything is changed, for a recipe that cannot be planned, a model without converted
    modules, or a weight that is gathered now.
    """
    modules = converted_modules(model)
    if not modules:
        raise ValueError("set_recipe found no fq.Linear; call fq.convert(model, recipe) first")
    recipes = dict(zip(modules, _recipes(len(modules), recipe)))
    managed = {id(m.local.state): m for m in torch_compat.all_managed_params() if isinstance(m.local, FSDPHooks)}
    for name, module in modules.items():
        build_plan(recipes[name], module._name, arch_of(module.weight.device))
        under_fsdp = managed.get(id(module._weight_state))
        if under_fsdp is not None and not under_fsdp.is_sharded:
            raise ValueError(
                f"{module._name}.weight is gathered now, so its formats cannot change; call set_recipe between steps, or "
                "reshard() on its FSDP module first"
            )
    for name, module in modules.items():
        apply_recipe(module, recipes[name])
        state = module._weight_state
        state.set_quantizer(module.plan.weight)
        state.compute_dtype = module.recipe.compute_dtype
        if id(state) in managed:
            managed[id(state)].reset_gather_buffers()


def converted_modules(model: nn.Module) -> dict[str, Linear]:
    """The fq.Linear modules of a model by qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def _targets(model: nn.Module, skip: list[str]) -> dict[str, nn.Linear]:
    linears = {name: m for name, m in model.named_modules() if _is_plain_linear(m)}
    matched = {
        pattern: {n for n in linears if fnmatch.fnmatch(n, pattern) or n.rpartition(".")[2] == pattern}
        for pattern in skip
    }
    for pattern, found in matched.items():
        if not found:
            raise ValueError(f"skip={pattern!r} matches no nn.Linear; the model has {_some(linears)}")
    skipped = set().union(*matched.values()) if matched else set()
    targets = {n: m for n, m in linears.items() if n not in skipped}
    if not targets:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to convert ({len(skipped)} skipped)")
    return targets


def _is_plain_linear(module: nn.Module) -> bool:
    cls = type(module)
    return cls is nn.Linear or (isinstance(module, FSDPModule) and cls.__bases__[1:] == (nn.Linear,))


def _converted_class(cls: type) -> type:
    """Linear, or the class that `fully_shard` would have made of it."""
    if cls is nn.Linear:
        return Linear
    return type(f"FSDP{Linear.__name__}", (FSDPModule, Linear), {"__deepcopy__": cls.__dict__["__deepcopy__"]})


def _recipes(count: int, recipe: Recipe) -> list[Recipe]:
    """The recipe of each layer in order: identity for the last `tail` of them (a part of a layer counts as one)."""
    keep = count - math.ceil(recipe.tail * count - 1e-9)
    rest = identity(compute_dtype=recipe.compute_dtype, strict=recipe.strict)
    return [recipe if i < keep else rest for i in range(count)]


def _check_shared(model: nn.Module, targets: dict[str, nn.Linear]) -> None:
    weights = {id(m.weight): name for name, m in targets.items()}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if id(parameter) in weights and module not in targets.values():
                owner = weights[id(parameter)]
                raise ValueError(
                    f"{owner}.weight is shared with {name}.{attribute} ({type(module).__name__}), which does not multiply "
                    f"codes; pass skip=[{owner.rpartition('.')[2]!r}]"
                )


def _some(names, limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

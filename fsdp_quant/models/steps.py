# SPDX-License-Identifier: Apache-2.0
"""Count the steps of a model with hooks on its calls.

The model is the one that was passed to `fq.convert` or `fq.set_recipe`. Only models whose recipe
needs steps have the hooks (`GemmPlan.needs_steps`, and schedules).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.passes import TrainingSteps, continued, histories_of, layers_of, own_steps, set_steps
from ..roles import QUANTIZED_TYPES
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from .transposed_linear import TransposedLinear


def converted_modules(
    model: nn.Module, names: Mapping[str, str] | None = None
) -> dict[str, Linear]:
    """Return the fq.Linear modules of a model by qualified name, also experts and transposed.

    names:  qualified name of a module -> name to return (`layer_names`).
    """
    layers = {}
    for path, module in _owners(model).items():
        name = path if names is None else names[path]
        if isinstance(module, GroupedLinear):
            for e, layer in enumerate(module.layers, module.first_expert):
                layers[f"{name}.{e}".lstrip(".")] = layer
        else:
            layers[name] = module._matrix_layers[0]
    return layers


def _owners(model: nn.Module) -> dict[str, Linear | TransposedLinear | GroupedLinear]:
    return {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, (Linear, TransposedLinear)) or (isinstance(m, GroupedLinear) and m.packed)
    }


def name_of(module: nn.Module) -> str:
    """Return the name of a module in errors and random keys; for other modules, the class name."""
    if isinstance(module, GroupedLinear):
        return module._name
    if isinstance(module, (Linear, TransposedLinear)):
        return module._matrix_layers[0].runtime.name
    return type(module).__name__


def layer_names(model: nn.Module) -> list[dict[str, str]]:
    """Return maps of qualified name -> name in a state: the first for new states, others for old.

    New states use the names with which layers were converted or built, if each is the end of the
    layer's qualified name without known wrappers. Such names exclude all wrappers that were
    added later. Otherwise new states use qualified names without known wrappers.
    """
    owners = _owners(model)
    built = {n: name_of(m) for n, m in owners.items()}
    plain = torch_compat.unwrapped_names(owners)
    are_ends = all(f".{plain[n]}".endswith(f".{name}") for n, name in built.items())
    by_path = [plain, {n: n for n in owners}]
    return [built, *by_path] if are_ends and len(set(built.values())) == len(built) else by_path


def histories_by_side(module: Linear) -> dict[str, AmaxHistory]:
    """Return "slot.direction" -> history, for every delayed direction of the module's plan."""
    return {
        f"{slot}.{d.value}": history
        for slot in QUANTIZED_TYPES
        for d, history in module.runtime.planned_histories(slot).items()
    }


def count_steps(model: nn.Module, is_scheduled: bool) -> None:
    """Count passes of `model`, if its recipe needs steps; models inside do not.

    Part of a model that counts shares the steps of that model.
    """
    layers = list(converted_modules(model).values())
    inside = [m for m in model.modules() if _begin in m._forward_pre_hooks.values()]
    outer = None if model in inside else _steps_around(layers, inside)
    if outer is not None:
        steps, others = outer, list(itertools.chain(*outer.history_groups))
    else:
        begun = [s for m in inside if (s := own_steps(m)) is not None and s.has_run]
        steps, others = own_steps(model) or next(iter(begun), None) or continued(model), []
        steps.is_scheduled = is_scheduled
        steps.is_counting = is_scheduled or any(layer.plan.needs_steps for layer in layers)
        _move_hooks(inside, model if steps.is_counting else None)
    for m in {*inside, model, *layers}:
        set_steps(m, steps)
    if outer is None:
        steps.collect(model, layers)
        for i, layer in enumerate(layers):
            layer.runtime.leads = not i
    steps.history_groups = AmaxHistory.by_scaling(
        dict.fromkeys([*_planned_histories(layers), *others])
    )
    if steps.is_counting:
        for device in {p.device for p in model.parameters()} - {torch.device("meta")}:
            steps.counts_on(device)


def _steps_around(layers: Iterable[Linear], inside: Iterable[nn.Module]) -> TrainingSteps | None:
    """Return the steps of a model that counts layers, other than the models `inside`."""
    steps_inside = [own_steps(m) for m in inside]
    counted = (layer.runtime.steps for layer in layers)
    return next((s for s in counted if s and s.is_counting and s not in steps_inside), None)


def _planned_histories(layers: list[Linear]) -> list[AmaxHistory]:
    """Return those of `histories_of` that the plans record in, on the devices of the weights."""
    planned = [h.to(m.weight.device) for m in layers for h in histories_by_side(m).values()]
    rolled = set(histories_of(layers))  # not those of quantized parameters
    return [h for h in planned if h in rolled]


def _move_hooks(models: Iterable[nn.Module], target: nn.Module | None) -> None:
    """Remove the hooks that count from models, and register them in the target."""
    for hooks in (hooks for m in models for hooks in (m._forward_pre_hooks, m._forward_hooks)):
        for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
            del hooks[key]
    if target is not None:
        target.register_forward_pre_hook(_begin, prepend=True)
        target.register_forward_hook(_end, always_call=True)


def _begin(model: nn.Module, args: tuple) -> None:
    if (steps := own_steps(model)) is None:
        return
    if torch.compiler.is_compiling():
        trains = torch.is_grad_enabled() and (
            model.training or any(p.requires_grad for p in model.parameters())
        )
        steps.call()
        if trains or steps.is_by_hand:
            steps.begin_in_graph(next(model.parameters()).device)
    elif torch_compat.backward_is_running() or torch_compat.is_fake():
        steps.call()
    else:
        if steps.model is None or steps.model() is not model:  # of a copy
            steps.collect(model, layers_of(model))
        steps.enter(torch_compat.backward_may_follow(model, args))


def _end(model: nn.Module, args: tuple, output: object) -> None:
    if (steps := own_steps(model)) is not None:
        steps.call(-1)

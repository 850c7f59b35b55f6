# SPDX-License-Identifier: Apache-2.0
"""Count the steps of a model with hooks on its calls.

The model is the one that was passed to `fq.convert` or `fq.set_recipe`. Only models whose recipe
needs steps have the hooks (`GemmPlan.needs_steps`, and schedules).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..roles import QUANTIZED_TYPES
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from .grouped_linear import GroupedLinear
from .linear import Linear
from .passes import TrainingSteps, continued, histories_of, own_steps, set_steps
from .transposed_linear import TransposedLinear


def converted_modules(
    model: nn.Module, names: Mapping[str, str] | None = None
) -> dict[str, Linear]:
    """Return the fq.Linear modules of a model by qualified name, also experts and transposed.

    names:  qualified name of a module -> name to return (`layer_names`).
    """
    found = {}
    for name, module in _owners(model).items():
        called = name if names is None else names[name]
        if isinstance(module, Linear):
            found[called] = module
        elif isinstance(module, TransposedLinear):
            found[called] = module.layer
        elif isinstance(module, GroupedLinear):
            found |= {
                f"{called}.{e}".lstrip("."): layer
                for e, layer in enumerate(module.layers, module.first_expert)
            }
    return found


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
    layer = module.layer if isinstance(module, TransposedLinear) else module
    return layer.runtime.name if isinstance(layer, Linear) else type(module).__name__


def layer_names(model: nn.Module) -> list[dict[str, str]]:
    """Return maps of qualified name -> name in a state: the first for new states, others for old.

    New states use the names with which layers were converted or built, if each is the end of the
    layer's qualified name without known wrappers. Such names exclude all wrappers that were
    added later. Otherwise new states use qualified names without known wrappers.
    """
    owners = _owners(model)
    own = {n: name_of(m) for n, m in owners.items()}
    plain = torch_compat.unwrapped_names(owners)
    placed = all(f".{plain[n]}".endswith(f".{name}") for n, name in own.items())
    found = [plain, {n: n for n in owners}]
    return [own, *found] if placed and len(set(own.values())) == len(own) else found


def histories_by_side(module: Linear) -> dict[str, AmaxHistory]:
    """Return "slot.direction" -> history, for every delayed direction of the module's plan."""
    found = {}
    for slot in QUANTIZED_TYPES:
        directions = module.plan.hybrid(slot).delayed_directions
        histories = module.runtime.histories(module.plan, slot, None)
        found |= {f"{slot}.{d.value}": history for d, history in zip(directions, histories)}
    return found


def count_steps(model: nn.Module, is_scheduled: bool) -> None:
    """Count passes of `model`, if its recipe needs steps; models inside do not.

    Part of a model that counts shares the steps of that model.
    """
    layers = list(converted_modules(model).values())
    own = own_steps(model)
    inside = [
        m for m in model.modules() if any(hook is _begin for hook in m._forward_pre_hooks.values())
    ]
    outer = {id(s): s for m in layers if (s := m.runtime.steps) is not None and s.is_counting}
    for m in inside:
        outer.pop(id(own_steps(m)), None)
    is_part = bool(outer) and model not in inside
    if is_part:
        steps = next(iter(outer.values()))
    else:
        begun = [s for m in inside if (s := own_steps(m)) is not None and s.has_run]
        steps = own or next(iter(begun), None) or continued(model)
        for hooks in [hooks for m in inside for hooks in (m._forward_pre_hooks, m._forward_hooks)]:
            for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
                del hooks[key]
        steps.is_scheduled = is_scheduled
        steps.is_counting = is_scheduled or any(layer.plan.needs_steps for layer in layers)
        if steps.is_counting:
            model.register_forward_pre_hook(_begin, prepend=True)
            model.register_forward_hook(_end, always_call=True)
    for m in {*inside, model, *layers}:
        set_steps(m, steps)
    if not is_part:
        _collect(steps, model, layers)
    every = {id(h): h.to(m.weight.device) for m in layers for h in histories_by_side(m).values()}
    rolls = {id(h) for h in histories_of(layers)}  # not those of quantized parameters
    every = {key: h for key, h in every.items() if key in rolls}
    if is_part:
        every |= {id(h): h for of in steps.alike for h in of}
    steps.alike = AmaxHistory.by_scaling(every.values())
    if steps.is_counting:
        for device in {p.device for p in model.parameters()} - {torch.device("meta")}:
            steps.counts_on(device)


def _collect(steps: TrainingSteps, model: nn.Module, layers: Iterable[Linear]) -> None:
    """Let the layers of a model count with it. Inserted ones too, unless their own have run."""
    steps.model = weakref.ref(model)
    for i, layer in enumerate(layers):
        if layer.runtime.steps is None or not layer.runtime.steps.has_run:
            layer.runtime.steps = steps
        steps.layers.add(layer)
        layer.runtime.leads = not i


def _begin(model: nn.Module, args: tuple) -> None:
    tracing, steps = torch.compiler.is_compiling(), own_steps(model)
    if steps is None:
        return
    if tracing:
        trains = torch.is_grad_enabled() and (model.training or _requires_grad(model))
        steps.call()
        if trains or steps.is_by_hand:
            steps.begin_in_graph(next(model.parameters()).device)
        return
    if torch_compat.backward_is_running() or torch_compat.is_fake():
        steps.call()
        return
    if steps.model is None or steps.model() is not model:  # of a copy
        _collect(steps, model, converted_modules(model).values())
    steps.enter(torch_compat.backward_may_follow(model, args))


def _end(model: nn.Module, args: tuple, output: object) -> None:
    if (steps := own_steps(model)) is not None:
        steps.call(-1)


def _requires_grad(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())

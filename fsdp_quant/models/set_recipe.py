# SPDX-License-Identifier: Apache-2.0
"""`set_recipe`: another recipe for a converted model; models that follow a schedule of recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from ..formats import Direction
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.passes import LOOSE, SCHEDULED, Scheduled, steps_of
from ..linear.plan import build_plan
from ..linear.runtime import LayerRuntime
from ..ops.capability import arch_of
from ..recipe import PerLayer, Recipe, Schedule, as_recipe
from ..roles import QUANTIZED_TYPES, Selection, hits, selected, shown, without_wrappers
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.agreement import agree, axes_of, text_of
from ..tensor.fsdp_hooks import managed_states, set_formats
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import local_of
from ..tensor.weight_codes import WeightCodes
from .progress import progress
from .steps import count_steps
from .transposed_linear import TransposedLinear

_R = TypeVar("_R", bound=Recipe | PerLayer | Schedule)


def set_recipe(model: nn.Module, recipe: Recipe | PerLayer | Schedule | str) -> nn.Module:
    """Change the recipe of every converted module, between steps; returns `model`. Every rank must
    call it.

    A schedule that the model followed ends. Delayed scaling continues where a tensor had it
    before: its newest amaxes stay, whatever changes besides (the other direction, other tensors,
    `backward_override`, length, margin or element). Where it had none, it begins afresh.

    Raises ValueError, before anything is changed, for a recipe that cannot be planned, or that is
    not the one that other ranks of a `fully_shard` are given (on all of them), a model without
    converted modules, a gathered weight, or a published or frozen one of other formats.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> model = fq.set_recipe(model, fq.recipes.identity())
    """
    recipe, units = as_recipe(recipe, "fq.set_recipe"), converted_units(model)
    if not units:
        raise ValueError("set_recipe found no fq.Linear; call fq.convert(model, recipe) first")
    recipe = of_model(recipe, list(units), model)
    recipes = planned_recipes(recipe, asked_of(units), steps_of(model).number)
    managed = managed_weights(units)
    check_fixed("fq.set_recipe", recipe, units)
    agree_on_recipes(model, recipe, recipes)
    give_recipes(model, units, recipes, managed)
    note_rules(units, recipe.at(steps_of(model).number))
    follow(model, recipe)
    return model


def of_model(recipe: _R, names: Sequence[str], model: nn.Module) -> _R:
    """Return a recipe with the names of layers in place of the classes and functions of
    `per_layer`, which would see other classes once layers are converted."""
    if isinstance(recipe, Schedule):
        switches = [(a, b, of_model(r, names, model)) for a, b, r in recipe.switches]
        return replace(recipe, base=of_model(recipe.base, names, model), switches=tuple(switches))
    if not isinstance(recipe, PerLayer):
        return recipe
    modules, named = dict(model.named_modules()), []
    for selector, layer_recipe in recipe.named:
        if callable(selector):
            layers = selected("per_layer", selector, names, modules)
            selector = Selection(shown(selector), tuple(map(without_wrappers, layers)))
        named.append((selector, layer_recipe))
    return replace(recipe, named=tuple(named))


def note_rules(units: Mapping[str, Sequence[Linear]], recipe: Recipe | PerLayer) -> None:
    """Note in each layer which pattern of `per_layer` chose its recipe, for `fq.plan`."""
    rules: dict[str, str] = {}
    for selector, _ in getattr(recipe, "named", ())[::-1]:
        rules |= dict.fromkeys(hits(selector, units), shown(selector))
    for name, layers in units.items():
        for layer in layers:
            layer.runtime.rule = rules.get(name)


def asked_of(units: Mapping[str, Sequence[Linear]]) -> dict[str, list[tuple]]:
    """Return what `planned_recipes` plans for the layers of `converted_units`."""
    return {
        name: [(m.runtime.name, m.runtime.module_type, m.weight.device) for m in layers]
        for name, layers in units.items()
    }


def managed_weights(units: Mapping[str, Sequence[Linear]]) -> dict[int, tuple]:
    """Return state id -> (weight that FSDP2 manages, the state of all its matrices). Raises
    ValueError for a weight of the layers that is gathered."""
    managed = managed_states()
    for module in (m for layers in units.values() for m in layers):
        under_fsdp = managed.get(id(module.runtime.weight_state))
        if under_fsdp is not None and not under_fsdp[0].is_sharded:
            raise ValueError(
                f"{module.runtime.name}.weight is gathered now, so its formats cannot change; call "
                "set_recipe between steps, or reshard() on its FSDP module first"
            )
    return managed


def give_recipes(
    model: nn.Module,
    units: Mapping[str, Sequence[Linear]],
    recipes: Mapping[str, Recipe],
    managed: dict[int, tuple],
) -> None:
    """Let converted layers multiply by other recipes from now on."""
    modules = [(module, recipes[name]) for name, layers in units.items() for module in layers]
    histories = {module.runtime: _planned_histories(module.runtime) for module, _ in modules}
    for module, recipe in modules:
        module.runtime.set_recipe(recipe, module.weight.device)
        set_formats(module.runtime.weight_state, module.plan, managed)
    _continue_histories(histories)
    for module, _ in modules:
        module.prepare_graphs()
    torch_compat.expect_graphs()
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.prepare()


_BySlot = dict[str, dict[Direction, AmaxHistory]]


def _planned_histories(runtime: LayerRuntime) -> _BySlot:
    return {slot: runtime.planned_histories(slot) for slot in QUANTIZED_TYPES}


def _continue_histories(before: Mapping[LayerRuntime, _BySlot]) -> None:
    """Let the histories of new plans continue those of the plans before, and drop histories that
    only those had. Histories of other quantizers, in `fq.autocast`, stay."""
    for layer, by_slot in before.items():
        for slot, histories in by_slot.items():
            layer.histories(layer.plan, slot, None, histories)
    runtimes = _with_sharers(before)
    dropped = _histories_in(before.values()) - _histories_in(map(_planned_histories, runtimes))
    for stored in (runtime.weight_state.histories for runtime in runtimes):
        for key in [key for key, history in stored.items() if history in dropped]:
            del stored[key]


def _histories_in(by_slots: Iterable[_BySlot]) -> set[AmaxHistory]:
    return {history for of in by_slots for sides in of.values() for history in sides.values()}


def _with_sharers(layers: Collection[LayerRuntime]) -> list[LayerRuntime]:
    """Return the layers, and others that may record amaxes of the same inputs."""
    counted = dict.fromkeys(layer.steps or LOOSE.steps for layer in layers)
    others = (layer.runtime for steps in counted for layer in steps.layers)
    sharers = [*layers, *(runtime for runtime in others if runtime.input_owner is not None)]
    owners = [runtime.input_owner() for runtime in sharers if runtime.input_owner is not None]
    return [r for r in dict.fromkeys([*sharers, *owners]) if isinstance(r, LayerRuntime)]


def agree_on_recipes(
    model: nn.Module, recipe: Recipe | PerLayer | Schedule, recipes: Mapping[str, Recipe]
) -> None:
    """Raise ValueError, on every rank, where ranks that share weights are given other recipes."""
    facts = {name: text_of(r) for name, r in recipes.items()} | {"the recipe": text_of(recipe)}
    for groups in axes_of(model):
        agree(facts, groups)


def check_fixed(
    call: str,
    recipe: Recipe | PerLayer | Schedule,
    units: Mapping[str, Sequence[Linear]],
    frozen: Collection[Linear] = (),
) -> None:
    """Raise ValueError for a recipe that changes, in any step, the formats of codes that cannot be
    encoded again: a weight sync publishes them, or no values are left.

    call:    that is refused, for the error.
    frozen:  layers whose values `fq.freeze` is about to drop.
    """
    for phase in recipe.phases:
        for module, layer_recipe in given_recipes(units, phase):
            fixed = (_FROZEN, _LATER) if module in frozen else _why_fixed(module)
            if fixed is None:
                continue
            (reason, remedy), runtime, state = fixed, module.runtime, module.runtime.weight_state
            weight = runtime.plan_of(layer_recipe, module.weight.device).weight
            dtype = layer_recipe.compute_dtype
            if (weight, dtype) != (state.quantizer, state.compute_dtype):
                raise ValueError(
                    f"{call}: {runtime.name}.weight {reason} {state.quantizer} of "
                    f"{state.compute_dtype}, and {layer_recipe} makes it {weight} of {dtype}; "
                    f"change activations and gradients only, or {remedy}"
                )


def _why_fixed(module: Linear) -> tuple[str, str] | None:
    """(why the formats of a layer's weight are fixed, what to do); None: they are not."""
    weight = local_of(module.weight)
    if module.runtime.weight_state.weight_sync is not None:
        remedy = "plan the sync of a model that has the new recipe, and refresh it with the masters"
        return "is published by a weight sync that was planned for", remedy
    has_values = isinstance(weight, WeightCodes) and weight.has_values
    return (_FROZEN, _UNFREEZE) if isinstance(weight, QuantizedTensor) and not has_values else None


_FROZEN = "is frozen, and keeps no values beside its codes, which are"
_LATER = "freeze it once no recipe changes it any more"
_UNFREEZE = "call fq.unfreeze(model), which returns decoded values, and then fq.set_recipe"


def planned_recipes(
    recipe, units: dict[str, list[tuple[str, str, torch.device]]], step: int
) -> dict[str, Recipe]:
    """Return the recipe of each layer in this step. Plans every phase, so that errors are raised
    before anything is changed."""
    names = list(units)
    for phase in recipe.phases:
        for name, layer in progress(list(zip(names, phase.for_layers(names))), "planning"):
            for module, module_type, device in units[name]:
                build_plan(layer, module, arch_of(device), module_type)
    return dict(zip(names, recipe.at(step).for_layers(names)))


# Schedules #


def follow(model: nn.Module, recipe: Recipe | PerLayer | Schedule) -> None:
    """Count steps, and switch recipes by the step from now on, if the recipe is a schedule."""
    SCHEDULED.pop(model, None)
    if isinstance(recipe, Schedule):
        SCHEDULED[model] = Scheduled(recipe, switch)
    for layer in (layer for unit in converted_units(model).values() for layer in unit):
        layer.runtime.schedule = recipe if isinstance(recipe, Schedule) else None
    count_steps(model, model in SCHEDULED)


def schedules_of(model: nn.Module) -> dict[nn.Module, Schedule]:
    """The schedules that a model, or models inside it, follow. A copy follows none."""
    return {m: SCHEDULED[m].schedule for m in model.modules() if m in SCHEDULED}


def switch(model: nn.Module, schedule: Schedule, step: int, running: str | None = None) -> None:
    """Give a model the recipe that its schedule has in a step. Raises ValueError if a layer of it
    is running, and that changes a recipe."""
    changes = given_recipes(converted_units(model), schedule.at(step))
    if any(layer.recipe != recipe for layer, recipe in changes):
        if running is not None:
            raise ValueError(
                f"{running}: its model follows a schedule and runs by pieces, and nobody switched "
                f"it before this layer began step {step}; call fq.begin_step(step), or the model"
            )
        torch_compat.reshard(model)
        set_recipe(model, schedule.at(step))
        follow(model, schedule)


def converted_units(model: nn.Module) -> dict[str, Sequence[Linear]]:
    """Return the layers of each unit of a model, by qualified name: of an fq.Linear or of the
    experts of one module."""
    units, inside = {}, set()
    for name, module in model.named_modules():
        is_unit = isinstance(module, (Linear, GroupedLinear, TransposedLinear))
        if is_unit and id(module) not in inside:
            units[name] = module._matrix_layers
            inside.update(map(id, module._matrix_layers))
    return units


def unchosen_units(model: nn.Module) -> dict[str, Sequence[Linear]]:
    """Return the layers of `converted_units` that were built without a recipe."""
    units = converted_units(model).items()
    return {n: layers for n, layers in units if not all(m.runtime.chosen for m in layers)}


def given_recipes(
    units: Mapping[str, Sequence[Linear]], recipe: Recipe | PerLayer
) -> list[tuple[Linear, Recipe]]:
    """Return each layer of `converted_units` with the recipe that one without steps gives it."""
    recipes = recipe.for_layers(list(units))
    return [(layer, r) for layers, r in zip(units.values(), recipes) for layer in layers]

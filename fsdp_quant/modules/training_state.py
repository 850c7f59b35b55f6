"""`state_dict(model)` / `load_state_dict`: what training needs to resume and is not a parameter."""

from __future__ import annotations

import hashlib

from torch import nn

from ..context import STEP
from ..scaling import AmaxHistory
from .convert import converted_modules, converted_units, schedules_of
from .linear import Linear


def _histories(module: Linear) -> dict[str, AmaxHistory]:
    """"slot.direction" -> history of every delayed side of the module's plan."""
    state, found = module._weight_state, {}
    for slot in ("input", "weight", "grad_output"):
        hybrid = module.plan.hybrid(slot)
        for direction in hybrid.delayed_directions:
            name = state.name if slot == "weight" else module._name
            found[f"{slot}.{direction.value}"] = state.history(name, slot, direction, hybrid.side(direction))
    return found


def _recipe_text(model: nn.Module) -> str:
    modules = converted_modules(model)
    if not modules:
        raise ValueError("no fq.Linear in this model; call fq.convert(model, recipe) first")
    recipes = {m.recipe.fingerprint(): repr(m.recipe) for m in modules.values()}
    return " | ".join(recipes[key] for key in sorted(recipes))


def fingerprint(model: nn.Module, step: int | None = None) -> str:
    """Hex digest of the recipe of every converted module: equal models and recipes have equal ones.

    step:  as it will be in that step of the schedules that the model follows.
    """
    modules = converted_modules(model)
    recipes = {id(m): m.recipe for m in modules.values()}
    for scheduled, schedule in schedules_of(model).items() if step is not None else ():
        units = converted_units(scheduled)
        for layers, recipe in zip(units.values(), schedule.at(step).for_layers(list(units))):
            recipes |= {id(m): recipe for m in layers}
    lines = [f"{name}: {recipes[id(m)].fingerprint()}" for name, m in sorted(modules.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _schedule_text(model: nn.Module) -> str | None:
    return " | ".join(sorted(s.fingerprint() for s in schedules_of(model).values())) or None


def state_dict(model: nn.Module) -> dict:
    """Step, seed, recipe, schedule and fingerprint, and the amax histories of delayed scaling: the same on every rank but
    for the histories of activations and gradients, which are each rank's own."""
    histories = {
        f"{name}.{side}": history.state_dict()
        for name, module in converted_modules(model).items() for side, history in _histories(module).items()
    }
    return {
        "step": STEP.step, "seed": STEP.seed, "recipe": _recipe_text(model), "fingerprint": fingerprint(model),
        "schedule": _schedule_text(model), "histories": histories,
    }


def load_state_dict(model: nn.Module, state: dict, allow_recipe_change: bool = False) -> None:
    """Restore what `state_dict(model)` returned.

    A model that follows a schedule has the recipe of the restored step. Every rank must call it.

    Raises ValueError, before anything is changed, for a state of another recipe, schedule or other modules, unless
    allow_recipe_change=True (the histories of another recipe are then left out).
    """
    same = state["fingerprint"] == fingerprint(model, state["step"])
    if not allow_recipe_change and same and state.get("schedule") != _schedule_text(model):
        raise ValueError(
            f"the saved state follows the schedule {state.get('schedule')}, this model {_schedule_text(model)}; give it the "
            "saved one (fq.set_recipe), or pass allow_recipe_change=True"
        )
    if not same and not allow_recipe_change:
        raise ValueError(
            f"the saved state is of recipe {state['recipe']} (fingerprint {state['fingerprint']}), this model's is "
            f"{_recipe_text(model)} ({fingerprint(model)}); convert the model with the saved recipe, or pass "
            "allow_recipe_change=True"
        )
    STEP.seed = state["seed"]
    STEP.go_to(state["step"])
    for name, module in converted_modules(model).items() if same else ():
        for side, history in _histories(module).items():
            history.load_state_dict(state["histories"][f"{name}.{side}"])

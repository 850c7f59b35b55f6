"""`state_dict(model)` / `load_state_dict`: what training needs to resume and is not a parameter."""

from __future__ import annotations

import hashlib

from torch import nn

from ..context import STEP
from ..scaling import AmaxHistory
from .convert import converted_modules
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


def fingerprint(model: nn.Module) -> str:
    """Hex digest of the recipe of every converted module: equal models and recipes have equal ones."""
    lines = [f"{name}: {m.recipe.fingerprint()}" for name, m in sorted(converted_modules(model).items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def state_dict(model: nn.Module) -> dict:
    """Step, seed, recipe and fingerprint, and the amax histories of delayed scaling: the same on every rank but
    for the histories of activations and gradients, which are each rank's own."""
    histories = {
        f"{name}.{side}": history.state_dict()
        for name, module in converted_modules(model).items() for side, history in _histories(module).items()
    }
    return {
        "step": STEP.step, "seed": STEP.seed, "recipe": _recipe_text(model), "fingerprint": fingerprint(model),
        "histories": histories,
    }


def load_state_dict(model: nn.Module, state: dict, allow_recipe_change: bool = False) -> None:
    """Restore what `state_dict(model)` returned.

    Raises ValueError, before anything is changed, for a state of another recipe or other modules, unless
    allow_recipe_change=True (the histories of another recipe are then left out).
    """
    same = state["fingerprint"] == fingerprint(model)
    if not same and not allow_recipe_change:
        raise ValueError(
            f"the saved state is of recipe {state['recipe']} (fingerprint {state['fingerprint']}), this model's is "
            f"{_recipe_text(model)} ({fingerprint(model)}); convert the model with the saved recipe, or pass "
            "allow_recipe_change=True"
        )
    STEP.step, STEP.seed = state["step"], state["seed"]
    STEP.publish()
    for name, module in converted_modules(model).items() if same else ():
        for side, history in _histories(module).items():
            history.load_state_dict(state["histories"][f"{name}.{side}"])

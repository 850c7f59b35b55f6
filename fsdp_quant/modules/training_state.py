"""`state_dict(model)` / `load_state_dict`: what training needs to resume and is not a parameter."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Collection, MutableMapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint import fingerprints
from ..context import STEP, restart_steps, steps_of
from ..formats import Direction
from ..scaling import AmaxHistory, reduce_amaxes
from ..tensor import torch_compat
from .convert import converted_units, schedules_of, switch
from .grouped_linear import GroupedLinear
from .linear import Linear
from .plan import EXACT
from .steps import begins_first, converted_modules, histories_by_side


# Group, and names of the layers of all its ranks (None: to be agreed, when there is one).
_SHARED: MutableMapping[nn.Module, tuple[dist.ProcessGroup | None, list | None]] = weakref.WeakKeyDictionary()
_SIDES = [f"{slot}.{direction.value}" for slot in ("input", "grad_output") for direction in Direction]


def share_amaxes(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Delayed scaling of `model` from amaxes of all ranks: activations and gradients are scaled alike on every rank.

    group:  of ranks that step the same optimizers (default: all).

    From now on each step that begins takes the maximum over the ranks, in one collective for all layers of `model`: every rank
    must run the same training forwards, outside of whole-model graphs of torch.compile. Layers are paired by name: ranks may hold other experts. Every rank must call it; amaxes of weights are shared by `fully_shard`
    without it. A copy of the model shares nothing.

    Raises ValueError for a model without converted modules; at a step, for layers that were converted since.
    """
    if not converted_modules(model):
        raise ValueError("share_amaxes found no fq.Linear; call fq.convert(model, recipe) first")
    _SHARED[model] = group, None
    if dist.is_available() and dist.is_initialized():
        _agree(model)


def _by_name(model: nn.Module) -> dict[tuple[str, str], Linear]:
    """The layers by their name in the model, and by their own, which tells experts of ranks that count them from 0 apart."""
    return {(name, module._name): module for name, module in converted_modules(model).items()}


def _agree(model: nn.Module) -> None:
    group = _SHARED[model][0] or dist.group.WORLD
    of_ranks: list = [None] * group.size()
    dist.all_gather_object(of_ranks, list(_by_name(model)), group=group)
    _SHARED[model] = group, list(dict.fromkeys(name for names in of_ranks for name in names))


@torch.no_grad()
def _share(rolled: Collection[AmaxHistory]) -> None:
    rolled = set(map(id, rolled))
    for model in list(_SHARED) if dist.is_available() and dist.is_initialized() else ():
        modules, found = _by_name(model), {}
        if not any(id(h) in rolled for module in modules.values() for h in module._weight_state.histories.values()):
            continue
        if _SHARED[model][1] is None:
            _agree(model)
        group, names = _SHARED[model]
        if new := [name for name, _ in modules.keys() - set(names)]:
            raise ValueError(f"{', '.join(sorted(new))}: converted after fq.share_amaxes(model); call it again, on every rank")
        for name, module in modules.items():
            found |= {(name, side): h for side, h in histories_by_side(module).items() if not h.stays}
        # Histories lie where their layers ran; those of layers that did not run yet must not stay behind.
        ran_on = [h.amaxes.device for h in found.values() if h.amaxes.device.type != "cpu"]
        device = ran_on[0] if ran_on else next(iter(modules.values())).weight.device
        current, none = {key: h.to(device).amaxes[:1] for key, h in found.items()}, torch.zeros(1, device=device)
        slots = [(name, side) for name in names for side in _SIDES]
        shared = reduce_amaxes([current.get(slot, none) for slot in slots], group)
        torch_compat.copy_all([(current[slot], amax) for slot, amax in zip(slots, shared) if slot in current])


STEP.before_roll.append(_share)


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
    texts = {name: recipes[id(m)].fingerprint() for name, m in modules.items()}
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear) and isinstance(getattr(module, "weight", None), DTensor):  # other ranks may hold other experts
            its = recipes[id(module.layers[0])].fingerprint()
            texts |= {f"{name}.{e}".lstrip("."): its for e in range(module.weight.shape[0])}
    lines = [f"{name}: {text}" for name, text in sorted(texts.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _schedule_text(model: nn.Module) -> str | None:
    return " | ".join(sorted(s.fingerprint() for s in schedules_of(model).values())) or None


def _moved(model: nn.Module) -> str:
    """JSON of module name -> product -> rung, of products that the guard moved: one leaf, so that DCP loads what was saved."""
    return json.dumps({name: m.plan.moved for name, m in converted_modules(model).items() if m.plan.moved})


def state_dict(model: nn.Module) -> dict:
    """What a run needs to go on beside parameters and optimizer. Every rank must call it.

    step, seed:   of the random bits.
    schedule:     text of the schedules of recipes; None: there is none.
    recipe:       text, and `fingerprint`, a digest of every module's recipe.
    codes:        weight name -> hash of its codes, the same for every world size (`checkpoint.fingerprints`).
    histories:    of delayed scaling; those of activations and gradients are each rank's own.
    moved:        products that the anchoring guard moved; each rank's own.
    """
    histories = {
        f"{name}.{side}": _saved_history(module, history)
        for name, module in converted_modules(model).items() for side, history in histories_by_side(module).items()
    }
    return {
        "step": steps_of(model).number, "seed": STEP.seed, "schedule": _schedule_text(model), "recipe": _recipe_text(model),
        "fingerprint": fingerprint(model), "codes": fingerprints(model), "histories": histories, "moved": _moved(model),
    }


def load_state_dict(model: nn.Module, state: dict, allow_recipe_change: bool = False) -> None:
    """Restore what `state_dict(model)` returned, after the parameters. Every rank must call it.

    A model that follows a schedule has the recipe of the restored step.

    Raises ValueError, and leaves everything as it was, for a state of another recipe, schedule or other modules, unless
    allow_recipe_change=True (histories and codes of another recipe are then left out); for weights whose codes are not
    those that were saved, naming them (drop state["codes"] to go on with other weights).
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
    step, STEP.seed, seed = steps_of(model).number, state["seed"], STEP.seed
    _go_to(model, state["step"])
    if not same:
        return
    modules = converted_modules(model)
    histories = {f"{n}.{side}": h for n, m in modules.items() for side, h in histories_by_side(m).items()}
    before = {key: history.state_dict() for key, history in histories.items()}
    _restore(modules, histories, state["histories"])
    wrong = _wrong_codes(model, state.get("codes"))
    if wrong:
        _restore(modules, histories, before)
        STEP.seed = seed
        _go_to(model, step)
        raise ValueError(
            f"the codes of {', '.join(wrong)} are not those that were saved: load the parameters of the same checkpoint "
            "before fq.load_state_dict, in the dtype they were saved from"
        )
    for module in modules.values():
        for history in histories_by_side(module).values():
            if _is_of_codes(module, history):
                history.roll()  # saved with high-precision parameters, the step that ran is open
        if module._weight_state.holds_codes:
            module._weight_state.drop_codes()
    moved = json.loads(state.get("moved", "{}"))
    for name, module in modules.items():
        of = moved.get(name, {})
        of = dict.fromkeys(of, EXACT) if isinstance(of, list) else of  # of a file from before there were rungs
        module._plan = module.plan.moved_to(of)


def _is_of_codes(module: Linear, history: AmaxHistory) -> bool:
    """It rolls where the optimizer makes codes, not where a forward begins a step."""
    return history.stays and module._weight_state.holds_codes


def _saved_history(module: Linear, history: AmaxHistory) -> dict[str, torch.Tensor]:
    """As both kinds of parameters go on from: codes are made, and their amaxes recorded, again behind a load."""
    saved = history.state_dict()
    if _is_of_codes(module, history):
        saved["amaxes"][0] = 0
    return saved


def _go_to(model: nn.Module, step: int) -> None:
    """The next step of the model is `step`, and its schedules follow."""
    restart_steps(model, step)
    for scheduled, schedule in schedules_of(model).items():
        switch(scheduled, schedule, step)
    for module in model.modules():
        begins_first(module)


def _restore(modules: dict[str, Linear], histories: dict[str, AmaxHistory], saved: dict[str, dict]) -> None:
    for key, history in histories.items():
        history.load_state_dict(saved[key])
    for module in modules.values():
        if module._weight_state.holds_codes:
            module._weight_state.drop_codes()  # a delayed scale is another now


def _wrong_codes(model: nn.Module, saved: dict[str, int] | None) -> list[str]:
    """Weights whose codes have another fingerprint than the saved one: the same list on every rank."""
    if saved is None:
        return []
    found = fingerprints(model)
    names = [name for name in found if saved.get(name) != found[name]]
    return names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} more"]

# SPDX-License-Identifier: Apache-2.0
"""`state_dict(model)` / `load_state_dict`: what training needs to resume and is not a parameter."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint import RANKS, SAVED_BY, SKIPPED, fingerprints, of_rank
from ..checkpoint.files import parsed
from ..context import STEP
from ..formats import Direction
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.passes import SHARED, restart_steps, steps_of
from ..linear.plan import EXACT, PRODUCTS, ladder_of
from ..models.set_recipe import converted_units, given_recipes, schedules_of, switch
from ..models.steps import converted_modules, histories_by_side, layer_names
from ..recipe import Recipe
from ..roles import QUANTIZED_TYPES
from ..scaling import AmaxHistory, DelayedScaling, reduce_amaxes
from ..tensor import torch_compat
from ..tensor.agreement import axes_of, raises_on_all_ranks
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_weight import QuantizedWeightState
from ..tensor.rendezvous import meet

_SIDES = [
    f"{slot}.{direction.value}" for slot in ("input", "grad_output") for direction in Direction
]


def share_amaxes(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Scale activations and gradients of `model` alike on every rank, from amaxes of all.

    group:  of ranks that step the same optimizers (default: all).

    From now on each step that begins computes the maximum over the ranks, in one collective for all
    layers of `model`: every rank must run the same training forwards, outside of whole-model graphs
    of torch.compile. Layers are paired by name: ranks may hold other experts. Every rank must call
    it; `fully_shard` shares those of weights. A copy of the model shares nothing.

    Raises ValueError for a model without converted modules; later for new layers.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "fp8_delayed")
    >>> if torch.distributed.is_initialized():
    ...     fq.share_amaxes(model)
    """
    if not converted_modules(model):
        raise ValueError("share_amaxes found no fq.Linear; call fq.convert(model, recipe) first")
    SHARED[model] = sharing = _Sharing(group)
    if dist.is_initialized():
        sharing.agree(model)


def _by_name(model: nn.Module) -> dict[tuple[str, str], Linear]:
    """Return the layers by (name in the model, own name): ranks may count their experts from
    0."""
    return {
        (name, module.runtime.name): module for name, module in converted_modules(model).items()
    }


class _Sharing:
    """What `share_amaxes` has a step of a model begin with.

    group:  of ranks; None: all.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._group, self._names = group, None

    def agree(self, model: nn.Module) -> list[tuple[str, str]]:
        """Return the names of the layers of all ranks. Every rank must call it."""
        self._group = group = self._group or dist.group.WORLD
        if group is None:
            raise ValueError("fq.share_amaxes: torch.distributed has no default process group")
        meet([(group,)])
        names_of_ranks: list = [None] * group.size()
        dist.all_gather_object(names_of_ranks, list(_by_name(model)), group=group)
        self._names = list(dict.fromkeys(itertools.chain(*names_of_ranks)))
        return self._names

    @torch.no_grad()
    def __call__(self, model: nn.Module, histories: Collection[AmaxHistory]) -> None:
        """Replace the current amaxes by the maximum over ranks, if one of the model is to roll."""
        if not dist.is_initialized():
            return
        modules, rolled = _by_name(model), set(histories)
        of_layers = (m.runtime.weight_state.histories.values() for m in modules.values())
        if rolled.isdisjoint(itertools.chain(*of_layers)):
            return
        names = self.agree(model) if self._names is None else self._names
        if new := [name for name, _ in modules.keys() - set(names)]:
            raise ValueError(
                f"{', '.join(sorted(new))}: converted after fq.share_amaxes(model); call it again, "
                "on every rank"
            )
        by_slot = {
            (name, side): history
            for name, module in modules.items()
            for side, history in histories_by_side(module).items()
            if not history.keep_when_skipped
        }
        # Histories are stored where their layers ran; those of other layers must not stay behind.
        ran_on = [h.amaxes.device for h in by_slot.values() if h.amaxes.device.type != "cpu"]
        device = next(iter(ran_on or [m.weight.device for m in modules.values()]))
        current = {slot: h.to(device).amaxes[:1] for slot, h in by_slot.items()}
        zero = torch.zeros(1, dtype=torch.float32, device=device)
        slots = [(name, side) for name in names for side in _SIDES]
        shared = reduce_amaxes([current.get(slot, zero) for slot in slots], self._group)
        torch_compat.copy_all(
            [(current[slot], amax) for slot, amax in zip(slots, shared) if slot in current]
        )


def _recipe_text(model: nn.Module) -> str:
    modules = converted_modules(model)
    if not modules:
        raise ValueError("no fq.Linear in this model; call fq.convert(model, recipe) first")
    recipes = {m.recipe.fingerprint(): repr(m.recipe) for m in modules.values()}
    return " | ".join(recipes[key] for key in sorted(recipes))


def fingerprint(
    model: nn.Module, step: int | None = None, names: Mapping[str, str] | None = None
) -> str:
    """Return a hex digest of the recipe of every converted module, the same for equal models and
    recipes.

    step:   as it will be in that step of the schedules that the model follows.
    names:  of the modules, one of `layer_names`; default: those of new states.
    """
    names = names or layer_names(model)[0]
    modules = converted_modules(model, names)
    recipes = {id(m): m.recipe for m in modules.values()}
    if step is not None:
        recipes |= {id(m): recipe for m, recipe in _scheduled(model, step)}
    texts = {name: recipes[id(m)].fingerprint() for name, m in modules.items()}
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear) and isinstance(
            getattr(module, "weight", None), DTensor
        ):  # other ranks may hold other experts
            text = recipes[id(module.layers[0])].fingerprint()
            texts |= {f"{names[name]}.{e}".lstrip("."): text for e in range(module.weight.shape[0])}
    lines = [f"{name}: {text}" for name, text in sorted(texts.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _scheduled(model: nn.Module, step: int) -> list[tuple[Linear, Recipe]]:
    """Return the layers that follow schedules, and their recipes in a step."""
    return [
        layer_and_recipe
        for scheduled, schedule in schedules_of(model).items()
        for layer_and_recipe in given_recipes(converted_units(scheduled), schedule.at(step))
    ]


def _schedule_text(model: nn.Module) -> str | None:
    return " | ".join(sorted(s.fingerprint() for s in schedules_of(model).values())) or None


def _rank() -> list[int]:
    """Return [rank, world size]."""
    return [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else [0, 1]


def _codes(
    model: nn.Module, names: Mapping[str, str], saved: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return `checkpoint.fingerprints` by these names of the modules.

    saved:  of a state that is compared; files of earlier versions lack attention and transposed
            weights, which are left out then.
    """
    weights, codes = {weight.name: weight for weight in quantized_weights(model)}, {}
    for key, value in fingerprints(model).items():
        weight = weights.get(key) or weights[key.rpartition(".")[0]]  # or a matrix of it
        owner = f"{names[weight.path]}.{weight.attribute}".lstrip(".")
        name = f"{owner}{key.removeprefix(weight.name)}"
        is_late = weight.is_transposed or weight.attribute != "weight"
        if saved is None or name in saved or not is_late:
            codes[name] = value
    return codes


def state_dict(model: nn.Module, old_names: bool = False) -> dict:
    """Return what a run needs to resume, but parameters and optimizer. Each rank saves its own.

    Every rank must call it under `fully_shard` and tensor parallelism, whose codes are hashed
    together, even if one rank alone saves: call it before `if rank == 0:`. A rank that waits in
    vain raises RuntimeError when its process group's time limit ends.

    old_names:    names hold wrappers (torch.compile, checkpoint_wrapper, DDP, ..), as in files of
                  earlier versions: what `dcp.load` of such a file of a wrapped model is given.

    step, seed:   of the random bits.
    schedule:     text of the schedules of recipes; None: there is none.
    recipe:       text, and `fingerprint`, a digest of every module's recipe.
    codes:        weight name -> hash of its codes, the same for every world size
                  (`checkpoint.fingerprints`).
    histories:    of delayed scaling; those of activations and gradients are each rank's own.
    moved:        JSON of module name -> GEMM -> rung that the guard moved it to, the rank, and
                  whether the step was skipped; each rank's own.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "fp8_delayed")
    >>> sorted(fq.state_dict(model))
    ['codes', 'fingerprint', 'histories', 'moved', 'recipe', 'schedule', 'seed', 'step']
    """
    recipe, names = _recipe_text(model), layer_names(model)[-1 if old_names else 0]
    steps, histories = steps_of(model), {}
    modules = converted_modules(model, names)
    for name, module in modules.items():
        for side, history in histories_by_side(module).items():
            histories[f"{name}.{side}"] = saved = history.state_dict()
            if _is_of_codes(module, history):
                saved["amaxes"][0] = 0  # a load encodes weights, and records their amaxes, again
    moved: dict[str, object] = {n: m.plan.moved for n, m in modules.items() if m.plan.moved}
    moved |= {SAVED_BY: _rank()} | ({SKIPPED: True} if steps.is_skipped else {})
    return {
        "step": steps.number,
        "seed": STEP.seed,
        "schedule": _schedule_text(model),
        "recipe": recipe,
        "fingerprint": fingerprint(model, names=names),
        "codes": _codes(model, names),
        "histories": histories,
        "moved": json.dumps(moved),
    }


class TrainingState:
    """The state of `state_dict(model)` on every rank, under one key of a checkpoint, for any number
    of ranks: a `Stateful` of torch.distributed.checkpoint, also by hand.

    allow_recipe_change:  of `load_state_dict`.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "fp8_delayed")
    >>> dcp = torch.distributed.checkpoint
    >>> state = {"model": model.state_dict(), "train_state": fq.steps.TrainingState(model)}
    >>> _ = dcp.save(state, checkpoint_id="step_1", no_dist=True)  # without: in a run of ranks
    >>> dcp.load(state, checkpoint_id="step_1", no_dist=True)
    """

    def __init__(self, model: nn.Module, allow_recipe_change: bool = False):
        self.model, self.allow_recipe_change = model, allow_recipe_change

    def state_dict(self) -> dict:
        """Return what all ranks have in common, and a list of bytes, what each has of its own.
        Every rank must call it."""
        state, file = state_dict(self.model), io.BytesIO()
        torch.save({key: state.pop(key) for key in ("histories", "moved")}, file)
        ranks = [file.getvalue()]
        if (group := dist.group.WORLD) is not None:
            meet([(group,)])
            ranks *= group.size()
            dist.all_gather_object(ranks, file.getvalue())
        return state | {RANKS: ranks}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore it, after the parameters; rank r of a run of other size has the histories of rank
        r % W of the W that saved. Every rank must call it. Raises as `fq.load_state_dict`."""
        load_state_dict(self.model, state_dict, self.allow_recipe_change)


# Loading #


class _Saved(NamedTuple):
    """A state that a model accepts; without modules if it is of another recipe.

    running:   the step whose recipe the model had: `step`, or the one before, as schedules switch
               when a step begins.
    modules:   by their names in the state; names: qualified name -> that name.
    codes:     weight name -> fingerprint, or None.
    moved:     module name -> product -> rung.
    skipped:   the step was skipped: its histories do not roll when it begins again.
    """

    step: int
    running: int
    seed: int
    modules: Mapping[str, Linear] = {}
    names: Mapping[str, str] = {}
    histories: Mapping[str, dict] = {}
    codes: dict[str, int] | None = None
    moved: Mapping[str, dict[str, str]] = {}
    skipped: bool = False


def load_state_dict(model: nn.Module, state: dict, allow_recipe_change: bool = False) -> None:
    """Restore what `state_dict(model)` returned, after the parameters. Every rank must call it.

    A model that follows a schedule has the recipe of the step that ran. Wrappers may be others.

    Raises ValueError, on every rank that shares weights, and leaves everything as it was, for what
    no `state_dict` returned; for a state of another recipe, schedule or other modules, unless
    allow_recipe_change=True (histories and codes of another recipe are then left out); for one of
    another rank of as many, whose histories are not this rank's; for weights whose codes are not
    those that were saved, naming them (drop state["codes"] to go on with other weights).

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> state = fq.state_dict(model)
    >>> fq.load_state_dict(model, state)  # after the weights: it compares their codes
    """
    with raises_on_all_ranks(itertools.chain(*axes_of(model))):
        saved = _check(model, state, allow_recipe_change)
    if saved.modules:
        _restore(model, saved)
    STEP.seed = saved.seed
    restart_steps(model, saved.step, saved.skipped)
    _follow(model, saved.running)
    for module in saved.modules.values():
        for history in histories_by_side(module).values():
            if _is_of_codes(module, history) and not saved.skipped:
                history.roll()  # saved with high-precision parameters, the step that ran is open
    _drop_codes(saved.modules.values())


def _check(model: nn.Module, state: dict, allow_recipe_change: bool) -> _Saved:
    """Read a state. Raises ValueError as `load_state_dict`, but for other codes."""
    if not isinstance(state, dict):
        raise ValueError(
            f"fq.load_state_dict takes what fq.state_dict returned, got {type(state).__name__}"
        )
    state = of_rank(state, _rank()[0])
    step = _integer(state, "step", range(2**62))
    seed = _integer(state, "seed", range(-(2**63), 2**63))
    digest = _part(state, "fingerprint", str)
    candidates = [(s, n) for s in (step, max(step - 1, 0)) for n in layer_names(model)]
    match = next((c for c in candidates if fingerprint(model, *c) == digest), None)
    if match is None and allow_recipe_change:
        return _Saved(step, step, seed)
    if match is None:
        raise ValueError(
            f"the saved state {_other_recipe(model, state, step)}; convert the model with the "
            "saved recipe and skip=, or pass allow_recipe_change=True"
        )
    if not allow_recipe_change and state.get("schedule") != _schedule_text(model):
        raise ValueError(
            f"the saved state follows the schedule {state.get('schedule')}, this model "
            f"{_schedule_text(model)}; give it the saved one (fq.set_recipe), or pass "
            "allow_recipe_change=True"
        )
    running, names = match
    modules = converted_modules(model, names)
    codes = None if state.get("codes") is None else _part(state, "codes", dict)
    if codes is not None and not all(isinstance(value, int) for value in codes.values()):
        raise ValueError(
            "the saved state's codes are no integers: it is damaged; load another checkpoint"
        )
    moved, saved_by, skipped = _read_moved(state.get("moved", "{}"), modules)
    histories, is_per_rank = _part(state, "histories", dict), bool(moved)
    for name, side, history in _sides_at(model, modules, running):
        if f"{name}.{side}" not in histories:
            raise ValueError(
                f"the saved state has no amax history of {name}.{side}: it is of another rank, or "
                "damaged; load what fq.state_dict returned on this rank"
            )
        history.check_state(f"{name}.{side}", histories[f"{name}.{side}"])
        is_per_rank |= not history.keep_when_skipped
    if is_per_rank and not any(module in SHARED for module in model.modules()):
        _check_rank(saved_by)
    return _Saved(step, running, seed, modules, names, histories, codes, moved, skipped)


def _check_rank(saved_by: list[int] | None) -> None:
    """Raise ValueError for the state of another rank of as many."""
    rank, world = _rank()
    if saved_by is not None and saved_by[1] == world and saved_by[0] != rank:
        raise ValueError(
            f"rank {rank} is given the state of rank {saved_by[0]}, and amax histories of "
            "activations are each rank's own: under one key the last to write it wins, so save "
            "fq.steps.TrainingState(model), which holds those of all ranks; to go on with the "
            f"histories of another rank, take {SAVED_BY!r} out of the JSON of state['moved']"
        )


def _part(state: dict, key: str, kind: type):
    if not isinstance(state.get(key), kind):
        saved = type(state[key]).__name__ if key in state else "nothing"
        raise ValueError(
            f"{key} of the saved state is {saved}, wanted {kind.__name__}; give what fq.state_dict "
            "returned"
        )
    return state[key]


def _integer(state: dict, key: str, among: range) -> int:
    value = state.get(key)
    if type(value) is not int or value not in among:
        raise ValueError(
            f"{key} of the saved state is {value!r}, wanted an integer in [{among.start}, "
            f"{among.stop}); give what fq.state_dict returned"
        )
    return value


def _other_recipe(model: nn.Module, state: dict, step: int) -> str:
    """Say how the recipe of a state differs from the model's, or which weights one has alone."""
    recipe = _recipe_text(model)
    if state.get("recipe") != recipe:
        return (
            f"is of recipe {state.get('recipe')} (fingerprint {state['fingerprint']}), this "
            f"model's is {recipe} ({fingerprint(model, step)})"
        )
    saved = set(state.get("codes") or ())
    here = {f"{n}.weight".lstrip(".") for n in layer_names(model)[0].values()}
    sides = (saved - here, "the saved one has"), (here - saved, "the model has")
    alone = [f"{', '.join(sorted(names)[:3])} {owner} alone" for names, owner in sides if names]
    difference = "; ".join(alone) or "their recipes are exchanged, or experts others"
    return f"has this recipe, {recipe}, for other layers: {difference}"


def _read_moved(
    text: object, modules: Mapping[str, Linear]
) -> tuple[dict[str, dict[str, str]], list[int] | None, bool]:
    """Return (moved, [rank, world size] or None, is_skipped) of `state["moved"]`. Raises
    ValueError."""
    facts = parsed(text)
    is_valid = isinstance(facts, dict)
    moved = facts if isinstance(facts, dict) else {}
    saved_by, skipped = moved.pop(SAVED_BY, None), moved.pop(SKIPPED, False)
    is_valid &= isinstance(skipped, bool)
    is_valid &= saved_by is None or (
        isinstance(saved_by, list) and list(map(type, saved_by)) == [int, int]
    )
    ladders = {product.name: ladder_of(product) for product in PRODUCTS}
    for name, rungs in moved.items():
        if isinstance(rungs, list):  # of a file from before there were rungs
            moved[name] = rungs = dict.fromkeys(rungs, EXACT)
        is_valid &= isinstance(rungs, dict) and all(
            rung in ladders.get(product, ()) for product, rung in rungs.items()
        )
    if not is_valid:
        raise ValueError(
            f"moved of the saved state is not what fq.state_dict writes: {str(text)[:80]!r}; load "
            "another checkpoint"
        )
    return {name: rungs for name, rungs in moved.items() if name in modules}, saved_by, skipped


def _sides_at(
    model: nn.Module, modules: Mapping[str, Linear], step: int
) -> Iterator[tuple[str, str, AmaxHistory]]:
    """Yield (module name, "slot.direction", a history of that length) per delayed side in a
    step."""
    plans = {id(m): m.plan for m in modules.values()}
    for m, recipe in _scheduled(model, step):
        plans[id(m)] = m.runtime.plan_of(recipe, m.weight.device)
    for name, module in modules.items():
        for slot in QUANTIZED_TYPES:
            hybrid = plans[id(module)].hybrid(slot)
            for d in hybrid.delayed_directions:
                if isinstance(scaling := hybrid.side(d).scaling, DelayedScaling):
                    yield name, f"{slot}.{d.value}", AmaxHistory(scaling, 1.0, slot == "weight")


def _is_of_codes(module: Linear, history: AmaxHistory) -> bool:
    """Return whether it rolls where the optimizer encodes weights, not where a step begins."""
    return history.keep_when_skipped and module.runtime.weight_state.holds_codes


def _restore(model: nn.Module, saved: _Saved) -> None:
    """Load histories and rungs, and switch to the recipe of the step, which codes of weights depend
    on. Raises ValueError for codes that were not saved; then all is as it was."""
    modules, step = list(saved.modules.values()), steps_of(model).number
    for module in modules:
        histories_by_side(module)  # allocates those that no forward has allocated yet
    # experts of one weight share one dict
    stores = {id(s): s for s in (m.runtime.weight_state.histories for m in modules)}.values()
    before = [(s, key, h, h.state_dict()) for s in stores for key, h in s.items()]
    plans = [m.plan for m in modules]
    _follow(model, saved.running)
    for name, module in saved.modules.items():
        for side, history in histories_by_side(module).items():
            history.load_state_dict(saved.histories[f"{name}.{side}"])
    _drop_codes(modules)
    wrong = _wrong_codes(model, saved)
    if not wrong:
        for name, module in saved.modules.items():
            module.runtime.move_to(saved.moved.get(name, {}))
        return
    _follow(model, step)
    for module, plan in zip(modules, plans):
        module.runtime.set_plan(plan)
    for store, key, history, values in before:
        store.setdefault(key, history).load_state_dict(values)
    _drop_codes(modules)
    raise ValueError(
        f"the codes of {', '.join(wrong)} are not those that were saved: load the parameters of "
        "the same checkpoint before fq.load_state_dict, in their dtype, frozen only if they were"
    )


def _follow(model: nn.Module, step: int) -> None:
    for scheduled, schedule in schedules_of(model).items():
        switch(scheduled, schedule, step)


def _drop_codes(modules: Iterable[Linear]) -> None:
    """Free the codes of quantized parameters, whose delayed scale has changed."""
    for module in modules:
        state = module.runtime.weight_state
        if isinstance(state, QuantizedWeightState):
            state.drop_codes()


def _wrong_codes(model: nn.Module, saved: _Saved) -> list[str]:
    """Name the weights whose codes have another fingerprint than saved, alike on every rank."""
    if saved.codes is None:
        return []
    codes = _codes(model, saved.names, saved.codes)
    names = [name for name in codes if saved.codes.get(name) != codes[name]]
    return names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} more"]

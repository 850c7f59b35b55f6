# SPDX-License-Identifier: Apache-2.0
"""Count passes, forwards that a backward may follow: each begins a step, or is a micro-batch of it.

[Note: where a pass begins]
The first of these begins it; the others find that it has begun:

    the model's call         the hook of a model that counts (`steps.count_steps`)
    FSDP2's forward          of a root, by a call or a method: before weights are gathered
    a layer                  that runs outside both (a method, `model.forward`, a compiled function,
                             a layer that no model counts): if it has run in this pass already
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..context import STEP, Autocast
from ..recipe import Schedule
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeightState
from ..tensor.weight_state import WeightState
from . import guard
from .plan import GemmPlan


class Runtime:
    """The part of `linear.runtime.LayerRuntime` that steps read.

    steps:        counts the steps of the layer's model; None: not counted yet.
    leads:        the layer begins the steps of graphs of a method of its model.
    ran_in:       the number of the pass in which the layer ran last; a copy inherits it.
    input_owner:  returns the layer that stores the amax histories of a shared input.
    """

    name: str
    ids: Tensor
    plan: GemmPlan
    steps: TrainingSteps | None = None
    leads = False
    ran_in: int | None = None
    weight_state: WeightState
    input_owner: Callable[[], Runtime | None] | None


class Layer(Protocol):
    """A module with a quantized weight (`linear.linear.Linear`)."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def plan(self) -> GemmPlan: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def trained(self) -> tuple[Tensor, int | None, bool]: ...

    def plan_in(self, override: Autocast, device: torch.device) -> GemmPlan: ...


class Scheduled(NamedTuple):
    """A schedule, and the function that switches a model to its recipe at a step."""

    schedule: Schedule
    switch: Callable[[nn.Module, Schedule, int, str | None], None]


# Models that follow a schedule of recipes (`fq.set_recipe`).
SCHEDULED: MutableMapping[nn.Module, Scheduled] = weakref.WeakKeyDictionary()
# Models whose ranks share amaxes (`fq.share_amaxes`): the function to call before histories roll.
SHARED: MutableMapping[nn.Module, Callable[[nn.Module, Collection[AmaxHistory]], None]] = (
    weakref.WeakKeyDictionary()
)


def follow_schedules(steps: TrainingSteps, step: int, layer: Layer | None = None) -> None:
    """Switch models to the recipe of a step. layer: runs now, so its recipe may not change."""
    for model, (schedule, switch) in list(SCHEDULED.items()):
        if own_steps(model) is steps:
            switch(model, schedule, step, None if layer is None else layer.runtime.name)


_PASSES = itertools.count()


class TrainingSteps:
    """Counts the passes of a model, or of the layers that a thread runs without one.

    step:          the step that began last, whose amaxes the histories collect; -1: none has begun.
    open:          it was not skipped: its histories roll when the next one begins.
    ahead:         graphs counted steps on their device that the host has not read: `step` is stale.
    is_by_hand_alone:  `begin_step(model=)` counts.
    is_applied:    an optimizer that holds parameters of the model has stepped in this step.
    current:       the pass; None: the next layer that a backward may follow begins one.
    inside:        how many calls of the model are running.
    awaits:        FSDP2's forward began the pass, and neither the model nor a layer has run in it.
    has_root:      forwards of FSDP2 begin passes: layers run in no others.
    by_pieces:     a layer, or a graph, began the last pass.
    is_counting:   the model's recipe needs steps.
    is_scheduled:  the model follows a schedule.
    model:         the model, if one counts.
    layers:        the layers whose histories roll.
    history_groups:  lists of histories of equal shape, which graphs roll together.
    """

    live: ClassVar[weakref.WeakSet[TrainingSteps]] = weakref.WeakSet()

    def __init__(self):
        self.step, self.open = -1, False
        self.is_counting = self.is_scheduled = self.has_run = self.has_root = False
        self.history_groups: list[list[AmaxHistory]] = []
        self._make_fleeting()

    def _make_fleeting(self) -> None:
        """Create what a copy does not inherit."""
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self.model: weakref.ref[nn.Module] | None = None
        self.current: int | None = None
        self.inside, self.ahead, self.awaits, self.by_pieces = 0, False, False, False
        self.is_by_hand_alone = self.is_applied = self._stood_still = False
        self._rolled: set[int] = set()  # ids of the histories that rolled when this step began
        self._counts: dict[torch.device, Tensor] = {}  # see `counts_on`
        self.live.add(self)

    def __getstate__(self) -> dict:
        self.catch_up()
        counted = "step", "open", "has_run", "has_root"
        planned = "is_counting", "is_scheduled", "history_groups"
        return {name: getattr(self, name) for name in counted + planned}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._make_fleeting()

    def collect(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Count the passes of a model with these layers. Inserted ones too, unless their own have
        run."""
        self.model = weakref.ref(model)
        OF_ROOT.clear()
        for layer in layers:
            if layer.runtime.steps is None or not layer.runtime.steps.has_run:
                layer.runtime.steps = self
            self.layers.add(layer)
            LOOSE.steps.layers.discard(layer)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that its passes train."""
        if (model := self.model and self.model()) is not None:
            yield from model.parameters()
        for layer in self.layers:
            yield layer.weight

    # The number #

    @property
    def is_orphaned(self) -> bool:
        """Whether its model is freed, and had not run: its layers are those of nobody's."""
        return not self.has_run and self.model is not None and self.model() is None

    @property
    def is_by_hand(self) -> bool:
        """Whether `begin_step` counts."""
        return STEP.counted_by_hand or self.is_by_hand_alone

    @property
    def number(self) -> int:
        """Return the step to save: the next; by hand the running one. Waits for graphs' counts."""
        if self.is_by_hand_alone:
            return self.step
        if STEP.counted_by_hand:
            return STEP.step
        self.catch_up()
        return self._next

    @property
    def _next(self) -> int:
        """Return the step that the next pass begins."""
        return max(self.step + self.open, 0)

    @property
    def is_skipped(self) -> bool:
        """Whether the step that began last was skipped."""
        return self.step >= 0 and not self.open

    def catch_up(self) -> None:
        """Read what graphs have counted from the device that runs them. Waits for it."""
        if self.ahead:
            following = [int(counts[0]) for counts in self._counts.values()]
            self.step, self.ahead = max(following, default=STEP.step + self.open) - self.open, False

    def _publish(self) -> None:
        """Write the host's count to every device."""
        self.ahead = False
        for counts in self._counts.values():
            with torch_compat.outside_modes():
                counts[0].fill_(self._next)
                counts[1].fill_(self.open)

    def continue_at(self, step: int, is_open: bool) -> None:
        """Continue behind `step`, or in it if it was skipped."""
        self.step, self.open, self.current = step, is_open, None
        self.is_by_hand_alone = self.is_applied = self.awaits = False
        self._publish()

    # Passes #

    def enter(self, trains: bool, is_root: bool = False) -> None:
        """Begin a pass of a call of the model, or of a forward of FSDP2, in which the model is.

        trains:  a backward may follow.
        """
        if not is_root:
            self.call()
        elif self.inside:
            return  # of the model
        if not trains:
            self.current = self.current if self.inside > 1 else None
            return
        if self.awaits:
            self._show()
        else:
            self.begin()
        self.awaits = is_root

    def call(self, change: int = 1) -> None:
        """Note that a call of the model begins, or ends. torch.compile traces it."""
        self.inside += change
        STEP.calls += change

    def begin(self, layer: Layer | None = None) -> None:
        """Begin the next step. By hand, the pass may be another micro-batch of the running step.

        layer:  has begun the pass.
        """
        is_part = layer is not None and self.model is not None
        if is_part and STEP.is_captured and not STEP.is_graphed:
            return  # a capture of a part of the model, whose calls count
        if layer is not None and not self.is_by_hand:
            follow_schedules(self, self.number, layer)  # raises before anything changes
        self.by_pieces, self.has_run = layer is not None, True
        if self.is_by_hand and self._moves():
            self._begin_at(self.number)
            self._show()
        elif STEP.is_captured:  # replays count on the device
            self._roll()
            STEP.count_on_devices()
            for counts in self._counts.values():
                counts[0].add_(1)
            self.ahead = True
        else:
            self._begin_at(self.number)
            self._publish()
            STEP.show(self.step)
            guard.apply_underflow_policy()
            follow_schedules(self, self.step)
        self.current = next(_PASSES)  # the pass has begun, as nothing has raised

    def _begin_at(self, step: int) -> None:
        if self.step != step:
            self._roll()
            self.is_applied = False
        self.step, self.open = step, True

    def _show(self) -> None:
        if not self.ahead and STEP.step != self.step:
            STEP.show(self.step)

    def _roll(self) -> None:
        self._rolled = set()
        if self.open:
            copied = itertools.chain(*self.history_groups)  # of a copy, before it runs
            unrolled = self._unrolled([*copied, *histories_of(self.layers)])
            if unrolled or SHARED:
                roll(unrolled)

    def _unrolled(self, histories: Iterable[AmaxHistory]) -> list[AmaxHistory]:
        unrolled = {id(h): h for h in histories if id(h) not in self._rolled}
        self._rolled |= unrolled.keys()
        return list(unrolled.values())

    def run(self, layer: Layer) -> None:
        """Let a layer run in the current pass."""
        runtime = layer.runtime
        if layer not in self.layers:
            self.layers.add(layer)
            if runtime.ran_in is not None:  # amaxes that the copied layer had not rolled yet
                roll(self._unrolled(histories_of([layer])))
        runtime.ran_in, self.awaits = self.current, False

    # In graphs #

    def begin_in_graph(self, device: torch.device) -> None:
        """Begin a step of a model that is being traced, with the count on `device` alone."""
        self.has_run = self.by_pieces = True
        if self.is_by_hand:  # `begin_step` rolls
            return
        STEP.expect_counts_of_graphs()
        step, is_open = self.counts_on(device).split(1)
        for histories in self.history_groups:
            for target, values in AmaxHistory.advanced_group(histories, unchanged=is_open == 0):
                target.copy_(values)
        STEP.show_in_graph(device, step)
        step.add_(1)
        is_open.fill_(1)
        self.open = self.ahead = STEP.ahead = True

    # All models of the process share the step's tensor, so graphs cannot count in it.
    def counts_on(self, device: torch.device) -> Tensor:
        """Return int64 [2], the next step and `open`, for graphs; allocate it before a trace."""
        if device not in self._counts:
            with torch.inference_mode(False):  # which torch.compile traces
                self._counts[device] = torch.tensor(
                    [self._next, self.open], dtype=torch.int64, device=device
                )
            torch_compat.mark_static_address([self._counts[device]])
        return self._counts[device]

    # By hand #

    def begin_by_hand(self, step: int, is_alone: bool) -> None:
        """Begin a step that `begin_step` counts, for this model alone or for all."""
        moves, self.is_applied, self.is_by_hand_alone = self.step != step, False, is_alone
        self._begin_at(step)
        if moves:
            follow_schedules(self, step)

    def _moves(self) -> bool:
        """Whether `begin_step` was called since the last step of an optimizer: else the caller has
        stopped to count. It ends then, if it was of this model alone."""
        if not self.is_applied or self.step != self.number:
            return True
        if self.is_by_hand_alone:
            self.end_by_hand()
        elif not self._stood_still:
            self._stood_still = True
            warnings.warn(
                f"fq.begin_step({self.step}) was called once, and the model has trained on since: "
                "random bits, schedules and delayed scales stay those of this step; call "
                "fq.begin_step(step) in each step, or only fq.begin_step(seed=) for a seed",
                stacklevel=8,
            )
        return STEP.counted_by_hand

    def end_by_hand(self) -> None:
        """Count passes from the next one on."""
        if self.is_by_hand_alone:
            self.is_by_hand_alone = False
            self._publish()
            STEP.micro_batch *= STEP.counted_by_hand

    def skip(self) -> None:
        """Let the next pass begin the running step again: it was not applied."""
        for counts in self._counts.values():
            if not self.is_by_hand:
                counts[0].sub_(counts[1]).clamp_(min=0)
            counts[1].zero_()
        self.open = self.is_applied = False
        STEP.recount()


class _LooseLayers(threading.local):
    """Layers that a thread runs without a model that counts. A step begins when a layer runs that
    has already run in the current step."""

    def __init__(self):
        self.steps, self._last_restart = TrainingSteps(), [STEP.restarted]  # see context._Entered

    def caught_up(self) -> TrainingSteps:
        """Return the steps, which continue at the step that `STEP.step` was set to since the last
        call."""
        if self._last_restart[0] is not STEP.restarted:
            self._last_restart[0] = STEP.restarted
            self.steps.continue_at(*STEP.restarted)
        return self.steps


LOOSE = _LooseLayers()


def own_steps(module: nn.Module) -> TrainingSteps | None:
    """Return the steps of a module: a layer stores them in its runtime, a model in itself."""
    runtime = module.__dict__.get("runtime")
    return runtime.steps if isinstance(runtime, Runtime) else module.__dict__.get("_training_steps")


def set_steps(module: nn.Module, steps: TrainingSteps) -> None:
    OF_ROOT.clear()
    runtime = module.__dict__.get("runtime")
    if isinstance(runtime, Runtime):
        runtime.steps = steps
    else:
        module.__dict__["_training_steps"] = steps


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers of a model once each, also those that are no submodules: experts of one
    weight, and transposed ones."""
    layers = (layer for m in model.modules() for layer in getattr(m, "_matrix_layers", ()))
    return list(dict.fromkeys(layer for layer in layers if "runtime" in layer.__dict__))


def steps_within(model: nn.Module) -> list[TrainingSteps]:
    """Return the steps of all layers of a model, whose layers that no model counts it counts from
    now on."""
    layers = layers_of(model)
    if alone := [layer for layer in layers if layer.runtime.steps is None]:
        steps = continued(model)
        steps.is_counting = any(layer.plan.needs_steps for layer in alone)
        steps.collect(model, alone)
    return list(dict.fromkeys(s for layer in layers if (s := layer.runtime.steps) is not None))


# Root of FSDP2 -> its layers (`root_context.RootLayers`); dropped when a model counts.
OF_ROOT: MutableMapping[nn.Module, Any] = weakref.WeakKeyDictionary()


def steps_of(model: nn.Module) -> TrainingSteps:
    """Return the steps of a model, of a model inside it, or of layers that run without a model."""
    loose = LOOSE.caught_up()
    counted = [steps for m in model.modules() if (steps := own_steps(m)) is not None]
    if any(layer in loose.layers for layer in layers_of(model)):
        counted.append(loose)
    return max(counted, key=lambda steps: steps.has_run, default=None) or TrainingSteps()


def continued(model: nn.Module) -> TrainingSteps:
    """Return new steps for a model, which continue those of its layers that no model counted."""
    steps, before = TrainingSteps(), steps_of(model)
    if before is LOOSE.steps:
        before.catch_up()
        steps.continue_at(before.step, before.open)
    return steps


def restart_steps(model: nn.Module, step: int, skipped: bool = False) -> None:
    """Let the next pass of a model, or of layers without a model, begin `step`; by hand, `step` is
    the one that ran.

    skipped:  the histories collect the amaxes of `step` itself.
    """
    STEP.step = step
    last = (step, False) if skipped else (step - 1, True)
    for module in model.modules():
        if (steps := own_steps(module)) is not None:
            steps.continue_at(*last)
    if skipped:
        STEP.restarted = last
    STEP.publish()
    STEP.recount()
    # whose loaded histories roll when the step begins
    LOOSE.steps.layers.update(layer for layer in layers_of(model) if layer.runtime.steps is None)


def histories_of(layers: Iterable[Layer]) -> list[AmaxHistory]:
    """Return every amax history that rolls with the steps of these layers, each once. Experts of
    one weight share histories; layers of one input share the input's histories.

    Weight histories of quantized parameters and of synced weights are omitted. They roll when the
    weights are encoded, after an optimizer's step.
    """
    histories: list[AmaxHistory] = []
    for layer in layers if AmaxHistory.live else ():
        state = layer.runtime.weight_state
        after_steps = isinstance(state, QuantizedWeightState) or state.weight_sync is not None
        for (_, slot, *_), history in state.histories.items():
            if not (after_steps and slot == "weight"):
                histories.append(history)
        if (owner := layer.runtime.input_owner) is not None and (first := owner()) is not None:
            shared = first.weight_state.histories
            histories += [h for (_, slot, *_), h in shared.items() if slot == "input"]
    return list(dict.fromkeys(histories))


@torch.no_grad()
def roll(histories: Collection[AmaxHistory], skipped: Tensor | None = None) -> None:
    """End the step of these histories. skipped: as in `AmaxHistory.advanced`."""
    for model, share in list(SHARED.items()):
        share(model, histories)
    torch_compat.copy_all(AmaxHistory.advanced(histories, skipped))

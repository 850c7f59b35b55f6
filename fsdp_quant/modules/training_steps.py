# SPDX-License-Identifier: Apache-2.0
"""Begin training steps, and run what belongs around them and around an optimizer's step, in order.

A step begins with a training forward (`TrainingSteps`) or with `begin_step`. Optimizers begin no
steps, so training does not depend on the optimizer: wrapped, several, or unknown to torch.

    a step begins            amax histories roll (`roll`); the device learns the step (`STEP`);
                             `_after_step_begins`
    an optimizer steps       `_before_optimizer_step`; the step itself; `_after_optimizer_step`
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..context import STEP
from ..optim.wrapped import optimizers_inside
from ..recipe import Schedule
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_weight import QuantizedWeight, QuantizedWeightState
from ..tensor.refresh import refresh_codes
from ..tensor.weight_state import WeightState
from . import guard
from .bad_splits import raise_bad_splits


class Runtime:
    """The part of `modules.layer_runtime.LayerRuntime` that steps read.

    steps:        counts the steps of the layer's model; None: not counted yet.
    input_owner:  returns the layer that stores the amax histories of a shared input.
    """

    name: str
    steps: TrainingSteps | None = None
    weight_state: WeightState
    input_owner: Callable[[], Runtime | None] | None


class Layer(Protocol):
    """A module with a quantized weight (`modules.linear.Linear`)."""

    training: bool

    @property
    def runtime(self) -> Runtime: ...


class Scheduled(NamedTuple):
    """A schedule, and the function that switches a model to its recipe at a step."""

    schedule: Schedule
    switch: Callable[[nn.Module, Schedule, int], None]


# Models that follow a schedule of recipes (`fq.set_recipe`).
SCHEDULED: MutableMapping[nn.Module, Scheduled] = weakref.WeakKeyDictionary()
# Models whose ranks share amaxes (`fq.share_amaxes`), and the function that does before a roll.
SHARED: MutableMapping[nn.Module, Callable[[nn.Module, Collection[AmaxHistory]], None]] = (
    weakref.WeakKeyDictionary()
)


# Around steps, in order #


def _after_step_begins(model: nn.Module | None, step: int) -> None:
    """Run what follows the beginning of a step.

    model:  the model whose step begins. None: all models (`begin_step`), or loose layers.
    """
    guard.apply_underflow_policy()
    for other, (schedule, switch) in list(SCHEDULED.items()):
        begins = STEP.counted_by_hand if model is None else own_steps(other) is own_steps(model)
        if begins:
            switch(other, schedule, step)


def _before_optimizer_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Run what must precede every optimizer's step. Raises ValueError if the step must not run."""
    _check_masters(optimizer)
    raise_bad_splits()


def _after_optimizer_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Run what follows every optimizer's step: its parameters have changed."""
    STEP.weight_events += 1
    weights = [w for group in optimizer.param_groups for w in weights_of(group["params"])]
    if quantized := [w for w in weights if isinstance(w, QuantizedWeight)]:
        _encode_after_step(quantized, getattr(optimizer, "found_inf", None))
    guard.apply_underflow_policy()


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)


# Counting training forwards #


class TrainingSteps:
    """Counts the training forwards of a model, or of the layers that a thread runs without one.

    next:          the step that the next training forward begins.
    open:          a step has begun and was not skipped: its histories roll when the next begins.
    traced:        a graph of torch.compile begins the steps.
    ahead:         graphs counted steps on their device that the host has not read: `next` is stale.
    is_counting:   a hook of the model calls `begin`.
    is_scheduled:  the model follows a schedule.
    has_run:       `begin` was called.
    layers:        layers of the model, collected when its first training forward begins.
    alike:         lists of histories of equal shape, which graphs roll together.
    at:            the step whose amaxes the histories collect.
    """

    live: ClassVar[weakref.WeakSet[TrainingSteps]] = weakref.WeakSet()

    def __init__(self):
        self.next, self.open, self.traced, self.ahead = 0, False, False, False
        self.is_counting = self.is_scheduled = self.has_run = False
        self.layers: list[weakref.ref] | None = None
        self.alike: list[list[AmaxHistory]] = []
        self.at: int | None = None
        self._counts: dict[torch.device, Tensor] = {}  # see `counts_on`
        self.live.add(self)

    def __getstate__(self) -> dict:
        self._catch_up()
        return self.__dict__ | {"traced": False, "layers": None, "_counts": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.live.add(self)

    @property
    def number(self) -> int:
        """The step to save: the next one; by hand the running one. Waits for counts of graphs."""
        if STEP.counted_by_hand:
            return STEP.step
        self._catch_up()
        return self.next

    def _catch_up(self) -> None:
        """Read what graphs have counted from the device that runs them. Waits for it."""
        if self.ahead:
            counted = [int(counts[0]) for counts in self._counts.values()]
            self.next, self.ahead = max(counted, default=STEP.step + self.open), False

    def _publish(self, step: int, is_open: bool) -> None:
        self.next, self.open, self.ahead = step, is_open, False
        for counts in self._counts.values():
            counts[0].fill_(step)
            counts[1].fill_(is_open)

    @property
    def is_skipped(self) -> bool:
        """Whether the step that began last was skipped."""
        return not self.open and (self.has_run or self.next > 0)

    def restart(self, step: int, skipped: bool = False) -> None:
        """Let the next training forward begin `step`; by hand, `step` is the one that ran.

        skipped:  the histories collect the amaxes of `step` itself.
        """
        self.continue_at(step, not skipped and (step > 0 or STEP.counted_by_hand))
        if skipped:
            self.at = step

    def continue_at(self, step: int, is_open: bool) -> None:
        self.at = None
        self._publish(step, is_open)

    def begin(
        self, histories: Callable[[], Collection[AmaxHistory]], model: nn.Module | None = None
    ) -> None:
        """Begin the next step, because a training forward begins. If steps are counted by hand, the
        forward may be another micro-batch of the running step."""
        self.has_run = True
        if STEP.counted_by_hand:
            if self.open and self.at != STEP.step:
                roll(histories())
            self.at, self.open = STEP.step, True
            return
        if STEP.is_captured:  # replays count on the device
            roll(histories())
            STEP.count_on_devices()
            for counts in self._counts.values():
                counts[0].add_(1)
            self.ahead = True
            return
        step = self.number
        if self.open:
            roll(histories())
        self.at = step
        self._publish(step + 1, True)
        STEP.show(step)
        _after_step_begins(model, step)

    def begin_in_graph(self, device: torch.device) -> None:
        """Begin a step of a model that is being traced, with the count on `device` alone."""
        self.has_run = self.traced = True
        if STEP.counted_by_hand:  # `begin_step` rolls
            self.open = True
            return
        step, is_open = self.counts_on(device).split(1)
        for histories in self.alike:
            for target, values in AmaxHistory.advanced_alike(histories, kept=is_open == 0):
                target.copy_(values)
        STEP.show_in_graph(device, step)
        step.add_(1)
        is_open.fill_(1)
        self.open = self.ahead = STEP.ahead = True

    # All models of the process share the step's tensor, so graphs cannot count in it.
    def counts_on(self, device: torch.device) -> Tensor:
        """Return int64 [2], `next` and `open`, for graphs; allocate it before a trace."""
        if device not in self._counts:
            with torch.inference_mode(False):
                self._counts[device] = torch.tensor(
                    [self.next, self.open], dtype=torch.int64, device=device
                )
            torch_compat.mark_static_address([self._counts[device]])
        return self._counts[device]

    def begin_by_hand(self) -> None:
        """Begin another step of a model whose forwards the host does not see (graphs, parts)."""
        forwards_are_seen = self.has_run and not self.traced
        if forwards_are_seen or self.at == STEP.step:
            return
        if self.open or not self.has_run:
            roll([h for histories in self.alike for h in histories])
        self.at = STEP.step

    def skip(self) -> None:
        """Let the next training forward begin the running step again: it was not applied."""
        for counts in self._counts.values():
            if not STEP.counted_by_hand:
                counts[0].sub_(counts[1])
            counts[1].zero_()
        if not STEP.counted_by_hand:
            self.next -= self.open
        self.open = False


_PASSES = itertools.count()


class _LooseLayers(threading.local):
    """Layers that a thread runs without a model that counts. A step begins when a layer runs that
    has already run in the current step.

    A layer stores the number of the pass in which it ran last (`_ran_in`); a copy inherits it.
    _pass:     the current pass; None: the next layer begins one.
    _rolled:   ids of the histories that rolled when this step began.
    """

    def __init__(self):
        self.steps = TrainingSteps()
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self._pass: int | None = None
        self._restored = False
        self._rolled: set[int] = set()
        self._seen = STEP.restarted

    def catch_up(self) -> None:
        """Continue at the step that `STEP.step` was set to since the last call."""
        if self._seen is not STEP.restarted:
            self._seen = STEP.restarted
            self.steps.continue_at(*self._seen)
            self._pass, self._restored = None, self.steps.open

    def run(self, layer: Layer) -> None:
        self.catch_up()
        is_new, ran_in = layer not in self.layers, layer.__dict__.get("_ran_in")
        current = self._pass
        if is_new:
            self.layers.add(layer)
        if STEP.counted_by_hand or current is None or ran_in == current:
            before, rolled, self._rolled = self.steps.at, self._rolled, set()
            self.steps.begin(lambda: self._unrolled(self.layers))
            if current is None or not STEP.counted_by_hand or self.steps.at != before:
                self._pass, self._restored = next(_PASSES), self._restored and current is None
            else:
                self._rolled = rolled
        if is_new and current == self._pass and (self._restored or ran_in not in (None, current)):
            # amaxes that the checkpoint, or the copied layer, had not rolled yet
            roll(self._unrolled([layer]))
        layer.__dict__["_ran_in"] = self._pass

    def _unrolled(self, layers: Iterable[Layer]) -> list[AmaxHistory]:
        """Return the histories of these layers that have not rolled in this step. `begin_step` may
        have rolled some before `fully_shard` gathered weights."""
        counts = {
            id(steps): steps for layer in layers if (steps := layer.runtime.steps) is not None
        }
        by_hand = [s for s in counts.values() if STEP.counted_by_hand and s.at == STEP.step]
        self._rolled |= {id(h) for steps in by_hand for alike in steps.alike for h in alike}
        found = [h for h in histories_of(layers) if id(h) not in self._rolled]
        self._rolled.update(map(id, found))
        return found


_LOOSE = _LooseLayers()


def own_steps(module: nn.Module) -> TrainingSteps | None:
    """Return the steps of a module: a layer stores them in its runtime, a model in itself."""
    runtime = module.__dict__.get("runtime")
    if isinstance(runtime, Runtime):
        return runtime.steps
    return module.__dict__.get("_training_steps")


def set_steps(module: nn.Module, steps: TrainingSteps) -> None:
    runtime = module.__dict__.get("runtime")
    if isinstance(runtime, Runtime):
        runtime.steps = steps
    else:
        module.__dict__["_training_steps"] = steps


def note_forward(layer: Layer, grad: bool) -> None:
    """Count the forward of a layer that needs steps, neither recomputed nor traced.

    grad:  a backward may follow.

    Does nothing if a model counts steps: the step began with the model's forward.
    """
    steps = layer.runtime.steps
    is_step = STEP.counted_by_hand or (grad and layer.training)
    if not is_step or (steps is not None and steps.has_run):
        return
    if steps is not None and steps.is_scheduled and not STEP.counted_by_hand:
        raise ValueError(
            f"{layer.runtime.name}: its model follows a schedule and runs by pieces, so nobody "
            "knows when a step begins; call fq.begin_step(step), or the model"
        )
    _LOOSE.run(layer)


def steps_of(model: nn.Module) -> TrainingSteps:
    """Return the steps of a model, of a model inside it, or of layers that run without a model."""
    _LOOSE.catch_up()
    modules = list(model.modules())
    counted = [steps for m in modules if (steps := own_steps(m)) is not None]
    # experts of one weight are not submodules
    packed = [layer for m in modules for layer in m.__dict__.get("_linears", ())]
    if any(m in _LOOSE.layers for m in (*modules, *packed)):
        counted.append(_LOOSE.steps)
    run = [steps for steps in counted if steps.has_run]
    return next(iter([*run, *counted]), None) or TrainingSteps()


def continued(model: nn.Module) -> TrainingSteps:
    """Return new steps for a model, which continue those of its layers that ran alone."""
    steps, before = TrainingSteps(), steps_of(model)
    if before is _LOOSE.steps and before.has_run:
        steps.restart(before.number)
    return steps


def restart_steps(model: nn.Module, step: int, skipped: bool = False) -> None:
    """`TrainingSteps.restart` of a model, or of layers without a model."""
    for module in model.modules():
        if (steps := own_steps(module)) is not None:
            steps.restart(step, skipped)
    STEP.step = step
    if skipped:
        STEP.restarted = step, False
    STEP.publish()


def histories_of(layers: Iterable[Layer]) -> list[AmaxHistory]:
    """Return every amax history that rolls with the steps of these layers, each once. Experts of
    one weight share histories; layers of one input share the input's histories.

    Weight histories of quantized parameters and of synced weights are omitted. They roll when the
    weights are encoded, after an optimizer's step.
    """
    found: dict[int, AmaxHistory] = {}
    for layer in layers:
        state = layer.runtime.weight_state
        after_steps = isinstance(state, QuantizedWeightState) or state.weight_sync is not None
        for (_, slot, *_), history in state.histories.items():
            if not (after_steps and slot == "weight"):
                found[id(history)] = history
        if (lead := layer.runtime.input_owner) is not None and (first := lead()) is not None:
            shared = first.weight_state.histories
            found |= {id(h): h for (_, slot, *_), h in shared.items() if slot == "input"}
    return list(found.values())


@torch.no_grad()
def roll(histories: Collection[AmaxHistory], skipped: Tensor | None = None) -> None:
    """End the step of these histories. skipped: as in `AmaxHistory.advanced`."""
    for model, share in list(SHARED.items()):
        share(model, histories)
    torch_compat.copy_all(AmaxHistory.advanced(histories, skipped))


# By hand #


def begin_step(step: int | None = None, micro_batch: int = 0, seed: int | None = None) -> None:
    """Set the step, micro-batch and seed of the random bits. Schedules read the step.

    step:  the optimizer step that begins (None: keep). From the first call with a step on, only
           these calls count steps. Before it, each training forward of a model begins the next
           step, so each micro-batch is a step.

    A training forward runs in training mode with gradients enabled and is not a recomputation. If
    steps are counted by hand, amax histories roll in the first training forward of another step.
    Graphs of torch.compile and CUDA graphs count on the device. Schedules of a model that is
    compiled as a whole need this call.

    >>> fq.begin_step(3, micro_batch=1)
    >>> fq.state_dict(fq.convert(nn.Sequential(nn.Linear(64, 32)), "nvfp4"))["step"]
    3
    """
    if step is not None and (not hasattr(step, "__index__") or step < 0):
        raise ValueError(
            f"fq.begin_step: step is {step!r}; wanted the number of the optimizer step that "
            "begins, an int from 0"
        )
    STEP.check_writable()
    STEP.counted_by_hand = STEP.counted_by_hand or step is not None
    STEP.seed = STEP.seed if seed is None else seed
    STEP.micro_batch = micro_batch
    if step is None:
        STEP.publish()
        return
    _LOOSE.catch_up()
    moved = step != STEP.step
    STEP.show(step)
    if moved:
        _after_step_begins(None, step)
    for steps in list(TrainingSteps.live):
        steps.begin_by_hand()


def skip_step() -> None:
    """Discard the activation and gradient amaxes of the running step, because the optimizer did not
    apply it. The next step repeats it.

    Amaxes of weights are kept, because the weights are the same in the repeated step. The amaxes of
    several micro-batches are discarded together only if `fq.begin_step` counts them as one step.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.fp8_delayed())
    >>> layer(torch.ones(2, 64)).sum().backward()
    >>> fq.skip_step()         # a GradScaler left the optimizer's step out
    """
    _LOOSE.catch_up()
    for history in AmaxHistory.live:
        history.discard_step()
    for steps in list(TrainingSteps.live):
        steps.skip()


def sync(model: nn.Module) -> None:
    """Quantize quantized parameters again, whose masters others wrote. Every rank calls it.

    >>> with fq.quantized_model_init("mxfp8"):
    ...     model = nn.Sequential(fq.Linear(64, 32))
    >>> optimizer = fq.optim.FusedAdam(model.parameters())
    >>> fq.sync(model)
    """
    weights = [w for w in weights_of(model.parameters()) if isinstance(w, QuantizedWeight)]
    for weight in weights:
        weight.state.mark_written()
    refresh_codes(weights)


# Optimizers #


def weights_of(tensors: Iterable[Tensor]) -> Iterator[FSDPHooks]:
    """Yield the WeightShards and QuantizedWeights among parameters, also inside DTensors."""
    for tensor in tensors:
        local = torch_compat.local_of(tensor)
        if isinstance(local, FSDPHooks):
            yield local


def _check_masters(optimizer: Optimizer) -> None:
    """Raise ValueError for quantized parameters whose masters no (inner) optimizer holds."""
    holders = None
    for group in optimizer.param_groups:
        for p in group["params"]:
            local = torch_compat.local_of(p)
            if not isinstance(local, QuantizedWeight) or not p.requires_grad:
                continue
            if local.is_held_by([optimizer]):
                continue
            holders = holders or optimizers_inside(optimizer)
            if not local.is_held_by(holders):
                raise ValueError(
                    f"{local.state.name} is a quantized parameter, and this "
                    f"{type(optimizer).__name__} holds no fp32 master of it; step it with "
                    "fq.optim.FusedAdam or an optimizer of fq.optim.wrap(..), made while it "
                    "requires grad on the rank that steps it (shard by fully_shard), or build the "
                    "model without fq.quantized_model_init"
                )


@torch_compat.never_compiled
def _encode_after_step(quantized: list[QuantizedWeight], skipped: Tensor | None) -> None:
    """Roll the weight histories of masters that an optimizer wrote, and quantize the masters.

    skipped:  found_inf of a GradScaler, on the device; not 0 if the masters are unchanged.

    A second call for the same step finds current codes and rolls nothing.
    """
    for weight in quantized:
        weight.state.pending = True
    stale = [w for w in quantized if not all(map(w.is_current, w.state.quantizer.encodings))]
    histories = {
        id(h): h
        for w in stale
        for (_, slot, *_), h in w.state.histories.items()
        if slot == "weight"
    }
    if skipped is not None:
        skipped = torch_compat.local_of(skipped).detach().reshape(()) != 0
    torch_compat.copy_all(AmaxHistory.advanced(histories.values(), skipped))
    refresh_codes(quantized)

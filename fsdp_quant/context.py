# SPDX-License-Identifier: Apache-2.0
"""What changes between steps: the random key, the step, codes of quantized parameters, and
`autocast`.

Seed, step, micro-batch and token offset are read from an int64 tensor on the device, so that a
compiled or captured step reads new values without being traced or captured again. Contexts
(`autocast`, `token_offset`, `quantized_model_init`) belong to the thread that entered them; a
backward sees those of the thread that called it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .ops.reference import PROBED_STEPS
from .recipe import Recipe, as_recipe, identity
from .scaling import AmaxHistory
from .tensor import torch_compat
from .tensor.fsdp_hooks import FSDPHooks
from .tensor.quantized_weight import QuantizedWeight, QuantizedWeightState, refresh_codes
from .tensor.weight_state import WeightState

# Layout of the step's tensor: int64 [5].
STEP_FIELDS = ("seed", "step", "micro_batch", "token_offset", "data_parallel_rank")
_STEP = slice(1, 2)  # "step" in a step's tensor
_DEFAULT_OFFSET = -1  # data-parallel rank * local rows


# Contexts of a thread #


@dataclass(frozen=True)
class Autocast:
    """What overrides the recipes of modules: `recipe` (None: nothing), and the checkpoint it was
    entered in, if any."""

    recipe: Recipe | None
    checkpoint: object | None


class Contexts(NamedTuple):
    """What the contexts that a thread has entered ask for, the innermost of each kind.

    steps:  the step's tensors of `token_offset`, by device: what graphs read.
    """

    steps: Mapping[torch.device, Tensor]
    autocast: Autocast | None = None
    token_offset: int = _DEFAULT_OFFSET
    quantized_init: Recipe | None = None


_NO_CONTEXTS = Contexts({})


class _OfThread(threading.local):
    """Each thread begins with an attribute of its own: dynamo guards no class attribute that an
    instance may hide later."""

    def __init__(self):
        self.contexts = _NO_CONTEXTS


_OF_THREAD = _OfThread()


def contexts() -> Contexts:
    """The contexts of this thread; in a thread of the autograd engine, of the thread that called
    the backward."""
    own = _OF_THREAD.contexts
    if (
        not torch.compiler.is_compiling()
        and own is _NO_CONTEXTS
        and torch_compat.backward_is_running()
    ):
        return torch_compat.inherited("contexts", own)
    return own


def _enter(now: Contexts) -> None:
    _OF_THREAD.contexts = now
    if not torch.compiler.is_compiling():
        torch_compat.hand_down("contexts", now)


@contextlib.contextmanager
def _inside(**changes) -> Iterator[None]:
    before = _OF_THREAD.contexts
    _enter(before._replace(**changes))
    try:
        yield
    finally:
        _enter(before)


# Steps #


class StepState:
    """The step as the host knows it, and copies of it on every device that asked, one for each
    token offset in use."""

    def __init__(self):
        self._step, self.ahead = 0, False
        self.seed, self.micro_batch = 0, 0
        self.counted_by_hand = False
        self.weight_events = (
            0  # steps of any optimizer: weights that no class of ours watches may be others
        )
        # Called when another step begins: of a model, or of all (None: by `begin_step`, or of
        # layers that run without one).
        self.followers: list[Callable[[nn.Module | None, int], None]] = []
        # with what is to be rolled
        self.before_roll: list[Callable[[Collection[AmaxHistory]], None]] = []
        self._copies: weakref.WeakValueDictionary[tuple[torch.device, int], Tensor] = (
            weakref.WeakValueDictionary()
        )
        # of no offset; and what graphs read
        self._kept: dict[tuple[torch.device, int], Tensor] = {}

    @property
    def step(self) -> int:
        """The step that began last (before the first: 0). Waits for the device where graphs count
        on it."""
        if self.ahead:
            self._step, self.ahead = max(int(t[_STEP]) for t in self._kept.values()), False
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        """What runs without a model begins with this step."""
        self._step, self.ahead = step, False
        _ALONE.restart(step)

    @property
    def is_probed(self) -> bool:
        """What products lose to anchors may be counted in the step that runs (`modules.guard`); the
        device knows for sure."""
        return self.ahead or self._step % PROBED_STEPS == 0 or self.is_captured

    @property
    def token_offset(self) -> int:
        """Of this thread (`fq.token_offset`); below 0: data-parallel rank * local rows."""
        return contexts().token_offset

    @token_offset.setter
    def token_offset(self, offset: int) -> None:
        _enter(_OF_THREAD.contexts._replace(token_offset=offset, steps=self.for_graphs(offset)))

    def values(self, token_offset: int | None = None) -> list[int]:
        """`STEP_FIELDS`; token_offset: default, this thread's."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return [
            self.seed,
            self.step,
            self.micro_batch,
            self.token_offset if token_offset is None else token_offset,
            rank,
        ]

    def on(self, device: torch.device) -> Tensor:
        """int64 [5] (`STEP_FIELDS`) on `device`, of this thread's token offset; the same tensor
        object from call to call.

        A node of autograd that keeps it has the offset of its forward, and the step that runs when
        it is read.
        """
        return self._of_offset(device, contexts().token_offset)

    def _of_offset(self, device: torch.device, offset: int) -> Tensor:
        key = device, offset
        tensor = self._copies.get(key)
        if tensor is None:
            with torch.inference_mode(False):
                tensor = self._copies[key] = torch.tensor(self.values(offset), device=device)
            if offset == _DEFAULT_OFFSET:
                self._kept[key] = tensor
        if key not in self._kept and torch_compat.is_captured(tensor):
            self._kept[key] = tensor
        return tensor

    def prepare(self, device: torch.device) -> Tensor:
        """Let graphs on `device` find the step's tensor of every offset (`in_graph`); returns that
        of none."""
        tensor, here = self._of_offset(device, _DEFAULT_OFFSET), _OF_THREAD.contexts
        _NO_CONTEXTS.steps[device] = tensor
        if here.token_offset != _DEFAULT_OFFSET:
            here.steps[device] = self._of_offset(device, here.token_offset)
        return tensor

    def for_graphs(self, offset: int) -> Mapping[torch.device, Tensor]:
        """`Contexts.steps` of an offset; torch.compile traces it."""
        if torch.compiler.is_compiling():
            return {
                device: _moved(tensor, offset)
                for device, tensor in _OF_THREAD.contexts.steps.items()
            }
        if offset == _DEFAULT_OFFSET:
            return _NO_CONTEXTS.steps
        return {device: self._of_offset(device, offset) for device in _NO_CONTEXTS.steps}

    def in_graph(self, device: torch.device) -> Tensor:
        """`on` where a graph is traced: the graph has another tensor where it runs under another
        offset."""
        here = contexts()
        # none where layers were made inside a context within this one
        found = here.steps.get(device)
        return _moved(_NO_CONTEXTS.steps[device], here.token_offset) if found is None else found

    def show_in_graph(self, device: torch.device, step: Tensor) -> None:
        """`show` a step, int64 [1], to graphs that read any offset on `device`; torch.compile
        traces it."""
        shown, here = (
            [t for (where, _), t in self._kept.items() if where == device],
            self.in_graph(device),
        )
        for tensor in shown if any(t is here for t in shown) else [*shown, here]:
            tensor[_STEP].copy_(step)

    @property
    def is_captured(self) -> bool:
        """What is done to the step's tensors now is recorded in a CUDA graph."""
        return any(map(torch_compat.is_captured, self._copies.values()))

    def check_writable(self) -> None:
        """Raise ValueError in a CUDA graph, which would write today's values at every replay."""
        if self.is_captured:
            raise ValueError(
                "fq.begin_step writes values of the host to the device, and a captured CUDA graph "
                "would repeat them at every replay; call it outside of the graph, before a replay"
            )

    def publish(self) -> None:
        """Write the host's values to every device, asynchronously."""
        with torch_compat.outside_transforms():
            for (_, offset), tensor in list(self._copies.items()):
                # Not counted: a compiled graph saves the step for its backward, which reads it as
                # it is then.
                tensor.data.copy_(
                    torch.tensor(self.values(offset), device="cpu"), non_blocking=True
                )

    def go_to(self, step: int) -> None:
        """Another step begins, of all models: publish it, and tell who follows."""
        moved = step != self.step
        self.show(step)
        for follow in self.followers if moved else ():
            follow(None, step)

    def show(self, step: int) -> None:
        """The step of the model that runs now."""
        self._step, self.ahead = step, False
        self.publish()


STEP = StepState()


def _moved(step: Tensor, offset: int) -> Tensor:
    """The step's tensor of another offset, made in a graph."""
    moved = step.clone()
    moved[STEP_FIELDS.index("token_offset")].fill_(offset)
    return moved


class TrainingSteps:
    """Counts the training forwards of a model, or of the layers that a thread runs without one.

    next:    the step that the next training forward begins.
    open:    a step has begun that was not skipped: its histories roll when the next one begins.
    traced:  a graph that torch.compile made begins its steps.
    ahead:   graphs have counted steps that the host does not know of: `next` is what their device
             has.
    """

    live: ClassVar[weakref.WeakSet[TrainingSteps]] = weakref.WeakSet()

    def __init__(self):
        self.next, self.open, self.traced, self.ahead = 0, False, False, False
        # a model's hook calls `begin`; the model follows a schedule
        self.is_counting, self.is_scheduled = (False, False)
        self.has_run = False  # `begin` was called
        self.layers: list[weakref.ref] | None = (
            None  # of the model, found as its first training forward begins
        )
        self.alike: list[list[AmaxHistory]] = []  # what graphs roll
        self.at: int | None = None  # the step whose amaxes the histories collect
        # int64 [2], (next, open) as graphs read and write them
        self._counts: dict[torch.device, Tensor] = {}
        self.live.add(self)

    def __getstate__(self) -> dict:
        self._catch_up()
        return self.__dict__ | {"traced": False, "layers": None, "_counts": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.live.add(self)

    @property
    def number(self) -> int:
        """What a checkpoint holds: the step that is next; counted by hand, the one that runs. Waits
        for the device where it must."""
        if STEP.counted_by_hand:
            return STEP.step
        self._catch_up()
        return self.next

    def _catch_up(self) -> None:
        """Learn what graphs have counted, on the one device that runs them. Waits for it."""
        if self.ahead:
            counted = [int(counts[0]) for counts in self._counts.values()]
            self.next, self.ahead = max(counted, default=STEP.step + self.open), False

    def _publish(self, step: int, is_open: bool) -> None:
        """Set `next` and `open`, for graphs too."""
        self.next, self.open, self.ahead = step, is_open, False
        for counts in self._counts.values():
            counts[0].fill_(step)
            counts[1].fill_(is_open)

    def restart(self, step: int) -> None:
        """The next training forward begins `step`; counted by hand, `step` is the one that ran, the
        first one too."""
        self.at = None
        self._publish(step, step > 0 or STEP.counted_by_hand)

    def begin(
        self, histories: Callable[[], Collection[AmaxHistory]], model: nn.Module | None = None
    ) -> None:
        """A training forward begins: the next step, or, counted by hand, maybe another micro-batch
        of its step."""
        self.has_run = True
        if STEP.counted_by_hand:
            if self.open and self.at != STEP.step:
                roll(histories())
            self.at, self.open = STEP.step, True
            return
        if STEP.is_captured:  # replays count on the device
            roll(histories())
            for tensor in STEP._copies.values():
                tensor[_STEP].add_(1)
            for counts in self._counts.values():
                counts[0].add_(1)
            STEP.ahead = self.ahead = True
            return
        step = self.number
        if self.open:
            roll(histories())
        self.at = step
        self._publish(step + 1, True)
        STEP.show(step)
        for follow in STEP.followers:
            follow(model, step)

    def begin_in_graph(self, device: torch.device) -> None:
        """`begin` of a model on `device` that is being traced: everything on the device."""
        self.has_run = self.traced = True
        if STEP.counted_by_hand:  # `begin_step` rolls
            self.open = True
            return
        step, is_open = self.counts_on(device).split(1)
        for of in self.alike:
            for target, values in AmaxHistory.rolled_alike(of, kept=is_open == 0):
                target.copy_(values)
        STEP.show_in_graph(device, step)
        step.add_(1)
        is_open.fill_(1)
        self.open = self.ahead = STEP.ahead = True

    # The step's own tensor serves all models of the process, so it is no count: the graph of a
    # model that is compiled as a whole shows the step to all layers and adds one.
    def counts_on(self, device: torch.device) -> Tensor:
        """int64 [2], `next` and `open` as graphs read and write them; made before a trace, which
        would hold their values."""
        if device not in self._counts:
            with torch.inference_mode(False):
                self._counts[device] = torch.tensor([self.next, self.open], device=device)
            torch_compat.keeps_its_address([self._counts[device]])
        return self._counts[device]

    def begin_by_hand(self) -> None:
        """Another step begins, of a model that a graph runs, or whose pieces run: they may be
        graphs, which nobody sees run."""
        forwards_are_seen = self.has_run and not self.traced
        if forwards_are_seen or self.at == STEP.step:
            return
        if self.open or not self.has_run:
            roll([h for of in self.alike for h in of])
        self.at = STEP.step

    def skip(self) -> None:
        """The step that runs was not applied: the next training forward begins it again."""
        for counts in self._counts.values():
            if not STEP.counted_by_hand:
                counts[0].sub_(counts[1])
            counts[1].zero_()
        if not STEP.counted_by_hand:
            self.next -= self.open
        self.open = False


_PASSES = itertools.count()


class _Alone(threading.local):
    """Layers that a thread runs without a model that counts: a step begins as one of them runs that
    has run in this one.

    A layer keeps the number of the pass in which it ran (`_ran_in`), and so does its copy.
    """

    def __init__(self):
        self.steps = TrainingSteps()
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._pass: int | None = (
            None  # the step that runs; None: the next one begins with the next layer
        )
        self._restored = False
        self._rolled: set[int] = set()  # ids of histories that rolled as this step began

    def restart(self, step: int) -> None:
        self.steps.restart(step)
        self._pass, self._restored = None, self.steps.open

    def run(self, layer: nn.Module) -> None:
        joins, ran_in, its = layer not in self.layers, layer.__dict__.get("_ran_in"), self._pass
        if joins:
            self.layers.add(layer)
        if STEP.counted_by_hand or its is None or ran_in == its:
            before, rolled, self._rolled = self.steps.at, self._rolled, set()
            self.steps.begin(lambda: self._rolls(self.layers))
            if its is None or not STEP.counted_by_hand or self.steps.at != before:
                self._pass, self._restored = next(_PASSES), self._restored and its is None
            else:
                self._rolled = rolled
        if joins and its == self._pass and (self._restored or ran_in not in (None, its)):
            # what a checkpoint, or the layer that it is a copy of, left open
            roll(self._rolls([layer]))
        layer.__dict__["_ran_in"] = self._pass

    def _rolls(self, layers: Collection[nn.Module]) -> list[AmaxHistory]:
        """Histories of these layers that did not roll in this step: `begin_step` may have rolled
        them, before `fully_shard` gathered their weights; where a layer joins, experts of one
        weight share theirs."""
        counts = {
            id(steps): steps for layer in layers if (steps := layer._training_steps) is not None
        }
        by_hand = [s for s in counts.values() if STEP.counted_by_hand and s.at == STEP.step]
        self._rolled |= {id(h) for steps in by_hand for of in steps.alike for h in of}
        found = [h for h in histories_of(layers) if id(h) not in self._rolled]
        self._rolled.update(map(id, found))
        return found


_ALONE = _Alone()


def note_forward(layer: nn.Module, grad: bool) -> None:
    """A layer whose recipe needs steps begins a forward that is no recomputation, outside of graphs
    that are being traced.

    grad:  a backward may follow.

    Where a model counts steps this does nothing: they began with its own forward.
    """
    steps = layer._training_steps
    is_step = STEP.counted_by_hand or (grad and layer.training)
    if not is_step or (steps is not None and steps.has_run):
        return
    if steps is not None and steps.is_scheduled and not STEP.counted_by_hand:
        raise ValueError(
            f"{layer._name}: its model follows a schedule and runs by pieces, so nobody knows when "
            "a step begins; call fq.begin_step(step), or the model"
        )
    _ALONE.run(layer)


def steps_of(model: nn.Module) -> TrainingSteps:
    """Who counts the steps of a model, of one in it, or of its layers where they run without
    one."""
    modules = list(model.modules())
    counted = [steps for m in modules if (steps := getattr(m, "_training_steps", None)) is not None]
    # experts of one weight are no submodules
    packed = [layer for m in modules for layer in m.__dict__.get("_linears", ())]
    if any(m in _ALONE.layers for m in (*modules, *packed)):
        counted.append(_ALONE.steps)
    return (
        next((steps for steps in counted if steps.has_run), None)
        or next(iter(counted), None)
        or TrainingSteps()
    )


def continued(model: nn.Module) -> TrainingSteps:
    """A count for a model: it goes on where its layers were, if they ran without one."""
    steps, before = TrainingSteps(), steps_of(model)
    if before is _ALONE.steps and before.has_run:
        steps.restart(before.number)
    return steps


def restart_steps(model: nn.Module, step: int) -> None:
    """The next training forward of a model, or of layers without one, begins `step`."""
    for module in model.modules():
        if (steps := getattr(module, "_training_steps", None)) is not None:
            steps.restart(step)
    STEP.step = step
    STEP.publish()


def histories_of(layers: Iterable[nn.Module]) -> list[AmaxHistory]:
    """Every amax history that rolls with the steps of these layers, each once: experts of one
    weight share theirs, and layers that share an input the history of it.

    Those of quantized parameters and of published weights roll where their codes are made, after an
    optimizer's step.
    """
    found, seen = {}, set()
    for layer in layers:
        state = layer._weight_state
        made_after_steps = isinstance(state, QuantizedWeightState) or state.weight_sync is not None
        if (id(state.histories), made_after_steps) not in seen:
            seen.add((id(state.histories), made_after_steps))
            of_weight = {
                id(h): h for (_, slot, *_), h in state.histories.items() if slot == "weight"
            }
            found |= {
                id(h): h
                for h in state.histories.values()
                if not (made_after_steps and id(h) in of_weight)
            }
        if (lead := layer.runtime.input_owner) is not None and (first := lead()) is not None:
            kept = first.weight_state.histories
            found |= {id(h): h for (_, slot, *_), h in kept.items() if slot == "input"}
    return list(found.values())


@torch.no_grad()
def roll(histories: Collection[AmaxHistory], skipped: Tensor | None = None) -> None:
    """End the step of these histories. skipped: as in `AmaxHistory.rolled`."""
    for prepare in STEP.before_roll:
        prepare(histories)
    torch_compat.copy_all(AmaxHistory.rolled(histories, skipped))


def begin_step(step: int | None = None, micro_batch: int = 0, seed: int | None = None) -> None:
    """Set the step, micro-batch and seed of the random bits; schedules read the step.

    step:  the optimizer step that begins (None: keep). From the first call with one on, steps are
           counted by these calls; before, each training forward of a model begins the next one:
           micro-batches are steps of their own.

    A training forward is one in training mode with gradients enabled; recomputations in a backward
    are none. With steps counted by hand amax histories roll in the first training forward of
    another step. A graph that torch.compile or a captured CUDA graph holds counts on the device.
    Schedules of a model that is compiled as a whole need this call.

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
    STEP.go_to(step)
    for steps in list(TrainingSteps.live):
        steps.begin_by_hand()


def token_offset(offset: int) -> contextlib.AbstractContextManager[None]:
    """Place the local rows of activations in the global batch: row i is token offset + i there.

    Random bits are keyed by the global token. Default: data-parallel rank * local rows. Of the
    thread that enters it; the backward of what ran inside has the same offset, wherever it runs. A
    captured CUDA graph keeps the offset of its capture.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.nvfp4())
    >>> with fq.token_offset(1024):
    ...     layer(torch.ones(2, 64)).sum().backward()
    """
    return _inside(token_offset=offset, steps=STEP.for_graphs(offset))


def weights_of(tensors) -> Iterator[FSDPHooks]:
    """The WeightShards and QuantizedWeights among parameters, also under DTensors."""
    for tensor in tensors:
        local = torch_compat.local_of(tensor)
        if isinstance(local, FSDPHooks):
            yield local


def _parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and of a container those in its attributes, or in lists, tuples and dicts
    there."""
    parts = [optimizer]
    for part in parts:  # which grows
        for name, held in vars(part).items():
            if name in ("state", "param_groups"):
                continue
            held = list(held.values()) if isinstance(held, dict) else held
            for one in held if isinstance(held, (list, tuple)) else [held]:
                if isinstance(one, torch.optim.Optimizer) and one not in parts:
                    parts.append(one)
    return parts


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Raise ValueError for quantized parameters whose masters the optimizer, or those it consists
    of, do not hold."""
    parts = None
    for group in optimizer.param_groups:
        for p in group["params"]:
            local = torch_compat.local_of(p)
            if not isinstance(local, QuantizedWeight) or not p.requires_grad:
                continue
            if local.is_held_by([optimizer]):
                continue
            parts = parts or _parts_of(optimizer)  # of a container
            if not local.is_held_by(parts):
                raise ValueError(
                    f"{local.state.name} is a quantized parameter, and this "
                    f"{type(optimizer).__name__} holds no fp32 master of it; step it with "
                    "fq.optim.FusedAdam or an optimizer of fq.optim.wrap(..), made while it "
                    "requires grad on the rank that steps it (shard by fully_shard), or build the "
                    "model without fq.quantized_model_init"
                )


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Weights changed. Steps, histories and random keys do not depend on it: `TrainingSteps` counts
    them."""
    STEP.weight_events += 1
    weights = [w for group in optimizer.param_groups for w in weights_of(group["params"])]
    quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
    if quantized:
        _encode_after_step(quantized, getattr(optimizer, "found_inf", None))


@torch.compiler.disable
def _encode_after_step(quantized: list[QuantizedWeight], skipped: Tensor | None) -> None:
    """Make codes of the masters that an optimizer wrote.

    skipped:  of a GradScaler, on the device: not 0 where the masters stayed as they were.
    """
    for weight in quantized:
        weight.state.pending = True
    # Their codes are made here, with the scales of the step that follows; a second event for one
    # step finds them made.
    behind = [w for w in quantized if not all(map(w.is_current, w.state.quantizer.encodings))]
    scales = {
        id(h): h
        for w in behind
        for (_, slot, *_), h in w.state.histories.items()
        if slot == "weight"
    }
    if skipped is not None:
        skipped = torch_compat.local_of(skipped).detach().reshape(()) != 0
    torch_compat.copy_all(AmaxHistory.rolled(scales.values(), skipped))
    refresh_codes(quantized)


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)


def skip_step() -> None:
    """Drop the statistics of activations and gradients of the step that runs: it was not applied,
    and the next one is it again.

    Those of weights stay: the weights are the same in the step that follows. Of several
    micro-batches only those that `fq.begin_step` says to be of one step are dropped together.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.fp8_delayed())
    >>> layer(torch.ones(2, 64)).sum().backward()
    >>> fq.skip_step()         # a GradScaler left the optimizer's step out
    """
    for history in AmaxHistory.live:
        history.drop()
    for steps in list(TrainingSteps.live):
        steps.skip()


def sync(model: nn.Module) -> None:
    """Make codes of quantized parameters follow masters that were changed by hand. Every rank must
    call it.

    >>> with fq.quantized_model_init("mxfp8"):
    ...     model = nn.Sequential(fq.Linear(64, 32))
    >>> optimizer = fq.optim.FusedAdam(model.parameters())
    >>> fq.sync(model)
    """
    weights = [w for w in weights_of(model.parameters()) if isinstance(w, QuantizedWeight)]
    for weight in weights:
        weight.state.mark_written()
    refresh_codes(weights)


# Quantized parameters #


def quantized_model_init(recipe: Recipe | str) -> contextlib.AbstractContextManager[None]:
    """Weights of `fq.Linear` modules made or converted inside are `QuantizedTensor` parameters:
    codes of both directions.

    recipe:  of an `fq.Linear` that is given none; `fq.convert` brings its own.

    Their fp32 masters live in `fq.optim.FusedAdam`, or an optimizer of a class that `fq.optim.wrap`
    gives, which takes the high-precision initial values; other optimizers are refused at their
    step. Make the optimizer after `fully_shard` and initialization. A state dict holds the values
    of the master, by the names of `nn.Linear`. Of the thread that enters it.

    >>> with fq.quantized_model_init("mxfp8"):
    ...     layer = fq.Linear(64, 32)
    >>> isinstance(layer.weight, fq.QuantizedTensor)
    True
    """
    return _inside(quantized_init=as_recipe(recipe, "fq.quantized_model_init", Recipe))


def quantized_init_recipe() -> Recipe | None:
    """The recipe of the innermost `quantized_model_init` of this thread, or None outside."""
    return contexts().quantized_init


def new_weight_state(*args, kind: type[WeightState] | None = None) -> WeightState:
    """The state of a new weight (`WeightState`'s arguments): of `kind`; by default, of a quantized
    parameter under `quantized_model_init`."""
    return (kind or (WeightState if contexts().quantized_init is None else QuantizedWeightState))(
        *args
    )


# Autocast #

# made here: a recipe is no object yet while a graph is traced
_HIGH_PRECISION = identity(backward_override=None)


@contextlib.contextmanager
def autocast(recipe: Recipe | str | None = None, enabled: bool = True) -> Iterator[None]:
    """Override the recipe of the modules inside; enabled=False multiplies in high precision.

    Of the thread that enters it, as torch.autocast. For weights that FSDP2 does not manage. Under
    `fully_shard` gathers are prefetched outside any context, so a change of a weight's format goes
    through `set_recipe`, and a module whose weight would change raises ValueError.

    >>> layer, x = fq.Linear(64, 32, recipe=fq.recipes.mxfp8()), torch.ones(2, 64)
    >>> with fq.autocast(enabled=False):
    ...     y = layer(x)
    >>> torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))
    True
    """
    if recipe is not None:
        recipe = as_recipe(recipe, "fq.autocast", Recipe)
    checkpoint = None if torch.compiler.is_compiling() else torch_compat.checkpoint_hook()
    override = Autocast(recipe if enabled else _HIGH_PRECISION, checkpoint)
    with _inside(autocast=override):
        yield


def current_autocast() -> Autocast | None:
    """The innermost context of this thread that overrides recipes, or None."""
    override = contexts().autocast
    return override if override is not None and override.recipe is not None else None

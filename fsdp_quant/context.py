"""What changes between steps: the random key, the step, events that invalidate weights, and `autocast`.

Seed, step, micro-batch and token offset live in one int64 tensor a device, so that a compiled or captured step
reads new values without being made again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .recipe import Recipe, identity
from .scaling import AmaxHistory
from .tensor import fsdp_hooks, torch_compat
from .tensor.fsdp_hooks import FSDPHooks
from .tensor.master_weight import ALL_STATES, MasterWeight, WeightState
from .tensor.quantized_weight import QuantizedWeight, QuantizedWeightState

# Layout of the step's tensor: int64 [5].
STEP_FIELDS = ("seed", "step", "micro_batch", "token_offset", "data_parallel_rank")
_DEFAULT_OFFSET = -1  # data-parallel rank * local rows


class StepState:
    """The step as the host knows it, and one copy of it on every device that asked."""

    def __init__(self):
        self._step = 0
        self._skipped: Tensor | None = None  # int64 [], on a device: steps that the host counted and no optimizer applied
        self.seed, self.micro_batch, self.token_offset = 0, 0, _DEFAULT_OFFSET
        self.counted_by_hand = False
        self.weight_events = 0  # steps of any optimizer, calls of `sync`: weights that no class of ours watches may be others
        self.frozen: weakref.WeakSet = weakref.WeakSet()  # states of frozen weights used since the last step
        self.followers: list[Callable[[], None]] = []  # called when another step begins
        self.before_roll: list[Callable[[set[WeightState]], None]] = []  # with what an optimizer steps, before histories roll
        self._devices: dict[torch.device, Tensor] = {}

    @property
    def step(self) -> int:
        """Waits for the device where it alone knows which steps were applied."""
        if self._skipped is not None:
            self.step = self._step - int(self._skipped)
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._skipped = step, None

    def values(self) -> list[int]:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return [self.seed, self.step, self.micro_batch, self.token_offset, rank]

    def on(self, device: torch.device) -> Tensor:
        """int64 [5] (`STEP_FIELDS`) on `device`; the same tensor object from call to call."""
        if device not in self._devices:
            with torch.inference_mode(False):
                self._devices[device] = torch.tensor(self.values(), device=device)
        return self._devices[device]

    def check_writable(self) -> None:
        """Raise ValueError in a CUDA graph, which would write today's values at every replay."""
        if any(map(torch_compat.is_captured, self._devices.values())):
            raise ValueError(
                "fq.begin_step and fq.token_offset write values of the host to the device, and a captured CUDA graph would "
                "repeat them at every replay; call them outside of the graph, before a replay"
            )

    def publish(self) -> None:
        """Write the host's values to every device, asynchronously."""
        for tensor in self._devices.values():
            tensor.copy_(torch.tensor(self.values(), device="cpu"), non_blocking=True)

    def go_to(self, step: int) -> None:
        """Another step begins: publish it, and tell who follows."""
        moved, self.step = step != self.step, step
        self.publish()
        for follow in self.followers if moved else ():
            follow()

    def advance(self, skipped: Tensor | None = None) -> None:
        """The next step begins; not where `skipped`, on a device, is true, which nothing waits for.

        In a captured CUDA graph replays count it on the device, and the host does not know.
        """
        captured = [t for t in self._devices.values() if torch_compat.is_captured(t)]
        for tensor in captured:
            tensor[STEP_FIELDS.index("step")].add_(1 if skipped is None else ~skipped)
        if captured:
            return
        if skipped is None:
            self.go_to(self.step + 1)
            return
        for tensor in self._devices.values():
            tensor[STEP_FIELDS.index("step")] += ~skipped.to(tensor.device, non_blocking=True)
        self._step += 1
        self._skipped = skipped.long() if self._skipped is None else self._skipped + skipped
        for follow in self.followers:
            follow()


STEP = StepState()


def begin_step(step: int | None = None, micro_batch: int = 0, seed: int | None = None) -> None:
    """Set the step, micro-batch and seed of the random bits; schedules read the step.

    step:  the optimizer step that begins (None: keep). Without a call, an optimizer step advances it; one in a captured CUDA
           graph does so on the device, at every replay.
    """
    STEP.check_writable()
    STEP.counted_by_hand = STEP.counted_by_hand or step is not None
    STEP.seed = STEP.seed if seed is None else seed
    STEP.micro_batch = micro_batch
    STEP.go_to(STEP.step if step is None else step)


@contextlib.contextmanager
def token_offset(offset: int) -> Iterator[None]:
    """Place the local rows of activations in the global batch: row i is token offset + i there.

    Random bits are keyed by the global token. Default: data-parallel rank * local rows.
    """
    STEP.check_writable()
    before, STEP.token_offset = STEP.token_offset, offset
    STEP.publish()
    try:
        yield
    finally:
        STEP.token_offset = before
        STEP.publish()


def weights_of(tensors) -> Iterator[FSDPHooks]:
    """The MasterWeights and QuantizedWeights among parameters, also under DTensors."""
    for tensor in tensors:
        local = torch_compat.local_of(tensor)
        if isinstance(local, FSDPHooks):
            yield local


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Raise ValueError for quantized parameters in an optimizer that keeps no masters of them: updates would be lost."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            local = torch_compat.local_of(p)
            if not isinstance(local, QuantizedWeight) or not p.requires_grad:
                continue
            if not local.has_master_in(optimizer.state.get(p, {}).values()):
                raise ValueError(
                    f"{local.state.name} is a quantized parameter, and this {type(optimizer).__name__} holds no fp32 master of "
                    "it; step it with fq.optim.FusedAdam, or build the model without fq.quantized_model_init"
                )


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """An event that every rank shares: weights changed, histories roll, the step advances."""
    STEP.weight_events += 1
    weights = [w for group in optimizer.param_groups for w in weights_of(group["params"])]
    states = {w.state for w in weights}
    for state in states:
        state.pending = True
    for prepare in STEP.before_roll:
        prepare(states)
    for weight in weights:
        if isinstance(weight, MasterWeight):
            weight.note_step()
    states.update(STEP.frozen)  # no optimizer holds them, but their activations and gradients are quantized
    for state in STEP.frozen:
        if any(slot == "weight" for _, slot, *_ in state.histories):
            state.forget_codes()  # no write says that their scale may be another now
    STEP.frozen.clear()
    histories = {id(h): h for state in states for h in state.histories.values()}  # parts of a packed weight share theirs
    skipped = getattr(optimizer, "found_inf", None)  # of a GradScaler, on the device
    if skipped is not None:
        skipped = torch_compat.local_of(skipped).detach().reshape(()) != 0
    torch_compat.copy_all(AmaxHistory.rolled(list(histories.values()), skipped))
    if states and not STEP.counted_by_hand:
        STEP.advance(skipped)
    fsdp_hooks.synchronize_whole(weights)
    fsdp_hooks.write_back([w for w in weights if isinstance(w, QuantizedWeight)])


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)


def skip_step() -> None:
    """Drop the statistics of activations and gradients since the last optimizer step: it was not applied.

    Those of weights stay: the weights are the same in the step that follows.
    """
    for state in list(ALL_STATES):
        for history in state.histories.values():
            history.drop()


def sync(model: nn.Module) -> None:
    """Make codes and shared statistics follow weights that were changed by hand. Every rank must call it."""
    STEP.weight_events += 1
    for weight in weights_of(model.parameters()):
        weight.state.pending = True
        weight.state.forget_codes()
    managed = [m for m in torch_compat.managed_params_of(model) if isinstance(m.local, FSDPHooks)]
    if managed:
        fsdp_hooks.synchronize(managed)


# Quantized parameters #

_QUANTIZED_INIT: list[Recipe] = []


@contextlib.contextmanager
def quantized_model_init(recipe: Recipe) -> Iterator[None]:
    """Weights of `fq.Linear` modules made or converted inside are `QuantizedTensor` parameters: codes of both directions.

    recipe:  of an `fq.Linear` that is given none; `fq.convert` brings its own.

    Their fp32 masters live in `fq.optim.FusedAdam`, which takes the high-precision initial values; other optimizers are
    refused at their step. Make the optimizer after `fully_shard` and initialization. A state dict holds the values of the
    master, by the names of `nn.Linear`.
    """
    _QUANTIZED_INIT.append(recipe)
    try:
        yield
    finally:
        _QUANTIZED_INIT.pop()


def quantized_init_recipe() -> Recipe | None:
    """The recipe of the innermost `quantized_model_init`, or None outside."""
    return _QUANTIZED_INIT[-1] if _QUANTIZED_INIT else None


def new_weight_state(*args, kind: type[WeightState] | None = None) -> WeightState:
    """The state of a new weight (`WeightState`'s arguments): of `kind`; by default, of a quantized parameter under
    `quantized_model_init`."""
    return (kind or (QuantizedWeightState if _QUANTIZED_INIT else WeightState))(*args)


# Autocast #

@dataclass(frozen=True)
class Autocast:
    """What overrides the recipes of modules: `recipe` (None: nothing), and the checkpoint it was entered in, if any."""

    recipe: Recipe | None
    checkpoint: object | None


_AUTOCAST: list[Autocast] = []


@contextlib.contextmanager
def autocast(recipe: Recipe | None = None, enabled: bool = True) -> Iterator[None]:
    """Override the recipe of the modules inside; enabled=False multiplies in high precision.

    For weights that FSDP2 does not manage. Under `fully_shard` gathers are prefetched outside any context, so a
    change of a weight's format goes through `set_recipe`, and a module whose weight would change raises ValueError.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(f"fq.autocast takes one recipe for all modules inside, got {recipe!r}; use fq.set_recipe")
    _AUTOCAST.append(Autocast(recipe if enabled else identity(), torch_compat.checkpoint_hook()))
    try:
        yield
    finally:
        _AUTOCAST.pop()


def current_autocast() -> Autocast | None:
    """The innermost context that overrides recipes, or None."""
    return _AUTOCAST[-1] if _AUTOCAST and _AUTOCAST[-1].recipe is not None else None

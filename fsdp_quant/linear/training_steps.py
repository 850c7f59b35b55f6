# SPDX-License-Identifier: Apache-2.0
"""Begin steps by hand, and run what belongs around an optimizer's step, in order.

A step begins with a pass (`linear/passes.py`), or with `begin_step`. Optimizers begin no steps, so
training does not depend on the optimizer: wrapped, several, or unknown to torch.

    a step begins            amax histories roll (`passes.roll`); the device learns the step
                             (`STEP`); GEMMs move (`guard`); recipes switch (`follow_schedules`)
    an optimizer steps       `_before_optimizer_step`; the step itself; `_after_optimizer_step`
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..context import STEP
from ..optim.wrapped import optimizers_inside
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.refresh import refresh_codes
from . import guard
from .bad_splits import raise_bad_splits
from .passes import (
    LOOSE,
    Layer,
    TrainingSteps,
    follow_schedules,
    histories_of,
    layers_of,
    steps_within,
)
from .plan import GemmPlan
from .weight_gradient import raise_waiting

# In layers #


def note_forward(layer: Layer, operands: Sequence[Tensor | None]) -> bool:
    """Return whether a backward may follow this forward of a layer that needs steps, neither
    recomputed nor traced: then its amaxes are recorded. Begins a pass if nobody has.

    operands:  x, weight and bias that are multiplied.
    """
    grad = torch.is_grad_enabled()
    if not (grad or torch_compat.running_function() is not None) or torch_compat.is_fake():
        return False
    steps = layer.runtime.steps
    if steps is None or not steps.is_counting or steps.is_orphaned:
        steps = LOOSE.caught_up()
    has_run = layer.runtime.ran_in == steps.current
    if steps.current is None or not (steps.inside or steps.has_root):  # nobody else begins passes
        if grad and not any(t is not None and t.requires_grad for t in operands):
            return False
        if steps.current is None or has_run:
            steps.begin(layer)
            has_run = False
    if not has_run:
        steps.run(layer)
    return True


@torch.compiler.assume_constant_result
def _is_traced_alone() -> bool:
    """No call of a model that counts is running, and no backward recomputes the traced forward. A
    trace runs it, so that graphs do not depend on the answer of another time: a recomputation uses
    the graph of its forward."""
    recomputed = torch_compat.backward_is_running() or torch_compat.checkpoint_hook() is not None
    return not (STEP.calls or recomputed)


@torch.compiler.assume_constant_result
def _may_count(is_counted: bool, needs_steps: bool) -> bool:
    """Whether the traced graph may write counts: that of a checkpoint's body may not. A trace runs
    it, which notes that nobody counts layers that need steps."""
    may_count = is_counted and not torch_compat.body_is_traced()
    STEP.unseen = STEP.unseen or (needs_steps and not may_count)
    return may_count


def note_traced(layer: Layer, plan: GemmPlan, device: torch.device) -> None:
    """Begin a step in a graph of layers that nobody calls by their model, with the layer that leads
    them. torch.compile traces it."""
    # each attribute of a layer that is read here is one guard per layer
    if not torch.is_grad_enabled() or not _is_traced_alone():
        return
    if STEP.calls or STEP.counted_by_hand:  # calls: of a model that is traced as a whole
        return
    steps = layer.runtime.steps
    if steps is None or (steps.is_counting and layer.runtime.leads and not steps.has_root):
        if _may_count(steps is not None, plan.needs_steps) and steps is not None:
            steps.begin_in_graph(device)


# By hand #


def begin_step(
    step: int | None = None,
    micro_batch: int = 0,
    seed: int | None = None,
    model: nn.Module | None = None,
) -> None:
    """Set the step, micro-batch and seed of the random bits. Schedules read the step.

    step:   the optimizer step that begins (None: keep). From the first call with a step on, only
            these calls count steps. Before it, each pass of a model begins the next step, so each
            micro-batch is a step.
    model:  the model that trains; others count as before. Its passes count again from the first one
            on that begins after its optimizer's step without another call. None: all models of the
            process, for good; a model that trains on while the step stands still warns once.

    A pass is a forward that a backward may follow: gradients are enabled, parameters or inputs
    require them, and it is no recomputation. If steps are counted by hand, amax histories roll in
    the call that gives another step. Graphs of torch.compile and CUDA graphs count on the device.

    >>> fq.begin_step(3, micro_batch=1)
    >>> fq.state_dict(fq.convert(nn.Sequential(nn.Linear(64, 32)), "nvfp4"))["step"]
    3
    """
    for name, value in {"step": step, "micro_batch": micro_batch, "seed": seed}.items():
        if value is not None and (not hasattr(value, "__index__") or name != "seed" and value < 0):
            wanted = "an int" if name == "seed" else "an int from 0"
            raise ValueError(f"fq.begin_step: {name} is {value!r:.200}; wanted {wanted}")
    if STEP.is_captured:
        raise ValueError(
            "fq.begin_step writes values of the host to the device, and a captured CUDA graph "
            "would repeat them at every replay; call it outside of the graph, before a replay"
        )
    STEP.seed = STEP.seed if seed is None else seed
    STEP.micro_batch = micro_batch
    if step is None:
        STEP.publish()
        return
    loose = LOOSE.caught_up()
    # layers that another thread runs begin the step with their next forward, as copies do
    of_all = [s for s in TrainingSteps.live if s is loose or s.model is not None]
    counted = of_all if model is None else steps_within(model)
    moved = step != STEP.step
    STEP.counted_by_hand = STEP.counted_by_hand or model is None
    STEP.show(step)
    STEP.recount()
    if moved:
        guard.apply_underflow_policy()
    for steps in counted:
        steps.begin_by_hand(step, model is not None)


def count_passes(model: nn.Module) -> None:
    """End what `begin_step(model=)` began: passes of the model count its steps again."""
    for steps in steps_within(model):
        steps.end_by_hand()


def skip_step(model: nn.Module | None = None) -> None:
    """Discard the activation and gradient amaxes of the running step, because the optimizer did not
    apply it. The next step repeats it.

    model:  whose step it was; None: all models of the process.

    Amaxes of weights are kept, because the weights are the same in the repeated step. The amaxes of
    several micro-batches are discarded together only if `fq.begin_step` counts them as one step.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.fp8_delayed())
    >>> layer(torch.ones(2, 64)).sum().backward()
    >>> fq.skip_step()         # a GradScaler left the optimizer's step out
    """
    LOOSE.caught_up()
    skipped = TrainingSteps.live if model is None else steps_within(model)
    histories = AmaxHistory.live if model is None else histories_of(layers_of(model))
    for history in histories:
        history.discard_step()
    for steps in list(skipped):
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


def backward_dw(model: nn.Module) -> None:
    """Compute the weight gradients of the oldest backward that waits for them, in every layer of
    `model` with `delay_wgrad_compute=True`.

    Raises RuntimeError, naming the layer, if none waits.

    >>> layer = fq.Linear(64, 32, recipe="mxfp8", delay_wgrad_compute=True)
    >>> layer(torch.ones(2, 64)).sum().backward()   # bias.grad, and the gradient of the input
    >>> fq.steps.backward_dw(layer)                 # weight.grad
    """
    layers: Any = layers_of(model)
    for layer in layers:
        layer.backward_dw()


# Optimizers #


def _before_optimizer_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Run what must precede every optimizer's step. Raises ValueError if the step must not run."""
    raise_waiting(optimizer)
    _check_masters(optimizer)
    raise_bad_splits()


def _after_optimizer_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Run what follows every optimizer's step: its parameters have changed."""
    STEP.weight_events += 1
    weights = [w for group in optimizer.param_groups for w in weights_of(group["params"])]
    if quantized := [w for w in weights if isinstance(w, QuantizedWeight)]:
        _encode_after_step(quantized, getattr(optimizer, "found_inf", None))
    guard.apply_underflow_policy()
    _after_training(optimizer)


@torch_compat.never_compiled
def _after_training(optimizer: Optimizer) -> None:
    """Tell the models that this optimizer trains, if an optimizer's step means something to them:
    steps that stand still, and recipes that switch while nobody calls the model."""
    if STEP.unseen and not STEP.counted_by_hand:
        STEP.unseen = False
        warnings.warn(
            "a compiled function trains layers whose recipe needs steps, and no model counts them: "
            "random bits and delayed scales stay those of one step; call fq.begin_step(step), or "
            "compile and call a model that fq.convert was given",
            stacklevel=4,
        )
    waiting = [
        steps
        for steps in TrainingSteps.live
        if steps.has_run and (steps.is_by_hand or (steps.is_scheduled and steps.by_pieces))
    ]
    if not waiting or torch_compat.backward_is_running():
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for steps in waiting:
        if any(id(p) in trained for p in steps.parameters()):
            steps.is_applied = True
            if not steps.is_by_hand:
                follow_schedules(steps, steps.number)


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)


def weights_of(tensors: Iterable[Tensor]) -> Iterator[FSDPHooks]:
    """Yield the WeightShards and QuantizedWeights among parameters, also inside DTensors."""
    for tensor in tensors:
        local = torch_compat.local_of(tensor)
        if isinstance(local, FSDPHooks):
            yield local


def _check_masters(optimizer: Optimizer) -> None:
    """Raise ValueError for quantized parameters whose masters no (inner) optimizer holds."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    quantized = [w for w in weights_of(trained) if isinstance(w, QuantizedWeight)]
    if others := [w for w in quantized if not w.is_held_by([optimizer])]:
        holders = optimizers_inside(optimizer)
        for weight in (w for w in others if not w.is_held_by(holders)):
            raise ValueError(
                f"{weight.state.name} is a quantized parameter, and this "
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
    slots = (item for w in stale for item in w.state.histories.items())
    histories = dict.fromkeys(history for (_, slot, *_), history in slots if slot == "weight")
    if skipped is not None:
        skipped = torch_compat.local_of(skipped).detach().reshape(()) != 0
    torch_compat.copy_all(AmaxHistory.advanced(histories, skipped))
    refresh_codes(quantized)

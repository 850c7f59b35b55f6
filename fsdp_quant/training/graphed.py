# SPDX-License-Identifier: Apache-2.0
"""`graphed`: a training step as one CUDA graph, which the host replays in one call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..context import STEP, contexts
from ..linear import guard
from ..linear.passes import steps_of
from ..linear.weight_gradient import NOT_INSIDE
from ..models.set_recipe import schedules_of
from ..models.steps import converted_modules
from ..models.transformers_masks import masks_of_captures
from ..tensor import torch_compat

WARMUP = 3


def graphed(
    step: Callable,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    warmup: int = WARMUP,
) -> GraphedStep:
    """Return `step` as one CUDA graph: forward, backward, collectives and optimizer in one launch.

        def step(ids, labels):
            loss = model(ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = fq.graphed(step, model, optimizer)
        for ids, labels in data:
            loss = step(ids, labels)

    step:       reads what changes from its arguments alone, tensors of the same shapes in every
                call, and never waits for the device (no `.item()`); it returns tensors or trees.
    optimizer:  whose steps are inside: it becomes capturable, and its rate a tensor, which
                schedulers fill. In a checkpoint of torch.distributed it is a tensor then too, which
                loads into a tensor: call this before a load.
    warmup:     eager steps before the capture. They train: no step runs twice or is undone.

    The bits are those of the eager step. Steps, random keys and histories go on in replays, also
    after `fq.begin_step`. A step whose arguments have other shapes runs eagerly, with one warning.
    A changed recipe, a setting of the optimizer that is no tensor, and another `main_grad` are
    captured again; what else Python decides needs `reset()`. Where nothing can be captured, as
    where `backward_dw()` is called outside, all steps run eagerly: one warning says why, and
    `why_eager` keeps it. `dist.destroy_process_group()` waits for graphs that hold its collectives,
    so it resets this one first.

    Raises ValueError for a warmup below 1.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> def step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss.detach()
    >>> step = fq.graphed(step, model, optimizer)  # on a CPU its steps stay eager, with a warning
    >>> loss = step(torch.ones(2, 64))
    """
    if warmup < 1:
        raise ValueError(f"warmup is {warmup}; a capture needs at least one eager step before it")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return GraphedStep(step, model, optimizers, warmup)


class GraphedStep:
    """A step that `graphed` returned.

    why_eager:  why no step is captured, in a sentence; None: they are.
    """

    def __init__(self, step: Callable, model: nn.Module, optimizers: list[Optimizer], warmup: int):
        self._step, self._model, self._optimizers, self._warmup = step, model, optimizers, warmup
        self._warned, self._graph = False, None
        self.reset()

    def reset(self) -> None:
        """Destroy the graph: the next steps are eager, then one is captured again."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._left, self.why_eager = None, self._warmup, self._refusal()
        for optimizer in self._optimizers if self.why_eager is None else ():
            _make_capturable(optimizer)

    def _refusal(self) -> str | None:
        """Say why no step can be captured, as far as that is known beforehand."""
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return f"the model is on {device}, and CUDA graphs run on GPUs"
        if schedules_of(self._model):
            return "the model follows a schedule of recipes, which switches as steps begin"
        return None

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        """Return the stream of captures, and of the eager steps before them, as torch asks."""
        return torch.cuda.Stream()

    def __call__(self, *args, **kwargs):
        values, spec = torch_compat.tree_flatten((args, kwargs))
        if self._graph is not None:
            guard.apply_underflow_policy()
            if self._facts() != self._captured:
                self._graph, self._left = None, 1
        if self.why_eager is None and self._graph is None and not self._left:
            self._capture(values, spec)
        if self.why_eager is not None:
            self._warn(f"steps run eagerly: {self.why_eager}")
            return self._step(*args, **kwargs)
        if self._graph is None:
            self._left -= 1
            with masks_of_captures(self._model):
                return self._eager(*args, **kwargs)
        if (spec, *map(_kind, values)) != self._signature:
            self._warn("a step runs eagerly: its arguments are other than those of the capture")
            return self._eager(*args, **kwargs)
        for target, value in zip(self._inputs, values):
            if isinstance(value, Tensor):
                target.copy_(value)
        self._graph.replay()
        if self._counts.is_counting and not self._counts.is_by_hand:
            self._counts.ahead = STEP.ahead = True
        return torch_compat.tree_map_only(Tensor, torch.clone, self._outputs)

    def _eager(self, *args, **kwargs):
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = self._step(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def _capture(self, values: list, spec) -> None:
        """Capture one step on copies of the inputs; the step is not executed."""
        self._signature = spec, *map(_kind, values)
        self._inputs = [t.clone() if isinstance(t, Tensor) else t for t in values]
        args, kwargs = torch_compat.tree_unflatten(self._inputs, spec)
        self._layers = list(converted_modules(self._model).values())
        self._counts = steps_of(self._model)
        graph, grads = torch.cuda.CUDAGraph(), [(p, p.grad) for p in self._model.parameters()]
        STEP.is_graphed = True
        try:
            with (
                masks_of_captures(self._model),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._outputs = self._step(*args, **kwargs)
                if names := self._forget_captured():
                    raise RuntimeError(f"{names[0]}: {NOT_INSIDE}")
        except Exception as error:  # whatever the step, or CUDA, says
            for p, grad in grads:
                p.grad = grad  # not memory that nothing was written to
            self._forget_captured()
            # they stay in that capture; copies of their states do not
            for generator in torch.cuda.default_generators:
                generator.graphsafe_set_state(generator.clone_state())
            self.why_eager = (
                f"its capture failed: {' '.join(str(error.__context__ or error).splitlines()[:2])}"
            )
            return
        finally:
            STEP.is_graphed = False
        self._graph, self._captured = graph, self._facts()
        torch_compat.reset_before_groups_end(self)

    def _forget_captured(self) -> list[str]:
        """Forget wgrads that a capture left for `backward_dw`, and return whose they were."""
        runtimes = [layer.runtime for layer in self._layers]
        return [runtime.name for runtime in runtimes if runtime.waiting.forget_captured()]

    def _facts(self) -> list:
        """Return constants of a graph that may change: contexts, plans of layers, where their
        wgrads go, settings of optimizers."""
        here = contexts()
        facts: list[object] = [here.autocast and here.autocast.recipe, here.token_offset]
        facts += here.batch_invariant, *(layer.plan for layer in self._layers)
        for layer in self._layers:
            grad = getattr(layer.trained[0], "main_grad", None)
            address = None if grad is None else torch_compat.local_of(grad).data_ptr()
            facts += layer.fuse_wgrad_accumulation, layer.delay_wgrad_compute, address
        for group in (g for o in self._optimizers for g in o.param_groups):
            facts += [v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)]
        return facts

    def _warn(self, text: str) -> None:
        if not self._warned:
            warnings.warn(f"fq.graphed: {text}", stacklevel=3)
        self._warned = True


def _kind(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _make_capturable(optimizer: Optimizer) -> None:
    """Let it read its step and rate on the device, if it knows `capturable`."""
    torch_compat.let_fused_adams_be_fake()
    for group in optimizer.param_groups:
        if "capturable" not in group:
            continue
        group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(
                group["lr"], dtype=torch.float32, device=group["params"][0].device
            )
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(p.device)

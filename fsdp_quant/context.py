# SPDX-License-Identifier: Apache-2.0
"""Hold the state that layers read when they run: the current step (`STEP`) and the thread's
contexts.

Operators read seed, step, micro-batch and token offset from an int64 tensor on the device, so that
a compiled or captured step sees new values without another trace or capture. Contexts (`autocast`,
`batch_invariant`, `token_offset`, `quantized_model_init`) belong to the thread that entered them. A
recomputation sees those of its forward; a backward else those of the thread that called it.
`linear/passes.py` counts the steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .migration import answers_keywords
from .ops import native, opaque
from .ops.product_error import is_probed
from .recipe import Recipe, as_recipe, identity
from .tensor import torch_compat
from .tensor.torch_compat import wrap_recomputed

# Fields of the step's tensor, int64 [5].
STEP_FIELDS = ("seed", "step", "micro_batch", "token_offset", "data_parallel_rank")
_STEP = slice(1, 2)  # "step" in a step's tensor
_DEFAULT_OFFSET = -1  # data-parallel rank * local rows


# Contexts of a thread #


@dataclass(frozen=True)
class Autocast:
    """State of an `autocast` context.

    recipe:    overrides the recipes of modules.
    function:  the autograd.Function in whose forward the context was entered, if any.
    """

    recipe: Recipe
    function: object | None


class Contexts(NamedTuple):
    """The innermost context of each kind that a thread has entered.

    steps:  device -> the step's tensor for `token_offset`, which graphs read.
    batch_invariant:  the thread is inside `batch_invariant`.
    """

    steps: dict[torch.device, Tensor]
    autocast: Autocast | None = None
    token_offset: int = _DEFAULT_OFFSET
    quantized_init: Recipe | None = None
    batch_invariant: bool = False


_NO_CONTEXTS = Contexts({})


@dataclass(eq=False)
class _Entered:
    contexts: Contexts = _NO_CONTEXTS


class _ThreadLocal(threading.local):
    """Sets its attribute per thread: dynamo does not guard a class attribute that an instance may
    hide later. Graphs write to that object: dynamo loses what it writes to a `threading.local`."""

    def __init__(self):
        self.entered = _Entered()


_THREAD = _ThreadLocal()


@opaque.compiled_as(lambda: _THREAD.entered.contexts)
def contexts() -> Contexts:
    """Return the contexts of this thread; in a thread of the autograd engine, those of the thread
    that called the backward."""
    entered = _THREAD.entered.contexts
    if entered is _NO_CONTEXTS and torch_compat.backward_is_running():
        return torch_compat.get_in_backward("contexts", entered)
    return entered


def _enter(entered: Contexts) -> None:
    _THREAD.entered.contexts = entered
    torch_compat.set_for_backward("contexts", entered)


def _restoring_contexts(fn: Callable) -> Callable:
    """Return `fn` that runs in the contexts of now."""
    entered = contexts()
    if entered is _NO_CONTEXTS:  # and not those of the thread that calls the backward
        entered = _NO_CONTEXTS._replace()

    def run(*args, **kwargs):
        before = _THREAD.entered.contexts
        inherited = torch_compat.get_in_backward("contexts", before)
        _enter(entered)
        try:
            return fn(*args, **kwargs)
        finally:
            _enter(before)
            torch_compat.set_for_backward("contexts", inherited)

    return run


wrap_recomputed(_restoring_contexts)


@contextlib.contextmanager
def _inside(**changes) -> Iterator[None]:
    before = _THREAD.entered.contexts
    _enter(before._replace(**changes))
    try:
        yield
    finally:
        _enter(before)


# The step #


class StepState:
    """The current step on the host, and a copy per (device, token offset) in use.

    ahead:            graphs have counted steps on their device that the host has not read.
    graphs_count:     a graph counts steps, so the host knows none for certain from now on.
    calls:            how many calls of models that count steps are running.
    counted_by_hand:  `begin_step` counts the steps of all models.
    is_graphed:       `fq.graphed` captures a whole step.
    unseen:           a graph has trained layers that need steps, and nobody counted it.
    weight_events:    optimizer steps so far: any may have changed weights of any class.
    restarted:        (step before the one that was set last, whether its histories are yet to
                      roll). Layers that run without a model continue there when the tuple changes.
    """

    def __init__(self):
        self._step, self.ahead, self.calls = 0, False, 0
        self.seed = self.micro_batch = self.weight_events = 0
        self.counted_by_hand = self.unseen = self.is_graphed = self.graphs_count = False
        self.restarted = -1, False
        self._copies: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()
        # of reductions in the running step (`ops.gradient_codes.gradient_keys`)
        self._counts: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        # copies that must outlive their readers: those of the default offset, and those in graphs
        self._kept: dict[tuple[torch.device, int], Tensor] = {}

    @property
    def step(self) -> int:
        """Return the step that began last, or 0. Waits for the device if graphs count there."""
        if self.ahead:
            self._step, self.ahead = max(int(t[_STEP]) for t in self._kept.values()), False
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self.ahead = step, False
        self.restarted = step - 1, step > 0 or self.counted_by_hand

    @property
    def is_probed(self) -> bool:
        """Whether operators may count underflows now (`linear.guard`); the device decides."""
        return self.ahead or is_probed(self._step) or self.is_captured

    @property
    def token_offset(self) -> int:
        """Return the offset of this thread (`fq.token_offset`); below 0: data-parallel rank * local
        rows."""
        return contexts().token_offset

    def values(self, token_offset: int | None = None) -> list[int]:
        """Return the values of `STEP_FIELDS`. token_offset: default, this thread's."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        offset = self.token_offset if token_offset is None else token_offset
        return [self.seed, self.step, self.micro_batch, offset, rank]

    def on(self, device: torch.device) -> Tensor:
        """Return int64 [5] (`STEP_FIELDS`) on `device`, for this thread's token offset. Every call
        returns the same object.

        An autograd node that saves it reads the offset of its forward and the step of its backward.
        """
        if torch_compat.is_fake() or device.type == "meta":  # reads the values of now
            return torch.tensor(self.values(), dtype=torch.int64, device=device)
        return self._of_offset(device, contexts().token_offset)

    def _of_offset(self, device: torch.device, offset: int) -> Tensor:
        key = device, offset
        tensor = self._copies.get(key)
        if tensor is None:
            with torch_compat.outside_modes():
                tensor = self._copies[key] = torch.tensor(
                    self.values(offset), dtype=torch.int64, device=device
                )
            if offset == _DEFAULT_OFFSET:
                self._kept[key] = tensor
        if key not in self._kept and torch_compat.is_captured(tensor):
            self._kept[key] = tensor
        return tensor

    def prepare(self, device: torch.device) -> Tensor:
        """Create the step's tensor for graphs on `device`; return that of the default offset."""
        if torch_compat.is_fake() or device.type == "meta":  # no graph has them
            return self.on(device)
        tensor, here = self._of_offset(device, _DEFAULT_OFFSET), _THREAD.entered.contexts
        _NO_CONTEXTS.steps[device] = tensor
        if here.token_offset != _DEFAULT_OFFSET:
            here.steps[device] = self._of_offset(device, here.token_offset)
        return tensor

    @opaque.compiled_as(
        lambda self, offset: {d: _with_offset(t, offset) for d, t in contexts().steps.items()}
    )
    def for_graphs(self, offset: int) -> dict[torch.device, Tensor]:
        """Return `Contexts.steps` for an offset."""
        if offset == _DEFAULT_OFFSET:
            return _NO_CONTEXTS.steps
        return {device: self._of_offset(device, offset) for device in _NO_CONTEXTS.steps}

    def in_graph(self, device: torch.device) -> Tensor:
        """Return the tensor of `on` while a graph is traced. Another offset has another tensor,
        which is another input of the graph."""
        here = contexts()
        step = here.steps.get(device)
        if step is None:  # layers were created inside a context within this one
            return _with_offset(_NO_CONTEXTS.steps[device], here.token_offset)
        return step

    def show_in_graph(self, device: torch.device, step: Tensor) -> None:
        """Write a step, int64 [1], to the copies of every offset on `device`. torch.compile traces
        it."""
        shown = [t for (where, _), t in self._kept.items() if where == device]
        here = self.in_graph(device)
        for tensor in shown if any(t is here for t in shown) else [*shown, here]:
            tensor[_STEP].copy_(step)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph captures operations on the step's tensors now."""
        return any(map(torch_compat.is_captured, self._copies.values()))

    def count_on_devices(self) -> None:
        """Add one to the step on every device, as each replay of a graph that captures this."""
        for tensor in self._copies.values():
            tensor[_STEP].add_(1)
        self.expect_counts_of_graphs()
        self.ahead = True

    @torch.compiler.assume_constant_result
    def expect_counts_of_graphs(self) -> None:
        """Launch the underflow check in every step from now on. A trace runs it."""
        self.graphs_count = True
        native.set_probed(True)

    def publish(self) -> None:
        """Write the host's values to every device, asynchronously."""
        with torch_compat.outside_modes():
            native.set_probed(self.graphs_count or is_probed(self.step))
            for (_, offset), tensor in list(self._copies.items()):
                # .data does not count a version: the backward of a compiled graph saved this
                # tensor, and reads the step that is current when it runs
                tensor.data.copy_(
                    torch.tensor(self.values(offset), dtype=torch.int64, device="cpu"),
                    non_blocking=True,
                )

    def new_count(self, device: torch.device) -> Tensor:
        """Return what `gradient_keys` counts in, int64 [4], which `recount` writes."""
        with torch_compat.outside_modes():
            counted = torch.full((4,), -1, dtype=torch.int64, device=device)
        self._counts[id(counted)] = counted
        return counted

    def recount(self) -> None:
        """Let a step that is repeated draw the random bits of the first time."""
        for counted in list(self._counts.values()):
            counted.fill_(-1)

    def show(self, step: int) -> None:
        """Set the step of the model that runs now, on the host and on every device."""
        self._step, self.ahead = step, False
        self.publish()


STEP = StepState()


def _with_offset(step: Tensor, offset: int) -> Tensor:
    """Copy the step's tensor and set another offset, in a graph."""
    moved = step.clone()
    moved[STEP_FIELDS.index("token_offset")].fill_(offset)
    return moved


def token_offset(offset: int) -> contextlib.AbstractContextManager[None]:
    """Place the local rows of activations in the global batch: row i is token offset + i there.

    Random bits are keyed by the global token. Default: data-parallel rank * local rows. Applies to
    the thread that enters it; backwards of forwards inside use the same offset, wherever they run.
    A captured CUDA graph keeps the offset of its capture.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.nvfp4())
    >>> with fq.token_offset(1024):
    ...     layer(torch.ones(2, 64)).sum().backward()
    """
    return _inside(token_offset=offset, steps=STEP.for_graphs(offset))


# Batch invariance #


def batch_invariant() -> contextlib.AbstractContextManager[None]:
    """Give a token the same bits in every batch: forwards of quantized layers inside compute each
    row of their output alike, whether 1 row or 4096 are multiplied.

    The GEMMs of cuBLAS, whose sums over K are ordered by the number of rows, are replaced: on
    sm_90a by our own kernels for bf16 values and codes, elsewhere and for other values by GEMMs of
    decoded values, 128 rows at a time. Bits therefore differ from those outside. Backwards are
    those outside, and are not invariant. What modules of torch compute is not covered: attention,
    norms, adapters, layers that were not converted (often `lm_head`).

    Applies to the thread that enters it, and to what torch.utils.checkpoint recomputes of it;
    torch.compile traces another graph, and `fq.graphed` captures another step. A CUDA graph that
    was captured by hand keeps what it was captured in. Layers raise ValueError for a recipe that is
    not token-local (`fq.recipes.is_token_local`; `identity()` is), or that rounds activations
    stochastically, and NotImplementedError for an output that is a sum over three or more ranks.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.mxfp8(accuracy="token"))
    >>> x = torch.randn(130, 64)
    >>> with fq.numerics.batch_invariant():
    ...     torch.equal(layer(x)[:1], layer(x[:1]))
    True
    """
    return _inside(batch_invariant=True)


# Quantized parameters #


@answers_keywords
def quantized_model_init(recipe: Recipe | str) -> contextlib.AbstractContextManager[None]:
    """Create weights of `fq.Linear` modules as `QuantizedTensor` parameters: codes of both
    directions. Packed experts and transposed weights stay plain parameters.

    recipe:  for an `fq.Linear` without a recipe; `fq.convert` uses its own.

    `fq.optim.FusedAdam`, or an optimizer of a class that `fq.optim.wrap` returns, stores their fp32
    masters, which start from the initial values. Other optimizers raise at their step. Create the
    optimizer after `fully_shard` and initialization. A state dict stores the master's values under
    the names of `nn.Linear`. Applies to the thread that enters it.

    >>> with fq.quantized_model_init("mxfp8"):
    ...     layer = fq.Linear(64, 32)
    >>> isinstance(layer.weight, fq.QuantizedTensor)
    True
    """
    return _inside(quantized_init=as_recipe(recipe, "fq.quantized_model_init", Recipe))


def quantized_init_recipe() -> Recipe | None:
    """Return the recipe of the innermost `quantized_model_init` of this thread, None outside."""
    return contexts().quantized_init


# Autocast #

# a constant, because dynamo cannot trace the construction of a recipe
_HIGH_PRECISION = identity(backward_override=None)


@answers_keywords
@contextlib.contextmanager
def autocast(recipe: Recipe | str | None = None, enabled: bool = True) -> Iterator[None]:
    """Override the recipe of modules that run inside; enabled=False multiplies in high precision.

    Applies to the thread that enters it, as torch.autocast does, and to what torch.utils.checkpoint
    recomputes of it. Under `fully_shard` it must be entered around the root's forward, on every
    rank: that forward and its backward gather weights in its formats. Raises ValueError inside the
    root's forward, or for codes that are parameters, if the format of a weight would change; and if
    ranks enter contexts of different recipes.

    >>> layer, x = fq.Linear(64, 32, recipe=fq.recipes.mxfp8()), torch.ones(2, 64)
    >>> with fq.autocast(enabled=False):
    ...     y = layer(x)
    >>> torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))
    True
    """
    override = None if recipe is None else as_recipe(recipe, "fq.autocast", Recipe)
    override = override if enabled else _HIGH_PRECISION
    with _inside(
        autocast=None if override is None else Autocast(override, torch_compat.running_function())
    ):
        yield


def current_autocast() -> Autocast | None:
    """Return the innermost context of this thread, None if it does not override recipes."""
    return contexts().autocast

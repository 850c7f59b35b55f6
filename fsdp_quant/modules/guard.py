"""The anchoring guard: products whose operands one exponent a line does not serve move to a domain that decodes exactly.

Quantizing counts on the device how many nonzero blocks lie so far below their line's exponent that they lose bits. As
each step begins the counts start for the host without being waited for, and are judged at a later one, when they have
arrived: nothing here waits for a device. Each rank judges what it multiplied; formats and collectives do not change. What
one layer shows is decided for all layers of its model that have the same recipe and plan: a compiled model is traced once more
for a product, not once per layer.
Weights are not counted: a block of a weight far below its line loses bits that matter only where the other operand is as
far above, and there it is the other operand that is counted.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..context import STEP
from ..counters import counters
from ..formats import Direction
from ..tensor import torch_compat
from ..recipe import QUANTIZED_TYPES as SLOTS
from .plan import PRODUCTS

_GUARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Counted(NamedTuple):
    """Counts on their way to the host: int64 [modules, slots, directions, (far below, nonzero)]."""

    modules: list[weakref.ref]
    counts: Tensor
    arrived: torch.cuda.Event


_UNDERWAY: list[_Counted] = []


def guard_of(module: nn.Module, device: torch.device) -> Tensor:
    """int64 [slots, directions, 2] on `device`: what the module's quantizers count since the last judgement.

    Experts of packed weights, which are moved together, count together (`counts_with`).
    """
    module = module.counts_with or module
    if module._guard is None or module._guard.device != device:
        with torch.inference_mode(False):
            module._guard = torch.zeros(len(SLOTS), len(Direction), 2, dtype=torch.int64, device=device)
        _GUARDED.add(module)
    return module._guard


def backward_guard_of(module: nn.Module, device: torch.device) -> Tensor:
    """`guard_of` of what a compiled backward counts: a graph's forward and backward write tensors of their own."""
    module = module.counts_with or module
    if module._backward_guard is None or module._backward_guard.device != device:
        with torch.inference_mode(False):
            module._backward_guard = torch.zeros_like(guard_of(module, device))
    return module._backward_guard


def judge(*_) -> None:
    """Move products by the counts that have arrived, then send the counts since; called as steps begin."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    while _UNDERWAY and _UNDERWAY[0].arrived.query():
        done = _UNDERWAY.pop(0)
        for ref, counts in zip(done.modules, _with_shared(done)):
            if (module := ref()) is not None:
                _move(module, counts)
    modules = [m for m in _GUARDED if m._guard is not None]
    if modules and not _UNDERWAY:
        guards, of_graphs = [m._guard for m in modules], [m._backward_guard for m in modules]
        device, none = guards[0].device, torch.zeros_like(guards[0])
        counts = sum(torch.stack([none if g is None else g.to(device) for g in of]) for of in (guards, of_graphs))
        counts = counts.to("cpu", non_blocking=True)
        torch_compat.foreach_zero_([g for g in (*guards, *of_graphs) if g is not None])
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        _UNDERWAY.append(_Counted([weakref.ref(m) for m in modules], counts, arrived))


def _with_shared(done: _Counted) -> list:
    """Each module's counts, those of its input from the layer that quantized it."""
    counts = done.counts.tolist()
    guards = [None if (module := ref()) is None else module._guard for ref in done.modules]
    at = {id(g): i for i, g in enumerate(guards)}
    shared = [at.get(id(lead._guard)) if (lead := _lead_of(ref())) is not None else None for ref in done.modules]
    inputs = [c[SLOTS.index("input")] for c in counts]
    for i, maker in enumerate(shared):
        if maker is not None:
            own = inputs[i]
            counts[i][SLOTS.index("input")] = [[a + b for a, b in zip(*d)] for d in zip(own, inputs[maker])]
    return counts


def _lead_of(module: nn.Module | None) -> nn.Module | None:
    """The layer whose codes of a shared input this one multiplies (`linear.share_input`)."""
    return None if module is None or module._input_of is None else module._input_of()


def _move(module: nn.Module, counts: list) -> None:
    """Move the products of all layers alike whose operands this one cannot anchor.

    counts: [slot][direction] -> (far below, nonzero).
    """
    tolerance, plan = module.recipe.anchor_tolerance, module.plan
    for product in PRODUCTS:
        for slot, direction in (product.a, product.b):
            far, nonzero = counts[SLOTS.index(slot)][list(Direction).index(direction)]
            if product.name not in plan.moved and far > tolerance * nonzero:
                plan = replace(plan, moved=(*plan.moved, product.name))
                why = f"{slot}.{direction.value}: {far / nonzero:.1%} of the blocks"
                counters.add("moved", (module._name, product.name, why))
    if plan is module.plan:
        return
    for other in _alike(module):
        for product in plan.moved if other is not module else ():
            if product not in other.plan.moved:
                counters.add("moved", (other._name, product, f"as for {module._name}"))
        other._plan = plan


def _alike(module: nn.Module) -> list[nn.Module]:
    """The layers of its model that have its recipe and plan: one decision for all, so that a compiled model is traced once more."""
    steps = module.__dict__.get("_training_steps")
    return [module] if steps is None else [
        m for m in _GUARDED
        if m.__dict__.get("_training_steps") is steps and m.recipe == module.recipe and m.plan.key == module.plan.key
    ]


STEP.followers.append(judge)

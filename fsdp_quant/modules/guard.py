"""The anchoring guard: products whose operands one exponent a line does not serve move to a domain that decodes exactly.

Quantizing counts on the device how many nonzero blocks lie so far below their line's exponent that they lose bits. After
each optimizer step the counts start for the host without being waited for, and are judged at a later one, when they have
arrived: nothing here waits for a device. Each rank judges what it multiplied; formats and collectives do not change.
Weights are not counted: a block of a weight far below its line loses bits that matter only where the other operand is as
far above, and there it is the other operand that is counted.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..counters import counters
from ..formats import Direction
from ..tensor import torch_compat
from .linear_op import COUNTED_BY, SLOTS
from .plan import PRODUCTS

_GUARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Counted(NamedTuple):
    """Counts on their way to the host: int64 [modules, slots, directions, (far below, nonzero)]."""

    modules: list[weakref.ref]
    counts: Tensor
    arrived: torch.cuda.Event


_UNDERWAY: list[_Counted] = []


def guard_of(module: nn.Module, device: torch.device) -> Tensor:
    """int64 [slots, directions, 2] on `device`: what the module's quantizers count since the last judgement."""
    if module._guard is None or module._guard.device != device:
        with torch.inference_mode(False):
            module._guard = torch.zeros(len(SLOTS), len(Direction), 2, dtype=torch.int64, device=device)
        _GUARDED.add(module)
    return module._guard


def judge(*_) -> None:
    """Move products by the counts that have arrived, then send the counts since; called after optimizer steps."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    while _UNDERWAY and _UNDERWAY[0].arrived.query():
        done = _UNDERWAY.pop(0)
        for ref, counts in zip(done.modules, _with_shared(done)):
            if (module := ref()) is not None:
                _move(module, counts)
    modules = [m for m in _GUARDED if m._guard is not None]
    if modules and not _UNDERWAY:
        guards = [m._guard for m in modules]
        device = guards[0].device
        counts = torch.stack([g.to(device) for g in guards]).to("cpu", non_blocking=True)
        torch_compat.foreach_zero_(guards)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        _UNDERWAY.append(_Counted([weakref.ref(m) for m in modules], counts, arrived))


def _with_shared(done: _Counted) -> list:
    """Each module's counts, those of its input from the layer that quantized it."""
    counts = done.counts.tolist()
    guards = [None if (module := ref()) is None else module._guard for ref in done.modules]
    at = {id(g): i for i, g in enumerate(guards)}
    shared = [at.get(id(COUNTED_BY.get(g))) if g is not None else None for g in guards]
    inputs = [c[SLOTS.index("input")] for c in counts]
    for i, maker in enumerate(shared):
        if maker is not None:
            own = inputs[i]
            counts[i][SLOTS.index("input")] = [[a + b for a, b in zip(*d)] for d in zip(own, inputs[maker])]
    return counts


def _move(module: nn.Module, counts: list) -> None:
    """counts: [slot][direction] -> (far below, nonzero)."""
    tolerance, plan = module.recipe.anchor_tolerance, module.plan
    for product in PRODUCTS:
        for slot, direction in (product.a, product.b):
            far, nonzero = counts[SLOTS.index(slot)][list(Direction).index(direction)]
            if product.name not in plan.moved and far > tolerance * nonzero:
                plan = replace(plan, moved=(*plan.moved, product.name))
                why = f"{slot}.{direction.value}: {far / nonzero:.1%} of the blocks"
                counters.add("moved", (module._name, product.name, why))
    module._plan = plan


register_optimizer_step_post_hook(judge)

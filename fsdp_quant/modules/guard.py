# SPDX-License-Identifier: Apache-2.0
"""The guard of anchored products: those whose operands one exponent does not serve go to finer
ones, then to none.

Where both operands of a product are codes, a kernel estimates in one of `PROBED_STEPS` what the
product lost to its anchors, over the error of its formats: from where along the contraction either
has the codes that underflowed, and the other its energy (`ops.product_error`). As a step
begins the sums start for the host without being waited for, and are judged at a later one, when
they have arrived: nothing here waits for a device. Each rank judges what it multiplied; formats and
collectives do not change. What one layer shows is decided for all layers of its model that have the
same recipe and plan: a compiled model is traced once more for a product, not once per layer.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..counters import counters
from ..ops.product_error import PROBED_STEPS
from ..tensor import torch_compat
from .plan import PRODUCTS, GemmPlan

# It reads the codes that a GEMM multiplies, not what they were made from: codes without an
# exponent, against the energy that the other operand has there, tell the loss within a factor of
# two. Lines that are probed follow the golden ratio: even strides met the first token of every
# sequence, whose gradient is noise.
_GUARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Summed(NamedTuple):
    """Sums on their way to the host: fp32 [modules, products, (extra, formats' own)], of the plans
    that modules had."""

    modules: list[weakref.ref]
    plans: list[GemmPlan]
    sums: Tensor
    arrived: torch.cuda.Event


_UNDERWAY: list[_Summed] = []
_since = 0  # times that `judge` was asked since sums were sent


def guard_of(module: nn.Module, device: torch.device) -> Tensor:
    """fp32 [products, 2] on `device`: what products of the module lost since the last judgement,
    and their formats' own errors.

    Experts of packed weights, which are moved together, add up together (`counts_with`).
    """
    global _since
    module, _since = module.counts_with or module, PROBED_STEPS
    if module._guard is None or module._guard.device != device:
        with torch.inference_mode(False):
            module._guard = torch.zeros(len(PRODUCTS), 2, device=device)
        _GUARDED.add(module)
    return module._guard


def backward_guard_of(module: nn.Module, device: torch.device) -> Tensor:
    """`guard_of` of what a compiled backward adds: a graph's forward and backward write tensors of
    their own."""
    module = module.counts_with or module
    if module._backward_guard is None or module._backward_guard.device != device:
        with torch.inference_mode(False):
            module._backward_guard = torch.zeros_like(guard_of(module, device))
    return module._backward_guard


def judge() -> None:
    """Move products by the sums that have arrived, and send those since, in one of `PROBED_STEPS`;
    called as steps begin or end."""
    global _since
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return
    while _UNDERWAY and _UNDERWAY[0].arrived.query():
        done = _UNDERWAY.pop(0)
        for ref, plan, sums in zip(done.modules, done.plans, done.sums.tolist()):
            # one rung at a time, whoever asks for it
            if (module := ref()) is not None and module.plan.key == plan.key:
                _move(module, sums)
    modules = [m for m in _GUARDED if m._guard is not None]
    _since += bool(modules)
    if modules and not _UNDERWAY and _since >= PROBED_STEPS:
        _since = 0
        _send(modules)


def _send(modules: list[nn.Module]) -> None:
    guards, of_graphs = [m._guard for m in modules], [m._backward_guard for m in modules]
    device, none = guards[0].device, torch.zeros_like(guards[0])
    sums = sum(
        torch.stack([none if g is None else g.to(device) for g in of]) for of in (guards, of_graphs)
    )
    sums = sums.to("cpu", non_blocking=True)
    torch_compat.foreach_zero_([g for g in (*guards, *of_graphs) if g is not None])
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    _UNDERWAY.append(
        _Summed([weakref.ref(m) for m in modules], [m.plan for m in modules], sums, arrived)
    )


def _move(module: nn.Module, sums: list) -> None:
    """Move the products of all layers alike whose operands their rung does not serve in this one.

    sums: [product] -> (extra, formats' own), mean squares.
    """
    tolerance, plan = module.recipe.anchor_tolerance, module.plan
    plan = plan if plan.alone else plan.of_groups
    rungs = plan.moved
    moved: dict[str, str] = {}
    for product, (extra, own) in zip(PRODUCTS, sums):
        if (
            extra > tolerance**2 * own
            and (rung := plan.next_rung(product, module.is_shared)) is not None
        ):
            moved[product.name] = (
                f"to {rung}: its anchors add {_share(extra, own)} of its formats' error"
            )
            rungs[product.name] = rung
    if not moved:
        return
    alike, plan = _alike(module), module.plan.moved_to(rungs)
    for other in alike:
        for product, why in moved.items():
            counters.add(
                "moved",
                (other._name, product, why if other is module else f"as for {module._name}"),
            )
        other._plan = plan
    torch_compat.foreach_zero_(
        [g for m in alike for g in (m._guard, m._backward_guard) if g is not None]
    )  # of the rung before


def _share(extra: float, own: float) -> str:
    return f"{math.sqrt(extra / own):.0%}" if extra < 100 * own else "ten times"


def _alike(module: nn.Module) -> list[nn.Module]:
    """The layers of its model that have its recipe and plan: one decision for all, so that a
    compiled model is traced once more."""
    steps = module.__dict__.get("_training_steps")
    return (
        [module]
        if steps is None
        else [
            m
            for m in _GUARDED
            if m.__dict__.get("_training_steps") is steps
            and m.recipe == module.recipe
            and m.plan.key == module.plan.key
        ]
    )

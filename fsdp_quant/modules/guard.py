# SPDX-License-Identifier: Apache-2.0
"""The guard of anchored products: those whose operands one exponent does not serve go to finer
ones, then to none.

Where both operands of a product are codes, a kernel estimates in one of `PROBED_STEPS` (of groups
of tokens in runs of 128, `PROBED_STEPS_OF_RUNS`) what the product lost to its anchors, over the
error of its formats: from where along the contraction either has the codes that underflowed, and
the other its energy (`ops.product_error`). As a step begins the sums start for the host without
being waited for, and are judged at a later one, when
they have arrived: nothing here waits for a device. Each rank judges what it multiplied; formats and
collectives do not change. What one layer shows is decided for all layers of its model that have the
same recipe and plan: a compiled model is traced once more for a product, not once per layer.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..counters import counters
from ..ops.product_error import PROBED_STEPS
from ..recipe import Recipe
from ..tensor import torch_compat
from .plan import PRODUCTS, GemmPlan

# It reads the codes that a GEMM multiplies, not what they were made from: codes without an
# exponent, against the energy that the other operand has there, tell the loss within a factor of
# two. Lines that are probed follow the golden ratio: even strides met the first token of every
# sequence, whose gradient is noise.


class GuardedLayer(Protocol):
    """What the guard reads and writes of a layer (`layer_runtime.LayerRuntime`).

    guard, backward_guard:  fp32 [products, 2] (extra, formats' own) sums of eager mode and of
                            compiled forwards, and of compiled backwards: a graph's forward and
                            backward write tensors of their own. None until a product is watched.
    guard_owner:            the layer that adds up for this one; None: itself.
    """

    name: str
    recipe: Recipe
    plan: GemmPlan
    guard: Tensor | None
    backward_guard: Tensor | None

    @property
    def guard_owner(self) -> GuardedLayer | None: ...
    @property
    def steps(self) -> object: ...
    @property
    def is_shared(self) -> bool: ...


_GUARDED: weakref.WeakSet[GuardedLayer] = weakref.WeakSet()


class _Summed(NamedTuple):
    """Sums on their way to the host: fp32 [layers, products, (extra, formats' own)], of the plans
    that layers had."""

    layers: list[weakref.ref[GuardedLayer]]
    plans: list[GemmPlan]
    sums: Tensor
    arrived: torch.cuda.Event


_UNDERWAY: list[_Summed] = []
_since = 0  # calls of `apply_underflow_policy` since sums were sent


def guard_of(layer: GuardedLayer, device: torch.device) -> Tensor:
    """The layer's `guard` on `device`: what its products lost since the last judgement."""
    global _since
    layer, _since = layer.guard_owner or layer, PROBED_STEPS
    guard = layer.guard
    if guard is None or guard.device != device:
        with torch.inference_mode(False):
            layer.guard = guard = torch.zeros(len(PRODUCTS), 2, device=device)
        _GUARDED.add(layer)
    return guard


def backward_guard_of(layer: GuardedLayer, device: torch.device) -> Tensor:
    """The layer's `backward_guard` on `device`."""
    layer = layer.guard_owner or layer
    guard = layer.backward_guard
    if guard is None or guard.device != device:
        with torch.inference_mode(False):
            layer.backward_guard = guard = torch.zeros_like(guard_of(layer, device))
    return guard


def apply_underflow_policy() -> None:
    """Move products by the sums that have arrived, and send those since, in one of `PROBED_STEPS`;
    called as steps begin or end."""
    global _since
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return
    while _UNDERWAY and _UNDERWAY[0].arrived.query():
        done = _UNDERWAY.pop(0)
        for ref, plan, sums in zip(done.layers, done.plans, done.sums.tolist()):
            # one rung at a time, whoever asks for it
            if (layer := ref()) is not None and layer.plan.key == plan.key:
                _move(layer, sums)
    guarded = [(layer, layer.guard) for layer in _GUARDED if layer.guard is not None]
    _since += bool(guarded)
    if guarded and not _UNDERWAY and _since >= PROBED_STEPS:
        _since = 0
        _send(guarded)


def _send(guarded: list[tuple[GuardedLayer, Tensor]]) -> None:
    layers, guards = [layer for layer, _ in guarded], [guard for _, guard in guarded]
    of_graphs, none = [layer.backward_guard for layer in layers], torch.zeros_like(guards[0])
    device = none.device
    sums = torch.stack([g.to(device) for g in guards])
    sums = sums + torch.stack([none if g is None else g.to(device) for g in of_graphs])
    sums = sums.to("cpu", non_blocking=True)
    torch_compat.foreach_zero_([g for g in (*guards, *of_graphs) if g is not None])
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    _UNDERWAY.append(
        _Summed([weakref.ref(m) for m in layers], [m.plan for m in layers], sums, arrived)
    )


def _move(layer: GuardedLayer, sums: list) -> None:
    """Move the products whose operands their rung does not serve, of all layers alike.

    sums: [product] -> (extra, formats' own), mean squares.
    """
    tolerance, plan = layer.recipe.anchor_tolerance, layer.plan
    plan = plan if plan.alone else plan.of_groups
    rungs = plan.moved
    moved: dict[str, str] = {}
    for product, (extra, own) in zip(PRODUCTS, sums):
        if (
            extra > tolerance**2 * own
            and (rung := plan.next_rung(product, layer.is_shared)) is not None
        ):
            moved[product.name] = (
                f"to {rung}: its anchors add {_share(extra, own)} of its formats' error"
            )
            rungs[product.name] = rung
    if not moved:
        return
    alike, plan = _alike(layer), layer.plan.moved_to(rungs)
    for other in alike:
        for product, why in moved.items():
            counters.add(
                "moved",
                (other.name, product, why if other is layer else f"as for {layer.name}"),
            )
        other.plan = plan
    torch_compat.foreach_zero_(
        [g for m in alike for g in (m.guard, m.backward_guard) if g is not None]
    )  # of the rung before


def _share(extra: float, own: float) -> str:
    return f"{math.sqrt(extra / own):.0%}" if extra < 100 * own else "ten times"


def _alike(layer: GuardedLayer) -> list[GuardedLayer]:
    """The layers of its model that have its recipe and plan: one decision for all, so that a
    compiled model is traced once more."""
    if layer.steps is None:
        return [layer]
    return [
        m
        for m in _GUARDED
        if m.steps is layer.steps and m.recipe == layer.recipe and m.plan.key == layer.plan.key
    ]

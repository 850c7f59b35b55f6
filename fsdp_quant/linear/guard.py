# SPDX-License-Identifier: Apache-2.0
"""Guard anchored GEMMs against underflow: if one exponent does not fit the operands of a GEMM,
move the GEMM to finer anchors, and finally to none.

If both operands of a GEMM are codes, a kernel estimates, in the steps that are probed, the
error that anchors add, relative to the error of the formats (`ops.product_error`). The estimate
compares where along the contraction one operand has codes that underflowed with where the other has
its energy.

When a step begins, an asynchronous copy of the sums to the host starts. A later step judges them,
once they have arrived, so nothing here waits for a device. Each rank judges the GEMMs that it runs;
formats and collectives do not change. A decision applies to the layers of the same recipe and plan
in modules of the same name, say model.layers.*.mlp: a compiled block is traced again once per GEMM,
not once per layer, and attention does not move the GEMMs of an MLP.
"""

from __future__ import annotations

import math
import re
import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..counters import counters
from ..ops import opaque
from ..ops.product_error import PROBED_STEPS
from ..recipe import Recipe
from ..tensor import torch_compat
from .plan import PRODUCTS, GemmPlan

# The estimate reads the codes that a GEMM multiplies, not the values that were quantized. Codes
# without an exponent, weighted by the energy of the other operand there, give the loss within a
# factor of two. The probed lines follow the golden ratio: even strides would probe the first token
# of every sequence, whose gradient is noise.


class GuardedLayer(Protocol):
    """State of a layer that the guard reads and writes (`runtime.LayerRuntime`).

    guard:           fp32 [GEMMs, 2], sums of (extra error, error of the formats) from eager mode
                     and compiled forwards. None until a GEMM is watched.
    backward_guard:  the same from compiled backwards, because a graph's forward and backward must
                     write different tensors.
    guard_owner:     the layer whose `guard` collects the sums of this one; None: itself.
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
    def set_plan(self, plan: GemmPlan) -> None: ...


_GUARDED: weakref.WeakSet[GuardedLayer] = weakref.WeakSet()


class _Summed(NamedTuple):
    """Sums that are being copied to the host.

    layers, plans:  the layers, and the plans that they had when the copy started.
    sums:           fp32 [layers, GEMMs, 2] of (extra error, error of the formats).
    arrived:        recorded after the copy.
    """

    layers: list[weakref.ref[GuardedLayer]]
    plans: list[GemmPlan]
    sums: Tensor
    arrived: torch.cuda.Event


_UNDERWAY: list[_Summed] = []
_since = 0  # calls of `apply_underflow_policy` since the last copy started


def guard_of(layer: GuardedLayer, device: torch.device) -> Tensor:
    """Return the layer's `guard` on `device`, allocated if needed: sums since the last copy."""
    global _since
    layer, _since = layer.guard_owner or layer, PROBED_STEPS
    if layer.guard is None or layer.guard.device != device:
        with torch.inference_mode(False):
            layer.guard = torch.zeros(len(PRODUCTS), 2, dtype=torch.float32, device=device)
        if not torch_compat.is_fake():
            _GUARDED.add(layer)
    return layer.guard


def backward_guard_of(layer: GuardedLayer, device: torch.device) -> Tensor:
    """Return the layer's `backward_guard` on `device`, allocated if needed."""
    layer = layer.guard_owner or layer
    if layer.backward_guard is None or layer.backward_guard.device != device:
        with torch.inference_mode(False):
            layer.backward_guard = torch.zeros_like(guard_of(layer, device))
    return layer.backward_guard


@opaque.eager_only
def apply_underflow_policy() -> None:
    """Move GEMMs by the sums that have arrived, and start to copy newer sums, in one of
    `PROBED_STEPS` calls. Called when a step begins or ends."""
    global _since
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    while _UNDERWAY and _UNDERWAY[0].arrived.query():
        copied = _UNDERWAY.pop(0)
        for ref, plan, sums in zip(copied.layers, copied.plans, copied.sums.tolist()):
            # one rung at a time: skip layers whose plan changed since the copy started
            if (layer := ref()) is not None and layer.plan.key == plan.key:
                _move(layer, sums)
    guarded = [layer for layer in _GUARDED if layer.guard is not None]
    _since += bool(guarded)
    if guarded and not _UNDERWAY and _since >= PROBED_STEPS:
        _since = 0
        _send(guarded)


def _send(layers: list[GuardedLayer]) -> None:
    """Start to copy the sums of these layers to the host, and set them to 0."""
    zeros = torch.zeros_like(_guards_of(layers)[0])
    device = zeros.device
    forward, backward = (
        torch.stack([zeros if g is None else g.to(device) for g in each])
        for each in ([m.guard for m in layers], [m.backward_guard for m in layers])
    )
    sums = (forward + backward).to("cpu", non_blocking=True)
    torch_compat.foreach_zero_(_guards_of(layers))
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    _UNDERWAY.append(
        _Summed([weakref.ref(m) for m in layers], [m.plan for m in layers], sums, arrived)
    )


def _guards_of(layers: list[GuardedLayer]) -> list[Tensor]:
    return [g for m in layers for g in (m.guard, m.backward_guard) if g is not None]


def _move(layer: GuardedLayer, sums: list) -> None:
    """Move the GEMMs whose anchors add too much error to their next rung, in all layers alike.

    sums:  per GEMM, mean squares of (extra error, error of the formats).
    """
    tolerance, plan = layer.recipe.anchor_tolerance, layer.plan
    plan = plan if plan.alone else plan.of_groups
    rungs, reasons = plan.moved, {}
    for product, (extra, format_error) in zip(PRODUCTS, sums):
        if (
            extra > tolerance**2 * format_error
            and (rung := plan.next_rung(product, layer.is_shared)) is not None
        ):
            is_counted = extra < 100 * format_error
            share = f"{math.sqrt(extra / format_error):.0%}" if is_counted else "ten times"
            reasons[product.name] = f"to {rung}: its anchors add {share} of its formats' error"
            rungs[product.name] = rung
    if not reasons:
        return
    layers, plan, kind = [layer], layer.plan.moved_to(rungs), _kind(layer)
    if layer.steps is not None:  # one decision for all alike: the model is traced again once
        layers = [m for m in _GUARDED if m.steps is layer.steps and _kind(m) == kind]
    for other in layers:
        for product, reason in reasons.items():
            reason = reason if other is layer else f"as for {layer.name}"
            counters.add("moved", (other.name, product, reason))
        other.set_plan(plan)
    torch_compat.expect_graphs()
    torch_compat.foreach_zero_(_guards_of(layers))  # they hold sums of the old rung


def _kind(layer: GuardedLayer) -> tuple:
    """Its recipe, its plan and the name of the module that it is part of, without numbers."""
    return layer.recipe, layer.plan.key, re.sub(r"\d+", "*", layer.name.rpartition(".")[0])

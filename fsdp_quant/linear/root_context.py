# SPDX-License-Identifier: Apache-2.0
"""What begins with a forward of FSDP2, before it gathers weights: a pass, and their formats inside
`fq.autocast`.

FSDP2 gathers a weight before its layer runs, and again in the backward. So the context that counts
is that of the root's forward. Its formats stay until a forward of the root begins in another one.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

from torch import nn

from ..context import Autocast, current_autocast
from ..tensor import torch_compat
from ..tensor.agreement import text_of
from ..tensor.fsdp_hooks import managed_states, set_formats
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.rendezvous import agree_apart
from ..tensor.weight_state import WeightState, WeightTensor
from .passes import OF_ROOT, layers_of, steps_within


class RootLayers:
    """Layers of a root, whose steps are counted. No forward looks at each: experts are many.

    steps:        -> the runtimes that they count.
    formats_set:  `WeightState.formats_set` when all weights had the formats of their plans.
    """

    def __init__(self, root: nn.Module):
        steps_within(root)
        self.formats_set, layers = -1, layers_of(root)
        self.layers, self.steps = list(map(weakref.ref, layers)), {}
        for runtime in (layer.runtime for layer in layers):
            self.steps.setdefault(runtime.steps, []).append(runtime)


def forward_begins(root: nn.Module, trains: bool, is_outermost: bool) -> None:
    """Begin the pass of a forward of FSDP2 (see the note in `passes`), and let it gather weights in
    the formats of this thread's `fq.autocast`.

    is_outermost:  else a part of a root is called by itself, as a layer may be.

    Every rank must call it. Raises ValueError, on every rank, if ranks enter contexts of different
    recipes.
    """
    of_root, override = OF_ROOT.get(root), current_autocast()
    if of_root is None:
        of_root = OF_ROOT[root] = RootLayers(root)
    for steps, runtimes in of_root.steps.items():
        if steps is not None and steps.is_counting:
            steps.has_root = True
            passes = (runtime.ran_in for runtime in runtimes)
            if is_outermost or not trains or steps.current is None or steps.current in passes:
                steps.enter(trains, is_root=True)
    if override is not None or of_root.formats_set != WeightState.formats_set:
        _take_formats(root, of_root, override)


def _take_formats(root: nn.Module, of_root: RootLayers, override: Autocast | None) -> None:
    formats_set, changes, as_planned = WeightState.formats_set, [], override is None
    for layer in (layer for of in of_root.layers if (layer := of()) is not None):
        runtime, state, plan = layer.runtime, layer.runtime.weight_state, layer.runtime.plan
        if override is not None:
            plan = replace(layer.plan_in(override, runtime.ids.device), alone=plan.alone)
        if plan.weight != state.quantizer:
            as_planned = False
            if isinstance(torch_compat.local_of(layer.trained[0]), _MAY_BE_GATHERED):
                changes.append((runtime, plan))
        elif state.plan != plan:  # other layouts: on this rank alone, where its guard moved them
            state.plan = plan
            WeightState.formats_set += 1
    of_root.formats_set = formats_set if as_planned else -1
    # codes that are parameters keep their formats: their layers refuse the context
    managed = {i: m for i, m in managed_states().items() if not m[1].holds_codes} if changes else {}
    changes = [(runtime, plan) for runtime, plan in changes if id(runtime.weight_state) in managed]
    if not changes:
        return
    recipe = "none" if override is None else text_of(override.recipe)
    meshes = [managed[id(runtime.weight_state)][0].registered.device_mesh for runtime, _ in changes]
    ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    agree_apart("fq.autocast around the forward of fully_shard", recipe, ranks, _REMEDY)
    torch_compat.reshard(root)
    for runtime, plan in changes:
        set_formats(runtime.weight_state, plan, managed)
        runtime.histories(plan, "weight", None, runtime.planned_histories("weight"))


_MAY_BE_GATHERED = WeightTensor, QuantizedTensor
_REMEDY = "enter the same fq.autocast around the forward of the root on every rank"

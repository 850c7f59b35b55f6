# SPDX-License-Identifier: Apache-2.0
"""`fq.autocast` around a forward of `fully_shard`: the formats in which FSDP2 gathers weights.

FSDP2 gathers a weight before its layer runs, and again in the backward. So the context that counts
is that of the root's forward. Its formats stay until a forward of the root begins in another one.
"""

from __future__ import annotations

from torch import nn

from ..context import current_autocast
from ..tensor import torch_compat
from ..tensor.agreement import text_of
from ..tensor.fsdp_hooks import managed_states, set_formats
from ..tensor.rendezvous import agree_apart
from .passes import layers_of_root, root_begins


def forward_begins(root: nn.Module, trains: bool, is_outermost: bool) -> None:
    """Begin the pass (`passes.root_begins`), and take the formats of this thread's `fq.autocast`.

    Every rank must call it. Raises ValueError, on every rank, if ranks enter contexts of different
    recipes.
    """
    root_begins(root, trains, is_outermost)
    override, changes = current_autocast(), []
    for layer in layers_of_root(root):
        runtime = layer.runtime
        plan = layer.plan if override is None else layer.plan_in(override, runtime.ids.device)
        if plan.weight != runtime.weight_state.quantizer:
            changes.append((runtime, plan))
    managed = managed_states() if changes else {}
    # codes that are parameters keep their formats: their layers refuse the context
    changes = [
        (runtime, plan)
        for runtime, plan in changes
        if (of := managed.get(id(runtime.weight_state))) and not of[1].holds_codes
    ]
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


_REMEDY = "enter the same fq.autocast around the forward of the root on every rank"

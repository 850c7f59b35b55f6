"""`hold`, `freeze` and `unfreeze`: codes of weights that outlive one forward, because a user asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .convert import converted_modules
from .linear_op import weight_storages


@contextlib.contextmanager
def hold(model: nn.Module) -> Iterator[None]:
    """Multiply the codes of each weight's first use until the context ends.

    For micro-batches that share one version of the weights, generation and evaluation: each weight is quantized once, and its
    codes stay in memory beside it (one byte per element and direction of 8-bit formats). Bits are those without it. Under
    `fully_shard` the shard's codes are kept, and sent by each gather. Graphs of torch.compile quantize in each call.

    Every rank that shares the weights must enter and leave it alike.

    Raises ValueError for a model without converted modules, or one that is held already; inside, StaleWeightError at the next
    use of a weight that was written, as far as torch counts writes.
    """
    states = _states_of(model)
    if not states:
        raise ValueError("fq.hold found no fq.Linear; call fq.convert(model, recipe) first")
    inside = next((state.name for state in states if state.held is not None), None)
    if inside is not None:
        raise ValueError(f"fq.hold: {inside} is held already; enter the context once")
    for state in states:
        state.held = {}
    try:
        yield
    finally:
        for state in states:
            state.held = None


def _states_of(model: nn.Module) -> list[WeightState]:
    owners = [m._weight_state for m in model.modules() if "_weight_state" in m.__dict__]
    return list(dict.fromkeys([*owners, *(m._weight_state for m in converted_modules(model).values())]))


@torch.no_grad()
def freeze(module: nn.Module) -> int:
    """Turn the weights of `module` that do not train into their codes, for good; returns how many.

    For the base under LoRA: a frozen `fq.Linear` holds a `QuantizedTensor` in place of its high-precision weight, of both
    directions, as its GEMMs read it; where the columnwise codes are derived from the rowwise ones (`backward_override=
    "dequantized"`), of the rowwise ones alone, from which each backward derives the others. Bits of outputs and of gradients are
    those before. `unfreeze` gives the values that the codes have; the values that they were made from are gone, from the state
    dict too. Packed experts and transposed weights stay as they are.

    Raises ValueError, before anything is changed, for a module without frozen `fq.Linear` weights, and for a weight that is
    sharded, that is a quantized parameter, or that keeps amax histories, naming it.
    """
    own = {n: m for n, m in converted_modules(module).items() if m._parameters.get("weight") is not None}
    frozen = {name: layer for name, layer in own.items() if not layer.weight.requires_grad}
    layers = {name: layer for name, layer in frozen.items() if type(layer.weight) is not QuantizedTensor}
    if not layers:
        raise ValueError("fq.freeze found no frozen fq.Linear; set requires_grad_(False) on the weights that do not train")
    for name, layer in layers.items():
        if isinstance(layer.weight, QuantizedTensor):
            raise ValueError(f"{name}.weight is a quantized parameter: it holds codes already, and its optimizer writes them")
        if isinstance(layer.weight, DTensor):
            raise ValueError(
                f"{name}.weight is sharded, and fq.freeze takes whole weights; leave it out of fully_shard with ignored_params="
            )
        if layer.plan.weight.delayed_directions:
            raise ValueError(
                f"{name}.weight is scaled by a history of amaxes, which changes its codes; give weights current scaling "
                "before fq.freeze"
            )
        if layer.weight.device.type == "meta":
            raise ValueError(f"{name}.weight is on the meta device; initialize it before fq.freeze")
    for layer in layers.values():
        weight, plan = layer.weight, layer.plan.on(layer.weight.dtype, layer.weight.device)
        directions = [ROWWISE] if plan.weight.is_derived else list(Direction)
        made = weight_storages(weight, directions, plan, layer._weight_state, weight.dtype)
        codes = QuantizedTensor(made[ROWWISE], made.get(COLUMNWISE), shape=tuple(weight.shape))
        layer.weight = nn.Parameter(codes, requires_grad=False)
    return len(layers)


@torch.no_grad()
def unfreeze(module: nn.Module) -> int:
    """Turn the codes that `freeze` made into a high-precision weight of their rowwise values, which does not train; returns how many.

    For what writes weights or needs their values: merging LoRA into its base, `save_pretrained`.

    Raises ValueError for a module without frozen codes.
    """
    layers = [m for m in converted_modules(module).values() if type(m._parameters.get("weight")) is QuantizedTensor]
    if not layers:
        raise ValueError("fq.unfreeze found no weight that fq.freeze made")
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return len(layers)

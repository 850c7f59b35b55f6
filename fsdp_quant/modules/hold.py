# SPDX-License-Identifier: Apache-2.0
"""`hold`, `freeze` and `unfreeze`: codes of weights that outlive one forward, because a user asked
for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..formats import COLUMNWISE, ROWWISE
from ..tensor.fsdp_hooks import managed_of
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.refresh import refresh_codes
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import WeightState
from .has_weight import HasWeight
from .linear import Linear
from .operands import weight_storages
from .steps import converted_modules


@contextlib.contextmanager
def hold(model: nn.Module) -> Iterator[None]:
    """Multiply the codes of each weight's first use until the context ends.

    For micro-batches that share one version of the weights, generation and evaluation: each weight
    is quantized once, and its codes stay in memory beside it (one byte per element and direction of
    8-bit formats). Bits are those without it. Under `fully_shard` the shard's codes are kept, and
    sent by each gather. Graphs of torch.compile quantize in each call.

    Every rank that shares the weights must enter and leave it alike.

    Raises ValueError for a model without converted modules, or one that is held already; inside,
    StaleWeightError at the next use of a weight that was written, as far as torch counts writes.

    >>> model, x = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8"), torch.ones(2, 64)
    >>> with fq.hold(model):
    ...     for _ in range(4):  # micro-batches: the weight is quantized once
    ...         model(x).sum().backward()
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
    owners = [
        m._weight_state
        for m in model.modules()
        if isinstance(m, HasWeight) and hasattr(m, "_weight_state")
    ]
    return list(
        dict.fromkeys(
            [*owners, *(m.runtime.weight_state for m in converted_modules(model).values())]
        )
    )


@torch.no_grad()
def freeze(module: nn.Module, backward: bool = True) -> int:
    """Turn the weights of `module` that do not train into their codes, for good; returns of how
    many layers.

    backward:  False: codes of the forward alone, for inference; a backward through them raises.

    For the base under LoRA: a frozen `fq.Linear` holds a `QuantizedTensor` in place of its
    high-precision weight, or of a quantized parameter with its values: the codes that its GEMMs
    read, as they read them. Bits of outputs and of gradients are those before.
    `weight.dequantize()` gives the values that the codes have; the values that they were made from
    are gone, from the state dict too. A quantized parameter under `fully_shard` stays sharded and
    drops its values: every rank must call it. Packed experts and transposed weights stay as they
    are.

    Raises ValueError, before anything is changed, for a module without frozen `fq.Linear` weights,
    and for a high-precision weight that is sharded, or a weight that keeps amax histories, naming
    it.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model)
    1
    >>> isinstance(model[0].weight, fq.QuantizedTensor)
    True
    """
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()  # an evaluation leaves the root gathered
    own = {
        n: m
        for n, m in converted_modules(module).items()
        if m._parameters.get("weight") is not None
    }
    frozen = {name: layer for name, layer in own.items() if not layer.weight.requires_grad}
    layers = {
        name: layer for name, layer in frozen.items() if type(layer.weight) is not QuantizedTensor
    }
    if not layers:
        raise ValueError(
            "fq.freeze found no frozen fq.Linear; set requires_grad_(False) on the weights that do "
            "not train"
        )
    for name, layer in layers.items():
        state = layer.runtime.weight_state
        if isinstance(layer.weight, DTensor) and not (
            state.holds_codes and managed_of(state) is not None
        ):
            raise ValueError(
                f"{name}.weight is sharded, and fq.freeze takes whole weights, and quantized "
                "parameters of fully_shard; leave it out of fully_shard with ignored_params="
            )
        if layer.plan.weight.delayed_directions:
            raise ValueError(
                f"{name}.weight is scaled by a history of amaxes, which changes its codes; give "
                "weights current scaling before fq.freeze"
            )
        if layer.weight.device.type == "meta":
            raise ValueError(f"{name}.weight is on the meta device; initialize it before fq.freeze")
    sharded = {
        layer: local
        for layer in layers.values()
        if isinstance(layer.weight, DTensor)
        and isinstance(local := local_of(layer.weight), QuantizedWeight)
    }
    refresh_codes(list(dict.fromkeys(sharded.values())))
    for weight in sharded.values():
        weight.drop_values()
    made: dict[int, nn.Parameter] = {}
    for layer in [layer for layer in layers.values() if layer not in sharded]:
        weight, state = layer.weight, layer.runtime.weight_state
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(_codes_of(layer, weight, backward), requires_grad=False)
        if state.holds_codes:
            layer.runtime.set_weight_state(
                WeightState(state.name, state.quantizer, state.shape, state.compute_dtype)
            )
        layer.weight = made[id(weight)]
    return len(layers)


def _codes_of(layer: Linear, weight: Tensor, backward: bool) -> QuantizedTensor:
    """What products read of a weight; of the backward, what does not follow from the codes of the
    forward."""
    plan = layer.plan.on(weight.dtype, weight.device)
    wanted = [ROWWISE, *([COLUMNWISE] if backward and not plan.weight.is_derived else [])]
    codes = weight_storages(weight, wanted, plan, layer.runtime.weight_state, weight.dtype)
    return QuantizedTensor(codes[ROWWISE], codes.get(COLUMNWISE), shape=tuple(weight.shape))


@torch.no_grad()
def unfreeze(module: nn.Module) -> int:
    """Turn the codes that `freeze` made into a high-precision weight of their rowwise values, which
    does not train; returns how many.

    For what writes weights or needs their values: merging LoRA into its base, `save_pretrained`.

    Raises ValueError for a module without frozen codes.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model), fq.unfreeze(model)
    (1, 1)
    """
    layers = [
        m
        for m in converted_modules(module).values()
        if type(m._parameters.get("weight")) is QuantizedTensor
    ]
    if not layers:
        raise ValueError("fq.unfreeze found no weight that fq.freeze made")
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return len(layers)

# SPDX-License-Identifier: Apache-2.0
"""Keep codes of weights for longer than one forward, on request: `hold`, `freeze`, `unfreeze`."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..linear.linear import Linear
from ..linear.operands import weight_storages
from ..linear.passes import SCHEDULED
from ..models.set_recipe import check_fixed, converted_units
from ..models.steps import converted_modules
from ..tensor import torch_compat
from ..tensor.frozen import freeze_shards, unfreeze_shards
from ..tensor.fsdp_hooks import check_layout, managed_of
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import ManagedParam, local_of
from ..tensor.weight_state import Held, WeightState


@contextlib.contextmanager
def hold(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once, at its first use, and reuse its codes until the context ends.

    Use it for micro-batches that share one version of the weights, for generation and for
    evaluation. The codes stay in memory in addition to the weight (one byte per element and
    direction for 8-bit formats). Bits do not change. Under `fully_shard`, the shard's codes are
    kept and each all-gather sends them. Another recipe drops the codes. Weights that FSDP2 gathers
    in high precision are quantized in each call.

    If the model, or a part of it, is compiled, or the process has graphs, the codes of `fq.Linear`
    weights that no ranks share are computed at once, and graphs multiply them; a write inside is a
    warning at the end of the context. Graphs of experts, and weights with delayed scaling, quantize
    in each call.

    All ranks that share the weights must enter and leave the context at the same points.

    Raises ValueError for a model without converted modules, or one that is held already. Inside,
    the next use of a written weight raises StaleWeightError, if torch counted the write.

    >>> model, x = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8"), torch.ones(2, 64)
    >>> with fq.hold(model):
    ...     for _ in range(4):  # micro-batches: the weight is quantized once
    ...         model(x).sum().backward()
    """
    weights = quantized_weights(model)
    if not weights:
        raise ValueError("fq.hold found no fq.Linear; call fq.convert(model, recipe) first")
    states = {state: w for w in weights for state in (w.state, *w.state.matrices)}
    for state in states:
        if state.held is not None:
            raise ValueError(
                f"fq.hold: {state.name} is held already, by the context that was entered at "
                f"{state.held.place}; leave that one first (close its generator, if nothing will)"
            )
    place = _place_of_entry()
    for state, weight in states.items():
        state.held = Held(lambda weight=weight: weight.parameter, place)
    graphed: dict[WeightState, Linear] = {}
    if counters.has_graphs or any(map(torch_compat.is_compiled, model.modules())):
        layers = [m for m in converted_modules(model).values() if _is_held_in_graphs(m)]
        graphed = {layer.runtime.weight_state: layer for layer in layers}
    try:
        for layer in graphed.values():
            _hold_in_graphs(layer)
        yield
    finally:
        written = [s.name for s in graphed if s.held is not None and s.held.is_written()]
        if written:
            warnings.warn(
                f"{', '.join(written[:3])} (of {len(written)}) was written inside fq.hold, and "
                "graphs of torch.compile multiplied the codes of before until its end; leave the "
                "context before the weights change",
                stacklevel=3,
            )
        for state in states:
            state.held = None
        for layer in graphed.values():
            layer.runtime.graphs.codes = None


def _is_held_in_graphs(layer: nn.Module) -> bool:
    """Return whether graphs are given codes of the layer's weight: a plain parameter, of whose
    values alone both directions are quantized."""
    if not isinstance(layer, Linear) or layer.module_type != "linear" or layer.runtime.is_shared:
        return False
    if type(layer.weight) is not nn.Parameter or layer.parallel is not None:
        return False
    quantizer = layer.plan.weight
    is_quantized = all(e.fmt.is_quantized for e in quantizer.encodings.values())
    return is_quantized and not quantizer.delayed_directions and layer.weight.device.type != "meta"


def _hold_in_graphs(layer: Linear) -> None:
    """Give graphs the codes of a layer's weight, for activations of the dtype of now."""
    weight, graphs = layer.weight, layer.runtime.graphs
    dtype = torch_compat.autocast_dtype(weight.device) or weight.dtype
    graphs.has_columnwise = torch.is_grad_enabled()
    codes = _encode_weight(layer, graphs.has_columnwise, dtype)
    with torch_compat.outside_inference_mode():
        graphs.codes = QuantizedTensor(*codes.values(), shape=tuple(weight.shape))


def _place_of_entry() -> str:
    """ "file:line" of the code that enters `hold`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] in (__name__, contextlib.__name__):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@torch.no_grad()
def freeze(module: nn.Module, backward: bool = True) -> int:
    """Replace the weights of `module` that do not train by their codes; return their number.

    backward:  False: keep only the codes of the forward; a backward through them raises.

    Use it for the base model under LoRA. A frozen `fq.Linear` then holds a `QuantizedTensor`, with
    the codes that its GEMMs read, in the layout in which they read them. It replaces the
    high-precision weight, or a quantized parameter and its values. Bits of outputs and gradients do
    not change. `weight.dequantize()` returns the values of the codes; the values that were
    quantized are lost, also in the state dict. Packed experts and transposed weights do not change.

    Under `fully_shard` each rank keeps the codes of its rows, which gathers send. `freeze` comes
    before `fully_shard`, or after it; then every rank must call it. A model's state dict holds
    decoded values, and loads those that the codes stand for, and no others.

    Raises ValueError, before anything is changed, for a module without frozen `fq.Linear` weights.
    Raises ValueError too, for a DTensor that no `fully_shard` manages, a weight with amax
    histories, and one whose formats a schedule changes. Later `fq.set_recipe` refuses to change
    them.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model)
    1
    >>> isinstance(model[0].weight, fq.QuantizedTensor)
    True
    """
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()  # an evaluation leaves the root gathered
    layers = _untrained_layers(module)
    for name, layer in layers.items():
        _check_can_freeze(name, layer)
    for scheduled, (schedule, _) in SCHEDULED.items():
        check_fixed("fq.freeze", schedule, converted_units(scheduled), set(layers.values()))
    sharded = [layer for layer in layers.values() if isinstance(layer.weight, DTensor)]
    freeze_shards(_managed(sharded))
    frozen: dict[int, nn.Parameter] = {}
    for layer in [layer for layer in layers.values() if layer not in sharded]:
        weight, state = layer.weight, layer.runtime.weight_state
        if id(weight) not in frozen:
            codes = _encode_weight(layer, backward, weight.dtype).values()
            tensor = QuantizedTensor(*codes, shape=tuple(weight.shape))
            frozen[id(weight)] = nn.Parameter(tensor, requires_grad=False)
        if state.holds_codes:
            layer.runtime.set_weight_state(
                WeightState(state.name, state.quantizer, state.shape, state.compute_dtype)
            )
        layer.weight = frozen[id(weight)]
        layer.runtime.frozen = weakref.ref(layer)
    return len(layers)


def _encode_weight(
    layer: Linear, backward: bool, dtype: torch.dtype
) -> dict[Direction, EncodedMatrix]:
    """Return the codes of a layer's weight [N, K], in the layout in which its GEMMs of `dtype`
    activations read them: rowwise, and if backward columnwise too, unless they are derived from the
    rowwise ones."""
    plan = layer.plan.on(dtype, layer.weight.device)
    both = backward and not plan.weight.is_derived
    directions = [ROWWISE, COLUMNWISE] if both else [ROWWISE]
    state = layer.runtime.weight_state
    return weight_storages(layer.weight, directions, plan, state, dtype)


def _untrained_layers(module: nn.Module) -> dict[str, Linear]:
    """Return the layers that `freeze` encodes, by qualified name. Raises ValueError for none."""
    converted = converted_modules(module)
    if not converted:
        raise ValueError("fq.freeze found no fq.Linear; call fq.convert(model, recipe) first")
    linears = {n: m for n, m in converted.items() if m._parameters.get("weight") is not None}
    untrained = {name: layer for name, layer in linears.items() if not layer.weight.requires_grad}
    layers = {name: m for name, m in untrained.items() if not _is_frozen(m.weight)}
    if not layers:
        raise ValueError(
            f"fq.freeze found no frozen fq.Linear: of {len(converted)} converted layers "
            f"{len(linears) - len(untrained)} train, {len(untrained)} hold codes, and "
            f"{len(converted) - len(linears)} are part of packed or transposed weights, which "
            "stay; set requires_grad_(False) on the weights that do not train"
        )
    return layers


def _managed(layers: Iterable[Linear]) -> list[ManagedParam]:
    """Return the weights of sharded layers under `fully_shard`, each once."""
    found = dict.fromkeys(layer.runtime.weight_state for layer in layers)
    return [m for m in map(managed_of, found) if m is not None]


def _check_can_freeze(name: str, layer: Linear) -> None:
    """Raise ValueError for a weight whose codes do not stay, or that no rank can cut."""
    state = layer.runtime.weight_state
    if isinstance(layer.weight, DTensor):
        managed = managed_of(state)
        if managed is None:
            raise ValueError(
                f"{name}.weight is a DTensor {layer.weight.placements} that no fully_shard "
                "manages; fq.freeze keeps codes of whole weights and of shards of fully_shard: "
                "call it before parallelize_module, or after fully_shard"
            )
        check_layout(managed)
    if layer.plan.weight.delayed_directions:
        raise ValueError(
            f"{name}.weight is scaled by a history of amaxes, which changes its codes; give "
            "weights current scaling before fq.freeze"
        )
    if layer.weight.device.type == "meta":
        raise ValueError(f"{name}.weight is on the meta device; initialize it before fq.freeze")


@torch.no_grad()
def unfreeze(module: nn.Module) -> int:
    """Replace the codes from `freeze` by their rowwise values, which do not train; return how many.

    Use it before code that writes or reads values: merging LoRA, or `save_pretrained`.

    Raises ValueError for a module without frozen codes.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model), fq.unfreeze(model)
    (1, 1)
    """
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()
    layers = [m for m in converted_modules(module).values() if _is_frozen(m.weight)]
    if not layers:
        raise ValueError("fq.unfreeze found no weight that fq.freeze made")
    unfreeze_shards(_managed(layer for layer in layers if isinstance(layer.weight, DTensor)))
    for layer in layers:
        if not isinstance(layer.weight, DTensor):
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return len(layers)


def _is_frozen(weight: torch.Tensor | None) -> bool:
    """Return whether a weight is codes without values, of `freeze`."""
    local = None if weight is None else local_of(weight)
    return isinstance(local, QuantizedTensor) and local.is_frozen

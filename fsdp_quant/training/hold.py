# SPDX-License-Identifier: Apache-2.0
"""Keep codes of weights for longer than one forward, on request: `hold`, `freeze`, `unfreeze`."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Iterator

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
from ..ops.layout import COMPACT
from ..options import choice, flag, read_all
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import managed_of
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.refresh import refresh_codes
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import Held, WeightState

_OPTIONS = {"backward": flag(), "keep": choice("codes", "operands")}


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
def freeze(module: nn.Module, backward: bool = True, keep: str = "codes") -> int:
    """Replace the weights of `module` that do not train by their codes; return their number.

    backward:  False: keep only what forwards read; a backward may raise.
    keep:      "codes": the compact codes of the forward, once (mxfp8 1.03 bytes per weight, mxfp4
               .53, nvfp4 .56). GEMMs convert them when they run, by one kernel. The backward
               multiplies the values of the forward, where the recipe has other codes for it: dx is
               that of the function that the forward computed. Codes with fp32 scales per row or of
               1 x 128, and rotated ones, are kept by direction. On Blackwell the backward of other
               blocks is in bf16.
               "operands": what GEMMs read, as they read it: no conversion, and on a Hopper a byte
               per weight and direction. Bits of outputs and gradients do not change.

    Use it for the base model under LoRA. A frozen `fq.Linear` then holds a `QuantizedTensor`. It
    replaces the high-precision weight, or a quantized parameter and its values.
    `weight.dequantize()` returns the values of the codes; the values that were quantized are lost,
    also in the state dict. A quantized parameter under `fully_shard` drops its values; every rank
    must call `freeze`. Packed experts and transposed weights do not change.

    Raises ValueError, before anything is changed, for a module without frozen `fq.Linear` weights.
    Raises ValueError too, for another `keep`, a sharded high-precision weight, one with amax
    histories, and one whose formats a schedule changes. Later `fq.set_recipe` refuses to change
    them.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model)
    1
    >>> isinstance(model[0].weight, fq.QuantizedTensor)
    True
    """
    read_all(_OPTIONS, backward=backward, keep=keep)
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()  # an evaluation leaves the root gathered
    layers = _untrained_layers(module)
    for name, layer in layers.items():
        _check_can_freeze(name, layer)
    for scheduled, (schedule, _) in SCHEDULED.items():
        check_fixed("fq.freeze", schedule, converted_units(scheduled), set(layers.values()))
    sharded = {
        layer: local
        for layer in layers.values()
        if isinstance(layer.weight, DTensor)
        and isinstance(local := local_of(layer.weight), QuantizedWeight)
    }
    refresh_codes(list(dict.fromkeys(sharded.values())))
    for weight in sharded.values():
        weight.drop_values()
    frozen: dict[int, nn.Parameter] = {}
    for layer in [layer for layer in layers.values() if layer not in sharded]:
        weight, state = layer.weight, layer.runtime.weight_state
        if id(weight) not in frozen:
            codes = _encode_weight(layer, backward, weight.dtype, keep == "codes").values()
            tensor = QuantizedTensor(*codes, shape=tuple(weight.shape))
            frozen[id(weight)] = nn.Parameter(tensor, requires_grad=False)
        if state.holds_codes:
            layer.runtime.set_weight_state(
                WeightState(state.name, state.quantizer, state.shape, state.compute_dtype)
            )
        layer.weight = frozen[id(weight)]
        layer.runtime.frozen = weakref.ref(layer)
        if keep == "codes":
            layer.runtime.keep_rowwise(True, layer.weight.device)
            layer.prepare_graphs()
    return len(layers)


def _encode_weight(
    layer: Linear, backward: bool, dtype: torch.dtype, compact: bool = False
) -> dict[Direction, EncodedMatrix]:
    """Return the codes of a layer's weight [N, K]: rowwise, and if backward columnwise too, unless
    they follow from the rowwise ones.

    compact:  not in the layouts in which GEMMs of `dtype` activations read them, and columnwise
              only where rowwise codes serve no backward.
    """
    plan = layer.plan.on(dtype, layer.weight.device)
    quantizer = plan.weight.over_rowwise if compact else plan.weight
    follows = quantizer.is_derived or (compact and quantizer.shares_storage)
    directions = [ROWWISE, COLUMNWISE] if backward and not follows else [ROWWISE]
    layouts = dict.fromkeys(Direction, COMPACT) if compact else None
    state = layer.runtime.weight_state
    return weight_storages(layer.weight, directions, plan, state, dtype, layouts)


def _untrained_layers(module: nn.Module) -> dict[str, Linear]:
    """Return the layers that `freeze` encodes, by qualified name. Raises ValueError for none."""
    converted = converted_modules(module)
    if not converted:
        raise ValueError("fq.freeze found no fq.Linear; call fq.convert(model, recipe) first")
    linears = {n: m for n, m in converted.items() if m._parameters.get("weight") is not None}
    untrained = {name: layer for name, layer in linears.items() if not layer.weight.requires_grad}
    layers = {name: m for name, m in untrained.items() if type(m.weight) is not QuantizedTensor}
    if not layers:
        raise ValueError(
            f"fq.freeze found no frozen fq.Linear: of {len(converted)} converted layers "
            f"{len(linears) - len(untrained)} train, {len(untrained)} hold codes, and "
            f"{len(converted) - len(linears)} are part of packed or transposed weights, which "
            "stay; set requires_grad_(False) on the weights that do not train"
        )
    return layers


def _check_can_freeze(name: str, layer: Linear) -> None:
    """Raise ValueError for a weight whose codes do not stay, or of which ranks hold parts."""
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


@torch.no_grad()
def unfreeze(module: nn.Module) -> int:
    """Replace the codes from `freeze` by their rowwise values, which do not train; return how many.

    Use it before code that writes or reads values: merging LoRA, or `save_pretrained`.

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
        layer.runtime.keep_rowwise(False, layer.weight.device)
        layer.prepare_graphs()
    return len(layers)

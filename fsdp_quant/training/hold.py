# SPDX-License-Identifier: Apache-2.0
"""Keep codes of weights for longer than one forward, on request: `hold`, `freeze`, `unfreeze`."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.operands import weight_storages
from ..linear.passes import SCHEDULED
from ..models.set_recipe import check_fixed, converted_units
from ..models.steps import converted_modules
from ..ops.layout import COMPACT
from ..ops.reference import known
from ..options import choice, flag, read_all
from ..tensor import torch_compat
from ..tensor.frozen import freeze_shard, freeze_shards, packed_codes, unfreeze_shards
from ..tensor.fsdp_hooks import check_gathers_codes, managed_states
from ..tensor.model_weights import ModelWeight, quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor, sent_by_ddp
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import Held, WeightState, values_of

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

    Use it for the base model under LoRA. A frozen weight is then a `QuantizedTensor`, in place of
    the high-precision weight, or of a quantized parameter and its values. `weight.dequantize()`
    returns the values of the codes; the values that were quantized are lost, also in the state
    dict. Packed experts and transposed weights are codes of [.., N, K], which are kept compact.

    Under `fully_shard` each rank keeps the compact codes of its rows, and gathers send them.
    DistributedDataParallel sends rank 0's codes when it is built.
    `freeze` comes before `fully_shard`, or after it; then every rank must call it. A model's state
    dict holds their decoded values, and loads those that the codes stand for, and no others.

    Raises ValueError, before anything is changed, for a module without frozen weights, another
    `keep`, a DTensor of which no `fully_shard` gathers codes, a weight with amax histories, and one
    whose formats a schedule changes. Later `fq.set_recipe` refuses to change them.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model)
    1
    >>> isinstance(model[0].weight, fq.QuantizedTensor)
    True
    """
    read_all(_OPTIONS, backward=backward, keep=keep)
    torch_compat.reshard(module)
    weights = _untrained_weights(module)
    for weight in weights:
        _check_can_freeze(weight)
    changed = set(layers_of(module, weights))
    for scheduled, (schedule, _) in SCHEDULED.items():
        check_fixed("fq.freeze", schedule, converted_units(scheduled), changed)
    for weight in weights:
        if weight.managed is None and not is_frozen(weight.parameter):
            _replace(module, weight.parameter, _codes_of(weight, backward, keep == "codes"))
    read_rowwise(module, layers_of(module, weights), keep == "codes")
    freeze_shards([weight.managed for weight in weights if weight.managed is not None])
    torch_compat.let_ddp_send(sent_by_ddp)
    return len(weights)


def _codes_of(weight: ModelWeight, backward: bool, compact: bool) -> QuantizedTensor:
    """Return the codes of a whole weight, [.., N, K]."""
    parameter, state, layer = weight.parameter, weight.state, weight.layers[0]
    values = parameter.detach().mT if weight.is_transposed else parameter.detach()
    if state.packed:
        quantizer = layer.plan.weight.over_rowwise if compact else layer.plan.weight
        directions = list(quantizer.encodings) if backward else [ROWWISE]
        codes = packed_codes(values_of(values), state, directions)
        return QuantizedTensor(pair=codes, shape=tuple(values.shape))
    codes = _encode_weight(layer, backward, parameter.dtype, compact).values()
    if state.holds_codes:
        layer.runtime.set_weight_state(state.as_kind(WeightState))
    return QuantizedTensor(*codes, shape=tuple(values.shape))


def layers_of(model: nn.Module, weights: Sequence[ModelWeight]) -> list[Linear]:
    """Return the layers that multiply these weights, also where several modules share one."""
    states = {weight.module._weight_state for weight in weights}
    modules = [m for m in model.modules() if getattr(m, "_weight_state", None) in states]
    return [layer for m in modules for layer in getattr(m, "_matrix_layers")]


def read_rowwise(model: nn.Module, layers: Sequence[Linear], kept: bool = True) -> None:
    """Call `keep_rowwise` of each layer, and let experts choose for all of them."""
    managed = managed_states()
    for layer in layers:
        layer.runtime.keep_rowwise(layer, kept, managed)
    for experts in model.modules():
        if isinstance(experts, GroupedLinear):
            experts.prepare()


def put_codes(model: nn.Module, weight: ModelWeight, codes: QuantizedTensor) -> None:
    """Put whole codes [.., N, K] in place of a weight, or this rank's part of them."""
    if weight.managed is not None:
        freeze_shard(weight.managed, codes)
    else:
        _replace(model, weight.parameter, codes)


def _replace(model: nn.Module, parameter: Tensor, weight: Tensor) -> None:
    """Put a weight that does not train in place of a parameter, in all modules that have it."""
    new = nn.Parameter(weight, requires_grad=False)
    for module in list(model.modules()):
        for name, registered in list(module._parameters.items()):
            if registered is parameter:
                setattr(module, name, new)


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


def _untrained_weights(module: nn.Module) -> list[ModelWeight]:
    """Return the weights that `freeze` encodes. Raises ValueError for none."""
    if not converted_modules(module):
        raise ValueError("fq.freeze found no fq.Linear; call fq.convert(model, recipe) first")
    weights = [w for w in quantized_weights(module) if w.attribute == "weight"]
    untrained = [w for w in weights if not w.parameter.requires_grad]
    found = [w for w in untrained if not is_frozen(w.parameter)]
    if not found:
        raise ValueError(
            f"fq.freeze found no frozen weight: of {len(weights)} converted weights "
            f"{len(weights) - len(untrained)} train and {len(untrained)} hold codes; set "
            "requires_grad_(False) on the weights that do not train"
        )
    return found


def _check_can_freeze(weight: ModelWeight) -> None:
    """Raise ValueError for a weight whose codes do not stay, or that no rank can cut."""
    name, parameter = weight.name, weight.parameter
    if isinstance(parameter, DTensor):
        check_gathers_codes(name, parameter, weight.managed, "call fq.freeze")
        sides = weight.layers[0].plan.weight
        if not all(encoding.fmt.is_quantized for encoding in sides.over_rowwise.encodings.values()):
            raise ValueError(
                f"{name} is {sides}: a direction in high precision has no codes that fully_shard "
                "could gather; leave it out of fully_shard by ignored_params="
            )
    if any(layer.plan.weight.delayed_directions for layer in weight.layers):
        raise ValueError(
            f"{name} is scaled by a history of amaxes, which changes its codes; give weights "
            "current scaling before fq.freeze"
        )
    if parameter.device.type == "meta":
        raise ValueError(f"{name} is on the meta device; initialize it before fq.freeze")


@torch.no_grad()
def unfreeze(module: nn.Module) -> int:
    """Replace the codes from `freeze` by their rowwise values, which do not train; return how many.

    Use it before code that writes or reads values: merging LoRA, or `save_pretrained`.

    Raises ValueError for a module without frozen codes.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").requires_grad_(False)
    >>> fq.freeze(model), fq.unfreeze(model)
    (1, 1)
    """
    torch_compat.reshard(module)
    weights = [w for w in quantized_weights(module) if is_frozen(w.parameter)]
    if not weights:
        raise ValueError("fq.unfreeze found no weight that fq.freeze made")
    sharded = [weight for weight in weights if weight.managed is not None]
    if transposed := [weight.name for weight in sharded if weight.is_transposed]:
        raise ValueError(
            f"{transposed[0]} is stored transposed, and fully_shard cut its codes between other "
            "dims than its values; call fq.unfreeze before fully_shard"
        )
    unfreeze_shards([known(weight.managed, "a sharded weight") for weight in sharded])
    for weight in weights:
        if weight.managed is None:
            values = weight.parameter.dequantize()
            values = values.mT.contiguous() if weight.is_transposed else values
            _replace(module, weight.parameter, values)
    read_rowwise(module, layers_of(module, weights), False)
    return len(weights)


def is_frozen(weight: Tensor) -> bool:
    """Return whether a weight is codes without values, of `freeze`: whole, a shard, or gathered."""
    local = local_of(weight)
    state = local._pair.owner if isinstance(local, QuantizedTensor) else None
    if state is not None and state.gathered is not None:
        local = state.gathered.managed.local
    return isinstance(local, QuantizedTensor) and local.is_frozen

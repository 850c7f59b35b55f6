# SPDX-License-Identifier: Apache-2.0
"""Modules whose weight `fully_shard` gathers as codes, and the `WeightState` of a weight.

[Note: how a module adopts a weight]
FSDP2 registers a parameter by `setattr`: when it shards it, and at each gather and reshard. So do
load_state_dict(assign=True) and users. `adopt` makes the local tensor of what was registered one of
the module's state, in place, since FSDP2 and optimizers hold the parameter. It runs too after
`nn.Module._apply`, a load and unpickling, which replace parameters without `setattr`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight, QuantizedWeightState, padding
from ..tensor.torch_compat import local_of
from ..tensor.weight_shard import WeightShard
from ..tensor.weight_state import WeightState, copies_are_weights
from .operands import weight_state


def is_of_another_library(p: object) -> bool:
    """Return whether a parameter holds other tensors in place of its values, as torchao's do."""
    return torch_compat.is_wrapper_subclass(p) and not isinstance(p, (DTensor, QuantizedTensor))


class HasWeight(nn.Module):
    """A module whose `weight` FSDP2 gathers as codes: its shard has the hooks once registered.

    transposed:  the weight is [.., K, N], of which FSDP2 gathers the values.
    _weight_state:  set when the module is quantized.
    _swapped:       the weight that FSDP2 registers in turn with the present one, and their state.
    """

    _weight_state: WeightState
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False
    _swapped: tuple[Any, Any] = None, None

    @property
    def _matrix_layers(self) -> Sequence[Any]:
        """The `fq.Linear` of each matrix of the weight (`tensor.model_weights`)."""
        return [self]

    def set_weight_state(self, state: WeightState) -> None:
        raise NotImplementedError

    def prepare_graphs(self) -> None:
        """Make what compiled graphs receive; called when the weight's ranks are known."""

    def __setattr__(self, name: str, value: Any) -> None:
        other, state = self._swapped
        is_swap = name == "weight" and state is not None and state is self._weight_state
        # None: it was taken out, by `del` or torch.nn.utils
        if is_swap and (present := self._parameters.get(name)) is not None:
            if value is other:
                self._parameters[name], self.__dict__["_swapped"] = value, (present, state)
            if value is other or value is present:  # experts share it with their product
                return
        if name == "qconfig":  # torch.ao.quantization: it sets None where it knows no class
            raise NotImplementedError(
                f"torch.ao.quantization would pass over a {type(self).__name__}, which quantizes "
                "its weight itself; call fq.unconvert(model) before it"
            )
        registered = self.__dict__.get("_parameters") or {}
        if registered.get(name) is None or not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        if is_of_another_library(value):
            raise NotImplementedError(
                f"{name} of a {type(self).__name__} cannot be a {type(value).__name__}: this layer "
                "quantizes its weight itself; call fq.unconvert(model) before the library that "
                "replaces weights"
            )
        if name != "weight":
            registered[name] = value
            return
        adopt(self, value)
        before, registered[name] = registered[name], value
        read_as_kept(self, before, value)
        is_fsdp = isinstance(before, DTensor) is not isinstance(value, DTensor)
        self.__dict__["_swapped"] = (before, self._weight_state) if is_fsdp else (None, None)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        state_dict = plain_in_load(state_dict, {f"{prefix}weight": self._parameters.get("weight")})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn, recurse: bool = True):
        with copies_are_weights():
            applied = super()._apply(fn, recurse)
        adopt(self, self._parameters.get("weight"))
        return applied

    def __getstate__(self) -> dict:
        """Copies and files hold the present weight alone: the other one's memory may be freed."""
        return {name: value for name, value in self.__dict__.items() if name != "_swapped"}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        adopt(self, self._parameters.get("weight"))


def adopt(module: HasWeight, weight: nn.Parameter | None) -> None:
    """Make a weight, by whatever means it became the module's, one of the module's state: see the
    note. A shard or codes have a state already, which the module adopts: of a tied layer."""
    state = getattr(module, "_weight_state", None)
    if weight is None or state is None:
        return
    local = local_of(weight)
    if isinstance(local, FSDPHooks):
        module.set_weight_state(local.state)
    elif type(local) is QuantizedTensor:
        own_codes(module, local)
    elif not isinstance(local, QuantizedTensor) and not module.transposed:
        if state.holds_codes or isinstance(weight, DTensor):
            _wrap(weight, state)


def own_codes(module: Any, codes: QuantizedTensor) -> None:
    """Let codes of `fq.freeze` be of the module's state; those that FSDP2 gathered have theirs."""
    owner, state = codes._pair.owner, module._weight_state
    if module.transposed:  # PEFT reads the sizes of layers from `ds_shape`, if a weight has it
        setattr(codes, "ds_shape", torch.Size((*codes.shape[:-2], *codes.shape[:-3:-1])))
    if owner is None or owner.gathered is None:
        codes._pair.owner, state.padding = state, padding
        for group, matrix in zip(codes._pair.groups, state.packed):
            group.owner = matrix


def read_as_kept(module: Any, before: Any, weight: Any) -> None:
    """Plan for the directions of codes of `fq.freeze` that take the place of the module's weight,
    or for values that take theirs: by load_state_dict(assign=True)."""
    are_codes, were = (isinstance(t, QuantizedTensor) and t.is_frozen for t in (weight, before))
    kept = are_codes and (weight._pair.groups or [weight._pair])[0].columnwise is None
    if not are_codes and not (were and type(weight) is nn.Parameter):
        return
    for layer in module._matrix_layers:
        if layer.runtime.reads_rowwise != kept:
            layer.runtime.keep_rowwise(layer, kept, {})


def _wrap(
    weight: nn.Parameter, state: WeightState, managed: torch_compat.ManagedParam | None = None
) -> None:
    """Put a shard, or the codes of a quantized parameter, over a weight, in place."""
    values = local_of(weight).detach()
    is_codes = isinstance(state, QuantizedWeightState)
    local = state.wrapped(values) if is_codes else WeightShard(values, state)
    if managed is not None:
        managed.replace_local(local)
    elif isinstance(weight, DTensor):
        torch_compat.replace_local(weight, local)
    else:
        torch_compat.swap_parameter(weight, nn.Parameter(local, weight.requires_grad))


# id of a plain weight -> the module that has its state, for layers that share one. A weak reference
# to the weight itself would stop torch.utils.swap_tensors.
_TIED: weakref.WeakValueDictionary[int, HasWeight] = weakref.WeakValueDictionary()


def known_state(weight: Tensor) -> WeightState | None:
    """The state that a weight has already: of its shard or codes, or of a layer it is tied to."""
    local = local_of(weight)
    if (state := weight_state(local)) is not None:
        return state
    owner = _TIED.get(id(local))
    return owner._weight_state if owner is not None and owner.weight is local else None


def forget_weight(module: HasWeight) -> None:
    """The module's weight is one that no layer here multiplies."""
    if _TIED.get(id(module.weight)) is module:
        del _TIED[id(module.weight)]


def whole_shape(weight: Tensor) -> torch.Size:
    """Shape of the weight that GEMMs multiply: unsharded by `fully_shard`, cut by all else."""
    managed = _managed(weight)
    return local_of(weight).shape if managed is None else managed.global_shape


def _managed(weight: Tensor) -> torch_compat.ManagedParam | None:
    """A DTensor as `fully_shard` manages it."""
    if not isinstance(weight, DTensor):
        return None
    return next((m for m in torch_compat.all_managed_params() if m.registered is weight), None)


def register_weight(module: HasWeight) -> None:
    """Attach the state to the module's weight, in codes or in a shard; a plain one is listed."""
    weight, state = module.weight, module._weight_state
    managed = _managed(weight)
    if state.holds_codes or managed is not None:
        _wrap(weight, state, managed)
    elif not isinstance(weight, DTensor):
        _TIED[id(weight)] = module
    attach_tensor_group(module)


def attach_tensor_group(module: HasWeight) -> None:
    """Tell the state of a DTensor weight which ranks hold its other parts."""
    weight, state = module.weight, module._weight_state
    if not isinstance(weight, DTensor):
        return
    managed = _managed(weight)
    mesh = weight.device_mesh if managed is None else managed.tensor_mesh
    if mesh is not None:
        cut = weight.placements[-1]
        if mesh.ndim != 1 or not isinstance(cut, Shard) or (len(state.shape) == 3 and cut.dim != 0):
            raise ValueError(
                f"{state.name} is a DTensor {weight.placements} over {mesh}: no fully_shard "
                "manages it so, and tensor parallelism cuts one dim of a weight over one axis (of "
                "packed ones: between experts); use fq.parallel's styles, fully_shard, or skip= of "
                "fq.convert"
            )
        state.tensor_group, state.tensor_dim = mesh.get_group(), cut.dim
        state.shape = tuple(whole_shape(weight))  # torch's styles cut it after its state was made
        module.prepare_graphs()


# State dicts #


def plain_in_state_dict(module: Any, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Checkpoints hold the plain weight."""
    source, transposed = getattr(module, "source", "weight"), getattr(module, "transposed", False)
    key = f"{prefix}{source}"
    if key in state_dict:
        state_dict[key] = saved_plain(getattr(module, source), state_dict[key], transposed)


def saved_plain(weight: Tensor, saved: Tensor, transposed: bool = False) -> Tensor:
    """What a state dict holds of a weight: a plain view of it, with its version counter.

    saved:       what torch put there; a Parameter is replaced by one.
    transposed:  the model stores values as [.., K, N].
    """
    local = local_of(weight)
    if not isinstance(local, FSDPHooks):
        return saved
    plain = local.saved.detach()
    if isinstance(weight, DTensor):
        plain = torch_compat.dtensor_like(weight, plain)
    if transposed and _are_codes(local):
        plain = plain.mT.contiguous()
    return nn.Parameter(plain, weight.requires_grad) if isinstance(saved, nn.Parameter) else plain


def plain_in_load(
    state_dict: dict, weights: Mapping[str, Tensor | None], transposed: bool = False
) -> dict:
    """The state dict with plain tensors under the keys of these weights: assign=True would wrap its
    parameters in place, and make one state of two models. Codes of `fq.freeze` share their memory
    alone. transposed: as of `saved_plain`."""
    tensors = {key: state_dict[key] for key in weights if isinstance(state_dict.get(key), Tensor)}
    for key, t in tensors.items():
        is_codes = type(t) is QuantizedTensor
        tensors[key] = t.with_storages(lambda s: s) if is_codes else saved_plain(t, t.detach())
        if transposed and not is_codes and _are_codes(weights[key]):
            tensors[key] = tensors[key].mT
    return state_dict | tensors


def _are_codes(weight: Tensor | None) -> bool:
    """Sharded ones of `fq.freeze`: [.., N, K], also where the model stores values as [.., K, N]."""
    local = None if weight is None else local_of(weight)
    return isinstance(local, QuantizedWeight) and local.is_frozen


def reencode_after_load(module: HasWeight, incompatible_keys: object) -> None:
    """Encode the values of quantized parameters that a load wrote."""
    adopt(module, module._parameters.get("weight"))
    if isinstance(state := module._weight_state, QuantizedWeightState):
        state.pending = True

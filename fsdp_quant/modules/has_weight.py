# SPDX-License-Identifier: Apache-2.0
"""Modules whose weight `fully_shard` gathers as codes, and the `WeightState` of a weight.

FSDP2 registers a parameter by `setattr`: when it shards it, and at each gather and reshard.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeightState
from ..tensor.torch_compat import local_of
from ..tensor.weight_shard import WeightShard, as_shard
from ..tensor.weight_state import WeightState
from .operands import weight_state


class HasWeight(nn.Module):
    """A module whose `weight` FSDP2 gathers as codes: its shard has the hooks once registered.

    transposed:  the weight is [.., K, N], of which FSDP2 gathers the values.
    _weight_state:  set when the module is quantized.
    """

    _weight_state: WeightState
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False

    @property
    def _matrix_layers(self) -> Sequence[Any]:
        """The `fq.Linear` of each matrix of the weight (`tensor.model_weights`)."""
        return [self]

    def set_weight_state(self, state: WeightState) -> None:
        raise NotImplementedError

    def prepare_graphs(self) -> None:
        """Make what compiled graphs receive; called when the weight's ranks are known."""

    def __setattr__(self, name: str, value: Any) -> None:
        registered = self.__dict__.get("_parameters") or {}
        if registered.get(name) is None or not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        if torch_compat.is_wrapper_subclass(value) and not isinstance(
            value, (DTensor, QuantizedTensor)
        ):
            raise NotImplementedError(
                f"{name} of a {type(self).__name__} cannot be a {type(value).__name__}: this layer "
                "quantizes its weight itself; call fq.unconvert(model) before the library that "
                "replaces weights"
            )
        if name == "weight" and isinstance(value, DTensor) and not self.transposed:
            state = getattr(self, "_weight_state", None)
            if state is not None:
                self.set_weight_state(as_shard(value, state))
        registered[name] = value


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
    if isinstance(state, QuantizedWeightState):
        _wrap_codes(weight, state)
    elif not isinstance(weight, DTensor):
        _TIED[id(weight)] = module
    if not isinstance(weight, DTensor):
        return
    attach_tensor_group(module)
    managed = _managed(weight)
    if managed is None or isinstance(state, QuantizedWeightState):
        return
    managed.replace_local(WeightShard(local_of(weight).detach(), state))


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
        module.prepare_graphs()


def _wrap_codes(weight: nn.Parameter, state: QuantizedWeightState) -> None:
    """Put a quantized parameter over a weight; optimizers that hold the parameter keep it."""
    managed = _managed(weight)
    codes = state.wrapped(local_of(weight).detach())
    if managed is not None:
        managed.replace_local(codes)
    elif isinstance(weight, DTensor):
        torch_compat.replace_local(weight, codes)
    else:
        torch_compat.swap_parameter(weight, nn.Parameter(codes, weight.requires_grad))


# State dicts #


def plain_in_state_dict(
    module: HasWeight, state_dict: dict, prefix: str, local_metadata: dict
) -> None:
    """Checkpoints hold the plain weight."""
    key = f"{prefix}weight"
    if key in state_dict:
        state_dict[key] = saved_plain(module.weight, state_dict[key])


def saved_plain(weight: Tensor, saved: Tensor) -> Tensor:
    """What a state dict holds of a weight: a plain view of it, with its version counter.

    saved:  what torch put there; a Parameter is replaced by one.
    """
    local = local_of(weight)
    if not isinstance(local, FSDPHooks):
        return saved
    plain = local.saved.detach()
    if isinstance(weight, DTensor):
        plain = torch_compat.dtensor_like(weight, plain)
    return nn.Parameter(plain, weight.requires_grad) if isinstance(saved, nn.Parameter) else plain


def reencode_after_load(module: HasWeight, incompatible_keys: object) -> None:
    """Encode the values of quantized parameters that a load wrote (assign=True: replaced)."""
    state = module._weight_state
    if isinstance(state, QuantizedWeightState):
        if not isinstance(local_of(module.weight), FSDPHooks):
            _wrap_codes(module.weight, state)
        state.pending = True

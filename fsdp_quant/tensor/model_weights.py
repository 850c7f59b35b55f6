# SPDX-License-Identifier: Apache-2.0
"""`quantized_weights`: every weight of a model that GEMMs multiply as codes, over which `fq.hold`,
fingerprints, checkpoints and comparisons of ranks iterate.

A module with such a weight has `_weight_state`, and `_matrix_layers`, the layer of each matrix. Its
class has `source`, the attribute of the parameter (default: "weight"), and `transposed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import torch_compat
from .torch_compat import ManagedParam
from .weight_state import WeightState


class ModelWeight(NamedTuple):
    """A parameter [N, K], [K, N], or packed [matrices, N, K] or [matrices, K, N].

    path:       qualified name of the module that multiplies it; attribute: of the parameter in it.
    state:      of the parameter; `state.matrices` are those of its matrices.
    managed:    the parameter under `fully_shard`, or None.
    """

    path: str
    attribute: str
    module: Any
    state: WeightState
    managed: ManagedParam | None

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}".lstrip(".")

    @property
    def layers(self) -> Sequence[Any]:
        """The layer of each matrix, with its recipe and plan."""
        return self.module._matrix_layers

    @property
    def is_transposed(self) -> bool:
        """The parameter is stored [.., K, N]."""
        return getattr(self.module, "transposed", False)

    @property
    def parameter(self) -> Tensor:
        """The registered parameter, sharded under `fully_shard`."""
        if self.managed is not None:
            return self.managed.registered
        return self.module._parameters[self.attribute]

    @property
    def local(self) -> Tensor:
        """This rank's local tensor of the parameter."""
        return torch_compat.local_of(self.parameter)


def quantized_weights(model: nn.Module) -> list[ModelWeight]:
    """The quantized weights of a model in module order, each once; without those that are no
    parameters of their module, but computed from others."""
    managed = {owner: m for m in torch_compat.managed_params_of(model) for owner in m.owners}
    weights: dict[WeightState, ModelWeight] = {}
    for path, module in model.named_modules():
        state = getattr(module, "_weight_state", None)
        attribute = getattr(type(module), "source", "weight")
        if state is not None and module._parameters.get(attribute) is not None:
            under = managed.get((module, attribute))
            weights.setdefault(state, ModelWeight(path, attribute, module, state, under))
    return list(weights.values())

# SPDX-License-Identifier: Apache-2.0
"""`TransposedLinear`: linear layers whose weight is stored [in, out], as GPT-2's `Conv1D`.

The module keeps its class, its parameters and their names. Products multiply the transposed view of
the weight as `fq.Linear` multiplies its own, by a layer that is no module of the tree.
`fully_shard` cuts such a weight along the contraction, and gathers it in high precision.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..linear.has_weight import own_codes, plain_in_load, plain_in_state_dict, read_as_kept
from ..linear.linear import Expert, Linear
from ..recipe import Recipe
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.root_statistics import check_model_of
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import WeightState

TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)


def is_transposed(cls: type) -> bool:
    """Modules of this class compute x W + b, of `weight` [in, out]; they are not converted."""
    return f"{cls.__module__}.{cls.__qualname__}" in TRANSPOSED and not issubclass(
        cls, TransposedLinear
    )


class TransposedLinear(nn.Module):
    """y = x W + b of `weight` [in, out] and `bias` [out], in the formats of a recipe."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _layer: Expert
    source = "weight"  # the parameter that products read
    transposed = True

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Give the module its layer, which is no submodule."""
        self.__dict__["_layer"] = layer = Expert(self.read().detach(), recipe, name, "linear")
        layer.part_of(self, 0)
        self.register_state_dict_post_hook(plain_in_state_dict)
        torch_compat.make_fx_leaf(self)

    @property
    def _weight_state(self) -> WeightState:
        return self._layer.runtime.weight_state

    @property
    def _matrix_layers(self) -> list[Linear]:
        """The `fq.Linear` of it, over the values of now."""
        return [self._layer]

    def read(self) -> Tensor:
        """The weight [out, in] that products multiply."""
        return self.weight if isinstance(self.weight, QuantizedTensor) else self.weight.t()

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get("_parameters", {}).get(name)
        super().__setattr__(name, value)
        if "_layer" in self.__dict__ and name == self.source:
            self._adopt_codes()
            read_as_kept(self, before, value)

    def _adopt_codes(self) -> None:
        """Share one state with a weight that is codes of `fq.freeze`."""
        local = local_of(getattr(self, self.source))
        if isinstance(local, FSDPHooks):
            self._layer.runtime.set_weight_state(local.state)
        elif isinstance(local, QuantizedTensor):
            own_codes(self, local)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        weights = {f"{prefix}{self.source}": self._parameters.get(self.source)}
        state_dict = plain_in_load(state_dict, weights, self.transposed)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def values_of(self, index: int) -> tuple[Tensor, None]:
        """The weight [out, in], without gradients."""
        return self.read().detach(), None

    def forward(self, x: Tensor) -> Tensor:
        check_model_of(self, self.source)
        if x.is_nested:
            return torch_compat.of_nested(self.forward, x)
        return self._layer.times(x, self.read(), self.bias)

    def _apply(self, fn, recurse: bool = True) -> TransposedLinear:
        applied = super()._apply(fn, recurse)
        self._adopt_codes()
        self._layer.prepare_graphs()
        return applied

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._layer.part_of(self, 0)
        self._adopt_codes()

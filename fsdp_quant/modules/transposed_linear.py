# SPDX-License-Identifier: Apache-2.0
"""`TransposedLinear`: linear layers whose weight lies [in, out], as `Conv1D` of transformers'
GPT-2.

The module keeps its class, its parameters and their names. Products multiply the transposed view of
the weight as `fq.Linear` multiplies its own, by a layer that is no module of the tree.
`fully_shard` cuts such a weight along the contraction, and gathers it in high precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..recipe import Recipe
from .grouped_linear import expert
from .linear import Linear

TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)


def is_transposed(cls: type) -> bool:
    """Modules of this class compute x W + b of `weight` [in, out] and `bias` [out], and were not
    converted."""
    return f"{cls.__module__}.{cls.__qualname__}" in TRANSPOSED and not issubclass(
        cls, TransposedLinear
    )


class TransposedLinear(nn.Module):
    """y = x W + b of `weight` [in, out] and `bias` [out], each product in the formats that a recipe
    gives."""

    source = "weight"  # the parameter that products read

    @property
    def layer(self) -> Linear:
        """The `fq.Linear` of it, over the values of now."""
        self._layer.training = self.training
        return self._layer

    def read(self) -> Tensor:
        """The weight [out, in] that products multiply."""
        return self.weight.t()

    def values_of(self, index: int) -> tuple[Tensor, None]:
        """The weight [out, in], without gradients."""
        return self.read().detach(), None

    def train_as_this(self) -> Linear:
        """The layer, in the mode of this module."""
        if not torch.compiler.is_compiling():
            self._layer.training = self.training
        return self._layer

    def forward(self, x: Tensor) -> Tensor:
        return self.train_as_this().times(x, self.read(), self.bias)

    def _apply(self, fn, recurse: bool = True) -> TransposedLinear:
        applied = super()._apply(fn, recurse)
        self._layer._graph.prepare(self._layer)
        return applied

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._layer.part_of(self, 0)


def adopt_transposed(module: TransposedLinear, recipe: Recipe, name: str) -> None:
    """Give a module of class `TransposedLinear` its layer."""
    module.__dict__["_layer"] = expert(module.read().detach(), recipe, name, "linear")
    module._layer.part_of(module, 0)

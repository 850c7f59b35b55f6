# SPDX-License-Identifier: Apache-2.0
"""PEFT: `freeze`, which keeps the base under LoRA and DoRA as codes.

GEMMs of the base read codes and those of adapters high precision, whether a model is converted
before or after `get_peft_model`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from ..models.transposed_linear import TransposedLinear
from ..tensor.quantized_tensor import QuantizedTensor
from ..training import hold


class _Decoded:
    """A LoRA layer whose base returns dequantized weights."""

    def __init__(self, layer: LoraLayer):
        self._layer = layer

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)

    def get_base_layer(self) -> SimpleNamespace:
        base: Any = self._layer.get_base_layer()
        values = base.weight.dequantize()
        if isinstance(base, TransposedLinear):  # its codes are [out, in]
            values = values.mT
        return SimpleNamespace(weight=values, bias=base.bias)


class _DoraOverCodes(DoraLinearVariant):
    """DoRA, whose norms need the values of the base."""

    @staticmethod
    def forward(
        module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **kwargs
    ) -> Tensor:
        is_codes = isinstance(module.get_base_layer().weight, QuantizedTensor)
        layer: Any = _Decoded(module) if is_codes else module
        return DoraLinearVariant.forward(layer, active_adapter, x, result, **kwargs)


def freeze(model: nn.Module, keep: str = "codes") -> int:
    """Call `fq.freeze` on a model with adapters; returns the number of weights that are codes.

    keep:  as of `fq.freeze`.

    Norms of DoRA decode the base of a layer in each forward. Call `fq.unfreeze(model)` before
    `model.merge_and_unload()`.
    """
    count = hold.freeze(model, keep=keep)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, variant in layer.lora_variant.items():
                if type(variant) is DoraLinearVariant:
                    layer.lora_variant[name] = _DoraOverCodes()
    return count

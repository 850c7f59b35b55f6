# SPDX-License-Identifier: Apache-2.0
"""PEFT: `freeze`, which keeps the base under LoRA and DoRA as codes.

GEMMs of the base read codes and those of adapters high precision, whether a model is converted
before or after `get_peft_model`. Importing this lets DoRA read values of frozen codes, and adds
adapters of packed experts (`target_parameters`) to the product of their codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from ..linear.routes import dispatch
from ..models.transposed_linear import TransposedLinear
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import grouped_mm
from ..training import hold

_activate = ParamWrapper._activate_lora


def freeze(model: nn.Module, keep: str = "codes") -> int:
    """Call `fq.freeze` on a model with adapters; returns the number of weights that are codes.

    keep:  as of `fq.freeze`.

    Norms of DoRA decode the base of a layer in each forward, also of adapters that are added later.
    A base that is codes already stays so. Call `fq.unfreeze(model)` before merging.
    """
    base = [w.parameter for w in quantized_weights(model) if not w.parameter.requires_grad]
    is_done = base and all(map(hold.is_frozen, base))
    return len(base) if is_done else hold.freeze(model, keep=keep)


def _values_of_codes(layer: Any) -> Tensor:
    """The weight that DoRA reads: of frozen codes, which are [out, in], their values."""
    if not hold.is_frozen(layer.weight):
        return dequantize_module_weight(layer)
    values = layer.weight.dequantize()
    return values.mT if isinstance(layer, TransposedLinear) else values


def _adapted(wrapper: Any, active: list[str]) -> AbstractContextManager:
    """Where packed experts run: PEFT makes their weight W + A B; x A B is added to x W of codes."""
    product = getattr(wrapper.get_base_layer(), f"{wrapper.parameter_name}_product", None)
    if product is None or not isinstance(wrapper.get_param(), QuantizedTensor):
        return _activate(wrapper, active)
    factors = [wrapper.get_delta_factors(a) for a in active if a in wrapper.lora_A]
    return product.register_forward_hook(partial(_add, factors))


def _add(factors: Sequence[tuple], product: Any, inputs: tuple, y: Tensor) -> Tensor:
    """y of experts and of their adapters, scaling * x (lhs rhs), as the weight is stored."""
    rows, ends, routes, *_ = *inputs, ()
    rows = dispatch(rows, *routes) if routes else rows
    for lhs, rhs, scaling in factors:
        a, b = (lhs, rhs) if product.transposed else (rhs.mT, lhs.mT)
        x, sizes = rows.to(a.dtype), (*a.shape[1:], b.shape[2])
        if x.is_cuda and x.dtype is torch.bfloat16 and not any(size % 8 for size in sizes):
            low = grouped_mm(grouped_mm(x, a.contiguous(), ends), b.contiguous(), ends)
        else:
            parts = zip(x.tensor_split(ends[:-1].tolist()), a, b)
            low = torch.cat([part @ first @ second for part, first, second in parts])
        y = y + (scaling * low).to(y.dtype)
    return y


setattr(dora, "dequantize_module_weight", _values_of_codes)
setattr(ParamWrapper, "_activate_lora", _adapted)

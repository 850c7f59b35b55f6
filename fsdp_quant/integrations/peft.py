# SPDX-License-Identifier: Apache-2.0
"""PEFT: `freeze`, which keeps the base under LoRA and DoRA as codes.

GEMMs of the base read codes and those of adapters high precision, whether a model is converted
before or after `get_peft_model`. Importing this lets DoRA read values of frozen codes, and adds
adapters of packed experts (`target_parameters`) to the product of their codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ..models.packed_experts import ExpertProduct
from ..models.transposed_linear import TransposedLinear
from ..tensor.fsdp_hooks import managed_of
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import grouped_mm, local_of
from ..training import hold

_dequantize, _activate = dora.dequantize_module_weight, ParamWrapper._activate_lora


def freeze(model: nn.Module, keep: str = "codes") -> int:
    """Call `fq.freeze` on a model with adapters; returns the number of weights that are codes.

    keep:  as of `fq.freeze`.

    Norms of DoRA decode the base of a layer in each forward, also of adapters that are added later.
    Call `fq.unfreeze(model)` before `model.merge_and_unload()`.
    """
    return hold.freeze(model, keep=keep)


def _is_frozen(weight: Tensor) -> bool:
    """It is codes of `fq.freeze`: whole, a shard, or gathered of shards."""
    local = local_of(weight)
    if not isinstance(local, QuantizedTensor) or local._pair.owner is None or local.is_frozen:
        return isinstance(local, QuantizedTensor) and local.is_frozen
    managed = managed_of(local._pair.owner)
    return getattr(managed and managed.local, "is_frozen", False)


def _values_of_codes(layer: Any) -> Tensor:
    """The weight that DoRA reads: of frozen codes, which are [out, in], their values."""
    if not _is_frozen(layer.weight):
        return _dequantize(layer)
    values = layer.weight.dequantize()
    return values.mT if isinstance(layer, TransposedLinear) else values


@contextlib.contextmanager
def _adapted(wrapper: Any, active: list[str]) -> Iterator[None]:
    """While packed experts run: PEFT adds W + A B to their weight; here x A B is added to x W, so
    that the codes of W are multiplied as they are."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    adapters = [a for a in active if a in wrapper.lora_A]
    product = getattr(experts, f"{name}_product", None)
    if not adapters or product is None or not _is_frozen(wrapper.get_param()):
        with _activate(wrapper, active):
            yield
        return
    factors = [wrapper.get_delta_factors(a) for a in adapters]
    hook = product.register_forward_hook(partial(_add, factors))
    try:
        yield
    finally:
        hook.remove()


def _add(
    factors: Sequence[tuple[Tensor, Tensor, float]],
    product: ExpertProduct,
    inputs: tuple[Tensor, Tensor],
    y: Tensor,
) -> Tensor:
    """y of experts and of their adapters, scaling * x (lhs rhs), as the weight is stored."""
    rows, ends = inputs
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


dora.dequantize_module_weight = _values_of_codes
ParamWrapper._activate_lora = _adapted

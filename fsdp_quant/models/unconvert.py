# SPDX-License-Identifier: Apache-2.0
"""`unconvert`: a model as it was before `fq.convert`, in place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..linear.boundary import Quantize
from ..linear.has_weight import forget_weight, plain_in_state_dict, reencode_after_load
from ..linear.linear import Linear
from ..linear.passes import LOOSE, SCHEDULED
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_codes import WeightCodes
from .convert import CONVERTED, OURS
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .packed_experts import forget_products
from .steps import count_steps
from .transformers_masks import distrust_positions
from .transposed_linear import TransposedLinear


def unconvert(model: nn.Module) -> nn.Module:
    """Undo `fq.convert`, in place; returns `model`.

    Modules get their classes again: `fq.Linear` becomes nn.Linear. Names, values, hooks, ties and
    flags of parameters stay. A quantized parameter becomes a plain one, of its master's values in
    its dtype. Use it before libraries that look for nn.Linear: torchao's `quantize_`,
    `torch.ao.quantization.quantize_dynamic`.

    Raises ValueError, before anything is changed, for a model without converted modules, and for
    one that was sharded, holds codes of `fq.freeze`, is published by a weight sync, or has modules
    that no class of torch stands for (`fq.LayerNormMLP`, `fq.GroupedLinear`).

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> fq.unconvert(model)[0]
    Linear(in_features=64, out_features=32, bias=True)
    """
    for name, module in model.named_modules():
        if (reason := _refusal(module)) is not None:
            raise ValueError(f"fq.unconvert: {name or type(module).__name__} {reason}")
    converted = [m for m in model.modules() if _original(m) is not None]
    if not converted:
        raise ValueError(f"fq.unconvert found nothing converted in {type(model).__name__}")
    for module in converted:
        _restore(module)
    SCHEDULED.pop(model, None)
    count_steps(model, False)
    distrust_positions(model)
    for module in model.modules():
        CONVERTED.discard(module)
        for name in ("_left_out", "_fq_proof", "_training_steps"):
            vars(module).pop(name, None)
        if isinstance(module, nn.TransformerEncoderLayer):  # as its constructor says
            function = module.activation
            is_relu = function is F.relu or isinstance(function, nn.ReLU)
            is_gelu = function is F.gelu or isinstance(function, nn.GELU)
            module.activation_relu_or_gelu = 1 if is_relu else 2 if is_gelu else 0
    return model


def _original(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had before `fq.convert`; None: it was not changed."""
    cls = type(module)
    if "fused_as" in vars(cls):
        return cls.__bases__[0]
    return nn.Linear if cls is Linear else getattr(cls, "converted_from", None)


def _refusal(module: nn.Module) -> str | None:
    """Why a module cannot be restored, with the remedy."""
    if isinstance(module, FSDPModule) or any(
        isinstance(p, DTensor) for p in module._parameters.values()
    ):
        return "was sharded; load its full state dict into a plain model"
    of_ours = (*OURS, LayerNormLinear, LayerNormMLP, Quantize)
    if isinstance(module, of_ours) and _original(module) is None:
        is_product = getattr(module, "matrices", None) is not None and not module.state_dict()
        if not is_product:
            return (
                f"is an fq.{type(module).__name__}, which no class of torch stands for; load the "
                "state dict into a model without it"
            )
    weight = module._parameters.get("weight")
    if any(type(p) is QuantizedTensor for p in module._parameters.values()):
        return "holds codes; call fq.unfreeze(model) first"
    if isinstance(weight, WeightCodes) and weight.state.weight_sync is not None:
        return "is published by a weight sync, whose trainer has the values; load a plain model"
    if isinstance(weight, WeightCodes) and not weight.has_values:
        return "is a quantized parameter without values: its optimizer is gone, or it was frozen"
    return None


def _restore(module: nn.Module) -> None:
    """Give a module its class, and drop what `fq.convert` added."""
    while (original := _original(module)) is not None:
        if isinstance(module, Linear):
            forget_weight(module)
            for steps in (module.runtime.steps, LOOSE.steps):
                if steps is not None:
                    steps.layers.discard(module)
            weight = module.weight
            if isinstance(weight, WeightCodes):
                plain = nn.Parameter(weight.read().clone(), weight.requires_grad)
                torch_compat.swap_parameter(weight, plain)
        forget_products(module)
        if isinstance(module, (Linear, TransposedLinear)):
            for name in ("runtime", "_layer", "recomputes_forward", "_swapped"):
                vars(module).pop(name, None)
        vars(module).pop("__module__", None)  # of `torch_compat.make_fx_leaf`
        torch_compat.remove_state_hooks(module, (plain_in_state_dict, reencode_after_load))
        module.__class__ = original  # pyright: ignore[reportAttributeAccessIssue]

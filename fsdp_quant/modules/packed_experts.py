"""Packed experts of transformers on `GroupedLinear`: modules that hold `gate_up_proj` and `down_proj`.

    rows   = x[tokens sorted by expert]
    y      = down(gate(gate_up(rows)))       gate: the module's own (`_apply_gate`)
    result = sum over a token's experts of its routing weight * y

x [tokens, hidden], gate_up_proj [E, 2 * ffn, hidden], down_proj [E, hidden, ffn]. The module keeps its parameters and their
names. Each is also the weight of a `GroupedLinear` of its own, which quantizes, plans, counts and gathers it: the tie is of
one Parameter, which `fully_shard` puts into both modules.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .grouped_linear import GroupedLinear
from .linear import saved_plain

PARTS = ("gate_up_proj", "down_proj")


class ExpertProduct(GroupedLinear):
    """The product of one packed weight, which the module around it has under its own name, in state dicts too."""

    def __init__(self, weight: nn.Parameter):
        nn.Module.__init__(self)
        self.weight = weight

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        pass

    def _load_from_state_dict(self, *args) -> None:
        pass


def is_packed_experts(module: nn.Module) -> bool:
    """Its two weights are [E, N, K], with a gate between them and neither biases nor a norm; not taken over yet.

    What is computed is transformers' contract with classes under `use_experts_implementation`: whatever has these flags may
    be multiplied by any of its implementations.
    """
    own = module._parameters
    packed = set(own) == set(PARTS) and all(w is not None and w.dim() == 3 for w in own.values())
    packed = packed and hasattr(module, "_apply_gate") and not hasattr(type(module), "converted_from")
    unlike = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    return packed and getattr(module, "has_gate", False) and not any(getattr(module, k, False) for k in unlike)


def are_sharded(module: nn.Module) -> bool:
    return any(isinstance(w, DTensor) for w in module._parameters.values())


def products_of(module: nn.Module, name: str) -> dict[str, ExpertProduct]:
    """Products of the weights of packed experts, which are no part of the module yet, by name.

    Raises ValueError for weights that are sharded already: nobody would tell the products when they are gathered.
    """
    if are_sharded(module):
        raise ValueError(
            f"{name}: call fq.convert before fully_shard, which must know both owners of the experts' weights"
        )
    return {f"{name}.{part}_product": ExpertProduct(module._parameters[part]) for part in PARTS}


def take_over(module: nn.Module, products: list[ExpertProduct]) -> None:
    """Let the module multiply by its products, which were converted."""
    for part, product in zip(PARTS, products):
        module.add_module(f"{part}_product", product)
    module.__class__ = _class_of(type(module))
    module.register_state_dict_post_hook(_plain_parts)


@functools.cache
def _class_of(cls: type) -> type:
    """cls with grouped products; its instances are pickled as cls."""
    def _apply(self, fn, recurse: bool = True):
        applied = cls._apply(self, fn, recurse)
        for part in PARTS:  # one that was replaced, as by to_empty, is tied again
            getattr(self, f"{part}_product")._parameters["weight"] = self._parameters[part]
        return applied

    return type(f"Quantized{cls.__name__}", (cls,), {
        "forward": _forward, "_apply": _apply, "__reduce_ex__": _reduce, "__module__": cls.__module__,
        "converted_from": cls,
    })


def _reduce(module: nn.Module, protocol: int) -> tuple:
    _, _, *state = module.converted_from.__reduce_ex__(module, protocol)
    return _blank, (module.converted_from,), *state


def _blank(cls: type) -> nn.Module:
    return cls.__new__(_class_of(cls))


def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if getattr(self, "_is_expert_parallel", False):
        raise NotImplementedError("experts that transformers spreads over ranks are not multiplied here; pass skip='experts'")
    experts, copies = self.gate_up_proj_product.weight.shape[0], top_k_index.shape[-1]
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True).int()
    back = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    rows = _Routed.apply(hidden_states, order, back, copies)
    y = _product(self, "down_proj", self._apply_gate(_product(self, "gate_up_proj", rows, ends)), ends)
    y = _Routed.apply(y, back, order, 1).view(-1, copies, y.shape[-1])
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


class _Routed(torch.autograd.Function):
    """Rows of `copies` copies of each row of x, in `order`, which `back` undoes: the gradient is gathered too, not scattered."""

    @staticmethod
    def forward(ctx, x, order, back, copies):
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx, dy):
        (back,) = ctx.saved_tensors
        return dy.index_select(0, back).view(-1, ctx.copies, dy.shape[-1]).sum(1), None, None, None


def _product(module: nn.Module, part: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Of the weight that the module has now: parametrized, as LoRA on experts does, it is another than the product's."""
    product = getattr(module, f"{part}_product")
    if module._parameters.get(part) is product._parameters["weight"]:
        return product(rows, ends)
    return torch.func.functional_call(product, {"weight": getattr(module, part)}, (rows, ends))


def _plain_parts(module: nn.Module, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold plain weights, under the module's names."""
    for part in PARTS:
        key = f"{prefix}{part}"
        if key in state_dict:
            state_dict[key] = saved_plain(getattr(module, part), state_dict[key])

# SPDX-License-Identifier: Apache-2.0
"""Packed experts of transformers and of torchtitan on `GroupedLinear`.

transformers: a module with `gate_up_proj` [E, 2 * ffn, hidden] and `down_proj` [E, hidden, ffn],
given x [tokens, hidden] and the experts of each token

    rows   = x[tokens sorted by expert]
    y      = down(gate(gate_up(rows)))       gate: the module's own (`_apply_gate`)
    result = sum over a token's experts of its routing weight * y

or `up_proj` and its activation; with biases [E, ffn] and [E, hidden], named `..._bias`; or with
weights that are stored transposed, as gpt-oss has them. Llama 4 multiplies every token by every
expert:

    y      = down(act(gate) * up), of rows [E * tokens, hidden]

torchtitan: `w1`, `w3` [E, ffn, hidden] and `w2` [E, hidden, ffn] (or `w1_EFD` and so on), given
rows and their numbers

    y      = w2(silu(w1(rows)) * w3(rows))

The module keeps its parameters and their names. Each is also the weight of a `GroupedLinear` of its
own, which quantizes, plans, counts and gathers it: `fully_shard` puts it into both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..ops.reference import known
from ..tensor import torch_compat
from .grouped_linear import GroupedLinear
from .has_weight import saved_plain


class ExpertProduct(GroupedLinear):
    """The product of one packed weight, which the module around it has in its state dict."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool):
        nn.Module.__init__(self)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.__dict__["transposed"] = transposed

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        pass

    def _load_from_state_dict(self, *args) -> None:
        pass


class Kind(NamedTuple):
    """What packed experts are.

    parts:       their weights, in the order of their products. forward: of the module.
    transposed:  the weights are stored [E, K, N].
    """

    parts: tuple[str, ...]
    forward: Callable
    transposed: bool = False


def kind_of(module: nn.Module) -> Kind | None:
    """Of packed experts that are not taken over yet; None of other modules."""
    cls, own = type(module), {name: p for name, p in module._parameters.items() if p is not None}
    weights = {name for name in own if not name.endswith("_bias")}
    packed = bool(weights) and all(
        not is_lazy(own[name]) and own[name].dim() == 3 for name in weights
    )
    if hasattr(cls, "converted_from") or not packed:
        return None
    if "down_proj" in weights:
        if cls.__name__ == "Llama4TextExperts":
            return Kind(("gate_up_proj", "down_proj"), _forward_of_all, True)
        parts = ("gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj")
        if weights != set(parts) or not _is_of_transformers(module):
            return None
        return Kind(parts, _forward, bool(module.is_transposed))
    named = {part.partition("_")[0]: part for part in own}
    parts = tuple(named.get(which, "") for which in ("w1", "w3", "w2"))
    if set(own) != set(parts) or not _is_of_torchtitan(module, parts):
        return None
    return Kind(parts, _forward_of_rows)


def _is_of_transformers(module: nn.Module) -> bool:
    """Of a class under `use_experts_implementation`, whose flags say what it computes."""
    if not all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed")):
        return False
    others = "has_post_expert_norm", "_is_expert_parallel"
    if any(getattr(module, flag, False) for flag in others):
        return False
    return hasattr(module, "_apply_gate" if module.has_gate else "act_fn")


def _is_of_torchtitan(module: nn.Module, parts: tuple[str, ...]) -> bool:
    """Its forward gives silu(w1 x) * w3 x, times w2, of random data, but for what bf16 rounds."""
    experts, width, count = module.get_parameter(parts[0]).shape[0], 16, 3
    options = {"dtype": torch.float32, "device": "cpu"}
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        w1, w3, w2 = (
            torch.randn(experts, width, width, generator=random, **options).bfloat16()
            for _ in parts
        )
        x = torch.randn(experts * count, width, generator=random, **options).bfloat16() / 4
        probe = object.__new__(type(module))
        weights = dict(zip(parts, (w1, w3, w2)))
        probe.__dict__ = module.__dict__ | {
            "_parameters": {part: nn.Parameter(weights[part]) for part in module._parameters}
        }
        try:
            y = type(module).forward(
                probe, x, torch.full((experts,), count, dtype=torch.int64, device="cpu")
            )
        except Exception:  # of any kind: it is not what was thought
            return False
        rows = x.float().view(experts, count, width)
        a, b = (rows @ w.float().mT for w in (w1, w3))
        want = ((torch.nn.functional.silu(a) * b) @ w2.float().mT).view(-1, width)
    if not isinstance(y, Tensor) or y.shape != want.shape:
        return False
    return bool((y.float() - want).norm() < 0.02 * want.norm())


def are_sharded(module: nn.Module) -> bool:
    return any(isinstance(w, DTensor) for w in module._parameters.values())


def products_of(module: nn.Module, name: str) -> dict[str, ExpertProduct]:
    """Products of the weights of packed experts, which are no part of the module yet, by name.

    Raises ValueError for weights that are sharded already: the products would not see gathers.
    """
    if are_sharded(module):
        raise ValueError(
            f"{name}: call fq.convert before fully_shard, which must know both owners of the "
            "experts' weights"
        )
    kind = known(kind_of(module), "a kind of packed experts")
    return {
        f"{name}.{part}_product": ExpertProduct(
            module.get_parameter(part), module._parameters.get(f"{part}_bias"), kind.transposed
        )
        for part in kind.parts
    }


def take_over(module: nn.Module, products: list[ExpertProduct]) -> None:
    """Let the module multiply by its products, which were converted."""
    kind = known(kind_of(module), "a kind of packed experts")
    for part, product in zip(kind.parts, products):
        module.add_module(f"{part}_product", product)
    module.__class__ = _class_of(type(module), kind.parts, kind.forward)
    module.register_state_dict_post_hook(_plain_parts)


def forget_products(module: nn.Module) -> None:
    """Undo what `take_over` added to a module."""
    for part in getattr(type(module), "packed_parts", ()):
        delattr(module, f"{part}_product")
    torch_compat.remove_state_hooks(module, (_plain_parts,))


class _Quantized(nn.Module):
    """What classes of `_class_of` have."""

    converted_from: type[nn.Module]
    packed_parts: tuple[str, ...]
    packed_forward: Callable


@functools.cache
def _class_of(cls: type[nn.Module], parts: tuple[str, ...], forward: Callable) -> type[nn.Module]:
    """cls with grouped products of `parts`; its instances are pickled as cls."""

    def _apply(self, fn, recurse: bool = True):
        applied = cls._apply(self, fn, recurse)
        for part in parts:  # one that was replaced, as by to_empty, is tied again
            own = getattr(self, f"{part}_product")._parameters
            own["weight"] = self._parameters[part]
            own["bias"] = self._parameters.get(f"{part}_bias")
        return applied

    return type(
        f"Quantized{cls.__name__}",
        (cls,),
        {
            "forward": _with_names_of(cls, forward),
            "_apply": _apply,
            "__reduce_ex__": _reduce,
            "__module__": cls.__module__,
            "converted_from": cls,
            "packed_parts": parts,
            "packed_forward": staticmethod(forward),
        },
    )


def _with_names_of(cls: type[nn.Module], forward: Callable) -> Callable:
    """`forward`, with the names that `cls.forward` gives its arguments."""
    names, wanted = (list(inspect.signature(f).parameters)[1:] for f in (forward, cls.forward))
    own_name = dict(zip(wanted, names))

    @functools.wraps(cls.forward)
    def named(self, *args, **kwargs):
        return forward(self, *args, **{own_name.get(k, k): v for k, v in kwargs.items()})

    return forward if names == wanted else named


def _reduce(module: _Quantized, protocol: int) -> tuple:
    _, _, *state = module.converted_from.__reduce_ex__(module, protocol)
    return _blank, (module.converted_from, module.packed_parts, module.packed_forward), *state


def _blank(cls: type[nn.Module], parts: tuple[str, ...], forward: Callable) -> nn.Module:
    return cls.__new__(_class_of(cls, parts, forward))


def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if getattr(self, "_is_expert_parallel", False):
        raise NotImplementedError(
            "experts that transformers spreads over ranks are not multiplied here; pass "
            "skip='experts'"
        )
    (first, last), copies = self.packed_parts, top_k_index.shape[-1]
    experts = len(getattr(self, f"{first}_product").weight)
    gate = self._apply_gate if self.has_gate else self.act_fn
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(
        chosen, torch.arange(experts, dtype=torch.int64, device=chosen.device), right=True
    ).int()
    places = torch.arange(len(order), dtype=torch.int64, device=order.device)
    back = torch.empty_like(order).index_copy(0, order, places)
    rows = _Routed.apply(hidden_states, order, back, copies)
    y = _product(self, last, gate(_product(self, first, rows, ends)), ends)
    y = _Routed.apply(y, back, order, 1).view(-1, copies, y.shape[-1])
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _forward_of_rows(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    rows, ends = x.bfloat16(), num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    a, b = (_product(self, part, rows, ends) for part in self.packed_parts[:2])
    return _product(self, self.packed_parts[2], torch.nn.functional.silu(a) * b, ends).type_as(x)


def _forward_of_all(self, hidden_states: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    experts = len(self.gate_up_proj_product.weight)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device)
    ends = ends * (len(rows) // experts)
    gate, up = _product(self, "gate_up_proj", rows, ends).chunk(2, -1)
    return _product(self, "down_proj", up * self.act_fn(gate), ends)


class _Routed(torch.autograd.Function):
    """Rows of `copies` copies of each row of x, in `order`, which `back` undoes by a gather."""

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
    """Of the module's weight, which is not the product's if it is parametrized (LoRA)."""
    product = getattr(module, f"{part}_product")
    if module._parameters.get(part) is product._parameters["weight"]:
        return product(rows, ends)
    weight = getattr(module, part)
    if isinstance(weight, DTensor):
        raise NotImplementedError(
            f"{part} was sharded after fq.convert by something else than fully_shard; pass skip= "
            "to keep these experts as they are"
        )
    return torch.func.functional_call(product, {"weight": weight}, (rows, ends))


def _plain_parts(module: _Quantized, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold plain weights, under the module's names."""
    for part in module.packed_parts:
        key = f"{prefix}{part}"
        if key in state_dict:
            state_dict[key] = saved_plain(getattr(module, part), state_dict[key])

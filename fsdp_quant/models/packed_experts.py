# SPDX-License-Identifier: Apache-2.0
"""Packed experts of transformers and of torchtitan on `GroupedLinear`.

transformers: a module with `gate_up_proj` [E, 2 * ffn, hidden] and `down_proj` [E, hidden, ffn],
given x [tokens, hidden] and the experts of each token

    rows   = x[tokens sorted by expert]
    y      = down(gate(gate_up(rows)))       gate: the module's own (`_apply_gate`), or kernels
                                             that quantize SwiGLU (`grouped.fuses_swiglu`)
    result = sum over a token's experts of its routing weight * y, rounded once

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

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..linear.bad_splits import BAD_SPLITS
from ..linear.grouped_linear import GroupedLinear
from ..linear.has_weight import plain_in_load, saved_plain
from ..linear.routes import ALONE, Routes, combine, dispatch, sorted_by_expert
from ..ops import opaque
from ..ops.reference import known
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import local_of
from .grouped_mlp import multiplied
from .proof import gate_of, swiglu_of
from .reads import Reads, held, probe_of, proven
from .symbols import SHAPES, Symbols, Unobserved, Unproven


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

    is_routed = False  # its splits are made of the experts of each token

    @property
    def malformed(self) -> str:
        """What to say of splits that no expert has."""
        if not self.is_routed:
            return BAD_SPLITS
        last = len(self.weight) - 1
        return f"an earlier call's top_k_index gave some of {{}} rows no expert of 0 to {last}"

    def _checked(self, sizes: list[int], rows: int) -> list[int]:
        if self.is_routed and sum(sizes) != rows:
            raise ValueError(
                f"{self._name.rpartition('.')[0]}: {rows - sum(sizes)} of {rows} entries of "
                f"top_k_index are no expert index; wanted 0 to {len(sizes) - 1}: leave such routes "
                "out before the experts are called"
            )
        return super()._checked(sizes, rows)


class Kind(NamedTuple):
    """What packed experts are.

    parts:       their weights, in the order of their products. forward: of the module.
    transposed:  the weights are stored [E, K, N].
    swiglu:      the class of `act_fn` and the function `_apply_gate` that are SwiGLU; None: others.
    """

    parts: tuple[str, ...]
    forward: Callable
    transposed: bool = False
    swiglu: tuple[type, Callable] | None = None


def kind_of(module: nn.Module) -> Kind | None:
    """Of packed experts that are not taken over yet; None of other modules."""
    kind = _looks_like(module)
    return None if kind is None or reason_against(module) is not None else kind


def reason_against(module: nn.Module) -> str | None:
    """Why a module that looks like packed experts is not taken for them."""
    if (kind := _looks_like(module)) is None:
        return None
    cls = type(module)
    try:
        return _reason_against(module, kind, cls, _reads_of(module, kind, cls)) or None
    except Unproven as error:
        return f"{cls.__name__}.forward {error}"


def _looks_like(module: nn.Module) -> Kind | None:
    cls, parameters = type(module), {n: p for n, p in module._parameters.items() if p is not None}
    weights = {name for name in parameters if not name.endswith("_bias")}
    packed = bool(weights) and all(
        not is_lazy(parameters[name]) and parameters[name].dim() == 3 for name in weights
    )
    if hasattr(cls, "converted_from") or not packed or "forward" in module.__dict__:
        return None
    if "down_proj" in weights:
        if cls.__name__ == "Llama4TextExperts":
            return Kind(("gate_up_proj", "down_proj"), _forward_of_all, True)
        parts = ("gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj")
        if weights != set(parts) or not _is_of_transformers(module):
            return None
        return Kind(parts, _forward, bool(module.is_transposed))
    named = {part.partition("_")[0]: part for part in parameters}
    parts = tuple(named.get(which, "") for which in ("w1", "w3", "w2"))
    return Kind(parts, _forward_of_rows) if set(parameters) == set(parts) else None


def _is_of_transformers(module: nn.Module) -> bool:
    """Of a class under `use_experts_implementation`, whose flags say what it computes."""
    if not all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed")):
        return False
    others = "has_post_expert_norm", "_is_expert_parallel"
    if any(getattr(module, flag, False) for flag in others):
        return False
    return hasattr(module, "_apply_gate" if module.has_gate else "act_fn")


# The proof: operator by operator, on few elements, the module's own forward is `Kind.forward` #


def _reads_of(module: nn.Module, kind: Kind, cls: type[nn.Module]) -> Reads:
    """Facts under which the forward of `cls` is what it is. Raises Unproven for code without."""
    leaves = "_is_expert_parallel", *(f"{part}_product" for part in kind.parts)
    return Reads(module, cls, leaves, [_eager_forward(cls), kind.forward])


def _reason_against(module: nn.Module, kind: Kind, cls: type[nn.Module], reads: Reads) -> str:
    """Why the forward of `cls` is not `kind.forward`, but for roundings; "": it is."""

    def prove() -> str:
        try:
            modes = itertools.product((torch.float32, torch.bfloat16), (True, False))
            if all(_is_same(module, kind, cls, *mode) for mode in modes):
                return ""
            return f"{cls.__name__}.forward computes something else than packed experts"
        except Exception as error:  # of the user's forward
            return f"{cls.__name__}.forward {error}"

    return proven((cls, kind, *_shapes(module, kind).items()), reads, prove)


def _shapes(module: nn.Module, kind: Kind) -> dict[str, torch.Size]:
    """Of the parameters as `cls.forward` reads them: frozen codes are [.., N, K]."""
    shapes = {n: p.shape for n, p in module._parameters.items() if p is not None}
    for part in kind.parts:
        if kind.transposed and isinstance(local_of(module.get_parameter(part)), QuantizedTensor):
            experts, rows, cols = shapes[part]
            shapes[part] = torch.Size([experts, cols, rows])
    return shapes


def _eager_forward(cls: type[nn.Module]) -> Callable:
    """That of the class; of transformers what its dispatch between implementations wraps."""
    code = cls.forward
    while code.__globals__["__name__"] == _DISPATCH and hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    return code


_DISPATCH = "transformers.integrations.moe"


class _Defined(nn.Module):
    """A product of packed experts by torch's operators."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, parameters: dict, part: str, transposed: bool):
        super().__init__()
        self._parameters |= {"weight": parameters[part], "bias": parameters.get(f"{part}_bias")}
        self.transposed = transposed

    def forward(self, rows: Tensor, ends: Tensor, routes: Routes = (), around=ALONE) -> Tensor:
        rows = dispatch(rows, *routes) if routes else rows
        parts = rows.tensor_split(ends[:-1].tolist())
        weights = self.weight if self.transposed else self.weight.mT
        products = [part.to(w.dtype) @ w for part, w in zip(parts, weights)]
        if self.bias is not None:
            products = [y + bias for y, bias in zip(products, self.bias)]
        y = torch.cat(products)
        return combine(y, around.routes[1], around.weights) if around.routes else y


def _is_same(
    module: nn.Module, kind: Kind, cls: type[nn.Module], dtype: torch.dtype, training: bool
) -> bool:
    """The forward's operators are those of `kind.forward` on the same elements, in any order."""
    shapes = _shapes(module, kind)
    first, last = (shapes[part] for part in (kind.parts[0], kind.parts[-1]))
    (experts, *inner), (_, hidden, width) = first, last
    if kind.transposed:
        (width, hidden), inner = (hidden, width), inner[::-1]
    small = {hidden: 24, inner[0]: 16, width: 8}  # equal sizes stay equal
    symbols, random = Symbols(exact=False), torch.Generator().manual_seed(0)

    def symbol(name: str, *shape: int) -> Tensor:
        tensor = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(dtype)
        symbols.name(tensor.requires_grad_(), name)
        return tensor

    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        parameters = {
            n: None if p is None else symbol(n, experts, *(small[d] for d in shapes[n][1:]))
            for n, p in module._parameters.items()
        }
        numbers = torch.arange(experts + 1, dtype=torch.int64, device="cpu")
        if kind.forward is _forward:
            routes = torch.stack([numbers, numbers + 1], 1)[:, : min(experts, 2)] % experts
            inputs = [symbol("x", experts + 1, small[hidden]), routes, symbol("p", *routes.shape)]
        else:
            counts = numbers[1:] % 3
            rows = int(counts.sum()) if kind.forward is _forward_of_rows else 2 * experts
            inputs = [symbol("x", rows, small[hidden])]
            inputs += [counts] * (kind.forward is _forward_of_rows)
        sizes = {
            name: small[value]
            for name, value in module.__dict__.items()
            if type(value) is int and value in small and value != experts
        }
        probe = copy.copy(module)
        products = {
            f"{part}_product": _Defined(parameters, part, kind.transposed) for part in kind.parts
        }
        children = {n: m for n, m in module._modules.items() if n not in products}
        probe.__dict__ |= {"_parameters": parameters, "_modules": children} | sizes
        plain = copy.copy(probe)
        unfused = {"packed_parts": kind.parts, "packed_kind": kind._replace(swiglu=None)}
        plain.__dict__ |= {"_modules": children | products} | unfused
        with symbols:
            symbols.gradients = True
            with Unobserved(SHAPES):
                y = _eager_forward(cls)(probe_of(probe, cls, training), *inputs)
            symbols.gradients = False
            z = kind.forward(probe_of(plain, cls, training, tuple(products)), *inputs)
        return y.shape == z.shape and torch.equal(symbols.numbers_of(y), symbols.numbers_of(z))


def are_sharded(module: nn.Module) -> bool:
    return any(isinstance(w, DTensor) for w in module._parameters.values())


def products_of(module: nn.Module, name: str) -> dict[str, ExpertProduct]:
    """Products of the weights of packed experts, which are no part of the module yet, by name."""
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
    is_routed = kind.forward is _forward
    kind = kind._replace(swiglu=swiglu_of(module) if is_routed else None)
    for part, product in zip(kind.parts, products):
        module.add_module(f"{part}_product", product)
        product.is_routed = is_routed
    module.__class__ = _class_of(type(module), *kind)
    module.register_state_dict_post_hook(_plain_parts)
    torch_compat.make_fx_leaf(module)
    changed_in(module)


def forget_products(module: nn.Module) -> None:
    """Undo what `take_over` added to a module."""
    for part in getattr(type(module), "packed_parts", ()):
        delattr(module, f"{part}_product")
    torch_compat.remove_state_hooks(module, (_plain_parts,))


@opaque.eager_only  # graphs guard what `forward` reads
def changed_in(module: nn.Module) -> str | None:
    """What is not as it was proven, of experts that were taken over."""
    cls, kind = (getattr(type(module), name) for name in ("converted_from", "packed_kind"))

    def prove(reads: Reads) -> None:
        if reason := _reason_against(module, kind, cls, reads):
            raise Unproven(reason)

    return held(module, lambda: _reads_of(module, kind, cls), prove).changed(module)


@functools.cache
def _class_of(cls: type[nn.Module], *of_kind: Any) -> type[nn.Module]:
    """cls with grouped products of `parts`; its instances are pickled as cls.

    What its forward was proven from is looked up again; if it is otherwise, cls.forward runs.
    """
    kind, code = Kind(*of_kind), cls.forward
    parts, named = kind.parts, _with_names_of(cls, kind.forward)

    @functools.wraps(code)
    def proven_forward(self, *args, **kwargs):
        if cls.forward is not code or changed_in(self) is not None:
            return cls.forward(self, *args, **kwargs)
        return named(self, *args, **kwargs)

    def _share(self, name: str) -> None:
        """Give a parameter of the module to the product that multiplies it."""
        part = name.removesuffix("_bias")
        if part in parts and name in self._parameters:
            product = getattr(self, f"{part}_product")
            setattr(product, "weight" if name == part else "bias", self._parameters[name])

    def __setattr__(self, name, value):
        cls.__setattr__(self, name, value)
        _share(self, name)

    def _apply(self, fn, recurse: bool = True):
        applied = cls._apply(self, fn, recurse)
        for name in self._parameters:
            _share(self, name)
        return applied

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        weights = {f"{prefix}{part}": self._parameters.get(part) for part in parts}
        state_dict = plain_in_load(state_dict, weights, kind.transposed)
        cls._load_from_state_dict(self, state_dict, prefix, *args)

    return type(
        f"Quantized{cls.__name__}",
        (cls,),
        {
            "forward": proven_forward,
            "__setattr__": __setattr__,
            "_apply": _apply,
            "_load_from_state_dict": _load_from_state_dict,
            "__reduce_ex__": _reduce,
            "__module__": cls.__module__,
            "converted_from": cls,
            "packed_parts": parts,
            "packed_kind": kind,
            "_fq_changed": changed_in,
        },
    )


def _with_names_of(cls: type[nn.Module], forward: Callable) -> Callable:
    """`forward`, with the names that `cls.forward` gives its arguments."""
    names, names_of_cls = (
        list(inspect.signature(f).parameters)[1:] for f in (forward, cls.forward)
    )
    own_name = dict(zip(names_of_cls, names))

    @functools.wraps(cls.forward)
    def named(self, *args, **kwargs):
        return forward(self, *args, **{own_name.get(k, k): v for k, v in kwargs.items()})

    return forward if names == names_of_cls else named


def _reduce(module: Any, protocol: int) -> tuple:
    _, _, *state = module.converted_from.__reduce_ex__(module, protocol)
    *kind, swiglu = module.packed_kind  # of which the function may have no name
    return _blank, (module.converted_from, swiglu and swiglu[0], *kind), *state


def _blank(cls: Any, activation: type | None, *kind) -> nn.Module:
    return cls.__new__(_class_of(cls, *kind, activation and (activation, cls._apply_gate)))


def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if getattr(self, "_is_expert_parallel", False):
        raise NotImplementedError(
            "experts that transformers spreads over ranks are not multiplied here; pass "
            "skip='experts'"
        )
    products = [getattr(self, f"{part}_product") for part in self.packed_parts]
    ends, routes = sorted_by_expert(top_k_index, len(products[0].weight))
    weights = top_k_weights[:, : top_k_index.shape[-1]]
    activation = self._apply_gate if self.has_gate else self.act_fn
    is_swiglu = gate_of(self) == self.packed_kind.swiglu

    def multiply(which: int, rows: Tensor, *of_call: Any) -> Any:
        return _product(self, self.packed_parts[which], rows, ends, *of_call)

    y = multiplied(products, multiply, activation, is_swiglu, hidden_states, routes, weights)
    return y.to(hidden_states.dtype)


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


def _product(module: nn.Module, part: str, rows: Tensor, ends: Tensor, *of_call: Any) -> Any:
    """Of the module's weight and bias, which are not the product's if they are parametrized (LoRA),
    or those of a functional call."""
    product = getattr(module, f"{part}_product")
    weight, bias = getattr(module, part), getattr(module, f"{part}_bias", None)
    parameters = product._parameters
    if weight is parameters["weight"] and bias is parameters["bias"]:
        return product(rows, ends, *of_call)
    if isinstance(weight, DTensor):
        raise NotImplementedError(
            f"{part} was sharded after fq.convert by something else than fully_shard; pass skip= "
            "to keep these experts as they are"
        )
    parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return torch.func.functional_call(product, parameters, (rows, ends, *of_call))


def _plain_parts(module: Any, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold plain weights, under the module's names."""
    for part in module.packed_parts:
        key = f"{prefix}{part}"
        if key in state_dict:
            weight, transposed = getattr(module, part), module.packed_kind.transposed
            state_dict[key] = saved_plain(weight, state_dict[key], transposed)

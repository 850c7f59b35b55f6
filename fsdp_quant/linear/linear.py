# SPDX-License-Identifier: Apache-2.0
"""`fq.Linear`, with the parameters and keys of nn.Linear; and one expert of packed weights."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..context import contexts, quantized_init_recipe
from ..migration import answers_keywords
from ..ops import opaque
from ..ops.reference import known
from ..ops.rng import own_name
from ..options import flag
from ..recipe import Recipe, identity
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .among_ranks import forward_among_ranks
from .base import BaseLinear
from .boundary import boundary
from .fused import can_fuse_activation, linear
from .plan import GemmPlan
from .runtime import LayerRuntime
from .shared_input import Handed

EXPERT = "grouped_linear"  # `Role.module_type`


@answers_keywords
class Linear(BaseLinear):
    """y = x W^T + b, each of its three products in the formats that a recipe gives.

    weight:  [out_features, in_features], the plain nn.Parameter of nn.Linear, which `fully_shard`
             gathers as codes; under `fq.quantized_model_init` a `QuantizedTensor`.
    recipe:  `Recipe` or its name; change it with `fq.set_recipe`. None: high precision, until
             `fq.convert` gives the model one.
    return_bias:  (y, bias) is returned, and the bias not added; (y, None) with bias=False.
    fuse_wgrad_accumulation:  the wgrad GEMM adds to `weight.main_grad` (fp32 or bf16) in fp32, and
             `.grad` stays None. If the weight has `grad_added_to_main_grad`, it is set to True, and
             `.grad` gets values that mean nothing, so that hooks run (Megatron's DDP).
    delay_wgrad_compute:  the backward computes no wgrad, `backward_dw()` does, once per backward,
             before the optimizer steps. Both are attributes too, also of layers of `fq.convert`.
    recomputes_forward:  as in `BaseLinear`.

    Input [.., in_features] and output [.., out_features] have one dtype (or autocast's).

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.hybrid("mxfp8", "nvfp4"))
    >>> layer(torch.ones(2, 64)).shape
    torch.Size([2, 32])
    """

    return_bias = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ):
        if not isinstance(bias, bool):
            raise ValueError(
                f"fq.Linear: bias is {bias!r}; wanted True or False, and a recipe by its name: "
                f"recipe={bias!r}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        recipe = recipe or quantized_init_recipe()
        self.make_quantized(recipe or identity(), own_name(name, "linear"))
        self.runtime.chosen = recipe is not None
        self.return_bias = flag().read("fq.Linear: return_bias", return_bias)
        self.fuse_wgrad_accumulation = flag().read(
            "fq.Linear: fuse_wgrad_accumulation", fuse_wgrad_accumulation
        )
        self.delay_wgrad_compute = flag().read(
            "fq.Linear: delay_wgrad_compute", delay_wgrad_compute
        )

    def forward(
        self,
        input: Tensor,  # as nn.Linear calls it
        handed: Handed | None = None,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """residual + scale * (input W^T + b), the product rounded to its dtype first; with
        return_bias (residual + scale * input W^T, b).

        handed:  what the module that computed the input hands over with it.
        """
        if not self.return_bias:
            return self._forward(input, self.bias, handed, residual, scale)
        y, bias = self._forward(input, None, handed, residual, scale), self.bias
        if isinstance(bias, DTensor) and not isinstance(y, DTensor):
            bias = torch_compat.to_local(bias)
        return y, bias

    def _forward(
        self,
        input: Tensor,
        bias: Tensor | None,
        handed: Handed | None,
        residual: Tensor | None,
        scale: float,
    ) -> Tensor:
        if input.is_nested:
            run = functools.partial(
                self._forward, bias=bias, handed=None, residual=None, scale=scale
            )
            return torch_compat.of_nested(run, input)
        weight = self.weight
        if self.parallel is not None or isinstance(weight, DTensor):
            return finished(forward_among_ranks(self, input, bias), residual, scale)
        if handed is None and (by_input := self.runtime.handed_by_input) is not None:
            handed = by_input.of(input)
        return self.times(input, weight, bias, handed, residual, scale)

    def times(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handed: Handed | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """`forward` of a weight [out_features, in_features] that no ranks share, and a bias."""
        x, plan = self.checked(x, weight), self.plan_here(weight.device)
        if plan.boundary is None:
            return finished(self._product(x, weight, bias, plan, handed), residual, scale)
        sides, ids = plan.boundary, self.runtime.boundary_ids
        y = self._product(boundary(x, sides, ids, output=False), weight, bias, plan, None)
        return boundary(finished(y, residual, scale), sides, ids, grad_input=False)

    @torch.compiler.disable(
        reason="a layer of delay_wgrad_compute=True runs between graphs, because the backward of a "
        "graph leaves no product to backward_dw"
    )
    def _between_graphs(self, *operands) -> Tensor:
        return self._product(*operands)

    def _compiled_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, handed: Handed | None
    ) -> Tensor:
        if self.delay_wgrad_compute:
            return self._between_graphs(x, weight, bias, plan, None)
        return self.in_graph(x, weight, bias, plan)

    @opaque.compiled_as(_compiled_product)
    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, handed: Handed | None
    ) -> Tensor:
        if not isinstance(x, QuantizedTensor):
            plan = plan.on(x.dtype, x.device)
        return linear(x, weight, bias, self.call(x, weight, bias, plan), handed)

    def can_fuse_activation(self, x: Tensor) -> bool:
        """The kernel that quantizes an input like x may compute it: nothing else reads it."""
        if not takes_handed(self) or type(self) is not Linear or "forward" in self.__dict__:
            return False
        here = contexts()
        if here.autocast is not None or here.batch_invariant:
            return False
        if torch_compat.autocast_dtype(x.device) is not None:
            return False
        is_shared = self.parallel is not None or isinstance(self.weight, DTensor)
        if is_shared or not self.returns_wgrad or self.plan.boundary is not None:
            return False
        return can_fuse_activation(x, self.weight, self.bias, self.plan.on(x.dtype, x.device))


@opaque.compiled_as(lambda layer: False)
def takes_handed(layer: nn.Module) -> bool:
    """It is an `fq.Linear` that multiplies its input itself, now and unseen by hooks."""
    return isinstance(layer, Linear) and not torch_compat.has_hooks(layer)


def handed_to(layer: nn.Module, handed: Handed) -> dict[str, Handed]:
    """The argument by which a layer accepts `handed`, if it does (`takes_handed`)."""
    return {"handed": handed} if takes_handed(layer) else {}


def finished(y: Tensor, residual: Tensor | None, scale: float) -> Tensor:
    """residual + scale * y. Raises ValueError for a residual that a sum would broadcast."""
    if residual is None:
        return y if scale == 1.0 else y * scale
    if residual.shape != y.shape:
        raise ValueError(
            f"residual is {list(residual.shape)} and the output {list(y.shape)}; wanted one shape"
        )
    return torch.add(residual, y, alpha=scale)


class Expert(Linear):
    """One expert of packed weights: no module of the tree, and without memory of its own.

    Its weight, bias and mode are those of the module that it is part of, or given ones.
    """

    _given: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    _part_of: tuple[weakref.ref[Any], int] | None = None  # `values_of` of that module
    _mode = True

    def __init__(
        self,
        weight: Tensor,
        recipe: Recipe | str,
        name: str,
        module_type: str,
        first: Expert | None = None,
    ):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape[-2:]
        self.give(weight, None)
        owner = None if first is None else first.runtime
        runtime = self.runtime = LayerRuntime(name, module_type, recipe, weight.device, owner)
        shape, dtype = (self.out_features, self.in_features), runtime.recipe.compute_dtype
        runtime.set_weight_state(WeightState(f"{name}.weight", runtime.plan.weight, shape, dtype))
        self.prepare_graphs()

    def part_of(self, module: Any, index: int) -> None:
        """Find weight and bias by `module.values_of(index)`."""
        self.__dict__["_part_of"] = weakref.ref(module), index
        self.give(None, None)

    def give(
        self, weight: Tensor | None, bias: Tensor | None, parameter: Tensor | None = None
    ) -> None:
        """Multiply these; None: those of the module. parameter: that trains; default: weight."""
        self.__dict__["_given"] = weight, bias, weight if parameter is None else parameter

    def _now(self) -> tuple[Tensor | None, Tensor | None]:
        if self._given[0] is not None or self._part_of is None:
            return self._given[:2]
        reference, index = self._part_of
        module = reference()
        return (None, None) if module is None else module.values_of(index)

    @property
    def trained(self) -> tuple[Tensor, int | None, bool]:
        module = None if self._part_of is None else self._part_of[0]()
        if self._part_of is None or module is None:
            return known(self._given[2], "the weight"), None, False
        return module.weight, self._part_of[1], module.transposed

    @property
    def weight(self) -> Tensor | None:
        return self._now()[0]

    @property
    def bias(self) -> Tensor | None:
        return self._now()[1]

    @property
    def training(self) -> bool:
        module = None if self._part_of is None else self._part_of[0]()
        return self._mode if module is None else module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_mode"] = mode

    def __getstate__(self) -> dict:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_given", "_part_of")}


class ListedExpert(Linear):
    """One expert of a list: a layer that asks its recipe as an expert does."""

    module_type = EXPERT

# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Megatron's column- and row-parallel linear layers with the GEMMs of `fq.Linear`.

Megatron's own classes allocate, initialize, mark and save the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from ...linear.among_ranks import multiply_shared
from ...linear.cut import TensorParallel
from ...linear.linear import Linear
from ...linear.runtime import LayerRuntime
from ...recipe import Recipe, as_recipe, identity
from ...tensor import torch_compat
from ...tensor.quantized_tensor import QuantizedTensor
from ...tensor.quantized_weight import QuantizedWeight
from ...tensor.weight_state import WeightState
from .config import check_config, check_options

_SERIAL = itertools.count()


class _PassGradient(torch.autograd.Function):
    """Returns the synced weight; its gradient goes to the parameter."""

    @staticmethod
    def forward(ctx, parameter: Tensor, synced: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # a wgrad that went to main_grad is None here
        return synced[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class TakesWgrad:
    """Mixin of Megatron's `gradient_accumulation_fusion` and `delay_wgrad_compute`."""

    _matrix_layers: Any

    def take_wgrad(self, config: Any, *weights: nn.Parameter) -> None:
        self.fuse_wgrad_accumulation = getattr(config, "gradient_accumulation_fusion", False)
        self.delay_wgrad_compute = getattr(config, "delay_wgrad_compute", False)
        if self.delay_wgrad_compute:  # Megatron's DDP then registers its hooks with the module
            for weight in weights:
                vars(weight)["skip_backward_post_hook"] = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Run a hook of Megatron's DDP behind each `backward_dw`."""
        self._matrix_layers[-1].runtime.waiting.behind.append(hook)


class WeightProxy:
    """The weight that GEMMs read in place of a parameter.

    synced:  the `QuantizedWeight` that a weight sync writes, or None: the parameter is quantized in
             each forward.
    """

    def __init__(self, state: WeightState):
        self.state = state
        self.synced: QuantizedWeight | None = None

    def __getstate__(self) -> dict:
        return {"state": self.state, "synced": None}

    def read(self, parameter: Tensor) -> Tensor:
        """Return the weight to multiply; autograd sends its gradient to the parameter."""
        if self.synced is None:
            if isinstance(parameter, QuantizedTensor):
                raise NotImplementedError(
                    f"{self.state.name} is gathered by fully_shard, with which Megatron's layers "
                    "were not tested; leave --use-torch-fsdp2 out, or build the model of fq.Linear"
                )
            return parameter
        weight = self.synced._aliased()  # detach(), without a dispatch
        if torch.is_grad_enabled() and parameter.requires_grad:
            return _PassGradient.apply(parameter, [weight])
        return weight


def layer_name(module: nn.Module, name: str | None) -> str:
    return name or f"{type(module).__name__}.{next(_SERIAL)}"


def layer_recipe(name: str, recipe: Recipe | str | None) -> Recipe:
    """Return the recipe of one layer; None: high precision. Raises ValueError for a `tail`."""
    chosen = as_recipe(recipe or identity(), name, Recipe)
    if chosen.tail:
        raise ValueError(
            f"{name}: a layer does not know whether it is one of the last, which {chosen!r} keeps "
            "in high precision; build the layers without tail, then call fq.set_recipe(model, "
            "recipe)"
        )
    return chosen


class _BareLinear(Linear):
    """What the constructors of Megatron's layers call in place of nn.Module's."""

    def __init__(self):
        nn.Module.__init__(self)


class ParallelLinear(TakesWgrad, Linear):
    """Base of column and row layers, before Megatron's class and `_BareLinear`.

    The weight stays a plain parameter; GEMMs read it by its proxy.
    """

    class_recipe: Recipe | None = None  # of the classes that a `SpecProvider` returns
    tp_group: Any
    explicit_expert_comm: bool
    sequence_parallel: bool
    skip_bias_add: bool
    _dim: int
    backward_dw = Linear.backward_dw  # before Megatron's

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        name: str | None = None,
        recipe: Recipe | str | None = None,
        **options,
    ):
        name = layer_name(self, name)
        check_config(config, name)
        check_options(options, config.params_dtype, name)
        super().__init__(input_size, output_size, config=config, **options)  # pyright: ignore[reportCallIssue]
        if self.explicit_expert_comm and self._dim == 1 and not self.skip_bias_add:
            raise ValueError(
                f"{name}: the dispatcher sums the outputs of an expert's ranks; pass "
                "skip_bias_add=True"
            )
        self.out_features, self.in_features = self.weight.shape
        recipe = layer_recipe(name, recipe or self.class_recipe)
        self.runtime = LayerRuntime(name, self.module_type, recipe, self.weight.device)
        shape, dtype = tuple(self.weight.shape), recipe.compute_dtype
        state = WeightState(f"{name}.weight", self.plan.weight, shape, dtype)
        self.runtime.set_weight_state(state)
        if get_pg_size(self.tp_group) > 1 and not self.explicit_expert_comm:
            sequence_dim = 0 if self.sequence_parallel else None
            reduces = not options.get("disable_grad_reduce", False)
            self.parallel = TensorParallel(self.tp_group, self._dim == 0, sequence_dim, reduces)
            state.tensor_group, state.tensor_dim = self.tp_group, self._dim
        self._weight_proxy = WeightProxy(state)
        self.take_wgrad(config, self.weight)
        self.prepare_graphs()

    @torch_compat.never_compiled
    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **_) -> Tensor:
        """Return x W^T + b of this rank's x: Megatron's layers multiply by this method.

        Ranks gather codes of x before, and sum or scatter y behind.
        """
        if weight is not self.weight:
            raise ValueError(
                f"{self.runtime.name}: forward(weight=...) of another layer's weight; a weight has "
                "one recipe, that of its own layer: use Megatron's layer where weights are shared"
            )
        weight = self._weight_proxy.read(self.weight)
        # Shared experts set explicit_expert_comm behind the constructor, and communicate themselves
        if isinstance(self.parallel, TensorParallel) and not self.explicit_expert_comm:
            return multiply_shared(self, None, input, weight, bias, self.parallel)
        return self.times(input, weight, bias)

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, TP={get_pg_size(self.tp_group)}"


class ColumnParallelLinear(ParallelLinear, layers.ColumnParallelLinear, _BareLinear):
    """Megatron's column-parallel linear layer, (y, bias) = layer(x).

    x [S, B, K], or [S / R, B, K] with config.sequence_parallel; y [S, B, N / R], or [S, B, N] with
    gather_output.

    options:  Megatron's.
    recipe:   default: that of the `SpecProvider` that created the class, else high precision.

    Raises ValueError for options and fields of `config` that are not honoured, and for the weight
    of another layer.
    """

    _dim = 0


class RowParallelLinear(ParallelLinear, layers.RowParallelLinear, _BareLinear):
    """Megatron's row-parallel linear layer, (y, bias) = layer(x).

    x [S, B, K / R], or [S, B, K] without input_is_parallel; y [S, B, N], or [S / R, B, N] with
    config.sequence_parallel.

    The bias is added after the sum over ranks; its gradient covers this rank's rows, and Megatron
    sums it (`sequence_parallel`).
    options, recipe, errors: as for `ColumnParallelLinear`.
    """

    _dim = 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        # Megatron's own would scatter y behind `_forward_impl`, and so gather its gradient in high
        # precision.
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        y = self._forward_impl(input_, self.weight, None)
        if self.skip_bias_add:
            return y, self.bias
        return (y if self.bias is None else y + self.bias), None

# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel linear layers with the signatures and the state of Megatron's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...context import current_autocast
from ...modules.among_ranks import multiply_shared
from ...modules.exchange import TensorParallel
from ...modules.fused import linear
from ...modules.layer_runtime import LayerRuntime
from ...modules.linear import Linear
from ...recipe import Recipe
from ...tensor import torch_compat
from ...tensor.weight_state import WeightState
from . import core, weights
from .config import check_arguments, check_config


class _Columns(torch.autograd.Function):
    """gathers: [.., N / R] of every rank -> [.., N]; else [.., N] -> this rank's [.., N / R]. The
    backward is the opposite."""

    @staticmethod
    def forward(ctx, x, group, gathers):
        ctx.group, ctx.gathers = group, gathers
        return _columns(x, group, gathers)

    @staticmethod
    def backward(ctx, dy):
        return _columns(dy, ctx.group, not ctx.gathers), None, None


def _columns(x: Tensor, group: dist.ProcessGroup, gathers: bool) -> Tensor:
    if not gathers:
        return x.chunk(group.size(), -1)[group.rank()].contiguous()
    received = x.new_empty(group.size(), *x.shape)
    torch_compat.all_gather(received.view(-1), x.contiguous().view(-1), group)
    return torch.cat(list(received), -1)


class ParallelLinear(Linear):
    """Base of column and row layers: a plain parameter, its proxy, and the ranks that share it."""

    _dim: int
    _recipe_of_class: Recipe | None = None  # of the classes that a provider hands out

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        stride: int,
        is_expert: bool,
        tp_group: dist.ProcessGroup | None,
        name: str | None,
        recipe: Recipe | None,
        refused: dict[str, tuple],
    ):
        nn.Module.__init__(self)
        name = name or f"{type(self).__name__}.{next(weights.SERIAL)}"
        check_config(config, name)
        check_arguments(name, refused)
        group = weights.tensor_group_of(tp_group, config, is_expert)
        ranks = weights.size_of(group)
        size = ("input_size", input_size) if self._dim else ("output_size", output_size)
        cut = weights.check_divides(name, *size, ranks)
        expert_groups = weights.uses_expert_groups(config, is_expert)
        self.config = config
        self.tp_group = group
        self.is_expert = is_expert
        self.skip_bias_add = skip_bias_add
        self.input_size = input_size
        self.output_size = output_size
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.explicit_expert_comm = is_expert and (ranks > 1 or self.expert_parallel)
        self.gradient_accumulation_fusion = False
        self.sequence_parallel = config.sequence_parallel and ranks > 1
        self.weight = weights.new_weight(
            config, init_method, (output_size, input_size), self._dim, stride, group, is_expert
        )
        self.out_features, self.in_features = self.weight.shape
        weights.mark(self.weight, self._dim, stride, expert_groups)
        own_bias = weights.new_bias(config, output_size if self._dim else cut) if bias else None
        self.register_parameter("bias", own_bias)
        if own_bias is not None:
            weights.mark(own_bias, None if self._dim else 0, stride, expert_groups)
        recipe = weights.layer_recipe(name, recipe, self._recipe_of_class)
        self.runtime = LayerRuntime(name, self.module_type, recipe, self.weight.device)
        shape, dtype = tuple(self.weight.shape), recipe.compute_dtype
        state = WeightState(f"{name}.weight", self.plan.weight, shape, dtype)
        self.runtime.set_weight_state(state)
        if group is not None and ranks > 1 and not self.explicit_expert_comm:
            self.parallel = self._axis(group)
            state.tensor_group, state.tensor_dim = group, self._dim
        self._weight_proxy = weights.WeightProxy(state)
        self.prepare_graphs()
        self.register_load_state_dict_pre_hook(weights.ignore_extra_state)

    def _axis(self, group: dist.ProcessGroup) -> TensorParallel:
        raise NotImplementedError

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with this rank's x, bias included."""
        weight = self._weight_proxy.of(self.weight)
        if isinstance(self.parallel, TensorParallel):
            return multiply_shared(self, x, x, weight, bias, self.parallel)
        x, override = self.checked(x, weight), current_autocast()
        plan = self.plan if override is None else self._overriding_plan(override, self.weight)
        if plan.boundary is not None:
            raise NotImplementedError(
                f"{self.runtime.name}: Megatron's layers have no boundary slots; put fq.Quantize "
                "between "
                "modules"
            )
        plan = plan.on(x.dtype, x.device)
        return linear(x, weight, bias, self.call(x, weight, bias, plan))

    def _result(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        return y, self.bias if self.skip_bias_add else None

    # What Megatron asks of a layer #

    def backward_dw(self) -> None:
        """No-op: the backward computes the weight's gradient."""

    def get_extra_state(self) -> None:
        """None, like Megatron's own layers: statistics are in `fq.state_dict`."""

    def set_extra_state(self, state) -> None:
        """Ignored, like in Megatron's own layers."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """The parameters as `ShardedTensor`s, under the names of Megatron's own layers."""
        core.need("sharded_state_dict")
        axes = {"weight": 1} if self._dim else {"weight": 0, "bias": 0}
        return core.make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=core.ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, TP={weights.size_of(self.tp_group)}"


_ONE_COPY = "no second copy of a weight is kept"
_OWN_WEIGHT = (
    "a weight has one recipe, that of its own layer: use Megatron's layer where weights are shared"
)
_NO_BUFFER = "the backward computes gradients of weights"


class ColumnParallelLinear(ParallelLinear):
    """Megatron's column-parallel linear layer, (y, bias) = layer(x).

    x [S, B, K], or [S / R, B, K] with config.sequence_parallel; y [S, B, N / R], or [S, B, N] with
    gather_output.

    recipe:  default: that of the `SpecProvider` that created the class, else high precision.

    Raises ValueError for arguments and fields of `config` that are not honoured; ImportError if
    Megatron is missing but needed: without tp_group among ranks, for weights on a GPU, and for
    `sharded_state_dict`.
    """

    _dim = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list | None = None,
        grad_output_buffer: list | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
        recipe: Recipe | None = None,
    ):
        self.gather_output, self._reduces = gather_output, not disable_grad_reduce
        dtype = config.params_dtype
        refused = {
            "keep_master_weight_for_test": (keep_master_weight_for_test, False, _ONE_COPY),
            "skip_weight_param_allocation": (skip_weight_param_allocation, False, _OWN_WEIGHT),
            "embedding_activation_buffer": (embedding_activation_buffer, None, _NO_BUFFER),
            "grad_output_buffer": (grad_output_buffer, None, _NO_BUFFER),
            "output_dtype": (output_dtype or dtype, dtype, "y has the input's dtype"),
        }
        options = config, init_method, bias, skip_bias_add, stride, is_expert, tp_group, name
        super().__init__(input_size, output_size, *options, recipe, refused)
        self.output_size_per_partition = self.out_features
        if gather_output and self.explicit_expert_comm:
            raise ValueError(
                f"{self.runtime.name}: gather_output=True of an expert, whose ranks the dispatcher "
                "joins; "
                "leave it out"
            )

    def _axis(self, group: dist.ProcessGroup) -> TensorParallel:
        return TensorParallel(group, True, 0 if self.sequence_parallel else None, self._reduces)

    @torch.compiler.disable
    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if weight is not None:
            raise ValueError(
                f"{self.runtime.name}: forward(weight=...) of another layer's weight; {_OWN_WEIGHT}"
            )
        y = self._multiplied(input_, None if self.skip_bias_add else self.bias)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers and weights.size_of(self.tp_group) > 1:
            y = _Columns.apply(y, self.tp_group, True)
        return self._result(y)


class RowParallelLinear(ParallelLinear):
    """Megatron's row-parallel linear layer, (y, bias) = layer(x).

    x [S, B, K / R], or [S, B, K] without input_is_parallel; y [S, B, N], or [S / R, B, N] with
    config.sequence_parallel.

    The bias is added after the sum over ranks; its gradient covers this rank's rows, and Megatron
    sums it (`sequence_parallel`).
    recipe, errors: as for `ColumnParallelLinear`.
    """

    _dim = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: Any = None,
        recipe: Recipe | None = None,
    ):
        self.input_is_parallel = input_is_parallel
        refused = {"keep_master_weight_for_test": (keep_master_weight_for_test, False, _ONE_COPY)}
        options = config, init_method, bias, skip_bias_add, stride, is_expert, tp_group, name
        super().__init__(input_size, output_size, *options, recipe, refused)
        self.input_size_per_partition = self.in_features
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError(
                f"{self.runtime.name}: sequence_parallel without input_is_parallel; pass "
                "input_is_parallel=True"
            )
        if self.explicit_expert_comm and not skip_bias_add:
            raise ValueError(
                f"{self.runtime.name}: the dispatcher sums the outputs of an expert's ranks; pass "
                "skip_bias_add=True"
            )
        if bias:
            vars(self.bias)["sequence_parallel"] = self.sequence_parallel

    def _axis(self, group: dist.ProcessGroup) -> TensorParallel:
        return TensorParallel(group, False, 0 if self.sequence_parallel else None)

    @torch.compiler.disable
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel and weights.size_of(self.tp_group) > 1:
            input_ = _Columns.apply(input_, self.tp_group, False)
        y = self._multiplied(input_, None)
        return self._result(y if self.bias is None or self.skip_bias_add else y + self.bias)

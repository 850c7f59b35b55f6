# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: the linear layers that its specs take, the backend that hands them out, and the
arguments that fit them.

[Note: who writes the weights]
Parameters stay what they are to Megatron: plain tensors, which its DDP moves into flat buffers, and
which optimizer and collectives write there. Each forward quantizes the values that it finds; where
a weight sync gathers codes, a `WeightProxy` takes the parameter's place. Between an optimizer's
step and the gather of parameters that follows it no layer runs: Megatron's hooks see to that.

[Note: the shapes]
    column  W [N / R, K], x [S, B, K] or a piece [S / R, B, K], y [S, B, N / R]
    row     W [N, K / R], x [S, B, K / R], y [S, B, N] or a piece [S / R, B, N]
Both return (y, bias), the bias where Megatron adds it itself (skip_bias_add). What crosses ranks
are codes (`fq.parallel`). Experts never communicate here: Megatron's dispatchers move their tokens.

Importing this module needs no Megatron; what needs it raises ImportError, saying why it could not
be imported.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import recipe as recipes
from ..context import current_autocast
from ..modules.exchange import TensorParallel
from ..modules.grouped_linear import EXPERT, Expert, GroupedLinear
from ..modules.layer_runtime import LayerRuntime
from ..modules.linear import Linear
from ..modules.linear_op import linear
from ..modules.shared_linear import multiply_shared
from ..recipe import Recipe, as_recipe, identity
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState

try:
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        get_expert_parallel_rng_tracker_name,
    )
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import (
        GroupedMLPSubmodules,
        SequentialMLP,
        TEGroupedMLP,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        make_sharded_tensors_for_checkpoint,
    )
    from megatron.core.utils import get_tensor_model_parallel_group_if_none
except ImportError as error:
    _MISSING, BackendSpecProvider = error, object
else:
    _MISSING = None


def _need(what: str) -> None:
    """Raise ImportError where Megatron could not be imported."""
    if _MISSING is not None:
        raise ImportError(
            f"{what} needs Megatron-LM (megatron.core, and what it imports itself), which could "
            f"not be imported: {_MISSING}; put the checkout on PYTHONPATH"
        ) from _MISSING


# What is refused #

_OUR_FORMATS = "formats come from the recipe: leave it out"
_UNTESTED = "it was not tested with these layers: leave it out"
# Field of the config -> (values that these layers honour, what to do about others). A field that a
# config lacks is fine.
_HONOURED: dict[str, tuple[tuple, str]] = {
    "fp8": ((None, False), _OUR_FORMATS),
    "fp4": ((None, False), _OUR_FORMATS),
    "quant_recipe": ((None,), _OUR_FORMATS),
    "use_kitchen": ((False,), _OUR_FORMATS),
    "gradient_accumulation_fusion": (
        (False,),
        "Megatron's hooks take gradients: pass --no-gradient-accumulation-fusion",
    ),
    "fp16": (
        (False,),
        "a step that the loss scaler skips is not told to the recipe's statistics: train in bf16",
    ),
    "delay_wgrad_compute": ((False,), "weights' gradients are made in the backward: leave it out"),
    "overlap_dispatch_backward_with_experts_wgrad": (
        (False,),
        "weights' gradients are made in the backward: leave it out",
    ),
    "cuda_graph_impl": (
        (None, "none"),
        "Megatron's graphs were not tried: pass --cuda-graph-impl none",
    ),
    "gtp_weight_remat_size": ((None, 1), _UNTESTED),
    "expert_gtp_weight_remat_size": ((None, 1), _UNTESTED),
    "symmetric_ar_type": ((None,), _UNTESTED),
} | {
    name: ((None, False), _UNTESTED)
    for name in (
        "enable_cuda_graph",
        "external_cuda_graph",
        "tp_comm_overlap",
        "cpu_offloading",
        "fine_grained_activation_offloading",
        "batch_invariant_mode",
        "init_model_with_meta_device",
        "use_transformer_engine_op_fuser",
        "moe_use_grouped_tensor",
        "moe_single_grouped_weight",
        "moe_single_grouped_bias",
        "moe_paged_stash",
    )
}


def check_config(config, name: str = "config") -> None:
    """Raise ValueError for the first field of a TransformerConfig that these layers do not
    honour."""
    for field, (honoured, remedy) in _HONOURED.items():
        value = getattr(config, field, honoured[0])
        if value not in honoured:
            raise ValueError(
                f"{name}: {field}={value!r}; wanted {' or '.join(map(repr, honoured))}, because "
                f"{remedy}"
            )


def _check_arguments(name: str, wanted: dict[str, tuple[object, object, str]]) -> None:
    for argument, (got, want, remedy) in wanted.items():
        if got is not want and got != want:
            raise ValueError(f"{name}: {argument}={got!r}; wanted {want!r}, because {remedy}")


# The weight that products read #


class _PassGradient(torch.autograd.Function):
    """The stand-in as a result of the parameter, which gets its gradient."""

    @staticmethod
    def forward(ctx, parameter, weight_proxy):
        return weight_proxy[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class WeightProxy:
    """What products read in place of a parameter (see the note).

    state:      of the weight.
    synced:     a `QuantizedWeight` that a weight sync writes, or None: the parameter itself is
                quantized.
    """

    def __init__(self, state: WeightState):
        self.state, self.synced = state, None

    def __getstate__(self) -> dict:
        return {"state": self.state, "synced": None}

    def of(self, parameter: Tensor) -> Tensor:
        """The stand-in, with the parameter's place in autograd."""
        if self.synced is None:
            if isinstance(parameter, QuantizedTensor):
                raise NotImplementedError(
                    f"{self.state.name} is gathered by fully_shard, with which Megatron's layers "
                    "were not tested; leave --use-torch-fsdp2 out, or build the model of fq.Linear"
                )
            return parameter
        made = self.synced.detach()
        return (
            _PassGradient.apply(parameter, [made])
            if torch.is_grad_enabled() and parameter.requires_grad
            else made
        )


# Layers #

_SERIAL = itertools.count()


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _tensor_ranks(config, is_expert: bool) -> int:
    ranks = config.tensor_model_parallel_size
    return getattr(config, "expert_tensor_parallel_size", None) or ranks if is_expert else ranks


def _tensor_group(
    group: dist.ProcessGroup | None, config, is_expert: bool
) -> dist.ProcessGroup | None:
    """The ranks that share a layer: as given, or Megatron's own; None where this process is
    alone."""
    if (
        group is not None
        or not dist.is_initialized()
        or (_MISSING is not None and _tensor_ranks(config, is_expert) == 1)
    ):
        return group
    _need("a layer without tp_group")
    return get_tensor_model_parallel_group_if_none(None, is_expert=is_expert)


def _uses_expert_groups(config, is_expert: bool) -> bool:
    is_other = _tensor_ranks(config, True) != _tensor_ranks(config, False)
    return is_expert and (config.expert_model_parallel_size > 1 or is_other)


def _per_rank(name: str, what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(
            f"{name}: {what}={size} is cut over {ranks} ranks, which do not divide it; choose a "
            f"multiple of {ranks}"
        )
    return size // ranks


def _weight(
    config,
    init_method: Callable,
    shape: tuple[int, int],
    dim: int,
    stride: int,
    group: dist.ProcessGroup | None,
    is_expert: bool,
) -> nn.Parameter:
    """This rank's part of a weight [N, K], cut along `dim`; values and random state as of
    Megatron's own layers.

    On the CPU (use_cpu_initialization) every rank makes the whole weight and keeps its part:
    `stride` runs of it.
    """
    rank, ranks = _rank(group), _size(group)
    local = [size // ranks if d == dim else size for d, size in enumerate(shape)]
    if not config.use_cpu_initialization:
        weight = nn.Parameter(
            torch.empty(local, device=torch.cuda.current_device(), dtype=config.params_dtype)
        )
        if config.perform_initialization:
            _need("the initialization of weights on a GPU")
            tracker, names = (
                get_cuda_rng_tracker(),
                [get_expert_parallel_rng_tracker_name()] if is_expert else [],
            )
            with tracker.fork(*names) if tracker.is_initialized() else contextlib.nullcontext():
                init_method(weight)
        return weight
    weight = nn.Parameter(torch.empty(local, dtype=config.params_dtype))
    if config.perform_initialization:
        whole = torch.empty(shape, dtype=torch.float32)
        init_method(whole)
        runs = whole.to(config.params_dtype).split(local[dim] // stride, dim)[rank::ranks]
        with torch.no_grad():
            weight.copy_(torch.cat(runs, dim))
    return weight


def _zeros(config, size: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.zeros(size, device=device, dtype=config.params_dtype))


def _mark(parameter: nn.Parameter, dim: int | None, stride: int, expert_groups: bool) -> None:
    """The attributes that Megatron's DDP, gradient norm and checkpoints read."""
    if dim is not None:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = (
            True,
            dim,
            stride,
        )
    parameter.allreduce = not expert_groups


def _own_recipe(name: str, recipe: Recipe | str | None, of_class: Recipe | None) -> Recipe:
    recipe = as_recipe(recipe or of_class or identity(), name, Recipe)
    if recipe.tail:
        raise ValueError(
            f"{name}: a layer does not know whether it is one of the last, which {recipe!r} keeps "
            "in high precision; build the layers without tail, then call fq.set_recipe(model, "
            "recipe)"
        )
    return recipe


class _Columns(torch.autograd.Function):
    """gathers: [.., N / R] of every rank -> [.., N]; else [.., N] -> this rank's [.., N / R]. The
    gradient goes the other way."""

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


class _ParallelLinear(Linear):
    """What column and row layers share: a plain parameter, its stand-in, and its place among the
    ranks."""

    _dim: int
    _recipe_of_class: Recipe | None = None  # of the classes that a provider hands out

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        stride: int,
        is_expert: bool,
        tp_group,
        name: str | None,
        recipe: Recipe | None,
        refused: dict[str, tuple],
    ):
        nn.Module.__init__(self)
        name = name or f"{type(self).__name__}.{next(_SERIAL)}"
        check_config(config, name)
        _check_arguments(name, refused)
        group = _tensor_group(tp_group, config, is_expert)
        cut = _per_rank(
            name,
            *(("input_size", input_size) if self._dim else ("output_size", output_size)),
            _size(group),
        )
        expert_groups = _uses_expert_groups(config, is_expert)
        self.config, self.tp_group, self.is_expert, self.skip_bias_add = (
            config,
            group,
            is_expert,
            skip_bias_add,
        )
        self.input_size, self.output_size, self.expert_parallel = (
            input_size,
            output_size,
            config.expert_model_parallel_size > 1,
        )
        self.explicit_expert_comm = is_expert and (_size(group) > 1 or self.expert_parallel)
        self.gradient_accumulation_fusion = False
        self.sequence_parallel = config.sequence_parallel and _size(group) > 1
        self.weight = _weight(
            config, init_method, (output_size, input_size), self._dim, stride, group, is_expert
        )
        self.out_features, self.in_features = self.weight.shape
        _mark(self.weight, self._dim, stride, expert_groups)
        self.register_parameter(
            "bias", _zeros(config, output_size if self._dim else cut) if bias else None
        )
        if bias:
            _mark(self.bias, None if self._dim else 0, stride, expert_groups)
        recipe = _own_recipe(name, recipe, self._recipe_of_class)
        self.runtime = LayerRuntime(name, self.module_type, recipe, self.weight.device)
        shape, dtype = tuple(self.weight.shape), self.recipe.compute_dtype
        state = WeightState(f"{name}.weight", self.plan.weight, shape, dtype)
        self.runtime.set_weight_state(state)
        if _size(group) > 1 and not self.explicit_expert_comm:
            self.parallel = self._axis(group)
            state.tensor_group, state.tensor_dim = group, self._dim
        self._weight_proxy = WeightProxy(state)
        self.prepare_graphs()
        self.register_load_state_dict_pre_hook(_without_extra_state)

    def _axis(self, group: dist.ProcessGroup) -> TensorParallel:
        raise NotImplementedError

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y of x as it lies on this rank, bias included."""
        weight = self._weight_proxy.of(self.weight)
        if self.parallel is not None:
            return multiply_shared(self, x, x, weight, bias, self.parallel)
        x, override = self.checked(x, weight), current_autocast()
        plan = self.plan if override is None else self._overriding_plan(override)
        if plan.boundary is not None:
            raise NotImplementedError(
                f"{self._name}: Megatron's layers have no boundary slots; put fq.Quantize between "
                "modules"
            )
        grad, plan = torch.is_grad_enabled(), plan.on(x.dtype, x.device)
        return linear(
            x, weight, bias, self.call(x, weight, plan, weight.requires_grad and grad, grad)
        )

    def _result(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        return y, self.bias if self.skip_bias_add else None

    # What Megatron asks of a layer #

    def backward_dw(self) -> None:
        """Nothing is left to do: the backward has made the weight's gradient."""

    def get_extra_state(self) -> None:
        """None, as of Megatron's own layers: statistics are in `fq.state_dict`."""

    def set_extra_state(self, state) -> None:
        """Ignored, as by Megatron's own layers."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """The parameters as `ShardedTensor`s, by the names of Megatron's own layers."""
        _need("sharded_state_dict")
        axes = {"weight": 1} if self._dim else {"weight": 0, "bias": 0}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, TP={_size(self.tp_group)}"


def _without_extra_state(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")


_OWN_WEIGHT = (
    "a weight has one recipe, that of its own layer: use Megatron's layer where weights are shared"
)
_NO_BUFFER = "gradients of weights are made in the backward"


class ColumnParallelLinear(_ParallelLinear):
    """Megatron's column-parallel linear layer, (y, bias) = layer(x); its arguments are honoured or
    refused by name.

    x [S, B, K], or [S / R, B, K] with config.sequence_parallel; y [S, B, N / R], or [S, B, N] with
    gather_output.

    recipe:  of the products (default: that of the provider that made the class, else high
             precision).

    Raises ValueError for arguments and fields of `config` that are not honoured; ImportError where
    Megatron is missing and
    needed: without tp_group among ranks, for weights on a GPU, and for `sharded_state_dict`.
    """

    _dim = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
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
        pg_collection=None,
        recipe: Recipe | None = None,
    ):
        self.gather_output, self._reduces = gather_output, not disable_grad_reduce
        super().__init__(
            input_size,
            output_size,
            config,
            init_method,
            bias,
            skip_bias_add,
            stride,
            is_expert,
            tp_group,
            name,
            recipe,
            {
                "keep_master_weight_for_test": (
                    keep_master_weight_for_test,
                    False,
                    "no second copy of a weight is kept",
                ),
                "skip_weight_param_allocation": (skip_weight_param_allocation, False, _OWN_WEIGHT),
                "embedding_activation_buffer": (embedding_activation_buffer, None, _NO_BUFFER),
                "grad_output_buffer": (grad_output_buffer, None, _NO_BUFFER),
                "output_dtype": (
                    output_dtype or config.params_dtype,
                    config.params_dtype,
                    "y has the input's dtype",
                ),
            },
        )
        self.output_size_per_partition = self.out_features
        if gather_output and self.explicit_expert_comm:
            raise ValueError(
                f"{self._name}: gather_output=True of an expert, whose ranks the dispatcher joins; "
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
                f"{self._name}: forward(weight=...) of another layer's weight; {_OWN_WEIGHT}"
            )
        y = self._multiplied(input_, None if self.skip_bias_add else self.bias)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        return self._result(
            _Columns.apply(y, self.tp_group, True) if gathers and _size(self.tp_group) > 1 else y
        )


class RowParallelLinear(_ParallelLinear):
    """Megatron's row-parallel linear layer, (y, bias) = layer(x); its arguments are honoured or
    refused by name.

    x [S, B, K / R], or [S, B, K] without input_is_parallel; y [S, B, N], or [S / R, B, N] with
    config.sequence_parallel.

    The bias is added after the sum over ranks; its gradient is of this rank's rows, which Megatron
    sums (`sequence_parallel`).
    recipe, errors: as of `ColumnParallelLinear`.
    """

    _dim = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
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
        pg_collection=None,
        recipe: Recipe | None = None,
    ):
        self.input_is_parallel = input_is_parallel
        super().__init__(
            input_size,
            output_size,
            config,
            init_method,
            bias,
            skip_bias_add,
            stride,
            is_expert,
            tp_group,
            name,
            recipe,
            {
                "keep_master_weight_for_test": (
                    keep_master_weight_for_test,
                    False,
                    "no second copy of a weight is kept",
                )
            },
        )
        self.input_size_per_partition = self.in_features
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError(
                f"{self._name}: sequence_parallel without input_is_parallel; pass "
                "input_is_parallel=True"
            )
        if self.explicit_expert_comm and not skip_bias_add:
            raise ValueError(
                f"{self._name}: the dispatcher sums what ranks of an expert make; pass "
                "skip_bias_add=True"
            )
        if bias:
            self.bias.sequence_parallel = self.sequence_parallel

    def _axis(self, group: dist.ProcessGroup) -> TensorParallel:
        return TensorParallel(group, False, 0 if self.sequence_parallel else None)

    @torch.compiler.disable
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel and _size(self.tp_group) > 1:
            input_ = _Columns.apply(input_, self.tp_group, False)
        y = self._multiplied(input_, None)
        return self._result(y if self.bias is None or self.skip_bias_add else y + self.bias)


# Experts #


class _GroupedLinear(GroupedLinear):
    """Megatron's grouped linear layer: `weight0`, `weight1`, .. of this rank's experts, (y, biases)
    = layer(x, tokens of each).

    x [M, K], whose rows lie sorted by expert; y [M, N]. Among ranks of expert tensor parallelism
    each holds its part of every expert, and the dispatcher sums.

    Raises ValueError for arguments and fields of `config` that are not honoured.
    """

    _dim: int
    _recipe_of_class: Recipe | None = None

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection=None,
        name: str | None = None,
        recipe: Recipe | None = None,
    ):
        nn.Module.__init__(self)
        name = name or f"{type(self).__name__}.{next(_SERIAL)}"
        check_config(config, name)
        _check_arguments(name, {"is_expert": (is_expert, True, "a grouped layer is of experts")})
        recipe = _own_recipe(name, recipe, self._recipe_of_class)
        group = _tensor_group(getattr(pg_collection, "expt_tp", None), config, True)
        if bias and self._dim and _size(group) > 1:
            raise ValueError(
                f"{name}: bias=True of a row layer whose experts are cut: every rank would add it; "
                "leave it out"
            )
        _per_rank(
            name,
            *(("input_size", input_size) if self._dim else ("output_size", output_size)),
            _size(group),
        )
        self.config, self.num_gemms, self.use_bias, self.skip_bias_add = (
            config,
            num_gemms,
            bias,
            skip_bias_add,
        )
        self._groups, self.tp_group, expert_groups = (
            pg_collection,
            group,
            _uses_expert_groups(config, True),
        )
        self._linears, self._weight_proxies, self.packed = [], [], True
        for e in range(num_gemms):
            weight = _weight(
                config, init_method, (output_size, input_size), self._dim, 1, group, True
            )
            _mark(weight, self._dim, 1, expert_groups)
            self.register_parameter(f"weight{e}", weight)
            if bias:
                self.register_parameter(f"bias{e}", _zeros(config, weight.shape[0]))
                _mark(getattr(self, f"bias{e}"), None if self._dim else 0, 1, expert_groups)
            layer = Expert(weight.detach(), recipe, f"{name}.{e}", EXPERT)
            self._linears.append(layer)
            self._weight_proxies.append(WeightProxy(layer._weight_state))
        self.in_features, self.out_features = (
            self._linears[0].in_features,
            self._linears[0].out_features,
        )
        self.finish_experts(name)
        self.register_load_state_dict_pre_hook(_without_extra_state)

    @property
    def layers(self) -> Sequence[Linear]:
        return self._linears

    @property
    def owners(self) -> Sequence[nn.Module]:
        return self._linears

    @torch.compiler.disable
    def forward(
        self, x: Tensor, tokens_per_expert: Sequence[int] | Tensor
    ) -> tuple[Tensor, list[Tensor] | None]:
        biases = [
            getattr(self, f"bias{e}") if self.use_bias else None for e in range(self.num_gemms)
        ]
        for e, (layer, bias) in enumerate(zip(self._linears, biases)):
            weight = self._weight_proxies[e].of(getattr(self, f"weight{e}"))
            layer.give(weight, None if self.skip_bias_add else bias)
            layer.training = self.training
        splits = (
            tokens_per_expert.tolist()
            if isinstance(tokens_per_expert, Tensor)
            else tokens_per_expert
        )
        return super().forward(x, splits), biases if self.use_bias and self.skip_bias_add else None

    backward_dw = _ParallelLinear.backward_dw
    get_extra_state = _ParallelLinear.get_extra_state
    set_extra_state = _ParallelLinear.set_extra_state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """The experts as `ShardedTensor`s of all ranks' experts, by the names of a layer an
        expert."""
        _need("sharded_state_dict")
        metadata, made = ensure_metadata_has_dp_cp_group(metadata), {}
        apart, groups = metadata.get("singleton_local_shards", False), self._groups
        first, everywhere = _rank(groups.ep) * self.num_gemms, _size(groups.ep) * self.num_gemms
        axes = {"weight": 1} if self._dim else {"weight": 0, "bias": 0}
        for e in range(self.num_gemms):
            own = {
                f"{e}.{kind}": getattr(self, f"{kind}{e}")
                for kind in ("weight", "bias")[: 1 + self.use_bias]
            }
            offsets = (
                sharded_offsets
                if apart
                else (*sharded_offsets, (len(sharded_offsets), first + e, everywhere))
            )
            found = make_sharded_tensors_for_checkpoint(
                own,
                "",
                {f"{e}.{k}": axis for k, axis in axes.items()},
                offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(
                found, f"{e}.", f"{first + e}.{prefix}" if apart else prefix
            )
            for key, tensor in found.items():
                tensor.replica_id = (*tensor.replica_id[:2], _rank(groups.expt_dp))
                made[f"{prefix}{key.removeprefix(f'{e}.')}{e}"] = tensor
        return made


class ColumnParallelGroupedLinear(_GroupedLinear):
    """W [N / R, K] of every expert; see `_GroupedLinear`."""

    _dim = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """W [N, K / R] of every expert; see `_GroupedLinear`."""

    _dim = 1


def weight_proxies(model: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, WeightProxy]]:
    """The weights of our layers in a model: parameter -> (its module, what products read in its
    place)."""
    found = {}
    for module in model.modules():
        if isinstance(module, _ParallelLinear):
            found[module.weight] = module, module._weight_proxy
        elif isinstance(module, _GroupedLinear):
            found |= {
                getattr(module, f"weight{e}"): (module, s)
                for e, s in enumerate(module._weight_proxies)
            }
    return found


# The backend #


class SpecProvider(BackendSpecProvider):
    """A backend for Megatron's specs: our linear layers, and norms, attention and activations of
    another backend.

    recipe:    of the layers; change it later with `fq.set_recipe(model, ...)`, per layer too.
    fallback:  the other backend (default: Megatron's `LocalSpecProvider`).
    """

    def __init__(self, recipe: Recipe | str, fallback: BackendSpecProvider | None = None):
        _need("SpecProvider")
        self.recipe = as_recipe(recipe, "SpecProvider", Recipe)
        self.fallback = LocalSpecProvider() if fallback is None else fallback

    def _class(self, cls: type) -> type:
        """A class, as specs want, whose layers have the recipe."""
        return type(
            cls.__name__,
            (cls,),
            {"_recipe_of_class": self.recipe, "__doc__": cls.__doc__, "__module__": cls.__module__},
        )

    def linear(self) -> type:
        raise NotImplementedError(
            "a linear layer that every tensor-parallel rank holds whole is not here; use a column "
            "layer"
        )

    def column_parallel_linear(self) -> type:
        return self._class(ColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        return self._class(RowParallelLinear)

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        return self.fallback.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)

    def core_attention(self) -> type:
        return self.fallback.core_attention()

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        if moe_use_grouped_gemm:
            made = GroupedMLPSubmodules(
                linear_fc1=self._class(ColumnParallelGroupedLinear),
                linear_fc2=self._class(RowParallelGroupedLinear),
                activation_func=self.activation_func(),
            )
            return partial(TEGroupedMLP, submodules=made)
        made = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(),
            linear_fc2=self.row_parallel_linear(),
            activation_func=self.activation_func(),
        )
        return partial(SequentialMLP, submodules=made)

    def activation_func(self):
        return self.fallback.activation_func()


def gpt_layer_spec(
    recipe: Recipe | str,
    *,
    rms_norm: bool = True,
    qk_layernorm: bool = False,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fallback=None,
):
    """The `ModuleSpec` of a GPT layer whose linear layers are ours: qkv, projection, and the MLP or
    its experts; for `--spec`.

    Arguments: as of `get_gpt_layer_local_spec`; recipe, fallback: of `SpecProvider`.
    """
    backend = SpecProvider(recipe, fallback)
    norm = backend.layer_norm(rms_norm=rms_norm, has_residual=True)
    qk_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True) if qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = get_mlp_module_spec_for_backend(
        backend=backend, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={  # where every backend's checkpoints have the norms
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


# Arguments #

_OPTION = "--fsdp-quant-recipe"


def arguments(recipe: Recipe | str, *, gathers_codes: bool = False) -> list[str]:
    """What Megatron's command line says for layers of this recipe: its own flags, and the recipe
    (`add_arguments`).

    gathers_codes:  for `megatron_gather.gather_codes` too.
    Raises ValueError for a recipe that is not written with names and numbers; give that to
    `gpt_layer_spec` in Python.
    """
    recipe = as_recipe(recipe, "arguments", Recipe)
    own = ["--transformer-impl", "local", "--bf16", "--no-gradient-accumulation-fusion"]
    own += (
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if gathers_codes
        else []
    )
    given = dict(recipe.arguments)
    if recipe.name != "hybrid":
        given = {k: v for k, v in given.items() if k not in ("forward", "backward")}
    if "delayed" in given:
        given |= vars(given.pop("delayed"))
    given |= {
        f.name: getattr(recipe, f.name)
        for f in fields(recipe)[3:]
        if getattr(recipe, f.name) != f.default
    }
    written = [recipe.name, *(f"{k}={v}" for k, v in given.items())]
    try:
        same = _recipe(written) == recipe
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ValueError(
            f"{recipe!r} cannot be written as arguments; pass it to gpt_layer_spec in a file for "
            "--spec"
        )
    return [*own, _OPTION, *written]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`--fsdp-quant-recipe NAME key=value ...`, for Megatron's `extra_args_provider`; read by
    `recipe_of`."""
    parser.add_argument(_OPTION, nargs="+", default=["identity"], metavar=("NAME", "KEY=VALUE"))
    return parser


def recipe_of(args) -> Recipe:
    """The recipe of parsed arguments. Raises ValueError for names that no recipe has."""
    return _recipe(args.fsdp_quant_recipe)


def _recipe(written: Sequence[str]) -> Recipe:
    name, options = written[0], dict(pair.split("=", 1) for pair in written[1:])
    made = recipes.hybrid if name == "hybrid" else partial(recipes.by_name, name)
    return made(**{key: _value(text) for key, text in options.items()})


def _value(text: str) -> object:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

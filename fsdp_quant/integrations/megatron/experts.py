# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Grouped linear layers of this rank's experts, as Megatron's `TEGroupedMLP` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none
from torch import Tensor, nn

from ...linear.grouped_linear import GroupedLinear
from ...linear.linear import EXPERT, Expert, Linear
from ...recipe import Recipe
from .config import check_config
from .linear import ParallelLinear, TakesWgrad, WeightProxy, layer_name, layer_recipe


class _GroupedLinear(TakesWgrad, GroupedLinear):
    """Megatron's grouped linear layer over `weight0`, `weight1`, .. of this rank's experts,
    (y, biases) = layer(x, tokens per expert).

    x [M, K], rows sorted by expert; y [M, N]. With expert tensor parallelism each rank holds a part
    of every expert, and the dispatcher sums.

    Raises ValueError for options and fields of `config` that are not honoured.
    """

    _dim: int
    _layer: Callable[..., nn.Module]  # Megatron's, of one expert: allocates its parameters
    _linears: list[Expert]
    class_recipe: Recipe | None = None

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        recipe: Recipe | str | None = None,
    ):
        nn.Module.__init__(self)
        name = layer_name(self, name)
        check_config(config, name)
        if not is_expert:
            raise ValueError(
                f"{name}: is_expert=False; wanted True, because a grouped layer is of experts"
            )
        recipe = layer_recipe(name, recipe or self.class_recipe)
        group = get_tensor_model_parallel_group_if_none(
            getattr(pg_collection, "expt_tp", None), is_expert=True
        )
        if bias and self._dim and get_pg_size(group) > 1:
            raise ValueError(
                f"{name}: bias=True of a row layer whose experts are cut: every rank would add it; "
                "leave it out"
            )
        self.config = config
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.skip_bias_add = skip_bias_add
        self._groups = pg_collection
        self.tp_group = group
        self._linears, self._weight_proxies, self.packed = [], [], True
        options = {"bias": bias, "skip_bias_add": True, "is_expert": True, "tp_group": group}
        if self._dim:
            options["input_is_parallel"] = True
        for e in range(num_gemms):
            template: Any = self._layer(
                input_size, output_size, config=config, init_method=init_method, **options
            )
            self.register_parameter(f"weight{e}", template.weight)
            if bias:
                vars(template.bias).pop("sequence_parallel", None)  # each expert has all its rows
                self.register_parameter(f"bias{e}", template.bias)
            layer = Expert(template.weight.detach(), recipe, f"{name}.{e}", EXPERT)
            self._linears.append(layer)
            self._weight_proxies.append(WeightProxy(layer._weight_state))
        self.in_features = self._linears[0].in_features
        self.out_features = self._linears[0].out_features
        self.finish_experts(name)
        self.take_wgrad(config, *self._weights())
        self.register_load_state_dict_pre_hook(_ignore_extra_state)

    @property
    def owners(self) -> Sequence[Linear]:
        return self._linears

    def _weights(self) -> list[nn.Parameter]:
        return [getattr(self, f"weight{e}") for e in range(self.num_gemms)]

    @torch.compiler.disable
    def forward(
        self, x: Tensor, m_splits: Sequence[int] | Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None]:
        biases = [getattr(self, f"bias{e}", None) for e in range(self.num_gemms)]
        experts = zip(self._linears, self._weight_proxies, self._weights(), biases)
        for layer, proxy, weight, bias in experts:
            layer.give(proxy.read(weight), None if self.skip_bias_add else bias, weight)
            layer.training = self.training
        if isinstance(m_splits, Tensor):
            m_splits = m_splits.tolist()
        y = super().forward(x, m_splits)
        return y, biases if self.use_bias and self.skip_bias_add else None

    get_extra_state = layers.ColumnParallelLinear.get_extra_state
    set_extra_state = layers.ColumnParallelLinear.set_extra_state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return the experts as `ShardedTensor`s of all ranks' experts, named like one layer per
        expert."""
        settings, tensors = ensure_metadata_has_dp_cp_group(metadata), {}
        is_singleton, groups = settings.get("singleton_local_shards", False), self._groups
        first = get_pg_rank(groups.ep) * self.num_gemms
        num_experts = get_pg_size(groups.ep) * self.num_gemms
        axes = {"weight": 1} if self._dim else {"weight": 0, "bias": 0}
        state = self.state_dict(keep_vars=True)  # whose hooks refuse stale values
        for e in range(self.num_gemms):
            names = {f"{e}._extra_state": "_extra_state"}  # which Megatron's layers ask for
            names |= {f"{e}.{kind}": f"{kind}{e}" for kind in ("weight", "bias")}
            parameters = {key: state[name] for key, name in names.items() if name in state}
            place = [] if is_singleton else [(len(sharded_offsets), first + e, num_experts)]
            sharded = make_sharded_tensors_for_checkpoint(
                parameters,
                "",
                {f"{e}.{kind}": axis for kind, axis in axes.items()},
                (*sharded_offsets, *place),
                tp_group=self.tp_group,
                dp_cp_group=settings["dp_cp_group"],
            )
            replace_prefix_for_sharding(
                sharded, f"{e}.", f"{first + e}.{prefix}" if is_singleton else prefix
            )
            for key, tensor in sharded.items():
                tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(groups.expt_dp))
                tensors[f"{prefix}{key.removeprefix(f'{e}.')}{e}"] = tensor
        return tensors


def _ignore_extra_state(module: _GroupedLinear, state_dict: dict, prefix: str, *_) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")
    for e in range(module.num_gemms):
        state_dict.pop(f"{prefix}_extra_state{e}", None)


class ColumnParallelGroupedLinear(_GroupedLinear):
    """W [N / R, K] of every expert; see `_GroupedLinear`."""

    _dim = 0
    _layer = layers.ColumnParallelLinear


class RowParallelGroupedLinear(_GroupedLinear):
    """W [N, K / R] of every expert; see `_GroupedLinear`."""

    _dim = 1
    _layer = layers.RowParallelLinear


def weight_proxies(model: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, WeightProxy]]:
    """Return the weights of these layers in a model: parameter -> (its module, its proxy)."""
    proxies: dict[nn.Parameter, tuple[nn.Module, WeightProxy]] = {}
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            proxies[module.weight] = module, module._weight_proxy
        elif isinstance(module, _GroupedLinear):
            for weight, proxy in zip(module._weights(), module._weight_proxies):
                proxies[weight] = module, proxy
    return proxies

# SPDX-License-Identifier: Apache-2.0
"""Grouped linear layers of this rank's experts, as Megatron's `TEGroupedMLP` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...modules.grouped_linear import EXPERT, Expert, GroupedLinear
from ...modules.linear import Linear
from ...recipe import Recipe
from . import core, weights
from .config import check_arguments, check_config
from .linear import ParallelLinear


class _GroupedLinear(GroupedLinear):
    """Megatron's grouped linear layer over `weight0`, `weight1`, .. of this rank's experts,
    (y, biases) = layer(x, tokens per expert).

    x [M, K], rows sorted by expert; y [M, N]. With expert tensor parallelism each rank holds a part
    of every expert, and the dispatcher sums.

    Raises ValueError for arguments and fields of `config` that are not honoured.
    """

    _dim: int
    _linears: list[Expert]
    _weight_proxies: list[weights.WeightProxy]
    _recipe_of_class: Recipe | None = None

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
        recipe: Recipe | None = None,
    ):
        nn.Module.__init__(self)
        name = name or f"{type(self).__name__}.{next(weights.SERIAL)}"
        check_config(config, name)
        check_arguments(name, {"is_expert": (is_expert, True, "a grouped layer is of experts")})
        recipe = weights.layer_recipe(name, recipe, self._recipe_of_class)
        group = weights.tensor_group_of(getattr(pg_collection, "expt_tp", None), config, True)
        if bias and self._dim and weights.size_of(group) > 1:
            raise ValueError(
                f"{name}: bias=True of a row layer whose experts are cut: every rank would add it; "
                "leave it out"
            )
        size = ("input_size", input_size) if self._dim else ("output_size", output_size)
        weights.check_divides(name, *size, weights.size_of(group))
        self.config = config
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.skip_bias_add = skip_bias_add
        self._groups = pg_collection
        self.tp_group = group
        expert_groups = weights.uses_expert_groups(config, True)
        self._linears, self._weight_proxies, self.packed = [], [], True
        for e in range(num_gemms):
            weight = weights.new_weight(
                config, init_method, (output_size, input_size), self._dim, 1, group, True
            )
            weights.mark(weight, self._dim, 1, expert_groups)
            self.register_parameter(f"weight{e}", weight)
            if bias:
                self.register_parameter(f"bias{e}", weights.new_bias(config, weight.shape[0]))
                weights.mark(getattr(self, f"bias{e}"), None if self._dim else 0, 1, expert_groups)
            layer = Expert(weight.detach(), recipe, f"{name}.{e}", EXPERT)
            self._linears.append(layer)
            self._weight_proxies.append(weights.WeightProxy(layer._weight_state))
        self.in_features = self._linears[0].in_features
        self.out_features = self._linears[0].out_features
        self.finish_experts(name)
        self.register_load_state_dict_pre_hook(weights.ignore_extra_state)

    @property
    def layers(self) -> Sequence[Linear]:
        return self._linears

    @property
    def owners(self) -> Sequence[Linear]:
        return self._linears

    @torch.compiler.disable
    def forward(
        self, x: Tensor, m_splits: Sequence[int] | Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None]:
        biases = [
            getattr(self, f"bias{e}") if self.use_bias else None for e in range(self.num_gemms)
        ]
        for e, (layer, bias) in enumerate(zip(self._linears, biases)):
            weight = self._weight_proxies[e].of(getattr(self, f"weight{e}"))
            layer.give(weight, None if self.skip_bias_add else bias)
            layer.training = self.training
        if isinstance(m_splits, Tensor):
            m_splits = m_splits.tolist()
        y = super().forward(x, m_splits)
        return y, biases if self.use_bias and self.skip_bias_add else None

    backward_dw = ParallelLinear.backward_dw
    get_extra_state = ParallelLinear.get_extra_state
    set_extra_state = ParallelLinear.set_extra_state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """The experts as `ShardedTensor`s of all ranks' experts, named like one layer per
        expert."""
        core.need("sharded_state_dict")
        settings, tensors = core.ensure_metadata_has_dp_cp_group(metadata), {}
        apart, groups = settings.get("singleton_local_shards", False), self._groups
        first = weights.rank_of(groups.ep) * self.num_gemms
        everywhere = weights.size_of(groups.ep) * self.num_gemms
        axes = {"weight": 1} if self._dim else {"weight": 0, "bias": 0}
        for e in range(self.num_gemms):
            own = {
                f"{e}.{kind}": getattr(self, f"{kind}{e}")
                for kind in ("weight", "bias")[: 1 + self.use_bias]
            }
            place = len(sharded_offsets), first + e, everywhere
            offsets = sharded_offsets if apart else (*sharded_offsets, place)
            found = core.make_sharded_tensors_for_checkpoint(
                own,
                "",
                {f"{e}.{k}": axis for k, axis in axes.items()},
                offsets,
                tp_group=self.tp_group,
                dp_cp_group=settings["dp_cp_group"],
            )
            core.replace_prefix_for_sharding(
                found, f"{e}.", f"{first + e}.{prefix}" if apart else prefix
            )
            for key, tensor in found.items():
                tensor.replica_id = (*tensor.replica_id[:2], weights.rank_of(groups.expt_dp))
                tensors[f"{prefix}{key.removeprefix(f'{e}.')}{e}"] = tensor
        return tensors


class ColumnParallelGroupedLinear(_GroupedLinear):
    """W [N / R, K] of every expert; see `_GroupedLinear`."""

    _dim = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """W [N, K / R] of every expert; see `_GroupedLinear`."""

    _dim = 1


def weight_proxies(model: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, weights.WeightProxy]]:
    """The weights of these layers in a model: parameter -> (its module, its proxy)."""
    found = {}
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            found[module.weight] = module, module._weight_proxy
        elif isinstance(module, _GroupedLinear):
            found |= {
                getattr(module, f"weight{e}"): (module, s)
                for e, s in enumerate(module._weight_proxies)
            }
    return found

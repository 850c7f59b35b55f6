# SPDX-License-Identifier: Apache-2.0
"""Import it before `fsdp_quant.integrations.megatron`: what that integration imports of
megatron.core, written here from Megatron's documented behaviour, in place of a checkout.

`dist_tests.contract.megatron` compares with Megatron's own.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn


def get_pg_size(group=None) -> int:
    return 1 if group is None else group.size()


def get_pg_rank(group=None) -> int:
    return 0 if group is None else group.rank()


class _LastDim(torch.autograd.Function):
    """gathers: [.., N / R] of every rank -> [.., N]; else the opposite, which is the backward."""

    @staticmethod
    def forward(ctx, x, group, gathers):
        ctx.group, ctx.gathers = group, gathers
        if get_pg_size(group) == 1:
            return x.view_as(x)
        if not gathers:
            return x.chunk(group.size(), -1)[group.rank()].contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, dy):
        return _LastDim.apply(dy, ctx.group, not ctx.gathers), None, None


def scatter_to_tensor_model_parallel_region(x: Tensor, group=None) -> Tensor:
    return _LastDim.apply(x, group, False)


class _ParallelLinear(nn.Module):
    """What both layers of `megatron.core.tensor_parallel.layers` do to parameters."""

    dim: int

    def __init__(self, input_size, output_size, *, config, init_method, bias, **options):
        super().__init__()
        self.input_size, self.output_size, self.config = input_size, output_size, config
        self.skip_bias_add = options.get("skip_bias_add", False)
        self.is_expert, self.tp_group = options.get("is_expert", False), options.get("tp_group")
        ranks, rank = get_pg_size(self.tp_group), get_pg_rank(self.tp_group)
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.explicit_expert_comm = self.is_expert and (ranks > 1 or self.expert_parallel)
        self.sequence_parallel = config.sequence_parallel and ranks > 1
        shape, stride = [output_size, input_size], options.get("stride", 1)
        assert shape[self.dim] % ranks == 0, f"{shape[self.dim]} is not divisible by {ranks}"
        values = torch.empty(shape)
        if config.perform_initialization:
            init_method(values)
        pieces = values.to(config.params_dtype).chunk(ranks * stride, self.dim)[rank::ranks]
        self.weight = nn.Parameter(torch.cat(pieces, self.dim))
        self.bias = None
        if bias:
            size = output_size // ranks if self.dim == 0 else output_size
            self.bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.allreduce = not (self.is_expert and self.expert_parallel)
                if parameter is self.weight or self.dim == 0:
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim, parameter.partition_stride = self.dim, stride
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: state.setdefault(f"{prefix}_extra_state")
        )

    def get_extra_state(self) -> None:
        """Megatron's layers save none."""

    def set_extra_state(self, state) -> None:
        """Ignored."""


class ColumnParallelLinear(_ParallelLinear):
    dim = 0

    def __init__(self, input_size, output_size, *, bias=True, gather_output=False, **options):
        super().__init__(input_size, output_size, bias=bias, **options)
        self.gather_output = gather_output
        self.output_size_per_partition = self.weight.shape[0]

    def forward(self, input_, weight=None, runtime_gather_output=None):
        bias = None if self.skip_bias_add else self.bias
        weight = self.weight if weight is None else weight
        y = self._forward_impl(input=input_, weight=weight, bias=bias, tp_group=self.tp_group)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = _LastDim.apply(y, self.tp_group, True)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ParallelLinear):
    dim = 1

    def __init__(self, input_size, output_size, *, input_is_parallel, **options):
        super().__init__(input_size, output_size, **options)
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = self.weight.shape[1]
        if self.bias is not None:
            self.bias.sequence_parallel = self.config.sequence_parallel


def _missing(*_, **__):
    raise NotImplementedError("distributed checkpoints need Megatron's own")


CONTENTS = {
    "tensor_parallel.layers": {
        "ColumnParallelLinear": ColumnParallelLinear,
        "RowParallelLinear": RowParallelLinear,
    },
    "tensor_parallel.mappings": {
        "scatter_to_tensor_model_parallel_region": scatter_to_tensor_model_parallel_region
    },
    "utils": {
        "get_pg_rank": get_pg_rank,
        "get_pg_size": get_pg_size,
        "get_tensor_model_parallel_group_if_none": lambda group, is_expert=False: group,
    },
    "dist_checkpointing.utils": {"replace_prefix_for_sharding": _missing},
    "transformer.utils": {
        "ensure_metadata_has_dp_cp_group": _missing,
        "make_sharded_tensors_for_checkpoint": _missing,
    },
}

for _path, _names in CONTENTS.items():
    _name = "megatron"
    for _part in ("core", *_path.split(".")):
        _parent = sys.modules.setdefault(_name, ModuleType(_name))
        _name = f"{_name}.{_part}"
        setattr(_parent, _part, sys.modules.setdefault(_name, ModuleType(_name)))
    vars(sys.modules[_name]).update(_names)

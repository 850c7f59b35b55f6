# SPDX-License-Identifier: Apache-2.0
"""Parameters as Megatron keeps them: cut over ranks, initialized and marked as by its own
layers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...recipe import Recipe, as_recipe, identity
from ...tensor.quantized_tensor import QuantizedTensor
from ...tensor.quantized_weight import QuantizedWeight
from ...tensor.weight_state import WeightState
from . import core


class _PassGradient(torch.autograd.Function):
    """Returns the synced weight; its gradient goes to the parameter."""

    @staticmethod
    def forward(ctx, parameter: Tensor, synced: list[Tensor]) -> Tensor:
        return synced[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


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

    def of(self, parameter: Tensor) -> Tensor:
        """The weight to multiply; autograd sends its gradient to the parameter."""
        if self.synced is None:
            if isinstance(parameter, QuantizedTensor):
                raise NotImplementedError(
                    f"{self.state.name} is gathered by fully_shard, with which Megatron's layers "
                    "were not tested; leave --use-torch-fsdp2 out, or build the model of fq.Linear"
                )
            return parameter
        weight = self.synced.detach()
        if torch.is_grad_enabled() and parameter.requires_grad:
            return _PassGradient.apply(parameter, [weight])
        return weight


SERIAL = itertools.count()


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def tensor_ranks(config: Any, is_expert: bool) -> int:
    ranks = config.tensor_model_parallel_size
    return getattr(config, "expert_tensor_parallel_size", None) or ranks if is_expert else ranks


def tensor_group_of(
    group: dist.ProcessGroup | None, config: Any, is_expert: bool
) -> dist.ProcessGroup | None:
    """The ranks that share a layer: the given group, or Megatron's; None in a single process."""
    if (
        group is not None
        or not dist.is_initialized()
        or (core.is_missing() and tensor_ranks(config, is_expert) == 1)
    ):
        return group
    core.need("a layer without tp_group")
    return core.get_tensor_model_parallel_group_if_none(None, is_expert=is_expert)


def uses_expert_groups(config: Any, is_expert: bool) -> bool:
    is_other = tensor_ranks(config, True) != tensor_ranks(config, False)
    return is_expert and (config.expert_model_parallel_size > 1 or is_other)


def check_divides(name: str, what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(
            f"{name}: {what}={size} is cut over {ranks} ranks, which do not divide it; choose a "
            f"multiple of {ranks}"
        )
    return size // ranks


def new_weight(
    config: Any,
    init_method: Callable,
    shape: tuple[int, int],
    dim: int,
    stride: int,
    group: dist.ProcessGroup | None,
    is_expert: bool,
) -> nn.Parameter:
    """This rank's part of a weight [N, K], cut along `dim`, with the values and random state of
    Megatron's own layers.

    On the CPU (use_cpu_initialization) every rank initializes the whole weight and keeps its part,
    `stride` chunks.
    """
    rank, ranks = rank_of(group), size_of(group)
    local = [size // ranks if d == dim else size for d, size in enumerate(shape)]
    if not config.use_cpu_initialization:
        weight = nn.Parameter(
            torch.empty(local, device=torch.cuda.current_device(), dtype=config.params_dtype)
        )
        if config.perform_initialization:
            core.need("the initialization of weights on a GPU")
            tracker = core.get_cuda_rng_tracker()
            names = [core.get_expert_parallel_rng_tracker_name()] if is_expert else []
            with tracker.fork(*names) if tracker.is_initialized() else contextlib.nullcontext():
                init_method(weight)
        return weight
    weight = nn.Parameter(torch.empty(local, dtype=config.params_dtype, device="cpu"))
    if config.perform_initialization:
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        init_method(whole)
        runs = whole.to(config.params_dtype).split(local[dim] // stride, dim)[rank::ranks]
        with torch.no_grad():
            weight.copy_(torch.cat(runs, dim))
    return weight


def new_bias(config: Any, size: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.zeros(size, device=device, dtype=config.params_dtype))


def mark(parameter: nn.Parameter, dim: int | None, stride: int, expert_groups: bool) -> None:
    """The attributes that Megatron's DDP, gradient norm and checkpoints read."""
    if dim is not None:
        vars(parameter).update(
            tensor_model_parallel=True, partition_dim=dim, partition_stride=stride
        )
    vars(parameter)["allreduce"] = not expert_groups


def layer_recipe(name: str, recipe: Recipe | str | None, of_class: Recipe | None) -> Recipe:
    chosen = as_recipe(recipe or of_class or identity(), name, Recipe)
    if chosen.tail:
        raise ValueError(
            f"{name}: a layer does not know whether it is one of the last, which {chosen!r} keeps "
            "in high precision; build the layers without tail, then call fq.set_recipe(model, "
            "recipe)"
        )
    return chosen


def ignore_extra_state(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")

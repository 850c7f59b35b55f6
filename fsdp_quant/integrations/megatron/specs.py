# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""`SpecProvider` and `gpt_layer_spec`: Megatron's specs with these linear layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP

from ...recipe import Recipe, as_recipe
from .experts import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from .linear import ColumnParallelLinear, RowParallelLinear


class SpecProvider(LocalSpecProvider):
    """A backend for Megatron's specs with these linear layers.

    recipe:    of the layers; `fq.set_recipe(model, ...)` changes it later, also per layer.
    fallback:  backend of norms, attention and activations (default: Megatron's
               `LocalSpecProvider`).
    """

    def __init__(self, recipe: Recipe | str, fallback: Any = None):
        self.recipe = as_recipe(recipe, "SpecProvider", Recipe)
        self.fallback = LocalSpecProvider() if fallback is None else fallback

    def _class(self, cls: type) -> type:
        """Return a subclass whose layers have the recipe."""
        members = {"__doc__": cls.__doc__, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), {"class_recipe": self.recipe, **members})

    def column_parallel_linear(self) -> type:
        return self._class(ColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        return self._class(RowParallelLinear)

    def layer_norm(self, **options):
        return self.fallback.layer_norm(**options)

    def core_attention(self) -> type:
        return self.fallback.core_attention()

    def activation_func(self):
        return self.fallback.activation_func()

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        column, row = self.column_parallel_linear(), self.row_parallel_linear()
        module, submodules = SequentialMLP, MLPSubmodules
        if moe_use_grouped_gemm:
            column = self._class(ColumnParallelGroupedLinear)
            row = self._class(RowParallelGroupedLinear)
            module, submodules = TEGroupedMLP, GroupedMLPSubmodules
        layers = submodules(
            linear_fc1=column, linear_fc2=row, activation_func=self.activation_func()
        )
        return partial(module, submodules=layers)


def gpt_layer_spec(
    recipe: Recipe | str,
    *,
    rms_norm: bool = True,
    qk_layernorm: bool = False,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fallback: Any = None,
):
    """Return the `ModuleSpec` of a GPT layer with these linear layers (qkv, projection, MLP or
    experts); for `--spec`.

    Arguments: as for `get_gpt_layer_local_spec`; recipe, fallback: as for `SpecProvider`.
    """
    backend = SpecProvider(recipe, fallback)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    norm = backend.layer_norm(rms_norm=rms_norm, has_residual=True)
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention.linear_qkv = backend.column_parallel_linear()
    attention.core_attention = backend.core_attention()
    attention.linear_proj = backend.row_parallel_linear()
    if qk_layernorm:
        qk_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True)
        attention.q_layernorm = attention.k_layernorm = qk_norm
    layer.mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=backend, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm
    )
    return spec

# SPDX-License-Identifier: Apache-2.0
"""`SpecProvider` and `gpt_layer_spec`: Megatron's specs with these linear layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...recipe import Recipe, as_recipe
from . import core
from .experts import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from .linear import ColumnParallelLinear, RowParallelLinear


class SpecProvider(core.BackendSpecProvider):
    """A backend for Megatron's specs with these linear layers.

    recipe:    of the layers; `fq.set_recipe(model, ...)` changes it later, also per layer.
    fallback:  backend of norms, attention and activations (default: Megatron's
               `LocalSpecProvider`).
    """

    def __init__(self, recipe: Recipe | str, fallback: Any = None):
        core.need("SpecProvider")
        self.recipe = as_recipe(recipe, "SpecProvider", Recipe)
        self.fallback = core.LocalSpecProvider() if fallback is None else fallback

    def _class(self, cls: type) -> type:
        """A subclass whose layers have the recipe."""
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
            submodules = core.GroupedMLPSubmodules(
                linear_fc1=self._class(ColumnParallelGroupedLinear),
                linear_fc2=self._class(RowParallelGroupedLinear),
                activation_func=self.activation_func(),
            )
            return partial(core.TEGroupedMLP, submodules=submodules)
        submodules = core.MLPSubmodules(
            linear_fc1=self.column_parallel_linear(),
            linear_fc2=self.row_parallel_linear(),
            activation_func=self.activation_func(),
        )
        return partial(core.SequentialMLP, submodules=submodules)

    def activation_func(self):
        return self.fallback.activation_func()


def gpt_layer_spec(
    recipe: Recipe | str,
    *,
    rms_norm: bool = True,
    qk_layernorm: bool = False,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fallback: Any = None,
):
    """The `ModuleSpec` of a GPT layer with these linear layers (qkv, projection, MLP or experts);
    for `--spec`.

    Arguments: as for `get_gpt_layer_local_spec`; recipe, fallback: as for `SpecProvider`.
    """
    backend = SpecProvider(recipe, fallback)
    norm = backend.layer_norm(rms_norm=rms_norm, has_residual=True)
    qk_norm = (
        backend.layer_norm(rms_norm=rms_norm, for_qk=True) if qk_layernorm else core.IdentityOp
    )
    attention = core.ModuleSpec(
        module=core.SelfAttention,
        params={"attn_mask_type": core.AttnMaskType.causal},
        submodules=core.SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = core.get_mlp_module_spec_for_backend(
        backend=backend, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm
    )
    return core.ModuleSpec(
        module=core.TransformerLayer,
        submodules=core.TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=core.get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=core.get_bias_dropout_add,
            sharded_state_dict_keys_map={  # where every backend's checkpoints have the norms
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )

# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Names of Megatron-LM that these layers use. Importing it needs no Megatron: see `need`."""

from __future__ import annotations

# ruff: noqa: F401

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
    _missing, BackendSpecProvider = error, object
else:
    _missing = None


def is_missing() -> bool:
    return _missing is not None


def need(what: str) -> None:
    """Raise ImportError, saying why Megatron could not be imported, if it could not."""
    if _missing is not None:
        raise ImportError(
            f"{what} needs Megatron-LM (megatron.core, and what it imports itself), which could "
            f"not be imported: {_missing}; put the checkout on PYTHONPATH"
        ) from _missing

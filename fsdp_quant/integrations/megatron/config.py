# SPDX-License-Identifier: Apache-2.0
"""Settings of Megatron that these layers and gathers honour; every other value is refused by
name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_OUR_FORMATS = "formats come from the recipe: leave it out"
_OUR_WGRAD = "the backward computes gradients of weights: leave it out"
_UNTESTED = "it was not tested with these layers: leave it out"
# Field of the config -> (values that these layers honour, what to do about others). A field that a
# config lacks is fine.
HONOURED: dict[str, tuple[tuple, str]] = {
    "fp8": ((None, False), _OUR_FORMATS),
    "fp4": ((None, False), _OUR_FORMATS),
    "quant_recipe": ((None,), _OUR_FORMATS),
    "use_kitchen": ((False,), _OUR_FORMATS),
    "fp16": (
        (False,),
        "the recipe's statistics do not see that the loss scaler skips a step: train in bf16",
    ),
    "overlap_dispatch_backward_with_experts_wgrad": ((False,), _OUR_WGRAD),
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
# Options of a layer, alike.
_OPTIONS: dict[str, tuple[tuple, str]] = {
    "keep_master_weight_for_test": ((False,), "no second copy of a weight is kept"),
    "skip_weight_param_allocation": (
        (False,),
        "a weight has one recipe, that of its own layer: use Megatron's layer where weights are "
        "shared",
    ),
    "embedding_activation_buffer": ((None,), _OUR_WGRAD),
    "grad_output_buffer": ((None,), _OUR_WGRAD),
}


def check_config(config: Any, name: str = "config") -> None:
    """Raise ValueError for the first field of a TransformerConfig that layers do not honour."""
    check_fields({f: getattr(config, f) for f in HONOURED if hasattr(config, f)}, HONOURED, name)


def check_options(options: Mapping[str, Any], dtype: torch.dtype, name: str) -> None:
    """Raise ValueError for the first option of a layer of `dtype` that layers do not honour."""
    honoured = _OPTIONS | {"output_dtype": ((dtype, None), "y has the input's dtype")}
    check_fields(options, honoured, name)


def check_fields(
    values: Mapping[str, Any], honoured: Mapping[str, tuple[tuple, str]], name: str
) -> None:
    for field, (accepted, remedy) in honoured.items():
        value = values.get(field, accepted[0])
        if value not in accepted:
            raise ValueError(
                f"{name}: {field}={value!r}; wanted {' or '.join(map(repr, accepted))}, because "
                f"{remedy}"
            )

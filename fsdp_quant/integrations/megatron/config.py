# SPDX-License-Identifier: Apache-2.0
"""Settings of Megatron that these layers honour; every other value is refused by name."""

from __future__ import annotations

from typing import Any

_OUR_FORMATS = "formats come from the recipe: leave it out"
_UNTESTED = "it was not tested with these layers: leave it out"
# Field of the config -> (values that these layers honour, what to do about others). A field that a
# config lacks is fine.
HONOURED: dict[str, tuple[tuple, str]] = {
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
        "the recipe's statistics do not see that the loss scaler skips a step: train in bf16",
    ),
    "delay_wgrad_compute": ((False,), "the backward computes gradients of weights: leave it out"),
    "overlap_dispatch_backward_with_experts_wgrad": (
        (False,),
        "the backward computes gradients of weights: leave it out",
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


def check_config(config: Any, name: str = "config") -> None:
    """Raise ValueError for the first field of a TransformerConfig that these layers do not
    honour."""
    for field, (honoured, remedy) in HONOURED.items():
        value = getattr(config, field, honoured[0])
        if value not in honoured:
            raise ValueError(
                f"{name}: {field}={value!r}; wanted {' or '.join(map(repr, honoured))}, because "
                f"{remedy}"
            )


def check_arguments(name: str, wanted: dict[str, tuple[object, object, str]]) -> None:
    for argument, (got, want, remedy) in wanted.items():
        if got is not want and got != want:
            raise ValueError(f"{name}: {argument}={got!r}; wanted {want!r}, because {remedy}")

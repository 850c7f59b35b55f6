# SPDX-License-Identifier: Apache-2.0
"""Layers that inference servers multiply as one: what they must have in common.

[Note: merged layers]
Servers stack the rows of layers that read one input, and multiply them with one format and, of
nvfp4, one second-level scale. They merge layers by name; a file whose merged layers differ is
refused by the server, or decoded by the scale of one of them. The experts of a layer are one
grouped GEMM, so they have one format; scales are per expert, merged as `w1` and `w3`.

Sources: `packed_modules_mapping` and `stacked_params_mapping` of vLLM's and SGLang's models,
`params_map` of TensorRT-LLM's modeling_utils.py (the tests list them by class).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Last parts of the names of layers that are merged where a module has all of them; the first line
# that holds decides for a layer, so larger ones come first.
MERGED = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),
    ("k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("wq", "wk", "wv"),
    ("wq_a", "wkv"),
    ("wkv", "wgate"),
    ("wk", "weights_proj"),
    ("q", "k", "v"),
    ("w1", "w3"),
    ("w1", "w2"),
    ("gate", "up"),
    ("fc11", "fc12"),
    ("c_fc_0", "c_fc_1"),
)
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+(?=\.|$))?")


def merged_layers(columns: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The groups of layers that servers multiply as one.

    columns:  K of each weight [N, K], by the layer's name in the checkpoint. Layers of other inputs
              are not merged.
    """
    groups, merged = [], set()
    for line in MERGED:
        for name in columns:
            prefix = name.removesuffix(line[0])
            group = tuple(prefix + part for part in line)
            if (
                prefix + line[0] == name
                and (not prefix or prefix.endswith("."))
                and all(layer in columns and layer not in merged for layer in group)
                and len({columns[layer] for layer in group}) == 1
            ):
                groups.append(group)
                merged.update(group)
    return groups


def expert_layers(shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, ...]]:
    """The numbered or packed weights of each module of experts: "experts.0.w1", "experts.w1".

    shapes:  of weights, by the layer's name in the checkpoint.
    """
    groups: dict[str, list[str]] = {}
    for layer, shape in shapes.items():
        expert = _EXPERT.match(layer)
        if expert and (expert[2] or len(shape) == 3):
            groups.setdefault(expert[1], []).append(layer)
    return [tuple(group) for group in groups.values()]

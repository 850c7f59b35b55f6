# SPDX-License-Identifier: Apache-2.0
"""`skip="auto"` of `fq.convert`: layers that gain nothing from codes, or lose too much by them.

    output head   its last rounding is the loss's; a module named as in `HEADS`, or of an
                  embedding's size, outside of numbered blocks
    router        a small error sends a token to another expert; "router" in its name, or a gate
                  next to "experts"
    tied          another module reads the weight in high precision
    too small     fewer than `SMALLEST` features on a side, or no multiple of 16: kernels work on
                  tiles of 128 x 128 and tensor cores on 16 values, so quantizing costs more than
                  the product saves

The rules read names and shapes, never values, so that all ranks skip the same layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

AUTO = "auto"
HEADS = frozenset(
    {"lm_head", "head", "output", "output_layer", "embed_out", "unembed", "classifier", "score"}
)
GATES = frozenset({"gate", "wg", "shared_expert_gate"})
SMALLEST, MULTIPLE = 128, 16


def auto_skips(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name -> reason of each layer that stays in high precision.

    layers:  by qualified name; the rules are of nn.Linear alone.
    """
    layers = {n: m for n, m in layers.items() if isinstance(m, nn.Linear)}
    embeddings = {
        (e.num_embeddings, e.embedding_dim) for e in model.modules() if isinstance(e, nn.Embedding)
    }
    ours = {id(m) for m in layers.values()}
    elsewhere = {
        id(p) for m in model.modules() if id(m) not in ours for p in m._parameters.values()
    }
    found = {}
    for name, layer in layers.items():
        parts, shape = name.split("."), (layer.out_features, layer.in_features)
        is_numbered = any(part.isdigit() for part in parts)
        siblings = model.get_submodule(name.rpartition(".")[0])._modules
        if id(layer.weight) in elsewhere:
            found[name] = "tied"
        elif not is_numbered and (HEADS.intersection(parts) or shape in embeddings):
            found[name] = "output head"
        elif "router" in parts or (parts[-1] in GATES and "experts" in siblings):
            found[name] = "router"
        elif min(shape) < SMALLEST or any(size % MULTIPLE for size in shape):
            found[name] = f"too small, {list(shape)}"
    return found

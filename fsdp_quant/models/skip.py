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

`read_by_others`: layers that are left out unasked, because products of theirs would not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

AUTO = "auto"
HEADS = frozenset(
    {"lm_head", "head", "output", "output_layer", "embed_out", "unembed", "classifier", "score"}
)
GATES = frozenset({"gate", "wg", "shared_expert_gate"})
SMALLEST, MULTIPLE = 128, 16

# Layers whose weights the forward of another module multiplies, by that module's class in
# transformers. Their own forward does not run: in Mamba 2 not where its kernels are installed.
_STATE_SPACE = ("x_proj", "dt_proj", "out_proj")
_READ = {
    "MambaMixer": _STATE_SPACE,
    "FalconMambaMixer": _STATE_SPACE,
    "JambaMambaMixer": ("dt_proj",),
    "Mamba2Mixer": ("out_proj",),
    "BambaMixer": ("out_proj",),
    "FalconH1Mixer": ("out_proj",),
    "GraniteMoeHybridMambaLayer": ("out_proj",),
    "NemotronHMamba2Mixer": ("out_proj",),
    "Zamba2MambaMixer": ("out_proj",),
    "Gemma3nTextAltUp": ("prediction_coefs", "correction_coefs"),
    "LongcatFlashTopkRouter": ("classifier",),
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "TDNNLayer": ("kernel",),
    "MobileBertLMPredictionHead": ("dense", "decoder"),
    "DetrMHAttentionMap": ("k_proj",),
    "ConditionalDetrMHAttentionMap": ("k_proj",),
    "MaskFormerDetrMHAttentionMap": ("k_proj",),
    "DabDetrMHAttentionMap": ("k_linear",),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
}


# Packages whose losses multiply hidden states by the weight of the head: their forward of a model
# replaces the model's own, in the class or in the instance.
_LOSSES = "trl", "liger_kernel", "cut_cross_entropy"


def read_by_others(model: nn.Module) -> dict[str, str]:
    """Return name -> reason of each layer whose weight is multiplied by another module of `_READ`,
    or by a loss of `_LOSSES`."""
    reasons, names = {}, {m: n for n, m in model.named_modules()}
    for name, module in model.named_modules():
        forward = getattr(module.forward, "__func__", module.forward)  # whatever it wraps
        loss = getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0]
        if loss in _LOSSES and hasattr(module, "get_output_embeddings"):
            head = getattr(module, "get_output_embeddings")()
            head = getattr(head, "base_layer", head)  # of PEFT
            if head in names:
                reasons[names[head]] = f"read by the loss of {loss}"
        cls = next((c for c in type(module).__mro__ if c.__name__ in _READ), None)
        if cls is not None and cls.__module__.startswith("transformers."):
            for part in _READ[cls.__name__]:
                if (layer := module._modules.get(part)) is not None:
                    base = ".base_layer" * ("base_layer" in layer._modules)  # of PEFT
                    reasons[f"{name}.{part}{base}".lstrip(".")] = f"read by {cls.__name__}"
    return reasons


def auto_skips(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return name -> reason of each layer that stays in high precision.

    layers:  by qualified name; the rules are of nn.Linear alone.
    """
    layers = {n: m for n, m in layers.items() if isinstance(m, nn.Linear)}
    embeddings = {
        (e.num_embeddings, e.embedding_dim) for e in model.modules() if isinstance(e, nn.Embedding)
    }
    multiplied = {id(m) for m in layers.values()}
    elsewhere = {
        id(p) for m in model.modules() if id(m) not in multiplied for p in m._parameters.values()
    }
    reasons = {}
    for name, layer in layers.items():
        parts, shape = name.split("."), (layer.out_features, layer.in_features)
        is_numbered = any(part.isdigit() for part in parts)
        is_head = not HEADS.isdisjoint(parts) or shape in embeddings
        siblings = model.get_submodule(name.rpartition(".")[0])._modules
        if id(layer.weight) in elsewhere:
            reasons[name] = "tied"
        elif is_head and not is_numbered:
            reasons[name] = "output head"
        elif "router" in parts or (parts[-1] in GATES and "experts" in siblings):
            reasons[name] = "router"
        elif min(shape) < SMALLEST or math.gcd(MULTIPLE, *shape) < MULTIPLE:
            reasons[name] = f"too small, {list(shape)}"
    return reasons

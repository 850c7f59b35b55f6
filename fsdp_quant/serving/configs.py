# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint's JSON says that layers are quantized: `quantization_config` of each target."""

from __future__ import annotations

from typing import NamedTuple

from .kinds import Kind


class Scheme(NamedTuple):
    """How a layer is quantized.

    inputs:  "none": they stay high precision. "dynamic": by their own amaxes. "static": by a scale
             of the checkpoint.
    """

    kind: Kind
    inputs: str

    def __str__(self) -> str:
        return f"{self.kind.name}, {self.inputs} inputs"


_FLOAT = {"type": "float", "symmetric": True}  # in compressed-tensors' words


def _arguments(scheme: Scheme) -> tuple[dict, dict | None]:
    """(of weights, of inputs) in compressed-tensors' words."""
    kind = scheme.kind
    weights = _FLOAT | kind.weights | {"dynamic": False}
    if scheme.inputs == "none":
        return weights, None
    if scheme.inputs == "dynamic":
        return weights, _FLOAT | (kind.inputs or kind.weights) | {"dynamic": True, "observer": None}
    dynamic = "local" if kind.is_two_level else False  # scales of blocks still are
    return weights, _FLOAT | kind.weights | {"dynamic": dynamic, "observer": "static_minmax"}


def _compressed_tensors(schemes: dict[str, Scheme], ignore: list[str]) -> dict:
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    config_groups = {}
    for i, (scheme, names) in enumerate(groups.items()):
        weights, inputs = _arguments(scheme)
        config_groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(groups) == 1 else names,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": scheme.kind.packing,
        }
    packings = {scheme.kind.packing for scheme in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packings.pop() if len(packings) == 1 else "mixed-precision",
        "config_groups": config_groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _modelopt(scheme: Scheme, ignore: list[str]) -> dict:
    static, other = scheme.kind.algorithms or (None, None)
    size = scheme.kind.weights.get("group_size")
    named = ("dynamic", "num_bits", "type", "group_size")
    weights, inputs = (
        None if arguments is None else {k: arguments[k] for k in named if k in arguments}
        for arguments in _arguments(scheme)
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "modelopt",
        "quant_algo": static if scheme.inputs == "static" else other,
        **({} if size is None else {"group_size": size}),
        "ignore": ignore,
        "config_groups": {"group_0": group},
        "producer": {"name": "fsdp_quant"},
    }


def quantization_config(target: str, schemes: dict[str, Scheme], ignore: list[str]) -> dict:
    """`quantization_config` of config.json.

    schemes:  of each quantized layer, by its name in the checkpoint.
    ignore:   layers that are not quantized.

    Raises ValueError for several schemes in a target that has one for all layers.
    """
    if target == "compressed-tensors":
        return _compressed_tensors(schemes, ignore)
    first_layers = {scheme: name for name, scheme in reversed(schemes.items())}
    if len(first_layers) > 1:
        (scheme, a), (other, b) = list(first_layers.items())[-1:-3:-1]
        raise ValueError(
            f"{a} and {b} differ ({scheme} and {other}), and format={target!r} has one scheme for "
            "all layers; use format='compressed-tensors', or leave the layers of one out by skip="
        )
    (scheme,) = first_layers
    if target == "modelopt":
        return _modelopt(scheme, ignore)
    # transformers reads the first list, vLLM the second.
    lists = {"modules_to_not_convert": ignore, "ignored_layers": ignore}
    return (scheme.kind.fp8 or {}) | {"activation_scheme": "dynamic"} | lists


def hf_quant_config(config: dict) -> dict:
    """The file hf_quant_config.json of modelopt, of its `quantization_config`."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "exclude_modules": config["ignore"],
        **({"group_size": config["group_size"]} if "group_size" in config else {}),
    }
    return {"producer": config["producer"], "quantization": quantization}

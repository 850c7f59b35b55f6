# SPDX-License-Identifier: Apache-2.0
"""`load_te_state_dict`: weights of TransformerEngine's modules, by its names, into those here.

    there                                  here
    layer_norm_weight, layer_norm_bias     norm.weight, norm.bias
    weight, bias                           linear.weight, linear.bias         of LayerNormLinear
    fc1_weight                             gate_proj.weight, up_proj.weight   rows of one, then the
                                                                              other
    fc1_weight                             up_proj.weight                     without a gate
    fc2_weight                             down_proj.weight
    weight0, weight1, ...                  experts.0.weight, ..., or the matrices of `weight`

A gated activation there is act(first half of the rows) * second half, so the gate comes first.
Biases follow their weights. All other names are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..linear.grouped_linear import GroupedLinear
from ..tensor import torch_compat
from ..tensor.agreement import axes_of, raises_on_all_ranks
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP

_EXTRA = "_extra_state"  # scales and amax histories there
_NORM = {"layer_norm_weight": ["norm.weight"], "layer_norm_bias": ["norm.bias"]}


class _Rows(NamedTuple):
    """Where rows of a tensor belong: the tensor `key` of the model, or matrix `expert` of it."""

    key: str
    expert: int | None = None


def load_te_state_dict(model: nn.Module, state: Mapping[str, object]) -> None:
    """Copy a state dict of TransformerEngine's modules into a model of the modules here.

    model:  with `fq.Linear`, `fq.LayerNormLinear`, `fq.LayerNormMLP`, `fq.GroupedLinear` where
            `state` has te's. Weights may be DTensors of `fully_shard`.
    state:  whole tensors, on every rank, under te's names. `_extra_state` is left out: amax
            histories start anew.

    Values are cast to the dtypes of the model. Every rank must call it.
    Raises ValueError, on every rank and before anything is written, for keys that are missing or
    unexpected, other shapes, values that are no whole tensors, and a model on the meta device.
    NotImplementedError for a weight that is cut by `fully_shard` and by tensor parallelism.

    >>> model = fq.LayerNormMLP(64, 128, bias=False, normalization="RMSNorm")
    >>> fc1 = torch.randn(256, 64)                                      # rows of gate, rows of up
    >>> state = {"layer_norm_weight": torch.ones(64), "fc1_weight": fc1}
    >>> fq.load_te_state_dict(model, state | {"fc2_weight": torch.randn(64, 128)})
    >>> torch.equal(model.gate_proj.weight, fc1[:128])
    True
    """
    with raises_on_all_ranks(itertools.chain(*axes_of(model))):
        values = _translated(model, state)
    model.load_state_dict(values, strict=False)  # all keys but `_extra_state` are there


def _translated(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return values for every tensor of the model, by its keys."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"fq.load_te_state_dict(model, state): the state is a {type(state).__name__}; wanted "
            "the dict of names and tensors that torch.load returns"
        )
    here = {torch_compat.in_state_dict(key): (key, t) for key, t in model.state_dict().items()}
    here = {key: item for key, item in here.items() if not key.endswith(_EXTRA)}
    tensors = {key: value for key, value in state.items() if not key.endswith(_EXTRA)}
    shapes = {key: list(tensor.shape) for key, (_, tensor) in here.items()}
    targets = _targets(model, shapes)
    expected = {te_key: _shape(rows, shapes) for te_key, rows in targets.items()}
    problems = _problems(expected, tensors)
    if any(tensor.is_meta for _, tensor in here.values()):
        problems.append("the model is on the meta device: model.to_empty(device=...) first")
    if problems:
        raise ValueError(
            f"fq.load_te_state_dict wrote nothing: {'; '.join(problems)}. Wanted: the names and "
            f"shapes of te's modules where {type(model).__name__} has those of fq: create them "
            "with the activation, normalization, bias and sizes of te's, rename keys that te did "
            "not write, and load a state of fq with model.load_state_dict"
        )
    wholes: dict[str, Tensor] = {}
    matrices: dict[str, list[Tensor]] = {}
    for te_key, rows in targets.items():
        value = tensors[te_key].detach()
        if type(value) is not Tensor:  # codes of te
            value = value.dequantize()
        parts = [value] if len(rows) == 1 else value.split([shapes[row.key][0] for row in rows])
        for row, part in zip(rows, parts):
            if row.expert is None:
                wholes[row.key] = part
            else:
                matrices.setdefault(row.key, []).append(part)
    wholes |= {key: torch.stack(experts) for key, experts in matrices.items()}
    return {
        here[key][0]: torch_compat.distributed_as(here[key][1], tensor, key)
        for key, tensor in wholes.items()
    }


def _targets(model: nn.Module, shapes: Mapping[str, list[int]]) -> dict[str, list[_Rows]]:
    """Return where each tensor of te's state dict belongs, its rows in order."""
    targets: dict[str, list[_Rows]] = {}
    for name, module in model.named_modules():
        path = torch_compat.in_state_dict(name)
        prefix = f"{path}." if path else ""
        for te_key, rows in _names_of(module).items():
            moved = [row._replace(key=prefix + row.key) for row in rows]
            if all(row.key in shapes for row in moved):
                targets[prefix + te_key] = moved
    renamed = {row.key for rows in targets.values() for row in rows}
    return targets | {key: [_Rows(key)] for key in shapes if key not in renamed}


def _names_of(module: nn.Module) -> dict[str, list[_Rows]]:
    """Return te's names of a module's tensors, without prefix."""
    if isinstance(module, GroupedLinear):
        count = len(module.weight if module.packed else module.layers)  # a DTensor has all ranks'
        return {
            f"{kind}{e}": [_Rows(kind, e) if module.packed else _Rows(f"experts.{e}.{kind}")]
            for kind in ("weight", "bias")
            for e in range(count)
        }
    names: dict[str, list[str]] = {}
    if isinstance(module, LayerNormLinear):
        names = _NORM | {kind: [f"linear.{kind}"] for kind in ("weight", "bias")}
    elif isinstance(module, LayerNormMLP):
        first = ["up_proj"] if module.gate_proj is None else ["gate_proj", "up_proj"]
        names = dict(_NORM)
        for kind in ("weight", "bias"):
            names[f"fc1_{kind}"] = [f"{layer}.{kind}" for layer in first]
            names[f"fc2_{kind}"] = [f"down_proj.{kind}"]
    return {te_key: [_Rows(key) for key in keys] for te_key, keys in names.items()}


def _shape(rows: list[_Rows], shapes: Mapping[str, list[int]]) -> list[int]:
    """Return the shape there of what belongs to these rows."""
    if rows[0].expert is not None:
        return shapes[rows[0].key][1:]
    first, *_ = of_keys = [shapes[row.key] for row in rows]
    return first if len(rows) == 1 else [sum(shape[0] for shape in of_keys), *first[1:]]


def _problems(expected: Mapping[str, list[int]], tensors: Mapping[str, object]) -> list[str]:
    """Return what keeps a state from being loaded, a clause per kind."""
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    kinds = {"missing": missing, "unexpected": unexpected}
    problems = [f"{kind}: {', '.join(sorted(keys))}" for kind, keys in kinds.items() if keys]
    for key in sorted(expected.keys() & tensors.keys()):
        value = tensors[key]
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            problems.append(f"{key} is a {type(value).__name__}, wanted a whole tensor")
        elif list(value.shape) != expected[key]:
            problems.append(f"{key} is {list(value.shape)}, wanted {expected[key]}")
    return problems

# SPDX-License-Identifier: Apache-2.0
"""`Role`: the tensor of a module that a recipe chooses a quantizer for; names of layers, and
`backward_override`."""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .formats import IDENTITY
from .ops.rng import tensor_id
from .quantizer import HybridQuantizer, Quantizer, hybrid_of
from .tensor.torch_compat import without_wrappers

TENSOR_TYPES = ("input", "weight", "grad_output", "output", "grad_input")
QUANTIZED_TYPES, BOUNDARY_TYPES = TENSOR_TYPES[:3], TENSOR_TYPES[3:]
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
OVERRIDE_VARIABLE = "FSDP_QUANT_BACKWARD_OVERRIDE"


@functools.cache
def default_override() -> str | None:
    """Return the default `backward_override`: FSDP_QUANT_BACKWARD_OVERRIDE, read once."""
    value = os.environ.get(OVERRIDE_VARIABLE) or None
    if value not in BACKWARD_OVERRIDES:
        values = " or ".join(map(repr, BACKWARD_OVERRIDES[1:]))
        raise ValueError(
            f"{OVERRIDE_VARIABLE}={value!r} in the environment; wanted {values}, or leave it out"
        )
    return value


@dataclass(frozen=True)
class Role:
    """The tensor that a quantizer is for.

    module_type:  "linear"; "grouped_linear": an expert of `fq.GroupedLinear`; "quantize":
                  `fq.Quantize`.
    tensor_type:  "input", "weight", "grad_output", or a boundary slot: "output", "grad_input".
                  `fq.Linear` and experts have the first three, with boundary_slots=True all five;
                  `fq.Quantize` has the boundary slots.
    name:         the module's qualified name.

    >>> fq.Role("linear", "weight", "layers.0.up").name
    'layers.0.up'
    """

    module_type: str
    tensor_type: str
    name: str = ""

    def __post_init__(self):
        if self.tensor_type not in TENSOR_TYPES:
            raise ValueError(
                f"tensor_type must be one of {', '.join(TENSOR_TYPES)}, got {self.tensor_type!r}"
            )


def overridden(hybrid: HybridQuantizer, tensor_type: str, override: str | None) -> HybridQuantizer:
    """Return the quantizer of one slot under `backward_override`, for every recipe and module.

    Raises ValueError for a weight with second-level scales per row.
    """
    rows = [q.fmt for q in hybrid.sides.values() if q.fmt.has_row_scales]
    if rows and tensor_type == "weight":
        raise ValueError(
            f"a weight has one second-level scale, which its shards share; {rows[0]} has one per "
            "row: pass scale_per='tensor' for weights, and 'row' for activations and gradients"
        )
    if override is None:
        return hybrid
    if tensor_type in ("grad_output", "grad_input"):
        return hybrid_of(IDENTITY)
    if tensor_type not in ("input", "weight"):
        return hybrid
    source = "rowwise_dequantized" if override == "dequantized" else "original"
    return HybridQuantizer(hybrid.rowwise, Quantizer(IDENTITY), source)


def matches(pattern: str, name: str, inside: bool = False) -> bool:
    """Return whether `pattern` is a layer's qualified name, its last component, or a glob of the
    name, with its wrappers or without. inside: or is that of a module around the layer."""
    around = name.rpartition(".")[0]
    return (inside and around != "" and matches(pattern, around, inside)) or any(
        fnmatch.fnmatch(n, pattern) or n.rpartition(".")[2] == pattern
        for n in (name, without_wrappers(name))
    )


# A name or glob (`matches`), a class of modules, or a function (module path, module) -> bool.
Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]


class Selection(NamedTuple):
    """What a class or function selects in one model: names of layers, without wrappers."""

    text: str
    names: tuple[str, ...]


def selectors_of(argument: str, value: Selector | Iterable[Selector]) -> list[Selector]:
    """Return one or several selectors as a list. Raises ValueError for anything else."""
    is_one = isinstance(value, str) or callable(value)
    several: list[Any] = [value] if is_one else list(value) if isinstance(value, Iterable) else [0]
    if all(isinstance(selector, str) or callable(selector) for selector in several):
        return several
    raise ValueError(
        f"{argument} is {value!r}; it takes names and globs of layers, such as ['lm_head', "
        "'*.router'], classes of modules, and functions (module path, module) -> bool"
    )


def hits(selector: str | Selection, layers: Iterable[str]) -> list[str]:
    """Return the names of the layers that a selector has, or that are in a module that it has."""
    if isinstance(selector, str):
        return [n for n in layers if matches(selector, n, inside=True)]
    return [n for n in layers if without_wrappers(n) in selector.names]


def selected(
    argument: str,
    selector: Selector | Selection,
    layers: Iterable[str],
    modules: Mapping[str, nn.Module],
    others: Iterable[str] = (),
) -> list[str]:
    """Return `hits` of any selector.

    modules:  of the model, by qualified name. others: names that it may have instead.

    Raises ValueError for a name or class that has none, and for a function whose answer is no bool.
    """
    layers = list(layers)
    if isinstance(selector, Selection):
        return hits(selector, layers)
    if isinstance(selector, str):
        found = set(hits(selector, (*layers, *others)))
    elif isinstance(selector, type):
        around = tuple(f"{n}.".lstrip(".") for n, m in modules.items() if isinstance(m, selector))
        found = {n for n in (*layers, *others) if f"{n}.".startswith(around)}
    else:
        return [n for n in layers if _answer(argument, selector, n, modules)]
    if not found:
        has = some(layers) or "none"
        raise ValueError(f"{argument}: {shown(selector)} matches no layer; the model has {has}")
    return [n for n in layers if n in found]


def _answer(argument: str, function: Callable, name: str, modules: Mapping) -> bool:
    module = modules.get(name, modules.get(name.rpartition(".")[0]))  # a part of packed experts
    answer = function(without_wrappers(name), module)
    if not isinstance(answer, bool):
        raise ValueError(f"{argument}: {shown(function)} returned no bool, but {answer!r}")
    return answer


def shown(selector: object) -> str:
    """Return how messages write a selector."""
    return getattr(selector, "text", getattr(selector, "__name__", repr(selector)))


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def slot_ids(name: str) -> Tensor:
    """Return int64 [3]: the ids of a module's slots, which key their random bits."""
    ids = [tensor_id(f"{name}.{slot}") for slot in QUANTIZED_TYPES]
    return torch.tensor(ids, dtype=torch.int64, device="cpu")

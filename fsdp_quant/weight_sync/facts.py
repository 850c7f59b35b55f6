# SPDX-License-Identifier: Apache-2.0
"""What a trainer needs to know before it lays out its buffers: formats, wire bits, alignments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..formats import COLUMNWISE
from ..recipe import Recipe, Role, as_recipe
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import local_of
from .synced_weight import bits_of


@dataclass(frozen=True)
class WeightFacts:
    """Formats and wire size of a parameter, for a trainer that lays out buffers.

    formats:     by direction; says whether a direction shares or derives its storage.
    wire_bits:   bits per element of codes, by encoded direction; without scales.
    """

    is_quantized: bool
    shape: tuple[int, ...]
    formats: dict[str, str]
    wire_bits: dict[str, int]


def describe(param: Tensor) -> WeightFacts:
    """Formats and wire bits of a parameter, or that it is not quantized."""
    weight = local_of(param)
    if not isinstance(weight, QuantizedWeight):
        return WeightFacts(False, tuple(param.shape), {}, {})
    quantizer = weight.state.quantizer
    formats = {d.value: repr(q.fmt) for d, q in quantizer.sides.items()}
    if quantizer.shares_storage:
        formats[COLUMNWISE.value] += " (the rowwise storage)"
    elif quantizer.is_derived:
        formats[COLUMNWISE.value] += " (of the decoded rowwise storage)"
    bits = {d.value: bits_of(e, weight.dtype) for d, e in quantizer.encodings.items()}
    return WeightFacts(True, tuple(weight.shape), formats, bits)


def token_alignment(recipe: Recipe | str, role: Role | str) -> int:
    """Multiple of tokens per group (expert, sequence shard) such that no block of an activation or
    gradient crosses into the next group.

    role:  role of any tensor of the module, or the module's name.
    """
    recipe = as_recipe(recipe, "token_alignment", Recipe)
    kind, name = (role.module_type, role.name) if isinstance(role, Role) else ("linear", role)
    sizes = [1]
    for tensor_type in ("input", "grad_output"):
        hybrid = recipe.hybrid(Role(kind, tensor_type, name))
        sizes += [
            size
            for d, q in ({} if hybrid is None else hybrid.sides).items()
            for size in (q.fmt.dims(d)[0] or 1, q.fmt.padded_shape((1, 1), d)[0])
        ]
    return math.lcm(*sizes)

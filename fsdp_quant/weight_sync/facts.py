# SPDX-License-Identifier: Apache-2.0
"""What a trainer needs to know before it lays out its buffers: formats, wire bits, alignments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..formats import COLUMNWISE, Direction
from ..recipe import Recipe, Role, as_recipe
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import local_of
from .synced_weight import bits_of


@dataclass(frozen=True)
class WeightFacts:
    """What a trainer may ask of a parameter before it lays out its buffers.

    formats:     by direction; a direction that shares or derives its storage says so.
    wire_bits:   of an element's codes, by what is encoded of the master; scales come on top.
    """

    is_quantized: bool
    shape: tuple[int, ...]
    formats: dict[str, str]
    wire_bits: dict[str, int]


def describe(param: Tensor) -> WeightFacts:
    """What is known of a parameter: formats and bits on the wire, or that it is not quantized."""
    weight = local_of(param)
    if not isinstance(weight, QuantizedWeight):
        return WeightFacts(False, tuple(param.shape), {}, {})
    quantizer = weight.state.quantizer
    formats = {d.value: repr(q.fmt) for d in Direction if (q := quantizer.side(d)) is not None}
    if quantizer.shares_storage:
        formats[COLUMNWISE.value] += " (the rowwise storage)"
    elif quantizer.is_derived:
        formats[COLUMNWISE.value] += " (of the decoded rowwise storage)"
    bits = {d.value: bits_of(e, weight.dtype) for d, e in quantizer.encodings.items()}
    return WeightFacts(True, tuple(weight.shape), formats, bits)


def token_alignment(recipe: Recipe | str, role: Role | str) -> int:
    """Tokens of which a group (an expert's, a sequence shard's) must be a multiple, so that no
    block of an activation or a gradient crosses into the next group: the least common multiple over
    both tensors and directions.

    role:  of any tensor of the module, or the module's name.
    """
    recipe = as_recipe(recipe, "token_alignment", Recipe)
    kind, name = (role.module_type, role.name) if isinstance(role, Role) else ("linear", role)
    sizes = [1]
    for tensor_type in ("input", "grad_output"):
        hybrid = recipe.hybrid(Role(kind, tensor_type, name))
        sizes += [
            size
            for d in Direction
            if (q := hybrid.side(d)) is not None
            for size in (q.fmt.dims(d)[0] or 1, q.fmt.padded_shape((1, 1), d)[0])
        ]
    return math.lcm(*sizes)

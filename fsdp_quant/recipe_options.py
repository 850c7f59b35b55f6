# SPDX-License-Identifier: Apache-2.0
"""Values that options of recipes, layers and schedules may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import SCALE_RULES
from .options import Option, choice, flag, integer, number, text
from .quantizer import FLOATING
from .roles import BACKWARD_OVERRIDES


def _is_pairs(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


# Of every recipe; see `recipe.Recipe`.
RECIPE_OPTIONS = {
    "name": text(),
    "arguments": Option("a tuple of (name, value) pairs", _is_pairs),
    "backward_override": choice(*BACKWARD_OVERRIDES),
    "accuracy": choice("fast", "exact"),
    "anchor_tolerance": number(0.0),
    "save_original_input": choice(None, True, False),
    "strict": flag(),
    "require_native": flag(),
    "compute_dtype": choice(None, *FLOATING),
    "tail": number(0.0, 1.0),
    "boundary_slots": flag(),
}
# Of the functions that make recipes; None: the format's own.
_ARGUMENTS = {
    "pow2": flag(),
    "scale_rounding": choice("up", "floor"),
    "scale_rule": choice(*SCALE_RULES),
}
_GRAD_ELEMENTS = {"fp8_tensor": ("e4m3", "e5m2"), "mxfp6": ("e2m3", "e3m2")}  # by family
_POINT = Option(
    "a step (int) or a fraction of total_steps (float)", lambda v: type(v) in (int, float)
)


def check_names(recipe: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise ValueError for an option that no recipe has."""
    if unknown := ", ".join(sorted(options.keys() - set(known))):
        raise ValueError(
            f"{recipe} has no option {unknown}; options of all recipes: {', '.join(known)}"
        )


def read_arguments(recipe: str, backward: str, arguments: Mapping[str, object]) -> dict:
    """The arguments that are given, without None. Raises ValueError, naming one, for a value that
    means nothing in the family of the backward."""
    table = dict(_ARGUMENTS)
    if backward in _GRAD_ELEMENTS:
        table["grad_element"] = choice(*_GRAD_ELEMENTS[backward])
    return {
        name: table[name].read(f"{recipe}: {name}", value) if name in table else value
        for name, value in arguments.items()
        if value is not None
    }


def several(what: str, values: object, words: str) -> Sequence:
    """A tuple or list with as many items as `words` lists. Raises ValueError, naming it."""
    if not isinstance(values, (tuple, list)) or len(values) != len(words.split(",")):
        raise ValueError(f"{what} must be ({words}), got {values!r}")
    return values


def num_layers(what: str, count: object) -> int:
    return integer(1).read(f"per_layer({what}=): the number of layers", count)


def step_at(point: Any, total_steps: int | None) -> int | None:
    """The step of a bound of a schedule; None: the end."""
    if total_steps is not None:
        total_steps = integer(1).read("schedule: total_steps", total_steps)
    point = None if point is None else _POINT.read("schedule: a bound of a range", point)
    if point is None or isinstance(point, float) and point == 1.0:
        return None
    if not isinstance(point, float):
        return point
    if total_steps is None or not 0.0 <= point < 1.0:
        raise ValueError(
            f"schedule: {point} is a fraction of the steps; give total_steps=, and fractions from "
            "0.0 to 1.0"
        )
    return math.ceil(point * total_steps - 1e-9)

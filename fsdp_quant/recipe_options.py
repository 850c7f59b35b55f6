# SPDX-License-Identifier: Apache-2.0
"""Values that options of recipes, layers and schedules may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import SCALE_RULES, Format, format_of
from .migration import with_remedies
from .options import Option, choice, flag, number, text
from .quantizer import FLOATING
from .roles import BACKWARD_OVERRIDES


def _is_pairs(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


RECIPE_OPTIONS = {  # see `recipe.Recipe`
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
# Arguments of `by_families`; None: the format's own value.
_ARGUMENTS = {
    "pow2": flag(),
    "scale_rounding": choice("up", "floor"),
    "scale_rule": choice(*SCALE_RULES),
}
_BOUND = Option(
    "a step (int) or a fraction of total_steps (float)", lambda v: type(v) in (int, float)
)
_GRAD_ELEMENTS = {"fp8_tensor": ("e4m3", "e5m2"), "mxfp6": ("e2m3", "e3m2")}  # by family


def check_names(recipe: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that no recipe has."""
    known = list(RECIPE_OPTIONS)[2:]  # without name and arguments
    if unknown := with_remedies(sorted(options.keys() - set(known))):
        raise ValueError(
            f"{recipe} has no option {unknown}; options of all recipes: {', '.join(known)}"
        )


def read_arguments(recipe: str, backward: str, arguments: Mapping[str, object]) -> dict:
    """Return the arguments that are not None. Raises ValueError, naming the argument, for a value
    that means nothing in the family of the backward."""
    table = dict(_ARGUMENTS)
    if backward in _GRAD_ELEMENTS:
        table["grad_element"] = choice(*_GRAD_ELEMENTS[backward])
    return {
        name: table[name].read(f"{recipe}: {name}", value) if name in table else value
        for name, value in arguments.items()
        if value is not None
    }


def with_options(
    fmt: Format,
    pow2: bool | None,
    scale_rounding: str | None,
    scale_rule: str | None,
    element: str | None,
) -> Format:
    """Return the format with the options that are not None and that its kind of scale has."""
    changes = {
        "pow2": pow2 if fmt.has_fp32_scales else None,
        "scale_rounding": scale_rounding if fmt.scale == "e8m0" else None,
        "scale_rule": scale_rule if fmt.tensor_scale else None,
        "element": element if fmt.is_quantized else None,
    }
    return format_of(fmt, **{k: v for k, v in changes.items() if v is not None})


def items(argument: str, values: object, words: str) -> Sequence:
    """Return a tuple or list with as many items as `words` lists. Raises ValueError, naming it."""
    if not isinstance(values, (tuple, list)) or len(values) != len(words.split(",")):
        raise ValueError(f"{argument} must be ({words}), got {values!r}")
    return values


def step_at(bound: Any, total_steps: int | None) -> int | None:
    """Return the step of a bound of a range; None: the end."""
    if bound is None or type(bound) is float and bound == 1.0:
        return None
    bound = _BOUND.read("schedule: a bound of a range", bound)
    if not isinstance(bound, float):
        return bound
    if total_steps is None or not 0.0 <= bound < 1.0:
        raise ValueError(
            f"schedule: {bound} is a fraction of the steps; give total_steps=, and fractions from "
            "0.0 to 1.0"
        )
    return math.ceil(bound * total_steps - 1e-9)

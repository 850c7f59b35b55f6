# SPDX-License-Identifier: Apache-2.0
"""Values that options of recipes, layers and schedules may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import Family, Format, format_of, switches_of
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
# Switches of named recipes, and what the formats of a recipe need to have for each.
SWITCHES = {
    "grad_element": "gradients of 8 or 6 bits",
    "pow2": "a format with fp32 scales",
    "scale_rounding": "a format with e8m0 scales",
    "scale_rule": "a 4-bit format with e4m3 scales",
    "rotation": "a 4-bit format in the backward",
    "stochastic": "a quantized format in the backward",
    "square_blocks": "formats that have square blocks of weights",
}
_TOGGLES = ("rotation", "stochastic", "square_blocks")
_BOUND = Option(
    "a step (int) or a fraction of total_steps (float)", lambda v: type(v) in (int, float)
)


def check_names(recipe: str, options: Mapping[str, object], switches: str = "") -> None:
    """Raise ValueError for an option that no recipe has. switches: a sentence about others."""
    known = list(RECIPE_OPTIONS)[2:]  # without name and arguments
    if unknown := with_remedies(sorted(options.keys() - set(known))):
        raise ValueError(
            f"{recipe} has no option {unknown}; options of all recipes: {', '.join(known)}"
            + switches
        )


def read_switches(
    recipe: str, families: tuple[Family, Family], given: Mapping[str, object]
) -> dict:
    """Return the switches of a named recipe that are not None.

    Defaults of `_TOGGLES` are left out: recipes are equal with them and without. Raises ValueError,
    naming the switch, for a value that means nothing in the families.
    """
    values, switches = switches_of(*families), {}
    for name, value in given.items():
        is_off = value is False and name in _TOGGLES
        if value is None or (is_off and name not in values):
            continue
        if name not in values:
            raise ValueError(
                f"{recipe}: {name}={value!r} needs {SWITCHES[name]}; switches of this recipe: "
                f"{', '.join(values) or 'none'}"
            )
        read = choice(*values[name]).read(f"{recipe}: {name}", value)
        if name not in _TOGGLES or read != values[name][0]:
            switches[name] = read
    return switches


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

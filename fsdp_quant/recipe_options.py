# SPDX-License-Identifier: Apache-2.0
"""Values that options of recipes, layers and schedules may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .families import Family
from .formats import FOUR_OVER_SIX, SCALE_RULES, SECOND_LEVELS, Format, format_of
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
    "accuracy": choice("fast", "token", "exact"),
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
    "scale_per": "a 4-bit format with e4m3 scales",
    "four_over_six": "a 4-bit format with e4m3 scales",
    "rotation": "a 4-bit format in the backward",
    "stochastic": "a quantized format in the backward",
    "square_blocks": "formats that have square blocks of weights",
}
_TOGGLES = ("rotation", "stochastic", "square_blocks")
_WITHOUT_DEFAULT = (*_TOGGLES, "scale_per", "four_over_six")
_BOUND = Option(
    "a step (int) or a fraction of total_steps (float)", lambda v: type(v) in (int, float)
)


# Of weights and activations, or of weights alone: gradients are rounded stochastically.
_OF_WEIGHTS = "-weights"
FOUR_OVER_SIX_SWITCH = (*FOUR_OVER_SIX, *(f"{error}{_OF_WEIGHTS}" for error in FOUR_OVER_SIX[1:]))
# Elements of gradients, by bits.
GRAD_ELEMENTS = {8: ("e4m3", "e5m2"), 6: ("e2m3", "e3m2")}


def switches_of(forward: Family, backward: Family, weight: str | None = None) -> dict[str, tuple]:
    """Return the switches that mean something in a recipe of two families, and their values, the
    default first. weight: the format of weights, if the families do not say it."""
    f, b = forward, backward
    formats = [*([] if weight is None else [format_of(weight)]), f.vector, b.vector]
    values: dict[str, tuple] = {}
    if b.vector.bits in GRAD_ELEMENTS:
        values["grad_element"] = GRAD_ELEMENTS[b.vector.bits]
    if scaled := [fmt for fmt in formats if fmt.has_fp32_scales]:
        values["pow2"] = _default_first(scaled[0].pow2)
    if any(fmt.scale == "e8m0" for fmt in formats):
        values["scale_rounding"] = "up", "floor"
    if any(fmt.is_two_level for fmt in formats):
        values["scale_rule"] = SCALE_RULES
        values["scale_per"] = SECOND_LEVELS
        values["four_over_six"] = FOUR_OVER_SIX_SWITCH
    if b.rotates_wgrad:
        values["rotation"] = True, False
    if b.vector.is_quantized:
        values["stochastic"] = _default_first(b.rotates_wgrad)
    if weight is None and f.square is not None and b.square is not None:
        values["square_blocks"] = _default_first(f == b and f.weight == f.square)
    return values


def _default_first(default: bool) -> tuple[bool, bool]:
    return default, not default


def check_names(recipe: str, options: Mapping[str, object], switches: str = "") -> None:
    """Raise ValueError for an option that no recipe has. switches: a sentence about others."""
    known = list(RECIPE_OPTIONS)[2:]  # without name and arguments
    if unknown := with_remedies(sorted(options.keys() - set(known))):
        raise ValueError(
            f"{recipe} has no option {unknown}; options of all recipes: {', '.join(known)}"
            + switches
        )


def read_switches(recipe: str, values: Mapping[str, tuple], given: Mapping[str, object]) -> dict:
    """Return the switches of a named recipe that are not None.

    values: of `switches_of`. Defaults of `_WITHOUT_DEFAULT` are left out: recipes are equal with
    them and without. Raises ValueError, naming the switch, for a value that means nothing here.
    """
    switches = {}
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
        if name not in _WITHOUT_DEFAULT or read != values[name][0]:
            switches[name] = read
    return switches


def with_options(fmt: Format, tensor_type: str, options: Mapping[str, Any]) -> Format:
    """Return the format of a slot with the switches that are not None and that its kind of scale
    has.

    Weights have one second-level scale per tensor, since their square blocks span rows and serve
    both directions.
    """
    error, of_weights, _ = (options.get("four_over_six") or "off").partition(_OF_WEIGHTS)
    chosen = ("weight",) if of_weights else ("weight", "input")
    has = {
        "pow2": fmt.has_fp32_scales,
        "scale_rounding": fmt.scale == "e8m0",
        "scale_rule": fmt.is_two_level,
        "scale_per": fmt.is_two_level and tensor_type != "weight",
        "four_over_six": fmt.is_two_level and tensor_type in chosen,
        "grad_element": fmt.is_quantized and tensor_type == "grad_output",
    }
    options = {**options, "four_over_six": error}
    changes = {k: options[k] for k, takes in has.items() if takes and options.get(k) is not None}
    if "grad_element" in changes:
        changes["element"] = changes.pop("grad_element")
    return format_of(fmt, **changes)


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

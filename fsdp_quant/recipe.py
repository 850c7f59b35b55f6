# SPDX-License-Identifier: Apache-2.0
"""Recipes: the quantizer of each tensor of a linear layer.

The three GEMMs of y = x W^T read six storages; a recipe names the quantizer of each:

    fprop  y  = x.rowwise          weight.rowwise
    dgrad  dx = grad_output.rowwise    weight.columnwise
    wgrad  dW = grad_output.columnwise x.columnwise

`fq.recipes.table` returns the named recipes, their quantizers and their switches, alike in all:

    grad_element    element of grad_output
    pow2            fp32 scales are powers of two
    scale_rounding  of e8m0 scales: "up", or "floor" (the OCP rule)
    scale_rule      of 4-bit blocks, as are scale_per and four_over_six: see `nvfp4`
    rotation        the operands of wgrad get a random Hadamard transform (RHT), which cancels
    stochastic      grad_output is rounded stochastically (SR)
    square_blocks   weights have square blocks, whose codes serve both directions

>>> fq.recipes.hybrid("mxfp8", "nvfp4").hybrid(fq.Role("linear", "weight"))
mxfp8 / nvfp4
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, overload

import torch

import fsdp_quant.roles as roles

from .families import FAMILIES, family_of
from .formats import canonical_text
from .migration import recipe_remedy
from .options import check, integer
from .quantizer import HybridQuantizer, Quantizer, hybrid_of
from .recipe_options import (
    RECIPE_OPTIONS,
    SWITCHES,
    check_names,
    items,
    read_switches,
    step_at,
    switches_of,
    with_options,
)
from .roles import QUANTIZED_TYPES, Role, default_override, overridden
from .roles import matches as matches
from .scaling import DelayedScaling

__all__ = ["PerLayer", "Recipe", "Schedule", "by_name", "custom", "names", "per_layer", "schedule"]
__all__ += ["bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_row", "hybrid", "identity"]
__all__ += ["mxfp4", "mxfp6", "mxfp8", "nvfp4"]

_R = TypeVar("_R", bound="Recipe | PerLayer | Schedule")


class _OfAllSteps:
    def at(self, step: int) -> Any:
        """Return the recipe of a step."""
        return self

    @property
    def phases(self) -> tuple[Any]:
        """Return all values of `at`."""
        return (self,)


@dataclass(frozen=True)
class Recipe(_OfAllSteps):
    """A named `qfactory(role)` and the options of the GEMMs, compared by value.

    qfactory:             module-level function (role, **arguments) -> Format, its name, Quantizer,
                          HybridQuantizer or None (boundary slots).
    arguments:            its keyword arguments, sorted (name, value) pairs.
    backward_override:    None; "high_precision": the backward multiplies the original values;
                          "dequantized": it multiplies the decoded operands of the forward. Neither
                          quantizes grad_output and grad_input. Default: `default_override()`.
    accuracy:             "fast"; "token": no token's output or input gradient depends on others by
                          an exponent that they share; "exact": only domains that decode exactly.
    anchor_tolerance:     error that anchors may add to a GEMM, relative to that of its formats,
                          before all layers use the next rung (`linear.plan.LADDER`) from the next
                          step on.
    save_original_input:  None: the plan decides; True: save the input and quantize it again in the
                          backward. backward_override="dequantized" always saves codes.
    strict:               raise if something other than the plan would run; False warns once and
                          counts.
    require_native:       refuse GEMMs that no tensor core computes, when the recipe is applied.
    compute_dtype:        dtype that the weight's quantizer sees (None: the master's own).
    tail:                 share of the converted layers, the last ones, that run in identity.
    boundary_slots:       linear layers quantize "output" and "grad_input" too, and return decoded
                          values.

    >>> fq.recipes.mxfp8() == fq.recipes.mxfp8(accuracy="fast")
    True
    >>> fq.recipes.nvfp4(tail=0.15, scale_rule="fp8_exact").tail
    0.15
    """

    name: str
    qfactory: Callable
    arguments: tuple[tuple[str, object], ...] = ()
    backward_override: str | None = "environment"
    accuracy: str = "fast"
    anchor_tolerance: float = 0.1
    save_original_input: bool | None = None
    strict: bool = True
    require_native: bool = False
    compute_dtype: torch.dtype | None = torch.bfloat16
    tail: float = 0.0
    boundary_slots: bool = False

    def __post_init__(self):
        qualified = getattr(self.qfactory, "__qualname__", "")
        if not qualified or "<lambda>" in qualified or "<locals>" in qualified:
            raise ValueError(
                "recipes are pickled and compared, so qfactory must be a module-level function; "
                f"got {qualified or self.qfactory!r}: move it to a module and pass it by name"
            )
        if self.backward_override == "environment":
            object.__setattr__(self, "backward_override", default_override())
        check(self, RECIPE_OPTIONS, f"{self.name}: ")
        _RECIPES[self.key] = self

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__dict__.pop("key", None)
        _RECIPES[self.key] = self

    @functools.cached_property
    def key(self) -> str:
        """Return a text that stands for the recipe while a graph is traced (`recipe_of`)."""
        return f"{self.name} {self.fingerprint()}"

    def hybrid(self, role: Role) -> HybridQuantizer | None:
        """Return the quantizer of this role, `backward_override` applied; None for an empty
        boundary slot.

        Raises ValueError, naming role and recipe, for an answer of `qfactory` that is no quantizer.
        """
        value = self.qfactory(role, **dict(self.arguments))
        if value is None:
            if role.tensor_type in QUANTIZED_TYPES:
                raise ValueError(
                    f"{self.name}: qfactory returned None for {role}; return 'identity' for a "
                    "tensor that is not quantized"
                )
            return None
        try:
            return overridden(hybrid_of(value), role.tensor_type, self.backward_override)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{role.name}: {role.tensor_type}: {self.name} gave {value!r}: {error}"
            ) from error

    def for_layers(self, names: Sequence[str]) -> list[Recipe]:
        """Return the recipe of each layer in order: identity for the last `tail` of them, rounded
        up."""
        num_last = math.ceil(self.tail * len(names) - 1e-9)
        last = identity(compute_dtype=self.compute_dtype, strict=self.strict)
        return [self] * (len(names) - num_last) + [last] * num_last

    def fingerprint(self) -> str:
        """Return a text that is equal for equal recipes, in any process."""
        factory = f"{self.qfactory.__module__}.{self.qfactory.__qualname__}"
        options = [(f.name, getattr(self, f.name)) for f in fields(self)[3:]]
        return f"{factory}{canonical_text(self.arguments)} {canonical_text(options)}"

    def __repr__(self) -> str:
        defaults = {f.name: f.default for f in fields(self)[3:]} | {"backward_override": None}
        options = [(name, getattr(self, name)) for name in defaults]
        shown = [*self.arguments, *(o for o in options if o[1] != defaults[o[0]])]
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in shown)})"


_RECIPES: dict[str, Recipe] = {}  # by key, of this process


def recipe_of(key: str) -> Recipe:
    """Return the recipe of a key. Raises ValueError for a recipe that is created in a compiled
    region, where it is no object yet."""
    if key not in _RECIPES:
        raise ValueError(
            f"the recipe {key.split()[0]} is created inside a compiled region; create it outside, "
            "and enter it inside"
        )
    return _RECIPES[key]


# Recipes by layer and by step #


@dataclass(frozen=True)
class PerLayer(_OfAllSteps):
    """A recipe per layer, from `per_layer`: by name, else among the first or the last layers, else
    `default`.

    named:        (pattern, recipe) pairs; the first that matches decides. A model's own recipe has
                  a `Selection` for each class and function.
    first, last:  (number of layers, recipe).
    """

    default: Recipe
    named: tuple[tuple[roles.Selector | roles.Selection, Recipe], ...] = ()
    first: tuple[int, Recipe] | None = None
    last: tuple[int, Recipe] | None = None

    def __post_init__(self):
        as_recipe(self.default, "per_layer(default)", Recipe)
        for place, key, recipe in self._rules:
            as_recipe(recipe, f"per_layer({place}: {key!r})", Recipe)
            if recipe.tail:
                raise ValueError(
                    f"per_layer({place}: {key!r}) is {recipe}; tail belongs to the default, or say "
                    "last="
                )
        for place, count, _ in self._ends:
            integer(1).read(f"per_layer({place}=): the number of layers", count)

    @property
    def _ends(self) -> list[tuple[str, int, Recipe]]:
        rules = ("first", self.first), ("last", self.last)
        return [(place, *rule) for place, rule in rules if rule is not None]

    @property
    def _rules(self) -> list[tuple[str, object, Recipe]]:
        return [*(("named", *rule) for rule in self.named), *self._ends]

    def for_layers(self, names: Sequence[str]) -> list[Recipe]:
        """Return the recipe of each layer in order.

        Raises ValueError for a pattern without layers, and for first and last layers that overlap.
        """
        result = self.default.for_layers(names)
        counts = [count for _, count, _ in self._ends]
        if sum(counts) > len(names):
            raise ValueError(
                f"{self} covers {' and '.join(map(str, counts))} of {len(names)} layers; they "
                "overlap"
            )
        for place, count, recipe in self._ends:
            for i in range(count):
                result[i if place == "first" else -1 - i] = recipe
        for pattern, recipe in reversed(self.named):
            matching = roles.selected("per_layer", pattern, names, {})
            result = [recipe if n in matching else r for n, r in zip(names, result)]
        return result

    def fingerprint(self) -> str:
        rules = [("default", "", self.default), *self._rules]
        return " ".join(f"{place} {key}: {recipe.fingerprint()};" for place, key, recipe in rules)

    def __repr__(self) -> str:
        named = ", ".join(f"{roles.shown(k)}: {r}" for k, r in self.named)
        parts = [repr(self.default), *(["{" + named + "}"] if named else [])]
        parts += [f"{place}={(count, recipe)}" for place, count, recipe in self._ends]
        return f"per_layer({', '.join(parts)})"


def per_layer(
    default: Recipe | str,
    named: Mapping[Any, Recipe | str] | None = None,
    first: tuple[int, Recipe | str] | None = None,
    last: tuple[int, Recipe | str] | None = None,
) -> PerLayer:
    """Return a recipe per layer: `default`, with others by name, glob, class or function (as in
    `fq.convert(skip=)`), and for the first and the last layers.

    first, last:  (number of layers, recipe), in the order of `named_modules`; a `GroupedLinear` is
                  one layer.

    Raises ValueError for anything that is no recipe, pattern or number.
    """
    if not isinstance(named, Mapping) and named is not None:
        raise ValueError(f"per_layer(named=) must be recipes by name pattern, got {named!r}")
    rules = []
    for pattern, recipe in (named or {}).items():
        roles.selectors_of("per_layer(named=): a pattern", [pattern])
        rules.append((pattern, as_recipe(recipe, f"per_layer({pattern!r})", Recipe)))
    ends: list[tuple[int, Recipe] | None] = []
    for place, end in (("first", first), ("last", last)):
        if end is not None:
            count, recipe = items(f"per_layer({place}=)", end, "number of layers, recipe")
            end = count, as_recipe(recipe, f"per_layer({place}=)", Recipe)
        ends.append(end)
    return PerLayer(as_recipe(default, "per_layer(default)", Recipe), tuple(rules), *ends)


@dataclass(frozen=True)
class Schedule:
    """A recipe per step, from `schedule`.

    switches:  (first step, step after the last or None, recipe), in order; `base` runs in all
               other steps.
    """

    base: Recipe | PerLayer
    switches: tuple[tuple[int, int | None, Recipe | PerLayer], ...]

    def __post_init__(self):
        for recipe in self.phases:
            as_recipe(recipe, "schedule", Recipe, PerLayer)
        for start, stop, recipe in self.switches:
            for step in (start, start if stop is None else stop):
                integer(0).read("schedule: a step", step)
            if stop is not None and stop <= start:
                raise ValueError(f"schedule: {recipe} from step {start} to {stop} runs in no step")
        for (start, stop, recipe), (later, _, other) in zip(self.switches, self.switches[1:]):
            if stop is None or later < stop:
                raise ValueError(
                    f"schedule: {recipe} from step {start} to {stop or 'the end'} overlaps {other} "
                    f"from step {later}; a step has one recipe"
                )

    def at(self, step: int) -> Recipe | PerLayer:
        """Return the recipe of a step."""
        for start, stop, recipe in self.switches:
            if start <= step and (stop is None or step < stop):
                return recipe
        return self.base

    @property
    def phases(self) -> tuple[Recipe | PerLayer, ...]:
        return (self.base, *(recipe for *_, recipe in self.switches))

    def fingerprint(self) -> str:
        switches = " ".join(f"[{a}, {b}) {r.fingerprint()}" for a, b, r in self.switches)
        return f"{self.base.fingerprint()} {switches}"

    def __repr__(self) -> str:
        switches = ", ".join(f"({a}, {b}, {r})" for a, b, r in self.switches)
        return f"schedule({self.base}, {switches})"


def schedule(
    base: Recipe | PerLayer | str, *switches: tuple, total_steps: int | None = None
) -> Schedule:
    """Return a recipe per step: `base`, with others in ranges of steps: (first, after the last or
    None for the end, recipe).

    first, after the last:  steps (int), or fractions of `total_steps` (float; 1.0: no end).

    The step is that of `fq.begin_step`, else the number of passes of the model that a backward may
    follow: every rank switches before the same one. A model that torch.compile traces in one graph,
    or that runs in pieces, switches behind its optimizer's step. Raises ValueError for ranges that
    overlap or hold no step, and for fractions of an unknown total.
    """
    if total_steps is not None:
        total_steps = integer(1).read("schedule: total_steps", total_steps)
    ranges: list[tuple[int, int | None, Recipe | PerLayer]] = []
    for switch in switches:
        words = "first step, step after the last or None, recipe"
        start, stop, recipe = items("schedule: a switch", switch, words)
        first = step_at(start, total_steps)
        if first is None:
            raise ValueError("schedule: a range needs a first step; the end has none")
        recipe = as_recipe(recipe, "schedule", Recipe, PerLayer)
        ranges.append((first, step_at(stop, total_steps), recipe))
    ranges.sort(key=lambda switch: switch[0])
    return Schedule(as_recipe(base, "schedule", Recipe, PerLayer), tuple(ranges))


@overload
def as_recipe(value: object, what: str) -> Recipe | PerLayer | Schedule: ...
@overload
def as_recipe(value: object, what: str, *kinds: type[_R]) -> _R: ...
def as_recipe(value: object, what: str, *kinds: type) -> object:
    """Return the recipe `value`, or the recipe that a text names (`by_name`).

    what:    names the argument in errors.
    kinds:   accepted classes (default: `Recipe`, `PerLayer` and `Schedule`).

    Raises ValueError for unknown names and for everything else.
    """
    kinds = kinds or (Recipe, PerLayer, Schedule)
    recipe = by_name(value) if isinstance(value, str) else value
    if isinstance(recipe, kinds):
        return recipe
    if any(value is function for function in _RECIPE_FUNCTIONS):
        call = f"fq.recipes.{getattr(value, '__name__', '')}"
        raise ValueError(f"{what}: got {call}, which makes a recipe; call it: {call}()")
    if isinstance(value, (PerLayer, Schedule)):
        raise ValueError(
            f"{what} wants {' or '.join(k.__name__ for k in kinds)}, got {value!r}; give "
            "fq.convert that one"
        )
    if remedy := recipe_remedy(value):
        kind = f"a {type(value).__name__}" if type(value) is not bool else repr(value)
        raise ValueError(f"{what} wants a recipe, got {kind}; pass {remedy}")
    is_ours = type(value).__module__.split(".")[0] == __name__.split(".")[0]
    kind = f", a {type(value).__name__} of one tensor" if is_ours else ""
    raise ValueError(
        f"{what} wants a recipe, got {value!r:.200}{kind}; pass fq.recipes.mxfp8() or the like, a "
        "fq.CustomRecipe, or a name such as 'mxfp8' or 'mxfp8/nvfp4'"
    )


# Named recipes #


def by_families(
    role: Role,
    forward: str,
    backward: str,
    grad_element: str | None = None,
    pow2: bool | None = None,
    scale_rounding: str | None = None,
    delayed: DelayedScaling | None = None,
    scale_rule: str | None = None,
    rotation: bool | None = None,
    stochastic: bool | None = None,
    square_blocks: bool | None = None,
    **others: str,
) -> HybridQuantizer | None:
    """Return the quantizer of a slot of a named recipe of a forward and a backward family.

    grad_element to scale_rule, others:  of the formats that have them (`with_options`).
    rotation:      of both operands of wgrad; stochastic: rounding of grad_output (None: if the
                   backward has 4 bits).
    square_blocks: of weights (None: if one family that prefers them serves both directions).
    """
    if role.tensor_type not in QUANTIZED_TYPES:
        return None
    f, b = family_of(forward), family_of(backward)
    is_gradient, is_weight = role.tensor_type == "grad_output", role.tensor_type == "weight"
    pair = ((b if is_gradient else f).vector, b.vector)
    if is_weight and square_blocks:
        pair = (f.square or f.vector, b.square or b.vector)
    elif is_weight and square_blocks is None and f == b:
        pair = (f.weight, b.weight)
    switches = dict(others, grad_element=grad_element, pow2=pow2, scale_rule=scale_rule)
    switches["scale_rounding"] = scale_rounding
    row, column = (
        Quantizer(with_options(fmt, role.tensor_type, switches), scaling=delayed or "current")
        for fmt in pair
    )
    if not is_weight and (b.rotates_wgrad if rotation is None else rotation):
        column = replace(column, rotation=True)
    if is_gradient and (b.rotates_wgrad if stochastic is None else stochastic):
        row, column = (replace(q, rounding="stochastic") for q in (row, column))
    return HybridQuantizer(row, column)


def named(name: str, forward: str, backward: str, options: dict, **arguments) -> Recipe:
    """Return the recipe of two families. Raises ValueError, naming the option or switch, for a
    value that means nothing in them."""
    families = family_of(forward), family_of(backward)  # refuses unknown names
    values = switches_of(*families, arguments.get("weight"))
    switches = {k: v for k, v in (options | arguments).items() if k in SWITCHES}
    options = {k: v for k, v in options.items() if k not in SWITCHES}
    check_names(name, options, f"; switches: {', '.join(values) or 'none'}")
    if options.get("boundary_slots"):
        raise ValueError(f"boundary_slots=True is for fq.CustomRecipe; {name} has no such slots")
    arguments = {k: v for k, v in arguments.items() if k not in SWITCHES}
    label = f"{name}({forward!r}, {backward!r})" if name == "hybrid" else name
    arguments |= read_switches(label, values, switches) | {"forward": forward, "backward": backward}
    return Recipe(name, by_families, tuple(sorted(arguments.items())), **options)


def identity(**options) -> Recipe:
    """Return the recipe of high precision everywhere: bit for bit the plain module."""
    return named("identity", "identity", "identity", options)


bf16 = identity


def fp8_current(grad_element: str = "e4m3", pow2: bool | None = None, **options) -> Recipe:
    """Return the recipe of FP8 with one fp32 scale per tensor, from its own amax."""
    chosen = {"grad_element": grad_element, "pow2": pow2}
    return named("fp8_current", "fp8_tensor", "fp8_tensor", options, **chosen)


def fp8_delayed(
    length: int = 1024, margin: int = 0, use: str = "max", grad_element: str = "e5m2", **options
) -> Recipe:
    """Return the recipe of FP8 with one fp32 scale per tensor, from a history of amaxes.

    length, margin, use:  of `fq.numerics.DelayedScaling`.
    """
    chosen = {"grad_element": grad_element, "delayed": DelayedScaling(length, margin, use)}
    return named("fp8_delayed", "fp8_tensor", "fp8_tensor", options, **chosen)


def fp8_row(pow2: bool | None = None, **options) -> Recipe:
    """Return the recipe of FP8 with one fp32 scale per row of each GEMM operand."""
    return named("fp8_row", "fp8_row", "fp8_row", options, pow2=pow2)


def fp8_block(pow2: bool | None = None, **options) -> Recipe:
    """Return the recipe of FP8 with 1x128 activations and gradients and 128x128 weights; scales are
    powers of two unless pow2=False."""
    return named("fp8_block", "fp8_block", "fp8_block", options, pow2=pow2)


def mxfp8(scale_rounding: str | None = None, **options) -> Recipe:
    """Return the recipe of OCP MXFP8: blocks of 32, e8m0 scales.

    Source: OCP Microscaling Formats v1.0.
    """
    return named("mxfp8", "mxfp8", "mxfp8", options, scale_rounding=scale_rounding)


def mxfp6(scale_rounding: str | None = None, grad_element: str | None = None, **options) -> Recipe:
    """Return the recipe of OCP MXFP6: blocks of 32, e8m0 scales, e2m3 elements.

    grad_element:  "e3m2" for gradients of a wider range.
    """
    chosen = {"scale_rounding": scale_rounding, "grad_element": grad_element}
    return named("mxfp6", "mxfp6", "mxfp6", options, **chosen)


def mxfp4(scale_rounding: str | None = None, **options) -> Recipe:
    """Return the recipe of OCP MXFP4: blocks of 32, e8m0 scales, stochastic rounding of gradients,
    rotated wgrad operands.

    Source: Tseng et al., Training LLMs with MXFP4, 2025.
    """
    return named("mxfp4", "mxfp4", "mxfp4", options, scale_rounding=scale_rounding)


def nvfp4(tail: float = 0.0, scale_rule: str | None = None, **options) -> Recipe:
    """Return the recipe of NVFP4 with square weight blocks, stochastic rounding of gradients,
    rotated wgrad operands.

    scale_rule:  None: block scales are the nearest e4m3. "fp8_exact": 1, 1.25 or 1.5 times a power
                 of two, also legal NVFP4, which Hopper multiplies exactly and at the rate of fp8.

    scale_per="row" gives activations and gradients a second-level scale per row of a GEMM operand:
    no token changes what others compute. four_over_six="mse" or "mae" maps the amax of each block
    to 6 or to 4, by the square or absolute error; "mse-weights" or "mae-weights": of weights only.
    """
    return named("nvfp4", "nvfp4", "nvfp4", {"tail": tail, **options}, scale_rule=scale_rule)


def hybrid(forward: str, backward: str, scale_rule: str | None = None, **options) -> Recipe:
    """Return the recipe of a forward and a backward family. scale_rule: see `nvfp4`."""
    return named("hybrid", forward, backward, options, scale_rule=scale_rule)


def custom(qfactory: Callable, **options) -> Recipe:
    """Return a recipe of your own: qfactory(role) -> Format | Quantizer | HybridQuantizer.

    qfactory:  a module-level function, because recipes are pickled and compared; options: those of
               `Recipe`. Raises ValueError for others.

    >>> def factory(role):
    ...     return "mxfp8" if role.tensor_type == "weight" else "fp8_tensor"
    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), fq.CustomRecipe(factory))
    """
    name = getattr(qfactory, "__qualname__", "custom")
    check_names(name, options)
    return Recipe(name, qfactory, **options)


_RECIPE_FUNCTIONS = identity, fp8_current, fp8_delayed, fp8_row, fp8_block, mxfp8, nvfp4, mxfp6
_RECIPE_FUNCTIONS += mxfp4, hybrid
# Names of functions whose recipes are `by_families` of their arguments.
NAMED = tuple(f.__name__ for f in _RECIPE_FUNCTIONS)
_BY_NAME = {f.__name__: f for f in _RECIPE_FUNCTIONS if f is not hybrid} | {"bf16": identity}


def names() -> list[str]:
    """Return the names for `by_name` of recipes; "forward/backward" pairs are others."""
    return sorted(_BY_NAME)


def by_name(name: str, **options) -> Recipe:
    """Return the recipe that a text names: "mxfp8", or rowwise and columnwise families,
    "mxfp8/nvfp4" (`hybrid`).

    Raises ValueError with the list of known names.
    """
    if name in _BY_NAME:
        return _BY_NAME[name](**options)
    forward, slash, backward = name.partition("/")
    if slash and "/" not in backward:
        return hybrid(forward.strip(), backward.strip(), **options)
    remedy = "" if recipe_remedy(name) is None else f"pass {recipe_remedy(name)}; "
    raise ValueError(
        f"unknown recipe {name!r}; {remedy}known recipes: {', '.join(sorted(_BY_NAME))}, or "
        f"forward/backward of the families {', '.join(FAMILIES)}"
    )


for _function in (*_RECIPE_FUNCTIONS, by_name):  # dynamo traces no recipe
    torch.compiler.assume_constant_result(_function)

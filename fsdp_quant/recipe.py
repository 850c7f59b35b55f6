# SPDX-License-Identifier: Apache-2.0
"""Recipes: which quantizer each tensor of a linear layer gets.

The three products of y = x W^T read six storages; a recipe names the quantizer of each:

    fprop  y  = x.rowwise          weight.rowwise
    dgrad  dx = grad_output.rowwise    weight.columnwise
    wgrad  dW = grad_output.columnwise x.columnwise

    recipe           input            weight                 grad_output
    identity()       identity         identity               identity
    fp8_current()    fp8_tensor       fp8_tensor             fp8_tensor (grad_element="e5m2"
    optional)
    fp8_delayed()    fp8_tensor       fp8_tensor             fp8_tensor e5m2, all with delayed
    scaling
    fp8_row()        fp8_row          fp8_row                fp8_row
    fp8_block()      fp8_1x128        fp8_128x128            fp8_1x128
    mxfp8()          mxfp8            mxfp8                  mxfp8
    mxfp6()          mxfp6            mxfp6                  mxfp6 (grad_element="e3m2" optional)
    mxfp4()          mxfp4 / +RHT     mxfp4                  mxfp4+SR / +SR+RHT
    nvfp4()          nvfp4 / +RHT     nvfp4_16x16            nvfp4+SR / +SR+RHT
    hybrid(F, B)     F / B            F / B                  B / B

SR is stochastic rounding, RHT the random Hadamard transform of both operands of wgrad, where it
cancels.

>>> fq.recipes.hybrid("mxfp8", "nvfp4").hybrid(fq.Role("linear", "weight"))
mxfp8 / nvfp4
"""

from __future__ import annotations

import fnmatch
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from .formats import FAMILIES, IDENTITY, SCALE_RULES, canonical_text, family_of, format_of
from .quantizer import HybridQuantizer, Quantizer, hybrid_of
from .scaling import DelayedScaling

TENSOR_TYPES = ("input", "weight", "grad_output", "output", "grad_input")
QUANTIZED_TYPES, BOUNDARY_TYPES = TENSOR_TYPES[:3], TENSOR_TYPES[3:]
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
OVERRIDE_VARIABLE = "FSDP_QUANT_BACKWARD_OVERRIDE"


@functools.cache
def default_override() -> str | None:
    """`backward_override` of recipes that do not say: FSDP_QUANT_BACKWARD_OVERRIDE, read once."""
    value = os.environ.get(OVERRIDE_VARIABLE) or None
    if value not in BACKWARD_OVERRIDES:
        wanted = " or ".join(map(repr, BACKWARD_OVERRIDES[1:]))
        raise ValueError(
            f"{OVERRIDE_VARIABLE}={value!r} in the environment; wanted {wanted}, or leave it out"
        )
    return value


@dataclass(frozen=True)
class Role:
    """What a quantizer is asked for.

    module_type:  "linear"; "grouped_linear" of an expert of `fq.GroupedLinear`; "quantize" of
                  `fq.Quantize`.
    tensor_type:  "input", "weight", "grad_output", or a boundary slot: "output", "grad_input". A
                  module asks for the slots it has: `fq.Linear` and experts the first three, and the
                  other two of a recipe with boundary_slots=True; `fq.Quantize` the other two.
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


@dataclass(frozen=True)
class Recipe:
    """A named `qfactory(role)` and the options of the products, compared by value.

    qfactory:             module-level function (role, **arguments) -> Format, its name, Quantizer,
                          HybridQuantizer or None (boundary slots).
    arguments:            its keyword arguments, sorted (name, value) pairs.
    backward_override:    None; "high_precision": the backward multiplies the original values;
                          "dequantized": it multiplies what the forward decoded. grad_output and
                          grad_input are not quantized in either. A recipe that does not say takes
                          `default_override()`.
    accuracy:             "fast", or "exact": only domains that decode exactly.
    anchor_tolerance:     error that anchors may add to a product, over that of its formats, before
                          it goes a rung further down (`modules.plan.LADDER`), in all layers alike,
                          as a step begins.
    save_original_input:  None: what the plan says; True: the input is saved and quantized again in
                          the backward. Under backward_override="dequantized" never: the backward
                          multiplies the saved codes of the forward.
    strict:               what runs is what the plan says, or it raises; False warns once and
                          counts.
    require_native:       refuse products that no tensor core computes, when the recipe is applied.
    compute_dtype:        dtype that the weight's quantizer sees (None: the master's own).
    tail:                 share of the converted layers, the last ones, that stay in identity.
    boundary_slots:       linear layers ask for "output" and "grad_input" too, and hand on decoded
                          values.
    key:                  a text that stands for the recipe while a graph is traced (`recipe_of`).

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
    anchor_tolerance: float = 0.02
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
                "qfactory must be a module-level function, because recipes are pickled and "
                f"compared; got {qualified or self.qfactory!r}: move it to a module and pass it by "
                "name"
            )
        if self.backward_override == "environment":
            object.__setattr__(self, "backward_override", default_override())
        if self.backward_override not in BACKWARD_OVERRIDES:
            raise ValueError(
                f"backward_override must be one of {BACKWARD_OVERRIDES}, got "
                f"{self.backward_override!r}"
            )
        if self.accuracy not in ("fast", "exact"):
            raise ValueError(f"accuracy must be 'fast' or 'exact', got {self.accuracy!r}")
        if not 0.0 <= self.tail <= 1.0:
            raise ValueError(f"tail is a share of the layers between 0 and 1, got {self.tail}")
        self._register()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._register()  # files of before keys have none

    def _register(self) -> None:
        object.__setattr__(self, "key", f"{self.name} {self.fingerprint()}")
        _RECIPES[self.key] = self

    def hybrid(self, role: Role) -> HybridQuantizer | None:
        """The quantizer of this role, `backward_override` applied; None for an empty boundary
        slot."""
        value = self.qfactory(role, **dict(self.arguments))
        if value is None:
            if role.tensor_type in QUANTIZED_TYPES:
                raise ValueError(
                    f"{self.name}: qfactory returned None for {role}; return 'identity' for a "
                    "tensor that is not quantized"
                )
            return None
        try:
            return _overridden(hybrid_of(value), role.tensor_type, self.backward_override)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{role.name}: {role.tensor_type}: {self.name} gave {value!r}: {error}"
            ) from error

    def for_layers(self, names: Sequence[str]) -> list[Recipe]:
        """The recipe of each layer in order: identity for the last `tail` of them (a part of a
        layer counts as one)."""
        keep = len(names) - math.ceil(self.tail * len(names) - 1e-9)
        rest = identity(compute_dtype=self.compute_dtype, strict=self.strict)
        return [self if i < keep else rest for i in range(len(names))]

    def at(self, step: int) -> Recipe:
        """What runs in a step: always this."""
        return self

    @property
    def phases(self) -> tuple[Recipe]:
        """Everything that `at` may return."""
        return (self,)

    def fingerprint(self) -> str:
        """A text that is equal for equal recipes, in any process."""
        factory = f"{self.qfactory.__module__}.{self.qfactory.__qualname__}"
        options = [
            (f, getattr(self, f))
            for f in self.__dataclass_fields__
            if f not in ("name", "qfactory", "arguments")
        ]
        return f"{factory}{canonical_text(self.arguments)} {canonical_text(options)}"

    def __repr__(self) -> str:
        given = list(self.arguments)
        defaults = {f.name: f.default for f in fields(self)[3:]} | {"backward_override": None}
        given += [
            (name, getattr(self, name))
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in given)})"


_RECIPES: dict[str, Recipe] = {}  # by key, of this process


def recipe_of(key: str) -> Recipe:
    """The recipe of a key. Raises ValueError for one that was made in a compiled region, where it
    is no object yet."""
    if key not in _RECIPES:
        raise ValueError(
            f"the recipe {key.split()[0]} is made inside a compiled region; make it outside, and "
            "enter it inside"
        )
    return _RECIPES[key]


def _overridden(hybrid: HybridQuantizer, tensor_type: str, override: str | None) -> HybridQuantizer:
    """`backward_override` as a rewrite of one slot: the same for every recipe and module."""
    if override is None:
        return hybrid
    if tensor_type in ("grad_output", "grad_input"):
        return hybrid_of(IDENTITY)
    if tensor_type not in ("input", "weight"):
        return hybrid
    source = "rowwise_dequantized" if override == "dequantized" else "original"
    return HybridQuantizer(hybrid.rowwise, Quantizer(IDENTITY), source)


# Recipes by layer and by step #


def matches(pattern: str, name: str) -> bool:
    """A layer's qualified name, its last component, or a glob."""
    return fnmatch.fnmatch(name, pattern) or name.rpartition(".")[2] == pattern


@dataclass(frozen=True)
class PerLayer:
    """A recipe by layer: by name, else among the first or the last layers, else `default`. Made by
    `per_layer`.

    named:        (pattern, recipe) pairs; the first that matches decides.
    first, last:  (number of layers, recipe).
    """

    default: Recipe
    named: tuple[tuple[str, Recipe], ...] = ()
    first: tuple[int, Recipe] | None = None
    last: tuple[int, Recipe] | None = None

    def __post_init__(self):
        _check_recipe("per_layer(default)", self.default)
        for what, (key, recipe) in [("named", n) for n in self.named] + [
            (what, rule) for what in ("first", "last") if (rule := getattr(self, what)) is not None
        ]:
            _check_recipe(f"per_layer({what}: {key!r})", recipe)
            if recipe.tail:
                raise ValueError(
                    f"per_layer({what}: {key!r}) is {recipe}; tail belongs to the default, or say "
                    "last="
                )
            if what != "named" and key < 1:
                raise ValueError(f"per_layer({what}=): a number of layers is positive, got {key}")

    def for_layers(self, names: Sequence[str]) -> list[Recipe]:
        """The recipe of each layer in order. Raises ValueError for a rule that takes no layer, or
        takes too many."""
        result = self.default.for_layers(names)
        ends = [n for rule in (self.first, self.last) if rule is not None for n in rule[:1]]
        if sum(ends) > len(names):
            raise ValueError(
                f"{self} takes {' and '.join(map(str, ends))} of {len(names)} layers; they overlap"
            )
        for rule, layers in ((self.first, range(len(names))), (self.last, range(len(names))[::-1])):
            for i in layers[: rule[0]] if rule is not None else ():
                result[i] = rule[1]
        for pattern, recipe in reversed(self.named):
            found = [i for i, name in enumerate(names) if matches(pattern, name)]
            if not found:
                raise ValueError(
                    f"{self}: {pattern!r} matches no layer; the model has {', '.join(names[:5])}"
                )
            for i in found:
                result[i] = recipe
        return result

    def at(self, step: int) -> PerLayer:
        return self

    @property
    def phases(self) -> tuple[PerLayer]:
        return (self,)

    def fingerprint(self) -> str:
        rules = [("default", "", self.default), *(("named", *n) for n in self.named)]
        rules += [
            (what, *rule) for what in ("first", "last") if (rule := getattr(self, what)) is not None
        ]
        return " ".join(f"{what} {key}: {recipe.fingerprint()};" for what, key, recipe in rules)

    def __repr__(self) -> str:
        given = [
            repr(self.default),
            *(["{" + ", ".join(f"{k!r}: {r}" for k, r in self.named) + "}"] if self.named else []),
        ]
        given += [
            f"{what}={rule}"
            for what in ("first", "last")
            if (rule := getattr(self, what)) is not None
        ]
        return f"per_layer({', '.join(given)})"


def per_layer(
    default: Recipe | str,
    named: Mapping[str, Recipe | str] | None = None,
    first: tuple[int, Recipe | str] | None = None,
    last: tuple[int, Recipe | str] | None = None,
) -> PerLayer:
    """`default`, but others by name pattern (as `fq.convert(skip=)` takes them), for the first and
    the last layers.

    Layers are counted in the order of `named_modules`, a `GroupedLinear` as one.
    """
    ends = [
        None if rule is None else (rule[0], as_recipe(rule[1], "per_layer", Recipe))
        for rule in (first, last)
    ]
    rules = tuple(
        (pattern, as_recipe(recipe, f"per_layer({pattern!r})", Recipe))
        for pattern, recipe in (named or {}).items()
    )
    return PerLayer(as_recipe(default, "per_layer(default)", Recipe), rules, *ends)


@dataclass(frozen=True)
class Schedule:
    """A recipe by step. Made by `schedule`.

    switches:  (first step, step behind the last or None, recipe), in order; `base` runs in all
               other steps.
    """

    base: Recipe | PerLayer
    switches: tuple[tuple[int, int | None, Recipe | PerLayer], ...]

    def __post_init__(self):
        for recipe in self.phases:
            _check_recipe("schedule", recipe, PerLayer)
        for start, stop, recipe in self.switches:
            if start < 0 or (stop is not None and stop <= start):
                raise ValueError(f"schedule: {recipe} from step {start} to {stop} runs in no step")
        for (start, stop, recipe), (later, _, other) in zip(self.switches, self.switches[1:]):
            if stop is None or later < stop:
                raise ValueError(
                    f"schedule: {recipe} from step {start} to {stop or 'the end'} overlaps {other} "
                    f"from step {later}; a step has one recipe"
                )

    def at(self, step: int) -> Recipe | PerLayer:
        """What runs in a step."""
        for start, stop, recipe in self.switches:
            if start <= step and (stop is None or step < stop):
                return recipe
        return self.base

    @property
    def phases(self) -> tuple[Recipe | PerLayer, ...]:
        return (self.base, *(recipe for *_, recipe in self.switches))

    def fingerprint(self) -> str:
        return f"{self.base.fingerprint()} " + " ".join(
            f"[{a}, {b}) {r.fingerprint()}" for a, b, r in self.switches
        )

    def __repr__(self) -> str:
        return (
            f"schedule({self.base}, {', '.join(f'({a}, {b}, {r})' for a, b, r in self.switches)})"
        )


def schedule(
    base: Recipe | PerLayer | str, *switches: tuple, total_steps: int | None = None
) -> Schedule:
    """`base`, but other recipes in ranges of steps: (first, behind the last or None for the end,
    recipe).

    first, behind the last:  steps (int), or fractions of `total_steps` (float; 1.0 is the end, and
                             stays).

    The step is `fq.begin_step`'s, else the number of training forwards of the model: every rank
    switches before the same one. A model that torch.compile traces as a whole, or that runs by
    pieces, needs `fq.begin_step`. Raises ValueError for ranges that overlap or hold no step, and
    for fractions of an unknown total.
    """

    def step_of(at):
        if at is None or at == 1.0 and isinstance(at, float):
            return None
        if not isinstance(at, float):
            return int(at)
        if total_steps is None or not 0.0 <= at < 1.0:
            raise ValueError(
                f"schedule: {at} is a fraction of the steps; give total_steps=, and fractions from "
                "0.0 to 1.0"
            )
        return math.ceil(at * total_steps - 1e-9)

    kinds = Recipe, PerLayer
    made = [
        (step_of(start), step_of(stop), as_recipe(recipe, "schedule", *kinds))
        for start, stop, recipe in switches
    ]
    if any(start is None for start, *_ in made):
        raise ValueError("schedule: a range needs a first step; the end has none")
    return Schedule(as_recipe(base, "schedule", *kinds), tuple(sorted(made, key=lambda s: s[0])))


def _check_recipe(what: str, value, *others: type) -> None:
    if not isinstance(value, (Recipe, *others)):
        raise ValueError(f"{what} wants a recipe (fq.recipes.*), got {value!r}")


def as_recipe(value, what: str = "recipe", *kinds: type) -> Recipe | PerLayer | Schedule:
    """A recipe that is given, or that a text names (`by_name`).

    what:   who asks, for errors.
    kinds:  classes that it takes (default: `Recipe`, `PerLayer` and `Schedule`).

    Raises ValueError for unknown names and for everything else.
    """
    kinds = kinds or (Recipe, PerLayer, Schedule)
    if isinstance(value, str):
        return _by_text(value)
    if isinstance(value, kinds):
        return value
    if any(value is made for made in _RECIPE_FUNCTIONS):
        name = value.__name__
        raise ValueError(
            f"{what}: got the function fq.recipes.{name}, which makes a recipe; call it: "
            f"fq.recipes.{name}()"
        )
    if isinstance(value, (PerLayer, Schedule)):
        raise ValueError(
            f"{what} wants {' or '.join(k.__name__ for k in kinds)}, got {value!r}; give "
            "fq.convert that one"
        )
    raise ValueError(
        f"{what} wants a recipe, got {value!r}; pass fq.recipes.mxfp8() or the like, a "
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
) -> HybridQuantizer | None:
    """The slots of every named recipe: one family for the forward, one for the backward."""
    if role.tensor_type not in QUANTIZED_TYPES:
        return None
    f, b = family_of(forward), family_of(backward)
    if role.tensor_type == "weight":
        pair = (f.weight, b.weight) if f == b else (f.vector, b.vector)
        return HybridQuantizer(
            *(_quantizer(fmt, pow2, scale_rounding, delayed, scale_rule) for fmt in pair)
        )
    row, column = (b, b) if role.tensor_type == "grad_output" else (f, b)
    element = grad_element if role.tensor_type == "grad_output" else None
    rowwise, columnwise = (
        _quantizer(fam.vector, pow2, scale_rounding, delayed, scale_rule, element)
        for fam in (row, column)
    )
    if b.rotates:
        columnwise = replace(columnwise, rotation=True)
        if role.tensor_type == "grad_output":
            rowwise, columnwise = (replace(q, rounding="stochastic") for q in (rowwise, columnwise))
    return HybridQuantizer(rowwise, columnwise)


def _quantizer(fmt, pow2, scale_rounding, delayed, scale_rule, element=None) -> Quantizer:
    changes = {}
    if pow2 is not None and fmt.has_fp32_scales:
        changes["pow2"] = pow2
    if scale_rounding is not None and fmt.scale == "e8m0":
        changes["scale_rounding"] = scale_rounding
    if scale_rule is not None and fmt.tensor_scale:
        changes["scale_rule"] = scale_rule
    if element is not None and fmt.is_quantized:
        changes["element"] = element
    return Quantizer(format_of(fmt, **changes), scaling=delayed or "current")


def _named(name: str, forward: str, backward: str, options: dict, **arguments) -> Recipe:
    families = family_of(forward), family_of(backward)  # unknown names are refused here
    known = [f.name for f in fields(Recipe)[3:]]
    if unknown := options.keys() - set(known):
        raise ValueError(
            f"{name} has no option {', '.join(sorted(unknown))}; options of all recipes: "
            f"{', '.join(known)}"
        )
    rule = arguments.get("scale_rule")
    if rule is not None and rule not in SCALE_RULES:
        raise ValueError(
            f"{name}: scale_rule must be one of {', '.join(SCALE_RULES)}, got {rule!r}"
        )
    if rule is not None and not any(family.vector.tensor_scale for family in families):
        raise ValueError(
            f"{name}({forward!r}, {backward!r}) has no 4-bit format, whose scales "
            f"scale_rule={rule!r} would choose"
        )
    if options.get("boundary_slots"):
        raise ValueError(
            f"{name} has no output and no grad_input; boundary_slots=True is for an "
            "fq.CustomRecipe that has"
        )
    given = {
        "forward": forward,
        "backward": backward,
        **{k: v for k, v in arguments.items() if v is not None},
    }
    return Recipe(name, by_families, tuple(sorted(given.items())), **options)


def identity(**options) -> Recipe:
    """High precision everywhere: bit for bit the plain module."""
    return _named("identity", "identity", "identity", options)


bf16 = identity


def fp8_current(grad_element: str = "e4m3", pow2: bool | None = None, **options) -> Recipe:
    """One fp32 scale a tensor, from its own amax."""
    return _named(
        "fp8_current", "fp8_tensor", "fp8_tensor", options, grad_element=grad_element, pow2=pow2
    )


def fp8_delayed(
    length: int = 1024, margin: int = 0, use: str = "max", grad_element: str = "e5m2", **options
) -> Recipe:
    """One fp32 scale a tensor, from a history of amaxes."""
    delayed = DelayedScaling(length, margin, use)
    return _named(
        "fp8_delayed",
        "fp8_tensor",
        "fp8_tensor",
        options,
        grad_element=grad_element,
        delayed=delayed,
    )


def fp8_row(pow2: bool | None = None, **options) -> Recipe:
    """One fp32 scale a row of each GEMM operand."""
    return _named("fp8_row", "fp8_row", "fp8_row", options, pow2=pow2)


def fp8_block(pow2: bool | None = None, **options) -> Recipe:
    """1x128 activations and gradients, 128x128 weights; powers of two unless pow2=False."""
    return _named("fp8_block", "fp8_block", "fp8_block", options, pow2=pow2)


def mxfp8(scale_rounding: str | None = None, **options) -> Recipe:
    """OCP MXFP8: blocks of 32, e8m0 scales."""
    return _named("mxfp8", "mxfp8", "mxfp8", options, scale_rounding=scale_rounding)


def mxfp6(scale_rounding: str | None = None, grad_element: str | None = None, **options) -> Recipe:
    """OCP MXFP6: blocks of 32, e8m0 scales, e2m3 elements (grad_element="e3m2" for gradients)."""
    return _named(
        "mxfp6", "mxfp6", "mxfp6", options, scale_rounding=scale_rounding, grad_element=grad_element
    )


def mxfp4(scale_rounding: str | None = None, **options) -> Recipe:
    """OCP MXFP4: blocks of 32, e8m0 scales, stochastic rounding of gradients, rotated wgrad
    operands.

    Source: Tseng et al., Training LLMs with MXFP4, 2025.
    """
    return _named("mxfp4", "mxfp4", "mxfp4", options, scale_rounding=scale_rounding)


def nvfp4(tail: float = 0.0, scale_rule: str | None = None, **options) -> Recipe:
    """NVFP4 with square weight blocks, stochastic rounding of gradients, rotated wgrad operands.

    scale_rule:  None: block scales are the nearest e4m3. "fp8_exact": 1, 1.25 or 1.5 times a power
                 of two, also legal NVFP4, which Hopper multiplies exactly and at the rate of fp8.
    """
    return _named("nvfp4", "nvfp4", "nvfp4", {"tail": tail, **options}, scale_rule=scale_rule)


def hybrid(forward: str, backward: str, scale_rule: str | None = None, **options) -> Recipe:
    """One family for the forward, another for the backward; hybrid(F, F) is F. scale_rule: of
    `nvfp4`, in either."""
    return _named("hybrid", forward, backward, options, scale_rule=scale_rule)


def custom(qfactory: Callable, **options) -> Recipe:
    """A recipe of your own: qfactory(role) -> Format | Quantizer | HybridQuantizer (a module-level
    function).

    >>> def factory(role):
    ...     return "mxfp8" if role.tensor_type == "weight" else "fp8_tensor"
    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), fq.CustomRecipe(factory))
    """
    name = getattr(qfactory, "__qualname__", "custom")
    return Recipe(name, qfactory, **options)


# Functions whose recipes are `by_families` of their arguments.
NAMED = (
    "identity",
    "fp8_current",
    "fp8_delayed",
    "fp8_row",
    "fp8_block",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "hybrid",
)
_BY_NAME = {
    f.__name__: f for f in (identity, fp8_current, fp8_delayed, fp8_row, fp8_block, mxfp8, nvfp4)
} | {"bf16": identity}
_WITHOUT_EXPERTS = {f.__name__: f for f in (mxfp6, mxfp4)}
_RECIPE_FUNCTIONS = (*_BY_NAME.values(), *_WITHOUT_EXPERTS.values(), hybrid)


def names() -> list[str]:
    """Names that `by_name` takes, of recipes whose experts multiply in one product."""
    return sorted(_BY_NAME)


def by_name(name: str, **options) -> Recipe:
    """The recipe that a text names: "mxfp8", or rowwise and columnwise families, "mxfp8/nvfp4"
    (`hybrid`).

    Raises ValueError with the list of known names.
    """
    made = _BY_NAME.get(name) or _WITHOUT_EXPERTS.get(name)
    if made is not None:
        return made(**options)
    sides = [side.strip() for side in name.split("/")]
    if len(sides) == 2:
        return hybrid(*sides, **options)
    known = ", ".join(sorted([*_BY_NAME, *_WITHOUT_EXPERTS]))
    raise ValueError(
        f"unknown recipe {name!r}; known recipes: {known}, or forward/backward of the families "
        f"{', '.join(FAMILIES)}"
    )


# a recipe is no object yet while a graph is traced
_by_text = torch.compiler.assume_constant_result(by_name)

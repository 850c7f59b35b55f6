# SPDX-License-Identifier: Apache-2.0
"""Select the modules to observe, plan them for another recipe, and read the rows per layer of a
call that a forward hook sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature

from torch import Tensor, nn

from ..linear.grouped import sizes_of
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.plan import GemmPlan, build_plan
from ..linear.routes import tokens_of
from ..models.set_recipe import converted_units, of_model
from ..recipe import PerLayer, Recipe, as_recipe
from ..roles import Selector, selected, selectors_of
from ..tensor import torch_compat
from ..tensor.torch_compat import local_of

Unit = tuple[str, nn.Module, Sequence[Linear]]


def units_of(model: nn.Module, patterns: Selector | Iterable[Selector] | None = None) -> list[Unit]:
    """Return (name, module to hook, its layers) of `converted_units`.

    patterns:  of the units to return (`roles.Selector`), one or several. None: all.

    Raises ValueError for a pattern without layers.
    """
    units = [
        (name.replace("_orig_mod.", ""), model.get_submodule(name), layers)
        for name, layers in converted_units(model).items()
    ]
    if patterns is None:
        return units
    names = [unit[0] for unit in units]
    modules = {n.replace("_orig_mod.", ""): m for n, m in model.named_modules()}
    selectors = selectors_of("layers", patterns)
    chosen = {name for s in selectors for name in selected("layers", s, names, modules)}
    return [unit for unit in units if unit[0] in chosen]


def plans_of(
    model: nn.Module, units: list[Unit], what_if: Recipe | PerLayer | str
) -> dict[str, GemmPlan]:
    """Return the plan per unit that another recipe would give it."""
    recipe = as_recipe(what_if, "inspect: what_if", Recipe, PerLayer)
    names = [name for name, _, _ in units]
    recipes = of_model(recipe, names, model).for_layers(names)
    plans = {}
    for (name, _, layers), of_layer in zip(units, recipes):
        plans[name] = planned = build_plan(of_layer, name, module_type=layers[0].module_type)
        if planned.is_delayed or planned.weight.delayed_directions:
            raise ValueError(
                f"inspect: what_if is {of_layer}, whose delayed scales follow the history of a run "
                "with it; give a recipe that scales by current amaxes, such as 'fp8_current'"
            )
    return plans


def call_of(
    module: nn.Module, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor, list[int] | None, float] | None:
    """Return (input, rows that are multiplied, how many per expert, scale of the output) of a call
    that a forward hook saw. Waits for the device if the call's splits are a tensor there.

    None: attention to other keys, which multiplies parts of its weight in high precision.
    """
    call = signature(type(module).forward).bind(module, *args, **kwargs).arguments
    _, x, *_ = call.values()
    if call.get("key", x) is not x:
        return None
    routes = call.get("routes")
    rows = x.detach()[tokens_of(*routes)] if routes else x
    sizes = None
    if isinstance(module, GroupedLinear):
        splits = call["splits"]
        sizes = sizes_of([0, *splits.tolist()]) if isinstance(splits, Tensor) else list(splits)
    return x, rows, sizes, call.get("scale", 1.0)


def rows_by_layer(
    layers: Sequence[Linear], x: Tensor, sizes: list[int] | None
) -> list[tuple[Linear, Tensor]]:
    """Return each layer with this rank's rows [M, cols] of x [.., cols] that it reads, if any, in
    the dtype of autocast."""
    rows = local_of(x).detach().reshape(-1, x.shape[-1])
    if (dtype := torch_compat.autocast_dtype(x.device)) is not None:
        rows = rows.to(dtype)
    pairs = zip(layers, [rows] if sizes is None else rows.split(sizes))
    return [(layer, part) for layer, part in pairs if len(part)]

# SPDX-License-Identifier: Apache-2.0
"""Arguments of Megatron's command line that fit these layers, and the recipe as one of them."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch

from ... import recipe as recipes
from ...recipe import Recipe, as_recipe

_OPTION = "--fsdp-quant-recipe"


def arguments(recipe: Recipe | str, *, gathers_codes: bool = False) -> list[str]:
    """What Megatron's command line says for layers of this recipe: its own flags, and the recipe
    (`add_arguments`).

    gathers_codes:  for `gather.gather_codes` too.
    Raises ValueError for a recipe that is not written with names and numbers; give that to
    `gpt_layer_spec` in Python.
    """
    recipe = as_recipe(recipe, "arguments", Recipe)
    own = ["--transformer-impl", "local", "--bf16", "--no-gradient-accumulation-fusion"]
    own += (
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if gathers_codes
        else []
    )
    given = dict(recipe.arguments)
    if recipe.name != "hybrid":
        given = {k: v for k, v in given.items() if k not in ("forward", "backward")}
    if "delayed" in given:
        given |= vars(given.pop("delayed"))
    given |= {
        f.name: getattr(recipe, f.name)
        for f in fields(recipe)[3:]
        if getattr(recipe, f.name) != f.default
    }
    written = [recipe.name, *(f"{k}={v}" for k, v in given.items())]
    try:
        same = _recipe(written) == recipe
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ValueError(
            f"{recipe!r} cannot be written as arguments; pass it to gpt_layer_spec in a file for "
            "--spec"
        )
    return [*own, _OPTION, *written]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`--fsdp-quant-recipe NAME key=value ...`, for Megatron's `extra_args_provider`; read by
    `recipe_of`."""
    parser.add_argument(_OPTION, nargs="+", default=["identity"], metavar=("NAME", "KEY=VALUE"))
    return parser


def recipe_of(args) -> Recipe:
    """The recipe of parsed arguments. Raises ValueError for names that no recipe has."""
    return _recipe(args.fsdp_quant_recipe)


def _recipe(written: Sequence[str]) -> Recipe:
    name, options = written[0], dict(pair.split("=", 1) for pair in written[1:])
    made = recipes.hybrid if name == "hybrid" else partial(recipes.by_name, name)
    return made(**{key: _value(text) for key, text in options.items()})


def _value(text: str) -> object:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

# SPDX-License-Identifier: Apache-2.0
"""Arguments of Megatron's command line that fit these layers, and the recipe as one of them."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import torch

from ... import recipe as recipes
from ...recipe import Recipe, as_recipe

_OPTION = "--fsdp-quant-recipe"


def arguments(recipe: Recipe | str, *, gathers_codes: bool = False) -> list[str]:
    """Megatron's command line for layers of this recipe: its own flags, and `--fsdp-quant-recipe`.

    gathers_codes:  add the flags that `gather.gather_codes` needs.
    Raises ValueError for a recipe that names and numbers do not describe; pass that one to
    `gpt_layer_spec`.
    """
    chosen = as_recipe(recipe, "arguments", Recipe)
    own = ["--transformer-impl", "local", "--bf16", "--no-gradient-accumulation-fusion"]
    own += (
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if gathers_codes
        else []
    )
    given = dict(chosen.arguments)
    if chosen.name != "hybrid":
        given = {k: v for k, v in given.items() if k not in ("forward", "backward")}
    if "delayed" in given:
        given |= vars(given.pop("delayed"))
    given |= {
        f.name: getattr(chosen, f.name)
        for f in fields(chosen)[3:]
        if getattr(chosen, f.name) != f.default
    }
    written = [chosen.name, *(f"{k}={v}" for k, v in given.items())]
    try:
        same = _recipe(written) == chosen
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ValueError(
            f"{chosen!r} cannot be written as arguments; pass it to gpt_layer_spec in a file for "
            "--spec"
        )
    return [*own, _OPTION, *written]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--fsdp-quant-recipe NAME key=value ...`; pass it as Megatron's `extra_args_provider`."""
    parser.add_argument(_OPTION, nargs="+", default=["identity"], metavar=("NAME", "KEY=VALUE"))
    return parser


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of parsed arguments. Raises ValueError for names that no recipe has."""
    return _recipe(args.fsdp_quant_recipe)


def _recipe(written: Sequence[str]) -> Recipe:
    name, options = written[0], dict(pair.split("=", 1) for pair in written[1:])
    make: Callable[..., Recipe] = recipes.hybrid
    if name != "hybrid":
        make = partial(recipes.by_name, name)
    return make(**{key: _value(text) for key, text in options.items()})


def _value(text: str) -> object:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

# SPDX-License-Identifier: Apache-2.0
"""Arguments of Megatron's command line that fit these layers, and the recipe as one of them."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from ... import recipe as recipes
from ...recipe import Recipe, as_recipe

_OPTION = "--fsdp-quant-recipe"


def arguments(recipe: Recipe | str, *, gathers_codes: bool = False) -> list[str]:
    """Return Megatron's command line for layers of a recipe: its flags and `--fsdp-quant-recipe`.

    gathers_codes:  add the flags that `gather.gather_codes` needs.
    Raises ValueError for a recipe that names and numbers do not describe; pass that one to
    `gpt_layer_spec`.
    """
    chosen = as_recipe(recipe, "arguments", Recipe)
    flags = ["--transformer-impl", "local", "--bf16", "--no-gradient-accumulation-fusion"]
    flags.append("--no-persist-layer-norm")  # which the local RMSNorm refuses
    if gathers_codes:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    options = dict(chosen.arguments)
    if chosen.name != "hybrid":
        options = {k: v for k, v in options.items() if k not in ("forward", "backward")}
    if "delayed" in options:
        options |= vars(options.pop("delayed"))
    options |= {
        f.name: getattr(chosen, f.name)
        for f in fields(chosen)[3:]
        if getattr(chosen, f.name) != f.default
    }
    written = [chosen.name, *(f"{k}={v}" for k, v in options.items())]
    try:
        same = _recipe(written) == chosen
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ValueError(
            f"{chosen!r} cannot be written as arguments; pass it to gpt_layer_spec in a file for "
            "--spec"
        )
    return [*flags, _OPTION, *written]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--fsdp-quant-recipe NAME key=value ...`; pass it as Megatron's `extra_args_provider`."""
    parser.add_argument(_OPTION, nargs="+", default=["identity"], metavar=("NAME", "KEY=VALUE"))
    return parser


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe of parsed arguments. Raises ValueError for names that no recipe has."""
    return _recipe(args.fsdp_quant_recipe)


def _recipe(written: Sequence[str]) -> Recipe:
    name, pairs = written[0], (pair.split("=", 1) for pair in written[1:])
    options = {key: _value(text) for key, text in pairs}
    return recipes.hybrid(**options) if name == "hybrid" else recipes.by_name(name, **options)


def _value(text: str) -> Any:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

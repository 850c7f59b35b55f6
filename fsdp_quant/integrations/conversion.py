# SPDX-License-Identifier: Apache-2.0
"""`convert_once`: convert the model that a trainer is given, unless it is converted."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..models.convert import convert
from ..models.steps import converted_modules
from ..recipe import PerLayer, Recipe, Schedule


def convert_once(
    model: nn.Module,
    recipe: Recipe | PerLayer | Schedule | str | None,
    options: dict[str, Any],
    receiver: str,
) -> nn.Module:
    """Convert a plain model with a recipe and options of `fq.convert`; return a converted one.

    Raises ValueError, naming the receiver of the recipe, if the recipe is given twice or never.
    """
    if (recipe is None) == (not converted_modules(model)) or (recipe is None and options):
        raise ValueError(
            f"give {receiver} the recipe of a plain model, or neither recipe nor options of "
            "fq.convert for a model that it has converted"
        )
    return model if recipe is None else convert(model, recipe, **options)

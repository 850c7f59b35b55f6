# SPDX-License-Identifier: Apache-2.0
"""accelerate: `prepare` a model that is converted, and its state in `accelerator.save_state`."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch import nn

from ..models.convert import convert_once
from ..recipe import PerLayer, Recipe, Schedule
from ..tensor.quantized_tensor import addresses_are_names
from ..training.training_state import TrainingState


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | PerLayer | Schedule | str | None = None,
    *,
    allow_recipe_change: bool = False,
    **convert_options,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Convert a model and call `accelerator.prepare(model, optimizer)`.

    recipe:  None: the model is already converted.
    allow_recipe_change:  load a state of another recipe, or of a training without this `prepare`.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    From then on, `accelerator.save_state` and `load_state` save and load `fq.state_dict` of all
    ranks, after parameters and optimizers.

    Raises ValueError for a recipe that is given twice or never.
    """
    model = convert_once(model, recipe, convert_options, "prepare")
    state = TrainingState(model, allow_recipe_change)
    accelerator.register_for_checkpointing(state)
    if allow_recipe_change:
        _let_it_be_missing(accelerator, state)
    with addresses_are_names():  # accelerate identifies parameters by their addresses
        return accelerator.prepare(model, optimizer)


def _let_it_be_missing(accelerator: Accelerator, state: TrainingState) -> None:
    """Load folders that have all custom states but this one, whose number is of another then."""
    registered: list[object] = accelerator._custom_objects
    place = registered.index(state)

    def before_load(models: list[nn.Module], folder: str) -> None:
        before_save()
        files = [name for name in os.listdir(folder) if name.startswith("custom_checkpoint_")]
        if len(files) == len(registered) - 1:
            registered.remove(state)

    def before_save(*_: object) -> None:
        if state not in registered:
            registered.insert(place, state)

    accelerator.register_load_state_pre_hook(before_load)
    accelerator.register_save_state_pre_hook(before_save)

# SPDX-License-Identifier: Apache-2.0
"""accelerate: `prepare` a model that is converted, and its state in `accelerator.save_state`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from ..recipe import PerLayer, Recipe, Schedule
from ..tensor.quantized_tensor import addresses_are_names
from ..training.training_state import TrainingState
from .conversion import convert_once


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | PerLayer | Schedule | str | None = None,
    **convert_options,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Convert a model and call `accelerator.prepare(model, optimizer)`.

    recipe:  None: the model is already converted.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    From then on, `accelerator.save_state` and `load_state` save and load `fq.state_dict` of all
    ranks, after parameters and optimizers.

    Raises ValueError for a recipe that is given twice or never.
    """
    model = convert_once(model, recipe, convert_options, "prepare")
    accelerator.register_for_checkpointing(TrainingState(model))
    with addresses_are_names():  # accelerate identifies parameters by their addresses
        return accelerator.prepare(model, optimizer)

# SPDX-License-Identifier: Apache-2.0
"""accelerate: `prepare` a model that is converted, and its state in `accelerator.save_state`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from ..modules.convert import convert
from ..modules.steps import converted_modules
from ..recipe import PerLayer, Recipe, Schedule
from ..tensor.quantized_tensor import addresses_are_names
from .rank_states import gather_state, load_gathered_state


class _State:
    """What `accelerator.save_state` and `load_state`, after parameters and optimizers, do with
    `fq.state_dict` on every rank."""

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict:
        return gather_state(self._model)

    def load_state_dict(self, state: dict) -> None:
        load_gathered_state(self._model, state)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | PerLayer | Schedule | None = None,
    **convert_options,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare(model, optimizer)` of a model that is converted with `recipe`.

    recipe:  None: the model was converted before.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    `accelerator.save_state` and `load_state` then have `fq.state_dict` of all ranks.

    Raises ValueError where the recipe is given twice or never.
    """
    if recipe is not None:
        convert(model, recipe, **convert_options)
    elif convert_options or not converted_modules(model):
        raise ValueError(
            "give prepare the recipe, or a model that fq.convert(model, recipe) has converted, and "
            "no options of it"
        )
    accelerator.register_for_checkpointing(_State(model))
    with addresses_are_names():  # accelerate finds parameters again by their addresses
        return accelerator.prepare(model, optimizer)

# SPDX-License-Identifier: Apache-2.0
"""`Callback`: transformers' Trainer, and TRL's trainers, which are built on it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..modules.convert import convert
from ..modules.hold import hold
from ..modules.steps import converted_modules
from ..modules.training_steps import begin_step, skip_step
from ..recipe import PerLayer, Recipe, Schedule
from .rank_states import gather_state, load_gathered_state

FILE = "fsdp_quant.pt"  # in each checkpoint folder


class Callback(TrainerCallback):
    """Train the model of a `Trainer` with `recipe`:
    `Trainer(..., callbacks=[Callback(recipe, skip=["lm_head"])])`.

    recipe:       of `fq.convert`, which the Trainer's model is given as the Trainer is made. None:
                  the model was converted before.
    hold:         codes of weights are made once per optimizer step (`fq.hold`). None: where several
                  micro-batches make up a step.
    resume_from:  folder of the checkpoint that `train(resume_from_checkpoint=...)` is given, where
                  that is neither `args.resume_from_checkpoint` nor a checkpoint in
                  `args.output_dir`.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    Steps are the Trainer's: random bits and schedules follow `state.global_step`, and a step that a
    GradScaler skips is dropped. Each checkpoint holds `fq.state_dict` of all ranks in `FILE`, which
    a resumed training loads.

    Raises ValueError where the recipe is given twice or never, and at a resume from a checkpoint
    without `FILE`.
    """

    def __init__(
        self,
        recipe: Recipe | PerLayer | Schedule | None = None,
        *,
        hold: bool | None = None,
        resume_from: str | None = None,
        **convert_options,
    ):
        if recipe is None and convert_options:
            raise ValueError(
                f"{sorted(convert_options)} are options of fq.convert, and Callback was given no "
                "recipe"
            )
        self.recipe, self.hold, self.resume_from, self.convert_options = (
            recipe,
            hold,
            resume_from,
            convert_options,
        )
        self._converted: Callable[[], nn.Module | None] = lambda: None  # a weak reference
        self._held, self._micro_batch, self._loss_scale = contextlib.ExitStack(), 0, 1.0

    def _convert(self, model: nn.Module) -> None:
        if model is self._converted():
            return
        if converted_modules(model):
            if self.recipe is not None:
                raise ValueError(
                    "the Trainer's model was converted before; give Callback no recipe, or the "
                    "Trainer the plain model"
                )
        elif self.recipe is None:
            raise ValueError(
                "the Trainer's model has no fq.Linear; give Callback a recipe, or call "
                "fq.convert(model, recipe)"
            )
        else:
            convert(model, self.recipe, **self.convert_options)
        self._converted = weakref.ref(model)

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model=None,
        **kwargs,
    ):
        if model is not None:
            self._convert(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model=None,
        **kwargs,
    ):
        self._held.close()  # of a training that raised
        self._convert(model)  # `model_init` makes another for each training
        if state.global_step:
            load_gathered_state(
                model, torch.load(self._file(args, state), map_location="cpu", weights_only=True)
            )

    def _file(self, args: TrainingArguments, state: TrainerState) -> str:
        """Path of the state in the checkpoint that this training resumes from, of which the Trainer
        tells the step alone."""
        own = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        folders = [self.resume_from] if self.resume_from else [args.resume_from_checkpoint, own]
        paths = [os.path.join(folder, FILE) for folder in folders if isinstance(folder, str)]
        for path in paths:
            if os.path.isfile(path):
                return path
        raise ValueError(
            f"resumed at step {state.global_step}, but there is no {' and no '.join(paths)}; give "
            "Callback(resume_from=) the folder of a checkpoint that was written with this callback"
        )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model=None,
        **kwargs,
    ):
        self._micro_batch = 0
        begin_step(state.global_step)
        if args.gradient_accumulation_steps > 1 if self.hold is None else self.hold:
            self._held.enter_context(hold(model))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ):
        self._micro_batch += 1
        begin_step(state.global_step, micro_batch=self._micro_batch)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer=None,
        **kwargs,
    ):
        self._held.close()
        self._loss_scale = _loss_scale(optimizer)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer=None,
        **kwargs,
    ):
        # `step_was_skipped` is False under fused optimizers
        if _loss_scale(optimizer) < self._loss_scale:
            skip_step()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ):
        self._held.close()  # the training was stopped between micro-batches

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model=None,
        **kwargs,
    ):
        if args.save_only_model or state.is_hyper_param_search:  # neither is resumed
            return
        gathered = gather_state(model)
        if args.should_save:
            torch.save(
                gathered,
                os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", FILE),
            )


def _loss_scale(optimizer: object) -> float:
    """Of the GradScaler of accelerate's optimizer; 1 without one."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()

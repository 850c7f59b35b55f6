# SPDX-License-Identifier: Apache-2.0
"""`Callback`: transformers' Trainer, and TRL's trainers, which are built on it."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..inspection.recorder import Inspection, Numbers, inspect
from ..linear.training_steps import begin_step, count_passes, skip_step
from ..models.convert import convert_once
from ..recipe import PerLayer, Recipe, Schedule
from ..training.hold import hold
from ..training.training_state import TrainingState

FILE = "fsdp_quant.pt"  # in each checkpoint folder


class Callback(TrainerCallback):
    """Train the model of a `Trainer` with `recipe`:
    `Trainer(..., callbacks=[Callback(recipe, skip=["lm_head"])])`.

    recipe:       for `fq.convert`, called when the Trainer is created. None: the model is already
                  converted.
    hold:         quantize weights once per optimizer step (`fq.hold`). None: if a step has several
                  micro-batches.
    resume_from:  folder of the checkpoint of `train(resume_from_checkpoint=...)`, if that is
                  neither `args.resume_from_checkpoint` nor in `args.output_dir`.
    allow_recipe_change:  resume from a checkpoint of another recipe, or of a training without this
                          callback.
    inspect:      steps between samples of `fq.inspect`, or its options. The numbers go to what
                  reports (`args.report_to`: W&B, TensorBoard, ..), and not to the console; a file
                  (`path`) has the loss too.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    Random bits and schedules follow `state.global_step`; a step that a GradScaler skips is dropped.
    Each checkpoint holds `fq.state_dict` of all ranks in `FILE`, which a resumed training loads.

    Raises ValueError for a recipe that is given twice or never, for samples that nobody reads, and
    at a resume from a checkpoint without `FILE`, or of another recipe, unless allow_recipe_change.
    """

    def __init__(
        self,
        recipe: Recipe | PerLayer | Schedule | str | None = None,
        *,
        hold: bool | None = None,
        resume_from: str | None = None,
        allow_recipe_change: bool = False,
        inspect: int | Mapping[str, Any] | None = None,
        **convert_options,
    ):
        self.recipe, self.convert_options = recipe, convert_options
        self.hold, self.resume_from = hold, resume_from
        self.allow_recipe_change = allow_recipe_change
        self.inspect = {"every": inspect} if isinstance(inspect, int) else inspect
        self._reporters: list[TrainerCallback] = []
        self._inspection: Inspection | None = None
        self._reported: tuple[int, Numbers] | None = None
        self._converted: Callable[[], nn.Module | None] = lambda: None  # a weak reference
        self._held, self._micro_batch, self._loss_scale = contextlib.ExitStack(), 0, 1.0

    def _convert(self, model: nn.Module) -> None:
        if model is self._converted():
            return
        convert_once(model, self.recipe, self.convert_options, "Callback")
        self._converted = weakref.ref(model)

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if model is not None:
            self._convert(model)

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._convert(model)  # `model_init` returns a new model per training
        if state.global_step and (path := self._file(args, state)):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            TrainingState(model, self.allow_recipe_change).load_state_dict(saved)
        if self.inspect is not None:
            if not self._reporters and not self.inspect.keys() & {"path", "dump", "on_record"}:
                raise ValueError(
                    f"nobody reads Callback(inspect=): got report_to={args.report_to}; name a "
                    "reporter, or pass inspect={'every': 100, 'path': 'run.jsonl'}"
                )
            self._inspection = inspect(model, **self.inspect).start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._inspection is not None and logs and "loss" in logs:
            self._inspection.scalars(loss=logs["loss"])

    def _file(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Path of the state in the checkpoint to resume from, of which the Trainer only knows the
        step; None: there is none, nor need there be."""
        folders = [self.resume_from]
        if not self.resume_from:
            folders = [args.resume_from_checkpoint, _folder(args, state)]
        paths = [os.path.join(folder, FILE) for folder in folders if isinstance(folder, str)]
        path = next(filter(os.path.isfile, paths), None)
        if path is not None or self.allow_recipe_change:
            return path
        raise ValueError(
            f"resumed at step {state.global_step}, but there is no {' and no '.join(paths)}; give "
            "Callback(resume_from=) the folder of a checkpoint that was written with this "
            "callback, or Callback(allow_recipe_change=True), if it was trained without"
        )

    def on_step_begin(self, args, state, control, model, **kwargs):
        self._micro_batch = 0
        begin_step(state.global_step, model=model)
        if args.gradient_accumulation_steps > 1 if self.hold is None else self.hold:
            self._held.enter_context(hold(model))

    def on_substep_end(self, args, state, control, model, **kwargs):
        self._micro_batch += 1
        begin_step(state.global_step, micro_batch=self._micro_batch, model=model)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self._held.close()
        self._loss_scale = _loss_scale(optimizer)

    def on_optimizer_step(self, args, state, control, model, optimizer=None, **kwargs):
        # `step_was_skipped` is False under fused optimizers
        if _loss_scale(optimizer) < self._loss_scale:
            skip_step(model)

    def on_step_end(self, args, state, control, **kwargs):
        if self._inspection is None:
            return
        self._inspection.flush()
        self._inspection.records.clear()
        latest = self._inspection.latest
        if latest is None or latest is self._reported:
            return
        self._reported, logs = latest, {f"fsdp_quant/{k}": v for k, v in latest[1].items()}
        for reporter in self._reporters:
            reporter.on_log(args, state, control, logs=dict(logs), **kwargs)

    def on_train_end(self, args, state, control, model, **kwargs):
        count_passes(model)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._held.close()  # the training was stopped between micro-batches

    def end(self) -> None:
        """Leave the model as the training found it; called whatever ends the training."""
        self._held.close()
        if self._inspection is not None:
            self._inspection.stop()
        self._inspection, self._reporters = None, []

    def on_save(self, args, state, control, model, **kwargs):
        if args.save_only_model or state.is_hyper_param_search:  # neither is resumed
            return
        gathered = TrainingState(model).state_dict()
        if args.should_save:
            torch.save(gathered, os.path.join(_folder(args, state), FILE))


def _folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(args.output_dir or "", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _loss_scale(optimizer: object) -> float:
    """Of the GradScaler of accelerate's optimizer; 1 without one."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def _ending(train: Callable) -> Callable:
    """`Trainer.train` that gives itself to each `Callback`, and calls its `end`: no event of the
    Trainer follows an exception."""

    @functools.wraps(train)
    def train_and_end(trainer: Trainer, *args, **kwargs):
        all_of_them = trainer.callback_handler.callbacks
        logs = [c for c in all_of_them if type(c).on_log is not TrainerCallback.on_log]
        on_console = Callback, PrinterCallback, ProgressCallback
        with contextlib.ExitStack() as stack:
            for callback in (c for c in all_of_them if isinstance(c, Callback)):
                callback._reporters = [c for c in logs if not isinstance(c, on_console)]
                stack.callback(callback.end)
            return train(trainer, *args, **kwargs)

    return train_and_end


Trainer.train = _ending(Trainer.train)

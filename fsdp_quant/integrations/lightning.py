# SPDX-License-Identifier: Apache-2.0
"""`Precision` for Lightning's Trainer, `FabricPrecision` for Fabric."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric import plugins as fabric
from lightning.pytorch import plugins as trainer
from torch import autocast, bfloat16, nn

from ..linear.training_steps import begin_step, count_passes
from ..models.convert import convert_once
from ..options import choice
from ..recipe import PerLayer, Recipe, Schedule
from ..training.hold import hold
from ..training.training_state import TrainingState


class FabricPrecision(fabric.Precision):
    """Train with `recipe`: `Fabric(plugins=[FabricPrecision(recipe)])`.

    recipe:     for `fq.convert`, which `fabric.setup` calls before it shards. None: the model is
                already converted.
    precision:  of everything else: "32-true", "bf16-true" or "bf16-mixed". Under `fully_shard`:
                "32-true", and its `MixedPrecisionPolicy`.
    allow_recipe_change:  load a state of another recipe; the Trainer goes on with a checkpoint that
                          was trained without this plugin.
    convert_options:  `skip`, `grouped`, `fuse`, `recompute` of `fq.convert`.

    `state_dict()` is `fq.state_dict` of all ranks: save it with `fabric.save`, and pass it to
    `load_state_dict` after `fabric.load`, on every rank.

    Raises ValueError for another `precision`, and for a recipe that is given twice or never.
    """

    def __init__(
        self,
        recipe: Recipe | PerLayer | Schedule | str | None = None,
        precision: str = "32-true",
        *,
        allow_recipe_change: bool = False,
        **convert_options,
    ):
        self.recipe, self.convert_options = recipe, convert_options
        self.precision = choice("32-true", "bf16-true", "bf16-mixed").read("precision", precision)
        self.allow_recipe_change = allow_recipe_change
        plain = fabric.HalfPrecision(precision) if precision == "bf16-true" else fabric.Precision()
        self._plain = plain
        self.tensor_init_context = plain.tensor_init_context
        self.module_init_context = plain.module_init_context
        self.convert_input, self.convert_output = plain.convert_input, plain.convert_output
        self._reference: Callable[[], nn.Module | None] = lambda: None

    @property
    def _model(self) -> nn.Module:
        """The model, which is held weakly. Raises RuntimeError before `convert_module`."""
        model = self._reference()
        if model is None:
            raise RuntimeError("the precision plugin has no model yet; call fabric.setup first")
        return model

    def convert_module(self, module: nn.Module) -> nn.Module:
        module, previous = self._plain.convert_module(module), self._reference()
        self._reference = weakref.ref(module)
        if module is previous:  # the Trainer asks at each of fit, validate and test
            return module
        return convert_once(module, self.recipe, self.convert_options, "the precision plugin")

    def forward_context(self) -> contextlib.AbstractContextManager:
        if self.precision == "bf16-mixed":
            return autocast(next(self._model.parameters()).device.type, bfloat16)
        return self._plain.forward_context()

    def state_dict(self) -> dict[str, Any]:
        return TrainingState(self._model).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        TrainingState(self._model, self.allow_recipe_change).load_state_dict(state_dict)


class Precision(trainer.Precision, FabricPrecision):
    """`FabricPrecision` for the Trainer: `Trainer(plugins=[Precision(recipe)])`.

    hold:  quantize weights once per optimizer step (`fq.hold`). None: if a step has several
           micro-batches.

    The model is converted after `configure_model`, which may have sharded it. Steps are the
    Trainer's optimizer steps, and its checkpoints hold the state.

    Raises ValueError at a resume from a checkpoint without the state, or of another recipe, unless
    allow_recipe_change=True.
    """

    def __init__(self, *args, hold: bool | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.hold, self._held, self._step, self._micro_batch = hold, contextlib.ExitStack(), -1, 0

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        model = self._model
        fit: Any = model.trainer
        step, accumulates = fit.global_step, fit.accumulate_grad_batches > 1
        self._micro_batch = self._micro_batch + 1 if step == self._step else 0
        self._step = step
        begin_step(step, micro_batch=self._micro_batch, model=model)
        if not self._micro_batch:
            self._held.close()  # left by a training that raised
            if accumulates if self.hold is None else self.hold:
                self._held.enter_context(hold(model))
        with self.forward_context():
            yield

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint and not self.allow_recipe_change:
            raise ValueError(
                f"the checkpoint holds no state of {type(self).__name__}: it was trained without; "
                "pass it allow_recipe_change=True to go on with it"
            )

    def optimizer_step(self, optimizer, model, closure, **kwargs: Any) -> Any:
        def last_micro_batch() -> Any:
            loss = closure()
            self._held.close()
            return loss

        return super().optimizer_step(optimizer, model, last_micro_batch, **kwargs)

    def teardown(self) -> None:
        self._held.close()
        if (model := self._reference()) is not None:
            count_passes(model)
        super().teardown()

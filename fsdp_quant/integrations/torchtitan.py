# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""torchtitan: its `Trainer` with a section in its configuration; `quantized` for other trainers.

    torchrun -m torchtitan.train --module fsdp_quant.integrations.torchtitan \\
        --config llama3.llama3_debugmodel --fsdp_quant.recipe mxfp8

`--config MODULE.FUNCTION` is torchtitan's `--module MODULE --config FUNCTION`. Written for
torchtitan 0.3.0.

[Note: where a model is converted]
torchtitan's converters replace configurations of single layers. A recipe spans a model (its last
layers, MLPs, packed experts), so the built model is converted, before torchtitan shards it.
"""

from __future__ import annotations

import contextlib
import io
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torchtitan import trainer as titan
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.cudagraph import CUDAGraphInputSpec
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module as TitanModule
from torchtitan.protocols.sharding import resolve_placements

from ..linear.cut import Layouts
from ..linear.training_steps import begin_step
from ..models.convert import convert
from ..models.steps import converted_modules
from ..recipe import PerLayer, Recipe, Schedule, as_recipe
from ..roles import Selector, matches, selectors_of
from ..training.graphed import graphed
from ..training.hold import hold
from ..training.training_state import load_state_dict, state_dict

_STATE = "fsdp_quant"  # of checkpoints, in torchtitan's "train_state"


def quantized(
    spec: ModelSpec,
    recipe: Recipe | PerLayer | Schedule | str,
    filter_fqns: Selector | Iterable[Selector] = (),
    fuse: bool = True,
) -> ModelSpec:
    """A `spec` whose models are converted before torchtitan parallelizes them.

    filter_fqns:  modules that stay in high precision: `skip` of `fq.convert`.

    Each stage of a pipeline is converted alone, with the names that it has, and counts its own last
    layers. Ranks of tensor parallelism gather inputs of layers in high precision, as in torchtitan.

    Raises NotImplementedError, as a model is parallelized over several ranks, for another
    `parallelism.spmd_backend` than "partial_dtensor".
    """
    recipe, names = as_recipe(recipe, "quantized"), selectors_of("filter_fqns", filter_fqns)

    def parallelize(model: nn.Module, **kwargs) -> nn.Module:
        dims, backend = kwargs["parallel_dims"], kwargs["parallelism"].spmd_backend
        if dims.world_size > 1 and backend != "partial_dtensor":
            raise NotImplementedError(
                f"parallelism.spmd_backend is {backend!r}; several ranks train quantized models "
                "with 'partial_dtensor'"
            )
        modules: Iterator[Any] = model.modules()
        for module in modules:
            if isinstance(module, TitanModule):
                module._cache_pos_arg_names()  # by which it shards inputs: those of its own forward
        skip = names
        if dims.pp_enabled:  # another stage may have a module
            paths = [path for path, _ in model.named_modules()]
            skip = [n for n in names if callable(n) or any(matches(n, path) for path in paths)]
        convert(model, recipe, skip=skip, fuse=fuse)
        if dims.tp_enabled:
            _share_layers(model, dims)
        return spec.parallelize_fn(model, **kwargs)

    return replace(spec, parallelize_fn=parallelize)


def _share_layers(model: nn.Module, dims: ParallelDims) -> None:
    """Set the output layouts of layers that tensor parallelism will cut to torchtitan's.

    A row-parallel `fq.Linear` sums over the ranks itself, where torchtitan expects partial sums.
    """
    for layer in converted_modules(model).values():
        shardings = getattr(layer, "_sharding_config", None)
        if shardings is None or shardings.out_src_shardings is None:
            continue
        out = shardings.out_dst_shardings or shardings.out_src_shardings
        (layout,) = resolve_placements(out, dims.resolve_mesh(out.axes()))
        layer.parallel = Layouts(Replicate(), layout, use_local_output=False)
        layer._sharding_config = replace(shardings, out_src_shardings=out)


@dataclass(kw_only=True, slots=True)
class Section:
    """The settings of `Trainer`: `recipe`, `filter_fqns` and `fuse` of `quantized`.

    graphed:  capture forward and backward as one graph of `fq.graphed`, in place of torchtitan's.
    """

    recipe: str = "mxfp8"
    filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])
    fuse: bool = True
    graphed: bool = False


class Trainer(titan.Trainer):
    """torchtitan's Trainer of a quantized model.

    Random bits and schedules follow its optimizer steps. If a step has several micro-batches, and
    no CUDA graph is captured, weights are quantized once per step (`fq.hold`). Checkpoints hold
    `fq.state_dict` of all ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        fsdp_quant: Section = field(default_factory=Section)

        def __post_init__(self):
            titan.Trainer.Config.__post_init__(self)
            as_recipe(self.fsdp_quant.recipe, "fsdp_quant.recipe")
            if self.fsdp_quant.graphed and self.training.disable_cuda_graphs:
                raise ValueError(
                    "fsdp_quant.graphed captures a CUDA graph, and training.disable_cuda_graphs "
                    "is set; drop one of them"
                )

    def __init__(self, config: Config):
        section = config.fsdp_quant
        spec = quantized(config.model_spec, section.recipe, section.filter_fqns, section.fuse)
        super().__init__(replace(config, model_spec=spec))
        self.metrics_processor.has_quantization = True  # no MFU of bf16's peak
        self._held, self._micro_batch, self._loaded = contextlib.ExitStack(), 0, None
        for optimizer in self.optimizers.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._held.close())
        if section.graphed:
            self.fwd_bwd_fn = _graphed(self._forward_backward_body, *self.model_parts)

    def train_step(self, data_iterator: Iterator) -> None:
        if self._loaded is not None:  # after the parameters
            for part, state in zip(self.model_parts, self._loaded, strict=True):
                load_state_dict(part, state)
            self._loaded = None
        self._micro_batch = 0
        count = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        with self._held:  # ends before the optimizer steps
            if count > 1 and self.config.training.disable_cuda_graphs:
                self._held.enter_context(hold(nn.ModuleList(self.model_parts)))
            super().train_step(data_iterator)

    def forward_backward_step(self, **kwargs) -> Tensor:
        parts = nn.ModuleList(self.model_parts)
        begin_step(self.step - 1, micro_batch=self._micro_batch, model=parts)
        self._micro_batch += 1
        return super().forward_backward_step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Every rank must call it."""
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, [state_dict(part) for part in self.model_parts])
        file = io.BytesIO()
        torch.save(ranks, file)
        return super().state_dict() | {_STATE: file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        ranks = torch.load(io.BytesIO(state[_STATE]), map_location="cpu", weights_only=True)
        self._loaded = ranks[dist.get_rank() % len(ranks)]


def _graphed(body: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Capture `Trainer._forward_backward_body` by `fq.graphed`, whose arguments are tensors."""
    specs: list[CUDAGraphInputSpec] = []  # of the first batch
    step = graphed(
        lambda inputs, labels, tokens, *flat: body(
            inputs, labels, tokens, specs[0].unflatten(flat)
        ),
        model,
    )

    def run(inputs: Tensor, labels: Tensor, tokens: Tensor, extra: dict[str, Any]) -> Tensor:
        if not specs:
            specs.append(CUDAGraphInputSpec(extra))
        return step(inputs, labels, tokens, *specs[0].flatten(extra))

    return run


def trainer_config(config: titan.Trainer.Config, **section) -> Trainer.Config:
    """Convert a configuration of torchtitan's Trainer to one of `Trainer`. section: fields of
    `Section`.

    Raises ValueError for the configuration of another trainer.
    """
    if type(config) is not titan.Trainer.Config:
        raise ValueError(
            f"{type(config).__qualname__} is of a trainer of its own; give it "
            "model_spec=quantized(model_spec, recipe)"
        )
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    return Trainer.Config(**settings, fsdp_quant=Section(**section))


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """A function that returns the configuration MODULE.FUNCTION of torchtitan's models."""
    module, _, function = name.rpartition(".")
    try:
        make_config = pkgutil.resolve_name(f"torchtitan.models.{module}.config_registry:{function}")
    except (ImportError, ValueError, AttributeError):
        raise AttributeError(
            f"torchtitan has no configuration {name!r}; wanted MODULE.FUNCTION"
        ) from None
    return lambda: trainer_config(make_config())

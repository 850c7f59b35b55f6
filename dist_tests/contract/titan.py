# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer of its Llama 3 debug model, or of two layers of its 8B: in bf16, with ours,
with its float8 of torchao (rowwise)."""

from __future__ import annotations

import time
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import fsdp_quant as fq
from dist_tests import titan
from dist_tests.contract.on_ranks import Curve, Run, median_ms

BATCH = 8  # rows of a step, on any number of ranks


def _config(run: Run, arm: str, checkpointing: str, settings: dict[str, Any]) -> Any:
    model = "llama3_8b" if run.size == "wide" else "llama3"
    made = titan.config(model, run.folder, **settings)
    made.activation_checkpoint = getattr(titan.activation_checkpoint, checkpointing).Config()
    if arm == "torchao":
        from torchtitan.components.quantization import Float8LinearConverter

        converter = Float8LinearConverter.Config(
            filter_fqns=["lm_head"],
            emulate=not run.on_gpu,
            model_compile_enabled=made.compile.enable,
        )
        made.model_spec.model = converter.build().convert(made.model_spec.model)
    elif arm != "bf16":
        made = fq.integrations.torchtitan.trainer_config(made, recipe=arm)
    return made


def _set_values(run: Run, model: nn.Module) -> None:
    """torchtitan draws other numbers on other ranks."""
    state = model.state_dict()  # of q, k and v where the parameter is all three
    for name, old in state.items():
        if old.is_floating_point():
            new = run.values(name, tuple(old.shape)).to(old.device)
            if isinstance(old, DTensor):
                whole = DTensor.from_local(
                    new, old.device_mesh, [Replicate()] * old.device_mesh.ndim
                )
                new = whole.redistribute(placements=old.placements)
            state[name] = new
    model.load_state_dict(state)


def _arms(run: Run, checkpointing: str, tensor: int = 1, **settings: Any) -> dict[str, Curve]:
    tensor = min(tensor, run.world)
    length = run.choose({"rows": 128}, {"rows": 1024}, {"rows": 4096})["rows"]
    settings |= {
        "training__steps": run.steps,
        "training__seq_len": length,
        "training__local_batch_size": BATCH * tensor // run.world,
        "training__global_batch_size": BATCH,
        "parallelism__tensor_parallel_degree": tensor,
        "metrics__log_freq": 1,
        "debug__deterministic": not run.on_gpu,
    }
    arms = ["bf16", run.recipe]
    emulates = not run.on_gpu and settings.get("compile__enable")  # which torchao does eagerly
    if find_spec("torchao") and not emulates:
        arms.append("torchao")
    curves = {}
    for arm in arms:
        trainer = _config(run, arm, checkpointing, settings).build()
        _set_values(run, trainer.model_parts[0])
        losses, times = [], [time.perf_counter()]

        def keep(metrics: dict[str, float], step: int) -> None:  # after it waited for the device
            losses.append(metrics["loss_metrics/global_avg_loss"])
            times.append(time.perf_counter())

        trainer.metrics_processor.logger.log = keep
        trainer.train()
        curves[arm] = Curve(losses, median_ms([b - a for a, b in pairwise(times)]))
    return curves


def fsdp(run: Run) -> dict[str, Curve]:
    """FSDP2, blocks recomputed in the backward."""
    return _arms(run, "FullAC")


def tensor(run: Run) -> dict[str, Curve]:
    """TP 2 with sequence parallelism; FSDP2 over the other ranks; half of the products
    recomputed."""
    return _arms(run, "SelectiveAC", tensor=2)


def compiled(run: Run) -> dict[str, Curve]:
    """FSDP2 of compiled blocks, half of whose products are recomputed."""
    backend = "inductor" if run.on_gpu else "aot_eager"
    compile = {"enable": True, "components": ["model"], "backend": backend}
    return _arms(run, "SelectiveAC", **{f"compile__{k}": v for k, v in compile.items()})

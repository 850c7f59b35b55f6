# SPDX-License-Identifier: Apache-2.0
"""torch's own parallelisms of one language model: DDP, pipelines, context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import fsdp_quant as fq
from dist_tests.contract.on_ranks import Curve, Run, tokens
from examples.language_model import LanguageModel, ModelConfig

BATCH, MICRO_BATCHES, VOCABULARY = 8, 4, 256


def _length(run: Run) -> int:
    return run.choose({"length": 128}, {"length": 1024}, {"length": 4096})["length"]


def _model(run: Run, arm: str) -> nn.Module:
    """The same on every rank. arm: "bf16", or a recipe's name."""
    sizes = run.choose(
        dict(dim=128, layers=2, heads=1, kv_heads=1, ffn=256),
        dict(dim=512, layers=4, heads=4, kv_heads=4, ffn=1536),
        dict(dim=4096, heads=32, kv_heads=32, ffn=14336),
    )
    torch.manual_seed(0)
    with torch.device(run.device):
        model = LanguageModel(ModelConfig(**sizes, seq=_length(run), tie=False), recompute=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(run.changed(name, p))
    return model if arm == "bf16" else fq.convert(model, arm, skip=["lm_head"])


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)


@contextlib.contextmanager
def _step(run: Run, i: int, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Of a training in bf16: forward and backward inside."""
    fq.begin_step(i)
    with torch.autocast(run.device.type, torch.bfloat16):
        yield
    optimizer.step()
    optimizer.zero_grad()


def ddp(run: Run) -> dict[str, Curve]:
    """DistributedDataParallel: a rank's rows of each batch."""
    curves = {}
    for arm in ("bf16", run.recipe):
        model = DistributedDataParallel(_model(run, arm))
        optimizer = _adamw(model)

        def step(i: int) -> Tensor:
            rows = tokens(i, BATCH, _length(run) + 1, VOCABULARY, run.device)
            own = rows.chunk(run.world)[run.rank]
            with _step(run, i, optimizer):
                loss = _loss(model(own[:, :-1]), own[:, 1:])
                loss.backward()
            return loss.detach()

        curves[arm] = run.curve(step)
    return curves


class _Stage(nn.Module):
    """A rank's part of the layers of a model."""

    def __init__(self, model: nn.Module, rank: int, world: int):
        super().__init__()
        count = len(model.layers) // world
        self.embedding = model.embedding if rank == 0 else None
        self.layers = model.layers[rank * count :][:count]
        self.head = nn.Sequential(model.norm, model.lm_head) if rank == world - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def pipeline(run: Run) -> dict[str, Curve]:
    """1F1B, a stage a rank; weights are quantized once a step (`fq.hold`)."""
    curves = {}
    for arm in ("bf16", run.recipe):
        stage = _Stage(_model(run, arm), run.rank, run.world)
        optimizer = _adamw(stage)
        placed = PipelineStage(stage, run.rank, run.world, run.device)
        schedule = Schedule1F1B(placed, MICRO_BATCHES, loss_fn=_loss)

        def step(i: int) -> Tensor | float:
            rows = tokens(i, BATCH, _length(run) + 1, VOCABULARY, run.device)
            inputs = [rows[:, :-1].contiguous()] if stage.embedding is not None else []
            losses: list[Tensor] = []
            wanted = {"target": rows[:, 1:], "losses": losses} if stage.head is not None else {}
            held = contextlib.nullcontext() if arm == "bf16" else fq.hold(stage)
            with _step(run, i, optimizer), held:
                schedule.step(*inputs, **wanted)
            return torch.stack(losses).mean().detach() if losses else float("nan")

        curves[arm] = run.curve(step)
    return curves


def context(run: Run) -> dict[str, Curve]:
    """`context_parallel` of a sequence's parts, and `fully_shard` over the same ranks."""
    from torch.distributed.tensor.experimental import context_parallel

    curves, mesh = {}, init_device_mesh(run.device.type, (run.world,))
    for arm in ("bf16", run.recipe):
        model = _model(run, arm)
        tables = [layer.attention.table for layer in model.layers]
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        optimizer = _adamw(model)

        def step(i: int) -> Tensor:
            rows = tokens(i, BATCH, _length(run) + 1, VOCABULARY, run.device)
            x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            buffers = [x, y, *tables]
            with (
                _step(run, i, optimizer),
                context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
            ):
                loss = _loss(model(x), y)
                loss.backward()
            return loss.detach()

        curves[arm] = run.curve(step)
    return curves

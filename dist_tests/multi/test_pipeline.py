# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: stages of torch.distributed.pipelining train as the whole model does in one
process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import on_cpu, run_ranks
from fsdp_quant.tensor.torch_compat import local_of

STEPS, BATCHES, SHAPE = 3, 4, (2, 16, nets.K)
# Schedule -> blocks of each rank.
SCHEDULES = {
    ScheduleGPipe: ((0,), (1,)),
    Schedule1F1B: ((0,), (1,)),
    ScheduleInterleaved1F1B: ((0, 2), (1, 3)),
}
OF_SHARDS = tuple(SCHEDULES)
# before, zero-bubble schedules refuse every autograd.Function, and gloo in a V
if torch.__version__ >= "2.13":
    SCHEDULES |= {
        ScheduleInterleavedZeroBubble: ((0, 2), (1, 3)),
        ScheduleZBVZeroBubble: ((0, 3), (1, 2)),
    }
RECIPES = ("fp8_delayed", "mxfp8", "fp8_current", "nvfp4")
CASES = list(itertools.product(SCHEDULES, RECIPES, (False, True)))


def _model(recipe: str, blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return fq.convert(
        nn.Sequential(*(nets.Block(48) for _ in range(blocks))), fq.recipes.by_name(recipe)
    )


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def _pipeline(rank: int, world: int, schedule: type, recipe: str, sharded: bool) -> None:
    places = SCHEDULES[schedule]
    blocks = sum(map(len, places))
    whole, net = _model(recipe, blocks), _model(recipe, blocks)
    own = {i: net[i] for i in places[rank]}
    if sharded:
        for block in own.values():
            fully_shard(block, mesh=DeviceMesh("cpu", [rank]), reshard_after_forward=False)
    # Shapes are given: torch would find them in a step over memory that it leaves as it is, and
    # histories would record that.
    stages = [
        PipelineStage(
            block,
            i,
            blocks,
            torch.device("cpu"),
            input_args=torch.zeros(SHAPE, requires_grad=i > 0),
            output_args=torch.zeros(SHAPE, requires_grad=True),
        )
        for i, block in own.items()
    ]
    stage = stages[0] if len(stages) == 1 else stages
    run = schedule(stage, BATCHES, loss_fn=_loss, scale_grads=False)
    optimizers = [
        torch.optim.SGD(p, lr=0.1)
        for p in ([p for b in own.values() for p in b.parameters()], whole.parameters())
    ]
    for step in range(STEPS):
        x, target = (
            laws.values(BATCHES * SHAPE[0], *SHAPE[1:], seed=10 * step + i, dtype=torch.float32)
            for i in range(2)
        )
        fq.begin_step(step)
        # every rank sees the same tokens, and rounds them by the same bits
        with fq.token_offset(0):
            run.step(
                *([x] if 0 in own else []), **({"target": target} if blocks - 1 in own else {})
            )
            for batch, wanted in zip(x.chunk(BATCHES), target.chunk(BATCHES)):
                _loss(whole(batch), wanted).backward()
        for i, block in own.items():
            for (name, got), want in zip(block.named_parameters(), whole[i].parameters()):
                laws.assert_same_bytes(
                    local_of(got.grad), want.grad, f"step {step}, block {i}: gradient of {name}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_cpu
@pytest.mark.parametrize(
    ("schedule", "recipe", "sharded"), CASES if laws.EVERYTHING else CASES[::5]
)
def test_pipeline_stages_train_as_the_whole_model(schedule: type, recipe: str, sharded: bool):
    """If false, a schedule that interleaves passes of several stages and batches multiplies other
    codes, scales or histories."""
    run_ranks(2, _pipeline, schedule, recipe, sharded)


def _sharded_pipeline(rank: int, world: int, schedule: type, recipe: str, reshard: bool) -> None:
    """Two pipelines, each rank of one sharing its stages with a rank of the other, which has other
    tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    places, (place, data) = SCHEDULES[schedule], mesh.get_coordinate()
    blocks = sum(map(len, places))
    net, wholes = _model(recipe, blocks), [_model(recipe, blocks) for _ in range(2)]
    own = {
        i: fully_shard(net[i], mesh=mesh["data"], reshard_after_forward=reshard)
        for i in places[place]
    }
    stages = [
        PipelineStage(
            block,
            i,
            blocks,
            torch.device("cpu"),
            input_args=torch.zeros(SHAPE, requires_grad=i > 0),
            output_args=torch.zeros(SHAPE, requires_grad=True),
            group=mesh.get_group("pipeline"),
        )
        for i, block in own.items()
    ]
    run = schedule(
        stages[0] if len(stages) == 1 else stages, BATCHES, loss_fn=_loss, scale_grads=False
    )
    optimizers = [
        torch.optim.SGD(p, lr=0.1)
        for p in (
            [p for b in own.values() for p in b.parameters()],
            *(whole.parameters() for whole in wholes),
        )
    ]
    for step in range(STEPS):
        tokens = [
            [
                laws.values(
                    BATCHES * SHAPE[0],
                    *SHAPE[1:],
                    seed=100 * step + 10 * r + i,
                    dtype=torch.float32,
                )
                for i in range(2)
            ]
            for r in range(2)
        ]
        x, target = tokens[data]
        fq.begin_step(step)
        with fq.token_offset(0):
            run.step(
                *([x] if 0 in own else []), **({"target": target} if blocks - 1 in own else {})
            )
            for whole, (x, target) in zip(wholes, tokens):
                for batch, wanted in zip(x.chunk(BATCHES), target.chunk(BATCHES)):
                    _loss(whole(batch), wanted).backward()
        for a, b in zip(*(whole.parameters() for whole in wholes)):
            a.grad = b.grad = (a.grad + b.grad) / 2
        for i, block in own.items():
            for (name, got), want in zip(block.named_parameters(), wholes[0][i].parameters()):
                laws.assert_same_bytes(
                    got.grad.full_tensor(), want.grad, f"step {step}, block {i}: gradient of {name}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


SHARDED = list(itertools.product(OF_SHARDS, RECIPES, (False, True)))


@on_cpu
@pytest.mark.parametrize(
    ("schedule", "recipe", "reshard"), SHARDED if laws.EVERYTHING else SHARDED[::5]
)
def test_sharded_stages_with_batches_in_flight_train_as_whole_models(
    schedule: type, recipe: str, reshard: bool
):
    """If false, gathers of a stage in which several batches are under way give a backward other
    codes than its forward's."""
    run_ranks(4, _sharded_pipeline, schedule, recipe, reshard)

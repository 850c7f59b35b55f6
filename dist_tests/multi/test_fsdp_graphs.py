# SPDX-License-Identifier: Apache-2.0
"""A training step of several ranks as one CUDA graph: a replay is the eager step. On NCCL only."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi import test_tensor_parallel as tensor_parallel
from dist_tests.multi.harness import DEVICE, run_ranks
from fsdp_quant.context import STEP

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="captures NCCL's collectives: FSDP_QUANT_TEST_DEVICE=cuda"
)
K, STEPS = 128, 3
RECIPES = {
    "fp8_current": fq.recipes.fp8_current,
    "fp8_delayed": fq.recipes.fp8_delayed,
    "fp8_block": fq.recipes.fp8_block,
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
    "mxfp8/nvfp4": lambda: fq.recipes.hybrid("mxfp8", "nvfp4"),
    "mxfp8/nvfp4 exact": lambda: fq.recipes.hybrid("mxfp8", "nvfp4", scale_rule="fp8_exact"),
}


def _built(kind: str, recipe: fq.Recipe, world: int) -> tuple[nn.Module, tuple[int, ...]]:
    """(net, shape of a rank's input)."""
    if kind == "tensor parallel":
        net = fq.convert(tensor_parallel.build(layers=2).bfloat16(), recipe)
        return tensor_parallel.cut(net, tensor_parallel.mesh_of(tp=world)), (
            2,
            128,
            tensor_parallel.D,
        )
    with fq.quantized_model_init(recipe) if kind == "quantized" else contextlib.nullcontext():
        net = fq.convert(nets.build(hidden=(256, 128), k=K, out=128).bfloat16(), recipe)
    net = nets.shard(net)
    if kind == "gradients as codes":
        fq.set_gradient_reduction(net, "mxfp8")
    return net, (64, K)


def _trained(
    recipe: fq.Recipe, kind: str, captured: bool, rank: int, world: int
) -> list[dict[str, Tensor]]:
    """Outputs, and weights at the end, of steps that are replays of a graph of one, or not."""
    STEP.step, STEP.counted_by_hand = 0, False
    STEP.publish()
    net, shape = _built(kind, recipe, world)
    if kind == "quantized":
        optimizer = fq.optim.FusedAdam(net.parameters(), lr=torch.tensor(1e-2), capturable=True)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True, foreach=True)
    x = torch.empty(shape, dtype=torch.bfloat16)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        y = net(x)
        y.float().square().mean().backward()
        optimizer.step()
        return y.detach()

    def feed(i: int) -> None:
        x.copy_(laws.values(*shape, seed=100 + i * 17 + rank, dtype=torch.float32))

    aside, seen = torch.cuda.Stream(), []
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for i in range(STEPS):
            feed(i)
            step()
        run, y = step, None
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                y = step()
            run = graph.replay
        for i in range(STEPS, 2 * STEPS):
            feed(i)
            made = run()
            seen.append({f"output of step {i}": (y if captured else made).clone()})
    torch.cuda.synchronize()
    return [*seen, nets.full_state(net)]


def _replays(rank: int, world: int, kind: str) -> None:
    for label, made in RECIPES.items():
        with laws.kept_step():
            want, got = (
                _trained(made(), kind, captured, rank, world) for captured in (False, True)
            )
        for a, b in zip(want, got):
            assert a.keys() == b.keys()
            for name, value in a.items():
                laws.assert_same_bytes(b[name], value, f"{label}, {kind}: {name}")


@pytest.mark.parametrize("kind", ["sharded", "quantized", "gradients as codes", "tensor parallel"])
def test_replays_of_a_step_are_eager_steps(kind: str):
    """If false, a replay gathers codes of earlier weights or activations, shares the amaxes of one,
    or rounds gradients on the random bits of another step."""
    run_ranks(2, _replays, kind)


def _ends(rank: int, world: int, how: str) -> float:
    """Seconds that the end of the process group takes, while a captured step is alive."""
    net = nets.shard(fq.convert(nets.build(hidden=(256,), k=K, out=128), "mxfp8"))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = fq.graphed(step, net, optimizer)
    for i in range(6):
        step(laws.values(64, K, seed=i, dtype=torch.float32).to(DEVICE))
    assert step.why_eager is None and step._graph is not None
    start = time.monotonic()
    try:
        if how == "exception":
            raise KeyboardInterrupt  # its traceback holds the step while the script ends
    except KeyboardInterrupt:
        dist.destroy_process_group()
    if how == "abort":
        dist.distributed_c10d._abort_process_group()
    elif how == "destroy":
        dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["destroy", "exception", "abort"])
def test_a_process_with_a_captured_step_ends(how: str):
    """If false, the last line of a script, `dist.destroy_process_group()`, never returns."""
    assert max(run_ranks(2, _ends, how)) < 10

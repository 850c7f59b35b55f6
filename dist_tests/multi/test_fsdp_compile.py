# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks under `fully_shard`: the outputs, weights and collectives of eager blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.single import hopper
from dist_tests.single.test_compile import cut_by_inductor
from fsdp_quant.counters import counters

RECIPES = {
    "delayed": fq.recipes.fp8_delayed(length=2),
    "mxfp8": fq.recipes.mxfp8(),
    "nvfp4": fq.recipes.nvfp4(),
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4 exact": fq.recipes.nvfp4(scale_rule="fp8_exact"),
}
# (world, recipe) -> the kinds of recomputation that CI takes.
SAMPLE = {
    (1, "mxfp8/nvfp4"): (None,),
    (2, "delayed"): (None,),
    (2, "mxfp8"): ("around", "inside"),
    (2, "nvfp4"): (None,),
}
HIDDEN = (33, 33)


class Recomputed(nets.Block):
    """A block that checkpoints itself, where hooks cannot see it once it is compiled."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def compiled(block: nn.Module) -> nn.Module:
    return torch.compile(block, fullgraph=True, backend="aot_eager")


def compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(fullgraph=True, backend="aot_eager")
    return block


def build(
    recipe: fq.Recipe,
    compile_block: Callable | None = None,
    compile_first: bool = True,
    recompute: str | None = None,
) -> nets.Net:
    net = nets.build(hidden=HIDDEN, recompute=recompute == "around")
    fq.convert(net, recipe)
    for i, block in enumerate(net.blocks):
        if recompute == "inside":
            block.__class__ = Recomputed
        if compile_block and compile_first:
            net.blocks[i] = compile_block(block)
        fully_shard(net.blocks[i])
        if compile_block and not compile_first:
            net.blocks[i] = compile_block(block)
    return fully_shard(net)


def trained(net: nets.Net, rank: int, steps: int = 3) -> tuple:
    """(outputs and weights, collectives, gathers by pass and direction)."""
    counters.reset()
    optimizer = nets.adam(net)
    with nets.recorded_collectives() as seen:
        outputs = [
            nets.train_step(net, optimizer, step, rank, micro_batches=2) for step in range(steps)
        ]
    return outputs + list(nets.full_state(net).values()), seen, counters.of("gather")


def assert_same_training(got: tuple, want: tuple, what: str) -> None:
    for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        laws.assert_same_bytes(a, b, f"{what}: tensor {i}")
    assert got[1:] == want[1:], f"{what}: {got[1:]} against {want[1:]}"


def graphs_since() -> int:
    assert not dynamo_counters["graph_break"], dict(dynamo_counters["graph_break"])
    made = dynamo_counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    dynamo_counters.clear()
    return made


def _compiled_equals_eager_on_a_gpu(rank: int, world: int) -> None:
    """Where operands are decoded by operators of their own, which a partitioner could move into the
    forward."""
    with hopper.emulated():
        for name, recipe in (
            RECIPES.items() if laws.EVERYTHING else [("mxfp8/nvfp4", RECIPES["mxfp8/nvfp4"])]
        ):
            want, got = (trained(build(recipe, of), rank) for of in (None, compiled_in_place))
            assert_same_training(got, want, f"{name}, emulated GPU")
            graphs_since()


@on_cpu
@pytest.mark.parametrize("world", laws.every_second([1, 2], 1))
def test_compiled_blocks_of_an_emulated_gpu_train_as_eager_ones(world):
    """If false, a compiled forward reads codes that FSDP2 gathers for the backward."""
    run_ranks(world, _compiled_equals_eager_on_a_gpu)


def _compiled_equals_eager(rank: int, world: int) -> None:
    for name, recipe in RECIPES.items():
        kinds = (None, "around", "inside") if name in ("delayed", "mxfp8") else (None,)
        for recompute in kinds if laws.EVERYTHING else SAMPLE.get((world, name), ()):
            want = trained(build(recipe, recompute=recompute), rank)
            got = trained(build(recipe, compiled_in_place, recompute=recompute), rank)
            assert_same_training(got, want, f"{name}, recomputed {recompute}")
            # The first block's input needs no gradient.
            assert graphs_since() == 2, f"{name}, recomputed {recompute}: a graph a block"
            backward = {direction for phase, direction, _ in got[2] if phase == "backward"}
            if recompute is None and len(recipe.hybrid(fq.Role("linear", "weight")).encodings) == 2:
                assert backward == {"columnwise"}, f"{name}: {backward}"


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_blocks_train_as_eager_ones(world):
    """If false, torch.compile changes the bits of sharded training, or gathers other bytes than
    eager blocks do."""
    run_ranks(world, _compiled_equals_eager)


def _within_a_budget(rank: int, world: int) -> None:
    def cut(block: nn.Module) -> nn.Module:
        block.compile(fullgraph=True, backend=cut_by_inductor())
        return block

    for name, mode in (("mxfp8", 0), ("delayed", 1)):
        want = trained(build(RECIPES[name]), rank)
        for builtin in laws.every_second([False, True], mode):
            with functorch_config.patch(
                activation_memory_budget=0.3, is_non_builtin_to_include=builtin
            ):
                got = trained(build(RECIPES[name], cut), rank)
            for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
                laws.assert_same_bytes(a, b, f"{name}: tensor {i}")
            assert graphs_since() == 2
            backward = {direction for phase, direction, _ in got[2] if phase == "backward"}
            assert name == "delayed" or backward == {"rowwise", "columnwise"}, (
                "one storage serves both, or both are gathered"
            )


def test_products_that_a_memory_budget_makes_again_find_their_weights():
    """If false, a backward multiplies codes of the forward that FSDP2 has freed."""
    run_ranks(2, _within_a_budget)


def _ways_to_compile(rank: int, world: int) -> None:
    want = trained(build(RECIPES["mxfp8"]), rank)
    ways = [(compiled, False), (compiled, True), (compiled_in_place, False)]  # the fourth: above
    for compile_block, first in laws.every_second(ways, 1):
        got = trained(build(RECIPES["mxfp8"], compile_block, first), rank)
        assert_same_training(got, want, f"{compile_block.__name__}, before fully_shard {first}")
        assert graphs_since() == 2


def test_blocks_may_be_compiled_before_and_after_sharding():
    """If false, the order of torch.compile and fully_shard decides whether a model trains."""
    run_ranks(2, _ways_to_compile)


def _new_recipe(rank: int, world: int) -> None:
    results = []
    for compile_block in (None, compiled_in_place):
        net = build(RECIPES["delayed"], compile_block)
        seen = trained(net, rank, 2)
        for module in (net, *net.blocks):
            module.reshard()
        fq.set_recipe(net, RECIPES["mxfp8/nvfp4"])
        results.append((seen, trained(net, rank, 2)))
    for got, want in zip(results[1], results[0]):
        assert_same_training(got, want, "two recipes")
    assert graphs_since() == 4


def test_a_change_of_recipe_reaches_compiled_blocks():
    """If false, a compiled block reads the bytes of one format as those of another."""
    run_ranks(2, _new_recipe)


def _other_offset(rank: int, world: int) -> None:
    """A block that was compiled outside of any offset runs in two others, each entered anew, and
    outside again."""
    results = []
    for compile_block in (None, compiled_in_place):
        net, seen = build(RECIPES["nvfp4"], compile_block), []
        for step, offset in enumerate((None, 0, 64, 0, None)):
            fq.begin_step(step)
            with contextlib.nullcontext() if offset is None else fq.token_offset(offset):
                net(nets.batch(rank=rank)).square().mean().backward()
            seen += [nets.full(p.grad) for p in net.parameters()]
            net.zero_grad()
        results.append(seen)
    for i, (got, want) in enumerate(zip(results[1], results[0], strict=True)):
        laws.assert_same_bytes(got, want, f"gradient {i}")
    assert graphs_since() == 2, "an offset made another graph"


def test_compiled_blocks_round_by_the_offset_in_force():
    """If false, a graph rounds as where it was made: ranks and micro-batches that have tokens of
    their own share bits."""
    run_ranks(2, _other_offset)


def _compiled_optimizer(rank: int, world: int) -> None:
    for name in laws.every_second(["mxfp8", "delayed"], 0):
        net, seen = build(RECIPES[name]), []
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
        for batch in range(2):
            before = [p.to_local().detach().clone() for p in net.parameters()]
            nets.train_step(
                net, SimpleNamespace(step=step, zero_grad=optimizer.zero_grad), batch, rank
            )
            seen += [
                torch.equal(a, p.to_local()) for a, p in zip(before, net.parameters()) if a.numel()
            ]
        assert not any(seen), name


def test_an_optimizer_is_compiled_over_sharded_weights():
    """If false, dynamo takes two weights for one tensor, and refuses the optimizer."""
    run_ranks(2, _compiled_optimizer)

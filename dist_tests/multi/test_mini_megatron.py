"""The example trainer on real ranks: flat buffers, a distributed optimizer, and weights published by fq.hooks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, assert_same_storage
from dist_tests.multi.harness import DEVICE, run_ranks
from examples.mini_megatron.data_parallel import DataParallel
from examples.mini_megatron.flat import FlatLayout
from examples.mini_megatron.train import Run, train
from fsdp_quant.formats import Direction

ALL = os.environ.get("FSDP_QUANT_ALL_PAIRS") == "1"
STEPS = 100 if ALL and DEVICE == "cuda" else 3
RECIPES = {"mxfp8 nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"), "fp8_block": fq.recipes.fp8_block(), "nvfp4": fq.recipes.nvfp4()}
WAYS = [("odd", "codes", "halo"), ("empty", "codes", "dense"), ("random", "highprec", "dense"), ("even", "auto", "halo")]


def assert_same_run(got: Run, want: Run, what: str) -> None:
    """Losses of every rank, weights, codes, and this rank's piece of every master, bit for bit."""
    assert got.skipped == want.skipped, f"{what}: steps {got.skipped} were skipped, want {want.skipped}"
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert_same_bytes(a, b, f"{what}: losses of step {step}")
    for name, master in got.optimizer.masters.items():
        own = want.optimizer.masters[name].reshape(-1)[slice(*got.optimizer.shards[name].run(got.optimizer.dp.rank))]
        assert_same_bytes(master.detach(), own.detach(), f"{what}: master of {name}")
        weights = (run.optimizer.params[name] for run in (got, want))
        if name in got.optimizer.plain:
            assert_same_bytes(*(w.detach() for w in weights), f"{what}: {name}")
            continue
        mine, theirs = weights
        for direction in Direction:
            assert_same_storage(mine.storage_for(direction), theirs.storage_for(direction), f"{what}: {name} {direction.value}")


def _train(rank: int, world: int, folder: str) -> None:
    together, alone = DataParallel(world, dist.group.WORLD), DataParallel(world, None)
    common = {"micro_batches": 1, "layers": 1, "device": DEVICE, "overflows": ((1, world - 1),), "bucket_size": 2000}
    for name, recipe in RECIPES.items() if ALL else [("mxfp8 nvfp4", RECIPES["mxfp8 nvfp4"])]:
        want = train(alone, recipe, STEPS, **common)
        assert want.skipped == [1]
        for policy, transport, stats in WAYS:
            options = {**common, "policy": policy, "transport": transport, "stats": stats, "evaluate": policy == "random"}
            what = f"{name}, {policy} cuts, {transport}, {stats}"
            if policy != "odd":
                assert_same_run(train(together, recipe, STEPS, **options), want, what)
                continue
            half = train(together, recipe, 2, **options)
            half.optimizer.save(Path(folder))
            dist.barrier()
            rest = {"resume": Path(folder), "first": 2}
            moved = {**options, "policy": "random"}
            for again in (train(together, recipe, STEPS, **moved, **rest), train(alone, recipe, STEPS, **common, **rest)):
                again.losses, again.skipped = half.losses + again.losses, half.skipped + again.skipped
                assert_same_run(again, want, f"{what}, resumed by {again.optimizer.dp.owners}")
    unclipped = {**common, "clip": 1e9}  # else the norm's sum is another order's
    want = train(alone, RECIPES["fp8_block"], 1, **unclipped)
    for policy in ("even", "odd"):
        got = train(together, RECIPES["fp8_block"], 1, **unclipped, policy=policy, reduction="scatter")
        assert_same_run(got, want, f"reduce-scatter, {policy} cuts")


@pytest.mark.parametrize("world", [2, 4] if DEVICE == "cuda" else [2])
def test_pieces_train_as_one_process(world: int):
    """Otherwise a distributed optimizer trains other weights than one process with the same micro-batches: in any of the cut
    policies, transports and statistics, over an overflow on one rank, with forced syncs and evaluations between steps, and
    through a checkpoint that another world loads."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, _train, folder)


def test_layouts_follow_the_padding_rules():
    """Otherwise buffers are not those of a Megatron-style trainer, or a pad or a gap has an owner and a place on the wire."""
    sizes = {"a": 1000, "b": 64, "c": 4097, "d": 33}
    for ranks in (1, 2, 3, 5, 6, 8, 12):
        for wide in (False, True):
            layout = FlatLayout(sizes, ranks, 1100, pad_to_2_16=wide)
            assert list(layout.starts) == ["d", "c", "b", "a"] and all(s % 64 == 0 for s in layout.starts.values())
            assert len(layout.buckets) == 2, "d and c fill a bucket, a and b the next"
            for bucket in layout.buckets:
                size = bucket.end - bucket.start
                assert size % ranks == size % 128 == 0 and (not wide or size % 2**16 == 0)
                assert {b - a for a, b in zip(bucket.bounds, bucket.bounds[1:])} == {size // ranks}
            for name, size in sizes.items():
                assert layout.shards(name).numel == size and layout.shards(name).ranks == ranks
    assert_same_bytes(FlatLayout(sizes, 2, 1100).view(torch.arange(9000), "d"), torch.arange(33))

# SPDX-License-Identifier: Apache-2.0
"""The tables by which kernels cast pieces: what they tell is the cast of covering rows, byte for
byte, for every cut."""

from __future__ import annotations

import contextlib
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_tests import pieces
from dist_tests.laws import EVERYTHING, PIECE_PAIRS, PIECE_QUANTIZERS, assert_same_bytes, values
from dist_tests.single import test_hooks
from dist_tests.single.test_hooks import (
    DELAYED,
    IN_PLACE,
    POLICIES,
    WAYS,
    codes_in_place,
    piece,
    quantized,
    random_cuts,
)
from dist_tests.virtual import VirtualRanks
from fsdp_quant.formats import ROWWISE
from fsdp_quant.hooks import SyncItem, plan_weight_sync
from fsdp_quant.ops import native
from fsdp_quant.quantizer import HybridQuantizer
from fsdp_quant.weight_sync.shard_map import ShardMap

SHAPES = [
    (1, 2),
    (1, 40),
    (40, 2),
    (5, 8),
    (33, 18),
    (40, 48),
    (133, 34),
    (130, 130),
    (300, 24),
    (2, 400),
]


def assert_plans_cast_as_rows_do(
    masters: dict[str, Tensor],
    hybrids: dict[str, HybridQuantizer],
    shards: dict[str, ShardMap],
    transport: str,
    stats: str,
    what: str,
    dtype=torch.bfloat16,
    steps: int = 1,
    device: str = "cpu",
) -> None:
    """On every rank a sync with tables and one without; steps: casts of changing masters, every
    third one skipped."""
    world = next(iter(shards.values())).ranks
    masters = {n: m.to(device) for n, m in masters.items()}

    def on_rank(group):
        syncs = []
        for _ in range(2):
            weights = [quantized(n, m, hybrids[n], dtype=dtype) for n, m in masters.items()]
            items = [SyncItem(w.state.name, w, shards[w.state.name]) for w in weights]
            syncs.append(plan_weight_sync(items, group, transport, stats))
        assert syncs[0]._plan is not None, syncs[0].unsupported_reason
        syncs[1]._plan = None
        own = [piece(m, shards[n], group.rank()).clone() for n, m in masters.items()]
        for step in range(steps):
            for master in own:
                master.mul_(1.0 - 0.7 * step)
            for sync in syncs:
                sync.cast_(own, skip=None if step == 0 else torch.tensor(float(step % 3 == 2)))
            for (name, got), want in zip(
                pieces.left_by(syncs[0]).items(), pieces.left_by(syncs[1]).values()
            ):
                assert_same_bytes(got, want, f"{what}: step {step}, rank {group.rank()}, {name}")

    with pieces.kernels() if device == "cpu" else contextlib.nullcontext():
        VirtualRanks(world).run(on_rank)


def random_plan(seed: int, shapes: list[tuple[int, int]]) -> tuple:
    """The first arguments of `assert_plans_cast_as_rows_do`, for up to three weights on up to six
    ranks."""
    draw = random.Random(seed)
    world = draw.randint(1, 6)
    masters, hybrids, shards = {}, {}, {}
    for i in range(draw.randint(1, 3)):
        name, (row, col) = f"w{i}", draw.choice(PIECE_PAIRS)
        rows, cols = draw.choice(shapes)
        masters[name] = values(
            rows,
            cols,
            seed=draw.randint(0, 99),
            kind=draw.choice(["gauss", "heavy"]),
            dtype=torch.float32,
        )
        hybrids[name] = HybridQuantizer(row, col, draw.choice(["original", "rowwise_dequantized"]))
        shards[name] = random_cuts(draw, rows * cols, world, draw.choice(POLICIES))
    transport, stats = draw.choice([*WAYS, ("auto", "dense"), ("codes", "halo")])
    what = f"{hybrids} {[list(m.shape) for m in masters.values()]} {shards}, {transport}, {stats}"
    return masters, hybrids, shards, transport, stats, what


@settings(max_examples=600 if EVERYTHING else 30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_tables_tell_the_cast_of_covering_rows(seed: int):
    """Otherwise the bytes of a step depend on whether kernels made them."""
    assert_plans_cast_as_rows_do(*random_plan(seed, SHAPES))


def test_scales_of_many_encodings_take_several_launches():
    """Otherwise a sync of more encodings than one launch takes loses scales."""
    with mock.patch.object(native, "SCALE_SIDES", 1):
        for seed in range(4):
            assert_plans_cast_as_rows_do(*random_plan(seed, SHAPES))


@pytest.mark.parametrize(("transport", "stats"), WAYS)
def test_skipped_steps_and_histories_are_those_of_covering_rows(
    transport: str, stats: str, device: str = "cpu"
):
    """Otherwise a kernel writes in a step that was skipped, or a history misses an amax."""
    pairs = {"a": (DELAYED, DELAYED), "b": (DELAYED, "nvfp4"), "c": ("mxfp8", DELAYED)}
    hybrids = {name: HybridQuantizer(*pair) for name, pair in pairs.items()}
    masters = {
        n: values(50, 34, seed=i, kind="outliers", dtype=torch.float32)
        for i, n in enumerate(hybrids)
    }
    shards = dict.fromkeys(hybrids, ShardMap((0, 1, 835, 835, 1700)))
    assert_plans_cast_as_rows_do(
        masters, hybrids, shards, transport, stats, f"{transport} {stats}", steps=6, device=device
    )


@pytest.mark.parametrize(("transport", "stats"), WAYS)
def test_tables_give_parts_the_scales_of_the_whole(transport: str, stats: str):
    """Otherwise the table of amaxes that parts of a weight share is another on their ranks, or a
    kernel misses it."""
    with pieces.kernels():
        test_hooks.test_parts_have_the_scales_of_the_whole(transport, stats)


@pytest.mark.parametrize("pair", IN_PLACE, ids="-".join)
def test_tables_point_at_codes_that_are_read_where_they_are_gathered(pair):
    """Otherwise a kernel writes a run where another one lies."""
    with pieces.kernels():
        codes_in_place(pair, 4)


def test_values_that_are_not_finite_and_options_of_formats_pass_the_tables(device: str = "cpu"):
    """Otherwise a NaN, an option or a dtype of a parameter is lost between two launches."""
    draw = random.Random(0)
    for i, (name, quantizer) in enumerate(sorted(PIECE_QUANTIZERS.items())):
        master = values(35, 34, kind="heavy", dtype=torch.float32)
        master[3:20, 5:29:3] = (float("nan"), float("-inf"), 0.0, 2.0**-133)[i % 4]
        shards = {"w": random_cuts(draw, master.numel(), 3, "odd")}
        hybrids = {"w": HybridQuantizer(quantizer, quantizer)}
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        assert_plans_cast_as_rows_do(
            {"w": master},
            hybrids,
            shards,
            "codes",
            ("dense", "halo")[i // 2 % 2],
            name,
            dtype,
            1,
            device,
        )


def test_masters_that_move_and_other_dtypes_are_followed():
    """Otherwise a cast reads memory that the trainer has let go, or an fp32 master as bf16."""
    with pieces.kernels():
        weight = quantized(
            "w", master := values(40, 48, dtype=torch.float32), HybridQuantizer("mxfp8", "nvfp4")
        )
        sync = plan_weight_sync([SyncItem("w", weight, ShardMap((0, master.numel())))], None)
        kept = master.clone()
        sync.refresh([kept])
        assert sync._plan.knows([kept]) and not sync._plan.knows([master])
        before = weight.storage_for(ROWWISE).data.clone()
        for again in (master.to(torch.bfloat16), master.clone(), kept):
            weight.storage_for(ROWWISE).data.zero_()
            sync.refresh([again])
            assert_same_bytes(weight.storage_for(ROWWISE).data, before, f"{again.dtype}")
        room = [torch.zeros(want.nbytes, dtype=torch.uint8) for want in sync.buffers()]
        sync.bind(room)
        sync.refresh([kept.mul_(2)])
        assert any(b.count_nonzero() for b in room), (
            "a cast wrote the segments that were there before bind"
        )


def test_what_kernels_do_not_cast_is_told():
    """Otherwise a sync is slower than it could be, and nobody knows."""
    for shape, hybrid, compute_dtype, why in (
        (
            (6, 7),
            HybridQuantizer("mxfp8", "nvfp4"),
            torch.bfloat16,
            "w.columnwise: 4-bit codes of 7 columns",
        ),
        (
            (6, 8),
            HybridQuantizer("mxfp8", "mxfp8"),
            None,
            "w.rowwise: quantizers see the dtype of the masters",
        ),
    ):
        weight = quantized("w", torch.ones(shape), hybrid, compute_dtype)
        with pieces.kernels():
            sync = plan_weight_sync(
                [SyncItem("w", weight, ShardMap((0, weight.numel())))],
                None,
                compute_dtype=compute_dtype,
            )
        assert sync._plan is None and why in sync.describe()
    weight = quantized("w", torch.ones(6, 8), HybridQuantizer("mxfp8", "nvfp4"))
    assert (
        "no kernels run on this cpu"
        in plan_weight_sync([SyncItem("w", weight, ShardMap((0, 48)))], None).describe()
    )

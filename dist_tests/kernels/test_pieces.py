# SPDX-License-Identifier: Apache-2.0
"""Kernels that cast pieces give the bytes of the cast of covering rows, which other kernels
make."""

from __future__ import annotations

import itertools

import pytest
import torch

from dist_tests.kernels import expected
from dist_tests.laws import EVERYTHING, PIECE_PAIRS, values
from dist_tests.single import test_cast_plan, test_hooks
from dist_tests.single.test_cast_plan import assert_plans_cast_as_rows_do, random_plan
from dist_tests.single.test_hooks import WAYS
from fsdp_quant.quantizer import HybridQuantizer
from fsdp_quant.weight_sync.shard_map import ShardMap

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

SHAPES = [
    (1, 2),
    (33, 18),
    (133, 34),
    (130, 130),
    (300, 24),
    (515, 264),
    (256, 512),
    (1030, 132),
    (7, 3000),
]


@pytest.mark.parametrize("seed", range(400 if EVERYTHING else 40))
def test_kernels_cast_pieces_as_rows(seed: int):
    """Otherwise what a GPU publishes depends on where a trainer cuts its buffers."""
    assert_plans_cast_as_rows_do(*random_plan(seed, SHAPES), device="cuda")


@pytest.mark.parametrize("pair", PIECE_PAIRS, ids="-".join)
def test_kernels_cast_every_pair(pair):
    """Otherwise a pair of formats works on the CPU alone; aligned rows, rows that begin anywhere,
    and whole tensors."""
    master = values(260, 392, kind="heavy", dtype=torch.float32)
    for cuts, stats in (((0, 1001, 101777), "halo"), ((0, 40000, 77768), "dense"), ((), "dense")):
        shards, hybrids = (
            {"w": ShardMap((*(cuts or (0,)), master.numel()))},
            {"w": HybridQuantizer(*pair)},
        )
        assert_plans_cast_as_rows_do(
            {"w": master}, hybrids, shards, "codes", stats, f"{pair} {cuts}", device="cuda"
        )


@pytest.mark.parametrize(("transport", "stats"), WAYS)
def test_kernels_leave_skipped_steps_alone(transport: str, stats: str):
    """Otherwise a step that was skipped on the device changes codes, scales or a history."""
    test_cast_plan.test_skipped_steps_and_histories_are_those_of_covering_rows(
        transport, stats, "cuda"
    )


@pytest.mark.parametrize(("transport", "stats"), WAYS)
def test_kernels_give_parts_the_scales_of_the_whole(transport: str, stats: str):
    """Otherwise a weight that tensor parallelism cuts has other codes on a GPU."""
    test_hooks.test_parts_have_the_scales_of_the_whole(transport, stats, "cuda")


@pytest.mark.parametrize("pair", test_hooks.IN_PLACE, ids="-".join)
def test_codes_of_kernels_are_read_where_they_were_gathered(pair):
    """Otherwise a product on a GPU reads memory that was freed, or a run where another one lies."""
    test_hooks.codes_in_place(pair, 4, "cuda")


def test_kernels_take_values_that_are_not_finite():
    """Otherwise a NaN or an infinity is hidden, or an option of a format is lost."""
    test_cast_plan.test_values_that_are_not_finite_and_options_of_formats_pass_the_tables("cuda")
    # whole tiles, which look at no edges
    master = values(260, 264, kind="heavy", dtype=torch.float32)
    for pair, value in itertools.product(
        (("mxfp8", "mxfp8"), ("fp8_row", "fp8_row"), ("mxfp8", "nvfp4")), ("nan", "-inf")
    ):
        master[100:200:7, 30:180:50] = float(value)
        for cuts in ((0, master.numel()), (0, 1001, master.numel())):
            hybrids, shards = {"w": HybridQuantizer(*pair)}, {"w": ShardMap(cuts)}
            assert_plans_cast_as_rows_do(
                {"w": master},
                hybrids,
                shards,
                "codes",
                "halo",
                f"{pair} {value} {cuts}",
                device="cuda",
            )


@pytest.mark.parametrize("name", ["hybrid", "fp8_delayed", "fp8_block"])
def test_a_published_layer_trains_as_with_fused_adams_codes(name: str):
    """Otherwise the codes that Adam's kernel emits are not those of a cast of the same masters."""
    test_hooks.test_a_layer_trains_as_with_its_own_optimizer(name, "cuda")

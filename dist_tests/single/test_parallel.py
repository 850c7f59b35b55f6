# SPDX-License-Identifier: Apache-2.0
"""Layers that ranks share, in a group of one, as a Hopper GPU runs them: operands come compact and
are laid out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fsdp_quant as fq
from dist_tests.single import hopper
from dist_tests.single.test_hopper import error, values

BF16 = torch.bfloat16
# Codes are the same but for subnormals of anchored ones, 2^-14 below their line (4e-4 of a
# product); y, dx and what stands between two layers are rounded to bf16 (2^-9 = 2e-3 each), in
# another order of sums.
TOLERANCE = 6e-3


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_shared_layers_equal_whole_ones(name: str, group):
    """If false, codes that were gathered are multiplied in a layout that they are not in."""
    recipe, x, dy, made = (
        fq.recipes.by_name(name),
        values(560, 64, seed=1, dtype=BF16),
        values(560, 64, seed=2, dtype=BF16),
        [],
    )
    with hopper.emulated(), fq.token_offset(0):
        for shared in (True, False):
            torch.manual_seed(0)
            if shared:
                options = {"sequence_dim": 0, "dtype": BF16, "recipe": recipe}
                up = fq.parallel.ColumnParallelLinear(64, 96, group, name="up", **options)
                down = fq.parallel.RowParallelLinear(96, 64, group, name="down", **options)
            else:
                up = fq.Linear(64, 96, dtype=BF16, recipe=recipe, name="up")
                down = fq.Linear(96, 64, dtype=BF16, recipe=recipe, name="down")
            mine = x.clone().requires_grad_()
            y = down(torch.relu(up(mine)))
            y.backward(dy)
            made.append(
                [y.detach(), mine.grad, *(p.grad for m in (up, down) for p in m.parameters())]
            )
    for i, (got, want) in enumerate(zip(*made)):
        assert error(got.float(), want.float()) < TOLERANCE, i


def test_a_weight_syncs_layers_equal_whole_ones(group):
    """If false, a layer that ranks share asks a trainer's weight for masters that it does not have,
    or for another place in the batch than fq.token_offset says."""
    recipe, x, outputs = fq.recipes.hybrid("mxfp8", "nvfp4"), values(64, 64, seed=1, dtype=BF16), []
    for kind, options in (
        (fq.Linear, {}),
        (fq.parallel.ColumnParallelLinear, {"group": group, "sequence_dim": 0}),
    ):
        torch.manual_seed(0)
        with fq.quantized_model_init(recipe), fq.token_offset(0):
            layer = kind(64, 96, bias=False, dtype=BF16, recipe=recipe, name="up", **options)
            sync = fq.hooks.plan_weight_sync(
                [("w", layer.weight, fq.hooks.ShardMap((0, 64 * 96)))], group
            )
            sync.refresh(sync.init_masters())
            outputs.append(layer(x).detach())
            assert layer.weight.state.weight_sync is sync
    assert torch.equal(*outputs)

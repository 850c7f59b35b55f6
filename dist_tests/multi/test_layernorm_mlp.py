# SPDX-License-Identifier: Apache-2.0
"""LayerNormMLP under `fully_shard`: another layout of the same training."""

from __future__ import annotations

import torch
from torch import nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks

RECIPES = {
    "delayed": fq.recipes.fp8_delayed(length=2),
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
}


class Net(nets.Net):
    """Two fused blocks, whose weights do not divide by the ranks, and a head."""

    def __init__(self, recipe: fq.Recipe, recompute: bool, recompute_gate_up: str | None):
        super().__init__(hidden=(), recompute=recompute)
        options = {"residual": True, "recipe": recipe, "recompute": recompute_gate_up}
        self.blocks = nn.ModuleList(
            [
                fq.LayerNormMLP(
                    nets.K,
                    33,
                    bias=False,
                    normalization="RMSNorm",
                    name="blocks.0",
                    **options,
                ),
                fq.LayerNormMLP(
                    nets.K,
                    48,
                    "gelu",
                    True,
                    "LayerNorm",
                    zero_centered_gamma=True,
                    name="blocks.1",
                    **options,
                ),
            ]
        )


def build(recipe: fq.Recipe, recompute: bool = False, recompute_gate_up: str | None = None) -> Net:
    torch.manual_seed(0)
    return Net(recipe, recompute, recompute_gate_up)


def _as_one_process(rank: int, world: int) -> None:
    for name, recipe in RECIPES.items():
        single = build(recipe)
        sharded = [
            nets.shard(build(recipe, *recompute))
            for recompute in ((False,), (True,), (False, "gate_up"))
        ]
        optimizers = [nets.adam(net) for net in (single, *sharded)]
        for step in range(2):
            want, *got = (
                nets.train_step(net, o, step) for net, o in zip((single, *sharded), optimizers)
            )
            for i, y in enumerate(got):
                laws.assert_same_bytes(
                    y, want, f"world {world}, {name}, arm {i}: output of step {step}"
                )
        for i, net in enumerate(sharded):
            state = nets.full_state(net)
            for key, value in single.state_dict().items():
                laws.assert_same_bytes(state[key], value, f"world {world}, {name}, arm {i}: {key}")


def test_sharded_mlps_train_as_in_one_process():
    """If false, a fused module under fully_shard, kept, checkpointed or in parts recomputed, is
    another model than in one process."""
    run_ranks(2, _as_one_process)

"""Experts, per-layer recipes and schedules under FSDP2 train as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from fsdp_quant import recipes

K, N = 24, 40
SPLITS = ([5, 0, 11], [0, 16, 0], [0, 0, 16], [16, 0, 0])


class Routed(nn.Module):
    """Two linear layers around three experts."""

    def __init__(self, recipe, packed: bool = False):
        super().__init__()
        self.up = nn.Linear(K, K)
        self.experts = fq.GroupedLinear(3, K, N, packed=packed, name="experts")
        self.down = nn.Linear(N, 8)
        fq.convert(self, recipes.identity())
        fq.set_recipe(self, recipe)

    def forward(self, x, sizes):
        return self.down(torch.relu(self.experts(torch.relu(self.up(x)), sizes)))


def recipes_of(model: nn.Module) -> list[str]:
    return [repr(m.recipe) for m in model.modules() if isinstance(m, fq.Linear)]


def _trains_as_one_process(rank: int, world: int) -> int:
    kinds = [
        recipes.mxfp8(), recipes.fp8_delayed(length=3), recipes.hybrid("mxfp8", "nvfp4"), recipes.fp8_block(),
        recipes.schedule(
            recipes.per_layer(recipes.mxfp8(), {"experts": recipes.fp8_current()}, last=(1, recipes.identity())),
            (2, 3, recipes.nvfp4()), (3, None, recipes.hybrid("identity", "fp8_row")),
        ),
    ]
    for recipe in kinds:
        torch.manual_seed(0)
        whole = Routed(recipe)
        sharded = copy.deepcopy(whole)
        fq.set_recipe(sharded, recipe)  # a copy follows no schedule
        fully_shard(sharded.experts)
        fully_shard(sharded)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, sharded)]
        for step, sizes in enumerate(SPLITS):
            with fq.token_offset(0):
                fq.begin_step(step)
                assert recipes_of(whole) == recipes_of(sharded)
                results = []
                for model, optimizer in zip((whole, sharded), optimizers):
                    y = model(nets.batch(step, k=K), sizes)
                    y.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(y.detach())
            laws.assert_same_bytes(results[1], results[0], f"world {world}, {recipe}, step {step}")
        for (name, want), got in zip(whole.state_dict().items(), nets.full_state(sharded).values()):
            laws.assert_same_bytes(got, want, f"world {world}, {recipe}, {name}")
        if isinstance(recipe, recipes.Schedule):
            assert {m.recipe.name for m in sharded.modules() if isinstance(m, fq.Linear)} == {"hybrid"}
    packed = fully_shard(Routed(recipes.mxfp8(), packed=True))
    with pytest.raises(ValueError, match=r"experts.weight is \[3, 40, 24\]: FSDP2 gathers.*packed=False"):
        packed(nets.batch(k=K), SPLITS[0])
    return len(kinds)


@pytest.mark.parametrize("world", [1, 2])
def test_experts_and_schedules_train_as_in_one_process(world: int):
    """If false, ranks multiply an expert's weight in different formats, or switch recipes in different steps."""
    assert run_ranks(world, _trains_as_one_process) == [5] * world

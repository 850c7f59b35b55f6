# SPDX-License-Identifier: Apache-2.0
"""Experts, per-layer recipes and schedules under FSDP2 train as in one process."""

from __future__ import annotations

import collections
import copy
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.checkpoint import code_tensors, fingerprints
from fsdp_quant.counters import counters
from fsdp_quant.formats import Direction
from fsdp_quant.linear.operands import weight_storages

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
        recipes.mxfp8(),
        recipes.fp8_delayed(length=3),
        recipes.hybrid("mxfp8", "nvfp4"),
        recipes.fp8_block(),
        recipes.schedule(
            recipes.per_layer(
                recipes.mxfp8(), {"experts": recipes.fp8_current()}, last=(1, recipes.identity())
            ),
            (2, 3, recipes.nvfp4()),
            (3, None, recipes.hybrid("identity", "fp8_row")),
        ),
    ]
    arms = [*((recipe, True) for recipe in kinds), (kinds[0], False), (kinds[-1], False)]
    for recipe, packed in arms:
        torch.manual_seed(0)
        whole = Routed(recipe, packed)
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
            laws.assert_same_bytes(
                results[1], results[0], f"world {world}, {recipe}, packed={packed}, step {step}"
            )
        assert fingerprints(sharded) == fingerprints(whole)
        for (name, want), got in zip(whole.state_dict().items(), nets.full_state(sharded).values()):
            laws.assert_same_bytes(got, want, f"world {world}, {recipe}, packed={packed}, {name}")
        if isinstance(recipe, recipes.Schedule):
            assert {m.recipe.name for m in sharded.modules() if isinstance(m, fq.Linear)} == {
                "hybrid"
            }
    return len(arms)


@pytest.mark.parametrize("world", [1, 2])
def test_experts_and_schedules_train_as_in_one_process(world: int):
    """If false, ranks multiply an expert's weight in different formats, or switch recipes in
    different steps."""
    assert run_ranks(world, _trains_as_one_process) == [7] * world


def _gathers_whole_experts(rank: int, world: int) -> int:
    """Three experts of 40 x 24 over four ranks, of which one holds none."""
    made = [
        recipes.fp8_block(backward_override="dequantized"),
        recipes.fp8_delayed(),
        recipes.fp8_row(),
        recipes.nvfp4(),
        recipes.hybrid("mxfp8", "nvfp4"),
        *map(recipes.by_name, recipes.names()),
    ]
    made = made if laws.EVERYTHING else made[:5]
    for recipe in made:
        torch.manual_seed(0)
        whole = fq.GroupedLinear(3, K, N, packed=True, recipe=recipe, name="experts")
        sharded = fully_shard(copy.deepcopy(whole), reshard_after_forward=True)
        planned, x, sizes = fq.plan(sharded), nets.batch(k=K), SPLITS[0]
        counters.reset()
        with fq.token_offset(0):
            want, got = (module(x, sizes) for module in (whole, sharded))
        laws.assert_same_bytes(got, want, f"{recipe} y")
        got.sum().backward()
        gathers = counters.of("gather")
        for i, phase in enumerate(("forward", "backward")):
            size = sum(n for (of, _, _), n in gathers.items() if of == phase)
            bias = 0 if whole.bias is None else planned.other_bytes[i]
            assert planned.bytes_per_step(forward=i == 0, backward=i == 1) - bias == size, (
                f"{recipe} {phase}: {gathers}"
            )
        assert len({(phase, d) for phase, d, _ in gathers}) == 2, "a direction a pass"
        sharded.unshard()
        for e, matrix in enumerate(sharded.weight.unbind()):
            state = matrix._pair.owner
            module = fq.GroupedLinear(1, K, N, packed=True, recipe=recipe, name="experts")
            (alone,) = module.layers
            with torch.no_grad():
                alone.weight.copy_(whole.weight[e])
            for direction in Direction:
                one, gathered = (
                    weight_storages(weight, [direction], alone.plan, own, torch.float32)[direction]
                    for weight, own in ((alone.weight, alone._weight_state), (matrix, None))
                )
                for (name, a), b in zip(
                    one.buffers().items(), gathered.buffers().values(), strict=True
                ):
                    laws.assert_same_bytes(b, a, f"{recipe} {state.name} {direction.value}.{name}")
        sharded.reshard()
        with torch.inference_mode(), fq.token_offset(0):
            want, got = (module(x, sizes) for module in (whole, sharded))
        laws.assert_same_bytes(got, want, f"{recipe} y in inference_mode")
    with pytest.raises(
        NotImplementedError,
        match=r"experts.weight.0 is a matrix of a packed weight under fully_shard",
    ):
        code_tensors(nn.ModuleDict({"experts": sharded}))
    experts = nn.Module()
    experts.weight = nn.Parameter(whole.state_dict()["weight"].clone())
    model = nn.Sequential()
    model.experts = experts
    fully_shard(model)
    fq.convert(model, recipes.mxfp8(), grouped="experts")  # after fully_shard
    want = fq.GroupedLinear(3, K, N, False, packed=True, recipe=recipes.mxfp8())
    want.load_state_dict({"weight": whole.state_dict()["weight"]})
    model.unshard()
    laws.assert_same_bytes(model.experts(x, sizes), want(x, sizes), "converted")
    return len(made)


def test_packed_experts_are_gathered_as_each_alone_is_quantized():
    """If false, experts of one weight share scales, a pass gathers more than its direction, or
    ranks without experts hang."""
    assert len(set(run_ranks(4, _gathers_whole_experts))) == 1


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"packed": True, "recipe": recipes.mxfp8(), "dtype": torch.bfloat16}
        self.experts = fq.GroupedLinear(4, 64, 64, bias=False, **options)

    def forward(self, x, checkpoints: bool):
        arguments = x, [len(x) // 4] * 4
        if checkpoints:
            return checkpoint(self.experts, *arguments, use_reentrant=False)
        return self.experts(*arguments)


class _Root(nn.Module):  # which FSDP2 does not reshard after its forward
    def __init__(self):
        super().__init__()
        self.block = fully_shard(_Block())

    def forward(self, *arguments):
        return self.block(*arguments)


def _gathers_what_passes_read(rank: int, world: int) -> list[list[set]]:
    gathers = []
    # each expert runs by itself, or is called by itself in one product
    for recipe, rows in ((recipes.mxfp8(), 0), (recipes.fp8_delayed(), 64)):
        with hopper.emulated():
            model, steps = fully_shard(_Root()), []
            for checkpoints in (True, False):
                x = laws.values(rows if checkpoints else 64, 64).bfloat16().requires_grad_()
                counters.reset()
                with fq.autocast(recipe if checkpoints else recipes.mxfp8()):
                    model(x, checkpoints).sum().backward()
                steps.append({(phase, direction) for phase, direction, _ in counters.of("gather")})
        gathers.append(steps)
    return gathers


def test_experts_end_their_recomputation_together():
    """If false, a rank that had no tokens inside torch.utils.checkpoint gathers other directions
    than ranks that had, from the first step on that recomputes nothing."""
    for recomputed, plain in run_ranks(1, _gathers_what_passes_read)[0]:
        assert ("backward", "rowwise") in recomputed
        assert plain == {("forward", "rowwise"), ("backward", "columnwise")}


class _Calls(collections.Counter):
    """Calls of Python functions of a step, generators each time they go on, by file: of what runs
    before a layer does."""

    PLACES = "/tensor/", "/root_context.py", "/passes.py", "/counters.py", "/quantization.py"

    def of(self, step) -> _Calls:
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(None)
        return self

    def _note(self, frame, event, _) -> None:
        name = frame.f_code.co_filename
        if event == "call" and any(place in name for place in self.PLACES):
            self[f"{name.rsplit('/', 1)[1]} {frame.f_code.co_name}"] += 1


def _calls_per_step(rank: int, world: int) -> list[dict]:
    calls = []
    for experts in (4, 32):
        with hopper.emulated():
            options = {"packed": True, "recipe": recipes.mxfp8(), "dtype": torch.bfloat16}
            module = fq.GroupedLinear(experts, 64, 128, bias=False, **options)
            model = fully_shard(module)
            ends = torch.tensor([32] * experts).cumsum(0)
            x = laws.values(32 * experts, 64).bfloat16().requires_grad_()
            with torch.autograd.set_multithreading_enabled(False):
                for _ in range(3):
                    last = _Calls()
                    last.of(lambda model=model, x=x, ends=ends: model(x, ends).sum().backward())
            calls.append(dict(last))
    return calls


def test_a_gather_calls_nothing_per_expert():
    """If false, the host of a step works longer for more experts, whose codes one launch writes."""
    few, many = run_ranks(1, _calls_per_step)[0]
    assert few and few == many

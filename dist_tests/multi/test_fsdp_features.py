# SPDX-License-Identifier: Apache-2.0
"""What people do with `fully_shard`: each feature trains as plain FSDP2 whose ranks quantize the
whole weight, bit for bit."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from fsdp_quant.tensor.torch_compat import local_of, managed_params_of
from fsdp_quant.tensor.weight_state import values_of as inner_of

RECIPES = {
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_current/fp8_row": fq.recipes.hybrid("fp8_current", "fp8_row"),
    "fp8_delayed": fq.recipes.fp8_delayed(length=2),
}


class Feature(NamedTuple):
    """change: the net before it is sharded; shard: arguments of `fully_shard`, from the number of
    ranks; after: of the sharded net; optimizer: of its parameters; step: (net, optimizer, step,
    rank) -> what is compared besides the weights.
    """

    change: Callable[[nn.Module], object] = lambda net: None
    shard: Callable[[int], dict] = lambda world: {}
    after: Callable[[nn.Module], object] = lambda net: None
    optimizer: Callable = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)
    step: Callable = nets.train_step


# Features #


def mesh(*shape: int) -> dict:
    return {
        "mesh": init_device_mesh(
            torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")
        )
    }


def _clipped(net, optimizer, step: int, rank: int, foreach: bool) -> Tensor:
    nets_loss(net, step, rank).backward()
    norm = clip_grad_norm_(net.parameters(), 0.05, foreach=foreach)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor()


def nets_loss(net, step: int, rank: int, micro: int = 0) -> Tensor:
    fq.begin_step(step, micro)
    with fq.token_offset(0):
        return net(nets.batch(10 * step + micro, rank=rank)).float().square().mean()


def _accumulated(net, optimizer, step: int, rank: int, synced: bool) -> Tensor:
    """Three micro-batches, whose gradients are reduced once, or each time."""
    for micro in range(3):
        net.set_requires_gradient_sync(synced or micro == 2)
        net.set_reshard_after_backward(micro != 0)
        loss = nets_loss(net, step, rank, micro)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _prefetches(net) -> None:
    blocks = list(net.blocks)
    for block, after in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


def _frozen(net) -> None:
    """As under LoRA: a base that is not trained, and two small factors beside it that are."""
    block = net.blocks[0]
    block.up.requires_grad_(False)
    block.down.requires_grad_(False)
    block.add_module("a", nn.Linear(nets.K, 4, bias=False))
    block.add_module("b", nn.Linear(4, nets.K, bias=False))

    def forward(x):
        h = block.norm(x)
        return x + block.down(torch.relu(block.up(h))) + block.b(block.a(h))

    block.forward = forward


def _unused(net) -> None:
    net.blocks[0].add_module("extra", nn.Linear(nets.K, nets.K))


def _tied(net) -> None:
    """Two layers of one block with one weight."""
    block = net.blocks[1]
    block.add_module("again", nn.Linear(block.up.in_features, block.up.out_features))
    block.again.weight = block.up.weight
    block.forward = lambda x: x + block.down(torch.relu(block.up(block.norm(x)) + block.again(x)))


def _twice(net) -> None:
    """One block is called twice in a forward."""
    first, second = net.blocks
    net.forward = lambda x: net.head(first(second(first(x))))


def _checkpointed(net, **options) -> None:
    net.forward = lambda x: net.head(
        functools.reduce(lambda h, block: checkpoint(block, h, **options), net.blocks, x)
    )


def _selective():
    def policy(context, op, *args, **kwargs):
        kept = "linear" in str(op) or op is torch.ops.aten.relu.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _averaged(net, optimizer, step: int, rank: int) -> Tensor:
    """An average of the weights is swapped in for an evaluation, and out again."""
    params = list(net.parameters())
    if not hasattr(net, "average"):
        net.average = [p.detach().clone() for p in params]
    nets.train_step(net, optimizer, step, rank)
    with torch.no_grad():
        for mean, p in zip(net.average, params):
            mean.lerp_(p.detach(), 0.5)
        kept = [p.detach().clone() for p in params]
        for p, mean in zip(params, net.average):
            p.copy_(mean)
        fq.sync(net)
        net.eval()
        seen = net(nets.batch(99))
        net.train()
        net.reshard()  # the root stays gathered after a forward
        for p, k in zip(params, kept):
            p.copy_(k)
        fq.sync(net)
    return seen


def _offloaded(net, optimizer, step: int, rank: int) -> Tensor:
    """Optimizers make their counters where tensors are made by default: on the host, beside the
    shards."""
    with torch.device("cpu"):
        return nets.train_step(net, optimizer, step, rank)


def _of_two(net, optimizer, step: int, rank: int) -> Tensor:
    """Another model of the process is run in between."""
    if not hasattr(net, "other"):
        net.other = [nets.shard(fq.convert(nets.build(5), fq.recipes.nvfp4()))]
    loss = nets_loss(net, step, rank)
    nets_loss(net.other[0], step, rank).backward()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


FEATURES = {
    "clip, foreach": Feature(step=functools.partial(_clipped, foreach=True)),
    "clip, one by one": Feature(step=functools.partial(_clipped, foreach=False)),
    "accumulation, reduced once": Feature(step=functools.partial(_accumulated, synced=False)),
    "accumulation, reduced each time": Feature(step=functools.partial(_accumulated, synced=True)),
    "CPU offload": Feature(
        shard=lambda world: {
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        },
        step=_offloaded,
    ),
    "mixed precision": Feature(
        shard=lambda world: {
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, output_dtype=torch.float32
            )
        }
    ),
    "prefetch": Feature(after=_prefetches),
    "frozen base with LoRA": Feature(change=_frozen),
    "unused parameters": Feature(change=_unused),
    "tied weights": Feature(change=_tied),
    "a module used twice": Feature(change=_twice),
    "checkpointing, reentrant": Feature(
        change=functools.partial(_checkpointed, use_reentrant=True)
    ),
    "checkpointing, non-reentrant": Feature(
        change=functools.partial(_checkpointed, use_reentrant=False)
    ),
    "checkpointing, selective": Feature(
        change=functools.partial(_checkpointed, use_reentrant=False, context_fn=_selective)
    ),
    "average of weights": Feature(step=_averaged),
    "two models": Feature(step=_of_two),
    "AdamW, fused": Feature(optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "AdamW, one by one": Feature(
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False)
    ),
    "SGD with momentum": Feature(
        optimizer=functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    ),
    "shared axis of one": Feature(shard=lambda world: mesh(world, 1)),
    "replicated axis of one": Feature(shard=lambda world: mesh(1, world)),
    "replicate": Feature(shard=lambda world: {"by": replicate}),
}
WITH_RECOMPUTATION = {
    "checkpointing, reentrant",
    "checkpointing, non-reentrant",
    "checkpointing, selective",
}


@contextmanager
def named(what: str, failed: list[str]) -> Iterator[None]:
    """One feature does not hide the others: all ranks fail alike, and go on."""
    try:
        yield
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {error}")


def _trains_as_plain(
    rank: int, world: int, names: list[str], features: dict[str, Feature] | None = None
) -> None:
    failed: list[str] = []
    for i, name in enumerate(names):
        feature = (features or FEATURES)[name]
        labels = [*RECIPES, *RECIPES][i % len(RECIPES) :][: len(RECIPES)]
        for label in laws.sample(labels):
            recipe, delayed = RECIPES[label], "delayed" in label
            if delayed and feature.step is _averaged:
                continue  # a forward behind a step reads the histories, which the oracle has not
            with named(f"{name}, {label}, world {world}", failed):
                ours, oracle = nets.build(), nets.build()
                for net in (ours, oracle):
                    torch.manual_seed(1)
                    feature.change(net)
                fq.convert(ours, recipe)
                options = feature.shard(world)
                nets.shard(ours, **options)
                nets.shard(nets.as_oracle(oracle, recipe), **options)
                for net in (ours, oracle):
                    feature.after(net)
                a, b = feature.optimizer(ours.parameters()), feature.optimizer(oracle.parameters())
                for step in range(1 if delayed else 3):  # the oracle keeps no histories
                    got, want = (
                        feature.step(ours, a, step, rank),
                        feature.step(oracle, b, step, rank),
                    )
                    laws.assert_same_bytes(got, want, f"{name}, {label}: step {step}")
                got, want = nets.full_state(ours), nets.full_state(oracle)
                for key, value in want.items():
                    laws.assert_same_bytes(got[key], value, f"{name}, {label}: {key}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("part", range(2))
def test_features_train_as_under_plain_fsdp(part: int):
    """If false, a feature of FSDP2 that works with nn.Linear changes what is trained, or fails."""
    run_ranks(2, _trains_as_plain, list(FEATURES)[part::2])


def _low_bit(rank: int, world: int) -> None:
    """torchao's Adam of 8-bit moments, as it is without its compiler."""
    from torchao.optim import AdamW8bit

    recipe = RECIPES["mxfp8/nvfp4"]
    ours, oracle = (nets.build(hidden=(128,), k=64) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        pair = [nets.shard(fq.convert(ours, recipe)), nets.shard(nets.as_oracle(oracle, recipe))]
        pair = [(net, AdamW8bit(net.parameters(), lr=1e-2)) for net in pair]
        for step in range(3):
            for net, optimizer in pair:
                fq.begin_step(step)
                with fq.token_offset(0):
                    net(
                        laws.values(4, 64, seed=step + rank, dtype=torch.float32)
                    ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    moments = {type(local_of(s["exp_avg"])).__name__ for s in pair[0][1].state.values()}
    assert "OptimState8bit" in moments, moments
    got, want = nets.full_state(ours), nets.full_state(oracle)
    for key, value in want.items():
        laws.assert_same_bytes(got[key], value, key)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_third_partys_8_bit_adam_trains_as_under_plain_fsdp():
    """If false, an optimizer that is not torch's sees other parameters than ordinary DTensors."""
    run_ranks(2, _low_bit)


def _replicas(rank: int, world: int) -> None:
    features = {"HSDP": Feature(shard=lambda world: mesh(2, 2))}
    _trains_as_plain(rank, world, ["HSDP"] * 3, features)
    for recipe in RECIPES.values():
        net = nets.build()
        fq.convert(net, recipe)
        nets.shard(net, **mesh(2, 2))
        optimizer = nets.adam(net)
        for step in range(2):
            nets.train_step(net, optimizer, step, rank)
        mine = torch.cat([inner_of(local_of(p)).detach().flatten() for p in net.parameters()])
        other = [torch.empty_like(mine) for _ in range(2)]
        group = managed_params_of(net)[0].param.mesh_info.replicate_process_group
        torch.distributed.all_gather(other, mine, group=group)
        laws.assert_same_bytes(other[0], other[1], f"{recipe}: replicas")


def test_hybrid_sharding_trains_as_under_plain_fsdp_and_replicas_agree():
    """If false, copies of a shard drift apart."""
    run_ranks(4, _replicas)


def _alive() -> tuple[int, int]:
    """How many tensors this process holds, and bytes of their memory."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor)]
    return len(tensors), sum(t.untyped_storage().size() for t in tensors if type(t) is Tensor)


def _many_steps(rank: int, world: int) -> None:
    last = 49 if laws.EVERYTHING else 24
    for recipe in (fq.recipes.hybrid("mxfp8", "nvfp4"), fq.recipes.fp8_delayed(length=4)):
        net = nets.build(recompute=True)
        fq.convert(net, recipe)
        nets.shard(net)
        optimizer = nets.adam(net)
        counts = []
        for step in range(last + 1):
            nets.train_step(net, optimizer, step, rank)
            if step in (9, last):
                counts.append(_alive())
        # a thread of gloo that ends late holds the thread-local state of its collective, so the
        # step tensor
        for _ in range(20):
            if counts[-1][0] <= counts[0][0]:
                break
            time.sleep(0.1)
            counts[-1] = _alive()
        grown = f"(tensors, bytes) alive grow from {counts[0]} to {counts[1]} in {last - 9} steps"
        assert all(late <= early for early, late in zip(*counts)), f"{recipe}: {grown}"


def test_many_steps_take_the_memory_of_ten():
    """If false, long runs end for lack of memory: what 25 or 50 steps hold is what ten did."""
    run_ranks(2, _many_steps)


def refusals(
    rank: int,
    world: int,
    convert: Callable = fq.convert,
    optimizer: Callable = torch.optim.AdamW,
    others: Callable[[nn.Module], list[Callable]] = lambda net: [],
) -> list[str]:
    """Each refusal is the same on every rank, comes before any collective, and leaves a model that
    trains on.

    others:  further calls that are refused, of the sharded net.
    """
    net, twin = nets.build(), nets.build()
    for model in (net, twin):
        convert(model, fq.recipes.mxfp8())
        nets.shard(model)
    a, b = (optimizer(m.parameters(), lr=1e-2) for m in (net, twin))
    nets.train_step(net, a, 0, rank), nets.train_step(twin, b, 0, rank)
    errors = []

    def refused(call: Callable, gathers: bool = False) -> None:
        with nets.recorded_collectives() as seen:
            try:
                call()
            except (ValueError, RuntimeError) as error:
                errors.append(str(error))
            else:
                raise AssertionError("nothing was refused")
        assert gathers or not seen, f"collectives before {errors[-1]}: {seen}"

    net.unshard()
    refused(lambda: fq.set_recipe(net, fq.recipes.nvfp4()))
    net.reshard()

    def other_format() -> None:
        block, forward = net.blocks[0], net.blocks[0].forward
        block.forward = lambda x: fq.autocast(fq.recipes.nvfp4())(forward)(x)  # inside the root
        try:
            net(nets.batch())
        finally:
            del block.forward

    refused(other_format, gathers=True)  # FSDP2's, before the module is called
    state = copy.deepcopy(fq.state_dict(net)) | {
        "fingerprint": "of another",
        "recipe": "of another",
    }
    # one bit: does a rank refuse its file?
    refused(lambda: fq.load_state_dict(net, state), gathers=True)
    for call in others(net):
        refused(call)
    for step in range(1, 3):
        laws.assert_same_bytes(
            nets.train_step(net, a, step, rank),
            nets.train_step(twin, b, step, rank),
            f"step {step} after the refusals",
        )
    return errors


def test_refusals_are_the_same_on_every_rank_and_change_nothing():
    """If false, one rank raises while another waits for it, or a refused change is half made."""
    results = run_ranks(2, refusals)
    assert results[0] == results[1] and len(results[0]) == 3, results
    for text, wanted in zip(results[0], ("gathered now", "use fq.set_recipe", "another recipe")):
        assert wanted in text or "recipe" in text, (wanted, text)

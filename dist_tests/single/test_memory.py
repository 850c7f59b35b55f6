# SPDX-License-Identifier: Apache-2.0
"""Recomputation, and `fq.memory.offload` on a device that is none; kernels/test_memory.py has the
copies of a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, recorded_saves, sample, values
from dist_tests.single import hopper
from dist_tests.single.recipe_table import CPU, MODULES, RECIPES
from dist_tests.single.recipe_table import MODES as BACKWARD_MODES
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.ops.product_error import is_probed

OF_LLAMA = {"bias": False, "normalization": "RMSNorm", "dtype": torch.bfloat16}
offloading = importlib.import_module("fsdp_quant.memory.offload")


@pytest.fixture(autouse=True)
def _own_step():
    with kept_step():
        STEP.seed, STEP.counted_by_hand = 0, False
        yield


# Recomputation #


class Mixed(nn.Module):
    """A Linear, a LayerNormMLP and experts; `again` wraps each of them."""

    def __init__(self, recipe: fq.Recipe, again):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 32, dtype=torch.bfloat16)
        fq.convert(self, recipe)
        self.mlp = fq.LayerNormMLP(32, 48, residual=True, recipe=recipe, name="mlp", **OF_LLAMA)
        self.experts = fq.GroupedLinear(
            2, 32, 32, dtype=torch.bfloat16, recipe=recipe, name="experts"
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.linear, x)
        return self.again(self.experts, self.again(self.mlp, x), [16, 16])


def _selected():
    def policy(context, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE if "linear" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


MODES = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": _selected},
}
NAMED = [n for n in recipes.names() if n not in ("bf16", "hybrid")]


def steps(recipe: fq.Recipe, again) -> list[Tensor]:
    """Outputs, gradients, weights and histories of two steps."""
    STEP.step = 0
    STEP.publish()
    model, seen = Mixed(recipe, again), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        x = values(32, 32, seed=i).requires_grad_()
        y = model(x)
        y.backward(values(32, 32, seed=5 + i))
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    saved = fq.state_dict(model)["histories"]
    return [
        *seen,
        *(p.detach().clone() for p in model.parameters()),
        *(saved[k]["amaxes"] for k in sorted(saved)),
    ]


@pytest.mark.parametrize(("name", "mode"), sample([(n, m) for n in NAMED for m in MODES], 5))
def test_recomputation_replays_codes_scales_histories_and_random_bits(name: str, mode: str):
    """If false, checkpointed blocks train another model: in any module, however torch's checkpoint
    runs them again."""
    recipe = recipes.by_name(name)
    want = steps(recipe, lambda module, *args: module(*args))
    for i, (got, wanted) in enumerate(
        zip(steps(recipe, functools.partial(checkpoint, **MODES[mode])), want, strict=True)
    ):
        assert_same_bytes(got, wanted, f"{name}, {mode}: {i}")


@pytest.mark.parametrize(("forward", "backward"), [(0, 0), (0, 1), (15, 16)])
def test_a_policy_saves_the_products_of_probed_steps(forward: int, backward: int):
    """If false, a selective checkpoint that saves products computes those of probed steps again, or
    raises where the next step begins before its backward: one of both alone is probed."""

    def policy(context, op, *args, **kwargs):
        saves = str(op).endswith(".gemm.default")
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    again, grads = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts), []
    with hopper.emulated("sm_90a") as gpu, hopper.replaced_operators(hopper.Seen(gpu)):
        layer = fq.Linear(64, 64, recipe=recipes.mxfp8(), dtype=torch.bfloat16)
        for is_again in (False, True):
            fq.begin_step(forward)
            x = values(64, 64).requires_grad_()
            y = again(layer, x) if is_again else layer(x)
            assert is_again or bool(layer.runtime.guard[0, 1]) == is_probed(forward)
            products = gpu.count("gemm")
            fq.begin_step(backward)
            y.sum().backward()
            assert gpu.count("gemm") - products == 2 * is_again, (
                "the backward's are dgrad and wgrad"
            )
            grads.append(x.grad)
    assert_same_bytes(*grads, "behind the products of the forward")


# Graphs of autograd #


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_no_gradient_accumulator_outlives_its_step(name: str, packed: bool):
    """A CUDA graph cannot be captured where a backward meets the accumulator of a pass on another
    stream."""
    recipe = recipes.by_name(name)
    model = Mixed(recipe, lambda module, *args: module(*args))
    model.experts = fq.GroupedLinear(
        2, 32, 32, dtype=torch.bfloat16, packed=packed, recipe=recipe, name="experts"
    )
    y = model(values(32, 32))
    for p in model.parameters():
        _accumulator(p).metadata["outlives"] = True
    y.sum().backward()
    del y
    assert not [
        name for name, p in model.named_parameters() if "outlives" in _accumulator(p).metadata
    ]


def _accumulator(p: Tensor):
    """The node that the next pass uses: a new one, if nothing keeps that of the last."""
    return p.view_as(p).grad_fn.next_functions[0][0]


# Offload #


def test_tensors_of_the_host_stay():
    """If false, a model on the CPU pays for copies from the host to the host, or trains
    otherwise."""
    module = fq.convert(nn.Sequential(nn.Linear(64, 64)), recipes.mxfp8())
    results = []
    for offloads in (False, True):
        module.zero_grad()
        x = values(32, 64, seed=1, dtype=torch.float32).requires_grad_()
        with recorded_saves() as outer:
            if offloads:
                with fq.memory.offload(module, min_bytes=0):
                    y = module(x)
                assert not outer  # the inner hook alone
            else:
                y = module(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, module[0].weight.grad])
    for got, want in zip(*results):
        assert_same_bytes(got, want)


class Stream:
    """One that is never behind."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> Stream:
        return self


@pytest.fixture
def device(monkeypatch):
    """Tensors of the host leave as those of a GPU do."""
    monkeypatch.setattr(offloading, "_is_on_device", lambda t: True)
    monkeypatch.setattr(offloading, "_pinned_like", torch.empty_like)
    monkeypatch.setattr(offloading, "Stream", Stream)
    monkeypatch.setattr(offloading, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)


def net(recipe: fq.Recipe) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        fq.LayerNormMLP(48, 64, residual=True, recipe=recipe, name=f"{i}", **OF_LLAMA)
        for i in range(2)
    )
    return nn.Sequential(*blocks, nn.Linear(48, 48, dtype=torch.bfloat16))


def gradients(module: nn.Module, context, retained: int = 0) -> list[Tensor]:
    STEP.step = 0
    STEP.publish()
    x, dy = (values(32, 48, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    x.requires_grad_()
    with context:
        y = module(x)
    for _ in range(retained):
        y.backward(dy, retain_graph=True)
    module.zero_grad()
    x.grad = None
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("in_flight", [0, 8192, 2**30])
def test_offloaded_tensors_come_back_as_they_were(device, in_flight: int):
    """If false, a tensor comes back as another, or not for each of those that saved it."""
    recipe = recipes.fp8_current()
    want, module = gradients(net(recipe), contextlib.nullcontext()), net(recipe)
    offload = fq.memory.offload(module, min_bytes=0, in_flight=in_flight)
    for retained in (0, 1):
        for i, (got, wanted) in enumerate(zip(gradients(module, offload, retained), want)):
            assert_same_bytes(got, wanted, f"{i}, retained {retained}")
        assert not any(ref() for ref in offload._copies) and not offload._leaving


CELLS = list(itertools.product(RECIPES, MODULES, BACKWARD_MODES))


@pytest.mark.parametrize(("recipe", "module", "mode"), sample(CELLS, 23))
def test_offload_keeps_every_backward_mode(device, recipe: str, module: str, mode: str | None):
    """If false, a recipe's backward multiplies something else where its operands wait on the host,
    or some of them do not."""
    for kind in MODULES[module]:
        results, shape = [], (*kind.lead, CPU.m // math.prod(kind.lead), CPU.k)
        for offload in (None, fq.memory.offload(min_bytes=0, in_flight=0)):
            STEP.step = 0
            STEP.publish()
            torch.manual_seed(0)
            model = kind.built(RECIPES[recipe](backward_override=mode), CPU)
            x = values(*shape, seed=1, dtype=torch.float32).requires_grad_()
            with offload or recorded_saves() as saved:
                y = kind.call(model, x, CPU)
            y = y if isinstance(y, tuple) else (y,)
            if offload is None:
                kept = Counter((t.shape, t.dtype) for t in saved)
            else:
                left = Counter(
                    (c.host.shape, c.host.dtype)
                    for ref in offload._copies
                    if (c := ref())
                    for _ in range(c.uses)
                )
                assert left == kept, f"left {left}, saved {kept}"
            torch.autograd.backward(
                y, [values(*t.shape, seed=2 + i, dtype=torch.float32) for i, t in enumerate(y)]
            )
            results.append(
                [*(t.detach() for t in y), x.grad, *(p.grad for p in model.parameters())]
            )
        for i, (got, want) in enumerate(zip(*reversed(results))):
            assert_same_bytes(got, want, f"{recipe} {module} {mode}: {i}")


def test_what_is_offloaded_is_let_go_and_comes_back_in_time(device):
    """If false, offloading saves no memory, copies a tensor twice, or brings everything back at
    once."""
    offload = fq.memory.offload(min_bytes=1024, in_flight=3 * 4096)
    x = torch.ones(32, 32, requires_grad=True)
    with offload:
        steps = [x * 1.0]
        for _ in range(9):
            steps.append(steps[-1] * steps[-1])  # each is saved twice
        memories = [weakref.ref(t.untyped_storage()) for t in steps]
        y = steps[-1]
        del steps
    assert [m() is not None for m in memories[:9]] == [False] * 6 + [True] * 3
    assert len(offload._copies) == 9

    def loaded() -> list[int]:
        return [
            i
            for i, ref in enumerate(offload._copies)
            if (c := ref()) is not None and c.loaded is not None
        ]

    seen, node = [], y.grad_fn
    while node.next_functions:
        node.register_hook(lambda *_: seen.append(loaded()))
        node = node.next_functions[0][0]
    y.sum().backward()
    assert max(map(len, seen)) <= 4 and seen[2][-3:] == [3, 4, 5], seen
    assert x.grad.eq(2**9).all()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_write_to_a_tensor_that_leaves_is_refused(device, is_late: bool):
    """If false, the host gets a mixture of old and new values, and nobody hears of it."""
    x = torch.ones(32, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with fq.memory.offload(min_bytes=0):
            y = x * 2
            z = (y * y).sum()
            if not is_late:
                y.mul_(2)
        y.detach().mul_(2)
        z.backward()


def test_offload_refuses_negative_sizes():
    """If false, a misread option copies everything, or nothing."""
    with pytest.raises(ValueError, match="in_flight is -1; wanted bytes, at least 0"):
        fq.memory.offload(in_flight=-1)

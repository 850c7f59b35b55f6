# SPDX-License-Identifier: Apache-2.0
"""`fq.autocast` around forwards of `fully_shard`, held to the same model on one process."""

from __future__ import annotations

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.linear import root_context
from fsdp_quant.tensor import rendezvous
from fsdp_quant.tensor.fsdp_hooks import managed_states

# name -> recipe of the context, whether blocks are recomputed, reshard_after_forward
CONTEXTS = {
    "nvfp4": (fq.recipes.nvfp4(), False, True),
    "fp8_delayed": (fq.recipes.fp8_delayed(), True, None),
    "hybrid": (fq.recipes.hybrid("fp8_current", "mxfp8"), False, False),
}


def _train(net: torch.nn.Module, override: fq.Recipe) -> list[torch.Tensor]:
    """A step inside, an evaluation and a step outside, one without quantization."""
    optimizer, seen = nets.adam(net), []
    contexts = [
        lambda: fq.autocast(override),
        lambda: fq.autocast(None),
        lambda: fq.autocast(enabled=False),
    ]
    for step, context in enumerate(contexts):
        if step == 1:
            with torch.no_grad():
                seen.append(net(nets.batch(9)))
        with context():
            y = net(nets.batch(step))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return seen


def _contexts(rank: int, world: int) -> None:
    for name, (override, recompute, reshard) in CONTEXTS.items():
        seen = []
        for sharded in (False, True):
            net = fq.convert(nets.build(hidden=(33,), recompute=recompute), "mxfp8")
            if sharded:
                nets.shard(net, reshard_after_forward=reshard)
            with fq.token_offset(0):
                outputs = _train(net, override)
            seen.append(outputs + list(nets.full_state(net).values()))
        for i, (wanted, got) in enumerate(zip(*seen, strict=True)):
            laws.assert_same_bytes(got, wanted, f"{name}: tensor {i}")
    seen = []
    for sharded in (False, True):
        net = fq.convert(nets.build(), fq.recipes.mxfp8(accuracy="token"))
        net = nets.shard(net) if sharded else net
        with fq.numerics.batch_invariant():
            y = net(nets.batch())
            assert torch.equal(net(nets.batch()[:1]), y[:1])
        y.square().mean().backward()
        seen.append([y.detach(), *(nets.full(p.grad) for p in net.parameters())])
    for i, (wanted, got) in enumerate(zip(*seen, strict=True)):
        laws.assert_same_bytes(got, wanted, f"batch_invariant: tensor {i}")
    net = fq.convert(nets.build(), "mxfp8")
    ignored = {net.blocks[0].up.weight}
    fully_shard(net, ignored_params=ignored)
    with mock.patch.object(root_context, "managed_states", wraps=managed_states) as walks:
        for step in range(3):
            with fq.autocast("nvfp4"):
                net(nets.batch(step))
    assert walks.call_count == 1, "a weight that FSDP2 does not manage is looked for every time"


def test_a_context_around_the_root_chooses_what_is_gathered():
    """If false, `fully_shard` gathers other formats than the context's, a backward reads codes of
    another forward, leaving the context changes what follows, or each forward pays for it again."""
    run_ranks(2, _contexts)


def _disagree(rank: int, world: int) -> list[str]:
    net = nets.shard(fq.convert(nets.build(), "mxfp8"))
    net(nets.batch()).sum().backward()
    with pytest.raises(ValueError) as refused, fq.autocast(("nvfp4", "fp8_row")[rank]):
        net(nets.batch())
    nets.train_step(net, nets.adam(net), 1)
    formats = {state.matrices[0].quantizer for _, state in managed_states().values()}
    assert len(formats) == 1, f"a refused context stays: {formats}"
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(rendezvous, "PATIENCE", 1.0)
    errors = [str(refused.value)]
    if rank == 0:  # the other rank is in no call: a collective would hang
        with pytest.raises(ValueError) as alone, fq.autocast("nvfp4"):
            net(nets.batch())
        errors.append(str(alone.value))
    return errors


def test_ranks_in_different_contexts_raise_one_sentence():
    """If false, a rank waits for bytes that another one does not send."""
    results = run_ranks(2, _disagree)
    (both, alone), (other,) = results
    assert both == other and "fq.autocast around the forward of fully_shard is nvfp4" in both, both
    assert "nothing new after 1 s on rank 1" in alone, alone


class _Experts(nn.Module):
    """Experts with a weight each, of 64 rows."""

    def __init__(self):
        super().__init__()
        self.experts = fq.GroupedLinear(2, 64, 64, False, recipe=recipes.mxfp8(), name="experts")

    def forward(self, x):
        return self.experts(x, [32, 32])


def _layouts_of_contexts(rank: int, world: int) -> int:
    linear = functools.partial(fq.Linear, 64, 64, False, recipe=recipes.mxfp8(), name="linear")
    moved = {"dgrad": "anchored 128"}  # by the guard
    arms = [
        (linear, {}, recipes.mxfp8(accuracy="token")),
        (linear, moved, recipes.mxfp8()),
        (_Experts, {}, recipes.mxfp8(accuracy="token")),
        (_Experts, {}, recipes.fp8_block()),
    ]
    for make, rungs, recipe in arms:
        with hopper.emulated():
            block = make().bfloat16()
            for layer in block.modules():
                if isinstance(layer, fq.Linear):
                    layer.runtime.move_to(rungs)
            whole = nn.Sequential(copy.deepcopy(block))
            sharded = fully_shard(nn.Sequential(fully_shard(block)))
            for inside in (False, True, True, False, True):
                results = []
                for model in (whole, sharded):
                    x = laws.values(64, 64).bfloat16().requires_grad_()
                    with fq.autocast(recipe) if inside else contextlib.nullcontext():
                        y = model(x)
                        y.sum().backward()
                    results.append((y.detach(), x.grad))
                for got, want in zip(*reversed(results)):
                    laws.assert_same_bytes(got, want, f"{recipe}, moved={rungs}, inside={inside}")
    return len(arms)


def test_a_context_gathers_the_layouts_that_its_gemms_read():
    """If false, a backward inside fq.autocast finds codes of the same format in the layout of
    another recipe, or of one expert alone, and raises StaleWeightError."""
    assert run_ranks(1, _layouts_of_contexts) == [4]

# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: what ranks hold together is what one process computes, and it
crosses ranks as codes."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, most_ranks, on_cpu, run_ranks
from dist_tests.single import hopper
from fsdp_quant.counters import counters
from fsdp_quant.formats import Direction
from fsdp_quant.linear import among_ranks, call, program
from fsdp_quant.linear.cut import TensorParallel
from fsdp_quant.models.steps import histories_by_side
from fsdp_quant.ops import native
from fsdp_quant.parallel import planned_gathers
from fsdp_quant.parallel.sequence import SequenceCut
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.tensor import torch_compat
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor

D, FFN = 64, 128
RECIPES = ("identity", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed", "hybrid")
RECIPES += ("qat",) * laws.EVERYTHING
# fp32 sums of up to 1024 products in another order: 1024 * 2^-24 = 6e-5 of the norm at worst, and
# codes are the same. Sums of fp8 tensor cores keep 13 bits behind the largest of 32 products, so
# four in a row are off by 4 * 2^-13 = 5e-4; where that crosses the middle between codes, of which
# there are 8 an octave, an element moves by 1/16: sqrt(8 * 5e-4) / 16 = 4e-3.
TOLERANCE = 6e-5 if DEVICE == "cpu" else 5e-3


def recipe_of(name: str, **options) -> fq.Recipe:
    if name == "qat":
        return fq.recipes.qat("nvfp4", **options)
    if "+" in name:
        return fq.recipes.hybrid(*name.split("+"), **options)
    return (
        fq.recipes.hybrid("mxfp8", "fp8_block")
        if name == "hybrid"
        else fq.recipes.by_name(name, **options)
    )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up, self.down = nn.Linear(D, FFN), nn.Linear(D, FFN), nn.Linear(FFN, D)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def build(layers: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(MLP() for _ in range(layers)))


def cut(net: nn.Sequential, mesh, **replaced) -> nn.Sequential:
    """Each MLP cut over `mesh`, its input and output along dim 1."""
    for block in net:
        parallelize_module(
            block,
            mesh,
            {
                "norm": fq.parallel.SequenceParallel(),
                "gate": fq.parallel.ColwiseParallel(),
                "up": fq.parallel.ColwiseParallel(),
                "down": fq.parallel.RowwiseParallel(output_layouts=Shard(1)),
                **replaced,
            },
        )
    return net


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, tuple(axes.values()), mesh_dim_names=tuple(axes)
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = float((got.detach() - want.detach()).norm() / want.detach().norm())
    assert error <= TOLERANCE, f"{what}: {error:.2e} from one process"


# Kernels of a GPU sum in other orders in other shapes.
assert_same = laws.assert_same_bytes if DEVICE == "cpu" else assert_close


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Gathered bytes #


def gathers(rank: int, world: int) -> None:
    group = dist.group.WORLD

    def check(hybrid, shape, dim, key=None) -> None:
        # scales differ between ranks
        x = (laws.values(*shape, seed=rank) * 7**rank).requires_grad_()
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.detach())
        want = hybrid.quantize(torch.cat(parts, dim), key=key)
        fq.reset_receipt()
        got = fq.parallel.gather_sequence(x, hybrid, group, dim, key=key)
        moved, piece = fq.receipt().sequence, SequenceCut.of_local(x.shape, dim, group)
        for d in Direction:
            laws.assert_same_storage(
                getattr(got, d.value), getattr(want, d.value), f"{hybrid} {shape} {d}"
            )
        high = ("forward", "both", "high precision")
        assert (high in moved) != piece.all_travel(hybrid, Direction), f"{hybrid} {shape}: {moved}"
        assert high not in moved or list(moved) == [high], (
            f"{hybrid} {shape} moved codes beside high precision: {moved}"
        )
        if shape == (32, 48):
            dy = laws.values(*got.shape, seed=rank, dtype=torch.bfloat16)
            got.backward(dy)
            sums = dy.clone()
            dist.all_reduce(sums)
            laws.assert_same_bytes(x.grad, sums.chunk(world, dim)[rank], "gradient")

    pairs = list(itertools.product(laws.QUANTIZERS.values(), repeat=2))
    for row, column in laws.sample(pairs, 23):
        for shape, dim in (
            ((31, 40), 0),
            ((32, 48), 0),
            ((33, 20), 0),
            ((128, 48), 0),
            ((2, 32, 48), 1),
        ):
            check(HybridQuantizer(row, column), shape, dim)
    check(HybridQuantizer("mxfp8", "fp8_1x128", "rowwise_dequantized"), (33, 40), 0)
    stochastic = Quantizer("nvfp4", rounding="stochastic")
    for shape, dim in (((32, 48), 0), ((31, 48), 0), ((2, 16, 48), 1)):
        key = torch.tensor([5, 1, 77, 0, 3 * 16])
        check(HybridQuantizer(stochastic, replace(stochastic, rotation=True)), shape, dim, key)
    y = torch.arange(world * 12.0).view(2 * world, 6).requires_grad_()
    piece = fq.parallel.reduce_scatter_sequence(y, group)
    laws.assert_same_bytes(piece, (y * world).chunk(world)[rank], "reduce_scatter_sequence")
    piece.sum().backward()
    laws.assert_same_bytes(y.grad, torch.ones_like(y), "its gradient")
    with pytest.raises(ValueError, match=r"dim 0 of \[5, 6\] is 5.*pad it to a multiple of"):
        fq.parallel.reduce_scatter_sequence(torch.zeros(5, 6), group)


@pytest.mark.parametrize("world", [2, 3])
def test_gathered_sequence_is_that_of_the_gathered_tensor(world):
    """Otherwise a layer multiplies other codes under sequence parallelism than without it."""
    run_ranks(world, gathers)


# Layers #


@contextlib.contextmanager
def recorded_order():
    """The order of columnwise gathers ("start", "wait") and products in the backward."""
    seen, Gather, gemm = [], call.Gather, program.gemm

    class Recorded(Gather):
        def __init__(self, x, hybrid, directions, cut, phase, **options):
            seen.extend([f"start {phase} {d.value}" for d in directions])
            super().__init__(x, hybrid, directions, cut, phase, **options)

        def take(self, direction, layout=None):
            seen.append(f"wait {self.phase} {direction.value}")
            return super().take(direction, layout)

    def product(a, b, **options):
        seen.append(f"gemm {a.direction.value} {b.direction.value}")
        return gemm(a, b, **options)

    call.Gather, program.gemm = Recorded, product
    try:
        yield seen
    finally:
        call.Gather, program.gemm = Gather, gemm


def gradients_of_weights(rank: int, mesh) -> None:
    """What autograd does not return is what it returns."""
    x = laws.values(2, 128, D, seed=1, dtype=torch.float32)
    nets = []
    for options in ((), ("fuse_wgrad_accumulation",), ("delay_wgrad_compute",)):
        net = cut(fq.convert(build(), "mxfp8"), mesh)
        for layer in (m for m in net.modules() if isinstance(m, fq.Linear)):
            layer.weight.main_grad = torch.zeros_like(layer.weight.to_local())
            for option in options:
                setattr(layer, option, True)
        for _ in range(2):
            net(x.chunk(mesh.size(), 1)[rank]).square().sum().backward()
        nets.append([m.weight for m in net.modules() if isinstance(m, fq.Linear)])
        if options[:1] == ("delay_wgrad_compute",):
            assert all(w.grad is None for w in nets[-1])
            fq.steps.backward_dw(net), fq.steps.backward_dw(net)
    for want, fused, delayed in zip(*nets):
        assert fused.grad is None and torch.equal(fused.main_grad, want.grad.to_local())
        assert torch.equal(delayed.grad.to_local(), want.grad.to_local())


def layers(rank: int, world: int) -> None:
    mesh = mesh_of(tp=world)
    gradients_of_weights(rank, mesh)
    x, dy = (laws.values(2, 128 * world, D, seed=seed, dtype=torch.float32) for seed in (1, 2))
    x[:, :5] *= 100  # of one rank alone
    mine = [t.chunk(world, 1)[rank] for t in (x, dy)]
    for name in RECIPES:
        recipe, reference = recipe_of(name), build()
        fq.convert(reference, recipe)
        want_x = x.clone().requires_grad_()
        want = reference(want_x)
        want.backward(dy)
        for order in ("style first", "convert first"):
            net = build() if order == "style first" else fq.convert(build(), recipe)
            cut(net, mesh)
            net = fq.convert(net, recipe) if order == "style first" else net
            got_x = mine[0].clone().requires_grad_()
            fq.reset_receipt()
            with recorded_order() as order_of_work:
                got = net(got_x)
                got.backward(mine[1])
            assert_close(got, want.chunk(world, 1)[rank], f"{name} {order} y")
            assert_close(got_x.grad, want_x.grad.chunk(world, 1)[rank], f"{name} {order} dx")
            for (n, p), q in zip(net.named_parameters(), reference.parameters()):
                assert_close(whole(p.grad), q.grad, f"{name} {order} {n}.grad")
        # What moved: once for gate and up, once for down; as the plan says.
        planned = {}
        delayed = name == "fp8_delayed"  # histories are a layer's own: nothing is shared
        local = tuple(mine[0].shape)
        for layer in (net[0].gate, *([net[0].up] if delayed else []), net[0].down):
            for key, size in planned_gathers(layer, local, 1, torch.float32).items():
                planned[key] = planned.get(key, 0) + size
        assert fq.receipt().sequence == planned, name
        assert "high precision" not in str(planned) and "tensor parallel over" in str(
            fq.plan(net)
        ), fq.plan(net)
        scattered = [
            i for i, what in enumerate(order_of_work) if what == "start backward columnwise"
        ]
        assert scattered, order_of_work
        for start in scattered:  # dgrad runs between the start of a columnwise gather and its wait
            rest = order_of_work[start:]
            dgrad = next(i for i, what in enumerate(rest) if what.startswith("gemm"))
            waits = [i for i, what in enumerate(rest) if what == "wait backward columnwise"]
            assert dgrad < waits[0], order_of_work
    parts_of_backward(mesh, rank, world, x)
    other_ways(mesh, rank, world, x, dy)
    statistics_of_weights(mesh, rank, world, x)
    around_them(mesh, rank, world)
    inputs_are_quantized_once(mesh, rank, world, x)
    quantized_parameters(mesh, rank, world, x)
    random_bits(mesh, rank, world)
    refusals(mesh, world)


def random_bits(mesh, rank: int, world: int) -> None:
    """Stochastic rounding has the bits of one process, whether ranks have other rows of a tensor or
    other columns."""
    x, dy = (laws.values(1, 128 * world, D, seed=seed, dtype=torch.float32) for seed in (1, 2))
    for recipe in (fq.recipes.nvfp4(), fq.recipes.hybrid("mxfp8", "nvfp4")):
        reference, net = fq.convert(build(), recipe), fq.convert(cut(build(), mesh), recipe)
        with fq.token_offset(0):
            for got, of in (
                (reference, (x, dy)),
                (net, [t.chunk(world, 1)[rank] for t in (x, dy)]),
            ):
                got(of[0].clone().requires_grad_()).backward(of[1])
        for (n, p), q in zip(net.named_parameters(), reference.parameters()):
            assert_close(whole(p.grad), q.grad, f"{recipe} {n}.grad")


def parts_of_backward(mesh, rank: int, world: int, x: torch.Tensor) -> None:
    """Layers that share an input, of which a backward runs through some only, twice, or after
    others."""
    recipe = fq.recipes.mxfp8()
    reference, net = fq.convert(build(), recipe)[0], cut(fq.convert(build(), recipe), mesh)[0]
    grads = []
    for block, mine in ((reference, x.clone()), (net, x.chunk(world, 1)[rank].clone())):
        mine.requires_grad_()
        h = block.norm(mine)
        gate, up = block.gate(h), block.up(h)
        parts = [
            torch.autograd.grad(y.square().sum(), mine, retain_graph=True)[0]
            for y in (gate, up, gate)
        ]
        parts.append(
            torch.autograd.grad(gate.square().sum(), block.gate.weight, retain_graph=True)[0]
        )
        both = torch.autograd.grad(gate.square().sum() + up.square().sum(), mine)[0]
        grads.append([*parts, both])
    for got, want, what in zip(*grads[::-1], ("gate", "up", "gate again", "weight", "both")):
        want = want if what == "weight" else want.chunk(world, 1)[rank]
        assert_close(whole(got), want, f"gradient through {what}")
    with torch.no_grad():
        assert_close(
            net(x.chunk(world, 1)[rank]), reference(x).chunk(world, 1)[rank], "without gradients"
        )


def other_ways(mesh, rank: int, world: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Plain torch styles, whole inputs, process groups in place of meshes, an input prepared
    once."""
    recipe, group = fq.recipes.fp8_current(), mesh.get_group()
    mine = [t.chunk(world, 1)[rank] for t in (x, dy)]

    def run(block, x, dy):
        x = x.clone().requires_grad_()
        y = block.down(torch.relu(block.up(x)))
        y.backward(dy)
        return [y, x.grad, *(whole(p.grad) for m in (block.up, block.down) for p in m.parameters())]

    want = run(fq.convert(build(), recipe)[0], x, dy)
    of_rank = [t.chunk(world, 1)[rank] for t in want[:2]]
    plain = parallelize_module(
        build()[0], mesh, {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
    )
    ours = parallelize_module(
        build()[0],
        mesh,
        {"up": fq.parallel.ColwiseParallel(), "down": fq.parallel.RowwiseParallel()},
    )
    for net, what in ((plain, "torch's styles"), (ours, "our styles, nothing cut")):
        for got, one in zip(run(fq.convert(net, recipe), x, dy), want):
            assert_close(got, one, what)
        said = str(fq.plan(net))
        assert "row layers: activations are whole" in said, (what, said)
        assert "column layers: input, where it is cut along the sequence, is gathered" in said
    whole_input = fq.parallel.ColumnParallelLinear(D, FFN, group, recipe=recipe)
    assert "column layers: activations are whole" in str(fq.plan(nn.Sequential(whole_input)))
    cut_input = {
        "up": fq.parallel.ColwiseParallel(input_layouts=Shard(1), recipe=recipe),
        "down": fq.parallel.RowwiseParallel(output_layouts=Shard(1), recipe=recipe),
    }
    net = parallelize_module(build()[0], mesh, cut_input)
    for got, one in zip(run(net, *mine), [*of_rank, *want[2:]]):
        assert_close(got, one, "recipes of styles")
    said = str(fq.plan(net))
    assert "layers: input is gathered" in said and "layers: grad_output is gathered" in said, said

    class Mlp(nn.Module):
        def __init__(self, dim):
            super().__init__()
            torch.manual_seed(0)
            self.gate = fq.parallel.ColumnParallelLinear(
                D, FFN, group, sequence_dim=dim, recipe=recipe, name="gate"
            )
            self.up = fq.parallel.ColumnParallelLinear(
                D, FFN, group, sequence_dim=dim, recipe=recipe, name="up"
            )
            self.down = fq.parallel.RowParallelLinear(
                FFN, D, group, sequence_dim=dim, recipe=recipe, name="down"
            )

    for dim in (1, None):
        got = run(Mlp(dim), *(mine if dim else (x, dy)))
        cut_weights = [
            want[2].chunk(world)[rank],
            want[3].chunk(world)[rank],
            want[4].chunk(world, 1)[rank],
            want[5],
        ]
        for a, b in zip(got, [*(of_rank if dim else want[:2]), *cut_weights]):
            assert_close(a, b, f"process groups, sequence_dim={dim}")

    block = fq.convert(build(), recipe)[0]
    prepare = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    parallelize_module(block.up, mesh, fq.parallel.ColwiseParallel())
    parallelize_module(block.up, mesh, fq.parallel.PrepareModuleInput(**prepare))
    fq.reset_receipt()
    assert_same(
        block.up(mine[0]),
        fq.convert(build(), recipe)[0].up(x).chunk(world, 2)[rank],
        "an input that is prepared",
    )
    assert {key[2] for key in fq.receipt().sequence} == {"fp8_tensor"}


def quantized_parameters(mesh, rank: int, world: int, x: torch.Tensor) -> None:
    """Parameters that are codes train as high-precision ones, whatever came first, with meshes and
    with process groups."""

    def styles_first(recipe):
        return fq.convert(cut(build(), mesh), recipe)

    def convert_first(recipe):
        return cut(fq.convert(build(), recipe), mesh)

    def of_groups(recipe):
        torch.manual_seed(0)
        column, row = fq.parallel.ColumnParallelLinear, fq.parallel.RowParallelLinear
        return nn.Sequential(
            column(D, FFN, mesh.get_group(), True, 1, recipe=recipe, name="up"),
            row(FFN, D, mesh.get_group(), True, 1, recipe=recipe, name="down"),
        )

    def on_meta(recipe):
        with torch.device("meta"):
            net = fq.convert(build(), recipe)
        net = cut(net, mesh).to_empty(device=torch.get_default_device())
        nn.Module.load_state_dict(net, cut(build(), mesh).state_dict())
        return net

    for make, name in itertools.product(
        (styles_first, convert_first, of_groups, on_meta), ("fp8_current", "mxfp8")
    ):
        recipe, seen = recipe_of(name), []
        for context in (contextlib.nullcontext(), fq.quantized_model_init(recipe)):
            with context:
                net = make(recipe)
            optimizer = fq.optim.FusedAdam(net.parameters(), lr=1e-2)
            seen.append([])
            for _ in range(2):
                y = net(x.chunk(world, 1)[rank])
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[-1] += [y, *(whole(p).clone() for p in net.state_dict().values())]
        assert all(
            isinstance(torch_compat.local_of(p), QuantizedTensor)
            for p in net.parameters()
            if p.dim() == 2
        )
        for got, want in zip(*seen):
            laws.assert_same_bytes(got, want, f"quantized parameters, {make.__name__}, {name}")
    with fq.quantized_model_init(recipe):
        net = fq.convert(build(), recipe)
    optimizer = fq.optim.FusedAdam(net.parameters())
    with pytest.raises(ValueError, match="another optimizer holds the master of 0.up.weight"):
        parallelize_module(net[0].up, mesh, fq.parallel.ColwiseParallel())
    del optimizer


class LanguageModel(nn.Module):
    """Layers of this library between an embedding and a head over a vocabulary of 48 that stay in
    high precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(48, D), nn.Sequential(MLP())
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, 48)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def around_them(mesh, rank: int, world: int) -> None:
    """torch's styles and `loss_parallel` around ours, whose outputs are plain or DTensors; a head
    that no recipe converts."""
    tokens = torch.randint(
        48, (2, 128 * world + 1), generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )
    tokens = tokens.to(torch.get_default_device())
    recipe, outcomes = fq.recipes.mxfp8(), []
    for head, local, order in (
        (None, True, "alone"),
        (styles.ColwiseParallel, True, "styles first"),
        (fq.parallel.ColwiseParallel, False, "convert first"),
    ):
        net = LanguageModel()
        net = fq.convert(net, recipe, skip=["head"]) if order != "styles first" else net
        if head is not None:
            column, row = fq.parallel.ColwiseParallel, fq.parallel.RowwiseParallel
            cut(
                net.blocks,
                mesh,
                **{name: column(use_local_output=local) for name in ("gate", "up")},
                down=row(output_layouts=Shard(1), use_local_output=local),
            )
            parallelize_module(
                net,
                mesh,
                {
                    "embedding": styles.RowwiseParallel(
                        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
                    ),
                    "norm": fq.parallel.SequenceParallel(),
                    "head": head(
                        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                    ),
                },
            )
        net = fq.convert(net, recipe, skip=["head"]) if order == "styles first" else net
        with contextlib.nullcontext() if head is None else styles.loss_parallel():
            logits = net(tokens[:, :-1])
            assert isinstance(logits, DTensor) == (head is not None) and type(net.head) is nn.Linear
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        outcomes.append([whole(loss), *(whole(p.grad) for p in net.parameters())])
        assert head is None or outcomes[-1][-1].shape == (48,)
        for got, want in zip(outcomes[-1], outcomes[0]):
            assert_close(got, want, f"{head}, {order}")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


def inputs_are_quantized_once(mesh, rank: int, world: int, x: torch.Tensor) -> None:
    """q, k and v read one input: one quantization a direction and one gather; in the backward one
    gather and one scatter."""
    for prepare, order in itertools.product(
        (styles.PrepareModuleInput, fq.parallel.PrepareModuleInput), ("styles", "convert")
    ):
        net = Attention() if order == "styles" else fq.convert(Attention(), fq.recipes.mxfp8())
        parallelize_module(net, mesh, {name: fq.parallel.ColwiseParallel() for name in "qkv"})
        parallelize_module(
            net, mesh, prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        )
        net = fq.convert(net, fq.recipes.mxfp8()) if order == "styles" else net
        mine = x.chunk(world, 1)[rank].clone().requires_grad_()
        fq.reset_receipt()
        with nets.recorded_collectives() as wire:
            y = net(mine)
            of_forward = {d: n for (_, d, _), n in counters.of("quantize").items()}
            y.sum().backward()
        if prepare is fq.parallel.PrepareModuleInput:
            if DEVICE == "cpu":  # kernels make both directions of a weight at once
                # weights, the input
                assert of_forward == {"rowwise": 3 + 1, "columnwise": 3 + 1}, of_forward
            # data and scales are gathered one beside the other; NCCL's in one call
            moved = [kind for kind, _ in wire]
            assert moved == ["all_gather"] * (4 if DEVICE == "cpu" else 0) + ["reduce_scatter"], (
                wire
            )
        else:  # gathered by torch before anybody could quantize it
            assert not fq.receipt().sequence
    parallelize_module(
        net,
        mesh,
        fq.parallel.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    )
    fq.reset_receipt()
    net(x.chunk(world, 1)[rank])
    assert fq.receipt().sequence == {("forward", "both", "high precision"): x.nbytes}, (
        "nothing silent"
    )


def statistics_of_weights(mesh, rank: int, world: int, x: torch.Tensor) -> None:
    """One collective per weight and forward, none in the backward or the step; scales are those of
    the whole tensors."""
    recipe = fq.recipes.fp8_current()
    reference, net = fq.convert(build(), recipe), cut(fq.convert(build(), recipe), mesh)
    for n in (reference, net):
        optimizer, mine = (
            torch.optim.SGD(n.parameters(), lr=0.5),
            x if n is reference else x.chunk(world, 1)[rank],
        )
        fq.reset_receipt()
        y = n(mine)
        assert fq.receipt().collectives.get("weights", 0) == (3 if n is net else 0)
        y.square().sum().mul(1e-6).backward()
        optimizer.step()
        assert fq.receipt().collectives.get("weights", 0) == (3 if n is net else 0)
    fq.reset_receipt()
    with torch.no_grad():
        assert_close(
            net(x.chunk(world, 1)[rank]), reference(x).chunk(world, 1)[rank], "after a step"
        )
    # h of gate and up, the input of down
    assert fq.receipt().collectives == {"weights": 3, "activations": 2}


def refusals(mesh, world: int) -> None:
    """Each from facts that all ranks share, naming the module and the remedy."""
    net = fq.convert(build(), fq.recipes.mxfp8())
    with pytest.raises(ValueError, match="0.up: ColwiseParallel needs a mesh of one axis"):
        fq.parallel.ColwiseParallel()._apply(net[0].up, mesh_of(dp=1, tp=world))
    for block in (net[0], build()[0]):
        with pytest.raises(
            ValueError, match=r"ColwiseParallel needs a mesh of one axis, got 2 \(\('dp', 'tp'\)\)"
        ):
            parallelize_module(
                block, mesh_of(dp=1, tp=world), {"up": fq.parallel.ColwiseParallel()}
            )
    odd = fq.convert(nn.Sequential(nn.Linear(D, 2 * world + 1)), fq.recipes.mxfp8())
    with pytest.raises(ValueError, match=f"0: ColwiseParallel cuts out_features={2 * world + 1}"):
        parallelize_module(odd[0], mesh, fq.parallel.ColwiseParallel())
    for sharded in (fully_shard(fq.convert(build(), fq.recipes.mxfp8())), fully_shard(build())):
        with pytest.raises(
            ValueError,
            match=r"(0.down|Linear).weight is a DTensor.*apply RowwiseParallel before fully_shard",
        ):
            parallelize_module(sharded[0].down, mesh, fq.parallel.RowwiseParallel())
    cut(net, mesh)
    with pytest.raises(ValueError, match="apply one style to a layer"):
        parallelize_module(net[0].down, mesh, fq.parallel.RowwiseParallel())
    with pytest.raises(ValueError, match=r"0.down output: dim 1 of .* is 5, which the .* pad it"):
        net[0].down(torch.zeros(1, 5, FFN // world))
    with pytest.raises(ValueError, match=r"0.down: this rank's input is \[1, 4, 7\], wanted"):
        net[0].down(torch.zeros(1, 4, 7))
    for layer in (net[0].gate, net[0].down):
        layer.runtime.recipe = replace(layer.recipe, require_native=True)
    with pytest.raises(
        ValueError,
        match=r"0.gate: input.columnwise \(mxfp8\) has blocks of 32 rows.*1 x 17 rows"
        ".*require_native",
    ):
        net[0].gate(DTensor.from_local(torch.zeros(1, 17, D), mesh, [Shard(1)]))
    with pytest.raises(
        ValueError, match=r"0.down: grad_output.columnwise .*in high precision, and require_native"
    ):
        net[0].down(torch.zeros(1, 17 * world, FFN // world))


def test_layers_equal_one_process():
    """Otherwise tensor parallelism trains another model, gathers more than the plan says, or waits
    where it need not."""
    run_ranks(2, layers)


# Beside FSDP2 #

# Few of three axes: torch takes seconds to find out how a gradient's placements there go with each
# other.
MESHES = (
    {"shard": 2, "tp": 2},
    {"replicate": 2, "shard": 1, "tp": 2},
    {"shard": 1, "tp": 4},
    {"shard": 1, "tp": 2},
    {"shard": 2, "tp": 1},
)


def several_axes(rank: int, world: int) -> None:
    of_world = [axes for axes in MESHES if prod(axes.values()) == world]
    cases = list(enumerate(zip(RECIPES, itertools.cycle(of_world))))
    for i, (name, axes) in laws.every_second(cases, 0):
        order = ("styles", "convert", "fully_shard")[(i + i // 3) % 3]
        mesh, ranks = mesh_of(**axes), axes["tp"]
        mine, shards = (
            mesh["tp"].get_local_rank(),
            mesh[tuple(axis for axis in axes if axis != "tp")],
        )
        recipe, reference, net = recipe_of(name), build(2), build(2)
        fq.convert(reference, recipe)
        net = fq.convert(net, recipe) if order == "convert" else net
        cut(net, mesh["tp"])
        net = fq.convert(net, recipe) if order == "styles" else net
        for block in net:
            fully_shard(block, mesh=shards)
        fully_shard(net, mesh=shards)
        net = fq.convert(net, recipe) if order == "fully_shard" else net
        optimizers = [
            fq.optim.FusedAdam(n.parameters(), lr=1e-2, eps=1e-3) for n in (reference, net)
        ]
        for step in range(2):
            x = laws.values(1, 128 * ranks, D, seed=step, dtype=torch.float32)
            fq.reset_receipt()
            want, got = reference(x), net(x.chunk(ranks, 1)[mine])
            assert_close(got, want.chunk(ranks, 1)[mine], f"{name} {axes} output of step {step}")
            want.square().mean().backward()
            (got.square().sum() / want.numel()).backward()
            norms = [torch.nn.utils.clip_grad_norm_(n.parameters(), 1.0) for n in (reference, net)]
            assert_close(whole(norms[1]), norms[0], f"{name} {axes} norm of gradients")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        shared = fq.receipt().collectives.get("weights", 0)
        one_scale, square_blocks = (
            name in ("fp8_current", "fp8_delayed"),
            name in ("fp8_block", "hybrid"),
        )
        assert shared == (one_scale or (square_blocks and axes["shard"] > 1)), (name, axes, shared)
        state = net.state_dict()
        for key, value in reference.state_dict().items():
            assert type(state[key].to_local()) is torch.Tensor, key
            assert_close(whole(state[key]), value, f"{name} {key}")
        if "fp8_1" in str(fq.plan(reference)):
            continue  # 128-row blocks of weights are cut
        # The same masters have the same fingerprints, cut or not: codes follow them to other
        # numbers of ranks.
        same = build(2)
        fq.convert(same, recipe).load_state_dict({k: whole(v) for k, v in state.items()})
        fq.load_state_dict(same, fq.state_dict(net))  # raises where codes differ
    alone = cut(fq.convert(build(), fq.recipes.fp8_current()), mesh_of(tp=world))
    assert (
        fq.state_dict(alone)["codes"]
        == fq.state_dict(fq.convert(build(), fq.recipes.fp8_current()))["codes"]
    )


def test_tensor_parallel_under_fsdp_equals_one_process():
    """Otherwise weights that both axes cut are quantized with other scales, or their checkpoints
    fit one layout only."""
    run_ranks(most_ranks(4), several_axes)


# The example #


def example_losses(rank: int, world: int, tp: int, data: str, *more: str) -> list[float]:
    import language_model
    import train_lm

    language_model.VALIDATION_BATCHES = 2
    sizes = "--dim 64 --layers 1 --ffn 128 --seq 64 --batch 2 --steps 3 --warmup 1".split()
    sizes += "--dtype fp32 --recipe mxfp8".split()
    args = train_lm.parse([*sizes, "--tp", str(tp), "--data", data, *more])
    arms, config, text = train_lm.prepare(args)
    ((label, recipe),) = arms.items()
    outcome = train_lm.train(label, recipe, config, text, args)
    assert ("sequence" in outcome.receipt) == (tp > 1)
    return [*outcome.losses.values(), outcome.validation]


def test_example_trains_alike_on_two_axes(tmp_path):
    """Otherwise --tp trains another model.

    Codes are those of one rank; sums over ranks, of 64 to 128 fp32 products, are made in another
    order: 2^-24 * sqrt(128) = 7e-7 of an activation. Where that crosses the middle between two e4m3
           codes (of which there are 8 an octave: one in 10^5
    elements) an element moves by 1/16, and a sum of 64 such by 1/16 / 8 of its size in one of 10^3
    places: 3e-4 of the logits' spread of about 1, averaged over 128 places. Five times that is
            allowed.
    """
    text = tmp_path / "text"
    text.write_bytes(Path(__file__).read_bytes() * 2)
    alone, both = (
        run_ranks(world, example_losses, tp, str(text))[0] for world, tp in ((2, 1), (4, 2))
    )
    assert max(abs(a - b) for a, b in zip(alone, both)) < 1.5e-3, (alone, both)
    if laws.EVERYTHING:  # on a CPU eager steps, and a warning
        assert run_ranks(2, example_losses, 1, str(text), "--graphed")[0] == alone


class _MLP(nn.Module):
    """That `fq.convert` recognizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(32, 64),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _between_dtensors(rank: int, world: int) -> None:
    mesh, results = init_device_mesh(DEVICE, (world,)), []
    column = styles.ColwiseParallel(use_local_output=False)
    for fuse in (False, True):
        net = fq.convert(
            nn.Sequential(_MLP().to(torch.bfloat16)), fq.recipes.fp8_current(), fuse=fuse
        )
        assert hasattr(type(net[0]), "fused_as") is fuse
        cut = {"0.gate_proj": column, "0.up_proj": column, "0.down_proj": styles.RowwiseParallel()}
        parallelize_module(net, mesh, cut)
        x = laws.values(2, 16, 32, seed=3).requires_grad_()
        y = net(x)
        y.float().square().mean().backward()
        results.append((y.detach(), x.grad))
    for got, want in zip(*results):
        laws.assert_same_bytes(got, want, "between DTensors")


def test_recognized_mlps_multiply_dtensors():
    """If false, an MLP whose projections hand DTensors on fails, because a kernel of ours takes
    none."""
    run_ranks(2, _between_dtensors)


STEPS = {  # recipe -> whether a compiled step serves ranks of a cut tensor; None: of no tensor
    "mxfp8": True,
    "mxfp6": True,
    "fp8_block": True,
    "fp8_row": True,
    "fp8_current": True,
    "fp8_delayed": True,
    "mxfp4": None,  # rounded stochastically
    "nvfp4": None,
    "identity": False,
    "hybrid": True,
    "fp8_row+fp8_current": True,
}


def counts_of(receipt) -> list[str]:
    """Of products and gathers; a step quantizes both directions of a weight in one read."""
    return [line for line in str(receipt).splitlines() if not line.startswith("quantize")]


def one_call(rank: int, world: int) -> None:
    group, n, real = dist.group.WORLD, 256, native.linear_step
    steps = []

    def counted(*args):
        steps.append(args[5].ranks)
        return real(*args)

    def run(
        name: str, column: bool, dim: int | None, with_bias: bool, needs: str, k=128, **options
    ):
        is_cut = dim is not None
        tokens = 128 if name in ("fp8_block", "hybrid") else 64  # whole blocks
        fq.reset_receipt()
        torch.manual_seed(rank)
        recipe = recipe_of(name, **options)
        layer = fq.Linear(k, n, bias=with_bias, recipe=recipe, dtype=torch.bfloat16)
        state = layer.runtime.weight_state
        state.tensor_group, state.tensor_dim = group, int(not column)
        layer.weight.requires_grad_("w" in needs)
        layer.fuse_wgrad_accumulation = "+" in needs
        layer.weight.main_grad = torch.ones(n, k, device=DEVICE)
        rows = tokens if is_cut and column else tokens * world
        same = torch.Generator("cpu").manual_seed(rank if is_cut or not column else 0)
        x = torch.randn(2, rows, k, generator=same, device="cpu").bfloat16().to(DEVICE)
        x[1] *= 64  # other scales
        x = x.transpose(0, int(dim != 1)).detach().requires_grad_("x" in needs)
        axis = TensorParallel(group, column, dim)
        for step in range(1 + (name == "fp8_delayed")):  # the second scales by the first
            fq.begin_step(step)
            with torch.set_grad_enabled(bool(needs)):
                y = x / (1 + step)
                y = among_ranks.multiply_shared(layer, None, y, layer.weight, layer.bias, axis)
            dy = torch.Generator("cpu").manual_seed(7 + (rank if column or is_cut else 0))
            if needs:
                dy = torch.randn(y.shape, generator=dy, device="cpu").bfloat16().to(DEVICE) / 64
                y.backward(dy)
        amaxes = {s: h.amaxes.clone() for s, h in histories_by_side(layer).items()}
        bias = None if layer.bias is None else layer.bias.grad
        results = {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": bias}
        return results | {"main_grad": layer.weight.main_grad, **amaxes}, fq.receipt()

    native.linear_step = counted
    one = among_ranks._ranks_of_step
    program.LEAST_ROWS, program.LEAST_WEIGHT = 32, 2**14  # y of rows in pieces
    for name, served in STEPS.items():
        inner = (1,) * (name in ("mxfp8", "fp8_block", "fp8_current") or laws.EVERYTHING)
        for column, dim in itertools.product((True, False), (None, 0, *inner)):
            cases = [("xw", False, {})]
            if name == "fp8_delayed":
                cases.append(("xw", False, {"save_original_input": True}))
            if (name in ("mxfp8", "fp8_current") and dim != 1) or laws.EVERYTHING:
                some = ("x", "w", "", "xw+")[2 * (name == "fp8_current") :]
                cases += [(needs, False, {}) for needs in some]
                cases += [("xw", True, {}), ("xw", False, {"save_original_input": True})]
            if name in ("mxfp8", "identity") and dim != 1:  # which no step multiplies
                cases.append(("xw", False, {"k": 122}))
            for needs, with_bias, options in cases:
                what = f"{name}, {'column' if column else 'row'}, {dim=} {needs} {options}"
                steps.clear()
                got, receipt = run(name, column, dim, with_bias, needs, **options)
                is_served = served is not None if dim is None else served
                is_served = is_served and (column or not with_bias)
                is_served = is_served and (name != "identity" or "+" not in needs)
                count = (1 + (name == "fp8_delayed")) * (bool(is_served) and "k" not in options)
                assert len(steps) == count, f"{what}: {steps}"
                if not is_served:
                    continue
                among_ranks._ranks_of_step = lambda *_: None
                try:
                    want, planned = run(name, column, dim, with_bias, needs, **options)
                finally:
                    among_ranks._ranks_of_step = one
                assert counts_of(receipt) == counts_of(planned), f"{what}: {receipt}\n{planned}"
                for key, tensor in want.items():
                    if tensor is None:
                        assert got[key] is None, f"{what}: {key}"
                    else:
                        laws.assert_same_bytes(got[key], tensor, f"{what}: {key}")


def _one_call(rank: int, world: int) -> None:
    with contextlib.nullcontext() if DEVICE == "cuda" else hopper.emulated("sm_90a"):
        one_call(rank, world)


def test_one_compiled_call_among_ranks_gives_the_bytes_of_the_program():
    """Otherwise an eager layer that ranks share trains another model than the graph of it."""
    run_ranks(2, _one_call)


def _wants_dx(layer, y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    y.backward(dy, inputs=[x])


def _wants_dw(layer, y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    y.backward(dy, inputs=[layer.weight])


def _wants_both(layer, y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    y.backward(dy)


PROGRAMS = {  # what a user calls of f(x), and how
    "once": (lambda f, x: f(x), _wants_both, {}),
    "input": (lambda f, x: f(x), _wants_both, {"save_original_input": True}),
    "again": (lambda f, x: checkpoint(f, x, use_reentrant=False), _wants_both, {}),
    "twice": (lambda f, x: f(x) + 2 * f(x), _wants_both, {}),
    "dx": (lambda f, x: f(x), _wants_dx, {}),
    "dw": (lambda f, x: f(x), _wants_dw, {}),
    "frozen": (lambda f, x: checkpoint(f, x, use_reentrant=False), _wants_both, {}),
}


def _one_program(rank: int, world: int) -> None:
    group, one = dist.group.WORLD, among_ranks._ranks_of_step

    def run(recipe: str, name: str, column: bool, is_cut: bool, by_step: bool) -> dict:
        among_ranks._ranks_of_step = one if by_step else lambda *_: None
        call_of, backward, options = PROGRAMS[name]
        torch.manual_seed(rank)
        layer = fq.Linear(64, 96, False, recipe=recipe_of(recipe, **options), dtype=torch.bfloat16)
        state = layer.runtime.weight_state
        state.tensor_group, state.tensor_dim = group, int(not column)
        layer.weight.requires_grad_(name != "frozen")
        axis = TensorParallel(group, column, 0 if is_cut else None)
        x = laws.values(128, 64, seed=3 + rank, dtype=torch.bfloat16).requires_grad_()

        def multiplied(x: torch.Tensor) -> torch.Tensor:
            return among_ranks.multiply_shared(layer, None, x, layer.weight, None, axis)

        fq.reset_receipt()
        y = call_of(multiplied, x)
        backward(layer, y, x, laws.values(*y.shape, seed=7 + rank, dtype=torch.bfloat16))
        return {"y": y, "dx": x.grad, "dw": layer.weight.grad, "calls": counts_of(fq.receipt())}

    program.LEAST_ROWS, program.LEAST_WEIGHT = 32, 2**12  # y of rows in pieces
    recipes, both = ("mxfp8", "fp8_current"), (True, False)
    for case in itertools.product(recipes, PROGRAMS, both, both):
        (recipe, name, column, is_cut), want = case, run(*case, False)
        what = f"{recipe}, {name}, {'column' if column else 'row'}, {is_cut=}"
        for by_step in (True, rank == 1):  # all ranks; one, as the guard moved a product of another
            got = run(*case, by_step)
            assert got.pop("calls") == want["calls"], what
            for key, tensor in got.items():
                assert (tensor is None) == (want[key] is None), f"{what}: {key}"
                if tensor is not None:
                    laws.assert_same_bytes(tensor, want[key], f"{what}: {key}")
    with fq.quantized_model_init("mxfp8"):
        layer = fq.Linear(64, 96, False, dtype=torch.bfloat16)
    for served in (one, lambda *_: None):
        among_ranks._ranks_of_step, axis = served, TensorParallel(group, False)
        x = laws.values(64, 64, seed=3, dtype=torch.bfloat16).requires_grad_()
        y = among_ranks.multiply_shared(layer, None, x, layer.weight, None, axis)
        with torch.no_grad():
            layer.weight.copy_(laws.values(96, 64, seed=4, dtype=torch.bfloat16))
        with pytest.raises(fq.StaleWeightError, match="written between the forward and"):
            y.sum().backward()
    among_ranks._ranks_of_step = one
    layer = fq.Linear(64, 96, False, recipe="mxfp8", dtype=torch.bfloat16)
    for column, dim in itertools.product((True, False), (2, 4, -1, -4)):
        with pytest.raises(ValueError, match="cannot be cut"):
            axis, x = TensorParallel(group, column, dim), torch.ones(64, 64, dtype=torch.bfloat16)
            among_ranks.multiply_shared(layer, None, x, layer.weight, None, axis)
    for recipe, served in itertools.product(("mxfp8", "fp8_delayed"), (one, lambda *_: None)):
        among_ranks._ranks_of_step = served
        layer = fq.Linear(64, 96, False, recipe=recipe, dtype=torch.bfloat16)
        uneven = torch.ones(64 - 32 * rank, 64, dtype=torch.bfloat16)  # of 96 rows, on two ranks
        mesh = mesh_of(tp=world)
        whole_shape, stride = torch.Size((95, 64)), (64, 1)
        owner = DTensor.from_local(uneven, mesh, [Shard(0)], shape=whole_shape, stride=stride)
        with pytest.raises(ValueError, match="do not divide"):
            axis = TensorParallel(group, True, 0)
            among_ranks.multiply_shared(layer, owner, uneven, layer.weight, None, axis)


def _programs_of_ranks(rank: int, world: int) -> None:
    with hopper.emulated("sm_90a"):
        _one_program(rank, world)


def _shared_input(rank: int, world: int) -> None:
    group, one = dist.group.WORLD, among_ranks._ranks_of_step
    steps, real = [], native.linear_step

    def run(recipe: str, by_step: Sequence[bool], dim: int, frozen: str, saves: bool) -> dict:
        """by_step: of q, k and v, whether a compiled step runs it on this rank."""
        torch.manual_seed(rank)
        recipe = recipe_of(recipe, **({"save_original_input": True} if saves else {}))
        layers = [
            fq.Linear(128, n, False, recipe=recipe, dtype=torch.bfloat16) for n in (128, 64, 96)
        ]
        for layer in layers:
            layer.runtime.weight_state.tensor_group = group
            layer.runtime.weight_state.tensor_dim = 0
        layers[1].weight.requires_grad_("w" not in frozen)
        axis, shape = TensorParallel(group, True, dim), [128, 128, 128]
        shape[1 - dim] = 2
        x = laws.values(256, 128, seed=3 + rank, dtype=torch.bfloat16).view(shape)
        x = (x * (1 + rank)).requires_grad_("x" not in frozen)
        owner = x * 1  # not the leaf
        fq.reset_receipt()
        outputs = []
        for layer, is_step in zip(layers, by_step):
            among_ranks._ranks_of_step = one if is_step else lambda *_: None
            y = among_ranks.multiply_shared(layer, owner, owner, layer.weight, None, axis)
            outputs.append(y)
        dys = [laws.values(y.numel(), 1, seed=7 + rank, dtype=y.dtype).view_as(y) for y in outputs]
        if "b" in frozen:  # the backward reads one of them alone
            outputs, dys = outputs[:1], dys[:1]
        torch.autograd.backward(outputs, dys, retain_graph="r" in frozen)
        if "r" in frozen:
            torch.autograd.backward(outputs, dys)
        results = {f"y{i}": y for i, y in enumerate(outputs)} | {"dx": x.grad}
        results |= {f"dw{i}": layer.weight.grad for i, layer in enumerate(layers)}
        return results | {"calls": counts_of(fq.receipt())}

    def counted(*args):
        steps.append(args)
        return real(*args)

    native.linear_step = counted
    every, none = (True,) * 3, (False,) * 3
    for recipe, dim in (("mxfp8", 0), ("fp8_current", 0), ("fp8_block", 1), ("fp8_current", 1)):
        for frozen, saves in (("", False), ("x", False), ("w", True), ("b", False), ("r", False)):
            want = run(recipe, none, dim, frozen, saves)
            # all; on one rank; some of the layers
            for by_step in (every, every if rank else none, (rank == 0, rank == 1, True)):
                what = f"{recipe}, {dim=}, {frozen=}, {by_step=}"
                steps.clear()
                got = run(recipe, by_step, dim, frozen, saves)
                assert len(steps) == sum(by_step), f"{what}: {len(steps)} steps"
                assert got["calls"] == want["calls"], what
                for key in want.keys() - {"calls"}:
                    assert (got[key] is None) == (want[key] is None), f"{what}: {key}"
                    if got[key] is not None:
                        laws.assert_same_bytes(got[key], want[key], f"{what}: {key}")


def _styled_mlp(rank: int, world: int) -> None:
    one, steps, real = among_ranks._ranks_of_step, [], native.linear_step

    def counted(*args):
        steps.append(args)
        return real(*args)

    def run(recipe: str, by_step: bool, is_checkpointed: bool) -> dict:
        among_ranks._ranks_of_step = one if by_step else lambda *_: None
        fq.reset_receipt()
        steps.clear()
        net = build().bfloat16()
        net[0].down.bias = None
        mesh = mesh_of(tp=world)
        net = cut(fq.convert(net, recipe_of(recipe)), mesh)
        x = laws.values(2 * 64 * world, D, seed=1).view(2, -1, D)
        x = x.chunk(world, 1)[rank].contiguous().requires_grad_()
        y = checkpoint(net[0], x, use_reentrant=False) if is_checkpointed else net[0](x)
        y.backward(torch.ones_like(y))
        results = {name: whole(p.grad) for name, p in net.named_parameters()}
        return results | {"y": y, "dx": x.grad, "calls": counts_of(fq.receipt())}

    native.linear_step = counted
    for recipe, is_checkpointed in itertools.product(("mxfp8", "fp8_current"), (False, True)):
        want = run(recipe, False, is_checkpointed)
        for by_step in (True, rank == 1):
            got, what = run(recipe, by_step, is_checkpointed), f"{recipe}, {is_checkpointed=}"
            assert len(steps) == by_step * 3 * (1 + is_checkpointed), f"{what}: {len(steps)} steps"
            assert got["calls"] == want["calls"], what
            for key in want.keys() - {"calls"}:
                laws.assert_same_bytes(got[key], want[key], f"{what}: {key}")


def _shared_inputs(rank: int, world: int) -> None:
    with contextlib.nullcontext() if DEVICE == "cuda" else hopper.emulated("sm_90a"):
        _shared_input(rank, world)
        _styled_mlp(rank, world)


def test_compiled_steps_share_a_cut_input_as_the_program_does():
    """Otherwise q, k and v train another model, or wait for a rank whose guard moved a product of
    one of them for ever."""
    run_ranks(2, _shared_inputs)


def _inputs_of_users(rank: int, world: int) -> None:
    group, one = dist.group.WORLD, among_ranks._ranks_of_step
    same_ranks = dist.new_group(list(range(world)))

    def layer_of(**options) -> fq.Linear:
        recipe = recipe_of("mxfp8", **options)
        layer = fq.Linear(64, 96, False, recipe=recipe, dtype=torch.bfloat16)
        state = layer.runtime.weight_state
        state.tensor_group, state.tensor_dim = group, 0
        return layer

    def multiplied(layer: fq.Linear, x: torch.Tensor, ranks=group) -> torch.Tensor:
        axis = TensorParallel(ranks, True, 0)
        return among_ranks.multiply_shared(layer, x, x, layer.weight, None, axis)

    def input_of(rows: int = 64) -> torch.Tensor:
        return laws.values(rows, 64, seed=3 + rank, dtype=torch.bfloat16)

    def gathered_by(layer: fq.Linear, x: torch.Tensor, ranks=group) -> int:
        before = sum(fq.receipt().sequence.values())
        multiplied(layer, x, ranks)
        return sum(fq.receipt().sequence.values()) - before

    def live_tensors() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    for served in (one, lambda *_: None):
        among_ranks._ranks_of_step = served
        gate, up, strict = layer_of(), layer_of(), layer_of(require_native=True)
        fq.reset_receipt()
        for has_backward in (True, False):
            x = input_of().requires_grad_()
            y, freed = multiplied(gate, x) + multiplied(up, x), weakref.ref(x)
            if has_backward:
                y.sum().backward()
            del x, y
            assert freed() is None, f"{has_backward=}: the layers keep a leaf alive"
        x = input_of()
        multiplied(gate, x)
        pickle.dumps(x), copy.deepcopy(x)
        x.requires_grad_()
        multiplied(up, x).sum().backward()
        assert x.grad is not None, "an earlier reader wanted no gradient"
        x = input_of().requires_grad_() * 1
        nbytes = gathered_by(gate, x)
        assert gathered_by(up, x) == 0
        assert gathered_by(up, x, same_ranks) == nbytes, "ranks of another group"
        x = input_of(48).requires_grad_() * 1  # codes of 48 rows a rank do not travel
        multiplied(gate, x)
        with pytest.raises(ValueError, match="gathered in high precision, and require_native"):
            multiplied(strict, x)
        grads = []
        for is_nested in (False, True):
            x = input_of().requires_grad_()
            h = x * 1
            outputs = [multiplied(layer, h) for layer in (gate, up, gate)]
            loss = outputs[0].sum()
            if is_nested:  # between the layers whose gradients are summed
                outputs[1].register_hook(
                    lambda dy: torch.autograd.grad(loss, x, retain_graph=True) and None
                )
            (loss + sum(y.float().square().sum() for y in outputs)).backward(retain_graph=True)
            grads.append(x.grad)
        laws.assert_same_bytes(*grads, "around a backward that a hook runs")
        h = input_of().requires_grad_() * 1
        sums = [multiplied(layer, h).sum() for layer in (gate, up)]
        for read in ((0, 1), (0,), (1,)):  # by backwards that do not reach h
            before = live_tensors()
            weights = [(gate, up)[i].weight for i in read]
            for _ in range(4):
                torch.autograd.grad([sums[i] for i in read], weights, retain_graph=True)
            end = time.monotonic() + 10  # in which threads of gloo free what they sent
            while (left := live_tensors() - before) > 0 and time.monotonic() < end:
                time.sleep(0.01)
            assert left <= 0, f"{read=}: backwards leave {left} tensors behind"
        del h, sums
        x = input_of().requires_grad_()
        y = (multiplied(gate, h := x * 1) + multiplied(up, h)).float().square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(NotImplementedError, match="fq.Linear has no second derivative"):
            dx.float().square().sum().backward()
    among_ranks._ranks_of_step = one


def _inputs_of_steps(rank: int, world: int) -> None:
    with hopper.emulated("sm_90a"):
        _inputs_of_users(rank, world)


@on_cpu
def test_shared_inputs_remain_tensors_of_the_user():
    """Otherwise an input that layers share is never freed, cannot be copied, or loses its gradient,
    a gradient penalty misses terms without an error, and each backward over a retained graph stores
    another sum."""
    run_ranks(2, _inputs_of_steps)


@on_cpu
def test_ranks_of_which_one_runs_the_program_exchange_the_same():
    """Otherwise ranks wait for each other for ever, or sum what does not belong together, when the
    guard moves a product on one of them; or a layer that is called twice trains another model."""
    run_ranks(2, _programs_of_ranks)

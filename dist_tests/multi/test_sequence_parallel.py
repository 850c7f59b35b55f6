# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange along the sequence depends on what all of them know, and on how it is moved
nothing does."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import harness
from dist_tests.multi.harness import run_ranks
from dist_tests.single import hopper
from fsdp_quant.formats import ROWWISE
from fsdp_quant.linear import program
from fsdp_quant.linear.plan import EXACT
from fsdp_quant.linear.shared_input import SharedInput
from fsdp_quant.tensor.torch_compat import local_of
from fsdp_quant.tensor.weight_state import values_of as inner_of

D, FFN = 64, 256
RECIPES = ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed", "identity")
RECIPES = (*RECIPES, "nvfp4 row")


def recipe_named(name: str) -> fq.Recipe:
    name, _, per_row = name.partition(" ")
    options = {"scale_per": "row", "four_over_six": "mse"} if per_row else {}
    return fq.recipes.by_name(name, **options)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(D, FFN), nn.Linear(D, FFN), nn.Linear(FFN, D)

    def forward(self, x):
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def build(mesh, recipe: fq.Recipe, dtype: torch.dtype = torch.float32) -> nn.Module:
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return parallelize_module(
        fq.convert(MLP().to(dtype), recipe),
        mesh,
        {
            "": fq.parallel.PrepareModuleInput(**whole),
            "gate": fq.parallel.ColwiseParallel(),
            "up": fq.parallel.ColwiseParallel(),
            "down": fq.parallel.RowwiseParallel(output_layouts=Shard(1)),
        },
    )


def run(net: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = net(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "dx": x.grad,
        **{name: p.grad.to_local() for name, p in net.named_parameters()},
    }


def assert_same(got: dict, want: dict, what: str) -> None:
    for name, one in want.items():
        laws.assert_same_bytes(got[name], one, f"{what}: {name}")


def values(rank: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [laws.values(1, rows, D, seed=10 * seed + rank, dtype=dtype) for seed in (1, 2)]


def ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh(harness.DEVICE, (world,), mesh_dim_names=("tp",))
    x, dy = values(rank, 64, torch.float32)
    results = moved(mesh, rank, x, dy)
    if harness.DEVICE == "cpu":  # which has one domain for these
        assert_same(*results, "a product of one rank that moved")
    written_masters(mesh, x, dy)
    codes_of_the_forward(mesh, x)
    uneven(mesh, world)
    if harness.DEVICE != "cpu":
        return  # which is no emulated GPU
    with hopper.emulated():
        moved(mesh, rank, *values(rank, 64, torch.bfloat16))


def pieces(rank: int, world: int) -> None:
    """Sums are scattered a piece of the rows at a time."""
    mesh = init_device_mesh(harness.DEVICE, (world,), mesh_dim_names=("tp",))
    program.LEAST_WEIGHT = 1
    for name, rows in itertools.chain(itertools.product(RECIPES, (64,)), [("mxfp8", 31)]):
        of_a_recipe_in_pieces(mesh, name, *values(rank, rows, torch.float32))
    if harness.DEVICE != "cpu":
        return
    with hopper.emulated():
        for name in RECIPES[:4]:
            of_a_recipe_in_pieces(mesh, name, *values(rank, 64, torch.bfloat16))


def of_a_recipe_in_pieces(mesh, name: str, x: torch.Tensor, dy: torch.Tensor) -> None:
    results, world = [], mesh.size()
    for least in (2**30, 1):
        program.LEAST_ROWS = least
        net = build(mesh, recipe_named(name), x.dtype)
        with products() as made:
            results.append(run(net, x, dy))
        of_down = made.count((ROWWISE, FFN // world))
        assert of_down == 2 * world if least == 1 and x.shape[1] == 64 else of_down < 2, (
            name,
            made,
        )
    assert_same(results[1], results[0], f"{name} {list(x.shape)} {x.dtype} in pieces")
    assert "in 2 pieces" in str(fq.plan(net))


@contextlib.contextmanager
def products():
    """(direction of the weight, length of the contraction) of each product."""
    made, gemm = [], program.gemm

    def recorded(a, b, **options):
        made.append((b.direction, a.shape[1]))
        return gemm(a, b, **options)

    program.gemm = recorded
    try:
        yield made
    finally:
        program.gemm = gemm


def moved(mesh, rank: int, x: torch.Tensor, dy: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The guard judges on each rank alone."""
    nets = [build(mesh, fq.recipes.mxfp8(), x.dtype) for _ in range(2)]
    if rank == 0:
        for layer, products in ((nets[1].gate, ("fprop", "wgrad")), (nets[1].down, ("dgrad",))):
            layer.runtime.plan = layer.plan.moved_to(dict.fromkeys(products, EXACT))
    results, gathered = [], []
    for net in nets:
        fq.reset_receipt()
        results.append(run(net, x, dy))
        gathered.append(fq.receipt().sequence)
    assert gathered[0] == gathered[1], gathered
    # both domains multiply the codes, of which anchors lose 2^-9 at most, and round to bf16
    for name, one in results[0].items():
        error = (results[1][name].double() - one.double()).norm() / one.double().norm()
        assert error < 2**-7, f"{name}: {error:.1e}"
    return results


def written_masters(mesh, x: torch.Tensor, dy: torch.Tensor) -> None:
    """torch counts writes to the plain tensor behind a parameter, and a DTensor hands out views of
    it."""
    net = build(mesh, fq.recipes.fp8_current())
    with torch.no_grad():
        for p in net.parameters():
            inner_of(local_of(p)).add_(0.0)  # as NCCL's scatter does
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        run(net, x, dy)
        optimizer.step()
        optimizer.zero_grad()


def codes_of_the_forward(mesh, x: torch.Tensor) -> None:
    """The node of a layer keeps what its backward reads, and not the codes that its forward did."""
    made, encode = [], SharedInput.encode

    def remembered(self, rows):
        gather, saved = encode(self, rows)
        made.append(weakref.ref(gather))
        return gather, saved

    with patch.object(SharedInput, "encode", remembered):
        for recipe in RECIPES:
            y = build(mesh, recipe_named(recipe))(x.clone().requires_grad_())
            assert y.requires_grad and made.pop()() is None, recipe


def uneven(mesh, world: int) -> None:
    net = build(mesh, fq.recipes.mxfp8())
    layer = net.gate
    rows = 2 * world + 1
    x = DTensor.from_local(
        torch.zeros(1, 3, D)[:, : 3 - min(mesh.get_local_rank(), 1)],
        mesh,
        [Shard(1)],
        shape=(1, rows, D),
        stride=(rows * D, D, 1),
        run_check=False,
    )
    with pytest.raises(
        ValueError,
        match=rf"gate input: dim 1 of \[1, {rows}, {D}\] is {rows}, which the {world} ranks"
        ".*pad it",
    ):
        layer(x)
    net.down.runtime.recipe = replace(net.down.recipe, require_native=True)
    h = torch.zeros(1, 17 * world, FFN // world)
    with torch.no_grad():
        net.down(h)  # its gradient would be gathered in high precision, and there is none
    with pytest.raises(
        ValueError, match=r"down: grad_output.columnwise .*in high precision, and require_native"
    ):
        net.down(h)


def one_column(rank: int, world: int) -> None:
    """A head of one output, a token per rank: the gradient of a sum has one element, no strides."""
    mesh = init_device_mesh(harness.DEVICE, (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    head = nn.Linear(D, 1)
    x = torch.ones(1, 1, D, requires_grad=True)
    want = head.weight.detach().clone()
    style = fq.parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
    )
    layer = parallelize_module(fq.convert(head, "identity"), mesh, style)
    layer(x.expand(1, world, D)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.flatten(), world * want.flatten()), f"{rank}"


def test_a_sum_over_one_element_sends_its_gradient():
    """If false, the backward of a value head raises where a rank has one token."""
    run_ranks(2, one_column)


def test_collectives_are_the_same_on_every_rank():
    """Otherwise ranks wait for each other for ever: one judges a product, counts a write, or has
    fewer rows, alone."""
    run_ranks(2, ranks)


def test_sums_in_pieces_are_the_sums():
    """Otherwise a layer that scatters beside its product computes something else."""
    run_ranks(2, pieces)

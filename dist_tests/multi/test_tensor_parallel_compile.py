# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) of layers that ranks share: the bits of eager layers, one graph,
each gather in it once."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from dist_tests.single.test_compile import RECIPES
from fsdp_quant.tensor.torch_compat import local_of

D, FFN = 64, 128
# Sums over layers and ranks, (a + b) + (c + d) against (a + c) + (b + d): each rounds three times,
# by 2^-24 of a sum of magnitudes, which is at most twice the sum for gradients that point anywhere.
OTHER_ORDER = 2 * 3 * 2 * 2.0**-24
# Of a relative Frobenius error on a GPU, where eager layers and graphs sum in other orders: last
# bits of sums move some codes.
ON_GPU = 2e-2


class MLP(nn.Module):
    """[.., D] -> [.., D]. `recompute` checkpoints it."""

    def __init__(
        self, make: Callable = lambda k, n, name: nn.Linear(k, n), recompute: bool = False
    ):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (
            make(D, FFN, "gate"),
            make(D, FFN, "up"),
            make(FFN, D, "down"),
        )
        self.recompute = recompute

    def mlp(self, x):
        h = torch.sigmoid(x)  # what gate and up read is made in the graph, or is its input
        return self.down(torch.relu(self.gate(h)) * self.up(h))

    def forward(self, x):
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))


class Attention(nn.Module):
    """Layers that read the input of the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


def cut(net: MLP, mesh: DeviceMesh, along_sequence: bool = True, of=fq.parallel) -> MLP:
    column = of.ColwiseParallel(input_layouts=Shard(1)) if along_sequence else of.ColwiseParallel()
    row = of.RowwiseParallel(output_layouts=Shard(1)) if along_sequence else of.RowwiseParallel()
    return parallelize_module(net, mesh, {"gate": column, "up": column, "down": row})


def _styles(along_sequence: bool, first: str, of=fq.parallel) -> Callable:
    def build(mesh: DeviceMesh, recipe: fq.Recipe, **options) -> nn.Module:
        net = MLP(**options)
        net = fq.convert(net, recipe) if first == "convert" else net
        net = cut(net, mesh, along_sequence, of)
        return fq.convert(net, recipe) if first == "styles" else net

    return build


def _groups(dim: int | None) -> Callable:
    def build(mesh: DeviceMesh, recipe: fq.Recipe, **options) -> nn.Module:
        def make(k: int, n: int, name: str) -> nn.Module:
            kind = (
                fq.parallel.RowParallelLinear
                if name == "down"
                else fq.parallel.ColumnParallelLinear
            )
            return kind(k, n, mesh.get_group(), sequence_dim=dim, recipe=recipe, name=name)

        net = MLP(make, **options)
        fq.set_recipe(net, recipe)  # it counts steps from now on
        return net

    return build


def _prepared(mesh: DeviceMesh, recipe: fq.Recipe) -> nn.Module:
    """An input that three layers gather, once."""
    columns = {name: fq.parallel.ColwiseParallel() for name in "qkv"}
    net = parallelize_module(fq.convert(Attention(), recipe), mesh, columns)
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return parallelize_module(net, mesh, fq.parallel.PrepareModuleInput(**whole))


LAYOUTS = {
    "styles, cut": _styles(True, "convert"),
    "styles, whole": _styles(False, "styles"),
    "groups, cut": _groups(1),
    "groups, whole": _groups(None),
    "torch's styles": _styles(False, "convert", styles),
    "prepared": _prepared,
}
# Each layout once in CI; of the recipes those that exchange other things than the others.
SAMPLE = (
    tuple(itertools.product(RECIPES, LAYOUTS))
    if laws.EVERYTHING
    else (
        ("fp8_delayed", "styles, cut"),
        ("fp8_current", "styles, whole"),
        ("fp8_row", "groups, cut"),
        ("mxfp8", "groups, whole"),
        ("nvfp4", "torch's styles"),
        ("dequantized", "prepared"),
    )
)


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh(DEVICE, tuple(axes.values()), mesh_dim_names=tuple(axes))


def train(
    model: nn.Module,
    call: Callable,
    rank: int,
    rows: tuple[int, ...] = (64,),
    steps: int = 3,
    evaluate: bool = laws.EVERYTHING,
) -> dict[str, torch.Tensor]:
    """Outputs, gradients and weights of some steps, the third of which makes no other graph."""
    seen, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        fq.begin_step(step)
        x = laws.values(
            1, rows[step % len(rows)], D, seed=10 * step + rank, dtype=torch.float32
        ).requires_grad_()
        with dynamo_config.patch(error_on_recompile=step > 1):
            y = local_of(call(x))
            y.square().mean().backward()
        seen |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
        seen |= {
            f"{name}.grad {step}": local_of(p.grad).clone() for name, p in model.named_parameters()
        }
        optimizer.step()
        optimizer.zero_grad()
    if evaluate:
        model.eval()
        with torch.no_grad():
            seen["evaluated"] = local_of(call(x.detach()))
    return seen | {name: local_of(p).detach().clone() for name, p in model.named_parameters()}


def assert_same(got: dict, want: dict, what: str, sums_of_layers: bool) -> None:
    """sums_of_layers: eager layers, whose histories are their own, scatter dx one by one, and a
    graph scatters their sum."""
    assert got.keys() == want.keys()
    for name, one in want.items():
        bound = (
            ON_GPU
            if DEVICE != "cpu"
            else OTHER_ORDER
            if sums_of_layers and name.startswith("dx")
            else None
        )
        if bound is not None:
            error = float((got[name] - one).norm() / one.norm())
            assert error <= bound, f"{what}: {name}: {error:.1e}"
        else:
            laws.assert_same_bytes(got[name], one, f"{what}: {name}")


def graphs() -> int:
    """Since this was asked last."""
    assert not dynamo_counters["graph_break"], dict(dynamo_counters["graph_break"])
    made = dynamo_counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    dynamo_counters.clear()
    return made


PARTS = 4 if laws.EVERYTHING else 1


def _compiled_equals_eager(rank: int, world: int, part: int) -> None:
    mesh = mesh_of(tp=world)
    for name, layout in SAMPLE[part::PARTS]:
        build, what = LAYOUTS[layout], f"{name}, {layout}"
        net = build(mesh, RECIPES[name])
        want = train(net, net, rank)
        net = build(mesh, RECIPES[name])
        got = train(net, torch.compile(net, fullgraph=True, backend="aot_eager"), rank)
        is_cut = layout in ("styles, cut", "groups, cut", "prepared")
        assert_same(got, want, what, is_cut and RECIPES[name].name == "fp8_delayed")
        # To train and to evaluate; hooks that begin a step, or prepare an input, are a graph before
        # the module's.
        assert graphs() <= (4 if layout == "prepared" else 2), what


@pytest.mark.parametrize("part", range(PARTS))
def test_compiled_layers_are_the_eager_ones(part: int):
    """If false, layers that ranks share break graphs, are compiled again in each step, or train
    another model there."""
    assert {layout for _, layout in SAMPLE} == set(LAYOUTS)
    run_ranks(2, _compiled_equals_eager, part)


# What graphs hold #


def captured(model: nn.Module, x: torch.Tensor) -> list[torch.fx.GraphModule]:
    """The graphs of a forward and its backward, and of a forward without gradients."""
    made = []

    def keep(module, _):
        made.append(module)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    run = torch.compile(model, fullgraph=True, backend=backend)
    local_of(run(x)).sum().backward()
    with torch.no_grad():
        run(x.detach())
    graphs()
    return [
        module for module in made if any("fsdp_quant" in str(n.target) for n in module.graph.nodes)
    ]


def collectives(module: torch.fx.GraphModule) -> Counter:
    targets = [str(n.target).split(".") for n in module.graph.nodes]
    return Counter(t[1] for t in targets if t[0] == "_c10d_functional" and t[1] != "wait_tensor")


def _gathered_once(rank: int, world: int) -> None:
    mesh = mesh_of(tp=world)
    # codes, and the scales that are not of the whole tensor
    gathers = {"mxfp8": 2, "nvfp4": 2, "fp8_current": 1}
    cases = (("fp8_current", "groups, cut"), ("nvfp4", "styles, cut"), ("mxfp8", "prepared"))
    for name, layout in cases if laws.EVERYTHING else cases[:2]:
        x = laws.values(1, 64, D, seed=rank, dtype=torch.float32).requires_grad_()
        modules = captured(LAYOUTS[layout](mesh, RECIPES[name]), x)
        of_ranks, own = [None] * world, [module.code for module in modules]
        dist.all_gather_object(of_ranks, own)
        assert all(codes == own for codes in of_ranks), "ranks run other graphs"
        forward, backward, evaluation = map(collectives, modules)
        of_x, row = gathers[name], layout != "prepared"
        # A row layer scatters y, and gathers dy in both directions, or codes that serve both.
        for one in (forward, evaluation):
            assert one["all_gather_into_tensor"] == of_x, (name, layout, forward, evaluation)
            assert one["reduce_scatter_tensor"] == row
        of_dy = row * (1 if name == "fp8_current" else 4)
        assert backward["all_gather_into_tensor"] == of_x + of_dy, (name, layout, backward)
        assert backward["reduce_scatter_tensor"] == 1, "of the sum over the layers that read x"
        # Amaxes: of x, each weight, and what row layers read; of the gradients, and the sum of a
        # row layer's bias.
        amaxes = (0, row) if name == "mxfp8" else (1 + 3 + row, 3 + row)
        assert (forward["all_reduce"], backward["all_reduce"]) == amaxes, (
            name,
            layout,
            forward,
            backward,
        )


@on_cpu
def test_what_layers_read_is_gathered_once():
    """If false, q, k and v gather their input three times, a gather of the backward is made in the
    forward and again, or ranks issue collectives in another order."""
    run_ranks(2, _gathered_once)


# Around them #


def _recomputed(rank: int, world: int) -> None:
    mesh = mesh_of(tp=world)
    for name in ("nvfp4", "mxfp8") if laws.EVERYTHING else ("mxfp8",):
        want, net = (
            LAYOUTS["styles, cut"](mesh, RECIPES[name], recompute=again) for again in (False, True)
        )
        want = train(want, want, rank, steps=1)
        call = torch.compile(net, fullgraph=True, backend="aot_eager")
        assert_same(train(net, call, rank, steps=1), want, name, False)
        graphs()


def _lengths(rank: int, world: int) -> None:
    mesh = mesh_of(tp=world)
    want, net = (LAYOUTS["groups, cut"](mesh, RECIPES["mxfp8"]) for _ in range(2))
    rows = (64, 96, 160)  # of which columnwise codes travel
    want = train(want, want, rank, rows)
    assert_same(
        train(net, torch.compile(net, fullgraph=True, backend="aot_eager"), rank, rows),
        want,
        "lengths",
        False,
    )
    assert graphs() <= 2 + 2 * laws.EVERYTHING, "of one length and of any, to train and to evaluate"


def _quantized_parameters(rank: int, world: int) -> None:
    mesh, seen, recipe = mesh_of(tp=world), [], RECIPES["fp8_current"]
    for prepare in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        with fq.quantized_model_init(recipe):
            net = LAYOUTS["styles, cut"](mesh, recipe)
        optimizer, call = fq.optim.FusedAdam(net.parameters(), lr=1e-2), prepare(net)
        for step in range(2):
            y = call(laws.values(1, 64, D, seed=10 * step + rank, dtype=torch.float32))
            y.square().mean().backward()
            seen.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(seen[2:], seen[:2]):
        laws.assert_same_bytes(got, want, "quantized parameters")
    assert graphs() == 1


def _refusals(rank: int, world: int) -> None:
    """Each is raised before the first collective, from what all ranks share: a rank that refuses
    alone leaves others waiting."""
    net = LAYOUTS["styles, cut"](mesh_of(tp=world), RECIPES["mxfp8"])
    for layer in (net.gate, net.down):
        layer.runtime.recipe = replace(layer.recipe, require_native=True)
    refused = [
        (net.down, (1, 5, FFN // world), r"down output: dim 1 of .* is 5, which the .* pad it"),
        (net.down, (1, 4, 7), r"down: this rank's input is \[1, 4, 7\], wanted"),
        (
            net.down,
            (1, 17 * world, FFN // world),
            r"down: grad_output.columnwise .*high precision, and require_native",
        ),
        (net.gate, (1, 17, D), r"gate: input.columnwise .*in high precision, and require_native"),
    ]
    for layer, shape, message in refused:
        with pytest.raises(ValueError, match=message):
            torch.compile(layer, backend="aot_eager")(torch.zeros(*shape))
        torch._dynamo.reset()
    layer, shape, message = refused[0]
    # of a whole graph; it holds our sentence
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.zeros(*shape))
    torch._dynamo.reset()
    dynamo_counters.clear()


def _around(rank: int, world: int) -> None:
    others = (_recomputed, _quantized_parameters, _refusals) if laws.EVERYTHING else ()
    for law in (_lengths, *others):
        law(rank, world)


@on_cpu
def test_compiled_layers_are_recomputed_grow_and_refuse_as_eager_ones():
    """If false, checkpointing draws other bits, each length compiles anew, codes as parameters
    break the graph, or a bad input hangs the other ranks."""
    run_ranks(2, _around)


# Beside FSDP2 #


def _two_axes(rank: int, world: int) -> None:
    mesh = mesh_of(shard=world // 2, tp=2)
    names = RECIPES if laws.EVERYTHING else ("nvfp4",)
    for name, compile_first in zip(names, itertools.cycle((True, False))):
        results = []
        for is_compiled in (False, True):
            net = fq.convert(nn.Sequential(MLP(), MLP()), RECIPES[name])
            for block in net:
                cut(block, mesh["tp"])
            for when in ("before", "after"):
                for block in net if is_compiled and (when == "before") == compile_first else ():
                    block.compile(fullgraph=True, backend="aot_eager")
                for block in net if when == "before" else ():
                    fully_shard(block, mesh=mesh["shard"])
            fully_shard(net, mesh=mesh["shard"])
            results.append(train(net, net, rank, steps=3))
        sums = RECIPES[name].name == "fp8_delayed"
        if sums:  # the first block's gradients follow from the second's dx
            results = [{k: v for k, v in of.items() if k == "y 0"} for of in results]
        assert_same(results[1], results[0], name, sums)
        assert graphs() == 1 + laws.EVERYTHING, (
            "equal blocks share graphs, to train and to evaluate"
        )


def test_gathered_weights_of_two_axes_enter_the_graph():
    """If false, tensor parallelism under `fully_shard` breaks the graph of a block, or multiplies
    other codes in it."""
    run_ranks(4, _two_axes)


def _inductor(rank: int, world: int) -> None:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(D, FFN, bias=False), nn.Linear(FFN, D, bias=False)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    mesh, results = mesh_of(tp=world), []
    for backend in (None, "inductor"):
        net = parallelize_module(
            fq.convert(Pair(), RECIPES["fp8_current"]),
            mesh,
            {
                "up": fq.parallel.ColwiseParallel(input_layouts=Shard(1)),
                "down": fq.parallel.RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        call = net if backend is None else torch.compile(net, fullgraph=True, backend=backend)
        results.append(train(net, call, rank, steps=2, evaluate=False))
    assert_same(results[1], results[0], "inductor", False)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_the_same_collectives():
    """If false, the default backend moves, drops or repeats a collective, or ranks wait for each
    other for ever."""
    run_ranks(2, _inductor)

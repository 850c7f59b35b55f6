# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens that travel to their experts as codes are multiplied as if one process
had them all."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from dist_tests.single import hopper
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.linear import grouped, routes
from fsdp_quant.linear.stacked_weights import stacked_weight
from fsdp_quant.parallel import combine_tokens, dispatch_tokens, planned_dispatch, token_route
from fsdp_quant.parallel.experts import travel_of
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.tensor import torch_compat

K = 48
# Tokens of each rank for each of eight experts: uneven; none for an expert; none for the second
# rank's; a rank that has none.
COUNTS = (
    lambda rank: [(5 * rank + 3 * e) % 11 for e in range(8)],
    lambda rank: [9, 0, 4, 1, *([0] * 4)] if rank % 2 else [2, 0, 33, 0, *([0] * 4)],
    lambda rank: [0] * 8 if rank == 0 else [3, 0, 0, 17, 1, 0, 5, 2],
)


def tokens_of(rank: int, counts: list[int], cols: int = K) -> torch.Tensor:
    # scales differ between ranks
    return laws.values(sum(counts), cols, seed=rank, dtype=torch.bfloat16) * 7 ** (rank % 100)


def dispatches(rank: int, world: int) -> None:
    group, experts = dist.group.WORLD, 8 // world

    def check(hybrid, counts_of, number) -> None:
        counts = counts_of(rank)
        x = tokens_of(rank, counts).requires_grad_()
        pieces = [tokens_of(r, counts_of(r)).split(counts_of(r)) for r in range(world)]
        held = range(rank * experts, (rank + 1) * experts)
        want = [torch.cat([of[e] for of in pieces]) for e in held]
        travel = travel_of(hybrid, K, x.dtype, "codes")
        is_coded, fmt = travel.hybrid is not None, hybrid.side(ROWWISE).fmt
        splits = counts if number % 2 else torch.tensor(counts).cumsum(0)
        fq.reset_receipt()
        got, route = dispatch_tokens(
            x, splits, group, hybrid, transport="codes" if is_coded else "auto"
        )
        what, moved = f"{hybrid} {counts}: {travel}", fq.receipt().dispatch
        assert route.splits == [len(one) for one in want], what
        sent_as = ("rowwise", fmt.name) if is_coded else ("both", "high precision")
        assert world == 1 or [*moved] == [("forward", *sent_as)], (what, moved)
        want = torch.cat(want)
        want = hybrid.quantize(want).rowwise.dequantize() if is_coded else want
        laws.assert_same_bytes(got, want, what)
        dx = laws.values(sum(route.splits), K, seed=rank + 50, dtype=torch.bfloat16)
        got.backward(dx)
        laws.assert_same_bytes(x.grad, combine_tokens(dx, route), f"{what} gradient")
        if not is_coded:
            laws.assert_same_bytes(combine_tokens(got, route), x, f"{what} there and back")
        is_power = fmt.scale == "e8m0" or fmt.pow2
        is_of_token = fmt.block[0] == 1 and fmt.block[1] is not None
        assert is_coded == (is_power and is_of_token and not hybrid.rowwise.is_stochastic), what

    pairs = laws.sample(list(itertools.product(laws.QUANTIZERS.values(), repeat=2)), 17)
    for number, ((row, column), counts_of) in enumerate(zip(pairs, itertools.cycle(COUNTS))):
        check(HybridQuantizer(row, column), counts_of, number)
    for number, counts_of in enumerate(COUNTS):
        for fmt in ("mxfp8", "fp8_1x128", "nvfp4"):
            check(HybridQuantizer(fmt, fmt), counts_of, number)
        check(HybridQuantizer("mxfp8", "fp8_1x128", "rowwise_dequantized"), counts_of, number)
    check(HybridQuantizer(Quantizer("mxfp8", rounding="stochastic"), "mxfp8"), COUNTS[0], 0)
    x = tokens_of(rank, COUNTS[2](rank)).requires_grad_()  # a sum's gradient has no strides
    tokens, route = dispatch_tokens(x, COUNTS[2](rank), group)
    combine_tokens(2 * tokens, route).sum().backward()
    laws.assert_same_bytes(x.grad, torch.full_like(x, 2), "of a sum")
    counts = [[3 * r + e + 1 for e in range(world)] for r in range(world)]  # an expert per rank
    x, ends = tokens_of(rank, counts[rank]), torch.tensor(counts[rank]).cumsum(0)
    got, route = dispatch_tokens(x, ends, group)
    want = torch.cat([tokens_of(r, of).split(of)[rank] for r, of in enumerate(counts)])
    laws.assert_same_bytes(got, want, "one expert")
    laws.assert_same_bytes(combine_tokens(got, route), x, "one expert, and back")
    assert route.ends.tolist() == [len(want)] == route.splits
    assert (route.counts, route.arriving) == (counts[rank], [[of[rank]] for of in counts])


@pytest.mark.parametrize("world", laws.every_second([2, 4], 0))
def test_dispatched_tokens_have_the_values_of_their_codes(world):
    """If false, an expert multiplies other codes than its tokens have, or those of another."""
    run_ranks(world, dispatches)


class Launched(TorchDispatchMode):
    """Operators that launch a kernel of a device, by name."""

    HOST = "empty", "new_empty", "_to_copy", "detach", "alias", "full_like"

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, results = function.__name__.partition(".")[0], function(*args, **(kwargs or {}))
        if function.namespace == "aten" and not function.is_view and name not in self.HOST:
            self.names.append(name)
        return results


def launches(rank: int, world: int) -> None:
    counts, group = COUNTS[0](rank), dist.group.WORLD
    x, ends = tokens_of(rank, counts), torch.tensor(counts).cumsum(0)
    net = spread(Experts(fq.recipes.mxfp8()), init_device_mesh(DEVICE, (world,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_compat.fsdp2, "fsdp_states", lambda: pytest.fail("walks FSDP"))
        net(x, ends).sum().backward()
    with Launched() as launched:
        tokens, route = dispatch_tokens(x, ends, group)
        combine_tokens(tokens, route)
    exchange, order = ["full", "copy_"], ["arange", "searchsorted", "index_select", "add"]
    order += ["empty_like", "index_copy_", "index_copy"]
    rest = [name for name in launched.names if name not in (*exchange, *order)]
    assert not rest and len(launched.names) <= 10, launched.names


def test_a_route_launches_few_operators():
    """If false, the host launches operators on one number per rank and expert, or walks through all
    parameters under `fully_shard` per layer, and GPUs wait for the host."""
    run_ranks(2, launches)


# A module of experts #

FFN, EXPERTS = 32, 8
# recipe, options of the style, format of the tokens forward and of the output's gradient backward
RECIPES = {
    "identity": (fq.recipes.identity(), {}, "high precision", "high precision"),
    "fp8_current": (
        fq.recipes.fp8_current(),
        {"gradients": "auto"},
        "high precision",
        "high precision",
    ),
    "mxfp8": (fq.recipes.mxfp8(), {"gradients": "auto"}, "mxfp8", "mxfp8"),
    "mxfp8 gradients": (
        fq.recipes.mxfp8(),
        {"gradients": "codes", "transport": "high_precision"},
        "high precision",
        "mxfp8",
    ),
    "dequantized": (
        fq.recipes.mxfp8(backward_override="dequantized"),
        {"gradients": "auto"},
        "mxfp8",
        "high precision",
    ),
    "wgrad of values": (
        fq.recipes.mxfp8(backward_override="high_precision"),
        {},
        "high precision",
        "high precision",
    ),
    "hybrid": (fq.recipes.hybrid("mxfp8", "nvfp4"), {}, "mxfp8", "high precision"),
    "nvfp4": (fq.recipes.nvfp4(), {}, "high precision", "high precision"),
}


class Experts(nn.Module):
    """SwiGLU experts of packed weights."""

    def __init__(self, recipe: fq.Recipe, bias: bool = False, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": bias, "packed": True, "recipe": recipe, "dtype": dtype}
        self.gate, self.up = (
            fq.GroupedLinear(EXPERTS, K, FFN, **options, name=name) for name in ("gate", "up")
        )
        self.down = fq.GroupedLinear(EXPERTS, FFN, K, **options, name="down")

    def forward(self, x, splits):
        return self.down(F.silu(self.gate(x, splits)) * self.up(x, splits), splits)


def spread(experts: Experts, mesh, **options) -> Experts:
    style = fq.parallel.ExpertParallel(reads=["gate", "up"], writes="down", **options)
    return parallelize_module(experts, mesh, style)


def in_one_process(
    experts: nn.Module, counts_of, world: int, rounds: dict[str, HybridQuantizer]
) -> tuple[list[torch.Tensor], ...]:
    """(y, dx) of each rank's tokens, of one process that has all of them; gradients are left in
    `experts`. rounds: quantizers of tokens and of gradients, whose rowwise codes they come as."""

    def given(slot: str, seed: int) -> list[tuple[torch.Tensor, ...]]:
        values = [tokens_of(r + seed, counts_of(r)) for r in range(world)]
        if slot in rounds:
            values = [rounds[slot].quantize(x).rowwise.dequantize() for x in values]
        return [x.split(counts_of(r)) for r, x in enumerate(values)]

    x, dy = given("input", 0), given("grad_output", 100)
    order = [(e, r) for e in range(EXPERTS) for r in range(world)]
    whole = torch.cat([x[r][e] for e, r in order]).requires_grad_()
    y = experts(whole, [sum(len(of[e]) for of in x) for e in range(EXPERTS)])
    y.backward(torch.cat([dy[r][e] for e, r in order]))
    results = []
    for t in (y.detach(), whole.grad):
        pieces = dict(zip(order, t.split([len(x[r][e]) for e, r in order])))
        results.append([torch.cat([pieces[e, r] for e in range(EXPERTS)]) for r in range(world)])
    return tuple(results)


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Where a GPU anchors codes, which rounds subnormals a second time, or values, or multiplies
    codes of two levels one expert after the other: bf16 results differ in their last bits."""
    error, size = (float(t.norm()) for t in (got.float() - want.float(), want.float()))
    assert error <= 2**-8 * size, f"{what}: {error:.2e} of {size:.2e} from one process"


def modules(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",))
    kinds = laws.every_second(list(zip(RECIPES.items(), itertools.cycle(COUNTS))), world // 2)
    for (name, (recipe, options, forward, backward)), counts_of in kinds:
        bias = name == "mxfp8"
        reference, net = Experts(recipe, bias), spread(Experts(recipe, bias), mesh, **options)
        counts, plan = counts_of(rank), reference.gate.first.plan
        travels = ("input", forward), ("grad_output", backward)
        rounds = {slot: plan.hybrid(slot) for slot, fmt in travels if fmt != "high precision"}
        x, dy = tokens_of(rank, counts).requires_grad_(), tokens_of(rank + 100, counts)
        planned = planned_dispatch(net, counts)
        fq.reset_receipt()
        with fq.token_offset(0):
            y = net(x, counts)
            y.backward(dy)
            moved = fq.receipt()
            want_y, want_dx = in_one_process(reference, counts_of, world, rounds)
        same = (
            laws.assert_same_bytes
            if DEVICE == "cpu" or forward not in ("mxfp8", "nvfp4")
            else assert_close
        )
        same(y, want_y[rank], f"{name} y")
        same(x.grad, want_dx[rank], f"{name} dx")
        mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        for (key, p), q in zip(net.named_parameters(), reference.parameters()):
            same(p.grad.to_local(), q.grad[mine], f"{name} {key}.grad")
        assert moved.dispatch == (planned if world > 1 else {}), (name, moved.dispatch, planned)
        found = [
            {fmt for phase, d, fmt in planned if phase == of and d != "sum"}
            for of in ("forward", "backward")
        ]
        assert found == [{forward}, {backward}], (name, found)
        assert f"{EXPERTS} experts over {world} ranks" in str(fq.plan(net)), fq.plan(net)
        with torch.no_grad(), fq.token_offset(0):  # the forward's direction alone
            same(
                net(x, torch.tensor(counts).cumsum(0)), want_y[rank], f"{name} y without gradients"
            )
        for model in (net, reference):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        for (key, p), q in zip(net.named_parameters(), reference.parameters()):
            same(p.detach().to_local(), q.detach()[mine], f"{name} {key} after a step")


@pytest.mark.parametrize("world", [2, 4])
def test_experts_of_ranks_equal_one_process(world):
    """Otherwise expert parallelism trains another model, or sends more than the plan says."""
    run_ranks(world, modules)


# Rowwise codes, tokens by their routes, and the sum of what comes back #


class Rounded(torch.autograd.Function):
    """Values of rowwise codes of x, or (of_gradient) of the gradient."""

    @staticmethod
    def forward(ctx, x, hybrid, of_gradient):
        ctx.hybrid = hybrid if of_gradient else None
        return x.clone() if of_gradient else hybrid.quantize(x).rowwise.dequantize()

    @staticmethod
    def backward(ctx, dy):
        return (
            dy if ctx.hybrid is None else ctx.hybrid.quantize(dy).rowwise.dequantize(),
            None,
            None,
        )


class Reads(TorchFunctionMode):
    """What the host reads of tensors, and after how many were encoded."""

    NAMES = "tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.NAMES or (name == "to" and "cpu" in args):
            self.names.append(f"{name} after {counters.total('quantize')} encoded")
        return function(*args, **(kwargs or {}))


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    GATHER,
    "all_gather_object",
    "broadcast",
    "barrier",
)


@contextlib.contextmanager
def met(names: list[str]):
    """Collectives inside, by name. A dispatch mode would run experts one by one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:

            def called(*args, name=name, original=getattr(dist, name), **options):
                names.append(name)
                return original(*args, **options)

            patch.setattr(dist, name, called)
        yield


KINDS = "spread", "one rank", "no tokens", "dropped"


def drawn(rank: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """(order, back, rows of each expert, those of `order` that are sent) of a rank's tokens, which
    go to two experts each: of all, or of the last rank."""
    tokens = 0 if kind == "no tokens" and rank == 0 else 9 + 4 * rank
    some, g = EXPERTS // 2 if kind == "one rank" else EXPERTS, torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, some, generator=g, device="cpu").to(DEVICE)
    chosen = (scores.argsort(1)[:, :2] + (EXPERTS - some)).flatten()
    order = chosen.sort(stable=True).indices
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    sent = torch.cat([torch.arange(n) < (3 if kind == "dropped" else n) for n in counts])
    return order, order.argsort().view(-1, 2), counts, sent


def layers(rank: int, world: int, emulated: bool) -> None:
    if not emulated:
        return check_layers(rank, world, reads=True)
    with hopper.emulated() as gpu:
        check_layers(rank, world, reads=False)  # the emulator reads too
        called = {call[0] for call in gpu.calls}
        assert "grouped_gemm" in called and "gemm" not in called, called  # experts one by one


def check_layers(rank: int, world: int, reads: bool) -> None:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",))
    style = {"gradients": "codes"}
    for fmt in ("mxfp8", "fp8_1x128"):  # rows of words, which torch copies faster than bytes
        counts = [COUNTS[0](r) for r in range(world)]
        every = [tokens_of(r, of, 256).split(of) for r, of in enumerate(counts)]
        held = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        want = Quantizer(fmt).quantize(torch.cat([of[e] for e in held for of in every]))
        x, group = tokens_of(rank, counts[rank], 256), mesh.get_group()
        got, _ = dispatch_tokens(x, counts[rank], group, fmt)
        laws.assert_same_bytes(got, want.rowwise.dequantize(), fmt)
    for recipe, kind in zip(itertools.cycle((fq.recipes.mxfp8(), fq.recipes.fp8_block())), KINDS):
        what, drops = f"{recipe} {kind}", kind == "dropped"
        reference, net = Experts(recipe), spread(Experts(recipe), mesh, **style)
        everyones = [drawn(r, kind) for r in range(world)]
        given = [
            [
                laws.values(len(back), n, seed=10 * i + r, dtype=dtype).requires_grad_()
                for i, (n, dtype) in enumerate(((K, torch.bfloat16), (2, torch.float32)))
            ]
            for r, (_, back, *_) in enumerate(everyones)
        ]
        splits = [[min(n, 3) if drops else n for n in counts] for _, _, counts, _ in everyones]

        def rows_of(r: int, x: torch.Tensor) -> torch.Tensor:
            order, back, _, sent = everyones[r]
            return routes.dispatch(x, order, back)[sent]

        # experts of ranks
        (order, back, *_), (x, weights) = everyones[rank], given[rank]
        read, collectives = [Reads(), Reads()], ([], [])
        rows = rows_of(rank, x) if drops else x
        named, events = {} if drops else {"routes": (order, back), "weights": weights}, []

        def shared() -> torch.Tensor:
            events.append(len(collectives[0]))
            z = rows * 3
            z.register_hook(lambda _: events.append(len(collectives[1])))
            return z

        rows.register_hook(lambda _: events.append("dx"))
        fq.reset_receipt()
        with read[0], met(collectives[0]):
            y, z = net(rows, splits[rank], meanwhile=shared, **named)
            y = y + z
        dy = laws.values(*y.shape, seed=rank + 50, dtype=torch.bfloat16)
        with read[1], met(collectives[1]):
            y.backward(dy)
        want = [GATHER, *["all_to_all_single"] * 2], ["all_to_all_single"] * 2
        assert collectives == want, (what, collectives)
        if reads:  # copies that start wait for nothing; the underflow check of GPUs has one besides
            waits = [[name for name in of.names if not name.startswith("to ")] for of in read]
            assert waits == [["tolist after 1 encoded"], []], (what, waits)
            assert read[0].names[0] == "to after 0 encoded", (what, read[0].names)
        assert events == [2, 2, "dx"], (what, events)  # after it was sent, before it is there
        planned = planned_dispatch(net, splits[rank])
        assert fq.receipt().dispatch == planned, (what, planned)
        plan = net.gate.first.plan
        sent_as = plan.input.rowwise.fmt.name
        codes = {key for key in planned if key[1] != "sum"}
        assert codes == {(p, "rowwise", sent_as) for p in ("forward", "backward")}, (what, codes)

        # one process
        every = [[t.detach().clone().requires_grad_() for t in of] for of in given]
        copies = [rows_of(r, x) if drops else x for r, (x, _) in enumerate(every)]
        rounded = [Rounded.apply(rows, plan.input, False) for rows in copies]
        rounded = rounded if drops else [rows_of(r, rows) for r, rows in enumerate(rounded)]
        pieces = [rows.split(of) for rows, of in zip(rounded, splits)]
        order_of = [(e, r) for e in range(EXPERTS) for r in range(world)]
        sizes = [sum(of[e] for of in splits) for e in range(EXPERTS)]
        came = reference(torch.cat([pieces[r][e] for e, r in order_of]), sizes)
        parts = dict(zip(order_of, came.split([splits[r][e] for e, r in order_of])))
        wanted = []
        for r, (_, w) in enumerate(every):
            of_rank = torch.cat([parts[e, r] for e in range(EXPERTS)])
            want = Rounded.apply(of_rank, plan.grad_output, True)
            want = want if drops else routes.combine(want, everyones[r][1], w)
            wanted.append(want + copies[r] * 3)
        dys = [
            laws.values(*want.shape, seed=r + 50, dtype=torch.bfloat16)
            for r, want in enumerate(wanted)
        ]
        torch.autograd.backward(wanted, dys)
        laws.assert_same_bytes(y, wanted[rank], f"{what} y")
        for name, mine, theirs in zip(("dx", "dweights"), given[rank], every[rank]):
            if mine.grad is not None:
                laws.assert_same_bytes(mine.grad, theirs.grad, f"{what} {name}")
        mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        for (key, p), q in zip(net.named_parameters(), reference.parameters()):
            laws.assert_same_bytes(p.grad.to_local(), q.grad[mine], f"{what} {key}.grad")


@pytest.mark.parametrize(
    "emulated", [False, pytest.param(True, marks=on_cpu)], ids=["", "emulated"]
)
def test_a_layer_sends_rowwise_codes_and_waits_once(emulated: bool):
    """If false, tokens travel in bf16 or once more, a layer waits for the device twice, or ranks
    without tokens, or with all of them, hang or train other experts than one process."""
    run_ranks(2, layers, emulated)


def ahead(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",))
    of_rank, begins = token_route.Rows.of_rank, fq.GroupedLinear.begin_ahead

    def steps(recipe: fq.Recipe, counts_of, begin_ahead) -> dict[str, list]:
        """Three layers in six passes: what they compute; weights quantized before the host knows
        the numbers of tokens, and in all, per pass; launches that pack tokens before a call begins;
        and by how much the step moved."""
        net, ran = spread(Experts(recipe), mesh), collections.defaultdict(list)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        writes, STEP.step = [], 0  # random bits are of the step

        def write(module, args):
            with torch.no_grad():
                for weight in writes:
                    weight.mul_(-2)

        net.gate.register_forward_pre_hook(write)

        def known(*args):
            ran["before"].append(gpu.count("linear_weight") - before)
            return of_rank(*args)

        def begin(*args):
            ran["packed"].append(gpu.count("pack_rows") - packed)
            return begin_ahead(*args)

        with (
            mock.patch.object(fq.GroupedLinear, "begin_ahead", begin),
            mock.patch.object(token_route.Rows, "of_rank", known),
        ):
            for i in range(6):
                before, step = gpu.count("linear_weight"), STEP.step
                packed = gpu.count("pack_rows")
                writes[:] = [net.up.weight] if i == 4 else []
                counts = counts_of(rank)
                x = tokens_of(rank + 100 * i, counts).requires_grad_()
                with torch.set_grad_enabled(i != 3):
                    y = net(x, counts)
                ran["y"].append(y.detach())
                if i != 3:
                    y.backward(tokens_of(rank + 100, counts))
                    ran["dx"].append(x.grad)
                if i != 1:  # micro-batches
                    optimizer.step()
                    optimizer.zero_grad()
                ran["in all"].append(gpu.count("linear_weight") - before)
                ran["steps"].append(STEP.step - step)
        ran["weights"] = [p.detach().to_local() for p in net.parameters()]
        return ran

    with hopper.emulated() as gpu:
        for recipe in (fq.recipes.mxfp8(), fq.recipes.nvfp4(), fq.recipes.fp8_delayed()):
            for number, counts_of in enumerate(COUNTS):
                got, want = (steps(recipe, counts_of, of) for of in (begins, lambda self, x: None))
                what = f"{recipe} {number}"
                for name in ("y", "dx", "weights"):
                    for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                        laws.assert_same_bytes(a, b, f"{what} {name} {i}")
                assert got["steps"] == want["steps"], (what, got["steps"], want["steps"])
                if number == 0:
                    packs = int(recipe == fq.recipes.mxfp8())  # values are gathered as rows
                    assert got["packed"] == [packs] * 18, (what, got["packed"])
                    every = want["in all"][0]
                    assert got["before"] == [0, *[every] * 5], (what, got)
                    assert got["in all"] == [every] * 4 + [every + every // 3, every], (what, got)


@on_cpu
def test_weights_are_quantized_while_the_host_waits_for_counts():
    """If false, a GPU waits for the host while it could pack or quantize; or experts multiply
    weights of before a write, a weight is quantized twice, or ranks without tokens are in another
    step."""
    run_ranks(2, ahead)


def mlps(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",))
    style = fq.parallel.ExpertParallel(gradients="auto")

    def steps(recipe: fq.Recipe, counts_of, is_observed: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        mlp = fq.GroupedMLP(EXPERTS, K, FFN, dtype=torch.bfloat16, recipe=recipe)
        mlp, results = parallelize_module(mlp, mesh, style), {}
        assert planned_dispatch(mlp, counts_of(rank)).keys() >= {("forward", "rowwise", codes)}
        if is_observed:
            mlp.down.register_forward_hook(lambda *args: None)
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.5)
        for i in range(3):
            ends = torch.tensor(counts_of(rank)).cumsum(0)
            x = tokens_of(rank + 100 * i, counts_of(rank)).requires_grad_()
            y = mlp(x, ends)
            y.backward(tokens_of(rank + 100, counts_of(rank)))
            results |= {f"y {i}": y.detach(), f"dx {i}": x.grad}
            optimizer.step()
            optimizer.zero_grad()
        return results | {n: p.detach().to_local() for n, p in mlp.named_parameters()}

    with hopper.emulated() as gpu:
        recipes = (fq.recipes.mxfp8(), "mxfp8"), (fq.recipes.fp8_block(), "fp8_1x128")
        for (recipe, codes), counts_of in itertools.product(recipes, COUNTS):
            want = steps(recipe, counts_of, True)
            assert gpu.count("swiglu") == gpu.count("swiglu_backward") == 0
            got = steps(recipe, counts_of, False)
            for name, tensor in want.items():
                laws.assert_same_bytes(got[name], tensor, f"{recipe} {name}")
            times = 3 * any(sum(counts_of(r)[rank * 4 : rank * 4 + 4]) for r in range(world))
            made = gpu.count("swiglu"), gpu.count("swiglu_backward")
            assert made == (times, times), (recipe, made, times)
            gpu.calls.clear()


@on_cpu
def test_experts_of_ranks_quantize_swiglu_as_they_compute_it():
    """If false, `fq.GroupedMLP` under `ExpertParallel` writes SwiGLU and its gradient, or has other
    bits than with SwiGLU written."""
    run_ranks(2, mlps)


def calls(rank: int, world: int) -> None:
    """The arguments of a module by place and by name, as without the style."""
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",))
    style = fq.parallel.ExpertParallel(reads="gate_up", writes="down")
    torch.manual_seed(0)
    alone = fq.GroupedMLP(EXPERTS, K, FFN, dtype=torch.bfloat16, recipe="mxfp8")
    mlp = parallelize_module(copy.deepcopy(alone), mesh, style)
    x, g = tokens_of(rank, [40]), torch.Generator().manual_seed(rank)
    for k in (1, 2):
        index = torch.rand(40, EXPERTS, generator=g).topk(k).indices
        (ends, ways), w = routes.sorted_by_expert(index, EXPERTS), torch.rand(40, k, generator=g)
        rows = x[routes.tokens_of(*ways)]
        for args, named in (
            ((rows, ends), {}),
            ((), {"x": rows, "splits": ends}),
            ((x, ends, ways), {}),
            ((x, ends), {"routes": ways}),
            ((x, ends, ways, w), {}),
            ((x, ends, ways), {"weights": w}),
            ((x,), {"splits": ends, "routes": ways, "weights": w}),
        ):
            what = f"{k} {[*map(type, args)]} {[*named]}"
            laws.assert_same_bytes(mlp(*args, **named), alone(*args, **named), what)
            (y, other) = mlp(*args, **named, meanwhile=lambda: 7)
            laws.assert_same_bytes(y, alone(*args, **named), what)
            assert other == 7
        wrong = w[:, 0] if rank else w
        with pytest.raises(ValueError, match=r"rank 1 cannot go on.*and weights \[T, k\]"):
            mlp(x, ends, ways, wrong)
        for wrong in (ways[0], ways[:1], (ways[0], ways[1].flatten()), ways[::-1]):
            with pytest.raises(ValueError, match=r"rank 1 cannot go on.*wanted order \[T \* k\]"):
                mlp(x, ends, wrong if rank else ways)


def test_experts_of_ranks_are_called_as_those_of_one_process():
    """If false, routes by place are not those of the tokens that travel, or a call has another
    meaning with the style than without it; or a rank waits for one whose routes are wrong."""
    run_ranks(2, calls)


class Adapted(Experts):
    """Experts of which an adapter alone trains."""

    def __init__(self, recipe: fq.Recipe):
        super().__init__(recipe)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(EXPERTS, FFN, 1, dtype=torch.bfloat16))

    def forward(self, x, splits):
        h = F.silu(self.gate(x, splits)) * self.up(x, splits)
        return self.down(h * self.scale.to_local().sum(), splits)


class Merged(Experts):
    """Experts that multiply another weight than they hold."""

    def forward(self, x, splits):
        weight = {"weight": -2 * self.up.weight.to_local()}
        up = torch.func.functional_call(self.up, weight, (x, splits))
        return self.down(F.silu(self.gate(x, splits)) * up, splits)


class Recomputed(Experts):
    """Experts that a checkpoint within them runs again."""

    def forward(self, x, splits):
        def hidden(x):
            return F.silu(self.gate(x, splits)) * self.up(x, splits)

        return self.down(checkpoint(hidden, x, use_reentrant=False), splits)


class Placed(Experts):
    """Experts whose tokens have other places in the batch than the module's."""

    def forward(self, x, splits):
        with fq.token_offset(1000):
            return super().forward(x, splits)


class Thawed(Experts):
    """Experts that a forward freezes, or trains again."""

    is_frozen = True

    def forward(self, x, splits):
        self.is_frozen = not self.is_frozen
        self.up.requires_grad_(not self.is_frozen)
        return super().forward(x, splits)


def begun_elsewhere(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (1, world), mesh_dim_names=("dp", "ep"))

    def gathered(net: Experts, each: bool) -> Experts:
        for module in (net.gate, net.up, net.down) if each else [net]:
            reshards = type(net) is Recomputed
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshards)
        return net

    def steps(case: str, recipe: fq.Recipe) -> list[tuple]:
        STEP.step = 0  # random bits are of the step
        with torch.inference_mode(case == "inference tensors"):
            kinds = {"adapter": Adapted, "merged": Merged, "placed": Placed, "thawed": Thawed}
            kinds["gathered recomputed"] = Recomputed
            net, results = spread(kinds.get(case, Experts)(recipe), mesh["ep"]), []
        if case.startswith("gathered"):
            net = gathered(net, "each" in case)
        if case == "shared amaxes":
            fq.share_amaxes(net)
        infers, optimizer = "infer" in case, torch.optim.SGD(net.parameters(), lr=2**-20)
        trained, shown = [p for p in net.parameters() if p.requires_grad], []
        for i in range(5):
            counts = COUNTS[2 if case == "shared amaxes" else 0](rank)
            if case == "raises" and i == 2:
                empty = COUNTS[2](rank)
                with pytest.raises(ValueError, match="add up"):
                    net(tokens_of(rank, empty), [n + 1 for n in empty] if rank else empty)
            x = (tokens_of(rank, counts) * 2**i).requires_grad_(case != "adapter")
            if infers or (case == "gathered each" and i % 2):
                with torch.inference_mode(infers), torch.no_grad():
                    results.append(net(x.detach(), counts).clone())
                continue
            y = net(x, counts)
            y.backward(tokens_of(rank + 100, counts))
            results += [
                y.detach(),
                x.grad,
                *(p.grad.to_local().clone() for p in trained if p.grad is not None),
            ]
            if case != "merged":  # a weight that nobody wrote has the version of a new one
                optimizer.step()
            optimizer.zero_grad()
            shown.append(STEP.step)
        results += [torch.tensor(step - shown[0]) for step in shown]
        return [t for t in results if t is not None]

    cases = "gathered each", "gathered infer", "gathered each infer", "gathered recomputed"
    cases += "inference tensors", "adapter", "merged", "raises", "placed", "thawed", "shared amaxes"
    with hopper.emulated():
        for case in cases:
            recipes = (
                fq.recipes.nvfp4() if case == "placed" else fq.recipes.mxfp8(),
                fq.recipes.fp8_delayed(),
            )
            for recipe in recipes:
                got = steps(case, recipe)
                with mock.patch.object(fq.GroupedLinear, "begin_ahead", lambda self, x: None):
                    want = steps(case, recipe)
                for i, (a, b) in enumerate(zip(got, want, strict=True)):
                    laws.assert_same_bytes(a, b, f"{case} {recipe} {i}")


@on_cpu
def test_calls_that_begin_ahead_are_those_that_follow():
    """If false, experts that FSDP2 gathers one by one do not train, nor infer inference tensors,
    nor are recomputed; layers count no step of a pass, or one of a call that raised; multiply
    another weight, or draw random bits of other tokens; or ranks without tokens wait for ever for
    shared amaxes."""
    run_ranks(2, begun_elsewhere)


def held_until_the_backward(rank: int, world: int) -> None:
    mesh, counts = init_device_mesh(DEVICE, (world,)), COUNTS[0](rank)
    with hopper.emulated(), mock.patch.object(grouped, "stacked_weight") as encoder:
        encoded = []

        def encode(*args):
            stacks = stacked_weight(*args)
            encoded.extend((d, weakref.ref(stack.buffers[0])) for d, stack in stacks.items())
            return stacks

        encoder.side_effect = encode
        for trains in (True, False):
            net = spread(Experts(fq.recipes.mxfp8()), mesh)
            for i in range(3):
                encoded.clear()
                tokens = 1 * tokens_of(rank, counts).requires_grad_(trains)
                reference = weakref.ref(tokens)
                y = net(tokens, counts)
                del tokens
                encoder.reset_mock()  # of its arguments
                assert reference() is None, f"tokens of {i}"
                assert len(encoded) == (6 if trains else 4), encoded
                held = [d for d, buffer in encoded if buffer() is not None]
                assert held == [COLUMNWISE] * (3 if trains else 1), (trains, i, held)
                y.sum().backward()


def held_behind_the_backward(rank: int, world: int) -> None:
    """A checkpoint stops to run the module again after its last saved tensor; a forward raises."""
    net = spread(Experts(fq.recipes.mxfp8()), init_device_mesh(DEVICE, (world,)))
    counts, results = COUNTS[0](rank), []

    def shared() -> torch.Tensor:
        results.append(2 * x)
        references.append(weakref.ref(results[-1]))
        return results.pop()

    def block(x):
        return torch.cat(net(x, counts, meanwhile=shared))

    for raises in (False, True):
        x, references = tokens_of(rank, counts).requires_grad_(), []
        with mock.patch.object(net.down, "forward", None) if raises else contextlib.nullcontext():
            with pytest.raises(TypeError) if raises else contextlib.nullcontext():
                checkpoint(block, x, use_reentrant=False).sum().backward()
        assert len(references) == 2 - raises
        assert [r() is not None for r in references] == [False] * len(references), raises


def test_a_module_keeps_nothing_of_a_forward_that_did_not_end():
    """If false, what shared experts save lives from a recomputation to the next forward, as if no
    checkpoint were there; or from a forward that ran out of memory."""
    run_ranks(2, held_behind_the_backward)


@on_cpu
def test_a_route_keeps_no_tokens_and_a_layer_no_codes_that_no_backward_reads():
    """If false, tokens, or codes of weights, stay in memory from a forward to its backward."""
    run_ranks(2, held_until_the_backward)


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_1x128"])
def test_values_of_rowwise_codes_are_rounded_once(fmt: str):
    """If false, experts that are given the values of rowwise codes multiply values that were
    rounded twice: more than half of what subnormal codes are apart."""
    g = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(256, 256, generator=g, device="cpu").to(DEVICE, torch.bfloat16)
    given = Quantizer(fmt).quantize(x).rowwise.dequantize()
    again = Quantizer(fmt).quantize(given)
    laws.assert_same_bytes(again.rowwise.dequantize(), given, "rowwise")
    scale = again.columnwise.scales
    scale = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale
    scale = scale.repeat_interleave(len(x) // len(scale), 0)
    error, given = (again.columnwise.dequantize() - given).float().abs(), given.float().abs()
    is_normal = given >= 2**-6 * scale
    assert is_normal.float().mean() > 0.9 and not error[is_normal].any()
    assert (error <= 2**-10 * scale).all()


# Beside FSDP2 #


class Net(nn.Module):
    def __init__(self, recipe: fq.Recipe):
        super().__init__()
        torch.manual_seed(1)
        self.up = fq.Linear(K, K, recipe=recipe, name="up")
        self.experts = Experts(recipe, dtype=torch.float32)
        self.head = nn.Linear(K, 8)

    def forward(self, x, counts):
        return self.head(x + self.experts(torch.relu(self.up(x)), counts))


def two_meshes(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone = init_device_mesh(DEVICE, (world,), mesh_dim_names=("all",))
    counts = [COUNTS[0](r) for r in range(world)]
    x = [tokens_of(r % 2, counts[r]).float() for r in range(world)]
    for i, (name, order) in enumerate((("fp8_current", "convert"), ("dequantized", "style"))):
        recipe, options, *_ = RECIPES[name]
        reference, net = Net(recipe), Net(recipe)
        if order == "style":  # experts of a user's class, converted when they are sharded
            for key in ("gate", "up", "down"):
                plain = nn.Module()
                plain.weight = nn.Parameter(
                    getattr(net.experts, key).state_dict()["weight"].clone()
                )
                setattr(net.experts, key, plain)
        spread(net.experts, mesh["ep"], **options)
        fully_shard(net.experts, mesh=mesh["efsdp"])
        # its gradients are sums over two ranks already
        net.experts.set_gradient_divide_factor(world)
        net.experts.set_force_sum_reduction_for_comms(True)  # gloo scales no summands
        fully_shard(net, mesh=everyone)
        if order == "style":
            fq.convert(net.experts, recipe, grouped=["gate", "up", "down"])
        optimizers = [torch.optim.SGD(n.parameters(), lr=0.5) for n in (reference, net)]
        with fq.token_offset(0):
            y = net(x[rank], counts[rank])
            y.square().sum().backward()
        total = 0
        for ranks in ((0, 1), (2, 3)):  # that send each other tokens
            h = [torch.relu(reference.up(x[r])) for r in ranks]
            pieces = [t.split(counts[r]) for t, r in zip(h, ranks)]
            sizes = [sum(len(of[e]) for of in pieces) for e in range(EXPERTS)]
            z = reference.experts(
                torch.cat([of[e] for e in range(EXPERTS) for of in pieces]), sizes
            )
            back = iter(z.split([len(of[e]) for e in range(EXPERTS) for of in pieces]))
            came = [[next(back) for _ in ranks] for e in range(EXPERTS)]
            for j, r in enumerate(ranks):
                want = reference.head(x[r] + torch.cat([of[j] for of in came]))
                total = total + want.square().sum() / world
                if r == rank:
                    laws.assert_same_bytes(y, want, f"{name} y")
        total.backward()
        state = net.state_dict()
        for (key, p), q in zip(net.named_parameters(), reference.parameters()):
            got, want = p.grad.full_tensor(), q.grad
            if key.startswith("experts"):
                laws.assert_same_bytes(got, want, f"{name} {key}.grad")  # sums of two
            else:  # of four fp32 gradients in another order: 4 * 2^-24 of the largest summand
                torch.testing.assert_close(
                    got, want, rtol=0, atol=4 * 2**-24 * float(want.abs().max()) * 4
                )
            assert type(state[key].to_local()) is torch.Tensor and state[key].shape == q.shape, key
        for optimizer in optimizers:
            optimizer.step()
        # The same experts on a mesh of another shape, from files, and their codes.
        for key in ("gate", "up", "down"):
            fully = getattr(net.experts, key).state_dict()["weight"].full_tensor()
            laws.assert_same_bytes(
                fully, getattr(reference.experts, key).weight.detach(), f"{name} {key} after a step"
            )
        dcp.save({"experts": net.experts.state_dict()}, checkpoint_id=f"{folder}/{i}")
        other = spread(Experts(recipe, dtype=torch.float32), everyone, **options)
        alone = Experts(recipe, dtype=torch.float32)
        for to in (other, alone):
            with torch.no_grad():
                for p in to.parameters():
                    p.zero_()
            loaded = {"experts": to.state_dict()}
            dcp.load(loaded, checkpoint_id=f"{folder}/{i}")
            to.load_state_dict(loaded["experts"])
            fq.load_state_dict(to, fq.state_dict(net.experts))  # raises where codes differ
        with torch.no_grad():
            results = [m(x[rank], counts[rank]) for m in (net.experts, other, alone)]
        for got in results[
            : 0 if name == "fp8_current" else 2
        ]:  # else codes do not depend on what other ranks send
            # Products of other numbers of rows add up K fp32 products in another order.
            assert float((got - results[2]).norm() / results[2].norm()) < K * 2**-24, (
                f"{name} after a step, or loaded"
            )


def test_experts_shard_over_their_own_mesh(tmp_path):
    """Otherwise experts under FSDP2 get other gradients than one process computes, or checkpoints
    fit one layout of ranks."""
    run_ranks(4, two_meshes, str(tmp_path))


class Plain(Experts):
    """SwiGLU experts between dense layers, before `fq.convert`."""

    def __init__(self):
        super().__init__(fq.recipes.identity())
        for key in ("gate", "up", "down"):
            layer, weight = nn.Module(), getattr(self, key).state_dict()["weight"]
            layer.weight = nn.Parameter(weight.clone())
            setattr(self, key, layer)


def converted_before(rank: int, world: int) -> None:
    mesh, counts = init_device_mesh(DEVICE, (world,)), COUNTS[0](rank)
    recipe, results = fq.recipes.nvfp4(), []
    alone = fq.Linear(64, 64, recipe=recipe)
    for _ in range(3):  # layers without a model are in another step
        alone(torch.ones(2, 64)).sum().backward()
    for converts_first in (True, False):
        torch.manual_seed(2)
        net = nn.ModuleList([nn.Linear(K, K, dtype=torch.bfloat16), Plain()])
        net.forward = lambda x, net=net: net[1](net[0](x), counts)
        if not converts_first:
            spread(net[1], mesh)
        fq.convert(net, recipe, grouped=["1.gate", "1.up", "1.down"])
        if converts_first:
            net[1].down.delay_wgrad_compute = True
            spread(net[1], mesh)
        net[1].down.delay_wgrad_compute |= not converts_first
        for i in range(3):
            x = tokens_of(rank + 10 * i, counts).requires_grad_()
            y = net(x)
            y.backward(tokens_of(rank + 100, counts))
            grad = net[1].down.weight.grad
            assert i or grad is None or not grad.to_local().any()  # torch 2.11: zeros
            fq.steps.backward_dw(net)
            results += [y.detach(), x.grad]
            assert STEP.step == i == fq.state_dict(net)["step"] - 1, (STEP.step, i)
        results += [torch_compat.local_of(p.grad) for p in net.parameters()]
    half = len(results) // 2
    for i, (a, b) in enumerate(zip(results[:half], results[half:], strict=True)):
        laws.assert_same_bytes(a, b, f"{i} of {half}")


def test_experts_that_were_converted_before_are_as_those_converted_after():
    """If false, experts leave the steps of their model, whose random bits change and are not those
    of a resumed run; or options that were set before are lost."""
    run_ranks(2, converted_before)


# Refusals #


def changes(rank: int, world: int) -> None:
    """Each takes effect in the next call, and back again."""
    mesh, counts = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",)), COUNTS[0](rank)
    mxfp8, current = fq.recipes.mxfp8(), fq.recipes.fp8_current()
    net, x = spread(Experts(mxfp8), mesh), tokens_of(rank, counts)

    def sent() -> set[str]:
        fq.reset_receipt()
        with torch.no_grad():
            net(x, counts)
        return {fmt for _, direction, fmt in fq.receipt().dispatch if direction != "sum"}

    for _ in range(2):
        fq.set_recipe(net, mxfp8)
        assert sent() == {"mxfp8"}
        with fq.autocast(current):
            assert sent() == {"high precision"}
        assert sent() == {"mxfp8"}
        fq.set_recipe(net, current)
        assert sent() == {"high precision"}
    gate, net.gate = net.gate, nn.Module()  # of no codes
    assert "names no converted experts" in str(net.expert_dispatch.travel("input", x.dtype))
    net.gate = gate
    fq.set_recipe(net, mxfp8)
    assert sent() == {"mxfp8"}


def test_tokens_travel_by_the_recipe_of_the_call():
    """If false, how tokens travel is decided once: ranks send codes of a recipe that experts have
    no more, or high precision for ever."""
    run_ranks(2, changes)


def refusals(rank: int, world: int) -> None:
    """Each on every rank, and the next call works."""
    mesh, counts = init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",)), COUNTS[0](rank)
    x = tokens_of(rank, counts)
    mxfp8 = fq.recipes.mxfp8()
    net = spread(Experts(mxfp8), mesh)
    for wrong in (
        counts[:-1],
        [counts[0] + 1, *counts[1:]],
        [-1, counts[0] + counts[1] + 1, *counts[2:]],
        [0.5] * EXPERTS,
    ):
        mine = wrong if rank == 1 else counts
        for splits in (mine, torch.tensor(mine).cumsum(0)):
            with pytest.raises(
                ValueError,
                match="(?s)rank 1 cannot go on, so no rank does: .* are not of 8 experts, "
                "or do not add up to its rows",
            ):
                net(x, splits)
    with pytest.raises(
        ValueError,
        match="send each other different tokens: dispatch_tokens is of 8 experts, 48 columns, "
        "torch.float32",
    ):
        dispatch_tokens(x if rank else x.float(), counts, mesh.get_group())
    with pytest.raises(ValueError, match="7 experts over 2 ranks, which do not divide them"):
        dispatch_tokens(x, [*counts[:6], counts[6] + counts[7]], mesh.get_group())
    with pytest.raises(
        ValueError, match="a scale of rowwise fp8_tensor.* serves several tokens; take a format"
    ):
        dispatch_tokens(x, counts, mesh.get_group(), "fp8_tensor", transport="codes")
    with pytest.raises(ValueError, match="transport='codes', and there is no quantizer"):
        dispatch_tokens(x, counts, mesh.get_group(), transport="codes")
    with pytest.raises(ValueError, match="transports are auto, codes, high_precision, got .fp8."):
        dispatch_tokens(x, counts, mesh.get_group(), "mxfp8", transport="fp8")
    with pytest.raises(ValueError, match=r"y is \[1, 48\]; wanted the .* rows of its route"):
        combine_tokens(x[:1], dispatch_tokens(x, counts, mesh.get_group())[1])
    order = torch.arange(2 * len(x)).view(2, -1)[:, : len(x) if rank else -1]
    with pytest.raises(
        ValueError, match=r"rank 0 cannot go on.* wanted order \[T \* k\] and back \[T, k\]"
    ):
        net(x, [2 * n for n in counts], routes=(order.flatten(), order.T))
    with pytest.raises(ValueError, match=r"weights= of no routes; give routes=\(order, back\) too"):
        net(x, counts, weights=torch.ones(len(x), 2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="CUDA graph"):
        patch.setattr(torch_compat, "is_captured", lambda x: True)
        net(x, counts)
    with pytest.raises(ValueError, match=r"got 1 positional arguments"):
        net(x)
    grads = torch.autograd.grad(
        net(x, counts).float().square().sum(), [*net.parameters()], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no second derivative"):
        sum(grad.to_local().float().square().sum() for grad in grads).backward()
    laws.assert_same_bytes(
        net(x, counts), spread(Experts(mxfp8), mesh)(x, counts), "after refusals"
    )

    def refused(match: str, recipe=mxfp8, bias: bool = False, **options) -> None:
        with pytest.raises(ValueError, match=match):
            spread(Experts(recipe, bias), mesh, **options)(x, counts)

    refused(
        "input would be dispatched in high precision .values of rowwise fp8_row.* are not exact in "
        "torch.bfloat16., and it was asked to travel as codes; take a format whose scales serve",
        fq.recipes.fp8_row(),
        transport="codes",
    )
    refused(
        "grad_output would be .*is rounded stochastically", fq.recipes.nvfp4(), gradients="codes"
    )
    refused("input would be .*serves several tokens", fq.recipes.fp8_delayed(), transport="codes")
    refused("gradients must be one of auto, codes, high_precision, got 'bf16'", gradients="bf16")
    with pytest.raises(ValueError, match="input would be .*and require_native=True"):
        strict = spread(Experts(fq.recipes.fp8_current()), mesh)
        for layer in (strict.gate, strict.up):
            for one in layer.layers:
                one.runtime.recipe = replace(one.recipe, require_native=True)
        strict(x, counts)
    style = fq.parallel.ExpertParallel()
    with pytest.raises(ValueError, match="needs a mesh of one axis, got 2"):
        style._apply(
            Experts(mxfp8), init_device_mesh(DEVICE, (1, world), mesh_dim_names=("dp", "ep"))
        )
    with pytest.raises(ValueError, match="weight is a DTensor.*before fully_shard"):
        parallelize_module(net.gate, mesh, style)
    with pytest.raises(ValueError, match=r"weight is of shape \[3, 8, 48\]"):
        parallelize_module(fq.GroupedLinear(3, K, 8, False, packed=True), mesh, style)
    with pytest.raises(
        ValueError, match=r"between 0 experts.*experts.0.weight is of shape \[8, 48\]"
    ):
        parallelize_module(fq.GroupedLinear(2, K, 8, packed=False), mesh, style)
    # One layer alone, quantized gradients that a module's own operation meets, copies, modules
    # without names.
    alone = parallelize_module(
        fq.GroupedLinear(8, K, 16, False, packed=True, recipe=fq.recipes.fp8_current()), mesh, style
    )
    laws.assert_same_bytes(
        copy.deepcopy(alone)(x.float(), counts), alone(x.float(), counts), "a copy"
    )
    assert "rowwise fp8_tensor" in str(fq.plan(alone)), fq.plan(alone)
    silent = parallelize_module(Experts(fq.recipes.fp8_current()), mesh, style)
    assert "reads=[] names no converted experts" in str(fq.plan(silent)), fq.plan(silent)
    laws.assert_same_bytes(
        silent(x, counts),
        spread(Experts(fq.recipes.fp8_current()), mesh)(x, counts),
        "in high precision",
    )


def shared_amaxes(rank: int, world: int) -> None:
    """Of a dense layer all ranks have one history, of an expert the rank that holds it; nothing
    tells them apart but names."""
    mesh, recipe = (
        init_device_mesh(DEVICE, (world,), mesh_dim_names=("ep",)),
        fq.recipes.fp8_delayed(),
    )
    x, counts = tokens_of(rank, COUNTS[0](rank)).float(), COUNTS[0](rank)

    def trained(shares: bool) -> dict[str, torch.Tensor]:
        net = Net(recipe)
        spread(net.experts, mesh)
        # by its own name that of this rank
        net.own = fq.Linear(8, 16, recipe=recipe, name=f"own.{rank}")
        if shares:
            fq.share_amaxes(net)
        net.own(net(x, counts)).square().sum().backward()
        if shares:
            net.late = fq.Linear(8, 16, recipe=recipe, name="late")
            with pytest.raises(
                ValueError, match=r"^late: converted after fq.share_amaxes\(model\); call it again"
            ):
                net(x, counts)
            fq.share_amaxes(net)
        net(x, counts)  # another step begins, and with it what the last one recorded is shared
        return {
            k: h["amaxes"][1:2]
            for k, h in fq.state_dict(net)["histories"].items()
            if "weight" not in k and "late" not in k
        }

    own, shared = trained(False), trained(True)
    assert any("experts.gate.7" in key for key in own) == (rank == world - 1)
    for key, amaxes in shared.items():
        want = own[key].clone()
        if key.startswith("up."):
            dist.all_reduce(want, op=dist.ReduceOp.MAX)
            assert not torch.equal(want, own[key]) or rank == world - 1
        laws.assert_same_bytes(amaxes, want, key)


def test_shared_amaxes_are_paired_by_name():
    """Otherwise an expert is scaled as another one is, which some other rank holds in its place."""
    run_ranks(2, shared_amaxes)


def test_wrong_input_is_refused_on_every_rank():
    """Otherwise one rank raises and the others wait for it, or something else runs than was
    asked."""
    run_ranks(2, refusals)

# SPDX-License-Identifier: Apache-2.0
"""`fq.GroupedLinear`: experts over sorted tokens, one after the other or in one product, packed or
each with its own."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import types
import weakref
from dataclasses import replace
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import kinds, laws
from dist_tests.laws import assert_same_bytes, kept_step, recorded_saves, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import Direction, round_up
from fsdp_quant.linear import bad_splits, grouped_ops, stacked_weights
from fsdp_quant.linear.plan import PRODUCTS, GemmPlan
from fsdp_quant.models.packed_experts import ExpertProduct
from fsdp_quant.ops import native
from fsdp_quant.ops.product_error import PROBED_STEPS
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.scaling import DelayedScaling

EXPERTS, K, N = 4, 24, 40
SPLITS = {
    "none first": [0, 7, 33, 8],
    "none in the middle": [17, 0, 0, 31],
    "no tokens": [0, 0, 0, 0],
    "none last": [1, 35, 0, 0],
}


def rounds_all_but_weights(role):
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("mxfp8", rounding="stochastic")


def doubled(role):
    """Columns are quantized from the decoded rows."""
    return fq.HybridQuantizer("mxfp8", "fp8_row", "rowwise_dequantized")


RECIPES = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_delayed": recipes.fp8_delayed(length=4),
    "fp8_row": recipes.fp8_row(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "rounded": fq.CustomRecipe(rounds_all_but_weights),
    "dequantized": recipes.mxfp8(backward_override="dequantized"),
    "high_precision": recipes.nvfp4(backward_override="high_precision"),
}


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, counted by optimizer steps, with empty counters."""
    with kept_step():
        restart()
        counters.reset()
        yield
    bad_splits.poll_bad_splits()


def restart() -> None:
    STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 0, 0, 0, False
    STEP.publish()


def grouped(
    recipe: fq.Recipe, packed: bool, bias: bool = True, dtype=torch.float32, sizes=(K, N)
) -> fq.GroupedLinear:
    """A layer called "moe", with weights that depend on the expert."""
    module = fq.GroupedLinear(
        EXPERTS, *sizes, bias, dtype=dtype, packed=packed, recipe=recipe, name="moe"
    )
    weights, biases = parameters(sizes, dtype)
    with torch.no_grad():
        for e in range(EXPERTS):
            (module.weight[e] if packed else module.experts[e].weight).copy_(weights[e])
            if bias:
                (module.bias[e] if packed else module.experts[e].bias).copy_(biases[e])
    return module


def parameters(sizes=(K, N), dtype=torch.float32) -> tuple[Tensor, Tensor]:
    k, n = sizes
    return values(EXPERTS, n, k, seed=11, dtype=dtype) * 0.2, values(
        EXPERTS, n, seed=12, dtype=dtype
    )


def loop(
    recipe: fq.Recipe, packed: bool, bias: bool = True, dtype=torch.float32, sizes=(K, N)
) -> nn.ModuleList:
    """The same experts as modules of their own, under the names that key their random bits."""
    weights, biases = parameters(sizes, dtype)
    made = nn.ModuleList()
    for e in range(EXPERTS):
        name = f"moe.{e}" if packed else f"moe.experts.{e}"
        made.append(fq.Linear(*sizes, bias, dtype=dtype, recipe=recipe, name=name))
        # exponents of lines, as where tokens of others are beside
        made[e].runtime.plan = replace(made[e].plan, alone=False)
        with torch.no_grad():
            made[e].weight.copy_(weights[e])
            if bias:
                made[e].bias.copy_(biases[e])
    return made


def of_loop(experts: nn.ModuleList, x: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([expert(part) for expert, part in zip(experts, x.split(sizes))])


def by_expert(module: nn.Module, packed: bool, of=lambda p: p.detach()) -> dict[str, Tensor]:
    """ "weight" and "bias" of all experts, [E, ..]."""
    if packed:
        return {n: of(p).clone() for n, p in module.named_parameters()}
    experts = module.experts if isinstance(module, fq.GroupedLinear) else module
    names = [n for n, _ in experts[0].named_parameters()]
    return {n: torch.stack([of(e.get_parameter(n)).clone() for e in experts]) for n in names}


def trained(
    module: nn.Module, packed: bool, batches: list[list[int]], call
) -> list[dict[str, Tensor]]:
    """Output, gradients and weights of an AdamW step a batch."""
    restart()
    optimizer, seen = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for i, sizes in enumerate(batches):
        x = values(sum(sizes), K, seed=i, dtype=torch.float32).requires_grad_()
        y = call(module, x, sizes)
        y.backward(values(*y.shape, seed=50 + i, dtype=torch.float32))
        seen.append({"y": y.detach(), "dx": x.grad})
        seen[-1] |= {f"d {n}": g for n, g in by_expert(module, packed, lambda p: p.grad).items()}
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] |= by_expert(module, packed)
    return seen


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what} {name}")


# A loop over experts #


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("name", [*RECIPES, "doubled"])
def test_grouped_linear_equals_a_loop_over_experts(name: str, packed: bool):
    """If false, an expert multiplies tokens, scales, histories or random bits of another; also
    where it has no tokens."""
    batches, bias = list(SPLITS.values()), name not in ("fp8_row", "mxfp8_nvfp4")
    recipe = fq.CustomRecipe(doubled) if name == "doubled" else RECIPES[name]
    want = trained(loop(recipe, packed, bias), False, batches, of_loop)
    got = trained(grouped(recipe, packed, bias), packed, batches, lambda m, x, sizes: m(x, sizes))
    for splits, a, b in zip(SPLITS, got, want):
        assert_same(a, b, f"{name}, {splits}")


def test_splits_are_counts_or_ends():
    """If false, what a router made on the device means other tokens than the same numbers on the
    host."""
    module, x = grouped(recipes.mxfp8(), False), values(48, K, dtype=torch.float32)
    want = module(x, [7, 0, 33, 8])
    for dtype in (torch.int32, torch.int64):
        assert_same_bytes(module(x, torch.tensor([7, 7, 40, 48], dtype=dtype)), want, f"{dtype}")
    assert_same_bytes(module(x.view(2, 24, K), (7, 0, 33, 8)).flatten(0, 1), want, "a 3-D input")


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_copies_and_checkpoints_of_grouped_linear_go_on_alike(packed: bool):
    """If false, a module that was copied, pickled or loaded trains on stale codes or lost
    histories."""
    x, sizes, recipe = (
        values(48, K, dtype=torch.float32),
        [7, 0, 33, 8],
        recipes.fp8_delayed(length=4),
    )
    module = grouped(recipe, packed)
    trained(module, packed, [sizes] * 2, lambda m, x, s: m(x, s))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    fresh = fq.GroupedLinear(EXPERTS, K, N, packed=packed, recipe=recipe, name="moe")
    assert all(type(t) is Tensor for t in module.state_dict().values())
    fresh.load_state_dict(module.state_dict(), strict=True)
    fq.load_state_dict(fresh, fq.state_dict(module))
    assert fq.state_dict(module)["histories"], "delayed scaling keeps histories"
    fq.begin_step(2)
    others = {
        "a copy": copy.deepcopy(module),
        "pickled": torch.load(file, weights_only=False),
        "loaded": fresh,
    }
    want = module(x, sizes)
    for what, other in others.items():
        assert_same_bytes(other(x, sizes), want, what)
        with torch.no_grad():
            next(other.parameters()).mul_(2.0)
        assert not torch.equal(other(x, sizes), want), what
    assert_same_bytes(module(x, sizes), want, "the original")


def test_a_written_weight_is_multiplied_as_written():
    """If false, an optimizer or a load changes packed weights, and experts multiply the old
    codes."""
    for packed in (False, True):
        module, x = grouped(recipes.mxfp8(), packed), values(8, K, dtype=torch.float32)
        given = x.requires_grad_()
        (want,) = torch.autograd.grad(module(given, [2, 2, 2, 2]).sum(), given)
        y = module(given, [2, 2, 2, 2])
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(2.0)
        assert_same_bytes(module(x, [2, 2, 2, 2]), 2 * y, "doubled")
        assert_same_bytes(
            torch.autograd.grad(y.sum(), given)[0], want, "the gradient of the forward as it was"
        )
        for p in module.parameters():
            p.data.mul_(0.5)  # no version tells
        assert_same_bytes(module(x, [2, 2, 2, 2]), y, "halved")


# Conversion, recipes #


class Routed(nn.Module):
    """Experts as models with `torch._grouped_mm` hold them, in front of a linear layer."""

    def __init__(self):
        super().__init__()
        self.experts, self.out = nn.Module(), nn.Linear(N, 8)
        self.experts.weight = nn.Parameter(parameters()[0])

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self.out(self.experts(x, sizes))


def test_packed_experts_without_a_bias_may_say_so():
    """If false, experts with `bias = None` are refused, without a name, and the model is left half
    converted."""
    experts = nn.Module()
    experts.weight, experts.bias = nn.Parameter(torch.ones(EXPERTS, N, K)), None
    model = fq.convert(nn.ModuleDict({"moe": experts}), recipes.mxfp8(), grouped="moe")
    assert model.moe(values(4, K, dtype=torch.float32), [4, 0, 0, 0]).shape == (4, N)
    experts = nn.Module()
    experts.weight, experts.bias = nn.Parameter(torch.ones(EXPERTS, N, K)), torch.ones(EXPERTS, N)
    with pytest.raises(ValueError, match="grouped .*'moe' matches no layer"):
        fq.convert(nn.ModuleDict({"moe": experts}), recipes.mxfp8(), grouped="moe")


def test_packed_experts_of_transformers_are_converted_before_they_are_sharded():
    """If false, most of a model silently stays in high precision."""
    pytest.importorskip("transformers")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(kinds.PLAIN["mixtral"](), nn.Linear(64, 64))
        fully_shard(model)
        with pytest.raises(
            ValueError,
            match="0.experts are packed experts .*fq.convert before fully_shard.*skip=",
        ):
            fq.convert(model, recipes.mxfp8())
        fq.convert(model, recipes.mxfp8(), skip=["experts"])
        assert isinstance(model[1], fq.Linear)
    finally:
        dist.destroy_process_group()


def test_layers_of_experts_hold_no_memory():
    """If false, the whole weight stays in memory beside the shard that fully_shard puts in its
    place."""
    memory = numpy.zeros((EXPERTS, N, K), dtype=numpy.float32)
    lives, experts = weakref.ref(memory), nn.Module()
    experts.weight = nn.Parameter(torch.from_numpy(memory))
    del memory
    model = fq.convert(nn.ModuleDict({"moe": experts}), recipes.mxfp8(), grouped="moe")
    model.moe(values(4, K, dtype=torch.float32), [4, 0, 0, 0]).sum().backward()
    fq.plan(model)
    model.moe.weight = nn.Parameter(torch.ones(EXPERTS, N, K))
    assert lives() is None
    assert [layer.weight.mean().item() for layer in model.moe.layers] == [1.0] * EXPERTS


def test_packed_experts_are_converted_on_request():
    """If false, 3-D experts silently stay in high precision, change their names, or tie a rule to
    the wrong layer."""
    model = fq.convert(Routed(), recipes.mxfp8())
    assert type(model.experts) is nn.Module
    model = fq.convert(Routed(), recipes.mxfp8(), grouped="experts")
    assert type(model.experts) is fq.GroupedLinear
    assert list(model.state_dict()) == ["experts.weight", "out.weight", "out.bias"]
    x, sizes = values(12, K, dtype=torch.float32), [3, 0, 4, 5]
    want = of_loop(loop(recipes.mxfp8(), True, bias=False), x, sizes)
    assert_same_bytes(model.experts(x, sizes), want, "converted")
    with pytest.raises(
        ValueError, match="grouped .*: 'w9' matches no layer; the model has experts"
    ):
        fq.convert(Routed(), recipes.mxfp8(), grouped=["w9"])
    # of two layers, whatever the experts
    kept = fq.convert(Routed(), recipes.mxfp8(tail=0.5), grouped="experts")
    assert {m.recipe.name for m in kept.experts.layers} == {"mxfp8"}
    assert kept.out.recipe == recipes.identity()


def _mutate_type(x: Tensor) -> None:
    _state.types = (*_state.types, x.shape)  # noqa: F821


spmd = types.ModuleType("spmd_types")  # annotates tensors
spmd._state = types.SimpleNamespace(types=())
spmd.mutate_type = types.FunctionType(_mutate_type.__code__, vars(spmd))


class OfTorchtitan(nn.Module):
    """Routed experts as torchtitan's models hold them."""

    gate = staticmethod(torch.nn.functional.silu)

    def __init__(self, suffixed: bool = False, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        names = ("w1_EFD", "w2_EDF", "w3_EFD") if suffixed else ("w1", "w2", "w3")
        for name, shape in zip(names, ((EXPERTS, 32, K), (EXPERTS, K, 32), (EXPERTS, 32, K))):
            self.register_parameter(name, nn.Parameter((torch.randn(shape) / 4).to(dtype)))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).tolist()
        spmd.mutate_type(counts)
        w1, w2, w3 = (p.bfloat16() for p in self._parameters.values())
        made = []
        for e, part in enumerate(rows.bfloat16().tensor_split(ends[:-1])):
            hidden = self.gate(part @ w1[e].mT) * (part @ w3[e].mT)
            made.append(hidden @ w2[e].mT)
        return torch.cat(made).type_as(rows)


class OfAnother(OfTorchtitan):
    gate = staticmethod(torch.tanh)


class OfSomeone(OfTorchtitan):
    """Experts of someone's own, whose limit no small number reaches."""

    limit: float | None = None
    scale = 1.0

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        made = []
        for e, part in enumerate(rows.split(counts.tolist())):
            gate, up = part @ self.w1[e].mT, part @ self.w3[e].mT
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            made.append(torch.nn.functional.silu(gate) * up @ self.w2[e].mT * self.scale)
        return torch.cat(made)


@pytest.mark.parametrize("settings", [{"limit": 7.0}, {"limit": 1000.0}, {"scale": 1.015}])
def test_experts_are_proven_by_their_operators(settings: dict, monkeypatch):
    """If false, a clamp or a scale of someone's experts is dropped, at convert or when it is set
    later."""
    counts, x = torch.tensor([3, 0, 4, 5]), values(12, K).float() * 300
    experts = OfSomeone(dtype=torch.float32)
    net = fq.convert(nn.Sequential(copy.deepcopy(experts), nn.Linear(K, 8)), recipes.identity())
    assert isinstance(net[0].w1_product, ExpertProduct)
    twin = copy.deepcopy(net)
    for where in ("at convert", "later", "later, of the class"):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                if where == "later, of the class":
                    patch.setattr(OfSomeone, name, value)
                else:
                    vars(experts)[name] = vars(net[0])[name] = value
            if where == "at convert":
                net = nn.Sequential(copy.deepcopy(experts), nn.Linear(K, 8))
                fq.convert(net, recipes.identity())
                assert type(net[0]) is OfSomeone, "left alone"
                assert "OfSomeone.forward computes something else" in "\n".join(fq.plan(net).notes)
            want = OfSomeone.forward(experts, x, counts)
            assert_same_bytes(net[0](x, counts), want, where)
            if where != "at convert":
                (name,) = settings
                assert f"{name} has changed since fq.convert" in "\n".join(fq.plan(net).notes)
        for name in settings:
            vars(experts).pop(name, None)
        net = twin


@pytest.mark.parametrize("suffixed", [False, True], ids=["", "suffixed"])
def test_experts_of_torchtitan_are_converted_and_proven(suffixed: bool):
    """If false, torchtitan's experts stay in high precision, or experts with another gate get
    its."""
    results, counts = [], torch.tensor([3, 0, 4, 5])
    for name in (None, "identity", "mxfp8"):
        model = nn.Sequential(OfTorchtitan(suffixed), nn.Linear(K, 8))
        if name is not None:
            model = pickle.loads(pickle.dumps(fq.convert(model, RECIPES[name])))
        x = values(12, K).float().requires_grad_()
        y = model[0](x, counts)
        y.sum().backward()
        assert list(model[0].state_dict()) == list(OfTorchtitan(suffixed).state_dict())
        results.append(
            {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in model[0].named_parameters()}
        )
    assert results[0].keys() == results[1].keys() and y.dtype is torch.float32
    for got, most in zip(results[1:], (0.0, 0.2)):
        for what, want in results[0].items():
            assert (got[what] - want).norm() <= most * want.norm(), what
    assert any("0.w1" in note and "4 experts" in note for note in fq.plan(model).notes)
    model = fq.convert(nn.Sequential(OfAnother(suffixed), nn.Linear(K, 8)), recipes.mxfp8())
    assert type(model[0]) is OfAnother, "another gate"


def test_set_recipe_changes_every_expert():
    """If false, a part of the experts keeps the old formats, or their codes."""
    for packed in (False, True):
        module, x = grouped(recipes.mxfp8(), packed), values(12, K, dtype=torch.float32)
        module(x, [3, 3, 3, 3])
        fq.set_recipe(module, recipes.fp8_delayed())
        assert_same_bytes(
            module(x, [3, 3, 3, 3]),
            grouped(recipes.fp8_delayed(), packed)(x, [3, 3, 3, 3]),
            f"{packed}",
        )
        assert [len(m.runtime.graphs.delayed) for m in module.layers] == [1] * 4, "dropped plans"
        assert {layer.recipe for layer in module.layers} == {recipes.fp8_delayed()}


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_experts_have_the_recipe_of_a_context(packed: bool):
    """If false, experts ignore fq.autocast, wait for the device inside it, break graphs, or lose
    the histories of its recipe."""
    batches = list(SPLITS.values())[:2]

    def inside(m, x, sizes):
        ends = torch.tensor(sizes).cumsum(0)
        with fq.autocast(recipe):
            return m(x, ends)

    for name in ("fp8_delayed", "nvfp4", "dequantized"):
        recipe = RECIPES[name]
        want = trained(grouped(recipe, packed), packed, batches, lambda m, *given: m(*given))
        module = grouped(recipes.mxfp8(), packed)
        compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
        if name == "fp8_delayed":
            with pytest.raises(Exception, match="run it in eager mode, or use fq.set_recipe"):
                compiled(module, values(4, K, dtype=torch.float32), [1, 1, 1, 1])
        # nobody counts the steps of a compiled layer without a model
        calls = {inside: batches} | ({compiled: batches[:1]} if name != "fp8_delayed" else {})
        for call, at in calls.items():
            counters.reset()
            got = trained(grouped(recipes.mxfp8(), packed), packed, at, call)
            assert not counters.of("departure"), name
            for a, b in zip(got, want):
                assert_same(a, b, f"{name} {call}")


# Wrong splits #


def test_wrong_splits_on_the_host_are_refused_at_the_call():
    """If false, tokens are dropped, or an expert reads those of another."""
    module, x = grouped(recipes.mxfp8(), False), values(12, K, dtype=torch.float32)
    for wrong in (
        [3, 3, 3],
        [3, 3, 3, 4],
        [6, -3, 6, 3],
        torch.tensor([3, 3, 3, 3]),  # counts, where ends are wanted
        torch.tensor([3, 2, 9, 12]),
        torch.tensor([3, 6, 9, 11]),
    ):
        with pytest.raises(
            ValueError,
            match=r"moe: splits give \[.*\] rows to . experts.*wanted 4 counts.* 12 rows: a list "
            "is counts, and a tensor is ends",
        ):
            module(x, wrong)
    for wrong in (
        torch.tensor([3.0, 6, 9, 12]),
        torch.tensor([6, 12]),
        torch.zeros(4, 1, dtype=torch.int32),
    ):
        with pytest.raises(ValueError, match=r"moe: splits is torch.*wanted integers \[4\]"):
            module(x, wrong)
    for which, sizes in (("num_experts", (0, K, N)), ("in", (4, 0, N)), ("out", (4, K, 0))):
        with pytest.raises(ValueError, match=f"{which}.* must be an integer >= 1, got 0"):
            fq.GroupedLinear(*sizes)
    with pytest.raises(ValueError, match="gate_up: out_features must be an integer >= 1, got 0"):
        fq.GroupedMLP(4, K, 0)


def test_wrong_splits_on_the_device_are_refused_before_a_step():
    """If false, a wrong count of tokens trains on, because nothing may wait for the device."""
    with hopper.emulated():
        x = values(256, 64)
        for wrong in ([64, 128, 100, 256], [0, 0, 128, 255], [0, 64, 128, 300], [-4, 64, 128, 256]):
            module = grouped(recipes.mxfp8(), True, dtype=torch.bfloat16, sizes=(64, 32))
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            before = module.state_dict()["weight"].clone()
            module(x, torch.tensor([64, 128, 192, 256])).sum().backward()
            module(x, torch.tensor(wrong)).sum().backward()
            with pytest.raises(
                ValueError, match="moe: the token splits of an earlier call.* 256 rows"
            ):
                optimizer.step()
            assert_same_bytes(module.state_dict()["weight"], before, f"{wrong}")
            optimizer.step()  # told once


def test_wrong_splits_of_native_passes_are_found_where_python_ran_none(monkeypatch):
    """If false, a process that trains compiled experts alone trains on wrong counts of tokens."""
    flag = torch.zeros(1, dtype=torch.int64)  # of csrc/step/grouped.cpp
    monkeypatch.setattr(bad_splits, "_WRONG", [])
    monkeypatch.setattr(bad_splits.extension, "is_loaded", lambda: True)
    monkeypatch.setattr(native, "bad_splits_flag", lambda: flag)
    for of_cuda in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, of_cuda, lambda: True)
    flag.fill_(0 << 32 | 64)
    with pytest.raises(ValueError, match="experts of a compiled graph.*did not end at its 64 rows"):
        bad_splits.raise_bad_splits()
    bad_splits.raise_bad_splits()  # told once


# One product for all experts, as a Hopper GPU would #


def test_scales_of_tokens_serve_one_group():
    """If false, a scale of 128 tokens serves those of two experts, or a token is lost."""
    with hopper.emulated():
        for sizes in (
            [0, 7, 129, 128],
            [300, 0, 0, 1],
            [128, 256, 0, 128],
            [1, 1, 1, 1],
            [2],
            [0, 1],
        ):
            wrong = torch.zeros(1, dtype=torch.int64)
            groups = native.token_groups(torch.tensor(sizes).cumsum(0), sum(sizes), wrong, 7)
            assert not wrong and groups.offsets.diff().tolist() == sizes
            assert groups.padded.diff().tolist() == [round_up(size, 128) for size in sizes]
            tokens = [
                list(range(first, first + count)) for first, count, _, _ in groups.sources.tolist()
            ]
            assert sum(tokens, []) == list(range(sum(sizes)))
            for e, (start, end) in enumerate(zip(groups.padded // 128, groups.padded[1:] // 128)):
                assert sum(tokens[start:end], []) == list(
                    range(groups.offsets[e], groups.offsets[e + 1])
                )
                assert all(
                    of == [e, groups.padded[e]] for of in groups.sources[start:end, 2:].tolist()
                )


def rows_and_blocks(role):
    """Rows are scaled whole, columns of tokens by 128; weights' rows and columns whole."""
    return "fp8_row" if role.tensor_type == "weight" else fq.HybridQuantizer("fp8_row", "fp8_1x128")


def rows_and_histories(role):
    """Columns of tokens are scaled by histories, rows are not."""
    later = Quantizer("fp8_tensor", scaling=DelayedScaling(length=4))
    return fq.HybridQuantizer("fp8_row", "fp8_tensor" if role.tensor_type == "weight" else later)


def scalings() -> dict[str, fq.Recipe]:
    return {
        "fp8_block": recipes.fp8_block(),
        "mxfp8": recipes.mxfp8(),
        "fp8_block_mxfp8": recipes.hybrid("fp8_block", "mxfp8"),
        "keeps_input": recipes.mxfp8(save_original_input=True),
        "fp8_current": recipes.fp8_current(grad_element="e5m2"),
        "fp8_row": recipes.fp8_row(),
        "fp8_current_row": recipes.hybrid("fp8_current", "fp8_row"),
        "fp8_row_block": fq.CustomRecipe(rows_and_blocks),
        "fp8_delayed": recipes.fp8_delayed(length=4),
        "row_delayed": fq.CustomRecipe(rows_and_histories),
        "nvfp4": recipes.nvfp4(),
        "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
        "qat_mxfp8": recipes.qat("mxfp8"),
        "qat_mxfp4": recipes.qat("mxfp4"),
        "qat_nvfp4": recipes.qat("nvfp4"),
        "identity": recipes.identity(),
        "row_identity": recipes.fp8_row(backward_override="high_precision"),
    }


# With weights of their own too.
SEPARATE = [
    n for n in scalings() if not any(part in n for part in ("fp8_row", "identity", "mxfp8_nvfp4"))
]


@pytest.mark.parametrize(
    ("name", "packed"), [(n, p) for n in scalings() for p in (True, False) if p or n in SEPARATE]
)
def test_one_product_equals_a_loop_over_experts(name: str, packed: bool):
    """If false, experts are multiplied together with another's scales, tokens or weights.

    Products here are exact and rounded twice, to fp32 and bf16, in either; a bias is added to fp32.
    """
    with hopper.emulated() as gpu:
        recipe, sizes = scalings()[name], (64, 48)
        cases = (
            (False, [0, 70, 129, 57], False),
            (False, [0, 70, 129, 57], True),
            (False, [128, 0, 256, 128], False),
            (True, [5, 1, 0, 26], True),
        )
        few = {
            ("nvfp4", True): cases[1::2],
            ("nvfp4", False): cases[3:],
            ("mxfp8_nvfp4", True): cases[1:2],
        }  # slow references
        for bias, splits, on_device in cases if laws.EVERYTHING else few.get((name, packed), cases):
            x, dy = values(sum(splits), 64, seed=1), values(sum(splits), 48, seed=2)
            results = []
            for module, call in (
                (grouped(recipe, packed, bias, torch.bfloat16, sizes), None),
                (loop(recipe, packed, bias, torch.bfloat16, sizes), of_loop),
            ):
                a, before = x.clone().requires_grad_(), len(gpu.calls)
                given = torch.tensor(splits).cumsum(0) if on_device else splits
                y = module(a, given) if call is None else call(module, a, splits)
                y.backward(dy)
                results.append(
                    {"y": y.detach(), "dx": a.grad}
                    | by_expert(module, packed and call is None, lambda p: p.grad)
                )
                ran = [
                    c.name
                    for c in gpu.calls[before:]
                    if c.name.startswith(("gemm", "grouped_", "_grouped", "linear_step"))
                ]
                assert call is not None or ran == products_of(module, bias), ran
                names = [c.name for c in gpu.calls[before:]]
                launches = names.count("quantize_group") or names.count("quantize")
                assert launches == 1 or call or not (packed and name.startswith("qat")), name
            got, want = results
            assert_same_bytes(got["dx"], want["dx"], f"{name} {splits} dx")
            assert_same_bytes(got["weight"], want["weight"], f"{name} {splits} dw")
            assert_same_bytes(got["y"], want["y"], f"{name} {splits} y")
            if bias:  # bf16 sums of gradients in another order: one step of bf16
                torch.testing.assert_close(got["bias"], want["bias"], rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_row"])
def test_biases_of_a_wider_dtype_are_not_rounded_first(name: str, packed: bool):
    """If false, experts with fp32 parameters under torch.autocast add other biases than a loop."""
    x, splits = values(256, 64, seed=1), [0, 70, 129, 57]
    with hopper.emulated() as gpu, torch.autocast("cpu", torch.bfloat16):
        module, experts = (
            make(scalings()[name], packed, True, torch.float32, (64, 48))
            for make in (grouped, loop)
        )
        got = module(x, splits)
        assert [c.name for c in gpu.calls].count("grouped_gemm") == 1
        assert_same_bytes(got, of_loop(experts, x, splits), f"{name} {packed}")


def products_of(module: fq.GroupedLinear, bias: bool) -> list[str]:
    """What a step calls, in order: fprop, dgrad, wgrad."""
    plan = module.common_plan
    of_codes = {p.name: plan.operand(*p.a).is_quantized for p in PRODUCTS}
    names = {"fprop": "grouped_gemm", "dgrad": "grouped_gemm", "wgrad": "grouped_gemm_wgrad"}
    made = [name if of_codes[product] else "_grouped_mm" for product, name in names.items()]
    return [] if bias and not of_codes["fprop"] else made


@pytest.mark.parametrize("arch", ["sm_80", "sm_100f"])
def test_experts_of_values_are_one_product_on_every_gpu(arch: str):
    """If false, bf16 experts wait for the device to tell their splits, or codes meet kernels of
    another GPU."""
    x, dy, splits = values(256, 64, seed=1), values(256, 48, seed=2), [0, 70, 129, 57]
    with hopper.emulated(arch) as gpu:
        for name, ran in (("identity", ["_grouped_mm"] * 3), ("fp8_current", [])):
            made = []
            for make, call in (
                (grouped, lambda m, a, s: m(a, torch.tensor(s).cumsum(0))),
                (loop, of_loop),
            ):
                module, a = (
                    make(scalings()[name], True, False, torch.bfloat16, (64, 48)),
                    x.clone().requires_grad_(),
                )
                gpu.calls.clear()
                y = call(module, a, splits)
                y.backward(dy)
                made.append({"y": y.detach(), "dx": a.grad})
                if make is grouped:
                    assert [c.name for c in gpu.calls if "grouped" in c.name] == ran
                    reason = module.unsupported_reason(torch.bfloat16, x.device)
                    assert reason == (
                        None if ran else f"no grouped kernel multiplies codes on {arch}"
                    )
            assert_same(*made, f"{name} on {arch}")


@pytest.mark.parametrize(
    "name, arch, packed",
    laws.crossed(
        ["mxfp8", "fp8_block_mxfp8", "keeps_input", "mxfp6", "half"],
        ["sm_80", "sm_100f"],
        [False, True],
        stride=3,
    ),
)
def test_codes_are_one_product_of_values_on_other_gpus(name: str, arch: str, packed: bool):
    """If false, experts wait for the device to tell their splits on GPUs whose codes no grouped
    kernel multiplies, or a scale there serves tokens of two experts."""
    more = {
        "mxfp6": recipes.mxfp6(),
        "half": recipes.mxfp8(backward_override="high_precision"),
    }
    recipe, splits = (scalings() | more)[name], [0, 70, 129, 57]
    ends = torch.tensor(splits).cumsum(0)
    # of another size for each expert: a block of two would round one's to zero
    size = torch.tensor([1.0, 2.0**-20, 1.0, 2.0**-20]).repeat_interleave(torch.tensor(splits))
    x, dy = (values(256, cols, seed=cols) * size[:, None].bfloat16() for cols in (64, 48))
    calls = {"eager": lambda m, a: m(a, ends), "loop": lambda m, a: of_loop(m, a, splits)}
    if packed:
        calls["compiled"] = lambda m, a: torch.compile(m, fullgraph=True, backend="aot_eager")(
            a, ends
        )
    with hopper.emulated(arch):
        made = {}
        for how, call in calls.items():
            module = (loop if how == "loop" else grouped)(
                recipe, packed, False, torch.bfloat16, (64, 48)
            )
            counters.reset()
            a = x.clone().requires_grad_()
            y = call(module, a)
            y.backward(dy)
            made[how] = {"y": y.detach(), "dx": a.grad}
            made[how] |= by_expert(module, packed and how != "loop", lambda p: p.grad)
            if how != "loop":
                assert module.unsupported_reason(torch.bfloat16, x.device) is None
                assert "in one product of values" in str(fq.plan(module))
                assert not counters.of("departure")
                ran = {domain for domain, *_ in counters.of("gemm")}
                assert ran == ({"bf16", "native"} if name == "half" else {"bf16"}), ran
        for how in set(calls) - {"loop"}:
            for what, want in made["loop"].items():  # fp32 sums in another order, rounded to bf16
                parts = [
                    t if what == "weight" else t.split(splits) for t in (made[how][what], want)
                ]
                for got, of_loop_ in zip(*parts):
                    largest = of_loop_.abs().max().item() if of_loop_.numel() else 0.0
                    torch.testing.assert_close(got, of_loop_, rtol=2**-7, atol=2**-7 * largest)
            assert_same(made[how], made["eager"], f"{name} on {arch}: {how}")
    torch.compiler.reset()


def test_experts_that_require_native_products_are_not_decoded():
    """If false, require_native=True trains in bf16 in silence, in eager mode or in graphs."""
    x, ends = values(256, 64), torch.tensor([64, 128, 192, 256])
    with hopper.emulated("sm_100f"):
        recipe = recipes.mxfp8(require_native=True)
        module = grouped(recipe, True, False, torch.bfloat16, (64, 48))
        for call in (module, torch.compile(module, backend="aot_eager")):
            counters.reset()
            call(x, ends)
            assert {domain for domain, *_ in counters.of("gemm")} == {"native"}
        assert "require_native=True" in str(fq.plan(module))
    torch.compiler.reset()


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_one_product_scales_by_each_experts_history(packed: bool):
    """If false, an expert is scaled by the amaxes of another, or loses those of a step."""
    recipe, sizes, results = recipes.fp8_delayed(length=2), (64, 48), []
    with hopper.emulated() as gpu:
        for make, call in (
            (grouped, lambda m, x, s: m(x, torch.tensor(s).cumsum(0))),
            (loop, of_loop),
        ):
            restart()
            module = make(recipe, packed, False, torch.bfloat16, sizes)
            optimizer, seen = torch.optim.SGD(module.parameters(), lr=2.0**-4), {}
            for step, splits in enumerate(([0, 70, 129, 57], [64, 0, 128, 64], [1, 3, 200, 52])):
                x = (values(256, 64, seed=step) * 2.0**step).requires_grad_()
                y = call(module, x, splits)
                y.backward(values(256, 48, seed=9 + step) * 2.0**-step)
                seen |= {f"{step} y": y.detach(), f"{step} dx": x.grad}
                optimizer.step()
                optimizer.zero_grad()
            seen["weight"] = by_expert(module, packed and make is grouped)["weight"]
            layers = [m for m in module.modules() if hasattr(m, "_weight_state")]
            for state in {id(s): s for m in layers for s in [m._weight_state]}.values():
                for (name, slot, d, _), history in state.histories.items():
                    where = f"{name.replace('.weight', '')} {slot} {d.value}"
                    seen |= {
                        f"{where} amaxes": history.amaxes.clone(),
                        f"{where} enc": history.encode_scale.clone(),
                    }
            results.append(seen)
            assert make is loop or gpu.count("grouped_gemm") == 6
    assert_same(*results, f"packed={packed}")


@pytest.mark.parametrize("compiled", [False, True])
def test_codes_of_tokens_are_refused(compiled: bool):
    """If false, a scale of codes that a dense layer gathers serves tokens of several experts."""
    module = grouped(recipes.mxfp8(), True)
    call = torch.compile(module, backend="eager") if compiled else module
    x = fq.Quantizer("mxfp8").quantize(values(32, module.first.in_features))
    with pytest.raises(ValueError, match=r"x is codes \[32, .*; wanted values, .*x.dequantize()"):
        call(x, torch.tensor([8, 16, 16, 32]))


def squares(role):
    return "fp8_128x128" if role.tensor_type == "input" else "fp8_1x128"


def lines(role):
    """Columns of the input are anchored over all tokens."""
    return "mxfp8" if role.tensor_type == "input" else "fp8_row"


REFUSED = RECIPES | {"squares": fq.CustomRecipe(squares), "lines": fq.CustomRecipe(lines)}


@pytest.mark.parametrize(
    "name, reason",
    [
        ("squares", "a scale of input.rowwise .* serves tokens of several experts"),
        ("lines", "a scale of input.columnwise .* serves tokens of several experts"),
        ("rounded", "input is"),
    ],
)
def test_what_no_grouped_kernel_makes_runs_one_by_one(name: str, reason: str):
    """If false, tokens of different experts share a scale, and a rank's result depends on its other
    experts."""
    with hopper.emulated() as gpu:
        module = grouped(REFUSED[name], True, dtype=torch.bfloat16, sizes=(64, 48))
        x = values(64, 64)
        got = module(x, torch.tensor([16, 16, 48, 64]))
        assert gpu.count("grouped_gemm") == 0
        assert counters.of("departure"), "reading splits of a device waits for it, and is counted"
        restart()
        want = of_loop(
            loop(REFUSED[name], True, dtype=torch.bfloat16, sizes=(64, 48)), x, [16, 0, 32, 16]
        )
        assert_same_bytes(got, want, name)
        assert re.search(reason, module.unsupported_reason(torch.bfloat16, x.device))
        assert re.search(reason, str(fq.plan(module)))


def test_what_the_guard_moves_for_one_expert_is_moved_for_all():
    """If false, experts that anchoring does not serve go on with it, or one product no longer
    serves any."""
    with hopper.emulated() as gpu:
        module = grouped(recipes.mxfp8(), True, dtype=torch.bfloat16, sizes=(64, 48))
        size = torch.where(torch.arange(64) < 32, 1.0, 1e-6).bfloat16()
        x = (values(256, 64) * size).requires_grad_()
        with torch.no_grad():
            module.weight.div_(size)  # half of the blocks count as much as the others
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        assert "all in one product" in str(fq.plan(module))
        for _ in range(PROBED_STEPS):
            module(x, [64, 64, 64, 64]).sum().backward()
            optimizer.step()
        module(x, [64, 64, 64, 64])
        assert [layer.plan.moved for layer in module.layers] == [{"fprop": "exact"}] * 4
        assert [layer.runtime.guard is not None for layer in module.layers] == [
            True,
            False,
            False,
            False,
        ], "one count for all"
        ran = gpu.count("grouped_gemm")
        module(x, [64, 64, 64, 64])
        assert gpu.count("grouped_gemm") == ran
        assert "one after the other (fprop runs in the bf16 domain)" in str(fq.plan(module))


@pytest.mark.parametrize("packed", [False, True])
def test_graphs_of_experts_find_their_histories(packed: bool):
    """If false, compiled experts with delayed scaling are refused, or moving a product loses its
    amaxes."""
    module = fq.GroupedLinear(2, 32, 32, packed=packed, recipe=recipes.fp8_delayed(length=3))
    for layer in module._linears:
        for plan in (layer.plan, layer.plan.moved_to({"wgrad": "exact"})):
            assert len(layer.runtime.graphs.delayed[plan.histories_key][0]) == 3


def test_one_product_keeps_what_the_plan_names():
    """If false, memory holds both the input and its codes, or operands of frozen experts."""
    with hopper.emulated():
        x = values(64, 64)
        for recipe, kept in (
            (recipes.mxfp8(), {torch.uint8, torch.float32}),
            (scalings()["keeps_input"], {torch.bfloat16}),
        ):
            module = grouped(recipe, True, dtype=torch.bfloat16, sizes=(64, 48))
            with recorded_saves() as saved:
                module(x.clone().requires_grad_(), [16, 16, 16, 16])
            # and the weight's codes, for dgrad, and the tables of the groups
            assert {t.dtype for t in saved} == kept | {torch.uint8, torch.float32, torch.int32}
            module.requires_grad_(False)
            with recorded_saves() as saved:
                y = module(x.clone().requires_grad_(), [16, 16, 16, 16])
            assert y.requires_grad and not any(t.dtype is torch.bfloat16 for t in saved)
            assert (
                sum(t.numel() for t in saved if t.dtype is torch.uint8) == module.weight.numel()
            )  # what dgrad multiplies


@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "nvfp4"])
def test_held_packed_experts_are_quantized_once_and_copied_never(name: str):
    """If false, micro-batches inside fq.hold stack the codes of all experts again, or multiply
    other codes."""
    with hopper.emulated() as gpu:
        module, x = (
            grouped(scalings()[name], True, dtype=torch.bfloat16, sizes=(64, 48)),
            values(64, 64),
        )

        def accumulated() -> list[Tensor]:
            module.zero_grad()
            fq.begin_step(0)
            outputs = []
            for _ in range(3):
                outputs.append(module(x.clone().requires_grad_(), [16, 16, 16, 16]))
                outputs[-1].backward(values(64, 48, seed=2))
            return [*(y.detach() for y in outputs), module.weight.grad]

        want, before = accumulated(), gpu.count("linear_weight")
        with (
            fq.hold(module),
            mock.patch.object(stacked_weights, "_stacked", side_effect=AssertionError("copied")),
        ):
            got = accumulated()
            assert gpu.count("linear_weight") == before + before // 3
            with torch.no_grad():
                module.weight.mul_(2)
            with pytest.raises(fq.StaleWeightError, match="written inside fq.hold"):
                module(x, [16, 16, 16, 16])
    for a, b in zip(got, want):
        assert_same_bytes(a, b, f"{name}: held")


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_compiled_experts_equal_eager_ones(packed: bool):
    """If false, a compiled block multiplies stale codes of an expert, or those of another."""
    fq.begin_step(0)
    x, sizes = values(24, K, dtype=torch.float32), [8, 0, 10, 6]
    module = grouped(recipes.nvfp4(), packed)
    compiled = torch.compile(lambda a: module(a, sizes), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = []
        for call in (lambda a: module(a, sizes), compiled):
            module.zero_grad()
            a = x.clone().requires_grad_()
            y = call(a)
            y.backward(values(24, N, seed=9, dtype=torch.float32))
            results.append(
                {"y": y.detach(), "dx": a.grad} | by_expert(module, packed, lambda p: p.grad)
            )
        assert_same(results[1], results[0], f"packed={packed}")
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.5)


class Within(nn.Module):
    """A model around experts."""

    def __init__(self, experts: fq.GroupedLinear, ends: Tensor):
        super().__init__()
        self.experts, self.ends = experts, ends

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(2 * x, self.ends) + 1


@pytest.mark.parametrize(
    "name, on_hopper, packed",
    laws.crossed([*sorted(RECIPES), "row_delayed"], (False, True), (False, True), stride=9),
)
def test_splits_of_a_tensor_are_in_compiled_graphs(name: str, on_hopper: bool, packed: bool):
    """If false, a compiled mixture of experts breaks its graphs, waits for the device, or trains
    another model: with other histories or random bits."""
    torch.compiler.reset()
    recipe, bias = (RECIPES | scalings())[name], on_hopper != packed
    with hopper.emulated() if on_hopper else contextlib.nullcontext() as gpu:
        ends, ran = torch.tensor([16, 16, 48, 64]), []
        for compiled in (False, True):
            restart()
            module = grouped(recipe, packed, bias, dtype=torch.bfloat16, sizes=(64, 48))
            model = Within(module, ends)
            fq.set_recipe(model, recipe)
            if compiled:
                model.compile(fullgraph=True, backend="aot_eager")
            ran.append({})
            for step in range(3):
                fq.begin_step(step)
                module.zero_grad()
                x = (values(64, 64, seed=step) * 2.0**step).requires_grad_()
                before = gpu.count("grouped_gemm") + gpu.count("_grouped_mm") if on_hopper else 0
                y = model(x)
                y.backward(values(64, 48, seed=9) * 2.0**-step)
                ran[-1] |= {f"{step} y": y.detach(), f"{step} dx": x.grad}
                ran[-1] |= {f"{step} {n}": p.grad for n, p in module.named_parameters()}
                if on_hopper:
                    products = gpu.count("grouped_gemm") + gpu.count("_grouped_mm") - before
                    ran[-1] |= {f"{step} products": torch.tensor(products)}
            for layer in module.layers:
                histories = layer.runtime.weight_state.histories.items()
                ran[-1] |= {str(key): history.amaxes.clone() for key, history in histories}
            with torch.no_grad():
                ran[-1] |= {"evaluation": model(values(64, 64))}
        assert_same(ran[1], ran[0], name)
    torch.compiler.reset()


@pytest.mark.parametrize("on_hopper", [False, True], ids=["cpu", "hopper"])
@pytest.mark.parametrize("name", ["mxfp8", "dequantized"])
def test_frozen_experts_of_a_list_are_those_of_eager_mode(name: str, on_hopper: bool):
    """If false, compiled experts read frozen codes in the layout of another product."""
    torch.compiler.reset()
    with hopper.emulated() if on_hopper else contextlib.nullcontext():
        module = grouped(RECIPES[name], False, True, dtype=torch.bfloat16, sizes=(64, 48))
        fq.freeze(module.requires_grad_(False))
        results, ends = [], torch.tensor([16, 16, 48, 64])
        for call in (module, torch.compile(module, backend="aot_eager")):
            x = values(64, 64).requires_grad_()
            y = call(x, ends)
            y.backward(values(64, 48, seed=9))
            results.append({"y": y.detach(), "dx": x.grad})
        assert_same(results[1], results[0], name)
    torch.compiler.reset()


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize(
    "name", ["mxfp8", "fp8_block", "fp8_current", "qat_mxfp8", "qat_mxfp4", "qat_nvfp4"]
)
def test_frozen_experts_are_one_product(name: str, packed: bool):
    """If false, experts whose backward multiplies the codes of the forward run one by one and wait
    for the device, or multiply other codes, in eager mode or in a graph."""
    torch.compiler.reset()
    splits, results, products = [0, 70, 129, 57], [], []
    ends = torch.tensor(splits).cumsum(0)
    with hopper.emulated() as gpu:
        module, experts = (
            make(scalings()[name], packed, False, torch.bfloat16, (64, 48))
            for make in (grouped, loop)
        )
        for frozen in (module, experts):
            fq.freeze(frozen.requires_grad_(False))
        graph = torch.compile(module, backend="aot_eager", fullgraph=packed or None)
        for call in (module, graph, lambda x, ends: of_loop(experts, x, splits)):
            x, before = values(256, 64, seed=1).requires_grad_(), gpu.count("grouped_gemm")
            y = call(x, ends)
            y.backward(values(256, 48, seed=2))
            results.append({"y": y.detach(), "dx": x.grad})
            products.append(gpu.count("grouped_gemm") - before)
        assert products == [2, 2, 0]
        assert not counters.of("departure")
    for got, what in zip(results, ("eager", "graph")):
        assert_same(got, results[2], f"{name} {what}")
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["qat_mxfp4", "qat_nvfp4"])
def test_weights_in_qat_are_encoded_together_and_counted_each(name: str):
    """If false, a receipt counts a launch in place of tensors, codes are counted that are not made,
    or weights that lie transposed are copied whole before they are encoded."""
    recipe, experts = scalings()[name], 4
    x, ends = values(64, 64, seed=1), torch.tensor([16, 32, 48, 64])
    for transposed in (False, True):
        with hopper.emulated() as gpu:
            module = grouped(recipe, True, False, torch.bfloat16, (64, 48))
            if transposed:
                owner = module.owners[0]
                owner.weight = nn.Parameter(owner.weight.detach().mT.contiguous().mT)
            counters.reset()
            module(x.requires_grad_(), ends).sum().backward()
            names = [c.name for c in gpu.calls]
            launches = names.count("quantize_group") or names.count("quantize")
            assert launches == (experts if transposed else 1), (name, transposed)
            of_weight = {k: n for k, n in counters.of("quantize").items() if k[0] == name[4:]}
            assert of_weight == {(name[4:], "rowwise", "native"): experts}
            made = counters.of("weight encode")
            assert {d for _, d in made} == {"rowwise"} and set(made.values()) == {1}


def test_steps_of_transposed_weights_have_a_key_of_their_own():
    """If false, a native pass of a graph from another process takes the step of other weights for
    the one that it was traced with."""
    with hopper.emulated() as gpu:
        module = grouped(recipes.mxfp8(), True, False, dtype=torch.bfloat16, sizes=(64, 48))
        plan, device = module.first.plan.of_groups, module.weight.device
        number, turned = (
            plan.resolved(torch.bfloat16, device).call,
            plan.turned(torch.bfloat16, device),
        )
        assert gpu.plans[number].key == plan.key
        assert gpu.plans[turned].key == plan.key + "T"


@pytest.mark.parametrize(
    "name, on_hopper, compiled",
    laws.crossed([*sorted(RECIPES), "e5m2"], (False, True), (False, True)),
)
def test_weights_that_lie_transposed_are_multiplied_as_others(
    name: str, on_hopper: bool, compiled: bool
):
    """If false, their codes are made along the other dim, of copies, or counted as the other
    direction's."""
    recipe, ends = (
        (RECIPES | {"e5m2": recipes.fp8_current(grad_element="e5m2")})[name],
        torch.tensor([128, 128, 192, 256]),
    )
    with hopper.emulated() if on_hopper else contextlib.nullcontext():
        packed, ran = grouped(recipe, True, True, dtype=torch.bfloat16, sizes=(128, 256)), []
        # Sums of whole numbers are the same in any order: torch's own bf16 GEMMs choose one by
        # layout.
        whole = name in ("identity", "high_precision")
        if whole:
            for parameter in packed.parameters():
                parameter.data.mul_(64).round_()
        turned = ExpertProduct(
            nn.Parameter(packed.weight.detach().mT.contiguous()),
            nn.Parameter(packed.bias.detach().clone()),
            True,
        )
        turned.adopt_packed([recipe] * EXPERTS, "moe")
        for module in (packed, turned):
            restart()
            counters.reset()
            x, dy = values(256, 128), values(256, 256, seed=9)
            x, dy = (x.round(), dy.round()) if whole else (x, dy)
            y = (torch.compile(module, backend="aot_eager") if compiled else module)(
                x.requires_grad_(), ends
            )
            y.backward(dy)
            dw = module.weight.grad
            assert dw.stride() == module.weight.stride()
            ran.append(
                {
                    "y": y.detach(),
                    "dx": x.grad,
                    "dw": dw if module is packed else dw.mT,
                    "db": module.bias.grad,
                }
            )
            ran[-1] |= {"counts": [counters.of(what) for what in ("quantize", "gemm")]}
    assert ran[0].pop("counts") == ran[1].pop("counts")
    assert_same(*ran, name)
    torch.compiler.reset()


def test_what_graphs_of_experts_count_and_find_wrong():
    """If false, the guard does not see products of compiled experts, or wrong splits train in
    silence."""
    with hopper.emulated() as gpu:
        module = grouped(recipes.mxfp8(), True, False, dtype=torch.bfloat16, sizes=(64, 48))
        first, counts = module._linears[0], []
        for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            STEP.step = 0  # which is looked at
            x = values(64, 64) * torch.where(torch.arange(64) < 32, 1.0, 1e-6).bfloat16()
            call(x.requires_grad_(), torch.tensor([16, 16, 48, 64])).sum().backward()
            guards = [
                g for g in (first.runtime.guard, first.runtime.backward_guard) if g is not None
            ]
            counts.append(sum(g.clone() for g in guards))
            for g in guards:
                g.zero_()
        assert counts[0].any() and torch.equal(*counts)
        launched = gpu.count("product_error")
        fq.begin_step(PROBED_STEPS + 1)
        call(values(64, 64).requires_grad_(), torch.tensor([16, 16, 48, 64])).sum().backward()
        assert gpu.count("product_error") == launched > 0, "kernels that return at once"
        torch.compile(module, backend="aot_eager")(values(64, 64), torch.tensor([16, 16, 48, 60]))
        with pytest.raises(
            ValueError, match="experts of a compiled graph.*did not end at its 64 rows"
        ):
            module(values(64, 64), [16, 16, 16, 16])
    torch.compiler.reset()


def test_a_changed_recipe_leaves_the_graphs_of_experts():
    """If false, compiled experts multiply formats of before, or scale by histories that no one
    rolls."""
    module = grouped(recipes.mxfp8(), True, dtype=torch.bfloat16, sizes=(64, 48))
    x, ends, model = values(64, 64), torch.tensor([16, 16, 48, 64]), nn.ModuleList([module])
    compiled = torch.compile(module, backend="aot_eager")
    for name in ("mxfp8", "fp8_row", "nvfp4", "mxfp8"):
        fq.set_recipe(model, RECIPES[name])
        assert_same_bytes(compiled(x, ends), module(x, ends), name)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "nvfp4"])
def test_compiled_experts_derive_nothing_of_their_plan_again(name: str):
    """If false, the host of each compiled step works for what no step changes."""
    with hopper.emulated() as gpu:
        module = grouped(RECIPES[name], True, False, torch.bfloat16, (64, 128))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x, ends = values(96, 64, dtype=torch.bfloat16), torch.tensor([16, 16, 48, 96])
        compiled(x.requires_grad_(), ends).sum().backward()
        derived = mock.Mock(side_effect=AssertionError("derived again"))
        before, of = gpu.count("linear_weight"), grouped_ops._call_of
        with (
            mock.patch.object(GemmPlan, "operand", derived),
            mock.patch.object(grouped_ops, "_call_of", side_effect=of) as calls,
        ):
            compiled(x, ends).sum().backward()
    watched = [bool(call.args[3]) for call in calls.call_args_list]
    assert watched == [name == "mxfp8"] * 2, "counts that nobody makes"
    assert name == "nvfp4" or gpu.count("linear_weight") == before + 2 * EXPERTS


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_gathered_codes_of_experts_are_converted_together(name: str):
    """If false, compiled experts under fully_shard cost the host some microseconds per expert, or
    multiply other codes."""
    with hopper.emulated():
        plan, sizes = grouped(RECIPES[name], True).first.plan.of_groups, (EXPERTS, 128, 64)
        weight = values(*sizes, dtype=torch.bfloat16)
        for direction in Direction:
            sides = [plan.weight.side(direction).storage(w, direction) for w in weight]
            codes = [torch.cat([getattr(s, field) for s in sides]) for field in ("data", "scale")]
            of = direction, sizes, plan, torch.bfloat16
            each = stacked_weights.weight_of_codes(codes, *of)
            (want,) = stacked_weights.stacked_weight([each], [direction], *of[2:]).values()
            with mock.patch.object(stacked_weights, "StoragePair", side_effect=AssertionError):
                made = stacked_weights.stack_of_codes(codes, *of)
            for got, wanted in zip(made.buffers, want.buffers, strict=True):
                assert_same_bytes(got, wanted)
            codes[0].untyped_storage().resize_(0)
            with pytest.raises(fq.StaleWeightError, match="codes were freed"):
                stacked_weights.stack_of_codes(codes, *of)

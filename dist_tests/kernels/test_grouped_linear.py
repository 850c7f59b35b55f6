# SPDX-License-Identifier: Apache-2.0
"""`fq.GroupedLinear` on a GPU: one product for all experts is the loop over them, and nothing waits
for the device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16
from dist_tests.kernels.test_hopper_gemm import WHY_NOT
from dist_tests.single.hopper import Operators
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.encoded_matrix import EncodedMatrix, has_tensor_amax
from fsdp_quant.formats import (
    COLUMNWISE,
    IDENTITY,
    ROWWISE,
    Direction,
    Encoding,
    format_of,
    round_up,
)
from fsdp_quant.linear import bad_splits, grouped_ops, guard
from fsdp_quant.linear import grouped as program
from fsdp_quant.linear import plan as plans
from fsdp_quant.linear.routes import Around
from fsdp_quant.models import norm_op
from fsdp_quant.models.packed_experts import ExpertProduct
from fsdp_quant.ops import anchoring, capability, dispatch, native, norm
from fsdp_quant.ops.layout import repack
from fsdp_quant.roles import QUANTIZED_TYPES
from fsdp_quant.scaling import DelayedScaling

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

K, N = 512, 384
SPLITS = ([300, 0, 129, 595], [0, 0, 1024, 0], [256, 128, 0, 640], [1, 2, 0, 0])
ONE_PRODUCT = {
    "fp8_block": recipes.fp8_block,
    "mxfp8": recipes.mxfp8,
    "fp8_block/mxfp8": lambda: recipes.hybrid("fp8_block", "mxfp8"),
    "fp8_current": lambda: recipes.fp8_current(grad_element="e5m2"),
    "fp8_row": recipes.fp8_row,
    "fp8_current/fp8_row": lambda: recipes.hybrid("fp8_current", "fp8_row"),
    "fp8_row/fp8_block": lambda: recipes.custom(rows_and_blocks),
}
DELAYED = {
    "fp8_delayed": recipes.fp8_delayed,
    "row_delayed": lambda: recipes.custom(rows_and_histories),
}
VALUES = {
    "bf16": recipes.identity,
    "fp8_row/bf16": lambda: recipes.fp8_row(backward_override="high_precision"),
}
TWO_LEVEL = {
    "nvfp4": recipes.nvfp4,
    "nvfp4 4over6": lambda: recipes.nvfp4(four_over_six="mse"),
    "mxfp8/nvfp4": lambda: recipes.hybrid("mxfp8", "nvfp4"),
}
EXACT = {
    "nvfp4 exact": lambda: recipes.nvfp4(scale_rule="fp8_exact"),
    "mxfp8/nvfp4 exact": lambda: recipes.hybrid("mxfp8", "nvfp4", scale_rule="fp8_exact"),
}
TURNED = {f"qat {w}": partial(recipes.qat, w) for w in ("mxfp8", "mxfp4", "nvfp4")}
ALSO = DELAYED | VALUES | TWO_LEVEL | EXACT | TURNED
ONE_BY_ONE = {
    "mxfp8 exact": lambda: recipes.mxfp8(accuracy="exact"),
    "nvfp4 row": lambda: recipes.nvfp4(scale_per="row"),
}


def operand(
    plan: plans.GemmPlan, slot: str, x: Tensor, direction: Direction, key: Tensor | None
) -> EncodedMatrix:
    """Codes of x [rows, cols] as the plan's products read them."""
    layouts = plan.resolved(x.dtype, x.device).layouts[slot]
    return plan.hybrid(slot).operands(x, [direction], layouts=layouts, key=key)[0][direction]


def rows_and_blocks(role):
    """Rows are scaled whole, columns of tokens by 128; weights' rows and columns whole."""
    return "fp8_row" if role.tensor_type == "weight" else fq.HybridQuantizer("fp8_row", "fp8_1x128")


def rows_and_histories(role):
    """Columns of tokens are scaled by histories, rows are not."""
    later = fq.Quantizer("fp8_tensor", scaling=DelayedScaling(length=4))
    return fq.HybridQuantizer("fp8_row", "fp8_tensor" if role.tensor_type == "weight" else later)


def grouped(
    recipe: fq.Recipe, packed: bool, bias: bool, dtype=BF16, n: int = N
) -> fq.GroupedLinear:
    torch.manual_seed(0)
    return fq.GroupedLinear(
        4, K, n, bias, device="cuda", dtype=dtype, packed=packed, recipe=recipe, name="experts"
    )


def loop(module: fq.GroupedLinear, recipe: fq.Recipe) -> list[fq.Linear]:
    made = []
    for e, layer in enumerate(module.layers):
        options = {"device": "cuda", "dtype": layer.weight.dtype, "recipe": recipe}
        made.append(
            fq.Linear(
                K,
                layer.out_features,
                layer.bias is not None,
                name=layer.runtime.name,
                **options,
            )
        )
        # exponents of lines, as where tokens of others are beside
        made[e].runtime.plan = replace(made[e].plan, alone=False)
        with torch.no_grad():
            made[e].weight.copy_(layer.weight)
            if layer.bias is not None:
                made[e].bias.copy_(layer.bias)
    return made


def gradients(module, packed: bool) -> dict[str, Tensor]:
    if packed:
        return {n: p.grad for n, p in module.named_parameters()}
    layers = module if isinstance(module, list) else list(module.experts)
    return {
        n: torch.stack([layer.get_parameter(n).grad for layer in layers])
        for n, _ in layers[0].named_parameters()
    }


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("name", [*ONE_PRODUCT, *ALSO, *ONE_BY_ONE])
def test_experts_are_those_of_a_loop(name: str, packed: bool):
    """If false, experts read each other's tokens, scales or weights.

    Codes are the same; sums are of the same terms in another order, rounded to bf16 (2^-8), in fp32
    before a bias.
    """
    recipe = (ONE_PRODUCT | ALSO | ONE_BY_ONE)[name]()
    for sizes in SPLITS:
        for bias, on_device in ((False, True), (True, False)):
            x = laws.values(sum(sizes), K, seed=3, dtype=BF16).cuda()
            dy = laws.values(sum(sizes), N, seed=4, dtype=BF16).cuda()
            module = grouped(recipe, packed, bias)
            experts, results = loop(module, recipe), []
            for of, call in (
                (
                    module,
                    lambda a: module(
                        a, torch.tensor(sizes).cumsum(0).int().cuda() if on_device else sizes
                    ),
                ),
                (
                    experts,
                    lambda a: torch.cat([f(part) for f, part in zip(experts, a.split(sizes))]),
                ),
            ):
                a = x.clone().requires_grad_()
                y = call(a)
                y.backward(dy)
                results.append(
                    {"y": y.detach(), "dx": a.grad} | gradients(of, packed and of is module)
                )
            for key, want in results[1].items():
                off = (
                    results[0][key].double() - want.double()
                ).norm() / want.double().norm().clamp_min(1e-9)
                assert off < 2**-8, f"{name} {sizes} bias={bias} {key}: {off:.2e}"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "fp8_current", *TURNED])
def test_frozen_experts_are_those_of_a_loop(name: str, compiled: bool):
    """If false, frozen codes of an expert are multiplied as another's, or along the wrong side."""
    torch.compiler.reset()
    recipe = (ONE_PRODUCT | TURNED)[name]()
    module = grouped(recipe, True, False)
    experts = loop(module, recipe)
    for frozen in (module, nn.ModuleList(experts)):
        fq.freeze(frozen.requires_grad_(False))
    call = torch.compile(module, backend="aot_eager") if compiled else module
    for sizes in SPLITS:
        x = laws.values(sum(sizes), K, seed=3, dtype=BF16).cuda()
        dy = laws.values(sum(sizes), N, seed=4, dtype=BF16).cuda()
        a, b = (x.clone().requires_grad_() for _ in range(2))
        counters.reset()
        y = call(a, torch.tensor(sizes).cumsum(0).int().cuda())
        assert not counters.of("departure")
        want = torch.cat([f(part) for f, part in zip(experts, b.split(sizes))])
        y.backward(dy)
        want.backward(dy)
        for key, got, of_loop in (("y", y, want), ("dx", a.grad, b.grad)):
            norm_of = of_loop.double().norm().clamp_min(1e-9)
            off = (got.double() - of_loop.double()).norm() / norm_of
            assert off < 2**-8, f"{name} {sizes} {key}: {off:.2e}"


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "fp8_current", "fp8_row"])
@torch.no_grad()
def test_experts_with_biases_have_the_bits_of_a_loop(name: str, packed: bool, dtype: torch.dtype):
    """If false, a sum is rounded before its bias is added, or has that of another expert or column.

    Values are 0 and 7/8, the largest of a block, and scales 2^-9: sums are exact in any order.
    """

    def values(*shape: int) -> Tensor:
        return 0.875 * torch.randint(-1, 2, shape, device="cuda").to(BF16)

    recipe = ONE_PRODUCT[name]()
    for n in (N, 208, 16):  # the last two end inside a tile
        module = grouped(recipe, packed, True, dtype, n)
        for owner in module.owners:
            owner.weight.copy_(values(*owner.weight.shape))
            owner.bias.normal_()
        experts = loop(module, recipe)
        for sizes in SPLITS:
            x, ends = values(sum(sizes), K), torch.tensor(sizes, device="cuda").cumsum(0).int()
            counters.reset()
            with torch.autocast("cuda", BF16, enabled=dtype is not BF16):
                got = module(x, ends)
                want = torch.cat([f(part) for f, part in zip(experts, x.split(sizes))])
            assert not counters.of("departure")
            expected.assert_same(got, want, f"{name} {n} {sizes}")


def mlp(recipe: fq.Recipe, ffn: int) -> nn.ModuleList:
    """Gate and up [4, 2 ffn, K], and down [4, N, ffn]."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": BF16, "packed": True, "recipe": recipe}
    shapes = {"gate_up": (K, 2 * ffn), "down": (ffn, N)}
    return nn.ModuleList(
        fq.GroupedLinear(4, *shape, False, name=name, **options) for name, shape in shapes.items()
    )


def run_mlp(
    first: nn.Module, last: nn.Module, x: Tensor, ends: Tensor, shares: Tensor | None, fuses: bool
) -> Tensor:
    """down(silu(g) * u * shares): quantized as it is computed, or by the kernels that this
    replaces. Without shares, of rows that have no routes."""
    order = torch.arange(len(x), device=x.device).flip(0)  # the route of each row
    back = order.argsort().view(-1, 1)
    if not fuses:
        kind = norm.ACTIVATIONS["swiglu"].kind
        h = norm_op.activate(first(x, ends), None, kind, packed=True)[0]
        if shares is None:
            return last(h, ends)
        return last((h * shares[order]).to(h.dtype), ends)[back[:, 0]]
    routes = () if shares is None else (order, back)
    y, h = first(x, ends, (), Around(True, routes, shares))
    return last(h, ends, (), Around(y, routes))


def random_shares(rows: int) -> Tensor:
    shares = laws.values(rows, 1, seed=3, dtype=torch.float32).cuda()
    shares[::5] = 0.0
    return shares.requires_grad_()


@pytest.mark.parametrize("frozen", [None, "gate_up", "down"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_swiglu_is_that_of_the_kernels_it_replaces(name: str, frozen: str | None, monkeypatch):
    """If false, SwiGLU or its gradient has other bits where it is quantized as it is computed: rows
    of another group, columns of another half, or values that are rounded elsewhere."""
    # which would move products between runs
    monkeypatch.setattr(guard, "apply_underflow_policy", lambda: None)
    # halves of one tile, of several, and of others: one tile has columns of both, the last is cut
    for ffn in (128, K, 208, 288):
        experts = mlp(ONE_PRODUCT[name](), ffn)
        for layer in experts:
            layer.weight.requires_grad_(layer._name != frozen)
        splits = *SPLITS, [300, 0, 129, 1], [1, 15, 128, 380], [0, 0, 0, 7]
        for sizes, has_routes in itertools.product(splits, (True, False)):
            ends, ran = torch.tensor(sizes).cumsum(0).int().cuda(), []
            x, dy = (
                laws.values(sum(sizes), cols, seed=cols, kind="outliers").to(BF16).cuda()
                for cols in (K, N)
            )
            for fuses in (True, False):
                experts.zero_grad()
                a, shares = x.clone().requires_grad_(), random_shares(len(x))
                shares = shares if has_routes else None
                y = run_mlp(*experts, a, ends, shares, fuses)
                y.backward(dy)
                grads = [a.grad, *(layer.weight.grad for layer in experts)]
                of_shares = None if shares is None else shares.grad
                ran.append([of_shares, y.detach(), *(g for g in grads if g is not None)])
            assert len(ran[0]) == 5 - (frozen is not None)
            (got, *_), (want, *_) = ran
            assert not has_routes or (got - want).abs().amax() <= 2**-12 * want.abs().amax()
            for i, (got, want) in enumerate(zip(*(made[1:] for made in ran))):
                laws.assert_same_bytes(got, want, f"{name} {frozen} {ffn} {sizes} {i}")


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_swiglu_in_a_graph_is_that_of_eager_mode(name: str):
    """If false, compiled or captured experts train on other activations or gradients."""
    torch.compiler.reset()
    experts, sizes = mlp(ONE_PRODUCT[name](), K), SPLITS[0]
    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    x, dy = (laws.values(sum(sizes), n, seed=n, dtype=BF16).cuda() for n in (K, N))
    x.requires_grad_()
    shares = random_shares(len(x))
    compiled = torch.compile(run_mlp, fullgraph=True)

    def step(call) -> list[Tensor]:
        x.grad = shares.grad = None
        experts.zero_grad()
        y = call(*experts, x, ends, shares, True)
        y.backward(dy)
        return [y.detach(), x.grad, shares.grad, *(layer.weight.grad for layer in experts)]

    ran = {"eager": [t.clone() for t in step(run_mlp)], "compiled": step(compiled)}
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):
            step(compiled)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ran["captured"] = step(compiled)
    graph.replay()
    for what in ("compiled", "captured"):
        for i, (got, want) in enumerate(zip(ran[what], ran["eager"])):
            laws.assert_same_bytes(got, want, f"{name} {what} {i}")


DECODED = {
    "mxfp8": recipes.mxfp8,
    "mxfp6": recipes.mxfp6,
    "fp8_block": recipes.fp8_block,
    "fp8_block/mxfp8": ONE_PRODUCT["fp8_block/mxfp8"],
}


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("name", DECODED)
def test_decoded_experts_are_those_of_a_loop(name: str, packed: bool, monkeypatch):
    """If false, GPUs whose codes no grouped kernel multiplies train other experts, or wait for
    their splits. One such is this one without its grouped kernels."""
    monkeypatch.setattr(plans, "_PLANS", {})  # plans keep what they resolved
    row = capability.ARCHITECTURES["sm_90a"]
    monkeypatch.setitem(capability.ARCHITECTURES, "sm_90a", row._replace(groups=False))
    torch.compiler.reset()
    recipe = DECODED[name]()
    module = grouped(recipe, packed, False)
    experts = loop(module, replace(recipe, accuracy="exact"))  # no anchors
    compiled = torch.compile(module, fullgraph=packed, backend="aot_eager")
    for sizes in SPLITS[:3]:
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int().cuda()
        x, dy = (laws.values(sum(sizes), cols, seed=cols).to(BF16).cuda() for cols in (K, N))
        counters.reset()
        ran = []
        for of, call in (
            (experts, lambda a: torch.cat([f(p) for f, p in zip(experts, a.split(sizes))])),
            (module, lambda a: module(a, ends)),
            *([(module, lambda a: compiled(a, ends))] if packed else []),
        ):
            for p in nn.ModuleList(of).parameters() if of is experts else of.parameters():
                p.grad = None
            a = x.clone().requires_grad_()
            if of is module and len(ran) == 1 and sizes != SPLITS[0]:  # allocated
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                y = call(a)
                y.backward(dy)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            made = {"y": y.detach(), "dx": a.grad} | gradients(of, packed and of is module)
            ran.append({what: t.clone() for what, t in made.items()})
        assert not counters.of("departure")
        for what, want in ran[0].items():
            off = (ran[1][what].double() - want.double()).norm() / want.double().norm()
            assert off < 2**-8, f"{name} {sizes} {what}: {off:.2e}"
            for again in ran[2:]:
                laws.assert_same_bytes(again[what], ran[1][what], f"{name} {sizes} {what}")


def test_tables_of_groups_are_those_of_their_ends():
    """If false, tokens are gathered into the group of another expert."""
    emulation = Operators()
    for sizes in (*SPLITS, [1] * 4, [1000, 3, 129, 0], [128, 128, 0, 256]):
        tokens, ends = sum(sizes), torch.tensor(sizes).cumsum(0)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        groups = native.token_groups(ends.int().cuda(), tokens, wrong, 7)
        assert not wrong.item()
        wanted = native.TokenGroups(emulation.token_groups(ends, tokens), len(ends))
        there = wanted.sources[:, 1] > 0
        for what, got, want in (
            ("offsets", groups.offsets, wanted.offsets),
            ("padded", groups.padded, wanted.padded),
            ("sources", groups.sources[there.cuda()], wanted.sources[there]),
        ):
            expected.assert_same(got.contiguous(), want.cuda(), f"{sizes} {what}")
        assert not groups.sources[~there.cuda(), 1].any()


@pytest.mark.parametrize("name", [*ONE_PRODUCT, *DELAYED, *TWO_LEVEL, *EXACT])
def test_codes_of_tokens_are_those_of_their_expert_alone(name: str):
    """If false, a scale serves tokens of two experts, two experts round alike, or an expert
    multiplies tokens of another.

    Experts whose weight is one give the values that rowwise codes of tokens decode to, and those of
    gradients; products of one-hot tokens for wgrad give those of columnwise codes. Sums of one term
    are rounded to bf16, by 2^-8 of it; codes are 2^-4 apart. A rotated one-hot token is 16 terms,
    added in fp32: 2^-20 of the largest.
    """
    for sizes in ([300, 0, 129, 384], [1, 15, 128, 380], [128, 256, 0, 3]):
        places = torch.cat([torch.arange(n) for n in sizes])
        for slot, cols in (("input", K), ("grad_output", N)):
            module = grouped((ONE_PRODUCT | ALSO)[name](), True, False)
            plan, device = module.common_plan, module.weight.device
            ends = torch.tensor(sizes).cumsum(0).int().to(device)
            with torch.no_grad():
                module.weight.copy_(torch.eye(N, K, device=device).expand(4, N, K))
            given = laws.values(sum(sizes), cols, seed=7, dtype=BF16).to(device)
            given[::5] *= 2.0**12
            one_hot = torch.eye(N + K - cols, dtype=BF16, device=device)[places]
            x, dy = (given, one_hot) if slot == "input" else (one_hot, given)
            x = x.clone().requires_grad_()
            y = module(x, ends)
            y.backward(dy)
            rows = (y.detach() if slot == "input" else x.grad)[:, :N].split(sizes)
            for e, part in enumerate(given.split(sizes)):
                dw = module.weight.grad[e] if slot == "input" else module.weight.grad[e].t()
                made = {ROWWISE: rows[e], COLUMNWISE: dw[: len(part)]}
                for d in Direction if len(part) else ():
                    key = None
                    if plan.hybrid(slot).is_stochastic:
                        ids = module.layers[e].runtime.ids_on(device)
                        number = QUANTIZED_TYPES.index(slot)
                        key = native.random_key(STEP.on(device), ids, number, len(part))
                    want = operand(plan, slot, part, d, key).dequantize().to(BF16)
                    what = f"{name} {sizes} {slot} {d.value} {e}"
                    got, want = made[d], want[:, : made[d].shape[1]]
                    limit = 2**-20 * float(part.abs().max()) * plan.operand(slot, d).rotated
                    off = ((got - want).abs() - want.abs() * 2**-7).max()
                    assert off <= limit, f"{what}: {off:.2e} over {limit:.2e}"


@pytest.mark.parametrize("name", DELAYED)
def test_tokens_are_scaled_by_the_history_of_their_expert(name: str):
    """If false, an expert's codes are scaled by the amaxes of another, or an amax is lost."""
    recipe, sizes = DELAYED[name](), [300, 0, 129, 595]
    module = grouped(recipe, True, False)
    plan, experts = module.common_plan, loop(module, recipe)
    sides = plan.hybrid("input").delayed_directions
    x, dy = (
        laws.values(1024, K, seed=3, dtype=BF16).cuda(),
        laws.values(1024, N, seed=4, dtype=BF16).cuda(),
    )
    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    for e, part in enumerate(x.split(sizes)):
        part *= 2.0 ** (8 * e)
    optimizers = [
        torch.optim.SGD(p, lr=2.0**-6) for p in (module.parameters(), [f.weight for f in experts])
    ]
    for _ in range(3):
        results = module(x, ends), torch.cat([f(p) for f, p in zip(experts, x.split(sizes))])
        for y in results:
            y.backward(dy)
        parts = zip(*(y.detach().split(sizes) for y in results))
        for e, (f, of_expert) in enumerate(zip(experts, parts)):
            for got, want in (of_expert, (module.weight.grad[e], f.weight.grad)):
                off = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9)
                assert off < 2**-8, f"{name} {e}: {off:.2e}"
            # products differ in their last bits, and so would weights
            f.weight.grad.copy_(module.weight.grad[e])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    kept = module._weight_state.histories
    assert len(kept) == 4 * (2 * len(sides) + len(plan.weight.delayed_directions))
    for f in experts:
        for key, history in f._weight_state.histories.items():
            expected.assert_same(kept[key].amaxes, history.amaxes, f"{key} amaxes")
            expected.assert_same(kept[key].encode_scale, history.encode_scale, f"{key} factor")


def matrices_of_experts(name: str, module):
    """Of a packed weight, quantized at once in either direction or both: of each matrix of two
    levels a label, its number, its direction, the buffers of all and the storage of it alone."""
    plan, device = module.common_plan, next(module.parameters()).device
    resolved = plan.resolved(BF16, device)
    for n, (row, col) in itertools.product((N, 80), ((True, True), (True, False), (False, True))):
        weight = laws.values(4, n, K, seed=n, dtype=BF16).cuda()
        buffers = iter(native.linear_weight(weight, resolved.call, row, col, False, [], []))
        for d in [d for d, wanted in ((ROWWISE, row), (COLUMNWISE, col)) if wanted]:
            fmt = plan.operand("weight", d)
            made = [
                next(buffers)
                for _ in range(2 + has_tensor_amax(fmt, resolved.layouts["weight"][d]))
            ]
            if d is COLUMNWISE and fmt.tensor_scale:  # side by side, each from a tile
                per_byte = 1 if len(made) == 2 else 2
                assert made[0].shape[1] * per_byte == 4 * round_up(n, 128), name
            for e, one in enumerate(weight if fmt.tensor_scale else ()):
                storages, _ = plan.weight.storages(one, [d])
                yield f"{name} {n} {row} {col} {e} {d.value}", e, d, made, storages[d]


@pytest.mark.parametrize("name", EXACT)
def test_operands_of_matrices_are_those_of_their_expert(name: str):
    """If false, an expert's 4-bit operand depends on its neighbours, or is not where its product
    reads it."""
    module = grouped(EXACT[name](), True, False)
    for what, e, d, (data, scale), compact in matrices_of_experts(name, module):
        n, want = compact.shape[0], compact.to_gemm_operand("anchored tensor")
        got = data[e * n : (e + 1) * n] if d is ROWWISE else data[:, e * round_up(n, 128) :][:, :n]
        expected.assert_same(got.contiguous(), want.data, f"{what}: codes")
        expected.assert_same(scale[e : e + 1], want.scale, f"{what}: scale")


@pytest.mark.parametrize("name", TWO_LEVEL)
def test_two_level_matrices_of_a_packed_weight_are_quantized_alone(name: str):
    """If false, an expert's codes depend on its neighbours."""
    for what, e, d, (data, scale, amaxes), want in matrices_of_experts(
        name, grouped(TWO_LEVEL[name](), True, False)
    ):
        n, of_codes, of_scales = want.shape[0], want.data, want.scale
        expected.assert_same(amaxes[e : e + 1], want.tensor_amax, f"{what}: amax")
        if d is ROWWISE:
            got = data[e * n : (e + 1) * n], scale.view(4, *of_scales.shape)[e]
        else:
            of_codes, of_scales, of_expert = (
                repack(of_codes, 4, n, K),
                of_scales.t(),
                round_up(n, 128),
            )
            codes, scales = (
                data[:, e * of_expert // 2 :],
                scale.view(len(of_scales), -1)[:, e * of_expert // 16 :],
            )
            got = codes[:, : n // 2], scales[:, : n // 16]
        expected.assert_same(got[0].contiguous(), of_codes, f"{what}: codes")
        expected.assert_same(got[1].contiguous(), of_scales.contiguous(), f"{what}: scales")


def test_values_of_groups_are_multiplied_in_fp32():
    """If false, decoded operands are summed in bf16, or scaled as another group's."""
    for sizes in (SPLITS[0], [1000, 3, 129, 0]):
        tokens = sum(sizes)
        groups = native.token_groups(torch.tensor(sizes).cumsum(0).int().cuda(), tokens)
        a, b = (
            laws.values(tokens, K, seed=1, dtype=BF16).cuda(),
            laws.values(4, N, K, seed=2, dtype=BF16).cuda(),
        )
        factors = [
            torch.tensor([1.0, 0.3, 7.0, 1e-3], device="cuda"),
            torch.tensor([3.0, 1.0, 0.1, 1e4], device="cuda"),
        ]
        for dtype in (BF16, torch.float32):
            got = grouped_gemm(
                *(native.Operand(t, f, IDENTITY) for t, f in zip((a, b), factors)),
                groups.offsets,
                out_dtype=dtype,
            )
            rows = a.double().split(sizes)
            want = torch.cat(
                [
                    x @ w.double().t() * f
                    for x, w, f in zip(rows, b, (factors[0] * factors[1]).double())
                ]
            )
            close(got, want, f"{sizes} rows {dtype}")
            width = 128 * len(groups.sources)
            x, w = (laws.values(n, width, seed=3 + n, dtype=BF16).cuda() for n in (N, K))
            got = grouped_gemm_wgrad(
                *(native.Operand(t, f, IDENTITY) for t, f in zip((x, w), factors)),
                groups.padded,
                out_dtype=dtype,
            )
            at = [slice(int(i), int(j)) for i, j in zip(groups.padded, groups.padded[1:])]
            both = (factors[0] * factors[1]).double()
            want = torch.stack(
                [x[:, s].double() @ w[:, s].double().t() * f for s, f in zip(at, both)]
            )
            close(got, want, f"{sizes} depth {dtype}")


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Sums of fp32, whose terms are of one magnitude: an error of 2^-24 a term, of at most 1024;
    and one rounding of bf16."""
    limit = 2**-14 if got.dtype is torch.float32 else 2**-8
    for e, (one, of) in enumerate(zip(got.chunk(4), want.chunk(4))):
        off = (one.double() - of).norm() / of.norm().clamp_min(1e-9)
        assert off < limit, f"{what} {e}: {off:.2e}"


@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_matrices_of_a_packed_weight_are_quantized_alone(name: str):
    """If false, an expert's codes depend on its neighbours, or anchors of tiles are not those of
    codes that were gathered."""
    module = grouped(ONE_PRODUCT[name](), True, False)
    plan, device = module.common_plan, next(module.parameters()).device
    call = plan.resolved(BF16, device).call
    weight = module.state_dict()["weight"].clone()
    exponents = torch.randint(-12, 13, (4, N // 16, K // 16), device=device)
    wide = weight * exponents.exp2().repeat_interleave(16, 1).repeat_interleave(16, 2).to(BF16)
    wide[0, :128, :128], wide[1, 5, 7], wide[2, 200, 300] = 0, torch.nan, torch.inf
    cut = wide[:, :272, :400].contiguous()
    of = [(weight, "gauss"), (wide, "wide range"), (cut, "tiles that are cut")]
    for w, what in of if name == "mxfp8" else of[:1]:
        for row, col in ((True, True), (True, False), (False, True)):
            got = native.linear_weight(w, call, row, col, False, [], [])
            for e, one in enumerate(w):
                for a, b in zip(got, native.linear_weight(one, call, row, col, False, [], [])):
                    text = f"{name} {what} {row} {col} {e}"
                    expected.assert_same(a[e].flatten(), b.flatten(), text)
            if name == "mxfp8" and row and col:
                assert_tiles(w, got)


def assert_tiles(weight: Tensor, got: list[Tensor]) -> None:
    """Operands of e4m3 in both directions are `anchored_codes` of codes that were made first."""
    for i, direction in enumerate(Direction):
        e = Encoding(format_of("mxfp8"), direction)
        for data, scale, one in zip(got[2 * i], got[2 * i + 1], weight):
            (compact,) = dispatch.encode(one, [e], None)
            codes, of_tiles = anchoring.anchored_codes(
                compact.data, compact.scale, e.fmt, direction, tiles=True
            )
            codes = codes if direction is ROWWISE else codes.t().contiguous()
            expected.assert_same(data, codes, f"{direction}: codes")
            expected.assert_same(scale.flatten(), of_tiles.flatten(), f"{direction}: scales")


@pytest.mark.parametrize("name", [*ONE_PRODUCT, *ALSO])
def test_one_product_waits_for_nothing(name: str):
    """If false, routing stalls the host in every layer."""
    module = grouped((ONE_PRODUCT | ALSO)[name](), True, name not in VALUES)
    ends = torch.tensor([300, 300, 429, 1024], dtype=torch.int32, device="cuda")
    x = laws.values(1024, K, dtype=BF16).cuda().requires_grad_()

    def step() -> None:
        module(x, ends).backward(dy)

    dy = torch.ones(1024, N, dtype=BF16, device="cuda")
    counters.reset()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not counters.of("departure")


# The passes of these are native calls in graphs.
NATIVE_PASSES = (*ONE_PRODUCT, *VALUES, *TWO_LEVEL, *EXACT)


@contextlib.contextmanager
def python_passes(are_refused: bool) -> Iterator[None]:
    """Let graphs run no `GroupedCall`, if these `are_refused`."""
    refused = {f: mock.DEFAULT for f in ("forward", "backward") if are_refused}
    with (
        mock.patch.multiple(program.GroupedCall, **refused) if refused else contextlib.nullcontext()
    ):
        for f in refused:
            getattr(program.GroupedCall, f).side_effect = AssertionError(f"{f} runs in Python")
        yield


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [*ONE_PRODUCT, *VALUES, *TWO_LEVEL, *EXACT, *ONE_BY_ONE])
def test_experts_in_a_graph_are_those_of_eager_mode(name: str, backend: str):
    """If false, graphs know other shapes than kernels write, or train other experts."""
    torch.compiler.reset()
    fq.begin_step(0)
    recipe = (ONE_PRODUCT | ALSO | ONE_BY_ONE)[name]()
    module = grouped(recipe, True, False)
    compiled = torch.compile(
        lambda a, ends: module(2 * a, ends) + 1, fullgraph=True, backend=backend
    )
    for splits in SPLITS[:2] + SPLITS[-1:]:
        x, ran = laws.values(sum(splits), K).cuda(), []
        ends = torch.tensor(splits, device="cuda").cumsum(0).int()
        for call in (lambda a, ends: module(2 * a, ends) + 1, compiled):
            module.zero_grad()
            a = x.clone().requires_grad_()
            y = call(a, ends)
            y.backward(laws.values(*y.shape, seed=1).cuda())
            ran.append((y.detach(), a.grad, module.weight.grad))
        for got, want, what in zip(*reversed(ran), ("y", "dx", "dw")):
            laws.assert_same_bytes(got, want, f"{name} {splits}: {what}")
        with python_passes(name in NATIVE_PASSES):
            compiled(a, ends).backward(laws.values(*y.shape, seed=1).cuda())
    ends, x = ends.new_tensor([256, 512, 512, 1024]), laws.values(1024, K).cuda()
    plan, shape = module.first.plan, (4, N, K)
    in_one = program.unsupported_reason(plan.of_groups, BF16, x.device, shape) is None
    plan = plan.of_groups if in_one else plan
    spec = grouped_ops._Spec(*shape, in_one, False, False, True)
    if in_one:
        spec = spec.with_step(plan, BF16, module.weight)
        assert spec.step >= 0
    step, ids = STEP.on(x.device), [layer.runtime.ids_on(x.device) for layer in module.layers]
    state, guards = (step, ids, []), [torch.zeros(3, 2, device=x.device)]
    arguments = x, None, ends, [module.weight.detach()], [], None, plan.key, spec, guards, *state
    real, fake = grouped_ops._experts(*arguments), grouped_ops._fake_forward(*arguments)
    passes = [(real, fake)]
    saved = real[1:] if in_one else [ends]
    saved += [x] * (plan.saves == "input" or not in_one)
    dy, weights = laws.values(1024, N, seed=1).cuda(), [module.weight.detach()]
    needs = [True, True, False]
    arguments = dy, None, saved, weights, [], plan.key, spec, needs, guards, *state
    backward = grouped_ops._experts_backward, grouped_ops._fake_backward
    passes.append(tuple(of_pass(*arguments) for of_pass in backward))
    is_watched = plan.resolved(BF16, x.device).is_watched
    assert bool(guards[0].any()) == is_watched, f"{name}: both passes write what products lost"
    for results in passes:
        real, fake = ([(t.shape, t.dtype, t.stride()) for t in of] for of in results)
        assert real == fake


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "turned, dtype", [(False, torch.float32), (True, BF16), (True, torch.float32)]
)
@pytest.mark.parametrize("name", [*ONE_PRODUCT])
def test_graphs_read_weights_as_they_are_stored(
    name: str, turned: bool, dtype: torch.dtype, bias: bool
):
    """If false, graphs multiply other weights than eager mode: fp32 is rounded elsewhere, or
    weights that lie transposed are encoded in the other direction, or their gradients are."""
    torch.compiler.reset()
    fq.begin_step(0)
    recipe, splits = ONE_PRODUCT[name](), SPLITS[0]
    module = grouped(recipe, True, bias, dtype)
    if turned:
        values, of_experts = module.weight.detach().mT.contiguous(), module
        module = ExpertProduct(nn.Parameter(values), of_experts.bias, True)
        module.adopt_packed([recipe] * len(splits), of_experts._name)
    compiled = torch.compile(
        lambda a, ends: module(2 * a, ends) + 1, fullgraph=True, backend="aot_eager"
    )
    x, ran = laws.values(sum(splits), K).cuda(), []
    ends = torch.tensor(splits, device="cuda").cumsum(0).int()
    for call in (lambda a, ends: module(2 * a, ends) + 1, compiled):
        module.zero_grad()
        a = x.clone().requires_grad_()
        with python_passes(call is compiled):
            y = call(a, ends)
            y.backward(laws.values(*y.shape, seed=1).cuda())
        ran.append((y.detach(), a.grad, *(p.grad for p in module.parameters())))
    for i, (got, want) in enumerate(zip(*reversed(ran))):
        laws.assert_same_bytes(got, want, f"{name}: {i}")


class Doubling(nn.Module):
    """Experts of 2 x."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.experts(2 * x, ends)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [*ONE_PRODUCT, *TWO_LEVEL])
def test_gathered_experts_in_a_graph_are_those_of_eager_mode(name: str, one_rank: None):
    """If false, experts of `fully_shard` are other experts where they are compiled."""
    ran = []
    for compiled in (False, True):
        torch.compiler.reset()
        fq.begin_step(0)
        net = Doubling(grouped((ONE_PRODUCT | ALSO)[name](), True, False))
        if compiled:
            net.compile(backend="aot_eager", fullgraph=True)
        fully_shard(net)
        ends = torch.tensor(SPLITS[0], device="cuda").cumsum(0).int()
        x = laws.values(sum(SPLITS[0]), K).cuda().requires_grad_()
        with python_passes(compiled and name in ONE_PRODUCT):
            y = net(x, ends)
            y.backward(laws.values(*y.shape, seed=1).cuda())
        (dw,) = (p.grad.to_local() for p in net.parameters())
        ran.append((y.detach(), x.grad, dw))
    for got, want, what in zip(*reversed(ran), ("y", "dx", "dw")):
        laws.assert_same_bytes(got, want, f"{name}: {what}")


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("name", [*ONE_PRODUCT, *VALUES, *ONE_BY_ONE])
def test_weights_that_lie_transposed_are_multiplied_as_others(name: str, backend: str | None):
    """If false, experts of gpt-oss or a Conv1D are quantized along the other dim, or their strides
    reach a kernel."""
    torch.compiler.reset()
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    recipe, splits = (ONE_PRODUCT | VALUES | ONE_BY_ONE)[name](), SPLITS[0]
    packed = grouped(recipe, True, True)
    turned = ExpertProduct(
        nn.Parameter(packed.weight.detach().mT.contiguous()),
        nn.Parameter(packed.bias.detach().clone()),
        True,
    )
    turned.adopt_packed([recipe] * len(splits), packed._name)
    linear, conv = nn.Linear(K, N).to("cuda", BF16), conv1d(N, K).to("cuda", BF16)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    linear, conv = (fq.convert(nn.Sequential(m), recipe)[0] for m in (linear, conv))
    x, ends = (
        laws.values(sum(splits), K).cuda(),
        torch.tensor(splits, device="cuda").cumsum(0).int(),
    )
    for modules, of in (((packed, turned), (ends,)), ((linear, conv), ())):
        ran = []
        for module in modules:
            a = x.clone().requires_grad_()
            call = (
                module
                if backend is None
                else torch.compile(lambda a, *of, m=module: m(2 * a, *of) + 1, backend=backend)
            )
            y = call(a, *of)
            y.backward(laws.values(*y.shape, seed=1).cuda())
            dw = module.weight.grad
            ran.append(
                (y.detach(), a.grad, dw if module in (packed, linear) else dw.mT, module.bias.grad)
            )
        for got, want, what in zip(*reversed(ran), ("y", "dx", "dw", "db")):
            if what == "dw":  # scales of rows and of columns multiply in another order
                torch.testing.assert_close(got, want, rtol=2**-7, atol=0.0)
            else:
                laws.assert_same_bytes(got, want, f"{name} {type(module).__name__}: {what}")


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_splits_of_a_device_stop_the_next_step(compiled: bool, monkeypatch):
    """If false, a wrong count of tokens trains on."""
    monkeypatch.setattr(bad_splits, "_WRONG", [])  # as where no pass ran before
    module = grouped(recipes.mxfp8(), True, False)
    if compiled:
        torch.compiler.reset()
        module.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.state_dict()["weight"].clone()
    x = laws.values(256, K, dtype=BF16).cuda()
    module(x, torch.tensor([64, 32, 128, 256], device="cuda")).sum().backward()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="token splits of an earlier call"):
        optimizer.step()
    expected.assert_same(module.state_dict()["weight"], before, "not stepped")


@pytest.mark.parametrize(
    "name", ["fp8_current", "fp8_block", "mxfp8", "fp8_delayed", "bf16", "mxfp8/nvfp4"]
)
def test_a_captured_step_reads_the_splits_of_its_replay(name: str):
    """If false, a replay routes tokens as the captured step did, or its scales are those of other
    groups."""
    module, eager = (grouped((ONE_PRODUCT | ALSO)[name](), True, False) for _ in range(2))
    fq.begin_step(3)  # of both, and of every replay
    x, dy = (
        laws.values(1024, K, dtype=BF16).cuda().requires_grad_(),
        laws.values(1024, N, seed=5, dtype=BF16).cuda(),
    )
    ends = torch.tensor(SPLITS[0]).cumsum(0).int().cuda()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            x.grad = module.weight.grad = None
            module(x, ends).backward(dy)
    torch.cuda.current_stream().wait_stream(beside)
    x.grad = module.weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x, ends)
        y.backward(dy)
    for sizes in SPLITS[:3]:
        ends.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        a = x.detach().clone().requires_grad_()
        eager.weight.grad = None
        want = eager(a, ends)
        want.backward(dy)
        for what, got, wanted in (
            ("y", y, want),
            ("dx", x.grad, a.grad),
            ("dw", module.weight.grad, eager.weight.grad),
        ):
            expected.assert_same(got.detach(), wanted.detach(), f"{name} {sizes} {what}")


@pytest.mark.parametrize("fills", [False, True])
def test_the_underflow_check_reads_written_tiles_alone(fills: bool):
    """If false, the check of a wgrad judges memory behind the last token: here codes of NaN."""
    module = grouped(recipes.mxfp8(), True, False)
    x, dy = (laws.values(1000, k, dtype=BF16).cuda() for k in (K, N))
    ends = torch.tensor([300, 300, 429, 1000], dtype=torch.int32, device="cuda")
    torch.use_deterministic_algorithms(fills, warn_only=True)
    try:
        fq.begin_step(0)
        module(x.requires_grad_(), ends).backward(dy)
    finally:
        torch.use_deterministic_algorithms(False)
    guard = module._linears[0].runtime.guard
    assert guard is not None and bool((guard[:, 1] > 0).all()), guard

"""`fq.GroupedLinear` on a GPU: one product for all experts is the loop over them, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16
from dist_tests.kernels.test_hopper_gemm import WHY_NOT
from dist_tests.single.hopper import Operators
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.modules.linear_op import quantize_slot
from fsdp_quant.ops import native
from fsdp_quant.recipe import QUANTIZED_TYPES

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

K, N = 512, 384
SPLITS = ([300, 0, 129, 595], [0, 0, 1024, 0], [256, 128, 0, 640], [1, 2, 0, 0])
ONE_PRODUCT = {
    "fp8_block": recipes.fp8_block, "mxfp8": recipes.mxfp8, "fp8_block/mxfp8": lambda: recipes.hybrid("fp8_block", "mxfp8"),
    "fp8_current": lambda: recipes.fp8_current(grad_element="e5m2"), "fp8_row": recipes.fp8_row,
    "fp8_current/fp8_row": lambda: recipes.hybrid("fp8_current", "fp8_row"),
    "fp8_row/fp8_block": lambda: recipes.custom(rows_and_blocks),
}
ONE_BY_ONE = {"fp8_delayed": recipes.fp8_delayed, "nvfp4": recipes.nvfp4, "bf16": recipes.identity}


def rows_and_blocks(role):
    """Rows are scaled whole, columns of tokens by 128; weights' rows and columns whole."""
    return "fp8_row" if role.tensor_type == "weight" else fq.HybridQuantizer("fp8_row", "fp8_1x128")


def grouped(recipe: fq.Recipe, packed: bool, bias: bool) -> fq.GroupedLinear:
    torch.manual_seed(0)
    return fq.GroupedLinear(4, K, N, bias, device="cuda", dtype=BF16, packed=packed, recipe=recipe)


def loop(module: fq.GroupedLinear, recipe: fq.Recipe) -> list[fq.Linear]:
    made = []
    for e, layer in enumerate(module.layers):
        name = layer._name
        made.append(fq.Linear(K, N, layer.bias is not None, device="cuda", dtype=BF16, recipe=recipe, name=name))
        with torch.no_grad():
            made[e].weight.copy_(layer.weight)
            if layer.bias is not None:
                made[e].bias.copy_(layer.bias)
    return made


def gradients(module, packed: bool) -> dict[str, Tensor]:
    if packed:
        return {n: p.grad for n, p in module.named_parameters()}
    layers = module if isinstance(module, list) else list(module.experts)
    return {n: torch.stack([layer.get_parameter(n).grad for layer in layers]) for n, _ in layers[0].named_parameters()}


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("name", [*ONE_PRODUCT, *ONE_BY_ONE])
def test_experts_are_those_of_a_loop(name: str, packed: bool):
    """If false, experts read each other's tokens, scales or weights.

    Codes are the same; sums are of the same terms in another order, rounded to bf16 (2^-8), in fp32 before a bias.
    """
    recipe = (ONE_PRODUCT | ONE_BY_ONE)[name]()
    for sizes in SPLITS:
        for bias, on_device in ((False, True), (True, False)):
            x = laws.values(sum(sizes), K, seed=3, dtype=BF16).cuda()
            dy = laws.values(sum(sizes), N, seed=4, dtype=BF16).cuda()
            module = grouped(recipe, packed, bias)
            experts, results = loop(module, recipe), []
            for of, call in (
                (module, lambda a: module(a, torch.tensor(sizes).cumsum(0).int().cuda() if on_device else sizes)),
                (experts, lambda a: torch.cat([f(part) for f, part in zip(experts, a.split(sizes))])),
            ):
                a = x.clone().requires_grad_()
                y = call(a)
                y.backward(dy)
                results.append({"y": y.detach(), "dx": a.grad} | gradients(of, packed and of is module))
            for key, want in results[1].items():
                off = (results[0][key].double() - want.double()).norm() / want.double().norm().clamp_min(1e-9)
                assert off < 2**-8, f"{name} {sizes} bias={bias} {key}: {off:.2e}"


@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_tokens_are_gathered_into_groups_as_they_are_quantized(name: str):
    """If false, codes are not those of each expert's tokens alone, or a scale serves tokens of two."""
    module, emulation = grouped(ONE_PRODUCT[name](), True, False), Operators()
    plan = module.common_plan
    device = next(module.parameters()).device
    resolved = plan.resolved(BF16, device)
    for sizes in (*SPLITS, [1] * 4, [1000, 3, 129, 0], [128, 128, 0, 256]):
        tokens, ends = sum(sizes), torch.tensor(sizes).cumsum(0)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        groups = native.token_groups(ends.int().cuda(), tokens, wrong, 7)
        assert not wrong.item()
        wanted = native.TokenGroups(emulation.token_groups(ends, tokens), len(ends))
        there = wanted.sources[:, 1] > 0
        for what, got, want in (
            ("offsets", groups.offsets, wanted.offsets), ("padded", groups.padded, wanted.padded),
            ("sources", groups.sources[there.cuda()], wanted.sources[there]),
        ):
            expected.assert_same(got.contiguous(), want.cuda(), f"{sizes} {what}")
        assert not groups.sources[~there.cuda(), 1].any()
        for slot, cols in (("input", K), ("grad_output", N)):
            x = laws.values(tokens, cols, seed=7, dtype=BF16).cuda()
            x[::5] *= 2.0**12
            made, *alone = (
                native.linear_tokens(x, resolved.call, QUANTIZED_TYPES.index(slot), row, col, None, groups)
                for row, col in ((True, True), (True, False), (False, True))
            )
            for what, data, scale in (("both", *made[:2]), ("alone", *alone[0])):
                for e, part in enumerate(x.split(sizes)):
                    at = slice(int(groups.offsets[e]), int(groups.offsets[e + 1]))
                    if part.numel():
                        want = quantize_slot(plan, slot, part, [ROWWISE], None, None, None, [])[0][ROWWISE]
                        got = scale[e] if scale.numel() == len(sizes) else _lines(scale, tokens)[:, at]
                        expected.assert_same(data[at], want.data, f"{name} {sizes} {slot} {e} {what}: codes")
                        want = want.scale if scale.numel() == len(sizes) else _lines(want.scale, len(part))
                        expected.assert_same(got.flatten(), want.flatten(), f"{name} {sizes} {slot} {e} {what}: scales")
            for what, data, scale in (("both", *made[2:]), ("alone", *alone[1])):
                of_group = plan.operand(slot, COLUMNWISE).scale_leaves_contraction
                for e, part in enumerate(x.split(sizes)):
                    at = slice(int(groups.padded[e]), int(groups.padded[e + 1]))
                    if part.numel():
                        want = quantize_slot(plan, slot, part, [COLUMNWISE], None, None, None, [])[0][COLUMNWISE]
                        filled = F.pad(want.data, (0, at.stop - at.start - len(part)))
                        sets = scale.view(len(sizes) if of_group else len(groups.sources), -1)
                        got = sets[e] if of_group else sets[at.start // 128 : at.stop // 128]
                        expected.assert_same(data[:, at], filled, f"{name} {sizes} {slot} {e} {what}: columnwise codes")
                        expected.assert_same(got.flatten(), want.scale.flatten(), f"{name} {sizes} {slot} {e} {what}: scales")


def _lines(scale: Tensor, lines: int) -> Tensor:
    """Scales of lines without those that fill up to a multiple of four."""
    return scale.view(-1, -(-lines // 4) * 4)[:, :lines] if scale.numel() > lines else scale.view(-1, lines)


@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_matrices_of_a_packed_weight_are_quantized_alone(name: str):
    """If false, an expert's codes depend on its neighbours."""
    module = grouped(ONE_PRODUCT[name](), True, False)
    plan, device = module.common_plan, next(module.parameters()).device
    call = plan.resolved(BF16, device).call
    weight = module.state_dict()["weight"].clone()
    for row, col in ((True, True), (True, False), (False, True)):
        got = native.linear_weight(weight, call, row, col, False, [], [])
        for e, one in enumerate(weight):
            for a, b in zip(got, native.linear_weight(one, call, row, col, False, [], [])):
                expected.assert_same(a[e].flatten(), b.flatten(), f"{name} {row} {col} {e}")


@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_one_product_waits_for_nothing(name: str):
    """If false, routing stalls the host in every layer."""
    module = grouped(ONE_PRODUCT[name](), True, True)
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


def test_wrong_splits_of_a_device_stop_the_next_step():
    """If false, a wrong count of tokens trains on."""
    module = grouped(recipes.mxfp8(), True, False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.state_dict()["weight"].clone()
    x = laws.values(256, K, dtype=BF16).cuda()
    module(x, torch.tensor([64, 32, 128, 256], device="cuda")).sum().backward()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="token splits of an earlier call"):
        optimizer.step()
    expected.assert_same(module.state_dict()["weight"], before, "not stepped")


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8"])
def test_a_captured_step_reads_the_splits_of_its_replay(name: str):
    """If false, a replay routes tokens as the captured step did, or its scales are those of other groups."""
    module, eager = (grouped(ONE_PRODUCT[name](), True, False) for _ in range(2))
    x, dy = laws.values(1024, K, dtype=BF16).cuda().requires_grad_(), laws.values(1024, N, seed=5, dtype=BF16).cuda()
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
        for what, got, wanted in (("y", y, want), ("dx", x.grad, a.grad), ("dw", module.weight.grad, eager.weight.grad)):
            expected.assert_same(got.detach(), wanted.detach(), f"{name} {sizes} {what}")

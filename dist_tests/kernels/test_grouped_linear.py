"""`fq.GroupedLinear` on a GPU: one product for all experts is the loop over them, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
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
}
ONE_BY_ONE = {"fp8_current": recipes.fp8_current, "fp8_row": recipes.fp8_row, "nvfp4": recipes.nvfp4, "bf16": recipes.identity}


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
        groups, wrong = native.token_groups(ends.int().cuda(), tokens)
        assert not wrong.item()
        for got, want in zip(groups, emulation.token_groups(ends, tokens)):
            expected.assert_same(got, want.cuda(), f"{sizes} groups")
        for slot, cols in (("input", K), ("grad_output", N)):
            x = laws.values(tokens, cols, seed=7, dtype=BF16).cuda()
            x[::5] *= 2.0**12
            spread = x.new_zeros(128 * len(groups.sources), cols)
            for e, part in enumerate(x.split(sizes)):
                spread[int(groups.padded[e]) :][: len(part)] = part
            index = QUANTIZED_TYPES.index(slot)
            made = native.linear_tokens(x, resolved.call, index, True, True, None, groups.sources)
            alone = native.linear_tokens(x, resolved.call, index, False, True, None, groups.sources)
            rows = quantize_slot(plan, slot, x, [ROWWISE], None, None, None, [])[0][ROWWISE]
            cols_of = quantize_slot(plan, slot, spread, [COLUMNWISE], None, None, None, [])[0][COLUMNWISE]
            end = int(groups.padded[-1])
            data, scale = made[2][:, :end], made[3].view(len(groups.sources), -1)[: end // 128]
            for what, got, want in (
                ("codes", made[0], rows.data), ("scales", _lines(made[1], tokens), _lines(rows.scale, tokens)),
                ("columnwise codes", data, cols_of.data[:, :end]),
                ("columnwise scales", scale, cols_of.scale.view(len(groups.sources), -1)[: end // 128]),
                ("codes alone", alone[0][:, :end], data),
                ("scales alone", alone[1].view(len(groups.sources), -1)[: end // 128], scale),
            ):
                expected.assert_same(got.contiguous(), want.contiguous(), f"{name} {sizes} {slot} {what}")


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

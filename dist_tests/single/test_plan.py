# SPDX-License-Identifier: Apache-2.0
"""`fq.plan(on=..)`: the plan of a GPU from a machine without one, and the memory of a rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.single import hopper
from fsdp_quant.inspection.plan import ModelPlan
from fsdp_quant.ops.capability import ARCHITECTURES

FAST = {"mxfp8", "fp8_delayed", "fp8_row", "fp8_block"}
RECIPES = [*sorted(FAST), "nvfp4", "mxfp4", "mxfp8/bf16"]


class MLP(nn.Module):
    def __init__(self, width: int = 256, hidden: int = 512):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    parts = MLP(), fq.GroupedLinear(4, 256, 256, packed=True), nn.Linear(256, 48)
    return nn.Sequential(*parts).bfloat16()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_plan_for_a_gpu_is_the_plan_on_that_gpu(arch: str):
    """If false, a dry run on a laptop promises products that the GPU does not run, or blames
    float32 and the reference."""
    for recipe in RECIPES:
        planned = fq.plan(fq.convert(net(), recipe), on=arch)
        with torch.device("meta"):
            meta = nn.Sequential(MLP(), fq.GroupedLinear(4, 256, 256, packed=True))
        assert fq.plan(fq.convert(meta.bfloat16(), recipe), on=arch).gemms == planned.gemms[:-3]
        with hopper.emulated(arch):
            on_gpu = fq.plan(fq.convert(net(), recipe))
        assert planned.gemms == on_gpu.gemms and planned.notes == on_gpu.notes, recipe
        assert bool(fq.is_native(recipe, arch)) == all(
            row.domain in ("native", "anchored") for row in planned.gemms if row.module == "2"
        )
        if arch == "sm_90a" and recipe in FAST:
            assert {row.domain for row in planned.gemms} <= {"native", "anchored"}
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU; name one, such as 'sm_90a'"):
            fq.plan(fq.convert(net(), "mxfp8"), on="cuda")
    for name in ("sm_91", "h100"):
        with pytest.raises(ValueError, match=f"'{name}' is no GPU of ours: wanted one of sm_80"):
            fq.plan(fq.convert(net(), "mxfp8"), on=name)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that the graph of a forward keeps, apart from parameters and x."""
    memory: dict[int, int] = {}
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}

    def keep(t: Tensor) -> Tensor:
        if (address := t.untyped_storage().data_ptr()) not in known:
            memory[address] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = model(x)
    assert y.requires_grad
    return sum(memory.values())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4", "bf16"])
def test_memory_is_what_a_step_holds(recipe: str):
    """If false, a run that was planned to fit does not, or a model that fits is cut over ranks."""
    tokens, model = 384, fq.convert(MLP().bfloat16(), recipe)
    x = torch.randn(tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    planned = fq.plan(model, tokens=tokens).memory
    assert planned.weights == planned.gradients == 2 * 3 * 256 * 512
    kept = planned.codes + planned.per_token * tokens
    kept -= x.nbytes * (recipe == "bf16")  # x itself, which the caller has
    assert 0.97 * kept <= saved_bytes(model, x) <= 1.03 * kept
    assert f"and 384 tokens at least {planned.peak / 2**20:,.1f}" in str(planned)
    if recipe == "fp8_current":  # there gate and up save the codes of x once
        assert fq.plan(model, on="sm_90a").memory.per_token == 256 + 2 * 2 * 512 + 512
    if recipe != "bf16":
        fq.freeze(model.requires_grad_(False))
        frozen = fq.plan(model, tokens=tokens)
        assert frozen.memory.weights < 0.6 * planned.weights
        assert frozen.memory.gradients == frozen.memory.codes == 0
        assert frozen.memory.per_token == 2 * 2 * 512  # gate(x) and up(x)
        assert {row.product for row in frozen.gemms} == {"fprop", "dgrad"}
        assert ModelPlan.of_facts(frozen.facts()) == frozen

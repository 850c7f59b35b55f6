# SPDX-License-Identifier: Apache-2.0
"""Frozen bases under `fully_shard`: shards of codes, gathered as codes, with the bits of one
process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import kinds
from dist_tests.laws import assert_same_bytes, values
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.single import hopper
from dist_tests.single.test_hold import held_bytes
from fsdp_quant.tensor.frozen import gathered_codes
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.torch_compat import local_of, managed_params_of

RECIPES = {
    "mxfp8": (fq.recipes.mxfp8(), 1.04),
    "fp8_block": (fq.recipes.fp8_block(), 1.02),
    "fp8_current": (fq.recipes.fp8_current(), 1.01),
    "mxfp4": (fq.recipes.by_name("mxfp4"), 0.54),
    "nvfp4": (fq.recipes.nvfp4(), 0.57),
}


class Adapted(nn.Module):
    """y = base(x) + b(a(x)), whose base does not train."""

    def __init__(self, rows: int, k: int):
        super().__init__()
        self.base = nn.Linear(k, rows, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(k, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(recipe: fq.Recipe, rows: int = 96) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(rows, 64), nn.ReLU(), Adapted(64, rows)).bfloat16()
    return fq.convert(net, recipe, skip=["*.a", "*.b"])


def step(model: nn.Module) -> list[Tensor]:
    """Output, and gradients of the input and of the adapters."""
    model.zero_grad()
    fq.begin_step(0)
    x = values(8, 64).requires_grad_()
    with fq.token_offset(0):
        y = model(x)
        y.float().square().mean().backward()
    grads = (p.grad for p in model.parameters() if p.requires_grad)
    return [
        y.detach(),
        x.grad,
        *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads),
    ]


def sharded(model: nn.Module, **options) -> nn.Module:
    for part in (model[0], model[2], model):
        fully_shard(part, **options)
    return model


def bases(model: nn.Module) -> list[Tensor]:
    return [local_of(model[i].base.weight) for i in (0, 2)]


def frozen(recipe: fq.Recipe, rows: int, before: bool) -> nn.Module:
    """Sharded. before:  frozen before fully_shard, else after it."""
    model = adapted(recipe, rows)
    if before:
        assert fq.freeze(model) == 2
    sharded(model)
    if not before:
        assert fq.freeze(model) == 2
    return model


CASES = [
    *(("mxfp8", 96, True), ("mxfp8", 33, False), ("fp8_block", 33, True)),
    *(("fp8_current", 33, False), ("nvfp4", 33, True), ("mxfp4", 96, False)),
]


def _alike(rank: int, world: int, cases: list) -> None:
    for name, rows, before in cases:
        recipe, most = RECIPES[name]
        whole = adapted(recipe, rows)
        fq.freeze(whole)
        model = frozen(recipe, rows, before)
        if name == "nvfp4":
            model[0].compile(backend="aot_eager")
        for a, b in zip(step(model), step(whole), strict=True):
            assert_same_bytes(a, b, f"{name}, {rows} rows, frozen before: {before}")
        held = held_bytes(*bases(model))
        assert rows == 33 or held <= most * 2 * 96 * 64 / world, f"{name}: {held}"


def _alike_on_hopper(rank: int, world: int) -> None:
    with hopper.emulated():
        _alike(rank, world, CASES[::2])


def test_a_frozen_base_is_sharded_as_codes():
    """If false, ranks that share a frozen base train other adapters than one process, or hold and
    gather high-precision values of it."""
    run_ranks(2, _alike, CASES)


@on_cpu
def test_native_shards_of_a_frozen_base_are_codes():
    """If false, the memory in which kernels write the codes of a group holds more than them."""
    run_ranks(2, _alike_on_hopper)


def _lives(rank: int, world: int, folder: str) -> None:
    recipe = fq.recipes.nvfp4()
    model = sharded(adapted(recipe, 48))
    values = [p.detach().clone() for p in bases(model)]
    codes = fq.state_dict(model)["codes"]
    fq.freeze(model)
    assert fq.state_dict(model)["codes"] == codes
    planned = fq.plan(model)
    fq.reset_receipt()
    want = step(model)
    assert sum(planned.gathered_bytes) == fq.receipt().gathered_bytes > 0
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    optimizer.step()
    trained = step(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    again = frozen(recipe, 48, before=True)
    for a, b in zip(step(again), want, strict=True):
        assert_same_bytes(a, b, "before the load")
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    for a, b in zip(step(again), trained, strict=True):
        assert_same_bytes(a, b, "resumed")
    state["model"]["0.base.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="0.base.weight is a quantized parameter without values"):
        again.load_state_dict(state["model"])
    fq.export(model, f"{folder}/codes")
    read = fq.from_pretrained_quantized(
        sharded(adapted(recipe, 48)), f"{folder}/codes", frozen=True
    )
    for a, b in zip(step(read), trained, strict=True):
        assert_same_bytes(a, b, "read from the files")
    for a, b in zip(bases(read), bases(model), strict=True):
        assert_same_bytes(a.rowwise.data, b.rowwise.data, "codes of the files")
    decoded = [w.dequantize() for w in bases(model)]
    assert fq.unfreeze(model) == 2
    for got, want_, high in zip(bases(model), decoded, values, strict=True):
        assert not isinstance(got, QuantizedTensor)
        assert_same_bytes(got.inner, want_, "unfrozen")
        assert got.shape == high.shape
    step(model)


def test_a_sharded_frozen_base_is_planned_saved_and_resumed(tmp_path):
    """If false, a run over a frozen base cannot be resumed, or its bytes are not those of the
    plan."""
    run_ranks(2, _lives, str(tmp_path))


class Uneven(nn.Module):
    """Three experts, of which two ranks have two and one."""

    def __init__(self, experts: fq.GroupedLinear):
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, [7, 0, 9])


def _experts(kind: str, recipe: fq.Recipe) -> nn.Module:
    torch.manual_seed(0)
    if kind != "uneven":
        return kinds.converted(kind, recipe).bfloat16().requires_grad_(False)
    experts = fq.GroupedLinear(3, 64, 96, packed=True, recipe=recipe, name="e")
    return Uneven(experts.bfloat16()).requires_grad_(False)


def _routed(model: nn.Module) -> list[Tensor]:
    fq.begin_step(0)
    x = kinds.batch().bfloat16().requires_grad_()
    with fq.token_offset(0):
        y = model(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad]


def _experts_alike(rank: int, world: int, folder: str) -> None:
    with pytest.raises(ValueError, match="experts.gate_up_proj_product.weight is a DTensor"):
        fq.freeze(fully_shard(_experts("gpt_oss", RECIPES["mxfp8"][0])))
    cases = ("uneven", "nvfp4", True), ("mixtral", "mxfp4", False), ("gpt_oss", "mxfp8", True)
    for kind, name, before in cases:
        recipe, most = RECIPES[name]
        whole, model = _experts(kind, recipe), _experts(kind, recipe)
        count = fq.freeze(whole)
        if before:
            fq.freeze(model)
        fully_shard(model)
        if not before:
            assert fq.freeze(model) == count
        for a, b in zip(_routed(model), _routed(whole), strict=True):
            assert_same_bytes(a, b, f"{kind} {name}, frozen before: {before}")
        model.reshard()
        packed = [p.to_local() for p in model.parameters() if p.dim() == 3]
        for local in packed:
            held = sum(b.untyped_storage().nbytes() for b in local._pair.shown.values())
            assert held <= most * local.numel(), f"{kind} {name}: {held}"
        assert fq.state_dict(model)["codes"] == fq.state_dict(whole)["codes"]
        values = [local.dequantize() for local in packed]
        if kind == "uneven":
            fq.export(model, folder)
            read = fq.from_pretrained_quantized(
                fully_shard(_experts(kind, recipe)), folder, frozen=True
            )
            for a, b in zip(_routed(read), _routed(whole), strict=True):
                assert_same_bytes(a, b, "read from the files")
        for m, of_whole in zip(managed_params_of(model), whole.parameters(), strict=True):
            if isinstance(of_whole, QuantizedTensor):
                assert_same_bytes(gathered_codes(m).dequantize(), of_whole.dequantize(), m.fqn)
        if kind == "gpt_oss":
            with pytest.raises(ValueError, match="call fq.unfreeze before fully_shard"):
                fq.unfreeze(model)
            continue
        assert fq.unfreeze(model) == count
        decoded = [p.to_local().inner for p in model.parameters() if p.dim() == 3]
        for got, want in zip(decoded, values, strict=True):
            assert_same_bytes(got, want, "unfrozen")
        _routed(model)


def test_frozen_experts_are_sharded_as_codes(tmp_path):
    """If false, ranks that share frozen experts multiply other codes than one process, or hold
    values of them."""
    run_ranks(2, _experts_alike, str(tmp_path / "codes"))

"""What is read, planned and saved of sharded models: values of quantized parameters, plans, states of ranks and of wrappers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from dist_tests.multi.harness import run_ranks
from dist_tests.single.test_hold import held_bytes
from fsdp_quant.tensor.torch_compat import local_of


def _quantized(rows: int = 64, k: int = 64, recipe: fq.Recipe | None = None, dtype=torch.bfloat16) -> nn.Module:
    recipe = recipe or fq.recipes.mxfp8()
    with fq.quantized_model_init(recipe):
        torch.manual_seed(0)
        return fq.convert(nn.Sequential(nn.Linear(k, rows, bias=False)).to(dtype), recipe)


def _reads(rank: int, world: int) -> None:
    for rows in (64, 33, 1):  # 33: uneven shards; 1: a rank without rows
        for state in ("values", "master", "codes"):
            model = _quantized(rows)
            want = model[0].weight.inner.detach().clone()
            decoded = model[0].weight.dequantize()
            weight = fully_shard(model)[0].weight
            optimizer = None if state == "values" else fq.optim.FusedAdam(model.parameters())
            model(values(4, 64))  # makes codes
            del optimizer
            what = f"{rows} rows, {state}"
            want = decoded if state != "values" else want
            full = weight.full_tensor()
            assert type(full) is torch.Tensor
            assert_same_bytes(full, want, what)
            assert_same_bytes(torch.cat(_gathered(weight.to_local().dequantize(), rows, world)), decoded, f"{what}: decoded")
            norm = want.float().norm()
            for got in (weight.norm(), torch.linalg.vector_norm(weight), torch.nn.utils.get_total_norm([weight]),
                        torch._foreach_norm([weight])[0]):
                torch.testing.assert_close(got.full_tensor().float(), norm, rtol=1e-2, atol=0.0)
            saved = model.state_dict()["0.weight"].full_tensor()
            assert_same_bytes(saved.bfloat16(), want, f"{what}: saved")
            assert fq.state_dict(model)["codes"].keys() == {"0.weight"}
            try:
                weight * 2
            except NotImplementedError as error:
                assert "full_tensor() or to_local().dequantize()" in str(error)
            else:
                raise AssertionError("a product decoded silently")


def _gathered(local: torch.Tensor, rows: int, world: int) -> list[torch.Tensor]:
    chunk = -(-rows // world)
    padded = torch.cat([local, local.new_zeros(chunk - len(local), local.shape[1])])
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [part[: max(0, min(chunk, rows - r * chunk))] for r, part in enumerate(parts)]


def test_sharded_quantized_parameters_are_read_as_values():
    """If false, whoever logs, gathers, clips by or saves a parameter meets an operator that codes refuse."""
    run_ranks(2, _reads)


def _frozen(rank: int, world: int) -> None:
    for recipe in (fq.recipes.mxfp8(), fq.recipes.fp8_current()):
        model = fully_shard(_quantized(96, recipe=recipe)).requires_grad_(False)
        x = values(8, 64).requires_grad_()
        want = model(x)
        (gradient,) = torch.autograd.grad(want.float().sum(), [x])
        codes = fq.state_dict(model)["codes"]
        assert fq.freeze(model) == 1
        assert held_bytes(local_of(model[0].weight)) < 2.1 * 96 * 64 / world, "values are held beside codes"
        for _ in range(2):
            got = model(x)
            assert_same_bytes(got, want, "output")
            assert_same_bytes(torch.autograd.grad(got.float().sum(), [x])[0], gradient, "gradient")
        assert fq.state_dict(model)["codes"] == codes


def test_frozen_sharded_parameters_hold_codes_alone():
    """If false, a frozen base under fully_shard costs values and codes of it, or gathers others."""
    run_ranks(2, _frozen)


def _plans(rank: int, world: int) -> None:
    """Blocks that were converted one by one have layers of equal names."""
    blocks = [fq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), fq.recipes.mxfp8()) for _ in range(4)]
    model = fully_shard(nn.Sequential(*blocks))
    planned = fq.plan(model)
    one = 64 * 64 + 128  # of codes and scales; a root keeps both directions
    assert planned.weight_bytes == {f"{i}.0.weight": (2 * one, 0) for i in range(4)}, planned.weight_bytes
    fq.reset_receipt()
    model(torch.randn(8, 64)).sum().backward()
    assert planned.bytes_per_step() == fq.receipt().gathered_bytes == 4 * 2 * one


def test_layers_of_equal_names_are_planned_each():
    """If false, fq.plan counts the bytes of one of them for all."""
    run_ranks(2, _plans)

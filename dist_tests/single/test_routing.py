# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back: sums over a token's experts and their gradients, by the
reference, in graphs, and on an emulated GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes
from dist_tests.single import hopper
from dist_tests.single.test_fuse import tiny
from fsdp_quant.models import routing_op
from fsdp_quant.ops import routing

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def routes(tokens: int, copies: int, experts: int = 8, kind: str = "spread") -> tuple[Tensor, ...]:
    """(order, back) of tokens whose experts are drawn; of the first three only; or all the last."""
    shape, g = (tokens, copies), torch.Generator("cpu").manual_seed(tokens)
    of = {"spread": experts, "few": 3}.get(kind, 1)
    chosen = torch.randint(of, shape, generator=g, device="cpu") + (experts - 1) * (kind == "one")
    order = chosen.flatten().sort(stable=True).indices
    return order, order.argsort().view(shape)


CASES = [(5, 1, 8, "spread"), (7, 2, 8, "few"), (33, 8, 40, "spread"), (3, 4, 16, "one")]


def passed(x: Tensor, weights: Tensor, dy: Tensor, order: Tensor, back: Tensor, run) -> dict:
    """y and the gradients of tokens through dispatch, a function of rows, and combine."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows = routing_op.dispatch(x, order, back)
    y = routing_op.combine(run(rows), back, weights)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}


def by_torch(x: Tensor, weights: Tensor, dy: Tensor, order: Tensor, back: Tensor, run) -> dict:
    """The same of copies that nobody sorts, in fp64."""
    x, weights = (t.double().requires_grad_() for t in (x, weights))
    copied = x.repeat_interleave(back.shape[1], 0)
    y = (run(copied).view(*back.shape, -1) * weights[..., None]).sum(1)
    y.backward(dy.double())
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}


def double(rows: Tensor) -> Tensor:
    return rows * -2


@pytest.mark.parametrize(("tokens", "copies", "cols", "kind"), CASES)
def test_tokens_come_back_as_the_sums_over_their_experts(
    tokens: int, copies: int, cols: int, kind: str
):
    """If false, a token gets rows of another one, experts without tokens shift rows, or the router
    trains on other gradients."""
    order, back = routes(tokens, copies, kind=kind)
    for dtype, of_weights in ((BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64)):
        x, dy = (laws.values(tokens, cols, seed=s, dtype=dtype) for s in range(2))
        weights = laws.values(tokens, copies, seed=2, dtype=of_weights)
        given = x, weights, dy, order, back, double
        got, want = passed(*given), by_torch(*given)
        for name, one in want.items():
            assert got[name].dtype is (of_weights if name == "dweights" else dtype)
            # two roundings of dx: of each row's gradient, and of their sum
            unit = torch.finfo(got[name].dtype).eps + copies * torch.finfo(dtype).eps / 2
            largest = one.abs().amax() + 1
            assert (got[name].double() - one).abs().amax() <= unit * largest, (name, dtype)


def test_sums_are_in_order_and_rounded_once():
    """If false, bits depend on where experts lie, or a sum of eight experts is rounded eight
    times."""
    order, back = routes(9, 8)
    rows, weights = laws.values(72, 24, seed=1), laws.values(9, 8, seed=2, dtype=FP32)
    for w in (weights, weights.to(BF16), None):
        total = torch.zeros(9, 24)
        for j in range(8):
            term = rows[back[:, j]].float()
            total = total + (term if w is None else term * w[:, j, None].float())
        assert_same_bytes(routing.combine(rows, back, w), total.to(BF16), str(w))
    moved = torch.randperm(72)  # as if other experts had the tokens
    want = routing.combine(rows, back, weights)
    assert_same_bytes(routing.combine(rows[moved], moved.argsort()[back], weights), want, "moved")


@pytest.mark.parametrize("on_gpu", [False, True], ids=["reference", "emulated"])
def test_graphs_hold_one_operator_each_and_have_the_bits_of_eager_mode(on_gpu: bool):
    """If false, torch.compile fuses sums in another order, or a graph breaks at the experts."""
    torch.compiler.reset()
    order, back = routes(12, 2)
    x, dy = laws.values(12, 32, seed=1), laws.values(12, 32, seed=2)
    weights = laws.values(12, 2, seed=3, dtype=FP32)
    with hopper.emulated() if on_gpu else contextlib.nullcontext() as gpu:
        want = passed(x, weights, dy, order, back, double)
        compiled = torch.compile(
            lambda x, w: routing_op.combine(double(routing_op.dispatch(x, order, back)), back, w),
            backend="aot_eager",
            fullgraph=True,
        )
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        y = compiled(*leaves)
        y.backward(dy)
        for name, got in zip(want, (y.detach(), *(t.grad for t in leaves))):
            assert_same_bytes(got, want[name], name)
        if gpu is not None:  # eager and compiled
            assert (gpu.count("combine"), gpu.count("combine_backward")) == (4, 2)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_kernels_route_the_tokens_of_packed_experts(family: str):
    """If false, a mixture of experts copies its tokens by operators of torch where kernels run, or
    they compute something else."""
    ids = torch.arange(32).view(1, 32)

    def step() -> tuple[Tensor, ...]:
        net = fq.convert(tiny(family), fq.recipes.mxfp8(), skip="lm_head")
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), *(layer.mlp.gate.weight.grad for layer in net.model.layers)

    want = step()
    with hopper.emulated() as gpu:
        got = step()
    assert (gpu.count("combine"), gpu.count("combine_backward")) == (4, 2), "of two layers"
    for a, b in zip(got, want):  # products of codes are exact there
        assert (a.double() - b.double()).norm() <= 4e-2 * b.double().norm()


def test_weights_without_a_gradient_save_no_rows():
    """If false, frozen routers keep what every expert made until the backward."""
    order, back = routes(6, 2)
    rows = laws.values(12, 16, seed=1).requires_grad_()
    for needed in (False, True):
        weights = laws.values(6, 2, seed=2).requires_grad_(needed)
        with laws.recorded_saves() as saved:
            y = routing_op.combine(rows, back, weights)
        assert any(t.shape == rows.shape for t in saved) is needed
        y.sum().backward(retain_graph=True)
        assert (weights.grad is not None) is needed
    (gradient,) = torch.autograd.grad(y.sum(), rows, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_no_tokens_are_no_rows():
    """If false, a rank without tokens fails."""
    order, back = (t.long() for t in (torch.empty(0), torch.empty(0, 2)))
    given = torch.empty(0, 16), torch.empty(0, 2), torch.empty(0, 16), order, back, double
    for name, got in passed(*given).items():
        assert got.shape == given[name == "dweights"].shape

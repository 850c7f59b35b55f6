# SPDX-License-Identifier: Apache-2.0
"""`fq.numerics.batch_invariant` on a GPU: rows of batches of 1, 8 and 4096 have the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.kernels import expected
from dist_tests.single.test_batch_invariant import LOCAL, MADE, TOKEN

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS, WIDTH, HIDDEN, OUT = 4096, 4096, 1024, 392  # few columns of a long K: libraries split it
# (first, last) of each batch: of 1, of 8 within a tile and across two, and of odd sizes
BATCHES = ((0, 1), (63, 64), (4095, 4096), (0, 8), (124, 132), (4088, 4096), (5, 138), (700, 1729))


def net(recipe: fq.Recipe, dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": dtype}
    layers = nn.Linear(WIDTH, HIDDEN, bias=False, **options), nn.Linear(HIDDEN, OUT, **options)
    return fq.convert(nn.Sequential(layers[0], nn.ReLU(), layers[1]), recipe)


def tokens(dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=FP32, generator=generator)
    return (x * torch.logspace(-3, 3, TOKENS, device="cuda")[:, None]).to(dtype)


def differing(run: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[int, int]]:
    whole = run(x)
    assert whole.isfinite().all()
    return [(a, b) for a, b in BATCHES if not torch.equal(run(x[a:b]), whole[a:b])]


@pytest.mark.parametrize("recipe", LOCAL)
@torch.no_grad()
def test_a_token_has_its_bits_in_every_batch(recipe: str):
    """If false, prefill and decode, or a trainer and a server, are two policies."""
    model, x = net(LOCAL[recipe]()), tokens()
    with fq.numerics.batch_invariant():
        assert not differing(model, x)
        inside = model(x)
    torch.testing.assert_close(inside, model(x), rtol=0.05, atol=0.05 * inside.abs().max().item())


@torch.no_grad()
def test_the_batch_orders_sums_outside():
    """The control: if false, the tests here cannot fail."""
    x = tokens()
    assert any(differing(net(LOCAL[recipe]()), x) for recipe in ("identity", "fp8_row", "mxfp8"))


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("recipe", MADE)
@torch.no_grad()
def test_other_dtypes_are_multiplied_a_tile_at_a_time(recipe: str, dtype: torch.dtype):
    """If false, the sums of a library depend on a row's place in a tile of 128."""
    model, x = net(LOCAL[recipe](), dtype), (tokens() / 1000).to(dtype)
    with fq.numerics.batch_invariant():
        assert not differing(model, x)


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "mxfp8"])
@torch.no_grad()
def test_experts_and_fused_modules_are_invariant(recipe: str):
    """If false, a mixture of experts, or a norm and an MLP in fused kernels, take another path than
    single layers."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": BF16, "recipe": LOCAL[recipe]()}
    experts, x = fq.GroupedLinear(3, WIDTH, HIDDEN, bias=False, **options), tokens()
    mlp = fq.LayerNormMLP(WIDTH, HIDDEN, bias=False, normalization="RMSNorm", **options)
    ends = torch.tensor([1000, 1001, TOKENS], device="cuda")
    with fq.numerics.batch_invariant():
        whole = experts(x, ends)
        few = experts(torch.cat([x[3:4], x[1100:1108]]), torch.tensor([1, 1, 9], device="cuda"))
        assert torch.equal(few, torch.cat([whole[3:4], whole[1100:1108]]))
        assert not differing(mlp, x)


@torch.no_grad()
def test_compiled_and_captured_layers_have_the_bits_of_eager_ones():
    """If false, a server that compiles or captures its steps has other bits than the trainer."""
    torch.compiler.reset()
    model, x = net(TOKEN()), tokens()
    run = torch.compile(model, fullgraph=True)
    outside = model(x)
    with fq.numerics.batch_invariant():
        whole = model(x)
        assert all(torch.equal(run(x[a:b]), whole[a:b]) for a, b in ((0, TOKENS), (0, 8), (7, 8)))
        rows, stream = x[:8].clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = model(rows)
    for start in (0, 40, 4088):
        rows.copy_(x[start : start + 8])
        graph.replay()
        assert torch.equal(y, whole[start : start + 8])
    graph.reset()
    assert torch.equal(run(x), outside) and torch.equal(model(x), outside)

# SPDX-License-Identifier: Apache-2.0
"""Kernels that encode gradients for their owners and sum what came have the reference's bytes."""

from __future__ import annotations

import pytest
import torch

from dist_tests.kernels import expected
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant.ops.gradient_codes import (
    GRADIENT_FORMATS,
    GradientLayout,
    decode_gradients,
    encode_gradients,
    gradient_keys,
)

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

# Rows that owners do not divide, one row, a vector, pieces of odd lengths, more than a block.
SHAPES = ((37, 48), (1, 8), (5,), (3, 7, 11), (0, 4), (130, 1025), (257, 2048))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.0e38, 1e-45, -1e-30)


def gradients(dtype: torch.dtype, special: bool) -> list[torch.Tensor]:
    grads = [values(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]
    for i, grad in enumerate(grads if special else ()):
        flat = grad.view(-1)
        for k, value in enumerate(SPECIAL):
            if flat.numel() > 300 * k + i:
                flat[300 * k + i] = value
        flat[1024:2048] *= 0
    return grads


def keys_of(count: int) -> torch.Tensor:
    return torch.tensor([[2**40 + 7, 3, 1000 + i, i << 16, 0] for i in range(count)])


@pytest.mark.parametrize("count", (1, 5, 128, 300))
def test_keys_and_their_count_are_those_of_the_reference(count: int):
    """If false, ranks with kernels round other gradients alike than the definition does, or a
    captured step repeats the bits of its capture."""
    idents = torch.arange(count) * 2**33 + 7
    counted, on_gpu = (torch.full((4,), -1, device=d) for d in ("cpu", "cuda"))
    steps = [(2**40, 3, 0), (2**40, 3, 0), (2**40, 3, 1), (2**40, 4, 1), (-1, -1, -1), (-1, -1, -1)]
    field, ids = torch.zeros(5, dtype=torch.int64, device="cuda"), idents.cuda()
    assert expected.launches(lambda: gradient_keys(field, ids, on_gpu)) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient_keys(field, ids, on_gpu)
    on_gpu.fill_(-1)
    for i, step in enumerate(steps):
        now = torch.tensor([*step, 7, 1])
        field.copy_(now)
        want = gradient_keys(now, idents, counted)
        if i % 2:
            got = gradient_keys(field, ids, on_gpu)
        else:
            graph.replay()
            got = captured
        assert torch.equal(got.cpu(), want) and torch.equal(on_gpu.cpu(), counted), step


@pytest.mark.parametrize("special", (False, True), ids=("finite", "special"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("world", (1, 2, 3, 8))
@pytest.mark.parametrize("name", GRADIENT_FORMATS)
def test_codes_and_sums_are_those_of_the_reference(name, world, dtype, special):
    """If false, ranks with kernels and the definition differ in what a gradient is."""
    grads = gradients(dtype, special)
    layout = GradientLayout(SHAPES, world, name)
    keys = keys_of(len(grads)) if layout.is_stochastic else None
    want = encode_gradients(grads, layout, keys)
    got = encode_gradients(
        [g.cuda() for g in grads], layout, None if keys is None else keys.cuda()
    ).cpu()
    for part, theirs in zip(layout.sections(got), layout.sections(want)):
        if name == "bf16" and part is not None:  # NaNs of other bits
            torch.testing.assert_close(part, theirs, rtol=0, atol=0, equal_nan=True)
        elif part is not None:
            assert_same_bytes(part, theirs, f"{name}, {world} owners")
    received = torch.cat([want[(i % world) : (i % world) + 1] for i in range(world)])
    for out_dtype in (torch.float32, torch.bfloat16):
        sums = [torch.empty(sum(layout.numels), dtype=out_dtype) for _ in range(2)]
        decode_gradients(received, layout, sums[0], 1 / 3)
        on_gpu = sums[1].cuda()
        decode_gradients(received.cuda(), layout, on_gpu, 1 / 3)
        torch.testing.assert_close(on_gpu.cpu(), sums[0], rtol=0, atol=0, equal_nan=True)


def test_a_gradient_that_does_not_fit_is_refused():
    """If false, a kernel writes outside of a buffer."""
    layout = GradientLayout(((8, 16),), 2, "bf16")
    buffer = torch.zeros(2, layout.nbytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=r"wanted \[owners, "):
        encode_gradients([torch.zeros(16, 16, device="cuda")], layout, None, buffer)

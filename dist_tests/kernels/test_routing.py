# SPDX-License-Identifier: Apache-2.0
"""The sum of a token's rows over its experts, and its backward, on a GPU: the bytes of the
reference; of sums over columns what fp32 allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, FP32
from dist_tests.laws import assert_same_bytes
from dist_tests.single.test_routing import (
    BUFFERS,
    BY_ROUTES,
    COUNTS,
    by_torch,
    double,
    multiplied,
    passed,
    pieces_move,
    routes,
    rows_of,
    rows_travel,
)
from fsdp_quant.linear import routes as routes_of
from fsdp_quant.ops import native, routing

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

# tokens, copies, columns: one team or several a block, parts of a row, more copies than are loaded
# at once, fewer threads than a warp.
SIZES = (
    (1, 1, 8),
    (100, 2, 24),
    (33, 3, 768),
    (257, 8, 2048),
    (40, 6, 2880),
    (19, 8, 7168),
    (50, 9, 264),
    (11, 17, 4104),
)


@pytest.mark.parametrize("of_weights", [None, BF16, FP32], ids=["none", "bf16", "fp32"])
def test_kernels_have_the_bytes_of_the_reference(of_weights: torch.dtype | None):
    """If false, experts of a GPU are summed in another order than those of the reference, or a row
    goes to another token."""
    for tokens, copies, cols in SIZES:
        what = f"[{tokens}, {copies}] of {cols}"
        _, back = routes(tokens, copies)
        rows, dout = (laws.values(n, cols, seed=n) for n in (tokens * copies, tokens))
        weights = None if of_weights is None else laws.values(tokens, copies, dtype=of_weights)
        on_gpu = [None if t is None else t.cuda() for t in (dout, rows, back, weights)]
        got = native.combine(*on_gpu[1:])
        assert_same_bytes(got.cpu(), routing.reference_combine(rows, back, weights), what)
        without, none = native.combine_backward(on_gpu[0], None, *on_gpu[2:])
        want, _ = routing.reference_combine_backward(dout, None, back, weights)
        assert_same_bytes(without.cpu(), want, f"drows {what}")
        assert none is None
        if weights is None:
            continue
        drows, dweights = native.combine_backward(*on_gpu)
        assert_same_bytes(drows, without, f"drows without rows {what}")
        exact = rows[back].double() * dout.double()[:, None]
        bound = 2**-18 * exact.abs().sum(2) + torch.finfo(of_weights).eps * exact.sum(2).abs()
        assert dweights.dtype is of_weights and dweights.shape == back.shape
        assert ((dweights.cpu().double() - exact.sum(2)).abs() <= bound).all(), what
        again = native.combine_backward(*on_gpu)[1]
        assert_same_bytes(again, dweights, f"dweights {what}, again")


@pytest.mark.parametrize("kind", ["spread", "few", "one"])
def test_autograd_of_tokens_and_experts_is_torchs(kind: str):
    """If false, experts without tokens, or one with all, train another model on a GPU."""
    order, back = (t.cuda() for t in routes(65, 4, kind=kind))
    x, dy = (laws.values(65, 520, seed=s).cuda() for s in range(2))
    weights = laws.values(65, 4, seed=2, dtype=FP32).cuda()
    given = x, weights, dy, order, back, double
    got = passed(*given)
    for name, want in by_torch(*given).items():
        assert (got[name].double() - want).norm() <= 2**-7 * want.norm(), name
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, w: routes_of.combine(double(routes_of.dispatch(x, order, back)), back, w),
        fullgraph=True,
    )
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    y = compiled(*leaves)
    y.backward(dy)
    for name, one in zip(got, (y.detach(), *(t.grad for t in leaves))):
        assert_same_bytes(one, got[name], f"compiled {name}")


def test_a_captured_graph_reads_new_values():
    """If false, a replay adds up rows of the step that was captured."""
    order, back = (t.cuda() for t in routes(64, 4))
    dy = laws.values(64, 256, seed=9).cuda()

    def step(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        y = routes_of.combine(double(routes_of.dispatch(x, order, back)), back, weights)
        return y, *torch.autograd.grad(y, (x, weights), dy)

    leaves = [laws.values(64, n, seed=n).cuda().requires_grad_() for n in (256, 4)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(*leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-3)
    graph.replay()
    for i, (got, want) in enumerate(zip(made, step(*leaves))):
        assert_same_bytes(got, want, f"result {i}")


@pytest.mark.parametrize("kind", ["spread", "few", "one"])
@pytest.mark.parametrize("name", [*BY_ROUTES, "identity"])
def test_quantizers_read_tokens_by_routes(name: str, kind: str):
    """If false, a kernel that reads rows by their order encodes other rows than a copy has, or rows
    behind a group of tokens."""
    torch.compiler.reset()
    want = multiplied(name, kind, False, device="cuda", size=4)
    for compiled in (False, True):
        got = multiplied(name, kind, True, compiled, device="cuda", size=4)
        for what, one in want.items():
            assert_same_bytes(got[what], one, f"{what}, compiled {compiled}")


@pytest.mark.parametrize("name", BY_ROUTES)
def test_quantizers_read_gradients_of_tokens(name: str):
    """If false, a kernel that quantizes gradients by their routes has other bits than one that is
    given a copy for each."""
    torch.compiler.reset()
    want = multiplied(name, "few", True, device="cuda", size=4, sums=False)
    for compiled in (False, True):
        got = multiplied(name, "few", True, compiled, device="cuda", size=4, sums=True)
        for what, one in want.items():
            assert_same_bytes(got[what], one, f"{what}, compiled {compiled}")


def test_non_finite_values_come_through():
    """If false, an overflow of an expert is hidden."""
    _, back = routes(4, 2)
    for bad in (float("nan"), float("inf")):
        rows, weights = torch.ones(8, 64, dtype=BF16), torch.ones(4, 2)
        rows[back[1, 0], 7] = bad
        y = native.combine(rows.cuda(), back.cuda(), weights.cuda()).cpu()
        assert (~y.isfinite()).nonzero().tolist() == [[1, 7]]


def test_slices_are_taken_and_other_tensors_refused():
    """If false, rows that begin between 16 bytes are read wrongly, or indexes of 32 bits as of
    64."""
    _, back = (t.cuda() for t in routes(6, 2))
    rows = laws.values(12 * 16 + 4, seed=1).cuda()
    shifted = rows[4:].view(12, 16)
    want = native.combine(shifted.clone(), back, None)
    assert_same_bytes(native.combine(shifted, back, None), want, "shifted")
    wide = laws.values(12, 32, seed=2).cuda()
    want = native.combine(wide[:, :16].clone(), back, None)
    assert_same_bytes(native.combine(wide[:, :16], back, None), want, "columns")
    combine, good = torch.ops.fsdp_quant.combine, wide.view(12, 32)
    for given, text in (
        ((good, back.int(), None), "back is"),
        ((good[:11], back, None), "rows has shape"),
        ((wide[:, :12].clone(), back, None), "columns in eights"),
        ((good.float(), back, None), "rows is"),
        ((good, back, back.double()), "weights is"),
        ((good, back.flatten(), None), "back has shape"),
    ):
        with pytest.raises(ValueError, match=text):
            combine(*given)


@pytest.mark.parametrize("kind", BUFFERS)
def test_rows_of_buffers_travel_together(kind: list):
    """If false, a token arrives at a GPU with another's codes or scales."""
    for rows in (0, 1, 37, 5000):
        rows_travel(kind, rows, "cuda")


def test_rows_are_moved_from_any_address():
    """If false, buffers that begin between 16 bytes are read wrongly."""
    wide = torch.arange(6 * 64, dtype=torch.uint8, device="cuda").view(6, 64)
    for buffer in (wide.flatten()[3:123].view(6, 20), wide[:, 5:21], wide[::2], wide[1:]):
        (got,) = routing.unpack_rows(routing.pack_rows([buffer, buffer]), None, [buffer, buffer])[
            :1
        ]
        assert_same_bytes(got, buffer.contiguous(), f"{buffer.shape} {buffer.stride()}")
    pack, unpack = torch.ops.fsdp_quant.pack_rows, torch.ops.fsdp_quant.unpack_rows
    for call, text in (
        (lambda: pack([wide] * 5, None), "got 5 buffers"),
        (lambda: pack([wide, wide[:2]], None), "a buffer is"),
        (lambda: pack([wide], torch.zeros(2, dtype=torch.int32, device="cuda")), "index is"),
        (lambda: unpack(wide, None, [wide, wide]), "packed rows are"),
        (lambda: unpack(wide.t(), None, rows_of(BUFFERS[1], 1, "cuda")), "packed rows are"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("counts", [*COUNTS, [[7 * r + e for e in range(32)] for r in range(8)]])
def test_rows_that_move_in_pieces_come_back(counts: list[list[int]]):
    """If false, an expert of a GPU multiplies tokens of another."""
    pieces_move(counts, "cuda")

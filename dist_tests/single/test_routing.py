# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back: sums over a token's experts and their gradients, by the
reference, in graphs, and on an emulated GPU."""

from __future__ import annotations

import contextlib
import inspect
import itertools

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes
from dist_tests.single import hopper, test_swiglu
from dist_tests.single.test_fuse import tiny
from fsdp_quant.inspection.calls import call_of
from fsdp_quant.linear import grouped_linear, grouped_ops
from fsdp_quant.linear import routes as routes_of
from fsdp_quant.ops import routing
from fsdp_quant.ops.reference import known

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def chosen(tokens: int, copies: int, kind: str) -> Tensor:
    """Experts, of 8, of each token: drawn of all; of the first three only; or all the last."""
    g, most = torch.Generator("cpu").manual_seed(tokens), {"spread": 8, "few": 3}.get(kind, 1)
    drawn = torch.randint(most, (tokens, copies), generator=g, device="cpu")
    return drawn + 7 * (kind == "one")


def routes(tokens: int, copies: int, kind: str = "spread") -> tuple[Tensor, Tensor]:
    """(order, back)."""
    order = chosen(tokens, copies, kind).flatten().sort(stable=True).indices
    return order, order.argsort().view(tokens, copies)


def ends(tokens: int, copies: int, kind: str = "spread") -> Tensor:
    """The row behind each expert's last."""
    experts = chosen(tokens, copies, kind).flatten()
    return torch.bincount(experts, minlength=8).cumsum(0).int()


CASES = [(5, 1, 8, "spread"), (7, 2, 8, "few"), (33, 8, 40, "spread"), (3, 4, 16, "one")]


def passed(x: Tensor, weights: Tensor, dy: Tensor, order: Tensor, back: Tensor, run) -> dict:
    """y and the gradients of tokens through dispatch, a function of rows, and combine."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows = routes_of.dispatch(x, order, back)
    y = routes_of.combine(run(rows), back, weights)
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
    order, back = routes(tokens, copies, kind)
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


def test_no_call_inspects_a_signature(monkeypatch: pytest.MonkeyPatch):
    """If false, each call of a layer pays for what torch looks up to fill default arguments, which
    no function of ours has."""
    order, back = routes(6, 2)
    x, rows = laws.values(6, 32, seed=1), laws.values(12, 32, seed=1)
    weights, layer = laws.values(6, 2, seed=2, dtype=FP32), fq.Linear(32, 32, recipe="mxfp8")

    def total(w: Tensor) -> Tensor:
        return routes_of.combine(rows, back, w).float().sum()

    (want,) = torch.autograd.grad(total(leaf := weights.clone().requires_grad_()), leaf)
    assert_same_bytes(torch.func.grad(total)(weights), want, "of torch.func")
    asked, signature = [], inspect.signature

    def ask(function, **options):
        asked.append(function)
        return signature(function, **options)

    monkeypatch.setattr(torch.autograd.function.inspect, "signature", ask)
    passed(x, weights, x, order, back, lambda rows: layer(rows.float()).to(BF16))
    assert not asked


def test_frames_between_graphs_have_the_bits_of_eager_mode():
    """If false, a layer that a compiled model calls outside its graphs, where dynamo compiles each
    function by itself, raises."""
    torch.compiler.reset()
    order, back = routes(6, 2)
    x, weights = laws.values(6, 32, seed=1), laws.values(6, 2, seed=2, dtype=FP32)
    layer = fq.Linear(32, 32, recipe="mxfp8", name="between")
    args = x, weights, x, order, back, lambda rows: layer(rows.float()).to(BF16)
    between = torch.compiler.disable(passed, recursive=False)
    want, got = passed(*args), torch.compile(lambda: between(*args), backend="aot_eager")()
    for name, value in want.items():
        assert_same_bytes(got[name], value, name)


def test_sums_are_in_order_and_rounded_once():
    """If false, bits depend on where experts are, or a sum of eight experts is rounded eight
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
            lambda x, w: routes_of.combine(double(routes_of.dispatch(x, order, back)), back, w),
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
    assert (gpu.count("combine"), gpu.count("combine_backward")) == (4, 0), "of two layers"
    for a, b in zip(got, want):  # products of codes are exact there
        assert (a.double() - b.double()).norm() <= 6e-2 * b.double().norm()


def multiplied(
    name: str,
    kind: str,
    routed: bool,
    compiled: bool = False,
    device: str = "cpu",
    size: int = 1,
    sums: bool | None = None,
) -> dict[str, Tensor]:
    """Two steps of 8 experts, of tokens by their routes or of copies of them, and an evaluation.
    sums: of each token's rows, by the layer (True) or after it."""
    torch.manual_seed(0)
    tokens, (k, n) = 40 * size, (64 * size, 48 * size)
    order, back, bounds = (t.to(device) for t in (*routes(tokens, 3, kind), ends(tokens, 3, kind)))
    made, results = {"dtype": BF16, "recipe": fq.recipes.by_name(name), "name": "experts"}, {}
    has_bias = name == "fp8_row" and sums is None
    module = fq.GroupedLinear(8, k, n, has_bias, device=device, packed=True, **made)
    around = routes_of.Around(False, (order, back) if sums else ())

    def forward(x: Tensor) -> Tensor:
        if routed:
            y = module(x, bounds, (order, back), around)
        else:
            y = module(routes_of.dispatch(x, order, back), bounds, (), around)
        return y if sums is not False else routes_of.combine(y, back, None)

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    with laws.kept_step():
        fq.begin_step(0)
        for step in range(2):
            x = laws.values(tokens, k, seed=step).to(device).requires_grad_()
            y = run(x)
            y.backward(laws.values(*y.shape, seed=5).to(device))
            results |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
        forward(x.detach()).float().square().sum().backward()
        results |= {f"d{n}": p.grad for n, p in module.named_parameters()}
        with torch.no_grad():
            results["evaluated"] = forward(x)
        x = x.detach().requires_grad_()
        module.requires_grad_(False)
        y = forward(x)
        y.backward(laws.values(*y.shape, seed=6).to(device))
    return results | {"dx of frozen": x.grad}


BY_ROUTES = "mxfp8", "fp8_block", "fp8_current", "fp8_row", "fp8_delayed", "nvfp4"


@pytest.mark.parametrize("name", [*BY_ROUTES, "identity"])
def test_products_that_read_tokens_by_routes_have_the_bits_of_copies(name: str, monkeypatch):
    """If false, experts multiply other tokens than a loop, or every token is copied for each of its
    experts before it is quantized."""
    torch.compiler.reset()
    cases = [("few", name in ("mxfp8", "fp8_delayed", "identity")), ("one", False)]
    for kind, compiled in cases:
        with hopper.emulated() as gpu:
            want = multiplied(name, kind, False)
            copies, dispatch = [], routes_of.dispatch
            for module, called in (grouped_linear, "dispatch"), (grouped_ops, "dispatch_tokens"):
                seen = lambda *args: copies.append(args) or dispatch(*args)  # noqa: E731
                monkeypatch.setattr(module, called, torch.compiler.allow_in_graph(seen))
            for in_graph in {False, compiled}:
                before = gpu.count("combine")
                got = multiplied(name, kind, True, in_graph)
                for what, one in want.items():
                    assert_same_bytes(got[what], one, f"{name} {kind} {what}, {in_graph}")
                assert gpu.count("combine") == before + 3, "one for each dx"
            assert bool(copies) is (name == "identity")


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "fp8_current", "fp8_row", "nvfp4"])
def test_layers_that_sum_the_rows_of_a_token_have_the_bits_of_a_sum_after_them(name: str):
    """If false, experts quantize other gradients than a sum hands to each row."""
    torch.compiler.reset()
    with hopper.emulated() as gpu:
        want = multiplied(name, "few", True, sums=False)
        for routed, compiled in (True, False), (False, False), (True, name == "mxfp8"):
            before = gpu.count("routed")
            got = multiplied(name, "few", routed, compiled, sums=True)
            assert got.keys() == want.keys()
            for what, one in want.items():
                assert_same_bytes(got[what], one, f"{name} {what}, {routed}, {compiled}")
            assert (gpu.count("routed") - before > 0) is (name != "nvfp4")


def test_inspection_sees_the_rows_of_routed_tokens():
    """If false, fq.inspect and fq.calibrate measure tokens of other experts, or fail on them."""
    order, back = routes(6, 2)
    x, module = laws.values(6, 16), fq.GroupedLinear(8, 16, 16, packed=True, recipe="mxfp8")
    for args, given in (((x, ends(6, 2), (order, back)), {}), ((x, ends(6, 2)), {})):
        _, rows, sizes, _ = known(call_of(module, args, given), "the call")
        assert_same_bytes(rows, x[order // 2] if len(args) > 2 else x, "rows")
        assert sum(sizes or ()) == 12
    splits = {"splits": ends(6, 2), "routes": (order, back)}
    _, rows, *_ = known(call_of(module, (x,), splits), "the call")
    assert_same_bytes(rows, x[order // 2], "rows by keywords")


def test_weights_without_a_gradient_save_no_rows():
    """If false, frozen routers keep what every expert made until the backward."""
    order, back = routes(6, 2)
    rows = laws.values(12, 16, seed=1).requires_grad_()
    for needed in (False, True):
        weights = laws.values(6, 2, seed=2).requires_grad_(needed)
        with laws.recorded_saves() as saved:
            y = routes_of.combine(rows, back, weights)
        assert any(t.shape == rows.shape for t in saved) is needed
        y.sum().backward(retain_graph=True)
        assert (weights.grad is not None) is needed
    (gradient,) = torch.autograd.grad(y.sum(), rows, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_no_row_of_experts_is_saved_for_the_gradient_of_its_weight(trains: bool):
    """If false, what every expert made is kept until the backward; or frozen experts train no
    router."""
    x, index, weights = test_swiglu.inputs()
    with hopper.emulated():
        experts = test_swiglu.experts_of(fq.recipes.mxfp8()).requires_grad_(trains)
        with test_swiglu.observed(experts):
            want = torch.autograd.grad(
                experts(x, index, weights.requires_grad_()).float().square().sum(), weights
            )
        with laws.recorded_saves() as saved:
            y = experts(x, index, weights)
        assert not [t for t in saved if t.shape == (index.numel(), x.shape[1])]
        got = torch.autograd.grad(y.float().square().sum(), weights)
        assert_same_bytes(got[0], want[0], "weights")


def test_no_tokens_are_no_rows():
    """If false, a rank without tokens fails."""
    order, back = (t.long() for t in (torch.empty(0), torch.empty(0, 2)))
    given = torch.empty(0, 16), torch.empty(0, 2), torch.empty(0, 16), order, back, double
    for name, got in passed(*given).items():
        assert got.shape == given[name == "dweights"].shape


# Rows between ranks #

# trailing sizes and dtypes of the buffers: units of 16 bytes, of 8, of 2, of 1
BUFFERS = [
    [((4096,), torch.uint8), ((128,), torch.uint8)],
    [((48, 2), torch.bfloat16)],
    [((24,), torch.uint8), ((3,), FP32), ((2,), torch.int64)],
    [((6,), torch.uint8), ((5,), torch.bfloat16)],
    [((33,), torch.uint8), ((7,), torch.uint8), ((1,), torch.bool)],
]


def rows_of(kind: list, rows: int, device: str = "cpu") -> list[Tensor]:
    """Buffers of which every byte is known."""
    g = torch.Generator().manual_seed(rows)
    drawn = [
        torch.randint(2, (rows, *size), generator=g).to(of)
        if of is torch.bool
        else torch.randint(100, (rows, *size), generator=g).to(of)
        for size, of in kind
    ]
    return [t.to(device) for t in drawn]


def rows_travel(kind: list, rows: int, device: str = "cpu") -> None:
    """Packed rows, of any order, come apart as they were, in any order."""
    buffers = rows_of(kind, rows, device)
    orders = [None, torch.randperm(rows), torch.arange(rows).repeat_interleave(3)]
    for order in orders if rows else orders[:2]:
        index = None if order is None else order.to(device)
        packed = routing.pack_rows(buffers, index)
        width = sum(t.itemsize * t[:1].numel() for t in rows_of(kind, 1))
        assert packed.dtype is torch.uint8
        assert packed.shape == (rows if order is None else len(order), width)
        want = buffers if index is None else [t[index] for t in buffers]
        for back in (None, torch.randperm(len(packed)).to(device)):
            got = routing.unpack_rows(packed, back, buffers)
            assert all(t.is_contiguous() for t in got)
            for one, of in zip(got, want):
                assert_same_bytes(one, of if back is None else of[back], f"{kind} {rows} rows")


@pytest.mark.parametrize("arch", [None, "sm_90a"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_rows_of_buffers_travel_together(kind: list, arch: str | None):
    """If false, a token arrives with another's codes or scales."""
    with contextlib.nullcontext() if arch is None else hopper.emulated(arch):
        for rows in (0, 1, 37):
            rows_travel(kind, rows)


@pytest.mark.parametrize(
    "x",
    [torch.ones(()).expand(0, 8), torch.ones(()).expand(1, 1), torch.ones(1, 5).t()],
    ids=["no rows", "one", "a column"],
)
def test_rows_of_any_strides_travel(x: Tensor):
    """If false, a rank without tokens raises in the backward of a sum, and the others wait."""
    (got,) = routing.unpack_rows(routing.pack_rows([x]), None, [x])
    assert_same_bytes(got, x.clone(memory_format=torch.contiguous_format), f"{x.stride()}")


def pieces_move(counts: list[list[int]], device: str = "cpu") -> None:
    """Rows by rank, then by expert, are put by expert, then by rank, and back."""
    sizes = {(r, e): n for r, of in enumerate(counts) for e, n in enumerate(of)}
    tags = [(r, e, i) for (r, e), n in sizes.items() for i in range(n)]
    want = sorted(tags, key=lambda tag: (tag[1], tag[0], tag[2]))
    ends_by_rank = dict(zip(sizes, itertools.accumulate(sizes.values())))
    by_expert = sorted(sizes, key=lambda piece: piece[::-1])
    ends = [*itertools.accumulate(sizes[piece] for piece in by_expert)]
    shifts = [ends_by_rank[piece] - end for piece, end in zip(by_expert, ends)]
    given = (torch.tensor(t, dtype=torch.int64, device=device) for t in (ends, shifts))
    order, inverse = (t.tolist() for t in routing.piece_orders(*given, len(tags)))
    assert [tags[i] for i in order] == want
    assert [want[i] for i in inverse] == tags


COUNTS = [[[3, 0, 2], [1, 4, 0]], [[0, 0], [0, 0]], [[0, 5], [0, 0], [0, 1]], [[1], [2]]]


@pytest.mark.parametrize("arch", [None, "sm_90a"])
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_that_move_in_pieces_come_back(counts: list[list[int]], arch: str | None):
    """If false, an expert multiplies tokens of another, or a result goes to another token."""
    with contextlib.nullcontext() if arch is None else hopper.emulated(arch):
        pieces_move(counts)

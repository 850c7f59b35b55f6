# SPDX-License-Identifier: Apache-2.0
"""The compiled step of a layer on a GPU: the bytes, counts and errors of its parts, with autograd's
own rules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16
from dist_tests.kernels.test_gemm import RECIPES
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.linear import fused
from fsdp_quant.linear.shared_input import Handed
from fsdp_quant.ops import dispatch, native
from fsdp_quant.ops.layout import COMPACT
from fsdp_quant.ops.norm import ACTIVATIONS

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

# M, N, K; the last has tokens of more than one run of 512
SHAPES = ((64, 48, 32), (256, 512, 384), (1040, 64, 48))


@pytest.fixture(autouse=True)
def _own_step():
    STEP.step = 0
    STEP.publish()
    counters.reset()


def layer(name: str, shape=SHAPES[1], bias: bool = False, module_name: str = "0") -> fq.Linear:
    torch.manual_seed(0)
    STEP.step = 0  # each layer begins with the random bits of the first step
    STEP.publish()
    module = torch.nn.Linear(shape[2], shape[1], bias=bias, dtype=BF16).to("cuda")
    fq.convert(torch.nn.Sequential(module), RECIPES[name]())
    return module


def batch(shape=SHAPES[1]) -> tuple[Tensor, Tensor]:
    """x [2, M / 2, K] and dy."""
    m, n, k = shape
    x, dy = (
        laws.values(m, width, seed=seed, dtype=BF16).to("cuda").view(2, m // 2, width)
        for width, seed in ((k, 4), (n, 5))
    )
    return x.requires_grad_(), dy


def run(module: fq.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    module.zero_grad()
    y.backward(dy)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def is_compiled(y: Tensor) -> bool:
    """Return whether a C++ node of the layer's call made `y`, perhaps under a bias or a reshape."""
    nodes = [y.grad_fn, *(f for f, _ in y.grad_fn.next_functions if f)]
    return any("CppNode" in f.name() and "Linear" in f.name() for f in nodes)


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_step_is_that_of_its_parts(name: str, monkeypatch):
    """If false, bytes, receipts or histories depend on whether someone looks at a layer's
    operators."""
    for shape in SHAPES:
        for bias in (True, False):
            results = []
            for one_call in (True, False):
                monkeypatch.undo()
                if not one_call:
                    monkeypatch.setattr(fused, "_is_one_call", lambda *args: False)
                module, (x, dy) = layer(name, shape, bias), batch(shape)
                # twice: nothing is kept
                compiles = one_call and name != "nvfp4 row"  # scales per row have no step
                assert is_compiled(module(x)) == is_compiled(module(x)) == compiles
                counters.reset()
                # whose counts leave for the host at times of their own
                if module.runtime.guard is not None:
                    module.runtime.guard.zero_()
                made = run(module, x, dy)
                counted = {what: counters.of(what) for what in ("gemm", "quantize")}
                layouts = module.plan_on(BF16, x.device).resolved(BF16, x.device).layouts["weight"]
                if (
                    one_call
                    and module.plan.weight.shares_storage
                    and set(layouts.values()) != {COMPACT}
                ):
                    # One call quantizes both directions in one read; the parts lay one storage out
                    # twice.
                    of_weight = (
                        module.plan.operand("weight", COLUMNWISE).name,
                        "columnwise",
                        "native",
                    )
                    counted["quantize"][of_weight] -= 1
                counted = {what: {k: n for k, n in of.items() if n} for what, of in counted.items()}
                histories = {
                    str(k): h.amaxes[0].item() for k, h in module._weight_state.histories.items()
                }
                results.append(
                    (
                        made,
                        counted,
                        histories,
                        None if module.runtime.guard is None else module.runtime.guard.tolist(),
                    )
                )
            (one, *told), (parts, *wanted) = results
            for what, tensor in parts.items():
                laws.assert_same_bytes(
                    one[what].cpu(), tensor.cpu(), f"{name} {shape} bias {bias}: {what}"
                )
            assert told == wanted, f"{name} {shape} bias {bias}"


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_a_history_collects_the_same_amax_whoever_finds_it(bad: float | None, monkeypatch):
    """If false, the next step's scale depends on who took an amax, or an overflow of one step
    spoils the next ones."""
    x, dy = batch()
    with torch.no_grad():
        if bad is not None:
            x[1, 5, 77] = bad
    for factor in (0.0, 3.7):
        results = []
        for who in ("kernel", "producer", "parts"):
            monkeypatch.undo()
            if who == "parts":
                monkeypatch.setattr(fused, "_is_one_call", lambda *args: False)
            module = layer("fp8_delayed")
            module(x), counters.reset()
            for history in module._weight_state.histories.values():
                history.amaxes.zero_()
                history.amaxes[0] = 2.0**-20
                history.encode_scale.fill_(factor)
            again, gradient = x.detach().clone().requires_grad_(), dy.clone()
            handed = Handed()
            if who == "producer":
                handed = Handed(again.detach().abs().amax().float().view(1))
                handed.grad_amaxes = gradient.abs().amax().float().view(1)
            y = module(again, handed)
            y.backward(gradient)
            made = {"y": y.detach(), "dx": again.grad, "dw": module.weight.grad}
            results.append(
                made | {str(k): h.amaxes for k, h in module._weight_state.histories.items()}
            )
        for other in results[1:]:
            for what, want in results[0].items():
                laws.assert_same_bytes(other[what].cpu(), want.cpu(), f"{what}, factor {factor}")


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4", "mxfp8/nvfp4"])
def test_recomputation_and_saved_tensor_hooks_change_no_bit(name: str):
    """If false, checkpointing or offloading trains another model."""
    x, dy = batch()
    want = run(layer(name), x, dy)
    for reentrant in (True, False):
        module, again = layer(name), x.detach().requires_grad_()
        checkpoint(module, again, use_reentrant=reentrant).backward(dy)
        laws.assert_same_bytes(
            again.grad.cpu(), want["dx"].cpu(), f"{name} checkpointed, reentrant {reentrant}"
        )
        laws.assert_same_bytes(
            module.weight.grad.cpu(), want["weight"].cpu(), f"{name} checkpointed: weight"
        )
    module, kept = layer(name), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.shape) or t.cpu(), lambda t: t.cuda()
    ):
        got = run(module, x, dy)
    assert kept
    for what, tensor in want.items():
        laws.assert_same_bytes(got[what].cpu(), tensor.cpu(), f"{name} offloaded: {what}")


# Gradients of a bias #


def column_sums_bound(x: Tensor) -> Tensor:
    """Of the error: one rounding to bf16, and of fp32 sums one for each term that a value goes
    through: 8 rows, 2 halves, 8 warps, every 16th tile, 16 parts."""
    depth = 34 + x.shape[0] / 2048
    return 2.0**-8 * x.double().sum(0).abs() + (depth + 1) * 2.0**-24 * x.double().abs().sum(0)


def test_column_sums_are_those_of_fp32():
    """If false, the gradient of a bias loses tokens or bits."""
    for shape in ((1, 1), (33, 47), (128, 128), (200, 328), (1040, 2064), (5000, 136)):
        whole = torch.randint(-8, 9, shape, device="cuda").to(BF16)  # any sum is exact
        laws.assert_same_bytes(
            dispatch.column_sums(whole).cpu(),
            whole.float().sum(0).to(BF16).cpu(),
            f"whole numbers {shape}",
        )
        x = laws.values(*shape, dtype=BF16, kind="outliers").to("cuda")
        for rows in (x, x.t().contiguous().t(), torch.cat((x, x), 1)[:, : shape[1]]):
            got = dispatch.column_sums(rows)
            assert bool(((got.double() - x.double().sum(0)).abs() <= column_sums_bound(x)).all()), (
                shape
            )
            laws.assert_same_bytes(
                got.cpu(), dispatch.column_sums(x).cpu(), f"strides {rows.stride()}"
            )
    for bad in (float("nan"), float("inf")):
        x = torch.ones(300, 200, device="cuda", dtype=BF16)
        x[222, 77] = bad
        assert dispatch.column_sums(x).isfinite().logical_not().nonzero().tolist() == [[77]]


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_bias_gradient_is_the_same_whoever_adds_it_up(name: str):
    """If false, the gradient of a bias depends on which launch read dy first: one for statistics,
    one behind a grid barrier, or the one that encodes, with statistics that a producer left."""
    for tokens in (208, 1040):
        shape = (tokens, 2064, 64)
        x, dy = batch(shape)
        dy = dy.view(tokens, -1)
        want = dispatch.column_sums(dy)
        for produced in (False, True):
            for needs_x, needs_w in ((True, True), (True, False), (False, True)):
                module = layer(name, shape, bias=True)
                module.weight.requires_grad_(needs_w)
                gradient = dy.clone()
                # produced: as a kernel of activations leaves them
                handed = Handed(grad_amaxes=lines_of(gradient)[0] if produced else None)
                module(x.detach().view(tokens, -1).requires_grad_(needs_x), handed).backward(
                    gradient
                )
                what = f"{tokens} tokens, produced {produced}, needs {needs_x} {needs_w}"
                assert bool(
                    (
                        (module.bias.grad.double() - dy.double().sum(0)).abs()
                        <= column_sums_bound(dy)
                    ).all()
                ), what
                if module.plan.grad_output.side(ROWWISE).fmt.is_quantized:
                    laws.assert_same_bytes(module.bias.grad.cpu(), want.cpu(), what)


def lines_of(x: Tensor) -> Tensor:
    """Amaxes of all, rows and runs of x: those of an activation that leaves it as it is."""
    h, amaxes = native.activation(x.abs(), None, ACTIVATIONS["relu"].kind)
    laws.assert_same_bytes(h.cpu(), x.abs().cpu(), "relu of magnitudes")
    return amaxes


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_bias_gradient_under_an_override_is_that_of_the_plain_layer(override: str):
    """If false, a mode without codes of the gradient loses its bias."""
    x, dy = batch()
    module = torch.nn.Linear(384, 512, dtype=BF16, device="cuda")
    plain = copy.deepcopy(module)
    fq.convert(torch.nn.Sequential(module), fq.recipes.mxfp8(backward_override=override))
    run(module, x, dy), run(plain, x, dy)
    laws.assert_same_bytes(module.bias.grad.cpu(), plain.bias.grad.cpu(), override)


def test_a_bias_costs_no_read_of_the_gradient():
    """If false, the gradient of a bias is a pass of its own."""
    x, dy = batch()
    for name in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"):
        counts = []
        for bias in (False, True):
            module = layer(name, bias=bias)
            run(module, x, dy)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                run(module, x, dy)
            seen = {kind: 0 for kind in ("quantize_", "sum_partials", "at::native::reduce")}
            for e in profile.key_averages():
                for kind in seen:
                    seen[kind] += e.count * (kind in e.key)
            counts.append(seen)
        without, with_bias = counts
        assert with_bias == without | {"sum_partials": without["sum_partials"] + 1}, name


# Gradients that are not needed #


def test_what_is_not_needed_is_not_made():
    """If false, frozen weights and first layers pay for gradients that nobody reads."""
    x, dy = batch()
    for frozen in (True, False):
        module = layer("fp8_current")
        module.weight.requires_grad_(not frozen)
        again = x.detach().requires_grad_(frozen)
        counters.reset()
        module(again).backward(dy)
        made = {d for _, d, _ in counters.of("quantize")}
        assert counters.total("gemm") == 2 and (again.grad is not None) == frozen == (
            module.weight.grad is None
        ), made


def test_the_graph_is_autograds():
    """If false, a backward multiplies a weight of after its forward, or a second derivative or a
    freed graph goes unseen."""
    module, (x, dy) = layer("fp8_current"), batch()
    y = module(x)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward(dy)
    laws.assert_same_bytes(x.grad.cpu(), first.cpu(), "a retained graph")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(dy)
    y = module(x)
    with torch.no_grad():
        module.weight.mul_(2)
    x.grad = None
    y.backward(dy)
    laws.assert_same_bytes(x.grad.cpu(), first.cpu(), "the node owns the codes of its forward")
    (dx,) = torch.autograd.grad(module(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.float().square().sum().backward()
    with torch.no_grad():
        assert module(x).grad_fn is None
    with torch.inference_mode():
        assert module(x).grad_fn is None


def test_random_keys_and_histories_are_those_of_torch():
    """If false, random bits or delayed scales depend on where they are made."""
    step = torch.tensor([2**40 + 5, 7, 3, -1, 6])
    ids = torch.tensor([11, 12, 2**32 - 1 + (48 << 32)])  # of a part whose columns begin at 48
    for offset in (-1, 0, 4096):
        step[3] = offset
        want = torch.tensor(
            [2**40 + 5, 7, 2**32 - 1, 3, (6 * 128 if offset < 0 else offset) + (48 << 40)]
        )
        assert torch.equal(dispatch.random_key(step.cuda(), ids.cuda(), 2, 128).cpu(), want)
        assert torch.equal(dispatch.random_key(step, ids, 2, 128), want)
    for amax in (0.0, 0.5, 3.0, float("inf"), float("nan")):
        histories = [torch.tensor([1.0, 9.0], device=device) for device in ("cpu", "cuda")]
        for h in histories:
            dispatch.record_amax(h, torch.tensor([[amax]], device=h.device))
        assert torch.equal(histories[0], histories[1].cpu()), amax

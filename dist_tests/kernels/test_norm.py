# SPDX-License-Identifier: Apache-2.0
"""Norms and activations on a GPU: the reference's values within what fp32 allows, amaxes of the
bytes they wrote."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16
from dist_tests.kernels.test_gemm import RECIPES
from dist_tests.laws import assert_same_bytes
from dist_tests.single.test_fuse import Packed
from fsdp_quant.context import STEP
from fsdp_quant.formats import round_up
from fsdp_quant.linear.shared_input import Handed
from fsdp_quant.models import norm_op
from fsdp_quant.ops import native, norm, rng
from fsdp_quant.ops.norm import ACTIVATIONS, KINDS, NormSpec

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

DTYPES = (BF16, torch.float16, torch.float32)
# A result and its intermediate round to the dtype: where two fp32 values lie on both sides of a tie
# they are one unit apart, which the product carries on. Two units in the last place, relative: 2 *
# 2^-7, 2 * 2^-10. fp32 itself: exp, erf, tanh and rsqrt are good to a few units, sums of n terms to
# log2(n) more.
UNITS = {BF16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}
SLACK = 2**-17  # of the largest magnitude that is added up: slopes and normalized gradients cancel
SHAPES = ((7, 8), (128, 4096), (33, 1000), (3, 16384), (1000, 136), (700, 2048))
WITH_KERNELS = [name for name, activation in ACTIVATIONS.items() if activation.has_kernel]


def on_gpu(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return laws.values(*shape, seed=seed, dtype=dtype).to("cuda")


def assert_close(got: Tensor, want: Tensor, scale: Tensor | float, what: str) -> None:
    """want: fp64; scale: magnitude of what was added up."""
    assert got.shape == want.shape, what
    info = torch.finfo(got.dtype)
    # what lies below the normal numbers rounds to multiples of it
    smallest = info.smallest_normal * info.eps
    bound = UNITS[got.dtype] * want.abs() + SLACK * scale + smallest
    worst = ((got.double() - want).abs() - bound).max()
    assert worst <= 0, f"{what}: {worst.item()} beyond the bound"


def assert_amax(amax: Tensor, x: Tensor, what: str) -> None:
    """Of all of x; and where a kernel gives them, of its rows, and of its columns over 512 rows."""
    assert_same_bytes(amax[:1], x.float().abs().amax().view(1), f"amax of {what}")
    if amax.numel() > 1:
        rows = x.shape[0]
        magnitudes, runs = x.float().abs(), 4 + round_up(rows, 4)
        assert_same_bytes(amax[4 : 4 + rows], magnitudes.amax(1), f"amaxes of rows of {what}")
        of_runs = torch.stack([run.amax(0) for run in magnitudes.split(512)])
        assert_same_bytes(amax[runs:], of_runs.flatten(), f"amaxes of runs of {what}")


# Activations #


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_activation_is_the_references(name: str, dtype: torch.dtype):
    """If false, a model's activation or its gradient is another function where the kernels run."""
    kind, gated = ACTIVATIONS[name]
    for shape in SHAPES:
        wide = on_gpu(shape[0], 2 * shape[1], seed=1, dtype=dtype) * 3
        for g, u in (
            (wide[:, : shape[1]], wide[:, shape[1] :]),
            (wide[:, : shape[1]].contiguous(), on_gpu(*shape, seed=2, dtype=dtype)),
        ):
            u = u if gated else None
            dh = on_gpu(*shape, seed=3, dtype=dtype)
            h, amax = norm.activation(g, u, kind)
            dg, du, amaxes = norm.activation_backward(dh, g, u, kind)
            exact = [t if t is None else t.double() for t in (dh, g, u)]
            assert_close(
                h,
                norm.reference_activation(*exact[1:], kind),
                0.0 if "relu" in name else h.double().abs().max(),
                "h",
            )
            wanted = norm.reference_activation_backward(*exact, kind)
            scale = (exact[0] if u is None else exact[0] * exact[2]).abs().max() * 4
            assert_close(dg, wanted[0], scale, "dg")
            assert_amax(amax, h, "h"), assert_amax(amaxes[0], dg, "dg")
            if gated:
                (
                    assert_close(du, wanted[1], exact[0].abs().max(), "du"),
                    assert_amax(amaxes[1], du, "du"),
                )


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_one_tensor_have_the_bytes_of_two(dtype: torch.dtype):
    """If false, an MLP whose gate and up are one product trains to other weights, or its gradient
    is scaled by another's amaxes."""
    kind = ACTIVATIONS["swiglu"].kind
    for rows, cols in SHAPES:
        wide, dh = (
            on_gpu(rows, 2 * cols, seed=1, dtype=dtype) * 3,
            on_gpu(rows, cols, seed=3, dtype=dtype),
        )
        g, u = (t.contiguous() for t in wide.chunk(2, -1))
        want, want_amax = norm.activation(g, u, kind)
        gradient = torch.cat(norm.activation_backward(dh, g, u, kind)[:2], -1)
        # the gradient has memory of its own, or that of what nobody else has
        for is_kept in (True, False):
            leaf = wide.clone().requires_grad_()
            packed, amaxes = (
                leaf * 1,
                native.new_amaxes(leaf, rows, 2 * cols, 1).fill_(float("nan")),
            )
            kept = packed if is_kept else None
            h, amax = native.activate(packed, None, kind, amaxes, packed=True)
            packed = None
            assert_same_bytes(h, want, "h"), assert_same_bytes(amax, want_amax, "amaxes of h")
            h.backward(dh)
            assert_same_bytes(leaf.grad, gradient, "gradient")
            assert_amax(amaxes[0], gradient, "gradient")
            assert kept is None or torch.equal(kept, wide)


@pytest.mark.parametrize("name", [n for n in KINDS if n in WITH_KERNELS])
def test_activation_hides_no_overflow(name: str):
    """If false, an infinity or a NaN of gate or up is a finite number after the activation, or not
    seen by the amax."""
    for bad in (float("nan"), float("inf")):
        for where in range(2):
            g, u = (
                torch.ones(2, 4096, dtype=BF16, device="cuda"),
                torch.ones(2, 4096, dtype=BF16, device="cuda"),
            )
            (g, u)[where][1, 77] = bad
            h, amax = norm.activation(g, u, ACTIVATIONS[name].kind)
            assert (
                not h[1, 77].isfinite()
                and not amax[0].isfinite()
                and not amax[5].isfinite()
                and not amax[8 + 77].isfinite()
            )
            assert int((~amax.isfinite()).sum()) == 3
            assert int((~h.isfinite()).sum()) == 1


# Norms #


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization", ("RMSNorm", "LayerNorm"))
def test_norm_is_the_references(normalization: str, dtype: torch.dtype):
    """If false, a norm or a gradient of its input, gamma or beta is wrong where the kernels run."""
    for i, (rows, cols) in enumerate(SHAPES):
        spec = NormSpec(1e-5, normalization == "LayerNorm", bool(i % 2))
        x = on_gpu(rows, cols, seed=1, dtype=dtype) * 2 + (0.5 if spec.centred else 0)
        weight, bias = (
            on_gpu(cols, seed=2, dtype=dtype),
            on_gpu(cols, seed=3, dtype=dtype) if spec.centred else None,
        )
        dy, residual = (
            on_gpu(rows, cols, seed=4, dtype=dtype),
            on_gpu(rows, cols, seed=5, dtype=dtype),
        )
        made = norm.norm(x, weight, bias, spec)
        got = norm.norm_backward(dy, x, weight, bias, None, made.rstd, made.mean, spec)

        given = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
        gamma = given[1] + spec.zero_centered
        mean = given[0].mean(-1, keepdim=True) if spec.centred else 0
        rstd = torch.rsqrt((given[0] - mean).square().mean(-1, keepdim=True) + spec.eps)
        normal = (given[0] - mean) * rstd
        y = normal * gamma + (given[2] if spec.centred else 0)
        wanted = torch.autograd.grad(y, [t for t in given if t is not None], dy.double())
        with torch.no_grad():
            assert_close(made.y, y, (normal * gamma).abs().max(), "y")
            assert_close(made.rstd, rstd.flatten(), 0.0, "rstd")
            assert_close(
                got.dx,
                wanted[0],
                (rstd * (dy.double() * gamma).abs().amax(-1, keepdim=True)).max(),
                "dx",
            )
            assert_close(got.dweight, wanted[1], (dy.double() * normal).abs().sum(0), "dweight")
            if spec.centred:
                assert_close(got.dbias, wanted[2], dy.double().abs().sum(0), "dbias")
        assert_amax(made.amax, made.y, "y"), assert_amax(got.amax, got.dx, "dx")
        again = norm.norm_backward(dy, x, weight, bias, residual, made.rstd, made.mean, spec)
        assert_same_bytes(again.dx, got.dx + residual, "dx with a residual")
        assert_same_bytes(again.dweight, got.dweight, "dweight, again")
        assert_amax(again.amax, again.dx, "dx with a residual")


@pytest.mark.parametrize("dtype", (BF16, torch.float16))
def test_a_norm_rounds_before_gamma_where_it_is_told_to(dtype: torch.dtype):
    """If false, Llama's norms have other bits on the kernels: elsewhere rounded, two values of five
    differ."""
    spec = NormSpec(1e-5, False, False, rounds_first=True)
    for rows, cols in SHAPES:
        x, dy = (on_gpu(rows, cols, seed=seed, dtype=dtype) for seed in (1, 4))
        weight = on_gpu(cols, seed=2, dtype=dtype)
        made, (y, rstd, mean) = (
            norm.norm(x, weight, None, spec),
            norm.reference_norm(x, weight, None, spec),
        )
        got = norm.norm_backward(dy, x, weight, None, None, made.rstd, made.mean, spec)
        dx, _, _ = norm.reference_norm_backward(dy, x, weight, None, None, rstd, mean, spec)
        for what, ours, wanted in (("y", made.y, y), ("dx", got.dx, dx)):
            moved = float((ours != wanted).double().mean())  # by the last bits of fp32
            assert moved <= 0.01 + 2 / ours.numel(), (
                f"{what} [{rows}, {cols}]: {moved:.1%} of the values differ"
            )
        terms = (dy * (x.float() * rstd.view(-1, 1)).to(dtype)).double()
        assert_close(got.dweight, terms.sum(0), terms.abs().sum(0), "dweight")
        assert_amax(made.amax, made.y, "y"), assert_amax(got.amax, got.dx, "dx")


# Modules #


def mlp(name: str, **options) -> fq.LayerNormMLP:
    torch.manual_seed(0)
    rng._MADE.clear()  # random bits are keyed by names
    options = {"bias": False, "normalization": "RMSNorm", "residual": True} | options
    return fq.LayerNormMLP(256, 512, dtype=BF16, device="cuda", recipe=RECIPES[name](), **options)


def run(module: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    STEP.step = 0
    STEP.publish()
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("name", list(RECIPES))
def test_an_amax_from_the_producer_changes_no_bit(name: str, monkeypatch):
    """If false, codes depend on who took the amax: the kernel that wrote a tensor, or the one that
    quantizes it."""
    x, dy = on_gpu(2, 128, 256, seed=4), on_gpu(2, 128, 256, seed=5)
    options = {"activation": "gelu_tanh", "normalization": "LayerNorm"} if name == "fp8_row" else {}
    known = run(torch.nn.Sequential(mlp(name, **options), mlp(name, **options)), x, dy)
    step = native.linear_step
    # amaxes of x and of dy
    monkeypatch.setattr(native, "linear_step", lambda *args: step(*args[:-2], None, None))
    for what, want in run(
        torch.nn.Sequential(mlp(name, **options), mlp(name, **options)), x, dy
    ).items():
        assert_same_bytes(known[what], want, what)


@pytest.mark.parametrize("name", list(RECIPES))
def test_an_activation_quantized_as_it_is_made_changes_no_bit(name: str, monkeypatch):
    """If false, a model depends on whether the input of its last layer was written to memory."""
    x, dy = on_gpu(2, 136, 256, seed=4), on_gpu(2, 136, 256, seed=5)
    for activation in ("swiglu", "geglu", "reglu"):
        results = []
        for is_deferred in (True, False):
            monkeypatch.undo()
            if not is_deferred:
                monkeypatch.setattr(fq.Linear, "can_fuse_activation", lambda self, x: False)
            module, seen = mlp(name, activation=activation), []
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(2):  # the second with a history
                seen.append({what: t.clone() for what, t in run(module, x, dy).items()})
                optimizer.step()
            with torch.no_grad():
                seen.append({"y": module.eval()(x)})
            results.append(seen)
        for i, (one, other) in enumerate(zip(*results)):
            for what, want in other.items():
                assert_same_bytes(one[what], want, f"{activation}, step {i}: {what}")


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_packed_mlp_changes_no_bit(name: str, monkeypatch):
    """If false, a model whose gate and up are one layer depends on who wrote its activation, or who
    took the amaxes."""
    x, dy = on_gpu(2, 136, 256, seed=4), on_gpu(2, 136, 256, seed=5)
    step, results = native.linear_step, []
    for case in ("fused", "written", "no amaxes"):
        monkeypatch.undo()
        if case == "written":
            monkeypatch.setattr(fq.Linear, "can_fuse_activation", lambda self, x: False)
        elif case == "no amaxes":
            monkeypatch.setattr(native, "linear_step", lambda *args: step(*args[:-2], None, None))
        torch.manual_seed(0)
        module = fq.convert(torch.nn.Sequential(Packed(256, 512)).to("cuda"), RECIPES[name]())
        assert hasattr(type(module[0]), "fused_as")
        results.append(run(module, x, dy))
    for made in results[1:]:
        for what, want in results[0].items():
            assert_same_bytes(made[what], want, what)


def test_an_activation_is_quantized_as_it_is_made_unless_someone_looks(name: str = "fp8_delayed"):
    """If false, the widest tensor of a block is written and read again for nothing; or a hook sees
    values that are not there."""
    module, x, seen = mlp(name), on_gpu(2, 128, 256, seed=4), []
    gradient = on_gpu(2, 128, 256, seed=5)
    want = run(module, x, gradient)

    def kernels() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(module, x, gradient)
        return sum(e.count for e in profile.key_averages() if "activation_kernel" in e.key)

    assert kernels() == 1  # the backward
    hook = module.down_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    )
    got = run(module, x, gradient)
    assert seen[0].shape == (2, 128, 512) and seen[0].stride(-1) == 1 and seen[0].float().std() > 0
    hook.remove()
    for what, tensor in want.items():
        assert_same_bytes(got[what], tensor, what)


def test_a_written_tensor_has_no_amax_of_before():
    """If false, codes of a tensor that was scaled in place after its kernel saturate."""
    layer = fq.convert(
        torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False, dtype=BF16, device="cuda")),
        fq.recipes.fp8_current(),
    )
    for shape in ((128, 512), (2, 64, 512)):
        g = on_gpu(*shape, seed=1).requires_grad_()
        for change in (lambda h: h.mul_(64), lambda h: h[:64], lambda h: h * 64, lambda h: h):
            h = change(norm_op.activate(g, None, ACTIVATIONS["gelu"].kind)[0])
            want = layer(h.detach().clone())
            assert_same_bytes(layer(h), want, "y")


def test_an_amax_that_came_along_is_taken():
    """If false, current scaling reads activations and gradients twice although their kernels know
    the amax."""
    layer = fq.convert(
        torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False, dtype=BF16, device="cuda")),
        fq.recipes.fp8_current(),
    )
    h, amaxes = norm_op.activate(
        on_gpu(128, 512, seed=1).requires_grad_(), None, ACTIVATIONS["gelu"].kind
    )
    right = layer(h).detach()
    assert_same_bytes(layer[0](h, Handed(amaxes)).detach(), right, "handed over")
    lie = h.detach().abs().amax().float().view(1) / 64  # to see whether it is believed
    assert not torch.equal(layer[0](h.view(128, 512), Handed(lie)).detach(), right)


@pytest.mark.parametrize("name", ("identity", "fp8_current", "mxfp8"))
def test_mlp_is_near_the_cpus(name: str):
    """If false, a fused module computes something else on a GPU."""
    x, dy = laws.values(2, 128, 256, seed=4), laws.values(2, 128, 256, seed=5)
    module = mlp(name)
    got = run(module, x.to("cuda"), dy.to("cuda"))
    options = {"residual": True, "bias": False, "normalization": "RMSNorm", "dtype": BF16}
    plain = fq.LayerNormMLP(256, 512, recipe=RECIPES[name](), **options)
    plain.load_state_dict({k: v.cpu() for k, v in module.state_dict().items()})
    for what, want in run(plain, x, dy).items():
        error = (got[what].cpu().double() - want.double()).norm() / want.double().norm()
        # bf16 intermediates a unit apart change codes by a step of the format, in few elements.
        assert error < (1e-2 if name == "identity" else 3e-2), (what, error)


def test_compiled_mlp_equals_the_eager_one():
    """If false, torch.compile runs other kernels, or needs the amaxes that eager mode hands
    over."""
    x, dy = on_gpu(128, 256, seed=4), on_gpu(128, 256, seed=5)
    want = run(mlp("fp8_current"), x, dy)
    module = mlp("fp8_current")
    module.compile(fullgraph=True)
    for what, got in run(module, x, dy).items():
        assert_same_bytes(got, want[what], what)

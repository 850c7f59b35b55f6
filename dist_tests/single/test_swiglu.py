# SPDX-License-Identifier: Apache-2.0
"""SwiGLU between the products of packed experts, computed where it is quantized."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes
from dist_tests.single import hopper
from dist_tests.single.test_fuse import tiny
from fsdp_quant.linear import grouped_autograd
from fsdp_quant.linear.routes import sorted_by_expert, tokens_of
from fsdp_quant.models.packed_experts import kind_of
from fsdp_quant.models.proof import swiglu_of

HIDDEN, TOKENS, COPIES = 32, 96, 2
FUSED, OTHERS = ("mxfp8", "fp8_block"), ("fp8_delayed", "fp8_row", "identity")


def experts_of(recipe: fq.Recipe, family: str = "qwen3_moe") -> nn.Module:
    model = fq.convert(tiny(family), recipe, skip="lm_head")
    return next(m for m in model.modules() if hasattr(m, "down_proj_product"))


def inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, of which no expert 2 multiplies any, their experts, and the weights of these."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    index = torch.tensor([[0, 1], [1, 3], [3, 1]])[torch.randint(3, (tokens,), generator=g)]
    return x, index, torch.rand(tokens, COPIES, generator=g).bfloat16()


def run(experts: nn.Module, call=None, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Output and gradients; a column of gate and up is large, as in a training run."""
    experts.zero_grad()
    x, index, weights = inputs(tokens)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = (experts if call is None else call)(x, index, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    grads = {n: p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad} | grads


@contextlib.contextmanager
def observed(experts: nn.Module):
    """Products have hooks, which see values: SwiGLU, and what it is multiplied by, are torch's."""
    down = experts.down if isinstance(experts, fq.GroupedMLP) else experts.down_proj_product
    with down.register_forward_hook(lambda *args: None):
        yield


@contextlib.contextmanager
def unfused(*slots: str):
    """Of these slots no kernel quantizes SwiGLU."""
    with pytest.MonkeyPatch.context() as patch:
        fuses = grouped_autograd.fuses_swiglu
        patch.setattr(
            grouped_autograd,
            "fuses_swiglu",
            lambda p, slot, x: slot not in slots and fuses(p, slot, x),
        )
        yield


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str, count: int = 5) -> None:
    assert got.keys() == want.keys() and len(want) == count
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what}: {name}")


def counts(operators: hopper.Operators) -> tuple[int, int]:
    made = operators.count("swiglu"), operators.count("swiglu_backward")
    operators.calls.clear()
    return made


@pytest.mark.parametrize("name", FUSED)
def test_swiglu_is_quantized_as_it_is_computed(name: str):
    """If false, activations of experts or their gradients are written and read again, in eager mode
    or in graphs; or have other bits."""
    torch.compiler.reset()
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.by_name(name))
        with observed(experts):
            want = run(experts)
        assert counts(operators) == (0, 0)
        assert_same(run(experts), want, "eager")
        assert counts(operators) == (1, 1)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        assert_same(run(experts, compiled), want, "compiled")
        assert counts(operators) == (1, 1)
        for tokens in (64, 40):  # the graph of any number of tokens
            assert_same(run(experts, compiled, tokens), run(experts, None, tokens), f"{tokens}")
        counts(operators)
        again = run(experts, lambda *args: checkpoint(experts, *args, use_reentrant=False))
        assert_same(again, want, "checkpointed")
        assert counts(operators) == (2, 1)
        with torch.no_grad():
            assert_same_bytes(experts(*inputs()), want["y"], "evaluated")
        assert counts(operators) == (1, 0)
        empty = experts(*inputs(tokens=0))
        assert empty.shape == (0, HIDDEN) and counts(operators) == (0, 0)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("name", FUSED)
def test_one_of_both_products_quantizes_swiglu(name: str, part: str):
    """If false, a weight that is frozen changes others' gradients, or a product that computes no
    SwiGLU multiplies the zeros that stand for it."""
    torch.compiler.reset()
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.by_name(name))
        experts.get_parameter(part).requires_grad_(False)
        slot = "input" if part == "down_proj" else "grad_output"
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with observed(experts):
            want = run(experts) | {part: torch.empty(0)}
        for what, call in (("eager", experts), ("compiled", compiled)):
            assert_same(run(experts, call) | {part: torch.empty(0)}, want, what)
        operators.calls.clear()
        experts.get_parameter(part).requires_grad_(True)
        with observed(experts):
            want = run(experts)
        with unfused(slot):
            for what, call in (("eager", experts), ("compiled", compiled)):
                torch.compiler.reset()
                got = run(experts, call)
                assert counts(operators) == ((0, 1) if slot == "input" else (0, 0))
                if slot == "input":
                    assert_same(got, want, f"{what}, {slot} apart")
                else:  # weights are of the rows that the products return
                    assert (got["y"] - want["y"]).norm() < 0.05 * want["y"].norm()


@pytest.mark.parametrize("name", OTHERS)
def test_other_scales_are_of_values(name: str):
    """If false, a scale that takes a pass of its own is of values that nobody wrote."""
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.by_name(name))
        got = run(experts)
        assert counts(operators) == (0, 0)
        with unfused("input", "grad_output"):
            assert_same(run(experts), got, name)


def test_hooks_see_values():
    """If false, a hook of a product is given zeros, or changes the bits of a step."""
    torch.compiler.reset()
    with hopper.emulated() as operators:
        experts, seen = experts_of(fq.recipes.mxfp8()), []
        want = run(experts)
        counts(operators)
        with experts.down_proj_product.register_forward_hook(
            lambda module, args, y: seen.append(args[0].detach())
        ):
            for call in (experts, torch.compile(experts, backend="aot_eager")):
                assert_same(run(experts, call), want, "observed")
                assert counts(operators) == (0, 0)
                hidden = seen.pop()
                assert hidden.shape == (TOKENS * COPIES, 32) and hidden.abs().amax() > 0


def test_a_loop_over_experts_has_the_bits_of_one_product():
    """If false, selective checkpointing, or weight gradients that wait, train another model."""
    torch.compiler.reset()
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.fp8_block())
        want = run(experts)
        assert counts(operators) == (1, 1)
        got = run(
            experts, lambda *x: checkpoint(experts, *x, use_reentrant=False, context_fn=policy)
        )
        assert_same(got, want, "checkpointed")
        for part in ("gate_up_proj", "down_proj"):
            getattr(experts, f"{part}_product").delay_wgrad_compute = True
        for call in (experts, torch.compile(experts, backend="aot_eager")):
            got = run(experts, call)
            for name in ("y", "dx", "dweights"):
                assert_same_bytes(got[name], want[name], f"delayed: {name}")
        assert counts(operators) == (0, 0)


def test_torch_func_differentiates_experts():
    """If false, torch.func refuses experts, or has other gradients than a backward."""
    with hopper.emulated():
        experts = experts_of(fq.recipes.mxfp8())
        want, (x, index, weights) = run(experts), inputs()
        y, pullback = torch.func.vjp(lambda x, w: experts(x, index, w), x, weights)
        dx, dweights = pullback(
            torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        )
        assert_same_bytes(y, want["y"])
        assert_same_bytes(dweights, want["dweights"])
        assert (dx - want["dx"]).norm() < 0.02 * want["dx"].norm()  # SiLU is torch's


def test_another_gate_is_the_modules_own():
    """If false, experts with another gate compute SwiGLU."""
    plain = next(m for m in tiny("gpt_oss").modules() if "Experts" in type(m).__name__)
    assert kind_of(plain) is not None and swiglu_of(plain) is None
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.mxfp8())
        want = run(experts)["y"]
        counts(operators)
        for change in ("act_fn", "_apply_gate"):
            twin = experts_of(fq.recipes.mxfp8())
            if change == "act_fn":
                twin.act_fn = nn.ReLU()
            else:
                twin.__dict__["_apply_gate"] = lambda x: x[:, :32] * x[:, 32:]
            compiled = torch.compile(twin, backend="aot_eager")
            for what, call in (("eager", twin), ("compiled", compiled)):
                torch.compiler.reset()
                assert not torch.equal(run(twin, call)["y"], want), f"{what}: {change}"
                assert counts(operators) == (0, 0), f"{what}: {change}"


@pytest.mark.parametrize("how", ["checkpoint", "offload"])
def test_gate_and_up_live_only_where_they_are_saved(how: str):
    """If false, a checkpoint or an offload keeps gate and up of every layer on the device."""
    with hopper.emulated():
        experts = experts_of(fq.recipes.mxfp8())
        x, index, weights = inputs()
        x.requires_grad_()
        if how == "checkpoint":
            y = checkpoint(experts, x, index, weights, use_reentrant=False)
        else:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (t.double() if t.is_floating_point() else t.clone(), t.dtype),
                lambda packed: packed[0].to(packed[1]),
            ):
                y = experts(x, index, weights)
        gc.collect()
        alive = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype is torch.bfloat16]
        assert not [t for t in alive if t.shape == (TOKENS * COPIES, 64)]
        y.sum().backward()


def test_gates_are_proven_as_they_are_called(monkeypatch: pytest.MonkeyPatch):
    """If false, experts whose gate is a static method are not converted, or those whose gate
    depends on shapes compute SwiGLU; or the proof takes the weight from the products' layers."""

    def static(x: Tensor) -> Tensor:
        g, u = x.chunk(2, -1)
        return nn.functional.silu(g) * u

    def narrow(self: nn.Module, x: Tensor) -> Tensor:
        g, u = x.chunk(2, -1)
        return nn.functional.silu(g if g.shape[-1] < 32 else g.clamp(max=0.1)) * u

    plain = next(m for m in tiny("qwen3_moe").modules() if "Experts" in type(m).__name__)
    with hopper.emulated() as operators:
        for gate, wanted in ((staticmethod(static), (1, 1)), (narrow, (0, 0))):
            monkeypatch.setattr(type(plain), "_apply_gate", gate)
            experts = experts_of(fq.recipes.mxfp8())
            layers = (*experts.gate_up_proj_product.layers, *experts.down_proj_product.layers)
            assert all(layer.weight is not None for layer in layers)
            run(experts)
            assert counts(operators) == wanted


def test_a_gate_without_a_name_is_pickled(monkeypatch):
    """If false, torch.save of a model whose gate was patched raises, which without fq does not."""

    def gate(self, x: Tensor) -> Tensor:
        g, u = x.chunk(2, -1)
        return self.act_fn(g) * u

    plain = next(m for m in tiny("qwen3_moe").modules() if "Experts" in type(m).__name__)
    monkeypatch.setattr(type(plain), "_apply_gate", gate)
    with hopper.emulated() as operators:
        experts = experts_of(fq.recipes.mxfp8())
        want = run(experts)
        assert counts(operators) == (1, 1)
        assert_same(run(pickle.loads(pickle.dumps(experts))), want, "read again")
        assert counts(operators) == (1, 1)


# `fq.GroupedMLP` #


def run_mlp(mlp: fq.GroupedMLP, how: str, call=None, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Output and gradients of rows, or of tokens by their routes, with weights or without."""
    x, index, weights = inputs(tokens)
    ends, routes = sorted_by_expert(index, 4)
    call = mlp if call is None else call
    if how == "rows":
        x = x[tokens_of(*routes)]
        return gradients_of(mlp, lambda x: call(x, ends), x)
    if how == "routes":
        return gradients_of(mlp, lambda x: call(x, ends, routes), x)
    return gradients_of(mlp, lambda x, w: call(x, ends, routes, w), x, weights)


def gradients_of(module: nn.Module, call, *operands: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    operands = [t.detach().requires_grad_() for t in operands]
    y = call(*operands)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    grads = {n: p.grad.clone() for n, p in module.named_parameters()}
    return {"y": y.detach()} | {f"d{i}": t.grad for i, t in enumerate(operands)} | grads


def mlp_of(name: str) -> fq.GroupedMLP:
    torch.manual_seed(0)
    return fq.GroupedMLP(4, HIDDEN, 64, dtype=torch.bfloat16, recipe=fq.recipes.by_name(name))


@pytest.mark.parametrize("how", ["rows", "routes", "weights"])
@pytest.mark.parametrize("name", FUSED)
def test_a_grouped_mlp_quantizes_swiglu_as_it_computes_it(name: str, how: str):
    """If false, experts of one's own (of `ExpertParallel`, with rows and no routes) write SwiGLU
    and its gradient, in eager mode or in graphs; or have other bits."""
    torch.compiler.reset()
    count = 5 if how == "weights" else 4
    with hopper.emulated() as operators:
        mlp = mlp_of(name)
        with observed(mlp):
            want = run_mlp(mlp, how)
        assert counts(operators) == (0, 0)
        assert_same(run_mlp(mlp, how), want, "eager", count)
        assert counts(operators) == (1, 1)
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        assert_same(run_mlp(mlp, how, compiled), want, "compiled", count)
        assert counts(operators) == (1, 1)
        with unfused("input"):
            assert_same(run_mlp(mlp, how), want, "with values of h", count)
        counts(operators)
        empty = run_mlp(mlp, how, tokens=0)
        assert empty["y"].shape == (0, HIDDEN) and counts(operators) == (0, 0)


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_a_grouped_mlp_is_its_products_and_swiglu(name: str):
    """If false, `fq.GroupedMLP` computes something else than two `fq.GroupedLinear` with the sum of
    each token's experts behind them, on any device and in any recipe."""
    mlp, weighted = mlp_of(name), run_mlp(mlp_of(name), "weights")
    x, index, weights = inputs()
    ends, (order, back) = sorted_by_expert(index, 4)

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        g, u = mlp.gate_up(x[tokens_of(order, back)], ends).chunk(2, -1)
        y = mlp.down(torch.nn.functional.silu(g) * u, ends)[back]
        return (y.float() * weights[..., None]).sum(1).to(y.dtype)

    assert_same(weighted, gradients_of(mlp, plain, x, weights), name)


def test_a_grouped_mlp_takes_rows_in_batches_and_splits_of_the_host():
    x = inputs()[0][:10]
    with hopper.emulated():
        mlp = mlp_of("mxfp8")
        y = mlp(x, torch.tensor([3, 3, 8, 10]))
        assert_same_bytes(mlp(x, [3, 0, 5, 2]), y, "counts")
        batches = mlp(x.view(2, 5, HIDDEN), torch.tensor([3, 3, 8, 10]))
        assert_same_bytes(batches, y.view(2, 5, HIDDEN), "batches")
        with pytest.raises(ValueError, match="splits"):
            mlp(x, [3, 0, 5])


def test_a_grouped_mlp_of_routes_returns_rows():
    """If false, routes without weights mean something else than they do to `fq.GroupedLinear` and
    `ExpertParallel`."""
    x, index, weights = inputs()
    ends, routes = sorted_by_expert(index, 4)
    with hopper.emulated():
        mlp = mlp_of("mxfp8")
        for call in (mlp, torch.compile(mlp, backend="aot_eager", fullgraph=True)):
            rows = call(x, ends, routes)
            assert_same_bytes(rows, mlp(x[tokens_of(*routes)], ends), "rows")
            assert_same_bytes(call(x.view(4, -1, HIDDEN), ends, routes), rows, "batches")
            y = call(x, ends, routes, weights)
            assert_same_bytes(call(x.view(4, -1, HIDDEN), ends, routes, weights).flatten(0, 1), y)


def test_wrong_routes_are_refused():
    """If false, experts multiply other tokens than the routes say, weigh them with other weights,
    or raise of something else."""
    x, index, weights = inputs()
    ends, (order, back) = sorted_by_expert(index, 4)
    mlp = mlp_of("mxfp8")
    wrong_routes = (
        order,
        (order,),
        (back, order),
        (order[1:], back),
        (order, back.flatten()),
        (order, torch.cat([back, back])),
        (order.int(), back.int()),
    )
    for emulated in (False, True):
        with hopper.emulated() if emulated else contextlib.nullcontext():
            for layer, wrong in itertools.product((mlp, mlp.gate_up), wrong_routes):
                with pytest.raises(
                    ValueError, match=r"gate_up: routes are .*wanted order \[T \* k"
                ):
                    layer(x, ends, wrong)
            for wrong in (
                weights[:, 0],
                weights.flatten(),
                weights.T,
                weights[1:],
                weights[..., :1],
            ):
                with pytest.raises(ValueError, match=r"gate_up: .* and weights \[T, k\]"):
                    mlp(x, ends, (order, back), wrong)
            for call in (mlp, torch.compile(mlp, backend="aot_eager")):
                with pytest.raises(ValueError, match=r"gate_up: weights= of no routes; give"):
                    call(x[tokens_of(order, back)], ends, weights=weights)

# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights that autograd does not return: added to `main_grad`, or computed later.

Expected values are the gradients that the same layers leave in fp32, which `+=` adds.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import values
from dist_tests.single import hopper
from fsdp_quant.linear import fused, program
from fsdp_quant.ops import native

BF16 = torch.bfloat16
RECIPES = ["mxfp8", "fp8_delayed", "nvfp4", "identity"]
KINDS = [("linear", recipe) for recipe in RECIPES]
KINDS += [(kind, "mxfp8") for kind in ("mlp", "quantized", "list", "packed")]
OPTIONS = "fuse_wgrad_accumulation", "delay_wgrad_compute"


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def layer_of(kind: str, recipe: str, **options) -> nn.Module:
    """A layer of 64 -> 64 features; splits of experts are in `run`."""
    torch.manual_seed(0)
    if kind == "linear":
        return fq.Linear(64, 64, dtype=BF16, recipe=recipe, name="layer", **options)
    if kind == "mlp":
        return fq.LayerNormMLP(64, 128, dtype=BF16, recipe=recipe, name="layer", **options)
    if kind == "quantized":
        with fq.quantized_model_init(recipe):
            return fq.Linear(64, 64, dtype=BF16, name="layer", **options)
    packed = kind == "packed"
    return fq.GroupedLinear(
        2, 64, 64, dtype=BF16, packed=packed, recipe=recipe, name="layer", **options
    )


def weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in layer.named_parameters() if n.endswith("weight") and p.dim() > 1}


def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Two micro-batches; the gradients of their inputs."""
    fq.begin_step(1)
    found = []
    for rows in x:
        rows = rows.clone().requires_grad_()
        y = layer(rows, [24, 40]) if isinstance(layer, fq.GroupedLinear) else layer(rows)
        (y * values(*y.shape, seed=7)).sum().backward()
        found.append(rows.grad)
    return found


def give_main_grads(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Views of one buffer that holds ones."""
    owners = weights(layer)
    flat = torch.ones(sum(w.numel() for w in owners.values()), dtype=dtype)
    parts = flat.split([w.numel() for w in owners.values()])
    for weight, part in zip(owners.values(), parts):
        weight.main_grad = part.view(weight.shape)
    return {name: weight.main_grad for name, weight in owners.items()}


def expected(layer: nn.Module, x: Tensor, dtype: torch.dtype, monkeypatch) -> tuple[list, dict]:
    """Gradients of inputs, and ones to which the wgrads of fp32 were added in order."""
    want = {n: torch.ones(w.shape, dtype=dtype) for n, w in weights(layer).items()}
    made = program._gemm

    def recording(call, resolved, product, result):
        def run(a, b):
            dw = made(call, resolved, 2, torch.float32)(a, b)
            name = call.name.removeprefix("layer").removeprefix(".")
            if isinstance(layer, fq.GroupedLinear) and layer.packed:
                want["weight"][int(name)] += dw
            else:
                want[f"{name}.weight".removeprefix(".")] += dw
            return dw.to(result)

        return run if product == 2 else made(call, resolved, product, result)

    with monkeypatch.context() as patch:
        patch.setattr(program, "_gemm", recording)
        return run(layer, x), want


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind, recipe", KINDS)
def test_the_wgrad_is_added_to_main_grad(kind: str, recipe: str, dtype, monkeypatch):
    """If false, training with main_grad loses a micro-batch, adds one twice, or adds gradients
    that were rounded first."""
    x = values(2, 64, 64, seed=3)
    fused = layer_of(kind, recipe, fuse_wgrad_accumulation=True)
    main = give_main_grads(fused, dtype)
    want_inputs, want = expected(layer_of(kind, recipe), x, dtype, monkeypatch)
    assert all(map(torch.equal, run(fused, x), want_inputs))
    assert main.keys() == want.keys()
    assert all(torch.equal(main[n], want[n]) for n in want)
    assert all(w.grad is None for w in weights(fused).values())


@pytest.mark.parametrize("kind, recipe", KINDS)
def test_delayed_wgrads_are_those_of_the_backward(kind: str, recipe: str):
    """If false, a zero-bubble schedule trains on other gradients, or an optimizer steps without
    those that nobody computed."""
    x = values(2, 64, 64, seed=3)
    plain, delayed = layer_of(kind, recipe), layer_of(kind, recipe, delay_wgrad_compute=True)
    want, got = run(plain, x), run(delayed, x)
    assert all(map(torch.equal, got, want))
    assert all(w.grad is None for w in weights(delayed).values())
    optimizer = fq.optim.FusedAdam(delayed.parameters(), lr=1e-3)
    with pytest.raises(RuntimeError, match="layer.*2 weight gradients .*backward_dw"):
        optimizer.step()
    delayed.backward_dw()
    fq.steps.backward_dw(delayed)
    for name, p in plain.named_parameters():
        assert torch.equal(delayed.get_parameter(name).grad, p.grad), name
    with pytest.raises(RuntimeError, match="layer.*without a backward"):
        delayed.backward_dw()
    optimizer.step()


def test_a_compiled_optimizer_knows_no_layer_that_waits_for_nothing():
    """If false, a compiled step guards every layer of the process, and fails once one is freed."""
    layers = [fq.Linear(64, 32, recipe="mxfp8", delay_wgrad_compute=True) for _ in range(2)]
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for layer in layers:
        layer(torch.ones(2, 64)).sum().backward()
        layer.backward_dw()
    step()
    del layers[1], layer
    gc.collect()
    with torch._dynamo.config.patch(error_on_recompile=True):
        step()


@pytest.mark.parametrize("written", ["x", "dy"])
def test_a_delayed_wgrad_refuses_what_was_written_since(written: str):
    """If false, the wgrad is that of other values, in silence. torch raises for what a backward
    saved."""
    layer = fq.Linear(64, 32, recipe="identity", name="layer", delay_wgrad_compute=True)
    tensors = {"x": torch.ones(2, 64), "dy": torch.ones(2, 32)}
    layer(tensors["x"]).backward(tensors["dy"])
    tensors[written].add_(1)
    with pytest.raises(RuntimeError, match="layer: .* written in place"):
        layer.backward_dw()


def test_both_options_add_to_main_grad_later(monkeypatch):
    """If false, a delayed wgrad goes to .grad of a weight that has a main_grad."""
    x, options = values(2, 64, 64, seed=3), dict.fromkeys(OPTIONS, True)
    layer = layer_of("linear", "mxfp8", **options)
    main, (_, want) = (
        give_main_grads(layer, torch.float32),
        expected(layer_of("linear", "mxfp8"), x, torch.float32, monkeypatch),
    )
    run(layer, x)
    assert bool((main["weight"] == 1).all())
    copy.deepcopy(layer)  # which waits for nothing
    for _ in x:
        layer.backward_dw()
    assert torch.equal(main["weight"], want["weight"]) and layer.weight.grad is None


@pytest.mark.parametrize("zeros", [False, True])
def test_the_owner_of_main_grad_is_told_as_megatrons_ddp(zeros: bool):
    """If false, Megatron's DDP adds a gradient a second time, or its hook never runs and no bucket
    is reduced."""
    layer = layer_of("linear", "mxfp8", fuse_wgrad_accumulation=True)
    weight, called = layer.weight, []
    main = give_main_grads(layer, torch.float32)["weight"]
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
    weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad_added_to_main_grad))
    run(layer, values(1, 64, 64, seed=3))
    assert called == [True] and not bool((main == 1).all())
    assert weight.grad.shape == weight.shape and (not zeros or not weight.grad.any())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current"])
def test_a_compiled_step_adds_the_same(recipe: str, monkeypatch):
    """If false, what is added to main_grad depends on the machine, or a step adds to a main_grad
    that was replaced since its forward."""
    x, results = values(2, 64, 64, seed=3, dtype=BF16), []
    for step in (True, False):
        with hopper.emulated("sm_90a"), monkeypatch.context() as patch:
            layer = layer_of("linear", recipe, fuse_wgrad_accumulation=True)
            first = give_main_grads(layer, torch.float32)["weight"]
            layer.weight.grad_added_to_main_grad = False
            steps, real = [], native.linear_step
            patch.setattr(native, "linear_step", lambda *args: steps.append(args) or real(*args))
            if not step:
                patch.setattr(fused, "can_add", lambda *_: False)
            ys = [layer(rows.requires_grad_()) for rows in x.unbind()]
            ys[0].backward(torch.ones_like(ys[0]))
            assert layer.weight.grad_added_to_main_grad
            layer.weight.main_grad = second = torch.ones_like(first)
            ys[1].backward(torch.ones_like(ys[1]))
            assert len(steps) == 2 * step
            results.append((*ys, first, second, layer.weight.grad.shape))
    assert all(map(torch.equal, results[0][:-1], results[1][:-1]))
    assert results[0][-1] == results[1][-1] == layer.weight.shape


REPLACED = {
    "bf16": lambda buffer: buffer.to(BF16),
    "transposed": lambda buffer: buffer.clone().t(),
    "of the same memory, transposed": lambda buffer: buffer.t(),
    "of the same memory, bf16": lambda buffer: buffer.view(BF16)[:, :64].fill_(1),
    "unaligned": lambda buffer: torch.ones(64 * 64 + 1)[1:].view(64, 64),
}


@pytest.mark.parametrize("kind", REPLACED)
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_compiled_step_adds_to_any_main_grad(kind: str, when: str, monkeypatch):
    """If false, a step refuses what the program adds to, or adds to other elements: main_grad is
    any buffer of the backward, and no kernel writes all of them."""
    results = []
    for step in (True, False):
        with hopper.emulated("sm_90a"), monkeypatch.context() as patch:
            layer = layer_of("linear", "mxfp8", fuse_wgrad_accumulation=True)
            layer.weight.main_grad = buffer = torch.ones(64, 64)
            if not step:
                patch.setattr(fused, "can_add", lambda *_: False)
            if when == "before":
                layer.weight.main_grad = REPLACED[kind](buffer)
            y = layer(values(64, 64, seed=3, dtype=BF16).requires_grad_())
            if when == "between":
                layer.weight.main_grad = REPLACED[kind](buffer)
            for _ in range(2):
                y.backward(values(64, 64, seed=4, dtype=BF16), retain_graph=True)
            results.append(layer.weight.main_grad)
    assert torch.equal(*results) and not bool((results[0] == 1).all())


def test_a_backward_of_the_input_alone_tells_no_owner_of_main_grad():
    """If false, Megatron's DDP drops a gradient of this weight that comes later: it believes that
    main_grad holds it."""
    with hopper.emulated("sm_90a"):
        layer = layer_of("linear", "mxfp8", fuse_wgrad_accumulation=True)
        main_grad = give_main_grads(layer, torch.float32)["weight"]
        layer.weight.grad_added_to_main_grad = False
        x = values(64, 64, seed=3, dtype=BF16).requires_grad_()
        y = layer(x).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        assert not layer.weight.grad_added_to_main_grad and bool((main_grad == 1).all())
        y.backward()
        assert layer.weight.grad_added_to_main_grad and not bool((main_grad == 1).all())


def test_options_hold_in_graphs(monkeypatch):
    """If false, a compiled layer drops its wgrad, adds another value, or refuses the backwards of
    two forwards in flight; or a delayed layer's graph returns what backward_dw computes again."""
    torch.compiler.reset()
    x = values(2, 64, 64, seed=3)
    layer = layer_of("linear", "mxfp8", fuse_wgrad_accumulation=True)
    main = give_main_grads(layer, torch.float32)["weight"]
    layer.weight.grad_added_to_main_grad = False
    _, want = expected(layer_of("linear", "mxfp8"), x, torch.float32, monkeypatch)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    outputs = [compiled(rows) for rows in x]
    for y in outputs:
        (y * values(*y.shape, seed=7)).sum().backward()
    assert torch.equal(main, want["weight"]) and layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad
    experts = layer_of("packed", "mxfp8", fuse_wgrad_accumulation=True)
    with pytest.raises(
        Exception, match="experts of fuse_wgrad_accumulation=True .* outside graphs"
    ):
        torch.compile(experts, backend="aot_eager", fullgraph=True)(x[0], [24, 40])
    delayed = layer_of("linear", "mxfp8", delay_wgrad_compute=True)
    with pytest.raises(Exception, match="delay_wgrad_compute=True runs between graphs"):
        torch.compile(delayed, backend="aot_eager", fullgraph=True)(x[0])
    torch.compile(delayed, backend="aot_eager")(x[0]).sum().backward()
    assert delayed.weight.grad is None
    delayed.backward_dw()
    assert delayed.weight.grad is not None


def test_attributes_of_a_converted_model_are_honoured():
    """If false, a converted model's MLP runs its fused forward without the options of its layers,
    and a missing or unfit main_grad is found in the backward alone."""
    model = fq.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "mxfp8")
    for layer in model.modules():
        if isinstance(layer, fq.Linear):
            layer.fuse_wgrad_accumulation = True
    x = values(64, 64, seed=3, dtype=torch.float32)
    with pytest.raises(ValueError, match="0: fuse_wgrad_accumulation=True.*no main_grad"):
        model(x)
    main = give_main_grads(model, torch.float32)
    model(x).sum().backward()
    assert all(not bool((m == 1).all()) for m in main.values())
    model[0].weight.main_grad = torch.zeros(64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="main_grad is torch.float16.*wanted float32 or bfloat16"):
        model(x)
    with torch.no_grad():
        model(x)
    for option in OPTIONS:
        with pytest.raises(TypeError, match=f"convert has no {option}=: set it on layers"):
            fq.convert(model, "mxfp8", **{option: True})


@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_leaves_the_bias_to_the_caller(bias: bool):
    """If false, a bias is added twice by callers that fuse it with what follows, or never."""
    x = values(8, 64, seed=3)
    for build in (fq.Linear, fq.LayerNormLinear, fq.LayerNormMLP):
        made = []
        for returns in (False, True):
            torch.manual_seed(0)
            layer = build(64, 64, bias=bias, dtype=BF16, recipe="mxfp8", return_bias=returns)
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(values(*p.shape, seed=5))
            made.append(layer)
        plain, given = made
        y, returned = given(x)
        if not bias:
            assert returned is None and torch.equal(y, plain(x))
            continue
        own = next(m for m in reversed([*given.modules()]) if isinstance(m, fq.Linear)).bias
        assert returned is own
        close = (y.float() + own.float()).to(BF16)
        torch.testing.assert_close(close, plain(x), rtol=1e-2, atol=1e-1)
        assert not torch.equal(y, plain(x))
        if build is not fq.Linear:
            given.return_layernorm_output = True
            assert len(given(x)) == 3 and given(x)[1] is own


@pytest.mark.parametrize("option", OPTIONS)
def test_fully_shard_is_refused(option: str, mesh):
    """If false, FSDP2 reduces no gradient, and every rank trains on its own."""
    model = nn.Sequential(layer_of("linear", "mxfp8", **{option: True}))
    fully_shard(model, mesh=mesh)
    with pytest.raises(NotImplementedError, match=f"layer: {option}=True under fully_shard"):
        model(values(64, 64, seed=3))

"""torch.compile(fullgraph=True) of converted layers: an operator a layer, eager mode's bits, one graph for equal blocks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters as dynamo_counters
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.modules import graph_op
from fsdp_quant.tensor.quantized_tensor import stable_text

FP32, BF16 = torch.float32, torch.bfloat16
RECIPES = {
    "identity": recipes.identity(), "fp8_current": recipes.fp8_current(), "fp8_delayed": recipes.fp8_delayed(length=3),
    "fp8_row": recipes.fp8_row(), "fp8_block": recipes.fp8_block(), "mxfp8": recipes.mxfp8(), "nvfp4": recipes.nvfp4(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"), "nvfp4/identity": recipes.hybrid("nvfp4", "identity"),
    "dequantized": recipes.mxfp8(backward_override="dequantized"),
    "kept input": recipes.fp8_delayed(length=2, save_original_input=True),
}
FEW = ("fp8_delayed", "nvfp4")  # histories; random bits
SETTINGS = {"fp32": (FP32, True, False), "bf16": (BF16, False, False), "autocast": (FP32, True, True)}
CASES = [(n, s) for s in SETTINGS for n in RECIPES if n in FEW or (s == "fp32" and n in recipes.names()) or s == "bf16"]


@pytest.fixture(autouse=True)
def _fresh():
    """Each test starts at step 0 of seed 0, with empty counters and nothing compiled; breaks and needless graphs raise."""
    with kept_step():
        torch._dynamo.reset()
        dynamo_counters.clear()
        counters.reset()
        with dynamo_config.patch(automatic_dynamic_shapes=True, recompile_limit=8, fail_on_recompile_limit_hit=True):
            yield


def graphs() -> int:
    assert not dynamo_counters["graph_break"], dict(dynamo_counters["graph_break"])
    return dynamo_counters["stats"]["unique_graphs"]


class Block(nn.Module):
    """Residual SwiGLU [.., d] -> [.., d]; `recompute` checkpoints it inside."""

    def __init__(self, d: int = 40, hidden: int = 56, bias: bool = True, dtype: torch.dtype = FP32, recompute: bool = False):
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden, bias, dtype=dtype), nn.Linear(d, hidden, bias, dtype=dtype)
        self.down, self.recompute = nn.Linear(hidden, d, bias, dtype=dtype), recompute

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))


def net(recipe: fq.Recipe, blocks: int = 1, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return fq.convert(nn.Sequential(*(Block(**options) for _ in range(blocks))), recipe)


def compiled(model: nn.Sequential, backend: str = "aot_eager") -> nn.Sequential:
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    return model


def layers(model: nn.Module) -> list[fq.Linear]:
    return [m for m in model.modules() if isinstance(m, fq.Linear)]


def histories(model: nn.Module) -> list[Tensor]:
    found = {k: h for m in layers(model) for k, h in m._weight_state.histories.items()}
    return [t.clone() for _, h in sorted(found.items(), key=lambda item: str(item[0])) for t in (h.amaxes, h.enc)]


def train(
    model: nn.Sequential, steps: int = 2, *, call: Callable | None = None, rows: tuple[int, ...] = (24,), d: int = 40,
    autocast: bool = False, around: Callable = contextlib.nullcontext, before: Callable[[int], None] = lambda step: None,
    evaluate: bool = True,
) -> list[Tensor]:
    """Outputs, all gradients, weights and histories of some steps of two micro-batches, an evaluation between them."""
    STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 3, 0, 0, False
    STEP.publish()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
    dtype = model[0].down.weight.dtype
    for step in range(steps):
        before(step)
        for micro_batch in range(2):
            fq.begin_step(micro_batch=micro_batch)
            x = values(rows[step % len(rows)], d, seed=10 * step + micro_batch, dtype=dtype).requires_grad_()
            with torch.autocast("cpu", BF16, enabled=autocast), around():
                y = (call or model)(x)
            y.float().square().mean().backward()
            seen += [y.detach(), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                seen.append(model(x.detach()))
            model.train()
    return seen + [p.detach().clone() for p in model.parameters()] + histories(model)


def assert_same(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert len(got) == len(want), (what, len(got), len(want))
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same_bytes(a, b, f"{what}: tensor {i}")


def really_ran() -> dict:
    return {what: counters.of(what) for what in ("quantize", "gemm", "weight encode", "departure")}


@pytest.mark.parametrize("name, setting", laws.sample(CASES, 3))
def test_compiled_blocks_are_the_eager_ones(name: str, setting: str):
    """If false, torch.compile breaks the graph, computes other bits, does other work, or compiles each block anew."""
    dtype, bias, autocast = SETTINGS[setting]
    want = train(net(RECIPES[name], 2, dtype=dtype, bias=bias), autocast=autocast)
    ran = really_ran()
    counters.reset()
    got = train(compiled(net(RECIPES[name], 2, dtype=dtype, bias=bias)), autocast=autocast)
    assert_same(got, want, name)
    assert really_ran() == ran, "tracing was counted, or weights were encoded more often"
    assert graphs() == 2, "one graph to train and one to evaluate, for all blocks"


def test_sixteen_equal_blocks_share_a_graph_and_steps_add_none():
    """If false, compiling takes a graph a block or a step: names, random keys, weights or histories are constants in it."""
    small = {"d": 16, "hidden": 16, "bias": False}
    with contextlib.ExitStack() as stack:
        forbid = dynamo_config.patch(error_on_recompile=True)
        model = compiled(net(RECIPES["nvfp4"], 16, **small))
        got = train(model, 3, rows=(16,), d=16, before=lambda step: step == 1 and stack.enter_context(forbid))
    assert_same(got, train(net(RECIPES["nvfp4"], 16, **small), 3, rows=(16,), d=16), "nvfp4")
    assert graphs() == 2


def test_weights_are_encoded_once_a_version():
    """If false, a compiled step multiplies the codes of older weights, or quantizes the weight at each call."""
    model = compiled(net(RECIPES["mxfp8"]))
    x = values(24, 40)
    model(x)
    counters.reset()
    for _ in range(3):
        model(x).sum().backward()
    assert set(counters.of("weight encode").values()) == {1}  # the columnwise codes
    writes = {
        "in place": lambda w: w.mul_(2), "data": lambda w: setattr(w, "data", torch.ones(w.shape)),
        "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
    }
    for what, write in writes.items():
        before = model(x)
        with torch.no_grad():
            write(model[0].down.weight)
        assert not torch.equal(model(x), before), what
        assert_same_bytes(model(x), Block.forward(model[0], x), what)


@pytest.mark.parametrize("name", FEW)
def test_forwards_may_run_ahead_of_their_backwards(name: str):
    """If false, a pipeline's second backward is refused: the first one wrote a history, or a step, that the graph saved."""

    def run(model):
        train(model, 1, evaluate=False)
        xs = [values(24, 40, seed=i).requires_grad_() for i in range(3)]
        with fq.token_offset(5):
            ys = [model(x) for x in xs]
        for y in ys:
            y.square().mean().backward()
        return [x.grad for x in xs] + [p.grad for p in model.parameters()] + histories(model)

    assert_same(run(compiled(net(RECIPES[name]))), run(net(RECIPES[name])), name)


@pytest.mark.parametrize("name", FEW)
def test_checkpointing_changes_no_bit(name: str):
    """If false, a recomputation inside or around a compiled block draws other bits or records another amax."""
    want = train(net(RECIPES[name]), evaluate=False)
    assert_same(train(compiled(net(RECIPES[name], recompute=True)), evaluate=False), want, "inside")
    for reentrant in (False, True):
        model = compiled(net(RECIPES[name]))

        def call(x, model=model, reentrant=reentrant):
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        assert_same(train(model, call=call, evaluate=False), want, f"around, reentrant {reentrant}")
    graphs()


def test_recomputation_is_noted_as_a_graph_runs():
    """If false, FSDP2 gathers one direction for a backward that multiplies both, or both for one that multiplies one."""
    model, x = compiled(net(RECIPES["mxfp8"])), values(24, 40).requires_grad_()

    def noted() -> set[bool]:
        return {m._weight_state.recomputes for m in layers(model)}

    model(x)
    assert noted() == {False}
    checkpoint(model[0], x, use_reentrant=False).sum().backward()
    assert noted() == {True}
    with torch.no_grad():
        model.eval()(x)
    assert noted() == {True}, "an evaluation says nothing about the next step"
    model.train()(x).sum().backward()
    assert noted() == {False}
    for layer in layers(model):
        layer.recomputes_forward = True
    model(x)
    assert noted() == {True}


def test_a_change_of_recipe_makes_another_graph():
    """If false, a compiled block goes on with the formats that it was compiled with."""

    def change(model):
        to = {1: recipes.hybrid("mxfp8", "fp8_row"), 2: RECIPES["fp8_delayed"]}
        return lambda step: step in to and fq.set_recipe(model, to[step])

    results = []
    for prepare in (lambda m: m, compiled):
        model = prepare(net(RECIPES["fp8_delayed"]))
        results.append(train(model, 3, before=change(model)))
    assert_same(results[1], results[0], "three recipes")
    assert graphs() == 4, "two recipes, to train and to evaluate"


@pytest.mark.parametrize("name", FEW)
def test_users_hooks_and_deleted_layers_change_nothing(name: str):
    """If false, offloading under torch.compile loses the weight's history or codes, or a backward needs a living model."""
    want = train(net(RECIPES[name]), evaluate=False)
    for what, hooks in {
        "copied": (torch.clone, lambda t: t), "aliased": (torch.Tensor.detach, torch.Tensor.detach),
    }.items():
        around = lambda h=hooks: torch.autograd.graph.saved_tensors_hooks(*h)
        assert_same(train(compiled(net(RECIPES[name])), around=around, evaluate=False), want, what)

    def without_layers(model):
        train(model, evaluate=False)
        x, parameters = values(24, 40).requires_grad_(), list(model.parameters())
        y = model(x)
        del model
        gc.collect()
        y.square().mean().backward()
        return [x.grad] + [p.grad for p in parameters]

    results = []
    for prepare in (lambda m: m, compiled):
        results.append(without_layers(prepare(net(RECIPES[name]))))
    assert_same(results[1], results[0], "deleted")


def test_copies_are_layers_of_their_own():
    """If false, a deep copy or a loaded module runs with the original's histories and codes."""
    original = compiled(net(RECIPES["fp8_delayed"]))
    train(original, 1)
    eager = copy.deepcopy(original)
    for what, make in {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}.items():
        copied = make(original)
        handles = {m._handle.item() for model in (original, copied) for m in layers(model)}
        assert len(handles) == 6, what
        assert all(m._site.state is m._weight_state for m in layers(copied)), what
        kept = histories(original)
        assert_same(train(compiled(copied)), train(copy.deepcopy(eager)), what)
        assert_same(histories(original), kept, f"{what}: the original")


def test_frozen_weights_keep_their_histories():
    """If false, the histories of layers that no optimizer holds never advance under torch.compile."""

    def frozen():
        model = net(RECIPES["fp8_delayed"])
        for block in model:
            block.down.requires_grad_(False)
        return model

    assert_same(train(compiled(frozen()), 3), train(frozen(), 3), "frozen")


def test_other_batch_sizes_take_one_more_graph():
    """If false, every length of a batch compiles the model again."""
    rows = (24, 7, 33, 64, 5)
    want = train(net(RECIPES["fp8_delayed"]), 5, rows=rows)
    assert_same(train(compiled(net(RECIPES["fp8_delayed"])), 5, rows=rows), want, "lengths")
    assert graphs() == 4, "of one length and of any, to train and to evaluate"


def test_departures_are_seen_as_a_graph_runs():
    """If false, torch.compile hides that codes are not cached, or that a product runs in a slower domain."""
    model = compiled(net(RECIPES["mxfp8"]))
    plain = {name: p.detach() * 1 for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="its weight is a plain tensor"):
        torch.func.functional_call(model, plain, (values(24, 40),))
    model = compiled(net(recipes.mxfp8(strict=False)))
    with pytest.warns(UserWarning, match="its weight is a plain tensor"):
        got = torch.func.functional_call(model, plain, (values(24, 40),))
    assert len(counters.of("departure")) == 3
    assert_same_bytes(got, model(values(24, 40)), "the same weights")


SHAPES = ((2, 24, 40), (33, 40), (0, 40))


def graph_call(layer: fq.Linear, x: Tensor, run: Callable) -> tuple:
    handle, shape, key = layer._handle, list(layer.weight.shape), layer.plan.key
    return run(x, layer.weight, layer.bias, handle, shape, key, True, True, True)


def facts(t: Tensor) -> tuple:
    """Shape, dtype, and strides where they say anything."""
    return t.shape, t.dtype, [s for n, s in zip(t.shape, t.stride()) if n > 1 and t.numel()]


@pytest.mark.parametrize("on_hopper", [False, True])
def test_fake_results_have_the_shapes_of_real_ones(on_hopper: bool):
    """If false, torch.compile plans for other buffers than the operators make."""
    dtype = BF16 if on_hopper else FP32
    with hopper.emulated() if on_hopper else contextlib.nullcontext():
        for name, recipe in RECIPES.items():
            layer = fq.convert(nn.ModuleDict({"fc": nn.Linear(40, 56, dtype=dtype)}), recipe)["fc"]
            for shape in SHAPES:
                x = values(*shape, dtype=dtype)
                y, saved = graph_call(layer, x, graph_op._graph_linear)
                saved = saved or [x]
                backward = (layer._handle, [56, 40], layer.plan.key, [True] * 3, True)
                real = [y, *saved, *graph_op._graph_linear_backward(y, layer.weight, saved, *backward)]
                with FakeTensorMode() as mode:
                    fake_x = mode.from_tensor(x)
                    y, saved = graph_call(layer, fake_x, graph_op._fake_linear)
                    fake = [y, *(saved or [fake_x]), *graph_op._fake_linear_backward(y, None, saved, *backward)]
                assert list(map(facts, fake)) == list(map(facts, real)), (name, shape)


@pytest.mark.parametrize("name", laws.sample(["fp8_delayed", "fp8_block", "mxfp8", "nvfp4"], 2))
def test_compiled_blocks_are_the_eager_ones_on_hopper(name: str):
    """If false, a graph calls other kernels than eager mode, or gives them other layouts."""
    results = []
    with hopper.emulated() as operators:
        for prepare in (lambda m: m, compiled):
            operators.calls.clear()
            model = prepare(net(RECIPES[name], d=48, hidden=64, dtype=BF16, bias=False))
            seen = train(model, 1, rows=(64,), d=48)
            results.append((seen, [(c.name, c.row, c.col) for c in operators.calls if "quantize" not in c.name]))
    (want, calls), (got, compiled_calls) = results
    assert_same(got, want, name)
    # A node of eager mode holds codes of its weights, which a forward of the same version makes again; graphs keep them.
    of_weights = [{c for c in made if c[0] in ("linear_weight", "anchor_codes")} for made in (compiled_calls, calls)]
    assert of_weights[0] == of_weights[1]
    assert [c for c in compiled_calls if c not in of_weights[0]] == [c for c in calls if c not in of_weights[0]]
    assert graphs() == 2


def test_cached_graphs_know_no_weight():
    """If false, a graph cached on disk depends on one layer's weight, or is taken for a layer of another shape."""
    texts = [[stable_text(m.weight) for m in layers(net(RECIPES[name], 2))] for name in FEW]
    assert texts[0] == texts[1] and texts[0][:3] == texts[0][3:]
    assert len(set(texts[0])) == 2  # gate and up, down
    _, context = layers(net(RECIPES["mxfp8"]))[0].weight.__tensor_flatten__()
    assert pickle.loads(pickle.dumps(context)).value is None


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_the_same_operators():
    """If false, the default backend reorders, drops or repeats a layer's operator."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 56), nn.ReLU(), nn.Linear(56, 40, bias=False))

    def run(prepare, name):
        model = prepare(fq.convert(nn.Sequential(copy.deepcopy(plain)), RECIPES[name]))
        STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
        STEP.publish()
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(3):
            x = values(24, 40, seed=step).requires_grad_()
            model(x).square().mean().backward()
            seen += [x.grad] + [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return seen + histories(model)

    for name in FEW:
        assert_same(run(lambda m: compiled(m, "inductor"), name), run(lambda m: m, name), name)

# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) of converted layers: functional operators, eager mode's bits, one
graph for equal blocks."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.linear.program import in_graph
from fsdp_quant.ops import native
from fsdp_quant.ops.product_error import PROBED_STEPS, SETTLED_STEPS
from fsdp_quant.tensor import torch_compat
from fsdp_quant.tensor.quantized_tensor import stable_text

FP32, BF16 = torch.float32, torch.bfloat16
RECIPES = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_delayed": recipes.fp8_delayed(length=3),
    "fp8_row": recipes.fp8_row(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4/identity": recipes.hybrid("nvfp4", "identity"),
    "dequantized": recipes.mxfp8(backward_override="dequantized"),
    "kept input": recipes.fp8_delayed(length=2, save_original_input=True),
}
FEW = ("fp8_delayed", "nvfp4")  # histories; random bits
SETTINGS = {
    "fp32": (FP32, True, False),
    "bf16": (BF16, False, False),
    "autocast": (FP32, True, True),
}
CASES = [
    (n, s)
    for s in SETTINGS
    for n in RECIPES
    if n in FEW or (s == "fp32" and n in recipes.names()) or s == "bf16"
]


@pytest.fixture(autouse=True)
def _fresh():
    """Each test starts at step 0 of seed 0, with empty counters and nothing compiled; breaks and
    needless graphs raise."""
    with kept_step():
        torch._dynamo.reset()
        dynamo_counters.clear()
        counters.reset()
        with dynamo_config.patch(
            automatic_dynamic_shapes=True, recompile_limit=8, fail_on_recompile_limit_hit=True
        ):
            yield


def graphs() -> int:
    assert not dynamo_counters["graph_break"], dict(dynamo_counters["graph_break"])
    return dynamo_counters["stats"]["unique_graphs"]


class Block(nn.Module):
    """Residual SwiGLU [.., d] -> [.., d]; `recompute` checkpoints it inside."""

    def __init__(
        self,
        d: int = 40,
        hidden: int = 56,
        bias: bool = True,
        dtype: torch.dtype = FP32,
        recompute: bool = False,
    ):
        super().__init__()
        self.gate, self.up = (
            nn.Linear(d, hidden, bias, dtype=dtype),
            nn.Linear(d, hidden, bias, dtype=dtype),
        )
        self.down, self.recompute = nn.Linear(hidden, d, bias, dtype=dtype), recompute

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))


def net(recipe: fq.Recipe, blocks: int = 1, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return fq.convert(nn.Sequential(*(Block(**options) for _ in range(blocks))), recipe)


def compiled(model: nn.Sequential, backend: str | Callable = "aot_eager") -> nn.Sequential:
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    return model


def layers(model: nn.Module) -> list[fq.Linear]:
    return [m for m in model.modules() if isinstance(m, fq.Linear)]


def histories(model: nn.Module) -> list[Tensor]:
    found = {k: h for m in layers(model) for k, h in m._weight_state.histories.items()}
    return [
        t.clone()
        for _, h in sorted(found.items(), key=lambda item: str(item[0]))
        for t in (h.amaxes, h.encode_scale)
    ]


def train(
    model: nn.Sequential,
    steps: int = 2,
    *,
    call: Callable | None = None,
    rows: tuple[int, ...] = (24,),
    d: int = 40,
    autocast: bool = False,
    around: Callable = contextlib.nullcontext,
    before: Callable[[int], None] = lambda step: None,
    evaluate: bool = True,
) -> list[Tensor]:
    """Outputs, all gradients, weights and histories of some steps of two micro-batches, an
    evaluation between them."""
    STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 3, 0, 0, False
    STEP.publish()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
    dtype = model[0].down.weight.dtype
    for step in range(steps):
        before(step)
        for micro_batch in range(2):
            fq.begin_step(step, micro_batch)
            x = values(
                rows[step % len(rows)], d, seed=10 * step + micro_batch, dtype=dtype
            ).requires_grad_()
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
    return {what: counters.of(what) for what in ("gemm", "departure")}


@pytest.mark.parametrize("name, setting", laws.sample(CASES, 3))
def test_compiled_blocks_are_the_eager_ones(name: str, setting: str):
    """If false, torch.compile breaks the graph, computes other bits, does other work, or compiles
    each block anew."""
    dtype, bias, autocast = SETTINGS[setting]
    want = train(net(RECIPES[name], 2, dtype=dtype, bias=bias), autocast=autocast)
    ran = really_ran()
    counters.reset()
    got = train(compiled(net(RECIPES[name], 2, dtype=dtype, bias=bias)), autocast=autocast)
    assert_same(got, want, name)
    assert really_ran() == ran, "tracing was counted, or another product ran"
    assert graphs() == 2, "one graph to train and one to evaluate, for all blocks"


def test_equal_blocks_share_a_graph_and_steps_add_none():
    """If false, compiling takes a graph a block or a step: names, random keys, weights or histories
    are constants in it."""
    small = {"d": 16, "hidden": 16, "bias": False}
    with contextlib.ExitStack() as stack:
        forbid = dynamo_config.patch(error_on_recompile=True)
        model = compiled(net(RECIPES["nvfp4"], 5, **small))
        got = train(
            model,
            3,
            rows=(16,),
            d=16,
            before=lambda step: step == 1 and stack.enter_context(forbid),
        )
    assert_same(got, train(net(RECIPES["nvfp4"], 5, **small), 3, rows=(16,), d=16), "nvfp4")
    assert graphs() == 2


def test_graphs_read_weights_as_they_are():
    """If false, a compiled step multiplies the codes of older weights."""
    model = compiled(net(RECIPES["mxfp8"]))
    x = values(24, 40)
    model(x)
    writes = {
        "in place": lambda w: w.mul_(2),
        "data": lambda w: setattr(w, "data", torch.ones(w.shape)),
        "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
        "pointer": lambda w: w.detach().numpy().fill(3),
    }
    for what, write in writes.items():
        before = model(x)
        with torch.no_grad():
            write(model[0].down.weight)
        assert not torch.equal(model(x), before), what
        assert_same_bytes(model(x), Block.forward(model[0], x), what)


@pytest.mark.parametrize("name", FEW)
def test_forwards_may_run_ahead_of_their_backwards(name: str):
    """If false, a pipeline's second backward is refused: the first one wrote a history, or a step,
    that the graph saved."""

    def run(model):
        train(model, 1, evaluate=False)
        xs = [values(24, 40, seed=i).requires_grad_() for i in range(3)]
        with fq.token_offset(5):
            ys = [model(x) for x in xs]
            for y in ys:
                y.square().mean().backward()
        return [x.grad for x in xs] + [p.grad for p in model.parameters()] + histories(model)

    assert_same(run(compiled(net(RECIPES[name]))), run(net(RECIPES[name])), name)


@pytest.mark.parametrize("name", laws.every_second(list(FEW), 0))
def test_checkpointing_changes_no_bit(name: str):
    """If false, a recomputation inside or around a compiled block draws other bits or records
    another amax."""
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


@pytest.mark.parametrize("name", laws.every_second(list(FEW), 0))
def test_users_hooks_and_deleted_layers_change_nothing(name: str):
    """If false, offloading under torch.compile loses the weight's history or codes, or a backward
    needs a living model."""
    want = train(net(RECIPES[name]), evaluate=False)
    for what, hooks in {
        "copied": (torch.clone, lambda t: t),
        "aliased": (torch.Tensor.detach, torch.Tensor.detach),
    }.items():
        around = lambda h=hooks: torch.autograd.graph.saved_tensors_hooks(*h)  # noqa: E731
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
    fq.begin_step(9)  # the original rolls what it has recorded
    for what, make in {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    }.items():
        copied, eager = make(original), copy.deepcopy(original)
        tensors = [
            t
            for model in (original, copied)
            for m in layers(model)
            for of in m.runtime.graphs.delayed.values()
            for t in of[1]
        ]
        assert len({t.data_ptr() for t in tensors}) == len(tensors) == 18, what
        kept = histories(original)
        assert_same(train(compiled(copied)), train(eager), what)
        assert_same(histories(original), kept, f"{what}: the original")


class InPlace(Block):
    """Writes outputs of its layers in place."""

    def mlp(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.gate(x).mul_(2), inplace=True) * self.up(x))
        y += x
        return y.view(-1).add_(1).view_as(x)


@pytest.mark.parametrize("shape", [(24, 40), (2, 12, 40)])
def test_outputs_take_operations_in_place(shape: tuple[int, ...]):
    """If false, a compiled Llama 4, whose experts are added to its shared one in place, does not
    compile."""
    results = []
    for prepare in (lambda m: m, compiled):
        torch.manual_seed(0)
        model, x = (
            prepare(fq.convert(nn.Sequential(InPlace()), RECIPES["mxfp8"])),
            values(*shape, dtype=FP32).requires_grad_(),
        )
        y = model(x)
        y.square().mean().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_same(results[1], results[0], "in place")


def test_frozen_weights_keep_their_histories():
    """If false, the histories of layers that no optimizer holds never advance under
    torch.compile."""

    def frozen():
        model = net(RECIPES["fp8_delayed"])
        for block in model:
            block.down.requires_grad_(False)
        return model

    def trained(model):
        optimizer, seen = (
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
            [],
        )
        for step in range(3):
            y = model(values(24, 40, seed=step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [y.detach(), *histories(model)]
        return seen

    assert_same(train(compiled(frozen()), 3), train(frozen(), 3), "frozen")
    assert_same(trained(compiled(frozen())), trained(frozen()), "held by no optimizer")


def test_other_batch_sizes_take_one_more_graph():
    """If false, every length of a batch compiles the model again."""
    rows = (24, 7, 33, 64, 5)
    want = train(net(RECIPES["fp8_delayed"]), 5, rows=rows)
    assert_same(train(compiled(net(RECIPES["fp8_delayed"])), 5, rows=rows), want, "lengths")
    assert graphs() == 4, "of one length and of any, to train and to evaluate"


def test_plain_weights_are_multiplied_as_wrapped_ones():
    """If false, `torch.func.functional_call` with plain tensors gives other bits than the module's
    own parameters."""
    model = compiled(net(RECIPES["mxfp8"]))
    plain = {name: p.detach() * 1 for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, plain, (values(24, 40),))
    assert_same_bytes(got, model(values(24, 40)), "the same weights")


SHAPES = ((2, 24, 40), (33, 40), (0, 40))


def facts(t: Tensor) -> tuple:
    """Shape, dtype, and strides where they say anything."""
    return t.shape, t.dtype, [s for n, s in zip(t.shape, t.stride()) if n > 1 and t.numel()]


class Compared(TorchDispatchMode):
    """Compares what each operator of the library gives with what its fake does."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        real = func(*args, **(kwargs or {}))
        if func.namespace.startswith("fsdp_quant"):
            with FakeTensorMode() as mode:
                fake_args, fake_kwargs = tree_map_only(
                    Tensor, mode.from_tensor, (args, kwargs or {})
                )
                fake = func(*fake_args, **fake_kwargs)
            made = ([t for t in tree_leaves(of) if t is not None] for of in (fake, real))
            for got, want in zip(*made, strict=True):
                assert facts(got) == facts(want), (
                    func,
                    [facts(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)],
                )
            self.seen.add(func.name().split("::")[1].split(".")[0])
        return real


@pytest.mark.parametrize("on_hopper", [False, True])
def test_fake_results_have_the_shapes_of_real_ones(on_hopper: bool):
    """If false, torch.compile plans for other buffers than the operators make."""
    dtype = BF16 if on_hopper else FP32
    with hopper.emulated() if on_hopper else contextlib.nullcontext(), Compared() as compared:
        for recipe in RECIPES.values():
            layer = fq.convert(nn.ModuleDict({"fc": nn.Linear(40, 56, dtype=dtype)}), recipe)["fc"]
            given = layer.runtime.graphs
            for shape in SHAPES:
                x = values(*shape, dtype=dtype).requires_grad_()
                in_graph(
                    x,
                    layer.weight,
                    layer.bias,
                    layer.plan.key,
                    True,
                    True,
                    STEP.in_graph(given.ids.device),
                    given.ids,
                    given.guards,
                    *given.delayed[layer.plan.histories_key],
                ).sum().backward()
    expected = (
        {"quantize", "gemm", "anchor_codes", "product_error"}
        if on_hopper
        else {"reference_encode", "reference_gemm"}
    )
    assert expected <= compared.seen, compared.seen


@pytest.mark.parametrize("name", laws.sample(["fp8_delayed", "fp8_block", "mxfp8", "nvfp4"], 2))
def test_compiled_blocks_are_the_eager_ones_on_hopper(name: str):
    """If false, a graph calls other kernels than eager mode, or gives them other layouts."""
    results = []
    with hopper.emulated() as operators:
        for prepare in (lambda m: m, compiled):
            model = prepare(net(RECIPES[name], d=48, hidden=64, dtype=BF16, bias=False))
            operators.calls.clear()
            results.append(train(model, 1, rows=(64,), d=48))
        assert_same(results[1], results[0], name)
        assert {c.name for c in operators.calls} <= {
            "statistics",
            "quantize",
            "quantize_anchored",
            "anchor_codes",
            "gemm",
            "product_error",
        }
        in_graphs = name == "mxfp8" and len(results) == 2
        # of two micro-batches, an evaluation
        amaxes = 3 * sum(isinstance(m, fq.Linear) for m in model.modules()) if in_graphs else 0
        assert operators.count("statistics") == amaxes, (
            "the backward takes the amax of a weight again, or the forward none"
        )
    assert graphs() == 2


class Checked:
    """A compiled net that the underflow check watches, by blocks or as a whole."""

    def __init__(self, gpu: hopper.Operators, whole: bool):
        self.gpu = gpu
        self.model = net(RECIPES["mxfp8"], d=48, hidden=64, dtype=BF16, bias=False)
        options = {"fullgraph": True, "backend": "aot_eager"}
        self.call = torch.compile(self.model, **options) if whole else compiled(self.model)

    def launches(self, grad: bool = True) -> int:
        """Run a step, or an evaluation, and return how often it launched the check."""
        before = self.gpu.count("product_error")
        x = values(64, 48, dtype=BF16).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            y = self.call(x)
        if grad:
            y.sum().backward()
        return self.gpu.count("product_error") - before


def test_compiled_steps_launch_the_underflow_check_in_probed_ones():
    """If false, the host of each compiled step launches kernels that return at once."""
    STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
    STEP.publish()
    with hopper.emulated() as gpu:
        one = Checked(gpu, whole=False)
        launches = [one.launches() for _ in range(PROBED_STEPS + 1)]
        assert launches == [9, *[0] * (PROBED_STEPS - 1), 9], "of three layers' three products"
        for step, probed in ((5, 0), (2 * PROBED_STEPS, 1), (SETTLED_STEPS + PROBED_STEPS, 0)):
            for micro_batch in range(2):
                fq.begin_step(step, micro_batch)
                assert one.launches() == 9 * probed
                assert one.launches(grad=False) == 3 * probed, "an evaluation in the step"


def test_steps_that_the_device_counts_launch_the_underflow_check():
    """If false, graphs that count steps are never looked at, where another model of the process, or
    a reader of the step, has told the host a step that is not probed."""
    STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
    STEP.publish()
    with hopper.emulated() as gpu:
        other, whole = Checked(gpu, whole=False), Checked(gpu, whole=True)
        assert [other.launches() for _ in range(3)] == [9, 0, 0]
        for _ in range(PROBED_STEPS + 1):  # the emulation asserts that no probed step is hidden
            assert whole.launches() == 9
            assert STEP.step == fq.state_dict(whole.model)["step"] - 1
        other.launches()
        assert whole.launches() == 9


def test_a_captured_step_holds_the_underflow_check(monkeypatch):
    """If false, replays of a capture in a step that is not probed look at no step."""
    STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
    STEP.publish()
    with hopper.emulated() as gpu:
        one = Checked(gpu, whole=False)
        assert [one.launches() for _ in range(3)] == [9, 0, 0]
        with monkeypatch.context() as patch:
            patch.setattr(torch_compat, "is_captured", lambda x: True)
            STEP.calls += 1  # as inside a call of the model
            assert one.model[0](values(64, 48, dtype=BF16)).shape == (64, 48)  # a part
            STEP.calls -= 1
            assert (gpu.count("product_error"), STEP.graphs_count) == (12, False)
            assert one.launches() == 9  # a whole step, which replays count
        assert STEP.graphs_count and one.launches() == 9


def test_cached_graphs_know_no_weight():
    """If false, a graph cached on disk depends on one layer's codes, or is taken for a layer of
    another shape or format."""
    texts = []
    for name in ("fp8_delayed", "nvfp4"):
        with fq.quantized_model_init(RECIPES[name]):
            of_layers = layers(net(RECIPES[name], 2))
        texts.append([stable_text(m.weight) for m in of_layers])
        assert texts[-1][:3] == texts[-1][3:]
        assert len(set(texts[-1])) == 2  # gate and up, down
    assert not set(texts[0]) & set(texts[1])
    _, context = of_layers[0].weight.__tensor_flatten__()
    assert pickle.loads(pickle.dumps(context)).value is None


def test_a_compiled_region_has_the_recipe_of_contexts_that_are_entered_later():
    """If false, a layer that was compiled outside of fq.autocast ignores it, in silence."""
    layer = fq.convert(nn.Sequential(nn.Linear(64, 64, bias=False, dtype=BF16)), RECIPES["mxfp8"])
    run, x, outside = (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        values(32, 64, dtype=BF16),
        None,
    )
    for recipe in (None, RECIPES["fp8_current"], None):
        with contextlib.nullcontext() if recipe is None else fq.autocast(recipe):
            y = run(x)
            assert_same_bytes(y, layer(x), f"{recipe}")
        outside = y if outside is None else outside
        assert torch.equal(y, outside) == (recipe is None)


@pytest.mark.parametrize(
    "options", [{"recipe": recipes.mxfp8(scale_rounding="floor")}, {"enabled": False}], ids=str
)
def test_a_context_that_is_entered_in_a_compiled_region_has_its_recipe(options: dict):
    """If false, fq.autocast breaks graphs, or overrides nothing inside them, or what follows it."""
    layer, x = (
        fq.convert(nn.Sequential(nn.Linear(64, 64)), RECIPES["mxfp8"]),
        values(32, 64, dtype=FP32),
    )

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        with fq.autocast(**options):
            inside = layer(x)
        return inside, layer(x)

    got, want = torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x)
    assert_same(got, want, f"{options}")
    assert not torch.equal(*got)


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

    for name in laws.every_second(list(FEW), 0):
        assert_same(run(lambda m: compiled(m, "inductor"), name), run(lambda m: m, name), name)


# What graphs hold #


def cut_by_inductor(
    compiler: Callable = lambda module, _: make_boxed_func(module.forward),
) -> Callable:
    """A backend that cuts graphs as inductor does, and runs operators one by one."""
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def captured(model: nn.Module, x: Tensor) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """The graphs of a forward and its backward, as the partitioner of inductor cuts them."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    torch.compile(model, fullgraph=True, backend=cut_by_inductor(keep))(x).float().sum().backward()
    return tuple(graphs)


def operators_of(*graphs: torch.fx.Graph) -> list[torch._ops.OpOverload]:
    return [
        n.target
        for graph in graphs
        for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
    ]


def own(*graphs: torch.fx.Graph) -> list[str]:
    """Names of the library's operators, also of those that write, which torch wraps."""
    called = [
        n.args[0] if "auto_functionalized" in str(n.target) else n.target
        for graph in graphs
        for n in graph.nodes
        if n.op == "call_function"
    ]
    found = [op for op in called if getattr(op, "namespace", "").startswith("fsdp_quant")]
    return [op.name().split("::")[1].split(".")[0] for op in found]


class Attention(nn.Module):
    """Norm, three projections of one x, something of them, a projection: [.., d] -> [.., d]."""

    def __init__(self, d: int, dtype: torch.dtype):
        super().__init__()
        self.norm = nn.RMSNorm(d, dtype=dtype)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, False, dtype=dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.o(torch.sigmoid(self.q(h) * self.k(h)) * self.v(h))


@pytest.mark.parametrize("name, on_hopper", laws.crossed(RECIPES, (False, True), stride=3))
def test_graphs_hold_functional_operators_alone(name: str, on_hopper: bool):
    """If false, Python of ours runs in a compiled step, a graph finds its layer by a number, or no
    CUDA graph may hold it."""
    with hopper.emulated() if on_hopper else contextlib.nullcontext():
        model = net(RECIPES[name], dtype=BF16, d=48, hidden=64)
        graphs = captured(model, values(64, 48, dtype=BF16).requires_grad_())
    kernels = {
        "quantize",
        "quantize_anchored",
        "anchor_codes",
        "gemm",
        "watched_gemm",
        "dequantize",
        "random_key",
        "column_sums",
        "tensor_decode_scale",
        "statistics",
        "transpose_codes",
    }
    references = {
        f"reference_{of}" for of in ("encode", "decode", "gemm", "random_key", "column_sums")
    }
    # A pair that no kernel multiplies is the reference's on a GPU too.
    allowed = (
        kernels | ({"reference_gemm"} if name == "dequantized" else set())
        if on_hopper
        else references
    )
    assert set(own(*graphs)) <= allowed, set(own(*graphs)) - allowed
    for op in operators_of(*graphs):
        writes = [
            a.name
            for a in op._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        assert not writes or op is torch.ops.aten.copy_.default, f"{op} writes {writes}"
        assert torch.Tag.cudagraph_unsafe not in op.tags, op
    placeholders = [n.meta["val"] for graph in graphs for n in graph.nodes if n.op == "placeholder"]
    assert all(
        p.numel() > 1 or p.dtype is not torch.int64 for p in placeholders if isinstance(p, Tensor)
    ), "a number is handed over"


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_layers_that_share_an_input_share_its_codes(name: str):
    """If false, q, k and v quantize their input three times each way."""
    with hopper.emulated():
        torch.manual_seed(0)
        model = fq.convert(nn.Sequential(Attention(48, BF16)), RECIPES[name])
        if name == "fp8_delayed":
            for layer in (model[0].k, model[0].v):
                layer.runtime.share_input_of(model[0].q.runtime)
        forward, backward = captured(model, values(64, 48, dtype=BF16).requires_grad_())
    made = own(forward)
    products = "watched_gemm" if name == "mxfp8" else "gemm"
    assert [m for m in made if "gemm" in m or "error" in m] == [products] * 4
    assert "statistics" not in made, "the amax of a weight is an operator of its own"
    assert made.count("quantize") + made.count("quantize_anchored") == 4 + 2, (
        "of four weights, and two inputs (both ways at once)"
    )
    of_inputs = own(backward).count("quantize") + own(backward).count("quantize_anchored")
    assert of_inputs == 4 + 4, "of four weights, and four gradients (both ways at once)"


def test_the_backward_keeps_codes_of_inputs_and_none_of_weights():
    """If false, a compiled model keeps inputs in high precision, or codes that follow from
    weights."""
    with hopper.emulated():
        cases = [
            ("fp8_delayed", (48, 48, 64)),
            ("fp8_current", (48, 64)),
            ("mxfp8", (48, 64)),
            ("fp8_block", (48, 64)),
            ("nvfp4", (24, 32)),
        ]
        for name, sizes in laws.every_second(cases, 0):
            model, rows = net(RECIPES[name], dtype=BF16, d=48, hidden=64, bias=False), 256
            forward, _ = captured(model, values(rows, 48, dtype=BF16).requires_grad_())
            kept = [
                n.meta["val"]
                for n in tree_leaves(next(n for n in forward.nodes if n.op == "output").args[0])[1:]
            ]
            # of weights at least 1536
            codes = [t.numel() for t in kept if t.dtype is torch.uint8 and t.numel() > 1024]
            assert codes == [size * rows for size in sizes], (name, [tuple(t.shape) for t in kept])


def test_inputs_that_are_computed_again_have_the_bits_of_the_forward():
    """If false, less memory (`save_original_input`) is another training."""
    with hopper.emulated():
        for make in (recipes.fp8_current, recipes.nvfp4):
            want = train(net(make(), dtype=BF16), steps=1)
            model = net(make(save_original_input=True), dtype=BF16)
            assert_same(train(compiled(model, cut_by_inductor()), steps=1), want, make.__name__)


def size_of_saved(forward: torch.fx.Graph) -> int:
    kept = [
        n.meta["val"]
        for n in tree_leaves(next(n for n in forward.nodes if n.op == "output").args[0])[1:]
    ]
    given = {n.meta["val"] for n in forward.nodes if n.op == "placeholder"}
    return sum(t.nbytes for t in kept if isinstance(t, Tensor) and t not in given)


@pytest.mark.parametrize(
    ("name", "on_hopper"), [("fp8_current", False), ("fp8_current", True), ("mxfp8", True)]
)
def test_a_memory_budget_gives_up_codes_before_products(name: str, on_hopper: bool):
    """If false, torch's activation_memory_budget takes our products for free: it makes them again
    where codes would do."""
    sizes = []
    for budget in (1.0, 0.95, 0.4):
        around = functorch_config.patch(
            activation_memory_budget=budget, is_non_builtin_to_include=True
        )
        with hopper.emulated() if on_hopper else contextlib.nullcontext(), around:
            model = net(RECIPES[name], dtype=BF16, d=48, hidden=64, bias=False)
            forward, backward = captured(model, values(256, 48, dtype=BF16).requires_grad_())
        torch._dynamo.reset()
        again = sum("gemm" in name for name in own(backward)) - 6
        assert (again > 0) == (budget == 0.4), (budget, again)
        sizes.append(size_of_saved(forward))
    assert sizes[0] > sizes[1] > sizes[2], sizes


@pytest.mark.parametrize("name", laws.sample(list(RECIPES), 3))
def test_what_a_memory_budget_makes_again_has_the_bits_of_the_forward(name: str):
    """If false, less memory is another training: with other random bits, or amaxes that are
    recorded twice."""
    want = train(net(RECIPES[name], 2, dtype=BF16))
    for builtin in (True, False):
        with functorch_config.patch(
            activation_memory_budget=0.4, is_non_builtin_to_include=builtin
        ):
            assert_same(
                train(compiled(net(RECIPES[name], 2, dtype=BF16), cut_by_inductor())), want, name
            )
        torch._dynamo.reset()


@pytest.mark.parametrize("name", laws.every_second(list(FEW), 1))
def test_a_model_that_counts_in_its_graph_is_within_a_budget_the_same(name: str):
    """If false, the backward makes the step, or a factor, again of an input that the forward has
    written since."""

    def run(budget: float) -> list[Tensor]:
        model, seen = net(RECIPES[name], 2, dtype=BF16), []
        STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
        STEP.publish()
        call = torch.compile(model, fullgraph=True, backend=cut_by_inductor())
        for step in range(3):
            x = values(24, 40, seed=step, dtype=BF16).requires_grad_()
            y = call(x)
            y.float().square().mean().backward()
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        torch._dynamo.reset()
        return seen + histories(model)

    want = run(1.0)
    for budget in laws.every_second([0.5, 0.1], 1):
        with functorch_config.patch(
            activation_memory_budget=budget, is_non_builtin_to_include=True
        ):
            assert_same(run(budget), want, f"{name}, {budget}")


def test_a_converted_model_has_the_flops_of_the_plain_one():
    """If false, torch's FlopCounterMode, and whoever takes a step's FLOP/s from it, sees another
    model."""

    def counted(run: Callable) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    x, plain = values(24, 40, dtype=FP32), nn.Sequential(Block())
    want = counted(lambda: plain(x).sum().backward())
    assert want == 2 * 24 * 40 * 56 * 3 * 3 - 2 * 2 * 24 * 40 * 56  # x needs no gradient
    for name in ("fp8_current", "mxfp8"):
        model = net(RECIPES[name])
        assert counted(lambda: model(x).sum().backward()) == want, name
        compiled = torch.compile(model, backend="aot_eager")
        assert counted(lambda: compiled(x).sum().backward()) == want, f"{name}, compiled"
    tokens, sizes = values(24, 40, dtype=FP32).requires_grad_(), [10, 14]
    for packed, kind in itertools.product((False, True), ("mxfp8", "fp8_current")):
        experts = fq.GroupedLinear(2, 40, 56, packed=packed, recipe=RECIPES[kind])
        for module, splits in itertools.product(
            (experts, torch.compile(experts, backend="aot_eager")),
            (sizes, torch.tensor([10, 24])),
        ):
            assert (
                counted(lambda: module(tokens, splits).sum().backward()) == 3 * 2 * 24 * 40 * 56
            ), (packed, kind)
    with hopper.emulated():
        for module in (
            fq.Linear(64, 32, recipe=RECIPES["fp8_current"]),
            fq.Linear(64, 32, recipe=RECIPES["mxfp8"]),
        ):
            module, y = module.bfloat16(), values(16, 64).requires_grad_()
            assert counted(lambda: module(y).sum().backward()) == 3 * 2 * 16 * 64 * 32, "kernels"
    rows, e2m1 = (32, 64), native.ELEMENTS["e2m1"]
    assert (
        native.FLOPS["gemm"](rows, (48, 64), None, None, 1, 1, BF16, out_shape=None)
        == 2 * 32 * 48 * 64
    )
    assert (
        native.FLOPS["gemm"](rows, (48, 64), None, None, e2m1, e2m1, BF16, out_shape=None)
        == 2 * 32 * 48 * 128
    )
    assert native.FLOPS["grouped_gemm"]((32, 48), rows, (8, 48, 64)) == 2 * 32 * 48 * 64
    assert (
        native.FLOPS["grouped_gemm_wgrad"]((8, 32, 48), (32, 512), (48, 512)) == 2 * 32 * 48 * 512
    )


def test_transformers_llama_compiles_whole_and_layer_by_layer():
    """If false, the models that people have break graphs, recompile or train otherwise when they
    are compiled."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        use_cache=False,
    )

    def run(prepare: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        fq.convert(model, RECIPES["nvfp4"], skip="lm_head")
        STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
        STEP.publish()
        call, seen = prepare(model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            with dynamo_config.patch(error_on_recompile=step == 2):
                ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
                logits = call(input_ids=ids).logits
                F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()
                seen += [logits.detach()] + [p.grad for p in model.parameters()]
                optimizer.zero_grad()
        return seen

    def by_layer(model):
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        return model

    want = run(lambda model: model)
    assert_same(run(by_layer), want, "layer by layer")
    assert graphs() <= 2, "the first layer's input needs a gradient as those of the others do"
    torch._dynamo.reset()
    dynamo_counters.clear()
    # One graph adds up gradients in another order, of a model without our layers too: its first
    # forward is to be the same.
    whole = run(lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert_same_bytes(whole[0], want[0], "whole")
    assert graphs() == 2, "the hook that begins a step, and the model"


def test_a_model_compiled_as_a_whole_counts_its_steps_on_the_device():
    """If false, its gradients are rounded with one draw for ever, or the count breaks the graph or
    makes one a step."""
    results = []
    for prepare in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False
        STEP.publish()
        model = net(RECIPES["nvfp4"])
        call, seen = prepare(model), []
        for step in range(4):
            x = values(24, 40, seed=step, dtype=FP32).requires_grad_()
            call(x).square().mean().backward()
            seen.append(x.grad)
            assert STEP.step == step and fq.state_dict(model)["step"] == step + 1
        results.append(seen)
        assert graphs() <= 2, "none after the second step"
    assert_same(results[1], results[0], "nvfp4")


@pytest.mark.parametrize("name", laws.every_second(["nvfp4", "fp8_delayed"], 0))
def test_each_model_that_is_compiled_as_a_whole_has_a_count_of_its_own(name: str):
    """If false, a second model of the process, or one that resumes, goes on where another one was,
    with other random bits."""
    STEP.seed, STEP.step, STEP.counted_by_hand = 3, 0, False

    def steps_of(model: nn.Module, steps: range, compiled: bool) -> list[Tensor]:
        call, seen = (
            torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model,
            [],
        )
        for step in steps:
            x = values(24, 40, seed=step, dtype=FP32).requires_grad_()
            call(x).square().mean().backward()
            seen.append(x.grad)
        return seen

    def resumed(model: nn.Module) -> nn.Module:
        other = net(RECIPES[name])
        other.load_state_dict(model.state_dict())
        fq.load_state_dict(other, fq.state_dict(model))
        return other

    models = {compiled: net(RECIPES[name]) for compiled in (False, True)}
    want = steps_of(models[False], range(3), False)
    assert_same(steps_of(models[True], range(3), True), want, "after another model")
    want = steps_of(models[False], range(3, 5), False)
    for before in (False, True):
        model = resumed(models[before]) if before else models[True]
        assert_same(steps_of(model, range(3, 5), True), want, "resumed" if before else "goes on")
        if not before:  # the state that is resumed is that after three steps
            models[True] = net(RECIPES[name])
            steps_of(models[True], range(3), True)


def test_a_model_that_left_the_meta_device_makes_no_second_graph():
    """If false, what graphs read is made in the first one, which is then traced again."""
    with torch.device("meta"):
        model = net(RECIPES["fp8_delayed"])
    model.to_empty(device="cpu").load_state_dict(net(RECIPES["fp8_delayed"]).state_dict())
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        call(values(24, 40, seed=step, dtype=FP32)).square().mean().backward()
    assert graphs() == 1

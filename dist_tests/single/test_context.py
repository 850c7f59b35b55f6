# SPDX-License-Identifier: Apache-2.0
"""What changes between steps: autocast, random keys, optimizer steps, amax histories, checkpoints
of all that."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import context, recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, format_of
from fsdp_quant.linear import training_steps
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import DelayedScaling
from fsdp_quant.tensor import torch_compat


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, counted by training forwards, with empty counters."""
    with kept_step():
        restart()
        counters.reset()
        yield


def restart() -> None:
    STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 0, 0, 0, False
    STEP.publish()


def rounds_inputs_and_gradients(role):
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("mxfp8", rounding="stochastic")


def delayed_with(role, *, use="max", length=4, margin=0):
    return Quantizer("fp8_tensor", scaling=DelayedScaling(length, margin, use))


RECIPES = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "high_precision": recipes.mxfp8(backward_override="high_precision"),
    "dequantized": recipes.nvfp4(backward_override="dequantized"),
}
X, DY = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)


class Net(nn.ModuleDict):
    """A model, which may also be called by its pieces."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.stack([layer(x) for layer in self.values()]) if len(self) > 1 else self["fc"](x)
        )


def net(recipe: fq.Recipe) -> Net:
    torch.manual_seed(0)
    return fq.convert(Net({"fc": nn.Linear(40, 56)}), recipe)


def run(m: nn.Module, x: Tensor = X, dy: Tensor = DY) -> dict[str, Tensor]:
    m.zero_grad()
    x = x.clone().requires_grad_()
    y = m(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad.clone() for n, p in m.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what} {name}")


def history(m: nn.Module, slot: str, direction=ROWWISE) -> dict[str, Tensor]:
    """Amaxes, that of the step that runs first, and the encode factor of one history."""
    return fq.state_dict(m)["histories"][f"fc.{slot}.{direction.value}"]


# autocast #


@pytest.mark.parametrize("inside", RECIPES)
@pytest.mark.parametrize("own", ["identity", "mxfp8", "nvfp4"])
def test_autocast_equals_a_module_of_that_recipe(own: str, inside: str):
    """Otherwise a temporary recipe is half applied: the forward's, the weight's or the backward's
    formats are the module's own. The backward may run outside."""
    fq.begin_step(0)
    m = net(RECIPES[own])
    mine = run(m)
    with fq.autocast(RECIPES[inside]):
        got = run(m)
    assert_same(got, run(net(RECIPES[inside])), "inside")
    m.zero_grad()
    x = X.clone().requires_grad_()
    with fq.autocast(RECIPES[inside]):
        y = m["fc"](x)
    y.backward(DY)
    assert_same_bytes(x.grad, got["dx"], "backward outside")
    assert_same_bytes(m["fc"].weight.grad, got["fc.weight"], "backward outside")
    assert_same(run(m), mine, "afterwards")


def test_disabled_autocast_multiplies_in_high_precision():
    """Otherwise `enabled=False` leaves a quantized product inside."""
    m = net(recipes.nvfp4())
    torch.manual_seed(0)
    plain = Net({"fc": nn.Linear(40, 56)})
    with fq.autocast(enabled=False):
        assert_same(run(m), run(plain))
    assert counters.of("quantize") == {}
    with fq.autocast(recipes.mxfp8(), enabled=False):
        assert_same(run(m), run(plain))


def test_nested_autocast_follows_the_innermost():
    """Otherwise leaving an inner context does not restore the outer one, also when it raises."""
    fq.begin_step(0)
    m = net(recipes.mxfp8())
    want = {name: run(net(r)) for name, r in RECIPES.items()}
    with fq.autocast(recipes.fp8_block()):
        assert_same(run(m), want["fp8_block"], "outer")
        with fq.autocast(enabled=False):
            assert_same(run(m), want["identity"], "inner")
            with fq.autocast(recipes.fp8_current()):
                assert_same(run(m), want["fp8_current"], "innermost")
            assert_same(run(m), want["identity"], "inner again")
        with pytest.raises(KeyError), fq.autocast(recipes.fp8_current()):
            raise KeyError
        assert_same(run(m), want["fp8_block"], "outer again")
    assert_same(run(m), want["mxfp8"], "own")


def test_autocast_follows_the_weight():
    """Otherwise an overriding format multiplies codes of a weight that has changed since, or a
    backward those of another forward."""
    m = net(recipes.mxfp8())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    with fq.autocast(recipes.fp8_block()):
        run(m)
        optimizer.step()
        fresh = net(recipes.fp8_block())
        fresh.load_state_dict(m.state_dict())
        want = run(fresh)
        assert_same(run(m), want, "after a step")
        m.zero_grad()
        x = X.clone().requires_grad_()
        y = m["fc"](x)
    with torch.no_grad():
        m["fc"].weight.mul_(2.0)
    y.backward(DY)
    assert_same_bytes(x.grad, want["dx"], "the codes of the forward, whatever is written behind it")


def test_autocast_keeps_the_histories_of_recipes_apart():
    """Otherwise a delayed scale made for e5m2 (maximum 57344) encodes e4m3 (448) and every gradient
    saturates.

    e4m3 rounds within 2^-4 of every element; gradients that saturate are off by their whole size.
    """
    m = net(recipes.fp8_delayed())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    with fq.autocast(recipes.fp8_delayed(grad_element="e4m3")):
        got = run(m)["dx"]
    want = DY @ m.state_dict()["fc.weight"]
    assert (got - want).norm() < 0.1 * want.norm()


def test_a_context_of_delayed_scaling_goes_on_as_a_module_of_it():
    """If false, the weight's history begins again in every forward of the context, in silence."""
    recipe, results = recipes.fp8_delayed(length=3), []
    for own in (recipe, recipes.mxfp8()):
        m = net(own)
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        for step, scale in enumerate((1.0, 30.0, 0.01, 0.5)):
            fq.begin_step(step)
            with fq.autocast(recipe) if own is not recipe else contextlib.nullcontext():
                results.append(run(m, X * scale))
            optimizer.step()
    for got, want in zip(results[4:], results):
        assert_same(got, want)


class Recomputed(nn.Module):
    """Three layers, the second in a context that the recomputed function enters."""

    def __init__(self, recompute: str | None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(40, 48), nn.Linear(48, 56), nn.Linear(56, 56)
        self.recompute = recompute

    def run(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.recompute is None:
            return fn(x)
        return checkpoint(fn, x, use_reentrant=self.recompute == "reentrant")

    def first(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with fq.autocast(recipes.fp8_row()):
            return self.b(h).relu()

    def both(self, x: Tensor) -> Tensor:
        return self.c(self.run(self.first, x) if self.recompute == "nested" else self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.both, x)


@pytest.mark.parametrize("backward", ["outside", "in another context", "in another thread"])
@pytest.mark.parametrize("recompute", ["non-reentrant", "reentrant", "nested"])
def test_a_recomputation_has_the_contexts_of_its_forward(recompute: str, backward: str):
    """If false, the gradients are those of a forward in another recipe, or with other random
    bits."""
    contexts = {
        "autocast": lambda: fq.autocast(recipes.fp8_block()),
        "disabled": lambda: fq.autocast(enabled=False),
        "token_offset": lambda: fq.token_offset(64),
        "none": contextlib.nullcontext,
    }
    results: dict[str, list[dict[str, Tensor]]] = {name: [] for name in contexts}
    for kind in (None, recompute):
        torch.manual_seed(0)
        m = fq.convert(Recomputed(kind), fq.CustomRecipe(rounds_inputs_and_gradients))
        for name, enter in contexts.items():
            fq.begin_step(0)
            m.zero_grad()
            x = X.clone().requires_grad_()
            with enter():
                y = m(x)
            if kind is None or backward == "outside":
                y.backward(DY)
            elif backward == "in another context":
                with fq.autocast(recipes.mxfp8()), fq.token_offset(128):
                    y.backward(DY)
            else:
                in_thread(lambda: y.backward(DY))
            gradients = {n: p.grad.clone() for n, p in m.named_parameters()}
            results[name].append({"y": y.detach(), "dx": x.grad} | gradients)
    for name, (want, got) in results.items():
        assert_same(got, want, name)
    distinct = {bytes(of[0]["a.weight"].numpy()) for of in results.values()}
    assert len(distinct) == len(contexts), "a control"


class RecomputedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn = fn
        return fn(x)

    @staticmethod
    def backward(ctx, dy):
        raise AssertionError("the forward is refused")


def test_functions_that_recompute_by_hand_are_refused_in_a_context():
    """If false, a checkpoint that is not torch's computes gradients of another recipe."""
    m, x = net(RECIPES["mxfp8"]), X.clone().requires_grad_()

    def inside(x: Tensor) -> Tensor:
        with fq.autocast(recipes.fp8_block()):
            return m(x)

    RecomputedByHand.apply(inside, x)
    with (
        pytest.raises(ValueError, match="fc: the backward of RecomputedByHandBackward would"),
        fq.autocast(recipes.fp8_block()),
    ):
        RecomputedByHand.apply(m, x)


def test_autocast_refuses_what_it_cannot_honour():
    """Otherwise the layers that a recipe keeps in high precision are quantized: one module does not
    know the last ones."""
    m = net(recipes.mxfp8())
    with pytest.raises(ValueError, match="tail"), fq.autocast(recipes.nvfp4(tail=0.25)):
        m["fc"](X)


# Steps #


def steps_seen(m: nn.Module, forwards: int = 3, call: Callable = run) -> list[int]:
    seen = []
    for _ in range(forwards):
        call(m)
        assert STEP.on(torch.device("cpu"))[1] == STEP.step
        seen.append(STEP.step)
    return seen


def test_training_forwards_are_the_steps_until_they_are_counted_by_hand():
    """Otherwise stochastic rounding repeats its bits, or a trainer that counts steps counts each
    twice."""
    m = net(recipes.nvfp4())
    on_device = STEP.on(torch.device("cpu"))
    assert steps_seen(m, 2) == [0, 1]
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():
        m(X)
        m.eval()(X)
    m.train()
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    assert STEP.step == 1, "an optimizer, evaluations and other models are no steps of this one"
    fq.begin_step(micro_batch=3)
    assert (STEP.step, STEP.micro_batch) == (1, 3)
    assert steps_seen(m, 1) == [2]
    fq.begin_step(10)
    assert steps_seen(m) == [10, 10, 10] and STEP.micro_batch == 0
    fq.begin_step(seed=7)
    assert on_device.tolist() == [7, 10, 0, -1, 0]
    assert STEP.on(torch.device("cpu")) is on_device


class Lookahead(torch.optim.Optimizer):
    """An optimizer that holds an optimizer, as torchtitan's container, ZeroRedundancyOptimizer, and
    many recipes do."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base = base
        super().__init__([p for group in base.param_groups for p in group["params"]], {})

    def step(self, closure=None) -> None:
        self.base.step()


class Own:
    """Plain SGD of nobody's class."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            p.sub_(p.grad, alpha=0.1)


class InBackward:
    """One optimizer per parameter, that steps as its gradient is there."""

    def __init__(self, parameters):
        for p in parameters:
            p.register_post_accumulate_grad_hook(
                lambda p, its=torch.optim.SGD([p], lr=0.1): its.step()
            )

    def step(self) -> None:
        pass


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "schedule"])
def test_steps_do_not_depend_on_the_optimizer(name: str):
    """Otherwise a wrapper counts each step twice, an optimizer per parameter once per parameter,
    and others never: schedules end early, scales lag behind, random bits repeat."""
    recipe = (
        recipes.schedule(recipes.mxfp8(), (2, None, recipes.nvfp4()))
        if name == "schedule"
        else recipes.by_name(name)
    )
    results = []
    for make in (
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: Lookahead(torch.optim.SGD(ps, lr=0.1)),
        Own,
        InBackward,
    ):
        m = net(recipe)
        optimizer, seen = make(m.parameters()), []
        for step in range(4):
            seen.append(run(m, X * (step + 1)) | {"step": STEP.on(X.device).clone()})
            optimizer.step()
        histories = fq.state_dict(m)["histories"]
        results.append(
            (
                seen,
                {f"{k} {n}": t for k, h in histories.items() for n, t in h.items()},
                m["fc"].recipe,
            )
        )
    for seen, histories, ends_with in results:
        for step, (got, want) in enumerate(zip(seen, results[0][0])):
            assert_same(got, want, f"step {step}")
        assert_same(histories, results[0][1], "histories")
        assert ends_with == results[0][2]
    assert name != "schedule" or results[0][2] == recipes.nvfp4()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputations_are_no_steps(reentrant: bool):
    """Otherwise the recomputed forward rounds with other bits than the forward, and steps count
    twice."""

    class Wraps(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(40, 56)
            self.recompute = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.fc, x, use_reentrant=reentrant) if self.recompute else self.fc(x)

    results = []
    for recompute in (False, True):
        m = fq.convert(Wraps(), fq.CustomRecipe(rounds_inputs_and_gradients))
        m.recompute = recompute
        results.append([run(m) for _ in range(2)])
        assert STEP.step == 1
    for got, want in zip(*results):
        assert_same(got, want)


def test_models_that_are_called_by_pieces_or_converted_in_parts_count_once():
    """Otherwise a schedule runs ahead where a model is called by pieces, or was converted in two
    calls."""
    pieces = net(recipes.nvfp4())
    assert steps_seen(pieces, call=lambda m: m["fc"](X).sum().backward()) == [0, 1, 2]
    for order in ("inner first", "outer first"):
        inner, m = Net({"fc": nn.Linear(40, 40)}), nn.Sequential(nn.Linear(40, 40))
        m.append(inner)
        for part in (inner, m) if order == "inner first" else (m,):
            fq.convert(part, recipes.nvfp4())
        if order == "outer first":
            fq.set_recipe(inner, recipes.fp8_delayed())
        assert steps_seen(m, call=lambda m: m(X).sum().backward()) == [0, 1, 2], order
    by_hand = nn.Sequential(
        fq.Linear(40, 40, recipe=recipes.nvfp4()), fq.Linear(40, 40, recipe=recipes.nvfp4())
    )
    STEP.step = 0
    assert steps_seen(by_hand, call=lambda m: m(X).sum().backward()) == [0, 1, 2], "built by hand"


def test_models_do_not_count_each_others_steps():
    """Otherwise the schedule of a generator runs twice as fast beside its discriminator."""
    one, other = (
        net(recipes.schedule(recipes.mxfp8(), (2, None, recipes.nvfp4()))) for _ in range(2)
    )
    for step in range(4):
        run(one)
        assert one["fc"].recipe == (recipes.mxfp8() if step < 2 else recipes.nvfp4())
        if step < 2:
            run(other)
    assert other["fc"].recipe == recipes.mxfp8()
    assert [fq.state_dict(m)["step"] for m in (one, other)] == [4, 2]


@pytest.mark.parametrize("trains", ["adapter", "bias"])
def test_steps_of_a_frozen_quantized_base_advance(trains: str):
    """Otherwise fine-tuning over a frozen base rounds its gradients with one draw forever, a bias,
    and its delayed scales never leave the first use."""
    m = net(recipes.fp8_delayed(length=4))
    m["fc"].weight.requires_grad_(False)
    adapter = nn.Linear(56, 4)
    optimizer = torch.optim.SGD(
        adapter.parameters() if trains == "adapter" else [m["fc"].bias], lr=0.1
    )
    for step in range(4):
        adapter(m(X.clone().requires_grad_())).sum().backward()
        optimizer.step()
        assert STEP.step == step
    for slot in ("input", "weight", "grad_output"):
        assert history(m, slot)["enc"] > 0, slot
        assert (history(m, slot)["amaxes"] > 0).all(), slot


# Whose forward is it, and which step #


class Autoencoder(nn.Module):
    """Is trained by its call, or by a method. Its inputs grow, so that old scales saturate."""

    def __init__(self, layer: Callable[..., nn.Module] = lambda n, k, name: nn.Linear(n, k)):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec = layer(40, 56, name="enc"), layer(56, 40, name="dec")

    def rebuild(self, x: Tensor) -> Tensor:
        return self.dec(torch.tanh(self.enc(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.rebuild(x)


def counted(recipe: str) -> fq.Recipe | recipes.Schedule:
    if recipe == "schedule":
        return recipes.schedule(
            recipes.nvfp4(), (2, 4, recipes.fp8_delayed(length=3)), (4, None, recipes.identity())
        )
    return recipes.fp8_delayed(length=3) if recipe == "fp8_delayed" else recipes.nvfp4()


def functional(m: nn.Module, x: Tensor) -> Tensor:
    """Gradients by torch.func, in the place of those of a backward."""

    def loss(values):
        y = torch.func.functional_call(m, values, (x,))
        return y.square().mean(), y

    parameters = dict(m.named_parameters())
    gradients, y = torch.func.grad(loss, has_aux=True)(
        {n: p.detach() for n, p in parameters.items()}
    )
    for n, p in parameters.items():
        p.grad = gradients[n]
    return y.detach().requires_grad_()


PROGRAMS: dict[str, Callable[[Autoencoder], Callable]] = {
    "method": lambda m: m.rebuild,
    "forward": lambda m: m.forward,
    "compiled": lambda m: torch.compile(m, backend="aot_eager"),
    "compiled method": lambda m: torch.compile(m.rebuild, backend="aot_eager"),
    "eval": lambda m: m.eval(),
    "eval of a layer": lambda m: (m.enc.eval(), m)[1],
    "reentrant": lambda m: lambda x: checkpoint(m, x, use_reentrant=True),
    "checkpoint": lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
    "reentrant method": lambda m: lambda x: checkpoint(m.rebuild, x, use_reentrant=True),
    "functional": lambda m: lambda x: functional(m, x),
}


def trained(m: nn.Module, program: Callable, called: int = 0, steps: int = 5) -> list[dict]:
    """Outputs and gradients of steps, the first `called` of them by calls, then the state."""
    optimizer, seen, run_ = torch.optim.SGD(m.parameters(), lr=0.1), [], program(m)
    for step in range(steps):
        with torch.no_grad():  # an evaluation is no step
            m(X)
            checkpoint(m, X.clone().requires_grad_(), use_reentrant=True)
        x = (values(24, 40, seed=step, dtype=torch.float32) * 10.0**step).requires_grad_()
        y = (m if step < called else run_)(x)
        if y.grad_fn is not None:
            y.square().mean().backward()
        seen.append({"y": y.detach()} | {n: p.grad for n, p in m.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    state = fq.state_dict(m)
    assert state["step"] == steps
    histories = state["histories"]
    return [*seen, {f"{key}.{n}": t for key, h in histories.items() for n, t in h.items()}]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "schedule"])
def test_every_program_that_trains_has_the_bits_of_the_ordinary_loop(recipe: str):
    """If false, delayed scales are stale, random bits repeat or a schedule stands still where a
    model is trained by other means than its call in training mode."""
    want = trained(fq.convert(Autoencoder(), counted(recipe)), lambda m: m)
    for name, program in PROGRAMS.items():
        for called in (0, 1) if name == "method" else (int("compiled method" == name),):
            STEP.step = 0
            got = trained(fq.convert(Autoencoder(), counted(recipe)), program, called)
            for step, (a, b) in enumerate(zip(got, want)):
                assert_same(a, b, f"{name} after {called} calls, step {step}")
    if recipe != "schedule":  # which is of a model
        for name in ("method", "eval", "reentrant"):
            STEP.step = 0
            built = Autoencoder(functools.partial(fq.Linear, recipe=counted(recipe)))
            got = trained(built, PROGRAMS[name])
            for step, (a, b) in enumerate(zip(got, want)):
                assert_same(a, b, f"built directly, {name}, step {step}")


def test_counting_by_hand_belongs_to_a_model_and_ends_with_its_trainer():
    """If false, models of a process that one trainer has trained draw the same random bits in every
    step from then on, and their delayed scales stay."""
    want = trained(fq.convert(Autoencoder(), counted("fp8_delayed")), lambda m: m)
    for ends in ("by itself", "by the trainer"):
        STEP.step = 0
        m, other = (fq.convert(Autoencoder(), counted("fp8_delayed")) for _ in range(2))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(2):
            for micro_batch in range(2):
                fq.begin_step(step, micro_batch, model=m)
                m(X).square().mean().backward()
                assert (STEP.step, STEP.micro_batch) == (step, micro_batch)
            optimizer.step()
            assert fq.state_dict(m)["step"] == step
        for step, pair in enumerate(zip(trained(other, lambda m: m), want)):
            assert_same(*pair, f"another model, step {step}")
        if ends == "by the trainer":
            training_steps.count_passes(m)
        seen = steps_seen(m, 2, lambda m: m(X).square().mean().backward())
        assert seen == [2, 3], ends
        assert STEP.micro_batch == 0 and not STEP.counted_by_hand


def test_skipped_steps_belong_to_a_model():
    """If false, a scaler that skips a step of one model undoes those of others."""
    m, other = (fq.convert(Autoencoder(), counted("fp8_delayed")) for _ in range(2))
    for model in (m, other):
        model(X).square().mean().backward()
    kept = fq.state_dict(other)
    fq.skip_step(m)
    for key, h in fq.state_dict(other)["histories"].items():
        assert_same_bytes(h["amaxes"], kept["histories"][key]["amaxes"], key)
    assert [fq.state_dict(model)["step"] for model in (m, other)] == [0, 1]


def test_a_step_that_stands_still_is_one_warning():
    """If false, `fq.begin_step(0, seed=1)` before a loop, or layers that a compiled function trains
    uncounted, leave random bits and scales as they are, and nobody is told."""
    m, other = (fq.convert(Autoencoder(), counted("nvfp4")) for _ in range(2))
    fq.begin_step(0, seed=1)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for _ in range(2):  # micro-batches, and a model that this optimizer does not train
                m(X).square().mean().backward()
                other(X).square().mean().backward()
            optimizer.step()
        for step in range(1, 4):
            fq.begin_step(step)
            m(X).square().mean().backward()
            optimizer.step()
        STEP.counted_by_hand = False
        built = Autoencoder(functools.partial(fq.Linear, recipe=counted("nvfp4")))
        run_ = torch.compile(built, backend="aot_eager")
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        run_(X).square().mean().backward()
        optimizer.step()
    told = [str(w.message) for w in caught if "fq.begin_step" in str(w.message)]
    assert len(told) == 2, told
    assert "fq.begin_step(0) was called once" in told[0] and "compiled function" in told[1]


@pytest.mark.parametrize("recipe", ["identity", "mxfp8", "fp8_delayed"])
def test_transforms_without_a_rule_name_the_layer(recipe: str):
    """If false, forward-mode differentiation and vmap fail inside torch, or in the counter of
    steps."""
    m = fq.convert(Autoencoder(), recipe)
    _, pullback = torch.func.vjp(m, X)
    y = m(x := X.clone().requires_grad_())
    if recipe != "fp8_delayed":  # whose second step has another scale
        assert_same_bytes(pullback(y.detach())[0], torch.autograd.grad(y, x, y.detach())[0])
    for transform in (
        lambda: torch.func.jvp(m, (X,), (X,)),
        lambda: torch.func.vmap(m)(X),
        lambda: torch.func.vmap(torch.func.grad(lambda x: m(x).sum()))(X),
    ):
        with pytest.raises(NotImplementedError, match=r"enc: torch\.func\.(jvp|vmap)"):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="enc: "):
        m(torch.autograd.forward_ad.make_dual(X, X))


def test_nothing_that_outlives_a_call_is_made_under_a_mode():
    """If false, an estimate with fake tensors, a transform or an evaluation leaves tensors that
    every later step of the process fails on."""
    offsets = iter(range(1000, 2000))  # the step's tensor of each is new
    for under in (FakeTensorMode, torch.inference_mode, lambda: torch.device("meta")):
        want = trained(fq.convert(Autoencoder(), counted("fp8_delayed")), lambda m: m)
        STEP.step = 0
        with fq.token_offset(next(offsets)):
            with under(), torch.device("cpu"):
                estimate = fq.convert(Autoencoder(), counted("fp8_delayed"))
                y = estimate(torch.randn(24, 40))
                if y.requires_grad:
                    y.sum().backward()
            assert not isinstance(STEP.on(X.device), FakeTensor)
            assert not STEP.on(X.device).is_inference()
            fq.begin_step(seed=0)
            estimate = y = None
        STEP.step = 0
        got = trained(fq.convert(Autoencoder(), counted("fp8_delayed")), lambda m: m)
        for step, pair in enumerate(zip(got, want)):
            assert_same(*pair, f"{under}, step {step}")
        STEP.step = 0


def test_token_offsets_nest_and_restore():
    """Otherwise rows are placed wrongly after a micro-batch, or after an exception in one."""
    device = torch.device("cpu")
    with fq.token_offset(64):
        assert STEP.on(device)[3] == 64
        with fq.token_offset(128):
            assert STEP.on(device)[3] == 128
        assert STEP.on(device)[3] == 64
    with pytest.raises(KeyError), fq.token_offset(64):
        raise KeyError
    assert STEP.on(device)[3] == -1


def in_thread(call: Callable) -> object:
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def test_contexts_belong_to_the_thread_that_entered_them():
    """Otherwise a data loader, an evaluation or a second model in another thread changes this
    thread's products."""
    m = net(RECIPES["mxfp8"])
    mine = run(m)
    with (
        fq.autocast(RECIPES["fp8_block"]),
        fq.token_offset(64),
        fq.quantized_model_init(RECIPES["mxfp8"]),
    ):
        inside = run(m)
        assert_same(in_thread(lambda: run(m)), mine, "another thread")
        assert in_thread(lambda: (STEP.token_offset, fq.context.quantized_init_recipe())) == (
            -1,
            None,
        )
    entered, another, left = (threading.Event() for _ in range(3))

    def enters_first_and_leaves_first() -> None:
        with fq.autocast(enabled=False):
            entered.set()
            another.wait(60)
        left.set()

    def enters_second() -> dict[str, Tensor]:
        first = threading.Thread(target=enters_first_and_leaves_first)
        first.start()
        entered.wait(60)
        with fq.autocast(RECIPES["fp8_block"]):
            another.set()
            left.wait(60)
            return run(m)

    assert_same(in_thread(enters_second), inside, "interleaved")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_backward_has_the_offset_of_its_forward(leaves: bool):
    """Otherwise rows of a gradient are placed by whoever calls the backward, from whatever
    thread."""
    m = net(fq.CustomRecipe(rounds_inputs_and_gradients))
    fq.begin_step(0)
    with fq.token_offset(64):
        want = run(m)
    assert not torch.equal(want["fc.weight"], run(m)["fc.weight"]), "a control"
    m.zero_grad()
    x = X.clone().requires_grad_()
    with fq.token_offset(64):
        y = m["fc"](x)
        if not leaves:
            in_thread(lambda: y.backward(DY))
    if leaves:
        with fq.token_offset(128):
            y.backward(DY)
    assert_same(
        {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in m.named_parameters()}}, want
    )


def test_steps_reach_every_offset_in_use():
    """Otherwise the second micro-batch of a trainer that places its rows repeats the bits of the
    first step."""
    device = torch.device("cpu")
    with fq.token_offset(64):
        placed = STEP.on(device)
        fq.begin_step(5)
        assert placed.tolist()[1:4] == [5, 0, 64]
        assert STEP.on(device) is placed
    assert STEP.on(device).tolist()[1:4] == [5, 0, -1]
    fq.begin_step(6)
    assert placed.tolist()[1:4] == [6, 0, 64]


@pytest.mark.parametrize("change", [{"step": 1}, {"seed": 1}, {"micro_batch": 1}])
def test_begin_step_changes_random_bits_of_inputs_and_gradients(change: dict):
    """Otherwise one of the fields is not part of the random key."""
    m = net(fq.CustomRecipe(rounds_inputs_and_gradients))
    fq.begin_step(0, seed=0)
    first = run(m)
    fq.begin_step(**({"step": 0} | change))
    other = run(m)
    for name in ("y", "dx", "fc.weight"):
        assert not torch.equal(first[name], other[name]), name
    fq.begin_step(0, seed=0)
    assert_same(run(m), first, "the first step again")


def test_recipes_without_stochastic_rounding_ignore_the_step():
    """Otherwise a deterministic recipe depends on a counter."""
    m = net(recipes.mxfp8())
    first = run(m)
    fq.begin_step(5, 2, 9)
    with fq.token_offset(100):
        assert_same(run(m), first)


# Histories of delayed scaling #


@pytest.mark.parametrize("use, margin", [("max", 0), ("newest", 0), ("max", 2)])
def test_histories_follow_their_definition(use: str, margin: int):
    """Otherwise scales are not max / amax(history) / 2^margin of earlier steps.

    Four steps of three micro-batches; the encode factor of a step is that of the amaxes up to the
    step before.
    """
    m = net(fq.Recipe("delayed", delayed_with, (("length", 2), ("margin", margin), ("use", use))))
    amaxes = {"input": [], "grad_output": [], "weight": []}
    for step in range(4):
        batches = [
            values(24, 40, seed=10 * step + i, dtype=torch.float32) * (3 - step) for i in range(3)
        ]
        gradients = [
            values(24, 56, seed=10 * step + i, dtype=torch.float32) * (step + 1) for i in range(3)
        ]
        for i, (x, dy) in enumerate(zip(batches, gradients)):
            fq.begin_step(step, micro_batch=i)
            run(m, x, dy)
            for slot, seen in amaxes.items():
                # length=2: of the last two steps before this one.
                before = max(seen[-2:]) if use == "max" and seen else (seen or [0.0])[-1]
                want = (
                    torch.tensor(448.0) / torch.tensor(before) / 2**margin
                    if before
                    else torch.zeros(())
                )
                assert history(m, slot)["enc"].item() == want.item(), (slot, step, i)
        amaxes["input"].append(max(float(x.abs().max()) for x in batches))
        amaxes["grad_output"].append(max(float(dy.abs().max()) for dy in gradients))
        amaxes["weight"].append(float(m.state_dict()["fc.weight"].bfloat16().abs().max()))
        with torch.no_grad():
            m["fc"].weight.mul_(0.9)


# Default dtypes and devices #


def numbers_of_training(recipe: str) -> dict[str, Tensor]:
    """What three steps leave behind: losses, weights, masters, moments, and random codes."""
    restart()
    random, options = torch.Generator().manual_seed(0), {"dtype": torch.bfloat16, "device": "cpu"}
    with fq.quantized_model_init(recipe):
        masters, flat = (
            fq.Linear(64, 64, recipe=recipe, name=name, **options) for name in ("masters", "flat")
        )
    model = nn.ModuleDict(
        {
            "plain": fq.convert(nn.Sequential(nn.Linear(64, 64, **options)), recipe),
            "experts": fq.GroupedLinear(2, 64, 64, recipe=recipe, name="experts", **options),
            "mlp": fq.LayerNormMLP(64, 64, recipe=recipe, name="mlp", **options),
            "masters": masters,
            "flat": flat,
        }
    )
    with torch.no_grad():
        for p in model.parameters():
            values = torch.randn(p.shape, generator=random, dtype=torch.float32, device="cpu")
            p.copy_(values / 8)
    weight, bias = flat.parameters()
    sync = fq.hooks.plan_weight_sync([("flat", weight, fq.hooks.ShardMap((0, 64 * 64)))], None)
    (master,) = sync.init_masters()
    sync.refresh([master])
    x = torch.randn(32, 64, generator=random, dtype=torch.float32, device="cpu").bfloat16()
    others = [p for name, p in model.named_parameters() if not name.startswith(("masters", "flat"))]
    optimizers = (
        torch.optim.SGD([*others, bias], lr=0.1),
        fq.optim.FusedAdam(masters.parameters(), lr=1e-2, moment_dtype=torch.float8_e4m3fn),
    )
    numbers = {}
    for step in range(3):
        for name, module in model.items():
            y = module(x, [9, 23]) if name == "experts" else module(x)
            numbers[f"{name} in step {step}"] = y.detach()
            y.float().square().mean().backward()
        master.sub_(weight.grad.float().reshape(-1), alpha=0.1)
        sync.cast_([master])
        sync.gather()
        sync.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    del model["masters"]
    numbers |= masters.state_dict() | {
        name: p.detach() for name, p in model.named_parameters() if p is not weight
    }
    moments = optimizers[1].state_dict()["state"]
    return numbers | {f"{i} {k}": v for i, of in moments.items() for k, v in of.items()}


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "mxfp8/nvfp4", "fp8_block"])
def test_a_training_does_not_depend_on_torchs_defaults(recipe: str):
    """Otherwise a program that builds its model under torch.set_default_dtype or torch.device gets
    other scales, moments and random codes, or an overflow in the second step."""
    want = numbers_of_training(recipe)
    for dtype, device in (
        (torch.bfloat16, "cpu"),
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),
        (torch.float32, "meta"),
    ):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                got = numbers_of_training(recipe)
        finally:
            torch.set_default_dtype(torch.float32)
        assert got.keys() == want.keys()
        for name, value in got.items():
            assert_same_bytes(value, want[name], f"{name} under {dtype} on {device}")


def test_contexts_are_referenced_as_often_as_they_are_held():
    """If false, torch gives back references that it never took, and what a context was is freed
    while it is read."""
    outside = context.contexts()
    before = sys.getrefcount(outside)
    for offset in range(50):
        with fq.token_offset(offset), fq.autocast(recipes.mxfp8()):
            inside = context.contexts()
        assert sys.getrefcount(inside) <= 4
    assert abs(sys.getrefcount(outside) - before) <= 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_rolls_a_history_once(by_hand: bool):
    """Otherwise a slot is lost or doubled: histories end up shorter than they say. Counted by hand,
    the two training forwards of a step have one slot; else each is a step."""
    m = net(recipes.fp8_delayed(length=8))
    optimizer = torch.optim.AdamW(m.parameters())
    for step in range(3):
        for micro_batch in range(2):
            if by_hand:
                fq.begin_step(step, micro_batch)
            run(m)
            with torch.no_grad():
                m.eval()(X)
            m.train()
        optimizer.step()
    steps = 3 if by_hand else 6
    for slot in ("input", "weight", "grad_output"):
        assert history(m, slot)["amaxes"].count_nonzero() == steps, slot
        assert (history(m, slot)["amaxes"][:steps] > 0).all(), slot
    assert history(m, "input")["amaxes"][:steps].unique().numel() == 1
    other = net(recipes.fp8_delayed(length=8))
    for step in range(3, 6):
        fq.begin_step(step)
        run(other)
    assert history(m, "input")["amaxes"].count_nonzero() == steps, "steps in which it did not train"


def test_delayed_scales_encode_the_next_step():
    """Otherwise the history is kept but not used: values beyond the last step's amax must
    saturate."""
    m = net(recipes.fp8_delayed())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    got = run(m, X * 4, DY)["y"]
    enc_x, enc_w = (history(m, slot)["enc"] for slot in ("input", "weight"))
    x = (X * 4 * enc_x).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / enc_x)
    master = m.state_dict()["fc.weight"].bfloat16().float()
    w = (master * enc_w).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / enc_w)
    assert x.abs().max() < 0.3 * (X * 4).abs().max()
    assert_same_bytes(got, x @ w.t() + m["fc"].bias.detach(), "saturated output")


def test_non_finite_amaxes_are_never_recorded():
    """Otherwise one overflow makes every later scale zero or NaN."""
    m = net(recipes.fp8_delayed(length=4))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    run(m)
    want = {slot: history(m, slot)["enc"].clone() for slot in ("input", "grad_output")}
    for bad in (float("inf"), float("nan")):
        x, dy = X.clone(), DY.clone()
        x[3, 4], dy[5, 6] = bad, bad
        out = run(m, x, dy)
        assert not out["y"].isfinite().all()
        m.zero_grad()
        optimizer.step()
    run(m)
    for slot, enc in want.items():
        assert history(m, slot)["enc"].isfinite()
        assert_same_bytes(history(m, slot)["enc"], enc, slot)


def test_each_side_of_a_hybrid_keeps_its_own_history():
    """Otherwise e4m3 rows and e5m2 columns take each other's scale."""
    m = net(fq.CustomRecipe(delayed_sides))
    run(m)
    run(m)
    for slot, x in (
        ("input", X),
        ("grad_output", DY),
        ("weight", m.state_dict()["fc.weight"].bfloat16().float()),
    ):
        for direction, limit in ((ROWWISE, 448.0), (COLUMNWISE, 57344.0)):
            want = torch.tensor(limit) / x.abs().max()
            assert_same_bytes(history(m, slot, direction)["enc"][0], want, f"{slot} {direction}")
    product = X @ m.state_dict()["fc.weight"].t()
    assert (run(m)["y"] - m["fc"].bias - product).norm() < 0.1 * product.norm()


def delayed_sides(role):
    return HybridQuantizer(
        Quantizer("fp8_tensor", scaling=DelayedScaling(8)),
        Quantizer(format_of("fp8_tensor", element="e5m2"), scaling=DelayedScaling(8)),
    )


def test_a_side_that_is_not_needed_does_not_fill_the_other_sides_history():
    """Otherwise the first layer, which makes columns of its gradient only, records them as rows."""
    m = net(fq.CustomRecipe(delayed_sides))
    m["fc"](X).backward(DY)  # no gradient for X: no dgrad, no rows
    assert history(m, "grad_output", COLUMNWISE)["amaxes"][0] == DY.abs().max()
    assert history(m, "grad_output", ROWWISE)["amaxes"][0] == 0


@pytest.mark.parametrize("use", ["max", "newest"])
def test_a_skipped_step_leaves_no_trace(use: str):
    """Otherwise a batch that overflowed sets scales: the run must equal one that never saw it."""

    def train(bad_at: int | None):
        restart()
        m = net(fq.Recipe("delayed", delayed_with, (("use", use),)))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        seen = []
        for step in range(5):
            if step == bad_at:
                run(m, X * 1e4, DY * 1e4)
                m.zero_grad()
                fq.skip_step()
            x, dy = (values(24, n, seed=step, dtype=torch.float32) for n in (40, 56))
            seen.append(run(m, x, dy))
            optimizer.step()
        return seen, {k: h["amaxes"] for k, h in fq.state_dict(m)["histories"].items()}

    want, want_histories = train(None)
    for bad_at in (0, 1, 3):
        got, histories = train(bad_at)
        for step, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"bad batch before step {bad_at}, step {step}")
        for key, amaxes in want_histories.items():
            assert_same_bytes(histories[key], amaxes, f"history of {key}")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: fq.optim.FusedAdam(p, lr=0.05),
        lambda p: fq.optim.FusedAdam(p, lr=0.05, capturable=True),
        lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    ],
    ids=["fused_adam", "capturable", "torch"],
)
def test_a_skipped_step_of_a_scaler_leaves_no_trace(make):
    """Otherwise an overflow that a GradScaler leaves to the optimizer, and that `fq.skip_step` is
    told of, rolls histories, or moves random bits and schedules."""
    later = recipes.fp8_delayed(length=3)

    def train(bad_at: int | None):
        restart()
        m = fq.convert(
            Net({"fc": nn.Linear(40, 56), "nv": nn.Linear(40, 56)}),
            recipes.per_layer(later, {"nv": recipes.nvfp4()}),
        )
        with torch.no_grad():
            for p in m.parameters():
                p.copy_(values(*p.shape, dtype=torch.float32) / 8)
        fq.set_recipe(
            m,
            recipes.schedule(
                recipes.per_layer(later, {"nv": recipes.nvfp4()}),
                (3, None, recipes.per_layer(later, {"nv": recipes.mxfp8()})),
            ),
        )
        optimizer, seen = make(m.parameters()), []
        for step in range(5):
            for bad in (True, False) if step == bad_at else (False,):
                scale = 1e4 if bad else 1.0
                x = values(24, 40, seed=step, dtype=torch.float32) * scale
                y = m(x)
                y.backward(values(*y.shape, seed=9, dtype=torch.float32) * scale)
                gradients = {n: p.grad.clone() for n, p in m.named_parameters()}
                optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(bad)), torch.ones(())
                optimizer.step()
                optimizer.zero_grad()
                if bad:
                    fq.skip_step()
            seen.append(
                {"y": y.detach(), "step": STEP.on(torch.device("cpu")).clone(), **gradients}
            )
        assert STEP.step == 4
        return seen, {
            f"{k}.{n}": t for k, h in fq.state_dict(m)["histories"].items() for n, t in h.items()
        }

    want, want_histories = train(None)
    for bad_at in (0, 3):
        got, histories = train(bad_at)
        for step, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"bad batch before step {bad_at}, step {step}")
        assert_same(histories, want_histories, f"bad batch before step {bad_at}, histories")


@pytest.mark.parametrize("repeats", [False, True], ids=["goes on", "repeats"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["counted", "by hand"])
def test_a_checkpoint_of_a_skipped_step_is_not_rolled(by_hand: bool, repeats: bool):
    """Otherwise a run that is saved between `fq.skip_step` and the repeated step (or the next, as
    trainers count), and loaded, rolls the histories of its weights once more than a run that went
    on."""

    skipped = 3

    def one(m, optimizer, step, ends: bool = True) -> dict:
        if by_hand:
            fq.begin_step(step + (not repeats and ends and step >= skipped))
        m(values(24, 40, seed=step, dtype=torch.float32)).backward(DY)
        gradients = {n: p.grad.clone() for n, p in m.named_parameters()}
        if ends:
            optimizer.step()
        optimizer.zero_grad()
        return gradients

    def made():
        m = fq.convert(nn.Sequential(nn.Linear(40, 56)), recipes.fp8_delayed(length=3))
        return m, torch.optim.SGD(m.parameters(), lr=1e-3, weight_decay=300.0)  # amaxes shrink

    def train(saved_at: int | None) -> list[dict]:
        restart()
        torch.manual_seed(0)
        (m, optimizer), seen = made(), []
        for step in range(6):
            if step == skipped:
                one(m, optimizer, step, ends=False)
                fq.skip_step()
            if step == saved_at:
                parameters, state = copy.deepcopy(m.state_dict()), fq.state_dict(m)
                for _ in range(2):  # a state that was loaded is saved as it was
                    m, optimizer = made()
                    m.load_state_dict(parameters)
                    fq.load_state_dict(m, state)
                    state = fq.state_dict(m)
            seen.append(one(m, optimizer, step))
        histories = fq.state_dict(m)["histories"].items()
        return [*seen, {f"{key}.{n}": t for key, h in histories for n, t in h.items()}]

    want, got = train(None), train(3)
    for step, (a, b) in enumerate(zip(got, want)):
        assert_same(a, b, f"saved behind the skipped step 3, step {step}")


def test_a_layer_may_have_the_name_of_a_fact_of_the_state():
    """Otherwise a layer called "skipped" whose GEMMs moved makes its own checkpoint unreadable."""
    m = fq.convert(Net({"skipped": nn.Linear(40, 56)}), "mxfp8")
    m["skipped"].runtime.move_to({"wgrad": "exact"})
    state = fq.state_dict(m)
    fq.load_state_dict(m, state)
    assert fq.state_dict(m)["moved"] == state["moved"] and "wgrad" in state["moved"]


# What a checkpoint holds besides parameters #


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_training_resumes_bit_for_bit(name: str):
    """Otherwise a resumed run drifts from an uninterrupted one: step, seed or histories are not
    restored."""
    recipe = recipes.by_name(name)

    def train(m, optimizer, steps):
        losses = []
        for step in steps:
            loss = (m["fc"](values(24, 40, seed=step, dtype=torch.float32)) - DY).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fq.begin_step(seed=3)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    want = train(m, optimizer, range(6))
    restart()
    fq.begin_step(seed=3)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    got = train(m, optimizer, range(3))
    file = io.BytesIO()
    torch.save(
        {"model": m.state_dict(), "optimizer": optimizer.state_dict(), "quant": fq.state_dict(m)},
        file,
    )
    train(m, optimizer, range(50, 52))  # what happens after the save is not in the file
    restart()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    m.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    fq.load_state_dict(m, saved["quant"])
    got += train(m, optimizer, range(3, 6))
    assert got == want


def test_layers_that_no_model_counted_resume_under_a_trainer():
    """Otherwise a model that was built of `fq.Linear` begins at step 0 again, if it is loaded
    before `fully_shard` or a trainer counts its steps."""
    make = functools.partial(Autoencoder, functools.partial(fq.Linear, recipe=counted("nvfp4")))
    m = make()
    assert steps_seen(m, 2, lambda m: m(X).sum().backward()) == [0, 1]
    state = fq.state_dict(m)
    restart()
    other = make()
    other.load_state_dict(m.state_dict())
    fq.load_state_dict(other, state)
    assert fq.state_dict(other)["step"] == 2
    training_steps.count_passes(other)
    assert steps_seen(other, 2, lambda m: m(X).sum().backward()) == [2, 3]


def test_a_state_of_another_recipe_is_refused():
    """Otherwise histories of one format scale another."""
    m, other = net(recipes.fp8_delayed()), net(recipes.fp8_delayed(grad_element="e4m3"))
    run(m)
    state = fq.state_dict(m)
    with pytest.raises(ValueError, match="allow_recipe_change=True"):
        fq.load_state_dict(other, state)
    assert all(h["enc"] == 0 for h in fq.state_dict(other)["histories"].values())
    fq.load_state_dict(other, state, allow_recipe_change=True)
    run(other)


def test_sync_makes_codes_follow_changes_by_hand():
    """Otherwise the call that a user is told to make does nothing, or breaks a model that no one
    shards."""
    fq.begin_step(0)
    m = net(recipes.nvfp4())
    run(m)
    with torch.no_grad():
        m["fc"].weight.mul_(3.0)
    fq.sync(m)
    fresh = net(recipes.nvfp4())
    fresh.load_state_dict(m.state_dict())
    assert_same(run(m), run(fresh))


# CUDA graphs #


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8_nvfp4", "nvfp4"])
def test_codes_do_not_outlive_what_replays_write(name: str, monkeypatch):
    """If false, a captured step holds no quantization of its weights, or an evaluation after
    replays reads old codes."""
    m = net(RECIPES[name])
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    run(m)
    made = counters.total("weight encode")
    for captured in (True, False):
        monkeypatch.setattr(torch_compat, "is_captured", lambda x, captured=captured: captured)
        encoded = counters.total("weight encode")
        run(m)
        assert counters.total("weight encode") - encoded == made > 0
    monkeypatch.setattr(torch_compat, "is_captured", lambda x: True)
    optimizer.step()
    monkeypatch.undo()
    for factor in (1.0, 0.5):
        m["fc"].weight.detach().numpy()[:] *= factor  # as a replay writes: no version tells
        fresh = net(RECIPES[name])
        fresh.load_state_dict(m.state_dict())
        STEP.step = 0
        STEP.publish()
        assert_same_bytes(m["fc"](X).detach(), fresh["fc"](X).detach(), f"after a replay, {factor}")


def test_replays_count_steps_on_the_device(monkeypatch):
    """If false, a replayed step repeats the random bits of the capture, or writes a step of the
    host at every replay."""
    m = net(recipes.nvfp4())
    run(m)
    on_device = STEP.on(X.device)
    monkeypatch.setattr(torch_compat, "is_captured", lambda x: True)
    run(m)
    assert on_device[1].item() == 1
    m["fc"](X)  # as torch.cuda.make_graphed_callables captures a part, which the model calls later
    assert on_device[1].item() == 1
    with pytest.raises(ValueError, match="would repeat them at every replay"):
        fq.begin_step(3)
    monkeypatch.undo()
    for count in (on_device[1], m._training_steps.counts_on(X.device)[0]):
        count += 3  # what three replays do
    assert (STEP.step, STEP.token_offset, STEP.counted_by_hand) == (4, -1, False)
    assert steps_seen(m, 2) == [5, 6]
    fq.begin_step(5)
    assert on_device[1] == 5


@pytest.mark.parametrize("enter", [fq.autocast, fq.numerics.batch_invariant, fq.token_offset])
def test_a_context_holds_where_a_graph_breaks_inside(enter: Callable):
    """If false, compiled code silently leaves a context in which its graph breaks, and multiplies
    in the layer's own formats."""
    torch.compiler.reset()
    layer, x = fq.Linear(64, 32, recipe=recipes.fp8_row()), values(16, 64)
    argument = {fq.autocast: ("mxfp8",), fq.token_offset: (8,)}.get(enter, ())
    seen = torch.compiler.disable(lambda: inside.append(context.contexts()[1:]))

    def forward(x: Tensor) -> Tensor:
        with enter(*argument):
            seen()
            y = layer(x)
            seen()
            return y

    inside: list = []
    for call in (forward, torch.compile(forward, backend="aot_eager")):
        y = call(x)
        before, behind = inside[-2:]
        assert before == behind != context.contexts()[1:]
        assert_same_bytes(y, forward(x), enter.__name__)


def test_recipes_are_made_in_graphs():
    """If false, a recipe that is made where it is entered breaks the graph."""
    torch.compiler.reset()
    layer, x = fq.Linear(64, 32, recipe=recipes.fp8_row()), values(16, 64)
    made = (
        lambda: recipes.identity(),
        lambda: recipes.nvfp4(scale_per="row"),
        lambda: recipes.by_name("mxfp8/nvfp4"),
    )
    for make in made:

        def forward(x: Tensor, make=make) -> Tensor:
            with fq.autocast(make()):
                return layer(x)

        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        assert_same_bytes(compiled(x), forward(x), str(make()))
        assert not torch.equal(forward(x), layer(x))

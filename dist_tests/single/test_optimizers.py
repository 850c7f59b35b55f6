# SPDX-License-Identifier: Apache-2.0
"""`fq.optim.wrap`: quantized parameters under optimizers that know nothing of them, in one process.

Law: a model of quantized parameters trains as one of plain parameters does, whose every product
quantizes the weights anew. Outputs, masters and states are the same bytes in every step. Over plain
parameters the same optimizers are writers of test_lockstep.py.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.lockstep import plain
from dist_tests.optimizers import (
    CASES,
    Averaged,
    Averaging,
    Container,
    SharpnessAware,
    convert,
    in_backward,
    step_once,
)
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor

K = 64  # 8-bit optimizers leave tensors below 4096 elements in fp32
RECIPES = {
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_current": fq.recipes.fp8_current(),
    "fp8_delayed": fq.recipes.fp8_delayed(length=2),
}


@pytest.fixture(autouse=True)
def _own_graphs(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    yield
    torch._dynamo.reset()


def build(
    recipe: str, quantized: bool, matrices: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(K, K, bias=False), nn.ReLU(), nn.Linear(K, K, bias=False)]
    if not matrices:
        layers.insert(1, nn.LayerNorm(K))
    return convert(nn.Sequential(*layers).to(dtype), RECIPES[recipe], quantized)


def x_of(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return laws.values(16, K, seed=step, dtype=dtype)


def train(net: nn.Module, optimizer, steps=range(3), closure: bool = False) -> list[Tensor]:
    outputs = []
    for step in steps:
        fq.begin_step(step)
        outputs.append(step_once(net, optimizer, x_of(step), closure))
    return outputs


def assert_codes_of_masters(net: nn.Module, recipe: str, what: str) -> None:
    """The next output is that of a model that is converted anew, with the values of the masters."""
    fresh = build(recipe, False, matrices=len(net) == 3)
    fresh.load_state_dict({k: v.detach().clone() for k, v in net.state_dict().items()})
    results, dtype = [], next(p.dtype for p in net.parameters())
    for model in (net, fresh.to(dtype)):
        fq.begin_step(99)
        results.append(model(x_of(99, dtype)).detach())
    laws.assert_same_bytes(*results, what)


def assert_same_run(ours: nn.Module, theirs: nn.Module, got: list, want: list) -> None:
    """Outputs, values and the next output, which multiplies the codes of the last step."""
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        laws.assert_same_bytes(a, b, f"output of step {step}")
    for name, value in theirs.state_dict().items():
        laws.assert_same_bytes(ours.state_dict()[name], value, name)
    results = []
    for net in (ours, theirs):
        fq.begin_step(99)
        results.append(net(x_of(99)).detach())
    laws.assert_same_bytes(*results, "output of the last step's codes")


def assert_same_states(ours, theirs, params: list[Tensor], others: list[Tensor]) -> None:
    for p, q in zip(params, others):
        got, want = ours.state.get(p, {}), theirs.state.get(q, {})
        assert got.keys() == want.keys()
        for key, value in want.items():
            if type(value) is Tensor:
                laws.assert_same_bytes(got[key], value, key)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if laws.EVERYTHING or not c.compiles])
def test_a_wrapped_optimizer_trains_quantized_parameters_as_plain_ones(name: str) -> None:
    """If false, an optimizer updates codes, loses updates, or a product reads old codes."""
    case, recipes = CASES[name], list(RECIPES)
    at = list(CASES).index(name) + 1
    for recipe in recipes if laws.EVERYTHING else [recipes[at % len(recipes)]]:
        nets = [build(recipe, quantized, case.compiles) for quantized in (True, False)]
        lists = [case.parameters(net.parameters()) for net in nets]
        ours = fq.optim.wrap(case.cls)(lists[0], **case.options)
        theirs = case.cls(lists[1], **case.options)
        assert any(isinstance(p, QuantizedTensor) for p in lists[0])
        outputs = [train(n, o, closure=case.closure) for n, o in zip(nets, (ours, theirs))]
        assert_same_run(*nets, *outputs)
        assert_same_states(ours, theirs, *lists)
        for net in nets if recipe != "fp8_delayed" else ():  # histories are no values
            assert_codes_of_masters(net, recipe, f"{name}, {recipe}")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_new_masters(dtype: torch.dtype, quantized: bool) -> None:
    """If false, updates below bf16's resolution are lost, or codes lag a step behind."""
    net = build("mxfp8/nvfp4", quantized, dtype=dtype)
    optimizer = fq.optim.wrap(torch.optim.AdamW)(net.parameters(), lr=1e-4, weight_decay=0.0)
    for step in range(3):
        net(x_of(step, dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if quantized:
            assert net.state_dict()["0.weight"].dtype is torch.float32, "no fp32 master"
        assert_codes_of_masters(net, "mxfp8/nvfp4", f"{dtype}, quantized {quantized}, step {step}")


# Steps that are compiled, and steps inside the backward #


def _compiled(where: str, optimizer: torch.optim.Optimizer):
    """A step that inductor compiles (`inner`), or that dynamo looks into and finds disabled."""
    if where == "inner":
        optimizer.inner.step = torch.compile(optimizer.inner.step)
        return optimizer.step
    if where == "method":
        return torch.compile(optimizer.step, backend="aot_eager")
    return torch.compile(lambda: optimizer.step(), backend="aot_eager")


@pytest.mark.parametrize(
    ("cls", "where"),
    [
        (torch.optim.SGD, "inner"),
        (torch.optim.SGD, "method"),
        (torch.optim.SGD, "function"),
        (fq.optim.FusedAdam, "function"),
    ],
)
def test_compiled_steps_leave_the_codes_of_new_masters(cls: type, where: str) -> None:
    """If false, a graph that writes through pointers leaves the codes of old masters."""
    net = build("fp8_current", True, matrices=True)
    optimizer = fq.optim.wrap(cls)(net.parameters(), lr=0.1)
    step = _compiled(where, optimizer)
    for i in range(3):
        before = plain(net[0].weight.inner)
        fq.begin_step(i)
        net(x_of(i)).square().mean().backward()
        step()
        optimizer.zero_grad()
        assert not torch.equal(before, net[0].weight.inner)
        assert_codes_of_masters(net, "fp8_current", f"step {i}")


def _hooked(cls: type, net: nn.Module) -> None:
    in_backward(net, cls)


def _applied(cls: type, net: nn.Module) -> None:
    _apply_optimizer_in_backward(cls, net.parameters(), {"lr": 0.1})


@pytest.mark.parametrize("attach", [_hooked, _applied])
@pytest.mark.parametrize("cls", [torch.optim.SGD, fq.optim.FusedAdam])
def test_optimizers_in_backward(cls: type, attach) -> None:
    """If false, a step in the backward writes what it still reads, or old codes stay."""
    nets, results = [build("mxfp8/nvfp4", quantized) for quantized in (True, False)], []
    for net, quantized in zip(nets, (True, False)):
        attach(fq.optim.wrap(cls) if quantized else cls, net)
        outputs = []
        for step in range(3):
            fq.begin_step(step)
            outputs.append(net(x_of(step)))
            outputs[-1].square().mean().backward()
            net.zero_grad()
        results.append(outputs)
    assert_same_run(*nets, *results)
    for net in nets:
        assert_codes_of_masters(net, "mxfp8/nvfp4", "after steps in the backward")


def test_containers_of_optimizers() -> None:
    """If false, a list of optimizers that steps as one is refused, or steps twice."""
    results, nets = [], [build("fp8_delayed", quantized) for quantized in (True, False)]
    for net in nets:
        of = fq.optim.wrap(torch.optim.AdamW)
        container = Container([of([p], lr=0.02) for p in net.parameters()])
        results.append((train(net, container), container))
    assert_same_run(*nets, *(outputs for outputs, _ in results))


# What a class has beside a step #


def _averages(net: nn.Module, cls: type, step: int, optimizer) -> tuple[Tensor, object]:
    optimizer = optimizer or Averaged([cls(net.parameters(), lr=0.3)])
    return step_once(net, optimizer, x_of(step), False), optimizer


def _sharpens(net: nn.Module, cls: type, step: int, optimizer) -> tuple[Tensor, object]:
    optimizer = optimizer or cls(net.parameters(), lr=0.1)
    outputs = []
    for update in (optimizer.first_step, optimizer.second_step):
        outputs.append(net(x_of(step)))
        outputs[-1].square().mean().backward()
        update(zero_grad=True)
    assert all(p.grad is None for p in net.parameters())
    return torch.stack(outputs).detach(), optimizer


def _sharpens_with_a_closure(net, cls: type, step: int, optimizer) -> tuple[Tensor, object]:
    optimizer = optimizer or cls(net.parameters(), lr=0.1)
    outputs = []

    def evaluate() -> None:
        outputs.append(net(x_of(step)))
        outputs[-1].square().mean().backward()

    evaluate()
    optimizer.step(evaluate)
    optimizer.zero_grad()
    return torch.stack(outputs).detach(), optimizer


METHODS = {
    "train and eval": (_averages, Averaging),
    "first_step and second_step": (_sharpens, SharpnessAware),
    "a closure after a write": (_sharpens_with_a_closure, SharpnessAware),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    # amaxes of the weights that a step leaves enter a history, although eval() hides them
    [(n, r) for n in METHODS for r in RECIPES if (n, r) != ("train and eval", "fp8_delayed")],
)
def test_methods_of_the_class_move_masters_and_codes(name: str, recipe: str) -> None:
    """If false, trainers look for a method, find none and go on with other weights than the
    optimizer's, or a forward after it multiplies codes of the weights before."""
    program, cls = METHODS[name]
    nets, results = [build(recipe, quantized) for quantized in (True, False)], []
    for net, kind in zip(nets, (fq.optim.wrap(cls), cls)):
        outputs, optimizer = [], None
        for step in range(3):
            fq.begin_step(step)
            y, optimizer = program(net, kind, step, optimizer)
            outputs.append(y)
        results.append((outputs, optimizer))
    assert_same_run(*nets, *(outputs for outputs, _ in results))


def test_an_optimizer_of_wrap_is_one_of_the_class() -> None:
    """If false, a program that asks for the class, or reads and sets its attributes, goes another
    way than with the class itself."""
    net, cls = build("mxfp8/nvfp4", True), fq.optim.wrap(Averaging)
    optimizer = cls(net.parameters(), lr=0.1)
    assert issubclass(cls, Averaging) and isinstance(optimizer, torch.optim.SGD)
    assert not hasattr(optimizer, "first_step")
    train(net, optimizer, range(1))
    optimizer.eval()
    assert optimizer.shows_average and optimizer.inner.shows_average
    optimizer.shows_average = False
    assert not optimizer.inner.shows_average
    optimizer.inner.note = 1  # an attribute of the object, not of its class
    optimizer.note += 1
    assert optimizer.inner.note == 2 and "note" not in vars(optimizer)


# Settings, schedules, scalers, checkpoints #


def _grouped(net: nn.Module, cls: type) -> tuple[torch.optim.Optimizer, object]:
    """An optimizer of two groups, one named and one that is added, and its schedule."""
    first, *rest = net.named_parameters()
    optimizer = cls([{"params": [first], "lr": 0.3}], lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": rest, "weight_decay": 0.1})
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.2], total_steps=9)


def test_groups_and_schedules_reach_the_optimizer_inside() -> None:
    """If false, a scheduler or a change by hand moves settings that no update reads."""
    nets, results = [build("mxfp8/nvfp4", quantized) for quantized in (True, False)], []
    for net, cls in zip(nets, (fq.optim.wrap(torch.optim.SGD), torch.optim.SGD)):
        optimizer, schedule = _grouped(net, cls)
        assert isinstance(optimizer, torch.optim.Optimizer)
        outputs = []
        for step in range(4):
            outputs += train(net, optimizer, [step])
            schedule.step()
            optimizer.param_groups[1]["weight_decay"] *= 0.5
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        results.append((outputs, settings, optimizer))
    assert_same_run(*nets, *(outputs for outputs, *_ in results))
    assert results[0][1] == results[1][1]


def test_a_frozen_quantized_parameter_stays_as_it_is() -> None:
    """If false, a model with a frozen part cannot be trained, or states are of other weights."""
    nets, results = [build("mxfp8/nvfp4", quantized) for quantized in (True, False)], []
    for net, cls in zip(nets, (fq.optim.wrap(torch.optim.Adagrad), torch.optim.Adagrad)):
        net[0].weight.requires_grad_(False)
        optimizer = cls(net.parameters(), lr=0.1)
        results.append((train(net, optimizer), optimizer.state_dict()["state"], optimizer))
    assert_same_run(*nets, *(outputs for outputs, *_ in results))
    for key in (1, 2, 3):
        laws.assert_same_bytes(results[0][1][key]["sum"], results[1][1][key]["sum"], f"state {key}")
    nets[0][0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="0.weight is a quantized .* made while it requires grad"):
        train(nets[0], results[0][2])


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8/nvfp4"])
def test_a_grad_scaler_unscales_and_skips(name: str, recipe: str) -> None:
    """If false, an overflow enters masters or codes, or gradients keep the loss scale."""
    case = CASES[name]
    nets = [build(recipe, quantized) for quantized in (True, False)]
    classes = fq.optim.wrap(case.cls), case.cls
    optimizers = [cls(n.parameters(), **case.options) for n, cls in zip(nets, classes)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in nets]
    outputs: list[list[Tensor]] = [[], []]
    for step in range(4):
        factor = float("inf") if step == 1 else 1.0
        for net, optimizer, scaler, seen in zip(nets, optimizers, scalers, outputs):
            fq.begin_step(step)
            seen.append(net(x_of(step)))
            scaler.scale(seen[-1].square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (256.0 if step == 0 else 128.0)
        if step == 1:
            fq.skip_step()
    assert_same_run(*nets, *outputs)


def test_state_dicts_are_those_of_the_class() -> None:
    """If false, a run cannot go on from a checkpoint, its own or one of plain parameters."""
    options = {"lr": 0.02, "foreach": True}
    saved, final = [], []
    for source in (True, False):
        net = build("mxfp8/nvfp4", source)
        cls = fq.optim.wrap(torch.optim.AdamW) if source else torch.optim.AdamW
        optimizer = cls(net.parameters(), **options)
        train(net, optimizer, range(2))
        saved.append(copy.deepcopy((net.state_dict(), optimizer.state_dict())))
        train(net, optimizer, range(2, 4))
        final.append(net.state_dict())
    assert saved[0][1]["param_groups"] == saved[1][1]["param_groups"]
    for values, states in saved:
        for target in (True, False):
            net = build("mxfp8/nvfp4", target)
            cls = fq.optim.wrap(torch.optim.AdamW) if target else torch.optim.AdamW
            optimizer = cls(net.parameters(), lr=9.0)
            net.load_state_dict(values)
            optimizer.load_state_dict(copy.deepcopy(states))
            assert optimizer.param_groups[0]["lr"] == 0.02
            train(net, optimizer, range(2, 4))
            final.append(net.state_dict())
    for state in final[1:]:
        for name, value in final[0].items():
            laws.assert_same_bytes(state[name], value, name)


class Rebinds(torch.optim.Optimizer):
    """An optimizer that gives its parameters other memory in every step."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad


def test_an_optimizer_that_rebinds_parameters() -> None:
    """If false, masters are others than what the optimizer writes, and training stands still."""
    nets, results = [build("mxfp8/nvfp4", quantized) for quantized in (True, False)], []
    for net, cls in zip(nets, (fq.optim.wrap(Rebinds), Rebinds)):
        optimizer = cls(net.parameters(), lr=0.1)
        results.append((train(net, optimizer), optimizer))
    assert_same_run(*nets, *(outputs for outputs, _ in results))


# What is refused #


def test_what_cannot_be_wrapped_is_named() -> None:
    """If false, a wrong argument fails in the first step, or leaves weights without values."""
    wrap = fq.optim.wrap
    assert wrap(fq.optim.FusedAdam) is fq.optim.FusedAdam
    assert wrap(wrap(torch.optim.SGD)) is wrap(torch.optim.SGD)
    for wrong in (nn.Linear, lambda params: None, torch.optim.SGD([torch.zeros(1)])):
        with pytest.raises(ValueError, match="a subclass of torch.optim.Optimizer"):
            wrap(wrong)
    net = build("mxfp8/nvfp4", True)
    want = net(x_of(0))
    for params, options in ((net.parameters(), {"lr": -1.0}), (net.parameters(), {"wrong": 1})):
        with pytest.raises((ValueError, TypeError)):
            wrap(torch.optim.SGD)(params, **options)
    laws.assert_same_bytes(net(x_of(0)), want, "output after a constructor that failed")
    optimizer = wrap(torch.optim.SGD)(net[0].parameters())
    with pytest.raises(ValueError, match="another optimizer holds the master of 0.weight"):
        wrap(torch.optim.SGD)([net[3].weight, net[0].weight])
    with pytest.raises(ValueError, match="another optimizer holds the master of 0.weight"):
        fq.optim.FusedAdam([net[0].weight])
    other = wrap(torch.optim.SGD)(net[1].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another optimizer holds"):
        other.add_param_group({"params": [net[3].weight, net[0].weight]})
    assert len(other.param_groups) == len(other.inner.param_groups) == 1
    other.add_param_group({"params": [net[3].weight]})
    with pytest.raises(ValueError, match="0.weight .* this SGD holds no fp32 master"):
        train(net, torch.optim.SGD(net.parameters()), range(1))
    with pytest.raises(ValueError, match="3.weight .* this Container holds no fp32 master"):
        train(net, Container([optimizer, torch.optim.SGD([net[3].weight])]), range(1))
    train(net, Container([optimizer, other]), range(1))
    with torch.device("meta"), fq.quantized_model_init(RECIPES["fp8_current"]):
        meta = fq.Linear(K, K)
    with pytest.raises(ValueError, match="meta device"):
        wrap(torch.optim.SGD)(meta.parameters())


def test_masters_live_as_long_as_their_optimizer() -> None:
    """If false, a model keeps masters beside the optimizer's, or they outlive it."""
    net = build("mxfp8/nvfp4", True)
    optimizer = fq.optim.wrap(torch.optim.SGD)(net.parameters(), lr=0.1)
    train(net, optimizer, range(1))
    assert net[0].weight._content.values is None and net[0].weight.is_held_by([optimizer])
    want = plain(net(x_of(1)))
    del optimizer
    gc.collect()
    assert not net[0].weight.has_values
    laws.assert_same_bytes(net(x_of(1)).detach(), want, "output of the codes alone")


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}
COPIED = {
    "FusedAdam": fq.optim.FusedAdam,
    "FusedAdam, 8-bit moments": functools.partial(
        fq.optim.FusedAdam, moment_dtype=torch.float8_e4m3fn
    ),
    "AdamW": fq.optim.wrap(torch.optim.AdamW),
    "SGD": functools.partial(fq.optim.wrap(torch.optim.SGD), momentum=0.9),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_of_a_model_and_its_optimizer_trains_as_they_do(name: str, how: str):
    """If false, a copied optimizer steps masters that no weight reads, or the original's, or cannot
    be copied at all."""
    for dtype in (torch.float32, torch.bfloat16):
        net = build("mxfp8/nvfp4", True, dtype=dtype)
        pair = net, COPIED[name](net.parameters(), lr=1e-2)

        def run(net: nn.Module, optimizer, steps: range) -> list[Tensor]:
            for step in steps:
                fq.begin_step(step)
                step_once(net, optimizer, x_of(step, dtype), False)
            return [t.detach().clone() for t in net.state_dict().values()]

        run(*pair, range(2))
        copied = COPIES[how](pair)
        for a, b in zip(pair[0].parameters(), copied[0].parameters()):
            assert (type(a), a.dtype) == (type(b), b.dtype)
        before = run(*pair, range(0))
        got = run(*copied, range(2, 4))
        for value, old in zip(run(*pair, range(0)), before, strict=True):
            laws.assert_same_bytes(value, old, f"{name}: the original, while the copy trains")
        for value, want in zip(got, run(*pair, range(2, 4)), strict=True):
            laws.assert_same_bytes(value, want, f"{name}: the copy")
        assert not any(torch.equal(value, old) for value, old in zip(got[:1], before))

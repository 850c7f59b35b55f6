# SPDX-License-Identifier: Apache-2.0
"""`fq.advise`: layers that suffer stay precise, the rest becomes cheap, and the loss stays within
its budget."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import recipes
from fsdp_quant.__main__ import main
from fsdp_quant.context import STEP
from fsdp_quant.inspection import advise

D = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """blocks.1.up reads a channel of `outlier` in each run of 16, by weights of zero: the block's
    scale serves nothing else."""

    def __init__(self, outlier: float = 3000.0):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.Linear(D, 16, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.blocks[1].up.weight.data[:, ::16] = 0.0
        self.outliers = torch.where(torch.arange(D) % 16 == 0, outlier, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x + self.blocks[1].down(torch.tanh(self.blocks[1].up(x + self.outliers)))
        return self.up(self.dropout(self.blocks[2](x)))


def data(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    net = Net().eval()
    xs = [values(64, D, seed=s, dtype=torch.float32) for s in range(count)]
    return [
        (x, net(x).detach() + 0.5 * values(64, 16, seed=100 + s).float()) for s, x in enumerate(xs)
    ]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def gap(recipe, model: nn.Module) -> float:
    """Of a model that is converted and measured without any code of `advise`."""

    def mean(m: nn.Module) -> float:
        with torch.no_grad():
            return float(torch.stack([loss(m.eval(), b) for b in data()]).mean())

    return abs(mean(fq.convert(copy.deepcopy(model), recipe)) - mean(copy.deepcopy(model)))


@pytest.mark.parametrize("outlier, bears", [(3000.0, "mxfp8"), (1e6, "identity")])
def test_the_layer_that_suffers_stays_precise_and_the_loss_within_budget(
    outlier: float, bears: str
):
    """If false, advise gives the layer with outlier channels a format that ruins it, or leaves all
    layers dear."""
    net, said = Net(outlier), []
    budget = 0.004
    recipe = fq.advise(net, data(), budget=budget, loss=loss, say=said.append, cost="bytes")
    of = {name: its for name, its in zip(*_layers(net, recipe))}
    forward = {
        name: its.hybrid(fq.Role("linear", "input", name)).rowwise.fmt for name, its in of.items()
    }
    assert forward.pop("blocks.1.up").name == bears
    assert {forward[f"blocks.{i}.{part}"].name for i in (0, 2) for part in ("up", "down")} == {
        "nvfp4"
    }
    assert gap(recipe, net) <= budget
    cheapest = recipes.per_layer("nvfp4/identity")
    assert gap(cheapest, net) > budget  # the budget binds
    assert "blocks.1.up" in said[0] and eval(said[0].splitlines()[-1], {"fq": fq}) == recipe


def _layers(net: nn.Module, recipe) -> tuple[list[str], list[fq.Recipe]]:
    names = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    return names, recipe.for_layers(names)


def test_numbers_are_those_of_one_layer_changed_at_a_time():
    """If false, the trade is made by numbers of something else."""
    net = Net()
    advice = advise.study(net, data(), loss=loss, candidates=("mxfp8", "nvfp4"))
    (choice,) = [c for c in advice.choices if c.layer == "blocks.0.down"]
    alone = recipes.per_layer("identity", {"blocks.0.down": "nvfp4/identity"})
    assert choice.gaps["nvfp4"] == pytest.approx(gap(alone, net), rel=1e-4)
    assert advice.loss == pytest.approx(
        float(torch.stack([loss(Net().eval(), b) for b in data()]).mean()), rel=1e-6
    )

    def gradient(recipe) -> Tensor:
        m = fq.convert(Net().eval(), recipe)
        found = [torch.autograd.grad(loss(m, b), list(m.parameters())) for b in data()]
        return torch.cat([g.flatten() for of in found for g in of]).double()

    want, got = (
        gradient("identity"),
        gradient(recipes.per_layer("identity", {"blocks.0.down": "identity/mxfp8"})),
    )
    assert choice.errors["mxfp8"] == pytest.approx(
        float((got - want).norm() / want.norm()), rel=1e-4
    )
    assert choice.gaps["identity"] == choice.errors["identity"] == 0
    assert advice.predicted[0] == pytest.approx(sum(c.gaps[c.forward] for c in advice.choices))


@pytest.mark.parametrize(
    "budget, error, formats",
    [(1e9, 1e9, {("nvfp4", "nvfp4")}), (0.0, 0.0, {("identity", "identity")})],
)
def test_budgets_decide(budget: float, error: float, formats: set):
    """If false, a budget of nothing costs something, or one without end leaves precision
    unasked."""
    options = {"gradient_error": error, "cost": "bytes"}
    advice = advise.study(Net(), data(1), budget, ("mxfp8", "nvfp4"), loss, **options)
    assert {(c.forward, c.backward) for c in advice.choices} == formats
    assert advice.cost == pytest.approx({"nvfp4": 0.5625 / 2, "identity": 1.0}[formats.pop()[0]])


def test_a_gradient_budget_chooses_backwards_by_themselves():
    """If false, a loose loss budget lets gradients drown in noise."""
    options = {"gradient_error": 0.08, "cost": "bytes"}
    advice = advise.study(Net(), data(1), 1e9, ("mxfp8", "nvfp4"), loss, **options)
    assert {c.forward for c in advice.choices} == {"nvfp4"}
    assert any(c.backward != "nvfp4" for c in advice.choices) and advice.measured[1] <= 0.08


@pytest.mark.parametrize("arch, fastest", [("sm_90a", "mxfp4"), ("sm_100f", "nvfp4")])
def test_time_decides_among_any_number_of_candidates(monkeypatch, arch: str, fastest: str):
    """If false, a GPU is advised formats of few bytes that it multiplies in bf16, and small layers
    are quantized for a loss of time."""
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 16)), data(1)
    options = {"loss": loss, "gradient_error": 1e9, "on": arch}
    options["candidates"] = ("nvfp4", "mxfp4", "mxfp8")
    advice = advise.study(net, batches, 1e9, **options)
    assert {(c.forward, c.backward) for c in advice.choices} == {("identity", "identity")}
    assert advice.cost == 1.0 and f"1.00 of bf16's time on {arch}" in str(advice)
    flops, _ = advise.PEAKS[arch]
    monkeypatch.setitem(advise.PEAKS, arch, (flops, 1e18))  # quantizing costs nothing
    advice = advise.study(net, batches, 1e9, **options)
    assert {(c.forward, c.backward) for c in advice.choices} == {(fastest, fastest)}
    assert advice.cost == pytest.approx({"sm_90a": 1 / 2, "sm_100f": 1 / 4}[arch], rel=1e-2)
    budget = max(c.gaps[fastest] for c in advice.choices) / 2
    tight = advise.study(net, batches, budget, **options)
    assert {c.forward for c in tight.choices} != {fastest} and tight.measured[0] <= budget
    assert 1 >= tight.cost > advice.cost


def test_the_model_and_the_step_stay_as_they_are():
    """If false, advice changes the run that follows: parameters, mode, steps, generators."""
    net, before = Net(), Net()
    step, generator = STEP.values(), torch.get_rng_state()
    fq.advise(net, data(1), loss=loss, say=lambda text: None)
    assert (STEP.values(), net.training) == (step, True) and torch.equal(
        generator, torch.get_rng_state()
    )
    assert all(type(m) is nn.Linear for m in (net.up, net.blocks[0].up))
    for got, want in zip(net.parameters(), before.parameters(), strict=True):
        assert_same_bytes(got, want, "parameter")
        assert got.grad is None
    converted = fq.convert(Net(), "fp8_delayed")
    fq.advise(converted, data(1), loss=loss, say=lambda text: None)
    assert converted.up.recipe == recipes.fp8_delayed()


def test_names_without_dots_are_told_from_last_components():
    """If false, the recipe of `up` is that of every `blocks.*.up` too."""
    chosen = {
        "blocks.0.up": ("nvfp4", "mxfp8"),
        "blocks.1.up": ("nvfp4", "mxfp8"),
        "up": ("identity", "identity"),
    }
    recipe, code = advise._recipe(chosen)
    assert [r.name for r in recipe.for_layers(list(chosen))] == ["hybrid", "hybrid", "identity"]
    assert eval(code, {"fq": fq}) == recipe


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fq.advise(Net(), [], loss=loss), "got 0 batches"),
        (
            lambda: fq.advise(Net(), data(1), candidates=("mxfp9",), loss=loss),
            "unknown format family 'mxfp9'",
        ),
        (
            lambda: fq.advise(Net(), [data(1)[0][0]]),
            "the model returned Tensor without a loss; pass loss=",
        ),
        (
            lambda: fq.advise(Net(), data(1), loss=lambda m, b: m(b[0])),
            r"loss\(model, batch\) returned Tensor; wanted a tensor of one",
        ),
        (lambda: fq.advise(Net(), data(1), budget=-1.0, loss=loss), "budgets are not negative"),
        (lambda: fq.advise(Net(), data(1), loss=loss, on="cpu"), "on='cpu' has no peaks; wanted"),
        (lambda: fq.advise(Net(), data(1), loss=loss, cost="joules"), "cost must be 'time' or"),
        (
            lambda: fq.advise(Net(), [(data(1)[0][0] * float("nan"), data(1)[0][1])], loss=loss),
            "the loss in high precision is nan",
        ),
    ],
)
def test_what_cannot_be_advised_is_refused(call, message: str):
    """If false, a recipe is advised that nothing was measured for."""
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_prints_the_trade(tmp_path: Path, capsys: pytest.CaptureFixture):
    """If false, the command line advises something else than the function."""
    path = tmp_path / "run.py"
    path.write_text(
        "from dist_tests.single.test_advise import Net, data, loss\n\ndef setup():\n    return "
        "Net(), data(1), loss\n"
        "\ndef wrong():\n    return 3\n"
    )
    cost = ["--cost", "bytes"]
    assert main(["advise", str(path), "--budget", "0.004", "--skip", "blocks.2.*", *cost]) == 0
    printed, said = capsys.readouterr().out, []
    options = {"skip": ["blocks.2.*"], "say": said.append, "cost": "bytes"}
    fq.advise(Net(), data(1), budget=0.004, loss=loss, **options)
    assert printed == said[0] + "\n" and "blocks.2" not in printed
    for place, message in (
        (f"{path}:none", "has no function 'none'"),
        (f"{path}:wrong", "returned int; wanted (model, batches)"),
    ):
        assert main(["advise", place]) == 2
        assert message in capsys.readouterr().err


def test_the_page_on_diverging_runs_runs_as_written(tmp_path: Path, monkeypatch, capsys):
    """If false, the how-to ends in a traceback, or in numbers that it does not promise, or a run
    whose gradients are a quarter off by an nvfp4 backward is advised one."""
    page = Path(fq.__file__).parent.parent / "docs" / "diverging_run.md"
    monkeypatch.chdir(tmp_path)
    made: dict = {}
    for kind, block in re.findall(r"```(python|bash)\n(.*?)```", page.read_text(), re.DOTALL):
        if kind == "python":
            exec(compile(block, page.name, "exec"), made)
        else:
            assert main(block.removeprefix("python -m fsdp_quant ").split()) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    before, after = (
        [float(n) for n in line.split()] for line in lines if re.fullmatch(r"20( [\d.e-]+)+", line)
    )
    assert before[1] > 0.75 > 0.2 > before[2] and after[1] < 0.1
    layers = fq.convert(made["build"](), made["recipe"])
    forward = {f"{b}.up": dict(layers[b].up.recipe.arguments)["forward"] for b in (0, 1)}
    assert forward == {"0.up": "nvfp4", "1.up": "mxfp8"}
    errors = [  # a budget of the loss without end
        advise.study(made["build"](), [made["batch"](100)], 1e9, loss=made["loss_of"], **options)
        for options in ({"gradient_error": 1e9, "cost": "bytes"}, {"cost": "bytes"})
    ]
    assert errors[0].measured[1] > 0.2 > 0.1 >= errors[1].measured[1]

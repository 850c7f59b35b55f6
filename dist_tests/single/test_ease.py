# SPDX-License-Identifier: Apache-2.0
"""Names in place of recipes, `skip="auto"`, progress bars, saved plans, what `doctor` advises, and
what an import costs."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import public, recipes
from fsdp_quant.__main__ import main
from fsdp_quant.inspection.remedies import Machine, remedies
from fsdp_quant.models import progress
from fsdp_quant.ops import extension

ROOT = Path(fq.__file__).parent.parent

# Names #

NAMES = {
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "bf16": recipes.identity(),
    "mxfp6": recipes.mxfp6(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_block / mxfp4": recipes.hybrid("fp8_block", "mxfp4"),
}
MX, NV = recipes.mxfp8(), recipes.nvfp4()


def test_types_say_that_names_are_recipes():
    """If false, a type checker refuses what every page writes, or reads no types at all."""
    assert (ROOT / "fsdp_quant" / "py.typed").exists()
    assert '"fsdp_quant" = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
    takers = {}
    for name, value in (public.NAMES | public.ALIASES | vars(fq.parallel)).items():
        if inspect.isroutine(value) or inspect.isclass(value):
            with contextlib.suppress(ValueError):
                taken = inspect.signature(value).parameters
                takers |= {name: taken["recipe"].annotation} if "recipe" in taken else {}
    assert len(takers) > 10 and [n for n, hint in takers.items() if "str" not in str(hint)] == []
    assert fq.set_recipe(model := fq.convert(net(), MX), "nvfp4") is model


def net(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


@pytest.mark.parametrize("name, recipe", NAMES.items())
def test_a_name_is_the_recipe_that_it_names(name: str, recipe: fq.Recipe):
    """If false, a text converts to other formats than the call that it stands for."""
    assert fq.convert(net(), name)[0].recipe == recipe
    m = fq.convert(net(), NV)
    fq.set_recipe(m, name)
    assert m[1].recipe == recipe
    assert fq.Linear(16, 16, recipe=name).recipe == recipe
    assert fq.GroupedLinear(2, 16, 16, packed=True, recipe=name).first.recipe == recipe
    assert fq.GroupedLinear(2, 16, 16, recipe=name).first.recipe == recipe
    assert fq.LayerNormLinear(16, 16, recipe=name).linear.recipe == recipe
    assert fq.LayerNormMLP(16, 16, recipe=name).down_proj.recipe == recipe
    assert recipes.per_layer(name, {"a": name}, first=(1, name)) == recipes.per_layer(
        recipe, {"a": recipe}, first=(1, recipe)
    )
    assert recipes.schedule(MX, (3, None, name)) == recipes.schedule(MX, (3, None, recipe))
    assert fq.hooks.token_alignment(name, "x") == fq.hooks.token_alignment(recipe, "x")
    with fq.quantized_model_init(name):
        assert fq.Linear(16, 16).recipe == recipe


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_takes_a_name(compiled: bool):
    """If false, fq.autocast("nvfp4") breaks, or breaks a graph."""
    m, x = fq.convert(net(), MX), values(32, 32, seed=1)

    def run(x: Tensor) -> Tensor:
        with fq.autocast("nvfp4"):
            return m(x)

    got = torch.compile(run, fullgraph=True, backend="eager")(x) if compiled else run(x)
    with fq.autocast(NV):
        assert_same_bytes(got, m(x), "by name")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            "mxfp5",
            "unknown recipe 'mxfp5'; known recipes: bf16, .*mxfp4.*nvfp4, or forward/backward of "
            "the families .*fp8_block",
        ),
        ("mxfp8/mxfp5", "unknown format family 'mxfp5'; known families: .*mxfp8"),
        ("mxfp8/nvfp4/x", "unknown recipe 'mxfp8/nvfp4/x'"),
        (
            recipes.mxfp8,
            r"got fq.recipes.mxfp8, which makes a recipe; call it: "
            r"fq.recipes.mxfp8\(\)",
        ),
        (None, "fq.convert wants a recipe, got None; pass fq.recipes.mxfp8"),
        ({}, "fq.convert wants a recipe, got {}"),
    ],
)
def test_what_is_no_recipe_is_refused(wrong, message: str):
    """If false, a misspelled name is a KeyError far away, or another recipe."""
    with pytest.raises(ValueError, match=message):
        fq.convert(net(), wrong)


# Skip #


class MoE(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.gate = nn.Linear(d, 128, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(2))


class Net(nn.Module):
    """Names as in language models: a block with attention that has a gate of its own, experts with
    a router, and heads."""

    def __init__(self, d: int = 128, vocab: int = 384):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, d), nn.Embedding(d, d)
        block = nn.ModuleDict(
            {
                "q": nn.Linear(d, d),
                "gate": nn.Linear(d, d),
                "output": nn.Linear(d, d),
                "small": nn.Linear(d, 8),
            }
        )
        self.layers = nn.ModuleList([block])
        self.moe, self.router = nn.ModuleList([MoE(d)]), nn.Sequential(nn.Linear(d, d))
        self.odd, self.up = nn.Linear(d, 136), nn.Linear(d, 2 * d)
        self.vocabulary, self.tied, self.score = (
            nn.Linear(d, vocab),
            nn.Linear(d, vocab, bias=False),
            nn.Linear(d, d),
        )
        self.tied.weight = self.embed.weight


def test_auto_skips_what_gains_nothing_and_says_so():
    """If false, a head, a router or a sliver is quantized unasked, or a layer that gains stays
    slow, or nobody knows which."""
    m = Net()
    with pytest.warns(UserWarning, match="skip='auto' leaves 7 layers in high precision") as told:
        fq.convert(m, "mxfp8", skip=["auto", "*.q"])
    skipped = {
        "vocabulary": "output head",
        "score": "output head",
        "moe.0.gate": "router",
        "router.0": "router",
        "tied": "tied",
        "layers.0.small": "too small, [8, 128]",
        "odd": "too small, [136, 128]",
    }
    converted = {n for n, x in m.named_modules() if isinstance(x, fq.Linear)}
    assert converted == {
        "layers.0.gate",
        "layers.0.output",
        "moe.0.experts.0",
        "moe.0.experts.1",
        "up",
    }
    (message,) = [str(w.message) for w in told]
    for name, reason in skipped.items():
        assert f"{name} ({reason})" in message, name
    assert "skip='auto': router" in str(fq.plan(m))


def test_auto_skips_an_attention_output_in_no_block():
    """If false, only models with numbered blocks can be converted."""
    m = nn.ModuleDict({"q": nn.Linear(128, 128), "output_proj": nn.Linear(128, 128)})
    with pytest.warns(UserWarning, match="leaves 0 layers in high precision: none"):
        fq.convert(m, "mxfp8", skip="auto")
    assert {type(x) for x in m.values()} == {fq.Linear}


# Plans #


def test_a_saved_plan_is_the_plan(tmp_path):
    """If false, a file says other formats, domains or bytes than the model that wrote it."""
    made = fq.plan(fq.convert(net(), "mxfp8/nvfp4"))
    made.weight_bytes, made.weight_elements, made.other_bytes = {"0.weight": (10, 20)}, 7, (1, 2)
    made.save(tmp_path / "plan.json")
    loaded = fq.inspection.plan.load(tmp_path / "plan.json")
    assert loaded == made and str(loaded) == str(made)
    for text in ("{}", "[1]", "no json"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match="is no plan that fq.plan"):
            fq.inspection.plan.load(tmp_path / "plan.json")


def test_a_diff_of_plans_says_what_changed_and_where():
    """If false, two runs are compared that run other formats."""
    m = fq.convert(net(), "mxfp8")
    old = fq.plan(m)
    assert fq.inspection.plan.diff(old, fq.plan(m)) == []
    fq.set_recipe(m, recipes.per_layer(MX, {"1": "mxfp8/nvfp4"}))
    new = fq.plan(m)
    new.weight_bytes, new.notes = {"0.weight": (10, 20)}, ["a note"]
    told = fq.inspection.plan.diff(old, new)
    assert (
        told[0].startswith("dgrad: mxfp8 x mxfp8 reference (")
        and " -> nvfp4+SR x nvfp4 reference (" in told[0]
    )
    assert told[0].endswith("[1]") and told[1].startswith("wgrad: ") and len(told) == 4
    assert told[2:] == ["gathers a step: 0 B forward + 0 B backward -> 10 B + 20 B", "now: a note"]
    (gone,) = {
        line
        for line in fq.inspection.plan.diff(old, fq.inspection.plan.ModelPlan())
        if line.startswith("fprop")
    }
    assert gone.endswith("-> none  [2 x 0]")


# The doctor #

H100, H200, A100 = (
    ("NVIDIA " + name, capability, None)
    for name, capability in (("H100", (9, 0)), ("H200", (9, 0)), ("A100", (8, 0)))
)
WELL = Machine("13.0", True, (H100, H100), None, True)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, []),
        (
            {"gpus": (), "cuda": None, "has_driver": False},
            ["there is no GPU: the PyTorch reference"],
        ),
        ({"gpus": (), "cuda": None}, ["torch is a CPU build: install a CUDA build"]),
        ({"gpus": ()}, ["sees no GPU: see whether nvidia-smi"]),
        (
            {"gpus": (), "environ": {"CUDA_VISIBLE_DEVICES": ""}},
            ["CUDA_VISIBLE_DEVICES hides all GPUs: unset it"],
        ),
        ({"operators": extension.TURNED_OFF}, ["turned off: unset FSDP_QUANT_NATIVE"]),
        (
            {"operators": "not built; with a CUDA build of torch and nvcc: build"},
            ["operators are off: not built; with a CUDA build"],
        ),
        (
            {"gpus": (("B200", (10, 0), "the library was built without sm_100: rebuild"),)},
            [
                "B200: the library was built without sm_100: rebuild",
                "were not run there: run python -m fsdp_quant selftest",
            ],
        ),
        (
            {"gpus": (A100, A100)},
            ["A100 has no fp8 tensor cores: .* use an H100", "A100: .* were not run there: run"],
        ),
        (
            {"gpus": (A100, H100)},
            ["no fp8 tensor cores", "not run there", "of different kinds.*CUDA_VISIBLE_DEVICES"],
        ),
        ({"has_nccl": False}, ["without NCCL.*: install a release"]),
        ({"has_nccl": False, "gpus": (H200,)}, []),
        (
            {"environ": {"FSDP_QUANT_CHECK": "1", "FSDP_QUANT_BACKWARD_OVERRIDE": "dequantized"}},
            [
                "FSDP_QUANT_CHECK compares codes.*unset it",
                "FSDP_QUANT_BACKWARD_OVERRIDE=dequantized is the backward.*unset it",
            ],
        ),
    ],
)
def test_the_doctor_says_what_to_do(changes: dict, says: list[str]):
    """If false, a machine that could be fast is left slow, or a well one is called ill."""
    told = remedies(replace(WELL, **changes))
    assert len(told) == len(says), told
    for line, pattern in zip(told, says):
        assert re.search(pattern, line) and "\n" not in line, line


def test_the_doctor_reads_this_machine(capsys: pytest.CaptureFixture):
    """If false, the command prints facts and no advice."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out.splitlines()
    told = remedies(Machine.this())
    assert printed[-max(len(told), 1) :] == (
        [f"to do: {line}" for line in told] or ["nothing is off"]
    )


def test_the_command_plans_quantization_aware_training(capsys: pytest.CaptureFixture):
    """If false, recipes that want a format have no plan without a program."""
    assert main(["plan", "qat", "--weight", "nvfp4"]) == 0
    printed = capsys.readouterr().out
    assert "weight.rowwise (nvfp4(fp8_exact))" in printed
    assert "weight.columnwise (nvfp4(fp8_exact, turned))" in printed


# What an import costs #

_IMPORT = """
import sys, time, torch
before, began = set(sys.modules), time.perf_counter()
import fsdp_quant
seconds = time.perf_counter() - began
print(seconds, *{name for name in set(sys.modules) - before})
"""


def in_another_process(code: str) -> list[str]:
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return made.stdout.split()


def test_the_import_is_cheap():
    """If false, every script and worker of a data loader waits a second for what it does not use.
    It takes .05 s; the bound is
    for busy machines."""
    seconds, names = [], set()
    for _ in range(2):
        taken, *names = in_another_process(_IMPORT)
        seconds.append(float(taken))
    heavy = {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.export",
        "sympy",
        "transformers",
        "numpy.ma",
        "peft",
    }
    assert not heavy & set(names), heavy & set(names)
    assert min(seconds) < 0.4


_WAYS_TO_ASK = (
    "import fsdp_quant as fq; names = fq.convert, fq.hooks, fq.gemm, fq.plan",
    "from fsdp_quant.linear.linear import Linear\n"
    "import fsdp_quant as fq; names = fq.convert, fq.hooks, fq.gemm, fq.plan",
    "from fsdp_quant import *; names = convert, hooks, numerics.gemm, plan",
    "from fsdp_quant import convert, hooks, gemm, plan; names = convert, hooks, gemm, plan",
)


def test_public_names_are_there_however_they_are_asked_for():
    """If false, a name depends on what was imported before: fsdp_quant.gemm is a function, and a
    module too."""
    program = (
        "import os, torch._dynamo, torch.distributed.tensor.parallel\n"  # by every way
        f"for code in {_WAYS_TO_ASK!r}:\n"
        "    if child := os.fork():  # torch is imported once\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        continue\n"
        "    exec(code)\n"
        "    print(*(name.__name__ for name in names), flush=True)\n"
        "    os._exit(0)\n"
    )
    wanted = ["convert", "fsdp_quant.hooks", "gemm", "plan"]
    assert in_another_process(program) == wanted * len(_WAYS_TO_ASK)


def test_names_that_are_not_there_raise():
    """If false, a misspelled name is None, or imports for ever."""
    with pytest.raises(AttributeError, match="module 'fsdp_quant' has no attribute 'convrt'"):
        fq.convrt
    assert {"convert", "Linear", "inspect", "recipes", "__version__"} <= set(dir(fq))


# Progress #


class Bar:
    made: list[Bar] = []

    def __init__(self, **options):
        self.updates, self.running = [], False
        Bar.made.append(self)

    def add_task(self, what: str, total: int) -> int:
        self.what, self.total = what, total
        return 0

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def update(self, task: int, completed: int) -> None:
        self.updates.append(completed)


@pytest.mark.parametrize(
    "terminal, seconds, has_rich, shows",
    [
        (True, 6.0, True, True),
        (True, 0.1, True, False),
        (False, 6.0, True, False),
        (True, 6.0, False, False),
    ],
)
def test_long_loops_show_a_bar_where_somebody_sees_it(
    monkeypatch, terminal: bool, seconds: float, has_rich: bool, shows: bool
):
    """If false, a conversion of minutes says nothing, or a log fills with bars."""
    clock = iter(seconds * i for i in range(100))
    Bar.made.clear()
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress, "Progress", Bar if has_rich else None)
    assert list(progress.progress(["a", "b", "c"], "it")) == ["a", "b", "c"]
    assert bool(Bar.made) == shows
    for bar in Bar.made:
        assert (bar.what, bar.total, bar.updates, bar.running) == ("it", 3, [0, 1, 2], False)


def test_a_bar_ends_where_the_loop_raises(monkeypatch):
    """If false, an error message is overwritten by a bar."""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "Progress", Bar)
    Bar.made.clear()
    with pytest.raises(ValueError, match="0: fprop multiplies"):
        fq.convert(net(), recipes.mxfp8(require_native=True))
    assert len(Bar.made) == 1 and not Bar.made[0].running

# SPDX-License-Identifier: Apache-2.0
"""Documents: tutorials, examples and docstrings run as written; reference pages say what the
sources say."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fsdp_quant as fq
from dist_tests.pages import DOCS, ROOT, run_page
from fsdp_quant import public

READS = ["fsdp_quant", "launch", "dist_tests", "examples", ".ci", "setup.py"]
SCOPE = {"torch": torch, "nn": torch.nn, "fq": fq}  # what every example imports


def load(path: Path):
    """A file of the repository as a module, which no package holds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tutorial_runs_as_written(tmp_path, monkeypatch):
    """If false, the first page that a user follows fails."""
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "first_training.md", {})
    assert (tmp_path / "run.pt").exists()


@pytest.mark.parametrize("library", ["transformer_engine", "torchao", "megatron"])
def test_a_page_for_users_of_another_library_runs_as_written(library: str):
    """If false, code that is rewritten as the page says fails. Blocks marked `py` are of the other
    library."""
    try:
        run_page(DOCS / f"coming_from_{library}.md", {})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_script_of_megatron_gathers_codes(tmp_path, monkeypatch):
    """If false, the script of docs/megatron.md patches nothing that Megatron calls, or its first
    forward reads codes that were never gathered. Megatron and the gather are stand-ins."""
    calls = []
    chunk = SimpleNamespace(start_param_sync=lambda force_sync: calls.append(force_sync))
    training = ModuleType("training")
    training.setup_model_and_optimizer = lambda *args: ([chunk], "optimizer", args)
    training.pretrain = lambda *args: calls.append(training.setup_model_and_optimizer(*args)[1:])
    package = ModuleType("megatron.training")
    package.training, package.pretrain = training, training.pretrain
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    gather = SimpleNamespace(gather_codes=lambda *args: calls.append(args))
    monkeypatch.setitem(sys.modules, "fsdp_quant.integrations.megatron.gather", gather)
    (tmp_path / "pretrain_gpt.py").write_text(
        "from megatron.training import pretrain\nif __name__ == '__main__':\n    pretrain(1, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "megatron.md", {})
    assert calls == [([chunk], "optimizer"), True, ("optimizer", (1, 2))]


@pytest.mark.parametrize("library", ["transformer_engine", "torchao", "megatron"])
def test_names_that_a_page_gives_exist(library: str):
    """If false, a table sends a user of another library to a name that is not there."""
    text = (DOCS / f"coming_from_{library}.md").read_text()
    names = set(re.findall(r"\bfq((?:\.\w+)+)", text))
    assert len(names) > 10
    for name in names:
        operator.attrgetter(name[1:])(fq)


def test_every_page_installs_with_the_installed_torch():
    """If false, a page's command builds in isolation, which sees no torch and compiles nothing."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    commands = [
        line
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"pip install .*-e +['\"]?\.", line)
    ]
    assert commands and all("--no-build-isolation" in line for line in commands), commands


@pytest.mark.parametrize(
    "name, arguments", [("single_gpu", ["--dim", "64"]), ("transformers_model", [])]
)
def test_an_example_learns(name: str, arguments: list[str]):
    """If false, an example of README fails, or trains nothing."""
    losses = load(ROOT / "examples" / f"{name}.py").main([*arguments, "--steps", "8"])
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", public.NAMES | public.ALIASES)
def test_a_public_name_has_an_example_that_runs(name: str, tmp_path, monkeypatch):
    """If false, a docstring shows a call that fails, or none. Values are shown by the docstring of
    their class."""
    value = getattr(fq, name)
    if isinstance(value, (fq.Direction, dict)):
        value = type(value) if isinstance(value, fq.Direction) else fq.format_of
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(value) or ""
    test = doctest.DocTestParser().get_doctest(
        text, SCOPE | {"__name__": "example"}, f"fq.{name}", None, 0
    )
    assert test.examples, f"the docstring of fq.{name} has no example"
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        test, out=failures.append
    )
    assert not failures, "".join(failures)


def test_the_environment_page_lists_what_is_read():
    """If false, a variable changes a run and no page says so, or a page promises one that nothing
    reads."""
    files = [
        path
        for name in READS
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    sources = [path for path in files if path.suffix in (".py", ".sh", ".sbatch", "")]
    found = {
        name for path in sources if path.is_file() and path != Path(__file__)
        for name in re.findall(r"\bFSDP_QUANT_[A-Z][A-Z_]*[A-Z]\b", path.read_text(errors="ignore"))
    }  # fmt: skip
    listed = set(
        re.findall(r"`(FSDP_QUANT_[A-Z_]+)`", (DOCS / "reference/environment.md").read_text())
    )
    assert listed == found


def test_the_errors_page_quotes_messages_of_the_sources():
    """If false, a user looks for a message that no version prints."""
    page = (DOCS / "reference/errors.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.M)
    text = "".join(path.read_text() for path in sorted((ROOT / "fsdp_quant").rglob("*.py")))
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message of several strings
    assert len(quoted) > 20 and [message for message in quoted if message not in text] == []


def test_the_api_page_lists_parameters():
    """If false, parameters are one preformatted block, or Markdown takes stars and underscores of a
    docstring for its own."""
    page = load(DOCS / "site" / "api.py").body(
        "x:     [M, K] of *.gate\n       or `a_b`\nreturns: y_\nProse of\nlines.\n\n>>> f(x_)\n1"
    )
    assert page.split("\n\n") == [
        "\n- `x`: [M, K] of \\*.gate\n       or `a_b`\n- `returns`: y\\_\n".rstrip("\n"),
        "Prose of\nlines.",
        "```pycon\n>>> f(x_)\n1\n```",
        "",
    ]


def test_a_page_of_the_site_asks_no_other_site_for_its_search():
    """If false, the site that opens from a folder has no search without a network."""
    shim = '<script src="https://example.org/iframe-worker/shim"></script>'
    page = load(DOCS / "site" / "api.py").on_post_page(f"<head>{shim}</head>")
    assert "https://" not in page and "window.Worker = class" in page


def test_measured_tables_are_those_of_the_json():
    """If false, the page of measurements or README's picture shows other numbers than
    docs/measurements."""
    assert load(DOCS / "site" / "measurements.py").is_current(), (
        "run python docs/site/measurements.py"
    )


def test_a_changed_number_is_noticed(monkeypatch):
    """If false, the law above holds whatever the page says."""
    site = load(DOCS / "site" / "measurements.py")
    found = site.load()
    found["gemm"]["rows"][0][1] = "1"
    monkeypatch.setattr(site, "load", lambda: found)
    assert not site.is_current()


def test_the_picture_compares_arms_that_run_alike():
    """If false, README shows captured steps over bf16 that is not captured, or of another run."""
    site = load(DOCS / "site" / "measurements.py")
    rows = {(arm, run): float(ms) for arm, run, ms, *_ in site.load()["llama3_8b"]["rows"]}
    for how, (run, arms) in site.PICTURED.items():
        assert all(f", {how}" in arm for arm in arms)
        times = [rows[arm, run] / rows[f"bf16, {how}", run] for arm in arms]
        assert [time for _, time, _ in site.bars()[how]] == times


def test_links_of_readme_and_contributing_lead_somewhere():
    """If false, a link on the front page is dead: mkdocs checks those of docs/ alone."""
    dead = []
    for name in ("README.md", "CONTRIBUTING.md"):
        for target, anchor in re.findall(
            r"\]\(([^)#:]+)(?:#([^)]*))?\)", (ROOT / name).read_text()
        ):
            path = ROOT / target
            if not path.exists() or (anchor and f'<a id="{anchor}"></a>' not in path.read_text()):
                dead.append(f"{name}: {target}#{anchor}")
    assert dead == []


def test_the_version_is_one():
    """If false, pip and fsdp_quant.__version__ tell different versions."""
    code = "import setuptools.config.pyprojecttoml as p; "
    code += "print(p.read_configuration('pyproject.toml')['project']['version'])"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    cited = re.search(r"^version: (.+)$", (DOCS / "CITATION.cff").read_text(), re.M)
    assert said[-1:] == [fq.__version__] == [cited[1]]

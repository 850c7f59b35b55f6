# SPDX-License-Identifier: Apache-2.0
"""`python -m fsdp_quant report`: one file that needs no network, and says what the log says."""

from __future__ import annotations

import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import kept_step, values
from fsdp_quant.__main__ import main
from fsdp_quant.counters import counters

VOID = {"meta", "br", "input"}
NAME = 'a "<script>" & b'


class Page(HTMLParser):
    """Sections, rows of tables, polylines and scripts of a page. Raises where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.stack, self.sections, self.lines, self.scripts, self.loads = [], {}, {}, [], []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert not self.stack, self.stack

    @property
    def section(self) -> str:
        return next((attrs["id"] for tag, attrs in self.stack if tag == "section"), "")

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.loads += [v for k, v in attrs.items() if k in ("src", "href")]
        if tag not in VOID:
            self.stack.append((tag, attrs))
        if tag == "tr":
            self.rows = self.sections.setdefault(self.section, [])
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append((attrs, ""))

    def handle_startendtag(self, tag, attrs):
        if tag == "polyline":
            self.lines.setdefault(self.section, []).append(dict(attrs)["points"].split())

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag

    def handle_data(self, data):
        tag = self.stack[-1][0] if self.stack else ""
        if tag == "td":
            self.rows[-1][-1] += data
        elif tag == "script":
            self.scripts[-1] = self.scripts[-1][0], data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first weight has a column that its tensor's scale does not serve, and whose loss
    ends as NaN."""
    path = tmp_path_factory.mktemp("report") / "run.jsonl"
    with kept_step(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "has_graphs", False)  # of tests before
        net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        net.add_module(NAME.replace(".", ""), nn.Linear(32, 32))
        whole = nn.ModuleDict({"net": net, "idle": nn.Linear(32, 32)})
        fq.convert(whole, "fp8_current")
        net[0].weight.data[:, 0] *= 1e6
        fq.reset_receipt()
        with fq.inspect(net, every=2, path=path) as log:
            for step in range(6):
                x = values(32, 32, seed=step).float()
                x[:, 0] = 0.0  # so that no other tensor has outliers
                loss = net(x).square().mean()
                loss.backward()
                log.scalars(loss=float("nan") if step == 5 else step**2, rate=0.1)
    return path


def lines_of(path: Path, kind: str) -> list[dict]:
    return [
        line for text in path.read_text().splitlines() if (line := json.loads(text))["kind"] == kind
    ]


def page_of(*runs: Path) -> tuple[Page, str]:
    out = runs[0].with_suffix(".html")
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    return Page(out.read_text()), out.read_text()


def test_the_page_holds_every_number_of_the_log(run: Path):
    """If false, the heat map shows other values than the run had."""
    page, _ = page_of(run)
    (data,) = [json.loads(text) for attrs, text in page.scripts if attrs.get("id") == "data"]
    (shown,) = data
    numbers = lines_of(run, "numbers")
    assert shown["steps"] == [line["step"] for line in numbers] == [0, 2, 4]
    found = {
        (f"{layer}/{key}", step): value
        for key, layers in shown["numbers"].items()
        for layer, of in layers
        for step, value in zip(shown["steps"], of)
        if value is not None
    }
    logged = {
        (key, line["step"]): value
        for line in numbers
        for key, value in line["values"].items()
        if value is not None
    }
    assert found == logged and len(found) > 100


def test_the_page_needs_no_network_and_escapes_names(run: Path):
    """If false, the file opens nothing on a machine without network, or a layer's name runs as
    code."""
    page, text = page_of(run)
    assert page.loads == [] and not re.search(r"https?://|@import|url\(", text)
    assert set(page.sections) == {"worst", "ran"} and len(page.scripts) == 2
    assert any(row and row[0] == NAME for row in page.sections["worst"])
    assert '<script>" &' not in text


def test_curves_go_through_the_logged_losses(run: Path):
    """If false, the loss that is drawn is not the run's."""
    page, text = page_of(run)
    loss, rate = page.lines["loss"]
    points = [tuple(map(float, point.split(","))) for point in loss]
    logged = [(line["step"], line["values"]["loss"]) for line in lines_of(run, "scalars")]
    assert len(points) == 5 and logged[5] == (5, None)
    (x0, y0), (x4, y4) = points[0], points[4]
    for (x, y), (step, value) in zip(points, logged):
        assert (x - x0) / (x4 - x0) == pytest.approx(step / 4, abs=1e-3)
        assert (y - y0) / (y4 - y0) == pytest.approx(value / 16, abs=1e-3)
    assert "loss is no finite number from step 5 on" in text and len(rate) == 6


def test_the_layer_that_suffers_is_first(run: Path):
    """If false, people look at the wrong layer."""
    page, _ = page_of(run)
    _, first, second, *rest = page.sections["worst"]
    assert {tuple(row[:2]) for row in (first, second)} == {
        ("0", "weight.rowwise"),
        ("0", "weight.columnwise"),
    }
    lost = [
        [line["values"][f"{layer}/weight.rowwise/underflow"] for line in lines_of(run, "numbers")]
        for layer in ("0", "1", "2", NAME)
    ]
    worst = [max(of) for of in lost]
    middle = statistics.median(worst)
    assert worst[0] > 0.9 and float(first[2]) == pytest.approx((worst[0] - middle) / 0.1, abs=0.01)
    assert first[4].startswith(f"{worst[0]:.2%} ({middle:.2%}), ")
    points = [float(row[2]) for row in page.sections["worst"][1:]]
    assert points == sorted(points, reverse=True)


def test_products_counts_and_bytes_are_those_that_were_logged(run: Path, tmp_path: Path):
    """If false, the page says that something else ran."""
    page, text = page_of(run)
    (receipt,), (plan,) = lines_of(run, "receipt"), lines_of(run, "plan")
    receipt["idle"] = dict.fromkeys(receipt["idle"], 0)
    counted = {
        (kind, what): n for kind, of in receipt.items() if kind != "kind" for what, n in of.items()
    }
    assert ("idle", "idle") in counted
    shown = [row for row in page.sections["ran"] if row]
    assert {(row[0], row[1]): int(row[2]) for row in shown if len(row) == 3} == counted and counted
    assert sum(int(row[5]) for row in shown if len(row) == 7) == len(plan["gemms"]) == 12
    assert "FSDP2 gathers nothing" in text
    plan |= {"weight_bytes": {"0.weight": [1000, 2000]}, "other_bytes": [3, 4]}
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, [plan, *lines_of(run, "scalars")])))
    page, text = page_of(run, other)
    assert ["quantized weights", "1,000", "2,000"] in page.sections["bytes"] and len(
        page.lines["loss"]
    ) == 4


def test_files_of_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    """If false, a wrong path gives an empty report, or a traceback."""
    path = tmp_path / "x.jsonl"
    for text, message in (
        ("", "no samples and no scalars"),
        ("{}", "x.jsonl, line 1: wanted a line that fq.inspect"),
        ("4", "line 1"),
    ):
        path.write_text(text)
        assert main(["report", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.jsonl")]) == 2

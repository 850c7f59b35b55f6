# SPDX-License-Identifier: Apache-2.0
"""The report of `fq.inspect`, opened in a headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests.browser import VARIABLE, Page, find
from dist_tests.laws import kept_step, values
from fsdp_quant.inspection import report

BROWSER = find()
WIDTHS = (1200, 420)
LAYERS = ["layer0", "layer1", "2", "a_long_name_" * 8 + "end"]  # a number is no index
STEPS, EVERY, BAD = 12, 2, "layer1"

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no chromium or google-chrome on PATH; set {VARIABLE}"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of four layers; one weight of the first has columns that its scale does not serve,
    and the loss is infinite at one step."""
    folder, paths = tmp_path_factory.mktemp("runs"), []
    for recipe in ("fp8_current", "mxfp8"):
        paths.append(folder / f"{recipe}_{'of_a_long_name_' * 4}.jsonl")
        with kept_step():
            torch.manual_seed(0)
            model = nn.Sequential()
            for name in LAYERS:
                model.add_module(name, nn.Linear(32, 32))
            fq.convert(model, recipe)
            model.get_submodule(BAD).get_parameter("weight").data[:, 0] *= 1e6
            with fq.inspect(model, every=EVERY, path=paths[-1]) as log:
                for step in range(STEPS):
                    x = values(32, 32, seed=step).float()
                    x[:, 0] = 0.0
                    loss = model(x).square().mean()
                    loss.backward()
                    log.scalars(loss=float("inf") if step == 5 else 1 / (1 + step))
    return paths


@pytest.fixture
def page(runs: list[Path]) -> Iterator[Page]:
    """The report of both runs; a test fails if it logged an error or asked for another file."""
    out = runs[0].with_name("report.html")
    report.write(runs, out)
    with Page(str(BROWSER)) as opened:
        opened.open(out, WIDTHS[0])
        yield opened
        assert opened.errors == []


def logged(path: Path, key: str) -> list[list[float]]:
    """[layer, sample] of one quantity."""
    lines = map(json.loads, path.read_text().splitlines())
    samples = [line["values"] for line in lines if line["kind"] == "numbers"]
    return [[of[f"{name}/{key}"] for of in samples] for name in LAYERS]


def choose(page: Page, select: str, text: str) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById({select!r});"
        f"s.value = [...s.options].find(o => o.text.startsWith({text!r})).value;"
        "s.dispatchEvent(new Event('change')); })()"
    )


def cells(page: Page) -> list[list[tuple[float, float]]]:
    """[layer, sample]: centers of the cells of the heat map, from the corner of its drawing."""
    left, wide, row, top = page.run("[left, canvas.clientWidth, row, top0]")
    across = (wide - left) / (STEPS // EVERY)
    return [
        [(left + (i + 0.5) * across, top + (y + 0.5) * row) for i in range(STEPS // EVERY)]
        for y in range(len(LAYERS))
    ]


def test_the_heat_map_shows_each_value_by_its_color(page: Page, runs: list[Path]):
    """If false, a layer that suffers looks like the others."""
    for run, quantity in ((0, "weight.rowwise/underflow"), (1, "input.rowwise/sqnr_db")):
        choose(page, "run", runs[run].name)
        choose(page, "quantity", quantity)
        want = [v for of in logged(runs[run], quantity) for v in of]
        worst, best = (min, max) if quantity.endswith("db") else (max, min)
        assert run == 1 or float(page.run("byId('most').textContent")) == pytest.approx(
            worst(want), rel=1e-3
        )
        colors = page.run(
            "(() => { const copy = new OffscreenCanvas(canvas.width, canvas.height);"
            "const to = copy.getContext('2d', {willReadFrequently: true});"
            f"to.drawImage(canvas, 0, 0); return {json.dumps(cells(page))}.flat().map("
            "([x, y]) => [...to.getImageData(x, y, 1, 1).data]); })()"
        )
        assert all(alpha == 255 and len({r, g, b}) > 1 for r, g, b, alpha in colors), colors
        light = {value: sum(color) for value, color in zip(want, colors)}
        by_value = [light[v] for v in sorted(light, reverse=worst is min)]
        assert by_value == sorted(by_value, reverse=True)
        assert run == 1 or light[worst(want)] < 0.6 * light[best(want)]


@pytest.mark.parametrize("width", WIDTHS)
def test_pointing_at_a_cell_says_its_value(page: Page, runs: list[Path], width: int):
    """If false, the number that is read off the map is that of another layer or step."""
    assert page.run("quantities()[byId('quantity').value]") == "weight.rowwise/underflow"
    page.resize(width)
    assert page.run("canvas.width == canvas.clientWidth")
    want = logged(runs[0], "weight.rowwise/underflow")
    for layer, sample in ((0, 0), (1, 3), (len(LAYERS) - 1, STEPS // EVERY - 1)):
        corner = page.run(
            "(() => { canvas.scrollIntoView({block: 'center'});"
            "const b = canvas.getBoundingClientRect();"
            "return [b.left + canvas.clientLeft, b.top + canvas.clientTop]; })()"
        )
        page.move(*map(sum, zip(corner, cells(page)[layer][sample])))
        name, rest = page.run("byId('value').textContent").split(", step ")
        step, value = rest.split(": weight.rowwise/underflow = ")
        assert (name, int(step)) == (LAYERS[layer], sample * EVERY)
        assert float(value) == want[layer][sample]


def test_curves_have_area_and_break_at_a_loss_that_is_no_number(page: Page):
    """If false, the loss is not seen, or a line joins the steps around a broken one."""
    boxes = page.run(
        "[...document.querySelectorAll('#loss polyline')].map(p => {"
        "const b = p.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; })"
    )
    assert len(boxes) == 4  # of each run: before the broken step, and after it
    assert all(width > 50 and height > 5 for *_, width, height in boxes), boxes
    assert boxes[0][1] < boxes[1][0]
    plot = page.run(
        "(() => { const b = document.querySelector('#loss svg').getBoundingClientRect();"
        "return [b.left, b.right, b.width, b.height]; })()"
    )
    assert plot[2] > 500 and plot[3] > 100
    assert all(plot[0] < left and right < plot[1] for left, right, *_ in boxes)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_leaves_its_box(page: Page, width: int):
    """If false, numbers are cut off, or the page scrolls sideways on a small screen."""
    page.resize(width)
    inner, wide = page.run("[innerWidth, document.documentElement.scrollWidth]")
    assert (inner, wide) == (width, width)
    outside = page.run(
        "(() => { const found = [], walk = document.createTreeWalker(document.body, 4);"
        "while (walk.nextNode()) { const node = walk.currentNode, of = node.parentElement;"
        "if (!node.data.trim() || of.closest('script, style, select')) continue;"
        "const range = document.createRange(); range.selectNodeContents(node);"
        "const text = range.getBoundingClientRect(), cell = of.closest('td, th');"
        "const box = (cell || of.closest('h1, h2, h3, p, .x, .y')).getBoundingClientRect();"
        "const room = cell ? Infinity : innerWidth;"
        "if (text.right > Math.min(box.right, room) + 1 || text.left < box.left - 1)"
        " found.push([node.data.slice(0, 40), text.left, text.right, box.left, box.right]); }"
        "return found; })()"
    )
    assert outside == []
    tables = page.run(
        "[...document.querySelectorAll('.wide')].map(e => e.getBoundingClientRect().right)"
    )
    assert tables and max(tables) <= width

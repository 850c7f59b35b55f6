# SPDX-License-Identifier: Apache-2.0
"""`python -m fsdp_quant report`: show files of `fq.inspect(path=)` as one page of HTML.

The page loads nothing: numbers, styles and scripts are in the file.

loss      a curve per logged scalar (`log.scalars`), and the first step where it is not finite
heat map  layer x step of one quantity
worst     layers and operands, sorted by the distance of noise, underflow or saturation from the
          median over layers
ran       planned GEMMs, and the counters of the run
bytes     planned bytes of FSDP2's all-gathers per step
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from .plan import ModelPlan

WORST = 30
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


@dataclass
class Run:
    """One file of JSON lines.

    steps:    steps that were sampled.
    numbers:  "slot/quantity" -> layer -> value per sampled step; None for a missing value.
    scalars:  name -> (step, value); None for a value that is not finite.
    plan, receipt:  None if the file has none.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    numbers: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    scalars: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    plan: ModelPlan | None = None
    receipt: dict | None = None


def read(path: str | Path) -> Run:
    """Read a file of `fq.inspect(path=)`. Raises ValueError that names the line for other files."""
    run, samples = Run(Path(path).name), []
    for number, text in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            if line["kind"] == "plan":
                run.plan = ModelPlan.of_facts(line)
            elif line["kind"] == "receipt":
                run.receipt = {kind: counts for kind, counts in line.items() if kind != "kind"}
            elif line["kind"] == "scalars":
                for name, value in line["values"].items():
                    run.scalars.setdefault(name, []).append((line["step"], value))
            elif line["kind"] == "numbers":
                samples.append((line["step"], line["values"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: wanted a line that fq.inspect(path=) writes, got "
                f"{text[:80]!r}"
            ) from error
    run.steps = [step for step, _ in samples]
    for at, (_, values) in enumerate(samples):
        for key, value in values.items():
            layer, slot, quantity = key.rsplit("/", 2)
            of = run.numbers.setdefault(f"{slot}/{quantity}", {})
            of.setdefault(layer, [None] * len(samples))[at] = value
    return run


# Quantity -> (function that selects the worst sample, distance from the median per point). Outliers
# dominate the energy of a tensor and so its SQNR; the loss of other values shows as underflow.
POINTS = {"sqnr_db": (min, -3.0), "underflow": (max, 0.1), "saturation": (max, 0.01)}


@dataclass(frozen=True)
class Suffering:
    """One operand of one layer.

    worst:     quantity -> (its worst sample, step, the median of the worst over all layers).
    quantity:  the one with most points: 3 dB, 10 % of underflow or 1 % of saturation from the
               median are one point each.
    points:    of that quantity.
    """

    layer: str
    operand: str
    worst: dict[str, tuple[float, int, float]]

    def _points_of(self, quantity: str) -> float:
        value, _, median = self.worst[quantity]
        return (value - median) / POINTS[quantity][1]

    @property
    def quantity(self) -> str:
        return max(self.worst, key=self._points_of)

    @property
    def points(self) -> float:
        return self._points_of(self.quantity)


def worst(run: Run) -> list[Suffering]:
    """Sort operands of layers by points, the largest first."""
    found: dict[tuple[str, str], dict[str, tuple[float, int, float]]] = defaultdict(dict)
    for key, layers in run.numbers.items():
        operand, quantity = key.split("/")
        if quantity in POINTS:
            pick = POINTS[quantity][0]
            samples = {
                n: [(v, run.steps[i]) for i, v in enumerate(of) if v is not None]
                for n, of in layers.items()
            }
            picked = {layer: pick(of, key=lambda s: s[0]) for layer, of in samples.items() if of}
            middle = statistics.median(value for value, _ in picked.values()) if picked else 0.0
            for layer, (value, step) in picked.items():
                found[layer, operand][quantity] = value, step, middle
    return sorted((Suffering(*key, of) for key, of in found.items()), key=lambda s: -s.points)


def write(paths: Sequence[str | Path], out: str | Path) -> None:
    """Write one page about runs or ranks. Raises ValueError for files without data."""
    runs = [read(path) for path in paths]
    if not any(run.steps or run.scalars for run in runs):
        raise ValueError(
            f"{', '.join(map(str, paths))}: no samples and no scalars; train inside "
            f"fq.inspect(model, path=)"
        )
    data = [
        {
            "name": run.name,
            "steps": run.steps,
            # shown first: the quantity with the worst points; "" without samples
            "first": next((f"{of.operand}/{of.quantity}" for of in worst(run)), ""),
            # layers as pairs: objects of JavaScript put keys such as "3" before the others
            "numbers": {name: list(layers.items()) for name, layers in run.numbers.items()},
        }
        for run in runs
    ]
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        _section("loss", "Loss", _curves(runs)),
        _section("heat", "Layers by step", _HEAT),
        _section("worst", "Layers that suffer most", _worst_tables(runs)),
        _section("ran", "What ran where", "".join(map(_ran, runs))),
        _section("bytes", "Bytes", "".join(map(_bytes, runs))),
    ]
    title = escape(", ".join(r.name for r in runs))
    Path(out).write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_CSS}</style></head>\n"
        f"<body><h1>{title}</h1>\n{''.join(parts)}"
        f'<script type="application/json" '
        f'id="data">{text}</script>\n<script>'
        f"const ramp = {[list(c) for c in _RAMP]};{_JS}</script></body></html>\n"
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n{content}</section>\n'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(c))}</td>' for c in row)}</tr>\n" for row in rows
    )
    heads = "".join(f"<th>{escape(c)}</th>" for c in head)
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table>'
        "</div>\n"
    )


def _curves(runs: Sequence[Run]) -> str:
    groups: dict[str, list[tuple[str, list]]] = defaultdict(list)
    for run in runs:
        for name, points in run.scalars.items():
            groups[name].append((run.name, points))
    plots = "".join(_curve(name, series) for name, series in groups.items())
    return (
        plots
        or "<p>The run logged no scalars; call log.scalars(loss=loss.item()) in the loop.</p>\n"
    )


def _curve(name: str, series: Sequence[tuple[str, list]]) -> str:
    """One plot of (run, points) over shared axes; a value of None breaks the line.

    Only the lines scale with the page: labels are text next to the SVG.
    """
    finite = [(s, v) for _, points in series for s, v in points if v is not None]
    broken = [(run, s) for run, points in series for s, v in points if v is None]
    x0, x1 = min((s for s, _ in finite), default=0), max((s for s, _ in finite), default=1)
    y0, y1 = min((v for _, v in finite), default=0), max((v for _, v in finite), default=1)

    def at(step: float, value: float) -> str:
        x, y = (step - x0) / ((x1 - x0) or 1), (y1 - value) / ((y1 - y0) or 1)
        return f"{10 + 980 * x:.1f},{10 + 230 * y:.1f}"

    lines, legend = [], []
    for (run, points), color in zip(series, itertools.cycle(COLORS)):
        for exists, piece in itertools.groupby(points, lambda point: point[1] is not None):
            drawn = [at(*point) for point in piece] if exists else []
            drawn *= 2 if len(drawn) == 1 else 1  # a line of no length is a dot
            if drawn:
                lines.append(f'<polyline stroke="{color}" points="{" ".join(drawn)}"/>')
        legend.append(f'<span style="color:{color}">{escape(run)}</span>')
    warning = (
        f'<p class="bad">{escape(name)} is no finite number from step {broken[0][1]} on '
        f"({escape(broken[0][0])})</p>"
        if broken
        else ""
    )
    return (
        f'<h3>{escape(name)}</h3>{warning}<div class="plot"><div class="y"><span>{y1:.4g}</span>'
        f'<span>{y0:.4g}</span></div><svg viewBox="0 0 1000 250" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(name)} by step">{"".join(lines)}</svg><div class="x">'
        f'<span>step {x0}</span><span>{x1}</span></div></div><p class="legend">'
        f"{' '.join(legend)}</p>\n"
    )


def _worst_tables(runs: Sequence[Run]) -> str:
    head = ("layer", "operand", "points", *(f"{quantity} (median), step" for quantity in POINTS))
    tables = []
    for run in runs:
        rows = [
            (s.layer, s.operand, f"{s.points:.2f}", *(_worst_cell(s, q) for q in POINTS))
            for s in worst(run)[:WORST]
        ]
        tables.append(f"<h3>{escape(run.name)}</h3>{_table(head, rows)}" if rows else "")
    said = (
        "<p>A point: 3 dB, 10 % of underflow or 1 % of saturation from the median of that operand "
        "over all layers.</p>\n"
    )
    return said + "".join(tables) if any(tables) else "<p>No samples.</p>\n"


def _worst_cell(of: Suffering, quantity: str) -> str:
    if quantity not in of.worst:
        return "none"
    value, step, middle = of.worst[quantity]
    form = ".2f" if quantity == "sqnr_db" else ".2%"
    return f"{value:{form}} ({middle:{form}}), {step}"


def _ran(run: Run) -> str:
    text = f"<h3>{escape(run.name)}</h3>\n"
    if run.plan is not None:
        groups: dict[tuple, list[str]] = defaultdict(list)
        for row in run.plan.gemms:
            groups[(row.product, *row.operands, row.domain, row.reason)].append(row.module)
        rows = [(*key, len(of), of[0]) for key, of in groups.items()]
        text += _table(("product", "a", "b", "domain", "because", "layers", "first of them"), rows)
        text += "".join(f"<p>{escape(note)}</p>\n" for note in run.plan.notes)
    kinds = {  # `idle` lists layers, which ran 0 times
        kind: of if isinstance(of, dict) else dict.fromkeys(of, 0)
        for kind, of in (run.receipt or {}).items()
    }
    counts = [(kind, what, n) for kind, of in kinds.items() for what, n in of.items()]
    return text + (
        _table(("counted", "what", "how many"), counts)
        if counts
        else "<p>No receipt was logged.</p>\n"
    )


def _bytes(run: Run) -> str:
    if run.plan is None or not run.plan.weight_bytes:
        return f"<p>{escape(run.name)}: FSDP2 gathers nothing.</p>\n"
    forward, backward = map(sum, zip(*run.plan.weight_bytes.values()))
    rows = [
        ("quantized weights", f"{forward:,}", f"{backward:,}"),
        ("other parameters", *(f"{n:,}" for n in run.plan.other_bytes)),
    ]
    rows += [(name, f"{f:,}", f"{b:,}") for name, (f, b) in run.plan.weight_bytes.items()]
    head = ("gathered per step and rank", "forward, B", "backward, B")
    return f"<h3>{escape(run.name)}</h3>{_table(head, rows)}"


_HEAT = """<p><select id="run" aria-label="run"></select>
<select id="quantity" aria-label="quantity"></select>
<span id="key"><span id="least"></span> <span id="ramp"></span> <span id="most"></span></span>
<span id="range"></span></p>
<canvas id="map"></canvas><p id="value">Point at a cell.</p>
"""

_RAMP = ((255, 247, 225), (253, 174, 97), (165, 15, 21))  # of least to most

_CSS = """body{font:14px/1.4 system-ui,sans-serif;margin:24px auto;padding:0 16px;max-width:1080px;
color:#222;overflow-wrap:anywhere}h2{margin:32px 0 8px}h3{margin:16px 0 6px}
.plot{display:grid;grid-template-columns:72px 1fr;font-size:12px}.plot svg{width:100%;height:240px}
svg,canvas{border:1px solid #ddd;box-sizing:border-box}canvas{display:block;width:100%}
polyline{fill:none;stroke-width:1.5;stroke-linecap:round;vector-effect:non-scaling-stroke}
.y,.x{display:flex;justify-content:space-between}.y{flex-direction:column;padding-right:6px;
text-align:right}.x{grid-column:2}.legend{margin:2px 0 0 72px}
.legend span{margin-right:16px}.legend span:before{content:"\\2014  "}
#key{white-space:nowrap;margin:0 12px}
#ramp{display:inline-block;width:120px;height:10px;background:linear-gradient(90deg,RAMP)}
select{max-width:100%}#value{min-height:1.4em}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:8px 0;font-size:13px}
td,th{border:1px solid #ddd;padding:2px 8px;text-align:left;white-space:nowrap}
th{background:#f4f4f4}.bad{color:#d62728}""".replace(
    "RAMP", ",".join(f"rgb{color}" for color in _RAMP)
)

_JS = r"""
const byId = id => document.getElementById(id), runs = JSON.parse(byId("data").textContent);
const canvas = byId("map"), context = canvas.getContext("2d"), row = 18, top0 = 4;
const low = q => q.endsWith("sqnr_db"), logs = q => /(amax|norm|scale_min|scale_max)$/.test(q);
let left = 0;  // where cells begin
function options(select, names) {
  select.replaceChildren(...names.map((name, i) => new Option(name, i)));
}
function quantities() { return Object.keys(runs[byId("run").value].numbers); }
function current() {
  const run = runs[byId("run").value], quantity = quantities()[byId("quantity").value];
  return {run, quantity, layers: run.numbers[quantity] || []};
}
function color(t) {
  const at = Math.min(Math.max(t, 0), 1) * (ramp.length - 1), i = Math.min(~~at, ramp.length - 2);
  return `rgb(${ramp[i].map((c, k) => Math.round(c + (at - i) * (ramp[i + 1][k] - c)))})`;
}
function fitted(text, room) {
  if (context.measureText(text).width <= room) return text;
  while (text && context.measureText("..." + text).width > room) text = text.slice(1);
  return "..." + text;
}
function draw() {
  const {run, quantity, layers} = current(), wide = canvas.clientWidth;
  const high = Math.max(layers.length * row + 28, 30), pixels = window.devicePixelRatio || 1;
  canvas.style.height = high + "px";
  [canvas.width, canvas.height] = [wide * pixels, high * pixels];
  context.setTransform(pixels, 0, 0, pixels, 0, 0);
  context.font = "12px system-ui, sans-serif";
  for (const id of ["least", "most", "range"]) byId(id).textContent = "";
  byId("key").hidden = true;
  if (!quantity) { byId("range").textContent = "no samples"; return; }
  const seen = layers.flatMap(([, of]) => of).filter(v => v !== null && (!logs(quantity) || v > 0));
  const scale = v => logs(quantity) ? Math.log10(v) : v, found = seen.map(scale);
  // Colors span at least a decade, 10 dB or 1 %, so that noise looks like noise.
  const span = logs(quantity) ? 1 : low(quantity) ? 10 : 0.01;
  const smallest = Math.min(...found), largest = Math.max(...found);
  // More than the median of dB is as good: a tensor with outliers has much, and loses the rest.
  const most = low(quantity) ? [...found].sort((a, b) => a - b)[found.length >> 1]
    : Math.max(largest, smallest + span);
  const least = low(quantity) ? Math.min(smallest, most - span) : smallest;
  const widths = layers.map(([layer]) => context.measureText(layer).width);
  left = Math.min(Math.max(...widths) + 12, wide * 0.4);
  const width = (wide - left) / Math.max(run.steps.length, 1);
  layers.forEach(([layer, of], y) => {
    context.fillStyle = "#222";
    context.fillText(fitted(layer, left - 10), 4, top0 + y * row + 13);
    of.forEach((v, x) => {
      const t = v === null ? null : (scale(v) - least) / ((most - least) || 1);
      const known = v !== null && Number.isFinite(t);
      context.fillStyle = known ? color(low(quantity) ? 1 - t : t) : "#ddd";
      context.fillRect(left + x * width, top0 + y * row, Math.max(width - (width > 4), 1), row - 1);
    });
  });
  context.fillStyle = "#222";
  const bottom = top0 + layers.length * row + 15, last = String(run.steps.at(-1));
  context.fillText("step " + run.steps[0], left, bottom);
  context.fillText(last, wide - context.measureText(last).width - 4, bottom);
  if (!seen.length) { byId("range").textContent = "no values"; return; }
  const shown = v => String(Number(Number(logs(quantity) ? 10 ** v : v).toPrecision(4)));
  const ends = low(quantity) ? [shown(most) + " or more", shown(least)] : [least, most].map(shown);
  [byId("least").textContent, byId("most").textContent] = ends;
  byId("key").hidden = false;
  byId("range").textContent = `values: ${shown(smallest)} to ${shown(largest)}; gray: none`;
}
function point(event) {
  const {run, quantity, layers} = current(), box = canvas.getBoundingClientRect();
  const width = (canvas.clientWidth - left) / run.steps.length;
  const x = Math.floor((event.clientX - box.left - canvas.clientLeft - left) / width);
  const y = Math.floor((event.clientY - box.top - canvas.clientTop - top0) / row);
  if (x < 0 || !layers[y] || x >= run.steps.length) return;
  const [layer, of] = layers[y];
  byId("value").textContent = `${layer}, step ${run.steps[x]}: ${quantity} = ${of[x] ?? "none"}`;
}
function change() {
  const names = quantities(), first = names.indexOf(runs[byId("run").value].first);
  options(byId("quantity"), names);
  if (first > 0) byId("quantity").value = first;
  draw();
}
options(byId("run"), runs.map(run => run.name));
byId("run").addEventListener("change", change);
byId("quantity").addEventListener("change", draw);
canvas.addEventListener("mousemove", point);
window.addEventListener("resize", draw);
change();
"""

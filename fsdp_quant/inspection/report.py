# SPDX-License-Identifier: Apache-2.0
"""`python -m fsdp_quant report`: show files of `fq.inspect(path=)` as one page of HTML.

The page is `report.html` with the numbers, tables and curves in place of its comments. It loads
nothing.

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
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from .plan import ModelPlan

TEMPLATE = Path(__file__).with_name("report.html")
WORST = 30
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
# Quantity -> (function that selects the worst sample, distance from the median per point). Outliers
# dominate the energy of a tensor and so its SQNR; the loss of other values shows as underflow.
POINTS = {"sqnr_db": (min, -3.0), "underflow": (max, 0.1), "saturation": (max, 0.01)}


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
            kind = line.pop("kind")
            if kind == "plan":
                run.plan = ModelPlan.of_facts(line)
            elif kind == "receipt":
                run.receipt = line
            elif kind == "scalars":
                for name, value in line["values"].items():
                    run.scalars.setdefault(name, []).append((line["step"], value))
            elif kind == "numbers":
                samples.append(line["values"])
                run.steps.append(line["step"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: wanted a line that fq.inspect(path=) writes, got "
                f"{text[:80]!r}"
            ) from error
    for i, values in enumerate(samples):
        for key, value in values.items():
            layer, slot, quantity = key.rsplit("/", 2)
            layers = run.numbers.setdefault(f"{slot}/{quantity}", {})
            layers.setdefault(layer, [None] * len(samples))[i] = value
    return run


class Suffering(NamedTuple):
    """One operand of one layer.

    points:    of `quantity`, which has the most: 3 dB, 10 % of underflow or 1 % of saturation from
               the median are one point each.
    worst:     quantity -> (its worst sample, step, the median of the worst over all layers).
    """

    points: float
    layer: str
    operand: str
    quantity: str
    worst: dict[str, tuple[float, int, float]]


def worst(run: Run) -> list[Suffering]:
    """Sort operands of layers by points, the largest first."""
    samples: dict[tuple[str, str], dict[str, tuple[float, int, float]]] = defaultdict(dict)
    for key, layers in run.numbers.items():
        operand, quantity = key.split("/")
        if quantity not in POINTS:
            continue
        select, _ = POINTS[quantity]
        selected = {}
        for layer, values in layers.items():
            logged = [pair for pair in zip(values, run.steps) if pair[0] is not None]
            if logged:
                selected[layer] = select(logged, key=itemgetter(0))
        if selected:
            median = statistics.median(value for value, _ in selected.values())
        for layer, (value, step) in selected.items():
            samples[layer, operand][quantity] = value, step, median
    operands = []
    for (layer, operand), by_quantity in samples.items():
        points = {q: (v - median) / POINTS[q][1] for q, (v, _, median) in by_quantity.items()}
        quantity = max(points, key=lambda q: points[q])
        operands.append(Suffering(points[quantity], layer, operand, quantity, by_quantity))
    return sorted(operands, key=lambda s: -s.points)


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
            "first": next((f"{s.operand}/{s.quantity}" for s in worst(run)), ""),
            # layers as pairs: objects of JavaScript put keys such as "3" before the others
            "numbers": {name: list(layers.items()) for name, layers in run.numbers.items()},
        }
        for run in runs
    ]
    parts = {
        "title": escape(", ".join(run.name for run in runs)),
        "loss": _curves(runs),
        "worst": _worst_tables(runs),
        "ran": "".join(map(_ran, runs)),
        "bytes": "".join(map(_bytes, runs)),
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    Path(out).write_text(re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], TEMPLATE.read_text()))


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
    """Draw (run, points) of several runs over shared axes; a value of None breaks the line.

    Only the lines scale with the page: labels are text next to the SVG.
    """
    finite = [(s, v) for _, points in series for s, v in points if v is not None]
    broken = [(run, s) for run, points in series for s, v in points if v is None]
    x0, x1 = min((s for s, _ in finite), default=0), max((s for s, _ in finite), default=1)
    y0, y1 = min((v for _, v in finite), default=0), max((v for _, v in finite), default=1)

    def corner(step: float, value: float) -> str:
        x, y = (step - x0) / ((x1 - x0) or 1), (y1 - value) / ((y1 - y0) or 1)
        return f"{10 + 980 * x:.1f},{10 + 230 * y:.1f}"

    lines, legend = [], []
    for (run, points), color in zip(series, itertools.cycle(COLORS)):
        for is_finite, piece in itertools.groupby(points, lambda point: point[1] is not None):
            corners = [corner(*point) for point in piece] if is_finite else []
            corners *= 2 if len(corners) == 1 else 1  # a line of no length is a dot
            if corners:
                lines.append(f'<polyline stroke="{color}" points="{" ".join(corners)}"/>')
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
    tables = ""
    for run in runs:
        rows = [
            (s.layer, s.operand, f"{s.points:.2f}", *(_worst_cell(s, q) for q in POINTS))
            for s in worst(run)[:WORST]
        ]
        if rows:
            tables += f"<h3>{escape(run.name)}</h3>{_table(head, rows)}"
    legend = (
        "<p>A point: 3 dB, 10 % of underflow or 1 % of saturation from the median of that operand "
        "over all layers.</p>\n"
    )
    return legend + tables if tables else "<p>No samples.</p>\n"


def _worst_cell(operand: Suffering, quantity: str) -> str:
    if quantity not in operand.worst:
        return "none"
    value, step, median = operand.worst[quantity]
    form = ".2f" if quantity == "sqnr_db" else ".2%"
    return f"{value:{form}} ({median:{form}}), {step}"


def _ran(run: Run) -> str:
    text = f"<h3>{escape(run.name)}</h3>\n"
    if run.plan is not None:
        rows = [
            (row.product, *row.operands, row.domain, row.reason, len(modules), modules[0])
            for row, modules in run.plan.equal_gemms()
        ]
        text += _table(("product", "a", "b", "domain", "because", "layers", "first of them"), rows)
        text += "".join(f"<p>{escape(note)}</p>\n" for note in run.plan.notes)
    counts = []
    for kind, counted in (run.receipt or {}).items():
        # `idle` lists layers, which ran 0 times
        counted = counted if isinstance(counted, dict) else dict.fromkeys(counted, 0)
        counts += [(kind, *item) for item in counted.items()]
    if counts:
        return text + _table(("counted", "what", "how many"), counts)
    return f"{text}<p>No receipt was logged.</p>\n"


def _bytes(run: Run) -> str:
    if run.plan is None or not run.plan.weight_bytes:
        return f"<p>{escape(run.name)}: FSDP2 gathers nothing.</p>\n"
    pairs = {
        "quantized weights": run.plan.gathered_bytes,
        "other parameters": run.plan.other_bytes,
        **run.plan.weight_bytes,
    }
    rows = [(name, f"{forward:,}", f"{backward:,}") for name, (forward, backward) in pairs.items()]
    head = ("gathered per step and rank", "forward, B", "backward, B")
    return f"<h3>{escape(run.name)}</h3>{_table(head, rows)}"

# SPDX-License-Identifier: Apache-2.0
"""Write what follows from docs/measurements/*.json: the page of tables, and the picture of README.

    python docs/site/measurements.py            writes docs/reference/measurements.md and
                                                docs/comparison.svg
    python docs/site/measurements.py --check    exits 1 if the page differs from the JSON

A measurement is one table: title, command, device, software (optional), shape, date, columns, rows
of text, notes. The page holds all of them in the order of SECTIONS.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE, PICTURE = DOCS / "reference" / "measurements.md", DOCS / "comparison.svg"

SECTIONS = {
    "Training steps": ["llama_one_gpu", "llama_fully_shard", "llama3_8b", "other_models",
                       "lora", "qat", "fsdp2_8192", "fsdp2_2048", "mlp"],
    "Several GPUs": ["gathered_bytes", "tensor_parallel", "expert_parallel", "cast"],
    "Kernels": ["quantize", "gemm", "grouped_gemm", "grouped_linear", "adam", "gradient_codes",
                "saved_by_layer", "activation_memory"],
    "Learning": ["pretrain_350m", "pretrain", "learning", "example_training"],
}  # fmt: skip

HEAD = """\
# Measurements

<!-- Written by docs/site/measurements.py from docs/measurements/*.json: edit those, then \
run it. -->

Every number was measured with the command, on the device and at the shape beside it. \
The date is the day on which the
number was recorded. A ratio over bf16 is a speed: more is faster. \
GPUs differ by some percent, and so do two runs on one;
compare numbers within one table only. What each bench measures: [benches](benches.md).
"""


def load() -> dict[str, dict]:
    """Every measurement by the name of its file. Raises ValueError if SECTIONS names others."""
    found = {
        path.stem: json.loads(path.read_text())
        for path in sorted((DOCS / "measurements").glob("*.json"))
    }
    listed = [name for names in SECTIONS.values() for name in names]
    if sorted(listed) != sorted(found):
        raise ValueError(
            f"SECTIONS lists {sorted(listed)}, docs/measurements has {sorted(found)}; list each "
            "file once"
        )
    return found


def table(measurement: dict) -> str:
    """The markdown table of a measurement. Raises ValueError if a row has another width than the
    header."""
    columns, rows = measurement["columns"], measurement["rows"]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"{measurement['title']}: row {row} has {len(row)} cells, wanted {len(columns)}"
            )
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    """The text of docs/reference/measurements.md."""
    found, parts = load(), [HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name in names:
            m = found[name]
            facts = [f"Command: `{m['command']}`", f"Device: {m['device']}"]
            facts += [f"Software: {m['software']}"] if "software" in m else []
            facts += [f"Shape: {m['shape']}", f"Recorded: {m['date']}"]
            parts.append(f'<a id="{name}"></a>\n\n### {m["title"]}\n')
            parts.append("\n".join(f"- {fact}" for fact in facts) + "\n")
            parts.append(table(m) + "\n")
            if m["notes"]:
                parts.append("\n".join(f"- {note}" for note in m["notes"]) + "\n")
            parts += [f"![{text}](../{file})\n" for file, text in PLOTS.get(name, {}).items()]
    return "\n".join(parts)


PLOTS = {
    "pretrain": {
        "pretrain.png": "Validation loss and its gap to bf16",
        "pretrain_seeds.png": "The same of three other seeds",
    },
    "pretrain_350m": {"pretrain_350m.png": "Validation loss over bytes and over seconds of steps"},
}
# (arm, run) of llama3_8b. Runs were on different machines: each ratio is over bf16 of its run.
PICTURED = (
    ("bf16, one CUDA graph", "3"),
    ("torchao float8 tensorwise, compiled", "1"),
    ("`fp8_current`, compiled, gradients as `bf16`", "1"),
    ("`mxfp8`, one CUDA graph, gradients as `bf16`", "3"),
    ("`fp8_block`, one CUDA graph, gradients as `bf16`", "3"),
    ("`fp8_current`, one CUDA graph, gradients as `bf16`", "3"),
)


def bars() -> list[tuple[str, float, float | None]]:
    """(arm, step time over compiled bf16, peak memory over compiled bf16 or None)."""
    rows = {(arm, run): cells for arm, run, *cells in load()["llama3_8b"]["rows"]}
    found = []
    for arm, run in PICTURED:
        _, speed, peak, *_ = rows[arm, run]
        is_peak = re.fullmatch(r"[\d.]+", peak)
        found.append((arm.replace("`", ""), 1 / float(speed), float(peak) if is_peak else None))
    return found


def draw() -> None:
    """Write docs/comparison.svg: step time and peak memory of each arm over compiled bf16."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "comparison", "font.size": 10})
    import matplotlib.pyplot as plt

    arms = bars()[::-1]
    colors = [
        "#999999" if arm.startswith("bf16") else "#e0a458" if "torchao" in arm else "#3b6fb6"
        for arm, _, _ in arms
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.9), sharey=True, layout="constrained")
    for axis, title, values in (
        (axes[0], "step time", [time for _, time, _ in arms]),
        (axes[1], "peak memory", [peak for _, _, peak in arms]),
    ):
        shown = axis.barh(range(len(arms)), [v or 0 for v in values], color=colors)
        axis.bar_label(
            shown, ["not measured" if v is None else f"{v:.3f}" for v in values], padding=3
        )
        axis.set(title=title, xlim=(0, 1.2))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(arms)), [arm for arm, _, _ in arms])
    figure.suptitle(
        "Over compiled bf16, less is better. Llama 3 8B, fully_shard, 4 x H200, 4096 tokens each",
        fontsize=11,
    )
    figure.savefig(PICTURE, metadata={"Date": None, "Description": f"docs/measurements: {bars()}"})


def is_current() -> bool:
    """Do the page and the picture show the JSON as it is now?"""
    return (
        PAGE.read_text() == page()
        and f"docs/measurements: {bars()}" in PICTURE.read_text().replace("&apos;", "'")
    )


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if not is_current():
            print("docs/reference/measurements.md or docs/comparison.svg is not that of "
                  "docs/measurements/*.json; run python docs/site/measurements.py")  # fmt: skip
            return 1
        return 0
    PAGE.write_text(page())
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Write what follows from docs/measurements/*.json: the page of tables, and the picture of README.

    python docs/site/measurements.py            writes docs/reference/measurements.md and
                                                docs/comparison.svg
    python docs/site/measurements.py --check    exits 1 if the page differs from the JSON

A measurement is one table: title, command, device, software (optional), shape, date, runs, columns,
rows of text, notes. The page holds all of them in the order of SECTIONS. A table whose code has
changed since is measured again or goes, as do rows that only compare two versions of our code.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE, PICTURE = DOCS / "reference" / "measurements.md", DOCS / "comparison.svg"

SECTIONS = {
    "Whole models": ["llama3_8b"],
    "One GPU": ["llama_one_gpu", "options", "saved_by_layer"],
    "`fully_shard` and tensor parallelism": ["gathered_bytes", "tensor_parallel"],
    "Experts": ["qwen3_moe", "expert_parallel"],
    "Fine-tuning": ["lora", "qat"],
    "Convergence": ["pretrain_1b", "pretrain_350m", "pretrain", "pretrain_moe", "learning"],
    "Kernels": ["gemm"],
}

HEAD = """\
# Measurements

<!-- Written by docs/site/measurements.py from docs/measurements/*.json: edit those, then \
run it. -->

Every number was measured with the command, on the device, at the shape and on the day of its \
table. A ratio over bf16 is
a speed: more is faster. GPUs differ by some percent, and so do two runs on one; compare numbers \
of one run only.
What each bench measures: [benches](benches.md).
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
            facts += [f"Runs: {m['runs']}"] if "runs" in m else []
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
    "pretrain_1b": {"pretrain_1b.png": "Validation loss over bytes and over seconds of steps"},
    "pretrain_350m": {"pretrain_350m.png": "Validation loss over bytes and over seconds of steps"},
}
# How arms of llama3_8b run -> (run, arms); each is over the bf16 that runs so in that run.
PICTURED = {
    "compiled": ("1", [
        "torchao float8 tensorwise, compiled",
        "`mxfp8`, compiled",
        "`fp8_current`, compiled",
    ]),
    "one CUDA graph": ("1", [
        "`mxfp8`, one CUDA graph",
        "`fp8_current`, one CUDA graph",
    ]),
}  # fmt: skip


def bars() -> dict[str, list[tuple[str, float, float | None]]]:
    """How arms run -> (arm, step time over bf16's, peak memory over compiled bf16 or None). Raises
    KeyError if llama3_8b has no such row, or no bf16 that runs so in its run."""
    rows = {(arm, run): cells for arm, run, *cells in load()["llama3_8b"]["rows"]}
    found = {}
    for how, (run, arms) in PICTURED.items():
        base, found[how] = float(rows[f"bf16, {how}", run][0]), []
        for arm in arms:
            ms, _, peak, *_ = rows[arm, run]
            is_peak = re.fullmatch(r"[\d.]+", peak)
            label = arm.replace(f", {how}", "").replace("`", "")
            found[how].append((label, float(ms) / base, float(peak) if is_peak else None))
    return found


def draw() -> None:
    """Write docs/comparison.svg: step times, and peak memory where every arm has one."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "comparison", "font.size": 10})
    import matplotlib.pyplot as plt

    found = bars()
    panels = [(how, "step time", 1) for how in found]
    panels += [(how, "peak memory", 2) for how in found if all(peak for *_, peak in found[how])]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9.5, 5.2), sharex=True, layout="constrained"
    )
    for axis, (how, what, column) in zip(axes, panels):
        arms = found[how][::-1]
        colors = ["#e0a458" if "torchao" in label else "#3b6fb6" for label, *_ in arms]
        shown = axis.barh([label for label, *_ in arms], [a[column] for a in arms], color=colors)
        axis.bar_label(shown, fmt="%.3f", padding=3)
        axis.axvline(1, color="#999999", linewidth=1)
        axis.set_title(f"{how}: {what} over bf16's", fontsize=10, loc="left")
        axis.set_xlim(0, 1.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Less is better. Llama 3 8B, fully_shard, 4 x H200, 4096 tokens each; ours send "
        "gradients as bf16, the others in fp32",
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

# SPDX-License-Identifier: Apache-2.0
"""The bench of pretraining: its law, and that it runs, keeps what it measured and reads it
again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dist_tests.bench import pretrain
from dist_tests.laws import EVERYTHING


def run_of(arm: str, loss: float, **changes) -> dict:
    run = {
        "arm": arm,
        "size": "110m",
        "steps": 10,
        "tokens": 1000,
        "curve": [(10, loss)],
        "loss": loss,
        "ms": 1.0,
        "products": 252,
        "moved": 0,
        "why": [],
        "peak": None,
        "device": "cpu",
    }
    return run | changes


@pytest.fixture
def text(tmp_path: Path) -> str:
    """--data: a pattern of files that are long enough to train on and to validate with."""
    for i in range(60):
        (tmp_path / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 60)
    return f"{tmp_path}/*.py"


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "SEQUENCE", 128)
    monkeypatch.setattr(pretrain, "VALIDATION", 1)


def test_the_law_is_of_the_noise_or_a_share(capsys):
    """If false, a recipe that trains worse passes, or one that differs as seeds do fails."""
    bases = [run_of("bf16", 0.7), run_of("bf16:1", 0.703)]
    for arm, gap, kept in (
        ("mxfp8", 0.0029, True),
        ("mxfp8", 0.0031, False),
        ("nvfp4", 0.011, True),
        ("nvfp4", 0.0115, False),
        ("tail", 0.0069, True),
        ("tail", 0.0071, False),
    ):
        assert pretrain.table([*bases, run_of(arm, 0.7 + gap)]) is kept, (arm, gap)
    assert not pretrain.table([bases[0], run_of("mxfp8", 0.702)]), (
        "one seed has no noise: .25 % of the loss"
    )
    assert pretrain.table([run_of("bf16", 0.7, device="another"), run_of("mxfp8", 9.0)]), (
        "nothing to compare with"
    )
    assert "beyond its law" in capsys.readouterr().out


def test_a_run_is_kept_and_read_again(tmp_path, text, capsys):
    """If false, an hour of measurements ends with its process."""
    kept, drawn = tmp_path / "out.json", tmp_path / "out.png"
    given = [
        "--size",
        "tiny",
        "--steps",
        "2",
        "--arms",
        "bf16,fp8_current,none",
        "--data",
        text,
        "--json",
        str(kept),
    ]
    assert pretrain.main(given) == 1, "there is no arm `none`"
    runs = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [run["arm"] for run in runs] == ["bf16", "fp8_current"]
    assert runs[0]["tokens"] == 2 * pretrain.RANKS * pretrain.SEQUENCE
    assert runs[0]["products"] == 0 and runs[1]["products"] == 3 * 7 * 2, "lm_head stays as it is"
    first = capsys.readouterr().out
    assert "none failed: KeyError" in first
    assert pretrain.main(["--table", str(kept), "--plot", str(drawn)]) == 0
    assert capsys.readouterr().out.strip() in first and drawn.stat().st_size > 1000


def test_a_run_goes_on_in_the_next_call_with_the_same_bits(tmp_path, text, monkeypatch, capsys):
    """If false, runs that are longer than a call measure another training."""
    monkeypatch.setattr(pretrain, "INTERVAL", 2)
    given = ["--size", "tiny", "--steps", "4", "--arms", "fp8_delayed"]
    given += ["--data", text]
    curves = []
    for name, options in (("whole", []), ("parts", ["--checkpoint", str(tmp_path / "kept")])):
        kept = tmp_path / f"{name}.json"
        calls = [["--seconds", "0"], []] if options else [[]]
        for limit in calls:
            with torch.compiler.set_stance("default" if EVERYTHING else "force_eager"):
                assert pretrain.main([*given, *options, *limit, "--json", str(kept)]) == 0
        curves.append([row[:2] for row in json.loads(kept.read_text())["curve"]])
    assert curves[0] == curves[1] and [step for step, _ in curves[0]] == [2, 4]
    assert "fp8_delayed goes on in the next call" in capsys.readouterr().out
    assert pretrain.main([*given, *options, "--json", str(kept)]) == 0
    assert len(kept.read_text().splitlines()) == 1, "an arm that ended runs again"


def test_experts_are_trained_and_their_loads_told(tmp_path, text, monkeypatch, capsys):
    """If false, a mixture of experts is compared whose router sends all tokens to one."""
    monkeypatch.setitem(pretrain.EXPERTS, "tiny", (4, 1, 32))
    given = ["--size", "tiny", "--model", "moe", "--steps", "1", "--arms", "mxfp8"]
    kept = tmp_path / "out.json"
    assert pretrain.main([*given, "--data", text, "--json", str(kept)]) == 0
    (run,) = map(json.loads, kept.read_text().splitlines())
    ((_, loss, _, load),) = run["curve"]
    assert run["size"] == "tiny moe" and run["products"] == 3 * 2 * (4 + 4 * 2)
    assert 0 < loss < 10 and 1 <= load <= 4
    assert f"busiest expert: {load:.2f}" in capsys.readouterr().out


def test_speeds_are_matched_by_what_bf16_loses_in_fewer_steps():
    """If false, a recipe that is fast and trains worse is called a gain."""
    bases = [
        run_of("bf16", 0.70, ms=10.0),
        run_of("bf16@0.9", 0.72, steps=9, tokens=900, ms=10.0),
    ]
    same, worse = run_of("a", 0.70, ms=8.0), run_of("b", 0.71, ms=8.0)
    ratio, matched = pretrain.speed(same, [*bases, same])
    assert (ratio, round(matched, 9)) == (1.25, 1.25)
    ratio, matched = pretrain.speed(worse, [*bases, worse])
    assert (ratio, round(matched, 9)) == (1.25, 1.1875), "bf16 is there after 95 % of its steps"
    assert pretrain.speed(same, [bases[0], same]) == (1.25, None)

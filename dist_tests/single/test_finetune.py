# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning example runs, and prints and draws what docs/finetuning.md says."""

from __future__ import annotations

import sys

import pytest

from examples import finetune

pytest.importorskip("peft")


@pytest.mark.parametrize(
    "tune, sizes", [("lora", {"mxfp8": 1.03125, "nvfp4": None}), ("full", {"mxfp8": 4.0})]
)
def test_the_example_tunes_in_each_way(tune: str, sizes: dict, tmp_path, monkeypatch, capsys):
    """If false, the tutorial's commands fail, or a base that should be codes trains in high
    precision; or --data is not what it is tuned on, or a name is refused after the training."""
    plot, text = tmp_path / "curve.png", tmp_path / "text.txt"
    monkeypatch.setattr(
        finetune, "SIZES", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    )
    monkeypatch.setattr(
        "sys.argv",
        [
            "finetune.py",
            "--tune",
            tune,
            "--recipe",
            *sizes,
            "--base-steps",
            "5",
            "--steps",
            "5",
            "--plot",
            str(plot),
            *(("--data", str(text)) if tune == "full" else ()),
        ],
    )
    if tune == "full":
        text.write_bytes(b"too short")
        with pytest.raises(SystemExit, match="error: the text has 9 tokens; give at least 2,560"):
            finetune.main()
        text.write_bytes(bytes(range(32, 122)) * 40)
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", [*sys.argv, "--recipe", "fp8"])
            with pytest.raises(SystemExit, match="error: unknown recipe 'fp8'; pass 'fp8_current'"):
                finetune.main()
    finetune.main()
    table = {
        line.split()[0]: line.split()[1:]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith((*sizes, "bf16"))
    }
    assert list(table) == ["bf16", *sizes] and plot.read_bytes().startswith(b"\x89PNG")
    for recipe, size in {"bf16": 4.0 if tune == "full" else 2.0, **sizes}.items():
        loss, held = map(float, table[recipe])
        assert 2 < loss < 6 and (size is None or held == pytest.approx(size, abs=1e-3)), recipe
    if tune == "lora":
        assert float(table["nvfp4"][1]) < 1.2

"""`python -m fsdp_quant selftest` finds what a kernel makes otherwise than the definition, and writes a report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_tests.single import hopper
from fsdp_quant import __main__ as command
from fsdp_quant.inspection import selftest


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {n: q for n, q in selftest.quantizers().items() if q.fmt.name in ("fp8_row", "mxfp8", "mxfp4", "nvfp4")}
    monkeypatch.setattr(selftest, "SHAPES", ((33, 47), (128, 256)))
    monkeypatch.setattr(selftest, "PRODUCT", (40, 48, 256))
    monkeypatch.setattr(selftest, "quantizers", lambda: some)


def test_a_gpu_that_keeps_to_the_definition_passes(small, tmp_path: Path, capsys):
    """If false, a right kernel is reported as wrong, or nothing is compared."""
    path = tmp_path / "report.json"
    with hopper.emulated():
        assert command.main(["selftest", "--report", str(path)]) == 0, capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["arch"] == "sm_90a" and not report["failures"]
    assert report["compared"]["codes"] == report["compared"]["decode"] >= 100 and report["compared"]["products"] >= 25
    assert "0 differ" in capsys.readouterr().out


def test_a_wrong_byte_and_a_wrong_product_are_found(small, monkeypatch, tmp_path: Path, capsys):
    """If false, a new GPU trains on codes that no other has."""
    with hopper.emulated() as operators:
        quantize, gemm = operators.quantize, operators.gemm

        def flipped(x, *args):
            made = quantize(x, *args)
            if x.shape == (33, 47):
                made[0].view(-1)[-1] ^= 1
            return made

        monkeypatch.setattr(operators, "quantize", flipped)
        monkeypatch.setattr(operators, "gemm", lambda *args: gemm(*args) * 1.01)
        assert command.main(["selftest", "--report", str(tmp_path / "report.json")]) == 1
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert any("[33, 47]" in f and "1 of " in f and "bytes of data" in f for f in failures)
    assert not any("[128, 256]" in f for f in failures if f.startswith("codes"))
    assert any(f.startswith("products") and "error 1.0e-02" in f for f in failures)
    assert failures[0] in capsys.readouterr().out


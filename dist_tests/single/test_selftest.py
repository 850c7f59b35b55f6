# SPDX-License-Identifier: Apache-2.0
"""`python -m fsdp_quant selftest` finds what a kernel makes otherwise than the definition, and
writes a report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dist_tests.single import hopper
from fsdp_quant import __main__ as command
from fsdp_quant.inspection import selftest


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {
        n: q
        for n, q in selftest.quantizers().items()
        if q.fmt.name in ("fp8_row", "mxfp8", "mxfp4", "nvfp4")
    }
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
    assert report["compared"]["ties"] == 2 * len(list(selftest.ties()))
    assert (
        report["compared"]["codes"] == report["compared"]["decode"] >= 100
        and report["compared"]["products"] >= 25
    )
    assert "0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["e2m1_up", "e8m0_down"])
def test_a_cast_that_breaks_ties_otherwise_is_found(small, monkeypatch, name: str):
    """If false, the casts of a new GPU are trusted, and its codes are those of no other."""
    report = selftest.Report("", "", "", "")
    with hopper.emulated() as operators:
        quantize = operators.quantize

        def other(x, *args):
            made = quantize(x, *args)
            if name == "e8m0_down" and made[1].dtype is torch.uint8 and not x[:, 1:].any():
                exact = torch.frexp(x.float().abs().amax(-1))[0] == 0.875  # 448 is 0.875 * 2^9
                if len(exact) == len(made[1]):
                    made[1][~exact] -= 1  # down, where the definition rounds up
            elif name == "e2m1_up" and made[0].shape[-1] * 2 == x.shape[-1]:
                tie = (x[:, 1::2].float() == 2.5) & (made[0] >> 4 == 4)  # 2.5 to even is 2
                made[0][tie] += 16
            return made

        monkeypatch.setattr(operators, "quantize", other)
        selftest.compare_ties(report, torch.device("cpu"))
    wanted = "e2m1" if name == "e2m1_up" else "e8m0"
    assert report.failures and all(wanted in f and f.startswith("ties") for f in report.failures), (
        report.failures
    )


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

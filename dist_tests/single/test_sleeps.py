# SPDX-License-Identifier: Apache-2.0
"""The look for races, on emulated operators: what it runs, and that it sees a wrong bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_tests.kernels import expected, sleeps
from dist_tests.single import hopper
from fsdp_quant.ops import build, extension

GEMM = Path(build.__file__).parents[2] / "csrc" / "gemm"


@pytest.fixture(autouse=True)
def _small_on_the_cpu(monkeypatch):
    monkeypatch.setattr(expected, "DEVICE", torch.device("cpu"))
    for name, value in {"M": 40, "N": 16, "K": 528, "K_OF_ROWS": 144, "M_OF_K": 8}.items():
        monkeypatch.setattr(sleeps, name, value)
    monkeypatch.setattr(sleeps, "ROW_ENDS", (0, 3, 3, 40, 60))
    monkeypatch.setattr(sleeps, "K_ENDS", (0, 128, 128, 256, 304))


class Flipped(hopper.Operators):
    """Operators that flip the last bit of one element in one call."""

    def __init__(self, name: str, call: int):
        super().__init__()
        self._name, self._call, self.calls_of_name = name, call, 0

    def flip(self, name: str, result: Tensor) -> None:
        if name == self._name:
            self.calls_of_name += 1
            if self.calls_of_name == self._call:
                result.view(-1)[7:8].view(sleeps.BITS[result.dtype]).bitwise_xor_(1)

    def gemm(self, *args, **kwargs):
        made = super().gemm(*args, **kwargs)
        self.flip("gemm", made)
        return made

    def gemm_out(self, out, *args, **kwargs):
        super().gemm_out(out, *args, **kwargs)
        self.flip("gemm_out", out)

    def grouped_gemm(self, out, *args, **kwargs):
        super().grouped_gemm(out, *args, **kwargs)
        self.flip("grouped_gemm", out)

    def grouped_gemm_wgrad(self, out, *args, **kwargs):
        super().grouped_gemm_wgrad(out, *args, **kwargs)
        self.flip("grouped_gemm_wgrad", out)


def test_every_gemm_operator_and_source_is_run():
    """If false, a kernel's barriers were never looked at."""
    every = list(sleeps.entries())
    declared = {name for name in hopper.operator_schemas() if "gemm" in name}
    declared -= {"gemm_takes", "watched_gemm"}  # which multiplies nothing; launches gemm's kernel
    assert {e.operator for e in every} == declared
    sources = {path.stem for path in GEMM.glob("sm90_*gemm*.cu")}
    assert {e.instance[0] for e in every} == sources
    # Elements of codes: 3 dense, 2 grouped; two tiles; two dims of groups, but for tiles of a.
    assert len({e.instance for e in every}) == 3 * 2 + (3 * 2 + 1) * 2 * 2 + 2


def test_equal_runs_are_taken_for_equal(capsys):
    """If false, the look for races fails whatever runs."""
    assert sleeps.report(list(sleeps.entries()), hopper.Operators(), 2) == []
    assert " 6 runs, 0 mismatches" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gemm", "gemm_out", "grouped_gemm", "grouped_gemm_wgrad"])
def test_a_wrong_bit_is_seen(name: str, capsys):
    """If false, a race passes."""
    every = [e for e in sleeps.entries() if e.operator == name][:1]
    (wrong,) = sleeps.report(every, Flipped(name, 3), 4)
    assert "1 of 4 runs have other bits" in wrong
    assert "4 runs, 1 mismatches" in capsys.readouterr().out


def test_wrong_values_of_every_run_are_seen(monkeypatch):
    """If false, a race that every run loses passes."""

    class Doubled(hopper.Operators):
        def gemm(self, *args, **kwargs):
            return 2 * super().gemm(*args, **kwargs)

    every = [e for e in sleeps.entries() if e.operator == "gemm"][:1]
    (wrong,) = sleeps.report(every, Doubled(), 2)
    assert "not the reference's" in wrong


def test_a_build_without_sleeps_fails(tmp_path, monkeypatch, capsys):
    """If false, races are looked for where they cannot show."""
    monkeypatch.setattr(expected, "WHY_NOT", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for options in ((), ("LINE_TABLES",)):
        record = build.Record("13.0.88", ("sm_90a",), options=options)
        monkeypatch.setattr(extension, "STATUS", extension.Status("_glue.so", None, record))
        assert sleeps.main([]) == 1 and "does not sleep" in capsys.readouterr().out
    record = build.Record("13.0.88", ("sm_90a",), options=("RANDOM_SLEEPS",))
    monkeypatch.setattr(extension, "STATUS", extension.Status("_glue.so", None, record))
    assert sleeps.why_not() is None
    record.write(tmp_path)
    assert build.Record.of(tmp_path) == record

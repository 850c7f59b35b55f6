# SPDX-License-Identifier: Apache-2.0
"""What the sanitizers run, on an emulated GPU: every operator of csrc; and how their reports are
read."""

from __future__ import annotations

import pytest
import torch

from dist_tests import pieces
from dist_tests.kernels import entries, expected, sanitize, sanitizers
from dist_tests.single import hopper
from fsdp_quant.ops import native

# Operators that launch no kernel.
ON_THE_HOST = {
    *("encoding_shapes", "gemm_takes", "linear_counts", "linear_plan", "pack_encoding"),
    *("bad_splits_flag", "set_probed"),
}


class Recorded:
    """Operators, and the names of those that are called."""

    def __init__(self, operators: object):
        self._operators, self.names = operators, set()

    def __getattr__(self, name: str) -> object:
        self.names.add(name)
        return getattr(self._operators, name)


def recorded_operators(monkeypatch) -> Recorded:
    """Operators as all of `native` calls them from now on."""
    recorded = Recorded(native.encoding._ops)
    hopper.give_operators(monkeypatch, recorded)
    return recorded


def test_the_sanitizers_run_every_operator(monkeypatch):
    """If false, an operator's kernels were never run under a sanitizer, or its entry does not run
    at all."""
    monkeypatch.setattr(expected, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(entries, "DONE", [])
    monkeypatch.setattr(sanitize, "SHAPES", ((24, 40), (33, 47)))
    monkeypatch.setattr(sanitize, "MANY", (8, 272))
    with hopper.emulated(), pieces.kernels():
        recorded = recorded_operators(monkeypatch)
        for name in ("cast_pieces", "cast_scales"):  # which `pieces.kernels` stands in for

            def call(*args, name=name, run=getattr(native, name)):
                recorded.names.add(name)
                return run(*args)

            monkeypatch.setattr(native, name, call)
        sanitize.every_instance()
        sanitize.sanitize_products.every_product()
    # Outside of the emulation, as on a GPU. The emulated norms sum columns in bf16.
    assert [d for d in entries.differences() if not d.startswith("norm")] == []
    products = [what for what, *_ in entries.DONE if "gemm" in what]
    names = {schema.split(".")[0] for schema in hopper.operator_schemas()} - ON_THE_HOST
    of_modules = {
        "linear_step",
        "linear_weight",
        "activate",
        "grouped_step",
        "grouped_dgrad",
        "grouped_wgrad",
    }  # of steps
    assert names - recorded.names == of_modules
    assert len(products) > 60


def test_every_module_runs_under_the_sanitizers(monkeypatch):
    """If false, the part `steps` ends before it has run what it names, or a layer's step has other
    bits in another run."""
    monkeypatch.setattr(expected, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(entries, "DONE", [])
    monkeypatch.setattr(sanitize, "RECIPES", ("fp8_delayed", "nvfp4"))
    with hopper.emulated():
        recorded = recorded_operators(monkeypatch)
        sanitize.every_step()
        assert not entries.differences()
    assert {
        "linear_step",
        "linear_weight",
        "activate",
        "grouped_step",
        "grouped_dgrad",
        "grouped_wgrad",
    } <= recorded.names


@pytest.mark.parametrize(
    "text, want",
    [
        ("1400 calls ran\n========= ERROR SUMMARY: 0 errors\nevery byte is the reference's", 0),
        ("========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 3 errors", 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 2),
        ("Killed", None),
    ],
)
def test_reports_are_counted(text: str, want: int | None):
    """If false, errors that a tool found are taken for none, or a tool that did not run for one
    that found nothing."""
    assert sanitizers.errors_of(text) == want

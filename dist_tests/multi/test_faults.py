# SPDX-License-Identifier: Apache-2.0
"""Ranks that fail, a sample of `python -m dist_tests.faults`: what the others say, how soon, and
that a process goes on."""

from __future__ import annotations

import pytest

from dist_tests import faults
from dist_tests.faults import Case
from dist_tests.laws import EVERYTHING
from dist_tests.multi.harness import on_cpu

SAMPLE = [
    Case("hsdp", "pre_all_gather", "exit"),
    Case("tp", "gather", "raise"),
    Case("ep", "gather", "kill"),
    Case("sync", "cast", "memory"),
    Case("tp", "", "other build"),
    Case("ep", "", "other shape"),
    Case("ep", "", "other recipe"),
    Case("sync", "", "other recipe"),
]


@on_cpu
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: " ".join(filter(None, case)))
def test_no_rank_waits_for_one_that_failed(case: Case):
    """If false, ranks wait for the transport's timeout where one of them is gone, or train on, or
    say other things of one fault."""
    said = faults.run(case)
    assert (why := faults.problem(case, said)) is None, f"{why}: {said}"


@on_cpu
@pytest.mark.parametrize("setup", list(faults.PLACES) if EVERYTHING else ["fsdp2", "sync"])
def test_steps_behind_an_exception_are_those_of_a_run_without(setup: str):
    """If false, a process that catches an exception, as that an allocator raises, trains on with
    other numbers."""
    assert faults.recovery(setup) == [[]] * faults.WORLDS[setup]

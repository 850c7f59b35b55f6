# SPDX-License-Identifier: Apache-2.0
"""A short soak on two ranks, and the laws that it holds runs to."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from dist_tests.bench import soak
from dist_tests.multi.harness import DEVICE, run_ranks

MIB = 2**20


def _soaked(rank: int, world: int, breaks: bool) -> dict:
    soak.CHANCES = {
        "forward": 0.2,
        "backward": 0.1,
        "optimizer": 0.2,
        "evaluation": 0.2,
        "evaluate": 0.2,
        "checkpoint": 0.1,
    }
    if breaks:
        soak.RECIPES = {name: soak.RECIPES[name] for name in ("fp8_delayed",)}
        soak.Training.recover = soak.Training.reshard  # leaves gradients of the step that failed
    args = Namespace(steps=8 if breaks else 2 * len(soak.RECIPES), minutes=None, turn=2, seed=3)
    return soak.soak(args, torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu"))


def test_disturbed_training_has_the_bits_of_undisturbed():
    """If false, an exception, an evaluation or a checkpoint changes the steps behind it, under one
    of the recipes."""
    for facts in run_ranks(2, _soaked, False):
        assert not facts["broken"], facts["broken"]
        assert facts["disturbed"].keys() == set(soak.CHANCES), "every kind was drawn"
        assert facts["steps"] == len(facts["losses"]) == 24 and len(set(facts["losses"])) == 24


def test_what_an_exception_leaves_behind_is_seen():
    """If false, the soak passes whatever happens."""
    broken = run_ranks(2, _soaked, True)[0]["broken"]
    assert any("loss" in text and text.startswith("rank 0: step") for text in broken), broken


@pytest.mark.parametrize(
    "ends, grown",
    [
        ([200, 100, 100, 100], 0),
        ([200, 100, 101, 104], 3),
        ([100, 104, 103, 102], -2),
        ([1, 2], None),
    ],
)
def test_growth_is_of_the_last_cycle_over_those_before(ends: list[int], grown: int | None):
    """If false, a leak is taken for the warm-up, or the warm-up for a leak."""
    turn, run = 5, soak.Run(losses=[1.0])
    for cycle, size in enumerate(ends, 1):
        end = cycle * turn * len(soak.RECIPES)
        run.memory += [(end - turn, {"resident": 9999 * MIB}), (end, {"resident": size * MIB})]
    found = soak.growth(run, turn)
    assert found == ({} if grown is None else {"resident": grown * MIB})
    run.memory[0][1]["resident"] = 100 * MIB  # of which 3 % are allowed
    assert soak.broken(soak.Run(losses=[1.0]), run, turn) == []
    run.memory[-1][1]["resident"] += 10 * MIB
    assert len(soak.broken(soak.Run(losses=[1.0]), run, turn)) == (grown is not None)

# SPDX-License-Identifier: Apache-2.0
"""The runner of `dist_tests.contract`: its cheapest contract, and what it calls broken."""

from __future__ import annotations

import argparse
import copy

import torch

from dist_tests.contract import __main__ as contract
from dist_tests.contract import on_ranks, parallelisms
from dist_tests.multi.harness import on_cpu, run_ranks

pytestmark = on_cpu
STEPS = 2


def _ddp(rank: int, world: int) -> dict[str, on_ranks.Curve]:
    run = on_ranks.Run(torch.device("cpu"), rank, world, "", STEPS, "mxfp8", "small")
    return parallelisms.ddp(run)


def test_a_contract_compares_ranks_with_one_rank(monkeypatch):
    """If false, the table of trainers says that something holds which was not run, not compared
    with one rank, or differs from it."""
    curves = {n: {k: vars(v) for k, v in run_ranks(n, _ddp)[0].items()} for n in (1, 2)}
    curves["changed"] = copy.deepcopy(curves[1])

    def start(name, ranks, args, changed=False):
        return {"arms": curves["changed" if changed else ranks]}

    monkeypatch.setattr(contract, "start", start)
    args = argparse.Namespace()
    row = contract.check("ddp", 2, args)
    assert row["holds"] and set(row["apart"]) == {"bf16", "mxfp8"}, row
    assert 0 < row["apart"]["mxfp8"] < 1e-3 and row["arms"]["mxfp8"]["ms"] > 0
    assert curves[1]["bf16"]["losses"] != curves[1]["mxfp8"]["losses"]

    good = copy.deepcopy(curves)
    for spoil in (lambda losses: losses[:-1], lambda losses: [*losses[:-1], float("nan")]):
        curves[2]["mxfp8"]["losses"] = spoil(good[2]["mxfp8"]["losses"])
        row = contract.check("ddp", 2, args)
        assert row["holds"] is False and "BROKEN" in row["result"], row
    for spoil in ([1.001, 1], [1, 1.03], [1, 2]):
        losses = good[2]["mxfp8"]["losses"]
        curves[2]["mxfp8"]["losses"] = [a * b for a, b in zip(losses, spoil)]
        assert contract.check("ddp", 2, args)["holds"] is False, spoil
    # as far as one rank is from itself, where feedback takes it
    curves[2]["mxfp8"]["losses"] = [a * b for a, b in zip(losses, [1, 0.97])]
    for apart, holds in ((0.02, True), (0.01, False), (float("nan"), False)):
        one = curves[1]["mxfp8"]["losses"]
        curves["changed"]["mxfp8"]["losses"] = [a * b for a, b in zip(one, [1, 1 + apart])]
        assert contract.check("ddp", 2, args)["holds"] is holds, apart
    for resumed, holds in ((losses[1:], True), (losses[:1], False), ([], False)):
        arms = {"mxfp8": good[2]["mxfp8"] | {"resumed": resumed}}
        assert contract.verdict(arms, None)["holds"] is holds, resumed
    assert contract.check("context", 2, args)["result"].startswith("needs a GPU: flash attention")

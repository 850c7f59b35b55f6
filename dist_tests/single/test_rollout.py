# SPDX-License-Identifier: Apache-2.0
"""The reinforcement-learning example: what acts and what learns multiply the same codes."""

from __future__ import annotations

import pytest
import torch

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, assert_same_storage, values
from dist_tests.multi import nets
from examples import rollout
from fsdp_quant import recipes
from fsdp_quant.formats import ROWWISE

# Not delayed scaling: a history scales what training has seen, not a rollout.
NAMED = [n for n in recipes.names() if n not in ("bf16", "fp8_delayed")]


@pytest.mark.parametrize("mode", [None, "dequantized"])
@pytest.mark.parametrize("name", NAMED)
def test_the_training_forward_multiplies_the_exported_codes(name: str, mode: str | None):
    """If false, the policy that acted is not the one whose probabilities are differentiated:
    updates are off policy."""
    torch.manual_seed(0)
    model = fq.convert(rollout.Policy(), recipes.by_name(name, backward_override=mode))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), values(24, 32, dtype=torch.float32)
    for step in range(2):
        codes = rollout.export(model)
        acted = rollout.Rollout(model, codes)(x)
        with nets.recorded_weights() as seen:
            y = model(x)
        forward = [storage for direction, storage, _ in seen if direction is ROWWISE]
        assert len(forward) == len(codes) == 3
        for got, (layer, want) in zip(forward, codes.items()):
            assert_same_storage(got, want, f"{name} step {step} {layer}")
        assert_same_bytes(acted, y.detach(), f"{name} step {step} logits")
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_policy_learns_on_policy():
    """If false, the example does not learn, or its first update of a round is not exactly on
    policy."""
    told = rollout.train(recipes.mxfp8(backward_override="dequantized"), rounds=30)
    assert [t["off"] for t in told] == [0.0] * 30
    assert sum(t["reward"] for t in told[-5:]) / 5 > 0.2, told  # a blind choice of 16 actions: 0.06

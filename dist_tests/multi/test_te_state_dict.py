# SPDX-License-Identifier: Apache-2.0
"""`fq.load_te_state_dict` under `fully_shard`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.single.test_te_state_dict import D, Net, te_state, tensor


def _refuses(net: Net, state: dict, rank: int) -> None:
    """A state that is bad on one rank raises on every rank, and writes nothing."""
    before = nets.full_state(net)
    bad = dict(state) | ({"moe.weight1": torch.ones(2)} if rank else {})
    with pytest.raises(ValueError, match=r"moe.weight1 is \[2\], wanted \[32, 32\]"):
        fq.load_te_state_dict(net, bad)
    for key, value in nets.full_state(net).items():
        assert_same_bytes(value, before[key], f"{key} after a refused load")


def _sharded(rank: int, world: int) -> None:
    single, state, x = Net(recipe="mxfp8"), te_state(), tensor(16, D, seed=99)
    fq.load_te_state_dict(single, state)
    y = single(x)
    for codes in (False, True):
        with fq.quantized_model_init("mxfp8") if codes else contextlib.nullcontext():
            net = Net(recipe="mxfp8")
        for module in (net.mlp, net):
            fully_shard(module)
        if not codes:
            _refuses(net, state, rank)
        fq.load_te_state_dict(net, state)
        for key, value in nets.full_state(net).items():
            assert_same_bytes(value, single.state_dict()[key], f"codes={codes}: {key}")
        assert_same_bytes(net(x), y, f"codes={codes}: output")


def test_a_te_checkpoint_loads_into_shards():
    """If false, a rank loads another rank's rows, one rank raises and the others go on, or a
    refused load has written."""
    run_ranks(2, _sharded)

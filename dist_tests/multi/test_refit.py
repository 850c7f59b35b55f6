# SPDX-License-Identifier: Apache-2.0
"""`fq.refit` of sharded models: every rank is given the file of one process, and no rank holds the
model."""

from __future__ import annotations

import hashlib

import torch
from safetensors.torch import load_file
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import as_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.multi.test_export_sharded import (
    RECIPES,
    built,
    cases,
    one_weight_at_a_time,
    sharded,
)


def _digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    kinds = {n: f"{t.dtype} {list(t.shape)} " for n, t in tensors.items()}
    return {
        n: kinds[n] + hashlib.sha256(as_bytes(t).numpy().tobytes()).hexdigest()
        for n, t in tensors.items()
    }


def _cases() -> dict:
    return {
        name: case
        for name, case in cases().items()
        if name in ("fp8_block", "nvfp4", "trained", "parameters")
    }


def _stream(rank: int, world: int) -> dict[str, dict[str, str]]:
    found = {}
    for name, (make, train) in _cases().items():
        model, digests = train(sharded(make())), {}
        with one_weight_at_a_time() as gathered:
            for bucket in fq.refit(model, bucket_size="30KB", share_scales=True):
                assert len(bucket) <= 4 or sum(t.nbytes for _, t in bucket) <= 30_000, name
                digests |= _digest(dict(bucket))
        assert len(gathered) > 4, name
        found[name] = digests
    return found


@on_cpu
def test_every_rank_is_given_the_file_of_one_process(tmp_path):
    """If false, engines of different ranks act with different weights, or a rank holds more of the
    model than a weight."""
    first, second = run_ranks(2, _stream)
    assert first == second
    for name, (make, train) in _cases().items():
        fq.export(train(make()), tmp_path / name, share_scales=True)
        assert first[name] == _digest(load_file(tmp_path / name / "model.safetensors")), name


def _refused(rank: int, world: int) -> list[str]:
    own = fq.convert(nn.ModuleList(nn.Linear(32, 32) for _ in range(1 + rank)), RECIPES["mxfp8"])
    messages = []
    for model, options in (
        (sharded(built("mxfp8")), {"bucket_size": "-1"}),
        (sharded(built("mxfp4/fp8_block")), {"format": "modelopt"}),
        (sharded(built("nvfp4")), {}),
        (own, {}),
    ):
        try:
            fq.refit(model, **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


@on_cpu
def test_what_cannot_be_streamed_is_refused_on_every_rank():
    """If false, a rank waits in a gather for one that has raised."""
    first, second = run_ranks(2, _refused)
    assert first == second and len(first) == 4
    for message, want in zip(
        first, ("bucket_size", "does not hold", "share_scales=True", "would write other tensors")
    ):
        assert want in message

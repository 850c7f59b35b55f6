# SPDX-License-Identifier: Apache-2.0
"""`fq.refit` of sharded models: every rank is given the file of one process, and no rank holds the
model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_quant as fq
from dist_tests.laws import as_bytes, assert_same_bytes
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


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and not out.is_meta:
            self.numel = max(self.numel, out.numel())
        return out


def _pieces(rank: int, world: int, folder: Path) -> None:
    for name, (make, train) in cases().items():
        for format in ("compressed-tensors", "dequantized"):
            model, found = train(sharded(make())), []
            with one_weight_at_a_time() as gathered, Largest() as largest:
                for bucket in fq.refit(
                    model, format, sharded=True, bucket_size="9KB", share_scales=True
                ):
                    found += bucket
            assert not gathered, name
            # A rank holds half of [160, 128] and of [4, 64, 128]; the definition pads blocks of
            # 128x128.
            assert "fp8_block" in name or largest.numel <= 2 * 64 * 128, (name, largest.numel)
            torch.save(
                [tuple(piece) for piece in found],
                folder / f"{name} {format} {rank}".replace("/", " "),
            )


@on_cpu
def test_pieces_of_ranks_are_the_file_of_one_process(tmp_path):
    """If false, an engine that is sharded as the training is holds other weights, or a rank that
    streams them holds a whole one."""
    run_ranks(2, _pieces, tmp_path)
    for name, (make, train) in cases().items():
        for format in ("compressed-tensors", "dequantized"):
            path = f"{name} {format}".replace("/", " ")
            fq.export(train(make()), tmp_path / path, format, share_scales=True)
            whole = load_file(tmp_path / path / "model.safetensors")
            ranks = [torch.load(tmp_path / f"{path} {rank}") for rank in range(2)]
            missing = {n: torch.ones(t.shape, dtype=torch.bool) for n, t in whole.items()}
            for tensor_name, tensor, shape, offsets in ranks[0] + ranks[1]:
                want = whole[tensor_name]
                assert shape == tuple(want.shape), (path, tensor_name)
                place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
                assert_same_bytes(tensor, want[place], f"{path} {tensor_name} {place}")
                missing[tensor_name][place] = False
            assert not [n for n, of in missing.items() if of.any()], path
            elements = sum(t.numel() for t in whole.values())
            for rank in ranks:
                assert sum(piece[1].numel() for piece in rank) < 0.6 * elements


def _refused(rank: int, world: int) -> list[str]:
    own = fq.convert(nn.ModuleList(nn.Linear(32, 32) for _ in range(1 + rank)), RECIPES["mxfp8"])
    messages, infinite = [], sharded(built("mxfp8"))
    for name, weight in infinite.named_parameters():
        if name.endswith("up_proj.weight") and rank == world - 1:
            weight.detach().to_local().view(-1)[0] = float("inf")
    for model, options in (
        (sharded(built("mxfp8")), {"bucket_size": "-1"}),
        (infinite, {}),
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
    wanted = (
        "bucket_size",
        "1 elements of layers.0.up_proj.weight, 1 elements of layers.1.up_proj.weight are infinite",
        "does not hold",
        "share_scales=True",
        "would write other tensors",
    )
    assert first == second and len(first) == len(wanted)
    for message, want in zip(first, wanted):
        assert want in message, message


def _tensor_parallel(rank: int, world: int) -> dict[str, str]:
    mesh, messages = init_device_mesh("cpu", (world,)), {}
    for recipe in ("mxfp8", "nvfp4"):
        for style in (fq.parallel.ColwiseParallel(), fq.parallel.RowwiseParallel()):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            model = fq.convert(model, RECIPES[recipe])
            parallelize_module(model, mesh, {"1": style})
            for format in ("compressed-tensors", "dequantized"):
                name = f"{recipe} {type(style).__name__} {format}"
                try:
                    fq.refit(model, format, sharded=True, share_scales=True)
                except NotImplementedError as error:
                    messages[name] = str(error)
    return messages


@on_cpu
def test_pieces_of_tensor_parallel_weights_are_refused_on_every_rank():
    """If false, an engine is given a part of a weight as if it were the whole."""
    first, second = run_ranks(2, _tensor_parallel)
    assert first == second and len(first) == 8
    assert set(first.values()) == {
        "1.weight is transposed or cut by tensor parallelism; sharded=True streams weights that "
        "fully_shard alone cuts: use sharded=False"
    }

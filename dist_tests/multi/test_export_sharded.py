# SPDX-License-Identifier: Apache-2.0
"""Exports of sharded models: the bytes of one process, one weight at a time, and one answer on
every rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from fsdp_quant.serving import export as export_module
from fsdp_quant.serving import writer

WIDTH, HIDDEN = 128, 160  # blocks of 128 and of 32 rows are cut by shards
RECIPES = {
    "fp8_current": fq.recipes.fp8_current(),
    "fp8_delayed": fq.recipes.fp8_delayed(),
    "fp8_row": fq.recipes.fp8_row(),
    "mxfp8": fq.recipes.mxfp8(),
    "nvfp4": fq.recipes.nvfp4(),
    "mxfp4/fp8_block": fq.recipes.hybrid("mxfp4", "fp8_block"),
    "fp8_block": fq.recipes.fp8_block(),
    "qat": fq.recipes.qat("nvfp4"),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=i == 0) for i in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down_proj(torch.relu(self.gate_proj(n)) * self.up_proj(n))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.experts = fq.GroupedLinear(4, WIDTH, 64, bias=False, packed=True)
        self.head = nn.Linear(WIDTH, 7)
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x + self.experts(x, [2, 0, 5, 1]).sum()
        return self.head(x)


def built(name: str, parameters: bool = False, seed: int = 0) -> Model:
    """parameters: quantized ones. Gate and up have other amaxes, and K of `down_proj` is no
    multiple of 128.
    """
    torch.manual_seed(seed)
    model, recipe = Model(), RECIPES[name]
    model.layers[0].gate_proj.weight.data.mul_(2)
    fq.set_recipe(model.experts, recipe)
    skip = ["head", *["down_proj"] * (name == "fp8_block")]
    if not parameters:
        return fq.convert(model, recipe, skip=skip)
    with fq.quantized_model_init(recipe):
        return fq.convert(model, recipe, skip=skip)


def sharded(model: Model) -> Model:
    for module in (*model.layers, model.experts):
        fully_shard(module)
    return fully_shard(model)


def trained(model: nn.Module, make=None) -> nn.Module:
    """After two steps on data that all ranks share, so that one process has their gradients; the
    optimizer is gone.
    """
    optimizer = (make or torch.optim.SGD)(model.parameters(), lr=0.1)
    for step in range(2):
        model(laws.values(8, WIDTH, seed=step, dtype=torch.float32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def cases() -> dict[str, nn.Module]:
    """Models before they are sharded, and what trains them, by name."""
    made = {name: (lambda name=name: built(name), lambda model: model) for name in RECIPES}
    made["qat"] = lambda: built("qat"), trained
    made["trained"] = lambda: built("fp8_delayed"), trained
    made["parameters"] = lambda: built("mxfp8", True), lambda model: model
    made["optimizer gone"] = (
        lambda: built("fp8_current", True),
        lambda model: trained(model, fq.optim.FusedAdam),
    )
    return made


OPTIONS = {"max_shard_size": "40KB", "share_scales": True}


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@contextlib.contextmanager
def one_weight_at_a_time():
    """Whole weights that an export gathered are gone as it gathers the next one."""
    gathered, gather = [], export_module.master_of

    def watched(source):
        assert not [ref for ref in gathered if ref() is not None], source.name
        whole = gather(source)
        gathered.append(weakref.ref(whole))
        return whole

    export_module.master_of = watched
    try:
        yield gathered
    finally:
        export_module.master_of = gather


def _export(rank: int, world: int, folder: Path) -> None:
    for name, (make, train) in cases().items():
        model = train(sharded(make()))
        with one_weight_at_a_time() as gathered:
            fq.export(model, folder / name, **OPTIONS)
        assert len(gathered) > 4, name
    fq.export(sharded(built("nvfp4")), folder / "plain", "dequantized", dtype=None)


@on_cpu
def test_sharded_exports_have_the_bytes_of_one_process(tmp_path):
    """If false, what is served depends on how many ranks trained it, or a rank holds more of the
    model than a weight.
    """
    run_ranks(2, _export, tmp_path / "two")
    for name, (make, train) in cases().items():
        fq.export(train(make()), tmp_path / "one" / name, **OPTIONS)
        assert files(tmp_path / "two" / name) == files(tmp_path / "one" / name), name
    fq.export(built("nvfp4"), tmp_path / "one" / "plain", "dequantized", dtype=None)
    assert files(tmp_path / "two" / "plain") == files(tmp_path / "one" / "plain")
    assert files(tmp_path / "one" / "parameters") == files(tmp_path / "one" / "mxfp8")
    assert writer.INDEX in files(tmp_path / "one" / "mxfp8")


PARTS = ("fp8_current", "fp8_row", "mxfp8", "qat", "nvfp4")


def _export_parts(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    styles = {
        "gate_proj": fq.parallel.ColwiseParallel(),
        "up_proj": fq.parallel.ColwiseParallel(),
        "down_proj": fq.parallel.RowwiseParallel(),
    }
    for name in PARTS if world == 2 else PARTS[-1:]:
        model = built(name)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], styles)
            if world > 2:
                fully_shard(layer, mesh=mesh["dp"])
        fq.export(model, folder / name, **OPTIONS)
    parallelize_module(model.experts, mesh["tp"], fq.parallel.ExpertParallel())
    with pytest.raises(NotImplementedError, match="its 4 experts are spread over ranks, 2 on each"):
        fq.export(model, folder / "experts", **OPTIONS)
    of_group = fq.parallel.ColumnParallelLinear(
        WIDTH, 64, mesh["tp"].get_group(), recipe=RECIPES["mxfp8"]
    )
    with pytest.raises(
        NotImplementedError, match="weight: its parts are on the ranks of a process group"
    ):
        fq.export(of_group, folder / "group")
    with pytest.raises(ValueError, match="would write other tensors: "):
        fq.export(
            fq.convert(nn.ModuleList(nn.Linear(32, 32) for _ in range(1 + rank)), RECIPES["mxfp8"]),
            folder / "stages",
        )


@on_cpu
@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_tensor_parallelism_are_written_whole(world, tmp_path):
    """If false, a server loads a weight that is cut, also twice, or scales of one part."""
    run_ranks(world, _export_parts, tmp_path / "many")
    for name in PARTS if world == 2 else PARTS[-1:]:
        fq.export(built(name), tmp_path / "one" / name, **OPTIONS)
        assert files(tmp_path / "many" / name) == files(tmp_path / "one" / name), name


def _batches(ranks: Iterable[int]) -> list[torch.Tensor]:
    return [
        laws.values(8, WIDTH, seed=rank, dtype=torch.float32) * (1 + 3 * step * rank)
        for step in range(2)
        for rank in ranks
    ]


def _calibrate(rank: int, world: int, name: str) -> list[dict[str, float]]:
    found = [fq.calibrate(sharded(built(name)), _batches([rank]))]
    mesh, model = init_device_mesh(DEVICE, (world,)), built(name)
    for layer in model.layers:
        styles = {n: fq.parallel.ColwiseParallel() for n in ("gate_proj", "up_proj")}
        parallelize_module(layer, mesh, styles | {"down_proj": fq.parallel.RowwiseParallel()})
    found.append(fq.calibrate(model, _batches(range(world))))
    model = built(name)
    parallelize_module(model.experts, mesh, fq.parallel.ExpertParallel())
    return [*found, fq.calibrate(model, _batches([rank]))]


@on_cpu
def test_amaxes_of_ranks_are_those_of_one_process():
    """If false, a server scales the inputs of all by what one rank, its part of a layer or its
    experts saw."""
    of_ranks = run_ranks(2, _calibrate, "nvfp4")
    want = fq.calibrate(built("nvfp4"), _batches(range(2)))
    assert len(want) == 10 and {f"experts.{e}" for e in range(4)} < want.keys()
    for of_rank in of_ranks:
        for got, bound in zip(of_rank, (1e-6, 2e-2, 2e-2)):  # sums in another order; codes
            assert got == pytest.approx(want, rel=bound)


def _fail(rank: int, world: int, folder: Path) -> list[str]:
    model, messages = sharded(built("mxfp8")), []
    if rank == 0:
        write, count = writer.Writer.write, iter(range(100))

        def full(self, *args):
            if next(count) == 9:
                raise OSError("no space left on device")
            write(self, *args)

        writer.Writer.write = full
    for path, options in (
        (folder / "full", {}),
        (folder / "taken", {}),
        (folder / "other", {"format": "modelopt"}),
    ):
        model = model if "format" not in options else sharded(built("mxfp4/fp8_block"))
        try:
            fq.export(model, path, **options)
        except (OSError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return messages


def test_a_failure_of_one_rank_is_one_of_all(tmp_path):
    """If false, the other ranks wait for a rank that has left, or half a checkpoint stays."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "model.safetensors").touch()
    first, second = run_ranks(2, _fail, tmp_path)
    assert first == second and len(first) == 3
    assert first[0] == "OSError: no space left on device" and not list(
        (tmp_path / "full").iterdir()
    )
    assert (
        "holds model.safetensors" in first[1]
        and "does not hold" in first[2]
        and not (tmp_path / "other").exists()
    )


def _load(rank: int, world: int, folder: Path) -> None:
    for name in ("mxfp8", "fp8_current"):
        model = fq.from_pretrained_quantized(sharded(built(name, seed=1)), folder / name)
        want = fq.from_pretrained_quantized(built(name, seed=2), folder / name).state_dict()
        for key, tensor in model.state_dict().items():
            laws.assert_same_bytes(
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, want[key], key
            )
        fq.from_pretrained_quantized(model, folder / name, frozen=True)
        for key, tensor in model.state_dict().items():
            laws.assert_same_bytes(
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, want[key], key
            )
        fq.unfreeze(model)


def test_sharded_models_read_what_they_hold(tmp_path):
    """If false, ranks load rows of each other, or a sharded model starts from other masters than
    one process.
    """
    for name in ("mxfp8", "fp8_current"):
        fq.export(built(name), tmp_path / name, **OPTIONS)
    run_ranks(2, _load, tmp_path)

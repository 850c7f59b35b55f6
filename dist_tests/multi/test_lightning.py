# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric with `fq.integrations.lightning.Precision`, held to loops that are
written by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import MICRO_BATCHES, RECIPES, STEPS, whole
from fsdp_quant.counters import counters

lightning = pytest.importorskip("lightning")
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

pytestmark = on_cpu
ROWS = 32


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 16)
    )


def _converted(recipe: str, dtype: torch.dtype | None = None) -> nn.Sequential:
    """By the names that the layers have in `_Module`: random bits depend on them."""
    return fq.convert(nn.ModuleDict({"net": _net().to(dtype)}), RECIPES[recipe]())["net"]


def _shard(net: nn.Module, mesh=None) -> nn.Module:
    policy = MixedPrecisionPolicy()
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return net


def _rows(count: int = 512) -> list[Tensor]:
    return list(torch.randn(count, 64, generator=torch.Generator().manual_seed(0)))


def _batch(index: int, rank: int = 0, world: int = 1) -> Tensor:
    return torch.stack(_rows()[(index * world + rank) * ROWS :][:ROWS])


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def _loop(
    net: nn.Module,
    rank: int = 0,
    world: int = 1,
    dtype: torch.dtype | None = None,
    mixed: bool = False,
) -> nn.Module:
    optimizer = _optimizer(net)
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            fq.begin_step(step, micro_batch=i)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                x = _batch(step * MICRO_BATCHES + i, rank, world).to(dtype)
                loss = net(x).square().mean()
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def _assert_same(net: nn.Module, reference: nn.Module) -> None:
    for (name, got), wanted in zip(whole(net).items(), whole(reference).values(), strict=True):
        assert_same_bytes(got, wanted, name)


def _shard_in(root: nn.Module, mesh) -> nn.Module:
    _shard(root.net, mesh)
    return root


class _Module(lightning.LightningModule):
    def __init__(self, sharded: bool = False):
        super().__init__()
        self.net, self.sharded = _net(), sharded

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            _shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, x: Tensor, index: int) -> Tensor:
        """Rows by step: Lightning begins an epoch anew where it resumes within one."""
        at, trainer = self.trainer.global_step * MICRO_BATCHES + index % MICRO_BATCHES, self.trainer
        x = _batch(at, trainer.global_rank, trainer.world_size).to(x.dtype)
        return self.net(x).square().mean()

    def validation_step(self, x: Tensor, index: int) -> None:
        self.log("loss", self.net(x).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.net)


def _fit(
    folder,
    recipe: str | None,
    steps: int,
    resume: str | None = None,
    precision: str = "32-true",
    module=None,
    plugin=None,
    **arguments,
):
    module = module or _Module()
    plugin = plugin or fq.integrations.lightning.Precision(recipe and RECIPES[recipe](), precision)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        val_check_interval=MICRO_BATCHES,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **dict(devices=1) | arguments,
        plugins=[plugin],
    )
    trainer.fit(module, DataLoader(_rows(), ROWS), DataLoader(_rows(), ROWS), ckpt_path=resume)
    return trainer, module


@pytest.mark.parametrize(
    "recipe, precision",
    [
        ("mxfp8", "32-true"),
        ("nvfp4", "32-true"),
        ("fp8_delayed", "32-true"),
        ("mxfp8", "bf16-true"),
        ("fp8_delayed", "bf16-mixed"),
    ],
)
def test_trainer_is_a_loop(recipe: str, precision: str, tmp_path: Path):
    """If false, validation changes what Lightning trains, or a resumed run has other random bits or
    scales."""
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    reference = _loop(_converted(recipe, dtype), dtype=dtype, mixed=precision == "bf16-mixed")
    counters.reset()
    trainer, module = _fit(tmp_path, recipe, STEPS, precision=precision)
    # of the micro-batches, and of the validation, per step
    assert max(counters.of("weight encode").values()) <= 2 * STEPS
    _assert_same(module.net, reference)
    assert trainer.validate(module, DataLoader(_rows(), ROWS), verbose=False)[0]["loss"] > 0

    trainer, _ = _fit(tmp_path, recipe, 1, precision=precision)
    trainer.save_checkpoint(tmp_path / "first")
    _, module = _fit(tmp_path, recipe, STEPS, str(tmp_path / "first"), precision)
    _assert_same(module.net, reference)


def test_a_checkpoint_of_another_recipe_or_of_none_loads_on_request(tmp_path: Path):
    """If false, a run in bf16 cannot go on in FP8 under Lightning, or does so in silence, from the
    random bits of its first step."""
    for recipe in ("nvfp4", None):
        plain = lightning.pytorch.plugins.Precision() if recipe is None else None
        trainer, _ = _fit(tmp_path, recipe, 1, plugin=plain)
        path = str(tmp_path / f"{recipe}.ckpt")
        trainer.save_checkpoint(path)
        with pytest.raises(ValueError, match="allow_recipe_change=True"):
            _fit(tmp_path, "mxfp8", 2, path)
        plugin = fq.integrations.lightning.Precision("mxfp8", allow_recipe_change=True)
        trainer, module = _fit(tmp_path, None, 2, path, plugin=plugin)
        assert trainer.global_step == 2 and fq.state_dict(module)["step"] == 2


def _over_codes(net: nn.Sequential) -> nn.Sequential:
    """The first layer of a converted net trains, the others are their codes."""
    fq.freeze(net[2:].requires_grad_(False))
    return net


def _frozen_module() -> _Module:
    module = _Module()
    module.net = _over_codes(_converted("nvfp4"))
    return module


def test_frozen_base_is_its_codes(tmp_path: Path):
    """If false, Lightning casts, moves or saves the codes of a frozen base as something else, or
    its checkpoint loads other codes."""
    reference = _loop(_over_codes(_converted("nvfp4")))
    trainer, module = _fit(tmp_path, None, STEPS, module=_frozen_module())
    assert type(module.net[2].weight) is fq.QuantizedTensor
    for name in ("0.weight", "0.bias"):
        assert_same_bytes(module.net.get_parameter(name), reference.get_parameter(name), name)
    trainer, _ = _fit(tmp_path, None, 1, module=_frozen_module())
    trainer.save_checkpoint(tmp_path / "first")
    _, module = _fit(tmp_path, None, STEPS, str(tmp_path / "first"), module=_frozen_module())
    for name in ("0.weight", "0.bias"):
        assert_same_bytes(module.net.get_parameter(name), reference.get_parameter(name), name)


class _Loop:
    """A loop over Fabric."""

    def __init__(self, recipe: str, precision: str = "32-true", **arguments):
        self.precision = fq.integrations.lightning.FabricPrecision(RECIPES[recipe](), precision)
        fabric = lightning.Fabric(
            accelerator="cpu", plugins=[self.precision], **dict(devices=1) | arguments
        )
        fabric.launch()
        self.fabric, root = fabric, _Root()
        if isinstance(fabric.strategy, FabricModelParallel):
            self.model = fabric.setup(root)
            self.optimizer = fabric.setup_optimizers(_optimizer(self.model))
        else:
            self.model, self.optimizer = fabric.setup(root, _optimizer(root))

    def train(self, steps: range) -> None:
        self.model.train()
        for step in steps:
            for i in range(MICRO_BATCHES):
                fq.begin_step(step, micro_batch=i)
                x = _batch(
                    step * MICRO_BATCHES + i, self.fabric.global_rank, self.fabric.world_size
                )
                self.fabric.backward(self.model(x) / MICRO_BATCHES)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, path: str) -> None:
        self.fabric.save(
            path,
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "quantization": self.precision.state_dict(),
            },
        )

    def load(self, path: str) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "quantization": None}
        self.fabric.load(path, state)
        self.precision.load_state_dict(state["quantization"])


class _Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@pytest.mark.parametrize("recipe, precision", [("nvfp4", "32-true"), ("fp8_delayed", "bf16-mixed")])
def test_fabric_is_a_loop(recipe: str, precision: str, tmp_path: Path):
    """If false, Fabric trains other weights than a loop, or resumes with other random bits or
    scales."""
    reference = _loop(_converted(recipe), mixed=precision == "bf16-mixed")
    for run in (_Loop(recipe, precision), _Loop(recipe, precision)):
        if (tmp_path / "first").exists():
            run.load(tmp_path / "first")
        else:
            run.train(range(1))
            run.save(tmp_path / "first")
        run.train(range(1, STEPS))
        _assert_same(run.model, reference)


def _sharded(rank: int, world: int, folder: str) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "0", "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    for recipe in ("mxfp8", "fp8_delayed"):
        for whole_file in (False, True):

            def fit(steps: int, resume: str | None = None):
                strategy = ModelParallelStrategy(
                    world, 1, save_distributed_checkpoint=not whole_file
                )
                return _fit(
                    folder,
                    recipe,
                    steps,
                    resume,
                    module=_Module(True),
                    strategy=strategy,
                    devices=world,
                )

            reference = _loop(_shard(_converted(recipe)), rank, world)
            _, module = fit(STEPS)
            _assert_same(module.net, reference)
            path = f"{folder}/{recipe}-{whole_file}"
            fit(1)[0].save_checkpoint(path)
            _, module = fit(STEPS, path)
            _assert_same(module.net, reference)
        for attempt in range(2):
            strategy = FabricModelParallel(
                lambda root, mesh: _shard_in(root, mesh["data_parallel"]), world, 1
            )
            run, path = _Loop(recipe, strategy=strategy, devices=world), f"{folder}/fabric-{recipe}"
            if attempt:
                run.load(path)
            else:
                run.train(range(1))
                run.save(path)
            run.train(range(1, STEPS))
            _assert_same(run.model, reference)


def test_sharded_trainer_is_a_loop(tmp_path: Path):
    """If false, ModelParallelStrategy, of the Trainer or of Fabric, trains other weights than
    `fully_shard` by hand, or resumes with others."""
    run_ranks(2, _sharded, str(tmp_path))

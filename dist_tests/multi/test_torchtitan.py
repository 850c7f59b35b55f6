# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer with `fq.integrations.torchtitan`, on one and two ranks; docs/torchtitan.md
says how to run these."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.trainers import whole
from fsdp_quant.counters import counters

for _module in ("torchtitan", "triton"):
    pytest.importorskip(
        _module, reason="no part of the test extra: bash launch/titan.sh installs it"
    )

pytestmark = on_cpu

TENSOR = {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1}
PIPELINE = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_schedule": "1F1B",
    "parallelism__pipeline_parallel_first_stage_less_layers": 0,
    "training__local_batch_size": 4,
    "parallelism__pipeline_parallel_last_stage_less_layers": 0,
}
COMPILED = {
    "compile__enable": True,
    "compile__components": ["model"],
    "compile__backend": "aot_eager",
}


def _train(recipe: str | None, folder: str = "", trainer=None, section: dict = {}, **settings):
    """(trainer, what its metrics logged: loss, norm of the gradient); recipe None: torchtitan
    alone."""
    if trainer is None:
        from dist_tests import titan

        config = titan.config(folder=folder, **settings)
        if recipe is not None:
            config = fq.integrations.torchtitan.trainer_config(config, recipe=recipe, **section)
        trainer = config.build()
    logged, log = [], trainer.metrics_processor.logger.log

    def keep(metrics: dict, step: int) -> None:
        logged.append(metrics)
        log(metrics, step)

    trainer.metrics_processor.logger.log = keep
    trainer.train()
    return trainer, [(m["loss_metrics/global_avg_loss"], m["grad_norm"]) for m in logged], logged


def _weights(trainer) -> dict[str, torch.Tensor]:
    return whole(nn.ModuleList(trainer.model_parts))


def _layers(trainer) -> list[fq.Linear]:
    return [m for part in trainer.model_parts for m in part.modules() if isinstance(m, fq.Linear)]


def _near(rank: int, world: int, folder: str, settings: dict) -> None:
    from dist_tests import titan  # imports of torchtitan follow its own

    if kind := settings.pop("checkpointed", None):
        settings["activation_checkpoint"] = getattr(titan.activation_checkpoint, kind).Config()
    runs = {}
    for recipe in (None, "bf16", "mxfp8"):
        trainer, runs[recipe], logged = _train(recipe, folder, **settings)
        quantized = [m for m in _layers(trainer) if m.plan.weight.rowwise.fmt.is_quantized]
        assert len(quantized) == (
            0 if recipe != "mxfp8" else 5 if settings.keys() >= PIPELINE.keys() else 10
        )
        assert ("mfu(%)" in logged[0]) == (recipe is None)
    plain, own, low = (torch.tensor(runs[recipe]) for recipe in (None, "bf16", "mxfp8"))
    assert plain.isfinite().all() and len(plain) == 3
    torch.testing.assert_close(own, plain, rtol=2e-5, atol=0)
    torch.testing.assert_close(low, plain, rtol=2e-3, atol=0)
    assert not torch.equal(low, plain)


@pytest.mark.parametrize(
    "world, settings",
    [
        (1, {}),
        (2, {}),
        (2, TENSOR),
        (2, PIPELINE),
        (2, {"checkpointed": "FullAC"}),
        (2, {"checkpointed": "SelectiveAC"}),
        (1, COMPILED),
        (2, COMPILED | {"checkpointed": "FullAC"}),
        (1, COMPILED | {"checkpointed": "SelectiveAC"}),
    ],
    ids=[
        "alone",
        "fully_shard",
        "tensor",
        "pipeline",
        "checkpointed",
        "selective",
        "compiled",
        "compiled and checkpointed",
        "compiled and selective",
    ],
)
def test_trainer_trains_as_torchtitans(world: int, settings: dict, tmp_path):
    """If false, the integration changes what torchtitan computes besides formats, or does not
    quantize under one of its parallelisms."""
    run_ranks(world, _near, str(tmp_path), settings)


def _by_hand(rank: int, world: int, folder: str) -> None:
    from dist_tests import titan

    for recipe in ("mxfp8", "nvfp4"):
        counters.reset()
        trainer, *_ = _train(
            recipe, folder, section={"fuse": False}, training__global_batch_size=8 * world
        )
        assert set(counters.of("weight encode").values()) == {3}, (
            "of four micro-batches in each of three steps"
        )
        by_hand = titan.config(folder=folder, training__global_batch_size=8 * world).build()
        fq.convert(by_hand.model_parts[0], recipe, skip=["lm_head"], fuse=False)
        body, count = by_hand.forward_backward_step, iter(range(100))

        def step(**kwargs):
            fq.begin_step(by_hand.step - 1, micro_batch=next(count) % 4)
            return body(**kwargs)

        by_hand.forward_backward_step = step
        _train(None, trainer=by_hand)
        want = _weights(by_hand)
        for name, got in _weights(trainer).items():
            assert_same_bytes(got, want[name], f"{recipe} {name}")


@pytest.mark.parametrize("world", [1, 2])
def test_trainer_is_a_model_that_was_converted_by_hand(world: int, tmp_path):
    """If false, steps, micro-batches or held codes of the Trainer are others than those of a loop
    that calls the library itself."""
    run_ranks(world, _by_hand, str(tmp_path))


def _resume(rank: int, world: int, folder: str, recipe: str, settings: dict) -> None:
    kept = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_model_only": False,
        **settings,
    }
    want, *_ = _train(recipe, f"{folder}/whole", training__steps=4, **kept)
    _train(recipe, f"{folder}/two", training__steps=4, **kept | {"checkpoint__load_only": False})
    if rank == 0:
        shutil.rmtree(f"{folder}/two/checkpoint/step-4")
    torch.distributed.barrier()
    resumed, losses, _ = _train(recipe, f"{folder}/two", training__steps=4, **kept)
    assert len(losses) == 2
    expected = _weights(want)
    for name, got in _weights(resumed).items():
        assert_same_bytes(got, expected[name], name)


@pytest.mark.parametrize(
    "recipe, settings",
    [("fp8_delayed", {}), ("nvfp4", {}), ("nvfp4", PIPELINE), ("nvfp4", TENSOR)],
    ids=["delayed", "stochastic", "stochastic pipeline", "stochastic tensor"],
)
def test_checkpoints_resume_bit_for_bit(recipe: str, settings: dict, tmp_path):
    """If false, a resumed run has other random bits or scales than one that was not interrupted."""
    run_ranks(2, _resume, str(tmp_path), recipe, settings)


def _experts(rank: int, world: int, folder: str) -> None:
    runs = {}
    for recipe in (None, "mxfp8"):
        trainer, runs[recipe], _ = _train(
            recipe,
            folder,
            model="deepseek_v3",
            section={"filter_fqns": ["lm_head", "*.router.gate"]} if recipe else {},
        )
    grouped = [m for m in trainer.model_parts[0].modules() if isinstance(m, fq.GroupedLinear)]
    assert len(grouped) == 3 and all(
        m.layers[0].plan.weight.rowwise.fmt.is_quantized for m in grouped
    )
    torch.testing.assert_close(
        torch.tensor(runs["mxfp8"]), torch.tensor(runs[None]), rtol=1e-2, atol=0
    )
    assert runs["mxfp8"] != runs[None]


@pytest.mark.parametrize("world", [1, 2])
def test_experts_train(world: int, tmp_path):
    """If false, packed experts of torchtitan's MoE models stay in high precision, or compute
    something else."""
    run_ranks(world, _experts, str(tmp_path))


def _graphed(rank: int, world: int, folder: str) -> None:
    settings = {"training__disable_cuda_graphs": False}
    with pytest.warns(UserWarning, match="fq.graphed: steps run eagerly: the model is on cpu"):
        graphed, *_ = _train("nvfp4", folder, section={"graphed": True}, **settings)
    want, *_ = _train("nvfp4", folder, **settings)
    for name, got in _weights(graphed).items():
        assert_same_bytes(got, _weights(want)[name], name)


def test_graphed_steps_are_the_trainers(tmp_path):
    """If false, `graphed` trains other weights, or is dropped without a word where nothing can be
    captured."""
    run_ranks(1, _graphed, str(tmp_path))


def test_the_command_line_has_the_section(capsys):
    """If false, a run of torchtitan cannot be quantized without writing code."""
    from torchtitan.config import ConfigManager

    from dist_tests import titan  # noqa: F401

    own = fq.integrations.torchtitan
    arguments = ["--module", own.__name__, "--config", "llama3.llama3_debugmodel"]
    config = ConfigManager().parse_args(
        [
            *arguments,
            "--fsdp_quant.recipe",
            "mxfp8/nvfp4",
            "--fsdp_quant.filter_fqns",
            "lm_head,wo",
            "--fsdp_quant.no-fuse",
        ]
    )
    assert isinstance(config, own.Trainer.Config)
    assert config.fsdp_quant == own.Section(
        recipe="mxfp8/nvfp4", filter_fqns=["lm_head", "wo"], fuse=False
    )
    for wrong, message in (
        (["--fsdp_quant.recipe", "fp7"], "fp7"),
        (["--fsdp_quant.graphed", "--training.disable_cuda_graphs"], "disable_cuda_graphs"),
    ):
        with pytest.raises(SystemExit):
            ConfigManager().parse_args([*arguments, *wrong])
        printed = capsys.readouterr()
        assert message in printed.out + printed.err
    with pytest.raises(ValueError, match="'llama3_debugmodel' not found"):
        ConfigManager().parse_args(["--module", own.__name__, "--config", "llama3_debugmodel"])
    with pytest.raises(ValueError, match="is of a trainer of its own"):
        own.trainer_config(config)


def _refused(rank: int, world: int, folder: str) -> str:
    with pytest.raises(NotImplementedError) as error:
        _train("mxfp8", folder, parallelism__spmd_backend="full_dtensor")
    return str(error.value)


def test_another_backend_is_refused_on_every_rank(tmp_path):
    """If false, layers multiply parts of weights whose scales nobody shared."""
    assert (
        run_ranks(2, _refused, str(tmp_path))
        == [
            "parallelism.spmd_backend is 'full_dtensor'; several ranks train quantized models with "
            "'partial_dtensor'"
        ]
        * 2
    )

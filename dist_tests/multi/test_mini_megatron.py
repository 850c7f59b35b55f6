# SPDX-License-Identifier: Apache-2.0
"""The example trainer: processes against virtual ranks, these against one rank, what is published
against its masters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import EVERYTHING, assert_same_bytes, assert_same_storage
from dist_tests.multi.harness import DEVICE, run_ranks
from examples.mini_megatron.flat import FlatLayout
from examples.mini_megatron.model import Config
from examples.mini_megatron.optimizer import Shard
from examples.mini_megatron.ranks import Ranks, Sizes, on_processes, on_virtual_ranks
from examples.mini_megatron.train import Trainer, train
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.gemm import StaleWeightError

STEPS = 100 if EVERYTHING else 3


def four_and_eight_bits(role: fq.Role) -> str:
    """Weights of 4 and of 8 bits in one buffer."""
    return "nvfp4_16x16" if "mlp" in role.name and role.tensor_type == "weight" else "mxfp8"


HYBRID, MIXED = fq.recipes.hybrid("mxfp8", "nvfp4"), fq.recipes.custom(four_and_eight_bits)
DELAYED, BLOCK = fq.recipes.fp8_delayed(), fq.recipes.fp8_block()
CASES: dict[int, list[tuple[Sizes, Config, dict]]] = {
    2: [
        (Sizes(pipeline=2), Config(MIXED), {"policy": "even", "overflows": ((1, 0),)}),
        (
            Sizes(tensor=2, experts=2),
            Config(HYBRID, experts=4),
            {"policy": "odd", "transport": "codes", "stats": "halo"},
        ),
        (
            Sizes(data=2, experts=2),
            Config(DELAYED, experts=2),
            {"policy": "empty", "overlap": True, "overflows": ((1, 1),)},
        ),
    ],
    4: [
        (
            Sizes(pipeline=2, tensor=2, experts=2),
            Config(HYBRID, experts=4),
            {
                "policy": "odd",
                "transport": "codes",
                "stats": "halo",
                "overflows": ((1, 1),),
                "overlap": True,
            },
        ),
        (
            Sizes(data=2, tensor=2, experts=4),
            Config(DELAYED, experts=4),
            {
                "policy": "random",
                "transport": "highprec",
                "overflows": ((1, 2),),
                "micro_batches": 1,
            },
        ),
        (
            Sizes(pipeline=2, data=2, experts=2),
            Config(BLOCK, experts=2),
            {"policy": "empty", "transport": "codes"},
        ),
        (
            Sizes(data=4),
            Config(MIXED, layers=1),
            {"policy": "even", "stats": "halo", "micro_batches": 1, "overlap": True},
        ),
    ],
}


def facts(trainer: Trainer) -> dict[str, Tensor]:
    """What a rank has seen and holds, on the host: losses, its pieces of masters, weights, codes,
    histories."""
    found = {f"loss {i}": loss for i, loss in enumerate(trainer.losses + trainer.held_out)}
    found["skipped"], found["applied"] = (
        torch.tensor(trainer.skipped, device="cpu"),
        trainer.optimizer.applied,
    )
    for shard in trainer.optimizer.shards.values():
        for name in shard.masters:
            found |= {
                f"{key} of {name}": state.detach() for key, state in states_of(shard, name).items()
            }
        found |= {name: shard.params[name].detach() for name in shard.plain}
        for name in shard.quantized:
            weight = shard.params[name]
            for d in Direction:
                found |= {
                    f"{name} {d.value} {part}": b
                    for part, b in weight.storage_for(d).buffers().items()
                }
            found |= {f"history {k[:3]}": h.amaxes for k, h in weight.state.histories.items()}
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def states_of(shard: Shard, name: str) -> dict[str, Tensor]:
    """What Adam holds of this rank's elements of a parameter."""
    return {"master": shard.masters[name].detach(), **shard.adam.state[shard.masters[name]]}


def assert_same_facts(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()}"
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what}: {name}")


def _facts_of_run(ranks: Ranks, config: Config, options: dict) -> dict[str, Tensor]:
    return facts(
        train(ranks, config, STEPS, device=DEVICE, evaluate=2, bucket_size=2000, **options)
    )


def _on_rank(rank: int, world: int, which: int) -> dict[str, Tensor]:
    sizes, config, options = CASES[world][which]
    return on_processes(
        sizes, partial(_facts_of_run, config=config, options=options), ordered=world > 2
    )  # of two, no order


# Real ranks #


@pytest.mark.parametrize("world", [4] if DEVICE == "cpu" and not EVERYTHING else [2, 4])
def test_processes_train_as_virtual_ranks(world: int):
    """Otherwise what processes exchange differs from what is meant: in data, tensor, sequence,
    pipeline or expert parallelism, in a cut policy, transport or statistic, over an overflow on one
    rank, with forced syncs and evaluations between steps. Three steps; 100 with
    FSDP_QUANT_ALL_PAIRS=1."""
    for which, (sizes, config, options) in enumerate(CASES[world]):
        got = run_ranks(world, _on_rank, which)
        want = on_virtual_ranks(sizes, partial(_facts_of_run, config=config, options=options))
        for rank in range(world):
            assert want[rank]["skipped"].tolist() == [
                attempt for attempt, _ in options.get("overflows", ())
            ]
            assert_same_facts(got[rank], want[rank], f"{sizes}, rank {rank}")


# Virtual ranks #


def test_a_grid_trains_as_one_rank():
    """Otherwise cutting a model changes it: a gradient is counted twice or not at all, a token goes
    to another expert.

    All in fp32: one rank and a grid differ by the order of sums, 2^-24 of each sum and layer. Adam
    divides by the gradient's size, so an element whose gradient is itself a rounding error moves by
    lr = 0.01 either way: one in 10^4, of 10^4 elements that move the loss by 1e-3 each at most, of
    both signs: 1e-4 or less. The first loss is of the same weights: 2^-24 * 2^4.
    """
    config = Config(fq.recipes.identity(), experts=4, dtype=torch.float32)
    sizes = Sizes(pipeline=2, data=2, tensor=2, experts=4)
    alone = on_virtual_ranks(
        Sizes(), lambda ranks: train(ranks, config, 2, evaluate=1, micro_batches=4)
    )[0]
    for trainer in on_virtual_ranks(sizes, lambda ranks: train(ranks, config, 2, evaluate=1)):
        for step, (got, want) in enumerate(
            zip(trainer.losses + trainer.held_out, alone.losses + alone.held_out, strict=True)
        ):
            assert abs(got.mean() - want.mean()) < (1e-6 if step == 0 else 1e-4), (
                f"loss {step}: {got.mean()}, want {want.mean()}"
            )


@pytest.mark.parametrize(
    "recipe", [fq.recipes.fp8_current(), fq.recipes.nvfp4()], ids=["fp8_current", "nvfp4"]
)
def test_a_grid_has_the_codes_of_one_rank(recipe: fq.Recipe):
    """Otherwise the scale of a whole weight is another for each part that tensor parallelism makes
    of it."""
    trainers = on_virtual_ranks(
        Sizes(data=2, tensor=2),
        lambda ranks: train(ranks, Config(recipe, layers=1), 1, policy="odd", micro_batches=1),
    )
    masters = whole_states(trainers)
    for trainer in trainers:
        shard, tensor = trainer.optimizer.shards["sharded"], trainer.ranks.tensor
        for name in shard.quantized:
            weight, dim = shard.params[name], trainer.stage.cut_dim(name)
            want, _ = weight.state.quantizer.storages(masters[f"{name} master"].to(torch.bfloat16))
            for d in Direction:
                whole = want[d].dequantize().chunk(tensor.size(), dim)
                assert_same_bytes(
                    weight.storage_for(d).dequantize(), whole[tensor.rank()], f"{name} {d.value}"
                )


GRIDS = [
    Sizes(pipeline=2, data=2, tensor=1, experts=2),
    Sizes(pipeline=1, data=1, tensor=2, experts=1),
    Sizes(data=3),
]


def test_checkpoints_pass_between_grids(tmp_path):
    """Otherwise a run cannot go on with more or fewer ranks, or goes on with other masters, moments
    or steps than it had; on the same grid it goes on as if it had not stopped, histories too."""
    config = Config(BLOCK, experts=2)
    options = {"policy": "odd", "micro_batches": 1, "overflows": ((1, 1),)}

    def save(ranks: Ranks) -> Trainer:
        trainer = train(ranks, config, 3, **options)
        trainer.save(tmp_path / "first")
        return trainer

    want = whole_states(on_virtual_ranks(GRIDS[0], save))
    for sizes in GRIDS:
        loaded = on_virtual_ranks(
            sizes, lambda ranks: Trainer(ranks, config, resume=tmp_path / "first", policy="random")
        )
        got = whole_states(loaded)
        assert got.keys() == want.keys() and all(trainer.applied == 2 for trainer in loaded)
        for name in want:
            assert_same_bytes(got[name], want[name], f"{sizes}: {name}")
        assert_published(loaded)
    resumed = on_virtual_ranks(
        GRIDS[0],
        lambda ranks: train(
            ranks, config, 4, first=3, resume=tmp_path / "first", **options | {"policy": "empty"}
        ),
    )
    # saving changes nothing
    straight = on_virtual_ranks(GRIDS[0], lambda ranks: train(ranks, config, 4, **options))
    assert [t.losses[-1].tolist() for t in resumed] == [t.losses[-1].tolist() for t in straight]
    want = whole_states(straight)
    for name, got in whole_states(resumed).items():
        assert_same_bytes(got, want[name], f"resumed: {name}")


def whole_states(trainers: list[Trainer]) -> dict[str, Tensor]:
    """Masters and moments of the whole model, by name."""
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}
    dims, shapes = {}, {}
    for trainer in trainers:
        for shard in trainer.optimizer.shards.values():
            for name in shard.masters:
                dims[name] = trainer.stage.cut_dim(name)
                part = trainer.ranks.tensor.rank() if dims[name] is not None else 0
                for key in ("master", "exp_avg", "exp_avg_sq"):
                    value = states_of(shard, name)[key]
                    parts.setdefault(f"{name} {key}", {}).setdefault(part, {})[
                        shard.group.rank()
                    ] = value
                    shapes[f"{name} {key}"] = shard.params[name].shape, dims[name]
    return {
        key: torch.cat(
            [
                torch.cat([of[r] for r in sorted(of)]).view(shapes[key][0])
                for _, of in sorted(by_part.items())
            ],
            shapes[key][1] or 0,
        )
        for key, by_part in parts.items()
    }


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    """Otherwise scales of activations are silently those of no rank's history, or ranks go on from
    other steps."""
    config = Config(DELAYED, layers=1)
    on_virtual_ranks(Sizes(data=2), lambda ranks: train(ranks, config, 1).save(tmp_path))
    on_virtual_ranks(Sizes(data=2), lambda ranks: Trainer(ranks, config, resume=tmp_path))
    with pytest.raises(
        ValueError, match="histories of delayed scaling of .*data=2.* and this run has .*data=1"
    ):
        on_virtual_ranks(Sizes(), lambda ranks: Trainer(ranks, config, resume=tmp_path))
    on_virtual_ranks(
        Sizes(data=2), lambda ranks: train(ranks, config, 2).save(tmp_path / str(ranks.rank))
    )
    (tmp_path / "1" / "2.1.pt").rename(tmp_path / "1.1.pt")
    with pytest.raises(ValueError, match="files of several checkpoints"):
        on_virtual_ranks(Sizes(data=2), lambda ranks: Trainer(ranks, config, resume=tmp_path))


# Weights against their masters (one law, a test for each way that weights went stale elsewhere) #


def whole_master(trainers: list[Trainer], kind: str, name: str, rank: int) -> Tensor:
    """Of the pieces that the ranks of a weight's group hold."""
    shard = trainers[rank].optimizer.shards[kind]
    _, members = shard.group.key
    flat = torch.cat([trainers[r].optimizer.shards[kind].masters[name].detach() for r in members])
    return flat.view(shard.params[name].shape)


def assert_published(
    trainers: list[Trainer], directions=tuple(Direction), rank: int | None = None
) -> None:
    """The codes of every weight are those of its master, rounded once."""
    for r, trainer in enumerate(trainers) if rank is None else [(rank, trainers[rank])]:
        for kind, shard in trainer.optimizer.shards.items():
            for name in shard.quantized:
                seen = whole_master(trainers, kind, name, r).to(torch.bfloat16)
                want, _ = shard.params[name].state.quantizer.storages(seen)
                for d in directions:
                    assert_same_storage(
                        shard.params[name].storage_for(d), want[d], f"rank {r}, {name} {d.value}"
                    )


def watched(ranks: Ranks, trainers: list, **options) -> Trainer:
    """A trainer that compares its weights before the forward and the backward of every layer."""
    trainer = trainers[ranks.rank] = Trainer(
        ranks, Config(HYBRID, experts=2), policy="odd", micro_batches=1, **options
    )
    trainer.checked = []

    def check(direction: Direction) -> Callable:
        def hook(module: nn.Module, *_) -> None:
            ((kind, name),) = names[id(module)]
            seen = whole_master(trainers, kind, name, ranks.rank).to(torch.bfloat16)
            want, _ = module.weight.state.quantizer.storages(seen)
            assert_same_storage(
                module.weight.storage_for(direction), want[direction], f"{name} {direction.value}"
            )
            trainer.checked.append(direction)

        return hook

    dist.all_reduce(torch.zeros(1), group=ranks.world)  # every rank has its trainer
    names = {
        id(m): [
            (kind, n)
            for kind, s in trainer.optimizer.shards.items()
            for n in s.quantized
            if s.params[n] is m.weight
        ]
        for m in trainer.stage.modules()
        if isinstance(m, fq.Linear)
    }
    for module in trainer.stage.modules():
        if isinstance(module, fq.Linear):
            module.register_forward_pre_hook(check(ROWWISE))
            module.register_full_backward_pre_hook(check(COLUMNWISE))
    return trainer


def _evaluate(trainer: Trainer, folder: Path) -> None:
    trainer.evaluate()


def _save(trainer: Trainer, folder: Path) -> None:
    trainer.save(folder)
    trainer.optimizer.finish()


def _force(trainer: Trainer, folder: Path) -> None:
    for _ in range(2):
        trainer.optimizer.refresh()
        trainer.optimizer.finish()


def _chain(trainer: Trainer, folder: Path) -> None:
    """One optimizer casts, and is gathered, before the other one has: its weights alone are
    current."""
    dense, experts = (trainer.optimizer.shards[kind] for kind in ("sharded", "experts"))
    weights = [shard.params[shard.quantized[0]] for shard in (dense, experts)]
    for shard, stale in ((dense, weights[0]), (experts, weights[1])):
        other = next(w for w in weights if w is not stale)
        shard.sync.cast_(shard.quantized_masters())
        for d in Direction:
            with pytest.raises(StaleWeightError):
                stale.storage_for(d)
            other.storage_for(d)
        shard.sync.gather()
        shard.sync.finish()
        assert stale.storage_for(ROWWISE) is not None


def _overlap(trainer: Trainer, folder: Path) -> None:
    """Nothing is read of a gather under way."""
    weights = [
        p
        for shard in trainer.optimizer.shards.values()
        for p in (shard.params[n] for n in shard.quantized)
    ]
    for ready, call in ((0, None), (1, [ROWWISE]), (2, [COLUMNWISE])):
        if call:
            trainer.optimizer.finish(call)
        for weight in weights:
            for d in list(Direction)[ready:]:
                with pytest.raises(StaleWeightError):
                    weight.storage_for(d)
            for d in list(Direction)[:ready]:
                weight.storage_for(d)


@pytest.mark.parametrize(
    "between", [_evaluate, _save, _force, _chain, _overlap], ids=lambda f: f.__name__[1:]
)
def test_products_read_the_codes_of_the_masters(between: Callable, tmp_path):
    """Otherwise a product reads codes that are not of the masters as they are: after an evaluation,
    a checkpoint, a forced sync, between the casts of dense and expert optimizers, or while a gather
    is under way."""
    trainers: list = [None] * 2

    def run(ranks: Ranks) -> None:
        trainer = watched(ranks, trainers, overlap=between is _overlap)
        for attempt in range(2):
            trainer.train(attempt)
            between(trainer, tmp_path)
        assert {d: trainer.checked.count(d) > 0 for d in Direction} == dict.fromkeys(
            Direction, True
        )

    on_virtual_ranks(Sizes(data=2, experts=2), run)
    assert_published(trainers)


@pytest.mark.parametrize("ranks", [3, 5, 6, 12] if EVERYTHING else [3, 12])
def test_any_number_of_ranks_publishes_its_masters(ranks: int):
    """Otherwise elements are never cast where ranks have odd factors, or 4- and 8-bit weights share
    a buffer."""
    for policy in ("even", "odd") if EVERYTHING else ("even",):

        def run(r: Ranks, policy: str = policy) -> Trainer:
            return train(
                r,
                Config(MIXED, layers=1),
                1,
                policy=policy,
                micro_batches=1,
                transport="codes",
                bucket_size=3000,
            )

        assert_published(on_virtual_ranks(Sizes(data=ranks), run))


def test_a_skipped_step_leaves_no_trace():
    """Otherwise an overflow on one rank of one stage moves codes, masters, moments or histories
    somewhere."""

    def run(ranks: Ranks) -> None:
        trainer = Trainer(ranks, Config(DELAYED, experts=2), overflows=((1, 1),))
        trainer.train(0)
        before = facts(trainer)
        trainer.train(1)
        after = facts(trainer)
        assert trainer.skipped == [1] and trainer.applied == 1
        trainer.train(2)
        for name, kept in before.items():
            if name.startswith("history"):  # slot 0 is of the step under way
                assert_same_bytes(after[name][1:], kept[1:], name)
                assert (after[name][0] == 0) or "weight" in name
            elif name != "skipped":
                assert_same_bytes(after[name], kept, name)

    on_virtual_ranks(Sizes(pipeline=2, tensor=2, experts=2), run)


def test_layouts_follow_the_padding_rules():
    """Otherwise buffers are not those of a Megatron-style trainer, or a pad or a gap has an owner
    and a place on the wire."""
    sizes = {"a": 1000, "b": 64, "c": 4097, "d": 33}
    for ranks in (1, 2, 3, 5, 6, 8, 12):
        for wide in (False, True):
            layout = FlatLayout(sizes, ranks, 1100, pad_to_2_16=wide)
            assert list(layout.starts) == ["d", "c", "b", "a"] and all(
                s % 64 == 0 for s in layout.starts.values()
            )
            assert len(layout.buckets) == 2, "d and c fill a bucket, a and b the next"
            for bucket in layout.buckets:
                size = bucket.end - bucket.start
                assert size % ranks == size % 128 == 0 and (not wide or size % 2**16 == 0)
                assert {b - a for a, b in zip(bucket.bounds, bucket.bounds[1:])} == {size // ranks}
            for name, size in sizes.items():
                assert layout.shards(name).numel == size and layout.shards(name).ranks == ranks
    assert_same_bytes(FlatLayout(sizes, 2, 1100).view(torch.arange(9000), "d"), torch.arange(33))

# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on synthetic text with data, tensor, sequence, pipeline and expert parallelism.

    torchrun --nproc-per-node 4 -m examples.mini_megatron.train --pipeline 2 --tensor 2 \\
        --num-experts 4 --experts 2
    python -m examples.mini_megatron.train --pipeline 2 --tensor 2 --num-experts 4 --experts 2

The second command runs the same ranks as virtual ranks, one thread per rank: the reference. With
--ordered, or if no sum has more than two summands, losses are the same bit for bit, on one kind of
device. --verify trains both ways.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_quant as fq
from fsdp_quant.formats import COLUMNWISE, ROWWISE

from . import checkpoint
from .flat import POLICIES
from .model import Config, Stage
from .optimizer import ChainedAdam
from .ordered import all_gather
from .pipeline import run_pipeline
from .ranks import Ranks, Sizes, on_processes, on_virtual_ranks

BATCH, EVALUATE = 4, 10


def text(config: Config, step: int, micro_batch: int) -> Tensor:
    """Synthetic, int64 [BATCH, tokens + 1]: runs of a fixed permutation of the vocabulary, with
    occasional random jumps.

    micro_batch:  numbered over all data-parallel ranks.
    """
    draw, columns = torch.Generator("cpu").manual_seed((step + 1) * 1009 + micro_batch), []
    token, *jumps = torch.randint(
        config.vocabulary, (config.tokens + 2, BATCH), generator=draw, device="cpu"
    )
    jumped = torch.rand(config.tokens + 1, BATCH, generator=draw, device="cpu") < 0.1
    for jump, other in zip(jumped, jumps):
        columns.append(token)
        token = torch.where(jump, other, (token * 5 + 3) % config.vocabulary)
    return torch.stack(columns, 1)


class Trainer:
    """One rank of a training run.

    micro_batches:  per data-parallel rank and step.
    overflows:      (attempt, rank of the last stage) whose part of the loss is set to infinity.
    options:        of `ChainedAdam`.

    losses:    the mean loss of every attempted step, by data-parallel rank. held_out: of every
               evaluation.
    skipped:   attempts that overflowed.
    """

    def __init__(
        self,
        ranks: Ranks,
        config: Config,
        device: str = "cpu",
        micro_batches: int = 2,
        resume: Path | None = None,
        overflows: tuple[tuple[int, int], ...] = (),
        **options,
    ):
        self.ranks, self.config, self.device, self.micro_batches = (
            ranks,
            config,
            device,
            micro_batches,
        )
        self.overflows, self.rank_in_last_stage = (
            overflows,
            ranks.rank - ranks.sizes.world + ranks.sizes.stage,
        )
        with torch.device("cpu"):  # the same initial values on every device
            self.stage = Stage(config, ranks)
        self.stage.to(device)
        self.optimizer = ChainedAdam(
            self.stage.parameters_by_shard(),
            ranks,
            compute_dtype=config.recipe.compute_dtype,
            **options,
        )
        self.losses: list[Tensor] = []
        self.held_out: list[Tensor] = []
        self.skipped: list[int] = []
        if resume is None:
            self.optimizer.refresh()
        else:
            checkpoint.load(resume, self.stage, self.optimizer, ranks)
        self.applied = int(self.optimizer.applied)

    def train(self, attempt: int) -> None:
        """Attempt one step."""
        self.stage.train()
        self.optimizer.zero_grad()
        self.losses.append(self._run(attempt, self.ranks.data.rank(), self.micro_batches, True))
        if self.optimizer.step():
            self.applied += 1
        else:
            self.skipped.append(attempt)

    def evaluate(self) -> None:
        """The loss on held-out text, with weights newly cast from the masters."""
        self.optimizer.refresh()
        self.stage.eval()
        self.held_out.append(self._run(-1, 0, 1, False)[0])

    def save(self, folder: Path) -> None:
        """Every rank must call it, and wait for the others before one of them loads."""
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save(folder, self.stage, self.optimizer, self.ranks)

    def _run(self, step: int, replica: int, count: int, backward: bool) -> Tensor:
        """Mean loss of `count` micro-batches, by data-parallel rank."""
        ranks, config, optimizer = self.ranks, self.config, self.optimizer
        total = torch.zeros((), device=self.device)
        like = torch.empty(
            config.tokens // ranks.sizes.tensor,
            BATCH,
            config.dim,
            dtype=config.dtype,
            device=self.device,
        )

        def forward(micro_batch: int, x: Tensor | None) -> Tensor:
            y = self.stage(x, text(config, step, replica * count + micro_batch).to(self.device))
            if not ranks.is_last:
                return y
            loss = y / count
            if backward and (step, self.rank_in_last_stage) in self.overflows:
                loss = loss * float("inf")
            total.add_(loss.detach())
            return loss * optimizer.loss_scale

        def before(micro_batch: int, which: str) -> None:
            ranks.begin(self.applied, replica * count + micro_batch)
            optimizer.finish([ROWWISE] if which == "forward" else [ROWWISE, COLUMNWISE])

        with torch.set_grad_enabled(backward):
            run_pipeline(ranks, range(count), forward, like, before, backward)
        parts = total.new_empty(ranks.sizes.world)
        all_gather(parts, total.view(1), group=ranks.world)
        return parts[-ranks.sizes.stage :].view(ranks.sizes.data, -1).sum(1)


def train(
    ranks: Ranks,
    config: Config,
    steps: int,
    *,
    first: int | None = None,
    evaluate: int = 0,
    **options,
) -> Trainer:
    """Run steps [first, steps); first: the number of applied steps, by default.

    evaluate:  interval in steps; 0: never. options: of `Trainer`.
    """
    trainer = Trainer(ranks, config, **options)
    for attempt in range(trainer.applied if first is None else first, steps):
        trainer.train(attempt)
        if evaluate and (attempt + 1) % evaluate == 0:
            trainer.evaluate()
    trainer.optimizer.finish()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forward", default="mxfp8")
    parser.add_argument("--backward", default="nvfp4")
    parser.add_argument("--steps", type=int, default=60)
    for name, what in (
        ("pipeline", "stages"),
        ("tensor", "parts of layers, sequences"),
        ("experts", "ranks that share experts"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=what)
    parser.add_argument("--data", type=int, help="default: as many as there are processes for")
    parser.add_argument(
        "--num-experts", type=int, default=0, help="of every other block; 0: none has experts"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cuts", choices=POLICIES, default="even")
    parser.add_argument(
        "--ordered", action="store_true", help="sums in the order of ranks, from gathered summands"
    )
    parser.add_argument(
        "--verify", action="store_true", help="train on virtual ranks too, and compare every loss"
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="gathers of weights run into the next forward and backward",
    )
    parser.add_argument("--transport", choices=("auto", "codes", "highprec"), default="auto")
    parser.add_argument("--stats", choices=("dense", "halo"), default="halo")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    world, cuda = int(os.environ.get("WORLD_SIZE", "0")), torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    data = args.data or max(1, world // (args.pipeline * args.tensor))
    sizes = Sizes(args.pipeline, data, args.tensor, args.experts)
    config = Config(
        fq.recipes.hybrid(args.forward, args.backward), layers=args.layers, experts=args.num_experts
    )

    def fn(ranks: Ranks, save: Path | None = args.save) -> Trainer:
        trainer = train(
            ranks,
            config,
            args.steps,
            resume=args.resume,
            device=device,
            evaluate=EVALUATE,
            policy=args.cuts,
            overlap=args.overlap,
            transport=args.transport,
            stats=args.stats,
        )
        if save is not None:
            trainer.save(save)
        return trainer

    if not world:
        report(on_virtual_ranks(sizes, fn)[0], args.steps)
        return
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    run, differ = on_processes(sizes, fn, args.ordered), []
    if dist.get_rank() == 0:
        report(run, args.steps)
        if args.verify:
            want = on_virtual_ranks(sizes, lambda ranks: fn(ranks, None))[0]
            differ = [
                i
                for i, losses in enumerate(zip(run.losses, want.losses))
                if not torch.equal(*losses)
            ]
            outcome = f"losses differ from step {differ[0]} on" if differ else "equal"
            print(f"{len(run.losses)} steps on virtual ranks: {outcome}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bool(differ))


def report(run: Trainer, steps: int) -> None:
    first, held_out = steps - len(run.losses), iter(run.held_out)
    for step, losses in enumerate(run.losses, first + 1):
        evaluated = f"  held out {next(held_out):.4f}" if step % EVALUATE == 0 else ""
        if step in (first + 1, steps) or evaluated:
            print(f"step {step:>4}  loss {losses.mean():.4f}{evaluated}")
    for kind, shard in run.optimizer.shards.items():
        print(f"{kind}:\n{shard.sync.describe()}" if shard.quantized else f"{kind}: high precision")
    print(fq.receipt())


if __name__ == "__main__":
    main()

"""Train a small GPT on synthetic text with the distributed optimizer.

    torchrun --nproc-per-node 2 -m examples.mini_megatron.train --forward mxfp8 --backward nvfp4 --cuts odd
    python -m examples.mini_megatron.train --ranks 2        # the same in one process: the same losses, bit for bit
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_quant as fq

from .data_parallel import DataParallel
from .flat import POLICIES
from .model import GPT
from .optimizer import DistributedAdam

BATCH, TOKENS, VOCABULARY = 4, 16, 64


@dataclass
class Run:
    """What a training run gives: the mean loss of every attempted step, by data-parallel rank, and its parts."""

    model: GPT
    optimizer: DistributedAdam
    losses: list[Tensor] = field(default_factory=list)
    held_out: list[Tensor] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def batch(step: int, rank: int, micro_batch: int) -> Tensor:
    """Synthetic text, int64 [BATCH, TOKENS + 1]: runs of a fixed permutation of the vocabulary, now and then a random jump."""
    draw, columns = torch.Generator("cpu").manual_seed(((step + 1) * 1009 + rank) * 31 + micro_batch), []
    token, *jumps = torch.randint(VOCABULARY, (TOKENS + 2, BATCH), generator=draw, device="cpu")
    jumped = torch.rand(TOKENS + 1, BATCH, generator=draw, device="cpu") < 0.1
    for jump, other in zip(jumped, jumps):
        columns.append(token)
        token = torch.where(jump, other, (token * 5 + 3) % VOCABULARY)
    return torch.stack(columns, 1)


def train(
    dp: DataParallel, recipe: fq.Recipe, steps: int, *, micro_batches: int = 2, overflows: tuple[tuple[int, int], ...] = (),
    evaluate: bool = False, resume: Path | None = None, first: int | None = None, layers: int = 2, device: str = "cpu",
    **options,
) -> Run:
    """Steps [first, steps) of training; first: as many as the checkpoint has, by default.

    overflows:  (attempt, rank) whose loss is made infinite.
    evaluate:   after every step, with weights made anew from the masters.
    resume:     folder of a checkpoint to go on from.
    options:    of `DistributedAdam`.
    """
    torch.manual_seed(0)
    model = GPT(recipe, VOCABULARY, TOKENS, layers).to(device)
    optimizer = DistributedAdam(model, dp, **options)
    optimizer.load(resume) if resume else optimizer.refresh()
    run = Run(model, optimizer)
    applied = int(optimizer.sync.applied)
    for attempt in range(applied if first is None else first, steps):
        optimizer.zero_grad()
        losses = []
        model.train()
        for rank in dp.played:
            optimizer.playing = rank
            total = torch.zeros((), device=device)
            for micro_batch in range(micro_batches):
                fq.begin_step(applied, micro_batch)
                with fq.token_offset(rank * BATCH * TOKENS):
                    loss = model(batch(attempt, rank, micro_batch).to(device)) / micro_batches
                    if (attempt, rank) in overflows:
                        loss = loss * float("inf")
                    (loss * optimizer.loss_scale).backward()
                total += loss.detach()
            losses.append(total)
        run.losses.append(torch.stack(dp.gathered(losses)))
        if optimizer.step():
            applied += 1
        else:
            run.skipped.append(attempt)
        if evaluate:
            optimizer.refresh()
            with torch.no_grad():
                run.held_out.append(model.eval()(batch(-1, 0, 0).to(device)))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", default="mxfp8")
    parser.add_argument("--backward", default="nvfp4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cuts", choices=POLICIES, default="even")
    parser.add_argument("--reduction", choices=("ordered", "scatter"), default="ordered")
    parser.add_argument("--transport", choices=("auto", "codes", "highprec"), default="auto")
    parser.add_argument("--stats", choices=("dense", "halo"), default="halo")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks that one process plays, without torchrun")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    world, cuda = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dp = DataParallel(world if world > 1 else args.ranks, dist.group.WORLD if world > 1 else None)
    run = train(
        dp, fq.recipes.hybrid(args.forward, args.backward), args.steps, resume=args.resume, device="cuda" if cuda else "cpu",
        evaluate=True, policy=args.cuts, reduction=args.reduction, transport=args.transport, stats=args.stats,
    )
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        run.optimizer.save(args.save)
    if dp.rank == 0:
        first, last = args.steps - len(run.losses), args.steps - 1
        for step in (s for s in range(first, args.steps) if s in (first, last) or s % 10 == 9):
            print(f"step {step + 1:>4}  loss {run.losses[step - first].mean():.4f}  held out {run.held_out[step - first]:.4f}")
        print(run.optimizer.sync.describe())
        print(fq.receipt())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Soak: train with every recipe in turn, with and without disturbances. Losses are bit-equal, and
memory stays flat.

    bash launch/soak.sh [--steps 2000 | --minutes 20] [--turn 20] [--seed 0] [--json out.json]
    [--plot out.png]
    NPROC=1 bash launch/soak.sh --steps 500                 one process, without fully_shard

Train a small model twice from the same values. Both runs change the recipe every `--turn` steps.
The second one is disturbed, at steps that a seed draws, alike on every rank: an exception in a
forward, a backward, an evaluation or before the optimizer's update (caught, and the step repeated);
an evaluation; a checkpoint that is saved and loaded back. After an exception in a backward under
fully_shard, which leaves gradients of plain FSDP2 half reduced, the model is built anew and loads a
checkpoint of before.

Laws. Each loss of the disturbed run has the bits of the other run's. Memory at the ends of cycles
(a cycle: every recipe once) does not grow after the first one: on GPUs neither allocated nor
reserved bytes; on CPUs resident bytes by at most RESIDENT_SHARE, since the heap of a process is
never exactly as large as before.

--minutes: the first run takes a third of them, the second as many steps as the first.
Exit status 1: a law is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_quant as fq
from fsdp_quant import recipes

# an anchor_tolerance: when the guard acts depends on when its sums arrive, and losses on that
NEVER = 1e9
RECIPES = {
    "bf16": recipes.bf16(),
    "fp8_current": recipes.fp8_current(),
    "fp8_delayed": recipes.fp8_delayed(length=4),
    "fp8_row": recipes.fp8_row(),
    "fp8_block": recipes.fp8_block(anchor_tolerance=NEVER),
    "mxfp8": recipes.mxfp8(anchor_tolerance=NEVER),
    "mxfp6": recipes.mxfp6(),
    "mxfp4": recipes.mxfp4(),
    "nvfp4": recipes.nvfp4(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4", anchor_tolerance=NEVER),
    "nvfp4/mxfp8": recipes.hybrid("nvfp4", "mxfp8", anchor_tolerance=NEVER),
    "nvfp4, dequantized": recipes.nvfp4(backward_override="dequantized"),
}
# Disturbances, with their chances per step.
CHANCES = {
    "forward": 0.05,
    "backward": 0.05,
    "optimizer": 0.05,
    "evaluation": 0.02,
    "evaluate": 0.06,
    "checkpoint": 0.02,
}
RESIDENT_SHARE = 0.03
ROWS, WIDTH, LAYERS = 32, 64, 2


class Interrupted(Exception):
    """Raised half-way through a pass."""


class Block(nn.Module):
    """x + down(relu(up(norm(x)))).  [M, WIDTH] -> [M, WIDTH]. 2 * WIDTH + 1 rows: shards cut
    blocks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH + 1),
            nn.Linear(2 * WIDTH + 1, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@dataclass
class Run:
    """What one run leaves. memory: (step, bytes by name) at the end of each turn."""

    losses: list[float] = field(default_factory=list)
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    disturbed: Counter = field(default_factory=Counter)
    seconds: float = 0.0


class Training:
    """A model, its optimizer, and one step of it."""

    def __init__(self, device: torch.device, seed: int, recipe: fq.Recipe):
        self.device, self.sharded = device, dist.is_initialized() and dist.get_world_size() > 1
        torch.manual_seed(seed)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.model = nn.Sequential(*self.blocks, nn.Linear(WIDTH, 8)).to(device)
        self.teacher = torch.randn(WIDTH, 8).to(device)
        fq.convert(self.model, recipe)
        if self.sharded:
            policy = MixedPrecisionPolicy(
                torch.bfloat16 if device.type == "cuda" else None, torch.float32
            )
            for block in self.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)

    def loss(self, step: int) -> Tensor:
        rank = dist.get_rank() if self.sharded else 0
        x = torch.randn(
            ROWS, WIDTH, generator=torch.Generator().manual_seed(step * 1009 + rank)
        ).to(self.device)
        with torch.autocast(
            "cuda", torch.bfloat16, enabled=self.device.type == "cuda" and not self.sharded
        ):
            return (self.model(x).float() - torch.tanh(x @ self.teacher)).square().mean()

    def step(self, step: int, interrupted: str = "", where: int = 0) -> float:
        """One step; interrupted: the pass that raises `Interrupted`, in block `where`."""
        fq.begin_step(step)
        with _raising(self, interrupted, where):
            loss = self.loss(step)
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def recover(self) -> None:
        """What a trainer does after an exception in a step: drop its gradients and statistics, and
        reshard."""
        self.optimizer.zero_grad()
        fq.skip_step()
        self.reshard()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def evaluate(self, interrupted: str = "", where: int = 0) -> None:
        self.model.eval()
        try:
            with _raising(self, interrupted, where):
                self.loss(-1)
        finally:
            self.model.train()

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return {
            "model": model,
            "optimizer": optimizer,
            "fsdp_quant": {f"rank_{rank}": fq.state_dict(self.model)},
        }

    def save(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        fq.load_state_dict(self.model, *state["fsdp_quant"].values())

    def spoil(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(2)


def _raise(*_) -> None:
    raise Interrupted


@contextlib.contextmanager
def _raising(training: Training, what: str, where: int) -> Iterator[None]:
    block = training.blocks[where]
    hook = {
        "forward": lambda: block.down.register_forward_pre_hook(_raise),
        "evaluation": lambda: block.down.register_forward_pre_hook(_raise),
        "backward": lambda: block.up.register_full_backward_pre_hook(_raise),
        "optimizer": lambda: training.optimizer.register_step_pre_hook(_raise),
    }.get(what)
    handle = hook and hook()
    try:
        yield
    finally:
        if handle:
            handle.remove()


def disturb(
    training: Training, step: int, args: argparse.Namespace, run: Run, path: Path
) -> Training:
    """What is drawn for a step, before it; returns what to go on with."""
    draw = random.Random(f"{args.seed}/{step}")
    for what, chance in CHANCES.items():
        if draw.random() >= chance:
            continue
        run.disturbed[what] += 1
        if what == "evaluate":
            training.evaluate()
        elif what == "checkpoint":
            training.save(path)
            training.spoil()
            training.load(path)
        else:
            training = interrupted(training, what, draw.randrange(LAYERS), step, args, path)
    return training


def interrupted(
    training: Training, what: str, where: int, step: int, args: argparse.Namespace, path: Path
) -> Training:
    """Raise in a pass, catch it, and recover."""
    rebuilt = what == "backward" and training.sharded
    if rebuilt:
        training.save(path)
    try:
        training.evaluate(what, where) if what == "evaluation" else training.step(step, what, where)
    except Interrupted:
        pass
    else:
        raise RuntimeError(f"step {step}: nothing was raised in the {what}")
    if rebuilt:
        training = Training(training.device, args.seed, recipe_at(step, args))
        training.load(path)
    elif what == "evaluation":
        training.reshard()
    else:
        training.recover()
    return training


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that this process has: of the device, or resident."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
    }


def trained(
    args: argparse.Namespace, device: torch.device, disturbed: bool, goes_on: Callable[[int], bool]
) -> Run:
    """One run, until `goes_on(step)` is false at the end of a turn."""
    run, began, step = Run(), time.monotonic(), 0
    fq.begin_step(0)
    training = Training(device, args.seed, recipe_at(0, args))
    with tempfile.TemporaryDirectory() as own:
        path = Path(shared(own)) / "checkpoint"
        while goes_on(step):
            fq.set_recipe(training.model, recipe_at(step, args))
            for step in range(step, step + args.turn):
                if disturbed and step:  # torch steps an optimizer without state once as it is saved
                    training = disturb(training, step, args, run, path)
                run.losses.append(training.step(step))
            step += 1
            run.memory.append((step, memory(device)))
        if dist.is_initialized():
            dist.barrier()
    run.seconds = time.monotonic() - began
    return run


def recipe_at(step: int, args: argparse.Namespace) -> fq.Recipe:
    return list(RECIPES.values())[step // args.turn % len(RECIPES)]


def shared(value):
    """Rank 0's value."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def growth(run: Run, turn: int) -> dict[str, int]:
    """Bytes that the last cycle ends with beyond the most of the cycles before, the first one left
    out; none: of two or fewer."""
    ends = [of for step, of in run.memory if step % (turn * len(RECIPES)) == 0][1:]
    return (
        {name: ends[-1][name] - max(of[name] for of in ends[:-1]) for name in ends[0]}
        if len(ends) > 1
        else {}
    )


def broken(control: Run, run: Run, turn: int) -> list[str]:
    """The laws that a disturbed run breaks, a sentence each."""
    found = [
        f"step {step}: loss {b!r} of the disturbed run, {a!r} of the other"
        for step, (a, b) in enumerate(zip(control.losses, run.losses))
        if a != b
    ][:3]
    for name, grown in growth(run, turn).items():
        most = RESIDENT_SHARE * run.memory[0][1][name] if name == "resident" else 0
        if grown > most:
            found.append(f"{name} memory grew by {grown:,} bytes; {most:,.0f} are allowed")
    return found


def report(control: Run, run: Run, args: argparse.Namespace, device: torch.device) -> dict:
    found = broken(control, run, args.turn)
    facts = [None]
    if dist.is_initialized():
        facts = [None] * dist.get_world_size()
        dist.all_gather_object(facts, found)
        found = [f"rank {rank}: {text}" for rank, texts in enumerate(facts) for text in texts]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ranks": len(facts),
        "torch": torch.__version__,
        "steps": len(run.losses),
        "turn": args.turn,
        "seed": args.seed,
        "recipes": list(RECIPES),
        "broken": found,
        "disturbed": dict(run.disturbed),
        "growth": growth(run, args.turn),
        "seconds": [control.seconds, run.seconds],
        "memory": run.memory,
        "losses": run.losses,
        "losses_of_the_other": control.losses,
    }


def plot(facts: dict, path: str) -> None:
    """Losses, and memory at the end of each turn."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    left.semilogy(facts["losses_of_the_other"], linewidth=3, alpha=0.4, label="undisturbed")
    left.semilogy(facts["losses"], linewidth=0.7, label="disturbed")
    for name in facts["memory"][0][1]:
        right.plot(
            [step for step, _ in facts["memory"]],
            [of[name] / 2**20 for _, of in facts["memory"]],
            label=name,
        )
    left.set(xlabel="step", ylabel="loss")
    most = max(max(of.values()) for _, of in facts["memory"]) / 2**20
    right.set(xlabel="step", ylabel="MiB, rank 0", ylim=(0, 1.3 * most))
    for axes in (left, right):
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def soak(args: argparse.Namespace, device: torch.device) -> dict:
    """Both runs and what they say, on every rank."""
    began = time.monotonic()
    end = args.minutes and began + args.minutes * 20
    control = trained(
        args,
        device,
        False,
        lambda step: shared(time.monotonic() < end if end else step < args.steps),
    )
    run = trained(args, device, True, lambda step: step < len(control.losses))
    return report(control, run, args, device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/soak.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="instead of --steps")
    parser.add_argument("--turn", type=int, default=20, help="steps per recipe, default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            device_id=device if device.type == "cuda" else None,
        )
    facts = soak(args, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if args.json:
            Path(args.json).write_text(json.dumps(facts))
        if args.plot:
            plot(facts, args.plot)
        said = ", ".join(f"{count} x {what}" for what, count in facts["disturbed"].items())
        grown = (
            ", ".join(f"{name} {size:+,} B" for name, size in facts["growth"].items())
            or "not known of so few cycles"
        )
        print(
            f"{facts['ranks']} x {facts['device']}, {facts['steps']} steps, {len(RECIPES)} "
            f"recipes, {args.turn} steps each in turn"
        )
        print(
            f"disturbed: {said}; {facts['seconds'][0]:.0f} s undisturbed, "
            f"{facts['seconds'][1]:.0f} s disturbed"
        )
        print(f"growth after the first cycle: {grown}")
        print(
            "\n".join(facts["broken"])
            or "every loss has the bits of the undisturbed run, and memory is flat"
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(bool(facts["broken"]))


if __name__ == "__main__":
    sys.exit(main())

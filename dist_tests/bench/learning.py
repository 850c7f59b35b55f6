# SPDX-License-Identifier: Apache-2.0
"""A small language task that separates recipes: python -m dist_tests.bench.learning [--arms mxfp8
nvfp4] [--seeds 0 1] [--jobs 16].

Two blocks of attention and SwiGLU learn a synthetic language: a hidden topic chooses one of several
Zipf-distributed bigram tables, and half of the sequences repeat a span. Data and initial values are
the same for every arm of a seed, so an arm is its gap to bf16 of that seed, in nats on a fixed
validation set. Gaps below .003 mean nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from fsdp_quant import recipes
from fsdp_quant.formats import format_of
from fsdp_quant.ops.gradient_codes import GRADIENT_FORMATS
from fsdp_quant.quantizer import HybridQuantizer

from .rounding import SIMULATIONS, Simulation
from .sent_gradients import backward_of_ranks


@dataclass(frozen=True)
class Size:
    """Of the task: the defaults take a minute or two an arm on two cores."""

    width: int = 128
    heads: int = 4
    layers: int = 2
    vocabulary: int = 64
    tokens: int = 64
    sequences: int = 16
    steps: int = 400
    warmup: int = 50
    rate: float = 4e-3
    validation: int = 1024  # sequences
    topics: int = 10
    exponent: float = 2.0  # of Zipf


class Sent(NamedTuple):
    """High precision, whose gradients are those that ranks send in this format."""

    format: str


class Block(nn.Module):
    """Causal attention and SwiGLU, pre-normalized, [B, S, D]."""

    def __init__(self, size: Size):
        super().__init__()
        d = size.width
        self.heads, self.norm, self.norm2 = size.heads, nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((d, 2 * d), (d, 2 * d), (2 * d, d))
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Logits [B, S, V] of token ids [B, S]. The head stays in high precision in every arm."""

    def __init__(self, size: Size):
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(size.vocabulary, size.width),
            nn.Embedding(size.tokens, size.width),
        )
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = (
            nn.RMSNorm(size.width),
            nn.Linear(size.width, size.vocabulary, bias=False),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(
            self.norm(self.blocks(self.embed(ids) + self.place.weight[: ids.shape[1]]))
        )


class Language:
    """Sequences of a hidden topic's bigrams; half of them repeat a span."""

    def __init__(self, size: Size):
        g = torch.Generator().manual_seed(77)
        zipf = torch.arange(1, size.vocabulary + 1).float() ** -size.exponent
        order = torch.rand(size.topics, size.vocabulary, size.vocabulary, generator=g).argsort(-1)
        self.table, self.size = zipf[order] / zipf.sum(), size

    def sample(self, count: int, seed: int) -> Tensor:
        """int64 [count, tokens + 1]."""
        g, length = torch.Generator().manual_seed(seed), self.size.tokens + 1
        topic = torch.randint(len(self.table), (count,), generator=g)
        ids = torch.randint(self.size.vocabulary, (count, 1), generator=g)
        for _ in range(length - 1):
            ids = torch.cat(
                (ids, torch.multinomial(self.table[topic, ids[:, -1]], 1, generator=g)), 1
            )
        span = length // 4
        for i in range(0, count, 2):
            start = int(torch.randint(1, span, (), generator=g))
            later = int(torch.randint(start + span, length - span + 1, (), generator=g))
            ids[i, later : later + span] = ids[i, start : start + span]
        return ids


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def validation_loss(arm: fq.Recipe | Simulation | Sent, size: Size, seed: int) -> float:
    """Nats a token after training one arm."""
    torch.manual_seed(seed)
    model, language = Model(size), Language(size)
    if isinstance(arm, Simulation):
        arm.replace_layers(model)
    elif not isinstance(arm, Sent):
        fq.convert(model, arm, skip=["head"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(size.steps):
        fq.begin_step(step, seed=seed)
        warm, done = (
            (step + 1) / size.warmup,
            (step - size.warmup) / max(1, size.steps - size.warmup),
        )
        optimizer.param_groups[0]["lr"] = size.rate * (
            warm if warm < 1 else 0.5 + 0.5 * math.cos(math.pi * max(0.0, done))
        )
        ids = language.sample(size.sequences, 1000 * (seed + 1) + step)
        if isinstance(arm, Sent):
            backward_of_ranks(model, ids, arm.format, step, loss_of)
        else:
            loss_of(model, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = [
            loss_of(model, part).item() for part in language.sample(size.validation, 5).split(64)
        ]
    return sum(parts) / len(parts)


# Arms #


def row_scaled_e2m1(role):
    """Broken: 4-bit elements with one scale a row."""
    return format_of("fp8_row", element="e2m1")


def tensor_scaled_e2m1(role):
    """Broken: 4-bit elements with one scale a tensor."""
    return format_of("fp8_tensor", element="e2m1")


def mxfp6_e3m2(role):
    return format_of("mxfp6", element="e3m2")


def nvfp4_forward(role):
    """The forward of nvfp4, a bf16 backward."""
    return recipes.hybrid("nvfp4", "identity").hybrid(role)


def nvfp4_forward_square(role):
    """The forward of nvfp4 with the weights that nvfp4 has, a bf16 backward."""
    forward = "nvfp4_16x16" if role.tensor_type == "weight" else "nvfp4"
    return "identity" if role.tensor_type == "grad_output" else HybridQuantizer(forward, "identity")


def nvfp4_rounded_inputs(role):
    """Broken: stochastic rounding of inputs too, in both directions."""
    if role.tensor_type == "weight":
        return "nvfp4_16x16"
    hybrid = recipes.nvfp4().hybrid(fq.Role(role.module_type, "grad_output", role.name))
    return HybridQuantizer(hybrid.rowwise, hybrid.columnwise)


ARMS = {
    "fp8_current": recipes.fp8_current(),
    "fp8_delayed": recipes.fp8_delayed(),
    "fp8_row": recipes.fp8_row(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "mxfp6": recipes.mxfp6(),
    "mxfp6 e3m2": fq.CustomRecipe(mxfp6_e3m2),
    "mxfp4": recipes.mxfp4(),
    "nvfp4": recipes.nvfp4(),
    "nvfp4 row": recipes.nvfp4(scale_per="row"),
    "nvfp4 4over6": recipes.nvfp4(four_over_six="mse"),
    "nvfp4 4over6 weights": recipes.nvfp4(four_over_six="mse-weights"),
    "nvfp4 row 4over6": recipes.nvfp4(scale_per="row", four_over_six="mse"),
    "nvfp4 backward": recipes.hybrid("identity", "nvfp4"),
    "nvfp4 forward": fq.CustomRecipe(nvfp4_forward),
    "nvfp4 forward 16x16": fq.CustomRecipe(nvfp4_forward_square),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4 fp8_exact": recipes.nvfp4(scale_rule="fp8_exact"),
    "mxfp8/nvfp4 fp8_exact": recipes.hybrid("mxfp8", "nvfp4", scale_rule="fp8_exact"),
    "qat mxfp4": recipes.qat("mxfp4"),
    "qat nvfp4": recipes.qat("nvfp4"),
    "broken: a scale a tensor": fq.CustomRecipe(tensor_scaled_e2m1),
    "broken: a scale a row": fq.CustomRecipe(row_scaled_e2m1),
    "broken: inputs rounded": fq.CustomRecipe(nvfp4_rounded_inputs),
    **{f"gradients {format}": Sent(format) for format in GRADIENT_FORMATS},
    **SIMULATIONS,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="arms that train at the same time")
    for name, value in Size.__dataclass_fields__.items():
        parser.add_argument(f"--{name}", type=type(value.default), default=value.default)
    args = parser.parse_args()
    size = Size(**{name: getattr(args, name) for name in Size.__dataclass_fields__})
    arms = {"bf16": recipes.identity()} | {arm: ARMS[arm] for arm in args.arms}
    results, printed = {name: {} for name in arms}, set()
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with ProcessPoolExecutor(
        args.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, [threads]
    ) as pool:
        order = [(name, seed) for name in ("bf16", *reversed(args.arms)) for seed in args.seeds]
        made = {pool.submit(_timed, arms[name], size, seed): (name, seed) for name, seed in order}
        for future in as_completed(made):
            name, seed = made[future]
            results[name][seed] = future.result()
            done = [n for n, found in results.items() if len(found) == len(args.seeds)]
            for name in set(done) - printed if "bf16" in done else ():
                printed.add(name)
                losses, seconds = zip(*(results[name][seed] for seed in args.seeds))
                gaps = " ".join(
                    f"{loss - results['bf16'][seed][0]:+.4f}"
                    for seed, loss in zip(args.seeds, losses)
                )
                shown, mean = (
                    " ".join(f"{loss:.4f}" for loss in losses),
                    sum(seconds) / len(seconds),
                )
                print(
                    f"{name:24} loss {shown}  gap {gaps}  {mean:.0f} s of processors an arm",
                    flush=True,
                )


def _timed(arm: fq.Recipe | Simulation | Sent, size: Size, seed: int) -> tuple[float, float]:
    """(nats a token, seconds of processors)."""
    started = time.process_time()
    return validation_loss(arm, size, seed), time.process_time() - started


if __name__ == "__main__":
    main()

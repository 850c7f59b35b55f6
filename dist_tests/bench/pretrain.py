# SPDX-License-Identifier: Apache-2.0
"""Pretraining of a Llama, each recipe and bf16 of the same data and initial values: what a step
costs and what the loss becomes, in one run.

    python -m dist_tests.bench.pretrain [--size 110m|350m|1b] [--model moe] [--arms bf16,mxfp8,...]
                                        [--steps 1250] [--data 'DIR/**/*.py'] [--json out.json]
                                        [--plot out.png] [--checkpoint DIR] [--seconds 500]
    torchrun --nproc-per-node 4 -m dist_tests.bench.pretrain --size 1b  # fully_shard
    python -m dist_tests.bench.pretrain --size tiny --steps 20      # a smoke test, on a CPU too
    python -m dist_tests.bench.pretrain --table out.json other.json # of runs before; --plot draws
                                                                    # them

transformers' LlamaForCausalLM over bytes, or with --model moe its Qwen3MoeForCausalLM of as many
active weights (EXPERTS), whose loads are printed too: weights in fp32 under torch.autocast
(sharded, and experts also on one GPU: bf16 computation, fp32 reduction), every layer compiled,
fused AdamW, 32768 tokens a step, learning rate by a cosine after a warm-up. The text is the Python
files of the installed packages; every fiftieth file is for validation. Arms: bf16, "torchao" and
"torchao_rowwise" (its float8), the recipes of `bench.linear`, "tail" (nvfp4 whose last 15 % of the
steps are bf16; "tail_exact" of nvfp4_exact), "nvfp4+row", "nvfp4+4over6", "nvfp4+flat" (weights in
blocks of 1 x 16), "nvfp4+forward" (a backward in high precision) and "nvfp4+ends" (mxfp8 in the
last two blocks), any of them with "/two", where the underflow check knows two rungs, with
"/unchecked", without the check, with "/graphed", captured by `fq.graphed`, with "/bf16-grads",
"/fp8_1x128-grads", .., whose gradients are those that 4 ranks would send so
(`fq.set_gradient_reduction`; bf16 loses nothing and is the base of the others), with "@0.9", of
that share of the steps, and with ":1", another seed of initial values and of the order of the data.

--checkpoint and --seconds: the process ends after so many seconds, when an arm next validates; the
next call goes on there, with the same bits, and omits arms that --json holds.

Columns: the loss of the validation set (nats a byte), its gap to bf16 of that seed, in nats and as
a share, and the law: at most LIMITS, or the difference of bf16's two seeds. ms of a step: the
median of intervals of 100, without validation and without the first steps of a process, which
compile; what it is to bf16's; and "matched": that, times the share of bf16's steps after which
bf16 has the arm's loss (a line through bf16 and the longest "bf16@"). Peak GiB, and the products
that the guard moved, of all. --plot: the losses over tokens and over seconds of steps.
"load": tokens of the busiest expert over the mean, mean of the layers, at each validation.
"e4m3" of a bf16 arm in the JSON is what a second rounding of its weights costs (`cost_of_e4m3`).

Exit status 1: an arm failed, or is beyond its law.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import fsdp_quant as fq
from dist_tests.bench.clock import first_line
from dist_tests.bench.linear import RECIPES
from dist_tests.bench.ranks import gather_ahead
from dist_tests.bench.sent_gradients import RANKS, backward_of_ranks
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.linear.plan import EXACT, GemmPlan
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.models.transformers_masks import trust_counted_positions
from fsdp_quant.ops.layout import ANCHORED_TENSOR

SIZES = {  # width, layers, heads, hidden
    "tiny": (64, 2, 2, 128),
    "110m": (768, 12, 12, 2816),
    "350m": (1024, 24, 16, 3392),
    "1b": (2048, 20, 16, 5632),
}
EXPERTS = {"tiny": (8, 2, 64), "110m": (32, 4, 704)}  # experts, of a token, hidden of each
SEQUENCE, BATCH, VALIDATION = 1024, 32, 16  # bytes, sequences a step, batches
RATE, WARMUP, DECAY, CLIP = 6e-4, 100, 0.1, 1.0
TAIL = 0.85
INTERVAL, UNTIMED = 100, 5  # steps between validations; first steps of a process
# Of bf16's loss, what an arm may lose.
LIMITS = {"nvfp4": 0.016, "tail": 0.010, "hybrid": 0.016}  # with scales of any rule
OPTIONS = {  # of nvfp4
    "row": {"scale_per": "row"},
    "4over6": {"four_over_six": "mse"},
    "flat": {"square_blocks": False},
    "forward": {"backward_override": "high_precision"},
    "ends": {},
}
ENDS = 14  # of the last layers, mxfp8 with "ends": two of twelve blocks
LIMIT = 0.0025
STARTED = time.perf_counter()
ARMS = ("bf16", "bf16:1", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "hybrid", "nvfp4", "tail")


class Arm(NamedTuple):
    """What the name of an arm says: NAME[/OPTION][..][@SHARE][:SEED]."""

    name: str
    options: tuple[str, ...]
    share: float
    seed: int

    @property
    def sent_as(self) -> str | None:
        return next((o.removesuffix("-grads") for o in self.options if "-grads" in o), None)

    @staticmethod
    def of(text: str) -> Arm:
        rest, _, seed = text.partition(":")
        rest, _, share = rest.partition("@")
        name, *options = rest.split("/")
        return Arm(name, tuple(options), float(share or 1), int(seed or 0))


def size_of(args: argparse.Namespace) -> str:
    return args.size if args.model == "llama" else f"{args.size} {args.model}"


def built(args: argparse.Namespace) -> LlamaForCausalLM | Qwen3MoeForCausalLM:
    width, layers, heads, hidden = SIZES[args.size]
    sizes = {
        "vocab_size": 256,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
    }
    if args.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=hidden))
    experts, of_token, hidden = EXPERTS[args.size]
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            head_dim=width // heads,
            num_experts=experts,
            num_experts_per_tok=of_token,
            moe_intermediate_size=hidden,
            norm_topk_prob=True,
        )
    )


def convert(model: LlamaForCausalLM, arm: Arm, steps: int) -> bool:
    """Convert the model; False: it stays in bf16, or is a peer's."""
    name, unchecked = arm.name, "unchecked" in arm.options
    if name.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(name.partition("_")[2] or "tensorwise")
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, path: path != "lm_head"
        )
        return False
    if name == "bf16":
        return False
    _, *options = name.split("+")
    if name.startswith("tail"):
        base = RECIPES[name.replace("tail", "nvfp4")]()
        recipe = recipes.schedule(base, (TAIL, 1.0, recipes.identity()), total_steps=steps)
    elif options:
        recipe = recipes.nvfp4(**{k: v for option in options for k, v in OPTIONS[option].items()})
        if "ends" in options:
            recipe = recipes.per_layer(recipe, last=(ENDS, "mxfp8"))
    else:
        recipe = RECIPES[name](**({"anchor_tolerance": 1e9} if unchecked else {}))
    fq.convert(model, recipe, ["lm_head"])
    return True


@contextlib.contextmanager
def two_rungs(enabled: bool = True) -> Iterator[None]:
    """Let the underflow check move a GEMM from its tensor exponent straight to exact scales."""
    next_rung = GemmPlan.next_rung
    if enabled:
        GemmPlan.next_rung = lambda plan, product, is_shared: (
            None if plan.rung(product) == EXACT else EXACT
        )
    try:
        yield
    finally:
        GemmPlan.next_rung = next_rung


def text(pattern: str | None, device: torch.device, most: int = 2**28) -> tuple[Tensor, Tensor]:
    """Bytes to train on and to validate with, uint8."""
    pattern = pattern or f"{sysconfig.get_paths()['purelib']}/**/*.py"
    parts: tuple[bytearray, bytearray] = bytearray(), bytearray()
    for i, path in enumerate(sorted(glob.glob(pattern, recursive=True))):
        with open(path, "rb") as file:
            parts[i % 50 == 0].extend(file.read(most - len(parts[0])))
        if len(parts[0]) >= most:
            break
    if min(map(len, parts)) <= SEQUENCE:
        sizes = " and ".join(str(len(part)) for part in parts)
        raise ValueError(
            f"{pattern} has {sizes} bytes to train on and to validate with; give another --data"
        )
    return tuple(torch.frombuffer(part, dtype=torch.uint8).to(device) for part in parts)


def batch(data: Tensor, sequences: int, g: torch.Generator) -> Tensor:
    """Rows of bytes [sequences, SEQUENCE + 1]."""
    starts = torch.randint(0, len(data) - SEQUENCE - 1, (sequences, 1), generator=g)
    return data[(starts + torch.arange(SEQUENCE + 1)).to(data.device)].long()


def loss_of(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def of_rank(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else rows


def validated(model: LlamaForCausalLM, data: Tensor, sequences: int) -> float:
    model.eval()
    g = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        losses = [loss_of(model, of_rank(batch(data, sequences, g))) for _ in range(VALIDATION)]
    loss = torch.stack(losses).mean()
    if dist.is_initialized():
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        loss /= dist.get_world_size()
    model.train()
    return loss.item()


@torch.no_grad()
def load_of(model: nn.Module, data: Tensor, sequences: int) -> list[float]:
    """[tokens of the busiest expert over the mean, mean of the layers]; [] of a dense model."""
    routers = [m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]
    if not routers:
        return []
    counts: list[Tensor] = []

    def count(router: nn.Module, _, out: tuple[Tensor, ...]) -> None:
        counts.append(out[-1].flatten().bincount(minlength=router.num_experts))

    hooks = [router.register_forward_hook(count) for router in routers]
    with torch.compiler.set_stance("force_eager"):
        loss_of(model, of_rank(batch(data, sequences, torch.Generator().manual_seed(1234))))
    for hook in hooks:
        hook.remove()
    tokens = torch.stack(counts).float()
    if dist.is_initialized():
        dist.all_reduce(tokens)
    return [(tokens.amax(1) / tokens.mean(1)).mean().item()]


def folder_of(args: argparse.Namespace, arm: str) -> Path | None:
    return None if args.checkpoint is None else Path(args.checkpoint) / arm.replace("/", "_")


class Progress:
    """Where an arm is, in a folder (None: nowhere): what its curve is and what would go on."""

    def __init__(self, folder: Path | None, model, optimizer, data: torch.Generator, own: bool):
        self.folder, self.model, self.optimizer, self.data = folder, model, optimizer, data
        self.own = {"train_state": fq.steps.TrainingState(model)} if own else {}
        self.step, self.curve, self.why = 0, [], []  # curve: step, loss, seconds
        if folder is not None and (folder / "run.json").exists():
            state = self._state()
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["moments"]
            )
            data.set_state(state["data"])
            self.curve, self.why = json.loads((folder / "run.json").read_text())
            self.step = self.curve[-1][0]

    def _state(self) -> dict:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "moments": moments, "data": self.data.get_state(), **self.own}

    def save(self) -> None:
        if self.folder is not None:
            dcp.save(self._state(), checkpoint_id=self.folder)
            if not dist.is_initialized() or dist.get_rank() == 0:
                (self.folder / "run.json").write_text(json.dumps([self.curve, self.why]))


def trained(arm: str, args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict | None:
    """One arm: its losses, times and moved products. None: its time was over before its steps."""
    what = Arm.of(arm)
    name, options, share, seed = what
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    steps = round(args.steps * share)
    sequences = RANKS * ranks if args.size == "tiny" else BATCH
    device = data[0].device
    torch.manual_seed(seed)
    torch.compiler.reset()
    counters.reset()
    model = built(args).to(device)
    trust_counted_positions(model)  # in all arms (bench.llama)
    converted = convert(model, what, steps)
    for layer in model.model.layers:
        layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    if dist.is_initialized():
        for module in (*model.model.layers, model):
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(module, mp_policy=policy)
        gather_ahead(model.model.layers)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (0.9, 0.95), weight_decay=DECAY, fused=device.type == "cuda"
    )

    def train(rows: Tensor, step: int = 0) -> Tensor:
        if what.sent_as:
            loss = backward_of_ranks(model, rows, what.sent_as, step, loss_of)
        else:
            loss = loss_of(model, rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if "graphed" in options:
        train = fq.graphed(train, model, optimizer, UNTIMED)
    g = torch.Generator().manual_seed(seed)
    done, timed, began = Progress(folder_of(args, arm), model, optimizer, g, converted), 0, 0.0
    first = done.step
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(first, steps):
        if step in (first + UNTIMED, done.step):
            synchronize(device)
            timed, began = step, time.perf_counter()
        rate = RATE * min(
            1, (step + 1) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        )
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        rows = of_rank(batch(data[0], sequences, g))
        loss = train(rows, step) if what.sent_as else train(rows)
        if step % 10 == 9:  # the host runs ahead of nine
            loss.item()
        if step % INTERVAL != INTERVAL - 1 and step != steps - 1:
            continue
        synchronize(device)
        took = (time.perf_counter() - began) / (step + 1 - timed) * (step + 1 - done.step)
        seconds = took + (done.curve[-1][2] if done.curve else 0)
        done.step = step + 1
        loss_and_load = validated(model, data[1], sequences), *load_of(model, data[1], sequences)
        done.curve.append((done.step, loss_and_load[0], seconds, *loss_and_load[1:]))
        said = ", load ".join(map("{:.4f}".format, loss_and_load))
        say(f"{arm}: step {done.step} of {steps}, validation {said}")
        moved = [row for row in counters.of("moved") if not row[2].startswith("as for")]
        if done.step < steps and is_over(args.seconds, device):
            done.why += [" ".join(row) for row in moved]
            done.save()
            return None
    modules = converted_modules(model) if converted else {}
    why_eager = getattr(train, "why_eager", None)  # of a step that was not captured
    points = [(0, 0.0, 0.0), *done.curve]
    each = [(b[2] - a[2]) / (b[0] - a[0]) * 1e3 for a, b in zip(points, points[1:])]
    return {
        "arm": arm,
        "size": size_of(args),
        "steps": steps,
        "tokens": steps * sequences * SEQUENCE,
        "curve": done.curve,
        "loss": done.curve[-1][1],
        "ms": statistics.median(each),
        "products": 3 * len(modules),
        "moved": sum(len(m.plan.moved) for m in modules.values()),
        "why": done.why + [" ".join(row) for row in moved] + ([why_eager] if why_eager else []),
        "e4m3": cost_of_e4m3(model) if name == "bf16" and not dist.is_initialized() else None,
        "peak": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ranks": ranks,
    }


@torch.no_grad()
def cost_of_e4m3(model: LlamaForCausalLM) -> dict[str, list[float]]:
    """How much larger the errors of trained weights in NVFP4 become by the second rounding of
    `Format.becomes_e4m3`: [mean, largest] over the linear layers, by format."""
    costs: dict[str, list[float]] = {"nvfp4": [], "nvfp4_16x16": []}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.bfloat16()
        for fmt, found in costs.items():
            codes = fq.Quantizer(fmt).quantize(weight).rowwise
            once = codes.dequantize(torch.float32) - weight.float()
            twice = codes.to_gemm_operand(ANCHORED_TENSOR).dequantize(torch.float32)
            found.append(float((twice - weight.float()).norm() / once.norm()))
    return {fmt: [statistics.mean(of), max(of)] for fmt, of in costs.items()}


def law(arm: dict, runs: Sequence[dict]) -> tuple[float | None, float | None]:
    """(gap to bf16 of its seed, what it may be)."""
    name, _, share, seed = Arm.of(arm["arm"])
    bases = {
        of.seed: r["loss"]
        for r in runs
        if (of := Arm.of(r["arm"])).name == "bf16" and of.share == share and same(r, arm)
    }
    if seed not in bases or name == "bf16":
        return None, None
    base, noise = bases[seed], max(bases.values()) - min(bases.values())
    share_of = LIMITS.get(name.partition("+")[0].removesuffix("_exact"), LIMIT)
    return arm["loss"] - base, max(noise, share_of * base)


def same(a: dict, b: dict) -> bool:
    def facts(run: dict) -> tuple:
        _, options, share, _ = Arm.of(run["arm"])
        tokens, graphed = round(run["tokens"] / share, -4), "graphed" in options
        return run["size"], tokens, graphed, run["device"], run.get("ranks", 1)

    return facts(a) == facts(b)


def speed(arm: dict, runs: Sequence[dict]) -> tuple[float | None, float | None]:
    """(bf16's ms of a step to the arm's, the same times the share of bf16's steps after which bf16
    has the arm's loss)."""
    bases = {
        of.share: r
        for r in runs
        if (of := Arm.of(r["arm"])).name == "bf16" and of.seed == Arm.of(arm["arm"]).seed
        if same(r, arm)
    }
    if 1 not in bases:
        return None, None
    ratio, shorter = bases[1]["ms"] / arm["ms"], sorted(bases)[-2:]
    if len(shorter) < 2:
        return ratio, None
    share, loss = shorter[0], bases[1]["loss"]
    lost = (arm["loss"] - loss) / (bases[share]["loss"] - loss) * (1 - share)
    return ratio, ratio * (1 - lost)


def table(runs: Sequence[dict]) -> bool:
    """Print what was measured; whether all arms keep to their law."""
    kept = True
    print(
        f"\n{'arm':16}{'tokens':>12}{'loss':>9}{'gap':>9}{'share':>9}{'at most':>9}"
        f"{'ms':>8}{'x bf16':>8}{'matched':>9}{'peak':>8}  moved  device"
    )

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for run in runs:
        gap, most = law(run, runs)
        share = None if gap is None else gap / (run["loss"] - gap)
        ratio, matched = speed(run, runs)
        said = [shown(gap, "+.4f"), shown(share, "+.2%"), shown(most, ".4f")]
        kept &= gap is None or gap <= most
        beyond = "  beyond its law" if gap is not None and gap > most else ""
        print(
            f"{run['arm']:16}{run['tokens']:12,}{run['loss']:9.4f}"
            + "".join(f"{value:>9}" for value in said)
            + f"{run['ms']:8.1f}{shown(ratio, '.3f'):>8}{shown(matched, '.3f'):>9}"
            + f"{shown(run['peak'], '.1f'):>8}  {run['moved']} of {run['products']}  "
            + f"{run.get('ranks', 1)} x {run['device']}{beyond}"
        )
    for run in runs:
        if loads := [f"{row[3]:.2f}" for row in run["curve"] if len(row) > 3]:
            print(f"{run['arm']:16}load of the busiest expert: {' '.join(loads)}")
    return kept


def plot(runs: Sequence[dict], path: str) -> None:
    """Validation loss by tokens and by seconds of steps, and its gap to bf16 of the same seed; the
    band is that of bf16's seeds."""
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    colors, late = pyplot.get_cmap("tab20").colors, []
    for i, run in enumerate(runs):
        name, _, share, seed = Arm.of(run["arm"])
        tokens = [row[0] * run["tokens"] / run["steps"] / 1e6 for row in run["curve"]]
        losses = [row[1] for row in run["curve"]]
        as_arm = {"label": run["arm"], "color": colors[i % len(colors)]}
        left.plot(tokens, losses, **as_arm)
        if len(run["curve"][0]) > 2:
            middle.plot([row[2] for row in run["curve"]], losses, **as_arm)
        same_seeds = [
            r for r in runs if Arm.of(r["arm"])[:1] + Arm.of(r["arm"])[2:] == ("bf16", share, seed)
        ]
        base = next((r for r in same_seeds if same(r, run)), None)
        if base is not None and base is not run:
            gaps = [loss - row[1] for loss, row in zip(losses, base["curve"])]
            late += gaps[len(gaps) // 3 :]
            right.plot(tokens, gaps, **as_arm)
    bases = [r for r in runs if Arm.of(r["arm"]).name == "bf16" and Arm.of(r["arm"]).share == 1]
    if len(bases) > 1 and all(same(r, bases[0]) for r in bases):
        rows = list(zip(*(r["curve"] for r in bases)))
        tokens = [row[0][0] * bases[0]["tokens"] / bases[0]["steps"] / 1e6 for row in rows]
        bands = [[pick(point[1] for point in row) for row in rows] for pick in (min, max)]
        left.fill_between(tokens, *bands, color="black", alpha=0.2, label="seeds of bf16")
    left.set(xlabel="million tokens", ylabel="validation loss, nats a byte")
    middle.set(xlabel="seconds of steps")
    right.set(xlabel="million tokens", ylabel="gap to bf16")
    right.axhline(0, color="black", linewidth=0.5)
    if late:  # early gaps are noise, and far larger
        room = 0.1 * (max(late) - min(late)) + 1e-4
        right.set_ylim(min(late) - room, max(late) + room)
        lowest = min(row[1] for run in runs for row in run["curve"])
        for axes in (left, middle):  # where arms differ
            axes.set_ylim(lowest - 0.01, lowest + 0.25)
    left.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_over(seconds: float, device: torch.device) -> bool:
    """Whether the process has run for so long, on some rank."""
    over = torch.tensor(float(time.perf_counter() - STARTED > seconds), device=device)
    if dist.is_initialized():
        dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over)


def run(args: argparse.Namespace, runs: list[dict]) -> bool:
    """Append the arms that end to `runs`; whether one failed."""
    device, failed = torch.device("cuda" if torch.cuda.is_available() else "cpu"), False
    if "LOCAL_RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group()
    elif args.model == "moe":
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    kept = args.json and Path(args.json)
    before = [json.loads(line) for line in kept.open()] if kept and kept.exists() else []
    data = text(args.data, device)
    for arm in args.arms.split(","):
        of_arm = [r for r in before if (r["arm"], r["size"]) == (arm, size_of(args))]
        if args.checkpoint and of_arm:
            runs += of_arm[-1:]
            continue
        try:
            with two_rungs("/two" in arm):
                measured = trained(arm, args, data)
        except Exception as error:  # the other arms go on
            say(f"{arm} failed: {first_line(error)}")
            failed = True
            continue
        if measured is None:
            say(f"{arm} goes on in the next call")
            break
        runs.append(measured)
        if not dist.is_initialized() or dist.get_rank() == 0:
            if kept:
                with kept.open("a") as file:
                    print(json.dumps(measured), file=file)
            if args.checkpoint:
                shutil.rmtree(folder_of(args, arm), ignore_errors=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dist_tests.bench.pretrain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--model", choices=("llama", "moe"), default="llama")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--data")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--checkpoint")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--table", nargs="+", default=[])
    args = parser.parse_args(argv)
    if args.model == "moe" and args.size not in EXPERTS:
        parser.error(f"--model moe has the sizes {', '.join(EXPERTS)}; got {args.size}")
    if args.seconds < math.inf and not args.checkpoint:
        parser.error("--seconds ends runs that go on in the next call; give --checkpoint too")
    runs = [json.loads(line) for path in args.table for line in open(path)]
    failed = not args.table and run(args, runs)
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return int(failed)
    kept = table(runs)
    if args.plot:
        plot(runs, args.plot)
    return int(failed or not kept)


if __name__ == "__main__":
    sys.exit(main())

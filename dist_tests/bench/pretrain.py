# SPDX-License-Identifier: Apache-2.0
"""Pretraining of a small Llama, each recipe beside bf16 of the same data and initial values.

    python -m dist_tests.bench.pretrain [--size 110m|350m] [--arms bf16,bf16:1,mxfp8,...] [--steps
    1250] [--data 'DIR/**/*.py']
                                        [--json out.json] [--plot out.png]
    python -m dist_tests.bench.pretrain --size tiny --steps 20      # a smoke test, on a CPU too
    python -m dist_tests.bench.pretrain --table out.json other.json # of runs before; --plot draws
    them

transformers' LlamaForCausalLM over bytes: weights in fp32 under torch.autocast, every layer
compiled, fused AdamW, 32768 tokens a step, learning rate by a cosine after a warm-up. The text is
the Python files of the installed packages; every fiftieth file is for validation. Arms: bf16, the
recipes of `bench.linear`, "tail" (nvfp4 whose last 15 % of the steps are bf16; "tail_exact" of
nvfp4_exact), "nvfp4+row", "nvfp4+4over6", "nvfp4+forward" (a backward in high
precision), any of them with "/two", where the underflow check knows two rungs, with
"/bf16-grads", "/fp8_1x128-grads", .., whose gradients are those that 4 ranks would send so
(`fq.set_gradient_reduction`; bf16 loses nothing and is the base of the others), and with ":1",
another seed of initial values and of the order of the data.

Columns: the loss of the validation set (nats a byte), its gap to bf16 of that seed, in nats and as
a share, and the law: at most LIMITS, or the difference of bf16's two seeds. ms of a step (mean,
compilation and validation included), peak GiB, and the products that the guard moved, of all.
The table is of the arms that ran; with --json they are kept, and read again by --table. "e4m3" of a
bf16 arm in the JSON is what a second rounding of its weights costs (`cost_of_e4m3`).

Exit status 1: an arm failed, or is beyond its law.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_quant as fq
from dist_tests.bench.clock import first_line
from dist_tests.bench.linear import RECIPES, two_rungs
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.ops.gradient_codes import GradientLayout, decode_gradients, encode_gradients
from fsdp_quant.ops.layout import ANCHORED_TENSOR
from fsdp_quant.ops.rng import tensor_id

SIZES = {  # width, layers, heads, hidden
    "tiny": (64, 2, 2, 128),
    "110m": (768, 12, 12, 2816),
    "350m": (1024, 24, 16, 3392),
}
SEQUENCE, BATCH, VALIDATION = 1024, 32, 16  # bytes, sequences a step, batches
RATE, WARMUP, DECAY, CLIP = 6e-4, 100, 0.1, 1.0
TAIL = 0.85
RANKS = 4  # of "-grads"
# Of bf16's loss, what an arm may lose.
LIMITS = {"nvfp4": 0.016, "tail": 0.010, "hybrid": 0.016}  # with scales of any rule
OPTIONS = {  # of nvfp4
    "row": {"scale_per": "row"},
    "4over6": {"four_over_six": "mse"},
    "forward": {"backward_override": "high_precision"},
}
LIMIT = 0.0025
ARMS = ("bf16", "bf16:1", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "hybrid", "nvfp4", "tail")


def recipe_of(name: str, steps: int):
    """None: bf16."""
    if name == "bf16":
        return None
    if name.startswith("tail"):
        base = RECIPES[name.replace("tail", "nvfp4")]()
        return recipes.schedule(base, (TAIL, 1.0, recipes.identity()), total_steps=steps)
    _, *options = name.split("+")
    if options:
        return recipes.nvfp4(**{k: v for option in options for k, v in OPTIONS[option].items()})
    return RECIPES[name]()


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


def backward_of_ranks(model: LlamaForCausalLM, rows: Tensor, format: str, step: int) -> Tensor:
    """The loss; leaves the mean gradient of RANKS parts of the rows, each sent as `format`."""
    ranks = min(RANKS, len(rows))
    named = dict(model.named_parameters())
    layout = GradientLayout(tuple(tuple(p.shape) for p in named.values()), ranks, format)
    losses, sent = [], []
    for rank, part in enumerate(rows.chunk(ranks)):
        losses.append(loss_of(model, part))
        losses[-1].backward()
        ids = [tensor_id(f"{name} {rank}") for name in named]
        keys = torch.tensor([[0, step, of, 0, 0] for of in ids], device=rows.device)
        grads = [
            p.grad.bfloat16() for p in named.values()
        ]  # as FSDP2's bf16 computation leaves them
        sent.append(encode_gradients(grads, layout, keys))
        model.zero_grad()
    sums = rows.new_empty(ranks, sum(layout.numels), dtype=torch.float32)
    for owner in range(ranks):
        received = torch.stack([codes[owner] for codes in sent])
        decode_gradients(received, layout, sums[owner], 1 / ranks)
    for p, pieces in zip(named.values(), sums.split(layout.numels, 1)):
        p.grad = pieces.reshape(-1)[: p.numel()].view_as(p)
    return torch.stack(losses).mean()


def validated(model: LlamaForCausalLM, data: Tensor, sequences: int) -> float:
    model.eval()
    g = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        loss = statistics.fmean(
            loss_of(model, batch(data, sequences, g)).item() for _ in range(VALIDATION)
        )
    model.train()
    return loss


def trained(
    arm: str,
    size: str,
    steps: int,
    sequences: int,
    data: tuple[Tensor, Tensor],
    say: Callable[[str], None],
) -> dict:
    """One arm: its losses, times and moved products."""
    name, _, seed = arm.partition(":")
    seed, device = int(seed or 0), data[0].device
    width, layers, heads, hidden = SIZES[size]
    torch.manual_seed(seed)
    torch.compiler.reset()
    counters.reset()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=hidden,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
    ).to(device)
    sent_as = name.partition("/")[2].removesuffix("-grads") if name.endswith("-grads") else None
    recipe = recipe_of(name.partition("/")[0], steps)
    if recipe is not None:
        fq.convert(model, recipe, ["lm_head"])
    for layer in model.model.layers:
        layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (0.9, 0.95), weight_decay=DECAY, fused=device.type == "cuda"
    )
    g, curve, began = torch.Generator().manual_seed(seed), [], time.time()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        rate = RATE * min(
            1, (step + 1) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = batch(data[0], sequences, g)
        if sent_as:
            loss = backward_of_ranks(model, rows, sent_as, step)
        else:
            loss = loss_of(model, rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:  # the host runs ahead of nine
            loss.item()
        if step % 100 == 99 or step == steps - 1:
            curve.append((step + 1, validated(model, data[1], sequences)))
            say(
                f"{arm}: step {step + 1} of {steps}, loss {loss.item():.4f}, validation "
                f"{curve[-1][1]:.4f}"
            )
    modules = converted_modules(model) if recipe is not None else {}
    return {
        "arm": arm,
        "size": size,
        "steps": steps,
        "tokens": steps * sequences * SEQUENCE,
        "curve": curve,
        "loss": curve[-1][1],
        "ms": (time.time() - began) / steps * 1e3,
        "products": 3 * len(modules),
        "moved": sum(len(m.plan.moved) for m in modules.values()),
        "why": [
            f"{module} {product} {why}"
            for module, product, why in counters.of("moved")
            if not why.startswith("as for")
        ],
        "e4m3": cost_of_e4m3(model) if recipe is None else None,
        "peak": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
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
    name, _, seed = arm["arm"].partition(":")
    bases = {
        r["arm"].partition(":")[2] or "0": r["loss"]
        for r in runs
        if r["arm"].partition(":")[0] == "bf16" and same(r, arm)
    }
    base = bases.get(seed or "0")
    if base is None or name == "bf16":
        return None, None
    noise = max(bases.values()) - min(bases.values())
    return arm["loss"] - base, max(
        noise,
        LIMITS.get(name.partition("/")[0].partition("+")[0].removesuffix("_exact"), LIMIT) * base,
    )


def same(a: dict, b: dict) -> bool:
    return (a["size"], a["tokens"], a["device"]) == (b["size"], b["tokens"], b["device"])


def table(runs: Sequence[dict]) -> bool:
    """Print what was measured; whether all arms keep to their law."""
    kept = True
    print(
        f"\n{'arm':14}{'tokens':>12}{'loss':>9}{'gap':>9}{'share':>9}{'at most':>9}"
        f"{'ms':>8}{'peak':>8}  moved  device"
    )
    for run in runs:
        gap, most = law(run, runs)
        said = (
            [f"{gap:+.4f}", f"{gap / (run['loss'] - gap):+.2%}", f"{most:.4f}"]
            if gap is not None
            else ["-"] * 3
        )
        kept &= gap is None or gap <= most
        peak = "-" if run["peak"] is None else f"{run['peak']:.1f}"
        beyond = "  beyond its law" if gap is not None and gap > most else ""
        print(
            f"{run['arm']:14}{run['tokens']:12,}{run['loss']:9.4f}"
            + "".join(f"{s:>9}" for s in said)
            + f"{run['ms']:8.1f}{peak:>8}  {run['moved']} of {run['products']}  "
            f"{run['device']}{beyond}"
        )
    return kept


def plot(runs: Sequence[dict], path: str) -> None:
    """Validation loss by tokens, and its gap to bf16 of the same seed."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    colors, late = pyplot.get_cmap("tab20").colors, []
    for i, run in enumerate(runs):
        tokens = [step * run["tokens"] / run["steps"] / 1e6 for step, _ in run["curve"]]
        as_arm = {"label": run["arm"], "color": colors[i % len(colors)]}
        left.plot(tokens, [loss for _, loss in run["curve"]], **as_arm)
        seed = run["arm"].partition(":")[2]
        base = next(
            (r for r in runs if r["arm"] == "bf16" + ":" * bool(seed) + seed and same(r, run)), None
        )
        if base is not None and base is not run:
            gaps = [loss - of for (_, loss), (_, of) in zip(run["curve"], base["curve"])]
            late += gaps[len(gaps) // 3 :]
            right.plot(tokens, gaps, **as_arm)
    left.set(xlabel="million tokens", ylabel="validation loss, nats a byte")
    right.set(xlabel="million tokens", ylabel="gap to bf16")
    right.axhline(0, color="black", linewidth=0.5)
    if late:  # early gaps are noise, and far larger
        room = 0.1 * (max(late) - min(late)) + 1e-4
        right.set_ylim(min(late) - room, max(late) + room)
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dist_tests.bench.pretrain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--data")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--table", nargs="+", default=[])
    args = parser.parse_args(argv)
    runs = [json.loads(line) for path in args.table for line in open(path)]
    failed = False
    if not args.table:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data, sequences = text(args.data, device), 1 if args.size == "tiny" else BATCH
        for arm in args.arms.split(","):
            try:
                with two_rungs("/two" in arm):
                    runs.append(
                        trained(
                            arm,
                            args.size,
                            args.steps,
                            sequences,
                            data,
                            lambda line: print(line, flush=True),
                        )
                    )
            except Exception as error:  # the other arms go on
                print(f"{arm} failed: {first_line(error)}", flush=True)
                failed = True
                continue
            if args.json:
                with open(args.json, "a") as file:
                    print(json.dumps(runs[-1]), file=file)
    kept = table(runs)
    if args.plot:
        plot(runs, args.plot)
    return int(failed or not kept)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""FSDP2 training steps of Llama-shaped layers over compiled bf16: time, tokens, bytes gathered,
peak memory.

    torchrun --nproc-per-node 4 -m dist_tests.bench.fsdp2 [--layers 16 --tokens 8192 2048] [--arms
    bf16 fp8_current ...]

Every arm is 16 layers (d 4096, ffn 14336, 32 heads, 8 of keys), fp32 sharded parameters, bf16
compute, fused AdamW; the base and torchao's float8 are compiled block by block, ours are eager, of
`fq.LayerNormMLP`, unless `--separate` or `--compiled`. "... quantized" arms have quantized
parameters, stepped by `fq.optim.FusedAdam`; "... captured" arms replay their whole step,
collectives and optimizer included, as one CUDA graph. Steps are made back to back and timed by
events on the device; rank 0 prints.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_quant as fq
from dist_tests.bench import ranks

BASE = "bf16"
FLOORS = {8192: 1.28, 2048: 1.15}  # of fp8_current, over BASE
AIMS = {8192: 1.50, 2048: 1.35}
RECIPES = {
    "fp8_current": fq.recipes.fp8_current,
    "fp8_delayed": fq.recipes.fp8_delayed,
    "fp8_block": fq.recipes.fp8_block,
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
    "hybrid": functools.partial(fq.recipes.hybrid, "mxfp8", "nvfp4"),
}
QUANTIZED, CAPTURED = " quantized", " captured"
OURS = {
    name + q + c: made
    for name, made in RECIPES.items()
    for q in ("", QUANTIZED)
    for c in ("", CAPTURED)
}
BASES = [BASE, BASE + CAPTURED]
TORCHAO = {
    "torchao tensorwise": {},
    "torchao tensorwise, fp8 gather": {"enable_fsdp_float8_all_gather": True},
}
GIB = 2**30


# What is measured #


class Attention(nn.Module):
    """Causal attention with fewer heads of keys and values."""

    def __init__(self, dim: int, heads: int, key_heads: int):
        super().__init__()
        self.heads, self.key_heads, width = heads, key_heads, dim // heads
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, key_heads * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor, n: int) -> Tensor:
            return y.unflatten(-1, (n, -1)).transpose(1, 2)

        q, k, v = (
            heads(self.q(x), self.heads),
            heads(self.k(x), self.key_heads),
            heads(self.v(x), self.key_heads),
        )
        k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


class MLP(nn.Module):
    """Residual SwiGLU behind its norm."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Block(nn.Module):
    """Attention and SwiGLU, each behind its norm; fused: of this library's modules."""

    def __init__(self, dim: int, hidden: int, heads: int, key_heads: int, fused: bool):
        super().__init__()
        self.norm, self.attention = (
            (fq.Norm if fused else nn.RMSNorm)(dim),
            Attention(dim, heads, key_heads),
        )
        options = {"bias": False, "normalization": "RMSNorm", "residual": True}
        self.mlp = fq.LayerNormMLP(dim, hidden, **options) if fused else MLP(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


def model(args, fused: bool) -> nn.Sequential:
    sizes = args.dim, args.hidden, args.heads, args.key_heads
    with torch.device("meta"):
        return nn.Sequential(*(Block(*sizes, fused) for _ in range(args.layers)))


def is_compiled(arm: str, args) -> bool:
    return arm not in OURS or args.compiled


def build(arm: str, args, device: torch.device) -> nn.Sequential:
    """The arm's model, sharded, with random weights."""
    recipe = OURS[arm]() if arm in OURS else None
    with fq.quantized_model_init(recipe) if QUANTIZED in arm else contextlib.nullcontext():
        net = model(args, fused=arm in OURS and not (args.compiled or args.separate))
        if arm in OURS:
            fq.convert(net, recipe)
            fq.set_recipe(net, recipe)  # of the modules that were this library's before
    if arm in TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(net, config=Float8LinearConfig(**TORCHAO[arm]))
    if is_compiled(arm, args):
        for block in net:
            block.compile()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    ranks.gather_ahead(net)
    net.to_empty(device=device)
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return net


@contextlib.contextmanager
def counted_gathers():
    """Bytes of the outputs of all gathers of FSDP2, whatever they hold."""
    seen, originals = [0], {}
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if (original := getattr(dist, name, None)) is not None:
            originals[name] = original

            def counting(output, *rest, original=original, **options):
                seen[0] += output.numel() * output.element_size()
                return original(output, *rest, **options)

            setattr(dist, name, counting)
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def measure(arm: str, tokens: int, args, device: torch.device) -> dict:
    """{ms, host_ms, tokens_per_s, gathered_bytes, peak_bytes}: medians of `args.steps` steps."""
    net = build(arm, args, device)
    captured = arm.endswith(CAPTURED)
    if QUANTIZED in arm:
        rate = torch.tensor(1e-4, device=device) if captured else 1e-4
        optimizer = fq.optim.FusedAdam(net.parameters(), lr=rate, capturable=captured)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=captured)
    x = torch.randn(1, tokens, args.dim, device=device, dtype=torch.bfloat16)

    def step() -> None:
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if arm.endswith("fp8 gather"):
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(net)

    # where captures are made
    aside = torch.cuda.Stream() if captured else torch.cuda.current_stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
        with counted_gathers() as seen:
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if captured:
            step = ranks.captured(step, aside)
    marks, host = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)], []
    marks[0].record()
    for mark in marks[1:]:
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        mark.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return {
        "arm": arm,
        "tokens": tokens,
        "ms": ms,
        "host_ms": statistics.median(host) * 1e3,
        "tokens_per_s": tokens / ms * 1e3,
        "gathered_bytes": seen[0],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def table(tokens: int, args, device: torch.device, say) -> list[dict]:
    say(f"\n{tokens} tokens a GPU")
    say(
        f"{'arm':32} {'ms':>8} {'x bf16':>7} {'floor':>6} {'aim':>5} {'tokens/s':>9} "
        f"{'gathered GiB':>12} {'peak GiB':>9} {'x bf16':>7} {'host ms':>8}"
    )

    def line(row: dict, over) -> str:
        arm, speed, memory = row["arm"], over("ms"), 1 / over("peak_bytes")
        row |= {"ratio": speed, "peak_ratio": memory}
        floor, aim = (of.get(tokens) if arm == "fp8_current" else None for of in (FLOORS, AIMS))
        return (
            f"{arm:32} {row['ms']:8.1f} {speed:7.3f} {floor or '-':>6} {aim or '-':>5} "
            f"{row['tokens_per_s']:9.0f} {row['gathered_bytes'] / GIB:12.2f} "
            f"{row['peak_bytes'] / GIB:9.2f} {memory:7.3f} {row['host_ms']:8.1f}"
        )

    return ranks.table(
        args.arms,
        BASE,
        lambda arm: measure(arm, tokens, args, device),
        line,
        device,
        say,
        tokens=tokens,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--arms", nargs="+", default=[BASE, *RECIPES], choices=[*BASES, *OURS, *TORCHAO]
    )
    made.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048])
    made.add_argument("--layers", type=int, default=16)
    made.add_argument("--dim", type=int, default=4096)
    made.add_argument("--hidden", type=int, default=14336)
    made.add_argument("--heads", type=int, default=32)
    made.add_argument("--key-heads", type=int, default=8)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument(
        "--compiled",
        action="store_true",
        help="compile the blocks of our arms too, of separate modules",
    )
    made.add_argument(
        "--separate",
        action="store_true",
        help="our arms are of nn.RMSNorm and nn.Linear modules too",
    )
    made.add_argument("--json", help="write all numbers to this file")
    return made


def main() -> None:
    args = parser().parse_args()
    device, say = ranks.start()
    say(
        f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}; "
        f"{args.layers} layers {args.dim} -> {args.hidden}, medians of {args.steps} steps"
    )
    rows = [row for tokens in args.tokens for row in table(tokens, args, device, say)]
    ranks.finish(rows, args.json)


if __name__ == "__main__":
    main()

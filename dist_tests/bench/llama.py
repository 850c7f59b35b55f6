# SPDX-License-Identifier: Apache-2.0
"""Training steps of transformers' models: this library and torchao float8 over compiled bf16.

    python -m dist_tests.bench.llama [--layers 6] [--tokens 8192,2048] [--arms bf16,compiled,...]
        [--recipes fp8_current,mxfp8] [--compile layers|whole] [--profile] [--inspect]
        [--model llama|llama3_8b|llama_110m|qwen3|phi3|gemma3|mixtral|qwen3_moe|gpt_oss|gpt2]
        [--json out.json]
    torchrun --nproc-per-node 2 -m dist_tests.bench.llama --fsdp --layers 8
    torchrun --nproc-per-node 4 -m dist_tests.bench.llama --fsdp --model llama3_8b --params float32
        --tokens 4096 --gradients fp32,bf16,fp8_1x128 [--recompute]
    python -m dist_tests.bench.llama --tiny --backend aot_eager     # a smoke test, on a CPU too
    python -m dist_tests.bench.llama --ledger [--tokens 512]        # on a CPU too

LlamaForCausalLM, or another family, is built from a config (the widths of Llama 3 8B; llama3_8b is
all of it) with random weights, sdpa (gpt-oss, which has sinks: eager attention) and its own loss,
or with --loss liger the fused head and loss of Liger-Kernel, in all arms. A step is forward,
backward, fused AdamW and zero_grad: weights change in every step. lm_head stays bf16 in all arms.
Parameters are bf16 or, with --params float32 and --fsdp, fp32 that are gathered in bf16 and whose
gradients are reduced in fp32. --gradients repeats the arms of this library with each format of
fq.set_gradient_reduction. The base, "bf16 compiled", is measured first, and captured steps last,
since those that are not took longer after them in one process; --arms:

    bf16             eager                       torchao   its float8, tensorwise, compiled
    compiled, eager  each recipe                 gather    the same with fp8 all-gathers (--fsdp)
    kept             as compiled, with save_original_input=True: less memory (--ledger)
    unfused          eager, fuse=False           again     the base (each --gradients), to see drift
    quantized        quantized parameters and fq.optim.FusedAdam, compiled; moments in bf16, as the
                     base's (--moments float32: as those of wrapped), and masters in fp32
    wrapped          as quantized, with fq.optim.wrap(torch.optim.AdamW); moments of masters in fp32
    moved            as compiled; GEMMs of the backward begin where the underflow check moves them
                     to in the first hundred steps of a training (bench.pretrain)
    graphed          compiled, and the step as one CUDA graph by fq.graphed
    quantized-eager, quantized-graphed, graphed-eager, wrapped-eager, wrapped-graphed,
    moved-graphed, bf16-graphed, torchao-graphed          as their names say

Columns, of medians; "x bf16" is over the base:
    ms        of a step, by device events, steps back to back; base / arm, more is faster. Steps
              that do more than others (the underflow check) are in the mean, a note if it differs
    peak      GiB allocated at most in a step, optimizer included; arm / base, less is better. "-"
              of graphed arms: the allocator does not tell what a CUDA graph's own pool holds
    resident  GiB allocated between steps beyond parameters, buffers and optimizer state (the
              bytes of those are own_bytes in the JSON)
    host      ms until the Python call of a step returns on an idle device; arm / base. Long steps
              fill the launch queue, and the host waits: read it at 2048 tokens
    frames    compiled in the first two steps + in all later ones (recompilations)
    breaks    graph breaks
    tokens/s  of a GPU; MFU: of 989 TFLOP/s, of 6 FLOP a token and weight (not of embeddings, nor of
              other tokens' experts) and causal attention, recomputation not counted
    loss      of the last step; first weights and tokens are the same for all arms

No arm waits for the device to learn that no sequences are packed, as models of transformers do in
each forward: `fq.convert` spares ours that (models/transformers_masks.py), here bf16 and torchao
are spared it too, and with --waits none is.

--one-thread also times each arm that is not captured inside
torch.autograd.set_multithreading_enabled(False), in a note below the table: on some machines the
thread of the autograd engine runs on a core that clocks lower.

--ledger measures nothing: it prints what one decoder layer of each compiled arm, of one GPU, saves
between forward and backward, tensor by tensor, as torch's partitioner cuts its graph; without a GPU
from graphs that hold the operators of a Hopper GPU (dist_tests/single/hopper.py). Inputs of the
layer are counted apart, parameters not. "quantizing" is what operators of codes read and write of
activations and gradients in a forward and a backward, in the same unit.

Each arm prints a line of JSON when it is measured, and --profile the kernels of one step; the
table comes last. An arm that raises prints its error, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import fsdp_quant as fq
from dist_tests.bench import ledger, ranks
from dist_tests.bench.clock import first_line
from dist_tests.bench.linear import RECIPES
from fsdp_quant.linear.plan import PRODUCTS
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.models.transformers_masks import distrust_positions, trust_counted_positions
from fsdp_quant.ops import extension
from fsdp_quant.ops.gradient_codes import GRADIENT_FORMATS

try:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    NO_TORCHAO = None
except Exception as error:  # of any kind: a peer is an option
    NO_TORCHAO = first_line(error)

try:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    NO_LIGER = None
except Exception as error:
    NO_LIGER = first_line(error)

CUDA = torch.cuda.is_available()
BASE = "bf16 compiled"
OURS = {
    "compiled": {"compiled": True},
    "eager": {},
    "kept": {"kept": True, "compiled": True},
    "kept-graphed": {"kept": True, "compiled": True, "graphed": True},
    "unfused": {"fuse": False},
    "quantized": {"quantized": True, "compiled": True},
    "quantized-eager": {"quantized": True},
    "quantized-graphed": {"quantized": True, "compiled": True, "graphed": True},
    "wrapped": {"quantized": True, "wrapped": True, "compiled": True},
    "wrapped-eager": {"quantized": True, "wrapped": True},
    "wrapped-graphed": {"quantized": True, "wrapped": True, "compiled": True, "graphed": True},
    "moved": {"moved": True, "compiled": True},
    "moved-graphed": {"moved": True, "compiled": True, "graphed": True},
    "graphed": {"compiled": True, "graphed": True},
    "graphed-eager": {"graphed": True},
}
ARMS = ("bf16", "bf16-graphed", *OURS, "torchao", "torchao-graphed", "gather", "again")
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
PEAK_FLOPS = 989e12  # bf16, of an H100
SIZE = dict(zip(WIDTHS, (4096, 14336, 32, 8, 32000)))
TINY = dict(zip(WIDTHS, (64, 128, 4, 2, 256)))
# What a family has other than those widths; the experts are Qwen3-30B-A3B's, gpt-oss-20b's and, at
# Llama's width, Mixtral's.
MODELS = {
    "llama": ("llama", {}),
    "llama3_8b": ("llama", {"vocab_size": 128256}),  # has 32 layers
    "llama_110m": ("llama", dict(zip(WIDTHS, (768, 2048, 12, 12, 32000)))),  # with --layers 12
    "qwen3": ("qwen3", {"head_dim": 128}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", {"head_dim": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "hidden_size": 1600,
            "num_attention_heads": 25,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "head_dim": 128,
        },
    ),
}
TINY_EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
KEPT_BF16 = "lm_head"
COMPILING_STEPS, WARM_STEPS, HOST_STEPS, PROFILED_KERNELS = 2, 2, 21, 30
GIB = 2**30


# Models #


class Arm(NamedTuple):
    """recipe: of this library, or None: bf16, or torchao's float8 ("tensorwise", "gather")."""

    name: str
    recipe: str | None = None
    compiled: bool = False
    kept: bool = False
    fuse: bool = True
    quantized: bool = False
    wrapped: bool = False
    moved: bool = False
    graphed: bool = False
    torchao: str | None = None
    gradients: str = "fp32"  # of fq.set_gradient_reduction


def suffix(gradients: str) -> str:
    return "" if gradients == "fp32" else f", {gradients}"


def chosen_arms(args, say: Callable[[str], None]) -> list[Arm]:
    arms = [Arm(BASE, compiled=True)]
    for kind in args.arms:
        if kind in OURS:
            arms += [
                Arm(f"{r} {kind}{suffix(g)}", r, **OURS[kind], gradients=g)
                for r in args.recipes
                for g in args.gradients
            ]
        elif kind == "bf16":
            arms.append(Arm("bf16 eager"))
        elif kind == "bf16-graphed":
            arms.append(Arm("bf16 graphed", compiled=True, graphed=True))
        elif kind == "again":
            arms += [
                Arm(f"{BASE} again{suffix(g)}", compiled=True, gradients=g) for g in args.gradients
            ]
        elif NO_TORCHAO:
            say(f"{kind} is skipped: torchao does not import: {NO_TORCHAO}")
        elif kind == "gather" and not args.fsdp:
            say("gather is skipped: it needs --fsdp")
        else:
            of, graphed = "gather" if kind == "gather" else "tensorwise", kind.endswith("-graphed")
            name = f"torchao {of}{' graphed' * graphed}"
            arms.append(Arm(name, compiled=True, torchao=of, graphed=graphed))
    return sorted(arms, key=lambda arm: arm.graphed)


def model(args, device: torch.device) -> nn.Module:
    """Build the model; its weights are the same in each call and on every rank."""
    family, own = MODELS[args.model]
    counts = {k for k in own if args.experts and k in ("num_experts", "num_local_experts")}
    own = own | dict.fromkeys(counts, args.experts)
    tiny = {k: v for k, v in (TINY | TINY_EXPERTS).items() if args.tiny and k in own}
    config = CONFIG_MAPPING[family](
        **args.size | own | tiny,
        num_hidden_layers=args.layers,
        use_cache=False,
        max_position_embeddings=max(args.tokens),
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with device:
        net = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, args.params),
            attn_implementation="eager" if family == "gpt_oss" else "sdpa",
        )
    trust_counted_positions(net)
    return net.train()


def convert(net: nn.Module, arm: Arm) -> None:
    """Convert all linear layers but lm_head, and packed experts, in place."""
    if arm.torchao is not None:
        convert_to_float8_training(
            net,
            config=Float8LinearConfig(enable_fsdp_float8_all_gather=arm.torchao == "gather"),
            module_filter_fn=lambda module, name: KEPT_BF16 not in name,
        )
    if arm.recipe is None:
        return
    recipe = RECIPES[arm.recipe](**({"save_original_input": True} if arm.kept else {}))
    with fq.quantized_model_init(recipe) if arm.quantized else contextlib.nullcontext():
        fq.convert(net, recipe, KEPT_BF16, fuse=arm.fuse)


def build(arm: Arm, args, device: torch.device):
    """(model, optimizer): the model is converted, then compiled, then sharded."""
    net = model(args, device)
    if args.loss == "liger":
        of_model = {"rope": False, "rms_norm": False, "swiglu": False, "cross_entropy": False}
        _apply_liger_kernel_to_instance(net, **of_model, fused_linear_cross_entropy=True)
    convert(net, arm)
    if args.waits:
        distrust_positions(net)
    layers = list(net.transformer.h if args.model == "gpt2" else net.model.layers)
    if arm.compiled:
        for module in [net] if args.compile == "whole" else layers:
            module.compile(backend=args.backend)
    if args.recompute:
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
        enable({"use_reentrant": False})  # newer transformers rename it
    if args.fsdp:
        policy = MixedPrecisionPolicy()
        if args.params == "float32":
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*layers, net):
            fully_shard(module, mp_policy=policy)
        ranks.gather_ahead(layers, args.prefetch)
        if arm.gradients != "fp32":
            fq.set_gradient_reduction(net, arm.gradients)
    if arm.quantized and not arm.wrapped:
        moments = getattr(torch, args.moments)
        return net, fq.optim.FusedAdam(net.parameters(), lr=args.lr, moment_dtype=moments)
    adam = fq.optim.wrap(torch.optim.AdamW) if arm.wrapped else torch.optim.AdamW
    return net, adam(net.parameters(), lr=args.lr, fused=True)


def move_backward(net: nn.Module, device: torch.device) -> None:
    """Move the GEMMs of the backward that the underflow check watches by one rung."""
    for layer in converted_modules(net).values():
        runtime = layer.runtime
        plan = runtime.plan if runtime.plan.alone else runtime.plan.of_groups
        watched = zip(PRODUCTS[1:], plan.resolved(torch.bfloat16, device).watched[1:])
        rungs = {p.name: plan.next_rung(p, runtime.is_shared) for p, of in watched if any(of)}
        runtime.move_to({name: rung for name, rung in rungs.items() if rung is not None})


# Measurements #


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes allocated on the device, cuBLAS workspaces excluded; 0 on a CPU."""
    if not CUDA:
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, inner tensors of subclasses included, each one once."""
    found, left = {}, list(tensors)
    while left:
        t = left.pop()
        if isinstance(t, DTensor):
            left.append(t.to_local())
        elif isinstance(t, fq.QuantizedTensor):  # __tensor_flatten__ may name one direction only
            sides = (t.rowwise, t.columnwise)
            left += [b for side in sides if side is not None for b in side.buffers().values()]
        elif is_traceable_wrapper_subclass(t):
            left += [getattr(t, name) for name in t.__tensor_flatten__()[0]]
        else:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(found.values())


def step_ms(step: Callable[[], Tensor], steps: int) -> tuple[float, float]:
    """(median, mean) milliseconds of steps made back to back, by device events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    return statistics.median(times), statistics.mean(times)


def host_ms(step: Callable[[], Tensor], steps: int) -> float:
    """Median milliseconds until the call of a step returns; the device is idle at its start."""
    times = []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    synchronize()
    return statistics.median(times)


def profiled(step: Callable[[], Tensor]) -> list[tuple[str, int, float]]:
    """(kernel, launches, total ms) of one step, longest first; on a CPU, of its operators."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if CUDA else kinds.CPU]) as profile:
        step()
        synchronize()
    wanted = DeviceType.CUDA if CUDA else DeviceType.CPU
    rows = [
        (e.key, e.count, (e.self_device_time_total if CUDA else e.self_cpu_time_total) / 1e3)
        for e in profile.key_averages()
        if e.device_type == wanted and not e.is_user_annotation
    ]
    return sorted(rows, key=lambda row: -row[2])


def flops_of_token(net: nn.Module, length: int) -> float:
    """Of a forward and a backward without recomputation; of experts those of one token."""
    config, weights = net.config, -net.get_input_embeddings().weight.numel()
    experts = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
    for name, p in net.named_parameters():
        share = config.num_experts_per_tok / experts if ".experts." in name else 1
        weights += p.numel() * share
    return 6.0 * (weights + config.num_hidden_layers * length * config.hidden_size)


def tokens_of(args, tokens: int, rank: int, device: torch.device) -> Tensor:
    of_rank, shape = torch.Generator().manual_seed(1 + rank), (args.batch, tokens // args.batch)
    return torch.randint(args.size["vocab_size"], shape, generator=of_rank).to(device)


def with_step(
    arm: Arm,
    args,
    device: torch.device,
    build: Callable[..., tuple[nn.Module, torch.optim.Optimizer]] = build,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
    """Build one arm; return its step besides, (tokens) -> loss."""
    net, optimizer = build(arm, args, device)
    if arm.moved:
        move_backward(net, device)

    def one_step(ids: Tensor) -> Tensor:
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if arm.torchao == "gather":
            precompute_float8_dynamic_scale_for_fsdp(net)
        return loss.detach()

    return net, optimizer, one_step


def measure(
    arm: Arm,
    tokens: int,
    args,
    device: torch.device,
    say: Callable[[str], None],
    build: Callable[..., tuple[nn.Module, torch.optim.Optimizer]] = build,
) -> dict:
    """Build one arm and measure all columns. Every rank calls it."""
    begin = time.perf_counter()
    torch._dynamo.reset()  # graphs of the arm before, which hold its model
    counters.clear()
    gc.collect()
    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = tokens_of(args, tokens, rank, device)
    before = allocated()
    net, optimizer, one_step = with_step(arm, args, device, build)
    notes = []
    one_step = fq.graphed(one_step, net, optimizer, COMPILING_STEPS) if arm.graphed else one_step
    step = functools.partial(one_step, ids)
    for _ in range(COMPILING_STEPS):
        step()
    compiled_frames = counters["frames"]["total"]
    for _ in range(WARM_STEPS):
        step()
    synchronize()
    fq.reset_receipt()
    host = host_ms(step, HOST_STEPS)
    ms, mean = step_ms(step, args.steps) if CUDA else (host, host)
    ran = fq.receipt()
    if arm.graphed and one_step.why_eager is not None:
        notes.append(one_step.why_eager)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    loss = float(step())  # waits for the step
    peak = torch.cuda.max_memory_allocated() - before if CUDA and not arm.graphed else 0
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    own = [t for t in (*net.parameters(), *net.buffers(), *states) if t.device.type == device.type]
    own_bytes = held_bytes(own)
    if ran.departures:
        notes.append(f"{sum(ran.departures.values())} departures from the plan")
    if CUDA and any(how == "reference" for *_, how in ran.quantize):
        notes.append("the reference quantized tensors")
    if mean > 1.02 * ms:
        notes.append(f"some steps take longer: the mean is {mean:.2f} ms")
    moved = sum(len(layer.plan.moved) for layer in converted_modules(net).values())
    if moved and not arm.moved:
        notes.append(f"the underflow check moved {moved} GEMMs")
    reasons = (*counters["graph_break"], *counters["unimplemented"])
    if any("recompile limit" in reason for reason in reasons):
        notes.append("dynamo hit its recompile limit: some frames run uncompiled")
    rate = tokens / ms * 1e3
    row = {
        "arm": arm.name,
        "tokens": tokens,
        "ms": ms,
        "mean_ms": mean,
        "moved": moved,
        "tokens_per_s": rate,
        "mfu": rate * flops_of_token(net, tokens // args.batch) / PEAK_FLOPS,
        "host_ms": host,
        "peak_bytes": peak,
        "own_bytes": own_bytes,
        "resident_bytes": allocated() - before - own_bytes if CUDA else 0,
        "frames": compiled_frames,
        "recompiled": counters["frames"]["total"] - compiled_frames,
        "breaks": sum(counters["graph_break"].values()),
        "loss": loss,
        "notes": notes,
    }
    if args.one_thread and CUDA and not arm.graphed:
        with torch.autograd.set_multithreading_enabled(False):
            step()
            host = host_ms(step, HOST_STEPS)
            row["one_thread_ms"] = step_ms(step, args.steps)[0]
        took = f"{row['one_thread_ms']:.2f} ms, host {host:.1f}"
        notes.append(f"with the backward in the calling thread {took}")
    if args.inspect and arm.recipe and not arm.graphed:
        with fq.inspect(net, every=1):
            step()
            sampled = step_ms(step, 3)[0] if CUDA else host_ms(step, 1)
        row["sampled_ms"] = sampled
        notes.append(
            f"a step that fq.inspect samples takes {sampled:.0f} ms; one in 100 costs "
            f"{(sampled - ms) / ms:.2f} %"
        )
    if args.profile:
        try:
            kernels = profiled(step)
        except Exception as error:  # of any kind: the profiler does not cost the arm its numbers
            kernels = []
            notes.append(f"was not profiled: {first_line(error)}")
        num, total_ms = sum(n for _, n, _ in kernels), sum(t for *_, t in kernels)
        row |= {"kernels": num, "kernels_ms": total_ms}
        say(f"\n{arm.name}, {tokens} tokens, one step: {num} kernels, {total_ms:.2f} ms")
        for name, n, kernel_ms in kernels[:PROFILED_KERNELS]:
            say(f"{kernel_ms:9.3f} ms {n:6}  {name[:80]}")
    return row | {"wall_s": time.perf_counter() - begin}


# What a layer saves #


def print_ledger(args, say: Callable[[str], None]) -> list[dict]:
    """Say what one decoder layer of each arm saves; the rows of the JSON."""
    args.layers, args.size = 1, args.size | {"vocab_size": 256}
    tokens, width, rows = args.tokens[0], args.size["hidden_size"], []
    arms = {arm.name: arm for arm in chosen_arms(args, say) if arm.compiled and not arm.graphed}
    for name, arm in arms.items():
        device = torch.device("cuda" if CUDA else "cpu")
        with ledger.on_gpu() if arm.recipe else contextlib.nullcontext():
            net = model(args, device)
            convert(net, arm)
            body = net.base_model
            layer = (body.h if args.model == "gpt2" else body.layers)[0]
            ids = torch.zeros(args.batch, tokens // args.batch, dtype=torch.long, device=device)
            captured = ledger.capture(layer, lambda: body(input_ids=ids).last_hidden_state)
        kept = ledger.saved(captured)
        for line in ledger.lines(name, kept, width, tokens):
            say(line)
        unit = width * tokens
        row = {"arm": name, "tokens": tokens, "width": width}
        row |= {kind: ledger.total(kept, kind) / unit for kind in ("computed", "given")}
        if arm.recipe:  # inductor quantizes for torchao, in kernels of its own
            graphs = captured.forward, captured.backward
            row["quantizing"] = sum(ledger.quantizing_bytes(g, tokens) for g in graphs) / unit
        row["tensors"] = [vars(of) for of in kept]
        rows.append(row)
    say(f"\n{'bytes per token and element':32} {'saved':>7} {'x bf16':>6} {'inputs':>7} quantizing")
    for row in rows:
        moved = f"{row['quantizing']:10.3f}" if "quantizing" in row else f"{'-':>10}"
        say(
            f"{row['arm']:32} {row['computed']:7.3f} {row['computed'] / rows[0]['computed']:6.3f} "
            f"{row['given']:7.3f} {moved}"
        )
    return rows


# Tables #


def as_json(row: dict, over: Callable[[str], float]) -> str:
    """Add the ratios to a row (`ranks.table`); return it as JSON."""
    row |= {"ratio": over("ms"), "host_ratio": 1 / over("host_ms")}
    row["peak_ratio"] = 1 / over("peak_bytes") if row["peak_bytes"] else None
    return json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})


def table(tokens: int, rows: list[dict]) -> Iterable[str]:
    yield (
        f"\n{f'{tokens} tokens':26} {'ms':>8} {'x bf16':>6} {'peak':>6} {'x bf16':>6} "
        f"{'resident':>8} {'host':>7} {'x bf16':>6} {'frames':>6} {'breaks':>6} {'tok/s':>7} "
        f"{'MFU':>5} {'loss':>8}"
    )
    for row in rows:
        if "error" in row:
            yield f"{row['arm']:26} failed: {row['error'].splitlines()[0][:200]}"
            continue
        memory = f"{'-':>6} {'-':>6} {'-':>8}"
        if row["peak_bytes"]:
            peak, resident = row["peak_bytes"] / GIB, row["resident_bytes"] / GIB
            memory = f"{peak:6.2f} {row['peak_ratio']:6.3f} {resident:8.3f}"
        frames = f"{row['frames']}+{row['recompiled']}"
        yield (
            f"{row['arm']:26} {row['ms']:8.2f} {row['ratio']:6.3f} {memory} {row['host_ms']:7.1f} "
            f"{row['host_ratio']:6.3f} {frames:>6} {row['breaks']:6} {row['tokens_per_s']:7.0f} "
            f"{row['mfu']:5.3f} {row['loss']:8.4f}"
        )
    yield from (f"{row['arm']}: {note}" for row in rows for note in row.get("notes", ()))


def listed(kind: Callable, choices: Iterable | None = None) -> Callable[[str], list]:
    """A parser of values with commas between them."""

    def parse(text: str) -> list:
        values = [kind(word) for word in text.split(",")]
        if choices is not None and (wrong := [v for v in values if v not in choices]):
            raise argparse.ArgumentTypeError(f"got {wrong[0]!r}, wanted of {','.join(choices)}")
        return values

    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    arms = ["bf16", "compiled", "kept", "eager", "graphed", "torchao"]
    add("--arms", type=listed(str, ARMS), default=arms, help=f"default {','.join(arms)}")
    add("--recipes", type=listed(str, RECIPES), default=["fp8_current", "mxfp8"])
    add("--tokens", type=listed(int), help="per step and rank; default 8192, with --tiny 64")
    add("--batch", type=int, default=1, help="sequences that the tokens of a step make")
    add("--model", choices=MODELS, default="llama", help="family of transformers")
    add("--layers", type=int, help="default 6 (llama3_8b: 32), with --tiny 2")
    add("--experts", type=int, help="of a mixture; default 64 (mixtral: 8, gpt_oss: 32)")
    add("--steps", type=int, help="timed steps; default 12, with --tiny 3")
    add("--lr", type=float, default=1e-4)
    add("--moments", choices=("bfloat16", "float32"), default="bfloat16", help="of FusedAdam")
    add("--params", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of parameters")
    formats = ("fp32", *GRADIENT_FORMATS)
    add("--gradients", type=listed(str, formats), default=["fp32"], help="how --fsdp sends them")
    add("--recompute", action="store_true", help="recompute each layer in the backward")
    add("--loss", choices=("own", "liger"), default="own")
    add("--compile", choices=("layers", "whole"), default="layers")
    add("--backend", default="inductor", help="of torch.compile")
    add("--fsdp", action="store_true", help="fully_shard layers and root, under torchrun")
    add("--tiny", action="store_true", help="toy sizes, on a CPU too")
    add("--ledger", action="store_true", help="print what a layer saves, and measure nothing")
    add("--inspect", action="store_true", help="time steps that fq.inspect samples")
    add("--prefetch", type=int, default=0, help="layers that a forward gathers ahead (--fsdp)")
    add("--one-thread", action="store_true", help="also time backwards in the calling thread")
    add("--waits", action="store_true", help="let transformers wait for the device in each step")
    add("--profile", action="store_true", help="print the kernels of one step per arm")
    add("--json", help="write all rows to this file")
    return made


def parsed() -> argparse.Namespace:
    """Return the arguments of the command, with the defaults that depend on others."""
    args = parser().parse_args()
    own = MODELS[args.model][1]
    args.size = TINY if args.tiny else SIZE | {k: own[k] for k in WIDTHS if k in own}
    args.tokens = args.tokens or [64 if args.tiny else 512 if args.ledger else 8192]
    args.layers = args.layers or (2 if args.tiny else 32 if args.model == "llama3_8b" else 6)
    args.steps = args.steps or (3 if args.tiny else 12)
    return args


def main() -> None:
    args = parsed()
    if not args.fsdp and (args.params == "float32" or args.gradients != ["fp32"]):
        raise SystemExit("error: --params float32 and --gradients need --fsdp")
    if not (CUDA or args.tiny or args.ledger):
        raise SystemExit("error: there is no GPU; the times of this bench are a GPU's")
    if args.loss == "liger" and NO_LIGER:
        raise SystemExit(f"error: Liger-Kernel does not import: {NO_LIGER}")
    device, say = torch.device("cpu"), functools.partial(print, flush=True)
    if args.fsdp:
        device, say = ranks.start("nccl" if CUDA else "gloo")
    elif CUDA:
        device = torch.device("cuda", torch.cuda.current_device())
    packages = ("torch", "transformers", *(["torchao"] if NO_TORCHAO is None else []))
    say(
        f"{dist.get_world_size() if args.fsdp else 1} x "
        f"{torch.cuda.get_device_name(device) if CUDA else 'CPU'}, "
        f"{', '.join(f'{n} {importlib.metadata.version(n)}' for n in packages)}; {args.model}, "
        f"{args.layers} layers, {args.batch} x {[t // args.batch for t in args.tokens]} tokens, "
        f"compile {args.compile}, {args.steps} steps; native: {extension.STATUS.reason or 'loaded'}"
    )
    if args.ledger:
        return ranks.finish(print_ledger(args, say), args.json)
    arms = {arm.name: arm for arm in chosen_arms(args, say)}
    rows: dict[int, list[dict]] = {}
    for tokens in args.tokens:
        attempt = functools.partial(measure, tokens=tokens, args=args, device=device, say=say)
        rows[tokens] = ranks.table(
            list(arms), BASE, lambda name: attempt(arms[name]), as_json, device, say, tokens=tokens
        )
    for line in (line for tokens in rows for line in table(tokens, rows[tokens])):
        say(line)
    ranks.finish([row for of in rows.values() for row in of], args.json)


if __name__ == "__main__":
    main()

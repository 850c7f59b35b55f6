# SPDX-License-Identifier: Apache-2.0
"""LoRA over a frozen base, each format over bf16, on one GPU: speed, and memory of the base.

    python -m dist_tests.bench.lora [--layers 16] [--tokens 2x4096] [--eager] [--rank 16]
        [--arms mxfp8,nf4,...] [--keep codes,operands] [--profile] [--json out.json]
    python -m dist_tests.bench.lora --qat           # every weight trains: quantization-aware
    python -m dist_tests.bench.lora --size tiny     # a smoke test, on a CPU too

transformers' Llama of `bench.llama` with random weights; PEFT puts adapters, in bf16, on all linear
layers but lm_head, and fused AdamW writes them in every step. Each decoder layer is compiled unless
--eager. Each arm has a process of its own. "bf16" is the base, and comes first; then --arms:

    fp8_current, fp8_block, mxfp8, mxfp4, nvfp4, qat(mxfp4), qat(nvfp4)
                   recipes of this library, frozen by fq.freeze; once for each --keep
    nf4            bitsandbytes, compute in bf16, scales not quantized again
    torchao        its float8 training, tensorwise, under frozen weights

--qat trains all weights, without adapters: bf16, qat(mxfp4), qat(nvfp4), fp8_current, and torchao's
fake quantization (mxfp4 weights, mxfp8 activations, bf16 products).

Columns:
    ms        of a step, median, by device events, steps back to back; "x bf16": base / arm
    base      GiB between steps that are no adapters and no optimizer state, embeddings included, as
              the allocator counts them (on a CPU: those of parameters and buffers)
    B/weight  bytes of that per weight of a linear layer, lm_head and other parameters left out
    peak      GiB allocated at most in a step
    host      ms until the Python call of a step returns on an idle device
    loss      of the last step; first weights and tokens are the same in all arms

Each arm prints a line of JSON; the table comes last. An arm that raises, or whose library is
missing, prints the first line of its error, and the others go on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.bench import llama, ranks
from dist_tests.bench.clock import extents, first_line
from dist_tests.bench.linear import RECIPES
from dist_tests.bench.llama import CUDA, GIB, KEPT_BF16, SIZE, TINY, Arm, held_bytes, listed

OURS: dict[str, Callable[[], fq.Recipe]] = {
    **{name: RECIPES[name] for name in ("fp8_current", "fp8_block", "mxfp8")},
    "mxfp4": fq.recipes.mxfp4,
    "nvfp4": fq.recipes.nvfp4,
    "qat(mxfp4)": functools.partial(fq.recipes.qat, "mxfp4"),
    "qat(nvfp4)": functools.partial(fq.recipes.qat, "nvfp4"),
}
BASE, NF4, TORCHAO = "bf16", "nf4", "torchao"
LORA_ARMS = (*OURS, NF4, TORCHAO)
QAT_ARMS = ("qat(mxfp4)", "qat(nvfp4)", "fp8_current", TORCHAO)
KEEP = ("codes", "operands")


# Models #


def linears_of(net: nn.Module) -> dict[str, nn.Linear]:
    """The layers that adapters are put on, by name."""
    found = net.named_modules()
    return {n: m for n, m in found if isinstance(m, nn.Linear) and KEPT_BF16 not in n}


def replace_by_nf4(net: nn.Module, device: torch.device) -> None:
    """Let bitsandbytes hold the linear layers of a model."""
    import bitsandbytes as bnb

    for name, linear in linears_of(net).items():
        made = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        made.weight = bnb.nn.Params4bit(
            linear.weight.data.cpu(), quant_type="nf4", compress_statistics=False, module=made
        )
        parent, _, child = name.rpartition(".")
        setattr(net.get_submodule(parent), child, made.to(device))
    net.is_loaded_in_4bit = True  # which PEFT asks for


def fake_quantize(net: nn.Module) -> None:
    """Let torchao fake-quantize the linear layers of a model, as `fq.recipes.qat("mxfp4")`."""
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    config = QATConfig(
        weight_config=MXFakeQuantizeConfig(torch.float4_e2m1fn_x2),
        activation_config=MXFakeQuantizeConfig(torch.float8_e4m3fn),
    )
    names = linears_of(net)
    quantize_(net, config, filter_fn=lambda module, name: name in names)


def with_adapters(net: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(linears_of(net)))
    return get_peft_model(net, config, autocast_adapter_dtype=False)


def build(arm: Arm, args, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """(model, optimizer): converted and frozen, then with adapters, then compiled."""
    kind, _, keep = arm.name.partition(", ")
    net = llama.model(args, device).requires_grad_(args.qat)
    layers = list(net.model.layers)
    if kind == NF4:
        replace_by_nf4(net, device)
    elif kind == TORCHAO and args.qat:
        fake_quantize(net)
    elif kind == TORCHAO:
        if llama.NO_TORCHAO:
            raise ImportError(llama.NO_TORCHAO)
        llama.convert(net, Arm(kind, torchao="tensorwise"))
    elif kind in OURS:
        fq.convert(net, OURS[kind](), skip=[KEPT_BF16])
        if not args.qat:
            fq.freeze(net, keep=keep)
    net = net if args.qat else with_adapters(net, args.rank)
    for layer in [] if args.eager else layers:
        layer.compile(backend=args.backend)
    trained = [p for p in net.parameters() if p.requires_grad]
    return net, torch.optim.AdamW(trained, lr=args.lr, fused=True)


# Measurements #


def measure(name: str, args, say: Callable[[str], None] = print) -> dict:
    """One arm, in this process; a row with an error if it raises."""
    device = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
    kind = name.partition(", ")[0]
    arm = Arm(name, kind if kind in OURS else None, compiled=not args.eager)
    kept: list = []

    def keeping(*of) -> tuple[nn.Module, torch.optim.Optimizer]:
        kept.extend(build(*of))
        return kept[0], kept[1]

    try:
        row = llama.measure(arm, args.tokens[0], args, device, say, keeping)
    except Exception as error:  # of any kind: one arm does not cost the others
        return {"arm": name, "error": first_line(error)}
    return row | base_of(*kept, row, args)


def base_of(net: nn.Module, optimizer: torch.optim.Optimizer, row: dict, args) -> dict:
    """Bytes of the base, and of it per weight of a linear layer; with --qat all weights are of
    it."""
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    adapters = [] if args.qat else [p for p in net.parameters() if p.requires_grad]
    base = row["own_bytes"] + row["resident_bytes"] - held_bytes([*states, *adapters])
    plain = llama.model(args, torch.device("meta"))
    weights = sum(linear.weight.numel() for linear in linears_of(plain).values())
    others = sum(p.numel() * p.element_size() for p in plain.parameters()) - 2 * weights
    return {"base_bytes": base, "bytes_per_weight": (base - others) / weights}


def alone(name: str, args) -> dict:
    """`measure` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(measure, name, args).result()
        except Exception as error:  # it was killed
            return {"arm": name, "error": first_line(error)}


# Tables #


def chosen_arms(args) -> list[str]:
    arms = [BASE]
    for kind in args.arms or (QAT_ARMS if args.qat else LORA_ARMS):
        is_frozen = kind in OURS and not args.qat
        arms += [f"{kind}, {keep}" for keep in args.keep] if is_frozen else [kind]
    return arms


def table(rows: list[dict]) -> Iterable[str]:
    yield (
        f"\n{'':24} {'ms':>8} {'x bf16':>6} {'base':>6} {'B/weight':>8} {'peak':>6} {'host':>7} "
        f"{'loss':>8}"
    )
    for row in rows:
        if "error" in row:
            yield f"{row['arm']:24} failed: {row['error'][:200]}"
            continue
        yield (
            f"{row['arm']:24} {row['ms']:8.2f} {rows[0].get('ms', math.nan) / row['ms']:6.3f} "
            f"{row['base_bytes'] / GIB:6.2f} {row['bytes_per_weight']:8.3f} "
            f"{row['peak_bytes'] / GIB:6.2f} {row['host_ms']:7.1f} {row['loss']:8.4f}"
        )
    yield from (f"{row['arm']}: {note}" for row in rows for note in row.get("notes", ()))


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, and those of `bench.llama` that its functions read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--qat", action="store_true", help="train every weight, without adapters")
    add("--arms", type=listed(str, LORA_ARMS), help="default: all")
    add("--keep", type=listed(str, KEEP), default=[*KEEP], help="what fq.freeze keeps")
    add("--size", choices=("full", "tiny"), default="full", help="4096 x 14336, or 64 x 128")
    add("--layers", type=int, help="default 16, tiny 2")
    add("--tokens", type=extents("2x4096"), help="sequences x tokens; default 2x4096, tiny 2x32")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--eager", action="store_true", help="compile no layer")
    add("--backend", default="inductor", help="of torch.compile")
    add("--steps", type=int, help="timed steps; default 12, tiny 3")
    add("--lr", type=float, default=1e-4)
    add("--profile", action="store_true", help="print the kernels of one step per arm")
    add("--json", help="write all rows to this file")
    options = vars(llama.parser().parse_args([])) | vars(parser.parse_args(words))
    args = argparse.Namespace(**options)
    is_tiny = args.size == "tiny"
    args.batch, length = args.tokens or ((2, 32) if is_tiny else (2, 4096))
    args.tokens, args.size = [args.batch * length], TINY if is_tiny else SIZE
    args.layers = args.layers or (2 if is_tiny else 16)
    args.steps = args.steps or (3 if is_tiny else 12)
    return args


def main() -> None:
    args = parsed()
    if not CUDA and args.size is SIZE:
        raise SystemExit("error: there is no GPU; the times of this bench are a GPU's")
    say = functools.partial(print, flush=True)
    say(
        f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}; "
        f"{args.layers} layers {args.size['hidden_size']} x {args.size['intermediate_size']}, "
        f"{args.batch} x {args.tokens[0] // args.batch} tokens, "
        f"{'eager' if args.eager else 'compiled'}, "
        f"{'every weight trains' if args.qat else f'LoRA of rank {args.rank}'}"
    )
    rows = []
    for name in chosen_arms(args):
        rows.append(alone(name, args))
        say(
            json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
        )
    for line in table(rows):
        say(line)
    ranks.finish(rows, args.json)


if __name__ == "__main__":
    main()

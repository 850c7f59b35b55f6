"""python -m fsdp_quant doctor | plan RECIPE: what this machine can do, and what a recipe runs on it."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from . import recipe as recipes
from .formats import FORMATS
from .modules.plan import PRODUCTS, build_plan
from .ops.capability import arch_of


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def doctor() -> None:
    """Versions, devices, collectives and formats, a line each."""
    arch = arch_of(_device())
    print(f"torch        {torch.__version__} (CUDA {torch.version.cuda or 'none'})")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices      {', '.join(names) or 'CPU'} ({arch})")
    backends = [b for b in ("nccl", "gloo") if dist.is_backend_available(b)]
    print(f"collectives  {', '.join(backends) or 'none'}")
    print("operations   PyTorch reference (every format, every device)")
    for fmt in FORMATS.values():
        print(f"format       {fmt.name:12} block {fmt.block}, scale {fmt.scale}, {fmt.bytes_per_element():.4f} B/element")


def plan(name: str, forward: str | None, backward: str | None) -> None:
    """The three products of a linear layer under a recipe, with their domains on this machine."""
    recipe = recipes.hybrid(forward, backward) if name == "hybrid" else recipes.by_name(name)
    built, arch = build_plan(recipe, "linear"), arch_of(_device())
    print(f"{recipe} on {arch}, bf16 activations; the backward keeps {built.saves} of the input")
    for product in PRODUCTS:
        (slot_a, side_a), (slot_b, side_b) = product.a, product.b
        a, b = built.hybrid(slot_a).side(side_a), built.hybrid(slot_b).side(side_b)
        domain, reason = built.domain(product, torch.bfloat16, arch)
        print(f"{product.name:6} {slot_a}.{side_a.value} ({a}) x {slot_b}.{side_b.value} ({b}): {domain} ({reason})")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp_quant", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices, formats")
    planner = commands.add_parser("plan", help="the products of a recipe")
    planner.add_argument("recipe", help=f"hybrid, or {', '.join(recipes.names())}")
    planner.add_argument("--forward", default="mxfp8")
    planner.add_argument("--backward", default="nvfp4")
    args = parser.parse_args(argv)
    try:
        doctor() if args.command == "doctor" else plan(args.recipe, args.forward, args.backward)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

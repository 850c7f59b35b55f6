# SPDX-License-Identifier: Apache-2.0
"""python -m fsdp_quant doctor | selftest | plan RECIPE | report RUN.jsonl | advise FILE.py: inspect
this machine, check its kernels, print a recipe's GEMMs, render a run's log, choose formats."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nccl

from . import recipe as recipes
from .formats import FORMATS
from .inspection import advise, report, selftest
from .inspection.plan import gemm_rows
from .inspection.remedies import Machine, remedies
from .linear.plan import PRODUCTS, build_plan
from .ops import extension, native
from .ops.capability import arch_of
from .qat import qat


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def doctor() -> None:
    """Print versions, GPUs, collectives, which operations run compiled per format, and remedies."""
    device, status = _device(), extension.STATUS
    built, cuda = status.build, [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    gpus = Counter(f"{torch.cuda.get_device_name(d)} ({arch_of(d)})" for d in cuda)
    facts = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "nvcc": f"{built.nvcc} (when the operators were built)"
        if built
        else "none (no compiled operators)",
        "built for": ", ".join(built.architectures) if built else "none",
        "operators": status.library or f"PyTorch reference only: {status.reason}",
        "GPUs": ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or "none",
        "NCCL": ".".join(map(str, nccl.version())) if dist.is_backend_available("nccl") else "none",
        "gloo": "available" if dist.is_backend_available("gloo") else "none",
    }
    for name, fact in facts.items():
        print(f"{name:14}{fact}")
    _print_operations({fmt.name: native.supported(fmt, device) for fmt in FORMATS.values()}, device)
    to_do = [f"to do: {line}" for line in remedies(Machine.this())]
    print("", *to_do or ["nothing is off"], sep="\n")


def _print_operations(reasons: dict[str, dict[str, str | None]], device: torch.device) -> None:
    """Print a line per format, a column per operation: native, or the number of the reason."""
    operations = list(dict.fromkeys(name for row in reasons.values() for name in row))
    numbers: dict[str, int] = {}
    width = max([len("native"), *map(len, operations)]) + 2
    table = {f"on {arch_of(device)}": operations}
    for fmt, row in reasons.items():
        cells = (row[op] for op in operations)
        table[fmt] = [
            "native" if why is None else f"[{numbers.setdefault(why, len(numbers) + 1)}]"
            for why in cells
        ]
    print()
    for name, cells in table.items():
        print(f"{name:14}" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
    for reason, number in numbers.items():
        print(f"[{number}] PyTorch reference: {reason}")


def plan(name: str, forward: str, backward: str, weight: str) -> None:
    """Print the three GEMMs of a linear layer under a recipe, and how this machine runs them."""
    if name == "qat":
        recipe = qat(weight)
    else:
        recipe = recipes.hybrid(forward, backward) if name == "hybrid" else recipes.by_name(name)
    device = _device()
    built, arch = build_plan(recipe, "linear").on(torch.bfloat16, device), arch_of(device)
    print(f"{recipe} on {arch}, bf16 activations; the backward keeps {built.saves} of the input")
    for product, row in zip(PRODUCTS, gemm_rows("", built, torch.bfloat16, device)):
        a, b = (
            f"{slot}.{direction.value} ({operand})"
            for (slot, direction), operand in zip((product.a, product.b), row.operands)
        )
        print(f"{row.product:6} {a} x {b}: {row.domain} ({row.reason})")


def _set_up(place: str) -> tuple[nn.Module, Iterable, advise.Loss | None]:
    """Return (model, batches, loss or None) from FILE.py:FUNCTION. Raises ValueError for anything
    else."""
    path, _, name = place.partition(":")
    name = name or "setup"
    setup, results = runpy.run_path(path).get(name), "(model, batches) or (model, batches, loss)"
    if not callable(setup):
        raise ValueError(f"{path} has no function {name!r}; write one that returns {results}")
    result = setup()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(f"{place} returned {type(result).__name__}; wanted {results}")
    model, batches, *loss = result
    return model, batches, loss[0] if loss else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp_quant", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices, which operations run compiled")
    of_tester = "compare kernels with the reference and products with fp64: a report to send"
    tester = commands.add_parser("selftest", help=of_tester)
    tester.add_argument("--report", type=Path, default=Path("fsdp_quant-selftest.json"))
    planner = commands.add_parser("plan", help="the products of a recipe")
    planner.add_argument("recipe", help=f"hybrid, qat, or {', '.join(recipes.names())}")
    planner.add_argument("--forward", default="mxfp8")
    planner.add_argument("--backward", default="nvfp4")
    planner.add_argument("--weight", default="mxfp4", help="format of qat")
    reporter = commands.add_parser("report", help="what fq.inspect(path=) wrote, as one HTML file")
    reporter.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    reporter.add_argument("-o", "--out", type=Path, default=Path("report.html"))
    adviser = commands.add_parser("advise", help="each layer's cheapest formats in a loss budget")
    results = "(model, batches) or (model, batches, loss)"
    adviser.add_argument("setup", metavar="FILE.py[:FUNCTION]", help=f"returns {results}")
    adviser.add_argument("--budget", type=float, default=0.01, help="of the loss, in its units")
    adviser.add_argument(
        "--gradient-error",
        type=float,
        default=advise.GRADIENT_ERROR,
        help="relative, of the gradient (default: %(default)s)",
    )
    adviser.add_argument(
        "--candidates", default=",".join(advise.CANDIDATES), help="families (default: %(default)s)"
    )
    adviser.add_argument(
        "--skip", action="append", default=[], help="as of fq.convert; may be repeated"
    )
    adviser.add_argument("--cost", choices=["time", "bytes"], default="time", help="to make small")
    adviser.add_argument("--on", help="GPU whose time counts, such as sm_90a")
    args = parser.parse_args(argv)
    try:
        if args.command == "selftest":
            return int(bool(selftest.run(_device(), args.report).failures))
        if args.command == "report":
            report.write(args.runs, args.out)
            print(f"written to {args.out}")
        elif args.command == "doctor":
            doctor()
        elif args.command == "advise":
            model, batches, loss = _set_up(args.setup)
            names = "budget", "gradient_error", "skip", "cost", "on"
            options: dict[str, Any] = {name: getattr(args, name) for name in names}
            candidates = args.candidates.split(",")
            advise.advise(model, batches, candidates=candidates, loss=loss, **options)
        else:
            plan(args.recipe, args.forward, args.backward, args.weight)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

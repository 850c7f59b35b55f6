# SPDX-License-Identifier: Apache-2.0
"""Look for races: every GEMM kernel of csrc/gemm/sm90_* many times, in a build whose threads sleep
at random at barriers. All runs must have the bits of the first, and the first the reference's
values.

    FSDP_QUANT_RANDOM_SLEEPS=1 FSDP_QUANT_CUDA_ARCHS=9.0a pip install --no-build-isolation -e .
    python -m dist_tests.kernels.sleeps [--runs 2000]

Runs are compared and counted on the device; the host waits at the end alone. Two or three
multiprocessors compute each product, so that a block computes several tiles. Exit status 1: bits or
values differ, an instance was not run, or the build does not sleep.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.grouped_gemm import grouped_operand_code
from dist_tests.kernels import expected
from dist_tests.kernels.entries import on_device
from dist_tests.kernels.expected import BF16, FP32
from dist_tests.kernels.sanitize_products import (
    BOUND,
    BY_128,
    BY_128X128,
    BY_512,
    ROW,
    arguments,
    moved,
    operand,
)
from dist_tests.single.hopper import Operators
from fsdp_quant.formats import E4M3, E5M2, IDENTITY, Element
from fsdp_quant.ops import extension, native

# Files of csrc/gemm, and the blocks of their operands. None: bf16 values.
GROUPED = {
    "sm90_fp8_grouped_gemm_rowwise": (ROW, ROW),
    "sm90_fp8_grouped_gemm_1x128_128x128": (BY_128, BY_128X128),
    "sm90_fp8_grouped_gemm_1x128_1x128": (BY_128, BY_128),
    "sm90_fp8_grouped_gemm_128x128_1x128": (BY_128X128, BY_128),
    "sm90_bf16_grouped_gemm": (None, None),
}
DENSE = "sm90_fp8_gemm_1x512_1x512"
# Multiprocessors, and the tile that the schedule (csrc/gemm/sm90_gemm.cpp) chooses for them.
TILES = {2: "256x128, clusters of 2", 3: "128x128"}
# Sizes with tails. Groups of rows, and of the contraction (as many): one is empty.
M, N, K, K_OF_ROWS = 450, 208, 1168, 656
ROW_ENDS, K_ENDS, M_OF_K = (0, 130, 130, 250, 640), (0, 1280, 1280, 2560, 4704), 200
BITS = {BF16: torch.int16, FP32: torch.int32}


class Entry(NamedTuple):
    """A call of one kernel instance. start: what out holds before, NaN or what is added to."""

    operator: str
    instance: tuple[str, ...]
    a: native.Operand
    b: native.Operand
    start: Tensor
    processors: int
    offsets: Tensor | None = None
    accumulate: bool = False

    def on_device(self) -> Entry:
        offsets = None if self.offsets is None else on_device(self.offsets)
        start = on_device(self.start)
        return self._replace(a=moved(self.a), b=moved(self.b), start=start, offsets=offsets)

    def run(self, operators, out: Tensor) -> Tensor:
        """The result: `out`, or new memory."""
        kinds = [grouped_operand_code(o) for o in (self.a, self.b)]
        given, count = arguments(self.a, self.b), {"sm_count": self.processors}
        if self.operator == "gemm":
            return operators.gemm(*given, *kinds, out.dtype, **count)
        if self.operator == "gemm_out":
            operators.gemm_out(out, *given, *kinds, self.accumulate, **count)
        elif self.operator == "grouped_gemm":
            operators.grouped_gemm(out, *given, self.offsets, *kinds, **count)
        else:
            operators.grouped_gemm_wgrad(
                out, *given, self.offsets, *kinds, self.accumulate, **count
            )
        return out


def _operand(
    lines: int, k: int, block: tuple | None, seed: int, element: Element, groups: int = 1
) -> native.Operand:
    """Codes with scales; bf16 values, with the scale of each group of the product."""
    if block is not None:
        return operand(lines, k, block, seed, element, groups)
    values = laws.values(groups * lines, k, seed=seed)
    scale = 2.0 ** (torch.arange(len(ROW_ENDS) - 1) - seed).float()
    return native.Operand(values.view(groups, lines, k).squeeze(0), scale, IDENTITY)


def entries() -> Iterator[Entry]:
    """Every instance, into each kind of output that it has."""
    for (count, tile), (e, f) in itertools.product(
        TILES.items(), ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
    ):
        instance = (DENSE, f"{e.name} x {f.name}", "", tile)
        a, b = operand(M, K, BY_512, 1, e), operand(N, K, BY_512, 2, f)
        for operator, dtype, adds in (
            ("gemm", BF16, False),
            ("gemm_out", FP32, False),
            ("gemm_out", FP32, True),
        ):
            yield Entry(operator, instance, a, b, start((M, N), dtype, adds), count, None, adds)
    for (kernel, blocks), e, (count, tile) in itertools.product(
        GROUPED.items(), (E4M3, E5M2), TILES.items()
    ):
        of_a, of_b = blocks
        if e is E5M2 and of_a in (None, BY_128X128):
            continue
        elements, groups = "bf16" if of_a is None else f"{e.name} x e4m3", len(ROW_ENDS) - 1
        of_rows = () if of_a == BY_128X128 else (BF16, FP32)  # rows of several groups share no tile
        for dtype in of_rows:
            a = _operand(ROW_ENDS[-1] + 3, K_OF_ROWS, of_a, 1, e)
            b = _operand(N, K_OF_ROWS, of_b, 2, E4M3, groups)
            offsets = torch.tensor(ROW_ENDS, dtype=torch.int32)
            out = start((len(a.data), N), dtype, False)
            instance = (kernel, elements, "groups of M", tile)
            yield Entry("grouped_gemm", instance, a, b, out, count, offsets)
        a = _operand(M_OF_K, K_ENDS[-1], of_a, 3, e)
        b = _operand(N, K_ENDS[-1], of_b, 4, E4M3)
        offsets = torch.tensor(K_ENDS, dtype=torch.int32)
        for dtype, adds in ((BF16, False), (FP32, False), (FP32, True)):
            out = start((groups, M_OF_K, N), dtype, adds)
            instance = (kernel, elements, "groups of K", tile)
            yield Entry("grouped_gemm_wgrad", instance, a, b, out, count, offsets, adds)


def start(shape: tuple[int, ...], dtype: torch.dtype, adds: bool) -> Tensor:
    if not adds:
        return torch.full(shape, torch.nan, dtype=dtype)
    return laws.values(shape[-2], shape[-1], dtype=dtype).expand(shape).contiguous()


def soak(entry: Entry, operators, runs: int) -> tuple[Tensor, Tensor]:
    """(the first result, how many have other bits), on the device; does not wait."""
    entry = entry.on_device()
    out, first = torch.empty_like(entry.start), None
    wrong = torch.zeros((), dtype=torch.int64, device=out.device)
    for _ in range(runs):
        out.copy_(entry.start)
        made = entry.run(operators, out)
        if first is None:
            first = made.clone()
        wrong += (made.view(BITS[made.dtype]) != first.view(BITS[made.dtype])).any()
    assert first is not None
    return first, wrong


def is_reference(entry: Entry, got: Tensor, emulation: Operators) -> bool:
    """The values of the reference within a bound, NaN where it wrote nothing."""
    want = entry.run(emulation, entry.start.clone())
    error = (got.nan_to_num().double() - want.nan_to_num().double()).norm()
    there = want.nan_to_num().double().norm()
    return torch.equal(got.isnan(), want.isnan()) and bool(error <= BOUND * there)


def kernels_run(given: list[Entry]) -> list[str]:
    """The kernel of each entry, by the profiler."""
    moved_entries = [e.on_device() for e in given]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for e in moved_entries:
            e.run(torch.ops.fsdp_quant, e.start)
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if "sm90::kernel<" in e.name]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def report(given: list[Entry], operators, runs: int) -> list[str]:
    """Print a line per instance; what is wrong."""
    found, began = [soak(e, operators, runs) for e in given], time.monotonic()
    table: dict[tuple[str, ...], list[int]] = {}
    wrong, emulation = [], Operators()
    for entry, (first, mismatches) in zip(given, found):
        row = table.setdefault(entry.instance, [0, 0])
        row[0] += runs
        row[1] += int(mismatches)
        if not is_reference(entry, first.cpu(), emulation):
            wrong.append(f"{entry.operator} {entry.instance} to {first.dtype}: not the reference's")
    for instance, (ran, mismatches) in table.items():
        print(f"{' | '.join(instance):92} {ran:6} runs, {mismatches} mismatches")
        if mismatches:
            wrong.append(f"{instance}: {mismatches} of {ran} runs have other bits than the first")
    print(f"{len(table)} instances, waited {time.monotonic() - began:.0f} s")
    return wrong


def why_not() -> str | None:
    """Why races cannot be looked for here."""
    if expected.WHY_NOT is not None:
        return expected.WHY_NOT
    if torch.cuda.get_device_capability() != (9, 0):
        return "these kernels are for sm_90"
    build = extension.STATUS.build
    if build is None or "RANDOM_SLEEPS" not in build.options:
        return "the build does not sleep: install with FSDP_QUANT_RANDOM_SLEEPS=1"
    return None


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000, help="of each instance and output")
    args = parser.parse_args(given)
    if (reason := why_not()) is not None:
        print(reason)
        return 1
    every = list(entries())
    kernels = kernels_run(every)
    instances = {e.instance for e in every}
    wrong = []
    if len(kernels) != len(every) or not (
        len(set(kernels)) == len(set(zip(kernels, (e.instance for e in every)))) == len(instances)
    ):
        wrong.append(f"{len(set(kernels))} kernels ran for {len(instances)} instances: see TILES")
    wrong += report(every, torch.ops.fsdp_quant, args.runs)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

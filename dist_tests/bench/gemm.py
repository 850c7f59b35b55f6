# SPDX-License-Identifier: Apache-2.0
"""Products of `fq.gemm` over torch.mm in bf16 (cuBLAS) of the same values, in the same run; grouped
ones over torch._grouped_mm in bf16.

    python -m dist_tests.bench.gemm [--shapes 8192x8192x8192] [--groups 8 64] [--rows mxfp8 nvfp4]
    [--json out.json]

A table a shape M x N x K ([M, K] by [N, K], random values): microseconds (median), TFLOP/s, ratio
to bf16, floor and aim of that ratio, and "under" where it is below the floor; then TFLOP/s of bf16
before and after the row, and "off": how far the result is from bf16's, as a share of its norm. A
row that is off by more than a quarter failed. The floor of a geometric mean is judged where every
shape of the default list ran. Exit status 1: a row failed; 2: nothing can be measured here.

Products are bound by power, so calls are made back to back, over three inputs in turn, and a row's
come between two series of bf16's: the mean of their medians is what it is measured by. What a row's
time holds:

    (nothing said)      operands lie as the product reads them; for "anchored", as the quantizer
                        makes them
    anchoring included  operands are compact: both are anchored by a pass of their own
    decode included     operands are compact: both are decoded to bf16, which cuBLAS multiplies

Grouped products are those of experts with 1024 tokens each and weights [4096, 2048]: a table a
number of experts.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fsdp_quant as fq
from dist_tests.bench.clock import (
    DeviceClock,
    count,
    extents,
    facts,
    finish,
    first_line,
    measurable,
    recover,
    wanted,
)
from dist_tests.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from fsdp_quant.ops import native
from fsdp_quant.ops.layout import ANCHORED, ANCHORED_128, ANCHORED_512, COMPACT, NATIVE

Shape = tuple[int, int, int]
Call = Callable[[], Tensor]

SQUARE, LARGE = (4096, 4096, 4096), (8192, 8192, 8192)
SHAPES: tuple[Shape, ...] = (
    SQUARE,
    LARGE,
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 6144, 4096),
)
INPUTS = 3
# tokens of an expert, [N, K] of its weight
GROUPS, TOKENS, EXPERT = ((8, 64, 128), 1024, (4096, 2048))
FARTHEST = 0.25  # share of the norm of the bf16 product


# What is measured #


@dataclass(frozen=True)
class Row:
    """work: ([M, K], [N, K]) -> the call. floor, aim: ratios to bf16, by shape or of every shape.

    mean:  (floor, aim) of the geometric mean over `SHAPES`.
    """

    name: str
    floor: Mapping[Shape, float] | float | None
    aim: Mapping[Shape, float] | float | None
    work: Callable[[Tensor, Tensor], Call]
    mean: tuple[float, float] | None = None


def by_shape(*values: float) -> dict[Shape, float]:
    return dict(zip(SHAPES, values, strict=True))


def at(target: Mapping[Shape, float] | float | None, shape: Shape) -> float | None:
    return target.get(shape) if isinstance(target, Mapping) else target


def operand(fmt: str, values: Tensor, layout: str, direction: fq.Direction) -> fq.Storage:
    """[outer, contraction] values quantized into `layout`, the way a module quantizes what this
    direction contracts."""
    x = values if direction is fq.ROWWISE else values.t().contiguous()
    made, _ = fq.HybridQuantizer(fmt, fmt).operands(x, (direction,), layouts={direction: layout})
    return made[direction]


def product(
    a: str,
    b: str,
    domain: str,
    layout: str,
    direction: fq.Direction = fq.ROWWISE,
    into_fp32: bool = False,
) -> Callable[[Tensor, Tensor], Call]:
    """fq.gemm of two formats, operands made before; into_fp32: added to an fp32 [M, N]."""

    def work(x: Tensor, w: Tensor) -> Call:
        sides = operand(a, x, layout, direction), operand(b, w, layout, direction)
        if not into_fp32:
            return lambda: fq.gemm(*sides, domain=domain)
        out = x.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
        return lambda: fq.gemm(*sides, out=out, accumulate=True, domain=domain)

    return work


TENSOR, LINE, VECTOR, TILE, MX, NV = (
    "fp8_tensor",
    "fp8_row",
    "fp8_1x128",
    "fp8_128x128",
    "mxfp8",
    "nvfp4",
)
EXACT_FLOOR, EXACT_AIM = {SQUARE: 0.80, LARGE: 0.90}, {SQUARE: 0.88, LARGE: 0.94}
WGRAD = fq.COLUMNWISE

ROWS = (
    Row(
        "fp8 tensor",
        by_shape(1.60, 1.77, 1.67, 1.68, 1.76),
        1.75,
        product(TENSOR, TENSOR, "native", NATIVE),
    ),
    Row(
        "fp8 row",
        by_shape(1.57, 1.51, 1.45, 1.65, 1.47),
        1.70,
        product(LINE, LINE, "native", NATIVE),
    ),
    Row(
        "fp8 1x128 x 128x128",
        by_shape(1.20, 1.60, 1.60, 1.60, 1.60),
        by_shape(1.50, 1.74, 1.73, 1.75, 1.79),
        product(VECTOR, TILE, "native", NATIVE),
    ),
    Row(
        "fp8 1x128 x 1x128, fp32 +=",
        None,
        None,
        product(VECTOR, VECTOR, "native", NATIVE, WGRAD, True),
        (1.15, 1.35),
    ),
    Row("mxfp8 anchored", 1.45, 1.65, product(MX, MX, "anchored", ANCHORED)),
    Row("mxfp8 anchored, anchoring included", 1.35, 1.50, product(MX, MX, "anchored", COMPACT)),
    Row(
        "mxfp8 anchored by 128 tokens (wgrad)",
        None,
        None,
        product(MX, MX, "anchored", ANCHORED_128, WGRAD),
    ),
    Row(
        "mxfp8 anchored by 512 tokens (wgrad)",
        None,
        None,
        product(MX, MX, "anchored", ANCHORED_512, WGRAD),
    ),
    Row(
        "mxfp8 anchored by 128 tokens, fp32 +=",
        None,
        None,
        product(MX, MX, "anchored", ANCHORED_128, WGRAD, True),
    ),
    Row(
        "mxfp8 anchored by 512 tokens, fp32 +=",
        None,
        None,
        product(MX, MX, "anchored", ANCHORED_512, WGRAD, True),
    ),
    Row(
        "mxfp6 anchored, anchoring included",
        None,
        None,
        product("mxfp6", "mxfp6", "anchored", COMPACT),
    ),
    Row(
        "mxfp4 anchored, anchoring included",
        None,
        None,
        product("mxfp4", "mxfp4", "anchored", COMPACT),
    ),
    Row("mxfp8 exact, decode included", EXACT_FLOOR, EXACT_AIM, product(MX, MX, "bf16", COMPACT)),
    Row("nvfp4 exact, decode included", EXACT_FLOOR, EXACT_AIM, product(NV, NV, "bf16", COMPACT)),
    Row("mxfp8 x nvfp4, decode included", EXACT_FLOOR, EXACT_AIM, product(MX, NV, "bf16", COMPACT)),
)


# Products of experts: x [tokens, K], w [E, N, K], dy [tokens, N], offsets int32 [E + 1].


@dataclass(frozen=True)
class Experts:
    x: Tensor
    w: Tensor
    dy: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class GroupedRow:
    """work, plain: the call, and that of torch in bf16."""

    name: str
    floor: float | None
    aim: float | None
    work: Callable[[Experts], Call]
    plain: Callable[[Experts], Call]


def codes(fmt: str, values: Tensor) -> native.Operand:
    """[outer, contraction] values, or those of every expert, as a product reads them."""
    made = operand(fmt, values.reshape(-1, values.shape[-1]), NATIVE, fq.ROWWISE)
    return native.Operand(made.data.view(values.shape), made.scale, made.fmt)


def fprop(a: str, b: str) -> Callable[[Experts], Call]:
    def work(e: Experts) -> Call:
        x, w = codes(a, e.x), codes(b, e.w)
        return lambda: grouped_gemm(x, w, e.offsets)

    return work


def dgrad(a: str, b: str) -> Callable[[Experts], Call]:
    def work(e: Experts) -> Call:
        dy, w = codes(a, e.dy), codes(b, e.w.transpose(1, 2).contiguous())
        return lambda: grouped_gemm(dy, w, e.offsets)

    return work


def wgrad(a: str, b: str, into_fp32: bool) -> Callable[[Experts], Call]:
    """into_fp32: added to an fp32 [E, N, K]."""

    def work(e: Experts) -> Call:
        dy, x = codes(a, e.dy.t().contiguous()), codes(b, e.x.t().contiguous())
        if not into_fp32:
            return lambda: grouped_gemm_wgrad(dy, x, e.offsets)
        out = e.w.new_zeros(e.w.shape, dtype=torch.float32)
        return lambda: grouped_gemm_wgrad(dy, x, e.offsets, out, accumulate=True)

    return work


def bf16_fprop(e: Experts) -> Call:
    return lambda: torch._grouped_mm(e.x, e.w.transpose(1, 2), offs=e.offsets[1:])


def bf16_dgrad(e: Experts) -> Call:
    return lambda: torch._grouped_mm(e.dy, e.w, offs=e.offsets[1:])


def bf16_wgrad(e: Experts) -> Call:
    return lambda: torch._grouped_mm(e.dy.t(), e.x, offs=e.offsets[1:])


GROUPED_ROWS = (
    GroupedRow("grouped 1x128 x 128x128, fprop", 1.25, 1.45, fprop(VECTOR, TILE), bf16_fprop),
    GroupedRow("grouped 1x128 x 128x128, dgrad", 1.25, 1.45, dgrad(VECTOR, TILE), bf16_dgrad),
    GroupedRow(
        "grouped 1x128 x 1x128, wgrad", 1.05, 1.20, wgrad(VECTOR, VECTOR, False), bf16_wgrad
    ),
    GroupedRow(
        "grouped 1x128 x 1x128, wgrad, fp32 +=", None, None, wgrad(VECTOR, VECTOR, True), bf16_wgrad
    ),
    GroupedRow("grouped row, fprop", 1.25, 1.45, fprop(LINE, LINE), bf16_fprop),
    GroupedRow("grouped row, dgrad", 1.25, 1.45, dgrad(LINE, LINE), bf16_dgrad),
    GroupedRow("grouped row, wgrad", 1.05, 1.20, wgrad(LINE, LINE, False), bf16_wgrad),
)


def off_by(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`."""
    want = want.float()
    return ((got.float() - want).norm() / want.norm()).item()


# Tables #


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


class Bench:
    """The clock, the rows, and everything that was measured (`report`, plain data)."""

    def __init__(self, clock: DeviceClock, device: torch.device, filters: Sequence[str]):
        self.clock, self.device = clock, device
        self.rows = [row for row in ROWS if wanted(row.name, filters)]
        self.grouped_rows = [row for row in GROUPED_ROWS if wanted(row.name, filters)]
        self.report: dict = {"repeats": clock.repeats, "inputs": INPUTS, "tables": [], "means": []}

    def inputs(self, shape: Shape) -> list[tuple[Tensor, Tensor]]:
        """Random bf16 [M, K] and [N, K]."""
        m, n, k = shape
        generator = torch.Generator(self.device).manual_seed(0)
        return [
            tuple(
                torch.randn(o, k, dtype=torch.bfloat16, device=self.device, generator=generator)
                for o in (m, n)
            )
            for _ in range(INPUTS)
        ]

    def experts(self, groups: int) -> list[Experts]:
        n, k = EXPERT
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(
                *shape, dtype=torch.bfloat16, device=self.device, generator=generator
            )

        offsets = torch.arange(
            0, (groups + 1) * TOKENS, TOKENS, dtype=torch.int32, device=self.device
        )
        tokens = groups * TOKENS
        return [
            Experts(random(tokens, k), random(groups, n, k), random(tokens, n), offsets)
            for _ in range(2)
        ]

    def table(self, shape: Shape) -> None:
        pairs = self.inputs(shape)
        plain = [lambda x=x, w=w: torch.mm(x, w.t()) for x, w in pairs]
        found = self._head("x".join(map(str, shape)), {"shape": list(shape)}, INPUTS)
        for row in self.rows:
            made = (lambda row=row: [row.work(x, w) for x, w in pairs]), (lambda: plain)
            self._row(
                found,
                row.name,
                at(row.floor, shape),
                at(row.aim, shape),
                *made,
                2 * math.prod(shape),
            )

    def grouped_table(self, groups: int) -> None:
        inputs = self.experts(groups)
        title = f"{groups} experts of {TOKENS} tokens, {'x'.join(map(str, EXPERT))}"
        found = self._head(title, {"groups": groups}, len(inputs))
        for row in self.grouped_rows:
            made = (
                (lambda row=row: [row.work(e) for e in inputs]),
                (lambda row=row: [row.plain(e) for e in inputs]),
            )
            self._row(
                found, row.name, row.floor, row.aim, *made, 2 * groups * TOKENS * math.prod(EXPERT)
            )
            gc.collect()
            torch.cuda.empty_cache()

    def _head(self, title: str, facts: dict, inputs: int) -> dict:
        found = {"title": title, **facts, "rows": []}
        self.report["tables"].append(found)
        print(f"\n{title}; {inputs} inputs in turn")
        judged = f"{'x bf16':>7} {'floor':>6} {'aim':>5} {'':5}"
        print(f"{'row':38} {'us':>8} {'TFLOP/s':>8} {judged} {'bf16 TFLOP/s':>12} {'off':>6}")
        return found

    def _row(
        self,
        found: dict,
        name: str,
        floor: float | None,
        aim: float | None,
        work: Callable[[], list[Call]],
        plain: Callable[[], list[Call]],
        flop: int,
    ) -> None:
        result = {"name": name, "floor": floor, "aim": aim}
        found["rows"].append(result)
        try:
            self._measure(name, work(), plain(), flop, result)
        except Exception as error:  # of any kind: one row does not cost the others
            result["error"] = first_line(error)
            print(f"{name:38} failed: {result['error']}", flush=True)
            recover()

    def _measure(
        self, name: str, calls: list[Call], plain: list[Call], flop: int, result: dict
    ) -> None:
        result["off"] = off_by(calls[0](), plain[0]())
        if not result["off"] <= FARTHEST:  # NaN too
            raise ValueError(f"the result is off by {result['off']:.3f} of bf16's norm")
        before, sample, after = (self.clock.sustained(c) for c in (plain, calls, plain))
        base = statistics.mean((before.us, after.us))
        tflops, *plain_tflops = (flop / us / 1e6 for us in (sample.us, before.us, after.us))
        ratio, floor, aim = base / sample.us, result["floor"], result["aim"]
        result |= {
            **sample._asdict(),
            "tflops": tflops,
            "ratio": ratio,
            "bf16_us": [before.us, after.us],
            "bf16_tflops": plain_tflops,
            "under": floor is not None and ratio < floor,
            "reached": aim is not None and ratio >= aim,
        }
        result["hidden"] = sample.hidden and before.hidden and after.hidden
        mark = "under" if result["under"] else ""
        note = "" if result["hidden"] else "  the device waited for the host"
        print(
            f"{name:38} {sample.us:8.1f} {tflops:8.0f} {ratio:7.3f} {_shown(floor):>6} "
            f"{_shown(aim):>5} {mark:5} {' '.join(f'{t:.0f}' for t in plain_tflops):>12} "
            f"{result['off']:6.3f}{note}",
            flush=True,
        )

    def means(self) -> None:
        """Geometric means over `SHAPES` of the rows that are judged by them."""
        for row in self.rows:
            ratios = {
                tuple(t["shape"]): r["ratio"]
                for t in self.report["tables"]
                if "shape" in t
                for r in t["rows"]
                if r["name"] == row.name and "ratio" in r
            }
            if row.mean is None or not all(shape in ratios for shape in SHAPES):
                continue
            floor, aim = row.mean
            mean = statistics.geometric_mean(ratios[shape] for shape in SHAPES)
            result = {"name": row.name, "floor": floor, "aim": aim, "ratio": mean}
            result |= {"under": mean < floor, "reached": mean >= aim}
            self.report["means"].append(result)
            mark = "  under" if result["under"] else ""
            print(
                f"\n{row.name}: geometric mean {mean:.3f}, floor {floor:.2f}, aim {aim:.2f}{mark}"
            )

    def run(self, shapes: Sequence[Shape], groups: Sequence[int]) -> None:
        tables = [lambda s=s: self.table(s) for s in shapes if self.rows]
        tables += [lambda g=g: self.grouped_table(g) for g in groups if self.grouped_rows]
        for table in tables:
            table()
            gc.collect()
            torch.cuda.empty_cache()
        self.means()

    def _results(self) -> list[dict]:
        return [r for t in self.report["tables"] for r in t["rows"]]

    def summary(self) -> str:
        """The last line: how many rows are where, and the worst of those with a floor."""
        rows, named = (
            self._results(),
            {id(r): t["title"] for t in self.report["tables"] for r in t["rows"]},
        )
        measured = [r for r in [*rows, *self.report["means"]] if "ratio" in r]
        judged = [r for r in measured if r["floor"] is not None]
        under, reached = (sum(r["under"] for r in judged), sum(r["reached"] for r in measured))
        line = f"{len(rows)} rows: {len(judged)} with a floor, {under} under it"
        line += f", {reached} at their aim, {sum('error' in r for r in rows)} failed"
        if judged:
            worst = min(judged, key=lambda r: r["ratio"] / r["floor"])
            where = named.get(id(worst), "geometric mean")
            line += f"; lowest over its floor: {worst['name']}, {where}"
            line += f", {worst['ratio']:.3f} of {worst['floor']:.2f}"
        return line

    @property
    def failed(self) -> bool:
        return any("error" in r for r in self._results())


def on_device(args) -> int:
    device = measurable()
    if device is None:
        return 2
    clock = DeviceClock(device, args.repeats)
    bench = Bench(clock, device, args.rows)
    shapes = SHAPES if args.shapes is None else args.shapes
    groups = GROUPS if args.groups is None else args.groups
    bench.report = {**facts(device), "shapes": shapes, "groups": groups, **bench.report}
    print(
        f"{bench.report['device']}, torch {torch.__version__}; medians of {clock.repeats}, made "
        "back to back"
    )
    clock.wake()
    return finish(bench, lambda: bench.run(shapes, groups), args.json)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ", ".join("x".join(map(str, s)) for s in SHAPES)
    made.add_argument(
        "--shapes", type=extents("8192x8192x8192"), nargs="*", help=f"M x N x K (default: {shapes})"
    )
    made.add_argument(
        "--groups", type=count, nargs="*", help=f"numbers of experts (default: {GROUPS})"
    )
    made.add_argument(
        "--rows", nargs="+", default=[], help="only rows whose name contains one of these"
    )
    made.add_argument("--json", help="write all numbers to this file")
    made.add_argument("--repeats", type=count, default=25, help="timed calls a row (default: 25)")
    return made


def main() -> int:
    return on_device(parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())

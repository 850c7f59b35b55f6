# SPDX-License-Identifier: Apache-2.0
"""Training steps of linear layers, each recipe over bf16, on one GPU.

    python -m dist_tests.bench.linear [--what mlp linear host] [--recipes fp8_current mxfp8]
    [--compiled] [--torchao] [--batch-invariant]
                                      [--json out.json]

    mlp     4 layers x + down(silu(gate(h)) * up(h)), h = RMSNorm(x): 4096 -> 14336 -> 4096, 8192
            tokens; "fused": as fq.LayerNormMLP of the same weights, which the floors are of;
            "recomputed": with recompute="gate_up"
    linear  one layer 4096 -> 14336, 8192 tokens
    host    one layer 1024 -> 1024, 128 tokens: host microseconds a step, until everything is queued

--batch-invariant prints instead what `fq.numerics.batch_invariant` costs: forwards of the layer of
"linear" for 1, 8 and 4096 tokens, with bf16 and with the token-local ones of the recipes, outside
and inside; weights of recipes are codes (`fq.freeze`).

No biases; weights and activations are bf16. A step is the forward and the backward of a fixed
random gradient, to the input and to every parameter. Between two steps, outside the time, plain
gradient descent of rate 0 writes every parameter, and the gradients are dropped: to the library the
weights have changed, as in training. Their quantization is then part of each step, and histories of
delayed scaling roll.

mlp and linear: milliseconds (median), ratio to bf16 under torch.compile, floor and aim of that
ratio, "under" where it is below the floor. Products are bound by power, so steps are made back to
back, and a row's come between two series of compiled bf16's: the mean of their medians is what it
is measured by. "peak" is the memory of model and step together, beyond what was allocated before
the model was made. "products" are the domains that ran.

host: a row's rounds come after as many of nn.Linear in bf16; ratio to it, and "over" where that is
      above the limit.

Exit status 1: a row failed; 2: nothing can be measured here.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters

import fsdp_quant as fq
from dist_tests.bench.clock import (
    DeviceClock,
    count,
    facts,
    finish,
    first_line,
    measurable,
    recover,
)

LAYERS, DIM, HIDDEN, TOKENS = 4, 4096, 14336, 8192
HOST_DIM, HOST_TOKENS, HOST_STEPS, HOST_ROUNDS = 1024, 128, 20, 31
HOST_LIMIT, HOST_AIM = 3.0, 2.0  # x nn.Linear
SETTLE_MS = 500.0
WHAT = ("mlp", "linear", "host")
GIB = 2**30

RECIPES: dict[str, Callable[[], fq.Recipe]] = {
    "fp8_current": fq.recipes.fp8_current,
    "fp8_delayed": fq.recipes.fp8_delayed,
    "fp8_row": fq.recipes.fp8_row,
    "fp8_block": fq.recipes.fp8_block,
    "mxfp8": fq.recipes.mxfp8,
    "fp8_block_token": functools.partial(fq.recipes.fp8_block, accuracy="token"),
    "mxfp8_token": functools.partial(fq.recipes.mxfp8, accuracy="token"),
    "nvfp4": fq.recipes.nvfp4,
    "hybrid": functools.partial(fq.recipes.hybrid, "mxfp8", "nvfp4"),
    "nvfp4_exact": functools.partial(fq.recipes.nvfp4, scale_rule="fp8_exact"),
    "hybrid_exact": functools.partial(fq.recipes.hybrid, "mxfp8", "nvfp4", scale_rule="fp8_exact"),
}


# Of the eager mlp in fused modules.
FLOORS = {"fp8_delayed": 1.5, "fp8_current": 1.5, "fp8_block": 1.35, "mxfp8": 1.3}
AIMS = {"fp8_delayed": 1.75, "fp8_current": 1.70, "fp8_block": 1.60, "mxfp8": 1.60}
TORCHAO_RECIPES = ("tensorwise", "rowwise_with_gw_hp", "rowwise")


# What is measured #


class Block(nn.Module):
    """RMSNorm and SwiGLU, with a residual."""

    def __init__(self, dim: int, hidden: int, device: torch.device):
        super().__init__()
        self.norm = nn.RMSNorm(dim, device=device, dtype=torch.bfloat16)
        self.gate, self.up = linear(dim, hidden, device), linear(dim, hidden, device)
        self.down = linear(hidden, dim, device)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def linear(dim: int, out: int, device: torch.device) -> nn.Linear:
    return nn.Linear(dim, out, bias=False, device=device, dtype=torch.bfloat16)


class Problem(NamedTuple):
    """A model, the same at each call, and the widths of its input and output."""

    title: str
    build: Callable[[torch.device], nn.Module]
    tokens: int
    dim: int
    out: int
    trains: bool = True  # False: forwards alone


MLP = Problem(
    f"mlp: {LAYERS} layers {DIM} -> {HIDDEN} -> {DIM}, {TOKENS} tokens",
    lambda device: nn.Sequential(*(Block(DIM, HIDDEN, device) for _ in range(LAYERS))),
    TOKENS,
    DIM,
    DIM,
)
LINEAR = Problem(
    f"linear: {DIM} -> {HIDDEN}, {TOKENS} tokens",
    functools.partial(linear, DIM, HIDDEN),
    TOKENS,
    DIM,
    HIDDEN,
)
HOST = Problem(
    f"host: {HOST_DIM} -> {HOST_DIM}, {HOST_TOKENS} tokens",
    functools.partial(linear, HOST_DIM, HOST_DIM),
    HOST_TOKENS,
    HOST_DIM,
    HOST_DIM,
)


class Data(NamedTuple):
    """Random [tokens, dim] input and [tokens, out] gradient of the output, for every row of a
    problem."""

    x: Tensor
    dy: Tensor

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Data:
        generator = torch.Generator(device).manual_seed(1)
        x, dy = (
            torch.randn(
                problem.tokens, width, dtype=torch.bfloat16, device=device, generator=generator
            )
            for width in (problem.dim, problem.out)
        )
        return cls(x.requires_grad_(), dy)


class Arm(NamedTuple):
    """prepare: the bf16 model -> what is run."""

    name: str
    prepare: Callable[[nn.Module], nn.Module]
    floor: float | None = None
    aim: float | None = None


class Step:
    """Forward and backward of one arm; `update` is what comes between two of them."""

    def __init__(self, problem: Problem, arm: Arm, data: Data):
        torch.manual_seed(0)
        self.data, self.trains = data, problem.trains
        self.model = arm.prepare(problem.build(data.x.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.trains):
            y = self.model(self.data.x)
        if self.trains:
            y.backward(self.data.dy)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.data.x.grad = None
        # the next batch: its codes are made anew
        torch.autograd.graph.increment_version(self.data.x)


BASE = Arm("bf16 compiled", torch.compile)
PLAIN = Arm("bf16 eager", lambda model: model)


def converted(recipe: str, compiled: bool) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        fq.convert(model, RECIPES[recipe]())
        return torch.compile(model) if compiled else model

    return prepare


def fused(recipe: str, recompute: str | None = None) -> Callable[[nn.Module], nn.Module]:
    """The blocks of the mlp as LayerNormMLP modules."""

    def prepare(model: nn.Module) -> nn.Module:
        layers = nn.Sequential()
        for i, block in enumerate(model):
            weight = block.gate.weight
            layer = fq.LayerNormMLP(
                weight.shape[1],
                weight.shape[0],
                bias=False,
                normalization="RMSNorm",
                residual=True,
                eps=torch.finfo(torch.float32).eps,
                device=weight.device,
                dtype=weight.dtype,
                recompute=recompute,
                recipe=RECIPES[recipe](),
                name=f"{i}",
            )
            names = {"norm": "norm", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
            layer.load_state_dict(
                {f"{names[k.split('.')[0]]}.weight": v for k, v in block.state_dict().items()}
            )
            layers.append(layer)
            model[i] = None  # the last that holds the plain weights
        return layers

    return prepare


def recipe_arms(recipes: Sequence[str], compiled: bool, judged: bool) -> list[Arm]:
    """judged: this problem has fused modules, floors and aims."""
    floors, aims = (FLOORS, AIMS) if judged else ({}, {})
    arms = []
    for name in recipes:
        arms.append(Arm(f"{name} eager", converted(name, False)))
        if judged:
            arms.append(Arm(f"{name} fused eager", fused(name), floors.get(name), aims.get(name)))
            arms.append(Arm(f"{name} recomputed eager", fused(name, "gate_up")))
        arms += [Arm(f"{name} compiled", converted(name, True))] if compiled else []
    return arms


class BatchInvariant(nn.Sequential):
    """What it holds, inside `fq.numerics.batch_invariant`."""

    def forward(self, x: Tensor) -> Tensor:
        with fq.numerics.batch_invariant():
            return super().forward(x)


def frozen(recipe: fq.Recipe, around: Callable[..., nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        model = around(fq.convert(nn.Sequential(model.requires_grad_(False)), recipe))
        if recipe != fq.recipes.identity():
            fq.freeze(model)
        return model

    return prepare


def invariant_arms(recipes: Sequence[str]) -> list[Arm]:
    """bf16 and token-local recipes, outside and inside `fq.numerics.batch_invariant`."""
    made = {"bf16": fq.recipes.identity()} | {name: RECIPES[name]() for name in recipes}
    return [
        Arm(f"{name} {where}", frozen(recipe, around))
        for name, recipe in made.items()
        if fq.recipes.is_token_local(recipe)
        for where, around in (("eager", nn.Sequential), ("batch-invariant", BatchInvariant))
    ]


def torchao_arms() -> list[Arm]:
    """float8 training of torchao under torch.compile; [] where it does not import."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except Exception as error:  # of any kind: a peer is an option
        print(f"torchao is not measured: {first_line(error)}")
        return []

    def prepare(model: nn.Module, recipe: str) -> nn.Module:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
        return torch.compile(model)

    return [
        Arm(f"torchao {r} compiled", functools.partial(prepare, recipe=r)) for r in TORCHAO_RECIPES
    ]


def host_us(*steps: Step) -> list[float]:
    """Host microseconds of each step, its update not counted; medians of rounds in turn, as the
    host's speed drifts.

    A round's steps are waited for before the next round.
    """
    times: list[list[float]] = [[] for _ in steps]
    gc.collect()
    gc.disable()
    try:
        for round_ in range(-1, HOST_ROUNDS):
            for step, taken in zip(steps, times):
                torch.cuda.synchronize()
                spent = 0.0
                for _ in range(HOST_STEPS):
                    start = time.perf_counter()
                    step()
                    spent += time.perf_counter() - start
                    step.update()
                if round_ >= 0:  # the first one warms up
                    taken.append(spent / HOST_STEPS * 1e6)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return [statistics.median(taken) for taken in times]


# Tables #


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _domains() -> dict:
    """What ran since the last reset: domain -> products; quantizations that no kernel made;
    departures."""
    ran = fq.receipt()
    products: dict[str, int] = {}
    for (domain, *_), n in ran.gemms.items():
        products[domain] = products.get(domain, 0) + n
    by_reference = sum(n for (*_, how), n in ran.quantize.items() if how == "reference")
    return {
        "products": products,
        "quantized_by_reference": by_reference,
        "departures": sum(ran.departures.values()),
    }


class Bench:
    """The clock, and everything that was measured (`report`, plain data)."""

    def __init__(self, clock: DeviceClock, device: torch.device, args):
        self.clock, self.device, self.args = clock, device, args
        self.report: dict = {"repeats": clock.repeats, "tables": []}

    def _made(self, problem: Problem, arm: Arm, data: Data) -> tuple[Step, dict]:
        """A step that has run a few times, and what it takes: {peak_bytes, graph_breaks}."""
        gc.collect()
        torch.cuda.empty_cache()
        before, breaks = torch.cuda.memory_allocated(), sum(dynamo_counters["graph_break"].values())
        step = Step(problem, arm, data)
        for i in range(6):
            if i == 4:
                torch.cuda.reset_peak_memory_stats()
            step()
            step.update()
        torch.cuda.synchronize()
        return step, {
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "graph_breaks": sum(dynamo_counters["graph_break"].values()) - breaks,
        }

    def steps(self, problem: Problem, arms: Sequence[Arm]) -> None:
        """Device time of a problem's arms over `BASE`."""
        found = {"title": problem.title, "rows": []}
        self.report["tables"].append(found)
        print(f"\n{problem.title}")
        judged = f"{'x bf16':>7} {'floor':>6} {'aim':>5} {'':5}"
        print(
            f"{'row':36} {'ms':>8} {'lowest':>8} {judged} {'peak GiB':>8} {'x bf16':>7}  products"
        )
        data, base = Data.of(problem, self.device), None
        for arm in (BASE, *arms):
            result = {"name": arm.name, "floor": arm.floor, "aim": arm.aim}
            found["rows"].append(result)
            try:
                if arm is BASE:
                    base = self._made(problem, arm, data)
                    self._measure(*base, *base, result)
                else:
                    self._measure(*self._made(problem, arm, data), *base, result)
            except Exception as error:  # of any kind: one row does not cost the others
                result["error"] = first_line(error)
                print(f"{arm.name:36} failed: {result['error']}", flush=True)
                recover()
                data.x.grad = None
            if base is None:
                return  # there is nothing to compare with

    def _timed(self, step: Step):
        return self.clock.sustained([step], step.update, SETTLE_MS)

    def _measure(self, step: Step, taken: dict, base: Step, base_taken: dict, result: dict) -> None:
        before = self._timed(base)
        fq.reset_receipt()
        sample = self._timed(step)
        ran = _domains()
        after = self._timed(base)
        ratio = statistics.mean((before.us, after.us)) / sample.us
        floor, aim = result["floor"], result["aim"]
        result |= {
            **sample._asdict(),
            "bf16_us": [before.us, after.us],
            "ratio": ratio,
            "under": floor is not None and ratio < floor,
            "reached": aim is not None and ratio >= aim,
            **taken,
            "peak_ratio": taken["peak_bytes"] / base_taken["peak_bytes"],
            **ran,
        }
        notes = ["the device waited for the host"] if not sample.hidden else []
        notes += [f"{n} graph breaks"] if (n := taken["graph_breaks"]) else []
        notes += ["quantized by the reference"] if ran["quantized_by_reference"] else []
        notes += ["departed from the plan"] if ran["departures"] else []
        products = ", ".join(sorted(ran["products"])) or "torch's"
        print(
            f"{result['name']:36} {sample.us / 1e3:8.3f} {sample.lowest / 1e3:8.3f} {ratio:7.3f} "
            f"{_shown(floor):>6} {_shown(aim):>5} {'under' if result['under'] else '':5} "
            f"{taken['peak_bytes'] / GIB:8.2f} {result['peak_ratio']:7.3f}  "
            f"{'; '.join([products, *notes])}",
            flush=True,
        )

    def host(self, problem: Problem, arms: Sequence[Arm]) -> None:
        found = {"title": problem.title, "rows": []}
        self.report["tables"].append(found)
        print(
            f"\n{problem.title}; host microseconds a step, medians of {HOST_ROUNDS} rounds of "
            f"{HOST_STEPS}"
        )
        print(f"{'row':36} {'us':>8} {'nn.Linear':>9} {'ratio':>7} {'limit':>6} {'aim':>5}")
        data = Data.of(problem, self.device)
        base = Step(problem, PLAIN, data)
        for arm in arms:
            result = {"name": arm.name, "floor": HOST_LIMIT, "aim": HOST_AIM}
            found["rows"].append(result)
            try:
                step = Step(problem, arm, data)
                plain, us = host_us(base, step)
            except Exception as error:  # of any kind: one row does not cost the others
                result["error"] = first_line(error)
                print(f"{arm.name:36} failed: {result['error']}", flush=True)
                recover()
                data.x.grad = None
                continue
            ratio = us / plain
            over = ratio > HOST_LIMIT
            result |= {
                "us": us,
                "bf16_us": plain,
                "ratio": ratio,
                "under": over,
                "reached": ratio <= HOST_AIM,
            }
            mark = " over" if over else ""
            print(
                f"{arm.name:36} {us:8.1f} {plain:9.1f} {ratio:7.3f} {HOST_LIMIT:6.2f} "
                f"{HOST_AIM:5.2f}{mark}",
                flush=True,
            )

    def run(self) -> None:
        args = self.args
        if args.batch_invariant:
            for n in (1, 8, 4096):
                title = f"forward: {DIM} -> {HIDDEN}, {n} tokens"
                problem = LINEAR._replace(title=title, tokens=n, trains=False)
                self.steps(problem, invariant_arms(args.recipes))
            return
        if "mlp" in args.what:
            peers = torchao_arms() if args.torchao else []
            self.steps(MLP, [PLAIN, *recipe_arms(args.recipes, args.compiled, judged=True), *peers])
        if "linear" in args.what:
            self.steps(LINEAR, [PLAIN, *recipe_arms(args.recipes, args.compiled, judged=False)])
        if "host" in args.what:
            self.host(HOST, recipe_arms(args.recipes, compiled=False, judged=False))

    def _results(self) -> list[dict]:
        return [r for t in self.report["tables"] for r in t["rows"]]

    def summary(self) -> str:
        """The last line: how many rows are where."""
        rows = self._results()
        measured = [r for r in rows if "error" not in r]
        judged = [r for r in measured if r["floor"] is not None]
        line = f"{len(rows)} rows: {len(judged)} with a floor or limit"
        line += f", {sum(r['under'] for r in judged)} beyond it"
        return (
            line
            + f", {sum(r['reached'] for r in measured)} at their aim, {len(rows) - len(measured)} "
            "failed"
        )

    @property
    def failed(self) -> bool:
        return any("error" in r for r in self._results())


def on_device(args) -> int:
    device = measurable()
    if device is None:
        return 2
    # One code object serves the models of all rows; falling back to eager would go unseen.
    dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = 64, True
    clock = DeviceClock(device, args.repeats)
    bench = Bench(clock, device, args)
    bench.report = {**facts(device), **bench.report}
    print(
        f"{bench.report['device']}, torch {torch.__version__}; medians of {clock.repeats} steps, "
        "made back to back"
    )
    clock.wake()
    return finish(bench, bench.run, args.json)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--what", nargs="+", choices=WHAT, default=WHAT, help="which tables (default: all)"
    )
    made.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="default: all of them"
    )
    made.add_argument(
        "--compiled", action="store_true", help="time recipes under torch.compile as well"
    )
    made.add_argument(
        "--torchao",
        action="store_true",
        help="time torchao's float8 on the mlp, where it is installed",
    )
    made.add_argument(
        "--batch-invariant",
        action="store_true",
        help="print the price of fq.numerics.batch_invariant, and nothing else",
    )
    made.add_argument("--json", help="write all numbers to this file")
    made.add_argument(
        "--repeats",
        type=count,
        default=15,
        help="timed steps a row of mlp and linear (default: 15)",
    )
    return made


def main() -> int:
    return on_device(parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: change one operator, number or decorator of a file, and see whether its tests
fail.

    bash launch/mutants.sh [--files formats,storage,...] [--sample 40] [--seed 0] [--json out.json]
    bash launch/mutants.sh --again out.json [--json after.json]     the survivors of a run before,
    once more
    bash launch/mutants.sh --table before.json after.json           the table of docs/mutants.md

cosmic-ray finds the places and makes the mutants; each runs the tests of `TARGETS` in a copy of the
checkout, until one fails, in a fork of this process: importing torch takes longer than most of
them. A sample takes one mutant per place, and places at random. Left out, since no test can see
them: annotations, which nothing evaluates, and caches of functions.

killed: a test failed, or the tests took four times as long as without a mutant. The score is the
        killed share.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401, before the forks
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
SINGLE, MULTI = "dist_tests/single/test_", "dist_tests/multi/test_"
OF_SHARDS = (
    f"{SINGLE}weight_shard.py {SINGLE}checked.py {MULTI}fsdp_bytes.py {MULTI}fsdp_passes.py"
    " -k 'not inductor and not [4] and not prefetches'"
)
OF_CHECKPOINTS = f"{SINGLE}files.py {SINGLE}state_dict.py -k 'not kill'"
# Graphs, gathers in them, ranks that cut a tensor, and codes as an input.
GRAPHS = (
    f"{SINGLE}compile.py::test_forwards_may_run_ahead_of_their_backwards"
    f" {MULTI}fsdp_compile.py::test_compiled_blocks_train_as_eager_ones[1]"
    f" {MULTI}fsdp_compile.py::test_products_that_a_memory_budget_makes_again_find_their_weights"
    f" {MULTI}tensor_parallel.py::test_layers_equal_one_process"
    f" {SINGLE}quantize_module.py"
)
# Each read of a weight, and the layouts of its codes.
READS = (
    f"{SINGLE}hopper.py::test_weights_that_train_are_encoded_in_one_read_a_forward"
    f" {SINGLE}hopper.py::test_a_step_is_that_of_the_cpu"
    f" {SINGLE}compile.py::test_compiled_blocks_are_the_eager_ones_on_hopper"
)
# Name -> (file, the tests that hold it, as arguments of pytest: those that fail first stand first).
TARGETS = {
    "formats": ("formats.py", f"{SINGLE}formats.py"),
    "scaling": ("scaling.py", f"{SINGLE}scaling.py {SINGLE}state_dict.py"),
    "storage": (
        "storage.py",
        f"{SINGLE}storage.py {SINGLE}anchored_codes.py {SINGLE}files.py -k 'not kill'",
    ),
    "weight_shard": ("tensor/weight_shard.py", OF_SHARDS),
    "fsdp_hooks": ("tensor/fsdp_hooks.py", OF_SHARDS),
    "gather_group": ("tensor/gather_group.py", OF_SHARDS),
    "gathered_weight": ("tensor/gathered_weight.py", OF_SHARDS),
    "hooks": ("weight_sync/sync.py", f"{SINGLE}hooks.py {SINGLE}cast_plan.py"),
    "checkpoint": ("checkpoint/files.py", OF_CHECKPOINTS),
    "code_hash": ("checkpoint/code_hash.py", OF_CHECKPOINTS),
    "verification": ("checkpoint/verification.py", OF_CHECKPOINTS),
    "gemm_layout": ("ops/gemm_layout.py", f"{SINGLE}storage.py"),
    "program": ("linear/program.py", f"{GRAPHS} {SINGLE}linear.py {MULTI}sequence_parallel.py"),
    "operands": (
        "linear/operands.py",
        f"{SINGLE}checked.py {READS} {SINGLE}linear.py {SINGLE}hold.py -k 'not decode'",
    ),
}


def places(path: Path) -> list[list[MutationSpec]]:
    """The mutants of a file, those of one place and kind together."""
    with (
        tempfile.TemporaryDirectory() as folder,
        use_db(f"{folder}/mutants.sqlite", WorkDB.Mode.create) as db,
    ):
        init([path], db, {})
        mutants = [item.mutations[0] for item in db.work_items]
    unseen, found = list(without_effect(ast.parse(path.read_text()))), {}
    for mutant in sorted(mutants, key=lambda m: (m.start_pos, m.operator_name, m.occurrence)):
        if not any(first <= mutant.start_pos and mutant.end_pos <= last for first, last in unseen):
            found.setdefault((mutant.start_pos, mutant.operator_name.split("_")[0]), []).append(
                mutant
            )
    return list(found.values())


def without_effect(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """First and last position of what no test can see."""
    for node in ast.walk(tree):
        nodes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        nodes += [d for d in getattr(node, "decorator_list", ()) if "cache" in ast.unparse(d)]
        for found in filter(None, nodes):
            yield (found.lineno, max(0, found.col_offset - 1)), (found.end_lineno + 1, 0)


def passes(tests: str, limit: float) -> bool:
    """Whether the tests pass within `limit` seconds: in a fork of this process, which has imported
    torch and not this project."""
    if (child := os.fork()) == 0:
        os.setsid()
        sys.path.insert(0, os.getcwd())  # the copy, which also has the package of this file
        sys.modules.pop("dist_tests.mutants", None), sys.modules.pop("dist_tests", None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.dont_write_bytecode = limit < math.inf  # of a mutant
        os._exit(
            pytest.main(
                ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *shlex.split(tests)]
            )
        )
    end = time.monotonic() + limit
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.05)


def run(name: str, mutants: list[MutationSpec]) -> Iterator[dict]:
    """The outcome of each mutant of a target. Raises RuntimeError if the tests fail without one."""
    file, tests = TARGETS[name]
    began = time.monotonic()
    if not passes(tests, math.inf):
        raise RuntimeError(f"the tests of {file} fail without a mutant: {tests}")
    limit = 30 + 4 * (time.monotonic() - began)
    for mutant in mutants:
        operator = get_operator(mutant.operator_name)()
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as (old, new):
            killed = not passes(tests, limit)
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        yield {
            "name": name,
            "operator": mutant.operator_name,
            "occurrence": mutant.occurrence,
            "line": mutant.start_pos[0],
            "in": mutant.definition_name,
            "killed": killed,
            "diff": [line for line in lines if line[:3] not in ("---", "+++")],
        }


def chosen(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[MutationSpec]]]:
    again = None
    if args.again:
        again = {
            (r["name"], r["operator"], r["occurrence"])
            for r in read([args.again])
            if not r["killed"]
        }
    for name in args.files.split(","):
        found = places(folder / "fsdp_quant" / TARGETS[name][0])
        if again is not None:
            mutants = [
                m for of in found for m in of if (name, m.operator_name, m.occurrence) in again
            ]
        else:
            draw = random.Random(f"{args.seed}/{name}")
            mutants = [draw.choice(of) for of in draw.sample(found, min(args.sample, len(found)))]
        if mutants:
            yield name, mutants


def read(paths: list[str]) -> list[dict]:
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]


def table(paths: list[str]) -> str:
    """A row per file: mutants of the first run, those killed in it, and after the others, which ran
    its survivors."""
    runs = [
        {(r["name"], r["operator"], r["occurrence"]): r["killed"] for r in read([path])}
        for path in paths
    ]
    lines = ["| file | mutants | killed before | killed after |", "|---|---|---|---|"]
    for name in [n for n in TARGETS if any(key[0] == n for key in runs[0])] + ["all"]:
        first = {key: killed for key, killed in runs[0].items() if name in (key[0], "all")}
        last = {key: any(run.get(key, False) for run in runs) for key in first}
        shares = [f"{sum(of.values())} ({sum(of.values()) / len(of):.0%})" for of in (first, last)]
        lines.append(
            f"| {f'`{TARGETS[name][0]}`' if name in TARGETS else name} | {len(first)} | "
            f"{' | '.join(shares)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="launch/mutants.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--sample", type=int, default=40, help="mutants per file, default 40")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", help="JSON of a run before: its survivors alone")
    parser.add_argument("--json", help="append outcomes, a line each")
    parser.add_argument("--table", nargs="+", help="print the table of these runs; nothing is run")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return 0
    if wrong := [name for name in args.files.split(",") if name not in TARGETS]:
        parser.error(f"--files {','.join(wrong)}: give some of {','.join(TARGETS)}")
    survivors = total = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkout"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so"))
        os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        os.chdir(folder)
        for name, mutants in chosen(args, folder):
            print(f"{name}: {len(mutants)} mutants", flush=True)
            for outcome in run(name, mutants):
                total, survivors = total + 1, survivors + (not outcome["killed"])
                if not outcome["killed"]:
                    print(
                        f"survived, {name}:{outcome['line']} in {outcome['in']}",
                        *outcome["diff"],
                        sep="\n",
                        flush=True,
                    )
                if args.json:
                    with open(ROOT / args.json, "a") as file:
                        print(json.dumps(outcome), file=file)
    print(f"{total - survivors} of {total} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Trainers of others with our layers, each in processes of its own:

    python -m dist_tests.contract [--only NAME,..] [--ranks 2|4] [--steps 50] [--recipe mxfp8]
                                  [--size small|wide] [--json FILE] [--limit-s 600]

With GPUs: a GPU a rank, NCCL; fewer GPUs than ranks are shared, collectives go through the host
(`shared_gpu`), and times are of one rank. Without: gloo, smaller models, and contracts that need a
GPU say so. A contract is compared with the same program on one rank ("one rank": losses of the
first step within `FIRST`, of every step within `LIMIT`; if they are not, within twice what one rank
is apart from itself where initial weights are changed by 1e-4 of their size), or with itself
("resume": losses behind a resume from a checkpoint in the middle). Speeds are medians of the second
half of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_tests.contract import on_ranks

ROOT = Path(__file__).resolve().parents[2]
# Of a loss apart from its reference. The first step's is of the same weights; later, rounding that
# differs is fed back, and a rounding of 8 bits is 16 times one of bf16.
FIRST, LIMIT = 2e-4, 0.02
RESUMED = 0.0 if not torch.cuda.is_available() else 1e-3  # kernels of attention add in any order
PRINTED = 20_000  # characters of a run that failed: a fault's stack is followed by torchrun's


class Contract(NamedTuple):
    """program:  module.function of this package; compared:  "one rank" or "resume"; ranks:  those
    that it can run on; needs:  packages; gpu:  what of it has no implementation on CPUs; sends:
    from rank to rank, which shared GPUs do not."""

    program: str
    compared: str = "one rank"
    ranks: tuple[int, ...] = (2, 4)
    needs: tuple[str, ...] = ()
    gpu: str = ""
    sends: bool = False


_HF = ("transformers", "accelerate")
_MEGATRON, _TITAN = ("megatron.core", "triton"), ("torchtitan",)
CONTRACTS = {
    "ddp": Contract("parallelisms.ddp"),
    "pipeline": Contract("parallelisms.pipeline", ranks=(2,), sends=True),
    "context": Contract("parallelisms.context", gpu="flash attention for context_parallel"),
    "megatron_tp": Contract("megatron_gpt.tensor", needs=_MEGATRON),
    "megatron_pp": Contract("megatron_gpt.pipeline", ranks=(2,), needs=_MEGATRON, sends=True),
    "megatron_ep": Contract("megatron_gpt.experts", ranks=(2,), needs=_MEGATRON),
    "megatron_shared": Contract("megatron_gpt.shared_experts", needs=_MEGATRON),
    "titan_fsdp": Contract("titan.fsdp", needs=_TITAN),
    "titan_tp": Contract("titan.tensor", needs=_TITAN),
    "titan_compiled": Contract("titan.compiled", needs=_TITAN),
    "trainer": Contract("trainers.trainer", "resume", (2,), _HF),
    "sft": Contract("trainers.sft", "resume", (2,), (*_HF, "trl", "datasets")),
    "lora": Contract("trainers.lora", "resume", (2,), (*_HF, "peft")),
    "accelerate": Contract("trainers.accelerate", "resume", (2,), _HF),
    "lightning": Contract("trainers.lightning", "resume", (2,), ("lightning",)),
}


def _missing(package: str) -> bool:
    try:
        return util.find_spec(package) is None
    except ImportError:
        return True


def share_gpus(ranks: int) -> bool:
    """There are fewer GPUs than ranks."""
    return 0 < torch.cuda.device_count() < ranks


def cannot(contract: Contract, ranks: int) -> str:
    """Why a contract does not run here on these ranks; "" if it does."""
    if missing := [package for package in contract.needs if _missing(package)]:
        return f"not installed: {', '.join(missing)}"
    if not torch.cuda.is_available():
        return f"needs a GPU: {contract.gpu}" if contract.gpu else ""
    if contract.sends and share_gpus(ranks):
        return f"needs {ranks} GPUs, {torch.cuda.device_count()} here"
    return ""


def start(name: str, ranks: int, args: argparse.Namespace, changed: bool = False) -> dict[str, Any]:
    """Run a contract's program on this many ranks: {"arms": {arm: `on_ranks.Curve` as a
    dictionary}, "receipt": what the library counted on rank 0}. changed: from other weights.

    Raises RuntimeError with the end of what it printed if it fails, or takes args.limit_s.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "dist_tests.contract.on_ranks"]
        command += [CONTRACTS[name].program, folder, f"--steps={args.steps}"]
        command += [f"--recipe={args.recipe}", f"--size={args.size}"]
        command += ["--changed"] * changed
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        if "megatron" in name:  # of its manual, for sequence parallelism on Hopper
            changes["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        process = subprocess.Popen(
            command,
            env=os.environ | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = process.communicate(timeout=args.limit_s)
        except BaseException as error:
            process.terminate()  # the agent ends its ranks, which are no group of its own
            printed, _ = process.communicate(timeout=60)
            if isinstance(error, subprocess.TimeoutExpired):
                end = f"stopped after {args.limit_s} s"
                raise RuntimeError(f"{printed[-PRINTED:]}\n{end}") from None
            raise
        found = Path(folder, "result.json")
        if process.returncode or not found.exists():
            failed = [Path(path).read_text() for path in sorted(Path(folder).glob("failed_*"))]
            raise RuntimeError(f"{''.join(failed) or printed[-PRINTED:]}")
        return json.loads(found.read_text())


def distance(got: list[float], wanted: list[float]) -> float:
    """The largest difference over the wanted value; inf for nan, or another number of steps."""
    if len(got) != len(wanted) or not got:
        return float("inf")
    found = [abs(a - b) / abs(b) for a, b in zip(got, wanted)]
    return float("inf") if any(value != value for value in found) else max(found)


def verdict(
    arms: dict[str, dict], reference: dict[str, dict] | None, changed: dict[str, dict] | None = None
) -> dict[str, Any]:
    """{"holds": .., "result": a sentence, "apart": {arm: distance}} of curves, and those of one
    rank; None: resumed curves. changed: curves of one rank from other weights."""
    apart, broken = {}, []
    for arm, curve in arms.items():
        got = curve["losses"]
        wanted = curve["resumed"] if reference is None else reference[arm]["losses"]
        apart[arm] = distance(got[-len(wanted) :] if reference is None else got, wanted)
        limit = RESUMED if reference is None else LIMIT
        if changed is not None:
            limit = max(LIMIT, 2 * distance(changed[arm]["losses"], wanted))
        if not apart[arm] <= limit < float("inf"):
            broken.append(f"{arm} is apart")
        if reference is not None and distance(got[:1], wanted[:1]) > FIRST:
            broken.append(f"{arm} is apart in the first step")
        if not got[-1] < got[0]:
            broken.append(f"{arm} does not learn")
    facts = ", ".join(f"{arm} {value:.1e}" for arm, value in apart.items())
    result = f"BROKEN ({', '.join(broken)}): {facts}" if broken else facts
    return {"holds": not broken, "result": result, "apart": apart}


def check(name: str, ranks: int, args: argparse.Namespace) -> dict:
    """Run a contract and return its row."""
    contract = CONTRACTS[name]
    row = {"contract": name, "ranks": ranks, "compared": contract.compared, "holds": None}
    row["shares"] = share_gpus(ranks)
    if reason := cannot(contract, ranks):
        return row | {"result": reason}
    try:
        run = start(name, ranks, args)
        arms, reference, changed = run["arms"], None, None
        if contract.compared == "one rank":
            reference = start(name, 1, args)["arms"] if ranks > 1 else arms
            if max(verdict(arms, reference)["apart"].values()) > LIMIT:
                changed = start(name, 1, args, changed=True)["arms"]
    except RuntimeError as error:
        print(f"{name}:\n{error}", file=sys.stderr, flush=True)
        lines = str(error).strip().splitlines() or ["no output"]
        return row | {"holds": False, "result": f"FAILED: {lines[-1][:200]}", "log": str(error)}
    row |= run | {"reference": reference, "changed": changed}
    return row | verdict(arms, reference, changed)


COLUMNS = ["contract", "ranks", "compared with", "apart", "ms a step"]
COLUMNS += ["device", "date", "torch", "versions"]


def table(rows: list[dict[str, Any]]) -> str:
    """The markdown table of rows, as docs/reference/contracts.md has it. Times of one rank where
    ranks shared GPUs."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in rows:
        timed = row.get("reference") if row["shares"] else row.get("arms")
        speeds = {arm: curve["ms"] for arm, curve in (timed or {}).items()}
        cells = [row["contract"], str(row["ranks"]), row["compared"], row["result"]]
        cells.append(", ".join(f"{arm} {ms:.1f}" for arm, ms in speeds.items() if ms) or "-")
        lines.append([*cells, *(row[name] for name in ("device", "date", "torch", "versions"))])
    return "\n".join("| " + " | ".join(line).replace("\n", " ") + " |" for line in lines)


def where(ranks: int) -> dict[str, str]:
    """Cells of a row."""
    gpus = torch.cuda.device_count()
    device = f"{min(gpus, ranks)} x {torch.cuda.get_device_name()}" if gpus else "cpu"
    return {
        "device": device,
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
    }


def versions(contract: Contract) -> str:
    """The packages that a contract runs, as they are installed."""
    found = []
    for package in contract.needs:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package.replace('.', '-'))}")
    return ", ".join(found) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m dist_tests.contract",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", help=f"of {','.join(CONTRACTS)}")
    parser.add_argument(
        "--ranks", type=int, help="default: 2, and 4 where there are 4 GPUs; 1: for its times"
    )
    parser.add_argument("--limit-s", type=int, default=600, help="of each run of a program")
    parser.add_argument("--json")
    on_ranks.add_settings(parser)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CONTRACTS)
    if unknown := sorted(set(names) - set(CONTRACTS)):
        parser.error(f"--only names {', '.join(unknown)}; wanted some of {', '.join(CONTRACTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends what was started
    most = 4 if torch.cuda.device_count() >= 4 else 2
    rows = []
    for name in names:
        contract = CONTRACTS[name]
        wanted = [args.ranks] if args.ranks else [n for n in contract.ranks if n <= most]
        for ranks in wanted:
            if ranks in contract.ranks or (ranks == 1 and contract.compared == "one rank"):
                rows.append(
                    check(name, ranks, args) | where(ranks) | {"versions": versions(contract)}
                )
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                if args.json:  # what is known outlives a run that is cut off
                    Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}))
    print(f"\n{' '.join(sys.argv[1:])}\n\n{table(rows)}")
    return int(any(row["holds"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

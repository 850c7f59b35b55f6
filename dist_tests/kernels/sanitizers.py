# SPDX-License-Identifier: Apache-2.0
"""Every kernel and product under the tools of compute-sanitizer, one line each.

    python -m dist_tests.kernels.sanitizers [--tools memcheck,racecheck,initcheck,synccheck,filled]
    [--logs DIR]

Parts, of `sanitize`: instances, the kernels that do not multiply; products; steps, whole modules.
Memory is allocated without torch's cache, so that each tensor has bounds of its own and begins
uninitialized. racecheck and synccheck look at kernels of this library alone: those of cuBLAS are
not ours to mend, and take hours. "filled" is no sanitizer: new memory holds NaN, and results that
are the reference's were written whole.

Two tools see instances alone (compute-sanitizer 2025.3, sm_90). initcheck does not track what TMA
stores, and takes every element of such a GEMM's result, cuBLASLt's too, for uninitialized; "filled"
says that they are not. racecheck ends with an internal error in kernels that use wgmma and TMA, in
which memcheck and synccheck find nothing; `dist_tests.kernels.sleeps` looks for their races.

Needs a GPU, and compute-sanitizer on PATH or beside nvcc. Exit status 1: a tool found errors, bytes
differ, or it did not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

OURS = ["--kernel-name", "kns=fsdp_quant"]
EVERY_PART = ("instances", "products", "steps")
TOOLS: dict[str, tuple[list[str] | None, tuple[str, ...]]] = {  # options, parts
    "memcheck": (["--leak-check", "no"], EVERY_PART),
    "racecheck": (OURS, ("instances",)),
    "initcheck": ([], ("instances",)),
    "synccheck": (OURS, EVERY_PART),
    "filled": (None, EVERY_PART),
}
RUNS = [(tool, part) for tool, (_, parts) in TOOLS.items() for part in parts]
FOUND = 99  # exit status of a tool that found errors


def executable() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or next(
        (
            found
            for home in homes
            if home and (found := shutil.which("compute-sanitizer", path=f"{home}/bin"))
        ),
        None,
    )


def command(tool: str, part: str) -> list[str]:
    """The command line of one tool over one part. Raises RuntimeError where compute-sanitizer is
    missing."""
    run, options = [sys.executable, "-m", "dist_tests.kernels.sanitize", part], TOOLS[tool][0]
    if options is None:
        return [*run, "--filled"]
    if (path := executable()) is None:
        raise RuntimeError(
            "compute-sanitizer is neither on PATH nor in CUDA_HOME/bin; install the CUDA toolkit's "
            "sanitizer"
        )
    common = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    return [path, *common, *options, *run]


def errors_of(text: str) -> int | None:
    """The number of errors that a tool's last summary counts. None: it wrote none."""
    found = re.findall(
        r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error", text
    )
    return int("".join(found[-1])) if found else None


def sanitize(tool: str, part: str, logs: Path | None = None) -> tuple[int | None, int, str]:
    """(errors or None, exit status, output) of one tool over one part."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command(tool, part),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    if logs:
        (logs / f"{tool}_{part}.log").write_text(done.stdout)
    found = errors_of(done.stdout) if TOOLS[tool][0] is not None else 0
    return found, done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--logs", type=Path, help="folder of the tools' whole output")
    args = parser.parse_args()
    failed = False
    for tool, part in RUNS:
        if tool not in args.tools.split(","):
            continue
        began = time.monotonic()
        errors, status, text = sanitize(tool, part, args.logs)
        calls = re.search(r"(\d+) calls ran", text)
        print(
            f"{tool:10} {part:10} {errors if errors is not None else 'no summary':>10} errors, "
            f"exit status {status}, {calls.group(1) if calls else 0} calls, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        if status or errors != 0:
            failed = True
            print(text[-4000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Every kernel and product under the tools of compute-sanitizer, one line each.

    python -m dist_tests.kernels.sanitizers [--tools memcheck,racecheck,initcheck,synccheck]
    [--parts instances,steps] [--logs DIR]

Parts: instances, each kernel and product once (`sanitize`); steps, whole modules
(`sanitize --steps`). Memory is allocated without torch's cache, so that each tensor has bounds of
its own and begins uninitialized. racecheck and synccheck look at kernels of this library alone:
those of cuBLAS are not ours to mend, and take hours. Needs a GPU, and compute-sanitizer on PATH or
beside nvcc. Exit status 1: a tool found errors, bytes differ, or it did not run.
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

TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "racecheck": ["--kernel-name", "kns=fsdp_quant"],
    "initcheck": [],
    "synccheck": ["--kernel-name", "kns=fsdp_quant"],
}
PARTS = {"instances": [], "steps": ["--steps"]}
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
    if (path := executable()) is None:
        raise RuntimeError(
            "compute-sanitizer is neither on PATH nor in CUDA_HOME/bin; install the CUDA toolkit's "
            "sanitizer"
        )
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *TOOLS[tool]]
    return [path, *options, sys.executable, "-m", "dist_tests.kernels.sanitize", *PARTS[part]]


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
    return errors_of(done.stdout), done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--logs", type=Path, help="folder of the tools' whole output")
    args = parser.parse_args()
    failed = False
    for tool in args.tools.split(","):
        for part in args.parts.split(","):
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

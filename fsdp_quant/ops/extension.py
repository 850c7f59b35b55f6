# SPDX-License-Identifier: Apache-2.0
"""Load the compiled operators, once, and report on which devices they run.

[Note: the library]
`ops/build.py` describes the files. The kernels fit every torch of their CUDA major version. The
glue is bound to one torch release, so only the glue of this release is loaded. If it is missing, it
is compiled once, into a cache, provided that a C++ compiler and the sources exist. Importing this
module never fails: if the operators are off, `STATUS.reason` gives the reason in one clause, and
the reference runs everything. Environment, read once:

- FSDP_QUANT_NATIVE=0 leaves the operators off.
- FSDP_QUANT_NATIVE_FOLDER=path loads the files of that folder instead (for development).
- FSDP_QUANT_CACHE=path stores glue that is compiled here; default ~/.cache/fsdp_quant.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from . import build as builder

PACKAGE = Path(__file__).resolve().parent.parent
TURNED_OFF = "FSDP_QUANT_NATIVE=0 in the environment"
REBUILD = "pip install --no-build-isolation -e ."


@dataclass(frozen=True)
class Status:
    """Result of loading the operators.

    library:  path of the loaded glue, None if none was loaded.
    reason:   why none was loaded.
    build:    the record of the kernels, None without one.
    """

    library: str | None
    reason: str | None
    build: builder.Record | None


def load(environ: Mapping[str, str] = os.environ) -> Status:
    """Load the operators if they exist and are not turned off. Never raises."""
    if environ.get("FSDP_QUANT_NATIVE") == "0":
        return Status(None, TURNED_OFF, None)
    folder, record = Path(environ.get("FSDP_QUANT_NATIVE_FOLDER") or PACKAGE), None
    try:
        record = builder.Record.of(folder)
        if record is None or record.reason is not None:
            why = "not built" if record is None else f"not built, because {record.reason}"
            return Status(None, f"{why}; with a CUDA build of torch and nvcc: {REBUILD}", None)
        if torch.version.cuda is None:
            return Status(None, f"torch {torch.__version__} is not a CUDA build", record)
        kernels = folder / builder.kernels_name(torch.version.cuda)
        if not kernels.exists():
            names = ", ".join(sorted(p.name for p in folder.glob("_kernels*.so"))) or "none"
            return Status(
                None,
                f"there is no {kernels.name} for CUDA {torch.version.cuda}, but {names}; rebuild "
                f"with {REBUILD}",
                record,
            )
        glue = folder / builder.glue_name(torch.__version__, torch.version.cuda)
        if not glue.exists():
            glue = _compiled_glue(folder, kernels, environ)
        ctypes.CDLL(str(kernels.absolute()), ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(glue.absolute()))
    except Exception as error:  # of any kind: importing the package must not fail
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        return Status(
            None, f"the operators in {folder} do not load ({cause}); rebuild with {REBUILD}", record
        )
    return Status(str(glue), None, record)


def _compiled_glue(folder: Path, kernels: Path, environ: Mapping[str, str]) -> Path:
    """Return the glue for this torch, if the folder has none. Compiles it unless a process has
    done so before.

    Raises builder.Failed, also if an earlier compilation failed.
    """
    sources = folder / "_csrc", PACKAGE / "_csrc", PACKAGE.parent / "csrc"
    csrc = next((path for path in sources if (path / "bindings.cpp").exists()), None)
    cuda = torch.version.cuda or ""  # set wherever kernels are loaded
    name = builder.glue_name(torch.__version__, cuda)
    have = ", ".join(sorted(p.name for p in folder.glob("_glue*.so"))) or "none"
    if csrc is None or not builder.cxx():
        missing = "no sources" if csrc is None else "no C++ compiler"
        raise builder.Failed(f"there is no {name}, but {have}, and {missing} to compile it")
    digest = hashlib.sha256(kernels.stat().st_mtime_ns.to_bytes(8, "little"))
    for source in sorted(p for p in csrc.rglob("*") if p.suffix in (".h", ".cpp")):
        digest.update(source.read_bytes())
    cache = (
        Path(environ.get("FSDP_QUANT_CACHE") or Path.home() / ".cache" / "fsdp_quant")
        / f"{torch.__version__}-{digest.hexdigest()[:16]}"
    )
    cache.mkdir(parents=True, exist_ok=True)
    failed = cache / "failed.txt"
    with open(cache / "lock", "w") as lock:
        # one rank per machine compiles; the others wait for the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failed.exists():
            raise builder.Failed(
                f"the glue for torch {torch.__version__} did not compile, see {failed}"
            )
        if not (cache / name).exists():
            print(
                f"fsdp_quant: compiling glue for torch {torch.__version__}, once, about a minute",
                file=sys.stderr,
                flush=True,
            )
            root = Path(torch.__file__).parent
            try:
                toolkit, _ = builder.find_toolkit(
                    lambda home: (home / "include" / "cuda_runtime_api.h").exists()
                )
                glue = builder.build_glue(
                    csrc, cache, kernels, root, torch.__version__, cuda, toolkit, cache / "objects"
                )
                builder.check(sys.executable, kernels, glue)
            except builder.Failed as error:
                (cache / name).unlink(missing_ok=True)
                failed.write_text(str(error))
                raise
    return cache / name


STATUS = load()


def is_loaded() -> bool:
    """Return whether the operators are registered in torch.ops."""
    return STATUS.library is not None


def runs_on(device: torch.device, warn: bool = False) -> str | None:
    """Return None if the compiled operators run on `device`, else the reason in one clause.

    warn:  work is about to begin there; warn of the reason, once, unless the environment turned the
           operators off.
    """
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if not is_loaded():
        reason = f"the compiled operators are off: {STATUS.reason}"
    else:
        reason = _missing_code_for(
            device.index if device.index is not None else torch.cuda.current_device()
        )
    if warn and reason is not None and STATUS.reason != TURNED_OFF:
        _warn_once(reason)
    return reason


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        "fsdp_quant: the PyTorch reference quantizes on this GPU, which is slow, because "
        f"{reason}. `python -m fsdp_quant doctor` says more; FSDP_QUANT_NATIVE=0 accepts it",
        stacklevel=4,
    )


@functools.cache
def _missing_code_for(index: int) -> str | None:
    """Return the reason that the kernels have no code for a GPU (`runs_code`), None if they do."""
    if STATUS.build is None:
        return None
    capability = torch.cuda.get_device_capability(index)
    if any(runs_code(arch, capability) for arch in STATUS.build.architectures):
        return None
    built = ", ".join(STATUS.build.architectures)
    name = "sm_{}{}".format(*capability)
    return (
        f"the library was built without {name}: it has {built}; set FSDP_QUANT_CUDA_ARCHS and "
        f"rebuild with {REBUILD}"
    )


def runs_code(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU runs code of `arch`. "sm_90a" runs on its own capability alone, other
    code on its major version from its minor version on."""
    digits = arch.removeprefix("sm_").rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if arch.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]

# SPDX-License-Identifier: Apache-2.0
"""Compile the operators. Imports only the standard library: setup.py loads this file by its path,
because importing the package imports torch.

[Note: the files]
    _kernels_cu13.so         the kernels and their launchers, for a CUDA major version; independent
                             of torch
    _glue_torch2.11_cu13.so  the operators, for a torch release: checks, allocations and autograd
                             around the launches. g++ alone compiles it. A release is two numbers:
                             2.11.1 loads the glue of 2.11.0
    _build.json              the compilers and architectures of the kernels, or the reason that
                             there are none (`Record`)

They are stored in one folder, the package. Glue that `extension` compiles, for a torch without
glue, is stored in a cache.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

RECORD = "_build.json"
GLUE = ("api", "step", "bindings.cpp")
# Build options, each set by FSDP_QUANT_<name>=1 at installation:
#   LINE_TABLES     source lines for profilers; they double the size of the library
#   RANDOM_SLEEPS   Hopper GEMMs sleep at random at their barriers, so that tests find races
#   SOFTWARE_CASTS  cast to e2m1 and e8m0 without Blackwell's instructions, in case `selftest` finds
#                   wrong ties there
OPTIONS = ("LINE_TABLES", "RANDOM_SLEEPS", "SOFTWARE_CASTS")
# No fast-math anywhere: the kernels are bit-exact with the reference. .ci/run compiles with the
# same flags.
NVCC_FLAGS = ("-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC")
CXX_FLAGS = ("-O3", "-fPIC", "-DNDEBUG")
# Hide the symbols of a libstdc++ that a toolchain links statically. If a stream uses two copies of
# libstdc++, the first error message that prints a number crashes.
LINK_FLAGS = ("-shared", "-Wl,--exclude-libs,ALL", "-Wl,--no-undefined", "-s")
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "c10_cuda", "torch_cuda")


class Failed(Exception):
    """Report that a compiler failed: its first error, its command, and its output."""


class Record(NamedTuple):
    """Contents of `_build.json`.

    nvcc:           a version, such as "13.0.88".
    architectures:  names such as "sm_90a".
    reason:         why there are no kernels; None: there are.
    options:        those of OPTIONS that the kernels were built with.
    """

    nvcc: str = ""
    architectures: tuple[str, ...] = ()
    reason: str | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Record | None:
        """Read the record of a folder; None without one. Raises ValueError if it is damaged."""
        path = folder / RECORD
        if not path.exists():
            return None
        read = json.loads(path.read_text())
        options = tuple(read.get("options", ()))
        return cls(read["nvcc"], tuple(read["architectures"]), read["reason"], options)

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_text(json.dumps(self._asdict(), indent=1) + "\n")


def kernels_name(cuda: str) -> str:
    """Return the file name of the kernels for a CUDA version."""
    return f"_kernels_cu{cuda.split('.')[0]}.so"


def release_of(torch_version: str) -> str:
    """Return the first two numbers of a torch version: its C++ ABI is stable within a release."""
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def glue_name(torch_version: str, cuda: str) -> str:
    return f"_glue_torch{release_of(torch_version)}_cu{cuda.split('.')[0]}.so"


# Compiling #


def cxx() -> list[str]:
    """Return the C++ compiler and its first options: CXX, else c++, else g++; [] if none exists."""
    return (
        shlex.split(os.environ.get("CXX", ""))
        or [p for p in map(shutil.which, ("c++", "g++")) if p][:1]
    )


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        printed = result.stdout + result.stderr
        first = next(
            (line for line in printed.splitlines() if "error" in line or "undefined" in line),
            f"{command[0]} failed",
        )
        raise Failed(f"{first}\n{shlex.join(command)}\n{printed}")


def _is_fresh(output: Path, command: str) -> bool:
    """Return whether this command built `output` from files that have not changed since."""
    record, depends = output.with_suffix(".command"), output.with_suffix(".d")
    if not all(path.exists() for path in (output, record, depends)):
        return False
    if record.read_text() != command:
        return False
    files = depends.read_text().partition(":")[2].replace("\\\n", " ").split()
    built_at = output.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) <= built_at for file in files)


def compile_sources(
    root: Path, sources: Sequence[Path], compiler: Sequence[str], temp: Path, jobs: int
) -> list[Path]:
    """Compile sources below `root` to objects in `temp`; keep objects that are fresh. Raises
    Failed."""

    def compiled(source: Path) -> Path:
        output = temp / source.relative_to(root).with_suffix(".o")
        depends = str(output.with_suffix(".d"))
        command = [*compiler, "-MD", "-MF", depends, "-c", str(source), "-o", str(output)]
        if not _is_fresh(output, shlex.join(command)):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.with_suffix(".command").unlink(missing_ok=True)
            _run(command)
            output.with_suffix(".command").write_text(shlex.join(command))
        return output

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compiled, sources))


def _link(output: Path, objects: Sequence[Path], *rest: str) -> None:
    """Link into a temporary file and rename it, so that a process keeps the old file that it has
    mapped."""
    temporary = output.with_suffix(f".{os.getpid()}")
    named = [f"-Wl,-soname,{output.name}", "-o", str(temporary)]
    _run([*cxx(), *LINK_FLAGS, *named, *map(str, objects), *rest])
    temporary.replace(output)


def jobs() -> int:
    """Return MAX_JOBS, else the number of processors that this process may use."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def runtime_folders(
    packages: Path, cuda: str, toolkit: Path | None
) -> tuple[list[Path], list[Path]]:
    """Return (include folders, library folders) of the CUDA runtime and cuBLASLt, from the toolkit
    and from the nvidia packages installed with torch.

    packages:  the folder that contains torch.
    """
    names = f"cu{cuda.split('.')[0]}", "cuda_runtime", "cublas"
    homes = [packages / "nvidia" / name for name in names]
    homes = homes if toolkit is None else [toolkit, *homes]
    return (
        [home / "include" for home in homes if (home / "include").is_dir()],
        [home / name for home in homes for name in ("lib64", "lib") if (home / name).is_dir()],
    )


def build_kernels(
    csrc: Path,
    folder: Path,
    cuda: str,
    nvcc: Path,
    targets: Sequence[str],
    cublaslt: tuple[Path, Path],
    temp: Path,
    options: Sequence[str] = (),
) -> Path:
    """Compile the kernels of csrc into `folder`.

    targets:      such as "90a" or "100f". Hopper GEMMs are compiled for 90a alone.
    cublaslt:     (folder of cublasLt.h, the library). The kernels record the library's soname,
                  which torch has loaded already.
    options:      a subset of OPTIONS.
    """
    defines = [f"-DFSDP_QUANT_{name}" for name in options if name != "LINE_TABLES"]
    size = (
        ["-lineinfo"]
        if "LINE_TABLES" in options
        else ["--compress-mode=size"]
        if "--compress-mode" in output_of(nvcc, "--help")
        else []
    )

    def compiler(targets: Sequence[str]) -> list[str]:
        codes = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
        # cuBLASLt's folder comes last: it also holds runtime headers, and the toolkit's must win.
        last = f"-Xcompiler=-idirafter,{cublaslt[0]}"
        return [str(nvcc), *NVCC_FLAGS, *size, *defines, *codes, f"-I{csrc}", last]

    objects = []
    for sources, codes in kernel_sources(csrc, targets):
        objects += compile_sources(csrc, sources, compiler(codes), temp / "kernels", jobs())
    output = folder / kernels_name(cuda)
    folders = [f"-L{nvcc.parent.parent / name}" for name in ("lib64", "lib")]
    _link(output, objects, *folders, "-lcudart", str(cublaslt[1]))
    return output


def kernel_sources(csrc: Path, targets: Sequence[str]) -> list[tuple[list[Path], Sequence[str]]]:
    """Return (sources, targets) pairs: Hopper GEMMs are compiled for Hopper alone, other sources
    for all targets."""
    hopper = [t for t in targets if t == "90a"] or targets[:1]
    every = sorted(
        p
        for p in csrc.rglob("*.c[pu]*")
        if p.suffix in (".cpp", ".cu") and p.relative_to(csrc).parts[0] not in GLUE
    )
    products = [p for p in every if p.suffix == ".cu" and p.name.startswith("sm90")]
    return [(products, hopper), ([p for p in every if p not in products], targets)]


def build_glue(
    csrc: Path,
    folder: Path,
    kernels: Path,
    torch: Path,
    version: str,
    cuda: str,
    toolkit: Path | None,
    temp: Path,
) -> Path:
    """Compile the glue for the torch in folder `torch`, linked to `kernels`. Raises Failed, also
    without a C++ compiler."""
    if not cxx():
        raise Failed("there is no C++ compiler (CXX, c++ or g++)")
    includes, libraries = runtime_folders(torch.parent, cuda, toolkit)
    includes = [torch / "include", torch / "include/torch/csrc/api/include", *includes]
    if not any((path / "crt/host_defines.h").exists() for path in includes):
        includes.insert(0, csrc / "api/no_toolkit")
    system = [word for path in includes for word in ("-isystem", str(path))]
    compiler = [*cxx(), *CXX_FLAGS, f"-I{csrc}", *system]
    sources = sorted(p for folder in GLUE for p in csrc.glob(f"{folder}/*.cpp"))
    sources = [csrc / "bindings.cpp", *sources]
    objects = compile_sources(csrc, sources, compiler, temp / f"glue-{release_of(version)}", jobs())
    output = folder / glue_name(version, cuda)
    runtime = next(
        (str(path) for folder in libraries for path in sorted(folder.glob("libcudart.so*"))),
        "-lcudart",
    )
    of_torch = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in TORCH_LIBRARIES)]
    _link(output, objects, *of_torch, str(kernels), runtime, "-Wl,-rpath,$ORIGIN")
    return output


# A separate process loads both libraries and raises an error that prints a number. A broken mix of
# C++ libraries crashes there.
_CHECK = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
torch.ops.load_library(sys.argv[2])
try:
    torch.ops.fsdp_quant.pack_encoding(
        "e4m3", "fp32", False, "up", "nearest", -7, 128, False, False, False, 0
    )
except ValueError as error:
    sys.exit(0 if "-7" in str(error) else f"the error says {error}")
sys.exit("a wrong argument was taken")
"""


def check(python: str, kernels: Path, glue: Path) -> None:
    """Raise Failed if the libraries do not load in a Python, or if their errors do not work."""
    command = [python, "-c", _CHECK, str(kernels), str(glue)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=kernels.parent)
    if result.returncode:
        raise Failed(
            "the compiled operators do not work: exit status "
            f"{result.returncode}\n{result.stderr[-2000:]}"
        )


# Toolkits #


def output_of(*command: str | Path) -> str:
    """Return what a command prints to stdout and stderr."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return result.stdout + result.stderr


def toolkit_of(nvcc: str) -> Path:
    """Return the toolkit folder of the nvcc on PATH. nvcc may be a link or a wrapper script, so the
    compiler is asked for its folder."""
    top = re.search(
        r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE
    )
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def find_toolkit(fits: Callable[[Path], bool]) -> tuple[Path | None, list[Path]]:
    """Return (the folder of a CUDA toolkit that fits or None, the folders searched): CUDA_HOME,
    else that of nvcc, else the default."""
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    defaults = [*([toolkit_of(nvcc)] if nvcc else []), Path("/usr/local/cuda")]
    homes = [Path(home)] if home else defaults
    return next(filter(fits, homes), None), homes

# SPDX-License-Identifier: Apache-2.0
"""Compiles the operators. Standard library alone: setup.py reads this file by its path, since the
package imports torch.

[Note: the files]
    _kernels_cu13.so         the kernels and what launches them, for a CUDA major version; they know
                             no torch
    _glue_torch2.11_cu13.so  the operators, for a torch release: checks, allocations and autograd
                             around the launches. g++ alone compiles it. A release is two numbers:
                             2.11.1 takes the glue of 2.11.0
    _build.json              the compilers and architectures of the kernels, or why there are none
                             (`Record`)

They lie in one folder: the package, or for the glue that `extension` compiles for a torch without
one, a cache.
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
# No fast-math anywhere: the kernels are bit-exact with the reference. .ci/run compiles with the
# same flags.
# Of builds, each FSDP_QUANT_<name>=1 when it is installed:
#   LINE_TABLES     for profilers, which show source lines; they double the size
#   RANDOM_SLEEPS   products on Hopper wait at random at their barriers, so that tests find a race
#   SOFTWARE_CASTS  no instructions of Blackwell for e2m1 and e8m0, should `selftest` find ties
# there
OPTIONS = ("LINE_TABLES", "RANDOM_SLEEPS", "SOFTWARE_CASTS")
NVCC_FLAGS = ("-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC")
CXX_FLAGS = ("-O3", "-fPIC", "-DNDEBUG")
# A copy of libstdc++ that a toolchain links statically stays inside the library: one stream of two
# copies crashes in the first error message that prints a number.
LINK_FLAGS = ("-shared", "-Wl,--exclude-libs,ALL", "-Wl,--no-undefined", "-s")
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "c10_cuda", "torch_cuda")


class Failed(Exception):
    """A compiler failed: its first error, its command, and what it printed."""


class Record(NamedTuple):
    """What `_build.json` says. nvcc: "13.0.88". architectures: "sm_90a". reason: why there are no
    kernels; None: there are. options: those of OPTIONS that the kernels were built with."""

    nvcc: str = ""
    architectures: tuple[str, ...] = ()
    reason: str | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Record | None:
        """The record of a folder; None without one. Raises ValueError where it is damaged."""
        path = folder / RECORD
        if not path.exists():
            return None
        read = json.loads(path.read_text())
        options = tuple(read.get("options", ()))
        return cls(read["nvcc"], tuple(read["architectures"]), read["reason"], options)

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_text(json.dumps(self._asdict(), indent=1) + "\n")


def kernels_name(cuda: str) -> str:
    """The file of kernels, by a CUDA version."""
    return f"_kernels_cu{cuda.split('.')[0]}.so"


def release_of(torch_version: str) -> str:
    """The first two numbers, which C++ of torch is stable for."""
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def glue_name(torch_version: str, cuda: str) -> str:
    return f"_glue_torch{release_of(torch_version)}_cu{cuda.split('.')[0]}.so"


# Compiling #


def cxx() -> list[str]:
    """The C++ compiler and its first options: CXX, else c++, else g++. [] where there is none."""
    return (
        shlex.split(os.environ.get("CXX", ""))
        or [p for p in map(shutil.which, ("c++", "g++")) if p][:1]
    )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        printed = done.stdout + done.stderr
        first = next(
            (line for line in printed.splitlines() if "error" in line or "undefined" in line),
            f"{command[0]} failed",
        )
        raise Failed(f"{first}\n{shlex.join(command)}\n{printed}")


def _is_fresh(output: Path, command: str) -> bool:
    """Output was made by this command of files that are no newer."""
    said, depends = output.with_suffix(".command"), output.with_suffix(".d")
    if not (output.exists() and said.exists() and depends.exists() and said.read_text() == command):
        return False
    files = depends.read_text().partition(":")[2].replace("\\\n", " ").split()
    made = output.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) <= made for file in files)


def compile_sources(
    root: Path, sources: Sequence[Path], compiler: Sequence[str], temp: Path, jobs: int
) -> list[Path]:
    """Objects of sources below root, in temp; those that are fresh stay. Raises Failed."""

    def one(source: Path) -> Path:
        output = temp / source.relative_to(root).with_suffix(".o")
        command = [
            *compiler,
            "-MD",
            "-MF",
            str(output.with_suffix(".d")),
            "-c",
            str(source),
            "-o",
            str(output),
        ]
        if not _is_fresh(output, shlex.join(command)):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.with_suffix(".command").unlink(missing_ok=True)
            _run(command)
            output.with_suffix(".command").write_text(shlex.join(command))
        return output

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, sources))


def _link(output: Path, objects: Sequence[Path], *rest: str) -> None:
    """Written beside and renamed: a process that has the old file mapped keeps it."""
    made = output.with_suffix(f".{os.getpid()}")
    _run(
        [
            *cxx(),
            *LINK_FLAGS,
            f"-Wl,-soname,{output.name}",
            *map(str, objects),
            *rest,
            "-o",
            str(made),
        ]
    )
    made.replace(output)


def jobs() -> int:
    """MAX_JOBS, else the processors that this process may use."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def runtime_folders(
    packages: Path, cuda: str, toolkit: Path | None
) -> tuple[list[Path], list[Path]]:
    """(include folders, library folders) of CUDA's runtime and cuBLASLt: the toolkit's, and the
    nvidia packages' beside torch.

    packages:  the folder in which torch lies.
    """
    homes = [
        packages / "nvidia" / f"cu{cuda.split('.')[0]}",
        packages / "nvidia" / "cuda_runtime",
        packages / "nvidia" / "cublas",
    ]
    homes = [*([toolkit] if toolkit is not None else []), *homes]
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
    """The kernels of csrc, in folder.

    targets:      "90a", "100f". Products of Hopper are compiled for 90a alone.
    cublaslt:     (folder of cublasLt.h, the library), recorded by its soname, which torch has
                  loaded.
    options:      of OPTIONS.
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
        # Last: the runtime's headers, which lie in the same folder, are the toolkit's.
        return [
            str(nvcc),
            *NVCC_FLAGS,
            *size,
            *defines,
            *codes,
            f"-I{csrc}",
            f"-Xcompiler=-idirafter,{cublaslt[0]}",
        ]

    objects = []
    for sources, of in kernel_sources(csrc, targets):
        objects += compile_sources(csrc, sources, compiler(of), temp / "kernels", jobs())
    output = folder / kernels_name(cuda)
    _link(
        output,
        objects,
        *(f"-L{nvcc.parent.parent / name}" for name in ("lib64", "lib")),
        "-lcudart",
        str(cublaslt[1]),
    )
    return output


def kernel_sources(csrc: Path, targets: Sequence[str]) -> list[tuple[list[Path], Sequence[str]]]:
    """(sources, what they are compiled for): products of Hopper have code for it alone, and none
    elsewhere."""
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
    """The glue for the torch that lies in `torch`, linked to `kernels`. Raises Failed; without a
    C++ compiler too."""
    if not cxx():
        raise Failed("there is no C++ compiler (CXX, c++ or g++)")
    includes, libraries = runtime_folders(torch.parent, cuda, toolkit)
    includes = [torch / "include", torch / "include/torch/csrc/api/include", *includes]
    if not any((path / "crt/host_defines.h").exists() for path in includes):
        includes.insert(0, csrc / "api/no_toolkit")
    compiler = [
        *cxx(),
        *CXX_FLAGS,
        f"-I{csrc}",
        *(word for path in includes for word in ("-isystem", str(path))),
    ]
    sources = [
        csrc / "bindings.cpp",
        *sorted(p for folder in GLUE for p in csrc.glob(f"{folder}/*.cpp")),
    ]
    objects = compile_sources(csrc, sources, compiler, temp / f"glue-{release_of(version)}", jobs())
    output = folder / glue_name(version, cuda)
    runtime = next(
        (str(found) for at in libraries for found in sorted(at.glob("libcudart.so*"))), "-lcudart"
    )
    _link(
        output,
        objects,
        f"-L{torch / 'lib'}",
        *(f"-l{name}" for name in TORCH_LIBRARIES),
        str(kernels),
        runtime,
        "-Wl,-rpath,$ORIGIN",
    )
    return output


# A process of its own loads both and makes one error that prints a number, which a broken mix of
# C++ libraries does not survive.
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
    """Raises Failed where the libraries do not load in a Python, or their errors are no errors."""
    command = [python, "-c", _CHECK, str(kernels), str(glue)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kernels.parent)
    if done.returncode:
        raise Failed(
            "the compiled operators do not work: exit status "
            f"{done.returncode}\n{done.stderr[-2000:]}"
        )


# Toolkits #


def output_of(*command: str | Path) -> str:
    """What a command prints, both streams."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.stdout + done.stderr


def toolkit_of(nvcc: str) -> Path:
    """The toolkit of the nvcc on PATH, which may be a link or a wrapper script: the compiler says
    where it lies."""
    top = re.search(
        r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE
    )
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def find_toolkit(fits: Callable[[Path], bool]) -> tuple[Path | None, list[Path]]:
    """(the folder of a CUDA toolkit that fits, the places that were looked at): CUDA_HOME, else
    nvcc's own, else the usual."""
    nvcc = shutil.which("nvcc")
    told = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    homes = (
        [Path(told)] if told else [*([toolkit_of(nvcc)] if nvcc else []), Path("/usr/local/cuda")]
    )
    return next(filter(fits, homes), None), homes

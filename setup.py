# SPDX-License-Identifier: Apache-2.0
"""Build script: pure Python everywhere, plus the compiled operators where CUDA can be compiled.

fsdp_quant/ops/build.py says which files there are and compiles them; none needs a GPU. They are
built when torch imports and is a CUDA build, and an nvcc of torch's CUDA major version and cuBLASLt
(that of torch's own nvidia packages, or of the toolkit) are here. A missing condition is printed,
kept in the package, and leaves a pure Python install, in which the PyTorch reference runs every
format. Environment:

    FSDP_QUANT_NATIVE=0|1       0: pure Python, whatever is here; 1: a missing condition is an error
    FSDP_QUANT_CUDA_ARCHS       architectures, "8.0;8.9;9.0a;10.0f;12.0f" unless told; those that
                                nvcc does not know are dropped
    FSDP_QUANT_LINE_TABLES=1    keeps what profilers show source lines by
    FSDP_QUANT_RANDOM_SLEEPS=1  products on Hopper wait at random at their barriers: a build for
                                tests alone
    FSDP_QUANT_SOFTWARE_CASTS=1 casts to e2m1 and e8m0 on Blackwell without its instructions for
    them
    CUDA_HOME                   the CUDA toolkit; that of the nvcc on PATH unless told
    CXX                         the C++ compiler
    MAX_JOBS                    sources compiled at once
    FSDP_QUANT_GLUE_FOR         Pythons with other releases of torch, for which glue is compiled too
                                (launch/wheel.sh)

A build in isolation does not see the installed torch: use
    pip install --no-build-isolation -e .
launch/wheel.sh makes wheels, which need no compiler where they are installed.
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "fsdp_quant"
INSTALL = "pip install --no-build-isolation -e ."
SETUPTOOLS = 64  # editable installs of pyproject.toml
CUBLAS = (12, 9)  # multiplies 8-bit operands with scales of rows and blocks
TARGETS = "8.0;8.9;9.0a;10.0f;12.0f"


def _load_build():
    spec = importlib.util.spec_from_file_location("fsdp_quant_build", PACKAGE / "ops" / "build.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


class Missing(Exception):
    """A condition of the native build that does not hold: what, got, wanted, what to do."""


def say(text: str) -> None:
    print(f"fsdp_quant: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"error: fsdp_quant: {text}")


def cuda_toolkit() -> Path:
    """The folder with nvcc and the runtime's headers."""
    home, homes = build.find_toolkit(
        lambda home: (
            (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists()
        )
    )
    if home is None:
        raise Missing(
            "there is no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) in "
            f"{' or '.join(map(str, homes))}; install one of torch's CUDA major version, or point "
            "CUDA_HOME at it"
        )
    return home


def nvcc_version(nvcc: Path) -> str:
    """major.minor.build as the compiler reports it."""
    text = build.output_of(nvcc, "--version")
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise Missing(f"{nvcc} does not tell its version: {text.strip()[:200]!r}")
    return found[1]


def architectures(nvcc: Path) -> list[str]:
    """FSDP_QUANT_CUDA_ARCHS as nvcc spells them ("90a"), less those that this nvcc does not
    know."""
    asked = os.environ.get("FSDP_QUANT_CUDA_ARCHS") or TARGETS
    known = re.findall(r"sm_(\d+)", build.output_of(nvcc, "--list-gpu-code"))
    targets, dropped = [], []
    for arch in filter(None, re.split(r"[;,\s]+", asked)):
        if arch == "9.0":
            say("sm_90 is built as sm_90a, whose instructions the products of Hopper use")
            arch = "9.0a"
        parts = re.fullmatch(r"(\d+)\.(\d)([af]?)", arch)
        if not parts:
            fail(
                f"FSDP_QUANT_CUDA_ARCHS holds {arch!r}, wanted architectures like 9.0a;10.0f; got "
                f"{asked!r}"
            )
        base = parts[1] + parts[2]  # nvcc lists the base of an "a" or "f" target only
        (targets if base in known else dropped).append(base + parts[3])
    if dropped:
        say(f"nvcc {nvcc_version(nvcc)} does not know sm_{', sm_'.join(dropped)}: dropped")
    if not targets:
        raise Missing(
            f"nvcc {nvcc_version(nvcc)} knows none of {asked}; set FSDP_QUANT_CUDA_ARCHS or use a "
            "newer CUDA"
        )
    return list(dict.fromkeys(targets))


def cublaslt(packages: Path, major: str, toolkit: Path) -> tuple[Path, Path]:
    """(folder of cublasLt.h, the library): of the nvidia packages beside torch, which loads it,
    else of the toolkit."""
    nvidia, name = packages / "nvidia", f"libcublasLt.so.{major}"
    places = (
        (nvidia / f"cu{major}", "lib"),
        (nvidia / "cublas", "lib"),
        (toolkit, "lib64"),
        (toolkit, "lib"),
    )
    for home, folder in places:
        include, library = home / "include", home / folder / name
        if (include / "cublasLt.h").exists() and library.exists():
            break
    else:
        raise Missing(
            f"there is no cuBLASLt (include/cublasLt.h and {name}) in {nvidia}/cu{major}, "
            f"{nvidia}/cublas or {toolkit}; install the nvidia-cublas package that torch names, or "
            "point CUDA_HOME at a toolkit that has it"
        )
    found = dict(
        re.findall(r"#define CUBLAS_VER_(M\w+) (\d+)", (include / "cublas_api.h").read_text())
    )
    version = int(found["MAJOR"]), int(found["MINOR"])
    if version < CUBLAS:
        raise Missing(
            f"{include} holds cuBLAS {version[0]}.{version[1]}, wanted {CUBLAS[0]}.{CUBLAS[1]} or "
            "newer; install a torch for a newer CUDA"
        )
    return include, library


class Native:
    """The operators of this machine's torch and toolkit. Raises Missing where they cannot be
    built."""

    def __init__(self):
        if not (CSRC / "bindings.cpp").exists():
            raise Missing("csrc/bindings.cpp does not exist; use a complete checkout")
        try:
            import torch
        except ImportError as error:
            raise Missing(
                f"torch does not import ({error}); install it first, then {INSTALL}"
            ) from None
        if torch.version.cuda is None:
            raise Missing(f"torch {torch.__version__} is not a CUDA build; install one that is")
        self.torch, self.version, self.cuda = (
            Path(torch.__file__).parent,
            torch.__version__,
            torch.version.cuda,
        )
        self.toolkit = cuda_toolkit()
        self.nvcc = self.toolkit / "bin" / "nvcc"
        self.nvcc_version = nvcc_version(self.nvcc)
        got, wanted = self.nvcc_version.split(".")[0], self.cuda.split(".")[0]
        if got != wanted:
            raise Missing(
                f"{self.nvcc} is release {self.nvcc_version} and torch {self.version} was built "
                f"with CUDA {self.cuda}, wanted the same major version; point CUDA_HOME at a CUDA "
                f"{wanted} toolkit, or install a torch for CUDA {got}"
            )
        self.targets = architectures(self.nvcc)
        self.cublaslt = cublaslt(self.torch.parent, wanted, self.toolkit)

    def build(self, folder: Path) -> list[Path]:
        """The files, in folder. Raises build.Failed."""
        names = tuple(f"sm_{arch}" for arch in self.targets)
        say(f"building for torch {self.version} with nvcc {self.nvcc_version}, {', '.join(names)}")
        folder.mkdir(parents=True, exist_ok=True)
        options = tuple(o for o in build.OPTIONS if os.environ.get(f"FSDP_QUANT_{o}") == "1")
        # kept: a second build compiles what changed
        temp = ROOT / "build" / f"native-cu{self.cuda}"
        kernels = build.build_kernels(
            CSRC,
            folder,
            self.cuda,
            self.nvcc,
            self.targets,
            self.cublaslt,
            temp,
            options,
        )
        pythons = os.environ.get("FSDP_QUANT_GLUE_FOR", "").split()
        glue = []
        for python, (torch, version) in zip(
            [sys.executable, *pythons], [(self.torch, self.version), *map(self._torch_of, pythons)]
        ):
            glue.append(
                build.build_glue(
                    CSRC, folder, kernels, torch, version, self.cuda, self.toolkit, temp
                )
            )
            build.check(python, kernels, glue[-1])
        build.Record(self.nvcc_version, names, options=options).write(folder)
        return [kernels, *glue, folder / build.RECORD]

    def _torch_of(self, python: str) -> tuple[Path, str]:
        """(folder, version) of the torch of another Python."""
        said = build.output_of(
            python,
            "-c",
            "import torch; print(torch.__file__, torch.__version__, torch.version.cuda)",
        ).split()
        if len(said) < 3 or said[-1].split(".")[0] != self.cuda.split(".")[0]:
            fail(
                f"{python} says of its torch {' '.join(said)!r}, wanted one for CUDA "
                f"{self.cuda.split('.')[0]}"
            )
        return Path(said[-3]).parent, said[-2]


class BuildNative(build_ext):
    """Builds the operators, or writes why there are none."""

    native, reason = None, None

    def run(self):
        in_place = self.inplace or getattr(self, "editable_mode", False)
        folder = PACKAGE if in_place else Path(self.build_lib).resolve() / "fsdp_quant"
        built = [p for pattern in ("_kernels*.so", "_glue*.so") for p in folder.glob(pattern)]
        if self.native is None and built and os.environ.get("FSDP_QUANT_NATIVE") != "0":
            # a build in isolation does not see the torch that they were built for
            say(f"kept {', '.join(p.name for p in built)} of an earlier build; to build: {INSTALL}")
            self.made = built
            return
        if self.native is None:
            for stale in [*built, *folder.glob(build.RECORD)]:
                stale.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            build.Record(reason=self.reason).write(folder)
            self.made = [folder / build.RECORD]
            return
        try:
            self.made = self.native.build(folder)
        except build.Failed as error:
            fail(str(error))
        for stale in set(built) - set(self.made):  # those that worked stay until others do
            stale.unlink()
        if not in_place:  # what compiles glue for another torch
            headers = [p for p in CSRC.rglob("*.h")] + [
                CSRC / "bindings.cpp",
                *CSRC.glob("api/*.cpp"),
                *CSRC.glob("step/*.cpp"),
            ]
            for source in headers:
                to = folder / "_csrc" / source.relative_to(CSRC)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)

    def get_outputs(self):
        return [str(path) for path in getattr(self, "made", [])]

    def get_output_mapping(self):
        return {}


class Wheel(bdist_wheel):
    """The libraries hold no Python, so that one wheel serves every version of it."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (
            ("py3", "none", platform) if BuildNative.native is not None else (python, abi, platform)
        )


class SourceDistribution(sdist):
    """Holds all of csrc/, headers too, whatever can be compiled where it is made."""

    def make_distribution(self):
        # .cpp, .cu, .cuh, .h
        sources = {str(path.relative_to(ROOT)) for path in CSRC.rglob("*.[ch]*")}
        self.filelist.extend(sorted(sources - set(self.filelist.files)))
        super().make_distribution()


def choose() -> tuple[Native | None, str | None]:
    """(what builds the operators, why nothing does), under FSDP_QUANT_NATIVE."""
    wish = os.environ.get("FSDP_QUANT_NATIVE") or "auto"
    if wish not in ("0", "1", "auto"):
        fail(f"FSDP_QUANT_NATIVE must be 0, 1 or unset, got {wish!r}")
    try:
        if wish == "0":
            raise Missing("FSDP_QUANT_NATIVE=0 when it was installed")
        return Native(), None
    except Missing as missing:
        if wish == "1":
            fail(f"FSDP_QUANT_NATIVE=1 asks for the compiled operators, and {missing}")
        say(f"pure Python install, because {missing}")
        return None, str(missing)


if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
    fail(
        f"setuptools is {setuptools.__version__}, wanted {SETUPTOOLS} or newer; "
        f"pip install 'setuptools>={SETUPTOOLS}' and try again"
    )
BuildNative.native, BuildNative.reason = choose()
setuptools.setup(
    ext_modules=[
        setuptools.Extension("fsdp_quant._native", [])
    ],  # setuptools runs build_ext where there is one
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel, "sdist": SourceDistribution},
)

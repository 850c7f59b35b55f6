"""Build script: pure Python everywhere, plus one native extension where CUDA can be compiled.

The extension fsdp_quant._native is built from csrc/bindings.cpp and csrc/**/*.cu when torch imports
and is a CUDA build, and a CUDA toolkit of torch's major version is here. Building needs no GPU. A
missing condition is printed and leaves a pure Python install, in which the PyTorch reference runs
every format.

A build in isolation does not see the installed torch: use
    pip install --no-build-isolation -e .
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BINDINGS = CSRC / "bindings.cpp"

# Architecture, and the first nvcc that knows it. The "a" targets have wgmma and tcgen05.
ARCHITECTURES = {"90a": (12, 0), "100a": (12, 8)}


def cuda_toolkit() -> Path | None:
    """The first folder with nvcc and the runtime's headers: CUDA_HOME, nvcc's own, the usual."""
    nvcc = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        nvcc and Path(nvcc).resolve().parent.parent,
        "/usr/local/cuda",
    ]
    for home in (Path(home) for home in homes if home):
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            return home
    return None


def nvcc_version(toolkit: Path) -> tuple[int, int]:
    """(major, minor) of the toolkit, as its compiler reports it."""
    text = subprocess.check_output([str(toolkit / "bin" / "nvcc"), "--version"], text=True)
    major, minor = re.search(r"release (\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def missing_for_native() -> str | None:
    """Why the extension cannot be built here, in one clause; None when it can."""
    if not BINDINGS.exists():
        return "csrc/bindings.cpp does not exist"
    try:
        import torch
    except ImportError as error:
        return f"torch does not import ({error}); pip needs --no-build-isolation to see it"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    toolkit = cuda_toolkit()
    if toolkit is None:
        return "there is no CUDA toolkit with nvcc (set CUDA_HOME)"
    major, minor = nvcc_version(toolkit)
    if major != int(torch.version.cuda.split(".")[0]):
        return f"nvcc is {major}.{minor} and torch was built with CUDA {torch.version.cuda}"
    return None


def native_extension() -> dict:
    """The setup() arguments that build fsdp_quant._native."""
    toolkit = cuda_toolkit()
    os.environ["CUDA_HOME"] = str(toolkit)  # read when torch's module is imported
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    version = nvcc_version(toolkit)
    targets = [arch for arch, first in ARCHITECTURES.items() if version >= first]
    kernels = sorted(CSRC.rglob("*.cu"))
    print(f"fsdp_quant: building {len(kernels)} CUDA sources for sm_{', sm_'.join(targets)}")
    extension = CUDAExtension(
        name="fsdp_quant._native",
        sources=[str(path.relative_to(ROOT)) for path in [BINDINGS, *kernels]],
        include_dirs=[str(CSRC)],
        # No fast-math anywhere: the kernels are bit-exact with the reference.
        extra_compile_args={
            "cxx": ["-O3", "-std=c++17"],
            "nvcc": [
                "-O3",
                "-std=c++17",
                "--threads=2",
                "-lineinfo",
                *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in targets),
            ],
        },
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=True)},
    }


missing = missing_for_native()
if missing:
    print(f"fsdp_quant: pure Python install, because {missing}")
setup(**({} if missing else native_extension()))

"""Build script: pure Python everywhere, plus the compiled operators where CUDA can be compiled.

Two files, neither of which needs a GPU to be built:

    fsdp_quant/_native*.so      the operators, from csrc/bindings.cpp, csrc/{api,gemm}/*.cpp and csrc/**/*.cu. A plain
                                library for torch.ops.load_library; it links no Python, so that any Python loads it
    fsdp_quant/_build_info*.so  what they were built from, from csrc/build_info.cpp

They are built when torch imports and is a CUDA build, and an nvcc of torch's CUDA major version and cuBLASLt (that of
torch's own nvidia packages, or of the toolkit) are here. A missing condition is printed and leaves a pure Python
install, in which the PyTorch reference runs every format. Environment:

    FSDP_QUANT_NATIVE=0|1       0: pure Python, whatever is here; 1: a missing condition is an error
    FSDP_QUANT_CUDA_ARCHS       architectures, "9.0a;10.0a" unless told; those that nvcc does not know are dropped
    CUDA_HOME                   the CUDA toolkit; that of the nvcc on PATH unless told
    MAX_JOBS                    sources compiled at once

A build in isolation does not see the installed torch: use
    pip install --no-build-isolation -e .
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
INSTALL = "pip install --no-build-isolation -e ."
SETUPTOOLS = 77  # pyproject.toml states the license as an expression
CUBLAS = (12, 9)  # multiplies 8-bit operands with scales of rows and blocks

# No fast-math anywhere: the kernels are bit-exact with the reference. .ci/run compiles with the same flags.
CXX_FLAGS = ["-O3", "-std=c++17"]
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "--threads=2",
    "-lineinfo",
    # torch takes the arithmetic operators of __half and __nv_bfloat16 away; kernels are plain CUDA.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]


class Missing(Exception):
    """A condition of the native build that does not hold: what, got, wanted, what to do."""


def say(text: str) -> None:
    print(f"fsdp_quant: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"error: fsdp_quant: {text}")


def output_of(*command: str | Path) -> str:
    """What a command prints, both streams."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.stdout + done.stderr


def toolkit_of(nvcc: str) -> Path:
    """The toolkit of the nvcc on PATH, which may be a link or a wrapper script: the compiler says where it lies."""
    top = re.search(r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE)
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def cuda_toolkit() -> Path:
    """The folder with nvcc and the runtime's headers: CUDA_HOME when it is set, else nvcc's own, else the usual."""
    nvcc = shutil.which("nvcc")
    told = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    homes = [Path(told)] if told else [*([toolkit_of(nvcc)] if nvcc else []), Path("/usr/local/cuda")]
    for home in homes:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            return home
    raise Missing(
        f"there is no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) in {' or '.join(map(str, homes))}; "
        "install one of torch's CUDA major version, or point CUDA_HOME at it"
    )


def nvcc_version(nvcc: Path) -> str:
    """major.minor.build as the compiler reports it."""
    text = output_of(nvcc, "--version")
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise Missing(f"{nvcc} does not tell its version: {text.strip()[:200]!r}")
    return found[1]


def architectures(nvcc: Path) -> list[str]:
    """FSDP_QUANT_CUDA_ARCHS as nvcc spells them ("90a"), less those that this nvcc does not know."""
    asked = os.environ.get("FSDP_QUANT_CUDA_ARCHS") or "9.0a;10.0a"
    known = re.findall(r"sm_(\d+)", output_of(nvcc, "--list-gpu-code"))
    targets, dropped = [], []
    for arch in filter(None, re.split(r"[;,\s]+", asked)):
        if arch == "9.0":
            say("sm_90 is built as sm_90a, whose instructions the products of Hopper use")
            arch = "9.0a"
        parts = re.fullmatch(r"(\d+)\.(\d)(a?)", arch)
        if not parts:
            fail(f"FSDP_QUANT_CUDA_ARCHS holds {arch!r}, wanted architectures like 9.0a;10.0a; got {asked!r}")
        base = parts[1] + parts[2]  # nvcc lists the base of an "a" target only
        (targets if base in known else dropped).append(base + parts[3])
    if dropped:
        say(f"nvcc {nvcc_version(nvcc)} does not know sm_{', sm_'.join(dropped)}: dropped")
    if not targets:
        raise Missing(f"nvcc {nvcc_version(nvcc)} knows none of {asked}; set FSDP_QUANT_CUDA_ARCHS or use a newer CUDA")
    return list(dict.fromkeys(targets))


def cublaslt(packages: Path, major: str, toolkit: Path) -> tuple[Path, Path]:
    """(folder of cublasLt.h, the library): of the nvidia packages beside torch, which loads it, else of the toolkit."""
    nvidia, name = packages / "nvidia", f"libcublasLt.so.{major}"
    places = ((nvidia / f"cu{major}", "lib"), (nvidia / "cublas", "lib"), (toolkit, "lib64"), (toolkit, "lib"))
    for home, folder in places:
        include, library = home / "include", home / folder / name
        if (include / "cublasLt.h").exists() and library.exists():
            break
    else:
        raise Missing(
            f"there is no cuBLASLt (include/cublasLt.h and {name}) in {nvidia}/cu{major}, "
            f"{nvidia}/cublas or {toolkit}; install the nvidia-cublas package that torch names, or point CUDA_HOME at "
            "a toolkit that has it"
        )
    found = dict(re.findall(r"#define CUBLAS_VER_(M\w+) (\d+)", (include / "cublas_api.h").read_text()))
    version = int(found["MAJOR"]), int(found["MINOR"])
    if version < CUBLAS:
        raise Missing(
            f"{include} holds cuBLAS {version[0]}.{version[1]}, wanted {CUBLAS[0]}.{CUBLAS[1]} or newer; install a "
            "torch for a newer CUDA"
        )
    return include, library


def native_extensions() -> dict:
    """The setup() arguments that build both files. Raises Missing where they cannot be built."""
    if not (CSRC / "bindings.cpp").exists():
        raise Missing("csrc/bindings.cpp does not exist; use a complete checkout")
    try:
        import torch
    except ImportError as error:
        raise Missing(f"torch does not import ({error}); install it first, then {INSTALL}") from None
    if torch.version.cuda is None:
        raise Missing(f"torch {torch.__version__} is not a CUDA build; install one that is")
    toolkit = cuda_toolkit()
    nvcc = toolkit / "bin" / "nvcc"
    version = nvcc_version(nvcc)
    got, wanted = version.split(".")[0], torch.version.cuda.split(".")[0]
    if got != wanted:
        raise Missing(
            f"{nvcc} is release {version} and torch {torch.__version__} was built with CUDA {torch.version.cuda}, "
            f"wanted the same major version; point CUDA_HOME at a CUDA {wanted} toolkit, or install a torch for "
            f"CUDA {got}"
        )
    targets = architectures(nvcc)
    cublaslt_include, cublaslt_library = cublaslt(Path(torch.__file__).parent.parent, wanted, toolkit)

    os.environ["CUDA_HOME"] = str(toolkit)  # read when the next module is imported
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    class BuildNative(BuildExtension):
        """Keeps the objects, so that a second build compiles what changed; replaces both files, so that they match."""

        def run(self):
            # An editable install would build in a folder that it throws away.
            self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}"
            if self.inplace or self.editable_mode:
                for pattern in ("_native*.so", "_build_info*.so"):
                    for stale in (ROOT / "fsdp_quant").glob(pattern):
                        stale.unlink()
            super().run()

    kernels = sorted(CSRC.rglob("*.cu"))
    sources = [CSRC / "bindings.cpp", *sorted(CSRC.glob("api/*.cpp")), *sorted(CSRC.glob("gemm/*.cpp")), *kernels]
    names = ", ".join(f"sm_{arch}" for arch in targets)
    say(f"building {len(sources)} sources with nvcc {version} for torch {torch.__version__}, {names}")
    native = CUDAExtension(
        name="fsdp_quant._native",
        sources=[str(path.relative_to(ROOT)) for path in sources],
        include_dirs=[str(CSRC)],
        py_limited_api=True,  # leaves libtorch_python out; there is no Python code in it
        extra_compile_args={
            # Last: the runtime's headers, which lie in the same folder, are the toolkit's.
            "cxx": [*CXX_FLAGS, "-idirafter", str(cublaslt_include)],
            "nvcc": [*NVCC_FLAGS, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in targets)],
        },
        extra_link_args=[str(cublaslt_library)],  # recorded by its soname alone, which torch has loaded
    )
    facts = {
        "TORCH": torch.__version__,
        "CUDA": torch.version.cuda,
        "NVCC": version,
        "ARCHITECTURES": ";".join(f"sm_{arch}" for arch in targets),
        "NVCC_FLAGS": " ".join(NVCC_FLAGS),
    }
    build_info = setuptools.Extension(
        name="fsdp_quant._build_info",
        sources=["csrc/build_info.cpp"],
        include_dirs=[str(Path(torch.__file__).parent / "include")],  # for pybind11
        define_macros=[(f"FSDP_QUANT_BUILT_{name}", f'"{value}"') for name, value in facts.items()],
        extra_compile_args=["-O2", "-g0", "-std=c++17", "-fvisibility=hidden"],
        language="c++",
    )
    return {
        "ext_modules": [native, build_info],
        "cmdclass": {"build_ext": BuildNative.with_options(use_ninja=True)},
    }


class SourceDistribution(sdist):
    """Holds all of csrc/, headers too, whatever can be compiled where it is made."""

    def make_distribution(self):
        sources = {str(path.relative_to(ROOT)) for path in CSRC.rglob("*.[ch]*")}  # .cpp, .cu, .cuh, .h
        self.filelist.extend(sorted(sources - set(self.filelist.files)))
        super().make_distribution()


def arguments() -> dict:
    """The arguments of setup() that build, under FSDP_QUANT_NATIVE."""
    wish = os.environ.get("FSDP_QUANT_NATIVE") or "auto"
    if wish not in ("0", "1", "auto"):
        fail(f"FSDP_QUANT_NATIVE must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        say("pure Python install, because FSDP_QUANT_NATIVE=0")
        return {}
    try:
        return native_extensions()
    except Missing as missing:
        if wish == "1":
            fail(f"FSDP_QUANT_NATIVE=1 asks for the compiled operators, and {missing}")
        say(f"pure Python install, because {missing}")
        return {}


if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
    fail(
        f"setuptools is {setuptools.__version__}, wanted {SETUPTOOLS} or newer; "
        f"pip install 'setuptools>={SETUPTOOLS}' and try again"
    )
built = arguments()
setuptools.setup(**built | {"cmdclass": {"sdist": SourceDistribution} | built.get("cmdclass", {})})

# SPDX-License-Identifier: Apache-2.0
"""Packaging: what setup.py builds or refuses, which library is loaded, where it runs, and what
doctor says of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fsdp_quant
from fsdp_quant import __main__ as command
from fsdp_quant.formats import FORMATS
from fsdp_quant.ops import build, extension, native

ROOT = Path(fsdp_quant.__file__).parents[1]
OPERATIONS = ("quantize", "statistics", "dequantize", "transpose", "swizzle")


def run(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess:
    """This Python in a process of its own; its environment holds no FSDP_QUANT_ variable but those
    given."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FSDP_QUANT_")} | environ
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=env
    )


def library(folder: Path, cuda: str = "13.0", **record) -> Path:
    """A folder with a record, and files with the names of the kernels and of this torch's glue that
    are no libraries."""
    for name in (build.kernels_name(cuda), build.glue_name(torch.__version__, cuda)):
        (folder / name).write_bytes(b"not a library\n" * 100)
    build.Record("13.0.88", ("sm_90a",), **record).write(folder)
    return folder


def loaded(monkeypatch: pytest.MonkeyPatch, *architectures: str) -> None:
    """Makes the module believe that it loaded a library with code for these."""
    monkeypatch.setattr(
        extension,
        "STATUS",
        extension.Status("_glue.so", None, build.Record("13.0.88", architectures)),
    )
    extension._missing_code_for.cache_clear()


# Loading #


def test_import_works_without_the_library(tmp_path: Path):
    """Otherwise a variable, or a file that a broken build left, takes the whole package away."""
    program = (
        "import os, torch._dynamo, torch.distributed.tensor.parallel\n"
        "torch.version.cuda = '13.0'\n"
        "for native in '01':\n"
        "    os.environ['FSDP_QUANT_NATIVE'] = native\n"
        "    if child := os.fork():  # torch is imported once\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        continue\n"
        "    import fsdp_quant as fq\n"
        "    from fsdp_quant.ops import extension\n"
        "    fq.Quantizer('mxfp8').quantize(torch.ones(2, 32))\n"
        "    print(extension.is_loaded(), extension.STATUS.library, extension.STATUS.reason, "
        "sep='|', flush=True)\n    os._exit(0)\n"
    )
    done = run("-c", program, FSDP_QUANT_NATIVE_FOLDER=str(library(tmp_path)))
    assert done.returncode == 0, done.stderr
    off, broken = (line.split("|") for line in done.stdout.strip().splitlines())
    assert off == ["False", "None", "FSDP_QUANT_NATIVE=0 in the environment"]
    assert broken[:2] == ["False", "None"]
    assert (
        broken[2].startswith(f"the operators in {tmp_path} do not load (")
        and "rebuild with pip install" in broken[2]
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that would be loaded, under a torch for CUDA 13.0."""
    paths: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    monkeypatch.setattr(extension.ctypes, "CDLL", lambda path, mode: paths.append(path))
    return paths


def load(folder: Path, **environ: str) -> extension.Status:
    return extension.load(
        {"FSDP_QUANT_NATIVE_FOLDER": str(folder), "FSDP_QUANT_CACHE": str(folder / "cache")}
        | environ
    )


def test_kernels_are_loaded_with_the_glue_of_the_release(monkeypatch, opened, tmp_path: Path):
    """If false, a fix release of torch, whose C++ is that of the release, takes the kernels away;
    or they never run."""
    release = build.release_of(torch.__version__)
    for version in (f"{release}.0+cu130", f"{release}.7", f"{release}.1.dev20260101+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        status = load(library(tmp_path))
        assert status.reason is None and status.library == str(
            tmp_path / f"_glue_torch{release}_cu13.so"
        ), version
        assert status.build == build.Record("13.0.88", ("sm_90a",))
        assert opened[-2:] == [str(tmp_path / "_kernels_cu13.so"), status.library]
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    assert extension.load({}).library == status.library


def test_glue_of_another_release_is_not_loaded(monkeypatch, opened, tmp_path: Path):
    """If false, C++ of one torch release runs in another, and crashes or computes nonsense."""
    library(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.98.0")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    status = load(tmp_path)
    assert (
        status.library is None
        and "there is no _glue_torch2.98_cu13.so, but _glue_torch" in status.reason
    ), status
    assert "no C++ compiler to compile it" in status.reason and "rebuild with pip" in status.reason
    monkeypatch.setattr(torch.version, "cuda", "14.1")
    assert (
        "there is no _kernels_cu14.so for CUDA 14.1, but _kernels_cu13.so; rebuild with"
        in load(tmp_path).reason
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch 2.98.0 is not a CUDA build" in load(tmp_path).reason
    assert not opened


def test_glue_for_an_unknown_release_is_compiled_once(monkeypatch, opened, tmp_path: Path):
    """If false, a new release of torch trains at the reference's speed; or every start, and every
    rank, compiles for a minute."""
    library(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.98.0")
    monkeypatch.setenv("CXX", "a-compiler -static-libstdc++")
    made, fails = [], []

    def compiled(csrc, folder, kernels, torch_folder, version, cuda, toolkit, temp):
        made.append(csrc)
        if fails:
            raise build.Failed("a-compiler says no")
        (folder / build.glue_name(version, cuda)).touch()
        return folder / build.glue_name(version, cuda)

    monkeypatch.setattr(build, "build_glue", compiled)
    monkeypatch.setattr(build, "check", lambda python, kernels, glue: None)
    first, second = load(tmp_path), load(tmp_path)
    assert (
        first == second
        and first.library.startswith(str(tmp_path / "cache" / "2.98.0-"))
        and made == [ROOT / "csrc"]
    )
    fails.append(True)
    for _ in range(2):  # what failed is not tried again
        reason = load(tmp_path, FSDP_QUANT_CACHE=str(tmp_path / "other")).reason
        assert "do not load (" in reason and len(made) == 2, reason
    (log,) = (tmp_path / "other").rglob("failed.txt")
    assert str(log) in reason and log.read_text() == "a-compiler says no"


def test_the_reason_of_a_build_without_kernels_is_kept(opened, tmp_path: Path):
    """If false, a user who lacks a compiler is told to look for a library that was never built."""
    assert load(tmp_path).reason.startswith("not built; with a CUDA build of torch")
    library(tmp_path, reason="there is no CUDA toolkit (bin/nvcc) in /usr/local/cuda")
    status = load(tmp_path)
    assert status.reason.startswith(
        "not built, because there is no CUDA toolkit (bin/nvcc) in /usr/local/cuda; with a CUDA "
        "build"
    )
    (tmp_path / build.RECORD).write_text("{")
    assert "do not load" in load(tmp_path).reason and not opened


def test_wrong_errors_fail_a_build(tmp_path: Path):
    """If false, a toolchain that mixes two C++ libraries makes operators whose first error is a
    crash."""
    done = library(tmp_path)
    with pytest.raises(build.Failed, match="the compiled operators do not work: exit status 1"):
        build.check(
            sys.executable,
            done / "_kernels_cu13.so",
            done / build.glue_name(torch.__version__, "13"),
        )


def test_sources_are_compiled_again_when_they_or_a_header_change(monkeypatch, tmp_path: Path):
    """If false, a developer runs old code, or waits for what did not change."""
    csrc, temp = tmp_path / "csrc", tmp_path / "objects"
    (csrc / "api").mkdir(parents=True)
    (csrc / "api/a.cpp").write_text('#include "api/a.h"\n')
    (csrc / "api/a.h").write_text("int a();\n")
    ran, run_it = [], build._run
    monkeypatch.setattr(build, "_run", lambda command: ran.append(command) or run_it(command))

    def runs(*more: str) -> int:
        build.compile_sources(
            csrc, [csrc / "api/a.cpp"], [*build.cxx(), f"-I{csrc}", *more], temp, 1
        )
        return len(ran)

    def dated(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() + seconds,) * 2)

    for path in csrc.rglob("a.*"):
        dated(path, -20)
    assert runs() == runs() == 1
    dated(temp / "api/a.o", -10)
    assert runs() == 1
    dated(csrc / "api/a.h", -5)
    assert runs() == runs() == 2
    assert runs("-O1") == runs("-O1") == 3
    (csrc / "api/a.cpp").write_text("no C++")
    dated(csrc / "api/a.cpp", 5)
    with pytest.raises(build.Failed, match="a.cpp"):
        runs("-O1")


def test_products_of_hopper_are_compiled_for_hopper_alone():
    """If false, a library holds kernels that trap, or misses some."""
    (products, hopper), (others, targets) = build.kernel_sources(
        ROOT / "csrc", ["89", "90a", "100f"]
    )
    assert hopper == ["90a"] and targets == ["89", "90a", "100f"]
    every = {p for suffix in ("cu", "cpp") for p in (ROOT / "csrc").rglob(f"*.{suffix}")}
    glue = {
        ROOT / "csrc/bindings.cpp",
        *(p for folder in ("api", "step") for p in (ROOT / "csrc" / folder).glob("*.cpp")),
    }
    assert set(products) | set(others) == every - glue and not set(products) & set(others)
    own = re.compile(r"sm90_gemm_kernel\.cuh|sm90_gemm_instances\.cuh|cluster_group|this_cluster")
    assert {p for p in every if p.suffix == ".cu" and own.search(p.read_text())} == set(products)


# Where it runs #


def test_runs_on_says_what_stands_against_a_device(monkeypatch):
    """Otherwise a kernel is called where it has no code, or a user cannot tell why the reference
    runs."""
    assert extension.runs_on(torch.device("cpu")) == "the device is cpu, not CUDA"
    monkeypatch.setattr(extension, "STATUS", extension.Status(None, "not built", None))
    assert extension.runs_on(torch.device("cuda", 0)) == "the compiled operators are off: not built"
    assert not extension.is_loaded()


def test_work_of_the_reference_on_a_gpu_is_said_once(monkeypatch):
    """If false, a GPU trains at the reference's speed without a word; or a choice is complained of
    in each step."""
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    for reason, want in (
        ("not built; with a CUDA build of torch and nvcc: pip", 1),
        (extension.TURNED_OFF, 0),
    ):
        monkeypatch.setattr(extension, "STATUS", extension.Status(None, reason, None))
        extension._warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            extension.runs_on(x.device)  # a question, not work
            assert not seen and not native.is_available_for(x) and not native.is_available_for(x)
        assert len(seen) == want and all(
            reason in str(w.message) and "doctor" in str(w.message) for w in seen
        )


@pytest.mark.parametrize(
    "architectures, runs",
    [
        (("sm_90a", "sm_100a"), {(9, 0), (10, 0)}),
        (("sm_90",), {(9, 0)}),
        (("sm_100",), {(10, 0), (10, 3)}),
        (("sm_100f", "sm_120f"), {(10, 0), (10, 3), (12, 0)}),
        (("sm_80",), {(8, 0), (8, 6), (8, 9)}),
        (("sm_80", "sm_89", "sm_90a"), {(8, 0), (8, 6), (8, 9), (9, 0)}),
        (("sm_89",), {(8, 9)}),
    ],
)
def test_runs_on_compares_the_architectures(monkeypatch, architectures, runs):
    """Otherwise code for an "a" target is launched on a neighbour that lacks its instructions."""
    loaded(monkeypatch, *architectures)
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    for index, (major, minor) in enumerate(capabilities):
        reason = extension.runs_on(torch.device("cuda", index))
        if (major, minor) in runs:
            assert reason is None, reason
        else:
            assert (
                f"the library was built without sm_{major}{minor}: it has "
                f"{', '.join(architectures)}; set " in reason
            )
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: pytest.fail("asked the driver twice")
    )
    extension.runs_on(torch.device("cuda", 0))
    extension._missing_code_for.cache_clear()


# Doctor #


def test_doctor_prints_a_line_per_format(monkeypatch, capsys):
    """Otherwise nobody can tell from a report which operations ran compiled, and why the others did
    not."""

    def supported(fmt, device):
        reason = f"no kernel for {fmt.scale} scales" if fmt.tensor_scale else None
        return {name: "only rows" if name == "swizzle" else reason for name in OPERATIONS}

    monkeypatch.setattr(command.native, "supported", supported)
    loaded(monkeypatch, "sm_90a", "sm_100a")
    assert command.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = {line.split()[0]: line for line in lines if line}
    assert {"torch", "CUDA", "nvcc", "GPUs", "NCCL", "gloo"} <= set(first)
    assert "13.0.88" in first["nvcc"] and any("sm_90a, sm_100a" in line for line in lines)
    header = next(line for line in lines if "quantize" in line)
    assert header.split()[-len(OPERATIONS) :] == list(OPERATIONS)
    notes = {line.split()[0]: line for line in lines if line.startswith("[")}
    for fmt in FORMATS.values():
        row = first[fmt.name]
        for name in OPERATIONS:
            cell = row[header.index(f" {name}") + 1 :].split()[0]
            want = supported(fmt, None)[name]
            assert cell == "native" if want is None else want in notes[cell], row


# setup.py #


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """setup.py with an empty csrc/bindings.cpp, a torch for CUDA 13.0 in front of the real one, and
    no toolkit."""
    pytest.importorskip("setuptools", minversion="64")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "fsdp_quant/ops").mkdir(parents=True)
    shutil.copy(ROOT / "fsdp_quant/ops/build.py", tmp_path / "fsdp_quant/ops")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bindings.cpp").touch()
    (tmp_path / "torch.py").write_text(
        "class version:\n    cuda = '13.0'\n__version__ = '2.99.0+cu130'\n"
    )
    return tmp_path


def toolkit(checkout: Path, version: str) -> str:
    """The CUDA_HOME of a toolkit whose nvcc does nothing but answer; it knows sm_80 and sm_90."""
    home = checkout / f"cuda-{version}"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'*--version*) echo "Cuda compilation tools, release {version}, V{version}.7" ;;\n'
        "*--list-gpu-code*) echo sm_80; echo sm_90 ;;\nesac\n"
    )
    nvcc.chmod(0o755)
    return str(home)


def setup(checkout: Path, **environ: str) -> subprocess.CompletedProcess:
    return run("setup.py", "--name", cwd=checkout, PYTHONPATH=str(checkout), **environ)


def test_setup_without_sources_is_pure_python_or_an_error(checkout: Path):
    """Otherwise an install fails that could go on, or goes on after it was told to build the
    operators."""
    (checkout / "csrc" / "bindings.cpp").unlink()
    done = setup(checkout)
    assert (
        done.returncode == 0
        and "pure Python install, because csrc/bindings.cpp does not exist" in done.stdout
    )
    done = setup(checkout, FSDP_QUANT_NATIVE="0")
    assert done.returncode == 0 and "because FSDP_QUANT_NATIVE=0" in done.stdout
    done = setup(checkout, FSDP_QUANT_NATIVE="1")
    assert (
        done.returncode != 0
        and "FSDP_QUANT_NATIVE=1 asks for" in done.stderr
        and "bindings.cpp" in done.stderr
    )
    done = setup(checkout, FSDP_QUANT_NATIVE="yes")
    assert (
        done.returncode != 0 and "FSDP_QUANT_NATIVE must be 0, 1 or unset, got 'yes'" in done.stderr
    )


def test_a_build_that_sees_no_torch_keeps_the_operators(checkout: Path):
    """If false, `pip install -e .` in isolation deletes the kernels of the checkout."""
    (checkout / "torch.py").write_text("raise ImportError('isolated')\n")
    library(checkout / "fsdp_quant")
    files = set((checkout / "fsdp_quant").glob("_*"))
    for wish, kept in (("auto", True), ("0", False)):
        done = run(
            "setup.py", "build_ext", "--inplace", cwd=checkout, FSDP_QUANT_NATIVE=wish,
            PYTHONPATH=str(checkout),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert all(path.exists() for path in files if path.suffix == ".so") is kept, wish
        assert ("of an earlier build" in done.stdout) is kept, done.stdout


def test_a_build_that_fails_keeps_the_operators(checkout: Path):
    """If false, an install that cannot compile leaves a checkout without the kernels it had."""
    home = Path(toolkit(checkout, "13.0"))
    (home / "include" / "cublasLt.h").touch()
    (home / "include" / "cublas_api.h").write_text(
        "#define CUBLAS_VER_MAJOR 13\n#define CUBLAS_VER_MINOR 0\n"
    )
    (home / "lib64").mkdir()
    (home / "lib64" / "libcublasLt.so.13").touch()
    library(checkout / "fsdp_quant")
    files = set((checkout / "fsdp_quant").glob("_*.so"))
    done = run(
        "setup.py", "build_ext", "--inplace", cwd=checkout, CUDA_HOME=str(home), CXX="false",
        PYTHONPATH=str(checkout), FSDP_QUANT_NATIVE="auto",
    )  # fmt: skip
    assert done.returncode != 0 and "building for torch" in done.stdout, done.stderr
    assert files and all(path.exists() for path in files), done.stderr


def test_setup_tells_what_disagrees(checkout: Path):
    """Otherwise the operators are built by a compiler whose runtime torch does not have."""
    done = setup(checkout, FSDP_QUANT_NATIVE="1", CUDA_HOME=toolkit(checkout, "12.4"))
    assert done.returncode != 0
    for part in (
        "release 12.4.7",
        "torch 2.99.0+cu130",
        "CUDA 13.0",
        "point CUDA_HOME at a CUDA 13 toolkit",
    ):
        assert part in done.stderr, (part, done.stderr)
    done = setup(checkout, FSDP_QUANT_NATIVE="1", CUDA_HOME=str(checkout))
    assert (
        done.returncode != 0
        and "no CUDA toolkit" in done.stderr
        and f"in {checkout};" in done.stderr
    )
    (checkout / "torch.py").write_text(
        "class version:\n    cuda = None\n__version__ = '2.99.0+cpu'\n"
    )
    done = setup(checkout, FSDP_QUANT_NATIVE="1")
    assert done.returncode != 0 and "torch 2.99.0+cpu is not a CUDA build" in done.stderr


def test_setup_drops_architectures_that_nvcc_does_not_know(checkout: Path):
    """Otherwise an older toolkit compiles nothing; and a misspelt list is taken for an unknown
    one."""
    home = toolkit(checkout, "13.0")
    done = setup(
        checkout, FSDP_QUANT_NATIVE="1", CUDA_HOME=home, FSDP_QUANT_CUDA_ARCHS="10.0a 12.0"
    )
    assert done.returncode != 0 and "does not know sm_100a, sm_120: dropped" in done.stdout
    assert "knows none of 10.0a 12.0" in done.stderr
    done = setup(checkout, CUDA_HOME=home, FSDP_QUANT_CUDA_ARCHS="9.0a;sm_100a")
    assert (
        done.returncode != 0
        and "holds 'sm_100a', wanted architectures like 9.0a;10.0f" in done.stderr
    )


def test_products_of_hopper_are_built_with_its_own_instructions(checkout: Path, tmp_path: Path):
    """If false, a library for sm_90 has empty products, whose results are memory that nothing
    wrote."""
    done = setup(checkout, CUDA_HOME=toolkit(checkout, "13.0"), FSDP_QUANT_CUDA_ARCHS="9.0")
    assert "sm_90 is built as sm_90a" in done.stdout, done.stderr
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return
    source = tmp_path / "product.cu"
    source.write_text('#include "gemm/sm90_gemm_kernel.cuh"\n')
    for arch, message in (
        ("sm_90", "compile for sm_90a instead of sm_90"),
        ("sm_90a", ""),
        ("sm_80", ""),
    ):
        what = [
            nvcc,
            "-ptx",
            f"-arch={arch}",
            f"-I{ROOT / 'csrc'}",
            str(source),
            "-o",
            str(tmp_path / "product.ptx"),
        ]
        done = subprocess.run(what, capture_output=True, text=True)
        assert message in done.stderr and (done.returncode == 0) == (not message), (
            arch,
            done.stderr,
        )


def test_a_source_distribution_compiles(tmp_path: Path):
    """Otherwise what is installed from it has no operators, or fails at the first header that is
    missing."""
    pytest.importorskip("setuptools", minversion="64")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "fsdp_quant/ops").mkdir(parents=True)
    (tmp_path / "fsdp_quant/ops/__init__.py").touch()
    # the version, and what setup.py loads
    for name in ("fsdp_quant/__init__.py", "fsdp_quant/ops/build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = run("setup.py", "-q", "sdist", "--formats=tar", cwd=tmp_path, FSDP_QUANT_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "dist").iterdir()
    with tarfile.open(made) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert len(names) == len(set(names)) and {
        "setup.py",
        "pyproject.toml",
        "fsdp_quant/ops/build.py",
    } <= set(names)
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    included = {
        f"csrc/{name}"
        for path in sources
        for name in re.findall(r'#include "(.+?)"', path.read_text())
    }
    compiled = {str(path.relative_to(ROOT)) for path in sources if path.suffix in (".cpp", ".cu")}
    assert included and included | compiled <= set(names), (included | compiled) - set(names)

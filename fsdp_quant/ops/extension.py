"""Loads the compiled operators, once, and says where they run.

[Note: the library]
setup.py builds two files beside this package: `_native*.so`, the operators, a library without any Python in it, and
`_build_info*.so`, what they were built from. The library's C++ is bound to one torch release, so it is loaded only
under the release it was built for. Importing this module never fails: where the library is off `STATUS.reason` says
why in one clause, and the reference runs everything. Environment, read once:

- FSDP_QUANT_NATIVE=0 leaves the library off.
- FSDP_QUANT_NATIVE_LIBRARY=path loads that file instead (for development). Its build info is looked for beside it;
  without one, its torch release and architectures are not checked.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parent.parent
TURNED_OFF = "FSDP_QUANT_NATIVE=0 in the environment"
REBUILD = "pip install --no-build-isolation -e ."


@dataclass(frozen=True)
class BuildInfo:
    """What a library was built from: "2.11.0+cu130", "13.0", "13.0.88", ("sm_90a", "sm_100a")."""

    torch: str
    cuda: str
    nvcc: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """The library that was loaded, or why none was; `build` wherever build info was found."""

    library: str | None
    reason: str | None
    build: BuildInfo | None


def build_info_beside(library: Path) -> BuildInfo | None:
    """The build info in a library's folder that this Python can import; None without one."""
    for path in (library.parent / f"_build_info{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            spec = spec_from_file_location("fsdp_quant._build_info", path)
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return BuildInfo(module.torch, module.cuda, module.nvcc, tuple(module.architectures))
    return None


def release(version: str, cuda: str | None) -> str:
    """A torch release and its CUDA, whether or not the version tells: 2.11.0+cu130, 2.13.0+cpu."""
    return f"{version.split('+')[0]}+{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"


def load(environ: Mapping[str, str] = os.environ) -> Status:
    """Load the library unless something speaks against it. Never raises."""
    if environ.get("FSDP_QUANT_NATIVE") == "0":
        return Status(None, TURNED_OFF, None)
    chosen = environ.get("FSDP_QUANT_NATIVE_LIBRARY")
    found = [Path(chosen)] if chosen else sorted(PACKAGE.glob("_native*.so"))
    if not found:
        return Status(None, f"not built; with a CUDA build of torch and nvcc: {REBUILD}", None)
    library, build = found[0], None
    try:
        build = build_info_beside(library)
        if build is None and not chosen:
            return Status(None, f"{library.name} has no build info for this Python; rebuild with {REBUILD}", None)
        here = release(torch.__version__, torch.version.cuda)
        if build is not None and release(build.torch, build.cuda) != here:
            built = release(build.torch, build.cuda)
            return Status(None, f"built for torch {built}, this is torch {here}; rebuild with {REBUILD}", build)
        torch.ops.load_library(str(library.absolute()))
    except Exception as error:  # of any kind: the library is an option, and importing the package is not
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        return Status(None, f"{library.name} does not load ({cause}); rebuild with {REBUILD}", build)
    return Status(str(library), None, build)


STATUS = load()


def is_loaded() -> bool:
    """The operators are registered in torch.ops."""
    return STATUS.library is not None


def runs_on(device: torch.device, warn: bool = False) -> str | None:
    """None where the compiled operators run on `device`, else the reason in one clause.

    warn:  work is about to begin there: warn of a reason, once, unless it was asked for.
    """
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if not is_loaded():
        reason = f"the compiled operators are off: {STATUS.reason}"
    else:
        reason = _missing_code_for(device.index if device.index is not None else torch.cuda.current_device())
    if warn and reason is not None and STATUS.reason != TURNED_OFF and not torch.compiler.is_compiling():
        _warn_once(reason)
    return reason


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"fsdp_quant: the PyTorch reference quantizes on this GPU, which is slow, because {reason}. "
        "`python -m fsdp_quant doctor` says more; FSDP_QUANT_NATIVE=0 accepts it", stacklevel=4,
    )


@functools.cache
def _missing_code_for(index: int) -> str | None:
    """Why the library has no code for a GPU. An "a" target runs on its capability alone, another on later minors."""
    if STATUS.build is None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    for arch in STATUS.build.architectures:
        digits = arch.removeprefix("sm_").removesuffix("a")
        built = int(digits[:-1]), int(digits[-1])
        if built == (major, minor) or (built[0] == major and built[1] < minor and not arch.endswith("a")):
            return None
    built = ", ".join(STATUS.build.architectures)
    return f"the library was built without sm_{major}{minor}: it has {built}; set FSDP_QUANT_CUDA_ARCHS and rebuild with {REBUILD}"

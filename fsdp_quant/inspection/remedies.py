# SPDX-License-Identifier: Apache-2.0
"""Name problems of a machine and remedies: the last lines of `python -m fsdp_quant doctor`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..ops import extension
from ..roles import OVERRIDE_VARIABLE
from ..tensor.code_check import CHECK_VARIABLE

FP8 = (8, 9)  # compute capability from which tensor cores multiply fp8
MEASURED = (9, 0)  # compute capability on which our kernels were tested


@dataclass(frozen=True)
class Machine:
    """Facts that `remedies` reads.

    cuda:       CUDA version of torch's build; None for a CPU build.
    has_driver: an NVIDIA driver is installed.
    gpus:       (name, compute capability, reason why operators do not run there or None) per
                visible GPU.
    operators:  reason why the compiled operators are off; None if they are loaded.
    environ:    environment variables.
    """

    cuda: str | None
    has_driver: bool
    gpus: tuple[tuple[str, tuple[int, int], str | None], ...]
    operators: str | None
    has_nccl: bool
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def this(cls) -> Machine:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        name, capability = torch.cuda.get_device_name, torch.cuda.get_device_capability
        gpus = tuple((name(d), capability(d), extension.runs_on(d)) for d in devices)
        return cls(
            torch.version.cuda,
            shutil.which("nvidia-smi") is not None,
            gpus,
            extension.STATUS.reason,
            dist.is_nccl_available(),
            dict(os.environ),
        )


def remedies(machine: Machine) -> list[str]:
    """Return one line per problem, with its remedy."""
    lines = []
    if not machine.gpus:
        lines.append(_no_gpu(machine))
    elif machine.operators == extension.TURNED_OFF:
        lines.append("the compiled operators are turned off: unset FSDP_QUANT_NATIVE")
    elif machine.operators is not None:
        lines.append(f"the compiled operators are off: {machine.operators}")
    else:
        lines += dict.fromkeys(f"{name}: {why}" for name, _, why in machine.gpus if why is not None)
    capabilities = {capability for _, capability, _ in machine.gpus}
    for name, capability in dict.fromkeys(gpu[:2] for gpu in machine.gpus):
        if capability < FP8:
            lines.append(
                f"{name} has no fp8 tensor cores: products run in bf16, so memory and gathers "
                "shrink and time does not; use an H100 or later for speed"
            )
        if capability != MEASURED:
            lines.append(
                f"{name}: our kernels are compiled for it and were not run there: run "
                "python -m fsdp_quant selftest first, and send us its report"
            )
    if len(capabilities) > 1:
        lines.append(
            "the GPUs are of different kinds, and ranks would multiply in different domains: "
            "choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    if len(machine.gpus) > 1 and not machine.has_nccl:
        lines.append(
            "torch was built without NCCL, so FSDP2 has no collectives for GPUs: install a "
            "release of torch for Linux with CUDA"
        )
    if machine.environ.get(CHECK_VARIABLE, "0") != "0":
        lines.append(
            f"{CHECK_VARIABLE} compares codes before each GEMM, which is slow: unset it to train"
        )
    if override := machine.environ.get(OVERRIDE_VARIABLE):
        lines.append(
            f"{OVERRIDE_VARIABLE}={override} is the backward of every recipe that does not say "
            "one: unset it if you did not mean that"
        )
    return lines


def _no_gpu(machine: Machine) -> str:
    if machine.cuda is None and machine.has_driver:
        return "there is an NVIDIA driver, and torch is a CPU build: install a CUDA build of torch"
    if machine.cuda is not None and machine.environ.get("CUDA_VISIBLE_DEVICES", None) in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs: unset it"
    if machine.cuda is not None:
        return "torch sees no GPU: see whether nvidia-smi lists one, and update the driver"
    return "there is no GPU: the PyTorch reference runs everything, for tests and small models"

"""What a device multiplies: its architecture, and the GEMM domain of a pair of formats."""

from __future__ import annotations

import functools

import torch

from ..formats import Format

# Fastest first. native: the device multiplies the pair as it is. bf16: both operands decode exactly to
# bf16 and a bf16 GEMM multiplies them. reference: decoded to fp32, the definition.
DOMAINS = ("native", "bf16", "reference")


@functools.cache
def _cuda_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return {(9, 0): "sm_90a", (10, 0): "sm_100a"}.get((major, minor), f"sm_{major}{minor}")


def arch_of(device: torch.device) -> str:
    """"cpu", "sm_90a", "sm_100a" or another CUDA architecture name."""
    if device.type != "cuda":
        return "cpu"
    return _cuda_arch(device.index if device.index is not None else torch.cuda.current_device())


def gemm_domain(a: Format, b: Format, dtype: torch.dtype, arch: str) -> tuple[str, str]:
    """(domain, reason) of a product that returns `dtype` on `arch`.

    A pure function of facts that every rank shares, so that all ranks plan alike.
    """
    if not a.is_quantized and not b.is_quantized:
        return "native", f"{str(dtype).removeprefix('torch.')} operands"
    if dtype is not torch.bfloat16:
        return "reference", f"the result is {str(dtype).removeprefix('torch.')}"
    for fmt in (a, b):
        if fmt.is_quantized and not fmt.decodes_exactly_to_bf16:
            return "reference", f"{fmt} does not decode exactly to bf16"
    if arch == "cpu":
        return "reference", "no low-precision matrix unit on a CPU"
    return "bf16", f"no compiled kernel multiplies {a} by {b} on {arch}"

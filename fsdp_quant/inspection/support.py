# SPDX-License-Identifier: Apache-2.0
"""`is_native`: whether a device runs a recipe on its own hardware path, and why not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats import Direction
from ..linear.plan import build_plan
from ..ops import native
from ..ops.capability import Place, arch_of, place_of
from ..recipe import PerLayer, Recipe, Schedule, as_recipe
from ..roles import QUANTIZED_TYPES


@dataclass(frozen=True)
class NativeSupport:
    """True if nothing falls back.

    reasons:  one sentence per GEMM and per format that does.
    """

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "native" if self else "; ".join(self.reasons)


def is_native(
    recipe: Recipe | PerLayer | Schedule | str,
    device: Place | int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> NativeSupport:
    """Return whether kernels of a device quantize every tensor of a linear layer under a recipe,
    and its tensor cores multiply every pair of operands, with the reasons if not.

    recipe:  also by name; of a recipe per layer or per step, every one.
    device:  default: the current GPU, without one the CPU; or a GPU that need not be here
             ("sm_90a", docs/targets.md).
    dtype:   of activations.

    Answers what `fq.plan` would print of a converted layer and what `require_native=True` accepts,
    and what `python -m fsdp_quant doctor` says of quantizers. Nothing runs.

    Raises ValueError for anything that is no recipe, and for an unknown GPU.

    >>> bool(fq.is_native("bf16", "cpu")), bool(fq.is_native("mxfp8", "cpu"))
    (True, False)
    >>> print(fq.is_native("mxfp8", "sm_90a"))
    native
    >>> print(fq.is_native("mxfp8", "cpu").reasons[-1])
    mxfp8 is quantized by the PyTorch reference: the device is cpu, not CUDA
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = place_of(device)
    if not isinstance(place, str) and place.type == "cuda" and not torch.cuda.is_available():
        return NativeSupport(("this machine has no CUDA device",))
    recipes = [r for phase in as_recipe(recipe, "is_native").phases for r in _recipes_of(phase)]
    reasons = (reason for one in recipes for reason in _fallbacks(one, dtype, place))
    return NativeSupport(tuple(dict.fromkeys(reasons)))


def _recipes_of(phase: Recipe | PerLayer) -> list[Recipe]:
    """Return every recipe that a layer may have."""
    if isinstance(phase, Recipe):
        return [phase]
    return [phase.default, *(recipe for *_, recipe in phase._rules)]


def _fallbacks(recipe: Recipe, dtype: torch.dtype, device: Place) -> list[str]:
    planned = build_plan(recipe, "linear").on(dtype, device)
    reasons = []
    for product, domain, reason in planned.slower_products(dtype, arch_of(device)):
        a, b = planned.pair(product)
        reasons.append(f"{product.name} multiplies {a} by {b} in the {domain} domain ({reason})")
    for slot in QUANTIZED_TYPES:
        for direction in Direction:
            fmt = planned.operand(slot, direction)
            reason = native.supported(fmt, device)["quantize"]
            if fmt.is_quantized and reason is not None:
                reasons.append(f"{fmt} is quantized by the PyTorch reference: {reason}")
    return reasons

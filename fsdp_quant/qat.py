# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: the recipe whose weights are the codes that are served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .families import FAMILIES
from .formats import FORMATS, Format, format_of
from .quantizer import HybridQuantizer, Quantizer
from .recipe import NAMED, Recipe, by_families, named
from .recipe_options import with_options
from .roles import Role

__all__ = ["FACTORIES", "qat"]


def weights_as_codes(
    role: Role, weight: str, forward: str, backward: str, **switches: Any
) -> HybridQuantizer | None:
    """Return the quantizer of a slot of `qat`: rowwise codes of weights serve both directions;
    other slots are those of `by_families`."""
    if role.tensor_type != "weight":
        return by_families(role, forward, backward, **switches)
    codes = Quantizer(with_options(format_of(weight), role.tensor_type, switches))
    return HybridQuantizer(codes, None, columnwise_source="rowwise")


# By name of a recipe, the function that its text stands for.
FACTORIES = dict.fromkeys(NAMED, by_families) | {"qat": weights_as_codes}


def _serves(fmt: Format) -> bool:
    """Whether GEMMs multiply the codes of a weight's rows in both directions; with a scale per row
    no GEMM contracts over rows."""
    return fmt.is_quantized and (fmt.shares_storage or not fmt.scale_leaves_contraction)


def qat(
    weight: str,
    activations: str | None = None,
    gradients: str | None = None,
    scale_rule: str | None = None,
    **options,
) -> Recipe:
    """Return the recipe of quantization-aware training: the forward multiplies the codes of
    `weight`, which `fq.export` writes, and the backward is straight-through.

    dgrad multiplies the values of the same codes; wgrad, of activations and gradients, goes to the
    master weight.

    weight:      a format: "mxfp4", "nvfp4", "mxfp6", "fp8_128x128" or another quantized one.
    activations: family of the input; gradients: of grad_output, and of the input in wgrad. None:
                 mxfp8, or that of a weight with fp32 scales, which GEMMs multiply with it.
                 "identity" leaves them in high precision.
    scale_rule:  of 4-bit formats with e4m3 scales: "fp8_exact" unless given, so that Hopper
                 multiplies the decoded values at the rate of fp8; see `nvfp4`.

    Raises ValueError for weights that are not quantized, or have a scale per row (fp8_row).

    >>> fq.recipes.qat("nvfp4").hybrid(fq.Role("linear", "weight")).rowwise
    nvfp4(fp8_exact)
    """
    fmt = format_of(weight) if isinstance(weight, str) else None
    if fmt is None or not _serves(fmt):
        raise ValueError(
            f"qat: weight={weight!r} has no codes that GEMMs of both directions multiply; wanted "
            f"one of {', '.join(name for name, known in FORMATS.items() if _serves(known))}"
        )
    rule = scale_rule or ("fp8_exact" if fmt.is_two_level else None)
    own = next(n for n, f in FAMILIES.items() if fmt in (f.vector, f.weight, f.square))
    default = own if fmt.has_fp32_scales else "mxfp8"
    pair = activations or default, gradients or default
    recipe = named("qat", *pair, options, weight=fmt.name, scale_rule=rule)
    return replace(recipe, qfactory=weights_as_codes)

# SPDX-License-Identifier: Apache-2.0
"""Families: the formats that a recipe uses under one name."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import ALIASES, FORMATS, Format


@dataclass(frozen=True)
class Family:
    """Formats that a recipe uses under one name.

    vector:  for activations and gradients, and for weights paired with another family.
    weight:  for weights that use the family in both directions.
    square:  for weights, with one scale per square block; None: there is none.
    """

    vector: Format
    weight: Format
    square: Format | None = None

    @property
    def rotates_wgrad(self) -> bool:
        """Whether the operands of wgrad are rotated, and gradients rounded stochastically: 4-bit
        elements need both, since outliers of a block and rounding to nearest bias the gradient."""
        return self.vector.element.bits == 4


FAMILIES: dict[str, Family] = {
    name: Family(FORMATS[vector], FORMATS[weight], FORMATS.get(square))
    for name, vector, weight, square in (
        ("identity", "identity", "identity", ""),
        ("fp8_tensor", "fp8_tensor", "fp8_tensor", ""),
        ("fp8_row", "fp8_row", "fp8_row", ""),
        ("fp8_block", "fp8_1x128", "fp8_128x128", "fp8_128x128"),
        ("mxfp8", "mxfp8", "mxfp8", "mxfp8_32x32"),
        ("mxfp6", "mxfp6", "mxfp6", ""),
        ("mxfp4", "mxfp4", "mxfp4", ""),
        ("nvfp4", "nvfp4", "nvfp4_16x16", "nvfp4_16x16"),
    )
}


def family_of(name: str) -> Family:
    """The family of that name (aliases: bf16, fp8, fp8_current). Raises ValueError with the known
    names."""
    family = FAMILIES.get(ALIASES.get(name, name))
    if family is None:
        known = ", ".join(sorted([*FAMILIES, *ALIASES]))
        raise ValueError(f"unknown format family {name!r}; known families: {known}")
    return family

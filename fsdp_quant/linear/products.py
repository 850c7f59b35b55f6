# SPDX-License-Identifier: Apache-2.0
"""The three GEMMs of a linear layer: their operands, and granularities of their anchors."""

from __future__ import annotations

from typing import NamedTuple

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops.layout import ANCHORED, ANCHORED_128, ANCHORED_512, ANCHORED_TENSOR


class Product(NamedTuple):
    """One GEMM: which slot and direction each operand comes from."""

    name: str
    a: tuple[str, Direction]
    b: tuple[str, Direction]


PRODUCTS = (
    Product("fprop", ("input", ROWWISE), ("weight", ROWWISE)),
    Product("dgrad", ("grad_output", ROWWISE), ("weight", COLUMNWISE)),
    Product("wgrad", ("grad_output", COLUMNWISE), ("input", COLUMNWISE)),
)


# Granularities of anchors, fastest first; EXACT: none. `linear.guard` moves a GEMM down if its
# operands need it. Those that contract over tokens continue with runs (`ops.layout.OVER_TOKENS`).
EXACT = "exact"
LADDER = (ANCHORED_TENSOR, ANCHORED, ANCHORED_512, ANCHORED_128, EXACT)
LADDER_OVER_TOKENS = (ANCHORED_TENSOR, ANCHORED_512, ANCHORED_128, EXACT)


def ladder_of(product: Product) -> tuple[str, ...]:
    return LADDER_OVER_TOKENS if product.name == "wgrad" else LADDER

# SPDX-License-Identifier: Apache-2.0
"""How the guard of anchored GEMMs (`linear.guard`) estimates what anchoring loses: in which steps,
and of which operands. `dist_tests.product_error` defines the estimate; kernels alone compute it."""

from __future__ import annotations

from ..formats import E2M1, E2M3, E3M2, Format

# The guard estimates the error of one step in so many; from SETTLED_STEPS on LESS_OFTEN.
PROBED_STEPS, PROBED_STEPS_OF_GROUPS = 16, 64
SETTLED_STEPS, LESS_OFTEN = 256, 8
# Kinds of operands of `product_error`: with their own scales; anchored; and the last four anchored
# from smaller elements: e2m1 with `fp8_exact` scales, or elements in blocks with e8m0 scales.
NOT_COUNTED, COUNTED, COUNTED_E2M1, COUNTED_MX_E2M1, COUNTED_MX_E2M3, COUNTED_MX_E3M2 = range(6)

_COUNTED_AS = {E2M1: COUNTED_MX_E2M1, E2M3: COUNTED_MX_E2M3, E3M2: COUNTED_MX_E3M2}


def counted_as(fmt: Format) -> int:
    """How `product_error` counts an anchored operand of codes of this format."""
    return COUNTED_E2M1 if fmt.becomes_e4m3 else _COUNTED_AS.get(fmt.element, COUNTED)


def is_probed(step: int, every: int = PROBED_STEPS) -> bool:
    """Whether kernels that look in one of `every` steps do so in this one."""
    return step % (every if step < SETTLED_STEPS else every * LESS_OFTEN) == 0

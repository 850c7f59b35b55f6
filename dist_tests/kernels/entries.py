# SPDX-License-Identifier: Apache-2.0
"""What `sanitize` runs: calls of operators, kept with how to make what they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16

# Whole tiles and tails, rows that are aligned and rows that are not.
SHAPES = ((200, 328), (33, 47))

DONE: list[tuple[str, list[Tensor], Callable[[], list[Tensor]], float]] = []


def on_device(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(expected.DEVICE, copy=True)  # which may be written


def run(what: str, made, want: Callable[[], list[Tensor]], bound: float = 0.0) -> None:
    """Keep the results of an operator, and how to make what they should be; bound: of the error's
    norm, or 0 for bytes."""
    DONE.append((what, [t for t in made if t is not None], want, bound))


def values(shape: tuple[int, int], dtype: torch.dtype = BF16) -> Tensor:
    return laws.values(*shape, dtype=dtype, kind="outliers", seed=shape[1])


def differences() -> list[str]:
    """What differs from the reference, a line each; NaN amaxes and values may differ in bits."""
    found = []
    for what, made, want, bound in DONE:
        wanted = want()
        if len(made) != len(wanted):
            found.append(f"{what}: {len(made)} results, want {len(wanted)}")
            continue
        for i, (got, w) in enumerate(zip(made, wanted)):
            got, w = got.cpu(), w.contiguous()
            if got.dtype.is_floating_point:
                got, w = got.masked_fill(got.isnan(), math.nan), w.masked_fill(w.isnan(), math.nan)
            if (
                bound
                and got.shape == w.shape
                and (got.double() - w.double()).norm() <= bound * w.double().norm()
            ):
                continue
            try:
                laws.assert_same_bytes(got, w, f"{what}: result {i}")
            except AssertionError as error:
                found.append(str(error))
    return found

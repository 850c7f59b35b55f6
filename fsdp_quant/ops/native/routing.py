# SPDX-License-Identifier: Apache-2.0
"""Launch the sum of a token's rows over its experts, and its backward (`ops.routing`). Mirrors
csrc/api/combine.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import contiguous_aligned

_ops = torch.ops.fsdp_quant


def combine(rows: Tensor, back: Tensor, weights: Tensor | None) -> Tensor:
    return _ops.combine(*map(contiguous_aligned, (rows, back, weights)))


def combine_backward(
    dout: Tensor, rows: Tensor | None, back: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return drows, and dweights, which is None without rows."""
    operands = map(contiguous_aligned, (dout, rows, back, weights))
    drows, dweights = _ops.combine_backward(*operands)
    return drows, None if rows is None else dweights

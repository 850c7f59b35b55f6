# SPDX-License-Identifier: Apache-2.0
"""Runs: what a rank holds of a [rows, cols] tensor that is cut at any element, in row-major order.

The reference, and kernels of whole tensors, read rows, so a run is encoded as the rows that cover
it, with zeros in place of what others hold: zeros never raise an amax, and their codes are dropped.
Kernels that begin at any element take the place of both functions where they run
(`weight_sync.cast_plan`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import PACKINGS, ceil_div
from .layout import pack, unpack


def rows_covering(values: Tensor, col0: int, cols: int) -> Tensor:
    """[rows, cols] of the elements from column col0 of a row on, zeros around them; of whole rows a
    view.

    values:  [elements].
    """
    behind = -(col0 + values.numel()) % cols if values.numel() else 0
    if values.numel() and (col0 or behind):
        values = F.pad(values, (col0, behind))
    return values.view(-1, cols)


def codes_of_run(data: Tensor, bits: int, start: int, numel: int, cols: int) -> Tensor:
    """The bytes of a run's codes, from those of the rows that cover it.

    data:     compact codes [rows, row bytes] (identity: [rows, cols] in its dtype).
    start:    index of the run's first element in the whole tensor.
    returns:  uint8. Codes of less than a byte are packed by the element's index in the tensor,
              whatever its columns; bits of the elements before and after the run are zero.
    """
    if not numel:
        return data.new_empty(0, dtype=torch.uint8)
    col0 = start % cols
    if bits >= 8:
        return data.reshape(-1)[col0 : col0 + numel].contiguous().view(torch.uint8)
    codes, before = (
        unpack(data, bits)[:, :cols].reshape(-1)[col0 : col0 + numel],
        start % PACKINGS[bits][0],
    )
    return pack(F.pad(codes, (before, 0)), bits)[
        before * bits // 8 : ceil_div((before + numel) * bits, 8)
    ]


def rows_of_codes(run: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    """Compact codes uint8 [rows, row bytes] of the bytes of the run of all elements."""
    count, size = PACKINGS[bits]
    if cols % count == 0:
        return run.view(rows, -1)
    return pack(
        unpack(F.pad(run, (0, -len(run) % size)), bits)[: rows * cols].view(rows, cols), bits
    )

"""Runs: what a rank holds of a [rows, cols] tensor that is cut at any element, in row-major order.

The reference, and kernels of whole tensors, read rows, so a run is encoded as the rows that cover it, with zeros in place of what
others hold: zeros never raise an amax, and their codes are dropped. Kernels that begin at any element take the place of both
functions where they run (`parallel.cast_plan`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import ceil_div
from .layout import pack_nibbles, unpack_nibbles


def covering_rows(values: Tensor, col0: int, cols: int) -> Tensor:
    """[rows, cols] of the elements from column col0 of a row on, zeros around them; of whole rows a view.

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
    returns:  uint8. 4-bit codes lie two a byte by the element's index in the tensor, whatever its columns; nibbles of the
              elements before and after the run are zero.
    """
    if not numel:
        return data.new_empty(0, dtype=torch.uint8)
    col0 = start % cols
    if bits != 4:
        return data.reshape(-1)[col0 : col0 + numel].contiguous().view(torch.uint8)
    if cols % 2:
        return pack_nibbles(F.pad(unpack_nibbles(data)[:, :cols].reshape(-1)[col0 : col0 + numel], (start % 2, 0)))
    run = data.reshape(-1)[col0 // 2 : ceil_div(col0 + numel, 2)].clone()
    if start % 2:
        run[0] &= 0xF0
    if (start + numel) % 2:
        run[-1] &= 0x0F
    return run


def rows_of_codes(run: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    """Compact codes uint8 [rows, row bytes] of the bytes of the run of all elements."""
    if bits == 4 and cols % 2:
        return pack_nibbles(unpack_nibbles(run)[: rows * cols].view(rows, cols))
    return run.view(rows, -1)

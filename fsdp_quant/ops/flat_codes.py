# SPDX-License-Identifier: Apache-2.0
"""Codes in flat buffers: a rank holds a run of the elements of a [rows, cols] tensor in row-major
order, cut at any element.

The reference, and kernels of whole tensors, read rows. So a run is encoded as the rows that cover
it (`scaling.Fragment.rows`), with zeros in place of other ranks' elements: zeros never raise an
amax, and their codes are dropped. `weight_sync.cast_plan` has kernels that begin at any element and
need neither function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import PACKINGS, ceil_div
from .layout import flat_bytes, pack, unpack


def codes_of_run(data: Tensor, bits: int, start: int, numel: int, cols: int) -> Tensor:
    """The bytes of a run's codes, from the codes of the rows that cover it.

    data:     compact codes [rows, row bytes] (identity: [rows, cols] in its dtype).
    start:    index of the run's first element in the whole tensor.
    returns:  uint8. Codes of less than a byte are packed by the element's index in the tensor,
              whatever its columns; bits of the elements before and after the run are zero.
    """
    if not numel:
        return data.new_empty(0, dtype=torch.uint8)
    col0 = start % cols
    if bits >= 8:
        return flat_bytes(data.reshape(-1)[col0 : col0 + numel])
    codes = unpack(data, bits)[:, :cols].reshape(-1)[col0 : col0 + numel]
    before = start % PACKINGS[bits][0]
    return pack(F.pad(codes, (before, 0)), bits)[
        before * bits // 8 : ceil_div((before + numel) * bits, 8)
    ]


def rows_of_codes(run: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    """Compact codes uint8 [rows, row bytes] from the bytes of a run of all elements."""
    whole_containers = F.pad(run, (0, -len(run) % PACKINGS[bits][1]))
    return pack(unpack(whole_containers, bits)[: rows * cols].view(rows, cols), bits)

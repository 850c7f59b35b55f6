# SPDX-License-Identifier: Apache-2.0
"""`cast_master_weights`: encode weights whose masters are cut into pieces at any element.

[Note: one cast]
    piece of the master -> rounded to the compute dtype -> largest magnitude of each block that the
    piece touches one MAX all-reduce for all weights and directions
    scales, a pure function of the amaxes -> codes of the elements of the piece

Each step equals that of the whole tensor, so the pieces concatenate to its bytes for every format
and cut. Rotations mix elements across cuts and are not supported.

[Note: codes of a run]
A rank holds a run of the elements of a [rows, cols] tensor in row-major order, cut at any element.
The reference, and kernels of whole tensors, read rows. So a run is encoded as the rows that cover
it (`scaling.Fragment.rows`), with zeros in place of other ranks' elements: zeros never raise an
amax, and their codes are dropped. `weight_sync.cast_plan` has kernels that begin at any element and
need neither `codes_of_run` nor `rows_of_codes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..formats import PACKINGS, ceil_div
from ..ops import dispatch
from ..ops.dispatch import Encoded
from ..ops.layout import flat_bytes, pack, unpack
from ..scaling import Fragment, share_statistics


def cast_master_weights(
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup | None,
    factors: Sequence[Sequence[Tensor | None]],
    whole_scales: bool,
    parts: dist.ProcessGroup | None,
) -> list[list[Encoded]]:
    """Encode every (fragment, encoding), with at most one MAX all-reduce per group.

    fragments:     the same weights, encodings and cuts in the same order on every rank of `group`,
                   empty pieces included.
    factors:       fp32 [1] encode scale of a history per encoding (delayed scaling), or None.
    whole_scales:  return the scales of every block, not only of those that the piece touches.
    parts:         group of the other tensor-parallel parts (`scaling.share_statistics`), or None.
    returns:       `data`: uint8, the bytes that hold the codes of the piece
                   (`codes_of_run`); `scale`: of the block rows that the piece touches,
                   or of the whole tensor.

    Every rank of the groups must call it. Equal encodings share one launch.
    """
    shared = share_statistics(fragments, group, whole_scales, parts)
    casts: dict[tuple[int, int], Encoded] = {}
    by_encoding: dict[tuple, list[tuple[int, int]]] = {}
    for f, fragment in enumerate(fragments):
        for e, encoding in enumerate(fragment.encodings):
            key = encoding, fragment.dtype, fragment.values.dtype
            by_encoding.setdefault(key, []).append((f, e))
    for (encoding, dtype, _), places in by_encoding.items():
        equal = [fragments[f] for f, _ in places]
        encode_scales = [factors[f][e] for f, e in places]
        statistics = [shared[f][e] for f, e in places]
        encoded = dispatch.multi_tensor_encode(
            [f.rows for f in equal],
            encoding,
            [
                s._replace(amax=s.amax[f.block_rows(encoding)])
                if whole_scales and s is not None and s.amax is not None
                else s
                for s, f in zip(statistics, equal)
            ],
            [f.row0 for f in equal],
            encode_scales,
            dtype,
        )
        for place, f, cast, s, factor in zip(places, equal, encoded, statistics, encode_scales):
            run = f.start, f.values.numel(), f.rows.shape[1]
            cast = cast._replace(data=codes_of_run(cast.data, encoding.fmt.bits, *run))
            if whole_scales and s is not None:
                cast = cast._replace(scale=dispatch.scales(s, encoding, factor))
            casts[place] = cast
    return [
        [casts[f, e] for e in range(len(fragment.encodings))]
        for f, fragment in enumerate(fragments)
    ]


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

# SPDX-License-Identifier: Apache-2.0
"""`cast_master_weights`: encode weights whose masters are cut into pieces at any element.

[Note: one cast]
    piece of the master -> rounded to the compute dtype -> largest magnitude of each block that the
    piece touches one MAX all-reduce for all weights and directions
    scales, a pure function of the amaxes -> codes of the elements of the piece

Each step equals that of the whole tensor, so the pieces concatenate to its bytes for every format
and cut. Rotations mix elements across cuts and are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..ops import dispatch, flat_codes
from ..ops.dispatch import Encoded, Statistics
from ..scaling import Fragment, share_statistics


def cast_master_weights(
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup | None,
    factors: Sequence[Sequence[Tensor | None]] | None = None,
    whole_scales: bool = False,
    parts: dist.ProcessGroup | None = None,
) -> list[list[Encoded]]:
    """Encode every (fragment, encoding), with at most one MAX all-reduce per group.

    fragments:     the same weights, encodings and cuts in the same order on every rank of `group`,
                   empty pieces included.
    factors:       fp32 [1] encode scale of a history per encoding (delayed scaling), or None.
    whole_scales:  return the scales of every block, not only of those that the piece touches.
    parts:         group of the other tensor-parallel parts (`scaling.share_statistics`), or None.
    returns:       `data`: uint8, the bytes that hold the codes of the piece
                   (`flat_codes.codes_of_run`); `scale`: of the block rows that the piece touches,
                   or of the whole tensor.

    Every rank of the groups must call it. Equal encodings share one launch.
    """
    shared = share_statistics(fragments, group, whole_scales, parts)
    factors = factors or [[None] * len(f.encodings) for f in fragments]
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
        of_rows = [
            Statistics(s.amax[f.block_rows(encoding)], s.tensor_amax)
            if whole_scales and s is not None and s.amax is not None
            else s
            for s, f in zip(statistics, equal)
        ]
        encoded = dispatch.multi_tensor_encode(
            [f.rows for f in equal],
            encoding,
            of_rows,
            [f.row0 for f in equal],
            encode_scales,
            dtype,
        )
        for i, (place, fragment) in enumerate(zip(places, equal)):
            run = fragment.start, fragment.values.numel(), fragment.rows.shape[1]
            codes = flat_codes.codes_of_run(encoded[i].data, encoding.fmt.bits, *run)
            scale, amaxes = encoded[i].scale, statistics[i]
            if whole_scales and amaxes is not None:
                scale = dispatch.scales(amaxes, encoding, encode_scales[i])
            casts[place] = encoded[i]._replace(data=codes, scale=scale)
    return [
        [casts[f, e] for e in range(len(fragment.encodings))]
        for f, fragment in enumerate(fragments)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism as functions: activations gathered along the sequence as codes, partial sums
scattered along it.

The rule of what travels as codes: `modules.exchange`, note "one rule".
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..modules.exchange import Arriving, Gather, Scattering, SequenceCut
from ..quantizer import as_rows, hybrid_of
from ..storage import Placement, scale_placement
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor


def travelling_bytes(
    encoding: Encoding, rows: int, cols: int, dtype: torch.dtype, chunk: int
) -> int:
    """Bytes of the buffers of [rows, cols] that travel, where pieces have multiples of `chunk`
    rows."""
    fmt, d = encoding.fmt, encoding.direction
    size = rows * fmt.row_bytes(cols, dtype)
    if fmt.has_scales and scale_placement(fmt, d, chunk) is Placement.SHARD:
        size += prod(fmt.scale_shape((rows, cols), d) or ()) * fmt.scale_bytes
    return size


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hybrid, directions, cut, key):
        ctx.cut = cut
        gather = Gather(as_rows(x.detach()), hybrid, directions, cut, "forward", key=key)
        sides = {d: gather.take(d) for d in directions}
        return QuantizedTensor(sides.get(ROWWISE), sides.get(COLUMNWISE), shape=cut.whole_shape)

    @staticmethod
    def backward(ctx, dy):
        rows = Scattering(dy.reshape(-1, dy.shape[-1]).contiguous(), ctx.cut).wait()
        return rows.view(ctx.cut.shape), None, None, None, None


def gather_sequence(
    x: Tensor,
    hybrid,
    group: dist.ProcessGroup,
    dim: int = 0,
    directions=tuple(Direction),
    *,
    key: Tensor | None = None,
) -> QuantizedTensor:
    """The bytes of quantizing all_gather(x), moved as codes wherever no block reaches over the seam
    (see the note).

    x:           [.., S / R, .., K], the same shape on every rank of `group`, which must all call
                 it.
    hybrid:      `HybridQuantizer`, `Quantizer`, `Format` or a format's name, current scaling.
    dim:         that is gathered.
    directions:  that are wanted; None of the others travels.
    key:         int64 [5] random key of the whole tensor, for stochastic rounding.
    returns:     `QuantizedTensor` [.., S, .., K]; its gradient is summed over the ranks and
                 scattered along `dim`.

    Raises ValueError for a dim that is not there, and for stochastic rounding without a key: ranks
    would not agree.
    """
    hybrid = hybrid_of(hybrid)
    if key is None and hybrid.is_stochastic:
        raise ValueError(
            f"gather_sequence({hybrid}) rounds stochastically: give key=, so that every rank has "
            "the same bits"
        )
    cut = SequenceCut.of_local(tuple(x.shape), dim, group, "gather_sequence")
    return _GatherSequence.apply(x, hybrid, tuple(directions), cut, key)


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, cut):
        ctx.cut = cut
        rows = Scattering(y.reshape(-1, y.shape[-1]).contiguous(), cut).wait()
        return torch_compat.reshaped(rows, cut.shape)

    @staticmethod
    def backward(ctx, dy):
        whole = Arriving({"data": dy.reshape(-1, dy.shape[-1])}, ctx.cut)
        counters.add("sequence gather", ("backward", "both", "high precision"), whole.nbytes)
        return whole.wait()["data"].view(ctx.cut.whole_shape), None


def reduce_scatter_sequence(y: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The sum of y over the ranks of `group`, of which each keeps its piece of `dim`; in y's dtype.

    y:        [.., S, .., N] on every rank; all must call it.
    returns:  [.., S / R, .., N]; its gradient is gathered in high precision.

    Raises ValueError where R does not divide S.
    """
    return _ReduceScatterSequence.apply(
        y, SequenceCut.of_whole(tuple(y.shape), dim, group, "reduce_scatter_sequence")
    )

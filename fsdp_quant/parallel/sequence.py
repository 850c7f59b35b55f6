# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism as functions: activations gathered along the sequence as codes, partial sums
scattered along it. What ranks exchange for a linear layer that they share, as `fq.plan` reports it.

The rule of what travels as codes: `linear.transport`, note "one rule".
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..linear import program
from ..linear.cut import SequenceCut, TensorParallel
from ..linear.linear import Linear
from ..linear.transport import Arriving, Gather, start_scatter
from ..quantizer import HybridQuantizer, as_rows, hybrid_of
from ..storage import Placement, scale_placement
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor


def planned_bytes(
    phase: str,
    hybrid: HybridQuantizer | None,
    directions,
    shape: tuple[int, int],
    dtype: torch.dtype,
    chunk: int,
) -> dict[tuple, int]:
    """Return (phase, direction, format) -> bytes of [rows, cols] that travel, as `receipt` counts.

    hybrid:  None: in high precision.
    chunk:   pieces have multiples of so many rows.
    """
    rows, cols = shape
    if hybrid is None:
        return {(phase, "both", "high precision"): rows * cols * dtype.itemsize}
    planned = {}
    for d in gathered_directions(hybrid, frozenset(directions)):
        fmt = hybrid.encodings[d].fmt
        size = rows * fmt.row_bytes(cols, dtype)
        if fmt.has_scales and scale_placement(fmt, d, chunk) is Placement.SHARD:
            size += prod(fmt.scale_shape(shape, d) or ()) * fmt.scale_bytes
        planned[phase, d.value, fmt.name] = size
    return planned


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hybrid, directions, cut, key):
        ctx.cut = cut
        gather = Gather(as_rows(x.detach()), hybrid, directions, cut, "forward", key=key)
        sides = {d: gather.take(d) for d in directions}
        return QuantizedTensor(sides.get(ROWWISE), sides.get(COLUMNWISE), shape=cut.whole_shape)

    @staticmethod
    def backward(ctx, dy):
        rows = start_scatter(dy.reshape(-1, dy.shape[-1]).contiguous(), ctx.cut)()
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
        rows = start_scatter(y.reshape(-1, y.shape[-1]).contiguous(), cut)()
        return torch_compat.reshaped(rows, cut.shape)

    @staticmethod
    def backward(ctx, dy):
        gather = Arriving({"data": dy.reshape(-1, dy.shape[-1])}, ctx.cut)
        counters.add("sequence gather", ("backward", "both", "high precision"), gather.nbytes)
        return gather.wait()["data"].view(ctx.cut.whole_shape), None


def reduce_scatter_sequence(y: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The sum of y over the ranks of `group`, of which each keeps its piece of `dim`; in y's dtype.

    y:        [.., S, .., N] on every rank; all must call it.
    returns:  [.., S / R, .., N]; its gradient is gathered in high precision.

    Raises ValueError where R does not divide S.
    """
    return _ReduceScatterSequence.apply(
        y, SequenceCut.of_whole(tuple(y.shape), dim, group, "reduce_scatter_sequence")
    )


# Reports #


def planned_gathers(
    layer: Linear, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[tuple, int]:
    """Return what a layer gathers along the sequence in a forward and backward: (pass, direction,
    format) -> bytes, as `receipt` counts.

    shape, dim:  of this rank's part of the tensor that is cut: x of a column layer, y of a row
                 layer.
    Layers that share an input gather once together.
    """
    axis = _axis_of(layer, dim)
    if axis is None:
        raise ValueError(f"planned_gathers: {layer.runtime.name} is not shared between ranks")
    cut = SequenceCut.of_local(tuple(shape), dim, axis.group, layer.runtime.name)
    hybrid, passes = layer.plan.grad_output, [("backward", list(Direction))]
    if axis.column:
        hybrid, passes = layer.plan.input, [("forward", [ROWWISE]), ("backward", [COLUMNWISE])]
    planned: dict[tuple, int] = {}
    for phase, directions in passes:
        sent = hybrid if cut.all_travel(hybrid, directions) else None
        local = cut.rows, shape[-1]
        sizes = planned_bytes(phase, sent, directions, local, dtype, cut.chunk)
        planned |= {key: cut.ranks * size for key, size in sizes.items()}
    return planned


def _axis_of(layer: Linear, dim: int | None) -> TensorParallel | None:
    if isinstance(layer.parallel, TensorParallel):
        return layer.parallel
    state = layer.runtime.weight_state
    if state.tensor_group is None:
        return None
    return TensorParallel(state.tensor_group, state.tensor_dim == 0, dim)


def describe(layer: Linear) -> str | None:
    """Return a line of `fq.plan` about what ranks exchange for a layer; None where it is not
    shared."""
    axis = _axis_of(layer, None)
    if axis is None:
        return None
    kind, slot = ("column", "input") if axis.column else ("row", "grad_output")
    shared = f"tensor parallel over {axis.group.size()} ranks, {kind} layers"
    is_cut, operands = _cuts_sequence(layer, axis), []
    if is_cut is False:
        return f"{shared}: activations are whole, and none is gathered"
    for d, encoding in layer.plan.hybrid(slot).encodings.items():
        rows, unless = encoding.fmt.row_alignment(d), ""
        if rows > 1:
            unless = f" (in high precision unless a rank has a multiple of {rows} rows)"
        operands.append(f"{d.value} {encoding.fmt}{unless}")
    pieces = ""
    if not axis.column and prod(layer.runtime.weight_state.shape) >= program.LEAST_WEIGHT:
        pieces = (
            f"; sums of {program.PIECES * program.LEAST_ROWS} or more rows a rank are scattered in "
            f"{program.PIECES} pieces while their products run"
        )
    condition = "" if is_cut else ", where it is cut along the sequence,"
    return f"{shared}: {slot}{condition} is gathered as {', '.join(operands)}{pieces}"


def _cuts_sequence(layer: Linear, axis: TensorParallel) -> bool | None:
    """Whether the activation that `axis` may gather is cut; None: its DTensor says so."""
    layouts = layer.parallel
    if isinstance(layouts, TensorParallel):
        return axis.sequence_dim is not None
    layout = layouts and (layouts.input if axis.column else layouts.output)
    if isinstance(layout, Shard):
        return layout.dim != -1
    return None if axis.column else False

# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange for a linear layer that they share, as `fq.plan` reports it."""

from __future__ import annotations

from math import prod

import torch

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..modules.exchange import SequenceCut, TensorParallel
from ..modules.linear import Linear
from ..modules.program import LEAST_ROWS, LEAST_WEIGHT, PIECES
from ..tensor.gathered_weight import gathered_directions
from .sequence import travelling_bytes


def planned_gathers(
    layer: Linear, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[tuple, int]:
    """What a layer gathers along the sequence in a forward and backward: (pass, direction, format)
    -> bytes, as `receipt` counts.

    shape, dim:  of this rank's part of the tensor that is cut: x of a column layer, y of a row
                 layer.
    Layers that share an input gather once together.
    """
    axis = _axis_of(layer, dim)
    if axis is None:
        raise ValueError(f"planned_gathers: {layer.runtime.name} is not shared between ranks")
    cut = SequenceCut.of_local(tuple(shape), dim, axis.group, layer.runtime.name)
    planned: dict[tuple, int] = {}
    hybrid, passes = layer.plan.grad_output, [("backward", list(Direction))]
    if axis.column:
        hybrid, passes = layer.plan.input, [("forward", [ROWWISE]), ("backward", [COLUMNWISE])]
    whole = cut.ranks * cut.rows * shape[-1] * dtype.itemsize
    for phase, directions in passes:
        if not cut.all_travel(hybrid, directions):
            planned[phase, "both", "high precision"] = whole
            continue
        for d in gathered_directions(hybrid, frozenset(directions)):
            size = travelling_bytes(hybrid.encodings[d], cut.rows, shape[-1], dtype, cut.chunk)
            planned[phase, d.value, hybrid.side(d).fmt.name] = cut.ranks * size
    return planned


def _axis_of(layer: Linear, dim: int | None) -> TensorParallel | None:
    if isinstance(layer.parallel, TensorParallel):
        return layer.parallel
    state = layer.runtime.weight_state
    if state.tensor_group is None:
        return None
    return TensorParallel(state.tensor_group, state.tensor_dim == 0, dim)


def describe(layer: Linear) -> str | None:
    """A line of `fq.plan` about what ranks exchange for a layer; None where it is not shared."""
    axis = _axis_of(layer, None)
    if axis is None:
        return None
    slot, said = "input" if axis.column else "grad_output", []
    for d, encoding in layer.plan.hybrid(slot).encodings.items():
        rows, unless = encoding.fmt.row_alignment(d), ""
        if rows > 1:
            unless = f" (in high precision unless a rank has a multiple of {rows} rows)"
        said.append(f"{d.value} {encoding.fmt}{unless}")
    kind, pieces = "column" if axis.column else "row", ""
    if not axis.column and prod(layer.runtime.weight_state.shape) >= LEAST_WEIGHT:
        pieces = (
            f"; sums of {PIECES * LEAST_ROWS} or more rows a rank are scattered in {PIECES} pieces "
            "while their products run"
        )
    return (
        f"tensor parallel over {axis.group.size()} ranks, {kind} layers: {slot} is gathered as "
        f"{', '.join(said)}{pieces}"
    )

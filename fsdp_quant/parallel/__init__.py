"""Tensors that several ranks hold: gathers of activations, and the cast of masters that lie in pieces."""

from .linear import TensorParallel, planned_gathers
from .sequence import gather_sequence, reduce_scatter_sequence
from .tensor_parallel import (
    ColumnParallelLinear,
    ColwiseParallel,
    PrepareModuleInput,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColumnParallelLinear", "ColwiseParallel", "PrepareModuleInput", "RowParallelLinear", "RowwiseParallel", "SequenceParallel",
    "TensorParallel", "gather_sequence", "planned_gathers", "reduce_scatter_sequence",
]

# SPDX-License-Identifier: Apache-2.0
"""Tensor, sequence and expert parallelism.

>>> plan = {"up": fq.parallel.ColwiseParallel(), "down": fq.parallel.RowwiseParallel()}

`plan` goes to torch's `parallelize_module(block, mesh["tp"], plan)`.
"""

from ..linear.cut import TensorParallel
from .expert_parallel import ExpertParallel, planned_dispatch
from .experts import combine_tokens, dispatch_tokens
from .sequence import gather_sequence, planned_gathers, reduce_scatter_sequence
from .tensor_parallel import (
    ColumnParallelLinear,
    ColwiseParallel,
    PrepareModuleInput,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
)
from .token_route import TokenRoute

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ExpertParallel",
    "PrepareModuleInput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "TensorParallel",
    "TokenRoute",
    "combine_tokens",
    "dispatch_tokens",
    "gather_sequence",
    "planned_dispatch",
    "planned_gathers",
    "reduce_scatter_sequence",
]

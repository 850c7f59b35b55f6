# SPDX-License-Identifier: Apache-2.0
"""The two tensors that FSDP2's reduction of gradients is given in place of plain memory.

FSDP2 allocates memory by a `ReduceScatter` of the user's, and then runs torch operators on it:

    input.view(world, -1)                               `SendBuffer`, which has no memory:
    fsdp.chunk_cat(gradients, 0, world, out=input)      the gradients are encoded
    input.div_(factor)                                  the factor is noted
    comm(output, input, group, op)                      `gradient_reduction.GradientReduction`
    dist.all_reduce(output, replicas, op)               `ReplicaSum`: codes are sent
    output.div_(..), output.to(..), output.as_strided   plain operators of its values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.gradient_codes import GradientLayout
from ..tensor import torch_compat

_ATEN = torch.ops.aten
Sent = tuple[GradientLayout, Tensor]


@dataclass
class Outgoing:
    """What one rank sends in one reduction.

    encode:  gradients -> (layout, codes uint8 [owners, layout.nbytes]).
    sent:    what `encode` returned; None before FSDP2 copies the gradients.
    factor:  the sum is multiplied by it.
    """

    encode: Callable[[Sequence[Tensor]], Sent]
    sent: Sent | None = None
    factor: float = 1.0


class SendBuffer(Tensor):
    """The input of a reduce-scatter: takes the gradients as codes, and a factor. Any other operator
    raises TypeError."""

    outgoing: Outgoing

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, outgoing: Outgoing
    ):
        self = Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=device)
        self.outgoing = outgoing
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __repr__(self, **_: object) -> str:
        return f"SendBuffer({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        if func is _ATEN.view.default:
            buffer, (rows, _) = args
            return cls((rows, buffer.numel() // rows), buffer.dtype, buffer.device, buffer.outgoing)
        if func is torch.ops.fsdp.chunk_cat.default:
            outgoing = kwargs["out"].outgoing
            outgoing.sent = outgoing.encode(args[0])
            return None
        if func is _ATEN.div_.Tensor and isinstance(args[1], (int, float)):
            args[0].outgoing.factor /= args[1]
            return args[0]
        raise TypeError(
            f"{func} would read gradients that travel as codes; fq.set_gradient_reduction(model, "
            "'fp32') gives them to torch"
        )


class ReplicaSum(Tensor):
    """The output of a reduce-scatter whose copies are summed next (HSDP): its first all-reduce over
    `group` is `reduce(values)`, which returns the work that finished it. All other operators are
    those of its values, and return plain tensors."""

    values: Tensor
    group: dist.ProcessGroup
    reduce: Callable[[Tensor], Any] | None

    @staticmethod
    def __new__(cls, values: Tensor, group: dist.ProcessGroup, reduce: Callable[[Tensor], Any]):
        self = Tensor._make_subclass(cls, values)  # of its memory, which kernels of hooks write
        self.values, self.group, self.reduce = values, group, reduce
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __repr__(self, **_: object) -> str:
        return f"ReplicaSum({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        if func is torch.ops.c10d.allreduce_.default:
            (tensor,), group = args[0], dist.ProcessGroup.unbox(args[1])
            reduce = tensor.reduce
            if reduce is not None and group.group_name == tensor.group.group_name:
                tensor.reduce = None  # later ones are of the user's hooks
                return args[0], reduce(tensor.values).boxed()
        plain = torch_compat.tree_map_only(ReplicaSum, values_of, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return args[0] if result is plain[0][0] else result


def values_of(t: Tensor) -> Tensor:
    """The values of a `ReplicaSum`; another tensor as it is."""
    return t.values if isinstance(t, ReplicaSum) else t

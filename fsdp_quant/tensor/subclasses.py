# SPDX-License-Identifier: Apache-2.0
"""What tensor subclasses share: tables of aten operators, and metadata that dynamo must ignore."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten


class AtenTable(dict[object, Callable]):
    """Operator -> handler(operator, *args, **kwargs), of one tensor subclass."""

    def implements(self, *ops: object) -> Callable[[Callable], Callable]:
        """Decorator: this function handles these operators. Raises ValueError for one that has a
        handler."""

        def register(handler: Callable) -> Callable:
            for op in ops:
                if op in self:
                    raise ValueError(f"{op} has a handler already: {self[op].__name__}")
                self[op] = handler
            return handler

        return register


class NoDynamoGuard:
    """A value that no graph depends on: copies share it, and all compare equal.

    Graphs have the formats in the text of the plan. Graphs on disk do not contain the value. Guards
    of dynamo keep it as long as the process, so it holds formats and shapes, and no tensor: a
    weight is referenced weakly.
    """

    def __init__(self, value: object):
        self.value = value

    def __deepcopy__(self, memo) -> NoDynamoGuard:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoDynamoGuard)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self):
        return NoDynamoGuard, (None,)


def stable_text(tensor: Tensor) -> str:
    """The key of a tensor subclass in graphs on disk: class, shape and buffers."""
    names, _ = getattr(tensor, "__tensor_flatten__")()
    buffers = ((n, getattr(tensor, n)) for n in names)
    facts = ((n, t.shape, t.stride(), t.dtype, t.device) for n, t in buffers)
    return (
        f"{type(tensor).__name__} {tensor.shape} {tensor.dtype} {tensor.requires_grad} "
        f"{list(facts)}"
    )

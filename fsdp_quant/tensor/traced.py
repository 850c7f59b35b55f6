# SPDX-License-Identifier: Apache-2.0
"""What torch.compile keeps of a tensor subclass beside its buffers."""

from __future__ import annotations

from torch import Tensor


class NoDynamoGuard:
    """A value that no graph depends on: the thing itself, in every copy, equal to any other.

    Operators take formats from a plan's text. A graph that is cached on disk keeps nothing of it.
    """

    def __init__(self, value: object):
        self.value = value

    def __deepcopy__(self, memo) -> NoDynamoGuard:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoDynamoGuard)

    __hash__ = None

    def __reduce__(self):
        return NoDynamoGuard, (None,)


def stable_text(tensor: Tensor) -> str:
    """What a graph that is cached on disk knows of a tensor subclass: class, shape and buffers."""
    names, _ = tensor.__tensor_flatten__()
    facts = (
        (n, t.shape, t.stride(), t.dtype, t.device)
        for n, t in ((n, getattr(tensor, n)) for n in names)
    )
    return f"{type(tensor).__name__} {tensor.shape} {tensor.dtype} {tensor.requires_grad} {list(facts)}"

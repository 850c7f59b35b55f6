# SPDX-License-Identifier: Apache-2.0
"""A table from aten operators to handlers, filled by a decorator that refuses doubles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

aten = torch.ops.aten


class AtenTable:
    """Handlers (func, args, kwargs) of one tensor subclass."""

    def __init__(self, owner: str):
        self.owner = owner
        self._handlers: dict[object, Callable] = {}

    def implements(self, ops: Iterable, unpack: bool = False) -> Callable[[Callable], Callable]:
        """Decorator: this function handles these operators. Raises ValueError for one that has a
        handler. unpack: it takes the operator's own arguments."""

        def register(handler: Callable) -> Callable:
            unpacked = functools.wraps(handler)(lambda func, args, kwargs: handler(*args, **kwargs))
            for op in ops:
                if op in self._handlers:
                    raise ValueError(
                        f"{self.owner} has a handler for {op} already: "
                        f"{self._handlers[op].__name__}"
                    )
                self._handlers[op] = unpacked if unpack else handler
            return handler

        return register

    def get(self, op: object) -> Callable | None:
        return self._handlers.get(op)

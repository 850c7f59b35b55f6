# SPDX-License-Identifier: Apache-2.0
"""A table from aten operators to handlers, filled by a decorator that refuses doubles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

aten = torch.ops.aten


class AtenTable:
    """Handlers of one tensor subclass; a handler takes (func, args, kwargs)."""

    def __init__(self, owner: str):
        self.owner = owner
        self._handlers: dict[object, Callable] = {}

    def implements(self, ops: Iterable) -> Callable[[Callable], Callable]:
        """Decorator: this function handles these operators. Raises ValueError for one that has a
        handler."""

        def register(handler: Callable) -> Callable:
            for op in ops:
                if op in self._handlers:
                    raise ValueError(
                        f"{self.owner} has a handler for {op} already: "
                        f"{self._handlers[op].__name__}"
                    )
                self._handlers[op] = handler
            return handler

        return register

    def get(self, op) -> Callable | None:
        return self._handlers.get(op)

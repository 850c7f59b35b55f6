# SPDX-License-Identifier: Apache-2.0
"""A table from aten operators to handlers, filled by a decorator that refuses doubles."""

from __future__ import annotations

from collections.abc import Callable

import torch

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

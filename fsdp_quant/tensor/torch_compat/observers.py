# SPDX-License-Identifier: Apache-2.0
"""Observers of modules: hooks that copies and pickles of a module leave behind, and what must not
see their operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ...ops import opaque
from .autograd import is_fake


class Observer:
    """A hook of a module; that of a copy, or of an unpickled module, does nothing."""

    def __init__(self, run: Callable | None = None):
        self._run = run

    def __call__(self, *args) -> None:
        if self._run is not None:
            self._run(*args)

    def __reduce__(self) -> tuple:
        return Observer, ()


@opaque.compiled_as(lambda: False)
def can_observe() -> bool:
    """Operators compute values now: no graph, no fake tensors, no transform of torch.func."""
    return not (is_fake() or peek_interpreter_stack() is not None)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Run operators without gradients and dispatch modes: selective checkpointing replays what it
    saw in a forward, counters count it."""
    with torch.no_grad(), _disable_current_modes():
        yield


def around_calls(
    module: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call `before` and `after` around each call of a module, outside the code of
    `module.compile()`. Returns a function that removes both. `after` runs even if the call
    raises."""
    if (compiled := module._compiled_call_impl) is None:
        handles = [
            module.register_forward_pre_hook(Observer(lambda *_: before())),
            module.register_forward_hook(Observer(lambda *_: after()), always_call=True),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def call(*args, **kwargs):
        before()
        try:
            return compiled(*args, **kwargs)
        finally:
            after()

    module._compiled_call_impl = call
    return lambda: setattr(module, "_compiled_call_impl", compiled)

# SPDX-License-Identifier: Apache-2.0
"""Observers of modules: hooks that copies and pickles of a module leave behind, and what must not
see their operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from ...ops import opaque
from .autograd import is_fake, is_transformed


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
    return not (is_fake() or is_transformed())


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


DEEPEST = 6  # nodes between the output of a layer and the node that reads its input


def on_gradient(x: Tensor, output: Tensor, run: Callable[[Tensor], object]) -> None:
    """Call `run` with the gradient of x that the nodes from x to `output` compute: one term, if
    others read x too.

    Hooks the node that reads x; the graph stays as it is. Does nothing if no node does within
    `DEEPEST` nodes of `output`.
    """
    if not x.requires_grad or output.grad_fn is None:
        return
    edge = get_gradient_edge(x)
    nodes: dict[Node, None] = {output.grad_fn: None}
    for _ in range(DEEPEST):
        for node in nodes:
            for index, (following, number) in enumerate(node.next_functions):
                if following is edge.node and number == edge.output_nr:
                    node.register_hook(
                        lambda dx, _, index=index: None if dx[index] is None else run(dx[index])
                    )
                    return
        nodes = dict.fromkeys(n for node in nodes for n, _ in node.next_functions if n is not None)

# SPDX-License-Identifier: Apache-2.0
"""Graphs that torch.compile traces: what they save, recompute, and keep at one address."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from .autograd import dispatch_is_watched

_proxies_of: Any = proxy_tensor._get_proxies
# What `save_inputs` was given of layers that some graph recomputes in its backward.
RECOMPUTED_IN_GRAPHS: set = set()


def save_inputs(
    read: Sequence[Tensor], written: Sequence[Tensor] = (), layer: Hashable = None
) -> None:
    """Save inputs of the graph that is traced for its backward; do nothing outside a graph.

    read:     tensors that the backward reads as they are then (`_save_by_reference`).
    written:  tensors that the graph writes at its end, saved with the values of the forward
              (`_save_current_values`).
    layer:    joins `RECOMPUTED_IN_GRAPHS` if the backward may recompute the forward. Layers share
              the graph, so it cannot name them.
    """
    _save_by_reference(read)
    _save_current_values(written)
    if layer is not None and dispatch_is_watched() and is_recomputed_in_graph():
        RECOMPUTED_IN_GRAPHS.add(layer)


def _save_by_reference(tensors: Sequence[Tensor]) -> None:
    """Let the backward of the traced graph read these inputs as they are then, like a ctx attribute
    of an autograd.Function: no version check, no saved-tensor hooks."""
    for tensor in tensors:
        for proxy in _proxies_of(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


# A backward that recomputed these values (step, scales) from the input would get those of the next
# step. The partitioner ignores "recompute" in the meta of views and of items of a tuple.
def _save_current_values(tensors: Sequence[Tensor]) -> None:
    """Save for the backward of the traced graph the current values of inputs that the graph writes
    at its end; never recompute them."""
    for tensor in tensors:
        if isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)  # pyright: ignore[reportPrivateImportUsage]
        for proxy in _proxies_of(tensor):
            node = proxy.node
            # compilers drop copies, and do not save items of a tuple
            while (source := _COPIED.get(node.target)) is not None:
                node = node.args[source]
            if node.op != "placeholder":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


# Operators that return the values of one of their arguments -> its position.
_COPIED = {torch.ops.aten.copy.default: 1, torch.ops.aten.unbind.int: 0, operator.getitem: 0}


def mark_static_address(tensors: Sequence[Tensor]) -> None:
    """Let CUDA graphs of compiled regions read and write these tensors in place, as
    `torch._dynamo.mark_static_address(guard=False)`, without importing dynamo."""
    for tensor in tensors:
        setattr(tensor, "_dynamo_static_input_type", "unguarded")


# Limit of dynamo -> (the user's, as raised last)
_LIMITS: dict[str, tuple[int, int]] = {}


def expect_graphs() -> None:
    """Let dynamo compile each function as often again as its limits, which the user set, allow for
    one recipe: beyond them it runs eagerly."""
    if (dynamo := sys.modules.get("torch._dynamo")) is None:
        return
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        present = getattr(dynamo.config, name)
        limit, raised = _LIMITS.get(name, (present, present))
        limit = limit if present == raised else present
        _LIMITS[name] = limit, present + limit
        setattr(dynamo.config, name, present + limit)


def body_is_traced() -> bool:
    """torch.compile traces the body of an operator (torch.utils.checkpoint), which may write
    nothing from outside. Call it in a function that a trace runs."""
    dynamo = sys.modules["torch._dynamo.symbolic_convert"]
    return not dynamo.InstructionTranslator.current_tx().output.is_root_tracer()


def is_recomputed_in_graph() -> bool:
    """The backward of the traced graph may recompute this: inside torch.utils.checkpoint, or under
    a memory budget of the partitioner."""
    if functorch_config.activation_memory_budget < 1:
        return True
    # torch 2.13 puts the tag into the meta as the first operator inside is traced
    if any(
        isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    return (
        fx_traceback.has_preserved_node_meta()
        and fx_traceback.get_current_meta().get("recompute") is not None
    )


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _operators() -> Any:
    """What the partitioner knows of operators. AOTAutograd, which traces, has imported it."""
    return sys.modules["torch._functorch.partitioners"].get_default_op_list()


# The partitioner saves what an operator that it does not know reads in the backward, and never
# makes it again; but it makes again what an elementwise operator reads there. Compilers drop
# copies, and arithmetic without effect, before it sees them; none of bits.
def made_again(x: Tensor) -> Tensor:
    """Return the values of x as an expression of the backward of the traced graph, which may
    compute them again; x itself if it was not computed elementwise, or outside a graph."""
    nodes = [p.node for p in _proxies_of(x)] if isinstance(x, FunctionalTensor) else []
    while nodes and _operators().is_view(nodes[0]):
        nodes = nodes[0].args[:1]
    # attention is an item of a tuple, and saved anyway
    if not nodes or not _operators().is_recomputable(nodes[0]) or nodes[0].target in _COPIED:
        return x
    return x.view(_BITS[x.itemsize]).bitwise_not().bitwise_not().view(x.dtype)


# The partitioner moves a collective of the backward that needs no gradient into the forward, saves
# its result, and leaves the collective behind, since `wait_tensor` has side effects: two gathers.
# (A cat with an empty slice of the gradient does not prevent this: inductor drops empty inputs.) It
# also read a gathered weight's decode scale in the forward, before FSDP2 had gathered it.
@contextlib.contextmanager
def keep_in_backward(backward: bool = True) -> Iterator[None]:
    """Keep operators that are traced inside in the backward of the graph, even if they need no
    gradient."""
    if not (backward and fx_traceback.has_preserved_node_meta()):
        yield
        return
    meta, key = fx_traceback.current_meta, "partitioner_tag"
    before, meta[key] = meta.get(key), "must_be_in_backward"
    try:
        yield
    finally:
        meta[key] = before

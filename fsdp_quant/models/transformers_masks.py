# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers' models without a wait for the device; transformers is not imported here.

Its models look in each forward whether positions pack several sequences, and the host waits for the
answer: each step begins on an idle device (docs/fsdp2.md, "No wait in a step"). A model that counts
its positions itself packs none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator

from torch import Tensor, nn


class _Running(threading.local):
    """Models that this thread runs, the innermost last, and whether each counts its positions."""

    def __init__(self):
        self.models: list[tuple[nn.Module, bool]] = []


_RUNNING = _Running()


def trust_counted_positions(model: nn.Module) -> None:
    """Let models of transformers in `model`, or itself, that are called without `position_ids` make
    masks without reading positions on the host."""
    masking, base = (
        sys.modules.get(f"transformers.{n}") for n in ("masking_utils", "modeling_utils")
    )
    packed = getattr(masking, "find_packed_sequence_indices", None)
    found = [m for m in model.modules() if base and isinstance(m, base.PreTrainedModel)]
    if packed is None or not found:
        return
    if not hasattr(packed, "trusts"):
        vars(masking)["find_packed_sequence_indices"] = _trusting(packed)
    for module in found:
        if "_fq_positions" not in vars(module):
            enter = functools.partial(_enter, *_counting(type(module).forward))
            vars(module)["_fq_positions"] = [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(_leave, always_call=True),
            ]


def distrust_positions(model: nn.Module) -> None:
    """Undo `trust_counted_positions`."""
    for module in model.modules():
        for hook in vars(module).pop("_fq_positions", ()):
            hook.remove()


def _trusting(packed: Callable) -> Callable:
    @functools.wraps(packed)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        models = _RUNNING.models
        return None if models and models[-1][1] else packed(position_ids)

    vars(find_packed_sequence_indices)["trusts"] = True
    return find_packed_sequence_indices


# Dynamo traces both hooks, so from torch 2.13 on a graph of a whole model has no mask either.
def _enter(
    counting: Callable | None, place: int, module: nn.Module, args: tuple, kwargs: dict
) -> None:
    given = args[place] if len(args) > place else kwargs.get("position_ids")
    is_own = type(module).forward is counting and "forward" not in module.__dict__
    _RUNNING.models.append((module, is_own and given is None))


def _leave(module: nn.Module, *_) -> None:
    models = _RUNNING.models
    if models and models[-1][0] is module:
        models.pop()


def _counting(forward: Callable) -> tuple[Callable | None, int]:
    """Return the forward if it is transformers' own and makes positions by counting, not from a
    mask; and which argument `position_ids` is."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    used = () if code is None else code.co_names
    if not forward.__module__.startswith("transformers.models.") or "arange" not in used:
        return None, 0
    names = list(inspect.signature(forward).parameters)[1:]
    if "cumsum" in used or "position_ids" not in names:
        return None, 0
    return forward, names.index("position_ids")


@contextlib.contextmanager
def masks_of_captures(model: nn.Module) -> Iterator[None]:
    """Let transformers decide about masks as in a capture, where no tensor can be read.

    Otherwise the capture gives its layers other arguments than the steps before it did, and
    compiled ones are compiled inside of it. For `position_ids` and an `attention_mask` from
    outside, masks are always computed.
    """
    masking = sys.modules.get("transformers.masking_utils")
    reads = getattr(masking, "is_tracing", None)
    trust_counted_positions(model)
    if reads is None:
        yield
        return
    vars(masking)["is_tracing"] = lambda tensor=None: tensor is not None
    try:
        yield
    finally:
        vars(masking)["is_tracing"] = reads

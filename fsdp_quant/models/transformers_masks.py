# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers' models in CUDA graphs; transformers itself is not imported here."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def masks_of_captures(model: nn.Module) -> Iterator[None]:
    """Let transformers decide about masks as in a capture, where no tensor can be read.

    Otherwise the capture gives its layers other arguments than the steps before it did, and
    compiled ones are compiled inside of it. A model that makes its positions itself packs no
    sequences: it gets no mask for that, and keeps the kernels of attention that accept none. For
    `position_ids` and an `attention_mask` from outside, masks are always computed.

    model: may hold models of transformers, or be one; without any, nothing changes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    packed, reads = (
        getattr(masking, name, None) for name in ("find_packed_sequence_indices", "is_tracing")
    )
    if masking is None or packed is None or reads is None:
        yield
        return
    own_positions: list[bool] = []  # of the calls of models that are running, the innermost last

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        own_positions.append(arguments.get("position_ids") is None)

    def leave(*_) -> None:
        own_positions.pop()

    models = [
        m
        for m in model.modules()
        if isinstance(m, sys.modules["transformers.modeling_utils"].PreTrainedModel)
    ]
    hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in models]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in models]
    vars(masking).update(
        is_tracing=lambda tensor=None: tensor is not None,
        find_packed_sequence_indices=lambda ids: (
            None if own_positions and own_positions[-1] else packed(ids)
        ),
    )
    try:
        yield
    finally:
        vars(masking).update(is_tracing=reads, find_packed_sequence_indices=packed)
        for hook in hooks:
            hook.remove()

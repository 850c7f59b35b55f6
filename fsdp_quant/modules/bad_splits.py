# SPDX-License-Identifier: Apache-2.0
"""Token splits that a device found malformed: reported by the number of the module they came to."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from ..tensor import torch_compat


class Tagged(Protocol):
    """A module whose calls carry a number to the device
    (`modules.grouped_linear.GroupedLinear`)."""

    _name: str
    _tag: int


_TAGS = itertools.count(1)
_TAGGED: weakref.WeakValueDictionary[int, Tagged] = weakref.WeakValueDictionary()


def register_tag(module: Tagged) -> None:
    """Give a module the number by which a device names it."""
    module._tag = next(_TAGS)
    _TAGGED[module._tag] = module


def raise_bad_splits() -> None:
    """Raise ValueError if a device has reported malformed splits. Waits for nothing."""
    bad = poll_bad_splits()
    if bad is None:
        return
    tag, rows = bad
    name = (
        _TAGGED[tag]._name
        if tag in _TAGGED
        else "experts of a compiled graph, or of a module that is gone"
    )
    raise ValueError(
        f"{name}: the token splits of an earlier call decreased or did not end at its {rows} rows; "
        "its result is wrong, and the optimizer has not stepped since the device said so"
    )


_WRONG: list[tuple[Tensor, ctypes.c_int64]] = []  # one memory, twice; made for the first device


def bad_splits_flag() -> Tensor:
    """int64 [1] of the host that devices write: tag << 32 | rows of the last call whose splits were
    wrong."""
    if not _WRONG:
        with torch_compat.outside_inference_mode():
            made = torch.zeros(
                1, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available()
            )
        # the latter is read in no time
        _WRONG.append((made, ctypes.c_int64.from_address(made.data_ptr())))
    return _WRONG[0][0]


# Wrong splits are reported in pinned memory: a copied flag and its event were calls in every
# forward.
def poll_bad_splits() -> tuple[int, int] | None:
    """(tag, rows) of a call whose splits a device has found wrong, once."""
    said = _WRONG[0][1].value if _WRONG else 0
    if not said:
        return None
    _WRONG[0][1].value = 0
    return said >> 32, said & 0xFFFFFFFF

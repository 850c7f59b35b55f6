# SPDX-License-Identifier: Apache-2.0
"""Token splits that a device found malformed: reported by the number of the module they came to."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

from .grouped_op import poll_bad_splits


class Tagged(Protocol):
    """A module whose calls carry a number to the device (`modules.grouped_linear.GroupedLinear`)."""

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

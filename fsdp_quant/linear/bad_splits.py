# SPDX-License-Identifier: Apache-2.0
"""Token splits that a device found malformed: reported by the number of the module they came to."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ..ops import extension, native
from ..tensor import torch_compat

BAD_SPLITS = (
    "the token splits of an earlier call decreased or did not end at its {} rows (a tensor is "
    "ends, torch's offs; a list is counts)"
)
_TAGS = itertools.count(1)
_TAGGED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_tag(module: object) -> int:
    """The number by which a device names a module, in errors its `_name`."""
    tag = next(_TAGS)
    _TAGGED[tag] = module
    return tag


def raise_bad_splits() -> None:
    """Raise ValueError if a device has reported malformed splits. Waits for nothing."""
    bad = poll_bad_splits()
    if bad is None:
        return
    tag, rows = bad
    unknown, module = "experts of a compiled graph, or of a module that is gone", _TAGGED.get(tag)
    raise ValueError(
        f"{getattr(module, '_name', unknown)}: "
        f"{getattr(module, 'malformed', BAD_SPLITS).format(rows)}; its result is wrong, and the "
        "optimizer has not stepped since the device said so"
    )


_WRONG: list[tuple[Tensor, ctypes.c_int64]] = []  # one memory, twice; the first device allocates


def bad_splits_flag() -> Tensor:
    """int64 [1] of the host that devices write: tag << 32 | rows of the last malformed call."""
    if not _WRONG:
        with torch_compat.outside_modes():
            if extension.is_loaded() and torch.cuda.is_available():
                flag = native.bad_splits_flag()
            else:
                flag = torch.zeros(1, dtype=torch.int64, device="cpu")
        _WRONG.append((flag, ctypes.c_int64.from_address(flag.data_ptr())))
    return _WRONG[0][0]


# Pinned memory: a copied flag and its event would be calls in every forward.
def poll_bad_splits() -> tuple[int, int] | None:
    """(tag, rows) of a call whose splits a device has found wrong, once."""
    if not _WRONG and torch.cuda.is_initialized():  # native passes of graphs write it without us
        bad_splits_flag()
    report = _WRONG[0][1].value if _WRONG else 0
    if not report:
        return None
    _WRONG[0][1].value = 0
    return report >> 32, report & 0xFFFFFFFF

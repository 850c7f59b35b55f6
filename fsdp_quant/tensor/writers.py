"""Who wrote a weight last: kept only while the staleness check is on (FSDP_QUANT_CHECK=1 in the environment).

The check makes the codes of a weight again before every product that reads them and compares bytes, so it also finds
writes that move no version counter (numpy, raw pointers, kernels of other libraries). It is slow and waits for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def read_setting(environ: Mapping[str, str] = os.environ) -> bool:
    """FSDP_QUANT_CHECK as a truth value. Raises ValueError unless it is "1", "0" or not set."""
    value = environ.get("FSDP_QUANT_CHECK", "0")
    if value not in ("0", "1"):
        raise ValueError(f"FSDP_QUANT_CHECK is {value!r}; give 1 (check every weight before each product) or 0")
    return value == "1"


checking = read_setting()


def bytes_apart(a: Tensor, b: Tensor) -> int:
    """How many bytes of two buffers of one size differ."""
    a, b = (t.contiguous().view(torch.uint8).flatten() for t in (a, b))
    return int((a != b).sum())


def describe(what: object) -> str:
    """`what` (an operator or an event), the optimizer or load that ran it, and the line of the user's code."""
    where, frame = [], sys._getframe(1)
    while frame is not None:
        owner, called = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(owner, torch.optim.Optimizer) and called == "step":
            where.append(f"{type(owner).__name__}.step")
        elif isinstance(owner, nn.Module) and called == "load_state_dict":
            where.append("load_state_dict")
        elif not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            break
        frame = frame.f_back
    return f"{what} ({', '.join(dict.fromkeys(where))})"

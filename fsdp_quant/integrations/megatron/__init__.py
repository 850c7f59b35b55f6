# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnsupportedDunderAll=false
"""Megatron-LM: its linear layers with quantized GEMMs, the backend that returns them to its specs,
and the arguments that fit them.

[Note: who writes the weights]
Parameters stay what they are to Megatron: plain tensors, which its layers allocate and initialize,
its DDP moves into flat buffers, and its optimizer and collectives write there. Each forward
quantizes the current values; where a weight sync gathers codes, a `WeightProxy` replaces the
parameter. Between an optimizer's step and the gather of parameters that follows it no layer runs:
Megatron's hooks see to that.

[Note: the shapes]
    column  W [N / R, K], x [S, B, K] or a piece [S / R, B, K], y [S, B, N / R]
    row     W [N, K / R], x [S, B, K / R], y [S, B, N] or a piece [S / R, B, N]
Both return (y, bias), the bias where Megatron adds it itself (skip_bias_add). What crosses ranks
are codes (`fq.parallel`). Experts never communicate here: Megatron's dispatchers move their tokens.

Importing this module needs no Megatron: layers and specs import it at their first use.
"""

import pkgutil
from typing import Any

from .command_line import add_arguments, arguments, recipe_of
from .config import check_config

_MODULES = {
    "ColumnParallelGroupedLinear": "experts",
    "ColumnParallelLinear": "linear",
    "RowParallelGroupedLinear": "experts",
    "RowParallelLinear": "linear",
    "SpecProvider": "specs",
    "WeightProxy": "linear",
    "gpt_layer_spec": "specs",
    "weight_proxies": "experts",
}

__all__ = [*_MODULES, "add_arguments", "arguments", "check_config", "recipe_of"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(f"{__name__}.{_MODULES[name]}:{name}")
    except ImportError as error:
        raise ImportError(
            f"{name} needs Megatron-LM (megatron.core, and what it imports itself), which could "
            f"not be imported: {error}; put the checkout on PYTHONPATH"
        ) from error

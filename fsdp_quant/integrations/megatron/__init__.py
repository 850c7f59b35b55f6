# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: the linear layers that its specs take, the backend that hands them out, and the
arguments that fit them.

[Note: who writes the weights]
Parameters stay what they are to Megatron: plain tensors, which its DDP moves into flat buffers, and
which optimizer and collectives write there. Each forward quantizes the values that it finds; where
a weight sync gathers codes, a `WeightProxy` replaces the parameter. Between an optimizer's
step and the gather of parameters that follows it no layer runs: Megatron's hooks see to that.

[Note: the shapes]
    column  W [N / R, K], x [S, B, K] or a piece [S / R, B, K], y [S, B, N / R]
    row     W [N, K / R], x [S, B, K / R], y [S, B, N] or a piece [S / R, B, N]
Both return (y, bias), the bias where Megatron adds it itself (skip_bias_add). What crosses ranks
are codes (`fq.parallel`). Experts never communicate here: Megatron's dispatchers move their tokens.

Importing this module needs no Megatron; what needs it raises ImportError, saying why it could not
be imported.
"""

from .command_line import add_arguments, arguments, recipe_of
from .config import check_config
from .experts import ColumnParallelGroupedLinear, RowParallelGroupedLinear, weight_proxies
from .linear import ColumnParallelLinear, RowParallelLinear
from .specs import SpecProvider, gpt_layer_spec
from .weights import WeightProxy

__all__ = [
    "ColumnParallelGroupedLinear",
    "ColumnParallelLinear",
    "RowParallelGroupedLinear",
    "RowParallelLinear",
    "SpecProvider",
    "WeightProxy",
    "add_arguments",
    "arguments",
    "check_config",
    "gpt_layer_spec",
    "recipe_of",
    "weight_proxies",
]

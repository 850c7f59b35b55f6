# SPDX-License-Identifier: Apache-2.0
"""`MultiheadAttention`: torch's attention, whose projections are products of a recipe.

q, k and v of self-attention are one product with `in_proj_weight` [3 E, E], by a layer that is no
module of the tree; the module keeps its class, its parameters and their names. Attention of a query
to other keys and values multiplies parts of that weight, in high precision. `out_proj` is an
`fq.Linear`. `fully_shard` gathers `in_proj_weight` in high precision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear.linear import Linear
from ..tensor import torch_compat
from .transposed_linear import TransposedLinear


class _Projection:
    """A weight that a layer multiplies, or whose parts are multiplied in high precision."""

    def __init__(self, layer: Linear, weight: Tensor):
        self.layer, self.weight = layer, weight

    def split(self, sizes: list[int]) -> tuple[Tensor, ...]:
        return self.weight.split(sizes)

    def chunk(self, count: int) -> tuple[Tensor, ...]:
        return self.weight.chunk(count)


def _project(x: Tensor, weight: Tensor | _Projection, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, _Projection):
        return weight.layer.times(x, weight.weight, bias)
    return F.linear(x, weight, bias)


_attend = torch_compat.multi_head_attention_over(_project)


class MultiheadAttention(TransposedLinear):
    """nn.MultiheadAttention over `in_proj_weight` [3 E, E], stored as that of an nn.Linear."""

    in_proj_weight: nn.Parameter
    out_proj: nn.Linear
    source = "in_proj_weight"
    transposed = False

    def read(self) -> Tensor:
        # no parameter of `fully_shard`, which gathers those as codes
        return self.in_proj_weight.view_as(self.in_proj_weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of nn.MultiheadAttention."""
        if query.is_nested:
            return self._of_nested(query, key, value)
        is_batched = query.dim() == 3

        def sequence_first(x: Tensor) -> Tensor:
            if not is_batched:
                return x.unsqueeze(1)
            return x.transpose(0, 1) if self.batch_first else x

        q = sequence_first(query)  # one tensor stays one
        k = q if key is query else sequence_first(key)
        v = q if value is query else k if value is key else sequence_first(value)
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        out = self.out_proj
        y, weights = _attend(
            q,
            k,
            v,
            self.embed_dim,
            self.num_heads,
            _Projection(self._layer, self.read()),
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            _Projection(out, out.weight) if isinstance(out, Linear) else out.weight,
            out.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        if not is_batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return (y.transpose(0, 1) if self.batch_first else y), weights

    def _of_nested(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """Self-attention of sequences of several lengths, as torch's encoder makes of a mask."""
        if key is not query or value is not query or not self.batch_first:
            raise NotImplementedError(
                f"{self._layer.runtime.name}: query is a nested tensor, and not key and value too, "
                "batch first; pad them (torch.nested.to_padded_tensor) and pass key_padding_mask"
            )
        lengths = [len(sequence) for sequence in query.unbind()]
        x = torch.nested.to_padded_tensor(query, 0.0)
        ends = torch.tensor(lengths, dtype=torch.int64, device=x.device)
        padding = torch.arange(x.shape[1], dtype=torch.int64, device=x.device) >= ends[:, None]
        y, _ = self.forward(x, x, x, padding, need_weights=False)
        sequences = [rows[:length] for rows, length in zip(y, lengths)]
        return torch.nested.as_nested_tensor(sequences, layout=query.layout), None


def is_attention(module: nn.Module) -> bool:
    """torch's attention with one packed weight, which was not converted."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.in_proj_weight is not None
    )

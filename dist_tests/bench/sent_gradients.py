# SPDX-License-Identifier: Apache-2.0
"""Gradients in one process as `fq.set_gradient_reduction` makes them of several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_quant.ops.gradient_codes import GradientLayout, decode_gradients, encode_gradients
from fsdp_quant.ops.rng import tensor_id

RANKS = 4


def backward_of_ranks(
    model: nn.Module,
    rows: Tensor,
    format: str,
    step: int,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
) -> Tensor:
    """The loss; leaves the mean gradient of RANKS parts of the rows, each sent as `format`."""
    ranks = min(RANKS, len(rows))
    named = dict(model.named_parameters())
    layout = GradientLayout(tuple(tuple(p.shape) for p in named.values()), ranks, format)
    losses, sent = [], []
    for rank, part in enumerate(rows.chunk(ranks)):
        losses.append(loss_of(model, part))
        losses[-1].backward()
        ids = [tensor_id(f"{name} {rank}") for name in named]
        keys = torch.tensor([[0, step, of, 0, 0] for of in ids], device=rows.device)
        # as FSDP2's bf16 computation leaves them
        grads = [p.grad.bfloat16() for p in named.values()]
        sent.append(encode_gradients(grads, layout, keys))
        model.zero_grad()
    sums = rows.new_empty(ranks, sum(layout.numels), dtype=torch.float32)
    for owner in range(ranks):
        received = torch.stack([codes[owner] for codes in sent])
        decode_gradients(received, layout, sums[owner], 1 / ranks)
    for p, pieces in zip(named.values(), sums.split(layout.numels, 1)):
        p.grad = pieces.reshape(-1)[: p.numel()].view_as(p)
    return torch.stack(losses).mean()

# SPDX-License-Identifier: Apache-2.0
"""Encode the gradients of many parameters, and sum what ranks encoded, in one launch each. Mirrors
csrc/api/gradients.cpp; `ops.gradient_codes` says what the buffer holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import Encoding
from .encoding import pack_encoding

_ops = torch.ops.fsdp_quant


def packed_gradients(encoding: Encoding) -> int:
    """Pack an encoding as operators of gradients take it; 0: values are sent as bf16."""
    return pack_encoding(encoding) if encoding.fmt.is_quantized else 0


def gradient_keys(step: Tensor, idents: Tensor, counted: Tensor) -> Tensor:
    """Count a reduction in `counted`, int64 [4], and return its keys, int64 [len(idents), 5]."""
    return _ops.gradient_keys(step, idents, counted)


def encode_gradients(
    grads: Sequence[Tensor], encoding: Encoding, keys: Tensor | None, buffer: Tensor
) -> None:
    """Write the pieces of all owners to `buffer`, uint8 [owners, bytes].

    grads:  of one dtype, float32, float16 or bfloat16.
    keys:   int64 [len(grads), 5], for stochastic rounding.
    """
    _ops.encode_gradients([g.contiguous() for g in grads], packed_gradients(encoding), keys, buffer)


def decode_gradients(
    buffer: Tensor, lengths: Sequence[int], encoding: Encoding, factor: float, out: Tensor
) -> None:
    """Write factor times the sum of the pieces of all senders, in their order, to `out`.

    lengths:  elements of each gradient's piece.
    """
    _ops.decode_gradients(buffer, lengths, packed_gradients(encoding), factor, out)

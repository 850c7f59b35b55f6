# SPDX-License-Identifier: Apache-2.0
"""Stream the tensors of an export to a rollout engine during training: `refit`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..options import flag
from .export import Exported, exported
from .shards import LocalTensors, Piece
from .writer import in_buckets, size_of

Bucket = list[tuple[str, Tensor]]


def refit(
    model: nn.Module,
    format: str = "compressed-tensors",
    *,
    sharded: bool = False,
    bucket_size: int | str = "512MB",
    dtype: torch.dtype | None = torch.bfloat16,
    input_amax: Mapping[str, float] | None = None,
    share_scales: bool | None = None,
    names: Callable[[str], str] | None = None,
) -> Iterator[Bucket] | Iterator[list[Piece]]:
    """Stream the tensors that `fq.export` writes for `model`: buckets of (name, tensor), for an
    engine to load.

    sharded:      True: yield buckets of (name, tensor, shape, offsets), the rectangles of those
                  tensors that this rank holds. No weight is gathered.
    bucket_size:  bytes per bucket, or a text such as "512MB". The tensors of one weight (codes and
                  scales) stay together. A weight larger than a bucket has a bucket of its own.
    others:       as for `fq.export`, which defines names, shapes, order and bytes of the tensors.

    Every rank must call it with the same arguments. A weight is read when its bucket is reached, so
    do not step an optimizer before the end. Tensors are on the device of the weights, and the
    caller owns them.

    Not sharded: every rank receives every bucket and must iterate to the end, because weights are
    gathered, one at a time. A rank holds one unsharded weight, the bucket that is being filled, and
    the buckets that the caller keeps. Sharded: ranks iterate independently; every rank yields the
    tensors that are not sharded.

    Raises the errors of `fq.export`, on every rank, when it is called; ValueError for a
    `bucket_size` that is not a size; NotImplementedError if sharded, for weights that tensor
    parallelism cuts.

    >>> model = fq.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), "fp8_block")
    >>> engine = {}
    >>> for bucket in fq.refit(model, "fp8"):
    ...     engine.update(bucket)                             # or engine.load_weights(bucket)
    >>> sorted(engine)
    ['0.weight', '0.weight_scale_inv']
    """
    flag().read("sharded", sharded)
    max_bytes = size_of(bucket_size, "bucket_size")
    if sharded:
        local = LocalTensors(model)
        checkpoint = exported(
            model, format, dtype, input_amax, share_scales, names, local.tensor_amax
        )
        local.check(checkpoint)
        return in_buckets(local.pieces(checkpoint), max_bytes, lambda piece: piece.tensor.nbytes)
    checkpoint = exported(model, format, dtype, input_amax, share_scales, names)
    tensors = _tensors(checkpoint)
    buckets = in_buckets(checkpoint.planned, max_bytes, lambda planned: planned.nbytes)
    return (list(itertools.islice(tensors, len(bucket))) for bucket in buckets)


def _tensors(checkpoint: Exported) -> Iterator[tuple[str, Tensor]]:
    for source in checkpoint.parts:
        with torch.no_grad():
            weight = checkpoint.gathered(source)
            aliases = isinstance(weight, list) or not source.layers
            pairs = checkpoint.tensors(source, weight)
            tensors = [(name, t.clone() if aliases else t.contiguous()) for name, t in pairs]
        del weight, pairs
        yield from tensors
        del tensors

# SPDX-License-Identifier: Apache-2.0
"""`refit`: the tensors of an export as a stream, for a rollout engine beside the training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..storage import Storage
from .export import Exported, exported
from .writer import in_files, size_of

Bucket = list[tuple[str, Tensor]]


def refit(
    model: nn.Module,
    format: str = "compressed-tensors",
    *,
    bucket_size: int | str = "512MB",
    dtype: torch.dtype | None = torch.bfloat16,
    input_amax: Mapping[str, float] | None = None,
    share_scales: bool | None = None,
    names: Callable[[str], str] | None = None,
) -> Iterator[Bucket]:
    """Stream what `fq.export` writes of `model`: buckets of (name, tensor), for an engine to load.

    bucket_size:  bytes of a bucket, or a text such as "512MB". The tensors of one weight (codes and
                  scales) stay together; a larger weight has a bucket of its own.
    others:       as of `fq.export`, whose names, shapes, order and bytes the tensors have.

    Every rank must call it alike, and iterate to the end: sharded weights are gathered one at a
    time, and every rank gets every bucket. A rank holds one whole weight, the bucket that is being
    filled, and the buckets that the caller keeps. Tensors are on the device of the weights, and are
    the caller's own. Weights are read as their bucket is reached: step no optimizer before the end.

    Raises what `fq.export` raises, on every rank and when it is called; ValueError for a
    `bucket_size` that is no size.

    >>> model = fq.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), "fp8_block")
    >>> engine = {}
    >>> for bucket in fq.refit(model, "fp8"):
    ...     engine.update(bucket)                             # or engine.load_weights(bucket)
    >>> sorted(engine)
    ['0.weight', '0.weight_scale_inv']
    """
    max_bytes = size_of(bucket_size, "bucket_size")
    made = exported(model, format, dtype, input_amax, share_scales, names)
    return _buckets(made, [len(of) for of in in_files(made.planned, max_bytes)])


def _buckets(made: Exported, sizes: list[int]) -> Iterator[Bucket]:
    """sizes: number of tensors of each bucket."""
    tensors = _tensors(made)
    for size in sizes:
        yield list(itertools.islice(tensors, size))


def _tensors(made: Exported) -> Iterator[tuple[str, Tensor]]:
    for source in made.parts:
        with torch.no_grad():
            whole = made.gathered(source)
            aliases = isinstance(whole, Storage) or not source.layers
            of = made.tensors(source, whole)
            found = [(name, t.clone() if aliases else t.contiguous()) for name, t in of]
        del whole, of
        yield from found
        del found

# SPDX-License-Identifier: Apache-2.0
"""Flat buffers: offsets of parameters, and which rank owns which elements.

The rules are Megatron's: parameters in reverse order, each start a multiple of 64 elements, bucket
ends padded to a multiple of lcm(ranks, 128), optionally also of 2^16; rank r owns the r-th part of
every bucket, wherever parameters begin. Other policies cut buckets elsewhere: at random elements,
at odd ones, with empty ranks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_quant.hooks import ShardMap

START_MULTIPLE = 64
POLICIES = ("even", "random", "odd", "empty")


@dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the buffer; bounds: ranks + 1 cuts, in elements of the buffer."""

    start: int
    end: int
    bounds: tuple[int, ...]


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _bounds(start: int, end: int, ranks: int, policy: str, seed: int) -> tuple[int, ...]:
    draw, size = random.Random(seed), end - start
    even = [size * r // ranks for r in range(1, ranks)]
    inner = {
        "even": even,
        "odd": [c | 1 for c in even],
        "random": sorted(draw.choices(range(size + 1), k=ranks - 1)),
        "empty": sorted(draw.choices([0, size // 3, size], k=ranks - 1)),
    }[policy]
    return (start, *(start + c for c in inner), end)


class FlatLayout:
    """Offsets of parameters in a buffer, its buckets, and their owners.

    sizes:       name -> elements, in the model's order.
    ranks:       number of ranks that the buckets are padded for and cut between.
    bucket_size: a bucket ends after the parameter that fills it.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        ranks: int,
        bucket_size: int,
        policy: str = "even",
        pad_to_2_16: bool = False,
    ):
        if policy not in POLICIES:
            raise ValueError(f"cut policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        multiple = math.lcm(ranks, 128, 2**16 if pad_to_2_16 else 1)
        self.starts: dict[str, int] = {}
        self.sizes, self.buckets, self._bucket_of = dict(sizes), [], {}
        at = first = 0
        names = list(reversed(sizes))
        for i, name in enumerate(names):
            self.starts[name] = at = _multiple(at, START_MULTIPLE)
            self._bucket_of[name] = len(self.buckets)
            at += sizes[name]
            if at - first >= bucket_size or i + 1 == len(names):
                end = first + _multiple(at - first, multiple)
                self.buckets.append(
                    Bucket(first, end, _bounds(first, end, ranks, policy, len(self.buckets)))
                )
                at = first = end
        self.numel = at

    def shards(self, name: str) -> ShardMap:
        """Which rank owns which elements of a parameter, from the cuts of its bucket."""
        start, size = self.starts[name], self.sizes[name]
        return ShardMap(
            tuple(min(max(b - start, 0), size) for b in self.buckets[self._bucket_of[name]].bounds)
        )

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The elements of a parameter in a buffer."""
        return flat.narrow(0, self.starts[name], self.sizes[name])

    def zeros(self, device) -> Tensor:
        return torch.zeros(self.numel, dtype=torch.float32, device=device)

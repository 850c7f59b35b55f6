# SPDX-License-Identifier: Apache-2.0
"""How ranks share a linear layer, and how an activation is cut between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as Layout

from ..formats import Direction, Encoding
from ..ops.reference import known
from ..ops.rng import placed_id
from ..quantizer import HybridQuantizer
from ..roles import QUANTIZED_TYPES as SLOTS
from ..roles import slot_ids
from ..storage import codes_travel
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions

# Of a tensor, in errors; a function where a graph must not depend on it.
Name = str | Callable[[], str]


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How the ranks of `group` share a linear layer (`linear.program`, note "who holds what").

    column:        the rows of the weight are cut; else its columns.
    sequence_dim:  that x (column) or y (row) is cut along; None: it is whole.
    reduces:       without sequence_dim, this layer sums dx or y over ranks; else the caller does.
    """

    group: dist.ProcessGroup
    column: bool
    sequence_dim: int | None = None
    reduces: bool = True

    @property
    def cut_slot(self) -> str:
        """The activation of which each rank has other columns."""
        return "grad_output" if self.column else "input"

    @property
    def gathered_slot(self) -> str | None:
        """The activation of which each rank has other rows."""
        return None if self.sequence_dim is None else "input" if self.column else "grad_output"

    @property
    def cut_dim(self) -> int:
        """`sequence_dim` of a layer that has one. Raises ValueError."""
        return known(self.sequence_dim, "the dim that is cut along the sequence")

    def cut_of(self, slot: str, x: Tensor) -> SequenceCut | None:
        """How an activation is cut along the sequence, of this rank's part x; None: it is not."""
        if slot != self.gathered_slot:
            return None
        return SequenceCut.of_local(tuple(x.shape), self.cut_dim, self.group)

    def output_cut(self, shape: tuple[int, ...], name: Name) -> SequenceCut | None:
        """How the output of `shape` is cut along the sequence; None: a rank has all rows."""
        if self.gathered_slot != "grad_output":
            return None
        return SequenceCut.of_whole(shape, self.cut_dim, self.group, name)

    def slot_ids(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """`roles.slot_ids` of a layer whose `cut_slot` has columns of this rank alone.

        shape:  [N, K] of this rank's part of the weight.
        """
        cols = shape[0 if self.column else 1]
        return _ids_of_part(name, self.cut_slot, self.group.rank(), cols, device)

    @property
    def data_parallel_rank(self) -> int:
        """Ranks of a group hold one batch: they count as one."""
        return min(dist.get_process_group_ranks(self.group)) // self.group.size()


@dataclass(frozen=True)
class Layouts:
    """Placements of the plain input and of the output of a layer whose weight is a DTensor."""

    input: Layout
    output: Layout
    use_local_output: bool


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """Equal pieces of one dim: rows [outer, R, chunk, cols], per rank [outer, chunk, cols].

    shape:  this rank's, [.., S / R, .., cols].
    dim:    that is cut; not the last.
    """

    group: dist.ProcessGroup
    shape: tuple[int, ...]
    dim: int

    @classmethod
    def of_whole(
        cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: Name = "sequence"
    ) -> SequenceCut:
        """The cut of a whole tensor. Raises ValueError where R does not divide its dim."""
        dim = _checked_dim(shape, dim, name)
        if shape[dim] % group.size():
            raise ValueError(
                f"{text_of(name)}: dim {dim} of {list(shape)} is {shape[dim]}, which the "
                f"{group.size()} "
                f"ranks of the group do not divide; pad it to a multiple of {group.size()}"
            )
        return cls(group, (*shape[:dim], shape[dim] // group.size(), *shape[dim + 1 :]), dim)

    @classmethod
    def of_local(
        cls, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, name: Name = "sequence"
    ) -> SequenceCut:
        """The cut of which each rank holds `shape`."""
        return cls(group, tuple(shape), _checked_dim(shape, dim, name))

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def outer(self) -> int:
        return prod(self.shape[: self.dim])

    @property
    def chunk(self) -> int:
        return prod(self.shape[self.dim : -1])

    @property
    def rows(self) -> int:
        """Of this rank."""
        return self.outer * self.chunk

    @property
    def whole_shape(self) -> tuple[int, ...]:
        before, (size, *behind) = self.shape[: self.dim], self.shape[self.dim :]
        return *before, size * self.ranks, *behind

    def travels(self, encoding: Encoding) -> bool:
        """Codes of the pieces are those of the whole (`linear.transport`, note "one rule")."""
        return self.ranks == 1 or codes_travel(encoding, self.chunk, self.outer == 1)

    def all_travel(self, hybrid: HybridQuantizer, directions: Collection[Direction]) -> bool:
        sent = gathered_directions(hybrid, frozenset(directions))
        return all(self.travels(hybrid.encodings[d]) for d in sent)


def text_of(name: Name) -> str:
    return name if isinstance(name, str) else name()


def _checked_dim(shape: tuple[int, ...], dim: int, name: Name) -> int:
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{text_of(name)}: dim {dim} of {list(shape)} cannot be cut; give one before the last, "
            "which products contract"
        )
    return dim % len(shape)


@functools.cache
@torch_compat.outside_modes()
def _ids_of_part(name: str, cut_slot: str, part: int, cols: int, device: torch.device) -> Tensor:
    """Made on the device once, before graphs are captured."""
    ids, slot = slot_ids(name), SLOTS.index(cut_slot)
    ids[slot] = placed_id(ids[slot], part, cols)
    return ids.to(device)

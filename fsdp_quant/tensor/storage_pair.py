# SPDX-License-Identifier: Apache-2.0
"""`StoragePair`: both directions' storages of a tensor, and the layouts derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..encoded_matrix import BUFFERS, EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops.layout import COMPACT
from ..storage import Storage, to_storage
from . import torch_compat
from .weight_state import WeightState


@dataclass(eq=False)
class StoragePair:
    """The storages that aliases of one quantized tensor share.

    owner:    the state of a weight; None for other tensors.
    operands: storages in the layouts that GEMMs read, cached until the codes are written.
    groups:   pairs of the matrices of a packed tensor [matrices, N, K]; then there is no own
              storage.
    shown:    buffers of `operands_in_graphs` by name, until a storage is replaced; for a packed
              weight that FSDP2 gathers, the concatenated codes of all matrices.
    facts:    `without_buffers`, until a storage is replaced.
    """

    rowwise: EncodedMatrix | None = None
    columnwise: EncodedMatrix | None = None
    owner: WeightState | None = None
    operands: dict[tuple[Direction, str], EncodedMatrix] = field(default_factory=dict)
    groups: list[StoragePair] = field(default_factory=list)
    shown: dict[str, Tensor] | None = None
    facts: StoragePair | None = None

    def put(self, direction: Direction, storage: EncodedMatrix) -> None:
        """Replace a storage, and drop the layouts derived from the one before."""
        setattr(self, direction.value, storage)
        self.drop_operands()

    def share_rowwise(self) -> None:
        """Let the rowwise storage serve both directions."""
        self.put(COLUMNWISE, self.storage(ROWWISE).as_direction(COLUMNWISE))

    def cache_operand(self, direction: Direction, layout: str, storage: EncodedMatrix) -> None:
        """Cache a storage of the codes in a layout."""
        self.operands[direction, layout] = storage
        self.shown = self.facts = None

    def drop_operands(self) -> None:
        self.operands.clear()
        self.shown = self.facts = None

    def get(self, direction: Direction) -> EncodedMatrix | None:
        return self.rowwise if direction is ROWWISE else self.columnwise

    def storage(self, direction: Direction) -> Storage:
        """The compact storage of a direction. Raises ValueError if there is none."""
        return to_storage(self.matrix(direction))

    def matrix(self, direction: Direction, tensor: object = None) -> EncodedMatrix:
        """The storage or operand of a direction. Raises ValueError, naming the tensor, if there is
        none."""
        matrix = self.get(direction)
        if matrix is None:
            raise ValueError(
                f"this tensor has no {direction.value} storage: it was dropped or never encoded "
                f"({self if tensor is None else tensor!r})"
            )
        return matrix

    @property
    def first(self) -> EncodedMatrix:
        """The rowwise storage, else the columnwise one."""
        return self.matrix(COLUMNWISE) if self.rowwise is None else self.rowwise

    @property
    def shares_data(self) -> bool:
        """One storage serves both directions."""
        return None not in (self.rowwise, self.columnwise) and self.first.data is (
            self.matrix(COLUMNWISE).data
        )

    def operands_in_graphs(self) -> dict[str, EncodedMatrix]:
        """The storages that a graph sees by name: per direction the laid-out operands, else the
        codes; shared buffers once."""
        shown: dict[str, EncodedMatrix] = {}
        for direction in Direction:
            laid_out = {
                name_in_graphs(d, layout): s
                for (d, layout), s in self.operands.items()
                if d is direction
            }
            storage = self.get(direction)
            if laid_out:
                shown |= laid_out
            elif storage is not None and not any(s.data is storage.data for s in shown.values()):
                shown[name_in_graphs(direction)] = storage
        return shown

    def without_buffers(self) -> StoragePair:
        """Formats, shapes and layouts of the pair, without its owner: an object takes the place of
        each buffer."""
        if self.facts is None:
            places: dict[int, Any] = {}

            def emptied(matrix: EncodedMatrix) -> EncodedMatrix:
                buffers = matrix.buffers().items()
                return matrix.with_buffers(
                    {name: places.setdefault(id(t), object()) for name, t in buffers}
                )

            self.facts = StoragePair(
                None if self.rowwise is None else emptied(self.rowwise),
                None if self.columnwise is None else emptied(self.columnwise),
                operands={key: emptied(s) for key, s in self.operands.items()},
                groups=[group.without_buffers() for group in self.groups],
            )
        return self.facts

    @property
    def readable(self) -> list[EncodedMatrix]:
        """The storages whose memory is there, rowwise first: a gather brings one direction. A graph
        that is traced reads those that the gather of its forward brings.

        Raises StaleWeightError if every storage was freed.
        """
        storages = [s for s in (self.rowwise, self.columnwise) if s is not None]
        if self.owner is not None and self.owner.gathered is not None and torch_compat.is_fake():
            laid_out = [s for (direction, _), s in self.operands.items() if direction is ROWWISE]
            return [*laid_out, *storages][:1]
        readable = [s for s in storages if not s.is_freed]
        if storages and not readable:
            storages[0].readable("" if self.owner is None else self.owner.name)
        return readable

    def map(self, fn: Callable[[EncodedMatrix], EncodedMatrix]) -> StoragePair:
        """fn of each readable storage, for the same owner; a shared storage is mapped once."""
        if self.groups:
            mapped = StoragePair(owner=self.owner, groups=[group.map(fn) for group in self.groups])
            return mapped if self.shown is None else mapped.joined()
        shares_data, mapped = self.shares_data, StoragePair(owner=self.owner)
        for storage in self.readable[: 1 if shares_data else None]:
            mapped.put(storage.direction, fn(storage))
        if shares_data:
            mapped.share_rowwise()
        return mapped

    def joined(self) -> StoragePair:
        """The matrices of a packed tensor over one buffer per field, which is `shown`."""
        shown: dict[str, Tensor] = {}
        shares_data = bool(self.groups) and self.groups[0].shares_data
        for d in (ROWWISE,) if shares_data else Direction:
            matrices = [matrix for group in self.groups if (matrix := group.get(d)) is not None]
            for fields in zip(*(matrix.buffers().items() for matrix in matrices)):
                shown[f"{d.value}_{fields[0][0]}"] = torch.cat([buffer for _, buffer in fields])
        return self.over(shown)

    def over(self, shown: dict[str, Tensor]) -> StoragePair:
        """The same matrices of a packed tensor over other buffers, of all of them."""
        groups = [StoragePair(owner=group.owner) for group in self.groups]
        for d in Direction:
            names = [name for name in BUFFERS if f"{d.value}_{name}" in shown]
            views = zip(*(shown[f"{d.value}_{name}"].chunk(len(groups)) for name in names))
            for group, before, buffers in zip(groups, self.groups, views):
                group.put(d, before.matrix(d).with_buffers(dict(zip(names, buffers))))
        for group, before in zip(groups, self.groups):
            if group.columnwise is None and before.columnwise is not None:
                group.share_rowwise()
        return StoragePair(owner=self.owner, groups=groups, shown=shown)


def name_in_graphs(direction: Direction, layout: str = COMPACT) -> str:
    """The name that `__tensor_flatten__` gives to a storage in a layout."""
    return direction.value if layout == COMPACT else f"{direction.value}_{layout}".replace(" ", "_")

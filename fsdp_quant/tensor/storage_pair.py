# SPDX-License-Identifier: Apache-2.0
"""`StoragePair`: both directions' storages of a tensor, and the layouts derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..storage import Storage, to_storage
from .weight_state import WeightState


@dataclass(eq=False)
class StoragePair:
    """The storages that aliases of one quantized tensor share.

    owner:    the state of a weight; None for other tensors.
    operands: storages in the layouts that GEMMs read, cached until the codes are written.
    groups:   pairs of the matrices of a packed tensor [matrices, N, K], or of row groups of [M, K]
              that are quantized separately (tokens per expert); then there is no own storage.
    shown:    buffers of `QuantizedTensor._operands` by name, until a storage is replaced; for a
              packed weight that FSDP2 gathers, the concatenated codes of all matrices.
    """

    rowwise: EncodedMatrix | None = None
    columnwise: EncodedMatrix | None = None
    owner: WeightState | None = None
    operands: dict[tuple[Direction, str], EncodedMatrix] = field(default_factory=dict)
    groups: list[StoragePair] = field(default_factory=list)
    shown: dict[str, Tensor] | None = None

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
        self.shown = None

    def drop_operands(self) -> None:
        self.operands.clear()
        self.shown = None

    def get(self, direction: Direction) -> EncodedMatrix | None:
        return self.rowwise if direction is ROWWISE else self.columnwise

    def storage(self, direction: Direction) -> Storage:
        """The compact storage of a direction. Raises ValueError if there is none."""
        return to_storage(self.matrix(direction))

    def matrix(self, direction: Direction) -> EncodedMatrix:
        """The storage or operand of a direction. Raises ValueError if there is none."""
        matrix = self.get(direction)
        if matrix is None:
            raise ValueError(
                f"there is no {direction.value} storage: it was dropped or never encoded"
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

    def map(self, fn: Callable[[EncodedMatrix], EncodedMatrix]) -> StoragePair:
        """fn of each storage, for the same owner; a shared storage is mapped once."""
        if self.groups:
            return StoragePair(owner=self.owner, groups=[group.map(fn) for group in self.groups])
        rowwise = None if self.rowwise is None else fn(self.rowwise)
        if rowwise is not None and self.shares_data:
            return StoragePair(rowwise, to_storage(rowwise).as_direction(COLUMNWISE), self.owner)
        columnwise = None if self.columnwise is None else fn(self.columnwise)
        return StoragePair(rowwise, columnwise, self.owner)

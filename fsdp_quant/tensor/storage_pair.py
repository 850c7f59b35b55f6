# SPDX-License-Identifier: Apache-2.0
"""`StoragePair`: both directions' storages of a tensor, and the layouts derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..storage import Storage
from .weight_state import WeightState


@dataclass(eq=False)
class StoragePair:
    """The storages that aliases of one quantized tensor share.

    owner:    the state of a weight; None for other tensors.
    laid_out: storages in the layouts that GEMMs read, cached until the codes are written.
    parts:    pairs of the matrices of a packed tensor [matrices, N, K], or of row groups of [M, K]
              that are quantized separately (tokens per expert); then there is no own storage.
    shown:    buffers of `QuantizedTensor._operands` by name, until a storage is replaced; for a
              packed weight that FSDP2 gathers, the concatenated codes of all parts.
    """

    rowwise: Storage | None = None
    columnwise: Storage | None = None
    owner: WeightState | None = None
    laid_out: dict[tuple[Direction, str], Storage] = field(default_factory=dict)
    parts: list[StoragePair] = field(default_factory=list)
    shown: dict[str, Tensor] | None = None

    def put(self, direction: Direction, storage: Storage) -> None:
        """Replace a storage, and drop the layouts derived from the one before."""
        setattr(self, direction.value, storage)
        self.drop_laid_out()

    def keep(self, direction: Direction, layout: str, storage: Storage) -> None:
        """Cache a storage of the codes in a layout."""
        self.laid_out[direction, layout] = storage
        self.shown = None

    def drop_laid_out(self) -> None:
        self.laid_out.clear()
        self.shown = None

    def get(self, direction: Direction) -> Storage | None:
        return self.rowwise if direction is ROWWISE else self.columnwise

    def storage(self, direction: Direction) -> Storage:
        """The storage of a direction. Raises ValueError if there is none."""
        storage = self.get(direction)
        if storage is None:
            raise ValueError(f"there is no {direction.value} storage: it was dropped or never made")
        return storage

    @property
    def first(self) -> Storage:
        """The rowwise storage, else the columnwise one."""
        return self.storage(COLUMNWISE) if self.rowwise is None else self.rowwise

    @property
    def shares_data(self) -> bool:
        """One storage serves both directions."""
        return None not in (self.rowwise, self.columnwise) and self.first.data is (
            self.storage(COLUMNWISE).data
        )

    def map(self, fn: Callable[[Storage], Storage]) -> StoragePair:
        """fn of each storage, for the same owner; a shared storage is mapped once."""
        if self.parts:
            return StoragePair(owner=self.owner, parts=[part.map(fn) for part in self.parts])
        rowwise = None if self.rowwise is None else fn(self.rowwise)
        if rowwise is not None and self.shares_data:
            return StoragePair(rowwise, rowwise.as_direction(COLUMNWISE), self.owner)
        columnwise = None if self.columnwise is None else fn(self.columnwise)
        return StoragePair(rowwise, columnwise, self.owner)

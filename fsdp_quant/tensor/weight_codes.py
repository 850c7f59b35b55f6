# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter's two halves: the fp32 master, which the optimizer holds, and the codes.

[Note: the master of a quantized parameter]
Codes of a weight, or of a dim-0 shard of one, are encoded from high-precision values of the same
rows. At first those are the initial values, which the weight holds. An optimizer keeps them as its
fp32 master (`detach_master`); from then on the weight holds codes and refers to the master weakly.
Whatever writes the weight (initialization, a load, a user) writes these values. `refresh_codes`
encodes them after a step of the optimizer, or at the first gather after a load, from statistics
that ranks reduce there. So the bytes are those of a `WeightShard`'s gather. Both directions are
kept and written over in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops.dispatch import Encoded, Statistics
from ..storage import Storage
from . import torch_compat
from .fsdp_hooks import FSDPHooks
from .quantized_tensor import QuantizedTensor
from .storage_pair import StoragePair
from .weight_state import WeightState, WeightSync


class CodesState(WeightState):
    """The state of a weight whose parameter is its codes.

    pending:     an event that all ranks share (creation, an optimizer's step, a load) wrote the
                 values, which are not encoded yet. Ranks that hold rows of one tensor agree on it.
    stale_codes: how often all codes became stale other than by a write of the values.
    computed:    (version of the values, statistics of this rank's rows that a kernel computed).
    collectives: of the weights that are refreshed with this one first
                 (`root_statistics.reduce_statistics`).
    """

    holds_codes = True

    pending = True
    statistics_version: object = None  # of the values that `statistics` describe
    computed: tuple[object, dict[Direction, Statistics]] = (None, {})
    of_process = WeightState.of_process | {
        "pending",
        "statistics_version",
        "computed",
        "collectives",
    }

    def __init__(self, *args):
        super().__init__(*args)
        self.stale_codes = 0
        self.collectives: dict = {}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.collectives = {}

    def set_quantizer(self, quantizer) -> None:
        super().set_quantizer(quantizer)
        self.pending = True
        self.drop_codes()

    def statistics_at(self, version: object) -> dict[Direction, Statistics] | None:
        """The statistics that a kernel computed of these values, or None."""
        return self.computed[1] if self.computed[0] == version else None

    def drop_codes(self) -> None:
        """Encode again at the next use."""
        self.stale_codes += 1

    def mark_written(self) -> None:
        """Note that an event that all ranks share wrote the values, maybe past their version
        counter."""
        self.pending, self.computed = True, (None, {})
        self.drop_codes()

    def wrapped(self, values: Tensor, dtype: torch.dtype | None = None) -> WeightCodes:
        raise NotImplementedError

    def own_codes(
        self, local: WeightCodes, direction: Direction, matrix: int | None = None
    ) -> Encoded | None:
        if not self.matrices[0].quantizer.encodings[direction].fmt.is_quantized:
            return None
        pair = local._pair if matrix is None else local._pair.groups[matrix]
        storage = pair.storage(direction)
        return Encoded(storage.data, storage.scale, storage.tensor_amax, None)


class WeightContent:
    """What aliases of one shard share.

    values:     high-precision values, until an optimizer holds them; None before the first write.
    master:     weak reference to the tensor that replaced them. owner: to its optimizer.
    writes:     [object that identifies the values, number of writes through the dispatcher].
    pair:       the codes. versions: of the values that each direction was encoded from.
    quantizer:  (quantizer, dtype, `stale_codes`) that encoded them.
    copied:     (version of the source, own version when it was copied), of a copy.
    is_padding: allocated to hold another shard and rows behind it (`quantized_weight._copy_`).
    borrowed:   directions whose codes are in memory of the weight sync, which frees it.
    """

    def __init__(self, state: CodesState, values: Tensor | None = None):
        self.state, self.values = state, values
        self.master: Callable[[], Tensor | None] | None = None
        self.owner: Callable[[], object] | None = None
        self.writes: list = [object(), 0]
        self.pair = StoragePair(owner=state)
        self.versions: dict[Direction, object] = {}
        self.quantizer: tuple | None = None
        self.copied: tuple[object, object] = (None, None)
        self.is_padding = False
        self.borrowed: set[Direction] = set()

    def adopt(self, other: WeightContent) -> None:
        """Share everything with `other`, since the master has one owner and is not copied."""
        self.__dict__.update(other.__dict__, is_padding=False)


def _no_values() -> None:
    """In place of a weak reference to a master."""


class WeightCodes(FSDPHooks, QuantizedTensor):
    """A quantized parameter as master and codes; `QuantizedWeight` makes it a tensor for torch."""

    _content: WeightContent

    # The master #

    @property
    def state(self) -> CodesState:
        return self._content.state

    @property
    def inner(self) -> Tensor:
        """The high-precision values [rows, cols]: the initial ones, or the optimizer's master.

        Raises StaleWeightError if the optimizer that took them is gone.
        """
        content = self._content
        if self.state.weight_sync is not None:
            raise StaleWeightError(
                f"{self.state.name} is published by a weight sync, and its masters are in the "
                "trainer: its codes can be multiplied, but neither changed nor saved in high "
                "precision; write or save the masters, and call refresh"
            )
        if content.master is None:
            if content.values is None:
                with torch.inference_mode(False):
                    content.values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return content.values
        master = content.master()
        if master is None:
            raise StaleWeightError(
                f"{self.state.name} is a quantized parameter without values: it is frozen, or the "
                "optimizer that held its fp32 master is gone; its codes can be multiplied and "
                "saved decoded, but not changed: keep the fq.optim optimizer"
            )
        return master

    @property
    def has_values(self) -> bool:
        """High-precision values exist: the weight is neither published nor frozen, and the
        optimizer that took them is alive."""
        master = self._content.master
        return self.state.weight_sync is None and (master is None or master() is not None)

    @property
    def is_frozen(self) -> bool:
        """Its codes are all that is left, for good (`drop_values`)."""
        return self._content.master is _no_values

    @property
    def saved(self) -> Tensor:
        """What a state dict stores: `inner`, or the decoded codes if the values are gone."""
        is_decoded = self._pair.rowwise is not None or self.state.packed
        if self.has_values or self.state.weight_sync is not None or not is_decoded:
            return self.inner
        return self.dequantize()

    def read(self) -> Tensor:
        """The values that the weight stands for, in its dtype."""
        values = self.saved if self.state.weight_sync is None else self.dequantize()
        return values.detach().to(self.dtype)

    def drop_values(self) -> None:
        """Keep the codes alone, for good. They must be current (`refresh_codes`)."""
        self._content.values, self._content.master = None, _no_values

    @property
    def version(self) -> object:
        """Equal for equal values; of the codes if no values are left."""
        content = self._content
        if self.state.weight_sync is not None:
            return self.state.weight_sync.generation
        if not self.has_values:
            return content.versions.get(ROWWISE)
        inner = self.inner
        version = (*content.writes, 0 if inner.is_inference() else inner._version)
        source, when_copied = content.copied
        return source if version == when_copied else version

    def detach_master(self, owner: object = None) -> Tensor:
        """Return the fp32 master [rows, cols], which `owner`, an optimizer, keeps from now on, and
        drop the weight's own values.

        Raises ValueError for a weight on the meta device, or whose master another optimizer has.
        """
        self.check_not_taken()
        values = self.inner
        master = values.detach() if values.dtype is torch.float32 else values.float()
        if master.untyped_storage().nbytes() > master.nbytes:  # rows of a larger tensor
            master = master.clone()
        self.attach_master(master, owner)
        return master

    def attach_master(self, master: Tensor, owner: object) -> None:
        """Refer to the fp32 master that `owner` keeps, in place of own values: a copy of a model
        and its optimizer is rebuilt so."""
        content = self._content
        content.values, content.master, content.writes = None, weakref.ref(master), [object(), 0]
        content.owner = None if owner is None else weakref.ref(owner)
        self.state.pending = True

    def return_master(self, master: Tensor) -> None:
        """Hold the values again: undo `detach_master`, which returned `master`."""
        self._content.values, self._content.master = master, None

    def check_not_taken(self) -> None:
        """Raise ValueError unless the weight holds its values, on a device that is not meta."""
        if self.device.type == "meta":
            raise ValueError(
                f"{self.state.name} is on the meta device; call to_empty() and initialize the "
                "model before making its optimizer"
            )
        if self._content.master is not None or self.state.weight_sync is not None:
            holder = "optimizer" if self.state.weight_sync is None else "weight sync"
            raise ValueError(
                f"another {holder} holds the master of {self.state.name}; give each weight to one "
                "optimizer"
            )

    def is_held_by(self, optimizers: Iterable) -> bool:
        """One of these holds its master."""
        master, owner = self._content.master, self._content.owner
        if master is None or owner is None or master() is None:
            return False
        return any(optimizer is owner() for optimizer in optimizers)

    def _memory(self) -> list[Tensor]:
        return [*super()._memory(), *([self.inner] if self.has_values else [])]

    # Published by a weight sync #

    def attach_sync(self, sync: WeightSync) -> Tensor:
        """Return the values [rows, cols]; from now on `sync` has them and writes the codes
        (`allocate_codes`)."""
        content, quantizer = self._content, self.state.quantizer
        values = self.inner.detach()
        pair = StoragePair(owner=self.state)
        for direction in Direction:
            side = quantizer.sides.get(direction)
            if side is not None and not (quantizer.shares_storage and direction is COLUMNWISE):
                rows, cols = self.shape
                storage = Storage.zeros(side.fmt, direction, (rows, cols), self.dtype, self.device)
                pair.put(direction, storage)
        if quantizer.shares_storage:
            pair.share_rowwise()
        content.values, content.pair, content.quantizer = None, pair, self._quantizer
        self.state.weight_sync = sync
        return values

    def alias_codes_into(self, memory: Tensor, place: int, direction: Direction) -> None:
        """Let the codes of one direction, and of the other if it shares them, be those in the
        sync's memory.

        memory:  uint8; place: their first byte.
        """
        pair, storage = self._pair, self._pair.storage(direction)
        # An alias without the version counter: gathers of other codes do not write these.
        data = storage.data
        data = data.new_empty(0).set_(
            memory.untyped_storage(), place // data.itemsize, data.shape, data.stride()
        )
        pair.put(direction, replace(storage, data=data))
        self._content.borrowed.add(direction)
        if self.state.quantizer.shares_storage:
            pair.share_rowwise()
            self._content.borrowed.add(COLUMNWISE)

    def _own_buffers(self, direction: Direction) -> list[Tensor]:
        borrows = direction in self._content.borrowed
        buffers = self._pair.storage(direction).buffers()
        return [b for name, b in buffers.items() if name != "data" or not borrows]

    def allocate_codes(self, direction: Direction) -> Storage:
        """Allocate the storage of one direction for the sync to write; drops derived layouts."""
        for buffer in self._own_buffers(direction):
            torch_compat.alloc_storage(buffer)
        self._pair.drop_operands()
        return self._pair.storage(direction)

    def free(self, directions: Iterable[Direction]) -> None:
        """Free the memory of published codes until they are written again."""
        for direction in directions:
            for buffer in self._own_buffers(direction):
                torch_compat.free_storage(buffer)
        self._pair.drop_operands()

    # The codes #

    @property
    def _pair(self) -> StoragePair:
        return self._content.pair

    def is_current(self, direction: Direction, version: object = None) -> bool:
        """The codes of this direction are those of the current values and quantizer.

        version: of the values, if the caller has it."""
        content, present = self._content, self._quantizer
        encoder = content.quantizer
        if not self.has_values and encoder is not None:  # they cannot be encoded again
            encoder, present = encoder[:2], present[:2]
        return encoder == present and content.versions.get(direction) == (version or self.version)

    @property
    def _quantizer(self) -> tuple:
        return self.state.quantizer, self.state.compute_dtype, self.state.stale_codes

    def output_buffers(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        """(data, scale) of codes of the same format, for new ones to be written over; or None."""
        content = self._content
        same = content.quantizer is not None and content.quantizer[:2] == self._quantizer[:2]
        storage = content.pair.get(direction) if same else None
        if storage is None or storage.scale is None or not storage.fmt.is_quantized:
            return None
        return storage.data, storage.scale

    @torch.no_grad()
    def store(self, direction: Direction, encoded: Encoded, row0: int) -> None:
        """Set the codes of one direction, in place of those before, so that captured steps read
        them."""
        content, quantizer, version = self._content, self.state.quantizer, self.version
        if content.quantizer != self._quantizer:
            if content.quantizer is None or content.quantizer[:2] != self._quantizer[:2]:
                content.pair = StoragePair(owner=self.state)
            content.quantizer, content.versions = self._quantizer, {}
        pair, encoding = content.pair, quantizer.side(direction).encoding(direction)
        old = pair.get(direction)
        if old is not None and encoded.data is old.data and encoded.scale is old.scale:
            # the encoder wrote in place
            pair.drop_operands()
            if encoded.tensor_amax is not None and old.tensor_amax is not None:
                old.tensor_amax.copy_(encoded.tensor_amax)
        else:
            new = Storage.of(encoded, encoding, tuple(self.shape), self.dtype, row0)
            before = old if isinstance(old, Storage) else None
            stored = _written_over(before, new.map(lambda buffer: buffer.to(self.device)))
            pair.put(direction, stored)
            if quantizer.shares_storage:
                pair.share_rowwise()
        content.versions[direction] = version
        if quantizer.shares_storage:
            content.versions[COLUMNWISE] = version


def _written_over(old: Storage | None, new: Storage) -> Storage:
    """`old` with the bytes of `new` if their buffers agree, since captured steps keep addresses;
    else `new`."""
    if old is None or old.fmt != new.fmt:
        return new
    into = old.buffers()
    if any(
        n not in into or into[n].shape != t.shape or into[n].dtype != t.dtype
        for n, t in new.buffers().items()
    ):
        return new
    for name, buffer in new.buffers().items():
        if buffer.data_ptr() != into[name].data_ptr():  # identity of fp32 is the master itself
            into[name].copy_(buffer)
    return old

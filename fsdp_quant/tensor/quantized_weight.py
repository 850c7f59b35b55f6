# SPDX-License-Identifier: Apache-2.0
"""`QuantizedWeight`: a parameter that is a `QuantizedTensor`; its fp32 master lives in the
optimizer.

[Note: the master of a quantized parameter]
Codes of a weight, or of a dim-0 shard of one, are made from high-precision values of the same rows.
First those are the initial values, which the weight holds. An optimizer takes them as its fp32
master (`detach_master`); from then on the weight holds codes, and refers to the master weakly.
Whatever writes the weight (initialization, a load, a hand) writes these values. `refresh_codes`
encodes them after a step of the optimizer, or at the first gather after a load, from statistics
that ranks reduce there. So the bytes are those of a `WeightShard`'s gather; both directions are
kept, and written over in place.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..gemm import StaleWeightError
from ..ops import native
from ..ops.dispatch import Encoded, Statistics
from ..ops.layout import COMPACT
from ..scaling import RowCuts
from ..storage import Storage
from . import torch_compat
from .aten_table import AtenTable, aten
from .fsdp_hooks import FSDPHooks, managed_of
from .gathered_weight import cuts_of
from .quantized_tensor import QuantizedTensor, StoragePair
from .root_statistics import Sharded, take
from .torch_compat import ManagedParam, tree_map_only
from .traced import NoDynamoGuard
from .weight_shard import WeightShard
from .weight_state import Piece, Shard, WeightState, encode_shards

_TABLE = AtenTable("QuantizedWeight")


class QuantizedWeightState(WeightState):
    """The state of a weight whose parameter is its codes.

    pending:     an event that all ranks share (making, a step of the optimizer, a load) wrote the
                 values, and codes of it are to come. Ranks that hold rows of one tensor must agree
                 on it.
    stale_codes: how often all codes were dropped: what they are made from changed, beside the
                 values.
    """

    holds_codes = True

    def __init__(self, *args):
        super().__init__(*args)
        self.pending, self.stale_codes = True, 0

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"pending": True}

    def _reset(self) -> None:
        super()._reset()
        self.statistics_version = None  # of the values that `statistics` are of
        self.found: tuple[object, dict[Direction, Statistics]] = (None, {})
        # see `root_statistics.take`; of the weights that are refreshed with this one first
        self.collectives: dict = {}

    def set_quantizer(self, quantizer) -> None:
        super().set_quantizer(quantizer)
        self.pending = True
        self.drop_codes()

    def drop_codes(self) -> None:
        """Codes are made again at the next use."""
        self.stale_codes += 1

    def mark_written(self) -> None:
        """Values were written, maybe past their version counter, in an event that all ranks
        share."""
        self.pending, self.found = True, (None, {})
        self.drop_codes()

    def wrapped(self, values: Tensor) -> QuantizedWeight:
        return QuantizedWeight(_Content(self, values), values.shape, values.dtype, values.device)

    def own_codes(self, local: QuantizedWeight, direction: Direction) -> Encoded | None:
        if not self.quantizer.encodings[direction].fmt.is_quantized:
            return None
        storage = local._slots.storage(direction)
        return Encoded(storage.data, storage.scale, storage.tensor_amax, None)


class _Content:
    """What aliases of one shard share.

    values:     high-precision values, until an optimizer takes them; None before anything was
                written.
    master:     weak reference to what took their place; owner: to the optimizer that holds it.
    writes:     (another object for other values, number of writes through the dispatcher).
    slots:      the codes, and `versions` of the values that each direction was made from.
    quantizer:  that made them, the dtype it saw, and `stale_codes` of then.
    copied:     (version of what this is a copy of, own version when it was made).
    is_padding: made to hold another shard and rows behind it; see `_copy_`.
    borrowed:   directions whose codes are in memory of the weight sync, which frees it itself.
    """

    def __init__(self, state: QuantizedWeightState, values: Tensor | None = None):
        self.state, self.values, self.master, self.owner = state, values, None, None
        self.writes = [object(), 0]
        self.slots = StoragePair(owner=state)
        self.versions: dict[Direction, object] = {}
        self.quantizer = None
        self.copied: tuple[object, object] = (None, None)
        self.is_padding = False
        self.borrowed: set[Direction] = set()

    def adopt(self, other: _Content) -> None:
        """Be the same weight: the master has one owner, so no copy of it is made."""
        self.__dict__.update(other.__dict__, is_padding=False)


def _no_values() -> None:
    """In place of a reference to a master."""


class QuantizedWeight(FSDPHooks, QuantizedTensor):
    """A weight, or a dim-0 shard of one, as its codes of both directions; see the module's note.

    shape:  of the shard. dtype: of the initial values, of gradients, and what `dequantize()` gives.

    Norms, and collectives (`DTensor.full_tensor()`), read its values in that dtype: the master's,
    or decoded codes without one.
    """

    _decoded_by = (
        "dequantize(), or of a sharded parameter full_tensor() or to_local().dequantize(),"
    )

    @staticmethod
    def __new__(
        cls, content: _Content, shape, dtype: torch.dtype, device: torch.device
    ) -> QuantizedWeight:
        # FSDP2 views its shards inside a first forward too, and views need version counters
        with torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False
            )
        self._content = content
        return self

    # The master #

    @property
    def state(self) -> QuantizedWeightState:
        return self._content.state

    @property
    def inner(self) -> Tensor:
        """The high-precision values [rows, cols]: the initial ones, or the optimizer's master.

        Raises StaleWeightError where the optimizer that took them is gone.
        """
        content = self._content
        if self.state.weight_sync is not None:
            raise StaleWeightError(
                f"{self.state.name} is published by a weight sync, and its masters lie with the "
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
        """High-precision values of it exist: it is not published or frozen, and the optimizer that
        took them is there."""
        master = self._content.master
        return self.state.weight_sync is None and (master is None or master() is not None)

    @property
    def saved(self) -> Tensor:
        """What a state dict holds: the values `inner`, or where they are gone what the codes decode
        to, in the weight's dtype."""
        if self.has_values or self.state.weight_sync is not None or self._slots.rowwise is None:
            return self.inner
        return self.dequantize()

    def read(self) -> Tensor:
        """The values that it stands for, in its dtype."""
        values = self.saved if self.state.weight_sync is None else self.dequantize()
        return values.detach().to(self.dtype)

    def drop_values(self) -> None:
        """Be codes alone, for good. The codes must be those of the values (`refresh_codes`)."""
        self._content.values, self._content.master = None, _no_values

    @property
    def version(self) -> object:
        """Equal as long as the values are; that of the codes where no values are left."""
        content = self._content
        if self.state.weight_sync is not None:
            return self.state.weight_sync.generation
        if not self.has_values:
            return content.versions.get(ROWWISE)
        inner = self.inner
        own = (*content.writes, 0 if inner.is_inference() else inner._version)
        source, fresh = content.copied
        return source if own == fresh else own

    def detach_master(self, owner: object = None) -> Tensor:
        """The fp32 master [rows, cols], which `owner`, an optimizer, keeps from now on; the
        weight's own values are let go.

        Raises ValueError for a weight without values: one on the meta device, or whose master
        another optimizer has.
        """
        content = self._content
        self.check_not_taken()
        values = self.inner
        master = values.detach() if values.dtype is torch.float32 else values.float()
        if master.untyped_storage().nbytes() > master.nbytes:  # rows of a larger tensor
            master = master.clone()
        self.state.pending = True
        content.values, content.master, content.writes = None, weakref.ref(master), [object(), 0]
        content.owner = None if owner is None else weakref.ref(owner)
        return master

    def return_master(self, master: Tensor) -> None:
        """Be its own values again: what `detach_master` gave."""
        self._content.values, self._content.master = master, None

    def check_not_taken(self) -> None:
        """Raise ValueError unless the weight has its values: not on the meta device, nor with an
        optimizer or a publisher."""
        if self.device.type == "meta":
            raise ValueError(
                f"{self.state.name} is on the meta device; call to_empty() and initialize the "
                "model before making its optimizer"
            )
        if self._content.master is not None or self.state.weight_sync is not None:
            who = "optimizer" if self.state.weight_sync is None else "weight sync"
            raise ValueError(
                f"another {who} holds the master of {self.state.name}; give each weight to one "
                "optimizer"
            )

    def attach_sync(self, sync) -> Tensor:
        """The values [rows, cols]; from now on `sync` has them, and writes the codes
        (`allocate_codes`).

        sync:  has `generation`, and `check_ready(name, direction)`, which products ask before they
               read.
        """
        content, quantizer = self._content, self.state.quantizer
        values = self.inner.detach()
        content.values, content.slots, content.quantizer = (
            None,
            StoragePair(owner=self.state),
            self._quantizer,
        )
        for direction in Direction:
            side = quantizer.sides.get(direction)
            if side is not None and not (quantizer.shares_storage and direction is COLUMNWISE):
                made = Storage.zeros(
                    side.fmt, direction, tuple(self.shape), self.dtype, self.device
                )
                content.slots.put(direction, made)
        if quantizer.shares_storage:
            content.slots.put(COLUMNWISE, content.slots.storage(ROWWISE).as_direction(COLUMNWISE))
        self.state.weight_sync = sync
        return values

    def alias_codes_into(self, memory: Tensor, place: int, direction: Direction) -> None:
        """The codes of one direction, and of the other one that shares them, are those that their
        publisher's memory holds.

        memory:  uint8; place: their first byte.
        """
        slots, storage = self._slots, self._slots.storage(direction)
        data = storage.data  # shares no version counter: a gather of others is no write of these
        data = data.new_empty(0).set_(
            memory.untyped_storage(), place // data.itemsize, data.shape, data.stride()
        )
        slots.put(direction, replace(storage, data=data))
        self._content.borrowed.add(direction)
        if self.state.quantizer.shares_storage:
            slots.put(COLUMNWISE, slots.storage(ROWWISE).as_direction(COLUMNWISE))
            self._content.borrowed.add(COLUMNWISE)

    def _own_buffers(self, direction: Direction) -> list[Tensor]:
        buffers = self._slots.storage(direction).buffers()
        return [
            b
            for name, b in buffers.items()
            if name != "data" or direction not in self._content.borrowed
        ]

    def allocate_codes(self, direction: Direction) -> Storage:
        """The storage of one direction, for its publisher to write; what was laid out of it is
        dropped."""
        for into in self._own_buffers(direction):
            torch_compat.alloc_storage(into)
        self._slots.drop_laid_out()
        return self._slots.storage(direction)

    def free(self, directions: Iterable[Direction]) -> None:
        """Give the memory of published codes back, until they are written again."""
        for direction in directions:
            for buffer in self._own_buffers(direction):
                torch_compat.free_storage(buffer)
        self._slots.drop_laid_out()

    def _memory(self) -> list[Tensor]:
        return [*super()._memory(), *([self.inner] if self.has_values else [])]

    def is_held_by(self, optimizers: Iterable) -> bool:
        """One of these holds its master."""
        master, owner = self._content.master, self._content.owner
        held = None not in (master, owner) and master() is not None
        return held and any(one is owner() for one in optimizers)

    # The codes #

    @property
    def _slots(self) -> StoragePair:
        return self._content.slots

    def is_current(self, direction: Direction, version: object = None) -> bool:
        """The codes of this direction are of the values, and of the quantizer, as they are now;
        version: of the values."""
        content, now = self._content, self._quantizer
        made = content.quantizer
        if not self.has_values and made is not None:  # nothing could make them again
            made, now = made[:2], now[:2]
        return made == now and content.versions.get(direction) == (version or self.version)

    @property
    def _quantizer(self) -> tuple:
        return self.state.quantizer, self.state.compute_dtype, self.state.stale_codes

    def room(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        """(data, scale) of the codes of this format that new ones are written over, or None."""
        content = self._content
        same = content.quantizer is not None and content.quantizer[:2] == self._quantizer[:2]
        storage = content.slots.get(direction) if same else None
        return (
            None
            if storage is None or not storage.fmt.is_quantized
            else (storage.data, storage.scale)
        )

    @torch.no_grad()
    def store(self, direction: Direction, encoded: Encoded, row0: int) -> None:
        """Let these be the codes of one direction; written over those before, so that captured
        steps read them."""
        content, quantizer, version = self._content, self.state.quantizer, self.version
        if content.quantizer != self._quantizer:
            if content.quantizer is None or content.quantizer[:2] != self._quantizer[:2]:
                content.slots = StoragePair(owner=self.state)
            content.quantizer, content.versions = self._quantizer, {}
        slots, encoding = content.slots, quantizer.side(direction).encoding(direction)
        old = slots.get(direction)
        # written in place
        if old is not None and encoded.data is old.data and encoded.scale is old.scale:
            slots.drop_laid_out()
            if encoded.tensor_amax is not None:
                old.tensor_amax.copy_(encoded.tensor_amax)
        else:
            made = Storage.of(encoded, encoding, tuple(self.shape), self.dtype, row0).map(
                self._here
            )
            stored = _written_over(old, made)
            slots.put(direction, stored)
            if quantizer.shares_storage:
                slots.put(COLUMNWISE, stored.as_direction(COLUMNWISE))
        content.versions[direction] = version
        if quantizer.shares_storage:
            content.versions[COLUMNWISE] = version

    def _here(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.device)

    def _current(self) -> StoragePair:
        """The codes for whoever reads a whole weight, made again if its values changed; a shard's
        are those of the last event."""
        whole = (
            self.dim() == 2 and self.shape[0] == self.state.shape[0] and self.device.type != "meta"
        )
        if not whole or self.state.weight_sync is not None:
            return self._slots
        version = self.version
        if self.is_current(ROWWISE, version) and self.is_current(COLUMNWISE, version):
            return self._slots
        with torch_compat.outside_inference_mode(), torch.no_grad():
            if self.state.pending and self.state.spans_parts:
                refresh_codes([self])
            _encode([(self, None)])
        return self._slots

    def refresh_shard(self, managed: ManagedParam) -> None:
        """Codes for a gather: made again where the values were written since."""
        if self.state.pending:
            beside = [m.local for m in torch_compat.managed_params_beside(managed)]
            refresh_codes([t for t in beside if isinstance(t, QuantizedWeight) and t.state.pending])
        _encode([(self, managed)])

    @property
    def rowwise(self) -> EncodedMatrix | None:
        return self._current().rowwise

    @property
    def columnwise(self) -> EncodedMatrix | None:
        return self._current().columnwise

    def matrix_for(self, direction: Direction) -> EncodedMatrix:
        self._current()
        return super().matrix_for(direction)

    def operand_for(self, direction: Direction, layout: str) -> EncodedMatrix:
        """Kept until the codes are written again."""
        slots, made = self._current(), super().operand_for(direction, layout)
        if layout != COMPACT and made.fmt.is_quantized:
            slots.keep(direction, layout, made)
        return made

    # Being a tensor #

    @property
    def data(self) -> QuantizedWeight:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"{self.state.name}.data must be {list(self.shape)}, got {list(value.shape)}"
            )
        with torch.no_grad():
            self.copy_(value)

    def _aliased(self, shape=None) -> QuantizedWeight:
        return QuantizedWeight(
            self._content, self.shape if shape is None else shape, self.dtype, self.device
        )

    def __tensor_flatten__(self):
        layouts, slots = self.state.layouts(self.dtype, self.device), self._current()
        if slots.rowwise is not None and layouts is not None and self.state.weight_sync is None:
            for direction, layout in layouts.items():  # a graph sees the same buffers in every step
                if layout != COMPACT and (direction, layout) not in slots.laid_out:
                    self.operand_for(direction, layout)
        return super().__tensor_flatten__()[0], NoDynamoGuard(self._content)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context, outer_size, outer_stride
    ) -> QuantizedWeight:
        """What a graph is traced with: these buffers, of the same weight."""
        content = _Content(context.value.state)
        content.adopt(context.value)
        content.slots = QuantizedTensor.__tensor_unflatten__(
            inner, NoDynamoGuard(content.slots), outer_size, outer_stride
        )._slots
        like = content.slots.rowwise or content.slots.columnwise
        return QuantizedWeight(content, outer_size, like.dtype, like.data.device)

    def __deepcopy__(self, memo) -> QuantizedWeight:
        """A copy with its own values, whoever holds these."""
        state = copy.deepcopy(self.state, memo)
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = copied = _rebuild(
            self.inner.detach().clone(), state, is_parameter, self.requires_grad
        )
        return copied

    def __reduce_ex__(self, protocol):
        return _rebuild, (
            self.inner.detach(),
            self.state,
            isinstance(self, torch.nn.Parameter),
            self.requires_grad,
        )

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"QuantizedWeight({self.state.name}, {list(self.shape)}, {self.dtype}, {self.state.quantizer})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _TABLE.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if (
            func._schema.is_mutable
            and func.namespace == "aten"
            and func is not aten.record_stream.default
        ):
            return _through_masters(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return _of_values(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _rebuild(
    values: Tensor, state: QuantizedWeightState, is_parameter: bool, requires_grad: bool
) -> QuantizedWeight:
    weight = state.wrapped(values)
    return (
        torch.nn.Parameter(weight, requires_grad)
        if is_parameter
        else weight.requires_grad_(requires_grad)
    )


def _written_over(old: Storage | None, new: Storage) -> Storage:
    """`new` in the buffers of `old` where they fit: a captured step reads and writes the same
    memory."""
    into = {} if old is None or old.fmt != new.fmt else old.buffers()
    if any(
        n not in into or into[n].shape != t.shape or into[n].dtype != t.dtype
        for n, t in new.buffers().items()
    ):
        return new
    for name, buffer in new.buffers().items():
        if buffer.data_ptr() != into[name].data_ptr():  # identity of fp32 is the master itself
            into[name].copy_(buffer)
    return old


def _through_masters(func, args, kwargs):
    """Run an operator that writes on the high-precision values of the weights it takes."""
    weights = {}

    def master_of(weight: QuantizedWeight) -> WeightShard:
        master = WeightShard(weight.inner, weight.state)
        weight._content.writes[1] += bool(func._schema.is_mutable)
        weights[id(master)] = weight, master
        return master

    args, kwargs = tree_map_only(QuantizedWeight, master_of, (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(
        WeightShard, lambda m: weights[id(m)][0] if id(m) in weights else m, result
    )


@_TABLE.implements(
    [
        aten.linalg_vector_norm.default,
        aten._foreach_norm.Scalar,
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dim,
        aten.constant_pad_nd.default,  # as DTensor gathers uneven shards
    ]
)
def _of_values(func, args, kwargs):
    """Run an operator that reads whole weights on their high-precision values."""
    return func(*tree_map_only(QuantizedWeight, lambda w: w.read(), args), **kwargs)


@_TABLE.implements([aten.copy_.default])
def _copy_(func, args, kwargs):
    weight, source = args[:2]
    if not (isinstance(weight, QuantizedWeight) and isinstance(source, QuantizedWeight)):
        return _through_masters(func, args, kwargs)
    theirs = source._content
    if theirs.master is not None and weight._content.is_padding and weight._content.values is None:
        # FSDP2 moves a shard into padded memory: new_zeros, narrow, copy_
        weight._content.adopt(theirs)
        return weight
    return (
        _through_masters(func, args, kwargs)
        if theirs.values is not None or theirs.master is not None
        else weight
    )


@_TABLE.implements([aten.view.default])
def _view(func, args, kwargs):
    weight, size = args
    if list(size) in ([-1], [weight.numel()]):
        return weight._aliased((weight.numel(),))  # how FSDP2 keeps a shard; never read
    return QuantizedTensor.__torch_dispatch__(func, (QuantizedWeight,), args, kwargs)


def _narrow(weight: QuantizedWeight, start: int, length: int) -> QuantizedWeight | QuantizedTensor:
    """Rows of a weight: of its values, or where an optimizer holds those, of its codes."""
    content, shape = weight._content, (length, *weight.shape[1:])
    if weight.state.weight_sync is not None:
        return weight.with_storages(lambda s: s.narrow(start, length), shape)
    if content.master is not None:
        whole = content.master() is not None and (start, length) == (0, content.master().shape[0])
        return (
            weight._aliased(shape)
            if whole
            else weight.with_storages(lambda s: s.narrow(start, length), shape)
        )
    if content.values is None and start == 0:
        return weight._aliased(shape)  # nothing was written: whoever writes first makes the values
    if (start, length) == (0, weight.inner.shape[0]):
        return weight._aliased(shape)
    return weight.state.wrapped(weight.inner.narrow(0, start, length))


@_TABLE.implements([aten.slice.Tensor])
def _slice(func, args, kwargs):
    weight, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    if dim % weight.dim() or step != 1:
        raise NotImplementedError(
            f"{weight!r} can be cut along dim 0, with step 1, only; call dequantize() first"
        )
    start, stop, _ = slice(start, end).indices(weight.shape[0])
    return _narrow(weight, start, max(stop - start, 0))


@_TABLE.implements([aten.narrow.default])
def _narrow_rows(func, args, kwargs):
    """What inference_mode does not take apart into a slice."""
    weight, dim, start, length = args
    return _slice(aten.slice.Tensor, (weight, dim, start, start + length), {})


@_TABLE.implements([aten.split.Tensor, aten.split_with_sizes.default])
def _split(func, args, kwargs):
    weight, sizes, dim = (*args, 0)[:3]
    if weight.state.weight_sync is not None:
        raise ValueError(
            f"{weight.state.name} is published by a weight sync, which writes all of it on every "
            "rank; fully_shard would cut it and never be told of new codes: give a weight to "
            "fully_shard or to a weight sync, not to both"
        )
    if dim % weight.dim():
        raise NotImplementedError(
            f"{weight!r} can be cut along dim 0 only; call dequantize() first"
        )
    if isinstance(sizes, int):
        sizes = [min(sizes, weight.shape[0] - s) for s in range(0, weight.shape[0], sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_narrow(weight, start, size) for start, size in zip(starts, sizes)]


@_TABLE.implements([aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default])
def _new(func, args, kwargs):
    weight = args[0]
    size = args[1] if len(args) > 1 else weight.shape
    dtype, device = (
        kwargs.get("dtype") or weight.dtype,
        torch_compat.numbered(kwargs.get("device") or weight.device),
    )
    content = _Content(weight.state)
    content.is_padding = func is aten.new_zeros.default
    return QuantizedWeight(content, size, dtype, device)


@_TABLE.implements([aten._to_copy.default, aten.clone.default, aten._pin_memory.default])
def _copy(func, args, kwargs):
    """Codes and values on another device or in another dtype, of the same master; a clone has
    values of its own."""
    weight, kwargs = args[0], {**kwargs}
    if weight.state.weight_sync is not None:
        raise NotImplementedError(
            f"{weight.state.name} is published by a weight sync, which would not write a copy of "
            "it; move or cast the model before plan_publisher, or copy what dequantize() gives"
        )
    dtype = kwargs.pop("dtype", None) or weight.dtype
    source, content = weight._content, _Content(weight.state)
    shares = source.master is not None and func is not aten.clone.default
    if shares:
        content.adopt(source)
    elif source.master is not None or source.values is not None:
        content.values = func(
            weight.inner, *args[1:], **kwargs, **({"dtype": dtype} if dtype != weight.dtype else {})
        )
    device = torch_compat.numbered(kwargs.get("device") or weight.device)
    copied = QuantizedWeight(content, weight.shape, dtype, device)
    if dtype == weight.dtype and source.quantizer is not None:
        content.slots = source.slots.map(lambda s: s.map(lambda t: func(t, *args[1:], **kwargs)))
        content.quantizer, content.versions = source.quantizer, dict(source.versions)
        if not shares:
            content.copied = (weight.version, copied.version)
    elif shares:
        content.slots, content.quantizer = StoragePair(owner=weight.state), None
    return copied


# Codes of written values #


def refresh_codes(weights: Sequence[QuantizedWeight]) -> None:
    """Make the codes of quantized parameters whose values were written, from statistics reduced at
    once per shard group.

    Called after each step of their optimizer, and at the first gather after another event. Every
    rank that takes part in the event must call it with the same weights.
    """
    weights = [w for w in weights if w.has_values]
    managed = {id(w.state): managed_of(w.state) for w in weights}
    crossing = [w for w in weights if managed[id(w.state)] is not None or w.state.spans_parts]
    if crossing:
        known = {
            id(w): w.state.found[1] if w.state.found[0] == w.version else None for w in crossing
        }
        take(
            [Sharded(w, w.state, managed[id(w.state)], known[id(w)]) for w in crossing],
            crossing[0].state.collectives,
        )
        for w in crossing:
            w.state.statistics_version = w.version
    for w in weights:
        w.state.pending = False
    _encode([(w, managed[id(w.state)]) for w in weights])


def own_shards(weight: QuantizedWeight, managed: ManagedParam | None) -> list[Shard]:
    """The codes that a quantized parameter is, of each direction.

    Raises StaleWeightError where statistics that cross ranks are those of other values.
    """
    state, version = weight.state, weight.version
    cuts, rank = (
        (RowCuts((0, weight.shape[0])), 0) if managed is None else (cuts_of(managed), managed.rank)
    )
    shards = []
    for direction, encoding in state.quantizer.encodings.items():
        if not encoding.fmt.is_quantized and managed is not None:
            continue
        if state.crosses(cuts, encoding):
            if state.statistics is None or state.statistics_version != version:
                raise StaleWeightError(
                    f"{state.name}, a quantized parameter, changed without an event that every "
                    "rank shares (a step of its optimizer, load_state_dict, set_recipe), and its "
                    "scales span ranks; load the values on every rank"
                )
            known = state.statistics.get((state.name, direction))
        else:
            known = state.found[1].get(direction) if state.found[0] == version else None
        piece = Piece(state, weight.inner, cuts, rank)
        shards.append(Shard(piece, direction, weight.dtype, known, weight.room(direction)))
    return shards


@torch.no_grad()
def _encode(weights: Sequence[tuple[QuantizedWeight, ManagedParam | None]]) -> None:
    """Make the codes of this rank's rows that are of other values; one launch for all that have
    equal encodings."""
    found: dict[torch.device, list[tuple[QuantizedWeight, Shard]]] = {}
    changed = []
    for weight, managed in weights:
        if weight.state.weight_sync is not None or all(
            map(weight.is_current, weight.state.quantizer.encodings)
        ):
            continue
        changed.append((weight, managed))
        stale = [s for s in own_shards(weight, managed) if not weight.is_current(s.direction)]
        found.setdefault(weight.device if managed is None else managed.device, []).extend(
            (weight, s) for s in stale
        )
    for device, of in found.items():
        for (weight, shard), encoded in zip(of, encode_shards([s for _, s in of], device)):
            weight.store(shard.direction, encoded, shard.piece.row0)
    for weight, managed in changed:
        if weight.state.quantizer.is_derived and managed is None:
            derived = weight.state.quantizer.derive_columnwise(
                weight._slots.rowwise, weight.state.compute_dtype
            )
            weight.store(
                COLUMNWISE, Encoded(derived.data, derived.scale, derived.tensor_amax, None), 0
            )


class FusedOutputs(NamedTuple):
    """What a kernel that writes the master of a quantized parameter makes of the new values on its
    way.

    shards:     the directions that it makes, rowwise first, and `encodings` of each.
    blocks:     of each, that its block amaxes are wanted. None: codes are made; else statistics,
                which codes follow from.
    """

    shards: list[tuple[Direction, int]]
    encodings: tuple[Encoding, ...]
    blocks: tuple[bool, ...] | None


def fused_outputs(weight: QuantizedWeight) -> FusedOutputs | None:
    """Codes, where every scale follows from a tile of this rank's rows; else the statistics of
    scales that do not.

    None where no kernel makes either on its way: values that are not rounded to bf16.
    """
    state, managed = weight.state, managed_of(weight.state)
    if state.compute_dtype is not torch.bfloat16 or weight.dim() != 2:
        return None
    cuts, rank = (
        (RowCuts((0, weight.shape[0])), 0) if managed is None else (cuts_of(managed), managed.rank)
    )

    def crosses(e: Encoding) -> bool:
        return e.fmt.scale_leaves_contraction or e.fmt.tensor_scale or cuts.shares_statistics(e)

    taken = {
        d: e
        for d, e in state.quantizer.encodings.items()
        if e.fmt.is_quantized
        and native.takes_group(e, torch.float32, True)
        and (e.fmt.bits == 8 or crosses(e))
    }
    later = {d: e for d, e in taken.items() if crosses(e)}
    chosen = later or taken
    of = tuple(chosen.values())
    blocks = (
        tuple(not e.fmt.tensor_scale or bool(cuts.cut_block_rows(e)) for e in of) if later else None
    )
    return FusedOutputs([(d, cuts.bounds[rank]) for d in chosen], of, blocks) if chosen else None

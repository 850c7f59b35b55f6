# SPDX-License-Identifier: Apache-2.0
"""`QuantizedWeight`: a parameter that is a `QuantizedTensor`; the optimizer holds its fp32 master.

`weight_codes` has the master and the codes, `refresh` encodes the one into the other. Operators
that write run on the master; of those that read, norms and collectives see its values.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import opaque
from ..ops.layout import COMPACT
from ..ops.reference import known
from ..storage import to_storage
from . import torch_compat
from .fsdp_hooks import managed_of
from .quantized_tensor import QuantizedTensor, as_parameter, refused, sent_by_ddp
from .refresh import encode_stale, refresh_codes
from .storage_pair import StoragePair
from .subclasses import AtenTable, NoDynamoGuard, aten
from .torch_compat import ManagedParam, tree_map_only
from .weight_codes import CodesState, WeightCodes, WeightContent
from .weight_shard import WeightShard
from .weight_state import WeightQuantizer, WeightState, is_weight_copied

_TABLE = AtenTable()


class QuantizedWeightState(CodesState):
    """The state of a `QuantizedWeight`."""

    def wrapped(self, values: Tensor, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """A weight of these values, in their dtype if `dtype` is None."""
        torch_compat.let_ddp_send(sent_by_ddp)
        content = WeightContent(self, values)
        return QuantizedWeight(content, values.shape, dtype or values.dtype, values.device)


class QuantizedWeight(WeightCodes):
    """A weight, or a dim-0 shard of one, as its codes of both directions.

    shape:  of the shard. dtype: of the initial values, of gradients, and of `dequantize()`.

    Norms, and collectives (`DTensor.full_tensor()`), read its values in that dtype: the master's,
    or decoded codes without one.
    """

    _decoded_by = (
        "dequantize(), or of a sharded parameter full_tensor() or to_local().dequantize(),"
    )

    @staticmethod
    def __new__(
        cls,
        content: WeightContent | Tensor,
        shape: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> QuantizedWeight:
        if isinstance(content, Tensor):
            return QuantizedTensor(content, requires_grad=requires_grad)  # pyright: ignore
        # FSDP2 views its shards inside a first forward too, and views need version counters
        with torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False
            )
        self._content = content
        return self

    # The master #

    @opaque.traced_as(lambda self: self._pair)
    def _current(self) -> StoragePair:
        """The codes to read: of a whole weight encoded again if its values changed; of a shard
        those of the last event."""
        is_shard = self.dim() != 2 or self.shape[0] != self.state.shape[0]
        if is_shard or self.state.weight_sync is not None:
            return self._pair
        version = self.version
        if self.is_current(ROWWISE, version) and self.is_current(COLUMNWISE, version):
            return self._pair
        with torch_compat.outside_inference_mode(), torch.no_grad():
            if self.state.pending and self.state.spans_parts:
                refresh_codes([self])
            encode_stale([(self, None)])
        return self._pair

    def refresh_shard(self, managed: ManagedParam) -> None:
        """Encode the shard for a gather if its values were written since."""
        if self.is_frozen:
            return
        if self.state.pending:
            shards = [m.local for m in torch_compat.managed_params_of_root(managed)]
            refresh_codes([t for t in shards if isinstance(t, QuantizedWeight) and t.state.pending])
        encode_stale([(self, managed)])

    def buffers_to_send(self) -> list[Tensor] | None:
        """As of a `QuantizedTensor`; if it trains, the values, whose codes follow them."""
        return super().buffers_to_send() if self.is_frozen else [self.inner.detach()]

    def _decoded(self, dtype: torch.dtype | None) -> Tensor:
        """Of a shard that is to be encoded with those of other ranks: the values themselves."""
        self._current()
        if self.state.packed and not self._pair.groups:
            return torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        if self.state.weight_sync is not None or self.is_frozen or self.is_current(ROWWISE):
            return super()._decoded(dtype)
        return self.read().to(dtype or self.dtype)

    @opaque.traced_as(QuantizedTensor.operand_for)
    def operand_for(
        self,
        direction: Direction,
        layout: str,
        quantizer: WeightQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> EncodedMatrix:
        """As `QuantizedTensor.operand_for`, cached until the codes are written again."""
        pair = self._current()
        operand = super().operand_for(direction, layout, quantizer, compute_dtype)
        if layout != COMPACT and operand.fmt.is_quantized:
            pair.cache_operand(direction, layout, operand)
        return operand

    # As a tensor #

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"{self.state.name}.data must be {list(self.shape)}, got {list(value.shape)}"
            )
        with torch.no_grad():
            self.copy_(value)

    def _aliased(self, shape: Sequence[int] | None = None) -> QuantizedWeight:
        return QuantizedWeight(
            self._content, self.shape if shape is None else shape, self.dtype, self.device
        )

    def _narrow(self, dim: int, start: int, length: int) -> QuantizedTensor:
        """Rows of the weight: of its values, or of its codes if an optimizer holds the values."""
        if dim % self.dim():
            raise refused(f"{self!r} can be cut along dim 0 only")
        content, shape = self._content, (length, *self.shape[1:])
        if self.state.weight_sync is None:
            values = content.values if content.master is None else content.master()
            kept = None if values is None else values.shape[0]
            if self.is_frozen:
                pair = content.pair
                kept = len(pair.groups) if self.state.packed else pair.first.shape[0]
            if (start, length) == (0, kept) or (self.is_frozen and content.is_padding):
                return self._aliased(shape)  # codes are copied into padding next
            if content.master is None and values is None and start == 0:
                return self._aliased(shape)  # the first write allocates the values
            if content.master is None:
                return self.state.wrapped(self.inner.narrow(0, start, length))
        return self.with_storages(lambda s: to_storage(s).narrow(start, length), shape)

    def __tensor_flatten__(self):
        layouts, pair = self.state.layouts(self.dtype, self.device), self._current()
        if pair.rowwise is not None and layouts is not None and self.state.weight_sync is None:
            for direction, layout in layouts.items():  # graphs see the same buffers in every step
                if layout != COMPACT and (direction, layout) not in pair.operands:
                    self.operand_for(direction, layout)
        return super().__tensor_flatten__()[0], NoDynamoGuard(weakref.ref(self._content))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context, outer_size, outer_stride
    ) -> QuantizedWeight:
        """The same weight over the buffers that a graph is traced with."""
        shared = context.value()
        content = WeightContent(shared.state)
        content.adopt(shared)
        if content.values is not None:  # dynamo keeps what it traced
            content.values, content.master = None, weakref.ref(content.values)
        codes = QuantizedTensor(pair=content.pair, shape=outer_size)
        content.pair = QuantizedTensor.__tensor_unflatten__(
            inner, NoDynamoGuard(codes._facts), outer_size, outer_stride
        )._pair
        device = next(iter(inner.values())).device
        return QuantizedWeight(content, outer_size, content.pair.first.dtype, device)

    def __deepcopy__(self, memo: dict) -> Tensor:
        """A copy with its own values, even if an optimizer holds these."""
        state, is_parameter = copy.deepcopy(self.state, memo), isinstance(self, torch.nn.Parameter)
        values = self.inner.detach().clone()
        copied = _rebuild(values, state, is_parameter, self.requires_grad, self.dtype)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        """A parameter, which a module holds, is pickled as one; others as their values."""
        if not isinstance(self, torch.nn.Parameter):
            return self.saved.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)
        return _rebuild, (self.inner.detach(), self.state, True, self.requires_grad, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _TABLE.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if (
            func._schema.is_mutable
            and func.namespace == "aten"
            and func is not aten.record_stream.default
        ):
            return _through_masters(func, *args, **kwargs)
        if func.namespace == "_c10d_functional":
            return _on_values(func, *args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _rebuild(
    values: Tensor,
    state: CodesState,
    is_parameter: bool,
    requires_grad: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dtype: of the weight, whose values may be an fp32 master; None: theirs."""
    return as_parameter(state.wrapped(values, dtype), is_parameter, requires_grad)


def _through_masters(func, *args, **kwargs):
    """Run an operator that writes on the high-precision values of its weights."""
    weights: dict[int, tuple[QuantizedWeight, WeightShard]] = {}

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
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.constant_pad_nd.default,  # how DTensor gathers uneven shards
)
def _on_values(func, *args, **kwargs):
    """Run an operator that reads whole weights on their high-precision values."""
    return func(*tree_map_only(QuantizedWeight, lambda w: w.read(), args), **kwargs)


@register_sharding(aten.dequantize.self)
def _dequantize_rows(x: Tensor) -> list[tuple[list[Placement], list[Placement]]]:
    """Each rank decodes its part of a DTensor."""
    placements = [Replicate(), *(Shard(dim) for dim in range(x.ndim))]
    return [([placement], [placement]) for placement in placements]


@_TABLE.implements(aten.dequantize.self)
def _dequantize(func, weight):
    """Values in fp32, as torch decodes its own quantized tensors; of `DTensor.dequantize()`."""
    return weight._decoded(torch.float32)


@_TABLE.implements(aten.copy_.default)
def _copy_(func, weight, source, non_blocking=False):
    if isinstance(weight, QuantizedWeight) and weight.is_frozen:
        if weight._content.is_padding and type(source) is QuantizedTensor:
            codes = source._pair.map(lambda s: to_storage(s).map(torch.clone))
            return take_codes(weight, codes.joined() if weight.state.packed else codes)
        if weight._stands_for(source):
            return weight
    if not (isinstance(weight, QuantizedWeight) and isinstance(source, QuantizedWeight)):
        return _through_masters(func, weight, source, non_blocking)
    content = source._content
    if content.master is not None and weight._content.is_padding and weight._content.values is None:
        # FSDP2 moves a shard into padded memory: new_zeros, narrow, copy_
        weight._content.adopt(content)
        return weight
    if content.values is None and content.master is None:  # nothing was written yet
        return weight
    return _through_masters(func, weight, source, non_blocking)


def take_codes(weight: QuantizedWeight, codes: StoragePair) -> QuantizedWeight:
    """The weight with compact codes, which are all that it has from now on."""
    content, codes.owner = weight._content, weight.state
    content.pair, content.quantizer = codes, weight._quantizer
    content.versions, content.is_padding = dict.fromkeys(Direction, object()), False
    weight.drop_values()
    return weight


def frozen_shard(frozen: Tensor, state: WeightState, size: torch.Size) -> QuantizedWeight:
    """Rows of a weight, or matrices of a packed one, whose codes `take_codes` gives it."""
    content = WeightContent(state.as_kind(QuantizedWeightState))
    return QuantizedWeight(content, size, frozen.dtype, frozen.device)


def padding(frozen: QuantizedTensor, size: torch.Size) -> QuantizedWeight:
    """Memory of this size for the rows of a frozen weight that FSDP2 cuts; it has no codes yet."""
    state = known(frozen._pair.owner, "the state of a frozen weight")
    weight = frozen_shard(frozen, state, size)
    take_codes(weight, StoragePair() if state.packed else frozen._narrow(0, 0, 0)._pair)
    weight._content.is_padding = True
    return weight


@_TABLE.implements(aten.view.default)
def _view(func, weight, size):
    if list(size) in ([-1], [weight.numel()]):
        return weight._aliased((weight.numel(),))  # FSDP2 keeps this and never reads it
    return QuantizedTensor.__torch_dispatch__(func, (QuantizedWeight,), (weight, size))


@_TABLE.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func, weight, sizes, dim=0):
    state = weight.state
    if state.weight_sync is not None:
        raise ValueError(
            f"{state.name} is published by a weight sync, which writes all of it on every "
            "rank; fully_shard would cut it and not see new codes: give a weight to "
            "fully_shard or to a weight sync, not to both"
        )
    return QuantizedTensor.__torch_dispatch__(func, (QuantizedWeight,), (weight, sizes, dim))


@_TABLE.implements(aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default)
def _new(func, weight, size=None, dtype=None, device=None, **ignored):
    """Memory of a weight for nn.Module.to_empty, and for FSDP2, which moves a parameter that it
    cuts and short shards into padded memory; else a plain tensor."""
    size, managed = weight.shape if size is None else torch.Size(size), managed_of(weight.state)
    pads = func is aten.new_zeros.default and (
        size[1:] == weight.shape[1:] if managed is None else managed.pads(weight.shape, size)
    )
    if not pads and not is_weight_copied():
        return QuantizedTensor.__torch_dispatch__(
            func, (QuantizedWeight,), (weight, size), {"dtype": dtype, "device": device}
        )
    content = WeightContent(weight.state)
    content.is_padding = pads
    device = torch_compat.with_index(device or weight.device)
    return QuantizedWeight(content, size, dtype or weight.dtype, device)


@_TABLE.implements(aten._to_copy.default, aten.clone.default, aten._pin_memory.default)
def _copy(func, weight, *args, dtype=None, **kwargs):
    """Copy codes and values for nn.Module._apply, and to the device of FSDP2: such a copy shares
    the master, but a clone. Other copies are plain tensors of the values."""
    if weight.state.weight_sync is not None:
        raise NotImplementedError(
            f"{weight.state.name} is published by a weight sync, which would not write a copy of "
            "it; move or cast the model before plan_weight_sync, or copy what dequantize() gives"
        )
    device = torch_compat.with_index(kwargs.get("device") or weight.device)
    moves = device != weight.device or func is aten._pin_memory.default
    if not (is_weight_copied() or (moves and dtype in (None, weight.dtype))):
        cast = {} if dtype is None else {"dtype": dtype}
        return func(weight.read(), *args, **cast, **kwargs)
    dtype = dtype or weight.dtype
    source, content = weight._content, WeightContent(weight.state)
    shares = source.master is not None and func is not aten.clone.default
    if shares:
        content.adopt(source)
    elif source.master is not None or source.values is not None:
        content.values = func(
            weight.inner, *args, **kwargs, **({"dtype": dtype} if dtype != weight.dtype else {})
        )
    copied = QuantizedWeight(content, weight.shape, dtype, device)
    if dtype == weight.dtype and source.quantizer is not None:
        content.pair = source.pair.map(lambda s: s.map(lambda t: func(t, *args, **kwargs)))
        content.quantizer, content.versions = source.quantizer, dict(source.versions)
        if not shares:
            content.copied = (weight.version, copied.version)
    elif shares:
        content.pair, content.quantizer = StoragePair(owner=weight.state), None
    return copied

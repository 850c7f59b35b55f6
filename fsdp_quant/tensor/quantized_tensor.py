# SPDX-License-Identifier: Apache-2.0
"""`QuantizedTensor`: the one quantized tensor subclass, whatever its formats.

Invariants
- It holds at most one `Storage` per direction; an absent direction is None. The logical shape is
  that of the high-precision tensor, [.., cols]; the storages are [rows, cols], with leading dims
  flattened.
- All state is in the storages: aliases (detach, view, nn.Parameter) share one `StoragePair`, so all
  of them see a refill of the buffers.
- No operator decodes silently. Those in the table below move or slice bytes; any other raises and
  names `dequantize()`.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..encoded_matrix import BUFFERS, EncodedMatrix
from ..formats import ROWWISE, Direction
from ..ops import opaque
from ..ops.layout import LAYOUTS
from ..storage import Storage, to_layout, to_storage
from . import torch_compat
from .storage_pair import StoragePair, name_in_graphs
from .subclasses import AtenTable, NoDynamoGuard, aten, stable_text
from .weight_state import WeightQuantizer, WeightState

_TABLE = AtenTable()


_ADDRESSES_ARE_NAMES = contextvars.ContextVar("fsdp_quant_addresses_are_names", default=False)


@contextlib.contextmanager
def addresses_are_names() -> Iterator[None]:
    """Let `data_ptr()` of quantized tensors return the address of their codes, to identify them;
    nobody may read or write there."""
    token = _ADDRESSES_ARE_NAMES.set(True)
    try:
        yield
    finally:
        _ADDRESSES_ARE_NAMES.reset(token)


class QuantizedTensor(Tensor):
    """Codes and scales of a tensor, one `Storage` per direction; see the module's invariants.

    rowwise, columnwise:  `Storage` or None; at least one. Formats may differ.
    shape:                logical shape (default: the storages' [rows, cols]).

    >>> t = fq.Quantizer("mxfp8").quantize(torch.ones(32, 64))
    >>> t.shape, t.dequantize().sum().item()
    (torch.Size([32, 64]), 2048.0)
    """

    _pair: StoragePair
    _decoded_by = "dequantize()"

    if TYPE_CHECKING:

        def __init__(self, *args, **kwargs): ...

    @staticmethod
    def __new__(
        cls,
        rowwise: EncodedMatrix | Tensor | None = None,
        columnwise: EncodedMatrix | None = None,
        *,
        shape: Sequence[int] | None = None,
        pair: StoragePair | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        if isinstance(rowwise, Tensor):  # accelerate rebuilds a parameter by its class
            return torch.nn.Parameter(rowwise, requires_grad)  # pyright: ignore
        pair = pair or StoragePair(rowwise, columnwise)
        pairs = pair.groups or [pair]
        storages = [s for s in (pairs[0].rowwise, pairs[0].columnwise) if s is not None]
        if not storages:
            raise ValueError(
                "a QuantizedTensor needs a rowwise or a columnwise storage, got neither"
            )
        first = storages[0]
        if any(tuple(s.shape) != tuple(first.shape) or s.dtype != first.dtype for s in storages):
            raise ValueError(
                f"the storages of one tensor must agree in shape and dtype, got {storages}"
            )
        shape = torch.Size(first.shape if shape is None else shape)
        rows = sum(p.first.shape[0] for p in pairs)
        if prod(shape) != rows * first.shape[1] or (shape[-1:] != (first.shape[1],)):
            raise ValueError(
                f"logical shape {list(shape)} does not flatten to the storages' {list(first.shape)}"
            )
        memory = next(iter(pair.shown.values())) if pair.shown else first.data
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=memory.device, requires_grad=False
        )
        self._pair = pair
        return self

    @property
    def rowwise(self) -> EncodedMatrix | None:
        """What forwards multiply: a `Storage`, a GEMM operand of a frozen weight, or None."""
        return self._current().rowwise

    @property
    def columnwise(self) -> EncodedMatrix | None:
        """What backwards multiply, or None."""
        return self._current().columnwise

    def storage_for(self, direction: Direction) -> Storage:
        """The compact storage of that direction; raises as `matrix_for` does."""
        return to_storage(self.matrix_for(direction))

    def matrix_for(self, direction: Direction) -> EncodedMatrix:
        """`rowwise` or `columnwise`.

        Raises ValueError if the tensor has none, StaleWeightError if it was freed.
        """
        return self._readable(self._current().matrix(direction, self))

    @opaque.traced_as(lambda self, storage: storage)  # a graph may read the direction later
    def _readable(self, storage: EncodedMatrix) -> EncodedMatrix:
        owner = self._pair.owner
        if owner is not None and owner.weight_sync is not None:
            owner.weight_sync.check_ready(owner.name, storage.direction)
        return storage.readable("" if owner is None else owner.name)

    def operand_for(
        self,
        direction: Direction,
        layout: str,
        quantizer: WeightQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> EncodedMatrix:
        """The codes of a direction in the layout (`ops.layout`) that a GEMM reads. A graph that is
        traced reads the buffers when it runs, after FSDP2 filled them.

        quantizer:  derives columnwise codes that are not stored (`HybridQuantizer.columnwise_of`).

        Raises as `matrix_for` does.
        """
        pair = self._current()
        matrix = pair.operands.get((direction, layout)) or pair.get(direction)
        if matrix is None and quantizer and (quantizer.is_derived or quantizer.shares_storage):
            matrix = quantizer.columnwise_of(self.storage_for(ROWWISE), compute_dtype=compute_dtype)
        if matrix is None:
            matrix = self.matrix_for(direction)
        return to_layout(self._readable(matrix), layout)

    def _current(self) -> StoragePair:
        """The storages to read."""
        return self._pair

    @property
    def is_frozen(self) -> bool:
        """A module's parameter of `fq.freeze`, which no FSDP2 gathered."""
        return self._pair.owner is not None and self._pair.owner.gathered is None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in high precision, decoded from the rowwise storage unless it is freed.

        dtype:    of the result (default: of the tensor).

        The gradient of the result is that of the tensor: decoding is not differentiated.
        Raises StaleWeightError if every storage was freed.
        """
        return _Decode.apply(self, dtype)  # pyright: ignore[reportReturnType]

    def _stands_for(self, values: Tensor) -> bool:
        """The values are those of the codes: of a state dict that frozen weights filled."""
        same = type(values) is Tensor and values.shape == self.shape
        return same and torch.equal(self._decoded(values.dtype), values.to(self.device))

    def _decoded(self, dtype: torch.dtype | None) -> Tensor:
        if self._pair.groups:
            parts = torch.cat([part._decoded(dtype) for part in self._groups()])
            return parts.view(self.shape)
        return self._pair.readable[0].dequantize(dtype).reshape(self.shape)

    def data_ptr(self) -> int:
        """Raise ValueError, because the memory holds codes and no `dtype` values; inside
        `addresses_are_names`, return the address of the codes."""
        if _ADDRESSES_ARE_NAMES.get():
            return self._memory()[0].data_ptr()
        raise ValueError(
            f"{self!r} has no address of {self.dtype} values: it is codes; call dequantize() for "
            "values, .rowwise.data.data_ptr() for the codes, and `is` to compare tensors"
        )

    def storage(self) -> torch.TypedStorage:
        """Raise ValueError: savers ask for it, of whole models, to write values."""
        raise ValueError(
            f"{_named((self,))} has no storage of {self.dtype} values: it is codes. Save adapters "
            "alone, call fq.unfreeze(model) before a model is saved as values, or fq.export(model, "
            "folder); torch.save keeps codes (save_state(.., safe_serialization=False))"
        )

    def share_memory_(self) -> QuantizedTensor:
        """Move every buffer to shared memory, in place."""
        for buffer in self._memory():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(buffer.is_shared() for buffer in self._memory())

    def _memory(self) -> list[Tensor]:
        """Every buffer, to be shared between processes."""
        return _buffers(self)

    def _groups(self) -> list[QuantizedTensor]:
        pair = self._pair
        if pair.shown and not isinstance(pair.groups[0].first.data, Tensor):
            pair = pair.over(pair.shown)  # of a graph that is traced
        return [QuantizedTensor(pair=part) for part in pair.groups]

    def with_storages(
        self, fn: Callable[[EncodedMatrix], EncodedMatrix], shape: Sequence[int] | None = None
    ) -> QuantizedTensor:
        """A tensor over fn(storage) of each direction."""
        return QuantizedTensor(
            pair=self._pair.map(fn), shape=self.shape if shape is None else shape
        )

    def _narrow(self, dim: int, start: int, length: int) -> QuantizedTensor:
        """Rows [start, start + length) of a 2-D tensor, or packed matrices."""
        pairs = self._pair.groups
        if (start, length) == (0, self.shape[dim]) and not pairs:
            return self._aliased()
        if dim == 0 and pairs:
            part = StoragePair(owner=self._pair.owner, groups=pairs[start : start + length])
            return QuantizedTensor(pair=part, shape=(length, *self.shape[1:]))
        if dim % self.dim() != 0 or self.dim() != 2:
            raise refused(f"{self!r} can be cut along dim 0 of a 2-D tensor only")
        return self.with_storages(
            lambda s: to_storage(s).narrow(start, length), (length, self.shape[1])
        )

    def buffers_to_send(self) -> list[Tensor] | None:
        """What another rank may write: the bytes of its codes, each once. Drops what was derived
        from them. None unless it is a frozen parameter."""
        if not self.is_frozen:
            return None
        found: dict[int, Tensor] = {}
        for pair in self._pair.groups or [self._pair]:
            pair.drop_operands()
            for direction in Direction:
                if (matrix := pair.get(direction)) is not None:
                    found |= {t.data_ptr(): t for t in matrix.buffers().values()}
        return [t.view(-1).view(torch.uint8) for t in found.values()]

    def _aliased(self, shape: Sequence[int] | None = None) -> QuantizedTensor:
        return QuantizedTensor(pair=self._pair, shape=self.shape if shape is None else shape)

    def _shown_buffers(self) -> dict[str, Tensor]:
        if self._pair.shown is None:
            self._pair.shown = {
                f"{name}_{b}": t
                for name, s in self._pair.operands_in_graphs().items()
                for b, t in s.buffers().items()
            }
        return self._pair.shown

    def __tensor_flatten__(self):
        """The buffers that GEMMs read, of both directions; FSDP2 fills and frees each per pass."""
        if self._pair.groups and self._pair.shown is None:
            raise NotImplementedError(
                f"{self!r} is of groups that are each quantized by themselves, which torch.compile "
                "does not take apart; give a compiled region their values"
            )
        return list(self._shown_buffers()), NoDynamoGuard(self._facts)

    @property
    def _facts(self) -> tuple[StoragePair, weakref.ref[WeightState] | None]:
        """The storages without buffers, and a weak reference to their owner."""
        owner = self._pair.owner
        return self._pair.without_buffers(), None if owner is None else weakref.ref(owner)

    _stable_hash_for_caching = stable_text

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context, outer_size, outer_stride
    ) -> QuantizedTensor:
        """The tensor over other buffers. Codes whose operands are shown in their place have none,
        since GEMMs do not read them."""
        pair, reference = context.value
        owner = None if reference is None else reference()
        if pair.groups:
            packed = replace(pair, owner=owner, shown=dict(inner))
            return QuantizedTensor(pair=packed, shape=outer_size)
        rebuilt = {
            name: s.with_buffers(
                {b: inner[f"{name}_{b}"] for b in s.buffers() if f"{name}_{b}" in inner}
            )
            for name, s in pair.operands_in_graphs().items()
        }
        result = StoragePair(
            rebuilt.get("rowwise", pair.rowwise), rebuilt.get("columnwise", pair.columnwise), owner
        )
        if pair.shares_data:
            result.share_rowwise()
        for d, layout in pair.operands:
            result.cache_operand(d, layout, rebuilt[name_in_graphs(d, layout)])
        result.shown = dict(inner)
        return QuantizedTensor(pair=result, shape=outer_size)

    def __reduce_ex__(self, protocol):
        is_parameter, pair = isinstance(self, torch.nn.Parameter), self._pair.map(lambda s: s)
        sides = [(of.rowwise, of.columnwise) for of in pair.groups or [pair]]
        facts = tuple(self.shape), self.requires_grad, is_parameter, bool(pair.groups)
        return _rebuild, (sides, *facts)

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.with_storages(lambda s: s.map(torch.clone))
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = as_parameter(copied, is_parameter, self.requires_grad)
        return memo[id(self)]

    def __repr__(self, *, tensor_contents=None) -> str:
        pair = self._pair.groups[0] if self._pair.groups else self._pair
        sides = ", ".join(f"{d.value}={s.fmt}" for d in Direction if (s := pair.get(d)) is not None)
        return f"QuantizedTensor({list(self.shape)}, {sides}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled() and not func._schema.is_mutable:
            # views need version counters, and composite operators are not decomposed inside
            with torch_compat.outside_inference_mode():
                return func(*args, **(kwargs or {}))
        handler = _TABLE.get(func)
        if handler is None and func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} would write {_named(args)} whose codes nothing trains; call "
                "fq.unfreeze(model) before the optimizer is made, which gives frozen layers their "
                f"values back, or write to what {cls._decoded_by} returns"
            )
        if handler is None:
            raise NotImplementedError(
                f"{func} is not defined on {_named(args)} and will not decode it silently; call "
                f"{cls._decoded_by} first if high-precision values are what you want, or leave the "
                "layer out of fq.convert (skip=) if another module reads its weight; adapters of "
                "PEFT that read a frozen base (DoRA, target_parameters of experts) want "
                "fq.integrations.peft.freeze after get_peft_model, those that write or multiply it "
                "(merging, HRA, SHiRA) fq.unfreeze(model)"
            )
        return handler(func, *args, **(kwargs or {}))


def sent_by_ddp(parameter: Tensor) -> list[Tensor] | None:
    """What `torch_compat.let_ddp_send` sends of a parameter."""
    return parameter.buffers_to_send() if isinstance(parameter, QuantizedTensor) else None


class _Decode(torch.autograd.Function):
    """Values of a quantized tensor, whose gradient passes straight through."""

    @staticmethod
    def forward(tensor: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        return tensor._decoded(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def _named(args: Sequence) -> str:
    """The first QuantizedTensor of the arguments, by the name of its weight if it has one."""
    tensors = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    codes = next((t for t in tensors if isinstance(t, QuantizedTensor)), None)
    pair = None if codes is None else codes.__dict__.get("_pair")
    if pair is None or pair.owner is None:
        return "a QuantizedTensor"
    return f"{pair.owner.name}, a QuantizedTensor,"


def refused(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what}; call dequantize() first")


def _buffer_property(name: str) -> property:
    return property(lambda self: (self._pair.shown or self._shown_buffers())[name])


for _direction in Direction:
    for _layout in LAYOUTS:
        for _name in BUFFERS:
            _shown = f"{name_in_graphs(_direction, _layout)}_{_name}"
            setattr(QuantizedTensor, _shown, _buffer_property(_shown))


def as_parameter(tensor: Tensor, is_parameter: bool, requires_grad: bool) -> Tensor:
    """`tensor`, or an nn.Parameter of it, with `requires_grad`."""
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild(
    matrices: list[tuple[EncodedMatrix | None, EncodedMatrix | None]],
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    is_packed: bool,
) -> Tensor:
    """A tensor from a file. Raises ValueError for arguments that no QuantizedTensor writes."""
    given = ((d, s) for sides in matrices for d, s in zip(Direction, sides) if s is not None)
    fits = all(isinstance(side, EncodedMatrix) and side.direction is d for d, side in given)
    sizes = shape if isinstance(shape, tuple) else (None,)
    if not fits or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(
            "a QuantizedTensor is a shape, and a Storage or None by direction of each matrix, got "
            f"{shape!r} and {matrices!r}"
        )
    pairs = [StoragePair(*sides) for sides in matrices]
    pair = StoragePair(groups=pairs).joined() if is_packed else pairs[0]
    return as_parameter(QuantizedTensor(pair=pair, shape=shape), is_parameter, requires_grad)


@_TABLE.implements(aten.detach.default, aten.alias.default)
def _detach(func, tensor):
    return tensor._aliased()


@_TABLE.implements(aten.view.default, aten._unsafe_view.default)
def _view(func, tensor, size):
    size = list(size)
    if -1 in size:
        known = prod(s for s in size if s != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    if (
        not size
        or size[-1] != tensor.shape[-1]
        or (tensor._pair.groups and size != list(tensor.shape))
    ):
        raise refused(f"a view of {tensor!r} must keep its last dim, got {size}")
    return tensor._aliased(tuple(size))


@_TABLE.implements(aten.as_strided.default)
def _as_strided(func, tensor, size, stride, storage_offset=0):
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or storage_offset:
        got = f"size {list(size)}, stride {list(stride)}"
        raise refused(f"as_strided of {tensor!r} can only keep its shape and strides, got {got}")
    return tensor._aliased()


@_TABLE.implements(aten.slice.Tensor)
def _slice(func, tensor, dim=0, start=None, end=None, step=1):
    if step != 1:
        raise refused(f"a slice of {tensor!r} must have step 1, got {step}")
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor._narrow(dim, first, max(stop - first, 0))


@_TABLE.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func, tensor, sizes, dim=0):
    if isinstance(sizes, int):
        total = tensor.shape[dim]
        sizes = [min(sizes, total - s) for s in range(0, total, sizes)]
    starts = [0, *itertools.accumulate(sizes)]
    return [tensor._narrow(dim, start, size) for start, size in zip(starts, sizes)]


@_TABLE.implements(aten.unbind.int)
def _unbind(func, tensor, dim=0):
    if dim != 0 or not tensor._pair.groups:
        raise refused(f"{tensor!r} can be unbound along dim 0 of packed matrices only")
    return tensor._groups()


@_TABLE.implements(aten.select.int)
def _select(func, tensor, dim, index):
    if dim != 0 or not tensor._pair.groups:
        return _unbind(func, tensor, dim)[index]
    return QuantizedTensor(pair=tensor._pair.groups[index])


@_TABLE.implements(aten.clone.default)
def _clone(func, tensor, memory_format=None):
    return tensor.with_storages(lambda s: s.map(torch.clone))


@_TABLE.implements(aten._to_copy.default)
def _to_copy(func, tensor, dtype=None, device=None, non_blocking=False, **ignored):
    if dtype not in (None, tensor.dtype):
        raise NotImplementedError(
            f"{_named((tensor,))} cannot be cast to {dtype} without decoding it; "
            "call dequantize(), or fq.unfreeze(model) before the model is cast; adapters of PEFT "
            "that read a frozen base when they are made (PiSSA, OLoRA) want it frozen after that: "
            "fq.unfreeze(model), then fq.integrations.peft.freeze"
        )
    device = device or tensor.device
    return tensor.with_storages(
        lambda s: s.map(lambda t: t.to(device, non_blocking=non_blocking, copy=True))
    )


@_TABLE.implements(
    aten.new_zeros.default, aten.zeros_like.default, aten.new_empty.default, aten.empty_like.default
)
def _plain_like(func, tensor, size=None, dtype=None, device=None, **ignored):
    """Plain tensors: gradients and optimizer states are never quantized. FSDP2 cuts a weight of
    fq.freeze into memory of new_zeros."""
    shape = tensor.shape if size is None else torch.Size(size)
    owner = tensor._pair.owner if type(tensor) is QuantizedTensor and tensor.is_frozen else None
    is_cut = func is aten.new_zeros.default and shape[1:] == tensor.shape[1:]
    if is_cut and owner is not None and owner.padding is not None:
        return owner.padding(tensor, shape)
    make = torch.zeros if "zeros" in str(func) else torch.empty
    return make(shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


@_TABLE.implements(aten.copy_.default)
def _copy_(func, target, source, non_blocking=False):
    """Copy the bytes of a tensor with equal storages."""
    if not isinstance(target, QuantizedTensor):
        raise NotImplementedError(
            f"{source!r} cannot be copied into another tensor without decoding it: call "
            "dequantize(), or fq.unfreeze(model) before its state dict is read, or load_state_dict "
            "with assign=True, which keeps codes; where fully_shard "
            "does so, of a weight of fq.freeze, pass ignored_params={it, ..} to every fully_shard"
        )
    if not isinstance(source, QuantizedTensor):
        if target.is_frozen and target._stands_for(source):
            return target
        raise NotImplementedError(
            f"{target!r} holds codes and no quantizer, so it cannot encode a {source.dtype} "
            "tensor; call fq.unfreeze(model) before other values are loaded into frozen layers, "
            "HybridQuantizer.update(tensor, values) with the quantizer that encoded it, or write "
            "to what dequantize() returns"
        )
    geometries = [[s.geometry for s in _storages(t)] for t in (target, source)]
    are_equal = target.shape == source.shape and geometries[0] == geometries[1]
    if not are_equal or not (target._pair.owner is None or target.is_frozen):
        raise ValueError(
            f"copy_ moves the bytes of equal storages, got {target!r} from {source!r}; quantize "
            "into it with HybridQuantizer.update(tensor, source.dequantize()), or load frozen "
            "weights that were saved in another dtype with load_state_dict(.., assign=True)"
        )
    for into, buffer in zip(_buffers(target), _buffers(source)):
        into.copy_(buffer, non_blocking=non_blocking)
    target._pair.drop_operands()
    return target


def _storages(tensor: QuantizedTensor) -> list[EncodedMatrix]:
    """Every readable storage, of all parts."""
    return [s for pair in (tensor._pair, *tensor._pair.groups) for s in pair.readable]


def _buffers(tensor: QuantizedTensor) -> list[Tensor]:
    return [buffer for s in _storages(tensor) for buffer in s.buffers().values()]


@_TABLE.implements(aten.record_stream.default)
def _record_stream(func, tensor, stream):
    for buffer in _buffers(tensor):
        buffer.record_stream(stream)


@_TABLE.implements(aten.is_pinned.default)
def _is_pinned(func, tensor, device=None):
    return all(buffer.is_pinned() for buffer in _buffers(tensor))


torch.serialization.add_safe_globals([_rebuild])

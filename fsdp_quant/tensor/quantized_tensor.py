# SPDX-License-Identifier: Apache-2.0
"""`QuantizedTensor`: the one quantized tensor subclass, whatever its formats.

Invariants
- It holds at most one `Storage` a direction; an absent direction is None. The logical shape is that
  of the high-precision tensor it stands for, [.., cols], and its storages are [rows, cols] with the
  leading dims flattened.
- State lives in the storages alone: aliases (detach, view, nn.Parameter) share one `StoragePair`
  object, so a refill of the buffers is seen by all of them.
- No operator decodes silently. Those in the table below move or slice bytes; any other raises and
  names `dequantize()`.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from ..encoded_matrix import BUFFERS, EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import StaleWeightError
from ..ops.layout import COMPACT, LAYOUTS
from ..storage import Storage, to_layout, to_storage
from .aten_table import AtenTable, aten
from .traced import NoDynamoGuard, stable_text

_TABLE = AtenTable("QuantizedTensor")
# Our own operators take the subclass as it is: op -> function(*args, **kwargs).
OPERATORS: dict[object, Callable] = {}


@dataclass(eq=False)
class StoragePair:
    """The storages that aliases of one quantized tensor share.

    owner:    the `WeightState` of a weight; None for other tensors.
    laid_out: storages in the layouts in which GEMMs read them, kept by whoever writes the codes.
    parts:    of the matrices of a packed tensor [matrices, N, K], or of groups of rows [M, K] that
              are each quantized by themselves (tokens by expert): it has no storages of its own.
    shown:    buffers of `QuantizedTensor._operands` by name, until a storage is replaced; of a
              packed weight that FSDP2 gathers, the codes of all parts, one behind the other.
    """

    rowwise: EncodedMatrix | None = None
    columnwise: EncodedMatrix | None = None
    owner: object = None
    laid_out: dict[tuple[Direction, str], EncodedMatrix] = field(default_factory=dict)
    parts: list[StoragePair] = field(default_factory=list)
    shown: dict[str, Tensor] | None = None

    def put(self, direction: Direction, storage: EncodedMatrix) -> None:
        """Replace a storage, and drop what was laid out of the one before."""
        setattr(self, direction.value, storage)
        self.drop_laid_out()

    def keep(self, direction: Direction, layout: str, storage: EncodedMatrix) -> None:
        """Keep a storage of the codes in a layout."""
        self.laid_out[direction, layout] = storage
        self.shown = None

    def drop_laid_out(self) -> None:
        self.laid_out.clear()
        self.shown = None

    def get(self, direction: Direction) -> EncodedMatrix | None:
        return self.rowwise if direction is ROWWISE else self.columnwise

    def storage(self, direction: Direction) -> Storage:
        """The compact storage of a direction. Raises ValueError if there is none."""
        matrix = self.get(direction)
        if matrix is None:
            raise ValueError(f"there is no {direction.value} storage: it was dropped or never made")
        return to_storage(matrix)

    def map(self, fn: Callable[[EncodedMatrix], EncodedMatrix]) -> StoragePair:
        """Other storages of the same owner; one storage that serves both directions stays one."""
        if self.parts:
            return StoragePair(owner=self.owner, parts=[part.map(fn) for part in self.parts])
        rowwise = None if self.rowwise is None else fn(self.rowwise)
        if (
            self.rowwise is not None
            and self.columnwise is not None
            and self.columnwise.data is self.rowwise.data
        ):
            return StoragePair(rowwise, to_storage(rowwise).as_direction(COLUMNWISE), self.owner)
        columnwise = None if self.columnwise is None else fn(self.columnwise)
        return StoragePair(rowwise, columnwise, self.owner)


_ADDRESSES_ARE_NAMES = contextvars.ContextVar("fsdp_quant_addresses_are_names", default=False)


@contextlib.contextmanager
def addresses_are_names() -> Iterator[None]:
    """In this block `data_ptr()` of quantized tensors is the address of their codes: nobody reads
    or writes there."""
    token = _ADDRESSES_ARE_NAMES.set(True)
    try:
        yield
    finally:
        _ADDRESSES_ARE_NAMES.reset(token)


class QuantizedTensor(Tensor):
    """Codes and scales of a tensor, one `Storage` a direction; see the module's invariants.

    rowwise, columnwise:  `Storage` or None; at least one. Formats may differ.
    shape:                logical shape (default: the storages' [rows, cols]).

    >>> t = fq.Quantizer("mxfp8").quantize(torch.ones(32, 64))
    >>> t.shape, t.dequantize().sum().item()
    (torch.Size([32, 64]), 2048.0)
    """

    _slots: StoragePair
    _decoded_by = "dequantize()"

    @staticmethod
    def __new__(
        cls,
        rowwise: EncodedMatrix | None = None,
        columnwise: EncodedMatrix | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        slots: StoragePair | None = None,
    ) -> QuantizedTensor:
        slots = slots or StoragePair(rowwise, columnwise)
        of = slots.parts or [slots]
        storages = [s for one in of[:1] for s in (one.rowwise, one.columnwise) if s is not None]
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
        rows = sum((one.rowwise or one.columnwise).shape[0] for one in of)
        if prod(shape) != rows * first.shape[1] or (shape[-1:] != (first.shape[1],)):
            raise ValueError(
                f"logical shape {list(shape)} does not flatten to the storages' {list(first.shape)}"
            )
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.data.device, requires_grad=False
        )
        self._slots = slots
        return self

    @property
    def rowwise(self) -> EncodedMatrix | None:
        """What the forward multiplies: a `Storage`, of a frozen weight a `GemmOperand`; or None."""
        return self._slots.rowwise

    @property
    def columnwise(self) -> EncodedMatrix | None:
        """What the backward multiplies, or None."""
        return self._slots.columnwise

    def storage_for(self, direction: Direction) -> Storage:
        """The compact storage of that direction; raises as `matrix_for` does."""
        return to_storage(self.matrix_for(direction))

    def matrix_for(self, direction: Direction) -> EncodedMatrix:
        """`rowwise` or `columnwise`.

        Raises ValueError if the tensor was made without it, StaleWeightError if it was freed.
        """
        storage = self._slots.get(direction)
        if storage is None:
            raise ValueError(
                f"this tensor has no {direction.value} storage: it was dropped or never made "
                f"({self!r})"
            )
        return self._readable(storage)

    def _readable(self, storage: EncodedMatrix) -> EncodedMatrix:
        owner = self._slots.owner
        if owner is not None and owner.weight_sync is not None:
            owner.weight_sync.check_ready(owner.name, storage.direction)
        elif owner is not None and storage.is_freed:
            raise StaleWeightError(
                f"{owner.name}: the {storage.direction.value} codes were freed: FSDP resharded the "
                "weight or gathered the other direction only; if this block is recomputed in a way "
                "that hooks cannot see, set recomputes_forward=True on its fq.Linear"
            )
        return storage

    def operand_for(self, direction: Direction, layout: str) -> EncodedMatrix:
        """`matrix_for` in the layout (`ops.layout`) in which a GEMM reads it."""
        kept = self._slots.laid_out.get((direction, layout))
        return (
            to_layout(self.matrix_for(direction), layout) if kept is None else self._readable(kept)
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in high precision, decoded from the rowwise storage if there is one that is
        not freed.

        dtype:    of the result; default: the dtype the tensor reports.
        Raises StaleWeightError if every storage was freed.
        """
        if self._slots.parts:
            parts = [QuantizedTensor(slots=part).dequantize(dtype) for part in self._slots.parts]
            return torch.cat(parts).view(self.shape)
        for storage in (self.rowwise, self.columnwise):
            if storage is not None and not storage.is_freed:
                return storage.dequantize(dtype).reshape(self.shape)
        raise StaleWeightError(
            f"nothing to decode: every storage of {self!r} was freed when FSDP resharded"
        )

    def data_ptr(self) -> int:
        """Raise ValueError: the memory holds codes, which whoever reads or writes an address of
        `dtype` values does not know.

        Return the address of the codes inside `addresses_are_names`, for who tells parameters apart
        by it.
        """
        if _ADDRESSES_ARE_NAMES.get():
            return self._memory()[0].data_ptr()
        raise ValueError(
            f"{self!r} has no address of {self.dtype} values, because its memory holds codes and "
            "scales; use .rowwise.data.data_ptr() for the codes, dequantize() for values, and `is` "
            "to compare tensors"
        )

    def share_memory_(self) -> QuantizedTensor:
        """Move every buffer to shared memory, in place."""
        for buffer in self._memory():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(buffer.is_shared() for buffer in self._memory())

    def _memory(self) -> list[Tensor]:
        """All that processes share of it."""
        return [*_buffers(self)]

    def with_storages(
        self, fn: Callable[[EncodedMatrix], EncodedMatrix], shape=None
    ) -> QuantizedTensor:
        """A tensor over fn(storage) of each direction."""
        return QuantizedTensor(
            slots=self._slots.map(fn), shape=self.shape if shape is None else shape
        )

    def _aliased(self, shape=None) -> QuantizedTensor:
        return QuantizedTensor(slots=self._slots, shape=self.shape if shape is None else shape)

    def operand_in_graph(self, direction: Direction, layout: str, hybrid) -> EncodedMatrix:
        """`operand_for` while a graph is traced: FSDP2 may fill the buffers when it runs."""
        slots = self._slots
        kept, storage = slots.laid_out.get((direction, layout)), slots.get(direction)
        if kept is not None:
            return kept
        if storage is None:
            storage = hybrid.columnwise_of(slots.storage(ROWWISE))
        return to_layout(storage, layout)

    def _operands(self) -> dict[str, EncodedMatrix]:
        """What a graph sees: per direction the operand that GEMMs read, else the codes; one
        storage's buffers once."""
        slots, shown = self._slots, {}
        for direction in Direction:
            laid_out = {
                _shown_as(d, layout): s
                for (d, layout), s in slots.laid_out.items()
                if d is direction
            }
            storage = slots.get(direction)
            if laid_out:
                shown |= laid_out
            elif storage is not None and not any(s.data is storage.data for s in shown.values()):
                shown[_shown_as(direction)] = storage
        return shown

    def _shown_buffers(self) -> dict[str, Tensor]:
        if self._slots.shown is None:
            self._slots.shown = {
                f"{name}_{b}": t
                for name, s in self._operands().items()
                for b, t in s.buffers().items()
            }
        return self._slots.shown

    def __tensor_flatten__(self):
        """The buffers that GEMMs read of both directions; FSDP2 fills and frees each as passes need
        it."""
        if self._slots.parts and self._slots.shown is None:
            raise NotImplementedError(
                f"{self!r} is of groups that are each quantized by themselves, which torch.compile "
                "does not take apart; give a compiled region their values"
            )
        return list(self._shown_buffers()), NoDynamoGuard(self._slots)

    _stable_hash_for_caching = stable_text

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context, outer_size, outer_stride
    ) -> QuantizedTensor:
        """The tensor over other buffers. Codes whose operands are shown instead keep theirs: GEMMs
        do not read them."""
        slots = context.value
        if slots.parts:
            return QuantizedTensor(slots=replace(slots, shown=dict(inner)), shape=outer_size)
        rebuilt = {
            name: s.with_buffers(
                {b: inner[f"{name}_{b}"] for b in s.buffers() if f"{name}_{b}" in inner}
            )
            for name, s in QuantizedTensor(slots=slots, shape=outer_size)._operands().items()
        }
        made = StoragePair(
            rebuilt.get("rowwise", slots.rowwise),
            rebuilt.get("columnwise", slots.columnwise),
            slots.owner,
        )
        if (
            slots.columnwise is not None
            and slots.rowwise is not None
            and slots.columnwise.data is slots.rowwise.data
        ):
            made.put(COLUMNWISE, made.storage(ROWWISE).as_direction(COLUMNWISE))
        for d, layout in slots.laid_out:
            made.keep(d, layout, rebuilt[_shown_as(d, layout)])
        return QuantizedTensor(slots=made, shape=outer_size)

    def __reduce_ex__(self, protocol):
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (
            self.rowwise,
            self.columnwise,
            tuple(self.shape),
            self.requires_grad,
            is_parameter,
        )

    def __deepcopy__(self, memo) -> QuantizedTensor:
        copied = self.with_storages(lambda s: s.map(torch.clone))
        copied = _as_parameter(copied, isinstance(self, torch.nn.Parameter), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents=None) -> str:
        slots = self._slots.parts[0] if self._slots.parts else self._slots
        sides = ", ".join(
            f"{d.value}={s.fmt}" for d in Direction if (s := slots.get(d)) is not None
        )
        return f"QuantizedTensor({list(self.shape)}, {sides}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OPERATORS:
            return OPERATORS[func](*args, **kwargs)
        handler = _TABLE.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} is not defined on a QuantizedTensor and will not decode it silently; call "
                f"{cls._decoded_by} first if high-precision values are what you want"
            )
        return handler(func, args, kwargs)


def _shown_as(direction: Direction, layout: str = COMPACT) -> str:
    """The name of a storage in a layout, among those that `__tensor_flatten__` names."""
    return direction.value if layout == COMPACT else f"{direction.value}_{layout}".replace(" ", "_")


def _buffer_property(name: str) -> property:
    return property(lambda self: (self._slots.shown or self._shown_buffers())[name])


for _direction in Direction:
    for _layout in LAYOUTS:
        for _name in BUFFERS:
            _shown = f"{_shown_as(_direction, _layout)}_{_name}"
            setattr(QuantizedTensor, _shown, _buffer_property(_shown))


def _as_parameter(
    tensor: QuantizedTensor, is_parameter: bool, requires_grad: bool
) -> QuantizedTensor:
    return (
        torch.nn.Parameter(tensor, requires_grad)
        if is_parameter
        else tensor.requires_grad_(requires_grad)
    )


def _rebuild(
    rowwise: EncodedMatrix | None,
    columnwise: EncodedMatrix | None,
    shape,
    requires_grad: bool,
    is_parameter: bool = False,
) -> QuantizedTensor:
    """Raises ValueError for what no QuantizedTensor wrote to a file."""
    sides = zip(Direction, (rowwise, columnwise))
    if not all(
        side is None or (isinstance(side, EncodedMatrix) and side.direction is d)
        for d, side in sides
    ):
        raise ValueError(
            f"the storages of a QuantizedTensor are Storage or None by direction, got {rowwise!r} "
            f"and {columnwise!r}"
        )
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape of a QuantizedTensor is of sizes, got {shape!r}")
    return _as_parameter(
        QuantizedTensor(rowwise, columnwise, shape=shape), is_parameter, requires_grad
    )


@_TABLE.implements([aten.detach.default, aten.alias.default])
def _detach(func, args, kwargs):
    return args[0]._aliased()


@_TABLE.implements([aten.view.default, aten._unsafe_view.default])
def _view(func, args, kwargs):
    tensor, size = args
    size = list(size)
    if -1 in size:
        known = prod(s for s in size if s != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    if (
        not size
        or size[-1] != tensor.shape[-1]
        or (tensor._slots.parts and size != list(tensor.shape))
    ):
        raise NotImplementedError(
            f"a view of {tensor!r} must keep the last dim {tensor.shape[-1]}, got {size}; call "
            "dequantize() first"
        )
    return tensor._aliased(tuple(size))


@_TABLE.implements([aten.as_strided.default])
def _as_strided(func, args, kwargs):
    tensor, size, stride, *offset = args
    if (
        tuple(size) != tuple(tensor.shape)
        or tuple(stride) != tensor.stride()
        or any(offset)
        or any(kwargs.values())
    ):
        raise NotImplementedError(
            f"as_strided of {tensor!r} can only keep its shape and strides, got size {list(size)}, "
            f"stride {list(stride)}; call dequantize() first"
        )
    return tensor._aliased()


def _rows(tensor: QuantizedTensor, dim: int, start: int, length: int) -> QuantizedTensor:
    if dim % tensor.dim() != 0 or tensor.dim() != 2:
        raise NotImplementedError(
            f"{tensor!r} can be cut along dim 0 of a 2-D tensor only; call dequantize() first"
        )
    if not tensor._slots.parts:
        return tensor.with_storages(
            lambda s: to_storage(s).narrow(start, length), (length, tensor.shape[1])
        )
    parts = [QuantizedTensor(slots=part) for part in tensor._slots.parts]
    for part, end in zip(parts, itertools.accumulate(len(part) for part in parts)):
        if (end - len(part), len(part)) == (start, length):
            return part
    raise NotImplementedError(
        f"rows [{start}, {start + length}) of {tensor!r} are not one of the {len(parts)} groups "
        "that are each quantized by themselves; call dequantize() first"
    )


@_TABLE.implements([aten.slice.Tensor])
def _slice(func, args, kwargs):
    tensor, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    start, end, step = range(tensor.shape[dim])[slice(start, end, step)].start, end, step
    if step != 1:
        raise NotImplementedError(
            f"a slice of {tensor!r} must have step 1, got {step}; call dequantize() first"
        )
    stop = slice(None, end).indices(tensor.shape[dim])[1]
    if (start, stop) == (0, tensor.shape[dim]) and not tensor._slots.parts:
        return tensor._aliased()
    return _rows(tensor, dim, start, max(stop - start, 0))


@_TABLE.implements([aten.split.Tensor, aten.split_with_sizes.default])
def _split(func, args, kwargs):
    tensor, sizes, dim = (*args, 0)[:3]
    if isinstance(sizes, int):
        total = tensor.shape[dim]
        sizes = [min(sizes, total - s) for s in range(0, total, sizes)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_rows(tensor, dim, start, size))
        start += size
    return pieces


@_TABLE.implements([aten.unbind.int])
def _unbind(func, args, kwargs):
    """The matrices of a packed tensor."""
    tensor, dim = (*args, 0)[:2]
    if dim != 0 or not tensor._slots.parts or tensor.dim() != 3:
        raise NotImplementedError(
            f"{tensor!r} can be unbound along dim 0 of packed matrices only; call dequantize() "
            "first"
        )
    return [QuantizedTensor(slots=part) for part in tensor._slots.parts]


@_TABLE.implements([aten.clone.default])
def _clone(func, args, kwargs):
    return args[0].with_storages(lambda s: s.map(torch.clone))


@_TABLE.implements([aten._to_copy.default])
def _to_copy(func, args, kwargs):
    tensor = args[0]
    if kwargs.get("dtype") not in (None, tensor.dtype):
        raise NotImplementedError(
            f"{tensor!r} cannot be cast to {kwargs['dtype']} in place of decoding; call "
            "dequantize()"
        )
    device, non_blocking = kwargs.get("device") or tensor.device, kwargs.get("non_blocking", False)
    return tensor.with_storages(
        lambda s: s.map(lambda t: t.to(device, non_blocking=non_blocking, copy=True))
    )


@_TABLE.implements(
    [
        aten.new_zeros.default,
        aten.zeros_like.default,
        aten.new_empty.default,
        aten.empty_like.default,
    ]
)
def _plain_like(func, args, kwargs):
    """Plain tensors: gradients and optimizer states are never quantized."""
    tensor = args[0]
    size = args[1] if len(args) > 1 else tensor.shape
    make = torch.zeros if "zeros" in str(func) else torch.empty
    return make(
        size,
        dtype=kwargs.get("dtype") or tensor.dtype,
        device=kwargs.get("device") or tensor.device,
    )


@_TABLE.implements([aten.copy_.default])
def _copy_(func, args, kwargs):
    """The bytes of another tensor of the same storages. FSDP2 copies the shard of a parameter into
    a plain tensor."""
    target, source = args[:2]
    if not isinstance(target, QuantizedTensor):
        raise NotImplementedError(
            f"{source!r} cannot be copied into another tensor without decoding it: call "
            "dequantize(); where fully_shard does so, of a weight that fq.freeze made, pass "
            "ignored_params={it, ..} to every fully_shard, so that each rank keeps its codes whole"
        )
    if not isinstance(source, QuantizedTensor):
        raise NotImplementedError(
            f"{target!r} holds codes and no quantizer, so it cannot encode a {source.dtype} "
            "tensor; call HybridQuantizer.update(tensor, values) with the quantizer that made it, "
            "or write to what dequantize() returns"
        )
    for into, of in _buffer_pairs(target, source):
        into.copy_(of, **kwargs)
    target._slots.drop_laid_out()
    return target


def _buffer_pairs(target: QuantizedTensor, source: QuantizedTensor) -> list[tuple[Tensor, Tensor]]:
    """Each buffer of `target` with that of `source`. Raises ValueError for tensors of other shapes,
    parts, formats or layouts."""
    pairs, sides = [], [[one._slots, *one._slots.parts] for one in (target, source)]
    same = (
        target.shape == source.shape
        and len(sides[0]) == len(sides[1])
        and target._slots.owner is None
    )
    for into, of in zip(*sides) if same else ():
        for direction in Direction:
            a, b = into.get(direction), of.get(direction)
            same &= (a is None and b is None) or None not in (a, b) and a.geometry == b.geometry
            pairs += (
                zip(a.buffers().values(), b.buffers().values()) if same and a is not None else ()
            )
    if not same:
        raise ValueError(
            f"copy_ moves the bytes of equal storages, got {target!r} from {source!r}; quantize "
            "into it with HybridQuantizer.update(tensor, source.dequantize())"
        )
    return pairs


def _buffers(tensor: QuantizedTensor) -> Iterator[Tensor]:
    for slots in (tensor._slots, *tensor._slots.parts):
        for direction in Direction:
            if (storage := slots.get(direction)) is not None:
                yield from storage.buffers().values()


@_TABLE.implements([aten.record_stream.default])
def _record_stream(func, args, kwargs):
    tensor, stream = args
    for buffer in _buffers(tensor):
        buffer.record_stream(stream)


@_TABLE.implements([aten.is_pinned.default])
def _is_pinned(func, args, kwargs):
    return all(buffer.is_pinned() for buffer in _buffers(args[0]))


torch.serialization.add_safe_globals([_rebuild])

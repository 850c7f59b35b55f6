# SPDX-License-Identifier: Apache-2.0
"""`Symbols`: interpret the operators of a forward as expressions, which prove what it computes.

Each element of a tensor that depends on a symbol has a number. Equal numbers are equal expressions:
an operator of aten, the numbers that it reads, its constants, and the dtype. Numbers are stored as
the tensor's values are, one memory per storage, so views and writes need no rule of their own.
Tensors without symbols (routes, masks, zeros) are constants: their values are part of expressions.

    exact      an operator is an expression of whole tensors: equal numbers mean equal bits
    not exact  of elements: rows and terms of sums in any order, and any floating dtype
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tensor import torch_compat

# By the names of operators, without the "_" of those in place: what moves elements, and what reads
# no values.
_MOVES = frozenset("clone cat stack index index_select gather repeat index_put index_copy".split())
_CONSTANT = frozenset(
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full "
    "new_empty_strided".split()
)
_FLOATING = torch.float32, torch.bfloat16, torch.float16, torch.float64
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unproven(Exception):
    """A forward does what no expression says."""


class Symbols(torch_compat.DispatchMode):
    """Numbers of the elements of all tensors that operators write inside this mode.

    exact:      see above.
    gradients:  True while every symbol must have a gradient: an operator without one is refused.
    """

    def __init__(self, exact: bool):
        super().__init__()
        self.exact, self.gradients = exact, False
        self._numbers: dict[tuple, int] = {}
        self._count = 0
        self._terms: dict[int, list[int]] = {}  # of sums
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._alive: list[Tensor] = []  # else an address has two meanings

    def name(self, tensor: Tensor, name: str) -> None:
        """Make each element of a tensor a symbol."""
        self._store(tensor, self._new((name,), tensor.shape))

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """Numbers of a tensor's elements, int64 of its shape; where it has symbols, a view."""
        if self._has_symbols(tensor):
            memory = self._memory[self._key(tensor)]
            return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        dtype = tensor.dtype if self.exact else None
        values = tensor.flatten().tolist()
        return _integers([self._number(("constant", v, dtype)) for v in values], tensor.shape)

    # Numbers #

    def _number(self, key: tuple, count: int = 1) -> int:
        """The first of `count` numbers of an expression."""
        first = self._numbers.setdefault(key, self._count)
        self._count += count * (first == self._count)
        return first

    def _new(self, key: tuple, shape: torch.Size) -> Tensor:
        first = self._number((*key, shape), shape.numel())
        ends = first, first + shape.numel()
        return torch.arange(*ends, dtype=torch.int64, device="cpu").view(shape)

    def _key(self, tensor: Tensor) -> tuple[int, int]:
        return tensor.untyped_storage().data_ptr(), tensor.itemsize

    def _has_symbols(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and self._key(tensor) in self._memory

    def _store(self, tensor: Tensor, numbers: Tensor | None) -> None:
        """numbers: of the elements; None: of a constant, which an operator will write."""
        self._alive.append(tensor)
        if tensor.numel() and not self._has_symbols(tensor):
            size = tensor.untyped_storage().nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((size,), (1,), 0)
            self._memory[self._key(tensor)] = (
                self.numbers_of(flat) if numbers is None else _integers([-1] * size, (size,))
            )
        if numbers is not None:
            self.numbers_of(tensor).copy_(numbers)

    def _sum(self, terms: Iterable[int]) -> int:
        zero = self._number(("constant", 0.0, None))
        flat = sorted(n for t in terms for n in self._terms.get(t, [t]) if n != zero)
        if len(flat) < 2:
            return flat[0] if flat else zero
        number = self._number(("sum", *flat))
        self._terms[number] = flat
        return number

    # Operators #

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unproven(f"calls {func}, which is random")
        has_symbols = any(map(self._has_symbols, inputs))
        if func.is_view or _name_of(func) in _CONSTANT or not has_symbols:
            out = func(*args, **kwargs)
            self._alive += _tensors(out)
            return out
        if self.gradients:
            self._check_gradients(func, inputs)
        if _name_of(func) not in _MOVES and _NEVER.intersection(func.tags):
            raise Unproven(f"calls {func}")
        is_mutable = func._schema.is_mutable
        if is_mutable and not self._has_symbols(args[0]):
            self._store(args[0], None)
        values = {id(t): self.numbers_of(t) for t in inputs}  # as before the operator
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if not outputs:
            raise Unproven(f"reads a value, by {func}")
        if is_mutable and (len(outputs) > 1 or outputs[0] is not args[0]):
            raise Unproven(f"calls {func}")
        for index, tensor in enumerate(outputs):
            if is_mutable or not self._has_symbols(tensor):  # else it is a view
                self._store(tensor, self._result(func, args, kwargs, values, tensor, index))
        return out

    def _check_gradients(self, func, tensors: list[Tensor]) -> None:
        symbols = (t for t in tensors if t.is_floating_point() and self._has_symbols(t))
        if not torch.is_grad_enabled() or not all(t.requires_grad for t in symbols):
            raise Unproven(f"cuts gradients off, at {func}")

    def _result(
        self, func, args: tuple, kwargs: dict, values: dict[int, Tensor], out: Tensor, index: int
    ) -> Tensor:
        """Numbers of an output. values: those of the inputs, by id."""
        name, moved = _name_of(func), functools.partial(self._moved, values=values)
        if name in _MOVES:
            kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
            return func(*torch_compat.tree_map_only(Tensor, moved, args), **kwargs)
        if name in ("_to_copy", "copy"):
            source = args[0] if name == "_to_copy" else args[1]
            return self._converted(values[id(source)], source.dtype, out.dtype).expand_as(out)
        if name == "mul" and not isinstance(args[1], Tensor) and args[1] == 1:
            return values[id(args[0])]
        if self.exact:
            inputs = [_described(a, values) for a in args]
            if name in ("add", "mul") and len(_tensors(args)) == 2 and not kwargs:
                inputs.sort()
            options = [(k, _described(v, values)) for k, v in sorted(kwargs.items())]
            return self._new((name, *inputs, *options, out.dtype, index), out.shape)
        if not kwargs and (rule := getattr(self, f"_of_{name.strip('_')}", None)) is not None:
            return rule(*torch_compat.tree_map_only(Tensor, moved, args))
        if torch.Tag.pointwise not in func.tags:
            raise Unproven(f"calls {func}")
        return self._elements(name, args, kwargs, values, out)

    def _elements(
        self, name: str, args: tuple, kwargs: dict, values: dict[int, Tensor], out: Tensor
    ) -> Tensor:
        """Numbers of the elements of a pointwise operator's output."""
        others = tuple(None if isinstance(a, Tensor) else _described(a, values) for a in args)
        key = name, others, *sorted(kwargs.items())
        tensors = (values[id(a)] for a in args if isinstance(a, Tensor))
        elements = zip(*(numbers.expand_as(out).flatten().tolist() for numbers in tensors))
        if name == "mul":
            elements = map(sorted, elements)
        return _integers((self._number((*key, *e)) for e in elements), out.shape)

    def _moved(self, tensor: Tensor, values: dict[int, Tensor]) -> Tensor:
        if tensor.is_floating_point():
            return values[id(tensor)].clone()
        if self._has_symbols(tensor):
            raise Unproven("indexes by values")
        return tensor

    def _converted(self, numbers: Tensor, source: torch.dtype, dtype: torch.dtype) -> Tensor:
        if source is dtype or (not self.exact and {source, dtype} <= set(_FLOATING)):
            return numbers
        return self._new((dtype, numbers.numpy().tobytes()), numbers.shape)

    # Of elements; by the names of operators #

    def _of_add(self, a: Tensor, b: Tensor | float) -> Tensor:
        if not isinstance(b, Tensor):
            b = _integers([self._number(("constant", b, None))], ())
        a, c = torch.broadcast_tensors(a, b)
        return _integers(map(self._sum, zip(a.flatten().tolist(), c.flatten().tolist())), a.shape)

    def _of_sum(self, x: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Tensor:
        shape = x.sum(list(dims), keepdim=keepdim).shape
        summed = [d % x.dim() for d in dims] or range(x.dim())
        others = [d for d in range(x.dim()) if d not in summed]
        rows = x.permute(*others, *summed).reshape(shape.numel(), -1).tolist()
        return _integers(map(self._sum, rows), shape)

    def _of_index_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        result = x.clone()
        for place, part in zip(index.tolist(), source.unbind(dim)):
            row = result.select(dim, place)
            row.copy_(self._of_add(row, part))
        return result

    def _of_mm(self, a: Tensor, b: Tensor) -> Tensor:
        rows = [self._number(("row", *r)) for r in a.tolist()]
        columns = [self._number(("row", *c)) for c in b.t().tolist()]
        dots = [self._number(("dot", r, c)) for r in rows for c in columns]
        return _integers(dots, (len(rows), len(columns)))

    def _of_addmm(self, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self._of_add(self._of_mm(a, b), bias)

    def _of_bmm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack(list(map(self._of_mm, a, b)))

    def _of_grouped_mm(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ends = offs.tolist()
        parts = [a[start:end] for start, end in zip([0, *ends], ends)]
        return torch.cat(list(map(self._of_mm, parts, b)))


def _integers(values: Iterable[int], shape: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu").view(shape)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in torch_compat.tree_flatten(value)[0] if isinstance(t, Tensor)]


def _name_of(func: Any) -> str:
    """Return the name of an operator, also of one in place."""
    return func._schema.name.removeprefix("aten::").removesuffix("_")


def _described(value: Any, values: dict[int, Tensor]) -> Any:
    """A key of an argument: a tensor by its numbers."""
    if isinstance(value, Tensor):
        numbers = values[id(value)]
        return tuple(numbers.shape), numbers.numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return tuple(_described(v, values) for v in value)
    return value


class Unobserved(TorchFunctionMode):
    """Refuse what no operator shows: reads of a tensor's shape, device or gradient, and hooks.

    allowed:  attributes of a tensor that may be read.
    """

    def __init__(self, allowed: Iterable[str] = ()):
        super().__init__()
        refused = {n: getattr(Tensor, n) for n in _OBSERVED.difference(allowed)}
        self._refused = {f if callable(f) else f.__get__: n for n, f in refused.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := self._refused.get(func)) is not None:
            raise Unproven(f"reads {name} of a tensor")
        return func(*args, **(kwargs or {}))


SHAPES = frozenset("device shape size numel nelement dim ndim ndimension stride nbytes".split())
_OBSERVED = SHAPES.union(
    "is_contiguous storage_offset is_cuda is_cpu is_meta get_device data_ptr numpy untyped_storage "
    "requires_grad requires_grad_ is_leaf grad_fn grad data register_hook retain_grad".split()
)

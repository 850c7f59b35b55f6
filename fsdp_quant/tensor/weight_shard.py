# SPDX-License-Identifier: Apache-2.0
"""`WeightShard`: the local tensor of a parameter under `fully_shard`, with the hooks by which FSDP2
gathers it as codes.

Without `fully_shard` a weight is a plain nn.Parameter. FSDP2 registers each sharded parameter with
its modules by `setattr`, where `linear.has_weight.adopt` puts this class over the shard's memory.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import torch_compat
from .fsdp_hooks import FSDPHooks, managed_of
from .subclasses import NoDynamoGuard, aten, stable_text
from .weight_state import WeightState

_T = TypeVar("_T", bound=Tensor)

# Views, which FSDP2, DTensor and `DTensor.to_local()` use as the shard.
_VIEWS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.view.default,
        aten.as_strided.default,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)
_COPIES = frozenset({aten.new_zeros.default, aten._to_copy.default, aten._pin_memory.default})
_inner = operator.attrgetter("inner")


def _is_shard(func, shard: WeightShard, args: Sequence) -> bool:
    """The result of an operator is the shard for FSDP2: a view, the copy of an offloaded shard, or
    memory for a short one with rows behind it. Other results are plain tensors: gradients,
    optimizer states, and users' copies, which outlive the model or go to files."""
    if func in _VIEWS or func not in _COPIES:
        return func in _VIEWS
    managed = managed_of(shard.state)
    if managed is None or func is not aten.new_zeros.default:
        return managed is not None and managed.is_offloaded
    return managed.pads(shard.shape, torch.Size(args[1]))


class WeightShard(FSDPHooks, Tensor):
    """High-precision rows of a weight, over their own memory: data_ptr(), storage, numpy() and
    .data are those of a plain tensor.

    state: `WeightState`, which all shards and views of the weight share.

    While a graph is traced, the shard is a wrapper around a fake or functional tensor.
    """

    _traced: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, state: WeightState) -> WeightShard:
        self: WeightShard
        if type(values) in (Tensor, nn.Parameter, WeightShard):
            self = Tensor._make_subclass(cls, values)  # pyright: ignore[reportAssignmentType]
        else:
            self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAssignmentType]
                cls,
                values.shape,
                strides=values.stride(),
                dtype=values.dtype,
                device=values.device,
                storage_offset=values.storage_offset(),
            )
            self._traced = values
        self.state = state
        return self

    @property
    def inner(self) -> Tensor:
        """The same values as a plain tensor, over the same memory."""
        return self._alias("_plain", torch_compat.plain_alias)

    @property
    def _flat_inner(self) -> Tensor:
        """`inner` with a storage object of its own, which tracing requires of a wrapper's inner
        tensor. The shard owns the memory."""
        return self._alias("_wrapped", torch_compat.alias_with_own_storage)

    def _alias(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """`make(self)`, cached while the shard has this memory: dynamo guards on the identity of
        parameters."""
        fields = vars(self)
        if "_traced" in fields:
            return fields["_traced"]
        alias = fields.get(name)
        memory = self.data_ptr(), self.shape, self.stride(), self.dtype
        if alias is None or (alias.data_ptr(), alias.shape, alias.stride(), alias.dtype) != memory:
            alias = fields[name] = make(self)
        return alias

    def numpy(self, *, force: bool = False):
        return self.inner.numpy(force=force)

    def __tensor_flatten__(self):
        return ["_flat_inner"], NoDynamoGuard(weakref.ref(self.state))

    @staticmethod
    def __tensor_unflatten__(inner, shared, outer_size, outer_stride) -> WeightShard:
        return WeightShard(inner["_flat_inner"], shared.value())

    _stable_hash_for_caching = stable_text

    def __deepcopy__(self, memo) -> WeightShard:
        copied = memo[id(self)] = WeightShard(
            copy.deepcopy(self.inner, memo), copy.deepcopy(self.state, memo)
        )
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        """Of the values: files hold no class of the library."""
        return self.inner.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # which does not decompose composite operators
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        plain_args = [_mapped(WeightShard, _inner, a) for a in args]
        plain_kwargs = {name: _mapped(WeightShard, _inner, a) for name, a in kwargs.items()}
        # FSDP2 pads shards inside a first forward
        first = args[0] if args else None
        if isinstance(first, WeightShard) and _is_shard(func, first, args):
            with torch_compat.outside_inference_mode():
                result = func(*plain_args, **plain_kwargs)
            return _mapped(Tensor, lambda values: WeightShard(values, first.state), result)
        result = func(*plain_args, **plain_kwargs)
        return _written(func, args, kwargs, result) if func._schema.is_mutable else result


def _mapped(kind: type[_T], fn: Callable[[_T], object], value: object) -> Any:
    """An argument or result of an operator, a tensor or a list, with fn applied to tensors of a
    kind."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [fn(entry) if isinstance(entry, kind) else entry for entry in value]
    return value


@functools.cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    """(index, name) of the arguments that an operator's schema writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written(func, args, kwargs, result):
    """Increment the version of a shard whose memory was written through another tensor, and return
    the shard."""
    written: list[WeightShard] = []
    for i, name in _arguments_written(func):
        _mapped(WeightShard, written.append, args[i] if i < len(args) else kwargs.get(name))
    counted = [s for s in written if "_traced" not in s.__dict__ and not s.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)
    return written[0] if isinstance(result, Tensor) and written else result

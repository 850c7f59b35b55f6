# SPDX-License-Identifier: Apache-2.0
"""Tensors: aliases, local tensors of DTensors, and operators over many tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from ...ops import opaque
from .autograd import applied

foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_zero_ = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]


def by_dtype(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Split (target, source) pairs into (targets, sources) that one launch can copy."""
    groups: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.dtype, source.device), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """target.copy_(source) for every pair, one launch per dtype."""
    for targets, sources in by_dtype(pairs):
        foreach_copy_(targets, sources)


def with_index(device: torch.device | str) -> torch.device:
    """`device` with an index: the current one for "cuda"."""
    device = torch.device(device)
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.empty(0, dtype=torch.float32, device=device).device


def is_captured(x: Tensor) -> bool:
    """A CUDA graph records what is done to x now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Per group e that ends at ends[e], in bf16: a[rows of e] b[e]; if b is a matrix,
    a[:, depth of e] b[depth of e]."""
    return torch._grouped_mm(a, b, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def plain_alias(tensor: Tensor) -> Tensor:
    """A plain tensor over the memory of a subclass, with its version counter."""
    with torch._C._DisableTorchDispatch():
        return torch._C.TensorBase.detach(tensor)


def alias_with_own_storage(tensor: Tensor) -> Tensor:
    """A plain tensor over the memory of `tensor`, which must keep it, with its own storage
    object."""
    alias = plain_alias(tensor)
    if alias.device.type == "meta":
        return alias
    memory = alias.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), alias.device, memory.nbytes()
    )
    with torch._C._DisableTorchDispatch():  # a compiler calls this under its fake tensor mode
        return alias.new_empty(0).set_(storage, alias.storage_offset(), alias.shape, alias.stride())


def dtensor_like(
    like: DTensor,
    local: Tensor,
    shape: Sequence[int] | None = None,
    placements: tuple[Placement, ...] | None = None,
) -> DTensor:
    """A DTensor over `local`, in its dtype, with the mesh of `like`.

    shape, placements:  of the whole tensor (default: of `like`).
    """
    stride = like.stride()
    if shape is not None:
        stride = torch.empty(shape, dtype=local.dtype, device="meta").stride()
    meta = TensorMeta(torch.Size(like.shape if shape is None else shape), stride, local.dtype)
    placements = like._spec.placements if placements is None else placements
    return DTensor(local, DTensorSpec(like._spec.mesh, placements, meta), requires_grad=False)


def distributed_as(like: Tensor, values: Tensor, name: str) -> Tensor:
    """Values that are whole on every rank, cut as the DTensor `like`; the values, if it is none.

    Raises NotImplementedError, with the name, for a tensor that two axes cut along one dim.
    """
    if not isinstance(like, DTensor):
        return values
    if any(type(p) not in (Shard, Replicate) for p in like.placements):
        raise NotImplementedError(
            f"{name} is sharded as {like.placements}, which are cut twice; load before "
            "fully_shard, or parallelize_module"
        )
    return distribute_tensor(
        values.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(tensor):
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.dtensor_spec, ctx.strides = inputs[0]._spec, output.stride()
        ctx.grad_placements = None

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None
        spec = ctx.dtensor_spec  # shared, as FSDP2's gradients share their parameters'
        if grad.stride() != ctx.strides:
            spec = _ToTorchTensor.backward(ctx, grad)[0]._spec  # pyright: ignore
        if torch.is_grad_enabled():  # create_graph=True: torch up to 2.11 ends the graph here
            meta = {"shape": spec.shape, "stride": spec.stride}
            return DTensor.from_local(grad, spec.mesh, spec.placements, **meta)
        return DTensor(grad, spec, requires_grad=grad.requires_grad)  # pyright: ignore


@opaque.compiled_as(lambda parameter: parameter.to_local())
def to_local(parameter: DTensor) -> Tensor:
    """`parameter.to_local()`, in less of the host's time. No gradient stays none (torch up to 2.11
    makes it zeros)."""
    return applied(_ToLocal, parameter)


def replace_local(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor, for everyone who holds it."""
    tensor._local_tensor = local


def swap_parameter(old: nn.Parameter, new: nn.Parameter) -> None:
    """Make `old` be `new` for everyone who holds it; it keeps its gradient, attributes and
    hooks."""
    vars(new).update(vars(old))
    new.grad = old.grad
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    torch.utils.swap_tensors(old, new)


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x in another shape, not as a view: users write in place to what a Function returns."""
    return torch.ops.aten._unsafe_view(x, list(shape))


@functools.cache
def let_fused_adams_be_fake() -> None:
    """Let fake tensors run fused Adams whose rate is a tensor. Else DTensor runs them once on real
    tensors of the unsharded sizes: 150 s for 8 B parameters."""
    for name in ("aten::_fused_adam_.tensor_lr", "aten::_fused_adamw_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            torch.library.register_fake(name, lambda *args, **kwargs: None)

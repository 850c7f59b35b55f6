# SPDX-License-Identifier: Apache-2.0
"""What the lock-step laws share: plain values of parameters, the reference's bytes, and the control
that keeps one code."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dist_tests.laws import assert_same_bytes
from fsdp_quant.ops import dispatch


def case_id(value: object) -> object:
    """Of a parameter of a case: a flag says whether the GPU is emulated."""
    return {True: "gpu", False: "cpu"}[value] if isinstance(value, bool) else None


@torch.no_grad()
def plain(tensor: Tensor) -> Tensor:
    """A plain copy of the values that a parameter's memory holds now, contiguous."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def plain_values(model: nn.Module) -> dict[str, Tensor]:
    """Name -> plain copy of each parameter. Reads parameters, not `state_dict()`, which is itself
    one of the events."""
    return {name: plain(p) for name, p in model.named_parameters()}


@torch.no_grad()
def give(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy plain values into the parameters of a new model. Raises ValueError for other names,
    shapes or dtypes."""
    parameters = dict(model.named_parameters())
    have, want = (
        {n: (tuple(t.shape), t.dtype) for n, t in of.items()} for of in (parameters, values)
    )
    if have != want:
        raise ValueError(f"the model has {have}, the values are of {want}")
    for name, value in values.items():
        parameters[name].copy_(value)


@contextlib.contextmanager
def optimizers_in_backward(parameters: Iterable[Tensor]) -> Iterator[None]:
    """One SGD per parameter inside, stepped as its gradient arrives."""
    optimizers = {p: torch.optim.SGD([p], lr=0.005) for p in parameters if p.requires_grad}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Interrupted(Exception):
    """Raised half-way through a pass."""


def interrupt(*_) -> None:
    """A hook that ends the pass it runs in."""
    raise Interrupted


def assert_reachable(tensor: Tensor) -> None:
    """Fail where a pointer does not reach the memory: torch itself would crash the process."""
    assert tensor.data_ptr(), (
        f"data_ptr() of a {type(tensor).__name__} is 0: no pointer reaches its memory"
    )


def overwrite(target: Tensor, source: Tensor) -> None:
    """Copy the bytes of `source` to `target.data_ptr()`, as a kernel of another library does."""
    assert_reachable(target)
    if not target.is_contiguous() or (target.dtype, target.shape) != (source.dtype, source.shape):
        raise ValueError(
            f"target is {target.dtype} {list(target.shape)}, strides {target.stride()}; "
            f"source is {source.dtype} {list(source.shape)}"
        )
    source = source.detach().contiguous()
    size = source.numel() * source.element_size()
    if not target.is_cuda:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return
    view = {"shape": (size,), "typestr": "|u1", "data": (target.data_ptr(), False), "version": 3}
    alias = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=view), device=target.device)
    alias.copy_(source.view(-1).view(torch.uint8))


def overwrite_by_numpy(target: Tensor, source: Tensor) -> None:
    """Write the bits of `source` through a numpy view of `target`; numpy knows no bf16 and no
    GPU."""
    assert_reachable(target)
    if target.is_cuda:
        overwrite(target, source)
    else:
        target.detach().view(torch.int16).numpy()[:] = source.detach().view(torch.int16).numpy()


def assert_same_tensors(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], what: str
) -> None:
    """Fail with the names and the first coordinates of all tensors that differ."""
    found = []
    for name, wanted in want.items():
        if got[name] is None or wanted is None:
            if got[name] is not wanted:
                found.append(f"{name}: one is None, got {got[name]}, want {wanted}")
            continue
        try:
            assert_same_bytes(plain(got[name]), plain(wanted), name)
        except AssertionError as difference:
            found.append(str(difference))
    if found:
        raise AssertionError(f"{what}:\n  " + "\n  ".join(found))


@contextlib.contextmanager
def one_code_kept(shape: tuple[int, int]) -> Iterator[tuple[Callable, SimpleNamespace]]:
    """The control: tensors of `shape` that the live model quantizes keep the codes of the first
    time.

    Yields the context in which the live model runs, and how often a kept code was handed out
    (`.times`): a control that was never used proves nothing.
    """
    kept: dict[tuple, list] = {}
    used = SimpleNamespace(times=0, on=False)
    original = dispatch.encode

    def encode(x: Tensor, encodings, *args, **kwargs):
        made = original(x, encodings, *args, **kwargs)
        key = (tuple(encodings), x.dtype)
        if not used.on or tuple(x.shape) != tuple(shape):
            return made
        used.times += key in kept
        return kept.setdefault(key, made)

    @contextlib.contextmanager
    def live() -> Iterator[None]:
        used.on = True
        try:
            yield
        finally:
            used.on = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "encode", encode)
        yield live, used

# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of a weight goes, where autograd does not return it.

    fuse_wgrad_accumulation   the wgrad GEMM adds to `weight.main_grad`, in fp32
    delay_wgrad_compute       the backward leaves the product to `backward_dw`

A program hands its wgrad to `Call.wgrad` as a function of `out_dtype`, `out` and `accumulate` of
`gemm`. In a graph it is `add_in_graph`, in eager mode a `WeightGradient`.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import local_of

Product = Callable[..., Tensor]
NOT_INSIDE = (
    "a weight gradient of delay_wgrad_compute=True waits where a captured step begins or ends; "
    "call backward_dw() inside the step, behind its backward"
)


def add_in_graph(main_grad: Tensor, product: Product) -> None:
    """Add a wgrad to `main_grad` in a graph that is traced."""
    main_grad.add_(product(out_dtype=torch.float32))


def main_grad_of(weight: Any, name: str) -> Tensor:
    """Return this rank's part of `weight.main_grad`. Raises ValueError for one that is missing, or
    that does not fit.

    weight:  a parameter; of fully_shard the one that it gathered.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{name}: fuse_wgrad_accumulation=True, and the weight has no main_grad; set "
            "weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before the forward"
        )
    main_grad, local = local_of(main_grad), local_of(weight)
    fits = main_grad.shape == local.shape and main_grad.device == local.device
    if not fits or main_grad.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name}: weight.main_grad is {main_grad.dtype} {list(main_grad.shape)} on "
            f"{main_grad.device}; wanted float32 or bfloat16 {list(local.shape)} on {local.device}"
        )
    return main_grad


def _takes_products(main_grad: Tensor) -> bool:
    """A kernel adds a product of codes to it: fp32 rows at multiples of 16 bytes."""
    is_aligned = main_grad.is_contiguous() and main_grad.storage_offset() % 4 == 0
    return main_grad.dtype is torch.float32 and is_aligned


def refuse_reduced(weight: Tensor, name: str, fuses: bool) -> None:
    """Raise NotImplementedError for a weight whose gradient FSDP2 reduces in the backward, or DDP
    before `backward_dw` adds to it."""
    if not fuses and torch_compat.is_reduced_by_ddp(weight):
        raise NotImplementedError(
            f"{name}: delay_wgrad_compute=True in DistributedDataParallel, which reduces .grad in "
            "the backward, before backward_dw() adds this rank's own gradient to it; leave the "
            "option out, or set fuse_wgrad_accumulation too and reduce weight.main_grad yourself"
        )
    is_gathered = isinstance(weight, QuantizedTensor) and not isinstance(weight, QuantizedWeight)
    if is_gathered or torch_compat.is_managed(weight):
        option = "fuse_wgrad_accumulation" if fuses else "delay_wgrad_compute"
        raise NotImplementedError(
            f"{name}: {option}=True under fully_shard, which reduces the gradient that a backward "
            "leaves in .grad as soon as the backward has it, and frees it; leave the option out "
            "(FSDP2 accumulates in reduce_dtype with set_requires_gradient_sync(False)), or shard "
            "by tensor parallelism or an optimizer of your own"
        )


class Waiting:
    """Wgrads of a layer that wait for `backward_dw`, the oldest first, with what they read and its
    versions: operands in high precision are the caller's tensors.

    behind:  hooks that run behind each of them.
    """

    def __init__(self, name: str):
        self.name = name
        self.behind: list[Callable[[], object]] = []
        # the last: a CUDA graph records them
        self.products = deque[tuple[WeightGradient, Product, list[tuple[Tensor, int]], bool]]()

    def leave(self, gradient: WeightGradient, product: functools.partial[Tensor]) -> None:
        """Leave a product for `compute`. product: of two `EncodedMatrix` operands."""
        if not self.products:
            _WAITING.append(weakref.ref(self))
        read = [t for operand in product.args for t in operand.buffers().values()]
        captured = torch_compat.is_captured(read[0])
        self.products.append((gradient, product, [(t, t._version) for t in read], captured))

    def compute(self) -> None:
        """Compute the oldest. Raises RuntimeError if none waits, if what it reads was written since
        its backward, and if a CUDA graph records one of both alone."""
        if not self.products:
            raise RuntimeError(
                f"{self.name}: backward_dw() without a backward whose weight gradient waits; call "
                "it once for each backward"
            )
        gradient, product, read, captured = self.products[0]
        if captured != torch_compat.is_captured(read[0][0]):
            raise RuntimeError(f"{self.name}: {NOT_INSIDE}")
        self.products.popleft()
        self._end()
        if any(t._version != version for t, version in read):
            raise RuntimeError(
                f"{self.name}: the input, or the gradient of the output, was written in place "
                "between the backward and backward_dw(), which reads it; write a copy"
            )
        if (wgrad := gradient.add(product)) is not None:
            gradient._add_to_grad(wgrad)
        for hook in self.behind:
            hook()

    def _end(self) -> None:
        if not self.products:
            _WAITING[:] = [other for other in _WAITING if other() not in (None, self)]

    def forget_captured(self) -> bool:
        """Forget those that a CUDA graph records, and return whether there were any: nothing wrote
        what they read."""
        left = [item for item in self.products if not item[-1]]
        found, self.products = len(left) < len(self.products), deque(left)
        self._end()
        return found


# Those with products: a list, because torch.compile traces optimizers with their hooks.
_WAITING: list[weakref.ref[Waiting]] = []


def raise_waiting(optimizer: Optimizer) -> None:
    """Raise RuntimeError, naming the layer, if a wgrad was left out of the step that ends: of a
    weight that this optimizer holds, or of a `main_grad`, whose optimizer may hold another
    tensor."""
    if not _WAITING:
        return
    waiting_layers = [waiting for of in _WAITING if (waiting := of()) is not None]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for waiting in waiting_layers:
        gradients = [gradient for gradient, *_ in waiting.products]
        if any(g.fuses or id(g.parameter) in held for g in gradients):
            count = len(gradients)
            raise RuntimeError(
                f"{waiting.name}: the optimizer steps while {count} weight "
                f"gradient{'s' * (count > 1)} of delay_wgrad_compute=True wait; call "
                "backward_dw() of the layer, or fq.steps.backward_dw(model), once for each "
                "backward before the step"
            )


@dataclass(eq=False)
class WeightGradient:
    """Takes the wgrad of one call of a layer, in place of autograd.

    name:        of the layer, in errors.
    parameter:   its weight; packed: the weight [E, N, K] of all experts.
    index:       which matrix of a packed weight; None: all of `parameter`.
    transposed:  the parameter's matrices are [K, N].
    fuses:       add to `parameter.main_grad`, else to `.grad`.
    waiting:     where the product is left for `backward_dw`; None: it is computed now.
    """

    name: str
    parameter: Tensor
    index: int | None
    transposed: bool
    fuses: bool
    waiting: Waiting | None

    def __call__(self, product: functools.partial[Tensor]) -> Tensor | None:
        """Take the product; return what autograd is given for the weight."""
        return self.add(product) if self.waiting is None else self.waiting.leave(self, product)

    def _part(self, tensor: Tensor) -> Tensor:
        """Return of a tensor like the parameter the part like the product."""
        part = tensor if self.index is None else tensor[self.index]
        return part.mT if self.transposed else part

    @torch.no_grad()
    def add(self, product: Product) -> Tensor | None:
        """Compute the product, add it where it goes, and tell the owner of `main_grad`."""
        parameter: Any = self.parameter
        if not self.fuses:
            self._add_to_grad(product())
            return None
        main_grad = self._part(main_grad_of(parameter, self.name))
        if _takes_products(main_grad):
            product(out_dtype=torch.float32, out=main_grad, accumulate=True)
        else:
            main_grad.add_(product(out_dtype=torch.float32))
        if not (placeholder := self._placeholder):
            return None
        parameter.grad_added_to_main_grad = True
        allocate = torch.zeros if placeholder == 2 else torch.empty
        return allocate(main_grad.shape, dtype=parameter.dtype, device=main_grad.device)

    @property
    def _placeholder(self) -> int:
        """What autograd is given (`Placeholder` of csrc/step/plan.h): nothing; a gradient where the
        owner of `main_grad` asks, as Megatron's DDP does for its hook; zeros if that adds it."""
        is_asked = hasattr(self.parameter, "grad_added_to_main_grad")
        return 1 + bool(getattr(self.parameter, "zero_out_wgrad", False)) if is_asked else 0

    def in_step(self) -> AddsTo | None:
        """Where a compiled step adds a product of codes itself; None: no step does."""
        if not self.fuses or self.waiting or self.index is not None or self.transposed:
            return None
        main_grad = main_grad_of(self.parameter, self.name).detach()
        return AddsTo(main_grad, self._placeholder, self) if _takes_products(main_grad) else None

    def _add_to_grad(self, dw: Tensor) -> None:
        parameter, dw = self.parameter, dw.to(self.parameter.dtype)
        if parameter.grad is None:
            local = local_of(parameter)
            is_whole = self.index is None and not self.transposed
            grad = dw if is_whole else torch.zeros(local.shape, dtype=dw.dtype, device=dw.device)
            is_cut = isinstance(parameter, DTensor)
            parameter.grad = torch_compat.dtensor_like(parameter, grad) if is_cut else grad
            if is_whole:
                return
        self._part(local_of(parameter.grad)).add_(dw)


class AddsTo(NamedTuple):
    """What a compiled step adds dw to; placeholder: what autograd is given then."""

    main_grad: Tensor
    placeholder: int
    gradient: WeightGradient

    def before(self, *gradients: object) -> None:
        """Hook before the backward of the step, which adds to the `main_grad` of now."""
        current: Any = main_grad_of(self.gradient.parameter, self.gradient.name).detach()
        if not _takes_products(current):
            current = torch.zeros(current.shape, dtype=torch.float32, device=current.device)
        if not current.is_set_to(self.main_grad):  # replaced since the forward
            self.main_grad.set_(current)

    def behind(self, gradients: Sequence[Tensor | None], *_: object) -> None:
        """Hook behind it. gradients: of x and the weight; None: this backward wants none."""
        parameter: Any = self.gradient.parameter
        current = main_grad_of(parameter, self.gradient.name).detach()
        if not _takes_products(current):
            current.add_(self.main_grad)
        if gradients[1] is not None:
            parameter.grad_added_to_main_grad = True

# SPDX-License-Identifier: Apache-2.0
"""The optimizers of docs/optimizers.md, by name, for the laws of one process and of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq


class Case(NamedTuple):
    """An optimizer class, by path, and its options.

    matrices:  it takes 2-D parameters alone.
    closure:   it evaluates the loss several times per step.
    compiles:  by inductor, which takes seconds.
    """

    path: str
    options: dict
    matrices: bool = False
    closure: bool = False
    compiles: bool = False

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        """Skip the test where its library is missing."""
        module, _, name = self.path.rpartition(".")
        library = module.split(".")[0]
        if library != "torch":
            pytest.importorskip(library)
        return getattr(importlib.import_module(module), name)

    def parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [p for p in parameters if p.dim() == 2 or not self.matrices]


def _torch(name: str, **options) -> Case:
    matrices, closure = options.pop("matrices", False), options.pop("closure", False)
    return Case(f"torch.optim.{name}", {"lr": 0.02} | options, matrices, closure)


def _bitsandbytes(name: str) -> Case:
    return Case(f"bitsandbytes.optim.{name}", {"lr": 0.02, "min_8bit_size": 256})


CASES = {
    "sgd_loop": _torch("SGD", momentum=0.9, foreach=False),
    "sgd_foreach": _torch("SGD", momentum=0.9, foreach=True),
    "sgd_fused": _torch("SGD", momentum=0.9, fused=True),
    "adam_loop": _torch("Adam", foreach=False, weight_decay=0.1),
    "adamw_loop": _torch("AdamW", foreach=False),
    "adamw_foreach": _torch("AdamW", foreach=True),
    "adamw_fused": _torch("AdamW", fused=True),
    "adagrad": _torch("Adagrad"),  # its state is made with it
    "adafactor_loop": _torch("Adafactor", foreach=False),
    "adafactor_foreach": _torch("Adafactor", foreach=True),
    "muon": _torch("Muon", matrices=True),
    "lbfgs": _torch("LBFGS", max_iter=3, closure=True),
    "torchao_adamw8bit": Case("torchao.optim.AdamW8bit", {"lr": 0.02}, compiles=True),
    "torchao_adamw4bit": Case("torchao.optim.AdamW4bit", {"lr": 0.02}, compiles=True),
    "torchao_adamwfp8": Case("torchao.optim.AdamWFp8", {"lr": 0.02}, compiles=True),
    "bitsandbytes_adamw8bit": _bitsandbytes("AdamW8bit"),
    "bitsandbytes_lion8bit": _bitsandbytes("Lion8bit"),
}


class Container(torch.optim.Optimizer):
    """Several optimizers as one, as torchtitan's: it steps them, and has no state of its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        super().__init__(params, {})

    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Averaging(torch.optim.SGD):
    """Like schedule-free optimizers: eval() shows an average of all weights, train() the others."""

    shows_average = False

    def step(self, closure: Callable | None = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.detach(), 0.5)

    def _show(self, average: bool) -> None:
        if self.shows_average is not average:
            for p in self.param_groups[0]["params"]:
                shown = p.detach().clone()
                p.data.copy_(self.state[p]["average"])  # which no version counter sees
                self.state[p]["average"].copy_(shown)
        self.shows_average = average

    def train(self) -> None:
        self._show(average=False)

    def eval(self) -> None:
        self._show(average=True)


class Averaged(Container):
    """Steps an `Averaging` as trainers do, so that forwards multiply averages."""

    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.train()
            optimizer.step()
            optimizer.eval()


class SharpnessAware(torch.optim.Optimizer):
    """SAM: gradients at the worst point near the weights; an optimizer inside steps."""

    def __init__(self, params, lr: float, radius: float = 0.5):
        super().__init__(params, {"lr": lr, "radius": radius})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad / p.grad.norm(), alpha=group["radius"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p].pop("old")
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Callable) -> None:
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def in_backward(net: nn.Module, cls: type) -> list[torch.optim.Optimizer]:
    """An optimizer per parameter, which steps as its gradient arrives."""
    optimizers = {p: cls([p], lr=0.1) for p in net.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def convert(net: nn.Module, recipe: fq.Recipe, quantized: bool) -> nn.Module:
    """A converted model, of quantized parameters or of plain ones."""
    if not quantized:
        return fq.convert(net, recipe)
    with fq.quantized_model_init(recipe):
        return fq.convert(net, recipe)


def step_once(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, closure: bool) -> Tensor:
    """The outputs of a step, one per evaluation of the loss."""
    seen: list[Tensor] = []

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        seen.append(net(x))
        loss = seen[-1].square().mean()
        loss.backward()
        return loss.detach()

    if closure:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    optimizer.zero_grad()
    return torch.stack([y.detach() for y in seen])

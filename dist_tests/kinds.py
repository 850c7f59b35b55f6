# SPDX-License-Identifier: Apache-2.0
"""One small model per kind of module that has quantized weights, [16, 64] -> [16, ..], so that laws
of weights forget none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fsdp_quant as fq

TOKENS, WIDTH = 16, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 8, WIDTH)
        return self.inner(x, x, x, need_weights=False)[0]


class Routed(nn.Module):
    """Experts, whose routes are fixed. splits: of `GroupedLinear`, else those of transformers."""

    def __init__(self, experts: nn.Module, splits: bool):
        super().__init__()
        self.experts, self.splits = experts, splits

    def forward(self, x: Tensor) -> Tensor:
        if self.splits:
            return self.experts(x, [9, 7])
        tokens = torch.arange(len(x))
        routes = torch.stack([tokens % 2, (tokens // 2) % 2], 1)
        return self.experts(x, routes, torch.full((len(x), 2), 0.5))


def _packed() -> nn.Module:
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(2, 96, WIDTH))
    return Routed(experts, splits=True)


def _of_transformers(family: str, name: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}")
    config = getattr(module, f"{name}Config")(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_local_experts=2, num_experts_per_tok=2
    )
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    experts = getattr(module, f"{name}Experts")(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return Routed(experts, splits=False)


def _conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(96, WIDTH), nn.ReLU(), Conv1D(32, 96))


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 32)),
    "packed": _packed,
    "mixtral": lambda: _of_transformers("mixtral", "Mixtral"),
    "gpt_oss": lambda: _of_transformers("gpt_oss", "GptOss"),
    "Conv1D": _conv1d,
    "attention": Attention,
}
OURS: dict[str, Callable[[fq.Recipe], nn.Module]] = {
    "experts": lambda recipe: Routed(fq.GroupedLinear(2, WIDTH, 96, recipe=recipe, name="e"), True),
    "norms": lambda recipe: nn.Sequential(
        fq.LayerNormLinear(WIDTH, WIDTH, recipe=recipe, name="0"),
        fq.LayerNormMLP(WIDTH, 96, recipe=recipe, name="1"),
    ),
}
KINDS = (*PLAIN, *OURS, "parameters")
# Kinds whose weights FSDP2 gathers in high precision.
AS_VALUES = ("gpt_oss", "Conv1D", "attention")


def converted(kind: str, recipe: fq.Recipe | str, seed: int = 0) -> nn.Module:
    """A model of the kind, in the recipe. The same values for the same seed."""
    recipe = fq.recipes.by_name(recipe) if isinstance(recipe, str) else recipe
    torch.manual_seed(seed)
    if kind in OURS:
        return OURS[kind](recipe)
    if kind == "parameters":
        with fq.quantized_model_init(recipe):
            return fq.convert(PLAIN["linear"](), recipe)
    return fq.convert(PLAIN[kind](), recipe, grouped=["experts"] if kind == "packed" else ())


def batch(seed: int = 3) -> Tensor:
    made = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device())


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of one training pass, whole."""
    model.zero_grad()
    y = model(batch() if x is None else x)
    y.square().mean().backward()
    return [y.detach(), *(_whole(p.grad) for p in model.parameters() if p.grad is not None)]


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t

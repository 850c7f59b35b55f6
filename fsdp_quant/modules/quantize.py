"""`fq.Quantize`: a tensor at a boundary takes the values that a format has, forward, backward or both."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..context import STEP
from ..formats import ROWWISE
from ..ops import dispatch
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer, as_rows
from ..recipe import BOUNDARY_TYPES, Recipe, Role


class _Boundary(torch.autograd.Function):
    """x decoded from the codes of one side; its gradient likewise."""

    @staticmethod
    def forward(ctx, x, output, grad_input, ids, step):
        ctx.quantizer, ctx.ids, ctx.step = grad_input, ids, step
        return _decoded(x, output, ids, step, 0)

    @staticmethod
    def backward(ctx, dy):
        return _decoded(dy, ctx.quantizer, ctx.ids, ctx.step, 1), None, None, None, None


def _decoded(x: Tensor, hybrid: HybridQuantizer | None, ids: Tensor, step: Tensor, slot: int) -> Tensor:
    if hybrid is None or not hybrid.rowwise.fmt.is_quantized:
        return x.view_as(x)
    rows = as_rows(x)
    key = dispatch.random_key(step, ids, slot, len(rows)) if hybrid.rowwise.is_stochastic else None
    return hybrid.rowwise.storage(rows, ROWWISE, key).dequantize(x.dtype).view(x.shape)


def boundaries(recipe: Recipe, name: str, module_type: str) -> tuple[HybridQuantizer | None, HybridQuantizer | None]:
    """The quantizers of a module's output and grad_input. Raises ValueError for what a boundary cannot honour, naming it."""
    sides = tuple(recipe.hybrid(Role(module_type, slot, name)) for slot in BOUNDARY_TYPES)
    for slot, hybrid in zip(BOUNDARY_TYPES, sides):
        side = None if hybrid is None else hybrid.rowwise
        if hybrid is not None and (side is None or side.is_delayed or side.fmt.rotated):
            raise ValueError(f"{name}: {slot} is {hybrid}; wanted rowwise current scaling without a rotation")
    return sides


def boundary(x: Tensor, output: HybridQuantizer | None, grad_input: HybridQuantizer | None, ids: Tensor) -> Tensor:
    """x decoded from codes of `output`, its gradient from codes of `grad_input`; None leaves either as it is.

    ids:  int64 [2], of the two slots, on x's device.
    """
    return _Boundary.apply(x, output, grad_input, ids, STEP.on(x.device))


@functools.cache
def boundary_ids(name: str, device: torch.device) -> Tensor:
    """int64 [2]: ids of a module's boundary slots, which key their random bits."""
    with torch.inference_mode(False):
        return torch.tensor([tensor_id(f"{name}.{slot}") for slot in BOUNDARY_TYPES], device=device)


class Quantize(nn.Module):
    """y = decode(encode(x)) in the format of the "output" slot; dx = decode(encode(dy)) in that of "grad_input".

    recipe:  asked for Role("quantize", "output" and "grad_input", name). A slot for which it returns None leaves its tensor as
             it is; gradients pass codes straight through.

    Raises ValueError for a recipe without either slot, for delayed scaling, which keeps histories of layers only, and for a
    rotation, which only a product turns back.
    """

    def __init__(self, recipe: Recipe, name: str = "quantize"):
        super().__init__()
        self._recipe, self._name = recipe, name
        self._sides = boundaries(recipe, name, "quantize")
        if self._sides == (None, None):
            raise ValueError(
                f"{name}: {recipe} has neither an output nor a grad_input; give fq.Quantize a fq.CustomRecipe that answers them"
            )
        self.register_buffer("_ids", boundary_ids(name, torch.device("cpu")), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return boundary(x, *self._sides, self._ids)

    def extra_repr(self) -> str:
        return ", ".join(f"{slot}={side}" for slot, side in zip(BOUNDARY_TYPES, self._sides))

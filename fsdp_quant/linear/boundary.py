# SPDX-License-Identifier: Apache-2.0
"""`fq.Quantize`: round a tensor to the values of a format, forward, backward or both."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..context import STEP
from ..formats import ROWWISE, digest, value_class
from ..ops import dispatch, opaque
from ..ops.rng import own_name, tensor_id
from ..quantizer import HybridQuantizer, as_rows
from ..recipe import Recipe, Role, as_recipe
from ..roles import BOUNDARY_TYPES
from ..tensor import torch_compat

# by key
_BOUNDARIES: dict[str, OutputQuantization] = {}


@value_class
class OutputQuantization:
    """Quantizers of an output and of the gradient of an input; None leaves either as it is."""

    output: HybridQuantizer | None
    grad_input: HybridQuantizer | None

    key: ClassVar[str]  # stands for it in an operator's arguments
    quantizes: ClassVar[tuple[bool, bool]]

    def __post_init__(self):
        sides = (self.output, self.grad_input)
        quantizes = tuple(s is not None and s.side(ROWWISE).fmt.is_quantized for s in sides)
        object.__setattr__(self, "key", digest(self))
        object.__setattr__(self, "quantizes", quantizes)
        _BOUNDARIES.setdefault(self.key, self)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__post_init__()


class _Boundary(torch.autograd.Function):
    """x decoded from the codes of one side; its gradient likewise."""

    @staticmethod
    def forward(ctx, x, sides, output, grad_input, keyed_by):
        ctx.sides, ctx.keyed_by = sides, keyed_by
        ctx.grad_input = grad_input and sides.quantizes[1]
        is_decoded = output and sides.quantizes[0]
        return _through_codes(x, sides, 0, keyed_by) if is_decoded else x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dx = _through_codes(dy, ctx.sides, 1, ctx.keyed_by) if ctx.grad_input else dy
        return dx, None, None, None, None


def _through_codes(
    x: Tensor, sides: OutputQuantization, slot: int, keyed_by: tuple[Tensor, Tensor]
) -> Tensor:
    with torch_compat.tracing_if_watched():
        side, rows, key = getattr(sides, BOUNDARY_TYPES[slot]).rowwise, as_rows(x), None
        if side.is_stochastic:
            step, ids = (t.to(x.device) for t in keyed_by)
            key = dispatch.random_key(step, ids, slot, rows.shape[0], x if slot else None)
        return side.storage(rows, ROWWISE, key).dequantize(x.dtype).contiguous().view(x.shape)


@torch.compiler.allow_in_graph
def _traced_boundary(
    x: Tensor, key: str, output: bool, grad_input: bool, step: Tensor, ids: Tensor
) -> Tensor:
    """`boundary` in a graph that is being traced; key: of the sides."""
    torch_compat.save_inputs([step, ids])
    return _Boundary.apply(x, _BOUNDARIES[key], output, grad_input, (step, ids))


def boundaries(recipe: Recipe, name: str, module_type: str) -> OutputQuantization | None:
    """The quantizers of a module's output and grad_input, or None where neither has one.

    Raises ValueError for what a boundary cannot honour, naming it.
    """
    sides = tuple(recipe.hybrid(Role(module_type, slot, name)) for slot in BOUNDARY_TYPES)
    for slot, hybrid in zip(BOUNDARY_TYPES, sides):
        if hybrid is None:
            continue
        side, other = hybrid.rowwise, hybrid.columnwise
        if side is None or side.is_delayed or side.fmt.rotated:
            raise ValueError(
                f"{name}: {slot} is {hybrid}; wanted rowwise current scaling without a rotation"
            )
        if other not in (None, side) or hybrid.columnwise_source != "original":
            raise ValueError(
                f"{name}: {slot} is {hybrid}, and a boundary reads rowwise codes alone; give it "
                f"{side} for both directions, or columnwise=None"
            )
    return None if sides == (None, None) else OutputQuantization(*sides)


def _boundary_in_graph(
    x: Tensor, sides: OutputQuantization, ids: BoundaryIds, output=True, grad_input=True
) -> Tensor:
    step = STEP.in_graph(ids.ids.device)
    return _traced_boundary(x, sides.key, output, grad_input, step, ids.ids)


@opaque.compiled_as(_boundary_in_graph)
def boundary(
    x: Tensor,
    sides: OutputQuantization,
    ids: BoundaryIds,
    output: bool = True,
    grad_input: bool = True,
) -> Tensor:
    """x decoded from codes of `sides.output`, its gradient from codes of `sides.grad_input`.

    output, grad_input:  False: that side is left out.
    """
    return _Boundary.apply(x, sides, output, grad_input, ids.on(x.device))


class BoundaryIds:
    """int64 [2] that keys, with the step, random bits of boundary slots; on the last device."""

    def __init__(self, name: str):
        self.name = name
        with torch.inference_mode(False):
            ids = [tensor_id(f"{name}.{slot}") for slot in BOUNDARY_TYPES]
            self.ids = torch.tensor(ids, dtype=torch.int64, device="cpu")
        STEP.prepare(self.ids.device)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device.type == "meta":  # the values stay where they are
            return STEP.on(device), self.ids.to(device)
        if self.ids.device != device:
            with torch.inference_mode(False):
                self.ids = self.ids.to(device)
            STEP.prepare(device)
        return STEP.on(device), self.ids

    def __reduce__(self):
        return BoundaryIds, (self.name,)


class Quantize(nn.Module):
    """y = decode(encode(x)) in the "output" format; dx = decode(encode(dy)) in "grad_input"'s.

    recipe:  asked for Role("quantize", "output" and "grad_input", name). A slot for which it
             returns None leaves its tensor as it is; gradients pass codes straight through.

    Raises ValueError for a recipe without either slot, for delayed scaling, which keeps histories
    of layers only, and for a rotation, which only a product turns back.

    >>> def quantized_output(role):
    ...     return "mxfp8" if role.tensor_type == "output" else None
    >>> boundary = fq.Quantize(fq.CustomRecipe(quantized_output))
    >>> boundary(torch.tensor([[1.0, 300.1]]))                # decoded values of the codes
    tensor([[  1., 288.]])
    """

    def __init__(self, recipe: Recipe | str, name: str | None = None):
        name = own_name(name, "quantize")
        super().__init__()
        recipe = as_recipe(recipe, name, Recipe)
        sides = boundaries(recipe, name, "quantize")
        if sides is None:
            raise ValueError(
                f"{name}: {recipe} has neither an output nor a grad_input; give fq.Quantize "
                "a fq.CustomRecipe that answers them"
            )
        self._sides, self._ids = sides, BoundaryIds(name)

    def _apply(self, fn, recurse: bool = True) -> Quantize:
        device = fn(torch.empty(0, dtype=torch.float32, device=self._ids.ids.device)).device
        if device.type != "meta":
            self._ids.on(device)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return boundary(x, self._sides, self._ids)

    def extra_repr(self) -> str:
        return ", ".join(f"{slot}={getattr(self._sides, slot)}" for slot in BOUNDARY_TYPES)

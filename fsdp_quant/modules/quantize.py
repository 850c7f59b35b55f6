"""`fq.Quantize`: a tensor at a boundary takes the values that a format has, forward, backward or both."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..context import STEP
from ..formats import ROWWISE, canonical_text, value_class
from ..ops import dispatch
from ..ops.rng import tensor_id
from ..quantizer import HybridQuantizer, as_rows
from ..recipe import BOUNDARY_TYPES, Recipe, Role

_BOUNDARIES: dict[str, Boundary] = {}  # by the text that stands for one in an operator's arguments


@value_class
class Boundary:
    """Quantizers of an output and of the gradient of an input; None leaves either as it is."""

    output: HybridQuantizer | None
    grad_input: HybridQuantizer | None

    def __post_init__(self):
        sides = (self.output, self.grad_input)
        object.__setattr__(self, "key", canonical_text(self))
        object.__setattr__(self, "quantizes", tuple(s is not None and s.rowwise.fmt.is_quantized for s in sides))
        _BOUNDARIES.setdefault(self.key, self)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        _BOUNDARIES.setdefault(self.key, self)


class _Boundary(torch.autograd.Function):
    """x decoded from the codes of one side; its gradient likewise."""

    @staticmethod
    def forward(ctx, x, key, output, grad_input, ids):
        ctx.key, ctx.grad_input = key, grad_input
        ctx.save_for_backward(ids)
        return _through_codes(x, key, 0, ids) if output else x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _through_codes(dy, ctx.key, 1, *ctx.saved_tensors) if ctx.grad_input else dy, None, None, None, None


def _through_codes(x: Tensor, key: str, slot: int, ids: Tensor) -> Tensor:
    return (torch.ops.fsdp_quant.boundary if torch.compiler.is_compiling() else _decoded)(x, key, slot, ids)


def _decoded(x: Tensor, key: str, slot: int, ids: Tensor) -> Tensor:
    side = getattr(_BOUNDARIES[key], BOUNDARY_TYPES[slot]).rowwise
    rows = as_rows(x)
    random = None
    if side.is_stochastic:
        random = dispatch.random_key(STEP.on(x.device), _on(x.device, *ids.tolist()), slot, len(rows))
    return side.storage(rows, ROWWISE, random).dequantize(x.dtype).contiguous().view(x.shape)


_library = torch.library.Library("fsdp_quant", "FRAGMENT")
_library.define(
    "boundary(Tensor x, str key, int slot, Tensor ids) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
)
_library.impl("boundary", _decoded, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fsdp_quant::boundary", lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format), lib=_library
)


def boundaries(recipe: Recipe, name: str, module_type: str) -> Boundary | None:
    """The quantizers of a module's output and grad_input, or None where neither has one.

    Raises ValueError for what a boundary cannot honour, naming it.
    """
    sides = tuple(recipe.hybrid(Role(module_type, slot, name)) for slot in BOUNDARY_TYPES)
    for slot, hybrid in zip(BOUNDARY_TYPES, sides):
        side = None if hybrid is None else hybrid.rowwise
        if hybrid is not None and (side is None or side.is_delayed or side.fmt.rotated):
            raise ValueError(f"{name}: {slot} is {hybrid}; wanted rowwise current scaling without a rotation")
    return None if sides == (None, None) else Boundary(*sides)


def boundary(x: Tensor, sides: Boundary, ids: Tensor, output: bool = True, grad_input: bool = True) -> Tensor:
    """x decoded from codes of `sides.output`, its gradient from codes of `sides.grad_input`.

    ids:  `boundary_ids`.
    output, grad_input:  False: that side is left out.
    """
    return _Boundary.apply(x, sides.key, output and sides.quantizes[0], grad_input and sides.quantizes[1], ids)


def boundary_ids(name: str) -> Tensor:
    """int64 [2] on the host: ids of a module's boundary slots, which key their random bits."""
    with torch.inference_mode(False):
        return torch.tensor([tensor_id(f"{name}.{slot}") for slot in BOUNDARY_TYPES], device="cpu")


@functools.cache
def _on(device: torch.device, *ids: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(ids, device=device)


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
        if self._sides is None:
            raise ValueError(
                f"{name}: {recipe} has neither an output nor a grad_input; give fq.Quantize a fq.CustomRecipe that answers them"
            )
        self._ids = boundary_ids(name)

    def forward(self, x: Tensor) -> Tensor:
        return boundary(x, self._sides, self._ids)

    def extra_repr(self) -> str:
        return ", ".join(f"{slot}={getattr(self._sides, slot)}" for slot in BOUNDARY_TYPES)

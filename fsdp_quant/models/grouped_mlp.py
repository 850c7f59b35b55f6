# SPDX-License-Identifier: Apache-2.0
"""`fq.GroupedMLP`: experts of two products with SwiGLU between them, which is computed where it is
quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..linear.grouped_linear import GroupedLinear, Splits
from ..linear.routes import ALONE, Around, Routes, check_routes, combine, shares_of
from ..ops.norm import ACTIVATIONS
from ..ops.rng import own_name
from ..recipe import Recipe
from ..tensor import torch_compat
from .norm_op import activate

SWIGLU = ACTIVATIONS["swiglu"].kind


def swiglu_of_halves(y: Tensor) -> Tensor:
    """silu(g) * u of y = [g, u]."""
    return activate(y, None, SWIGLU, packed=True)[0]


def multiplied(
    products: Sequence[GroupedLinear],
    multiply: Callable[..., Any],
    activation: Callable[[Tensor], Tensor],
    is_swiglu: bool,
    x: Tensor,
    routes: Routes,
    weights: Tensor | None,
) -> Tensor:
    """Return last(activation(first(x))) of two products: rows, or with weights the sum of each
    token's.

    multiply:   multiply(i, rows, routes, around) is product i.
    is_swiglu:  the activation is `swiglu_of_halves`, but for roundings.
    """
    is_observed = any(map(torch_compat.has_hooks, products))  # hooks see values
    is_swiglu = is_swiglu and products[1].bias is None
    summed = () if weights is None else routes
    fuses = is_swiglu and not is_observed
    result = multiply(0, x, routes, Around(True, routes, weights) if fuses else ALONE)
    y, hidden = result if fuses else (result, None)
    around = Around(False, summed, weights)
    if hidden is not None:
        around = Around(y, summed)
    elif is_swiglu and products[0].fuses_swiglu(y):  # the bits of kernels
        hidden = swiglu_of_halves(y)
        if weights is not None:
            hidden = (hidden * shares_of(weights, routes[0])[:, None]).to(hidden.dtype)
            around = Around(False, routes)
    else:
        hidden = activation(y)
    y = multiply(1, hidden, (), ALONE if is_observed else around)
    return combine(y, routes[1], around.weights) if is_observed and summed else y


class GroupedMLP(nn.Module):
    """y[rows of e] = (silu(g) * u) D[e]^T with [g, u] = x[rows of e] G[e]^T, for experts e.

    `gate_up` is G [E, 2 * ffn_size, hidden_size], and `down` is D [E, hidden_size, ffn_size]: a
    packed `fq.GroupedLinear` each, without bias. On Hopper, with `mxfp8` and `fp8_block` and no
    hooks on them, silu(g) * u and its gradient are computed where they are quantized, and nobody
    writes them.

    Call: y [.., hidden_size] = mlp(x [.., hidden_size], splits), of rows sorted by expert, with
    splits and routes of `fq.GroupedLinear`. With weights [T, k] of the routes, y [T, hidden_size]
    is the sum of each token's rows times these. Under `ExpertParallel()` it is called alike.

    Raises ValueError for what `fq.GroupedLinear` refuses, and weights of other routes.

    >>> experts = fq.GroupedMLP(4, 64, 96, recipe=fq.recipes.mxfp8())
    >>> experts(torch.ones(10, 64), [3, 0, 5, 2]).shape
    torch.Size([10, 64])
    """

    reads_and_writes = ["gate_up"], ["down"]  # of `ExpertParallel`

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ):
        name = own_name(name, "grouped_mlp")
        super().__init__()

        def linear(cols: int, rows: int, part: str) -> GroupedLinear:
            options: Any = {"packed": True, "recipe": recipe, "name": f"{name}.{part}"}
            return GroupedLinear(num_experts, cols, rows, False, device, dtype, **options)

        self.gate_up = linear(hidden_size, 2 * ffn_size, "gate_up")
        self.down = linear(ffn_size, hidden_size, "down")

    def forward(
        self, x: Tensor, splits: Splits, routes: Routes = (), weights: Tensor | None = None
    ) -> Tensor:
        products, rows = (self.gate_up, self.down), x.reshape(-1, x.shape[-1])
        if weights is not None:  # the product checks routes alone
            check_routes(self.gate_up._name, len(rows), routes, weights)

        def multiply(which: int, rows: Tensor, *of_call: Any) -> Any:
            return products[which](rows, splits, *of_call)

        y = multiplied(products, multiply, swiglu_of_halves, True, rows, routes, weights)
        return y if routes and weights is None else y.view(*x.shape[:-1], y.shape[-1])

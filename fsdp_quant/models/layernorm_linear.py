# SPDX-License-Identifier: Apache-2.0
"""`fq.LayerNormLinear`: a norm, and a linear layer that quantizes what the norm wrote."""

from __future__ import annotations

from torch import Tensor, nn

from ..linear.linear import Linear, handed_to
from ..linear.shared_input import Handed
from ..linear.training_steps import backward_dw
from ..migration import answers_keywords
from ..ops.rng import own_name
from ..recipe import Recipe
from .norm import Norm


@answers_keywords
class LayerNormLinear(nn.Module):
    """y = linear(norm(x)); with return_layernorm_output (y, norm(x)), with return_bias (y, bias) or
    (y, bias, norm(x)).

    Defaults, as of `fq.LayerNormMLP` and of TransformerEngine: bias=True,
    normalization="LayerNorm", eps=1e-5, zero_centered_gamma=False.

    norm:    `Norm` of `normalization`, "RMSNorm" or "LayerNorm".
    linear:  `fq.Linear`; the recipe is changed with `fq.set_recipe`.
    return_bias, fuse_wgrad_accumulation, delay_wgrad_compute:  as of `fq.Linear`.

    x [.., in_features], y [.., out_features]. state_dict keys: norm.weight (norm.bias),
    linear.weight, linear.bias.

    >>> fq.LayerNormLinear(64, 32, recipe=fq.recipes.mxfp8())(torch.ones(2, 64)).shape
    torch.Size([2, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ):
        name = own_name(name, "layernorm_linear")
        super().__init__()
        self.return_layernorm_output = return_layernorm_output
        self.norm = Norm(in_features, normalization, eps, zero_centered_gamma, device, dtype)
        self.linear = Linear(
            in_features,
            out_features,
            bias,
            device,
            dtype,
            recipe=recipe,
            name=f"{name}.linear",
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        normal, _, amax = self.norm.forward_with_input(x)
        y = self.linear(normal, **handed_to(self.linear, Handed(amax)))
        if not self.return_layernorm_output:
            return y
        return (*y, normal) if self.linear.return_bias else (y, normal)

    backward_dw = backward_dw

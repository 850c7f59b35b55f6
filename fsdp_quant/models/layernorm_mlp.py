# SPDX-License-Identifier: Apache-2.0
"""`fq.LayerNormMLP`: norm, gate and up, activation, down, with few reads of the tensors between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..linear.linear import Linear, handed_to, takes_handed
from ..linear.shared_input import GatedInput, Handed
from ..linear.training_steps import backward_dw
from ..migration import answers_keywords
from ..ops import native, norm
from ..ops.norm import ACTIVATIONS, Activation
from ..ops.rng import own_name
from ..options import choice
from ..recipe import Recipe
from .norm import Norm
from .norm_op import activate

RECOMPUTE = choice(None, "gate_up")


@answers_keywords
class LayerNormMLP(nn.Module):
    """y = down(act(gate(n)) * up(n)), or down(act(up(n))), with n = norm(x).

    Defaults, as of `fq.LayerNormLinear` and of TransformerEngine: bias=True,
    normalization="LayerNorm", eps=1e-5, zero_centered_gamma=False. A Llama's MLP is
    LayerNormMLP(hidden_size, ffn_size, bias=False, normalization="RMSNorm").

    activation:  gated "swiglu", "geglu" (erf), "geglu_tanh", "reglu", "sreglu" (relu squared),
                 "glu" (sigmoid), "qgeglu" and "clamped_swiglu" (gpt-oss: gate <= 7, up in [-7, 7],
                 gate * sigmoid(1.702 gate) * (up + 1)); or "gelu" (erf), "gelu_tanh", "silu",
                 "relu", "relu_squared", "sigmoid", "qgelu" (x * sigmoid(1.702 x)), "clamped_silu",
                 which have no gate. The last three of both lists have no kernels, on GPUs neither.
    residual:    y + x is returned; one pass computes the gradient of both uses of x.
    return_layernorm_output:  (y, n).
    return_bias:  (y, bias of down, which is not added), or (y, bias, n).
    fuse_wgrad_accumulation, delay_wgrad_compute:  of all layers, as of `fq.Linear`.
    recompute:   "gate_up": the backward makes n, gate(n) and up(n) again from x, with the codes and
                 random bits of the forward, so that between the two x and the operand of down's
                 wgrad are all that is kept.

    x and y [.., hidden_size], gate and up [ffn_size, hidden_size], down [hidden_size, ffn_size].
    state_dict keys: norm.weight (norm.bias), gate_proj.weight, up_proj.weight, down_proj.weight
    (and their biases). Gate and up share the codes of n; what the backward keeps is x, those codes,
    gate(n), up(n), and what the plan says of the product of both.

    Raises ValueError for another activation, normalization or recompute.

    >>> fq.LayerNormMLP(64, 128, recipe=fq.recipes.mxfp8())(torch.ones(2, 64)).shape
    torch.Size([2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: str = "swiglu",
        bias: bool = True,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        residual: bool = False,
        return_layernorm_output: bool = False,
        recompute: str | None = None,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ):
        name = own_name(name, "layernorm_mlp")
        super().__init__()
        self.activation = choice(*ACTIVATIONS).read("activation", activation)
        self.recompute = RECOMPUTE.read("recompute", recompute)
        self.residual, self.return_layernorm_output = residual, return_layernorm_output

        def linear(rows: int, cols: int, part: str) -> Linear:
            return Linear(
                cols,
                rows,
                bias,
                device,
                dtype,
                recipe=recipe,
                name=f"{name}.{part}",
                return_bias=return_bias and part == "down_proj",
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
            )

        self.norm = Norm(hidden_size, normalization, eps, zero_centered_gamma, device, dtype)
        gated = ACTIVATIONS[activation].gated
        self.gate_proj = linear(ffn_size, hidden_size, "gate_proj") if gated else None
        self.up_proj = linear(ffn_size, hidden_size, "up_proj")
        self.down_proj = linear(hidden_size, ffn_size, "down_proj")
        self._share()
        for layer in (self.gate_proj, self.up_proj):
            if recompute and layer is not None:
                layer.recomputes_forward = "backward"

    def _share(self) -> None:
        """Gate and up have one history of n."""
        if self.gate_proj is not None:
            self.gate_proj.runtime.share_input_of(self.up_proj.runtime)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._share()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        h, handed, normal, x = recomputed(self._hidden, x) if self.recompute else self._hidden(x)
        y = self.down_proj(h, **handed_to(self.down_proj, handed))
        y, *bias = y if self.down_proj.return_bias else (y,)
        if self.residual:
            y = x + y
        results = (y, *bias) if normal is None else (y, *bias, normal)
        return results if len(results) > 1 else y

    backward_dw = backward_dw

    def _hidden(self, x: Tensor) -> tuple[Tensor, Handed, Tensor | None, Tensor]:
        """(what down multiplies, what is handed to down with it, n if it is returned, x)."""
        normal, x, amax = self.norm.forward_with_input(x)
        layers = self.gate_proj, self.up_proj, self.down_proj
        h, handed = mlp_hidden(normal, *layers, ACTIVATIONS[self.activation], Handed(amax))
        return h, handed, normal if self.return_layernorm_output else None, x

    def extra_repr(self) -> str:
        return f"activation={self.activation}" + (", residual=True" if self.residual else "")


def recomputed(run: Callable, x: Tensor):
    """run(x), of which the backward keeps x and runs the rest again."""
    if not torch.is_grad_enabled():
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def mlp_hidden(
    x: Tensor,
    gate: nn.Module | None,
    up: nn.Linear,
    down: nn.Module,
    activation: Activation,
    handed: Handed,
) -> tuple[Tensor, Handed]:
    """(act(gate(x)) * up(x), or act(up(x)); what is handed to down with it). Where a gated
    activation has no gate, the product of up is both, gate(x) next to up(x).

    Gate and up share the codes of x. The activation's backward writes the amaxes of their gradients
    into memory that it and their nodes hold.

    handed:  with x.
    """
    layers, grads = [up] if gate is None else [gate, up], None
    rows = x.numel() // max(x.shape[-1], 1)
    if (
        rows
        and activation.has_kernel
        and native.is_available_for(x)
        and torch.is_grad_enabled()
        and all(map(takes_handed, layers))
    ):
        grads = native.new_amaxes(x, rows, up.out_features, len(layers))
    outputs = []
    for i, layer in enumerate(layers):
        grad_amaxes = None if grads is None else grads[i]
        outputs.append(layer(x, **handed_to(layer, replace(handed, grad_amaxes=grad_amaxes))))
    g, u = (outputs[0], None) if gate is None else outputs
    packed, kind = activation.gated and u is None, activation.kind
    if activation.gated and isinstance(down, Linear):
        gate_and_up = g.detach().chunk(2, -1) if u is None else (g, u)
        source = GatedInput(*gate_and_up, kind=kind)
        if down.can_fuse_activation(source.gate) and norm.runs_whole(kind, g, u):
            # only its shape and gradient are read
            h, _ = native.activate(g, u, kind, grads, unmaterialized=True, packed=packed)
            return h, Handed(source=source)
    h, amaxes = activate(g, u, kind, grads, packed)
    return h, Handed(amaxes)

"""`fq.LayerNormMLP`: norm, gate and up, activation, down; each tensor between them is read as often as it must be."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import norm
from ..ops.norm import ACTIVATIONS
from ..recipe import Recipe
from .linear import Linear
from .linear_op import Source
from .norm import Norm
from .norm_op import activate, deferred


class LayerNormMLP(nn.Module):
    """y = down(act(gate(n)) * up(n)), or down(act(up(n))), with n = norm(x).

    activation:  gated "swiglu", "geglu" (erf), "geglu_tanh", "reglu"; or "gelu" (erf), "gelu_tanh", "silu", "relu",
                 "relu_squared", which have no gate.
    residual:    y + x is returned; the gradient of both uses of x is made in one pass.
    return_layernorm_output:  (y, n).

    x and y [.., hidden_size], gate and up [ffn_size, hidden_size], down [hidden_size, ffn_size]. state_dict keys:
    norm.weight (norm.bias), gate_proj.weight, up_proj.weight, down_proj.weight (and their biases). Gate and up share the
    codes of n; what the backward keeps is x, those codes, gate(n), up(n), and what the plan says of the product of both.

    Raises ValueError for another activation or normalization.
    """

    def __init__(
        self, hidden_size: int, ffn_size: int, activation: str = "swiglu", bias: bool = False, normalization: str = "RMSNorm",
        eps: float = 1e-5, zero_centered_gamma: bool = False, residual: bool = False, return_layernorm_output: bool = False,
        device=None, dtype=None, *, recipe: Recipe | None = None, name: str = "layernorm_mlp",
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.residual, self.return_layernorm_output = activation, residual, return_layernorm_output

        def linear(rows: int, cols: int, part: str) -> Linear:
            return Linear(cols, rows, bias, device, dtype, recipe=recipe, name=f"{name}.{part}")

        self.norm = Norm(hidden_size, normalization, eps, zero_centered_gamma, device, dtype)
        self.gate_proj = linear(ffn_size, hidden_size, "gate_proj") if ACTIVATIONS[activation].gated else None
        self.up_proj = linear(ffn_size, hidden_size, "up_proj")
        self.down_proj = linear(hidden_size, ffn_size, "down_proj")

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        normal, x = self.norm.beside(x)
        up, kind = self.up_proj(normal), ACTIVATIONS[self.activation].kind
        y = self.down_proj(activate(up, None, kind)) if self.gate_proj is None else self._down(self.gate_proj(normal), up, kind)
        if self.residual:
            y = x + y
        return (y, normal) if self.return_layernorm_output else y

    def _down(self, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        """down(act(gate) * up), whose input is quantized as it is made where the layer alone reads it."""
        if self.down_proj.takes_source(gate) and norm.runs_whole(gate, up):
            return self.down_proj(deferred(gate, up, kind), Source(gate, up, kind))
        return self.down_proj(activate(gate, up, kind))

    def extra_repr(self) -> str:
        return f"activation={self.activation}" + (", residual=True" if self.residual else "")

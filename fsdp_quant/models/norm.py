# SPDX-License-Identifier: Apache-2.0
"""`fq.Norm`: RMSNorm or LayerNorm, one kernel a pass, with the option of a zero-centred gamma."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..migration import answers_keywords
from ..ops.norm import NormSpec
from ..options import choice
from ..tensor import torch_compat
from .norm_op import normalize

NORMALIZATION = choice("RMSNorm", "LayerNorm")


def is_supported(x: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """The kernel norms x with these: plain tensors of its width and dtype, no autocast."""
    plain = not any(isinstance(t, DTensor) for t in (x, *parameters))
    mine = plain and all(
        p is None or (p.dtype is x.dtype and p.shape == x.shape[-1:]) for p in parameters
    )
    return mine and torch_compat.autocast_dtype(x.device) is None


@answers_keywords
class Norm(nn.Module):
    """A norm over the last dim: y = (x - mean) * rstd * gamma + beta.

    normalization:        "RMSNorm" (no mean, no beta) or "LayerNorm".
    zero_centered_gamma:  gamma is 1 + weight, and weight starts at 0.

    weight (and bias) [dim]; state_dict keys are those of torch's modules. x [.., dim], any floating
    dtype; under torch.autocast, and where x has another dtype than the weight, torch's own norm
    runs. Raises ValueError for another normalization, or an x of another width.

    >>> fq.Norm(64)(torch.ones(2, 64)).shape
    torch.Size([2, 64])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        normalization: str = "RMSNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.normalization = NORMALIZATION.read("normalization", normalization)
        self.spec = NormSpec(float(eps), normalization == "LayerNorm", bool(zero_centered_gamma))
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty_like(self.weight)) if self.spec.centred else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.spec.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_with_input(x)[0]

    def forward_with_input(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(norm of x, x, amax of the norm or None); the second as in `norm_op.normalize`."""
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"{self.normalization}: input is {list(x.shape)}, its last dim must be "
                f"{self.weight.shape[0]}"
            )
        if not is_supported(x, (self.weight, self.bias)):
            return self._by_torch(x), x, None
        return normalize(x, self.weight, self.bias, self.spec)

    def _by_torch(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.spec.zero_centered else self.weight
        if self.spec.centred:
            return F.layer_norm(x, weight.shape, weight, self.bias, self.spec.eps)
        return F.rms_norm(x, weight.shape, weight, self.spec.eps)

    def extra_repr(self) -> str:
        centred = ", zero_centered_gamma=True" if self.spec.zero_centered else ""
        return f"{self.weight.shape[0]}, {self.normalization}, eps={self.spec.eps:g}{centred}"

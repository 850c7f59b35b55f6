# SPDX-License-Identifier: Apache-2.0
"""Optimizers that keep fp32 masters of quantized parameters.

>>> with fq.quantized_model_init("mxfp8"):
...     layer = fq.Linear(64, 32)
>>> optimizer = fq.optim.FusedAdam(layer.parameters(), lr=1e-3)
>>> layer(torch.ones(2, 64)).sum().backward()
>>> optimizer.step()
"""

from .fused_adam import FusedAdam
from .wrapped import wrap

__all__ = ["FusedAdam", "wrap"]

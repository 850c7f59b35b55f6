"""Optimizers that keep fp32 masters of quantized parameters."""

from .fused_adam import FusedAdam
from .wrapped import wrap

__all__ = ["FusedAdam", "wrap"]

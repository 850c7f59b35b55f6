"""Optimizers that keep fp32 masters of quantized parameters."""

from .fused_adam import FusedAdam

__all__ = ["FusedAdam"]

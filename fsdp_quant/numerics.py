# SPDX-License-Identifier: Apache-2.0
"""`fq.numerics`: formats, the quantizers and storages that use them, and the GEMM of two
storages; `batch_invariant`.

>>> x = torch.randn(64, 32)
>>> q = fq.numerics.Quantizer("mxfp8")
>>> fq.numerics.gemm(q.quantize(x).rowwise, q.quantize(x).rowwise).shape
torch.Size([64, 64])
"""

from .context import batch_invariant
from .formats import COLUMNWISE, FORMATS, ROWWISE, Direction, Format, format_of
from .gemm import gemm
from .linear.boundary import Quantize
from .quantizer import HybridQuantizer, Quantizer
from .roles import Role
from .scaling import DelayedScaling
from .storage import Storage
from .tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "COLUMNWISE",
    "FORMATS",
    "ROWWISE",
    "DelayedScaling",
    "Direction",
    "Format",
    "HybridQuantizer",
    "Quantize",
    "QuantizedTensor",
    "Quantizer",
    "Role",
    "Storage",
    "batch_invariant",
    "format_of",
    "gemm",
]

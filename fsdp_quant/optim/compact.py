# SPDX-License-Identifier: Apache-2.0
"""States of Adam in fewer bytes: moments in 8 bits, and masters as remainders of bf16 parameters.

[Note: 8-bit moments]
A block is 256 consecutive elements of a row (one index of dim 0), or the tail of the row. Shards of
dim 0 cut no block, so states do not depend on them. For a block x, in fp32:
    scale = max |x| / 256                 the decode scale; 0 where it would be subnormal
    code  = e4m3(x * (1 / scale))         nearest, ties to even
    x'    = code * scale                  max |x| exactly; encoding x' again gives the same codes
This stores exp_avg, and the root of exp_avg_sq; a nonzero root has a nonzero code.

Block-wise 8-bit states are from Dettmers et al., 8-bit Optimizers via Block-wise Quantization
(ICLR 2022), which maps values through tables; bitsandbytes and torchao have blocks of 256 too. e4m3
replaces the table, as in FP8-LM (Peng et al., 2023): one GPU instruction encodes two elements, a
table costs eight reads per element. e4m3 has 17 binades below the largest of a block, which as
roots are 34 of exp_avg_sq: a gradient of 2^-17 of the block's largest is not 0, and no update
divides by 0. The scale is fp32 and not a power of two: an exp_avg_sq without gradients shrinks by
beta2 per step, which codes alone would round away.

[Note: remainders]
The bits of a fp32 master are those of its bf16 parameter, then 16 more:
    low  = the lower 16 bits, as a signed integer
    high = bits of (master - low)         bf16: the nearest one, ties away from 0
    master = high * 2^16 + low            exactly, of any bits but a NaN's, which becomes 0x7fc00000
So the parameter differs from the master rounded to nearest even in ties alone, and no update is
lost. If something else wrote the parameter, the master is within half an ulp of it and rounds to
it.
Source: the layout is that of apex's distributed fused Adam (store_param_remainders).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 256  # elements per scale
LEAST = 4096  # elements of a tensor whose moments are worth codes
_CODE_OF_MAX = 256.0
_NAN_BITS = 0x7FC00000


def scale_shape(shape: torch.Size) -> tuple[int, int]:
    """Return [rows, blocks per row] of the scales of a tensor of at least two dims."""
    return shape[0], -(-shape[1:].numel() // BLOCK)


def takes_codes(p: Tensor) -> bool:
    """Return whether the moments of p can be codes: p has two dims or more and 4096 elements or
    more, and no shard cuts a block.

    Equal on all ranks: depends on a DTensor's whole shape and placements.
    """
    if p.dim() < 2 or p.numel() < LEAST:
        return False
    if not isinstance(p, DTensor):
        return True
    cut = {}  # ranks that cut each dim but the first
    for axis, placement in enumerate(p.placements):
        if dim := getattr(placement, "dim", 0):
            cut[dim] = cut.get(dim, 1) * p.device_mesh.size(axis)
    return not cut or (cut.keys() == {1} and p.dim() == 2 and p.shape[1] % (BLOCK * cut[1]) == 0)


def _blocks(x: Tensor) -> Tensor:
    """Return x as [rows, blocks, 256], zero-padded at the end of a row."""
    rows, blocks = scale_shape(x.shape)
    flat = x.reshape(rows, x.shape[1:].numel())
    return torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.shape[1])).view(
        rows, blocks, BLOCK
    )


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(1)[:, : shape[1:].numel()].reshape(shape)


def encode(x: Tensor, is_root: bool = False) -> tuple[Tensor, Tensor]:
    """Return (codes, scale) of a moment.

    x:        [N, ..] fp32.
    is_root:  x is not negative; nonzero values get nonzero codes.
    returns:  uint8 [N, ..]; fp32 [N, blocks per row].

    A NaN or an infinity makes its whole block NaN.
    """
    blocks = _blocks(x)
    scale = blocks.abs().amax(-1, keepdim=True) * (1 / _CODE_OF_MAX)
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0)
    inverse = scale.reciprocal().masked_fill(scale == 0, 0)
    codes = (blocks * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    if is_root:
        codes = codes.masked_fill((blocks > 0) & (scale != 0) & (codes == 0), 1)
    return _unblocked(codes, x.shape), scale.squeeze(-1)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return fp32 values of codes [N, ..]."""
    values = _blocks(codes.view(torch.float8_e4m3fn).float()) * scale.unsqueeze(-1)
    return _unblocked(values, codes.shape)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bf16 [..], uint8 [.., 2]) of a fp32 master: the parameter and its remainder."""
    master = master.contiguous()
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN_BITS)
    low = bits.to(torch.int16)  # wraps
    high = ((bits - low.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), low.unsqueeze(-1).view(torch.uint8)


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master: the inverse of `split`."""
    high = parameter.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.view(torch.int16).squeeze(-1).to(torch.int32)).view(torch.float32)

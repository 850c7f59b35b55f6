# SPDX-License-Identifier: Apache-2.0
"""Launch GEMMs, find groups of tokens, and estimate the error of shared exponents. Mirrors
csrc/api/gemm.cpp and grouped_gemm.cpp, whose products `grouped_step` launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...formats import Format, round_up
from ..capability import ELEMENTS

_ops = torch.ops.fsdp_quant


_SCALINGS = {
    ("fp32", (None, None)): 1,
    ("fp32", (1, None)): 2,
    ("fp32", (1, 128)): 3,
    ("fp32", (128, 128)): 4,
    ("fp32", (1, 512)): 7,
}
_BYTE_SCALINGS = {"e8m0": 5, "e4m3": 6}


@functools.cache
def operand_code(fmt: Format) -> int:
    """Return the integer that stands for a GEMM operand of this format: element | scaling << 3."""
    if not fmt.is_quantized:
        return 0
    scaling = _BYTE_SCALINGS.get(fmt.scale) or _SCALINGS[fmt.scale, fmt.block]
    return ELEMENTS[fmt.element.name] | scaling << 3


class Operand(NamedTuple):
    """One operand of a GEMM: [outer, contraction] codes or 16-bit values, their scales, and the
    format.

    16-bit values of a grouped GEMM may have one fp32 scale per group.
    """

    data: Tensor
    scale: Tensor | None
    fmt: Format


def _fitting(o: Operand, outer_multiple: int) -> Operand:
    """Pad the codes with zero rows and columns to the multiples that the GEMM requires. Align each
    row of codes to 16 bytes."""
    outer, width = o.data.shape
    pad_outer, pad_width = -outer % outer_multiple, -width % 16
    data, scale = o.data, o.scale
    if pad_outer or pad_width:
        data = F.pad(data, (0, pad_width, 0, pad_outer))
    elif data.stride(0) % 16 or data.storage_offset() % 16:
        data = data.clone(memory_format=torch.contiguous_format)
    if pad_outer and scale is not None and o.fmt.has_fp32_scales and o.fmt.block[0] == 1:
        if o.fmt.block[1] is not None:
            scale = scale.view(-1, round_up(outer, 4))[:, :outer]
        scale = F.pad(scale, (0, pad_outer)).contiguous()
    if scale is not None and scale.storage_offset() * scale.element_size() % 16:
        scale = scale.clone()
    return Operand(data, scale, o.fmt)


class Watch(NamedTuple):
    """Where a product of 8-bit codes with fp32 scales per tensor, line or run adds what it lost to
    anchors in probed steps: fp32 guard[product], of [3, 2]. counted: `packed_counts`. step: int64
    [5]. apart: by an operator of its own (partitioners know no cost of one that writes)."""

    counted: int
    step: Tensor
    guard: Tensor
    product: int
    apart: bool = False


def product_error(a: Operand, b: Operand, watch: Watch) -> None:
    """Add the estimate of `ops.product_error`."""
    _ops.product_error(*_pair(a, b), *watch[:4])


def _pair(a: Operand, b: Operand) -> tuple:
    return a.data, b.data, a.scale, b.scale, operand_code(a.fmt), operand_code(b.fmt)


def set_probed(probed: bool) -> None:
    """Launch `product_error` from now on, or in captures alone: no device's step is probed."""
    if hasattr(_ops, "set_probed"):
        _ops.set_probed(probed)


def packed_counts(counted: tuple[int, int]) -> int:
    """Pack how `product_error` counts both operands into the integer that operators accept."""
    return counted[0] | counted[1] << 4


def gemm(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    alpha: Tensor | None,
    watch: Watch | None = None,
) -> Tensor:
    """Compute alpha * a b^T + bias; with `accumulate`, add it to `out`. Partial sums of 8-bit codes
    are promoted to fp32."""
    given, m, n, has_codes = (a, b), a.data.shape[0], b.data.shape[0], a.fmt.is_quantized
    if has_codes:
        a, b = _fitting(a, 16 if a.fmt.block[1] == 128 else 1), _fitting(b, 16)
    fits = (a.data.shape[0], b.data.shape[0]) == (m, n)
    out_dtype = out.dtype if out is not None else out_dtype
    # Only our kernels multiply scales of 512. They write bf16 and fp32, and accumulate into fp32.
    is_ours = has_codes and a.fmt.block[1] == 512
    writes_fp32 = is_ours and (
        out_dtype is torch.float16 or (accumulate and out_dtype is not torch.float32)
    )
    fused_bias, later_bias = bias, None
    adds_bias = fits and not writes_fp32 and not (has_codes and out_dtype is torch.float32)
    if bias is not None and not (adds_bias and bias.dtype is out_dtype):
        fused_bias, later_bias = None, bias
    elif bias is not None and bias.storage_offset() * bias.element_size() % 16:
        fused_bias = bias.clone()
    operands, writes_fp32 = _pair(a, b), writes_fp32 or later_bias is not None
    if watch is not None and (watch.apart or out is not None or not fits):
        product_error(*given, watch)
        watch = None
    if out is not None and fits and not writes_fp32:
        _ops.gemm_out(out, *operands, accumulate, fused_bias, alpha)
        return out
    written = torch.float32 if writes_fp32 else out_dtype
    product, watched = (_ops.gemm, ()) if watch is None else (_ops.watched_gemm, watch[:4])
    y = product(*operands, written, *watched, fused_bias, alpha)
    y = y if fits else y[:m, :n].contiguous()
    if later_bias is not None:
        y = (y + later_bias.float()).to(out_dtype)
    return y.to(out_dtype) if out is None else out.add_(y) if accumulate else out.copy_(y)


def batch_invariant_gemm(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """Compute a b^T so that the number of rows of a changes no bit of a row: by the kernels for
    groups of tokens, of one group. They add up K in one order, whatever the tile, and never cut it.

    a, b:       codes with fp32 scales other than per 512, or bf16 values.
    out_dtype:  bf16 or fp32.
    """
    m, n = a.data.shape[0], b.data.shape[0]
    a, b = _fitting(a, 1), _fitting(b, 16)
    y = a.data.new_empty((m, b.data.shape[0]), dtype=out_dtype)
    offsets = torch.arange(2, dtype=torch.int32, device=y.device) * m  # of one group
    kinds = operand_code(a.fmt), operand_code(b.fmt)
    _ops.grouped_gemm(y, a.data, b.data[None], a.scale, b.scale, offsets, *kinds)
    return y if y.shape[1] == n else y[:, :n].contiguous()


class TokenGroups(NamedTuple):
    """Row ranges of each group of tokens: tables in one int32 buffer on the device."""

    tables: Tensor
    groups: int

    @property
    def sources(self) -> Tensor:
        """[tiles, 4]: for each tile of 128 rows of `padded`, the first token, the number of tokens,
        the group, and the group's first row."""
        return self.tables[: -2 * (self.groups + 1)].view(-1, 4)

    @property
    def offsets(self) -> Tensor:
        """[E + 1]: the first row of each group."""
        return self.tables[-2 * (self.groups + 1) : -(self.groups + 1)]

    @property
    def padded(self) -> Tensor:
        """[E + 1]: the first row of each group if groups are padded to multiples of 128."""
        return self.tables[-(self.groups + 1) :]


MOST_GROUPS = 1024


def token_groups(
    ends: Tensor, tokens: int, wrong: Tensor | None = None, tag: int = 0
) -> TokenGroups:
    """Build the tables of the groups of `tokens` rows, without waiting for the device.

    ends:   int32 or int64 [E], the row after each group's last. They must not decrease, and the
            last must be `tokens`.
    wrong:  int64 [1], on the device or pinned; set to tag << 32 | tokens if ends are wrong. Wrong
            ends are clamped.
    """
    return TokenGroups(_ops.token_groups(ends.contiguous(), tokens, wrong, tag), len(ends))

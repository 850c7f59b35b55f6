# SPDX-License-Identifier: Apache-2.0
"""Register shapes of results for torch.compile, and FLOPs for `torch.utils.flop_counter`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import register_flop_formula

from ...formats import ceil_div, round_up
from .. import extension
from ..capability import ELEMENTS
from ..layout import SPREAD_BLOCKS
from .encoding import TILE, EncodingShapes, encoding_shapes
from .layouts import OF_TENSOR, anchor_shape
from .norms import amaxes_like

_ops = torch.ops.fsdp_quant


def _floats(x: Tensor, size: int | Sequence[int]) -> Tensor:
    return x.new_empty(size, dtype=torch.float32)


def _shapes_of(row: int, col: int, *where) -> list[tuple[bool, EncodingShapes]]:
    """(is columnwise, shapes) of the directions that are encoded. where: the other arguments of
    `encoding_shapes`."""
    directions = ((False, row), (True, col))
    return [(d, encoding_shapes(packed, d, *where)) for d, packed in directions if packed]


# The dispatcher omits trailing arguments that equal their default, so fakes receive fewer.
def _fake_quantize(x, row, col, row_eps, col_eps, row0, round_to_bf16, *known):
    results = []
    for columnwise, shapes in _shapes_of(row, col, x.shape, row0):
        amax, tensor_amax = (*known, *[None] * 8)[4 * columnwise : 4 * columnwise + 2]
        results.append(x.new_empty(shapes.data, dtype=torch.uint8))
        results.append(x.new_empty(shapes.scale, dtype=shapes.scale_dtype))
        if shapes.tensor_amax and tensor_amax is None:
            results.append(_floats(x, shapes.tensor_amax))
        if shapes.has_amax and amax is None:
            results.append(_floats(x, shapes.amax))
    return results


def _fake_anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, round_to_bf16):
    rowwise = _shapes_of(row, 0, x.shape, 0, row_run)
    results = []
    for _, shapes in rowwise + _shapes_of(0, col, x.shape, 0, col_run):
        results += [x.new_empty(shapes.data, dtype=torch.uint8), _floats(x, shapes.scale)]
    directions = (row, row_run, row_anchor), (col, col_run, col_anchor)
    known = [anchor for of, run, anchor in directions if of and run == OF_TENSOR]
    return [*results, _floats(x, 1)] if known and known[0] is None else results


def _fake_statistics(x, row, col, row0, round_to_bf16):
    results = []
    for _, shapes in _shapes_of(row, col, x.shape, row0):
        results.append(_floats(x, shapes.amax))
        results += [_floats(x, shapes.tensor_amax)] if shapes.tensor_amax else []
    return results


def _fake_statistics_group(x, packed, columnwise, row0, round_to_bf16):
    row, col = (0, packed) if columnwise else (packed, 0)
    amaxes = [_fake_statistics(t, row, col, start, round_to_bf16) for t, start in zip(x, row0)]
    return [amax for pair in amaxes for amax in pair]


def _fake_anchor_codes(
    data, scale, tensor_amax, packed, columnwise, transposed, of_tensor, cols, run=0
):
    *matrices, rows, _ = data.shape
    lines = anchor_shape(rows, cols, columnwise, OF_TENSOR if of_tensor else run)
    sizes = (cols, rows) if transposed else (rows, cols)
    return data.new_empty((*matrices, *sizes)), _floats(data, (*matrices, *lines))


def _fake_swizzle(scale, outer, outer_block, transposed):
    blocks = scale.shape[0 if transposed else 1]
    width = SPREAD_BLOCKS * blocks if scale.dtype is torch.float32 else round_up(blocks, 4)
    return scale.new_empty(round_up(outer, TILE) * width, dtype=torch.uint8)


FAKES = {
    "quantize": _fake_quantize,
    "quantize_anchored": _fake_anchored,
    "statistics": _fake_statistics,
    "column_sums": lambda x: x.new_empty(x.shape[1]),
    "statistics_group": _fake_statistics_group,
    "dequantize": lambda data, scale, tensor_amax, packed, columnwise, cols, row0, dtype: (
        data.new_empty((data.shape[0], cols), dtype=dtype)
    ),
    "random_key": lambda step, ids, slot, rows: step.new_empty(5),
    "random_key.after": lambda step, ids, slot, rows, after: step.new_empty(5),
    "gradient_keys": lambda step, idents, counted: step.new_empty((idents.numel(), 5)),
    "tensor_decode_scale": lambda tensor_amax, packed: _floats(tensor_amax, tensor_amax.numel()),
    "transpose_codes": lambda data, rows, cols, bits: data.new_empty(
        (cols, ceil_div(rows, 2) if bits == 4 else rows)
    ),
    "swizzle_scales": _fake_swizzle,
    "anchor_codes": _fake_anchor_codes,
    "activation": lambda g, u, kind: (g.new_empty(g.shape), amaxes_like(g, 1)),
    "activation_backward": lambda dh, g, u, kind: (
        g.new_empty(g.shape),
        g.new_empty(0 if u is None else g.shape),
        amaxes_like(g, 1 + (u is not None)),
    ),
    "norm": lambda x, weight, bias, eps, centred, *rest: (
        x.new_empty(x.shape),
        _floats(x, 1),
        _floats(x, x.numel() // x.shape[-1]),
        _floats(x, x.numel() // x.shape[-1] if centred else 0),
    ),
    # flags: zero_centered, rounds_first, has_bias
    "norm_backward": lambda dy, x, weight, residual, rstd, mean, *flags: (
        x.new_empty(x.shape),
        _floats(x, 1),
        x.new_empty(x.shape[-1]),
        x.new_empty(x.shape[-1] if flags[2] else 0),
    ),
    "combine": lambda rows, back, weights: rows.new_empty((back.shape[0], rows.shape[1])),
    "combine_backward": lambda dout, rows, back, weights: (
        dout.new_empty((back.numel(), dout.shape[1])),
        dout.new_empty(
            0 if rows is None else back.shape,
            dtype=torch.float32 if weights is None else weights.dtype,
        ),
    ),
    "adam_count": lambda step, *args: step[0].new_empty((len(step), 8)),
    "gemm": lambda a, b, a_scale, b_scale, a_kind, b_kind, out_dtype, *rest, **options: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=out_dtype
    ),
}
_WITHOUT_RESULTS = (
    "quantize_group quantize_group_out cast_pieces cast_scales record_amax anchor_group "
    "relayout_group adam adam_group gemm_out product_error grouped_gemm grouped_gemm_wgrad "
    "encode_gradients decode_gradients"
)
FAKES |= dict.fromkeys(_WITHOUT_RESULTS.split(), lambda *args, **options: None)
FAKES["watched_gemm"] = FAKES["gemm"]


def _flops(a: Sequence[int], b: Sequence[int], kind: int = 0) -> int:
    """Count 2 M N K for a [M, K] and b [N, K]. kind: `operand_code` of a; 4-bit codes have two
    elements per byte of K."""
    return 2 * a[0] * prod(b) * (2 if kind & 7 == ELEMENTS["e2m1"] else 1)


# Under `activation_memory_budget` a partitioner that is set to include library operators may
# recompute them, by these counts. Then the forward GEMM of a gathered weight may run again, so the
# backward gathers both directions.
FLOPS = {
    "gemm": lambda a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    "gemm_out": lambda out, a, b, a_scale, b_scale, kind, *rest, **options: _flops(a, b, kind),
    # each row of a times its group's [N, K]
    "grouped_gemm": lambda out, a, b, *rest, **options: _flops(a, b[1:]),
    "grouped_gemm_wgrad": lambda out, a, b, *rest, **options: _flops(a, b),
}
FLOPS["watched_gemm"] = FLOPS["gemm"]
if extension.is_loaded():
    for _name, _fake in FAKES.items():
        torch.library.register_fake(f"fsdp_quant::{_name}", _fake)
    for _name, _formula in FLOPS.items():
        register_flop_formula(getattr(_ops, _name))(_formula)
    SAC_IGNORED_OPS.add(_ops.product_error.default)  # of some steps: a forward may be without it

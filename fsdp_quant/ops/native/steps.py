# SPDX-License-Identifier: Apache-2.0
"""Run each pass of a linear layer or an expert layer in one call. Mirrors csrc/step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...formats import ROWWISE, Encoding
from ..capability import unsupported_reason
from ..layout import (
    ANCHORED_128,
    ANCHORED_512,
    ANCHORS,
    LAID_OUT,
    is_anchored_of_codes,
    is_exact_operand,
    operand_format,
)
from ..layout import COMPACT as COMPACT_LAYOUT
from .encoding import COMPACT, OPERAND, pack_encoding, scale_layout_of, written_as
from .gemms import Operand, TokenGroups, operand_code, packed_counts
from .layouts import anchor_run
from .norms import contiguous_aligned
from .quantization import rows_of

_ops = torch.ops.fsdp_quant


def grouped_step(
    x: Tensor,
    ends: Tensor,
    weight: Operand,
    plan: int,
    call: StepCall,
    ids: Sequence[Tensor],
    bias: Tensor | None,
    wrong: Tensor | None,
    tag: int,
    order: Tensor | None = None,
    shares: Tensor | None = None,
) -> tuple[Tensor, TokenGroups, list[Tensor]]:
    """Return y of x [tokens, K], its groups (`token_groups`), and the codes that the backward
    saves. See csrc/step/grouped.cpp.

    weight:  the grouped GEMM's operand; for codes that are decoded first, their values with one
             fp32 scale per group.
    call:    factors and histories of a slot: those of all groups for its first delayed direction,
             then for the next.
    ids:     int64 [3] per group, if something is rounded stochastically (`random_key`).
    bias:    [E, N], added to the fp32 sums of codes before they are rounded to bf16.
    order:   int64 [tokens], the row of x of each token; None: x has the tokens.
    shares:  fp32 [tokens]; x is [g, u] [tokens, 2 K], and silu(g) * u times these is multiplied.
    """
    ends = ends if ends.is_contiguous() else ends.contiguous()
    operands = rows_of(x), ends, weight.data, weight.scale, plan, call.save, call.guard
    state = call.factors[0], call.histories[0], call.step, ids, order, shares
    y, tables, *saved = _ops.grouped_step(*operands, contiguous_aligned(bias), wrong, tag, *state)
    return y, TokenGroups(tables, ends.shape[0]), saved


def bad_splits_flag() -> Tensor:
    """Return int64 [1] of pinned memory, to which steps in graphs report malformed ends."""
    return _ops.bad_splits_flag()


def grouped_dgrad(
    dy: Tensor,
    groups: TokenGroups,
    weight: Operand | None,
    keeps: bool,
    plan: int,
    call: StepCall,
    ids: Sequence[Tensor],
    swiglu: Sequence[Tensor] = (),
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return dx [tokens, K], the gradient of shares [tokens], and, if it `keeps` them, the
    columnwise codes of the gradients. dx is empty without `weight`, the second without `swiglu`.

    weight:  the columnwise operand of the weights.
    swiglu:  [g, u] [tokens, N] and shares, if dy is the gradient of silu(g) * u times these.
    order:   int64 [tokens]: the gradients are these rows of dy; None: dy.
    """
    operands = rows_of(dy), groups.tables, groups.groups, *(weight or (None, None))[:2], keeps, plan
    state = call.guard, call.factors[2], call.histories[2], call.step, ids, swiglu, order
    dx, dshares, *codes = _ops.grouped_dgrad(*operands, *state)
    return dx, dshares, codes


def grouped_wgrad(
    dy: Tensor,
    codes: Sequence[Tensor],
    groups: TokenGroups,
    saved: Sequence[Tensor],
    plan: int,
    call: StepCall,
    ids: Sequence[Tensor],
    transposes: bool = False,
) -> Tensor:
    """Return dw [E, N, K], or [E, K, N] if it `transposes`.

    codes:  of dy, from `grouped_dgrad`. saved: the tensors that the forward saved of x.
    """
    operands = rows_of(dy), codes, groups.tables, groups.groups, saved, plan, call.guard
    return _ops.grouped_wgrad(*operands, call.factors[0], call.step, ids, transposes)


class OperandSpec(NamedTuple):
    """Spec of one direction of a slot: how it is quantized, and how its GEMM reads it. See
    csrc/step/plan.h."""

    side: int = 0
    run: int = -1
    kind: int = 0
    same: bool = False
    factor: int = -1
    eps: float = 0.0


def operand_spec_of(
    encoding: Encoding, layout: str, domain: str, arch: str, same: bool, factor: int | None
) -> OperandSpec | None:
    """Return the spec of one direction of a slot, None if the compiled step does not support it.

    domain:  domain of the GEMM that reads it.
    same:    the columnwise direction shares the rowwise codes.
    factor:  index of the history of the slot that scales it, None without delayed scaling.
    """
    fmt, written = encoding.fmt, written_as(encoding)
    turned = written.direction is not ROWWISE
    if not fmt.is_quantized:
        return OperandSpec()
    laid_out = layout in LAID_OUT
    # one scale per line, applied after the GEMM
    factored = fmt.has_row_scales or fmt.scale_leaves_contraction and fmt.block != (None, None)
    factored |= fmt.is_turned  # the step is given operands of such codes
    operand = is_exact_operand(fmt, layout)
    if domain == "reference" or unsupported_reason(fmt) or (layout == COMPACT_LAYOUT and factored):
        return None
    of_codes = is_anchored_of_codes(fmt, layout)
    # scales [runs, lines], as the GEMM reads them
    by_run = layout in (ANCHORED_512, ANCHORED_128) and not turned and not of_codes
    scales = OPERAND if operand else scale_layout_of(arch) if laid_out or by_run else COMPACT
    return OperandSpec(
        pack_encoding(written, turned and layout != COMPACT_LAYOUT and not of_codes, scales),
        anchor_run(layout) if layout in ANCHORS and not operand else -1,
        operand_code(operand_format(fmt, layout)) if layout != COMPACT_LAYOUT else 0,
        same,
        -1 if factor is None else factor,
        encoding.eps,
    )


def linear_plan(
    operand_specs: Sequence[OperandSpec],
    saves_input: bool,
    watched: Sequence[tuple[int, int]],
    key: str,
) -> int:
    """Register a plan with the compiled step and return its number.

    operand_specs:  rowwise and columnwise specs of the input, the weight and the gradient of the
                    output.
    watched:        how `product_error` counts the operands of fprop, dgrad and wgrad.
    """
    fields = [f for r in operand_specs for f in r[:5]] + [saves_input, *map(packed_counts, watched)]
    return _ops.linear_plan(fields, [r.eps for r in operand_specs], key)


def linear_weight(
    weight: Tensor,
    plan: int,
    row: bool,
    col: bool,
    round_to_bf16: bool,
    factors: list[Tensor],
    amaxes: list[Tensor],
) -> list[Tensor]:
    """Quantize a weight to the buffers (`BUFFERS` that exist) of the wanted directions, in one
    read.

    weight:    [N, K], or matrices [E, N, K].
    row, col:  which directions are wanted.
    returns:   for [E, N, K], the buffers of all matrices stacked; for 4 bits, as
               csrc/step/weight.cpp defines (`stacked_fp4`).
    """
    return _ops.linear_weight(rows_of(weight), plan, row, col, round_to_bf16, factors, amaxes)


class StepCall(Protocol):
    """What a compiled step reads of a call (`linear.call.Call`)."""

    @property
    def save(self) -> bool: ...
    @property
    def step(self) -> Tensor | None: ...
    @property
    def ids(self) -> Tensor | None: ...
    @property
    def guard(self) -> Tensor | None: ...
    @property
    def factors(self) -> Sequence[Sequence[Tensor]]: ...
    @property
    def histories(self) -> Sequence[Sequence[Tensor]]: ...
    @property
    def ranks(self) -> tuple[str, bool, int, bool, bool, int, int]: ...


class WeightOperand(NamedTuple):
    """A weight as a compiled step accepts it.

    values:         to be quantized inside; None: codes.
    round_to_bf16:  round the values first.
    rowwise, columnwise:  buffers of codes.
    """

    values: Tensor | None
    round_to_bf16: bool = False
    rowwise: Sequence[Tensor] = ()
    columnwise: Sequence[Tensor] = ()


def linear_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand: WeightOperand,
    plan: int,
    call: StepCall,
    codes: Sequence[Tensor],
    adds_to: tuple[Tensor | None, int],
    amaxes: Tensor | None,
    grad_amaxes: Tensor | None,
) -> list[Tensor]:
    """Return y [.., N], and the codes of x. See csrc/step/linear.cpp. With gradients enabled, y has
    the autograd node that computes the gradients.

    operand:      the weight. plan: of `linear_plan`.
    codes:        of x, as an earlier step returned them; empty: x is quantized. Of a cut x that
                  other layers read: the gathered operand (data, scale), then what is saved for the
                  backward.
    adds_to:      fp32 tensor to which the backward adds dw, and what autograd is given then
                  (`Placeholder` of csrc/step/plan.h); None: autograd is given dw.
    amaxes:       of x, as the kernel that wrote x left them; None: not known.
    grad_amaxes:  where the node of the gradient of y writes its amaxes; None: nowhere.

    Ranks of `call.ranks` exchange what `linear.transport` does.
    """
    is_quantized_here = operand.values is not None
    return _ops.linear_step(
        x,
        weight,
        bias,
        operand.values,
        operand.rowwise,
        operand.columnwise,
        plan,
        operand.round_to_bf16,
        call.save,
        call.step,
        call.ids,
        call.guard,
        call.factors[0],
        call.factors[2],
        call.factors[1] if is_quantized_here else (),
        call.histories[0],
        call.histories[2],
        call.histories[1] if is_quantized_here else (),
        codes,
        amaxes,
        grad_amaxes,
        *call.ranks,
        *adds_to,
    )


def linear_gated(source: tuple[Tensor, Tensor, int], plan: int, call: StepCall) -> list[Tensor]:
    """Return the codes of act(gate) * up, for a `linear_step` whose x is not materialized.

    source:  gate, up and the activation (`ops.norm.KINDS`).
    """
    of_input = call.factors[0], call.histories[0]
    return _ops.linear_gated(*source, plan, call.save, call.step, call.ids, call.guard, *of_input)


def linear_counts() -> list[list[int]]:
    """Return counts since the last call, per plan: quantizations of input, weight and gradient
    (rowwise, columnwise each), GEMMs, bytes that ranks gathered of input and gradient, all-reduces
    of amaxes of activations and weights."""
    return _ops.linear_counts().tolist()


def random_key(
    step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None
) -> Tensor:
    """Compute the random key of a slot's rows, int64 [5] (`rng.KEY_FIELDS`), from the step's fields
    (`context.STEP_FIELDS`).

    after:  a tensor on which the key depends; in a graph this keeps the key in the backward.
    """
    if after is None:
        return _ops.random_key(step, ids, slot, rows)
    return _ops.random_key.after(step, ids, slot, rows, after)


def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """Set amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    _ops.record_amax(amaxes, amax)

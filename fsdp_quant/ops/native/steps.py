# SPDX-License-Identifier: Apache-2.0
"""A linear layer's and an expert layer's passes in one call each. Mirrors csrc/step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from .encoding import COMPACT, OPERAND, pack_encoding, scale_layout_of
from .gemms import Operand, TokenGroups, operand_code, packed_counts
from .layouts import anchor_run
from .quantization import rows_of

_ops = torch.ops.fsdp_quant


def linear_tokens(
    x: Tensor,
    plan: int,
    slot: int,
    row: bool,
    col: bool,
    guard: Tensor | None,
    groups: TokenGroups,
    factors: Sequence[Tensor] = (),
    step: Tensor | None = None,
    ids: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Codes and scales of x [tokens, cols] as a plan reads its input (slot 0) or gradient (2), each
    group quantized by itself.

    Columnwise codes are of groups that begin at multiples of 128, in rows that no group has not
    set. Scales that span tokens are one set a group, [E, lines] or [E], not set where it has no
    tokens. Two-level codes have tensor amaxes [E] too, and columnwise are [cols, tokens / 2], with
    scales [cols, tokens / 16]. The rest: as of `grouped_step`.
    """
    return _ops.linear_tokens(rows_of(x), plan, slot, row, col, guard, *groups, factors, step, ids)


def grouped_step(
    x: Tensor,
    ends: Tensor,
    weight: Operand,
    plan: int,
    save: bool,
    guard: Tensor | None,
    out_dtype: torch.dtype,
    wrong: Tensor | None,
    tag: int,
    factors: Sequence[Tensor] = (),
    histories: Sequence[Tensor] = (),
    step: Tensor | None = None,
    ids: Sequence[Tensor] = (),
) -> tuple[Tensor, TokenGroups, list[Tensor]]:
    """y of x [tokens, K], its groups (`token_groups`), and the codes that the backward keeps: see
    csrc/step/grouped.cpp.

    weight:              as a product of groups reads it; values of codes that are decoded, with one
                         fp32 scale a group.
    factors, histories:  of the delayed sides: those of all groups for the first side, then for the
                         next.
    step, ids:           int64 [5] and, of each group, int64 [3], where something is rounded
                         stochastically (`random_key`).
    """
    ends = ends if ends.is_contiguous() else ends.contiguous()
    y, tables, *kept = _ops.grouped_step(
        rows_of(x),
        ends,
        weight.data,
        weight.scale,
        plan,
        save,
        guard,
        out_dtype,
        wrong,
        tag,
        factors,
        histories,
        step,
        ids,
    )
    return y, TokenGroups(tables, len(ends)), kept


def grouped_step_backward(
    dy: Tensor,
    groups: TokenGroups,
    weight: Operand | None,
    saved: Sequence[Tensor],
    plan: int,
    guard: Tensor | None,
    factors: Sequence[Tensor] = (),
    grad_factors: Sequence[Tensor] = (),
    grad_histories: Sequence[Tensor] = (),
    step: Tensor | None = None,
    ids: Sequence[Tensor] = (),
    turned: bool = False,
) -> tuple[Tensor, Tensor]:
    """dx [tokens, K] of the columnwise operand of the weights, dw [E, N, K] of what was saved of x;
    empty without those.

    turned:   dw is [E, K, N].
    factors:  of x, where x was saved; grad_factors, grad_histories: of dy.
    """
    data, scale = (None, None) if weight is None else weight[:2]
    return _ops.grouped_step_backward(
        rows_of(dy),
        *groups,
        data,
        scale,
        saved,
        plan,
        guard,
        factors,
        grad_factors,
        grad_histories,
        step,
        ids,
        turned,
    )


class OperandSpec(NamedTuple):
    """How one direction of a slot is quantized, and how its product reads it: see
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
    """None for what the compiled step does not do.

    domain:  of the product that reads it.
    same:    a columnwise side with the codes of the rowwise one.
    factor:  which of the slot's histories scales it, None without delayed scaling.
    """
    fmt, turned = encoding.fmt, encoding.direction is not ROWWISE
    if not fmt.is_quantized:
        return OperandSpec()
    laid_out = layout in LAID_OUT
    # a scale a line, after the product
    factored = fmt.scale_leaves_contraction and fmt.block != (None, None)
    operand = is_exact_operand(fmt, layout)
    if domain == "reference" or unsupported_reason(fmt) or (layout == COMPACT_LAYOUT and factored):
        return None
    by_run = layout in (ANCHORED_512, ANCHORED_128) and not turned  # [runs, lines], as multiplied
    scales = OPERAND if operand else scale_layout_of(arch) if laid_out or by_run else COMPACT
    return OperandSpec(
        pack_encoding(
            encoding,
            turned and layout != COMPACT_LAYOUT and not is_anchored_of_codes(fmt, layout),
            scales,
        ),
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
    """The number of a plan: rowwise and columnwise readings of the input, the weight and the
    gradient of the output.

    watched:  of fprop, dgrad and wgrad, how `product_error` counts the operands.
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
    """Buffers (`BUFFERS` that exist) of the operands of a weight [N, K] that are wanted, in one
    read of it; of matrices [E, N, K] those of each, stacked; of 4 bits as csrc/step/weight.cpp says
    (`stacked_runs`)."""
    return _ops.linear_weight(rows_of(weight), plan, row, col, round_to_bf16, factors, amaxes)


def linear_step(*args) -> list[Tensor]:
    """y, and the codes of x: see csrc/step/linear.cpp. With gradients enabled, y has the node that
    makes them."""
    return _ops.linear_step(*args)


def linear_gated(*args) -> list[Tensor]:
    """The codes of act(gate) * up, as `linear_step` takes codes of an x that has no values."""
    return _ops.linear_gated(*args)


def linear_counts() -> list[list[int]]:
    """By plan: quantizations of input, weight and gradient (rowwise, columnwise each) and products
    since the last call."""
    return _ops.linear_counts().tolist()


def random_key(
    step: Tensor, ids: Tensor, slot: int, rows: int, after: Tensor | None = None
) -> Tensor:
    """int64 [5] (`rng.KEY_FIELDS`) of a slot's rows, from the step's fields
    (`context.STEP_FIELDS`).

    after:  a tensor that is made before; in a graph it keeps the key in the backward.
    """
    return (
        _ops.random_key(step, ids, slot, rows)
        if after is None
        else _ops.random_key.after(step, ids, slot, rows, after)
    )


def record_amax(amaxes: Tensor, amax: Tensor) -> None:
    """amaxes[0] = max(amaxes[0], amax), unless amax is not finite."""
    _ops.record_amax(amaxes, amax)

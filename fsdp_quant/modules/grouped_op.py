# SPDX-License-Identifier: Apache-2.0
"""Run a list of experts in one operator: y[rows of e] = x[rows of e] W[e]^T, and its backward, with
one grouped GEMM each.

    forward   x.rowwise, x.columnwise = quantize(x)      y  = grouped(x.rowwise, w.rowwise)
    backward  dy.rowwise, dy.columnwise = quantize(dy)   dx = grouped(dy.rowwise, w.columnwise)
                                                         dw = grouped over tokens(dy.columnwise,
                                                         x.columnwise)

Rowwise codes are stored in the order of the tokens. Columnwise scales serve 128 tokens or all
tokens of a group. So in columnwise codes each group begins at a multiple of 128 and is padded with
zeros. Bits equal those of a loop over the experts, also for scales per tensor and per column (one
set per group) and for their histories. Only the device knows the number of tokens of a group.

Tokens may arrive as codes, in one storage per expert (`parallel.experts`). Operands that are not
quantized are multiplied by `torch._grouped_mm`. Two-level codes are decoded to values that are
contiguous along the contraction; the partial sums of each group are multiplied by its tensor
scales. On GPUs without a kernel that multiplies codes of groups, all are decoded:
`decoded_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoded_matrix import has_tensor_amax
from ..formats import COLUMNWISE, FP8_EXACT_OPERAND, IDENTITY, ROWWISE, Direction
from ..ops import native
from ..ops.capability import ARCHITECTURES, arch_of
from ..ops.layout import COMPACT, adjoining, is_anchored_of_codes, operand_format, pad_to
from ..ops.native import Operand, TokenGroups
from ..ops.reference import known
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from . import decoded_experts
from .bad_splits import bad_splits_flag
from .call import Call
from .decoded_experts import count_product, group_of, spread
from .expert_weights import TwoLevelCodes, grouped_operand, read_as
from .operands import (
    given_storage,
    lies_transposed,
    refuse_codes,
)
from .plan import PRODUCTS, GemmPlan, Product
from .program import REFUSED


def unsupported_reason(
    plan: GemmPlan,
    dtype: torch.dtype,
    device: torch.device,
    experts: int,
    n: int,
    k: int,
    bias: bool = False,
) -> str | None:
    """Return the reason that grouped kernels do not compute this plan's GEMMs, in one clause; None
    if they do."""
    arch = arch_of(device)
    if arch not in ARCHITECTURES or not native.is_available_on(device):
        return f"no grouped kernel on {arch}"
    decodes = plan.decodes_groups(arch)
    in_codes = not decodes and any(f.is_quantized for p in PRODUCTS for f in plan.pair(p))
    if in_codes and not ARCHITECTURES[arch].groups:  # torch multiplies values
        return f"no grouped kernel multiplies codes on {arch}"
    if dtype is not torch.bfloat16:
        return f"the activations are {dtype}"
    if n % 16 or k % 16:
        return f"[{n}, {k}] experts are no multiples of 16"
    if plan.boundary is not None:
        return "the recipe has boundary slots"
    if experts > native.MOST_GROUPS:
        return f"{experts} experts are more than {native.MOST_GROUPS}"
    resolved = plan.resolved(dtype, device)
    for slot, layouts in resolved.layouts.items():
        for direction, layout in layouts.items():
            fmt = plan.operand(slot, direction)
            if is_anchored_of_codes(fmt, layout) and not fmt.shares_storage:
                return (
                    f"{slot}.{direction.value} ({fmt}) is anchored after it was encoded, a tensor "
                    "at a time"
                )
    for product, domain in zip(PRODUCTS, resolved.domains):
        if domain not in ("native", "anchored") and not (
            domain == "bf16" and (decodes or all(f.tensor_scale for f in plan.pair(product)))
        ):
            return f"{product.name} runs in the {domain} domain"
        if bias and product.name == "fprop" and (decodes or not _is_coded(plan, product)):
            return "a bias is added to bfloat16 products before they are rounded"
    for slot in ("input", "grad_output"):
        hybrid = plan.hybrid(slot)
        if hybrid.is_derived or any(
            s.is_stochastic and not s.fmt.tensor_scale for s in map(hybrid.side, Direction)
        ):
            return f"{slot} is {hybrid}"
        for direction in Direction:
            side, fmt = (
                plan.operand(slot, direction),
                read_as(plan, slot, direction, resolved.layouts),
            )
            if not side.is_quantized or (side.tensor_scale and side.block[0] == 1):
                continue
            # computed and read per group, so never shared by experts
            of_group = side.scale_leaves_contraction
            runs = fmt.block[1] == native.TILE or (
                decodes and native.TILE % (fmt.block[1] or 1) == 0
            )
            spans = fmt.block[0] != 1 if direction is ROWWISE else not runs
            if not of_group and spans:
                return (
                    f"a scale of {slot}.{direction.value} ({hybrid.side(direction)}) serves tokens "
                    "of several experts"
                )
    return None if resolved.call is not None else "no compiled step reads its formats"


def _is_coded(plan: GemmPlan, product: Product) -> bool:
    return all(f.is_quantized for f in plan.pair(product))


# Tokens that arrive as codes #


def behind(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along dim 0. Returns a view if the tensors are adjacent in one buffer and aligned
    to 16 bytes."""
    there = [t for t in tensors if t.numel()]
    whole = adjoining(there)
    if whole is not None and whole.data_ptr() % 16 == 0:
        return whole
    return torch.cat(there) if len(there) > 1 else there[0].clone()


def given_operand(
    plan: GemmPlan, slot: str, x: QuantizedTensor, direction: Direction, groups: TokenGroups
) -> Operand:
    """Return the grouped GEMM's operand for x, which has one storage of codes per group. Its bits
    are those of each group's own operand."""
    storages = [
        given_storage(plan, slot, QuantizedTensor(pair=part), direction) for part in x._pair.groups
    ]
    layout = plan.resolved(x.dtype, x.device).layouts[slot][direction]
    if storages[0].fmt.tensor_scale:
        return _decoded(storages, groups, layout)
    data, first, turned = behind([s.data for s in storages]), storages[0], None
    if first.fmt.is_quantized and direction is COLUMNWISE:
        turned = native.transpose_tokens(data, groups)
    scales = [s.scale for s in storages if s.scale is not None]
    if first.fmt.scale_leaves_contraction and (
        direction is COLUMNWISE or first.fmt.block[0] is None
    ):  # one set per group
        scale = torch.cat([s.reshape(-1) for s in scales])
        return Operand(data if turned is None else turned, scale, operand_format(first.fmt, layout))
    tokens, cols = x.shape
    whole = Storage(first.fmt, direction, (tokens, cols), data, None, None, x.dtype)
    if turned is not None:  # no scale spans two groups, because each begins at a tile
        block = first.fmt.block[1] or native.TILE
        rows = native.TILE // block
        scale = behind([pad_to(s, rows, 1) if len(s) % rows else s for s in scales])
        filled = scale.new_zeros(turned.shape[1] // block, scale.shape[1])
        filled[: len(scale)] = scale
        whole = whole.with_buffers({"scale": filled}, shape=(turned.shape[1], x.shape[1]))
    elif scales:
        whole = whole.with_buffers({"scale": behind(scales)})
    if layout == COMPACT or not whole.fmt.is_quantized:
        return Operand(whole.data, whole.scale, whole.fmt)
    operand = whole.to_gemm_operand(layout, turned)
    return Operand(operand.data, operand.scale, operand.operand_format)


def _decoded(storages: Sequence[Storage], groups: TokenGroups, layout: str) -> Operand:
    """Decode two-level codes to values, or convert them to e4m3 codes, with one scale per group's
    tensor."""
    amaxes = torch.cat([s.tensor_amax for s in storages if s.tensor_amax is not None])
    scale = behind([s.scale for s in storages if s.scale is not None])
    first, data = storages[0], behind([s.data for s in storages])
    cols, factors = first.padded_shape[1], native.tensor_decode_scale(amaxes, first.fmt)
    if layout == COMPACT:
        values, fmt = (
            native.dequantize(
                data, scale, None, first.fmt, first.direction, cols, 0, torch.bfloat16
            ),
            IDENTITY,
        )
    else:
        values, _ = native.anchor_codes(
            data, scale, amaxes[:1], cols, first.fmt, first.direction, False, native.OF_TENSOR
        )
        factors, fmt = factors / FP8_EXACT_OPERAND, operand_format(first.fmt, layout)
    if first.direction is COLUMNWISE:
        values = spread(values, groups).t().contiguous()
    return Operand(values, factors, fmt)


def _forward_of_codes(
    x: QuantizedTensor,
    ends: Tensor,
    weight: Operand,
    plan: GemmPlan,
    save: bool,
    out_dtype: torch.dtype,
    tag: int,
) -> tuple[Tensor, TokenGroups, list[Tensor | None]]:
    """Run `native.grouped_step` for tokens that arrive as codes."""
    refuse_codes(x, plan, save)
    groups = native.token_groups(ends, len(x), bad_splits_flag(), tag)
    y = _product_of_rows(
        given_operand(plan, "input", x, ROWWISE, groups), weight, groups, out_dtype
    )
    kept = given_operand(plan, "input", x, COLUMNWISE, groups)[:2] if save else ()
    count_product(plan, "fprop", x, groups)
    return y, groups, list(kept)


def _backward_of_codes(
    dy: QuantizedTensor,
    groups: TokenGroups,
    weight: Operand | None,
    saved: Sequence[Tensor],
    plan: GemmPlan,
    call: int,
    guard: Tensor | None,
    state: ExpertsState,
) -> tuple[Tensor | None, Tensor | None]:
    """Run `native.grouped_step_backward` for a gradient that arrives as codes."""
    dx = dw = None
    if len(saved):
        a, of_x = (
            given_operand(plan, "grad_output", dy, COLUMNWISE, groups),
            plan.operand("input", COLUMNWISE),
        )
        if not of_x.is_quantized:
            dw = torch_compat.grouped_mm(
                a.data.t(), saved[0].reshape(-1, saved[0].shape[-1]), groups.offsets[1:]
            )
        else:
            resolved = plan.resolved(dy.dtype, dy.device)
            if plan.saves == "input":
                given = state.factors, state.step, state.ids
                saved = native.linear_tokens(saved[0], call, 0, False, True, guard, groups, *given)
            if has_tensor_amax(of_x, resolved.layouts["input"][COLUMNWISE]):
                data, scale, amaxes = saved
                shape = (len(data), 2 * data.shape[1])
                b = TwoLevelCodes(
                    data, scale.view(len(data), -1), amaxes, of_x, (shape, (shape[1], 1))
                ).values()
            else:
                codes, scale = saved
                b = Operand(codes, scale, read_as(plan, "input", COLUMNWISE, resolved.layouts))
            dw = native.grouped_gemm_wgrad(a, b, groups.padded, out_dtype=dy.dtype)
        count_product(plan, "wgrad", dy, groups)
    if weight is not None:
        a = given_operand(plan, "grad_output", dy, ROWWISE, groups)
        weight = (
            weight
            if weight.scale is not None
            else weight._replace(data=weight.data.transpose(1, 2))
        )
        dx = _product_of_rows(a, weight, groups, dy.dtype)
        count_product(plan, "dgrad", dy, groups)
    return dx, dw


def _product_of_rows(
    a: Operand, weight: Operand, groups: TokenGroups, dtype: torch.dtype
) -> Tensor:
    if a.scale is None:
        return torch_compat.grouped_mm(a.data, weight.data.transpose(1, 2), groups.offsets[1:])
    return native.grouped_gemm(a, weight, groups.offsets, out_dtype=dtype)


class ExpertsState(NamedTuple):
    """Arguments of one call for all experts, apart from operands: histories of the delayed
    directions of tokens, and the key of random bits.

    factors, grad_factors:  encode scales of the input and of the gradient, ordered by direction,
                            then by expert.
    amaxes, grad_amaxes:    tensors in which amaxes are recorded, in the same order; empty: none.
    step, ids:              int64 [5] (`context.STEP_FIELDS`), and int64 [3] per expert
                            (`operands.slot_ids`).
    """

    factors: Sequence[Tensor] = ()
    amaxes: Sequence[Tensor] = ()
    grad_factors: Sequence[Tensor] = ()
    grad_amaxes: Sequence[Tensor] = ()
    step: Tensor | None = None
    ids: Sequence[Tensor] = ()

    @staticmethod
    def of(calls: Sequence[Call]) -> ExpertsState:
        """Combine the state of each expert's call."""

        def interleaved(of: Iterable[Sequence[Tensor]]) -> list[Tensor]:
            return [t for side in zip(*of) for t in side]

        first = calls[0]
        keyed = first.plan.input.is_stochastic or first.plan.grad_output.is_stochastic
        return ExpertsState(
            interleaved(call.factors[0] for call in calls),
            interleaved(call.histories[0] for call in calls),
            interleaved(call.factors[2] for call in calls),
            interleaved(call.histories[2] for call in calls),
            first.step,
            [known(call.ids, "ids") for call in calls] if keyed else [],
        )


class GroupedLinearCall(torch.autograd.Function):
    """The three grouped GEMMs of x [M, K], whose groups end at `ends`.

    weights:     `ExpertWeights`.
    save:        the backward needs x.
    tag:         the value that identifies this layer in `bad_splits_flag` if ends are wrong.
    state:       `ExpertsState`.
    parameters:  the weights, then biases, [N] each or one [E, N], or none.
    """

    @staticmethod
    def forward(ctx, x, ends, weights, plan, guard, save, tag, state, *parameters):
        count = len(weights.tensors)
        biases = parameters[count:]
        keeps = ctx.needs_input_grad[0] and not weights.are_gathered
        made = weights.operands([ROWWISE, *([COLUMNWISE] if keeps else [])], plan, x.dtype)
        weight, columnwise = grouped_operand(made.pop(ROWWISE)), made.get(COLUMNWISE)
        call, out_dtype = (
            plan.resolved(x.dtype, x.device).call,
            torch.float32 if biases else x.dtype,
        )
        if plan.decodes_groups(arch_of(x.device)):
            y, ctx.groups, saved = decoded_experts.forward(x, ends, weight.data, plan, save, tag)
        elif isinstance(x, QuantizedTensor):
            y, ctx.groups, saved = _forward_of_codes(x, ends, weight, plan, save, out_dtype, tag)
        else:
            y, ctx.groups, saved = native.grouped_step(
                x,
                ends,
                weight,
                call,
                save,
                guard,
                out_dtype,
                bad_splits_flag(),
                tag,
                state.factors,
                state.amaxes,
                state.step,
                state.ids,
            )
        if biases:
            table = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
            y = y.add_(table.float().index_select(0, group_of(ctx.groups, x))).to(x.dtype)
        ctx.weights, ctx.plan, ctx.guard, ctx.call, ctx.state = weights, plan, guard, call, state
        ctx.dtypes, ctx.count = [p.dtype for p in parameters], count
        kept = [x] if save and plan.saves == "input" else list(saved)
        own = [] if columnwise is None else [t for t in columnwise if isinstance(t, Tensor)]
        ctx.kept = len(kept)
        ctx.columnwise = (
            None
            if columnwise is None
            else (type(columnwise), [None if isinstance(t, Tensor) else (t,) for t in columnwise])
        )
        ctx.save_for_backward(*kept, *own)
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise NotImplementedError(REFUSED)
        groups, needs, tensors = ctx.groups, ctx.needs_input_grad, ctx.saved_tensors
        first = len(needs) - len(ctx.dtypes)
        need_x, need_w, need_b = (
            needs[0],
            any(needs[first : first + ctx.count]),
            any(needs[first + ctx.count :]),
        )
        dx = dw = db = None
        if need_x or need_w:
            weight = (
                grouped_operand(_columnwise_of(ctx, tensors[ctx.kept :], dy.dtype))
                if need_x
                else None
            )
            saved = tensors[: ctx.kept] if need_w else ()
            turned = ctx.plan.turns_wgrad and lies_transposed(ctx.weights.tensors[0])
            if ctx.plan.decodes_groups(arch_of(dy.device)):
                values = None if weight is None else weight.data
                dx, dw = decoded_experts.backward(dy, groups, values, saved, ctx.plan, turned)
            elif isinstance(dy, QuantizedTensor):
                dx, dw = _backward_of_codes(
                    dy, groups, weight, saved, ctx.plan, ctx.call, ctx.guard, ctx.state
                )
            else:
                factors, _, *rest = ctx.state
                dx, dw = native.grouped_step_backward(
                    dy, groups, weight, saved, ctx.call, ctx.guard, factors, *rest, turned=turned
                )
                dw = dw.mT if turned and need_w else dw
        if need_b:
            db = bias_gradients(groups, dy)
        is_packed = ctx.weights.tensors[0].dim() == 3
        whole = [(g,) if is_packed else g for g in (dw, db) if g is not None and len(g)]
        made = iter([g for of in whole for g in of])
        there = [need_w] * ctx.count + [need_b] * (len(ctx.dtypes) - ctx.count)
        grads = [
            next(made).to(dtype) if is_made else None for is_made, dtype in zip(there, ctx.dtypes)
        ]
        none = [None] * (first - 1)
        return (
            dx if need_x else None,
            *none,
            *(g if needed else None for g, needed in zip(grads, needs[first:])),
        )


def _columnwise_of(ctx, own: Sequence[Tensor], dtype: torch.dtype) -> Operand | TwoLevelCodes:
    """Return the operand that dgrad reads: saved by the forward, or gathered again."""
    if ctx.columnwise is None:
        return ctx.weights.operands([COLUMNWISE], ctx.plan, dtype)[COLUMNWISE]
    kind, fields = ctx.columnwise
    tensors = iter(own)
    return kind(*(next(tensors) if field is None else field[0] for field in fields))


def bias_gradients(groups: TokenGroups, dy: Tensor) -> Tensor:
    """Sum dy [tokens, N] over the tokens of each group: [E, N]."""
    experts = torch.arange(groups.groups, dtype=torch.int64, device=dy.device)
    return (group_of(groups, dy) == experts[:, None]).to(dy.dtype) @ dy

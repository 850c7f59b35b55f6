# SPDX-License-Identifier: Apache-2.0
"""The three GEMMs of all experts: y[rows of e] = x[rows of e] W[e]^T, and the backward.

    forward   x.rowwise, x.columnwise = quantize(x)      y  = grouped(x.rowwise, w.rowwise)
    backward  dy.rowwise, dy.columnwise = quantize(dy)   dx = grouped(dy.rowwise, w.columnwise)
                                                         dw = grouped over tokens(dy.columnwise,
                                                         x.columnwise)

One program, `GroupedCall.forward` and `backward`, runs in eager mode and inside the operators of
graphs (`grouped_ops.TracedCall`). Its GEMMs are chosen once per call:

    one native call per pass      a kernel multiplies codes of groups
    values, then a grouped GEMM   of codes that are decoded to bf16 (`GemmPlan.decodes_groups`)
    a loop over the experts       else (`unsupported_reason`), which reads the splits on the host

All have the bits of a loop over `fq.Linear`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import native
from ..ops.capability import ARCHITECTURES, Place, arch_of, has_own_kernels
from ..ops.layout import is_anchored_of_codes, operand_format
from ..ops.native import TokenGroups
from ..ops.reference import known
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from . import program
from .autograd import Gradients
from .bad_splits import bad_splits_flag
from .call import BySlot, Call
from .operands import buffers_of, lies_transposed
from .plan import PRODUCTS, GemmPlan, Product, Resolved, plan_of
from .stacked_weights import StackedWeight, read_as, stacked, stacked_weight

# Which plans one grouped GEMM computes #


def unsupported_reason(
    plan: GemmPlan, dtype: torch.dtype, device: Place, shape: Sequence[int], bias: bool = False
) -> str | None:
    """Return the reason that no grouped GEMM computes this plan's products, in one clause; None if
    one does.

    plan:   of groups (`GemmPlan.of_groups`).
    shape:  of the weights, [E, N, K].
    """
    return plan.once(_unsupported_reason, dtype, device, tuple(shape), bias)


def _unsupported_reason(
    plan: GemmPlan, dtype: torch.dtype, device: Place, shape: Sequence[int], bias: bool
) -> str | None:
    reason = next(_reasons_of_shapes(plan, dtype, device, shape), None)
    if reason is not None:  # there may be no compiled step
        return reason
    resolved, decodes = plan.resolved(dtype, device), plan.decodes_groups(arch_of(device))
    of_products = _reasons_of_products(plan, resolved, decodes, bias)
    return next(itertools.chain(of_products, _reasons_of_tokens(plan, resolved, decodes)), None)


def _reasons_of_shapes(
    plan: GemmPlan, dtype: torch.dtype, device: Place, shape: Sequence[int]
) -> Iterator[str]:
    arch, (experts, n, k) = arch_of(device), shape
    if arch not in ARCHITECTURES or not native.is_available_on(device):
        yield f"no grouped kernel on {arch}"
        return
    if plan.batch_invariant and not has_own_kernels(arch):
        yield f"batch_invariant: torch orders the sums of groups on {arch}"
    is_coded = any(f.is_quantized for p in PRODUCTS for f in plan.pair(p))
    if is_coded and not plan.decodes_groups(arch) and not ARCHITECTURES[arch].groups:
        yield f"no grouped kernel multiplies codes on {arch}"
    if dtype is not torch.bfloat16:
        yield f"the activations are {dtype}"
    if n % 16 or k % 16:
        yield f"[{n}, {k}] experts are no multiples of 16"
    if plan.boundary is not None:
        yield "the recipe has boundary slots"
    if experts > native.MOST_GROUPS:
        yield f"{experts} experts are more than {native.MOST_GROUPS}"


def _reasons_of_products(
    plan: GemmPlan, resolved: Resolved, decodes: bool, bias: bool
) -> Iterator[str]:
    for slot, layouts in resolved.layouts.items():
        for direction, layout in layouts.items():
            fmt = plan.operand(slot, direction)
            # matrices are encoded and anchored one by one, and then multiplied together
            is_stacked = slot == "weight" or (fmt.shares_storage and not fmt.tensor_scale)
            if is_anchored_of_codes(fmt, layout) and not is_stacked:
                yield (
                    f"{slot}.{direction.value} ({fmt}) is anchored after it was encoded, a tensor "
                    "at a time"
                )
    for product, domain in zip(PRODUCTS, resolved.domains):
        pair = plan.pair(product)
        is_decoded = domain == "bf16" and (decodes or all(f.tensor_scale for f in pair))
        if domain not in ("native", "anchored") and not is_decoded:
            yield f"{product.name} runs in the {domain} domain"
        rounds_first = decodes or not all(f.is_quantized for f in pair)
        if bias and product.name == "fprop" and rounds_first:
            yield "a bias is added to bfloat16 products before they are rounded"


def _reasons_of_tokens(plan: GemmPlan, resolved: Resolved, decodes: bool) -> Iterator[str]:
    for slot in ("input", "grad_output"):
        hybrid = plan.hybrid(slot)
        sides = [hybrid.side(d) for d in Direction]
        if hybrid.is_derived or any(s.is_stochastic and not s.fmt.tensor_scale for s in sides):
            yield f"{slot} is {hybrid}"
        for direction, side in zip(Direction, sides):
            if _spans_experts(plan, slot, direction, resolved.layouts, decodes):
                yield (
                    f"a scale of {slot}.{direction.value} ({side}) serves tokens of several experts"
                )
    if resolved.call is None:
        yield "no compiled step reads its formats"


def _spans_experts(
    plan: GemmPlan, slot: str, direction: Direction, layouts: dict, decodes: bool
) -> bool:
    """Return whether a scale serves tokens of two experts. Scales that leave the contraction are
    computed and read per group."""
    fmt, (outer, run) = plan.operand(slot, direction), read_as(plan, slot, direction, layouts).block
    is_of_lines = fmt.tensor_scale and fmt.block[0] == 1
    if is_of_lines or not fmt.is_quantized or fmt.scale_leaves_contraction:
        return False
    if direction is ROWWISE:
        return outer != 1
    return run != native.TILE and not (decodes and native.TILE % (run or 1) == 0)


def reads_routes(plan: GemmPlan, x: Tensor) -> bool:
    """Return whether one product for all experts reads rows of x by routes, without copies."""
    return not plan.decodes_groups(arch_of(x.device)) and plan.saves != "input"


def fuses_swiglu(plan: GemmPlan, slot: str, x: Tensor) -> bool:
    """Return whether kernels quantize SwiGLU as they compute it (input), or its gradient
    (grad_output): 8 bits in both directions, with scales of (1, 128) blocks or of tiles."""
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if reads_routes(plan, x) else {}
    read = [operand_format(plan.operand(slot, d), layout) for d, layout in layouts.items()]
    blocks = (1, native.TILE), (native.TILE, native.TILE)
    return bool(read) and all(
        f.is_quantized and f.element.bits == 8 and f.block in blocks for f in read
    )


@torch.compiler.assume_constant_result
def may_fuse_swiglu(key: str, dtype: torch.dtype, device: torch.device, shape: tuple) -> bool:
    """Return whether one product for all experts of this plan quantizes gradients of SwiGLU."""
    plan, x = plan_of(key).of_groups, torch.empty(0, dtype=dtype, device=device)
    is_one = unsupported_reason(plan, dtype, device, shape) is None
    return is_one and fuses_swiglu(plan, "grad_output", x)


def reads_combined(plan: GemmPlan, x: Tensor) -> bool:
    """Return whether one product for all experts reads gradients of tokens by routes: 8 bits."""
    sides = [plan.operand("grad_output", d) for d in Direction]
    return reads_routes(plan, x) and all(f.is_quantized and f.element.bits == 8 for f in sides)


# The program #


class GroupedCall(NamedTuple):
    """What a call for all experts has besides tokens, weights and biases.

    call:     factors and histories of each slot are ordered by direction, then by expert.
    ids:      of the random bits of each expert; empty: nothing is rounded stochastically.
    states:   of each expert's weight, with held codes; empty: nothing is held.
    experts:  number of groups.
    in_one:   a grouped GEMM computes the plan, which is then `GemmPlan.of_groups`; False: a loop.
    tag:      identifies the layer in `bad_splits_flag` if the ends of groups are wrong.
    tokens:   int64 [M], the row of x of each row that is multiplied, if `reads_routes`; None: x has
              these rows.
    ahead:    operands of the weights that were quantized before, until one is read.
    """

    call: Call
    ids: Sequence[Tensor]
    states: Sequence[WeightState]
    experts: int
    in_one: bool = True
    tag: int = 0
    tokens: Tensor | None = None
    ahead: dict[Direction, StackedWeight] | None = None

    @staticmethod
    def combined(
        calls: Sequence[Call], states: Sequence[WeightState], experts: int, tag: int
    ) -> GroupedCall:
        """Return the call of one product. calls: of each expert, or one if they are equal."""
        first = calls[0]
        ids = [known(call.ids, "ids") for call in calls] if first.plan.is_keyed else []
        if len(calls) > 1:
            factors, histories = (
                tuple([t for direction in zip(*of_slot) for t in direction] for of_slot in zip(*s))
                for s in ([call.factors for call in calls], [call.histories for call in calls])
            )
            save = any(call.save for call in calls)
            first = first._replace(save=save, factors=factors, histories=histories)
        return GroupedCall(first, ids, states, experts, tag=tag)

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        keeps_weight: bool = False,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], StackedWeight | None]:
        """Return y [M, N]; what the backward reads of the groups and of x; and of the weights.

        ends:     the row after the last of each group, on the device of x.
        weights:  E tensors [N, K], or one [E, N, K]; values, or codes.
        biases:   [N] each, or one [E, N]; empty: none.
        keeps_weight:  return the columnwise operand of the weights, quantized with the rowwise one.
                       Gathered codes are not kept: FSDP2 fills them again.
        shares:   fp32 [M]; x is [g, u] [M, 2 K], and silu(g) * u times these is multiplied.
        """
        call, plan = self.call, self.call.plan
        if not self.in_one:
            return self._forward_in_loop(x, ends, weights, biases), [ends, *[x][: call.save]], None
        keeps_weight = keeps_weight and not isinstance(weights[0], QuantizedTensor)
        directions = [ROWWISE, COLUMNWISE] if keeps_weight else [ROWWISE]
        stacks = self.quantized(weights, directions, x.dtype)
        operand = stacks.pop(ROWWISE).operand()
        wrong = bad_splits_flag()
        saves_input = call.save and plan.saves == "input"
        if self._decodes(x):
            groups = native.token_groups(ends, len(x), wrong, self.tag)
            rows, matrices = self._decoded("input", x, ROWWISE, groups), operand.data.mT
            y = torch_compat.grouped_mm(rows, matrices, groups.offsets[1:])
            _count(plan, PRODUCTS[0], x, groups)
            codes = []
            if call.save and not saves_input:
                codes = buffers_of(encoded_tokens(plan, "input", x, COLUMNWISE, groups))
        else:
            bias = stacked(biases) if len(biases) > 1 else next(iter(biases), None)
            of_layer = bias, wrong, self.tag, self.tokens, shares
            y, groups, codes = native.grouped_step(
                x, ends, operand, self._number(x), call, self.ids, *of_layer
            )
        return y, [groups.tables, *([x] if saves_input else codes)], stacks.get(COLUMNWISE)

    def backward(
        self,
        dy: Tensor,
        saved: Sequence[Tensor],
        weights: Sequence[Tensor],
        weight: StackedWeight | None,
        needs: Sequence[bool],
        tokens: Tensor | None = None,
        swiglu: Sequence[Tensor] = (),
    ) -> Gradients:
        """Return dx [M, K], dw [E, N, K] and db [E, N]; None where `needs` says so.

        saved, weight:  from `forward`; without `weight`, the weights are read again.
        tokens:  int64 [M], if the gradients are these rows of dy.
        swiglu:  [g, u] [M, N] and shares [M], if dy is the gradient of silu(g) * u times shares
                 [M, N / 2]. That of shares, fp32, is in the place of db.
        """
        if not self.in_one:
            return self._backward_in_loop(dy, saved, weights, needs)
        need_x, need_w, need_b = needs
        groups, codes, operand = TokenGroups(saved[0], self.experts), saved[1:], None
        if need_x:
            weight = weight or self.quantized(weights, [COLUMNWISE], dy.dtype)[COLUMNWISE]
            operand = weight.operand()
        transposes = self.call.plan.turns_wgrad and lies_transposed(weights[0])
        if self._decodes(dy) or not (need_x or need_w or swiglu):
            dw = self._wgrad(dy, codes, groups, transposes) if need_w else None
            dx = None
            if operand is not None:
                _count(self.call.plan, PRODUCTS[1], dy, groups)
                rows = self._decoded("grad_output", dy, ROWWISE, groups)
                dx = torch_compat.grouped_mm(rows, operand.data, groups.offsets[1:])
        else:
            of_call = self._number(dy), self.call, self.ids
            of_dy = dy, groups, operand, need_w, *of_call, swiglu, tokens
            dx, dshares, codes_of_dy = native.grouped_dgrad(*of_dy)
            dx, dw = dx if need_x else None, None
            del of_dy, operand, weight  # codes of weights, before dw is allocated
            if need_w:
                dw = native.grouped_wgrad(dy, codes_of_dy, groups, codes, *of_call, transposes)
        dw = dw.mT if dw is not None and transposes else dw
        if swiglu or not need_b:
            return dx, dw, dshares if need_b else None
        experts = torch.arange(self.experts, dtype=torch.int64, device=dy.device)
        return dx, dw, (group_of(groups, dy) == experts[:, None]).to(dy.dtype) @ dy

    # Operands #

    def _decodes(self, x: Tensor) -> bool:
        return self.call.plan.decodes_groups(arch_of(x.device))

    def _number(self, x: Tensor) -> int:
        return known(self.call.plan.resolved(x.dtype, x.device).call, "the compiled step")

    def quantized(
        self, weights: Sequence[Tensor], directions: Sequence[Direction], dtype: torch.dtype
    ) -> dict[Direction, StackedWeight]:
        """Return the operands of the weights."""
        plan = self.call.plan
        if self.ahead and all(d in self.ahead for d in directions):
            return {d: self.ahead.pop(d) for d in directions}
        (_, factors, _), (_, amaxes, _) = self.call.factors, self.call.histories
        return stacked_weight(weights, directions, plan, dtype, self.states, factors, amaxes)

    # Products of values that codes decode to #

    def _decoded(self, slot: str, x: Tensor, direction: Direction, groups: TokenGroups) -> Tensor:
        """Return the values that the codes of x decode to: [M, cols]; of columnwise codes with the
        padding of each group."""
        plan, x = self.call.plan, native.rows_of(x)
        if not plan.operand(slot, direction).is_quantized:
            return x
        return encoded_tokens(plan, slot, x, direction, groups).dequantize()

    def _wgrad(
        self, dy: Tensor, saved: Sequence[Tensor], groups: TokenGroups, transposes: bool
    ) -> Tensor:
        """dw[e] = dy[tokens of e]^T x[tokens of e]; [E, K, N] where it transposes."""
        plan, first = self.call.plan, saved[0]
        fmt = plan.operand("input", COLUMNWISE)
        a = self._decoded("grad_output", dy, COLUMNWISE, groups)
        if plan.saves == "input":
            b = self._decoded("input", first.reshape(-1, first.shape[-1]), COLUMNWISE, groups)
        else:
            shape = len(first), saved[1].shape[1]
            b = Storage.over(saved, fmt, COLUMNWISE, shape, dy.dtype).dequantize()
        a, b = (b, a) if transposes else (a, b)
        _count(plan, PRODUCTS[2], dy, groups)
        ends = groups.padded if fmt.is_quantized else groups.offsets
        return torch_compat.grouped_mm(a.t(), b, ends[1:])

    # A loop over the experts #

    def _calls(self) -> list[Call]:
        """Return the call of each expert."""

        def of_expert(by_slot: BySlot, expert: int) -> BySlot:
            of_input, of_weight, of_grad = (slot[expert :: self.experts] for slot in by_slot)
            return of_input, of_weight, of_grad

        return [
            self.call._replace(
                ids=self.ids[e] if self.ids else None,
                factors=of_expert(self.call.factors, e),
                histories=of_expert(self.call.histories, e),
            )
            for e in range(self.experts)
        ]

    def _forward_in_loop(
        self, x: Tensor, ends: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> Tensor:
        vectors = _by_expert(biases, 1) or [None] * self.experts
        operands = zip(self._calls(), _parts(x, ends), _by_expert(weights, 2), vectors)
        return torch.cat(
            [program.forward(call, part, w, b, None, False)[0] for call, part, w, b in operands]
        )

    def _backward_in_loop(
        self, dy: Tensor, saved: Sequence[Tensor], weights: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        ends, *inputs = saved
        parts = _parts(inputs[0], ends) if needs[1] else [None] * self.experts
        operands = zip(self._calls(), _parts(dy, ends), parts, _by_expert(weights, 2))
        gradients = []
        for call, dy_part, x, matrix in operands:
            codes, statistics = [], {}
            if x is not None:  # what the forward would have saved
                resolved = call.plan.resolved(x.dtype, x.device)
                _, codes, statistics = program.quantized_input(call, x, resolved)
            of_expert = program.Saved(codes, None, {"input": statistics, "weight": {}})
            x = x if call.plan.saves == "input" else None
            gradients.append(program.backward(call, dy_part, x, matrix, of_expert, needs, None))
        joins = zip((torch.cat, torch.stack, torch.stack), zip(*gradients), needs)
        dx, dw, db = (join(of_experts) if need else None for join, of_experts, need in joins)
        return dx, dw, db


def _count(plan: GemmPlan, product: Product, x: Tensor, groups: TokenGroups) -> None:
    domain = plan.resolved(x.dtype, x.device).domains[PRODUCTS.index(product)]
    counters.add("gemm", (domain, *map(repr, plan.pair(product))), groups.groups)


def _parts(x: Tensor, ends: Tensor) -> Sequence[Tensor]:
    return x.split(sizes_of([0, *ends.tolist()]))


def sizes_of(bounds: list[int]) -> list[int]:
    """Return the rows of each piece. bounds: the first row of the first, then the row after the
    last of each."""
    return [end - start for start, end in itertools.pairwise(bounds)]


def _by_expert(tensors: Sequence[Tensor], dims: int) -> Sequence[Tensor]:
    """Return one tensor per expert, of so many dims."""
    return tensors[0].unbind() if tensors and tensors[0].dim() > dims else tensors


def group_of(groups: TokenGroups, x: Tensor) -> Tensor:
    """Return the group of each token of x, int64 [M]."""
    tokens = torch.arange(len(x), device=x.device, dtype=torch.int32)
    return torch.searchsorted(groups.offsets[1:], tokens, right=True)


def encoded_tokens(
    plan: GemmPlan, slot: str, x: Tensor, direction: Direction, groups: TokenGroups
) -> EncodedMatrix:
    """Encode x [M, cols] as each group by itself: no scale serves two. For columnwise codes, whose
    scales serve up to 128 tokens, each group begins at a multiple of 128, padded with zeros."""
    if direction is COLUMNWISE:
        shift = (groups.padded - groups.offsets)[group_of(groups, x)]
        rows = torch.arange(len(x), dtype=torch.int64, device=x.device) + shift
        x = x.new_zeros(len(groups.sources) * native.TILE, x.shape[1]).index_copy_(0, rows, x)
    layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else {}
    return plan.hybrid(slot).operands(x, [direction], layouts=layouts)[0][direction]

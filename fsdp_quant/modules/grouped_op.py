"""One operator for a list of experts: y[rows of e] = x[rows of e] W[e]^T, and its backward, in one product each.

    forward   x.rowwise, x.columnwise = quantize(padded x)      y  = grouped(x.rowwise, w.rowwise)
    backward  dy.rowwise, dy.columnwise = quantize(padded dy)   dx = grouped(dy.rowwise, w.columnwise)
                                                                dw = grouped over tokens(dy.columnwise, x.columnwise)

A group begins at a multiple of 128 rows, zeros behind its tokens, so that no scale serves tokens of two groups: codes are
those of a loop over the experts. How many tokens a group has is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..context import STEP
from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Format, round_up
from ..ops import native
from ..ops.capability import arch_of
from ..ops.layout import operand_format
from ..storage import Storage
from ..tensor.master_weight import MasterWeight
from .linear_op import (
    _check_version, _quantize, _refuse_second_derivative, _saved_columnwise, _version_of, _weight_storage, slot_ids,
)
from .plan import PRODUCTS, GemmPlan

TILE = native.TILE
_IDS = slot_ids("")  # no side that runs here is rounded stochastically


class Groups(NamedTuple):
    """Where the tokens of each group lie.

    offsets:  int32 [E + 1], first padded row of each group; multiples of 128.
    place:    int64 [M], padded row of each token; None where no group is padded.
    rows:     padded rows in all, known to the host.
    """

    offsets: Tensor
    place: Tensor | None
    rows: int

    def spread(self, x: Tensor) -> Tensor:
        """x [M, cols] with zeros behind each group: [rows, cols]."""
        return x if self.place is None else x.new_zeros(self.rows, x.shape[1]).index_copy_(0, self.place, x)

    def collect(self, y: Tensor) -> Tensor:
        """The tokens of y [rows, cols]: [M, cols]."""
        return y if self.place is None else y.index_select(0, self.place)

    def by_tile(self) -> Tensor:
        """int64 [rows / 128]: the group that each 128 rows belong to, E for none."""
        first = torch.arange(0, self.rows, TILE, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:].long(), first, right=True)


def groups_of(ends: Tensor, tokens: int, whole_tiles: bool) -> Groups:
    """Places of `tokens` rows in groups; nothing waits for the device.

    ends:         int64 [E], clean: they do not decrease, and the last is `tokens`.
    whole_tiles:  every group is known to have a multiple of 128 tokens.
    """
    zero = ends.new_zeros(1)
    starts = torch.cat((zero, ends[:-1]))
    if whole_tiles:
        return Groups(torch.cat((zero, ends)).int(), None, tokens)
    padded = (ends - starts + TILE - 1) // TILE * TILE
    offsets = torch.cat((zero, padded.cumsum(0)))
    token = torch.arange(tokens, device=ends.device)
    group = torch.searchsorted(ends, token, right=True)
    rows = round_up(tokens, TILE) + TILE * min(ends.shape[0], tokens)  # at most so many, whatever the groups
    return Groups(offsets.int(), token - starts[group] + offsets[group], rows)


def why_not(plan: GemmPlan, dtype: torch.dtype, device: torch.device, n: int, k: int) -> str | None:
    """Why no grouped kernel makes the products of this plan, in one clause; None where they do."""
    if arch_of(device) != "sm_90a" or not native.runs_on(device):
        return f"no grouped kernel on {arch_of(device)}"
    if dtype is not torch.bfloat16:
        return f"the activations are {dtype}"
    if n % 16 or k % 16:
        return f"[{n}, {k}] experts are no multiples of 16"
    if plan.boundary is not None:
        return "the recipe has boundary slots"
    resolved = plan.resolved(dtype, device)
    for product, domain in zip(PRODUCTS, resolved.domains):
        if domain not in ("native", "anchored") or not all(f.is_quantized for f in plan.pair(product)):
            return f"{product.name} runs in the {domain} domain"
    for slot in ("input", "grad_output"):
        hybrid = plan.hybrid(slot)
        if hybrid.is_stochastic or hybrid.delayed_directions or hybrid.is_derived:
            return f"{slot} is {hybrid}"
        for direction in Direction:
            fmt = _read_as(plan, slot, direction, resolved.layouts)
            if fmt.block[0] != 1 or (direction is COLUMNWISE and fmt.block[1] != TILE):
                return f"a scale of {slot}.{direction.value} ({hybrid.side(direction)}) serves tokens of several experts"
    return None


def _read_as(plan: GemmPlan, slot: str, direction: Direction, layouts: dict) -> Format:
    return operand_format(plan.operand(slot, direction), layouts[slot][direction])


def _operand(storage: Storage) -> native.Operand:
    return native.Operand(storage.data, storage.scale, storage.operand_format)


class StackedWeights:
    """Codes of all experts of a layer, one behind the other, made once a version of the weights."""

    def __init__(self):
        self._kept: dict[Direction, tuple[object, native.Operand]] = {}

    def __getstate__(self) -> dict:
        return {"_kept": {}}

    def operand(self, weights: Sequence[Tensor], direction: Direction, plan: GemmPlan, dtype: torch.dtype, both: bool):
        """[E, N, K] (columnwise: [E, K, N]) codes and their scales; gathered weights are stacked each time."""
        masters = all(isinstance(w, MasterWeight) for w in weights)
        version = (plan.key, dtype, *(w.version for w in weights)) if masters else None
        kept = self._kept.get(direction)
        if kept is not None and masters and kept[0] == version:
            return kept[1]
        made = [_weight_storage(w, direction, plan, dtype, both) for w in weights]
        scale = torch.cat([s.scale.reshape(-1) for s in made])
        operand = native.Operand(torch.stack([s.data for s in made]), scale, made[0].operand_format)
        if masters:
            self._kept[direction] = version, operand
        return operand


class GroupedLinearCall(torch.autograd.Function):
    """The three grouped products of x [M, K].

    parts:       the E weights, [N, K] each, as their operands are made from.
    packed:      parameters are one [E, N, K] and perhaps one [E, N]; else E weights and perhaps E biases.
    save:        the backward needs x.
    """

    @staticmethod
    def forward(ctx, x, groups, parts, stack, plan, guard, save, packed, *parameters):
        count = 1 if packed else len(parts)
        biases = parameters[count:]
        keeps = save and plan.saves != "input"
        made = _storages(plan, "input", groups.spread(x), [ROWWISE, COLUMNWISE] if keeps else [ROWWISE], guard)
        weight = stack.operand(parts, ROWWISE, plan, x.dtype, save)
        out_dtype = torch.float32 if biases else x.dtype
        y = native.grouped_gemm(_operand(made[ROWWISE]), weight, groups.offsets, out_dtype=out_dtype)
        if biases:
            table = biases[0] if packed else torch.stack(biases)
            of_tile = groups.by_tile().clamp(max=len(parts) - 1)
            y = y.unflatten(0, (-1, TILE)).add_(table.float()[of_tile][:, None]).flatten(0, 1).to(x.dtype)
        _count(plan, 0, len(parts))
        ctx.groups, ctx.parts, ctx.stack, ctx.plan, ctx.guard, ctx.packed = groups, parts, stack, plan, guard, packed
        ctx.versions, ctx.num_weights = [_version_of(w) for w in parts], count
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.save_for_backward(*(made[COLUMNWISE].buffers().values() if keeps else [x] if save else []))
        return groups.collect(y)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            _refuse_second_derivative(ctx)
        for weight, version in zip(ctx.parts, ctx.versions):
            _check_version(weight, version)
        plan, groups, experts = ctx.plan, ctx.groups, len(ctx.parts)
        needs = ctx.needs_input_grad
        need_x, need_w, need_b = needs[0], any(needs[8 : 8 + ctx.num_weights]), any(needs[8 + ctx.num_weights :])
        spread = groups.spread(dy.contiguous())
        directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
        made = _storages(plan, "grad_output", spread, directions, ctx.guard)
        dx, dw, db = None, (), ()
        if need_x:
            weight = ctx.stack.operand(ctx.parts, COLUMNWISE, plan, dy.dtype, False)
            dx = native.grouped_gemm(_operand(made[ROWWISE]), weight, groups.offsets, out_dtype=dy.dtype)
            dx = groups.collect(dx)
            _count(plan, 1, experts)
        if need_w:
            saved = [groups.spread(*ctx.saved_tensors)] if plan.saves == "input" else list(ctx.saved_tensors)
            shape, step = (groups.rows, ctx.parts[0].shape[1]), STEP.on(dy.device)
            x = _saved_columnwise(plan, saved, shape, dy, step, _IDS, ctx.guard, [])
            dw = native.grouped_gemm_wgrad(_operand(made[COLUMNWISE]), _operand(x), groups.offsets, out_dtype=dy.dtype)
            _count(plan, 2, experts)
        if need_b:
            mine = groups.by_tile() == torch.arange(experts, device=dy.device)[:, None]
            db = mine.float() @ spread.unflatten(0, (-1, TILE)).float().sum(1)
        whole = [(g,) if ctx.packed else g for g in (dw, db) if len(g)]
        grads = iter([g for of in whole for g in of])
        wanted = [need_w] * ctx.num_weights + [need_b] * (len(ctx.dtypes) - ctx.num_weights)
        made = [next(grads).to(dtype) if there else None for there, dtype in zip(wanted, ctx.dtypes)]
        return dx, *[None] * 7, *(g if needed else None for g, needed in zip(made, needs[8:]))


def _storages(plan: GemmPlan, slot: str, x: Tensor, directions: list[Direction], guard) -> dict[Direction, Storage]:
    return _quantize(plan, slot, x, directions, STEP.on(x.device), _IDS, guard, [])[0]


def _count(plan: GemmPlan, product: int, experts: int) -> None:
    a, b = plan.pair(PRODUCTS[product])
    counters.add("gemm", (plan.domain(PRODUCTS[product], torch.bfloat16, "sm_90a")[0], repr(a), repr(b)), experts)

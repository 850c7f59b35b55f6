"""One operator for a list of experts: y[rows of e] = x[rows of e] W[e]^T, and its backward, in one product each.

    forward   x.rowwise, x.columnwise = quantize(x)      y  = grouped(x.rowwise, w.rowwise)
    backward  dy.rowwise, dy.columnwise = quantize(dy)   dx = grouped(dy.rowwise, w.columnwise)
                                                         dw = grouped over tokens(dy.columnwise, x.columnwise)

Rowwise codes lie as the tokens do. In columnwise ones, whose scales serve 128 tokens or all of a group, a group begins at a
multiple of 128, zeros behind its tokens: codes are those of a loop over the experts, and so are scales of whole tensors and
columns, one set a group. How many tokens a group has is known to the device alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Format
from ..ops import native
from ..ops.capability import arch_of
from ..ops.layout import operand_format
from ..ops.native import Operand, TokenGroups
from ..tensor import torch_compat, writers
from ..tensor.master_weight import MasterWeight
from .linear_op import check_weight_version, refuse_second_derivative, weight_storage, weight_version
from .plan import PRODUCTS, GemmPlan


def why_not(plan: GemmPlan, dtype: torch.dtype, device: torch.device, experts: int, n: int, k: int) -> str | None:
    """Why no grouped kernel makes the products of this plan, in one clause; None where they do."""
    if arch_of(device) != "sm_90a" or not native.runs_on(device):
        return f"no grouped kernel on {arch_of(device)}"
    if dtype is not torch.bfloat16:
        return f"the activations are {dtype}"
    if n % 16 or k % 16:
        return f"[{n}, {k}] experts are no multiples of 16"
    if plan.boundary is not None:
        return "the recipe has boundary slots"
    if experts > native.MOST_GROUPS:
        return f"{experts} experts are more than {native.MOST_GROUPS}"
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
            of_group = plan.operand(slot, direction).scale_leaves_contraction  # its amax is taken, and its scale read, a group
            if not of_group and (fmt.block[0] != 1 or (direction is COLUMNWISE and fmt.block[1] != native.TILE)):
                return f"a scale of {slot}.{direction.value} ({hybrid.side(direction)}) serves tokens of several experts"
    if plan.weight.delayed_directions:
        return f"weight is {plan.weight}"
    return None if resolved.call is not None else "no compiled step reads its formats"


def _read_as(plan: GemmPlan, slot: str, direction: Direction, layouts: dict) -> Format:
    return operand_format(plan.operand(slot, direction), layouts[slot][direction])


class StackedWeights:
    """Codes of all experts of a layer, one behind the other, made once a version of the weights."""

    def __init__(self):
        self._kept: dict[Direction, tuple[object, Operand]] = {}

    def __getstate__(self) -> dict:
        return {"_kept": {}}

    def operand(self, weights: Sequence[Tensor], direction: Direction, plan: GemmPlan, dtype: torch.dtype, both: bool) -> Operand:
        """[E, N, K] (columnwise: [E, K, N]) codes and their scales, of weights [N, K], or of one [E, N, K].

        both:  the other direction follows. Gathered weights, whose codes FSDP2 keeps, are not kept here.
        """
        masters = all(isinstance(w, MasterWeight) for w in weights)
        replayed = masters and any(w.is_replayed for w in weights)
        version = (plan.key, dtype, replayed, *((w.version, w.state.forgotten) for w in weights)) if masters else None
        kept = self._kept.get(direction)
        if kept is not None and masters and kept[0] == version and not (replayed or writers.checking):
            return kept[1]
        if masters and weights[0].dim() == 3 and not writers.checking:
            made = _of_packed(weights[0], [d for d in Direction if both or d is direction], plan, dtype)
        else:
            with torch_compat.outside_inference_mode():
                parts = weights[0].unbind() if weights[0].dim() == 3 else weights
            storages = [weight_storage(w, direction, plan, dtype, both) for w in parts]
            scale = torch.cat([s.scale.reshape(-1) for s in storages])
            made = {direction: Operand(stacked([s.data for s in storages]), scale, storages[0].operand_format)}
        if masters:
            self._kept.update((d, (version, operand)) for d, operand in made.items())
        return made[direction]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """torch.stack; a view, where tensors of one memory lie equally far apart."""
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else first.numel()
    memory = first.untyped_storage().data_ptr()
    lie = step >= first.numel() and all(
        t.is_contiguous() and t.shape == first.shape and t.storage_offset() == first.storage_offset() + i * step
        and t.untyped_storage().data_ptr() == memory for i, t in enumerate(tensors)
    )
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride())) if lie else torch.stack(list(tensors))


def _of_packed(weight: MasterWeight, directions: list[Direction], plan: GemmPlan, dtype: torch.dtype) -> dict[Direction, Operand]:
    """Codes of [E, N, K] that no one shards, in one call."""
    resolved, values = plan.resolved(dtype, weight.device), weight.inner.detach()
    seen = plan.compute_dtype or values.dtype
    through_bf16 = values.dtype is torch.float32 and seen is torch.bfloat16
    buffers = iter(native.linear_weight(
        values if through_bf16 else values.to(seen), resolved.call, ROWWISE in directions, COLUMNWISE in directions,
        through_bf16, [], [],
    ))
    for part in weight.state.parts:
        for d in directions:
            counters.add("weight encode", (part.name, d.value))
    return {
        d: Operand(next(buffers), next(buffers).flatten(), _read_as(plan, "weight", d, resolved.layouts)) for d in directions
    }


class GroupedLinearCall(torch.autograd.Function):
    """The three grouped products of x [M, K], of groups that end at `ends`.

    weights:     E weights [N, K], or one [E, N, K].
    save:        the backward needs x.
    tag:         what `wrong_splits` is told of wrong ends.
    parameters:  the weights, and as many biases, [N] each or one [E, N], or none.
    """

    @staticmethod
    def forward(ctx, x, ends, weights, stack, plan, guard, save, tag, *parameters):
        biases = parameters[len(weights) :]
        weight = stack.operand(weights, ROWWISE, plan, x.dtype, save)
        call, out_dtype = plan.resolved(x.dtype, x.device).call, torch.float32 if biases else x.dtype
        y, ctx.groups, saved = native.grouped_step(x, ends, weight, call, save, guard, out_dtype, wrong_splits(), tag)
        if biases:
            table = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
            y = y.add_(table.float().index_select(0, _group_of(ctx.groups, x))).to(x.dtype)
        ctx.weights, ctx.stack, ctx.plan, ctx.guard, ctx.call = weights, stack, plan, guard, call
        ctx.versions, ctx.dtypes = [weight_version(w) for w in weights], [p.dtype for p in parameters]
        ctx.save_for_backward(*([x] if save and plan.saves == "input" else saved))
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            refuse_second_derivative(ctx)
        weights, groups, needs = ctx.weights, ctx.groups, ctx.needs_input_grad
        for weight, version in zip(weights, ctx.versions):
            check_weight_version(weight, version)
        first = len(needs) - len(ctx.dtypes)
        need_x, need_w, need_b = needs[0], any(needs[first : first + len(weights)]), any(needs[first + len(weights) :])
        dx, dw, db = None, (), ()
        if need_x or need_w:
            weight = ctx.stack.operand(weights, COLUMNWISE, ctx.plan, dy.dtype, False) if need_x else None
            saved = ctx.saved_tensors if need_w else ()
            dx, dw = native.grouped_step_backward(dy, groups, weight, saved, ctx.call, ctx.guard)
        if need_b:
            experts = torch.arange(groups.groups, device=dy.device)
            db = (_group_of(groups, dy) == experts[:, None]).to(dy.dtype) @ dy
        whole = [(g,) if weights[0].dim() == 3 else g for g in (dw, db) if len(g)]
        made = iter([g for of in whole for g in of])
        there = [need_w] * len(weights) + [need_b] * (len(ctx.dtypes) - len(weights))
        grads = [next(made).to(dtype) if is_made else None for is_made, dtype in zip(there, ctx.dtypes)]
        none = [None] * (first - 1)
        return dx if need_x else None, *none, *(g if needed else None for g, needed in zip(grads, needs[first:]))


def _group_of(groups: TokenGroups, x: Tensor) -> Tensor:
    """int64 [tokens]: the group of each token of x."""
    tokens = torch.arange(len(x), device=x.device, dtype=torch.int32)
    return torch.searchsorted(groups.offsets[1:], tokens, right=True)


_WRONG: list[tuple[Tensor, ctypes.c_int64]] = []  # one memory, twice; made for the first device


def wrong_splits() -> Tensor:
    """int64 [1] of the host that devices write: tag << 32 | rows of the last call whose splits were wrong."""
    if not _WRONG:
        with torch_compat.outside_inference_mode():
            made = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
        _WRONG.append((made, ctypes.c_int64.from_address(made.data_ptr())))  # the latter is read in no time
    return _WRONG[0][0]


def told_wrong() -> tuple[int, int] | None:
    """(tag, rows) of a call whose splits a device has found wrong, once."""
    said = _WRONG[0][1].value if _WRONG else 0
    if not said:
        return None
    _WRONG[0][1].value = 0
    return said >> 32, said & 0xFFFFFFFF

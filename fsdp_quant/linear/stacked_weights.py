# SPDX-License-Identifier: Apache-2.0
"""Weights of all experts as one operand: `StackedWeight`, of values, gathered codes or both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import BUFFERS, EncodedMatrix, has_tensor_amax
from ..formats import COLUMNWISE, IDENTITY, ROWWISE, Direction, Format, round_up
from ..ops import dispatch, native
from ..ops.capability import arch_of
from ..ops.layout import ANCHORS, COMPACT, adjoining, operand_format
from ..ops.native import Operand
from ..ops.reference import known
from ..storage import Storage, to_gemm_operands, to_storage
from ..tensor import code_check
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from ..tensor.weight_state import WeightState, held, values_of
from .operands import codes_of_transposed, gathered_storage, lies_transposed, weight_operands
from .plan import GemmPlan


class StackedWeight(NamedTuple):
    """Weights of all experts in one direction: what the backward keeps, and how a GEMM reads it.

    buffers:  codes, scales (None: none) and tensor amaxes of all matrices; or values.
    read:     returns the grouped GEMM's operand [E, outer, contraction] for the buffers. It decodes
              codes that no kernel multiplies, in each pass.
    """

    buffers: Sequence[Tensor | None]
    read: Callable[..., Operand]

    def operand(self) -> Operand:
        return self.read(*self.buffers)


def read_as(plan: GemmPlan, slot: str, direction: Direction, layouts: dict) -> Format:
    return operand_format(plan.operand(slot, direction), layouts[slot][direction])


def stacked_weight(
    weights: Sequence[Tensor],
    directions: Sequence[Direction],
    plan: GemmPlan,
    dtype: torch.dtype,
    states: Sequence[WeightState] = (),
    factors: Sequence[Tensor] = (),
    histories: Sequence[Tensor] = (),
) -> dict[Direction, StackedWeight]:
    """Quantize the weights, or read gathered codes: columnwise operands are [E, K, N].

    weights:  E tensors [N, K], or one [E, N, K].
    states:   of each matrix, with held codes; empty: nothing is held.
    factors, histories:  as of `weight_operands`, ordered by delayed direction, then by matrix.
    """
    first = weights[0]
    if is_packed := first.dim() == 3:
        if isinstance(first, QuantizedTensor):
            return {d: _of_gathered(first, d, plan, dtype) for d in directions}
        values = values_of(first).detach()
        of_values = values.shape, values.dtype, values.device, lies_transposed(values)
        encode = plan.once(_encoder, tuple(directions), dtype, *of_values)
        if encode is not None and not states:
            return encode(values, factors, histories)
        if encode is not None:
            return _of_values(values, directions, encode, plan, dtype, states, factors, histories)
    matrices = first.unbind() if is_packed else weights
    operands = [
        weight_operands(
            matrix,
            directions,
            plan,
            dtype,
            state,
            factors[e :: len(matrices)],
            histories[e :: len(matrices)],
            None if state is None or not state.spans_parts else state.tensor_group,
        )
        for e, (matrix, state) in enumerate(zip(matrices, states or [None] * len(matrices)))
    ]
    return {d: _stacked([of_matrix[d] for of_matrix in operands]) for d in directions}


# One call for all matrices #


def _of_values(
    values: Tensor,
    directions: Sequence[Direction],
    encode: Callable[..., dict[Direction, StackedWeight]],
    plan: GemmPlan,
    dtype: torch.dtype,
    states: Sequence[WeightState],
    factors: Sequence[Tensor],
    histories: Sequence[Tensor],
) -> dict[Direction, StackedWeight]:
    """Quantize the values of an unsharded weight in one call, or read what `fq.hold` keeps."""

    stacks: dict[Direction, StackedWeight] = {}

    def encoded(direction: Direction) -> StackedWeight:
        if not stacks:
            made = plan.weight.encodings
            coded = [d.value for d in directions if d in made and made[d].fmt.is_quantized]
            names = itertools.product((s.name for s in states), coded)
            counters.add_each("weight encode", tuple(names))
            stacks.update(encode(values, factors, histories))
        return stacks[direction]

    key = plan.key, dtype, bool(histories)
    return {
        d: held(states[0], ("experts", d, *key), values, functools.partial(encoded, d))
        for d in directions
    }


def _encoder(
    plan: GemmPlan,
    directions: Sequence[Direction],
    dtype: torch.dtype,
    shape: Sequence[int],
    stored: torch.dtype,
    device: torch.device,
    transposed: bool,
) -> Callable[..., dict[Direction, StackedWeight]] | None:
    """Return what quantizes weights [E, N, K] of dtype `stored` in one call, (values, factors,
    histories) -> stacks; None: one call does not. dtype: of the activations."""
    compute_dtype = plan.compute_dtype or stored
    two_level = any(plan.operand("weight", d).tensor_scale for d in Direction)
    if (two_level and compute_dtype is not torch.bfloat16) or plan.decodes_groups(arch_of(device)):
        return None
    if plan.weight.turns:  # a transposed weight is copied, one matrix at a time
        return None if transposed else functools.partial(_of_rows, directions, plan, dtype)
    layouts = plan.resolved(dtype, device).layouts["weight"]
    formats = {d: plan.operand("weight", d) for d in directions}
    takes = {d: _taking(f, layouts[d], d, shape) for d, f in formats.items() if f.is_quantized}
    coded = list(takes)
    coding = Coding.of(plan, dtype, stored, device, transposed, coded) if coded else None

    def encode(values: Tensor, *delayed: Sequence[Tensor]) -> dict[Direction, StackedWeight]:
        buffers = iter(coding.encode(values, coded, *delayed) if coding else ())
        stacks = {d: take(buffers) for d, take in takes.items()}
        if len(takes) < len(directions):
            rows = values if transposed else native.rows_of(values)
            plain = StackedWeight([rows.to(dtype), None], _plain(IDENTITY))
            stacks |= {d: plain for d in directions if d not in takes}
        return stacks

    return encode


def _of_rows(
    directions: Sequence[Direction], plan: GemmPlan, dtype: torch.dtype, values: Tensor, *_: object
) -> dict[Direction, StackedWeight]:
    """Quantize weights whose columnwise operands are of rowwise codes: one launch, and one per
    layout."""
    encoding, shape, seen = plan.weight.encodings[ROWWISE], values.shape, plan.compute_dtype
    if encoding.fmt.dims(ROWWISE)[0] == 1 and all(are_read_together(plan, d) for d in directions):
        (codes,) = dispatch.encode(values.flatten(0, 1), [encoding], None, dtype=seen)
        counters.add("quantize", (encoding.fmt.name, ROWWISE.value, "native"), len(values) - 1)
        buffers = [codes.data, known(codes.scale, "the scale")]
        return {d: stack_of_codes(buffers, d, shape, plan, dtype) for d in directions}
    starts, none = [0] * len(values), [None] * len(values)
    made = dispatch.multi_tensor_encode(values.unbind(), encoding, none, starts, none, seen)
    rows = [Storage.of(codes, encoding, shape[1:], seen or values.dtype) for codes in made]
    of = {ROWWISE: rows, COLUMNWISE: [plan.weight.columnwise_of(s) for s in rows]}
    layouts = plan.resolved(dtype, values.device).layouts["weight"]
    return {d: _laid_out(of[d], layouts[d]) for d in directions}


class Coding(NamedTuple):
    """How one call of `native.linear_weight` quantizes the values of all matrices.

    call:      number of the compiled step.
    rounds:    it rounds the values to bf16 first.
    dtype:     in which it is given them.
    is_turned: the step is `GemmPlan.turned`.
    """

    call: int
    rounds: bool
    dtype: torch.dtype
    is_turned: bool

    @staticmethod
    def of(
        plan: GemmPlan,
        dtype: torch.dtype,
        stored: torch.dtype,
        device: torch.device,
        transposed: bool,
        directions: Sequence[Direction] = tuple(Direction),
    ) -> Coding:
        """Return that of values of dtype `stored`. dtype: of the activations."""
        turned = plan.turned(dtype, device) if transposed else None
        call = plan.resolved(dtype, device).call if turned is None else turned
        if call is None:
            raise ValueError("the plan of packed experts has no compiled step")
        seen = plan.compute_dtype or stored
        two_level = any(plan.operand("weight", d).tensor_scale for d in directions)
        rounds = stored is torch.float32 and seen is torch.bfloat16 and not two_level
        return Coding(call, rounds, stored if rounds else seen, turned is not None)

    def encode(
        self, values: Tensor, coded: Sequence[Direction], *delayed: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the buffers of the directions that are `coded`; delayed: factors, histories."""
        values = values if values.dtype is self.dtype else values.to(self.dtype)
        if self.is_turned:
            of = codes_of_transposed(values, self.call, coded, self.rounds)
            return [t for d in coded for t in of[d]]
        row, col = ROWWISE in coded, COLUMNWISE in coded
        return native.linear_weight(
            values, self.call, row, col, self.rounds, *(list(of_slot) for of_slot in delayed)
        )


def _taking(
    fmt: Format, layout: str, direction: Direction, shape: Sequence[int]
) -> Callable[[Iterator[Tensor]], StackedWeight]:
    """Return what takes the buffers of one direction, as `native.linear_weight` returns them."""
    experts, n, k = shape
    is_decoded, read = has_tensor_amax(fmt, layout), _plain(operand_format(fmt, layout))
    if not fmt.tensor_scale:
        return lambda buffers: StackedWeight([next(buffers), next(buffers).flatten()], read)

    def take(buffers: Iterator[Tensor]) -> StackedWeight:
        data, scale = next(buffers), next(buffers)
        width = data.shape[1] * (2 if is_decoded else 1)
        view = (experts, n, k), (n * k, k, 1)
        if direction is COLUMNWISE:  # matrices are concatenated, each from a tile
            view = (experts, k, n), (round_up(n, native.TILE), width, 1)
        if not is_decoded:
            return StackedWeight([data.as_strided(*view), scale.flatten()], read)
        scale = scale.view(-1, width // (fmt.block[1] or width))
        reads = functools.partial(two_level_operand, fmt=fmt, view=view)
        return StackedWeight([data, scale, next(buffers)], reads)

    return take


# One storage per matrix #


def _stacked(storages: Sequence[EncodedMatrix]) -> StackedWeight:
    first = storages[0]
    data, scales = [s.data for s in storages], [s.scale for s in storages if s.scale is not None]
    if first.tensor_amax is not None:
        return _stacked_two_level(storages, data, scales)
    if first.layout == COMPACT and first.fmt.is_quantized:
        read = functools.partial(
            _block_operand, fmt=first.fmt, direction=first.direction, shape=first.shape
        )
        return StackedWeight([stacked(data), stacked(scales)], read)
    scale = torch.cat([s.reshape(-1) for s in scales]) if scales else None
    return StackedWeight([stacked(data), scale], _plain(first.operand_format))


def _stacked_two_level(
    storages: Sequence[EncodedMatrix], data: list[Tensor], scales: list[Tensor]
) -> StackedWeight:
    first, experts = storages[0], len(storages)
    rows, cols = first.shape
    if first.direction is COLUMNWISE:
        codes = native.transpose_stack(data, first.shape, first.fmt.bits)
        scales, rows, cols = [s.t() for s in scales], cols, rows
    else:
        codes = stacked(data)
    view = (experts, rows, cols), (rows * cols, cols, 1)
    buffers = [
        codes.view(-1, codes.shape[-1]),
        torch.stack(scales).view(-1, scales[0].shape[1]),
        torch.cat([s.tensor_amax for s in storages if s.tensor_amax is not None]),
    ]
    return StackedWeight(buffers, functools.partial(two_level_operand, fmt=first.fmt, view=view))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape. Returns a view if they are adjacent in one buffer and aligned to
    16 bytes."""
    joined = adjoining(tensors)
    if joined is not None and joined.data_ptr() % 16 == 0:
        return joined.view(len(tensors), *tensors[0].shape)
    return torch.stack(tuple(tensors))


# Operands that GEMMs read #


def _plain(fmt: Format) -> Callable[..., Operand]:
    return functools.partial(Operand, fmt=fmt)


# torch._grouped_mm writes bf16 only, so applying a tensor's scale to its result would round twice:
# our own kernel (`Grain::kValues`) multiplies two-level codes, decoded K-major.
def two_level_operand(
    data: Tensor,
    scale: Tensor,
    tensor_amax: Tensor,
    fmt: Format,
    view: tuple[tuple[int, ...], tuple[int, ...]],
) -> Operand:
    """Decode two-level codes to values with one decode scale per tensor.

    data:  rowwise 4-bit codes of one matrix [outer, contraction], packed to [outer, contraction /
           2].
    view:  (shape, strides) of the decoded values.
    """
    cols, none = 2 * data.shape[1], None
    values = native.dequantize(data, scale, none, fmt, ROWWISE, cols, 0, torch.bfloat16)
    return Operand(values.as_strided(*view), native.tensor_decode_scale(tensor_amax, fmt), IDENTITY)


def _block_operand(
    data: Tensor, scale: Tensor, fmt: Format, direction: Direction, shape: tuple[int, int]
) -> Operand:
    """Decode compact codes with scales of blocks, [E, ..] each, of matrices of this shape."""
    (n, k), rows, experts = shape, fmt.dims(direction)[0] or 0, len(data)
    matrices = list(zip(data.unbind(), scale.unbind()))
    if rows and n % rows == 0:  # no block has rows of two matrices
        n, matrices = experts * n, [(data.flatten(0, 1), scale.flatten(0, 1))]
    values = [
        Storage.over(buffers, fmt, direction, (n, k), torch.bfloat16).dequantize()
        for buffers in matrices
    ]
    return Operand(stacked(values).view(experts, *shape), None, IDENTITY)


# Gathered codes #


def _of_gathered(
    weight: QuantizedTensor, direction: Direction, plan: GemmPlan, dtype: torch.dtype
) -> StackedWeight:
    """Return a weight [E, N, K] that `fully_shard` gathered."""
    pair, layout = weight._pair, plan.resolved(dtype, weight.device).layouts["weight"][direction]
    is_one = pair.shown is not None and are_read_together(plan, direction)
    matrices = [QuantizedTensor(pair=part) for part in pair.groups[: 1 if is_one else None]]
    # `gathered_storage` raises for freed codes and for other formats
    compact = [to_storage(gathered_storage(m, direction, plan, COMPACT)) for m in matrices]
    if is_one:
        codes = gathered_codes(weight, direction)
        return stack_of_codes(codes, direction, weight.shape, plan, dtype)
    return _laid_out(compact, layout)


def _laid_out(compact: Sequence[Storage], layout: str) -> StackedWeight:
    if layout == COMPACT or not compact[0].fmt.is_quantized:
        return _stacked(compact)
    return _stacked(to_gemm_operands([(storage, layout) for storage in compact]))


def are_read_together(plan: GemmPlan, direction: Direction) -> bool:
    """Return whether the codes of all matrices are converted to an operand together."""
    two_level = plan.operand("weight", direction).tensor_scale
    return not (two_level or plan.weight.is_derived or code_check.checking)


def stack_of_codes(
    codes: Sequence[Tensor],
    direction: Direction,
    shape: Sequence[int],
    plan: GemmPlan,
    dtype: torch.dtype,
) -> StackedWeight:
    """Return the operand of a weight [E, N, K] for the buffers from `gathered_codes`, if they
    `are_read_together`. Raises StaleWeightError for freed codes."""
    (experts, n, k), fmt = shape, plan.operand("weight", direction)
    Storage.over(codes, fmt, direction, (experts * n, k), dtype).readable()
    layout = plan.resolved(dtype, codes[0].device).layouts["weight"][direction]
    data, *scales = (t.unflatten(0, (experts, -1)) for t in codes)
    transposed = direction is COLUMNWISE
    if layout in ANCHORS:
        data, scale = dispatch.anchor_codes(data, scales[0], None, k, fmt, direction, layout)
        return StackedWeight([data, scale.flatten()], _plain(operand_format(fmt, layout)))
    if not fmt.is_quantized:
        return StackedWeight([data, None], _plain(fmt))
    (scale,) = scales
    if layout == COMPACT:
        source = direction if direction in plan.weight.encodings else ROWWISE
        stored = plan.operand("weight", source)
        read = functools.partial(_block_operand, fmt=stored, direction=source, shape=(n, k))
        return StackedWeight([data, scale], read)
    # GEMMs read scales of 1 x 128 blocks by column, and of 128 x 128 blocks in rows padded to 4
    if not fmt.scale_leaves_contraction:
        scale = scale.mT if transposed != (fmt.block[0] == 1) else scale
        scale = F.pad(scale, (0, -scale.shape[-1] % 4))
    data = native.transpose_stack(data.unbind(), data.shape[1:], bits=8) if transposed else data
    return StackedWeight([data, scale.flatten()], _plain(fmt))


def gathered_codes(weight: QuantizedTensor, direction: Direction) -> list[Tensor]:
    """Return the buffers of a gathered weight [E, N, K] with the codes of a direction. Each buffer
    holds all matrices."""
    shown = weight._pair.shown or {}
    source = direction if f"{direction.value}_data" in shown else ROWWISE
    names = [f"{source.value}_{field}" for field in BUFFERS]
    return [shown[name] for name in names if name in shown]


def weight_of_codes(
    codes: Sequence[Tensor],
    direction: Direction,
    shape: Sequence[int],
    plan: GemmPlan,
    dtype: torch.dtype,
) -> QuantizedTensor:
    """Return a weight [E, N, K] of the buffers from `gathered_codes`."""
    experts, n, k = shape
    source = direction if direction in plan.weight.encodings else ROWWISE
    fmt, pairs = plan.weight.side(source).fmt, [StoragePair() for _ in range(experts)]
    for pair, *buffers in zip(pairs, *(t.unflatten(0, (experts, -1)).unbind() for t in codes)):
        matrix = Storage.over(buffers, fmt, source, (n, k), dtype)
        if source is not direction and plan.weight.shares_storage:
            matrix = matrix.as_direction(direction)
        pair.put(matrix.direction, matrix)
    shown = {f"{source.value}_{field}": t for field, t in zip(BUFFERS, codes)}
    return QuantizedTensor(pair=StoragePair(groups=pairs, shown=shown), shape=tuple(shape))

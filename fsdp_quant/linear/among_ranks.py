# SPDX-License-Identifier: Apache-2.0
"""The forward of a linear layer that ranks share: its input and output around the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Layout

from ..context import STEP, STEP_FIELDS, current_autocast
from ..counters import bytes_of
from ..formats import ROWWISE, Direction
from ..ops.capability import arch_of
from ..ops.layout import ANCHORED, ANCHORS, NATIVE
from ..ops.reference import known
from ..tensor import torch_compat
from . import fused
from .base import BaseLinear
from .call import Call, StepRanks, check_travels
from .cut import Name, SequenceCut, TensorParallel
from .has_weight import attach_tensor_group
from .plan import GemmPlan
from .program import linear, pieces
from .shared_input import Handed
from .transport import count_high_precision_gather


def forward_among_ranks(layer: BaseLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """y of a layer that ranks share: a DTensor where its weight is one and the style wants it.

    bias:  of the layer, or None: it is not added.
    """
    if not x.dtype.is_floating_point:
        raise ValueError(
            f"{layer.runtime.name}: input is {x.dtype}; a linear layer multiplies floating tensors"
        )
    weight, layouts = layer.weight, layer.parallel
    if isinstance(layouts, TensorParallel):
        return multiply_shared(layer, x, x, weight, bias, layouts)
    state = layer.runtime.weight_state
    if not isinstance(weight, DTensor) or (bias is not None and not isinstance(bias, DTensor)):
        raise NotImplementedError(
            f"{layer.runtime.name}: a style shares it between ranks, and its weight is no DTensor; "
            "apply parallelize_module to it"
        )
    if state.tensor_group is None and weight.device_mesh.ndim == 1:
        attach_tensor_group(layer)
    if state.tensor_group is None or weight.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"{layer.runtime.name}: the weight is a DTensor {weight.placements} that is gathered "
            "by no fully_shard and cut by no parallelize_module; use one of them, or leave the "
            "module out of fq.convert"
        )
    mesh, column = weight.device_mesh, weight.placements[0].is_shard(0)
    layout = layouts.input if layouts is not None else Replicate() if column else Shard(-1)
    local, sequence_dim, reduces = _local_input(x, mesh, column, layout)
    if column:
        axis = TensorParallel(state.tensor_group, True, sequence_dim, reduces)
        placement: Layout = Shard(x.dim() - 1)
    elif layouts is not None and (cut := _sequence_dim(layouts.output, x.dim())) is not None:
        axis, placement = TensorParallel(state.tensor_group, False, cut), layouts.output
    else:
        axis, placement = TensorParallel(state.tensor_group, False), Replicate()
    local_bias = None if bias is None else torch_compat.to_local(bias)
    y = multiply_shared(layer, x, local, torch_compat.to_local(weight), local_bias, axis)
    if layouts is not None and layouts.use_local_output:
        if _same(layouts.output, placement, x.dim()):
            return y
    return DTensor.from_local(y, mesh, [placement], run_check=False)


def _local_input(
    x: Tensor, mesh: DeviceMesh, column: bool, layout: Layout
) -> tuple[Tensor, int | None, bool]:
    """(this rank's part of x, the dim that cuts its sequence, whether the layer sums its dx)."""
    if isinstance(x, DTensor):
        layout = x.placements[0]
    dims = x.dim()
    if column and (cut := _sequence_dim(layout, dims)) is not None:
        return (x.to_local() if isinstance(x, DTensor) else x), cut, False
    wanted = Replicate() if column else Shard(dims - 1)
    if not _same(layout, wanted, dims):
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)
        if not layout.is_replicate():
            count_high_precision_gather(bytes_of(x))
        x = x.redistribute(placements=[wanted])
    if not isinstance(x, DTensor):
        return x, None, True
    return x.to_local(grad_placements=[Partial()] if column else None), None, False


def _sequence_dim(layout: Layout, dims: int) -> int | None:
    """The dim that a layout cuts a tensor of `dims` dims along; None: the last, or none."""
    dim = layout.dim % dims if isinstance(layout, Shard) else dims - 1
    return None if dim == dims - 1 else dim


def _same(a: Layout, b: Layout, dims: int) -> bool:
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim % dims == b.dim % dims
    return a == b


def multiply_shared(
    layer: BaseLinear,
    owner: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: TensorParallel,
) -> Tensor:
    """Return y of a layer that ranks share as `axis` says.

    owner:  as in `shared_input`; None: no other layer reads x.
    """
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{layer.runtime.name}: this rank's input is {list(x.shape)}, wanted [.., "
            f"{weight.shape[1]}] of at least two dims, for a weight of which it holds "
            f"{list(weight.shape)}"
        )
    dtype = torch_compat.autocast_dtype(x.device) or x.dtype
    override, plan = current_autocast(), layer.plan_here(weight.device)
    if plan.batch_invariant and not axis.column and axis.group.size() > 2:
        raise NotImplementedError(
            f"{layer.runtime.name}: its output sums over {axis.group.size()} ranks, in an order "
            "that depends on the batch, and fq.numerics.batch_invariant() wants sums over at most "
            "2; cut the layer by columns, or leave the context"
        )
    if plan.boundary is not None:
        raise NotImplementedError(
            f"{layer.runtime.name}: layers that ranks share have no boundary slots; put "
            "fq.Quantize between modules"
        )
    if torch.compiler.is_compiling() and not layer.delay_wgrad_compute:
        owner = x if owner is None or axis.gathered_slot != "input" else owner
        _check_cut(layer, owner, weight, plan, axis)
        group, spans_weight = axis.group.group_name, override is None
        ranks = group, axis.column, axis.sequence_dim, axis.reduces, spans_weight, dtype
        return layer.in_graph(owner, weight, bias, plan, ranks)
    return _multiply(layer, owner, x.to(dtype), weight, bias, plan, axis)


@torch_compat.never_compiled  # runs where a graph broke; a graph holds `program.in_graph`
def _multiply(
    layer: BaseLinear,
    owner: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemmPlan,
    axis: TensorParallel,
) -> Tensor:
    runtime = layer.runtime
    call = layer.call(x, weight, bias, plan)._replace(
        axis=axis, require_native=runtime.recipe.require_native
    )
    if axis.group.size() > 1 and plan.is_keyed:
        step = STEP.on(x.device)
        if STEP.token_offset < 0:  # the data-parallel rank keys rows
            step = step.clone()  # of ranks with the same rows it is one
            # a kernel writes it, so that CUDA graphs capture it
            step[STEP_FIELDS.index("data_parallel_rank")].fill_(axis.data_parallel_rank)
        call = call._replace(step=step, ids=axis.slot_ids(runtime.name, weight.shape, x.device))
    handed = Handed(owner=owner)
    ranks = _ranks_of_step(call, x, weight, bias, handed)
    if ranks is not None:
        return fused.linear(x, weight, bias, call._replace(ranks=ranks), handed)
    return fused.with_write_check(linear(x, weight, bias, call, owner), weight, x.requires_grad)


def _ranks_of_step(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, handed: Handed
) -> StepRanks | None:
    """Return `Call.ranks` where one compiled call per pass gives the bytes of the program."""
    axis = known(call.axis, "the ranks")
    column, is_cut = axis.column, axis.sequence_dim is not None
    served = call.plan.once(_serves_ranks, column, is_cut, x.dtype, x.device)
    if served is None or axis.group.size() == 1 or not (column or bias is None):
        return None
    if x.is_cuda and not torch_compat.is_nccl(axis.group, x.device):
        return None
    dim, count = -1, 1
    if is_cut:
        multiple, in_pieces = served
        cut = _cut_of(axis, x if handed.owner is None else handed.owner, weight, call.described)
        dim, count = cut.dim, 1 if column or cut.outer > 1 else pieces(cut.chunk, weight.shape)
        if cut.chunk % multiple or (count > 1 and not in_pieces):
            return None
        resolved = call.plan.resolved(x.dtype, x.device)
        if handed.shares_input(call) and not fused.can_add(call.plan, resolved, 1):
            return None  # dx is added to that of other layers
    return axis.group.group_name, column, dim, axis.reduces, call.weight_group is not None, count, 0


def _serves_ranks(
    plan: GemmPlan, column: bool, is_cut: bool, dtype: torch.dtype, device: torch.device
) -> tuple[int, bool] | None:
    """Return what divides a rank's rows in a compiled step, and whether it scatters y by pieces;
    None: it serves no ranks, as they share amaxes of a second level, or codes that no step lays out
    behind the gather."""
    gathered, split = ("input", "grad_output") if column else ("grad_output", "input")
    resolved, is_square = plan.resolved(dtype, device), plan.hybrid(gathered).shares_storage
    split_spans = any(plan.operand(split, d).tensor_scale for d in Direction)
    if resolved.call is None or plan.is_keyed or split_spans:
        return None
    on_hopper = arch_of(device) == "sm_90a"

    def lays_out(slot: str, direction: Direction, anchored: Sequence[str]) -> bool:
        layout, fmt = resolved.layouts[slot][direction], plan.operand(slot, direction)
        is_known = fmt.has_fp32_scales and fmt.block[0] in (1, None)  # of lines, or of the tensor
        return layout in anchored or (on_hopper and layout == NATIVE and is_known)

    formats = {d: plan.operand(gathered, d) for d in Direction}
    if is_cut and (
        any(f.tensor_scale or (is_square and not f.spans_tensor) for f in formats.values())
        or not all(lays_out(gathered, d, ANCHORS) for d in Direction)
    ):
        return None
    rows = lcm(*(fmt.row_alignment(d) for d, fmt in formats.items()))
    return rows, lays_out("input", ROWWISE, [ANCHORED])


def _check_cut(
    layer: BaseLinear, owner: Tensor, weight: Tensor, plan: GemmPlan, axis: TensorParallel
) -> None:
    """In a trace, raise what the eager layer raises of a cut before its first collective. owner: x,
    or the DTensor over it."""
    slot, column = axis.gathered_slot, axis.column
    if slot is None:
        return
    # a graph does not depend on a layer's name, so it is read in the error alone
    cut = _cut_of(axis, owner, weight, lambda part: lambda: f"{layer.runtime.name} {part}")
    if layer.recipe.require_native:
        both = torch.is_grad_enabled() and (weight.requires_grad or not column)
        read = tuple(Direction) if both else (ROWWISE,) if column else ()
        check_travels(lambda: layer.runtime.name, plan.hybrid(slot), slot, read, cut)


def _cut_of(
    axis: TensorParallel, owner: Tensor, weight: Tensor, described: Callable[[str], Name]
) -> SequenceCut:
    """Return the cut of x or y, and raise ValueError before the first collective of one that ranks
    do not divide. owner: x, or the DTensor over it."""
    column = axis.column
    shape = tuple(owner.shape) if column else (*owner.shape[:-1], weight.shape[0])
    is_whole = not column or isinstance(owner, DTensor)
    cut_of = SequenceCut.of_whole if is_whole else SequenceCut.of_local
    return cut_of(shape, axis.cut_dim, axis.group, described("input" if column else "output"))

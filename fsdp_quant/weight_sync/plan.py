# SPDX-License-Identifier: Apache-2.0
"""`plan_weight_sync`: check the weights on every rank, and agree on one plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor import torch_compat
from ..tensor.agreement import agree
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import local_of
from .cast_plan import CastPlan
from .sync import WeightSync
from .synced_weight import SyncedWeight, SyncItem

TRANSPORTS, STATISTICS = ("auto", "codes", "highprec"), ("dense", "halo")
_REMEDY = "give every rank of a group the same items, options and build of fsdp_quant"


def plan_weight_sync(
    items: Sequence[SyncItem],
    group: dist.ProcessGroup | None,
    transport: str = "auto",
    stats: str = "dense",
    compute_dtype: torch.dtype | None = torch.bfloat16,
    tensor_group: dist.ProcessGroup | None = None,
) -> WeightSync:
    """Plan how these weights are cast, gathered and finished; from then on they are what the sync
    publishes.

    items:          the same on every rank of `group` (None: one process), in the same order.
    transport:      "codes", "highprec" (rounded masters), or "auto": for each weight what sends
                    fewer bytes.
    stats:          "dense" or "halo"; see the module's note.
    compute_dtype:  that the weights' recipe has: what quantizers see of the master.
    tensor_group:   of ranks whose weights of these names are the other parts of them, or copies:
                    each cast reduces amaxes of whole tensors over it too. None: every weight is
                    whole.

    Every rank must call it: one all-reduce a group compares the plans. Raises ValueError on every
    rank, and changes no weight, if any of them cannot plan: ownership that does not cover a weight
    once, encodings that mix elements across a cut (a rotation), stochastic rounding, a weight that
    is no quantized parameter, or that another sync or optimizer has, or a layer's part of a weight
    whose scales span all parts, without its layer's group.
    """
    error, weights, dense = None, [], stats == "dense"
    part = (0, 1) if tensor_group is None else (tensor_group.rank(), tensor_group.size())
    device = next(
        (part.device for item in items for part in item if isinstance(part, Tensor)),
        torch_compat.device_of(group),
    )
    try:
        planned = [SyncItem(*item) for item in items]
        _check(planned, group, device, transport, stats, compute_dtype, part)
        weights = [
            SyncedWeight(item, transport, dense, part if item.is_part else (0, 1))
            for item in planned
        ]
    except (ValueError, TypeError) as caught:
        error = caught
    kernels = CastPlan.unsupported_reason(weights, device) or "with kernels"
    same = {"the sync": f"from {compute_dtype}, {kernels}"}
    of_parts = {w.name: f"{w.quantizer}, one of {w.part[1]} parts" for w in weights}
    own = {
        w.name: f"{list(w.shape)} of {w.quantizer}, cut at {w.shards.cuts}, "
        f"{'values' if w.gathers_values else 'codes'} travel"
        for w in weights
    }
    for of, facts in (
        (group, own | {"transport": transport, "stats": stats}),
        (tensor_group, of_parts),
    ):
        try:
            agree(
                facts | same,
                [] if of is None else [of],
                error,
                _REMEDY,
                "ranks plan other weight syncs",
            )
        except (ValueError, TypeError) as caught:  # ranks of the other group wait to hear it
            error = caught
    if error is not None:
        raise error
    return WeightSync(weights, group, device, dense, tensor_group)


def _check(
    items: list[SyncItem],
    group,
    device,
    transport: str,
    stats: str,
    compute_dtype: torch.dtype | None,
    part: tuple[int, int],
) -> None:
    """Raise ValueError for what cannot be planned, naming the weight."""
    if transport not in TRANSPORTS or stats not in STATISTICS:
        raise ValueError(
            f"transport is one of {TRANSPORTS} and stats one of {STATISTICS}, got {transport!r} "
            f"and {stats!r}"
        )
    world, seen = 1 if group is None else group.size(), set()
    for name, weight, shards, is_part in items:
        if weight is not local_of(weight):
            raise ValueError(
                f"{name} is a DTensor {weight.placements}, so fully_shard or tensor parallelism "
                "owns and gathers its pieces; give a weight to fully_shard or to a weight sync, "
                "not to both"
            )
        if not isinstance(weight, QuantizedWeight):
            raise ValueError(
                f"{name}: {type(weight).__name__} is no quantized parameter; build the model under "
                "fq.quantized_model_init"
            )
        quantizer, state = weight.state.quantizer, weight.state
        if (
            weight.dim() != 2
            or tuple(weight.shape) != state.shape
            or not weight.numel()
            or weight.device != device
        ):
            raise ValueError(
                f"{name}: wanted a whole weight of two dims on {device}, where the first one is, "
                f"got {list(weight.shape)} on {weight.device}"
            )
        if seen & {id(state), name}:
            raise ValueError(
                f"{name}: the weight, or its name, is in the items twice; a tied weight is "
                "published once"
            )
        seen |= {id(state), name}
        weight.check_not_taken()
        if shards.numel != weight.numel() or shards.ranks != world:
            raise ValueError(
                f"{name}: the shards are of {shards.numel} elements on {shards.ranks} ranks; "
                f"wanted {weight.numel()} on {world}"
            )
        if state.spans_parts and (not is_part or state.part != part):
            formats = ", ".join(
                f"{d.value} {e.fmt}" for d, e in quantizer.encodings.items() if e.fmt.spans_tensor
            )
            raise ValueError(
                f"{name} is one of {state.part[1]} parts of a weight, whose scales of a whole "
                f"tensor ({formats}) they share; pass tensor_group=, the group of its layer"
            )
        for d, encoding in quantizer.encodings.items():
            if encoding.fmt.rotated or quantizer.is_stochastic:
                what = (
                    "rotated, which mixes elements of two owners"
                    if encoding.fmt.rotated
                    else "rounded stochastically"
                )
                raise ValueError(
                    f"{name}.{d.value} is {quantizer}, {what}; do so with activations and "
                    "gradients only"
                )
        if state.compute_dtype != compute_dtype:
            raise ValueError(
                f"{name}: its recipe quantizes from {state.compute_dtype}, and "
                f"compute_dtype={compute_dtype}; wanted one dtype"
            )

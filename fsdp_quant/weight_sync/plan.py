# SPDX-License-Identifier: Apache-2.0
"""`plan_weight_sync`: check the weights on every rank, and agree on one plan. `describe` and
`token_alignment`: what a trainer needs to know before it lays out its buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..formats import COLUMNWISE
from ..recipe import Recipe, Role, as_recipe
from ..tensor import torch_compat
from ..tensor.agreement import agree
from ..tensor.quantized_weight import QuantizedWeight
from .cast_plan import CastPlan
from .sync import WeightSync
from .synced_weight import SyncedWeight, SyncItem, bits_of

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
    """Plan how these weights are cast, gathered and finished; the sync writes their codes from then
    on.

    items:          the same on every rank of `group` (None: one process), in the same order.
    transport:      "codes", "highprec" (rounded masters), or "auto": the one that sends fewer bytes
                    per weight.
    stats:          "dense" or "halo"; see the note of `hooks`.
    compute_dtype:  dtype that quantizers see, which must be the recipe's.
    tensor_group:   ranks that hold the other tensor-parallel parts of these weights, or copies:
                    each cast also reduces amaxes of whole tensors over it. None: every weight is
                    whole.

    Every rank must call it: one all-reduce per group compares the plans. Raises ValueError on every
    rank, and changes no weight, if any rank cannot plan: shards that do not cover a weight once,
    rotated or stochastically rounded encodings, a weight that is no quantized parameter or belongs
    to another sync or optimizer, or a tensor-parallel part whose scales span all parts, without
    tensor_group.
    """
    error: ValueError | TypeError | None = None
    weights: list[SyncedWeight] = []
    planned: set[str | int] = set()
    world, dense = 1 if group is None else group.size(), stats == "dense"
    part = (0, 1) if tensor_group is None else (tensor_group.rank(), tensor_group.size())
    device = next(
        (part.device for item in items for part in item if isinstance(part, Tensor)),
        torch_compat.device_of(group),
    )
    try:
        if transport not in TRANSPORTS or stats not in STATISTICS:
            raise ValueError(
                f"transport is one of {TRANSPORTS} and stats one of {STATISTICS}, got "
                f"{transport!r} and {stats!r}"
            )
        for item in starmap(SyncItem, items):
            weight = _checked(item, device, world, part, compute_dtype)
            if planned & {id(weight.state), item.name}:
                raise ValueError(
                    f"{item.name}: the weight, or its name, is in the items twice; a tied weight "
                    "is published once"
                )
            planned |= {id(weight.state), item.name}
            item_part = part if item.is_part else (0, 1)
            weights.append(SyncedWeight(item, weight, transport, dense, item_part))
    except (ValueError, TypeError) as caught:
        error = caught
    kernels = CastPlan.unsupported_reason(weights, device) or "with kernels"
    same = {"the sync": f"from {compute_dtype}, {kernels}"}
    of_parts = {w.name: f"{w.quantizer}, one of {w.part[1]} parts" for w in weights}
    plans = {
        w.name: f"{list(w.shape)} of {w.quantizer}, cut at {w.shards.cuts}, "
        f"{'values' if w.gathers_values else 'codes'} travel"
        for w in weights
    }
    plans |= {"transport": transport, "stats": stats}
    for ranks, facts in ((group, plans), (tensor_group, of_parts)):
        groups = [] if ranks is None else [ranks]
        try:
            agree(facts | same, groups, error, _REMEDY, "ranks plan other weight syncs")
        except (ValueError, TypeError) as caught:  # the other group compares too
            error = caught
    if error is not None:
        raise error
    return WeightSync(weights, group, device, dense, tensor_group)


def _checked(
    item: SyncItem,
    device: torch.device,
    world: int,
    part: tuple[int, int],
    compute_dtype: torch.dtype | None,
) -> QuantizedWeight:
    """The parameter of an item. Raises ValueError, naming the weight, if it cannot be planned."""
    name, weight, shards, is_part = item
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name} is a DTensor {weight.placements}, so fully_shard or tensor parallelism owns "
            "and gathers its pieces; give a weight to fully_shard or to a weight sync, not to both"
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
        by_error = "scaled by errors of whole blocks, which two owners may share"
        for is_so, kind in (
            (encoding.fmt.rotated, "rotated, which mixes elements of two owners"),
            (encoding.fmt.chooses_by_error, by_error),
            (quantizer.is_stochastic, "rounded stochastically"),
        ):
            if is_so:
                raise ValueError(
                    f"{name}.{d.value} is {quantizer}, {kind}; do so with activations and "
                    "gradients only"
                )
    if state.compute_dtype != compute_dtype:
        raise ValueError(
            f"{name}: its recipe quantizes from {state.compute_dtype}, and "
            f"compute_dtype={compute_dtype}; wanted one dtype"
        )
    return weight


# Formats, wire bits and alignments #


@dataclass(frozen=True)
class WeightFacts:
    """Formats and wire size of a parameter, for a trainer that lays out buffers.

    formats:     by direction; says whether a direction shares or derives its storage.
    wire_bits:   bits per element of codes, by encoded direction; without scales.
    """

    is_quantized: bool
    shape: tuple[int, ...]
    formats: dict[str, str]
    wire_bits: dict[str, int]


def describe(param: Tensor) -> WeightFacts:
    """Formats and wire bits of a parameter, or that it is not quantized."""
    weight = torch_compat.local_of(param)
    if not isinstance(weight, QuantizedWeight):
        return WeightFacts(False, tuple(param.shape), {}, {})
    quantizer = weight.state.quantizer
    formats = {d.value: repr(q.fmt) for d, q in quantizer.sides.items()}
    if quantizer.shares_storage:
        formats[COLUMNWISE.value] += " (the rowwise storage)"
    elif quantizer.is_derived:
        formats[COLUMNWISE.value] += " (of the decoded rowwise storage)"
    bits = {d.value: bits_of(e, weight.dtype) for d, e in quantizer.encodings.items()}
    return WeightFacts(True, tuple(weight.shape), formats, bits)


def token_alignment(recipe: Recipe | str, role: Role | str) -> int:
    """Multiple of tokens per group (expert, sequence shard) such that no block of an activation or
    gradient crosses into the next group.

    role:  role of any tensor of the module, or the module's name.
    """
    recipe = as_recipe(recipe, "token_alignment", Recipe)
    kind, name = (role.module_type, role.name) if isinstance(role, Role) else ("linear", role)
    sizes = [1]
    for tensor_type in ("input", "grad_output"):
        hybrid = recipe.hybrid(Role(kind, tensor_type, name))
        sizes += [
            size
            for d, q in ({} if hybrid is None else hybrid.sides).items()
            for size in (q.fmt.dims(d)[0] or 1, q.fmt.padded_shape((1, 1), d)[0])
        ]
    return math.lcm(*sizes)

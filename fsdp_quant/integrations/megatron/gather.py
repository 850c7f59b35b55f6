# SPDX-License-Identifier: Apache-2.0
"""`gather_codes`: Megatron-LM's bucket groups cast the optimizer's masters and all-gather codes.

[Note: what changes]
Megatron's DDP, its buffers and its optimizer stay unchanged; `gather_codes` gives each bucket group
a subclass:
    start_param_sync                    masters of the group -> codes of the elements that this rank
                                        owns -> all-gather, with the values of parameters that are
                                        not quantized (norms, embeddings)
    finish_param_sync, _post_param_sync the layers' weights are READY
    start_param_sync(force_sync=True)   Megatron's gather of values (checkpoints), then the codes
Between forced syncs the values of a quantized parameter are current only where this rank owns them.
GEMMs read codes, and a state dict of stale values is refused.

Ownership follows Megatron: rank r owns the r-th part of every bucket, wherever parameters begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...context import STEP
from ...gemm import StaleWeightError
from ...modules.steps import name_of
from ...tensor import torch_compat
from ...tensor.quantized_weight import QuantizedWeight, QuantizedWeightState
from ...weight_sync.plan import plan_weight_sync
from ...weight_sync.shard_map import Segments, ShardMap, WireTensor
from ...weight_sync.sync import WeightSync, Work
from ...weight_sync.synced_weight import BOTH, GatherBuffer, SyncItem
from .experts import weight_proxies
from .weights import WeightProxy

_REFUSED_OF_DDP = {  # field -> the value that was tested
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "num_distributed_optimizer_instances": 1,
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "nccl_ub": False,
    "align_param_gather": False,
    "delay_wgrad_compute": False,
}
_REFUSED_OF_OPTIMIZER = {
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "overlap_param_gather_with_optimizer_step": False,
    "fp16": False,
}


def shard_map(bucket: Any, param: nn.Parameter, ranks: int) -> ShardMap:
    """Ownership of the elements of a parameter in one of Megatron's buckets.

    Raises ValueError if the ranks do not divide the bucket.
    """
    start, end = bucket.param_to_index[param]
    size = bucket.grad_data.numel()
    if size % ranks:
        raise ValueError(
            f"a bucket of {size} elements is cut over {ranks} ranks, which do not divide it; pad "
            "its end"
        )
    return ShardMap(
        tuple(min(max(size // ranks * r - start, 0), end - start) for r in range(ranks + 1))
    )


class _Values:
    """The parameters of a bucket group that are gathered as values."""

    def __init__(self, params: list[tuple[object, nn.Parameter]], group: dist.ProcessGroup):
        self._params, self._group = params, group
        wire_tensors = tuple(
            WireTensor(f"value {i}", 8 * p.itemsize, shard_map(b, p, group.size()))
            for i, (b, p) in enumerate(params)
        )
        segments = Segments(wire_tensors, group.size())
        own = torch.zeros(segments.size, dtype=torch.uint8, device=params[0][1].device)
        self._channel = GatherBuffer(
            BOTH, [(p.name, None, "values") for p in wire_tensors], segments, own
        )

    def gather(self) -> GatherBuffer:
        channel, rank = self._channel, self._group.rank()
        for (_, param), wire, offset in zip(
            self._params, channel.segments.wire_tensors, channel.segments.offsets[rank]
        ):
            start, end = wire.map.run(rank)
            run = param.detach().view(-1)[start:end].view(torch.uint8)
            channel.segment[offset : offset + run.numel()].copy_(run)
        channel.gather(self._group)
        return channel

    def finish(self) -> None:
        torch_compat.copy_all(
            [
                written
                for p, (_, param) in enumerate(self._params)
                for written in self._channel.pieces(p).writes(param.detach())
            ]
        )
        self._channel.drop()


class GroupCodes:
    """The codes and values that a bucket group gathers.

    params:  (bucket, parameter, its `WeightProxy`, or None to gather its values), in Megatron's
             order.
    """

    def __init__(
        self,
        params: Sequence[tuple[object, nn.Parameter, WeightProxy | None]],
        group: dist.ProcessGroup,
        **options,
    ):
        self._rank = group.rank()
        plain = [(bucket, param) for bucket, param, weight_proxy in params if weight_proxy is None]
        self._values = _Values(plain, group) if plain else None
        self._weights, items, parts = [], [], None
        for bucket, param, weight_proxy in params:
            if weight_proxy is not None:
                shards = shard_map(bucket, param, group.size())
                synced = _synced(param, weight_proxy)
                own = weight_proxy.state.tensor_group
                # one of a bucket group; Megatron's experts, if they are cut, have scales of their
                # own
                parts = own or parts
                items.append(SyncItem(synced.state.name, synced, shards, own is not None))
                self._weights.append((synced.state.name, param, shards, weight_proxy, synced))
        self.sync: WeightSync = plan_weight_sync(items, group, tensor_group=parts, **options)
        self._begun, self._whole_at = False, STEP.weight_events
        self._gathered: _Values | None = None  # in the gather that has begun

    def attach(self) -> None:
        """Let GEMMs read the codes that the sync writes."""
        for *_, weight_proxy, synced in self._weights:
            weight_proxy.synced, weight_proxy.state.weight_sync = synced, self.sync

    def _masters(self) -> list[Tensor]:
        """fp32 elements that this rank owns of each weight, in Megatron's optimizer."""
        masters = []
        for name, param, shards, *_ in self._weights:
            start, end = shards.run(self._rank)
            master = getattr(param, "main_param", None)
            if master is None and end > start:
                raise RuntimeError(
                    f"{name}: the optimizer keeps no main_param of the elements [{start}, {end}) "
                    "that this rank owns; create Megatron's distributed optimizer, not a "
                    "precision-aware one, before the first forward"
                )
            masters.append(
                param.new_empty(0, dtype=torch.float32) if master is None else master.detach()
            )
        return masters

    @torch.no_grad()
    def start(self, values: bool = True) -> Work:
        """Cast the masters and start the all-gather.

        values:  also gather the parameters that are not quantized.
        """
        self.sync.cast_(self._masters())
        self._begun = True
        self._gathered = self._values if values else None
        codes = self.sync.gather(async_op=True)
        channels = [] if codes is None else codes.channels
        if self._gathered is not None:
            channels = [*channels, self._gathered.gather()]
        return Work(channels)

    @torch.no_grad()
    def finish(self) -> None:
        """Let the layers read the gathered codes; no-op after the first call."""
        if not self._begun:
            return
        self.sync.finish()
        if self._gathered is not None:
            self._gathered.finish()
        self._begun = False

    def note_whole(self) -> None:
        """Record that Megatron gathered the values."""
        self._whole_at = STEP.weight_events

    def check_whole(self, module: nn.Module, *_) -> None:
        """Raise StaleWeightError if a state dict would hold stale values."""
        if self._whole_at != STEP.weight_events:
            raise StaleWeightError(
                f"{name_of(module)}: its codes were gathered since the last step, not its values, "
                "so "
                "this rank's state dict would be stale; call start_param_sync(force_sync=True) of "
                "Megatron's DDP first"
            )


def _synced(param: nn.Parameter, weight_proxy: WeightProxy) -> QuantizedWeight:
    """A quantized weight for the sync to write. Raises ValueError without an fp32 master."""
    state = weight_proxy.state
    if not hasattr(param, "main_param"):
        raise ValueError(
            f"{state.name} has no main_param; create Megatron's distributed optimizer before "
            "gather_codes"
        )
    if param.dtype is not torch.bfloat16:
        raise ValueError(
            f"{state.name} is {param.dtype}; gather_codes was tested with parameters in bf16 that "
            "have fp32 masters"
        )
    own = QuantizedWeightState(state.name, state.quantizer, state.shape, state.compute_dtype)
    own.tensor_group = state.tensor_group
    return own.wrapped(param.detach())


class GathersCodes:
    """Mixin of a bucket group: a sync of parameters sends codes."""

    fsdp_quant_codes: GroupCodes

    def start_param_sync(self, force_sync: bool = False) -> None:
        codes = self.fsdp_quant_codes
        if not force_sync:
            self.param_gather_handle, self.param_gather_dispatched = codes.start(), True
            return
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
        codes.finish()
        super().start_param_sync(force_sync=True)  # pyright: ignore[reportAttributeAccessIssue]
        codes.note_whole()
        codes.start(values=False).wait()
        codes.finish()

    def _post_param_sync(self) -> None:
        super()._post_param_sync()  # pyright: ignore[reportAttributeAccessIssue]
        self.fsdp_quant_codes.finish()


def gather_codes(
    model_chunks: Sequence[Any], optimizer: Any, *, transport: str = "codes", stats: str = "dense"
) -> None:
    """Send codes of these layers' weights in Megatron's gathers of parameters. Every rank must call
    it.

    model_chunks:      Megatron's DDP modules.
    optimizer:         its distributed optimizer, or a chain of them.
    transport, stats:  as for `plan_weight_sync`.

    Raises ValueError, and changes nothing, for settings that were not tested, naming them.
    """
    chained = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    for what, configs, tested in (
        ("ddp_config", [chunk.ddp_config for chunk in model_chunks], _REFUSED_OF_DDP),
        ("the optimizer's config", [one.config for one in chained], _REFUSED_OF_OPTIMIZER),
    ):
        for config in configs:
            for field, want in tested.items():
                if (got := getattr(config, field, want)) != want:
                    raise ValueError(
                        f"{what}.{field}={got!r} was not tested with gathers of codes; wanted "
                        f"{want!r}"
                    )
    planned = []
    for chunk in model_chunks:
        found = weight_proxies(chunk)
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            params = [
                (bucket, p, found.get(p, (None, None))[1])
                for bucket in group.buckets
                for p in bucket.params_list
            ]
            for _, p, _ in params:
                if getattr(p, "is_managed_by_layer_wise_optimizer", False):
                    raise ValueError(
                        "is_managed_by_layer_wise_optimizer of a parameter was not tested with "
                        "gathers of codes"
                    )
            if any(weight_proxy is not None for *_, weight_proxy in params):
                planned.append(
                    (group, params, [found[p][0] for _, p, s in params if s is not None])
                )
    for module in (m for *_, modules in planned for m in modules):
        plans = [layer.plan for layer in getattr(module, "layers", [module])]
        if any(plan.is_delayed or plan.weight.delayed_directions for plan in plans):
            raise ValueError(
                f"{name_of(module)}: delayed scaling was not tested with gathers of codes; use "
                "current scaling"
            )
    if not planned:
        raise ValueError(
            "gather_codes found no weights of our layers in Megatron's buckets; build the model "
            "from gpt_layer_spec"
        )
    options = {"transport": transport, "stats": stats}
    group_codes = [
        GroupCodes(params, group.intra_distributed_optimizer_instance_group, **options)
        for group, params, _ in planned
    ]
    for (group, _, modules), codes in zip(planned, group_codes):
        codes.attach()
        group.__class__ = type(type(group).__name__, (GathersCodes, type(group)), {})
        group.fsdp_quant_codes = codes
        for module in dict.fromkeys(modules):
            module.register_state_dict_pre_hook(codes.check_whole)

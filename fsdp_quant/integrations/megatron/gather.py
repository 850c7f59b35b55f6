# SPDX-License-Identifier: Apache-2.0
"""`gather_codes`: Megatron-LM's bucket groups cast the optimizer's masters and all-gather codes.

[Note: what changes]
Megatron's DDP, its buffers and its optimizer stay unchanged; `gather_codes` gives each bucket group
a subclass:
    start_param_sync                    masters of the group -> codes of the elements that this rank
                                        owns -> all-gather, with the values of parameters that are
                                        not quantized (norms, embeddings)
    finish_param_sync                   the layers' weights are READY
    start_param_sync(force_sync=True)   Megatron's gather of values (checkpoints), then this one
Between forced syncs the values of a quantized parameter are current only where this rank owns them.
GEMMs read codes, and a state dict of stale values is refused.

Ownership follows Megatron: rank r owns the r-th part of every bucket, wherever parameters begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...context import STEP
from ...gemm import StaleWeightError
from ...models.steps import name_of
from ...ops.layout import COMPACT
from ...storage import Storage, to_gemm_operands
from ...tensor import torch_compat
from ...tensor.agreement import agree, maximum, raises_on_all_ranks
from ...tensor.quantized_weight import QuantizedWeight, QuantizedWeightState
from ...weight_sync.plan import plan_weight_sync
from ...weight_sync.shard_map import Segments, ShardMap, WireTensor
from ...weight_sync.sync import WeightSync, Work
from ...weight_sync.synced_weight import BOTH, GatherBuffer, SyncItem
from .experts import weight_proxies
from .linear import WeightProxy

_TESTED_DDP = {  # field -> the value that was tested
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "num_distributed_optimizer_instances": 1,
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "nccl_ub": False,
}
_TESTED_OPTIMIZER = {
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
        self._params, self._group = [param for _, param in params], group
        wire_tensors = tuple(
            WireTensor(f"value {i}", 8 * p.itemsize, shard_map(b, p, group.size()))
            for i, (b, p) in enumerate(params)
        )
        segments = Segments(wire_tensors, group.size())
        buffer = torch.zeros(segments.size, dtype=torch.uint8, device=self._params[0].device)
        self._channel = GatherBuffer(
            BOTH, [(wire.name, None, "values") for wire in wire_tensors], segments, buffer
        )

    def gather(self) -> GatherBuffer:
        channel, rank = self._channel, self._group.rank()
        segments = channel.segments
        for param, wire, offset in zip(self._params, segments.wire_tensors, segments.offsets[rank]):
            start, end = wire.map.run(rank)
            run = param.detach().view(-1)[start:end].view(torch.uint8)
            channel.segment[offset : offset + run.numel()].copy_(run)
        channel.gather(self._group)
        return channel

    def finish(self) -> None:
        writes = []
        for i, param in enumerate(self._params):
            writes += self._channel.pieces(i).writes(param.detach())
        torch_compat.copy_all(writes)
        self._channel.drop()


class GroupCodes:
    """The codes and values that a bucket group gathers.

    proxies:  of the weights whose codes are gathered; other parameters travel as values.
    """

    sync: WeightSync  # that `plan` returns, which waits for the ranks of the group

    def __init__(
        self, bucket_group: Any, proxies: dict[nn.Parameter, tuple[nn.Module, WeightProxy]]
    ):
        if isinstance(bucket_group, GathersCodes):
            raise ValueError("these bucket groups gather codes already; call gather_codes once")
        group = bucket_group.intra_distributed_optimizer_instance_group
        self._bucket_group, self._rank = bucket_group, group.rank()
        plain: list[tuple[object, nn.Parameter]] = []
        self._weights: list[tuple[SyncItem, Any, nn.Module, WeightProxy, QuantizedWeight]] = []
        tensor_group = None
        for bucket in bucket_group.buckets:
            for param in bucket.params_list:
                _check_tested(param, {"is_managed_by_layer_wise_optimizer": False}, "a parameter")
                if param not in proxies:
                    plain.append((bucket, param))
                    continue
                module, proxy = proxies[param]
                _check_scaling(module)
                shards, ranks = shard_map(bucket, param, group.size()), proxy.state.tensor_group
                synced = _synced_weight(param, proxy)
                item = SyncItem(proxy.state.name, synced, shards, ranks is not None)
                self._weights.append((item, param, module, proxy, synced))
                # one per bucket group; Megatron's experts, if they are cut, have their own scales
                tensor_group = ranks or tensor_group
        self._values = _Values(plain, group) if plain else None
        items = [item for item, *_ in self._weights]
        self.plan = partial(plan_weight_sync, items, group, tensor_group=tensor_group)
        self._is_gathering = False
        self.values_event = STEP.weight_events  # as Megatron gathered the values last

    def attach(self) -> None:
        """Let GEMMs read the codes that the sync writes, and the bucket group gather them."""
        for *_, proxy, synced in self._weights:
            proxy.synced, proxy.state.weight_sync = synced, self.sync
        cls = type(self._bucket_group)
        self._bucket_group.__class__ = type(cls.__name__, (GathersCodes, cls), {})
        self._bucket_group.fsdp_quant_codes = self
        for module in dict.fromkeys(module for _, _, module, *_ in self._weights):
            module.register_state_dict_pre_hook(self.check_values)

    def _masters(self) -> list[Tensor]:
        """Return the fp32 elements that this rank owns of each weight, in Megatron's optimizer."""
        masters = []
        for item, param, *_ in self._weights:
            start, end = item.shards.run(self._rank)
            master = getattr(param, "main_param", None)
            if master is None and end > start:
                raise RuntimeError(
                    f"{item.name}: the optimizer keeps no main_param of the elements [{start}, "
                    f"{end}) that this rank owns; create Megatron's distributed optimizer, not a "
                    "precision-aware one, before the first forward"
                )
            empty = param.new_empty(0, dtype=torch.float32)
            masters.append(empty if master is None else master.detach())
        return masters

    @torch.no_grad()
    def start(self) -> Work:
        """Cast the masters and start the all-gather."""
        self.sync.cast_(self._masters())
        self._is_gathering = True
        codes = self.sync.gather(async_op=True)
        channels = [] if codes is None else codes.channels
        return Work(channels if self._values is None else [*channels, self._values.gather()])

    @torch.no_grad()
    def finish(self) -> None:
        """Let the layers read the gathered codes; no-op after the first call."""
        if self._is_gathering:
            self.sync.finish()
            if self._values is not None:
                self._values.finish()
            self._lay_out()
        self._is_gathering = False

    def _lay_out(self) -> None:
        """Convert the codes to what GEMMs read, of all weights at once."""
        targets = [
            (synced._pair, storage, layout)
            for *_, proxy, synced in self._weights
            for d, layout in (proxy.state.layouts(synced.dtype, synced.device) or {}).items()
            if isinstance(storage := synced._pair.get(d), Storage)
            and layout != COMPACT
            and storage.fmt.is_quantized
        ]
        operands = to_gemm_operands([(storage, layout) for _, storage, layout in targets])
        for (pair, storage, layout), operand in zip(targets, operands):
            pair.cache_operand(storage.direction, layout, operand)

    def check_values(self, module: nn.Module, *_) -> None:
        """Raise StaleWeightError if a state dict would hold stale values."""
        if self.values_event != STEP.weight_events:
            raise StaleWeightError(
                f"{name_of(module)}: its codes were gathered since the last step, not its values, "
                "so this rank's state dict would be stale; call start_param_sync(force_sync=True) "
                "of Megatron's DDP first"
            )


def _synced_weight(param: nn.Parameter, proxy: WeightProxy) -> QuantizedWeight:
    """Return a weight for the sync to write. Raises ValueError without an fp32 master."""
    state = proxy.state
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
    synced = QuantizedWeightState(state.name, state.quantizer, state.shape, state.compute_dtype)
    synced.tensor_group = state.tensor_group
    return synced.wrapped(param.detach())


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
        codes.values_event = STEP.weight_events
        codes.start().wait()
        codes.finish()

    def finish_param_sync(self, *args: Any, **kwargs: Any) -> None:
        super().finish_param_sync(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.fsdp_quant_codes.finish()


def gather_codes(
    model_chunks: Sequence[Any], optimizer: Any, *, transport: str = "codes", stats: str = "dense"
) -> None:
    """Send codes of our weights in Megatron's gathers of parameters. Every rank must call it.

    model_chunks:      Megatron's DDP modules.
    optimizer:         its distributed optimizer, or a chain of them.
    transport, stats:  as for `plan_weight_sync`.

    Raises ValueError on every rank, and changes nothing, for settings that were not tested, naming
    them, and if no rank has weights of these layers (a stage of a pipeline may have none).
    """
    error, world = None, cast(dist.ProcessGroup, dist.group.WORLD)
    group_codes: list[GroupCodes] = []
    with raises_on_all_ranks([world]):
        for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
            _check_tested(part.config, _TESTED_OPTIMIZER, "the optimizer's config")
        for chunk in model_chunks:
            _check_tested(chunk.ddp_config, _TESTED_DDP, "ddp_config")
            proxies = weight_proxies(chunk)
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                if any(p in proxies for bucket in group.buckets for p in bucket.params_list):
                    group_codes.append(GroupCodes(group, proxies))
    for codes in group_codes:
        try:
            codes.sync = codes.plan(transport=transport, stats=stats)
        except (ValueError, TypeError) as caught:  # the other groups compare too
            error = caught
    agree({}, [world], error)
    if not any(maximum([bool(group_codes)], world)):
        raise ValueError(
            "gather_codes found no weights of our layers in Megatron's buckets; build the model "
            "from gpt_layer_spec"
        )
    for codes in group_codes:
        codes.attach()


def _check_tested(settings: Any, tested: dict[str, Any], name: str) -> None:
    for field, value in tested.items():
        if (setting := getattr(settings, field, value)) != value:
            raise ValueError(
                f"{name}.{field}={setting!r} was not tested with gathers of codes; wanted {value!r}"
            )


def _check_scaling(module: nn.Module) -> None:
    plans = [layer.plan for layer in getattr(module, "layers", [module])]
    if any(plan.is_delayed or plan.weight.delayed_directions for plan in plans):
        raise ValueError(
            f"{name_of(module)}: delayed scaling was not tested with gathers of codes; use "
            "current scaling"
        )

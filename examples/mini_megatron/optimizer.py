# SPDX-License-Identifier: Apache-2.0
"""Distributed Adam: every rank holds fp32 masters and moments of the elements that it owns, of
quantized weights and others.

[Note: three shards of a model]
The ranks that hold copies of a parameter share its master and sum its gradients. These are:
    sharded      linear layers that tensor parallelism cuts: the `data` group
    experts      the `expert_data` group
    replicated   embeddings, norms, routers, the head, of which each tensor rank has gradients of
                 its tokens: the `stage` group
Each has its own buffers, Adam and weight sync (`Shard`); a step (`ChainedAdam`) casts all shards
before it gathers any. Tensor scales cover the parts of all `tensor` ranks, so that codes equal
those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_quant as fq
from fsdp_quant.formats import Direction
from fsdp_quant.hooks import describe, plan_weight_sync

from .flat import FlatLayout
from .ordered import all_gather, reduce_scatter
from .ranks import Ranks

GROWTH_INTERVAL = 100  # steps without an overflow after which the loss scale doubles


class Shard:
    """Parameters that one group shares: gradients in a flat buffer, masters in pieces, and the
    update of weights.

    params:        name in the whole model -> parameter, in the same order on every rank of `group`.
    tensor_group:  the ranks that hold parts of each parameter; None: parameters are whole.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        *,
        lr: float = 1e-2,
        bucket_size: int = 1 << 14,
        policy: str = "even",
        pad_to_2_16: bool = False,
        transport: str = "auto",
        stats: str = "dense",
    ):
        self.params, self.group, self.policy = params, group, policy
        self.layout = FlatLayout(
            {n: p.numel() for n, p in params.items()},
            group.size(),
            bucket_size,
            policy,
            pad_to_2_16,
        )
        self.shards = {name: self.layout.shards(name) for name in params}
        self.grads = self.layout.zeros(next(iter(params.values())).device)
        self.quantized = [name for name, p in params.items() if describe(p).is_quantized]
        self.plain = [name for name in params if name not in self.quantized]
        self.sync = plan_weight_sync(
            [(n, params[n], self.shards[n]) for n in self.quantized],
            group,
            transport,
            stats,
            compute_dtype,
            tensor_group,
        )
        masters = dict(zip(self.quantized, self.sync.init_masters()))
        masters |= {
            n: self._own(n, params[n].detach().reshape(-1).float()).clone() for n in self.plain
        }
        self.masters = {name: nn.Parameter(masters[name]) for name in params}
        self.adam = fq.optim.FusedAdam(self.masters.values(), lr=lr, weight_decay=0.01)
        for name, p in params.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._collect(name, p))

    def _own(self, name: str, flat: Tensor) -> Tensor:
        """This rank's elements of a parameter's tensor."""
        start, end = self.shards[name].run(self.group.rank())
        return flat[start:end]

    def _collect(self, name: str, p: Tensor) -> None:
        self.layout.view(self.grads, name).add_(p.grad.reshape(-1))
        p.grad = None

    def reduce(self) -> Tensor:
        """Sum the gradients that this rank owns over the group; returns their squared norm, fp64
        []."""
        square = self.grads.new_zeros((), dtype=torch.float64)
        for bucket in self.layout.buckets:
            whole, rank = self.grads[bucket.start : bucket.end], self.group.rank()
            own = self.grads[bucket.bounds[rank] : bucket.bounds[rank + 1]]
            if self.policy == "even":
                summed = torch.empty_like(own)
                reduce_scatter(summed, whole, group=self.group)
                own.copy_(summed)
            else:
                dist.all_reduce(whole, group=self.group)
            square += own.double().square().sum()
        return square

    def update(self, factor: Tensor, found_inf: Tensor) -> None:
        """Adam of this rank's elements; no change if found_inf."""
        for name, master in self.masters.items():
            master.grad = self._own(name, self.layout.view(self.grads, name)) * factor
        self.adam.found_inf = found_inf
        self.adam.step()

    def quantized_masters(self) -> list[Tensor]:
        return [self.masters[name] for name in self.quantized]

    def gather_plain(self) -> None:
        """Gather weights that are not quantized: rounded masters, one segment per rank."""
        rank, ranks = self.group.rank(), self.group.size()
        runs = [[self.shards[n].run(r) for n in self.plain] for r in range(ranks)]
        own = [self.masters[n].detach().to(self.params[n].dtype) for n in self.plain]
        if not own:
            return
        segments = own[0].new_zeros(ranks, max(sum(b - a for a, b in of) for of in runs))
        mine = torch.cat(own)
        segments[rank, : mine.numel()] = mine
        all_gather(segments.view(-1), segments[rank].clone(), group=self.group)
        for segment, of in zip(segments, runs):
            pieces = segment[: sum(b - a for a, b in of)].split([b - a for a, b in of])
            for name, (start, end), piece in zip(self.plain, of, pieces):
                self.params[name].view(-1)[start:end] = piece


class ChainedAdam:
    """One step of all shards: skipped, scaled and clipped together, and gathered after all casts.

    overlap:   gathers run until the next pass needs them: call `finish` there.
    options:   of `Shard`.
    """

    def __init__(
        self,
        params: dict[str, dict[str, nn.Parameter]],
        ranks: Ranks,
        *,
        clip: float = 1.0,
        overlap: bool = False,
        **options,
    ):
        groups = {
            "sharded": (ranks.data, ranks.tensor),
            "experts": (ranks.expert_data, None),
            "replicated": (ranks.stage, None),
        }
        self.ranks, self.clip, self.overlap = ranks, clip, overlap
        self.shards = {
            kind: Shard(of, *groups[kind], **options) for kind, of in params.items() if of
        }
        self.loss_scale, self.good_steps = 2.0**10, 0

    @property
    def applied(self) -> Tensor:
        """Steps that were not skipped: int64 [], on the device."""
        return next(iter(self.shards.values())).sync.applied

    def zero_grad(self) -> None:
        for shard in self.shards.values():
            shard.grads.zero_()

    @torch.no_grad()
    def step(self) -> bool:
        """Reduce, unscale, find overflows, clip, update, cast, gather; returns whether the step
        was applied."""
        square = sum(shard.reduce() for shard in self.shards.values())
        dist.all_reduce(square, group=self.ranks.world)  # count each element once, at its owner
        factor = 1.0 / (self.loss_scale * self.ranks.sizes.data)
        norm = square.sqrt() * factor
        found_inf = (~norm.isfinite()).float()
        scale = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0).float()
        for shard in self.shards.values():
            shard.update(scale, found_inf)
            shard.sync.cast_(shard.quantized_masters(), skip=found_inf)
        for shard in self.shards.values():
            shard.sync.gather(async_op=True)
            shard.gather_plain()
        if not self.overlap:
            self.finish()
        overflowed = bool(found_inf.item())
        self.good_steps = 0 if overflowed else self.good_steps + 1
        self.loss_scale *= (
            0.5 if overflowed else 2.0 if self.good_steps % GROWTH_INTERVAL == 0 else 1.0
        )
        return not overflowed

    def finish(self, directions: Iterable[Direction] = tuple(Direction)) -> None:
        """Wait for the gathers of these directions; an earlier GEMM raises StaleWeightError."""
        for shard in self.shards.values():
            shard.sync.finish(directions)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update all weights from the masters, outside a step."""
        for shard in self.shards.values():
            shard.sync.refresh(shard.quantized_masters())
            shard.gather_plain()

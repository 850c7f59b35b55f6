"""Distributed Adam: every rank holds fp32 masters and moments of the elements that it owns, of quantized weights and others."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_quant as fq
from fsdp_quant.hooks import describe, plan_weight_sync

from .data_parallel import DataParallel, all_gather, reduce_scatter
from .flat import FlatLayout


GROWTH_INTERVAL = 100  # steps without an overflow after which the loss scale doubles


class DistributedAdam:
    """Gradients in a flat buffer, reduced; masters updated in pieces; codes of quantized weights, and other weights, gathered.

    reduction:  "ordered": sums in the order of ranks, the same bits at every world size that shares micro-batches.
                "scatter": reduce-scatter (of buckets that are cut evenly; others are all-reduced).
    """

    def __init__(
        self, model: nn.Module, dp: DataParallel, *, lr: float = 1e-2, clip: float = 1.0, bucket_size: int = 1 << 14,
        policy: str = "even", pad_to_2_16: bool = False, reduction: str = "ordered", transport: str = "auto",
        stats: str = "dense",
    ):
        self.dp, self.clip, self.reduction, self.policy = dp, clip, reduction, policy
        self.loss_scale, self.good_steps = 2.0**10, 0
        self.params = dict(model.named_parameters())
        self.layout = FlatLayout({n: p.numel() for n, p in self.params.items()}, dp.owners, bucket_size, policy, pad_to_2_16)
        self.shards = {name: self.layout.shards(name) for name in self.params}
        device = next(iter(self.params.values())).device
        self.grads = {rank: self.layout.zeros(device) for rank in dp.played}
        self.playing = dp.played[0]
        self.quantized = [name for name, p in self.params.items() if describe(p).is_quantized]
        self.plain = [name for name in self.params if name not in self.quantized]
        self.sync = plan_weight_sync(
            [(n, self.params[n], self.shards[n]) for n in self.quantized], dp.group, transport=transport, stats=stats
        )
        masters = dict(zip(self.quantized, self.sync.init_masters()))
        masters |= {n: self._own(n, self.params[n].detach().reshape(-1).float()).clone() for n in self.plain}
        self.masters = {name: nn.Parameter(masters[name]) for name in self.params}
        self.adam = fq.optim.FusedAdam(self.masters.values(), lr=lr, weight_decay=0.01)
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._collect(name, p))

    def _own(self, name: str, flat: Tensor) -> Tensor:
        """This rank's elements of a parameter's."""
        start, end = self.shards[name].run(self.dp.rank)
        return flat[start:end]

    def _collect(self, name: str, p: Tensor) -> None:
        self.layout.view(self.grads[self.playing], name).add_(p.grad.reshape(-1))
        p.grad = None

    # A step #

    def zero_grad(self) -> None:
        for flat in self.grads.values():
            flat.zero_()

    def _reduced(self) -> tuple[Tensor, Tensor]:
        """(sum over ranks of the gradients, right where this rank owns; their squared norm over all elements, fp64)."""
        flats = [self.grads[rank] for rank in self.dp.played]
        if self.reduction == "ordered":
            total = torch.zeros_like(flats[0])
            for flat in self.dp.gathered(flats):
                total += flat
            return total, total.double().square().sum()
        (flat,) = flats
        square = flat.new_zeros((), dtype=torch.float64)
        for bucket in self.layout.buckets:
            own = flat[bucket.bounds[self.dp.rank] : bucket.bounds[self.dp.rank + 1]]
            if self.policy == "even":
                summed = torch.empty_like(own)
                reduce_scatter(summed, flat[bucket.start : bucket.end], group=self.dp.group)
                own.copy_(summed)
            else:
                dist.all_reduce(flat[bucket.start : bucket.end], group=self.dp.group)
            square += own.double().square().sum()
        return flat, self.dp.all_reduce(square)

    @torch.no_grad()
    def step(self) -> bool:
        """Reduce, unscale, find overflows, clip, update, cast, gather; whether the step was applied."""
        summed, square = self._reduced()
        factor = 1.0 / (self.loss_scale * self.dp.ranks)
        norm = square.sqrt() * factor
        found_inf = self.dp.all_reduce((~norm.isfinite()).float(), dist.ReduceOp.MAX)
        clip = (self.clip / (norm + 1e-6)).clamp(max=1.0).float()
        for name, master in self.masters.items():
            master.grad = self._own(name, self.layout.view(summed, name)) * factor * clip
        self.adam.found_inf = found_inf
        self.adam.step()
        self.sync.cast_([self.masters[n] for n in self.quantized], skip=found_inf)
        work = self.sync.gather(async_op=True)
        self._gather_plain()
        work.wait()
        self.sync.finish()
        overflowed = bool(found_inf.item())
        self.good_steps = 0 if overflowed else self.good_steps + 1
        self.loss_scale *= 0.5 if overflowed else 2.0 if self.good_steps % GROWTH_INTERVAL == 0 else 1.0
        return not overflowed

    @torch.no_grad()
    def refresh(self) -> None:
        """All weights from the masters, outside a step."""
        self.sync.refresh([self.masters[n] for n in self.quantized])
        self._gather_plain()

    def _gather_plain(self) -> None:
        """Weights that are not quantized: masters rounded, in segments of one size."""
        rank, group = self.dp.rank, self.dp.group
        for name in self.plain:
            p, cuts = self.params[name], self.shards[name].cuts
            own = self.masters[name].detach().to(p.dtype)
            if group is not None:
                longest = max(b - a for a, b in zip(cuts, cuts[1:]))
                segments = own.new_zeros(self.dp.ranks, longest)
                segments[rank, : own.numel()] = own
                all_gather(segments.view(-1), segments[rank].clone(), group=group)
                own = torch.cat([s[: b - a] for s, a, b in zip(segments, cuts, cuts[1:])])
            p.copy_(own.view(p.shape))

    # Checkpoints: a file a rank, of pieces by their place in the parameter #

    def save(self, folder: Path) -> None:
        pieces = {}
        for name, master in self.masters.items():
            state = self.adam.state[master]
            tensors = {"master": master.detach(), **{k: state[k] for k in ("exp_avg", "exp_avg_sq")}}
            pieces[name] = (*self.shards[name].run(self.dp.rank), tensors, state["step"])
        scale = (self.loss_scale, self.good_steps)
        torch.save({"pieces": pieces, "sync": self.sync.state_dict(), "scale": scale}, folder / f"{self.dp.rank}.pt")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Of any number of ranks, with any cuts."""
        files = [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]
        self.sync.load_state_dict(files[0]["sync"])
        self.loss_scale, self.good_steps = files[0]["scale"]
        for name, master in self.masters.items():
            start, end = self.shards[name].run(self.dp.rank)
            state = self.adam.state[master]
            own = {"master": master.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            for file in files:
                a, b, tensors, step = file["pieces"][name]
                low, high = max(a, start), min(b, end)
                state["step"].copy_(step)
                for key, tensor in tensors.items() if low < high else ():
                    own[key][low - start : high - start] = tensor[low - a : high - a]
        self.refresh()

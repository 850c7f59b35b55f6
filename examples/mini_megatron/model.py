# SPDX-License-Identifier: Apache-2.0
"""A stage of a small GPT, cut over ranks: quantized linear layers and experts; embeddings, norms,
routers and head stay plain.

A rank holds activations [tokens / tensor ranks, batch, dim]: its piece of every sequence, sequence
first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_quant as fq
from fsdp_quant.parallel import ColumnParallelLinear, RowParallelLinear

from .ranks import Ranks, Sizes


@dataclass(frozen=True)
class Config:
    """Sizes of a model, on any ranks. Every other block has experts, if any; a token is sent to
    two."""

    recipe: fq.Recipe
    vocabulary: int = 64
    tokens: int = 16
    layers: int = 2
    dim: int = 32
    heads: int = 2
    experts: int = 0
    dtype: torch.dtype = torch.bfloat16

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError if the ranks do not divide the model."""
        for what, of in (
            ("tokens", sizes.tensor),
            ("heads", sizes.tensor),
            ("experts", sizes.experts),
        ):
            if getattr(self, what) % of:
                raise ValueError(
                    f"{what}={getattr(self, what)} must be a multiple of the {of} ranks that share "
                    f"them, of {sizes}"
                )
        if self.layers < sizes.pipeline or self.experts == 1:
            raise ValueError(
                f"wanted a layer for each of {sizes.pipeline} stages, and no experts or two, got "
                f"{self}"
            )

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.dim, eps=1e-5, dtype=self.dtype)

    def linear(self, kind: type, n_in: int, n_out: int, ranks: Ranks, name: str) -> nn.Module:
        return kind(
            n_in,
            n_out,
            ranks.tensor,
            bias=False,
            sequence_dim=0,
            dtype=self.dtype,
            recipe=self.recipe,
            name=name,
        )


class Attention(nn.Module):
    def __init__(self, config: Config, ranks: Ranks, name: str):
        super().__init__()
        self.heads, self.norm, dim = config.heads // ranks.sizes.tensor, config.norm(), config.dim
        # rows: heads x (q, k, v) x head's dim
        self.qkv = config.linear(ColumnParallelLinear, dim, 3 * dim, ranks, f"{name}.qkv")
        self.out = config.linear(RowParallelLinear, dim, dim, ranks, f"{name}.out")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x))
        tokens, batch, _ = qkv.shape
        q, k, v = qkv.view(tokens, batch, self.heads, 3, -1).permute(3, 1, 2, 0, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the same bits in every run
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.permute(2, 0, 1, 3).reshape(tokens, batch, -1))


class MLP(nn.Module):
    def __init__(self, config: Config, ranks: Ranks, name: str):
        super().__init__()
        self.norm = config.norm()
        self.up = config.linear(
            ColumnParallelLinear, config.dim, 4 * config.dim, ranks, f"{name}.up"
        )
        self.down = config.linear(
            RowParallelLinear, 4 * config.dim, config.dim, ranks, f"{name}.down"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class _AllToAll(torch.autograd.Function):
    """Send rows to the ranks of a group, and gradients back."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, splits: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.call = received, splits, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, *ctx.call), None, None, None


class Experts(nn.Module):
    """The experts of this rank, and the exchange of tokens: rows in bf16, sorted by expert."""

    per_token = 2

    def __init__(self, config: Config, ranks: Ranks, name: str, seed: int):
        super().__init__()
        self.group, own = ranks.experts, config.experts // ranks.sizes.experts
        self.own, self.first = own, own * self.group.rank()
        self.norm, self.router = (
            config.norm(),
            nn.Linear(config.dim, config.experts, bias=False, dtype=config.dtype),
        )
        common = {"bias": False, "dtype": config.dtype, "recipe": config.recipe}
        self.up = fq.GroupedLinear(
            own, config.dim, 2 * config.dim, name=f"{name}.{self.group.rank()}.up", **common
        )
        self.down = fq.GroupedLinear(
            own, 2 * config.dim, config.dim, name=f"{name}.{self.group.rank()}.down", **common
        )
        for e, layers in enumerate(zip(self.up.experts, self.down.experts), self.first):
            torch.manual_seed(seed + e)  # an expert's values, whichever rank holds it
            for layer in layers:
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(rows).float().softmax(-1).topk(self.per_token)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=self.own * self.group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        by_rank, by_source = (
            [sum(part) for part in counts.view(-1, self.own).tolist()]
            for counts in (sent, received)
        )
        here = _AllToAll.apply(rows[order // self.per_token], by_rank, by_source, self.group)
        owners = (
            torch.arange(self.own, device=x.device)
            .repeat(self.group.size())
            .repeat_interleave(received)
        )
        sorted_here = owners.argsort(stable=True)
        ends = received.view(-1, self.own).sum(0).tolist()
        y = self.down(F.gelu(self.up(here[sorted_here], ends)), ends)
        back = _AllToAll.apply(y[sorted_here.argsort()], by_source, by_rank, self.group)
        y = back[order.argsort()].view(-1, self.per_token, x.shape[-1]) * weights[..., None].to(
            x.dtype
        )
        return y.sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config, ranks: Ranks, layer: int):
        super().__init__()
        self.attention = Attention(config, ranks, f"blocks.{layer}.attention")
        has_experts, name = config.experts and layer % 2 == 1, f"blocks.{layer}.mlp"
        self.mlp = (
            Experts(config, ranks, name, 1000 * layer + 100)
            if has_experts
            else MLP(config, ranks, name)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


_CUT = {ColumnParallelLinear: 0, RowParallelLinear: 1}


class Stage(nn.Module):
    """The layers of one pipeline stage, with the initial values of the whole model."""

    def __init__(self, config: Config, ranks: Ranks):
        super().__init__()
        config.check(ranks.sizes)
        self.tensor, stages = ranks.tensor, ranks.sizes.pipeline
        layers = [
            range(config.layers * p // stages, config.layers * (p + 1) // stages)
            for p in range(stages)
        ]
        plain = {"dtype": config.dtype}
        if ranks.is_first:
            torch.manual_seed(1)
            self.token = nn.Embedding(config.vocabulary, config.dim, **plain)
            self.position = nn.Embedding(config.tokens, config.dim, **plain)
        self.blocks = nn.ModuleDict()
        with fq.quantized_model_init(config.recipe):
            for layer in layers[ranks.forward.rank()]:
                torch.manual_seed(1000 * layer + 10)
                self.blocks[str(layer)] = Block(config, ranks, layer)
        if ranks.is_last:
            torch.manual_seed(2)
            self.norm = config.norm()
            self.head = nn.Linear(config.dim, config.vocabulary, bias=False, **plain)
        first = config.experts // ranks.sizes.experts * ranks.experts.rank()
        self._modules_by_name = {
            re.sub(r"experts\.(\d+)", lambda e: f"experts.{first + int(e[1])}", name): m
            for name, m in self.named_modules()
        }

    def parameters_by_shard(self) -> dict[str, dict[str, nn.Parameter]]:
        """Kind of shard (see the note of `optimizer`) -> name in the whole model -> parameter."""
        found: dict[str, dict[str, nn.Parameter]] = {"sharded": {}, "experts": {}, "replicated": {}}
        for prefix, module in self._modules_by_name.items():
            kind = (
                "sharded"
                if type(module) in _CUT
                else "experts"
                if isinstance(module, fq.Linear)
                else "replicated"
            )
            found[kind] |= {
                f"{prefix}.{name}": p for name, p in module.named_parameters(recurse=False)
            }
        return found

    def cut_dim(self, name: str) -> int | None:
        """Dim along which tensor parallelism cuts a parameter."""
        return _CUT.get(type(self._modules_by_name[name.rpartition(".")[0]]))

    def forward(self, x: Tensor | None, tokens: Tensor) -> Tensor:
        """Return x for the next stage, or this rank's part of the mean cross entropy of the next
        token.

        x:       output of the previous stage; None at the first.
        tokens:  int64 [batch, T + 1].
        """
        sequence, targets = tokens[:, :-1].t(), tokens[:, 1:].t()
        places = torch.arange(len(sequence), device=tokens.device).chunk(self.tensor.size())[
            self.tensor.rank()
        ]
        if x is None:
            x = self.token(sequence[places]) + self.position(places)[:, None]
        for block in self.blocks.values():
            x = block(x)
        if not hasattr(self, "head"):
            return x
        logits = self.head(self.norm(x)).float()
        return (
            F.cross_entropy(logits.flatten(0, 1), targets[places].flatten(), reduction="sum")
            / targets.numel()
        )

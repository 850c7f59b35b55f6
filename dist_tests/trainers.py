# SPDX-License-Identifier: Apache-2.0
"""Small models, data and hand-written loops that tests hold trainers of other libraries to, bit for
bit."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_quant as fq

os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY, TOKENS, STEPS, MICRO_BATCHES, BATCH = 64, 16, 3, 2, 2
RECIPES: dict[str, Callable[[], fq.Recipe]] = {
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
    "fp8_delayed": fq.recipes.fp8_delayed,
}


def llama(seed: int = 0, **config) -> nn.Module:
    """A LlamaForCausalLM of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(LlamaConfig(**sizes | config))


def examples(count: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCABULARY, (count, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def batch(index: int, rank: int = 0, world: int = 1) -> Tensor:
    """The tokens that a rank gets as its `index`-th micro-batch, in order, [BATCH, TOKENS]."""
    rows = examples()[(index * world + rank) * BATCH :][:BATCH]
    return torch.stack([row["input_ids"] for row in rows])


def shard_by_hand(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    for part in (*model.model.layers, model):
        fully_shard(
            part,
            mp_policy=policy or MixedPrecisionPolicy(),
            reshard_after_forward=part is not model,
        )
    return model


def causal_loss(model: nn.Module, ids: Tensor, num_items: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, num_items_in_batch=num_items).loss


def loop(
    model: nn.Module,
    rank: int = 0,
    world: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = causal_loss,
) -> list[float]:
    """Train a converted causal model as transformers' Trainer does: mean loss over all tokens of a
    step, clipping, AdamW.

    loss_of:  (model, tokens of a micro-batch, number of tokens of the step that have a loss) ->
              loss.
    returns: the loss of each step, of this rank alone.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    num_items = torch.tensor(world * MICRO_BATCHES * BATCH * (TOKENS - 1))
    losses = []
    model.train()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        total = torch.zeros(())
        for i in range(MICRO_BATCHES):
            fq.begin_step(step, micro_batch=i)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            ids = batch(step * MICRO_BATCHES + i, rank, world)
            loss = loss_of(model, ids, num_items) * world
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            fq.skip_step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def overflow_once(model: nn.Module) -> torch.amp.GradScaler:
    """Let the model's first gradient overflow. The scaler then takes 2^-16 of its scale, as those
    of trainers do on a GPU."""
    factors = [float("inf"), *[1.0] * 100]
    model.lm_head.weight.register_hook(lambda grad: grad * factors.pop(0))
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=2.0**-16)


def whole(
    model: nn.Module, of: Callable[[str, Tensor], bool] = lambda name, parameter: True
) -> dict[str, Tensor]:
    """Parameters by name, those that `of` says, gathered, copied. Every rank must call it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves a root gathered
    values = {n: p.detach() for n, p in model.named_parameters() if of(n, p)}
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in values.items()
    }


def take_fsdp_path_on_cpu() -> None:
    """Let accelerate shard on CPUs too: it takes its FSDP path for GPUs alone. Nothing of the path
    is changed."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    own = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin

    AcceleratorState.__init__ = init

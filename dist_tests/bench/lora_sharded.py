# SPDX-License-Identifier: Apache-2.0
"""LoRA over a frozen base that no GPU holds whole: codes are sharded by `fully_shard`.

    torchrun --nproc-per-node 2 -m dist_tests.bench.lora_sharded [--size 70b|8b|tiny]
        [--recipe "qat(nvfp4)"] [--tokens 2048] [--steps 4]

A Llama with random weights, built a layer at a time on the device: converted, frozen by
`fq.freeze`, adapters of rank 16 on all seven linear layers, then `fully_shard`. Layers are
recomputed in the backward, in eager mode; fused AdamW writes the adapters.

Printed by rank 0: GiB of the base per rank and bytes per weight over all ranks, peak GiB, ms of the
last step, and the loss of each step, which falls, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import fsdp_quant as fq
from dist_tests.bench.llama import GIB
from dist_tests.bench.lora import OURS

SIZES = {  # width, hidden, heads, key and value heads, layers, vocabulary
    "70b": (8192, 28672, 64, 8, 80, 128256),
    "8b": (4096, 14336, 32, 8, 32, 128256),
    "tiny": (128, 256, 4, 2, 2, 64),
}
LORA = LoraConfig(r=16, lora_alpha=32, target_modules=r".*_proj")


class Model(nn.Module):
    """Embeddings, frozen decoder layers with adapters, and a head; sharded while it is built."""

    def __init__(self, size: str, recipe: fq.Recipe, device: torch.device):
        super().__init__()
        width, hidden, heads, kv, layers, vocabulary = SIZES[size]
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            num_hidden_layers=layers,
        )
        config._attn_implementation = "sdpa"
        made = {"device": device, "dtype": torch.bfloat16}
        self.embed = nn.Embedding(vocabulary, width, **made).requires_grad_(False)
        self.rotary = LlamaRotaryEmbedding(config).to(device)
        self.layers = nn.ModuleList()
        self.weights = 0
        for i in range(layers):
            with torch.device("meta"):
                layer = LlamaDecoderLayer(config, i)
            layer = layer.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
            for name, p in layer.named_parameters():
                nn.init.ones_(p) if "norm" in name else nn.init.normal_(p, std=0.02)
            self.weights += sum(p.numel() for p in layer.parameters() if p.dim() == 2)
            fq.convert(layer, recipe)
            fq.freeze(layer)
            inject_adapter_in_model(LORA, layer)
            for name, p in layer.named_parameters():
                if "lora_" in name:
                    p.data = p.data.bfloat16().to(device)
            self.layers.append(fully_shard(layer, reshard_after_forward=True))  # a root of its own
        self.head = nn.Linear(width, vocabulary, bias=False, **made).requires_grad_(False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos_sin = self.rotary(x, positions)
        for layer in self.layers:

            def run(x: Tensor, layer=layer) -> Tensor:
                y = layer(x, position_embeddings=cos_sin, position_ids=positions)
                return y[0] if isinstance(y, tuple) else y

            x = checkpoint(run, x, use_reentrant=False)
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dist_tests.bench.lora_sharded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--recipe", choices=OURS, default="qat(nvfp4)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    began = time.time()
    model = Model(args.size, OURS[args.recipe](), device)
    held = torch.cuda.memory_allocated() if cuda else 0
    others = sum(p.nbytes for p in (model.embed.weight, model.head.weight))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, 1e-3, fused=True)
    generator = torch.Generator().manual_seed(1 + rank)
    ids = torch.randint(0, model.embed.num_embeddings, (1, args.tokens), generator=generator)
    ids, losses, ms = ids.to(device), [], 0.0
    built = time.time() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        start = time.time()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ms = (time.time() - start) * 1e3
    if rank == 0:
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        name, base = torch.cuda.get_device_name() if cuda else "cpu", held - others
        print(
            f"{world} x {name}, {args.size}, {args.recipe}, {args.tokens} tokens per GPU: "
            f"{model.weights / 1e9:.1f} G frozen weights, {base / GIB:.2f} GiB per rank, "
            f"{base * world / model.weights:.3f} bytes per weight; peak {peak / GIB:.2f} GiB; "
            f"built in {built:.0f} s; last step {ms:.0f} ms; losses "
            + ", ".join(f"{loss:.4f}" for loss in losses)
        )
    dist.destroy_process_group()
    return int(not losses[-1] < losses[0])


if __name__ == "__main__":
    sys.exit(main())

"""A small GPT: quantized linear layers in its blocks; embeddings, norms and the head stay in high precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_quant as fq


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, recipe: fq.Recipe, name: str):
        super().__init__()

        def linear(n_in: int, n_out: int, part: str) -> fq.Linear:
            return fq.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16, recipe=recipe, name=f"{name}.{part}")

        self.heads = heads
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(dim, eps=1e-5, dtype=torch.bfloat16) for _ in range(2))
        self.qkv, self.out = linear(dim, 3 * dim, "qkv"), linear(dim, dim, "out")
        self.up, self.down = linear(dim, 4 * dim, "up"), linear(4 * dim, dim, "down")

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the same bits in every run
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, recipe: fq.Recipe, vocabulary: int, tokens: int, layers: int = 2, dim: int = 32, heads: int = 2):
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim, dtype=torch.bfloat16)
        self.position = nn.Embedding(tokens, dim, dtype=torch.bfloat16)
        with fq.quantized_model_init(recipe):
            self.blocks = nn.ModuleList(Block(dim, heads, recipe, f"blocks.{i}") for i in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5, dtype=torch.bfloat16)
        self.head = nn.Linear(dim, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of each token's successor; tokens: int64 [batch, T + 1]."""
        x, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())

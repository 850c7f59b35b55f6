# SPDX-License-Identifier: Apache-2.0
"""Model and text of `train_lm`: no line here knows of low precision.

The model is Llama-shaped: RMSNorm, rotary positions, grouped-query attention, SwiGLU. The text is
any file or folder; by default the Python sources of the running interpreter's standard library.

Shape letters: B sequences, S bytes per sequence, H heads, D elements per head.
"""

import math
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MAX_TEXT_BYTES = 64 << 20
HELD_OUT = 0.05  # the end of the text, never trained on
VALIDATION_BATCHES = 8  # on each rank

# Model #


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Every field is an option of the command line."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    tie: bool

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"--dim {self.dim} does not split into {self.heads} heads of an even size;"
                f" give a multiple of {2 * self.heads}, or another --heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}; every"
                " key-value head serves the same number of query heads, so give a divisor"
            )


def rotation_table(seq: int, head_dim: int) -> Tensor:
    """Cosines and sines of the rotary angles, [2, S, 1, D/2] fp32. Source: arXiv 2104.09864."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(seq), frequency)
    return torch.stack((angle.cos(), angle.sin())).unsqueeze(2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate every head by the angles of its position; its halves are the two coordinates.

    x:  [B, S, H, D], returned in its dtype.
    """
    cos, sin = table[:, : x.shape[1]]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.  [B, S, dim] -> [B, S, dim]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.register_buffer("table", rotation_table(config.seq, self.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        split = (-1, self.head_dim)
        q = rotate(self.q(x).unflatten(-1, split), self.table)  # [B, S, H, D]
        k = rotate(self.k(x).unflatten(-1, split), self.table)
        v = self.v(x).unflatten(-1, split)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """y = x + attention(norm(x)); y + swiglu(norm(y)).  [B, S, dim] -> [B, S, dim]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LanguageModel(nn.Module):
    """Logits of the next byte.  [B, S] int64 in 0..255 -> [B, S, 256].

    A tied head multiplies by the embedding. It is no nn.Linear, so it is not converted.
    """

    def __init__(self, config: ModelConfig, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(256, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = None if config.tie else nn.Linear(config.dim, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds_to_residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if adds_to_residual else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.lm_head is None else self.lm_head(x)


# Text #


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of a folder's text files sorted by path, uint8.

    path:  None: the Python sources of the interpreter's standard library.

    At most MAX_TEXT_BYTES. A file with a zero byte in its first 4 KiB is binary and skipped.
    Raises ValueError if nothing is left, or a file cannot be read.
    """
    root = path or Path(sysconfig.get_paths()["stdlib"])
    skipped = {".git", "__pycache__"} if path else {"site-packages", "dist-packages", "test"}
    files = [root] if root.is_file() else sorted(root.rglob("*" if path else "*.py"))
    text = bytearray()
    for file in files:
        if not file.is_file() or not skipped.isdisjoint(file.relative_to(root).parts):
            continue
        try:
            with file.open("rb") as stream:
                data = stream.read(MAX_TEXT_BYTES - len(text))
        except OSError as error:
            reason = f"--data cannot read {file} ({error.strerror}); allow it or remove the file"
            raise ValueError(reason) from None
        text += b"" if b"\0" in data[:4096] else data
    if not text:
        raise ValueError(f"--data {root} holds no readable text; give a text file, or a folder")
    return torch.frombuffer(text, dtype=torch.uint8)


class Text:
    """The bytes to train on and the held-out bytes, in windows of S + 1.

    A batch is a pure function of (seed, step, micro-batch, rank): resuming needs no position in the
    data, and both arms of a comparison see the same bytes.
    """

    def __init__(self, data: Tensor, seq: int, seed: int):
        self.window, self.seed = seq + 1, seed
        held_out = max(self.window, int(HELD_OUT * len(data)))
        if len(data) < held_out + self.window:
            raise ValueError(
                f"the text has {len(data)} bytes, and --seq {seq} needs {2 * self.window} to train"
                " and validate on; give more text with --data, or a shorter --seq"
            )
        self.train, self.held_out = data[:-held_out], data[-held_out:]

    def batch(self, size: int, step: int, micro: int, rank: int) -> Tensor:
        """Random training windows, [size, S + 1] int64."""
        draw = random.Random(f"{self.seed}/{step}/{micro}/{rank}")
        starts = [draw.randrange(len(self.train) - self.window + 1) for _ in range(size)]
        return torch.stack([self.train[start : start + self.window] for start in starts]).long()

    def validation(self, size: int, rank: int, world: int) -> tuple[Tensor, ...]:
        """This rank's part of windows spread evenly over the held-out bytes, each [size, S + 1]."""
        count = VALIDATION_BATCHES * size * world
        last = len(self.held_out) - self.window
        starts = [i * last // count for i in range(rank, count, world)]
        windows = [self.held_out[start : start + self.window] for start in starts]
        return torch.stack(windows).long().split(size)

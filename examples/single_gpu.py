# SPDX-License-Identifier: Apache-2.0
"""Train on one device, compiled: python examples/single_gpu.py [--recipe mxfp8] [--steps 100]

The model is a stack of MLP blocks that learns a map between random vectors. On a GPU its blocks are
compiled and the whole step is one CUDA graph; on a CPU the PyTorch reference runs.
"""

import argparse

import torch
from torch import nn

import fsdp_quant as fq


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="fp8_current")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model = nn.Sequential(*(Block(args.dim) for _ in range(2))).to(device, dtype)
    teacher = nn.Linear(args.dim, args.dim).to(device, dtype).requires_grad_(False)
    fq.convert(model, args.recipe)
    print(fq.plan(model))
    if on_gpu:
        for block in model:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), teacher(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = fq.graphed(step, model, optimizer) if on_gpu else step
    losses = [
        step(torch.randn(64, args.dim, device=device, dtype=dtype)) for _ in range(args.steps)
    ]
    print(f"loss {losses[0].item():.4f} -> {losses[-1].item():.4f}")
    print(fq.receipt())
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    main()

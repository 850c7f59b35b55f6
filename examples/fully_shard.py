# SPDX-License-Identifier: Apache-2.0
"""Train under stock FSDP2: torchrun --nproc-per-node 2 examples/fully_shard.py [--steps 20]
[--forward F --backward B]

Each rank holds a shard of every parameter in fp32. FSDP2 all-gathers codes and scales for the
forward and for the backward, and reduces gradients in high precision. On CPUs it uses gloo, on GPUs
NCCL.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forward", default="mxfp8")
    parser.add_argument("--backward", default="fp8_current")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same values on every rank
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    fq.convert(model, fq.recipes.hybrid(args.forward, args.backward))  # before or after fully_shard
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(dist.get_rank())  # other data on every rank
    x, losses = torch.randn(4, 16, 64, device=device), []
    for _ in range(args.steps):
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # .item() would wait for the device in every step
    losses = [loss.item() for loss in losses]
    if dist.get_rank() == 0:
        print(fq.plan(model), f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}\n", fq.receipt(), sep="")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""Bytes that FSDP2 gathers per weight element and step (forward plus backward), recorded from the
collectives.

    torchrun --nproc-per-node 2 -m dist_tests.bench.bench_gather

A peer is measured beside it where it is installed: torchao's float8 with its fp8 all-gather.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_quant as fq
from dist_tests.multi.nets import Net, recorded_collectives


def _with_torchao(net: Net) -> None:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    float8.convert_to_float8_training(
        net, config=config, module_filter_fn=lambda _, name: name.startswith("blocks")
    )


def _modes(on_gpu: bool) -> dict:
    named = [
        fq.recipes.bf16(),
        fq.recipes.fp8_current(),
        fq.recipes.fp8_block(),
        fq.recipes.mxfp8(),
        fq.recipes.nvfp4(),
        fq.recipes.hybrid("mxfp8", "nvfp4"),
        fq.recipes.hybrid("nvfp4", "mxfp8"),
    ]
    modes = {
        f"fsdp_quant {r.name}" + (f" {dict(r.arguments)}" if r.name == "hybrid" else ""): (
            lambda net, r=r: fq.convert(net, r, skip=["head"])
        )
        for r in named
    }
    modes["bf16, plain FSDP2"] = lambda net: None
    if on_gpu and importlib.util.find_spec("torchao"):
        modes["torchao float8 tensorwise, fp8 all-gather"] = _with_torchao
    return modes


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    dim, layers = (1024, 4) if cuda else (128, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if rank == 0:
        print(
            f"{world} x {torch.cuda.get_device_name() if cuda else 'cpu'}, {layers} blocks of "
            f"{dim} x {4 * dim}"
        )
    for label, prepare in _modes(cuda).items():
        torch.manual_seed(0)
        net = Net(hidden=(4 * dim,) * layers, k=dim, out=16).to(device)
        elements = sum(
            p.numel() for n, p in net.named_parameters() if n.startswith("blocks") and p.dim() == 2
        )
        prepare(net)
        for block in net.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        with recorded_collectives() as seen:
            net(torch.randn(64, dim, device=device)).float().square().mean().backward()
        gathered = sum(size for kind, size in seen if kind == "all_gather")
        if rank == 0:
            print(f"{gathered / elements:6.3f} B/element  {label}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What collectives of FSDP2 take on clusters that are not there: `fq.plan(bandwidth=...)` of a
model without memory.

    python -m dist_tests.bench.on_paper [--gpus 64 256 1024] [--inside 333] [--between 50] [--layers
    32 --dim 4096 --hidden 14336] [--gradients fp32 bf16 fp8_1x128 nvfp4]

One process; the world is a process group that talks to nobody. GB/s are what one GPU receives: in a
machine of 8, and over the network. Gradients are sent as by `fq.set_gradient_reduction`, a column
for each format. Rows: one shard group over all GPUs (at the rate of the network), and HSDP with a
copy per machine of 8, whose gathers stay in it. Needs no GPU.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_quant as fq
from dist_tests.bench import fsdp2
from fsdp_quant.inspection.plan import ModelPlan
from fsdp_quant.tensor import torch_compat
from fsdp_quant.training.gradient_reduction import GradientReduction

MACHINE = 8
ARMS = {fsdp2.BASE: fq.recipes.bf16, **fsdp2.RECIPES}


def planned(arm: str, gpus: int, copies: int, links: tuple[float, float], args) -> list[ModelPlan]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    net = fsdp2.model(args, fused=False)
    fq.convert(net, ARMS[arm](), fuse=False)
    mesh = init_device_mesh("cpu", (copies, gpus // copies), mesh_dim_names=("copies", "shards"))
    options = {
        "mesh": mesh if copies > 1 else mesh["shards"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for block in net:
        fully_shard(block, **options)
    fully_shard(net, **options)
    plans = []
    for gradients in args.gradients:
        # `fq.set_gradient_reduction` would wait for ranks to agree
        for group in torch_compat.fsdp_groups_of(net):
            comm = None if gradients == "fp32" else GradientReduction(gradients)
            torch_compat.set_reduce_scatter(group, comm)
        plans.append(fq.plan(net, bandwidth=links, latency=args.latency * 1e-6))
    dist.destroy_process_group()
    return plans


def main() -> int:
    parser = fsdp2.parser()
    parser.description = __doc__
    parser.add_argument("--gpus", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--inside", type=float, default=333.0, help="GB/s in a machine")
    parser.add_argument("--between", type=float, default=50.0, help="GB/s over the network")
    parser.add_argument("--latency", type=float, default=30.0, help="us per collective")
    parser.add_argument("--gradients", nargs="+", default=["fp32"], help="how they are sent")
    parser.set_defaults(arms=list(ARMS), layers=32)
    args = parser.parse_args()
    inside, between = args.inside * 1e9, args.between * 1e9
    print(
        f"{args.layers} layers of {args.dim} x {args.hidden}; milliseconds per step\n"
        f"{'GPUs':>5} {'shards':>6} {'recipe':14} {'GiB gathered':>12} {'forward':>8} "
        f"{'backward':>8}   gradients: {' '.join(f'{g:>9}' for g in args.gradients)}"
    )
    for gpus in args.gpus:
        for copies in sorted({1, max(1, gpus // MACHINE)}):
            link = between if gpus > MACHINE and copies == 1 else inside
            for arm in args.arms:
                plans = planned(arm, gpus, copies, (link, between), args)
                made, reduces = plans[0], [f"{1e3 * p.traffic.reduce:9.1f}" for p in plans]
                forward, backward = (1e3 * s for s in made.traffic.gather)
                print(
                    f"{gpus:5} {gpus // copies:6} {arm:14} {made.bytes_per_step() / 2**30:12.2f} "
                    f"{forward:8.1f} {backward:8.1f}              {' '.join(reduces)}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The cast of a 1 B-parameter model's masters: device time beside the bytes it must move at copy
rate, and host time.

    python -m dist_tests.bench.cast [--json PATH] [NAME ...]

Rows: one rank that holds everything; rank 3 of 8 of one flat buffer, as Megatron-LM cuts it; and
rank 3 of 8 where every weight is cut. Cuts are odd, and nothing is reduced. "rows" is the cast of
covering rows, which runs where no kernel takes the pieces. ratio: time over that of a copy of as
many bytes; masters are read once, or twice where a scale needs the amax of the whole tensor.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from dist_tests.bench import clock
from dist_tests.virtual import LoneRank, alone
from fsdp_quant.hooks import ShardMap, SyncItem, WeightSync, plan_weight_sync
from fsdp_quant.quantizer import HybridQuantizer
from fsdp_quant.tensor.quantized_weight import QuantizedWeightState

RANK, WORLD, LAYOUTS = 3, 8, ("whole", "flat", "cut")
LAYERS, HIDDEN, KEYS, INNER = 16, 2048, 512, 8192
SHAPES = [
    (HIDDEN, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (INNER, HIDDEN),
    (INNER, HIDDEN),
    (HIDDEN, INNER),
]
PAIRS = {
    "fp8_current": ("fp8_tensor", "fp8_tensor"),
    "fp8_row": ("fp8_row", "fp8_row"),
    "fp8_block": ("fp8_128x128", "fp8_128x128"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4_16x16", "nvfp4_16x16"),
    "mxfp8/nvfp4": ("mxfp8", "nvfp4"),
    "nvfp4 1x16": ("nvfp4", "nvfp4"),
}


def cuts_of(layout: str, first: int, numel: int, total: int) -> tuple[int, ...]:
    """Of a weight that begins at element `first` of `total`."""
    if layout == "whole":
        return 0, numel
    begin, of = (first, total) if layout == "flat" else (0, numel)
    return 0, *(min(max((of * r // WORLD | 1) - begin, 0), numel) for r in range(1, WORLD)), numel


def plan(
    pair: tuple[str, str], layout: str, device: torch.device
) -> tuple[WeightSync, list[torch.Tensor], int]:
    """(sync, its masters, bytes that a cast must move)."""
    group = None if layout == "whole" else LoneRank(RANK, WORLD)
    hybrid, items, masters, first, moved = HybridQuantizer(*pair), [], [], 0, 0.0
    encodings = hybrid.encodings.values()
    reads = 2 if any(e.fmt.tensor_scale or e.fmt.scale_leaves_contraction for e in encodings) else 1
    total = sum(map(math.prod, SHAPES * LAYERS))
    for i, shape in enumerate(SHAPES * LAYERS):
        values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        weight = QuantizedWeightState(f"w{i}", hybrid, shape, torch.bfloat16).wrapped(values)
        shards = ShardMap(cuts_of(layout, first, weight.numel(), total))
        first += weight.numel()
        start, end = shards.run(0 if group is None else RANK)
        items.append(SyncItem(f"w{i}", weight, shards))
        masters.append(torch.randn(end - start, device=device) * 0.02)
        moved += (end - start) * (4 * reads + sum(e.fmt.bytes_per_element() for e in encodings))
    return plan_weight_sync(items, group, "codes", "halo"), masters, int(moved)


def copy_rate(timer: clock.DeviceClock, device: torch.device) -> float:
    """TB/s, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.sustained([lambda: target.copy_(source)]).us * 1e-6


def measured(
    timer: clock.DeviceClock, sync: WeightSync, masters: list[torch.Tensor], copy_us: float
) -> dict[str, float]:
    """Device and host microseconds of a cast, and its ratio to `copy_us`, both ways."""
    kernels, found = sync._plan, {}
    for way in ("kernels", "rows"):
        sync._plan = kernels if way == "kernels" else None
        us = timer.sustained([lambda: sync.cast_(masters)], settle_ms=1).us
        host = timer.host(lambda: sync.cast_(masters), calls=4, rounds=3)
        found |= {f"{way} us": us, f"{way} host us": host, f"{way} ratio": us / copy_us}
    sync._plan = kernels
    return found


def run(names: list[str], report: dict) -> None:
    device, timer = torch.device("cuda"), clock.DeviceClock(torch.device("cuda"), 20)
    timer.wake()
    rate = copy_rate(timer, device)
    report |= {"copy TB/s": rate, **clock.facts(device)}
    print(
        f"copy {rate:.2f} TB/s\n{'':28}"
        + "".join(f"{h:>9}" for way in ("kernels", "rows") for h in (way, "host us", "ratio"))
    )
    for name, pair in PAIRS.items():
        for layout in LAYOUTS:
            label = f"{name}, {layout}"
            if not clock.wanted(label, names):
                continue
            sync, masters, moved = plan(pair, layout, device)
            row = measured(timer, sync, masters, moved / rate * 1e-6)
            report[label] = row
            print(
                f"{label:28}"
                + "".join(f"{v:9.2f}" if "ratio" in k else f"{v:9.0f}" for k, v in row.items()),
                flush=True,
            )
            del sync, masters


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json")
    options = parser.parse_args()
    if clock.measurable() is None:
        return 0
    report: dict = {}
    with alone():
        run(options.names, report)
    clock.write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

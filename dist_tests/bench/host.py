# SPDX-License-Identifier: Apache-2.0
"""What compiled steps cost the host: arms of `bench.llama` that take turns, in one process.

    python -m dist_tests.bench.host --model qwen3_moe --tokens 2048 --steps 60 --arms compiled
        --recipes mxfp8,fp8_block

Arguments are those of `bench.llama`; --steps counts the rounds. One process holds all models, and a
round runs a step of each, with the device idle at its start. A host is up to 1.8 times slower from
minute to minute, so that arms that are measured one after the other tell little of each other.
Columns: median, tenth and ninetieth percentile of the ms until the Python call of a step returns,
and the median over the base's. A line of --profile: operators of one step by time on the host.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from dist_tests.bench import llama


def step_of(arm: llama.Arm, args, device: torch.device) -> Callable[[], Tensor]:
    *_, one_step = llama.with_step(arm, args, device)
    step = functools.partial(one_step, llama.tokens_of(args, args.tokens[0], 0, device))
    for _ in range(llama.COMPILING_STEPS + llama.WARM_STEPS):
        step()
    return step


def main() -> None:
    args = llama.parsed()
    if args.fsdp or not (llama.CUDA or args.tiny):
        raise SystemExit("error: this bench runs on one GPU, without --fsdp; --tiny, on a CPU")
    device = torch.device("cuda", 0) if llama.CUDA else torch.device("cpu")
    arms = llama.chosen_arms(args, print)
    if any(arm.graphed for arm in arms):
        raise SystemExit("error: a captured step costs the host one call; leave those arms out")
    steps = {arm.name: step_of(arm, args, device) for arm in arms}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()  # else one arm pays for the objects of all
    for _ in range(args.steps + 1):
        for name, step in steps.items():
            taken[name].append(llama.host_ms(step, 1))
    base = statistics.median(taken[llama.BASE][1:])
    for name, of in taken.items():
        ms, ends = statistics.median(of[1:]), statistics.quantiles(of[1:], n=10)
        print(f"{name:26}{ms:8.2f} ms {ms / base:6.3f}   {ends[0]:.2f} to {ends[-1]:.2f}")
    for name, step in steps.items() if args.profile else ():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        print(f"{name}\n{profile.key_averages().table('self_cpu_time_total', row_limit=30)}")


if __name__ == "__main__":
    main()

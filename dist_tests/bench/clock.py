# SPDX-License-Identifier: Apache-2.0
"""What the benches of compiled operators share: device time, going on after a row that failed, and
their arguments."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fsdp_quant.ops import extension

SPIN_CYCLES = 2_000_000  # about 1 ms
FLUSH_BYTES = 256 << 20


# Time #


class Sample(NamedTuple):
    """Median and extremes of one call in microseconds; hidden: the host was ahead in every
    repeat."""

    us: float
    lowest: float
    highest: float
    hidden: bool


class DeviceClock:
    """Device time of calls, by events on the current stream."""

    def __init__(self, device: torch.device, repeats: int):
        self.repeats = repeats
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def wake(self) -> None:
        """Raise the clocks of an idle device."""
        for _ in range(2000):
            self.scratch.zero_()
        torch.cuda.synchronize()

    def time(self, calls: Sequence[Callable[[], object]], l2: str | None) -> Sample:
        """One call in microseconds, each behind a spinning kernel; repeat i makes calls[i %
        len(calls)].

        l2:  "flush": 256 MB are zeroed before each call; else the L2 is left as it is.
        """
        # results live on, so that the next call's buffers are others
        kept: deque = deque(maxlen=len(calls))
        times, hidden, spin = [], True, SPIN_CYCLES
        for i in range(-2 * len(calls) - 1, self.repeats):
            while True:
                if l2 == "flush":
                    self.scratch.zero_()
                start, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                torch.cuda._sleep(spin)
                start.record()
                kept.append(calls[i % len(calls)]())
                end.record()
                ahead = not start.query()  # the device still spins, and everything is queued
                end.synchronize()
                if ahead or i < 0 or spin >= 8 * SPIN_CYCLES:
                    break
                spin *= 2
            if i >= 0:
                times.append(start.elapsed_time(end) * 1e3)
                hidden &= ahead
        return Sample(statistics.median(times), min(times), max(times), hidden)

    def sustained(
        self,
        calls: Sequence[Callable[[], object]],
        between: Callable[[], object] | None = None,
        settle_ms: float = 100.0,
    ) -> Sample:
        """One call in microseconds, made back to back, so that clocks are those that the work
        itself leaves.

        Repeat i makes calls[i % len(calls)]; the device does not pause where the host is ahead.

        between:    made after each call, outside its time.
        settle_ms:  of calls that come first and do not count.
        """
        kept: deque = deque(maxlen=len(calls))

        def turn(i: int) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            kept.append(calls[i % len(calls)]())
            end.record()
            ahead = not start.query()  # an earlier call still runs, and this one is queued
            if between is not None:
                between()
            return start, end, ahead

        for i in range(2 * len(calls)):
            turn(i)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(len(calls)):
            turn(i)
        torch.cuda.synchronize()
        first = math.ceil(settle_ms / 1e3 * len(calls) / (time.perf_counter() - begin))
        torch.cuda._sleep(SPIN_CYCLES)
        turns = [turn(i) for i in range(-first, self.repeats)][first:]
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e3 for start, end, _ in turns]
        return Sample(
            statistics.median(times), min(times), max(times), all(ahead for *_, ahead in turns)
        )

    def host(self, call: Callable[[], object], calls: int = 100, rounds: int = 11) -> float:
        """Host microseconds a call: `calls` of them queued behind a spinning kernel, without
        synchronization."""
        for _ in range(calls):
            call()
        times = []
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            torch.cuda.synchronize()
            torch.cuda._sleep(SPIN_CYCLES)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls * 1e6)
        gc.enable()
        torch.cuda.synchronize()
        return statistics.median(times)

    def once(self, call: Callable[[], object], repeats: int = 3) -> float:
        """Microseconds of a long call, launches included."""
        call()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)


def facts(device: torch.device) -> dict:
    """What numbers depend on besides the code: the device, torch, and what the library was built
    from."""
    properties, build = torch.cuda.get_device_properties(device), extension.STATUS.build
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "library": build,
    }


# Rows that fail #


class DeviceLost(Exception):
    """The device answers no more: nothing after this can be measured."""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def recover() -> None:
    """Go on after a row that failed, or raise DeviceLost."""
    for _ in range(2):
        try:
            torch.cuda._sleep(1)  # takes the launch error that the row left behind
            torch.cuda.synchronize()
            return
        except Exception as error:  # of any kind: the second one says that the device is lost
            last = error
    raise DeviceLost(first_line(last))


# Arguments and results #


def measurable() -> torch.device | None:
    """The current GPU where the operators run on it; else None, and a line that says why not."""
    reason = "no CUDA device"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        reason = extension.runs_on(device)
        if reason is None:
            return device
    print(f"nothing to measure: {reason}")
    return None


def finish(bench, run: Callable[[], None], path: str | None) -> int:
    """Run a bench, to its end or the loss of the device; write its report and print its summary.
    The exit status.

    bench:  `report`, `summary()` and `failed`.
    """
    lost = None
    try:
        run()
    except DeviceLost as error:
        lost = bench.report["lost"] = str(error)
    finally:  # also when it is interrupted: what was measured is worth keeping
        write(path, bench.report)
    print(f"\n{bench.summary()}" + (f"; the device was lost: {lost}" if lost else ""))
    return 1 if lost or bench.failed else 0


def wanted(name: str, filters: Sequence[str]) -> bool:
    return not filters or any(f in name for f in filters)


def extents(example: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of as many positive numbers, with x between them, as the example has."""

    def parse(text: str) -> tuple[int, ...]:
        numbers = text.split("x")
        if len(numbers) != len(example.split("x")) or not all(
            n.isdecimal() and int(n) for n in numbers
        ):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no shape; wanted positive numbers, like {example}"
            )
        return tuple(map(int, numbers))

    return parse


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; wanted 1 or more")
    return int(text)


def write(path: str | None, report: dict) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)

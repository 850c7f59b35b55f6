"""Time of encoding and decoding per format and direction, over a copy of the same tensor.

    python -m dist_tests.bench.bench_quantize [--rows 4096 --cols 4096]

Prints a line a format: seconds, and the ratio to torch's copy of the input (read + write).
"""

from __future__ import annotations

import argparse
import time

import torch

from dist_tests import laws
from fsdp_quant.formats import FORMATS, Direction
from fsdp_quant.quantizer import Quantizer


def _seconds(fn, device: torch.device, repeats: int) -> float:
    """Median wall time of fn, the device drained before and after."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = laws.values(args.rows, args.cols).to(device)
    copy = _seconds(lambda: x.clone(), device, args.repeats)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, [{args.rows}, {args.cols}] bf16, reference ops; copy {copy * 1e3:.2f} ms")
    print(f"{'format':14} {'direction':11} {'encode s':>9} {'x copy':>7} {'decode s':>9} {'x copy':>7}")
    made = {n: Quantizer(f) for n, f in FORMATS.items() if f.is_quantized}
    made["nvfp4+SR"] = Quantizer("nvfp4", rounding="stochastic")
    made["nvfp4+RHT"] = Quantizer("nvfp4", rotation=True)
    key = torch.tensor([1, 2, 3, 0, 0], device=device)
    for label, quantizer in made.items():
        for direction in Direction:
            storage = quantizer.storage(x, direction, key)
            encode = _seconds(lambda q=quantizer, d=direction: q.storage(x, d, key), device, args.repeats)
            decode = _seconds(storage.decode, device, args.repeats)
            print(
                f"{label:14} {direction.value:11} {encode:9.4f} {encode / copy:7.1f} {decode:9.4f} {decode / copy:7.1f}"
            )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m fsdp_quant selftest`: compare the kernels of this GPU with the reference, time them,
and write a report.

    ties       e2m1 codes of every bf16 number, e8m0 scales of every bf16 amax and of fp32 amaxes
               around powers of two: equal bytes. Tests cast instructions of the GPU.
    codes      every format, direction and option that kernels encode, with tails and extreme
               values: equal bytes
    decode     the same codes: equal values
    products   every pair of formats in its domain, fp32 output: relative error (Frobenius) to the
               fp64 product of the decoded operands
    rates      on a GPU, at one large shape: GB/s read and written by quantizers, TFLOP/s of GEMMs

On a CPU the reference is compared with itself.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import E4M3, FORMATS, ROWWISE, Direction, format_of
from ..gemm import gemm
from ..ops import extension, reference
from ..ops.capability import arch_of, gemm_domain, unsupported_reason
from ..ops.dispatch import Encoded
from ..ops.layout import flat_bytes
from ..quantizer import HybridQuantizer, Quantizer
from ..storage import Storage

SHAPES = ((1, 1), (33, 47), (128, 256), (200, 328), (129, 1100))
PRODUCT = (200, 272, 1024)  # m, n, k
LARGE = (8192, 8192)
# Tensor cores accumulate 8-bit products in about 13 bits: error 2e-4 on gaussian data. Shared
# exponents of anchored layouts add less than that.
BOUND = 1e-3
ROUNDED = 2e-2  # the products of nvfp4's elements and nearest scales, which are rounded to e4m3
RUNS = 10


@dataclass
class Report:
    """failures: one line per difference. compared: kind -> comparisons. rates: name -> rate."""

    device: str
    arch: str
    torch: str
    kernels: str
    failures: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, case: str, difference: str | None) -> None:
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if difference is not None:
            self.failures.append(f"{kind}: {case}: {difference}")


def quantizers() -> dict[str, Quantizer]:
    """Return, by name, every format that kernels encode, and options that change its bytes."""
    chosen = []
    for fmt in FORMATS.values():
        if not fmt.is_quantized or unsupported_reason(fmt) is not None:
            continue
        chosen.append(Quantizer(fmt))
        if fmt.element == E4M3:
            chosen.append(Quantizer(format_of(fmt, element="e5m2")))
        if fmt.bits == 4 and fmt.block[0] == 1:
            chosen.append(Quantizer(fmt, rounding="stochastic", rotation=True))
        if fmt.tensor_scale:
            chosen.append(Quantizer(format_of(fmt, scale_rule="fp8_exact")))
    return {repr(q): q for q in chosen}


def gaussian(rows: int, cols: int) -> Tensor:
    """Return fp32 values [rows, cols] on the CPU, the same in every process."""
    random = torch.Generator("cpu").manual_seed(cols)
    return torch.randn(rows, cols, generator=random, dtype=torch.float32, device="cpu")


def inputs(shape: tuple[int, int]) -> Iterable[tuple[str, Tensor]]:
    """Yield (kind, bf16 values on the CPU)."""
    x = gaussian(*shape)
    special = x.clone()
    special.view(-1)[:: max(x.numel() // 7, 1)] = float("inf")
    special.view(-1)[-1] = float("nan")
    powers = torch.linspace(-120, 120, x.numel(), dtype=x.dtype, device=x.device).view(shape).exp2()
    kinds = {"gauss": x, "zeros": torch.zeros_like(x), "inf and nan": special, "wide": x * powers}
    for kind, values in kinds.items():
        yield kind, values.to(torch.bfloat16)


def _defined(q: Quantizer, x: Tensor, direction: Direction, key: Tensor) -> Storage:
    """Return `Quantizer.storage` of the reference, also where kernels are loaded."""
    e = q.encoding(direction)
    prepared = reference.prepared(x, e)
    amax, tensor_amax = reference.statistics(prepared, e)
    encoded = reference.encode(prepared, amax, tensor_amax, e, 0, key if e.stochastic else None)
    return Storage.of(Encoded(*encoded, tensor_amax, amax), e, x.shape, x.dtype)


def _difference(storage: Storage, expected: Storage) -> str | None:
    for name, right in expected.buffers().items():
        left, right = (flat_bytes(t.cpu()) for t in (storage.buffers()[name], right))
        if left.shape != right.shape:
            return f"{name} has {len(left)} bytes, wanted {len(right)}"
        if count := int((left != right).sum()):
            return f"{count} of {len(left)} bytes of {name}"
    return None


def compare_codes(report: Report, device: torch.device) -> None:
    key = torch.tensor([7, 1, 99, 0, 0], dtype=torch.int64, device="cpu")
    for (name, q), direction, shape in itertools.product(quantizers().items(), Direction, SHAPES):
        for kind, x in inputs(shape):
            case = f"{name} {direction.value} {list(shape)} {kind}"
            expected = _defined(q, x, direction, key)
            storage = q.storage(
                x.to(device), direction, key.to(device) if q.is_stochastic else None
            )
            difference = _difference(storage, expected)
            report.add("codes", case, difference)
            if difference is None:
                left, right = storage.decode().cpu(), expected.decode()
                differs = (left != right) & ~(left.isnan() & right.isnan())
                count = int(differs.sum())
                report.add("decode", case, f"{count} values" if count else None)


def ties() -> Iterable[tuple[str, str, Tensor]]:
    """Yield (name, format, values [rows, blocks of 32]). Blocks that test e2m1 codes have scale
    1."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)
    numbers = numbers.view(torch.bfloat16)
    small = numbers[numbers.abs() <= 6]

    def blocks(size: int) -> Tensor:
        """Return the small numbers in rows of `size`, the first of each row 6."""
        rows = pad(small, (0, -len(small) % (size - 1))).view(-1, size - 1)
        return pad(rows, (1, 0), value=6.0)

    largest = torch.full_like(blocks(16)[:1], 6 * 448.0)  # so that the scale of the tensor is 1
    yield "e2m1 of every bf16 up to 6", "mxfp4", blocks(32)
    yield "e2m1 of every bf16 up to 6", "nvfp4", torch.cat([largest, blocks(16)])
    powers = 448 * torch.arange(-140, 120, dtype=torch.float32, device="cpu").exp2()
    around = [powers, torch.nextafter(powers, powers * 2), torch.nextafter(powers, powers / 2)]
    yield "e8m0 of every bf16 amax", "mxfp8", pad(numbers[: 1 << 15, None], (0, 31))
    amaxes = torch.cat(around)
    yield "e8m0 of fp32 amaxes around powers of two", "mxfp8", pad(amaxes[:, None], (0, 31))


def compare_ties(report: Report, device: torch.device) -> None:
    key = torch.zeros(5, dtype=torch.int64, device="cpu")
    for (case, name, x), direction in itertools.product(ties(), Direction):
        q, values = Quantizer(format_of(name)), x if direction is ROWWISE else x.t().contiguous()
        difference = _difference(
            q.storage(values.to(device), direction), _defined(q, values, direction, key)
        )
        report.add("ties", f"{case}, {name} {direction.value}", difference)


def compare_products(report: Report, device: torch.device) -> None:
    m, n, k = PRODUCT
    a, b = (gaussian(rows, k).to(torch.bfloat16) for rows in (m, n))
    chosen = [q for q in quantizers().values() if not (q.is_stochastic or q.fmt.rotated)]
    for q_a, q_b in itertools.product(chosen, chosen):
        left, right = q_a.storage(a.to(device), ROWWISE), q_b.storage(b.to(device), ROWWISE)
        domain, _ = gemm_domain(q_a.fmt, q_b.fmt, torch.bfloat16, report.arch)
        exact = left.decode().double() @ right.decode().double().t()
        try:
            y = gemm(left, right, out_dtype=torch.float32).double()
            error = float((y - exact).norm() / exact.norm())
            becomes = [f for f in (q_a.fmt, q_b.fmt) if f.becomes_e4m3]
            is_rounded = domain == "anchored" and not all(
                f.decodes_exactly_to_e4m3 for f in becomes
            )
            bound = ROUNDED if is_rounded else BOUND
            difference = None if error <= bound else f"error {error:.1e}, wanted {bound} at most"
        except Exception as fault:  # of any kind: the report lists it
            difference = f"{type(fault).__name__}: {fault}".splitlines()[0]
        report.add("products", f"{q_a} x {q_b} ({domain})", difference)


def _milliseconds(work: Callable[[], object]) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    for _ in range(3):
        work()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def measure(report: Report, device: torch.device) -> None:
    m, k = LARGE
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    ms = _milliseconds(lambda: x.clone())
    report.rates["copy GB/s"] = 4 * x.numel() / ms / 1e6
    ms = _milliseconds(lambda: x @ x.t())
    report.rates["bf16 TFLOP/s"] = 2 * m * m * k / ms / 1e9
    for q in quantizers().values():
        if q.is_stochastic or q.fmt.rotated:
            continue
        both = HybridQuantizer(q, q)
        ms = _milliseconds(lambda both=both: both.storages(x))
        storages = both.storages(x)[0]
        size = sum(storage.nbytes for storage in storages.values())
        report.rates[f"{q} both directions GB/s"] = (2 * x.numel() + size) / ms / 1e6
        operand = storages[ROWWISE]
        ms = _milliseconds(lambda operand=operand: gemm(operand, operand))
        report.rates[f"{q} TFLOP/s, layouts included"] = 2 * m * m * k / ms / 1e9
        del storages, operand


def run(device: torch.device, path: Path, say: Callable[[str], None] = print) -> Report:
    """Compare, measure, and write the report to `path` as JSON."""
    on_gpu = device.type == "cuda"
    report = Report(
        torch.cuda.get_device_name(device) if on_gpu else "CPU",
        arch_of(device),
        torch.__version__,
        extension.runs_on(device)
        or ", ".join(extension.STATUS.build.architectures if extension.STATUS.build else ()),
    )
    say(f"{report.device} ({report.arch}), torch {report.torch}; kernels: {report.kernels}")
    for part in (compare_ties, compare_codes, compare_products, *([measure] if on_gpu else [])):
        part(report, device)
    for kind, count in report.compared.items():
        failed = sum(f.startswith(f"{kind}:") for f in report.failures)
        say(f"{kind:10}{count:6} compared, {failed} differ")
    for name, rate in report.rates.items():
        say(f"{name:50}{rate:10.0f}")
    for failure in report.failures[:20]:
        say(failure)
    path.write_text(json.dumps(asdict(report), indent=1) + "\n")
    say(f"written to {path}")
    return report

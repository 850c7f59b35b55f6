# SPDX-License-Identifier: Apache-2.0
"""Headers of csrc that need no CUDA, compiled here; held to Python's table and to torch's casts."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_tests.laws import CAPABILITIES, assert_planned_as_taken, assert_same_bytes
from fsdp_quant.ops import build

CSRC = Path(build.__file__).parents[2] / "csrc"
pytestmark = pytest.mark.skipif(not build.cxx(), reason="there is no C++ compiler")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, bytes], bytes]:
    """Compiles C++ that reads csrc's headers, and gives what it makes of its input."""

    def run(text: str, given: bytes) -> bytes:
        source, binary = tmp_path / "program.cpp", tmp_path / "program"
        source.write_text(f"#include <cstdio>\n#include <iostream>\n{text}\n")
        command = [*build.cxx(), "-std=c++17", "-O2", f"-I{CSRC}", str(source), "-o", str(binary)]
        subprocess.run(command, check=True)
        return subprocess.run([str(binary)], input=given, capture_output=True, check=True).stdout

    return run


def test_products_are_planned_where_cpp_takes_them(program):
    """If false, a product is planned that the first step refuses, or the tensor cores of a GPU
    idle."""
    capabilities = [10 * major + minor for major, minor in CAPABILITIES]
    asked = list(itertools.product(range(64), range(64), capabilities))
    said = program(
        """#include "gemm/capability.h"
        using namespace fsdp_quant;
        CodeKind of(int kind) {
          return {static_cast<Element>(kind & 7), static_cast<Scaling>(kind >> 3)};
        }
        int main() {
          for (int a, b, c; std::cin >> a >> b >> c;)
            std::cout << (supports_pair(of(a), of(b)) && supports_scales(of(a), of(b), c));
        }""",
        "\n".join(" ".join(map(str, one)) for one in asked).encode(),
    )
    taken = dict(zip(asked, (c == ord("1") for c in said)))
    assert len(taken) == len(said) and any(taken.values())
    assert_planned_as_taken(lambda a, b, major, minor: taken[a, b, 10 * major + minor])


def test_8_bit_casts_before_sm_89_are_those_of_the_instructions(program):
    """If false, an A100 makes other codes than an H100. Numbers: those whose last 12 bits are zero,
    and their neighbours. Ties of 8-bit elements are among them, and casts are monotonous
    between."""
    bits = torch.arange(1 << 20, dtype=torch.int64) << 12
    bits = torch.cat([bits, bits + 1, bits - 1]) & 0xFFFFFFFF
    numbers = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)
    said = program(
        """#include "device/fp8_bits.h"
        using namespace fsdp_quant;
        int main() {
          float v;
          while (fread(&v, 4, 1, stdin) == 1) putchar(fp8_code<3>(v)), putchar(fp8_code<2>(v));
          for (int c = 0; c < 256; ++c) {
            const uint32_t both = half_of_fp8<3>(c) | half_of_fp8<2>(c) << 16;
            fwrite(&both, 4, 1, stdout);
          }
        }""",
        numbers.numpy().tobytes(),
    )
    said = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    codes, halves = said[:-1024].view(-1, 2), said[-1024:].view(torch.float16).view(-1, 2)
    nan = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.float16)
    for i, dtype in enumerate((torch.float8_e4m3fn, torch.float8_e5m2)):
        largest = torch.finfo(dtype).max
        want = numbers.clamp(-largest, largest).to(dtype).view(torch.uint8)
        want = torch.where(numbers.isnan(), 0x7F, want)
        assert_same_bytes(codes[:, i].contiguous(), want, f"{dtype}")
        values = torch.arange(256).to(torch.uint8).view(dtype).half()
        values = torch.where(values.isnan(), nan, values)
        assert_same_bytes(halves[:, i].contiguous(), values, f"values of {dtype}")

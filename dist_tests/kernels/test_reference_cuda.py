# SPDX-License-Identifier: Apache-2.0
"""The reference gives the same bytes on a GPU as on the CPU: what a kernel is held to does not
depend on where it ran."""

from __future__ import annotations

import pytest
import torch

from dist_tests import laws
from fsdp_quant.formats import FORMATS, Direction
from fsdp_quant.quantizer import Quantizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MADE = laws.QUANTIZERS | {
    "nvfp4_rht": Quantizer("nvfp4", rotation=True),
    "nvfp4_rht_sr": Quantizer("nvfp4", rotation=True, rounding="stochastic"),
    **{
        f"{name}_sr": Quantizer(name, rounding="stochastic")
        for name in FORMATS
        if name != "identity"
    },
}


@pytest.mark.parametrize("kind", ["gauss", "outliers", "tiny", "heavy"])
@pytest.mark.parametrize("name", list(MADE))
def test_reference_bytes_are_those_of_the_cpu(name: str, kind: str):
    """If false, a model quantizes differently on a GPU, and checkpoints and laws do not carry
    over."""
    key = torch.tensor([5, 3, 77, 1, 9])
    for dtype in (torch.bfloat16, torch.float32):
        for rows, cols in ((128, 256), (33, 47), (1, 130)):
            x = laws.values(rows, cols, seed=rows, dtype=dtype, kind=kind)
            for direction in Direction:
                want = MADE[name].storage(x, direction, key)
                got = MADE[name].storage(x.cuda(), direction, key.cuda())
                what = f"{name} {kind} {dtype} [{rows}, {cols}]"
                laws.assert_same_storage(got.map(torch.Tensor.cpu), want, what)
                laws.assert_same_bytes(
                    got.dequantize().cpu(), want.dequantize(), f"{what}, decoded"
                )


@pytest.mark.parametrize("name", [n for n in MADE if n != "identity"])
def test_reference_of_special_values_is_that_of_the_cpu(name: str):
    """If false, an overflow is hidden on one device and seen on the other."""
    key = torch.tensor([5, 3, 77, 1, 9])
    for value in (float("nan"), float("inf"), -float("inf"), 0.0, 1e-40, 3.4e38):
        x = laws.values(48, 64, dtype=torch.float32)
        x[20:22, 3:9] = value
        for direction in Direction:
            want, got = (
                MADE[name].storage(x, direction, key),
                MADE[name].storage(x.cuda(), direction, key.cuda()),
            )
            laws.assert_same_storage(
                got.map(torch.Tensor.cpu), want, f"{name} with {value} {direction}"
            )

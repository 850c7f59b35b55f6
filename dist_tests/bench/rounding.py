# SPDX-License-Identifier: Apache-2.0
"""Roundings of gradients that no recipe has, simulated in fp32: python -m dist_tests.bench.rounding
prints their noise; arms of `dist_tests.bench.learning` train with them. Fake quantization, which
`recipes.qat` is held to.

MS-EDEN (Quartet II): both operands of a GEMM are rotated by a Hadamard matrix with random signs
along the contraction and rounded to nearest in blocks of 16; the scale of a block is multiplied by
<x, x> / <x, q> and rounded stochastically to e4m3. The decoded values have the mean x over signs
and scales.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import StudentT

from fsdp_quant.formats import E2M1, Format, format_of
from fsdp_quant.numerics import Quantizer
from fsdp_quant.ops import reference
from fsdp_quant.ops.layout import pack

MOST_SCALE = 256.0  # of e4m3's 448: corrections exceed 1


def eden(x: Tensor) -> Tensor:
    """MS-EDEN of rows that are rotated already, decoded: fp32 [rows, cols]; cols in 16s."""
    blocks = x.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    unit = (amax.amax() / (MOST_SCALE * E2M1.max)).clamp(min=1e-30)
    factor = (amax / E2M1.max).clamp(min=1e-30)
    codes = pack(reference.cast_codes((blocks / factor).flatten(1), E2M1), E2M1.bits)
    q = reference.decode_codes(codes, format_of("nvfp4"), x.shape[1]).view(blocks.shape)
    along = (blocks * q).sum(-1, keepdim=True)
    square = blocks.square().sum(-1, keepdim=True)
    scale = torch.where(along > 0, square / along, 0.0) / unit
    step = torch.exp2(scale.clamp(min=2.0**-6).log2().floor() - 3)  # between e4m3 numbers
    return (q * (scale / step + torch.rand_like(scale)).floor() * step * unit).flatten(-2)


def decoded(x: Tensor, rounding: str) -> Tensor:
    """x [rows, cols] as the GEMM would multiply it, with blocks along the columns."""
    if rounding in ("exact", "eden"):
        return x if rounding == "exact" else eden(x)
    is_stochastic = rounding == "stochastic"
    quantizer = Quantizer("nvfp4", rounding="stochastic") if is_stochastic else Quantizer(rounding)
    return quantizer.quantize(x).dequantize()


def rotated(x: Tensor, signs: Tensor) -> Tensor:
    """The Hadamard transform, of blocks of len(signs), of the rows of x times the signs."""
    n = len(signs)
    y = x.unflatten(-1, (-1, n)) * signs
    for stride in (2**i for i in range(int(math.log2(n)))):
        a, b = y.unflatten(-1, (-1, 2, stride)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return (y / math.sqrt(n)).flatten(-2)


def product(a: Tensor, b: Tensor, roundings: tuple[str, str], block: int) -> Tensor:
    """a [M, K] times b [N, K] transposed, both rotated in blocks of `block` (1: not), rounded."""
    signs = torch.randint(0, 2, (block,)).float() * 2 - 1
    if block > 1:
        a, b = rotated(a, signs), rotated(b, signs)
    return decoded(a, roundings[0]) @ decoded(b, roundings[1]).t()


@dataclass(frozen=True)
class Simulation:
    """Roundings of the operands of a linear layer: of the forward's weight; of dgrad's gradient and
    weight ("forward": the codes of the forward, not rotated); of wgrad's gradient and input. Inputs
    of the forward are nvfp4."""

    weight: str | Format = "nvfp4_16x16"
    dgrad: tuple[str, str] = ("stochastic", "forward")
    wgrad: tuple[str, str] = ("stochastic", "nvfp4")
    rotation: int = 16

    def replace_layers(self, model: nn.Module) -> None:
        """Simulate the linear layers of a model, but not its head."""
        for name, child in model.named_children():
            if type(child) is nn.Linear and name != "head":
                setattr(model, name, SimulatedLinear(child, self))
            else:
                self.replace_layers(child)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K] times weight [N, K] transposed."""
        return _Linear.apply(x, weight, self)


@dataclass(frozen=True)
class FakeQuantization(Simulation):
    """Decoded weights and inputs in the products of the forward, whose gradients autograd takes as
    if nothing were rounded."""

    inputs: str = "mxfp8"

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(straight_through(x, self.inputs), straight_through(weight, self.weight))


def straight_through(x: Tensor, fmt: str | Format) -> Tensor:
    """The decoded codes of x; its gradient is theirs."""
    return x + (Quantizer(fmt).quantize(x.detach()).dequantize() - x).detach()


class SimulatedLinear(nn.Module):
    """A linear layer without bias, with simulated codes."""

    def __init__(self, linear: nn.Linear, simulation: Simulation):
        super().__init__()
        self.weight, self.simulation = linear.weight, simulation

    def forward(self, x: Tensor) -> Tensor:
        y = self.simulation.multiply(x.flatten(0, -2), self.weight)
        return y.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, how: Simulation) -> Tensor:
        codes = decoded(weight, how.weight)
        ctx.save_for_backward(x, weight, codes)
        ctx.how = how
        return decoded(x, "nvfp4") @ codes.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight, codes), how = ctx.saved_tensors, ctx.how
        if how.dgrad[1] == "forward":
            to_input = decoded(grad, how.dgrad[0]) @ codes
        else:
            to_input = product(grad, weight.t().contiguous(), how.dgrad, how.rotation)
        to_weight = product(grad.t().contiguous(), x.t().contiguous(), how.wgrad, how.rotation)
        return to_input, to_weight, None


EDEN = partial(Simulation, dgrad=("eden", "eden"), wgrad=("eden", "eden"), rotation=128)
SIMULATIONS = {
    "simulated: nvfp4": Simulation(),
    "simulated: exact gradients": Simulation(dgrad=("exact", "forward"), wgrad=("exact", "nvfp4")),
    "simulated: MS-EDEN": EDEN(),
    "simulated: MS-EDEN, weights 1 x 16": EDEN("nvfp4"),
    "fake mxfp4": FakeQuantization("mxfp4"),
    "fake nvfp4": FakeQuantization(format_of("nvfp4", scale_rule="fp8_exact")),
}


def errors(
    a: Tensor, b: Tensor, pair: tuple[str, str], block: int, keys: int
) -> tuple[float, float]:
    """Of `product` relative to the exact one: RMS error of one key, and that of the mean over all
    keys, less what the noise of one leaves in it."""
    exact, total, square = a @ b.t(), torch.zeros(len(a), len(b)), 0.0
    for _ in range(keys):
        p = product(a, b, pair, block)
        total += p
        square += float(((p - exact).norm() / exact.norm()) ** 2) / keys
    of_mean = float(((total / keys - exact).norm() / exact.norm()) ** 2)
    return math.sqrt(square), math.sqrt(max(0.0, of_mean - square / keys))


def main(keys: int = 100) -> None:
    """Print `errors` of a tensor of 128 x 512, and of a wgrad of 1024 tokens."""
    torch.manual_seed(0)
    draws = {"gaussian": torch.randn, "Student's t of 3": lambda *s: StudentT(3.0).sample(s)}
    tensor = [(how, "exact") for how in ("nvfp4", "stochastic", "eden")]
    wgrad = [("exact", "nvfp4"), ("stochastic", "nvfp4"), ("eden", "nvfp4"), ("eden", "eden")]
    for name, draw in draws.items():
        for what, a, b, pairs in (
            ("tensor", draw(128, 512), torch.eye(512), tensor),
            ("wgrad", draw(128, 1024), draw(512, 1024), wgrad),
        ):
            for pair, block in itertools.product(pairs, (1, 16, 128)):
                error, bias = errors(a, b, pair, block, keys)
                print(
                    f"{name:16} {what:6} {' x '.join(pair):20} rotation {block:3}  "
                    f"error {error:.4f}  bias {bias:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

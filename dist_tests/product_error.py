# SPDX-License-Identifier: Apache-2.0
"""The definition of the error that anchoring adds to a GEMM, of the codes of its operands. Kernels
(`native.product_error`) equal it up to the order of sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_quant.formats import E2M1, E2M3, E3M2, E4M3, Element, Format
from fsdp_quant.ops.product_error import (
    COUNTED_E2M1,
    COUNTED_MX_E2M1,
    COUNTED_MX_E2M3,
    COUNTED_MX_E3M2,
    NOT_COUNTED,
)
from fsdp_quant.ops.reference import cast_codes, decode_codes

# Mean square of the relative error of an element with the scale of its own block. The steps of e4m3
# are half those of e5m2.
_OWN_ERROR = {"e4m3": 7.04e-4, "e5m2": 4 * 7.04e-4}
_PROBED_LINES = 64


class _Exact(NamedTuple):
    """Which anchored codes are exact: those of blocks whose largest magnitude has at least the code
    `least`.

    block:      elements per block.
    own_error:  as _OWN_ERROR, of gaussian values.
    """

    block: int
    least: int
    own_error: float


def _exact_blocks(element: Element, own_error: float) -> _Exact:
    """Of blocks with e8m0 scales: exact while their least step is on the grid of e4m3. The largest
    magnitude of the next smaller blocks is at most one code below `least`."""
    below = 2.0 ** (-10 - element.emin + element.mantissa)
    return _Exact(
        32,
        int(cast_codes(torch.tensor(element.max * below, dtype=torch.float32, device="cpu"), E4M3))
        + 1,
        own_error,
    )


# 28 is the code of 6 * 2^-3 * 2^-3: the largest magnitude of an e2m1 block whose scale is 2^-3.
_EXACT = {
    COUNTED_E2M1: _Exact(16, 28, 9.1e-3),
    COUNTED_MX_E2M1: _exact_blocks(E2M1, 1.33e-2),
    COUNTED_MX_E2M3: _exact_blocks(E2M3, 8.1e-4),
    COUNTED_MX_E3M2: _exact_blocks(E3M2, 2.8e-3),
}

_LEAST_TOKEN = 2.0**-14  # of the mean energy: a smaller token counts as part of one
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def product_error(
    a: tuple[Tensor, Tensor | None, Format],
    b: tuple[Tensor, Tensor | None, Format],
    counted: tuple[int, int],
    probe: int = 0,
    of_tokens: bool = False,
) -> Tensor:
    """(error of anchoring, error of the formats) of a GEMM a b^T: fp32 [2], mean squares.

    a, b:       (codes uint8 [outer, contraction], scales of runs [runs, outer rounded up to 4] or
                None, format of the operand).
    counted:    how each operand counts (`counted_as`), or NOT_COUNTED.
    probe:      selects 64 lines of each operand, at the fractions of multiples of the golden ratio.
    of_tokens:  the lines of a are tokens; else channels, as are the lines of b.

    A subnormal code is on a grid of the least step s: anchoring may have lost s^2 / 12. Codes of
    smaller elements are exact in blocks with a large enough code (`_EXACT`). The loss of a line of
    a is the sum over k of lost_a[k] all_b[k] + all_a[k] lost_b[k], where lost is the mean square of
    the loss and all the square of the value; those of b are means over its lines, each relative to
    the energy of the line. The errors of the formats are a constant share of all_a[k] all_b[k].
    Lines of a that are not all zero have equal weights, each relative to the sum of both errors;
    then the same for lines of b. Tokens far below the mean energy weigh less, because those without
    a gradient hold only noise.
    """
    energies = [_energies(*operand, kind, probe) for operand, kind in zip((a, b), counted)]
    format_error = sum(
        _EXACT[kind].own_error if kind in _EXACT else _OWN_ERROR[fmt.element.name]
        for (_, _, fmt), kind in zip((a, b), counted)
    )

    def weighed(lines: Tensor, by: Tensor, of_tokens: bool) -> Tensor:
        """Sum over `lines` [lines, k], each divided by its entry of `by` [lines]; lines with 0 are
        left out."""
        least = by.double().mean().float() * (_LEAST_TOKEN if of_tokens else 0.0)
        return (lines * torch.where(by > 0, 1 / by.maximum(least), 0).unsqueeze(1)).sum(0).double()

    def of_lines(
        tokens: tuple[bool, bool], all_a: Tensor, lost_a: Tensor, all_b: Tensor, lost_b: Tensor
    ) -> Tensor:
        energy = all_b.sum(1)
        all_b, lost_b = (weighed(t, energy, tokens[1]) for t in (all_b, lost_b))
        errors = format_error * all_a * all_b + lost_a * all_b + all_a * lost_b
        both = errors.sum(1).float() * (all_a.sum(1) > 0)
        all_a, lost_a = (weighed(t, both, tokens[0]) for t in (all_a, lost_a))
        anchoring = (lost_a * all_b + all_a * lost_b).sum()
        return torch.stack((anchoring, format_error * (all_a * all_b).sum()))

    of_a, of_b = energies
    return (
        of_lines((of_tokens, False), *of_a, *of_b) + of_lines((False, of_tokens), *of_b, *of_a)
    ).float()


def _energies(
    data: Tensor, scale: Tensor | None, fmt: Format, counts: int, probe: int
) -> tuple[Tensor, Tensor]:
    """(squares of the values, mean squares of what anchoring may have lost) of the lines of a
    probe."""
    numbers = range(probe * _PROBED_LINES + 1, probe * _PROBED_LINES + _PROBED_LINES + 1)
    rows = [(i * _GOLDEN % 2**64) * len(data) >> 64 for i in numbers]
    lines = torch.tensor(rows, dtype=torch.int64, device=data.device)
    values = decode_codes(data[lines], fmt, data.shape[1])
    step = torch.full_like(values, 2.0 ** (fmt.element.emin - fmt.element.mantissa))
    if fmt.block[1] is not None and scale is not None:
        along = scale[:, lines].t().repeat_interleave(fmt.block[1], 1)[:, : data.shape[1]]
        values, step = values * along, step * along
    exponent = 0x80 - (1 << fmt.element.mantissa)
    lost = (data[lines] & exponent == 0) & (counts != NOT_COUNTED)
    if counts in _EXACT:
        block, least, _ = _EXACT[counts]
        largest = (
            F.pad(data[lines] & 0x7F, (0, -data.shape[1] % block)).unflatten(1, (-1, block)).amax(2)
        )
        lost &= (largest < least).repeat_interleave(block, 1)[:, : data.shape[1]]
    return values**2, lost * step**2 / 12

# SPDX-License-Identifier: Apache-2.0
"""Run Adam over many tensors in one launch. Mirrors csrc/api/optim.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import ROWWISE, Encoding, round_up
from .encoding import EncodingShapes, encoding_shapes, is_available_for, pack_encoding
from .quantization import call_of

_ops = torch.ops.fsdp_quant


def adam_takes(*tensors: Tensor | None) -> bool:
    """Return whether `adam` accepts these tensors of a parameter: contiguous, fp32, bf16 or uint8,
    on a device that runs kernels."""
    kinds = torch.float32, torch.bfloat16, torch.uint8
    return all(
        t is None or (is_available_for(t) and t.is_contiguous() and t.dtype in kinds)
        for t in tensors
    )


class AdamStep(NamedTuple):
    """Arguments of one Adam step over parameters of one device, whose gradients share a dtype and
    whose moments share a dtype.

    master:         fp32, or remainders.
    first, second:  moments, or their codes.
    row:            for each parameter, its row of `scalars`.
    scalars:        fp32 [rows, 8].
    grad_scale:     fp32 [1]; gradients are divided by it.
    found_inf:      fp32 [1]; if it is not 0, nothing is changed.
    """

    master: Sequence[Tensor]
    grad: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    row: Sequence[int]
    scalars: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def on_device(self) -> AdamStep:
        """Move `scalars`, `grad_scale` and `found_inf` to the device of the parameters."""
        device = self.master[0].device

        def here(t: Tensor) -> Tensor:
            return t.to(device, torch.float32, non_blocking=True)

        scale, found_inf = (t if t is None else here(t) for t in (self.grad_scale, self.found_inf))
        return self._replace(scalars=here(self.scalars), grad_scale=scale, found_inf=found_inf)


def adam(
    step: AdamStep,
    rounded: Sequence[Tensor] = (),
    first_scale: Sequence[Tensor] = (),
    second_scale: Sequence[Tensor] = (),
) -> None:
    """Step many parameters in place, in one launch (csrc/optim/adam.cu).

    rounded:  bf16 parameters, for all masters or for none. Each is its fp32 master rounded, or
              complements a master that is a remainder (uint8 [.., 2]).
    first_scale, second_scale:  fp32 [rows, blocks], scales of moments that are codes
                                (`compact.encode`), for all or for none.
    """
    master, grad, first, second, row, *read = step.on_device()
    _ops.adam(master, grad, first, second, rounded, first_scale, second_scale, row, *read)
    torch.autograd.graph.increment_version(
        [*master, *first, *second, *rounded, *first_scale, *second_scale]
    )


def _adam_group(
    step: AdamStep,
    encodings: Sequence[Encoding],
    row0: Sequence[int],
    statistics: bool,
    out: list[Tensor],
) -> None:
    _ops.adam_group(*step.on_device(), *call_of(tuple(encodings))[:4], row0, statistics, out)
    torch.autograd.graph.increment_version([*step.master, *step.first, *step.second])


def adam_codes(
    step: AdamStep,
    encodings: Sequence[Encoding],
    row0: Sequence[int],
    into: Sequence[Sequence[tuple | None]],
) -> list[list[tuple[Tensor, Tensor]]]:
    """Step masters [rows, cols] as `adam` does, and quantize the new values, rounded to bf16, in
    one launch. Returns (data, scale) for each master and encoding.

    encodings:  one per direction, rowwise first. They have 8 bits, and scales that need no earlier
                pass over the tensor.
    into:       for each master and encoding, the buffers to write; None: allocate them.
    """
    codes = []
    for x, start, targets in zip(step.master, row0, into):
        codes.append([])
        for e, buffers in zip(encodings, targets):
            if buffers is None:
                shapes = _shapes(e, x, start)
                buffers = (
                    x.new_empty(shapes.data, dtype=torch.uint8),
                    x.new_empty(shapes.scale, dtype=shapes.scale_dtype),
                )
            codes[-1].append(buffers)
    flat = [t for per_master in codes for buffers in per_master for t in buffers]
    _adam_group(step, encodings, row0, False, flat)
    return codes


def _shapes(e: Encoding, x: Tensor, row0: int) -> EncodingShapes:
    return encoding_shapes(pack_encoding(e), e.direction is not ROWWISE, x.shape, row0)


def adam_statistics(
    step: AdamStep,
    encodings: Sequence[Encoding],
    row0: Sequence[int],
    blocks: Sequence[Sequence[bool]],
) -> list[list[tuple[Tensor | None, Tensor | None]]]:
    """Step masters [rows, cols] as `adam` does, and compute statistics of the new values, rounded
    to bf16, in one launch. Returns (amax, tensor_amax or None) for each master and encoding.

    encodings:  one per direction, rowwise first.
    blocks:     for each master and encoding, whether to return its amax; else it is None.
    """
    shapes: list[tuple[int, ...]] = []
    for x, start, returned in zip(step.master, row0, blocks):
        for e, is_returned in zip(encodings, returned):
            shapes.append(_shapes(e, x, start).amax if is_returned else (0, 0))
            shapes += [(1, 1)] if e.fmt.tensor_scale else []
    offsets = [0, *accumulate(round_up(prod(shape), 4) for shape in shapes)]
    zeros = step.master[0].new_zeros(offsets[-1])
    out = [zeros.as_strided(s, (s[1], 1), start) for s, start in zip(shapes, offsets)]
    _adam_group(step, encodings, row0, True, out)
    amaxes = iter(out)
    results = []
    for returned in blocks:
        results.append([])
        for e, is_returned in zip(encodings, returned):
            amax, tensor_amax = next(amaxes), next(amaxes) if e.fmt.tensor_scale else None
            tensor_amax = None if tensor_amax is None else tensor_amax.view(1)
            results[-1].append((amax if is_returned else None, tensor_amax))
    return results


def adam_count(
    steps: Sequence[Tensor],
    found_inf: Tensor | None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
) -> Tensor:
    """Add 1 - found_inf to every fp32 [] of `steps`. Returns the scalars of each
    (`fused_adam.SCALARS`), fp32 [steps, 8]."""
    device = steps[0].device
    found_inf = None if found_inf is None else found_inf.to(device, torch.float32)
    on_device = None
    if isinstance(lr, Tensor):
        on_device, lr = lr.to(device, torch.float32), 0.0
    rows = _ops.adam_count(steps, found_inf, on_device, lr, beta1, beta2, eps, decay, decoupled)
    torch.autograd.graph.increment_version(steps)
    return rows

# SPDX-License-Identifier: Apache-2.0
"""`receipt()`: count what ran since the last `reset_receipt()`, from counters on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..counters import counters
from ..models.convert import CONVERTED
from ..models.set_recipe import converted_units


@dataclass(frozen=True)
class Receipt:
    """Counts of one rank.

    gemms:       (domain, a, b) -> number of GEMMs.
    gathers:     (pass, direction, format) -> bytes of all-gather outputs of quantized weights.
    quantize:    (format, direction, implementation) -> number of tensors.
    collectives: purpose -> number of amax all-reduces.
    sequence:    (pass, direction, format) -> bytes of activations and gradients gathered along the
                 sequence.
    dispatch:    (pass, direction, format) -> bytes of tokens that this rank sent to experts and
                 received back ("sum").
    departures:  kind -> number of deviations from the plan (strict=False).
    moved:       (module, product, from, to and reason) of GEMMs that the underflow guard of
                 anchored layouts moved to another domain.
    gradients:   (pass, to owners of "shards" or between "replicas", format) -> bytes of gradients
                 that this rank sent, its own part included (`fq.set_gradient_reduction`).
    idle:        converted layers whose forward did not run in eager mode, of models of which
                 another layer's did: a trainer multiplies their weights itself, or nobody does.
    """

    gemms: dict
    gathers: dict
    quantize: dict
    collectives: dict
    sequence: dict
    dispatch: dict
    departures: dict
    moved: dict
    idle: tuple[str, ...] = field(default=(), kw_only=True)
    gradients: dict = field(default_factory=dict, kw_only=True)

    @property
    def gathered_bytes(self) -> int:
        """Sum the bytes of all-gather outputs of quantized weights."""
        return sum(self.gathers.values())

    def __str__(self) -> str:
        lines = [
            f"gemm     {n:>12,}  {domain}: {a} x {b}"
            for (domain, a, b), n in sorted(self.gemms.items())
        ]
        lines += _byte_lines("gather", self.gathers) + _byte_lines("gradient", self.gradients)
        lines += [
            f"quantize {n:>12,}  {fmt} {d} ({how})"
            for (fmt, d, how), n in sorted(self.quantize.items())
        ]
        lines += [
            f"amax all-reduce {n:>5,}  {kind}" for kind, n in sorted(self.collectives.items())
        ]
        lines += _byte_lines("sequence", self.sequence) + _byte_lines("dispatch", self.dispatch)
        lines += [f"departure {n:>11,}  {kind}" for kind, n in sorted(self.departures.items())]
        lines += [
            f"moved: {module} {product}, {why}" for module, product, why in sorted(self.moved)
        ]
        lines += [
            f"did not run: {name}, whose weight others multiply in high precision, if any do; "
            f"leave it out of fq.convert (skip=[{name!r}])"
            for name in self.idle
        ]
        return "\n".join(lines) or "nothing ran"


def _byte_lines(kind: str, counts: dict) -> list[str]:
    return [
        f"{kind:8} {n:>12,} B  {phase} {d} {fmt}" for (phase, d, fmt), n in sorted(counts.items())
    ]


def receipt() -> Receipt:
    """Return the counts of this rank since the last `reset_receipt()`.

    >>> fq.reset_receipt()
    >>> y = fq.Linear(64, 32, recipe=fq.recipes.mxfp8())(torch.ones(2, 64))
    >>> fq.receipt().gemms
    {('reference', 'mxfp8', 'mxfp8'): 1}
    """
    kinds = ["gemm", "gather", "quantize", "amax all-reduce", "sequence gather", "expert dispatch"]
    kinds += ["departure", "moved"]
    return Receipt(*map(counters.of, kinds), idle=tuple(_idle()), gradients=counters.of("gradient"))


def _idle() -> Iterator[str]:
    for model in () if counters.has_graphs else list(CONVERTED):
        units = converted_units(model).items()
        idle = [n for n, ms in units if all(m.runtime.last_run != counters.epoch for m in ms)]
        if len(idle) < len(units):
            yield from idle


def reset_receipt() -> None:
    """Start counting from zero.

    >>> fq.reset_receipt()
    >>> fq.receipt().gemms
    {}
    """
    counters.reset()

# SPDX-License-Identifier: Apache-2.0
"""`receipt()`: count what ran since the last `reset_receipt()`, from counters on the host."""

from __future__ import annotations

from dataclasses import dataclass

from ..counters import counters


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
    """

    gemms: dict
    gathers: dict
    quantize: dict
    collectives: dict
    sequence: dict
    dispatch: dict
    departures: dict
    moved: dict

    @property
    def gathered_bytes(self) -> int:
        """Sum the bytes of all-gather outputs of quantized weights."""
        return sum(self.gathers.values())

    def __str__(self) -> str:
        lines = [
            f"gemm     {n:>12,}  {domain}: {a} x {b}"
            for (domain, a, b), n in sorted(self.gemms.items())
        ]
        lines += _byte_lines("gather", self.gathers)
        lines += [
            f"quantize {n:>12,}  {fmt} {d} ({how})"
            for (fmt, d, how), n in sorted(self.quantize.items())
        ]
        lines += [
            f"amax all-reduce {n:>5,}  {what}" for what, n in sorted(self.collectives.items())
        ]
        lines += _byte_lines("sequence", self.sequence) + _byte_lines("dispatch", self.dispatch)
        lines += [f"departure {n:>11,}  {what}" for what, n in sorted(self.departures.items())]
        lines += [
            f"moved: {module} {product}, {why}" for module, product, why in sorted(self.moved)
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
    kinds = (
        "gemm",
        "gather",
        "quantize",
        "amax all-reduce",
        "sequence gather",
        "expert dispatch",
        "departure",
        "moved",
    )
    return Receipt(*map(counters.of, kinds))


def reset_receipt() -> None:
    """Start counting from zero.

    >>> fq.reset_receipt()
    >>> fq.receipt().gemms
    {}
    """
    counters.reset()

"""What really ran, counted on the host: quantizations, GEMMs by domain, bytes by collective, fall-backs.

Counting is a dictionary increment; `inspection/receipt.py` prints it.
"""

from __future__ import annotations

from collections import Counter, defaultdict


class Counters:
    """Named counters; a key is (what, detail) with a hashable detail."""

    def __init__(self):
        self._counts: dict[str, Counter] = defaultdict(Counter)

    def add(self, what: str, detail: object, amount: int = 1) -> None:
        self._counts[what][detail] += amount

    def of(self, what: str) -> dict[object, int]:
        """A copy of the counts of one kind."""
        return dict(self._counts.get(what, ()))

    def total(self, what: str) -> int:
        return sum(self._counts.get(what, {}).values())

    def reset(self) -> None:
        self._counts.clear()


counters = Counters()

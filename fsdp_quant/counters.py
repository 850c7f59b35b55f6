# SPDX-License-Identifier: Apache-2.0
"""What really ran, counted on the host: quantizations, GEMMs by domain, bytes by collective,
fall-backs.

Counting is a dictionary increment; `inspection/receipt.py` prints it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator


class Counters:
    """Named counters; a key is (what, detail) with a hashable detail.

    epoch:    number of `reset`s.
    has_graphs:  layers were traced: which of them run then is not known here.
    sources:  asked for (what, detail, amount) since they were asked last, before anything is read:
              compiled code counts for itself.
    """

    def __init__(self):
        self._counts: dict[str, Counter] = defaultdict(Counter)
        self.epoch, self.has_graphs = 0, False
        self.sources: list[Callable[[], Iterable[tuple[str, object, int]]]] = []

    def add(self, what: str, detail: object, amount: int = 1) -> None:
        self._counts[what][detail] += amount

    def add_each(self, what: str, details: Iterable[object]) -> None:
        """Count each of them once."""
        self._counts[what].update(details)

    def _ask(self) -> None:
        for source in self.sources:
            for what, detail, amount in source():
                if amount:
                    self.add(what, detail, amount)

    def of(self, what: str) -> dict[object, int]:
        """A copy of the counts of one kind."""
        self._ask()
        return dict(self._counts.get(what, ()))

    def total(self, what: str) -> int:
        self._ask()
        return sum(self._counts.get(what, {}).values())

    def reset(self) -> None:
        self._ask()
        self._counts.clear()
        self.epoch += 1

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the counts as they are: what runs inside only finds out shapes."""
        before = {what: counts.copy() for what, counts in self._counts.items()}
        try:
            yield
        finally:
            self._counts.clear()
            self._counts.update(before)


counters = Counters()

# SPDX-License-Identifier: Apache-2.0
"""What really ran, counted on the host: quantizations, GEMMs by domain, bytes by collective,
fall-backs.

Counting is a dictionary increment; `inspection/receipt.py` prints it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor


def bytes_of(t: Tensor) -> int:
    """`t.nbytes`, which a traced tensor of symbolic lengths does not have."""
    return t.numel() * t.itemsize


class Counters:
    """Named counters; a key is (name, detail) with a hashable detail.

    epoch:    number of `reset`s.
    has_graphs:  layers were traced: which of them run then is not known here.
    sources:  return (name, detail, amount) since their last call; called before anything is read,
              because compiled code counts for itself.
    """

    def __init__(self):
        self._counts: dict[str, Counter] = defaultdict(Counter)
        self._lists: Counter[tuple[str, tuple]] = Counter()  # of `add_each`, not counted yet
        self.epoch, self.has_graphs = 0, False
        self.sources: list[Callable[[], Iterable[tuple[str, object, int]]]] = []

    def add(self, name: str, detail: object, amount: int = 1) -> None:
        self._counts[name][detail] += amount

    def add_each(self, name: str, details: tuple) -> None:
        """Count each detail once."""
        self._lists[name, details] += 1

    def _ask(self) -> None:
        lists, self._lists = self._lists, Counter()
        for (name, details), times in list(lists.items()):  # to which another thread may add
            for detail in details:
                self.add(name, detail, times)
        for source in self.sources:
            for name, detail, amount in source():
                if amount:
                    self.add(name, detail, amount)

    def of(self, name: str) -> dict[object, int]:
        """Return a copy of the counts of one kind."""
        self._ask()
        return dict(self._counts.get(name, ()))

    def total(self, name: str) -> int:
        return sum(self.of(name).values())

    def reset(self) -> None:
        self._ask()
        self._counts.clear()
        self.epoch += 1

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the counts as they are: the code inside runs only for its shapes."""
        before = {name: counts.copy() for name, counts in self._counts.items()}
        lists = self._lists.copy()
        try:
            yield
        finally:
            self._counts.clear()
            self._counts.update(before)
            self._lists = lists


counters = Counters()

# SPDX-License-Identifier: Apache-2.0
"""Counts that are listed, and counted when somebody reads them."""

from __future__ import annotations

from fsdp_quant.counters import Counters


class _Detail:
    """Adds to the counters while it is counted, as the thread of a backward does."""

    def __init__(self, counters: Counters):
        self.counters, self.is_read = counters, False

    def __hash__(self) -> int:
        if self.is_read:
            self.is_read = False
            self.counters.add_each("encode", ("a", "late"))
        return 1


def test_counts_are_read_while_a_thread_adds_to_them():
    """If false, a thread that logs `fq.receipt` fails in a training step, or counts lists twice."""
    counters = Counters()
    detail = _Detail(counters)
    counters.add_each("encode", ("a", detail))
    counters.add_each("encode", ("a", "b"))
    detail.is_read = True
    assert counters.of("encode")["a"] == 2, "a list that was added is of the next reading"
    assert counters.of("encode") == {"a": 3, "b": 1, "late": 1, detail: 1}


def test_lists_of_uncounted_code_leave_the_counts():
    """If false, a trace that reads counts adds its own, or takes what was listed before it."""
    counters = Counters()
    counters.add_each("encode", ("a", "b"))
    with counters.uncounted():
        counters.add_each("encode", ("a", "c"))
        assert counters.of("encode") == {"a": 2, "b": 1, "c": 1}
        counters.add_each("encode", ("a", "c"))
    assert counters.of("encode") == {"a": 1, "b": 1}
    counters.add_each("encode", ("a",))
    counters.reset()
    assert counters.total("encode") == 0

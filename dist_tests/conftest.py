# SPDX-License-Identifier: Apache-2.0
"""What every test begins with."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dist_tests.laws import kept_step


@pytest.fixture(autouse=True)
def _kept_step() -> Iterator[None]:
    """No test counts the steps of the next one, or names its layers."""
    with kept_step():
        yield


def pytest_collection_finish() -> None:
    """Modules and collected tests are no garbage: a collection reads what tests allocate, which
    takes milliseconds instead of half a second."""
    gc.collect()
    gc.freeze()

# SPDX-License-Identifier: Apache-2.0
"""Every kernel and product is clean under every tool of compute-sanitizer."""

from __future__ import annotations

import os

import pytest

from dist_tests.kernels import expected, sanitizers

WHY_NOT = expected.WHY_NOT or (None if sanitizers.executable() else "there is no compute-sanitizer")
if os.environ.get("FSDP_QUANT_SANITIZERS") != "1":
    WHY_NOT = WHY_NOT or "takes many minutes; FSDP_QUANT_SANITIZERS=1 runs it"
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


@pytest.mark.slow
@pytest.mark.parametrize("tool, part", sanitizers.RUNS)
def test_kernels_are_clean(tool: str, part: str):
    """If false, a kernel reads or writes what is not its own, races, reads what nothing wrote, or
    misuses a barrier."""
    errors, status, text = sanitizers.sanitize(tool, part)
    assert (errors, status) == (0, 0), text[-4000:]

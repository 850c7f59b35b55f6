# SPDX-License-Identifier: Apache-2.0
"""Recipe x module x backward mode on a GPU: every layer is its definition, whatever multiplies
it."""

from __future__ import annotations

import itertools

import pytest

from dist_tests.kernels import expected
from dist_tests.laws import sample
from dist_tests.single.recipe_table import (
    CUSTOM,
    EXACT,
    GPU,
    HYBRIDS,
    MODES,
    MODULES,
    NAMED,
    SWITCHED,
    check_cell,
    check_token_local,
)

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")


@pytest.mark.parametrize(
    "recipe, module, mode",
    [
        *itertools.product([*NAMED, *CUSTOM, *EXACT], MODULES, MODES),
        *itertools.product(SWITCHED, MODULES, [None]),
        *sample([*itertools.product(HYBRIDS, MODULES, MODES)]),
    ],
)
def test_a_cell_is_its_definition(recipe: str, module: str, mode: str | None):
    """If false, a recipe or a backward mode is another one on a GPU."""
    check_cell(recipe, module, mode, GPU)


@pytest.mark.parametrize("accuracy", ["fast", "token"])
@pytest.mark.parametrize("recipe", [*NAMED, *HYBRIDS])
def test_tokens_depend_on_each_other_where_the_table_says(recipe: str, accuracy: str):
    """If false, a packed sequence, a policy or a batch of an evaluation changes with its neighbours
    under a recipe that `fq.recipes.table()` calls token-local."""
    check_token_local(recipe, accuracy, GPU)

"""Recipe x module x backward mode: a test behind each cell of the README's table, on the CPU and as a Hopper GPU runs it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from dist_tests.laws import sample
from dist_tests.single import hopper
from dist_tests.single.recipe_table import CUSTOM, GPU, HYBRIDS, MODES, MODULES, NAMED, check_cell, table
from fsdp_quant.context import STEP

CELLS = list(itertools.product([*NAMED, *CUSTOM], MODULES, MODES))
OF_PAIRS = list(itertools.product(HYBRIDS, MODULES, MODES))
ON_HOPPER = list(itertools.product(CUSTOM, MODULES, MODES)) + list(itertools.product([*NAMED, *HYBRIDS], MODULES, MODES))


@pytest.fixture(autouse=True)
def _own_step():
    """Tensors this small are four times faster on one thread."""
    kept, threads = {k: v for k, v in STEP.__dict__.items() if k != "_devices"}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    STEP.__dict__.update(kept)
    STEP.publish()


@pytest.mark.parametrize("recipe, module, mode", CELLS + sample(OF_PAIRS))
def test_a_cell_is_its_definition(recipe: str, module: str, mode: str | None):
    """If false, a module multiplies, keeps or quantizes something else than its recipe and backward mode say."""
    check_cell(recipe, module, mode)


@pytest.mark.parametrize("recipe, module, mode", sample(ON_HOPPER, 23))
def test_a_cell_is_its_definition_in_compiled_steps(recipe: str, module: str, mode: str | None):
    """If false, a recipe is another one on a GPU alone: rounded, anchored or decoded otherwise."""
    with hopper.emulated():
        check_cell(recipe, module, mode, GPU._replace(device="cpu"))


def test_the_readme_has_the_table():
    """If false, the README promises a cell that no test is behind, or hides one."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert table() in readme, f"README.md wants this table of recipes:\n{table()}"

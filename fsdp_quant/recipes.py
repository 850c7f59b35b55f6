# SPDX-License-Identifier: Apache-2.0
"""`fq.recipes`: named recipes, by layer and by step.

A recipe is a value: `fq.convert` and `fq.set_recipe` accept it, or the text that names it.

>>> fq.recipes.by_name("mxfp8/nvfp4") == fq.recipes.hybrid("mxfp8", "nvfp4")
True
"""

from dataclasses import replace

from . import recipe as _definitions
from .families import family_of
from .linear.plan import build_plan
from .qat import qat
from .recipe import *  # noqa: F403
from .recipe_options import switches_of
from .roles import QUANTIZED_TYPES, Role

__all__ = ["is_token_local", "qat", "table"]
__all__ += _definitions.__all__


def table() -> str:
    """Return the named recipes as a table in Markdown: the quantizers of their slots, rowwise /
    columnwise, whether tokens depend on each other (`is_token_local`), and their switches
    with the values that these have, the default first.

    >>> print(fq.recipes.table().splitlines()[0][:14])
    | recipe       |
    """
    rows: list[tuple[str, ...]] = [("recipe", *QUANTIZED_TYPES, "token-local", "switches")]
    for name in _definitions.NAMED:
        if name == "hybrid":
            rows.append(("hybrid(F, B)", "F / B", "F / B", "B", "as F; dx as B", "of F and B"))
            continue
        recipe = _definitions.by_name(name, backward_override=None)
        slots = (str(recipe.hybrid(Role("linear", slot))) for slot in QUANTIZED_TYPES)
        rows.append((f"{name}()", *slots, _shown_locality(recipe), _shown_switches(recipe)))
    rows.append(("qat(W)", "mxfp8", "W", "mxfp8", _shown_locality(qat("mxfp4")), "of W and mxfp8"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = (" | ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def is_token_local(recipe: _definitions.Recipe, gradients: bool = False, **changes) -> bool:
    """Return whether outputs of a token of a linear layer (gradients: input gradients) depend on no
    other token of the call, on whichever device. changes: of the recipe's options.

    >>> fq.recipes.is_token_local(fq.recipes.mxfp8(accuracy="token"))
    True
    """
    return build_plan(replace(recipe, **changes), "layer").is_token_local(gradients)


def _shown_locality(recipe: _definitions.Recipe) -> str:
    on_demand = 'with accuracy="token"' if is_token_local(recipe, accuracy="token") else "no"
    return "yes" if is_token_local(recipe) else on_demand


def _shown_switches(recipe: _definitions.Recipe) -> str:
    arguments = dict(recipe.arguments)
    families = family_of(str(arguments["forward"])), family_of(str(arguments["backward"]))
    shown = []
    for name, values in switches_of(*families).items():
        first = arguments.get(name, values[0])
        ordered = [first, *(v for v in values if v != first)]
        shown.append(f"{name} {' or '.join(map(str, ordered))}")
    return "; ".join(shown)


def __getattr__(name: str) -> object:
    """Return a name that `fq.recipes` had when it was the module `fsdp_quant.recipe`."""
    return getattr(_definitions, name)

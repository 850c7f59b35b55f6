# SPDX-License-Identifier: Apache-2.0
"""`fq.recipes`: named recipes, by layer and by step.

A recipe is a value: `fq.convert` and `fq.set_recipe` accept it, or the text that names it.

>>> fq.recipes.by_name("mxfp8/nvfp4") == fq.recipes.hybrid("mxfp8", "nvfp4")
True
"""

from . import recipe as _definitions
from .recipe import *  # noqa: F403
from .recipe import __all__ as __all__


def __getattr__(name: str) -> object:
    """Return a name that `fq.recipes` had when it was the module `fsdp_quant.recipe`."""
    return getattr(_definitions, name)

# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, which `fsdp_quant/__init__.py` imports at the first use of
one.

On top stands what a first training run needs; the rest is in `fq.numerics`, `fq.steps` and
`fq.inspection`. `ALIASES` has the names that were on top before.
"""

import fsdp_quant.checkpoint as checkpoint
import fsdp_quant.hooks as hooks
import fsdp_quant.inspection as inspection
import fsdp_quant.integrations as integrations
import fsdp_quant.memory as memory
import fsdp_quant.numerics as numerics
import fsdp_quant.optim as optim
import fsdp_quant.parallel as parallel
import fsdp_quant.recipes as recipes
import fsdp_quant.steps as steps

from .context import autocast, quantized_model_init
from .gemm import StaleWeightError
from .inspection.advise import advise
from .inspection.plan import plan
from .inspection.receipt import receipt
from .inspection.recorder import inspect
from .modules.convert import convert
from .modules.fuse import MLPPattern, NormPattern
from .modules.graphed import graphed
from .modules.grouped_linear import GroupedLinear
from .modules.hold import freeze, hold, unfreeze
from .modules.layernorm_linear import LayerNormLinear
from .modules.layernorm_mlp import LayerNormMLP
from .modules.linear import Linear
from .modules.norm import Norm
from .modules.set_recipe import set_recipe
from .modules.training_state import load_state_dict, state_dict
from .modules.training_steps import begin_step
from .modules.unconvert import unconvert
from .recipe import Recipe
from .recipe import custom as CustomRecipe
from .serving.export import export
from .serving.load import from_pretrained_quantized
from .serving.refit import refit

__all__ = [
    "CustomRecipe",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MLPPattern",
    "Norm",
    "NormPattern",
    "Recipe",
    "StaleWeightError",
    "advise",
    "autocast",
    "begin_step",
    "checkpoint",
    "convert",
    "export",
    "freeze",
    "from_pretrained_quantized",
    "graphed",
    "hold",
    "hooks",
    "inspect",
    "inspection",
    "integrations",
    "load_state_dict",
    "memory",
    "numerics",
    "optim",
    "parallel",
    "plan",
    "quantized_model_init",
    "receipt",
    "recipes",
    "refit",
    "set_recipe",
    "state_dict",
    "steps",
    "unconvert",
    "unfreeze",
]

ALIASES = {
    name: getattr(namespace, name)
    for namespace, names in (
        (numerics, numerics.__all__),
        (steps, steps.__all__),
        (inspection, ["reset_receipt"]),
    )
    for name in names
}
NAMES = ALIASES | {name: globals()[name] for name in __all__}

# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, which `fsdp_quant/__init__.py` imports at the first use of
one: `NAMES` of a first training run. The rest is in `fq.numerics`, `fq.steps` and `fq.inspection`;
`ALIASES` has the names that were on top before."""

# ruff: noqa: F401

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
from .inspection.support import is_native
from .linear.grouped_linear import GroupedLinear
from .linear.linear import Linear
from .linear.training_steps import begin_step
from .models.convert import convert
from .models.fuse import MLPPattern, NormPattern
from .models.grouped_mlp import GroupedMLP
from .models.layernorm_linear import LayerNormLinear
from .models.layernorm_mlp import LayerNormMLP
from .models.norm import Norm
from .models.set_recipe import set_recipe
from .models.te_state_dict import load_te_state_dict
from .models.unconvert import unconvert
from .recipe import Recipe
from .recipe import custom as CustomRecipe
from .serving.calibrate import calibrate
from .serving.export import export
from .serving.load import from_pretrained_quantized
from .serving.refit import refit
from .training.gradient_reduction import set_gradient_reduction
from .training.graphed import graphed
from .training.hold import freeze, hold, unfreeze
from .training.training_state import load_state_dict, state_dict

NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
ALIASES = {name: getattr(numerics, name) for name in numerics.__all__}
ALIASES |= {name: getattr(steps, name) for name in steps.__all__ if name not in NAMES}
ALIASES["reset_receipt"] = inspection.reset_receipt

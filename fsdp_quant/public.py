# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, which `fsdp_quant/__init__.py` imports at the first use of
one."""

# ruff: noqa: F401

import fsdp_quant.checkpoint as checkpoint
import fsdp_quant.hooks as hooks
import fsdp_quant.inspection as inspection
import fsdp_quant.integrations as integrations
import fsdp_quant.memory as memory
import fsdp_quant.optim as optim
import fsdp_quant.parallel as parallel
import fsdp_quant.recipe as recipes

from .context import autocast, quantized_model_init, token_offset
from .formats import COLUMNWISE, FORMATS, ROWWISE, Direction, Format, format_of
from .gemm import StaleWeightError, gemm
from .inspection.advise import advise
from .inspection.plan import plan
from .inspection.receipt import receipt, reset_receipt
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
from .modules.quantize import Quantize
from .modules.set_recipe import set_recipe
from .modules.training_state import load_state_dict, share_amaxes, state_dict
from .modules.training_steps import begin_step, skip_step, sync
from .modules.unconvert import unconvert
from .quantizer import HybridQuantizer, Quantizer
from .recipe import Recipe, Role
from .recipe import custom as CustomRecipe
from .scaling import DelayedScaling
from .serving.export import export
from .serving.load import from_pretrained_quantized
from .serving.refit import refit
from .storage import Storage
from .tensor.quantized_tensor import QuantizedTensor

NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}

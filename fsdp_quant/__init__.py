"""Low-precision training for stock PyTorch FSDP2, one format a direction. See README.md."""

from . import checkpoint, hooks, integrations, memory, optim, parallel
from . import recipe as recipes
from .context import autocast, begin_step, quantized_model_init, skip_step, sync, token_offset
from .formats import COLUMNWISE, FORMATS, ROWWISE, Direction, Format, format_of
from .gemm import StaleWeightError, gemm
from .inspection.plan import plan
from .inspection.receipt import receipt, reset_receipt
from .modules.convert import convert, set_recipe
from .modules.fuse import MLPPattern, NormPattern
from .modules.graphed import graphed
from .modules.grouped_linear import GroupedLinear
from .modules.hold import freeze, hold, unfreeze
from .modules.layernorm_linear import LayerNormLinear
from .modules.layernorm_mlp import LayerNormMLP
from .modules.linear import Linear
from .modules.norm import Norm
from .modules.quantize import Quantize
from .modules.training_state import load_state_dict, share_amaxes, state_dict
from .quantizer import HybridQuantizer, Quantizer
from .recipe import Recipe, Role
from .recipe import custom as CustomRecipe
from .scaling import DelayedScaling
from .storage import Storage
from .tensor.quantized_tensor import QuantizedTensor

__version__ = "0.1.0"

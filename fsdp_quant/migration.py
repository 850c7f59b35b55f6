# SPDX-License-Identifier: Apache-2.0
"""Names of TransformerEngine and torchao, and what to write here: the remedies of errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")

_MOMENTS = "pass moment_dtype=, which is of both moments"
_SHARED = (
    "leave it out: fq.steps.share_amaxes(model, group) shares the amaxes of activations, and "
    "fully_shard those of weights"
)
_STYLES = (
    "leave it out, and give the model to parallelize_module with styles of fq.parallel "
    "(ColwiseParallel, RowwiseParallel)"
)
_OF_LAYERS = (
    "set it on layers: an argument of fq.Linear, fq.LayerNormLinear, fq.LayerNormMLP and "
    "fq.GroupedLinear, and an attribute of each fq.Linear and fq.GroupedLinear of a converted model"
)
_TENSORWISE = "fq.recipes.fp8_current(grad_element='e5m2')"
_ROWWISE = "fq.recipes.fp8_row(pow2=True)"
# Keyword arguments there -> remedy. A name counts where the called function has no such argument.
KEYWORDS = {
    "adam_w_mode": "pass decoupled_weight_decay=",
    "amax_compute_algo": "pass use='max', or use='newest' for 'most_recent'",
    "amax_history_len": "pass length=",
    "amax_reduction_group": _SHARED,
    "calibrating": "leave it out; fq.calibrate(model, batches) measures amaxes",
    "columnwise_quantizer": "pass columnwise=, a Quantizer, a Format or its name",
    "config": f"pass a recipe: {_TENSORWISE} is 'tensorwise', {_ROWWISE} is 'rowwise'",
    "delay_wgrad_compute": _OF_LAYERS,
    "enabled": "leave it out: the context is on where it is entered; contextlib.nullcontext() is "
    "its off",
    "exp_avg_dtype": _MOMENTS,
    "exp_avg_sq_dtype": _MOMENTS,
    "ffn_hidden_size": "pass ffn_size=",
    "filter_fn": "pass skip=, which may be a function (name, module), true for what stays as it is",
    "fp8_format": "name formats by the recipe: Format.HYBRID is grad_element='e5m2' of every 8-bit "
    "recipe of fq.recipes, Format.E4M3 is grad_element='e4m3'",
    "fp8_group": _SHARED,
    "fuse_wgrad_accumulation": _OF_LAYERS,
    "fp8_recipe": "pass recipe=",
    "is_first_microbatch": "leave it out, and run the micro-batches of a step inside "
    "`with fq.hold(model):`, which quantizes each weight once",
    "m_splits": "pass splits=: a list is counts, as m_splits, and a tensor is ends (the row behind "
    "each expert's last, counts.cumsum(0))",
    "master_weight_dtype": "leave it out: masters are fp32",
    "master_weights": "leave it out: each parameter of low precision has an fp32 master",
    "module_filter_fn": "pass skip=, names, globs or classes of layers that stay as they are, "
    "'auto', or a function (name, module) that is true for those",
    "num_gemms": "pass num_experts=",
    "out": "leave it out: autograd keeps y for a backward, and cannot keep memory that its caller "
    "writes again",
    "parallel_mode": _STYLES,
    "params_dtype": "pass dtype=",
    "preserve_high_precision_init_val": "leave it out: fp32 masters start from the initial values, "
    "which no weight needs to keep",
    "return_bias": "leave it out: fq.Linear, fq.LayerNormLinear and fq.LayerNormMLP have it",
    "rowwise_quantizer": "pass rowwise=, a Quantizer, a Format or its name",
    "sequence_parallel": _STYLES,
    "tp_group": _STYLES,
}

_TORCHAO = f"{_TENSORWISE} for 'tensorwise', {_ROWWISE} for 'rowwise'"
_QAT = "fq.recipes.qat('mxfp4'), or of another format of the weights"
# Names and classes of recipes there, and of one here that wants an argument -> recipe here.
RECIPES = {
    "fp8": "'fp8_current' or 'fp8_delayed' (one scale per tensor), 'fp8_row' or 'fp8_block'",
    "fp8_tensor": "'fp8_current' or 'fp8_delayed'",
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": "a fq.CustomRecipe, as in docs/coming_from_torchao.md",
    "tensorwise": _TENSORWISE,
    "DelayedScaling": "fq.recipes.fp8_delayed(length=, margin=, use=)",
    "Float8BlockScaling": "fq.recipes.fp8_block()",
    "Float8CurrentScaling": _TENSORWISE,
    "Float8LinearConfig": _TORCHAO,
    "Float8LinearRecipeName": _TORCHAO,
    "MXFP8BlockScaling": "fq.recipes.mxfp8()",
    "MXFP8TrainingOpConfig": "fq.recipes.mxfp8()",
    "NVFP4BlockScaling": "fq.recipes.nvfp4()",
    "QATConfig": _QAT,
    "qat": _QAT,
    "bool": "a recipe; the second argument of fq.autocast is enabled",
}


def with_remedies(names: Iterable[str]) -> str:
    """Return names of keyword arguments as one text, those of another library with their remedy."""
    return ", ".join(f"{n} ({KEYWORDS[n]})" if n in KEYWORDS else n for n in names)


def recipe_remedy(value: object) -> str | None:
    """Return what to pass in place of a recipe, or a recipe's name, of another library; None for
    anything else."""
    return RECIPES.get(value if isinstance(value, str) else type(value).__name__)


def answers_keywords(target: _T) -> _T:
    """Decorate a function, or a class's `__init__` and `forward`: a keyword argument of `KEYWORDS`
    that the function does not have raises TypeError with its remedy."""
    if isinstance(target, type):
        for method in {"__init__", "forward"} & vars(target).keys():
            name = target.__name__ if method == "__init__" else f"{target.__name__}.{method}"
            setattr(target, method, _answering(vars(target)[method], name))
        return target
    return _answering(target, getattr(target, "__name__", ""))


def _answering(function, name: str):
    unknown = KEYWORDS.keys() - inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args, **kwargs):
        for keyword in kwargs:
            if keyword in unknown:
                raise TypeError(f"{name} has no {keyword}=: {KEYWORDS[keyword]}")
        return function(*args, **kwargs)

    return call

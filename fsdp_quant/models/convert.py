# SPDX-License-Identifier: Apache-2.0
"""`convert`: nn.Linear -> fq.Linear in place."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..linear.grouped_linear import GroupedLinear
from ..linear.has_weight import is_of_another_library
from ..linear.linear import EXPERT, Linear
from ..linear.passes import steps_of
from ..migration import answers_keywords
from ..recipe import PerLayer, Recipe, Schedule, as_recipe
from ..roles import Selector, selected, selectors_of, shown, some
from ..tensor import torch_compat
from ..tensor.torch_compat import unwrapped_names
from .fuse import InputPattern, MLPPattern, Pattern, fuse_forward, fused_modules, recognized
from .layernorm_mlp import RECOMPUTE
from .multihead_attention import MultiheadAttention, is_attention
from .packed_experts import are_sharded, kind_of, products_of, reason_against, take_over
from .progress import progress
from .reads import is_defined_by
from .set_recipe import (
    agree_on_recipes,
    asked_of,
    converted_units,
    follow,
    give_recipes,
    managed_weights,
    note_rules,
    of_model,
    planned_recipes,
    unchosen_units,
)
from .skip import AUTO, auto_skips, read_by_others
from .steps import converted_modules
from .transformers_masks import trust_counted_positions
from .transposed_linear import TransposedLinear, is_transposed

OURS = (Linear, GroupedLinear, TransposedLinear)
_PACKED = "grouped (modules with a weight [E, N, K])"
CONVERTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were given to `convert`


@answers_keywords
def convert(
    model: nn.Module,
    recipe: Recipe | PerLayer | Schedule | str,
    skip: Selector | Iterable[Selector] = (),
    grouped: Selector | Iterable[Selector] = (),
    fuse: bool | Pattern | Iterable[Pattern] = True,
    recompute: str | None = None,
) -> nn.Module:
    """Give every nn.Linear of `model` quantized products, in place, and the recipe to modules of
    this package that were made without one; returns `model`.

    recipe:     of all layers, or its name ("mxfp8", "mxfp8/nvfp4"); `fq.recipes.per_layer(...)`;
                or `fq.recipes.schedule(...)`, which this model then follows.
    skip:       layers that stay as they are, named or in a named module: qualified names,
                last components ("lm_head"), globs ("*.gate"), classes, or functions (module path,
                module) -> bool of the layers; "auto" adds heads, routers, tied and small layers,
                and warns which. `fq.plan` lists what each matched.
    grouped:    modules with packed experts, named likewise: a parameter `weight` [E, N, K], a
                `bias` [E, N] or none, called with (tokens sorted by expert, splits), as around
                `torch._grouped_mm`. They become `fq.GroupedLinear`.
    fuse:       True: MLPs and norms that are recognized run as fused kernels in eager mode, and
                projections of one attention quantize their input once; or patterns
                (`fq.MLPPattern`, `fq.NormPattern`) of those that do. `fq.plan` lists them. A
                module that is changed later runs its own forward.
    recompute:  "gate_up": the backward of every fused MLP computes gate(x) and up(x) again.

    Parameters stay high precision and keep their names. Works before and after `fully_shard`, which
    it reshards; with packed experts before it. docs/targets.md lists what is converted, and what
    stays as it is.

    Raises ValueError, before anything is changed, for a name or class in `skip` that matches no
    module, or in `grouped` no packed experts, a model without linear layers, a weight that is
    shared with a module that is not linear (naming both), a recipe that cannot be planned for a
    module, now or in a later step of its schedule, or a module that does not compute what its
    pattern says.

    >>> model = nn.ModuleDict({"body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 8)})
    >>> fq.convert(model, "mxfp8/nvfp4", skip=["lm_head"])["body"].__class__
    <class 'fsdp_quant.linear.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"fq.convert(model, recipe): got {model!r:.200}; wanted an nn.Module")
    recipe = as_recipe(recipe, "fq.convert")
    skip, grouped = selectors_of("fq.convert: skip", skip), selectors_of("grouped", grouped)
    gathered = torch_compat.reshard(model)
    targets = _targets(model, skip, grouped)
    experts = {n: products_of(m, n) for n, m in targets.items() if kind_of(m)}
    targets = {k: v for n, m in targets.items() for k, v in experts.get(n, {n: m}).items()}
    order = list(targets)
    recipe = of_model(recipe, order, model)
    unchosen = {n: m for n, m in unchosen_units(model).items() if n in targets}
    targets = {n: m for n, m in targets.items() if n not in unchosen}
    _check_shared(model, targets, [model.get_submodule(n) for n in experts])
    fused = _fused(model, fuse, targets, recompute)
    if isinstance(recipe, Schedule) and (before := converted_units(model).keys() - unchosen.keys()):
        raise ValueError(
            f"{some(sorted(before))} were converted before, and a schedule is of all layers; "
            "convert the others with one recipe, then fq.set_recipe(model, schedule)"
        )
    weights = {n: _weight_of(m) for n, m in targets.items()}
    for name, weight in weights.items():
        if id(weight) in gathered:
            raise ValueError(
                f"{name}.weight is gathered by an FSDP module around {type(model).__name__}; call "
                "reshard() on that module before fq.convert"
            )
        _check_weight(name, targets[name], weight)
    plain = unwrapped_names(weights)
    units = {n: _matrices(plain[n], w) for n, w in weights.items()} | asked_of(unchosen)
    recipes = planned_recipes(recipe, {n: units[n] for n in order}, steps_of(model).number)
    managed = managed_weights(unchosen)
    agree_on_recipes(model, recipe, recipes)
    if unchosen:
        give_recipes(model, unchosen, recipes, managed)
    for name, module in progress(targets.items(), "fq.convert"):
        _make_quantized(module, recipes[name], plain[name])
    _leave_fast_paths(model)
    for name, products in experts.items():
        take_over(model.get_submodule(name), list(products.values()))
    for name, pattern in fused.items():
        fuse_forward(model.get_submodule(name), pattern)
    note_rules(converted_units(model), recipe.at(steps_of(model).number))
    follow(model, recipe)
    CONVERTED.add(model)
    trust_counted_positions(model)
    return model


def convert_once(
    model: nn.Module,
    recipe: Recipe | PerLayer | Schedule | str | None,
    options: dict[str, Any],
    receiver: str,
) -> nn.Module:
    """Convert a plain model with a recipe and options of `fq.convert`; return a converted one.

    Raises ValueError, naming the receiver of the recipe, if the recipe is given twice or never.
    """
    if (recipe is None) == (not converted_modules(model)) or (recipe is None and options):
        raise ValueError(
            f"give {receiver} the recipe of a plain model, or neither recipe nor options of "
            "fq.convert for a model that it has converted"
        )
    return model if recipe is None else convert(model, recipe, **options)


def _matrices(name: str, weight: nn.Parameter) -> list[tuple[str, str, torch.device]]:
    """Return (name, type, device) of each matrix of a weight, which `planned_recipes` plans."""
    if weight.dim() != 3:
        return [(name, Linear.module_type, weight.device)]
    return [(f"{name}.{e}", EXPERT, weight.device) for e in range(len(weight))]


def _make_quantized(module: nn.Module, recipe: Recipe, name: str) -> None:
    """Give a module the class and the state of a quantized one. name: without wrappers."""
    if not isinstance(module, GroupedLinear):
        is_packed = _weight_of(module).dim() == 3
        kind = GroupedLinear if is_packed else _kind_of(_user_class(type(module)))
        module.__class__ = _converted_class(type(module), kind)
    if isinstance(module, GroupedLinear):
        module.adopt_packed([recipe] * len(module.weight), name)
    elif isinstance(module, TransposedLinear):
        module.adopt(recipe, name)
    elif isinstance(module, Linear):
        module.make_quantized(recipe, name)


def _leave_fast_paths(model: nn.Module) -> None:
    """Stop inference that reads weights without a call of their layers."""
    for module in model.modules():
        is_encoder = isinstance(module, nn.TransformerEncoderLayer)
        if is_encoder and any(isinstance(m, OURS) for m in module.modules()):
            module.activation_relu_or_gelu = 0


def _fused(
    model: nn.Module,
    fuse: bool | Pattern | Iterable[Pattern],
    targets: dict[str, nn.Module],
    recompute: str | None,
) -> dict[str, Pattern | InputPattern]:
    """Return the pattern of each fused module. All linear layers of a recognized one are
    converted."""
    RECOMPUTE.read("recompute", recompute)
    if isinstance(fuse, str):
        raise ValueError(
            f"fq.convert: fuse is {fuse!r}; wanted True, False or patterns (fq.MLPPattern, "
            "fq.NormPattern)"
        )
    patterns: dict[str, Pattern | InputPattern] = {}
    if not isinstance(fuse, bool):
        patterns |= fused_modules(model, [fuse] if isinstance(fuse, Pattern) else fuse)
    elif fuse:
        for name, pattern in recognized(model)[0].items():
            if all(f"{name}.{part}".lstrip(".") in targets for part in pattern.parts):
                patterns[name] = pattern
    if recompute is None:
        return patterns
    mlps = {n: p for n, p in patterns.items() if isinstance(p, MLPPattern)}
    if not mlps:
        raise ValueError(
            f"recompute={recompute!r} is of fused MLPs, and {type(model).__name__} has none; name "
            "them in fuse"
        )
    return patterns | {n: p._replace(recompute=recompute) for n, p in mlps.items()}


def _targets(
    model: nn.Module, skip: list[Selector], grouped: list[Selector]
) -> dict[str, nn.Module]:
    """Return the modules that become quantized, in the order of the model, by name; note in each
    other one why it stays as it is (`fq.plan`)."""
    modules = dict(model.named_modules())
    projections = {f"{n}.out_proj".lstrip(".") for n, m in modules.items() if is_attention(m)}
    linears, packed = _sorted_out(modules, projections)
    experts = {n: m for n, m in packed.items() if kind_of(m)}
    candidates = linears | experts | {n: modules[n] for n in unchosen_units(model)}
    skipped = _skipped(model, skip, candidates)
    chosen = {n for p in grouped for n in selected(_PACKED, p, packed, modules)}
    skipped |= {n for n in projections if n.rpartition(".")[0] in skipped} | _adapters(model)
    embeddings, read = ids_of_embeddings(model), read_by_others(model)
    for name, reason in read.items():
        modules[name].__dict__["_left_out"] = reason
    tied = {n for n, m in linears.items() if id(_weight_of(m)) in embeddings}
    chosen |= candidates.keys() - skipped - read.keys() - tied
    if sharded := [n for n in chosen & experts.keys() if are_sharded(experts[n])]:
        raise ValueError(
            f"{some(sorted(sharded))} are packed experts that are DTensors; call fq.convert before "
            "fully_shard, which must know both owners of their weights, or name them in skip="
        )
    if not chosen:
        raise ValueError(_nothing_to_convert(model, len(skipped), len(tied - skipped)))
    return {n: m for n, m in modules.items() if n in chosen}


def _sorted_out(
    modules: dict[str, nn.Module], projections: set[str]
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return linear layers and packed experts, by name.

    projections:  names of the output projections of nn.MultiheadAttention.
    """
    linears: dict[str, nn.Module] = {}
    packed: dict[str, nn.Module] = {}
    for name, module in modules.items():
        reason = reason_against(module)
        if _is_packed(module) or kind_of(module):
            packed[name] = module
        elif _is_linear(module, called=name not in projections):
            if _is_unchanged(module):
                linears[name] = module
            else:
                reason = "whose forward or weight is not its class's"
        if reason is not None:
            module.__dict__["_left_out"] = reason
    return linears, packed


def _nothing_to_convert(model: nn.Module, num_skipped: int, num_tied: int) -> str:
    kinds = dict.fromkeys(type(m).__name__ for m in model.modules() if m._parameters)
    text = (
        f"{type(model).__name__} has no nn.Linear to convert ({num_skipped} skipped, {num_tied} "
        "tied to an embedding)"
    )
    if before := converted_units(model):
        return (
            f"{text}: {some(before)} are quantized layers already; change their recipe with "
            "fq.set_recipe(model, recipe)"
        )
    if num_skipped and not num_tied:
        return f"{text}: those that it has are in skip=; leave one out of it"
    return (
        f"{text}; its parameters are in {some(kinds) or 'no module'}, and fq.convert takes "
        "nn.Linear, nn.MultiheadAttention, transformers' Conv1D and packed experts, whose forward "
        "and weight are their class's (docs/targets.md)"
    )


def _check_weight(name: str, module: nn.Module, weight: nn.Parameter) -> None:
    """Raise ValueError for another dtype than fp32, bf16 and fp16, and for an nn.Linear whose
    parameters are not [out, in] and [out]."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}.weight is {weight.dtype}; fq.convert takes fp32, bf16 and fp16 weights: "
            "cast the model (model.float()), or name the layer in skip="
        )
    if not isinstance(module, nn.Linear):
        return
    bias = module.bias
    if weight.dim() != 2 or weight.shape[1] != module.in_features:
        raise ValueError(
            f"{name}.weight is {list(weight.shape)}; an nn.Linear of {module.in_features} input "
            f"features multiplies [out, {module.in_features}]. Experts [E, out, in] are a module "
            "of their own, named in grouped="
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}.bias is {list(bias.shape)}; the weight {list(weight.shape)} wants "
            f"[{weight.shape[0]}]"
        )


def _skipped(model: nn.Module, patterns: list[Selector], layers: dict[str, nn.Module]) -> set[str]:
    """Names of layers that do not change. Warns of what "auto" skips."""
    skipped: set[str] = set()
    modules = dict(model.named_modules())
    for pattern in patterns:
        if pattern == AUTO:
            reasons = auto_skips(model, layers)
            for name, reason in reasons.items():
                layers[name].__dict__["_left_out"] = f"skip='auto': {reason}"
            listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items()) or "none"
            warning = f"skip='auto' leaves {len(reasons)} layers in high precision: {listed}"
            warnings.warn(warning, stacklevel=4)
            skipped.update(reasons)
        else:
            # what is not converted anyway stays as it is too
            for name in selected("skip", pattern, layers, modules, others=modules):
                layers[name].__dict__["_left_out"] = f"skip={shown(pattern)}"
                skipped.add(name)
    return skipped


def _adapters(model: nn.Module) -> set[str]:
    """Names of modules next to a `base_layer`, as PEFT's adapters are: small factors."""
    return {
        f"{wrapper}.{name}".lstrip(".")
        for wrapper, module in model.named_modules()
        if "base_layer" in module._modules
        for name, _ in module.named_modules()
        if name.split(".")[0] != "base_layer"
    }


def ids_of_embeddings(model: nn.Module) -> set[int]:
    """Of the weights that are looked up."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module has experts [E, N, K], maybe a bias [E, N], and nothing else."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if isinstance(module, GroupedLinear) or module._modules:
        return False
    if not module._parameters.keys() <= {"weight", "bias"}:
        return False
    if weight is None or is_lazy(weight) or weight.dim() != 3:
        return False
    if vars(module).get("bias") is not None:
        return False
    return bias is None or bias.shape == weight.shape[:2]


# Subclasses of nn.Linear whose own forward is the product of nn.Linear, and then the bias. Known by
# their code: data cannot prove that a forward adds nothing, as an untrained LoRA layer does not.
_PLAIN = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def _is_linear(module: nn.Module, called: bool) -> bool:
    """Return whether `module` computes exactly what `nn.Linear`, `nn.MultiheadAttention` or
    transformers' Conv1D does. called=False also accepts nn.MultiheadAttention's output projection,
    whose weight it reads itself."""
    cls = _user_class(type(module))
    if is_transposed(cls) or is_attention(module):
        return True
    if not isinstance(module, nn.Linear) or not issubclass(cls, nn.Linear):
        return False
    if is_lazy(module.weight) or issubclass(cls, Linear):
        return False
    if called and issubclass(cls, NonDynamicallyQuantizableLinear):
        return False
    return cls.forward is nn.Linear.forward or f"{cls.__module__}.{cls.__qualname__}" in _PLAIN


def _is_unchanged(module: nn.Module) -> bool:
    """Return whether nothing replaced the module's forward or weight, or computes the latter
    (accelerate, torchao, weight_norm)."""
    weight = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
    if not is_defined_by(type(module).forward, ("torch.nn.", "transformers.")):
        return False
    if "forward" in module.__dict__ or weight not in module._parameters:
        return False
    return not is_of_another_library(module._parameters[weight])


def _user_class(cls: type) -> type:
    """Return the class from which `fully_shard` derived this one."""
    return cls.__bases__[1] if issubclass(cls, FSDPModule) and len(cls.__bases__) == 2 else cls


def _converted_class(cls: type, kind: type[nn.Module]) -> type:
    """Return `kind` with what a user's class adds to nn.Linear, and what `fully_shard` adds."""
    base = _user_class(cls)
    if issubclass(kind, TransposedLinear) or (kind is Linear and base is not nn.Linear):
        kind = _with(base, kind)
    if not issubclass(cls, FSDPModule):
        return kind
    return type(
        cls.__name__, (cls.__bases__[0], kind), {"__deepcopy__": cls.__dict__["__deepcopy__"]}
    )


@functools.cache
def _with(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of both: `kind`'s forward, and whatever else the user's class `base` has. A
    forward that `base` is given later runs instead."""
    code = base.forward

    @functools.wraps(kind.forward)  # its signature
    def forward(self, *args, **kwargs):
        return (kind if base.forward is code else base).forward(self, *args, **kwargs)

    members = {
        "forward": forward,
        "_fq_changed": lambda self: None if base.forward is code else "forward",
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": _reduce,
        "converted_from": base,
    }
    metaclass: Any = type(base)
    return metaclass(base.__name__, (kind, base), members)


def _reduce(module: nn.Module, protocol: int) -> tuple:
    """Pickle a module with the user's class, from which any process derives the converted one."""
    return _rebuilt, (getattr(type(module), "converted_from"),), module.__getstate__()


def _rebuilt(base: type) -> nn.Module:
    cls = _with(base, _kind_of(base))
    return cls.__new__(cls)


def _kind_of(base: type) -> type[nn.Module]:
    """Return what a linear layer, or torch's attention, of a user's class becomes."""
    if issubclass(base, nn.MultiheadAttention):
        return MultiheadAttention
    return TransposedLinear if is_transposed(base) else Linear


def _weight_of(module: nn.Module) -> nn.Parameter:
    is_packed = isinstance(module, nn.MultiheadAttention)
    return module.get_parameter("in_proj_weight" if is_packed else "weight")


def _check_shared(
    model: nn.Module, targets: dict[str, nn.Module], experts: Sequence[nn.Module]
) -> None:
    """Raise ValueError for a weight that another kind of module has too, naming both.

    experts:  modules that may share a weight with a target.
    """
    weights = {id(_weight_of(m)): name for name, m in targets.items()}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            owner = weights.get(id(parameter))
            if owner and module not in targets.values() and module not in experts:
                raise ValueError(
                    f"{owner}.weight is shared with {name}.{attribute} ({type(module).__name__}), "
                    f"which does not multiply codes; pass skip=[{owner.rpartition('.')[2]!r}]"
                )

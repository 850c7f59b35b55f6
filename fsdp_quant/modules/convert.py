# SPDX-License-Identifier: Apache-2.0
"""`convert`: nn.Linear -> fq.Linear in place."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..recipe import PerLayer, Recipe, Schedule, as_recipe, matches
from ..tensor import torch_compat
from ..tensor.torch_compat import unwrapped_names
from .fuse import InputPattern, MLPPattern, Pattern, fuse_forward, fused_modules, recognized
from .grouped_linear import EXPERT, GroupedLinear
from .layernorm_mlp import check_recompute
from .linear import Linear
from .multihead_attention import MultiheadAttention, is_attention
from .packed_experts import are_sharded, kind_of, products_of, reason_against, take_over
from .passes import steps_of
from .progress import progress
from .reads import is_defined_by
from .set_recipe import (
    agree_on_recipes,
    asked_of,
    converted_units,
    follow,
    give_recipes,
    managed_weights,
    planned_recipes,
    unchosen_units,
)
from .skip import AUTO, auto_skips, read_by_others
from .transposed_linear import TransposedLinear, is_transposed

OURS = (Linear, GroupedLinear, TransposedLinear)
CONVERTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were given to `convert`


def convert(
    model: nn.Module,
    recipe: Recipe | PerLayer | Schedule | str,
    skip: Iterable[str] = (),
    grouped: Iterable[str] = (),
    fuse: bool | Pattern | Iterable[Pattern] = True,
    recompute: str | None = None,
) -> nn.Module:
    """Give every nn.Linear of `model` quantized products, in place, and the recipe to modules of
    this package that were made without one; returns `model`.

    recipe:   of all layers, or its name ("mxfp8", "mxfp8/nvfp4"); `fq.recipes.per_layer(...)`; or
              `fq.recipes.schedule(...)`, which this model then follows.
    skip:     modules that stay as they are: qualified names, last components ("lm_head") or globs
              ("*.gate"); "auto", by itself or among them, adds output heads, routers, tied layers
              and layers too small to gain (`modules.skip` says the rules), and warns which.
    grouped:  modules with packed experts, named likewise: a parameter `weight` [E, N, K], a `bias`
              [E, N] or none, called with (tokens sorted by expert, splits), as around
              `torch._grouped_mm`: it becomes `fq.GroupedLinear`.
    fuse:     True: MLPs and norms that are recognized run as fused kernels in eager mode, each
              proven first from the operators of its forward, and projections of one attention
              quantize their input once; or which MLPs and norms do, by `fq.MLPPattern` and
              `fq.NormPattern`. `fq.plan` says which were taken, and why others were not. A module
              that is changed later runs its own forward.
    recompute:  "gate_up": the backward of every fused MLP computes gate(x) and up(x) again.

    Parameters stay high precision and keep their names, so optimizers, clipping and checkpoints see
    what they saw. Random bits are keyed by names without wrappers (torch.compile,
    checkpoint_wrapper, DDP, PEFT), before or after the model is converted. Packed experts of
    transformers ("experts" of Mixtral, Qwen 3 MoE, DeepSeek, gpt-oss, Llama 4: `gate_up_proj` and
    `down_proj`) and of torchtitan (`w1`, `w2`, `w3`) are converted, each weight an
    `fq.GroupedLinear`, unless `fully_shard` has them: named in `grouped`, they are refused then.
    transformers' Conv1D (GPT-2) keeps its weight [in, out], which products read transposed and
    `fully_shard` gathers in high precision; it stays high precision under `fq.quantized_model_init`
    and `fq.freeze`. So does nn.MultiheadAttention, in which q, k and v of one tensor are one
    product; attention to other tensors multiplies parts of its packed weight in high precision. A
    layer whose weight is an nn.Embedding's too (a tied lm_head) stays as it is, and so does one
    whose weight a module of transformers multiplies itself (Mamba's `x_proj`, `dt_proj` and
    `out_proj`) or a loss of TRL or Liger does (a head): `fq.plan` lists them with all else that is
    multiplied in high precision. So do PEFT's adapters of a `base_layer`: convert before or after
    `get_peft_model`. Works before and after `fully_shard`, also after a forward: it reshards the
    model. Subclasses of nn.Linear keep what they add, and stay instances of their class; those with
    another forward are left alone, but for Falcon's. So are layers with a forward of their own
    (accelerate's hooks) and those whose weight is made of others (`weight_norm`, `spectral_norm`).

    Warns of a `skip` pattern that matches nothing.
    Raises ValueError, before anything is changed, for a `grouped` pattern that matches nothing, a
    model without linear layers, a weight that is shared with a module that is not linear (naming
    both), a recipe that cannot be planned for a module, now or in a later step of its schedule, or
    a module that does not compute what its pattern says.

    >>> model = nn.ModuleDict({"body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 8)})
    >>> fq.convert(model, "mxfp8/nvfp4", skip=["lm_head"])["body"].__class__
    <class 'fsdp_quant.modules.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"fq.convert(model, recipe): the model is {model!r}; wanted a torch.nn.Module"
        )
    recipe = as_recipe(recipe, "fq.convert")
    if callable(skip) or not all(isinstance(pattern, str) for pattern in skip):
        raise ValueError(
            f"fq.convert: skip is {skip!r}; it takes names and globs of layers, such as "
            "['lm_head', '*.router'], and no filter function"
        )
    grouped = [grouped] if isinstance(grouped, str) else list(grouped)
    gathered = torch_compat.reshard(model)
    targets = _targets(model, [skip] if isinstance(skip, str) else list(skip), grouped)
    experts = {n: products_of(m, n) for n, m in targets.items() if kind_of(m)}
    targets = {k: v for n, m in targets.items() for k, v in experts.get(n, {n: m}).items()}
    order = list(targets)
    unchosen = {n: m for n, m in unchosen_units(model).items() if n in targets}
    targets = {n: m for n, m in targets.items() if n not in unchosen}
    read = {n: _weight_of(m) for n, m in targets.items()}
    _check_shared(model, targets, [model.get_submodule(n) for n in experts])
    fused = _fused(model, fuse, targets, recompute)
    if isinstance(recipe, Schedule) and (before := converted_units(model).keys() - unchosen.keys()):
        raise ValueError(
            f"{_some(sorted(before))} were converted before, and a schedule is of all layers; "
            "convert the others with one recipe, then fq.set_recipe(model, schedule)"
        )
    for name, weight in read.items():
        if id(weight) in gathered:
            raise ValueError(
                f"{name}.weight is gathered by an FSDP module around {type(model).__name__}; call "
                "reshard() on that module before fq.convert"
            )
        _check_shape(name, targets[name], weight)
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name}.weight is {weight.dtype}; fq.convert takes fp32, bf16 and fp16 weights: "
                "cast the model (model.float()), or name the layer in skip="
            )
    plain = unwrapped_names(read)
    names = {
        n: [f"{plain[n]}.{e}" for e in range(len(w))] if w.dim() == 3 else [plain[n]]
        for n, w in read.items()
    }
    kinds = {n: EXPERT if w.dim() == 3 else Linear.module_type for n, w in read.items()}
    units = {n: [(name, kinds[n], read[n].device) for name in of] for n, of in names.items()}
    units |= asked_of(unchosen)
    recipes = planned_recipes(recipe, {n: units[n] for n in order}, steps_of(model).number)
    managed = managed_weights(unchosen)
    agree_on_recipes(model, recipe, recipes)
    if unchosen:
        give_recipes(model, unchosen, recipes, managed)
    for name, module in progress(targets.items(), "fq.convert"):
        if not isinstance(module, GroupedLinear):
            is_packed = read[name].dim() == 3
            kind = GroupedLinear if is_packed else _kind_of(_own_class(type(module)))
            module.__class__ = _converted_class(type(module), kind)
        if isinstance(module, GroupedLinear):
            module.adopt_packed([recipes[name]] * len(names[name]), plain[name])
        elif isinstance(module, TransposedLinear):
            module.adopt(recipes[name], plain[name])
        elif isinstance(module, Linear):
            module.make_quantized(recipes[name], plain[name])
    for module in model.modules():  # whose inference reads weights without a call of their layers
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(isinstance(m, OURS) for m in module.modules()):
                module.activation_relu_or_gelu = 0
    for name, products in experts.items():
        take_over(model.get_submodule(name), list(products.values()))
    for name, pattern in fused.items():
        fuse_forward(model.get_submodule(name), pattern)
    follow(model, recipe)
    CONVERTED.add(model)
    return model


def _fused(
    model: nn.Module,
    fuse: bool | Pattern | Iterable[Pattern],
    targets: dict[str, nn.Module],
    recompute: str | None,
) -> dict[str, Pattern | InputPattern]:
    """The pattern of each fused module. Of recognized ones all linear layers are converted."""
    check_recompute(recompute)
    if isinstance(fuse, str):
        raise ValueError(
            f"fq.convert: fuse is {fuse!r}; wanted True, False or patterns (fq.MLPPattern, "
            "fq.NormPattern)"
        )
    if isinstance(fuse, bool):
        known = recognized(model)[0] if fuse else {}
        found: dict[str, Pattern | InputPattern] = {
            n: p
            for n, p in known.items()
            if all(f"{n}.{part}".lstrip(".") in targets for part in p.parts)
        }
    else:
        found = {**fused_modules(model, [fuse] if isinstance(fuse, Pattern) else fuse)}
    if recompute is None:
        return found
    if not any(isinstance(p, MLPPattern) for p in found.values()):
        raise ValueError(
            f"recompute={recompute!r} is of fused MLPs, and {type(model).__name__} has none; name "
            "them in fuse"
        )
    return {
        n: p._replace(recompute=recompute) if isinstance(p, MLPPattern) else p
        for n, p in found.items()
    }


def _targets(model: nn.Module, skip: list[str], grouped: list[str]) -> dict[str, nn.Module]:
    linears = {
        n: m
        for n, m in model.named_modules()
        if _is_plain_linear(m) or is_transposed(_own_class(type(m))) or is_attention(m)
    }
    inside = {
        f"{n}.out_proj".lstrip("."): m.out_proj
        for n, m in linears.items()
        if isinstance(m, nn.MultiheadAttention) and is_attention(m)
    }
    linears |= {n: m for n, m in inside.items() if _is_plain_linear(m, called=False)}
    for name in [n for n, m in linears.items() if not _is_unchanged(m)]:
        linears.pop(name).__dict__["_left_out"] = "whose forward or weight is not its class's"
    packed = {name: m for name, m in model.named_modules() if _is_packed(m)}
    experts = {name: m for name, m in packed.items() if kind_of(m)}
    for module in model.modules():
        if (reason := reason_against(module)) is not None:
            module.__dict__["_left_out"] = reason
    unchosen = {n: model.get_submodule(n) for n in unchosen_units(model)}
    skipped = _skipped(model, skip, linears | experts | unchosen)
    chosen, embeddings = _matched_packed(grouped, packed), ids_of_embeddings(model)
    found = {n for n, m in linears.items() if id(_weight_of(m)) not in embeddings}
    found |= {n for n, m in experts.items() if not are_sharded(m)} | unchosen.keys()
    for name, reason in read_by_others(model).items():
        found.discard(name)
        model.get_submodule(name).__dict__["_left_out"] = reason
    skipped |= {n for n in inside if n.rpartition(".")[0] in skipped} | _adapters(model)
    targets = {
        n: m for n, m in model.named_modules() if n in chosen or (n in found and n not in skipped)
    }
    if not targets:
        raise ValueError(
            _nothing_to_convert(model, len(skipped), len(linears.keys() - found - skipped))
        )
    return targets


def _nothing_to_convert(model: nn.Module, skipped: int, tied: int) -> str:
    kinds = dict.fromkeys(type(m).__name__ for m in model.modules() if m._parameters)
    said = (
        f"{type(model).__name__} has no nn.Linear to convert ({skipped} skipped, {tied} tied to an "
        "embedding)"
    )
    if before := converted_units(model):
        return (
            f"{said}: {_some(before)} are quantized layers already; change their recipe with "
            "fq.set_recipe(model, recipe)"
        )
    if skipped and not tied:
        return f"{said}: those that it has are in skip=; leave one out of it"
    return (
        f"{said}; its parameters are in {_some(kinds) or 'no module'}, and fq.convert takes "
        "nn.Linear, nn.MultiheadAttention, transformers' Conv1D and packed experts, whose forward "
        "and weight are their class's (docstring of fq.convert)"
    )


def _check_shape(name: str, module: nn.Module, weight: nn.Parameter) -> None:
    """Raise ValueError for an nn.Linear whose parameters are not [out, in] and [out]."""
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


def _skipped(model: nn.Module, patterns: list[str], among: dict[str, nn.Module]) -> set[str]:
    """Names of layers that do not change. Warns of an idle pattern, and of what "auto" skips."""
    found = set()
    for pattern in patterns:
        if pattern == AUTO:
            reasons = auto_skips(model, among)
            for name, reason in reasons.items():
                among[name].__dict__["_left_out"] = f"skip='auto': {reason}"
            said = ", ".join(f"{name} ({reason})" for name, reason in reasons.items()) or "none"
            warnings.warn(
                f"skip='auto' leaves {len(reasons)} layers in high precision: {said}", stacklevel=4
            )
            names = set(reasons)
        elif not (names := {n for n in among if matches(pattern, n)}):
            warnings.warn(
                f"skip={pattern!r} matches no nn.Linear; the model has {_some(among)}", stacklevel=4
            )
        found |= names
    return found


def _adapters(model: nn.Module) -> set[str]:
    """Names of modules next to a `base_layer`, as PEFT's adapters are: small factors."""
    wrappers = [
        (f"{n}.".lstrip("."), m) for n, m in model.named_modules() if "base_layer" in m._modules
    ]
    return {
        f"{prefix}{n}"
        for prefix, wrapper in wrappers
        for n, _ in wrapper.named_modules()
        if n.split(".")[0] != "base_layer"
    }


def ids_of_embeddings(model: nn.Module) -> set[int]:
    """Of the weights that are looked up."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _matched_packed(patterns: list[str], among: dict[str, nn.Module]) -> set[str]:
    found = set()
    for pattern in patterns:
        names = {n for n in among if matches(pattern, n)}
        if not names:
            raise ValueError(
                f"grouped={pattern!r} matches no 3-D weight; the model has {_some(among) or 'none'}"
            )
        found |= names
    return found


def _is_packed(module: nn.Module) -> bool:
    """Experts [E, N, K], with a bias [E, N] or none, alone; or those of `kind_of`."""
    own = module._parameters
    if kind_of(module):
        return True
    weight, bias = own.get("weight"), own.get("bias")
    if isinstance(module, GroupedLinear) or module._modules or not set(own) <= {"weight", "bias"}:
        return False
    if weight is None or is_lazy(weight) or weight.dim() != 3:
        return False
    return bias is None or bias.shape == weight.shape[:2]


# Subclasses of nn.Linear whose own forward is the product of nn.Linear, and then the bias. Known by
# their code: data cannot prove that a forward adds nothing, as an untrained LoRA layer does not.
_PLAIN = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def _is_plain_linear(module: nn.Module, called: bool = True) -> bool:
    """A linear layer that multiplies as nn.Linear does: of its class, of one that has its forward,
    or of `_PLAIN`. not called: of nn.MultiheadAttention, which reads its weight."""
    cls = _own_class(type(module))
    if not isinstance(module, nn.Linear) or not issubclass(cls, nn.Linear):
        return False
    if is_lazy(module.weight) or issubclass(cls, Linear):
        return False
    if called and issubclass(cls, NonDynamicallyQuantizableLinear):
        return False
    return cls.forward is nn.Linear.forward or f"{cls.__module__}.{cls.__qualname__}" in _PLAIN


def _is_unchanged(module: nn.Module) -> bool:
    """Its forward is that of its class, which wrote it or inherits torch's, and its weights are
    parameters: neither made of others, as by weight_norm, nor read by hooks, as accelerate's."""
    weight = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
    if not is_defined_by(type(module).forward, ("torch.nn.", "transformers.")):
        return False
    return "forward" not in module.__dict__ and weight in module._parameters


def _own_class(cls: type) -> type:
    """The class from which `fully_shard` derived this one."""
    return cls.__bases__[1] if issubclass(cls, FSDPModule) and len(cls.__bases__) == 2 else cls


def _converted_class(cls: type, kind: type[nn.Module]) -> type:
    """`kind` with what a user's class adds to nn.Linear, or what `fully_shard` derives from it."""
    own = _own_class(cls)
    if issubclass(kind, TransposedLinear) or (kind is Linear and own is not nn.Linear):
        kind = _with(own, kind)
    if not issubclass(cls, FSDPModule):
        return kind
    return type(
        cls.__name__, (cls.__bases__[0], kind), {"__deepcopy__": cls.__dict__["__deepcopy__"]}
    )


@functools.cache
def _with(own: type, kind: type[nn.Module]) -> type[nn.Module]:
    """A class of both: `kind`'s forward, and whatever else the user's class has. A forward that the
    user's class is given later runs instead."""
    known = own.forward

    @functools.wraps(kind.forward)  # its signature
    def forward(self, *args, **kwargs):
        cls = kind if own.forward is known else own
        return cls.forward(self, *args, **kwargs)

    members = {
        "forward": forward,
        "_fq_changed": lambda self: None if own.forward is known else "forward",
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__reduce_ex__": _reduce,
        "converted_from": own,
    }
    return type(own)(own.__name__, (kind, own), members)


def _reduce(module: nn.Module, protocol: int) -> tuple:
    """The class is found again by the user's, in any process."""
    return _rebuilt, (getattr(type(module), "converted_from"),), module.__getstate__()


def _rebuilt(own: type) -> nn.Module:
    cls = _with(own, _kind_of(own))
    return cls.__new__(cls)


def _kind_of(own: type) -> type[nn.Module]:
    """What a linear layer, or torch's attention, of a user's class becomes."""
    if issubclass(own, nn.MultiheadAttention):
        return MultiheadAttention
    return TransposedLinear if is_transposed(own) else Linear


def _weight_of(module: nn.Module) -> nn.Parameter:
    is_packed = isinstance(module, nn.MultiheadAttention)
    return module.get_parameter("in_proj_weight" if is_packed else "weight")


def _check_shared(
    model: nn.Module, targets: dict[str, nn.Module], experts: Sequence[nn.Module]
) -> None:
    """experts: modules whose weights are those of targets."""
    weights = {id(_weight_of(m)): name for name, m in targets.items()}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            owner = weights.get(id(parameter))
            if owner and module not in targets.values() and module not in experts:
                raise ValueError(
                    f"{owner}.weight is shared with {name}.{attribute} ({type(module).__name__}), "
                    f"which does not multiply codes; pass skip=[{owner.rpartition('.')[2]!r}]"
                )


def _some(names, limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )

# SPDX-License-Identifier: Apache-2.0
"""Compare models between ranks: one small collective if they agree and no rank has an error; else
every rank raises the same sentence.

[Note: one sentence]
Facts are texts by name: of a weight, its shape and recipe. Each rank reduces a digest of its facts
over the axes of a mesh, one after the other. If the digests differ, ranks exchange the first
difference, and all of them raise that of the lowest rank that differs from the first rank.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import torch_compat
from .model_weights import quantized_weights
from .rendezvous import reduce_together
from .torch_compat import ManagedParam

_INT31 = 2**31 - 1
_REMEDY = (
    "ranks that share weights need one model, recipe, skip=, FSDP_QUANT_BACKWARD_OVERRIDE and "
    "build of fsdp_quant; give every rank the same, and call fq.convert and fq.set_recipe on all "
    "of them"
)


def _digest(facts: Mapping[str, str]) -> list[int]:
    """Four non-negative int32: their MAX over ranks equals them if and only if (but for 2^-62) all
    ranks have equal facts."""
    digest = hashlib.sha256(
        "\n".join(f"{name}: {fact}" for name, fact in facts.items()).encode()
    ).digest()
    parts = [int.from_bytes(digest[i : i + 4], "little") & _INT31 for i in (0, 4)]
    return [*parts, *(_INT31 - part for part in parts)]


def agree(
    facts: Mapping[str, str],
    groups: Sequence[dist.ProcessGroup],
    error: Exception | None = None,
    remedy: str = _REMEDY,
    what: str = "ranks disagree",
) -> None:
    """Raise the same text on every rank of the groups if one of them has an error, other facts or
    another build of this library. Synchronizes with the device.

    groups:  the axes of a mesh, in one order; every rank of the mesh must call it. Empty: one
             process.
    error:   of this rank. If all ranks have the same one, each raises its own.

    Raises ValueError.
    """
    if not groups:
        if error is not None:
            raise error
        return
    facts = {"fsdp_quant": build(), **facts}
    own = [*_digest(facts), int(error is not None)]
    reduced = own
    for group in groups:
        reduced = _maximum(reduced, group)
    if reduced[-1]:
        _raise_first(error, groups)
    if reduced != own:
        raise _AgreedError(f"{what}: {_difference(facts, groups)}; {remedy}")


class _AgreedError(ValueError):
    """An error whose text all ranks of a mesh raise; ranks of another mesh repeat it."""


def _raise_first(error: Exception | None, groups: Sequence[dist.ProcessGroup]) -> NoReturn:
    """Raise the error of the lowest rank that has one, unless all ranks have it."""
    text = None if error is None else str(error)
    every = _gathered([_rank(groups), text, isinstance(error, _AgreedError)], groups)
    if error is not None and all(other == text for _, other, _ in every):
        raise error
    rank, text, is_agreed = min((one for one in every if one[1] is not None), key=lambda r: r[0])
    text = text if is_agreed else f"rank {rank} cannot go on, so no rank does: {text}"
    raise _AgreedError(text) from error


def _difference(facts: Mapping[str, str], groups: Sequence[dist.ProcessGroup]) -> str:
    """The first fact in which the lowest rank that differs from the first rank does so."""
    first: Any = [_rank(groups), list(facts.items())]
    mine = None
    for group in groups:
        first = _gathered(first, [group])[0]
    for theirs, ours in itertools.zip_longest(first[1], map(list, facts.items())):
        if theirs != ours:
            mine = [_rank(groups), theirs, ours]
            break
    differing = [one for one in _gathered(mine, groups) if one is not None]
    rank, (other, a, b) = first[0], min(differing, key=lambda one: one[0])
    if a is not None and b is not None and a[0] == b[0]:
        return f"{a[0]} is {a[1]} on rank {rank} and {b[1]} on rank {other}"
    a, b = ("nothing more" if one is None else f"{one[0]}, {one[1]}," for one in (a, b))
    return f"rank {rank} has {a} where rank {other} has {b}"


# Collectives; a trainer's own group needs no more than all-reduce and all-gather #


def _rank(groups: Sequence[dist.ProcessGroup]) -> int:
    return dist.get_rank() if dist.is_initialized() else groups[0].rank()


def _maximum(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """MAX of each of these int31 over the ranks."""
    reduced = torch.tensor(values, dtype=torch.int32, device=torch_compat.device_of(group))
    reduce_together(reduced, group, dist.ReduceOp.MAX)
    return reduced.tolist()


def _bytes_of(value: object, group: dist.ProcessGroup) -> Tensor:
    """The value as JSON: uint8 of one size on every rank of the group."""
    text = json.dumps(value).encode()
    (size,) = _maximum([len(text)], group)
    return torch.tensor(
        list(text.ljust(size)), dtype=torch.uint8, device=torch_compat.device_of(group)
    )


def _gathered(value: object, groups: Sequence[dist.ProcessGroup]) -> list:
    """The value of each rank of the groups."""
    values = [value]
    for group in groups:
        sent = _bytes_of(values, group)
        received = sent.new_empty(group.size() * sent.numel())
        torch_compat.all_gather(received, sent, group)
        values = [
            one for of in received.view(group.size(), -1).tolist() for one in json.loads(bytes(of))
        ]
    return values


# What is compared #


def axes_of(model: nn.Module) -> list[tuple[dist.ProcessGroup, ...]]:
    """The groups of each mesh over which ranks share weights of a model, in the same order on all
    ranks."""
    sharded = [m.registered for m in torch_compat.managed_params_of(model)] + [
        p for p in model.parameters() if isinstance(p, DTensor)
    ]
    found = dict.fromkeys(
        tuple(mesh.get_all_groups()) for mesh in dict.fromkeys(p.device_mesh for p in sharded)
    )
    groups = (weight.state.tensor_group for weight in quantized_weights(model))
    parts = dict.fromkeys(group for group in groups if group is not None)
    return [*found, *((group,) for group in parts if not any(group in groups for groups in found))]


@functools.cache
def build() -> str:
    """Version and sources of this library, as ranks compare them."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{sys.modules[root.name].__version__} (sources {digest.hexdigest()[:8]})"


def check_same_model(params: Iterable[ManagedParam]) -> None:
    """Raise ValueError on every rank if ranks that gather these parameters have different shapes,
    recipes or schedules. One small collective per axis of each mesh.

    params:  all of a root, in module order.

    Needed once, for the first gather of a root: later only `fq.set_recipe` changes recipes, and it
    compares them.
    """
    params = list(params)
    for mesh in dict.fromkeys(m.registered.device_mesh for m in params):
        facts: dict[str, str] = {}
        for m in params:
            readers = [module for module, _ in m.owners if hasattr(module, "_matrix_layers")]
            recipes = dict.fromkeys(map(recipe_text, readers)) or [_NO_RECIPE]
            is_of_mesh = m.registered.device_mesh == mesh
            shape = f"{list(m.registered.shape)} {m.registered.dtype} " if is_of_mesh else ""
            # before the root's first forward names are short
            name = m.fqn if m.fqn not in facts else f"{m.fqn} {len(facts)}"
            facts[name] = f"{shape}of {', '.join(recipes)}"
        agree(facts, mesh.get_all_groups())


_NO_RECIPE = "no recipe"


def recipe_text(module: nn.Module) -> str:
    """The text by which ranks compare what a module's weight is quantized by, now and later."""
    layers: Sequence[Any] = getattr(module, "_matrix_layers", ())
    return ", ".join(dict.fromkeys(map(_text_of_layer, layers))) or _NO_RECIPE


def _text_of_layer(layer: Any) -> str:
    recipe, schedule = layer.runtime.recipe, layer.runtime.schedule
    return text_of(recipe) if schedule is None else f"{text_of(recipe)} of {text_of(schedule)}"


def text_of(recipe: Any) -> str:
    """A short text, equal only for equal recipes: custom ones may share a name."""
    return f"{recipe} ({hashlib.sha256(recipe.fingerprint().encode()).hexdigest()[:6]})"

# SPDX-License-Identifier: Apache-2.0
"""Compare models between ranks: one small collective if they agree and no rank has an error; else
every rank raises the same sentence.

[Note: one sentence]
Facts are texts by name: of a weight, its shape and recipe. Each rank reduces a digest of its facts
over the axes of a mesh, one after the other. If the digests differ, ranks exchange their facts, and
all of them raise the first difference of the lowest rank that differs from the first rank.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "build of fsdp_quant; give every rank the same, and freeze weights, call fq.convert and "
    "fq.set_recipe on all of them"
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
    sentence: str = "ranks disagree",
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
    digest = [*_digest(facts), int(error is not None)]
    reduced = digest
    for group in groups:
        reduced = maximum(reduced, group)
    if reduced[-1]:
        _raise_first(error, groups)
    if reduced != digest:
        raise _AgreedError(f"{sentence}: {_difference(facts, groups)}; {remedy}")


@contextlib.contextmanager
def raises_on_all_ranks(
    groups: Iterable[dist.ProcessGroup],
    facts: Mapping[str, str] | None = None,
    remedy: str = _REMEDY,
) -> Iterator[None]:
    """`agree` at the end, with the error that the body raises on this rank."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(facts or {}, list(dict.fromkeys(groups)), error, remedy)


class _AgreedError(ValueError):
    """An error whose text all ranks of a mesh raise; ranks of another mesh repeat it."""


def _raise_first(error: Exception | None, groups: Sequence[dist.ProcessGroup]) -> NoReturn:
    """Raise the error of the lowest rank that has one, unless all ranks have it."""
    text = None if error is None else str(error)
    texts = _gathered([text, isinstance(error, _AgreedError)], groups)
    if error is not None and all(other == text for _, (other, _) in texts):
        raise error
    rank, (text, is_agreed) = next(entry for entry in texts if entry[1][0] is not None)
    text = text if is_agreed else f"rank {rank} cannot go on, so no rank does: {text}"
    raise _AgreedError(text) from error


def _difference(facts: Mapping[str, str], groups: Sequence[dist.ProcessGroup]) -> str:
    """Describe the first fact in which the lowest rank that differs from the first rank does so."""
    (rank, first), *others = _gathered(list(facts.items()), groups)
    other, theirs = next(entry for entry in others if entry[1] != first)
    a, b = next(pair for pair in itertools.zip_longest(first, theirs) if pair[0] != pair[1])
    if a is not None and b is not None and a[0] == b[0]:
        return f"{a[0]} is {a[1]} on rank {rank} and {b[1]} on rank {other}"
    a, b = ("nothing more" if fact is None else f"{fact[0]}, {fact[1]}," for fact in (a, b))
    return f"rank {rank} has {a} where rank {other} has {b}"


# Collectives; a trainer's own group needs no more than all-reduce and all-gather #


def maximum(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """MAX of each of these int31 over the ranks."""
    reduced = torch.tensor(values, dtype=torch.int32, device=torch_compat.device_of(group))
    reduce_together(reduced, group, dist.ReduceOp.MAX)
    return reduced.tolist()


def _gathered(value: object, groups: Sequence[dist.ProcessGroup]) -> list:
    """Return [rank, value] of every rank of the groups, in the order of ranks; values are JSON."""
    entries = [[dist.get_rank() if dist.is_initialized() else groups[0].rank(), value]]
    for group in groups:
        text = json.dumps(entries).encode()
        (size,) = maximum([len(text)], group)
        sent = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        sent = sent.to(torch_compat.device_of(group))
        received = sent.new_empty(group.size() * size)
        torch_compat.all_gather(received, sent, group)
        rows = received.view(group.size(), -1).tolist()
        entries = [entry for row in rows for entry in json.loads(bytes(row))]
    return sorted(entries, key=lambda entry: entry[0])


# What is compared #


def axes_of(model: nn.Module) -> list[tuple[dist.ProcessGroup, ...]]:
    """The groups of each mesh over which ranks share weights of a model, in the same order on all
    ranks."""
    sharded = [m.registered for m in torch_compat.managed_params_of(model)] + [
        p for p in model.parameters() if isinstance(p, DTensor)
    ]
    axes = dict.fromkeys(
        tuple(mesh.get_all_groups()) for mesh in dict.fromkeys(p.device_mesh for p in sharded)
    )
    groups = (weight.state.tensor_group for weight in quantized_weights(model))
    parts = dict.fromkeys(group for group in groups if group is not None)
    return [*axes, *((group,) for group in parts if not any(group in mesh for mesh in axes))]


@functools.cache
def build() -> str:
    """Version and sources of this library, as ranks compare them."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{sys.modules[root.name].__version__} (sources {digest.hexdigest()[:8]})"


def check_same_model(params: Iterable[ManagedParam]) -> None:
    """Raise ValueError on every rank if ranks that gather these parameters have different shapes,
    recipes or schedules, or freeze others. One small collective per axis of each mesh.

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
            text = f"{weight_text(m.registered)} " if m.registered.device_mesh == mesh else ""
            # before the root's first forward names are short
            name = m.fqn if m.fqn not in facts else f"{m.fqn} {len(facts)}"
            facts[name] = f"{text}of {', '.join(recipes)}"
        agree(facts, mesh.get_all_groups())


_NO_RECIPE = "no recipe"


def weight_text(weight: Tensor) -> str:
    """The text by which ranks compare a weight, for which a backward sends less if it is frozen."""
    return f"{'' if weight.requires_grad else 'frozen '}{list(weight.shape)} {weight.dtype}"


def recipe_text(module: nn.Module) -> str:
    """The text by which ranks compare what a module's weight is quantized by, now and later."""
    layers: Sequence[Any] = getattr(module, "_matrix_layers", ())
    recipes = ((layer.runtime.recipe, layer.runtime.schedule) for layer in layers)
    texts = (" of ".join(text_of(r) for r in pair if r is not None) for pair in recipes)
    return ", ".join(dict.fromkeys(texts)) or _NO_RECIPE


def text_of(recipe: Any) -> str:
    """A short text, equal only for equal recipes: custom ones may share a name."""
    return f"{recipe} ({hashlib.sha256(recipe.fingerprint().encode()).hexdigest()[:6]})"

# SPDX-License-Identifier: Apache-2.0
"""Do ranks hold the same model, and can all of them go on? One small collective says so, or every
rank raises one sentence.

[Note: one sentence]
Facts are texts by name: of a weight, its shape and recipe. Each rank reduces a digest of its facts
over the axes of a mesh, one after the other, which is over all ranks of it. Where they agree, that
is all. Else ranks tell each other what differs, and all of them raise what the lowest rank that
differs from the first one has to say.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import torch_compat
from .torch_compat import ManagedParam

_INT31 = 2**31 - 1
_REMEDY = (
    "ranks that share weights need one model, recipe, skip=, FSDP_QUANT_BACKWARD_OVERRIDE and "
    "build of fsdp_quant; give every rank the same, and call fq.convert and fq.set_recipe on all "
    "of them"
)


def _digest(facts: Mapping[str, str]) -> list[int]:
    """Four non-negative int32 whose MAX over ranks are these again if, and only if (but for 2^-62),
    all ranks have equal facts."""
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
    """Raise on every rank of the groups, in the same words, where one of them has an error, other
    facts or another build of this library. It waits for the device.

    groups:  the axes of a mesh: every rank of one must call it, with its axes in the same order.
             None: one process.
    error:   why this rank cannot go on. Where all ranks have the same one, each raises its own.

    Raises ValueError.
    """
    if not groups:
        if error is not None:
            raise error
        return
    facts = {"fsdp_quant": build()} | facts
    own = [*_digest(facts), int(error is not None)]
    reduced = own
    for group in groups:
        reduced = _maximum(reduced, group)
    if reduced[-1]:
        raise _of_all(error, groups)
    if reduced != own:
        raise _shared(f"{what}: {_difference(facts, groups)}; {remedy}")


def _shared(text: str, cause: Exception | None = None) -> ValueError:
    """What ranks have agreed to raise; those of another group are told the same words."""
    error = ValueError(text)
    error.is_shared, error.__cause__ = True, cause
    return error


def _of_all(error: Exception | None, groups: Sequence[dist.ProcessGroup]) -> Exception:
    """The error of the lowest rank that has one, unless all ranks have it."""
    text = None if error is None else str(error)
    every = _gathered([_rank(groups), text, hasattr(error, "is_shared")], groups)
    if all(other == text for _, other, _ in every):
        return error
    rank, text, is_shared = min((of for of in every if of[1] is not None), key=lambda of: of[0])
    return _shared(
        text if is_shared else f"rank {rank} cannot go on, so no rank does: {text}", error
    )


def _difference(facts: Mapping[str, str], groups: Sequence[dist.ProcessGroup]) -> str:
    """The first fact in which the lowest rank that differs from the first rank does so, in
    words."""
    first, mine = [_rank(groups), list(facts.items())], None
    for group in groups:
        first = _of_first(first, group)
    for theirs, ours in itertools.zip_longest(first[1], map(list, facts.items())):
        if theirs != ours:
            mine = [_rank(groups), theirs, ours]
            break
    rank, (other, a, b) = (
        first[0],
        min((of for of in _gathered(mine, groups) if of is not None), key=lambda of: of[0]),
    )
    if a is not None and b is not None and a[0] == b[0]:
        return f"{a[0]} is {a[1]} on rank {rank} and {b[1]} on rank {other}"
    a, b = ("nothing more" if one is None else f"{one[0]}, {one[1]}," for one in (a, b))
    return f"rank {rank} has {a} where rank {other} has {b}"


# What ranks tell each other. Of a group that a trainer brings, only its all-reduce and all-gather
# are used #


def _rank(groups: Sequence[dist.ProcessGroup]) -> int:
    return dist.get_rank() if dist.is_initialized() else groups[0].rank()


def _maximum(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Of each of these int31, over the ranks."""
    reduced = torch.tensor(values, dtype=torch.int32, device=torch_compat.device_of(group))
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return reduced.tolist()


def _bytes_of(value: object, group: dist.ProcessGroup) -> Tensor:
    """JSON, uint8 of one size on every rank of the group."""
    text = json.dumps(value).encode()
    (size,) = _maximum([len(text)], group)
    return torch.tensor(
        list(text.ljust(size)), dtype=torch.uint8, device=torch_compat.device_of(group)
    )


def _of_first(value: object, group: dist.ProcessGroup) -> object:
    """What rank 0 of the group has."""
    sent = _bytes_of(value if group.rank() == 0 else 0, group)
    if group.rank() > 0:
        sent.zero_()
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return json.loads(bytes(sent.tolist()))


def _gathered(value: object, groups: Sequence[dist.ProcessGroup]) -> list:
    """What each rank of the groups has."""
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
    """The groups of each mesh over which ranks share weights of a model, in one order on each rank
    of them."""
    sharded = [m.registered for m in torch_compat.managed_params_of(model)] + [
        p for p in model.parameters() if isinstance(p, DTensor)
    ]
    found = dict.fromkeys(
        tuple(mesh.get_all_groups()) for mesh in dict.fromkeys(p.device_mesh for p in sharded)
    )
    states = (getattr(module, "_weight_state", None) for module in model.modules())
    parts = dict.fromkeys(
        state.tensor_group
        for state in states
        if state is not None and state.tensor_group is not None
    )
    return [*found, *((group,) for group in parts if not any(group in groups for groups in found))]


@functools.cache
def build() -> str:
    """Version and sources of this library, as ranks compare them."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{sys.modules[root.name].__version__} (sources {digest.hexdigest()[:8]})"


def check_same_model(params: Iterable[ManagedParam]) -> None:
    """Raise ValueError on every rank where ranks that gather these parameters hold other ones, or
    convert them otherwise.

    params:  all of a root, in module order. One small collective per axis of each mesh.

    For the first gather of a root: recipes change by `fq.set_recipe` alone afterwards, which checks
    them itself.
    """
    params = list(params)
    for mesh in dict.fromkeys(m.registered.device_mesh for m in params):
        facts: dict[str, str] = {}
        for m in params:
            recipes = dict.fromkeys(recipe_text(module) for module, _ in m.owners)
            shape = (
                f"{list(m.registered.shape)} {m.registered.dtype} "
                if m.registered.device_mesh == mesh
                else ""
            )
            # before the root's first forward names are short
            name = m.fqn if m.fqn not in facts else f"{m.fqn} {len(facts)}"
            facts[name] = f"{shape}of {', '.join(recipes)}"
        agree(facts, mesh.get_all_groups())


def recipe_text(module: nn.Module) -> str:
    """What ranks compare of a module's recipe."""
    recipe = getattr(module, "recipe", None)
    return "no recipe" if recipe is None else text_of(recipe)


def text_of(recipe) -> str:
    """Short, and equal only for equal recipes: tables of users may have one name."""
    return f"{recipe} ({hashlib.sha256(recipe.fingerprint().encode()).hexdigest()[:6]})"

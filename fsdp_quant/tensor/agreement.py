"""Do ranks that gather each other's weights run one recipe? One small collective, which every rank of the group takes part in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch_compat
from .torch_compat import ManagedParam

_INT31 = 2**31 - 1


def agreement_slots(text: str) -> list[int]:
    """Four non-negative int32 whose MAX over ranks are these again if, and only if (but for 2^-62), all ranks have one text.

    They may join any MAX reduction of int32, as that of amaxes' bits.
    """
    digest = hashlib.sha256(text.encode()).digest()
    parts = [int.from_bytes(digest[i : i + 4], "little") & _INT31 for i in (0, 4)]
    return [*parts, *(_INT31 - part for part in parts)]


def refused_together(error: Exception | None, groups: Iterable[dist.ProcessGroup]) -> Exception | None:
    """What this rank raises where one of the ranks of its groups has an error: its own, or that another one has.

    Every rank of the groups must call it with the same groups in the same order.
    """
    for group in groups:
        failed = torch.tensor([error is not None], dtype=torch.int32, device=torch_compat.device_of(group))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if failed.item() and error is None:
            error = ValueError("another rank refused its state, and says why; every rank keeps what it had")
    return error


def check_agreement(text: str, said: str, group: dist.ProcessGroup, reduced: Tensor | None = None) -> None:
    """Raise ValueError, on every rank of `group`, where ranks have other texts. Every rank must call it; it waits for the device.

    said:     what this rank runs, for the message.
    reduced:  the MAX of `agreement_slots(text)`, where another reduction has carried them.
    """
    own = agreement_slots(text)
    if reduced is None:
        reduced = torch.tensor(own, dtype=torch.int32, device=torch_compat.device_of(group))
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    if reduced.tolist() != own:
        raise ValueError(
            f"the ranks that share these weights run different recipes: rank {dist.get_rank()} has {said}, another rank of its "
            "group another one; give every rank one recipe, the same skip= and FSDP_QUANT_BACKWARD_OVERRIDE, and call "
            "fq.set_recipe on every rank"
        )


def check_same_recipes(params: Iterable[ManagedParam], group: dist.ProcessGroup) -> None:
    """`check_agreement` about the layers of these parameters: the same parameters on every rank, in one order.

    Ranks whose shards are empty take part. For the first gather of a root: recipes change by `fq.set_recipe` alone afterwards,
    which checks them itself.
    """
    texts, said = [], {}
    for param in params:
        for module, attribute in param.owners:
            recipe = getattr(module, "recipe", None)
            text = "none" if recipe is None else recipe.fingerprint()
            said.setdefault("no recipe" if recipe is None else repr(recipe), param.fqn)
            texts.append(f"{param.fqn}.{attribute}: {text}")
    named = ", ".join(f"{recipe} (of {fqn})" if len(said) > 1 else recipe for recipe, fqn in list(said.items())[:4])
    check_agreement("\n".join(texts), named, group)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one file per rank, with pieces of masters and moments and their offsets in the whole
tensor. Any grid loads them.

A rank keeps its file of the previous step, so that a killed save leaves one complete checkpoint.
Codes are computed again, and compared if the same grid loads. Histories of delayed scaling belong
to one rank.
"""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from pathlib import Path

import torch
from torch import Tensor

import fsdp_quant as fq

from .model import Stage
from .optimizer import ChainedAdam, Shard
from .ranks import Ranks, Sizes


def _states(shard: Shard, name: str) -> dict[str, Tensor]:
    """fp32 [owned elements] per state."""
    state = shard.adam.state[shard.masters[name]]
    return {
        "master": shard.masters[name].detach(),
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
    }


def save(folder: Path, stage: Stage, optimizer: ChainedAdam, ranks: Ranks) -> None:
    """Every rank must call it, and wait for the others before one of them loads."""
    pieces, syncs = {}, {}
    for kind, shard in optimizer.shards.items():
        syncs[kind] = shard.sync.state_dict()
        for name, p in shard.params.items():
            place = (
                stage.cut_dim(name),
                ranks.tensor.rank(),
                tuple(p.shape),
                *shard.shards[name].run(shard.group.rank()),
            )
            pieces[name] = (
                place,
                _states(shard, name),
                shard.adam.state[shard.masters[name]]["step"],
            )
    file = {
        "sizes": asdict(ranks.sizes),
        "pieces": pieces,
        "syncs": syncs,
        "model": fq.state_dict(stage),
        "scale": (optimizer.loss_scale, optimizer.good_steps),
    }
    step = int(syncs["replicated"]["applied"])
    before = sorted(
        (path for path in folder.glob(f"*.{ranks.rank}.pt") if _step_of(path) < step), key=_step_of
    )
    with fq.checkpoint.replacing(folder / f"{step}.{ranks.rank}.pt") as part:
        torch.save(file, part)
    for path in before[:-1]:
        path.unlink()


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0])


def _newest(folder: Path) -> list[dict]:
    """Files of all ranks of the last complete checkpoint."""
    for first in sorted(folder.glob("*.0.pt"), key=_step_of, reverse=True):
        files, step = [torch.load(first, weights_only=True)], _step_of(first)
        rest = [folder / f"{step}.{rank}.pt" for rank in range(1, Sizes(**files[0]["sizes"]).world)]
        if all(path.exists() for path in rest):
            return files + [torch.load(path, weights_only=True) for path in rest]
    raise ValueError(f"{folder} holds no checkpoint of all ranks; give what --save was given")


def _whole(files: list[dict], name: str, key: str) -> tuple[Tensor, int | None]:
    """Assemble (a tensor of the whole model, the dim that tensor parallelism cuts) from the
    pieces of all ranks."""
    parts: dict[int, Tensor] = {}
    for (dim, part, shape, start, end), states, _ in (
        file["pieces"][name] for file in files if name in file["pieces"]
    ):
        flat = parts.setdefault(
            part if dim is not None else 0, torch.full((prod(shape),), torch.nan)
        )
        flat[start:end] = states[key].cpu()
    return torch.cat([parts[part].view(shape) for part in sorted(parts)], dim or 0), dim


@torch.no_grad()
def load(folder: Path, stage: Stage, optimizer: ChainedAdam, ranks: Ranks) -> None:
    """Resume from a checkpoint of any sizes and cuts.

    Raises ValueError for files of several checkpoints, for histories of delayed scaling of other
    sizes, and for codes that differ from the saved ones.
    """
    files = _newest(folder)
    saved = Sizes(**files[0]["sizes"])
    steps = [(file["sizes"], int(file["syncs"]["replicated"]["applied"])) for file in files]
    if any(step != steps[0] for step in steps):
        raise ValueError(
            f"{folder} holds files of several checkpoints, (sizes, step) by rank: {steps}"
        )
    same = files[ranks.rank] if saved == ranks.sizes else None
    if same is None and any(file["model"]["histories"] for file in files):
        raise ValueError(
            f"the checkpoint holds histories of delayed scaling of {saved}, each its rank's own, "
            f"and this run has {ranks.sizes}; load it with the sizes that it was saved with"
        )
    optimizer.loss_scale, optimizer.good_steps = files[0]["scale"]
    for kind, shard in optimizer.shards.items():
        for name, master in shard.masters.items():
            for key, own in _states(shard, name).items():
                whole, dim = _whole(files, name, key)
                local = (
                    whole
                    if dim is None
                    else whole.chunk(ranks.tensor.size(), dim)[ranks.tensor.rank()]
                )
                start, end = shard.shards[name].run(shard.group.rank())
                own.copy_(local.reshape(-1)[start:end])
            shard.adam.state[master]["step"].copy_(
                next(f["pieces"][name][2] for f in files if name in f["pieces"])
            )
        if same is not None:
            shard.sync.load_state_dict(same["syncs"][kind])
        shard.sync.applied.copy_(files[0]["syncs"]["replicated"]["applied"])
    if same is not None:
        fq.load_state_dict(
            stage, {key: value for key, value in same["model"].items() if key != "codes"}
        )
    optimizer.refresh()
    if same is not None and fq.state_dict(stage)["codes"] != same["model"]["codes"]:
        raise ValueError("the codes of the loaded masters are not those that were saved")

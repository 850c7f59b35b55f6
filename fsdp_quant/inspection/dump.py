# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of sampled steps as safetensors, one file per rank, layer and step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ..checkpoint.files import installed, on_cpu, replacing
from ..formats import Direction
from ..storage import Storage


class Dump:
    """Copies tensors of one step to the host, and writes them below a folder.

    file:    FOLDER/step{step}/{layer}.rank{rank}.safetensors, for
             `fq.checkpoint.load_safetensors`.
    tensors: "slot", the values, and "slot.rowwise" and "slot.columnwise", their codes. Expert e
             has "slot.expert{e}"; the second call of a layer in one step adds ".call2".

    Raises ImportError without safetensors.
    """

    def __init__(self, folder: Path):
        self._save = installed().torch.save_file
        self._folder = folder
        self._tensors: dict[str, dict[str, Tensor]] = {}  # layer -> name in the file -> values
        self._facts: dict[str, dict[str, str]] = {}

    def add(
        self, layer: str, name: str, values: Tensor | None, storages: dict[Direction, Storage]
    ) -> None:
        """Copy a tensor and its codes, except codes of a shard that begins inside a block."""
        tensors, facts = self._tensors.setdefault(layer, {}), self._facts.setdefault(layer, {})
        calls = (f"{name}.call{n}" if n > 1 else name for n in itertools.count(1))
        name = next(call for call in calls if call not in facts)
        facts[name] = json.dumps(next((s.row0 for s in storages.values()), 0))
        if values is not None:
            tensors[name] = on_cpu(values)
        for direction, storage in storages.items():
            fmt = storage.fmt
            if fmt.is_quantized and storage.row0 % fmt.row_alignment(direction) == 0:
                key, side = f"{name}.{direction.value}", storage.direction.value
                for buffer, tensor in storage.buffers().items():
                    tensors[f"{key}.{side}.{buffer}"] = on_cpu(tensor)
                facts[key] = json.dumps(storage.facts())

    def write(self, step: int) -> None:
        """Write and forget the tensors of a step."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        tensors, facts = self._tensors, self._facts
        self._tensors, self._facts = {}, {}
        folder = self._folder / f"step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for layer, by_name in tensors.items():
            with replacing(folder / f"{layer or 'model'}.rank{rank}.safetensors") as part:
                self._save(by_name, part, {"format": "pt", **facts[layer]})

"""Safetensors files written a tensor at a time: headers first, from shapes, names last.

[Note: what a failure leaves]
Every file is written as ".NAME.partial", flushed to the disk, and renamed when all of them are
whole; the index of several files, without which no reader opens them, is renamed last. A failure
removes the partial files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Names of the format (safetensors).
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}
_UNITS = {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("IB", 1024)) for power, prefix in enumerate("KMGT", 1)
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Planned(NamedTuple):
    """A tensor of a file before its values are there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def size_of(text: int | str) -> int:
    """Bytes of "5GB", "500MiB" or a number. Raises ValueError for any other text."""
    number, unit = str(text).strip(), ""
    while number and not number[-1].isdigit():
        number, unit = number[:-1], number[-1] + unit
    factor = _UNITS.get(unit.strip().upper()) if unit else 1
    if factor is None or not number.replace(".", "", 1).isdigit() or float(number) * factor < 1:
        raise ValueError(
            "max_shard_size must be a number of bytes, or a text such as '5GB' or '500MiB'; got "
            f"{text!r}"
        )
    return int(float(number) * factor)


def in_files(groups: Sequence[Sequence[Planned]], max_bytes: int) -> list[list[Planned]]:
    """The tensors of each file.

    A group, the tensors of one weight, stays together; a larger one has a file of its own.
    """
    files, free = [], 0
    for group in groups:
        needed = sum(t.nbytes for t in group)
        if not files or needed > free:
            files.append([])
            free = max_bytes
        files[-1].extend(group)
        free -= needed
    return files or [[]]


class Writer:
    """Files of a checkpoint in a folder.

    `write` each planned tensor once, in any order, then `finish`; `abort` on a failure.
    """

    def __init__(self, folder: Path, files: Sequence[Sequence[Planned]], beside: dict[str, dict]):
        """beside: JSON files by name, which readers see before the index.

        Raises ValueError for a folder that holds a checkpoint already, and for two tensors of one
        name.
        """
        taken = sorted(p.name for p in folder.glob("*.safetensors*")) if folder.exists() else []
        if taken:
            raise ValueError(
                f"{folder} holds {taken[0]}; export to a folder without a checkpoint, or delete "
                "the old one"
            )
        every = [t.name for of in files for t in of]
        if len(set(every)) < len(every):
            double = next(n for n in every if every.count(n) > 1)
            raise ValueError(
                f"two weights are named {double} in the checkpoint; check what names= returns"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._partial, self._places = folder, [], {}
        count = len(files)
        names = (
            [SINGLE]
            if count == 1
            else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        )
        try:
            self._open = [self._begin(name, of) for name, of in zip(names, files)]
            for name, content in beside.items():
                self._json(name, content)
            if count > 1:
                total = sum(t.nbytes for of in files for t in of)
                weight_map = {t.name: name for name, of in zip(names, files) for t in of}
                self._json(
                    INDEX,
                    {
                        "metadata": {"total_size": total},
                        "weight_map": dict(sorted(weight_map.items())),
                    },
                )
        except BaseException:
            self.abort()
            raise

    def _path(self, name: str) -> Path:
        self._partial.append(name)
        return self._folder / f".{name}.partial"

    def _json(self, name: str, content: dict) -> None:
        with open(self._path(name), "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            _to_disk(file)

    def _begin(self, name: str, tensors: Sequence[Planned]):
        """A file with its header. Wide dtypes come first, so that every tensor is aligned."""
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):
            header[tensor.name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = open(self._path(name), "wb")
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for tensor in tensors:
            self._places[tensor.name] = (
                tensor,
                file,
                8 + len(text) + header[tensor.name]["data_offsets"][0],
            )
        return file

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError for a tensor that was not planned so, or was written already."""
        planned, file, place = self._places.pop(name, (None, None, 0))
        if (
            planned is None
            or planned.dtype is not tensor.dtype
            or planned.shape != tuple(tensor.shape)
        ):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; the header of its file says "
                f"{planned}"
            )
        file.seek(place)
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Let readers see the files. Raises ValueError where a tensor was not written."""
        if self._places:
            raise ValueError(f"{next(iter(self._places))} was planned and not written")
        for file in self._open:
            _to_disk(file)
            file.close()
        last = self._partial[-1:] if self._partial[-1] == INDEX else self._partial[:1]
        for name in [*(n for n in self._partial if n not in last), *last]:
            os.replace(self._folder / f".{name}.partial", self._folder / name)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        """Remove what readers do not see yet."""
        for file in getattr(self, "_open", ()):
            file.close()
        for name in self._partial:
            (self._folder / f".{name}.partial").unlink(missing_ok=True)


def _to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())

# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written a tensor at a time: headers first, from shapes, names last.

A file's metadata holds a digest of every tensor, as files of `export_safetensors` do: placeholders
of the same length are replaced when all tensors are written.

[Note: what a failure leaves]
Every file is written as ".NAME.partial", flushed to the disk, and renamed when all of them are
whole; the index of several files, without which no reader opens them, is renamed last. A failure
removes the partial files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checkpoint.files import DIGESTS, digest, sync
from ..ops.layout import flat_bytes

T = TypeVar("T")
# Names of the format (safetensors).
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_UNITS = {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("IB", 1024))
    for power, prefix in enumerate("KMGT", 1)
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


def size_of(text: int | str, option: str = "max_shard_size") -> int:
    """Bytes of "5GB", "500MiB" or a number. Raises ValueError, naming `option`, for other text."""
    number, unit = str(text).strip(), ""
    while number and not number[-1].isdigit():
        number, unit = number[:-1], number[-1] + unit
    factor = _UNITS.get(unit.strip().upper()) if unit else 1
    if factor is None or not number.replace(".", "", 1).isdigit() or float(number) * factor < 1:
        raise ValueError(
            f"{option} must be a number of bytes, or a text such as '5GB' or '500MiB'; got {text!r}"
        )
    return int(float(number) * factor)


def in_buckets(
    groups: Iterable[list[T]], max_bytes: int, nbytes: Callable[[T], int]
) -> Iterator[list[T]]:
    """Yield the tensors of each bucket, or file, of at most `max_bytes`.

    A group, the tensors of one weight, stays together; a larger one has a bucket of its own.
    """
    bucket, size = [], 0
    for group in groups:
        needed = sum(map(nbytes, group))
        if bucket and size + needed > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket, size = bucket + group, size + needed
    if bucket:
        yield bucket


class Writer:
    """Files of a checkpoint in a folder.

    `write` each planned tensor once, in any order, then `finish`; `abort` on a failure.
    """

    def __init__(
        self, folder: Path, files: Sequence[Sequence[Planned]], documents: dict[str, dict]
    ):
        """documents: JSON files by name, which readers see before the index.

        Raises ValueError for a folder that holds a checkpoint already, for two tensors of one name,
        and for a dtype that safetensors does not have.
        """
        taken = sorted(p.name for p in folder.glob("[!.]*.safetensors*"))
        if taken:
            raise ValueError(
                f"{folder} holds {taken[0]}; export to a folder without a checkpoint, or delete "
                "the old one"
            )
        tensors, written = [t for file in files for t in file], set()
        for tensor in tensors:
            if tensor.name in written:
                raise ValueError(
                    f"two weights are named {tensor.name} in the checkpoint; check what names= "
                    "returns"
                )
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{tensor.name} is {tensor.dtype}: safetensors has no such dtype")
            written.add(tensor.name)
        folder.mkdir(parents=True, exist_ok=True)
        # Names of files, in the order in which they appear.
        self._folder, self._names = folder, []
        self._failure: Exception | None = None
        # By tensor: as planned, its file, and its first byte there.
        self._places: dict[str, tuple[Planned, Path, int]] = {}
        # By file: its header, and the digest of each tensor.
        self._headers: dict[Path, dict[str, Any]] = {}
        self._digests: dict[Path, dict[str, str]] = {}
        count = len(files)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        names = names if count > 1 else [SINGLE]
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": {t.name: name for name, file in zip(names, files) for t in file},
        }
        try:
            for name, content in documents.items():
                self._json(name, content)
            for name, file in zip(names, files):
                self._begin(name, file)
            if count > 1:
                self._json(INDEX, index)
        except BaseException:
            self.abort()
            raise

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.partial"

    def _json(self, name: str, content: dict) -> None:
        self._names.append(name)
        self._partial(name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _begin(self, name: str, tensors: Sequence[Planned]) -> None:
        """Create a file with its header; wide dtypes first, so that every tensor is aligned."""
        path = self._partial(name)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._headers[path], self._digests[path] = header, {t.name: "0" * 16 for t in tensors}
        ends = [0]
        tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)
        for tensor in tensors:
            ends.append(ends[-1] + tensor.nbytes)
            header[tensor.name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": ends[-2:],
            }
        text = self._header(path)
        self._names.append(name)
        with open(path, "wb") as file:
            file.write(text)
            file.truncate(len(text) + ends[-1])
        for tensor, start in zip(tensors, ends):
            self._places[tensor.name] = tensor, path, len(text) + start

    def _header(self, path: Path) -> bytes:
        """The first bytes of a file, with the digests so far."""
        header = self._headers[path]
        header["__metadata__"] |= {DIGESTS: json.dumps(self._digests[path])}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write (name, tensor) pairs, and hold none of them afterwards. Nothing is written after a
        failure, which `finish` raises."""
        try:
            for name, tensor in () if self._failure else tensors:
                self.write(name, tensor)
        except Exception as error:  # the others are about to gather the next weight
            self._failure = error

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Raises ValueError if it was planned otherwise or written before."""
        place = self._places.pop(name, None)
        if place is None or place[0] != Planned(name, tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; the header of its file says "
                f"{place and place[0]}"
            )
        _, path, start = place
        tensor = tensor.detach().cpu()
        self._digests[path][name] = digest(tensor)
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(flat_bytes(tensor).numpy().data)

    def finish(self) -> None:
        """Rename the files to their final names. Raises ValueError if a tensor is missing."""
        if self._failure is not None:
            raise self._failure
        if self._places:
            raise ValueError(f"{next(iter(self._places))} was planned and not written")
        for path in self._headers:
            with open(path, "r+b") as file:
                file.write(self._header(path))
        for name in self._names:
            sync(self._partial(name))
        for name in self._names:
            os.replace(self._partial(name), self._folder / name)
        sync(self._folder)

    def abort(self) -> None:
        """Remove the partial files."""
        for name in self._names:
            self._partial(name).unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of exact codes, and atomic replacement of files.

[Note: names in a file of codes]
    layers.0.up.weight.rowwise.data         uint8 codes, compact (see `Storage`); two 4-bit codes
                                            per byte, the first in the low bits
    layers.0.up.weight.rowwise.scale        decode scales of the blocks: fp32, or uint8 codes of
                                            e8m0 or e4m3
    layers.0.up.weight.rowwise.tensor_amax  fp32 [1], two-level formats: determines the second-level
                                            scale
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..formats import ROWWISE
from ..ops.layout import flat_bytes
from ..storage import rebuild_storage
from ..tensor import torch_compat
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from .weights import prepared, storage_tensors

try:
    import safetensors
    import safetensors.torch
except ImportError:
    safetensors = None


DIGESTS = "fsdp_quant"  # metadata: JSON of name -> digest
_BUFFER = re.compile(r"(.+)\.(rowwise|columnwise)\.(data|scale|tensor_amax)")


@contextlib.contextmanager
def replacing(path: str | PathLike) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and replace `path` by it once it is on the disk.

    A process that is killed inside leaves `path` unchanged. An exception inside is raised, and the
    temporary file removed.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def publish(part: str | PathLike, path: str | PathLike) -> None:
    """Rename a completely written file or folder to `path`, durably: fsync, rename, fsync the
    parent folder.

    part:  in the folder of `path`. The files of a folder must be synchronized, as
           `torch.distributed.checkpoint` does.
    path:  replaced atomically if a file; a folder of this name is removed first.
    """
    sync(part)
    if os.path.isdir(path):
        shutil.rmtree(path)
    os.replace(part, path)
    sync(Path(path).parent)


def sync(path: str | PathLike) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of the unsharded tensor. Every rank must call it."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def digest(value: Tensor | str) -> str:
    """Digest of a text, or of the dtype, shape and bytes of a CPU tensor."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()[:16]
    text = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
    text.update(flat_bytes(value).numpy().data)
    return text.hexdigest()[:16]


def installed() -> ModuleType:
    """The safetensors module. Raises ImportError if it is not installed."""
    if safetensors is None:
        raise ImportError("safetensors is not installed; pip install safetensors")
    return safetensors


def export_safetensors(model: nn.Module, path: str | PathLike, codes: bool = False) -> None:
    """Write the whole model to one safetensors file, from rank 0. Every rank must call it.

    codes:  write quantized weights as the exact codes and scales that forwards multiply (see the
            module's note), and the rest as in the state dict. Names are without wrappers.

    Replaces an existing file atomically. Raises ImportError without safetensors.
    """
    save_file = installed().torch.save_file
    writes = not dist.is_initialized() or dist.get_rank() == 0
    state = model.state_dict()  # reshards, so that the sharded parameters are registered
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    replaced: dict[int, str] = {}
    if codes:
        for w in prepared(model):
            if w.piece.state.quantizer.rowwise.fmt.is_quantized and not w.transposed:
                replaced[id(w.piece.state)] = name = torch_compat.in_state_dict(w.name)
                storage = w.storage(ROWWISE)
                buffers = storage_tensors(storage, w.like, w.rows)
                named = {f"{name}.rowwise.{buffer}": on_cpu(t) for buffer, t in buffers.items()}
                tensors |= named if writes else {}
                metadata[name] = json.dumps(
                    storage.facts() | {"shape": [w.rows, w.piece.values.shape[1]]}
                )
    states = {id(w.parameter): id(w.state) for w in quantized_weights(model)}
    parameters = model.named_parameters(remove_duplicate=False)  # tied ones by each name
    owners = {torch_compat.in_state_dict(name): states.get(id(p), -1) for name, p in parameters}
    for name, tensor in state.items():
        name = torch_compat.in_state_dict(name)
        quantized = replaced.get(owners.get(name, -1))
        if quantized is None:
            values = on_cpu(tensor)
            tensors |= {name: values} if writes else {}
        elif quantized != name:
            metadata[name] = json.dumps({"tied": quantized})
    if writes:
        metadata[DIGESTS] = json.dumps(
            {name: digest(value) for name, value in (metadata | tensors).items()}
        )
        with replacing(path) as part:
            save_file(tensors, part, metadata)


def load_safetensors(path: str | PathLike, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file of `export_safetensors`: state dict name -> tensor, or `QuantizedTensor` with the
    rowwise codes.

    Executes nothing from the file. Ignores foreign metadata; reads files of earlier versions
    without digests.

    Raises ValueError, naming the tensor, for changed bytes, and for buffers that are missing or do
    not match the metadata of their weight. Raises ImportError without safetensors.
    """
    return {name: tensor.to(device) for name, tensor in read_checked(path).items()}


def read_checked(path: str | PathLike) -> dict[str, Tensor]:
    """The tensors and quantized weights of a file. Raises ValueError as `load_safetensors`."""
    with installed().safe_open(path, "pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if DIGESTS in metadata:
        digests = parsed(metadata.pop(DIGESTS))
        if not isinstance(digests, dict):
            raise ValueError(
                f"{path}: the digests of its tensors are damaged; export the model again"
            )
        actual = {
            name: digest(value)
            for name, value in (metadata | tensors).items()
            if name in digests or name in tensors
        }
        wrong = {
            "lacks": digests.keys() - actual,
            "holds, besides those of the export,": actual.keys() - digests.keys(),
            "holds other bytes, or facts, of": {
                name for name in actual if digests.get(name, actual[name]) != actual[name]
            },
        }
        for fault, names in wrong.items():
            if names:
                raise ValueError(
                    f"{path} {fault} {', '.join(sorted(names)[:5])}: the file is damaged; export "
                    "the model again"
                )
    return _rebuilt(tensors, metadata, path)


def parsed(text: object) -> object:
    """The value of a text in JSON; None of anything else."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _rebuilt(
    tensors: dict[str, Tensor], metadata: dict[str, str], path: str | PathLike
) -> dict[str, Tensor]:
    """`read_checked`. Raises ValueError for buffers that the metadata does not describe, and for
    ties to missing weights."""
    buffers: dict[str, dict[str, dict[str, Tensor]]] = {}
    loaded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _BUFFER.fullmatch(name)
        if match is None:
            loaded[name] = tensor
        else:
            weight, direction, buffer = match.groups()
            buffers.setdefault(weight, {}).setdefault(direction, {})[buffer] = tensor
    entries = ((name, parsed(text)) for name, text in metadata.items())
    facts = {name: entry for name, entry in entries if isinstance(entry, dict)}
    described = {name for name, entry in facts.items() if {"format", "direction"} <= entry.keys()}
    for name in {**buffers, **dict.fromkeys(sorted(described))}:
        direction = facts[name]["direction"] if name in described else None
        if direction is None or list(buffers.get(name, ())) != [direction] or name in loaded:
            raise ValueError(
                f"{path}: the codes of {name} or their facts are missing or of another direction; "
                "export the model again"
            )
        try:
            loaded[name] = QuantizedTensor(rebuild_storage(facts[name], buffers[name][direction]))
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    for name, entry in facts.items():
        tied = entry.get("tied")
        if name not in described and isinstance(tied, str):
            if tied not in described:
                raise ValueError(
                    f"{path}: {name} is tied to {tied}, which holds no codes; export the model "
                    "again"
                )
            loaded[name] = loaded[tied]
    return loaded

# SPDX-License-Identifier: Apache-2.0
"""Codes in checkpoints: fingerprints of them, storages as DTensors, and files of exact codes.

A checkpoint of training holds masters: codes are derived again, whatever the world size, and their
fingerprint tells whether they are the same. Codes themselves are written for inference, or to look
at.

[Note: names in a file of codes]
    layers.0.up.weight.rowwise.data         uint8 codes, compact (see `Storage`); 4-bit codes two a
                                            byte, the first one low
    layers.0.up.weight.rowwise.scale        decode scales of the blocks: fp32, or uint8 codes of
                                            e8m0 or e4m3
    layers.0.up.weight.rowwise.tensor_amax  fp32 [1], two-level formats: the second-level scale
                                            follows from it
A safetensors file says in its metadata, under the weight's name, JSON of the format's fields,
direction, shape and dtype; under "fsdp_quant" digests of every tensor and of these texts, so that a
load names the tensor of a flipped bit.

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
>>> fq.checkpoint.export_safetensors(model, "codes.safetensors", codes=True)
>>> fq.checkpoint.load_safetensors("codes.safetensors")["0.weight"].rowwise.fmt.name
'mxfp8'
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

import fsdp_quant.recipe as recipes

from .counters import counters
from .formats import ROWWISE, Direction
from .ops.layout import COMPACT
from .scaling import DelayedScaling, RowCuts
from .storage import Placement, Storage, rebuild_storage
from .tensor import torch_compat
from .tensor.quantized_tensor import QuantizedTensor
from .tensor.root_statistics import Sharded, take
from .tensor.torch_compat import ManagedParam
from .tensor.weight_state import Piece, Shard, WeightState, encode_shards, values_of

try:
    import safetensors
    import safetensors.torch
except ImportError:
    safetensors = None

# In a state's "moved" beside modules: the rank that saved it, of how many. DCP loads older files,
# which have no leaf for it.
SAVED_BY = "saved by"

# Words that one pass of a fingerprint reads.
_WORDS = 1 << 22


@dataclass(frozen=True)
class LocalWeight:
    """The rows that this rank holds of a quantized weight.

    name:     as in the model's state dict.
    piece:    [local rows, K], its state and cuts.
    managed:  by `fully_shard`, or None: the weight is whole.
    statistics:  that ranks share, by matrix and direction.
    experts:  (ranks that hold other matrices of the packed weight, how many each), or None.
    codes:      of a weight without high-precision values here: its optimizer is gone, a trainer has
                its masters (`fq.hooks`), or `fq.freeze` dropped them.
    """

    name: str
    piece: Piece
    managed: ManagedParam | None
    statistics: dict
    experts: tuple[dist.ProcessGroup, int] | None = None
    codes: QuantizedTensor | None = None

    @property
    def rows(self) -> int:
        """Of the whole weight (tensor parallelism: of this rank's part)."""
        return self.piece.cuts.rows

    @property
    def like(self) -> DTensor | None:
        """The weight as it is sharded, or None. Raises NotImplementedError for what is cut along
        more than one axis."""
        if self.piece.state.tensor_group is not None:
            raise NotImplementedError(
                f"{self.name} is cut by tensor parallelism, and its codes shard along one axis "
                "only; save the masters, and write codes from a model without it"
            )
        if self.managed is not None and self.managed.local.state.parts:
            raise NotImplementedError(
                f"{self.name} is a matrix of a packed weight under fully_shard, whose codes have "
                "no form as DTensors; save the high-precision weight, of which a load makes the "
                "same codes"
            )
        return None if self.managed is None else self.managed.registered

    def storage(self, direction: Direction) -> Storage:
        """The codes of these rows as a gather would send them, made now. `prepared` must have run
        on every rank."""
        if self.codes is not None:
            return self.codes.storage_for(direction).to_gemm_operand(COMPACT)
        state, device = (
            self.piece.state,
            self.piece.values.device if self.managed is None else self.managed.device,
        )
        dtype, encoding = (
            state.compute_dtype or self.piece.values.dtype,
            state.quantizer.encodings[direction],
        )
        shard = Shard(
            self.piece,
            direction,
            dtype,
            self.statistics.get((state.name, direction)),
            records=False,
        )
        with torch.no_grad(), counters.kept():
            (encoded,) = encode_shards([shard], device)
        return Storage.of(encoded, encoding, self.piece.values.shape, dtype, self.piece.row0)

    def storages(self) -> list[Storage]:
        """One a direction that is encoded from the master, and was not dropped."""
        encoded = self.piece.state.quantizer.encodings
        return [
            self.storage(d)
            for d in encoded
            if self.codes is None or getattr(self.codes, d.value) is not None
        ]


def prepared(model: nn.Module) -> list[LocalWeight]:
    """The quantized weights of a model, each once, with the statistics that their codes need. Every
    rank must call it."""
    managed = {owner: m for m in torch_compat.managed_params_of(model) for owner in m.owners}
    found: dict[WeightState, tuple[str, Sharded]] = {}
    for prefix, module in model.named_modules():
        state, parameter = (
            getattr(module, "_weight_state", None),
            module._parameters.get("weight"),
        )
        if state is None or parameter is None or getattr(module, "transposed", False):
            continue
        m = managed.get((module, "weight"))
        local = torch_compat.local_of(parameter) if m is None else m.local
        found.setdefault(
            state, (f"{prefix}.weight" if prefix else "weight", Sharded(local, state, m))
        )
    shared = [of for _, of in found.values() if of.managed is not None or of.state.spans_parts]
    take([of for of in shared if not _is_codes(of.local)], {})
    weights = []
    for state, (name, (local, _, m, _)) in found.items():
        rows, world, rank = (
            (local.shape[0], 1, 0) if m is None else (m.global_shape[0], m.world_size, m.rank)
        )
        group = state.tensor_group if state.parts else None
        experts, first = (None, 0) if group is None else ((group, rows), group.rank() * rows)
        codes = local if _is_codes(local) else None
        values = values_of(local) if codes is None else local.dequantize()
        pieces = state.pieces(values, RowCuts.chunked(rows, world), rank, every=True)
        weights += [
            LocalWeight(
                f"{name}.{e}" if state.parts else name,
                piece,
                m,
                state.statistics or {},
                experts,
                codes,
            )
            for e, piece in enumerate(pieces, first)
        ]
    return weights


def _is_codes(local: Tensor) -> bool:
    """There are no high-precision values here of which codes could be made."""
    return isinstance(local, QuantizedTensor) and not getattr(local, "has_values", False)


# Fingerprints #


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, on int64."""
    for shift, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _words(buffer: Tensor, packed: bool) -> Tensor:
    """int64 [rows, words]: an element a word, or eight bytes."""
    rows = buffer.contiguous().view(buffer.shape[0], prod(buffer.shape[1:]))
    if not packed:
        return rows.view(torch.int32).long() if rows.itemsize == 4 else rows.long()
    rows = rows.view(torch.uint8)
    return F.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)


def fingerprint(
    storage: Storage,
    parts: tuple[int, int] = (1, 1),
    part: tuple[int, int] = (0, 0),
    part_rows: int = 0,
) -> Tensor:
    """int64 []: of the rows that a storage holds. The sum over the shards of a tensor, modulo 2^64,
    is that of the whole.

    A sum over words (64 bits of codes, or a scale) of a hash of (buffer, global position, word). A
    block's scales count where its first row lies.

    parts, part:  (along rows, along columns) that tensor parallelism cuts the tensor into, and
                  which of them this is a piece of; where it divides no block or word, the sum over
                  all is that of the uncut tensor.
    part_rows:    of each part.
    """
    total = storage.data.new_zeros((), dtype=torch.int64)
    if storage.shape[0] == 0:
        return total
    row0 = storage.row0 + part[0] * part_rows
    # rows that share one
    block = {"data": 1, "scale": storage.fmt.dims(storage.direction)[0], "tensor_amax": None}
    for name, buffer in storage.buffers().items():
        if block[name] is None and (row0 or (part[1] and buffer.numel() == 1)):
            continue  # of the whole tensor: counted with its first row
        first, cut = divmod(row0, block[name] or 1)
        if cut:
            first, buffer = first + 1, buffer[1:]
        words = _words(buffer, packed=name == "data")
        salt = zlib.crc32(f"{storage.direction.value}.{name}".encode()) << 31
        column = part[1] * words.shape[1] + torch.arange(words.shape[1], device=words.device)
        step = max(1, _WORDS // max(1, words.shape[1]))
        width = words.shape[1] * parts[1]
        for start in range(0, words.shape[0], step):
            piece = words[start : start + step]
            row = first + start + torch.arange(piece.shape[0], device=words.device)
            total += _mixed(piece ^ _mixed(row[:, None] * width + column + salt)).sum()
    return total


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Weight name -> fingerprint of its codes in every direction, the same on every rank and for
    every world size.

    Every rank must call it: one SUM all-reduce a shard group, and one a group of tensor
    parallelism, an all-gather one of experts.
    """
    sums: dict[str, Tensor] = {}
    shards: dict[dist.ProcessGroup, list[str]] = {}
    parts: dict[dist.ProcessGroup, list[str]] = {}
    experts: dict[dist.ProcessGroup, list[tuple[str, int]]] = {}
    for w in prepared(model):
        group, cut = w.piece.state.tensor_group, ()
        if group is not None:
            cut = (group.size(), 1), (group.rank(), 0), w.rows
            if w.piece.state.tensor_dim == 1:
                cut = (1, group.size()), (0, group.rank()), 0
            parts.setdefault(group, []).append(w.name)
        zero = torch.zeros(
            (),
            dtype=torch.int64,
            device=w.piece.values.device if w.managed is None else w.managed.device,
        )
        sums[w.name] = (
            sum((fingerprint(s, *cut) for s in w.storages()), zero)
            if w.piece.values.shape[0]
            else zero
        )
        if w.managed is not None:
            shards.setdefault(w.managed.process_group, []).append(w.name)
        if w.experts is not None:
            experts.setdefault(w.experts[0], []).append((w.name, w.experts[1]))
    for group, names in [*shards.items(), *parts.items()]:
        together = torch.stack([sums[n] for n in names])
        dist.all_reduce(together, group=group)
        sums.update(zip(names, together))
    for group, own in experts.items():
        together = torch.stack([sums[n] for n, _ in own])
        of_ranks = [torch.empty_like(together) for _ in range(group.size())]
        dist.all_gather(of_ranks, together, group=group)
        for r, values in enumerate(of_ranks):
            for (name, count), value in zip(own, values):
                weight, _, e = name.rpartition(".")
                sums[f"{weight}.{int(e) + (r - group.rank()) * count}"] = value
    return {name: int(value) for name, value in sums.items()}


# Storages as DTensors #


def storage_tensors(storage: Storage, like: DTensor | None, rows: int) -> dict[str, Tensor]:
    """The buffers of a shard's storage as DTensors, for DCP; plain tensors where no one shards.

    like:     the sharded weight, whose mesh and placements they take; a buffer that does not shard
              is replicated, and so are the scales of blocks that a cut divides. None: the storage
              is whole.
    rows:     of the whole tensor.
    returns:  buffer name -> tensor. Every rank must call it: cut blocks take a MAX all-reduce.
    """
    if like is None:
        return storage.buffers()
    group = like.device_mesh.get_group(like.device_mesh.ndim - 1)
    chunk = RowCuts.chunked(rows, group.size()).bounds[1] if group.size() > 1 else None
    made = {}
    for name, placement in storage.placements(chunk).items():
        buffer, placements = getattr(storage, name), list(like.placements)
        shape = [rows, *buffer.shape[1:]] if name == "data" else list(buffer.shape)
        if name == "scale" and placement is not Placement.REPLICATE:
            shape[0] = -(-rows // storage.fmt.dims(storage.direction)[0])
        if placement is Placement.HALO:
            buffer = _whole_scale(storage, shape, group)
        if placement is not Placement.SHARD:
            placements = [Replicate()] * len(placements)
        stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
        made[name] = DTensor.from_local(
            buffer.contiguous(),
            like.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )
    return made


def _whole_scale(storage: Storage, shape: list[int], group: dist.ProcessGroup) -> Tensor:
    """Scales of every block on every rank; who shares a block has the same scale for it."""
    whole = storage.scale.new_zeros(shape)
    first = storage.row0 // storage.fmt.dims(storage.direction)[0]
    whole[first : first + storage.scale.shape[0]] = storage.scale
    # scales are not negative
    bits = whole.view(torch.int32 if whole.dtype is torch.float32 else whole.dtype)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return whole


def code_tensors(model: nn.Module, directions=tuple(Direction)) -> dict[str, Tensor]:
    """The codes of every quantized weight, "name.direction.buffer" -> DTensor (plain where no one
    shards), for `dcp.save`.

    Of a direction that is not encoded from the master there are none. Every rank must call it.
    """
    made = {}
    for w in prepared(model):
        for storage in (w.storage(d) for d in w.piece.state.quantizer.encodings if d in directions):
            tensors = storage_tensors(storage, w.like, w.rows)
            made |= {f"{w.name}.{storage.direction.value}.{name}": t for name, t in tensors.items()}
    return made


# Files #

_DIGESTS = "fsdp_quant"  # metadata: JSON of name -> digest
_BUFFER = re.compile(r"(.+)\.(rowwise|columnwise)\.(data|scale|tensor_amax)")


@contextlib.contextmanager
def replacing(path: str | PathLike) -> Iterator[Path]:
    """A temporary path beside `path`; what the context wrote there takes the place of `path` once
    it is on the disk.

    A process that is killed inside leaves `path` as it was. Raises what the context raises, and
    removes what it wrote.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def publish(part: Path, path: Path) -> None:
    """Give a file, or a folder, that is written whole its name, for good: on the disk before, and
    then in its folder.

    part:  in the folder of `path`; of a folder the files are synchronized, as
           `torch.distributed.checkpoint` leaves them.
    path:  a file that it replaces at once; a folder of this name, which no reader may need, is
           removed first.
    """
    _sync(part)
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _digest(value: Tensor | str) -> str:
    """Of a text, or of the dtype, shape and bytes of a tensor on the CPU."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()[:16]
    text = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
    text.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return text.hexdigest()[:16]


def _check_installed() -> None:
    if safetensors is None:
        raise ImportError("safetensors is not installed; pip install safetensors")


def export_safetensors(model: nn.Module, path: str | PathLike, codes: bool = False) -> None:
    """Write the whole model to one safetensors file, from rank 0. Every rank must call it.

    codes:  quantized weights as the exact codes and scales that the forward multiplies (see the
            module's note); the rest, and without it all, as in the state dict. Names are those of
            the model without wrappers.

    The file takes the place of one that is there once it is whole. Raises ImportError without
    safetensors.
    """
    _check_installed()
    writes = not dist.is_initialized() or dist.get_rank() == 0
    state = model.state_dict()  # which reshards: parameters are now those that are registered
    tensors, metadata, replaced = {}, {"format": "pt"}, {}
    if codes:
        for w in prepared(model):
            if w.piece.state.quantizer.rowwise.fmt.is_quantized:
                replaced[id(w.piece.state)] = name = torch_compat.in_state_dict(w.name)
                storage = w.storage(ROWWISE)
                whole = storage_tensors(storage, w.like, w.rows)
                named = {f"{name}.rowwise.{buffer}": _whole(t) for buffer, t in whole.items()}
                tensors |= named if writes else {}
                metadata[name] = json.dumps(
                    storage.facts() | {"shape": [w.rows, w.piece.values.shape[1]]}
                )
    owners = _states_by_name(model)
    for name, tensor in state.items():
        name = torch_compat.in_state_dict(name)
        quantized = replaced.get(owners.get(name))
        if quantized is None:
            whole = _whole(tensor)
            tensors |= {name: whole} if writes else {}
        elif quantized != name:
            metadata[name] = json.dumps({"tied": quantized})
    if writes:
        metadata[_DIGESTS] = json.dumps(
            {name: _digest(value) for name, value in (metadata | tensors).items()}
        )
        with replacing(path) as part:
            safetensors.torch.save_file(tensors, part, metadata)


def _states_by_name(model: nn.Module) -> dict[str, int]:
    """State dict name -> identity of the weight's state, tied names too."""
    modules = model.named_modules(remove_duplicate=False)
    states = (
        (f"{name}.weight".lstrip("."), getattr(module, "_weight_state", None))
        for name, module in modules
    )
    return {
        torch_compat.in_state_dict(name): id(state) for name, state in states if state is not None
    }


def load_safetensors(path: str | PathLike, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """State dict name -> tensor, or `QuantizedTensor` with the rowwise codes, of a file of
    `export_safetensors`.

    Nothing in a file runs. Metadata of others is ignored; files without digests, of earlier
    versions, are read too.

    Raises ValueError, naming the tensor, for bytes that are not those that were written, for
    buffers that are missing, or that the facts of their weight do not describe. Raises ImportError
    without safetensors.
    """
    tensors, metadata = _read(path)
    return {name: tensor.to(device) for name, tensor in _rebuilt(tensors, metadata, path).items()}


def _read(path: str | PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) as they were written. Raises ValueError for others, by their digests."""
    _check_installed()
    with safetensors.safe_open(path, "pt", device="cpu") as file:
        metadata, tensors = (
            file.metadata() or {},
            {name: file.get_tensor(name) for name in file.keys()},
        )
    if _DIGESTS in metadata:
        digests = _json(metadata.pop(_DIGESTS))
        if not isinstance(digests, dict):
            raise ValueError(
                f"{path}: the digests of its tensors are damaged; export the model again"
            )
        found = {
            name: _digest(value)
            for name, value in (metadata | tensors).items()
            if name in digests or name in tensors
        }
        wrong = {
            "lacks": digests.keys() - found,
            "holds, beside those of the export,": found.keys() - digests.keys(),
            "holds other bytes, or facts, of": {
                name for name in found if digests.get(name, found[name]) != found[name]
            },
        }
        for what, names in wrong.items():
            if names:
                raise ValueError(
                    f"{path} {what} {', '.join(sorted(names)[:5])}: the file is damaged; export "
                    "the model again"
                )
    return tensors, metadata


def _json(text: str) -> object:
    """What a text says; None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _rebuilt(tensors: dict[str, Tensor], metadata: dict[str, str], path) -> dict[str, Tensor]:
    """The tensors and weights of a file. Raises ValueError for buffers that no facts describe, and
    for ties to nothing."""
    buffers: dict[str, dict[str, dict[str, Tensor]]] = {}
    loaded = {}
    for name, tensor in tensors.items():
        match = _BUFFER.fullmatch(name)
        if match is None:
            loaded[name] = tensor
        else:
            weight, direction, buffer = match.groups()
            buffers.setdefault(weight, {}).setdefault(direction, {})[buffer] = tensor
    facts = {name: of for name, text in metadata.items() if isinstance(of := _json(text), dict)}
    described = {name for name, of in facts.items() if {"format", "direction"} <= of.keys()}
    for name in {**buffers, **dict.fromkeys(sorted(described))}:
        of = facts.get(name)
        if (
            name not in described
            or list(buffers.get(name, ())) != [of["direction"]]
            or name in loaded
        ):
            raise ValueError(
                f"{path}: the codes of {name} or their facts are missing or of another direction; "
                "export the model again"
            )
        try:
            loaded[name] = QuantizedTensor(rebuild_storage(of, buffers[name][of["direction"]]))
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    for name, of in facts.items():
        if name not in described and isinstance(of.get("tied"), str):
            if of["tied"] not in described:
                raise ValueError(
                    f"{path}: {name} is tied to {of['tied']}, which holds no codes; export the "
                    "model again"
                )
            loaded[name] = loaded[of["tied"]]
    return loaded


# Without a model #


@dataclass
class Verified:
    """What `verify` found: lines to print, and one sentence for each thing that is wrong."""

    path: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = [f"WRONG: {problem}" for problem in self.problems] or ["whole"]
        return "\n".join([self.path, *self.lines, *verdict])


def verify(path: str | PathLike) -> Verified:
    """Read a checkpoint without a model: check what can be checked, and print what is in it.

    path:  a file of `export_safetensors`: digests and facts of every tensor. A folder of
           `torch.distributed.checkpoint`: every tensor is read, and weights whose codes a state of
           `fq.state_dict` holds fingerprints of are quantized again and compared, where a recipe of
           `fq.recipes` made them. Such a folder is unpickled: read only those that you trust.

    Raises FileNotFoundError where there is nothing.
    """
    path = Path(path)
    found = Verified(str(path))
    if path.is_dir():
        _verify_folder(path, found)
    else:
        with path.open("rb"):
            _verify_file(path, found)
    print(found)
    return found


def _verify_file(path: Path, found: Verified) -> None:
    try:
        tensors, metadata = _read(path)
        loaded = _rebuilt(tensors, metadata, path)
    except (ValueError, safetensors.SafetensorError) as error:
        found.problems.append(str(error))
        return
    for name, tensor in loaded.items():
        codes = tensor.rowwise or tensor.columnwise if isinstance(tensor, QuantizedTensor) else None
        found.lines.append(
            f"  {name}: {list(tensor.shape)} "
            + (str(tensor.dtype) if codes is None else codes.describe())
        )


def _verify_folder(path: Path, found: Verified) -> None:
    values: dict[tuple[str, ...], object] = {}  # by place; of large tensors the key to read them by
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        for key, of in metadata.state_dict_metadata.items():
            place, read = (metadata.planner_data or {}).get(key, (key,)), _read_one(path, key, of)
            if isinstance(of, TensorStorageMetadata) and "histories" not in place:
                found.lines.append(f"  {key}: {list(of.size)} {of.properties.dtype}")
                read = lambda key=key, of=of: _read_one(path, key, of)  # noqa: E731
            values[tuple(map(str, place))] = read
    except (Exception, CheckpointException) as error:  # readers of damaged bytes raise anything
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        found.problems.append(
            f"it cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        )
        return
    ranks: dict[int, set[int]] = {}
    for place in values:
        if place[-1] == "fingerprint" and place[:-1] + ("recipe",) in values:
            state = {
                p[len(place) - 1 :]: value
                for p, value in values.items()
                if p[: len(place) - 1] == place[:-1]
            }
            try:
                rank, world = _verify_state(".".join(place[:-1]) or "state", state, values, found)
                ranks.setdefault(world, set()).add(rank)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                found.problems.append(
                    f"{'.'.join(place[:-1])} is no state of fq.state_dict: {error}"
                )
    for world, saved in ranks.items():
        if world and len(saved) < world and any("histories" in place for place in values):
            found.problems.append(
                f"it holds amax histories of ranks {sorted(saved)} of {world}, and each rank has "
                "its own; save fq.state_dict under a key per rank"
            )


def _read_one(path: Path, key: str, of) -> object:
    state = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        if isinstance(of, TensorStorageMetadata)
        else None
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[key]


def _verify_state(
    name: str, state: dict[tuple, object], values: dict[tuple, object], found: Verified
) -> tuple[int, int]:
    """(rank, world size) that saved it, of older files (0, 0). state: of `fq.state_dict`, by
    place."""
    rank, world = json.loads(state.get(("moved",), "{}")).get(SAVED_BY, (0, 0))
    step, seed, text = (state[key,] for key in ("step", "seed", "recipe"))
    found.lines.append(f"  {name}: step {step}, seed {seed}, rank {rank} of {world or '?'}, {text}")
    if type(step) is not int or step < 0 or type(seed) is not int:
        raise ValueError(f"step is {step!r} and seed {seed!r}")
    histories: dict[str, dict[str, Tensor]] = {}
    for place, value in state.items():
        if place[0] == "histories":
            histories.setdefault(place[1], {})[place[2]] = value
            if not (value.isfinite() & (value >= 0)).all():
                found.problems.append(
                    f"{name}: {place[2]} of the amax history of {place[1]} is negative or not "
                    "finite"
                )
    made, same, other = _recipes_in(text), 0, []
    codes = {place[1]: value for place, value in state.items() if place[0] == "codes"}
    for weight, saved in codes.items() if made else ():
        is_same = _is_made_by(made, weight, saved, histories, values)
        same += is_same is True
        other += [weight] if is_same is False else []
    if made:
        found.lines.append(
            f"  {name}: codes of {same} of {len(codes)} weights made again, and compared"
        )
    else:
        found.lines.append(
            f"  {name}: codes not compared, because no recipe of fq.recipes alone made them"
        )
    if other:
        found.problems.append(
            f"{name}: the codes of {', '.join(other[:5])} are not those that were saved: the "
            "weight, or its fingerprint, is damaged (or tensor parallelism cut its blocks)"
        )
    return rank, world


def _is_made_by(
    made: list[recipes.Recipe],
    weight: str,
    saved: int,
    histories: Mapping[str, dict],
    values: Mapping[tuple, object],
) -> bool | None:
    """Some recipe makes codes of this fingerprint of the values of a weight in a checkpoint; None:
    they are not in it."""
    stem, _, expert = (
        (weight, "", "") if weight.rpartition(".")[2] == "weight" else weight.rpartition(".")
    )
    places = [
        p
        for p, value in values.items()
        if callable(value) and f".{'.'.join(p)}".endswith(f".{stem}")
    ]
    if not places:
        return None
    place = min(places, key=lambda p: len(".".join(p)))  # others are of layers inside other modules
    master = values[place]()[int(expert)] if expert else values[place]()
    for recipe in made:
        hybrid = recipe.hybrid(recipes.Role("linear", "weight", stem.removesuffix(".weight")))
        state = WeightState(weight, hybrid, tuple(master.shape), recipe.compute_dtype)
        for d in hybrid.delayed_directions:
            if (
                kept := histories.get(f"{stem.removesuffix('weight')}weight.{d.value}")
            ) is not None:
                state.history(weight, "weight", d, hybrid.side(d)).load_state_dict(kept)
        storages = LocalWeight(
            weight, Piece(state, master, RowCuts((0, len(master))), 0), None, {}
        ).storages()
        if sum(int(fingerprint(s)) for s in storages) % 2**64 == saved % 2**64:
            return True
    return False


def _recipes_in(text: str) -> list[recipes.Recipe]:
    """The recipes that `Recipe.__repr__` wrote, joined by bars; none where one of them is not of
    `fq.recipes`."""
    made = []
    for part in text.split(" | "):
        try:
            call = ast.parse(part, mode="eval").body
            given = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
            if call.func.id not in recipes.NAMED or call.args:
                return []
            options = {
                name: given.pop(name)
                for name in list(given)
                if name in recipes.Recipe.__dataclass_fields__
            }
            made.append(
                recipes.Recipe(
                    call.func.id,
                    recipes.by_families,
                    tuple(sorted(given.items())),
                    **{
                        "backward_override": None,
                        **options,
                    },
                )
            )
        except (AttributeError, SyntaxError, TypeError, ValueError):
            return []
    return made


def _value(node: ast.expr) -> object:
    """A literal, a torch dtype, or `DelayedScaling(...)`."""
    if isinstance(node, ast.Call) and node.func.id == "DelayedScaling":
        return DelayedScaling(
            **{keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        )
    if isinstance(node, ast.Attribute) and node.value.id == "torch":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
            node.attr
        ]
    return ast.literal_eval(node)

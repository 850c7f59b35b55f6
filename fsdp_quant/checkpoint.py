"""Codes in checkpoints: fingerprints of them, storages as DTensors, and files of exact codes.

A checkpoint of training holds masters: codes are derived again, whatever the world size, and their fingerprint tells
whether they are the same. Codes themselves are written for inference, or to look at.

[Note: names in a file of codes]
    layers.0.up.weight.rowwise.data         uint8 codes, compact (see `Storage`); 4-bit codes two a byte, the first one low
    layers.0.up.weight.rowwise.scale        decode scales of the blocks: fp32, or uint8 codes of e8m0 or e4m3
    layers.0.up.weight.rowwise.tensor_amax  fp32 [1], two-level formats: the second-level scale follows from it
A safetensors file says in its metadata, under the weight's name, JSON of the format's fields, direction, shape and dtype.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from math import prod
from os import PathLike

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .counters import counters
from .formats import ROWWISE, Direction
from .ops.layout import COMPACT
from .scaling import RowCuts
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
    codes:      of a weight without high-precision values here: its optimizer is gone, a trainer has its masters (`fq.hooks`), or
                `fq.freeze` dropped them.
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
        """The weight as it is sharded, or None. Raises NotImplementedError for what is cut along more than one axis."""
        if self.piece.state.tensor_group is not None:
            raise NotImplementedError(
                f"{self.name} is cut by tensor parallelism, and its codes shard along one axis only; save the masters, and write "
                "codes from a model without it"
            )
        if self.managed is not None and self.managed.local.state.parts:
            raise NotImplementedError(
                f"{self.name} is a matrix of a packed weight under fully_shard, whose codes have no form as DTensors; save the "
                "high-precision weight, of which a load makes the same codes"
            )
        return None if self.managed is None else self.managed.registered

    def storage(self, direction: Direction) -> Storage:
        """The codes of these rows as a gather would send them, made now. `prepared` must have run on every rank."""
        if self.codes is not None:
            return self.codes.storage_for(direction).in_layout(COMPACT)
        state, device = self.piece.state, self.piece.values.device if self.managed is None else self.managed.device
        dtype, encoding = state.compute_dtype or self.piece.values.dtype, state.quantizer.encodings[direction]
        shard = Shard(self.piece, direction, dtype, self.statistics.get((state.name, direction)), records=False)
        with torch.no_grad(), counters.kept():
            (encoded,) = encode_shards([shard], device)
        return Storage.of(encoded, encoding, self.piece.values.shape, dtype, self.piece.row0)

    def storages(self) -> list[Storage]:
        """One a direction that is encoded from the master, and was not dropped."""
        encoded = self.piece.state.quantizer.encodings
        return [self.storage(d) for d in encoded if self.codes is None or getattr(self.codes, d.value) is not None]


def prepared(model: nn.Module) -> list[LocalWeight]:
    """The quantized weights of a model, each once, with the statistics that their codes need. Every rank must call it."""
    managed = {owner: m for m in torch_compat.managed_params_of(model) for owner in m.owners}
    found: dict[WeightState, tuple[str, Sharded]] = {}
    for prefix, module in model.named_modules():
        state, parameter = module.__dict__.get("_weight_state"), module._parameters.get("weight")
        if state is None or parameter is None or getattr(module, "transposed", False):
            continue
        m = managed.get((module, "weight"))
        local = torch_compat.local_of(parameter) if m is None else m.local
        found.setdefault(state, (f"{prefix}.weight" if prefix else "weight", Sharded(local, state, m)))
    shared = [of for _, of in found.values() if of.managed is not None or of.state.spans_parts]
    take([of for of in shared if not _is_codes(of.local)], {})
    weights = []
    for state, (name, (local, _, m, _)) in found.items():
        rows, world, rank = (local.shape[0], 1, 0) if m is None else (m.global_shape[0], m.world_size, m.rank)
        group = state.tensor_group if state.parts else None
        experts, first = (None, 0) if group is None else ((group, rows), group.rank() * rows)
        codes = local if _is_codes(local) else None
        values = values_of(local) if codes is None else local.dequantize()
        pieces = state.pieces(values, RowCuts.chunked(rows, world), rank, every=True)
        weights += [
            LocalWeight(f"{name}.{e}" if state.parts else name, piece, m, state.statistics or {}, experts, codes)
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


def fingerprint(storage: Storage, parts: tuple[int, int] = (1, 1), part: tuple[int, int] = (0, 0), part_rows: int = 0) -> Tensor:
    """int64 []: of the rows that a storage holds. The sum over the shards of a tensor, modulo 2^64, is that of the whole.

    A sum over words (64 bits of codes, or a scale) of a hash of (buffer, global position, word). A block's scales count where
    its first row lies.

    parts, part:  (along rows, along columns) that tensor parallelism cuts the tensor into, and which of them this is a piece of;
                  where it divides no block or word, the sum over all is that of the uncut tensor.
    part_rows:    of each part.
    """
    total = storage.data.new_zeros((), dtype=torch.int64)
    if storage.shape[0] == 0:
        return total
    row0 = storage.row0 + part[0] * part_rows
    block = {"data": 1, "scale": storage.fmt.dims(storage.direction)[0], "tensor_amax": None}  # rows that share one
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
    """Weight name -> fingerprint of its codes in every direction, the same on every rank and for every world size.

    Every rank must call it: one SUM all-reduce a shard group, and one a group of tensor parallelism, an all-gather one of experts.
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
        zero = torch.zeros((), dtype=torch.int64, device=w.piece.values.device if w.managed is None else w.managed.device)
        sums[w.name] = sum((fingerprint(s, *cut) for s in w.storages()), zero) if w.piece.values.shape[0] else zero
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

    like:     the sharded weight, whose mesh and placements they take; a buffer that does not shard is replicated, and so
              are the scales of blocks that a cut divides. None: the storage is whole.
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
            buffer.contiguous(), like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    return made


def _whole_scale(storage: Storage, shape: list[int], group: dist.ProcessGroup) -> Tensor:
    """Scales of every block on every rank; who shares a block has the same scale for it."""
    whole = storage.scale.new_zeros(shape)
    first = storage.row0 // storage.fmt.dims(storage.direction)[0]
    whole[first : first + storage.scale.shape[0]] = storage.scale
    bits = whole.view(torch.int32 if whole.dtype is torch.float32 else whole.dtype)  # scales are not negative
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return whole


def code_tensors(model: nn.Module, directions=tuple(Direction)) -> dict[str, Tensor]:
    """The codes of every quantized weight, "name.direction.buffer" -> DTensor (plain where no one shards), for `dcp.save`.

    Of a direction that is not encoded from the master there are none. Every rank must call it.
    """
    made = {}
    for w in prepared(model):
        for storage in (w.storage(d) for d in w.piece.state.quantizer.encodings if d in directions):
            tensors = storage_tensors(storage, w.like, w.rows)
            made |= {f"{w.name}.{storage.direction.value}.{name}": t for name, t in tensors.items()}
    return made


# Files #

def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check_installed() -> None:
    if safetensors is None:
        raise ImportError("safetensors is not installed; pip install safetensors")


def export_safetensors(model: nn.Module, path: str | PathLike, codes: bool = False) -> None:
    """Write the whole model to one safetensors file, from rank 0. Every rank must call it.

    codes:  quantized weights as the exact codes and scales that the forward multiplies (see the module's note); the rest,
            and without it all, as in the state dict.

    Raises ImportError without safetensors.
    """
    _check_installed()
    writes = not dist.is_initialized() or dist.get_rank() == 0
    state = model.state_dict()  # which reshards: parameters are now those that are registered
    tensors, metadata, replaced = {}, {"format": "pt"}, {}
    if codes:
        for w in prepared(model):
            if w.piece.state.quantizer.rowwise.fmt.is_quantized:
                replaced[id(w.piece.state)] = w.name
                storage = w.storage(ROWWISE)
                whole = storage_tensors(storage, w.like, w.rows)
                named = {f"{w.name}.rowwise.{name}": _whole(t) for name, t in whole.items()}
                tensors |= named if writes else {}
                metadata[w.name] = json.dumps(storage.facts() | {"shape": [w.rows, w.piece.values.shape[1]]})
    owners = _states_by_name(model)
    for name, tensor in state.items():
        quantized = replaced.get(owners.get(name))
        if quantized is None:
            whole = _whole(tensor)
            tensors |= {name: whole} if writes else {}
        elif quantized != name:
            metadata[name] = json.dumps({"tied": quantized})
    if writes:
        safetensors.torch.save_file(tensors, path, metadata)


def _states_by_name(model: nn.Module) -> dict[str, int]:
    """State dict name -> identity of the weight's state, tied names too."""
    modules = model.named_modules(remove_duplicate=False)
    states = ((f"{name}.weight".lstrip("."), module.__dict__.get("_weight_state")) for name, module in modules)
    return {name: id(state) for name, state in states if state is not None}


def load_safetensors(path: str | PathLike, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """State dict name -> tensor, or `QuantizedTensor` with the rowwise codes, of a file of `export_safetensors`.

    Raises ImportError without safetensors.
    """
    _check_installed()
    with safetensors.safe_open(path, "pt", device=str(device)) as file:
        metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
    facts = {name: json.loads(text) for name, text in metadata.items() if name != "format"}
    loaded: dict[str, Tensor] = {}
    for name, of in facts.items():
        if "tied" not in of:
            prefix = f"{name}.{of['direction']}."
            buffers = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if n.startswith(prefix)}
            loaded[name] = QuantizedTensor(rebuild_storage(of, buffers))
    return tensors | loaded | {name: loaded[of["tied"]] for name, of in facts.items() if "tied" in of}

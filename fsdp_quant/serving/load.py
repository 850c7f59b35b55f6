# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained_quantized`: quantized checkpoints, read into masters or kept as codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.files import installed
from ..formats import COLUMNWISE, FORMATS, ROWWISE, Format
from ..options import flag, function, read_all
from ..storage import Storage
from ..tensor.fsdp_hooks import check_gathers_codes
from ..tensor.model_weights import ModelWeight, quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage_pair import StoragePair
from ..tensor.torch_compat import distributed_as, in_state_dict, local_of
from ..training.hold import layers_of, put_codes, read_rowwise
from . import layouts
from .layouts import read_storage
from .weights import Slice, Source, sources_of
from .writer import DTYPES, INDEX, SINGLE

# Of layers, but of no weight that a model here has: scales of inputs and of caches.
_UNREAD = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_shape",
)


_OPTIONS = {"frozen": flag(), "strict": flag(), "names": function()}
_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


class Files:
    """The tensors of a checkpoint's safetensors files, by name."""

    def __init__(self, path: Path):
        """Raises ImportError without safetensors, ValueError for a folder without a checkpoint."""
        safe_open = installed().safe_open
        if (path / INDEX).exists():
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
        elif (path / SINGLE).exists():
            files = [SINGLE]
        else:
            raise ValueError(
                f"{path} has neither {SINGLE} nor {INDEX}; wanted a folder on a disk here"
            )
        self._file: dict[str, Any] = {}
        for file in files:
            opened = safe_open(path / file, "pt")
            if twice := self._file.keys() & set(opened.keys()):
                raise ValueError(f"{min(twice)} is in two files of {path}, one of which is {file}")
            self._file |= dict.fromkeys(opened.keys(), opened)
        self.names = self._file.keys()

    def of(self, named: dict[str, str]) -> dict[str, Tensor]:
        """The tensors of these names, by the same keys."""
        return {key: self._file[name].get_tensor(name) for key, name in named.items()}

    def described(self, named: dict[str, str]) -> dict[str, Tensor]:
        """The same, with values of scales alone: others are on the meta device."""
        tensors = {}
        for key, name in named.items():
            stored = self._file[name].get_slice(name)
            dtype = _DTYPE_OF.get(stored.get_dtype())
            if key in (*layouts.SCALES, "scales"):
                tensors[key] = self._file[name].get_tensor(name)
            elif dtype is None:
                raise ValueError(f"{name} is {stored.get_dtype()} in the file, which is not read")
            else:
                tensors[key] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
        return tensors


# The slices of a weight that the files have: names of tensors by role.
Stored = list[tuple[Slice, dict[str, str]]]


def from_pretrained_quantized(
    model: nn.Module,
    path: str | PathLike,
    *,
    frozen: bool = False,
    strict: bool = True,
    names: Callable[[str], str] | None = None,
) -> nn.Module:
    """Load a checkpoint of quantized weights, of `fq.export` or others, into `model`; returns it.

    model:   initialized (not on the meta device), converted or not, sharded by
             `fully_shard` or not.
    path:    folder with model.safetensors, or with several files and their index. Weights as
             compressed-tensors (fp8 per tensor, channel and 128x128, mxfp8, mxfp4, nvfp4),
             modelopt, DeepSeek's `weight_scale_inv` and gpt-oss's `_blocks` and `_scales` have
             them; each says by its tensors which it is.
    frozen:  False: every weight is decoded, rounded to the parameter's dtype, and trains from
             there. True: quantized layers and experts keep the codes of the file, as after
             `fq.freeze`: their recipe's forward must have the file's format. Codes of the backward
             are encoded from the decoded values where those of the forward serve none. Under
             `fully_shard` each rank keeps its part.
    strict:  every parameter must be in the files, and every tensor of the files in the model.
    names:   names in the checkpoint from names in the model, as of `fq.export`.

    Every rank must call it alike, and reads the files itself.

    Raises ValueError, naming the tensor, before anything is changed: for what is missing or
    unexpected, for frozen weights that `fully_shard` gathers in high precision or that keep
    histories, for tensors of one frozen matrix whose scales are not those of one, and for shapes,
    dtypes and scales (transposed, flattened, negative, infinite, NaN) of another format or layout.

    >>> model = fq.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), "fp8_block")
    >>> fq.export(model, "codes")
    >>> plain = nn.Sequential(nn.Linear(128, 128, bias=False))
    >>> model = fq.from_pretrained_quantized(plain, "codes")
    """
    read_all(_OPTIONS, frozen=frozen, strict=strict, names=names)
    files = Files(Path(path))
    sources = sources_of(getattr(model, "_orig_mod", model), names)  # of torch.compile
    stored: dict[Source, Stored] = {}
    for source in sources:
        for slices in (source.slices, source.matrices):
            stored[source] = [(s, tensors) for s in slices if (tensors := _tensors_of(s, files))]
            if stored[source]:
                source.slices = slices
                break
    weights = {id(w.parameter): w for w in quantized_weights(model) if w.attribute == "weight"}
    keeps = {s: weights[id(s.tensor)] for s in sources if frozen and id(s.tensor) in weights}
    keeps = {source: weight for source, weight in keeps.items() if source.layers}
    if frozen and not keeps:
        raise ValueError("frozen=True found no quantized layer; call fq.convert(model, recipe)")
    _check_names(model, files, stored, strict)
    for source in sources:
        _check_weight(source, stored[source], keeps.get(source))
        _check_slices(source, stored[source], source in keeps, files)
    with torch.no_grad():
        read_rowwise(model, layers_of(model, list(keeps.values())))
        for source, slices in stored.items():
            if source in keeps:
                put_codes(model, keeps[source], _codes(source, slices, files))
            elif len(slices) == len(source.slices):
                values = distributed_as(source.tensor, _values(source, slices, files), source.name)
                source.owner.load_state_dict({source.attribute: values}, strict=False)
    return model


def _tensors_of(piece: Slice, files: Files) -> dict[str, str]:
    """Names in the files by role: "weight" alone, or a quantized one's tensors; {}: not there."""
    name, layer = piece.name, piece.name.removesuffix(".weight")
    mxfp4 = {"blocks": f"{name}_blocks", "scales": f"{name}_scales"}
    if files.names >= {*mxfp4.values()}:
        return mxfp4
    if layer == name:
        return {"weight": name} if name in files.names else {}
    named = {part: f"{layer}.{part}" for part in (*layouts.CODES, *layouts.SCALES)}
    tensors = {part: name for part, name in named.items() if name in files.names}
    return tensors if tensors.keys() & set(layouts.CODES) else {}


def _check_names(
    model: nn.Module, files: Files, stored: dict[Source, Stored], strict: bool
) -> None:
    missing = [source.name for source, slices in stored.items() if len(slices) < len(source.slices)]
    slices = [pair for pairs in stored.values() for pair in pairs]
    used = {name for _, tensors in slices for name in tensors.values()}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    tied = {in_state_dict(name) for name, _ in named}
    unread = sorted(n for n in files.names - used - tied if n.rpartition(".")[2] not in _UNREAD)
    quantized = {s.name.removesuffix(".weight") for s, tensors in slices if len(tensors) > 1}
    for name in sorted(files.names - used):
        layer, _, part = name.rpartition(".")
        if layer in quantized and part.startswith("weight_") and part not in _UNREAD:
            raise ValueError(f"{name} is of a quantized weight, in no format that this reads")
    for names, why in ((missing, "are not in the files"), (unread, "are of no parameter")):
        if strict and names:
            raise ValueError(
                f"the checkpoint does not fit the model: {len(names)} {why}, such as {names[0]}; "
                "pass names=, or strict=False"
            )


def _check_weight(source: Source, slices: Stored, keeps: ModelWeight | None) -> None:
    """Raise ValueError unless the files' slices can be loaded. keeps: the weight that keeps their
    codes."""
    tensor, name = source.tensor, source.name
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device; call to_empty() and initialize the model")
    local = local_of(tensor)
    if isinstance(local, QuantizedTensor) and local.is_frozen:
        raise ValueError(
            f"{name} is frozen already, as {local}, which a load would have to replace; call "
            "fq.unfreeze(model) first, or load into a newly converted model"
        )
    if keeps is None:
        return
    if not slices or slices[0][1].keys() == {"weight"}:
        raise ValueError(
            f"{name} is high precision in the files; name it in fq.convert's skip=, or load with "
            "frozen=False, then call fq.freeze"
        )
    if isinstance(tensor, DTensor):
        check_gathers_codes(name, tensor, keeps.managed, "load")
    if isinstance(local, QuantizedTensor):
        raise ValueError(
            f"{name} is a quantized parameter, whose optimizer writes its codes; load with "
            "frozen=False"
        )
    if source.layers[0].plan.weight.delayed_directions:
        raise ValueError(
            f"{name} is scaled by a history of amaxes; give weights current scaling before "
            "frozen=True"
        )


def _check_tensors(
    source: Source, piece: Slice, tensors: dict[str, Tensor], fmt: Format | None
) -> layouts.Scales | None:
    """The scales of a slice; None: it is of mxfp4 blocks, or in high precision.

    Raises ValueError unless these tensors are a weight of the model's shape.

    tensors:  of `Files.described`.
    fmt:      that the scales must have; None: any.
    """
    scales = None
    if "blocks" in tensors and fmt not in (None, FORMATS["mxfp4"]):
        raise ValueError(f"{piece.name} is mxfp4 in the files, and its recipe multiplies {fmt}")
    if "blocks" in tensors:
        shape = _shape_of_gpt_oss(piece.name, **tensors)
    elif len(tensors) > 1 or fmt is not None:
        scales = layouts.read_scales(piece.name, tensors, fmt)
        shape = scales.shape
    else:
        ((role, tensor),) = tensors.items()
        shape = tuple(tensor.shape)
        if tensor.element_size() == 1 and source.tensor.is_floating_point():
            raise ValueError(
                f"{piece.name} is {tensor.dtype} in the file, without scales that this reads: "
                f"{role}"
            )
    if shape != source.shape_of(piece):
        raise ValueError(
            f"{piece.name} is {list(shape)} in the file and {list(source.shape_of(piece))} in the "
            "model"
        )
    return scales


def _values(source: Source, slices: Stored, files: Files) -> Tensor:
    """The unsharded tensor from all slices."""
    like = source.tensor
    weight = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    for piece, tensors in slices:
        if "blocks" in tensors:
            matrices = _storages_of_gpt_oss(**files.of(tensors), dtype=like.dtype)
            values = torch.stack([matrix.dequantize() for matrix in matrices]).mT.contiguous()
        elif len(tensors) == 1:
            (values,) = files.of(tensors).values()
        else:
            values = read_storage(piece.name, files.of(tensors), like.dtype, "cpu").dequantize()
        if (piece.matrix, piece.rows) == (None, None):
            return values.to(like.dtype)
        source.slice_of(weight, piece).copy_(values)
    return weight


def _shape_of_gpt_oss(name: str, blocks: Tensor, scales: Tensor) -> tuple[int, ...]:
    """[E, K, N] of the weight that these tensors hold."""
    *lead, size = blocks.shape
    dtypes = (blocks.dtype, scales.dtype)
    if len(lead) != 3 or size != 16 or [*scales.shape] != lead or {*dtypes} != {torch.uint8}:
        raise ValueError(
            f"{name}: mxfp4 experts have blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of "
            f"uint8, got {list(blocks.shape)} {dtypes[0]} and {list(scales.shape)} {dtypes[1]}"
        )
    layouts.check_range(name, "scales", scales)
    return lead[0], lead[2] * 32, lead[1]


def _storages_of_gpt_oss(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> list[Storage]:
    """The codes [N, K] of each expert, over the bytes of the file: mxfp4 blocks [E, N, K / 32, 16]
    and scales [E, N, K / 32]."""
    shape = blocks.shape[1], blocks.shape[2] * 32
    return [
        Storage(FORMATS["mxfp4"], ROWWISE, shape, data.flatten(1), scale, None, dtype)
        for data, scale in zip(blocks, scales)
    ]


def _codes(source: Source, slices: Stored, files: Files) -> QuantizedTensor:
    """The codes of the files, [.., N, K], and those of the backward where they do not serve it."""
    like, quantizer = source.tensor, source.layers[0]._weight_state.quantizer
    device = local_of(like).device
    rows: dict[int, list[Storage]] = {}
    for piece, named in slices:
        tensors = files.of(named)
        if "blocks" in tensors:
            tensors = {role: tensor.to(device) for role, tensor in tensors.items()}
            matrices = _storages_of_gpt_oss(**tensors, dtype=like.dtype)
            rows |= {e: [matrix] for e, matrix in enumerate(matrices)}
        else:
            storage = read_storage(piece.name, tensors, like.dtype, device, quantizer.rowwise.fmt)
            rows.setdefault(piece.matrix or 0, []).append(storage)
    pairs = []
    for _, parts in sorted(rows.items()):
        pairs.append(StoragePair(_stacked_rows(parts)))
        if not (quantizer.shares_storage or quantizer.is_derived):
            pairs[-1].put(COLUMNWISE, quantizer.columnwise_of(pairs[-1].first))
    if like.dim() == 2:
        return QuantizedTensor(pair=pairs[0])
    shape = len(pairs), *pairs[0].first.shape
    return QuantizedTensor(pair=StoragePair(groups=pairs).joined(), shape=shape)


def _stacked_rows(parts: list[Storage]) -> Storage:
    """One storage of the rows of all; `_check_slices` ran."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = ["data", "scale"] if first.fmt.dims(ROWWISE)[0] is not None else ["data"]
    buffers = {name: torch.cat([part.buffers()[name] for part in parts]) for name in names}
    return first.with_buffers(buffers, shape=(sum(p.shape[0] for p in parts), first.shape[1]))


def _check_slices(source: Source, slices: Stored, keeps: bool, files: Files) -> None:
    """Raise ValueError unless the tensors are the model's weight. keeps: their codes stay, and no
    scale may be of two tensors of one matrix."""
    fmt = source.layers[0]._weight_state.quantizer.rowwise.fmt if keeps else None
    rows = {}
    for piece, named in slices:
        scales = _check_tensors(source, piece, files.described(named), fmt)
        if scales is not None:
            rows.setdefault(piece.matrix, []).append(scales)
    if fmt is None:
        return
    block_rows = fmt.dims(ROWWISE)[0]
    for parts in rows.values():
        of_tensor = [part.scale if block_rows is None else part.tensor_amax for part in parts]
        is_one = all(t is None or torch.equal(t, of_tensor[0]) for t in of_tensor)
        if not is_one or any(part.shape[0] % (block_rows or 1) for part in parts[:-1]):
            raise ValueError(
                f"{source.name} is {len(parts)} tensors in the files, such as {slices[0][0].name}, "
                f"whose scales of {fmt} are not those of one matrix; load it with frozen=False, "
                "then call fq.freeze"
            )

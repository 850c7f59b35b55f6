# SPDX-License-Identifier: Apache-2.0
"""`export`: a folder that inference servers load, of the codes that the forward multiplies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..formats import ROWWISE
from ..options import Option, choice, function, read_all
from ..storage import Storage
from ..tensor.agreement import agree
from ..tensor.torch_compat import device_of, in_state_dict
from . import configs, layouts
from .configs import Scheme
from .kinds import TARGETS, Kind
from .merged import expert_layers, merged_layers
from .weights import (
    Slice,
    Source,
    codes_of,
    encoded,
    has_codes_alone,
    master_of,
    matrix_of,
    num_lost,
    sources_of,
    statistics_of,
)
from .writer import Planned, Writer, in_buckets, size_of

T = TypeVar("T")
_OPTIONS = {
    "format": choice(*TARGETS),
    "dtype": choice(None, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "share_scales": choice(None, True, False),
    "input_amax": Option("numbers by layer", lambda v: v is None or isinstance(v, Mapping)),
    "names": function(),
}


class Part(NamedTuple):
    """A slice of a weight in the checkpoint. kind: None if written in high precision."""

    slice: Slice
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind | None = None
    input_amax: float | None = None

    @property
    def layer(self) -> str:
        return self.slice.name.removesuffix(".weight")

    def tensors_of(self, storage: Storage, format: str) -> dict[str, Tensor]:
        """The tensors of the checkpoint, by name, from the codes of these rows."""
        if self.kind is None:
            return {self.slice.name: storage.dequantize(self.dtype)}
        tensors = layouts.tensors_of(storage, self.kind, format, self.input_amax)
        return {f"{self.layer}.{name}": tensor for name, tensor in tensors.items()}


def export(
    model: nn.Module,
    path: str | PathLike,
    format: str = "compressed-tensors",
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_size: int | str = "5GB",
    input_amax: Mapping[str, float] | None = None,
    share_scales: bool | None = None,
    names: Callable[[str], str] | None = None,
) -> None:
    """Write `config.json` and safetensors files of `model` to a folder, for inference servers.

    path:    of the folder; created if it does not exist, without a checkpoint if it does.
    format:  "compressed-tensors", "modelopt", "fp8" (DeepSeek's layout; transformers' "mxfp8"):
             quantized layers as the rowwise codes that the forward multiplies; "dequantized": as
             the values of these codes. docs/export.md says which server reads which.
    dtype:   of parameters that are not quantized, and of dequantized ones; None: each its own.
             Buffers keep theirs.
    max_shard_size:  bytes of a file, or a text such as "5GB". More than one file gets an index.
    input_amax:  largest magnitude of a layer's input, by the layer's name in the checkpoint:
             servers then scale inputs statically, as NVFP4 inputs must be; without it they are
             scaled dynamically, and those of nvfp4 stay high precision.
    share_scales:  servers multiply q, k and v (gate and up, and others) as one layer, with one
             format and one second-level scale of nvfp4. True: such layers are quantized again, with
             the largest scale among them; several formats are refused. False: written as they are
             trained, for readers that keep layers apart. None: refused where they differ.
    names:   names in the checkpoint from names in the model; default: as transformers saves its
             models, else the same names.

    Every rank must call it. Sharded weights (`fully_shard`, tensor parallelism) are gathered one at
    a time, and rank 0 writes; the bytes are those of one process. Files appear under their names
    when all are whole. Packed experts are written one by one, as "experts.E.NAME.weight".

    Raises ValueError, on every rank and before anything is written, for a weight that the format
    does not hold, for infinities and NaN in quantized weights, for merged layers that differ, for a
    model without quantized layers, for a folder that holds a checkpoint, and where ranks hold other
    weights; NotImplementedError for experts, and for parts of weights without DTensor, that are
    spread over ranks.

    >>> model = fq.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), "fp8_block")
    >>> fq.export(model, "served")
    """
    max_bytes = size_of(max_shard_size)
    checkpoint = exported(model, format, dtype, input_amax, share_scales, names)
    files = list(in_buckets(checkpoint.planned, max_bytes, lambda planned: planned.nbytes))
    writer = _on_first_rank(lambda: Writer(Path(path), files, checkpoint.config))
    try:
        for source in checkpoint.parts:
            weight = checkpoint.gathered(source)
            if writer is not None:
                writer.write_all(checkpoint.tensors(source, weight))
            del weight
        _on_first_rank(lambda: writer and writer.finish())
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


@dataclass
class Exported:
    """The planned tensors of a checkpoint, before any weight is gathered.

    parts:    per weight.
    planned:  tensors per part, in that order.
    shared:   tensor amaxes of matrices that share a second-level scale (`_shared_amaxes`).
    config:   JSON files by name.
    """

    format: str
    parts: dict[Source, list[Part]]
    planned: list[list[Planned]]
    shared: dict[tuple[Source, int | None], Tensor]
    config: dict[str, dict]

    def gathered(self, source: Source) -> Tensor | list[Storage]:
        """The unsharded weight, as codes of each matrix if it stores codes. Every rank must call
        it."""
        codes = codes_of(source) if source.layers and (source, None) not in self.shared else None
        return master_of(source) if codes is None else codes

    def tensors(
        self, source: Source, weight: Tensor | list[Storage]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, values) of a weight that was gathered, as planned."""
        storages: dict[int | None, Storage] = {}
        for part in self.parts[source]:
            matrix, rows = part.slice.matrix, part.slice.rows
            if not source.layers and isinstance(weight, Tensor):
                yield part.slice.name, source.slice_of(weight, part.slice).to(part.dtype)
                continue
            if matrix is None and source.tensor.dim() == 3:
                yield part.slice.name, _decoded_in_one(source, weight, part.dtype)
                continue
            if isinstance(weight, list):
                storages = {matrix: weight[matrix or 0]}
            elif matrix not in storages:
                values, amax = matrix_of(source, weight, matrix), self.shared.get((source, matrix))
                storages = {matrix: encoded(values, source.layer_of(part.slice), amax)}
            storage = storages[matrix]
            if source.transposed:
                values = storage.dequantize(part.dtype).t()
                yield part.slice.name, values if rows is None else values[slice(*rows)]
            else:
                storage = storage if rows is None else storage.narrow(rows[0], rows[1] - rows[0])
                yield from part.tensors_of(storage, self.format).items()


def exported(
    model: nn.Module,
    format: str,
    dtype: torch.dtype | None,
    input_amax: Mapping[str, float] | None,
    share_scales: bool | None,
    names: Callable[[str], str] | None,
    tensor_amax: Callable[[Source, int | None], Tensor | None] | None = None,
) -> Exported:
    """Plan what `export` writes; arguments and errors are those of `export`. Every rank must call
    it.

    tensor_amax:  of a matrix of a source; default: of the gathered weight.
    """
    arguments = {"format": format, "dtype": dtype, "share_scales": share_scales, "names": names}
    read_all(_OPTIONS, input_amax=input_amax, **arguments)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the model has adapters, which these formats do not hold; merge them first "
            "(merge_and_unload)"
        )
    amaxes = dict(input_amax or {})
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    sources = sources_of(model, names)
    parts = {source: _parts(source, format, dtype, amaxes) for source in sources}
    pairs = [(source, part) for source in sources for part in parts[source]]
    schemes = {p.layer: _scheme(source, p, p.kind) for source, p in pairs if p.kind is not None}
    if not any(source.layers for source in sources):
        raise ValueError(
            "found no quantized layer to export; call fq.convert(model, recipe) first, or "
            "save_pretrained"
        )
    if unknown := amaxes.keys() - schemes.keys():
        raise ValueError(
            f"input_amax names {', '.join(sorted(unknown))}; quantized layers: "
            f"{', '.join(list(schemes)[:4])}, ..."
        )
    config = _config(model, format, schemes, _ignored(model, pairs, names), dtype)
    planned = [_planned(source, part, format) for source, part in pairs]
    _check_ranks(planned)
    _check_values(parts)
    shared = _shared_amaxes(pairs, schemes, share_scales, tensor_amax or _tensor_amax)
    return Exported(format, parts, planned, shared, config)


def _check_ranks(planned: list[list[Planned]]) -> None:
    """Raise ValueError on every rank if ranks hold different tensors, whose gathers would hang."""
    world = dist.group.WORLD
    facts = {t.name: f"{list(t.shape)} {t.dtype}" for tensors in planned for t in tensors}
    remedy = (
        "give every rank one model and the same options (stages of a pipeline are exported from a "
        "model of all)"
    )
    groups = [] if world is None else [world]
    agree(facts, groups, None, remedy, "ranks would write other tensors")


def _check_values(parts: dict[Source, list[Part]]) -> None:
    """Raise ValueError on every rank for values that no file holds (`num_lost`). One SUM all-reduce
    of a number per weight."""
    counts = [num_lost(source, of_source[0].dtype) for source, of_source in parts.items()]
    lost = torch.stack([count.to(counts[0].device) for count in counts])
    if dist.is_initialized():
        lost = lost.to(device_of(dist.group.WORLD))
        dist.all_reduce(lost)
    not_finite = "infinite or NaN: their blocks decode to NaN here, and to numbers on some servers"
    causes = ((not_finite, ""), ("too large for dtype=", ", or pass another dtype="))
    for numbers, (cause, remedy) in zip(lost.t().tolist(), causes):
        listed = [f"{n} elements of {source.name}" for n, source in zip(numbers, parts) if n]
        if listed:
            raise ValueError(
                f"{', '.join(listed[:4])}{', ...' * (len(listed) > 4)} are {cause}; mend the "
                f"weights{remedy}"
            )


def _on_first_rank(run: Callable[[], T]) -> T | None:
    """Call `run` on rank 0 and return its result, None on others. Errors are raised on every
    rank."""
    distributed = dist.is_initialized()
    result, raised = None, [None]
    if not distributed or dist.get_rank() == 0:
        try:
            result = run()
        except Exception as error:
            raised = [error]
    if distributed:
        dist.broadcast_object_list(raised, src=0)
    if raised[0] is not None:
        raise raised[0]
    return result


# What is written #


def _parts(
    source: Source, format: str, dtype: torch.dtype | None, input_amax: dict[str, float]
) -> list[Part]:
    if any(getattr(layer.parallel, "group", None) is not None for layer in source.layers):
        raise NotImplementedError(
            f"{source.name}: its parts are on the ranks of a process group, and no DTensor says "
            "how; export from a model that fq.parallel's styles, or nothing, cut"
        )
    if source.layers and source.tensor.dim() == 3 and len(source.layers) != source.tensor.shape[0]:
        raise NotImplementedError(
            f"{source.name}: its {source.tensor.shape[0]} experts are spread over ranks, "
            f"{len(source.layers)} on each; export from a model without expert parallelism"
        )
    if source.layers and format != "dequantized":
        pieces = source.matrices or source.slices
        return [_quantized_part(source, piece, format, input_amax) for piece in pieces]
    high = source.tensor.dtype
    if dtype is not None and source.is_parameter and high.is_floating_point:
        high = dtype
    return [Part(piece, source.shape_of(piece), high) for piece in source.slices]


def _quantized_part(
    source: Source, piece: Slice, format: str, input_amax: dict[str, float]
) -> Part:
    shape, fmt = source.shape_of(piece), source.format_of(piece)
    if source.transposed or len(shape) != 2 or not piece.name.endswith(".weight"):
        raise ValueError(
            f"{source.name} is saved as {piece.name} {list(shape)}"
            f"{', transposed' * source.transposed}; servers read codes of weights [out, in] "
            "named '.weight': leave the layer out by skip=, or export format='dequantized'"
        )
    if piece.rows is not None and any(row % fmt.row_alignment(ROWWISE) for row in piece.rows):
        raise ValueError(
            f"{piece.name} is rows {list(piece.rows)} of {source.name}, which divide blocks of "
            f"{fmt}; export format='dequantized'"
        )
    kind = layouts.kind_in(format, fmt, piece.name, (shape[0], shape[1]))
    part = Part(piece, shape, source.tensor.dtype, kind)
    amax = input_amax.get(part.layer)
    positive = isinstance(amax, (int, float, Tensor)) and 0 < amax < float("inf")
    if amax is not None and not (kind.takes_input_amax and positive and amax is not True):
        raise ValueError(
            f"input_amax of {part.layer} is {amax}; it must be positive, and {fmt} must scale "
            "a whole tensor of inputs"
        )
    return part._replace(input_amax=amax)


def _scheme(source: Source, part: Part, kind: Kind) -> Scheme:
    """How a layer is quantized. Inputs of nvfp4 need a scale of the checkpoint; those that had more
    bits in training than the weight are not quantized to its format."""
    if part.input_amax:
        return Scheme(kind, "static")
    inputs = source.layer_of(part.slice).plan.hybrid("input").side(ROWWISE)
    is_dynamic = inputs.fmt.bits <= kind.format.bits and not kind.is_two_level
    return Scheme(kind, "dynamic" if is_dynamic else "none")


def _planned(source: Source, part: Part, format: str) -> list[Planned]:
    if part.kind is None:
        return [Planned(part.slice.name, part.dtype, part.shape)]
    rows, cols = part.shape
    like = Storage.zeros(source.format_of(part.slice), ROWWISE, (rows, cols), torch.float32, "meta")
    tensors = part.tensors_of(like, format)
    return [Planned(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def _ignored(
    model: nn.Module, pairs: list[tuple[Source, Part]], names: Callable[[str], str] | None
) -> list[str]:
    """Layers of the checkpoint that hold a matrix in high precision; of tied ones every layer."""
    quantized, layers = set(), []
    for source, part in pairs:
        is_matrix = len(part.shape) == 2 and part.slice.name.endswith(".weight")
        if part.kind is not None:
            quantized.add(part.layer)
        elif is_matrix and not isinstance(source.owner, nn.Embedding):
            layers.append(part.layer)
    owners = {id(source.owner) for source, _ in pairs if source.attribute == "weight"}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in owners:  # tied to another's weight
            weight = f"{in_state_dict(name)}.weight"
            layers.append((names(weight) if names else weight).removesuffix(".weight"))
    return [layer for layer in dict.fromkeys(layers) if layer not in quantized]


# Second-level scales of layers that servers merge #


def _shared_amaxes(
    pairs: list[tuple[Source, Part]],
    schemes: dict[str, Scheme],
    share: bool | None,
    tensor_amax: Callable[[Source, int | None], Tensor | None],
) -> dict[tuple[Source, int | None], Tensor]:
    """Return the common tensor amax of matrices that servers merge and whose amaxes differ.

    Raises ValueError for merged layers of several schemes, and for other amaxes if `share` is None.
    """
    weights = {part.layer: (source, part) for source, part in pairs if len(part.shape) in (2, 3)}
    if share is False or not schemes:
        return {}
    shapes = {layer: part.shape for layer, (_, part) in weights.items()}
    merged = merged_layers({layer: shape[-1] for layer, shape in shapes.items()})
    shared: dict[tuple[Source, int | None], Tensor] = {}
    for layers in (*merged, *expert_layers(shapes)):
        _check_one_format(layers, schemes)
    for layers in merged:
        scheme = schemes.get(layers[0])
        if scheme is None or not scheme.kind.is_two_level:
            continue
        keys = [(source, part.slice.matrix) for source, part in map(weights.__getitem__, layers)]
        keys = list(dict.fromkeys(keys))
        of_matrices = (tensor_amax(source, matrix) for source, matrix in keys)
        amaxes = torch.cat([amax.reshape(1).cpu() for amax in of_matrices if amax is not None])
        if torch.equal(amaxes, amaxes[:1].expand_as(amaxes)):
            continue
        if share is None:
            raise ValueError(
                f"{', '.join(layers)} have tensor scales of their own, and servers multiply "
                "them as one layer with one; pass share_scales=True to quantize them again "
                "with the largest, or False for a reader that keeps them apart"
            )
        for key in keys:
            if has_codes_alone(key[0]):
                raise ValueError(
                    f"{key[0].name} holds codes alone, which cannot be given the scale of "
                    "other layers"
                )
            shared[key] = amaxes.amax().reshape(1)
    return shared


def _check_one_format(layers: Sequence[str], schemes: dict[str, Scheme]) -> None:
    """Raise ValueError, naming the layers, if servers merge layers of several schemes."""
    if len({schemes.get(layer) for layer in layers}) <= 1:
        return
    words = {layer: str(schemes.get(layer, "high precision")) for layer in layers}
    first = {word: layer for layer, word in reversed(words.items())}
    listed = ", ".join(f"{layer} ({word})" for word, layer in reversed(first.items()))
    raise ValueError(
        f"{listed} have formats of their own, and servers multiply {', '.join(layers[:6])} "
        f"{'..., ' * (len(layers) > 6)}as one layer with one; give them one by fq.set_recipe or "
        "skip=, or pass share_scales=False for a reader that keeps them apart"
    )


def _tensor_amax(source: Source, matrix: int | None) -> Tensor | None:
    """Every rank must call it: it gathers the weight."""
    storages = codes_of(source)
    if storages is not None:
        return storages[matrix or 0].tensor_amax
    values = matrix_of(source, master_of(source), matrix)
    return statistics_of(values, source.layers[matrix or 0]).tensor_amax


def _decoded_in_one(source: Source, weight: Tensor | list[Storage], dtype: torch.dtype) -> Tensor:
    """Packed matrices that the checkpoint stores as one tensor, dequantized."""
    if isinstance(weight, Tensor):
        matrices = enumerate(source.layers)
        storages = [encoded(matrix_of(source, weight, e), layer) for e, layer in matrices]
    else:
        storages = weight
    values = [storage.dequantize(dtype) for storage in storages]
    return torch.stack([v.t() if source.transposed else v for v in values])


def _config(
    model: nn.Module,
    format: str,
    schemes: dict[str, Scheme],
    ignored: list[str],
    dtype: torch.dtype | None,
) -> dict[str, dict]:
    """JSON files by name: the model's own configuration, if it has one, and how it is quantized."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    config = {} if to_json is None else json.loads(to_json())
    config.pop("quantization_config", None)
    if config and not config.get("architectures"):
        # but for the classes that fully_shard and our own modules derive from it
        classes = (c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
        config["architectures"] = [next(c for c in classes if not hasattr(c, "fused_as")).__name__]
    if config and dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    if format == "dequantized":
        return {"config.json": config} if config else {}
    quantization = configs.quantization_config(format, schemes, ignored)
    files = {"config.json": config | {"quantization_config": quantization}}
    if format == "modelopt":
        files["hf_quant_config.json"] = configs.hf_quant_config(quantization)
    return files

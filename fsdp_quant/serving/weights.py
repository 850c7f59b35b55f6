# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint: names, slices and values of a model's weights, gathered one by one.

[Note: where codes come from]
Stored codes (quantized parameters, frozen and synced weights) are exported unchanged. Masters are
gathered and quantized whole, to the bytes that their shards have. Only scales that tensor
parallelism computes per part (blocks or `fp8_row` rows that it cuts) are computed once here.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint import storage_tensors
from ..formats import ROWWISE, Format
from ..linear.has_weight import saved_plain
from ..linear.linear import Linear
from ..ops import dispatch
from ..ops.dispatch import Statistics
from ..scaling import RowCuts
from ..storage import Storage
from ..tensor.frozen import gathered_codes
from ..tensor.fsdp_hooks import managed_of
from ..tensor.model_weights import quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import in_state_dict, local_of, reshard
from ..tensor.weight_state import Piece, encode_piece


class Slice(NamedTuple):
    """Rows of a weight that a checkpoint stores as one tensor.

    name:   of the tensor in the checkpoint.
    matrix: index into packed matrices [E, N, K]; None: rows are dim 0 of the weight.
    rows:   [first, end) of the matrix; None: the whole weight.
    """

    name: str
    matrix: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(eq=False)
class Source:
    """A parameter or buffer of the model.

    name:    in the model, without wrappers.
    owner:   module that has it as `attribute`.
    layers:  quantized layers over its matrices; empty: high precision.
    transposed:  its matrices are [K, N].
    slices:  the tensors of the checkpoint that it consists of.
    matrices:  those of packed matrices [E, N, K] that are written one by one; empty: of no others
               than `slices`.
    """

    name: str
    owner: nn.Module
    attribute: str
    is_parameter: bool
    layers: list[Linear] = field(default_factory=list)
    transposed: bool = False
    slices: list[Slice] = field(default_factory=list)
    matrices: list[Slice] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.attribute)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: frozen codes of matrices that are stored transposed are [.., N, K]."""
        shape = tuple(self.tensor.shape)
        is_turned = self.transposed and isinstance(local_of(self.tensor), QuantizedTensor)
        return (*shape[:-2], shape[-1], shape[-2]) if is_turned else shape

    def shape_of(self, piece: Slice) -> tuple[int, ...]:
        shape = self.shape
        if piece.rows is None:
            return shape if piece.matrix is None else shape[1:]
        return (piece.rows[1] - piece.rows[0], *shape[1 if piece.matrix is None else 2 :])

    def slice_of(self, tensor: Tensor, piece: Slice) -> Tensor:
        tensor = tensor if piece.matrix is None else tensor[piece.matrix]
        return tensor if piece.rows is None else tensor[slice(*piece.rows)]

    def layer_of(self, piece: Slice) -> Linear:
        return self.layers[piece.matrix or 0]

    def format_of(self, piece: Slice) -> Format:
        """The format of the rowwise codes, which the forward multiplies."""
        return self.layer_of(piece).plan.weight.side(ROWWISE).fmt


def sources_of(model: nn.Module, rename: Callable[[str], str] | None = None) -> list[Source]:
    """Every parameter and persistent buffer once, in the order of the model.

    rename:  names in the checkpoint, from those that it would have.

    Raises ValueError for what transformers stores in another form than rows of the parameter.
    """
    reshard(model)
    quantized = {
        id(weight.parameter): (list(weight.layers), weight.is_transposed)
        for weight in quantized_weights(model)
        if weight.layers[0].plan.weight.side(ROWWISE).fmt.is_quantized
    }
    sources, visited = [], set()
    for prefix, module in model.named_modules():
        skipped = module._non_persistent_buffers_set
        for attribute, tensor in (module._parameters | module._buffers).items():
            if tensor is None or attribute in skipped or id(tensor) in visited:
                continue
            visited.add(id(tensor))
            name = in_state_dict(f"{prefix}.{attribute}".lstrip("."))
            layers, transposed = quantized.get(id(tensor), ([], False))
            is_parameter = attribute in module._parameters
            sources.append(Source(name, module, attribute, is_parameter, layers, transposed))
    _name_slices(model, sources)
    if rename is not None:
        for source in sources:
            source.slices = [s._replace(name=rename(s.name)) for s in source.slices]
            source.matrices = [s._replace(name=rename(s.name)) for s in source.matrices]
    return sources


# Names #


def _name_slices(model: nn.Module, sources: list[Source]) -> None:
    """The slices of each source: as transformers saves its models, which import it themselves.

    Quantized packed matrices of other models are written one by one; codes of every model are.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    named = {}
    if revert is not None and hasattr(model, "config") and hasattr(model, "save_pretrained"):
        named = _as_transformers_saves(model, sources, revert)
    for source in sources:
        source.slices = named.get(source) or [Slice(source.name)]
        packed = source.is_parameter and source.tensor.dim() == 3 and not source.transposed
        if packed and len(source.slices) == 1:
            parent, _, part = source.slices[0].name.rpartition(".")
            part, count = part if part == "weight" else f"{part}.weight", source.tensor.shape[0]
            source.matrices = [Slice(f"{parent}.{e}.{part}".lstrip("."), e) for e in range(count)]
            if source.layers and source not in named:
                source.slices = source.matrices


def _as_transformers_saves(
    model: nn.Module, sources: list[Source], revert: Callable
) -> dict[Source, list[Slice]]:
    """Slices by source, from reverting transformers' conversion of tensors that hold row
    numbers."""
    first, numbered = [0], {}
    for source in sources:
        shape = torch.Size(source.shape)
        rows = shape[: 2 if len(shape) == 3 else 1]
        end = first[-1] + rows.numel()
        numbers = torch.arange(first[-1], end, dtype=torch.int64, device="cpu")
        numbered[source.name] = numbers.view((*rows, *[1] * (len(shape) - len(rows))))
        first.append(end)
    slices: dict[Source, list[Slice]] = {}
    for name, numbers in revert(model, numbered).items():
        flat = numbers.flatten()
        start, count = int(flat[0]) if len(flat) else 0, len(flat)
        i = bisect.bisect_right(first, start) - 1
        source, start = sources[i], start - first[i]
        expected, shape = numbered[source.name], source.shape
        if not torch.equal(flat, expected.flatten()[start : start + count]):
            raise ValueError(
                f"transformers saves {name} in another form than rows of {source.name}; export it "
                "by its own means"
            )
        if numbers.shape == expected.shape:
            piece = Slice(name)
        elif len(shape) == 3 and numbers.shape[1:] == (1,):
            matrix, row = divmod(start, shape[1])
            piece = Slice(name, matrix, None if count == shape[1] else (row, row + count))
        else:
            piece = Slice(name, None, (start, start + count))
        slices.setdefault(source, []).append(piece)
    return slices


# Values #


def master_of(source: Source) -> Tensor:
    """The whole high-precision tensor. Every rank must call it: it gathers a sharded one.

    Raises StaleWeightError for a weight that has codes only.
    """
    tensor = source.tensor
    plain = saved_plain(tensor, tensor.detach()).detach()
    if isinstance(plain, DTensor):
        plain = plain.to(plain.device_mesh.device_type)  # offloaded
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def codes_of(source: Source) -> list[Storage] | None:
    """The whole rowwise codes of each matrix of a weight that stores codes; None: quantize its
    master.

    Every rank must call it: it gathers a sharded one.
    """
    weight = local_of(source.tensor)
    if not isinstance(weight, QuantizedTensor):
        return None
    if weight.dim() == 3:
        managed = managed_of(weight.state) if isinstance(weight, QuantizedWeight) else None
        weight = weight if managed is None else gathered_codes(managed)
        return [matrix.storage(ROWWISE) for matrix in weight._pair.groups]
    if not isinstance(weight, QuantizedWeight) or weight.state.weight_sync is not None:
        return [weight.storage_for(ROWWISE)]
    state, managed = weight.state, managed_of(weight.state)
    if managed is None and not isinstance(source.tensor, DTensor):
        return [weight.storage_for(ROWWISE)]
    if managed is None or state.tensor_group is not None:
        return None
    weight.refresh_shard(managed)
    if weight.rowwise is None:
        return None
    storage = weight.storage_for(ROWWISE)
    sharded = storage_tensors(storage, managed.registered, state.shape[0])
    buffers = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in sharded.items()}
    return [storage.with_buffers(buffers, shape=tuple(state.shape), row0=0)]


def has_codes_alone(source: Source) -> bool:
    """No master is there to be quantized again."""
    weight = local_of(source.tensor)
    is_synced = isinstance(weight, QuantizedWeight) and weight.state.weight_sync is not None
    return is_synced or (isinstance(weight, QuantizedTensor) and weight.is_frozen)


@torch.no_grad()
def num_lost(source: Source, dtype: torch.dtype) -> Tensor:
    """int64 [2]: elements of this rank that no file in `dtype` holds: infinities and NaN of a
    quantized weight, whose block they destroy, and finite values that `dtype` cannot represent.

    The sum over all ranks is that of the whole weight.
    """
    tensor, is_counted = source.tensor, not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(tensor, DTensor):
        place = tensor.device_mesh.get_coordinate()
        is_counted = place is not None and not any(
            rank for rank, p in zip(place, tensor.placements) if p.is_replicate()
        )
    if not is_counted or not tensor.is_floating_point() or tensor.element_size() == 1:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if has_codes_alone(source) and not isinstance(tensor, DTensor):
        values = local_of(tensor).dequantize()
    else:
        values = local_of(saved_plain(tensor, tensor.detach())).detach()
    is_finite = values.isfinite()
    if source.layers:
        values = values.to(source.layers[0]._weight_state.compute_dtype or values.dtype)
    is_too_large = is_finite & ~values.to(dtype).isfinite()
    return torch.stack([(~is_finite).sum() * bool(source.layers), is_too_large.sum()])


def matrix_of(source: Source, weight: Tensor, matrix: int | None) -> Tensor:
    """One matrix [N, K] of an unsharded weight."""
    values = weight if matrix is None else weight[matrix]
    return values.t() if source.transposed else values


def statistics_of(values: Tensor, layer: Linear) -> Statistics:
    """Statistics of a whole weight [N, K] for its rowwise codes."""
    state = layer._weight_state
    encoding = state.quantizer.encodings[ROWWISE]
    dtype = state.encoded_dtype(encoding, values.dtype)
    return dispatch.statistics(values, [encoding], dtype=dtype)[0]


@torch.no_grad()
def encoded(values: Tensor, layer: Linear, tensor_amax: Tensor | None = None) -> Storage:
    """The rowwise codes of a whole weight [N, K], equal to those of a forward.

    tensor_amax:  fp32 [1], in place of that of the values.
    """
    device, statistics = values.device, None
    if tensor_amax is not None:
        statistics = Statistics(statistics_of(values, layer).amax, tensor_amax.to(device))
    piece = Piece(layer._weight_state, values, RowCuts((0, values.shape[0])), 0)
    return encode_piece(piece, ROWWISE, values.dtype, statistics, device)

# SPDX-License-Identifier: Apache-2.0
"""The codes of a model's quantized weights, as shards and as DTensors for DCP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..formats import Direction, ceil_div
from ..scaling import RowCuts
from ..storage import Placement, Storage
from ..tensor.gathered_weight import cuts_and_rank
from ..tensor.model_weights import ModelWeight, quantized_weights
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.root_statistics import Sharded, reduce_statistics
from ..tensor.torch_compat import ManagedParam, dtensor_like
from ..tensor.weight_codes import WeightCodes
from ..tensor.weight_state import Piece, WeightState, WeightTensor, encode_piece, values_of


def _of_matrix(codes: QuantizedTensor | None, state: WeightState, e: int) -> QuantizedTensor | None:
    """The codes of one of this rank's matrices; None of one that another rank has."""
    if codes is None or not state.packed:
        return codes
    matrices = codes._pair.groups
    return QuantizedTensor(pair=matrices[e]) if 0 <= e < len(matrices) else None


@dataclass(frozen=True)
class LocalWeight:
    """This rank's rows of a quantized weight.

    name:        as in the model's state dict.
    piece:       [local rows, K], its state and cuts.
    managed:     by `fully_shard`; None if the weight is whole.
    statistics:  that ranks share, by matrix and direction.
    experts:     (ranks that hold other matrices of the packed weight, matrices per rank), or None.
    codes:       of a weight without high-precision values here: its optimizer is gone, a trainer
                 has its masters (`fq.hooks`), or `fq.freeze` dropped them.
    transposed:  the model stores it [.., K, N]; files of codes leave it out.
    sharded:     the DTensor of a weight whose shards are no rows: each rank gathers it to encode.
    """

    name: str
    piece: Piece
    managed: ManagedParam | None
    statistics: dict
    experts: tuple[dist.ProcessGroup, int] | None = None
    codes: QuantizedTensor | None = None
    transposed: bool = False
    sharded: DTensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the whole weight (tensor parallelism: of this rank's part)."""
        return self.piece.cuts.rows

    @property
    def device(self) -> torch.device:
        return self.piece.values.device if self.managed is None else self.managed.device

    @property
    def like(self) -> DTensor | None:
        """The sharded weight, or None. Raises NotImplementedError if more than one axis is cut."""
        if self.piece.state.tensor_group is not None:
            raise NotImplementedError(
                f"{self.name} is cut by tensor parallelism, and its codes shard along one axis "
                "only; save the masters, and write codes from a model without it"
            )
        local = None if self.managed is None else self.managed.local
        if isinstance(local, WeightTensor) and local.state.packed:
            raise NotImplementedError(
                f"{self.name} is a matrix of a packed weight under fully_shard, whose codes have "
                "no form as DTensors; save the high-precision weight, which a load encodes to the "
                "same codes"
            )
        return None if self.managed is None else self.managed.registered

    def storage(self, direction: Direction) -> Storage:
        """Encode these rows as a gather would. `prepared` must have run on every rank, and every
        rank must call it."""
        if self.codes is not None:
            return self.codes.storage_for(direction)
        piece, state = self.piece, self.piece.state
        if self.sharded is not None:
            weight = self.sharded.full_tensor().detach()
            piece = piece._replace(values=weight.mT if self.transposed else weight)
        dtype = state.compute_dtype or piece.values.dtype
        statistics = self.statistics.get((state.name, direction))
        return encode_piece(piece, direction, dtype, statistics, self.device)

    def storages(self) -> list[Storage]:
        """One per direction that is encoded from the master and was not dropped."""
        return [
            self.storage(d)
            for d in self.piece.state.quantizer.encodings
            if self.codes is None or getattr(self.codes, d.value) is not None
        ]


def prepared(model: nn.Module) -> list[LocalWeight]:
    """The quantized weights of a model, each once, with the statistics that encoding them needs.
    Every rank must call it."""
    shards = [(w, _sharded(w)) for w in quantized_weights(model)]
    shared = [s for _, s in shards if s.managed is not None or s.state.spans_parts]
    reduce_statistics([s for s in shared if _only_codes(s.local) is None], {})
    weights = []
    for weight, (local, state, managed, _) in shards:
        cuts, rank = cuts_and_rank(managed, local.shape[0])
        group, count = state.tensor_group if state.packed else None, cuts.rows
        experts, first = (None, 0) if group is None else ((group, count), group.rank() * count)
        codes = _only_codes(local)
        values = values_of(local) if codes is None else local.dequantize()
        parameter, sharded = weight.parameter, None
        if isinstance(parameter, DTensor) and managed is None and state.tensor_group is None:
            sharded = parameter
        weights += [
            LocalWeight(
                name=f"{weight.name}.{e}" if state.packed else weight.name,
                piece=piece,
                managed=managed,
                statistics=state.statistics or {},
                experts=experts,
                codes=_of_matrix(codes, state, e - first - cuts.bounds[rank]),
                transposed=weight.is_transposed,
                sharded=sharded,
            )
            for e, piece in enumerate(state.pieces(values, cuts, rank, every=True), first)
        ]
    return weights


def _sharded(weight: ModelWeight) -> Sharded:
    """This rank's local tensor as [.., N, K]; managed if its shards are rows or matrices of it."""
    local, managed = weight.local, weight.managed
    if weight.is_transposed and not isinstance(local, QuantizedTensor):  # codes are [.., N, K]
        local, managed = local.mT, managed if weight.state.packed else None
    return Sharded(local, weight.state, managed)


def _only_codes(local: Tensor) -> QuantizedTensor | None:
    """`local` if it has no high-precision values to encode, else None."""
    has_values = isinstance(local, WeightCodes) and local.has_values
    return local if isinstance(local, QuantizedTensor) and not has_values else None


def storage_tensors(storage: Storage, like: DTensor | None, rows: int) -> dict[str, Tensor]:
    """The buffers of a shard's storage as DTensors for DCP; plain tensors if the weight is whole.

    like:     the sharded weight, whose mesh and placements the DTensors have; buffers that do not
              shard are replicated, as are scales of blocks that a cut divides. None: not sharded.
    rows:     of the whole tensor.
    returns:  buffer name -> tensor. Every rank must call it: cut blocks need a MAX all-reduce.
    """
    if like is None:
        return storage.buffers()
    group = like.device_mesh.get_group(like.device_mesh.ndim - 1)
    chunk = RowCuts.chunked(rows, group.size()).bounds[1] if group.size() > 1 else None
    block_rows = storage.fmt.dims(storage.direction)[0] or rows
    tensors: dict[str, Tensor] = {}
    for name, placement in storage.placements(chunk).items():
        buffer, placements = storage.buffers()[name], like.placements
        shape = [rows, *buffer.shape[1:]] if name == "data" else list(buffer.shape)
        if name == "scale" and placement is not Placement.REPLICATE:
            shape[0] = ceil_div(rows, block_rows)
        if placement is Placement.HALO:
            buffer = _whole_scale(buffer, storage.row0 // block_rows, shape, group)
        if placement is not Placement.SHARD:
            placements = (Replicate(),) * len(placements)
        tensors[name] = dtensor_like(like, buffer.contiguous(), shape, placements)
    return tensors


def _whole_scale(scale: Tensor, first: int, shape: list[int], group: dist.ProcessGroup) -> Tensor:
    """Scales of every block on every rank. Ranks that share a block have the same scale for it.

    first:  the block row of this rank's first scale.
    """
    scales = scale.new_zeros(shape)
    scales[first : first + scale.shape[0]] = scale
    # integers order as the scales do, which are not negative
    bits = scales.view(torch.int32 if scales.dtype is torch.float32 else scales.dtype)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return scales


def code_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The codes of every quantized weight for `dcp.save`: "name.direction.buffer" -> DTensor, or a
    plain tensor if it is whole.

    Leaves out directions that are not encoded from the master, and weights that are stored
    transposed. Every rank must call it.
    """
    named: dict[str, Tensor] = {}
    for w in prepared(model):
        for storage in w.storages() if not w.transposed else ():
            prefix = f"{w.name}.{storage.direction.value}"
            tensors = storage_tensors(storage, w.like, w.rows)
            named |= {f"{prefix}.{name}": t for name, t in tensors.items()}
    return named

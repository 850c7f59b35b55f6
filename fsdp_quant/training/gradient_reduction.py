# SPDX-License-Identifier: Apache-2.0
"""`set_gradient_reduction`: FSDP2 sends gradients as bf16 or as codes, and sums them in fp32."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..context import STEP
from ..counters import counters
from ..ops.gradient_codes import (
    GRADIENT_FORMATS,
    GradientLayout,
    decode_gradients,
    encode_gradients,
    gradient_keys,
)
from ..ops.reference import known
from ..ops.rng import tensor_id
from ..tensor import torch_compat
from ..tensor.agreement import axes_of, raises_on_all_ranks
from .gradient_buffers import Outgoing, ReplicaSum, SendBuffer, Sent, values_of

# torch's own reduction
_OF_TORCH = "fp32"


def set_gradient_reduction(model: nn.Module, format: str) -> None:
    """Choose how FSDP2 sends the gradients of every `fully_shard` in `model`, converted or not.
    Every rank must call it, between steps; a captured step (`fq.graphed`) needs `reset()` then.

    format:  "bf16", or codes: "fp8_1x128", "mxfp8", "nvfp4"; "fp32": as torch does.

    Each rank sends each owner its piece of the gradients, which the owner sums in fp32, in the
    order of ranks. `reduce_dtype` of FSDP2 is the dtype of the result alone.

    - "bf16" sends bf16 gradients as they are. Others (fp32 parameters, gradients accumulated under
      `set_requires_gradient_sync(False)`) are rounded to nearest.
    - Codes are rounded stochastically: their mean is the gradient. Random bits are keyed by step,
      rank, parameter and element, so they do not depend on how `fully_shard` groups parameters. The
      rank is that among shards and copies: ranks of tensor parallelism round equal gradients alike.
    - HSDP: the sums of copies travel likewise, as codes or bf16, and their total in bf16, since
      nothing averages the error of a last rounding. All copies get the same bits.
    - A NaN or an infinity arrives as NaN or infinity, in its whole block of 128, 32 or 1024
      elements.
    - Where FSDP2 has no other rank to send to, gradients stay as they are.

    Divide factors, AVG and SUM, CPU offload, unused parameters and `set_all_reduce_hook` work.
    Later calls of `fully_shard` keep torch's reduction. Raises ValueError, on every rank, for
    another format, a model without `fully_shard`, complex parameters, a `set_custom_reduce_scatter`
    of others, and ranks that give different formats.

    >>> fq.set_gradient_reduction(nn.Linear(64, 32), "mxfp8")
    Traceback (most recent call last):
    ValueError: fq.set_gradient_reduction found no fully_shard in Linear; call fully_shard first
    """
    groups = torch_compat.fsdp_groups_of(model)
    axes, facts = axes_of(model), {"fq.set_gradient_reduction's format": repr(format)}
    with raises_on_all_ranks(itertools.chain(*axes), facts, "give every rank the same"):
        _check(model, format, groups)
    for group in groups:
        comm = None if format == _OF_TORCH else GradientReduction(format)
        torch_compat.set_reduce_scatter(group, comm)


def _check(model: nn.Module, format: str, groups: Sequence[Any]) -> None:
    wanted = _OF_TORCH, *GRADIENT_FORMATS
    if format not in wanted:
        raise ValueError(
            f"fq.set_gradient_reduction: format is {format!r}; wanted one of {', '.join(wanted)}"
        )
    if not groups:
        raise ValueError(
            f"fq.set_gradient_reduction found no fully_shard in {type(model).__name__}; call "
            "fully_shard first"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_complex and format != _OF_TORCH:
            raise ValueError(
                f"fq.set_gradient_reduction: {name} is {parameter.dtype}, of which {format} would "
                "send no imaginary parts; call it for the modules without such parameters, or "
                "store torch.view_as_real of them"
            )
    for comm in map(torch_compat.reduce_scatter_of, groups):
        if comm is not None and not isinstance(comm, GradientReduction):
            raise ValueError(
                f"fq.set_gradient_reduction would replace {type(comm).__name__}, which reduces "
                "gradients already; leave out its set_custom_reduce_scatter, or "
                "set_allocate_memory_from_process_group"
            )


class GradientReduction(torch_compat.ReduceScatter):
    """The reduce-scatter of one group of parameters: an all-to-all of codes, and a sum in fp32.

    format:  of `GRADIENT_FORMATS`.
    """

    def __init__(self, format: str):
        self.format = format
        self._counts: dict[tuple[str, torch.device], Tensor] = {}  # of reductions, by stage
        self._idents: dict[tuple, Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that FSDP2 asks for: of the input first, then of the output."""
        running = torch_compat.running_reduction()
        if not running.has_input and running.shards is not None and running.shards.size() > 1:
            encode = functools.partial(self._encode, "shards", running, running.shards.size())
            return SendBuffer(size, dtype, device, Outgoing(encode))
        memory = torch.empty(*size, dtype=dtype, device=device)
        replicas = running.replicas
        if not running.has_input or replicas is None or replicas.size() == 1:
            return memory
        reduce = functools.partial(self._sum_replicas, running=running, group=replicas)
        return ReplicaSum(memory, replicas, reduce)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's piece of the sum that `input_tensor`, a `SendBuffer`, was given."""
        if async_op:
            raise ValueError("gradients sent as codes are decoded after they came: async_op=False")
        outgoing: Outgoing = input_tensor.outgoing  # pyright: ignore[reportAttributeAccessIssue]
        factor = torch_compat.factor_of(op, group.size()) * outgoing.factor
        layout, codes = known(outgoing.sent, "the gradients")
        received = self._exchange("shards", codes, group)
        decode_gradients(received, layout, values_of(output_tensor), factor)

    def _encode(
        self, stage: str, running: torch_compat.Reduction, ranks: int, grads: Sequence[Tensor]
    ) -> Sent:
        layout = _layout(tuple(tuple(g.shape) for g in grads), ranks, self.format)
        keys = self._keys(stage, running, grads[0].device) if layout.is_stochastic else None
        return layout, encode_gradients(grads, layout, keys)

    def _keys(self, stage: str, running: torch_compat.Reduction, device: torch.device) -> Tensor:
        """Random keys of the next reduction of these gradients in one stage, int64 [names, 5]."""
        count, names = (stage, device), (stage, device, running.names)
        if count not in self._counts:
            self._counts[count] = STEP.new_count(device)
        if names not in self._idents:
            suffix = f"gradient {stage} {running.sender}"
            ids = [tensor_id(f"{torch_compat.in_state_dict(n)} {suffix}") for n in running.names]
            self._idents[names] = torch.tensor(ids, dtype=torch.int64, device=device)
        return gradient_keys(STEP.on(device), self._idents[names], self._counts[count])

    def _exchange(self, stage: str, codes: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Piece w to rank w: returns those that all ranks sent to this one, in their order."""
        counters.add("gradient", ("backward", stage, self.format), codes.nbytes)
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=group)
        return received

    def _sum_replicas(
        self, values: Tensor, running: torch_compat.Reduction, group: dist.ProcessGroup
    ) -> Any:
        """Replace the pieces of a copy by their total over the copies, rounded to bf16."""
        grads = values.split(running.numels)
        layout, codes = self._encode("replicas", running, group.size(), grads)
        factor = torch_compat.factor_of(running.replica_op, group.size())
        total = values.new_empty(sum(layout.numels), dtype=torch.bfloat16)
        decode_gradients(self._exchange("replicas", codes, group), layout, total, factor)
        totals = total.new_empty(group.size() * len(total))
        counters.add("gradient", ("backward", "replicas", "bf16"), totals.nbytes)
        work = torch_compat.all_gather(totals, total, group, async_op=True)
        work.wait()
        for grad, pieces in zip(grads, totals.view(group.size(), -1).split(layout.numels, 1)):
            grad.copy_(pieces.reshape(-1)[: len(grad)])
        return work


_layout = functools.cache(GradientLayout)


def reduced_bytes(params: Sequence[torch_compat.ManagedParam]) -> tuple[int, int]:
    """Bytes (to owners of shards, between copies) that a rank sends, its own part included, when
    the gradients of these parameters of one group are reduced.

    A ring of W ranks sends (W - 1) / W of them. Parameters without a gradient are left out.
    """
    params = [m for m in params if m.registered.requires_grad]
    if not params:
        return 0, 0
    first = params[0]
    ranks, copies = first.world_size, first.copies
    shapes = tuple(m.reduced_shape for m in params)
    comm = torch_compat.reduce_scatter_of(first.group)
    if not isinstance(comm, GradientReduction):
        size = sum(_layout(shapes, ranks, "bf16").numels) * first.reduce_dtype.itemsize
        return size * ranks * (ranks > 1), 2 * size * (copies > 1)
    shards = _layout(shapes, ranks, comm.format)
    between = _layout(tuple((n,) for n in shards.numels), copies, comm.format)
    totals = sum(between.numels) * torch.bfloat16.itemsize
    return (shards.nbytes * ranks * (ranks > 1), (between.nbytes + totals) * copies * (copies > 1))

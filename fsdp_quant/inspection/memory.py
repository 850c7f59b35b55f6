# SPDX-License-Identifier: Apache-2.0
"""Bytes that FSDP2 gathers, and that a rank holds in a training step, from shapes and formats.

`Memory` does not count what norms, attention, activation functions and the loss save, operands
while a GEMM runs, and memory that torch keeps for later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ..formats import COLUMNWISE, ROWWISE, Direction, round_up
from ..linear.linear import Linear
from ..models.fuse import InputPattern, MLPPattern
from ..models.layernorm_mlp import LayerNormMLP
from ..models.set_recipe import converted_units
from ..ops.capability import Place
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.gathered_weight import cuts_of, gathered_directions, gathered_size, wire_buffers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import ManagedParam, local_of

Runs = Callable[[Linear], tuple[torch.dtype, Place]]  # dtype of activations, and where


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    weights:    parameters and buffers between steps: shards, or codes.
    gradients:  of trainable parameters, in their dtype; AdamW's two moments are twice that.
    fsdp:       what FSDP2 holds at once: gathers of the two largest groups, and of those that stay
                until the backward; gradients of the largest group before their reduction.
    codes:      of unsharded weights, kept from forward to backward in eager mode.
    per_token:  what linear layers save of a token, and gate(x) and up(x) of recognized MLPs.
    tokens:     of a rank's micro-batch; None: unknown.
    """

    weights: int
    gradients: int
    fsdp: int
    codes: int
    per_token: float
    tokens: int | None = None

    @property
    def peak(self) -> int:
        """Estimate the bytes where the backward begins: the sum, without what is not counted."""
        kept = self.weights + 3 * self.gradients + self.fsdp + self.codes
        return kept + round(self.per_token * (self.tokens or 0))

    def __str__(self) -> str:
        names = "weights", "gradients", "fsdp", "codes"
        parts = ", ".join(f"{name} {getattr(self, name) / 2**20:,.1f}" for name in names)
        peak = f"; with AdamW and {self.tokens or 0:,} tokens at least {self.peak / 2**20:,.1f}"
        text = f"memory of a rank, MiB: {parts}; layers save {self.per_token:,.0f} B a token"
        return text + peak * (self.tokens is not None)


def memory_of(
    model: nn.Module,
    managed: list[ManagedParam],
    roots: set[int],
    active: int,
    runs: Runs,
    tokens: int | None,
) -> Memory:
    """Count the bytes of a converted model.

    managed:  parameters of FSDP2; roots: ids of the states of its roots. active: experts that read
              a token.
    """
    trained = [local_of(p) for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.dtype.itemsize for p in trained)
    codes, sharded = 0.0, {id(m.local) for m in managed}
    for layer in (layer for layers in converted_units(model).values() for layer in layers):
        weight, columnwise = local_of(layer.weight), layer.plan.operand("weight", COLUMNWISE)
        is_kept = id(weight) not in sharded and not isinstance(weight, QuantizedTensor)
        if is_kept and columnwise.is_quantized:
            codes += columnwise.bytes_per_element() * prod(layer.runtime.weight_state.shape)
    weights = sum(map(_bytes_of, [*model.parameters(), *model.buffers()]))
    fsdp, per_token = held_bytes(managed, roots), sum(_saved(model, active, runs))
    return Memory(weights, gradients, fsdp, round(codes), per_token, tokens)


def _bytes_of(tensor: Tensor) -> int:
    local = local_of(tensor)
    if not isinstance(local, QuantizedTensor):
        return local.numel() * local.dtype.itemsize
    sides = {id(s): s.buffers() for s in (local.rowwise, local.columnwise) if s is not None}
    return sum(b.nbytes for buffers in sides.values() for b in buffers.values())


def _saved(model: nn.Module, active: int, runs: Runs) -> Iterator[float]:
    """Yield the bytes of each tensor that is saved of a token."""
    sharers: set[int] = set()  # layers that read the input of another one
    for module in model.modules():
        pattern = getattr(type(module), "fused_as", None)
        if isinstance(module, LayerNormMLP):
            pattern = MLPPattern("", module.activation, recompute=module.recompute)
        if not isinstance(pattern, (MLPPattern, InputPattern)):
            continue
        names = pattern.parts[: -1 if isinstance(pattern, MLPPattern) else None]
        parts = [getattr(p, "base_layer", p) for n in names if (p := getattr(module, n, None))]
        sharers.update(map(id, parts[1:]))
        for part in parts if isinstance(pattern, MLPPattern) and not pattern.recompute else ():
            yield part.runtime.weight_state.shape[-2] * runs(part)[0].itemsize
    for name, layers in converted_units(model).items():
        layer = layers[0]
        dtype, place = runs(layer)
        planned, size = layer.plan_on(dtype, place), float(dtype.itemsize)
        resolved, is_shared = planned.resolved(dtype, place), planned.saves == "input"
        if not is_shared:
            size = planned.operand("input", resolved.saved).bytes_per_element(dtype)
            is_shared = resolved.shared is not None
        is_saved = not (is_shared and id(model.get_submodule(name)) in sharers)
        if is_saved and layer.weight.requires_grad:
            yield size * layer.runtime.weight_state.shape[-1] * min(active, len(layers))


# Of FSDP2 #


def held_bytes(managed: list[ManagedParam], roots: set[int]) -> int:
    """Return the bytes that FSDP2 holds at once: see `Memory`."""
    passing, stay, gradients = [0], 0, [0]
    for params in by_group(managed):
        once = gathers_once(params[0], roots)
        size = sum(max(gathered_bytes(m, once)) for m in params)
        stay, passing = stay + size * once, [*passing, size * (not once)]
        trained = [m for m in params if m.registered.requires_grad]
        gradients.append(sum(m.global_shape.numel() * m.param_dtype.itemsize for m in trained))
    return stay + sum(sorted(passing)[-2:]) + max(gradients)


def by_group(managed: list[ManagedParam]) -> Iterable[list[ManagedParam]]:
    groups: dict[int, list[ManagedParam]] = defaultdict(list)
    for m in managed:
        groups[id(m.group)].append(m)
    return groups.values()


def gathers_once(m: ManagedParam, roots: set[int]) -> bool:
    return m.stays_unsharded_after_forward or (id(m.state) in roots and m.reshards_by_default)


def gathered_bytes(m: ManagedParam, once: bool) -> tuple[int, int]:
    """Return the (forward, backward) bytes of the all-gather output of one parameter.

    once:  the parameter stays unsharded between forward and backward.
    """
    local = m.local
    if not isinstance(local, FSDPHooks):
        return plain_bytes(m, once)
    state, quantizer = local.state, local.state.matrices[0].quantizer
    facts = cuts_of(m), m.global_shape, m.param_dtype
    wire = {d: wire_buffers(e, *facts) for d, e in quantizer.encodings.items()}

    def size(needs: frozenset[Direction]) -> int:
        directions = gathered_directions(quantizer, needs)
        return sum(gathered_size(wire[d], m.world_size) for d in directions)

    both = frozenset(Direction)
    if once:
        return size(both), 0
    return size(frozenset({ROWWISE})), size(both if state.recomputed else frozenset({COLUMNWISE}))


def plain_bytes(m: ManagedParam, once: bool) -> tuple[int, int]:
    rows = round_up(m.global_shape[0], m.world_size)
    size = rows * m.global_shape[1:].numel() * m.param_dtype.itemsize
    return size, 0 if once else size

# SPDX-License-Identifier: Apache-2.0
"""What layers that read one input share: its codes, and across ranks its gathers and the scatter of
its gradient."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..ops import opaque
from ..ops.reference import known
from ..storage import Storage
from ..tensor import torch_compat
from .autograd import REFUSED
from .call import Call
from .cut import SequenceCut
from .operands import buffers_of, keeps_key
from .transport import Gather, start_scatter

# Of one module, in eager mode #


class GatedInput(NamedTuple):
    """The parts of an input act(gate) * up; kind: `ops.norm.KINDS`."""

    gate: Tensor
    up: Tensor
    kind: int


@dataclass(eq=False)
class Handed:
    """What the module that computed an input hands over with it, until its forward ends.

    amaxes:  fp32, as the kernel that wrote x left them (`native.amaxes_like`); None: not known.
    grad_amaxes:  where the node of the gradient of y writes its amaxes.
    source:  where x has a shape and an autograd node, but no values (`fused.can_fuse_activation`).
    codes:   key -> codes of x, which the first layer that multiplies it leaves for the others.
    owner:   as in `shared_input`, of a cut x.
    """

    amaxes: Tensor | None = None
    source: GatedInput | None = None
    codes: dict[tuple, list[Tensor]] = field(default_factory=dict)
    grad_amaxes: Tensor | None = None
    owner: Tensor | None = None

    def shares_input(self, call: Call) -> bool:
        """Layers share what ranks gather of x. Amaxes of delayed scaling are of one layer."""
        is_gathered = call.axis is not None and call.axis.gathered_slot == "input"
        return self.owner is not None and is_gathered and not call.plan.input.delayed_directions


class HandedByInput:
    """`Handed` of a tensor that several layers of one module read, during its forward."""

    def __init__(self):
        self._x: Tensor | None = None
        self._version, self._handed = 0, Handed()

    def of(self, x: Tensor) -> Handed:
        version = 0 if x.is_inference() else x._version
        if self._x is not x or self._version != version:
            self._x, self._version, self._handed = x, version, Handed()
        return self._handed


# Of column layers whose input is cut along the sequence #


@dataclass(eq=False)
class _Backward:
    """Tensors of one backward: columnwise codes of all ranks, which `reads` layers have read; the
    sum of the dx of `summands` layers; once that sum is scattered, the function that waits."""

    columnwise: Gather | None = None
    reads: int = 0
    dx: Tensor | None = None
    summands: int = 0
    scattering: Callable[[], Tensor] | None = None

    def scatter(self, cut: SequenceCut) -> None:
        if self.dx is not None:
            self.scattering, self.dx = start_scatter(self.dx, cut), None


class SharedInput:
    """A cut input, which is gathered once for all layers that read it, as its dx is scattered once.

    saves:  what the backward gathers its columnwise codes from: "columnwise" or "rowwise" codes of
            this rank's rows, or its rows in high precision ("input").
    """

    def __init__(self, call: Call, cut: SequenceCut, device: torch.device):
        plan, hybrid = call.plan, call.plan.input
        call.check_travels("input", Direction if call.save else [ROWWISE], cut)
        self.cut, self._call, self._device = cut, call, device
        self.saved_direction = COLUMNWISE if plan.saves == "columnwise" else ROWWISE
        travels = plan.saves == "input" or cut.travels(hybrid.encodings[self.saved_direction])
        self.saves = plan.saves if travels else "input"
        self._readers = self._summands = 0
        # number of a backward -> its tensors: a hook may run a backward within another
        self._backwards = weakref.WeakValueDictionary[int, _Backward]()

    def encode(self, x: Tensor) -> tuple[Gather, list[Tensor]]:
        """Return the rowwise operands of the whole x, and what the backward saves.

        x:  this rank's rows [outer * chunk, K].
        """
        call, cut, self._dtype = self._call, self.cut, x.dtype
        key = call.key("input", x.shape[0], cut)
        passes = [[ROWWISE], [COLUMNWISE]] if call.save else [[ROWWISE]]
        self._statistics = call.statistics("input", x, passes, cut)
        saves_columnwise = call.save and self.saves == "columnwise"
        kept = [COLUMNWISE] if saves_columnwise else []
        gather = call.gather("input", x, [ROWWISE], key, self._statistics, cut, "forward", kept)
        if not call.save:
            return gather, []
        saved = [x] if self.saves == "input" else buffers_of(gather.local[self.saved_direction])
        if key is not None and keeps_key(call.plan.input, saves_columnwise):
            saved.append(key)
        return gather, saved

    def add_reader(self, wgrad: bool, dgrad: bool) -> None:
        """Count a layer that multiplied x, and whose backward will compute these."""
        self._readers += wgrad
        self._summands += dgrad

    def start_columnwise(self, saved: list[Tensor]) -> None:
        """Start to gather the columnwise codes, unless another layer has. saved: of `encode`."""
        backward = self._current_backward()
        if backward.columnwise is not None:
            return
        call, plan, cut = self._call, self._call.plan, self.cut
        key = None
        if keeps_key(plan.input, self.saves == "columnwise"):
            *saved, key = saved
        x = saved[0]
        if self.saves != "input":
            fmt, shape = plan.input.side(self.saved_direction).fmt, (cut.rows, cut.shape[-1])
            x = Storage.over(saved, fmt, self.saved_direction, shape, self._dtype)
        backward.columnwise = call.gather("input", x, [COLUMNWISE], key, self._statistics, cut)

    def columnwise(self, layout: str) -> EncodedMatrix:
        """Return the columnwise operand; the last layer that reads it frees it."""
        backward = self._current_backward()
        operands = known(backward.columnwise, "the gather of the shared input")
        backward.reads += 1
        if backward.reads >= self._readers:
            backward.columnwise = None
        return operands.take(COLUMNWISE, layout)

    def add(self, multiply: Callable[..., Tensor]) -> None:
        """Add a layer's dx, `multiply(out=, accumulate=)`; the last one starts the scatter."""
        dx = self._current_backward().dx
        if dx is None:
            self._set_sum(multiply())
        elif self._call.traced:
            self._set_sum(dx + multiply())
        else:
            self._set_sum(multiply(out=dx, accumulate=True))

    def _set_sum(self, dx: Tensor) -> None:
        backward = self._current_backward()
        backward.dx, backward.summands = dx, backward.summands + 1
        if backward.summands == self._summands:
            backward.scatter(self.cut)

    def exchange(self, layout: str, wgrad: bool, is_behind: bool, tensors: list) -> list[Tensor]:
        """What ranks exchange in the compiled backward of a layer, before its dgrad and behind.

        tensors:  what the forward saved for wgrad, or []; behind: the sum with its dx, or [].
        returns:  the sum without, or []; behind: buffers of the columnwise operand for wgrad.
        """
        if is_behind:
            for dx in tensors:
                self._set_sum(dx)
            return buffers_of(self.columnwise(layout)) if wgrad else []
        if tensors:
            self.start_columnwise(tensors)
        dx = self._current_backward().dx
        return [] if dx is None else [dx]

    def _current_backward(self) -> _Backward:
        """Return the backward that runs."""
        number = torch_compat.backward_number()
        if (backward := self._backwards.get(number)) is None:
            backward = self._backwards[number] = _Backward()
            torch_compat.hold_in_backward(backward)
        return backward

    def gradient(self) -> Tensor | None:
        """Return the sum over layers and ranks of this rank's rows of dx; None: none took part."""
        with self._call.running(self._device):
            backward = self._current_backward()
            backward.scatter(self.cut)  # where not every layer took part in this backward
            if backward.scattering is None:
                return None
            scattering, backward.scattering = backward.scattering, None
            dx = scattering().view(self.cut.shape).requires_grad_(torch.is_grad_enabled())
            return torch_compat.once_differentiable(lambda dx: dx, REFUSED, dx)


class _GatherInput(torch.autograd.Function):
    """x of this rank, whose gradient is what the layers leave with the `SharedInput`."""

    @staticmethod
    def forward(ctx, x, shared):
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx, _):
        return ctx.shared.gradient(), None


class Shared(NamedTuple):
    """A cut input for its layers. x: with the node of its gradient; others: of `encode`."""

    input: SharedInput
    x: Tensor
    operands: Gather
    saved: list[Tensor]


def shared_input(x: Tensor, owner: Tensor | None, call: Call) -> Shared | None:
    """Return the cut input that layers share; None if x is not cut.

    Layers that receive one tensor share it if their keys in `_SHARED` are equal. A key holds only
    what is the same on all ranks: not which products the guard moved.

    owner:  the tensor that several layers receive: x, or the DTensor over it; None: no other does.
    """
    axis, plan = call.axis, call.plan
    if axis is None or axis.gathered_slot != "input":
        return None
    source = x if owner is None else owner
    values = torch_compat.local_of(source)
    version = 0 if values.is_inference() else values._version
    key = version, x.dtype, x.requires_grad, plan.input, plan.saves, axis.group
    key += axis.sequence_dim, call.save, call.grad, call.require_native
    has_state = plan.input.is_stochastic or plan.input.delayed_directions
    # the autograd graph holds a leaf, which would never be freed
    is_held = source.is_leaf and source.requires_grad and not call.traced
    is_alone = owner is None or has_state or values.is_inference() or is_held
    stored_key, shared = _SHARED.get(source) or (None, None)
    if is_alone or shared is None or stored_key != key:
        cut_of = SequenceCut.of_whole if isinstance(source, DTensor) else SequenceCut.of_local
        cut = cut_of(tuple(source.shape), axis.cut_dim, axis.group, call.described("input"))
        rank_input = SharedInput(call, cut, x.device)
        with call.running(x.device), torch.no_grad():
            encoded = rank_input.encode(x.detach().reshape(-1, x.shape[-1]))
        shared = Shared(rank_input, _GatherInput.apply(x, rank_input), *encoded)
        if not is_alone:
            _SHARED[source] = key, shared
    return shared


# x, or the DTensor over it -> (key, `Shared`); an attribute of x would be copied with it
_SHARED = WeakIdKeyDictionary()
# id -> `SharedInput.exchange` of a layer that a compiled step runs, and whose node holds it
_READERS: weakref.WeakValueDictionary[int, functools.partial] = weakref.WeakValueDictionary()


def reader_of(shared: Shared, layout: str, call: Call) -> functools.partial:
    """Return what `Call.ranks` names by its id: a layer that reads x by a compiled step."""
    shared.input.add_reader(call.save, torch.is_grad_enabled() and shared.x.requires_grad)
    reader = functools.partial(shared.input.exchange, layout, call.save)
    return _READERS.setdefault(id(reader), reader)


step_exchange = opaque.define(
    "shared_input(int reader, bool is_behind, Tensor[] tensors) -> Tensor[]",
    lambda reader, *args: _READERS[reader](*args),
    lambda *_: [],
)

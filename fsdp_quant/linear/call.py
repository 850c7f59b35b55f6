# SPDX-License-Identifier: Apache-2.0
"""`Call`: what one call of a linear layer has besides x, weight and bias."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..encoded_matrix import EncodedMatrix
from ..formats import COLUMNWISE, Direction
from ..ops import native, opaque
from ..ops.dispatch import Statistics
from ..ops.reference import known
from ..quantizer import HybridQuantizer
from ..storage import Storage, to_layout
from ..tensor import torch_compat
from ..tensor.gathered_weight import gathered_directions
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState, values_of
from .cut import Name, SequenceCut, TensorParallel, text_of
from .operands import SLOTS, LocalOperands, given_storage, record_amaxes, slot_key, weight_operands
from .plan import GemmPlan, Resolved
from .transport import Gather, statistics_of

BySlot = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
NOTHING: BySlot = (), (), ()
StepRanks = tuple[str, bool, int, bool, bool, int, int]
NO_RANKS: StepRanks = "", False, -1, False, False, 1, 0


class Call(NamedTuple):
    """The plan, and the tensors that its products read and write besides their operands.

    save:          the backward needs x.
    step, ids:     int64 [5] (`context.STEP_FIELDS`) and [3] (`operands.slot_ids`), which key random
                   bits; None: nothing is rounded stochastically.
    state:         the weight's; None: of a plain tensor, or in a graph.
    guard, backward_guard:  fp32 [3, 2], to which products of each pass add what they lost
                   (`linear.guard`); None: they are not watched.
    factors:       of input, weight and grad_output: encode scales, fp32 [1] per delayed direction.
    histories:     likewise, the tensors in which amaxes are recorded; empty: nowhere, as in a
                   recomputation.
    axis:          how ranks share the layer; None: they do not.
    rank:          int64 [2], the data-parallel rank and the rank in the group of `axis`, so that
                   graphs of all ranks are alike; None: numbers of the host.
    weight_group:  ranks that share the amax of the whole weight; None: they do not.
    codes:         what is multiplied in place of the weight (`fq.hold` in graphs).
    traced:        a graph is built: the products are recorded as functional operators.
    grad:          a backward may follow.
    name:          of the layer, in errors; a function where a graph must not depend on it.
    require_native:  refuse codes that cannot be gathered.
    wgrad:         takes the product of the wgrad (`linear.weight_gradient`), and returns what
                   autograd is given; None: autograd is given the gradient.
    ranks:         of a compiled step: group name, column, sequence_dim or -1, reduces (`axis`),
                   whether there is a `weight_group`, in how many pieces y is scattered, and id of
                   a layer (`reader_of`) or 0; NO_RANKS: none serves the ranks.
    """

    plan: GemmPlan
    save: bool
    step: Tensor | None = None
    ids: Tensor | None = None
    state: WeightState | None = None
    guard: Tensor | None = None
    backward_guard: Tensor | None = None
    factors: BySlot = NOTHING
    histories: BySlot = NOTHING
    axis: TensorParallel | None = None
    rank: Tensor | None = None
    weight_group: dist.ProcessGroup | None = None
    codes: QuantizedTensor | None = None
    traced: bool = False
    grad: bool = False
    name: Name = ""
    require_native: bool = False
    wgrad: Callable[[functools.partial[Tensor]], Tensor | None] | None = None
    ranks: StepRanks = NO_RANKS

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Run the program: outside autocast, as operators of a graph if one is built."""
        with opaque.tracing(self.traced), torch_compat.without_autocast(device):
            yield

    def tensors(self) -> list[Tensor]:
        """The tensors that stay the same in every step."""
        by_slot = [t for tensors in (*self.factors, *self.histories) for t in tensors]
        single = self.step, self.ids, self.rank, self.guard, self.backward_guard
        return [t for t in (*single, *by_slot) if t is not None]

    # Quantizing #

    def by_direction(self, slot: str) -> dict[Direction, Tensor]:
        """The encode scales of a slot's delayed directions."""
        return dict(zip(self.plan.hybrid(slot).delayed_directions, self.factors[SLOTS.index(slot)]))

    def key(
        self, slot: str, rows: int, cut: SequenceCut | None = None, after: Tensor | None = None
    ) -> Tensor | None:
        """Return `slot_key` of all ranks' rows. rows: of this rank, where `cut` is None."""
        if not self.plan.hybrid(slot).is_stochastic:
            return None
        if self.step is None or self.ids is None:
            raise ValueError("a graph that rounds stochastically reads no step")
        step = self.step if self.rank is None else torch.cat((self.step[:-1], self.rank[:1]))
        rows = rows if cut is None else cut.rows * cut.ranks
        return slot_key(self.plan, slot, step, self.ids, rows, after)

    def statistics(
        self,
        slot: str,
        x: Tensor,
        passes: Sequence[Sequence[Direction]],
        cut: SequenceCut | None = None,
    ) -> dict[Direction, Statistics]:
        """Return statistics of x [rows, cols] that ranks with other rows or columns share.

        passes:  directions that are gathered together, where x is cut along the sequence.
        """
        hybrid, axis, group = self.plan.hybrid(slot), self.axis, None
        if cut is not None:
            passes, group = [p for p in passes if cut.all_travel(hybrid, p)], cut.group
        elif axis is not None and slot == axis.cut_slot:
            group = axis.group
        directions = [d for gathered in passes for d in gathered]
        return statistics_of(hybrid, x, directions, group, cut is not None)

    def operands(
        self,
        slot: str,
        x: Tensor,
        directions: Sequence[Direction],
        key: Tensor | None,
        statistics: dict[Direction, Statistics],
    ) -> LocalOperands:
        """Return the operands of x [rows, cols]: quantized here, or of the codes that it holds.

        key:  of its rows (`key`). statistics: as in `HybridQuantizer.operands`.
        """
        plan, factors = self.plan, self.by_direction(slot)
        layouts = plan.resolved(x.dtype, x.device).layouts[slot] if x.numel() else {}
        if isinstance(x, QuantizedTensor):
            codes = {d: given_storage(plan, slot, x, d) for d in directions}
            laid_out = {d: to_layout(s, layouts[d]) if layouts else s for d, s in codes.items()}
            return LocalOperands(laid_out, {})
        return LocalOperands(
            *plan.hybrid(slot).operands(
                x, directions, key=key, factors=factors, layouts=layouts, statistics=statistics
            )
        )

    def gather(
        self,
        slot: str,
        x: Tensor | Storage,
        directions: Sequence[Direction],
        key: Tensor | None,
        statistics: dict[Direction, Statistics],
        cut: SequenceCut,
        phase: str = "backward",
        kept: Sequence[Direction] = (),
    ) -> Gather:
        """Return the operands of all ranks' rows, gathered from now on; arguments as of `Gather`.

        x:  this rank's rows [rows, cols], or codes of them.
        """
        plan, data = self.plan, x.data if isinstance(x, Storage) else x
        return Gather(
            x,
            plan.hybrid(slot),
            directions,
            cut,
            phase,
            key=key,
            factors=self.by_direction(slot),
            statistics=statistics,
            rank=None if self.rank is None else self.rank[1],
            layouts=plan.resolved(x.dtype, data.device).layouts[slot] if data.numel() else {},
            kept=kept,
        )

    def quantize(
        self, slot: str, x: Tensor, directions: Sequence[Direction], cut: SequenceCut | None
    ) -> LocalOperands | Gather:
        """Return the operands in the backward, with statistics and a key of their own."""
        statistics = self.statistics(slot, x, [directions], cut)
        key = self.key(slot, x.shape[0], cut, x if self.traced else None)
        if cut is None:
            return self.operands(slot, x, directions, key, statistics)
        return self.gather(slot, x, directions, key, statistics, cut)

    def record(self, slot: str, amaxes: dict[Direction, Tensor]) -> None:
        """Record amaxes of a slot's delayed directions in its histories."""
        record_amaxes(self.histories[SLOTS.index(slot)], self.plan.hybrid(slot), amaxes)

    def watch(self, resolved: Resolved, product: int) -> native.Watch | None:
        """Return where a product adds what it lost; None: it is not watched."""
        guard = self.backward_guard if product else self.guard
        counted = native.packed_counts(resolved.watched[product])
        if guard is None or not counted:
            return None
        apart = not self.traced or torch_compat.is_recomputed_in_graph()
        return native.Watch(counted, known(self.step, "the step"), guard, product, apart)

    def described(self, tensor: str) -> Name:
        """Return a name for a tensor of the layer, in errors."""
        return lambda: f"{text_of(self.name)} {tensor}"

    def weight_operands(
        self,
        weight: Tensor,
        directions: Sequence[Direction],
        dtype: torch.dtype,
        statistics: dict[Direction, Statistics],
    ) -> dict[Direction, EncodedMatrix]:
        """Return `operands.weight_operands`; statistics: of the whole weight, which are added."""
        source = weight if self.codes is None else self.codes
        slot = SLOTS.index("weight")
        if self.traced and COLUMNWISE in directions and not isinstance(source, QuantizedTensor):
            # an expression of its own, for the partitioner: else it would save codes of the forward
            source = values_of(source).clone()
        return weight_operands(
            source,
            directions,
            self.plan,
            dtype,
            self.state,
            self.factors[slot],
            self.histories[slot],
            self.weight_group,
            statistics,
        )

    def check_travels(self, slot: str, directions: Collection[Direction], cut: SequenceCut) -> None:
        """Raise ValueError, on every rank, for a high-precision gather under `require_native`."""
        if self.require_native:
            check_travels(self.name, self.plan.hybrid(slot), slot, directions, cut)


def check_travels(
    name: Name,
    hybrid: HybridQuantizer,
    slot: str,
    directions: Collection[Direction],
    cut: SequenceCut,
) -> None:
    """Raise ValueError, on every rank, for codes of `slot` that cannot be gathered."""
    encodings = [hybrid.encodings[d] for d in gathered_directions(hybrid, frozenset(directions))]
    crossing = next((e for e in encodings if not cut.travels(e)), None)
    if crossing is None:
        return
    fmt, rows = crossing.fmt, crossing.fmt.row_alignment(crossing.direction)
    raise ValueError(
        f"{text_of(name)}: {slot}.{crossing.direction.value} ({fmt}) has blocks of {rows} rows, "
        f"and a rank's piece of the sequence is {cut.outer} x {cut.chunk} rows, so {slot} would be "
        "gathered in high precision, and require_native=True; make the rows a rank has a multiple "
        f"of {rows} (sequence first, or one sequence, where it is rounded stochastically), or drop "
        "require_native"
    )

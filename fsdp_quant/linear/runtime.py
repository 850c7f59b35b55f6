# SPDX-License-Identifier: Apache-2.0
"""`LayerRuntime`: everything that a quantized layer holds besides its parameters.

The layer creates it once (`Linear.make_quantized`). Others read it, and change it by its methods:
`set_recipe` and `move_to` (another plan), `set_weight_state`, `share_input_of`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..context import STEP
from ..formats import Direction
from ..ops.capability import arch_of
from ..quantizer import FLOATING
from ..recipe import Recipe, Schedule, as_recipe
from ..roles import QUANTIZED_TYPES as SLOTS
from ..roles import slot_ids
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import set_formats
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .boundary import BoundaryIds
from .cut import TensorParallel
from .guard import backward_guard_of, guard_of
from .operands import lay_out_frozen
from .passes import Runtime
from .plan import GemmPlan, build_plan
from .root_context import forward_begins
from .shared_input import HandedByInput
from .weight_gradient import Waiting

NO_HISTORIES: tuple[list[Tensor], list[Tensor]] = [], []


class LayerRuntime(Runtime):
    """Plan, recipe, weight state, random ids, histories and guard of one layer.

    name:          keys random bits, names the layer in errors.
    module_type:   of its roles (`Role.module_type`).
    plan:          formats and rungs of its three GEMMs; also of `weight_state`, whose gathers lay
                   codes out for it.
    ids:           int64 [3] (`slot_ids`), on the device that asked last.
    graphs:        the tensors that compiled graphs of the layer receive.
    handed_by_input:  codes that layers of one module share, during the forward of that module.
    guard, backward_guard, guard_owner: as in `guard.GuardedLayer`.
    rule:          pattern of `per_layer` that chose its recipe, as `fq.plan` prints it.
    schedule:      of the recipes of its model, which ranks compare; None: it follows none.
    frozen:        reference to the layer, whose weight `fq.freeze` encoded, or did once (torch
                   swaps no tensor that has references).
    reads_rowwise: the weight keeps its rowwise codes alone, and the backward multiplies them.
    last_run:      `counters.epoch` of the last forward in eager mode.
    chosen:        somebody gave the layer its recipe; False: `fq.convert` will.
    waiting:       wgrads that wait for `backward_dw`.
    """

    rule: str | None = None
    schedule: Schedule | None = None
    frozen: weakref.ref[Any] | None = None
    reads_rowwise = False
    last_run = -1
    chosen = True

    def __init__(
        self,
        name: str,
        module_type: str,
        recipe: Recipe | str,
        device: torch.device,
        guard_owner: LayerRuntime | None = None,
    ):
        self.name, self.module_type = name, module_type
        self.guard: Tensor | None = None
        self.backward_guard: Tensor | None = None
        self.guard_owner = guard_owner
        self.handed_by_input: HandedByInput | None = None
        self.recipe = as_recipe(recipe, name, Recipe)
        self.plan = self.plan_of(self.recipe, device)
        self._make_tensors()

    def _make_tensors(self) -> None:
        """Allocate what no file holds."""
        self.input_owner: weakref.ref[LayerRuntime] | None = None
        self.graphs = GraphTensors()
        self.ids = slot_ids(self.name)
        self.boundary_ids = BoundaryIds(self.name)
        self.waiting = Waiting(self.name)

    def __getstate__(self) -> dict:
        not_saved = "graphs input_owner boundary_ids ids frozen schedule waiting".split()
        return {k: v for k, v in self.__dict__.items() if k not in not_saved}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._make_tensors()

    # Plans #

    def plan_of(self, recipe: Recipe, device: torch.device) -> GemmPlan:
        """The plan that the layer would have of a recipe. Raises as `build_plan`."""
        plan = build_plan(recipe, self.name, arch_of(device), self.module_type)
        return plan.over_rowwise if self.reads_rowwise else plan

    def set_recipe(self, recipe: Recipe, device: torch.device) -> None:
        """Plan the GEMMs on `device`, on their first rungs. `GraphTensors.prepare` follows."""
        self.recipe, self.chosen = recipe, True
        self.set_plan(replace(self.plan_of(recipe, device), alone=self.plan.alone))

    def keep_rowwise(self, layer: Any, kept: bool, managed: Mapping[int, Any]) -> None:
        """Plan for a weight that keeps its rowwise codes alone (`fq.freeze`), or has both
        directions. managed: as of `set_formats`."""
        self.frozen, self.reads_rowwise, device = weakref.ref(layer), kept, layer.weight.device
        plan = replace(self.plan_of(self.recipe, device), alone=self.plan.alone)
        self.set_plan(plan.moved_to(self.plan.moved))
        set_formats(self.weight_state, self.plan, managed)
        self.graphs.prepare(self, device)

    def set_plan(self, plan: GemmPlan) -> None:
        """Multiply by this plan; the next gather of the weight lays its codes out for it."""
        self.plan = plan
        WeightState.formats_set += 1
        if plan.weight == self.weight_state.quantizer:  # else of a context (`root_context`)
            self.weight_state.plan = plan
        layer = None if self.frozen is None else self.frozen()
        if layer is not None and type(layer.weight) is QuantizedTensor:
            lay_out_frozen(layer.weight, plan)

    def move_to(self, rungs: Mapping[str, str]) -> None:
        """Product name -> rung of `plan`; others: the first."""
        self.set_plan(self.plan.moved_to(rungs))

    @property
    def is_shared(self) -> bool:
        """Ranks or groups of tokens share tensors of its products."""
        return not self.plan.alone or self.weight_state.part[1] > 1

    # The weight's state #

    def set_weight_state(self, state: WeightState) -> None:
        self.weight_state = state
        state.plan, state.forward_begins = self.plan, forward_begins

    def histories(
        self,
        plan: GemmPlan,
        slot: str,
        device: torch.device | None,
        before: Mapping[Direction, AmaxHistory] | None = None,
    ) -> list[AmaxHistory]:
        """Amax histories of a slot's delayed sides, on `device` (None: where they are). before: as
        of `WeightState.history`."""
        hybrid, layer = plan.hybrid(slot), self
        if slot == "input" and self.input_owner is not None:
            layer = self.input_owner() or self
        state = layer.weight_state
        name = state.name if slot == "weight" else layer.name
        found = [
            state.history(name, slot, d, hybrid.side(d), before) for d in hybrid.delayed_directions
        ]
        return found if device is None else [history.on(device) for history in found]

    def planned_histories(self, slot: str) -> dict[Direction, AmaxHistory]:
        """Amax histories of a slot's delayed directions in the layer's own plan."""
        directions = self.plan.hybrid(slot).delayed_directions
        return dict(zip(directions, self.histories(self.plan, slot, None)))

    def share_input_of(self, first: LayerRuntime) -> None:
        """Record amaxes of the input in the histories of `first`, which has the same input."""
        self.input_owner = weakref.ref(first)
        self.graphs.prepare(self)

    # Devices #

    def ids_on(self, device: torch.device) -> Tensor:
        if device.type == "meta":  # the values stay where they are
            return self.ids.to(device)
        if self.ids.device != device:
            with torch.inference_mode(False):
                self.ids = self.ids.to(device)
        return self.ids


# A graph reads a module's tensors, never its name or number, so one graph serves equal layers.
# dynamo guards every string that it formats: names of layers are formatted in errors alone. Each
# input of a graph costs the host (dynamo guards it, AOTAutograd unwraps it): what no byte depends
# on (`GemmPlan.needs_steps`) is not given. An input may be written in the forward and in the
# backward only where no argument is a tensor subclass: so the guard has two tensors. Tracing
# registers nothing: what a traced function puts into a dict is there only when the graph is done.
class GraphTensors:
    """Tensors that compiled graphs of a layer read besides its operands, the same in every step.

    `prepare` allocates them, when the plan or the device changes; tracing does not.

    ids:      int64 [3] (`slot_ids`); of a layer that ranks share, those of this rank's part.
    rank:     int64 [2] of a layer that ranks share: its data-parallel rank, its rank in the group.
    guards:   [forward's, backward's] guard (`linear.guard`); [] where nothing is watched.
    delayed:  `histories_key` of a plan -> encode scales and amax histories, of all slots.
    codes:    of the weight, inside `fq.hold`; None: graphs quantize it.
    has_columnwise:  a backward may read `codes`.
    """

    ids: Tensor
    rank: Tensor | None
    guards: list[Tensor]
    delayed: dict[str, tuple[list[Tensor], list[Tensor]]]
    codes: QuantizedTensor | None = None
    has_columnwise = False

    def prepare(self, layer: LayerRuntime, device: torch.device | None = None) -> None:
        """Allocate the tensors for the plan and the weight's state. device: None: as before."""
        if device is None or device.type == "meta":
            device = layer.ids.device
        plan, state, self.codes = layer.plan, layer.weight_state, None
        step, group = STEP.prepare(device), state.tensor_group
        self.ids, self.guards, self.rank = layer.ids_on(device), [], None
        if group is not None and torch_compat.is_named(group) and group.size() > 1:
            axis = TensorParallel(group, state.tensor_dim == 0)
            self.ids = axis.slot_ids(layer.name, state.shape, device)
            with torch.inference_mode(False):
                self.rank = torch.tensor(
                    [axis.data_parallel_rank, group.rank()], dtype=torch.int64, device=device
                )
        executed = {of for dtype in FLOATING for of in (plan, plan.on(dtype, device))}
        # which asks C++, now and not in a trace
        resolved = [of.resolved(dtype, device) for of in executed for dtype in FLOATING]
        if any(of.is_watched for of in resolved):
            self.guards = [guard_of(layer, device), backward_guard_of(layer, device)]
        found = [h for slot in SLOTS for h in layer.histories(plan, slot, device)]
        scales, amaxes = [h.encode_scale for h in found], [h.amaxes for h in found]
        self.delayed = {plan.histories_key: (scales, amaxes)}
        if layer.steps is not None and layer.steps.is_counting:
            layer.steps.counts_on(device)
        kept = [step, self.ids, *self.guards, *scales, *amaxes]
        torch_compat.mark_static_address(kept if self.rank is None else [*kept, self.rank])

# SPDX-License-Identifier: Apache-2.0
"""`fq.GroupedLinear`: a linear layer an expert, over tokens that are sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..context import STEP, contexts, current_autocast
from ..counters import counters
from ..formats import ROWWISE, Direction
from ..migration import answers_keywords
from ..ops import native
from ..ops.capability import Place, arch_of
from ..ops.rng import own_name
from ..options import flag, integer
from ..recipe import Recipe, as_recipe, identity
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.root_statistics import check_model_of
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import WeightState
from .bad_splits import new_tag, raise_bad_splits
from .base import plan_of_recipe
from .grouped import GroupedCall, may_fuse_swiglu, reads_routes, sizes_of, unsupported_reason
from .grouped_autograd import run_experts, with_values
from .grouped_ops import traced_experts
from .has_weight import HasWeight, plain_in_state_dict, register_weight, whole_shape
from .linear import EXPERT, Expert, Linear, ListedExpert
from .passes import LOOSE, SCHEDULED, SHARED
from .plan import PRODUCTS, GemmPlan, ladder_of
from .routes import ALONE, Around, Routes, check_routes, combine, dispatch, tokens_of
from .runtime import NO_HISTORIES
from .training_steps import backward_dw, note_traced

Splits = Sequence[int] | Tensor


def _of_experts(option: str) -> property:
    """An option of `fq.Linear` that every expert has."""

    def give(self: GroupedLinear, value: bool) -> None:
        for layer in self._linears:
            setattr(layer, option, value)

    return property(lambda self: getattr(self.first, option), give)


@answers_keywords
class GroupedLinear(HasWeight):
    """y[rows of e] = x[rows of e] W[e]^T + b[e] for experts e, in the formats of a recipe.

    packed:  False: `experts`, a list of `fq.Linear`. True: one `weight` [E, N, K] and one `bias`
             [E, N]; FSDP2 cuts it between experts, and gathers each expert's codes whole.
    recipe:  `Recipe`; change it with `fq.set_recipe`. The role of expert e is called
             "name.experts.e", or "name.e" of packed weights.

    Every expert quantizes its own tokens: a call gives what a loop over `fq.Linear` modules gives.
    On a GPU one product serves all experts where no scale serves tokens of two
    (`grouped.unsupported_reason`, printed by `fq.plan`): of codes on sm_90, elsewhere of their
    values, which `require_native` refuses.

    fuse_wgrad_accumulation, delay_wgrad_compute:  as of `fq.Linear`. The experts then run one after
             another, outside graphs, and the host reads splits that are a tensor.
    first_expert:  this rank's first, where ranks hold experts each of a packed DTensor.

    >>> experts = fq.GroupedLinear(4, 64, 32, recipe=fq.recipes.mxfp8())
    >>> experts(torch.ones(10, 64), [3, 0, 5, 2]).shape
    torch.Size([10, 32])
    """

    first_expert = 0
    packed = False
    _linears: list[Linear]
    _packed_state: WeightState
    _planned: tuple[tuple, GemmPlan | None]  # of the layers in their present formats
    _ahead: tuple | None = None  # of `begin_ahead`; (): the last call was one product

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        packed: bool = False,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ):
        name = own_name(name, "grouped_linear")
        super().__init__()
        num_experts = integer(1).read(f"{name}: num_experts", num_experts)
        in_features = integer(1).read(f"{name}: in_features", in_features)
        out_features = integer(1).read(f"{name}: out_features", out_features)
        flag().read(f"{name}: packed", packed)
        expert_recipe = as_recipe(recipe or identity(), name, Recipe)
        if packed:
            shape = num_experts, out_features, in_features
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            biases = torch.empty(shape[:2], device=device, dtype=dtype) if bias else None
            self.register_parameter("bias", None if biases is None else nn.Parameter(biases))
            bound = in_features**-0.5  # as nn.Linear
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.uniform_(-bound, bound)
            self.adopt_packed([expert_recipe] * num_experts, name)
        else:
            expert = functools.partial(
                ListedExpert, in_features, out_features, bias, device, dtype, recipe=expert_recipe
            )
            self._linears = [expert(name=f"{name}.experts.{e}") for e in range(num_experts)]
            self.experts = nn.ModuleList(self._linears)
            self.finish_experts(name)
        for layer in self._linears:
            layer.runtime.chosen = recipe is not None
        self.fuse_wgrad_accumulation = flag().read(
            f"{name}: fuse_wgrad_accumulation", fuse_wgrad_accumulation
        )
        self.delay_wgrad_compute = flag().read(f"{name}: delay_wgrad_compute", delay_wgrad_compute)

    # a packed weight has one `main_grad` [E, N, K]
    fuse_wgrad_accumulation = _of_experts("fuse_wgrad_accumulation")
    delay_wgrad_compute = _of_experts("delay_wgrad_compute")

    backward_dw = backward_dw

    def adopt_packed(self, recipes: Sequence[Recipe], name: str) -> None:
        """Give a module with packed weights a layer per expert, over views of the weight.

        The optimizer holds one parameter, so the states of all experts share its histories.
        """
        if "bias" not in self._parameters:
            vars(self).pop("bias", None)
            self.register_parameter("bias", None)
        self.packed = True
        self.take_packed(recipes, name)
        self.register_state_dict_post_hook(plain_in_state_dict)

    def take_packed(self, recipes: Sequence[Recipe], name: str) -> None:
        """Give the packed weight its states and wrapper, and each of this rank's experts its layer.

        recipes:  of all experts.
        """
        weight = self.matrices.detach()
        shape = tuple(weight.shape if self.transposed else whole_shape(self.weight))
        self._linears = []
        self._packed_state = state = WeightState(
            f"{name}.weight", None, shape, recipes[0].compute_dtype
        )
        register_weight(self)
        group = state.tensor_group
        self.first_expert = 0 if group is None else group.rank() * shape[0]
        first = None
        for e, recipe in enumerate(recipes[self.first_expert :][: shape[0]], self.first_expert):
            layer = Expert(weight, recipe, f"{name}.{e}", EXPERT, first)
            first = first or layer
            part = layer.runtime.weight_state
            part.histories, part.recomputed = state.histories, state.recomputed
            layer.prepare_graphs()
            state.packed.append(part)
            self._linears.append(layer)
        self._take_parts()
        self.finish_experts(name)

    def _take_parts(self) -> None:
        """Let the layers of a packed weight find it."""
        for e, layer in enumerate(self._linears):
            if isinstance(layer, Expert) and "weight" in self._parameters:
                layer.part_of(self, e)

    def finish_experts(self, name: str) -> None:
        """Set what is planned for all experts together."""
        self._name, self._planned = name, ((), None)
        for layer in self._linears:
            layer.runtime.set_plan(replace(layer.plan, alone=False))
        self._tag = new_tag(self)
        self._choose_for_graphs()

    @property
    def _weight_state(self) -> WeightState:
        return self._packed_state

    def set_weight_state(self, state: WeightState) -> None:
        self._packed_state = state

    @property
    def matrices(self) -> Tensor:
        """The packed weight as products multiply it, [E, N, K]."""
        return self.weight.mT if self._is_stored_transposed else self.weight

    @property
    def _is_stored_transposed(self) -> bool:
        """The weight is values [E, K, N]: codes of `fq.freeze` are [E, N, K]."""
        return self.transposed and not isinstance(local_of(self.weight), QuantizedTensor)

    @property
    def held(self) -> tuple[Tensor, Tensor | None]:
        """Packed weight and bias of this rank's experts; DTensors while they are sharded."""
        weight, bias = self.matrices, self.bias
        is_cut = self._packed_state.tensor_group is not None
        if not (isinstance(weight, DTensor) and is_cut and weight.device_mesh.ndim == 1):
            return weight, bias
        if isinstance(bias, DTensor):
            bias = torch_compat.to_local(bias)
        return torch_compat.to_local(weight), bias

    @property
    def first(self) -> Linear:
        """The layer of this rank's first expert."""
        return self._linears[0]

    @property
    def layers(self) -> Sequence[Linear]:
        """The `fq.Linear` of each expert; without values while the weight is sharded."""
        return self._linears

    _matrix_layers = layers

    def values_of(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one, without gradients; of a sharded weight the shard."""
        with torch.no_grad():
            weight, bias = self.held
            if isinstance(weight, DTensor):
                return weight.detach(), None
            return weight[expert], None if bias is None else bias[expert]

    @property
    def owners(self) -> Sequence[HasWeight]:
        """Modules whose weights one product for all reads: this one, packed, or each expert."""
        return [self] if self.packed else self._linears

    def fuses_swiglu(self, rows: Tensor) -> bool:
        """Whether kernels quantize SwiGLU of rows [M, N] of y where nobody sees values."""
        first, fits = self.first, self._goes_into_graphs and self.bias is None
        shape = len(self.layers), first.out_features, first.in_features
        key = first.plan_here(rows.device).key
        return fits and may_fuse_swiglu(key, rows.dtype, rows.device, shape)

    def _operand(self, owner: HasWeight) -> tuple[Tensor, Tensor | None]:
        return self.held if owner is self else (owner.weight, owner.bias)

    def forward(
        self, x: Tensor, splits: Splits, routes: Routes = (), around: Around = ALONE
    ) -> Any:
        """y [.., N] of x [.., K], whose rows are sorted by expert.

        splits:  number of rows of each expert, on the host; or int tensor [E], the row behind each
                 expert's last (the `offs` of `torch._grouped_mm`), which is not read where one
                 product serves all experts.
        routes:  of tokens x [T, K] that k experts each multiply: int64 `order` [T * k] and `back`
                 [T, k]. Row r of y [T * k, N] is of x[order[r] // k], and back[t] are the rows of
                 token t. Empty: x has the rows.
        around:  of packed experts (`grouped_autograd.run_experts`).

        Given a tensor, experts are two operators in compiled graphs, but those that
        `_outside_graphs` lists: these run between graphs, and `fullgraph=True` is refused.

        Raises ValueError for splits that are not of E experts or do not add up to the rows: now
        where they are on the host, else before an optimizer step or in a later call; for routes of
        other tokens; and for x that is codes.
        """
        if isinstance(x, QuantizedTensor):
            raise ValueError(
                f"{self._name}: x is codes {list(x.shape)}; wanted values, which each expert "
                "quantizes: give x.dequantize()"
            )
        if self.transposed:
            check_model_of(self, "weight")
        is_compiling, first = torch.compiler.is_compiling(), self._linears[0]
        if is_compiling and not first.returns_wgrad:
            return self._outside_graphs(x, splits, routes, around)
        if is_compiling and isinstance(splits, Tensor):
            refused = DTensor if self.packed else (DTensor, QuantizedTensor)
            is_refused = any(isinstance(o.weight, refused) for o in self.owners)
            if is_refused or not self._goes_into_graphs:
                return self._outside_graphs(x, splits, routes, around)
            plan, is_keyed = self.first.plan_here(self.owners[0].weight.device), self._is_keyed
            if (override := current_autocast()) is not None:
                same, is_keyed = _is_for_all(override.recipe.key, self._names, arch_of(x.device))
                if not same or plan.boundary is not None:
                    return self._outside_graphs(x, splits, routes, around)
            return self._in_graph(x, splits, plan, is_keyed, routes, *around)
        y = self._multiplied(x, splits, routes, around, is_compiling)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _multiplied(
        self, x: Tensor, splits: Splits, routes: Routes, around: Around, is_traced: bool
    ) -> Any:
        """y [M, N], of one product for all experts, or of one for each."""
        if not is_traced:
            raise_bad_splits()
        first, operand = self.first, self._operand(self.owners[0])
        rows = first.checked(x, operand[0]).reshape(-1, first.in_features)
        check_routes(self._name, len(rows), routes)
        sizes = self._sizes(splits, routes[0] if routes else rows)
        plan, reason = (None, None) if is_traced else self._plan_of_one(rows)
        if routes and (plan is None or not reads_routes(plan, rows)):
            rows, routes = dispatch(rows, *routes), ()
        begun = self._begun(plan, rows)
        if plan is not None:
            held = [operand, *(self._operand(owner) for owner in self.owners[1:])]
            weights, biases = [w for w, _ in held], [b for _, b in held if b is not None]
            call = begun or self._call(plan, rows, held)
            if not isinstance(sizes, Tensor):
                sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0)
            ends = sizes if sizes.dtype in (torch.int32, torch.int64) else sizes.int()
            ends = ends.to(rows.device, non_blocking=True)
            vars(self)["_ahead"] = ()  # nn.Module's own way to set attributes is slow
            call = call._replace(tokens=tokens_of(*routes)) if routes else call
            return run_experts(call, plan, rows, ends, weights, biases, routes, around)
        if isinstance(sizes, Tensor):
            departure = f"waits for the device to tell the token splits: {reason}"
            counters.add("departure", (self._name, departure))
            sizes = self._checked(sizes_of([0, *sizes.tolist()]), len(rows))
        swiglu, of_rows, of_routes = around
        rows = rows if isinstance(swiglu, bool) else with_values(rows, *swiglu)
        y = torch.cat(self._one_by_one(rows.split(sizes)))
        if swiglu is True:
            return y, None
        return combine(y, of_rows[1], of_routes) if of_rows else y

    def _plan_of_one(self, rows: Tensor) -> tuple[GemmPlan | None, str | None]:
        """Return the plan of one product for all experts; or None, and why there is none."""
        if not self.first.returns_wgrad:
            return None, "fuse_wgrad_accumulation or delay_wgrad_compute is set"
        plan, here = self.common_plan, contexts()
        if here.autocast is not None or here.batch_invariant:
            plans = [layer.plan_here(rows.device) for layer in self._linears]
            plan = plans[0].of_groups if all(p.key == plans[0].key for p in plans) else None
        if plan is None or torch_compat.dispatch_is_watched() or not len(rows):
            return None, "experts differ, or it is compiled or of no tokens"
        reason = self.unsupported_reason(rows.dtype, rows.device, plan)
        return (plan, None) if reason is None else (None, reason)

    def _one_by_one(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.owners[0] is not self:
            return [layer(part) for layer, part in zip(self._linears, parts)]
        weight, bias = self.held
        biases = [None] * len(parts) if bias is None else bias.unbind()
        operands = zip(self._linears, parts, weight.unbind(), biases)
        return [layer.times(part, matrix, vector) for layer, part, matrix, vector in operands]

    def _in_graph(
        self, x: Tensor, ends: Tensor, plan: GemmPlan, is_keyed: bool, *of_call: Any
    ) -> Any:
        first, grad = self._linears[0], torch.is_grad_enabled()
        weights: list[Tensor] = [owner.weight for owner in self.owners]
        biases: list[Tensor] = [b for b in (o.bias for o in self.owners) if b is not None]
        rows = first.checked(x, weights[0]).reshape(-1, first.in_features)
        save = grad and any(w.requires_grad for w in weights)
        y = traced_experts(
            rows,
            ends if ends.device == rows.device else ends.to(rows.device),
            weights,
            biases,
            plan.key,
            first.recipe.require_native,
            self._is_stored_transposed,
            save,
            save or (grad and (self.training or x.requires_grad)),
            *self._graph_state(plan, is_keyed, rows.device),
            *of_call,
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _graph_state(
        self, plan: GemmPlan, is_keyed: bool, device: torch.device
    ) -> tuple[Tensor | None, list, list, list, list]:
        """Step, ids, guards, factors and histories of `traced_experts`."""
        first, factors, histories = self._linears[0], [], []
        note_traced(first, plan, device)
        if not plan.needs_steps:
            return None, [], [], [], []
        # dynamo guards, in each call, each expert that is read
        ids = [layer.runtime.graphs.ids for layer in self._linears] if is_keyed else []
        if plan.has_histories:
            of_all, key = [layer.runtime.graphs for layer in self._linears], plan.histories_key
            delayed = [of_one.delayed.get(key, NO_HISTORIES) for of_one in of_all]
            factors, histories = (
                [t for of_side in zip(*of_experts) for t in of_side] for of_experts in zip(*delayed)
            )
        return STEP.in_graph(device), ids, first.runtime.graphs.guards, factors, histories

    @torch.compiler.disable(
        reason="experts of fuse_wgrad_accumulation=True or delay_wgrad_compute=True run outside "
        "graphs; so do experts whose token splits are a tensor (give counts, a list) if their "
        "plans differ, a recipe has boundary slots, or a weight is a DTensor or codes of one expert"
    )
    def _outside_graphs(self, *args) -> Tensor:
        return self.forward(*args)

    @property
    def common_plan(self) -> GemmPlan | None:
        """The plan of one product for all, or None. What the guard moves for one moves for all."""
        if (WeightState.formats_set, *self._linears) == self._planned[0]:
            return self._planned[1]
        plans = {layer.plan.key: layer.plan for layer in self._linears}
        if len(plans) > 1 and any(plan.moved for plan in plans.values()):
            furthest = {
                p.name: max((plan.rung(p) for plan in plans.values()), key=ladder_of(p).index)
                for p in PRODUCTS
            }
            for layer in self._linears:
                layer.runtime.move_to(furthest)
            plans = {layer.plan.key: layer.plan for layer in self._linears}
        common = next(iter(plans.values())).of_groups if len(plans) == 1 else None
        self._planned = (WeightState.formats_set, *self._linears), common
        return common

    def unsupported_reason(
        self, dtype: torch.dtype, device: Place, plan: GemmPlan | None = None
    ) -> str | None:
        """Why no product serves all, in one clause; None: one does. plan: default, theirs."""
        plan, first, bias = plan or self.common_plan, self.first, self.owners[0].bias
        if plan is None:
            return "experts have different plans"
        if first.recipe.require_native and plan.decodes_groups(arch_of(device)):
            return "require_native=True: one product would be of decoded values"
        shape = len(self._linears), first.out_features, first.in_features
        return unsupported_reason(plan, dtype, device, shape, bias is not None)

    def _call(self, plan: GemmPlan, x: Tensor, held: Sequence[tuple]) -> GroupedCall:
        """Begin one product of rows like x. held: weight and bias of each owner."""
        layers = self._linears
        # calls are equal where no expert has histories or random bits of its own
        differ = plan.is_delayed or plan.is_keyed or bool(plan.weight.delayed_directions)
        calls = [
            layer.call(x, weight, bias, plan)
            for layer, (weight, bias) in zip(layers if differ else layers[: len(held)], cycle(held))
        ]
        states = [layer.runtime.weight_state for layer in layers]
        states[0].recomputed &= {states[0].name}  # of a packed weight it speaks for all
        holds = states[0].quantizer == plan.weight  # held codes are not of a context's recipe
        return GroupedCall.combined(calls, states if holds else [], len(layers), self._tag)

    def _facts(self, plan: GemmPlan, x: Tensor) -> tuple:
        weight, grad = self.weight, torch.is_grad_enabled()
        versions = [t.is_inference() or t._version for t in (weight, local_of(weight))]
        of_weight = id(weight), versions, weight.requires_grad
        offset = contexts().token_offset
        return plan.key, offset, x.dtype, of_weight, grad, grad and x.requires_grad

    def _begun(self, plan: GemmPlan | None, rows: Tensor) -> GroupedCall | None:
        """The call that `begin_ahead` began, if it is of that plan and those weights."""
        (facts, call), vars(self)["_ahead"] = self._ahead or (None, None), None
        if facts is None:
            return None
        if plan is not None and facts == self._facts(plan, rows):
            self.first.note_recomputation()  # begun outside of the checkpoint that recomputes this
            return call
        for layer in self._linears:
            layer.runtime.ran_in = None  # the pass that it began is this one
        return None

    def begin_ahead(self, x: Tensor) -> None:
        """Do the host's work of the next call, of other rows like x, and quantize a packed weight
        for it, if the last was a product for all, FSDP2 gathers no weight for it, and a gradient of
        x tells that a later layer's rows have one."""
        (plan, _), is_known = self._plan_of_one(x), x.requires_grad or not torch.is_grad_enabled()
        steps = self.first.runtime.steps or LOOSE.steps  # ranks without tokens begin it later
        leads = (SHARED or SCHEDULED) and not (steps.inside or steps.has_root)
        may = self._ahead == () and self.packed and not (leads or isinstance(self, FSDPModule))
        self._begun(None, x)  # of a forward that raised
        if plan is None or not (may and is_known) or isinstance((held := self.held)[0], DTensor):
            return
        call, facts = self._call(plan, x, [held]), self._facts(plan, x)
        if not isinstance(held[0], QuantizedTensor):
            directions = list(Direction) if facts[-1] else [ROWWISE]
            with torch.no_grad():
                call = call._replace(ahead=call.quantized(held[:1], directions, x.dtype))
        # no weight: its node would be older than FSDP2's of the forward
        vars(self)["_ahead"] = facts, call

    def _sizes(self, splits: Sequence[int] | Tensor, rows: Tensor) -> list[int] | Tensor:
        """Rows of each expert, or `splits` where only a device knows them."""
        if not isinstance(splits, Tensor):
            return self._checked(list(splits), len(rows))
        experts = len(self._linears)
        if splits.is_meta or torch_compat.is_fake():  # shapes do not depend on them
            return [len(rows), *[0] * (experts - 1)]
        if splits.shape != (experts,) or splits.is_floating_point() or splits.dtype is torch.bool:
            raise ValueError(
                f"{self._name}: splits is {splits.dtype} {list(splits.shape)}; wanted integers "
                f"[{experts}], the row behind each expert's last"
            )
        if splits.device.type != "cpu" or native.is_available_on(splits.device):
            return splits
        return self._checked(sizes_of([0, *splits.tolist()]), len(rows))

    def _checked(self, sizes: list[int], rows: int) -> list[int]:
        experts = len(self._linears)
        if len(sizes) != experts or any(size < 0 for size in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"{self._name}: splits give {sizes} rows to {len(sizes)} experts, {sum(sizes)} in "
                f"all; wanted {experts} counts, none negative, that add up to the input's {rows} "
                "rows: a list is counts, and a tensor is ends (the row behind each expert's last, "
                "torch's offs; those of counts are counts.cumsum(0))"
            )
        return sizes

    def _apply(self, fn, recurse: bool = True) -> GroupedLinear:
        applied = super()._apply(fn, recurse)
        self.prepare()
        return applied

    def prepare(self) -> None:
        """Allocate what graphs are given, after plans or the device changed."""
        device = next(self.parameters()).device
        self._choose_for_graphs()
        for layer in self._linears if self.packed else ():
            layer.runtime.graphs.prepare(layer.runtime, device)

    def _choose_for_graphs(self) -> None:
        """Set what decides a graph, since a trace computes no properties of plans."""
        plan, self._names = self.common_plan, tuple(m.runtime.name for m in self._linears)
        self._goes_into_graphs = plan is not None and plan.boundary is None
        self._is_keyed = plan is not None and plan.is_keyed

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_planned": ((), None)}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._take_parts()
        self._tag = new_tag(self)
        self.prepare()

    def extra_repr(self) -> str:
        sizes = f"{self.first.in_features} -> {self.first.out_features}"
        return f"{len(self._linears)} experts, {sizes}, packed={self.packed}"


@torch.compiler.assume_constant_result
def _is_for_all(key: str, names: tuple[str, ...], arch: str) -> tuple[bool, bool]:
    """Return whether experts have one plan of a recipe, and whether it keys random bits by
    expert."""
    plans = [plan_of_recipe(key, name, arch, EXPERT) for name in names]
    return len({plan.key for plan in plans}) == 1, plans[0].is_keyed
